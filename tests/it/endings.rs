//! How a term ends while it is held: the job first, then the lease, then the next leader's job.

use std::convert::Infallible;
use std::future;
use std::time::Duration;

use leasehold::{CancellationToken, Lease, Locker, Reason, RunError, State};
use tokio::sync::{Notify, oneshot};

use crate::support::log::Body;
use crate::support::{AT_ONCE, Log, Member, Stage, block, now, on_every_store, quick, sleepy, until};

/// F-12, D07: a job that winds down under its lease for many heartbeats, and a standby that does not get in.
#[tokio::test]
async fn a_shutdown_keeps_the_lease_until_the_job_has_returned() {
    on_every_store(async |stage| {
        let (log, gate) = (Log::default(), Notify::new());
        let (locker, shutdown) = (stage.locker(quick("a")), CancellationToken::new());
        let (told, was_told) = oneshot::channel();
        let mut told = Some(told);
        let run = locker.candidate("job").until(shutdown.clone()).run(|lease: Lease| {
            let (log, gate, told) = (&log, &gate, told.take());
            async move {
                let _body = log.body("a");
                lease.cancelled().await;
                told.unwrap().send(lease.clone()).unwrap();
                gate.notified().await;
                assert!(lease.is_held());
                Ok::<_, Infallible>(5)
            }
        });
        let mut standby = None;
        let rest = async {
            log.wait_for("a start", 1).await;
            standby = Some(Member::join(stage, quick("b"), "job", &log));
            standby.as_ref().unwrap().stands_by().await;
            shutdown.cancel();
            let lease = was_told.await.unwrap();
            assert_eq!(lease.reason(), Some(Reason::Shutdown));
            until("it is draining", || locker.state("job") == State::Draining).await;
            // Several polls of the standby, and renewals of the lease, go by.
            for _ in 0..5 {
                let deadline = lease.deadline();
                until("a heartbeat", || lease.deadline() > deadline).await;
                assert!(lease.check().await && !stage.is_free("job"));
            }
            gate.notify_one();
        };
        let (outcome, ()) = tokio::join!(run, rest);
        assert_eq!(outcome.unwrap(), None);
        let mut standby = standby.unwrap();
        standby.leads().await;
        standby.stop().await.unwrap();
        assert_eq!(log.lines(), ["a start", "a end", "b start", "b end"]);
    })
    .await;
}

/// F-13, D20: free when run has returned.
#[tokio::test]
async fn an_error_of_the_job_releases_and_is_returned() {
    on_every_store(async |stage| {
        let locker = stage.locker(sleepy("a"));
        let outcome = locker.run("job", async |_: Lease| Err::<(), _>("out of disk")).await;
        assert!(stage.is_free("job"));
        assert!(matches!(outcome, Err(RunError::Job("out of disk"))), "{outcome:?}");
        assert_eq!(outcome.unwrap_err().to_string(), "the job failed: out of disk");
    })
    .await;
}

/// F-14, D20: free when run has returned.
#[tokio::test]
async fn a_value_of_the_job_releases_and_is_returned_and_the_job_is_not_called_again() {
    on_every_store(async |stage| {
        let locker = stage.locker(sleepy("a"));
        let (mut calls, mut kept) = (0, None);
        let outcome = locker
            .run("job", |lease: Lease| {
                calls += 1;
                kept = Some(lease);
                future::ready(Ok::<_, Infallible>(calls))
            })
            .await;
        assert!(stage.is_free("job"));
        assert_eq!((outcome.unwrap(), calls), (Some(1), 1));
        let lease = kept.unwrap();
        assert_eq!((lease.is_held(), lease.reason()), (false, Some(Reason::Ended)));
        assert!(!lease.check().await);
        assert_eq!(locker.state("job"), State::Ended);
    })
    .await;
}

