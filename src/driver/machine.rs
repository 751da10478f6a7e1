//! What the driver knows and decides, without any waiting: who contends, who holds, what to send next.
//!
//! A name goes `Resting → Waiting → Held → (Lost) → Resting`. Every method takes the time as an argument and sends
//! nothing to the store: [`Driver`](super::Driver) carries out what [`Machine::next_statement`] says.

mod answers;
mod candidate;
mod rollcall;
mod seats;
mod statement;

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use rand::RngExt as _;
use rand::rngs::StdRng;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;
use tracing::{debug, error, info, warn};

use self::candidate::{Barrier, Before, Candidate, Phase, Waiting};
pub(crate) use self::rollcall::ANSWER_LIMIT;
use self::seats::Seats;
pub(crate) use self::statement::{Batch, Statement};
use self::statement::{Check, Errand, Heartbeat, Inquiry, Passage, Release, Task};
use super::command::{Admission, Again, Command, Id, NotLooked, Parting, Place};
use super::term::{Reason, State};
use crate::error::{ConnectError, LossCause};
use crate::meter::Meter;
use crate::name::Key;
use crate::options::{Bounds, JITTER, Options};
use crate::sabotage::Sabotage;
use crate::store::slots::Amended;
use crate::store::{Ask, Enforcement, Exchange, Freed, Minted, Mode, Presence, Return};

pub(crate) struct Machine<H> {
    options: Arc<Options>,
    bounds: Bounds,
    meter: Meter,
    enforcement: Enforcement,
    rng: StdRng,
    candidates: Seats<H>,
    /// Leases whose jobs have ended, to be released with the next exchange.
    releases: Vec<Release<H>>,
    /// A release is on its way.
    releasing: usize,
    /// Keys that nobody here waits for any more.
    withdrawals: Vec<Key>,
    checks: Vec<Check>,
    errands: VecDeque<Errand>,
    /// Roll calls to be answered, after the errands of our own.
    calls: VecDeque<Errand>,
    /// Who takes the answers to which roll call.
    listeners: Vec<(u64, mpsc::Sender<Presence>)>,
    /// How many terms there have been.
    terms: u64,
    /// When every waiting name is asked for again.
    poll_at: Option<Instant>,
    /// When the last heartbeat was sent, or the first lease granted.
    heartbeat_sent: Instant,
    /// When the last statement of any kind was sent.
    sent: Instant,
    /// The last statement was a heartbeat: an exchange comes first if there is one, so that heartbeats that take
    /// longer than their interval starve nobody.
    exchange_is_next: bool,
    /// Whether the store still has what is held here is to be asked at once.
    is_doubtful: bool,
    doors: Doors,
}

/// Who is let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Doors {
    Open,
    /// Nobody enters a section any more; runs see for themselves.
    Closing,
    /// The driver is gone: nobody is granted anything any more.
    Dismissed,
}

/// How often the log says that a job which was told to stop goes on: without a drain timeout that may be for ever.
const REMINDER: Duration = Duration::from_secs(10);

impl<H: Clone> Machine<H> {
    pub(crate) fn new(
        options: Arc<Options>,
        meter: Meter,
        enforcement: Enforcement,
        rng: StdRng,
        now: Instant,
    ) -> Self {
        Self {
            bounds: options.bounds(),
            options,
            meter,
            enforcement,
            rng,
            candidates: Seats::new(),
            releases: Vec::new(),
            releasing: 0,
            withdrawals: Vec::new(),
            checks: Vec::new(),
            errands: VecDeque::new(),
            calls: VecDeque::new(),
            listeners: Vec::new(),
            terms: 0,
            poll_at: None,
            heartbeat_sent: now,
            sent: now,
            exchange_is_next: false,
            is_doubtful: false,
            doors: Doors::Open,
        }
    }

    /// Whether a session is of any use.
    pub(crate) fn wants_session(&self) -> bool {
        !self.errands.is_empty()
            || self.candidates.values().any(|candidate| matches!(candidate.phase, Phase::Waiting(_)))
    }

