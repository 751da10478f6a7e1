//! Locks of a transaction: on the caller's own connection, through a pooler in transaction mode too.

use std::error::Error as _;
use std::time::Duration;

use leasehold::postgres::{XactLockError, try_xact_lock, xact_lock};
use leasehold::{Key, Kind, Name, NameError, Scope, State};
use sqlx::{AssertSqlSafe, Connection as _, PgConnection, Row as _};
use tokio::task::JoinSet;

use crate::postgres_poolers::{assert_nothing_is_left, untouched};
use crate::support::postgres::{Cluster, Database, PgBouncer, PoolMode};
use crate::support::{Log, Member, Stage, quick, until};

const INVOICES: Scope<u64> = Scope::new("invoice");

fn is_database(error: &XactLockError) -> bool {
    matches!(error, XactLockError::Database(_))
        && error.source().is_some_and(<dyn std::error::Error>::is::<sqlx::Error>)
}

async fn ask(connection: &mut PgConnection, sql: String) -> bool {
    sqlx::raw_sql(AssertSqlSafe(sql)).fetch_one(connection).await.unwrap().get(0)
}

/// Advisory locks of both lock spaces, but for the markers of sessions.
fn locks(database: &Database) -> usize {
    let sql = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND classid <> 1818583411";
    database.admin().one(sql)
}

/// L-18: whatever sort of name it is.
#[tokio::test]
async fn a_lock_is_released_at_commit_and_at_rollback() {
    let database = Database::new();
    let (mut one, mut two) = (database.connect().await, database.connect().await);
    let names = [
        Name::from("job"),
        INVOICES.name(&42),
        Name::key(42),
        Name::key_pair(-1, 2),
        Name::autumn("nightly-cleanup"),
    ];
    for name in &names {
        for end in ["commit", "rollback", "drop"] {
            let mut tx = one.begin().await.unwrap();
            assert!(try_xact_lock(&mut tx, name).await.unwrap(), "{name}, {end}");
            assert!(try_xact_lock(&mut tx, name).await.unwrap(), "{name}, {end}: it has it already");
            assert_eq!(locks(&database), 1);
            let mut other = two.begin().await.unwrap();
            assert!(!try_xact_lock(&mut other, name).await.unwrap(), "{name}, {end}");
            match end {
                "commit" => tx.commit().await.unwrap(),
                "rollback" => tx.rollback().await.unwrap(),
                _ => {
                    drop(tx);
                    one.ping().await.unwrap();
                }
            }
            xact_lock(&mut other, name).await.unwrap();
            assert_eq!(locks(&database), 1);
            other.commit().await.unwrap();
            assert_eq!(locks(&database), 0);
        }
    }
    let mut tx = one.begin().await.unwrap();
    for name in &names {
        xact_lock(&mut tx, name).await.unwrap();
    }
    assert_eq!(locks(&database), names.len(), "they do not contend with each other");
    tx.commit().await.unwrap();
}

/// L-18: it is the lock of the critical section of that name, and of no other kind.
#[tokio::test]
async fn a_lock_of_a_transaction_excludes_one_of_a_session() {
    let database = Database::new();
    let (mut one, mut two) = (database.connect().await, database.connect().await);
    let name = INVOICES.name(&42);
    for (kind, contends) in [(Kind::Lock, true), (Kind::Lease, false), (Kind::RwLock, false)] {
        let key = Key::of(kind, &name).get();
        assert!(ask(&mut one, format!("SELECT pg_try_advisory_lock({key})")).await);
        let mut tx = two.begin().await.unwrap();
        assert_eq!(try_xact_lock(&mut tx, &name).await.unwrap(), !contends, "{kind:?}");
        assert!(ask(&mut one, format!("SELECT pg_advisory_unlock({key})")).await);
        xact_lock(&mut tx, &name).await.unwrap();
        assert_eq!(
            ask(&mut one, format!("SELECT pg_try_advisory_xact_lock({key})")).await,
            !contends,
            "{kind:?}"
        );
        tx.rollback().await.unwrap();
    }
}

/// L-18, L-19: a raw key is the same whatever the verb, so a transaction and a leader exclude each other by it.
#[tokio::test]
async fn a_transaction_and_a_leader_of_one_key_exclude_each_other() {
    let (stage, log) = (Stage::postgres(), Log::default());
    let Stage::Postgres(postgres) = &stage else { unreachable!("it is PostgreSQL") };
    let mut connection = postgres.database.connect().await;
    for name in [Name::key(42), Name::key_pair(1, 2)] {
        let mut tx = connection.begin().await.unwrap();
        xact_lock(&mut tx, &name).await.unwrap();
        let mut leader = Member::join(&stage, quick("a"), &name, &log);
        leader.stands_by().await;
        assert_eq!(leader.locker.state(&name), State::Standby);
        tx.commit().await.unwrap();
        let lease = leader.leads().await;
        let mut tx = connection.begin().await.unwrap();
        assert!(!try_xact_lock(&mut tx, &name).await.unwrap());
        assert!(lease.check().await);
        leader.stop().await.unwrap();
        xact_lock(&mut tx, &name).await.unwrap();
        tx.commit().await.unwrap();
    }
}

