//! What breaks under a Locker on Redis: its connection, its server, the server's data, its scripts, a node of its cluster, its
//! primary. A session is its grants, not its connection.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use leasehold::redis::Target;
use leasehold::{LockError, Locker, LossCause, Name, Options, Reason, Scope};
use tokio::task::JoinSet;

use crate::support::log::assert_one_at_a_time;
use crate::support::member::over;
use crate::support::redis::{Data, Pause, Proxy, Server};
use crate::support::replica::{Lines, PROGRAM, Replica};
use crate::support::{Log, Member, eventually, now, pass, quick, until};

const LONG: Duration = Duration::from_secs(20);

const JOB: &str = "leasehold:{lease:job}:h";

fn locker(server: &Server, options: Options) -> Locker {
    Locker::redis(server.client(), options).unwrap()
}

/// As [`quick`], but a fault may take a while.
fn patient(who: &str) -> Options {
    quick(who).query_timeout(Duration::from_secs(10))
}

/// R-04: connections that are ended while statements are under way, a hundred times: nobody is told of a loss, and the locks
/// still keep everybody else out.
#[tokio::test]
async fn a_connection_that_is_lost_is_no_loss() {
    let server = Server::start();
    let log = Log::default();
    let (a, b) = (locker(&server, patient("a")), locker(&server, patient("b")));
    let mut member = Member::on(&a, "job", "a", &log);
    let lease = member.leads().await;
    let value = server.get(JOB);
    let kept = a.lock("kept").lock().await.unwrap();
    let read = a.rw_lock("read").read().await.unwrap();
    let (inside, cycles, ends) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicBool::new(false));
    let cycle = async |locker: &Locker| {
        while !ends.load(Ordering::Relaxed) {
            let guard = locker.lock("contended").lock().await.unwrap();
            assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two are in");
            tokio::task::yield_now().await;
            inside.fetch_sub(1, Ordering::SeqCst);
            guard.release().await.unwrap();
            cycles.fetch_add(1, Ordering::SeqCst);
        }
    };
    let kills = async {
        for round in 0..100 {
            let before = cycles.load(Ordering::SeqCst);
            let killed = server.kill_clients_named(["leasehold/a", "leasehold/b"][round % 2]);
            assert!(killed <= 1);
            // Now and then one is killed while it comes back.
            if round % 3 != 0 {
                until("they go on", || cycles.load(Ordering::SeqCst) > before + 2).await;
            }
        }
        assert!(lease.check().await && kept.check().await && read.check().await);
        ends.store(true, Ordering::Relaxed);
    };
    tokio::join!(cycle(&a), cycle(&b), kills);
    assert_eq!((lease.reason(), server.get(JOB)), (None, value));
    kept.release().await.unwrap();
    read.release().await.unwrap();
    member.stop().await.unwrap();
    assert_eq!(log.lines(), ["a start", "a end"]);
    a.close().await;
    b.close().await;
}

/// R-04, R-07: an acquire and a release whose answers are lost with their connection are asked for again, and are what they
/// were.
#[tokio::test]
async fn an_answer_that_is_lost_with_its_connection_is_asked_for_again() {
    let server = Server::start();
    let line = Proxy::to(server.port());
    let a = Locker::at(&line.url(), patient("a").heartbeat_interval(Duration::from_mins(1))).unwrap();
    a.lock("warm").lock().await.unwrap().release().await.unwrap();
    let monitor = server.monitor();
    let lost = async |key: &str, is_there: bool| {
        until("the server has done it", || server.keys(key).is_empty() != is_there).await;
        let value = server.try_ask::<Option<Vec<u8>>>(&["GET", key]).ok();
        line.close().await;
        line.heal();
        value
    };
    for sort in ["lock", "write", "read"] {
        let key = match sort {
            "lock" => "leasehold:{lock:job}:h",
            "write" => "leasehold:{rwlock:job}:h",
            _ => "leasehold:{rwlock:job}:r",
        };
        monitor.forget(&server);
        line.cut_answers();
        let (lock, rw) = (a.lock("job"), a.rw_lock("job"));
        let asking = async {
            match sort {
                "lock" => lock.lock().await,
                "write" => rw.write().await,
                _ => rw.read().await,
            }
        };
        let (guard, value) = tokio::join!(asking, lost(key, true));
        let guard = guard.unwrap();
        assert_eq!(
            server.try_ask::<Option<Vec<u8>>>(&["GET", key]).ok(),
            value,
            "{sort}: it is another grant"
        );
        // After an interruption it looks by itself whether it still has what it holds: that is answered before this is.
        let is_look = |words: &[String]| words[0] == "EVALSHA" && words[2..4] == ["1", key];
        until("it has looked", || monitor.seen(&server).iter().any(|it| is_look(&it.words))).await;
        assert!(guard.check().await);
        line.cut_answers();
        let (released, _) = tokio::join!(guard.release(), lost(key, false));
        released.unwrap();
    }
    a.close().await;
}

