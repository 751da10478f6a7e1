//! A process of its own that kills the command's group when this one cannot: because it was killed, or stands still.
//!
//! It reads its standard input: a line for each thing that it is to know. Where that ends without a word, the process
//! that wrote it is dead, and the group is killed at once. Where the *leash* runs out, since the writer stands still
//! and cannot prolong it, the group is killed before anybody else may lead.

use std::fs::File;
use std::io::{self, BufRead as _, PipeWriter, Write as _};
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use rustix::time::{ClockId, clock_gettime};
use tracing::warn;

use super::group::Group;
use super::reaper::Reaper;
use super::{terminal, this_program};
use crate::output::complain;

/// Where no leash runs.
const LONG: Duration = Duration::from_hours(1);

/// How long its end is waited for: nearly always it takes a millisecond.
const LONGEST_END: Duration = Duration::from_secs(1);

/// The guard, from the side of the process that it guards.
pub(crate) struct Guard {
    /// What several processes of one host hold one after the other, where the store is on this host: it is free only
    /// when the group of the one before is dead.
    file: Option<PathBuf>,
    process: Process,
    reaper: Reaper,
}

struct Process {
    pid: Pid,
    say: PipeWriter,
    /// Until it is asked to hold something.
    answers: Option<ChildStdout>,
    /// It has said that it holds that, or has nothing to hold.
    holds: Arc<AtomicBool>,
}

impl Guard {
    pub(crate) fn start(file: Option<PathBuf>, reaper: Reaper) -> io::Result<Self> {
        Ok(Self { file, process: Process::start(&reaper, "free")?, reaper })
    }

    pub(crate) const fn pid(&self) -> Pid {
        self.process.pid
    }

    /// Somebody has killed it.
    fn start_again(&mut self, first: &str) -> io::Result<()> {
        warn!("the guard is dead: another one is started");
        self.reaper.forget(self.process.pid);
        self.process = Process::start(&self.reaper, first)?;
        Ok(())
    }

    /// Makes sure that there is a guard, and that it holds what it is to hold. Before a command starts, what this gives
    /// is to be waited for.
    pub(crate) fn hold(&mut self) -> io::Result<impl Future<Output = io::Result<()>> + use<>> {
        // One that was asked, and whose answer nobody has waited for, is asked no more.
        let is_asked = self.process.answers.is_none() && !self.process.holds.load(Ordering::Relaxed);
        if is_asked || self.process.say("free").is_err() {
            self.start_again("free")?;
        }
        let file = self.file.clone().and_then(|file| Some((file, self.process.answers.take()?)));
        if let Some((path, _)) = &file {
            self.process.say(&format!("hold {}", path.display()))?;
        }
        let holds = Arc::clone(&self.process.holds);
        Ok(async move {
            let Some((path, answers)) = file else { return Ok(()) };
            // It may have to wait until the one before has killed its group: that takes milliseconds.
            let answered = tokio::task::spawn_blocking(move || {
                let mut line = String::new();
                io::BufReader::new(answers).read_line(&mut line).map(|_| line)
            });
            match answered.await??.trim() {
                "held" => {
                    holds.store(true, Ordering::Relaxed);
                    Ok(())
                }
                other => Err(io::Error::other(format!("the guard cannot lock {}: {other}", path.display()))),
            }
        })
    }

    /// The group is to be killed at that instant, unless a later one is told before. Tells whether the guard lives.
    pub(crate) fn leash(&mut self, group: Group, left: Duration) -> bool {
        let at = clock().saturating_add(left).as_millis();
        let text = format!("leash {} {at}", group.0.as_raw_pid());
        self.process.say(&text).is_ok() || self.start_again(&text).is_ok()
    }

    /// That group gets the terminal back from the command, should this process be killed.
    pub(crate) fn gives_the_terminal_to(&mut self, group: Pid) {
        self.process.say(&format!("terminal {}", group.as_raw_pid())).ok();
    }

    /// Waits until it has ended: it holds open what this process was started with, and what whoever started that waits
    /// for may be one of these things. Not for long: somebody may have stopped it.
    pub(crate) async fn end(self) {
        let Self { process: Process { pid, say, answers, holds }, reaper, .. } = self;
        drop(say);
        if answers.is_none() && !holds.load(Ordering::Relaxed) && reaper.runs(pid) {
            // It waits for another one's, and hears nothing. It leads nothing yet.
            kill_process(pid, Signal::KILL).ok();
        }
        tokio::time::timeout(LONGEST_END, reaper.ended(pid)).await.ok();
    }

