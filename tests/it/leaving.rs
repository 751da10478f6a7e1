//! Closing, dropping, cancelling: nothing is left behind.

use std::convert::Infallible;
use std::time::Duration;

use leasehold::{CancellationToken, Error, Lease, Memory, Name, Reason, State};
use tokio::sync::oneshot;

use crate::support::{
    AT_ONCE, Log, Member, Stage, now, on_every_store, on_every_store_outside_of_a_runtime, quick, sleepy,
    until,
};

/// F-25: a leader, a standby and a job that is slow to stop; and runs that come later.
#[tokio::test]
async fn close_waits_for_the_jobs_and_leaves_nothing() {
    on_every_store(async |stage| {
        let log = Log::default();
        let mut other = Member::join(stage, quick("other"), "led by the other", &log);
        other.leads().await;
        let locker = stage.locker(quick("a"));
        let mut leader = Member::on(&locker, "job", "leader", &log);
        let lease = leader.leads().await;
        let standby = Member::on(&locker, "led by the other", "standby", &log);
        standby.stands_by().await;
        let slow = tokio::spawn({
            let (locker, log) = (locker.clone(), log.clone());
            async move {
                let job = async |lease: Lease| {
                    let _body = log.body("slow");
                    lease.cancelled().await;
                    assert_eq!(lease.reason(), Some(Reason::Closed));
                    for _ in 0..3 {
                        assert!(lease.check().await);
                    }
                    Ok::<_, Infallible>(())
                };
                locker.run("slow job", job).await
            }
        });
        log.wait_for("slow start", 1).await;

        locker.close().await;
        log.write("closed");
        assert!(stage.is_free("job") && stage.is_free("slow job"));
        assert_eq!(lease.reason(), Some(Reason::Closed));
        assert_eq!(leader.outcome().await.unwrap(), None);
        assert_eq!(standby.outcome().await.unwrap(), None);
        assert_eq!(slow.await.unwrap().unwrap(), None);
        let late = locker.run("job", async |_: Lease| {
            log.write("late");
            Ok::<_, Infallible>(())
        });
        assert_eq!(late.await.unwrap(), None);
        assert!(matches!(locker.step_down("job").await, Err(Error::Closed)));
        until("its session is gone", || stage.sessions() == 1).await;
        locker.close().await;
        other.stop().await.unwrap();
        let lines = log.lines();
        let closed = lines.iter().position(|line| line == "closed").unwrap();
        assert!(lines[..closed].contains(&"slow end".to_owned()), "{lines:?}");
        assert!(lines[..closed].contains(&"leader end".to_owned()), "{lines:?}");
        assert!(!lines.contains(&"standby start".to_owned()) && !lines.contains(&"late".to_owned()));
    })
    .await;
}

/// F-25: a job that closes its own Locker is not waited for by itself.
#[tokio::test]
async fn close_can_be_called_from_inside_of_a_job() {
    on_every_store(async |stage| {
        let locker = stage.locker(quick("a"));
        let closes = async |lease: Lease| {
            locker.close().await;
            assert_eq!(lease.reason(), Some(Reason::Closed));
            Ok::<_, Infallible>(())
        };
        assert_eq!(locker.run("job", closes).await.unwrap(), None);
        assert!(stage.is_free("job"));
    })
    .await;
}

/// F-26: a run keeps the session; when it has ended, and the last handle is gone, so is the session.
#[tokio::test]
async fn dropping_the_last_handle_ends_the_session() {
    on_every_store(async |stage| {
        let locker = stage.locker(quick("a"));
        let run = {
            let candidate = locker.candidate("job");
            let job = |lease: Lease| async move { Ok::<_, Infallible>(lease) };
            tokio::spawn(candidate.run(job))
        };
        let clone = locker.clone();
        drop(locker);
        let lease = run.await.unwrap().unwrap().unwrap();
        assert!(stage.is_free("job"));
        assert_eq!(stage.sessions(), 1);
        drop(clone);
        until("its session is gone", || stage.sessions() == 0).await;
        // A lease that somebody kept keeps nothing.
        assert!(!lease.is_held() && !lease.check().await);
    })
    .await;
}

