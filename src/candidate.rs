//! Running a job under a lease: [`Candidate`].

use std::fmt;
use std::future::{self, Future};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{Instrument as _, debug, info_span, warn};

use crate::clock;
use crate::driver::command::{Again, Id, Parting};
use crate::driver::term::{Reason, Term, Verdict};
use crate::error::{ConnectError, RunError};
use crate::lease::Lease;
use crate::locker::{Inner, Seat};
use crate::name::Name;
use crate::options::Options;

tokio::task_local! {
    /// The candidates whose jobs the present code runs inside of, outermost first, each with the Locker it belongs to.
    static WITHIN: Arc<[(usize, Id)]>;
}

/// The candidates of this Locker whose jobs the present code runs inside of.
pub(crate) fn within(locker: &Arc<Inner>) -> Vec<Id> {
    let locker = locker_address(locker);
    let ids = |within: &Arc<[(usize, Id)]>| {
        within.iter().filter(|(of, _)| *of == locker).map(|(_, id)| *id).collect()
    };
    WITHIN.try_with(ids).unwrap_or_default()
}

pub(crate) fn locker_address(locker: &Arc<Inner>) -> usize {
    Arc::as_ptr(locker).addr()
}

/// A candidate for a name: it stands by, leads when it is granted the lease, and stands by again after a loss.
///
/// Made by [`Locker::candidate`](crate::Locker::candidate). Nothing happens before [`run`](Self::run).
#[must_use = "a candidate does nothing until it is run"]
pub struct Candidate {
    locker: Arc<Inner>,
    name: Name,
    takeover_delay: Option<Duration>,
    stops: Stops,
}

/// What ends a candidacy, or suspends it, from the user's side.
struct Stops {
    until: Option<CancellationToken>,
    closing: CancellationToken,
    eligible: Option<watch::Receiver<bool>>,
}

impl Candidate {
    pub(crate) fn new(locker: Arc<Inner>, name: Name) -> Self {
        let stops = Stops { until: None, closing: locker.closing.clone(), eligible: None };
        Self { locker, name, takeover_delay: None, stops }
    }

    /// Ends the run in order when `shutdown` is cancelled: a job that runs is told to stop, and its lease is kept
    /// until it has returned; then `run` returns `Ok(None)`.
    pub fn until(mut self, shutdown: CancellationToken) -> Self {
        self.stops.until = Some(shutdown);
        self
    }

    /// Leads only while the value is true. A leader that is no longer eligible hands over; a candidate that is not
    /// eligible stands by without asking. When the sender is gone, the last value stays.
    pub fn eligible(mut self, eligible: watch::Receiver<bool>) -> Self {
        self.stops.eligible = Some(eligible);
        self
    }

    /// Sets the takeover delay of this candidate: see [`Options::takeover_delay`](crate::Options::takeover_delay).
    pub const fn takeover_delay(mut self, delay: Duration) -> Self {
        self.takeover_delay = Some(delay);
        self
    }

