//! Looking from outside: who leads, who stands by, on every store; and what nobody answers for.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::time::Duration;

use leasehold::{CancellationToken, Error, Handover, Lease, Name, Observer, Participant, Reason, Role};
use tokio::task::JoinSet;

use crate::support::member::over;
use crate::support::{Log, Member, Stage, on_every_store, quick, sleepy};

/// Names that text is easily broken by.
fn odd_names() -> Vec<String> {
    let mut names: Vec<String> = [
        "two words",
        "a 'quote' and \"another\"",
        "line\nend",
        "sp\u{e4}t \u{1f980}",
        "%41",
        "-",
        "a:b",
        "; DROP",
    ]
    .map(str::to_owned)
    .into();
    names.push("\u{e9}".repeat(512));
    names
}

fn who(participants: &[Participant]) -> Vec<(&str, Option<Role>)> {
    participants.iter().map(|it| (it.identity.as_deref().unwrap_or("?"), it.role)).collect()
}

async fn leader_of(observer: &Observer, name: &str) -> Option<Participant> {
    observer.snapshot().await.unwrap().of(&Name::from(name)).leader
}

/// C-06: from a session of its own, and over that of a Locker.
#[tokio::test]
async fn an_observer_sees_who_leads_and_who_stands_by() {
    on_every_store(async |stage| {
        let log = Log::default();
        let mut leader = Member::join(stage, quick("a"), "job", &log);
        let lease = leader.leads().await;
        let mut standby = Member::join(stage, quick("b"), "job", &log);
        standby.stands_by().await;
        let observer = stage.locker(quick("o")).observer();
        for observer in [&observer, &leader.locker.observer(), &standby.locker.observer()] {
            let snapshot = observer.snapshot().await.unwrap();
            assert_eq!(snapshot.silent, [], "everybody has answered");
            let elections = observer.leaders().await.unwrap();
            assert_eq!(elections.len(), 1, "{elections:?}");
            let found = elections[0].leader.clone().unwrap();
            assert_eq!(who(std::slice::from_ref(&found)), [("a", Some(Role::Leading))]);
            assert_eq!((found.term, found.answers_step_down), (Some(lease.term()), Some(true)));
            assert_eq!(who(&observer.standbys("job").await.unwrap()), [("b", Some(Role::Standby))]);
            assert_eq!(leader_of(observer, "another job").await, None);
            assert!(matches!(observer.standbys("").await, Err(Error::Name(_))));
        }

        let mut watch = observer.watch().every(Duration::from_millis(20));
        let first = watch.changed().await.unwrap();
        assert_eq!(first.elections.len(), 1);
        leader.stop().await.unwrap();
        standby.leads().await;
        loop {
            let election = watch.changed().await.unwrap().of(&Name::from("job"));
            if election.leader.is_some_and(|it| it.identity.as_deref() == Some("b")) {
                break;
            }
        }
        standby.stop().await.unwrap();
        assert_eq!(observer.leaders().await.unwrap(), []);
    })
    .await;
}

/// C-06: names of all sorts arrive as they were given.
#[tokio::test]
async fn names_of_all_sorts_are_found() {
    on_every_store(async |stage| {
        let (log, locker) = (Log::default(), stage.locker(quick("a")));
        let mut members = Vec::new();
        for name in odd_names() {
            let mut member = Member::on(&locker, &name, "a", &log);
            member.leads().await;
            members.push(member);
        }
        let elections = stage.locker(quick("o")).observer().leaders().await.unwrap();
        let found: BTreeSet<_> = elections.iter().filter_map(|it| it.name.clone()).collect();
        assert_eq!(found, odd_names().iter().map(Name::from).collect());
        for member in members {
            member.stop().await.unwrap();
        }
    })
    .await;
}

