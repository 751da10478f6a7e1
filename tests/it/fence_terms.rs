//! How a term begins that can fence: after all that is left of an earlier one, seen by everybody, in one round trip.

use std::time::Duration;

use leasehold::{Fenced, Key, Kind, Lease, LockError, Locker, LossCause, Reason, Sabotage, State};
use sqlx::{Connection as _, PgConnection};

use crate::fencing::{Table, WRITE, run};
use crate::support::member::over;
use crate::support::postgres::{Cluster, Login, Proxy};
use crate::support::{Log, Member, eventually, now, quick, sleepy, until};

/// The term key of a lease, as arguments in SQL: what its fence tries first.
pub(crate) fn term_key(lease: &Lease) -> String {
    let sql = lease.fence_sql().unwrap();
    let (_, from) = sql.split_once("pg_try_advisory_xact_lock_shared(").unwrap();
    from.split_once(')').unwrap().0.to_owned()
}

/// T-02, the twin of the barrier: the next one starts while a transaction of the term before is open, which is then committed.
#[tokio::test]
async fn without_the_barrier_a_term_begins_beside_an_open_transaction() {
    let (table, log) = (Table::new(), Log::default());
    let mut connection = table.0.connect().await;
    let mut earlier = Member::on(&table.locker("a"), "job", "a", &log);
    let lease = earlier.leads().await;
    begin_fenced(&mut connection, &lease).await;
    earlier.stop().await.unwrap();
    let options = quick("b").sabotage(Sabotage::NoBarrier);
    let mut later = Member::on(&Locker::postgres(table.0.options(), options).unwrap(), "job", "b", &log);
    later.leads().await;
    write_and_commit(&mut connection).await;
    assert_eq!(table.written(), 1, "committed after b had started");
    later.stop().await.unwrap();
}

/// T-02, T-04: the lease is free and the term key is not, as while a server process dies. A session of plain SQL stands in
/// for that, with the key of the earlier term. What its fence still lets pass is committed before the next one starts.
#[tokio::test]
async fn a_term_begins_only_when_the_server_has_freed_all_of_an_earlier_one() {
    let (table, log) = (Table::new(), Log::default());
    let (mut connection, mut dying) = (table.0.connect().await, table.0.connect().await);
    let mut earlier = Member::on(&table.locker("a"), "job", "a", &log);
    let lease = earlier.leads().await;
    earlier.stop().await.unwrap();
    run(&mut dying, format!("SELECT pg_advisory_lock({})", term_key(&lease))).await.unwrap();

    let proxy = Proxy::to("127.0.0.1", table.0.options().get_port());
    let locker = Locker::postgres(table.0.options().port(proxy.port()), quick("b")).unwrap();
    let mut later = Member::on(&locker, "job", "b", &log);
    until("b waits", || locker.state("job") == State::Blocked).await;
    begin_fenced(&mut connection, &lease).await;
    dying.close().await.unwrap();
    // Its attempts and heartbeats.
    let before = proxy.statements();
    until("b goes on trying", || proxy.statements() > before + 20).await;
    assert_eq!(locker.state("job"), State::Blocked);
    let mut other = table.0.connect().await;
    let mut late = other.begin().await.unwrap();
    assert!(matches!(lease.fence(&mut late).await, Err(Fenced::Over)));
    drop(late);
    assert_eq!(log.lines(), ["a start", "a end"]);
    write_and_commit(&mut connection).await;
    later.leads().await;
    assert_eq!(table.written(), 1);
    later.stop().await.unwrap();
}

/// Begins a transaction and fences it. Whoever tries to begin a term has the barrier for a moment, in which it is refused.
pub(crate) async fn begin_fenced(connection: &mut PgConnection, lease: &Lease) {
    for _ in 0..1_000 {
        run(connection, "BEGIN").await.unwrap();
        match lease.fence(connection).await {
            Ok(()) => return,
            Err(Fenced::Over) => run(connection, "ROLLBACK").await.unwrap(),
            Err(error) => panic!("{error:?}"),
        }
    }
    panic!("the term is over");
}

pub(crate) async fn write_and_commit(connection: &mut PgConnection) {
    run(connection, WRITE).await.unwrap();
    run(connection, "COMMIT").await.unwrap();
}

