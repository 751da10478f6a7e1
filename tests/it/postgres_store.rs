//! What the PostgreSQL store does of its own, on a real server: its checks, its settings, its ends, its errors.

use std::convert::Infallible;
use std::time::Duration;

use leasehold::{ConnectError, Error, Lease, Locker, LossCause, Name, Options, Reason, RunError};
use sqlx::{AssertSqlSafe, Connection as _, PgConnection};

use crate::support::member::over;
use crate::support::postgres::{Cluster, Login, PgBouncer, PoolMode};
use crate::support::{Log, Member, now, pass, quick, sleepy, until};

/// But for the markers of the sessions, which are pairs.
const LOCKS: &str = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND classid <> 1818583411";

fn locker(cluster: &Cluster, options: Options) -> Locker {
    Locker::postgres(cluster.options(), options).unwrap()
}

fn url(cluster: &Cluster) -> String {
    cluster.url("postgres", "", "postgres")
}

/// How many advisory locks there are on the server, of any kind, in any database.
fn locks(cluster: &Cluster) -> u32 {
    cluster.admin().one(LOCKS)
}

/// The process id of the one session of a Locker.
fn pid(cluster: &Cluster, who: &str) -> i32 {
    let pids = cluster.admin().backends(&format!("leasehold/{who}"));
    assert_eq!(pids.len(), 1, "one session of {who}");
    pids[0]
}

/// Runs statements on a connection of the test's own.
async fn execute(connection: &mut PgConnection, sql: &str) {
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(connection).await.unwrap();
}

/// F-06, F-25, F-30: grant, registration of the standby, a pushed hand-over, a clean end.
#[tokio::test]
async fn a_release_is_pushed_and_nothing_is_left() {
    let cluster = Cluster::new();
    let (log, (one, two)) =
        (Log::default(), (locker(&cluster, sleepy("one")), locker(&cluster, sleepy("two"))));
    let mut one_runs = Member::on(&one, "job", "one", &log);
    let lease = one_runs.leads().await;
    // The lease, and its term key.
    assert_eq!(locks(&cluster), 2);
    let two_runs = Member::on(&two, "job", "two", &log);
    two_runs.stands_by().await;
    assert_eq!(locks(&cluster), 3);
    let shared = format!("{LOCKS} AND mode = 'ShareLock'");
    assert_eq!(cluster.admin().one::<u32>(&shared), 1);

    let mut latencies = Vec::new();
    let (mut leader, mut standby) = (one_runs, two_runs);
    for _ in 0..20 {
        standby.stands_by().await;
        let since = now();
        assert_eq!(leader.stop().await.unwrap(), None);
        standby.leads().await;
        latencies.push(since.elapsed());
        let (locker, who) = if standby.locker.identity() == "two" { (&one, "one") } else { (&two, "two") };
        let next = Member::on(locker, "job", who, &log);
        (leader, standby) = (standby, next);
    }
    latencies.sort();
    println!("hand-over: median {:?}, longest {:?}", latencies[10], latencies[19]);
    assert!(latencies[10] < Duration::from_millis(100), "{latencies:?}");
    drop(lease);
    leader.stop().await.unwrap();
    standby.leads().await;
    standby.stop().await.unwrap();
    log.assert_one_at_a_time();
    assert_eq!(locks(&cluster), 0);
    one.close().await;
    two.close().await;
    until("no session", || cluster.admin().backends("leasehold/%").is_empty()).await;
}

/// F-26: the last handle dropped, inside of a runtime and outside.
#[test]
fn a_dropped_locker_leaves_nothing() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let cluster = Cluster::new();
    let locker = runtime.block_on(Locker::connect(&url(&cluster), quick("one"))).unwrap();
    drop(locker);
    runtime.block_on(until("no session", || cluster.admin().backends("leasehold/%").is_empty()));
}