/// R-07: what may still be on its way after a connection was lost is undone again and again, but ever more seldom: not with each
/// of all the statements that follow.
#[tokio::test]
async fn a_grant_in_doubt_does_not_burden_every_exchange() {
    const EXCHANGES: usize = 400;
    let server = Server::start();
    let line = Proxy::to(server.port());
    let a = Locker::at(&line.url(), patient("a").heartbeat_interval(Duration::from_mins(1))).unwrap();
    a.lock("warm").lock().await.unwrap().release().await.unwrap();
    line.cut_answers();
    let lock = a.lock("job");
    let (guard, ()) = tokio::join!(lock.lock(), async {
        until("the server has granted it", || !server.keys("leasehold:{lock:job}:h").is_empty()).await;
        line.close().await;
        line.heal();
    });
    guard.unwrap().release().await.unwrap();
    let monitor = server.monitor();
    for _ in 0..EXCHANGES {
        a.lock("other").lock().await.unwrap().release().await.unwrap();
    }
    let seen = monitor.seen(&server);
    let is_undone = |words: &[String]| words[0] == "EVALSHA" && words[3] == "leasehold:{lock:job}:h";
    let undone = seen.iter().filter(|it| is_undone(&it.words)).count();
    // Fewer than thirty, however slow the machine is: then it is out of doubt.
    assert!((1..30).contains(&undone), "{undone} times in {EXCHANGES} exchanges");
    a.close().await;
}

/// R-03, R-07: a release that is lost with its connection, and refused when it is sent again, has not been done: whoever asked
/// for it is told so, and it is undone as soon as the server lets it.
#[tokio::test]
async fn a_release_that_is_refused_when_it_is_sent_again_is_told_as_a_loss() {
    const KEY: &str = "leasehold:{lock:job}:h";
    let server = Server::start();
    let line = Proxy::to(server.port());
    let a = Locker::at(&line.url(), patient("a").heartbeat_interval(Duration::from_mins(1))).unwrap();
    let guard = a.lock("job").lock().await.unwrap();
    server.pause(Pause::Writes, LONG);
    let turns = line.turns();
    let releasing = tokio::spawn(guard.release());
    until("the release is sent", || line.turns() > turns).await;
    server.ask::<()>(&["ACL", "SETUSER", "default", "-del"]);
    line.close().await;
    line.heal();
    server.unpause();
    let released = releasing.await.unwrap();
    assert!(server.get(KEY).is_some(), "it was released");
    assert!(matches!(released, Err(LockError::Lost { cause: LossCause::Gone })), "{released:?}");
    server.ask::<()>(&["ACL", "SETUSER", "default", "+del"]);
    a.lock("other").lock().await.unwrap().release().await.unwrap();
    assert!(server.get(KEY).is_none(), "it is left");
    a.close().await;
}

/// R-04, F-30: who stands by while its connection is lost is told of the next release all the same, and learns of one that
/// came meanwhile.
#[tokio::test]
async fn a_standby_that_has_lost_its_connection_is_still_woken() {
    let server = Server::start();
    let line = Proxy::to(server.port());
    for is_away in [false, true] {
        let log = Log::default();
        let mut a = Member::on(&locker(&server, patient("a")), "job", "a", &log);
        a.leads().await;
        let options = patient("b").retry_interval(Duration::from_hours(1));
        let mut b = Member::on(&Locker::at(&line.url(), options).unwrap(), "job", "b", &log);
        b.stands_by().await;
        for _ in 0..5 {
            server.kill_clients_named("leasehold/b");
            until("it is back", || server.clients_named("leasehold/b") == 1).await;
            b.stands_by().await;
        }
        if is_away {
            line.close().await;
        }
        a.stop().await.unwrap();
        line.heal();
        b.leads().await;
        b.stop().await.unwrap();
        log.assert_one_at_a_time();
    }
}

