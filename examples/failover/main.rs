//! Three replicas of a service, one job, no server: who leads, who takes over, how fast.
//!
//! ```text
//! cargo run --example failover
//! ```
//!
//! Starts three processes that contend for one name, ends the leader once gracefully and once with `kill -9`, and
//! judges from what the job itself wrote into a shared file whether there were ever two leaders, or none for too long.
//! The exit code is 0 only if there were not. `replica.rs` is the service, as you would write it; the rest watches it.
//!
//! The replicas meet in a temporary directory. `LEASEHOLD_STORE=file:/some/where` names another store by its URL.

#[cfg(unix)]
mod judge;
#[cfg(unix)]
mod log;
#[cfg(unix)]
mod replica;
#[cfg(unix)]
mod stage;
#[cfg(unix)]
mod timeline;

use std::process::ExitCode;

#[cfg(unix)]
#[tokio::main]
async fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let outcome = match arguments[..] {
        [] => stage::play().await,
        ["replica", name, store, job, log] => replica::main(name, store, job, log).await.map(|()| true),
        _ => {
            eprintln!("usage: cargo run --example failover");
            return ExitCode::from(2);
        }
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("failover: {error:#}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(not(unix))]
fn main() -> ExitCode {
    eprintln!("failover: this example ends its replicas by signals, which only a Unix has");
    ExitCode::from(2)
}
