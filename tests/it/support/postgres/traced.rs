//! A server process that goes on from one system call to the next, as a debugger lets it: halted where it has just let go of
//! a lock and wakes who waits for it, which no signal hits.

use nix::errno::Errno;
use nix::sys::ptrace::{self, Options};
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use super::super::eventually;

/// Halted until it is told to go on by a [step](Self::step), or dropped. Of the thread that made it alone.
#[must_use = "dropped, it lets the process go on"]
pub(crate) struct Traced {
    pid: Pid,
    /// What it is to hear of when it goes on.
    signal: Option<Signal>,
}

impl Traced {
    pub(crate) async fn attach(pid: i32) -> Self {
        let pid = Pid::from_raw(pid);
        ptrace::attach(pid).expect("the tests may trace the processes of their own servers");
        let halted = Self { pid, signal: None };
        assert!(matches!(halted.status().await, WaitStatus::Stopped(_, Signal::SIGSTOP)));
        ptrace::setoptions(pid, Options::PTRACE_O_TRACESYSGOOD).unwrap();
        halted
    }

    async fn status(&self) -> WaitStatus {
        let status = || waitpid(self.pid, Some(WaitPidFlag::WNOHANG | WaitPidFlag::__WALL)).unwrap();
        eventually("the process halts", status, |status| *status != WaitStatus::StillAlive).await
    }

    /// Lets it go on to the beginning or the end of its next system call. False if it has ended.
    pub(crate) async fn step(&mut self) -> bool {
        match ptrace::syscall(self.pid, self.signal.take()) {
            Ok(()) => {}
            Err(Errno::ESRCH) => return false,
            Err(error) => panic!("{error}"),
        }
        match self.status().await {
            WaitStatus::Stopped(_, signal) => self.signal = Some(signal),
            WaitStatus::Exited(..) | WaitStatus::Signaled(..) => return false,
            _ => {}
        }
        true
    }
}

impl Drop for Traced {
    fn drop(&mut self) {
        // It may have ended.
        ptrace::detach(self.pid, self.signal.take()).ok();
    }
}
