//! The SQL of a session. Each text is one message of the simple query protocol; its arguments are integers and ASCII of
//! our own making, and its functions are named with their schema.
//!
//! Order is certain where it matters: the statements of one message follow each other, and inside of one row it is
//! CASE that orders. A message of several statements is one implicit transaction; session-level locks do not take part
//! in it, so what was locked and unlocked before an error stays so, and a notification leaves with the commit.

use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt::Write as _;
use std::time::Duration;

use sqlx::Row as _;
use sqlx::postgres::PgRow;

use super::fence::{self, Beginner, Broken};
use crate::name::{INTENTS, Key, MARKERS};
use crate::store::{Freed, Holder, Message, Mode, Seen, text};

/// Where releases and messages are announced.
pub(super) const CHANNEL: &str = "leasehold";

/// Where roll calls are answered: only who has called listens there.
const ANSWERS: &str = "leasehold_answers";

/// A payload has fewer than 8000 bytes: the documentation of NOTIFY.
const PAYLOAD_BYTES: usize = 7_900;

/// What stands before a key that was given back, but not in order.
const RETURNED: &str = "returned ";

/// Takes the marker of a session, a lock that no other session has: two that share a server process see each other by it.
pub(super) fn mark(marker: i32) -> String {
    format!("SELECT pg_catalog.pg_try_advisory_lock({MARKERS}, {marker})")
}

pub(super) fn unmark(marker: i32) -> String {
    format!("SELECT pg_catalog.pg_advisory_unlock({MARKERS}, {marker})")
}

pub(super) const fn marker_key(marker: i32) -> Key {
    Key::of_pair(MARKERS, marker)
}

/// What whoever waits to write a key locks.
pub(super) fn intent(key: Key) -> Key {
    let hash = key.waiting().get() >> 32;
    Key::of_pair(INTENTS, i32::try_from(hash).unwrap_or_default())
}

/// How the name of a session begins, before the identity.
pub(super) const APPLICATION: &str = "leasehold/";

/// What one message is to do, in this order.
#[derive(Debug, Default)]
pub(super) struct Work {
    /// Term keys of what is released: before that, so that no fenced transaction goes on when the lease is another's.
    pub(super) terms: Vec<Key>,
    pub(super) releases: Vec<Release>,
    /// Keys that are no longer waited for.
    pub(super) withdrawals: Vec<Key>,
    /// Keys that are no longer waited for to write.
    pub(super) intents: Vec<Key>,
    pub(super) asks: Vec<Take>,
    pub(super) broken: Broken,
}

#[derive(Debug)]
pub(super) struct Release {
    pub(super) key: Key,
    pub(super) mode: Mode,
    /// It was unlocked before an error undid the announcement.
    pub(super) is_unlocked: bool,
    /// Whoever is told of it may take it for a clean end.
    pub(super) is_clean: bool,
    pub(super) is_section: bool,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Take {
    pub(super) key: Key,
    pub(super) mode: Mode,
    pub(super) waiting: Waiting,
    pub(super) is_section: bool,
    /// Where it is granted, its term is to begin, with this number.
    pub(super) number: Option<i32>,
    /// A reader, where another one of this session reads: the server is only asked whether anybody waits to write.
    pub(super) joins: bool,
    /// The session is seen to wait to write.
    pub(super) intends: bool,
}

/// Whether this session holds the key of those who wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Waiting {
    No,
    /// It takes it with this ask, before the ask.
    Register,
    Registered,
}

impl Work {
    pub(super) fn is_empty(&self) -> bool {
        self.terms.is_empty()
            && self.releases.is_empty()
            && self.withdrawals.is_empty()
            && self.intents.is_empty()
            && self.asks.is_empty()
    }

    /// Where it is about sections alone, and as most of them are: what [`QUICK`] takes.
    pub(super) fn quick(&self) -> Option<Quick> {
        let is_plain = |key: Key| Space::of(key) == Space::Whole;
        let released = |it: &Release| {
            it.is_section && it.is_clean && !it.is_unlocked && it.mode != Mode::Read && is_plain(it.key)
        };
        let asked = |it: &Take| {
            it.is_section && it.number.is_none() && it.mode == Mode::Exclusive && is_plain(it.key)
        };
        let is_quick = self.terms.is_empty()
            && self.withdrawals.is_empty()
            && self.intents.is_empty()
            && self.releases.iter().all(released)
            && self.asks.iter().all(asked);
        is_quick.then(|| {
            let steps = self.releases.iter().map(|it| (it.key, 0));
            let steps = steps.chain(self.asks.iter().map(|it| (it.key, 1 + i16::from(it.waits()))));
            let mut quick = Quick::default();
            for (key, step) in steps {
                quick.steps.push(step);
                quick.keys.push(key.get());
                quick.waiting.push(key.waiting().get());
            }
            quick
        })
    }

