//! One Locker on PostgreSQL is one session: its own, apart from every pool, and nothing is left on the server.

use std::collections::HashSet;
use std::convert::Infallible;
use std::time::Duration;

use leasehold::{Key, Kind, Lease, Locker, State};
use sqlx::postgres::PgPoolOptions;
use sqlx::{Connection as _, PgConnection};

use crate::support::postgres::{Cluster, Database, Login, Stop};
use crate::support::{AT_ONCE, Log, Member, now, quick, sleepy, until};

fn key(name: &str) -> i64 {
    Key::of(Kind::Lease, name).get()
}

/// F-06: 1,000 names, held by one Locker and waited for by another, are one session each and one statement a poll.
#[tokio::test]
async fn a_thousand_names_are_one_session_and_one_statement_a_poll() {
    let cluster = Cluster::with(Login::Trust, &["log_statement=all"]);
    // A statement about 1,000 names takes its time on a machine that is busy with other tests.
    let locker = |who| {
        let options = quick(who).query_timeout(Duration::from_secs(5));
        Locker::postgres(cluster.options(), options).unwrap()
    };
    let (log, a, b) = (Log::default(), locker("a"), locker("b"));
    let names: Vec<String> = (0..1000).map(|n| format!("name {n}")).collect();
    let leading: Vec<_> = names.iter().map(|name| Member::on(&a, name, name, &log)).collect();
    until("all lead", || log.lines().len() == names.len()).await;
    let standing_by: Vec<_> = names.iter().map(|name| Member::on(&b, name, name, &log)).collect();
    until("all are known", || names.iter().all(|name| b.state(name) != State::Ended)).await;
    standing_by[0].stands_by().await;
    let last = Key::of(Kind::Lease, names.last().unwrap());
    until("all wait", || cluster.admin().waiters(last) == 1).await;
    assert_eq!(cluster.admin().backends("%").len(), 2);

    let statements = || {
        let lines = cluster.log().lines();
        lines.iter().filter(|line| line.contains("leasehold/b: LOG:  statement: ")).count()
    };
    let (before, since) = (statements(), now());
    until("ten polls", || statements() >= before + 10).await;
    let seen = statements() - before;
    // A poll each 100 ms at the earliest, and heartbeats, which keep the session from being idle.
    let polls = since.elapsed().as_millis() / 100 + 1;
    println!("{seen} statements in {polls} retry intervals");
    assert!(seen as u128 <= 2 * polls + 2, "{seen} statements in {polls} retry intervals");

    tokio::join!(a.close(), b.close());
    assert!(cluster.admin().advisory_rows().is_empty());
    for member in leading.into_iter().chain(standing_by) {
        assert_eq!(member.outcome().await.unwrap(), None);
    }
    assert_eq!(log.assert_one_at_a_time_of_each(), names.len());
}

/// F-07: through three restarts of the server, counted from its log, which shows every one that was let in.
#[tokio::test]
async fn a_locker_has_one_connection_at_most() {
    let mut cluster = Cluster::new();
    let log = Log::default();
    let locker = Locker::postgres(cluster.options(), quick("a")).unwrap();
    let mut member = Member::on(&locker, "job", "a", &log);
    member.leads().await;
    let started = cluster.log().len();
    for _ in 0..3 {
        cluster.restart(Stop::Immediate).await;
        member.leads().await;
    }
    // The tests' own connections come by the socket, and their Locker's by TCP.
    let lines = cluster.log().lines().split_off(started);
    let (mut open, mut most) = (std::collections::BTreeSet::new(), 0);
    for line in &lines {
        let backend = line.split(' ').next().unwrap();
        if line.contains("ready to accept") {
            open.clear();
        } else if line.contains("connection received: host=127.0.0.1") {
            open.insert(backend);
        } else if line.contains("disconnection: ") || line.contains("FATAL") {
            open.remove(backend);
        }
        // One that has not been let in yet may be gone again: the product looks whether anybody listens there.
        let let_in = |backend: &&&str| {
            let authorized = format!("{backend} [unknown]: LOG:  connection authorized");
            lines.iter().any(|line| line.starts_with(&authorized))
        };
        most = most.max(open.iter().filter(let_in).count());
    }
    assert_eq!(most, 1, "{lines:#?}");
    member.stop().await.unwrap();
    locker.close().await;
}

/// F-08: a pool of one connection, all of it in use.
#[tokio::test]
async fn a_locker_from_a_pools_options_takes_nothing_from_the_pool() {
    let database = Database::new();
    let pool = PgPoolOptions::new().max_connections(1).connect_with(database.options()).await.unwrap();
    let taken = pool.acquire().await.unwrap();
    let locker = Locker::postgres(pool.connect_options(), quick("a")).unwrap();
    let mut member = Member::on(&locker, "job", "a", &Log::default());
    let lease = member.leads().await;
    assert_eq!(pool.size(), 1);
    drop(taken);
    drop(pool.acquire().await.unwrap());
    assert!(pool.size() == 1 && lease.check().await);
    pool.close().await;
    assert!(lease.check().await);
    member.stop().await.unwrap();
    locker.close().await;
}