/// C-06, F-06: an answer of any size, in one statement.
#[tokio::test]
async fn a_thousand_names_of_one_locker_are_found() {
    on_every_store(async |stage| {
        // A file for each name: many systems allow a process 1,024.
        let count = if stage.kind() == "files" { 400 } else { 1_000 };
        // Beside a thousand jobs on the one thread of this test, an answer takes its time.
        let patient = |who: &str| quick(who).query_timeout(Duration::from_secs(20));
        let (locker, shutdown) = (stage.locker(patient("a")), CancellationToken::new());
        let mut runs = JoinSet::new();
        for n in 0..count {
            let candidate = locker.candidate(format!("job number {n}")).until(shutdown.clone());
            runs.spawn(candidate.run(async |lease: Lease| {
                lease.cancelled().await;
                Ok::<_, Infallible>(())
            }));
        }
        let observer = stage.locker(patient("o")).observer();
        let mut elections = Vec::new();
        while elections.len() < count {
            elections = observer.leaders().await.unwrap();
        }
        assert_eq!(elections.len(), count);
        let is_answered = |it: &leasehold::Election| {
            it.name.is_some() && it.leader.as_ref().unwrap().role == Some(Role::Leading)
        };
        while !elections.iter().all(is_answered) {
            elections = observer.leaders().await.unwrap();
        }
        shutdown.cancel();
        while let Some(run) = runs.join_next().await {
            assert_eq!(run.unwrap().unwrap(), None);
        }
    })
    .await;
}

/// F-37, C-06: who took over is told; a leader that forbids it leads on, until its own job steps down.
#[tokio::test]
async fn a_hand_over_that_is_asked_for_says_who_took_over() {
    on_every_store(async |stage| {
        let log = Log::default();
        let observer = stage.locker(quick("o")).observer();
        assert_eq!(observer.hand_over("job").await.unwrap(), Handover::NobodyLeads);

        let mut a = Member::join(stage, sleepy("a"), "job", &log);
        a.leads().await;
        let mut b = Member::join(stage, quick("b").answer_step_down(false), "job", &log);
        b.stands_by().await;
        let Handover::TakenOver { from, by } = observer.hand_over("job").await.unwrap() else { panic!() };
        assert_eq!((from.identity.as_deref(), by.identity.as_deref()), (Some("a"), Some("b")));

        let lease = b.leads().await;
        let refused = observer.hand_over("job").await.unwrap();
        assert!(
            matches!(&refused, Handover::Refused { leader } if leader.identity.as_deref() == Some("b")),
            "{refused:?}"
        );
        observer.step_down("job").await.unwrap();
        // What was sent before has been heard: answers come after it.
        assert_eq!(leader_of(&observer, "job").await.unwrap().role, Some(Role::Leading));
        assert_eq!(lease.reason(), None);
        a.stop().await.unwrap();
        lease.step_down();
        assert_eq!(over(&lease).await, Some(Reason::SteppedDown));
        b.stop().await.unwrap();

        let mut alone = Member::join(stage, quick("alone"), "job", &log);
        alone.leads().await;
        let Handover::TakenOver { from, by } = observer.hand_over("job").await.unwrap() else { panic!() };
        assert_eq!((from.identity, from.term), (by.identity.clone(), Some(1)));
        assert_eq!((by.identity.as_deref(), by.term), (Some("alone"), Some(2)));
        alone.stop().await.unwrap();
    })
    .await;
}

/// C-06, D06: whatever anybody sends, and as much as they like, costs no lease.
#[cfg(unix)]
#[tokio::test]
async fn a_flood_of_datagrams_costs_no_lease() {
    use std::os::unix::net::UnixDatagram;
    use std::sync::atomic::{AtomicBool, Ordering};

    let (stage, log) = (Stage::files(), Log::default());
    let mut leader = Member::join(&stage, quick("a"), "job", &log);
    let lease = leader.leads().await;
    let entries = std::fs::read_dir(stage.dir().path().join("peers")).unwrap();
    let sockets: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    let over = std::sync::Arc::new(AtomicBool::new(false));
    let (until_then, trust) = (std::sync::Arc::clone(&over), leader.locker.bounds().trust);
    let flood = std::thread::spawn(move || {
        let sender = UnixDatagram::unbound().unwrap();
        let mut number = 0_u64;
        while !until_then.load(Ordering::Relaxed) {
            number += 1;
            let roll_call = format!("roll-call {number:016x} nobody.sock");
            let present = format!("present {number:016x} - - x y 1/1 l:::{}", "x".repeat(900));
            for text in ["nonsense", &roll_call, &present, "present", "freed 00"] {
                // A sender that blocks is a flood as fast as it is taken.
                for socket in &sockets {
                    sender.send_to(text.as_bytes(), socket).ok();
                }
            }
        }
        number
    });
    let deadline = lease.deadline();
    while lease.deadline() < deadline + trust {
        assert!(lease.check().await, "{:?}", lease.reason());
    }
    let observer = stage.locker(quick("o")).observer();
    assert_eq!(leader_of(&observer, "job").await.unwrap().identity.as_deref(), Some("a"));
    over.store(true, Ordering::Relaxed);
    assert!(flood.join().unwrap() > 100);
    assert_eq!(lease.reason(), None);
    leader.stop().await.unwrap();
}

