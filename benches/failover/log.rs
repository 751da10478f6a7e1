//! What the bodies of the jobs write, and the only evidence that is judged.
//!
//! Every process of a round appends to one file, a line in one write. The stamps are of the monotonic clock that all
//! processes of a host share.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use rustix::time::{ClockId, clock_gettime};

pub(crate) fn now() -> Duration {
    clock_gettime(ClockId::Monotonic).try_into().expect("the monotonic clock is not negative")
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// It knows that somebody else leads, or leads itself.
    Ready,
    /// The body begins.
    Start,
    /// The body was polled.
    Tick,
    /// The body was polled for the last time, and returns.
    End,
    /// The body was dropped. It did not run for that, so this is no sign of life.
    Dropped,
}

const WORDS: [(Event, &str); 5] = [
    (Event::Ready, "ready"),
    (Event::Start, "start"),
    (Event::Tick, "tick"),
    (Event::End, "end"),
    (Event::Dropped, "dropped"),
];

#[derive(Clone, Copy, Debug)]
pub(crate) struct Line {
    pub(crate) who: char,
    pub(crate) event: Event,
    pub(crate) term: u64,
    pub(crate) at: Duration,
}

impl Line {
    fn parse(text: &str) -> anyhow::Result<Self> {
        let mut words = text.split(' ');
        let mut word = || words.next().context("a word is missing");
        let who = word()?.chars().next().context("nobody wrote it")?;
        let event = word()?;
        let (event, _) = WORDS.into_iter().find(|(_, word)| *word == event).context("an unknown event")?;
        let (term, at) = (word()?.parse()?, Duration::from_nanos(word()?.parse()?));
        Ok(Self { who, event, term, at })
    }
}

/// The writing end, in a replica.
pub(crate) struct Writer {
    file: File,
    who: char,
}

impl Writer {
    pub(crate) fn append(path: &Path, who: char) -> io::Result<Self> {
        Ok(Self { file: OpenOptions::new().append(true).create(true).open(path)?, who })
    }

    pub(crate) fn write(&self, event: Event, term: u64, at: Duration) {
        let at = at.as_nanos();
        let (_, word) = WORDS.into_iter().find(|(it, _)| *it == event).expect("every event has a word");
        (&self.file)
            .write_all(format!("{} {word} {term} {at}\n", self.who).as_bytes())
            .expect("it is written");
    }
}

/// The reading end, in the bench.
pub(crate) struct Reader {
    path: PathBuf,
    file: File,
    unfinished: Vec<u8>,
    lines: Vec<Line>,
}

impl Reader {
    pub(crate) fn create(path: PathBuf) -> io::Result<Self> {
        File::create(&path)?;
        Ok(Self { file: File::open(&path)?, path, unfinished: Vec::new(), lines: Vec::new() })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Everything that was written so far.
    pub(crate) fn lines(&mut self) -> anyhow::Result<&[Line]> {
        self.file.read_to_end(&mut self.unfinished)?;
        if let Some(end) = self.unfinished.iter().rposition(|&byte| byte == b'\n') {
            let rest = self.unfinished.split_off(end + 1);
            let finished = String::from_utf8(std::mem::replace(&mut self.unfinished, rest))?;
            for line in finished.lines() {
                self.lines.push(Line::parse(line).with_context(|| format!("the line {line:?}"))?);
            }
        }
        Ok(&self.lines)
    }
}
