//! Critical sections: who asks, who is in, and what they are told. At most one writer or any readers are in, by the same
//! judge as for jobs; nobody waits for ever; and whatever is answered is so.

use std::collections::BTreeMap;
use std::future::{self, Future};
use std::pin::pin;
use std::time::Duration;

use tokio::time::Instant;

use super::{Body, Host, State, World};
use crate::error::LossCause;
use crate::fence::{FencingToken, TokenError};
use crate::name::{Key, Kind};
use crate::options::JITTER;
use crate::store::Mode;
use crate::{Lease, LockError, clock};

/// How long anybody is in who was not told to leave, at most.
pub(in crate::simulation) const LONGEST_STAY: Duration = Duration::from_secs(4);

/// How long anybody keeps the guard of a lock that is lost, at most.
pub(in crate::simulation) const LONGEST_KEPT: Duration = Duration::from_secs(5);

/// A timer of tokio may fire a millisecond late.
const PUNCTUAL: Duration = Duration::from_millis(5);

/// A critical section that visitors contend for.
#[derive(Clone, Copy, Debug)]
pub(in crate::simulation) struct Section {
    pub(in crate::simulation) name: &'static str,
    pub(in crate::simulation) kind: Kind,
}

impl Section {
    pub(in crate::simulation) const ALL: [Self; 3] = [
        Self { name: "invoice", kind: Kind::Lock },
        // Of one visitor that writes, and of many that read as often as they can.
        Self { name: "catalogue", kind: Kind::RwLock },
        Self { name: "prices", kind: Kind::RwLock },
    ];

    pub(super) fn key(self) -> Key {
        Key::of(self.kind, self.name)
    }
}

/// How long somebody waits to get in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::simulation) enum Patience {
    None,
    Endless,
    Until(Duration),
}

impl Patience {
    /// It asks once, and waits for the answer only.
    const fn is_try(self) -> bool {
        matches!(self, Self::None | Self::Until(Duration::ZERO))
    }
}

/// One attempt to get in.
#[derive(Clone, Copy)]
pub(in crate::simulation) struct Visit {
    host: Host,
    section: Section,
    mode: Mode,
    patience: Patience,
    asked: Instant,
}

#[derive(Default)]
pub(super) struct Visits {
    /// Who asks, and was not answered yet.
    asking: BTreeMap<u64, Visit>,
    asked: u64,
    /// How many visitors a section has, and how many of them write.
    crowds: BTreeMap<&'static str, (u32, u32)>,
    revoked: BTreeMap<(Host, &'static str), Instant>,
    /// By the order in which their holders came.
    tokens: BTreeMap<&'static str, BTreeMap<u64, FencingToken>>,
    /// Who has left, when, and whether the lock was seen to be lost before.
    left: BTreeMap<u64, (Body, Instant, bool)>,
    /// Nobody comes again.
    draining: bool,
}

impl State {
    pub(super) fn check_visits(&mut self, limit: Duration) {
        let now = clock::now();
        // What the last fault left behind is over by then, and so is what was kept of it.
        let aftermath = limit + LONGEST_KEPT;
        let is_calm = self.down_until.is_none() && self.hosts.iter().all(super::Faults::is_well);
        let calm_since = self.disturbed.map_or(self.begun, |at| at + aftermath);
        let mut wrong = Vec::new();
        for section in Section::ALL {
            let vacant = self.vacant_for(section.name, section.key(), limit);
            for visit in self.visits.asking.values().filter(|visit| visit.section.name == section.name) {
                let (host, asked, faults) = (visit.host, visit.asked, &self.hosts[visit.host.0]);
                if let Some(closed) = faults.closed
                    && faults.frozen_until.is_none()
                    && now > closed.max(asked).max(faults.thawed) + PUNCTUAL
                {
                    wrong.push(format!("{host} waits for {}, and its locker is closed", section.name));
                }
                if visit.patience != Patience::Endless {
                    continue;
                }
                if let (Some(since), Some(vacant)) = (self.reaches_the_server_since(host), vacant)
                    && now.saturating_duration_since(since.max(asked)) > limit
                {
                    wrong.push(format!("nobody is in {} for {vacant:?}, though {host} waits", section.name));
                }
                let waited = now.saturating_duration_since(calm_since.max(asked));
                if let Some(bound) = self.longest_wait(*visit)
                    && is_calm
                    && waited > bound
                {
                    let mode = visit.mode;
                    wrong.push(format!(
                        "{host} waits for {} ({mode:?}) longer than {bound:?}: others always come first",
                        section.name
                    ));
                }
            }
        }
        for what in wrong {
            self.violated(&what);
        }
    }

