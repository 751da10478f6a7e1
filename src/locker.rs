//! The handle of the users: [`Locker`].

use std::collections::BTreeMap;
use std::collections::btree_map;
use std::fmt;
use std::future::Future;
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rand::rngs::StdRng;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::instrument::WithSubscriber as _;

use crate::candidate::{self, Candidate};
use crate::clock;
use crate::driver::Driver;
use crate::driver::command::{self, Again, Command, Grant, Id, Parting, Place, Purpose, Report, Request};
use crate::driver::term::{Shown, State, Term};
use crate::error::{Error, RunError};
use crate::every::Every;
use crate::health::{self, Health, Trouble};
use crate::lease::Lease;
use crate::lock::{Lock, RwLock, Scoped};
use crate::meter::Meter;
use crate::name::{Key, Kind, Name};
use crate::options::{Bounds, Options};
use crate::scope::{Scope, ScopedName};
use crate::store::file::FileStore;
#[cfg(feature = "postgres")]
use crate::store::postgres::PgStore;
#[cfg(feature = "redis")]
use crate::store::redis::RedisStore;
use crate::store::{Location, Message, Store};
use crate::turns::Turns;
use crate::watch::StateWatch;

/// One process's session with the store that everybody shares.
///
/// Every job of the process rides on the one session; clones are handles to the same one. The session ends in order
/// when the last handle is gone and every run has ended, or by [`close`](Self::close).
///
/// It is not a pool and not a connection to run queries on. One session is one fate: when it is lost, every lease on
/// it is lost. A Locker of its own isolates a job.
#[derive(Clone)]
pub struct Locker {
    inner: Arc<Inner>,
}

pub(crate) struct Inner {
    requests: mpsc::UnboundedSender<Request>,
    pub(crate) options: Arc<Options>,
    address: String,
    pub(crate) meter: Meter,
    report: watch::Receiver<Report>,
    /// Cancelled by `close`.
    pub(crate) closing: CancellationToken,
    names: Mutex<BTreeMap<Name, Entry>>,
    /// How many of the names have a candidate.
    seats: AtomicUsize,
    next_id: AtomicU64,
    /// Of the tasks that want into sections.
    pub(crate) turns: Arc<Turns>,
}

/// One name: what its candidate does as the driver shows it, and as the candidate's own run does.
struct Entry {
    shown: watch::Sender<Shown>,
    run: Run,
}

/// What a run does.
enum Run {
    /// It does not ask, or there is none.
    Rests,
    Asks {
        since: Instant,
    },
    /// It has a job that has not ended.
    Works(Arc<Term>),
}

impl Locker {
    /// Connects to the store of a URL now, and checks that it can be trusted.
    ///
    /// * `postgres://user:password@host:5432/database?sslmode=verify-full` is a PostgreSQL server: see
    ///   `Locker::postgres`. `postgresql://` is the same. It may name several hosts, as libpq writes them:
    ///   `postgres://a,b:5433,c/database`. They are tried in turn, each for its share of the query timeout, until one
    ///   is a primary; after a failover the others are found without a restart. They must be one primary and its
    ///   replicas: several writable servers are several stores.
    /// * `redis://user:password@host:6379/0` is a Redis or Valkey server, `rediss://` one with TLS, and
    ///   `redis+cluster://host:6379,host:6379` (`rediss+cluster://`) a cluster of which some nodes are named. Behind a question
    ///   mark `layout=wakuwaku` and `wait_for_replicas=1` are as in `leasehold::redis::Target`. It needs the feature `redis`.
    /// * `file:PATH` is a directory on a local disk, absolute or relative to the working directory: for everything on
    ///   one host.
    ///
    /// # Errors
    ///
    /// [`Error::Options`] and [`Error::Url`] for what cannot be used, [`Error::Connect`] if the store cannot be
    /// reached within the query timeout, or must not be used. Nothing is left behind.
    ///
    /// # Cancel safety
    ///
    /// Dropped in the middle it leaves nothing open.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), leasehold::Error> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let url = format!("file:{}/leases", dir.path().display());
    /// use leasehold::{Locker, Options};
    ///
    /// let locker = Locker::connect(&url, Options::default()).await?;
    /// locker.close().await;
    /// # Ok(()) }
    /// ```
    pub async fn connect(url: &str, options: Options) -> Result<Self, Error> {
        let locker = Self::at(url, options)?;
        locker.connected().await?;
        Ok(locker)
    }

