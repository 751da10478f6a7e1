//! Cycles on Redis that nobody is in the way of, one after the other and many at once; beside each, what the same costs in
//! plain commands on one connection that all tasks share.
//!
//! In the two places where services run: a task of a runtime with several threads, and a runtime of one thread, where what
//! reads and writes the socket takes turns with the tasks.

use std::future::Future;
use std::thread;
use std::time::Duration;

use anyhow::Context as _;
use leasehold::{Lease, Locker, Options};
use redis::aio::MultiplexedConnection;
use tokio::task::JoinSet;

use crate::arguments::Arguments;
use crate::cycles::{TASKS, cycle_for, sum};
use crate::now;
use crate::report::{Goal, Row, Spread, Unit};
use crate::support::redis::{Proxy, Server};

/// Deletes a key if it has that value.
const RELEASE: &str =
    "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0";

/// As many as a Locker has by default.
const MANY: u32 = 1_000;

/// Long beside what a thousand commands take: what is left are the round trips.
const LINE: Duration = Duration::from_millis(100);

/// As the default options have it.
const TTL_MS: u32 = 30_000;

/// Where the cycles run.
#[derive(Clone, Copy)]
enum Place {
    Task,
    OneThread,
}

impl Place {
    const ALL: [Self; 2] = [Self::Task, Self::OneThread];

    const fn name(self) -> &'static str {
        match self {
            Self::Task => "in a task",
            Self::OneThread => "in a runtime of one thread",
        }
    }

    /// Runs it there.
    async fn run<T: Send + 'static>(
        self,
        work: impl Future<Output = anyhow::Result<T>> + Send + 'static,
    ) -> anyhow::Result<T> {
        match self {
            Self::Task => tokio::spawn(work).await?,
            Self::OneThread => {
                let thread = thread::spawn(|| {
                    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(work)
                });
                tokio::task::spawn_blocking(|| thread.join().expect("it does not panic")).await?
            }
        }
    }
}

/// Plain commands on one connection, as the client library gives it.
#[derive(Clone)]
struct Raw {
    connection: MultiplexedConnection,
    release: String,
}

impl Raw {
    async fn connect(url: &str) -> anyhow::Result<Self> {
        let mut connection = redis::Client::open(url)?.get_multiplexed_async_connection().await?;
        let mut load = redis::cmd("SCRIPT");
        let release = load.arg("LOAD").arg(RELEASE).query_async(&mut connection).await?;
        Ok(Self { connection, release })
    }

    /// Two round trips. A number stands for the random token, which costs nothing beside them.
    async fn cycle(&mut self, key: &str, number: u64) -> anyhow::Result<()> {
        let token = u128::from(number).to_be_bytes();
        let mut set = redis::cmd("SET");
        set.arg(key).arg(&token).arg("NX").arg("PX").arg(TTL_MS);
        let is_set: bool = set.query_async(&mut self.connection).await?;
        assert!(is_set, "nobody else has it");
        let mut release = redis::cmd("EVALSHA");
        release.arg(&self.release).arg(1).arg(key).arg(&token);
        let is_deleted: bool = release.query_async(&mut self.connection).await?;
        assert!(is_deleted, "it was held");
        Ok(())
    }

    /// A task that cycles for so long, on a key of its own.
    async fn cycle_for(mut self, task: u32, window: Duration) -> anyhow::Result<u64> {
        let key = format!("raw:job-{task}");
        let (since, mut cycles) = (now(), 0);
        while now().saturating_sub(since) < window {
            self.cycle(&key, cycles).await?;
            cycles += 1;
        }
        Ok(cycles)
    }
}

async fn locker(url: &str) -> anyhow::Result<Locker> {
    Locker::connect(url, Options::default()).await.context("the store on Redis")
}

/// How long a cycle takes.
async fn raw_cycle(url: String, cycles: u32) -> anyhow::Result<Duration> {
    let mut raw = Raw::connect(&url).await?;
    raw.cycle("raw:job", 0).await?;
    let since = now();
    for number in 0..cycles {
        raw.cycle("raw:job", number.into()).await?;
    }
    Ok(now().saturating_sub(since) / cycles)
}

