//! What the store on Redis leaves in the server, and what it takes from it: grants, their time to live, tokens, layouts.
//!
//! What the stores have in common runs on Redis and on a cluster as well: `Stage::all`.

use std::collections::HashSet;
use std::convert::Infallible;
use std::time::Duration;

use leasehold::redis::{Layout, Target};
use leasehold::{Lease, LockError, LockGuard, Locker, LossCause, MAX_TTL, Options, Reason, Scope};
use tracing_subscriber::layer::SubscriberExt as _;

use crate::support::member::over;
use crate::support::recorder::Recorder;
use crate::support::redis::{Data, Monitor, Server};
use crate::support::{Log, Member, Stage, eventually, now, on_every_store, quick, until};

/// Where no test waits for so long unless something is wrong.
const LONG: Duration = Duration::from_secs(20);

const MINUTE: Duration = Duration::from_mins(1);

const ORDERS: Scope<str> = Scope::new("orders");

fn locker(server: &Server, options: Options) -> Locker {
    Locker::redis(server.client(), options).unwrap()
}

/// As [`quick`], but no heartbeat comes in the time of a test: the ttl is a minute, too.
fn still(who: &str) -> Options {
    quick(who).heartbeat_interval(MINUTE)
}

/// How often the keys of a name were set, and by which messages of a client; none may have set a time to live by itself.
fn sets(monitor: &Monitor, server: &Server, key: &str) -> (usize, Vec<String>) {
    let seen = monitor.seen(server);
    let of_key: Vec<_> = seen.iter().filter(|it| it.words.iter().any(|word| word == key)).collect();
    assert!(!of_key.iter().any(|it| it.name().contains("EXPIRE")), "{of_key:?}");
    let set = of_key.iter().filter(|it| it.name() == "SET").count();
    let messages = of_key.iter().filter(|it| it.was_sent()).map(|it| it.name().to_owned()).collect();
    (set, messages)
}

/// R-01, D28: one message and one SET with NX and PX, in whole milliseconds that are never fewer than were meant.
#[tokio::test]
async fn an_acquire_is_one_write_with_its_time_to_live() {
    let server = Server::start();
    let a = locker(&server, still("a"));
    a.lock("warm").lock().await.unwrap().release().await.unwrap();
    let monitor = server.monitor();
    let least = a.bounds().ttl;
    let ms = Duration::from_millis;
    for ttl in [None, Some(ms(1)), Some(least + ms(1)), Some(ms(90_000)), Some(MAX_TTL)] {
        let (lock, key) = (a.lock("job"), "leasehold:{lock:job}:h");
        let lock = match ttl {
            Some(ttl) => lock.ttl(ttl),
            None => lock,
        };
        let whole = ttl.unwrap_or(least).max(least);
        for is_try in [true, false] {
            monitor.forget(&server);
            let guard =
                if is_try { lock.try_lock().await.unwrap().unwrap() } else { lock.lock().await.unwrap() };
            let (set, messages) = sets(&monitor, &server, key);
            assert_eq!((set, &*messages), (1, &[if is_try { "SET" } else { "EVALSHA" }.to_owned()][..]));
            let left = server.pttl(key).unwrap();
            assert!(left + MINUTE / 2 > whole && left <= whole + ms(1), "{left:?} of {whole:?}");
            guard.release().await.unwrap();
            assert_eq!(server.get(key), None);
        }
    }
    // Half a millisecond is rounded up.
    let ttl = Duration::from_micros(90_000_500);
    monitor.forget(&server);
    let guard = a.lock("job").ttl(ttl).try_lock().await.unwrap().unwrap();
    let seen = monitor.seen(&server);
    let set = seen.iter().find(|it| it.name() == "SET").unwrap();
    assert_eq!(set.words[3..], ["NX", "PX", "90001", "GET"]);
    guard.release().await.unwrap();
    // An attempt in vain writes nothing to the lock.
    let b = locker(&server, still("b"));
    let guard = b.lock("job").lock().await.unwrap();
    let held = server.get("leasehold:{lock:job}:h");
    assert!(a.lock("job").ttl(MAX_TTL).try_lock().await.unwrap().is_none());
    assert_eq!(server.get("leasehold:{lock:job}:h"), held);
    assert!(server.pttl("leasehold:{lock:job}:h").unwrap() <= least);
    guard.release().await.unwrap();
}

