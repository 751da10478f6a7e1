//! What every bench that holds figures against limits can be asked for.

use anyhow::{Context as _, bail, ensure};

use crate::report::Goal;

#[derive(Clone, Copy)]
pub(crate) struct Common {
    pub(crate) is_quick: bool,
    pub(crate) is_json: bool,
    pub(crate) allowance: f64,
}

/// The rest of the command line.
pub(crate) type Further<'a> = &'a mut dyn Iterator<Item = String>;

impl Common {
    /// `None` is a cry for help. `further` takes what only that bench knows, and tells whether it did.
    pub(crate) fn parse(
        mut arguments: impl Iterator<Item = String>,
        usage: &str,
        mut further: impl FnMut(&str, Further<'_>) -> anyhow::Result<bool>,
    ) -> anyhow::Result<Option<Self>> {
        let mut parsed = Self { is_quick: false, is_json: false, allowance: 1.0 };
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
                // Cargo says that to every bench.
                "--bench" => {}
                other if further(other, &mut arguments)? => {}
                other => bail!("there is no {other}\n{usage}"),
            }
        }
        Ok(Some(parsed))
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
}
