//! A process group: everybody in it is told, and it counts as empty only when nobody in it runs any more.

use std::io;
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process_group, test_kill_process_group};
use tracing::warn;

/// How often a group that is to become empty is looked at.
const LOOK: Duration = Duration::from_millis(10);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Group(pub(crate) Pid);

impl Group {
    /// Sends a signal to all in the group. A stopped process notes it and takes it when it goes on: so it goes on.
    pub(crate) fn signal(self, signal: Signal) {
        match kill_process_group(self.0, signal) {
            Ok(()) | Err(Errno::SRCH) => {}
            Err(error) => {
                warn!(group = self.0.as_raw_pid(), ?signal, %error, "not everybody could be sent a signal");
            }
        }
        if signal == Signal::TERM || signal == Signal::HUP {
            kill_process_group(self.0, Signal::CONT).ok();
        }
    }

    pub(crate) async fn until_empty(self) {
        while !self.is_empty() {
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Whether nobody in it runs. Those that are dead and wait to be reaped do not count, where that can be seen: whoever
    /// should reap them may never do so.
    pub(crate) fn is_empty(self) -> bool {
        match test_kill_process_group(self.0) {
            Err(Errno::SRCH) => true,
            Err(_) => false,
            Ok(()) => self.has_only_zombies().unwrap_or(false),
        }
    }

    /// Whether its leader cannot stop for that signal, since it waits for a child that has, as in vfork(2): whoever waits
    /// for the leader is not told of that.
    pub(crate) fn is_stuck(self) -> bool {
        stat(&self.0.as_raw_pid().to_string()).is_some_and(|(state, _)| state == 'D')
            && self.states().is_ok_and(|states| states.contains(&'T'))
    }

    fn has_only_zombies(self) -> io::Result<bool> {
        Ok(self.states()?.iter().all(|state| matches!(state, 'Z' | 'X')))
    }

    /// What those in it do, by letters as of proc(5).
    fn states(self) -> io::Result<Vec<char>> {
        let mut states = Vec::new();
        for entry in std::fs::read_dir("/proc")? {
            let name = entry?.file_name();
            let Some(pid) = name.to_str().filter(|name| name.bytes().all(|byte| byte.is_ascii_digit()))
            else {
                continue;
            };
            // Gone meanwhile: no matter.
            let Some((state, group)) = stat(pid) else { continue };
            if group == self.0.as_raw_pid() {
                states.push(state);
            }
        }
        Ok(states)
    }
}

/// The state and the process group of a process, where there is a proc(5).
fn stat(pid: &str) -> Option<(char, i32)> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // After the name in brackets come the state, the parent and the process group.
    let mut fields = stat.rsplit_once(") ")?.1.split(' ');
    Some((fields.next()?.chars().next()?, fields.nth(1)?.parse().ok()?))
}