    /// Connects now.
    pub(crate) async fn connected(&self) -> Result<(), Error> {
        let (reply, answer) = oneshot::channel();
        self.inner.send(Request::Connect(reply))?;
        Ok(answer.await.map_err(|_| Error::Driver)??)
    }

    /// Makes a Locker for the store of a URL, as [`connect`](Self::connect) does, but connects only when the first run asks:
    /// for a service that starts before its store does.
    ///
    /// # Errors
    ///
    /// [`Error::Options`] and [`Error::Url`] for what cannot be used; [`Error::Connect`] for a directory that cannot.
    pub fn at(url: &str, options: Options) -> Result<Self, Error> {
        match Location::of_url(url)? {
            Location::Directory(dir) => Self::file(dir, options),
            #[cfg(feature = "postgres")]
            Location::Postgres(targets) => {
                options.validate()?;
                Self::on_thread(PgStore::new(&targets, &options), options)
            }
            #[cfg(feature = "redis")]
            Location::Redis(target) => Self::redis(target, options),
        }
    }

    /// Makes a Locker over a directory on a local disk: for several processes on one host, and for trying things out.
    ///
    /// The directory is made if it does not exist, with mode 0700; a relative path is resolved now. Each name is a
    /// file in it with a lock of the operating system, which the kernel releases when the process dies. A process that
    /// is frozen keeps its leases: see [`bounds`](Self::bounds).
    ///
    /// It runs on the real clock: in a test that pauses tokio's, use `Locker::memory`.
    ///
    /// # Errors
    ///
    /// [`Error::Options`]; [`Error::Connect`] if the directory cannot be made or written to, or lies on a network
    /// file system.
    pub fn file(directory: impl AsRef<Path>, options: Options) -> Result<Self, Error> {
        options.validate()?;
        let store = FileStore::open(directory.as_ref(), &options.identity)?;
        Self::on_thread(store, options)
    }

    /// Makes a Locker over a PostgreSQL server, as a pool's options name it. No I/O: the driver connects when the first
    /// run asks, and then as often as it has to.
    ///
    /// The Locker opens one connection of its own, for as long as it lives, and takes nothing from a pool; the first
    /// time it opens a second one for a moment ([`Options::trust_affinity`]). It needs no table, except for
    /// [`every`](Self::every), and no right but to connect. The server must be the primary, and no pooler in transaction mode may stand before it; one in session
    /// mode may. Every Locker over the same database contends with every other one.
    ///
    /// # Errors
    ///
    /// [`Error::Options`].
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # async fn example(pool: sqlx::PgPool) -> anyhow::Result<()> {
    /// use leasehold::{Lease, Locker, Options};
    ///
    /// let locker = Locker::postgres(pool.connect_options(), Options::default())?;
    /// locker.run("sweeper", async |lease: Lease| {
    ///     lease.cancelled().await;
    ///     anyhow::Ok(())
    /// }).await?;
    /// # Ok(()) }
    /// ```
    #[cfg(feature = "postgres")]
    pub fn postgres(
        target: impl Into<Arc<sqlx::postgres::PgConnectOptions>>,
        options: Options,
    ) -> Result<Self, Error> {
        options.validate()?;
        Self::on_thread(PgStore::new([&*target.into()], &options), options)
    }

    /// Makes a Locker over a Redis or Valkey server, or a cluster. No I/O: the driver connects when the first run asks, and
    /// then as often as it has to.
    ///
    /// The Locker opens one connection of its own, in a cluster two for each node, for as long as it lives: a client hands
    /// over where the server is, and none of its connections. A lease is a key with a time to live. What that means, and
    /// what a failover of the server can do, is told in [`leasehold::redis`](crate::redis).
    ///
    /// # Errors
    ///
    /// [`Error::Options`].
    ///
    /// # Examples
    ///
    /// ```no_run
    /// # async fn example() -> anyhow::Result<()> {
    /// use leasehold::{Locker, Options};
    ///
    /// let client = redis::Client::open("redis://cache.internal/0")?;
    /// let locker = Locker::redis(client, Options::default())?;
    /// let guard = locker.lock("invoice:42").lock().await?;
    /// guard.release().await?;
    /// # Ok(()) }
    /// ```
    #[cfg(feature = "redis")]
    pub fn redis(target: impl Into<crate::redis::Target>, options: Options) -> Result<Self, Error> {
        options.validate()?;
        Self::on_thread(RedisStore::new(target.into(), &options), options)
    }

