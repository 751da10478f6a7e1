//! What the kernel says that a process uses.

use std::fs;
use std::ops::{Add, Sub};
use std::time::Duration;

use anyhow::Context as _;
use nix::time::{clock_getcpuclockid, clock_gettime};
use rustix::process::Pid;

/// Memory in KiB, by `/proc/PID/smaps_rollup`.
#[derive(Clone, Copy)]
pub(crate) struct Memory {
    /// What is resident, pages that others map too counted in full.
    pub(crate) rss: u64,
    /// The same, pages that others map too counted in part.
    pub(crate) pss: u64,
}

impl Memory {
    pub(crate) fn of(pid: Pid) -> anyhow::Result<Self> {
        let text = fs::read_to_string(format!("/proc/{}/smaps_rollup", pid.as_raw_pid()))?;
        Ok(Self { rss: field(&text, "Rss:")?, pss: field(&text, "Pss:")? })
    }
}

impl Add for Memory {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { rss: self.rss + other.rss, pss: self.pss + other.pss }
    }
}

/// What a process has used so far.
#[derive(Clone, Copy)]
pub(crate) struct Work {
    /// Of the processor, by the process's own clock: in nanoseconds, with threads that have ended.
    pub(crate) cpu: Duration,
    /// How often one of its threads has gone to sleep, which is how often it was woken.
    pub(crate) wakes: u64,
}

impl Work {
    pub(crate) fn of(pid: Pid) -> anyhow::Result<Self> {
        let clock = clock_getcpuclockid(nix::unistd::Pid::from_raw(pid.as_raw_pid()))?;
        let mut wakes = 0;
        for thread in fs::read_dir(format!("/proc/{}/task", pid.as_raw_pid()))? {
            // One that ends meanwhile does not count.
            let Ok(text) = fs::read_to_string(thread?.path().join("status")) else { continue };
            wakes += field(&text, "voluntary_ctxt_switches:")?;
        }
        Ok(Self { cpu: clock_gettime(clock)?.into(), wakes })
    }
}

impl Sub for Work {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
        // A thread that has ended takes its count with it.
        Self { cpu: self.cpu.saturating_sub(earlier.cpu), wakes: self.wakes.saturating_sub(earlier.wakes) }
    }
}

impl Add for Work {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { cpu: self.cpu + other.cpu, wakes: self.wakes + other.wakes }
    }
}

fn field(text: &str, name: &str) -> anyhow::Result<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let number = line.and_then(|rest| rest.split_whitespace().next());
    number
        .with_context(|| format!("there is no {name}"))?
        .parse()
        .with_context(|| format!("{name} of no number"))
}
