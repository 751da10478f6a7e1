//! Fenced transactions: what is written under a lease is committed in its term, or not at all.

use std::time::Duration;

use leasehold::{Fenced, Key, Kind, Lease, LockError, Locker, State};
use sqlx::{AssertSqlSafe, Connection as _, PgConnection};

use crate::support::postgres::{Cluster, Database, PgBouncer, PoolMode};
use crate::support::{AT_ONCE, Log, Member, Stage, eventually, on_every_store, quick, sleepy, until};

pub(crate) async fn run(connection: &mut PgConnection, sql: impl Into<String>) -> Result<(), sqlx::Error> {
    sqlx::raw_sql(AssertSqlSafe(sql.into())).execute(connection).await.map(drop)
}

pub(crate) const WRITE: &str = "INSERT INTO written VALUES ('x')";

/// Writes, whatever comes of it, and tries to commit.
async fn write_and_commit(mut tx: sqlx::Transaction<'_, sqlx::Postgres>) {
    run(&mut tx, WRITE).await.ok();
    tx.commit().await.ok();
}

/// A database with a table to write to.
pub(crate) struct Table(pub(crate) Database);

impl Table {
    pub(crate) fn new() -> Self {
        let database = Database::new();
        database.admin().sql("CREATE TABLE written (what text)");
        Self(database)
    }

    pub(crate) fn locker(&self, who: &str) -> Locker {
        Locker::postgres(self.0.options(), quick(who)).unwrap()
    }

    pub(crate) fn written(&self) -> usize {
        self.0.admin().one("SELECT count(*) FROM written")
    }

    /// Advisory locks of all sorts, but for the markers of sessions.
    pub(crate) fn locks(&self) -> usize {
        let sql = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND classid <> 1818583411";
        self.0.admin().one(sql)
    }

    pub(crate) fn terminate_holder(&self, kind: Kind) {
        let admin = self.0.admin();
        admin.terminate(admin.holder(Key::of(kind, "job").get()).expect("somebody holds it"));
    }
}

/// T-02: it is committed while the lease is held. A term has one lock in the server besides its lease, which goes with it.
#[tokio::test]
async fn what_is_fenced_is_committed_in_its_term() {
    let (table, log) = (Table::new(), Log::default());
    let mut connection = table.0.connect().await;
    let mut member = Member::on(&table.locker("a"), "job", "a", &log);
    let lease = member.leads().await;
    for round in 1..=3 {
        assert_eq!(table.locks(), 2);
        let mut tx = connection.begin().await.unwrap();
        lease.fence(&mut tx).await.unwrap();
        assert_eq!(table.locks(), 3);
        write_and_commit(tx).await;
        assert_eq!(table.written(), round);
    }
    member.stop().await.unwrap();
    until("all is free", || table.locks() == 0).await;
}

/// T-02, T-04: whoever comes late can commit nothing, also where the error is ignored; in other languages too.
#[tokio::test]
async fn a_transaction_of_a_term_that_is_over_cannot_be_committed() {
    let (table, log) = (Table::new(), Log::default());
    let mut connection = table.0.connect().await;
    let mut earlier = Member::on(&table.locker("a"), "job", "a", &log);
    let lease = earlier.leads().await;
    let mut later = Member::on(&table.locker("b"), "job", "b", &log);
    later.stands_by().await;
    lease.step_down();
    let next = later.leads().await;
    let mut tx = connection.begin().await.unwrap();
    let fenced = lease.fence(&mut tx).await;
    assert!(matches!(fenced, Err(Fenced::Over)), "{fenced:?}");
    write_and_commit(tx).await;
    assert_eq!(table.written(), 0);
    run(&mut connection, "BEGIN").await.unwrap();
    let fenced = run(&mut connection, lease.fence_sql().unwrap()).await;
    assert!(fenced.unwrap_err().to_string().contains("leasehold: the term is over"));
    assert!(run(&mut connection, WRITE).await.is_err());
    run(&mut connection, "COMMIT").await.unwrap();
    assert_eq!(table.written(), 0);
    let mut tx = connection.begin().await.unwrap();
    next.fence(&mut tx).await.unwrap();
    write_and_commit(tx).await;
    assert_eq!(table.written(), 1);
    drop((earlier.stop().await, later.stop().await));
}

