//! What a thousand locks cost while they are held, and a thousand names while they are waited for.

use std::fs;

use anyhow::Context as _;
use leasehold::{Locker, Options};
use sqlx::{Connection as _, PgConnection};
use tokio::task::JoinSet;

use crate::arguments::Arguments;
use crate::child::{self, Other};
use crate::now;
use crate::report::{Goal, Row, Spread, Unit};
use crate::support::postgres::Cluster;
use crate::support::until;

/// As many as a Locker has by default.
const MANY: i32 = 1_000;

/// Checks, or looks, of a round.
const LOOKS: u32 = 20;

const GOAL_KIB: f64 = 2.0;

const SESSIONS: &str = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'leasehold/%'";

/// Advisory locks held shared are those of sessions that wait.
const WAITING: &str = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ShareLock'";

/// What one who holds locks can ask to see whether it still does.
const LOOK: &str = "SELECT pg_backend_pid(), classid, objid, objsubid, mode FROM pg_locks \
    WHERE locktype = 'advisory' AND pid = pg_backend_pid()";

fn name(n: i32) -> String {
    format!("invoice {n:06}")
}

pub(crate) async fn rows(server: &Cluster, arguments: Arguments) -> anyhow::Result<Vec<Row>> {
    let mut rows = Vec::from(held(server, arguments).await?);
    let url = server.url("postgres", "", "postgres");
    let (mut held, mut waiting, mut tasks) = (Spread::default(), Spread::default(), Spread::default());
    for _ in 0..arguments.rounds() {
        let mut other = Other::start("holds-many", &url)?;
        held.push(other.told()?);
        drop(other);
        let locker = Locker::postgres(server.options(), Options::default())?;
        let mut guards = Vec::new();
        for n in 0..MANY {
            guards.push(locker.lock(name(n)).lock().await?);
        }
        let mut other = Other::start("waits-for-many", &url)?;
        tasks.push(other.told()?);
        until("all are waited for", || server.admin().one::<i64>(WAITING) == i64::from(MANY)).await;
        other.go_on()?;
        waiting.push(other.told()?);
        // Dropped at once, the other one would be handed what it is about to leave.
        drop(other);
        drop(guards);
        locker.close().await;
    }
    let row = |what: &str, spread: &Spread| {
        let row = Row::of(format!("memory per {what}"), Unit::KiB, spread);
        if arguments.is_quick { row } else { row.with_goal(Goal::AtMost(GOAL_KIB)) }
    };
    rows.push(row("held lock", &held));
    rows.push(row("waiting name", &waiting).with_limit(tasks.median()));
    Ok(rows)
}

/// How many sessions that takes, and what a look at all of them does.
async fn held(server: &Cluster, arguments: Arguments) -> anyhow::Result<[Row; 2]> {
    let locker = Locker::postgres(server.options(), Options::default())?;
    let mut guards = Vec::new();
    for n in 0..MANY {
        guards.push(locker.lock(name(n)).lock().await?);
    }
    let sessions: u32 = server.admin().one(SESSIONS);
    let mut plain = PgConnection::connect_with(&server.options()).await?;
    sqlx::query("SELECT pg_try_advisory_lock(n) FROM generate_series(1, $1) n")
        .bind(MANY)
        .execute(&mut plain)
        .await?;
    let (mut ours, mut limit) = (Spread::default(), Spread::default());
    for _ in 0..arguments.rounds() {
        let since = now();
        for _ in 0..LOOKS {
            sqlx::raw_sql(LOOK).fetch_all(&mut plain).await?;
        }
        limit.add(now().saturating_sub(since) / LOOKS);
        let since = now();
        for _ in 0..LOOKS {
            anyhow::ensure!(guards[0].check().await, "it was lost");
        }
        ours.add(now().saturating_sub(since) / LOOKS);
    }
    plain.close().await?;
    drop(guards);
    locker.close().await;
    let what = |what| format!("{MANY} locks held: {what}");
    let sessions = Row::new(what("sessions of the server"), Unit::Sessions, sessions.into());
    Ok([
        sessions.with_goal(Goal::AtMost(1.0)),
        Row::spread(what("heartbeat"), &ours, &limit).with_goal(arguments.allow(Goal::AtMost(10.0))),
    ])
}

/// Another process: takes them one after the other, and tells by how many KiB it has grown for each.
pub(crate) async fn hold_many(locker: &Locker) -> anyhow::Result<()> {
    locker.lock("first").lock().await?.release().await?;
    let mut guards = Vec::with_capacity(MANY.try_into()?);
    let before = resident()?;
    for n in 0..MANY {
        guards.push(locker.lock(name(n)).lock().await?);
    }
    child::tell((resident()? - before) / f64::from(MANY))?;
    drop(guards);
    Ok(())
}

/// Another process: as many tasks as names, each of which waits. Tells by how many KiB it has grown for each; and before that,
/// by how many for tasks that do nothing.
pub(crate) async fn wait_for_many(locker: &Locker) -> anyhow::Result<()> {
    locker.lock("first").lock().await?.release().await?;
    let before = resident()?;
    let mut idle: JoinSet<()> = (0..MANY).map(|_| std::future::pending()).collect();
    child::tell((resident()? - before) / f64::from(MANY))?;
    let before = resident()?;
    let mut tasks = JoinSet::new();
    for n in 0..MANY {
        let lock = locker.lock(name(n));
        tasks.spawn(async move { lock.lock().await });
    }
    tokio::task::spawn_blocking(child::go_on).await??;
    child::tell((resident()? - before) / f64::from(MANY))?;
    tasks.shutdown().await;
    idle.shutdown().await;
    Ok(())
}

/// In KiB.
fn resident() -> anyhow::Result<f64> {
    let text = fs::read_to_string("/proc/self/smaps_rollup")?;
    let line = text.lines().find_map(|line| line.strip_prefix("Rss:"));
    let number = line.and_then(|rest| rest.split_whitespace().next()).context("there is no Rss")?;
    Ok(number.parse()?)
}
