//! Names that are not text: keys of programs without leasehold, and names in scopes.

use std::convert::Infallible;

use leasehold::{Handover, Lease, Name, NameError, RunError, Scope};

use crate::support::{Log, Member, on_every_store, quick, sleepy};

const INVOICES: Scope<u64> = Scope::new("invoice");
const BLOBS: Scope<[u8]> = Scope::new("blob");

fn all() -> [Name; 6] {
    [
        Name::key(42),
        Name::key_pair(1, 2),
        Name::key_pair(i32::MIN, -1),
        Name::autumn("nightly-cleanup"),
        INVOICES.name(&42),
        BLOBS.name(&[0, 255, b'\'', b'\n']),
    ]
}

/// L-19, L-20: a name of any sort is led, waited for, shown, asked for, handed over at once and fenced, on every store.
#[tokio::test]
async fn every_sort_of_name_does_what_text_does() {
    on_every_store(async |stage| {
        for name in all() {
            let log = Log::default();
            let mut leader = Member::join(stage, quick("a"), &name, &log);
            let lease = leader.leads().await;
            assert_eq!(lease.name(), &name);
            let token = lease.fencing_token().await.unwrap();
            let mut standby = Member::join(stage, sleepy("b"), &name, &log);
            standby.stands_by().await;
            assert!(lease.check().await, "{:?}", lease.reason());

            let observer = stage.locker(quick("o")).observer();
            let elections = observer.leaders().await.unwrap();
            let shown: Vec<_> = elections.iter().map(|it| it.name.clone().unwrap()).collect();
            assert_eq!((shown.as_slice(), shown[0].as_str()), (&[name.clone()][..], name.as_str()));
            assert_eq!(elections[0].standbys.len(), 1, "{}", elections[0]);
            let handed_over = observer.hand_over(&name).await.unwrap();
            let Handover::TakenOver { by, .. } = handed_over else { panic!("{name}: {handed_over:?}") };
            assert_eq!(by.identity.as_deref(), Some("b"));

            let lease = standby.leads().await;
            assert!(lease.fencing_token().await.unwrap() > token, "{name}");
            leader.stop().await.unwrap();
            standby.stop().await.unwrap();
            assert_eq!(log.assert_one_at_a_time(), 2);
        }
    })
    .await;
}

/// L-15, L-19: names that contend for nothing in common are led side by side; `key:1,2` is no other name of the pair.
#[tokio::test]
async fn names_of_different_keys_do_not_contend() {
    on_every_store(async |stage| {
        let locker = stage.locker(quick("a"));
        let of_text = all().map(|name| Name::from(name.as_str()));
        let halves = [Name::key(1 << 32 | 2), Name::key_pair(0, 42)];
        let (log, mut members) = (Log::default(), Vec::new());
        for name in all().into_iter().chain(of_text).chain(halves) {
            let mut member = Member::on(&locker, &name, &format!("{name:?}"), &log);
            let lease = member.leads().await;
            members.push((member, lease));
        }
        for (_, lease) in &members {
            assert!(lease.check().await, "{:?}: {:?}", lease.name(), lease.reason());
        }
        locker.close().await;
        for (member, _) in members {
            assert_eq!(member.outcome().await.unwrap(), None);
        }
    })
    .await;
}

/// L-19: though the session is one and the same.
#[tokio::test]
async fn two_names_of_one_key_contend_on_one_locker_too() {
    on_every_store(async |stage| {
        let (log, locker) = (Log::default(), stage.locker(quick("a")));
        let mut one = Member::on(&locker, Name::autumn("nightly-cleanup"), "one", &log);
        one.leads().await;
        let mut two = Member::on(&locker, Name::key(8_196_277_404_596_522_564), "two", &log);
        two.stands_by().await;
        one.stop().await.unwrap();
        two.leads().await;
        two.stop().await.unwrap();
        assert_eq!(log.assert_one_at_a_time(), 2);
    })
    .await;
}

/// L-19: the keys by which sessions are told apart are nobody's.
#[tokio::test]
async fn the_key_of_a_marker_is_refused_as_a_name() {
    on_every_store(async |stage| {
        let locker = stage.locker(quick("a"));
        let name = Name::key_pair(i32::from_be_bytes(*b"leas"), 7);
        let error = locker.run(&name, async |_: Lease| Ok::<_, Infallible>(())).await.unwrap_err();
        assert!(matches!(error, RunError::Name(NameError::Reserved { second: 7, .. })), "{error:?}");
        assert_eq!(stage.sessions(), 0);
    })
    .await;
}

#[cfg(all(unix, feature = "postgres"))]
mod postgres {
    use std::time::Duration;

    use leasehold::{Key, Kind, Options, Reason, State};
    use sqlx::{AssertSqlSafe, Connection as _, PgConnection, Row as _};

    use super::*;
    use crate::support::member::over;
    use crate::support::postgres::Database;
    use crate::support::{Stage, until};

    /// So long that a machine that is busy with other tests does not come into play.
    fn patient(who: &str) -> Options {
        quick(who).query_timeout(Duration::from_secs(10))
    }

