//! What the handles tell the driver.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::term::{Reason, Shown, State, Term};
use crate::error::ConnectError;
use crate::meter::Meter;
use crate::name::{Key, Kind, Name};
use crate::store::slots::{Amended, Entry, Looked, NoSlots, Record, Slots};
use crate::store::{Enforcement, Holder, Message, Minted, Mode, Presence, Seen};

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
    /// It leaves for good, and runs no job: what it holds is released. Tells how that term ended.
    Leave(Id, Option<oneshot::Sender<Parting>>),
    /// As [`Leave`](Self::Leave), but what it holds is left to its time to live. Tells whether it was held until then.
    Keep(Id, oneshot::Sender<Parting>),
    /// Somebody takes a seat and asks at once, for one grant.
    Enter(Place),
    /// Who holds this key, as far as the store can tell within the query timeout?
    Who(Key, oneshot::Sender<Option<Holder>>),
    /// Its job is to stop, if this is still its term.
    Stop { id: Id, term: u64, reason: Reason },
    /// Its job of that term has ended, its future has been dropped.
    Ended { id: Id, term: u64, done: oneshot::Sender<Parting> },
    /// Does it still hold? Ask the store.
    Check { id: Id, term: u64, reply: oneshot::Sender<bool> },
    /// Make a fencing token for this term, within the query timeout.
    Mint { id: Id, term: u64, reply: oneshot::Sender<Minted> },
    /// Look at the slots of a name, within the query timeout.
    Slots(Slots, oneshot::Sender<Result<Looked, NotLooked>>),
    /// Set their record under this term, within the query timeout.
    Amend(Box<Amend>, oneshot::Sender<Amended>),
    /// Send a message within the query timeout, or tell that it could not be sent.
    Publish(Message, oneshot::Sender<bool>),
    /// Hand on the answers to this roll call, for as long as somebody takes them. What does not fit is dropped.
    Listen(u64, mpsc::Sender<Presence>),
    /// Look at all that the store shows, within the query timeout.
    Survey(oneshot::Sender<Option<Vec<Seen>>>),
}

/// A record to be set.
#[derive(Debug)]
pub(crate) struct Amend {
    pub(crate) id: Id,
    pub(crate) term: u64,
    pub(crate) slots: Slots,
    pub(crate) expected: Option<Record>,
    pub(crate) next: Entry,
}

/// Why the slots of a name were not looked at.
#[derive(Debug)]
pub(crate) enum NotLooked {
    /// The store does not show them.
    NoSlots(NoSlots),
    /// It did not answer in time.
    Unanswered,
    /// The store must not be used.
    Refused(Arc<ConnectError>),
}

/// What a run waits for: its next term, or why there will be none.
pub(crate) type Grant = Result<Arc<Term>, Arc<ConnectError>>;

/// Where a candidate sits.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) id: Id,
    pub(crate) name: Name,
    pub(crate) key: Key,
    pub(crate) kind: Kind,
    pub(crate) purpose: Purpose,
}

/// What somebody asks for.
#[derive(Debug)]
pub(crate) enum Purpose {
    Run(Run),
    Section(Section),
}

/// To lead, again and again.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) takeover_delay: Duration,
    /// Tells its jobs to stop of itself, so that one that blocks its thread hears of it too.
    pub(crate) shutdown: Option<CancellationToken>,
    pub(crate) grants: mpsc::UnboundedSender<Grant>,
    pub(crate) shown: watch::Sender<Shown>,
}

/// To enter a critical section once.
#[derive(Debug)]
pub(crate) struct Section {
    pub(crate) mode: Mode,
    /// How long the store keeps the key for a silent holder, where keys expire. `None`: as for leases.
    pub(crate) ttl: Option<Duration>,
    /// Who does not wait for others: only for the answer, until then. It is not registered as waiting.
    pub(crate) try_until: Option<Instant>,
    /// It is to be able to fence transactions.
    pub(crate) is_fenced: bool,
    /// Taken when it is told.
    pub(crate) answer: Option<oneshot::Sender<Admission>>,
}

/// What becomes of one who asks to enter.
#[derive(Debug)]
pub(crate) enum Admission {
    Granted(Arc<Term>),
    /// Somebody else is in, and whoever asks does not wait.
    Busy,
    /// The store must not be used.
    Refused(Arc<ConnectError>),
    /// The store could not tell. The text says why and what to change.
    Failed(String),
    /// The store did not answer in time.
    Unanswered,
    /// The Locker is being closed.
    Closed,
}

impl Place {
    /// Shows what the candidate is doing, unless it has left its seat meanwhile. Tells whether that is news.
    pub(crate) fn show(&self, state: State) -> bool {
        let Purpose::Run(Run { shown, .. }) = &self.purpose else { return true };
        shown.send_if_modified(|shown| {
            let is_news = shown.candidate == Some(self.id) && shown.state != state;
            if is_news {
                shown.state = state;
            }
            is_news
        })
    }

    /// Tells whoever asked that the term has begun. One who has gone says so itself, and the lease is released then.
    pub(crate) fn begin(&mut self, meter: &Meter, term: &Arc<Term>, now: Instant) {
        term.begin(meter.began(self, term));
        match &mut self.purpose {
            Purpose::Run(run) => {
                let grants = run.grants.clone();
                self.show(State::Leading { term: term.number, since: now });
                grants.send(Ok(Arc::clone(term))).ok();
            }
            Purpose::Section(_) => self.answer(Admission::Granted(Arc::clone(term))),
        }
    }

    /// What is waited for before the term begins, where the end of the one before was not clean.
    pub(crate) const fn takeover_delay(&self) -> Duration {
        match &self.purpose {
            Purpose::Run(run) => run.takeover_delay,
            Purpose::Section(_) => Duration::ZERO,
        }
    }

    pub(crate) const fn mode(&self) -> Mode {
        match &self.purpose {
            Purpose::Run(_) => Mode::Exclusive,
            Purpose::Section(section) => section.mode,
        }
    }

    /// Whether its terms are to be able to fence transactions, where the store has any.
    pub(crate) const fn is_fenced(&self) -> bool {
        match &self.purpose {
            Purpose::Run(_) => true,
            Purpose::Section(section) => section.is_fenced,
        }
    }

    /// Tells one who asked to enter. It is told once.
    pub(crate) fn answer(&mut self, admission: Admission) {
        if let Purpose::Section(Section { answer, .. }) = &mut self.purpose
            && let Some(answer) = answer.take()
        {
            answer.send(admission).ok();
        }
    }

    /// Tells whoever asked that the store must not be used.
    pub(crate) fn refuse(&mut self, error: &Arc<ConnectError>) {
        match &self.purpose {
            Purpose::Run(run) => drop(run.grants.send(Err(Arc::clone(error)))),
            Purpose::Section(_) => self.answer(Admission::Refused(Arc::clone(error))),
        }
    }

    pub(crate) const fn shutdown(&self) -> Option<&CancellationToken> {
        match &self.purpose {
            Purpose::Run(run) => run.shutdown.as_ref(),
            Purpose::Section(_) => None,
        }
    }

    pub(crate) const fn ttl(&self) -> Option<Duration> {
        match &self.purpose {
            Purpose::Run(_) => None,
            Purpose::Section(section) => section.ttl,
        }
    }

    /// Until when one who does not wait for others waits for the answer.
    pub(crate) const fn try_until(&self) -> Option<Instant> {
        match &self.purpose {
            Purpose::Run(_) => None,
            Purpose::Section(section) => section.try_until,
        }
    }

    pub(crate) const fn is_run(&self) -> bool {
        matches!(self.purpose, Purpose::Run(_))
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