/// F-26: as a leader, and as a standby.
#[test]
fn dropping_the_callers_runtime_leaves_nothing() {
    on_every_store_outside_of_a_runtime(|stage| {
        let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let (log, leading, standing_by, third) = (Log::default(), runtime(), runtime(), runtime());
        let (a, b, c) = (stage.locker(quick("a")), stage.locker(quick("b")), stage.locker(sleepy("c")));
        leading.block_on(async {
            let mut member = Member::on(&a, "job", "a", &log);
            member.leads().await;
        });
        standing_by.block_on(async { Member::on(&b, "job", "b", &log).stands_by().await });
        drop((a, b));
        drop(standing_by);
        third.block_on(async {
            until("one session is left", || stage.sessions() == 1).await;
            let mut next = Member::on(&c, "job", "c", &log);
            next.stands_by().await;
            // A runtime must not be dropped inside of another.
            std::thread::spawn(|| drop(leading)).join().unwrap();
            next.leads().await;
            assert_eq!(log.lines(), ["a start", "a end", "c start"]);
            next.stop().await.unwrap();
            drop(c);
            until("no session is left", || stage.sessions() == 0).await;
        });
        assert!(stage.is_free("job"));
    });
}

/// F-27, D20: between two polls; its job is never called.
#[tokio::test]
async fn a_standby_that_is_cancelled_returns_at_once() {
    on_every_store(async |stage| {
        let log = Log::default();
        let mut leader = Member::join(stage, quick("a"), "job", &log);
        let lease = leader.leads().await;
        for _ in 0..20 {
            let standby = Member::join(stage, sleepy("b"), "job", &log);
            standby.stands_by().await;
            let since = now();
            assert_eq!(standby.stop().await.unwrap(), None);
            assert!(since.elapsed() < AT_ONCE);
        }
        stage.until_nobody_waits("job").await;
        assert!(lease.check().await);
        leader.stop().await.unwrap();
        assert_eq!(log.lines(), ["a start", "a end"]);
    })
    .await;
}

/// F-27, D20: dropped at its first await points; whatever was granted meanwhile is free again.
#[tokio::test]
async fn a_run_that_is_dropped_at_any_time_leaves_nothing() {
    on_every_store(async |stage| {
        let locker = stage.locker(sleepy("a"));
        let log = Log::default();
        for polls in 0..100 {
            let member = Member::on(&locker, "job", "a", &log);
            for _ in 0..polls {
                tokio::task::yield_now().await;
            }
            member.abort().await;
        }
        stage.until_free("job").await;
        stage.until_nobody_waits("job").await;
        // Nothing of them is in the way of another candidate.
        let mut other = Member::join(stage, sleepy("b"), "job", &log);
        other.leads().await;
        other.stop().await.unwrap();
        log.assert_one_at_a_time();
    })
    .await;
}

/// F-27, D20: connecting to a black hole; with a statement in flight, in both directions.
#[tokio::test]
async fn a_standby_that_is_cancelled_while_the_store_is_silent_returns_at_once() {
    let (memory, log) = (Memory::new(), Log::default());
    let stage = Stage::Memory(memory.clone());
    let name = Name::from("job");
    let mut leader = Member::join(&stage, quick("a"), "job", &log);
    leader.leads().await;

    memory.partition("b");
    let standby = Member::join(&stage, sleepy("b"), "job", &log);
    until("it stands by", || standby.locker.state("job") == State::Standby).await;
    let since = now();
    assert_eq!(standby.stop().await.unwrap(), None);
    assert!(since.elapsed() < AT_ONCE);
    memory.heal("b");

    let delay = Duration::from_millis(800);
    for (before, after) in [(delay, Duration::ZERO), (Duration::ZERO, delay)] {
        let locker = stage.locker(sleepy("c"));
        locker.step_down("a name that nobody leads").await.unwrap();
        let connected = memory.statements("c");
        memory.slow("c", before, after);
        let standby = Member::on(&locker, "job", "c", &log);
        if after.is_zero() {
            until("it stands by", || locker.state("job") == State::Standby).await;
        } else {
            until("its question has arrived", || memory.statements("c") > connected).await;
        }
        let since = now();
        assert_eq!(standby.stop().await.unwrap(), None);
        assert!(since.elapsed() < delay);
        memory.slow("c", Duration::ZERO, Duration::ZERO);
        until("nobody waits", || memory.waiters(&name) == 0).await;
        locker.close().await;
    }
    leader.stop().await.unwrap();
    assert_eq!(log.lines(), ["a start", "a end"]);
}

/// D20: cancelled before it started, and when it leads: a job that was called was told, and nothing else was called.
#[tokio::test]
async fn a_run_that_is_to_stop_before_it_starts_does_not_start() {
    on_every_store(async |stage| {
        let locker = stage.locker(quick("a"));
        let shutdown = CancellationToken::new();
        shutdown.cancel();
        let (called, was_called) = oneshot::channel::<()>();
        let mut called = Some(called);
        let run = locker.candidate("job").until(shutdown).run(|_: Lease| {
            called.take();
            std::future::ready(Ok::<_, Infallible>(()))
        });
        assert_eq!(run.await.unwrap(), None);
        assert!(called.is_some());
        drop(was_called);
        assert!(stage.is_free("job"));
        locker.close().await;
    })
    .await;
}