/// How a body ends that is not over with one poll.
struct SlowBody(#[expect(dead_code, reason = "dropped last")] Body);

impl Drop for SlowBody {
    fn drop(&mut self) {
        // Several times as long as a hand-over takes, on a thread of its own.
        block(Duration::from_millis(50));
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Returns,
    Fails,
    Panics,
    Dropped,
    Shutdown,
    StepDown,
    StepDownFromOutside,
    Ineligible,
    Close,
}

/// F-17: on each path, for a job whose future is slow to drop and one that winds down where it is asked to stop.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_standby_starts_only_after_the_body_of_the_leader_has_ended() {
    on_every_store(async |stage| {
        for end in [
            End::Returns,
            End::Fails,
            End::Panics,
            End::Dropped,
            End::Shutdown,
            End::StepDown,
            End::StepDownFromOutside,
            End::Ineligible,
            End::Close,
        ] {
            ends_before_the_next_starts(stage, end).await;
        }
    })
    .await;
}

async fn ends_before_the_next_starts(stage: &Stage, end: End) {
    let (log, name) = (Log::default(), format!("{end:?}"));
    let locker = stage.locker(quick("a"));
    let (shutdown, go) = (CancellationToken::new(), CancellationToken::new());
    let (eligible, is_eligible) = tokio::sync::watch::channel(true);
    let candidate = locker.candidate(&name).until(shutdown.clone()).eligible(is_eligible);
    let leader = tokio::spawn({
        let (log, go) = (log.clone(), go.clone());
        async move {
            let job = async |lease: Lease| {
                let _body = SlowBody(log.body("a"));
                go.cancelled().await;
                match end {
                    End::Returns => return Ok(()),
                    End::Fails => return Err("no"),
                    End::Panics => std::panic::resume_unwind(Box::new("no")),
                    End::Dropped => future::pending().await,
                    End::StepDown => lease.step_down(),
                    End::StepDownFromOutside | End::Shutdown | End::Ineligible | End::Close => {}
                }
                lease.cancelled().await;
                // The wind-down lasts for a few answers of the store.
                for _ in 0..3 {
                    assert!(lease.check().await, "{end:?}: held while it winds down");
                }
                Ok(())
            };
            candidate.run(job).await
        }
    });
    log.wait_for("a start", 1).await;
    let mut standby = Member::join(stage, quick("b"), &name, &log);
    standby.stands_by().await;
    go.cancel();
    match end {
        End::Dropped => leader.abort(),
        End::Shutdown => shutdown.cancel(),
        End::StepDownFromOutside => standby.locker.step_down(&name).await.unwrap(),
        End::Ineligible => drop(eligible.send(false)),
        End::Close => locker.close().await,
        End::Returns | End::Fails | End::Panics | End::StepDown => {}
    }
    standby.leads().await;
    shutdown.cancel();
    let outcome = leader.await;
    match end {
        End::Returns => assert_eq!(outcome.unwrap().unwrap(), Some(())),
        End::Fails => assert!(matches!(outcome.unwrap(), Err(RunError::Job("no")))),
        End::Panics => assert!(outcome.unwrap_err().is_panic()),
        End::Dropped => assert!(outcome.unwrap_err().is_cancelled()),
        _ => assert_eq!(outcome.unwrap().unwrap(), None, "{end:?}"),
    }
    standby.stop().await.unwrap();
    assert_eq!(log.lines(), ["a start", "a end", "b start", "b end"], "{end:?}");
}

/// D12: a job that fails or panics at once is called once, not in a loop, and a standby leads at once.
#[tokio::test]
async fn a_job_that_dies_at_once_gives_way_to_a_standby() {
    on_every_store(async |stage| {
        for panics in [false, true] {
            let (log, name) = (Log::default(), format!("job that panics: {panics}"));
            let (leader, standby) = (stage.locker(quick("a")), stage.locker(sleepy("b")));
            let (of_task, task_log, task_name) = (leader.clone(), log.clone(), name.clone());
            let fatal = async move {
                let job = async |_: Lease| {
                    let _body = task_log.body("a");
                    task_log.wait_for("b waits", 1).await;
                    if panics { std::panic::resume_unwind(Box::new("no")) } else { Err::<(), _>("no") }
                };
                of_task.run(&task_name, job).await
            };
            let died = tokio::spawn(fatal);
            log.wait_for("a start", 1).await;
            let mut next = Member::on(&standby, &name, "b", &log);
            next.stands_by().await;
            let since = now();
            log.write("b waits");
            next.leads().await;
            assert!(since.elapsed() < AT_ONCE);
            match died.await {
                Ok(outcome) => assert!(!panics && matches!(outcome, Err(RunError::Job("no")))),
                Err(error) => assert!(panics && error.is_panic()),
            }
            next.stop().await.unwrap();
            assert_eq!(log.lines(), ["a start", "b waits", "a end", "b start", "b end"]);
            close_both(&leader, &standby).await;
        }
    })
    .await;
}

async fn close_both(one: &Locker, other: &Locker) {
    tokio::join!(one.close(), other.close());
}