    /// Gives the text. Its rows have three columns: a letter for the part, the number of the item in it, the outcome;
    /// but first a `p` and the process id of who answers.
    ///
    /// `announce`: tell those who wait for what is released.
    pub(super) fn sql(&self, announce: bool) -> String {
        let mut sql = "SELECT 'p', pg_catalog.pg_backend_pid(), '';".to_owned();
        if !self.terms.is_empty() {
            let values = values(self.terms.iter().enumerate(), |key| literal(*key));
            sql += "SELECT 't', v.n, pg_catalog.pg_advisory_unlock(v.t1, v.t2)::text FROM (VALUES ";
            sql += &values;
            sql += ") v(n, t1, t2);";
        }
        for space in Space::ALL {
            sql += &self.release(space, announce);
        }
        if !self.withdrawals.is_empty() {
            let values = values(self.withdrawals.iter().enumerate(), |key| literal(key.waiting()));
            sql += "SELECT 'w', v.n, pg_catalog.pg_advisory_unlock_shared(v.w)::text FROM (VALUES ";
            sql += &values;
            sql += ") v(n, w);";
        }
        if !self.intents.is_empty() {
            sql += &self.give_way(announce);
        }
        for space in Space::ALL {
            for is_fenced in [false, true] {
                sql += &self.ask(space, is_fenced);
                sql += &self.ask_to_read_or_write(space, is_fenced);
            }
        }
        sql
    }

    /// The term keys that it gives back or takes.
    pub(super) fn all_terms(&self) -> Vec<Key> {
        let begun = self.asks.iter().filter_map(Take::beginner).map(|beginner| beginner.term());
        self.terms.iter().copied().chain(begun).collect()
    }

    /// A statement that asks: rows of values with these columns, and what becomes of each.
    fn asking(&self, is_fenced: bool, outcome: &str, values: &str, columns: &str) -> String {
        if is_fenced {
            let rows = format!(
                "SELECT v.n, {outcome} AS o, v.t1, v.t2, v.b, v.rb, v.c, v.rc \
                 FROM (VALUES {values}) v(n, {}, {columns})",
                fence::COLUMNS
            );
            fence::begin('a', &rows, self.broken)
        } else {
            format!("SELECT 'a', v.n, {outcome} FROM (VALUES {values}) v(n, {columns});")
        }
    }

    /// Unlocks, and then announces only where somebody waits: a notification that nobody waits for still takes a
    /// transaction id, wakes every listening session and serialises commits. Who waits holds the waiting key shared, so
    /// a try to have it alone, until the commit, is refused. The key is free before, and the notification leaves after.
    fn release(&self, space: Space, announce: bool) -> String {
        let of_space = self.releases.iter().enumerate().filter(|(_, it)| Space::of(it.key) == space);
        let values = values(of_space, |release| {
            let mode = match (release.is_unlocked, release.mode) {
                (true, _) => 0,
                (false, Mode::Exclusive | Mode::Write) => 1,
                (false, Mode::Read) => 2,
            };
            let (key, word) = (release.key, if release.is_clean { "" } else { RETURNED });
            format!("{mode},{},{},'{word}{key}'", literal(key), literal(key.waiting()))
        });
        if values.is_empty() {
            return String::new();
        }
        let (key, columns, announcement) = (space.arguments(), space.columns(), announcement(announce));
        format!(
            "SELECT 'r', v.n, CASE WHEN NOT CASE v.m WHEN 0 THEN true \
             WHEN 1 THEN pg_catalog.pg_advisory_unlock({key}) ELSE pg_catalog.pg_advisory_unlock_shared({key}) END \
             THEN 'gone' {announcement}ELSE 'free' END FROM (VALUES {values}) v(n, m, {columns}, w, h);"
        )
    }

    /// Readers that were kept out are told, as of a release.
    fn give_way(&self, announce: bool) -> String {
        let values = values(self.intents.iter().enumerate(), |&key| {
            format!("{},{},'{RETURNED}{key}'", literal(intent(key)), literal(key.waiting()))
        });
        let announcement = announcement(announce);
        format!(
            "SELECT 'i', v.n, CASE WHEN NOT pg_catalog.pg_advisory_unlock(v.i1, v.i2) THEN 'gone' \
             {announcement}ELSE 'free' END FROM (VALUES {values}) v(n, i1, i2, w, h);"
        )
    }

    /// The waiting key first, then the key, both by try: whoever releases in between finds us waiting, and nobody waits
    /// in the server. The waiting key is refused only while somebody announces a release of this very key; then the ask
    /// goes on without, and the driver asks once more. Whoever is granted the key waits no more.
    fn ask(&self, space: Space, is_fenced: bool) -> String {
        let asks = self.asks_in(space, is_fenced).filter(|(_, it)| it.mode == Mode::Exclusive);
        let values = values(asks, |take| {
            let (begins, waits) = (take.begins(), take.waits());
            format!("{begins}{waits},{},{}", literal(take.key), literal(take.key.waiting()))
        });
        if values.is_empty() {
            return String::new();
        }
        let (key, columns) = (space.arguments(), space.columns());
        let grab = format!("pg_catalog.pg_try_advisory_lock({key})");
        let outcome = format!(
            "CASE WHEN {WAITS} THEN CASE WHEN {grab} THEN {GRANTED_TO_WAITING} ELSE 'waiting' END \
             ELSE CASE WHEN {grab} THEN 'granted' ELSE 'busy' END END"
        );
        self.asking(is_fenced, &outcome, &values, &format!("x, {columns}, w"))
    }

