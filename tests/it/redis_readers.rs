//! Readers and writers on Redis: each reader has a lease of its own, each waiting writer an intent of its own. Those that die
//! are processes.

use std::time::Duration;

use leasehold::{LockError, Locker, LossCause, Options, Reason};

use crate::support::redis::Server;
use crate::support::replica::{Lines, Replica};
use crate::support::{Stage, eventually, pass, quick, until};

const LONG: Duration = Duration::from_secs(20);

const READERS: &str = "leasehold:{rwlock:catalogue}:r";
const WRITER: &str = "leasehold:{rwlock:catalogue}:h";
const INTENTS: &str = "leasehold:{rwlock:catalogue}:i";

/// A stage on Redis and its server.
fn server_of(stage: &Stage) -> &Server {
    match stage {
        Stage::Redis(server) => server,
        _ => panic!("{} is no server", stage.kind()),
    }
}

fn locker(server: &Server, options: Options) -> Locker {
    Locker::redis(server.client(), options).unwrap()
}

fn replica(stage: &Stage, who: &str, lines: &Lines, behaviour: &str) -> Replica {
    Replica::spawn(stage, &quick(who), "catalogue", lines, behaviour)
}

/// The readers, each with for how many milliseconds its lease lasts yet; and for how many the whole set does.
fn readers(server: &Server) -> (Vec<(String, i64)>, i64) {
    let script = "local now = redis.call('TIME'); now = now[1] * 1000 + math.floor(now[2] / 1000); \
        local ends = redis.call('PEXPIRETIME', KEYS[1]); local told = {ends - now}; \
        local all = redis.call('ZRANGE', KEYS[1], 0, -1, 'WITHSCORES'); \
        for n = 1, #all, 2 do told[#told + 1] = all[n] .. '=' .. string.format('%d', all[n + 1] - now) end; return told";
    let mut told: Vec<String> = server
        .ask::<Vec<redis::Value>>(&["EVAL", script, "1", READERS])
        .into_iter()
        .map(|value| match value {
            redis::Value::Int(left) => left.to_string(),
            value => redis::from_redis_value(value).unwrap(),
        })
        .collect();
    let all = told.split_off(1).into_iter().map(|told| {
        let (who, left) = told.rsplit_once('=').unwrap();
        (who.to_owned(), left.parse::<i64>().unwrap())
    });
    (all.collect(), told[0].parse().unwrap())
}

/// R-06, D33: killed, a reader is in nobody's way when its own lease has ended, whoever renews beside it.
#[tokio::test]
async fn a_reader_that_is_killed_is_revived_by_no_other_one() {
    let (stage, lines) = (Stage::redis(), Lines::new());
    let server = server_of(&stage);
    let mut dies = replica(&stage, "dies", &lines, "read");
    lines.wait_for("dies start", 0).await;
    let (a, b) = (locker(server, quick("a")), locker(server, quick("b")));
    let reads = a.rw_lock("catalogue").read().await.unwrap();
    dies.kill();
    let is_dead = |(who, left): &(String, i64)| who.ends_with(" dies") && *left > 0;
    assert!(readers(server).0.iter().any(is_dead), "its lease lasts");
    eventually("its own lease ends", || readers(server).0, |all| !all.iter().any(is_dead)).await;
    // The other one renews, all the while.
    assert!(reads.check().await);
    assert!(b.rw_lock("catalogue").try_write().await.unwrap().is_none());
    reads.release().await.unwrap();
    b.rw_lock("catalogue")
        .try_write()
        .await
        .unwrap()
        .expect("the dead one is in the way")
        .release()
        .await
        .unwrap();
    assert_eq!(server.get(WRITER), None);
    a.close().await;
    b.close().await;
}

/// R-06, D33: a reader whose lease has ended is told so, however late it asks, and although the set still stands; nothing
/// that it does puts it in again.
#[tokio::test]
async fn a_late_extension_of_a_reader_is_none() {
    let server = Server::start();
    let a = locker(&server, quick("a").heartbeat_interval(Duration::from_mins(1)));
    let b = locker(&server, quick("b"));
    let other = b.rw_lock("catalogue").read().await.unwrap();
    for keeps in [false, true] {
        let late = a.rw_lock("catalogue").read().await.unwrap();
        let (all, _) = readers(&server);
        let member = &all.iter().find(|(who, _)| who.ends_with(" a")).unwrap().0;
        // It has ended a millisecond after the epoch, and nobody has cleared it away.
        assert_eq!(server.ask::<i32>(&["ZADD", READERS, "XX", "CH", "1", member]), 1);
        if keeps {
            assert!(matches!(late.keep().await, Err(LockError::Lost { cause: LossCause::Gone })));
        } else {
            assert!(!late.check().await);
            assert_eq!(late.reason(), Some(Reason::Lost(LossCause::Gone)));
            assert!(late.release().await.is_err());
        }
        assert!(!readers(&server).0.iter().any(|(who, left)| who.ends_with(" a") && *left > 0));
        assert!(other.check().await);
    }
    other.release().await.unwrap();
    b.rw_lock("catalogue")
        .try_write()
        .await
        .unwrap()
        .expect("only dead ones are left")
        .release()
        .await
        .unwrap();
    a.close().await;
    b.close().await;
}

