//! The processes that are started: `leasehold run` with this program as its command, or this program alone.

use std::ffi::OsStr;
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::Context as _;
use rustix::process::{Pid, Signal, kill_process};
use rustix::time::{ClockId, clock_gettime};

use crate::place::{NAME, Place};

const PROGRAM: &str = env!("CARGO_BIN_EXE_leasehold");

/// Whoever does not lead by then, gives up: so that nothing waits for ever, and nothing outlives the bench for long.
const PATIENCE: &str = "5m";

/// The default of `heartbeat_interval`.
pub(crate) const HEARTBEAT: Duration = Duration::from_secs(5);

pub(crate) fn now() -> Duration {
    clock_gettime(ClockId::Monotonic).try_into().expect("the monotonic clock is not negative")
}

/// What the command does after it has told when it started.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Then {
    /// It ends at once, and tells when.
    End,
    /// It waits for the end of its standard input, so that it does not outlive the bench.
    Stay,
    /// It also wakes as often as there is a heartbeat, and does nothing.
    Wake,
}

impl Then {
    const fn word(self) -> &'static str {
        match self {
            Self::End => "end",
            Self::Stay => "stay",
            Self::Wake => "wake",
        }
    }
}

/// This program as the command. Two stamps in one line: of its first instruction and of its last but one.
pub(crate) fn play(then: &str, started: Duration) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{} {}", started.as_nanos(), now().as_nanos())?;
    out.flush()?;
    if then == Then::Wake.word() {
        thread::spawn(|| {
            loop {
                thread::sleep(HEARTBEAT);
            }
        });
    }
    if then != Then::End.word() {
        io::stdin().read_to_end(&mut Vec::new())?;
    }
    Ok(())
}

/// One of them. Dropped, it is told to stop, and waited for.
pub(crate) struct Process {
    child: Child,
    lines: BufReader<ChildStdout>,
}

/// What the command told.
#[derive(Clone, Copy)]
pub(crate) struct Told {
    pub(crate) started: Duration,
    pub(crate) ended: Duration,
}

impl Process {
    /// `leasehold run`, with default options but for these.
    pub(crate) fn leasehold(place: &Place, options: &[&str], then: Then) -> anyhow::Result<Self> {
        let mut command = Command::new(PROGRAM);
        for (variable, _) in std::env::vars_os() {
            if variable.as_encoded_bytes().starts_with(b"LEASEHOLD_") {
                command.env_remove(variable);
            }
        }
        command.args(["run", "--quiet", "--store", place.url(), "--wait", PATIENCE]);
        command.args(options).args([NAME, "--"]);
        Self::start(command.arg(std::env::current_exe()?), then)
    }

    /// The command alone.
    pub(crate) fn plain(then: Then) -> anyhow::Result<Self> {
        Self::start(&mut Command::new(std::env::current_exe()?), then)
    }

    fn start(command: &mut Command, then: Then) -> anyhow::Result<Self> {
        command.args(["command", then.word()]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().with_context(|| format!("starting {command:?}"))?;
        let lines = BufReader::new(child.stdout.take().context("it has a standard output")?);
        Ok(Self { child, lines })
    }

    pub(crate) fn pid(&self) -> anyhow::Result<Pid> {
        Pid::from_raw(self.child.id().try_into()?).context("it has a process number")
    }

    /// Waits until the command has started.
    pub(crate) fn told(&mut self) -> anyhow::Result<Told> {
        let mut line = String::new();
        self.lines.read_line(&mut line)?;
        let (started, ended) =
            line.trim_end().split_once(' ').context("it ended before its command has started")?;
        let stamp = |text: &str| text.parse().map(Duration::from_nanos);
        Ok(Told { started: stamp(started)?, ended: stamp(ended)? })
    }

    pub(crate) fn stop(&self) -> anyhow::Result<()> {
        Ok(kill_process(self.pid()?, Signal::TERM)?)
    }

    /// Waits for its end, and tells when that was.
    pub(crate) fn ended(mut self) -> anyhow::Result<Duration> {
        self.child.wait()?;
        Ok(now())
    }

    /// The guard that `leasehold run` has started.
    pub(crate) fn guard(&self) -> anyhow::Result<Pid> {
        let pid = self.child.id();
        for thread in std::fs::read_dir(format!("/proc/{pid}/task"))? {
            for child in std::fs::read_to_string(thread?.path().join("children"))?.split_whitespace() {
                let arguments = std::fs::read(format!("/proc/{child}/cmdline"))?;
                if arguments.split(|&byte| byte == 0).nth(1) == Some(OsStr::new("guard").as_encoded_bytes()) {
                    return Pid::from_raw(child.parse()?).context("it has a process number");
                }
            }
        }
        anyhow::bail!("there is no guard among the children of {pid}")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Its end may have been seen already: then its number is no longer its own.
        if let Ok(None) = self.child.try_wait() {
            self.stop().ok();
            self.child.wait().ok();
        }
    }
}
