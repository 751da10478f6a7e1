//! What a server brings along, and what it has room for. Nothing of it keeps a connection from being made.

use std::collections::HashMap;
use std::fmt::Write as _;

use sqlx::Row as _;
use sqlx::postgres::PgRow;

use super::Host;
use crate::error::ConnectError;
use crate::store::postgres::link::Link;
use crate::store::postgres::setup::InForce;
use crate::store::postgres::{refusal, statements};

pub(super) const SETTINGS: &str = "settings";
pub(super) const CONNECTIONS: &str = "connections";
const LOCK_TABLE: &str = "lock table";
const REPLICATION: &str = "replication";

/// How many lock objects a name takes at most, while its term begins: its own, two barriers, and the term key.
const LOCKS_PER_NAME: u64 = 4;

/// A standby takes one connection, and for a moment a second one.
const CONNECTIONS_WANTED: i64 = 2;

/// Settings that a server, a database or a role may bring along, and the value with which they do nothing.
const LIMITS: [(&str, &str); 8] = [
    ("statement_timeout", "0"),
    ("lock_timeout", "0"),
    ("idle_session_timeout", "0"),
    ("idle_in_transaction_session_timeout", "0"),
    ("transaction_timeout", "0"),
    ("default_transaction_read_only", "off"),
    ("default_transaction_isolation", "read committed"),
    ("default_transaction_deferrable", "off"),
];

/// A setting as the server has it before the session changes it.
pub(super) struct Brought {
    pub(super) value: String,
    unit: String,
    source: String,
}

/// By their names.
pub(super) type Settings = HashMap<String, Brought>;

