//! One live session: what it holds, what it waits for, and how both are told from the lock table.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use sqlx::Row as _;
use sqlx::postgres::PgRow;
use tokio::time::Instant;
use tracing::{debug, warn};

use super::affinity::Affinity;
use super::checks::{Backend, Look};
use super::link::Link;
use super::refusal;
use super::statements::{self, Announced, Outcomes, Release, Take, Waiting, Work};
use crate::clock;
use crate::error::LossCause;
use crate::fence::FencingToken;
use crate::name::Key;
use crate::store::{
    Answer, Ask, Enforcement, Event, Exchange, Exchanged, Holder, Message, Minted, Mode, Presence, Return,
    Seen, Session,
};

/// How often a statement that the server answered with an error is tried again before the session is given up.
const ATTEMPTS: u32 = 3;

/// `out_of_memory`.
const OUT_OF_LOCK_MEMORY: &str = "53200";

/// One grant of this session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Held {
    key: Key,
    mode: Mode,
    /// Tells apart the grants of one key that follow each other.
    serial: u64,
}

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
    held: HashMap<Key, Held>,
    /// The keys that this session is registered as waiting for.
    waiting: HashSet<Key>,
    /// Those that it no longer is, though nobody asked for that: to be told.
    unregistered: Vec<Key>,
    serial: u64,
    answered: Instant,
}

impl PgSession {
    pub(super) fn new(
        link: Link,
        address: String,
        (backend, marker): (Backend, Option<i32>),
        (enforcement, shortfalls): (Enforcement, Vec<String>),
        affinity: Affinity,
    ) -> Self {
        let (held, waiting) = (HashMap::new(), HashSet::new());
        debug!(pid = backend.pid, ?enforcement, "session with a PostgreSQL server");
        Self {
            link,
            address,
            backend,
            marker,
            enforcement,
            shortfalls,
            affinity,
            held,
            waiting,
            unregistered: Vec::new(),
            serial: 0,
            answered: clock::now(),
        }
    }

