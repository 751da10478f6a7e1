//! What the server, the role and other clients are set to do does no harm.

use std::time::Duration;

use leasehold::{Key, Kind, Locker};
use sqlx::postgres::PgConnectOptions;

use crate::support::postgres::{Cluster, Database, Login};
use crate::support::{AT_ONCE, Log, Member, eventually, now, pass, quick, sleepy, until};

/// F-34, D18, D15: limits that the role brings, all of them shorter than what the product needs.
#[tokio::test]
async fn the_defaults_of_a_role_do_no_harm() {
    let cluster = Cluster::new();
    cluster.admin().sql("CREATE ROLE app LOGIN");
    let newer = cluster.admin().one::<i32>("SHOW server_version_num") >= 170_000;
    for setting in [
        "statement_timeout = '200ms'",
        "lock_timeout = '100ms'",
        "idle_in_transaction_session_timeout = '1s'",
        "idle_session_timeout = '1s'",
        "transaction_timeout = '1s'",
        "default_transaction_read_only = on",
        "default_transaction_isolation = 'serializable'",
        "search_path = ''",
        "client_min_messages = 'debug5'",
    ] {
        if newer || !setting.starts_with("transaction_timeout") {
            cluster.admin().sql(&format!("ALTER ROLE app SET {setting}"));
        }
    }
    let target: PgConnectOptions = cluster.url("app", "", "postgres").parse().unwrap();
    let log = Log::default();
    let locker = |options| Locker::postgres(target.clone(), options).unwrap();
    // Few heartbeats: one each 2 s.
    let rare = |who| sleepy(who).heartbeat_interval(Duration::from_secs(2));
    // An identity that has to be quoted in every way.
    let first = locker(rare("o'n\\e"));
    let mut a = Member::on(&first, "job", "a", &log);
    let lease = a.leads().await;
    assert!(first.bounds().vacancy_silent.is_some());
    let names = "SELECT application_name FROM pg_stat_activity WHERE application_name LIKE 'lease%'";
    assert_eq!(cluster.admin().sql(names), [["leasehold/o'n\\e"]]);
    let mut b = Member::on(&locker(rare("b")), "job", "b", &log);
    b.stands_by().await;
    let sessions = cluster.admin().backends("leasehold/%");
    pass(Duration::from_secs(4)).await;
    assert_eq!(cluster.admin().backends("leasehold/%"), sessions);
    assert!(lease.is_held());
    assert!(lease.check().await);
    a.stop().await.unwrap();
    // By the push: it sleeps for an hour.
    b.leads().await;
    b.stop().await.unwrap();
    assert_eq!(log.lines(), ["a start", "a end", "b start", "b end"]);
}

/// F-35, D17: beside a leader and three standbys.
#[tokio::test]
async fn candidates_stall_no_index_build() {
    let database = Database::new();
    database.admin().sql("CREATE TABLE t (x int)");
    let log = Log::default();
    let locker = |who| Locker::postgres(database.options(), quick(who)).unwrap();
    let mut leader = Member::on(&locker("a"), "job", "a", &log);
    leader.leads().await;
    let standbys = ["b", "c", "d"].map(|who| Member::on(&locker(who), "job", who, &log));
    let job = Key::of(Kind::Lease, "job");
    until("three wait", || database.admin().waiters(job) == 3).await;
    for index in 0..5 {
        let since = now();
        database.admin().sql(&format!("CREATE INDEX CONCURRENTLY index_{index} ON t (x)"));
        assert!(since.elapsed() < AT_ONCE, "{:?}", since.elapsed());
    }
    let snapshots = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'leasehold/%' \
                     AND state = 'idle' AND backend_xmin IS NULL AND xact_start IS NULL";
    eventually("all are idle", || database.admin().one::<i32>(snapshots), |&idle| idle == 4).await;
    for standby in standbys {
        standby.stop().await.unwrap();
    }
    leader.stop().await.unwrap();
}

/// F-41: what is held lives on, nothing unasked stays locked, and what was refused leads when there is room.
#[tokio::test]
async fn out_of_lock_memory_refuses_what_is_new_and_keeps_what_is_held() {
    let cluster = Cluster::with(Login::Trust, &["max_locks_per_transaction=10", "max_connections=10"]);
    let log = Log::default();
    let locker = Locker::postgres(cluster.options(), quick("a")).unwrap();
    let mut kept = Member::on(&locker, "kept", "kept", &log);
    let lease = kept.leads().await;
    // Others fill the table but for some.
    let mut filler = cluster.connect().await;
    let fill = "SELECT pg_try_advisory_lock(n) FROM generate_series(1, 100000) AS n";
    sqlx::raw_sql(fill).execute(&mut filler).await.unwrap_err();
    sqlx::raw_sql("SELECT pg_advisory_unlock(n) FROM generate_series(1, 60) AS n")
        .execute(&mut filler)
        .await
        .unwrap();
    let names: Vec<String> = (0..100).map(|n| format!("name {n}")).collect();
    let members: Vec<_> = names.iter().map(|name| Member::on(&locker, name, name, &log)).collect();
    let from = cluster.log().len();
    until("the table is full", || cluster.log().has("out of shared memory", from)).await;
    for _ in 0..10 {
        assert!(lease.check().await);
    }
    assert_eq!(lease.reason(), None);
    sqlx::raw_sql("SELECT pg_advisory_unlock_all()").execute(&mut filler).await.unwrap();
    until("all lead", || log.lines().len() == 1 + names.len()).await;
    assert_eq!(log.count("kept end"), 0);
    for member in members {
        member.stop().await.unwrap();
    }
    let job = Key::of(Kind::Lease, "kept").get().to_string();
    let rows = cluster.admin().advisory_rows();
    assert!(rows.len() == 1 && rows[0][1] == job, "{rows:?}");
    kept.stop().await.unwrap();
    locker.close().await;
}
