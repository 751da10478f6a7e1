//! Once per interval, over the whole deployment: [`Every`].
//!
//! ```text
//!   look ──► served already: rest until the next slot begins by the store's clock ──► look …
//!     └────► not yet: try for the lock ──► somebody has it: pause ──► look …
//!                          └──► ours: look again, record «started», run the job, record «finished», release ──► look …
//! ```
//!
//! What a replica decides stands in [`plan`]; this file does the waiting. The lock says that only one does it at a time,
//! the record says that it is not done again: neither is enough without the other.

mod plan;

use std::any::Any;
use std::fmt;
use std::future::{self, Future};
use std::ops::Deref;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rand::RngExt as _;
use rand::rngs::StdRng;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;
use tracing::{Instrument as _, debug, error, info, info_span, warn};

use self::plan::{Due, Next, Plan, Schedule};
pub(crate) use self::plan::{MAX_INTERVAL, MIN_INTERVAL};
use crate::clock;
use crate::driver::catch_panic;
use crate::driver::command::{Amend, Command, NotLooked};
use crate::driver::term::Reason;
use crate::error::{EveryError, LockError};
use crate::lease::Lease;
use crate::lock::{Lock, LockGuard};
use crate::locker::Inner;
use crate::name::{Key, Kind, Name};
use crate::options::JITTER;
use crate::sabotage::Sabotage;
use crate::store::slots::{Amended, Entry, Looked, Moment, NoSlots, Phase, Record, Slots};

/// Longest time without a look at the store's clock, which drifts from ours and can be set: so much later a slot may be
/// noticed after a step. The session itself asks the store more often.
const LONGEST_NAP: Duration = Duration::from_mins(1);

/// The first pause of one whom somebody else was ahead of, at most: by then that one has recorded the slot.
const FIRST_PAUSE: Duration = Duration::from_millis(250);

/// How often it is tried to record the end of a run.
const ATTEMPTS: u32 = 3;

/// A job that is done once per interval by all processes that share the store.
///
/// Made by [`Locker::every`](crate::Locker::every). Time is cut into *slots* of one interval each, numbered by the store's
/// own clock; in each of them, one replica claims the slot in the store, for good, and runs the job under the
/// [lock](crate::Locker::lock) of the name. Which replica, and when it started, and what its own clock says, makes no
/// difference.
///
/// # What holds
///
/// * A slot is claimed once, however short the job is and whoever leads: who claims records it in the store before the job
///   begins, and nobody runs a slot that is recorded.
/// * The job never overlaps itself, as far as a [lock](crate::Lock) keeps others out. Overlap is not offered: a job that is
///   to overlap starts what it starts, and returns.
/// * There is no drift: slots begin at multiples of the interval since 1970, UTC, plus the [`offset`](Self::offset). A
///   replica that starts serves the present slot, unless it is served already.
/// * Slots of which nobody did anything are skipped, and their number is in the log. Those that come while a run is in
///   progress are too, unless [`missed`](Self::missed) says otherwise.
/// * A run that *crashed*, that is, ended without its end being recorded (its process died, its lease was lost, its future
///   was dropped), is not repeated, unless [`crashed`](Self::crashed) says otherwise. The lock is free as soon as the store
///   frees it, and the next slot is served.
/// * A job that returns an error or panics has finished: it is logged, and the schedule goes on.
/// * If the store's clock is set back, nothing is repeated: slots begin after the last one that was served, or are not
///   served. If it was wrong by years, remove the record: the row in `leasehold.slots`, or the file that ends in `.slot`.
///
/// The lock is that of [`Locker::lock`](crate::Locker::lock)`(name)`: whoever holds it keeps the job from running. It can
/// [fence transactions](crate::Lease::fence_sql), where the store has any.
///
/// A replica that does not serve a slot asks the store once or a few times in it. On PostgreSQL, the table
/// `leasehold.slots` is made by the first who needs it, where its role may; else [`EveryError::Forbidden`] has the SQL.
/// On files, the store's clock is that of the host.
///
/// # Examples
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> anyhow::Result<()> {
/// # let dir = tempfile::tempdir()?;
/// use std::time::Duration;
/// use leasehold::{CancellationToken, Locker, Options, Slot};
///
/// let locker = Locker::file(dir.path(), Options::default())?;
/// let shutdown = CancellationToken::new();
/// locker
///     .every("daily-digest", Duration::from_secs(86_400))
///     .offset(Duration::from_secs(6 * 3_600))
///     .until(shutdown.clone())
///     .run(async |slot: Slot| {
///         println!("the digest of {:?}, slot {}", slot.at, slot.number);
///         # shutdown.cancel();
///         anyhow::Ok(())
///     })
///     .await?;
/// # Ok(()) }
/// ```
#[must_use = "nothing is served before it is run"]
#[derive(Clone)]
pub struct Every {
    locker: Arc<Inner>,
    name: Name,
    schedule: Schedule,
    until: Option<CancellationToken>,
}

/// When slots begin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Spacing {
    /// At multiples of the interval since 1970, UTC, plus the offset.
    #[default]
    Grid,
    /// One interval after the last run has finished, of the whole deployment; after a run that crashed, one interval after
    /// that had started. The first one at once; their numbers count from 1.
    AfterFinish,
}

