//! The product broken on purpose, for the twins of the safety tests: each must make the simulation fail.
//!
//! Only the library's own tests can ask for one: see `Options::is_broken`.

/// One way to break the safety argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sabotage {
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
}