#[cfg(all(unix, feature = "postgres"))]
mod postgres {
    use leasehold::{Key, Kind, Locker, Options};
    use sqlx::Connection as _;

    use super::*;
    use crate::support::postgres::Cluster;

    fn locker(cluster: &Cluster, user: &str, options: Options) -> Locker {
        Locker::postgres(cluster.options().username(user), options).unwrap()
    }

    /// C-06, D06
    #[tokio::test]
    async fn a_flood_of_notifications_costs_no_lease() {
        let (stage, log) = (Stage::postgres(), Log::default());
        let Stage::Postgres(postgres) = &stage else { unreachable!("it is PostgreSQL") };
        let mut leader = Member::join(&stage, quick("a"), "job", &log);
        let lease = leader.leads().await;
        let (deadline, trust) = (lease.deadline(), leader.locker.bounds().trust);
        let mut other = postgres.database.connect().await;
        let payloads = "'roll-call ' || lpad(to_hex(i), 16, '0')";
        let mut floods = 0;
        while lease.deadline() < deadline + trust || floods < 3 {
            let flood = format!(
                "SELECT pg_notify('leasehold', {payloads}), pg_notify('leasehold', 'nonsense' || i), \
                 pg_notify('leasehold', 'present ' || repeat('x', 1000) || i) FROM generate_series({}, {}) i",
                floods * 2_000,
                floods * 2_000 + 1_999
            );
            sqlx::raw_sql(sqlx::AssertSqlSafe(flood)).execute(&mut other).await.unwrap();
            floods += 1;
            assert!(lease.check().await, "{:?}", lease.reason());
        }
        let observer = stage.locker(quick("o")).observer();
        assert_eq!(leader_of(&observer, "job").await.unwrap().identity.as_deref(), Some("a"));
        assert_eq!(lease.reason(), None);
        leader.stop().await.unwrap();
        other.close().await.unwrap();
    }

