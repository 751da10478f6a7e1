//! A pooler that shares server connections between statements is refused, and nothing is left on any of them; one that
//! keeps a connection for its client works.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::time::Duration;

use leasehold::{ConnectError, Error, Lease, Locker, Options, RunError, Sabotage};
use sqlx::{AssertSqlSafe, Connection as _, PgConnection, Row as _};
use tokio::task::JoinSet;

use crate::support::member::over;
use crate::support::postgres::{Cluster, Login, PgBouncer, PoolMode};
use crate::support::{AT_ONCE, Log, Member, eventually, now, pass, quick, until};

/// So long that a machine that is busy with other tests does not come into play.
fn patient(who: &str) -> Options {
    quick(who).query_timeout(Duration::from_secs(10))
}

/// All that a client could leave on a server connection; it keeps the connection busy for a while.
const LEFT: &str = "SELECT pg_backend_pid(), (SELECT string_agg(name || '=' || setting, E'\\n' ORDER BY name) \
    FROM pg_settings) || E'\\n' || (SELECT count(*) FROM pg_listening_channels()) || ' channels, ' || \
    (SELECT count(*) FROM pg_prepared_statements) || ' prepared statements, ' || \
    (SELECT count(*) FROM pg_cursors) || ' cursors, ' || \
    (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory') || ' locks', pg_sleep(0.05)::text";

/// What is on each of the server connections of a pool: process and state.
async fn inspect(bouncer: &PgBouncer, connections: usize) -> BTreeMap<i32, String> {
    let (mut found, since) = (BTreeMap::new(), now());
    // As many clients as connections are served by all of them, as soon as the pool has them all.
    while found.len() < connections {
        assert!(since.elapsed() < 5 * AT_ONCE, "of {connections} connections {:?} are used", found.keys());
        let mut clients = JoinSet::new();
        for _ in 0..connections {
            let through = bouncer.options();
            clients.spawn(async move {
                let mut client = PgConnection::connect_with(&through).await.unwrap();
                let rows = sqlx::raw_sql(LEFT).fetch_all(&mut client).await.unwrap();
                client.close().await.ok();
                (rows[0].get(0), rows[0].get(1))
            });
        }
        found.extend(clients.join_all().await);
    }
    found
}

/// What is on a server connection that nothing was left on.
pub(crate) async fn untouched(cluster: &Cluster) -> String {
    let bouncer = PgBouncer::with(cluster, PoolMode::Transaction, 1, "");
    let state = inspect(&bouncer, 1).await.into_values().next().unwrap();
    assert!(state.ends_with("0 channels, 0 prepared statements, 0 cursors, 0 locks"), "{state}");
    state
}

/// Asserts that no server connection of a pool differs from one that nothing was left on.
pub(crate) async fn assert_nothing_is_left(
    cluster: &Cluster,
    bouncer: &PgBouncer,
    connections: u32,
    untouched: &str,
) {
    for state in inspect(bouncer, connections as usize).await.values() {
        let left: Vec<_> =
            state.lines().zip(untouched.lines()).filter(|(found, clean)| found != clean).collect();
        assert!(left.is_empty() && state.len() == untouched.len(), "{left:?}");
    }
    assert!(cluster.admin().backends("leasehold/%").is_empty());
    assert!(cluster.admin().advisory_rows().is_empty());
}

fn is_pooler(error: &ConnectError) -> bool {
    assert!(error.to_string().contains("pool_mode = session"), "{error}");
    matches!(error, ConnectError::Pooler { .. }) && error.is_permanent()
}

/// Connects through the pooler, which must be refused each time, and gives how long that took at most.
async fn assert_refused(bouncer: &PgBouncer, times: usize, what: &str) -> Duration {
    let mut longest = Duration::ZERO;
    for n in 0..times {
        let since = now();
        match Locker::connect(&bouncer.url(), patient("one")).await {
            Err(Error::Connect(error)) => assert!(is_pooler(&error), "{what}, {n}: {error}"),
            Err(error) => panic!("{what}, {n}: {error}"),
            Ok(_) => panic!("{what}, {n}: connected"),
        }
        longest = longest.max(since.elapsed());
    }
    longest
}

