//! One live session: what it holds, what it waits for, and how both are told from the lock table.

use std::collections::HashSet;
use std::time::Duration;

use sqlx::Row as _;
use sqlx::postgres::PgRow;
use tokio::time::Instant;
use tracing::{debug, info, warn};

use super::affinity::Affinity;
use super::checks::{Backend, Look};
pub(crate) use super::claims::Held;
use super::claims::{Claims, Ended, Foreign};
use super::fence::{self, BLOCKED, Beginner, Broken, FENCED, Fence, GRANTED, Place};
use super::link::Link;
use super::refusal;
use super::slots;
use super::statements::{self, Announced, Outcomes, Release, Take, Work};
use crate::clock;
use crate::error::LossCause;
use crate::fence::FencingToken;
use crate::name::Key;
use crate::store::slots::{Amended, Entry, Looked, NoSlots, Record, Slots};
use crate::store::{
    Answer, Ask, Blocker, Enforcement, Event, Exchange, Exchanged, Holder, Message, Minted, Presence, Return,
    Seen, Session,
};

/// How often a statement that the server answered with an error is tried again before the session is given up.
const ATTEMPTS: u32 = 3;

/// `out_of_memory`.
const OUT_OF_LOCK_MEMORY: &str = "53200";

pub(crate) struct PgSession {
    link: Link,
    /// For people.
    address: String,
    backend: Backend,
    /// None where the product is broken on purpose.
    marker: Option<i32>,
    enforcement: Enforcement,
    shortfalls: Vec<String>,
    /// What the store believes of the target, for the connections to come.
    affinity: Affinity,
    claims: Claims,
    fencing: Fencing,
    /// The keys that it is no longer registered as waiting for, though nobody asked for that: to be told.
    unregistered: Vec<Key>,
    answered: Instant,
}

/// How the transactions are fenced of what this session holds.
#[derive(Clone, Debug)]
pub(super) struct Fencing {
    pub(super) place: Place,
    /// How long a fenced transaction may be idle.
    pub(super) limit: Duration,
    pub(super) broken: Broken,
}

impl PgSession {
    pub(super) fn new(
        link: Link,
        address: String,
        (backend, marker): (Backend, Option<i32>),
        (enforcement, shortfalls): (Enforcement, Vec<String>),
        affinity: Affinity,
        fencing: Fencing,
    ) -> Self {
        debug!(pid = backend.pid, ?enforcement, "session with a PostgreSQL server");
        Self {
            link,
            address,
            backend,
            marker,
            enforcement,
            shortfalls,
            affinity,
            claims: Claims::new(),
            fencing,
            unregistered: Vec::new(),
            answered: clock::now(),
        }
    }

    /// Sends a statement; `Ok(Err)` is an error that the server answered.
    async fn fetch(&mut self, sql: String) -> Result<Result<Vec<PgRow>, (String, String)>, LossCause> {
        let answer = self.link.fetch(sql).await;
        self.take(answer)
    }

    fn take<T>(&mut self, answer: Result<T, sqlx::Error>) -> Result<Result<T, (String, String)>, LossCause> {
        let answer = match answer {
            Ok(rows) => Ok(rows),
            Err(error) => {
                Err(refusal::answered(&error).ok_or_else(|| self.explained(refusal::of_session(&error)))?)
            }
        };
        self.answered = clock::now();
        Ok(answer)
    }

    async fn carry_out(&mut self, work: &Work) -> Result<Result<Outcomes, (String, String)>, LossCause> {
        let answer = match work.quick() {
            Some(quick) => self.link.fetch_quick(quick).await.map(|row| Outcomes::read_quick(&row, work)),
            None => self.link.fetch(work.sql(true)).await.map(|rows| Outcomes::read(&rows, work)),
        };
        match self.take(answer)? {
            Ok(outcomes) => outcomes.map(Ok).map_err(|reason| distrusted(&reason)),
            Err(answered) => Ok(Err(answered)),
        }
    }