/// R-04: a server that comes back with its data within the query timeout, again and again.
#[tokio::test]
async fn a_restart_with_its_data_is_no_loss() {
    let mut server = Server::durable();
    let log = Log::default();
    let a = locker(&server, patient("a"));
    let mut member = Member::on(&a, "job", "a", &log);
    let lease = member.leads().await;
    let held = a.lock("held").lock().await.unwrap();
    let read = a.rw_lock("read").read().await.unwrap();
    for _ in 0..5 {
        // One is being released meanwhile: it is, and it was held to the end.
        let released = a.lock("released").lock().await.unwrap();
        server.kill();
        let releasing = tokio::spawn(released.release());
        server.start_again(Data::Kept).await;
        releasing.await.unwrap().unwrap();
        assert_eq!(server.get("leasehold:{lock:released}:h"), None);
        assert!(lease.check().await && held.check().await && read.check().await);
    }
    held.release().await.unwrap();
    read.release().await.unwrap();
    member.stop().await.unwrap();
    assert_eq!(log.lines(), ["a start", "a end"]);
    a.close().await;
}

/// R-08, R-04: a server that comes back without its data has forgotten the leases, and that is told; what is asked for
/// afterwards is granted. A release that has to be sent again finds nothing, and says so.
#[tokio::test]
async fn a_restart_without_its_data_is_told() {
    let mut server = Server::start();
    let log = Log::default();
    let a = locker(&server, patient("a"));
    let line = Proxy::to(server.port());
    let b = Locker::at(&line.url(), patient("b").heartbeat_interval(Duration::from_mins(1))).unwrap();
    let mut member = Member::on(&a, "job", "a", &log);
    for round in 1..=5 {
        let lease = member.leads().await;
        let lost = a.lock("lost").lock().await.unwrap();
        let read = a.rw_lock("read").read().await.unwrap();
        // It is under way when the server dies, which has not read it: no heartbeat comes before.
        let released = b.lock("released").lock().await.unwrap();
        server.stop();
        let turns = line.turns();
        let releasing = tokio::spawn(released.release());
        until("the release is sent", || line.turns() > turns).await;
        server.kill();
        server.start_again(Data::Lost).await;
        let released = releasing.await.unwrap();
        assert!(matches!(released, Err(LockError::Lost { cause: LossCause::Gone })), "{round}: {released:?}");
        for lease in [&lease, lost.lease(), read.lease()] {
            assert_eq!(over(lease).await, Some(Reason::Lost(LossCause::Gone)), "{round}");
        }
        assert!(lost.release().await.is_err() && read.release().await.is_err());
        a.lock("lost").lock().await.unwrap().release().await.unwrap();
    }
    member.leads().await;
    member.stop().await.unwrap();
    assert_eq!(log.assert_one_at_a_time(), 6);
    a.close().await;
    b.close().await;
}

/// R-04, R-03: whoever has another one's value in its key learns it from the first heartbeat that comes after that.
#[tokio::test]
async fn a_stolen_key_is_noticed_by_the_next_heartbeat() {
    let server = Server::start();
    let log = Log::default();
    let mut member = Member::on(&locker(&server, quick("a")), "job", "a", &log);
    let lease = member.leads().await;
    let mut thief = server.client().get_connection().unwrap();
    let monitor = server.monitor();
    redis::cmd("SET").arg(JOB).arg("leasehold 60000 0 thief thief").exec(&mut thief).unwrap();
    assert_eq!(over(&lease).await, Some(Reason::Lost(LossCause::Gone)));
    let seen = monitor.seen(&server);
    let stolen = seen.iter().position(|it| it.name() == "SET" && it.words.len() == 3).unwrap();
    // An extension has one key; who contends again asks with two.
    let extensions =
        seen[stolen..].iter().filter(|it| it.name() == "EVALSHA" && it.words[2] == "1" && it.words[3] == JOB);
    assert_eq!(extensions.count(), 1, "{seen:?}");
    assert_eq!(server.get(JOB).as_deref(), Some(&b"leasehold 60000 0 thief thief"[..]));
    assert_eq!(server.pttl(JOB), None, "it was extended");
    server.ask::<u32>(&["DEL", JOB]);
    member.leads().await;
    member.stop().await.unwrap();
}

