//! What one who holds locks can ask to see whether it still does: in plain SQL, on a plain connection.

use sqlx::postgres::PgConnectOptions;
use sqlx::{Connection as _, PgConnection};

const LOOK: &str = "SELECT pg_backend_pid(), classid, objid, objsubid, mode FROM pg_locks \
    WHERE locktype = 'advisory' AND pid = pg_backend_pid()";

const HOLD: &str = "SELECT count(pg_try_advisory_lock(n)) FROM generate_series($1, $1 + $2 - 1) n";

/// A plain connection, and locks of its own.
pub(crate) struct Plain {
    pub(crate) connection: PgConnection,
    first: i64,
}

impl Plain {
    /// Its keys begin with `first`.
    pub(crate) async fn connect(target: &PgConnectOptions, first: i64) -> anyhow::Result<Self> {
        let connection = PgConnection::connect_with(&target.clone().application_name("plain")).await?;
        Ok(Self { connection, first })
    }

    /// Holds so many locks, and no more.
    pub(crate) async fn hold(&mut self, count: u32) -> anyhow::Result<()> {
        sqlx::raw_sql("SELECT pg_advisory_unlock_all()").execute(&mut self.connection).await?;
        let hold = sqlx::query(HOLD).bind(self.first).bind(i64::from(count));
        hold.execute(&mut self.connection).await?;
        Ok(())
    }

    pub(crate) async fn look(&mut self) -> anyhow::Result<()> {
        sqlx::raw_sql(LOOK).fetch_all(&mut self.connection).await?;
        Ok(())
    }

    pub(crate) async fn close(self) -> anyhow::Result<()> {
        Ok(self.connection.close().await?)
    }
}