/// T-02, the twin of the look at term keys: the same, and the fence of the earlier term lets a transaction pass after the
/// start of the later one.
#[tokio::test]
async fn without_the_look_a_term_begins_beside_an_earlier_one() {
    let (table, log) = (Table::new(), Log::default());
    let (mut connection, mut dying) = (table.0.connect().await, table.0.connect().await);
    let mut earlier = Member::on(&table.locker("a"), "job", "a", &log);
    let lease = earlier.leads().await;
    earlier.stop().await.unwrap();
    run(&mut dying, format!("SELECT pg_advisory_lock({})", term_key(&lease))).await.unwrap();
    let options = quick("b").sabotage(Sabotage::NoTermLook);
    let mut later = Member::on(&Locker::postgres(table.0.options(), options).unwrap(), "job", "b", &log);
    later.leads().await;
    begin_fenced(&mut connection, &lease).await;
    write_and_commit(&mut connection).await;
    assert_eq!(table.written(), 1, "committed after b had started");
    dying.close().await.unwrap();
    later.stop().await.unwrap();
}

/// T-03: while a transaction keeps a term from beginning, the log says which one at `warn`, and everybody sees that it is
/// blocked.
#[cfg(feature = "cli")]
#[tokio::test]
async fn a_term_that_waits_for_a_transaction_says_for_which() {
    use leasehold::Role;
    use tracing::Level;
    use tracing_subscriber::layer::SubscriberExt as _;

    use crate::support::postgres::Stop;
    use crate::support::recorder::{Recorded, Recorder};

    for (is_prepared, is_restarted) in [(false, false), (true, false), (true, true)] {
        let mut cluster = Cluster::with(Login::Trust, &["max_prepared_transactions=2"]);
        let (recorder, log) = (Recorder::default(), Log::default());
        let target = cluster.options();
        let locker = |who| Locker::postgres(target.clone(), quick(who)).unwrap();
        let mut earlier = Member::on(&locker("a"), "job", "a", &log);
        let lease = earlier.leads().await;
        let mut connection = cluster.connect().await;
        run(&mut connection, "SET application_name = 'biller'").await.unwrap();
        let pid: i32 =
            sqlx::query_scalar("SELECT pg_backend_pid()").fetch_one(&mut connection).await.unwrap();
        begin_fenced(&mut connection, &lease).await;
        if is_prepared {
            run(&mut connection, "PREPARE TRANSACTION 'bill 7'").await.unwrap();
        }
        earlier.stop().await.unwrap();
        if is_restarted {
            cluster.restart(Stop::Immediate).await;
            connection = cluster.connect().await;
        }

        let guard = tracing::subscriber::set_default(tracing_subscriber::registry().with(recorder.clone()));
        let waiting = locker("b");
        drop(guard);
        let mut later = Member::on(&waiting, "job", "b", &log);
        let message =
            "holds the lease and does not begin yet: a transaction of an earlier term is still open";
        let told = |all: &Vec<_>| all.iter().any(|it: &Recorded| it.is(message, "job"));
        let all = eventually("it is warned of", || recorder.all(), told).await;
        let event = all.iter().find(|it| it.is(message, "job")).unwrap();
        assert_eq!((event.level, event.get("identity")), (Level::WARN, "b"));
        if is_prepared {
            assert_eq!((event.get("prepared"), event.get("pid")), ("bill 7", ""), "{event:?}");
        } else {
            assert_eq!(event.get("pid"), pid.to_string(), "{event:?}");
            assert_eq!(event.get("application"), "biller", "{event:?}");
            assert!(event.get("since_query").contains("ms"), "{event:?}");
        }
        assert!(event.get("open_for").contains("ms"), "{event:?}");

        assert_eq!(waiting.state("job"), State::Blocked);
        let elections = locker("o").observer().leaders().await.unwrap();
        let leader = elections[0].leader.as_ref().unwrap();
        assert_eq!((leader.identity.as_deref(), leader.role), (Some("b"), Some(Role::Blocked)));
        let output = std::process::Command::new(crate::support::command::PROGRAM)
            .env("LEASEHOLD_STORE", cluster.url("postgres", "", "postgres"))
            .args(["status", "--json", "job"])
            .output()
            .unwrap();
        let shown: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let election = &shown["elections"][0];
        assert_eq!((&election["state"], &election["leader"]["identity"]), (&"blocked".into(), &"b".into()));

        assert_eq!(log.count("b start"), 0);
        run(&mut connection, if is_prepared { "COMMIT PREPARED 'bill 7'" } else { "COMMIT" }).await.unwrap();
        later.leads().await;
        later.stop().await.unwrap();
    }
}

