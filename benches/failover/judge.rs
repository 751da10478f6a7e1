//! What the lines of a round show, and what the rounds of a scenario show together.

use std::time::Duration;

use crate::log::{Event, Line};
use crate::scenario::Goal;

/// What came of one round.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Outcome {
    /// Another body started.
    Changed {
        vacancy: Duration,
        overlap: Duration,
        /// How long no server could have been asked, which is part of the vacancy.
        outage: Duration,
    },
    /// The leader went on leading.
    Kept,
    /// Nobody took over for as long as anybody looked.
    Vacant { over: Duration },
}

/// Whose body, which time.
type Body = (char, u64);

fn body(line: &Line) -> Option<Body> {
    matches!(line.event, Event::Start | Event::Tick | Event::End | Event::Dropped)
        .then_some((line.who, line.term))
}

/// The body that started first.
pub(crate) fn first(lines: &[Line]) -> Option<Body> {
    lines.iter().find(|line| line.event == Event::Start).and_then(body)
}

/// When another body than the first one started.
pub(crate) fn successor(lines: &[Line]) -> Option<Duration> {
    let old = first(lines)?;
    let starts = lines.iter().filter(|line| line.event == Event::Start && body(line) != Some(old));
    starts.map(|line| line.at).min()
}

/// Whether the first body runs no more.
pub(crate) fn is_over(lines: &[Line]) -> bool {
    let old = first(lines);
    lines.iter().any(|line| matches!(line.event, Event::End | Event::Dropped) && body(line) == old)
}

/// When the first body was polled for the last time.
pub(crate) fn last_poll(lines: &[Line]) -> Option<Duration> {
    let old = first(lines);
    let polls = lines.iter().filter(|line| line.event != Event::Dropped && body(line) == old);
    polls.map(|line| line.at).max()
}

/// Median and maximum.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spread {
    pub(crate) median: Duration,
    pub(crate) max: Duration,
}

impl Spread {
    pub(crate) fn of(values: impl Iterator<Item = Duration>) -> Option<Self> {
        let mut values: Vec<_> = values.collect();
        values.sort_unstable();
        let max = *values.last()?;
        let (low, high) = (values[(values.len() - 1) / 2], values[values.len() / 2]);
        Some(Self { median: (low + high) / 2, max })
    }
}

/// What the rounds of one scenario came to.
#[derive(Clone, Debug)]
pub(crate) struct Summary {
    pub(crate) rounds: usize,
    pub(crate) changes: usize,
    /// Zero where the leader went on leading; `None` if nobody took over in a round.
    pub(crate) vacancy: Option<Spread>,
    pub(crate) over: Option<Duration>,
    pub(crate) overlap: Spread,
    pub(crate) outage: Option<Spread>,
    /// The longest vacancy, not counting the outage.
    pub(crate) worst_without_outage: Duration,
}

impl Summary {
    pub(crate) fn of(outcomes: &[Outcome]) -> Option<Self> {
        let over = outcomes.iter().filter_map(|outcome| match outcome {
            Outcome::Vacant { over } => Some(*over),
            _ => None,
        });
        let over = over.min();
        let vacancies = outcomes.iter().map(|outcome| match *outcome {
            Outcome::Changed { vacancy, .. } => vacancy,
            Outcome::Kept => Duration::ZERO,
            Outcome::Vacant { over } => over,
        });
        let changed = |of: fn(&Outcome) -> Option<Duration>| outcomes.iter().map(of);
        let overlaps = changed(|outcome| match *outcome {
            Outcome::Changed { overlap, .. } => Some(overlap),
            _ => None,
        });
        let outages = changed(|outcome| match *outcome {
            Outcome::Changed { outage, .. } if !outage.is_zero() => Some(outage),
            _ => None,
        });
        let served = changed(|outcome| match *outcome {
            Outcome::Changed { vacancy, outage, .. } => Some(vacancy.saturating_sub(outage)),
            _ => None,
        });
        Some(Self {
            rounds: outcomes.len(),
            changes: outcomes.iter().filter(|outcome| matches!(outcome, Outcome::Changed { .. })).count(),
            vacancy: if over.is_some() { None } else { Spread::of(vacancies) },
            over,
            overlap: Spread::of(overlaps.map(Option::unwrap_or_default))?,
            outage: Spread::of(outages.flatten()),
            worst_without_outage: served.flatten().max().unwrap_or_default(),
        })
    }

    pub(crate) fn reaches(&self, goal: &Goal) -> bool {
        let Some(vacancy) = self.vacancy else { return false };
        self.overlap.max <= goal.overlap
            && goal.median.is_none_or(|limit| vacancy.median <= limit)
            && match goal.worst {
                Some(limit) => self.changes == self.rounds && self.worst_without_outage <= limit,
                None => self.changes == 0,
            }
    }
}
