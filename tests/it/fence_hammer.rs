//! Fenced transactions under a hammer: replicas that are processes, whose sessions are ended all the time, and whose jobs
//! write on and on.
//!
//! The database itself is the judge. Whatever a term does first is to look which transactions it can see. Each row says
//! in which transaction, and for which term, it was written, and the fencing tokens say which term was the earlier one:
//! a token is made after that look, and while the lease is held.

use std::process::Command;
use std::time::Duration;

use leasehold::{Key, Kind};

use crate::support::postgres::{Cluster, Login};
use crate::support::replica::{Lines, PROGRAM, Replica};
use crate::support::{now, pass, quick, until};

/// How long it is hammered on what is to hold.
const HAMMERED: Duration = Duration::from_secs(30);

/// By when what is broken must have been found out.
const FOUND_OUT: Duration = Duration::from_secs(50);

/// 40 times a second.
const BETWEEN_KILLS: Duration = Duration::from_millis(25);

const TABLES: &str =
    "CREATE TABLE starts (token bigint PRIMARY KEY, snapshot pg_snapshot NOT NULL, at timestamptz NOT NULL);
    CREATE TABLE writes (token bigint NOT NULL, transaction xid8 NOT NULL DEFAULT pg_current_xact_id())";

/// Rows that were written for a term, and that the next one could not see when it began: so they were committed later. And
/// the same by the server's clock, which may be set back: committed after the beginning of any later term.
const VIOLATIONS: &str = "SELECT count(*) FROM writes w JOIN (SELECT token, lead(snapshot) OVER terms AS snapshot, \
    min(at) OVER (terms ROWS BETWEEN 1 FOLLOWING AND UNBOUNDED FOLLOWING) AS at FROM starts \
    WINDOW terms AS (ORDER BY token)) next USING (token) \
    WHERE NOT pg_visible_in_snapshot(w.transaction, next.snapshot) \
    OR pg_xact_commit_timestamp(w.transaction::xid) > next.at";

/// Tokens that do not grow with the terms.
const DISORDER: &str = "SELECT count(*) FROM (SELECT at, lag(at) OVER (ORDER BY token) AS earlier FROM starts) s \
    WHERE at < earlier";

struct Told {
    kills: usize,
    terms: usize,
    writes: usize,
    violations: usize,
    refused: usize,
    blocked: usize,
}

/// Hammers for so long; where violations are looked for, until there are some.
async fn hammer(how: &[&str], limit: Duration, is_broken: bool) -> Told {
    let cluster = Cluster::with(Login::Trust, &["track_commit_timestamp=on"]);
    let (admin, lines) = (cluster.admin(), Lines::new());
    admin.sql(TABLES);
    let url = cluster.url("postgres", "", "postgres");
    let mut replicas: Vec<Replica> = ["a", "b", "c", "d"]
        .iter()
        .map(|who| {
            let options = quick(who).retry_interval(Duration::from_millis(10));
            Replica::by(Command::new(PROGRAM), &url, &options, "job", &lines, how)
        })
        .collect();
    until("one leads", || lines.count("start") > 0).await;
    let (since, mut round, mut kills, mut violations) = (now(), 0, 0, 0);
    let key = Key::of(Kind::Lease, "job").get();
    while since.elapsed() < limit && !(is_broken && violations > 0) {
        // Mostly the one that leads.
        let victim = match round % 4 {
            0 => admin.backends("leasehold/%").first().copied(),
            _ => admin.holder(key),
        };
        if let Some(victim) = victim {
            // It may be gone.
            admin.sql(&format!("SELECT pg_terminate_backend({victim})"));
            kills += 1;
        }
        round += 1;
        pass((BETWEEN_KILLS * round).saturating_sub(since.elapsed())).await;
        if is_broken && round % 40 == 0 {
            violations = admin.one(VIOLATIONS);
        }
    }
    for replica in &mut replicas {
        replica.terminate();
    }
    for replica in &mut replicas {
        assert!(replica.wait().await.success(), "{}", replica.who);
    }
    assert_eq!(admin.one::<usize>(DISORDER), 0, "the tokens grow");
    let told = Told {
        kills,
        terms: admin.one("SELECT count(*) FROM starts"),
        writes: admin.one("SELECT count(*) FROM writes"),
        violations: admin.one(VIOLATIONS),
        refused: lines.count("over"),
        blocked: lines.count("blocked"),
    };
    let Told { kills, terms, writes, violations, refused, blocked } = &told;
    println!(
        "{how:?}: in {:?} {kills} sessions ended, {terms} terms, {writes} rows committed, {violations} of them after the \
         start of a later term; {refused} transactions refused, {blocked} starts blocked",
        since.elapsed()
    );
    told
}

/// T-02: no row of an earlier term is committed after the start of a later one.
#[tokio::test]
async fn what_is_fenced_is_never_committed_after_the_start_of_a_later_term() {
    let told = hammer(&["write-fenced"], HAMMERED, false).await;
    assert_eq!(told.violations, 0);
    // It was a hammer.
    assert!(told.terms > 30 && told.writes > 300 && told.refused > 30 && told.blocked > 0);
}

/// T-02, the twin: without the fence there are such rows.
#[tokio::test]
async fn what_is_not_fenced_is_committed_after_the_start_of_a_later_term() {
    let told = hammer(&["write-plain"], FOUND_OUT, true).await;
    assert!(told.violations > 0 && told.refused == 0);
}

/// T-02, the twin: so there are with fences that whoever begins a term does not heed.
#[tokio::test]
async fn without_the_barrier_what_is_fenced_is_committed_after_the_start_of_a_later_term() {
    let told = hammer(&["write-fenced", "no-barrier"], FOUND_OUT, true).await;
    assert!(told.violations > 0);
}
