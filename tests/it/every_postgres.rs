//! Once per interval on PostgreSQL: its table, what a crash leaves of it, and whose clock counts.

use std::convert::Infallible;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use leasehold::{CancellationToken, Crashed, EveryError, Lease, Locker, Name, Once, Slot, SlotState};
use sqlx::postgres::PgConnectOptions;
use tokio::task::JoinSet;

use crate::support::postgres::{Cluster, Database, Login, Stop};
use crate::support::replica::{Lines, PROGRAM, Replica};
use crate::support::{Stage, quick, until};

/// Where no slot but the first one comes in a test: one begins every 365 days since 1970.
const LONG: Duration = Duration::from_hours(24 * 365);

fn locker(target: PgConnectOptions, who: &str) -> Locker {
    // On a busy machine a second is no time.
    Locker::postgres(target, quick(who).query_timeout(Duration::from_secs(10))).unwrap()
}

fn user(cluster: &Cluster, user: &str) -> PgConnectOptions {
    cluster.url(user, "", "postgres").parse().unwrap()
}

/// Serves the present slot, and tells which one it is, and which attempt.
async fn serve(locker: &Locker, name: impl Into<Name>) -> Result<Once<(u64, u32)>, EveryError> {
    locker.every(name, LONG).once(async |slot: Slot| Ok((slot.number, slot.run))).await
}

/// E-07: none of the other verbs needs a table; and those who need it first make it, all at the same time.
#[tokio::test]
async fn the_table_is_made_by_whoever_needs_it_first() {
    let database = Database::new();
    let exists =
        || database.admin().one::<String>("SELECT (to_regclass('leasehold.slots') IS NOT NULL)::text");
    let first = locker(database.options(), "first");
    first.lock("job").lock().await.unwrap().release().await.unwrap();
    first.rw_lock("job").read().await.unwrap().release().await.unwrap();
    let led = first.run("job", async |lease: Lease| Ok::<_, Infallible>(lease.fencing_token().await.is_ok()));
    assert_eq!(led.await.unwrap(), Some(true));
    first.close().await;
    assert_eq!(exists(), "false");

    for round in 0..5 {
        database.admin().sql("DROP SCHEMA IF EXISTS leasehold CASCADE");
        let lockers: Vec<Locker> =
            (0..12).map(|n| locker(database.options(), &format!("r{round}-{n}"))).collect();
        for locker in &lockers {
            // All of them are connected before.
            locker.lock("other").lock().await.unwrap().release().await.unwrap();
        }
        let mut tasks = JoinSet::new();
        for locker in &lockers {
            let locker = locker.clone();
            tasks.spawn(async move { serve(&locker, "job").await.unwrap() });
        }
        let all = tasks.join_all().await;
        let ran = all.iter().filter(|it| matches!(it, Once::Ran(_))).count();
        assert_eq!(ran, 1, "round {round}: {all:?}");
        for locker in lockers {
            locker.close().await;
        }
    }
    assert_eq!(exists(), "true");
}

/// E-07: the table is dropped in the middle of a run: the schedule goes on, with a table that is made anew.
#[tokio::test]
async fn a_table_that_somebody_drops_is_made_anew() {
    let database = Database::new();
    let a = locker(database.options(), "a");
    let (numbers, done) = (std::sync::Mutex::new(Vec::new()), CancellationToken::new());
    let every = a.every("job", Duration::from_secs(1)).until(done.clone());
    let run = every.run(async |slot: Slot| {
        database.admin().sql("DROP SCHEMA leasehold CASCADE");
        let mut numbers = numbers.lock().unwrap();
        numbers.push(slot.number);
        if numbers.len() == 3 {
            done.cancel();
        }
        Ok::<_, Infallible>(())
    });
    run.await.unwrap();
    a.close().await;
    assert!(numbers.into_inner().unwrap().is_sorted());
}

