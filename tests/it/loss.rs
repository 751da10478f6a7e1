//! Leases that are lost: what is told, to whom, and what goes on.

use std::convert::Infallible;
use std::future;
use std::time::Duration;

use leasehold::{Lease, LossCause, Memory, Name, Reason, RunError};

use crate::support::member::over;
use crate::support::{Log, Member, Stage, now, on_every_store, pass, quick, sleepy, until};

/// F-20, F-40, F-15: one of two leases is taken away; the other keeps its term.
#[tokio::test]
async fn exactly_the_lease_that_is_gone_is_lost() {
    on_every_store(async |stage| {
        let log = Log::default();
        let locker = stage.locker(quick("a"));
        let mut one = Member::on(&locker, "one", "one", &log);
        let mut two = Member::on(&locker, "two", "two", &log);
        let (gone, kept) = (one.leads().await, two.leads().await);
        stage.take_away("a", "one");
        assert_eq!(over(&gone).await, Some(Reason::Lost(LossCause::Gone)));
        // It leads again, in a new term, after its old body has ended.
        let again = one.leads().await;
        assert!(again.term() > kept.term());
        assert!(!gone.is_held() && again.check().await);
        assert_eq!((kept.check().await, kept.reason()), (true, None));
        one.stop().await.unwrap();
        assert!(kept.check().await);
        two.stop().await.unwrap();
        assert_eq!((log.count("one start"), log.count("two start")), (2, 1));
        locker.close().await;
    })
    .await;
}

/// F-40: a stop and a step down of one of three names.
#[tokio::test]
async fn a_stop_or_a_step_down_of_one_name_leaves_the_others_alone() {
    on_every_store(async |stage| {
        let log = Log::default();
        let locker = stage.locker(sleepy("a"));
        let mut stopped = Member::on(&locker, "stopped", "stopped", &log);
        let mut stepping = Member::on(&locker, "stepping down", "stepping", &log);
        let mut kept = Member::on(&locker, "kept", "kept", &log);
        stopped.leads().await;
        let (down, lease) = (stepping.leads().await, kept.leads().await);
        assert_eq!(stopped.stop().await.unwrap(), None);
        assert!(down.check().await && lease.check().await);
        locker.step_down("stepping down").await.unwrap();
        assert_eq!(over(&down).await, Some(Reason::SteppedDown));
        stage.until_free("stepping down").await;
        assert!(lease.check().await && lease.reason().is_none() && !lease.cancellation().is_cancelled());
        assert_eq!(log.count("kept end"), 0);
        stepping.stop().await.unwrap();
        kept.stop().await.unwrap();
    })
    .await;
}

/// F-21: the job of each name is told once, with the server's SQLSTATE, and called anew once.
#[tokio::test]
async fn a_killed_session_loses_every_lease_once() {
    let (memory, log) = (Memory::new(), Log::default());
    let stage = Stage::Memory(memory.clone());
    let locker = stage.locker(quick("a"));
    let mut members: Vec<_> = ["x", "y", "z"].map(|name| Member::on(&locker, name, name, &log)).into();
    let mut leases = Vec::new();
    for member in &mut members {
        leases.push(member.leads().await);
    }
    memory.kill("a");
    for (member, lease) in members.iter_mut().zip(&leases) {
        let why = over(lease).await;
        let Some(Reason::Lost(LossCause::Closed { sqlstate, .. })) = why else { panic!("{why:?}") };
        assert_eq!(sqlstate.as_deref(), Some("57P01"));
        let again = member.leads().await;
        assert!(again.check().await && !lease.is_held());
    }
    for (member, name) in members.into_iter().zip(["x", "y", "z"]) {
        member.stop().await.unwrap();
        assert_eq!((log.count(&format!("{name} start")), log.count(&format!("{name} end"))), (2, 2));
    }
}

/// D09, F-22: answers that take longer than the heartbeat's interval, but less than the query timeout, restart nothing.
#[tokio::test]
async fn slow_answers_inside_of_the_query_timeout_keep_the_lease() {
    for memory in [Memory::new(), Memory::expiring()] {
        let log = Log::default();
        let stage = Stage::Memory(memory.clone());
        let mut member = Member::join(&stage, quick("a"), "job", &log);
        let lease = member.leads().await;
        memory.slow("a", Duration::from_millis(200), Duration::from_millis(200));
        let before = memory.statements("a");
        until("five slow answers", || memory.statements("a") >= before + 5).await;
        assert!(lease.is_held() && lease.reason().is_none());
        member.stop().await.unwrap();
        assert_eq!(log.lines(), ["a start", "a end"]);
    }
}

/// D09, F-23: a leader whose store falls silent steps down, and leads again when it answers.
#[tokio::test]
async fn answers_after_the_query_timeout_end_the_term_and_the_candidate_rejoins() {
    for memory in [Memory::new(), Memory::expiring()] {
        let log = Log::default();
        let stage = Stage::Memory(memory.clone());
        let options = quick("a").query_timeout(Duration::from_millis(300));
        let limit = Duration::from_millis(300);
        let mut member = Member::join(&stage, options, "job", &log);
        let lease = member.leads().await;
        memory.slow("a", Duration::ZERO, 10 * limit);
        assert_eq!(over(&lease).await, Some(Reason::Lost(LossCause::Timeout { limit })));
        memory.slow("a", Duration::ZERO, Duration::ZERO);
        let again = member.leads().await;
        assert!(again.check().await);
        member.stop().await.unwrap();
        assert_eq!(log.assert_one_at_a_time(), 2);
    }
}

