//! The table of the slots of [`Every`](crate::Every): the only one that leasehold has, and nobody else needs it.
//!
//! A row for each name: small, updated in place, and read by its primary key. Times are the server's own. It stands in a
//! schema of its own whose name is fixed, so that no two roles can ever use two tables.

use sqlx::Row as _;
use sqlx::postgres::PgRow;

use super::statements::{HALVES, OURS, quoted, shown};
use crate::name::Key;
use crate::store::slots::{Entry, Looked, Moment, NoSlots, Record, Slots};

/// Makes the table. Roles other than its owner need the grants as well.
pub(super) const DDL: &str = "\
CREATE SCHEMA IF NOT EXISTS leasehold;
CREATE TABLE IF NOT EXISTS leasehold.slots (
    key bigint NOT NULL,            -- of the lock of the name, as `leasehold key --kind=lock NAME` prints it
    space smallint NOT NULL,        -- 1: one number, 2: a pair of numbers
    name text NOT NULL,             -- for people
    slot bigint NOT NULL,           -- the number of the slot that was served last
    began timestamptz NOT NULL,     -- when that slot began
    run integer NOT NULL,           -- which attempt at it
    phase text NOT NULL,            -- 'started', or 'finished'
    written timestamptz NOT NULL,   -- since when
    holder text NOT NULL,           -- the identity of who runs it, or has run it
    PRIMARY KEY (key, space)
);
";

/// What a role needs that does not own the table.
fn grants(role: &str) -> String {
    format!(
        "-- For the role that leasehold logs in as:\nGRANT USAGE ON SCHEMA leasehold TO {role};\nGRANT SELECT, INSERT, UPDATE ON leasehold.slots TO {role};\n"
    )
}

/// All that somebody who may has to run, for a role that may not.
pub(crate) fn schema(role: Option<&str>) -> String {
    let grants = role.map(grants).unwrap_or_default();
    format!("{DDL}{grants}")
}

/// `undefined_table`, and `invalid_schema_name`.
pub(super) const MISSING: [&str; 2] = ["42P01", "3F000"];

/// What one who makes the table meets where another one makes it at the same time: `unique_violation`, `duplicate_schema`,
/// `duplicate_table`, `duplicate_object`, `lock_not_available`, and an update of one row of the catalogue by two.
pub(super) const MADE_BY_ANOTHER: [&str; 6] = ["23505", "42P06", "42P07", "42710", "55P03", "XX000"];

/// `insufficient_privilege`, `read_only_sql_transaction`, `undefined_column`, and what a table of that name that is none
/// of ours brings.
const FORBIDDEN: [&str; 5] = ["42501", "25006", "42703", "42804", "42809"];

/// A number of microseconds as the server has it: exact, since 2^53 of them last until 2255.
const MICROS: &str = "* 1000000)::int8";

fn moment(at: Moment) -> String {
    format!("(timestamptz 'epoch' + '{}'::float8 * interval '1 microsecond')", at.0)
}

/// Who answers, the server's clock, and the record: one row, with nulls where there is none.
pub(super) fn look(slots: &Slots) -> String {
    format!(
        "SELECT pg_catalog.pg_backend_pid(), \
         pg_catalog.round(EXTRACT(EPOCH FROM pg_catalog.clock_timestamp()) {MICROS}, s.slot, \
         pg_catalog.round(EXTRACT(EPOCH FROM s.began) {MICROS}, s.run, s.phase, \
         pg_catalog.round(EXTRACT(EPOCH FROM s.written) {MICROS}, s.holder \
         FROM (SELECT 1) one LEFT JOIN leasehold.slots s ON (s.key, s.space::int4) = ({})",
        shown(slots.key)
    )
}

/// Reads the row of [`look`], and who answers.
pub(super) fn read_look(rows: &[PgRow]) -> Result<(i32, Result<Looked, NoSlots>), sqlx::Error> {
    let row = rows.first().ok_or(sqlx::Error::RowNotFound)?;
    let pid = row.try_get(0)?;
    let now: i64 = row.try_get(1)?;
    let Some(slot) = row.try_get::<Option<i64>, _>(2)? else {
        return Ok((pid, Ok(Looked { now: Moment(unsigned(now)), record: None })));
    };
    let phase: String = row.try_get(5)?;
    let run: i32 = row.try_get(4)?;
    let (Ok(phase), Ok(run)) = (phase.parse(), run.try_into()) else {
        let text =
            format!("the row in leasehold.slots is none of ours: run {run}, phase {phase:?}: delete it");
        return Ok((pid, Err(NoSlots::Forbidden(text))));
    };
    let entry = Entry {
        number: unsigned(slot),
        at: Moment(unsigned(row.try_get(3)?)),
        run,
        phase,
        by: row.try_get(7)?,
    };
    let record = Record { entry, written: Moment(unsigned(row.try_get(6)?)) };
    Ok((pid, Ok(Looked { now: Moment(unsigned(now)), record: Some(record) })))
}