    /// Sends a statement; `Ok(Err)` is an error that the server answered.
    async fn fetch(&mut self, sql: String) -> Result<Result<Vec<PgRow>, (String, String)>, LossCause> {
        let answer = match self.link.fetch(sql).await {
            Ok(rows) => Ok(rows),
            Err(error) => {
                Err(refusal::answered(&error).ok_or_else(|| self.explained(refusal::of_session(&error)))?)
            }
        };
        self.answered = clock::now();
        Ok(answer)
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

    fn takes(&self, asks: &[Ask]) -> Vec<(usize, Take)> {
        let mut seen = HashSet::new();
        // Session locks stack: what is held already, or asked for twice, is not asked for.
        let fresh =
            |ask: &Ask, seen: &mut HashSet<Key>| !self.held.contains_key(&ask.key) && seen.insert(ask.key);
        asks.iter()
            .enumerate()
            .filter(|(_, ask)| fresh(ask, &mut seen))
            .map(|(n, ask)| {
                let waiting = if self.waiting.contains(&ask.key) {
                    Waiting::Registered
                } else if ask.register {
                    Waiting::Register
                } else {
                    Waiting::No
                };
                (n, Take { key: ask.key, mode: ask.mode, waiting })
            })
            .collect()
    }

    fn grant(&mut self, take: &Take) -> Answer<Held> {
        self.serial += 1;
        let held = Held { key: take.key, mode: take.mode, serial: self.serial };
        self.held.insert(take.key, held);
        self.waiting.remove(&take.key);
        Answer::Granted(held)
    }

    /// After an error in the middle of a message: sees in the lock table what was done, keeps what was asked for, and
    /// does the rest. Those who wait are told once more, since the announcements were undone.
    ///
    /// Out of lock memory, all that the message took is given back: with a full lock table nobody could so much as log
    /// in to the server.
    async fn reconcile(&mut self, undone: Undone<'_>) -> Result<Vec<Answer<Held>>, LossCause> {
        let Undone { releases, withdrawals, takes, code, reason } = undone;
        warn!(
            pid = self.backend.pid,
            reason, "the server refused a statement; reconciling with its lock table"
        );
        let mut own = self.look().await?.keys();
        let mut answers = Vec::with_capacity(takes.len());
        let mut unwanted: Vec<Release> = releases.iter().map(Release::of).collect();
        for (_, take) in takes {
            let is_taken = own.contains(&take.key);
            if is_taken && code != OUT_OF_LOCK_MEMORY {
                answers.push(self.grant(take));
                continue;
            }
            answers.push(Answer::Failed(refusal::of_ask(code, reason)));
            if !own.contains(&take.key.waiting()) {
                self.waiting.remove(&take.key);
            }
            if is_taken {
                unwanted.push(Release {
                    key: take.key,
                    mode: take.mode,
                    is_unlocked: false,
                    is_clean: false,
                });
            }
        }
        let no_longer_waited_for: Vec<Key> = withdrawals
            .iter()
            .copied()
            .chain(takes.iter().map(|(_, take)| take.key))
            .filter(|key| !self.waiting.contains(key))
            .collect();
        for attempt in 0..ATTEMPTS {
            let mut work = Work::default();
            work.releases.extend(
                unwanted
                    .iter()
                    .map(|release| Release { is_unlocked: !own.contains(&release.key), ..*release }),
            );
            work.withdrawals.extend(no_longer_waited_for.iter().filter(|key| own.contains(&key.waiting())));
            let is_first = attempt == 0;
            // An announcement needs memory and a commit, which may be just what the server lacks: without, then.
            let is_done =
                work.withdrawals.is_empty() && work.releases.iter().all(|release| release.is_unlocked);
            if is_done && (!is_first || work.releases.is_empty()) {
                return Ok(answers);
            }
            match self.fetch(work.sql(is_first)).await? {
                Ok(_) => return Ok(answers),
                Err((_, reason)) => debug!(reason, "what was left over could not be released yet"),
            }
            own = self.look().await?.keys();
        }
        Err(distrusted(&format!("locks that nobody asked to keep could not be released: {reason}")))
    }
}

/// A message that the server answered with an error.
struct Undone<'a> {
    releases: &'a [Return<Held>],
    withdrawals: &'a [Key],
    takes: &'a [(usize, Take)],
    code: &'a str,
    reason: &'a str,
}

impl Look {
    fn keys(&self) -> HashSet<Key> {
        self.locks.iter().map(|lock| lock.key).collect()
    }
}

impl Release {
    fn of(lease: &Return<Held>) -> Self {
        let Return { held, is_clean } = *lease;
        Self { key: held.key, mode: held.mode, is_unlocked: false, is_clean }
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
        let is_ours = |lease: &Return<Held>| self.held.get(&lease.held.key) == Some(&lease.held);
        let mut ours: Vec<bool> = exchange.releases.iter().map(is_ours).collect();
        let releases: Vec<Return<Held>> = exchange
            .releases
            .iter()
            .zip(&ours)
            .filter(|(_, ours)| **ours)
            .map(|(it, _)| it.clone())
            .collect();
        for lease in &releases {
            self.held.remove(&lease.held.key);
        }
        let withdrawals: Vec<Key> =
            exchange.withdrawals.iter().copied().filter(|key| self.waiting.remove(key)).collect();
        let takes = self.takes(&exchange.asks);
        let work = Work {
            releases: releases.iter().map(Release::of).collect(),
            withdrawals: withdrawals.clone(),
            asks: takes.iter().map(|(_, take)| *take).collect(),
        };
        // What is held already is somebody's on this very session, who will release it.
        let busy = |_: &Ask| Answer::Busy { registered: true };
        let mut answers: Vec<Answer<Held>> = exchange.asks.iter().map(busy).collect();
        if work.is_empty() {
            // An answer is worth trust: it has to be the server's.
            self.look().await?;
            return Ok(Exchanged { released: ours, answers });
        }
        match self.fetch(work.sql(true)).await? {
            Ok(rows) => {
                let outcomes = Outcomes::read(&rows, &work).map_err(|reason| distrusted(&reason))?;
                if outcomes.pid != Some(self.backend.pid) {
                    return Err(self.moved());
                }
                for (ours, outcome) in ours.iter_mut().filter(|ours| **ours).zip(outcomes.releases) {
                    *ours = outcome != "gone";
                }
                for ((n, take), outcome) in takes.iter().zip(outcomes.asks) {
                    answers[*n] = match outcome.as_str() {
                        "waiting" => {
                            self.waiting.insert(take.key);
                            Answer::Busy { registered: true }
                        }
                        "busy" => Answer::Busy { registered: false },
                        _ => self.grant(take),
                    };
                }
            }
            Err((code, reason)) => {
                let undone = Undone {
                    releases: &releases,
                    withdrawals: &withdrawals,
                    takes: &takes,
                    code: &code,
                    reason: &reason,
                };
                let reconciled = self.reconcile(undone).await?;
                for ((n, _), answer) in takes.iter().zip(reconciled) {
                    answers[*n] = answer;
                }
            }
        }
        Ok(Exchanged { released: ours, answers })
    }