/// What becomes of slots that begin while a run is in progress.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Missed {
    /// They are skipped, and told in the log.
    #[default]
    Skip,
    /// The latest of them is run as soon as that has finished; the others are skipped.
    RunLatest,
}

/// What becomes of a slot whose run crashed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Crashed {
    /// It is not run again: what was half done stays so.
    #[default]
    AtMostOnce,
    /// It is run once more, with [`Slot::run`] 2: as soon as the store has freed the lock and somebody notices, within a
    /// retry interval. What was half done is done again.
    RetryOnce,
}

/// One slot, for the job that serves it. It derefs to the [`Lease`]: is the lock held, was it lost, what to fence with.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Slot {
    /// Which slot: how many intervals before it since 1970, or with [`Spacing::AfterFinish`] since the first one.
    pub number: u64,
    /// When it began, by the store's clock, without its [`jitter`](Every::jitter).
    pub at: SystemTime,
    /// Which attempt at this slot it is: 1, or 2 after a crash.
    pub run: u32,
    lease: Lease,
}

impl Slot {
    /// Gives the lease, to be handed on.
    #[must_use]
    pub const fn lease(&self) -> &Lease {
        &self.lease
    }
}

impl Deref for Slot {
    type Target = Lease;

    fn deref(&self) -> &Lease {
        &self.lease
    }
}

/// What [`Every::once`] came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Once<T> {
    /// The slot was served here, and the job returned this.
    Ran(T),
    /// There is nothing to do now.
    Taken(Taken),
}

/// Why there is nothing to do for [`Every::once`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Taken {
    /// What is the matter.
    pub state: SlotState,
    /// The slot that was served last. `None` where none ever was.
    pub number: Option<u64>,
    /// When that began, by the store's clock.
    pub at: Option<SystemTime>,
    /// The identity of who served it.
    pub by: Option<String>,
    /// How long until the next slot begins. Zero where somebody is in the way of the present one.
    pub next_in: Duration,
}

/// How it is with a slot that is not to be served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SlotState {
    /// It was served.
    Served,
    /// It is being served, or was by one that has crashed.
    Started,
    /// It began while an earlier one was being served, and is skipped for that.
    Overlapped,
    /// Somebody holds the lock: one who serves an earlier slot, or does something else.
    Held,
}

impl fmt::Display for Taken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { state, number, at, by, next_in } = self;
        let slot = match (number, at) {
            (Some(number), Some(at)) => {
                format!("slot {number} of {}", humantime::format_rfc3339_seconds(*at))
            }
            _ => "no slot yet".to_owned(),
        };
        let by = by.as_deref().unwrap_or("nobody");
        let next_in = humantime::format_duration(Duration::from_secs(next_in.as_secs()));
        match state {
            SlotState::Served => write!(f, "{slot} was served by {by}; the next one begins in {next_in}"),
            SlotState::Started => {
                write!(f, "{slot} was begun by {by}; the next one begins in {next_in}")
            }
            SlotState::Overlapped => write!(
                f,
                "the present slot began while {by} served an earlier one ({slot}); the next one begins in {next_in}"
            ),
            SlotState::Held => write!(f, "somebody has the lock; the last to be served: {slot}, by {by}"),
        }
    }
}