/// Whether files can be made in a server's folder.
fn set_writable(server: &Server, is_writable: bool) {
    let mode = if is_writable { 0o755 } else { 0o555 };
    fs::set_permissions(server.config("dir"), fs::Permissions::from_mode(mode)).unwrap();
}

/// R-04, R-09: while the server loads, cannot write to its disk, has too few replicas, is a replica itself: the lease
/// waits for that until its deadline, the job goes on, and nobody is told.
#[tokio::test]
async fn errors_that_pass_cost_nothing() {
    let mut server = Server::start();
    let log = Log::default();
    let a = locker(&server, patient("a"));
    let mut member = Member::on(&a, "job", "a", &log);
    let lease = member.leads().await;
    let read = a.rw_lock("read").read().await.unwrap();
    for fault in ["LOADING", "MISCONF", "NOREPLICAS", "READONLY"] {
        let before = lease.deadline();
        match fault {
            "LOADING" => server.restart_slowly(),
            "MISCONF" => {
                server.config_set("save", "3600 1");
                set_writable(&server, false);
                server.ask::<()>(&["BGSAVE"]);
                until("saving fails", || server.info("rdb_last_bgsave_status") == "err").await;
            }
            "NOREPLICAS" => server.config_set("min-replicas-to-write", "1"),
            _ => server.ask(&["REPLICAOF", "127.0.0.1", "1"]),
        }
        let refused = server.try_ask::<()>(&["SET", "x", "1"]).unwrap_err();
        assert_eq!(refused.code(), Some(fault));
        // Several heartbeats.
        pass(Duration::from_millis(500)).await;
        assert!(lease.is_held() && read.is_held(), "{fault}");
        match fault {
            "LOADING" => server.loaded().await,
            "MISCONF" => {
                set_writable(&server, true);
                server.ask::<()>(&["BGSAVE"]);
                until("saving succeeds", || server.info("rdb_last_bgsave_status") == "ok").await;
                server.config_set("save", "");
            }
            "NOREPLICAS" => server.config_set("min-replicas-to-write", "0"),
            _ => server.promote(),
        }
        assert!(lease.check().await && read.check().await, "{fault}: {:?}", lease.reason());
        assert!(lease.deadline() > before);
        a.lock("another").lock().await.unwrap().release().await.unwrap();
    }
    read.release().await.unwrap();
    member.stop().await.unwrap();
    assert_eq!(log.lines(), ["a start", "a end"]);
    a.close().await;
}

/// R-04: what is held may be out of reach for longer than the query timeout, until its deadline: a server that does not
/// write, and one that says nothing though the connection stands.
#[tokio::test]
async fn an_outage_longer_than_the_query_timeout_costs_nothing_before_the_deadline() {
    let server = Server::start();
    let line = Proxy::to(server.port());
    let (limit, log) = (Duration::from_secs(3), Log::default());
    let a = Locker::at(&line.url(), quick("a").query_timeout(limit)).unwrap();
    assert_eq!(a.bounds().trust, 2 * limit);
    let mut member = Member::on(&a, "job", "a", &log);
    let lease = member.leads().await;
    for is_silent in [false, true] {
        let before = lease.deadline();
        if is_silent {
            line.cut();
        } else {
            server.config_set("min-replicas-to-write", "1");
        }
        pass(limit + limit / 6).await;
        assert!(lease.is_held(), "{is_silent}: {:?}", lease.reason());
        if is_silent {
            line.heal();
        } else {
            server.config_set("min-replicas-to-write", "0");
        }
        eventually("it is renewed", || lease.deadline(), |deadline| *deadline > before + limit).await;
        assert!(lease.check().await, "{is_silent}: {:?}", lease.reason());
    }
    member.stop().await.unwrap();
    assert_eq!(log.lines(), ["a start", "a end"]);
    a.close().await;
}

