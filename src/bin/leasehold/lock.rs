//! `leasehold lock`: a command that runs in a critical section.

use std::cell::Cell;
use std::ops::ControlFlow;
use std::pin::pin;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, ValueEnum};
use leasehold::{Key, Lease, Lock, LockError, Locker, RwLock};
use tracing::info;

use crate::common::Common;
use crate::exit::{self, Usage};
use crate::output::complain;
use crate::wrapper::command::Ended;
use crate::wrapper::signals::{Mask, Signals};
use crate::wrapper::{self, CannotStart, Task, Wrapper};

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  leasehold lock invoices -- ./finalize             # alone, when it is its turn
  leasehold lock --try import -- ./import           # exit code 75 where somebody is in
  leasehold lock --timeout 30s import -- ./import   # exit code 75 where it was not by then
  leasehold lock --shared catalogue -- ./report     # together with other readers
  leasehold lock catalogue -- ./rebuild             # alone; waiting, it keeps new readers out
  leasehold lock --kind=lock import -- ./import     # excludes a service's locker.lock(\"import\")

Beside a service that uses the library: what --kind=rwlock locks, by default, is locker.rw_lock(NAME): its `write`, or its \
`read` with --shared. What --kind=lock locks is locker.lock(NAME). The two are different locks, also where they have one \
name: they do not exclude each other. `run` of that name is a third one. This command always asks for a lock that can fence: \
a service beside it has to ask as well, locker.lock(NAME).fenced(), or it does not wait for what a command has fenced. \
Who holds a lock is not in `leasehold status`: `leasehold key --kind=rwlock NAME --sql` prints a statement that tells.

The command gets LEASEHOLD_NAME, LEASEHOLD_IDENTITY, LEASEHOLD_TERM and, unless it is --shared, LEASEHOLD_TOKEN: a number \
that grows with every holder, for what can refuse a write that comes late; and LEASEHOLD_FENCE_SQL as for `run`. A lock is not re-entrant: a command that asks \
for what it runs under waits for ever.

The command and all in its process group are sent TERM when the lock is lost or this process is told to stop, and KILL \
towards the end of --stop-grace; the lock is released when nobody of it is left. What leaves the group (setsid) is the \
command's own to end. Signals, the terminal and files are as for `run`: see `leasehold help run`.

Where this process is killed with -9, its guard kills the command, within milliseconds. On files no command that it \
excludes starts before it is dead; a service, which has no guard, does not wait for that. On PostgreSQL the server may be \
quicker, and give the lock to somebody else, whose command then starts beside one that is about to die; where the server \
itself has ended the session, beside one that has --stop-grace to end. Where that matters, and what comes late cannot be \
refused by the token, give --takeover-delay to all who use the lock: each waits that long after it was granted, since \
nobody tells how the one before has ended. For a kill 1s is plenty, for a loss it has to be --stop-grace.

While the store cannot be reached, or refuses the login, this process waits for that: not with --try, and with --timeout \
no longer than for the lock.