impl Every {
    pub(crate) fn new(locker: Arc<Inner>, name: Name, interval: Duration) -> Self {
        let schedule = Schedule {
            interval,
            offset: Duration::ZERO,
            jitter: Duration::ZERO,
            spacing: Spacing::default(),
            missed: Missed::default(),
            crashed: Crashed::default(),
        };
        Self { locker, name, schedule, until: None }
    }

    /// Moves the grid of slots: with an interval of a day, 6 hours are 06:00 UTC. Shorter than the interval. Default: zero.
    pub const fn offset(mut self, offset: Duration) -> Self {
        self.schedule.offset = offset;
        self
    }

    /// Puts each slot off by a time in `[0, jitter)`, of its number and the name, on which all replicas agree: so that not all
    /// jobs of the deployment begin at once. Shorter than the interval. Default: zero.
    pub const fn jitter(mut self, jitter: Duration) -> Self {
        self.schedule.jitter = jitter;
        self
    }

    /// Sets when slots begin. Default: [`Spacing::Grid`].
    pub const fn spacing(mut self, spacing: Spacing) -> Self {
        self.schedule.spacing = spacing;
        self
    }

    /// Sets what becomes of slots that begin while a run is in progress. Default: [`Missed::Skip`].
    pub const fn missed(mut self, missed: Missed) -> Self {
        self.schedule.missed = missed;
        self
    }

    /// Sets what becomes of a slot whose run crashed. Default: [`Crashed::AtMostOnce`].
    pub const fn crashed(mut self, crashed: Crashed) -> Self {
        self.schedule.crashed = crashed;
        self
    }

    /// Ends it in order when `shutdown` is cancelled: a job that runs is told to stop, by its lease, and is waited for.
    pub fn until(mut self, shutdown: CancellationToken) -> Self {
        self.until = Some(shutdown);
        self
    }

    /// Serves slots until it is told to stop: by [`until`](Self::until), or since the Locker is closed.
    ///
    /// The job is called with the [`Slot`] whenever this process has claimed one, and polled inside of this future: it is
    /// not spawned, and needs neither `'static` nor `Send`. What it returns does not matter; an error is logged. A panic
    /// is caught and logged: a job whose captured state a panic leaves half done has to tell by itself. A job that was told
    /// to stop is waited for, as long as the [`drain_timeout`](crate::Options::drain_timeout) allows; one whose lock is
    /// lost is dropped `stop_grace` after that, and its slot counts as crashed.
    ///
    /// While the store cannot be reached it goes on trying, at every retry interval.
    ///
    /// All replicas should have one schedule. Where they differ, as while a new version is rolled out, each serves what is
    /// due by its own, and never a slot that does not begin after the last one.
    ///
    /// # Errors
    ///
    /// [`EveryError::Schedule`], [`EveryError::Name`] and [`EveryError::TooManyNames`] at once; [`EveryError::Refused`] and
    /// [`EveryError::Forbidden`] if the store must not, or cannot, be used for it; [`EveryError::Driver`] if the driver is
    /// gone, which is a bug.
    ///
    /// # Cancel safety
    ///
    /// Dropped at any point, it drops the job first, and then the lock is released. That is not waited for. A slot that was
    /// being served counts as crashed.
    pub async fn run<T, E, F, Fut>(self, mut job: F) -> Result<(), EveryError>
    where
        F: FnMut(Slot) -> Fut,
        Fut: Future<Output = Result<T, E>>,
        E: fmt::Display,
    {
        let span = info_span!("every", name = %self.name);
        let mut replica = Replica::new(self)?;
        async {
            while let Some(guard) = replica.next_lock().await? {
                if let Some((slot, claim)) = replica.claim(&guard).await? {
                    let number = slot.number;
                    let returned = replica.serve(&guard, claim, async { job(slot).await }).await;
                    match returned {
                        Some(Ok(Ok(_))) => debug!(slot = number, "the job has ended"),
                        Some(Ok(Err(error))) => error!(slot = number, "the job failed: {error:#}"),
                        Some(Err(panic)) => {
                            error!(slot = number, panic = text_of(&*panic), "the job panicked");
                        }
                        None => {}
                    }
                }
                guard.release().await.ok();
            }
            Ok(())
        }
        .instrument(span)
        .await
    }