/// D25: functions of the same name in a schema that the role searches first are passed by.
#[tokio::test]
async fn look_alike_functions_are_passed_by() {
    let cluster = Cluster::new();
    for body in ["SELECT true", "SELECT NULL::bool", "SELECT true WHERE false"] {
        cluster.admin().sql(&format!(
            "DROP SCHEMA IF EXISTS shim CASCADE; CREATE SCHEMA shim; \
             CREATE FUNCTION shim.pg_try_advisory_lock(bigint) RETURNS bool LANGUAGE sql AS '{body}'; \
             CREATE FUNCTION shim.pg_try_advisory_lock_shared(bigint) RETURNS bool LANGUAGE sql AS '{body}'; \
             CREATE FUNCTION shim.pg_try_advisory_xact_lock(bigint) RETURNS bool LANGUAGE sql AS '{body}'; \
             CREATE FUNCTION shim.pg_advisory_unlock(bigint) RETURNS bool LANGUAGE sql AS '{body}'; \
             CREATE FUNCTION shim.pg_advisory_unlock_shared(bigint) RETURNS bool LANGUAGE sql AS '{body}'; \
             CREATE FUNCTION shim.pg_backend_pid() RETURNS int LANGUAGE sql AS 'SELECT 1'; \
             CREATE FUNCTION shim.pg_notify(text, text) RETURNS void LANGUAGE sql AS ''; \
             ALTER ROLE postgres SET search_path = shim, pg_catalog"
        ));
        let log = Log::default();
        let (one, two) = (locker(&cluster, sleepy("one")), locker(&cluster, sleepy("two")));
        let mut one_runs = Member::on(&one, "job", "one", &log);
        one_runs.leads().await;
        let mut two_runs = Member::on(&two, "job", "two", &log);
        two_runs.stands_by().await;
        one_runs.stop().await.unwrap();
        two_runs.leads().await;
        two_runs.stop().await.unwrap();
        log.assert_one_at_a_time();
        one.close().await;
        two.close().await;
    }
}

/// F-31, D25: where a function of the catalogue itself does not do what it says, the server is refused, and nothing is
/// left.
#[tokio::test]
async fn a_look_alike_server_is_refused() {
    let cluster = Cluster::with(Login::Trust, &["allow_system_table_mods=on"]);
    let functions = [
        "pg_try_advisory_xact_lock",
        "pg_try_advisory_lock",
        "pg_try_advisory_lock_shared",
        "pg_advisory_unlock",
        "pg_advisory_unlock_shared",
    ];
    for function in functions {
        cluster.admin().sql(&format!("ALTER FUNCTION pg_catalog.{function}(bigint) RENAME TO real_one"));
        for body in ["", "SELECT true", "SELECT false", "SELECT NULL::bool", "SELECT true WHERE false"] {
            if !body.is_empty() {
                cluster.admin().sql(&format!(
                    "CREATE OR REPLACE FUNCTION pg_catalog.{function}(bigint) RETURNS bool LANGUAGE sql AS '{body}'"
                ));
            }
            let error = Locker::connect(&url(&cluster), quick("one")).await.unwrap_err();
            println!("{function}, {body:?}: {error}");
            assert!(matches!(error, Error::Connect(ConnectError::Unsupported { .. })), "{function}: {error}");
            until("nothing is left", || locks(&cluster) == 0 && cluster.admin().backends("%").is_empty())
                .await;
        }
        let run = locker(&cluster, quick("two")).run("job", async |_: Lease| Ok::<_, Infallible>(())).await;
        assert!(matches!(run, Err(RunError::Refused(_))), "{run:?}");
        cluster.admin().sql(&format!(
            "DROP FUNCTION pg_catalog.{function}(bigint); \
             ALTER FUNCTION pg_catalog.real_one(bigint) RENAME TO {function}"
        ));
    }
    Locker::connect(&url(&cluster), quick("one")).await.unwrap().close().await;
}

/// F-06, F-41, L-19: more names than the server has room for, pairs among them. What fits is led, the rest is refused, nothing else is locked.
#[tokio::test]
async fn out_of_lock_memory_costs_only_what_does_not_fit() {
    let cluster = Cluster::with(Login::Trust, &["max_locks_per_transaction=10", "max_connections=10"]);
    let locker = locker(&cluster, quick("one").max_held(10_000));
    let log = Log::default();
    let mut first = Member::on(&locker, "first", "first", &log);
    let lease = first.leads().await;
    // Connected before: a full lock table lets nobody in.
    locks(&cluster);
    let name = |n| if n % 2 == 0 { Name::key_pair(7, n) } else { format!("job {n}").into() };
    let others: Vec<_> =
        (0..1500).map(|n| Member::on(&locker, name(n), &format!("job {n}"), &Log::default())).collect();
    pass(Duration::from_secs(3)).await;
    let held = locks(&cluster);
    println!("of 1501 names: {held} locks");
    assert!(held < 3000);
    assert!(lease.is_held());
    for other in others {
        other.abort().await;
    }
    // What a statement that failed has left is found by the next one.
    until("nothing else is locked", || locks(&cluster) == 2).await;
    assert!(lease.is_held());
    first.stop().await.unwrap();
    locker.close().await;
}