/// Asserts that a run of each of two Lockers learns it as well.
async fn assert_runs_are_refused(bouncer: &PgBouncer, what: &str) {
    let since = now();
    let mut runs = JoinSet::new();
    for who in ["one", "two"] {
        let locker = Locker::postgres(bouncer.options(), patient(who)).unwrap();
        runs.spawn(async move {
            let run = locker.run("job", async |_: Lease| Ok::<_, Infallible>(())).await;
            locker.close().await;
            run
        });
    }
    for run in runs.join_all().await {
        assert!(matches!(&run, Err(RunError::Refused(error)) if is_pooler(error)), "{what}: {run:?}");
    }
    assert!(since.elapsed() < 2 * AT_ONCE, "{what}: {:?}", since.elapsed());
}

/// F-31, D02: 20 of 20; with connections that the pool makes when it needs them, or has from the start; given out last
/// in first out, or in turn.
#[tokio::test]
async fn a_transaction_pooler_is_refused_and_nothing_is_left() {
    let cluster = Cluster::new();
    let untouched = untouched(&cluster).await;
    for connections in [1, 2, 3] {
        for settings in
            ["", "server_round_robin = 1", "min_pool_size = 3", "min_pool_size = 3\nserver_round_robin = 1"]
        {
            let bouncer = PgBouncer::with(&cluster, PoolMode::Transaction, connections, settings);
            let what = format!("{connections} connections, {settings:?}");
            let longest = assert_refused(&bouncer, 20, &what).await;
            println!("{what}: refused 20 of 20, each within {longest:?}");
            assert_runs_are_refused(&bouncer, &what).await;
            assert_nothing_is_left(&cluster, &bouncer, connections, &untouched).await;
        }
    }
}

/// Clients that use a pool without a break until they are dropped.
fn busy_clients(bouncer: &PgBouncer, clients: usize, sql: &'static [&'static str]) -> JoinSet<()> {
    let mut others = JoinSet::new();
    for _ in 0..clients {
        let through = bouncer.options();
        others.spawn(async move {
            let mut connection = PgConnection::connect_with(&through).await.unwrap();
            loop {
                for sql in sql {
                    sqlx::raw_sql(*sql).execute(&mut connection).await.unwrap();
                }
            }
        });
    }
    others
}

/// Pools of 1 to 8 connections, given out in either order, with so many others.
async fn assert_busy_transaction_poolers_are_refused(others: usize, sql: &'static [&'static str]) {
    let cluster = Cluster::new();
    let untouched = untouched(&cluster).await;
    for connections in [1, 2, 3, 8] {
        for settings in ["", "server_round_robin = 1"] {
            let bouncer = PgBouncer::with(&cluster, PoolMode::Transaction, connections, settings);
            let others = busy_clients(&bouncer, others, sql);
            let what = format!("{connections} connections, {settings:?}, {} of {sql:?}", others.len());
            let longest = assert_refused(&bouncer, 20, &what).await;
            println!("{what}: refused 20 of 20, each within {longest:?}");
            assert_runs_are_refused(&bouncer, &what).await;
            drop(others);
            assert_nothing_is_left(&cluster, &bouncer, connections, &untouched).await;
        }
    }
}

/// D02, F-31: 20 of 20 while another client makes transactions, each in one message.
#[tokio::test]
async fn a_transaction_pooler_that_another_one_uses_is_refused_too() {
    assert_busy_transaction_poolers_are_refused(1, &["BEGIN; SELECT 1; COMMIT"]).await;
}

/// D02, F-31: the same, each in three messages.
#[tokio::test]
async fn a_transaction_pooler_that_another_one_uses_for_longer_is_refused_too() {
    assert_busy_transaction_poolers_are_refused(1, &["BEGIN", "SELECT 1", "COMMIT"]).await;
}

/// D02, F-31: the same, with more clients than most of the pools have connections.
#[tokio::test]
async fn a_transaction_pooler_that_many_use_is_refused_too() {
    assert_busy_transaction_poolers_are_refused(4, &["SELECT 1"]).await;
}