    /// Serves the present slot, if it is to be served: for what is started by something else, such as a crontab on many
    /// hosts. It does not wait for a slot to begin; but where somebody else has the lock and may be dead, it waits until the
    /// store has freed it, at most [`Bounds::ttl`](crate::Bounds::ttl).
    ///
    /// What starts it should do so in the middle of slots: it is told by another clock than the store's, and around the time
    /// at which a slot begins the two may not agree on which one it is. Half an interval of [`offset`](Self::offset) does
    /// that.
    ///
    /// # Errors
    ///
    /// Those of the job; and [`EveryError`]. If the lock is lost meanwhile, [`EveryError::Lost`], unless the job returned an
    /// error. A panic of the job goes on when the slot is recorded as served.
    ///
    /// # Cancel safety
    ///
    /// As for [`run`](Self::run).
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> anyhow::Result<()> {
    /// # let dir = tempfile::tempdir()?;
    /// use std::time::Duration;
    /// use leasehold::{Locker, Once, Options, Slot};
    ///
    /// let locker = Locker::file(dir.path(), Options::default())?;
    /// let daily = locker.every("daily-digest", Duration::from_secs(86_400));
    /// let first = daily.clone().once(async |slot: Slot| anyhow::Ok(slot.number)).await?;
    /// assert!(matches!(first, Once::Ran(_)));
    /// let second = daily.once(async |slot: Slot| anyhow::Ok(slot.number)).await?;
    /// assert!(matches!(second, Once::Taken(_)));
    /// # Ok(()) }
    /// ```
    pub async fn once<T, E, F, Fut>(self, job: F) -> Result<Once<T>, E>
    where
        F: FnOnce(Slot) -> Fut,
        Fut: Future<Output = Result<T, E>>,
        E: From<EveryError>,
    {
        let span = info_span!("once", name = %self.name);
        let mut replica = Replica::new(self)?;
        async {
            let (guard, slot, claim) = loop {
                match replica.lock_once().await? {
                    Entered::Taken(taken) => return Ok(Once::Taken(taken)),
                    Entered::Locked(guard) => match replica.claim(&guard).await? {
                        Some((slot, claim)) => break (guard, slot, claim),
                        // The next look tells who was quicker.
                        None => drop(guard.release().await),
                    },
                }
            };
            let returned = replica.serve(&guard, claim, async { job(slot).await }).await;
            let reason = guard.reason();
            let released = guard.release().await;
            match returned {
                Some(Ok(Err(error))) => Err(error),
                Some(Err(panic)) => std::panic::resume_unwind(panic),
                Some(Ok(Ok(value))) if released.is_ok() => Ok(Once::Ran(value)),
                _ => Err(E::from(match (reason, released) {
                    (Some(Reason::Lost(cause)), _) | (_, Err(LockError::Lost { cause })) => {
                        EveryError::Lost { cause }
                    }
                    _ => EveryError::Stopped,
                })),
            }
        }
        .instrument(span)
        .await
    }
}

/// One who serves slots.
struct Replica {
    locker: Arc<Inner>,
    lock: Lock,
    slots: Slots,
    plan: Plan,
    interval: Duration,
    until: Option<CancellationToken>,
    rng: StdRng,
    /// A claim whose job was not started, since the lock was lost in between, and what was recorded before it: nobody else
    /// can have run that slot.
    unused: Option<(Record, Option<Record>)>,
    /// It was told in the log that the store's clock must have been set back.
    told_of_the_clock: bool,
}

/// A slot that is ours.
struct Claim {
    started: Record,
    before: Option<Record>,
}

/// What one who does not wait for slots came to.
enum Entered {
    Locked(LockGuard),
    Taken(Taken),
}

/// What is to be done, and what that was told from.
struct Outlook {
    looked: Looked,
    /// What counts as recorded.
    record: Option<Record>,
    next: Next,
    /// The present slot came while the last run was in progress.
    is_overlapped: bool,
}

impl Replica {
    fn new(every: Every) -> Result<Self, EveryError> {
        let Every { locker, name, schedule, until } = every;
        name.validate().map_err(EveryError::Name)?;
        let key = Key::of(Kind::Lock, &name);
        let plan = schedule.plan(key)?;
        // Those who were kept from the same slot do not come back at the same instant.
        let seed = Key::of(Kind::Lock, &locker.options.identity).get().cast_unsigned();
        Ok(Self {
            lock: Lock::new(Arc::clone(&locker), name.clone(), None).fenced(),
            slots: Slots { key, name },
            plan,
            interval: schedule.interval,
            until,
            rng: rand::SeedableRng::seed_from_u64(seed),
            unused: None,
            told_of_the_clock: false,
            locker,
        })
    }

