//! A report that is written once per interval by the deployment, whoever writes it.
//!
//! ```text
//! cargo run --example report
//! ```
//!
//! [`serve`] is the service, as you would write it; the rest plays two replicas of it in one process, with an interval of one
//! second. After a few reports the replica that wrote the last one is closed, and the other one goes on. The exit code is 0
//! only if it did, and no report was written twice.
//!
//! The replicas meet in a temporary directory. `LEASEHOLD_STORE=file:/some/where` names another store by its URL, for one
//! such play at a time.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use leasehold::{EveryError, Locker, Options, Slot};
use tokio::sync::mpsc;
use tokio::time::timeout;

/// The shortest there is. An hour or a day, where reports are read.
const INTERVAL: Duration = Duration::from_secs(1);

/// How many reports are written before one replica is closed, and how many after that.
const REPORTS: usize = 3;

/// Serves slots until its Locker is closed.
async fn serve(locker: Locker, desk: Desk) -> Result<(), EveryError> {
    locker.every("report", INTERVAL).run(|slot| write(slot, locker.identity(), &desk)).await
}

/// The job: called once in each slot, in one of the replicas.
async fn write(slot: Slot, by: &str, desk: &Desk) -> anyhow::Result<()> {
    // By the slot, never by the clock of this host: so all replicas, and a second attempt, mean the same period.
    let report = Report { number: slot.number, run: slot.run, by: by.to_owned() };
    // A slot is a lease: what takes longer looks at `slot.cancelled()`, and can be fenced.
    desk.send(report).await.context("nobody reads reports any more")
}

/// Where reports go.
type Desk = mpsc::Sender<Report>;

struct Report {
    number: u64,
    run: u32,
    by: String,
}

async fn play() -> anyhow::Result<()> {
    let directory = tempfile::tempdir()?;
    let default = format!("file:{}", directory.path().display());
    let store = std::env::var("LEASEHOLD_STORE").unwrap_or(default);

    let (sender, mut written) = mpsc::channel(16);
    let (mut lockers, mut runs) = (Vec::new(), Vec::new());
    for identity in ["a", "b"] {
        let options = Options::default().retry_interval(Duration::from_millis(200)).identity(identity);
        let locker = Locker::connect(&store, options).await?;
        runs.push(tokio::spawn(serve(locker.clone(), sender.clone())));
        lockers.push(locker);
    }

    let mut last = read(&mut written, None).await?;
    for _ in 1..REPORTS {
        last = read(&mut written, Some(&last)).await?;
    }

    println!("{} is closed", last.by);
    let leaves = lockers.iter().find(|locker| locker.identity() == last.by).context("an unknown replica")?;
    leaves.close().await;
    // One more may have been written before that.
    let gone = last.by.clone();
    while last.by == gone {
        last = read(&mut written, Some(&last)).await?;
    }
    for _ in 1..REPORTS {
        last = read(&mut written, Some(&last)).await?;
        ensure!(last.by != gone, "{gone} was closed, and wrote a report");
    }

    for locker in lockers {
        locker.close().await;
    }
    for run in runs {
        run.await??;
    }
    Ok(())
}

/// Waits for the next report, and judges it by the one before.
async fn read(written: &mut mpsc::Receiver<Report>, last: Option<&Report>) -> anyhow::Result<Report> {
    let report = written.recv().await.context("no replica is left")?;
    println!("slot {} was served by {}", report.number, report.by);
    ensure!(report.run == 1, "it is told to be a second attempt, and no replica has crashed");
    if let Some(last) = last {
        ensure!(report.number > last.number, "slot {} was served before", report.number);
        // A machine that stands still for a second has nobody in that slot. It is not made up for.
        if report.number > last.number + 1 {
            println!("slots before it were skipped: {}", report.number - last.number - 1);
        }
    }
    Ok(report)
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    timeout(Duration::from_mins(1), play()).await.context("no report was written for too long")?
}
