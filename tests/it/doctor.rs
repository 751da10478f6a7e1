//! `diagnose` and `leasehold doctor`: everything that is wrong is told at once, with what to change; it agrees with
//! `Locker::connect`; nothing is left behind, and no secret is told.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Command, Output};
use std::time::Duration;

use leasehold::{Check, ConnectError, Diagnosis, Locker, Options, Verdict};
use sqlx::{Connection as _, PgConnection};

use crate::postgres_poolers::{assert_nothing_is_left, untouched};
use crate::support::postgres::{Cluster, Login, PgBouncer, PoolMode, Stop};
use crate::support::{AT_ONCE, now, pass, quick, until};

/// Exit codes of the program.
const GO: i32 = 0;
const USAGE: i32 = 2;
const NOT_NOW: i32 = 69;
const MUST_NOT: i32 = 78;

/// So long that a machine that is busy with other tests does not come into play.
fn patient() -> Options {
    quick("doctor").query_timeout(Duration::from_secs(5))
}

fn url(cluster: &Cluster) -> String {
    cluster.url("postgres", "", "postgres")
}

/// Diagnoses, and sees that connecting agrees.
async fn diagnose(url: &str, options: &Options) -> Diagnosis {
    let diagnosis = leasehold::diagnose(url, options).await.unwrap();
    println!("{diagnosis}\n");
    assert!(!format!("{diagnosis} {diagnosis:?}").contains("s3cret"), "{diagnosis}");
    for check in &diagnosis.checks {
        assert_eq!(check.remedy.is_none(), check.verdict == Verdict::Good, "{check}");
        assert_eq!(check.to_string().lines().count(), 1, "{check}");
    }
    let connected = match Locker::connect(url, options.clone()).await {
        Ok(locker) => {
            let bounds = locker.bounds();
            assert_eq!(diagnosis.bounds, Some(bounds));
            locker.close().await;
            None
        }
        Err(leasehold::Error::Connect(error)) => Some(std::mem::discriminant(&error)),
        Err(error) => panic!("{error}"),
    };
    assert_eq!(diagnosis.error.as_ref().map(std::mem::discriminant), connected, "{:?}", diagnosis.error);
    diagnosis
}

fn the<'a>(diagnosis: &'a Diagnosis, what: &str) -> &'a Check {
    let mut checks = diagnosis.checks.iter().filter(|check| check.what == what);
    let check = checks.next().unwrap_or_else(|| panic!("no check of {what}: {diagnosis}"));
    assert!(checks.next().is_none(), "one check of {what}: {diagnosis}");
    check
}

#[track_caller]
fn assert_told(check: &Check, verdict: Verdict, reason: &str, remedy: &str) {
    assert_eq!(check.verdict, verdict, "{check}");
    assert!(check.reason.contains(reason), "{check}");
    assert!(check.remedy.as_deref().unwrap_or_default().contains(remedy), "{check}");
}

/// What is bad, or worth a warning.
fn not_good(diagnosis: &Diagnosis) -> Vec<&'static str> {
    diagnosis.checks.iter().filter(|check| check.verdict != Verdict::Good).map(|check| check.what).collect()
}

/// Runs the program, with arguments beside those of the store.
fn doctor(store: &str, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_leasehold"));
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(|name| name.starts_with("LEASEHOLD_") || name.starts_with("PG")) {
            command.env_remove(name);
        }
    }
    // Not in the arguments, which everybody sees.
    command.env("LEASEHOLD_STORE", store).arg("doctor").args(arguments);
    let output = command.output().expect("the program runs");
    let (out, err) = texts(&output);
    println!("{out}{err}");
    assert!(!out.contains("s3cret") && !err.contains("s3cret"), "{out}{err}");
    assert!(!out.contains('\x1b'), "no colours where nobody looks: {out:?}");
    output
}

fn texts(output: &Output) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (text(&output.stdout), text(&output.stderr))
}

