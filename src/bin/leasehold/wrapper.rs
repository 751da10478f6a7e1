//! What wraps a command that runs under a lease: `run`, `lock` and `once` do.
//!
//! The order is the same on every path: the command's process group is told to stop, is seen to be empty, and only then
//! the lease is released. What this process cannot do because it was killed or stands still, its [`guard`] does.

pub(crate) mod command;
mod group;
pub(crate) mod guard;
mod reaper;
pub(crate) mod signals;
mod terminal;

use std::cell::RefCell;
use std::ffi::OsString;
use std::io;
use std::ops::ControlFlow;
use std::process::{self, ExitCode};
use std::time::Duration;

use leasehold::{CancellationToken, Lease, Locker, Name, TokenError};
use tracing::info;

use self::command::{Command, Ended};
use self::guard::{Guard, GuardFile};
use self::reaper::Reaper;
use self::signals::{Mask, Signals};
use crate::common::Common;
use crate::exit;
use crate::output::complain;

/// How many guards may die before one of them is ready: after that it is no accident.
const MOST_GUARDS: u32 = 3;

/// What is task, and how.
pub(crate) struct Task {
    pub(crate) command: Vec<OsString>,
    pub(crate) guard_file: Option<GuardFile>,
    /// Whether the leases are exclusive: others have no fencing token.
    pub(crate) is_exclusive: bool,
    /// What to wait for under a lease before the command starts.
    pub(crate) delay: Duration,
}

/// One invocation.
pub(crate) struct Wrapper {
    pub(crate) locker: Locker,
    pub(crate) signals: Signals,
    /// Cancelled where the command is to run no more: by a signal, or by what is typed.
    pub(crate) shutdown: CancellationToken,
    task: Task,
    stop_grace: Duration,
    reaper: Reaper,
    guard: RefCell<Guard>,
    mask: Mask,
}

/// Runs a subcommand that wraps a command, on a runtime of its own.
pub(crate) fn main(
    name: &str,
    subcommand: impl AsyncFnOnce(Mask) -> anyhow::Result<ExitCode>,
) -> anyhow::Result<ExitCode> {
    Name::from(name).validate().map_err(leasehold::Error::from)?;
    let mask = Mask::start()?;
    let runtime = crate::runtime()?;
    let code = runtime.block_on(subcommand(mask));
    // Whatever still waits for a name server, it does not keep the process.
    runtime.shutdown_background();
    code
}

/// Gives the Locker: connected, where nobody waits for the store; or the exit code, where a signal was quicker.
pub(crate) async fn locker(
    common: &Common,
    signals: &Signals,
    waits_for_the_store: bool,
) -> anyhow::Result<ControlFlow<ExitCode, Locker>> {
    if waits_for_the_store {
        return Ok(ControlFlow::Continue(common.locker()?));
    }
    tokio::select! {
        locker = Locker::connect(common.store()?, common.options()?) => Ok(ControlFlow::Continue(locker?)),
        () = signals.asked_to_stop() => Ok(ControlFlow::Break(ExitCode::from(signals.code().unwrap_or(exit::BUG)))),
    }
}

impl Wrapper {
    pub(crate) fn start(
        common: &Common,
        locker: Locker,
        signals: Signals,
        mask: Mask,
        task: Task,
    ) -> anyhow::Result<Self> {
        let reaper = Reaper::start()?;
        let guard = Guard::start(task.guard_file.clone(), reaper.clone())?;
        Ok(Self {
            locker,
            signals,
            shutdown: CancellationToken::new(),
            task,
            stop_grace: common.options()?.get_stop_grace(),
            reaper,
            guard: RefCell::new(guard),
            mask,
        })
    }

    /// Runs the command once, until nobody of its group is left. `None` if it was to stop before it had started.
    pub(crate) async fn run(&self, lease: &Lease) -> Result<Option<Ended>, CannotStart> {
        self.run_with(lease, &[]).await
    }

    /// As [`run`](Self::run), with further variables.
    pub(crate) async fn run_with(
        &self,
        lease: &Lease,
        variables: &[(&str, String)],
    ) -> Result<Option<Ended>, CannotStart> {
        let mut guards = 0;
        loop {
            let holding = self.guard.borrow_mut().hold()?;
            let ready = async {
                holding.await?;
                if !self.task.delay.is_zero() {
                    tokio::time::sleep(self.task.delay).await;
                }
                Ok(if self.task.is_exclusive { Some(lease.fencing_token().await?) } else { None })
            };
            let token = tokio::select! {
                biased;
                () = self.told_to_stop(lease) => {
                    // What it gets from now on, others wait for.
                    self.guard.borrow_mut().free();
                    return Ok(None);
                }
                token = ready => token,
            };
            let token = match token {
                // The lease is cancelled by now.
                Err(CannotStart::NoToken(TokenError::Over { .. })) => continue,
                // Somebody has killed the guard: there will be another one.
                Err(CannotStart::System(error))
                    if error.kind() == io::ErrorKind::UnexpectedEof && guards < MOST_GUARDS =>
                {
                    guards += 1;
                    continue;
                }
                token => token?,
            };
            let command = Command::start(self, lease, token, variables).await?;
            let ended = command.attend(lease).await;
            info!(name = %lease.name(), code = ended.code(), "the command has ended");
            return Ok(Some(ended));
        }
    }

    /// By the lease, or by whoever started the command.
    async fn told_to_stop(&self, lease: &Lease) {
        tokio::select! {
            biased;
            () = lease.cancelled() => {}
            () = self.shutdown.cancelled() => {}
        }
    }

    /// Leaves the store, and then the guard.
    pub(crate) async fn end(self) {
        self.locker.close().await;
        self.guard.into_inner().end().await;
    }
}

/// Why the command was not started.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CannotStart {
    #[error(transparent)]
    System(#[from] io::Error),
    #[error(transparent)]
    NoToken(#[from] TokenError),
}

impl CannotStart {
    /// Says so, and gives the code for it.
    pub(crate) fn report(&self) -> u8 {
        complain(format_args!("the command could not be started: {self}"));
        match self {
            Self::System(_) => exit::CANNOT_EXECUTE,
            // What it lacks, such as room on its disk, it may have again later.
            Self::NoToken(_) => exit::UNREACHABLE,
        }
    }
}

/// This program, also where its file has been replaced since it was started.
fn this_program() -> io::Result<process::Command> {
    let path = std::env::current_exe()?;
    let replaced = std::path::PathBuf::from("/proc/self/exe");
    Ok(process::Command::new(if path.exists() || !replaced.exists() { path } else { replaced }))
}
