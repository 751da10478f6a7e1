//! What the bench was asked for.

use std::time::Duration;

use crate::common::Common;

pub(crate) const USAGE: &str = "\
usage: cargo bench --bench scale -- [--quick] [--json] [--allowance FACTOR]

Measures how the cost of a Locker grows: statements and the server's processor time when idle, a heartbeat, a poll and memory,
against its names, against the Lockers of a server, against the locks of others. Prints a Markdown table. Exits with 1 if a
goal is missed.

  --quick   fewer rounds and shorter ones. Memory is shown, but not judged: its goals are those of an optimised build
  --json    a line of JSON for each figure; the table goes to standard error
  --allowance FACTOR
            for a machine that is busy with something else: goals for time are that many times as easy to reach. Those for
            statements are not";

/// Names of one Locker. The last is as many as it has by default.
pub(crate) const NAMES: [u32; 4] = [1, 10, 100, 1_000];

/// Locks of somebody else in the same server.
pub(crate) const FOREIGN: [u32; 4] = [0, 1_000, 3_000, 10_000];

#[derive(Clone, Copy)]
pub(crate) struct Arguments {
    pub(crate) common: Common,
}

impl Arguments {
    /// `None` is a cry for help.
    pub(crate) fn parse(arguments: impl Iterator<Item = String>) -> anyhow::Result<Option<Self>> {
        let common = Common::parse(arguments, USAGE, |_, _| Ok(false))?;
        Ok(common.map(|common| Self { common }))
    }

    /// On one server, each of which leads one name and stands by for that of another.
    pub(crate) const fn lockers(self) -> &'static [u32] {
        if self.common.is_quick { &[2, 50, 200] } else { &[2, 25, 50, 100, 200] }
    }

    /// Of each figure and its limit, at each size, in turn.
    pub(crate) const fn rounds(self) -> usize {
        if self.common.is_quick { 2 } else { 5 }
    }

    /// Of each figure of memory: a process each.
    pub(crate) const fn processes(self) -> usize {
        if self.common.is_quick { 1 } else { 5 }
    }

    /// Of a round.
    pub(crate) const fn looks(self) -> usize {
        if self.common.is_quick { 10 } else { 20 }
    }

    /// For how long polls are looked at, in each round at each size.
    pub(crate) const fn polls_window(self) -> Duration {
        Duration::from_millis(if self.common.is_quick { 400 } else { 1_000 })
    }

    /// For how long idle Lockers are looked at: a whole number of heartbeats.
    pub(crate) const fn window(self) -> Duration {
        Duration::from_secs(if self.common.is_quick { 15 } else { 60 })
    }
}
