//! What the PostgreSQL store does of its own, on a real server: its checks, its settings, its ends, its errors.

mod cluster;

use std::convert::Infallible;
use std::time::Duration;

use leasehold::{ConnectError, Error, Lease, Locker, LossCause, Options, Reason, RunError};
use rustix::process::{Pid, Signal, kill_process};

use self::cluster::{Cluster, query};
use crate::support::member::over;
use crate::support::{Log, Member, now, pass, quick, sleepy};

const LOCKS: &str = "SELECT count(*)::text FROM pg_locks WHERE locktype = 'advisory'";

fn locker(cluster: &Cluster, options: Options) -> Locker {
    Locker::postgres(cluster.options(), options).unwrap()
}

/// The process id of the one session of a Locker.
async fn pid(cluster: &Cluster, who: &str) -> i32 {
    let sql = format!("SELECT pid::text FROM pg_stat_activity WHERE application_name = 'leasehold/{who}'");
    let pids = cluster.query(&sql).await;
    assert_eq!(pids.len(), 1, "one session of {who}");
    pids[0].parse().unwrap()
}

async fn settles(cluster: &Cluster, what: &str, sql: &str, wanted: &str) -> Duration {
    let (since, mut admin) = (now(), cluster.admin().await);
    loop {
        let found = query(&mut admin, sql).await;
        if found == [wanted] {
            return since.elapsed();
        }
        assert!(since.elapsed() < Duration::from_secs(10), "{what}: {found:?}");
        pass(Duration::from_millis(1)).await;
    }
}

/// F-06, F-25, F-30: grant, registration of the standby, a pushed hand-over, a clean end.
#[tokio::test]
async fn a_release_is_pushed_and_nothing_is_left() {
    let cluster = Cluster::start(&[]).await;
    let (log, (one, two)) =
        (Log::default(), (locker(&cluster, sleepy("one")), locker(&cluster, sleepy("two"))));
    let mut one_runs = Member::on(&one, "job", "one", &log);
    let lease = one_runs.leads().await;
    assert_eq!(cluster.query(LOCKS).await, ["1"]);
    let two_runs = Member::on(&two, "job", "two", &log);
    two_runs.stands_by().await;
    assert_eq!(cluster.query(LOCKS).await, ["2"]);
    let shared = format!("{LOCKS} AND mode = 'ShareLock'");
    assert_eq!(cluster.query(&shared).await, ["1"]);

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
    assert_eq!(cluster.query(LOCKS).await, ["0"]);
    one.close().await;
    two.close().await;
    settles(
        &cluster,
        "no session",
        "SELECT count(*)::text FROM pg_stat_activity WHERE application_name LIKE 'leasehold/%'",
        "0",
    )
    .await;
}

/// F-19, D03: the socket that the server closes is noticed at once.
#[tokio::test]
async fn a_terminated_backend_is_noticed_at_once() {
    let cluster = Cluster::start(&[]).await;
    let (log, locker) = (Log::default(), locker(&cluster, quick("one")));
    let mut member = Member::on(&locker, "job", "one", &log);
    for _ in 0..5 {
        let lease = member.leads().await;
        let pid = pid(&cluster, "one").await;
        let mut admin = cluster.admin().await;
        let since = now();
        query(&mut admin, &format!("SELECT pg_terminate_backend({pid})::text")).await;
        let reason = over(&lease).await;
        println!("noticed after {:?}: {reason:?}", since.elapsed());
        assert!(matches!(reason, Some(Reason::Lost(LossCause::Closed { .. }))), "{reason:?}");
        assert!(since.elapsed() < Duration::from_millis(500));
    }
    member.leads().await;
    member.stop().await.unwrap();
    locker.close().await;
}