    /// Whether nobody but these has a seat, and every lease has been released.
    pub(crate) fn is_left_to(&self, ids: &[Id]) -> bool {
        self.releases.is_empty() && self.releasing == 0 && self.candidates.ids().all(|id| ids.contains(&id))
    }

    /// Until when the session of a lost lease has to stay open: `None` if every job of such a lease has ended, else
    /// when the last of their futures has been dropped.
    pub(crate) fn lost_jobs_until(&self) -> Option<Instant> {
        self.candidates.values().filter_map(|candidate| candidate.phase.overrun_at()).max()
    }

    pub(crate) fn on_command(&mut self, command: Command, now: Instant) {
        match command {
            Command::Enlist(place) => {
                self.meter.enlisted(&place.name);
                self.candidates.insert(Candidate { place, phase: Phase::Resting });
            }
            Command::Contend(id, again) => self.contend(id, again, now),
            Command::Rest(id) => {
                self.vacate(id, None, now);
                if let Some(candidate) = self.candidates.get(id) {
                    candidate.place.show(State::Standby);
                }
            }
            Command::Leave(id, done) => {
                self.vacate(id, done, now);
                self.candidates.remove(id);
            }
            Command::Keep(id, done) => {
                let releases = self.releases.len();
                self.vacate(id, Some(done), now);
                self.candidates.remove(id);
                self.releases.iter_mut().skip(releases).for_each(|release| release.is_kept = true);
            }
            Command::Enter(place) => self.enter(place, now),
            Command::Who(key, reply) => self.run_errand(Task::Who(key, reply), now),
            Command::Stop { id, term, reason } => self.stop(id, Some(term), reason, now),
            Command::Ended { id, term, done } => self.on_ended(id, term, done, now),
            Command::Check { id, term, reply } if self.holds(id, term) => {
                self.checks.push(Check { id, term, reply });
            }
            Command::Check { reply, .. } => {
                reply.send(false).ok();
            }
            Command::Mint { id, term, reply } if self.holds(id, term) => {
                self.run_errand(Task::Mint { id, term, reply }, now);
            }
            Command::Mint { reply, .. } => {
                reply.send(Minted::Gone).ok();
            }
            Command::Slots(slots, reply) => self.run_errand(Task::Slots(slots, reply), now),
            Command::Amend(amend, reply) if self.holds(amend.id, amend.term) => {
                self.run_errand(Task::Amend(amend, reply), now);
            }
            // At once, not when there is a session again.
            Command::Amend(_, reply) => drop(reply.send(Amended::Gone)),
            Command::Publish(message, sent) => self.run_errand(Task::Publish(message, sent), now),
            Command::Survey(reply) => self.run_errand(Task::Survey(reply), now),
            Command::Listen(call, answers) => self.listen(call, answers),
        }
    }

    fn contend(&mut self, id: Id, again: Again, now: Instant) {
        if self.doors == Doors::Dismissed {
            self.candidates.remove(id);
            return;
        }
        let wait = self.poll_interval();
        // The polls of a name that waits alone come one interval after its first attempt; others join them.
        if !self.candidates.values().any(|candidate| matches!(candidate.phase, Phase::Waiting(_))) {
            self.poll_at = None;
        }
        let Some(candidate) = self.candidates.get_mut(id) else { return };
        if !matches!(candidate.phase, Phase::Resting) {
            return;
        }
        let not_before = match again {
            Again::AtOnce => None,
            Again::AfterInterval => Some(now + wait),
        };
        candidate.place.show(State::Standby);
        candidate.phase = Phase::Waiting(Waiting::from(not_before.unwrap_or(now)));
    }

    /// Somebody asks to enter a section.
    fn enter(&mut self, mut place: Place, now: Instant) {
        match self.doors {
            Doors::Open => {
                let phase = Phase::Waiting(Waiting::from(now));
                self.candidates.insert(Candidate { place, phase });
            }
            Doors::Closing => place.answer(Admission::Closed),
            // It learns it from its closed channel.
            Doors::Dismissed => {}
        }
    }

