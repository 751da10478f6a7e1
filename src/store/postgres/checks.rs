//! What is looked at before a session is trusted. Nothing of it sets, listens or leaves a lock behind: through a pooler
//! that would stay on somebody else's connection.
//!
//! 1. The server is not in recovery: a hot standby grants advisory locks that the primary knows nothing of.
//! 2. The session stays with one backend: told by a second connection, once per target.
//! 3. No lock is there that we did not take.
//! 4. A lock that we take shows in `pg_locks` under our own process id until we give it back, or the functions are no
//!    more than names.

use std::time::Duration;

use rand::RngExt as _;
use sqlx::Row as _;
use sqlx::postgres::{PgConnectOptions, PgRow};

use super::affinity::{self, Affinity};
use super::fence::{self, Place};
use super::{Config, link::Link, refusal, statements};
use crate::error::ConnectError;
use crate::name::{Key, Kind, MARKERS};
use crate::store::Mode;

/// Who answers a connection. The process id alone could be that of another server behind the same address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Backend {
    pub(super) pid: i32,
    pub(super) server: String,
}

/// One look at the session: who answers, and which advisory locks it has.
#[derive(Debug)]
pub(super) struct Look {
    pub(super) backend: Backend,
    pub(super) is_in_recovery: bool,
    pub(super) locks: Vec<Lock>,
}

/// One row of the lock table.
#[derive(Debug)]
pub(super) struct Lock {
    pub(super) key: Key,
    is_shared: bool,
}

impl Lock {
    pub(super) fn is_marker(&self, marker: i32) -> bool {
        self.key == statements::marker_key(marker)
    }

    fn is_marker_of_another(&self, marker: i32) -> bool {
        !self.is_marker(marker) && self.key.pair().is_some_and(|(class, _)| class == MARKERS)
    }

    pub(super) fn is_in(&self, mode: Mode) -> bool {
        self.is_shared == (mode == Mode::Read)
    }
}

impl Look {
    pub(super) fn of_a_primary(&self) -> Result<(), ConnectError> {
        if self.is_in_recovery { Err(ConnectError::Replica) } else { Ok(()) }
    }

    pub(super) fn of_an_unused_session(&self) -> Result<(), ConnectError> {
        if self.locks.is_empty() { Ok(()) } else { Err(ConnectError::UsedSession) }
    }

    /// # Errors
    ///
    /// Where the rows are not what was asked for.
    pub(super) fn read(rows: &[PgRow]) -> Result<Self, sqlx::Error> {
        let first = rows.first().ok_or(sqlx::Error::RowNotFound)?;
        let mut locks = Vec::new();
        for row in rows {
            if let Some(halves) = row.try_get(3)? {
                let mode: String = row.try_get(5)?;
                let unknown =
                    || sqlx::Error::Protocol("an advisory lock of a kind that nobody knows".to_owned());
                let key = Key::shown(halves, row.try_get(4)?).ok_or_else(unknown)?;
                locks.push(Lock { key, is_shared: mode == "ShareLock" });
            }
        }
        Ok(Self { backend: Backend::read(first)?, is_in_recovery: first.try_get(2)?, locks })
    }
}

impl Backend {
    pub(super) fn read(row: &PgRow) -> Result<Self, sqlx::Error> {
        Ok(Self { pid: row.try_get(0)?, server: row.try_get(1)? })
    }
}

/// Looks at a new session, and at a second connection where there is one to be made.
pub(super) async fn look(
    link: &mut Link,
    second: Option<&PgConnectOptions>,
    limit: Duration,
    affinity: &Affinity,
    config: &Config,
) -> Result<Backend, ConnectError> {
    let look = see(link).await?;
    look.of_a_primary()?;
    if let Some(target) = second {
        stays(link, &look.backend, target, limit, affinity).await?;
    }
    look.of_an_unused_session()?;
    try_a_lock(link, config).await?;
    Ok(look.backend)
}

/// The first statement of a session.
pub(super) async fn see(link: &mut Link) -> Result<Look, ConnectError> {
    let rows = link.fetch(statements::LOOK.to_owned()).await.map_err(refusal::of_statement)?;
    Look::read(&rows).map_err(refusal::of_statement)
}

/// Whether the session stays with one backend.
pub(super) async fn stays(
    link: &mut Link,
    backend: &Backend,
    target: &PgConnectOptions,
    limit: Duration,
    affinity: &Affinity,
) -> Result<(), ConnectError> {
    // Short of the limit of it all, so that the reason is told.
    affinity::check(link, backend, target, limit / 4, affinity).await
}

/// Takes a lock for a moment: whether the server's locks are real.
pub(super) async fn try_a_lock(link: &mut Link, config: &Config) -> Result<(), ConnectError> {
    let probe = Key::of(Kind::Lock, format!("probe of {} {:016x}", config.identity, random()));
    let rows = link.fetch(statements::probe(probe)).await.map_err(refusal::of_statement)?;
    let counted: Result<Vec<i64>, _> = rows.iter().map(|row| row.try_get(0)).collect();
    let counted = counted.map_err(refusal::of_statement)?;
    if counted == statements::PROBED {
        Ok(())
    } else if counted.contains(&-1) {
        Err(unsupported("a lock that nobody held was refused, or one that was held could not be given back"))
    } else {
        Err(unsupported("pg_locks does not show under our process id what is locked, or shows what is not"))
    }
}

/// Takes the marker of this session, and sees that nobody else's is there: they would be served by one server process.
/// Whatever the comparison missed, two that share one never both go on; the server would grant them the same lock.
pub(super) async fn mark(
    link: &mut Link,
    backend: &Backend,
    config: &Config,
) -> Result<Option<i32>, ConnectError> {
    if !config.is_marked {
        return Ok(None);
    }
    let marker = rand::make_rng::<rand::rngs::StdRng>().random();
    link.fetch(statements::mark(marker)).await.map_err(refusal::of_statement)?;
    let look = see(link).await?;
    if look.backend == *backend && look.locks.len() == 1 && look.locks[0].is_marker(marker) {
        return Ok(Some(marker));
    }
    link.fetch(statements::unmark(marker)).await.ok();
    if look.backend == *backend && !look.locks.iter().any(|lock| lock.is_marker_of_another(marker)) {
        return Err(ConnectError::UsedSession);
    }
    let evidence = "two sessions were served by one server process";
    Err(ConnectError::Pooler { evidence: evidence.to_owned() })
}

/// Where the session is, for the transactions that are fenced by what it holds.
pub(super) async fn place(link: &mut Link) -> Result<Place, ConnectError> {
    let rows = link.fetch(fence::PLACE.to_owned()).await.map_err(refusal::of_statement)?;
    let read = |row: &PgRow| Ok((row.try_get::<String, _>(0)?, row.try_get::<bool, _>(1)?));
    let (database, may_ask) =
        rows.first().ok_or(sqlx::Error::RowNotFound).and_then(read).map_err(refusal::of_statement)?;
    let mut cluster = None;
    if may_ask {
        let rows = link.fetch(fence::CLUSTER.to_owned()).await.map_err(refusal::of_statement)?;
        let read = |row: &PgRow| row.try_get(0);
        cluster =
            rows.first().ok_or(sqlx::Error::RowNotFound).and_then(read).map_err(refusal::of_statement)?;
    }
    Ok(Place { database: database.into(), cluster })
}

fn unsupported(reason: &str) -> ConnectError {
    ConnectError::Unsupported { reason: reason.to_owned() }
}

pub(super) fn random() -> u64 {
    rand::make_rng::<rand::rngs::StdRng>().random()
}
