//! The keys by which the lock manager itself keeps the transactions of a term from outliving it, without a table.
//!
//! | key | who holds it |
//! |---|---|
//! | the lease's | the session of the holder |
//! | a *term key* | the same session, from before the term begins until it releases the lease: a pair, whose first half belongs to the lease's key, and whose second half is a random number |
//! | the *barrier* | shared, each transaction that is fenced, to its end; alone and for a moment, who begins a term |
//!
//! *To begin a term*, whoever has just been granted the lease takes the barrier alone, by try: so no fenced transaction
//! is open. While it has the barrier it looks whether another session still has a term key of this lease: a server process that
//! dies frees what it held one key after the other, and the lease may be free before the term key. Then it takes a term key
//! of its own; the barrier goes back at the end of the statement, whose answer is waited for. Where either was in the way it
//! keeps the lease, and tries again.
//!
//! *To fence a transaction* is one statement, in this order: if the term key can be shared, nobody has it, and the term is
//! over; if the barrier cannot be shared, somebody begins a later one, and the term is over; if the term key can be
//! shared *now*, it ended in between. Over is an error of the server: the transaction is aborted, whatever its client
//! makes of it. Otherwise it shares the barrier until it has ended, and no later term begins before that.
//!
//! Readers have a barrier and term keys of their own: who begins to read takes the barrier of those who write alone and that
//! of readers shared, and looks for the term keys of those who write; who begins to write, or to hold alone, takes both
//! alone and looks for both.
//!
//! Two limits. Of two names whose term keys have the same first half, one in 2^32, none begins while the other is held by
//! another session. And a fence that comes late is not refused where the number of its term, of 2^32, is that of the term
//! that goes on.
//!
//! The term key is released *before* the lease: the order of [`Work::sql`](super::statements::Work::sql).

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use sqlx::postgres::{PgConnection, PgRow};
use sqlx::{AssertSqlSafe, Connection as _, Row as _};

use super::statements::{HALVES, OURS, literal, quoted, values};
use crate::name::Key;
use crate::store::{Blocker, Mode};

/// By what a term fences transactions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fence {
    pub(super) term: Key,
    pub(super) barrier: Key,
    pub(super) place: Place,
    /// How long a fenced transaction may be idle.
    pub(super) limit: Duration,
}

/// Which locks a server takes for the same: those of one database.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) database: Arc<str>,
    /// Of which cluster, where every role may ask that.
    pub(super) cluster: Option<i64>,
}

/// What the error of [`Fence::sql`] says. It is in quotes in a message that may be in another language.
pub(crate) const OVER: &str = "leasehold: the term is over";
pub(crate) const NO_TRANSACTION: &str = "leasehold: a fence needs a transaction";
pub(crate) const OTHER_DATABASE: &str = "leasehold: the lease is on another database";
pub(crate) const REPLICA: &str = "leasehold: this is a read replica";
pub(crate) const NOT_FENCED: &str = "leasehold: not fenced";

/// The setting that a fence makes. It is an error of the server to set it to a sentence: that is how one is raised without
/// a function of our own.
const IDLE: &str = "idle_in_transaction_session_timeout";

/// A statement that aborts the transaction.
pub(crate) fn abort() -> String {
    format!("SELECT pg_catalog.set_config('{IDLE}', '{NOT_FENCED}', true)")
}

/// Which database this is, and whether every role may ask of which cluster: whose transactions are fenced need not be of
/// this one's role.
pub(super) const PLACE: &str = "SELECT pg_catalog.current_database()::pg_catalog.text, \
     pg_catalog.has_function_privilege('public', 'pg_catalog.pg_control_system()', 'EXECUTE')";

/// Of which cluster. A statement of its own: the server looks for the privilege before it runs any of the statement, also
/// where no CASE comes to it.
pub(super) const CLUSTER: &str = "SELECT (pg_catalog.pg_control_system()).system_identifier";

/// Operators that the search path of a transaction does not replace.
const EQ: &str = "OPERATOR(pg_catalog.=)";
const NE: &str = "OPERATOR(pg_catalog.<>)";

