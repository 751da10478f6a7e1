//! Critical sections that one task is in at a time.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use leasehold::{Key, Kind, Lease, LockError, LossCause, Reason};
use tokio::task::JoinSet;

use crate::support::{AT_ONCE, now, on_every_store, quick, sleepy, until};

/// Where no test waits for so long unless something is wrong.
const LONG: Duration = Duration::from_secs(20);

const fn ms(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds)
}

/// L-01
#[tokio::test]
async fn a_lock_costs_nothing_before_it_is_acquired() {
    on_every_store(async |stage| {
        let locker = stage.locker(quick("a"));
        let lock = locker.lock("job");
        assert_eq!((lock.name().as_str(), lock.key()), ("job", Key::of(Kind::Lock, "job")));
        assert!(format!("{:?}", lock.clone()).contains("job"));
        assert_eq!(stage.sessions(), 0);
        let refused = locker.lock("").try_lock().await;
        assert!(matches!(refused, Err(LockError::Name(_))), "{refused:?}");
        let refused = locker.rw_lock("x".repeat(2000)).read().await;
        assert!(matches!(refused, Err(LockError::Name(_))), "{refused:?}");
        assert_eq!(stage.sessions(), 0);
    })
    .await;
}

/// L-02, L-07, L-15: what is held by a task of this Locker or by another Locker is not to be had; other names and other
/// kinds are.
#[tokio::test]
async fn a_try_gets_what_is_free_and_nothing_else() {
    on_every_store(async |stage| {
        let (a, b) = (stage.locker(quick("a")), stage.locker(quick("b")));
        let guard = a.lock("job").try_lock().await.unwrap().unwrap();
        assert!(guard.is_held() && guard.name().as_str() == "job");
        for locker in [&a, &b] {
            assert!(locker.lock("job").try_lock().await.unwrap().is_none());
            let body = async |_: Lease| -> Result<(), LockError> { panic!("it is held") };
            assert!(locker.lock("job").try_with(body).await.unwrap().is_none());
            locker.lock("other").try_lock().await.unwrap().unwrap().release().await.unwrap();
            locker.rw_lock("job").try_write().await.unwrap().unwrap().release().await.unwrap();
            let led = locker.run("job", async |_: Lease| Ok::<_, Infallible>(())).await;
            assert_eq!(led.unwrap(), Some(()));
        }
        guard.release().await.unwrap();
        b.lock("job").try_lock().await.unwrap().unwrap().release().await.unwrap();
    })
    .await;
}

/// L-03: pushed to another process, with or without a runtime around the guard, and to a task of the same Locker.
#[tokio::test]
async fn whoever_waits_gets_in_when_the_lock_is_released() {
    on_every_store(async |stage| {
        // Nobody polls.
        let (a, b) = (stage.locker(sleepy("a")), stage.locker(sleepy("b")));
        for round in 0..20 {
            let guard = a.lock("job").lock().await.unwrap();
            let waits = tokio::spawn({
                let lock = if round % 4 == 3 { a.lock("job") } else { b.lock("job") };
                async move { lock.lock().await.unwrap() }
            });
            if round % 4 == 3 {
                tokio::task::yield_now().await;
            } else {
                until("it waits", || stage.waiters_of(Kind::Lock, "job").is_none_or(|waiters| waiters == 1))
                    .await;
                // Where the store does not tell, a request that is answered comes after it.
                b.lock("other").lock().await.unwrap().release().await.unwrap();
            }
            match round % 3 {
                0 => guard.release().await.unwrap(),
                1 => drop(guard),
                _ => std::thread::spawn(|| drop(guard)).join().unwrap(),
            }
            let since = now();
            let other = waits.await.unwrap();
            assert!(since.elapsed() < AT_ONCE, "round {round}: {:?}", since.elapsed());
            other.release().await.unwrap();
        }
    })
    .await;
}

/// L-03: in the order in which they came.
#[tokio::test]
async fn tasks_of_one_locker_are_served_in_their_order() {
    on_every_store(async |stage| {
        let locker = stage.locker(quick("a"));
        let held = locker.lock("job").lock().await.unwrap();
        let order = Arc::new(std::sync::Mutex::new(Vec::new()));
        let mut tasks = JoinSet::new();
        for n in 0..10 {
            let (lock, order) = (locker.lock("job"), Arc::clone(&order));
            tasks.spawn(async move {
                let guard = lock.lock_timeout(LONG).await.unwrap();
                order.lock().unwrap().push(n);
                drop(guard);
            });
            tokio::task::yield_now().await;
        }
        held.release().await.unwrap();
        tasks.join_all().await;
        assert_eq!(*order.lock().unwrap(), (0..10).collect::<Vec<_>>());
    })
    .await;
}