/// F-17, F-23: the session of a store that answers too late stays open until the job has ended.
#[tokio::test]
async fn a_standby_of_a_silent_leader_starts_after_the_leaders_body_has_ended() {
    for memory in [Memory::new(), Memory::expiring()] {
        let log = Log::default();
        let stage = Stage::Memory(memory.clone());
        let limit = Duration::from_millis(300);
        let locker = stage.locker(quick("a").query_timeout(limit));
        let (of_task, job_log) = (locker.clone(), log.clone());
        let leader = tokio::spawn(async move {
            let job = async |lease: Lease| {
                let _body = job_log.body("a");
                lease.cancelled().await;
                // Nearly all of its grace.
                pass(Duration::from_millis(400)).await;
                Ok::<_, Infallible>(())
            };
            of_task.run("job", job).await
        });
        log.wait_for("a start", 1).await;
        let mut standby = Member::join(&stage, quick("b"), "job", &log);
        standby.stands_by().await;
        memory.slow("a", Duration::ZERO, limit + Duration::from_secs(1));
        standby.leads().await;
        memory.slow("a", Duration::ZERO, Duration::ZERO);
        locker.close().await;
        assert_eq!(leader.await.unwrap().unwrap(), None);
        standby.stop().await.unwrap();
        assert_eq!(log.lines(), ["a start", "a end", "b start", "b end"]);
    }
}

/// D19, F-16: it is dropped when the grace is over, not before, and the candidate leads again.
#[tokio::test]
async fn a_job_that_ignores_the_loss_is_dropped_when_its_grace_is_over() {
    on_every_store(async |stage| {
        let (log, grace) = (Log::default(), quick("a").bounds().overlap_killed);
        let locker = stage.locker(quick("a"));
        let leases = std::sync::Mutex::new(Vec::new());
        let stubborn = locker.candidate("job").run(|lease: Lease| {
            let (body, is_first) = (log.body("a"), lease.term() == 1);
            leases.lock().unwrap().push(lease);
            async move {
                if is_first {
                    future::pending::<()>().await;
                }
                drop(body);
                Ok::<_, Infallible>(())
            }
        });
        let lose = async {
            log.wait_for("a start", 1).await;
            let taken = now();
            stage.take_away("a", "job");
            log.wait_for("a end", 1).await;
            taken
        };
        let (outcome, taken) = tokio::join!(stubborn, lose);
        assert_eq!(outcome.unwrap(), Some(()));
        assert!(log.nth("a end", 1) - taken >= grace);
        assert_eq!(log.assert_one_at_a_time(), 2);
        assert_eq!(leases.lock().unwrap()[0].reason(), Some(Reason::Lost(LossCause::Gone)));
    })
    .await;
}

/// F-42, F-17: jobs that are told, and a standby that waits until they have ended.
#[tokio::test]
async fn a_panic_of_the_driver_ends_every_job_and_then_frees_the_leases() {
    let (memory, log) = (Memory::new(), Log::default());
    let stage = Stage::Memory(memory.clone());
    let locker = stage.locker(quick("a"));
    let mut quick_one = Member::on(&locker, "quick", "quick", &log);
    let lease = quick_one.leads().await;
    let (slow_locker, slow_log, wind_down) = (locker.clone(), log.clone(), Duration::from_millis(200));
    let slow = tokio::spawn(async move {
        let job = async |lease: Lease| {
            let _body = slow_log.body("slow");
            lease.cancelled().await;
            assert_eq!(lease.reason(), Some(Reason::Lost(LossCause::Driver)));
            pass(wind_down).await;
            Ok::<_, Infallible>(())
        };
        slow_locker.run("slow", job).await
    });
    log.wait_for("slow start", 1).await;
    let idle = Member::on(&locker, "slow too", "idle", &log);
    let mut next = Member::join(&stage, quick("b"), "slow", &log);
    next.stands_by().await;

    memory.panic_driver("a");
    next.leads().await;
    assert_eq!(over(&lease).await, Some(Reason::Lost(LossCause::Driver)));
    assert!(matches!(slow.await.unwrap(), Err(RunError::Driver)));
    assert!(matches!(quick_one.outcome().await, Err(RunError::Driver)));
    assert!(matches!(idle.outcome().await, Err(RunError::Driver)));
    // Later runs fail as well, and closing does not hang.
    let late = locker.run("late", async |_: Lease| Ok::<_, Infallible>(())).await;
    assert!(matches!(late, Err(RunError::Driver)), "{late:?}");
    locker.close().await;
    assert!(memory.holders(&Name::from("quick")).is_empty());
    next.stop().await.unwrap();
    let lines = log.lines();
    let at = |line: &str| lines.iter().position(|it| it == line).unwrap();
    assert!(at("slow end") < at("b start") && at("quick end") < at("b start"), "{lines:?}");
}