/// R-06, R-04, D33: a reader's process that stands still until a writer is in does nothing afterwards, and what it sends late
/// touches nobody.
#[tokio::test]
async fn a_frozen_reader_does_nothing_after_a_writer_is_in() {
    let (stage, lines) = (Stage::redis(), Lines::new());
    let server = server_of(&stage);
    let mut frozen = replica(&stage, "frozen", &lines, "read");
    lines.wait_for("frozen tick", 0).await;
    let a = locker(server, quick("a"));
    let other = a.rw_lock("catalogue").read().await.unwrap();
    frozen.stop().await;
    let b = locker(server, quick("b").heartbeat_interval(Duration::from_mins(1)));
    other.release().await.unwrap();
    let writes = b.rw_lock("catalogue").write_timeout(LONG).await.unwrap();
    let (value, from) = (server.get(WRITER), lines.all().len());
    frozen.cont();
    // It says that its lock was lost.
    assert!(!frozen.wait().await.success());
    assert_eq!(lines.all()[from..], ["frozen end 1"]);
    assert_eq!(server.get(WRITER), value);
    assert!(server.keys(READERS).is_empty());
    assert!(writes.check().await);
    writes.release().await.unwrap();
    a.close().await;
    b.close().await;
}

/// R-06: the set of readers lasts at least as long as the longest lease in it, whoever comes, renews and leaves.
#[tokio::test]
async fn the_set_of_readers_lasts_as_long_as_its_longest_lease() {
    let server = Server::start();
    let lockers = ["a", "b", "c"].map(|who| locker(&server, quick(who)));
    let ttls = [Duration::from_mins(2), Duration::from_secs(3), Duration::from_mins(1)];
    let assert_covered = |what: &str| {
        let (all, whole) = readers(&server);
        let longest = all.iter().map(|(_, left)| *left).max().unwrap_or(0);
        assert!(
            whole >= longest || all.is_empty(),
            "{what}: the set lasts {whole} ms, one of {all:?} longer"
        );
    };
    for round in 0..30 {
        let mut held = Vec::new();
        for n in 0..3 {
            let (locker, ttl) = (&lockers[(round + n) % 3], ttls[(round * 2 + n) % 3]);
            held.push(locker.rw_lock("catalogue").ttl(ttl).read().await.unwrap());
            assert_covered("one came");
            for guard in &held {
                assert!(guard.check().await);
                assert_covered("one renewed");
            }
        }
        held.rotate_left(round % 3);
        for guard in held {
            guard.release().await.unwrap();
            assert_covered("one left");
        }
        assert!(server.keys(READERS).is_empty(), "nobody reads");
    }
    for locker in lockers {
        locker.close().await;
    }
}

/// R-06, D34: a waiting writer keeps new readers out by an intent with a life of its own, which ends with its process.
#[tokio::test]
async fn the_intent_of_a_writer_that_is_killed_ends_by_itself() {
    let (stage, lines) = (Stage::redis(), Lines::new());
    let server = server_of(&stage);
    let (a, b) = (locker(server, quick("a")), locker(server, quick("b")));
    let reads = a.rw_lock("catalogue").read().await.unwrap();
    let mut writer = replica(&stage, "writer", &lines, "write");
    until("the writer waits", || server.keys(INTENTS).len() == 1).await;
    assert!(b.rw_lock("catalogue").try_read().await.unwrap().is_none());
    // While it lives, it goes on waiting, for many lives of an intent.
    pass(Duration::from_millis(1_500)).await;
    assert!(b.rw_lock("catalogue").try_read().await.unwrap().is_none());
    let life = server.pttl(INTENTS).expect("it has a life of its own");
    // Twice the retry interval, and at least half a second.
    assert!(life <= Duration::from_millis(500), "{life:?}");
    writer.kill();
    // Nobody else acts, and nobody tells.
    let late = b.rw_lock("catalogue").read_timeout(LONG).await.unwrap();
    assert!(server.keys(INTENTS).is_empty());
    assert_eq!(lines.count("start"), 0);
    late.release().await.unwrap();
    reads.release().await.unwrap();
    a.close().await;
    b.close().await;
}

/// D34: four readers without a gap between them, and a writer, which gets in while they go on.
#[tokio::test]
async fn a_writer_gets_in_among_readers_of_other_processes() {
    let (stage, lines) = (Stage::redis(), Lines::new());
    let server = server_of(&stage);
    let mut all: Vec<Replica> = Vec::new();
    for n in 0..4 {
        all.push(replica(&stage, &format!("reader-{n}"), &lines, "read"));
    }
    until("all read at once", || lines.count("start") == 4).await;
    let a = locker(server, quick("a"));
    let writes = tokio::spawn({
        let lock = a.rw_lock("catalogue");
        async move { lock.write_timeout(LONG).await }
    });
    until("the writer waits", || server.keys(INTENTS).len() == 1).await;
    // New ones come before the old ones go.
    for n in 4..8 {
        all.push(replica(&stage, &format!("reader-{n}"), &lines, "read"));
    }
    let queue = "leasehold:{rwlock:catalogue}:q";
    until("they wait behind it", || server.ask::<usize>(&["ZCARD", queue]) == 5).await;
    for mut reader in all.drain(..4) {
        reader.terminate();
        assert!(reader.wait().await.success());
    }
    let writes = writes.await.unwrap().unwrap();
    assert_eq!(lines.count("start"), 4, "{:?}", lines.all());
    writes.release().await.unwrap();
    until("the others read", || lines.count("start") == 8).await;
    for mut reader in all {
        reader.terminate();
        assert!(reader.wait().await.success());
    }
    a.close().await;
}
