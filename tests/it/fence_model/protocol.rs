//! The protocol: what there is, and every step that may come next.

use super::design::{Change, Design, Phase, Role, SESSIONS, TERMS, TRANSACTIONS};
use super::keys::Keys;
use super::step::{Kind, Step};

/// A session of a candidate that lives, and what its client has sent on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Session {
    at: At,
    role: Role,
    /// Which one its term key belongs to.
    term: u8,
    holds: Keys,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum At {
    /// Nothing is running. What it may hold was left by an error.
    #[default]
    Out,
    /// In the starting statement: the phase of the plan, and how far in it.
    Starting { phase: u8, done: u8 },
    /// In the starting statement, which has failed: it drops the barriers that it has.
    Refused,
    /// In the starting statement, when all is done and nothing sent.
    Started,
    /// It has all, and the answer was sent.
    Holding,
    /// In the releasing statement.
    Releasing,
}

impl At {
    /// A statement is running that an error may end.
    const fn is_running(self) -> bool {
        matches!(self, Self::Starting { .. } | Self::Refused | Self::Started | Self::Releasing)
    }
}

/// A transaction of a user, on a connection of its own, that is fenced by a term.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Transaction {
    at: Fenced,
    term: u8,
    has_barrier: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Fenced {
    /// There is none.
    #[default]
    None,
    /// In the fence, before the barrier.
    Barrier,
    /// In the fence, before the second try.
    Second,
    /// The fence has been passed.
    Open,
    Prepared,
    /// Over, one way or the other; its locks are still to be freed.
    Ended,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Term {
    is: Progress,
    role: Role,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Progress {
    #[default]
    Unborn,
    /// Its key was taken; nobody knows.
    Taken,
    /// The answer is on its way. It may take for ever, and outlive its session.
    Answered,
    /// The job runs, and fences transactions for as long as it likes.
    Started,
}

/// Everything.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct State {
    sessions: [Session; SESSIONS],
    /// What dead sessions hold still. Whose it was makes no difference, nor how many hold the same key shared.
    dead: Keys,
    transactions: [Transaction; TRANSACTIONS],
    terms: [Term; TERMS],
}

/// What must not happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// A fenced transaction of an older term commits when the job of a newer one, which excludes it, has started.
    LateCommit,
    /// A fence is told that its term is over, while the term's session lives and holds it.
    LivingTermRefused,
}

/// A step, where it leads, and whether it must not have been.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Move {
    pub(crate) step: Step,
    pub(crate) to: State,
    pub(crate) fault: Option<Fault>,
}

impl State {
    /// Sessions are alike, and so are transactions: states that differ only by their order are one.
    pub(crate) fn in_order(mut self) -> Self {
        self.sessions.sort_unstable();
        self.transactions.sort_unstable();
        self
    }

    /// Gives every step that may come next.
    pub(crate) fn moves(&self, design: Design) -> Vec<Move> {
        let mut moves = Moves { design, from: self, list: Vec::with_capacity(24) };
        for number in SESSIONS - design.sessions..SESSIONS {
            moves.of_client(number);
            moves.of_statement(number);
            moves.of_fate(number);
        }
        for key in self.dead.each() {
            moves.add(Kind::DeadFrees, 0, key, |to| to.dead = to.dead.without(key));
        }
        for (number, term) in self.terms.iter().enumerate() {
            if term.is == Progress::Answered {
                moves.add(Kind::JobStarts, number, Keys::default(), |to| {
                    to.terms[number].is = Progress::Started;
                });
            }
        }
        for number in TRANSACTIONS - design.transactions..TRANSACTIONS {
            moves.of_transaction(number);
        }
        moves.restart();
        moves.list
    }

    /// What is left when the server's limits have ended everything but one session: of all that is silent, or whose
    /// client is frozen for good, sessions end by the idle limit and free their keys, and fenced transactions by theirs.
    /// Prepared ones, which have no limit, were ended by somebody.
    pub(crate) fn with_only(&self, session: usize) -> Self {
        let mut left = Self { terms: self.terms, ..Self::default() };
        left.sessions[SESSIONS - 1] = self.sessions[session];
        left
    }