/// F-31, D02: a pooler that shares single statements, busy or not.
#[tokio::test]
async fn a_statement_pooler_is_refused_too() {
    let cluster = Cluster::new();
    let untouched = untouched(&cluster).await;
    for connections in [1, 2, 3] {
        for others in [0, 1] {
            let bouncer = PgBouncer::with(&cluster, PoolMode::Statement, connections, "");
            let others = busy_clients(&bouncer, others, &["SELECT 1"]);
            let what = format!("{connections} connections, {} other clients", others.len());
            assert_refused(&bouncer, 20, &what).await;
            assert_runs_are_refused(&bouncer, &what).await;
            drop(others);
            assert_nothing_is_left(&cluster, &bouncer, connections, &untouched).await;
        }
    }
}

/// F-31, D02: where the server does not tell what its processes do, too.
#[tokio::test]
async fn a_pooler_is_told_from_a_server_that_hides_what_its_processes_do() {
    let cluster = Cluster::with(Login::Trust, &["track_activities=off"]);
    let direct = cluster.url("postgres", "", "postgres");
    for connections in [1, 2, 3] {
        for settings in ["", "server_round_robin = 1"] {
            Locker::connect(&direct, patient("one")).await.unwrap().close().await;
            let bouncer = PgBouncer::with(&cluster, PoolMode::Transaction, connections, settings);
            assert_refused(&bouncer, 5, &format!("{connections} connections, {settings:?}")).await;
        }
    }
}

/// F-31, D02: whatever the comparison missed, two that are served by one server process never both lead. Here there is
/// no comparison, and the pool has one connection: the server would grant both of them the same lock.
#[tokio::test]
async fn two_sessions_on_one_server_process_never_both_lead() {
    let cluster = Cluster::new();
    let bouncer = PgBouncer::with(&cluster, PoolMode::Transaction, 1, "");
    let log = Log::default();
    let options = |who| patient(who).trust_affinity(true);
    let one = Locker::postgres(bouncer.options(), options("one")).unwrap();
    let mut leader = Member::on(&one, "job", "one", &log);
    let lease = leader.leads().await;
    for _ in 0..20 {
        let error = Locker::connect(&bouncer.url(), options("two")).await.unwrap_err();
        let Error::Connect(error) = error else { panic!("{error}") };
        assert!(matches!(error, ConnectError::UsedSession | ConnectError::Pooler { .. }), "{error}");
    }
    assert!(lease.check().await);
    leader.stop().await.unwrap();
    one.close().await;
    assert!(cluster.admin().advisory_rows().is_empty());

    // At once: one of them at most.
    let lockers = ["a", "b", "c", "d"].map(|who| Locker::postgres(bouncer.options(), options(who)).unwrap());
    let members = lockers.each_ref().map(|locker| Member::on(locker, "job", locker.identity(), &log));
    pass(Duration::from_secs(1)).await;
    for member in members {
        // Most of them were refused.
        println!("{:?}", member.stop().await);
    }
    log.assert_one_at_a_time();
}

/// F-31, D02, the twin: without the comparison and the markers two lead at once, and what they leave is found.
#[tokio::test]
async fn without_the_comparison_a_transaction_pooler_makes_two_leaders() {
    let cluster = Cluster::new();
    let untouched = untouched(&cluster).await;
    let bouncer = PgBouncer::with(&cluster, PoolMode::Transaction, 1, "");
    let log = Log::default();
    let options = |who| patient(who).trust_affinity(true).sabotage(Sabotage::NoMarker);
    let locker = |who| Locker::postgres(bouncer.options(), options(who)).unwrap();
    let (one, two) = (locker("one"), locker("two"));
    let mut members = [Member::on(&one, "job", "one", &log), Member::on(&two, "job", "two", &log)];
    for member in &mut members {
        member.leads().await;
    }
    assert_eq!(log.lines().len(), 2, "two lead: {log:?}");
    let state = inspect(&bouncer, 1).await.into_values().next().unwrap();
    let left: Vec<_> = state.lines().filter(|line| !untouched.contains(*line)).collect();
    println!("{left:?}");
    assert!(left.iter().any(|line| line.starts_with("idle_session_timeout=")), "{left:?}");
    assert!(left.contains(&"1 channels, 0 prepared statements, 0 cursors, 3 locks"), "{left:?}");
    for member in members {
        member.abort().await;
    }
}

