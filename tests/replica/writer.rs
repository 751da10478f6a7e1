//! Jobs that write to a database, on connections that nobody ends with their lease, and go on after its loss.
//!
//! What they write to is made by the tests: `starts (token, snapshot, at)` and `writes (token)`.

use std::error::Error;
use std::fs::File;
use std::io::{self, Write as _};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use leasehold::{CancellationToken, Fenced, FencingToken, Lease, Locker, State};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{AssertSqlSafe, PgConnection, PgPool, Row as _};
use tokio::task::JoinSet;

/// How many transactions of a term are open beside each other.
const WRITERS: u64 = 2;

/// How long a writer goes on after its lease was lost: through several later terms.
const AFTERLIFE: Duration = Duration::from_millis(300);

/// The longest pause between fence and commit.
const LONGEST_PAUSE: Duration = Duration::from_millis(40);

/// Between two transactions.
const REST: Duration = Duration::from_millis(2);

#[derive(Clone, Copy, PartialEq, Eq)]
enum How {
    /// Again and again, whatever happens to the lease.
    Always,
    /// In one transaction, which is committed when the lease is lost.
    Once,
}

/// A clone is the same.
#[derive(Clone)]
pub(crate) struct Writer {
    how: How,
    is_fenced: bool,
    pool: PgPool,
    log: Arc<File>,
    tasks: Arc<Mutex<JoinSet<Result<(), sqlx::Error>>>>,
}

impl Writer {
    /// `None` if that is not the behaviour of one who writes.
    pub(crate) fn of(behaviour: &str, url: &str, log: File) -> Result<Option<Self>, Box<dyn Error>> {
        let (how, is_fenced) = match behaviour {
            "write-fenced" => (How::Always, true),
            "write-plain" => (How::Always, false),
            "once-fenced" => (How::Once, true),
            "once-plain" => (How::Once, false),
            _ => return Ok(None),
        };
        let options: PgConnectOptions = url.parse()?;
        // They are never killed: a look at each before it is used would only come between a grant and the first statement.
        let pool = PgPoolOptions::new().max_connections(16).test_before_acquire(false);
        let pool = pool.connect_lazy_with(options.application_name("writer"));
        Ok(Some(Self { how, is_fenced, pool, log: Arc::new(log), tasks: Arc::default() }))
    }

    /// Until it is told to end, and what it began to write has ended.
    pub(crate) async fn run(
        self,
        locker: Locker,
        name: &str,
        shutdown: CancellationToken,
    ) -> Result<(), Box<dyn Error>> {
        // Connected before the first term.
        drop(self.pool.acquire().await?);
        let mut states = locker.subscribe(name);
        let (who, seen) = (locker.identity().to_owned(), self.clone());
        let looks = tokio::spawn(async move {
            while let Some(state) = states.changed().await {
                if state == State::Blocked {
                    seen.write(&who, "blocked", 0).ok();
                }
            }
        });
        let candidate = locker.candidate(name).until(shutdown);
        candidate.run(async |lease: Lease| self.job(locker.identity(), lease).await).await?;
        locker.close().await;
        drop(locker);
        looks.abort();
        looks.await.ok();
        let tasks = std::mem::take(&mut *self.tasks.lock().unwrap_or_else(PoisonError::into_inner));
        for ended in tasks.join_all().await {
            ended?;
        }
        Ok(())
    }

    fn write(&self, who: &str, what: &str, term: u64) -> io::Result<()> {
        // One write, so that lines of several processes do not mix.
        (&*self.log).write_all(format!("{who} {what} {term}\n").as_bytes())
    }

    fn spawn(&self, task: impl Future<Output = Result<(), sqlx::Error>> + Send + 'static) {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner).spawn(task);
    }

    /// What it starts does not end with it: that is what a thread does that nobody can stop, or a request on its way.
    async fn job(&self, who: &str, lease: Lease) -> Result<(), sqlx::Error> {
        self.write(who, "start", lease.term())?;
        if self.how == How::Once {
            self.spawn(self.clone().once(who.to_owned(), lease.clone()));
            lease.cancelled().await;
            return Ok(());
        }
        // Before all else: what this term can see of those before.
        let sql = "SELECT pg_current_snapshot()::text, clock_timestamp()::text";
        let row = sqlx::raw_sql(sql).fetch_one(&self.pool).await?;
        let (snapshot, at): (String, String) = (row.try_get(0)?, row.try_get(1)?);
        // Without one, nobody could tell which term was the earlier one.
        if let Ok(token) = lease.fencing_token().await {
            let sql = format!("INSERT INTO starts VALUES ({token}, '{snapshot}', '{at}')");
            sqlx::raw_sql(AssertSqlSafe(sql)).execute(&self.pool).await?;
            for number in 0..WRITERS {
                let rng = StdRng::seed_from_u64(token.get() * WRITERS + number);
                self.spawn(self.clone().always(who.to_owned(), lease.clone(), token, rng));
            }
        }
        lease.cancelled().await;
        Ok(())
    }

    async fn always(
        self,
        who: String,
        lease: Lease,
        token: FencingToken,
        mut rng: StdRng,
    ) -> Result<(), sqlx::Error> {
        let late = async {
            lease.lost().await;
            tokio::time::sleep(AFTERLIFE).await;
        };
        let mut late = std::pin::pin!(late);
        loop {
            let mut tx = self.pool.begin().await?;
            let is_fenced = self.fence(&lease, &mut tx).await?;
            if !is_fenced {
                self.write(&who, "over", lease.term())?;
            }
            // Whatever it was told.
            let written = insert(&mut tx, token.get()).await;
            if rng.random_bool(0.5) {
                tokio::time::sleep(LONGEST_PAUSE.mul_f64(rng.random())).await;
            }
            let committed = tx.commit().await;
            if is_fenced {
                written.and(committed)?;
            }
            if tokio::time::timeout(REST, &mut late).await.is_ok() {
                return Ok(());
            }
        }
    }

    async fn once(self, who: String, lease: Lease) -> Result<(), sqlx::Error> {
        let mut tx = self.pool.begin().await?;
        if !self.fence(&lease, &mut tx).await? {
            self.write(&who, "over", lease.term())?;
            return Ok(());
        }
        insert(&mut tx, lease.term()).await?;
        self.write(&who, "open", lease.term())?;
        lease.lost().await;
        let told = if tx.commit().await.is_ok() { "committed" } else { "refused" };
        self.write(&who, told, lease.term())?;
        Ok(())
    }

    /// False where the term is over. True, and not fenced, for those who do without.
    async fn fence(&self, lease: &Lease, tx: &mut PgConnection) -> Result<bool, sqlx::Error> {
        if !self.is_fenced {
            return Ok(true);
        }
        match lease.fence(tx).await {
            Ok(()) => Ok(true),
            Err(Fenced::Over) => Ok(false),
            Err(error) => Err(sqlx::Error::Protocol(format!("{error:?}"))),
        }
    }
}

async fn insert(tx: &mut PgConnection, token: u64) -> Result<(), sqlx::Error> {
    let sql = format!("INSERT INTO writes VALUES ({token})");
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(tx).await.map(drop)
}
