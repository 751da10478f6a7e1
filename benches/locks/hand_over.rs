//! From a release in one process to the lock's being held in another one that waits.

use std::time::Duration;

use leasehold::{Locker, Options};

use crate::arguments::Arguments;
use crate::child::{self, Other};
use crate::report::{Goal, Row, Spread, Unit};
use crate::support::postgres::Cluster;
use crate::support::until;
use crate::{now, raw};

const NAME: &str = "handed over";

/// Advisory locks held shared are those of sessions that wait.
const WAITING: &str = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ShareLock'";

/// The role of the other process.
pub(crate) const WAITS: &str = "waits";

/// Only what is pushed counts, not what is polled for.
pub(crate) fn options() -> anyhow::Result<Options> {
    Ok("retry_interval=1h".parse()?)
}

/// The other process: waits whenever it is told to, and tells when it has got in; in nanoseconds.
pub(crate) async fn wait_in_turn(locker: &Locker) -> anyhow::Result<()> {
    let lock = locker.lock(NAME);
    while child::go_on()? {
        let guard = lock.lock().await?;
        let got_in = now();
        guard.release().await?;
        child::tell(got_in.as_nanos())?;
    }
    Ok(())
}

pub(crate) async fn rows(server: &Cluster, arguments: Arguments) -> anyhow::Result<[Row; 2]> {
    let locker = Locker::postgres(server.options(), options()?)?;
    let lock = locker.lock(NAME);
    let mut other = Other::start(WAITS, &server.url("postgres", "", "postgres"), &[])?;
    let (mut ours, mut limit) = (Spread::default(), Spread::default());
    for _ in 0..arguments.rounds().div_ceil(2) {
        let target = server.options();
        for cost in tokio::task::spawn_blocking(move || raw::hand_overs(&target)).await?? {
            limit.add(cost);
        }
        for _ in 0..raw::ROUNDS {
            let guard = lock.lock().await?;
            other.go_on()?;
            until("the other one waits", || server.admin().one::<i64>(WAITING) > 0).await;
            tokio::time::sleep(raw::PAUSE).await;
            let since = now();
            guard.release().await?;
            let got_in = Duration::from_nanos(other.told()?);
            ours.add(got_in.saturating_sub(since));
        }
    }
    drop(other);
    locker.close().await;
    let what = "hand-over between processes";
    let compared = Row::spread(what.to_owned(), &ours, &limit);
    let alone = Row::of(format!("{what}, at all"), Unit::Ms, &ours);
    Ok([
        compared.with_goal(arguments.common.allow(Goal::TimesAtMost(2.0))),
        alone.with_goal(arguments.common.allow(Goal::AtMost(5.0))),
    ])
}