/// L-18: it would be gone at once, and nobody would know. Directly and through a pooler; also where the client library
/// still believes that there is a transaction.
#[tokio::test]
async fn it_is_refused_outside_of_a_transaction() {
    let cluster = Cluster::new();
    let bouncer = PgBouncer::new(&cluster, PoolMode::Transaction, 2);
    for target in [cluster.options(), bouncer.options()] {
        let mut connection = PgConnection::connect_with(&target).await.unwrap();
        for _ in 0..100 {
            let error = try_xact_lock(&mut connection, "job").await.unwrap_err();
            assert!(matches!(error, XactLockError::NoTransaction), "{error:?}");
        }
        let error = xact_lock(&mut connection, Name::key_pair(1, 2)).await.unwrap_err();
        assert!(error.to_string().contains("begin()"), "{error}");
        drop(connection.begin().await.unwrap());
        let error = try_xact_lock(&mut connection, "job").await.unwrap_err();
        assert!(matches!(error, XactLockError::NoTransaction), "{error:?}");
        for _ in 0..100 {
            let mut tx = connection.begin().await.unwrap();
            assert!(try_xact_lock(&mut tx, "job").await.unwrap());
            tx.commit().await.unwrap();
        }
        // By hand, and more than one statement in its first message.
        sqlx::raw_sql("BEGIN; SET LOCAL lock_timeout = '1s'; SELECT 1")
            .execute(&mut connection)
            .await
            .unwrap();
        assert!(try_xact_lock(&mut connection, "job").await.unwrap());
        sqlx::raw_sql("COMMIT").execute(&mut connection).await.unwrap();
        connection.close().await.unwrap();
    }
}

/// L-18
#[tokio::test]
async fn what_cannot_be_locked_is_a_typed_error() {
    let primary = Cluster::new();
    let standby = Cluster::standby_of(&primary);
    let mut connection = primary.connect().await;
    let mut tx = connection.begin().await.unwrap();
    let error = try_xact_lock(&mut tx, "").await.unwrap_err();
    assert!(matches!(error, XactLockError::Name(NameError::Empty)), "{error:?}");
    let error = xact_lock(&mut tx, Name::key_pair(1_818_583_411, 1)).await.unwrap_err();
    assert!(matches!(error, XactLockError::Name(NameError::Reserved { .. })), "{error:?}");
    assert!(
        try_xact_lock(&mut tx, "job").await.unwrap(),
        "a name that is refused is no error of the transaction"
    );
    sqlx::raw_sql("SELECT 1 / 0").execute(&mut *tx).await.unwrap_err();
    let error = try_xact_lock(&mut tx, "job").await.unwrap_err();
    assert!(is_database(&error), "the transaction was over: {error:?}");
    tx.rollback().await.unwrap();

    let mut replica = PgConnection::connect_with(&standby.options()).await.unwrap();
    let mut tx = replica.begin().await.unwrap();
    let error = try_xact_lock(&mut tx, "job").await.unwrap_err();
    assert!(matches!(error, XactLockError::Replica), "{error:?}");
    tx.rollback().await.unwrap();
    assert!(standby.admin().advisory_rows().is_empty());
}

/// L-18, D02: with fewer server connections than clients; nobody is in the section beside another, everybody gets
/// through, and nothing is left on any connection of the pool.
#[tokio::test]
async fn sections_exclude_each_other_through_a_transaction_pooler() {
    const CLIENTS: usize = 4;
    const ROUNDS: usize = 10;
    let cluster = Cluster::new();
    let untouched = untouched(&cluster).await;
    cluster.admin().sql("CREATE TABLE counter AS SELECT 0 AS n");
    for connections in [1, 2, 3] {
        let bouncer = PgBouncer::new(&cluster, PoolMode::Transaction, connections);
        let (log, mut clients) = (Log::default(), JoinSet::new());
        for client in 0..CLIENTS {
            let (through, log) = (bouncer.options().statement_cache_capacity(0), log.clone());
            clients.spawn(async move {
                let mut connection = PgConnection::connect_with(&through).await.unwrap();
                for _ in 0..ROUNDS {
                    let mut tx = connection.begin().await.unwrap();
                    xact_lock(&mut tx, INVOICES.name(&42)).await.unwrap();
                    let body = log.body(&client.to_string());
                    // As the guide on poolers says to write queries there.
                    let read = sqlx::query_scalar("SELECT n FROM counter").persistent(false);
                    let n: i32 = read.fetch_one(&mut *tx).await.unwrap();
                    let write = sqlx::query("UPDATE counter SET n = $1").bind(n + 1).persistent(false);
                    write.execute(&mut *tx).await.unwrap();
                    drop(body);
                    tx.commit().await.unwrap();
                }
                connection.close().await.ok();
            });
        }
        clients.join_all().await;
        assert_eq!(log.assert_one_at_a_time(), CLIENTS * ROUNDS);
        assert_nothing_is_left(&cluster, &bouncer, connections, &untouched).await;
    }
    assert_eq!(cluster.admin().one::<usize>("SELECT n FROM counter"), 3 * CLIENTS * ROUNDS);
}

