//! The terminal is the command's while it runs: it reads from it, and one Ctrl-C is one SIGINT for it.

use std::io::stdin;

use nix::sys::signal::{SigSet, SigmaskHow, Signal};
use rustix::process::{Pid, getpgrp};
use rustix::termios::{tcgetpgrp, tcsetpgrp};
use tracing::debug;

/// Our terminal, while it is lent. Dropped, we have it back.
#[must_use = "dropped, it takes the terminal back"]
pub(crate) struct Lent(());

/// Lends the terminal to a process group: `None` if we have none, or do not have it in front.
pub(crate) fn lend(group: Pid) -> Option<Lent> {
    let in_front = tcgetpgrp(stdin()).ok()?;
    if in_front != getpgrp() {
        return None;
    }
    hand_over(group);
    Some(Lent(()))
}

impl Drop for Lent {
    fn drop(&mut self) {
        hand_over(getpgrp());
    }
}

/// Whoever does not have the terminal in front is stopped for this, unless the signal is blocked.
fn hand_over(group: Pid) {
    let mut blocked = SigSet::empty();
    blocked.add(Signal::SIGTTOU);
    let before = blocked.thread_swap_mask(SigmaskHow::SIG_BLOCK);
    if let Err(error) = tcsetpgrp(stdin(), group) {
        debug!(%error, "the terminal could not be handed over");
    }
    if let Ok(before) = before {
        before.thread_set_mask().ok();
    }
}
