//! What `health()` says, while everything that it speaks of is broken for real.

use std::convert::Infallible;
use std::sync::Mutex;
use std::time::Duration;

use leasehold::{CancellationToken, Health, Lease, Locker, Memory, Options, State, Trouble};
use tokio::sync::watch;

use crate::support::{AT_ONCE, Log, Member, eventually, now, on_every_store, quick, until};

/// Intervals that a busy machine does not stretch to three times their length.
fn calm(who: &str) -> Options {
    quick(who).retry_interval(Duration::from_millis(500))
}

/// Asks for the health; that takes no time, whatever the store does.
fn health(locker: &Locker) -> Health {
    let since = now();
    let health = locker.health();
    assert!(since.elapsed() < AT_ONCE, "{:?}", since.elapsed());
    health
}

/// F-43: with nobody, of a leader, of a standby, of one that is not eligible, and at the end; the last answer grows.
#[tokio::test]
async fn health_is_good_while_all_is_well() {
    on_every_store(async |stage| {
        let log = Log::default();
        let (a, b) = (stage.locker(calm("a")), stage.locker(calm("b")));
        assert_eq!((health(&a), a.last_answer()), (Health::default(), None));
        let mut leader = Member::on(&a, "job", "a", &log);
        let lease = leader.leads().await;
        let standby = Member::on(&b, "job", "b", &log);
        standby.stands_by().await;
        let (_eligible, never) = watch::channel(false);
        let (resting, stop) = (stage.locker(calm("c")), CancellationToken::new());
        let candidate = resting.candidate("job").eligible(never).until(stop.clone());
        let rests = tokio::spawn(candidate.run(async |_: Lease| Ok::<_, Infallible>(())));
        let first = [&a, &b].map(|locker| locker.last_answer().unwrap());
        until("both are answered after more than an interval", || {
            let last = [&a, &b].map(|locker| locker.last_answer().unwrap());
            last.iter().zip(first).all(|(last, first)| *last > first + Duration::from_millis(500))
        })
        .await;
        for locker in [&a, &b, &resting] {
            assert_eq!(health(locker).to_string(), "good");
        }
        assert!(lease.check().await);
        stop.cancel();
        assert_eq!(rests.await.unwrap().unwrap(), None);
        leader.stop().await.unwrap();
        standby.stop().await.unwrap();
        a.close().await;
        assert!(health(&a).is_good());
    })
    .await;
}

/// F-43: a job that does not look at its lease is a trouble from its deadline on, until it is dropped; on a paused
/// clock.
#[tokio::test(start_paused = true)]
async fn a_job_that_goes_on_past_its_deadline_is_a_trouble_until_it_is_dropped() {
    let (memory, dropped) = (Memory::new(), CancellationToken::new());
    // The job may go on for that long after the unanswered heartbeat, which is before the deadline.
    let options = Options::default().identity("a").stop_grace(Duration::from_secs(10));
    let locker = Locker::memory(&memory, options).unwrap();
    let seen = Mutex::new(String::new());
    let job = async |lease: Lease| {
        // The run ends when this does.
        let _guard = dropped.clone().drop_guard();
        memory.partition("a");
        tokio::time::sleep_until(lease.deadline() - Duration::from_millis(1)).await;
        assert!(locker.health().is_good());
        tokio::time::sleep(Duration::from_millis(2)).await;
        *seen.lock().unwrap() = locker.health().to_string();
        std::future::pending::<Result<(), Infallible>>().await
    };
    let run = locker.candidate("job").until(dropped.clone()).run(job);
    assert_eq!(tokio::time::timeout(Duration::from_mins(1), run).await.unwrap().unwrap(), None);
    assert_eq!(*seen.lock().unwrap(), "the job of \"job\" has not ended, 1ms past its deadline");
    assert!(locker.health().is_good());
}

/// F-43: one that holds the lease and waits out its takeover delay asks for nothing, and is in good health.
#[tokio::test(start_paused = true)]
async fn a_candidate_that_waits_out_its_takeover_delay_is_in_good_health() {
    let delay = Duration::from_mins(2);
    // Heartbeats that are further apart than three retry intervals and the query timeout.
    let options = Options::default().identity("a").heartbeat_interval(Duration::from_mins(1));
    let locker = Locker::memory(&Memory::new(), options.takeover_delay(delay)).unwrap();
    let run = locker.run("job", async |_: Lease| Ok::<_, Infallible>(()));
    let look = async {
        for _ in 0..110 {
            tokio::time::sleep(Duration::from_secs(1)).await;
            assert!(locker.health().is_good(), "{}", locker.health());
        }
        assert_eq!(locker.state("job"), State::Blocked);
    };
    let (led, ()) = tokio::join!(run, look);
    assert_eq!(led.unwrap(), Some(()));
}

/// F-43, F-42
#[tokio::test]
async fn a_panic_of_the_driver_is_bad_health() {
    let memory = Memory::new();
    let locker = Locker::memory(&memory, quick("a")).unwrap();
    let member = Member::on(&locker, "job", "a", &Log::default());
    until("it leads", || matches!(locker.state("job"), State::Leading { .. })).await;
    memory.panic_driver("a");
    let bad =
        eventually("it is told", || health(&locker), |health| health.troubles == [Trouble::Driver]).await;
    assert!(!bad.is_good());
    assert!(member.outcome().await.is_err());
}

