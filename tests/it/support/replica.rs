//! Replicas that are processes of their own: to be stopped and killed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use leasehold::Options;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use super::{Stage, eventually, until};

/// Where the program is.
pub(crate) const PROGRAM: &str = env!("CARGO_BIN_EXE_leasehold-replica");

/// What the bodies of the replicas' jobs have written.
pub(crate) struct Lines {
    dir: TempDir,
}

impl Lines {
    pub(crate) fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap() }
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("log")
    }

    pub(crate) fn all(&self) -> Vec<String> {
        fs::read_to_string(self.path()).unwrap_or_default().lines().map(str::to_owned).collect()
    }

    pub(crate) fn count(&self, what: &str) -> usize {
        self.all().iter().filter(|line| line.split(' ').nth(1) == Some(what)).count()
    }

    /// Waits for a line that begins like this, after the first `from` lines; gives the number of the line after it.
    pub(crate) async fn wait_for(&self, start: &str, from: usize) -> usize {
        let position = |lines: &Vec<String>| lines.iter().skip(from).position(|line| line.starts_with(start));
        let what = format!("a line {start:?}");
        let lines = eventually(&what, || self.all(), |lines| position(lines).is_some()).await;
        from + position(&lines).unwrap() + 1
    }
}

/// A replica. Dropped, it is killed.
pub(crate) struct Replica {
    child: Child,
    pub(crate) who: String,
}

impl Replica {
    /// Starts a replica that contends for `name`. `behaviour` as the program says.
    pub(crate) fn spawn(
        stage: &Stage,
        options: &Options,
        name: &str,
        lines: &Lines,
        behaviour: &str,
    ) -> Self {
        Self::by(Command::new(PROGRAM), &stage.url(), options, name, lines, &[behaviour])
    }

    /// As [`spawn`](Self::spawn), with the command that runs the program; `how` is its behaviour, and in what way it is
    /// broken.
    pub(crate) fn by(
        mut command: Command,
        url: &str,
        options: &Options,
        name: &str,
        lines: &Lines,
        how: &[&str],
    ) -> Self {
        let child = command
            .args([url, name, &options.to_string()])
            .arg(lines.path())
            .args(how)
            .stdin(Stdio::piped())
            .spawn()
            .expect("the replica starts");
        Self { child, who: options.get_identity().to_owned() }
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.child.id().try_into().unwrap()).unwrap();
        kill_process(pid, signal).expect("the replica can be sent a signal");
    }

    /// Asks it to end in order.
    pub(crate) fn terminate(&mut self) {
        self.child.stdin.take();
    }

    /// Kills it, and waits until it is dead.
    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Stops it, and waits until it stands still.
    pub(crate) async fn stop(&self) {
        self.signal(Signal::STOP);
        until("the process stands still", || self.state() == 'T').await;
    }

    pub(crate) fn cont(&self) {
        self.signal(Signal::CONT);
    }

    /// Its state as proc(5) shows it, after the name in brackets: `T` is stopped.
    fn state(&self) -> char {
        let stat = fs::read_to_string(Path::new("/proc").join(self.child.id().to_string()).join("stat"));
        stat.unwrap().rsplit(") ").next().unwrap().chars().next().unwrap()
    }

    /// Waits until it has ended by itself.
    pub(crate) async fn wait(&mut self) -> ExitStatus {
        let ended = eventually("the process ends", || self.child.try_wait().unwrap(), Option::is_some);
        ended.await.unwrap()
    }
}

impl Drop for Replica {
    fn drop(&mut self) {
        // One that has ended already is no matter.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}
