//! A store in memory: a server, the network to it, and processes that can freeze, all of which can be broken.
//!
//! | part | role |
//! |---|---|
//! | `server` | sessions, locks, expiry: pure and synchronous |
//! | `network` | what lies between a process and the server, and the faults of both |
//! | `session` | the seam's `Store` and `Session` over it |
//!
//! All of it is deterministic: ordered maps, no chance, and no clock but tokio's, which tests can pause.

mod network;
mod server;
mod session;
#[cfg(test)]
mod tests;

use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, SystemTime};

use crate::name::{Key, Kind, Name};

use network::{Delays, World};
use server::Rule;
pub(crate) use session::MemoryStore;

/// An in-memory store for tests: needs no server, runs on tokio's clock, paused or not, and can be broken on purpose.
///
/// It stands for one server; a clone is the same server. Every process that uses it has a network of its own to it,
/// and is known by the [identity](crate::Options::identity) of its Locker. All that happens in a test on a paused clock
/// is deterministic and takes no time, unless a fault says so.
///
/// # What it imitates
///
/// * [`new`](Self::new): a lock belongs to a session and goes with it, as on PostgreSQL;
///   [`expiring`](Self::expiring): a lock has a time to live of its own, as on Redis.
/// * A statement is a message: once sent, it is carried out even if nobody waits for its answer any more.
/// * A connection is like one of TCP: it is not lost by a partition, and what was sent meanwhile arrives afterwards.
///
/// # Faults
///
/// A fault may be set for an identity that has not connected yet; it waits for it. What acts on a present session
/// ([`kill`](Self::kill), [`revoke`](Self::revoke), [`revoke_all`](Self::revoke_all)) does nothing for an unknown one.
///
/// | fault | effect | until |
/// |---|---|---|
/// | [`kill`](Self::kill) | the server ends the sessions of a process | it reconnects |
/// | [`partition`](Self::partition) | nothing arrives, nothing is closed | [`heal`](Self::heal) |
/// | [`freeze`](Self::freeze) | the process stands still | [`thaw`](Self::thaw) |
/// | [`slow`](Self::slow) | its statements take time | it is set to zero |
/// | [`lose_pushes`](Self::lose_pushes) | it is not woken by others | it is set to false |
/// | [`revoke`](Self::revoke), [`revoke_all`](Self::revoke_all) | its leases are gone, its session lives | it asks anew |
/// | [`panic_driver`](Self::panic_driver) | its next statement panics | at once |
/// | [`down`](Self::down) | the server ends all sessions and refuses new ones | [`up`](Self::up) |
#[derive(Clone)]
pub struct Memory {
    world: Arc<World>,
}

/// The same as [`Memory::new`].
impl Default for Memory {
    fn default() -> Self {
        Self::new()
    }
}

/// Shows how many sessions there are.
impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory").field("sessions", &self.sessions()).finish_non_exhaustive()
    }
}

impl Memory {
    /// Makes a server whose locks belong to sessions, as on PostgreSQL.
    ///
    /// It frees what a session holds when it learns that the connection was closed, and when the ttl has passed since
    /// the last statement of that session that it finished: then it ends the session.
    #[must_use]
    pub fn new() -> Self {
        Self { world: Arc::new(World::new(Rule::Session)) }
    }

    /// As [`new`](Self::new), and as forgiving as PostgreSQL: what a session holds it is granted again. Who of a process is
    /// in is that process's own work.
    #[cfg(test)]
    pub(crate) fn stacking() -> Self {
        let memory = Self::new();
        memory.world.with(|state, _| state.server.stack());
        memory
    }

    /// Makes a server whose locks have a time to live each, as on Redis.
    ///
    /// It frees a lock when the ttl has passed since the grant, or since the last heartbeat that found it still held by
    /// that grant. A closed connection frees nothing; a graceful end releases what the session holds.
    #[must_use]
    pub fn expiring() -> Self {
        Self { world: Arc::new(World::new(Rule::Expiry)) }
    }

    /// Gives the store as a process sees it. `ttl` is how long a session may be idle, where sessions hold the locks.
    pub(crate) fn store(&self, identity: &str, ttl: Duration) -> MemoryStore {
        MemoryStore::new(Arc::clone(&self.world), identity.to_owned(), ttl)
    }

    /// Ends the sessions of a process on the server, as `pg_terminate_backend` does.
    ///
    /// Their locks are free at once (on an [`expiring`](Self::expiring) server, which merely loses the connection, when
    /// they expire), and nobody is pushed awake. The process learns of it at once, with SQLSTATE 57P01, or when its
    /// network is up again; a statement under way fails.
    pub fn kill(&self, identity: &str) {
        self.world.with(|state, _| state.server.kill(identity));
    }

    /// Cuts the network between a process and the server, silently: nothing arrives, in neither direction.
    ///
    /// Nothing is closed either. What is sent meanwhile, a closed connection included, arrives upon
    /// [`heal`](Self::heal), and connecting waits until then. Does nothing if the network is cut already.
    pub fn partition(&self, identity: &str) {
        self.world.partition(identity);
    }

    /// Ends a [`partition`](Self::partition), and delivers what was sent meanwhile.
    ///
    /// The statements are carried out then, if their session still exists, also when their senders wait no more.
    pub fn heal(&self, identity: &str) {
        self.world.heal(identity);
    }

    /// Makes a process stand still: what it runs [`on`](Self::on) itself is polled no more.
    ///
    /// Its statements that are under way go on, and so does the clock.
    pub fn freeze(&self, identity: &str) {
        self.world.freeze(identity);
    }