/// T-02, T-03: the next term begins when what the one before has fenced has ended, and not before; however that term ended.
#[tokio::test]
async fn the_next_term_waits_for_what_an_earlier_one_has_fenced() {
    for (is_killed, is_committed) in [(true, true), (true, false), (false, true)] {
        let (table, log) = (Table::new(), Log::default());
        let mut connection = table.0.connect().await;
        let mut earlier = Member::on(&table.locker("a"), "job", "a", &log);
        let lease = earlier.leads().await;
        let later = Member::on(&table.locker("b"), "job", "b", &log);
        later.stands_by().await;
        let mut tx = connection.begin().await.unwrap();
        lease.fence(&mut tx).await.unwrap();
        if is_killed {
            table.terminate_holder(Kind::Lease);
        } else {
            lease.step_down();
        }
        // After the loss the one that had it may be the quicker one.
        let members = [&earlier, &later];
        let waits = |member: &&&Member| member.locker.state("job") == State::Blocked;
        until("one of them waits for the transaction", || members.iter().any(|it| waits(&it))).await;
        // It has the lease already, and is seen to have it.
        assert!(table.0.admin().holder(Key::of(Kind::Lease, "job").get()).is_some());
        assert_eq!(log.count("a start") + log.count("b start"), 1);
        run(&mut tx, WRITE).await.unwrap();
        if is_committed {
            tx.commit().await.unwrap();
        } else {
            tx.rollback().await.unwrap();
        }
        until("the next one leads", || log.count("a start") + log.count("b start") == 2).await;
        assert_eq!(table.written(), usize::from(is_committed));
        drop((earlier.stop().await, later.stop().await));
    }
}

/// T-03: a transaction that nobody ends is ended by the server, after the limit or its own if that is less.
#[tokio::test]
async fn the_server_ends_a_fenced_transaction_that_is_left_idle() {
    let (table, log) = (Table::new(), Log::default());
    let limit = Duration::from_millis(300);
    let locker = Locker::postgres(table.0.options(), quick("a").fence_limit(Some(limit))).unwrap();
    let mut earlier = Member::on(&locker, "job", "a", &log);
    let lease = earlier.leads().await;
    let setting = "SHOW idle_in_transaction_session_timeout";
    for (own, expected) in [("0", "300ms"), ("1h", "300ms"), ("200ms", "200ms")] {
        let mut connection = table.0.connect().await;
        run(&mut connection, format!("SET idle_in_transaction_session_timeout = '{own}'")).await.unwrap();
        let mut tx = connection.begin().await.unwrap();
        lease.fence(&mut tx).await.unwrap();
        let in_force: String = sqlx::query_scalar(setting).fetch_one(&mut *tx).await.unwrap();
        assert_eq!(in_force, expected);
        tx.rollback().await.unwrap();
        let after: String = sqlx::query_scalar(setting).fetch_one(&mut connection).await.unwrap();
        assert_eq!(after, own);
    }
    let mut frozen = table.0.connect().await;
    let mut tx = frozen.begin().await.unwrap();
    lease.fence(&mut tx).await.unwrap();
    run(&mut tx, WRITE).await.unwrap();
    let later = Member::on(&table.locker("b"), "job", "b", &log);
    later.stands_by().await;
    table.terminate_holder(Kind::Lease);
    until("the next one leads", || log.count("a start") + log.count("b start") == 2).await;
    assert!(tx.commit().await.is_err());
    assert_eq!(table.written(), 0);
    drop((earlier.stop().await, later.stop().await));
}

