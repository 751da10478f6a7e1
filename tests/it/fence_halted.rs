//! A server process that is halted while it exits, with thousands of locks, some of them freed.

use std::collections::HashSet;
use std::time::Duration;

use leasehold::{Fenced, Key, Kind, Lease, LockGuard, Locker, Options, Sabotage, State};
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, Connection as _, Row as _};
use tokio::task::JoinSet;

use crate::fence_terms::{begin_fenced, term_key, write_and_commit};
use crate::support::postgres::{Cluster, Login, Traced};
use crate::support::{Log, Member, quick, until};

/// That none of so many rounds shows the state is as likely as 1 in 100,000.
const MOST_ROUNDS: usize = 30;

/// The two halves of a key as the lock table shows them, and which space it is of.
type Shown = (u32, u32, i16);

fn shown(key: Key) -> Shown {
    let number = key.get().cast_unsigned();
    let half = |number: u64| u32::try_from(number & 0xffff_ffff).unwrap();
    (half(number >> 32), half(number), 1)
}

fn shown_term(lease: &Lease) -> Shown {
    let key = term_key(lease).replace("::pg_catalog.int4", "").replace('\'', "");
    let mut halves = key.split(',').map(|half| half.parse::<i32>().unwrap().cast_unsigned());
    (halves.next().unwrap(), halves.next().unwrap(), 2)
}

/// How many locks the holder has besides, each with a term key.
const OTHERS: usize = 5_000;

/// How many names it leads. Of some of them the server frees the lease before the term key.
const NAMES: usize = 32;

/// Long beside what the server takes for a statement about many names.
fn patient(who: &str) -> Options {
    quick(who).query_timeout(Duration::from_secs(5)).max_held(2 * OTHERS)
}

/// A server process that was halted while it exits, and what it still holds.
struct Halted {
    process: Traced,
    held: HashSet<Shown>,
}

/// Lets the server end a session, and halts its process when it has freed some of what it holds, and not the rest. `None` if
/// it was never seen like that.
///
/// It frees one part of the lock table after the other. Nobody can look at the table while it is in the middle of a part:
/// who does waits, and when it is through with that part it makes a system call to wake them. There it is halted.
async fn halt_while_it_exits(
    cluster: &Cluster,
    pid: i32,
    is_seen: impl Fn(&HashSet<Shown>) -> bool,
) -> Option<Halted> {
    let mut connection = cluster.connect().await;
    let sql = format!(
        "SELECT classid::int8, objid::int8, objsubid FROM pg_locks WHERE locktype = 'advisory' AND pid = {pid}"
    );
    let mut process = Traced::attach(pid).await;
    cluster.admin().terminate(pid);
    loop {
        let look = sqlx::raw_sql(AssertSqlSafe(sql.as_str())).fetch_all(&mut connection);
        let mut look = std::pin::pin!(look);
        let rows = loop {
            match tokio::time::timeout(Duration::from_millis(50), &mut look).await {
                Ok(rows) => break rows.unwrap(),
                Err(_) if process.step().await => {}
                Err(_) => return None,
            }
        };
        let half = |row: &PgRow, n: usize| u32::try_from(row.get::<i64, _>(n)).unwrap();
        let held: HashSet<Shown> = rows.iter().map(|row| (half(row, 0), half(row, 1), row.get(2))).collect();
        if is_seen(&held) {
            return Some(Halted { process, held });
        }
        if held.is_empty() || !process.step().await {
            return None;
        }
    }
}

/// T-02, T-04: the session holds 5,000 other locks, and its server process is halted while it exits: of some names the lease
/// is free, and the term key is not. Of these nobody starts before it is, nor while a transaction is open that the earlier
/// term could still fence. Its twin starts.
///
/// Whether a process can be halted in that state is chance, in about every third round: it goes on until one was.
/// [`a_term_begins_only_when_the_server_has_freed_all_of_an_earlier_one`](crate::fence_terms) needs no chance.
#[tokio::test]
async fn a_server_process_that_is_halted_while_it_exits_keeps_later_terms_from_beginning() {
    let cluster = Cluster::with(Login::Trust, &["max_locks_per_transaction=512"]);
    cluster.admin().sql("CREATE TABLE written (what text)");
    for round in 1..=MOST_ROUNDS {
        if halted(&cluster, round).await {
            return;
        }
    }
    panic!("in {MOST_ROUNDS} rounds the server process was never halted between a lease and its term key");
}

