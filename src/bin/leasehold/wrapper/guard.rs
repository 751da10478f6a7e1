//! A process of its own that kills the command's group when this one cannot: because it was killed, or stands still.
//!
//! It reads its standard input: a line for each thing that it is to know. Where that ends without a word, the process
//! that wrote it is dead, and the group is killed at once. Where the *leash* runs out, since the writer stands still
//! and cannot prolong it, the group is killed before anybody else may lead.

use std::fs::{File, TryLockError};
use std::io::{self, BufRead as _, PipeWriter, Write as _};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, ExitCode, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, kill_process};
use rustix::stdio::stdin;
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

/// What several processes of one host hold one after the other, where the store is on this host: it is free only when the
/// group of the one before is dead. Readers hold it together.
#[derive(Clone, Debug)]
pub(crate) struct GuardFile {
    pub(crate) path: PathBuf,
    pub(crate) is_shared: bool,
}

/// The guard, from the side of the process that it guards.
pub(crate) struct Guard {
    file: Option<GuardFile>,
    process: Process,
    reaper: Reaper,
}

struct Process {
    pid: Pid,
    say: PipeWriter,
    answers: Answers,
}

/// Where the guard answers. `None` while it is waited for an answer, and when none will come.
#[derive(Clone)]
struct Answers(Arc<Mutex<Option<ChildStdout>>>);

impl Answers {
    fn get(&self) -> MutexGuard<'_, Option<ChildStdout>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Blocks until it has answered.
    fn read(&self, mut answers: ChildStdout) -> io::Result<String> {
        let mut line = String::new();
        // It says no more than it is asked.
        io::BufReader::new(&mut answers).read_line(&mut line)?;
        if line.is_empty() {
            // It is dead, whether or not it still seems to listen.
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        *self.get() = Some(answers);
        Ok(line)
    }
}

impl Guard {
    pub(crate) fn start(file: Option<GuardFile>, reaper: Reaper) -> io::Result<Self> {
        let process = Process::start(&reaper, file.as_ref(), "free")?;
        Ok(Self { file, process, reaper })
    }

    pub(crate) const fn pid(&self) -> Pid {
        self.process.pid
    }

    /// Somebody has killed it, or it does not listen.
    fn start_again(&mut self, first: &str) -> io::Result<()> {
        let Process { pid, .. } = self.process;
        if self.reaper.runs(pid) {
            kill_process(pid, Signal::KILL).ok();
        } else {
            warn!("the guard is dead: another one is started");
        }
        self.reaper.forget(pid);
        self.process = Process::start(&self.reaper, self.file.as_ref(), first)?;
        Ok(())
    }

    /// Makes sure that there is a guard, and that it holds what it is to hold. Before a command starts, what this gives
    /// is to be waited for.
    pub(crate) fn hold(&mut self) -> io::Result<impl Future<Output = io::Result<()>> + use<>> {
        // One that was asked, and whose answer nobody has waited for, is asked no more.
        let is_asked = self.process.answers.get().is_none();
        let order = if self.file.is_some() { "free\nhold" } else { "free" };
        if is_asked || self.process.say(order).is_err() {
            self.start_again(order)?;
        }
        let mut asked = None;
        if let Some(GuardFile { path, .. }) = self.file.clone() {
            let answers = self.process.answers.clone();
            asked = answers.get().take().map(|stdout| (path, answers.clone(), stdout));
        }
        Ok(async move {
            let Some((path, answers, stdout)) = asked else { return Ok(()) };
            // It may have to wait until the one before has killed its group: that takes milliseconds.
            match tokio::task::spawn_blocking(move || answers.read(stdout)).await??.trim() {
                "held" => Ok(()),
                other => Err(io::Error::other(format!("the guard cannot lock {}: {other}", path.display()))),
            }
        })
    }

    /// The group is to be killed at that instant, unless a later one is told before. Tells whether the guard lives.
    pub(crate) fn leash(&mut self, group: Group, left: Duration) -> bool {
        let at = clock().saturating_add(left).as_millis();
        let text = format!("leash {} {at}", group.0.as_raw_pid());
        self.process.say(&text).is_ok() || self.start_again(&format!("{text}\nkeep")).is_ok()
    }

    /// That group gets the terminal back from the command, should this process be killed.
    pub(crate) fn gives_the_terminal_to(&mut self, group: Pid) {
        self.process.say(&format!("terminal {}", group.as_raw_pid())).ok();
    }

    /// Waits until it has ended: it holds open what this process was started with, and what whoever started that waits
    /// for may be one of these things. Not for long: somebody may have stopped it.
    pub(crate) async fn end(self) {
        let Self { process: Process { pid, say, answers }, reaper, .. } = self;
        drop(say);
        if answers.get().is_none() && reaper.runs(pid) {
            // It waits for another one's, and hears nothing. It leads nothing yet.
            kill_process(pid, Signal::KILL).ok();
        }
        tokio::time::timeout(LONGEST_END, reaper.ended(pid)).await.ok();
    }

    /// The group is empty.
    pub(crate) fn free(&mut self) {
        self.process.say("free").ok();
    }