    /// A candidate stops asking, for now or for good. No job of it runs any more: what it holds is released.
    fn vacate(&mut self, id: Id, done: Option<oneshot::Sender<Parting>>, now: Instant) {
        let Some(candidate) = self.candidates.get_mut(id) else { return };
        let key = candidate.place.key;
        match std::mem::replace(&mut candidate.phase, Phase::Resting) {
            Phase::Held { held, term, before, .. } => {
                // Where its deadline has passed unnoticed, it was lost: who asks is told so by nobody's answer.
                let done = done.filter(|_| term.is_held(now));
                candidate::tell_lost(&term, &self.options.identity, now);
                term.finish(now);
                let release = Release::new(held, &candidate.place, &term, done);
                self.releases.push(if before.is_some() { release.unused() } else { release });
            }
            Phase::Waiting(waiting) if waiting.registered => self.withdraw(key),
            Phase::Resting | Phase::Waiting(_) | Phase::Lost { .. } => {}
        }
    }

    /// One who waited for a key does so no more: nor does the session, unless others on it do.
    fn withdraw(&mut self, key: Key) {
        let waits = |candidate: &Candidate<H>| {
            candidate.place.key == key
                && matches!(&candidate.phase, Phase::Waiting(waiting) if waiting.registered)
        };
        if !self.candidates.values().any(waits) && !self.options.is_broken(Sabotage::NoWithdrawal) {
            self.withdrawals.push(key);
        }
    }

    /// The Locker is being closed: every job is told to stop, and nobody is let in any more.
    pub(crate) fn close(&mut self, now: Instant) {
        self.doors = Doors::Closing;
        self.stop_all(&Reason::Closed, now);
        let waits = |candidate: &Candidate<H>| {
            !candidate.place.is_run() && matches!(candidate.phase, Phase::Waiting(_))
        };
        let waiting: Vec<Id> =
            self.candidates.iter().filter(|(_, candidate)| waits(candidate)).map(|(id, _)| id).collect();
        for id in waiting {
            self.turn_away(id, Admission::Closed, now);
        }
    }

    /// One who asked to enter is not let in, and asks no more.
    fn turn_away(&mut self, id: Id, admission: Admission, now: Instant) {
        self.vacate(id, None, now);
        if let Some(mut candidate) = self.candidates.remove(id) {
            candidate.place.answer(admission);
        }
    }

    /// Tells every job to stop, while its lease is held.
    fn stop_all(&mut self, reason: &Reason, now: Instant) {
        let ids: Vec<Id> = self.candidates.ids().collect();
        for id in ids {
            self.stop(id, None, reason.clone(), now);
        }
    }

    /// Tells a job to stop while its lease is held; only in its present term, if one is named.
    fn stop(&mut self, id: Id, term: Option<u64>, reason: Reason, now: Instant) {
        let wait = self.poll_interval();
        let Some(candidate) = self.candidates.get_mut(id) else { return };
        let Phase::Held { held, term: present, before, remind_at } = &mut candidate.phase else { return };
        let present = Arc::clone(present);
        let stale = term.is_some_and(|term| term != present.number);
        if stale && !self.options.is_broken(Sabotage::StaleEvents) {
            return debug!(name = %present.name, term, present = present.number, "request about an earlier term");
        }
        let identity = &self.options.identity;
        present.stop(reason, now);
        if before.is_some() {
            // Its job has not started, and its run has not heard of the term: nobody to wait for.
            present.finish(now);
            self.releases.push(Release::new(held.clone(), &candidate.place, &present, None).unused());
            candidate.place.show(State::Standby);
            candidate.phase = Phase::Waiting(Waiting::from(now + wait));
            return;
        }
        if candidate.place.show(State::Draining) {
            *remind_at = Some(now + REMINDER);
            info!(name = %present.name, term = present.number, %identity, reason = present.reason().map(|reason| reason.to_string()), "told to stop");
        }
        if self.options.is_broken(Sabotage::ReleaseBeforeEnd) {
            self.releases.push(Release::new(held.clone(), &candidate.place, &present, None));
        }
    }