    /// Makes a Locker over a store in memory, for tests.
    ///
    /// Inside of a tokio runtime the driver runs as a task of that runtime, so that a paused clock governs it as well;
    /// outside it runs on a thread of its own.
    ///
    /// # Errors
    ///
    /// [`Error::Options`].
    #[cfg(any(test, feature = "testing"))]
    pub fn memory(memory: &crate::Memory, options: Options) -> Result<Self, Error> {
        options.validate()?;
        let store = memory.store(&options.identity, options.bounds().ttl);
        let Ok(runtime) = tokio::runtime::Handle::try_current() else {
            return Self::on_thread(store, options);
        };
        // The same jitter in every run: a test that fails once fails again.
        let seed = Key::of(Kind::Lease, &options.identity).get().cast_unsigned();
        let (locker, driver) = Self::new(store, options, rand::SeedableRng::seed_from_u64(seed));
        runtime.spawn(memory.on(locker.identity(), driver.run()).with_current_subscriber());
        Ok(locker)
    }

    fn new<S: Store>(store: S, options: Options, rng: StdRng) -> (Self, Driver<S>) {
        let (requests, inbox) = mpsc::unbounded_channel();
        let options = Arc::new(options);
        let report =
            Report { enforcement: store.enforcement(), shortfalls: store.shortfalls(), answered: None };
        let (reports, report) = watch::channel(report);
        let meter = Meter::new(&store.address());
        let inner = Inner {
            requests,
            report,
            options: Arc::clone(&options),
            meter: meter.clone(),
            address: store.address(),
            closing: CancellationToken::new(),
            names: Mutex::default(),
            seats: AtomicUsize::new(0),
            next_id: AtomicU64::new(0),
            turns: Arc::default(),
        };
        (Self { inner: Arc::new(inner) }, Driver::new(store, options, meter, reports, rng, inbox))
    }

