//! Starts the replicas, freezes the first one, and looks at the table.

use std::io::{BufRead as _, BufReader, Lines, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context as _, bail};
use rustix::process::{Pid, Signal, kill_process};
use sqlx::{AssertSqlSafe, Connection as _, PgConnection};

use crate::support::postgres::Cluster;

const IN_STOCK: i64 = 10;
/// How much the first replica takes, and the second one.
const TAKES: [i64; 2] = [1, 5];

/// Where the first replica is frozen, and what is expected of that.
struct Play {
    title: &'static str,
    is_fenced: bool,
    frozen: &'static str,
    /// The second replica is seen to wait for the transaction of the first one.
    waits: bool,
    holds: i64,
    verdict: &'static str,
}

const PLAYS: [Play; 3] = [
    Play {
        title: "Without a fence, frozen in the middle of its transaction",
        is_fenced: false,
        frozen: "in it",
        waits: false,
        holds: IN_STOCK - TAKES[0],
        verdict: "what b had written is lost",
    },
    Play {
        title: "Fenced, frozen in the middle of its transaction",
        is_fenced: true,
        frozen: "in it",
        waits: true,
        holds: IN_STOCK - TAKES[1],
        verdict: "what b had written",
    },
    Play {
        title: "Fenced, frozen just before its transaction",
        is_fenced: true,
        frozen: "before",
        waits: false,
        holds: IN_STOCK - TAKES[1],
        verdict: "what b had written",
    },
];

/// Runs all plays, and tells whether the table held each time what it should.
pub(crate) async fn play() -> anyhow::Result<bool> {
    let (cluster, store) = if let Ok(url) = std::env::var("LEASEHOLD_STORE") {
        (None, url)
    } else {
        let cluster = Cluster::new();
        let url = cluster.url("postgres", "", "postgres");
        (Some(cluster), url)
    };
    let mut connection =
        PgConnection::connect(&store).await.context("this example needs a PostgreSQL server")?;
    // A name of its own, so that two of these on one server do not disturb each other.
    let table = format!("leasehold_fencing_{}", std::process::id());
    let sql =
        format!("CREATE TABLE {table} (amount bigint NOT NULL); INSERT INTO {table} VALUES ({IN_STOCK})");
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut connection).await?;
    let played = play_all(&mut connection, &store, &table).await;
    sqlx::raw_sql(AssertSqlSafe(format!("DROP TABLE {table}"))).execute(&mut connection).await?;
    connection.close().await?;
    drop(cluster);
    played
}

async fn play_all(connection: &mut PgConnection, store: &str, table: &str) -> anyhow::Result<bool> {
    println!(
        "There are {IN_STOCK} in stock. Replica a takes {} of them, replica b {}: each reads, and writes what is left.",
        TAKES[0], TAKES[1]
    );
    let mut as_expected = true;
    for play in &PLAYS {
        let sql = AssertSqlSafe(format!("UPDATE {table} SET amount = {IN_STOCK}"));
        sqlx::raw_sql(sql).execute(&mut *connection).await?;
        println!("\n{}", play.title);
        play.perform(store, table)?;
        let sql = AssertSqlSafe(format!("SELECT amount FROM {table}"));
        let amount: i64 = sqlx::query_scalar(sql).fetch_one(&mut *connection).await?;
        let verdict = if amount == play.holds { play.verdict } else { "which is not what was expected" };
        println!("  the table holds {amount}: {verdict}");
        as_expected &= amount == play.holds;
    }
    Ok(as_expected)
}

impl Play {
    fn perform(&self, store: &str, table: &str) -> anyhow::Result<()> {
        let frozen = self.frozen;
        let mut first = Replica::start("a", TAKES[0], self.is_fenced, frozen, store, table)?;
        if frozen == "in it" {
            first.does("has read ")?;
        }
        first.reaches("can be frozen")?;
        first.signal(Signal::STOP)?;
        println!("  a: frozen");
        let mut second = Replica::start("b", TAKES[1], self.is_fenced, "never", store, table)?;
        if self.waits {
            second.reaches("waits")?;
            println!("  b: has the lease, and waits until the server ends the transaction of a");
        }
        second.does("has read ")?;
        second.does("has written ")?;
        first.signal(Signal::CONT)?;
        println!("  a: goes on");
        first.go_on()?;
        first.does(match (self.is_fenced, self.waits) {
            (false, _) => "has written ",
            (true, true) => "cannot write",
            (true, false) => "is refused: ",
        })
    }
}

/// A process, killed when it is dropped.
struct Replica {
    who: &'static str,
    process: Child,
    /// It ends when this is closed.
    stdin: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Replica {
    fn start(
        who: &'static str,
        takes: i64,
        is_fenced: bool,
        frozen: &str,
        store: &str,
        table: &str,
    ) -> anyhow::Result<Self> {
        let mut process = Command::new(std::env::current_exe()?)
            .args(["replica", who, &takes.to_string(), &is_fenced.to_string(), frozen, table])
            .env("LEASEHOLD_STORE", store)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start a replica")?;
        let stdin = process.stdin.take().context("the process has an input")?;
        let stdout = process.stdout.take().context("the process has an output")?;
        Ok(Self { who, process, stdin, lines: BufReader::new(stdout).lines() })
    }

    /// Waits until it says that, and says it.
    fn does(&mut self, what: &str) -> anyhow::Result<()> {
        let line = self.reaches(what)?;
        println!("  {}: {line}", self.who);
        Ok(())
    }

    fn reaches(&mut self, what: &str) -> anyhow::Result<String> {
        loop {
            let Some(line) = self.lines.next().transpose()? else { bail!("{} has ended", self.who) };
            if line.starts_with(what) {
                return Ok(line);
            }
            // Whoever begins a term may have to wait for a moment until the server has freed all of an older one.
            if line != "waits" {
                bail!("{} was expected to say {what:?}, and says {line:?}", self.who);
            }
        }
    }

    fn go_on(&mut self) -> anyhow::Result<()> {
        Ok(writeln!(self.stdin)?)
    }

    fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        let pid = Pid::from_raw(self.process.id().try_into()?).context("a process has a number")?;
        Ok(kill_process(pid, signal)?)
    }
}

impl Drop for Replica {
    fn drop(&mut self) {
        // One that has ended already is no matter.
        self.process.kill().ok();
        self.process.wait().ok();
    }
}