    /// As [`ask`](Self::ask). A reader first looks whether anybody waits to write. Whoever has to wait to write shows it;
    /// where only a reader's look is in the way of that, which is over when its statement is, the driver asks once more.
    fn ask_to_read_or_write(&self, space: Space, is_fenced: bool) -> String {
        let asks = self.asks_in(space, is_fenced).filter(|(_, it)| it.mode != Mode::Exclusive);
        let values = values(asks, |take| {
            let how = match (take.mode, take.joins, take.intends) {
                (Mode::Read, false, _) => 0,
                (Mode::Read, true, _) => 1,
                (_, _, false) => 2,
                (_, _, true) => 3,
            };
            let (waits, key, waiting) = (take.waits(), literal(take.key), literal(take.key.waiting()));
            let begins = take.begins();
            format!("{begins}{how},{waits},{key},{waiting},{}", literal(intent(take.key)))
        });
        if values.is_empty() {
            return String::new();
        }
        let (key, columns) = (space.arguments(), space.columns());
        let may_read = "pg_catalog.pg_try_advisory_xact_lock_shared(v.i1, v.i2)";
        let grab = format!(
            "CASE WHEN v.m > 1 THEN pg_catalog.pg_try_advisory_lock({key}) WHEN NOT {may_read} THEN false \
             WHEN v.m = 1 THEN true ELSE pg_catalog.pg_try_advisory_lock_shared({key}) END"
        );
        let refused = format!(
            "CASE WHEN v.m <> 2 THEN 'waiting' WHEN pg_catalog.pg_try_advisory_lock(v.i1, v.i2) THEN 'intends' \
             WHEN {may_read} THEN 'again' ELSE 'waiting' END"
        );
        let granted = format!(
            "CASE WHEN v.m <> 3 THEN {GRANTED_TO_WAITING} \
             WHEN pg_catalog.pg_advisory_unlock(v.i1, v.i2) THEN {GRANTED_TO_WAITING} ELSE {GRANTED_TO_WAITING} END"
        );
        let outcome = format!(
            "CASE WHEN {WAITS} THEN CASE WHEN {grab} THEN {granted} ELSE {refused} END \
             ELSE CASE WHEN NOT {grab} THEN 'busy' WHEN v.m <> 3 THEN 'granted' \
             WHEN pg_catalog.pg_advisory_unlock(v.i1, v.i2) THEN 'granted' ELSE 'granted' END END"
        );
        self.asking(is_fenced, &outcome, &values, &format!("m, x, {columns}, w, i1, i2"))
    }

    fn asks_in(&self, space: Space, is_fenced: bool) -> impl Iterator<Item = (usize, &Take)> {
        let asks = self.asks.iter().enumerate();
        asks.filter(move |(_, it)| Space::of(it.key) == space && it.number.is_some() == is_fenced)
    }
}

fn announcement(announce: bool) -> &'static str {
    if announce {
        "WHEN pg_catalog.pg_try_advisory_xact_lock(v.w) THEN 'free' \
         WHEN pg_catalog.pg_notify('leasehold', v.h)::text IS NULL THEN 'free' "
    } else {
        ""
    }
}

/// Whether this session is registered as waiting for the key: it may have to register first.
const WAITS: &str =
    "CASE v.x WHEN 0 THEN false WHEN 1 THEN pg_catalog.pg_try_advisory_lock_shared(v.w) ELSE true END";

/// What is said to one who waited, and does so no more.
const GRANTED_TO_WAITING: &str =
    "CASE WHEN pg_catalog.pg_advisory_unlock_shared(v.w) THEN 'granted' ELSE 'granted anyway' END";

impl Take {
    /// What stands before its other values where it is fenced.
    fn begins(&self) -> String {
        self.beginner().map(|beginner| beginner.values() + ",").unwrap_or_default()
    }

    /// Where its term is to begin.
    pub(super) fn beginner(&self) -> Option<Beginner> {
        self.number.map(|number| Beginner { key: self.key, mode: self.mode, number })
    }

    const fn waits(&self) -> u8 {
        match self.waiting {
            Waiting::No => 0,
            Waiting::Register => 1,
            Waiting::Registered => 2,
        }
    }
}

/// The arguments of [`QUICK`], a column each.
#[derive(Debug, Default)]
pub(super) struct Quick {
    pub(super) steps: Vec<i16>,
    pub(super) keys: Vec<i64>,
    pub(super) waiting: Vec<i64>,
}