/// T-04: counted on the line. A run and a lock have their term in the one statement that asks; a token is one more, once;
/// and a fence is one, wherever it is sent.
#[tokio::test]
async fn fencing_costs_no_round_trip_but_its_own() {
    let cluster = Cluster::new();
    let proxy = Proxy::to("127.0.0.1", cluster.port());
    let options = cluster.options().port(proxy.port());
    let locker =
        Locker::postgres(options.clone(), sleepy("a").heartbeat_interval(Duration::from_mins(5))).unwrap();
    // Connected, and nothing is on the line but what is asked for.
    locker.lock("first").lock().await.unwrap().release().await.unwrap();
    let mut connection = PgConnection::connect_with(&options).await.unwrap();
    let mut counted = proxy.statements();
    let mut cost = || {
        let before = std::mem::replace(&mut counted, proxy.statements());
        counted - before
    };

    let plain = locker.lock("plain").lock().await.unwrap();
    assert_eq!(cost(), 1);
    let guard = locker.lock("fenced").fenced().lock().await.unwrap();
    assert_eq!(cost(), 1, "an acquire with its term key");
    guard.fencing_token().await.unwrap();
    assert_eq!(cost(), 1, "the first token");
    for _ in 0..3 {
        guard.fencing_token().await.unwrap();
    }
    assert_eq!(cost(), 0, "the same token");
    let mut tx = connection.begin().await.unwrap();
    cost();
    guard.fence(&mut tx).await.unwrap();
    assert_eq!(cost(), 1, "a fence");
    tx.rollback().await.unwrap();
    cost();
    guard.release().await.unwrap();
    assert_eq!(cost(), 1, "both keys are given back at once");
    plain.release().await.unwrap();
    cost();
    let mut member = Member::on(&locker, "job", "a", &Log::default());
    let lease = member.leads().await;
    assert_eq!(cost(), 1, "a run");
    assert!(lease.fence_sql().is_ok());
    assert_eq!(cost(), 0);
    member.stop().await.unwrap();
    locker.close().await;
}

/// F-41, T-02: the lock table is full at each of the steps in which a term begins. Nothing is left of it, neither lease nor
/// barrier nor term key, and the session goes on.
#[tokio::test]
async fn out_of_lock_memory_leaves_nothing_of_a_term_behind() {
    let cluster = Cluster::with(Login::Trust, &["max_locks_per_transaction=10", "max_connections=10"]);
    let locker = Locker::postgres(cluster.options(), quick("a")).unwrap();
    let kept = locker.lock("kept").fenced().lock().await.unwrap();
    let mut filler = cluster.connect().await;
    let pid = cluster.admin().backends("leasehold/a")[0];
    let own = || {
        let sql = format!(
            "SELECT classid, objid, objsubid, mode FROM pg_locks WHERE locktype = 'advisory' AND pid = {pid} ORDER BY 1, 2"
        );
        cluster.admin().sql(&sql)
    };
    let before = own();
    assert_eq!(before.len(), 3, "the marker, the lease and the term key: {before:?}");
    let (mut refused, mut granted) = (0, 0);
    for room in 0..12 {
        let fill = "SELECT pg_advisory_lock(n) FROM generate_series(1, 100000) AS n";
        run(&mut filler, fill).await.unwrap_err();
        run(&mut filler, format!("SELECT pg_advisory_unlock(n) FROM generate_series(1, {room}) AS n"))
            .await
            .unwrap();
        for lock in [locker.lock("new"), locker.lock("kept, too")].map(leasehold::Lock::fenced) {
            match lock.lock_timeout(Duration::from_secs(5)).await {
                Ok(guard) => {
                    assert!(guard.fence_sql().is_ok());
                    guard.release().await.unwrap();
                    granted += 1;
                }
                Err(LockError::Failed { reason }) => {
                    println!("room for {room}: {reason}");
                    refused += 1;
                }
                Err(error) => panic!("{error:?}"),
            }
            eventually("nothing is left", own, |rows| *rows == before).await;
        }
        run(&mut filler, "SELECT pg_advisory_unlock_all()").await.unwrap();
    }
    println!("{refused} refused, {granted} granted");
    assert!(refused > 4 && granted > 4);
    assert!(kept.is_held() && kept.check().await);
    let other = Locker::postgres(cluster.options(), quick("b")).unwrap();
    let guard = other.lock("new").fenced().try_lock().await.unwrap().expect("nobody is in the way");
    guard.release().await.unwrap();
    kept.release().await.unwrap();
    assert!(other.lock("kept").fenced().try_lock().await.unwrap().is_some());
    assert_eq!(cluster.admin().backends("leasehold/a"), [pid], "it is still the same session");
}

