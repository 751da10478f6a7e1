//! `leasehold doctor`: whether the store can be used, and what to change.

use std::process::ExitCode;

use clap::Args;
use leasehold::{Check, Diagnosis, Verdict};
use serde_json::{Value, json};

use crate::common::Common;
use crate::{exit, output};

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  leasehold doctor --store postgres://app@db-1,db-2/app
  leasehold doctor --store file:/var/lib/my-app/leases
  leasehold doctor --query-timeout 2s --json | jq '.checks[] | select(.verdict != \"good\")'

A line is a check: verdict (good, warning, bad), what was looked at, what was found -> what to
change. Its bounds are those of `leasehold run` with the same options, whose takeover delay of 1s
(none on files) is in them; --takeover-delay=0s shows those of a service with default options.

Exit codes:
  0   go, with warnings or without
  2   bad usage
  69  no-go for now: the store cannot be reached, refuses the login, or is a read replica; or the
      directory cannot be used
  78  no-go: the store must not be used as it is, such as through a pooler in transaction mode")]
pub(crate) struct Arguments {
    /// Print a JSON object
    #[arg(long)]
    json: bool,
}

pub(crate) fn main(common: &Common, arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let (store, options) = (common.store()?, common.options()?);
    let runtime = crate::runtime()?;
    let diagnosis = runtime.block_on(leasehold::diagnose(store, &options))?;
    // What hangs in the store must not keep the process.
    runtime.shutdown_background();
    let text = if arguments.json { format!("{:#}", in_json(&diagnosis)) } else { in_lines(&diagnosis) };
    output::print(&format!("{text}\n"))?;
    Ok(ExitCode::from(match (diagnosis.is_go(), diagnosis.is_permanent()) {
        (true, _) => 0,
        (false, true) => exit::REFUSED,
        (false, false) => exit::UNREACHABLE,
    }))
}

fn in_lines(diagnosis: &Diagnosis) -> String {
    if !output::has_colours() {
        return diagnosis.to_string();
    }
    let line = |check: &Check| format!("{}{:7}\x1b[0m {check:#}\n", colour(check.verdict), check.verdict);
    let checks: String = diagnosis.checks.iter().map(line).collect();
    let verdict = if diagnosis.is_go() { Verdict::Good } else { Verdict::Bad };
    format!("{checks}{}{}\x1b[0m", colour(verdict), diagnosis.summary())
}

const fn colour(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Good => "\x1b[32m",
        Verdict::Warning => "\x1b[33m",
        Verdict::Bad => "\x1b[1;31m",
    }
}

fn in_json(diagnosis: &Diagnosis) -> Value {
    let check = |check: &Check| {
        json!({
            "at": check.at,
            "what": check.what,
            "verdict": check.verdict.to_string(),
            "reason": check.reason,
            "remedy": check.remedy,
        })
    };
    let ms = |duration: std::time::Duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
    let bounds = diagnosis.bounds.as_ref().map(|bounds| {
        json!({
            "trust_ms": ms(bounds.trust),
            "ttl_ms": ms(bounds.ttl),
            "vacancy_released_ms": ms(bounds.vacancy_released),
            "vacancy_crashed_ms": bounds.vacancy_crashed.map(ms),
            "vacancy_silent_ms": bounds.vacancy_silent.map(ms),
            "overlap_silent_ms": ms(bounds.overlap_silent),
            "overlap_killed_ms": ms(bounds.overlap_killed),
            "overlap_killed_and_cut_off_ms": ms(bounds.overlap_killed_and_cut_off),
            "shortfalls": bounds.shortfalls,
        })
    });
    json!({
        "go": diagnosis.is_go(),
        "permanent": diagnosis.is_permanent(),
        "summary": diagnosis.summary(),
        "checks": diagnosis.checks.iter().map(check).collect::<Vec<_>>(),
        "bounds": bounds,
    })
}