/// C-06, C-07: the text has a line for each check and ends with a summary; the JSON has the same.
fn assert_program(store: &str, code: i32) -> serde_json::Value {
    let intervals = ["--query-timeout", "5s", "--heartbeat-interval", "100ms", "--retry-interval", "100ms"];
    let output = doctor(store, &intervals);
    assert_eq!(output.status.code(), Some(code));
    let (text, _) = texts(&output);
    let (last, lines) =
        text.lines().rev().collect::<Vec<_>>().split_first().map(|(a, b)| (*a, b.to_vec())).unwrap();
    assert_eq!(last.starts_with("go: "), code == GO, "{last}");
    assert_eq!(last.starts_with("no-go: "), code != GO, "{last}");
    for line in &lines {
        assert!(["good ", "warning ", "bad "].iter().any(|verdict| line.starts_with(verdict)), "{line}");
    }
    let output = doctor(store, &[&intervals[..], &["--json"]].concat());
    assert_eq!(output.status.code(), Some(code));
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["go"], code == GO);
    assert_eq!(json["permanent"], code == MUST_NOT);
    assert_eq!(json["checks"].as_array().unwrap().len(), lines.len(), "{json:#}");
    for check in json["checks"].as_array().unwrap() {
        assert!(check["what"].is_string() && check["reason"].is_string(), "{check}");
        assert_eq!(check["remedy"].is_null(), check["verdict"] == "good", "{check}");
    }
    json
}

/// C-07: a server as it should be: everything is looked at, and nothing is left on it.
#[tokio::test]
async fn a_good_server_is_go_and_nothing_is_left_on_it() {
    let cluster = Cluster::new();
    let diagnosis = diagnose(&url(&cluster), &patient()).await;
    assert!(diagnosis.is_go() && not_good(&diagnosis).is_empty(), "{diagnosis}");
    let looked_at: Vec<_> = diagnosis.checks.iter().map(|check| check.what).collect();
    assert_eq!(
        looked_at,
        [
            "reachable",
            "login",
            "version",
            "tls",
            "primary",
            "pooler",
            "session",
            "locks",
            "ttl",
            "settings",
            "wake-ups",
            "connections",
            "lock table",
            "replication",
            "latency"
        ]
    );
    assert!(the(&diagnosis, "version").reason.starts_with("PostgreSQL 1"));
    assert!(the(&diagnosis, "ttl").reason.contains(&humantime_of(diagnosis.bounds.as_ref().unwrap().ttl)));
    assert!(the(&diagnosis, "latency").reason.contains("20 round trips"));
    assert!(the(&diagnosis, "replication").reason.contains("no replica is connected"));
    let json = assert_program(&url(&cluster), GO);
    assert_eq!(json["bounds"]["ttl_ms"], 15_300);
    let socket = format!(
        "postgres:///postgres?host={}&port={}&user=postgres",
        cluster.dir().display(),
        cluster.port()
    );
    assert!(not_good(&diagnose(&socket, &patient()).await).is_empty());
    assert!(cluster.admin().advisory_rows().is_empty());
    until("no session", || cluster.admin().backends("%").is_empty()).await;
}

/// As the text has it.
fn humantime_of(duration: Duration) -> String {
    let (seconds, millis) = (duration.as_secs(), duration.subsec_millis());
    if millis == 0 { format!("{seconds}s") } else { format!("{seconds}s {millis}ms") }
}

/// C-07, F-31: a pooler in transaction or statement mode is no-go; all else is told too, and nothing is left on any of
/// its connections.
#[tokio::test]
async fn a_pooler_that_shares_connections_is_no_go_and_nothing_is_left_on_them() {
    let cluster = Cluster::new();
    let untouched = untouched(&cluster).await;
    for (mode, connections) in
        [(PoolMode::Transaction, 1), (PoolMode::Transaction, 3), (PoolMode::Statement, 1)]
    {
        let bouncer = PgBouncer::with(&cluster, mode, connections, "");
        let diagnosis = diagnose(&bouncer.url(), &patient()).await;
        assert_told(
            the(&diagnosis, "pooler"),
            Verdict::Bad,
            "shares server connections",
            "pool_mode = session",
        );
        assert!(diagnosis.is_permanent());
        assert!(matches!(diagnosis.error, Some(ConnectError::Pooler { .. })));
        for also in ["primary", "session", "locks", "connections", "lock table", "latency"] {
            assert_eq!(the(&diagnosis, also).verdict, Verdict::Good, "{diagnosis}");
        }
        assert_program(&bouncer.url(), MUST_NOT);
        assert_nothing_is_left(&cluster, &bouncer, connections, &untouched).await;
        // Whoever takes affinity for granted would make two leaders, and connecting does not say so.
        let diagnosis = leasehold::diagnose(&bouncer.url(), &patient().trust_affinity(true)).await.unwrap();
        assert_told(
            the(&diagnosis, "pooler"),
            Verdict::Bad,
            "trust_affinity is set, but",
            "pool_mode = session",
        );
        assert!(!diagnosis.is_go() && diagnosis.error.is_none() && diagnosis.is_permanent());
        assert_nothing_is_left(&cluster, &bouncer, connections, &untouched).await;
    }
}

