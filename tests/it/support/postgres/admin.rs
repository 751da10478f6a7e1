//! A connection of the tests' own, for looking and breaking from any thread, in a runtime or not.

use std::fmt::Debug;
use std::str::FromStr;
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgRow};
use sqlx::{AssertSqlSafe, Connection as _, PgConnection, Row as _};

/// Longest wait for an answer.
const LIMIT: Duration = Duration::from_secs(10);

/// What the server answered: rows of texts, empty for NULL.
pub(crate) type Rows = Vec<Vec<String>>;

type Request = (String, mpsc::Sender<Result<Rows, String>>);

/// A thread with a connection. It connects anew when the server was away.
pub(crate) struct Admin {
    requests: Option<mpsc::Sender<Request>>,
    thread: Option<JoinHandle<()>>,
}

impl Admin {
    pub(crate) fn new(options: PgConnectOptions) -> Self {
        let (requests, received) = mpsc::channel::<Request>();
        let thread = thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let mut connection = None;
            for (sql, answer) in received {
                let rows = async {
                    let asked = tokio::time::timeout(LIMIT, ask(&mut connection, &options, &sql)).await;
                    asked.unwrap_or_else(|_| {
                        connection = None;
                        Err(format!("no answer within {LIMIT:?} to {sql}"))
                    })
                };
                answer.send(runtime.block_on(rows)).ok();
            }
            if let Some(connection) = connection {
                runtime.block_on(async { tokio::time::timeout(LIMIT, connection.close()).await }).ok();
            }
        });
        Self { requests: Some(requests), thread: Some(thread) }
    }

    /// Runs SQL; the rows are those of all its statements.
    pub(crate) fn try_sql(&self, sql: &str) -> Result<Rows, String> {
        let (answer, answered) = mpsc::channel();
        self.requests.as_ref().unwrap().send((sql.to_owned(), answer)).expect("the thread lives");
        answered.recv().expect("the thread answers")
    }

    /// As [`try_sql`](Self::try_sql); it must succeed.
    #[track_caller]
    pub(crate) fn sql(&self, sql: &str) -> Rows {
        self.try_sql(sql).unwrap_or_else(|error| panic!("{error}: {sql}"))
    }

    /// The first column of the only row.
    #[track_caller]
    pub(crate) fn one<T: FromStr<Err: Debug>>(&self, sql: &str) -> T {
        let rows = self.sql(sql);
        assert_eq!(rows.len(), 1, "{sql}: {rows:?}");
        rows[0][0].parse().unwrap_or_else(|error| panic!("{sql}: {rows:?}: {error:?}"))
    }
}

async fn ask(
    connection: &mut Option<PgConnection>,
    options: &PgConnectOptions,
    sql: &str,
) -> Result<Rows, String> {
    loop {
        let old = connection.is_some();
        let live = match connection.take() {
            Some(live) => connection.insert(live),
            None => connection.insert(PgConnection::connect_with(options).await.map_err(|e| e.to_string())?),
        };
        match sqlx::raw_sql(AssertSqlSafe(sql)).fetch_all(&mut *live).await {
            Ok(rows) => return Ok(rows.iter().map(texts).collect()),
            Err(error) => {
                let answered =
                    matches!(&error, sqlx::Error::Database(it) if !it.message().contains("terminating"));
                if !answered {
                    *connection = None;
                }
                if answered || !old {
                    return Err(error.to_string());
                }
            }
        }
    }
}

fn texts(row: &PgRow) -> Vec<String> {
    let text = |column| row.try_get_unchecked::<Option<String>, _>(column).unwrap().unwrap_or_default();
    (0..row.len()).map(text).collect()
}

impl Drop for Admin {
    fn drop(&mut self) {
        self.requests.take();
        if let Some(thread) = self.thread.take() {
            thread.join().ok();
        }
    }
}
