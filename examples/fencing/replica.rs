//! The service: what a user of leasehold writes. One process of it is a replica.

use std::io::BufRead as _;
use std::time::Duration;

use leasehold::{Fenced, Lease, Locker, Options, State};
use sqlx::{AssertSqlSafe, Connection as _, PgConnection};
use tokio::sync::mpsc;

/// The defaults suit a real service; these make it quicker to watch. The server frees the lease of one that is silent for
/// 2.5 s, and ends a fenced transaction that is idle for 4 s, so that it can be seen who waits for it.
fn options(who: &str) -> Options {
    Options::default()
        .retry_interval(Duration::from_millis(100))
        .heartbeat_interval(Duration::from_millis(250))
        .query_timeout(Duration::from_secs(1))
        .stop_grace(Duration::from_millis(250))
        .fence_limit(Some(Duration::from_secs(4)))
        .identity(who)
}

/// What a replica has to do, and where it is frozen in it.
struct Work {
    takes: i64,
    is_fenced: bool,
    frozen: String,
    store: String,
    table: String,
    /// A line each time that it may go on.
    go_on: mpsc::UnboundedReceiver<()>,
}

pub(crate) async fn main(
    who: &str,
    takes: &str,
    is_fenced: &str,
    frozen: &str,
    table: &str,
) -> anyhow::Result<()> {
    let store = std::env::var("LEASEHOLD_STORE")?;
    let locker = Locker::connect(&store, options(who)).await?;
    let mut state = locker.subscribe(table);
    let waits = tokio::spawn(async move {
        if state.wait_for(|state| state == State::Blocked).await.is_some() {
            println!("waits");
        }
    });
    let work = Work {
        takes: takes.parse()?,
        is_fenced: is_fenced.parse()?,
        frozen: frozen.to_owned(),
        store,
        table: table.to_owned(),
        go_on: go_on(),
    };
    let mut work = Some(work);
    locker
        .run(table, |lease: Lease| {
            if let Some(work) = work.take() {
                // A task of its own is not dropped when the lease is lost, nor is what has been sent to a server already.
                // Whoever spawns one has to end it; here nobody does, so that only the fence is in its way.
                tokio::spawn(do_the_work(lease.clone(), work));
            }
            async move {
                lease.cancelled().await;
                anyhow::Ok(())
            }
        })
        .await?;
    waits.await?;
    Ok(())
}

async fn do_the_work(lease: Lease, mut work: Work) {
    match take(&lease, &mut work).await {
        Ok(left) => println!("has written {left}"),
        Err(error) if error.is::<Fenced>() => println!("is refused: {error}"),
        Err(error) => {
            eprintln!("(what the first replica was told: {error:#})");
            println!("cannot write");
        }
    }
}

/// Takes from the stock: reads what is there, and writes what is left.
async fn take(lease: &Lease, work: &mut Work) -> anyhow::Result<i64> {
    let mut connection = PgConnection::connect(&work.store).await?;
    work.may_be_frozen("before").await;
    let mut tx = connection.begin().await?;
    if work.is_fenced {
        lease.fence(&mut tx).await?;
    }
    let table = &work.table;
    let read = AssertSqlSafe(format!("SELECT amount FROM {table}"));
    let amount: i64 = sqlx::query_scalar(read).fetch_one(&mut *tx).await?;
    println!("has read {amount}");
    let left = amount - work.takes;
    work.may_be_frozen("in it").await;
    let write = AssertSqlSafe(format!("UPDATE {} SET amount = $1", work.table));
    sqlx::query(write).bind(left).execute(&mut *tx).await?;
    tx.commit().await?;
    Ok(left)
}

impl Work {
    /// Waits to be let go on, where this is the place to be frozen at.
    async fn may_be_frozen(&mut self, place: &str) {
        if self.frozen == place {
            println!("can be frozen");
            self.go_on.recv().await;
        }
    }
}

/// Ends this process when the one that started it is gone, however that ended: its end of our standard input closes.
///
/// A thread of its own, since a runtime that shuts down waits for tokio's standard input.
fn go_on() -> mpsc::UnboundedReceiver<()> {
    let (tell, told) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        for _line in std::io::stdin().lock().lines().map_while(Result::ok) {
            tell.send(()).ok();
        }
        std::process::exit(1);
    });
    told
}