/// D01: many take and release names beside each other; every release is one, as another session sees it.
#[tokio::test]
async fn what_is_released_is_free_for_everybody() {
    let database = Database::new();
    let locker = Locker::postgres(database.options(), quick("a")).unwrap();
    let tasks: Vec<_> = (0..10)
        .map(|n| {
            let (locker, options) = (locker.clone(), database.options());
            tokio::spawn(async move {
                let name = format!("name {n}");
                let mut other = PgConnection::connect_with(&options).await.unwrap();
                for round in 0..20 {
                    let value = locker.run(&name, async |_: Lease| Ok::<_, Infallible>(round)).await.unwrap();
                    assert_eq!(value, Some(round));
                    let take = sqlx::query_scalar("SELECT pg_try_advisory_lock($1)").bind(key(&name));
                    let taken: bool = take.fetch_one(&mut other).await.unwrap();
                    assert!(taken, "{name}, round {round}");
                    let free = sqlx::query("SELECT pg_advisory_unlock($1)").bind(key(&name));
                    free.execute(&mut other).await.unwrap();
                }
                other.close().await.unwrap();
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    locker.close().await;
    assert!(database.admin().advisory_rows().is_empty());
}

/// D08, F-10: twenty terms with heartbeats in each; the key is free when the run has returned, and not before.
#[tokio::test]
async fn heartbeats_do_not_take_the_lock_again() {
    let database = Database::new();
    let locker = Locker::postgres(database.options(), quick("a")).unwrap();
    for term in 1..=20 {
        let led = locker.run("job", async |lease: Lease| {
            for _ in 0..5 {
                assert!(lease.check().await);
            }
            assert!(database.admin().holder(key("job")).is_some());
            Ok::<_, Infallible>(lease.term())
        });
        assert_eq!(led.await.unwrap(), Some(term));
        assert_eq!(database.admin().holder(key("job")), None, "term {term}");
    }
    assert_eq!(database.admin().backends("leasehold/a").len(), 1);
    locker.close().await;
}

/// F-25: no advisory row when `close` returns, also of one who waits; the backends are gone within 1 s.
#[tokio::test]
async fn close_leaves_nothing_on_the_server() {
    let database = Database::new();
    let log = Log::default();
    let (a, b) = (
        Locker::postgres(database.options(), quick("a")).unwrap(),
        Locker::postgres(database.options(), sleepy("b")).unwrap(),
    );
    let mut leader = Member::on(&a, "job", "a", &log);
    leader.leads().await;
    let standby = Member::on(&b, "job", "b", &log);
    standby.stands_by().await;
    until("it waits", || database.admin().waiters(Key::of(Kind::Lease, "job")) == 1).await;
    b.close().await;
    assert_eq!(database.admin().waiters(Key::of(Kind::Lease, "job")), 0);
    a.close().await;
    let since = now();
    assert!(database.admin().advisory_rows().is_empty());
    until("the backends are gone", || database.admin().backends("%").is_empty()).await;
    assert!(since.elapsed() < AT_ONCE);
    assert_eq!(leader.outcome().await.unwrap(), None);
    assert_eq!(standby.outcome().await.unwrap(), None);
}

/// D15, F-08: a lease outlives the lifetime of the connections of the pool whose options the Locker was made from.
#[tokio::test]
async fn a_lease_outlives_the_connections_of_a_pool() {
    let database = Database::new();
    let pool = PgPoolOptions::new()
        .max_connections(1)
        .max_lifetime(Duration::from_millis(200))
        .connect_with(database.options())
        .await
        .unwrap();
    let locker = Locker::postgres(pool.connect_options(), quick("a")).unwrap();
    let led = locker.run("job", async |lease: Lease| {
        let session = database.admin().holder(key("job"));
        let mut connections = HashSet::new();
        while connections.len() < 5 {
            let pid: i32 = sqlx::query_scalar("SELECT pg_backend_pid()").fetch_one(&pool).await.unwrap();
            connections.insert(pid);
        }
        assert!(lease.check().await);
        assert_eq!(database.admin().holder(key("job")), session);
        Ok::<_, Infallible>(lease.term())
    });
    assert_eq!(led.await.unwrap(), Some(1));
    pool.close().await;
    locker.close().await;
}

/// D16: a leader and a standby, through many beats and polls: never idle in a transaction, and between two statements
/// there is neither a transaction nor a snapshot; under a limit of the database that would end such a session.
#[tokio::test]
async fn no_session_is_ever_idle_in_a_transaction() {
    let database = Database::new();
    let admin = database.admin();
    let name: String = admin.one("SELECT current_database()");
    admin.sql(&format!("ALTER DATABASE {name} SET idle_in_transaction_session_timeout = '1s'"));
    let log = Log::default();
    let member =
        |who| Member::on(&Locker::postgres(database.options(), quick(who)).unwrap(), "job", who, &log);
    let mut leader = member("leader");
    let lease = leader.leads().await;
    let standby = member("standby");
    standby.stands_by().await;
    let beats = |locker: &Locker| locker.last_answer().unwrap();
    let (led, stood_by) = (beats(&leader.locker), beats(&standby.locker));
    let (mut looks, mut idle) = (0, 0);
    let look = || {
        let rows = admin.sql(
            "SELECT state, xact_start IS NULL AND backend_xmin IS NULL FROM pg_stat_activity \
             WHERE application_name LIKE 'leasehold/%'",
        );
        assert_eq!(rows.len(), 2, "{rows:?}");
        for row in rows {
            assert!(matches!(row[0].as_str(), "idle" | "active"), "{row:?}");
            assert!(row[0] == "active" || row[1] == "t", "{row:?}");
            idle += usize::from(row[0] == "idle");
        }
        looks += 1;
        let longer = |first, last| last > first + Duration::from_millis(1_500);
        looks >= 100 && longer(led, beats(&leader.locker)) && longer(stood_by, beats(&standby.locker))
    };
    until("both have been looked at for longer than the limit", look).await;
    println!("{idle} of {} looks met an idle session", 2 * looks);
    assert!(idle > looks, "a session is idle nearly all of the time");
    assert_eq!(lease.reason(), None);
    leader.stop().await.unwrap();
    standby.stop().await.unwrap();
}
