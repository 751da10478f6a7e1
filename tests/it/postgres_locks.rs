//! Critical sections on PostgreSQL: what they cost the server, and how locks have failed on it before.

use std::time::Duration;

use leasehold::{Kind, Lease, LockError, Locker};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use tokio::task::JoinSet;

use crate::support::postgres::{Cluster, Database};
use crate::support::{AT_ONCE, Log, Member, eventually, now, quick, sleepy, until};

/// Where no test waits for so long unless something is wrong.
const LONG: Duration = Duration::from_secs(20);

fn locker(database: &Database, who: &str) -> Locker {
    Locker::postgres(database.options(), quick(who)).unwrap()
}

async fn nothing_is_left(database: &Database) {
    let rows = || database.admin().advisory_rows();
    eventually("no advisory row is left", rows, Vec::is_empty).await;
}

/// L-12: a thousand at once are one session, and nobody waits for each other's round trip.
#[tokio::test]
async fn a_thousand_locks_are_held_by_one_session() {
    let database = Database::new();
    let a = locker(&database, "a");
    a.lock("0").lock().await.unwrap().release().await.unwrap();
    let all = async {
        let mut tasks = JoinSet::new();
        for n in 0..1000 {
            let lock = a.lock(format!("invoice:{n}"));
            tasks.spawn(async move { lock.lock().await.unwrap() });
        }
        tasks.join_all().await
    };
    let guards = all.await;
    assert_eq!((guards.len(), database.admin().backends("leasehold/%").len()), (1000, 1));
    assert!(guards[999].check().await && guards.iter().all(|guard| guard.is_held()));
    drop(guards);
    a.close().await;
    nothing_is_left(&database).await;
}

/// D01, D13, D14: the work uses a pool of one connection, which the locks have nothing to do with; whatever becomes of
/// the tasks, nothing is left.
#[tokio::test]
async fn locks_take_no_connection_of_a_pool() {
    let database = Database::new();
    let pool = PgPoolOptions::new().max_connections(1).connect_with(database.options()).await.unwrap();
    let lockers = [locker(&database, "a"), locker(&database, "b")];
    let mut tasks = JoinSet::new();
    for task in 0..8_usize {
        let (lock, own, pool) =
            (lockers[task % 2].lock("shared"), lockers[task % 2].lock(format!("own:{task}")), pool.clone());
        tasks.spawn(async move {
            for round in 0..25_usize {
                let guard = own.lock_timeout(LONG).await.unwrap();
                let one = sqlx::query_scalar::<_, i32>("SELECT 1").fetch_one(&pool);
                assert_eq!(one.await.unwrap(), 1);
                if (task + round) % 5 == 0 {
                    // It is aborted in the middle of the section.
                    let lock = lock.clone();
                    let aborted = tokio::spawn(async move {
                        let _guard = lock.lock_timeout(LONG).await.unwrap();
                        std::future::pending::<()>().await;
                    });
                    tokio::task::yield_now().await;
                    aborted.abort();
                    assert!(aborted.await.unwrap_err().is_cancelled());
                }
                let work = lock.with_timeout(LONG, async |_: Lease| {
                    let one = sqlx::query_scalar::<_, i32>("SELECT 1").fetch_one(&pool);
                    Ok::<_, anyhow::Error>(one.await?)
                });
                assert_eq!(work.await.unwrap(), 1);
                guard.release().await.unwrap();
            }
        });
    }
    tasks.join_all().await;
    let other = locker(&database, "c");
    other.lock("shared").try_lock().await.unwrap().expect("it is free").release().await.unwrap();
    for locker in lockers.into_iter().chain([other]) {
        locker.close().await;
    }
    nothing_is_left(&database).await;
}

/// D01: the session is ended under a guard: its release is never told as if nothing had happened.
#[tokio::test]
async fn a_terminated_session_is_told_by_the_release() {
    let database = Database::new();
    let a = locker(&database, "a");
    let guard = a.lock("job").lock().await.unwrap();
    database.admin().terminate(database.admin().holder(guard_key()).unwrap());
    let told = guard.release().await;
    assert!(matches!(told, Err(LockError::Lost { .. })), "{told:?}");
    a.lock("job").lock_timeout(LONG).await.unwrap().release().await.unwrap();
    a.close().await;
    nothing_is_left(&database).await;
}

