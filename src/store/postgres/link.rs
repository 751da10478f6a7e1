//! The one connection of a session, and how it ends.

use std::path::PathBuf;
use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgConnection, PgListener, PgNotification, PgPoolOptions, PgRow};
use sqlx::{AssertSqlSafe, Connection as _, PgPool};
use tokio::runtime::Runtime;

use super::refusal;
use super::statements::{QUICK, Quick};
use crate::error::{ConnectError, LossCause};

/// One connection that carries statements and notifications: a listener over a pool of exactly one connection.
///
/// A listener would silently reconnect when it is used after a loss; a link that is over is used no more.
///
/// Dropping it is the hard end. Left to itself, a dropped listener sends `UNLISTEN` and parks the connection in its
/// pool, *with its locks*; outside of a runtime it panics. Here it is dropped inside of a runtime that is never driven, and
/// that runtime with it: the socket closes and nothing is sent. It works anywhere, also where no runtime is.
pub(super) struct Link {
    listener: Option<PgListener>,
    pool: PgPool,
    /// Where the connection is dropped. Made beforehand, so that the end cannot fail.
    grave: Grave,
    is_over: bool,
}

impl Link {
    pub(super) async fn open(target: &PgConnectOptions, limit: Duration) -> Result<Self, ConnectError> {
        knock(target).await?;
        let grave = Grave::dig().map_err(|error| ConnectError::Unreachable { reason: error.to_string() })?;
        // A pool tries again by itself, without a word, while a server starts up or has no room: half of the time is
        // its own, and then a plain connection tells why.
        let pool = PgPoolOptions::new()
            .max_connections(1)
            .max_lifetime(None)
            .idle_timeout(None)
            .test_before_acquire(false)
            .acquire_timeout(limit / 2)
            .connect_lazy_with(target.clone());
        let mut listener = match PgListener::connect_with(&pool).await {
            Ok(listener) => listener,
            Err(sqlx::Error::PoolTimedOut) => {
                drop(pool);
                let error = match PgConnection::connect_with(target).await {
                    Ok(connection) => {
                        connection.close().await.ok();
                        sqlx::Error::PoolTimedOut
                    }
                    Err(error) => error,
                };
                return Err(refusal::of_connect(error));
            }
            Err(error) => return Err(refusal::of_connect(error)),
        };
        listener.eager_reconnect(false);
        Ok(Self { listener: Some(listener), pool, grave, is_over: false })
    }

    /// Sends one message of the simple query protocol, and gives the rows of all its statements.
    ///
    /// One message on purpose: a statement of the extended protocol of which only half arrived leaves the server waiting
    /// with no limit armed.
    pub(super) async fn fetch(&mut self, sql: String) -> Result<Vec<PgRow>, sqlx::Error> {
        let listener = self.live()?;
        let rows = sqlx::raw_sql(AssertSqlSafe(sql)).fetch_all(&mut *listener).await;
        self.notice(&rows);
        rows
    }

    /// Sends [`QUICK`], which is prepared at its first use.
    pub(super) async fn fetch_quick(&mut self, quick: Quick) -> Result<PgRow, sqlx::Error> {
        let Quick { steps, keys, waiting } = quick;
        let listener = self.live()?;
        let query = sqlx::query(QUICK).bind(steps).bind(keys).bind(waiting);
        let row = query.fetch_one(&mut *listener).await;
        self.notice(&row);
        row
    }

    /// An error that is no answer is the end.
    fn notice<T>(&mut self, answer: &Result<T, sqlx::Error>) {
        if answer.as_ref().is_err_and(|error| refusal::answered(error).is_none()) {
            self.is_over = true;
        }
    }

    pub(super) async fn listen(&mut self, channel: &str) -> Result<(), sqlx::Error> {
        self.live()?.listen(channel).await
    }

    /// Waits for the next notification, or the end. Cancel-safe.
    pub(super) async fn next(&mut self) -> Result<PgNotification, LossCause> {
        let received = match self.live() {
            Ok(listener) => listener.try_recv().await,
            Err(error) => Err(error),
        };
        match received {
            Ok(Some(notification)) => Ok(notification),
            // The server's parting words, which would tell the reason, are not handed on by the client library.
            Ok(None) => {
                self.is_over = true;
                Err(LossCause::Closed {
                    reason: "the connection was closed by the other end".to_owned(),
                    sqlstate: None,
                })
            }
            Err(error) => {
                self.is_over = true;
                Err(refusal::of_session(&error))
            }
        }
    }

    /// It is of no use any more.
    pub(super) const fn is_over(&self) -> bool {
        self.is_over
    }

    fn live(&mut self) -> Result<&mut PgListener, sqlx::Error> {
        self.listener.as_mut().filter(|_| !self.is_over).ok_or(sqlx::Error::PoolClosed)
    }

    /// Ends the connection in order: the server is told, and has closed it when this returns.
    ///
    /// Dropped in the middle, the end is a hard one, or left to the runtime that this runs on.
    pub(super) async fn close(mut self) {
        if self.is_over {
            return;
        }
        let pool = self.pool.clone();
        // Closed already when this returns: the connection that comes back to the pool is ended, not kept.
        let closing = pool.close();
        drop(self.listener.take());
        closing.await;
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        if let Some(listener) = self.listener.take() {
            self.grave.bury(listener);
        }
    }
}

/// A runtime that is never driven: what is dropped in it goes without a word.
struct Grave(Option<Runtime>);

impl Grave {
    fn dig() -> std::io::Result<Self> {
        tokio::runtime::Builder::new_current_thread().build().map(Some).map(Self)
    }

    fn bury(&mut self, listener: PgListener) {
        if let Some(runtime) = &self.0 {
            let entered = runtime.enter();
            drop(listener);
            drop(entered);
        }
        self.close();
    }

    fn close(&mut self) {
        if let Some(runtime) = self.0.take() {
            // Unlike a plain drop it is allowed inside of another runtime.
            runtime.shutdown_background();
        }
    }
}

impl Drop for Grave {
    fn drop(&mut self) {
        self.close();
    }
}

/// The socket that a target names, where it does not name a host.
pub(super) fn unix_socket(target: &PgConnectOptions) -> Option<PathBuf> {
    let folder = match target.get_socket() {
        Some(folder) => folder.clone(),
        None => PathBuf::from(Some(target.get_host()).filter(|host| host.starts_with('/'))?),
    };
    Some(folder.join(format!(".s.PGSQL.{}", target.get_port())))
}

/// Sees whether anybody listens there: a pool that is refused keeps trying and says nothing. Sends nothing; the server
/// does not even log it.
async fn knock(target: &PgConnectOptions) -> Result<(), ConnectError> {
    let knocked = match unix_socket(target) {
        #[cfg(unix)]
        Some(path) => tokio::net::UnixStream::connect(path).await.map(drop),
        #[cfg(not(unix))]
        Some(_) => Ok(()),
        None => tokio::net::TcpStream::connect((target.get_host(), target.get_port())).await.map(drop),
    };
    knocked.map_err(|error| refusal::of_connect(error.into()))
}
