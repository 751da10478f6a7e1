//! The server: its sessions, what they hold and wait for, and what it sends them.
//!
//! Pure and synchronous: the caller says what time it is, and carries the [`outbox`](Server::outbox) away.

use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::time::Duration;

use tokio::time::Instant;

use crate::error::LossCause;
use crate::fence::FencingToken;
use crate::name::Key;
use crate::store::slots::{Amended, Entry, Looked, Moment, Record};
use crate::store::{
    self, Answer, Ask, Call, Event, Exchange, Exchanged, Freed, Message, Minted, Mode, Presence, Return, Seen,
};

/// What a lock is tied to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rule {
    /// To its session: it goes when the session ends, and a session ends when it has been idle for its ttl.
    Session,
    /// To the clock: it goes `ask.ttl` after the grant, or after the last heartbeat that confirmed it.
    Expiry,
}

/// A session, as the server counts them. Never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SessionId(u64);

/// Has what was left to its time to live. Sessions are counted from 1.
const NOBODY: SessionId = SessionId(0);

/// The proof of one grant. The number is never used twice, so an old proof says nothing about a newer grant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Held {
    key: Key,
    grant: u64,
}

#[derive(Debug)]
struct Live {
    identity: String,
    ttl: Duration,
    /// When the server finished its last statement.
    idle_since: Instant,
    waits_for: BTreeSet<Key>,
    /// Those of them that it waits for to write, and when it last said so. Where keys expire, so does that: the session of
    /// a process that stands still does not end there.
    writes: BTreeMap<Key, Instant>,
}

#[derive(Debug)]
struct Holder {
    grant: u64,
    session: SessionId,
    /// Of the process, which under [`Rule::Expiry`] holds the key on when its session is gone.
    identity: String,
    mode: Mode,
    ttl: Duration,
    /// When it was granted, or last confirmed by a heartbeat.
    confirmed: Instant,
}

/// One key. Kept when nobody holds it, for its count.
#[derive(Debug, Default)]
struct Lock {
    holders: Vec<Holder>,
    grants: u64,
}

/// What its clock shows at first, when it is first looked at: 2026-01-01, midnight, the same in every test.
const FIRST_MOMENT: Moment = Moment(1_767_225_600_000_000);

/// The server's wall clock, which goes with tokio's.
#[derive(Debug)]
struct Clock {
    set: Option<Instant>,
    /// What it showed then.
    showed: Moment,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Server {
    rule: Rule,
    /// A session is granted what it holds already.
    stacks: bool,
    accepts: bool,
    last_session: u64,
    last_grant: u64,
    /// Outlives whatever happens to the server.
    last_token: u64,
    /// So do they.
    slots: BTreeMap<Key, Record>,
    clock: Clock,
    sessions: BTreeMap<SessionId, Live>,
    /// No session has been idle for too long before that: looked at so often that it counts.
    idle_until: Option<Instant>,
    locks: BTreeMap<Key, Lock>,
    statements: BTreeMap<String, u64>,
    outbox: Vec<(SessionId, Event)>,
}

impl Server {
    pub(crate) fn new(rule: Rule) -> Self {
        Self {
            rule,
            stacks: false,
            accepts: true,
            last_session: 0,
            last_grant: 0,
            last_token: 0,
            slots: BTreeMap::new(),
            clock: Clock { set: None, showed: FIRST_MOMENT },
            sessions: BTreeMap::new(),
            idle_until: None,
            locks: BTreeMap::new(),
            statements: BTreeMap::new(),
            outbox: Vec::new(),
        }
    }

    #[cfg(test)]
    pub(crate) const fn stack(&mut self) {
        self.stacks = true;
    }

    pub(crate) const fn rule(&self) -> Rule {
        self.rule
    }

    /// Takes away what the server has sent since the last call, in order.
    pub(crate) fn outbox(&mut self) -> Vec<(SessionId, Event)> {
        mem::take(&mut self.outbox)
    }

    /// Applies what time has done. Nothing else looks at the clock's effects, so this comes before every other call.
    pub(crate) fn expire(&mut self, now: Instant) {
        match self.rule {
            Rule::Session => {
                if self.idle_until.is_none_or(|until| now < until) {
                    return;
                }
                let limit = |live: &Live| live.idle_since + live.ttl;
                let over = self.sessions.iter().filter(|(_, live)| limit(live) <= now);
                let over: Vec<_> = over.map(|(id, _)| *id).collect();
                for id in over {
                    self.terminate(id, &idle_timeout());
                }
                self.idle_until = self.sessions.values().map(limit).min();
            }
            Rule::Expiry => {
                self.drop_holders(|_, holder| holder.confirmed + holder.ttl <= now);
            }
        }
    }

