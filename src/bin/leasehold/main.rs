//! `leasehold`: run a command on one host at a time, and see who does.
//!
//! One file a subcommand. What a subcommand knows of leases, it knows from the library.

mod common;
mod doctor;
mod exit;
mod key;
mod log;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use self::common::Common;

const EXAMPLES: &str = "\
Examples:
  export LEASEHOLD_STORE=postgres://app@db/app
  leasehold run nightly-cleanup -- ./clean-up --all
  leasehold run --restart reconciler -- python reconcile.py

Exit codes: the command's own; 128 + n if signal n ended it; 127 if it was not found, 126 if it cannot be executed.
leasehold's own: 2 bad usage, 69 the store cannot be reached, 70 a bug, 75 not acquired, 76 the lease was lost,
78 the store must not be used.";

/// Leader election, by the PostgreSQL that you have or by a directory.
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
    /// Tells whether the store can be used, and what to change.
    Doctor(doctor::Arguments),
    /// Prints the number that a name stands for, and the SQL that shows who holds it.
    Key(key::Arguments),
}

fn main() -> ExitCode {
    let Arguments { common, command } = Arguments::parse();
    log::start(&common);
    let outcome = match command {
        Command::Doctor(arguments) => doctor::main(&common, &arguments),
        Command::Key(arguments) => key::main(&arguments),
    };
    match outcome {
        Ok(code) => code,
        Err(error) => exit::report(&error),
    }
}