    /// C-06: by its key, with its process; and by its name, for who knows it.
    #[tokio::test]
    async fn a_plain_advisory_lock_is_shown_as_what_nobody_answers_for() {
        let (cluster, log) = (Cluster::new(), Log::default());
        let key = Key::of(Kind::Lease, "job");
        let mut other = cluster.connect().await;
        let taken = format!("SELECT pg_advisory_lock({}), pg_advisory_lock(1, 2)", key.get());
        sqlx::raw_sql(sqlx::AssertSqlSafe(taken)).execute(&mut other).await.unwrap();
        let pid = cluster.admin().holder(key.get());
        let observer = locker(&cluster, "postgres", quick("o")).observer();
        let elections = observer.leaders().await.unwrap();
        let pair = Key::of(Kind::Lease, Name::key_pair(1, 2));
        assert_eq!(elections.iter().map(|it| it.key).collect::<Vec<_>>(), [key, pair], "and no marker");
        assert!(
            elections[1].to_string().starts_with("key (1, 2): tests does not answer"),
            "{}",
            elections[1]
        );
        let leader = elections[0].leader.clone().unwrap();
        assert_eq!((elections[0].name.clone(), elections[0].key), (None, key));
        assert_eq!((leader.pid, leader.identity.as_deref(), leader.role), (pid, Some("tests"), None));
        assert_eq!(leader.address.as_deref(), Some("a Unix socket"));
        assert!(leader.session_age.is_some() && leader.silent_for.is_some(), "{leader:?}");
        assert_eq!(leader_of(&observer, "job").await.unwrap().pid, pid);

        // One that waits and does not answer, as a frozen standby does.
        let waiting = "'leasehold/v1/waiting'::bytea || '\\x00'::bytea || ";
        let waits = format!(
            "SELECT pg_advisory_lock_shared(('x' || encode(substr(sha256({waiting}'{key}'::bytea), 1, 8), \
             'hex'))::bit(64)::bigint)"
        );
        let mut waiter = cluster.connect().await;
        sqlx::raw_sql(sqlx::AssertSqlSafe(waits)).execute(&mut waiter).await.unwrap();
        let election = observer.snapshot().await.unwrap().of(&Name::from("job"));
        assert_eq!(who(&election.standbys), [("tests", None)]);
        waiter.close().await.unwrap();

        // A candidate knows the name.
        let standby = locker(&cluster, "postgres", quick("b"));
        let member = Member::on(&standby, "job", "b", &log);
        member.stands_by().await;
        let elections = observer.leaders().await.unwrap();
        assert_eq!(elections[0].name, Some(Name::from("job")));
        assert_eq!(who(&elections[0].standbys), [("b", Some(Role::Standby))]);
        assert_eq!(elections[0].leader.as_ref().unwrap().pid, pid);
        member.stop().await.unwrap();
        other.close().await.unwrap();
    }

    /// C-06: PostgreSQL hides from it where the others come from, and nothing else that is needed.
    #[tokio::test]
    async fn a_role_that_may_not_see_the_sessions_of_others_sees_who_leads() {
        let (cluster, log) = (Cluster::new(), Log::default());
        cluster.admin().sql("CREATE ROLE plain LOGIN");
        let leading = locker(&cluster, "postgres", quick("a"));
        let mut leader = Member::on(&leading, "job", "a", &log);
        leader.leads().await;
        let standing_by = locker(&cluster, "plain", quick("b"));
        let standby = Member::on(&standing_by, "job", "b", &log);
        standby.stands_by().await;
        let observer = locker(&cluster, "plain", quick("o")).observer();
        let election = observer.snapshot().await.unwrap().of(&Name::from("job"));
        let found = election.leader.unwrap();
        assert_eq!((found.identity.as_deref(), found.role), (Some("a"), Some(Role::Leading)));
        assert!(found.pid.is_some() && found.address.is_none(), "{found:?}");
        assert_eq!(who(&election.standbys), [("b", Some(Role::Standby))]);
        assert!(election.standbys[0].address.is_some(), "its own sessions it sees");
        let Handover::TakenOver { by, .. } = observer.hand_over("job").await.unwrap() else { panic!() };
        assert_eq!(by.identity.as_deref(), Some("b"));
        standby.stop().await.unwrap();
        leader.stop().await.unwrap();
    }
}

/// L-15: locks that are held, and waited for, are no elections.
#[tokio::test]
async fn critical_sections_are_no_elections() {
    on_every_store(async |stage| {
        let log = Log::default();
        let mut a = Member::join(stage, quick("a"), "job", &log);
        a.leads().await;
        let b = stage.locker(quick("b"));
        let held = (a.locker.lock("job").lock().await.unwrap(), b.lock("own").lock().await.unwrap());
        let read = b.rw_lock("catalogue").read().await.unwrap();
        let waits = tokio::spawn({
            let lock = a.locker.lock("own");
            async move { lock.lock().await.unwrap() }
        });
        let observer = b.observer();
        for _ in 0..3 {
            let elections = observer.snapshot().await.unwrap().elections;
            let names: Vec<_> = elections.iter().map(|it| it.name.as_ref().map(Name::as_str)).collect();
            assert_eq!(names, [Some("job")], "{elections:?}");
        }
        drop((held, read));
        drop(waits.await.unwrap());
        a.stop().await.unwrap();
    })
    .await;
}
