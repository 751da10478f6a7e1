//! One term: from a grant to its end. Shared between the driver, the run that polls the job, and the user's leases.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, OnceCell};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::command::{Id, Place};
use crate::error::LossCause;
use crate::fence::FencingToken;
use crate::meter::Begun;
use crate::name::Name;
use crate::options::Options;
use crate::sabotage::Sabotage;
use crate::store::{Fence, Mode};

/// A run drops its job at the instant when the grace is over; only this much later the job is taken for stuck. Well
/// inside the slack of every ttl.
pub(crate) const OVERRUN_MARGIN: Duration = Duration::from_millis(100);

/// Why a term ends, or has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reason {
    /// The candidate was asked to shut down: [`Candidate::until`](crate::Candidate::until).
    Shutdown,
    /// The Locker is being closed: [`Locker::close`](crate::Locker::close).
    Closed,
    /// The leader was asked to hand over: [`Lease::step_down`](crate::Lease::step_down), or from outside.
    SteppedDown,
    /// The candidate is no longer eligible: [`Candidate::eligible`](crate::Candidate::eligible).
    Ineligible,
    /// The job ended of its own accord, and the lease was released.
    Ended,
    /// The lease is lost: somebody else may lead from now on, or soon.
    Lost(LossCause),
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Shutdown => f.write_str("shutdown"),
            Self::Closed => f.write_str("the locker is closed"),
            Self::SteppedDown => f.write_str("step down"),
            Self::Ineligible => f.write_str("no longer eligible"),
            Self::Ended => f.write_str("the job ended"),
            Self::Lost(cause) => write!(f, "lost: {cause}"),
        }
    }
}

/// What a candidate is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum State {
    /// It does not hold the lease; it asks for it, unless it is ineligible.
    Standby,
    /// It holds the lease, but the job may not start yet.
    Blocked,
    /// Its job runs under the lease.
    Leading {
        /// Which term of this Locker: see [`Lease::term`](crate::Lease::term).
        term: u64,
        /// When the term began.
        since: Instant,
    },
    /// Its job was told to stop and has not ended yet.
    Draining,
    /// The lease is lost, and the job could not be stopped when its grace was over: its thread is blocked.
    Overrun {
        /// When the grace was over.
        since: Instant,
    },
    /// No candidate of that name runs on this Locker.
    Ended,
}

/// What the candidate of a name is doing, and which one of those that follow each other.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shown {
    pub(crate) candidate: Option<Id>,
    pub(crate) state: State,
}

impl Shown {
    /// Nobody has the name's seat.
    pub(crate) const NOBODY: Self = Self { candidate: None, state: State::Ended };
}

/// One term of one name.
#[derive(Debug)]
pub(crate) struct Term {
    pub(crate) name: Name,
    /// Counts the terms of one Locker, from 1.
    pub(crate) number: u64,
    /// Nobody else holds the key meanwhile.
    pub(crate) is_exclusive: bool,
    /// This process was told of the release before it, and got the lease by asking then.
    #[cfg_attr(not(feature = "metrics"), expect(dead_code, reason = "counted"))]
    pub(crate) is_handed_over: bool,
    /// When it was granted.
    pub(crate) since: Instant,
    /// Tells the job to stop, for whatever reason.
    pub(crate) stop: CancellationToken,
    /// Tells those who drain that the lease is gone as well.
    pub(crate) lost: CancellationToken,
    /// The deadline was moved on.
    pub(crate) renewed: Notify,
    /// Made on first use.
    pub(crate) token: OnceCell<FencingToken>,
    /// Whether its job returned well. Set before it is told that the job has ended, if it has returned at all.
    pub(crate) job: OnceLock<bool>,
    /// Whoever asked wanted it to be able to fence transactions.
    pub(crate) is_fenced: bool,
    /// By what it does. Set before it begins, where the store has transactions.
    pub(crate) fence: OnceLock<Fence>,
    options: Arc<Options>,
    vital: Mutex<Vital>,
}