    /// The group is empty.
    pub(crate) fn free(&mut self) {
        self.process.say("free").ok();
    }
}

impl Process {
    /// It is told the first thing before it runs: from then on it may be needed.
    fn start(reaper: &Reaper, first: &str) -> io::Result<Self> {
        use std::os::unix::process::CommandExt as _;

        let (hear, say) = io::pipe()?;
        tell(&say, first)?;
        let mut child = this_program()?
            .arg("guard")
            // Out of the way of what is sent to our group, such as by a terminal.
            .process_group(0)
            .stdin(hear)
            .stdout(Stdio::piped())
            .spawn()?;
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidData)?;
        reaper.watch(pid);
        Ok(Self { pid, say, answers: child.stdout.take(), holds: Arc::default() })
    }

    fn say(&self, line: &str) -> io::Result<()> {
        tell(&self.say, line)
    }
}

/// One write, so that it is there whole or not at all.
fn tell(mut pipe: &PipeWriter, line: &str) -> io::Result<()> {
    pipe.write_all(format!("{line}\n").as_bytes())
}

impl std::fmt::Debug for Process {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Process").field("pid", &self.pid).finish_non_exhaustive()
    }
}

/// A clock that all processes of the host share, and that runs on while it is suspended where there is such a one.
fn clock() -> Duration {
    #[cfg(target_os = "linux")]
    let now = clock_gettime(ClockId::Boottime);
    #[cfg(not(target_os = "linux"))]
    let now = clock_gettime(ClockId::Monotonic);
    Duration::new(now.tv_sec.try_into().unwrap_or(0), now.tv_nsec.try_into().unwrap_or(0))
}

/// What the guard was told.
enum Order {
    Hold(PathBuf),
    Leash { group: Group, until: Duration },
    Terminal(Pid),
    Free,
}

impl Order {
    fn read(line: &str) -> Option<Self> {
        if let Some(path) = line.strip_prefix("hold ") {
            return Some(Self::Hold(path.into()));
        }
        if line == "free" {
            return Some(Self::Free);
        }
        if let Some(group) = line.strip_prefix("terminal ") {
            return Some(Self::Terminal(Pid::from_raw(group.parse().ok()?)?));
        }
        let (group, until) = line.strip_prefix("leash ")?.split_once(' ')?;
        Some(Self::Leash {
            group: Group(Pid::from_raw(group.parse().ok()?)?),
            until: Duration::from_millis(until.parse().ok()?),
        })
    }
}

/// The guard itself.
pub(crate) fn main() -> ExitCode {
    let (tell, told) = mpsc::channel();
    thread::spawn(move || {
        for line in io::stdin().lines() {
            let Ok(line) = line else { break };
            if let Some(order) = Order::read(&line)
                && tell.send(order).is_err()
            {
                break;
            }
        }
    });
    let mut leash: Option<(Group, Duration)> = None;
    let mut held = None;
    let mut terminal = None;
    loop {
        let left = leash.map_or(LONG, |(_, until)| until.saturating_sub(clock()));
        match told.recv_timeout(left) {
            Ok(Order::Hold(path)) => {
                println!(
                    "{}",
                    hold(&path).map_or_else(
                        |error| error.to_string(),
                        |file| {
                            held = Some(file);
                            "held".to_owned()
                        }
                    )
                );
            }
            Ok(Order::Leash { group, until }) => leash = Some((group, until)),
            Ok(Order::Terminal(group)) => terminal = Some(group),
            Ok(Order::Free) => (leash, terminal) = (None, None),
            Err(RecvTimeoutError::Timeout) => {
                if let Some((group, until)) = leash
                    && clock() >= until
                {
                    group.signal(Signal::KILL);
                    leash = None;
                    // Whoever should read it may stand still, too.
                    thread::spawn(|| complain("the process that leads stands still: its command is killed"));
                }
            }
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    if let Some((group, _)) = leash {
        group.signal(Signal::KILL);
        while !group.is_empty() {
            thread::sleep(Duration::from_millis(1));
        }
    }
    // Only now: whoever waits for it starts a command of its own.
    drop(held);
    if let Some((group, _)) = leash {
        if let Some(to) = terminal {
            terminal::give_back(group, to);
        }
        complain("the process that leads is dead: its command is killed");
    }
    ExitCode::SUCCESS
}

fn hold(path: &Path) -> io::Result<File> {
    let file = File::options().read(true).write(true).create(true).truncate(false).open(path)?;
    file.lock()?;
    Ok(file)
}