/// F-20, T-02: somebody unlocks on the session: all, the lease alone, or the term key alone. It is a loss at the next
/// heartbeat, nothing of that term can be committed, and nothing of it keeps the next one from beginning.
#[tokio::test]
async fn what_others_unlock_leaves_no_term_key_behind() {
    for what in ["all", "lease", "term key"] {
        let (table, log) = (Table::new(), Log::default());
        let proxy = Proxy::to("127.0.0.1", table.0.options().get_port());
        let options = quick("a").heartbeat_interval(Duration::from_secs(1));
        let locker = Locker::postgres(table.0.options().port(proxy.port()), options).unwrap();
        let mut earlier = Member::on(&locker, "job", "a", &log);
        let lease = earlier.leads().await;
        let later = Member::on(&table.locker("b"), "job", "b", &log);
        later.stands_by().await;
        let key = Key::of(Kind::Lease, "job").get();
        let pid = table.0.admin().holder(key).unwrap();
        let sql = match what {
            "all" => "SELECT pg_advisory_unlock_all()".to_owned(),
            "lease" => format!("SELECT pg_advisory_unlock({key})"),
            _ => format!("SELECT pg_advisory_unlock({})", term_key(&lease)),
        };
        proxy.slip_in(pid, &sql).unwrap();
        let reason = over(&lease).await;
        let is_told = match &reason {
            Some(Reason::Lost(LossCause::Gone)) => what != "term key",
            Some(Reason::Lost(LossCause::Distrusted { .. })) => what == "term key",
            _ => false,
        };
        assert!(is_told, "{what}: {reason:?}");
        until("the next one leads", || log.count("a start") + log.count("b start") == 2).await;
        let mut connection = table.0.connect().await;
        let mut tx = connection.begin().await.unwrap();
        assert!(matches!(lease.fence(&mut tx).await, Err(Fenced::Over)), "{what}");
        drop(tx);
        drop((earlier.stop().await, later.stop().await));
        until("all is free", || table.locks() == 0).await;
    }
}

/// T-02: the same, and the standby is quicker than the heartbeat that notices: it has the lease, and waits for the term key
/// that is still there.
#[tokio::test]
async fn who_takes_a_lease_that_others_unlocked_waits_for_its_term_key() {
    let (table, log) = (Table::new(), Log::default());
    let proxy = Proxy::to("127.0.0.1", table.0.options().get_port());
    let options = sleepy("a").heartbeat_interval(Duration::from_secs(2));
    let locker = Locker::postgres(table.0.options().port(proxy.port()), options).unwrap();
    let mut earlier = Member::on(&locker, "job", "a", &log);
    let lease = earlier.leads().await;
    let mut later = Member::on(&table.locker("b"), "job", "b", &log);
    later.stands_by().await;
    let key = Key::of(Kind::Lease, "job").get();
    // Right after a heartbeat.
    assert!(lease.check().await);
    proxy
        .slip_in(table.0.admin().holder(key).unwrap(), &format!("SELECT pg_advisory_unlock({key})"))
        .unwrap();
    until("b has the lease, and waits", || later.locker.state("job") == State::Blocked).await;
    assert_eq!(log.lines(), ["a start"]);
    let since = now();
    later.leads().await;
    println!("after {:?}", since.elapsed());
    assert_eq!(over(&lease).await, Some(Reason::Lost(LossCause::Gone)));
    drop((earlier.stop().await, later.stop().await));
    until("all is free", || table.locks() == 0).await;
}