/// What [`Work::sql`] does, for sections: prepared once, and one row for all. Who answers, and a letter for each step in their
/// order: 0 releases; 1 asks, 2 registers before that, 3 is registered.
///
/// It is of the extended protocol, of which half a statement leaves the server waiting with no limit armed but that of
/// the keepalives.
pub(super) const QUICK: &str = "\
    SELECT pg_catalog.pg_backend_pid(), pg_catalog.string_agg(CASE v.s WHEN 0 THEN \
    CASE WHEN NOT pg_catalog.pg_advisory_unlock(v.k) THEN 'g' \
    WHEN pg_catalog.pg_try_advisory_xact_lock(v.w) THEN 'f' \
    WHEN pg_catalog.pg_notify('leasehold', pg_catalog.lpad(pg_catalog.to_hex(v.k), 16, '0'))::text IS NULL THEN 'f' \
    ELSE 'f' END \
    WHEN 1 THEN CASE WHEN pg_catalog.pg_try_advisory_lock(v.k) THEN 'y' ELSE 'b' END \
    ELSE CASE WHEN CASE v.s WHEN 2 THEN pg_catalog.pg_try_advisory_lock_shared(v.w) ELSE true END \
    THEN CASE WHEN pg_catalog.pg_try_advisory_lock(v.k) \
    THEN CASE WHEN pg_catalog.pg_advisory_unlock_shared(v.w) THEN 'y' ELSE 'y' END ELSE 'w' END \
    ELSE CASE WHEN pg_catalog.pg_try_advisory_lock(v.k) THEN 'y' ELSE 'b' END END END, '') \
    FROM ROWS FROM (pg_catalog.unnest($1), pg_catalog.unnest($2), pg_catalog.unnest($3)) v(s, k, w)";

/// The two lock spaces of the server, each with functions of its own: a statement for each that there is something of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Space {
    Whole,
    Pairs,
}

impl Space {
    const ALL: [Self; 2] = [Self::Whole, Self::Pairs];

    const fn of(key: Key) -> Self {
        if key.pair().is_some() { Self::Pairs } else { Self::Whole }
    }

    /// What the lock table calls it.
    const fn number(self) -> i32 {
        match self {
            Self::Whole => 1,
            Self::Pairs => 2,
        }
    }

    const fn columns(self) -> &'static str {
        match self {
            Self::Whole => "k",
            Self::Pairs => "k1, k2",
        }
    }

    const fn arguments(self) -> &'static str {
        match self {
            Self::Whole => "v.k",
            Self::Pairs => "v.k1, v.k2",
        }
    }
}

/// The rows that a [`Work`] gives, in its order.
pub(super) struct Outcomes {
    /// Who answered.
    pub(super) pid: Option<i32>,
    pub(super) releases: Vec<Cow<'static, str>>,
    pub(super) asks: Vec<Cow<'static, str>>,
}

impl Outcomes {
    /// What [`QUICK`] gives.
    pub(super) fn read_quick(row: &PgRow, work: &Work) -> Result<Self, String> {
        let pid = row.try_get(0).map_err(|error| error.to_string())?;
        let letters: String = row.try_get(1).map_err(|error| error.to_string())?;
        let words = letters.chars().map(|letter| {
            Some(match letter {
                'g' => "gone",
                'f' => "free",
                'y' => "granted",
                'w' => "waiting",
                'b' => "busy",
                _ => return None,
            })
        });
        let mut releases: Vec<&'static str> = words.collect::<Option<_>>().ok_or(NOT_THE_ROWS)?;
        if releases.len() != work.releases.len() + work.asks.len() {
            return Err(NOT_THE_ROWS.to_owned());
        }
        let asks = releases.split_off(work.releases.len());
        let owned = |words: Vec<&'static str>| words.into_iter().map(Cow::Borrowed).collect();
        Ok(Self { pid, releases: owned(releases), asks: owned(asks) })
    }

    pub(super) fn read(rows: &[PgRow], work: &Work) -> Result<Self, String> {
        let mut pid = None;
        let (mut releases, mut asks) = (vec![None; work.releases.len()], vec![None; work.asks.len()]);
        let mut others = 0;
        for row in rows {
            let cell = |column: usize| row.try_get::<String, _>(column).map_err(|error| error.to_string());
            let part = cell(0)?;
            let number: i32 = row.try_get(1).map_err(|error| error.to_string())?;
            let items = match part.as_str() {
                "p" => {
                    pid = Some(number);
                    continue;
                }
                "r" => &mut releases,
                "a" => &mut asks,
                _ => {
                    others += 1;
                    continue;
                }
            };
            match usize::try_from(number).ok().and_then(|n| items.get_mut(n)) {
                Some(item @ None) => *item = Some(Cow::Owned(cell(2)?)),
                _ => return Err(NOT_THE_ROWS.to_owned()),
            }
        }
        let all = |items: Vec<Option<Cow<'static, str>>>| {
            items.into_iter().collect::<Option<Vec<_>>>().ok_or(NOT_THE_ROWS)
        };
        if others == work.terms.len() + work.withdrawals.len() + work.intents.len() {
            Ok(Self { pid, releases: all(releases)?, asks: all(asks)? })
        } else {
            Err(NOT_THE_ROWS.to_owned())
        }
    }
}