/// R-01, D28: nothing is asked of the server, not even a connection.
#[tokio::test]
async fn a_ttl_that_is_none_is_refused_before_any_call() {
    let server = Server::start();
    let a = locker(&server, quick("a"));
    for ttl in
        [Duration::ZERO, Duration::from_nanos(999_999), MAX_TTL + Duration::from_nanos(1), Duration::MAX]
    {
        let refused = [
            a.lock("job").ttl(ttl).try_lock().await.unwrap_err(),
            a.lock("job").ttl(ttl).lock().await.unwrap_err(),
            a.rw_lock("job").ttl(ttl).read().await.unwrap_err(),
            a.rw_lock("job").ttl(ttl).write_timeout(LONG).await.unwrap_err(),
        ];
        for error in refused {
            assert!(matches!(error, LockError::Ttl { ttl: it } if it == ttl), "{error:?}");
        }
    }
    assert_eq!(server.clients(), []);
}

/// R-01: the ttl of a scope is that of its locks; and a check gives the whole of it anew, as a heartbeat does.
#[tokio::test]
async fn a_check_restarts_the_whole_ttl() {
    const JOBS: Scope<str> = Scope::new("jobs").ttl(Duration::from_mins(5));
    let server = Server::start();
    for heartbeats in [false, true] {
        let a = locker(&server, if heartbeats { quick("a") } else { still("a") });
        let jobs = a.scope(JOBS);
        let lock = jobs.lock("42").lock().await.unwrap();
        let write = jobs.rw_lock("1").write().await.unwrap();
        let read = jobs.rw_lock("2").read().await.unwrap();
        let held = [
            (&lock, "leasehold:{lock+scope:4:jobs42}:h"),
            (&write, "leasehold:{rwlock+scope:4:jobs1}:h"),
            (&read, "leasehold:{rwlock+scope:4:jobs2}:r"),
        ];
        for (guard, key) in held {
            let is_whole =
                |left: &Option<Duration>| left.is_some_and(|left| left > 4 * MINUTE && left <= 5 * MINUTE);
            assert!(is_whole(&server.pttl(key)), "{key}: {:?}", server.pttl(key));
            assert_eq!(server.ask::<i32>(&["PEXPIRE", key, "30000"]), 1);
            if heartbeats {
                eventually("a heartbeat restarts it", || server.pttl(key), is_whole).await;
            } else {
                assert!(server.pttl(key).unwrap() <= MINUTE / 2);
                assert!(guard.check().await);
                assert!(is_whole(&server.pttl(key)), "{key}: {:?}", server.pttl(key));
            }
        }
        for guard in [lock, write, read] {
            guard.release().await.unwrap();
        }
        a.close().await;
    }
}

/// The random bits in all that the server has now.
fn bits(server: &Server) -> Vec<String> {
    let mut values = Vec::new();
    for key in server.keys("leasehold:*") {
        match server.try_ask::<Vec<u8>>(&["GET", &key]) {
            Ok(value) => values.push(value),
            Err(_) => values.extend(server.ask::<Vec<Vec<u8>>>(&["ZRANGE", &key, "0", "-1"])),
        }
    }
    let words = |value: Vec<u8>| {
        let text = String::from_utf8(value).unwrap();
        text.split(' ').map(str::to_owned).collect::<Vec<_>>()
    };
    let is_token = |word: &String| word.len() == 32 && word.bytes().all(|byte| byte.is_ascii_hexdigit());
    values.into_iter().flat_map(words).filter(is_token).collect()
}