/// E-07: what a person reads in the table; names that not every database can write, and keys of both kinds.
#[tokio::test]
async fn the_table_shows_who_has_served_what() {
    let database = Database::new();
    let a = locker(database.options(), "a'b\\c");
    for name in
        [Name::from("job"), Name::from("täglich 'x' \\ \n"), Name::key(i64::MIN), Name::key_pair(1, -2)]
    {
        let Once::Ran((number, run)) = serve(&a, name.clone()).await.unwrap() else { panic!("{name:?}") };
        let rows = database.admin().sql(&format!(
            "SELECT name, slot, run, phase, holder, space, extract(epoch FROM began)::int8 FROM leasehold.slots \
             WHERE written = (SELECT max(written) FROM leasehold.slots) AND slot = {number} AND run = {run}"
        ));
        let space = if name == Name::key_pair(1, -2) { "2" } else { "1" };
        assert_eq!(rows[0][3..6], ["finished", "a'b\\c", space], "{rows:?}");
        assert_eq!(rows[0][6], (number * LONG.as_secs()).to_string());
        assert!(rows[0][0].is_ascii(), "{rows:?}");
        let Once::Taken(taken) = serve(&a, name.clone()).await.unwrap() else { panic!("{name:?}") };
        assert_eq!((taken.state, taken.by.as_deref()), (SlotState::Served, Some("a'b\\c")));
    }
    assert_eq!(database.admin().one::<u32>("SELECT count(*) FROM leasehold.slots"), 4);
    a.close().await;
}

/// E-07: a role that may not make the table is told what to run, by whom; that is enough.
#[tokio::test]
async fn a_role_that_may_not_make_the_table_gets_the_sql_for_it() {
    let cluster = Cluster::new();
    cluster.admin().sql("CREATE ROLE app LOGIN");
    let a = locker(user(&cluster, "app"), "a");
    let body = async |_: Slot| -> Result<(), Infallible> { panic!("there is no table") };
    let refused = a.every("job", LONG).run(body).await.unwrap_err();
    let EveryError::Forbidden { reason } = &refused else { panic!("{refused:?}") };
    assert!(reason.contains("permission denied") && reason.contains("leasehold schema"), "{reason}");
    let refused = serve(&a, "job").await.unwrap_err();
    assert!(matches!(refused, EveryError::Forbidden { .. }), "{refused:?}");
    // The lock of the name is nobody's.
    locker(user(&cluster, "app"), "b")
        .lock("job")
        .try_lock()
        .await
        .unwrap()
        .unwrap()
        .release()
        .await
        .unwrap();

    let (_, sql) = reason.split_once(":\n").unwrap();
    assert_eq!(sql, leasehold::postgres::slots_schema(Some("app")));
    cluster.admin().sql(sql);
    cluster.admin().sql(sql);
    assert!(matches!(serve(&a, "job").await.unwrap(), Once::Ran((_, 1))));

    // It may look, and not write.
    cluster.admin().sql("REVOKE INSERT, UPDATE ON leasehold.slots FROM app");
    let refused = serve(&a, "other").await.unwrap_err();
    assert!(matches!(&refused, EveryError::Forbidden { reason } if reason.contains("GRANT")), "{refused:?}");
    a.close().await;
}

/// E-07, D16: whatever the role and the database bring along.
#[tokio::test]
async fn hostile_defaults_of_a_role_change_nothing() {
    let cluster = Cluster::new();
    let admin = cluster.admin();
    admin.sql("CREATE ROLE app LOGIN; GRANT CREATE ON DATABASE postgres TO app; CREATE SCHEMA evil");
    admin.sql("GRANT ALL ON SCHEMA evil TO app; CREATE TABLE evil.slots (key int)");
    for setting in [
        "default_transaction_read_only = on",
        "default_transaction_isolation = serializable",
        "synchronous_commit = off",
        "search_path = evil",
        "\"TimeZone\" = 'Asia/Kathmandu'",
        "\"DateStyle\" = 'SQL, DMY'",
        "\"IntervalStyle\" = 'sql_standard'",
        "standard_conforming_strings = off",
        "extra_float_digits = -15",
    ] {
        admin.sql(&format!("ALTER ROLE app SET {setting}"));
    }
    let (a, b) = (locker(user(&cluster, "app"), "a"), locker(user(&cluster, "app"), "b"));
    let Once::Ran((number, 1)) = serve(&a, "job").await.unwrap() else { panic!("it is free") };
    for locker in [&a, &b] {
        let Once::Taken(taken) = serve(locker, "job").await.unwrap() else { panic!("it is served") };
        assert_eq!((taken.number, taken.state), (Some(number), SlotState::Served));
    }
    let now: u64 = admin.one("SELECT extract(epoch FROM clock_timestamp())::int8");
    assert_eq!(number, now / LONG.as_secs());
    for locker in [a, b] {
        locker.close().await;
    }
}

