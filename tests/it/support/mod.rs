//! What every test here uses: the stores under test, the log of the jobs' bodies, and the one way to wait.

#[cfg(all(unix, feature = "cli", feature = "postgres"))]
pub(crate) mod command;
#[cfg(all(unix, any(feature = "postgres", feature = "redis")))]
#[cfg_attr(not(feature = "postgres"), allow(dead_code, reason = "the servers of PostgreSQL use all of it"))]
mod kept;
pub(crate) mod log;
pub(crate) mod member;
#[cfg(all(unix, feature = "postgres"))]
pub(crate) mod postgres;
#[cfg(all(unix, any(feature = "postgres", feature = "redis")))]
#[cfg_attr(not(feature = "postgres"), allow(dead_code, reason = "the servers of PostgreSQL use all of it"))]
mod programs;
pub(crate) mod recorder;
#[cfg(all(unix, feature = "redis"))]
pub(crate) mod redis;
#[cfg(unix)]
pub(crate) mod replica;
#[cfg(feature = "metrics")]
pub(crate) mod scrape;
pub(crate) mod stage;
#[cfg(all(target_os = "linux", feature = "cli", feature = "postgres"))]
pub(crate) mod terminal;
mod wait;

use std::convert::Infallible;
use std::time::Duration;

use leasehold::{Options, RunError};

pub(crate) use self::log::Log;
pub(crate) use self::member::Member;
pub(crate) use self::stage::{Stage, on_every_store, on_every_store_outside_of_a_runtime};
pub(crate) use self::wait::{eventually, now, pass, until};

/// What a run of a job without result and error gives.
pub(crate) type Outcome = Result<Option<()>, RunError<Infallible>>;

/// What "at once" is held to: ten times any figure of the contract, and generous, since machines are noisy.
pub(crate) const AT_ONCE: Duration = Duration::from_secs(2);

/// The intervals of nearly every test: trust 2 s, ttl 2.75 s.
pub(crate) fn quick(who: &str) -> Options {
    Options::default()
        .retry_interval(Duration::from_millis(100))
        .heartbeat_interval(Duration::from_millis(100))
        .query_timeout(Duration::from_secs(1))
        .stop_grace(Duration::from_millis(500))
        .identity(who)
}

/// As [`quick`], but a candidate that is not pushed awake sleeps through every test.
pub(crate) fn sleepy(who: &str) -> Options {
    quick(who).retry_interval(Duration::from_hours(1))
}

/// Blocks the thread, as work that never awaits does.
pub(crate) fn block(duration: Duration) {
    std::thread::sleep(duration);
}
