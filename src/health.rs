//! Whether a Locker does what it is for: [`Health`].

use std::fmt;
use std::time::Duration;

use tokio::time::Instant;

use crate::clock;
use crate::name::Name;
use crate::options::Options;

/// How long a candidate may go without an answer of the store before that is a trouble: three retry intervals, and no
/// shorter than any one answer may take.
pub(crate) fn patience(options: &Options) -> Duration {
    options.retry_interval.saturating_mul(3).max(options.query_timeout)
}

/// What is wrong with a Locker at an instant: [`Locker::health`](crate::Locker::health).
///
/// For the probe of whatever restarts a process that does not mend itself. Not leading is no trouble, nor is a store
/// that was away for a moment.
///
/// Shown as text it is `good`, or what is wrong.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Health {
    /// Everything that is wrong. Empty is good.
    pub troubles: Vec<Trouble>,
}

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Trouble {
    /// The job of this name has not ended though the deadline of its lease has passed: it has to stop, and somebody else
    /// may lead soon.
    PastDeadline {
        /// The name.
        name: Name,
        /// When the deadline passed.
        since: Instant,
    },
    /// The job of this name could not be stopped when its grace was over, since it blocks its thread: somebody else may
    /// be leading. See [`State::Overrun`](crate::State::Overrun).
    Overrun {
        /// The name.
        name: Name,
        /// When the grace was over.
        since: Instant,
    },
    /// A candidate asks, and the store has answered nothing for three retry intervals, or for the query timeout if that is
    /// longer. Where it is the store that is away, a new process mends nothing: leave this one out of what decides on a
    /// restart.
    Unanswered {
        /// The last answer, or when the candidate began to ask if that was later.
        since: Instant,
    },
    /// The driver is gone: a bug in leasehold. No lease of this Locker is held, and none will be.
    Driver,
}

impl Health {
    /// Tells whether nothing is wrong.
    #[must_use]
    pub const fn is_good(&self) -> bool {
        self.troubles.is_empty()
    }
}

impl fmt::Display for Health {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, trouble) in self.troubles.iter().enumerate() {
            write!(f, "{}{trouble}", if n == 0 { "" } else { "; " })?;
        }
        if self.is_good() { f.write_str("good") } else { Ok(()) }
    }
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let now = clock::now();
        let ago = |since: &Instant| {
            let ago = now.saturating_duration_since(*since);
            humantime::format_duration(Duration::from_millis(ago.as_millis().try_into().unwrap_or(u64::MAX)))
        };
        match self {
            Self::PastDeadline { name, since } => {
                write!(f, "the job of {name:?} has not ended, {} past its deadline", ago(since))
            }
            Self::Overrun { name, since } => {
                write!(f, "the job of {name:?} blocks its thread, {} past its grace", ago(since))
            }
            Self::Unanswered { since } => write!(f, "the store has not answered for {}", ago(since)),
            Self::Driver => f.write_str("the driver of the locker is gone"),
        }
    }
}