/// L-04: never before the limit; a limit of zero is one try.
#[tokio::test]
async fn a_limit_ends_the_wait_with_an_error_that_says_who_is_in() {
    on_every_store(async |stage| {
        let (a, b) = (stage.locker(quick("a")), stage.locker(quick("b")));
        let guard = a.lock("job").lock().await.unwrap();
        for (locker, limit) in [(&a, 200), (&b, 200), (&a, 0), (&b, 0), (&a, 1000), (&b, 2000)] {
            let since = now();
            let late = locker.lock("job").lock_timeout(ms(limit)).await.unwrap_err();
            let LockError::Timeout { name, waited, holder } = &late else { panic!("{late:?}") };
            assert!(since.elapsed() >= ms(limit) && *waited >= ms(limit), "{waited:?} of {limit}");
            assert_eq!(name.as_str(), "job");
            // The store has to have had the time to tell.
            if limit >= 700 {
                assert!(holder.as_ref().is_some_and(|holder| holder.starts_with('a')), "{late}");
            }
        }
        // Nothing is left of those who gave up.
        stage.until_nobody_waits_of(Kind::Lock, "job").await;
        guard.release().await.unwrap();
        b.lock("job").lock_timeout(Duration::MAX).await.unwrap().release().await.unwrap();
    })
    .await;
}

/// L-06, L-08: the value and the body's own error come through, and whatever the end, the lock is free when it is told.
#[tokio::test]
async fn a_closure_form_releases_before_it_returns() {
    on_every_store(async |stage| {
        let (a, b) = (stage.locker(quick("a")), stage.locker(quick("b")));
        let lock = a.lock("job");
        let is_free = async || match b.lock("job").try_lock().await.unwrap() {
            Some(guard) => guard.release().await.is_ok(),
            None => false,
        };
        let held = async |lease: Lease| {
            assert!(lease.is_held() && b.lock("job").try_lock().await?.is_none());
            Ok::<_, LockError>(42)
        };
        assert_eq!(lock.with(held).await.unwrap(), 42);
        assert!(is_free().await);
        assert_eq!(lock.try_with(held).await.unwrap(), Some(42));
        assert!(is_free().await);
        assert_eq!(lock.with_timeout(LONG, held).await.unwrap(), 42);
        assert!(is_free().await);
        let own = lock.with(async |_: Lease| Err::<(), _>(anyhow::anyhow!("the body's own"))).await;
        assert_eq!(own.unwrap_err().to_string(), "the body's own");
        assert!(is_free().await);
        let panics = tokio::spawn({
            let lock = lock.clone();
            async move { lock.with(async |_: Lease| -> Result<(), LockError> { panic!("as planned") }).await }
        });
        assert!(panics.await.unwrap_err().is_panic());
        b.lock("job").lock_timeout(LONG).await.unwrap().release().await.unwrap();
        // The future of a closure form is dropped in the middle.
        let never = lock.with(async |_: Lease| {
            std::future::pending::<()>().await;
            Ok::<_, LockError>(())
        });
        assert!(tokio::time::timeout(ms(200), never).await.is_err());
        b.lock("job").lock_timeout(LONG).await.unwrap().release().await.unwrap();
    })
    .await;
}

/// L-09: what was released is free for everybody, 300 times of 300.
#[tokio::test]
async fn a_release_is_done_when_it_returns() {
    on_every_store(async |stage| {
        let (a, b) = (stage.locker(quick("a")), stage.locker(quick("b")));
        for (holder, other) in [(&a, &b), (&b, &a)].into_iter().cycle().take(300) {
            let guard = holder.lock("job").try_lock().await.unwrap().expect("the other one has released it");
            assert!(other.lock("job").try_lock().await.unwrap().is_none());
            guard.release().await.unwrap();
        }
    })
    .await;
}

/// L-09: also when there is no runtime any more.
#[test]
fn a_guard_that_is_dropped_outside_of_a_runtime_releases() {
    crate::support::on_every_store_outside_of_a_runtime(|stage| {
        let (a, b) = (stage.locker(quick("a")), stage.locker(quick("b")));
        let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let guard = runtime().block_on(a.lock("job").lock()).unwrap();
        drop(guard);
        runtime().block_on(async {
            b.lock("job").lock_timeout(LONG).await.unwrap().release().await.unwrap();
            a.close().await;
            b.close().await;
        });
    });
}