/// C-07, F-32: a pooler in session mode is go, and is named where it can be known; nothing is left, even where it does
/// not reset what it hands on.
#[tokio::test]
async fn a_session_pooler_is_go_and_nothing_is_left_on_its_connections() {
    let cluster = Cluster::new();
    let untouched = untouched(&cluster).await;
    for settings in ["", "server_reset_query ="] {
        let bouncer = PgBouncer::with(&cluster, PoolMode::Session, 20, settings);
        // Fills the pool.
        leasehold::diagnose(&bouncer.url(), &patient()).await.unwrap();
        // What is hardly older than a connection may be its own.
        pass(Duration::from_millis(300)).await;
        let diagnosis = leasehold::diagnose(&bouncer.url(), &patient()).await.unwrap();
        println!("{diagnosis}");
        assert!(diagnosis.is_go() && not_good(&diagnosis).is_empty(), "{diagnosis}");
        assert_told(the(&diagnosis, "pooler"), Verdict::Good, "session mode), which works", "");
        if settings.is_empty() {
            assert_program(&bouncer.url(), GO);
        }
        let used = cluster.admin().backends("%").len();
        assert_nothing_is_left(&cluster, &bouncer, u32::try_from(used).unwrap(), &untouched).await;
    }
}

/// C-07: a read replica is no-go for now; beside its primary it is as it should be; two primaries are two stores.
#[tokio::test]
async fn a_replica_is_no_go_alone_and_good_beside_its_primary() {
    let primary = Cluster::new();
    let standby = Cluster::standby_of(&primary);
    let diagnosis = diagnose(&url(&standby), &patient()).await;
    assert_told(the(&diagnosis, "primary"), Verdict::Bad, "read replica", "connect to the primary");
    assert!(!diagnosis.is_go() && !diagnosis.is_permanent());
    assert_eq!(the(&diagnosis, "pooler").verdict, Verdict::Good);
    assert_program(&url(&standby), NOT_NOW);

    let both =
        |other: u16| format!("postgres://postgres@127.0.0.1:{other},127.0.0.1:{}/postgres", primary.port());
    let diagnosis = diagnose(&both(standby.port()), &patient()).await;
    assert!(diagnosis.is_go() && not_good(&diagnosis).is_empty(), "{diagnosis}");
    let at = format!("127.0.0.1:{}", standby.port());
    let replica =
        diagnosis.checks.iter().find(|check| check.what == "primary" && check.at.as_ref() == Some(&at));
    assert!(replica.unwrap().reason.contains("used when it has been promoted"), "{diagnosis}");
    let of_primary = diagnosis.checks.iter().find(|check| check.what == "replication").unwrap();
    assert_told(of_primary, Verdict::Good, "a replica is connected, and no commit waits for one", "");

    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let diagnosis = diagnose(&both(closed), &patient()).await;
    assert!(diagnosis.is_go(), "{diagnosis}");
    assert_eq!(not_good(&diagnosis), ["reachable"]);
    assert_program(&both(closed), GO);

    standby.admin().sql("SELECT pg_promote()");
    let diagnosis = diagnose(&both(standby.port()), &patient()).await;
    assert_told(the(&diagnosis, "hosts"), Verdict::Bad, "writable servers of their own", "one primary");
    assert_program(&both(standby.port()), MUST_NOT);
}

