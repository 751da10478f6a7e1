//! How the cost of a Locker grows: with its names, with the Lockers of a server, with the locks of others.
//!
//! ```text
//! cargo bench --bench scale              # about four minutes
//! cargo bench --bench scale -- --quick   # about one
//! cargo bench --bench scale -- --help
//! ```
//!
//! On PostgreSQL servers of the bench's own, by TCP. Each figure is a curve: a row for each size, and one for its *slope*, by
//! least squares over the medians. Beside it stands its *limit*: the same in plain SQL, in the same run, in turn.

// A plain program of tests' parts, which may unwrap.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[cfg(target_os = "linux")]
mod arguments;
#[cfg(target_os = "linux")]
#[path = "../shared/child.rs"]
mod child;
#[cfg(target_os = "linux")]
#[path = "../shared/common.rs"]
mod common;
#[cfg(target_os = "linux")]
mod crowd;
#[cfg(target_os = "linux")]
mod curve;
#[cfg(target_os = "linux")]
mod growth;
#[cfg(target_os = "linux")]
mod heartbeat;
#[cfg(target_os = "linux")]
mod idle;
#[cfg(target_os = "linux")]
mod logged;
#[cfg(target_os = "linux")]
#[path = "../shared/look.rs"]
mod look;
#[cfg(target_os = "linux")]
#[path = "../shared/memory.rs"]
mod memory;
#[cfg(target_os = "linux")]
mod poll;
#[cfg(target_os = "linux")]
#[path = "../shared/report.rs"]
#[allow(dead_code, reason = "shared with another bench")]
mod report;
#[cfg(target_os = "linux")]
mod run;
#[cfg(target_os = "linux")]
#[path = "../shared/usage.rs"]
#[allow(dead_code, reason = "shared with another bench")]
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

/// The monotonic clock.
#[cfg(target_os = "linux")]
fn now() -> std::time::Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.try_into().expect("the monotonic clock is not negative")
}

#[cfg(target_os = "linux")]
fn main() -> anyhow::Result<std::process::ExitCode> {
    run::main()
}

#[cfg(not(target_os = "linux"))]
fn main() {
    panic!("it reads what processes use from Linux's /proc");
}
