//! Servers and sessions that are killed, stopped and cut off.

use std::time::Duration;

use leasehold::{Key, Kind, Locker, LossCause, Options, Reason};

use crate::support::member::over;
use crate::support::postgres::{Admin, Cluster, Database, Login, Stop};
use crate::support::{AT_ONCE, Log, Member, eventually, now, pass, quick, sleepy, until};

fn key(name: &str) -> i64 {
    Key::of(Kind::Lease, name).get()
}

fn locker(cluster: &Cluster, options: Options) -> Locker {
    Locker::postgres(cluster.options(), options).unwrap()
}

/// The backend of a Locker that has a session.
async fn backend(admin: &Admin, who: &str) -> i32 {
    let name = format!("leasehold/{who}");
    eventually("it has a session", || admin.backends(&name), |backends| backends.len() == 1).await[0]
}

/// F-19, F-15, D03, D15: the leader is told at once, and why; another one leads within a retry interval, or the same
/// one in a new session; and so five times.
#[tokio::test]
async fn a_terminated_backend_is_noticed_at_once() {
    let database = Database::new();
    let log = Log::default();
    let member = |who| {
        let locker = Locker::postgres(database.options(), quick(who)).unwrap();
        Member::on(&locker, "job", who, &log)
    };
    let mut a = member("a");
    let mut lease = a.leads().await;
    let mut b = member("b");
    b.stands_by().await;
    for _ in 0..5 {
        let old = database.admin().holder(key("job")).unwrap();
        let since = now();
        database.admin().terminate(old);
        lease.cancelled().await;
        let told = since.elapsed();
        // The client library may swallow the server's parting words; then the reason names what they may have been.
        let reason = lease.reason();
        let Some(Reason::Lost(LossCause::Closed { reason, sqlstate })) = reason else { panic!("{reason:?}") };
        assert!(sqlstate.as_deref() == Some("57P01") || reason.contains("57P01"), "{sqlstate:?}: {reason}");
        lease = tokio::select! {
            lease = a.leads() => lease,
            lease = b.leads() => lease,
        };
        println!("told after {told:?}, taken over after {:?}", since.elapsed());
        assert!(told < Duration::from_millis(500) && since.elapsed() < 2 * AT_ONCE);
        assert_ne!(database.admin().holder(key("job")), Some(old));
        // Both have a session again.
        backend(database.admin(), "a").await;
        backend(database.admin(), "b").await;
    }
    a.stop().await.unwrap();
    b.stop().await.unwrap();
}

/// F-21: every lease of a session that dies is lost, each once.
#[tokio::test]
async fn every_lease_of_a_dead_session_is_lost_once() {
    let database = Database::new();
    let log = Log::default();
    let locker = Locker::postgres(database.options(), quick("a")).unwrap();
    let names = ["one", "two", "three"];
    let mut members = names.map(|name| Member::on(&locker, name, name, &log));
    let mut leases = Vec::new();
    for member in &mut members {
        leases.push(member.leads().await);
    }
    database.admin().terminate(backend(database.admin(), "a").await);
    for lease in &leases {
        assert!(matches!(over(lease).await, Some(Reason::Lost(LossCause::Closed { .. }))));
    }
    for member in &mut members {
        member.leads().await;
    }
    for (member, name) in members.into_iter().zip(names) {
        member.stop().await.unwrap();
        assert_eq!(log.count(&format!("{name} start")), 2);
    }
}

/// F-17, F-23: the leader's backend stands still. The lease is over by its deadline, the session is used no more, and
/// the lock is free when the server notices.
#[tokio::test]
async fn a_session_without_an_answer_is_given_up() {
    let cluster = Cluster::new();
    let log = Log::default();
    let options = quick("a");
    let trust = options.bounds().trust;
    let (one, two) = (locker(&cluster, options), locker(&cluster, quick("b")));
    let mut a = Member::on(&one, "job", "a", &log);
    let lease = a.leads().await;
    let old = backend(cluster.admin(), "a").await;
    let b = Member::on(&two, "job", "b", &log);
    b.stands_by().await;

    let (frozen, since) = (Cluster::freeze(old), now());
    assert!(matches!(
        over(&lease).await,
        Some(Reason::Lost(LossCause::Timeout { .. } | LossCause::Deadline))
    ));
    println!("over {:?} after its backend stood still; the trust is {trust:?}", since.elapsed());
    assert!(since.elapsed() < trust + AT_ONCE);
    // A stopped process cannot free it; whoever leads now is somebody else's bug.
    let new = eventually(
        "it has another session",
        || cluster.admin().backends("leasehold/a"),
        |all| all.iter().any(|&pid| pid != old),
    )
    .await;
    assert_eq!(cluster.admin().holder(key("job")), Some(old));
    assert_eq!(log.count("b start") + log.count("a start"), 1, "{new:?}");
    drop(frozen);
    until("the old session is gone", || !cluster.admin().backends("leasehold/%").contains(&old)).await;
    until("one of them leads", || log.count("b start") + log.count("a start") == 2).await;
    a.stop().await.unwrap();
    b.stop().await.unwrap();
    log.assert_one_at_a_time();
    tokio::join!(one.close(), two.close());
    assert!(cluster.admin().advisory_rows().is_empty());
}

