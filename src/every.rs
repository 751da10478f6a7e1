//! Once per interval, over the whole deployment: [`Every`].
//!
//! ```text
//!   look ──► served already: rest until the next slot begins by the store's clock ──► look …
//!     └────► not yet: try for the lock ──► somebody has it: pause ──► look …
//!                          └──► ours: look again, record «started», run the job, record «finished», release ──► look …
//! ```
//!
//! What a replica decides stands in [`plan`], what it does and waits for in [`replica`]; this file is what users see of it. The lock says that only one does it at a time,
//! the record says that it is not done again: neither is enough without the other.

mod plan;
mod replica;

use std::any::Any;
use std::fmt;
use std::future::Future;
use std::ops::Deref;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio_util::sync::CancellationToken;
use tracing::{Instrument as _, debug, error, info_span};

use self::plan::Schedule;
pub(crate) use self::plan::{MAX_INTERVAL, MIN_INTERVAL};
use self::replica::{Entered, Replica};
use crate::driver::term::Reason;
use crate::error::{EveryError, LockError};
use crate::lease::Lease;
use crate::locker::Inner;
use crate::name::Name;
use crate::store::slots::NoSlots;

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
///   served. If it was wrong by years, remove the record: the row in `leasehold.slots`, the file that ends in `.slot`, or on
///   Redis the key that ends in `:s`.
///
/// The lock is that of [`Locker::lock`](crate::Locker::lock)`(name)`: whoever holds it keeps the job from running, and a job
/// that asks for it itself waits for ever. It can [fence transactions](crate::Lease::fence_sql), where the store has any.
///
/// A replica that does not serve a slot asks the store once or a few times in it. On PostgreSQL, the table
/// `leasehold.slots` is made by the first who needs it, where its role may; else [`EveryError::Forbidden`] has the SQL.
/// On files, the store's clock is that of the host. On Redis the record lives as long as the server's data: where those are
/// lost, the present slot may be served again.
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
                    replica.tell_end(returned.as_ref());
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
            replica.tell_end(returned.as_ref());
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