impl Host<'_> {
    pub(super) async fn settings(&mut self, link: &mut Link) -> Result<Settings, ConnectError> {
        let rows = self.ask(link, SETTINGS, statements::SETTINGS.to_owned()).await?.unwrap_or_default();
        let read = |row: &PgRow| {
            let (value, unit, source) = (row.try_get(1)?, row.try_get(2)?, row.try_get(3)?);
            Ok((row.try_get(0)?, Brought { value, unit, source }))
        };
        let read: Result<_, sqlx::Error> = rows.iter().map(read).collect();
        read.map_err(refusal::of_statement)
    }

    /// What was brought along and would hurt, and what could not be set.
    pub(super) fn limits(&mut self, settings: &Settings, in_force: Option<&InForce>) {
        let missing = in_force.map_or(&[][..], |it| &it.missing);
        let mut overridden = Vec::new();
        for (name, harmless) in LIMITS {
            let Some(Brought { value, unit, source }) = settings.get(name) else { continue };
            if value != harmless && !missing.iter().any(|it| it.name == name) {
                overridden.push(format!("{name} = {value}{unit} ({source})"));
            }
        }
        let not_set: Vec<_> = missing
            .iter()
            .filter(|it| !it.frees_silent_holders())
            .map(|it| format!("{} should be {} and is {}", it.name, it.wanted, it.found()))
            .collect();
        if !not_set.is_empty() {
            self.warning(
                SETTINGS,
                not_set.join("; "),
                "let the role set it, or have it set so; it backs the ttl up, or keeps other limits from ending the \
                 session",
            );
        }
        let would = if in_force.is_some() { "overrides" } else { "would override" };
        if !overridden.is_empty() {
            let reason =
                format!("the session {would} what would hurt, so it does no harm: {}", overridden.join(", "));
            self.good(SETTINGS, reason);
        } else if not_set.is_empty() && !settings.is_empty() {
            self.good(SETTINGS, "nothing of the server, the database or the role would hurt");
        }
    }

    pub(super) async fn connections(
        &mut self,
        link: &mut Link,
        settings: &Settings,
    ) -> Result<(), ConnectError> {
        let Some(rows) = self.ask(link, CONNECTIONS, statements::CONNECTIONS.to_owned()).await? else {
            return Ok(());
        };
        let Some((used, of_role, of_database)) = rows.first().and_then(|row| Used::read(row).ok()) else {
            self.untold(CONNECTIONS, "a value is missing");
            return Ok(());
        };
        let number = |name: &str| number(settings, name).unwrap_or(0).cast_signed();
        let reserved = number("superuser_reserved_connections") + number("reserved_connections");
        let max = number("max_connections");
        let limits = [
            ("the server", Used { limit: max - if used.is_unlimited { 0 } else { reserved }, ..used }),
            ("the role", of_role),
            ("the database", of_database),
        ];
        // No limit is a negative one, and a superuser has none but the server's.
        let bounding = limits
            .iter()
            .filter(|(whose, it)| it.limit >= 0 && (*whose == "the server" || !used.is_unlimited));
        let Some((whose, least)) = bounding.min_by_key(|(_, it)| it.limit - it.count) else { return Ok(()) };
        let free = (least.limit - least.count).max(0);
        let mut reason = format!("{} of the {} of {whose} are free", free, least.limit);
        if reserved > 0 && *whose == "the server" && !used.is_unlimited {
            write!(reason, ", without {reserved} that are reserved").ok();
        }
        if free < CONNECTIONS_WANTED {
            self.warning(
                CONNECTIONS,
                format!(
                    "{reason}: another process takes one, and for a moment a second one, to find out a pooler"
                ),
                format!("raise the limit of {whose}, or close connections that nobody needs"),
            );
        } else {
            self.good(
                CONNECTIONS,
                format!("{reason}; each process takes one, and for a moment a second one"),
            );
        }
        Ok(())
    }

    pub(super) async fn lock_table(
        &mut self,
        link: &mut Link,
        settings: &Settings,
    ) -> Result<(), ConnectError> {
        let Some(rows) = self.ask(link, LOCK_TABLE, statements::LOCKS_IN_USE.to_owned()).await? else {
            return Ok(());
        };
        let in_use: Option<i64> = rows.first().and_then(|row| row.try_get(0).ok());
        let number = |name| number(settings, name);
        let (Some(per), Some(connections), Some(prepared), Some(in_use)) = (
            number("max_locks_per_transaction"),
            number("max_connections"),
            number("max_prepared_transactions"),
            in_use.and_then(|it| u64::try_from(it).ok()),
        ) else {
            self.untold(LOCK_TABLE, "a value is missing");
            return Ok(());
        };
        // The formula of PostgreSQL's manual, which is a little less than there is.
        let room = per * (connections + prepared);
        let names = self.options.max_held as u64;
        let wanted = names.saturating_mul(LOCKS_PER_NAME);
        let reason = format!(
            "{in_use} of {room} locks are in use; {names} names (max_held) of one process may take {wanted}"
        );
        if room.saturating_sub(in_use) >= wanted {
            self.good(LOCK_TABLE, reason);
        } else {
            let enough = in_use.saturating_add(wanted).div_ceil((connections + prepared).max(1));
            let fewer = (room.saturating_sub(in_use) / LOCKS_PER_NAME).max(1);
            self.warning(
                LOCK_TABLE,
                format!("{reason}, and what does not fit is refused"),
                format!("set max_locks_per_transaction = {enough} on the server, or max_held={fewer} here"),
            );
        }
        Ok(())
    }

    pub(super) async fn replication(
        &mut self,
        link: &mut Link,
        settings: &Settings,
    ) -> Result<(), ConnectError> {
        if self.is_replica {
            return Ok(());
        }
        let Some(rows) = self.ask(link, REPLICATION, statements::REPLICAS.to_owned()).await? else {
            return Ok(());
        };
        let replicas: i64 = rows.first().and_then(|row| row.try_get(0).ok()).unwrap_or(0);
        let value = |name: &str| settings.get(name).map_or("", |it| it.value.as_str());
        let waits_for = value("synchronous_standby_names");
        let commit = value("synchronous_commit");
        let count = match replicas {
            0 => "no replica is connected".to_owned(),
            1 => "a replica is connected".to_owned(),
            n => format!("{n} replicas are connected"),
        };
        let limit = "locks are not replicated: a failover ends every lease, and";
        let reason = if waits_for.is_empty() || commit == "off" || commit == "local" {
            format!(
                "{count}, and no commit waits for one: {limit} a fencing token may be given out twice by it"
            )
        } else {
            format!(
                "{count}, and commits wait for {waits_for:?}: {limit} no fencing token is given out twice"
            )
        };
        self.good(REPLICATION, reason);
        Ok(())
    }
}

/// How many connections count against a limit.
#[derive(Clone, Copy)]
struct Used {
    count: i64,
    limit: i64,
    /// Of a superuser.
    is_unlimited: bool,
}

impl Used {
    /// Of the server, the role and the database.
    fn read(row: &PgRow) -> Result<(Self, Self, Self), sqlx::Error> {
        let is_unlimited = row.try_get(5)?;
        let used = |count: i64, limit: i64| Self { count, limit, is_unlimited };
        Ok((
            used(row.try_get(0)?, -1),
            used(row.try_get(1)?, row.try_get(3)?),
            used(row.try_get(2)?, row.try_get(4)?),
        ))
    }
}

fn number(settings: &Settings, name: &str) -> Option<u64> {
    settings.get(name)?.value.parse().ok()
}
