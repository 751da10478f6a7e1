//! Replicas that serve slots: `<identity> slot <number> <run> <term>` for each, when its job begins.

use std::error::Error;
use std::fs::File;
use std::io::Write as _;
use std::time::Duration;

use leasehold::{CancellationToken, Crashed, Locker, Slot};

/// What a replica does that serves slots.
#[derive(Clone, Copy)]
pub(crate) struct Server {
    interval: Duration,
    crashed: Crashed,
    /// The job does not end before it is told to.
    is_stuck: bool,
}

impl Server {
    pub(crate) fn of(behaviour: &str) -> Option<Self> {
        let server =
            |seconds, crashed, is_stuck| Self { interval: Duration::from_secs(seconds), crashed, is_stuck };
        Some(match behaviour {
            "serve" => server(1, Crashed::AtMostOnce, false),
            "serve-stuck" => server(1, Crashed::AtMostOnce, true),
            "serve-yearly-stuck" => server(365 * 86_400, Crashed::RetryOnce, true),
            "serve-yearly-again" => server(365 * 86_400, Crashed::RetryOnce, false),
            _ => return None,
        })
    }

    pub(crate) async fn run(
        self,
        locker: Locker,
        name: &str,
        shutdown: CancellationToken,
        log: File,
    ) -> Result<(), Box<dyn Error>> {
        let who = locker.identity();
        let every = locker.every(name, self.interval).crashed(self.crashed).until(shutdown);
        let job = async |slot: Slot| {
            // One write, so that lines of several processes do not mix.
            let line = format!("{who} slot {} {} {}\n", slot.number, slot.run, slot.term());
            (&log).write_all(line.as_bytes())?;
            if self.is_stuck {
                slot.cancelled().await;
            }
            Ok::<_, std::io::Error>(())
        };
        every.run(job).await?;
        locker.close().await;
        Ok(())
    }
}
