//! While the command runs and nothing happens.

use std::thread;
use std::time::Duration;

use rustix::process::Pid;

use crate::arguments::Arguments;
use crate::place::Place;
use crate::process::{HEARTBEAT, Process, Then, now};
use crate::report::{Goal, Row, Unit};
use crate::usage::{Memory, Work};

const GOAL_MIB: f64 = 15.0;
const GOAL_PERCENT: f64 = 0.1;

/// Alone on the machine: one more would share the program's pages with it.
pub(crate) fn memory(place: &Place, arguments: Arguments) -> anyhow::Result<Vec<Row>> {
    let mut leader = Process::leasehold(place, &[], Then::Stay)?;
    leader.told()?;
    let mut plain = Process::plain(Then::Stay)?;
    plain.told()?;
    thread::sleep(arguments.settling());
    let (wrapper, guard) = (Memory::of(leader.pid()?)?, Memory::of(leader.guard()?)?);
    let (sum, plain) = (wrapper + guard, Memory::of(plain.pid()?)?);
    let row = |what: &str, value: u64, limit: u64| {
        Row::new(format!("memory, {}: {what}", place.label), Unit::MiB, mib(value)).with_limit(mib(limit))
    };
    Ok(vec![
        row("wrapper", wrapper.rss, plain.rss).with_goal(Goal::Below(GOAL_MIB)),
        row("guard", guard.rss, plain.rss),
        row("sum", sum.rss, plain.rss),
        row("sum, shared pages once", sum.pss, plain.pss),
    ])
}

/// The same work without pauses in between, in which caches go cold and a virtual machine's processor is given away:
/// what a heartbeat costs, at the rate of the default options.
pub(crate) fn warm_work(place: &Place, arguments: Arguments) -> anyhow::Result<Row> {
    let interval = Duration::from_millis(20);
    let often = humantime::format_duration(interval).to_string();
    let options = ["--heartbeat-interval", &often, "--retry-interval", &often];
    let mut leader = Process::leasehold(place, &options, Then::Stay)?;
    leader.told()?;
    let pair = Pair::of(&leader)?;
    let ((wrapper, guard), since) = (pair.work()?, now());
    thread::sleep(arguments.window() / 3);
    let (after, seconds) = (pair.work()?, now().saturating_sub(since).as_secs_f64());
    let work = (after.0 - wrapper) + (after.1 - guard);
    let percent = work.cpu.as_secs_f64() / seconds * 100.0 * interval.as_secs_f64() / HEARTBEAT.as_secs_f64();
    let metric = format!("processor, {}, leader: sum, warm", place.label);
    Ok(Row::new(metric, Unit::Percent, percent).with_goal(arguments.common.allow(Goal::Below(GOAL_PERCENT))))
}

/// `leasehold run` and its guard.
struct Pair {
    wrapper: Pid,
    guard: Pid,
}

impl Pair {
    fn of(process: &Process) -> anyhow::Result<Self> {
        Ok(Self { wrapper: process.pid()?, guard: process.guard()? })
    }

    fn work(&self) -> anyhow::Result<(Work, Work)> {
        Ok((Work::of(self.wrapper)?, Work::of(self.guard)?))
    }
}

/// All of them at once: they are idle.
pub(crate) fn work(places: &[Place], arguments: Arguments) -> anyhow::Result<Vec<Row>> {
    let mut plain = Process::plain(Then::Wake)?;
    plain.told()?;
    let plain_pid = plain.pid()?;
    let (mut processes, mut looked_at) = (Vec::new(), Vec::new());
    for place in places {
        let mut leader = Process::leasehold(place, &[], Then::Stay)?;
        leader.told()?;
        let standby = Process::leasehold(place, &[], Then::Stay)?;
        place.has_standby()?;
        for (role, process) in [("leader", leader), ("standby", standby)] {
            looked_at.push((format!("{}, {role}", place.label), Pair::of(&process)?));
            // A standby goes before its leader, as it would lead otherwise.
            processes.insert(0, process);
        }
    }
    thread::sleep(arguments.settling());
    let look = || {
        let works = looked_at.iter().map(|(_, pair)| pair.work()).collect::<anyhow::Result<Vec<_>>>()?;
        anyhow::Ok((now(), Work::of(plain_pid)?, works))
    };
    let (since, plain_before, before) = look()?;
    thread::sleep(arguments.window());
    let (until, plain_after, after) = look()?;
    let seconds = until.saturating_sub(since).as_secs_f64();
    let percent = |work: Work| work.cpu.as_secs_f64() / seconds * 100.0;
    #[expect(clippy::cast_precision_loss, reason = "few")]
    let per_second = |work: Work| work.wakes as f64 / seconds;

    let plain = plain_after - plain_before;
    let mut rows = Vec::new();
    for (((what, _), before), after) in looked_at.iter().zip(before).zip(after) {
        let (wrapper, guard) = (after.0 - before.0, after.1 - before.1);
        let cpu = |who: &str, work| {
            let row = Row::new(format!("processor, {what}: {who}"), Unit::Percent, percent(work));
            row.with_limit(percent(plain))
        };
        rows.push(cpu("wrapper", wrapper).with_goal(arguments.common.allow(Goal::Below(GOAL_PERCENT))));
        rows.push(cpu("guard", guard));
        rows.push(cpu("sum", wrapper + guard));
        let wakes = Row::new(format!("wake-ups, {what}: sum"), Unit::PerSecond, per_second(wrapper + guard));
        rows.push(wakes.with_limit(per_second(plain)));
    }
    drop(processes);
    Ok(rows)
}

#[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
fn mib(kib: u64) -> f64 {
    kib as f64 / 1024.0
}
