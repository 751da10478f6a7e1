//! Locks that a transaction holds, for those who have nothing but transactions: a pooler in transaction mode, say.
//!
//! [`xact_lock`] takes the lock of a name on *your* transaction, and the server releases it when that is committed or
//! rolled back, or its connection ends. It is the same lock as that of the same name taken by a
//! [`Locker`](crate::Locker) as a critical section ([`Kind::Lock`]): they exclude each other.
//!
//! ```no_run
//! use std::time::Duration;
//! use leasehold::Scope;
//! use leasehold::postgres::xact_lock;
//! use sqlx::Connection as _;
//!
//! const INVOICES: Scope<i64> = Scope::new("invoice");
//!
//! # async fn settle(connection: &mut sqlx::PgConnection) -> anyhow::Result<()> {
//! let mut tx = connection.begin().await?;
//! tokio::time::timeout(Duration::from_secs(3), xact_lock(&mut tx, INVOICES.name(&42))).await??;
//! let update = sqlx::query("UPDATE invoices SET settled = true WHERE id = $1").bind(42);
//! update.persistent(false).execute(&mut *tx).await?; // through a pooler, what is prepared must have no name
//! tx.commit().await?;
//! # Ok(())
//! # }
//! ```
//!
//! # What to know
//!
//! * There is no lease: nothing tells that the connection is gone but the next statement's error. Nothing has to: what the
//!   transaction wrote is gone with it.
//! * In `READ COMMITTED`, PostgreSQL's default, a statement after the lock sees all that earlier holders have committed.
//!   In `REPEATABLE READ` and `SERIALIZABLE` it does not: the snapshot is as old as the first statement, which is the first
//!   attempt at the latest.
//! * A savepoint that is rolled back takes the locks along that were taken after it.
//! * Whoever holds the lock is granted it again, and so is a session that holds it otherwise.
//! * Nobody who waits is pushed awake, here or at a Locker: they notice a release at their next attempt.
//! * The lock is as good as the server's: [`diagnose`](crate::diagnose) tells whether that is PostgreSQL indeed.

use std::error::Error;
use std::time::Duration;

use rand::RngExt as _;
use rand::rngs::StdRng;
use sqlx::{AssertSqlSafe, Database, PgConnection, Postgres, Row as _};
use sqlx_core::transaction::TransactionManager as _;

use crate::clock;
use crate::fence::Fenced;
use crate::lease::Lease;
use crate::name::{Key, Kind, Name, NameError};
use crate::store::postgres::{
    NO_TRANSACTION, OTHER_DATABASE, OVER, REPLICA, abort, try_xact_lock as statement,
};

/// Gives the SQL that makes the one table that leasehold has, and where a role is given, lets that one use it: as
/// `leasehold schema` prints it. Only [`Every`](crate::Every) needs it. To run it again changes nothing.
///
/// The role stands there as it is given: quoted, where it has to be.
///
/// ```
/// let sql = leasehold::postgres::slots_schema(Some("app"));
/// assert!(sql.contains("GRANT SELECT, INSERT, UPDATE ON leasehold.slots TO app;"));
/// ```
#[must_use]
pub fn slots_schema(role: Option<&str>) -> String {
    crate::store::postgres::slots_schema(role)
}

/// Between the first two attempts. A section of a transaction is short.
const FIRST_PAUSE: Duration = Duration::from_millis(5);

/// Between two attempts at most: four statements a second of each who waits are no load.
const LONGEST_PAUSE: Duration = Duration::from_millis(250);

/// Why a transaction did not get a lock.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum XactLockError {
    /// The name cannot be used.
    #[error(transparent)]
    Name(#[from] NameError),
    /// The connection is not in a transaction: the lock would be gone at once. Nothing was taken.
    #[error("a lock of a transaction needs one, and outside of it would be gone at once: call begin() first")]
    NoTransaction,
    /// The server is a read replica, whose locks the primary knows nothing of. Nothing was taken.
    #[error(
        "the server is a read replica, whose locks exclude nobody on the primary: connect to the primary"
    )]
    Replica,
    /// The server has answered with an error, or the connection is broken. The source is a `sqlx::Error`.
    #[error("the lock could not be asked for")]
    Database(#[source] Box<dyn Error + Send + Sync>),
}

/// Takes a lock for the rest of the transaction, if it is free: true if the transaction has it now.
///
/// ```no_run
/// # async fn tidy(tx: &mut sqlx::PgConnection) -> anyhow::Result<()> {
/// if leasehold::postgres::try_xact_lock(tx, "tidy").await? {
///     sqlx::raw_sql("DELETE FROM sessions WHERE ends_at < now()").execute(&mut *tx).await?;
/// }
/// # Ok(())
/// # }
/// ```
///
/// # Errors
///
/// Those of [`XactLockError`]. One of the server ends the transaction, as any does.
///
/// # Cancel safety
///
/// Dropped in the middle, the transaction may have the lock, until its end; it can be used all the same.
pub async fn try_xact_lock(tx: &mut PgConnection, name: impl Into<Name>) -> Result<bool, XactLockError> {
    let key = key(&name.into())?;
    attempt(tx, key).await
}

