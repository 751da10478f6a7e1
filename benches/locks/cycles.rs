//! Cycles of acquire and release that nobody is in the way of.

use std::time::Duration;

use leasehold::{Lease, LockError, Locker, Options};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{Connection as _, PgConnection, PgPool};
use tokio::task::JoinSet;

use crate::arguments::Arguments;
use crate::now;
use crate::report::{Goal, Row, Spread, Unit};
use crate::support::postgres::Cluster;

pub(crate) const TASKS: u32 = 256;

/// Of plain connections.
const CONNECTIONS: u32 = 200;

/// A task that cycles for so long, on a lock of its own.
pub(crate) async fn cycle_for(locker: Locker, task: u32, window: Duration) -> Result<u64, LockError> {
    let lock = locker.lock(format!("job-{task}"));
    let (since, mut cycles) = (now(), 0);
    while now().saturating_sub(since) < window {
        cycles += u64::from(lock.try_with(async |_: Lease| Ok::<_, LockError>(())).await?.is_some());
    }
    Ok(cycles)
}

/// Two round trips.
async fn raw_cycle(connection: &mut PgConnection, key: i64) -> sqlx::Result<()> {
    let lock = sqlx::query_scalar("SELECT pg_try_advisory_lock($1)").bind(key);
    let is_locked: bool = lock.fetch_one(&mut *connection).await?;
    assert!(is_locked, "nobody else has it");
    let unlock = sqlx::query_scalar("SELECT pg_advisory_unlock($1)").bind(key);
    let is_unlocked: bool = unlock.fetch_one(&mut *connection).await?;
    assert!(is_unlocked, "it was held");
    Ok(())
}

pub(crate) async fn one_by_one(server: &Cluster, arguments: Arguments) -> anyhow::Result<Row> {
    let locker = Locker::postgres(server.options(), Options::default())?;
    let mut plain = PgConnection::connect_with(&server.options()).await?;
    let (mut ours, mut limit) = (Spread::default(), Spread::default());
    let lock = locker.lock("job");
    // Connected, and prepared.
    lock.try_with(async |_: Lease| anyhow::Ok(())).await?;
    raw_cycle(&mut plain, 1).await?;
    for _ in 0..arguments.rounds() {
        let since = now();
        for _ in 0..arguments.cycles() {
            raw_cycle(&mut plain, 1).await?;
        }
        limit.add(now().saturating_sub(since) / arguments.cycles());
        let since = now();
        for _ in 0..arguments.cycles() {
            lock.try_with(async |_: Lease| anyhow::Ok(())).await?;
        }
        ours.add(now().saturating_sub(since) / arguments.cycles());
    }
    plain.close().await?;
    locker.close().await;
    let row = Row::spread("cycle of `try_with`".to_owned(), &ours, &limit);
    Ok(if arguments.common.is_quick { row } else { row.with_goal(Goal::TimesAtMost(1.25)) })
}

pub(crate) async fn at_once(server: &Cluster, arguments: Arguments) -> anyhow::Result<[Row; 2]> {
    let (mut ours, mut pooled, mut owned) = (Spread::default(), Spread::default(), Spread::default());
    let locker = Locker::postgres(server.options(), Options::default())?;
    locker.lock("first").try_with(async |_: Lease| anyhow::Ok(())).await?;
    let window = arguments.window();
    for _ in 0..arguments.rounds() {
        pooled.push(in_a_pool(&server.options(), window).await? / window.as_secs_f64());
        owned.push(on_their_own(&server.options(), window).await? / window.as_secs_f64());
        let tasks: JoinSet<_> = (0..TASKS).map(|task| cycle_for(locker.clone(), task, window)).collect();
        ours.push(sum(tasks.join_all().await)? / window.as_secs_f64());
    }
    locker.close().await;
    let what = format!("cycles of {TASKS} tasks");
    // What a service has: its tasks share a pool. That each has a connection for itself is more than the metric asks.
    let judged = Row::of(what.clone(), Unit::PerSecond, &ours).with_limit(pooled.median());
    let other =
        Row::of(format!("{what}, beside {CONNECTIONS} that own a connection each"), Unit::PerSecond, &ours);
    let judged = if arguments.common.is_quick { judged } else { judged.with_goal(Goal::TimesAtLeast(8.0)) };
    Ok([judged, other.with_limit(owned.median())])
}

/// As many tasks, which take a connection out of a pool for each cycle.
async fn in_a_pool(target: &PgConnectOptions, window: Duration) -> anyhow::Result<f64> {
    let pool = PgPoolOptions::new().max_connections(CONNECTIONS).connect_with(target.clone()).await?;
    let mut all = Vec::new();
    for _ in 0..CONNECTIONS {
        all.push(pool.acquire().await?);
    }
    drop(all);
    let tasks: JoinSet<_> = (0..TASKS).map(|task| raw_cycles(pool.clone(), task, window)).collect();
    let cycles = sum(tasks.join_all().await)?;
    pool.close().await;
    Ok(cycles)
}

async fn raw_cycles(pool: PgPool, task: u32, window: Duration) -> sqlx::Result<u64> {
    let (since, mut cycles) = (now(), 0);
    while now().saturating_sub(since) < window {
        raw_cycle(&mut *pool.acquire().await?, task.into()).await?;
        cycles += 1;
    }
    Ok(cycles)
}

/// As many tasks as connections.
async fn on_their_own(target: &PgConnectOptions, window: Duration) -> anyhow::Result<f64> {
    let mut connections = Vec::new();
    for task in 0..CONNECTIONS {
        connections.push((task, PgConnection::connect_with(target).await?));
    }
    let cycles = |(task, mut connection): (u32, PgConnection)| async move {
        let (since, mut cycles) = (now(), 0);
        while now().saturating_sub(since) < window {
            raw_cycle(&mut connection, task.into()).await?;
            cycles += 1;
        }
        connection.close().await?;
        Ok(cycles)
    };
    let tasks: JoinSet<sqlx::Result<u64>> = connections.into_iter().map(cycles).collect();
    sum(tasks.join_all().await)
}

pub(crate) fn sum<E: Into<anyhow::Error>>(counts: Vec<Result<u64, E>>) -> anyhow::Result<f64> {
    let sum: u64 = counts.into_iter().sum::<Result<_, E>>().map_err(Into::into)?;
    #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
    Ok(sum as f64)
}