    /// The same, where that one is about to read, but for another session that reads.
    pub(crate) fn with_only_and_a_reader(&self, session: usize) -> Option<Self> {
        let reads = |number: &usize| {
            let other = self.sessions[*number];
            *number != session && other.role == Role::Reader && other.at == At::Holding
        };
        let own = self.sessions[session];
        let is_about_to = own.role == Role::Reader && matches!(own.at, At::Starting { .. });
        let other = (0..SESSIONS).find(reads).filter(|_| is_about_to)?;
        let mut left = self.with_only(session);
        left.sessions[0] = self.sessions[other];
        Some(left)
    }

    /// Whether the last session gets to the point where it may take a term key, when nobody else does anything; its own
    /// client wants that, and does what is next.
    pub(crate) fn gets_to_start(mut self, design: Design) -> bool {
        const ENOUGH: usize = 64;
        let own = SESSIONS - 1;
        for _ in 0..ENOUGH {
            match self.sessions[own].at {
                At::Started | At::Holding => return true,
                At::Starting { phase, .. } if design.plan()[usize::from(phase)] == Phase::TermKey => {
                    return true;
                }
                _ => {}
            }
            let mut moves = Moves { design, from: &self, list: Vec::new() };
            moves.of_client(own);
            moves.of_statement(own);
            let next = moves.list.iter().find(|it| it.step.kind != Kind::Leaves);
            match next {
                Some(next) => self = next.to,
                None => return false,
            }
        }
        false
    }

    pub(crate) const fn sessions() -> std::ops::Range<usize> {
        0..SESSIONS
    }

    /// What sessions hold, but for one, and the dead.
    fn held_by_others(&self, session: usize) -> Keys {
        let others = self.sessions.iter().enumerate().filter(|(number, _)| *number != session);
        others.fold(self.dead, |held, (_, other)| held.and(other.holds))
    }

    fn held(&self) -> Keys {
        self.sessions.iter().fold(self.dead, |held, session| held.and(session.holds))
    }

    /// The barriers that fenced transactions hold shared.
    fn fenced(&self) -> Keys {
        let holders = self.transactions.iter().filter(|it| it.has_barrier);
        holders.fold(Keys::default(), |held, it| held.and(self.barrier(usize::from(it.term))))
    }

    /// The barrier that fences of this term take.
    fn barrier(&self, term: usize) -> Keys {
        match self.terms[term].role {
            Role::Writer => Keys::BARRIER_OF_WRITERS,
            Role::Reader => Keys::BARRIER_OF_READERS,
        }
    }

    /// Its session lives and holds it, and it is not being released.
    fn lives(&self, term: usize) -> bool {
        let is_its = |it: &Session| it.at == At::Holding && usize::from(it.term) == term;
        self.terms[term].is == Progress::Started && self.sessions.iter().any(is_its)
    }

    /// The job of a later term that excludes this one has started.
    fn is_succeeded(&self, term: usize) -> bool {
        let excludes = |it: &Term| it.role == Role::Writer || self.terms[term].role == Role::Writer;
        self.terms[term + 1..].iter().any(|it| it.is == Progress::Started && excludes(it))
    }
}

/// The steps out of a state.
struct Moves<'a> {
    design: Design,
    from: &'a State,
    list: Vec<Move>,
}

