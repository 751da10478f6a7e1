//! One run of the command, from its start until nobody of its process group is left.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt as _;
use std::process;
use std::time::Duration;

use leasehold::{FencingToken, Lease};
use rustix::process::{Pid, Signal, getpgrp, getpid, getppid, kill_process};
use tokio::time::{Instant, MissedTickBehavior};
use tracing::{debug, info, warn};

use super::Wrapper;
use super::group::Group;
use super::terminal::{self, Terminal};
use super::this_program;
use crate::common::now;
use crate::exit;
use crate::output::complain;

/// What is started in the place of the command, and becomes it when it may.
///
/// It stands still until the parent, who started it, lets it go on. Should that die, the kernel kills this where it can be
/// told to, and the command with it: it is only where the guard dies at the same time that this makes a difference. Elsewhere
/// the kernel lets a stopped group go on that nobody else can, after a HUP, which it may ignore (nohup).
pub(crate) fn exec(parent: i32, command: &[OsString]) -> u8 {
    let [program, arguments @ ..] = command else { return exit::USAGE };
    #[cfg(target_os = "linux")]
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).ok();
    let is_orphan = || getppid().map(Pid::as_raw_pid) != Some(parent);
    if is_orphan() {
        return exit::LOST;
    }
    if let Err(error) = kill_process(getpid(), Signal::STOP) {
        complain(error);
        return exit::BUG;
    }
    if is_orphan() {
        return exit::LOST;
    }
    let error = process::Command::new(program).args(arguments).exec();
    complain(format_args!("{}: {error}", program.display()));
    if error.kind() == io::ErrorKind::NotFound { exit::NOT_FOUND } else { exit::CANNOT_EXECUTE }
}

/// How the command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    Code(u8),
    Signal(i32),
}

impl Ended {
    /// As shells have it.
    pub(crate) fn code(self) -> u8 {
        match self {
            Self::Code(code) => code,
            Self::Signal(signal) => exit::of_signal(signal),
        }
    }

    /// By what is typed to interrupt it, or as a shell that was has it.
    fn is_interrupted(self) -> bool {
        [Signal::INT, Signal::QUIT].iter().any(|signal| self.code() == exit::of_signal(signal.as_raw()))
    }
}

/// What a command of `once` gets beyond others. Those of a wrapper around this one say nothing about this lease.
pub(crate) const SLOT_VARIABLES: [&str; 3] = ["LEASEHOLD_SLOT", "LEASEHOLD_SLOT_AT", "LEASEHOLD_RUN"];

/// The part of the grace in which whoever was told to stop is still only told.
const KILL_AFTER: f64 = 0.8;

pub(super) struct Command<'a> {
    wrapper: &'a Wrapper,
    pid: Pid,
    group: Group,
    terminal: Option<Terminal>,
}

