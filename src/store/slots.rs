//! What a store keeps of the slots of one name, for `every`: a small record, looked at by anybody, and compared and set by
//! who holds the lock of that name. What it means is none of a store's business.

use std::fmt;
use std::str::FromStr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::name::{Key, Name};

/// An instant on the store's own clock, in microseconds since 1970. It can step back, as wall clocks do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Moment(pub(crate) u64);

impl Moment {
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn after(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(micros(duration)))
    }

    /// Zero where `earlier` is not earlier.
    pub(crate) const fn since(self, earlier: Self) -> Duration {
        Duration::from_micros(self.0.saturating_sub(earlier.0))
    }

    pub(crate) fn to_system_time(self) -> SystemTime {
        UNIX_EPOCH + Duration::from_micros(self.0)
    }
}

#[cfg(any(test, feature = "testing"))]
impl From<SystemTime> for Moment {
    fn from(time: SystemTime) -> Self {
        Self(micros(time.duration_since(UNIX_EPOCH).unwrap_or_default()))
    }
}

pub(crate) fn micros(duration: Duration) -> u64 {
    duration.as_micros().try_into().unwrap_or(u64::MAX)
}

/// Whose slots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Slots {
    /// Of the lock that those who write hold.
    pub(crate) key: Key,
    /// For people.
    pub(crate) name: Name,
}

/// How far the run of a slot is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Started,
    Finished,
}

impl Phase {
    pub(crate) const fn word(self) -> &'static str {
        match self {
            Self::Started => "started",
            Self::Finished => "finished",
        }
    }
}

impl FromStr for Phase {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        [Self::Started, Self::Finished].into_iter().find(|phase| phase.word() == text).ok_or(())
    }
}

/// What is to be recorded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Which slot.
    pub(crate) number: u64,
    /// When that began.
    pub(crate) at: Moment,
    /// Which attempt at it, counted from 1.
    pub(crate) run: u32,
    pub(crate) phase: Phase,
    /// The identity of who writes: it has no blanks.
    pub(crate) by: String,
}

/// What is recorded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) entry: Entry,
    /// When, by the store's clock.
    pub(crate) written: Moment,
}

/// What a store shows of the slots of a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Looked {
    /// The store's clock.
    pub(crate) now: Moment,
    pub(crate) record: Option<Record>,
}

/// Why a store does not show a record, or keep one; the session goes on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NoSlots {
    /// Trying again does not help. The text says why and what to change.
    Forbidden(String),
    /// It could not now.
    Failed(String),
}

/// What a store says when a record is to be set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Amended {
    /// It is kept, also if the store crashes now. With the store's time.
    Done(Record),
    /// There was another record than expected, or none; nothing was done.
    Changed,
    /// The lock is not this session's any more; nothing was done.
    Gone,
    /// It is not known whether anything was done.
    Failed(NoSlots),
}

/// A record as a line, for stores that keep text.
impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { entry: Entry { number, at, run, phase, by }, written } = self;
        write!(f, "slot {number} of {} run {run} {} {} by {by}", at.0, phase.word(), written.0)
    }
}

impl FromStr for Record {
    type Err = ();

    fn from_str(line: &str) -> Result<Self, ()> {
        let words: Vec<&str> = line.split_whitespace().collect();
        let ["slot", number, "of", at, "run", run, phase, written, "by", by] = words.as_slice() else {
            return Err(());
        };
        let number_of = |text: &str| text.parse::<u64>().map_err(|_| ());
        let entry = Entry {
            number: number_of(number)?,
            at: Moment(number_of(at)?),
            run: run.parse().map_err(|_| ())?,
            phase: phase.parse()?,
            by: (*by).to_owned(),
        };
        Ok(Self { entry, written: Moment(number_of(written)?) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_reads_back_from_its_line_and_half_a_line_is_none() {
        for phase in [Phase::Started, Phase::Finished] {
            let entry = Entry { number: 7, at: Moment(12), run: 2, phase, by: "host:1-a".to_owned() };
            let record = Record { entry, written: Moment(u64::MAX) };
            let line = record.to_string();
            assert_eq!(line.parse(), Ok(record));
            for end in 0..line.len() - "host:1-a".len() {
                assert_eq!(line[..end].parse::<Record>(), Err(()), "{:?}", &line[..end]);
            }
        }
        for wrong in ["", "slot -1 of 2 run 1 started 3 by a", "slot 1 of 2 run 1 paused 3 by a"] {
            assert_eq!(wrong.parse::<Record>(), Err(()), "{wrong}");
        }
    }
}
