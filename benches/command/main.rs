//! What `leasehold run` costs: until the command runs, while nothing happens, and at the end.
//!
//! ```text
//! cargo bench --features cli --bench command              # about two and a half minutes
//! cargo bench --features cli --bench command -- --quick   # fewer rounds, a shorter look: about one
//! cargo bench --features cli --bench command -- --help
//! ```
//!
//! The program under test is the real one, with default options, on a directory and on a PostgreSQL server of the
//! bench's own. The command is this program again (see `process.rs`): the first thing that it does is to read the
//! monotonic clock, which all processes of a host share. Beside each figure stands its *limit*: what the same costs
//! without leasehold, measured in the same run.

// A plain program of tests' parts, which may unwrap.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[cfg(target_os = "linux")]
mod arguments;
#[cfg(target_os = "linux")]
#[path = "../shared/common.rs"]
mod common;
#[cfg(target_os = "linux")]
mod hand_over;
#[cfg(target_os = "linux")]
mod idle;
#[cfg(target_os = "linux")]
mod place;
#[cfg(target_os = "linux")]
mod process;
#[cfg(target_os = "linux")]
#[path = "../shared/report.rs"]
#[allow(dead_code, reason = "shared with another bench")]
mod report;
#[cfg(target_os = "linux")]
mod run;
#[cfg(target_os = "linux")]
mod start;
#[cfg(target_os = "linux")]
#[path = "../shared/usage.rs"]
mod usage;

/// The tests' servers, without the tests.
#[cfg(target_os = "linux")]
#[path = "../../tests/it/support"]
#[allow(dead_code, unused_imports, reason = "the tests use all of it")]
mod support {
    mod kept;
    pub(crate) mod postgres;
    mod programs;
    mod wait;

    pub(crate) use self::wait::{eventually, now, until};
}

#[cfg(target_os = "linux")]
fn main() -> anyhow::Result<std::process::ExitCode> {
    run::main(process::now())
}

#[cfg(not(target_os = "linux"))]
fn main() {
    panic!("it reads what processes cost from Linux's /proc");
}
