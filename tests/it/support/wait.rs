//! The one way to wait.

use std::fmt::Debug;
use std::time::Duration;

use tokio::time::Instant;

/// Longest wait of [`eventually`].
const LIMIT: Duration = Duration::from_secs(20);

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