    /// The job of a term has ended: only now its lease is released.
    fn on_ended(&mut self, id: Id, term: u64, done: oneshot::Sender<Parting>, now: Instant) {
        let any_term = self.options.is_broken(Sabotage::StaleEvents);
        let candidate = self.candidates.get_mut(id).filter(|candidate| match &candidate.phase {
            Phase::Held { term: present, .. } | Phase::Lost { term: present, .. } => {
                any_term || present.number == term
            }
            Phase::Resting | Phase::Waiting(_) => false,
        });
        let Some(candidate) = candidate else {
            done.send(Parting::Lost).ok();
            return;
        };
        match std::mem::replace(&mut candidate.phase, Phase::Resting) {
            Phase::Held { held, term, .. } if term.is_held(now) => {
                term.finish(now);
                self.releases.push(Release::new(held, &candidate.place, &term, Some(done)));
            }
            phase => {
                // Its deadline passed unnoticed, or it was lost before: the result does not count. What the store
                // may still have is released all the same.
                if let Phase::Held { held, term, .. } = phase {
                    candidate::tell_lost(&term, &self.options.identity, now);
                    self.releases.push(Release::new(held, &candidate.place, &term, None));
                }
                done.send(Parting::Lost).ok();
            }
        }
    }

    /// Looks at the clock: starts what may start, reports what overran, gives up what could not be sent.
    ///
    /// # Errors
    ///
    /// The cause, if a deadline has passed: then the session is to be given up.
    pub(crate) fn on_time(&mut self, now: Instant) -> Result<(), LossCause> {
        for queue in [&mut self.errands, &mut self.calls] {
            while let Some(expired) = queue.pop_front_if(|errand| now >= errand.expires) {
                expired.task.fail();
            }
        }
        let no_deadline = self.options.is_broken(Sabotage::NoDeadline);
        let mut unanswered = Vec::new();
        for (id, candidate) in self.candidates.iter_mut() {
            match &mut candidate.phase {
                Phase::Waiting(waiting)
                    if !waiting.asking && candidate.place.try_until().is_some_and(|at| now >= at) =>
                {
                    unanswered.push(id);
                }
                Phase::Held { term, .. } if !no_deadline && now >= term.deadline() => {
                    return Err(LossCause::Deadline);
                }
                Phase::Held { term, before, .. }
                    if before.as_deref().and_then(Before::starts_at).is_some_and(|at| now >= at) =>
                {
                    *before = None;
                    candidate.place.begin(&self.meter, term, now);
                }
                Phase::Held { term, remind_at, .. } if remind_at.is_some_and(|at| now >= at) => {
                    *remind_at = Some(now + REMINDER);
                    warn!(
                        name = %term.name, term = term.number, identity = %self.options.identity,
                        reason = term.reason().map(|reason| reason.to_string()), "told to stop, and goes on: does the job look at lease.cancelled()?"
                    );
                }
                Phase::Lost { term, overrun_at, overrun } if !*overrun && now >= *overrun_at => {
                    *overrun = true;
                    let why = if candidate.place.is_run() {
                        "the job could not be dropped when its grace was over: it blocks its thread"
                    } else {
                        "the lock is lost, and its guard was not dropped when the grace was over"
                    };
                    error!(name = %term.name, term = term.number, identity = %self.options.identity, "{why}");
                    candidate.place.show(State::Overrun { since: now });
                    self.meter.overran(&candidate.place);
                }
                _ => {}
            }
        }
        for id in unanswered {
            self.turn_away(id, Admission::Unanswered, now);
        }
        Ok(())
    }