    fn is_stopped(&self) -> bool {
        self.locker.closing.is_cancelled() || self.until.as_ref().is_some_and(CancellationToken::is_cancelled)
    }

    /// Waits for the lock, when there is a slot to be served. `None`: told to stop.
    async fn next_lock(&mut self) -> Result<Option<LockGuard>, EveryError> {
        let (closing, until) = (self.locker.closing.clone(), self.until.clone());
        let entered = tokio::select! {
            biased;
            () = closing.cancelled() => return Ok(None),
            () = cancelled(until.as_ref()) => return Ok(None),
            entered = self.enter() => entered,
        };
        match entered {
            Err(_) if self.is_stopped() => Ok(None),
            entered => entered.map(Some),
        }
    }

    /// Nothing of this has to be brought to its end: it may be dropped.
    async fn enter(&mut self) -> Result<LockGuard, EveryError> {
        let mut refusals = 0;
        loop {
            let outlook = match self.look().await {
                Ok(outlook) => outlook,
                Err(EveryError::Failed { reason }) => {
                    warn!(reason, "the store could not tell which slots were served");
                    self.pause(1).await;
                    continue;
                }
                Err(EveryError::Unanswered { .. }) => {
                    debug!("the store did not tell which slots were served");
                    self.pause(1).await;
                    continue;
                }
                Err(error) => return Err(error),
            };
            match outlook.next {
                Next::Rest { until } => {
                    refusals = 0;
                    self.rest(outlook.looked.now, until).await;
                }
                Next::Serve(due) => match self.lock.try_lock().await {
                    Ok(Some(guard)) => return Ok(guard),
                    Ok(None) => {
                        debug!(slot = due.number, "somebody else has the lock");
                        self.pause(refusals).await;
                        refusals += 1;
                    }
                    Err(error @ (LockError::Failed { .. } | LockError::Unanswered { .. })) => {
                        warn!(%error, slot = due.number, "the lock could not be asked for");
                        self.pause(1).await;
                    }
                    Err(error) => return Err(error.into()),
                },
            }
        }
    }

    /// As [`enter`](Self::enter), for one who does not wait for slots.
    async fn lock_once(&mut self) -> Result<Entered, EveryError> {
        let patience = clock::now() + self.locker.options.bounds().ttl;
        let mut refusals = 0;
        loop {
            if self.is_stopped() {
                return Err(EveryError::Stopped);
            }
            let outlook = self.look().await?;
            let Next::Serve(_) = outlook.next else { return Ok(Entered::Taken(outlook.taken())) };
            match self.lock.try_lock().await? {
                Some(guard) => return Ok(Entered::Locked(guard)),
                None if clock::now() >= patience => return Ok(Entered::Taken(outlook.taken())),
                None => self.pause(refusals).await,
            }
            refusals += 1;
        }
    }

    async fn rest(&mut self, now: Moment, until: Moment) {
        let rest = until.since(now);
        if rest > self.interval * 3 && !self.told_of_the_clock {
            self.told_of_the_clock = true;
            warn!(
                rest = %humantime::format_duration(rest),
                "a slot is recorded that lies ahead of the store's clock, which was set back: none is served before that"
            );
        }
        tokio::time::sleep(rest.min(LONGEST_NAP)).await;
    }

    /// Between two attempts: the first one is over soon after the other one has claimed the slot.
    async fn pause(&mut self, refusals: u32) {
        let retry = self.locker.options.retry_interval.min(self.interval / 2);
        let pause = if refusals == 0 { retry.min(FIRST_PAUSE) } else { retry };
        tokio::time::sleep(pause.mul_f64(1.0 + self.rng.random_range(0.0..JITTER))).await;
    }

