//! A job that hangs, and a service that ends itself then: the one thing that a library must not do for it.
//!
//! ```text
//! cargo run --example overrun
//! ```
//!
//! A job that blocks its thread cannot be dropped when its lease is lost, and somebody else may lead by then. leasehold
//! reports it (`State::Overrun`, `Locker::health`, an error in the log), and starts nothing beside it; but only the end
//! of the process ends the job. [`end_with_a_hung_job`] is how a service does that.
//!
//! It plays two replicas of such a service. The job of the first one hangs, and its lease is taken away. The exit code is
//! 0 only if it ended itself with the exit code that says so, and the second one leads.

use std::process::ExitCode;

#[cfg(unix)]
#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<ExitCode> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        [] => play::play(),
        ["service", store, identity] => service::main(store, identity).await.map(|()| ExitCode::SUCCESS),
        _ => {
            eprintln!("usage: cargo run --example overrun");
            Ok(ExitCode::from(2))
        }
    }
}

#[cfg(not(unix))]
fn main() -> ExitCode {
    eprintln!("this example needs a Unix: it takes the lease away by removing a file that is in use");
    ExitCode::from(2)
}

/// The service, as you would write it.
#[cfg(unix)]
mod service {
    use std::process;
    use std::thread;
    use std::time::Duration;

    use leasehold::{Lease, Locker, Options, State};

    pub(crate) const NAME: &str = "sweeper";

    /// `EX_SOFTWARE` of sysexits.h: what restarts the service sees why it ended.
    pub(crate) const HUNG_JOB: i32 = 70;

    pub(crate) async fn main(store: &str, identity: &str) -> anyhow::Result<()> {
        let options = Options::default()
            .heartbeat_interval(Duration::from_millis(200))
            .retry_interval(Duration::from_millis(200))
            .stop_grace(Duration::from_millis(500))
            .identity(identity);
        let locker = Locker::connect(store, options).await?;
        end_with_a_hung_job(locker.clone())?;
        locker.run(NAME, async |lease: Lease| sweep(&lease, identity).await).await?;
        Ok(())
    }

    /// Ends the process when the job could not be stopped in time. On a thread of its own, with a runtime of its own: a
    /// job that blocks may block the one that it runs on.
    fn end_with_a_hung_job(locker: Locker) -> anyhow::Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread().build()?;
        thread::Builder::new().name("overrun".to_owned()).spawn(move || {
            let mut state = locker.subscribe(NAME);
            let overrun = state.wait_for(|state| matches!(state, State::Overrun { .. }));
            if runtime.block_on(overrun).is_some() {
                eprintln!("{}: {}: the process ends", locker.identity(), locker.health());
                process::exit(HUNG_JOB);
            }
        })?;
        Ok(())
    }

    async fn sweep(lease: &Lease, identity: &str) -> anyhow::Result<()> {
        println!("{identity}: leads");
        if identity == "hangs" {
            // A call that does not come back, and that no cancellation reaches.
            thread::sleep(Duration::from_hours(1));
        }
        lease.cancelled().await;
        Ok(())
    }
}

/// The two replicas, and what happens to them.
#[cfg(unix)]
mod play {
    use std::fs;
    use std::io::{BufRead as _, BufReader, Lines};
    use std::process::{Child, ChildStdout, Command, ExitCode, Stdio};

    use anyhow::Context as _;
    use leasehold::{Key, Kind};

    use super::service::{HUNG_JOB, NAME};

    pub(crate) fn play() -> anyhow::Result<ExitCode> {
        let dir = tempfile::tempdir()?;
        let store = format!("file:{}", dir.path().display());
        let mut first = Replica::start(&store, "hangs")?;
        first.leads()?;
        let mut second = Replica::start(&store, "successor")?;
        println!("somebody removes the file that the lease of the first one is on");
        fs::remove_file(dir.path().join(format!("{}.lock", Key::of(Kind::Lease, NAME))))?;
        second.leads()?;
        let ended = first.process.wait()?;
        println!("the first one has ended: {ended}");
        Ok(if ended.code() == Some(HUNG_JOB) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }

    /// A process, killed when it is dropped.
    struct Replica {
        process: Child,
        lines: Lines<BufReader<ChildStdout>>,
    }

    impl Replica {
        fn start(store: &str, identity: &str) -> anyhow::Result<Self> {
            let mut process = Command::new(std::env::current_exe()?)
                .args(["service", store, identity])
                .stdout(Stdio::piped())
                .spawn()?;
            let stdout = process.stdout.take().context("the process has an output")?;
            Ok(Self { process, lines: BufReader::new(stdout).lines() })
        }

        /// Waits until it says that it leads.
        fn leads(&mut self) -> anyhow::Result<()> {
            println!("{}", self.lines.next().context("the process has ended")??);
            Ok(())
        }
    }

    impl Drop for Replica {
        fn drop(&mut self) {
            // One that has ended already is no matter.
            self.process.kill().ok();
            self.process.wait().ok();
        }
    }
}