    /// Runs `job` whenever this process leads the name.
    ///
    /// The job is called with the [`Lease`] when the lease is granted, and polled inside of this future: it is not
    /// spawned, and needs neither `'static` nor `Send`. It ends in one of these ways:
    ///
    /// * It returns a value of its own accord, while the lease is held: the lease is released, and `run` returns
    ///   `Ok(Some(value))`.
    /// * It returns an error while the lease is held: the lease is released, and `run` returns
    ///   [`RunError::Job`]. That also holds for a job that was told to stop.
    /// * It panics: the lease is released, and the panic goes on.
    /// * Shutdown ([`until`](Self::until), [`Locker::close`](crate::Locker::close)): the job is told to stop; when it
    ///   has returned, the lease is released, and `run` returns `Ok(None)`, whatever value it returned. A job that
    ///   never looks at [`Lease::cancelled`] holds this up, unless there is a
    ///   [`drain_timeout`](crate::Options::drain_timeout).
    /// * It is to hand over (step down, no longer eligible): the same, but then the candidate stands by again.
    /// * The lease is lost: the job is told to stop, and dropped at the end of the stop grace. Whatever it returned
    ///   does not count. Then the candidate stands by again, and the job is called anew when it leads again.
    ///
    /// While the store cannot be reached it goes on trying, also where the login is refused or the database does not
    /// exist yet.
    ///
    /// # Errors
    ///
    /// [`RunError::Job`] as above; [`RunError::AlreadyRunning`] at once if this Locker has a candidate of that name;
    /// [`RunError::Name`], [`RunError::Options`] and [`RunError::TooManyNames`] at once; [`RunError::Refused`] if the
    /// store must not be used, such as one behind a pooler in transaction mode; [`RunError::Driver`] if the driver is
    /// gone, which is a bug.
    ///
    /// # Cancel safety
    ///
    /// Dropped at any point, it drops the job first, and then the lease is released. That is not waited for.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> anyhow::Result<()> {
    /// # let dir = tempfile::tempdir()?;
    /// use leasehold::{Lease, Locker, Options};
    ///
    /// let locker = Locker::file(dir.path(), Options::default())?;
    /// let swept = locker.candidate("sweeper").run(async |lease: Lease| {
    ///     assert!(lease.is_held());
    ///     anyhow::Ok(42)
    /// }).await?;
    /// assert_eq!(swept, Some(42));
    /// # Ok(()) }
    /// ```
    pub async fn run<T, E, F, Fut>(self, mut job: F) -> Result<Option<T>, RunError<E>>
    where
        F: FnMut(Lease) -> Fut,
        Fut: Future<Output = Result<T, E>>,
    {
        self.name.validate().map_err(RunError::Name)?;
        if let Some(delay) = self.takeover_delay {
            Options::clone(&self.locker.options)
                .takeover_delay(delay)
                .validate()
                .map_err(RunError::Options)?;
        }
        if self.locker.closing.is_cancelled() {
            return Ok(None);
        }
        let mut seat = self.locker.seat(&self.name, self.takeover_delay, self.stops.until.clone())?;
        let span = info_span!("run", name = %self.name);
        self.serve(&mut seat, &mut job).instrument(span).await
    }

    /// Stand by, lead, and again. The one place where a job ends before its lease is released: `attend` drops the
    /// job's future before it returns, `ended` comes after it, and the seat, which gives up the lease when it is
    /// dropped, outlives both.
    ///
    /// It borrows, since a future has room twice for what it hands over to another one.
    async fn serve<T, E, F, Fut>(&self, seat: &mut Seat, job: &mut F) -> Result<Option<T>, RunError<E>>
    where
        F: FnMut(Lease) -> Fut,
        Fut: Future<Output = Result<T, E>>,
    {
        let mut again = Again::AtOnce;
        loop {
            let term = match self.stand_by(seat, again).await {
                Standby::Granted(term) => term,
                Standby::Stopped => return Ok(None),
                Standby::Refused(error) => return Err(RunError::Refused(error)),
                Standby::Driverless => return Err(RunError::Driver),
            };
            let is_begun = term.is_held(clock::now());
            let returned = if is_begun {
                // Pinned here, since what a future is handed it has room for twice.
                let stop = pin!(async {
                    term.stop(self.stops.next().await, clock::now());
                    seat.draining(&term);
                });
                attend(job(seat.lease(&term)), &term, seat.address(), stop).await
            } else {
                None
            };
            if is_begun && returned.is_none() {
                let lost = matches!(term.reason(), Some(Reason::Lost(_)));
                let why = if lost { "its grace after a loss" } else { "the drain timeout" };
                let (number, identity) = (term.number, &self.locker.options.identity);
                warn!(term = number, %identity, "the job was dropped: it did not stop within {why}");
            }
            if let Some(returned) = &returned {
                term.job.get_or_init(|| returned.is_ok());
            }
            let Some(parting) = seat.ended(&term).await else { return Err(RunError::Driver) };
            again = Again::AtOnce;
            match (parting, returned) {
                (Parting::Released, Some(Err(error))) => return Err(RunError::Job(error)),
                (Parting::Released, Some(Ok(value))) => match term.reason() {
                    None | Some(Reason::Ended) => return Ok(Some(value)),
                    Some(_) => again = Again::AfterInterval,
                },
                (Parting::Released, None) => again = Again::AfterInterval,
                (Parting::Lost, Some(Ok(_))) => debug!("the job returned a value after its lease was lost"),
                (Parting::Lost, Some(Err(_))) => warn!("the job returned an error after its lease was lost"),
                (Parting::Lost, None) => {}
            }
        }
    }

