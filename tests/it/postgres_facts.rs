//! What the product relies on of PostgreSQL, in plain SQL: these fail first when a version changes it.

use std::fmt::Write as _;
use std::time::Duration;

use leasehold::{Key, Kind};
use sqlx::postgres::PgListener;
use sqlx::{AssertSqlSafe, Connection as _, PgConnection, Row as _};

use crate::support::postgres::{Cluster, Database};
use crate::support::{AT_ONCE, eventually, now, until};

const LOCK: &str = "SELECT pg_try_advisory_lock(7)";
const UNLOCK: &str = "SELECT pg_advisory_unlock(7)";

/// Runs a statement as one message, as the product does, and gives the first column of its first row as text.
async fn sql(connection: &mut PgConnection, sql: &str) -> Result<String, sqlx::Error> {
    let rows = sqlx::raw_sql(AssertSqlSafe(sql)).fetch_all(connection).await?;
    Ok(rows.first().and_then(|row| row.try_get_unchecked(0).ok()).unwrap_or_default())
}

async fn is_true(connection: &mut PgConnection, text: &str) -> bool {
    sql(connection, text).await.unwrap() == "t"
}

async fn pid(connection: &mut PgConnection) -> i32 {
    sql(connection, "SELECT pg_backend_pid()").await.unwrap().parse().unwrap()
}

/// The SQLSTATE of an answered error.
#[track_caller]
fn code(error: &sqlx::Error) -> String {
    let error = error.as_database_error().unwrap_or_else(|| panic!("{error:?} is no answer"));
    error.code().unwrap().into_owned()
}

/// D08: taken five times and freed once, a key is still held, and the lock table shows one row.
#[tokio::test]
async fn session_locks_stack_and_the_count_is_not_shown() {
    let database = Database::new();
    let (mut holder, mut other) = (database.connect().await, database.connect().await);
    for _ in 0..5 {
        assert!(is_true(&mut holder, LOCK).await);
    }
    assert!(is_true(&mut holder, UNLOCK).await);
    assert_eq!(database.admin().advisory_rows().len(), 1);
    assert!(!is_true(&mut other, LOCK).await);
    for _ in 0..4 {
        assert!(is_true(&mut holder, UNLOCK).await);
    }
    assert!(is_true(&mut other, LOCK).await);
    assert!(!is_true(&mut holder, UNLOCK).await);
}

/// D24: the keys of two databases of one server are not the same, nor are a `bigint` and two `int`.
#[tokio::test]
async fn keys_belong_to_a_database_and_a_form() {
    let (database, other) = (Database::new(), "leasehold_other");
    let cluster = Cluster::new();
    cluster.admin().sql(&format!("CREATE DATABASE {other}"));
    let mut here = cluster.connect().await;
    let mut there = PgConnection::connect_with(&cluster.options().database(other)).await.unwrap();
    assert!(is_true(&mut here, LOCK).await && is_true(&mut there, LOCK).await);
    let (mut one, mut two) = (database.connect().await, database.connect().await);
    assert!(is_true(&mut one, LOCK).await && is_true(&mut two, "SELECT pg_try_advisory_lock(0, 7)").await);
    // The greatest unsigned number is shown in two halves.
    assert!(is_true(&mut one, "SELECT pg_try_advisory_lock(-1)").await);
    let pid = pid(&mut one).await.to_string();
    assert!(database.admin().advisory_rows().contains(&vec![
        pid,
        "-1".to_owned(),
        "ExclusiveLock".to_owned()
    ]));
}

/// D03: a terminated backend frees its locks and closes its socket, also while it is idle; a listener sees it at once.
#[tokio::test]
async fn a_terminated_backend_frees_and_closes() {
    let database = Database::new();
    let pool = sqlx::postgres::PgPoolOptions::new().max_connections(1);
    let pool = pool.connect_with(database.options().application_name("listener")).await.unwrap();
    let mut listener = PgListener::connect_with(&pool).await.unwrap();
    listener.eager_reconnect(false);
    listener.listen("leasehold").await.unwrap();
    sqlx::query(LOCK).execute(&mut listener).await.unwrap();
    let backend = database.admin().backends("listener")[0];
    let (killed, ended) = tokio::join!(
        async {
            database.admin().terminate(backend);
            now()
        },
        async {
            assert!(listener.try_recv().await.ok().flatten().is_none());
            now()
        }
    );
    println!("seen {:?} after the kill", ended.saturating_duration_since(killed));
    assert!(ended < killed + AT_ONCE);
    until("it is free", || database.admin().holder(7).is_none()).await;
}

/// F-26: a closed socket frees, without a word sent.
#[tokio::test]
async fn a_closed_socket_frees() {
    let database = Database::new();
    let mut holder = database.connect().await;
    assert!(is_true(&mut holder, LOCK).await);
    // Sends nothing, unlike `close`.
    drop(holder);
    let since = now();
    until("it is free", || database.admin().holder(7).is_none()).await;
    println!("free {:?} after the close", since.elapsed());
    assert!(since.elapsed() < AT_ONCE);
}

