//! The terminal is the command's while it runs in front: it reads from it, and one Ctrl-C is one SIGINT for it.
//!
//! Meant is the controlling terminal, whatever the standard streams are. The command gets it at once where both the
//! standard input and output are that terminal. Otherwise it may be needed by others of a pipeline, or by the script that
//! started us in the background: then the command gets it when it stands still since it wants it, and Ctrl-C is passed on
//! to it as any signal is. Where we run in the background ourselves, we have nothing to lend before we are put in front,
//! and no shell tells us of that: it is looked at.

use std::cell::Cell;
use std::fs::File;
use std::io::{stdin, stdout};
use std::time::Duration;

use rustix::process::{Pid, Signal, getpgrp};
use rustix::termios::{tcgetpgrp, tcsetpgrp};
use tracing::debug;

use super::group::Group;

/// How often it is looked at whether we have been put in front.
pub(super) const LOOK: Duration = Duration::from_millis(500);

/// Our terminal, for one command. Dropped, we have it back.
#[must_use = "dropped, it takes the terminal back"]
pub(super) struct Terminal {
    file: File,
    group: Group,
    is_wanted: Cell<bool>,
    was_lent: Cell<bool>,
}

impl Terminal {
    /// `None` if we have none.
    pub(super) fn of(group: Group) -> Option<Self> {
        let is_wanted = Cell::new(tcgetpgrp(stdin()).is_ok() && tcgetpgrp(stdout()).is_ok());
        let terminal = Self { file: open()?, group, is_wanted, was_lent: Cell::default() };
        terminal.look();
        Some(terminal)
    }

    /// Lends it if it is wanted, and ours to lend. Tells whether it has just been lent.
    pub(super) fn look(&self) -> bool {
        let lends = self.is_wanted.get()
            && tcgetpgrp(&self.file).is_ok_and(|in_front| in_front == getpgrp())
            && put_in_front(&self.file, self.group.0);
        if lends {
            self.was_lent.set(true);
        }
        lends
    }

    /// The command stands still. Tells whether it should go on: its shell, which knows only us, cannot let it.
    pub(super) fn stands_still(&self, signal: i32) -> bool {
        if [Signal::TTIN, Signal::TTOU].iter().any(|it| it.as_raw() == signal) {
            self.is_wanted.set(true);
        }
        self.look() || self.is_lent()
    }

    pub(super) fn is_lent(&self) -> bool {
        self.was_lent.get() && tcgetpgrp(&self.file).is_ok_and(|in_front| in_front == self.group.0)
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        if self.was_lent.get() {
            take_back(&self.file, self.group, getpgrp());
        }
    }
}

/// What the guard does where the process that has lent it is dead.
pub(super) fn give_back(from: Group, to: Pid) {
    if let Some(terminal) = open() {
        take_back(&terminal, from, to);
    }
}

fn open() -> Option<File> {
    File::options().read(true).write(true).open("/dev/tty").ok()
}

/// Not from whoever was put in front meanwhile, such as the shell when somebody had stopped us.
fn take_back(terminal: &File, from: Group, to: Pid) {
    if tcgetpgrp(terminal).is_ok_and(|in_front| in_front == from.0 || Group(in_front).is_empty()) {
        put_in_front(terminal, to);
    }
}

/// Who is not in front would be stopped for this, if that signal were not blocked: see [`super::signals::Mask`].
fn put_in_front(terminal: &File, group: Pid) -> bool {
    let done = tcsetpgrp(terminal, group);
    if let Err(error) = done {
        debug!(%error, "the terminal could not be handed over");
    }
    done.is_ok()
}
