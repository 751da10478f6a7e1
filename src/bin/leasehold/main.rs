//! `leasehold`: run a command in one place at a time, and see who does.
//!
//! One file a subcommand. What a subcommand knows of leases, it knows from the library.

mod common;
mod doctor;
mod exit;
mod key;
#[cfg(unix)]
mod lock;
mod log;
#[cfg(unix)]
mod once;
mod output;
#[cfg(unix)]
mod run;
#[cfg(feature = "postgres")]
mod schema;
mod status;
mod step_down;
#[cfg(unix)]
mod wrapper;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tokio::runtime::Runtime;

use self::common::Common;

const EXAMPLES: &str = "\
Examples:
  export LEASEHOLD_STORE=postgres://app@db/app
  leasehold run --restart=always reconciler -- python reconcile.py
  leasehold run --no-wait --once nightly-cleanup -- ./clean-up --all
  leasehold lock --timeout 30s invoices -- ./finalize
  leasehold once --every 1h --offset 30m hourly-report -- ./report
  leasehold status --watch
  leasehold step-down reconciler --wait

Exit codes of `run`, `lock` and `once`: the command's own; 128 + n if signal n ended it; 127 if it was not found, 126 if it cannot be \
executed. leasehold's own: 2 bad usage, 67 nobody leads, 69 the store cannot be reached, 70 a bug, 75 not acquired or not \
taken over in time, 76 the lease or lock was lost, 77 the leader does not hand over when it is asked to, 78 the store must not be \
used.";

/// Leader election, by the PostgreSQL or Redis that you have or by a directory.
#[derive(Debug, Parser)]
#[command(name = "leasehold", version, after_help = EXAMPLES)]
struct Arguments {
    #[command(flatten)]
    common: Common,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Runs a command while this process leads.
    #[cfg(unix)]
    Run(run::Arguments),
    /// Runs a command in a critical section: alone, or together with other readers.
    #[cfg(unix)]
    Lock(lock::Arguments),
    /// Runs a command once per interval: where the present slot is taken, it ends at once.
    #[cfg(unix)]
    Once(once::Arguments),
    /// Kills the process group of a command when `run`, `lock` or `once`, which started it, is dead or stands still.
    #[cfg(unix)]
    #[command(hide = true)]
    Guard {
        /// Hold the file together with others
        #[arg(long)]
        shared: bool,
        /// What the guards of a name hold one after the other, where they are on one host
        file: Option<std::path::PathBuf>,
    },
    /// Becomes a command, when it may: what `run`, `lock` and `once` start.
    #[cfg(unix)]
    #[command(hide = true)]
    Exec {
        /// The process id of whoever starts it
        parent: i32,
        /// The command and its arguments
        #[arg(last = true, required = true)]
        command: Vec<std::ffi::OsString>,
    },
    /// Shows who leads, since when, from where, and who stands by.
    Status(status::Arguments),
    /// Asks the leader of a name to hand over.
    StepDown(step_down::Arguments),
    /// Tells whether the store can be used, and what to change.
    Doctor(doctor::Arguments),
    /// Prints the SQL of the table that `once` needs on PostgreSQL, for roles that may not make it.
    #[cfg(feature = "postgres")]
    Schema(schema::Arguments),
    /// Prints the number that a name stands for, and the SQL that shows who holds it.
    Key(key::Arguments),
}

impl Command {
    /// What is logged unless the command line says otherwise: of those that only look, what went wrong.
    const fn log_level(&self) -> &'static str {
        match self {
            Self::Status(_) | Self::StepDown(_) => "leasehold=warn",
            // What a crontab starts says nothing while all is well.
            #[cfg(unix)]
            Self::Once(_) => "leasehold=warn",
            _ => "leasehold=info",
        }
    }
}

/// For a command that waits for little.
fn runtime() -> anyhow::Result<Runtime> {
    Ok(tokio::runtime::Builder::new_current_thread().enable_all().build()?)
}

/// What an option too much often means.
fn hint(mut error: clap::Error) -> clap::Error {
    use clap::error::{ContextKind, ContextValue, ErrorKind};

    let tips = match std::env::args().nth(1).as_deref() {
        Some("run") => {
            "put `--` before the command: leasehold run NAME -- COMMAND; and write --restart=always with `=`"
        }
        Some("once") => "put `--` before the command: leasehold once --every=1h NAME -- COMMAND",
        Some("lock") => "put `--` before the command: leasehold lock NAME -- COMMAND",
        _ => return error,
    };
    if error.kind() == ErrorKind::UnknownArgument {
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tips.into()]));
    }
    error
}

fn main() -> ExitCode {
    let Arguments { common, command } = Arguments::try_parse().unwrap_or_else(|error| hint(error).exit());
    log::start(&common, command.log_level());
    let outcome = match command {
        #[cfg(unix)]
        Command::Run(arguments) => run::main(&common, arguments),
        #[cfg(unix)]
        Command::Lock(arguments) => lock::main(&common, arguments),
        #[cfg(unix)]
        Command::Once(arguments) => once::main(&common, arguments),
        #[cfg(unix)]
        Command::Guard { shared, file } => {
            let file = file.map(|path| wrapper::guard::GuardFile { path, is_shared: shared });
            Ok(wrapper::guard::main(file.as_ref()))
        }
        #[cfg(unix)]
        Command::Exec { parent, command } => Ok(ExitCode::from(wrapper::command::exec(parent, &command))),
        Command::Status(arguments) => status::main(&common, &arguments),
        Command::StepDown(arguments) => step_down::main(&common, &arguments),
        Command::Doctor(arguments) => doctor::main(&common, &arguments),
        #[cfg(feature = "postgres")]
        Command::Schema(arguments) => schema::main(&arguments),
        Command::Key(arguments) => key::main(&arguments),
    };
    match outcome {
        Ok(code) => code,
        Err(error) => exit::report(&error),
    }
}