/// On a real server, whose line is cut.
#[cfg(all(unix, feature = "postgres"))]
mod on_a_server {
    use std::sync::mpsc;
    use std::thread;

    use leasehold::Name;
    use tokio::runtime::Builder;

    use super::*;
    use crate::support::{Stage, sleepy};

    fn is_unanswered(health: &Health) -> bool {
        matches!(health.troubles[..], [Trouble::Unanswered { .. }])
    }

    /// F-43, D10: a standby that is cut off; and its health is good again when the line is.
    #[tokio::test]
    async fn a_standby_that_is_not_answered_is_in_bad_health() {
        let stage = Stage::postgres();
        let Stage::Postgres(postgres) = &stage else { unreachable!("it was made so") };
        let log = Log::default();
        let direct = Locker::postgres(postgres.database.options(), quick("leader")).unwrap();
        let mut leader = Member::on(&direct, "job", "leader", &log);
        leader.leads().await;
        let standby = Member::join(&stage, calm("a"), "job", &log);
        standby.stands_by().await;
        assert!(health(&standby.locker).is_good());
        postgres.proxy.cut();
        let bad =
            eventually("its health is bad", || health(&standby.locker), |health| !health.is_good()).await;
        assert!(is_unanswered(&bad), "{bad:?}");
        assert!(bad.to_string().starts_with("the store has not answered for "), "{bad}");
        assert!(health(&direct).is_good());
        postgres.proxy.heal();
        until("its health is good again", || health(&standby.locker).is_good()).await;
        leader.stop().await.unwrap();
        standby.stop().await.unwrap();
    }

    /// F-43: a server that was never there.
    #[tokio::test]
    async fn a_candidate_without_a_server_is_in_bad_health() {
        let log = Log::default();
        let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let target: sqlx::postgres::PgConnectOptions =
            format!("postgres://postgres@127.0.0.1:{closed}/postgres").parse().unwrap();
        let member = Member::on(&Locker::postgres(target, quick("a")).unwrap(), "job", "a", &log);
        until("its health is bad", || is_unanswered(&health(&member.locker))).await;
        assert_eq!(member.locker.last_answer(), None);
        let patient = Member::on(&Stage::files().locker(sleepy("b")), "job", "b", &log);
        assert!(health(&patient.locker).is_good());
        member.stop().await.unwrap();
        patient.stop().await.unwrap();
    }

    /// F-43, D06, D19: cut off while its job blocks its thread: first past its deadline, then past its grace. Nothing is
    /// started beside it, though the server is back, and nothing waits: neither health nor state nor lease.
    #[test]
    fn a_leader_whose_job_blocks_past_its_deadline_is_in_bad_health() {
        let stage = Stage::postgres();
        let Stage::Postgres(postgres) = &stage else { unreachable!("it was made so") };
        // It may go on for that long after the unanswered heartbeat, which is before the deadline.
        let (log, locker) = (Log::default(), stage.locker(quick("a").stop_grace(Duration::from_secs(2))));
        let (unblock, blocked) = mpsc::channel::<()>();
        let (job_log, of_thread) = (log.clone(), locker.clone());
        let stuck = thread::spawn(move || {
            let job = async |lease: Lease| {
                let _body = job_log.body("a");
                if lease.term() == 1 {
                    blocked.recv().unwrap();
                }
                // Not reached by the first term: it is dropped at its next await point.
                tokio::task::yield_now().await;
                Ok::<_, Infallible>(lease.term())
            };
            Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap()
                .block_on(of_thread.run("job", job))
                .unwrap()
        });
        Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
        log.wait_for("a start", 1).await;
        postgres.proxy.cut();
        let name = Name::from("job");
        let late = |health: &Health| matches!(&health.troubles[..], [Trouble::PastDeadline { name: of, .. }] if *of == name);
        let stuck = |health: &Health| matches!(&health.troubles[..], [Trouble::Overrun { name: of, .. }] if *of == name);
        let bad = eventually("it is past its deadline", || health(&locker), late).await;
        assert!(bad.to_string().contains("past its deadline"), "{bad}");
        let bad = eventually("it is past its grace", || health(&locker), stuck).await;
        assert!(bad.to_string().contains("blocks its thread"), "{bad}");
        until("the state says so too", || matches!(locker.state("job"), State::Overrun { .. })).await;
        postgres.proxy.heal();
        let direct = Locker::postgres(postgres.database.options(), quick("b")).unwrap();
        let mut other = Member::on(&direct, "job", "b", &log);
        other.leads().await;
        other.stop().await.unwrap();
        assert_eq!(log.count("a start"), 1);
        assert!(stuck(&health(&locker)), "{:?}", health(&locker));
        unblock.send(()).unwrap();
    });
        assert_eq!(stuck.join().unwrap(), Some(2));
        assert!(health(&locker).is_good(), "{}", health(&locker));
        assert_eq!(log.lines(), ["a start", "b start", "b end", "a end", "a start", "a end"]);
    }
}
