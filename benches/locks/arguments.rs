//! What the bench was asked for.

use std::time::Duration;

use anyhow::{Context as _, bail};

use crate::common::Common;

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
    pub(crate) common: Common,
    only: Option<Store>,
}

impl Arguments {
    /// `None` is a cry for help.
    pub(crate) fn parse(arguments: impl Iterator<Item = String>) -> anyhow::Result<Option<Self>> {
        let mut only = None;
        let common = Common::parse(arguments, USAGE, |argument, further| {
            if argument == "--store" {
                let store = further.next().context("--store needs a store")?;
                only = Some(Store::parse(&store)?);
            }
            Ok(argument == "--store")
        })?;
        Ok(common.map(|common| Self { common, only }))
    }

    pub(crate) fn has(self, store: Store) -> bool {
        self.only.is_none_or(|only| only == store)
    }

    /// Of each figure and its limit, in turn.
    pub(crate) const fn rounds(self) -> usize {
        if self.common.is_quick { 2 } else { 5 }
    }

    /// How many cycles in a row make one round.
    pub(crate) const fn cycles(self) -> u32 {
        if self.common.is_quick { 500 } else { 3_000 }
    }

    /// For how long cycles or commits are counted.
    pub(crate) const fn window(self) -> Duration {
        Duration::from_secs(if self.common.is_quick { 1 } else { 3 })
    }
}