    /// When [`on_time`](Self::on_time) has something to do next.
    pub(crate) fn next_alarm(&self) -> Option<Instant> {
        let alarms = self.candidates.values().filter_map(|candidate| match &candidate.phase {
            Phase::Held { before, .. } if self.options.is_broken(Sabotage::NoDeadline) => {
                before.as_deref().and_then(Before::starts_at)
            }
            Phase::Held { term, before, remind_at, .. } => {
                let starts_at = before.as_deref().and_then(Before::starts_at);
                starts_at.into_iter().chain(*remind_at).chain([term.deadline()]).min()
            }
            phase @ Phase::Lost { overrun: false, .. } => phase.overrun_at(),
            Phase::Waiting(Waiting { asking: false, .. }) => candidate.place.try_until(),
            _ => None,
        });
        let errands = self.errands.front().into_iter().chain(self.calls.front());
        alarms.chain(errands.map(|errand| errand.expires)).min()
    }

    /// When [`next_statement`](Self::next_statement) has something to send next, if nothing happens before.
    pub(crate) fn next_statement_at(&self) -> Option<Instant> {
        let asks = self.candidates.values().filter_map(|candidate| match &candidate.phase {
            Phase::Waiting(waiting) => waiting.due,
            Phase::Held { .. } => candidate.barrier().map(|barrier| barrier.due),
            _ => None,
        });
        asks.chain(self.poll_at).chain([self.heartbeat_at()]).min()
    }

    fn holds(&self, id: Id, number: u64) -> bool {
        self.held(id, number).is_some()
    }

    fn held(&self, id: Id, number: u64) -> Option<H> {
        match &self.candidates.get(id)?.phase {
            Phase::Held { held, term, .. } if term.number == number => Some(held.clone()),
            _ => None,
        }
    }

    fn holds_any(&self) -> bool {
        self.candidates.values().any(|candidate| matches!(candidate.phase, Phase::Held { .. }))
    }

    /// One interval after the previous one was sent, and not before that was answered: statements follow each other.
    /// With nothing held: often enough that the store's idle limit does not fire.
    fn heartbeat_at(&self) -> Instant {
        if !self.checks.is_empty() || self.is_doubtful {
            self.sent
        } else if self.holds_any() {
            self.heartbeat_sent + self.options.heartbeat_interval
        } else {
            self.sent + self.bounds.trust
        }
    }

    fn poll_interval(&mut self) -> Duration {
        self.options.retry_interval.mul_f64(1.0 + self.rng.random_range(0.0..JITTER))
    }

    /// Gives what to send now, if anything.
    pub(crate) fn next_statement(&mut self, now: Instant) -> Option<Statement<H>> {
        if self.poll_at.is_some_and(|at| now >= at) {
            self.on_poll(now);
        }
        let heartbeat_is_due = now >= self.heartbeat_at();
        let exchange_goes_first = self.exchange_is_next && self.enforcement.any_answer_renews;
        if heartbeat_is_due && !exchange_goes_first {
            return Some(Statement::Heartbeat(self.heartbeat(now)));
        }
        // Exchanges that take longer than the poll interval are always due: an errand waits for one of them, with what
        // was asked before it, and no longer.
        let has_waited = |queue: &VecDeque<Errand>| queue.front().is_some_and(|errand| errand.has_waited);
        if has_waited(&self.errands) || has_waited(&self.calls) {
            return self.errand(now);
        }
        // Not due again before some milliseconds after its answer, so it starves nobody.
        if let Some(passage) = self.passage(now) {
            return Some(Statement::Pass(passage));
        }
        if let Some(batch) = self.batch(now) {
            for errand in self.errands.iter_mut().chain(&mut self.calls) {
                errand.has_waited = true;
            }
            return Some(Statement::Exchange(batch));
        }
        if heartbeat_is_due {
            return Some(Statement::Heartbeat(self.heartbeat(now)));
        }
        if let Some(inquiry) = self.inquiry() {
            self.sent = now;
            return Some(Statement::Inquiry(inquiry));
        }
        if let Some(blocked) = self.blocked() {
            self.sent = now;
            return Some(Statement::Blockers(blocked, None));
        }
        self.errand(now)
    }

