//! Critical sections: [`Lock`] and [`RwLock`].

use std::fmt;
use std::future::{self, Future};
use std::ops::Deref;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;
use tracing::debug;

use crate::candidate::{self, attend};
use crate::clock;
use crate::driver::command::{Admission, Command, Id, Parting, Place, Purpose, Section};
use crate::driver::term::{Reason, Term};
use crate::error::{LockError, LossCause};
use crate::lease::Lease;
use crate::locker::Inner;
use crate::name::{Key, Kind, Name};
use crate::options::{MAX_TTL, SHORTEST};
use crate::sabotage::Sabotage;
use crate::scope::{Scope, ScopedName};
use crate::store::{Holder, Mode};
use crate::turns::Turn;

/// How long before its end a timed wait asks who is in the way, at most: for the error that it may end with.
const LAST_QUESTION: Duration = Duration::from_millis(500);

/// A critical section that one task enters at a time, of all processes that share the store.
///
/// Made by [`Locker::lock`](crate::Locker::lock); clones are the same section. Nothing is sent before the first acquire.
/// It rides on the Locker's one session: any number of locks takes no connection of its own, and no slot of a pool.
///
/// A lock is held for as long as its [`LockGuard`] lives, or the body of a closure form runs, unless it is *lost*: then
/// the guard's [`Lease`] is cancelled, as that of a job is, and `stop_grace` after that somebody else may be in.
///
/// It is not re-entrant: a task that asks for what it holds itself waits for ever, or until its limit.
///
/// # Examples
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> anyhow::Result<()> {
/// # let dir = tempfile::tempdir()?;
/// use std::time::Duration;
/// use leasehold::{Lease, Locker, Options};
///
/// let locker = Locker::file(dir.path(), Options::default())?;
/// let invoice = locker.lock("invoice:42");
///
/// // If nobody is in, now.
/// let total: Option<u32> = invoice.try_with(async |_: Lease| anyhow::Ok(17)).await?;
/// assert_eq!(total, Some(17));
///
/// // When it is our turn, within three seconds.
/// let guard = invoice.lock_timeout(Duration::from_secs(3)).await?;
/// assert!(guard.is_held());
/// guard.release().await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Lock {
    section: Entrance,
}

/// A critical section that any number of readers or one writer is in, of all processes that share the store.
///
/// Made by [`Locker::rw_lock`](crate::Locker::rw_lock). All that is said of [`Lock`] holds. A writer who waits keeps new readers
/// out, so readers who follow each other do not starve it; should its process die, that is over when the store ends its
/// session. Reading cannot be upgraded to writing: release first.
///
/// # Examples
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> anyhow::Result<()> {
/// # let dir = tempfile::tempdir()?;
/// use leasehold::{Locker, Options};
///
/// let locker = Locker::file(dir.path(), Options::default())?;
/// let catalogue = locker.rw_lock("catalogue");
/// let (one, two) = (catalogue.read().await?, catalogue.read().await?);
/// assert!(catalogue.try_write().await?.is_none());
/// drop((one, two));
/// let writes = catalogue.write().await?;
/// writes.release().await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct RwLock {
    section: Entrance,
}

