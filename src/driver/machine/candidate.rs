//! A candidate as the driver sees it, and the phases that it goes through.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tracing::{info, warn};

use crate::driver::command::Place;
use crate::driver::term::{OVERRUN_MARGIN, Reason, State, Term};
use crate::error::LossCause;
use crate::options::Options;
use crate::store::{Blocker, Holder};

pub(super) struct Candidate<H> {
    pub(super) place: Place,
    pub(super) phase: Phase<H>,
}

pub(super) enum Phase<H> {
    /// It does not ask.
    Resting,
    /// It asks.
    Waiting(Waiting),
    /// It holds the lease. The job has started, unless something is waited for `before`. Once it was told to stop, and until
    /// it has: when to say so again.
    Held { held: H, term: Arc<Term>, before: Option<Box<Before>>, remind_at: Option<Instant> },
    /// The lease is gone; the job has not ended yet. One that has not by `overrun_at` is stuck.
    Lost { term: Arc<Term>, overrun_at: Instant, overrun: bool },
}

/// What is waited for before the job of a term that is held starts.
pub(super) struct Before {
    /// The takeover delay.
    pub(super) start_at: Instant,
    /// The transactions that earlier terms have fenced.
    pub(super) barrier: Option<Barrier>,
}

pub(super) struct Barrier {
    /// Try then whether it may begin.
    pub(super) due: Instant,
    /// For how long to wait after that.
    pause: Duration,
    /// How often it could not, and at how many the store is asked why.
    refusals: Refusals,
}

/// Between the first two attempts to pass a barrier: what is in the way is mostly a server process that is dying.
const FIRST_PAUSE: Duration = Duration::from_millis(5);

/// Between two attempts at most.
const LONGEST_PAUSE: Duration = Duration::from_millis(250);

impl Barrier {
    /// The first attempt, with the ask, was in vain.
    pub(super) fn new(now: Instant) -> Self {
        let mut barrier = Self { due: now, pause: FIRST_PAUSE, refusals: Refusals::NONE };
        barrier.refused(now);
        barrier
    }

    pub(super) fn refused(&mut self, now: Instant) {
        self.refusals.count = self.refusals.count.saturating_add(1);
        self.due = now + self.pause;
        self.pause = (2 * self.pause).min(LONGEST_PAUSE);
    }

    /// The store is to be asked why it could not.
    pub(super) const fn wants_to_know(&self) -> bool {
        self.refusals.is_to_be_named()
    }

    /// As [`wants_to_know`](Self::wants_to_know), where that is done now.
    pub(super) const fn asks_why(&mut self) -> bool {
        let wants = self.wants_to_know();
        if wants {
            self.refusals.asked();
        }
        wants
    }
}

impl Before {
    /// When the job starts, if nothing else is waited for.
    pub(super) const fn starts_at(&self) -> Option<Instant> {
        if self.barrier.is_some() { None } else { Some(self.start_at) }
    }
}

pub(super) struct Waiting {
    /// Ask then, apart from the common poll.
    pub(super) due: Option<Instant>,
    /// Do not ask before then, whatever happens.
    pub(super) not_before: Option<Instant>,
    /// The question is on its way.
    pub(super) asking: bool,
    /// The name was freed since the last question was sent.
    pub(super) freed: bool,
    /// This session waits for the key in the store as well.
    pub(super) registered: bool,
    pub(super) refusals: Refusals,
}

/// How often one and the same holder was in the way, as far as we know.
pub(super) struct Refusals {
    count: u32,
    /// At how many the store is asked who that is.
    ask_at: u32,
}

/// After how many refusals in a row the log says who is in the way; then again each time that they have doubled.
const REFUSALS_UNTIL_NAMED: u32 = 3;

impl<H> Candidate<H> {
    /// Ends the term that it holds, if it holds one.
    pub(super) fn lose(&mut self, cause: &LossCause, identity: &str, now: Instant) {
        let Phase::Held { term, before, .. } = &self.phase else { return };
        term.lose(cause.clone(), now);
        tell_lost(term, identity, now);
        if before.is_some() {
            // Its job has not started, and its run has not heard of the term: nobody to wait for.
            self.place.show(State::Standby);
            self.phase = Phase::Waiting(Waiting::from(now));
        } else {
            self.place.show(State::Draining);
            // A process that has just been thawed gets its chance to drop the job: nothing was polled meanwhile.
            let overrun_at = term.drop_at().map_or(now, |at| at.max(now)) + OVERRUN_MARGIN;
            self.phase = Phase::Lost { term: Arc::clone(term), overrun_at, overrun: false };
        }
    }
}

/// Tells in the log that a term is lost, if it is: whoever was first to see that gave the cause.
pub(super) fn tell_lost(term: &Term, identity: &str, now: Instant) {
    if term.is_held(now) {
        return;
    }
    let Some(Reason::Lost(cause)) = term.reason() else { return };
    let sqlstate = match &cause {
        LossCause::Closed { sqlstate, .. } => sqlstate.as_deref(),
        _ => None,
    };
    warn!(name = %term.name, term = term.number, %identity, %cause, sqlstate, "lost");
}