/// C-07, D26: no room at all, no room for the second connection, and little room.
#[tokio::test]
async fn a_full_server_is_told_with_whose_limit_it_is() {
    let cluster = Cluster::with(Login::Trust, &["max_connections=6", "superuser_reserved_connections=0"]);
    cluster.admin().sql("CREATE ROLE app LOGIN");
    let app = cluster.options().username("app");
    let url = cluster.url("app", "", "postgres");
    let mut taken = Vec::new();
    while let Ok(connection) = PgConnection::connect_with(&app).await {
        taken.push(connection);
    }
    let diagnosis = diagnose(&url, &quick("doctor")).await;
    assert_told(the(&diagnosis, "connections"), Verdict::Bad, "SQLSTATE 53300", "raise max_connections");
    assert_eq!(the(&diagnosis, "reachable").verdict, Verdict::Good);
    assert!(!diagnosis.is_permanent());
    assert_eq!(doctor(&url, &["--query-timeout", "1s"]).status.code(), Some(NOT_NOW));

    let sessions = || cluster.admin().backends("%").len();
    let before = sessions();
    taken.pop().unwrap().close().await.unwrap();
    until("one is gone", || sessions() == before - 1).await;
    let diagnosis = leasehold::diagnose(&url, &quick("doctor")).await.unwrap();
    println!("{diagnosis}");
    assert_told(the(&diagnosis, "pooler"), Verdict::Bad, "a second connection", "leave room for one");
    assert_told(
        the(&diagnosis, "connections"),
        Verdict::Warning,
        "0 of the 6 of the server",
        "raise the limit",
    );
    assert!(diagnosis.checks.iter().all(|check| check.what != "wake-ups"), "it is not set up: {diagnosis}");
    drop(taken);
    until("there is room", || sessions() == 0).await;

    cluster.admin().sql("ALTER ROLE app CONNECTION LIMIT 2");
    let diagnosis = leasehold::diagnose(&url, &patient()).await.unwrap();
    println!("{diagnosis}");
    assert_told(
        the(&diagnosis, "connections"),
        Verdict::Warning,
        "1 of the 2 of the role",
        "limit of the role",
    );
    assert!(diagnosis.is_go());
}

/// C-07, D26: a pooler that is full.
#[tokio::test]
async fn a_full_pooler_is_told() {
    let cluster = Cluster::new();
    let bouncer = PgBouncer::with(&cluster, PoolMode::Session, 20, "max_client_conn = 1");
    let client = PgConnection::connect_with(&bouncer.options()).await.unwrap();
    let diagnosis = diagnose(&bouncer.url(), &quick("doctor")).await;
    assert_told(the(&diagnosis, "connections"), Verdict::Bad, "no more connections", "raise max_client_conn");
    client.close().await.unwrap();
}

/// C-07, F-28: a wrong password, an unknown database, no TLS, nobody there, somebody who says nothing: what is wrong is
/// told without any secret.
#[tokio::test]
async fn what_cannot_be_reached_is_told_without_a_secret() {
    let mut cluster = Cluster::with(Login::Scram, &[]);
    cluster.admin().sql("CREATE ROLE app LOGIN PASSWORD 'right'");
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let nobody = "postgres://app:s3cret@127.0.0.1:1/postgres".to_owned();
    let silent = format!("postgres://app:s3cret@127.0.0.1:{}/postgres", silent.local_addr().unwrap().port());
    let wrong = cluster.url("app", "s3cret", "postgres");
    for (url, what, reason, remedy) in [
        (wrong.clone(), "login", "refused the login", "check the user"),
        (format!("{wrong}?sslmode=require"), "tls", "no TLS connection", "sslmode"),
        (nobody.clone(), "reachable", "refused", "is the server up"),
        (silent, "reachable", "did not answer", "firewall"),
    ] {
        let since = now();
        let diagnosis = diagnose(&url, &quick("doctor")).await;
        assert!(since.elapsed() < 2 * Duration::from_secs(1) + AT_ONCE, "{:?}", since.elapsed());
        assert_told(the(&diagnosis, what), Verdict::Bad, reason, remedy);
        assert!(!diagnosis.is_permanent());
    }
    assert_program(&wrong, NOT_NOW);
    assert_program(&nobody, NOT_NOW);
    cluster.stop(Stop::Fast).await;
    assert_program(&wrong, NOT_NOW);
}