Exit codes: the command's own; 128 + n where signal n ended it, or this process before its turn (TERM: 143); 127 if it was \
not found, 126 if it cannot be executed. leasehold's own: 2 bad usage, 69 the store cannot be reached, 70 a bug, 75 somebody \
else has the lock (--try, --timeout), 76 the lock was lost, whatever the command ended with, 78 the store must not be used.")]
pub(crate) struct Arguments {
    /// What is locked: all that give the same name and kind on the same store exclude each other
    name: String,
    /// Give up at once while somebody is in, with exit code 75
    #[arg(long = "try", conflicts_with = "timeout")]
    is_try: bool,
    /// Give up when it was not this process's turn by then, with exit code 75
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    timeout: Option<Duration>,
    /// Read: together with others that do, beside nobody who does not
    #[arg(long)]
    shared: bool,
    /// Which lock of that name
    #[arg(long, value_enum, default_value = "rwlock")]
    kind: Kind,
    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<std::ffi::OsString>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Kind {
    /// `locker.rw_lock` of the library: many readers or one writer
    Rwlock,
    /// `locker.lock` of the library: one at a time
    Lock,
}

pub(crate) fn main(common: &Common, arguments: Arguments) -> anyhow::Result<ExitCode> {
    if arguments.shared && arguments.kind == Kind::Lock {
        let text =
            "--shared is for --kind=rwlock, which is the default: a `lock` is entered by one at a time";
        return Err(Usage::new(text).into());
    }
    let name = arguments.name.clone();
    wrapper::main(&name, async |mask| run(common, arguments, mask).await)
}

async fn run(common: &Common, arguments: Arguments, mask: Mask) -> anyhow::Result<ExitCode> {
    let limit = if arguments.is_try { Some(Duration::ZERO) } else { arguments.timeout };
    let delay = common.delay_of_a_lock()?;
    common.warn_of_relative_paths();
    // Before anybody can see this process in the store, and send it one.
    let signals = Signals::start()?;
    // Whoever does not wait for others does not wait for the store.
    let waits = limit.is_none_or(|limit| !limit.is_zero());
    let locker = match wrapper::locker(common, &signals, waits).await? {
        ControlFlow::Continue(locker) => locker,
        ControlFlow::Break(code) => return Ok(code),
    };
    let section = Section::new(&locker, &arguments);
    let task = Task {
        command: arguments.command,
        guard_file: common.guard_file(section.key(), arguments.shared)?,
        is_exclusive: !arguments.shared,
        delay,
    };
    let wrapper = Wrapper::start(common, locker, signals, mask, task)?;
    let code = hold(&wrapper, &section, limit).await;
    wrapper.end().await;
    Ok(ExitCode::from(code?))
}

/// Waits for the lock, and holds it while the command runs.
async fn hold(wrapper: &Wrapper, section: &Section, limit: Option<Duration>) -> anyhow::Result<u8> {
    let is_in = Cell::new(false);
    let outcome = {
        let mut held = pin!(section.with(limit, async |lease: Lease| {
            is_in.set(true);
            Ok(wrapper.run(&lease).await?)
        }));
        tokio::select! {
            biased;
            outcome = &mut held => Some(outcome),
            () = wrapper.signals.asked_to_stop() => {
                wrapper.shutdown.cancel();
                // One that only waits leaves.
                if is_in.get() { Some(held.await) } else { None }
            }
        }
    };
    match outcome {
        Some(Ok(Some(ended))) => Ok(ended.code()),
        Some(Ok(None)) | None => Ok(wrapper.signals.code().unwrap_or(exit::BUG)),
        Some(Err(NotHeld::CannotStart(error))) => Ok(error.report()),
        Some(Err(NotHeld::Lock(error))) => code_of(error, wrapper, limit),
    }
}

/// Says why it was not held, or not to the end.
fn code_of(error: LockError, wrapper: &Wrapper, limit: Option<Duration>) -> anyhow::Result<u8> {
    Ok(match error {
        LockError::Timeout { .. } if wrapper.locker.last_answer().is_none() => {
            complain("the store cannot be reached");
            exit::UNREACHABLE
        }
        LockError::Timeout { name, .. } if limit == Some(Duration::ZERO) => {
            info!(%name, "giving up: somebody else has the lock");
            exit::NOT_ACQUIRED
        }
        LockError::Timeout { .. } => {
            info!("giving up: {error}");
            exit::NOT_ACQUIRED
        }
        LockError::Lost { .. } => {
            complain(error);
            exit::LOST
        }
        // What it lacks, such as room in its lock table, it may have again later.
        LockError::Failed { .. } | LockError::Unanswered { .. } => {
            complain(error);
            exit::UNREACHABLE
        }
        LockError::Refused(error) => {
            complain(error);
            exit::REFUSED
        }
        LockError::Name(error) => return Err(leasehold::Error::from(error).into()),
        error => return Err(error.into()),
    })
}

/// Why there is no exit code of the command.
#[derive(Debug)]
enum NotHeld {
    Lock(LockError),
    CannotStart(CannotStart),
}

impl From<LockError> for NotHeld {
    fn from(error: LockError) -> Self {
        Self::Lock(error)
    }
}

impl From<CannotStart> for NotHeld {
    fn from(error: CannotStart) -> Self {
        Self::CannotStart(error)
    }
}

/// Which lock of the library it is, and how it is entered.
enum Section {
    Lock(Lock),
    Read(RwLock),
    Write(RwLock),
}

impl Section {
    fn new(locker: &Locker, arguments: &Arguments) -> Self {
        let name = arguments.name.as_str();
        match (arguments.kind, arguments.shared) {
            (Kind::Lock, _) => Self::Lock(locker.lock(name).fenced()),
            (Kind::Rwlock, true) => Self::Read(locker.rw_lock(name).fenced()),
            (Kind::Rwlock, false) => Self::Write(locker.rw_lock(name).fenced()),
        }
    }

    fn key(&self) -> Key {
        match self {
            Self::Lock(lock) => lock.key(),
            Self::Read(lock) | Self::Write(lock) => lock.key(),
        }
    }

    /// Runs the body under the lock, which is released when it has ended. A limit of zero is one attempt.
    async fn with<Fut>(
        &self,
        limit: Option<Duration>,
        body: impl FnOnce(Lease) -> Fut,
    ) -> Result<Option<Ended>, NotHeld>
    where
        Fut: Future<Output = Result<Option<Ended>, NotHeld>>,
    {
        match (self, limit) {
            (Self::Lock(lock), None) => lock.with(body).await,
            (Self::Lock(lock), Some(limit)) => lock.with_timeout(limit, body).await,
            (Self::Read(lock), None) => lock.with_read(body).await,
            (Self::Read(lock), Some(limit)) => lock.with_read_timeout(limit, body).await,
            (Self::Write(lock), None) => lock.with_write(body).await,
            (Self::Write(lock), Some(limit)) => lock.with_write_timeout(limit, body).await,
        }
    }
}