    /// Starts the driver on its own thread: work that blocks the user's threads costs no lease. Its events go to the
    /// subscriber that is current here.
    pub(crate) fn on_thread<S: Store>(store: S, options: Options) -> Result<Self, Error> {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|_| Error::Driver)?;
        let (locker, driver) = Self::new(store, options, rand::make_rng());
        let driver = driver.run().with_current_subscriber();
        let run = move || {
            runtime.block_on(driver);
            // An operation that hangs in the store must not keep the thread.
            runtime.shutdown_background();
        };
        std::thread::Builder::new().name("leasehold".to_owned()).spawn(run).map_err(|_| Error::Driver)?;
        Ok(locker)
    }

    /// Runs `job` whenever this process leads `name`, until the job ends by itself.
    ///
    /// The short form of [`candidate(name)`](Self::candidate)`.run(job)`: see [`Candidate::run`].
    ///
    /// # Errors
    ///
    /// As for [`Candidate::run`].
    ///
    /// # Cancel safety
    ///
    /// As for [`Candidate::run`].
    pub async fn run<T, E, F, Fut>(&self, name: impl Into<Name>, job: F) -> Result<Option<T>, RunError<E>>
    where
        F: FnMut(Lease) -> Fut,
        Fut: Future<Output = Result<T, E>>,
    {
        self.candidate(name).run(job).await
    }

    /// Prepares a candidate for `name`.
    pub fn candidate(&self, name: impl Into<Name>) -> Candidate {
        Candidate::new(Arc::clone(&self.inner), name.into())
    }

    /// Names a critical section: one task at a time is in it. No I/O; a name that cannot be used is told by the first
    /// acquire. Sections, leases and [`rw_lock`](Self::rw_lock)s of equal names have nothing to do with each other.
    #[must_use]
    pub fn lock(&self, name: impl Into<Name>) -> Lock {
        Lock::new(Arc::clone(&self.inner), name.into(), None)
    }

    /// Names a critical section: many readers or one writer are in it. As [`lock`](Self::lock) otherwise.
    #[must_use]
    pub fn rw_lock(&self, name: impl Into<Name>) -> RwLock {
        RwLock::new(Arc::clone(&self.inner), name.into(), None)
    }

    /// Prepares a job that is done once per `interval` by all that share the store. Nothing happens before
    /// [`Every::run`] or [`Every::once`], which also tell what cannot be used.
    pub fn every(&self, name: impl Into<Name>, interval: Duration) -> Every {
        Every::new(Arc::clone(&self.inner), name.into(), interval)
    }

    /// Gives the critical sections of a scope, and no others.
    #[must_use]
    pub fn scope<N: ScopedName + ?Sized>(&self, scope: Scope<N>) -> Scoped<N> {
        Scoped::new(Arc::clone(&self.inner), scope)
    }

    /// Closes: every job is told to stop, every lease is released when its job has ended, every run now or later
    /// returns `Ok(None)`; then the session ends.
    ///
    /// Where the store does not answer, the session is given up after the query timeout.
    ///
    /// It waits for all that, but for a job that it is called from: then for all the others, and the session ends
    /// when that job has ended too. A run that nobody polls cannot end: do not await this while you hold one back.
    ///
    /// # Cancel safety
    ///
    /// Dropped in the middle, closing goes on.
    pub async fn close(&self) {
        self.inner.closing.cancel();
        let (reply, closed) = oneshot::channel();
        if self.inner.send(Request::Close { within: candidate::within(&self.inner), reply }).is_ok() {
            closed.await.ok();
        }
    }

    /// Gives what this process is called in logs and in the store.
    #[must_use]
    pub fn identity(&self) -> &str {
        &self.inner.options.identity
    }

    /// Gives where the store is, without any secret.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.inner.address
    }

    /// Gives what holds on the store at hand: [`Options::bounds`], less what the store does not enforce.
    ///
    /// A PostgreSQL server is taken to enforce everything until the first session with it has told.
    #[must_use]
    pub fn bounds(&self) -> Bounds {
        let report = self.inner.report.borrow();
        report.enforcement.bounds(&self.inner.options, report.shortfalls.clone())
    }

    /// Tells when the store last answered anything, on the clock of tokio. `None` before the first answer.
    ///
    /// A Locker that contends or leads is answered at least once per retry interval (times 1.2) or heartbeat interval.
    #[must_use]
    pub fn last_answer(&self) -> Option<Instant> {
        self.inner.report.borrow().answered
    }

    /// Tells whether this Locker does what it is for. It never waits: not for the store, nor for a job.
    ///
    /// It is bad while a job runs past the deadline of its lease, while a job overruns its grace, and while a candidate
    /// asks and the store has not answered for three retry intervals, or for the query timeout if that is longer.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), leasehold::Error> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// use leasehold::{Locker, Options};
    ///
    /// let locker = Locker::file(dir.path(), Options::default())?;
    /// let health = locker.health();
    /// assert!(health.is_good(), "{health}");
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn health(&self) -> Health {
        let now = clock::now();
        let mut health = Health::default();
        if self.inner.requests.is_closed() && !self.inner.closing.is_cancelled() {
            health.troubles.push(Trouble::Driver);
        }
        let patience = health::patience(&self.inner.options);
        let answered = self.last_answer();
        let mut unanswered: Option<Instant> = None;
        for (name, entry) in &*self.inner.names() {
            match &entry.run {
                Run::Rests => {}
                // It holds the lease, and waits for its takeover delay.
                Run::Asks { .. } if entry.shown.borrow().state == State::Blocked => {}
                Run::Asks { since } => {
                    let since = answered.map_or(*since, |answered| answered.max(*since));
                    if now.saturating_duration_since(since) >= patience {
                        unanswered = Some(unanswered.map_or(since, |earlier| earlier.min(since)));
                    }
                }
                Run::Works(term) => health.troubles.extend(trouble_of(name, term, now)),
            }
        }
        health.troubles.extend(unanswered.map(|since| Trouble::Unanswered { since }));
        health
    }

    /// Tells what the candidate of that name on this Locker is doing now.
    #[must_use]
    pub fn state(&self, name: impl Into<Name>) -> State {
        self.inner.names().get(&name.into()).map_or(State::Ended, |entry| entry.shown.borrow().state)
    }

    /// Watches what the candidate of that name on this Locker is doing, also one that is yet to come: until then it is
    /// [`State::Ended`].
    #[must_use]
    pub fn subscribe(&self, name: impl Into<Name>) -> StateWatch {
        let mut names = self.inner.names();
        // Those that somebody once watched, and nobody does any more.
        names.retain(|_, entry| entry.is_taken() || entry.shown.receiver_count() > 0);
        StateWatch::new(names.entry(name.into()).or_insert_with(Entry::free).shown.subscribe())
    }

    /// Asks whoever leads `name`, on whichever Locker of the store, to hand over. Completes when that has been sent, also
    /// where nobody leads it.
    /// [`Observer::hand_over`](crate::Observer::hand_over) waits for a new term, too.
    ///
    /// A leader with [`answer_step_down`](Options::answer_step_down) false leads on.
    ///
    /// # Errors
    ///
    /// [`Error::Name`]; [`Error::Unanswered`] if it could not be sent within the query timeout; [`Error::Closed`] if
    /// the Locker is closed before.
    ///
    /// # Cancel safety
    ///
    /// Dropped in the middle, the request may be sent all the same.
    pub async fn step_down(&self, name: impl Into<Name>) -> Result<(), Error> {
        let name = name.into();
        name.validate()?;
        tracing::info!(%name, identity = self.identity(), "asks whoever leads to step down");
        let message = Message::StepDown(Key::of(Kind::Lease, &name));
        let (reply, sent) = oneshot::channel();
        self.command(Command::Publish(message, reply))?;
        match sent.await {
            Ok(true) => Ok(()),
            Ok(false) => Err(Error::Unanswered { limit: self.inner.options.query_timeout }),
            Err(_) => Err(self.gone()),
        }
    }

    pub(crate) fn options(&self) -> &Options {
        &self.inner.options
    }

    pub(crate) fn command(&self, command: Command) -> Result<(), Error> {
        self.inner.send(Request::Command(command))
    }

    /// Why the driver is gone.
    pub(crate) fn gone(&self) -> Error {
        self.inner.gone()
    }
}

