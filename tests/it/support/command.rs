//! `leasehold` as a process: a person or a script starts it, and ends it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use super::{Stage, eventually};

pub(crate) const PROGRAM: &str = env!("CARGO_BIN_EXE_leasehold");

/// The program, with no signal ignored, as the tests themselves may have been started; and so would it.
fn program() -> Command {
    if !cfg!(target_os = "linux") {
        return Command::new(PROGRAM);
    }
    let mut command = Command::new("env");
    command.args(["--default-signal", PROGRAM]);
    command
}

/// A store on this host, and a folder for what commands write.
pub(crate) struct Scene {
    pub(crate) stage: Stage,
    pub(crate) dir: TempDir,
}

/// An invocation. Dropped, it is killed; its guard ends its command.
pub(crate) struct Run {
    pub(crate) child: Child,
}

impl Scene {
    pub(crate) fn new(stage: Stage) -> Self {
        Self { stage, dir: tempfile::tempdir().unwrap() }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap_or_default()
    }

    /// `leasehold run OPTIONS… job -- sh -c SCRIPT`, with short intervals.
    pub(crate) fn command(&self, options: &[&str], script: &str) -> Command {
        self.command_by("run", options, script)
    }

    /// As [`Self::command`], by another subcommand.
    pub(crate) fn command_by(&self, subcommand: &str, options: &[&str], script: &str) -> Command {
        let mut command = program();
        command.arg(subcommand).args(options).args(["job", "--", "sh", "-c", script]).stdin(Stdio::null());
        self.set(&mut command);
        command
    }

    /// As [`Self::command`], for another command than a script.
    pub(crate) fn command_of(&self, command: &[&str]) -> Command {
        let mut it = program();
        it.args(["run", "job", "--"]).args(command).stdin(Stdio::null());
        self.set(&mut it);
        it
    }

    /// A script around `leasehold`, which it finds on its path.
    pub(crate) fn script(&self, script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]).stdin(Stdio::null());
        self.set(&mut command);
        command
    }

    /// The store, short intervals, and where the program is. Arguments go before variables.
    pub(crate) fn set(&self, command: &mut Command) {
        let beside = Path::new(PROGRAM).parent().unwrap().to_owned();
        let path = std::env::var_os("PATH").unwrap_or_default();
        let path = std::env::join_paths(std::iter::once(beside).chain(std::env::split_paths(&path))).unwrap();
        command
            .envs([
                ("LEASEHOLD_STORE", self.stage.url().as_str()),
                ("LEASEHOLD_RETRY_INTERVAL", "100ms"),
                ("LEASEHOLD_HEARTBEAT_INTERVAL", "100ms"),
                ("LEASEHOLD_QUERY_TIMEOUT", "1s"),
                ("LEASEHOLD_STOP_GRACE", "500ms"),
            ])
            .env("PATH", path)
            .current_dir(self.dir.path());
    }

    pub(crate) fn start(&self, options: &[&str], script: &str) -> Run {
        Run::of(self.command(options, script))
    }

    pub(crate) fn output(&self, options: &[&str], script: &str) -> Output {
        self.command(options, script).output().unwrap()
    }

    pub(crate) fn code(&self, options: &[&str], script: &str) -> Option<i32> {
        self.output(options, script).status.code()
    }

    /// Waits until a command has written that line.
    pub(crate) async fn says(&self, file: &str, line: &str) {
        eventually(
            &format!("{file} has {line:?}"),
            || self.read(file),
            |text| text.lines().any(|it| it == line),
        )
        .await;
    }

    /// The number that a command wrote.
    pub(crate) async fn pid(&self, file: &str) -> Pid {
        let number = || self.read(file).trim().parse().ok();
        let number =
            eventually(&format!("{file} has a number"), number, |it: &Option<i32>| it.is_some()).await;
        Pid::from_raw(number.unwrap()).unwrap()
    }
}

impl Run {
    pub(crate) fn of(mut command: Command) -> Self {
        Self::of_piped(&mut command)
    }

    /// As [`Self::of`], for the end of a chain of setters.
    pub(crate) fn of_piped(command: &mut Command) -> Self {
        Self { child: command.spawn().unwrap() }
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id().try_into().unwrap()).unwrap()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).unwrap();
    }

    /// Waits until it has ended, and gives its exit code.
    pub(crate) async fn ended(&mut self) -> Option<i32> {
        eventually("it ends", || self.child.try_wait().unwrap(), Option::is_some).await.unwrap().code()
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// Whether a process runs: it is there, and no zombie.
pub(crate) fn runs(pid: Pid) -> bool {
    state(pid).is_some_and(|state| !matches!(state, 'Z' | 'X'))
}

/// The letter that ps(1) has for what a process does.
pub(crate) fn state(pid: Pid) -> Option<char> {
    stat(pid)?.first()?.chars().next()
}

/// The session that it is in.
pub(crate) fn session(pid: Pid) -> Option<i32> {
    stat(pid)?.get(3)?.parse().ok()
}

/// All that runs.
pub(crate) fn processes() -> Vec<Pid> {
    let entries = fs::read_dir("/proc").unwrap();
    entries.filter_map(|entry| Pid::from_raw(entry.ok()?.file_name().to_str()?.parse().ok()?)).collect()
}

/// proc(5): what comes after the name in brackets, beginning with the state.
fn stat(pid: Pid) -> Option<Vec<String>> {
    let text = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_pid())).ok()?;
    Some(text.rsplit_once(") ")?.1.split(' ').map(str::to_owned).collect())
}
