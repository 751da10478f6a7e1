//! How long nobody leads, and how long two do, when things go wrong: measured on real servers and processes.
//!
//! ```text
//! cargo bench --bench failover              # default options, about seven minutes
//! cargo bench --bench failover -- --quick   # short intervals, about three
//! cargo bench --bench failover -- --help
//! ```
//!
//! Every round has two replicas, which are this program again (see `replica.rs`), on a PostgreSQL server of its own; one
//! leads, and something happens to it. Their jobs' bodies write what they do, with stamps of the monotonic clock that
//! they share. *Vacancy* is from the fault (where the leader releases in order: from its last sign of life) to the
//! start of the next body; *overlap* is by how much the last poll of the old body comes after that. Where a holder
//! falls silent, its job does not stop by itself, which is the worst case. The *naive holder* is what is
//! written in an afternoon: a session lock on a plain connection, with the same intervals for poll and heartbeat.

// A plain program of tests' parts, which may unwrap.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[cfg(unix)]
mod judge;
#[cfg(unix)]
mod log;
#[cfg(unix)]
#[path = "../shared/raw.rs"]
mod raw;
#[cfg(unix)]
mod replica;
#[cfg(unix)]
mod report;
#[cfg(unix)]
mod run;
#[cfg(unix)]
mod scenario;
#[cfg(unix)]
mod track;

/// The tests' servers and what breaks them, without the tests.
#[cfg(unix)]
#[path = "../../tests/it/support"]
#[allow(dead_code, unused_imports, reason = "the tests use all of it")]
mod support {
    mod kept;
    pub(crate) mod postgres;
    mod programs;
    mod wait;

    pub(crate) use self::wait::{eventually, now, until};
}

#[cfg(unix)]
use log::now;

#[cfg(unix)]
fn main() -> anyhow::Result<std::process::ExitCode> {
    run::main()
}

#[cfg(not(unix))]
fn main() {
    panic!("it stops and kills processes by the signals of Unix");
}