/// F-17, F-23: a backend that does not answer is given up when the job has ended, and then its lock is free at once.
#[tokio::test]
async fn a_silent_backend_is_left_by_a_hard_end() {
    let cluster = Cluster::start(&[]).await;
    let (log, locker) = (Log::default(), locker(&cluster, quick("one")));
    let mut member = Member::on(&locker, "job", "one", &log);
    let lease = member.leads().await;
    let pid = pid(&cluster, "one").await;
    kill_process(Pid::from_raw(pid).unwrap(), Signal::STOP).unwrap();
    let reason = over(&lease).await;
    assert!(
        matches!(reason, Some(Reason::Lost(LossCause::Timeout { .. } | LossCause::Deadline))),
        "{reason:?}"
    );
    // The hard end, and the next session, which is refused for as long as the old one cannot notice.
    let sessions = "SELECT count(*)::text FROM pg_stat_activity WHERE application_name = 'leasehold/one'";
    settles(&cluster, "a second session", sessions, "2").await;
    kill_process(Pid::from_raw(pid).unwrap(), Signal::CONT).unwrap();
    let gone = format!("SELECT count(*)::text FROM pg_locks WHERE locktype = 'advisory' AND pid = {pid}");
    println!("free {:?} after the thaw", settles(&cluster, "no lock", &gone, "0").await);
    member.leads().await;
    member.stop().await.unwrap();
    locker.close().await;
    assert_eq!(cluster.query(LOCKS).await, ["0"]);
}

/// F-26: the last handle dropped, inside of a runtime and outside.
#[test]
fn a_dropped_locker_leaves_nothing() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let cluster = runtime.block_on(Cluster::start(&[]));
    let locker = runtime.block_on(Locker::connect(&cluster.url(), quick("one"))).unwrap();
    drop(locker);
    let sql = "SELECT count(*)::text FROM pg_stat_activity WHERE application_name LIKE 'leasehold/%'";
    runtime.block_on(settles(&cluster, "no session", sql, "0"));
}

/// F-31, D02: refused 20 of 20, and nothing is left on the pooled connections.
#[tokio::test]
async fn a_transaction_pooler_is_refused_and_nothing_is_left() {
    let mut cluster = Cluster::start(&[]).await;
    for (size, round_robin) in [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1), (10, 0), (10, 1)] {
        let settings = format!("server_round_robin = {round_robin}");
        let port = cluster.pooler("transaction", size, &settings).await;
        let url = format!("postgres://postgres@127.0.0.1:{port}/postgres");
        let mut through = sqlx::postgres::PgConnectOptions::new_without_pgpass()
            .host("127.0.0.1")
            .port(port)
            .username("postgres")
            .database("postgres")
            .extra_float_digits(None);
        through = through.statement_cache_capacity(0);
        let since = now();
        for _ in 0..20 {
            let error = Locker::connect(&url, quick("one")).await.unwrap_err();
            assert!(
                matches!(error, Error::Connect(ConnectError::Pooler { .. })),
                "{size} {round_robin}: {error}"
            );
            assert!(error.to_string().contains("pool_mode = session"), "{error}");
        }
        println!("pool of {size}, round robin {round_robin}: 20 of 20 in {:?}", since.elapsed());
        assert_eq!(cluster.query(LOCKS).await, ["0"]);
        for _ in 0..5 {
            let mut pooled = <sqlx::PgConnection as sqlx::Connection>::connect_with(&through).await.unwrap();
            let left = "SELECT (current_setting('idle_session_timeout') || current_setting('statement_timeout') || \
                        (SELECT count(*) FROM pg_listening_channels()) || (SELECT count(*) FROM pg_prepared_statements))";
            assert_eq!(query(&mut pooled, left).await, ["0000"]);
            let _ = sqlx::Connection::close(pooled).await;
        }
        // A run learns it too.
        let locker = Locker::connect(&url, quick("one")).await.map(|_| ());
        assert!(locker.is_err());
        let lazy = Locker::postgres(through.clone(), quick("two")).unwrap();
        let run = lazy.run("job", async |_: Lease| Ok::<_, Infallible>(())).await;
        assert!(matches!(&run, Err(RunError::Refused(error)) if error.is_permanent()), "{run:?}");
        cluster.stop_last_pooler();
    }
}

/// F-32: with the configuration as it is delivered.
#[tokio::test]
async fn a_session_pooler_works() {
    let mut cluster = Cluster::start(&[]).await;
    let port = cluster.pooler("session", 20, "").await;
    let url = format!("postgres://postgres@127.0.0.1:{port}/postgres");
    let log = Log::default();
    let (one, two) = (
        Locker::connect(&url, sleepy("one")).await.unwrap(),
        Locker::connect(&url, sleepy("two")).await.unwrap(),
    );
    let mut one_runs = Member::on(&one, "job", "one", &log);
    one_runs.leads().await;
    let mut two_runs = Member::on(&two, "job", "two", &log);
    two_runs.stands_by().await;
    one_runs.stop().await.unwrap();
    two_runs.leads().await;
    // Dropped without a word: the pooler resets the connection.
    two_runs.abort().await;
    drop(two);
    settles(&cluster, "no lock", LOCKS, "0").await;
    one.close().await;
    log.assert_one_at_a_time();
}

