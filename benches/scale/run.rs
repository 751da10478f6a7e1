//! What is measured, and in which order.

use std::process::ExitCode;
use std::time::Duration;

use leasehold::{Locker, Options};
use sqlx::postgres::PgConnectOptions;

use crate::arguments::{Arguments, USAGE};
use crate::report::{self, BUILD, load, table};
use crate::support::postgres::Cluster;
use crate::{growth, heartbeat, idle, memory, now, poll};

pub(crate) fn main() -> anyhow::Result<ExitCode> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [child, role, url, further @ ..] = &arguments[..]
        && child == "child"
    {
        play(role, url, further)?;
        return Ok(ExitCode::SUCCESS);
    }
    let Some(arguments) = Arguments::parse(arguments.into_iter())? else {
        println!("{USAGE}");
        return Ok(ExitCode::SUCCESS);
    };
    // As a service has it.
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(measure(arguments))
}

/// As another process.
fn play(role: &str, url: &str, further: &[String]) -> anyhow::Result<()> {
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(async {
        let locker = Locker::postgres(url.parse::<PgConnectOptions>()?, Options::default())?;
        let is_played =
            memory::play(role, &locker, further).await? || growth::play(role, &locker, further).await?;
        anyhow::ensure!(is_played, "there is no {role}");
        locker.close().await;
        Ok(())
    })
}

/// What is measured now, and since when.
fn tell(since: Duration, what: &str) {
    eprintln!("{:4} s: {what}", now().saturating_sub(since).as_secs());
}

async fn measure(arguments: Arguments) -> anyhow::Result<ExitCode> {
    let (since, load_before) = (now(), load()?);
    let mut rows = Vec::new();
    tell(since, "idle Lockers");
    rows.extend(idle::rows(arguments).await?);
    tell(since, "heartbeats");
    rows.extend(heartbeat::rows(arguments).await?);
    tell(since, "polls");
    rows.extend(poll::rows(arguments).await?);
    tell(since, "memory");
    rows.extend(growth::rows(arguments).await?);

    let version: String = Cluster::new().admin().one("SHOW server_version");
    let summary = format!(
        "{}\nIdle Lockers within {} s; else the median of {} rounds of each figure and its limit, in turn. PostgreSQL {version} \
         on loopback, without fsync. {} cores. Load average before {load_before}, after {}. {BUILD} All of it took {} s.",
        table(&rows),
        arguments.window().as_secs(),
        arguments.rounds(),
        std::thread::available_parallelism()?,
        load()?,
        now().saturating_sub(since).as_secs(),
    );
    Ok(report::publish(&rows, &summary, arguments.common.is_json))
}
