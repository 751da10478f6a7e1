//! What a script or a person reads.

use std::fmt::Display;
use std::io::{self, ErrorKind, IsTerminal as _, Write as _};

use leasehold::Name;

/// Most characters of a text in a column of a terminal.
const WIDEST: usize = 48;

/// Writes it. False if nobody reads any more, which is no error: `leasehold status | head -1`.
pub(crate) fn print(text: &str) -> anyhow::Result<bool> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(anyhow::Error::new(error).context("cannot write to the standard output")),
    }
}

/// Whether somebody still reads, as far as that can be told without writing.
pub(crate) fn is_read() -> bool {
    #[cfg(unix)]
    {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};

        let out = io::stdout();
        // An error is told in any case.
        let mut files = [PollFd::new(&out, PollFlags::empty())];
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut files, Some(&at_once)).is_err() || !files[0].revents().contains(PollFlags::ERR)
    }
    #[cfg(not(unix))]
    true
}

/// Says what is wrong. That nobody reads it is no reason to leave the rest undone, as it would be for `eprintln!`.
pub(crate) fn complain(what: impl Display) {
    writeln!(io::stderr(), "leasehold: {what}").ok();
}

pub(crate) fn is_terminal() -> bool {
    io::stdout().is_terminal()
}

/// Whether to colour: on a terminal, unless `NO_COLOR` is set (no-color.org).
pub(crate) fn has_colours() -> bool {
    is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|it| it.is_empty())
}

/// One word: in quotes and escaped where it has blanks, or what could deceive whoever reads it. Cut on a terminal, where
/// nobody pastes it from.
pub(crate) fn word(text: &str) -> String {
    let quoted = format!("{text:?}");
    let is_plain = !text.is_empty() && !text.contains(' ') && quoted[1..quoted.len() - 1] == *text;
    let shown = if is_plain { text.to_owned() } else { quoted };
    if is_terminal() && shown.chars().count() > WIDEST {
        shown.chars().take(WIDEST - 1).chain(['\u{2026}']).collect()
    } else {
        shown
    }
}

pub(crate) fn name(name: &Name) -> String {
    word(name.as_str())
}
