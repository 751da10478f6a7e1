//! The world around the server: processes that can freeze, and a network between each of them and the server.
//!
//! One mutex holds all of it, and nothing waits while holding it.

use std::collections::{BTreeMap, VecDeque};
use std::mem;
use std::sync::{Mutex, PoisonError};
use std::task::Waker;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use crate::clock;
use crate::error::LossCause;
use crate::store::Event;

use super::server::{Rule, Server, SessionId};

/// The network between one process and the server.
#[derive(Debug, Default)]
enum Link {
    #[default]
    Up,
    /// What was sent meanwhile waits here. Statements wait by themselves, each in its task.
    Cut { events: Vec<(SessionId, Event)>, closes: Vec<SessionId> },
}

/// One process, by its identity. Unlike its sessions it is never gone: faults may be set before it first connects.
#[derive(Debug, Default)]
pub(crate) struct Process {
    link: Link,
    /// While it is frozen: who wants to be polled when it is thawed.
    frozen: Option<Vec<Waker>>,
    delays: Delays,
    loses_pushes: bool,
    panics: bool,
}

/// How long a statement is under way.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Delays {
    pub(crate) before: Duration,
    pub(crate) after: Duration,
}

impl Process {
    pub(crate) const fn is_cut_off(&self) -> bool {
        matches!(self.link, Link::Cut { .. })
    }
}

/// The client's end of a connection: what has arrived and was not read yet.
#[derive(Debug)]
pub(crate) struct Port {
    identity: String,
    inbox: VecDeque<Event>,
    /// The last thing that can arrive. It stays, so that a closed session says so however often it is asked.
    closed: Option<LossCause>,
}

impl Port {
    fn arrive(&mut self, event: Event) {
        match event {
            Event::Closed(cause) => self.closed = Some(cause),
            push => self.inbox.push_back(push),
        }
    }

    pub(crate) fn next(&mut self) -> Option<Event> {
        self.inbox.pop_front().or_else(|| self.closed().map(Event::Closed))
    }

    pub(crate) fn closed(&self) -> Option<LossCause> {
        self.closed.clone()
    }
}

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) server: Server,
    processes: BTreeMap<String, Process>,
    ports: BTreeMap<SessionId, Port>,
}

impl State {
    fn process(&mut self, identity: &str) -> &mut Process {
        self.processes.entry(identity.to_owned()).or_default()
    }

    /// Carries what the server sent to the clients, or to where it waits. Tells whether anything arrived.
    fn deliver(&mut self) -> bool {
        let mut arrived = false;
        for (id, event) in self.server.outbox() {
            let Some(port) = self.ports.get_mut(&id) else { continue };
            let process = self.processes.entry(port.identity.clone()).or_default();
            match (&mut process.link, event) {
                (_, Event::Freed(_) | Event::Message(_)) if process.loses_pushes => {}
                (Link::Cut { events, .. }, event) => events.push((id, event)),
                (Link::Up, event) => {
                    port.arrive(event);
                    arrived = true;
                }
            }
        }
        arrived
    }

    /// Opens a connection. `None`: refused.
    pub(crate) fn accept(&mut self, identity: &str, ttl: Duration, now: Instant) -> Option<SessionId> {
        let id = self.server.connect(identity, ttl, now)?;
        let port = Port { identity: identity.to_owned(), inbox: VecDeque::new(), closed: None };
        self.ports.insert(id, port);
        Some(id)
    }

    /// The client's end of a connection, until the client closes it.
    pub(crate) fn port(&self, id: SessionId) -> Option<&Port> {
        self.ports.get(&id)
    }