/// The critical sections of a [`Scope`] on one Locker, and no others.
///
/// Made by [`Locker::scope`](crate::Locker::scope).
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> anyhow::Result<()> {
/// # let dir = tempfile::tempdir()?;
/// use leasehold::{Locker, Options, Scope};
///
/// const INVOICES: Scope<u64> = Scope::new("invoice");
///
/// let locker = Locker::file(dir.path(), Options::default())?;
/// let guard = locker.scope(INVOICES).lock(&42).lock().await?;
/// assert_eq!(guard.name().to_string(), "invoice/42");
/// # Ok(()) }
/// ```
///
/// It takes nothing outside of its scope:
///
/// ```compile_fail,E0308
/// # use leasehold::{Locker, Scope};
/// # fn example(locker: &Locker) {
/// # const INVOICES: Scope<u64> = Scope::new("invoice");
/// locker.scope(INVOICES).lock("sweeper"); // expected `&u64`, found `&str`
/// # }
/// ```
pub struct Scoped<N: ?Sized> {
    locker: Arc<Inner>,
    scope: Scope<N>,
}

/// A lock that is held, for as long as this lives. It derefs to the [`Lease`]: is it held, until when, was it lost.
///
/// Dropped, it releases through the Locker's driver, with or without a runtime around; that is not waited for.
/// [`release`](Self::release) waits for it, and tells whether the lock was held to the end.
#[must_use = "the lock is released when the guard is dropped"]
pub struct LockGuard {
    lease: Lease,
    // In this order: the next task of this process asks after we have left.
    seat: Seat,
    turn: Turn,
}

/// How to get into a section.
#[derive(Clone)]
struct Entrance {
    locker: Arc<Inner>,
    name: Name,
    key: Key,
    kind: Kind,
    ttl: Option<Duration>,
    is_fenced: bool,
}

/// How long to wait for others.
#[derive(Clone, Copy)]
enum Patience {
    /// Not at all.
    None,
    Endless,
    Until(Duration),
}

impl Lock {
    pub(crate) fn new(locker: Arc<Inner>, name: Name, ttl: Option<Duration>) -> Self {
        Self { section: Entrance::new(locker, Kind::Lock, name, ttl) }
    }

    /// Gives the name.
    #[must_use]
    pub const fn name(&self) -> &Name {
        &self.section.name
    }

    /// Gives the key by which the store knows it.
    #[must_use]
    pub const fn key(&self) -> Key {
        self.section.key
    }

    /// Gives the same lock, with a time to live of its own where each lock has one, as on Redis: how long, at least, the
    /// store keeps it for a holder that has fallen silent. It is never less than the ttl of
    /// [`Options::bounds`](crate::Options::bounds), which is the default. A holder that lives renews it at every
    /// heartbeat. PostgreSQL and files free locks with their session, and do not use it.
    ///
    /// Less than a millisecond, or more than [`MAX_TTL`](crate::MAX_TTL), is refused by the first acquire.
    #[must_use]
    pub const fn ttl(mut self, ttl: Duration) -> Self {
        self.section.ttl = Some(ttl);
        self
    }

    /// Gives the same lock, whose leases can [fence transactions](Lease::fence_sql), where the store has any.
    ///
    /// All who take the lock have to ask for that: one who does not may be in while a transaction is still open that an
    /// earlier holder has fenced. One who does waits for such a transaction as for a holder. It costs a little: locks that
    /// need no fence are asked for by a statement that the server has prepared.
    #[must_use]
    pub fn fenced(mut self) -> Self {
        self.section.is_fenced = true;
        self
    }

    /// Enters if nobody is in: `None` if somebody is, here or elsewhere. It takes one round trip, and none where a task of
    /// this Locker is in or asks.
    ///
    /// # Errors
    ///
    /// [`LockError`], except for `Timeout`; [`LockError::Unanswered`] after the query timeout, or twice that where the
    /// question was already on its way.
    ///
    /// # Cancel safety
    ///
    /// Dropped at any point, it leaves nothing: what the store may still grant is released.
    pub async fn try_lock(&self) -> Result<Option<LockGuard>, LockError> {
        self.section.enter(Mode::Exclusive, Patience::None).await
    }

    /// Enters as soon as it is its turn. Tasks of one Locker have their turns in the order in which they came. A release is
    /// pushed to the processes that wait; where that fails, they ask again at every retry interval.
    ///
    /// While the store cannot be reached, it waits for that.
    ///
    /// # Errors
    ///
    /// [`LockError`], except for `Timeout` and `Unanswered`.
    ///
    /// # Cancel safety
    ///
    /// As for [`try_lock`](Self::try_lock); the place in the queue is lost.
    pub async fn lock(&self) -> Result<LockGuard, LockError> {
        self.section.wait(Mode::Exclusive, Patience::Endless).await
    }

    /// As [`lock`](Self::lock), but waits no longer than `limit`, for whatever it waits. With a limit of zero it tries once,
    /// and waits for the answer, at most for the query timeout.
    ///
    /// # Errors
    ///
    /// [`LockError`]; `Timeout` names who held it, where the store tells in time.
    ///
    /// # Cancel safety
    ///
    /// As for [`lock`](Self::lock).
    pub async fn lock_timeout(&self, limit: Duration) -> Result<LockGuard, LockError> {
        self.section.wait(Mode::Exclusive, Patience::Until(limit)).await
    }

    /// Runs `body` if nobody is in, and releases before it returns. `None` if somebody is in: then `body` is not called.
    ///
    /// If the lock is lost meanwhile, the lease is cancelled, and the body is dropped where it does not end within
    /// `stop_grace`; then, and where it returned `Ok`, the result is [`LockError::Lost`]. An error of the body is always
    /// given back as it is. If the body panics, the lock is released, and the panic goes on.
    ///
    /// # Errors
    ///
    /// Those of the body, and those of [`try_lock`](Self::try_lock).
    ///
    /// # Cancel safety
    ///
    /// Dropped at any point, it drops the body first, and then releases. That is not waited for.
    pub async fn try_with<T, E, F, Fut>(&self, body: F) -> Result<Option<T>, E>
    where
        F: FnOnce(Lease) -> Fut,
        Fut: Future<Output = Result<T, E>>,
        E: From<LockError>,
    {
        self.section.with(Mode::Exclusive, Patience::None, body).await
    }

    /// Runs `body` as soon as it is its turn, and releases before it returns. As [`try_with`](Self::try_with) otherwise.
    ///
    /// # Errors
    ///
    /// Those of the body, and those of [`lock`](Self::lock).
    ///
    /// # Cancel safety
    ///
    /// As for [`try_with`](Self::try_with).
    pub async fn with<T, E, F, Fut>(&self, body: F) -> Result<T, E>
    where
        F: FnOnce(Lease) -> Fut,
        Fut: Future<Output = Result<T, E>>,
        E: From<LockError>,
    {
        self.section.wait_with(Mode::Exclusive, Patience::Endless, body).await
    }

    /// As [`with`](Self::with), but waits no longer than `limit` to get in. The body has as long as it takes.
    ///
    /// # Errors
    ///
    /// Those of the body, and those of [`lock_timeout`](Self::lock_timeout).
    ///
    /// # Cancel safety
    ///
    /// As for [`try_with`](Self::try_with).
    pub async fn with_timeout<T, E, F, Fut>(&self, limit: Duration, body: F) -> Result<T, E>
    where
        F: FnOnce(Lease) -> Fut,
        Fut: Future<Output = Result<T, E>>,
        E: From<LockError>,
    {
        self.section.wait_with(Mode::Exclusive, Patience::Until(limit), body).await
    }
}

impl<N: ScopedName + ?Sized> Scoped<N> {
    pub(crate) fn new(locker: Arc<Inner>, scope: Scope<N>) -> Self {
        if scope.ttl.is_some() && locker.keys_end_with_their_session() {
            debug!(?scope, "the store frees locks with their session: the ttl of the scope is not used");
        }
        Self { locker, scope }
    }

    /// Names a critical section of the scope: see [`Lock`].
    #[must_use]
    pub fn lock(&self, name: &N) -> Lock {
        Lock::new(Arc::clone(&self.locker), self.scope.name(name), self.scope.ttl)
    }

    /// Names a critical section of the scope for readers and writers: see [`RwLock`].
    #[must_use]
    pub fn rw_lock(&self, name: &N) -> RwLock {
        RwLock::new(Arc::clone(&self.locker), self.scope.name(name), self.scope.ttl)
    }
}

impl RwLock {
    pub(crate) fn new(locker: Arc<Inner>, name: Name, ttl: Option<Duration>) -> Self {
        Self { section: Entrance::new(locker, Kind::RwLock, name, ttl) }
    }

    /// Gives the name.
    #[must_use]
    pub const fn name(&self) -> &Name {
        &self.section.name
    }

    /// Gives the key by which the store knows it.
    #[must_use]
    pub const fn key(&self) -> Key {
        self.section.key
    }

    /// Gives the same lock, with a time to live of its own where each lock has one: as [`Lock::ttl`].
    #[must_use]
    pub const fn ttl(mut self, ttl: Duration) -> Self {
        self.section.ttl = Some(ttl);
        self
    }

    /// Gives the same lock, whose leases can [fence transactions](Lease::fence_sql), where the store has any. As
    /// [`Lock::fenced`] otherwise. Who reads does not wait for the transactions of others who have read.
    #[must_use]
    pub fn fenced(mut self) -> Self {
        self.section.is_fenced = true;
        self
    }

    /// Enters to read if nobody writes, or waits to on another Locker or before us on this one: `None` otherwise. As [`Lock::try_lock`] otherwise.
    ///
    /// # Errors
    ///
    /// As for [`Lock::try_lock`].
    ///
    /// # Cancel safety
    ///
    /// As for [`Lock::try_lock`].
    pub async fn try_read(&self) -> Result<Option<LockGuard>, LockError> {
        self.section.enter(Mode::Read, Patience::None).await
    }

    /// Enters to read as soon as it can. As [`Lock::lock`] otherwise.
    ///
    /// # Errors
    ///
    /// As for [`Lock::lock`].
    ///
    /// # Cancel safety
    ///
    /// As for [`Lock::lock`].
    pub async fn read(&self) -> Result<LockGuard, LockError> {
        self.section.wait(Mode::Read, Patience::Endless).await
    }

    /// Enters to read, and waits no longer than `limit` for that. As [`Lock::lock_timeout`] otherwise.
    ///
    /// # Errors
    ///
    /// As for [`Lock::lock_timeout`].
    ///
    /// # Cancel safety
    ///
    /// As for [`Lock::lock`].
    pub async fn read_timeout(&self, limit: Duration) -> Result<LockGuard, LockError> {
        self.section.wait(Mode::Read, Patience::Until(limit)).await
    }

    /// Runs `body` with the lock held to read, if that can be had at once. As [`Lock::try_with`] otherwise.
    ///
    /// # Errors
    ///
    /// As for [`Lock::try_with`].
    ///
    /// # Cancel safety
    ///
    /// As for [`Lock::try_with`].
    pub async fn try_with_read<T, E, F, Fut>(&self, body: F) -> Result<Option<T>, E>
    where
        F: FnOnce(Lease) -> Fut,
        Fut: Future<Output = Result<T, E>>,
        E: From<LockError>,
    {
        self.section.with(Mode::Read, Patience::None, body).await
    }

    /// Runs `body` with the lock held to read. As [`Lock::with`] otherwise.
    ///
    /// # Errors
    ///
    /// As for [`Lock::with`].
    ///
    /// # Cancel safety
    ///
    /// As for [`Lock::try_with`].
    pub async fn with_read<T, E, F, Fut>(&self, body: F) -> Result<T, E>
    where
        F: FnOnce(Lease) -> Fut,
        Fut: Future<Output = Result<T, E>>,
        E: From<LockError>,
    {
        self.section.wait_with(Mode::Read, Patience::Endless, body).await
    }

    /// Runs `body` with the lock held to read, and waits no longer than `limit` to get in. As [`Lock::with_timeout`]
    /// otherwise.
    ///
    /// # Errors
    ///
    /// As for [`Lock::with_timeout`].
    ///
    /// # Cancel safety
    ///
    /// As for [`Lock::try_with`].
    pub async fn with_read_timeout<T, E, F, Fut>(&self, limit: Duration, body: F) -> Result<T, E>
    where
        F: FnOnce(Lease) -> Fut,
        Fut: Future<Output = Result<T, E>>,
        E: From<LockError>,
    {
        self.section.wait_with(Mode::Read, Patience::Until(limit), body).await
    }

    /// Enters to write if nobody else is in: `None` otherwise. As [`Lock::try_lock`] otherwise.
    ///
    /// # Errors
    ///
    /// As for [`Lock::try_lock`].
    ///
    /// # Cancel safety
    ///
    /// As for [`Lock::try_lock`].
    pub async fn try_write(&self) -> Result<Option<LockGuard>, LockError> {
        self.section.enter(Mode::Write, Patience::None).await
    }

    /// Enters to write as soon as it can. As [`Lock::lock`] otherwise.
    ///
    /// # Errors
    ///
    /// As for [`Lock::lock`].
    ///
    /// # Cancel safety
    ///
    /// As for [`Lock::lock`].
    pub async fn write(&self) -> Result<LockGuard, LockError> {
        self.section.wait(Mode::Write, Patience::Endless).await
    }

    /// Enters to write, and waits no longer than `limit` for that. As [`Lock::lock_timeout`] otherwise.
    ///
    /// # Errors
    ///
    /// As for [`Lock::lock_timeout`].
    ///
    /// # Cancel safety
    ///
    /// As for [`Lock::lock`].
    pub async fn write_timeout(&self, limit: Duration) -> Result<LockGuard, LockError> {
        self.section.wait(Mode::Write, Patience::Until(limit)).await
    }

    /// Runs `body` with the lock held to write, if that can be had at once. As [`Lock::try_with`] otherwise.
    ///
    /// # Errors
    ///
    /// As for [`Lock::try_with`].
    ///
    /// # Cancel safety
    ///
    /// As for [`Lock::try_with`].
    pub async fn try_with_write<T, E, F, Fut>(&self, body: F) -> Result<Option<T>, E>
    where
        F: FnOnce(Lease) -> Fut,
        Fut: Future<Output = Result<T, E>>,
        E: From<LockError>,
    {
        self.section.with(Mode::Write, Patience::None, body).await
    }

    /// Runs `body` with the lock held to write. As [`Lock::with`] otherwise.
    ///
    /// # Errors
    ///
    /// As for [`Lock::with`].
    ///
    /// # Cancel safety
    ///
    /// As for [`Lock::try_with`].
    pub async fn with_write<T, E, F, Fut>(&self, body: F) -> Result<T, E>
    where
        F: FnOnce(Lease) -> Fut,
        Fut: Future<Output = Result<T, E>>,
        E: From<LockError>,
    {
        self.section.wait_with(Mode::Write, Patience::Endless, body).await
    }

    /// Runs `body` with the lock held to write, and waits no longer than `limit` to get in. As [`Lock::with_timeout`]
    /// otherwise.
    ///
    /// # Errors
    ///
    /// As for [`Lock::with_timeout`].
    ///
    /// # Cancel safety
    ///
    /// As for [`Lock::try_with`].
    pub async fn with_write_timeout<T, E, F, Fut>(&self, limit: Duration, body: F) -> Result<T, E>
    where
        F: FnOnce(Lease) -> Fut,
        Fut: Future<Output = Result<T, E>>,
        E: From<LockError>,
    {
        self.section.wait_with(Mode::Write, Patience::Until(limit), body).await
    }
}

impl LockGuard {
    /// Releases, and waits until others can have the lock.
    ///
    /// # Errors
    ///
    /// [`LockError::Lost`] if it was not held to the end, or if the store did not tell: somebody else may have been in.
    ///
    /// # Cancel safety
    ///
    /// Dropped at any point, it releases all the same.
    pub async fn release(self) -> Result<(), LockError> {
        self.part(Seat::leave).await
    }

    async fn part(self, leave: impl AsyncFnOnce(Seat) -> Option<Parting>) -> Result<(), LockError> {
        let Self { lease, seat, turn } = self;
        let parting = leave(seat).await;
        drop(turn);
        match (parting, lease.reason()) {
            (Some(Parting::Released), _) => Ok(()),
            (_, Some(Reason::Lost(cause))) => Err(LockError::Lost { cause }),
            _ => Err(LockError::Lost { cause: LossCause::Gone }),
        }
    }

    /// Leaves the lock to its time to live, which begins anew, and gives up the handle: nobody gets in before that is over.
    /// For work that must not be done again too soon.
    ///
    /// # Errors
    ///
    /// [`LockError::Lost`] as for [`release`](Self::release). [`LockError::EndsWithSession`] where locks have no time to
    /// live of their own, which is everywhere but on Redis: then it is released.
    ///
    /// # Cancel safety
    ///
    /// Once polled, it is kept also if this is dropped.
    pub async fn keep(self) -> Result<(), LockError> {
        if self.seat.locker.keys_end_with_their_session() {
            self.release().await?;
            return Err(LockError::EndsWithSession);
        }
        self.part(Seat::keep).await
    }

    /// Tells this holder from others, to the driver.
    pub(crate) const fn id(&self) -> Id {
        self.seat.id
    }

    /// Polls a job while the lock is held, and until then what tells it to stop. `None` if it had to be dropped. When this
    /// returns, the job's future is gone, and the lock can be released.
    pub(crate) async fn attend<T>(
        &self,
        job: impl Future<Output = T>,
        stop: impl Future<Output = ()>,
    ) -> Option<T> {
        attend(job, self.lease.shared(), self.seat.address(), stop).await
    }

    /// Gives the lease, to be handed on.
    #[must_use]
    pub const fn lease(&self) -> &Lease {
        &self.lease
    }
}

impl Deref for LockGuard {
    type Target = Lease;

    fn deref(&self) -> &Lease {
        &self.lease
    }
}

impl Entrance {
    fn new(locker: Arc<Inner>, kind: Kind, name: Name, ttl: Option<Duration>) -> Self {
        let key = Key::of(kind, &name);
        Self { locker, name, key, kind, ttl, is_fenced: false }
    }

    async fn enter(&self, mode: Mode, patience: Patience) -> Result<Option<LockGuard>, LockError> {
        let mut asking = self.locker.meter.asks(self.kind);
        let entered = match patience {
            Patience::None => self.acquire(mode, true, &AtomicBool::new(false)).await,
            Patience::Endless => self.acquire(mode, false, &AtomicBool::new(false)).await,
            // Apart, or those who wait without a limit would have the room for it as well.
            Patience::Until(limit) => Box::pin(self.enter_within(mode, limit)).await.map(Some),
        };
        asking.came_to(match &entered {
            Ok(Some(_)) => "granted",
            Ok(None) => "busy",
            Err(LockError::Timeout { .. }) => "timeout",
            Err(_) => "error",
        });
        entered
    }

    async fn wait(&self, mode: Mode, patience: Patience) -> Result<LockGuard, LockError> {
        // Nobody who waits is told that somebody is in.
        self.enter(mode, patience).await?.ok_or(LockError::Driver)
    }

    async fn enter_within(&self, mode: Mode, limit: Duration) -> Result<LockGuard, LockError> {
        let since = clock::now();
        let has_turn = AtomicBool::new(false);
        if limit.is_zero() {
            let entered = self.acquire(mode, true, &has_turn).await?;
            return entered.ok_or_else(|| self.timeout(since, has_turn.load(Ordering::Relaxed), None));
        }
        let mut entering = pin!(self.acquire(mode, false, &has_turn));
        let question = limit.saturating_sub(LAST_QUESTION.min(limit / 2));
        let mut holder = None;
        if let Ok(entered) = tokio::time::timeout(question, &mut entering).await {
            return entered?.ok_or(LockError::Driver);
        }
        if has_turn.load(Ordering::Relaxed) {
            let (reply, answer) = oneshot::channel();
            self.locker.tell(Command::Who(self.key, reply));
            holder = Some(answer);
        }
        let left = limit.saturating_sub(waited(since));
        if let Ok(entered) = tokio::time::timeout(left, entering).await {
            return entered?.ok_or(LockError::Driver);
        }
        let holder = holder.and_then(|mut answer| answer.try_recv().ok()).flatten();
        Err(self.timeout(since, has_turn.load(Ordering::Relaxed), holder))
    }

    fn timeout(&self, since: Instant, has_turn: bool, holder: Option<Holder>) -> LockError {
        let holder = if has_turn { holder.map(shown) } else { Some(self.locker.options.identity.clone()) };
        LockError::Timeout { name: self.name.clone(), waited: waited(since), holder }
    }

    /// Gets in, or is told that somebody is in: only where it does not wait for that.
    async fn acquire(
        &self,
        mode: Mode,
        is_try: bool,
        has_turn: &AtomicBool,
    ) -> Result<Option<LockGuard>, LockError> {
        self.name.validate().map_err(LockError::Name)?;
        if let Some(ttl) = self.ttl.filter(|ttl| !(SHORTEST..=MAX_TTL).contains(ttl)) {
            return Err(LockError::Ttl { ttl });
        }
        let Inner { options, turns, closing, .. } = &*self.locker;
        if closing.is_cancelled() {
            return Err(LockError::Closed);
        }
        let max_held = options.max_held;
        let room = max_held.saturating_sub(self.locker.candidates());
        let full = |_| LockError::TooManyNames { max_held };
        let turns_as = if options.is_broken(Sabotage::NoTurns) { Mode::Read } else { mode };
        let turn = match turns.try_turn(self.key, turns_as, room).map_err(full)? {
            Some(turn) => turn,
            None if is_try => return Ok(None),
            // Apart, or those who wait for other processes would have the room for it as well.
            None => Box::pin(self.turn(turns_as, room)).await?,
        };
        has_turn.store(true, Ordering::Relaxed);
        let (answer, admission) = oneshot::channel();
        let try_until = is_try.then(|| clock::now() + options.query_timeout);
        let section =
            Section { mode, ttl: self.ttl, try_until, is_fenced: self.is_fenced, answer: Some(answer) };
        let seat = self.locker.enter(self.name.clone(), (self.kind, self.key), section);
        match admission.await {
            Ok(Admission::Granted(term)) => {
                let lease = Lease::new(term, seat.id, self.locker.driver());
                Ok(Some(LockGuard { lease, seat, turn }))
            }
            Ok(Admission::Busy) => Ok(None),
            Ok(Admission::Refused(error)) => Err(LockError::Refused(error)),
            Ok(Admission::Failed(reason)) => Err(LockError::Failed { reason }),
            Ok(Admission::Unanswered) => Err(LockError::Unanswered { limit: options.query_timeout }),
            Ok(Admission::Closed) => Err(LockError::Closed),
            Err(_) if closing.is_cancelled() => Err(LockError::Closed),
            Err(_) => Err(LockError::Driver),
        }
    }

    /// Waits for the tasks of this process that came before, unless the Locker is closed meanwhile.
    async fn turn(&self, mode: Mode, room: usize) -> Result<Turn, LockError> {
        let Inner { turns, closing, options, .. } = &*self.locker;
        tokio::select! {
            biased;
            turn = turns.turn(self.key, mode, room) => {
                turn.map_err(|_| LockError::TooManyNames { max_held: options.max_held })
            }
            () = closing.cancelled() => Err(LockError::Closed),
        }
    }

    async fn wait_with<T, E, F, Fut>(&self, mode: Mode, patience: Patience, body: F) -> Result<T, E>
    where
        F: FnOnce(Lease) -> Fut,
        Fut: Future<Output = Result<T, E>>,
        E: From<LockError>,
    {
        self.with(mode, patience, body).await?.ok_or_else(|| LockError::Driver.into())
    }

    /// The one place where a body ends before its lock is released: `attend` drops its future before it returns.
    async fn with<T, E, F, Fut>(&self, mode: Mode, patience: Patience, body: F) -> Result<Option<T>, E>
    where
        F: FnOnce(Lease) -> Fut,
        Fut: Future<Output = Result<T, E>>,
        E: From<LockError>,
    {
        let Some(guard) = self.enter(mode, patience).await? else { return Ok(None) };
        let (term, address) = (Arc::clone(guard.lease.shared()), guard.seat.address());
        if !term.is_held(clock::now()) {
            return Err(dropped(&term).into());
        }
        let returned = attend(body(guard.lease.clone()), &term, address, future::pending()).await;
        let released = guard.release().await;
        match returned {
            Some(Ok(value)) => {
                released?;
                Ok(Some(value))
            }
            Some(Err(error)) => Err(error),
            None => Err(dropped(&term).into()),
        }
    }
}

fn waited(since: Instant) -> Duration {
    clock::now().saturating_duration_since(since)
}

/// Why a body had to be dropped.
fn dropped(term: &Term) -> LockError {
    match term.reason() {
        Some(Reason::Lost(cause)) => LockError::Lost { cause },
        // The drain timeout, after `close`.
        _ => LockError::Closed,
    }
}

fn shown(holder: Holder) -> String {
    let Holder { identity, address, pid, .. } = holder;
    let who = identity.filter(|identity| !identity.is_empty()).unwrap_or_else(|| "unknown".to_owned());
    let whence = [address, pid.map(|pid| format!("server process {pid}"))];
    let whence: Vec<_> = whence.into_iter().flatten().collect();
    if whence.is_empty() { who } else { format!("{who} ({})", whence.join(", ")) }
}

/// Where one who asks, or holds, sits in the driver. Dropped, it gives up what it has or may still get.
struct Seat {
    locker: Arc<Inner>,
    id: Id,
    has_left: bool,
}

impl Inner {
    fn enter(self: &Arc<Self>, name: Name, (kind, key): (Kind, Key), section: Section) -> Seat {
        let id = self.next_id();
        let place = Place { id, name, key, kind, purpose: Purpose::Section(section) };
        self.tell(Command::Enter(place));
        Seat { locker: Arc::clone(self), id, has_left: false }
    }
}

impl Seat {
    /// Tells this seat from those of other Lockers too.
    fn address(&self) -> (usize, Id) {
        (candidate::locker_address(&self.locker), self.id)
    }

    /// Gives up what it holds, and waits until that is free. `None` if the driver is gone.
    async fn leave(self) -> Option<Parting> {
        self.part(|id, done| Command::Leave(id, Some(done))).await
    }

    /// As [`leave`](Self::leave), but what it holds is left to its time to live.
    async fn keep(self) -> Option<Parting> {
        self.part(Command::Keep).await
    }

    async fn part(
        mut self,
        command: impl FnOnce(Id, oneshot::Sender<Parting>) -> Command,
    ) -> Option<Parting> {
        let (done, parting) = oneshot::channel();
        self.has_left = true;
        self.locker.tell(command(self.id, done));
        parting.await.ok()
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        if !self.has_left {
            self.locker.tell(Command::Leave(self.id, None));
        }
    }
}

impl fmt::Debug for Lock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lock").field("name", self.name()).field("key", &self.key()).finish_non_exhaustive()
    }
}

impl<N: ?Sized> Clone for Scoped<N> {
    fn clone(&self) -> Self {
        Self { locker: Arc::clone(&self.locker), scope: self.scope }
    }
}

impl<N: ?Sized> fmt::Debug for Scoped<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scoped").field("scope", &self.scope).finish_non_exhaustive()
    }
}

impl fmt::Debug for RwLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RwLock").field("name", self.name()).field("key", &self.key()).finish_non_exhaustive()
    }
}

impl fmt::Debug for LockGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockGuard").field("lease", &self.lease).finish_non_exhaustive()
    }
}
