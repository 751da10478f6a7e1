//! Visitors of critical sections: tasks that get in, stay and leave, in every way that there is.

use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rand::RngExt as _;
use rand::SeedableRng as _;
use rand::rngs::StdRng;
use tokio::task::JoinHandle;

use super::between;
use super::world::{Asking, Host, LONGEST_KEPT, LONGEST_STAY, Patience, Section, Visit, World};
use crate::name::Kind;
use crate::store::Mode;
use crate::{Lease, Lock, LockError, LockGuard, Locker, RwLock, clock};

/// What a visitor does in general.
#[derive(Clone, Copy, Debug)]
pub(super) struct Habits {
    /// How often it writes, where it could read instead.
    pub(super) writes: f64,
    /// It comes again at once, and waits for as long as it takes.
    pub(super) is_eager: bool,
}

/// One visit.
#[derive(Clone, Copy, Debug)]
struct Plan {
    mode: Mode,
    patience: Patience,
    form: Form,
    stay: Duration,
    tick: Duration,
    /// For how long it goes on when it was told to leave.
    wind_down: Duration,
    mints: bool,
    /// It is dropped then, wherever it is.
    dropped: Option<Duration>,
}

#[derive(Clone, Copy, Debug)]
enum Form {
    Closure {
        fails: bool,
    },
    Guard {
        /// It waits for its release.
        releases: bool,
        /// How long it keeps the guard of a lock that is lost.
        keeps: Duration,
    },
}

impl Plan {
    fn any(rng: &mut StdRng, section: Section, habits: Habits) -> Self {
        let longest = u64::try_from(LONGEST_STAY.as_millis()).unwrap();
        let mode = match section.kind {
            Kind::RwLock if rng.random_bool(habits.writes) => Mode::Write,
            Kind::RwLock => Mode::Read,
            _ => Mode::Exclusive,
        };
        let patience = match rng.random_range(0..20) {
            _ if habits.is_eager => Patience::Endless,
            0..4 => Patience::None,
            4 => Patience::Until(Duration::ZERO),
            5..10 => Patience::Until(between(rng, 1, 20_000)),
            _ => Patience::Endless,
        };
        let is_short = rng.random_bool(0.2);
        Self {
            mode,
            patience,
            form: if rng.random_bool(0.5) {
                Form::Closure { fails: rng.random_bool(0.1) }
            } else {
                let longest = u64::try_from(LONGEST_KEPT.as_millis()).unwrap();
                Form::Guard { releases: rng.random_bool(0.7), keeps: between(rng, 0, longest) }
            },
            stay: if is_short { between(rng, 0, 200) } else { between(rng, 200, longest) },
            tick: between(rng, 50, 1_000),
            wind_down: if rng.random_bool(0.5) { Duration::ZERO } else { between(rng, 1, longest) },
            mints: rng.random_bool(0.3),
            dropped: rng.random_bool(0.15).then(|| between(rng, 0, 5_000)),
        }
    }
}

enum Door {
    Lock(Lock),
    RwLock(RwLock),
}

#[derive(Debug)]
enum Failure {
    Planned,
    Lock(LockError),
}

impl From<LockError> for Failure {
    fn from(error: LockError) -> Self {
        Self::Lock(error)
    }
}

impl Door {
    async fn enter(&self, mode: Mode, patience: Patience) -> Result<Option<LockGuard>, LockError> {
        match (self, mode, patience) {
            (Self::Lock(lock), _, Patience::None) => lock.try_lock().await,
            (Self::Lock(lock), _, Patience::Endless) => lock.lock().await.map(Some),
            (Self::Lock(lock), _, Patience::Until(limit)) => lock.lock_timeout(limit).await.map(Some),
            (Self::RwLock(lock), Mode::Read, Patience::None) => lock.try_read().await,
            (Self::RwLock(lock), Mode::Read, Patience::Endless) => lock.read().await.map(Some),
            (Self::RwLock(lock), Mode::Read, Patience::Until(limit)) => {
                lock.read_timeout(limit).await.map(Some)
            }
            (Self::RwLock(lock), _, Patience::None) => lock.try_write().await,
            (Self::RwLock(lock), _, Patience::Endless) => lock.write().await.map(Some),
            (Self::RwLock(lock), _, Patience::Until(limit)) => lock.write_timeout(limit).await.map(Some),
        }
    }

    async fn with<F, Fut>(&self, mode: Mode, patience: Patience, body: F) -> Result<Option<()>, Failure>
    where
        F: FnOnce(Lease) -> Fut,
        Fut: Future<Output = Result<(), Failure>>,
    {
        match (self, mode, patience) {
            (Self::Lock(lock), _, Patience::None) => lock.try_with(body).await,
            (Self::Lock(lock), _, Patience::Endless) => lock.with(body).await.map(Some),
            (Self::Lock(lock), _, Patience::Until(limit)) => lock.with_timeout(limit, body).await.map(Some),
            (Self::RwLock(lock), Mode::Read, Patience::None) => lock.try_with_read(body).await,
            (Self::RwLock(lock), Mode::Read, Patience::Endless) => lock.with_read(body).await.map(Some),
            (Self::RwLock(lock), Mode::Read, Patience::Until(limit)) => {
                lock.with_read_timeout(limit, body).await.map(Some)
            }
            (Self::RwLock(lock), _, Patience::None) => lock.try_with_write(body).await,
            (Self::RwLock(lock), _, Patience::Endless) => lock.with_write(body).await.map(Some),
            (Self::RwLock(lock), _, Patience::Until(limit)) => {
                lock.with_write_timeout(limit, body).await.map(Some)
            }
        }
    }
}

