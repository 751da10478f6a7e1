//! What the bench was asked for.

use std::time::Duration;

use crate::common::Common;

pub(crate) const USAGE: &str = "\
usage: cargo bench --features cli --bench command -- [--quick] [--json] [--allowance FACTOR]

Measures what `leasehold run` costs: start-up, memory, processor time, end and hand-over; beside each, what the same costs
without leasehold. Prints a Markdown table. Exits with 1 if a goal is missed.

  --quick   fewer rounds, and a shorter look at idle processes
  --json    a line of JSON for each figure; the table goes to standard error
  --allowance FACTOR
            for a machine that is busy with something else, or slow to wake: goals for time are that many times as long";

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

    pub(crate) const fn starts(self) -> usize {
        if self.common.is_quick { 15 } else { 50 }
    }

    pub(crate) const fn hand_overs(self) -> usize {
        if self.common.is_quick { 5 } else { 20 }
    }

    /// How long idle processes are left alone before they are looked at: past the first heartbeat after the start, which
    /// is 5 s, and where there is time past the 10 s for which tokio keeps a thread that has no more work.
    pub(crate) const fn settling(self) -> Duration {
        Duration::from_secs(if self.common.is_quick { 6 } else { 12 })
    }

    /// For how long they are looked at: a whole number of heartbeats.
    pub(crate) const fn window(self) -> Duration {
        Duration::from_secs(if self.common.is_quick { 10 } else { 30 })
    }
}
