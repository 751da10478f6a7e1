//! A catalogue of two files that belong together: many read it side by side, and who writes it is alone.
//!
//! ```text
//! cargo run --example catalogue
//! ```
//!
//! [`Catalogue`] is as you would write it; the rest plays three processes in one, two of which read and one of which writes.
//! The exit code is 0 only if the readers were in at the same time, and nobody ever read one file of one edition and the other
//! one of another.
//!
//! The processes meet in a temporary directory, in which the files are as well. `LEASEHOLD_STORE=file:/some/where` names
//! another store for the lock by its URL, for one such play at a time.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use leasehold::{Lease, Locker, Options, RwLock};
use tokio::sync::{Barrier, watch};
use tokio::time::timeout;

/// How many editions are written while others read.
const EDITIONS: u64 = 20;

/// What each process has: where the files are, and the lock that goes with them.
#[derive(Clone)]
struct Catalogue {
    directory: PathBuf,
    lock: RwLock,
}

impl Catalogue {
    fn new(directory: &Path, locker: &Locker) -> Self {
        Self { directory: directory.to_owned(), lock: locker.rw_lock("catalogue") }
    }

    /// Reads one edition, beside other readers. While it `looks`, nobody writes.
    async fn read<T>(&self, looks: impl AsyncFnOnce(u64) -> T) -> anyhow::Result<T> {
        self.lock
            .with_read(async |_: Lease| {
                let (prices, stock) = (self.edition_of("prices").await?, self.edition_of("stock").await?);
                ensure!(
                    prices == stock,
                    "the prices are of edition {prices}, the stock is of edition {stock}"
                );
                Ok(looks(prices).await)
            })
            .await
    }

    /// Writes the edition after the last one, alone.
    async fn write(&self) -> anyhow::Result<u64> {
        self.lock
            .with_write(async |lease: Lease| {
                let edition = self.edition_of("prices").await? + 1;
                for file in ["prices", "stock"] {
                    // Who has lost the lock is not alone any more. It is dropped soon after, at an await point, and a file
                    // that a call of its own was writing can still change: hand on a token to where that matters.
                    ensure!(lease.is_held(), "the lock was lost in the middle of an edition");
                    tokio::fs::write(self.directory.join(file), edition.to_string()).await?;
                }
                Ok(edition)
            })
            .await
    }

    /// 0 before the first one is written.
    async fn edition_of(&self, file: &str) -> anyhow::Result<u64> {
        match tokio::fs::read_to_string(self.directory.join(file)).await {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(0),
            text => text?.parse().with_context(|| format!("{file} is half written")),
        }
    }
}

/// A reader: in with all others once, then again and again, until it has seen the last edition.
async fn reads(
    catalogue: Catalogue,
    together: Arc<Barrier>,
    may_write: watch::Sender<u64>,
) -> anyhow::Result<()> {
    catalogue
        .read(async |_| {
            // Is over only when all readers are in at the same time.
            together.wait().await;
            may_write.send_modify(|readers| *readers += 1);
        })
        .await?;
    while catalogue.read(async |edition| edition).await? < EDITIONS {}
    Ok(())
}

async fn play() -> anyhow::Result<()> {
    let directory = tempfile::tempdir()?;
    let default = format!("file:{}", directory.path().join("leases").display());
    let store = std::env::var("LEASEHOLD_STORE").unwrap_or(default);

    let mut lockers = Vec::new();
    for identity in ["reads-1", "reads-2", "writes"] {
        let options = Options::default().retry_interval(Duration::from_millis(200)).identity(identity);
        lockers.push(Locker::connect(&store, options).await?);
    }
    let [reads_1, reads_2, writes] =
        [0, 1, 2].map(|process: usize| Catalogue::new(directory.path(), &lockers[process]));

    // Two tasks of one process, and one of another one.
    let readers = [reads_1.clone(), reads_1, reads_2];
    let together = Arc::new(Barrier::new(readers.len()));
    let may_write = watch::Sender::new(0);
    let mut tasks = Vec::new();
    for catalogue in readers {
        tasks.push(tokio::spawn(reads(catalogue, Arc::clone(&together), may_write.clone())));
    }
    // A writer who waits keeps new readers out: one who came now would keep the last reader from the barrier.
    may_write.subscribe().wait_for(|readers| *readers == 3).await?;
    println!("three readers were in at the same time");

    let mut edition = 0;
    while edition < EDITIONS {
        edition = writes.write().await?;
    }
    println!("{edition} editions were written while they read");

    for task in tasks {
        task.await??;
    }
    println!("each of them read whole editions only");
    for locker in lockers {
        locker.close().await;
    }
    Ok(())
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    timeout(Duration::from_mins(1), play()).await.context("somebody did not get in")?
}
