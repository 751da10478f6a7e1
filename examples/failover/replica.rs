//! The service: what a user of leasehold writes. One process of it is a replica.

use std::io::Read as _;
use std::time::Duration;

use leasehold::{Lease, Locker, Options};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::log::{Event, Log};

/// How long one piece of work takes.
const PIECE: Duration = Duration::from_millis(10);

/// Pieces of work that the job still finishes when it is asked to stop.
const BEGUN: u32 = 15;

/// The defaults suit a real service; a shorter retry makes the takeover after a crash quicker to watch.
pub(crate) fn options() -> Options {
    Options::default().retry_interval(Duration::from_millis(300))
}

/// Contends for the job, works while this replica leads, and returns when it was asked to stop.
pub(crate) async fn main(name: &str, store: &str, job: &str, log: &str) -> anyhow::Result<()> {
    let log = Log::append(log.as_ref(), name)?;
    let stop = stop_on_signal()?;
    stop_with_parent(stop.clone());

    let locker = Locker::connect(store, options()).await?;
    log.write(0, Event::Ready)?;
    locker.candidate(job).until(stop).run(async |lease: Lease| work(&lease, &log).await).await?;
    locker.close().await;
    log.write(0, Event::Gone)?;
    Ok(())
}

/// The job: called when this replica begins to lead, and over when it returns.
async fn work(lease: &Lease, log: &Log) -> anyhow::Result<()> {
    log.write(lease.term(), Event::Start)?;
    loop {
        tokio::select! {
            () = lease.cancelled() => break,
            () = tokio::time::sleep(PIECE) => log.write(lease.term(), Event::Tick)?,
        }
    }
    // A job that was asked to stop still leads until it returns, so it can finish what it has begun. One that lost its
    // lease cannot.
    for _ in 0..BEGUN {
        if !lease.is_held() {
            break;
        }
        tokio::time::sleep(PIECE).await;
        log.write(lease.term(), Event::Tick)?;
    }
    log.write(lease.term(), Event::End)
}

/// Gives a token that is cancelled by the first SIGTERM or SIGINT.
fn stop_on_signal() -> anyhow::Result<CancellationToken> {
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let stop = CancellationToken::new();
    let told = stop.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        told.cancel();
    });
    Ok(stop)
}

/// Ends this process when the one that started it is gone, however that ended: its end of our standard input closes.
///
/// A thread of its own, since a runtime that shuts down waits for tokio's standard input.
fn stop_with_parent(stop: CancellationToken) {
    std::thread::spawn(move || {
        let _closed = std::io::stdin().read_to_end(&mut Vec::new());
        stop.cancel();
        std::thread::sleep(Duration::from_secs(5));
        std::process::exit(1);
    });
}