    /// Whether [`next_statement`](Self::next_statement) would give one.
    pub(crate) fn has_statement(&self, now: Instant) -> bool {
        now >= self.heartbeat_at()
            || self.poll_at.is_some_and(|at| now >= at)
            || !self.releases.is_empty()
            || !self.withdrawals.is_empty()
            || !self.errands.is_empty()
            || !self.calls.is_empty()
            || self.candidates.values().any(|candidate| {
                candidate.is_due(now)
                    || candidate.wants_to_know()
                    || candidate
                        .barrier()
                        .is_some_and(|barrier| now >= barrier.due || barrier.wants_to_know())
            })
    }

    /// May those begin now that were kept from it? All are asked about when one of them is due.
    fn passage(&mut self, now: Instant) -> Option<Passage<H>> {
        let is_due = |candidate: &Candidate<H>| candidate.barrier().is_some_and(|it| now >= it.due);
        if !self.candidates.values().any(is_due) {
            return None;
        }
        self.sent = now;
        Some(self.candidates.iter().filter(|(_, candidate)| candidate.barrier().is_some()).collect())
    }

    /// Who keeps those from beginning that could not again and again?
    fn blocked(&mut self) -> Option<Passage<H>> {
        let asks = |candidate: &mut Candidate<H>| candidate.barrier_mut().is_some_and(Barrier::asks_why);
        let blocked: Passage<H> = self
            .candidates
            .iter_mut()
            .filter_map(|(id, candidate)| asks(candidate).then_some((id, &*candidate)))
            .collect();
        (!blocked.terms.is_empty()).then_some(blocked)
    }

    /// Who is in the way of those who were refused again and again?
    fn inquiry(&mut self) -> Option<Inquiry> {
        let (mut keys, mut asking) = (Vec::new(), Vec::new());
        for (id, candidate) in self.candidates.iter_mut().filter(|(_, candidate)| candidate.wants_to_know()) {
            if let Phase::Waiting(waiting) = &mut candidate.phase {
                waiting.refusals.asked();
                keys.push(candidate.place.key);
                asking.push(id);
            }
        }
        (!keys.is_empty()).then_some(Inquiry { keys, asking })
    }

    /// Who holds this key here, and is kept from beginning.
    fn blocked_on(&self, key: Key) -> Option<Passage<H>> {
        let blocked =
            |(_, candidate): &(_, &Candidate<H>)| candidate.place.key == key && candidate.barrier().is_some();
        self.candidates.iter().find(blocked).map(|found| [found].into_iter().collect())
    }

    /// Whoever waits to read what another one here asks for, asks as well: who is granted a key waits for it no more, and
    /// that is so for the whole session.
    fn join_in(&self, asking: &mut Vec<Id>, now: Instant) {
        let read: HashSet<Key> = asking
            .iter()
            .filter_map(|id| self.candidates.get(*id))
            .filter(|candidate| candidate.place.mode() == Mode::Read)
            .map(|candidate| candidate.place.key)
            .collect();
        if read.is_empty() {
            return;
        }
        let joins = |candidate: &Candidate<H>| {
            candidate.waits_idly() && !candidate.is_due(now) && read.contains(&candidate.place.key)
        };
        asking.extend(self.candidates.iter().filter(|(_, candidate)| joins(candidate)).map(|(id, _)| id));
    }

    /// Every waiting name is due. The next poll is set when one of them was asked for in vain: whoever waits is due, is
    /// being asked for, or has a poll ahead.
    fn on_poll(&mut self, now: Instant) {
        self.poll_at = None;
        for candidate in self.candidates.values_mut() {
            if let Phase::Waiting(waiting) = &mut candidate.phase {
                waiting.wake(now);
            }
        }
    }

    fn heartbeat(&mut self, now: Instant) -> Heartbeat<H> {
        self.heartbeat_sent = now;
        self.sent = now;
        self.exchange_is_next = true;
        self.is_doubtful = false;
        let mut heartbeat =
            Heartbeat { held: Vec::new(), terms: Vec::new(), checks: std::mem::take(&mut self.checks) };
        for (id, candidate) in self.candidates.iter() {
            if let Phase::Held { held, term, .. } = &candidate.phase {
                heartbeat.held.push(held.clone());
                heartbeat.terms.push((id, term.number));
            }
        }
        heartbeat
    }