    /// Where nobody said why the connection was closed: what it may have been.
    fn explained(&self, cause: LossCause) -> LossCause {
        match cause {
            LossCause::Closed { reason, sqlstate: None } => {
                let silence = Duration::from_millis(millis(clock::now() - self.answered));
                let reason = format!(
                    "{reason}, {} after the last answer: an administrator or a job that ends idle sessions (57P01), a \
                     restart, an idle limit of the server (57P05) or of something in between",
                    humantime::format_duration(silence)
                );
                LossCause::Closed { reason, sqlstate: None }
            }
            cause => cause,
        }
    }

    /// Asks for the lock table until the server can tell.
    async fn look(&mut self) -> Result<Look, LossCause> {
        let mut failure = String::new();
        for _ in 0..ATTEMPTS {
            match self.fetch(statements::LOOK.to_owned()).await? {
                Ok(rows) => {
                    let look = Look::read(&rows).map_err(|error| distrusted(&error.to_string()))?;
                    self.compare(&look)?;
                    return Ok(look);
                }
                Err((_, reason)) => {
                    debug!(reason, "the lock table could not be read");
                    failure = reason;
                }
            }
        }
        Err(distrusted(&format!("its locks could not be listed: {failure}")))
    }

    /// Whether it is still the session that was checked.
    fn compare(&self, look: &Look) -> Result<(), LossCause> {
        if look.backend != self.backend {
            return Err(self.moved());
        }
        if look.is_in_recovery {
            return Err(distrusted("the server has become a read replica"));
        }
        Ok(())
    }

    fn moved(&self) -> LossCause {
        self.affinity.doubt();
        distrusted("it was moved to another server process: a pooler stands in between")
    }

    /// Gives back the term keys of what somebody else has unlocked on this session.
    async fn give_orphans_back(&mut self) -> Result<(), LossCause> {
        let terms = self.claims.take_orphans();
        if !terms.is_empty() {
            let work = Work { terms, ..Work::default() };
            if let Err((_, reason)) = self.fetch(work.sql(false)).await? {
                return Err(distrusted(&format!("a term key could not be given back: {reason}")));
            }
        }
        Ok(())
    }

    /// By what the term of a grant fences transactions, once it has begun.
    fn fence(&self, held: &Held) -> Option<Fence> {
        let term = self.claims.term(held.key).filter(|_| self.claims.holds(held))?;
        let Fencing { place, limit, .. } = &self.fencing;
        let barrier = fence::barrier(held.key, held.mode);
        Some(Fence { term, barrier, place: place.clone(), limit: *limit })
    }

    /// With what fences its transactions, where that was asked for.
    fn with_fence(&self, answer: Answer<Held>, ask: &Ask) -> Answer<Held> {
        match answer {
            Answer::Granted(held) if ask.is_fenced => Answer::Fenced(held, self.fence(&held)),
            // It asked together with one who wants more.
            Answer::Fenced(held, _) if !ask.is_fenced => Answer::Granted(held),
            answer => answer,
        }
    }

