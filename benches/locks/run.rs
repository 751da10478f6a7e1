//! What is measured, and in which order.

use std::process::ExitCode;

use crate::arguments::{Arguments, USAGE};
use crate::report::{self, BUILD, load, table};
use crate::support::postgres::{Cluster, Login};
use crate::{bystander, child, cycles, fences, hand_over, holding, now};

/// More than the plain connections of all that is compared.
const MAX_CONNECTIONS: &str = "max_connections=500";

pub(crate) fn main() -> anyhow::Result<ExitCode> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let ["child", role, url] = &arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        child::play(role, url)?;
        return Ok(ExitCode::SUCCESS);
    }
    let Some(arguments) = Arguments::parse(arguments.into_iter())? else {
        println!("{USAGE}");
        return Ok(ExitCode::SUCCESS);
    };
    // As a service has it.
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(measure(arguments))
}

async fn measure(arguments: Arguments) -> anyhow::Result<ExitCode> {
    let (since, load_before) = (now(), load()?);
    let server = Cluster::with(Login::Trust, &[MAX_CONNECTIONS]);
    let mut rows = Vec::new();
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

    let summary = format!(
        "{}\nMedian of {} rounds of each figure and its limit, in turn. PostgreSQL {version} on loopback, without fsync. {} cores. \
         Load average before {load_before}, after {}. {BUILD} All of it took {} s.",
        table(&rows),
        arguments.rounds(),
        std::thread::available_parallelism()?,
        load()?,
        now().saturating_sub(since).as_secs(),
    );
    Ok(report::publish(&rows, &summary, arguments.is_json))
}
