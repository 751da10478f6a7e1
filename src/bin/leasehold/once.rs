//! `leasehold once`: a command that runs once per interval, whoever starts it how often and where.

use std::cell::Cell;
use std::ops::ControlFlow;
use std::pin::pin;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use leasehold::{Crashed, Every, EveryError, Key, Kind, Once, Slot};
use tracing::info;

use crate::common::Common;
use crate::exit::{self, Usage};
use crate::output::complain;
use crate::wrapper::command::{Ended, SLOT_VARIABLES};
use crate::wrapper::signals::{Mask, Signals};
use crate::wrapper::{self, CannotStart, Task, Wrapper};

#[derive(Debug, Args)]
#[command(after_help = "\
Examples, in the crontab of each of several hosts:
  0 * * * *   leasehold once --every 1h --offset 30m hourly-report -- ./report
  30 2 * * *  leasehold once --every 24h --offset 14h30m nightly -- ./clean-up --all

Time is cut into slots of one interval each, by the clock of the store: from multiples of the interval since 1970, UTC, plus \
--offset. The first one who comes in a slot runs the command, under the lock of NAME; for all who come later in it there is \
nothing to do: exit code 0, and with --verbose the log says who was quicker. So it is where the slot began while an earlier \
run was in progress.

Start it in the middle of slots, which is what --offset is for above: the hosts' clocks and that of the store are not quite \
the same, and around the time at which a slot begins they do not agree on which one it is.

A command that fails has had its slot. So has one that crashed, that is, whose process here was killed with its command, or \
lost the lock: unless --retry-crashed is given; then the next one who comes runs that slot once more.

Who holds the lock keeps the command from running: `leasehold lock --kind=lock NAME`, or locker.lock(NAME) of the library. \
Where somebody has it who may be dead, this process waits until the store has freed it, some 30 s at most by default. A \
service that uses the library serves the same slots by locker.every(NAME, INTERVAL).

The command gets LEASEHOLD_SLOT, the number of the slot; LEASEHOLD_SLOT_AT, when that began, such as \
2026-11-30T04:30:00Z; LEASEHOLD_RUN, 1, or 2 after a crash; and what it gets from `lock`. On PostgreSQL a table is made at \
first use; for a role that may not, `leasehold schema` prints the SQL.

Signals, the terminal, guards and --takeover-delay are as for `lock`: see `leasehold help lock`. The store is not waited for.

Exit codes: 0 also where there was nothing to do; else the command's own; 128 + n where signal n ended it, or this process \
before it had begun; 127 if it was not found, 126 if it cannot be executed. leasehold's own: 2 bad usage, 69 the store cannot \
be reached, 70 a bug, 76 the lock was lost, whatever the command ended with, 78 the store must not be used, or cannot keep \
which slots were served.")]
pub(crate) struct Arguments {
    /// What is done: all that give the same name on the same store share its slots
    name: String,
    /// How long a slot is: at least 1s
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    every: Duration,
    /// When slots begin, after multiples of the interval since 1970, UTC: shorter than the interval
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration, default_value = "0s")]
    offset: Duration,
    /// Run a slot once more whose run has crashed
    #[arg(long)]
    retry_crashed: bool,
    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<std::ffi::OsString>,
}

pub(crate) fn main(common: &Common, arguments: Arguments) -> anyhow::Result<ExitCode> {
    let name = arguments.name.clone();
    wrapper::main(&name, async |mask| Box::pin(run(common, arguments, mask)).await)
}

async fn run(common: &Common, arguments: Arguments, mask: Mask) -> anyhow::Result<ExitCode> {
    let delay = common.delay_of_a_lock()?;
    common.warn_of_relative_paths();
    // Before anybody can see this process in the store, and send it one.
    let signals = Signals::start()?;
    // Whoever started it will again: nobody waits for the store.
    let locker = match wrapper::locker(common, &signals, false).await? {
        ControlFlow::Continue(locker) => locker,
        ControlFlow::Break(code) => return Ok(code),
    };
    let Arguments { name, every, offset, retry_crashed, command } = arguments;
    let crashed = if retry_crashed { Crashed::RetryOnce } else { Crashed::AtMostOnce };
    let every = locker.every(&name, every).offset(offset).crashed(crashed);
    let task = Task {
        command,
        guard_file: common.guard_file(Key::of(Kind::Lock, &name), false)?,
        is_exclusive: true,
        delay,
    };
    let wrapper = Wrapper::start(common, locker, signals, mask, task)?;
    let code = serve(&wrapper, every).await;
    wrapper.end().await;
    Ok(ExitCode::from(code?))
}

/// Serves the present slot, if it is to be served.
async fn serve(wrapper: &Wrapper, every: Every) -> anyhow::Result<u8> {
    let is_in = Cell::new(false);
    let outcome = {
        let mut served = pin!(every.until(wrapper.shutdown.clone()).once(async |slot: Slot| {
            is_in.set(true);
            let at = humantime::format_rfc3339_seconds(slot.at).to_string();
            let values = [slot.number.to_string(), at, slot.run.to_string()];
            let variables: Vec<_> = SLOT_VARIABLES.into_iter().zip(values).collect();
            Ok(wrapper.run_with(&slot, &variables).await?)
        }));
        tokio::select! {
            biased;
            outcome = &mut served => Some(outcome),
            () = wrapper.signals.asked_to_stop() => {
                wrapper.shutdown.cancel();
                // One that only waits leaves.
                if is_in.get() { Some(served.await) } else { None }
            }
        }
    };
    match outcome {
        Some(Ok(Once::Ran(Some(ended)))) => Ok(Ended::code(ended)),
        Some(Ok(Once::Taken(taken))) => {
            info!("nothing to do: {taken}");
            Ok(0)
        }
        Some(Ok(Once::Ran(None)) | Err(NotServed::Every(EveryError::Stopped))) | None => {
            Ok(wrapper.signals.code().unwrap_or(exit::BUG))
        }
        Some(Err(NotServed::CannotStart(error))) => Ok(error.report()),
        Some(Err(NotServed::Every(error))) => code_of(error),
    }
}

/// Says why it was not served, or not to the end.
fn code_of(error: EveryError) -> anyhow::Result<u8> {
    let code = match &error {
        EveryError::Lost { .. } => exit::LOST,
        EveryError::Failed { .. } | EveryError::Unanswered { .. } => exit::UNREACHABLE,
        EveryError::Refused(_) | EveryError::Forbidden { .. } => exit::REFUSED,
        EveryError::Schedule(error) => return Err(Usage::new(error.to_string()).into()),
        _ => return Err(error.into()),
    };
    complain(error);
    Ok(code)
}

/// Why there is no exit code of the command.
#[derive(Debug)]
enum NotServed {
    Every(EveryError),
    CannotStart(CannotStart),
}

impl From<EveryError> for NotServed {
    fn from(error: EveryError) -> Self {
        Self::Every(error)
    }
}

impl From<CannotStart> for NotServed {
    fn from(error: CannotStart) -> Self {
        Self::CannotStart(error)
    }
}