/// What fences a transaction, with what it is about as parameters: the two halves of the term key, the barrier, the limit
/// in milliseconds, the database, and its cluster where that is known.
///
/// Outside of a transaction block its time is that of its transaction, as for
/// [`try_xact_lock`](super::statements::try_xact_lock). Where nobody has the term key, it may be that nobody ever had it
/// there: only then it is looked where that is, which takes longer. A copy of a cluster is not told from it.
fn statement(knows_cluster: bool) -> String {
    let elsewhere = if knows_cluster {
        format!("WHEN (pg_catalog.pg_control_system()).system_identifier {NE} $6 THEN '{OTHER_DATABASE}' ")
    } else {
        String::new()
    };
    format!(
        "SELECT pg_catalog.set_config('{IDLE}', CASE WHEN pg_catalog.pg_is_in_recovery() THEN '{REPLICA}' \
         WHEN pg_catalog.statement_timestamp() {EQ} pg_catalog.transaction_timestamp() THEN '{NO_TRANSACTION}' \
         WHEN pg_catalog.pg_try_advisory_xact_lock_shared($1,$2) \
         THEN CASE WHEN pg_catalog.current_database() {NE} $5 THEN '{OTHER_DATABASE}' \
         {elsewhere}ELSE '{OVER}' END \
         WHEN NOT pg_catalog.pg_try_advisory_xact_lock_shared($3) THEN '{OVER}' \
         WHEN pg_catalog.pg_try_advisory_xact_lock_shared($1,$2) THEN '{OVER}' \
         WHEN pg_catalog.current_setting('{IDLE}')::interval OPERATOR(pg_catalog.>=) '1 ms' \
         AND pg_catalog.current_setting('{IDLE}')::interval OPERATOR(pg_catalog.<=) $4::interval \
         THEN pg_catalog.current_setting('{IDLE}') ELSE $4 END, true) AS fenced"
    )
}

impl Fence {
    /// The statement that fences the transaction that it is sent in: one message of the simple protocol, and one round trip.
    pub(crate) fn sql(&self) -> String {
        let Self { term, barrier, place, .. } = self;
        let (first, second) = term.pair().unwrap_or_default();
        let cluster = place.cluster.unwrap_or_default();
        // The name of the database last: it may contain anything.
        statement(place.cluster.is_some())
            .replace("$1", &format!("'{first}'::pg_catalog.int4"))
            .replace("$2", &format!("'{second}'::pg_catalog.int4"))
            .replace("$3", &format!("'{}'::pg_catalog.int8", barrier.get()))
            .replace("$4", &format!("'{}'::pg_catalog.text", self.limit()))
            .replace("$6", &format!("'{cluster}'::pg_catalog.int8"))
            .replace("$5", &quoted(&place.database))
    }

    /// Fences a transaction. The source of an error is the server or the connection.
    ///
    /// A connection that keeps prepared statements keeps this one as well, so that the server need not plan it each time:
    /// that takes as long again as the round trip. One that keeps none may be to a pooler that could not. Sent so, the time of
    /// the statement is never that of its transaction: it has to be known that there is one.
    pub(crate) async fn fence(&self, tx: &mut PgConnection) -> Result<(), sqlx::Error> {
        if tx.cached_statements_size() == 0 || !tx.is_in_transaction() {
            // To the last row, so that nothing of the answer is left in the connection.
            return sqlx::raw_sql(AssertSqlSafe(self.sql())).fetch_all(tx).await.map(drop);
        }
        let Self { term, barrier, place, .. } = self;
        let (first, second) = term.pair().unwrap_or_default();
        let query = sqlx::query(AssertSqlSafe(statement(place.cluster.is_some())))
            .bind(first)
            .bind(second)
            .bind(barrier.get());
        let query = query.bind(self.limit()).bind(&*place.database);
        let query = match place.cluster {
            Some(cluster) => query.bind(cluster),
            None => query,
        };
        query.execute(tx).await.map(drop)
    }

    fn limit(&self) -> String {
        format!("{}ms", self.limit.as_millis())
    }
}

/// What the transactions share that a lease in this mode fences.
pub(super) fn barrier(key: Key, mode: Mode) -> Key {
    key.barrier(mode == Mode::Read)
}

/// The keys of which none may be there when a term begins: the barriers, and the classes of the term keys.
///
/// Of readers, those of writers alone; and the barrier of readers may only be had by one who begins as they do: what is
/// about to begin to write, and dies, may have it a little longer than all else, and a fence would be refused by that.
struct InTheWay {
    barriers: [Key; 2],
    class: i32,
    read_class: Option<i32>,
}

impl InTheWay {
    fn of(key: Key, mode: Mode) -> Self {
        Self {
            barriers: [key.barrier(false), key.barrier(true)],
            class: key.term_class(false),
            read_class: (mode != Mode::Read).then(|| key.term_class(true)),
        }
    }

    fn classes(&self) -> impl Iterator<Item = i32> + use<> {
        [Some(self.class), self.read_class].into_iter().flatten()
    }
}

/// The classes of the term keys of a lease, in whatever mode.
pub(super) fn classes(key: Key) -> [i32; 2] {
    [key.term_class(false), key.term_class(true)]
}

