//! A candidate as the driver sees it, and the phases that it goes through.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tracing::warn;

use crate::driver::command::Place;
use crate::driver::term::{State, Term};
use crate::error::LossCause;

/// A run drops its job at the instant when the grace is over; only this much later the driver takes it for stuck. Well
/// inside the slack of every ttl.
pub(super) const OVERRUN_MARGIN: Duration = Duration::from_millis(100);

pub(super) struct Candidate<H> {
    pub(super) place: Place,
    pub(super) phase: Phase<H>,
}

pub(super) enum Phase<H> {
    /// It does not ask.
    Resting,
    /// It asks.
    Waiting(Waiting),
    /// It holds the lease. The job has started, or starts at `start_at`. Once it was told to stop, and until it has:
    /// when to say so again.
    Held { held: H, term: Arc<Term>, start_at: Option<Instant>, remind_at: Option<Instant> },
    /// The lease is gone; the job has not ended yet. One that has not by `overrun_at` is stuck.
    Lost { term: Arc<Term>, overrun_at: Instant, overrun: bool },
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
}

impl<H> Candidate<H> {
    /// Ends the term that it holds, if it holds one.
    pub(super) fn lose(&mut self, cause: &LossCause, identity: &str, now: Instant) {
        let Phase::Held { term, start_at, .. } = &self.phase else { return };
        let sqlstate = match cause {
            LossCause::Closed { sqlstate, .. } => sqlstate.as_deref(),
            _ => None,
        };
        term.lose(cause.clone(), now);
        warn!(name = %term.name, term = term.number, %identity, %cause, sqlstate, "lost");
        if start_at.is_some() {
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
        Self { due: Some(at), not_before: Some(at), asking: false, freed: false, registered: false }
    }
}
