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
/// files it is a counter on disk that is never behind the clock, so that it goes on where the counter was lost; on Redis the
/// same in the server, by the server's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FencingToken(i64);

impl FencingToken {
    /// `None`: no store counts that far.
    pub(crate) fn new(number: u64) -> Option<Self> {
        i64::try_from(number).ok().map(Self)
    }

    /// Tells whether a resource that keeps the greatest token it has seen, and has seen `stored`, is to take what comes with
    /// this one: that is so unless a later term has been there.
    ///
    /// ```
    /// use leasehold::FencingToken;
    ///
    /// let (earlier, later) = (FencingToken::try_from(41_i64)?, FencingToken::try_from(42_i64)?);
    /// assert!(later.admits(earlier) && later.admits(later) && !earlier.admits(later));
    /// # Ok::<(), leasehold::NotAToken>(())
    /// ```
    #[must_use]
    pub const fn admits(self, stored: Self) -> bool {
        self.0 >= stored.0
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

/// Reads a token that was kept somewhere: by a resource, or in `LEASEHOLD_TOKEN`.
impl TryFrom<i64> for FencingToken {
    type Error = NotAToken;

    fn try_from(number: i64) -> Result<Self, NotAToken> {
        u64::try_from(number).ok().and_then(Self::new).ok_or(NotAToken)
    }
}

/// As from an `i64`.
impl TryFrom<u64> for FencingToken {
    type Error = NotAToken;

    fn try_from(number: u64) -> Result<Self, NotAToken> {
        Self::new(number).ok_or(NotAToken)
    }
}

impl From<FencingToken> for i64 {
    fn from(token: FencingToken) -> Self {
        token.as_i64()
    }
}

impl From<FencingToken> for u64 {
    fn from(token: FencingToken) -> Self {
        token.get()
    }
}

/// Why a number is no [`FencingToken`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a fencing token is between 0 and 2^63 - 1")]
pub struct NotAToken;

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

/// Why a transaction is not fenced. Whatever it is, nothing that was written in it is to be committed; and nothing can be,
/// but for [`Unsupported`](Self::Unsupported) of [`Lease::fence_sql`](crate::Lease::fence_sql), where there is nothing to send.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Fenced {
    /// The term is over: somebody else may hold the lease, now or soon.
    #[error("the term is over: nothing may be written under its lease any more")]
    Over,
    /// The connection is in no transaction: what is written would be committed at once, and the fence be gone by then.
    #[error("a fence needs a transaction, whose first statement it is: call begin() first")]
    NoTransaction,
    /// The transaction is nested in another one. Rolled back alone, it would take the fence along.
    #[error(
        "the transaction is nested in another one, and would take the fence along if it is rolled back: fence the outermost \
         one, with its first statement"
    )]
    Nested,
    /// The connection is to another database, or another server, than the lease: a fence there protects nothing.
    #[error(
        "the connection is to another database than the lease, where a fence protects nothing: use the one of the Locker, \
         or fencing tokens"
    )]
    OtherDatabase,
    /// The connection is to a read replica.
    #[error(
        "the connection is to a read replica, where nothing can be written or fenced: connect to the primary"
    )]
    Replica,
    /// The lease is of a lock that was not asked to fence.
    #[error("the lock was not asked to fence: use lock(name).fenced(), everywhere where that lock is taken")]
    NotFenced,
    /// The store has no transactions.
    #[error("the store of the lease has no transactions to fence: use fencing tokens")]
    Unsupported,
    /// The server has answered with another error, or the connection is broken. The source is a `sqlx::Error`.
    #[error("the transaction could not be fenced")]
    Database(#[source] Box<dyn std::error::Error + Send + Sync>),
}
