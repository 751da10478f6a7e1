//! A terminal for whom a test starts, and a shell on it with job control. What the test types, nobody else does.

use std::cell::RefCell;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::process::{Command, Stdio};

use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

use super::command::{Run, Scene, processes, session};
use super::eventually;

pub(crate) const CTRL_C: &str = "\x03";
pub(crate) const CTRL_Z: &str = "\x1a";
pub(crate) const CTRL_BACKSLASH: &str = "\x1c";

/// A pseudo-terminal, from the side of the person.
pub(crate) struct Terminal {
    ours: File,
    theirs: File,
    shown: RefCell<String>,
}

impl Terminal {
    pub(crate) fn new() -> Self {
        let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&ours).unwrap();
        unlockpt(&ours).unwrap();
        let name = ptsname(&ours, Vec::new()).unwrap();
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let theirs = rustix::fs::open(OsStr::from_bytes(name.to_bytes()), flags, Mode::empty()).unwrap();
        rustix::fs::fcntl_setfl(&ours, OFlags::RDWR | OFlags::NONBLOCK).unwrap();
        Self { ours: ours.into(), theirs: theirs.into(), shown: RefCell::default() }
    }

    /// Starts a command as the leader of a session that has this terminal.
    pub(crate) fn start(&self, command: &Command) -> Run {
        let mut there = Command::new("setsid");
        there.args(["--ctty", "--wait"]).arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            there.env(name, value.unwrap_or_default());
        }
        let stream = || Stdio::from(self.theirs.try_clone().unwrap());
        there.current_dir(command.get_current_dir().unwrap());
        there.stdin(stream()).stdout(stream()).stderr(stream());
        Run::of(there)
    }

    pub(crate) fn type_in(&self, text: &str) {
        (&self.ours).write_all(text.as_bytes()).unwrap();
    }

    /// All that has been written to it so far, with what was typed.
    pub(crate) fn shown(&self) -> String {
        let mut buffer = [0; 4096];
        while let Ok(length @ 1..) = (&self.ours).read(&mut buffer) {
            self.shown.borrow_mut().push_str(&String::from_utf8_lossy(&buffer[..length]));
        }
        self.shown.borrow().clone()
    }
}

/// An interactive shell. Dropped, all of its session are killed.
pub(crate) struct Shell<'a> {
    scene: &'a Scene,
    /// Until it is hung up.
    terminal: Option<Terminal>,
    bash: Run,
}

impl<'a> Shell<'a> {
    pub(crate) fn start(scene: &'a Scene) -> Self {
        let terminal = Terminal::new();
        let mut bash = Command::new("env");
        bash.args(["--default-signal", "bash", "--norc", "--noprofile", "--noediting", "-i"]);
        bash.envs([("HISTFILE", "/dev/null"), ("PS1", "> ")]);
        scene.set(&mut bash);
        let bash = terminal.start(&bash);
        Self { scene, terminal: Some(terminal), bash }
    }

    pub(crate) fn type_in(&self, text: &str) {
        self.terminal.as_ref().unwrap().type_in(text);
    }

    pub(crate) fn line(&self, line: &str) {
        self.type_in(&format!("{line}\n"));
    }

    /// Waits until a command has written that line.
    pub(crate) async fn says(&self, file: &str, line: &str) {
        let look = || (self.scene.read(file), self.terminal.as_ref().map(Terminal::shown));
        let what = format!("{file} has {line:?}");
        eventually(&what, look, |(text, _)| text.lines().any(|it| it == line)).await;
    }

    /// Waits until the shell, and nobody else, reads what is typed; and gives the code of what it ran before.
    pub(crate) async fn answers(&self) -> i32 {
        let file = format!("code-{}", self.scene.dir.path().read_dir().unwrap().count());
        self.line(&format!("echo $? > {file}.new; mv {file}.new {file}"));
        let look = || (self.scene.read(&file), self.terminal.as_ref().map(Terminal::shown));
        let (code, _) = eventually("the shell answers", look, |(text, _)| !text.is_empty()).await;
        code.trim().parse().unwrap()
    }

    /// The terminal is gone.
    pub(crate) fn hang_up(&mut self) {
        self.terminal = None;
    }

    /// Waits until the shell has ended.
    pub(crate) async fn ended(&mut self) {
        self.bash.ended().await;
    }
}

impl Drop for Shell<'_> {
    fn drop(&mut self) {
        let session_of_ours = Some(self.bash.pid().as_raw_pid());
        let members: Vec<Pid> =
            processes().into_iter().filter(|&pid| session(pid) == session_of_ours).collect();
        for pid in members {
            kill_process(pid, Signal::KILL).ok();
        }
    }
}