/// R-09, R-04: a memory that is full is told as such to whoever acquires; what is held is kept, and can be released.
#[tokio::test]
async fn a_full_memory_costs_nobody_a_lease() {
    let server = Server::start();
    let (a, b) = (locker(&server, quick("a")), locker(&server, quick("b")));
    let lock = a.lock("job").lock().await.unwrap();
    let read = a.rw_lock("catalogue").read().await.unwrap();
    let kept = a.rw_lock("kept").read().await.unwrap();
    let write = a.rw_lock("written").write().await.unwrap();
    server.config_set("maxmemory", "1");
    for locker in [&a, &b] {
        // Readers and writers may come in: their scripts clear away first, and what has begun to write goes on.
        let full = [
            locker.lock("more").try_lock().await.unwrap_err(),
            locker.lock("more").lock_timeout(Duration::from_secs(1)).await.unwrap_err(),
        ];
        for error in full {
            let LockError::Failed { reason } = &error else { panic!("{error:?}") };
            assert!(reason.contains("OOM") && reason.contains("raise maxmemory"), "{reason}");
        }
    }
    for guard in [&lock, &read, &kept, &write] {
        assert!(guard.check().await, "{}: {:?}", guard.name(), guard.reason());
    }
    kept.keep().await.unwrap();
    for guard in [lock, read, write] {
        guard.release().await.unwrap();
    }
    assert_eq!(server.keys("*"), ["leasehold:{rwlock:kept}:r"]);
    server.config_set("maxmemory", "0");
    b.lock("job").lock().await.unwrap().release().await.unwrap();
    a.close().await;
    b.close().await;
}

/// D30, R-04: what is answered late is trusted from before it was asked for, and so is what a check has renewed; what has
/// ended is released once, in vain.
#[tokio::test]
async fn trust_counts_from_before_the_winning_attempt() {
    let server = Server::start();
    let line = Proxy::to(server.port());
    let a = Locker::at(&line.url(), quick("a")).unwrap();
    let trust = a.bounds().trust;
    a.lock("warm").lock().await.unwrap().release().await.unwrap();
    let late = Duration::from_millis(500);
    line.delay(late);
    let guard = a.lock("job").lock().await.unwrap();
    assert!(guard.deadline() + late <= now() + trust, "{:?} are left", guard.remaining());
    assert!(guard.is_held() && guard.check().await);
    assert!(guard.deadline() + late <= now() + trust, "{:?} are left", guard.remaining());
    line.cut();
    until("it is over", || !guard.is_held()).await;
    assert_eq!(guard.remaining(), Duration::ZERO);
    assert!(!guard.check().await);
    assert!(matches!(guard.release().await, Err(LockError::Lost { .. })));
    line.heal();
    let b = locker(&server, quick("b"));
    b.lock("job").lock_timeout(LONG).await.unwrap().release().await.unwrap();
    a.close().await;
    b.close().await;
}

/// How a leader falls silent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Silence {
    Cut,
    NoAnswers,
    HalfRequest,
    /// Its process stands still.
    Frozen,
    /// So does the server, for as long as nobody may be granted anything.
    Server,
}

/// R-04, R-03, D30: whatever makes a holder silent, its body has ended before the key can expire, even one that does not
/// stop by itself; nobody else is in before; and a process that stood still does nothing afterwards.
#[tokio::test]
async fn a_silent_holder_has_ended_before_another_one_starts() {
    for silence in [Silence::Cut, Silence::NoAnswers, Silence::HalfRequest, Silence::Frozen, Silence::Server]
    {
        let (server, lines) = (Server::start(), Lines::new());
        let line = Proxy::to(server.port());
        let start = |who, url: &str, how: &str| {
            Replica::by(Command::new(PROGRAM), url, &quick(who), "job", &lines, &[how])
        };
        let mut a = start("a", &line.url(), "stubborn");
        lines.wait_for("a start 1", 0).await;
        let mut b = start("b", &server.url(), "hold");
        until("it stands by", || server.keys("leasehold:{lease:job}:q").len() == 1).await;
        match silence {
            Silence::Cut => line.cut(),
            Silence::NoAnswers => line.cut_answers(),
            Silence::HalfRequest => line.cut_in_request(),
            Silence::Frozen => a.stop().await,
            Silence::Server => server.stop(),
        }
        if silence == Silence::Server {
            // Whoever comes first leads then.
            lines.wait_for("a end", 0).await;
            server.cont();
            until("one leads", || lines.count("start") == 2).await;
            b.terminate();
            assert!(b.wait().await.success());
            a.kill();
            let all = lines.all();
            assert_eq!(
                all.iter()
                    .position(|line| line == "a end 1")
                    .map(|end| all[..end].iter().any(|line| line == "b start 1")),
                Some(false)
            );
            continue;
        }
        let from = lines.wait_for("b start", 0).await;
        let held = server.get(JOB);
        match silence {
            Silence::Frozen => a.cont(),
            _ => line.heal(),
        }
        // It stands by, and leads when the other one leaves.
        until("it stands by", || server.keys("leasehold:{lease:job}:q").len() == 1).await;
        assert_eq!(server.get(JOB), held, "{silence:?}");
        b.terminate();
        assert!(b.wait().await.success());
        lines.wait_for("a start 2", from).await;
        let all = lines.all();
        if silence == Silence::Frozen {
            let late: Vec<_> =
                all[from..].iter().filter(|line| line.starts_with("a ") && line.ends_with(" 1")).collect();
            assert_eq!(late, ["a end 1"], "{silence:?}");
        } else {
            let ended = all.iter().position(|line| line == "a end 1").unwrap();
            assert!(ended < from, "{silence:?}: {all:?}");
            a.kill();
            let lines = lines.all();
            assert_one_at_a_time(lines.iter().map(String::as_str).chain(["a end 2"]));
        }
    }
}