/// F-27, F-31: a pooler that is paused, or stands still, keeps nobody longer than the query timeout, and nothing is left.
#[tokio::test]
async fn a_pooler_that_is_paused_keeps_nobody_who_connects() {
    let cluster = Cluster::new();
    let untouched = untouched(&cluster).await;
    for mode in [PoolMode::Transaction, PoolMode::Session] {
        let bouncer = PgBouncer::with(&cluster, mode, 3, "");
        let console = bouncer.console();
        inspect(&bouncer, 3).await;
        for is_stopped in [false, true] {
            let frozen = is_stopped.then(|| Cluster::freeze(bouncer.pid()));
            if !is_stopped {
                console.sql("PAUSE");
            }
            let since = now();
            let error = Locker::connect(&bouncer.url(), quick("one")).await.unwrap_err();
            println!("{mode:?}, stopped: {is_stopped}: {error} after {:?}", since.elapsed());
            assert!(matches!(error, Error::Connect(ConnectError::Timeout { .. })), "{error}");
            assert!(since.elapsed() < Duration::from_secs(1) + AT_ONCE, "{:?}", since.elapsed());
            let locker = Locker::postgres(bouncer.options(), patient("two")).unwrap();
            let member = Member::on(&locker, "job", "two", &Log::default());
            pass(Duration::from_millis(100)).await;
            let since = now();
            assert_eq!(member.stop().await.unwrap(), None);
            locker.close().await;
            assert!(since.elapsed() < AT_ONCE, "{:?}", since.elapsed());
            drop(frozen);
            if !is_stopped {
                console.sql("RESUME");
            }
            // While it is paused it does not look whether those who wait are still there.
            let clients = || console.sql("SHOW CLIENTS");
            eventually("its clients are gone", clients, |rows| rows.iter().all(|row| row[2] == "pgbouncer"))
                .await;
            assert_nothing_is_left(&cluster, &bouncer, 3, &untouched).await;
        }
    }
}

/// F-32: with the configuration as it is delivered, 20 of 20; what was on the connection is reset.
#[tokio::test]
async fn a_session_pooler_works() {
    let cluster = Cluster::new();
    let untouched = untouched(&cluster).await;
    let bouncer = PgBouncer::with(&cluster, PoolMode::Session, 20, "");
    let (url, log) = (bouncer.url(), Log::default());
    for n in 0..20 {
        let connect = async |who| {
            // Not a second poll: it is pushed awake.
            let options = patient(who).retry_interval(Duration::from_hours(1));
            Locker::connect(&url, options).await.unwrap_or_else(|error| panic!("{n}: {error}"))
        };
        let (one, two) = (connect("one").await, connect("two").await);
        let mut one_runs = Member::on(&one, "job", "one", &log);
        let lease = one_runs.leads().await;
        assert!(lease.check().await && one.bounds().vacancy_silent.is_some());
        let mut two_runs = Member::on(&two, "job", "two", &log);
        two_runs.stands_by().await;
        one_runs.stop().await.unwrap();
        two_runs.leads().await;
        if n % 2 == 0 {
            two_runs.stop().await.unwrap();
            two.close().await;
        } else {
            // Dropped without a word: the pooler resets the connection.
            two_runs.abort().await;
            drop(two);
        }
        one.close().await;
        until("no lock", || cluster.admin().advisory_rows().is_empty()).await;
    }
    assert_eq!(log.assert_one_at_a_time(), 40);
    until("all are reset", || cluster.admin().backends("leasehold/%").is_empty()).await;
    let used = cluster.admin().backends("").len();
    println!("{used} server connections were used");
    assert_nothing_is_left(&cluster, &bouncer, u32::try_from(used).unwrap(), &untouched).await;
}

/// F-32: a pooler that does not reset its connections hands on what its clients leave: a Locker that ends in order leaves
/// nothing.
#[tokio::test]
async fn a_session_pooler_that_does_not_reset_gets_its_connection_back_as_it_was() {
    let cluster = Cluster::new();
    let untouched = untouched(&cluster).await;
    let bouncer = PgBouncer::with(&cluster, PoolMode::Session, 2, "server_reset_query =");
    for _ in 0..3 {
        let locker = Locker::connect(&bouncer.url(), patient("one")).await.unwrap();
        let led = locker.run("job", async |_: Lease| Ok::<_, Infallible>(())).await;
        assert_eq!(led.unwrap(), Some(()));
        locker.close().await;
        let used = u32::try_from(cluster.admin().backends("").len()).unwrap();
        assert_nothing_is_left(&cluster, &bouncer, used, &untouched).await;
    }
}

