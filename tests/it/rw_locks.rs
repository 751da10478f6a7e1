//! Critical sections with many readers or one writer.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
use std::time::Duration;

use leasehold::{CancellationToken, Kind, Lease, LockError, TokenError};
use tokio::task::JoinSet;

use crate::support::{AT_ONCE, now, on_every_store, quick, sleepy, until};

/// Where no test waits for so long unless something is wrong.
const LONG: Duration = Duration::from_secs(20);

/// L-16: readers of one Locker and of several at once; a writer alone; no upgrade through the session that they share.
#[tokio::test]
async fn many_read_or_one_writes() {
    on_every_store(async |stage| {
        let (a, b) = (stage.locker(quick("a")), stage.locker(quick("b")));
        let (here, there) = (a.rw_lock("catalogue"), b.rw_lock("catalogue"));
        let mut readers = Vec::new();
        for lock in [&here, &here, &there, &there, &here] {
            readers.push(lock.try_read().await.unwrap().expect("nobody writes"));
        }
        // One after the other, until nobody of either Locker reads.
        while let Some(reader) = readers.pop() {
            for lock in [&here, &there] {
                assert!(lock.try_write().await.unwrap().is_none(), "{} still read", readers.len() + 1);
            }
            assert!(reader.is_held());
            reader.release().await.unwrap();
        }
        let writer = here.try_write().await.unwrap().expect("nobody is in");
        for lock in [&here, &there] {
            assert!(lock.try_read().await.unwrap().is_none());
            assert!(lock.try_write().await.unwrap().is_none());
        }
        assert!(writer.fencing_token().await.is_ok());
        writer.release().await.unwrap();
        let reader = there.try_read().await.unwrap().unwrap();
        let none = reader.fencing_token().await;
        assert!(matches!(none, Err(TokenError::Refused { .. })) && reader.is_held(), "{none:?}");
        drop(reader);
        let sum = here.with_read(async |_: Lease| Ok::<_, LockError>(1)).await.unwrap()
            + there.with_write(async |_: Lease| Ok::<_, LockError>(2)).await.unwrap();
        assert_eq!(sum, 3);
    })
    .await;
}

/// L-16, L-03: whoever waits gets in when the last one in its way leaves, all readers together.
#[tokio::test]
async fn readers_and_writers_wake_each_other() {
    on_every_store(async |stage| {
        let (a, b) = (stage.locker(sleepy("a")), stage.locker(sleepy("b")));
        let (here, there) = (a.rw_lock("catalogue"), b.rw_lock("catalogue"));
        for _ in 0..5 {
            let readers = [here.read().await.unwrap(), here.read().await.unwrap()];
            let waiting = tokio::spawn({
                let lock = there.clone();
                async move { lock.write().await.unwrap() }
            });
            let is_known = || stage.waiters_of(Kind::RwLock, "catalogue").is_none_or(|waiters| waiters == 1);
            until("the writer waits", is_known).await;
            b.lock("other").lock().await.unwrap().release().await.unwrap();
            let since = now();
            for reader in readers {
                reader.release().await.unwrap();
            }
            let writer = waiting.await.unwrap();
            assert!(since.elapsed() < AT_ONCE, "the writer: {:?}", since.elapsed());
            let mut reads = JoinSet::new();
            for lock in [&here, &here, &there, &there] {
                let lock = lock.clone();
                reads.spawn(async move { lock.read().await.unwrap() });
            }
            until("readers wait", || {
                stage.waiters_of(Kind::RwLock, "catalogue").is_none_or(|waiters| waiters == 1)
            })
            .await;
            a.lock("other").lock().await.unwrap().release().await.unwrap();
            let since = now();
            writer.release().await.unwrap();
            let all = reads.join_all().await;
            assert!(since.elapsed() < AT_ONCE, "the readers: {:?}", since.elapsed());
            for reader in all {
                assert!(reader.is_held());
                reader.release().await.unwrap();
            }
        }
    })
    .await;
}