/// R-08, D31: scripts that are forgotten all the time are no matter to anybody.
#[tokio::test]
async fn scripts_that_are_forgotten_are_loaded_again() {
    let server = Server::start();
    let log = Log::default();
    let (a, b) = (locker(&server, quick("a")), locker(&server, quick("b")));
    let mut member = Member::on(&a, "job", "a", &log);
    let lease = member.leads().await;
    let held = a.lock("held").lock().await.unwrap();
    let read = a.rw_lock("read").read().await.unwrap();
    let ends = AtomicBool::new(false);
    let flushes = async {
        let mut flushes = 0;
        while !ends.load(Ordering::Relaxed) {
            server.script_flush();
            flushes += 1;
            tokio::task::yield_now().await;
        }
        println!("{flushes} flushes");
    };
    let cycles = async {
        for round in 0..100 {
            let locker = if round % 2 == 0 { &a } else { &b };
            let guards = [
                locker.lock("contended").lock().await.unwrap(),
                locker.rw_lock("read").read().await.unwrap(),
                locker.rw_lock("written").write().await.unwrap(),
            ];
            let [lock, ..] = &guards;
            lock.fencing_token().await.unwrap();
            for guard in guards {
                guard.release().await.unwrap();
            }
            assert!(lease.check().await && held.check().await && read.check().await, "{round}");
        }
        ends.store(true, Ordering::Relaxed);
    };
    tokio::join!(flushes, cycles);
    // Once in between, too.
    server.script_flush();
    assert!(held.check().await);
    server.script_flush();
    held.release().await.unwrap();
    server.script_flush();
    read.release().await.unwrap();
    member.stop().await.unwrap();
    assert_eq!(log.lines(), ["a start", "a end"]);
    a.close().await;
    b.close().await;
}

/// Names that are easily put into the wrong slot.
const ODD: [&str; 12] =
    ["a", "{", "}", "{}", "{a}", "a}:h", "}{", "{{a}}", "a:b", "lock:a", "{rwlock:a}:h", "a{b}c{d}"];

