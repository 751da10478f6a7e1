//! What is measured, and in which order.

use std::process::ExitCode;

use leasehold::Locker;
use sqlx::postgres::PgConnectOptions;

use crate::arguments::{Arguments, Store, USAGE};
#[cfg(feature = "redis")]
use crate::redis_cycles;
use crate::report::{self, BUILD, Row, load, table};
use crate::support::postgres::{Cluster, Login};
#[cfg(feature = "redis")]
use crate::support::redis::Server;
use crate::{bystander, cycles, fences, hand_over, holding, memory, now};

/// More than the plain connections of all that is compared.
const MAX_CONNECTIONS: &str = "max_connections=500";

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
        let locker = Locker::postgres(url.parse::<PgConnectOptions>()?, hand_over::options()?)?;
        if role == hand_over::WAITS {
            hand_over::wait_in_turn(&locker).await?;
        } else {
            anyhow::ensure!(memory::play(role, &locker, further).await?, "there is no {role}");
        }
        locker.close().await;
        Ok(())
    })
}

async fn measure(arguments: Arguments) -> anyhow::Result<ExitCode> {
    let (since, load_before) = (now(), load()?);
    let (mut rows, mut servers) = (Vec::new(), Vec::new());
    if arguments.has(Store::Postgres) {
        servers.push(on_postgres(arguments, &mut rows).await?);
    }
    #[cfg(feature = "redis")]
    if arguments.has(Store::Redis) {
        servers.push(on_redis(arguments, &mut rows).await?);
    }

    let summary = format!(
        "{}\nMedian of {} rounds of each figure and its limit, in turn. {}. {} cores. Load average before {load_before}, \
         after {}. {BUILD} All of it took {} s.",
        table(&rows),
        arguments.rounds(),
        servers.join("; "),
        std::thread::available_parallelism()?,
        load()?,
        now().saturating_sub(since).as_secs(),
    );
    Ok(report::publish(&rows, &summary, arguments.common.is_json))
}

/// Tells what server it was.
async fn on_postgres(arguments: Arguments, rows: &mut Vec<Row>) -> anyhow::Result<String> {
    let server = Cluster::with(Login::Trust, &[MAX_CONNECTIONS]);
    eprintln!("cycles, one after the other");
    rows.push(cycles::one_by_one(&server, arguments).await?);
    eprintln!("cycles, many at once");
    rows.extend(cycles::at_once(&server, arguments).await?);
    eprintln!("a bystander");
    rows.extend(bystander::rows(&server, arguments).await?);
    eprintln!("hand-over");
    rows.extend(hand_over::rows(&server, arguments).await?);
    eprintln!("fences");
    rows.extend(fences::rows(&server, arguments).await?);
    eprintln!("held and waited for");
    rows.extend(holding::rows(&server, arguments).await?);
    let version: String = server.admin().one("SHOW server_version");
    Ok(format!("PostgreSQL {version} on loopback, without fsync"))
}

#[cfg(feature = "redis")]
async fn on_redis(arguments: Arguments, rows: &mut Vec<Row>) -> anyhow::Result<String> {
    let server = Server::start();
    eprintln!("cycles on Redis");
    rows.extend(redis_cycles::rows(&server, arguments).await?);
    eprintln!("held on Redis");
    rows.push(redis_cycles::heartbeat(&server, arguments).await?);
    Ok(format!("Redis {} on loopback, without persistence", server.info("redis_version")))
}
