//! The signals that are passed on, and those that are none of ours.

use std::io;
use std::process::{Child, Command};

use nix::sys::signal::{SigSet, SigmaskHow};
use rustix::process::Signal;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use crate::exit;

/// Every signal that came, in order.
type Seen = Vec<Signal>;

/// Those that also end this process.
const STOPS: [Signal; 4] = [Signal::TERM, Signal::INT, Signal::HUP, Signal::QUIT];

const OTHERS: [Signal; 2] = [Signal::USR1, Signal::USR2];

pub(crate) struct Signals {
    seen: watch::Receiver<Seen>,
}

impl Signals {
    /// From now on they end nothing of themselves; also as PID 1, where they would otherwise be ignored. Those that
    /// whoever started us ignores, as nohup(1) does, stay ignored: by us, and by the command.
    pub(crate) fn start() -> io::Result<Self> {
        let (see, seen) = watch::channel(Seen::new());
        let ignored = ignored();
        for passed_on in STOPS.into_iter().chain(OTHERS) {
            if ignored >> (passed_on.as_raw() - 1) & 1 == 1 {
                continue;
            }
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

    /// The exit code for the first one that ended this process.
    pub(crate) fn code(&self) -> Option<u8> {
        let first = self.seen.borrow().iter().copied().find(|&signal| ends(signal));
        first.map(|signal| exit::of_signal(signal.as_raw()))
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

/// The signals that this process ignores, a bit each, where that can be seen.
fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

/// The signals that were blocked when this process started: so they are for the command, but not for us.
pub(crate) struct Mask(SigSet);

impl Mask {
    /// Before there is another thread, which has the same mask.
    pub(crate) fn start() -> io::Result<Self> {
        use nix::sys::signal::Signal;

        let mut ours = SigSet::thread_get_mask()?;
        let inherited = ours;
        for needed in [
            Signal::SIGCHLD,
            Signal::SIGTERM,
            Signal::SIGINT,
            Signal::SIGHUP,
            Signal::SIGQUIT,
            Signal::SIGUSR1,
            Signal::SIGUSR2,
        ] {
            ours.remove(needed);
        }
        // A leader must not stand still: not for Ctrl-Z, nor for writing to a terminal, or handing it over, while it is
        // not in front.
        ours.add(Signal::SIGTSTP);
        ours.add(Signal::SIGTTOU);
        ours.thread_set_mask()?;
        Ok(Self(inherited))
    }

    /// Starts a process with the mask as it was.
    pub(super) fn spawn(&self, command: &mut Command) -> io::Result<Child> {
        let ours = self.0.thread_swap_mask(SigmaskHow::SIG_SETMASK)?;
        let child = command.spawn();
        ours.thread_set_mask()?;
        child
    }
}