    /// How long a visitor may have to wait where nothing goes wrong.
    fn longest_wait(&self, visit: Visit) -> Option<Duration> {
        // A release that was not pushed is found by the next poll.
        let turn = LONGEST_STAY + self.retry_interval.mul_f64(1.0 + JITTER);
        let (visitors, writers) = self.visits.crowds[visit.section.name];
        if visit.mode == Mode::Write && writers == 1 {
            // Those of its own process that were there before it; and then those who were in when it registered.
            Some(LONGEST_STAY + turn)
        } else if self.hosts[visit.host.0].is_deaf || self.hosts.len() > 2 {
            // Polls find the section free, or do not: that is luck. And no order holds between processes: of three, two
            // that are quick can pass it to and fro for as long as somebody waits on both.
            None
        } else {
            // Each of the others comes first, some of them again; but few stay for as long as they may.
            Some(turn + LONGEST_STAY * visitors)
        }
    }

    /// Whether anything went wrong of late with a host, or since then.
    fn was_troubled_since(&self, host: Host, since: Instant) -> bool {
        let faults = &self.hosts[host.0];
        // For as long as it may take to get over it.
        let lately = self.bounds.ttl + self.query_timeout + self.retry_interval;
        !faults.is_well()
            || self.down_until.is_some()
            || faults.troubled.is_some_and(|at| at + lately >= since)
    }

    fn judge_error(&mut self, visit: Visit, error: &LockError) {
        let Visit { host, section, patience, asked, .. } = visit;
        let name = section.name;
        self.note(format_args!("{host} {name}: {error}"));
        let now = clock::now();
        let is_right = match error {
            LockError::Closed => self.hosts[host.0].closed.is_some(),
            LockError::Timeout { waited, .. } => match patience {
                Patience::Until(limit) => *waited >= limit && now - asked >= limit,
                _ => false,
            },
            LockError::Unanswered { limit } => {
                patience.is_try() && now - asked >= *limit && self.was_troubled_since(host, asked)
            }
            LockError::Lost { cause: LossCause::Gone } => {
                let was_revoked = self.visits.revoked.get(&(host, name)).is_some_and(|at| *at >= asked);
                // A release that was not answered tells nobody that the lock was held to the end.
                was_revoked || self.was_troubled_since(host, asked)
            }
            LockError::Lost { cause: LossCause::Driver | LossCause::Distrusted { .. } } => false,
            LockError::Lost { .. } => self.was_troubled_since(host, asked),
            _ => false,
        };
        if !is_right {
            let waited = now - asked;
            self.violated(&format!(
                "{host} {name} ({patience:?}), after {waited:?}: {error}, without a reason"
            ));
        }
    }

    /// Somebody who asked is answered, whatever the answer.
    fn judge_answer(&mut self, visit: Visit, is_in: bool) {
        let Visit { host, section, patience, asked, .. } = visit;
        let faults = &self.hosts[host.0];
        let limit = match patience {
            Patience::Endless => None,
            // One whose question leaves late waits for the answer as long again.
            _ if patience.is_try() => Some(self.query_timeout * 2),
            Patience::Until(limit) => Some(limit),
            Patience::None => None,
        };
        let now = clock::now();
        if let Some(limit) = limit
            && now > (asked + limit).max(faults.thawed) + PUNCTUAL
        {
            let waited = now - asked;
            self.violated(&format!("{host} {} waits for {waited:?} instead of {limit:?}", section.name));
        } else if is_in && faults.closed.is_some_and(|closed| asked > closed) {
            self.violated(&format!("{host} gets into {} after its locker was closed", section.name));
        }
    }
}

impl World {
    pub(in crate::simulation) fn joins(&self, section: Section, writes: bool) {
        let mut state = self.state();
        let crowd = state.visits.crowds.entry(section.name).or_default();
        crowd.0 += 1;
        crowd.1 += u32::from(writes);
    }