    /// After an error in the middle of a message: sees in the lock table what was done, keeps what was asked for, and
    /// does the rest. Those who wait are told once more, since the announcements were undone.
    ///
    /// Out of lock memory, all that the message took is given back: with a full lock table nobody could so much as log
    /// in to the server.
    async fn reconcile(&mut self, undone: Undone<'_>) -> Result<Vec<(usize, Answer<Held>)>, LossCause> {
        let Undone { terms, releases, withdrawals, intents, takes, code, reason } = undone;
        warn!(
            pid = self.backend.pid,
            reason, "the server refused a statement; reconciling with its lock table"
        );
        let mut own = self.look().await?;
        let mut answers = Vec::with_capacity(takes.len());
        let mut unwanted: Vec<Release> = releases.iter().map(Release::of).collect();
        for (asking, take) in takes {
            let is_taken = own.has(take.key);
            if is_taken && code != OUT_OF_LOCK_MEMORY {
                // Also one who joins other readers: with them nobody writes.
                let term = take.beginner().map(|it| it.term());
                let outcome = match term {
                    Some(term) if own.has(term) => FENCED,
                    Some(_) => BLOCKED,
                    None => GRANTED,
                };
                answers.extend(asking.iter().map(|n| (*n, self.claims.answer(take, outcome))));
                continue;
            }
            let why = refusal::of_ask(code, reason);
            answers.extend(asking.iter().map(|n| (*n, Answer::Failed(why.clone()))));
            if !own.has(take.key.waiting()) {
                self.claims.withdraw(take.key);
            }
            if is_taken && !take.joins {
                unwanted.push(Release {
                    key: take.key,
                    mode: take.mode,
                    is_unlocked: false,
                    is_clean: false,
                    is_section: false,
                });
            }
        }
        let no_longer_waited_for: Vec<Key> = withdrawals
            .iter()
            .copied()
            .chain(takes.iter().map(|(_, take)| take.key))
            .filter(|key| !self.claims.waits_for(*key))
            .collect();
        let no_longer_intended: Vec<Key> = intents
            .iter()
            .copied()
            .chain(takes.iter().map(|(_, take)| take.key))
            .filter(|key| !self.claims.intends(*key))
            .collect();
        let kept: HashSet<Key> = self.claims.all_terms().collect();
        let terms: Vec<Key> = terms.into_iter().filter(|key| !kept.contains(key)).collect();
        for attempt in 0..ATTEMPTS {
            let mut work = Work::default();
            work.terms.extend(terms.iter().filter(|key| own.has(**key)));
            work.releases.extend(
                unwanted.iter().map(|release| Release { is_unlocked: !own.has(release.key), ..*release }),
            );
            work.withdrawals.extend(no_longer_waited_for.iter().filter(|key| own.has(key.waiting())));
            work.intents.extend(no_longer_intended.iter().filter(|key| own.has(statements::intent(**key))));
            let is_first = attempt == 0;
            // An announcement needs memory and a commit, which may be just what the server lacks: without, then.
            let is_done = work.terms.is_empty()
                && work.withdrawals.is_empty()
                && work.intents.is_empty()
                && work.releases.iter().all(|release| release.is_unlocked);
            if is_done && (!is_first || work.releases.is_empty()) {
                return Ok(answers);
            }
            match self.fetch(work.sql(is_first)).await? {
                Ok(_) => return Ok(answers),
                Err((_, reason)) => debug!(reason, "what was left over could not be released yet"),
            }
            own = self.look().await?;
        }
        Err(distrusted(&format!("locks that nobody asked to keep could not be released: {reason}")))
    }
}

/// A message that the server answered with an error.
struct Undone<'a> {
    /// The term keys that it gives back or takes.
    terms: Vec<Key>,
    releases: &'a [Return<Held>],
    withdrawals: &'a [Key],
    intents: &'a [Key],
    takes: &'a [(Vec<usize>, Take)],
    code: &'a str,
    reason: &'a str,
}

impl<'a> Undone<'a> {
    const fn nothing(code: &'a str, reason: &'a str) -> Self {
        Self { terms: Vec::new(), releases: &[], withdrawals: &[], intents: &[], takes: &[], code, reason }
    }
}

impl Look {
    fn has(&self, key: Key) -> bool {
        self.locks.iter().any(|lock| lock.key == key)
    }
}

impl Release {
    fn of(lease: &Return<Held>) -> Self {
        let Return { held, is_clean, is_kept: _ } = *lease;
        let Held { key, mode, is_section, .. } = held;
        Self { key, mode, is_unlocked: false, is_clean, is_section }
    }
}

impl Session for PgSession {
    type Held = Held;

    fn enforcement(&self) -> Enforcement {
        self.enforcement
    }

    fn shortfalls(&self) -> Vec<String> {
        self.shortfalls.clone()
    }

    fn address(&self) -> String {
        self.address.clone()
    }

