//! What is looked at before a session is trusted. Nothing of it sets, listens or leaves a lock behind: through a pooler
//! that would stay on somebody else's connection.
//!
//! 1. The server is not in recovery: a hot standby grants advisory locks that the primary knows nothing of.
//! 2. The session stays with one backend: told by a second connection, once per target.
//! 3. No lock is there that we did not take.
//! 4. A lock that we take shows in `pg_locks` under our own process id, or the functions are no more than names.

use std::time::Duration;

use rand::RngExt as _;
use sqlx::postgres::{PgConnectOptions, PgConnection, PgRow};
use sqlx::{AssertSqlSafe, Connection as _, Row as _};

use super::{Config, link::Link, refusal, statements};
use crate::error::ConnectError;
use crate::name::{Key, Kind};
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
    pub(super) key: i64,
    /// 1 for a key of 64 bits; 2 for a pair of 32 bits, which is never ours.
    subid: i32,
    is_shared: bool,
}

impl Lock {
    pub(super) fn is_of_64_bits(&self) -> bool {
        self.subid == 1
    }

    pub(super) fn is_for(&self, key: i64, mode: Mode) -> bool {
        self.is_of_64_bits() && self.key == key && self.is_shared == (mode == Mode::Shared)
    }
}

impl Look {
    /// # Errors
    ///
    /// Where the rows are not what was asked for.
    pub(super) fn read(rows: &[PgRow]) -> Result<Self, sqlx::Error> {
        let first = rows.first().ok_or(sqlx::Error::RowNotFound)?;
        let mut locks = Vec::new();
        for row in rows {
            if let Some(key) = row.try_get(3)? {
                let mode: String = row.try_get(5)?;
                locks.push(Lock { key, subid: row.try_get(4)?, is_shared: mode == "ShareLock" });
            }
        }
        Ok(Self { backend: Backend::read(first)?, is_in_recovery: first.try_get(2)?, locks })
    }
}

impl Backend {
    fn read(row: &PgRow) -> Result<Self, sqlx::Error> {
        Ok(Self { pid: row.try_get(0)?, server: row.try_get(1)? })
    }
}

/// Looks at a new session, and at a second connection where there is one to be made.
pub(super) async fn look(
    link: &mut Link,
    second: Option<&PgConnectOptions>,
    config: &Config,
) -> Result<Backend, ConnectError> {
    let rows = link.fetch(statements::LOOK.to_owned()).await.map_err(refusal::of_statement)?;
    let Look { backend, is_in_recovery, locks } = Look::read(&rows).map_err(refusal::of_statement)?;
    if is_in_recovery {
        return Err(ConnectError::Replica);
    }
    if let Some(target) = second {
        // Short of the limit that the driver sets to it all, so that the reason is told.
        affinity(link, &backend, target, config.query_timeout / 4).await?;
    }
    if !locks.is_empty() {
        return Err(ConnectError::UsedSession);
    }
    let probe = Key::of(Kind::Lock, &format!("probe of {} {:016x}", config.identity, random()));
    let rows = link.fetch(statements::probe(probe)).await.map_err(refusal::of_statement)?;
    let row = rows.first().ok_or(sqlx::Error::RowNotFound).map_err(refusal::of_statement)?;
    match row.try_get::<i64, _>(0).map_err(refusal::of_statement)? {
        1 => Ok(backend),
        -1 => Err(unsupported("a lock that nobody holds was refused")),
        _ => Err(unsupported("a lock that was granted does not show in pg_locks under our process id")),
    }
}

fn unsupported(reason: &str) -> ConnectError {
    ConnectError::Unsupported { reason: reason.to_owned() }
}

fn random() -> u64 {
    rand::make_rng::<rand::rngs::StdRng>().random()
}

/// Tells whether the session stays with its backend, whatever others do. With a single ask of the second connection a
/// pooler was missed 20 times of 20; asked three times outside of a transaction and once inside of one that stays open
/// while the first asks again, it was found 20 times of 20.
async fn affinity(
    link: &mut Link,
    first: &Backend,
    target: &PgConnectOptions,
    limit: Duration,
) -> Result<(), ConnectError> {
    let mut seen = Vec::new();
    let second = async {
        let mut second = PgConnection::connect_with(target).await?;
        for prefix in ["", "", "", "BEGIN;"] {
            let sql = AssertSqlSafe(format!("{prefix}{}", statements::WHO));
            seen.push(Backend::read(&sqlx::raw_sql(sql).fetch_one(&mut second).await?)?);
        }
        Ok::<_, sqlx::Error>(second)
    };
    let second = match tokio::time::timeout(limit, second).await {
        Ok(Ok(second)) => Ok(second),
        Ok(Err(error)) => Err(refusal::of_connect(error).to_string()),
        Err(_) => Err("it was not served in time".to_owned()),
    };
    if seen.contains(first) {
        return Err(pooler("two connections were answered by one server process"));
    }
    let mut second = second.map_err(|reason| ConnectError::NoSecondConnection { reason })?;

    // With one server connection left, a pooler cannot serve the first while the second is in a transaction: that one
    // ends then, and where the first is answered afterwards tells whether it was a pooler or a slow server.
    let mut asked = std::pin::pin!(link.fetch(statements::WHO.to_owned()));
    let answer = if let Ok(answer) = tokio::time::timeout(limit, &mut asked).await {
        answer
    } else {
        let (ended, answer) = tokio::join!(sqlx::raw_sql("ROLLBACK").execute(&mut second), asked);
        ended.map_err(refusal::of_connect)?;
        answer
    };
    // Also where the answer is an error: no pooled connection is left in a transaction.
    second.close().await.ok();
    let rows = answer.map_err(refusal::of_statement)?;
    let row = rows.first().ok_or(sqlx::Error::RowNotFound).map_err(refusal::of_statement)?;
    let again = Backend::read(row).map_err(refusal::of_statement)?;
    if seen.contains(&again) {
        return Err(pooler("two connections were answered by one server process"));
    }
    if again != *first {
        return Err(pooler("one connection was answered by two server processes"));
    }
    Ok(())
}

fn pooler(evidence: &str) -> ConnectError {
    ConnectError::Pooler { evidence: evidence.to_owned() }
}
