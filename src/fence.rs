//! Fencing tokens: numbers by which a resource tells a late write of an earlier term from one of the present term.

use std::fmt;

use crate::driver::term::Reason;

/// A number that is greater than every one of an earlier term of the same name on the same store.
///
/// A resource that keeps the greatest token it has seen, and refuses whatever comes with a lesser one, cannot be written
/// by a term that is over: "How to do distributed locking", M. Kleppmann, 2016. Tokens have gaps, and those of different
/// names say nothing about each other.
///
/// On PostgreSQL it is the number of a transaction that was flushed to disk before the token was given, so it outlives a
/// crash of the server; an asynchronous failover, or a move to another cluster by dump or replication, can repeat one. On
/// files it is a counter on disk that is never behind the clock, so that it goes on where the counter was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FencingToken(i64);

impl FencingToken {
    /// `None`: no store counts that far.
    pub(crate) fn new(number: u64) -> Option<Self> {
        i64::try_from(number).ok().map(Self)
    }

    /// Gives the number, for databases and languages whose integers have a sign. It is never negative.
    #[must_use]
    pub const fn as_i64(self) -> i64 {
        self.0
    }

    /// Gives the number.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0.cast_unsigned()
    }
}

impl fmt::Display for FencingToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Why there is no [`FencingToken`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TokenError {
    /// The lease is not held any more: nothing may be written under it.
    #[error("the lease is not held any more ({reason})")]
    Over {
        /// Why the term has ended.
        reason: Reason,
    },
    /// The store did not make one. The lease may still be held; to ask again is safe.
    #[error("the store made no fencing token: {reason}")]
    Refused {
        /// What the store said.
        reason: String,
    },
}