/// Takes a lock for the rest of the transaction, and waits until it is free: without limit, so bound it with
/// [`tokio::time::timeout`].
///
/// It asks again and again, after 5 ms at first and 250 ms in the end, and up to a fifth more at random; nobody is served
/// in order. It never waits in the server: a statement that waits holds a snapshot, which holds up vacuum and
/// `CREATE INDEX CONCURRENTLY`. The transaction is idle in between: that is limited by the server's
/// `idle_in_transaction_session_timeout`, if it is less than 300 ms.
///
/// # Errors
///
/// Those of [`XactLockError`]. One of the server ends the transaction, as any does.
///
/// # Cancel safety
///
/// Dropped in the middle, the transaction may have the lock, until its end; it can be used all the same.
pub async fn xact_lock(tx: &mut PgConnection, name: impl Into<Name>) -> Result<(), XactLockError> {
    let key = key(&name.into())?;
    if attempt(tx, key).await? {
        return Ok(());
    }
    let (mut rng, mut pause): (StdRng, _) = (rand::make_rng(), FIRST_PAUSE);
    loop {
        let jittered = pause.mul_f64(1.0 + rng.random_range(0.0..0.2));
        clock::sleep_until(clock::now() + jittered).await;
        if attempt(tx, key).await? {
            return Ok(());
        }
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

impl Lease {
    /// Fences a transaction of the lease's own database, in one round trip: it can be committed in this term, or not at all,
    /// whatever happens to this process in between. No later term of the name begins before it has ended.
    ///
    /// Call it first, in the outermost transaction, on any connection to the primary, also through a pooler in transaction
    /// mode. All that is said of [`fence_sql`](Self::fence_sql) holds. [The guide](crate::guide::fencing) says what it is good for.
    ///
    /// ```no_run
    /// # use sqlx::Connection as _;
    /// # async fn sweep(connection: &mut sqlx::PgConnection, lease: &leasehold::Lease) -> anyhow::Result<()> {
    /// let mut tx = connection.begin().await?;
    /// lease.fence(&mut tx).await?;
    /// sqlx::query("UPDATE accounts SET balance = 0 WHERE id = 42").execute(&mut *tx).await?;
    /// tx.commit().await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// On a connection that keeps prepared statements, as sqlx's do by default, it is one of them in a transaction that sqlx has
    /// begun. That the transaction is still open is sqlx's word then: whoever ends it by a `COMMIT` or `ROLLBACK` of their own
    /// as SQL, and goes on with the `Transaction`, writes outside of any, and no fence notices. After `DISCARD ALL` or
    /// `DEALLOCATE ALL` it fails, as sqlx's other statements do.
    ///
    /// # Errors
    ///
    /// [`Fenced`]. The transaction is aborted by the server then, so that nothing of it can be committed, also where the
    /// error is ignored; of a nested one that is so until it is rolled back.
    ///
    /// # Cancel safety
    ///
    /// Not cancel-safe: dropped in the middle, the transaction may or may not be fenced. Roll it back.
    pub async fn fence(&self, tx: &mut PgConnection) -> Result<(), Fenced> {
        let is_nested = <Postgres as Database>::TransactionManager::get_transaction_depth(tx) > 1;
        let fence = if is_nested { Err(Fenced::Nested) } else { self.by_what() };
        match fence {
            Ok(fence) => fence.fence(tx).await.map_err(refused),
            Err(error) => {
                sqlx::raw_sql(AssertSqlSafe(abort())).fetch_all(tx).await.ok();
                Err(error)
            }
        }
    }
}

/// What the server's answer to a fence says.
fn refused(error: sqlx::Error) -> Fenced {
    let says = |what: &str| error.as_database_error().is_some_and(|error| error.message().contains(what));
    match () {
        () if says(OVER) => Fenced::Over,
        () if says(NO_TRANSACTION) => Fenced::NoTransaction,
        () if says(OTHER_DATABASE) => Fenced::OtherDatabase,
        () if says(REPLICA) => Fenced::Replica,
        () => Fenced::Database(Box::new(error)),
    }
}

fn key(name: &Name) -> Result<Key, NameError> {
    name.validate()?;
    Ok(Key::of(Kind::Lock, name))
}

/// One message of the simple protocol: through a pooler there may be no named statement, and only so is the time of the
/// statement that of its transaction outside of a transaction block, which tells.
async fn attempt(tx: &mut PgConnection, key: Key) -> Result<bool, XactLockError> {
    // To the last row, so that nothing of the answer is left in the connection.
    let rows = sqlx::raw_sql(AssertSqlSafe(statement(key))).fetch_all(tx).await.map_err(database)?;
    let row = rows.first().ok_or_else(|| database(sqlx::Error::RowNotFound))?;
    match row.try_get(0).map_err(database)? {
        "granted" => Ok(true),
        "busy" => Ok(false),
        "replica" => Err(XactLockError::Replica),
        _ => Err(XactLockError::NoTransaction),
    }
}

fn database(error: sqlx::Error) -> XactLockError {
    XactLockError::Database(Box::new(error))
}
