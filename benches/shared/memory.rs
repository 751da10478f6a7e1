//! By how much a process grows with the locks that it holds or waits for: a process of its own for each figure. In KiB.

use leasehold::{Locker, Options};
use rustix::process::getpid;
use tokio::task::JoinSet;

use crate::child::{self, Other};
use crate::support::postgres::Cluster;
use crate::support::until;
use crate::usage::Memory;

const HOLDS: &str = "holds-many";
const WAITS: &str = "waits-for-many";

/// Advisory locks held shared are those of sessions that wait.
const WAITING: &str = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ShareLock'";

pub(crate) fn name(n: u32) -> String {
    format!("invoice {n:06}")
}

/// The part of the other process. False where that is none of these.
pub(crate) async fn play(role: &str, locker: &Locker, further: &[String]) -> anyhow::Result<bool> {
    match (role, further) {
        (HOLDS, [count]) => hold_many(locker, count.parse()?).await?,
        (WAITS, [count]) => wait_for_many(locker, count.parse()?).await?,
        _ => return Ok(false),
    }
    Ok(true)
}

/// Takes them one after the other, and tells by how much it has grown.
async fn hold_many(locker: &Locker, count: u32) -> anyhow::Result<()> {
    locker.lock("first").lock().await?.release().await?;
    let mut guards = Vec::with_capacity(count.try_into()?);
    let before = resident()?;
    for n in 0..count {
        guards.push(locker.lock(name(n)).lock().await?);
    }
    child::tell(resident()? - before)?;
    drop(guards);
    Ok(())
}

/// As many tasks as names, each of which waits. Tells by how much it has grown; and before that, by how much for tasks that do
/// nothing.
async fn wait_for_many(locker: &Locker, count: u32) -> anyhow::Result<()> {
    locker.lock("first").lock().await?.release().await?;
    let before = resident()?;
    let mut idle: JoinSet<()> = (0..count).map(|_| std::future::pending()).collect();
    child::tell(resident()? - before)?;
    let before = resident()?;
    let mut tasks = JoinSet::new();
    for n in 0..count {
        let lock = locker.lock(name(n));
        tasks.spawn(async move { lock.lock().await });
    }
    tokio::task::spawn_blocking(child::go_on).await??;
    child::tell(resident()? - before)?;
    tasks.shutdown().await;
    idle.shutdown().await;
    Ok(())
}

pub(crate) fn resident() -> anyhow::Result<f64> {
    let kib = Memory::of(getpid())?.rss;
    #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
    Ok(kib as f64)
}

/// For so many locks that are held.
pub(crate) fn held(server: &Cluster, count: u32) -> anyhow::Result<f64> {
    Other::start(HOLDS, &server.url("postgres", "", "postgres"), &[count.to_string()])?.told()
}

/// For so many that are waited for, and for as many tasks that do nothing.
pub(crate) async fn waited_for(server: &Cluster, count: u32) -> anyhow::Result<(f64, f64)> {
    let locker = Locker::postgres(server.options(), Options::default())?;
    let mut guards = Vec::new();
    for n in 0..count {
        guards.push(locker.lock(name(n)).lock().await?);
    }
    let mut other = Other::start(WAITS, &server.url("postgres", "", "postgres"), &[count.to_string()])?;
    let tasks = other.told()?;
    until("all are waited for", || server.admin().one::<u32>(WAITING) == count).await;
    other.go_on()?;
    let waiting = other.told()?;
    // Dropped at once, the other one would be handed what it is about to leave.
    drop(other);
    drop(guards);
    locker.close().await;
    Ok((waiting, tasks))
}