    /// The client closes its connection. The server learns of it as soon as the network lets it.
    pub(crate) fn hang_up(&mut self, id: SessionId) {
        let Some(port) = self.ports.remove(&id) else { return };
        match &mut self.process(&port.identity).link {
            Link::Cut { closes, .. } => closes.push(id),
            Link::Up => self.server.close(id),
        }
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct World {
    state: Mutex<State>,
    /// Something arrived at a client, or a network is up again.
    changed: Notify,
}

impl World {
    pub(crate) fn new(rule: Rule) -> Self {
        let state = State { server: Server::new(rule), processes: BTreeMap::new(), ports: BTreeMap::new() };
        Self { state: Mutex::new(state), changed: Notify::new() }
    }

    /// The only way in: brings the server up to the present, acts, and delivers what that sent.
    pub(crate) fn with<T>(&self, act: impl FnOnce(&mut State, Instant) -> T) -> T {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let now = clock::now();
        state.server.expire(now);
        let expired = state.deliver();
        let result = act(&mut state, now);
        let arrived = state.deliver();
        drop(state);
        if expired || arrived {
            self.changed.notify_waiters();
        }
        result
    }

    /// Looks at a process or sets a fault of it.
    pub(crate) fn process<T>(&self, identity: &str, act: impl FnOnce(&mut Process) -> T) -> T {
        self.with(|state, _| act(state.process(identity)))
    }

    /// Waits until something has arrived at a session that `take` is content with.
    ///
    /// Cancel-safe: what is taken is returned by the same poll.
    pub(crate) async fn arrival<T>(&self, id: SessionId, mut take: impl FnMut(&mut Port) -> Option<T>) -> T {
        loop {
            let changed = self.changed.notified();
            let (taken, idle_limit) = self
                .with(|state, _| (state.ports.get_mut(&id).and_then(&mut take), state.server.idle_limit(id)));
            if let Some(taken) = taken {
                return taken;
            }
            // The server has no clock of its own: whoever waits for its news looks again when it would act.
            match idle_limit {
                Some(limit) => drop(tokio::time::timeout_at(clock::timer(limit), changed).await),
                None => changed.await,
            }
        }
    }

    /// Takes a message one way: `delay`, and then as long as the network is cut.
    pub(crate) async fn travel(&self, identity: &str, delay: Duration) {
        if !delay.is_zero() {
            clock::sleep_until(clock::now() + delay).await;
        }
        loop {
            let changed = self.changed.notified();
            if !self.process(identity, |process| process.is_cut_off()) {
                return;
            }
            changed.await;
        }
    }

    pub(crate) fn partition(&self, identity: &str) {
        self.process(identity, |process| {
            if !process.is_cut_off() {
                process.link = Link::Cut { events: Vec::new(), closes: Vec::new() };
            }
        });
    }

    pub(crate) fn heal(&self, identity: &str) {
        self.with(|state, _| {
            let Link::Cut { events, closes } = mem::take(&mut state.process(identity).link) else { return };
            for (id, event) in events {
                if let Some(port) = state.ports.get_mut(&id) {
                    port.arrive(event);
                }
            }
            for id in closes {
                state.server.close(id);
            }
        });
        self.changed.notify_waiters();
    }

    pub(crate) fn freeze(&self, identity: &str) {
        self.process(identity, |process| _ = process.frozen.get_or_insert_default());
    }

    pub(crate) fn thaw(&self, identity: &str) {
        // Woken outside of the lock: a waker may run anything.
        let wakers = self.process(identity, |process| process.frozen.take());
        wakers.into_iter().flatten().for_each(Waker::wake);
    }

    /// Tells whether a process is frozen; then `waker` is woken when it is thawed.
    pub(crate) fn is_frozen(&self, identity: &str, waker: &Waker) -> bool {
        self.process(identity, |process| {
            let Some(wakers) = &mut process.frozen else { return false };
            if !wakers.iter().any(|known| known.will_wake(waker)) {
                wakers.push(waker.clone());
            }
            true
        })
    }

    pub(crate) fn delays(&self, identity: &str) -> Delays {
        self.process(identity, |process| process.delays)
    }

    pub(crate) fn slow(&self, identity: &str, delays: Delays) {
        self.process(identity, |process| process.delays = delays);
    }

    pub(crate) fn lose_pushes(&self, identity: &str, lose: bool) {
        self.process(identity, |process| process.loses_pushes = lose);
    }

    pub(crate) fn panic_next(&self, identity: &str) {
        self.process(identity, |process| process.panics = true);
    }

    /// Tells whether the next statement is to panic; it does so once.
    pub(crate) fn takes_panic(&self, identity: &str) -> bool {
        self.process(identity, |process| mem::take(&mut process.panics))
    }
}
