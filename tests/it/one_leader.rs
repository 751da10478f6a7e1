//! One leader at a time, and one candidate of a name on a Locker.

use std::convert::Infallible;
use std::time::Duration;

use leasehold::{Lease, RunError};

use crate::support::{AT_ONCE, Log, Member, now, on_every_store, quick, sleepy};

/// F-04, F-11: five Lockers of one process hand over forty times.
#[tokio::test]
async fn bodies_never_overlap_over_many_hand_overs() {
    on_every_store(async |stage| {
        let log = Log::default();
        let mut members = Vec::new();
        for who in ["a", "b", "c", "d", "e"] {
            let (locker, log) = (stage.locker(quick(who)), log.clone());
            members.push(tokio::spawn(async move {
                let mut terms = 0;
                let job = async |lease: Lease| {
                    let _body = log.body(lease.name().as_str());
                    assert!(lease.is_held());
                    tokio::task::yield_now().await;
                    Ok::<_, Infallible>(())
                };
                while terms < 8 {
                    assert!(locker.run("job", job).await.unwrap().is_some());
                    terms += 1;
                }
                locker.close().await;
            }));
        }
        for member in members {
            member.await.unwrap();
        }
        assert_eq!(log.assert_one_at_a_time(), 40);
    })
    .await;
}

/// F-04, F-11: leaders that are asked to step down again and again, while everybody else stands by.
#[tokio::test]
async fn bodies_never_overlap_when_leaders_step_down() {
    on_every_store(async |stage| {
        let log = Log::default();
        let members: Vec<_> =
            ["a", "b", "c"].into_iter().map(|who| Member::join(stage, quick(who), "job", &log)).collect();
        for round in 1..=10 {
            let starts = || log.lines().iter().filter(|line| line.ends_with("start")).count();
            crate::support::until("the next term", || starts() >= round).await;
            members[round % members.len()].locker.step_down("job").await.unwrap();
        }
        for member in members {
            assert_eq!(member.stop().await.unwrap(), None);
        }
        assert!(log.assert_one_at_a_time() >= 10);
    })
    .await;
}

/// F-05: with an hour between two attempts.
#[tokio::test]
async fn a_free_name_is_led_at_once() {
    on_every_store(async |stage| {
        let log = Log::default();
        let asked = now();
        let mut member = Member::join(stage, sleepy("a"), "job", &log);
        let lease = member.leads().await;
        assert!(asked.elapsed() < AT_ONCE);
        assert_eq!((lease.name().as_str(), lease.term(), lease.reason()), ("job", 1, None));
        assert!(lease.check().await && lease.remaining() > Duration::ZERO);
        member.stop().await.unwrap();
    })
    .await;
}

/// F-09, D22: by a clone, in another task, and from inside of the job itself; as a leader and as a standby.
#[tokio::test]
async fn a_second_run_of_a_name_on_a_locker_is_refused_at_once() {
    on_every_store(async |stage| {
        let log = Log::default();
        let refused = |outcome: Result<Option<()>, RunError<Infallible>>| {
            let Err(RunError::AlreadyRunning { name }) = outcome else { panic!("{outcome:?}") };
            assert_eq!(name.as_str(), "job");
        };
        let job = async |_: Lease| {
            log.write("second");
            Ok(())
        };

        let mut leader = Member::join(stage, sleepy("a"), "job", &log);
        let lease = leader.leads().await;
        refused(leader.locker.clone().run("job", job).await);
        assert!(lease.check().await && lease.reason().is_none());

        let standby = Member::join(stage, sleepy("b"), "job", &log);
        standby.stands_by().await;
        refused(standby.locker.clone().run("job", job).await);
        assert_eq!(standby.stop().await.unwrap(), None);
        assert_eq!(leader.stop().await.unwrap(), None);

        let locker = stage.locker(sleepy("c"));
        let within = async |lease: Lease| {
            refused(locker.run("job", job).await);
            let other = locker.run("other", async |_: Lease| Ok::<_, Infallible>(7)).await.unwrap();
            assert!(lease.is_held());
            Ok::<_, Infallible>(other)
        };
        assert_eq!(locker.run("job", within).await.unwrap(), Some(Some(7)));
        assert_eq!(log.lines(), ["a start", "a end"]);
    })
    .await;
}

/// F-10, D22: by return, error, panic, and drop of the run future; a hundred rounds each.
#[tokio::test]
async fn a_name_can_run_again_however_its_run_ended() {
    on_every_store(async |stage| {
        let locker = stage.locker(quick("a"));
        for round in 0..100 {
            let returned = locker.run("job", async |_: Lease| Ok::<_, Infallible>(round)).await;
            assert_eq!(returned.unwrap(), Some(round));

            let failed = locker.run("job", async |_: Lease| Err::<(), _>("no")).await;
            assert!(matches!(failed, Err(RunError::Job("no"))), "{failed:?}");

            let of_task = locker.clone();
            let panicked = tokio::spawn(async move {
                let job =
                    async |_: Lease| -> Result<(), Infallible> { std::panic::resume_unwind(Box::new("no")) };
                of_task.run("job", job).await
            });
            assert!(panicked.await.unwrap_err().is_panic());

            let (leads, led) = tokio::sync::oneshot::channel();
            let mut leads = Some(leads);
            let dropped = locker.run("job", |_: Lease| {
                leads.take().unwrap().send(()).unwrap();
                std::future::pending::<Result<(), Infallible>>()
            });
            tokio::select! {
                biased;
                it = dropped => panic!("{it:?}"),
                it = led => it.unwrap(),
            }
        }
        locker.close().await;
        assert!(stage.is_free("job"));
    })
    .await;
}