impl Refusals {
    const NONE: Self = Self { count: 0, ask_at: REFUSALS_UNTIL_NAMED };

    const fn is_to_be_named(&self) -> bool {
        self.count >= self.ask_at
    }

    const fn ask_again_soon(&mut self) {
        self.ask_at = self.count.saturating_add(1);
    }

    /// The store is being asked.
    pub(super) const fn asked(&mut self) {
        self.ask_at = self.count.saturating_mul(2);
    }
}

impl<H> Candidate<H> {
    /// It asks, and no question of it is on its way.
    pub(super) const fn waits_idly(&self) -> bool {
        matches!(&self.phase, Phase::Waiting(Waiting { asking: false, .. }))
    }

    /// It is to ask now.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        match &self.phase {
            Phase::Waiting(waiting) => {
                !waiting.asking
                    && waiting.due.is_some_and(|at| now >= at)
                    && waiting.not_before.is_none_or(|at| now >= at)
            }
            _ => false,
        }
    }

    /// The store is to be asked who is in its way.
    pub(super) const fn wants_to_know(&self) -> bool {
        matches!(&self.phase, Phase::Waiting(waiting) if waiting.refusals.is_to_be_named())
    }

    /// It holds the lease, and is kept from beginning by the transactions of earlier terms.
    pub(super) fn barrier(&self) -> Option<&Barrier> {
        match &self.phase {
            Phase::Held { before: Some(before), .. } => before.barrier.as_ref(),
            _ => None,
        }
    }

    pub(super) fn barrier_mut(&mut self) -> Option<&mut Barrier> {
        match &mut self.phase {
            Phase::Held { before: Some(before), .. } => before.barrier.as_mut(),
            _ => None,
        }
    }

    /// Tells who keeps it from beginning.
    pub(super) fn name_blocker(&self, blocker: Option<&Blocker>, identity: &str) {
        let Some(barrier) = self.barrier() else { return };
        let Blocker { application, pid, prepared, age, since_query } = blocker.cloned().unwrap_or_default();
        let text = |duration: Option<Duration>| duration.map(|it| humantime::format_duration(it).to_string());
        let (open_for, since_query) = (text(age), text(since_query));
        warn!(
            name = %self.place.name, identity, refusals = barrier.refusals.count, pid, prepared, application, open_for,
            since_query, "holds the lease and does not begin yet: a transaction of an earlier term is still open"
        );
    }

    /// Tells who is in the way. A healthy holder is heard of at least once in the time that it trusts an answer for.
    pub(super) fn name_holder(&mut self, holder: &Holder, options: &Options, trust: Duration) {
        let identity = &options.identity;
        let Phase::Waiting(waiting) = &mut self.phase else { return };
        if holder.silence.is_some_and(|silence| silence > 2 * options.heartbeat_interval && silence <= trust)
        {
            // A heartbeat is missing: looked at again soon, or the server may end it before anybody has said a word.
            waiting.refusals.ask_again_soon();
        }
        let refusals = waiting.refusals.count;
        let name = &self.place.name;
        let Holder { identity: held_by, address, pid, age, silence } = holder;
        let held_by = held_by.as_deref().filter(|held_by| !held_by.is_empty()).unwrap_or("unknown");
        let text =
            |duration: &Option<Duration>| duration.map(|it| humantime::format_duration(it).to_string());
        let (session_age, silent_for) = (text(age), text(silence));
        if silence.is_some_and(|silence| silence > trust) {
            warn!(
                %name, identity, refusals, held_by, address, pid, session_age, silent_for,
                "still held by somebody else, of whom the store has heard nothing for long: frozen, cut off, or no \
                 leasehold process"
            );
        } else {
            info!(
                %name, identity, refusals, held_by, address, pid, session_age, silent_for,
                "still held by somebody else"
            );
        }
    }
}

impl<H> Phase<H> {
    /// When a job that has lost its lease is taken for stuck.
    pub(super) fn overrun_at(&self) -> Option<Instant> {
        match self {
            Self::Lost { overrun_at, .. } => Some(*overrun_at),
            _ => None,
        }
    }
}

impl Waiting {
    /// Asks first at that instant, and not before.
    pub(super) const fn from(at: Instant) -> Self {
        Self {
            due: Some(at),
            not_before: Some(at),
            asking: false,
            freed: false,
            registered: false,
            refusals: Refusals::NONE,
        }
    }

    /// Asks at once, or as soon as it may.
    pub(super) fn wake(&mut self, now: Instant) {
        self.due = Some(self.not_before.map_or(now, |at| at.max(now)));
    }

    /// Somebody else holds the lease.
    pub(super) const fn refused(&mut self) {
        if self.freed {
            // Released meanwhile: it is another holder now.
            self.refusals = Refusals::NONE;
        }
        self.refusals.count = self.refusals.count.saturating_add(1);
    }

    /// The session that it waited on is gone.
    pub(super) const fn forget_session(&mut self) {
        (self.asking, self.registered, self.freed) = (false, false, false);
        self.refusals = Refusals::NONE;
    }
}