/// L-10, D04: whoever gives up at whatever instant leaves nothing.
#[tokio::test]
async fn an_acquire_or_release_that_is_dropped_leaves_nothing() {
    on_every_store(async |stage| {
        let (a, b) = (stage.locker(quick("a")), stage.locker(quick("b")));
        let mut entered = 0;
        for round in 0..500_u64 {
            let locker = if round % 2 == 0 { &a } else { &b };
            let (lock, rw) = (locker.lock("job"), locker.rw_lock("catalogue"));
            // Another instant in each round: none falls together with what the store is doing.
            let limit = Duration::from_micros(round * 37 % 3000);
            let all = async {
                let guard = match round % 5 {
                    0 => lock.lock().await,
                    1 => lock.lock_timeout(LONG).await,
                    2 => rw.read().await,
                    _ => rw.write().await,
                };
                entered += 1;
                guard.unwrap().release().await.unwrap();
            };
            tokio::time::timeout(limit, all).await.ok();
        }
        println!("{entered} of 500 got in");
        for locker in [&a, &b] {
            locker.lock("job").lock_timeout(LONG).await.unwrap().release().await.unwrap();
            locker.rw_lock("catalogue").write_timeout(LONG).await.unwrap().release().await.unwrap();
        }
        stage.until_nothing_is_held().await;
        a.close().await;
        b.close().await;
    })
    .await;
}

/// L-11, D01: a lock that is lost is never told as if it had been held.
#[tokio::test]
async fn a_lock_that_is_lost_is_told() {
    on_every_store(async |stage| {
        let locker = stage.locker(quick("a"));
        let lock = locker.lock("job");
        let guard = lock.lock().await.unwrap();
        stage.take_key_away("a", lock.key());
        guard.cancelled().await;
        assert_eq!(guard.reason(), Some(Reason::Lost(LossCause::Gone)));
        let told = guard.release().await;
        assert!(matches!(told, Err(LockError::Lost { cause: LossCause::Gone })), "{told:?}");

        let lost = lock.with(async |lease: Lease| {
            stage.take_key_away("a", lock.key());
            lease.cancelled().await;
            Ok::<_, LockError>("not to be seen")
        });
        assert!(matches!(lost.await, Err(LockError::Lost { .. })));

        // Not by a heartbeat, but by the release itself.
        let sleepy = stage.locker(quick("b").heartbeat_interval(Duration::from_mins(1)));
        let guard = sleepy.lock("job").lock().await.unwrap();
        stage.take_key_away("b", lock.key());
        let told = guard.release().await;
        assert!(matches!(told, Err(LockError::Lost { .. })), "{told:?}");
        // The Locker goes on.
        lock.lock_timeout(LONG).await.unwrap().release().await.unwrap();
    })
    .await;
}

/// L-11: a body that does not stop after the loss is dropped at the end of the grace.
#[tokio::test]
async fn a_body_that_ignores_a_loss_is_dropped() {
    on_every_store(async |stage| {
        let locker = stage.locker(quick("a"));
        let lock = locker.lock("job");
        let lost = lock.with(async |_: Lease| {
            stage.take_key_away("a", lock.key());
            std::future::pending::<()>().await;
            Ok::<_, LockError>(())
        });
        assert!(matches!(lost.await, Err(LockError::Lost { .. })));
    })
    .await;
}

/// L-13, D14: eight tasks on three Lockers, with guards that are released, dropped, or lost in a panic.
#[tokio::test]
async fn everybody_gets_through_and_nobody_beside_another_one() {
    on_every_store(async |stage| {
        let lockers = ["a", "b", "c"].map(|who| stage.locker(quick(who)));
        let inside = Arc::new(AtomicUsize::new(0));
        let mut tasks = JoinSet::new();
        for task in 0..8 {
            let (lock, inside) = (lockers[task % 3].lock("job"), Arc::clone(&inside));
            tasks.spawn(async move {
                for round in 0..10 {
                    let body = async {
                        let guard = lock.lock_timeout(LONG).await.unwrap();
                        assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two are in");
                        tokio::task::yield_now().await;
                        assert_eq!(inside.fetch_sub(1, Ordering::SeqCst), 1);
                        guard
                    };
                    let guard = body.await;
                    match (task + round) % 3 {
                        0 => guard.release().await.unwrap(),
                        1 => drop(guard),
                        _ => {
                            let panics = tokio::spawn(async move {
                                let _guard = guard;
                                panic!("as planned");
                            });
                            assert!(panics.await.unwrap_err().is_panic());
                        }
                    }
                }
            });
        }
        tasks.join_all().await;
        for locker in lockers {
            locker.close().await;
        }
        stage.until_nothing_is_held().await;
    })
    .await;
}

/// L-05: one that waits with a limit gets in beside those who come again and again.
#[tokio::test]
async fn a_steady_stream_of_others_starves_nobody() {
    on_every_store(async |stage| {
        let lockers = ["a", "b"].map(|who| stage.locker(quick(who)));
        let stop = leasehold::CancellationToken::new();
        let mut stream = JoinSet::new();
        for n in 0..6 {
            let (lock, stop) = (lockers[n % 2].lock("job"), stop.clone());
            stream.spawn(async move {
                let mut times = 0;
                while !stop.is_cancelled() {
                    lock.with(async |_: Lease| Ok::<_, LockError>(())).await.unwrap();
                    times += 1;
                }
                times
            });
        }
        let other = stage.locker(quick("c"));
        for _ in 0..10 {
            other.lock("job").lock_timeout(LONG).await.unwrap().release().await.unwrap();
        }
        stop.cancel();
        let times = stream.join_all().await;
        println!("the others got in {times:?} times");
    })
    .await;
}