fn guard_key() -> i64 {
    leasehold::Key::of(Kind::Lock, "job").get()
}

/// D17: beside a holder and three that wait, and from inside of the section.
#[tokio::test]
async fn locks_and_those_who_wait_stall_no_index_build() {
    let database = Database::new();
    let mut builder = database.connect().await;
    sqlx::raw_sql("CREATE TABLE t (x int)").execute(&mut builder).await.unwrap();
    let a = locker(&database, "a");
    let guard = a.lock("job").lock().await.unwrap();
    let mut waiting = JoinSet::new();
    for who in ["b", "c", "d"] {
        let lock = locker(&database, who).lock("job");
        waiting.spawn(async move { lock.lock_timeout(LONG).await.unwrap().release().await.unwrap() });
    }
    let key = leasehold::Key::of(Kind::Lock, "job");
    until("all of them wait", || database.admin().waiters(key) == 3).await;
    let since = now();
    sqlx::raw_sql("SET statement_timeout = '2s'").execute(&mut builder).await.unwrap();
    sqlx::raw_sql("CREATE INDEX CONCURRENTLY beside ON t (x)").execute(&mut builder).await.unwrap();
    println!("the index was built in {:?}", since.elapsed());
    guard.release().await.unwrap();
    waiting.join_all().await;
}

/// D18: a role whose own limits are shorter than everything: a limit to waiting is kept, and nothing else happens.
#[tokio::test]
async fn the_limits_of_a_role_are_not_those_of_a_lock() {
    let cluster = Cluster::new();
    cluster.admin().sql("CREATE ROLE app LOGIN");
    for setting in ["statement_timeout = '200ms'", "lock_timeout = '100ms'"] {
        cluster.admin().sql(&format!("ALTER ROLE app SET {setting}"));
    }
    let target: PgConnectOptions = cluster.url("app", "", "postgres").parse().unwrap();
    let locker = |who| Locker::postgres(target.clone(), sleepy(who)).unwrap();
    let (a, b) = (locker("a"), locker("b"));
    let guard = a.lock("job").lock().await.unwrap();
    let (limit, since) = (Duration::from_secs(1), now());
    let late = b.lock("job").lock_timeout(limit).await.unwrap_err();
    assert!(matches!(&late, LockError::Timeout { waited, .. } if *waited >= limit), "{late:?}");
    assert!(since.elapsed() < limit + AT_ONCE);
    assert!(guard.check().await);
    let waits = tokio::spawn({
        let lock = b.lock("job");
        async move { lock.lock_timeout(LONG).await.unwrap().release().await.unwrap() }
    });
    let key = leasehold::Key::of(Kind::Lock, "job");
    until("it waits", || cluster.admin().waiters(key) == 1).await;
    guard.release().await.unwrap();
    waits.await.unwrap();
}

/// L-17, L-19: a writer's intent is given back, also where a lease of the same raw key was granted on its session meanwhile: it
/// would keep readers out for ever.
#[tokio::test]
async fn an_intent_is_given_back_though_the_key_was_led_meanwhile() {
    let database = Database::new();
    let (a, b) = (locker(&database, "a"), locker(&database, "b"));
    let (name, log) = (leasehold::Name::key(7), Log::default());
    let reads = b.rw_lock(&name).read().await.unwrap();
    let mut leader = Member::on(&a, &name, "a", &log);
    leader.stands_by().await;
    let writer = tokio::spawn({
        let lock = a.rw_lock(&name);
        async move { lock.write().await.unwrap().release().await.unwrap() }
    });
    let intents =
        || database.admin().one::<usize>("SELECT count(*) FROM pg_locks WHERE classid = 1818583415");
    until("the writer shows that it waits", || intents() == 1).await;
    reads.release().await.unwrap();
    leader.leads().await;
    leader.stop().await.unwrap();
    writer.await.unwrap();
    assert_eq!(intents(), 0);
    assert!(b.rw_lock(&name).try_read().await.unwrap().is_some());
    nothing_is_left(&database).await;
}