const NOT_THE_ROWS: &str = "an answer has not the rows that were asked for";

/// Rows of VALUES, each with its number before it.
pub(super) fn values<'a, T: 'a>(
    items: impl IntoIterator<Item = (usize, &'a T)>,
    columns: impl Fn(&T) -> String,
) -> String {
    let mut text = String::new();
    for (n, item) in items {
        let comma = if text.is_empty() { "" } else { "," };
        write!(text, "{comma}({n},{})", columns(item)).ok();
    }
    text
}

/// Text as a literal, the same whatever `standard_conforming_strings` is.
pub(super) fn quoted(text: &str) -> String {
    format!("E'{}'", text.replace('\\', "\\\\").replace('\'', "''"))
}

/// In quotes: the smallest number is no literal of SQL without them.
pub(super) fn literal(key: Key) -> String {
    match key.pair() {
        None => format!("'{}'::int8", key.get()),
        Some((first, second)) => format!("'{first}'::int4,'{second}'::int4"),
    }
}

/// A key as the lock table shows it: the two halves in one number, and the space.
pub(super) fn shown(key: Key) -> String {
    format!("'{}'::int8,{}", key.get(), Space::of(key).number())
}

/// Who answers, and every advisory lock of this session: a row for each, or one row of nulls.
pub(super) const LOOK: &str = "\
    SELECT pg_catalog.pg_backend_pid(), pg_catalog.pg_postmaster_start_time()::text, \
    pg_catalog.pg_is_in_recovery(), l.k, l.subid, l.mode FROM (SELECT 1) one LEFT JOIN \
    (SELECT (classid::int8 << 32) | objid::int8 AS k, objsubid::int4 AS subid, mode FROM pg_catalog.pg_locks \
    WHERE locktype = 'advisory' AND pid = pg_catalog.pg_backend_pid()) l ON true";

/// Where the client of a session `a` comes from, how old the session is, and how long ago its last statement ended.
const WHENCE: &str = "CASE WHEN a.client_port < 0 THEN 'a Unix socket' ELSE \
     pg_catalog.host(a.client_addr) || ':' || a.client_port::text END, \
     (EXTRACT(EPOCH FROM pg_catalog.clock_timestamp() - a.backend_start) * 1000)::int8, \
     (EXTRACT(EPOCH FROM pg_catalog.clock_timestamp() - a.state_change) * 1000)::int8";

/// Advisory locks `l` in this database, the markers of sessions too. A key is [`HALVES`] and `objsubid`.
pub(super) const OURS: &str = "l.locktype = 'advisory' AND l.granted AND \
     l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())";

/// The two halves of the key of a lock `l`.
pub(super) const HALVES: &str = "((l.classid::int8 << 32) | l.objid::int8)";

/// Who holds these keys: a row for each that is held, with its number. What the server does not show to this user, such
/// as where others come from, is null.
pub(super) fn holders(keys: &[Key]) -> String {
    format!(
        "SELECT v.n::int8, l.pid, a.application_name, {WHENCE} \
         FROM (VALUES {}) v(n, k, s) JOIN pg_catalog.pg_locks l ON {OURS} AND \
         l.mode = 'ExclusiveLock' AND {HALVES} = v.k AND l.objsubid = v.s \
         LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid = l.pid",
        values(keys.iter().enumerate(), |key| shown(*key))
    )
}

/// Every session that holds an advisory lock, and every one of a Locker: a row for each lock, or one with nulls. The
/// name of a session shows to everybody; where it comes from and since when may not.
pub(super) fn survey() -> String {
    format!(
        "WITH l AS MATERIALIZED (SELECT l.pid, {HALVES} AS k, \
         l.mode = 'ExclusiveLock' AS x, l.objsubid::int4 AS s FROM pg_catalog.pg_locks l WHERE {OURS} AND \
         NOT (l.objsubid = 2 AND l.classid IN ({MARKERS}, {INTENTS}))) \
         SELECT 0::int8, p.pid, a.application_name, {WHENCE}, l.k, l.x, l.s FROM (SELECT pid FROM l UNION \
         SELECT pid FROM pg_catalog.pg_stat_activity WHERE datname = pg_catalog.current_database() AND \
         pg_catalog.starts_with(application_name, '{APPLICATION}')) p \
         LEFT JOIN l ON l.pid = p.pid LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid = p.pid ORDER BY p.pid"
    )
}

/// Reads the rows of [`survey`]. The keys of terms go with the leases of the same session.
pub(super) fn read_survey(rows: &[PgRow]) -> Result<Vec<Seen>, sqlx::Error> {
    let mut all: Vec<Seen> = Vec::new();
    for row in rows {
        let Some(pid) = row.try_get::<Option<i32>, _>(1)? else { continue };
        if all.last().is_none_or(|seen| seen.who.pid != Some(pid)) {
            let application: Option<String> = row.try_get(2)?;
            all.push(Seen {
                session: pid.to_string(),
                who: read_holder(row)?,
                answers: application.is_some_and(|name| name.starts_with(APPLICATION)),
                ..Seen::default()
            });
        }
        let key = row.try_get::<Option<i64>, _>(6)?.zip(row.try_get::<Option<i32>, _>(8)?);
        let key = key.and_then(|(halves, space)| Key::shown(halves, space));
        if let (Some(seen), Some(key)) = (all.last_mut(), key) {
            let is_exclusive: Option<bool> = row.try_get(7)?;
            let keys = if is_exclusive == Some(true) { &mut seen.holds } else { &mut seen.shares };
            keys.push(key);
        }
    }
    for seen in &mut all {
        let keys = seen.holds.iter().chain(&seen.shares);
        let terms: HashSet<i32> = keys.flat_map(|key| fence::classes(*key)).collect();
        seen.holds.retain(|key| key.pair().is_none_or(|(class, _)| !terms.contains(&class)));
    }
    Ok(all)
}

/// Reads the rows of [`holders`].
pub(super) fn read_holders(rows: &[PgRow], holders: &mut [Option<Holder>]) -> Result<(), sqlx::Error> {
    for row in rows {
        let n: i64 = row.try_get(0)?;
        if let Some(place) = usize::try_from(n).ok().and_then(|n| holders.get_mut(n)) {
            *place = Some(read_holder(row)?);
        }
    }
    Ok(())
}

fn read_holder(row: &PgRow) -> Result<Holder, sqlx::Error> {
    let application: Option<String> = row.try_get(2)?;
    let milliseconds = |ms: Option<i64>| ms.and_then(|ms| u64::try_from(ms).ok()).map(Duration::from_millis);
    Ok(Holder {
        identity: application.map(|name| name.strip_prefix(APPLICATION).unwrap_or(&name).to_owned()),
        address: row.try_get(3)?,
        pid: row.try_get(1)?,
        age: milliseconds(row.try_get(4)?),
        silence: milliseconds(row.try_get(5)?),
    })
}

/// Who answers, and a fencing token, or null if this session does not hold the key.
///
/// The token is the id of this very transaction: ids only grow. It assigns itself one by writing a message into the log,
/// and the commit of a transaction that has written there is flushed before it is answered, unless the role or the
/// database has turned that off: without, the same id comes back after a crash.
pub(super) fn mint(key: Key) -> String {
    format!(
        "SELECT pg_catalog.pg_backend_pid(), CASE WHEN NOT EXISTS (SELECT 1 FROM pg_catalog.pg_locks l WHERE {OURS} AND \
         l.pid = pg_catalog.pg_backend_pid() AND l.mode = 'ExclusiveLock' AND \
         ({HALVES}, l.objsubid::int4) = ({})) THEN NULL \
         WHEN pg_catalog.current_setting('synchronous_commit') = 'off' AND \
         pg_catalog.set_config('synchronous_commit', 'on', true) IS NULL THEN NULL \
         WHEN pg_catalog.pg_logical_emit_message(true, 'leasehold', '{key}') IS NULL THEN NULL \
         ELSE pg_catalog.pg_current_xact_id()::text::int8 END",
        shown(key)
    )
}

/// Who answers; how many transactions that server process has begun: each statement of ours is one; and what another
/// process is doing, and since when, where the server tells.
pub(super) fn who(other: Option<i32>) -> String {
    let other = other.map_or_else(|| "NULL".to_owned(), |pid| pid.to_string());
    format!(
        "SELECT pg_catalog.pg_backend_pid(), pg_catalog.pg_postmaster_start_time()::text, \
         (SELECT pg_catalog.split_part(virtualtransaction, '/', 2)::int8 FROM pg_catalog.pg_locks \
         WHERE locktype = 'virtualxid' AND pid = pg_catalog.pg_backend_pid() LIMIT 1), \
         (SELECT state || ' since ' || state_change::text FROM pg_catalog.pg_stat_get_activity({other}::int4) LIMIT 1)"
    )
}

/// Takes a lock in each of the ways that are used here, gives it back, and counts it in the lock table under our own
/// process id after each step: [`PROBED`], or -1 where a step was refused. Nothing is left: the lock of the transaction
/// goes with it.
pub(super) fn probe(key: Key) -> String {
    let step = |function: &str, key: Key| {
        let key = literal(key);
        format!(
            "SELECT CASE WHEN pg_catalog.{function}({key}) THEN (SELECT pg_catalog.count(*) FROM pg_catalog.pg_locks \
             WHERE locktype = 'advisory' AND granted AND objsubid = 1 AND pid = pg_catalog.pg_backend_pid() AND \
             ((classid::int8 << 32) | objid::int8) = {key}) ELSE -1 END;"
        )
    };
    // The message is one transaction: that lock is held to its end.
    step("pg_try_advisory_xact_lock", key.waiting())
        + &step("pg_try_advisory_lock", key)
        + &step("pg_advisory_unlock", key)
        + &step("pg_try_advisory_lock_shared", key)
        + &step("pg_advisory_unlock_shared", key)
}

/// Takes a key for the rest of the transaction, by try, and says how that went.
///
/// Outside of a transaction block a message is a transaction of its own, whose time is that of its only statement to the
/// microsecond: the server takes over the one for the other. Inside, the time of the transaction is that of its first
/// message, whatever the clock was set to in between.
pub(crate) fn try_xact_lock(key: Key) -> String {
    format!(
        "SELECT CASE WHEN pg_catalog.pg_is_in_recovery() THEN 'replica' \
         WHEN pg_catalog.statement_timestamp() = pg_catalog.transaction_timestamp() THEN 'no transaction' \
         WHEN pg_catalog.pg_try_advisory_xact_lock({}) THEN 'granted' ELSE 'busy' END",
        literal(key)
    )
}

/// What the server, the database and the role bring along: name, value, unit, and where it comes from.
pub(super) const SETTINGS: &str = "\
    SELECT name, setting, COALESCE(unit, ''), COALESCE(source, '') FROM pg_catalog.pg_settings WHERE name IN (\
    'server_version', 'max_connections', 'superuser_reserved_connections', 'reserved_connections', \
    'max_prepared_transactions', 'max_locks_per_transaction', 'synchronous_standby_names', 'synchronous_commit', \
    'statement_timeout', 'lock_timeout', 'idle_session_timeout', 'idle_in_transaction_session_timeout', \
    'transaction_timeout', 'default_transaction_read_only', 'default_transaction_isolation', \
    'default_transaction_deferrable')";

/// How the server's end of the connection is encrypted, if it is.
pub(super) const TLS: &str = "\
    SELECT version || ' with ' || cipher FROM pg_catalog.pg_stat_ssl WHERE ssl AND pid = pg_catalog.pg_backend_pid()";

/// How old the server process is, in milliseconds.
pub(super) const AGE: &str = "\
    SELECT (EXTRACT(EPOCH FROM pg_catalog.clock_timestamp() - backend_start) * 1000)::int8 \
    FROM pg_catalog.pg_stat_get_activity(pg_catalog.pg_backend_pid())";

/// Connections of clients: all, of the role, to the database; the limits of the two; and whether the role is a superuser.
/// Of others' sessions the server tells this user little. Those that are younger do not count: they are our own second
/// ones, which may take a moment to go.
pub(super) const CONNECTIONS: &str = "\
    SELECT count(*), count(*) FILTER (WHERE a.usesysid = r.oid), count(*) FILTER (WHERE a.datid = d.oid), \
    r.rolconnlimit::int8, d.datconnlimit::int8, r.rolsuper \
    FROM pg_catalog.pg_stat_activity a, pg_catalog.pg_roles r, pg_catalog.pg_database d \
    WHERE r.rolname = session_user AND d.datname = pg_catalog.current_database() \
    AND (a.backend_type = 'client backend' OR a.backend_type IS NULL AND a.datid IS NOT NULL) \
    AND (a.backend_start IS NULL OR a.backend_start <= \
    (SELECT backend_start FROM pg_catalog.pg_stat_get_activity(pg_catalog.pg_backend_pid()))) \
    GROUP BY r.oid, r.rolconnlimit, r.rolsuper, d.oid, d.datconnlimit";

/// Lock objects in the table that all share: not those that a backend keeps to itself.
pub(super) const LOCKS_IN_USE: &str = "\
    SELECT count(*) FROM (SELECT DISTINCT locktype, database, relation, page, tuple, virtualxid, transactionid, \
    classid, objid, objsubid FROM pg_catalog.pg_locks WHERE NOT fastpath) locks";

/// Replicas that are connected.
pub(super) const REPLICAS: &str = "SELECT count(*) FROM pg_catalog.pg_stat_replication";

/// A word on the channel that is nothing to anybody else.
pub(super) fn say(word: &str) -> String {
    format!("SELECT pg_catalog.pg_notify('{CHANNEL}', '{word}')")
}

/// What [`probe`] counts where locks are what they are.
pub(super) const PROBED: [i64; 5] = [1, 1, 0, 1, 0];

/// All of a message leaves with one commit. Who calls a roll listens for the answers from before that on.
pub(super) fn publish(message: &Message) -> String {
    let (before, channel) = match message {
        Message::StepDown(_) => (String::new(), CHANNEL),
        Message::RollCall(_) => (format!("LISTEN {ANSWERS};"), CHANNEL),
        Message::Present(_) => (String::new(), ANSWERS),
    };
    let payloads = text::write(message, PAYLOAD_BYTES);
    let values = values(payloads.iter().enumerate(), |payload| format!("'{payload}'"));
    format!("{before}SELECT pg_catalog.pg_notify('{channel}', v.p) FROM (VALUES {values}) v(n, p)")
}

/// What a notification says.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Announced {
    Freed(Freed),
    Message(Message),
}