async fn our_cycle(url: String, cycles: u32) -> anyhow::Result<Duration> {
    let locker = locker(&url).await?;
    let lock = locker.lock("job");
    lock.try_with(async |_: Lease| anyhow::Ok(())).await?;
    let since = now();
    for _ in 0..cycles {
        lock.try_with(async |_: Lease| anyhow::Ok(())).await?;
    }
    let cost = now().saturating_sub(since) / cycles;
    locker.close().await;
    Ok(cost)
}

/// How many cycles all tasks have made.
async fn raw_cycles(url: String, window: Duration) -> anyhow::Result<f64> {
    let raw = Raw::connect(&url).await?;
    let tasks: JoinSet<_> = (0..TASKS).map(|task| raw.clone().cycle_for(task, window)).collect();
    sum(tasks.join_all().await)
}

async fn our_cycles(url: String, window: Duration) -> anyhow::Result<f64> {
    let locker = locker(&url).await?;
    locker.lock("first").try_with(async |_: Lease| anyhow::Ok(())).await?;
    let tasks: JoinSet<_> = (0..TASKS).map(|task| cycle_for(locker.clone(), task, window)).collect();
    let cycles = sum(tasks.join_all().await)?;
    locker.close().await;
    Ok(cycles)
}

pub(crate) async fn rows(server: &Server, arguments: Arguments) -> anyhow::Result<Vec<Row>> {
    let mut rows = Vec::new();
    let (url, window) = (server.url(), arguments.window());
    for place in Place::ALL {
        let (mut ours, mut limit) = (Spread::default(), Spread::default());
        for _ in 0..arguments.rounds() {
            limit.add(place.run(raw_cycle(url.clone(), arguments.cycles())).await?);
            ours.add(place.run(our_cycle(url.clone(), arguments.cycles())).await?);
        }
        let goal = Goal::TimesAtMost(1.25);
        rows.push(row("cycle of `try_with` on Redis", place, Unit::Ms, [&ours, &limit], goal, arguments));
    }
    for place in Place::ALL {
        let (mut ours, mut limit) = (Spread::default(), Spread::default());
        for _ in 0..arguments.rounds() {
            limit.push(place.run(raw_cycles(url.clone(), window)).await? / window.as_secs_f64());
            ours.push(place.run(our_cycles(url.clone(), window)).await? / window.as_secs_f64());
        }
        let (what, goal) = (format!("cycles of {TASKS} tasks on Redis"), Goal::TimesAtLeast(0.8));
        rows.push(row(&what, place, Unit::PerSecond, [&ours, &limit], goal, arguments));
    }
    Ok(rows)
}

/// How many round trips it takes to ask the server for a thousand leases, on a line where each takes a while.
pub(crate) async fn heartbeat(server: &Server, arguments: Arguments) -> anyhow::Result<Row> {
    let proxy = Proxy::to(server.port());
    let locker = locker(&proxy.url()).await?;
    let mut guards = Vec::new();
    for n in 0..MANY {
        guards.push(locker.lock(format!("invoice {n:06}")).lock().await?);
    }
    proxy.delay(LINE);
    let mut turns = Spread::default();
    for _ in 0..arguments.rounds() {
        let since = now();
        assert!(guards[0].check().await, "nobody has taken it");
        turns.push(now().saturating_sub(since).as_secs_f64() / LINE.as_secs_f64());
    }
    proxy.delay(Duration::ZERO);
    drop(guards);
    locker.close().await;
    let row = Row::of(format!("{MANY} locks held on Redis: heartbeat"), Unit::RoundTrips, &turns);
    Ok(row.with_goal(Goal::AtMost(1.9)))
}

fn row(
    what: &str,
    place: Place,
    unit: Unit,
    [ours, limit]: [&Spread; 2],
    goal: Goal,
    arguments: Arguments,
) -> Row {
    let place = place.name();
    let row = Row::of(format!("{what}, {place}"), unit, ours).with_limit(limit.median());
    if arguments.common.is_quick { row } else { row.with_goal(goal) }
}