    /// Asks the store what is recorded and what its clock shows, and tells what is to be done.
    async fn look(&self) -> Result<Outlook, EveryError> {
        let (reply, answer) = oneshot::channel();
        self.locker.tell(Command::Slots(self.slots.clone(), reply));
        let looked = match answer.await {
            Ok(Ok(looked)) => looked,
            Ok(Err(NotLooked::NoSlots(error))) => return Err(error.into()),
            Ok(Err(NotLooked::Unanswered)) => {
                return Err(EveryError::Unanswered { limit: self.locker.options.query_timeout });
            }
            Ok(Err(NotLooked::Refused(error))) => return Err(EveryError::Refused(error)),
            Err(_) if self.locker.closing.is_cancelled() => return Err(EveryError::Stopped),
            Err(_) => return Err(EveryError::Driver),
        };
        let record = match &self.unused {
            Some((unused, before)) if looked.record.as_ref() == Some(unused) => before.clone(),
            _ if self.locker.options.is_broken(Sabotage::LockIsEnough) => None,
            _ => looked.record.clone(),
        };
        let is_by_the_client = self.locker.options.is_broken(Sabotage::ClientClock);
        let now = if is_by_the_client { Moment(clock::wall_micros()) } else { looked.now };
        let next = self.plan.next(now, record.as_ref());
        let is_overlapped = record.as_ref().is_some_and(|record| self.plan.skips_present(now, record));
        Ok(Outlook { looked, record, next, is_overlapped })
    }