    fn batch(&mut self, now: Instant) -> Option<Batch<H>> {
        let freed: HashSet<Key> = self.releases.iter().map(|release| release.key).collect();
        let is_due = |candidate: &Candidate<H>| {
            // Not in one breath with our own release of it, or other processes would starve.
            candidate.is_due(now) && !freed.contains(&candidate.place.key)
        };
        let due = self.candidates.iter().filter(|(_, candidate)| is_due(candidate));
        let mut asking: Vec<Id> = due.map(|(id, _)| id).collect();
        self.join_in(&mut asking, now);
        if !asking.is_empty() {
            self.meter.polled();
        }
        if asking.is_empty() && self.releases.is_empty() && self.withdrawals.is_empty() {
            return None;
        }
        self.sent = now;
        self.exchange_is_next = false;
        let mut asks = Vec::with_capacity(asking.len());
        for id in &asking {
            let Some(Candidate { place, phase: Phase::Waiting(waiting) }) = self.candidates.get_mut(*id)
            else {
                continue;
            };
            waiting.asking = true;
            waiting.due = None;
            waiting.not_before = None;
            asks.push(Ask {
                key: place.key,
                name: place.name.clone(),
                mode: match place.mode() {
                    Mode::Write if self.options.is_broken(Sabotage::NoIntent) => Mode::Exclusive,
                    mode => mode,
                },
                ttl: self.bounds.ttl.max(place.ttl().unwrap_or_default()),
                kind: place.kind,
                waits: place.try_until().is_none(),
                is_fenced: place.is_fenced(),
                register: !waiting.registered && place.try_until().is_none(),
            });
        }
        let releases = std::mem::take(&mut self.releases);
        self.releasing += releases.len();
        let exchange = Exchange {
            releases: releases
                .iter()
                .map(|Release { held, is_clean, is_kept, .. }| Return {
                    held: held.clone(),
                    is_clean: *is_clean,
                    is_kept: *is_kept,
                })
                .collect(),
            withdrawals: std::mem::take(&mut self.withdrawals),
            asks,
        };
        Some(Batch { exchange, releases, asking })
    }

    /// How long the store is to keep a key for a silent holder, where it can.
    fn ttl(&self, place: &Place) -> Duration {
        self.bounds.ttl.max(place.ttl().unwrap_or_default())
    }

    /// For how long a statement that is sent now may go unanswered: until what is held is lost anyway, but not for ever, since
    /// others wait for theirs.
    pub(crate) fn patience(&self, now: Instant) -> Duration {
        let limit = self.options.query_timeout;
        if !self.enforcement.reconnects {
            return limit;
        }
        let deadlines = self.candidates.values().filter_map(|candidate| match &candidate.phase {
            Phase::Held { term, .. } => Some(term.deadline()),
            _ => None,
        });
        deadlines
            .min()
            .map_or(limit, |deadline| deadline.saturating_duration_since(now).clamp(limit, 2 * limit))
    }

    /// For how long an answer about a key is trusted.
    fn trust(&self, ttl: Duration) -> Duration {
        // Where the end of a session frees its keys, that comes for all of them at once.
        let longer = if self.enforcement.any_answer_renews {
            Duration::ZERO
        } else {
            ttl.saturating_sub(self.bounds.ttl)
        };
        self.bounds.trust + longer
    }

    /// What is released here is free for others here as well.
    fn wake_waiting(&mut self, releases: &[Release<H>], now: Instant) {
        if releases.is_empty() {
            return;
        }
        let freed: HashSet<Key> = releases.iter().map(|release| release.key).collect();
        for candidate in self.candidates.values_mut().filter(|it| freed.contains(&it.place.key)) {
            if let Phase::Waiting(waiting) = &mut candidate.phase {
                waiting.wake(now);
            }
        }
    }

