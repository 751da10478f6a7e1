//! What the driver sends to the store, and for whom.

use tokio::sync::oneshot;
use tokio::time::Instant;

use super::candidate::{Candidate, Phase};
use crate::driver::command::{Amend, Id, NotLooked, Parting, Place};
use crate::driver::term::Term;
use crate::name::{Key, Name};
use crate::store::slots::{Amended, Looked, NoSlots, Slots};
use crate::store::{Ask, Call, Exchange, Holder, Message, Minted, Seen};

pub(super) struct Release<H> {
    pub(super) held: H,
    pub(super) key: Key,
    pub(super) name: Name,
    /// None where a lease was granted to nobody: whoever asked had gone.
    pub(super) term: Option<u64>,
    pub(super) done: Option<oneshot::Sender<Parting>>,
    /// Its job ran, and has ended: see [`Return`](crate::store::Return).
    pub(super) is_clean: bool,
    /// It is left to its time to live: see [`Return`](crate::store::Return).
    pub(super) is_kept: bool,
    pub(super) is_run: bool,
}

/// What is to be sent between the exchanges and the heartbeats.
pub(super) struct Errand {
    pub(super) task: Task,
    /// What it is about may no longer be right after that.
    pub(super) expires: Instant,
    /// An exchange was sent before it.
    pub(super) has_waited: bool,
}

/// Why there is no token, or no record, where the store was not reached in time.
const UNANSWERED: &str = "it did not answer within the query timeout";

pub(super) enum Task {
    /// Send a message, and tell whether the store took it.
    Publish(Message, oneshot::Sender<bool>),
    /// Look at all that the store shows.
    Survey(oneshot::Sender<Option<Vec<Seen>>>),
    /// Make a fencing token for a term.
    Mint { id: Id, term: u64, reply: oneshot::Sender<Minted> },
    /// Ask who holds a key.
    Who(Key, oneshot::Sender<Option<Holder>>),
    /// Look at the slots of a name.
    Slots(Slots, oneshot::Sender<Result<Looked, NotLooked>>),
    /// Set their record.
    Amend(Box<Amend>, oneshot::Sender<Amended>),
    /// Answer a roll call, with what is so when that is sent.
    Answer(Call),
}

impl Task {
    /// It will not be done, or its answer will not come.
    pub(super) fn fail(self) {
        match self {
            Self::Publish(_, sent) => drop(sent.send(false)),
            Self::Survey(reply) => drop(reply.send(None)),
            Self::Who(_, reply) => drop(reply.send(None)),
            Self::Mint { reply, .. } => drop(reply.send(Minted::Failed(UNANSWERED.to_owned()))),
            Self::Slots(_, reply) => drop(reply.send(Err(NotLooked::Unanswered))),
            Self::Amend(_, reply) => {
                reply.send(Amended::Failed(NoSlots::Failed(UNANSWERED.to_owned()))).ok();
            }
            Self::Answer(_) => {}
        }
    }
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
    /// A message, and who wants to know whether the store took it.
    Publish(Message, Option<oneshot::Sender<bool>>),
    Survey(oneshot::Sender<Option<Vec<Seen>>>),
    Mint(Minting<H>),
    Slots(Slots, oneshot::Sender<Result<Looked, NotLooked>>),
    /// Under which grant.
    Amend(H, Box<Amend>, oneshot::Sender<Amended>),
    /// Who holds a key.
    Who(Key, oneshot::Sender<Option<Holder>>),
    Inquiry(Inquiry),
    /// May these terms begin now?
    Pass(Passage<H>),
    /// Who keeps these terms from beginning? For the log, or for whoever asked who is in the way.
    Blockers(Passage<H>, Option<oneshot::Sender<Option<Holder>>>),
}

/// Terms that are kept from beginning.
pub(crate) struct Passage<H> {
    pub(crate) held: Vec<H>,
    pub(super) terms: Vec<(Id, u64)>,
}

/// Of those that hold.
impl<'a, H: Clone + 'a> FromIterator<(Id, &'a Candidate<H>)> for Passage<H> {
    fn from_iter<I: IntoIterator<Item = (Id, &'a Candidate<H>)>>(candidates: I) -> Self {
        let of = |(id, candidate): (Id, &'a Candidate<H>)| match &candidate.phase {
            Phase::Held { held, term, .. } => Some((held.clone(), (id, term.number))),
            _ => None,
        };
        let (held, terms) = candidates.into_iter().filter_map(of).unzip();
        Self { held, terms }
    }
}

/// A fencing token, for whom.
pub(crate) struct Minting<H> {
    pub(crate) held: H,
    pub(super) id: Id,
    pub(super) term: u64,
    pub(super) reply: oneshot::Sender<Minted>,
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
            Self::Exchange(batch) => batch.releases.into_iter().for_each(Release::unanswered),
            Self::Publish(message, Some(sent)) => Task::Publish(message, sent).fail(),
            Self::Survey(reply) => Task::Survey(reply).fail(),
            Self::Who(_, reply) | Self::Blockers(_, Some(reply)) => drop(reply.send(None)),
            Self::Slots(slots, reply) => Task::Slots(slots, reply).fail(),
            Self::Amend(_, amend, reply) => Task::Amend(amend, reply).fail(),
            Self::Mint(Minting { id, term, reply, .. }) => Task::Mint { id, term, reply }.fail(),
            // For the log only; and nobody waits for an answer to a roll call to be sent.
            Self::Inquiry(_) | Self::Blockers(_, None) | Self::Pass(_) | Self::Publish(_, None) => {}
        }
    }
}

impl<H> Release<H> {
    pub(super) fn new(held: H, place: &Place, term: &Term, done: Option<oneshot::Sender<Parting>>) -> Self {
        let (name, term) = (place.name.clone(), Some(term.number));
        Self {
            held,
            key: place.key,
            name,
            term,
            done,
            is_clean: true,
            is_kept: false,
            is_run: place.is_run(),
        }
    }

    /// A lease that was granted when whoever asked had gone.
    pub(super) fn orphan(held: H, ask: &Ask) -> Self {
        let (key, name) = (ask.key, ask.name.clone());
        Self { held, key, name, term: None, done: None, is_clean: false, is_kept: false, is_run: false }
    }

    /// A lease whose job has not begun.
    pub(super) fn unused(self) -> Self {
        Self { is_clean: false, ..self }
    }

    /// The end of the session frees it. The job of a run had ended while the lease was held, as far as anybody knew then;
    /// who was in a section asks whether it was, and nobody can tell.
    pub(super) fn unanswered(self) {
        let parting = if self.is_run { Parting::Released } else { Parting::Lost };
        self.done(parting);
    }

    pub(super) fn done(self, parting: Parting) {
        if let Some(done) = self.done {
            done.send(parting).ok();
        }
    }
}