/// What is wrong with a term whose job has not ended.
fn trouble_of(name: &Name, term: &Term, now: Instant) -> Option<Trouble> {
    let (name, deadline) = (name.clone(), term.deadline());
    match term.overrun_at() {
        Some(since) if now >= since => Some(Trouble::Overrun { name, since }),
        _ => (now >= deadline).then_some(Trouble::PastDeadline { name, since: deadline }),
    }
}

impl fmt::Debug for Locker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Locker").field("identity", &self.identity()).finish_non_exhaustive()
    }
}

impl Entry {
    fn free() -> Self {
        Self { shown: watch::Sender::new(Shown::NOBODY), run: Run::Rests }
    }

    /// A candidate of that name has its seat.
    fn is_taken(&self) -> bool {
        self.shown.borrow().candidate.is_some()
    }
}

impl Inner {
    fn names(&self) -> MutexGuard<'_, BTreeMap<Name, Entry>> {
        self.names.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send(&self, request: Request) -> Result<(), Error> {
        self.requests.send(request).map_err(|_| self.gone())
    }

    /// Why the driver is gone.
    fn gone(&self) -> Error {
        if self.closing.is_cancelled() { Error::Closed } else { Error::Driver }
    }

    pub(crate) fn tell(&self, command: Command) {
        // Without a driver there is nothing to tell; whoever waits for an answer learns it there.
        self.send(Request::Command(command)).ok();
    }

    /// The keys of the store have no time to live of their own.
    pub(crate) fn keys_end_with_their_session(&self) -> bool {
        self.report.borrow().enforcement.any_answer_renews
    }

    pub(crate) fn driver(&self) -> mpsc::WeakUnboundedSender<Request> {
        self.requests.downgrade()
    }