    async fn stand_by(&self, seat: &mut Seat, mut again: Again) -> Standby {
        loop {
            if self.stops.is_stopped() {
                // Without so much as a question: nobody is to win what nobody wants.
                return Standby::Stopped;
            }
            if self.stops.is_eligible() {
                seat.contend(again);
                tokio::select! {
                    biased;
                    reason = self.stops.next() => if reason != Reason::Ineligible {
                        return Standby::Stopped;
                    },
                    granted = seat.granted() => return match granted {
                        Some(Ok(term)) => Standby::Granted(term),
                        Some(Err(error)) => Standby::Refused(error),
                        None => Standby::Driverless,
                    },
                }
            } else {
                seat.rest();
                tokio::select! {
                    biased;
                    _ = self.stops.stopped() => return Standby::Stopped,
                    () = self.stops.eligible_is(true) => again = Again::AtOnce,
                }
            }
        }
    }
}

impl Stops {
    fn is_stopped(&self) -> bool {
        self.closing.is_cancelled() || self.until.as_ref().is_some_and(CancellationToken::is_cancelled)
    }

    fn is_eligible(&self) -> bool {
        self.eligible.as_ref().is_none_or(|eligible| *eligible.borrow())
    }

    async fn eligible_is(&self, wanted: bool) {
        let comes = match self.eligible.clone() {
            // On the heap, since few have that, and every run would have room for it.
            Some(mut eligible) => {
                Box::pin(async move { eligible.wait_for(|now| *now == wanted).await.is_ok() }).await
            }
            None => wanted,
        };
        if !comes {
            future::pending::<()>().await;
        }
    }

    /// Waits for the end of the candidacy.
    async fn stopped(&self) -> Reason {
        let until = async {
            match &self.until {
                Some(shutdown) => shutdown.cancelled().await,
                None => future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = self.closing.cancelled() => Reason::Closed,
            () = until => Reason::Shutdown,
        }
    }

    /// Waits for whatever ends a term from the user's side.
    async fn next(&self) -> Reason {
        tokio::select! {
            biased;
            reason = self.stopped() => reason,
            () = self.eligible_is(false) => Reason::Ineligible,
        }
    }
}

/// Polls a job while its term allows it, and until then what tells it to stop. `None` if the job had to be dropped. When this returns, the job's future
/// is gone.
///
/// The clock is looked at before every poll: a process that was thawed too late polls the job no more, whatever the
/// driver has noticed by then.
pub(crate) async fn attend<T>(
    job: impl Future<Output = T>,
    term: &Term,
    address: (usize, Id),
    stop: impl Future<Output = ()>,
) -> Option<T> {
    let within = WITHIN.try_with(|outer| outer.to_vec()).unwrap_or_default();
    let within: Arc<[_]> = within.into_iter().chain([address]).collect();
    let mut job = pin!(job);
    let mut stop = pin!(stop);
    // These only wake this future, so that the verdict is looked at again.
    let mut told = pin!(term.stop.cancelled());
    let mut lost = pin!(term.lost.cancelled());
    let mut alarm = pin!(clock::sleep_until(term.deadline()));
    let mut alarm_at = None;
    let mut stopping = false;
    let mut look = move |cx: &mut Context<'_>| {
        loop {
            stopping = stopping || stop.as_mut().poll(cx).is_ready();
            let _ = (told.as_mut().poll(cx), lost.as_mut().poll(cx));
            let Verdict::Poll { look_at } = term.verdict(clock::now()) else { return Verdict::Drop };
            if let Some(at) = look_at
                && alarm_at.is_none_or(|armed| at < armed)
            {
                alarm.as_mut().reset(clock::timer(at));
                alarm_at = Some(at);
            }
            if alarm_at.is_none() || alarm.as_mut().poll(cx).is_pending() {
                return Verdict::Poll { look_at };
            }
            // A deadline that was moved on meanwhile: set the alarm anew.
            alarm_at = None;
        }
    };
    future::poll_fn(|cx| match look(cx) {
        Verdict::Drop => Poll::Ready(None),
        Verdict::Poll { .. } => WITHIN.sync_scope(Arc::clone(&within), || job.as_mut().poll(cx)).map(Some),
    })
    .await
}

impl fmt::Debug for Candidate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Candidate").field("name", &self.name).finish_non_exhaustive()
    }
}

enum Standby {
    Granted(Arc<Term>),
    Refused(Arc<ConnectError>),
    Stopped,
    Driverless,
}
