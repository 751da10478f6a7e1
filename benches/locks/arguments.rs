//! What the bench was asked for.

use std::time::Duration;

use anyhow::{Context as _, bail, ensure};

use crate::report::Goal;

pub(crate) const USAGE: &str = "\
usage: cargo bench --bench locks [--features redis] -- [--quick] [--json] [--allowance FACTOR] [--store STORE]

Measures what critical sections cost: a cycle of acquire and release, many of them at once, what others on the server notice
of them, hand-over, sessions and memory; beside each, what the same costs in plain SQL or in plain commands. Prints a Markdown
table. Exits with 1 if a goal is missed.

  --quick   fewer rounds and shorter ones. Two kinds of figures are shown, but not judged: how cycles compare to raw round trips,
            which depends on what the machine takes to wake a thread more than on anything that a change does; and memory,
            whose goals are those of an optimised build
  --json    a line of JSON for each figure; the table goes to standard error
  --allowance FACTOR
            for a machine that is busy with something else: goals for time are that many times as easy to reach
  --store STORE
            only on that store: postgres or redis (a feature of the build). Else on every one of the build";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Store {
    Postgres,
    #[cfg(feature = "redis")]
    Redis,
}

impl Store {
    fn parse(name: &str) -> anyhow::Result<Self> {
        match name {
            "postgres" => Ok(Self::Postgres),
            #[cfg(feature = "redis")]
            "redis" => Ok(Self::Redis),
            #[cfg(not(feature = "redis"))]
            "redis" => bail!("this build is without Redis: --features redis"),
            other => bail!("there is no store {other}\n{USAGE}"),
        }
    }
}

#[derive(Clone, Copy)]
pub(crate) struct Arguments {
    pub(crate) is_quick: bool,
    pub(crate) is_json: bool,
    allowance: f64,
    only: Option<Store>,
}

impl Arguments {
    /// `None` is a cry for help.
    pub(crate) fn parse(mut arguments: impl Iterator<Item = String>) -> anyhow::Result<Option<Self>> {
        let mut parsed = Self { is_quick: false, is_json: false, allowance: 1.0, only: None };
        while let Some(argument) = arguments.next() {
            match argument.as_str() {
                "-h" | "--help" => return Ok(None),
                "--quick" => parsed.is_quick = true,
                "--json" => parsed.is_json = true,
                "--allowance" => {
                    let factor = arguments.next().context("--allowance needs a number")?;
                    parsed.allowance = factor.parse().context("--allowance needs a number")?;
                    ensure!(parsed.allowance >= 1.0, "an allowance is at least 1");
                }
                "--store" => {
                    let store = arguments.next().context("--store needs a store")?;
                    parsed.only = Some(Store::parse(&store)?);
                }
                // Cargo says that to every bench.
                "--bench" => {}
                other => bail!("there is no {other}\n{USAGE}"),
            }
        }
        Ok(Some(parsed))
    }

    pub(crate) fn has(self, store: Store) -> bool {
        self.only.is_none_or(|only| only == store)
    }

    /// A goal for time.
    pub(crate) fn allow(self, goal: Goal) -> Goal {
        match goal {
            Goal::Below(goal) => Goal::Below(goal * self.allowance),
            Goal::AtMost(goal) => Goal::AtMost(goal * self.allowance),
            Goal::TimesAtMost(goal) => Goal::TimesAtMost(goal * self.allowance),
            Goal::TimesAtLeast(goal) => Goal::TimesAtLeast(goal / self.allowance),
        }
    }

    /// Of each figure and its limit, in turn.
    pub(crate) const fn rounds(self) -> usize {
        if self.is_quick { 2 } else { 5 }
    }

    /// How many cycles in a row make one round.
    pub(crate) const fn cycles(self) -> u32 {
        if self.is_quick { 500 } else { 3_000 }
    }

    /// For how long cycles or commits are counted.
    pub(crate) const fn window(self) -> Duration {
        Duration::from_secs(if self.is_quick { 1 } else { 3 })
    }
}
