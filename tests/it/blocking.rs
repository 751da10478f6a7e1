//! Jobs that block their thread.

use std::convert::Infallible;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use leasehold::{Lease, Options, Reason, State};
use tokio::runtime::{Builder, Runtime};

use crate::support::{AT_ONCE, Log, Member, block, now, on_every_store_outside_of_a_runtime, quick, until};

fn one_thread() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

/// D21, F-33: for longer than the ttl, and twice as long as an answer is trusted.
#[test]
fn a_job_that_blocks_its_thread_keeps_its_lease() {
    on_every_store_outside_of_a_runtime(|stage| {
        let options: Options = quick("a").query_timeout(Duration::from_millis(500));
        let long = options.bounds().ttl * 3 / 2;
        let locker = stage.locker(options);
        let blocks = async |lease: Lease| {
            block(long);
            Ok::<_, Infallible>((lease.term(), lease.is_held(), lease.reason(), lease.check().await))
        };
        let outcome = one_thread().block_on(locker.run("job", blocks));
        assert_eq!(outcome.unwrap(), Some((1, true, None, true)));
    });
}

/// D19, F-16: while it blocks nothing of that name starts here, though the lease is free again and again.
#[test]
fn a_job_that_cannot_be_dropped_is_reported_and_not_started_again_beside_itself() {
    on_every_store_outside_of_a_runtime(|stage| {
        let (log, locker, other) = (Log::default(), stage.locker(quick("a")), stage.locker(quick("b")));
        let (unblock, blocked) = mpsc::channel::<()>();
        let job_log = log.clone();
        let of_thread = locker.clone();
        let stuck = thread::spawn(move || {
            let job = async |lease: Lease| {
                let _body = job_log.body("a");
                if lease.term() == 1 {
                    blocked.recv().unwrap();
                }
                // Not reached by the first term: it is dropped at its next await point.
                tokio::task::yield_now().await;
                job_log.write("a goes on");
                Ok::<_, Infallible>(lease.term())
            };
            one_thread().block_on(of_thread.run("job", job)).unwrap()
        });
        one_thread().block_on(async {
            log.wait_for("a start", 1).await;
            stage.take_away("a", "job");
            let overrun = || matches!(locker.state("job"), State::Overrun { .. });
            until("the job is reported", overrun).await;
            for _ in 0..3 {
                let mut member = Member::on(&other, "job", "b", &log);
                member.leads().await;
                member.stop().await.unwrap();
            }
            assert_eq!((log.count("a start"), log.count("b start")), (1, 3));
            assert!(overrun());
            unblock.send(()).unwrap();
        });
        assert_eq!(stuck.join().unwrap(), Some(2));
        let lines = log.lines();
        assert_eq!(lines[7..], ["a end", "a start", "a goes on", "a end"], "{lines:?}");
    });
}

/// F-25, F-37, D21: by the driver, since its run is not polled meanwhile; a job that blocks looks at its token.
#[test]
fn a_job_that_blocks_its_thread_is_told_to_stop() {
    on_every_store_outside_of_a_runtime(|stage| {
        for reason in [Reason::SteppedDown, Reason::Closed] {
            let (log, locker) = (Log::default(), stage.locker(quick("a")));
            let (job_log, of_thread) = (log.clone(), locker.clone());
            let blocking = thread::spawn(move || {
                let job = async |lease: Lease| {
                    let (_body, since) = (job_log.body("a"), now());
                    while !lease.cancellation().is_cancelled() && since.elapsed() < AT_ONCE {
                        block(Duration::from_millis(1));
                    }
                    job_log.write(&format!("a is told: {:?}", lease.reason()));
                    Ok::<_, Infallible>(())
                };
                one_thread().block_on(of_thread.run("job", job)).unwrap()
            });
            one_thread().block_on(async {
                log.wait_for("a start", 1).await;
                if reason == Reason::SteppedDown {
                    locker.step_down("job").await.unwrap();
                    log.wait_for("a end", 1).await;
                }
                locker.close().await;
            });
            let outcome = blocking.join().unwrap();
            assert_eq!(log.lines()[1], format!("a is told: {:?}", Some(reason)));
            assert_eq!(outcome, None);
        }
    });
}
