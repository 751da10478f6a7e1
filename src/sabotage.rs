//! The product broken on purpose, for the twins of the safety tests: each must make the tests of what it breaks fail.
//!
//! Only tests can ask for one: `Options::sabotage` is there under the feature `testing` alone, and no text form sets it.

/// One way to break the safety argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[cfg_attr(
    not(any(test, feature = "testing")),
    expect(unreachable_pub, reason = "not to be had outside of tests")
)]
pub enum Sabotage {
    /// The lease is released as soon as the job was told to stop, not when it has ended.
    ReleaseBeforeEnd,
    /// A session that was given up is closed at once, not when its jobs have ended.
    CloseBeforeEnd,
    /// The deadline is not looked at.
    NoDeadline,
    /// Messages about an earlier term are taken for the present one.
    StaleEvents,
    /// The grace to stop starts when the loss is noticed, not at the deadline.
    GraceFromNotice,
    /// Tasks of one process do not wait for each other before a section.
    NoTurns,
    /// Nobody is told that somebody waits to write.
    NoIntent,
    /// Who no longer waits stays registered as one who does.
    NoWithdrawal,
    /// Which slot it is, is told by the clock of the client.
    ClientClock,
    /// Whoever has the lock of a name serves its slot, whatever is recorded: mutual exclusion taken for once per slot.
    LockIsEnough,
    /// The server is not told to end a session that has fallen silent.
    #[cfg_attr(
        not(any(test, feature = "testing", feature = "postgres")),
        expect(dead_code, reason = "for stores with a server")
    )]
    NoServerTtl,
    /// A term begins though a transaction that an earlier one has fenced may be open.
    #[cfg_attr(
        not(any(test, feature = "testing", feature = "postgres")),
        expect(dead_code, reason = "for stores with transactions")
    )]
    NoBarrier,
    /// A term begins though the server has not freed all that an earlier one held.
    #[cfg_attr(
        not(any(test, feature = "testing", feature = "postgres")),
        expect(dead_code, reason = "for stores with transactions")
    )]
    NoTermLook,
    /// Two sessions that share a server process do not see each other.
    #[cfg_attr(
        not(any(test, feature = "testing", feature = "postgres")),
        expect(dead_code, reason = "for stores with a server")
    )]
    NoMarker,
}
