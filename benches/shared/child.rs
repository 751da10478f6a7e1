//! Another process: this program again. It does what it is told by its standard input, a line each, and tells a line for
//! each; it ends with its input, so that none outlives the bench.

use std::fmt::Display;
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::Context as _;

/// Waits until it is told to go on. False at the end.
pub(crate) fn go_on() -> anyhow::Result<bool> {
    Ok(io::stdin().lock().read_line(&mut String::new())? > 0)
}

pub(crate) fn tell(what: impl Display) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{what}")?;
    Ok(out.flush()?)
}

/// The bench's end of it. Dropped, it is waited for.
pub(crate) struct Other {
    child: Child,
    input: Option<ChildStdin>,
    lines: BufReader<ChildStdout>,
}

impl Other {
    pub(crate) fn start(role: &str, url: &str, further: &[String]) -> anyhow::Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["child", role, url]).args(further).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn()?;
        let input = child.stdin.take();
        let lines = BufReader::new(child.stdout.take().context("it has a standard output")?);
        Ok(Self { child, input, lines })
    }

    pub(crate) fn go_on(&mut self) -> anyhow::Result<()> {
        Ok(writeln!(self.input.as_mut().context("it has a standard input")?)?)
    }

    pub(crate) fn told<T: std::str::FromStr>(&mut self) -> anyhow::Result<T> {
        let mut line = String::new();
        self.lines.read_line(&mut line)?;
        line.trim_end().parse().ok().with_context(|| format!("the other process said {line:?}"))
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        self.input = None;
        self.child.wait().ok();
    }
}