    /// Nobody is to come again.
    pub(in crate::simulation) fn drain(&self) {
        let mut state = self.state();
        state.note(format_args!("nobody comes again"));
        state.visits.draining = true;
    }

    pub(in crate::simulation) fn is_draining(&self) -> bool {
        let state = self.state();
        state.visits.draining || state.closing
    }

    pub(in crate::simulation) fn longest_visit(&self) -> Duration {
        let state = self.state();
        let visitors = state.visits.crowds.values().map(|(visitors, _)| *visitors).max().unwrap_or_default();
        let turn = LONGEST_STAY + state.retry_interval.mul_f64(1.0 + JITTER);
        drop(state);
        self.vacancy_limit() + LONGEST_KEPT + turn * (visitors * 3 + 1)
    }

    pub(in crate::simulation) fn somebody_asks(&self) -> bool {
        !self.state().visits.asking.is_empty()
    }

    pub(in crate::simulation) fn revoke_section(&self, host: Host, section: Section) {
        let mut state = self.state();
        state.note(format_args!("{host} {} revoked", section.name));
        state.deprive(host, Some(section.name));
        state.visits.revoked.insert((host, section.name), clock::now());
        let memory = state.memory.clone();
        drop(state);
        memory.revoke_key(&self.identity(host), section.key());
    }

    /// A Locker is about to be closed.
    pub(in crate::simulation) fn closes(&self, host: Host) {
        let mut state = self.state();
        state.note(format_args!("{host} closes"));
        state.hosts[host.0].closed.get_or_insert(clock::now());
        state.disturbed = Some(clock::now());
    }

    pub(in crate::simulation) fn deafen(&self, host: Host) {
        let mut state = self.state();
        state.note(format_args!("{host} is deaf"));
        state.hosts[host.0].is_deaf = true;
        let memory = state.memory.clone();
        drop(state);
        memory.lose_pushes(&self.identity(host), true);
    }

    pub(in crate::simulation) fn has_closed(&self, host: Host) -> bool {
        self.state().hosts[host.0].closed.is_some()
    }

    pub(in crate::simulation) fn hangs(&self, what: &str) {
        self.state().violated(&format!("{what} hangs"));
    }

    pub(in crate::simulation) fn asks(
        &self,
        host: Host,
        section: Section,
        mode: Mode,
        patience: Patience,
    ) -> Asking {
        let mut state = self.state();
        state.note(format_args!("{host} {}: asks ({mode:?}, {patience:?})", section.name));
        state.visits.asked += 1;
        let number = state.visits.asked;
        let visit = Visit { host, section, mode, patience, asked: clock::now() };
        state.visits.asking.insert(number, visit);
        drop(state);
        Asking { world: self.clone(), number, visit }
    }

    pub(in crate::simulation) fn minted(
        &self,
        (number, visit): (u64, Visit),
        minted: &Result<FencingToken, TokenError>,
    ) {
        let mut state = self.state();
        let Visit { host, section, asked, .. } = visit;
        let name = section.name;
        match minted {
            Ok(token) => {
                let tokens = state.visits.tokens.entry(name).or_default();
                let is_greater =
                    tokens.range(..number).next_back().is_none_or(|(_, earlier)| earlier < token);
                let is_less = tokens.range(number..).next().is_none_or(|(_, later)| later > token);
                tokens.insert(number, *token);
                if !(is_greater && is_less) {
                    state.violated(&format!("{host} {name}: token {token} is out of order"));
                }
            }
            Err(TokenError::Over { .. } | TokenError::Refused { .. }) => {
                let is_closed = state.hosts[host.0].closed.is_some();
                if !is_closed && !state.was_troubled_since(host, asked) {
                    state.violated(&format!("{host} {name}: no token, without a reason"));
                }
            }
        }
    }

