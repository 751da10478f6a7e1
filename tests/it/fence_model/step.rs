//! Steps, and how they read.

use std::fmt;

use super::keys::Keys;

/// One step, of one party. Parties are numbered as they stand in the state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) kind: Kind,
    pub(crate) party: usize,
    pub(crate) keys: Keys,
}

/// The kinds of steps. All must have been taken, or the model shows nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    TakesLease,
    FindsLeaseHeld,
    TakesBarrier,
    FindsBarrierHeld,
    SeesNoTermKey,
    SeesTermKey,
    DropsBarrier,
    TakesTermKey,
    Answers,
    Leaves,
    Releases,
    Frees,
    EndsWithError,
    Reconciles,
    Dies,
    DeadFrees,
    JobStarts,
    Begins,
    FindsTermLiving,
    FindsTermOver,
    TakesBarrierShared,
    FindsBarrierTaken,
    Prepares,
    UnlocksEarly,
    Commits,
    RollsBack,
    EndsTransaction,
    Restart,
}

impl Kind {
    /// Those of the protocol as it is.
    pub(crate) const ALL: [Self; 26] = [
        Self::TakesLease,
        Self::FindsLeaseHeld,
        Self::TakesBarrier,
        Self::FindsBarrierHeld,
        Self::SeesNoTermKey,
        Self::SeesTermKey,
        Self::DropsBarrier,
        Self::TakesTermKey,
        Self::Answers,
        Self::Leaves,
        Self::Releases,
        Self::Frees,
        Self::EndsWithError,
        Self::Reconciles,
        Self::Dies,
        Self::DeadFrees,
        Self::JobStarts,
        Self::FindsTermLiving,
        Self::FindsTermOver,
        Self::TakesBarrierShared,
        Self::FindsBarrierTaken,
        Self::Prepares,
        Self::Commits,
        Self::RollsBack,
        Self::EndsTransaction,
        Self::Restart,
    ];

    /// Those of them that are left out, or are part of others, where it is coarse.
    pub(crate) const FINE: [Self; 7] = [
        Self::Answers,
        Self::EndsWithError,
        Self::Reconciles,
        Self::JobStarts,
        Self::Prepares,
        Self::EndsTransaction,
        Self::Restart,
    ];
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, party, keys } = *self;
        let session = || format!("session {}", ["a", "b", "c"][party]);
        let transaction = || format!("transaction {}", party + 1);
        match kind {
            Kind::TakesLease | Kind::TakesBarrier | Kind::TakesTermKey => {
                write!(f, "{} takes {keys}", session())
            }
            Kind::FindsLeaseHeld | Kind::FindsBarrierHeld => write!(f, "{} is refused {keys}", session()),
            Kind::SeesNoTermKey if keys.is_empty() => write!(f, "{} sees no term key", session()),
            Kind::SeesNoTermKey => write!(f, "{} sees nobody with {keys}", session()),
            Kind::SeesTermKey => write!(f, "{} sees somebody with {keys}", session()),
            Kind::DropsBarrier => write!(f, "{} drops {keys}", session()),
            Kind::Answers => write!(f, "{} answers: granted, with {keys}", session()),
            Kind::Leaves => write!(f, "{} waits no longer, and frees {keys}", session()),
            Kind::Releases => write!(f, "{} is asked to release, and frees {keys}", session()),
            Kind::Frees => write!(f, "{} frees {keys}", session()),
            Kind::EndsWithError => {
                write!(f, "{} ends its statement with an error, and holds [{keys}]", session())
            }
            Kind::Reconciles => write!(f, "{} gives back what was left: {keys}", session()),
            Kind::Dies => write!(f, "{} dies with [{keys}]", session()),
            Kind::DeadFrees => write!(f, "the server frees {keys} of the dead"),
            Kind::JobStarts => write!(f, "the answer arrives: THE JOB OF TERM {} STARTS", party + 1),
            Kind::Begins => write!(f, "{} begins a fence, which is to take {keys}", transaction()),
            Kind::FindsTermLiving => write!(f, "{} is refused {keys}: the term lives", transaction()),
            Kind::FindsTermOver => write!(f, "{} is granted {keys}: over", transaction()),
            Kind::TakesBarrierShared => write!(f, "{} takes {keys} (shared)", transaction()),
            Kind::FindsBarrierTaken => write!(f, "{} is refused {keys}: over", transaction()),
            Kind::Prepares => write!(f, "{} is prepared", transaction()),
            Kind::UnlocksEarly => write!(f, "{} frees its barrier, about to commit", transaction()),
            Kind::Commits => write!(f, "{} (fenced with {keys}) COMMITS", transaction()),
            Kind::RollsBack => write!(f, "{} rolls back", transaction()),
            Kind::EndsTransaction => write!(f, "{} frees its barrier", transaction()),
            Kind::Restart => write!(f, "the server crashes and is restarted"),
        }
    }
}
