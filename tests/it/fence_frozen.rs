//! Fenced transactions of processes that freeze, and of hosts that vanish, between the fence and the commit.

use std::process::Command;
use std::time::Duration;

use leasehold::{Locker, Options, State};

use crate::support::postgres::{Cluster, Login, RemoteHost};
use crate::support::replica::{Lines, PROGRAM, Replica};
use crate::support::{AT_ONCE, Log, Member, now, quick, until};

/// Longer than the lease outlives its holder: so there is a time in which only the transaction is in the way.
const LIMIT: Duration = Duration::from_secs(6);

fn options(who: &str) -> Options {
    quick(who).fence_limit(Some(LIMIT)).drain_timeout(Some(Duration::from_millis(100)))
}

/// A leader falls silent with a transaction open, another one leads, and then the leader is heard again. Gives what became
/// of the transaction, as the leader was told, and how many rows there are.
async fn silence(behaviour: &str, host: Option<&RemoteHost>) -> (String, usize) {
    let is_fenced = behaviour == "once-fenced";
    let cluster = match host {
        Some(host) => Cluster::with(Login::Trust, &[&host.listen_addresses()]),
        None => Cluster::new(),
    };
    cluster.admin().sql("CREATE TABLE writes (token bigint NOT NULL)");
    let (lines, log) = (Lines::new(), Log::default());
    let (command, url) = match host {
        Some(host) => (host.command(PROGRAM), host.url(&cluster)),
        None => (Command::new(PROGRAM), cluster.url("postgres", "", "postgres")),
    };
    let mut leader = Replica::by(command, &url, &options("a"), "job", &lines, &[behaviour]);
    lines.wait_for("a open 1", 0).await;
    let locker = Locker::postgres(cluster.options(), options("b")).unwrap();
    let mut standby = Member::on(&locker, "job", "b", &log);
    standby.stands_by().await;

    match host {
        Some(host) => host.vanish(),
        None => leader.stop().await,
    }
    let since = now();
    if is_fenced {
        until("the transaction alone is in the way", || locker.state("job") == State::Blocked).await;
        assert_eq!(log.count("b start"), 0);
    }
    standby.leads().await;
    let vacancy = since.elapsed();
    println!("{behaviour}: another one led after {vacancy:?}");
    let bound = options("b").bounds().vacancy_silent.unwrap() + LIMIT;
    assert!(vacancy < bound + AT_ONCE, "{vacancy:?}");
    assert_eq!(
        cluster.admin().one::<usize>("SELECT count(*) FROM writes"),
        0,
        "nothing is committed by then"
    );
    match host {
        Some(host) => host.reappear(),
        None => leader.cont(),
    }

    let told = || lines.all().into_iter().find(|line| line.contains("committed") || line.contains("refused"));
    until("the leader is told what became of it", || told().is_some()).await;
    leader.terminate();
    assert!(leader.wait().await.success());
    standby.stop().await.unwrap();
    (told().unwrap(), cluster.admin().one("SELECT count(*) FROM writes"))
}

/// T-03: the process is stopped. The server ends the transaction; the next term begins then, and nothing can be committed.
#[tokio::test]
async fn a_process_that_freezes_between_fence_and_commit_delays_the_next_term_and_commits_nothing() {
    assert_eq!(silence("once-fenced", None).await, ("a refused 1".to_owned(), 0));
}

/// T-03, the twin: without the fence the next term has begun long before the commit.
#[tokio::test]
async fn without_a_fence_a_process_that_was_frozen_commits_in_the_next_term() {
    assert_eq!(silence("once-plain", None).await, ("a committed 1".to_owned(), 1));
}

/// T-03: packets are dropped both ways, and nobody is told.
#[tokio::test]
async fn a_host_that_vanishes_between_fence_and_commit_delays_the_next_term_and_commits_nothing() {
    let Some(host) = RemoteHost::new() else { return };
    assert_eq!(silence("once-fenced", Some(&host)).await, ("a refused 1".to_owned(), 0));
}