    async fn exchange(&mut self, exchange: &Exchange<Held>) -> Result<Exchanged<Held>, LossCause> {
        let mut ours: Vec<bool> =
            exchange.releases.iter().map(|lease| self.claims.holds(&lease.held)).collect();
        // With the last reader, the lock of all.
        let (mut releases, mut terms) = (Vec::new(), Vec::new());
        for lease in &exchange.releases {
            if let Some(Ended { term }) = self.claims.end(&lease.held) {
                releases.push(lease.clone());
                terms.extend(term);
            }
        }
        let withdrawals: Vec<Key> =
            exchange.withdrawals.iter().copied().filter(|key| self.claims.withdraw(*key)).collect();
        let intents: Vec<Key> =
            exchange.withdrawals.iter().copied().filter(|key| self.claims.give_way(*key)).collect();
        let takes = self.claims.takes(&exchange.asks);
        let work = Work {
            terms,
            releases: releases.iter().map(Release::of).collect(),
            withdrawals: withdrawals.clone(),
            intents: intents.clone(),
            asks: takes.iter().map(|(_, take)| *take).collect(),
            broken: self.fencing.broken,
        };
        // What is held already is somebody's on this very session, who will release it.
        let busy = |_: &Ask| Answer::Busy { registered: true };
        let mut answers: Vec<Answer<Held>> = exchange.asks.iter().map(busy).collect();
        if work.is_empty() {
            // An answer is worth trust: it has to be the server's.
            self.look().await?;
            return Ok(Exchanged { released: ours, answers });
        }
        match self.carry_out(&work).await? {
            Ok(outcomes) => {
                if outcomes.pid != Some(self.backend.pid) {
                    return Err(self.moved());
                }
                let mut gone = HashSet::new();
                for (lease, outcome) in releases.iter().zip(outcomes.releases) {
                    if outcome == "gone" {
                        gone.insert(lease.held.key);
                    }
                }
                for (ours, lease) in ours.iter_mut().zip(&exchange.releases) {
                    *ours &= !gone.contains(&lease.held.key);
                }
                for ((asking, take), outcome) in takes.iter().zip(outcomes.asks) {
                    for n in asking {
                        let answer = self.claims.answer(take, &outcome);
                        answers[*n] = self.with_fence(answer, &exchange.asks[*n]);
                    }
                }
            }
            Err((code, reason)) => {
                let undone = Undone {
                    terms: work.all_terms(),
                    releases: &releases,
                    withdrawals: &withdrawals,
                    intents: &intents,
                    takes: &takes,
                    code: &code,
                    reason: &reason,
                };
                let reconciled = self.reconcile(undone).await?;
                for (n, answer) in reconciled {
                    answers[n] = self.with_fence(answer, &exchange.asks[n]);
                }
            }
        }
        Ok(Exchanged { released: ours, answers })
    }

    async fn pass(&mut self, held: &[Held]) -> Result<Vec<Option<Fence>>, LossCause> {
        let mut beginners: Vec<Beginner> = Vec::new();
        for held in held {
            // One term key for all readers of the session.
            let is_known = beginners.iter().any(|it| it.key == held.key);
            if self.claims.holds(held) && !is_known && self.claims.term(held.key).is_none() {
                beginners.push(self.claims.beginner(held));
            }
        }
        if beginners.is_empty() {
            self.look().await?;
        } else {
            match self.fetch(fence::pass(&beginners, self.fencing.broken)).await? {
                Ok(rows) => {
                    for n in fence::read_passed(&rows).map_err(|error| distrusted(&error.to_string()))? {
                        let beginner = beginners.get(n).ok_or_else(|| distrusted("an answer to nothing"))?;
                        self.claims.begin(beginner.key, beginner.term());
                    }
                }
                Err((code, reason)) => {
                    let terms = beginners.iter().map(Beginner::term).collect();
                    self.reconcile(Undone { terms, ..Undone::nothing(&code, &reason) }).await?;
                }
            }
        }
        Ok(held.iter().map(|held| self.fence(held)).collect())
    }