    /// The group is to be killed at once. When it is empty, that is as if this process had said so.
    pub(crate) fn kill(&mut self) {
        self.process.say("kill").ok();
    }
}

impl Process {
    /// It is told the first thing before it runs: from then on it may be needed.
    fn start(reaper: &Reaper, file: Option<&GuardFile>, first: &str) -> io::Result<Self> {
        use std::os::unix::process::CommandExt as _;

        let (hear, say) = io::pipe()?;
        // Who stopped it stops not us: where it is full it is of no use.
        rustix::io::ioctl_fionbio(&say, true)?;
        tell(&say, first)?;
        let mut guard = this_program()?;
        guard.arg("guard");
        if let Some(GuardFile { path, is_shared }) = file {
            guard.args(is_shared.then_some("--shared")).arg(path);
        }
        let mut child = guard
            // Out of the way of what is sent to our group, such as by a terminal.
            .process_group(0)
            .stdin(hear)
            .stdout(Stdio::piped())
            .spawn()?;
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidData)?;
        reaper.watch(pid);
        Ok(Self { pid, say, answers: Answers(Arc::new(Mutex::new(child.stdout.take()))) })
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
    /// Lock the file, and say so.
    Hold,
    /// Lock it if it is free, as it is where the one before has just been killed.
    Keep,
    Leash {
        group: Group,
        until: Duration,
    },
    Terminal(Pid),
    Kill,
    Free,
}

impl Order {
    fn read(line: &str) -> Option<Self> {
        match line {
            "hold" => return Some(Self::Hold),
            "keep" => return Some(Self::Keep),
            "kill" => return Some(Self::Kill),
            "free" => return Some(Self::Free),
            _ => {}
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

/// What is read of the guard's orders: on one thread, so that one that is there is seen before it is too late, also
/// where this process stood still.
#[derive(Default)]
struct Orders {
    read: Vec<u8>,
}

/// Why there is no order.
enum Nothing {
    Timeout,
    Dead,
}

impl Orders {
    fn next(&mut self, left: Duration) -> Result<Order, Nothing> {
        loop {
            while let Some(end) = self.read.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = self.read.drain(..=end).collect();
                if let Some(order) = std::str::from_utf8(&line[..end]).ok().and_then(Order::read) {
                    return Ok(order);
                }
            }
            let stdin = stdin();
            let mut files = [PollFd::from_borrowed_fd(stdin.as_fd(), PollFlags::IN)];
            let left = Timespec::try_from(left).unwrap_or(Timespec { tv_sec: 1, tv_nsec: 0 });
            match poll(&mut files, Some(&left)) {
                // The clock says which of them it is.
                Ok(0) | Err(rustix::io::Errno::INTR) => return Err(Nothing::Timeout),
                Ok(_) => {
                    let mut buffer = [0; 4096];
                    match rustix::io::read(stdin, &mut buffer) {
                        Ok(0) => return Err(Nothing::Dead),
                        Ok(n) => self.read.extend_from_slice(&buffer[..n]),
                        Err(rustix::io::Errno::INTR) => {}
                        Err(_) => return Err(Nothing::Dead),
                    }
                }
                Err(_) => return Err(Nothing::Dead),
            }
        }
    }
}

/// The guard itself.
pub(crate) fn main(file: Option<&GuardFile>) -> ExitCode {
    outlive_hup();
    let mut orders = Orders::default();
    let mut leash: Option<(Group, Duration)> = None;
    let mut held = None;
    let mut terminal = None;
    loop {
        let left = leash.map_or(LONG, |(_, until)| until.saturating_sub(clock()).min(LONG));
        match orders.next(left) {
            Ok(Order::Hold) => {
                let answer = match hold(file) {
                    Ok(file) => {
                        held = Some(file);
                        "held".to_owned()
                    }
                    Err(error) => error.to_string(),
                };
                // Whoever asked may be dead.
                writeln!(io::stdout(), "{answer}").ok();
            }
            Ok(Order::Keep) => held = keep(file),
            Ok(Order::Leash { group, until }) => leash = Some((group, until)),
            Ok(Order::Terminal(group)) => terminal = Some(group),
            Ok(Order::Kill) => {
                if let Some((group, _)) = leash {
                    kill(group);
                }
                (leash, terminal, held) = (None, None, None);
            }
            Ok(Order::Free) => (leash, terminal, held) = (None, None, None),
            Err(Nothing::Timeout) => {
                if let Some((group, until)) = leash
                    && clock() >= until
                {
                    group.signal(Signal::KILL);
                    // It is not seen to be empty.
                    leash = Some((group, Duration::MAX));
                    // Whoever should read it may stand still, too.
                    thread::spawn(|| complain("the process that leads stands still: its command is killed"));
                }
            }
            Err(Nothing::Dead) => break,
        }
    }
    if let Some((group, _)) = leash {
        kill(group);
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

/// If it stands still when the process that it guards dies, the kernel lets it go on, and sends it a HUP with that.
fn outlive_hup() {
    use nix::sys::signal::{SigSet, Signal};

    let mut hup = SigSet::empty();
    hup.add(Signal::SIGHUP);
    if let Err(error) = hup.thread_block() {
        complain(error);
    }
}

/// Kills the group, and waits until it is empty.
fn kill(group: Group) {
    group.signal(Signal::KILL);
    while !group.is_empty() {
        thread::sleep(Duration::from_millis(1));
    }
}

fn hold(file: Option<&GuardFile>) -> io::Result<File> {
    let GuardFile { path, is_shared } = file.ok_or(io::ErrorKind::InvalidInput)?;
    let file = open(path)?;
    if *is_shared { file.lock_shared() } else { file.lock() }?;
    Ok(file)
}

fn keep(file: Option<&GuardFile>) -> Option<File> {
    let GuardFile { path, is_shared } = file?;
    let file = open(path).ok()?;
    match if *is_shared { file.try_lock_shared() } else { file.try_lock() } {
        Ok(()) => Some(file),
        Err(TryLockError::WouldBlock | TryLockError::Error(_)) => None,
    }
}

fn open(path: &Path) -> io::Result<File> {
    File::options().read(true).write(true).create(true).truncate(false).open(path)
}