/// C-07, F-34, F-41: what the role brings along is told as harmless; a small lock table with what would do.
#[tokio::test]
async fn what_a_role_brings_along_is_harmless_and_low_limits_are_told() {
    let cluster = Cluster::with(Login::Trust, &["max_locks_per_transaction=10", "max_connections=10"]);
    cluster.admin().sql(
        "CREATE ROLE app LOGIN; ALTER ROLE app SET statement_timeout = '200ms'; \
         ALTER ROLE app SET idle_session_timeout = '1s'; ALTER ROLE app SET default_transaction_read_only = on; \
         ALTER DATABASE postgres SET lock_timeout = '100ms'; \
         REVOKE EXECUTE ON FUNCTION pg_catalog.pg_notify(text, text) FROM PUBLIC",
    );
    let url = cluster.url("app", "", "postgres");
    let diagnosis = diagnose(&url, &patient()).await;
    let settings = the(&diagnosis, "settings");
    for brought in [
        "it does no harm",
        "statement_timeout = 200ms (user)",
        "idle_session_timeout = 1000ms (user)",
        "default_transaction_read_only = on (user)",
        "lock_timeout = 100ms (database)",
    ] {
        assert_told(settings, Verdict::Good, brought, "");
    }
    assert_told(
        the(&diagnosis, "lock table"),
        Verdict::Warning,
        "of 100 locks",
        "max_locks_per_transaction = 40",
    );
    assert_told(the(&diagnosis, "wake-ups"), Verdict::Warning, "by their next poll", "GRANT EXECUTE");
    assert_eq!(not_good(&diagnosis), ["wake-ups", "lock table"]);
    assert!(diagnosis.is_go());
    let diagnosis = diagnose(&url, &patient().max_held(10)).await;
    assert_eq!(not_good(&diagnosis), ["wake-ups"]);
}

/// C-07, D25: functions that only look like locks are no-go.
#[tokio::test]
async fn a_look_alike_server_is_no_go() {
    let cluster = Cluster::with(Login::Trust, &["allow_system_table_mods=on"]);
    cluster.admin().sql(
        "ALTER FUNCTION pg_catalog.pg_try_advisory_xact_lock(bigint) RENAME TO real_one; \
         CREATE FUNCTION pg_catalog.pg_try_advisory_xact_lock(bigint) RETURNS bool LANGUAGE sql AS 'SELECT true'",
    );
    let diagnosis = diagnose(&url(&cluster), &patient()).await;
    assert_told(the(&diagnosis, "locks"), Verdict::Bad, "pg_locks does not show", "use a PostgreSQL server");
    assert_eq!(the(&diagnosis, "pooler").verdict, Verdict::Good);
    assert_program(&url(&cluster), MUST_NOT);
}

/// C-07: a ttl that the server does not enforce, and answers that come late.
#[tokio::test]
async fn a_ttl_that_is_not_enforced_and_late_answers_are_told() {
    let cluster = Cluster::with(Login::Trust, &["allow_system_table_mods=on"]);
    cluster.admin().sql(
        "ALTER VIEW pg_catalog.pg_settings RENAME TO real_settings; \
         CREATE VIEW pg_catalog.pg_settings AS SELECT name, CASE name WHEN 'idle_session_timeout' THEN '0' \
         ELSE setting END AS setting, unit, source FROM pg_catalog.real_settings; \
         GRANT SELECT ON pg_catalog.pg_settings TO PUBLIC; \
         ALTER FUNCTION pg_catalog.pg_is_in_recovery() RENAME TO real_one; \
         CREATE FUNCTION pg_catalog.pg_is_in_recovery() RETURNS bool LANGUAGE plpgsql AS \
         'BEGIN PERFORM pg_catalog.pg_sleep(0.6); RETURN false; END'",
    );
    let diagnosis = diagnose(&url(&cluster), &quick("doctor").query_timeout(Duration::from_secs(2))).await;
    let ttl = the(&diagnosis, "ttl");
    assert_told(ttl, Verdict::Warning, "idle_session_timeout should be", "PostgreSQL 14");
    assert_eq!(diagnosis.bounds.as_ref().unwrap().vacancy_silent, None);
    assert_told(the(&diagnosis, "latency"), Verdict::Warning, "costs every lease", "raise query_timeout");
    assert!(diagnosis.is_go());
}