/// R-02: each grant has its own, and no error, event or text of ours shows them.
#[tokio::test]
async fn the_bits_of_a_grant_are_its_own_and_nobody_is_told_them() {
    let server = Server::start();
    let recorder = Recorder::default();
    let subscriber = tracing_subscriber::registry().with(recorder.clone());
    let (a, b, c) = {
        let _current = tracing::subscriber::set_default(subscriber);
        (locker(&server, quick("a")), locker(&server, quick("b")), locker(&server, quick("c")))
    };
    let (mut told, mut all) = (Vec::new(), HashSet::new());
    let mut grants = 0;
    for round in 0..20 {
        let lock = a.lock("job").lock().await.unwrap();
        let (one, two) = (a.rw_lock("read").read().await.unwrap(), b.rw_lock("read").read().await.unwrap());
        let log = Log::default();
        let mut member = Member::on(&a, "led", "a", &log);
        let lease = member.leads().await;
        lease.fencing_token().await.unwrap();
        let found = bits(&server);
        assert_eq!(found.len(), 4, "{round}");
        grants += found.len();
        all.extend(found);
        let errors = [
            b.lock("job").lock_timeout(Duration::from_millis(50)).await.unwrap_err(),
            c.rw_lock("read").write_timeout(Duration::from_millis(50)).await.unwrap_err(),
        ];
        let snapshot = c.observer().snapshot().await.unwrap();
        let shown = (&a, &lock, &one, &two, &lease, a.lock("job"), a.rw_lock("read"), a.state("led"));
        told.push(format!("{errors:?} {} {} {snapshot:?} {shown:?}", errors[0], errors[1]));
        // Sessions and leases that are lost tell of it.
        server.kill_clients_named("leasehold/a");
        assert!(one.check().await);
        server.ask::<u32>(&["DEL", "leasehold:{lock:job}:h"]);
        let lost = lock.release().await.unwrap_err();
        told.push(format!("{lost:?} {lost}"));
        one.release().await.unwrap();
        two.release().await.unwrap();
        member.stop().await.unwrap();
    }
    assert_eq!(all.len(), grants, "some are the same");
    told.push(format!("{:?}", recorder.all()));
    let told = told.join(" ");
    for token in &all {
        assert!(!told.contains(token), "{token} is told");
    }
    // The test would see them.
    assert!(told.contains("acquired") && told.contains("job"), "{told}");
}

/// How a holder whose lease the server has ended asks for more.
#[derive(Clone, Copy, Debug)]
enum Late {
    Check,
    Heartbeat,
    Release,
    Drop,
    Keep,
}

/// A lock of some sort, and the key of its holder.
#[derive(Clone, Copy, Debug)]
enum Sort {
    Lock,
    Write,
    Read,
}

impl Sort {
    const fn key(self) -> &'static str {
        match self {
            Self::Lock => "leasehold:{lock:job}:h",
            Self::Write => "leasehold:{rwlock:job}:h",
            Self::Read => "leasehold:{rwlock:job}:r",
        }
    }

    async fn enter(self, locker: &Locker) -> LockGuard {
        match self {
            Self::Lock => locker.lock("job").lock_timeout(LONG).await.unwrap(),
            Self::Write => locker.rw_lock("job").write_timeout(LONG).await.unwrap(),
            Self::Read => locker.rw_lock("job").read_timeout(LONG).await.unwrap(),
        }
    }

    /// What stands in the server.
    fn value(self, server: &Server) -> Vec<Vec<u8>> {
        match self {
            Self::Read => server.ask(&["ZRANGE", self.key(), "0", "-1", "WITHSCORES"]),
            _ => server.get(self.key()).into_iter().collect(),
        }
    }
}

/// R-03, D27: whatever comes late from a holder whose lease has ended, its successor's value and time to live stay, and
/// where there is none, nothing comes to life.
#[tokio::test]
async fn what_comes_late_touches_no_successor_and_revives_nothing() {
    for sort in [Sort::Lock, Sort::Write, Sort::Read] {
        for late in [Late::Check, Late::Heartbeat, Late::Release, Late::Drop, Late::Keep] {
            for succeeds in [true, false] {
                let case = format!("{sort:?} {late:?} {succeeds}");
                let server = Server::start();
                let heartbeats = matches!(late, Late::Heartbeat);
                let a = locker(&server, if heartbeats { quick("a") } else { still("a") });
                let b = locker(&server, still("b"));
                let guard = sort.enter(&a).await;
                server.ask::<u32>(&["DEL", sort.key()]);
                // A reader may have been told by the heartbeat before the other one is in: it is no matter here.
                let next = if succeeds { Some(sort.enter(&b).await) } else { None };
                let (value, left) = (sort.value(&server), server.pttl(sort.key()));
                assert_eq!(value.is_empty(), !succeeds, "{case}");
                let lost = |end: Result<(), LockError>| {
                    assert!(
                        matches!(end, Err(LockError::Lost { cause: LossCause::Gone })),
                        "{case}: {end:?}"
                    );
                };
                match late {
                    Late::Check => {
                        assert!(!guard.check().await, "{case}");
                        assert_eq!(guard.reason(), Some(Reason::Lost(LossCause::Gone)), "{case}");
                        lost(guard.release().await);
                    }
                    Late::Heartbeat => {
                        assert_eq!(over(guard.lease()).await, Some(Reason::Lost(LossCause::Gone)), "{case}");
                        lost(guard.release().await);
                    }
                    Late::Release => lost(guard.release().await),
                    Late::Keep => lost(guard.keep().await),
                    Late::Drop => drop(guard),
                }
                // What this one asked for before has been carried out.
                a.lock("another").lock().await.unwrap().release().await.unwrap();
                assert_eq!(sort.value(&server), value, "{case}");
                assert!(
                    server.pttl(sort.key()) <= left,
                    "{case}: {:?} after {left:?}",
                    server.pttl(sort.key())
                );
                if let Some(next) = next {
                    assert!(next.check().await, "{case}");
                    next.release().await.unwrap();
                }
                a.close().await;
                b.close().await;
                until("nothing is left", || server.keys("*").is_empty()).await;
            }
        }
    }
}