    /// The names of others, and what others give to `pg_advisory_lock`.
    fn of_others() -> [(Name, &'static str); 3] {
        [
            (Name::key(42), "42"),
            (Name::key_pair(1, -2), "1, -2"),
            (Name::autumn("nightly-cleanup"), "8196277404596522564"),
        ]
    }

    async fn ask(connection: &mut PgConnection, function: &str, arguments: &str) -> bool {
        let sql = AssertSqlSafe(format!("SELECT {function}({arguments})"));
        sqlx::raw_sql(sql).fetch_one(connection).await.unwrap().get(0)
    }

    /// L-19: a service moves over replica by replica; neither side ever leads beside the other.
    #[tokio::test]
    async fn a_plain_advisory_lock_and_its_name_exclude_each_other() {
        let stage = Stage::postgres();
        let Stage::Postgres(postgres) = &stage else { unreachable!("it is PostgreSQL") };
        for (name, arguments) in of_others() {
            let (log, mut old) = (Log::default(), postgres.database.connect().await);
            assert!(ask(&mut old, "pg_try_advisory_lock", arguments).await);
            let mut new = Member::join(&stage, patient("new"), &name, &log);
            new.stands_by().await;
            let polls = new.locker.last_answer();
            until("it has asked again", || new.locker.last_answer() > polls).await;
            assert_eq!(new.locker.state(&name), State::Standby);
            assert!(log.lines().is_empty(), "{name}: {log:?}");

            assert!(ask(&mut old, "pg_advisory_unlock", arguments).await);
            let lease = new.leads().await;
            assert!(!ask(&mut old, "pg_try_advisory_lock", arguments).await, "{name}");
            assert!(lease.check().await, "{:?}", lease.reason());
            new.stop().await.unwrap();
            assert!(ask(&mut old, "pg_try_advisory_lock", arguments).await, "{name}");
            old.close().await.unwrap();
        }
    }

    /// L-19, F-20: heartbeats go on with a pair held and another one waited for; a pair that is gone is told, and no
    /// other lease.
    #[tokio::test]
    async fn exactly_the_pair_that_is_gone_is_lost() {
        let (stage, log) = (Stage::postgres(), Log::default());
        let Stage::Postgres(postgres) = &stage else { unreachable!("it is PostgreSQL") };
        let locker = stage.locker(patient("a"));
        let mut other = postgres.database.connect().await;
        assert!(ask(&mut other, "pg_try_advisory_lock", "1, 3").await);
        let waiting = Member::on(&locker, Name::key_pair(1, 3), "waiting", &log);
        waiting.stands_by().await;
        let mut members = [Name::key_pair(1, 2), Name::key_pair(2, 1), Name::key(2), "text".into()]
            .map(|name| Member::on(&locker, &name, &format!("{name:?}"), &log));
        let mut leases = Vec::new();
        for member in &mut members {
            leases.push(member.leads().await);
        }
        let deadline = leases[0].deadline();
        let beats = 10 * Duration::from_millis(100);
        until("heartbeats go on", || leases[0].deadline() > deadline + beats).await;
        assert!(leases.iter().all(|lease| lease.reason().is_none()), "{leases:?}");

        let backend = postgres.database.admin().backends("leasehold/a")[0];
        postgres.proxy.slip_in(backend, "SELECT pg_advisory_unlock(1, 2)").unwrap();
        let reason = over(&leases[0]).await;
        assert!(matches!(reason, Some(Reason::Lost(_))), "{reason:?}");
        for lease in &leases[1..] {
            assert!(lease.check().await, "{:?}: {:?}", lease.name(), lease.reason());
        }
        members[0].leads().await;
        assert_eq!(postgres.database.admin().backends("leasehold/a"), [backend]);
        locker.close().await;
        for member in members.into_iter().chain([waiting]) {
            assert_eq!(member.outcome().await.unwrap(), None);
        }
        let left = "SELECT * FROM pg_locks WHERE locktype = 'advisory' AND pid <> ALL(SELECT pid FROM \
                    pg_locks WHERE locktype = 'advisory' AND classid = 1 AND objid = 3)";
        assert!(postgres.database.admin().sql(left).is_empty());
        other.close().await.unwrap();
    }

    /// L-15, L-20: the SQL of the documentation of `Key` gives the keys of scoped names.
    #[tokio::test]
    async fn the_documented_sql_computes_the_keys_of_scoped_names() {
        let documented = "SELECT ('x' || encode(substr(sha256('leasehold/v1/lock+scope'::bytea || '\\x00'::bytea\n\
                          ///        || convert_to('7:invoice' || 42, 'UTF8')), 1, 8), 'hex'))::bit(64)::bigint";
        assert!(include_str!("../../src/name.rs").contains(documented));
        let sql = documented.replace("///", "");
        let text = Scope::<str>::new("caf\u{e9}");
        let database = Database::new();
        for (framed, name) in [
            ("convert_to('7:invoice' || 42, 'UTF8')", INVOICES.name(&42)),
            ("convert_to('7:invoice' || 18446744073709551615, 'UTF8')", INVOICES.name(&u64::MAX)),
            ("convert_to('5:caf\u{e9}cafe\u{301}', 'UTF8')", text.name("cafe\u{301}")),
            ("'4:blob'::bytea || '\\x00ff'::bytea", BLOBS.name(&[0, 255])),
        ] {
            for (label, kind) in [("lock", Kind::Lock), ("lease", Kind::Lease), ("rwlock", Kind::RwLock)] {
                let sql = sql.replace("convert_to('7:invoice' || 42, 'UTF8')", framed);
                let key: i64 = database.admin().one(&sql.replace("lock+scope", &format!("{label}+scope")));
                assert_eq!(key, Key::of(kind, &name).get(), "{label} {name}");
            }
        }
    }
}