#[derive(Debug)]
struct Vital {
    /// Up to when the last answer of the store may be trusted. Once passed it is never moved again.
    deadline: Instant,
    /// Lost, or about to be released after its job has ended. Never taken back.
    over: bool,
    reason: Option<Reason>,
    /// From when the job may start to when the lease is over.
    begun: Option<Begun>,
    /// When the job's future is dropped, if it has not ended by then. A further reason can bring it nearer, none can
    /// put it off.
    drop_at: Option<Instant>,
}

impl Vital {
    fn drop_no_later_than(&mut self, at: Instant) {
        self.drop_at = Some(self.drop_at.map_or(at, |earlier| earlier.min(at)));
    }
}

/// What may happen to the job at an instant.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It may be polled; look again at that instant, if nothing happens before.
    Poll { look_at: Option<Instant> },
    /// It must not be polled any more.
    Drop,
}

impl Term {
    pub(crate) fn new(
        place: &Place,
        (number, is_handed_over): (u64, bool),
        since: Instant,
        deadline: Instant,
        options: Arc<Options>,
    ) -> Self {
        Self {
            name: place.name.clone(),
            number,
            is_exclusive: place.mode() != Mode::Read,
            is_handed_over,
            since,
            stop: place.shutdown().map_or_else(CancellationToken::new, CancellationToken::child_token),
            lost: CancellationToken::new(),
            renewed: Notify::new(),
            token: OnceCell::new(),
            job: OnceLock::new(),
            is_fenced: place.is_fenced(),
            fence: OnceLock::new(),
            options,
            vital: Mutex::new(Vital { deadline, over: false, reason: None, begun: None, drop_at: None }),
        }
    }

    fn vital(&self) -> MutexGuard<'_, Vital> {
        self.vital.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn deadline(&self) -> Instant {
        self.vital().deadline
    }

    pub(crate) fn reason(&self) -> Option<Reason> {
        // Only the candidate's own shutdown stops a term without coming by here.
        self.vital().reason.clone().or_else(|| self.stop.is_cancelled().then_some(Reason::Shutdown))
    }

    /// When the job's future is dropped, once that is settled.
    pub(crate) fn drop_at(&self) -> Option<Instant> {
        self.vital().drop_at
    }

    /// When a job that has not ended is taken for stuck, once that is settled.
    pub(crate) fn overrun_at(&self) -> Option<Instant> {
        self.drop_at().map(|at| at + OVERRUN_MARGIN)
    }

    /// Whether the lease is held at this instant. A deadline found passed ends the term for good.
    pub(crate) fn is_held(&self, now: Instant) -> bool {
        self.expire(now);
        !self.vital().over
    }

    /// Moves the deadline on after an answer. False, and nothing moved, if the term was over before it came.
    pub(crate) fn renew(&self, deadline: Instant, now: Instant) -> bool {
        self.expire(now);
        let mut vital = self.vital();
        if vital.over {
            return false;
        }
        vital.deadline = vital.deadline.max(deadline);
        drop(vital);
        self.renewed.notify_waiters();
        true
    }

    /// Its job may start.
    pub(crate) fn begin(&self, begun: Begun) {
        let mut vital = self.vital();
        if !vital.over {
            vital.begun = Some(begun);
        }
    }

    /// A heartbeat has moved the deadline on.
    pub(crate) fn tell_deadline(&self) {
        let vital = self.vital();
        if let Some(begun) = &vital.begun {
            begun.renewed(vital.deadline);
        }
    }

    /// Tells the job to stop while the lease is still held. The first reason stays.
    pub(crate) fn stop(&self, reason: Reason, now: Instant) {
        let mut vital = self.vital();
        if vital.reason.is_none() {
            vital.reason = Some(reason);
            if let Some(at) = self.options.drain_timeout.and_then(|timeout| now.checked_add(timeout)) {
                vital.drop_no_later_than(at);
            }
        }
        drop(vital);
        self.stop.cancel();
    }