    /// Records that the slot is ours, under the lock. `None`: somebody else was quicker, or it could not be recorded; then
    /// the next look tells.
    ///
    /// Once it is asked for it is brought to its end, also where this is told to stop meanwhile: a slot that is claimed and
    /// not served is lost.
    async fn claim(&mut self, guard: &LockGuard) -> Result<Option<(Slot, Claim)>, EveryError> {
        let outlook = match self.look().await {
            Ok(outlook) => outlook,
            Err(EveryError::Failed { .. } | EveryError::Unanswered { .. } | EveryError::Stopped) => {
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        let Next::Serve(due) = outlook.next else { return Ok(None) };
        if self.is_stopped() {
            return Ok(None);
        }
        let Due { number, at, run } = due;
        let by = self.locker.options.identity.clone();
        let entry = Entry { number, at, run, phase: Phase::Started, by };
        let started = match self.amend(guard, outlook.looked.record.as_ref(), entry).await {
            Amended::Done(record) => record,
            Amended::Failed(error @ NoSlots::Forbidden(_)) => return Err(error.into()),
            not_done => {
                debug!(slot = number, ?not_done, "the slot was not claimed");
                return Ok(None);
            }
        };
        let claim = Claim { started, before: outlook.record };
        if !guard.is_held() {
            self.unused = Some((claim.started, claim.before));
            return Ok(None);
        }
        self.tell_of_the_past(claim.before.as_ref(), &due);
        info!(slot = number, run, term = guard.term(), "serves the slot");
        let slot = Slot { number, at: at.to_system_time(), run, lease: guard.lease().clone() };
        Ok(Some((slot, claim)))
    }

    /// What became of the slots before this one. One replica tells it: who claims this one.
    fn tell_of_the_past(&self, before: Option<&Record>, due: &Due) {
        let Some(before) = before else { return };
        let Entry { number, phase, by, .. } = &before.entry;
        if *phase == Phase::Started {
            warn!(slot = number, by, is_repeated = due.run > 1, "the run of a slot crashed");
        }
        let skipped = self.plan.missed(before, due);
        if skipped > 0 {
            warn!(skipped, after = number, "slots were skipped: nobody served them");
        }
    }

    /// Polls the job, and records its end. `None` if it had to be dropped.
    ///
    /// The one place where a job ends before its lock is released, by the caller: `attend` drops its future before it
    /// returns.
    async fn serve<T>(
        &self,
        guard: &LockGuard,
        claim: Claim,
        job: impl Future<Output = T>,
    ) -> Option<std::thread::Result<T>> {
        let number = claim.started.entry.number;
        let stop = async {
            cancelled(self.until.as_ref()).await;
            let term = guard.lease().shared();
            term.stop(Reason::Shutdown, clock::now());
            self.locker.tell(Command::Stop { id: guard.id(), term: term.number, reason: Reason::Shutdown });
        };
        // What the panic leaves half done of the job's future is dropped, and not looked at.
        let returned = guard.attend(catch_panic(job), stop).await;
        if returned.is_none() {
            warn!(
                slot = number,
                "the job was dropped, since it did not stop in time: its slot counts as crashed"
            );
            return None;
        }
        let entry = Entry { phase: Phase::Finished, ..claim.started.entry.clone() };
        for attempt in 1..=ATTEMPTS {
            match self.amend(guard, Some(&claim.started), entry.clone()).await {
                Amended::Done(finished) => {
                    let skipped = self.plan.overlapped(&finished);
                    if skipped > 0 {
                        warn!(
                            skipped,
                            after = number,
                            "slots were skipped: they began while this one was served"
                        );
                    }
                    break;
                }
                Amended::Failed(NoSlots::Failed(reason)) if guard.is_held() && attempt < ATTEMPTS => {
                    debug!(slot = number, reason, "the end of the run could not be recorded yet");
                }
                not_done => {
                    warn!(
                        slot = number,
                        ?not_done,
                        "the end of the run was not recorded: its slot counts as crashed"
                    );
                    break;
                }
            }
        }
        returned
    }

    async fn amend(&self, guard: &LockGuard, expected: Option<&Record>, next: Entry) -> Amended {
        let (reply, amended) = oneshot::channel();
        let amend = Amend {
            id: guard.id(),
            term: guard.term(),
            slots: self.slots.clone(),
            expected: expected.cloned(),
            next,
        };
        self.locker.tell(Command::Amend(Box::new(amend), reply));
        // The driver is gone, and the lock with it.
        amended.await.unwrap_or(Amended::Gone)
    }
}

impl Outlook {
    fn taken(&self) -> Taken {
        let (state, next_in) = match (&self.next, &self.record) {
            (Next::Rest { until }, Some(record)) => {
                let state = match record.entry.phase {
                    Phase::Started => SlotState::Started,
                    Phase::Finished if self.is_overlapped => SlotState::Overlapped,
                    Phase::Finished => SlotState::Served,
                };
                (state, until.since(self.looked.now))
            }
            (Next::Rest { until }, None) => (SlotState::Served, until.since(self.looked.now)),
            (Next::Serve(_), _) => (SlotState::Held, Duration::ZERO),
        };
        let entry = self.record.as_ref().map(|record| &record.entry);
        Taken {
            state,
            number: entry.map(|entry| entry.number),
            at: entry.map(|entry| entry.at.to_system_time()),
            by: entry.map(|entry| entry.by.clone()),
            next_in,
        }
    }
}

async fn cancelled(until: Option<&CancellationToken>) {
    match until {
        Some(shutdown) => shutdown.cancelled().await,
        None => future::pending().await,
    }
}

/// What a panic said.
fn text_of(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("without a text")
}

impl From<NoSlots> for EveryError {
    fn from(error: NoSlots) -> Self {
        match error {
            NoSlots::Forbidden(reason) => Self::Forbidden { reason },
            NoSlots::Failed(reason) => Self::Failed { reason },
        }
    }
}

impl From<LockError> for EveryError {
    fn from(error: LockError) -> Self {
        match error {
            LockError::Refused(error) => Self::Refused(error),
            LockError::Name(error) => Self::Name(error),
            LockError::TooManyNames { max_held } => Self::TooManyNames { max_held },
            LockError::Failed { reason } => Self::Failed { reason },
            LockError::Unanswered { limit } => Self::Unanswered { limit },
            LockError::Closed => Self::Stopped,
            LockError::Lost { cause } => Self::Lost { cause },
            // It waits without a limit and has no ttl of its own.
            LockError::Timeout { .. }
            | LockError::Ttl { .. }
            | LockError::EndsWithSession
            | LockError::Driver => Self::Driver,
        }
    }
}

impl fmt::Debug for Every {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Every")
            .field("name", &self.name)
            .field("schedule", &self.schedule)
            .finish_non_exhaustive()
    }
}