    /// Ends a [`freeze`](Self::freeze): everything of the process is polled.
    pub fn thaw(&self, identity: &str) {
        self.world.thaw(identity);
    }

    /// Runs a future on a process: it is not polled while that process is [frozen](Self::freeze).
    ///
    /// # Cancel safety
    ///
    /// Dropping it drops the future, frozen or not.
    pub fn on<F: Future>(&self, identity: &str, future: F) -> impl Future<Output = F::Output> + use<F> {
        let (world, identity) = (Arc::clone(&self.world), identity.to_owned());
        async move {
            let mut future = pin!(future);
            poll_fn(|context| {
                if world.is_frozen(&identity, context.waker()) {
                    Poll::Pending
                } else {
                    future.as_mut().poll(context)
                }
            })
            .await
        }
    }

    /// Makes each statement that a process sends from now on, connecting included, take `before` until the server
    /// carries it out, and then `after` until the answer arrives.
    pub fn slow(&self, identity: &str, before: Duration, after: Duration) {
        self.world.slow(identity, Delays { before, after });
    }

    /// Makes the network drop, or no longer drop, what the server sends to a process without being asked: that a key
    /// was released, and messages of others. That a session was closed is told nevertheless.
    pub fn lose_pushes(&self, identity: &str, lose: bool) {
        self.world.lose_pushes(identity, lose);
    }

    /// Takes a lease away from a process without a word; its session lives. Nobody is pushed awake.
    pub fn revoke(&self, identity: &str, name: &Name) {
        self.revoke_key(identity, lease(name));
    }

    /// As [`revoke`](Self::revoke), for a key of any kind.
    pub fn revoke_key(&self, identity: &str, key: Key) {
        self.world.with(|state, _| state.server.revoke(identity, Some(key)));
    }

    /// Takes all locks of every kind away from a process without a word; its session lives. Nobody is pushed awake.
    pub fn revoke_all(&self, identity: &str) {
        self.world.with(|state, _| state.server.revoke(identity, None));
    }

    /// Makes the next statement of a process panic in the driver of its Locker, once.
    pub fn panic_driver(&self, identity: &str) {
        self.world.panic_next(identity);
    }

    /// Takes the server down: it ends all sessions, loses all locks, and refuses connections until it is
    /// [`up`](Self::up) again. Processes learn of it as in [`kill`](Self::kill), without an SQLSTATE.
    pub fn down(&self) {
        self.world.with(|state, _| state.server.down());
    }

    /// Takes the server up again after [`down`](Self::down).
    pub fn up(&self) {
        self.world.with(|state, _| state.server.up());
    }

    /// Sets the server's wall clock, which shows 2026-01-01 UTC at first and goes with tokio's: as an administrator does, or
    /// NTP, in steps. No lock depends on it; the slots of [`Every`](crate::Every) do.
    pub fn set_clock(&self, shows: SystemTime) {
        self.world.with(|state, now| state.server.set_clock(shows.into(), now));
    }

    /// Tells what the server's wall clock shows.
    #[must_use]
    pub fn clock(&self) -> SystemTime {
        self.world.with(|state, now| state.server.clock(now)).to_system_time()
    }

    /// Whether a slot of the name with this key is recorded.
    #[cfg(test)]
    pub(crate) fn has_slot_of(&self, key: Key) -> bool {
        self.world.with(|state, _| state.server.record(key).is_some())
    }

    /// Tells the identities of those who hold a lease at this instant, the earliest grant first.
    #[must_use]
    pub fn holders(&self, name: &Name) -> Vec<String> {
        self.world.with(|state, _| state.server.holders(lease(name)))
    }

    /// As [`holders`](Self::holders), for a key of any kind, shared or not.
    #[cfg(test)]
    pub(crate) fn holders_for(&self, key: Key) -> Vec<String> {
        self.world.with(|state, _| state.server.holders(key))
    }

    /// As [`grants`](Self::grants), for a key of any kind.
    #[cfg(test)]
    pub(crate) fn grants_for(&self, key: Key) -> u64 {
        self.world.with(|state, _| state.server.grants(key))
    }

    /// Counts the sessions that are alive on the server.
    #[must_use]
    pub fn sessions(&self) -> usize {
        self.world.with(|state, _| state.server.sessions())
    }

    /// Counts the open connections of a process, as the server sees them: one that was closed behind a partition is
    /// open still. 0 for an unknown identity.
    #[must_use]
    pub fn connections(&self, identity: &str) -> usize {
        self.world.with(|state, _| state.server.connections(identity))
    }

    /// Counts the statements that the server has carried out for a process so far, over all its sessions. Connecting is
    /// none. 0 for an unknown identity.
    #[must_use]
    pub fn statements(&self, identity: &str) -> u64 {
        self.world.with(|state, _| state.server.statements(identity))
    }

    /// Counts the sessions that are registered as waiting for a lease.
    #[must_use]
    pub fn waiters(&self, name: &Name) -> usize {
        self.waiters_for(lease(name))
    }

    /// As [`waiters`](Self::waiters), for a key of any kind.
    #[must_use]
    pub fn waiters_for(&self, key: Key) -> usize {
        self.world.with(|state, _| state.server.waiters(key))
    }

    /// Counts what is held at this instant, by whomever and of whatever kind.
    #[must_use]
    pub fn held(&self) -> usize {
        self.world.with(|state, _| state.server.held())
    }

    /// Counts how often a lease has been granted so far.
    #[must_use]
    pub fn grants(&self, name: &Name) -> u64 {
        self.world.with(|state, _| state.server.grants(lease(name)))
    }
}

fn lease(name: &Name) -> Key {
    Key::of(Kind::Lease, name)
}