async fn halted(cluster: &Cluster, round: usize) -> bool {
    let log = Log::default();
    let locker = |options| Locker::postgres(cluster.options(), options).unwrap();
    let (a, b) = (locker(patient(&format!("a{round}"))), locker(patient(&format!("b{round}"))));
    let names: Vec<String> = (0..NAMES).map(|n| format!("job {n} of round {round}")).collect();
    let mut leading: Vec<_> = names.iter().map(|name| Member::on(&a, name, name, &log)).collect();
    let mut leases = Vec::new();
    for member in &mut leading {
        leases.push(member.leads().await);
    }
    let mut guards: Vec<LockGuard> = Vec::new();
    let mut asking = JoinSet::new();
    for n in 0..OTHERS {
        let lock = a.lock(format!("other {n} of round {round}")).fenced();
        asking.spawn(async move { lock.lock().await.unwrap() });
    }
    guards.extend(asking.join_all().await);
    let standing_by: Vec<_> = names.iter().map(|name| Member::on(&b, name, name, &log)).collect();
    for member in &standing_by {
        member.stands_by().await;
    }

    let runs: Vec<(Shown, Shown)> =
        leases.iter().map(|lease| (shown(Key::of(Kind::Lease, lease.name())), shown_term(lease))).collect();
    let pid = cluster.admin().backends(&format!("leasehold/a{round}"))[0];
    let is_between =
        |held: &HashSet<Shown>, (lease, term): &(Shown, Shown)| !held.contains(lease) && held.contains(term);
    let is_seen = |held: &HashSet<Shown>| runs.iter().filter(|keys| is_between(held, keys)).count() >= 1;
    let halted = halt_while_it_exits(cluster, pid, is_seen).await;
    let is_halted = halted.is_some();
    if let Some(Halted { process, held }) = halted {
        let between: Vec<&Lease> = leases
            .iter()
            .zip(&runs)
            .filter(|(_, keys)| is_between(&held, keys))
            .map(|(lease, _)| lease)
            .collect();
        let others: Vec<&LockGuard> = guards
            .iter()
            .filter(|guard| is_between(&held, &(shown(Key::of(Kind::Lock, guard.name())), shown_term(guard))))
            .collect();
        println!(
            "round {round}: halted with {} locks held; {} of {NAMES} names and {} of {OTHERS} locks are in between",
            held.len(),
            between.len(),
            others.len()
        );
        let starts = |lease: &Lease| log.count(&format!("{} start", lease.name()));
        let mut connection = cluster.connect().await;
        for lease in &between {
            let is_blocked = || [&a, &b].iter().any(|it| it.state(lease.name()) == State::Blocked);
            until("whoever has the lease waits for the rest", is_blocked).await;
            begin_fenced(&mut connection, lease).await;
            write_and_commit(&mut connection).await;
            assert_eq!(starts(lease), 1);
        }
        assert_eq!(cluster.admin().one::<usize>("SELECT count(*) FROM written"), between.len());
        if let Some(guard) = others.first() {
            assert!(b.lock(guard.name()).fenced().try_lock().await.unwrap().is_none());
            // The twin.
            let c = locker(patient(&format!("c{round}")).sabotage(Sabotage::NoTermLook));
            let beside = c.lock(guard.name()).fenced().try_lock().await.unwrap().expect("it does not look");
            begin_fenced(&mut connection, guard).await;
            write_and_commit(&mut connection).await;
            assert_eq!(cluster.admin().one::<usize>("SELECT count(*) FROM written"), between.len() + 1);
            beside.release().await.unwrap();
        }
        drop(process);
        for lease in &between {
            until("the next one starts", || starts(lease) == 2).await;
            let mut tx = connection.begin().await.unwrap();
            assert!(matches!(lease.fence(&mut tx).await, Err(Fenced::Over)));
        }
    }
    drop(guards);
    for member in leading.into_iter().chain(standing_by) {
        member.stop().await.unwrap();
    }
    tokio::join!(a.close(), b.close());
    is_halted
}