    /// When the server will end this session if no statement of it comes. `None`: never, or it is gone.
    pub(crate) fn idle_limit(&self, id: SessionId) -> Option<Instant> {
        match self.rule {
            Rule::Session => self.sessions.get(&id).map(|live| live.idle_since + live.ttl),
            Rule::Expiry => None,
        }
    }

    /// Opens a session. `None`: the server is down.
    pub(crate) fn connect(&mut self, identity: &str, ttl: Duration, now: Instant) -> Option<SessionId> {
        if !self.accepts {
            return None;
        }
        self.last_session += 1;
        let id = SessionId(self.last_session);
        let identity = identity.to_owned();
        let (waits_for, writes) = (BTreeSet::new(), BTreeMap::new());
        self.idle_until = Some(self.idle_until.map_or(now + ttl, |until| until.min(now + ttl)));
        self.sessions.insert(id, Live { identity, ttl, idle_since: now, waits_for, writes });
        Some(id)
    }

    /// Carries out one statement. `None`, and nothing done: the session has ended.
    pub(crate) fn carry_out<T>(
        &mut self,
        id: SessionId,
        now: Instant,
        statement: impl FnOnce(&mut Self, SessionId, Instant) -> T,
    ) -> Option<T> {
        let live = self.sessions.get_mut(&id)?;
        live.idle_since = now;
        *self.statements.entry(live.identity.clone()).or_default() += 1;
        Some(statement(self, id, now))
    }

    /// Releases, then withdrawals, then attempts. Statement.
    pub(crate) fn exchange(
        &mut self,
        id: SessionId,
        exchange: &Exchange<Held>,
        now: Instant,
    ) -> Exchanged<Held> {
        let give_back = |lease: &Return<Held>| {
            if lease.is_kept { self.keep(&lease.held, now) } else { self.release(id, lease) }
        };
        let released = exchange.releases.iter().map(give_back).collect();
        for key in &exchange.withdrawals {
            let Some(live) = self.sessions.get_mut(&id) else { break };
            live.waits_for.remove(key);
            if live.writes.remove(key).is_some() {
                // Readers that were kept out may come in.
                self.push(id, Freed { key: *key, is_clean: false });
            }
        }
        let answers = exchange.asks.iter().map(|ask| self.ask(id, ask, now)).collect();
        Exchanged { released, answers }
    }

    fn release(&mut self, id: SessionId, Return { held, is_clean, .. }: &Return<Held>) -> bool {
        let freed = Freed { key: held.key, is_clean: *is_clean };
        let was_held = self.drop_holders(|key, holder| *key == held.key && holder.grant == held.grant);
        if was_held {
            self.push(id, freed);
        }
        was_held
    }

    /// Leaves a lock to its time to live, which begins anew.
    fn keep(&mut self, held: &Held, now: Instant) -> bool {
        let mut holders = self.locks.get_mut(&held.key).into_iter().flat_map(|lock| &mut lock.holders);
        let holder = holders.find(|holder| holder.grant == held.grant);
        holder.map(|holder| (holder.session, holder.confirmed) = (NOBODY, now)).is_some()
    }

    /// Tells every other session that waits for the key.
    fn push(&mut self, from: SessionId, freed: Freed) {
        let waits = |(other, live): (&SessionId, &Live)| {
            (*other != from && live.waits_for.contains(&freed.key)).then_some((*other, Event::Freed(freed)))
        };
        self.outbox.extend(self.sessions.iter().filter_map(waits));
    }

    fn ask(&mut self, id: SessionId, ask: &Ask, now: Instant) -> Answer<Held> {
        let Some(live) = self.sessions.get_mut(&id) else {
            return Answer::Busy { registered: false };
        };
        if ask.register {
            live.waits_for.insert(ask.key);
        }
        let registered = live.waits_for.contains(&ask.key);
        if registered && ask.mode == Mode::Write {
            live.writes.insert(ask.key, now);
        }
        let expires = self.rule == Rule::Expiry;
        let keeps_out = |live: &Live| {
            let said = live.writes.get(&ask.key);
            ask.mode == Mode::Read && said.is_some_and(|at| !expires || *at + live.ttl > now)
        };
        let is_kept_out = self.sessions.values().any(keeps_out);
        let lock = self.locks.entry(ask.key).or_default();
        let stacks = self.stacks;
        let shares = |holder: &Holder| {
            (holder.mode, ask.mode) == (Mode::Read, Mode::Read) || stacks && holder.session == id
        };
        let Some(live) =
            self.sessions.get_mut(&id).filter(|_| !is_kept_out && lock.holders.iter().all(shares))
        else {
            return Answer::Busy { registered };
        };
        live.waits_for.remove(&ask.key);
        live.writes.remove(&ask.key);
        self.last_grant += 1;
        lock.grants += 1;
        lock.holders.push(Holder {
            grant: self.last_grant,
            session: id,
            identity: live.identity.clone(),
            mode: ask.mode,
            ttl: ask.ttl,
            confirmed: now,
        });
        Answer::Granted(Held { key: ask.key, grant: self.last_grant })
    }