    /// Ends the term as lost; whatever the reason to stop was before.
    pub(crate) fn lose(&self, cause: LossCause, now: Instant) {
        self.end(Reason::Lost(cause), now);
    }

    /// Ends the term as over: its job has ended, and the lease is about to be released.
    pub(crate) fn finish(&self, now: Instant) {
        self.end(Reason::Ended, now);
    }

    /// Ends the term if its deadline has passed.
    pub(crate) fn expire(&self, now: Instant) {
        if now >= self.deadline() && !self.options.is_broken(Sabotage::NoDeadline) {
            self.lose(LossCause::Deadline, now);
        }
    }

    fn end(&self, reason: Reason, now: Instant) {
        let mut vital = self.vital();
        if !vital.over {
            vital.over = true;
            // The grace counts from the deadline even if nobody looked at the clock then: the store's clock ran on.
            let notice = self.options.is_broken(Sabotage::GraceFromNotice);
            let from = if notice { now } else { now.min(vital.deadline) };
            vital.drop_no_later_than(from + self.options.stop_grace);
            // A term that was told to stop and then ended in order keeps the reason that it was told.
            if reason != Reason::Ended {
                vital.reason = Some(reason);
            } else if vital.reason.is_none() {
                vital.reason = Some(if self.stop.is_cancelled() { Reason::Shutdown } else { reason });
            }
        }
        // Once: this is asked again whenever somebody looks at a term that is over.
        let begun = vital.begun.take().map(|begun| (begun, vital.reason.clone()));
        drop(vital);
        self.stop.cancel();
        self.lost.cancel();
        // After those who have to stop were told.
        if let Some((begun, Some(reason))) = begun {
            begun.ended(&reason, self.job.get().copied());
        }
    }