/// F-32, D26: a pooler with no room for one more client is told, and used when there is room.
#[tokio::test]
async fn a_pooler_that_is_full_is_told_and_waited_for() {
    let cluster = Cluster::new();
    let bouncer = PgBouncer::with(&cluster, PoolMode::Session, 20, "max_client_conn = 3");
    let mut taken = Vec::new();
    for _ in 0..2 {
        taken.push(PgConnection::connect_with(&bouncer.options()).await.unwrap());
    }
    let error = Locker::connect(&bouncer.url(), quick("one")).await.unwrap_err();
    println!("{error}");
    assert!(matches!(&error, Error::Connect(ConnectError::NoSecondConnection { .. })), "{error}");
    assert!(error.to_string().contains("max_client_conn"), "{error}");
    let log = Log::default();
    let locker = Locker::postgres(bouncer.options(), quick("two")).unwrap();
    let mut member = Member::on(&locker, "job", "two", &log);
    pass(Duration::from_millis(300)).await;
    assert!(log.lines().is_empty(), "{log:?}");
    taken.pop().unwrap().close().await.unwrap();
    member.leads().await;
    member.stop().await.unwrap();
    locker.close().await;
    until("no lock", || cluster.admin().advisory_rows().is_empty()).await;
}

/// F-32, L-18, documented: what the guide warns of, whose queries go through a pooler in transaction mode. A statement with a
/// name stays on the server connection, and is in the way of the next client that has one of that name; sqlx names each one
/// that is persistent, also where it keeps none. One without a name comes in two messages, which only a transaction keeps
/// together. A single message of the simple protocol always goes.
#[tokio::test]
async fn only_a_statement_without_a_name_can_be_sent_by_the_next_client_of_a_server_connection() {
    let cluster = Cluster::new();
    let bouncer = PgBouncer::new(&cluster, PoolMode::Transaction, 1);
    let client = async |options| PgConnection::connect_with(&options).await.unwrap();
    let query = |is_persistent| sqlx::query("SELECT $1::int").bind(1).persistent(is_persistent);
    // The first one leaves the name there.
    let mut first = client(bouncer.options().statement_cache_capacity(0)).await;
    query(true).execute(&mut first).await.unwrap();
    for capacity in [0, 100] {
        let mut next = client(bouncer.options().statement_cache_capacity(capacity)).await;
        let mut tx = next.begin().await.unwrap();
        let error = query(true).execute(&mut *tx).await.unwrap_err().to_string();
        assert!(error.contains("prepared statement \"sqlx_s_1\" already exists"), "{capacity}: {error}");
        tx.rollback().await.unwrap();
        let mut tx = next.begin().await.unwrap();
        query(false).execute(&mut *tx).await.unwrap();
        sqlx::raw_sql("SELECT 1").execute(&mut *tx).await.unwrap();
        tx.commit().await.unwrap();
    }
    let bouncer = PgBouncer::new(&cluster, PoolMode::Transaction, 2);
    // Until the pool has both, there is nothing to be taken in turn.
    inspect(&bouncer, 2).await;
    let mut alone = client(bouncer.options().statement_cache_capacity(0)).await;
    let error = query(false).execute(&mut alone).await.unwrap_err().to_string();
    assert!(error.contains("unnamed prepared statement does not exist"), "{error}");
    sqlx::raw_sql("SELECT 1").execute(&mut alone).await.unwrap();
}

/// F-32, documented: each Locker needs a server connection, and one more is needed for a while by whoever looks for a
/// pooler.
#[tokio::test]
async fn a_session_pooler_needs_one_server_connection_more_than_there_are_lockers() {
    let cluster = Cluster::new();
    let bouncer = PgBouncer::with(&cluster, PoolMode::Session, 2, "");
    let one = Locker::connect(&bouncer.url(), patient("one")).await.unwrap();
    let error = Locker::connect(&bouncer.url(), patient("two")).await.unwrap_err();
    assert!(matches!(&error, Error::Connect(ConnectError::NoSecondConnection { .. })), "{error}");
    one.close().await;
    let bouncer = PgBouncer::with(&cluster, PoolMode::Session, 3, "");
    let one = Locker::connect(&bouncer.url(), patient("one")).await.unwrap();
    let two = Locker::connect(&bouncer.url(), patient("two")).await.unwrap();
    one.close().await;
    two.close().await;
}