/// F-31: a replica is refused by `connect`, and waited for by `run`.
#[tokio::test]
async fn a_replica_is_refused_and_waited_for() {
    let primary = Cluster::start(&[]).await;
    let standby = primary.standby().await;
    let error = Locker::connect(&standby.url(), quick("one")).await.unwrap_err();
    assert!(matches!(error, Error::Connect(ConnectError::Replica)), "{error}");
    let (log, locker) = (Log::default(), locker(&standby, quick("one")));
    let mut member = Member::on(&locker, "job", "one", &log);
    pass(Duration::from_millis(300)).await;
    assert_eq!(standby.query("SELECT pg_promote()::text").await, ["true"]);
    member.leads().await;
    member.stop().await.unwrap();
    locker.close().await;
}

/// D25: functions of the same name in a schema that the role searches first are passed by.
#[tokio::test]
async fn look_alike_functions_are_passed_by() {
    let cluster = Cluster::start(&[]).await;
    for body in ["SELECT true", "SELECT NULL::bool", "SELECT true WHERE false"] {
        cluster
            .query(&format!(
                "DROP SCHEMA IF EXISTS shim CASCADE; CREATE SCHEMA shim; \
             CREATE FUNCTION shim.pg_try_advisory_lock(bigint) RETURNS bool LANGUAGE sql AS '{body}'; \
             CREATE FUNCTION shim.pg_try_advisory_lock_shared(bigint) RETURNS bool LANGUAGE sql AS '{body}'; \
             CREATE FUNCTION shim.pg_try_advisory_xact_lock(bigint) RETURNS bool LANGUAGE sql AS '{body}'; \
             ALTER ROLE postgres SET search_path = shim, pg_catalog"
            ))
            .await;
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

/// F-31, D25: where the functions of the catalogue itself do nothing, it is refused.
#[tokio::test]
async fn a_look_alike_server_is_refused() {
    let cluster = Cluster::start(&["allow_system_table_mods=on"]).await;
    cluster.query(
        "ALTER FUNCTION pg_catalog.pg_try_advisory_xact_lock(bigint) RENAME TO real_one; \
         CREATE FUNCTION pg_catalog.pg_try_advisory_xact_lock(bigint) RETURNS bool LANGUAGE sql AS 'SELECT true'",
    ).await;
    let error = Locker::connect(&cluster.url(), quick("one")).await.unwrap_err();
    println!("{error}");
    assert!(matches!(error, Error::Connect(ConnectError::Unsupported { .. })), "{error}");
    let run = locker(&cluster, quick("two")).run("job", async |_: Lease| Ok::<_, Infallible>(())).await;
    assert!(matches!(run, Err(RunError::Refused(_))), "{run:?}");
    cluster.query("DROP FUNCTION pg_catalog.pg_try_advisory_xact_lock(bigint)").await;
    let error = Locker::connect(&cluster.url(), quick("one")).await.unwrap_err();
    println!("{error}");
    assert!(matches!(error, Error::Connect(ConnectError::Unsupported { .. })), "{error}");
}

/// F-34, D15, D18: what a role has set does no harm.
#[tokio::test]
async fn defaults_of_the_role_do_no_harm() {
    let cluster = Cluster::start(&[]).await;
    cluster.query(
        "ALTER ROLE postgres SET statement_timeout = '200ms'; ALTER ROLE postgres SET lock_timeout = '100ms'; \
         ALTER ROLE postgres SET idle_in_transaction_session_timeout = '1s'; \
         ALTER ROLE postgres SET idle_session_timeout = '1s'; \
         ALTER ROLE postgres SET default_transaction_read_only = on; \
         ALTER ROLE postgres SET default_transaction_isolation = serializable",
    ).await;
    let (log, locker) =
        (Log::default(), locker(&cluster, quick("o'n\\e").heartbeat_interval(Duration::from_secs(2))));
    let mut member = Member::on(&locker, "job", "one", &log);
    let lease = member.leads().await;
    assert!(locker.bounds().vacancy_silent.is_some());
    pass(Duration::from_secs(3)).await;
    assert!(lease.is_held());
    let names = cluster
        .query("SELECT application_name FROM pg_stat_activity WHERE application_name LIKE 'lease%'")
        .await;
    assert_eq!(names, ["leasehold/o'n\\e"]);
    member.stop().await.unwrap();
    locker.close().await;
}

/// F-06, F-41: more names than the server has room for. What fits is led, the rest is refused, nothing else is locked.
#[tokio::test]
async fn out_of_lock_memory_costs_only_what_does_not_fit() {
    let cluster = Cluster::start(&["max_locks_per_transaction=10", "max_connections=10"]).await;
    let locker = locker(&cluster, quick("one").max_held(10_000));
    let log = Log::default();
    let mut first = Member::on(&locker, "first", "first", &log);
    let lease = first.leads().await;
    // Connected before: a full lock table lets nobody in.
    let mut admin = cluster.admin().await;
    query(&mut admin, LOCKS).await;
    let others: Vec<_> = (0..1500)
        .map(|n| Member::on(&locker, &format!("job {n}"), &format!("job {n}"), &Log::default()))
        .collect();
    pass(Duration::from_secs(3)).await;
    let held = query(&mut admin, LOCKS).await;
    println!("of 1501 names: {held:?} locks");
    assert!(held[0].parse::<u32>().unwrap() < 1500);
    assert!(lease.is_held());
    for other in others {
        other.abort().await;
    }
    locker.step_down("nobody").await.unwrap();
    assert_eq!(query(&mut admin, LOCKS).await, ["1"]);
    assert!(lease.is_held());
    first.stop().await.unwrap();
    locker.close().await;
}

/// F-24, F-28, "bad input": each failure says what to change, and no secret.
#[tokio::test]
async fn failures_to_connect_name_what_to_change() {
    let mut cluster = Cluster::start(&[]).await;
    cluster.query("CREATE ROLE secretive LOGIN PASSWORD 'geheim'; CREATE ROLE denied LOGIN").await;
    cluster.query("CREATE DATABASE closed").await;
    cluster.query("REVOKE CONNECT ON DATABASE closed FROM PUBLIC").await;
    let port = cluster.port;
    let login = |text: &str| format!("postgres://{text}");
    for (url, says) in [
        (login(&format!("secretive:hunter2@127.0.0.1:{port}/postgres")), "check the user, the password"),
        (login(&format!("secretive:hunter2@127.0.0.1:{port}/nosuch")), "check the user, the password"),
        (login(&format!("secretive:geheim@127.0.0.1:{port}/nosuch")), "does not know the database"),
        (login(&format!("denied:hunter2@127.0.0.1:{port}/closed")), "may connect to the database"),
        (login(&format!("denied:hunter2@127.0.0.1:{port}/postgres?sslmode=require")), "no TLS connection"),
        (login("denied:hunter2@127.0.0.1:1/postgres"), "is the server up"),
        (login("denied:hunter2@no-such-host.invalid/postgres"), "cannot be reached"),
    ] {
        let since = now();
        let error = Locker::connect(&url, quick("one")).await.unwrap_err();
        let text = format!("{error} {error:?}");
        println!("{:?} {error}", since.elapsed());
        assert!(text.contains(says) && !text.contains("hunter2") && !text.contains("geheim"), "{text}");
    }
    cluster.crash();
    let error = Locker::connect(&cluster.url(), quick("one")).await.unwrap_err();
    assert!(matches!(error, Error::Connect(ConnectError::Unreachable { .. })), "{error}");
    let (log, locker) = (Log::default(), locker(&cluster, quick("one")));
    let mut member = Member::on(&locker, "job", "one", &log);
    for _ in 0..3 {
        cluster.start_again(&[]);
        let lease = member.leads().await;
        cluster.crash();
        println!("{:?}", over(&lease).await);
    }
    member.stop().await.unwrap();
    locker.close().await;
}

/// D18: a notification that cannot be sent, since another commit holds the cluster's lock for them, costs no lease and
/// no release: the standby learns by its poll.
#[tokio::test]
async fn a_stuck_notification_keeps_no_release() {
    let cluster = Cluster::start(&[]).await;
    let log = Log::default();
    let (one, two) = (locker(&cluster, quick("one")), locker(&cluster, quick("two")));
    let mut other = Member::on(&one, "other", "other", &Log::default());
    let lease = other.leads().await;
    let mut one_runs = Member::on(&one, "job", "one", &log);
    one_runs.leads().await;
    let mut two_runs = Member::on(&two, "job", "two", &log);
    two_runs.stands_by().await;

    // Waits for a standby server that does not exist, inside of its commit.
    cluster.query("ALTER SYSTEM SET synchronous_standby_names = 'nobody'").await;
    cluster.query("SELECT pg_reload_conf()::text").await;
    let mut stuck = cluster.admin().await;
    let stuck =
        tokio::spawn(async move { query(&mut stuck, "CREATE TABLE something (); NOTIFY something").await });
    let waits = "SELECT count(*)::text FROM pg_stat_activity WHERE wait_event = 'SyncRep'";
    settles(&cluster, "a stuck commit", waits, "1").await;

    let since = now();
    assert_eq!(one_runs.stop().await.unwrap(), None);
    println!("released in {:?}", since.elapsed());
    two_runs.leads().await;
    assert!(lease.is_held());
    assert_eq!(cluster.query(&format!("{LOCKS} AND mode = 'ExclusiveLock'")).await, ["2"]);
    cluster.query("ALTER SYSTEM RESET synchronous_standby_names").await;
    cluster.query("SELECT pg_reload_conf()::text").await;
    stuck.await.unwrap();
    two_runs.stop().await.unwrap();
    other.stop().await.unwrap();
    one.close().await;
    two.close().await;
    assert_eq!(cluster.query(LOCKS).await, ["0"]);
    log.assert_one_at_a_time();
}

/// Makes a function that every heartbeat calls do something else as well.
async fn sabotage(cluster: &Cluster, what: &str) {
    let sql = format!(
        "CREATE OR REPLACE FUNCTION pg_catalog.pg_is_in_recovery() RETURNS bool LANGUAGE plpgsql AS \
         'BEGIN {what} RETURN false; END'"
    );
    cluster.query(&sql).await;
}

/// F-20: locks that are gone though the session lives are lost at the next heartbeat.
#[tokio::test]
async fn a_heartbeat_proves_ownership() {
    let cluster = Cluster::start(&["allow_system_table_mods=on"]).await;
    cluster.query("ALTER FUNCTION pg_catalog.pg_is_in_recovery() RENAME TO real_one").await;
    sabotage(&cluster, "").await;
    let (log, locker) = (Log::default(), locker(&cluster, quick("one")));
    let mut member = Member::on(&locker, "job", "one", &log);
    let lease = member.leads().await;
    let before = pid(&cluster, "one").await;
    sabotage(&cluster, "PERFORM pg_catalog.pg_advisory_unlock_all();").await;
    let reason = over(&lease).await;
    assert_eq!(reason, Some(Reason::Lost(LossCause::Gone)));
    sabotage(&cluster, "").await;
    member.leads().await;
    assert_eq!(pid(&cluster, "one").await, before);

    // A lock that it did not take: somebody else uses the session.
    let locker_two = self::locker(&cluster, quick("two"));
    let mut other = Member::on(&locker_two, "other", "two", &log);
    let lease = other.leads().await;
    sabotage(&cluster, "PERFORM pg_catalog.pg_try_advisory_lock_shared(42);").await;
    let reason = over(&lease).await;
    assert!(matches!(reason, Some(Reason::Lost(LossCause::Distrusted { .. }))), "{reason:?}");
    sabotage(&cluster, "").await;
    other.leads().await;
    other.stop().await.unwrap();
    member.stop().await.unwrap();
}

/// D26, F-31: no room for the session, or for the second connection.
#[tokio::test]
async fn a_full_server_is_told_and_waited_for() {
    let mut cluster = Cluster::start(&["max_connections=6", "superuser_reserved_connections=0"]).await;
    cluster.query("CREATE ROLE app LOGIN").await;
    let app = cluster.options().username("app");
    let mut taken = Vec::new();
    while let Ok(connection) = <sqlx::PgConnection as sqlx::Connection>::connect_with(&app).await {
        taken.push(connection);
    }
    let url = format!("postgres://app@127.0.0.1:{}/postgres", cluster.port);
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

    let port = cluster.pooler("session", 1, "").await;
    let url = format!("postgres://postgres@127.0.0.1:{port}/postgres");
    let error = Locker::connect(&url, quick("one")).await.unwrap_err();
    println!("{error}");
    assert!(matches!(error, Error::Connect(ConnectError::NoSecondConnection { .. })), "{error}");
}

/// F-32: a pooler that dies takes the session with it, and the server frees the lock.
#[tokio::test]
async fn a_pooler_that_dies_ends_the_session() {
    let mut cluster = Cluster::start(&[]).await;
    let port = cluster.pooler("session", 20, "").await;
    let url = format!("postgres://postgres@127.0.0.1:{port}/postgres");
    let locker = Locker::connect(&url, quick("one")).await.unwrap();
    let log = Log::default();
    let mut member = Member::on(&locker, "job", "one", &log);
    let lease = member.leads().await;
    cluster.stop_last_pooler();
    println!("{:?}", over(&lease).await);
    member.stop().await.unwrap();
    locker.close().await;
    assert_eq!(cluster.query(LOCKS).await, ["0"]);
}

/// TLS: encrypted, verified, refused where it cannot be verified.
#[cfg(feature = "tls")]
#[tokio::test]
async fn tls_is_spoken_and_verified() {
    let dir = tempfile::tempdir().unwrap();
    let (key, cert) = (dir.path().join("key.pem"), dir.path().join("cert.pem"));
    let made = std::process::Command::new("openssl")
        .args([
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            "2",
        ])
        .args([
            "-subj",
            "/CN=localhost",
            "-addext",
            "subjectAltName=DNS:localhost",
            "-addext",
            "basicConstraints=critical,CA:FALSE",
            "-keyout",
        ])
        .arg(&key)
        .arg("-out")
        .arg(&cert)
        .output()
        .unwrap();
    assert!(made.status.success());
    for path in [dir.path(), &key, &cert] {
        cluster::give_away(path);
    }
    let settings = [
        "ssl=on".to_owned(),
        format!("ssl_key_file={}", key.display()),
        format!("ssl_cert_file={}", cert.display()),
    ];
    let settings: Vec<_> = settings.iter().map(String::as_str).collect();
    let cluster = Cluster::start(&settings).await;
    let url = |mode: &str| format!("postgres://postgres@localhost:{}/postgres?sslmode={mode}", cluster.port);
    let error = Locker::connect(&url("verify-full"), quick("one")).await.unwrap_err();
    println!("{error}");
    assert!(matches!(error, Error::Connect(ConnectError::Tls { .. })), "{error}");
    let verified = format!("verify-full&sslrootcert={}", cert.display());
    for mode in ["require", "prefer", &verified] {
        let (log, locker) = (Log::default(), Locker::connect(&url(mode), quick("one")).await.unwrap());
        let mut member = Member::on(&locker, "job", "one", &log);
        let lease = member.leads().await;
        let pid = pid(&cluster, "one").await;
        assert_eq!(
            cluster.query(&format!("SELECT ssl::text FROM pg_stat_ssl WHERE pid = {pid}")).await,
            ["true"]
        );
        let mut admin = cluster.admin().await;
        let since = now();
        query(&mut admin, &format!("SELECT pg_terminate_backend({pid})::text")).await;
        println!("{:?} after {:?}", over(&lease).await, since.elapsed());
        member.leads().await;
        member.stop().await.unwrap();
        drop(locker);
        settles(&cluster, "no lock", LOCKS, "0").await;
    }
}

/// D02: the same through a pool that others keep busy, and through one that shares single statements.
#[tokio::test]
async fn a_busy_transaction_pooler_is_refused_too() {
    let mut cluster = Cluster::start(&[]).await;
    for (mode, size) in [("transaction", 2), ("transaction", 3), ("transaction", 8), ("statement", 3)] {
        let port = cluster.pooler(mode, size, "").await;
        let url = format!("postgres://postgres@127.0.0.1:{port}/postgres");
        let through = sqlx::postgres::PgConnectOptions::new_without_pgpass()
            .host("127.0.0.1")
            .port(port)
            .username("postgres")
            .database("postgres")
            .extra_float_digits(None);
        let mut others = tokio::task::JoinSet::new();
        for _ in 0..4 {
            let through = through.clone();
            others.spawn(async move {
                let mut connection =
                    <sqlx::PgConnection as sqlx::Connection>::connect_with(&through).await.unwrap();
                let sql =
                    if mode == "statement" { "SELECT 1::text" } else { "BEGIN; SELECT 1::text; COMMIT" };
                loop {
                    query(&mut connection, sql).await;
                }
            });
        }
        let (mut poolers, mut unknown) = (0, 0);
        for _ in 0..20 {
            match Locker::connect(&url, quick("one")).await.unwrap_err() {
                Error::Connect(ConnectError::Pooler { .. }) => poolers += 1,
                Error::Connect(ConnectError::NoSecondConnection { .. }) => unknown += 1,
                error => panic!("{mode} {size}: {error}"),
            }
        }
        println!("{mode} pool of {size}, busy: {poolers} found out, {unknown} not told");
        assert!(poolers > 10);
        others.shutdown().await;
        assert_eq!(cluster.query(LOCKS).await, ["0"]);
        cluster.stop_last_pooler();
    }
}

/// No direct connection is taken for a pooled one, however much the server has to catch up with.
#[tokio::test]
async fn a_direct_connection_is_never_taken_for_a_pooler() {
    let cluster = Cluster::start(&[]).await;
    let mut others = tokio::task::JoinSet::new();
    for n in 0..3 {
        let mut connection = cluster.admin().await;
        others.spawn(async move {
            loop {
                let sql = format!("CREATE TABLE t{n} (a int PRIMARY KEY, b text); DROP TABLE t{n};");
                query(&mut connection, &sql.repeat(5)).await;
            }
        });
    }
    let mut unclear = 0;
    for _ in 0..100 {
        match Locker::connect(&cluster.url(), quick("one")).await {
            Ok(locker) => locker.close().await,
            Err(Error::Connect(ConnectError::NoSecondConnection { .. })) => unclear += 1,
            Err(error) => panic!("{error}"),
        }
    }
    println!("{unclear} of 100 unclear");
    others.shutdown().await;
}

/// Through a socket of the file system.
#[tokio::test]
async fn a_unix_socket_serves() {
    let dir = tempfile::tempdir().unwrap();
    cluster::give_away(dir.path());
    let cluster = Cluster::start(&[&format!("unix_socket_directories={}", dir.path().display())]).await;
    let host = dir.path().display();
    let url = format!("postgres:///postgres?host={host}&port={}&user=postgres", cluster.port);
    let locker = Locker::connect(&url, quick("one")).await.unwrap();
    let (log, mut admin) = (Log::default(), cluster.admin().await);
    let mut member = Member::on(&locker, "job", "one", &log);
    let lease = member.leads().await;
    assert!(locker.bounds().vacancy_silent.is_some());
    query(&mut admin, "SELECT pg_terminate_backend(pid)::text FROM pg_stat_activity WHERE application_name = 'leasehold/one'").await;
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
    let cluster = Cluster::start(&["allow_system_table_mods=on"]).await;
    let locker = locker(&cluster, quick("one"));
    assert!(locker.bounds().vacancy_silent.is_some());
    cluster
        .query(
            "ALTER VIEW pg_catalog.pg_settings RENAME TO real_settings; \
             CREATE VIEW pg_catalog.pg_settings AS SELECT name, CASE name WHEN 'idle_session_timeout' THEN '0' \
             ELSE setting END AS setting FROM pg_catalog.real_settings; \
             GRANT SELECT ON pg_catalog.pg_settings TO PUBLIC",
        )
        .await;
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
    let cluster = Cluster::start(&[]).await;
    cluster.query("CREATE ROLE secretive LOGIN PASSWORD 'old'").await;
    let target = cluster.options().username("secretive").password("new").database("later");
    let locker = Locker::postgres(target, quick("one")).unwrap();
    let log = Log::default();
    let mut member = Member::on(&locker, "job", "one", &log);
    pass(Duration::from_millis(300)).await;
    cluster.query("ALTER ROLE secretive PASSWORD 'new'").await;
    pass(Duration::from_millis(300)).await;
    cluster.query("CREATE DATABASE later").await;
    member.leads().await;
    member.stop().await.unwrap();
    locker.close().await;
}
