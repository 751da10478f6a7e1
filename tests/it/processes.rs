//! Replicas as processes, which are stopped and killed, on the stores that processes can share.

use std::collections::BTreeSet;
use std::time::Duration;

use leasehold::{Locker, Options};
use rustix::process::Signal;

use crate::support::log::assert_one_at_a_time;
use crate::support::replica::{Lines, Replica};
use crate::support::{AT_ONCE, Stage, now, pass, quick, sleepy, until};

fn spawn(stage: &Stage, options: &Options, lines: &Lines, behaviour: &str) -> Replica {
    Replica::spawn(stage, options, "job", lines, behaviour)
}

/// The injectors: one that ends in order says so and succeeds.
#[tokio::test]
async fn a_terminated_replica_ends_in_order() {
    let (stage, lines) = (Stage::files(), Lines::new());
    let mut replica = spawn(&stage, &quick("a"), &lines, "hold");
    lines.wait_for("a tick", 0).await;
    replica.terminate();
    assert!(replica.wait().await.success());
    assert_eq!(lines.all().last().unwrap(), "a end 1");
    assert!(stage.is_free("job"));
    assert_eq!(stage.sessions(), 0);
}

/// The injectors: one that is killed is gone, without a last word.
#[tokio::test]
async fn a_killed_replica_is_gone() {
    use std::os::unix::process::ExitStatusExt;

    let (stage, lines) = (Stage::files(), Lines::new());
    let mut replica = spawn(&stage, &quick("a"), &lines, "hold");
    lines.wait_for("a tick", 0).await;
    replica.kill();
    assert_eq!(replica.wait().await.signal(), Some(Signal::KILL.as_raw()));
    assert_eq!(lines.count("end"), 0);
}

/// The injectors: one that is stopped writes nothing, while another one does; and goes on when it is continued.
#[tokio::test]
async fn a_stopped_replica_stands_still() {
    let (stage, lines, others) = (Stage::files(), Lines::new(), Lines::new());
    let mut replica = spawn(&stage, &quick("a"), &lines, "hold");
    let mut other = Replica::spawn(&stage, &quick("b"), "other job", &others, "hold");
    lines.wait_for("a tick", 0).await;
    others.wait_for("b tick", 0).await;
    replica.stop().await;
    let (before, mut seen) = (lines.all(), others.all().len());
    for _ in 0..5 {
        seen = others.wait_for("b tick", seen).await;
    }
    assert_eq!(lines.all(), before);
    replica.cont();
    lines.wait_for("a tick", before.len()).await;
    for replica in [&mut replica, &mut other] {
        replica.terminate();
        assert!(replica.wait().await.success());
    }
}

/// F-04, F-37: processes that hand over.
#[tokio::test]
async fn bodies_of_processes_never_overlap() {
    hand_over_thirty_times(&Stage::files()).await;
}

/// F-04, F-37
#[cfg(feature = "postgres")]
#[tokio::test]
async fn bodies_of_processes_never_overlap_on_postgres() {
    hand_over_thirty_times(&Stage::postgres()).await;
}

/// F-04, F-37, R-11
#[cfg(feature = "redis")]
#[tokio::test]
async fn bodies_of_processes_never_overlap_on_redis() {
    hand_over_thirty_times(&Stage::redis()).await;
}

async fn hand_over_thirty_times(stage: &Stage) {
    let lines = Lines::new();
    let spawn = |who: usize| spawn(stage, &quick(&format!("r{who}")), &lines, "hand-over");
    let mut replicas: Vec<_> = (0..4).map(spawn).collect();
    let leaders = || {
        let all = lines.all();
        let who = all.iter().filter_map(|line| line.split(' ').next().map(str::to_owned));
        who.collect::<BTreeSet<_>>().len()
    };
    // One that starts late comes late.
    until("thirty terms, and everybody has led", || lines.count("start") >= 30 && leaders() == 4).await;
    for replica in &mut replicas {
        replica.terminate();
    }
    for replica in &mut replicas {
        assert!(replica.wait().await.success());
    }
    let all = lines.all();
    assert!(assert_one_at_a_time(all.iter().map(String::as_str)) >= 30);
}

/// F-18
#[tokio::test]
async fn a_standby_leads_when_the_leader_is_killed() {
    kill_five_leaders(&Stage::files(), AT_ONCE).await;
}

/// F-18: the kernel closes the dead process's socket, and the server frees its locks.
#[cfg(feature = "postgres")]
#[tokio::test]
async fn a_standby_leads_on_postgres_when_the_leader_is_killed() {
    kill_five_leaders(&Stage::postgres(), AT_ONCE).await;
}

/// F-18, R-04, R-11: nobody tells the server of a death, so its key goes with its ttl.
#[cfg(feature = "redis")]
#[tokio::test]
async fn a_standby_leads_on_redis_when_the_ttl_of_a_killed_leader_is_over() {
    kill_five_leaders(&Stage::redis(), AT_ONCE + quick("").bounds().ttl).await;
}

