//! Takes in every child that has ended, also those that are not ours: as PID 1 of a container orphans come here.

use std::collections::HashMap;
use std::io;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::process::{Pid, WaitOptions, WaitStatus, wait};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Notify;

use super::command::Ended;

/// What became of the children that somebody wants to know of.
type Fates = HashMap<Pid, Fate>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Runs,
    Stopped(i32),
    Ended(Ended),
}

#[derive(Clone)]
pub(crate) struct Reaper {
    shared: Arc<Shared>,
    // The children are this thread's: between their start and the first word of them, nothing else runs.
    _not_send: std::marker::PhantomData<Rc<()>>,
}

#[derive(Default)]
struct Shared {
    fates: Mutex<Fates>,
    changed: Notify,
}

impl Reaper {
    /// Starts to take in children; before there are any.
    pub(crate) fn start() -> io::Result<Self> {
        let mut children = signal(SignalKind::child())?;
        let shared = Arc::new(Shared::default());
        let of_task = Arc::clone(&shared);
        tokio::spawn(async move {
            while children.recv().await.is_some() {
                of_task.take_in();
            }
        });
        Ok(Self { shared, _not_send: std::marker::PhantomData })
    }

    /// A child that was just started, and how it ends.
    pub(crate) fn watch(&self, pid: Pid) {
        self.shared.fates().insert(pid, Fate::Runs);
    }

    /// Whether its end has not been taken in: until then nobody else has its number.
    pub(crate) fn runs(&self, pid: Pid) -> bool {
        !matches!(self.shared.fates().get(&pid), None | Some(Fate::Ended(_)))
    }

    /// Waits until it has ended.
    pub(crate) async fn ended(&self, pid: Pid) -> Ended {
        loop {
            let changed = self.shared.changed.notified();
            if let Some(Fate::Ended(ended)) = self.shared.fates().get(&pid) {
                return *ended;
            }
            changed.await;
        }
    }

    /// Waits until it stands still, and gives the signal that it does so for.
    pub(crate) async fn stopped(&self, pid: Pid) -> i32 {
        loop {
            let changed = self.shared.changed.notified();
            if let Some(fate) = self.shared.fates().get_mut(&pid)
                && let Fate::Stopped(signal) = *fate
            {
                *fate = Fate::Runs;
                return signal;
            }
            changed.await;
        }
    }

    pub(crate) fn forget(&self, pid: Pid) {
        self.shared.fates().remove(&pid);
    }
}

impl Shared {
    fn fates(&self) -> MutexGuard<'_, Fates> {
        self.fates.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take_in(&self) {
        while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG | WaitOptions::UNTRACED) {
            if let Some(fate) = self.fates().get_mut(&pid) {
                *fate = Fate::of(status);
            }
        }
        self.changed.notify_waiters();
    }
}

impl Fate {
    fn of(status: WaitStatus) -> Self {
        match (status.exit_status(), status.terminating_signal()) {
            (Some(code), _) => Self::Ended(Ended::Code(u8::try_from(code).unwrap_or(u8::MAX))),
            (None, Some(signal)) => Self::Ended(Ended::Signal(signal)),
            (None, None) => Self::Stopped(status.stopping_signal().unwrap_or(0)),
        }
    }
}