    /// Tells which grants still hold, and restarts their expiry. Statement.
    pub(crate) fn heartbeat(&mut self, held: &[Held], now: Instant) -> Vec<bool> {
        let confirm = |held: &Held| {
            let mut holders = self.locks.get_mut(&held.key).into_iter().flat_map(|lock| &mut lock.holders);
            let holder = holders.find(|holder| holder.grant == held.grant);
            holder.map(|holder| holder.confirmed = now).is_some()
        };
        held.iter().map(confirm).collect()
    }

    /// Makes a fencing token under a grant. Statement.
    pub(crate) fn mint(&mut self, held: &Held) -> Minted {
        let mut holders = self.locks.get(&held.key).into_iter().flat_map(|lock| &lock.holders);
        if !holders.any(|holder| holder.grant == held.grant) {
            return Minted::Gone;
        }
        self.last_token += 1;
        FencingToken::new(self.last_token).map_or(Minted::Gone, Minted::Token)
    }

    /// What its wall clock shows.
    pub(crate) fn clock(&mut self, now: Instant) -> Moment {
        let set = *self.clock.set.get_or_insert(now);
        self.clock.showed.after(now.saturating_duration_since(set))
    }

    pub(crate) const fn set_clock(&mut self, shows: Moment, now: Instant) {
        self.clock = Clock { set: Some(now), showed: shows };
    }

    /// Statement.
    pub(crate) fn slots(&mut self, key: Key, now: Instant) -> Looked {
        Looked { now: self.clock(now), record: self.record(key).cloned() }
    }

    pub(crate) fn record(&self, key: Key) -> Option<&Record> {
        self.slots.get(&key)
    }

    /// Sets a record under a grant. Statement.
    pub(crate) fn amend(
        &mut self,
        held: &Held,
        key: Key,
        expected: Option<&Record>,
        next: Entry,
        now: Instant,
    ) -> Amended {
        let mut holders = self.locks.get(&held.key).into_iter().flat_map(|lock| &lock.holders);
        if !holders.any(|holder| holder.grant == held.grant) {
            return Amended::Gone;
        }
        if self.record(key) != expected {
            return Amended::Changed;
        }
        let record = Record { entry: next, written: self.clock(now) };
        self.slots.insert(key, record.clone());
        Amended::Done(record)
    }

    /// Sends a message to every session, or an answer to the one that has called. Statement.
    pub(crate) fn publish(&mut self, from: SessionId, message: Message) {
        let message = match message {
            Message::StepDown(_) => message,
            Message::RollCall(call) => Message::RollCall(Call { reply_to: from.0.to_string(), ..call }),
            Message::Present(presence) => {
                let caller = presence.call.reply_to.parse().map(SessionId);
                let presence = Presence { session: from.0.to_string(), ..presence };
                if let Some(caller) = caller.ok().filter(|caller| self.sessions.contains_key(caller)) {
                    self.outbox.push((caller, Event::Message(Message::Present(presence))));
                }
                return;
            }
        };
        self.outbox.extend(self.sessions.keys().map(|id| (*id, Event::Message(message.clone()))));
    }

    /// Tells of every session, and of the holders whose session is gone. Statement.
    pub(crate) fn survey(&self) -> Vec<Seen> {
        let held_by = |wanted: &dyn Fn(&Holder) -> bool, exclusively: bool| {
            let keys = self.locks.iter().filter(|(_, lock)| {
                lock.holders.iter().any(|it| wanted(it) && (it.mode != Mode::Read) == exclusively)
            });
            keys.map(|(key, _)| *key).collect::<Vec<_>>()
        };
        let seen = |(id, live): (&SessionId, &Live)| {
            let is_its = |holder: &Holder| holder.session == *id;
            let waits = live.waits_for.iter().map(|key| key.waiting());
            Seen {
                session: id.0.to_string(),
                who: store::Holder { identity: Some(live.identity.clone()), ..store::Holder::default() },
                answers: true,
                holds: held_by(&is_its, true),
                shares: held_by(&is_its, false).into_iter().chain(waits).collect(),
            }
        };
        let mut all: Vec<Seen> = self.sessions.iter().map(seen).collect();
        let is_gone = |holder: &Holder| !self.sessions.contains_key(&holder.session);
        for (key, lock) in &self.locks {
            for holder in lock.holders.iter().filter(|it| is_gone(it) && it.mode != Mode::Read) {
                let who =
                    store::Holder { identity: Some(holder.identity.clone()), ..store::Holder::default() };
                all.push(Seen { who, holds: vec![*key], ..Seen::default() });
            }
        }
        all
    }

