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

    #[cfg(target_os = "linux")]
    fn has_only_zombies(self) -> io::Result<bool> {
        for entry in std::fs::read_dir("/proc")? {
            let name = entry?.file_name();
            let Some(pid) = name.to_str().filter(|name| name.bytes().all(|byte| byte.is_ascii_digit()))
            else {
                continue;
            };
            // Gone meanwhile: no matter.
            let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else { continue };
            // proc(5): after the name in brackets the state, the parent and the process group.
            let Some((_, fields)) = stat.rsplit_once(") ") else { continue };
            let mut fields = fields.split(' ');
            let (state, group) = (fields.next(), fields.nth(1));
            if group == Some(&self.0.as_raw_pid().to_string()) && !matches!(state, Some("Z" | "X")) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    #[cfg(not(target_os = "linux"))]
    #[expect(clippy::unused_self, reason = "there is nothing to look at")]
    fn has_only_zombies(self) -> io::Result<bool> {
        Ok(false)
    }
}