/// L-14: by two processes in opposite order.
#[tokio::test]
async fn two_that_wait_for_each_other_are_told_by_their_limit() {
    on_every_store(async |stage| {
        let (a, b) = (stage.locker(quick("a")), stage.locker(quick("b")));
        let one = a.lock("one").lock().await.unwrap();
        let two = b.lock("two").lock().await.unwrap();
        let (lock_two, lock_one) = (a.lock("two"), b.lock("one"));
        let (late_a, late_b) = tokio::join!(lock_two.lock_timeout(ms(500)), lock_one.lock_timeout(ms(500)));
        for (late, holder) in [(late_a, "b"), (late_b, "a")] {
            let Err(LockError::Timeout { holder: Some(told), .. }) = &late else { panic!("{late:?}") };
            assert!(told.starts_with(holder), "{told}");
        }
        one.release().await.unwrap();
        two.release().await.unwrap();
    })
    .await;
}

/// L-12: whoever waits is told when the Locker is closed, whoever is in is told to stop; nobody enters any more.
#[tokio::test]
async fn closing_tells_those_who_wait_and_waits_for_those_who_are_in() {
    on_every_store(async |stage| {
        let (a, b) = (stage.locker(quick("a")), stage.locker(quick("b")));
        let held = b.lock("job").lock().await.unwrap();
        let own = a.lock("own").lock().await.unwrap();
        let waits = |name: &'static str| {
            let lock = a.lock(name);
            tokio::spawn(async move { lock.lock().await })
        };
        let (elsewhere, here) = (waits("job"), waits("own"));
        a.lock("after").lock().await.unwrap().release().await.unwrap();
        let closing = tokio::spawn({
            let a = a.clone();
            async move { a.close().await }
        });
        assert!(matches!(elsewhere.await.unwrap(), Err(LockError::Closed)));
        assert!(matches!(here.await.unwrap(), Err(LockError::Closed)));
        own.cancelled().await;
        assert_eq!(own.reason(), Some(Reason::Closed));
        assert!(own.is_held() && !closing.is_finished());
        own.release().await.unwrap();
        closing.await.unwrap();
        assert!(matches!(a.lock("job").try_lock().await, Err(LockError::Closed)));
        assert!(matches!(a.lock("job").lock().await, Err(LockError::Closed)));
        held.release().await.unwrap();
        b.close().await;
        stage.until_nothing_is_held().await;
    })
    .await;
}

/// F-41: so many names, and no more; queues of one name count once.
#[tokio::test]
async fn there_is_a_limit_to_the_names_of_a_locker() {
    on_every_store(async |stage| {
        let locker = stage.locker(quick("a").max_held(2));
        let one = locker.lock("one").lock().await.unwrap();
        let two = locker.rw_lock("two").read().await.unwrap();
        let more = locker.rw_lock("two").read().await.unwrap();
        let none = locker.lock("three").lock().await;
        assert!(matches!(none, Err(LockError::TooManyNames { max_held: 2 })), "{none:?}");
        locker.run("four", async |_: Lease| Ok::<_, Infallible>(())).await.unwrap_err();
        drop((one, two, more));
        locker.lock("three").lock().await.unwrap().release().await.unwrap();
    })
    .await;
}

/// L-04, D04: the store does not answer: a limit ends the wait all the same, a try ends at the query timeout, and nothing
/// is left of either.
#[cfg(all(unix, feature = "postgres"))]
#[tokio::test]
async fn a_store_that_does_not_answer_keeps_nobody_beyond_the_limit() {
    let cluster = crate::support::postgres::Cluster::new();
    let locker = |who| leasehold::Locker::postgres(cluster.options(), quick(who)).unwrap();
    let (a, b) = (locker("a"), locker("b"));
    a.lock("other").lock().await.unwrap().release().await.unwrap();
    let frozen = cluster.freeze_all();
    let late = a.lock("job").lock_timeout(ms(300)).await.unwrap_err();
    assert!(matches!(late, LockError::Timeout { .. }), "{late:?}");
    let late = a.lock("another").try_lock().await.unwrap_err();
    assert!(matches!(late, LockError::Unanswered { .. }), "{late:?}");
    drop(frozen);
    for name in ["job", "another", "other"] {
        b.lock(name).lock_timeout(LONG).await.unwrap().release().await.unwrap();
    }
    a.close().await;
    b.close().await;
    let rows = || cluster.admin().advisory_rows();
    crate::support::eventually("nothing is left", rows, Vec::is_empty).await;
}