    /// Releases all that the session holds, and ends it. Statement.
    pub(crate) fn end(&mut self, id: SessionId) {
        let held: Vec<_> = self
            .locks
            .iter()
            .flat_map(|(key, lock)| lock.holders.iter().map(move |holder| (*key, holder)))
            .filter(|(_, holder)| holder.session == id)
            .map(|(key, holder)| Held { key, grant: holder.grant })
            .collect();
        for held in held {
            self.release(id, &Return { held, is_clean: false, is_kept: false });
        }
        self.close(id);
    }

    /// Learns that the client has closed its connection.
    pub(crate) fn close(&mut self, id: SessionId) {
        if self.sessions.remove(&id).is_some() && self.rule == Rule::Session {
            self.drop_holders(|_, holder| holder.session == id);
        }
    }

    /// Ends a session of its own accord, and says so.
    fn terminate(&mut self, id: SessionId, cause: &LossCause) {
        self.close(id);
        self.outbox.push((id, Event::Closed(cause.clone())));
    }

    /// An administrator ends the sessions of a process.
    pub(crate) fn kill(&mut self, identity: &str) {
        let of = self.sessions.iter().filter(|(_, live)| live.identity == identity);
        let killed: Vec<_> = of.map(|(id, _)| *id).collect();
        for id in killed {
            self.terminate(id, &killed_by_admin());
        }
    }

    /// Goes down, and all that it holds in memory with it.
    pub(crate) fn down(&mut self) {
        self.accepts = false;
        let all: Vec<_> = self.sessions.keys().copied().collect();
        for id in all {
            self.terminate(id, &went_down());
        }
        self.drop_holders(|_, _| true);
    }

    pub(crate) const fn up(&mut self) {
        self.accepts = true;
    }

    /// Takes keys from a process without a word: this one, or all.
    pub(crate) fn revoke(&mut self, identity: &str, only: Option<Key>) {
        self.drop_holders(|key, holder| holder.identity == identity && only.is_none_or(|only| only == *key));
    }

    /// Tells whether there was any such holder.
    fn drop_holders(&mut self, is_over: impl Fn(&Key, &Holder) -> bool) -> bool {
        let mut found = false;
        for (key, lock) in &mut self.locks {
            let before = lock.holders.len();
            lock.holders.retain(|holder| !is_over(key, holder));
            found |= lock.holders.len() < before;
        }
        found
    }

    /// Tells who holds these keys exclusively. Statement.
    pub(crate) fn tell_holders(&self, keys: &[Key]) -> Vec<Option<store::Holder>> {
        let holder = |key: &Key| {
            let mut holders = self.holders(*key).into_iter();
            Some(store::Holder { identity: Some(holders.next()?), ..store::Holder::default() })
        };
        keys.iter().map(holder).collect()
    }

    /// The processes that hold a key, by grant.
    pub(crate) fn holders(&self, key: Key) -> Vec<String> {
        let holders = self.locks.get(&key).into_iter().flat_map(|lock| &lock.holders);
        holders.map(|holder| holder.identity.clone()).collect()
    }

    pub(crate) fn held(&self) -> usize {
        self.locks.values().map(|lock| lock.holders.len()).sum()
    }

    pub(crate) fn sessions(&self) -> usize {
        self.sessions.len()
    }

    pub(crate) fn connections(&self, identity: &str) -> usize {
        self.sessions.values().filter(|live| live.identity == identity).count()
    }

    pub(crate) fn statements(&self, identity: &str) -> u64 {
        self.statements.get(identity).copied().unwrap_or_default()
    }

    pub(crate) fn waiters(&self, key: Key) -> usize {
        self.sessions.values().filter(|live| live.waits_for.contains(&key)).count()
    }

    pub(crate) fn grants(&self, key: Key) -> u64 {
        self.locks.get(&key).map_or(0, |lock| lock.grants)
    }
}

// The words and codes of PostgreSQL, which is what a session of this kind imitates.

fn killed_by_admin() -> LossCause {
    closed("terminating connection due to administrator command", Some("57P01"))
}

fn idle_timeout() -> LossCause {
    closed("terminating connection due to idle-session timeout", Some("57P05"))
}

fn went_down() -> LossCause {
    closed("the server went down", None)
}

fn closed(reason: &str, sqlstate: Option<&str>) -> LossCause {
    LossCause::Closed { reason: reason.to_owned(), sqlstate: sqlstate.map(str::to_owned) }
}
