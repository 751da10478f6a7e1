//! What the handles tell the driver.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::term::{Reason, Shown, State, Term};
use crate::error::ConnectError;
use crate::name::{Key, Name};
use crate::store::{Enforcement, Message, Minted, Presence, Seen};

/// What the driver tells the handles of the store, whenever it learns it.
#[derive(Clone, Debug)]
pub(crate) struct Report {
    /// What the store does of its own: as expected, and from the first session on as found.
    pub(crate) enforcement: Enforcement,
    /// Why that is less than it could be.
    pub(crate) shortfalls: Vec<String>,
    /// When it last answered anything.
    pub(crate) answered: Option<Instant>,
}

/// Tells apart the candidates of one Locker, also those of one name that follow each other.
pub(crate) type Id = u64;

/// What a handle asks of the driver.
#[derive(Debug)]
pub(crate) enum Request {
    /// Connect now, and tell how it went.
    Connect(oneshot::Sender<Result<(), ConnectError>>),
    /// End when every candidate has left. `within` are the candidates whose jobs the caller runs inside of: it is
    /// answered without waiting for those.
    Close {
        within: Vec<Id>,
        reply: oneshot::Sender<()>,
    },
    Command(Command),
}

#[derive(Debug)]
pub(crate) enum Command {
    /// A candidate takes its seat. It does not ask yet.
    Enlist(Place),
    /// It asks from now on, until it is granted the lease.
    Contend(Id, Again),
    /// It stops asking for now, and runs no job.
    Rest(Id),
    /// It leaves for good, and runs no job.
    Withdraw(Id),
    /// Its job is to stop, if this is still its term.
    Stop { id: Id, term: u64, reason: Reason },
    /// Its job of that term has ended, its future has been dropped.
    Ended { id: Id, term: u64, done: oneshot::Sender<Parting> },
    /// Does it still hold? Ask the store.
    Check { id: Id, term: u64, reply: oneshot::Sender<bool> },
    /// Make a fencing token for this term, within the query timeout.
    Mint { id: Id, term: u64, reply: oneshot::Sender<Minted> },
    /// Send a message within the query timeout, or tell that it could not be sent.
    Publish(Message, oneshot::Sender<bool>),
    /// Hand on the answers to this roll call, for as long as somebody takes them. What does not fit is dropped.
    Listen(u64, mpsc::Sender<Presence>),
    /// Look at all that the store shows, within the query timeout.
    Survey(oneshot::Sender<Option<Vec<Seen>>>),
}

/// What a run waits for: its next term, or why there will be none.
pub(crate) type Grant = Result<Arc<Term>, Arc<ConnectError>>;

/// Where a candidate sits.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) id: Id,
    pub(crate) name: Name,
    pub(crate) key: Key,
    pub(crate) takeover_delay: Duration,
    /// Tells its jobs to stop of itself, so that one that blocks its thread hears of it too.
    pub(crate) shutdown: Option<CancellationToken>,
    pub(crate) grants: mpsc::UnboundedSender<Grant>,
    pub(crate) shown: watch::Sender<Shown>,
}

impl Place {
    /// Shows what the candidate is doing, unless it has left its seat meanwhile. Tells whether that is news.
    pub(crate) fn show(&self, state: State) -> bool {
        self.shown.send_if_modified(|shown| {
            let is_news = shown.candidate == Some(self.id) && shown.state != state;
            if is_news {
                shown.state = state;
            }
            is_news
        })
    }

    /// Tells the run that its job may start.
    pub(crate) fn lead(&self, term: &Arc<Term>, now: Instant) {
        self.show(State::Leading { term: term.number, since: now });
        // A run that has gone says so itself, and the lease is released then.
        self.grants.send(Ok(Arc::clone(term))).ok();
    }

    /// Tells the run that the store must not be used.
    pub(crate) fn refuse(&self, error: &Arc<ConnectError>) {
        self.grants.send(Err(Arc::clone(error))).ok();
    }
}

/// When a candidate asks again.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Again {
    AtOnce,
    /// After one jittered retry interval: it has just handed over.
    AfterInterval,
}

/// How a term ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Parting {
    /// The lease was held to the end, and is free again.
    Released,
    /// The lease had been lost before: the job's result does not count.
    Lost,
}