/// E-03, E-07: a claim outlives a crash of the server right after it, also where the role does not wait for its commits.
#[tokio::test]
async fn a_claim_outlives_a_crash_of_the_server() {
    let mut cluster = Cluster::with(Login::Trust, &["wal_writer_delay=10s"]);
    cluster.admin().sql("ALTER ROLE postgres SET synchronous_commit = off");
    // The table itself outlives it too.
    let first = locker(cluster.options(), "first");
    assert!(matches!(serve(&first, "warm-up").await.unwrap(), Once::Ran(_)));
    first.close().await;
    for round in 0..5 {
        let name = format!("job {round}");
        let a = locker(cluster.options(), "a");
        let crashed = a.every(&name, LONG).once(async |slot: Slot| {
            cluster.stop(Stop::Immediate).await;
            slot.cancelled().await;
            Ok::<_, EveryError>(())
        });
        let crashed = crashed.await;
        assert!(matches!(crashed, Err(EveryError::Lost { .. })), "{crashed:?}");
        cluster.start().await;
        let b = locker(cluster.options(), "b");
        let Once::Taken(taken) = serve(&b, &name).await.unwrap() else { panic!("round {round}: it is lost") };
        assert_eq!((taken.state, taken.by.as_deref()), (SlotState::Started, Some("a")));
        let again = b.every(&name, LONG).crashed(Crashed::RetryOnce);
        let again = again.once(async |slot: Slot| Ok::<_, EveryError>(slot.run)).await.unwrap();
        assert_eq!(again, Once::Ran(2));
        for locker in [a, b] {
            locker.close().await;
        }
    }
}

/// E-03, D36: a process is killed in the middle of a run: that slot is not repeated, and later ones are served.
#[tokio::test]
async fn the_slot_of_a_killed_process_is_not_repeated() {
    for stage in [Stage::files(), Stage::postgres()] {
        let lines = Lines::new();
        let mut a = Replica::spawn(&stage, &quick("a"), "job", &lines, "serve-stuck");
        lines.wait_for("a slot", 0).await;
        let mut b = Replica::spawn(&stage, &quick("b"), "job", &lines, "serve");
        a.kill();
        let mut seen = 0;
        for _ in 0..3 {
            seen = lines.wait_for("b slot", seen).await;
        }
        b.terminate();
        assert!(b.wait().await.success());
        let slots = slots(&lines);
        assert_eq!(slots[0].0, "a");
        assert!(slots[1..].iter().all(|(who, ..)| who == "b"), "{slots:?}");
        assert!(slots[1].1 > slots[0].1, "{slots:?}");
        assert_consecutive(&slots[1..]);
        assert!(slots.iter().all(|(_, _, run)| *run == 1), "{slots:?}");
    }
}

/// E-03, D36: or it is repeated once, by another process, as soon as the store has freed its lock.
#[tokio::test]
async fn the_slot_of_a_killed_process_is_repeated_once_on_demand() {
    for stage in [Stage::files(), Stage::postgres()] {
        let lines = Lines::new();
        let mut a = Replica::spawn(&stage, &quick("a"), "job", &lines, "serve-yearly-stuck");
        let seen = lines.wait_for("a slot", 0).await;
        let mut b = Replica::spawn(&stage, &quick("b"), "job", &lines, "serve-yearly-again");
        a.kill();
        lines.wait_for("b slot", seen).await;
        b.terminate();
        assert!(b.wait().await.success());
        let slots = slots(&lines);
        assert_eq!((slots[0].1, slots[0].2), (slots[1].1, 1));
        assert_eq!(slots[1].2, 2, "{slots:?}");
    }
}

