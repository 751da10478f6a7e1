//! A job that is frozen in the middle of a write, and what the table holds then: without a fence, and with one.
//!
//! ```text
//! cargo run --example fencing
//! ```
//!
//! Two replicas take from one stock: each reads what is there, computes what is left, and writes that. The first one is
//! frozen between reading and writing (`SIGSTOP`), for so long that the server frees its lease; the second one takes over and
//! does its work; then the first one goes on. `replica.rs` is the service, as you would write it; the rest watches it. The
//! exit code is 0 only if a fence, and nothing else, kept the late write out.
//!
//! On a PostgreSQL server of its own for so long, whose programs it finds as the tests do
//! (`scripts/install-test-servers` installs them). `LEASEHOLD_STORE=postgres://…` names another one; it makes a table there, and
//! removes it.

#[cfg(unix)]
mod replica;
#[cfg(unix)]
mod stage;

/// The tests' servers, without the tests.
#[cfg(unix)]
#[path = "../../tests/it/support"]
#[allow(
    dead_code,
    unused_imports,
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "the tests use all of it"
)]
mod support {
    mod kept;
    pub(crate) mod postgres;
    mod programs;
    mod wait;

    pub(crate) use self::wait::{eventually, now, until};
}

use std::process::ExitCode;

#[cfg(unix)]
#[tokio::main]
async fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let outcome = match arguments[..] {
        [] => stage::play().await,
        ["replica", who, takes, is_fenced, frozen, table] => {
            replica::main(who, takes, is_fenced, frozen, table).await.map(|()| true)
        }
        _ => {
            eprintln!("usage: cargo run --example fencing");
            return ExitCode::from(2);
        }
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("fencing: {error:#}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(not(unix))]
fn main() -> ExitCode {
    eprintln!("fencing: this example freezes a replica by a signal, which only a Unix has");
    ExitCode::from(2)
}
