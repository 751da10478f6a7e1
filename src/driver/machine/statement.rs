//! What the driver sends to the store, and for whom.

use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::driver::command::{Id, Parting, Place};
use crate::driver::term::Term;
use crate::name::{Key, Name};
use crate::store::{Ask, Exchange, Message};

pub(super) struct Release<H> {
    pub(super) held: H,
    pub(super) key: Key,
    pub(super) name: Name,
    /// None where a lease was granted to nobody: whoever asked had gone.
    pub(super) term: Option<u64>,
    pub(super) done: Option<oneshot::Sender<Parting>>,
}

/// A message to be sent.
pub(crate) struct Outgoing {
    pub(crate) message: Message,
    /// What it asks for may no longer be right after that.
    pub(super) expires: Instant,
    pub(super) sent: oneshot::Sender<bool>,
    /// An exchange was sent before it.
    pub(super) has_waited: bool,
}

pub(super) struct Check {
    pub(super) id: Id,
    pub(super) term: u64,
    pub(super) reply: oneshot::Sender<bool>,
}

/// What to send to the store next, and for whom.
pub(crate) enum Statement<H> {
    Heartbeat(Heartbeat<H>),
    Exchange(Batch<H>),
    Publish(Outgoing),
    Inquiry(Inquiry),
}

/// Who holds what is refused again and again?
pub(crate) struct Inquiry {
    pub(crate) keys: Vec<Key>,
    /// Who asks, for each key.
    pub(super) asking: Vec<Id>,
}

pub(crate) struct Heartbeat<H> {
    pub(crate) held: Vec<H>,
    pub(super) terms: Vec<(Id, u64)>,
    pub(super) checks: Vec<Check>,
}

pub(crate) struct Batch<H> {
    pub(crate) exchange: Exchange<H>,
    pub(super) releases: Vec<Release<H>>,
    pub(super) asking: Vec<Id>,
}

impl<H> Statement<H> {
    /// It will not be answered: its session is lost.
    pub(crate) fn unanswered(self) {
        match self {
            Self::Heartbeat(heartbeat) => {
                for check in heartbeat.checks {
                    check.reply.send(false).ok();
                }
            }
            // The end of the session frees these; their jobs had ended while they were held.
            Self::Exchange(batch) => {
                for release in batch.releases {
                    release.done(Parting::Released);
                }
            }
            Self::Publish(message) => {
                message.sent.send(false).ok();
            }
            // For the log only.
            Self::Inquiry(_) => {}
        }
    }
}

impl<H> Release<H> {
    pub(super) fn new(held: H, place: &Place, term: &Term, done: Option<oneshot::Sender<Parting>>) -> Self {
        Self { held, key: place.key, name: place.name.clone(), term: Some(term.number), done }
    }

    /// A lease that was granted when whoever asked had gone.
    pub(super) fn orphan(held: H, ask: &Ask) -> Self {
        Self { held, key: ask.key, name: ask.name.clone(), term: None, done: None }
    }

    pub(super) fn done(self, parting: Parting) {
        if let Some(done) = self.done {
            done.send(parting).ok();
        }
    }
}