/// F-30: a notification leaves at commit, when the unlock of the same statement is done: who wakes finds the key free.
#[tokio::test]
async fn a_notification_leaves_after_the_unlock() {
    let database = Database::new();
    let mut listener = PgListener::connect_with(
        &sqlx::postgres::PgPoolOptions::new()
            .max_connections(1)
            .connect_with(database.options())
            .await
            .unwrap(),
    )
    .await
    .unwrap();
    listener.listen("leasehold").await.unwrap();
    let mut holder = database.connect().await;
    for round in 0..100 {
        assert!(is_true(&mut holder, LOCK).await);
        let released = sql(&mut holder, "SELECT pg_advisory_unlock(7), pg_notify('leasehold', '7')");
        let (released, ()) = tokio::join!(async { released.await.unwrap() }, async {
            listener.recv().await.unwrap();
            let row = sqlx::query(LOCK).fetch_one(&mut listener).await.unwrap();
            assert!(row.get::<bool, _>(0), "round {round}");
            sqlx::query(UNLOCK).execute(&mut listener).await.unwrap();
        });
        assert_eq!(released, "t");
    }
}

/// D15: an idle session ends with 57P05, and its locks with it.
#[tokio::test]
async fn an_idle_session_is_ended_and_its_locks_are_free() {
    let database = Database::new();
    let (mut idle, mut other) = (database.connect().await, database.connect().await);
    sql(&mut idle, "SET idle_session_timeout = '300ms'").await.unwrap();
    let since = now();
    assert!(is_true(&mut idle, LOCK).await);
    until("it is free", || database.admin().holder(7).is_none()).await;
    let after = since.elapsed();
    println!("free {after:?} after the statement");
    assert!((Duration::from_millis(300)..Duration::from_secs(3)).contains(&after), "{after:?}");
    assert_eq!(code(&sql(&mut idle, "SELECT 1").await.unwrap_err()), "57P05");
    assert!(is_true(&mut other, LOCK).await);
}

/// D15: every statement starts the idle clock anew, what is pushed to the client does not.
#[tokio::test]
async fn notifications_do_not_extend_the_idle_limit() {
    let database = Database::new();
    let (mut idle, mut sender) = (database.connect().await, database.connect().await);
    sql(&mut idle, "SET idle_session_timeout = '1s'").await.unwrap();
    sql(&mut idle, "LISTEN leasehold").await.unwrap();
    // Statements keep it alive, past its limit,
    let since = now();
    while since.elapsed() < Duration::from_millis(1500) {
        sql(&mut idle, LOCK).await.unwrap();
    }
    // and notifications do not.
    let (since, mut sent) = (now(), 0);
    while database.admin().holder(7).is_some() {
        sql(&mut sender, "NOTIFY leasehold").await.unwrap();
        sent += 1;
        assert!(since.elapsed() < Duration::from_secs(10), "{sent} notifications");
    }
    println!("free after {:?} and {sent} notifications", since.elapsed());
    assert!(since.elapsed() >= Duration::from_millis(900) && sent > 10);
}

/// D18: what a statement had taken before it failed stays taken, and a transaction's rollback does not free it.
#[tokio::test]
async fn session_locks_of_a_failed_statement_stay() {
    let database = Database::new();
    let mut holder = database.connect().await;
    let error = sql(&mut holder, "SELECT CASE WHEN pg_try_advisory_lock(7) THEN 1 / (SELECT 0) END").await;
    assert_eq!(code(&error.unwrap_err()), "22012");
    assert!(database.admin().holder(7).is_some());
    sql(&mut holder, "SET statement_timeout = '200ms'").await.unwrap();
    let error = sql(&mut holder, "SELECT pg_try_advisory_lock(8), pg_sleep(60)").await.unwrap_err();
    assert_eq!(code(&error), "57014");
    assert!(database.admin().holder(8).is_some());
    sql(&mut holder, "BEGIN; SELECT pg_try_advisory_lock(9); ROLLBACK").await.unwrap();
    assert!(database.admin().holder(9).is_some());
    assert!(is_true(&mut holder, UNLOCK).await);
}

/// F-41: out of lock memory is an answer, 53200: the session goes on with what it had got, can list and free it. Until
/// then nobody else can even connect.
#[tokio::test]
async fn out_of_lock_memory_is_an_answer() {
    let cluster = Cluster::with(
        crate::support::postgres::Login::Trust,
        &[
            "max_locks_per_transaction=10",
            "max_connections=10",
            "max_wal_senders=0",
            "max_worker_processes=0",
        ],
    );
    let mut holder = cluster.connect().await;
    let many = "SELECT count(*) FROM generate_series(1, 100000) AS n WHERE pg_try_advisory_lock(n)";
    let error = sql(&mut holder, many).await.unwrap_err();
    assert_eq!(code(&error), "53200");
    assert!(error.to_string().contains("out of shared memory"), "{error}");
    let held = "SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory'";
    let held: usize = sql(&mut holder, held).await.unwrap().parse().unwrap();
    println!("{held} locks fitted");
    assert!(held > 100);
    let error = PgConnection::connect_with(&cluster.options()).await.unwrap_err();
    assert_eq!(code(&error), "53200");
    sql(&mut holder, "SELECT pg_advisory_unlock_all()").await.unwrap();
    assert!(cluster.admin().advisory_rows().is_empty());
    assert!(is_true(&mut holder, LOCK).await);
}