/// T-03: a prepared transaction keeps its fence, and has no server process.
#[tokio::test]
async fn a_prepared_transaction_delays_the_next_term() {
    let cluster = Cluster::with(crate::support::postgres::Login::Trust, &["max_prepared_transactions=2"]);
    let log = Log::default();
    let mut connection = cluster.connect().await;
    run(&mut connection, "CREATE TABLE written (what text)").await.unwrap();
    let locker = |who| Locker::postgres(cluster.options(), quick(who)).unwrap();
    let mut earlier = Member::on(&locker("a"), "job", "a", &log);
    let lease = earlier.leads().await;
    let mut later = Member::on(&locker("b"), "job", "b", &log);
    later.stands_by().await;
    run(&mut connection, "BEGIN").await.unwrap();
    lease.fence(&mut connection).await.unwrap();
    run(&mut connection, WRITE).await.unwrap();
    run(&mut connection, "PREPARE TRANSACTION 'left over'").await.unwrap();
    lease.step_down();
    until("b waits for it", || later.locker.state("job") == State::Blocked).await;
    let waiting = later.locker.lock("other").fenced().try_lock().await.unwrap();
    assert!(waiting.is_some(), "other names are not concerned");
    assert_eq!(log.count("b start"), 0);
    run(&mut connection, "COMMIT PREPARED 'left over'").await.unwrap();
    later.leads().await;
    drop((earlier.stop().await, later.stop().await));
}

/// T-06: outside of a transaction, in a nested one, on another database, on a replica. The transaction is aborted then.
#[tokio::test]
async fn a_fence_that_would_protect_nothing_is_refused() {
    let cluster = Cluster::new();
    let replica = Cluster::standby_of(&cluster);
    cluster.admin().sql("CREATE DATABASE other");
    let log = Log::default();
    let locker = Locker::postgres(cluster.options(), quick("a")).unwrap();
    let mut member = Member::on(&locker, "job", "a", &log);
    let lease = member.leads().await;
    let mut connection = cluster.connect().await;
    run(&mut connection, "CREATE TABLE written (what text)").await.unwrap();

    let fenced = lease.fence(&mut connection).await;
    assert!(matches!(fenced, Err(Fenced::NoTransaction)), "{fenced:?}");
    let fenced = run(&mut connection, lease.fence_sql().unwrap()).await;
    assert!(fenced.unwrap_err().to_string().contains("needs a transaction"));
    // As one message, which is a transaction of its own.
    let fenced = run(&mut connection, format!("{};{WRITE}", lease.fence_sql().unwrap())).await;
    assert!(fenced.unwrap_err().to_string().contains("needs a transaction"));

    let mut outer = connection.begin().await.unwrap();
    let mut nested = outer.begin().await.unwrap();
    let fenced = lease.fence(&mut nested).await;
    assert!(matches!(fenced, Err(Fenced::Nested)), "{fenced:?}");
    write_and_commit(nested).await;
    outer.commit().await.ok();
    assert_eq!(cluster.admin().one::<usize>("SELECT count(*) FROM written"), 0);

    let mut other = PgConnection::connect_with(&cluster.options().database("other")).await.unwrap();
    run(&mut other, "CREATE TABLE written (what text)").await.unwrap();
    let mut tx = other.begin().await.unwrap();
    let fenced = lease.fence(&mut tx).await;
    assert!(matches!(fenced, Err(Fenced::OtherDatabase)), "{fenced:?}");
    write_and_commit(tx).await;
    let count: i64 = sqlx::query_scalar("SELECT count(*) FROM written").fetch_one(&mut other).await.unwrap();
    assert_eq!(count, 0);

    // Another server, which is a copy: nothing tells it from the server of the lease but that nobody holds it there.
    let elsewhere = Cluster::new();
    let mut elsewhere = elsewhere.connect().await;
    let mut tx = elsewhere.begin().await.unwrap();
    let fenced = lease.fence(&mut tx).await;
    assert!(matches!(fenced, Err(Fenced::Over)), "{fenced:?}");
    drop(tx);

    let mut read = replica.connect().await;
    let mut tx = read.begin().await.unwrap();
    let fenced = lease.fence(&mut tx).await;
    assert!(matches!(fenced, Err(Fenced::Replica)), "{fenced:?}");
    drop(tx);
    member.stop().await.unwrap();
}