/// What is done inside.
async fn stay(world: &World, inside: (u64, Visit), lease: &Lease, plan: Plan) {
    if plan.mints && plan.mode != Mode::Read {
        world.minted(inside, &lease.fencing_token().await);
    }
    let until = clock::now() + plan.stay;
    loop {
        let left = until.saturating_duration_since(clock::now());
        if left.is_zero() {
            return;
        }
        tokio::select! {
            biased;
            () = lease.cancelled() => break,
            () = tokio::time::sleep(plan.tick.min(left)) => {}
        }
    }
    let until = clock::now() + plan.wind_down;
    while clock::now() < until {
        tokio::time::sleep(plan.tick.min(until - clock::now())).await;
    }
}

/// One task that visits a section again and again.
pub(super) struct Visitor {
    world: World,
    host: Host,
    section: Section,
    habits: Habits,
    door: Door,
}

impl Visitor {
    pub(super) fn start(
        world: &World,
        host: Host,
        locker: &Locker,
        section: Section,
        habits: Habits,
        mut rng: StdRng,
    ) -> JoinHandle<()> {
        let door = match section.kind {
            Kind::RwLock => Door::RwLock(locker.rw_lock(section.name)),
            _ => Door::Lock(locker.lock(section.name)),
        };
        world.joins(section, section.kind == Kind::Lock || habits.writes > 0.0);
        let visitor = Self { world: world.clone(), host, section, habits, door };
        let visits = async move {
            let mut is_last = false;
            while !is_last {
                let longest = if visitor.habits.is_eager { 600 } else { 6_000 };
                tokio::time::sleep(between(&mut rng, 0, longest)).await;
                if visitor.world.is_draining() {
                    return;
                }
                // Once more, and nobody comes again through a Locker that is closed.
                is_last = visitor.world.has_closed(host);
                let mut chance = StdRng::from_rng(&mut rng);
                let plan = Plan::any(&mut chance, visitor.section, visitor.habits);
                tokio::select! {
                    biased;
                    () = visitor.visit(plan) => {}
                    () = tokio::time::sleep(plan.dropped.unwrap_or_default()), if plan.dropped.is_some() => {
                        visitor.world.note(format_args!("{host} {}: a visit is dropped", section.name));
                    }
                }
            }
        };
        tokio::spawn(world.memory().on(locker.identity(), visits))
    }

    async fn visit(&self, plan: Plan) {
        let asking = self.world.asks(self.host, self.section, plan.mode, plan.patience);
        match plan.form {
            Form::Closure { fails } => self.visit_in_closure(asking, plan, fails).await,
            Form::Guard { releases, keeps } => self.visit_with_guard(asking, plan, releases, keeps).await,
        }
    }

    async fn visit_with_guard(&self, asking: Asking, plan: Plan, releases: bool, keeps: Duration) {
        let visit = asking.visit();
        let guard = match self.door.enter(plan.mode, plan.patience).await {
            Ok(Some(guard)) => guard,
            Ok(None) => return asking.turned_away(None),
            Err(error) => return asking.turned_away(Some(&error)),
        };
        let lease = guard.lease().clone();
        let mut inside = asking.enters(&lease);
        let number = inside.number;
        let staying = stay(&self.world, (number, visit), &lease, plan);
        let had_to_stop = inside.act_with_guard(staying, &lease).await.is_none();
        drop(inside);
        if had_to_stop {
            tokio::time::sleep(keeps).await;
        }
        if releases {
            let parting = guard.release().await;
            self.world.parted(visit, Some(number), parting.as_ref().copied());
        }
    }

    async fn visit_in_closure(&self, asking: Asking, plan: Plan, fails: bool) {
        // Numbers of those inside start at 0.
        let entered = AtomicU64::new(u64::MAX);
        let visit = asking.visit();
        let mut asking = Some(asking);
        let result = {
            let (asking, entered) = (&mut asking, &entered);
            self.door
                .with(plan.mode, plan.patience, async move |lease: Lease| {
                    let Some(asking) = asking.take() else { return Ok(()) };
                    let mut inside = asking.enters(&lease);
                    entered.store(inside.number, Ordering::Relaxed);
                    let staying = stay(&self.world, (inside.number, visit), &lease, plan);
                    inside.act(staying, &lease).await;
                    if fails { Err(Failure::Planned) } else { Ok(()) }
                })
                .await
        };
        let number = Some(entered.load(Ordering::Relaxed)).filter(|number| *number != u64::MAX);
        match (asking.take(), result) {
            (Some(asking), Ok(None)) => asking.turned_away(None),
            (Some(asking), Err(Failure::Lock(error))) => asking.turned_away(Some(&error)),
            (Some(asking), Ok(Some(())) | Err(Failure::Planned)) => {
                drop(asking);
                self.world.parted(visit, None, Ok(()));
            }
            (None, Ok(Some(()))) if !fails => self.world.parted(visit, number, Ok(())),
            (None, Err(Failure::Planned)) if fails => {}
            (None, Err(Failure::Lock(error))) => self.world.parted(visit, number, Err(&error)),
            (None, _) => self.world.parted(visit, None, Ok(())),
        }
    }
}

/// How a section is visited: one visitor of the catalogue writes, and the others read as often as they can.
pub(super) fn habits(section: Section, is_first: bool, rng: &mut StdRng) -> Habits {
    match section.name {
        "catalogue" if is_first => Habits { writes: 1.0, is_eager: false },
        "catalogue" => Habits { writes: 0.0, is_eager: true },
        "invoice" => Habits { writes: 1.0, is_eager: rng.random_bool(0.5) },
        _ => Habits { writes: if rng.random_bool(0.5) { 0.3 } else { 0.0 }, is_eager: false },
    }
}