    pub(crate) fn next_id(&self) -> Id {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    /// How many names have a candidate.
    pub(crate) fn candidates(&self) -> usize {
        self.seats.load(Ordering::Relaxed)
    }

    /// Takes the one seat that a name has on this Locker.
    pub(crate) fn seat<E>(
        self: &Arc<Self>,
        name: &Name,
        takeover_delay: Option<Duration>,
        shutdown: Option<CancellationToken>,
    ) -> Result<Seat, RunError<E>> {
        let mut names = self.names();
        let entry = names.entry(name.clone()).or_insert_with(Entry::free);
        if entry.is_taken() {
            return Err(RunError::AlreadyRunning { name: name.clone() });
        }
        if self.candidates() + self.turns.keys() >= self.options.max_held {
            return Err(RunError::TooManyNames { max_held: self.options.max_held });
        }
        let id = self.next_id();
        entry.shown.send_replace(Shown { candidate: Some(id), state: State::Standby });
        self.seats.fetch_add(1, Ordering::Relaxed);
        let shown = entry.shown.clone();
        let (grants, granted) = mpsc::unbounded_channel();
        let place = Place {
            id,
            name: name.clone(),
            key: Key::of(Kind::Lease, name),
            kind: Kind::Lease,
            purpose: Purpose::Run(command::Run {
                takeover_delay: takeover_delay.unwrap_or(self.options.takeover_delay),
                shutdown,
                grants,
                shown,
            }),
        };
        // Under the lock of the names, so that the driver hears of the candidates of one name in their order.
        self.send(Request::Command(Command::Enlist(place))).ok();
        drop(names);
        Ok(Seat { inner: Arc::clone(self), name: name.clone(), id, granted })
    }
}

/// The one seat of a name on a Locker. Dropping it gives up what it holds: by then the job's future must be gone.
pub(crate) struct Seat {
    inner: Arc<Inner>,
    name: Name,
    pub(crate) id: Id,
    granted: mpsc::UnboundedReceiver<Grant>,
}

impl Seat {
    /// Tells this seat from those of other Lockers too.
    pub(crate) fn address(&self) -> (usize, Id) {
        (candidate::locker_address(&self.inner), self.id)
    }

    /// The lease of a term whose job starts now.
    pub(crate) fn lease(&self, term: &Arc<Term>) -> Lease {
        self.runs(Run::Works(Arc::clone(term)));
        Lease::new(Arc::clone(term), self.id, self.inner.driver())
    }

    pub(crate) fn contend(&self, again: Again) {
        self.runs(Run::Asks { since: clock::now() });
        self.tell(Command::Contend(self.id, again));
    }

    pub(crate) fn rest(&self) {
        self.runs(Run::Rests);
        self.tell(Command::Rest(self.id));
    }

    pub(crate) fn draining(&self, term: &Term) {
        if let Some(reason) = term.reason() {
            self.tell(Command::Stop { id: self.id, term: term.number, reason });
        }
    }

    /// Waits for the next grant, or refusal. `None` if the driver is gone. Cancel-safe.
    pub(crate) async fn granted(&mut self) -> Option<Grant> {
        self.granted.recv().await
    }

    /// Tells that the job of a term has ended, and waits until its lease is free. `None` if the driver is gone.
    pub(crate) async fn ended(&self, term: &Term) -> Option<Parting> {
        self.runs(Run::Rests);
        let (done, parting) = oneshot::channel();
        self.tell(Command::Ended { id: self.id, term: term.number, done });
        parting.await.ok()
    }

    fn runs(&self, run: Run) {
        if let Some(entry) = self.inner.names().get_mut(&self.name) {
            entry.run = run;
        }
    }

    fn tell(&self, command: Command) {
        self.inner.tell(command);
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut names = self.inner.names();
        self.tell(Command::Leave(self.id, None));
        if let btree_map::Entry::Occupied(mut entry) = names.entry(self.name.clone()) {
            entry.get_mut().run = Run::Rests;
            entry.get().shown.send_replace(Shown::NOBODY);
            self.inner.seats.fetch_sub(1, Ordering::Relaxed);
            if entry.get().shown.receiver_count() == 0 {
                entry.remove();
            }
        }
    }
}