/// L-17: readers of two Lockers that follow each other without a gap, and a writer of a third one.
#[tokio::test]
async fn overlapping_readers_do_not_starve_a_writer() {
    on_every_store(async |stage| {
        let lockers = ["a", "b"].map(|who| stage.locker(sleepy(who)));
        let (stop, reading) = (CancellationToken::new(), Arc::new(AtomicUsize::new(0)));
        let mut readers = JoinSet::new();
        for n in 0..6 {
            let (lock, stop, reading) =
                (lockers[n % 2].rw_lock("catalogue"), stop.clone(), Arc::clone(&reading));
            readers.spawn(async move {
                while !stop.is_cancelled() {
                    let guard = lock.read().await.unwrap();
                    let others = reading.fetch_add(1, Ordering::SeqCst);
                    // It stays until another one has come as well, if one comes.
                    let comes = async {
                        while reading.load(Ordering::SeqCst) <= others.max(1) && !stop.is_cancelled() {
                            tokio::task::yield_now().await;
                        }
                    };
                    tokio::time::timeout(Duration::from_millis(20), comes).await.ok();
                    reading.fetch_sub(1, Ordering::SeqCst);
                    drop(guard);
                }
            });
        }
        until("somebody reads", || reading.load(Ordering::SeqCst) > 0).await;
        let writer = stage.locker(sleepy("c"));
        for _ in 0..3 {
            let since = now();
            let guard = writer.rw_lock("catalogue").write_timeout(LONG).await.unwrap();
            assert_eq!(reading.load(Ordering::SeqCst), 0, "somebody reads beside the writer");
            assert!(since.elapsed() < AT_ONCE, "{:?}", since.elapsed());
            guard.release().await.unwrap();
        }
        stop.cancel();
        readers.join_all().await;
    })
    .await;
}

/// L-17: a writer that gives up lets the readers in that waited for it, at once.
#[tokio::test]
async fn a_writer_that_gives_up_is_in_nobodys_way() {
    on_every_store(async |stage| {
        let (a, b) = (stage.locker(sleepy("a")), stage.locker(sleepy("b")));
        let reader = a.rw_lock("catalogue").read().await.unwrap();
        let lock = b.rw_lock("catalogue");
        let late = lock.write_timeout(Duration::from_millis(300));
        let reads = async {
            let is_known = || stage.waiters_of(Kind::RwLock, "catalogue").is_none_or(|waiters| waiters == 1);
            until("the writer waits", is_known).await;
            let since = now();
            let other = stage.locker(sleepy("c")).rw_lock("catalogue").read_timeout(LONG).await.unwrap();
            (other, since.elapsed())
        };
        let (late, (other, waited)) = tokio::join!(late, reads);
        assert!(matches!(late, Err(LockError::Timeout { .. })), "{late:?}");
        assert!(waited < AT_ONCE, "{waited:?}");
        drop((reader, other));
        a.rw_lock("catalogue").write_timeout(LONG).await.unwrap().release().await.unwrap();
    })
    .await;
}

/// L-13, L-16: tasks of three Lockers that read and write; never a writer beside anybody.
#[tokio::test]
async fn everybody_gets_through_and_no_writer_beside_anybody() {
    on_every_store(async |stage| {
        let lockers = ["a", "b", "c"].map(|who| stage.locker(quick(who)));
        // Readers count up, a writer takes it far below.
        let inside = Arc::new(AtomicI64::new(0));
        let mut tasks = JoinSet::new();
        for task in 0..8 {
            let (lock, inside) = (lockers[task % 3].rw_lock("catalogue"), Arc::clone(&inside));
            tasks.spawn(async move {
                for round in 0..12 {
                    let reads = (task + round) % 4 != 0;
                    let (guard, weight) = if reads {
                        (lock.read_timeout(LONG).await.unwrap(), 1)
                    } else {
                        (lock.write_timeout(LONG).await.unwrap(), -1000)
                    };
                    let before = inside.fetch_add(weight, Ordering::SeqCst);
                    assert!(if reads { before >= 0 } else { before == 0 }, "{before} are in");
                    tokio::task::yield_now().await;
                    inside.fetch_sub(weight, Ordering::SeqCst);
                    if round % 2 == 0 { guard.release().await.unwrap() } else { drop(guard) }
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

/// L-17: a writer that waits is killed: readers are in its way no more as soon as the store has noticed.
#[tokio::test]
async fn a_killed_writer_keeps_nobody_out() {
    on_every_store(async |stage| {
        let (a, b) = (stage.locker(quick("a")), stage.locker(quick("b")));
        let reader = a.rw_lock("catalogue").read().await.unwrap();
        let writes = tokio::spawn({
            let lock = b.rw_lock("catalogue");
            async move { lock.write().await }
        });
        let is_known = || stage.waiters_of(Kind::RwLock, "catalogue").is_none_or(|waiters| waiters == 1);
        until("the writer waits", is_known).await;
        b.lock("other").lock().await.unwrap().release().await.unwrap();
        assert!(a.rw_lock("catalogue").try_read().await.unwrap().is_none(), "a writer waits");
        // Its task and its Locker are gone, and what is left of its session with them.
        writes.abort();
        assert!(writes.await.unwrap_err().is_cancelled());
        drop(b);
        let other = a.rw_lock("catalogue").read_timeout(LONG).await.unwrap();
        drop((reader, other));
    })
    .await;
}