    async fn blockers(&mut self, held: &[Held]) -> Result<Vec<Option<Blocker>>, LossCause> {
        let keys: Vec<_> = held.iter().map(|held| (held.key, held.mode)).collect();
        let mut blockers = vec![None; held.len()];
        match self.fetch(fence::blockers(&keys)).await? {
            Ok(rows) => {
                let read = fence::read_blockers(&rows, &mut blockers);
                read.map_err(|error| distrusted(&error.to_string()))?;
            }
            Err((_, reason)) => debug!(reason, "who is in the way of a term could not be told"),
        }
        Ok(blockers)
    }

    async fn heartbeat(&mut self, held: &[Held]) -> Result<Vec<bool>, LossCause> {
        let look = self.look().await?;
        let (own, others): (Vec<_>, Vec<_>) =
            look.locks.iter().partition(|lock| self.marker.is_some_and(|marker| lock.is_marker(marker)));
        let unregistered = self.claims.compare(others.into_iter());
        let foreign = |Foreign| distrusted("it has an advisory lock that it did not take");
        self.unregistered.extend(unregistered.map_err(foreign)?);
        self.give_orphans_back().await?;
        if let Some(marker) = self.marker.filter(|_| own.is_empty()) {
            // Somebody has unlocked everything on this session.
            self.fetch(statements::mark(marker)).await?.ok();
        }
        Ok(held.iter().map(|held| self.claims.holds(held)).collect())
    }

    async fn mint(&mut self, held: &Held) -> Result<Minted, LossCause> {
        if !self.claims.holds(held) {
            return Ok(Minted::Gone);
        }
        let mut failure = String::new();
        for _ in 0..ATTEMPTS {
            match self.fetch(statements::mint(held.key)).await? {
                Ok(rows) => {
                    let read = |row: &PgRow| Ok((row.try_get(0)?, row.try_get(1)?));
                    let read: Result<(i32, Option<i64>), sqlx::Error> =
                        rows.first().ok_or(sqlx::Error::RowNotFound).and_then(read);
                    let (pid, number) = read.map_err(|error| distrusted(&error.to_string()))?;
                    if pid != self.backend.pid {
                        return Err(self.moved());
                    }
                    let Some(number) = number else {
                        self.claims.forget(held.key);
                        self.give_orphans_back().await?;
                        return Ok(Minted::Gone);
                    };
                    let token = u64::try_from(number).ok().and_then(FencingToken::new);
                    return Ok(token.map_or_else(|| Minted::Failed(format!("not {number}")), Minted::Token));
                }
                Err((_, reason)) => failure = reason,
            }
        }
        Ok(Minted::Failed(failure))
    }

    async fn slots(&mut self, slots: &Slots) -> Result<Result<Looked, NoSlots>, LossCause> {
        let mut failure = NoSlots::Failed(String::new());
        for _ in 0..ATTEMPTS {
            let (code, reason) = match self.fetch(slots::look(slots)).await? {
                Ok(rows) => {
                    let read = slots::read_look(&rows).map_err(|error| distrusted(&error.to_string()))?;
                    return if read.0 == self.backend.pid { Ok(read.1) } else { Err(self.moved()) };
                }
                Err(answered) => answered,
            };
            failure = slots::refused(&code, &reason);
            if !slots::MISSING.contains(&code.as_str()) {
                break;
            }
            // The first one to need it makes it, where it may; who is too late looks again.
            match self.fetch(slots::DDL.to_owned()).await? {
                Ok(_) => info!(pid = self.backend.pid, "made the table leasehold.slots"),
                Err((code, _)) if slots::MADE_BY_ANOTHER.contains(&code.as_str()) => {}
                Err((code, reason)) => {
                    failure = slots::refused(&code, &reason);
                    break;
                }
            }
        }
        Ok(Err(failure))
    }