/// T-06, documented: a savepoint that is rolled back takes along a fence that came after it, and the transaction that a
/// chained commit begins has none.
#[tokio::test]
async fn a_fence_ends_with_its_savepoint_and_is_not_chained() {
    let (table, log) = (Table::new(), Log::default());
    let mut connection = table.0.connect().await;
    let mut member = Member::on(&table.locker("a"), "job", "a", &log);
    let lease = member.leads().await;
    run(&mut connection, "BEGIN").await.unwrap();
    lease.fence(&mut connection).await.unwrap();
    // One that came before stays.
    run(&mut connection, "SAVEPOINT later").await.unwrap();
    run(&mut connection, "ROLLBACK TO later").await.unwrap();
    assert_eq!(table.locks(), 3);
    run(&mut connection, "COMMIT AND CHAIN").await.unwrap();
    assert_eq!(table.locks(), 2);
    lease.fence(&mut connection).await.unwrap();
    assert_eq!(table.locks(), 3);
    run(&mut connection, "ROLLBACK").await.unwrap();
    run(&mut connection, "BEGIN").await.unwrap();
    run(&mut connection, "SAVEPOINT unknown").await.unwrap();
    // Made by hand: nobody can see it.
    lease.fence(&mut connection).await.unwrap();
    run(&mut connection, "ROLLBACK TO unknown").await.unwrap();
    assert_eq!(table.locks(), 2);
    member.stop().await.unwrap();
}

/// What the guide on poolers says of connections through one: no statement of theirs has a name.
async fn through(pooler: &PgBouncer) -> PgConnection {
    PgConnection::connect_with(&pooler.options().statement_cache_capacity(0)).await.unwrap()
}

/// As the guide says to write a query there.
async fn write_through(tx: &mut PgConnection, what: &str) -> Result<(), sqlx::Error> {
    let insert = sqlx::query("INSERT INTO written VALUES ($1)").bind(what);
    insert.persistent(false).execute(tx).await.map(drop)
}

/// T-02: the fence is the same through a pooler in transaction mode, on whatever server connection it comes by; also where
/// another client has used that one before, in the same way.
#[tokio::test]
async fn a_fence_works_through_a_transaction_pooler() {
    for connections in [1, 2] {
        let cluster = Cluster::new();
        cluster.admin().sql("CREATE TABLE written (what text)");
        let pooler = PgBouncer::new(&cluster, PoolMode::Transaction, connections);
        let log = Log::default();
        let locker = |options| Locker::postgres(cluster.options(), options).unwrap();
        // When it has stepped down it does not ask again before the other one has been woken.
        let mut earlier = Member::on(&locker(sleepy("a")), "job", "a", &log);
        let lease = earlier.leads().await;
        let mut later = Member::on(&locker(quick("b")), "job", "b", &log);
        later.stands_by().await;
        let mut clients = [through(&pooler).await, through(&pooler).await];
        for client in &mut clients {
            let mut tx = client.begin().await.unwrap();
            lease.fence(&mut tx).await.unwrap();
            write_through(&mut tx, "in turn").await.unwrap();
            tx.commit().await.unwrap();
        }
        let [mut one, mut other] = clients;
        let mut tx = one.begin().await.unwrap();
        lease.fence(&mut tx).await.unwrap();
        lease.step_down();
        let states = || (earlier.locker.state("job"), later.locker.state("job"));
        eventually("b waits for it", states, |(_, of_later)| *of_later == State::Blocked).await;
        write_through(&mut tx, "at last").await.unwrap();
        tx.commit().await.unwrap();
        let next = later.leads().await;
        let mut tx = one.begin().await.unwrap();
        assert!(matches!(lease.fence(&mut tx).await, Err(Fenced::Over)));
        write_through(&mut tx, "too late").await.unwrap_err();
        tx.commit().await.ok();
        let mut tx = other.begin().await.unwrap();
        next.fence(&mut tx).await.unwrap();
        write_through(&mut tx, "in the next term").await.unwrap();
        tx.commit().await.unwrap();
        let written = cluster.admin().sql("SELECT what FROM written");
        assert_eq!(written.concat(), ["in turn", "in turn", "at last", "in the next term"], "{connections}");
        drop((earlier.stop().await, later.stop().await));
    }
}