/// C-07, F-31: a session that comes with the locks of an earlier client is not used, and they are left to it.
#[tokio::test]
async fn a_session_with_locks_of_an_earlier_client_is_no_go() {
    let cluster = Cluster::new();
    let bouncer = PgBouncer::with(&cluster, PoolMode::Session, 20, "server_reset_query =");
    let mut client = PgConnection::connect_with(&bouncer.options()).await.unwrap();
    sqlx::raw_sql("SELECT pg_advisory_lock(42)").execute(&mut client).await.unwrap();
    client.close().await.unwrap();
    let diagnosis = diagnose(&bouncer.url(), &patient()).await;
    assert_told(the(&diagnosis, "session"), Verdict::Bad, "locks of an earlier client", "DISCARD ALL");
    assert_eq!(not_good(&diagnosis), ["session"]);
    assert_eq!(cluster.admin().advisory_rows().len(), 1);
    assert_program(&bouncer.url(), NOT_NOW);
}

/// C-07, D18: a notification that cannot be sent, since another commit holds the cluster's lock for them.
#[tokio::test]
async fn a_wake_up_that_cannot_be_sent_is_told() {
    let cluster = Cluster::new();
    cluster.admin().sql("ALTER SYSTEM SET synchronous_standby_names = 'nobody'");
    cluster.admin().sql("SELECT pg_reload_conf()");
    let mut stuck = cluster.connect().await;
    let stuck = tokio::spawn(async move {
        sqlx::raw_sql("CREATE TABLE something (); NOTIFY something").execute(&mut stuck).await.unwrap();
    });
    let waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'";
    until("a stuck commit", || cluster.admin().one::<u32>(waits) == 1).await;
    let diagnosis = diagnose(&url(&cluster), &patient()).await;
    assert_told(the(&diagnosis, "wake-ups"), Verdict::Warning, "55P03", "waits for a replica");
    assert_told(the(&diagnosis, "replication"), Verdict::Good, "commits wait for \"nobody\"", "");
    assert_eq!(not_good(&diagnosis), ["wake-ups"]);
    cluster.admin().sql("ALTER SYSTEM RESET synchronous_standby_names");
    cluster.admin().sql("SELECT pg_reload_conf()");
    stuck.await.unwrap();
}

/// C-07: dropped at whatever instant, it leaves nothing: directly, and through poolers of both kinds.
#[tokio::test]
async fn a_diagnosis_that_is_given_up_leaves_nothing() {
    let cluster = Cluster::new();
    let untouched = untouched(&cluster).await;
    let shared = PgBouncer::with(&cluster, PoolMode::Transaction, 2, "");
    let own = PgBouncer::with(&cluster, PoolMode::Session, 20, "");
    let options = patient();
    for url in [url(&cluster), shared.url(), own.url()] {
        let since = now();
        leasehold::diagnose(&url, &options).await.unwrap();
        let (mut whole, mut given_up) = (since.elapsed(), 0);
        for n in 0..20 {
            let (since, diagnosis) = (now(), leasehold::diagnose(&url, &options));
            match tokio::time::timeout(whole * n / 20, diagnosis).await {
                Ok(_) => whole = since.elapsed(),
                Err(_) => given_up += 1,
            }
        }
        println!("{given_up} of 20 were given up, of {whole:?} each");
        assert!(given_up > 0);
    }
    until("no session is left", || cluster.admin().backends("leasehold/%").is_empty()).await;
    until("no lock is left", || cluster.admin().advisory_rows().is_empty()).await;
    assert_nothing_is_left(&cluster, &shared, 2, &untouched).await;
}

/// C-07: TLS that was verified, or not.
#[cfg(feature = "tls")]
#[tokio::test]
async fn tls_is_told() {
    let cluster = Cluster::with_tls();
    let url =
        |more: &str| format!("postgres://postgres@localhost:{}/postgres?sslmode={more}", cluster.port());
    let verified = url(&format!("verify-full&sslrootcert={}", cluster.certificate().display()));
    assert_told(the(&diagnose(&verified, &patient()).await, "tls"), Verdict::Good, "was verified", "");
    assert_told(the(&diagnose(&url("prefer"), &patient()).await, "tls"), Verdict::Good, "not verified", "");
    assert_told(
        the(&diagnose(&url("disable"), &patient()).await, "tls"),
        Verdict::Good,
        "does not encrypt",
        "",
    );
    assert_told(
        the(&diagnose(&url("verify-full"), &patient()).await, "tls"),
        Verdict::Bad,
        "no TLS",
        "certificate",
    );
}