/// D18: a notification that cannot be sent, since another commit holds the cluster's lock for them, costs no lease and
/// no release: the standby learns by its poll.
#[tokio::test]
async fn a_stuck_notification_keeps_no_release() {
    let cluster = Cluster::new();
    let log = Log::default();
    let (one, two) = (locker(&cluster, quick("one")), locker(&cluster, quick("two")));
    let mut other = Member::on(&one, "other", "other", &Log::default());
    let lease = other.leads().await;
    // Of a pair, whose locks the session looks for after the error too.
    let job = Name::key_pair(1, 2);
    let mut one_runs = Member::on(&one, &job, "one", &log);
    one_runs.leads().await;
    let mut two_runs = Member::on(&two, &job, "two", &log);
    two_runs.stands_by().await;

    // Waits for a standby server that does not exist, inside of its commit.
    cluster.admin().sql("ALTER SYSTEM SET synchronous_standby_names = 'nobody'");
    cluster.admin().sql("SELECT pg_reload_conf()");
    let mut stuck = cluster.connect().await;
    let stuck =
        tokio::spawn(async move { execute(&mut stuck, "CREATE TABLE something (); NOTIFY something").await });
    let waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'";
    until("a stuck commit", || cluster.admin().one::<u32>(waits) == 1).await;

    let since = now();
    assert_eq!(one_runs.stop().await.unwrap(), None);
    println!("released in {:?}", since.elapsed());
    two_runs.leads().await;
    assert!(lease.is_held());
    assert_eq!(cluster.admin().one::<u32>(&format!("{LOCKS} AND mode = 'ExclusiveLock'")), 4);
    cluster.admin().sql("ALTER SYSTEM RESET synchronous_standby_names");
    cluster.admin().sql("SELECT pg_reload_conf()");
    stuck.await.unwrap();
    two_runs.stop().await.unwrap();
    other.stop().await.unwrap();
    one.close().await;
    two.close().await;
    assert_eq!(locks(&cluster), 0);
    log.assert_one_at_a_time();
}

/// Makes a function that every heartbeat calls do something else as well.
fn sabotage(cluster: &Cluster, what: &str) {
    let sql = format!(
        "CREATE OR REPLACE FUNCTION pg_catalog.pg_is_in_recovery() RETURNS bool LANGUAGE plpgsql AS \
         'BEGIN {what} RETURN false; END'"
    );
    cluster.admin().sql(&sql);
}

/// F-20: locks that are gone though the session lives are lost at the next heartbeat.
#[tokio::test]
async fn a_heartbeat_proves_ownership() {
    let cluster = Cluster::with(Login::Trust, &["allow_system_table_mods=on"]);
    cluster.admin().sql("ALTER FUNCTION pg_catalog.pg_is_in_recovery() RENAME TO real_one");
    sabotage(&cluster, "");
    let (log, locker) = (Log::default(), locker(&cluster, quick("one")));
    let mut member = Member::on(&locker, "job", "one", &log);
    let lease = member.leads().await;
    let before = pid(&cluster, "one");
    sabotage(&cluster, "PERFORM pg_catalog.pg_advisory_unlock_all();");
    let reason = over(&lease).await;
    assert_eq!(reason, Some(Reason::Lost(LossCause::Gone)));
    sabotage(&cluster, "");
    member.leads().await;
    assert_eq!(pid(&cluster, "one"), before);

    // A lock that it did not take: somebody else uses the session.
    let locker_two = self::locker(&cluster, quick("two"));
    let mut other = Member::on(&locker_two, "other", "two", &log);
    let lease = other.leads().await;
    sabotage(&cluster, "PERFORM pg_catalog.pg_try_advisory_lock_shared(42);");
    let reason = over(&lease).await;
    assert!(matches!(reason, Some(Reason::Lost(LossCause::Distrusted { .. }))), "{reason:?}");
    sabotage(&cluster, "");
    other.leads().await;
    other.stop().await.unwrap();
    member.stop().await.unwrap();
}

/// D26, F-31: no room for the session, or for the second connection.
#[tokio::test]
async fn a_full_server_is_told_and_waited_for() {
    let cluster = Cluster::with(Login::Trust, &["max_connections=6", "superuser_reserved_connections=0"]);
    cluster.admin().sql("CREATE ROLE app LOGIN");
    let app = cluster.options().username("app");
    let mut taken = Vec::new();
    while let Ok(connection) = PgConnection::connect_with(&app).await {
        taken.push(connection);
    }
    let url = cluster.url("app", "", "postgres");
    let error = Locker::connect(&url, quick("one")).await.unwrap_err();
    println!("{error}");
    assert!(error.to_string().contains("too many"), "{error}");
    drop(taken.pop());
    pass(Duration::from_millis(100)).await;
    let error = Locker::connect(&url, quick("one")).await.unwrap_err();
    println!("{error}");
    assert!(matches!(error, Error::Connect(ConnectError::NoSecondConnection { .. })), "{error}");
    pass(Duration::from_millis(100)).await;
    let trusting = Locker::connect(&url, quick("one").trust_affinity(true)).await.unwrap();
    trusting.close().await;
    drop(taken);

    let bouncer = PgBouncer::with(&cluster, PoolMode::Session, 1, "");
    let error = Locker::connect(&bouncer.url(), quick("one")).await.unwrap_err();
    println!("{error}");
    assert!(matches!(error, Error::Connect(ConnectError::NoSecondConnection { .. })), "{error}");
}

