//! Nothing is left of a grant that nobody has: answers that are lost or late, acquires and releases that are given up, guards
//! that are dropped wherever.
//!
//! Every lock here has a ttl of minutes, which no test waits for: what goes, was undone.

use std::thread;
use std::time::Duration;

use leasehold::{LockError, Locker, Options};

use crate::support::redis::{Pause, Proxy, Server};
use crate::support::{eventually, pass, quick, until};

const LONG: Duration = Duration::from_secs(20);

/// A ttl that no test waits for.
const TTL: Duration = Duration::from_mins(10);

fn locker(url: &str, options: Options) -> Locker {
    Locker::at(url, options).unwrap()
}

async fn until_nothing_is_left(server: &Server) {
    let left = || server.keys("*").into_iter().filter(|key| !key.contains("{token:")).collect::<Vec<_>>();
    eventually("no key is left", left, Vec::is_empty).await;
}

/// Locks of all kinds, with their ttl: a lock, a writer, a reader.
async fn enter(locker: &Locker, what: usize) -> Result<leasehold::LockGuard, LockError> {
    match what % 3 {
        0 => locker.lock("job").ttl(TTL).lock_timeout(LONG).await,
        1 => locker.rw_lock("catalogue").ttl(TTL).write_timeout(LONG).await,
        _ => locker.rw_lock("catalogue").ttl(TTL).read_timeout(LONG).await,
    }
}

async fn try_enter(locker: &Locker, what: usize) -> Result<Option<leasehold::LockGuard>, LockError> {
    match what % 3 {
        0 => locker.lock("job").ttl(TTL).try_lock().await,
        1 => locker.rw_lock("catalogue").ttl(TTL).try_write().await,
        _ => locker.rw_lock("catalogue").ttl(TTL).try_read().await,
    }
}

/// How an answer does not come in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// Writes are held back, and carried out later.
    Pause,
    /// The server stands still.
    Halt,
    /// It has granted the lock, and the answer is lost.
    NoAnswer,
    /// It gets the second half of the request later.
    HalfRequest,
    /// It gets the request later.
    Cut,
}

const FAULTS: [Fault; 5] = [Fault::Pause, Fault::Halt, Fault::NoAnswer, Fault::HalfRequest, Fault::Cut];

impl Fault {
    fn begin(self, server: &Server, line: &Proxy) {
        match self {
            Self::Pause => server.pause(Pause::Writes, 10 * LONG),
            Self::Halt => server.stop(),
            Self::NoAnswer => line.cut_answers(),
            Self::HalfRequest => line.cut_in_request(),
            Self::Cut => line.cut(),
        }
    }

    fn end(self, server: &Server, line: &Proxy) {
        match self {
            Self::Pause => server.unpause(),
            Self::Halt => server.cont(),
            Self::NoAnswer | Self::HalfRequest | Self::Cut => line.heal(),
        }
    }
}

/// R-07, D29: an acquire that is given up at the query timeout fails; when the server answers again, the key goes without
/// anybody asking that Locker for anything, also long after the ttl of its session.
#[tokio::test]
async fn an_acquire_whose_answer_is_lost_leaves_nothing() {
    for fault in FAULTS {
        for what in 0..3 {
            let (server, is_long) = (Server::start(), what == 0 && fault == Fault::NoAnswer);
            let line = Proxy::to(server.port());
            let (a, b) = (locker(&line.url(), quick("a")), locker(&server.url(), quick("b")));
            for locker in [&a, &b] {
                locker.lock("warm").lock().await.unwrap().release().await.unwrap();
            }
            fault.begin(&server, &line);
            let failed = try_enter(&a, what).await;
            assert!(matches!(failed, Err(LockError::Unanswered { .. })), "{fault:?} {what}: {failed:?}");
            if fault == Fault::NoAnswer {
                assert!(!server.keys("*").is_empty(), "it has landed");
            }
            if is_long {
                pass(a.bounds().ttl).await;
            }
            fault.end(&server, &line);
            enter(&b, what)
                .await
                .unwrap_or_else(|error| panic!("{fault:?} {what}: {error}"))
                .release()
                .await
                .unwrap();
            until_nothing_is_left(&server).await;
            enter(&a, what).await.unwrap().release().await.unwrap();
            a.close().await;
            b.close().await;
            until_nothing_is_left(&server).await;
        }
    }
}

