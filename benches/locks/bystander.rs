//! What somebody else on the server notices: pgbench, which updates rows of a table of its own.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use leasehold::{CancellationToken, Lease, Locker, Options};
use sqlx::{Connection as _, PgConnection};
use tokio::process::Command;
use tokio::task::JoinSet;

use crate::arguments::Arguments;
use crate::cycles::{TASKS, cycle_for};
use crate::now;
use crate::report::{Goal, Row, Spread, Unit};
use crate::support::postgres::Cluster;
use crate::support::until;

const TABLE: &str = "CREATE TABLE bystander (id int PRIMARY KEY, n int NOT NULL DEFAULT 0);
    INSERT INTO bystander SELECT generate_series(1, 1000)";

const SCRIPT: &str = "\\set id random(1, 1000)\nUPDATE bystander SET n = n + 1 WHERE id = :id;\n";

/// Who is connected: whoever has gone has told how many transactions it has ended.
const CLIENTS: &str = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'";

const ENDED: &str = "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()";

pub(crate) async fn rows(server: &Cluster, arguments: Arguments) -> anyhow::Result<[Row; 3]> {
    let folder = tempfile::tempdir()?;
    let script = folder.path().join("script");
    std::fs::write(&script, SCRIPT)?;
    server.admin().sql(TABLE);
    let window = arguments.window();
    let (mut beside_locks, mut beside_plain) = (Spread::default(), Spread::default());
    let (mut beside_rush, mut rates, mut plain_rates) =
        (Spread::default(), Spread::default(), Spread::default());
    for _ in 0..arguments.rounds() {
        let before = ended(server).await;
        let locker = Locker::postgres(server.options(), Options::default())?;
        locker.lock("first").try_with(async |_: Lease| anyhow::Ok(())).await?;
        // For as long as pgbench takes, but for its start.
        let tasks: JoinSet<_> = (0..TASKS).map(|task| cycle_for(locker.clone(), task, window)).collect();
        let committed = commits(server, &script, window).await?;
        tasks.join_all().await.into_iter().collect::<Result<Vec<_>, _>>()?;
        locker.close().await;
        let rate = (ended(server).await - before - committed) / window.as_secs_f64();
        beside_locks.push(committed / window.as_secs_f64());
        rates.push(rate);

        let (committed, plain_rate) = beside(server, &script, window, rate).await?;
        beside_plain.push(committed);
        plain_rates.push(plain_rate);
        let (committed, _) = beside(server, &script, window, f64::INFINITY).await?;
        beside_rush.push(committed);
    }
    let what = "a bystander's commits";
    let judged = Row::of(what.to_owned(), Unit::PerSecond, &beside_locks);
    let other = Row::of(format!("{what}, beside as many `SELECT 1` as go"), Unit::PerSecond, &beside_locks);
    let statements = Row::of("statements beside the bystander".to_owned(), Unit::PerSecond, &rates);
    Ok([
        judged.with_limit(beside_plain.median()).with_goal(arguments.common.allow(Goal::TimesAtLeast(0.9))),
        other.with_limit(beside_rush.median()),
        statements.with_limit(plain_rates.median()),
    ])
}

/// How many transactions have ended on the server, when nobody is left there who may not have told.
async fn ended(server: &Cluster) -> f64 {
    until("all have left", || server.admin().one::<i64>(CLIENTS) == 1).await;
    server.admin().one(ENDED)
}

/// Commits a second beside a connection that sends so many statements a second, and how many those were.
async fn beside(server: &Cluster, script: &Path, window: Duration, rate: f64) -> anyhow::Result<(f64, f64)> {
    let mut plain = PgConnection::connect_with(&server.options()).await?;
    let over = CancellationToken::new();
    let bystander = async {
        let committed = commits(server, script, window).await;
        over.cancel();
        committed
    };
    let (plain_rate, committed) = tokio::join!(busy(&mut plain, rate, over.clone()), bystander);
    plain.close().await?;
    Ok((committed? / window.as_secs_f64(), plain_rate?))
}

/// How many transactions pgbench has committed.
async fn commits(server: &Cluster, script: &Path, window: Duration) -> anyhow::Result<f64> {
    let mut command = Command::new(Cluster::program("pgbench"));
    command.args(["--no-vacuum", "--client=1", "--host=127.0.0.1", "--username=postgres"]);
    command.arg(format!("--port={}", server.port())).arg(format!("--time={}", window.as_secs()));
    command.arg("--file").arg(script).arg("postgres").stdin(Stdio::null()).kill_on_drop(true);
    let output = command.output().await?;
    let text = String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.success(), "pgbench: {text}{}", String::from_utf8_lossy(&output.stderr));
    let line = text.lines().find_map(|line| line.strip_prefix("number of transactions actually processed: "));
    Ok(line.with_context(|| format!("pgbench does not tell how many: {text}"))?.trim().parse()?)
}

/// Statements at this rate, or as many as go; tells how many a second those were.
async fn busy(plain: &mut PgConnection, rate: f64, over: CancellationToken) -> anyhow::Result<f64> {
    let (since, mut sent) = (now(), 0.0);
    while !over.is_cancelled() {
        if sent < now().saturating_sub(since).as_secs_f64() * rate {
            sqlx::query("SELECT 1").execute(&mut *plain).await?;
            sent += 1.0;
        } else {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
    Ok(sent / now().saturating_sub(since).as_secs_f64())
}