async fn kill_five_leaders(stage: &Stage, limit: Duration) {
    let lines = Lines::new();
    let mut leader = spawn(stage, &quick("0"), &lines, "hold");
    let mut seen = lines.wait_for("0 tick", 0).await;
    for round in 1..=5 {
        let standby = spawn(stage, &quick(&round.to_string()), &lines, "hold");
        let waits = || stage.waiters("job").is_none_or(|waiters| waiters == 1);
        until("it stands by", || stage.sessions() == 2 && waits()).await;
        leader.kill();
        let killed = now();
        seen = lines.wait_for(&format!("{round} start"), seen).await;
        assert!(killed.elapsed() < limit);
        assert!(!stage.is_free("job"));
        // On files whoever tells its peers something removes the socket of the dead one.
        let locker = Locker::connect(&stage.url(), Options::default().identity("observer")).await.unwrap();
        locker.step_down("a name that nobody leads").await.unwrap();
        locker.close().await;
        leader = standby;
        until("only the leader's session is left", || stage.sessions() == 1).await;
    }
    leader.terminate();
    assert!(leader.wait().await.success());
    assert_eq!((lines.count("start"), lines.count("end")), (6, 1));
    until("the sessions are gone", || stage.sessions() == 0).await;
    assert!(stage.is_free("job"));
}

/// F-17, D07: SIGTERM to a leader that winds down, twenty times; with an hour between two polls.
#[tokio::test]
async fn the_next_process_starts_when_the_old_ones_job_has_ended() {
    let (stage, lines) = (Stage::files(), Lines::new());
    let mut leader = spawn(&stage, &sleepy("0"), &lines, "wind-down");
    let mut seen = lines.wait_for("0 start", 0).await;
    for round in 1..=20 {
        let standby = spawn(&stage, &sleepy(&round.to_string()), &lines, "wind-down");
        until("it has a session", || stage.sessions() == 2).await;
        leader.terminate();
        seen = lines.wait_for(&format!("{round} start"), seen).await;
        assert!(leader.wait().await.success());
        leader = standby;
    }
    leader.terminate();
    assert!(leader.wait().await.success());
    assert_eq!(assert_one_at_a_time(lines.all().iter().map(String::as_str)), 21);
}

/// F-37: asked by a process that is no candidate.
#[tokio::test]
async fn a_leader_steps_down_when_another_process_asks() {
    let (stage, lines) = (Stage::files(), Lines::new());
    let mut leader = spawn(&stage, &sleepy("a"), &lines, "hold");
    lines.wait_for("a tick", 0).await;
    let mut standby = spawn(&stage, &quick("b"), &lines, "hold");
    until("it has a session", || stage.sessions() == 2).await;
    let locker = Locker::connect(&stage.url(), Options::default().identity("observer")).await.unwrap();
    locker.step_down("job").await.unwrap();
    lines.wait_for("b tick", 0).await;
    locker.close().await;
    for replica in [&mut leader, &mut standby] {
        replica.terminate();
        assert!(replica.wait().await.success());
    }
    assert_eq!(assert_one_at_a_time(lines.all().iter().map(String::as_str)), 2);
}

/// F-36, D11: stopped for longer than it may trust its lease and stop its job; the kernel keeps the lock meanwhile.
#[tokio::test]
async fn a_process_that_is_thawed_too_late_polls_its_job_no_more() {
    let (stage, lines) = (Stage::files(), Lines::new());
    let options = quick("a")
        .query_timeout(Duration::from_millis(400))
        .stop_grace(Duration::from_millis(200))
        // What ends a stubborn job at the end of the test.
        .drain_timeout(Some(Duration::from_millis(100)));
    let mut replica = spawn(&stage, &options, &lines, "stubborn");
    let mut seen = lines.wait_for("a start", 0).await;
    for _ in 0..3 {
        // Right after a tick: the next one is far away, so it does not stop in the middle of one.
        lines.wait_for("a tick", lines.all().len()).await;
        replica.stop().await;
        let before = lines.all();
        let term = before.last().unwrap().split(' ').next_back().unwrap().to_owned();
        pass(options.bounds().ttl).await;
        assert_eq!(lines.all(), before);
        assert!(!stage.is_free("job"));
        replica.cont();
        seen = lines.wait_for("a start", seen.max(before.len())).await;
        let after = lines.all()[before.len()..].to_vec();
        assert_eq!(after[0], format!("a end {term}"));
        assert!(after[1].starts_with("a start"), "{after:?}");
        assert_ne!(after[1], format!("a start {term}"));
    }
    assert_eq!(replica.who, "a");
    replica.terminate();
    assert!(replica.wait().await.success());
    assert_one_at_a_time(lines.all().iter().map(String::as_str));
}
