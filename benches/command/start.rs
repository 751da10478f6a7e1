//! From the start of `leasehold run` to the first instruction of its command, and from the end of the command to its own.

use std::thread;
use std::time::Duration;

use sqlx::postgres::PgConnectOptions;
use sqlx::{Connection as _, PgConnection};

use crate::arguments::Arguments;
use crate::place::{Place, runtime};
use crate::process::{Process, Then, now};
use crate::report::{Goal, Row, Spread};

/// The median, on the file store.
const GOAL_MS: f64 = 50.0;

/// Before each, so that what ended before is gone, and as on a machine that does something else: who has just run, runs
/// sooner.
const PAUSE: Duration = Duration::from_millis(100);

/// How many rounds with the takeover delay of 1 s, which is most of what they take.
const WITH_DELAY: usize = 3;

pub(crate) fn rows(place: &Place, arguments: Arguments) -> anyhow::Result<Vec<Row>> {
    if place.sql().is_none() {
        let [start, end] = figures(place, place.label, &[], arguments.starts())?;
        return Ok(vec![start.with_goal(arguments.common.allow(Goal::Below(GOAL_MS))), end]);
    }
    // On a server it depends on the way there, so there is no goal. And nobody there knows how the last leader ended:
    // a start waits as a takeover does.
    let label = format!("{}, no takeover delay", place.label);
    let [start, end] = figures(place, &label, &["--takeover-delay", "0s"], arguments.starts())?;
    let [by_default, _] = figures(place, place.label, &[], WITH_DELAY)?;
    Ok(vec![by_default, start, end])
}

fn figures(place: &Place, label: &str, options: &[&str], rounds: usize) -> anyhow::Result<[Row; 2]> {
    let mut ours = Figures::default();
    let mut limit = Figures::default();
    // In turn, since machines are noisy.
    for _ in 0..rounds {
        thread::sleep(PAUSE);
        let since = now();
        ours.add(Process::leasehold(place, options, Then::End)?, since)?;
        thread::sleep(PAUSE);
        let since = now();
        if let Some(target) = place.sql() {
            lock(&target)?;
        }
        limit.add(Process::plain(Then::End)?, since)?;
    }
    let row = |what: &str, ours, limit| Row::spread(format!("{what}, {label}"), ours, limit);
    Ok([row("start-up", &ours.starts, &limit.starts), row("end", &ours.ends, &limit.ends)])
}

#[derive(Default)]
struct Figures {
    starts: Spread,
    ends: Spread,
}

impl Figures {
    fn add(&mut self, mut process: Process, since: Duration) -> anyhow::Result<()> {
        let told = process.told()?;
        self.starts.add(told.started.saturating_sub(since));
        self.ends.add(process.ended()?.saturating_sub(told.ended));
        Ok(())
    }
}

/// The least that there is to do on a server.
fn lock(target: &PgConnectOptions) -> anyhow::Result<()> {
    runtime()?.block_on(async {
        let mut connection = PgConnection::connect_with(target).await?;
        sqlx::query("SELECT pg_try_advisory_lock(1)").execute(&mut connection).await?;
        // The end of a session does not belong to the start of a command.
        drop(connection);
        Ok(())
    })
}