/// D04: an attempt that is granted after its client has given it up is undone.
#[tokio::test]
async fn an_abandoned_attempt_leaves_no_lock() {
    let cluster = Cluster::new();
    let log = Log::default();
    let a = locker(&cluster, quick("a"));
    let mut other = Member::on(&a, "other", "other", &log);
    let lease = other.leads().await;
    let old = backend(cluster.admin(), "a").await;
    let b = locker(&cluster, quick("b"));
    let warm = Member::on(&b, "other", "warm", &log);
    warm.stands_by().await;

    let frozen = Cluster::freeze(old);
    let asks = Member::on(&a, "job", "a", &log);
    over(&lease).await;
    let mut b = Member::on(&b, "job", "b", &log);
    // The statement of the first is in its socket, before any of the second's.
    asks.abort().await;
    drop(frozen);
    b.leads().await;
    until("the old session is gone", || !cluster.admin().backends("leasehold/%").contains(&old)).await;
    assert_eq!(log.count("a start"), 0);
    b.stop().await.unwrap();
    warm.stop().await.unwrap();
    other.stop().await.unwrap();
    until("nothing is locked", || cluster.admin().advisory_rows().is_empty()).await;
}

/// F-22: at default options a backend that stands still for 2 s costs nothing.
#[tokio::test]
async fn a_backend_that_stands_still_for_two_seconds_costs_nothing() {
    let cluster = Cluster::new();
    let log = Log::default();
    let mut a = Member::on(&locker(&cluster, Options::default().identity("a")), "job", "a", &log);
    let lease = a.leads().await;
    let frozen = Cluster::freeze(backend(cluster.admin(), "a").await);
    pass(Duration::from_secs(2)).await;
    drop(frozen);
    assert!(lease.check().await);
    assert_eq!(lease.reason(), None);
    a.stop().await.unwrap();
    assert_eq!(log.lines(), ["a start", "a end"]);
}

/// F-24: no error while the server is down at the start, and a leader soon after it is up.
#[tokio::test]
async fn a_server_that_starts_late_is_waited_for() {
    let mut cluster = Cluster::new();
    cluster.stop(Stop::Fast).await;
    let log = Log::default();
    let mut a = Member::on(&locker(&cluster, quick("a")), "job", "a", &log);
    pass(Duration::from_millis(500)).await;
    assert!(log.lines().is_empty());
    cluster.start().await;
    let since = now();
    a.leads().await;
    println!("led {:?} after the server was up", since.elapsed());
    assert!(since.elapsed() < AT_ONCE);
    a.stop().await.unwrap();
}

/// F-24, F-04, D10: ten crashes of the server in a row. Each time one of three leads again, and nobody meanwhile.
#[tokio::test]
async fn ten_restarts_in_a_row_end_with_one_leader_each() {
    let mut cluster = Cluster::new();
    let log = Log::default();
    let members = ["a", "b", "c"].map(|who| Member::on(&locker(&cluster, quick(who)), "job", who, &log));
    let starts = || log.lines().iter().filter(|line| line.ends_with("start")).count();
    let ends = || log.lines().iter().filter(|line| line.ends_with("end")).count();
    until("one leads", || starts() == 1).await;
    for round in 1..=10 {
        cluster.stop(Stop::Immediate).await;
        until("its job has ended", || ends() == round).await;
        assert_eq!(starts(), round, "one started during the outage: {log:?}");
        cluster.start().await;
        let since = now();
        until("one leads again", || starts() == round + 1).await;
        println!("round {round}: led {:?} after the server was up", since.elapsed());
        assert!(since.elapsed() < AT_ONCE);
    }
    for member in members {
        member.stop().await.unwrap();
    }
    log.assert_one_at_a_time();
}