/// F-32: a pooler that is told to pause waits for the sessions that it serves; one that stands still costs the lease, by
/// its deadline, and is used again when it goes on.
#[tokio::test]
async fn a_session_pooler_that_stands_still_costs_the_lease_until_it_goes_on() {
    let cluster = Cluster::new();
    let bouncer = PgBouncer::with(&cluster, PoolMode::Session, 20, "");
    let (console, log) = (bouncer.console(), Log::default());
    let locker = Locker::connect(&bouncer.url(), quick("one")).await.unwrap();
    let trust = locker.bounds().trust;
    let mut member = Member::on(&locker, "job", "one", &log);
    let lease = member.leads().await;

    // Not answered before the session has ended.
    let mut pausing = PgConnection::connect_with(&bouncer.options().database("pgbouncer")).await.unwrap();
    let pausing = tokio::spawn(async move { sqlx::raw_sql("PAUSE").execute(&mut pausing).await });
    until("it is told to pause", || bouncer.log().has("PAUSE", 0)).await;
    pass(trust).await;
    assert!(lease.check().await && !pausing.is_finished());
    console.sql("RESUME");
    pausing.abort();

    for how in ["SUSPEND", "SIGSTOP"] {
        let lease = if how == "SUSPEND" { lease.clone() } else { member.leads().await };
        let since = now();
        let frozen = (how == "SIGSTOP").then(|| Cluster::freeze(bouncer.pid()));
        if frozen.is_none() {
            console.sql(how);
        }
        println!("{how}: {:?} after {:?}", over(&lease).await, since.elapsed());
        assert!(since.elapsed() < trust + AT_ONCE, "{:?}", since.elapsed());
        if frozen.is_none() {
            console.sql("RESUME");
        }
    }
    member.leads().await;
    member.stop().await.unwrap();
    locker.close().await;
    until("no lock", || cluster.admin().advisory_rows().is_empty()).await;
    log.assert_one_at_a_time();
}

/// F-32: a pooler that dies takes the session with it, and the server frees the lock.
#[tokio::test]
async fn a_pooler_that_dies_ends_the_session() {
    let cluster = Cluster::new();
    let bouncer = PgBouncer::with(&cluster, PoolMode::Session, 20, "");
    let locker = Locker::connect(&bouncer.url(), quick("one")).await.unwrap();
    let log = Log::default();
    let mut member = Member::on(&locker, "job", "one", &log);
    let lease = member.leads().await;
    drop(bouncer);
    println!("{:?}", over(&lease).await);
    member.stop().await.unwrap();
    locker.close().await;
    // The server learns of it by its own connection to the pooler.
    until("nothing is held", || cluster.admin().advisory_rows().is_empty()).await;
}

/// No direct connection is taken for a pooled one, however much the server has to catch up with.
#[tokio::test]
async fn a_direct_connection_is_never_taken_for_a_pooler() {
    let cluster = Cluster::new();
    let mut others = JoinSet::new();
    for n in 0..2 {
        let mut connection = cluster.connect().await;
        others.spawn(async move {
            loop {
                let sql =
                    format!("CREATE TABLE t{n} (a int PRIMARY KEY, b text); DROP TABLE t{n};").repeat(5);
                sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut connection).await.unwrap();
            }
        });
    }
    // Sees that server processes do begin transactions of their own meanwhile.
    let mut watch = cluster.connect().await;
    let transaction =
        "SELECT split_part(virtualtransaction, '/', 2)::int8 FROM pg_locks WHERE pid = pg_backend_pid()";
    let mut last: Option<i64> = None;
    let mut caught_up = 0;
    for n in 0..40 {
        match Locker::connect(&cluster.url("postgres", "", "postgres"), patient("one")).await {
            Ok(locker) => locker.close().await,
            Err(error) => panic!("{n}: {error}"),
        }
        let number = sqlx::raw_sql(transaction).fetch_one(&mut watch).await.unwrap().get(0);
        caught_up += usize::from(last.is_some_and(|last| number != last + 1));
        last = Some(number);
    }
    println!("between {caught_up} of 40 there were other transactions");
    assert!(caught_up > 0);
    others.shutdown().await;
}