/// E-04: the clocks of two processes are off by an hour, and another one is killed and started again: nothing is changed by
/// that.
#[tokio::test]
async fn the_clocks_of_the_clients_change_nothing() {
    let (stage, lines) = (Stage::postgres(), Lines::new());
    let mut ahead = with_clock("+3600s", &stage, "ahead", &lines, &["serve"]);
    let mut behind = with_clock("-3600s", &stage, "behind", &lines, &["serve"]);
    let mut right = Replica::spawn(&stage, &quick("right"), "job", &lines, "serve");
    for count in [3, 6] {
        until("slots are served", || lines.all().len() >= count).await;
        right.kill();
        right = Replica::spawn(&stage, &quick("right"), "job", &lines, "serve");
    }
    until("slots are served", || lines.all().len() >= 9).await;
    for replica in [&mut ahead, &mut behind, &mut right] {
        replica.terminate();
        assert!(replica.wait().await.success());
    }
    let slots = slots(&lines);
    assert!(slots.windows(2).all(|pair| pair[0].1 < pair[1].1), "{slots:?}");
    let now = server_seconds(&stage);
    assert!(slots.iter().all(|(_, number, _)| (now - 600..=now).contains(number)), "it is {now}: {slots:?}");
}

/// E-04: the twin, which shows as well that the clock is off: what goes by its own clock serves slots that have not come.
#[tokio::test]
async fn a_client_that_goes_by_its_own_clock_is_found_out() {
    let (stage, lines) = (Stage::postgres(), Lines::new());
    let mut ahead = with_clock("+3600s", &stage, "ahead", &lines, &["serve", "client-clock"]);
    lines.wait_for("ahead slot", 0).await;
    ahead.terminate();
    assert!(ahead.wait().await.success());
    let now = server_seconds(&stage);
    assert!(slots(&lines)[0].1 > now + 3000, "it is {now}: {:?}", lines.all());
}

/// Who has served which slot, and which attempt it was.
fn slots(lines: &Lines) -> Vec<(String, u64, u32)> {
    let read = |line: String| {
        let words: Vec<&str> = line.split(' ').collect();
        (words[0].to_owned(), words[2].parse().unwrap(), words[3].parse().unwrap())
    };
    lines.all().into_iter().map(read).collect()
}

/// As that of `every`: after the first one.
fn assert_consecutive(slots: &[(String, u64, u32)]) {
    assert!(slots[1..].windows(2).all(|pair| pair[1].1 == pair[0].1 + 1), "{slots:?}");
}

/// Which slot of one second it is.
fn server_seconds(stage: &Stage) -> u64 {
    let Stage::Postgres(postgres) = stage else { panic!("it has no clock of its own") };
    postgres.database.admin().one("SELECT floor(extract(epoch FROM clock_timestamp()))::int8")
}

/// A replica whose wall clock is off, and no other clock: as on a host where nobody sets it.
fn with_clock(off_by: &str, stage: &Stage, who: &str, lines: &Lines, how: &[&str]) -> Replica {
    let mut command = Command::new(PROGRAM);
    command
        .env("LD_PRELOAD", faketime())
        .env("FAKETIME", off_by)
        .env("FAKETIME_DONT_FAKE_MONOTONIC", "1")
        .env("FAKETIME_DISABLE_SHM", "1");
    Replica::by(command, &stage.url(), &quick(who), "job", lines, how)
}

fn faketime() -> PathBuf {
    let folders = ["/usr/lib", "/usr/lib64", "/usr/local/lib"].map(PathBuf::from);
    let below = std::fs::read_dir("/usr/lib").unwrap().flatten().map(|entry| entry.path());
    let library = |folder: PathBuf| folder.join("faketime/libfaketimeMT.so.1");
    let mut libraries = folders.into_iter().chain(below).map(library);
    libraries.find(|path| path.exists()).expect("libfaketime: see scripts/install-test-servers")
}