/// TLS: encrypted, verified, refused where it cannot be verified.
#[cfg(feature = "tls")]
#[tokio::test]
async fn tls_is_spoken_and_verified() {
    let cluster = Cluster::with_tls();
    let url =
        |mode: &str| format!("postgres://postgres@localhost:{}/postgres?sslmode={mode}", cluster.port());
    let error = Locker::connect(&url("verify-full"), quick("one")).await.unwrap_err();
    println!("{error}");
    assert!(matches!(error, Error::Connect(ConnectError::Tls { .. })), "{error}");
    let verified = format!("verify-full&sslrootcert={}", cluster.certificate().display());
    for mode in ["require", "prefer", &verified] {
        let (log, locker) = (Log::default(), Locker::connect(&url(mode), quick("one")).await.unwrap());
        let mut member = Member::on(&locker, "job", "one", &log);
        let lease = member.leads().await;
        let pid = pid(&cluster, "one");
        let encrypted = format!("SELECT ssl::text FROM pg_stat_ssl WHERE pid = {pid}");
        assert_eq!(cluster.admin().one::<String>(&encrypted), "true");
        let since = now();
        cluster.admin().terminate(pid);
        println!("{:?} after {:?}", over(&lease).await, since.elapsed());
        member.leads().await;
        member.stop().await.unwrap();
        drop(locker);
        until("no lock", || locks(&cluster) == 0).await;
    }
}

/// Through a socket of the file system.
#[tokio::test]
async fn a_unix_socket_serves() {
    let cluster = Cluster::new();
    let host = cluster.dir().display();
    let url = format!("postgres:///postgres?host={host}&port={}&user=postgres", cluster.port());
    let locker = Locker::connect(&url, quick("one")).await.unwrap();
    let log = Log::default();
    let mut member = Member::on(&locker, "job", "one", &log);
    let lease = member.leads().await;
    assert!(locker.bounds().vacancy_silent.is_some());
    cluster.admin().terminate(pid(&cluster, "one"));
    over(&lease).await;
    member.leads().await;
    member.stop().await.unwrap();
    locker.close().await;
    let error = Locker::connect("postgres:///postgres?host=/nonexistent&user=postgres", quick("one"))
        .await
        .unwrap_err();
    println!("{error}");
    assert!(error.to_string().contains("no socket"), "{error}");
}

/// A setting that is not in force is reported in the bounds, once a session has told.
#[tokio::test]
async fn bounds_tell_what_the_server_does_not_enforce() {
    let cluster = Cluster::with(Login::Trust, &["allow_system_table_mods=on"]);
    let locker = locker(&cluster, quick("one"));
    assert!(locker.bounds().vacancy_silent.is_some());
    cluster.admin().sql(
        "ALTER VIEW pg_catalog.pg_settings RENAME TO real_settings; \
         CREATE VIEW pg_catalog.pg_settings AS SELECT name, CASE name WHEN 'idle_session_timeout' THEN '0' \
         ELSE setting END AS setting FROM pg_catalog.real_settings; \
         GRANT SELECT ON pg_catalog.pg_settings TO PUBLIC",
    );
    let log = Log::default();
    let mut member = Member::on(&locker, "job", "one", &log);
    member.leads().await;
    assert_eq!(locker.bounds().vacancy_silent, None);
    member.stop().await.unwrap();
    locker.close().await;
}

/// Passwords rotate: a run goes on trying where the login is refused, and leads when it is not any more.
#[tokio::test]
async fn a_refused_login_is_tried_again() {
    let cluster = Cluster::with(Login::Scram, &[]);
    cluster.admin().sql("CREATE ROLE secretive LOGIN PASSWORD 'old'");
    let target = cluster.options().username("secretive").password("new").database("later");
    // A login by password takes its time on a machine that is busy with other tests.
    let patient = quick("one").query_timeout(Duration::from_secs(10));
    let locker = Locker::postgres(target, patient).unwrap();
    let log = Log::default();
    let mut member = Member::on(&locker, "job", "one", &log);
    pass(Duration::from_millis(300)).await;
    cluster.admin().sql("ALTER ROLE secretive PASSWORD 'new'");
    pass(Duration::from_millis(300)).await;
    cluster.admin().sql("CREATE DATABASE later");
    member.leads().await;
    member.stop().await.unwrap();
    locker.close().await;
}