/// R-08, D31: on a cluster of two nodes, whatever the names are: all that the locks, leases, readers, writers and
/// tokens need of a name is on one node. A node that is started anew without its data has lost its leases, which is told,
/// and those of the other one go on.
#[tokio::test]
async fn a_cluster_of_two_nodes_serves_every_name() {
    const SCOPE: Scope<str> = Scope::new("{x}:");
    let [mut one, two] = Server::cluster_of_two();
    let url = format!("redis+cluster://127.0.0.1:{},127.0.0.1:{}", one.port(), two.port());
    let lockers = ["a", "b"].map(|who| Locker::at(&url, patient(who)).unwrap());
    let [a, b] = &lockers;
    let names =
        ODD.map(Name::from).into_iter().chain(ODD.map(|name| SCOPE.name(name))).chain([Name::key(-1)]);
    let names: Vec<Name> = names.collect();
    for name in &names {
        let lock = a.lock(name).lock().await.unwrap();
        assert!(b.lock(name).try_lock().await.unwrap().is_none(), "{name:?}");
        // It waits, and is woken.
        let (waited, released) =
            tokio::join!(async { b.lock(name).lock_timeout(LONG).await }, lock.release());
        released.unwrap();
        let lock = waited.unwrap();
        lock.fencing_token().await.unwrap();
        assert!(lock.check().await);
        // A name that stands for a key is one for all kinds.
        lock.release().await.unwrap();
        let (one, two) = (a.rw_lock(name).read().await.unwrap(), b.rw_lock(name).read().await.unwrap());
        let (written, ()) = tokio::join!(async { a.rw_lock(name).write_timeout(LONG).await }, async {
            assert!(b.rw_lock(name).try_write().await.unwrap().is_none());
            one.release().await.unwrap();
            two.release().await.unwrap();
        });
        written.unwrap().release().await.unwrap();
        let led = a.run(name, async |lease: leasehold::Lease| lease.fencing_token().await).await;
        led.unwrap().unwrap();
    }
    for server in [&one, &two] {
        let errors: String = server.ask(&["INFO", "errorstats"]);
        assert!(!errors.contains("CROSSSLOT"), "{errors}");
        // A key that a script was not given and another node has is one of these.
        assert!(
            server.info("cmdstat_evalsha").ends_with("failed_calls=0"),
            "{}",
            server.info("cmdstat_evalsha")
        );
        let left =
            |server: &Server| server.keys("*").into_iter().filter(|key| !key.contains("{token:")).count();
        eventually("nothing is left", || left(server), |left| *left == 0).await;
        assert!(!server.keys("leasehold:{token:*").is_empty(), "both are used");
    }

    // Two names, one on each node.
    let slot = |name: &str| one.ask::<u16>(&["CLUSTER", "KEYSLOT", &format!("leasehold:{{lock:{name}}}:h")]);
    let all: Vec<String> = (0..100).map(|n| format!("n{n}")).collect();
    let (lost, kept) = (
        all.iter().find(|name| slot(name) < 8192).unwrap(),
        all.iter().find(|name| slot(name) >= 8192).unwrap(),
    );
    let (lost_guard, kept_guard) =
        (a.lock(lost.as_str()).lock().await.unwrap(), a.lock(kept.as_str()).lock().await.unwrap());
    one.restart(Data::Lost).await;
    assert_eq!(over(lost_guard.lease()).await, Some(Reason::Lost(LossCause::Gone)));
    assert!(lost_guard.release().await.is_err());
    b.lock(lost.as_str()).lock_timeout(LONG).await.unwrap().release().await.unwrap();
    assert!(kept_guard.check().await);
    kept_guard.release().await.unwrap();
    for locker in lockers {
        locker.close().await;
    }
}

/// R-08, R-04: a cluster whose slots move is subscribed to again, and no reply is taken for that to another command: nobody is
/// granted what somebody else has, and nobody is told of foreign values.
#[tokio::test]
async fn a_cluster_whose_slots_move_answers_everybody_for_himself() {
    const TASKS: usize = 48;
    let nodes = Server::cluster_of_two();
    let url = format!("redis+cluster://127.0.0.1:{},127.0.0.1:{}", nodes[0].port(), nodes[1].port());
    // Where each one listens depends on its random bits.
    let lockers: Vec<Locker> =
        (0..6).map(|nth| Locker::at(&url, patient(&format!("a{nth}"))).unwrap()).collect();
    let shared = Arc::new((AtomicUsize::new(0), AtomicBool::new(false), [const { AtomicUsize::new(0) }; 4]));
    let mut tasks = JoinSet::new();
    for task in 0..TASKS {
        let (lock, shared) = (lockers[task % 6].lock(format!("l{}", task % 4)), Arc::clone(&shared));
        tasks.spawn(async move {
            let (cycles, ends, inside) = &*shared;
            let inside = &inside[task % 4];
            while !ends.load(Ordering::Relaxed) {
                let guard = lock.lock().await.unwrap();
                assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two are in");
                tokio::task::yield_now().await;
                inside.fetch_sub(1, Ordering::SeqCst);
                guard.release().await.unwrap();
                cycles.fetch_add(1, Ordering::SeqCst);
            }
        });
    }
    let (cycles, ends, _) = &*shared;
    let slot: u16 = nodes[0].ask(&["CLUSTER", "KEYSLOT", "leasehold:{lock:moved}:h"]);
    let ids: Vec<String> = nodes.iter().map(|node| node.ask(&["CLUSTER", "MYID"])).collect();
    for round in 0..20 {
        let before = cycles.load(Ordering::SeqCst);
        for node in &nodes {
            node.ask::<()>(&["CLUSTER", "SETSLOT", &slot.to_string(), "NODE", &ids[round % 2]]);
        }
        for locker in &lockers {
            locker.lock("moved").lock().await.unwrap().release().await.unwrap();
        }
        until("it goes on", || cycles.load(Ordering::SeqCst) > before + TASKS).await;
    }
    ends.store(true, Ordering::Relaxed);
    tasks.join_all().await;
    for locker in lockers {
        locker.close().await;
    }
}