/// R-07, D29: a release whose answer is lost says so, and is done all the same when the server answers again; one of a guard
/// that is dropped, too. So are those of a Locker that has lost its session with what it held.
#[tokio::test]
async fn a_release_that_fails_is_done_when_the_server_answers() {
    for fault in FAULTS {
        for what in 0..3 {
            let server = Server::start();
            let line = Proxy::to(server.port());
            let (a, b) = (locker(&line.url(), quick("a")), locker(&server.url(), quick("b")));
            b.lock("warm").lock().await.unwrap().release().await.unwrap();
            let guard = enter(&a, what).await.unwrap();
            let dropped = a.lock("dropped").ttl(TTL).lock().await.unwrap();
            let held = a.lock("held").ttl(TTL).lock().await.unwrap();
            fault.begin(&server, &line);
            let released = guard.release().await;
            assert!(matches!(released, Err(LockError::Lost { .. })), "{fault:?} {what}: {released:?}");
            drop(dropped);
            until("the session is lost", || !held.is_held()).await;
            fault.end(&server, &line);
            for name in ["dropped", "held"] {
                b.lock(name).lock_timeout(LONG).await.unwrap().release().await.unwrap();
            }
            enter(&b, what)
                .await
                .unwrap_or_else(|error| panic!("{fault:?} {what}: {error}"))
                .release()
                .await
                .unwrap();
            until_nothing_is_left(&server).await;
            assert!(held.release().await.is_err());
            a.close().await;
            b.close().await;
        }
    }
}

/// R-07, D29: closing while the server says nothing ends; what is left goes when it speaks again, or with its ttl.
#[tokio::test]
async fn closing_ends_while_the_server_says_nothing() {
    for fault in FAULTS {
        let server = Server::start();
        let line = Proxy::to(server.port());
        let a = locker(&line.url(), quick("a"));
        let ttl = a.bounds().ttl;
        let guard = a.lock("job").lock().await.unwrap();
        let value = server.get("leasehold:{lock:job}:h");
        assert!(value.is_some());
        fault.begin(&server, &line);
        drop(guard);
        tokio::time::timeout(LONG, a.close()).await.expect("closing does not end");
        fault.end(&server, &line);
        // Nobody is there any more who could undo it sooner.
        if let Some(left) = server.pttl("leasehold:{lock:job}:h") {
            assert!(left <= ttl, "{fault:?}: {left:?}");
        }
        until_nothing_is_left(&server).await;
    }
}

/// R-07, D29: 500 acquires that are given up at any instant, over a line that is slow, and closed again and again.
#[tokio::test]
async fn five_hundred_acquires_that_are_given_up_leave_nothing() {
    let server = Server::start();
    let line = Proxy::to(server.port());
    line.delay(Duration::from_millis(1));
    let lockers = ["a", "b"].map(|who| locker(&line.url(), quick(who)));
    let mut entered = 0;
    for round in 0..500_usize {
        let limit = Duration::from_micros(round as u64 * 137 % 6_000);
        let entering = enter(&lockers[round % 2], round / 2);
        if let Ok(guard) = tokio::time::timeout(limit, entering).await {
            entered += 1;
            // The line may be closed meanwhile; either way it is gone.
            drop(guard.unwrap());
        }
        if round % 50 == 49 {
            line.close().await;
            line.heal();
            line.delay(Duration::from_millis(1));
        }
    }
    println!("{entered} of 500 got in");
    until_nothing_is_left(&server).await;
    for (what, locker) in (0..3).flat_map(|what| lockers.iter().map(move |locker| (what, locker))) {
        enter(locker, what).await.unwrap().release().await.unwrap();
    }
    for locker in lockers {
        locker.close().await;
    }
    until_nothing_is_left(&server).await;
}

/// R-07, D29: in a plain thread, after the end of its runtime, and while the server says nothing: without a panic, and the
/// key goes.
#[test]
fn a_guard_is_dropped_anywhere() {
    let server = Server::start();
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let outer = runtime();
    for what in 0..3 {
        let (inner, a) = (runtime(), locker(&server.url(), quick("a")));
        let guard = inner.block_on(enter(&a, what)).unwrap();
        drop(inner);
        thread::spawn(move || drop(guard)).join().unwrap();
        outer.block_on(until_nothing_is_left(&server));

        let inner = runtime();
        let guard = inner.block_on(enter(&a, what)).unwrap();
        inner.shutdown_background();
        server.pause(Pause::Writes, 10 * LONG);
        drop((guard, a));
        server.unpause();
        outer.block_on(until_nothing_is_left(&server));
    }
}

/// what the server refused in the middle of a script is undone: here it may set keys, and not clear the queue.
#[tokio::test]
async fn a_grant_that_ends_in_an_error_is_undone() {
    let server = Server::start();
    server.user("app", "secret", &["~*", "&*", "+@all", "-zrem"]);
    let a = locker(&server.url_of("app", "secret"), quick("a"));
    let b = locker(&server.url(), quick("b"));
    for what in 0..2 {
        // One who waits, so that its place in the queue is to be cleared.
        let failed = match what {
            0 => a.lock("job").ttl(TTL).lock_timeout(Duration::from_secs(1)).await.unwrap_err(),
            _ => a.rw_lock("catalogue").ttl(TTL).write_timeout(Duration::from_secs(1)).await.unwrap_err(),
        };
        println!("{failed}");
        enter(&b, what).await.unwrap().release().await.unwrap();
    }
    a.close().await;
    b.close().await;
}
