//! From TERM for the one that leads to the first instruction of the other one's command.

use std::thread;
use std::time::Duration;

use crate::place::Place;
use crate::process::{Process, Then, now};
use crate::report::{Row, Spread};

/// Before each, as both are idle before a hand-over.
const PAUSE: Duration = Duration::from_millis(200);

pub(crate) fn row(place: &Place, rounds: usize) -> anyhow::Result<Row> {
    let (mut ours, mut limit) = (Spread::default(), Spread::default());
    let mut leader = Process::leasehold(place, &[], Then::Stay)?;
    leader.told()?;
    for _ in 0..rounds {
        let mut standby = Process::leasehold(place, &[], Then::Stay)?;
        place.has_standby()?;
        thread::sleep(PAUSE);
        let since = now();
        leader.stop()?;
        ours.add(standby.told()?.started.saturating_sub(since));
        leader.ended()?;
        leader = standby;
        limit.add(replaced()?);
    }
    leader.stop()?;
    leader.ended()?;
    Ok(Row::spread(format!("hand-over, {}", place.label), &ours, &limit))
}

/// The command alone: one is stopped, and then another one started, by somebody who knows when.
fn replaced() -> anyhow::Result<Duration> {
    let mut old = Process::plain(Then::Stay)?;
    old.told()?;
    thread::sleep(PAUSE);
    let since = now();
    old.stop()?;
    old.ended()?;
    Ok(Process::plain(Then::Stay)?.told()?.started.saturating_sub(since))
}