/// R-05: it stays for its ttl, and no longer, whatever becomes of its Locker; nobody renews it.
#[tokio::test]
async fn what_is_kept_stays_for_its_ttl_without_a_handle() {
    for sort in [Sort::Lock, Sort::Write, Sort::Read] {
        let server = Server::start();
        let (a, b) = (locker(&server, quick("a")), locker(&server, quick("b")));
        let guard = sort.enter(&a).await;
        let value = sort.value(&server)[0].clone();
        let since = now();
        guard.keep().await.unwrap();
        let is_there = || sort.value(&server).first() == Some(&value);
        let left = server.pttl(sort.key()).unwrap();
        assert!(is_there() && left <= a.bounds().ttl + Duration::from_millis(1), "{left:?}");
        // Its own Locker has no way in, either. A connection that is lost, a session that ends, and the next one, let it be.
        for locker in [&a, &b] {
            let is_in = match sort {
                Sort::Lock => locker.lock("job").try_lock().await.unwrap(),
                _ => locker.rw_lock("job").try_write().await.unwrap(),
            };
            assert!(is_in.is_none(), "{sort:?}");
        }
        server.kill_clients_named("leasehold/a");
        a.lock("another").lock().await.unwrap().release().await.unwrap();
        assert!(is_there(), "{sort:?}");
        a.close().await;
        drop(a);
        let again = locker(&server, quick("a"));
        again.lock("another").lock().await.unwrap().release().await.unwrap();
        assert!(is_there(), "{sort:?}");
        assert!(server.pttl(sort.key()).unwrap() <= left, "somebody renews it");
        let next = match sort {
            Sort::Lock => b.lock("job").lock_timeout(LONG).await.unwrap(),
            _ => b.rw_lock("job").write_timeout(LONG).await.unwrap(),
        };
        assert!(since.elapsed() >= b.bounds().ttl, "in after {:?}", since.elapsed());
        next.release().await.unwrap();
        again.close().await;
        b.close().await;
        until("nothing is left", || server.keys("*").is_empty()).await;
    }
}

/// R-05: a long one too, though the session that had it is given up afterwards, with a connection that loses answers.
#[tokio::test]
async fn what_is_kept_is_undone_by_no_later_session() {
    let server = Server::start();
    let a = locker(&server, quick("a"));
    let key = "leasehold:{lock:job}:h";
    a.lock("job").ttl(5 * MINUTE).lock().await.unwrap().keep().await.unwrap();
    let value = server.get(key);
    // Polled once, it is kept also if nobody waits for that.
    let guard = a.lock("other").ttl(5 * MINUTE).lock().await.unwrap();
    {
        let mut keeping = std::pin::pin!(guard.keep());
        std::future::poll_fn(|cx| {
            assert!(keeping.as_mut().poll(cx).is_pending());
            std::task::Poll::Ready(())
        })
        .await;
    }
    let lost = a.lock("lost").lock().await.unwrap();
    server.stop();
    assert!(matches!(over(lost.lease()).await, Some(Reason::Lost(_))));
    server.cont();
    a.lock("another").lock().await.unwrap().release().await.unwrap();
    drop(lost);
    a.close().await;
    assert_eq!(server.get(key), value);
    assert!(server.get("leasehold:{lock:other}:h").is_some());
    assert_eq!(server.get("leasehold:{lock:lost}:h"), None);
}