    async fn heartbeat(&mut self, held: &[Held]) -> Result<Vec<bool>, LossCause> {
        let look = self.look().await?;
        let mut missing: HashSet<Key> = self.held.keys().copied().collect();
        let mut unregistered = self.waiting.clone();
        let waited_for: HashMap<Key, Key> = self.waiting.iter().map(|key| (key.waiting(), *key)).collect();
        let (own, others): (Vec<_>, Vec<_>) =
            look.locks.iter().partition(|lock| self.marker.is_some_and(|marker| lock.is_marker(marker)));
        for lock in others {
            let held = self.held.get(&lock.key).filter(|held| lock.is_in(held.mode));
            let waiting = waited_for.get(&lock.key).filter(|_| lock.is_in(Mode::Shared));
            match (held, waiting) {
                (Some(held), _) => drop(missing.remove(&held.key)),
                (None, Some(key)) => drop(unregistered.remove(key)),
                // Somebody else runs statements on it, or an earlier one is carried out twice.
                (None, None) => return Err(distrusted("it has an advisory lock that it did not take")),
            }
        }
        for key in missing {
            self.held.remove(&key);
        }
        for key in unregistered {
            self.waiting.remove(&key);
            self.unregistered.push(key);
        }
        if let Some(marker) = self.marker.filter(|_| own.is_empty()) {
            // Somebody has unlocked everything on this session.
            self.fetch(statements::mark(marker)).await?.ok();
        }
        Ok(held.iter().map(|held| self.held.get(&held.key) == Some(held)).collect())
    }

    async fn mint(&mut self, held: &Held) -> Result<Minted, LossCause> {
        if self.held.get(&held.key) != Some(held) {
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
                        self.held.remove(&held.key);
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
            Some(Announced::Freed(freed)) if self.waiting.contains(&freed.key) => Event::Freed(freed),
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
                .held
                .values()
                .map(|&held| Release::of(&Return { held, is_clean: false }))
                .collect(),
            withdrawals: self.waiting.iter().copied().collect(),
            asks: Vec::new(),
        };
        if !work.is_empty()
            && let Err(cause) = self.fetch(work.sql(true)).await
        {
            debug!(%cause, "the session did not end in order");
        }
        // A pooler in session mode that does not reset its connections would hand our settings on.
        let unmark = self.marker.map(statements::unmark).unwrap_or_default();
        self.fetch(format!("UNLISTEN *; RESET ALL; {unmark}")).await.ok();
        self.link.close().await;
    }
}

fn millis(duration: Duration) -> u64 {
    duration.as_millis().try_into().unwrap_or(u64::MAX)
}

fn distrusted(reason: &str) -> LossCause {
    LossCause::Distrusted { reason: reason.to_owned() }
}