fn unsigned(number: i64) -> u64 {
    number.try_into().unwrap_or_default()
}

fn signed(number: u64) -> i64 {
    number.try_into().unwrap_or(i64::MAX)
}

/// Who answers, whether this session holds the lock, and the time of the record if it was set: one row.
///
/// One statement is one transaction, whose commit is flushed before it is answered, whatever the role or the database has
/// set: a claim that a crash of the server takes back is a slot that is run twice.
pub(super) fn amend(slots: &Slots, expected: Option<&Record>, next: &Entry) -> String {
    let Entry { number, at, run, phase, by } = next;
    let (slot, began, phase, by) = (signed(*number), moment(*at), phase.word(), quoted(by));
    let may = "(SELECT held.it FROM held) AND (SELECT sync.it FROM sync) IS NOT NULL";
    let write = match expected {
        None => format!(
            "INSERT INTO leasehold.slots (key, space, name, slot, began, run, phase, written, holder) \
             SELECT {}, {}, '{slot}'::int8, {began}, {run}, '{phase}', pg_catalog.clock_timestamp(), {by} \
             WHERE {may} ON CONFLICT (key, space) DO NOTHING",
            shown(slots.key),
            quoted(&slots.name.as_str().escape_default().to_string()),
        ),
        Some(Record { entry, written }) => format!(
            "UPDATE leasehold.slots s SET slot = '{slot}'::int8, began = {began}, run = {run}, phase = '{phase}', \
             written = pg_catalog.clock_timestamp(), holder = {by} \
             WHERE (s.key, s.space::int4) = ({}) AND s.slot = '{}'::int8 AND s.began = {} AND s.run = {} AND \
             s.phase = '{}' AND s.written = {} AND s.holder = {} AND {may}",
            shown(slots.key),
            signed(entry.number),
            moment(entry.at),
            entry.run,
            entry.phase.word(),
            moment(*written),
            quoted(&entry.by),
        ),
    };
    format!(
        "WITH held AS MATERIALIZED ({}), sync AS MATERIALIZED (SELECT CASE \
         WHEN pg_catalog.current_setting('synchronous_commit') = 'off' \
         THEN pg_catalog.set_config('synchronous_commit', 'on', true) ELSE '' END AS it), \
         done AS ({write} RETURNING written) \
         SELECT pg_catalog.pg_backend_pid(), (SELECT held.it FROM held), \
         (SELECT pg_catalog.round(EXTRACT(EPOCH FROM done.written) {MICROS} FROM done)",
        is_held(slots.key)
    )
}

fn is_held(key: Key) -> String {
    format!(
        "SELECT EXISTS (SELECT 1 FROM pg_catalog.pg_locks l WHERE {OURS} AND l.pid = pg_catalog.pg_backend_pid() AND \
         l.mode = 'ExclusiveLock' AND ({HALVES}, l.objsubid::int4) = ({})) AS it",
        shown(key)
    )
}

/// What [`amend`] came to.
pub(super) struct Written {
    pub(super) pid: i32,
    pub(super) is_held: bool,
    pub(super) at: Option<Moment>,
}

pub(super) fn read_amended(rows: &[PgRow]) -> Result<Written, sqlx::Error> {
    let row = rows.first().ok_or(sqlx::Error::RowNotFound)?;
    let at: Option<i64> = row.try_get(2)?;
    Ok(Written { pid: row.try_get(0)?, is_held: row.try_get(1)?, at: at.map(|at| Moment(unsigned(at))) })
}

/// Why the server does not show the table, or write it: in its words, and with what to change.
pub(super) fn refused(code: &str, reason: &str) -> NoSlots {
    if MISSING.contains(&code) || FORBIDDEN.contains(&code) {
        NoSlots::Forbidden(format!(
            "the table of slots cannot be used ({reason}): let a role that may do so run this, which `leasehold schema` \
             prints as well:\n{}",
            schema(Some("app"))
        ))
    } else {
        NoSlots::Failed(reason.to_owned())
    }
}
