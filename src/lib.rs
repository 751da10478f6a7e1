//! One leader, hot standbys: leasehold decides which replica of a service may do a piece of work, so that it is never
//! done by two at once and never by nobody for long. Every process makes a [`Locker`] over a store that all of them
//! share; [`Locker::run`] runs a job in exactly one of them, and in another one when that stops, crashes or falls
//! silent.
//!
//! ```
//! use std::time::Duration;
//! use leasehold::{CancellationToken, Lease, Locker, Options};
//!
//! # async fn sweep_once() -> anyhow::Result<()> { Ok(()) }
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> anyhow::Result<()> {
//! # let directory = tempfile::tempdir()?;
//! # let url = format!("file:{}", directory.path().display());
//! # let shutdown = CancellationToken::new();
//! # shutdown.cancel(); // This example is over before it begins.
//! let locker = Locker::connect(&url, Options::default()).await?;
//! locker
//!     .candidate("sweeper")
//!     .until(shutdown)
//!     .run(async |lease: Lease| {
//!         let mut every_minute = tokio::time::interval(Duration::from_secs(60));
//!         loop {
//!             tokio::select! {
//!                 () = lease.cancelled() => return anyhow::Ok(()),
//!                 _ = every_minute.tick() => sweep_once().await?,
//!             }
//!         }
//!     })
//!     .await?;
//! locker.close().await;
//! # Ok(())
//! # }
//! ```
//!
//! # The types
//!
//! * [`Locker`]: one session with the store, on a thread of its own, shared by every job of the process.
//! * [`Candidate`]: a wish to lead a [`Name`]. It stands by, leads, and stands by again after a loss.
//! * [`Lease`]: one term of leading, handed to the job. It is cancelled when the job is to stop, and knows its deadline.
//! * [`Scope`]: a family of names of one type, [`Name::key`] and its like: keys of programs that do without leasehold.
//! * [`FencingToken`]: a number that grows with every term, for resources that can refuse what comes late; and
//!   [`Lease::fence_sql`], by which a transaction on PostgreSQL is committed in its term, or not at all.
//! * [`Lock`], [`RwLock`] and [`LockGuard`]: critical sections, on the same session.
//! * [`Every`]: a job that is done once per interval by the whole deployment, each time as a [`Slot`].
//! * [`Health`]: whether a Locker does what it is for, for a probe.
//! * [`Options`]: the intervals, and [`Bounds`]: what they add up to.
//! * [`Observer`]: who leads and who stands by, on all names of a store, from the outside.
//! * [`diagnose`] and [`Diagnosis`]: whether a store can be relied upon, and what to change.
//! * [`State`] and [`StateWatch`], [`Reason`], [`LossCause`]: what is going on, and why.
//!
//! # What holds
//!
//! 1. One job body at a time, while sessions live: the store's lock manager arbitrates, no clock is compared.
//! 2. A graceful handover never overlaps: told to stop, job ended, lease released, standbys woken, in that order. The
//!    wake-up is pushed; a standby's retry interval does not matter.
//! 3. A holder gives up at its [deadline](Lease::deadline), which is counted from before its last answered statement
//!    was sent, and its job's future is dropped [`stop_grace`](Options::stop_grace) later, an absolute instant. The
//!    clock is compared before every poll of the job: a process that is thawed too late polls it no more. A store that
//!    frees silent holders does so only after that.
//! 4. Answers that are late but inside of the query timeout change nothing, and heartbeats do not share a thread with
//!    the job.
//!
//! [`Options::bounds`] gives the figures, and [`Locker::bounds`] what of them holds on the store at hand. What can still
//! overlap is [a guide](guide::overlap), and how that is made harmless is the one on [fencing](guide::fencing). [More of
//! them](guide) say which verb to choose, what works behind a pooler, how to run it on Kubernetes, operate it, test a job,
//! and move from other locks.
//!
//! # What it does not do
//!
//! * It cannot stop a job that blocks its thread: that is reported as [`State::Overrun`], and nothing is started beside
//!   it in the same process. Tasks that a job has spawned are the job's own to end.
//! * The file store is for one host, and never frees the lease of a process that is frozen.
//! * On Redis, replication is asynchronous: a failover can lose a lease that was granted, and then two may lead until the
//!   first one notices. Fence writes by the token there.
//! * It is not a queue, not a calendar (no months, no time zones: intervals), and keeps no state of the job's work.
//!
//! # Features
//!
//! * `postgres` (on by default): the store on PostgreSQL, `Locker::postgres`; the module `postgres`, with locks of your
//!   own transactions.
//! * `redis`: the store on Redis and Valkey, `Locker::redis`; the module `redis` says what holds there and what does not.
//! * `tls` (on by default): encrypted connections to either, by rustls and the certificates that the system trusts.
//! * `metrics`: what happens as numbers, for Prometheus and others: the guide on [metrics](guide::metrics).
//! * `cli`: the program `leasehold`, for whatever can be started from a shell. The library is the same without.
//! * `testing`: the store in memory, `Memory`, for testing jobs on a paused clock, and for breaking it on purpose.

mod candidate;
mod clock;
mod diagnosis;
mod doctor;
mod driver;
mod error;
mod every;
mod fence;
pub mod guide;
mod health;
mod lease;
mod lock;
mod locker;
mod meter;
mod name;
mod observe;
mod options;
#[cfg(feature = "postgres")]
pub mod postgres;
#[cfg(feature = "redis")]
pub mod redis;
mod sabotage;
mod scope;
#[cfg(test)]
mod simulation;
mod store;
mod turns;
mod watch;

pub use candidate::Candidate;
pub use diagnosis::{Check, Diagnosis, Verdict};
pub use doctor::diagnose;
pub use driver::term::{Reason, State};
pub use error::{ConnectError, Error, EveryError, LockError, LossCause, RunError, ScheduleError, UrlError};
pub use every::{Crashed, Every, Missed, Once, Slot, SlotState, Spacing, Taken};
pub use fence::{Fenced, FencingToken, NotAToken, TokenError};
pub use health::{Health, Trouble};
pub use lease::Lease;
pub use lock::{Lock, LockGuard, RwLock, Scoped};
pub use locker::Locker;
pub use name::{Key, Kind, MAX_NAME_BYTES, Name, NameError};
pub use observe::{Election, Handover, Observer, Participant, Role, Snapshot, Watch};
pub use options::{
    Bounds, DEFAULT_HEARTBEAT_INTERVAL, DEFAULT_MAX_HELD, DEFAULT_QUERY_TIMEOUT, DEFAULT_RETRY_INTERVAL,
    DEFAULT_STOP_GRACE, MAX_IDENTITY_BYTES, MAX_TTL, Options, OptionsError,
};
#[cfg(any(test, feature = "testing"))]
#[doc(hidden)]
pub use sabotage::Sabotage;
pub use scope::{Scope, ScopedName};
#[cfg(any(test, feature = "testing"))]
pub use store::memory::Memory;
/// Re-exported, since [`Lease::cancellation`] and [`Candidate::until`] speak of it.
pub use tokio_util::sync::CancellationToken;
pub use watch::StateWatch;

/// The examples of the README compile with the doctests.
#[cfg(all(doctest, feature = "testing"))]
#[doc = include_str!("../README.md")]
struct Readme;