/// Reads a payload. Anybody may send to the channel: what is not ours is none.
pub(super) fn read_payload(payload: &str) -> Option<Announced> {
    let (key, is_clean) = payload.strip_prefix(RETURNED).map_or((payload, true), |key| (key, false));
    match text::read_key(key) {
        Some(key) => Some(Announced::Freed(Freed { key, is_clean })),
        None => text::read(payload).map(Announced::Message),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::name::Kind;

    #[test]
    fn payloads_are_read_back_and_foreign_ones_are_none() {
        let key = Key::of(Kind::Lease, "");
        assert!(key.get() < 0);
        let sent = publish(&Message::StepDown(key));
        let payload = sent.split('\'').nth(3).unwrap();
        assert_eq!(read_payload(payload), Some(Announced::Message(Message::StepDown(key))));
        assert_eq!(read_payload(&key.to_string()), Some(Announced::Freed(Freed { key, is_clean: true })));
        let returned = Some(Announced::Freed(Freed { key, is_clean: false }));
        assert_eq!(read_payload(&format!("returned {key}")), returned);
        for foreign in ["", "+000000000000001", "step-down", "step-down x", "hello", "0000000000000001 "] {
            assert_eq!(read_payload(foreign), None, "{foreign:?}");
        }
    }

    /// L-19
    #[test]
    fn payloads_about_pairs_are_read_back() {
        let key = Key::of(Kind::Lease, crate::Name::key_pair(-1, 2));
        for (payload, is_clean) in [(key.to_string(), true), (format!("returned {key}"), false)] {
            assert_eq!(read_payload(&payload), Some(Announced::Freed(Freed { key, is_clean })));
        }
    }

    /// L-19: keys of 64 bits are one statement as ever, and pairs cost one more only where there are any.
    #[test]
    fn keys_of_each_space_have_a_statement_of_their_own() {
        let take = |name: crate::Name| {
            let key = Key::of(Kind::Lease, name);
            Take {
                key,
                mode: Mode::Exclusive,
                waiting: Waiting::No,
                is_section: false,
                number: None,
                joins: false,
                intends: false,
            }
        };
        let (whole, pair) = (|| take(crate::Name::key(7)), || take(crate::Name::key_pair(-1, 2)));
        let sql = |asks| Work { asks, ..Work::default() }.sql(true);
        let statements = |sql: &str| sql.matches("SELECT 'a'").count();
        assert_eq!(statements(&sql(vec![whole(), whole()])), 1);
        assert!(!sql(vec![whole()]).contains("k1"));
        assert_eq!(statements(&sql(vec![pair()])), 1);
        let both = sql(vec![pair(), whole(), pair()]);
        assert_eq!(statements(&both), 2);
        for part in ["(1,0,'7'::int8,", "(0,0,'-1'::int4,'2'::int4,", ",(2,0,'-1'::int4,"] {
            assert!(both.contains(part), "{both}");
        }
    }

    #[test]
    fn the_parts_of_a_message_stand_in_their_order() {
        let key = Key::of(Kind::Lease, "sweeper");
        let release =
            Release { key, mode: Mode::Exclusive, is_unlocked: false, is_clean: true, is_section: false };
        let waiting = Waiting::Register;
        let ask = Take {
            key,
            mode: Mode::Exclusive,
            waiting,
            is_section: false,
            number: Some(7),
            joins: false,
            intends: false,
        };
        let work = Work {
            terms: vec![Key::of_pair(1, 2)],
            releases: vec![release],
            withdrawals: vec![key],
            intents: vec![key],
            asks: vec![ask],
            ..Work::default()
        };
        let sql = work.sql(true);
        let at = |text: &str| sql.find(text).expect(text);
        // T-02: the term key before the lease, and the barrier alone before the look and the new term key.
        assert!(at("SELECT 't'") < at("SELECT 'r'"), "{sql}");
        assert!(at("lock(a.b)") < at("ARRAY(SELECT") && at("ARRAY(SELECT") < at("lock(b.t1, b.t2)"), "{sql}");
        assert!(at("SELECT 'r'") < at("SELECT 'w'") && at("SELECT 'w'") < at("SELECT 'a'"), "{sql}");
        assert!(at("unlock(v.k)") < at("xact_lock(v.w)") && at("xact_lock(v.w)") < at("pg_notify"), "{sql}");
        assert!(!work.sql(false).contains("pg_notify"));
    }
}