/// T-06: a store without transactions says so at once, and so does a lock that was not asked to fence.
#[tokio::test]
async fn a_lease_that_cannot_fence_says_so() {
    let table = Table::new();
    on_every_store(async |stage: &Stage| {
        let mut connection = table.0.connect().await;
        let locker = stage.locker(quick("a"));
        let is_postgres = matches!(stage, Stage::Postgres(_));
        let guard = locker.lock("job").lock().await.unwrap();
        assert!(matches!(guard.fence_sql(), Err(Fenced::NotFenced)));
        guard.release().await.unwrap();
        let guard = locker.lock("job").fenced().lock().await.unwrap();
        match guard.fence_sql() {
            Ok(_) if is_postgres => {}
            Err(Fenced::Unsupported) if !is_postgres => {
                let mut tx = connection.begin().await.unwrap();
                assert!(matches!(guard.fence(&mut tx).await, Err(Fenced::Unsupported)));
                write_and_commit(tx).await;
            }
            other => panic!("{}: {other:?}", stage.kind()),
        }
        guard.release().await.unwrap();
        locker.close().await;
    })
    .await;
    assert_eq!(table.written(), 0);
}

/// T-02: a lock that fences is not had by the next one before what is fenced has ended: tried, it is taken; waited for, the
/// error names who is in the way.
#[tokio::test]
async fn a_fenced_lock_waits_for_what_an_earlier_holder_has_fenced() {
    let table = Table::new();
    let mut connection = table.0.connect().await;
    let (one, two) = (table.locker("a").lock("job").fenced(), table.locker("b").lock("job").fenced());
    let guard = one.lock().await.unwrap();
    run(&mut connection, "SET application_name = 'biller'").await.unwrap();
    let mut tx = connection.begin().await.unwrap();
    guard.fence(&mut tx).await.unwrap();
    run(&mut tx, WRITE).await.unwrap();
    guard.release().await.unwrap();
    for lock in [&one, &two] {
        assert!(lock.try_lock().await.unwrap().is_none());
        until("nothing is left of the attempt", || table.locks() == 1).await;
        let waited = lock.lock_timeout(Duration::from_millis(400)).await;
        let Err(LockError::Timeout { holder, .. }) = waited else { panic!("{waited:?}") };
        assert!(holder.as_ref().is_some_and(|it| it.contains("biller")), "{holder:?}");
        until("nothing is left of the wait", || table.locks() == 1).await;
    }
    let waits = tokio::spawn(async move { two.lock().await.unwrap() });
    until("it has the lock, and waits", || table.locks() == 2).await;
    tx.commit().await.unwrap();
    let guard = tokio::time::timeout(AT_ONCE, waits).await.unwrap().unwrap();
    assert!(guard.fencing_token().await.is_ok());
    assert_eq!(table.written(), 1);
    guard.release().await.unwrap();
    until("all is free", || table.locks() == 0).await;
}

/// T-02: readers wait for what writers have fenced, and writers for both; readers do not wait for each other.
#[tokio::test]
async fn readers_and_writers_wait_for_what_the_others_have_fenced() {
    let table = Table::new();
    let (one, two) = (table.locker("a").rw_lock("job").fenced(), table.locker("b").rw_lock("job").fenced());
    let mut connections = [table.0.connect().await, table.0.connect().await];
    let [first, second] = &mut connections;

    let guard = one.write().await.unwrap();
    let mut tx = first.begin().await.unwrap();
    guard.fence(&mut tx).await.unwrap();
    guard.release().await.unwrap();
    assert!(two.try_read().await.unwrap().is_none());
    assert!(two.try_write().await.unwrap().is_none());
    tx.commit().await.unwrap();

    let reads = one.read().await.unwrap();
    assert!(reads.fencing_token().await.is_err());
    let mut tx = first.begin().await.unwrap();
    reads.fence(&mut tx).await.unwrap();
    reads.release().await.unwrap();
    // Of the same session and of another one, together.
    let (also, too) = (one.read().await.unwrap(), two.read().await.unwrap());
    let mut other = second.begin().await.unwrap();
    too.fence(&mut other).await.unwrap();
    other.commit().await.unwrap();
    also.release().await.unwrap();
    too.release().await.unwrap();
    assert!(two.try_write().await.unwrap().is_none());
    tx.commit().await.unwrap();
    let guard = two.write().await.unwrap();
    let mut tx = first.begin().await.unwrap();
    assert!(guard.fence(&mut tx).await.is_ok());
    drop(tx);
    guard.release().await.unwrap();
    until("all is free", || table.locks() == 0).await;
}

