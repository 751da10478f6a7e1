//! What critical sections cost: in time, beside others on the server, in sessions, in memory.
//!
//! ```text
//! cargo bench --bench locks              # about two minutes
//! cargo bench --bench locks -- --quick   # under one
//! cargo bench --bench locks -- --help
//! cargo bench --bench locks --features redis -- --store redis
//! ```
//!
//! On a PostgreSQL server of the bench's own, and with the feature `redis` on a Redis server, by TCP, with default options.
//! Beside each figure stands its *limit*: what the same costs in plain SQL, or in plain commands, on connections of the same
//! client library, measured in the same run, in turn.

// A plain program of tests' parts, which may unwrap.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[cfg(target_os = "linux")]
mod arguments;
#[cfg(target_os = "linux")]
mod bystander;
#[cfg(target_os = "linux")]
#[path = "../shared/child.rs"]
mod child;
#[cfg(target_os = "linux")]
#[path = "../shared/common.rs"]
mod common;
#[cfg(target_os = "linux")]
mod cycles;
#[cfg(target_os = "linux")]
mod fences;
#[cfg(target_os = "linux")]
mod hand_over;
#[cfg(target_os = "linux")]
mod holding;
#[cfg(target_os = "linux")]
#[path = "../shared/look.rs"]
mod look;
#[cfg(target_os = "linux")]
#[path = "../shared/memory.rs"]
mod memory;
#[cfg(target_os = "linux")]
#[path = "../shared/raw.rs"]
mod raw;
#[cfg(all(target_os = "linux", feature = "redis"))]
mod redis_cycles;
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
    #[cfg(feature = "redis")]
    pub(crate) mod redis;
    mod wait;

    pub(crate) use self::wait::{eventually, now, until};
}

/// The monotonic clock, which all processes of a host share.
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