/// R-11: what is shown on every store is shown on a server and on a cluster.
#[tokio::test]
async fn the_suites_of_every_store_run_on_redis() {
    let ran = std::sync::Mutex::new(Vec::new());
    on_every_store(async |stage| {
        let a = stage.locker(quick("a"));
        a.lock("job").lock().await.unwrap().release().await.unwrap();
        a.close().await;
        ran.lock().unwrap().push(stage.kind());
    })
    .await;
    let ran = ran.into_inner().unwrap();
    assert!(ran.contains(&"Redis") && ran.contains(&"a cluster of Redis"), "{ran:?}");
}

/// R-05: elsewhere locks end with their session, and it is told so.
#[tokio::test]
async fn only_on_redis_can_a_lock_be_kept() {
    on_every_store(async |stage| {
        let a = stage.locker(quick("a"));
        let guard = a.lock("job").lock().await.unwrap();
        let kept = guard.keep().await;
        match stage {
            Stage::Redis(_) | Stage::Cluster(_) => kept.unwrap(),
            // Its locks have a time to live, too.
            Stage::Expiring(_) => {}
            _ => {
                assert!(matches!(kept, Err(LockError::EndsWithSession)), "{kept:?}");
                let b = stage.locker(quick("b"));
                b.lock("job").try_lock().await.unwrap().expect("it was released").release().await.unwrap();
                b.close().await;
            }
        }
        a.close().await;
    })
    .await;
}

/// T-07, R-08: through restarts, losses of all data, forgotten scripts, and a replica that lagged behind.
#[tokio::test]
async fn tokens_of_redis_grow_whatever_is_lost() {
    let mut server = Server::durable();
    let mut last = None;
    for round in 0..10 {
        let a = locker(&server, quick(&format!("replica-{round}")));
        let log = Log::default();
        let mut member = Member::on(&a, "job", "it", &log);
        let lease = member.leads().await;
        let token = lease.fencing_token().await.unwrap();
        assert!(last < Some(token), "{token} comes after {last:?} in round {round}");
        last = Some(token);
        match round % 5 {
            0 => server.restart(Data::Kept).await,
            1 => server.restart(Data::Lost).await,
            2 => server.ask(&["FLUSHALL"]),
            3 => server.script_flush(),
            _ => {}
        }
        // Of a new term on the same session, or on the next one.
        lease.step_down();
        until("its term is over", || !lease.is_held()).await;
        let lease = member.leads().await;
        let token = lease.fencing_token().await.unwrap();
        assert!(last < Some(token), "{token} comes after {last:?} in round {round}");
        last = Some(token);
        member.stop().await.unwrap();
        a.close().await;
    }
    let replica = Server::replica_of(&server);
    replica.cut_replication();
    for at in [&server, &replica] {
        at.promote();
        let a = locker(at, quick("a"));
        let led = a
            .run("job", async |lease: Lease| Ok::<_, Infallible>(lease.fencing_token().await.unwrap()))
            .await;
        let token = led.unwrap().unwrap();
        assert!(last < Some(token), "{token} comes after {last:?}");
        last = Some(token);
        a.close().await;
    }
}

/// T-07: also where the counter is ahead of the clock, as after a clock that went back.
#[tokio::test]
async fn tokens_of_redis_grow_though_the_clock_has_gone_back() {
    let server = Server::start();
    let a = locker(&server, quick("a"));
    let guard = a.lock("job").lock().await.unwrap();
    let first = guard.fencing_token().await.unwrap().as_i64();
    guard.release().await.unwrap();
    let [counter] = &server.keys("leasehold:{token:*}")[..] else { panic!("one counter") };
    // An hour ahead.
    let ahead = first + 3_600_000_000;
    server.ask::<()>(&["SET", counter, &ahead.to_string()]);
    for n in 1..=3 {
        let guard = a.lock("job").lock().await.unwrap();
        assert_eq!(guard.fencing_token().await.unwrap().as_i64(), ahead + n);
        assert_eq!(guard.fencing_token().await.unwrap().as_i64(), ahead + n, "one a term");
        guard.release().await.unwrap();
    }
    a.close().await;
}

/// T-07, R-10: the keys that stay are bounded, however many names there are.
#[tokio::test]
async fn there_are_at_most_1024_counters_of_tokens() {
    let server = Server::start();
    let a = locker(&server, quick("a"));
    for n in 0..2_500_u32 {
        let guard = a.lock(format!("job {n}")).lock().await.unwrap();
        guard.fencing_token().await.unwrap();
        guard.release().await.unwrap();
    }
    a.close().await;
    let counters = server.keys("*").len();
    assert!((800..=1024).contains(&counters), "{counters}");
}