    /// What may happen to the job now. Asked before every poll of it.
    pub(crate) fn verdict(&self, now: Instant) -> Verdict {
        self.expire(now);
        let vital = self.vital();
        match vital.drop_at {
            Some(at) if now >= at => Verdict::Drop,
            Some(at) if vital.over => Verdict::Poll { look_at: Some(at) },
            at if self.options.is_broken(Sabotage::NoDeadline) => Verdict::Poll { look_at: at },
            at => Verdict::Poll { look_at: Some(at.map_or(vital.deadline, |at| at.min(vital.deadline))) },
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::{mpsc, watch};

    use super::*;
    use crate::clock;
    use crate::driver::command::{Purpose, Run};
    use crate::name::{Key, Kind};

    const fn ms(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    /// A term whose deadline is in 20 s, with a grace of 5 s.
    fn term(drain_timeout: Option<Duration>) -> (Term, Instant) {
        let now = clock::now();
        let options = Arc::new(Options::default().drain_timeout(drain_timeout));
        (Term::new(&place(None), (1, false), now, now + ms(20_000), options), now)
    }

    fn place(shutdown: Option<CancellationToken>) -> Place {
        let name = Name::from("job");
        let key = Key::of(Kind::Lease, "job");
        let (grants, _) = mpsc::unbounded_channel();
        let shown = watch::Sender::new(Shown::NOBODY);
        let run = Run { takeover_delay: Duration::ZERO, shutdown, grants, shown };
        Place { id: 1, name, key, kind: Kind::Lease, purpose: Purpose::Run(run) }
    }

    /// F-36
    #[test]
    fn a_term_is_not_held_from_the_instant_of_its_deadline_though_no_timer_has_run() {
        let (term, t0) = term(None);
        assert!(term.is_held(t0 + ms(19_999)));
        assert!(!term.is_held(t0 + ms(20_000)));
        assert!(term.stop.is_cancelled() && term.lost.is_cancelled());
        assert_eq!(term.reason(), Some(Reason::Lost(LossCause::Deadline)));
    }

    #[test]
    fn an_answer_after_the_deadline_revives_nothing() {
        let (term, t0) = term(None);
        assert!(term.renew(t0 + ms(30_000), t0 + ms(19_999)));
        assert!(!term.renew(t0 + ms(60_000), t0 + ms(30_000)));
        assert!(!term.is_held(t0));
        assert_eq!(term.deadline(), t0 + ms(30_000));
    }

    #[test]
    fn an_older_answer_does_not_shorten_the_deadline() {
        let (term, t0) = term(None);
        assert!(term.renew(t0 + ms(10_000), t0));
        assert_eq!(term.deadline(), t0 + ms(20_000));
    }

    /// D11
    #[test]
    fn the_grace_counts_from_the_deadline_when_the_loss_is_noticed_late() {
        let (term, t0) = term(None);
        assert_eq!(term.verdict(t0 + ms(24_000)), Verdict::Poll { look_at: Some(t0 + ms(25_000)) });
        assert_eq!(term.verdict(t0 + ms(25_000)), Verdict::Drop);
    }

    #[test]
    fn the_grace_counts_from_the_loss_when_that_comes_before_the_deadline() {
        let (term, t0) = term(None);
        term.lose(LossCause::Gone, t0 + ms(1_000));
        assert_eq!(term.drop_at(), Some(t0 + ms(6_000)));
        assert_eq!(term.verdict(t0 + ms(6_000)), Verdict::Drop);
    }

    /// D07: told to stop, a job has all the time it needs while the lease is held, and no more than the grace after.
    #[test]
    fn a_draining_job_is_dropped_only_when_the_lease_is_lost_as_well() {
        let (term, t0) = term(None);
        term.stop(Reason::Shutdown, t0);
        assert!(term.stop.is_cancelled() && !term.lost.is_cancelled());
        assert!(term.is_held(t0 + ms(1)));
        assert!(term.renew(t0 + ms(90_000), t0 + ms(10_000)));
        assert_eq!(term.verdict(t0 + ms(80_000)), Verdict::Poll { look_at: Some(t0 + ms(90_000)) });
        term.lose(LossCause::Gone, t0 + ms(80_000));
        assert_eq!(term.verdict(t0 + ms(84_999)), Verdict::Poll { look_at: Some(t0 + ms(85_000)) });
        assert_eq!(term.verdict(t0 + ms(85_000)), Verdict::Drop);
        assert_eq!(term.reason(), Some(Reason::Lost(LossCause::Gone)));
    }

    #[test]
    fn a_drain_timeout_drops_a_job_that_goes_on_under_its_lease() {
        let (term, t0) = term(Some(ms(2_000)));
        term.stop(Reason::SteppedDown, t0);
        term.stop(Reason::Shutdown, t0 + ms(1_000));
        assert_eq!(term.reason(), Some(Reason::SteppedDown));
        assert_eq!(term.verdict(t0 + ms(1_999)), Verdict::Poll { look_at: Some(t0 + ms(2_000)) });
        assert_eq!(term.verdict(t0 + ms(2_000)), Verdict::Drop);
    }

    #[test]
    fn a_term_that_ended_in_order_keeps_the_reason_that_it_was_told() {
        let (told, t0) = term(None);
        told.stop(Reason::Shutdown, t0);
        told.finish(t0);
        assert_eq!((told.reason(), told.is_held(t0)), (Some(Reason::Shutdown), false));
        let (untold, t0) = term(None);
        untold.finish(t0);
        assert_eq!((untold.reason(), untold.is_held(t0)), (Some(Reason::Ended), false));
    }

    /// F-12: also where nobody polls the run, since the job blocks its thread.
    #[test]
    fn a_shutdown_stops_the_term_by_itself_and_is_its_reason() {
        let (now, shutdown) = (clock::now(), CancellationToken::new());
        let place = place(Some(shutdown.clone()));
        let term = Term::new(&place, (1, false), now, now + ms(20_000), Arc::new(Options::default()));
        assert_eq!(term.reason(), None);
        shutdown.cancel();
        assert!(term.stop.is_cancelled() && term.is_held(now));
        assert_eq!(term.reason(), Some(Reason::Shutdown));
        term.finish(now);
        assert_eq!(term.reason(), Some(Reason::Shutdown));
    }
}
