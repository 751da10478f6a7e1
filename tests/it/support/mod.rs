//! What every test here uses: the stores under test, the log of the jobs' bodies, and the one way to wait.

pub(crate) mod log;
pub(crate) mod member;
#[cfg(all(unix, feature = "postgres"))]
pub(crate) mod postgres;
#[cfg(unix)]
pub(crate) mod replica;
pub(crate) mod stage;

use std::convert::Infallible;
use std::fmt::Debug;
use std::time::Duration;

use leasehold::{Options, RunError};
use tokio::time::Instant;

pub(crate) use self::log::Log;
pub(crate) use self::member::Member;
pub(crate) use self::stage::{Stage, on_every_store, on_every_store_outside_of_a_runtime};

/// What a run of a job without result and error gives.
pub(crate) type Outcome = Result<Option<()>, RunError<Infallible>>;

/// Longest wait of [`eventually`].
const LIMIT: Duration = Duration::from_secs(20);

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

pub(crate) fn now() -> Instant {
    #[expect(clippy::disallowed_methods, reason = "the tests' own watch")]
    Instant::now()
}

/// Waits until what `look` gives is `enough`, and gives that. The only place that sleeps.
///
/// # Panics
///
/// After 20 s, with the last value.
pub(crate) async fn eventually<T: Debug>(
    what: &str,
    mut look: impl FnMut() -> T,
    enough: impl Fn(&T) -> bool,
) -> T {
    let since = now();
    loop {
        let value = look();
        if enough(&value) {
            return value;
        }
        assert!(since.elapsed() < LIMIT, "not within {LIMIT:?}: {what}; the last value was {value:?}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Waits until a condition holds.
pub(crate) async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    eventually(what, &mut holds, |holds| *holds).await;
}

/// Lets an instant pass, for jobs and faults that last.
pub(crate) async fn pass(duration: Duration) {
    let end = now() + duration;
    until("time passes", || now() >= end).await;
}

/// Blocks the thread, as work that never awaits does.
pub(crate) fn block(duration: Duration) {
    std::thread::sleep(duration);
}