/// L-18, D17: no statement waits in the server, and no snapshot is held, so an index is built beside who waits.
#[tokio::test]
async fn who_waits_holds_no_snapshot() {
    let database = Database::new();
    database.admin().sql("CREATE TABLE things (n int)");
    let (mut one, mut two) = (database.connect().await, database.connect().await);
    let mut held = one.begin().await.unwrap();
    xact_lock(&mut held, "job").await.unwrap();
    let waiting = tokio::spawn(async move {
        let mut tx = two.begin().await.unwrap();
        xact_lock(&mut tx, "job").await.unwrap();
        tx.commit().await.unwrap();
        two.close().await.unwrap();
    });
    let asks = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%pg_try_advisory_xact_lock%' \
                AND state = 'idle in transaction' AND backend_xmin IS NULL AND pid <> pg_backend_pid()";
    until("both are idle in their transactions", || database.admin().one::<i32>(asks) == 2).await;
    database.admin().sql("CREATE INDEX CONCURRENTLY things_n ON things (n)");
    assert!(!waiting.is_finished());
    held.commit().await.unwrap();
    waiting.await.unwrap();
}

/// L-18: at any instant. The connection can be used on, and the transaction's end leaves nothing.
#[tokio::test]
async fn a_wait_that_is_cancelled_leaves_a_transaction_that_can_be_used() {
    let database = Database::new();
    let (mut one, mut two) = (database.connect().await, database.connect().await);
    // Where it is free, the cancellation races the grant.
    for is_held in [true, false] {
        let mut holder = one.begin().await.unwrap();
        if is_held {
            xact_lock(&mut holder, "job").await.unwrap();
        }
        for round in 0..100_u64 {
            let mut tx = two.begin().await.unwrap();
            let limit = Duration::from_micros(round * if is_held { 200 } else { 20 });
            let waited = tokio::time::timeout(limit, xact_lock(&mut tx, "job")).await;
            assert!(!is_held || waited.is_err(), "{waited:?}");
            let n: i32 = sqlx::query("SELECT $1").bind(7).fetch_one(&mut *tx).await.unwrap().get(0);
            assert_eq!(n, 7);
            tx.commit().await.unwrap();
            assert_eq!(locks(&database), usize::from(is_held), "round {round}");
        }
        holder.commit().await.unwrap();
    }
}

/// L-18: what the documentation says of isolation levels and savepoints.
#[tokio::test]
async fn what_the_documentation_says_of_transactions_is_so() {
    let database = Database::new();
    database.admin().sql("CREATE TABLE counter AS SELECT 0 AS n");
    let (mut one, mut two) = (database.connect().await, database.connect().await);
    for (level, sees) in [("READ COMMITTED", 1), ("REPEATABLE READ", 0), ("SERIALIZABLE", 0)] {
        database.admin().sql("UPDATE counter SET n = 0");
        let mut held = one.begin().await.unwrap();
        xact_lock(&mut held, "job").await.unwrap();
        let begin = AssertSqlSafe(format!("BEGIN ISOLATION LEVEL {level}"));
        let mut tx = two.begin_with(begin).await.unwrap();
        assert!(!try_xact_lock(&mut tx, "job").await.unwrap());
        sqlx::raw_sql("UPDATE counter SET n = 1").execute(&mut *held).await.unwrap();
        held.commit().await.unwrap();
        xact_lock(&mut tx, "job").await.unwrap();
        let n: i32 = sqlx::raw_sql("SELECT n FROM counter").fetch_one(&mut *tx).await.unwrap().get(0);
        assert_eq!(n, sees, "{level}");
        tx.rollback().await.unwrap();
    }
    let mut tx = one.begin().await.unwrap();
    let mut nested = tx.begin().await.unwrap();
    xact_lock(&mut nested, "job").await.unwrap();
    nested.rollback().await.unwrap();
    let mut other = two.begin().await.unwrap();
    assert!(try_xact_lock(&mut other, "job").await.unwrap());
    other.rollback().await.unwrap();
    tx.rollback().await.unwrap();
}