    /// A key was released by somebody: ask at once, and once more if a question is on its way.
    pub(crate) fn on_freed(&mut self, freed: Freed, now: Instant) {
        for candidate in self.candidates.values_mut().filter(|candidate| candidate.place.key == freed.key) {
            if let Phase::Waiting(waiting) = &mut candidate.phase {
                waiting.freed = freed.is_clean;
                waiting.wake(now);
            }
        }
    }

    /// Releases of a key are no longer pushed: ask at once, since one may have been missed, and register anew.
    pub(crate) fn on_unregistered(&mut self, key: Key, now: Instant) {
        for candidate in self.candidates.values_mut().filter(|candidate| candidate.place.key == key) {
            if let Phase::Waiting(waiting) = &mut candidate.phase {
                waiting.registered = false;
                waiting.wake(now);
            }
        }
    }

    /// The connection was lost, and the session was not: what was pushed meanwhile is missed, and whether the store still
    /// has what is held here, it is to say at once.
    pub(crate) fn on_interrupted(&mut self, now: Instant) {
        self.is_doubtful = self.holds_any();
        for candidate in self.candidates.values_mut() {
            if let Phase::Waiting(waiting) = &mut candidate.phase {
                waiting.registered = false;
                waiting.wake(now);
            }
        }
    }

    /// A new session is up: it owns nothing, and every waiting name is asked for.
    pub(crate) fn on_session(&mut self, enforcement: Enforcement, now: Instant) {
        self.enforcement = enforcement;
        (self.sent, self.heartbeat_sent) = (now, now);
        self.exchange_is_next = false;
        self.is_doubtful = false;
        self.on_poll(now);
    }

    /// The session is over or given up. Every lease on it is told first, before anything else happens to the session.
    pub(crate) fn on_session_lost(&mut self, cause: &LossCause, now: Instant) {
        for candidate in self.candidates.values() {
            if let Phase::Held { term, .. } = &candidate.phase {
                term.lose(cause.clone(), now);
            }
        }
        for candidate in self.candidates.values_mut() {
            candidate.lose(cause, &self.options.identity, now);
            if let Phase::Waiting(waiting) = &mut candidate.phase {
                waiting.forget_session();
            }
        }
        self.poll_at = None;
        self.releasing = 0;
        self.withdrawals.clear();
        for check in self.checks.drain(..) {
            check.reply.send(false).ok();
        }
        // Nobody waits for a record under a lease that is lost: the store may be away for long.
        for errand in std::mem::take(&mut self.errands) {
            match errand.task {
                Task::Amend(_, reply) => drop(reply.send(Amended::Gone)),
                task => self.errands.push_back(Errand { task, ..errand }),
            }
        }
        // Who called has long had all answers that it waits for when there is a session again.
        self.calls.clear();
        self.releases.drain(..).for_each(Release::unanswered);
    }

    /// The store must not be used, and trying again cannot mend that: every run that waits learns why.
    pub(crate) fn refuse(&mut self, error: &Arc<ConnectError>) {
        for candidate in self.candidates.values_mut() {
            if let Phase::Waiting(_) = candidate.phase {
                candidate.phase = Phase::Resting;
                candidate.place.refuse(error);
            }
        }
        self.candidates
            .retain(|candidate| candidate.place.is_run() || !matches!(candidate.phase, Phase::Resting));
        self.poll_at = None;
        for errand in std::mem::take(&mut self.errands) {
            match errand.task {
                Task::Slots(_, reply) => drop(reply.send(Err(NotLooked::Refused(Arc::clone(error))))),
                task => self.errands.push_back(Errand { task, ..errand }),
            }
        }
    }

    /// The driver is gone: nobody is granted anything any more, and the runs learn it from their closed channels. Those
    /// whose jobs have not ended learn it when they ask again.
    pub(crate) fn dismiss(&mut self) {
        self.doors = Doors::Dismissed;
        self.candidates.retain(|candidate| matches!(candidate.phase, Phase::Lost { .. }));
    }
}

#[cfg(test)]
mod tests;
