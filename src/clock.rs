//! The one place that reads the monotonic clock.
//!
//! It is tokio's clock, so that tests can pause it, moved on by the time that the machine was suspended: `CLOCK_MONOTONIC`
//! stands still then, while the store's clock runs on, and a lease must not outlive its deadline by a closed lid.

use std::time::Duration;

use tokio::time::{Instant, Sleep};

/// Tells the time, the time spent suspended included.
pub(crate) fn now() -> Instant {
    #[expect(clippy::disallowed_methods, reason = "this is the one place")]
    let running = Instant::now();
    running + suspended()
}

#[cfg(test)]
tokio::task_local! {
    /// For simulations: at that instant, what the wall clock of the host showed on which this runs.
    pub(crate) static WALL: (Instant, u64);
}

/// Microseconds of the wall clock. It decides nothing: a counter that was lost goes on from there.
pub(crate) fn wall_micros() -> u64 {
    #[cfg(test)]
    if let Ok((at, showed)) = WALL.try_with(|wall| *wall) {
        let since = u64::try_from(now().saturating_duration_since(at).as_micros()).unwrap_or(u64::MAX);
        return showed.saturating_add(since);
    }
    #[expect(clippy::disallowed_methods, reason = "this is the one place")]
    let since_1970 = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    since_1970.as_micros().try_into().unwrap_or(u64::MAX)
}

/// Waits until `at`, an instant of [`now`]. After a suspension it may come late by the time spent suspended: whoever
/// must not act late compares [`now`] as well.
pub(crate) fn sleep_until(at: Instant) -> Sleep {
    tokio::time::sleep_until(timer(at))
}

/// As [`sleep_until`]; without an instant, for ever.
pub(crate) async fn sleep_until_some(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// Translates an instant of [`now`] to one of tokio's timers.
pub(crate) fn timer(at: Instant) -> Instant {
    at.checked_sub(suspended()).unwrap_or(at)
}

/// How long the machine has been suspended since it started: what the clock that runs on is ahead of the other.
///
/// In steps of 100 ms, less than the slack that every ttl has: the two clocks cannot be read at the same instant, and
/// the difference must not flicker. A reading that was interrupted is taken again.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn suspended() -> Duration {
    use rustix::time::{ClockId, clock_gettime};

    const STEP: Duration = Duration::from_millis(100);
    const INTERRUPTED: Duration = Duration::from_micros(50);

    let read = |id| Duration::try_from(clock_gettime(id)).unwrap_or_default();
    let mut ahead = Duration::ZERO;
    for _ in 0..8 {
        let before = read(ClockId::Monotonic);
        let with_suspension = read(ClockId::Boottime);
        ahead = with_suspension.saturating_sub(before);
        if read(ClockId::Monotonic).saturating_sub(before) < INTERRUPTED {
            break;
        }
    }
    Duration::from_millis(
        (ahead.as_millis() / STEP.as_millis() * STEP.as_millis()).try_into().unwrap_or(u64::MAX),
    )
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
const fn suspended() -> Duration {
    Duration::ZERO
}