    async fn amend(
        &mut self,
        held: &Held,
        slots: &Slots,
        expected: Option<&Record>,
        next: &Entry,
    ) -> Result<Amended, LossCause> {
        if !self.claims.holds(held) {
            return Ok(Amended::Gone);
        }
        let rows = match self.fetch(slots::amend(slots, expected, next)).await? {
            Ok(rows) => rows,
            // Somebody has removed it: the next look makes it anew, or tells what is to be done.
            Err((code, reason)) if slots::MISSING.contains(&code.as_str()) => {
                return Ok(Amended::Failed(NoSlots::Failed(reason)));
            }
            Err((code, reason)) => return Ok(Amended::Failed(slots::refused(&code, &reason))),
        };
        let written = slots::read_amended(&rows).map_err(|error| distrusted(&error.to_string()))?;
        if written.pid != self.backend.pid {
            return Err(self.moved());
        }
        if !written.is_held {
            self.claims.forget(held.key);
            self.give_orphans_back().await?;
            return Ok(Amended::Gone);
        }
        let record = |written| Record { entry: next.clone(), written };
        Ok(written.at.map_or(Amended::Changed, |at| Amended::Done(record(at))))
    }

    async fn publish(&mut self, message: Message) -> Result<bool, LossCause> {
        let sql = statements::publish(&message);
        for _ in 0..ATTEMPTS {
            match self.fetch(sql.clone()).await? {
                Ok(_) => return Ok(true),
                Err((_, reason)) => warn!(?message, reason, "the message could not be sent"),
            }
        }
        Ok(false)
    }

    async fn holders(&mut self, keys: &[Key]) -> Result<Vec<Option<Holder>>, LossCause> {
        let mut holders = vec![None; keys.len()];
        match self.fetch(statements::holders(keys)).await? {
            Ok(rows) => {
                let read = statements::read_holders(&rows, &mut holders);
                read.map_err(|error| distrusted(&error.to_string()))?;
            }
            Err((_, reason)) => debug!(reason, "who holds the locks could not be told"),
        }
        Ok(holders)
    }

    async fn survey(&mut self) -> Result<Option<Vec<Seen>>, LossCause> {
        match self.fetch(statements::survey()).await? {
            Ok(rows) => {
                let read = statements::read_survey(&rows);
                read.map(Some).map_err(|error| distrusted(&error.to_string()))
            }
            Err((_, reason)) => {
                warn!(reason, "the lock table could not be read");
                Ok(None)
            }
        }
    }

    async fn event(&mut self) -> Event {
        if let Some(key) = self.unregistered.pop() {
            return Event::Unregistered(key);
        }
        let notification = match self.link.next().await {
            Ok(notification) => notification,
            Err(cause) => return Event::Closed(self.explained(cause)),
        };
        match statements::read_payload(notification.payload()) {
            Some(Announced::Freed(freed)) if self.claims.waits_for(freed.key) => Event::Freed(freed),
            Some(Announced::Message(Message::Present(presence))) => {
                // The server says who has sent it: nobody answers for others.
                let session = notification.process_id().to_string();
                Event::Message(Message::Present(Presence { session, ..presence }))
            }
            Some(Announced::Message(message)) => Event::Message(message),
            // Not waited out here: anybody may send to the channel, and as much as they like.
            Some(Announced::Freed(_)) | None => Event::Ignored,
        }
    }

    async fn end(mut self) {
        let work = Work {
            releases: self
                .claims
                .all_held()
                .map(|held| Release::of(&Return { held, is_clean: false, is_kept: false }))
                .collect(),
            withdrawals: self.claims.all_waited_for().collect(),
            intents: self.claims.all_intents().collect(),
            terms: self.claims.all_terms().collect(),
            ..Work::default()
        };
        if !work.is_empty()
            && let Err(cause) = self.fetch(work.sql(true)).await
        {
            debug!(%cause, "the session did not end in order");
        }
        // A pooler in session mode that does not reset its connections would hand our settings on.
        let unmark = self.marker.map(statements::unmark).unwrap_or_default();
        self.fetch(format!("UNLISTEN *; RESET ALL; DEALLOCATE ALL; {unmark}")).await.ok();
        self.link.close().await;
    }
}

fn millis(duration: Duration) -> u64 {
    duration.as_millis().try_into().unwrap_or(u64::MAX)
}

fn distrusted(reason: &str) -> LossCause {
    LossCause::Distrusted { reason: reason.to_owned() }
}