/// What becomes of one who asks for a term that can fence.
pub(super) const GRANTED: &str = "granted";
pub(super) const FENCED: &str = "fenced";
pub(super) const BLOCKED: &str = "blocked";

/// One who begins a term: of what, and with which number if it may.
#[derive(Clone, Copy, Debug)]
pub(super) struct Beginner {
    pub(super) key: Key,
    pub(super) mode: Mode,
    pub(super) number: i32,
}

/// The columns of [`begin`]: the term key, the barriers, the classes of the term keys that may not be there.
pub(super) const COLUMNS: &str = "t1, t2, b, rb, c, rc";

impl Beginner {
    pub(super) fn term(&self) -> Key {
        Key::of_pair(self.key.term_class(self.mode == Mode::Read), self.number)
    }

    /// The values of [`COLUMNS`].
    pub(super) fn values(&self) -> String {
        let InTheWay { barriers: [barrier, read_barrier], class, read_class } =
            InTheWay::of(self.key, self.mode);
        let read_class = read_class.map_or_else(|| "NULL".to_owned(), |class| format!("'{class}'"));
        let [term, barrier, read_barrier] = [self.term(), barrier, read_barrier].map(literal);
        format!("{term},{barrier},{read_barrier},'{class}'::int4,{read_class}::int4")
    }
}

/// Which of the ways of [`begin`] to leave out: none, but for the twins of the tests.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Broken {
    pub(super) no_barrier: bool,
    pub(super) no_look: bool,
}

/// The statement that begins terms. `asks` are rows `n`, `o`, and [`COLUMNS`]: where the outcome `o` is `granted`, the
/// term begins or the outcome is `blocked`. Rows begin with this letter.
///
/// The barriers are those of the transaction that the message is: they are given back at its end, whatever becomes of it.
/// All are taken before the one look at the lock table, which the server takes only where a barrier was: it is the CASE of
/// `l` that orders, and the aggregate in it, which needs all rows of `b`.
pub(super) fn begin(letter: char, asks: &str, broken: Broken) -> String {
    let Broken { no_barrier, no_look } = broken;
    let take = "CASE WHEN NOT pg_catalog.pg_try_advisory_xact_lock(a.b) THEN false \
         WHEN a.rc IS NULL THEN pg_catalog.pg_try_advisory_xact_lock_shared(a.rb) \
         ELSE pg_catalog.pg_try_advisory_xact_lock(a.rb) END";
    let take = if no_barrier { "true" } else { take };
    let wants_look = if no_look { "false" } else { "(SELECT pg_catalog.bool_or(b.passes) FROM b)" };
    format!(
        "WITH a AS MATERIALIZED ({asks}), \
         b AS MATERIALIZED (SELECT a.*, CASE WHEN a.o = '{GRANTED}' THEN {take} END AS passes FROM a), \
         l AS MATERIALIZED (SELECT CASE WHEN {wants_look} THEN ARRAY(SELECT DISTINCT l.classid::int8 \
         FROM pg_catalog.pg_locks l WHERE {OURS} AND l.objsubid = 2 AND l.mode = 'ExclusiveLock' \
         AND l.pid IS DISTINCT FROM pg_catalog.pg_backend_pid()) ELSE '{{}}' END AS classes) \
         SELECT '{letter}', b.n, CASE WHEN b.passes IS NULL THEN b.o WHEN NOT b.passes THEN '{BLOCKED}' \
         WHEN l.classes && ARRAY[b.c::oid::int8, COALESCE(b.rc, b.c)::oid::int8] THEN '{BLOCKED}' \
         WHEN pg_catalog.pg_try_advisory_lock(b.t1, b.t2) THEN '{FENCED}' ELSE '{BLOCKED}' END FROM b, l;"
    )
}

/// Those that hold their lease, and could not begin before, try once more. A row for each, with its number.
pub(super) fn pass(beginners: &[Beginner], broken: Broken) -> String {
    let values = values(beginners.iter().enumerate(), Beginner::values);
    begin('b', &format!("SELECT v.*, '{GRANTED}' AS o FROM (VALUES {values}) v(n, {COLUMNS})"), broken)
}

/// Reads the rows of [`pass`]: which of them begin now.
pub(super) fn read_passed(rows: &[PgRow]) -> Result<Vec<usize>, sqlx::Error> {
    let mut passed = Vec::new();
    for row in rows {
        let (n, outcome): (i32, String) = (row.try_get(1)?, row.try_get(2)?);
        if outcome == FENCED {
            passed.extend(usize::try_from(n));
        }
    }
    Ok(passed)
}