    /// Somebody who was in has released, and was told how that went.
    pub(in crate::simulation) fn parted(
        &self,
        visit: Visit,
        number: Option<u64>,
        result: Result<(), &LockError>,
    ) {
        let mut state = self.state();
        let Visit { host, section, .. } = visit;
        let left = number.and_then(|number| state.visits.left.remove(&number));
        match (result, left) {
            (Err(error), _) => state.judge_error(visit, error),
            (Ok(()), None) => state.violated(&format!("{host} {}: a value of nobody", section.name)),
            (Ok(()), Some((body, ended, saw_loss))) => {
                // Whoever is cut off may not have heard of it, and one whose release is not answered never will.
                let could_know = state.reaches_the_server_since(host);
                let was_taken = body
                    .deprived
                    .filter(|at| *at < ended)
                    .filter(|at| could_know.is_some_and(|since| since <= *at));
                if saw_loss || was_taken.is_some() {
                    let name = section.name;
                    state.violated(&format!("{host} {name} term {}: Ok, and it was lost", body.term));
                }
            }
        }
    }

    /// Everybody has left, and nothing goes wrong any more.
    pub(in crate::simulation) fn check_that_nobody_is_in(&self) {
        let mut state = self.state();
        for section in Section::ALL {
            let (name, key) = (section.name, section.key());
            let (holders, waiters) = (state.memory.holders_for(key), state.memory.waiters_for(key));
            if !holders.is_empty() || waiters > 0 {
                state.violated(&format!("nobody uses {name}, yet {holders:?} hold it and {waiters} wait"));
            }
        }
    }
}

/// Somebody who asks, until they are answered, or give up.
pub(in crate::simulation) struct Asking {
    world: World,
    number: u64,
    visit: Visit,
}

impl Asking {
    pub(in crate::simulation) const fn visit(&self) -> Visit {
        self.visit
    }

    /// Not let in.
    pub(in crate::simulation) fn turned_away(self, error: Option<&LockError>) {
        let mut state = self.world.state();
        let Visit { host, section, patience, .. } = self.visit;
        state.judge_answer(self.visit, false);
        match error {
            Some(error) => state.judge_error(self.visit, error),
            None if patience == Patience::None => {
                state.note(format_args!("{host} {}: somebody is in", section.name));
            }
            None => {
                state.violated(&format!("{host} {}: somebody is in, said to one who waits", section.name));
            }
        }
    }

    pub(in crate::simulation) fn enters(self, lease: &Lease) -> Inside {
        let mut state = self.world.state();
        let Visit { host, section, mode, .. } = self.visit;
        state.judge_answer(self.visit, true);
        state.note(format_args!("{host} {} term {} starts ({mode:?})", section.name, lease.term()));
        let number = state.begin(host, section.name, mode, lease.term());
        drop(state);
        Inside { world: self.world.clone(), number, saw_loss: false }
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        let mut state = self.world.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        state.visits.asking.remove(&self.number);
    }
}

/// Somebody who is in, until they have left.
pub(in crate::simulation) struct Inside {
    world: World,
    pub(in crate::simulation) number: u64,
    saw_loss: bool,
}

impl Inside {
    /// What the body of a closure form does: the product drops it when it has to end.
    pub(in crate::simulation) async fn act<F: Future>(&mut self, work: F, lease: &Lease) -> F::Output {
        let mut work = pin!(work);
        future::poll_fn(|cx| {
            self.saw_loss |= !lease.is_held();
            self.world.state().acts(self.number);
            work.as_mut().poll(cx)
        })
        .await
    }

    /// What the owner of a guard does, who has to stop by themselves within the grace after a loss. `None` if they had
    /// to.
    pub(in crate::simulation) async fn act_with_guard<F: Future>(
        &mut self,
        work: F,
        lease: &Lease,
    ) -> Option<F::Output> {
        let grace = self.world.state().stop_grace;
        let mut work = pin!(work);
        let mut lost = pin!(lease.lost());
        let mut until = None;
        future::poll_fn(|cx| {
            let now = clock::now();
            if lease.is_held() {
                // It only wakes.
                let _ = lost.as_mut().poll(cx);
            } else {
                self.saw_loss = true;
                // One that stood still hears of it late: the grace is over all the same.
                let until = *until.get_or_insert(now.min(lease.deadline()) + grace);
                if now >= until {
                    return std::task::Poll::Ready(None);
                }
            }
            self.world.state().acts(self.number);
            work.as_mut().poll(cx).map(Some)
        })
        .await
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        let mut state = self.world.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(body) = state.end(self.number) {
            state.visits.left.insert(self.number, (body, clock::now(), self.saw_loss));
        }
    }
}