/// F-35, D17: who waits in `pg_advisory_lock()` holds a snapshot and stalls an index build; who polls does not.
#[tokio::test]
async fn a_blocked_waiter_stalls_an_index_build_and_polls_do_not() {
    let cluster = Cluster::new();
    cluster.admin().sql("CREATE TABLE t (x int)");
    let (mut holder, mut waiter, mut builder) =
        (cluster.connect().await, cluster.connect().await, cluster.connect().await);
    assert!(is_true(&mut holder, LOCK).await);

    let polls = tokio::spawn({
        let mut poller = cluster.connect().await;
        async move {
            while !is_true(&mut poller, LOCK).await {
                tokio::task::yield_now().await;
            }
        }
    });
    sql(&mut builder, "CREATE INDEX CONCURRENTLY polled ON t (x)").await.unwrap();
    assert!(!polls.is_finished());

    let waiting = pid(&mut waiter).await;
    let blocked = tokio::spawn(async move {
        sql(&mut waiter, "SELECT pg_advisory_lock(7)").await.unwrap();
        waiter
    });
    let state = format!(
        "SELECT wait_event_type = 'Lock' AND backend_xmin IS NOT NULL FROM pg_stat_activity WHERE pid = {waiting}"
    );
    let look = || cluster.admin().one::<String>(&state);
    eventually("it waits, with a snapshot", look, |waits| waits == "t").await;
    sql(&mut builder, "SET statement_timeout = '1s'").await.unwrap();
    let error = sql(&mut builder, "CREATE INDEX CONCURRENTLY blocked ON t (x)").await.unwrap_err();
    assert_eq!(code(&error), "57014");

    // The key goes to the blocked one or to the poller first; both get it.
    sql(&mut holder, "SELECT pg_advisory_unlock_all()").await.unwrap();
    tokio::join!(
        async {
            let mut waiter = blocked.await.unwrap();
            sql(&mut waiter, "SELECT pg_advisory_unlock_all()").await.unwrap();
        },
        async { polls.await.unwrap() }
    );
}

/// D03: a hot standby grants advisory locks, of a table of its own: two leaders.
#[tokio::test]
async fn a_hot_standby_grants_locks_of_its_own() {
    let primary = Cluster::new();
    let standby = Cluster::standby_of(&primary);
    let (mut one, mut two) = (primary.connect().await, standby.connect().await);
    assert!(is_true(&mut one, LOCK).await && is_true(&mut two, LOCK).await);
    assert!(!is_true(&mut one, "SELECT pg_is_in_recovery()").await);
    assert!(is_true(&mut two, "SELECT pg_is_in_recovery()").await);
    assert_eq!(code(&sql(&mut two, "LISTEN leasehold").await.unwrap_err()), "25006");
}

/// F-03, D23, D24: the documented SQL gives the keys that the code gives, whatever the name.
#[tokio::test]
async fn the_documented_sql_computes_the_keys() {
    let database = Database::new();
    let mut connection = database.connect().await;
    let long = "x".repeat(10_000);
    let names = ["", "sweeper", "caf\u{e9}", "cafe\u{301}", "a'b\\c", "\u{1f980}", &long];
    let kinds = [(Kind::Lease, "lease"), (Kind::Lock, "lock"), (Kind::RwLock, "rwlock")];
    let (mut above, mut below) = (0, 0);
    for (kind, label) in kinds {
        let documented =
            documented_sql("convert_to('sweeper', 'UTF8')").replace("v1/lease", &format!("v1/{label}"));
        for name in names {
            let row = sqlx::query(AssertSqlSafe(documented.replace("'sweeper'", "$1"))).bind(name);
            let key: i64 = row.fetch_one(&mut connection).await.unwrap().get(0);
            assert_eq!(key, Key::of(kind, name).get(), "{label} {name:.20}");
            *(if key < 0 { &mut above } else { &mut below }) += 1;
        }
        // A text of SQL cannot have it.
        let nul = documented.replace("convert_to('sweeper', 'UTF8')", "'\\x610062'::bytea");
        let key: i64 = sqlx::query(AssertSqlSafe(nul)).fetch_one(&mut connection).await.unwrap().get(0);
        assert_eq!(key, Key::of(kind, "a\0b").get(), "{label}");
    }
    assert!(above > 0 && below > 0, "above 2^63 as unsigned: {above}, below: {below}");
}

/// The SQL of the documentation of `Key`, which has that text.
fn documented_sql(has: &str) -> String {
    let source = include_str!("../../src/name.rs");
    let lines = source.lines().skip_while(|line| *line != "/// ```sql").skip(1);
    let mut text = String::new();
    for line in lines.take_while(|line| *line != "/// ```") {
        writeln!(text, "{}", line.trim_start_matches("///")).unwrap();
    }
    assert!(text.contains(has), "{text}");
    text.trim().trim_end_matches(';').to_owned()
}