/// T-02: readers of one session share one lock and one term; one that did not ask to fence stays as it is.
#[tokio::test]
async fn readers_of_one_session_are_fenced_together() {
    let table = Table::new();
    let locker = table.locker("a");
    let lock = locker.rw_lock("job");
    let mut connection = table.0.connect().await;
    let plain = lock.read().await.unwrap();
    let (one, two) = (lock.clone().fenced(), lock.clone().fenced());
    let (one, two) = tokio::join!(one.read(), two.read());
    let (one, two) = (one.unwrap(), two.unwrap());
    assert!(matches!(plain.fence_sql(), Err(Fenced::NotFenced)));
    assert_eq!(one.fence_sql().unwrap(), two.fence_sql().unwrap());
    one.release().await.unwrap();
    let mut tx = connection.begin().await.unwrap();
    two.fence(&mut tx).await.unwrap();
    tx.commit().await.unwrap();
    two.release().await.unwrap();
    plain.release().await.unwrap();
    until("all is free", || table.locks() == 0).await;
    locker.close().await;
}

/// T-02: fences of different leases do not concern each other, whatever they are of; keys of others neither.
#[tokio::test]
async fn a_fence_concerns_its_own_name_alone() {
    let table = Table::new();
    let (one, two) = (table.locker("a"), table.locker("b"));
    let mut connection = table.0.connect().await;
    let names = [leasehold::Name::from("job"), leasehold::Name::key(7), leasehold::Name::key_pair(7, 8)];
    for name in &names {
        let guard = one.lock(name).fenced().lock().await.unwrap();
        let mut tx = connection.begin().await.unwrap();
        guard.fence(&mut tx).await.unwrap();
        guard.release().await.unwrap();
        for other in &names {
            let entered = two.lock(other).fenced().try_lock().await.unwrap();
            assert_eq!(entered.is_none(), other == name, "{name}: {other}");
        }
        // Whoever does not ask to fence does not wait.
        assert!(two.lock(name).try_lock().await.unwrap().is_some());
        tx.rollback().await.unwrap();
    }
    let lease: Lease = one.lock("job").fenced().lock().await.unwrap().lease().clone();
    let fenced: &dyn Send = &lease.fence(&mut connection);
    let _ = fenced;
}

/// T-02, T-04, T-06: on a connection that keeps prepared statements the fence is one of them, and tells the same.
#[tokio::test]
async fn a_connection_that_keeps_statements_keeps_the_fence() {
    let (table, log) = (Table::new(), Log::default());
    let mut connection = table.0.connect().await;
    sqlx::query("SELECT 1").execute(&mut connection).await.unwrap();
    let mut member = Member::on(&table.locker("a"), "job", "a", &log);
    let lease = member.leads().await;
    for round in 1..=7 {
        // More often than the server plans a statement anew.
        run(&mut connection, "BEGIN").await.unwrap();
        lease.fence(&mut connection).await.unwrap();
        run(&mut connection, "COMMIT").await.unwrap();
        let fenced = lease.fence(&mut connection).await;
        assert!(matches!(fenced, Err(Fenced::NoTransaction)), "{fenced:?}");
        let mut tx = connection.begin().await.unwrap();
        lease.fence(&mut tx).await.unwrap();
        assert_eq!(table.locks(), 3);
        write_and_commit(tx).await;
        assert_eq!((table.written(), table.locks()), (round, 2));
    }
    let kept =
        "SELECT count(*) FROM pg_prepared_statements WHERE statement LIKE '%leasehold' || ': the term%'";
    let kept: i64 = sqlx::query_scalar(kept).fetch_one(&mut connection).await.unwrap();
    assert_eq!(kept, 1);
    let setting = "SHOW idle_in_transaction_session_timeout";
    let in_force: String = sqlx::query_scalar(setting).fetch_one(&mut connection).await.unwrap();
    assert_eq!(in_force, "0");
    member.stop().await.unwrap();
    let mut tx = connection.begin().await.unwrap();
    assert!(matches!(lease.fence(&mut tx).await, Err(Fenced::Over)));
    write_and_commit(tx).await;
    assert_eq!(table.written(), 7);
    table.0.admin().sql("CREATE DATABASE other");
    let mut other = PgConnection::connect_with(&table.0.options().database("other")).await.unwrap();
    sqlx::query("SELECT 1").execute(&mut other).await.unwrap();
    let mut tx = other.begin().await.unwrap();
    assert!(matches!(lease.fence(&mut tx).await, Err(Fenced::OtherDatabase)));
    drop(tx);
    other.close().await.unwrap();
}