/// D32, R-09: what a replica does not have yet when it is promoted, it grants anew; whoever had it learns it from its next
/// look. This is the limit that the documentation of `leasehold::redis` states.
#[tokio::test]
async fn a_replica_that_lags_and_is_promoted_grants_anew() {
    let mut primary = Server::start();
    let replica = Server::replica_of(&primary);
    let line = Proxy::to(primary.port());
    let a = Locker::at(&line.url(), patient("a").heartbeat_interval(Duration::from_mins(1))).unwrap();
    let known = a.lock("known").lock().await.unwrap();
    assert_eq!(primary.wait(1, LONG), 1);
    replica.cut_replication();
    let guard = a.lock("job").lock().await.unwrap();
    let read = a.rw_lock("catalogue").read().await.unwrap();
    primary.kill();
    replica.promote();
    line.redirect(replica.port());
    let b = locker(&replica, quick("b"));
    let next = b.lock("job").lock_timeout(LONG).await.unwrap();
    let writes = b.rw_lock("catalogue").write_timeout(LONG).await.unwrap();
    assert!(b.lock("known").try_lock().await.unwrap().is_none(), "what it had, it has");
    assert!(!guard.check().await && !read.check().await);
    for lost in [&guard, &read] {
        assert_eq!(lost.reason(), Some(Reason::Lost(LossCause::Gone)));
    }
    assert!(known.check().await && next.check().await && writes.check().await);
    assert!(guard.release().await.is_err() && read.release().await.is_err());
    for guard in [known, next, writes] {
        guard.release().await.unwrap();
    }
    a.close().await;
    b.close().await;
}

/// D32: who waits for a replica is granted nothing that it does not have, and nothing is left of it.
#[tokio::test]
async fn a_grant_that_no_replica_acknowledges_fails_and_is_undone() {
    let primary = Server::start();
    let replica = Server::replica_of(&primary);
    let a = Locker::redis(Target::from(primary.client()).wait_for_replicas(1), quick("a")).unwrap();
    let url = format!("{}?wait_for_replicas=1", primary.url());
    let c = Locker::at(&url, quick("c")).unwrap();
    let b = locker(&primary, quick("b"));
    for locker in [&a, &c] {
        let guard = locker.lock("job").lock().await.unwrap();
        assert!(replica.get("leasehold:{lock:job}:h").is_some(), "the replica has it");
        guard.release().await.unwrap();
    }
    let ttl = Duration::from_mins(10);
    let held = a.lock("held").lock().await.unwrap();
    replica.cut_replication();
    for locker in [&a, &c] {
        let failed = [
            locker.lock("job").ttl(ttl).try_lock().await.unwrap_err(),
            locker.rw_lock("read").ttl(ttl).try_read().await.unwrap_err(),
            locker.rw_lock("written").ttl(ttl).try_write().await.unwrap_err(),
        ];
        for error in failed {
            let LockError::Failed { reason } = &error else { panic!("{error:?}") };
            assert!(reason.starts_with("0 of 1 replicas") && !reason.contains("  "), "{reason}");
        }
    }
    assert_eq!(primary.keys("*"), ["leasehold:{lock:held}:h"]);
    // Whoever asks for less is not in its way, and what was granted before is kept.
    b.lock("job").lock().await.unwrap().release().await.unwrap();
    assert!(held.check().await);
    held.release().await.unwrap();
    replica.heal_replication();
    a.lock("job").lock_timeout(LONG).await.unwrap().release().await.unwrap();
    for locker in [a, b, c] {
        locker.close().await;
    }
}