/// R-10: by the URL and by the target; names in a scope have the golden keys, all others those of leasehold. What others
/// have there is in the way, and stays.
#[tokio::test]
async fn the_layout_of_wakuwaku_shares_its_locks_with_it() {
    let server = Server::start();
    let target = Target::from(server.client()).layout(Layout::Wakuwaku);
    let lockers = [
        Locker::at(&format!("{}?layout=wakuwaku", server.url()), quick("a")).unwrap(),
        Locker::redis(target, quick("b")).unwrap(),
    ];
    for a in &lockers {
        let orders = a.scope(ORDERS);
        let lock = orders.lock("42").lock().await.unwrap();
        let write = orders.rw_lock("1").write().await.unwrap();
        let read = orders.rw_lock("2").read().await.unwrap();
        let plain = a.lock("plain").lock().await.unwrap();
        assert_eq!(
            server.keys("*"),
            [
                "@@wakuwaku-entity:Lock:orders:42",
                "@@wakuwaku-entity:RwLock:{orders:1}:w",
                "@@wakuwaku-entity:RwLock:{orders:2}:r",
                "leasehold:{lock:plain}:h",
            ]
        );
        for guard in [lock, write, read, plain] {
            assert!(guard.check().await);
            guard.release().await.unwrap();
        }
        until("nothing is left", || server.keys("*").is_empty()).await;

        let theirs = ["@@wakuwaku-entity:Lock:orders:42", "@@wakuwaku-entity:RwLock:{orders:42}:w"];
        for key in theirs {
            server.ask::<()>(&["SET", key, "0123-uuid", "PX", "60000"]);
        }
        // Scored by when it ends.
        let reader = "@@wakuwaku-entity:RwLock:{orders:7}:r";
        server.ask::<()>(&["ZADD", reader, "99999999999999", "0123-uuid"]);
        assert!(orders.lock("42").try_lock().await.unwrap().is_none());
        assert!(orders.rw_lock("42").try_read().await.unwrap().is_none());
        assert!(orders.rw_lock("42").try_write().await.unwrap().is_none());
        assert!(orders.rw_lock("7").try_write().await.unwrap().is_none());
        orders.rw_lock("7").try_read().await.unwrap().expect("it is read as well").release().await.unwrap();
        let late = orders.lock("42").lock_timeout(Duration::from_millis(200)).await.unwrap_err();
        assert!(matches!(late, LockError::Timeout { .. }), "{late:?}");
        for key in theirs {
            assert_eq!(server.get(key).as_deref(), Some(&b"0123-uuid"[..]));
        }
        // When they let go, it is ours at the next poll.
        let waits = async { orders.lock("42").lock_timeout(LONG).await.unwrap() };
        let frees = async { server.ask::<u32>(&["DEL", theirs[0]]) };
        tokio::join!(waits, frees).0.release().await.unwrap();
        server.ask::<()>(&["FLUSHALL"]);
    }
    let ambiguous = lockers[0].scope(Scope::<str>::new("a:b")).lock("c").try_lock().await.unwrap_err();
    assert!(matches!(&ambiguous, LockError::Failed { reason } if reason.contains("a:b")), "{ambiguous:?}");
    assert!(server.keys("*").is_empty());
    for locker in lockers {
        locker.close().await;
    }
}

/// D05, L-04: whoever writes or reads is named to those whose time is over.
#[tokio::test]
async fn who_reads_or_writes_is_named_to_those_who_waited_in_vain() {
    let server = Server::start();
    let (a, b) = (locker(&server, quick("the-holder")), locker(&server, quick("b")));
    let limit = Duration::from_secs(2);
    let (held, wanted) = (a.rw_lock("catalogue"), b.rw_lock("catalogue"));
    let read = held.read().await.unwrap();
    let late = wanted.write_timeout(limit).await.unwrap_err();
    read.release().await.unwrap();
    let write = held.write_timeout(LONG).await.unwrap();
    let more =
        [wanted.write_timeout(limit).await.unwrap_err(), wanted.read_timeout(limit).await.unwrap_err()];
    for error in [late].iter().chain(&more) {
        let LockError::Timeout { holder, .. } = error else { panic!("{error:?}") };
        assert!(holder.as_ref().is_some_and(|it| it.starts_with("the-holder")), "{error}");
        assert!(error.to_string().contains("the-holder"), "{error}");
    }
    write.release().await.unwrap();
    a.close().await;
    b.close().await;
}