/// T-06: where a role may not ask which cluster it is, neither for the lease nor for the transaction, all else is as before.
#[tokio::test]
async fn a_role_that_may_not_ask_for_the_cluster_leads_and_fences() {
    let cluster = Cluster::new();
    let admin = cluster.admin();
    admin.sql("CREATE ROLE plain LOGIN; REVOKE EXECUTE ON FUNCTION pg_control_system() FROM PUBLIC");
    let plain = cluster.options().username("plain");
    let log = Log::default();
    for (who, options) in [("plain", plain.clone()), ("super", cluster.options())] {
        let locker = Locker::postgres(options, quick(who)).unwrap();
        let mut member = Member::on(&locker, "job", who, &log);
        let lease = member.leads().await;
        let mut connection = PgConnection::connect_with(&plain).await.unwrap();
        // First as one message, then prepared, more often than the server plans a statement anew.
        for _ in 0..8 {
            let mut tx = connection.begin().await.unwrap();
            lease.fence(&mut tx).await.unwrap();
            sqlx::query("SELECT 1").execute(&mut *tx).await.unwrap();
            tx.commit().await.unwrap();
        }
        member.stop().await.unwrap();
        let mut tx = connection.begin().await.unwrap();
        let fenced = lease.fence(&mut tx).await;
        assert!(matches!(fenced, Err(Fenced::Over)), "{fenced:?}");
    }
}

/// T-02: types and operators of the same names, which come first where the transaction is, do not undo a fence.
#[tokio::test]
async fn a_fence_takes_nothing_from_the_search_path() {
    let cluster = Cluster::new();
    let log = Log::default();
    let locker = Locker::postgres(cluster.options(), quick("a")).unwrap();
    let mut member = Member::on(&locker, "job", "a", &log);
    let lease = member.leads().await;
    let mut connection = cluster.connect().await;
    run(
        &mut connection,
        "CREATE SCHEMA evil; \
         CREATE FUNCTION evil.no(timestamptz, timestamptz) RETURNS bool LANGUAGE sql AS 'SELECT false'; \
         CREATE OPERATOR evil.= (FUNCTION = evil.no, LEFTARG = timestamptz, RIGHTARG = timestamptz); \
         CREATE TEMP TABLE text (a int); CREATE DOMAIN pg_temp.int4 AS pg_catalog.int8; \
         CREATE DOMAIN pg_temp.int8 AS pg_catalog.int4; SET search_path = evil, pg_catalog",
    )
    .await
    .unwrap();
    let fenced = lease.fence(&mut connection).await;
    assert!(matches!(fenced, Err(Fenced::NoTransaction)), "{fenced:?}");
    for _ in 0..2 {
        let mut tx = connection.begin().await.unwrap();
        lease.fence(&mut tx).await.unwrap();
        sqlx::query("SELECT 1").execute(&mut *tx).await.unwrap();
        tx.commit().await.unwrap();
    }
    member.stop().await.unwrap();
}
