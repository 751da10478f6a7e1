//! The signals that are passed on.

use std::io;

use rustix::process::Signal;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

/// Every signal that came, in order.
type Seen = Vec<Signal>;

/// Those that also end this process.
const STOPS: [Signal; 4] = [Signal::TERM, Signal::INT, Signal::HUP, Signal::QUIT];

const OTHERS: [Signal; 2] = [Signal::USR1, Signal::USR2];

pub(crate) struct Signals {
    seen: watch::Receiver<Seen>,
}

impl Signals {
    /// From now on they end nothing of themselves; also as PID 1, where they would otherwise be ignored.
    pub(crate) fn start() -> io::Result<Self> {
        let (see, seen) = watch::channel(Seen::new());
        for passed_on in STOPS.into_iter().chain(OTHERS) {
            let mut stream = signal(SignalKind::from_raw(passed_on.as_raw()))?;
            let see = see.clone();
            tokio::spawn(async move {
                while stream.recv().await.is_some() {
                    see.send_modify(|seen| seen.push(passed_on));
                }
            });
        }
        Ok(Self { seen })
    }

    /// The first one that ended this process.
    pub(crate) fn first(&self) -> Option<Signal> {
        self.seen.borrow().iter().copied().find(|&signal| ends(signal))
    }

    /// How many there have been so far.
    pub(crate) fn count(&self) -> usize {
        self.seen.borrow().len()
    }

    /// Waits for the nth, counted from 0. Tells also whether it is at least the second one that ends this process.
    pub(crate) async fn nth(&self, n: usize) -> (Signal, bool) {
        let mut seen = self.seen.clone();
        match seen.wait_for(|seen| seen.len() > n).await {
            Ok(seen) => {
                let stops = seen[..=n].iter().filter(|&&signal| ends(signal)).count();
                (seen[n], ends(seen[n]) && stops > 1)
            }
            // The senders live as long as the runtime.
            Err(_) => std::future::pending().await,
        }
    }

    pub(crate) async fn asked_to_stop(&self) {
        let mut seen = self.seen.clone();
        if seen.wait_for(|seen| seen.iter().any(|&signal| ends(signal))).await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

pub(crate) fn ends(signal: Signal) -> bool {
    STOPS.contains(&signal)
}
