//! The protocol as it is, and every way in which it is changed.

use super::keys::Keys;

/// Sessions of candidates that live at a time. One that is dead, or whose process gave it up and connected anew, is no
/// longer one of them: what is left of it are the keys of the dead.
pub(crate) const SESSIONS: usize = 3;
/// Fenced transactions that are open at a time; any number follow each other.
pub(crate) const TRANSACTIONS: usize = 2;
/// Terms that start. They are numbered in the order in which they took their term keys.
pub(crate) const TERMS: usize = 4;

/// Who leads, or has a lock, is a writer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Role {
    #[default]
    Writer,
    Reader,
}

/// A way in which the protocol, or what it relies on, is changed: most break it, some turn out to be harmless.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// Nobody passes the barrier before its term.
    NoBarrier,
    /// Nobody looks for older term keys.
    NoLook,
    /// The look comes when the barrier was dropped.
    LookAfterBarrier,
    /// The look comes before the barrier is taken.
    LookBeforeBarrier,
    /// The look counts term keys of the own session too.
    LookAtOwn,
    /// The term key is taken with the barrier, before the look.
    TermKeyBeforeLook,
    /// The lease's key is freed before the term key: on release, and after an error.
    LeaseKeyFirst,
    /// A fence tries the term key only before it has the barrier.
    TermKeyTriedFirstOnly,
    /// A fence tries the term key only when it has the barrier.
    TermKeyTriedLastOnly,
    /// A fence does not try the term key at all.
    TermKeyNotTried,
    /// A fence says that the term is over, but the transaction can go on.
    OverIsSaid,
    /// All terms draw the same number, so that they have one term key.
    SameNumber,
    /// The barrier belongs to the transaction of the starting statement: it goes with an error, and at the end.
    BarrierOfStatement,
    /// After an error, a session that holds the lease's key takes it for granted.
    GrantedByLeaseKey,
    /// After an error, what the statement has taken stays until the session ends.
    NothingReconciled,
    /// The server frees the locks of a transaction before it commits.
    UnlockBeforeCommit,
    /// A server that was restarted does not know what prepared transactions hold.
    PreparedForgotten,
    /// A reader passes no barrier.
    ReaderPassesNone,
    /// A reader passes only the barrier of writers' fences.
    ReaderPassesOne,
    /// A writer passes only the barrier of writers' fences.
    WriterPassesOne,
    /// A reader looks for the term keys of readers too.
    ReaderLooksAtReaders,
}

/// The protocol, of `Lease` and `Lock` or of `RwLock`, with its changes; and how much of it there is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Design {
    pub(crate) has_readers: bool,
    /// Up to [`SESSIONS`], [`TERMS`] and [`TRANSACTIONS`].
    pub(crate) sessions: usize,
    pub(crate) terms: usize,
    pub(crate) transactions: usize,
    /// Fewer kinds of steps, for there are more states. There are no errors, restarts and prepared transactions. The look
    /// takes one instant, as on the server. A grant arrives when the term key is taken: a job that starts earlier may do
    /// more, and hinders nobody. A transaction has freed its locks when it is over: to others, one that has not yet is as one
    /// that rolls back later.
    pub(crate) is_coarse: bool,
    changes: u32,
}

impl Design {
    pub(crate) const EXCLUSIVE: Self = Self {
        has_readers: false,
        sessions: SESSIONS,
        terms: TERMS,
        transactions: TRANSACTIONS,
        is_coarse: false,
        changes: 0,
    };
    pub(crate) const THREE_READERS_OR_WRITERS: Self =
        Self { has_readers: true, terms: 3, transactions: 1, is_coarse: true, ..Self::EXCLUSIVE };
    pub(crate) const TWO_READERS_OR_WRITERS: Self =
        Self { has_readers: true, sessions: 2, terms: 2, transactions: 1, ..Self::EXCLUSIVE };

    pub(crate) const fn with(self, change: Change) -> Self {
        Self { changes: self.changes | 1 << change as u32, ..self }
    }

    pub(crate) const fn has(self, change: Change) -> bool {
        self.changes & 1 << change as u32 != 0
    }

    /// What the starting statement does, when it has the lease's key.
    pub(crate) const fn plan(self) -> &'static [Phase] {
        if self.has(Change::LookAfterBarrier) {
            &[Phase::Barrier, Phase::Drop, Phase::Look, Phase::TermKey]
        } else if self.has(Change::LookBeforeBarrier) {
            &[Phase::Look, Phase::Barrier, Phase::Drop, Phase::TermKey]
        } else if self.has(Change::TermKeyBeforeLook) {
            &[Phase::Barrier, Phase::TermKey, Phase::Look, Phase::Drop]
        } else if self.has(Change::BarrierOfStatement) {
            &[Phase::Barrier, Phase::Look, Phase::TermKey, Phase::Drop]
        } else {
            &[Phase::Barrier, Phase::Look, Phase::Drop, Phase::TermKey]
        }
    }

    /// The barriers that a new term passes.
    pub(crate) fn barriers(self, role: Role) -> &'static [Keys] {
        const BOTH: &[Keys] = &[Keys::BARRIER_OF_WRITERS, Keys::BARRIER_OF_READERS];
        const ONE: &[Keys] = &[Keys::BARRIER_OF_WRITERS];
        const READER: &[Keys] = &[Keys::BARRIER_OF_WRITERS, Keys::BARRIER_OF_READERS_SHARED];
        if self.has(Change::NoBarrier) {
            return &[];
        }
        match role {
            Role::Reader if self.has(Change::ReaderPassesNone) => &[],
            Role::Reader if self.has(Change::ReaderPassesOne) => ONE,
            Role::Reader => READER,
            Role::Writer if self.has_readers && !self.has(Change::WriterPassesOne) => BOTH,
            Role::Writer => ONE,
        }
    }

    pub(crate) const fn term_key(self, term: usize) -> Keys {
        Keys::of_term(if self.has(Change::SameNumber) { 0 } else { term })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Barrier,
    Look,
    Drop,
    TermKey,
}