/// C-07: on files the same, and the directory is left as it was.
#[tokio::test]
async fn a_directory_is_looked_at_and_left_as_it_was() {
    let base = tempfile::tempdir().unwrap();
    let entries = || fs::read_dir(base.path()).unwrap().count();
    for dir in [base.path().join("not/yet"), base.path().to_owned()] {
        let store = format!("file:{}", dir.display());
        let diagnosis = leasehold::diagnose(&store, &patient()).await.unwrap();
        println!("{diagnosis}");
        assert!(diagnosis.is_go());
        assert_eq!(not_good(&diagnosis), ["ttl"]);
        let looked_at: Vec<_> = diagnosis.checks.iter().map(|check| check.what).collect();
        assert_eq!(looked_at, ["directory", "file system", "wake-ups", "locks", "ttl"]);
        let is_missing = the(&diagnosis, "directory").reason.contains("is not there yet, and can be made");
        assert_eq!(is_missing, !dir.exists());
        assert_eq!(assert_program(&store, GO)["bounds"]["vacancy_silent_ms"], serde_json::Value::Null);
        assert_eq!(entries(), 0, "nothing was made");
    }
    // One that is in use.
    let store = format!("file:{}", base.path().display());
    let locker = Locker::connect(&store, patient()).await.unwrap();
    assert!(diagnose(&store, &patient()).await.is_go());
    locker.close().await;
    drop(locker);
    until("its socket is gone", || fs::read_dir(base.path().join("peers")).unwrap().count() == 0).await;
    assert_eq!(entries(), 1);
    fs::set_permissions(base.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let diagnosis = diagnose(&store, &patient()).await;
    assert_told(the(&diagnosis, "directory"), Verdict::Warning, "mode 0777", "chmod o-w");
}

/// C-07: a directory that cannot be used, told as of that directory.
#[tokio::test]
async fn a_directory_that_cannot_be_used_is_no_go() {
    let base = tempfile::tempdir().unwrap();
    let file = base.path().join("file");
    fs::write(&file, "").unwrap();
    let long = base.path().join("a").join("x".repeat(300));
    for dir in [&file, &file.join("below"), &long, std::path::Path::new("/proc/leases")] {
        let store = format!("file:{}", dir.display());
        let diagnosis = diagnose(&store, &patient()).await;
        assert_told(the(&diagnosis, "directory"), Verdict::Bad, &dir.display().to_string(), "choose a");
        assert_program(&store, NOT_NOW);
    }
    // Sockets that cannot be made are told along with the rest.
    let peers = base.path().join("dir/peers");
    fs::create_dir(base.path().join("dir")).unwrap();
    fs::write(&peers, "in the way").unwrap();
    let diagnosis = diagnose(&format!("file:{}", base.path().join("dir").display()), &patient()).await;
    assert_told(the(&diagnosis, "wake-ups"), Verdict::Bad, "peers", "remove that");
    assert_eq!(the(&diagnosis, "locks").verdict, Verdict::Good);
    let left: Vec<_> = fs::read_dir(base.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left.len(), 2, "{left:?}");
}

/// C-06, C-02: the help has examples; what cannot be meant is bad usage.
#[test]
fn the_help_has_examples_and_bad_usage_its_code() {
    let output = doctor("", &["--help"]);
    assert!(texts(&output).0.contains("leasehold doctor --store postgres://"));
    for (store, arguments) in [
        ("", &[][..]),
        ("leases", &[]),
        ("ftp://app:s3cret@host/x", &[]),
        ("postgres://app:s3cret@db:port/app", &[]),
        ("file:/tmp", &["--query-timeout", "0s"]),
        ("file:/tmp", &["--nonsense"]),
    ] {
        let output = doctor(store, arguments);
        assert_eq!(output.status.code(), Some(USAGE), "{store} {arguments:?}");
        assert!(output.stdout.is_empty());
    }
}