/// F-27, D20: while its server is cut off and a statement is in flight, and while it connects to a server that does
/// not answer.
#[tokio::test]
async fn a_standby_can_be_cancelled_while_the_server_does_not_answer() {
    let cluster = Cluster::new();
    let log = Log::default();
    let mut leader =
        Member::on(&locker(&cluster, Options::default().identity("leader")), "job", "leader", &log);
    leader.leads().await;
    let standby = Member::on(&locker(&cluster, quick("a")), "job", "a", &log);
    standby.stands_by().await;
    let frozen = cluster.freeze_all();
    let connecting = Member::on(&locker(&cluster, quick("b")), "job", "b", &log);
    // Several polls.
    pass(Duration::from_millis(300)).await;
    for member in [standby, connecting] {
        let since = now();
        assert_eq!(member.stop().await.unwrap(), None);
        assert!(since.elapsed() < AT_ONCE, "{:?}", since.elapsed());
    }
    drop(frozen);
    until("only the leader has a session", || cluster.admin().backends("%").len() == 1).await;
    leader.stop().await.unwrap();
    assert_eq!(log.lines(), ["leader start", "leader end"]);
}

/// D26, F-24: fifteen Lockers and room for nine sessions. Those that fit work, the others wait without a noise, and
/// come in when there is room.
#[tokio::test]
async fn lockers_that_find_no_room_wait_for_it() {
    let cluster = Cluster::with(
        Login::Trust,
        &["max_connections=12", "superuser_reserved_connections=3", "max_wal_senders=0"],
    );
    cluster.admin().sql("CREATE ROLE app LOGIN");
    let log = Log::default();
    let whos: Vec<String> = (0..15).map(|n| format!("r{n:02}")).collect();
    let lead = |who: &String| {
        let target: sqlx::postgres::PgConnectOptions = cluster.url("app", "", "postgres").parse().unwrap();
        // The longest pause between two attempts, as long as the attempts of all the others together.
        let options = quick(who).retry_interval(Duration::from_secs(1));
        let locker = Locker::postgres(target, options).unwrap();
        Member::on(&locker, format!("led by {who}"), who, &log)
    };
    let mut members: Vec<_> = whos.iter().map(lead).collect();
    // Each has a name of its own, and so leads as soon as it has a session; one connection is for the second look.
    let started = |who: &str| log.count(&format!("{who} start")) == 1;
    eventually("some lead", || log.lines(), |lines| lines.len() >= 5).await;
    let mut most = 0;
    while !members.is_empty() {
        let place = || members.iter().position(|member| started(member.who()));
        let place = eventually("another one leads", place, Option::is_some).await.unwrap();
        most = most.max(cluster.admin().backends("%").len());
        members.swap_remove(place).stop().await.unwrap();
    }
    assert!(most <= 9, "{most} sessions");
    assert_eq!(log.lines().len(), 2 * whos.len());
}

/// F-20, F-21, F-40: an unlock of everything on the session is a loss of what was held, and the session goes on.
#[tokio::test]
async fn an_unlock_of_everything_is_a_loss_of_everything_held() {
    let stage = crate::support::Stage::postgres();
    let crate::support::Stage::Postgres(postgres) = &stage else { unreachable!("it was made so") };
    let log = Log::default();
    let locker = stage.locker(sleepy("a"));
    let mut one = Member::on(&locker, "one", "one", &log);
    let mut two = Member::on(&locker, "two", "two", &log);
    let (first, second) = (one.leads().await, two.leads().await);
    let session = backend(postgres.database.admin(), "a").await;
    postgres.proxy.slip_in(session, "SELECT pg_advisory_unlock_all()").unwrap();
    for lease in [&first, &second] {
        assert_eq!(over(lease).await, Some(Reason::Lost(LossCause::Gone)));
    }
    one.stop().await.unwrap();
    two.stop().await.unwrap();
    assert_eq!(backend(postgres.database.admin(), "a").await, session);
    locker.close().await;
    assert!(postgres.database.admin().advisory_rows().is_empty());
}

/// F-30: a standby that lost its place among those who wait takes it again, and is still pushed awake.
#[tokio::test]
async fn a_standby_that_lost_its_registration_is_pushed_awake_all_the_same() {
    let stage = crate::support::Stage::postgres();
    let crate::support::Stage::Postgres(postgres) = &stage else { unreachable!("it was made so") };
    let log = Log::default();
    let (a, b) = (stage.locker(sleepy("a")), stage.locker(sleepy("b")));
    let mut leader = Member::on(&a, "job", "a", &log);
    leader.leads().await;
    let mut standby = Member::on(&b, "job", "b", &log);
    standby.stands_by().await;
    let key = leasehold::Key::of(leasehold::Kind::Lease, "job");
    until("it waits", || postgres.database.admin().waiters(key) == 1).await;
    let session = backend(postgres.database.admin(), "b").await;
    postgres.proxy.slip_in(session, "SELECT pg_advisory_unlock_all()").unwrap();
    until("it waits again", || postgres.database.admin().waiters(key) == 1).await;
    leader.stop().await.unwrap();
    standby.leads().await;
    standby.stop().await.unwrap();
    log.assert_one_at_a_time();
}
