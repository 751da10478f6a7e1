//! The file that every replica appends to, and the only evidence that the judge accepts.
//!
//! One line is one `write` to a file opened with `O_APPEND`: the kernel puts the lines of all processes in one order.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

use anyhow::Context as _;

/// What a replica has to say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// The replica is connected and stands by.
    Ready,
    /// The body of its job begins.
    Start,
    /// The body did a piece of work.
    Tick,
    /// The last line of the body.
    End,
    /// The replica has left for good.
    Gone,
}

const WORDS: [(Event, &str); 5] = [
    (Event::Ready, "ready"),
    (Event::Start, "start"),
    (Event::Tick, "tick"),
    (Event::End, "end"),
    (Event::Gone, "gone"),
];

/// One line of the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Line {
    /// When, by the monotonic clock that all processes of a host share.
    pub(crate) at: Duration,
    /// Which replica.
    pub(crate) replica: String,
    /// Which term of that replica; 0 where it is about none.
    pub(crate) term: u64,
    /// What.
    pub(crate) event: Event,
}

impl Line {
    /// Tells whether the line was written by the body of a job.
    pub(crate) fn is_body(&self) -> bool {
        matches!(self.event, Event::Start | Event::Tick | Event::End)
    }

    /// Names the run of a body.
    pub(crate) fn run(&self) -> (&str, u64) {
        (&self.replica, self.term)
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = WORDS.iter().find(|(event, _)| *event == self.event).map_or("?", |(_, word)| word);
        write!(f, "{} {} {} {word}", self.at.as_micros(), self.replica, self.term)
    }
}

impl FromStr for Line {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        let fields: Vec<&str> = text.split(' ').collect();
        let [at, replica, term, word] = fields[..] else {
            anyhow::bail!("expected four fields in {text:?}");
        };
        let event = WORDS.iter().find(|(_, known)| *known == word);
        Ok(Self {
            at: Duration::from_micros(at.parse().with_context(|| format!("bad time in {text:?}"))?),
            replica: replica.to_owned(),
            term: term.parse().with_context(|| format!("bad term in {text:?}"))?,
            event: event.with_context(|| format!("bad event in {text:?}"))?.0,
        })
    }
}

/// Reads the complete lines of a log; the last one may still be on its way.
pub(crate) fn read(path: &Path) -> anyhow::Result<Vec<Line>> {
    let text = std::fs::read_to_string(path)?;
    let complete = text.rfind('\n').map_or("", |end| &text[..end]);
    complete.lines().map(str::parse).collect()
}

/// A replica's own handle to the log.
#[derive(Debug)]
pub(crate) struct Log {
    file: File,
    replica: String,
}

impl Log {
    pub(crate) fn append(path: &Path, replica: &str) -> anyhow::Result<Self> {
        let file = OpenOptions::new().append(true).create(true).open(path).context("cannot open the log")?;
        Ok(Self { file, replica: replica.to_owned() })
    }

    pub(crate) fn write(&self, term: u64, event: Event) -> anyhow::Result<()> {
        let line = Line { at: now(), replica: self.replica.clone(), term, event };
        (&self.file).write_all(format!("{line}\n").as_bytes()).context("cannot write to the log")
    }
}

/// Reads the monotonic clock that all processes of a host share; std's cannot be compared between processes.
pub(crate) fn now() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    Duration::new(now.tv_sec.unsigned_abs(), u32::try_from(now.tv_nsec).unwrap_or_default())
}