/// Reads the rows of [`blockers`].
pub(super) fn read_blockers(rows: &[PgRow], blockers: &mut [Option<Blocker>]) -> Result<(), sqlx::Error> {
    let milliseconds = |ms: Option<i64>| ms.and_then(|ms| u64::try_from(ms).ok()).map(Duration::from_millis);
    for row in rows {
        let n: i64 = row.try_get(0)?;
        let Some(place @ None) = usize::try_from(n).ok().and_then(|n| blockers.get_mut(n)) else { continue };
        *place = Some(Blocker {
            pid: row.try_get(1)?,
            prepared: row.try_get(2)?,
            application: row.try_get(3)?,
            age: milliseconds(row.try_get(4)?),
            since_query: milliseconds(row.try_get(5)?),
        });
    }
    Ok(())
}

/// Who is in the way of these: a row for each session or prepared transaction that shares a barrier, or has a term key, with
/// the number of whom it keeps.
///
/// The lock table calls a prepared transaction what it was called before, until the server is restarted; it is known by the
/// lock that each transaction has on itself.
pub(super) fn blockers(keys: &[(Key, Mode)]) -> String {
    let mut values = String::new();
    for (n, (key, mode)) in keys.iter().enumerate() {
        let in_the_way = InTheWay::of(*key, *mode);
        let barrier =
            |n: usize| in_the_way.barriers.get(n).map_or("NULL::int8".to_owned(), |key| literal(*key));
        for (nth, class) in in_the_way.classes().enumerate() {
            let comma = if values.is_empty() { "" } else { "," };
            write!(values, "{comma}({n},{},'{class}'::int4)", barrier(nth)).ok();
        }
    }
    format!(
        "SELECT v.n::int8, l.pid, p.gid, a.application_name, \
         (EXTRACT(EPOCH FROM pg_catalog.clock_timestamp() - COALESCE(a.xact_start, p.prepared)) * 1000)::int8, \
         (EXTRACT(EPOCH FROM pg_catalog.clock_timestamp() - a.query_start) * 1000)::int8 \
         FROM (VALUES {values}) v(n, b, c) JOIN pg_catalog.pg_locks l ON {OURS} AND \
         l.pid IS DISTINCT FROM pg_catalog.pg_backend_pid() AND \
         (l.objsubid = 1 AND {HALVES} = v.b OR \
         l.objsubid = 2 AND l.classid = v.c::oid AND l.mode = 'ExclusiveLock') \
         LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid = l.pid \
         LEFT JOIN (pg_catalog.pg_locks x JOIN pg_catalog.pg_prepared_xacts p ON p.transaction = x.transactionid) \
         ON l.pid IS NULL AND x.pid IS NULL AND x.virtualtransaction = l.virtualtransaction \
         ORDER BY 1, 5 DESC NULLS LAST",
    )
}

#[cfg(test)]
impl Fence {
    /// Of no server.
    pub(crate) fn example() -> Self {
        let place = Place { database: "app".into(), cluster: Some(1) };
        let (term, barrier) = (Key::of_pair(1, 2), Key::of(crate::name::Kind::Lease, crate::Name::key(3)));
        Self { term, barrier, place, limit: Duration::from_secs(1) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::name::Kind;

    /// T-06: whatever the database is called.
    #[test]
    fn the_statement_quotes_the_name_of_the_database() {
        let fence = Fence::example();
        let place = Place { database: "a'b\\c".into(), cluster: None };
        let sql = Fence { place, ..fence }.sql();
        assert!(sql.contains("current_database() OPERATOR(pg_catalog.<>) E'a''b\\\\c' THEN"), "{sql}");
        assert!(!sql.contains("pg_control_system"), "{sql}");
    }

    /// T-02: the order that the model shows to be the right one.
    #[test]
    fn the_fence_looks_at_its_term_before_and_after_it_shares_the_barrier() {
        let sql = Fence::example().sql();
        let locks: Vec<_> =
            sql.match_indices("xact_lock_shared(").map(|(at, it)| &sql[at + it.len()..][..3]).collect();
        assert_eq!(locks, ["'1'", "'3'", "'1'"], "{sql}");
    }

    /// T-02: who reads looks for those who write alone; all others look for both.
    #[test]
    fn readers_are_in_the_way_of_writers_alone() {
        let key = Key::of(Kind::RwLock, "job");
        let values = |mode| Beginner { key, mode, number: 7 }.values();
        assert!(values(Mode::Read).ends_with(",NULL::int4"), "{}", values(Mode::Read));
        let [class, read_class] = classes(key);
        for mode in [Mode::Write, Mode::Exclusive] {
            assert!(
                values(mode).ends_with(&format!("'{class}'::int4,'{read_class}'::int4")),
                "{}",
                values(mode)
            );
        }
        assert_ne!(barrier(key, Mode::Write), barrier(key, Mode::Read));
        assert_ne!(class, read_class);
    }
}