impl<'a> Command<'a> {
    /// Starts it as the leader of a process group of its own, when the guard knows of the group: until then it stands
    /// still, and dies with this process: see [`exec`].
    pub(super) async fn start(
        wrapper: &'a Wrapper,
        lease: &Lease,
        token: Option<FencingToken>,
        variables: &[(&str, String)],
    ) -> io::Result<Self> {
        let mut exec = this_program()?;
        exec.args(["exec", &getpid().as_raw_pid().to_string(), "--"])
            .args(&wrapper.task.command)
            .env("LEASEHOLD_NAME", lease.name().as_str())
            .env("LEASEHOLD_IDENTITY", wrapper.locker.identity())
            .env("LEASEHOLD_TERM", lease.term().to_string())
            .process_group(0);
        match token {
            Some(token) => exec.env("LEASEHOLD_TOKEN", token.to_string()),
            // One of a wrapper around this one says nothing about this lease.
            None => exec.env_remove("LEASEHOLD_TOKEN"),
        };
        match lease.fence_sql() {
            Ok(sql) => exec.env("LEASEHOLD_FENCE_SQL", sql),
            // The store has no transactions.
            Err(_) => exec.env_remove("LEASEHOLD_FENCE_SQL"),
        };
        for inherited in SLOT_VARIABLES {
            exec.env_remove(inherited);
        }
        exec.envs(variables.iter().map(|(name, value)| (name, value)));
        let child = wrapper.mask.spawn(&mut exec)?;
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidData)?;
        wrapper.reaper.watch(pid);
        let group = Group(pid);
        let command = Self { wrapper, pid, group, terminal: Terminal::of(group) };
        tokio::select! {
            _ = wrapper.reaper.stopped(pid) => {}
            _ = wrapper.reaper.ended(pid) => {}
        }
        command.leash(lease);
        command.tell_the_guard_of_the_terminal();
        // This process may have stood still since it had the token.
        command.group.signal(if lease.is_held() { Signal::CONT } else { Signal::KILL });
        info!(name = %lease.name(), term = lease.term(), pid = pid.as_raw_pid(), "starts the command");
        Ok(command)
    }

    /// Waits until it has ended, and nobody of its group is left; ends it where the lease or a signal says so.
    pub(super) async fn attend(self, lease: &Lease) -> Ended {
        let Wrapper { signals, reaper, .. } = self.wrapper;
        let mut seen = signals.count();
        // Once it was told to stop.
        let mut kill_at: Option<Instant> = None;
        let mut is_lost = false;
        let mut ended = None;
        // What the guard knows of the deadline.
        let mut known = lease.deadline();
        // Not put off by what else happens.
        let mut looks = tokio::time::interval(terminal::LOOK);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let guard = self.wrapper.guard.borrow().pid();
            tokio::select! {
                biased;
                code = reaper.ended(self.pid), if ended.is_none() => {
                    ended = Some(code);
                    if code.is_interrupted() && self.terminal.as_ref().is_some_and(Terminal::is_lent) {
                        // Who types that means us, too, who do not hear it.
                        self.wrapper.shutdown.cancel();
                    }
                    // Whoever it left behind in its group goes too.
                    kill_at.get_or_insert_with(|| self.tell(Signal::TERM, now()));
                }
                () = self.group.until_empty(), if ended.is_some() => break,
                (signal, is_repeated) = signals.nth(seen) => {
                    seen += 1;
                    self.group.signal(signal);
                    if is_repeated {
                        self.group.signal(Signal::KILL);
                    } else if super::signals::ends(signal) {
                        kill_at.get_or_insert(now() + self.grace());
                    }
                }
                () = lease.lost(), if !is_lost => {
                    is_lost = true;
                    // The grace of a loss counts from the deadline, if that came first; it shortens an earlier one.
                    let lost = self.tell(Signal::TERM, now().min(lease.deadline()));
                    kill_at = Some(kill_at.map_or(lost, |earlier| earlier.min(lost)));
                }
                () = self.wrapper.told_to_stop(lease), if kill_at.is_none() => {
                    kill_at = Some(self.tell(Signal::TERM, now()));
                }
                signal = reaper.stopped(self.pid) => {
                    if self.terminal.as_ref().is_some_and(|terminal| terminal.stands_still(signal)) {
                        debug!(signal, "the command goes on: one that leads is not suspended");
                        self.has_the_terminal();
                    }
                }
                _ = looks.tick(), if self.terminal.is_some() => {
                    let is_stuck = |terminal: &Terminal| terminal.is_lent() && self.group.is_stuck();
                    if self.terminal.as_ref().is_some_and(|terminal| terminal.look() || is_stuck(terminal)) {
                        self.has_the_terminal();
                    }
                }
                () = sleep_until(kill_at), if kill_at.is_some() => {
                    warn!(group = self.pid.as_raw_pid(), "the command did not end in its grace: it is killed");
                    self.group.signal(Signal::KILL);
                    // Again, should it have made another one meanwhile.
                    kill_at = Some(now() + Duration::from_secs(1));
                }
                _ = reaper.ended(guard) => {
                    self.leash(lease);
                    self.tell_the_guard_of_the_terminal();
                }
                deadline = lease.deadline_after(known) => {
                    known = deadline;
                    if !self.leash(lease) {
                        warn!("the guard is gone, and cannot be started again");
                    }
                }
            }
        }
        ended.unwrap_or(Ended::Signal(Signal::KILL.as_raw()))
    }

    /// It may stand still since it did not have it.
    fn has_the_terminal(&self) {
        self.tell_the_guard_of_the_terminal();
        self.group.signal(Signal::CONT);
    }

    fn tell_the_guard_of_the_terminal(&self) {
        if self.terminal.as_ref().is_some_and(Terminal::is_lent) {
            self.wrapper.guard.borrow_mut().gives_the_terminal_to(getpgrp());
        }
    }

    /// Tells the group to stop, and gives when it will be killed: the grace counts from that instant.
    fn tell(&self, signal: Signal, from: Instant) -> Instant {
        self.group.signal(signal);
        from + self.grace()
    }

    /// How long it may take to end. The rest of the grace is for those who are killed to be gone.
    fn grace(&self) -> Duration {
        self.wrapper.stop_grace.mul_f64(KILL_AFTER)
    }

    /// When the guard is to kill, unless it is told a later instant before: as late as this process would.
    fn leash(&self, lease: &Lease) -> bool {
        self.wrapper.guard.borrow_mut().leash(self.group, lease.remaining() + self.grace())
    }
}

impl Drop for Command<'_> {
    /// Also where the library has dropped the job, since its grace was over.
    fn drop(&mut self) {
        if self.group.is_empty() {
            self.wrapper.guard.borrow_mut().free();
        } else {
            self.wrapper.guard.borrow_mut().kill();
            self.group.signal(Signal::KILL);
        }
        self.wrapper.reaper.forget(self.pid);
    }
}

async fn sleep_until(at: Option<Instant>) {
    if let Some(at) = at {
        tokio::time::sleep_until(at).await;
    }
}