impl Moves<'_> {
    fn add(&mut self, kind: Kind, party: usize, keys: Keys, change: impl FnOnce(&mut State)) {
        self.add_faulty(kind, party, keys, None, change);
    }

    fn add_faulty(
        &mut self,
        kind: Kind,
        party: usize,
        keys: Keys,
        fault: Option<Fault>,
        change: impl FnOnce(&mut State),
    ) {
        let mut to = *self.from;
        change(&mut to);
        self.list.push(Move { step: Step { kind, party, keys }, to, fault });
    }

    /// What the client of a session may send. An ask and its first lock are one step: that a message is on its way makes
    /// no difference to anybody else.
    fn of_client(&mut self, number: usize) {
        let session = self.from.sessions[number];
        match session.at {
            At::Out => {
                self.reconcile(number);
                // The driver knows whether it holds the lease's key: session locks stack. Of all else it need not.
                if session.holds.meets(Keys::ANY_LEASE) {
                    return;
                }
                self.ask(number, Role::Writer);
                if self.design.has_readers {
                    self.ask(number, Role::Reader);
                }
            }
            // Told to wait, it may give up.
            At::Starting { .. } if self.is_waiting(number) => {
                self.free(Kind::Leaves, number);
            }
            // Only who was told of a grant releases it.
            At::Holding if self.from.terms[usize::from(session.term)].is == Progress::Started => {
                self.free(Kind::Releases, number);
            }
            _ => {}
        }
    }

    /// It has the lease's key, and does what is first once more, or for the first time: no other key, no barrier.
    fn is_waiting(&self, number: usize) -> bool {
        let session = self.from.sessions[number];
        session.at == self.entered(number, session.role, 0) && !session.holds.meets(Keys::BARRIERS)
    }

    fn ask(&mut self, number: usize, role: Role) {
        let key = if role == Role::Writer { Keys::LEASE } else { Keys::LEASE_SHARED };
        if self.from.held_by_others(number).meets(key.conflicts()) {
            return self.add(Kind::FindsLeaseHeld, number, key, |_| ());
        }
        let at = self.entered(number, role, 0);
        self.add(Kind::TakesLease, number, key, |to| {
            let session = &mut to.sessions[number];
            *session = Session { at, role, holds: session.holds.and(key), ..*session };
        });
    }

    /// Frees one key of what an error has left, in the order of a release.
    fn reconcile(&mut self, number: usize) {
        let is_left = !self.from.sessions[number].holds.is_empty();
        if is_left && !self.design.has(Change::NothingReconciled) {
            self.free(Kind::Reconciles, number);
        }
    }

    /// Frees one key. That the statement is on its way makes no difference to anybody else.
    fn free(&mut self, kind: Kind, number: usize) {
        let session = self.from.sessions[number];
        let key = self.next_to_free(session.holds);
        let holds = session.holds.without(key);
        let at = if kind == Kind::Reconciles || holds.is_empty() { At::Out } else { At::Releasing };
        self.add(kind, number, key, |to| {
            to.sessions[number] = Session { at, holds, ..Session::default() };
        });
    }

    fn next_to_free(&self, holds: Keys) -> Keys {
        let lease_first = [Keys::ANY_LEASE, Keys::TERMS, Keys::BARRIERS];
        let term_first = [Keys::TERMS, Keys::BARRIERS, Keys::ANY_LEASE];
        let order = if self.design.has(Change::LeaseKeyFirst) { lease_first } else { term_first };
        let next = order.into_iter().find_map(|kind| holds.only(kind).each().next());
        next.unwrap_or_default()
    }

    /// Where a phase of the plan begins that has anything to do.
    fn entered(&self, number: usize, role: Role, phase: usize) -> At {
        let plan = self.design.plan();
        let mut phase = phase;
        loop {
            let Some(next) = plan.get(phase) else {
                return At::Started;
            };
            let is_idle = match next {
                Phase::Barrier | Phase::Drop => self.design.barriers(role).is_empty(),
                Phase::Look => self.design.has(Change::NoLook),
                Phase::TermKey => {
                    let has_it = self.from.sessions[number].holds.meets(Keys::TERMS);
                    has_it && self.design.has(Change::TermKeyBeforeLook)
                }
            };
            if !is_idle {
                let phase = u8::try_from(phase).unwrap();
                return At::Starting { phase, done: 0 };
            }
            phase += 1;
        }
    }

    /// The next operation of the statement that a session is in.
    fn of_statement(&mut self, number: usize) {
        let session = self.from.sessions[number];
        match session.at {
            At::Starting { phase, done } => {
                let (phase, done) = (usize::from(phase), usize::from(done));
                match self.design.plan()[phase] {
                    Phase::Barrier => self.take_barrier(number, phase, done),
                    Phase::Look => self.look(number, phase, done),
                    Phase::Drop => {
                        let after = self.entered(number, session.role, phase + 1);
                        self.drop_barrier(number, after);
                    }
                    Phase::TermKey => self.take_term_key(number, phase),
                }
            }
            At::Refused => self.drop_barrier(number, self.entered(number, session.role, 0)),
            At::Started => {
                let term = usize::from(session.term);
                self.add(Kind::Answers, number, self.design.term_key(term), |to| {
                    to.terms[term].is = Progress::Answered;
                    to.sessions[number].at = At::Holding;
                });
            }
            At::Releasing => self.free(Kind::Frees, number),
            At::Out | At::Holding => {}
        }
    }

    fn take_barrier(&mut self, number: usize, phase: usize, done: usize) {
        let role = self.from.sessions[number].role;
        let barriers = self.design.barriers(role);
        let key = barriers[done];
        let in_the_way = self.from.held_by_others(number).meets(key.conflicts());
        let refused = self.refused(number);
        // Fences take them shared.
        let is_fenced = key != Keys::BARRIER_OF_READERS_SHARED && self.from.fenced().meets(key);
        if in_the_way || is_fenced {
            return self.add(Kind::FindsBarrierHeld, number, key, |to| to.sessions[number].at = refused);
        }
        let at = if done + 1 < barriers.len() {
            At::Starting { phase: u8::try_from(phase).unwrap(), done: u8::try_from(done + 1).unwrap() }
        } else {
            self.entered(number, role, phase + 1)
        };
        self.add(Kind::TakesBarrier, number, key, |to| {
            let session = &mut to.sessions[number];
            session.holds = session.holds.and(key);
            session.at = at;
        });
    }

    /// Looks for one term key after the other, where the server would see all at one instant: it locks its whole table.
    fn look(&mut self, number: usize, phase: usize, done: usize) {
        let role = self.from.sessions[number].role;
        let seen = if self.design.has(Change::LookAtOwn) {
            self.from.held()
        } else {
            self.from.held_by_others(number)
        };
        // The keys of terms that nobody has begun are held by nobody.
        let is_of_interest = |term: &usize| {
            let it = self.from.terms[*term];
            let may_meet = role == Role::Writer
                || it.role == Role::Writer
                || self.design.has(Change::ReaderLooksAtReaders);
            it.is != Progress::Unborn && may_meet
        };
        let is_met = |term: &usize| is_of_interest(term) && seen.meets(self.design.term_key(*term));
        let next =
            if self.design.is_coarse { (0..TERMS).find(is_met) } else { (done..TERMS).find(is_of_interest) };
        let Some(term) = next else {
            let at = self.entered(number, role, phase + 1);
            return self.add(Kind::SeesNoTermKey, number, Keys::default(), |to| to.sessions[number].at = at);
        };
        let key = self.design.term_key(term);
        let refused = self.refused(number);
        if seen.meets(key) {
            return self.add(Kind::SeesTermKey, number, key, |to| to.sessions[number].at = refused);
        }
        let at = At::Starting { phase: u8::try_from(phase).unwrap(), done: u8::try_from(term + 1).unwrap() };
        self.add(Kind::SeesNoTermKey, number, key, |to| to.sessions[number].at = at);
    }

    /// The statement will say that it has to wait, when it has dropped what it has of the barriers.
    fn refused(&self, number: usize) -> At {
        let session = self.from.sessions[number];
        if session.holds.meets(Keys::BARRIERS) { At::Refused } else { self.entered(number, session.role, 0) }
    }

    fn drop_barrier(&mut self, number: usize, after: At) {
        let session = self.from.sessions[number];
        let Some(key) = session.holds.only(Keys::BARRIERS).each().next() else { return };
        let left = session.holds.without(key);
        self.add(Kind::DropsBarrier, number, key, |to| {
            let session = &mut to.sessions[number];
            session.holds = left;
            if !left.meets(Keys::BARRIERS) {
                session.at = after;
            }
        });
    }

    fn take_term_key(&mut self, number: usize, phase: usize) {
        let role = self.from.sessions[number].role;
        let Some(term) = self.from.terms[..self.design.terms].iter().position(|it| it.is == Progress::Unborn)
        else {
            return;
        };
        let key = self.design.term_key(term);
        let refused = self.refused(number);
        if self.from.held_by_others(number).meets(key) {
            return self.add(Kind::SeesTermKey, number, key, |to| to.sessions[number].at = refused);
        }
        let mut at = self.entered(number, role, phase + 1);
        let mut is = Progress::Taken;
        if at == At::Started && self.design.is_coarse {
            at = At::Holding;
            is = Progress::Started;
        }
        self.add(Kind::TakesTermKey, number, key, |to| {
            to.terms[term] = Term { is, role };
            let session = &mut to.sessions[number];
            *session = Session { at, role, term: u8::try_from(term).unwrap(), holds: session.holds.and(key) };
        });
    }

    /// What happens to a session: an error in its statement, which leaves what it has; and its end, at any instant, with
    /// its client or without, in a statement or not, whoever is to blame.
    fn of_fate(&mut self, number: usize) {
        let session = self.from.sessions[number];
        if session.at.is_running() && !self.design.is_coarse {
            let mut left = session.holds;
            if self.design.has(Change::BarrierOfStatement) {
                left = left.without(Keys::BARRIERS);
            }
            let is_start = session.at != At::Releasing && session.holds.meets(Keys::ANY_LEASE);
            if is_start && self.design.has(Change::GrantedByLeaseKey) {
                self.grant_by_lease_key(number, left);
            } else {
                let after = Session { at: At::Out, holds: left, ..Session::default() };
                self.add(Kind::EndsWithError, number, left, |to| to.sessions[number] = after);
            }
        }
        if session != Session::default() {
            self.add(Kind::Dies, number, session.holds, |to| {
                to.sessions[number] = Session::default();
                to.dead = to.dead.and(session.holds);
            });
        }
    }

    fn grant_by_lease_key(&mut self, number: usize, left: Keys) {
        let session = self.from.sessions[number];
        let (term, role) = if session.holds.meets(Keys::TERMS) {
            (usize::from(session.term), session.role)
        } else {
            let unborn = self.from.terms[..self.design.terms].iter().position(|it| it.is == Progress::Unborn);
            let Some(term) = unborn else { return };
            (term, session.role)
        };
        self.add(Kind::EndsWithError, number, left, |to| {
            to.terms[term] = Term { is: Progress::Answered, role };
            let term = u8::try_from(term).unwrap();
            to.sessions[number] = Session { at: At::Holding, role, term, holds: left };
        });
    }

    fn of_transaction(&mut self, number: usize) {
        let transaction = self.from.transactions[number];
        let term = usize::from(transaction.term);
        let key = self.design.term_key(term);
        let is_coarse = self.design.is_coarse;
        let only_first = self.design.has(Change::TermKeyTriedFirstOnly);
        match transaction.at {
            Fenced::None => return self.begin(number),
            Fenced::Barrier => {
                let barrier = self.from.barrier(term);
                if self.from.held().meets(barrier) {
                    self.over(Kind::FindsBarrierTaken, number, transaction, barrier);
                } else {
                    let is_done = only_first || self.design.has(Change::TermKeyNotTried);
                    let at = if is_done { Fenced::Open } else { Fenced::Second };
                    self.add(Kind::TakesBarrierShared, number, barrier, |to| {
                        to.transactions[number] = Transaction { at, has_barrier: true, ..transaction };
                    });
                }
            }
            Fenced::Second => {
                self.try_term_key(number, Transaction { at: Fenced::Open, ..transaction });
            }
            Fenced::Open | Fenced::Prepared => {
                if self.design.has(Change::UnlockBeforeCommit) && transaction.has_barrier {
                    self.add(Kind::UnlocksEarly, number, key, |to| {
                        to.transactions[number].has_barrier = false;
                    });
                } else {
                    let fault = self.from.is_succeeded(term).then_some(Fault::LateCommit);
                    self.add_faulty(Kind::Commits, number, key, fault, |to| {
                        end(is_coarse, &mut to.transactions[number]);
                    });
                }
                if transaction.at == Fenced::Open && !self.design.is_coarse {
                    self.add(Kind::Prepares, number, key, |to| {
                        to.transactions[number].at = Fenced::Prepared;
                    });
                }
            }
            Fenced::Ended => {
                return self.add(Kind::EndsTransaction, number, key, |to| {
                    to.transactions[number] = Transaction::default();
                });
            }
        }
        self.add(Kind::RollsBack, number, key, |to| end(is_coarse, &mut to.transactions[number]));
    }

    /// A job fences whenever it likes, once it was started: also one that is over and does not know, or whose process is
    /// dead, with the fence on its way.
    fn begin(&mut self, number: usize) {
        let skips_first =
            self.design.has(Change::TermKeyTriedLastOnly) || self.design.has(Change::TermKeyNotTried);
        for (term, it) in self.from.terms.iter().enumerate() {
            if it.is != Progress::Started {
                continue;
            }
            let begun =
                Transaction { at: Fenced::Barrier, term: u8::try_from(term).unwrap(), has_barrier: false };
            if skips_first {
                let key = self.from.barrier(term);
                self.add(Kind::Begins, number, key, |to| to.transactions[number] = begun);
            } else {
                self.try_term_key(number, begun);
            }
        }
    }

    /// That it holds the term key shared, where that is granted, is in nobody's way: nobody else takes this one again,
    /// and the look is for those who have one alone.
    fn try_term_key(&mut self, number: usize, refused: Transaction) {
        let key = self.design.term_key(usize::from(refused.term));
        if self.from.held().meets(key) {
            self.add(Kind::FindsTermLiving, number, key, |to| to.transactions[number] = refused);
        } else {
            self.over(Kind::FindsTermOver, number, refused, key);
        }
    }

    fn over(&mut self, kind: Kind, number: usize, fenced: Transaction, key: Keys) {
        let fault = self.from.lives(usize::from(fenced.term)).then_some(Fault::LivingTermRefused);
        let goes_on = self.design.has(Change::OverIsSaid);
        let is_coarse = self.design.is_coarse;
        self.add_faulty(kind, number, key, fault, |to| {
            let transaction = &mut to.transactions[number];
            *transaction = Transaction { at: Fenced::Open, ..fenced };
            if !goes_on {
                end(is_coarse, transaction);
            }
        });
    }

    /// All sessions end, and all transactions that are not prepared; nothing is left of them. Answers that were sent
    /// arrive all the same.
    fn restart(&mut self) {
        let forgets = self.design.has(Change::PreparedForgotten);
        let from = *self.from;
        let mut after = State { terms: from.terms, ..State::default() };
        for (kept, it) in after.transactions.iter_mut().zip(from.transactions) {
            if it.at == Fenced::Prepared {
                *kept = Transaction { has_barrier: it.has_barrier && !forgets, ..it };
            }
        }
        if after != from && !self.design.is_coarse {
            self.add(Kind::Restart, 0, Keys::default(), |to| *to = after);
        }
    }
}

/// It is over; what it holds is freed after that.
fn end(at_once: bool, transaction: &mut Transaction) {
    if transaction.has_barrier && !at_once {
        transaction.at = Fenced::Ended;
    } else {
        *transaction = Transaction::default();
    }
}
