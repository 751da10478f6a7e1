//! What a thousand locks cost while they are held, and a thousand names while they are waited for.

use leasehold::{Locker, Options};

use crate::arguments::Arguments;
use crate::look::Plain;
use crate::report::{Goal, Row, Spread, Unit};
use crate::support::postgres::Cluster;
use crate::{memory, now};

/// As many as a Locker has by default.
const MANY: u32 = 1_000;

/// Checks, or looks, of a round.
const LOOKS: u32 = 20;

const GOAL_KIB: f64 = 2.0;

const SESSIONS: &str = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'leasehold/%'";

pub(crate) async fn rows(server: &Cluster, arguments: Arguments) -> anyhow::Result<Vec<Row>> {
    let mut rows = Vec::from(held(server, arguments).await?);
    let (mut held, mut waiting, mut tasks) = (Spread::default(), Spread::default(), Spread::default());
    let of_each = |kib: f64| kib / f64::from(MANY);
    for _ in 0..arguments.rounds() {
        held.push(of_each(memory::held(server, MANY)?));
        let (waits, idle) = memory::waited_for(server, MANY).await?;
        waiting.push(of_each(waits));
        tasks.push(of_each(idle));
    }
    let row = |what: &str, spread: &Spread| {
        let row = Row::of(format!("memory per {what}"), Unit::KiB, spread);
        if arguments.common.is_quick { row } else { row.with_goal(Goal::AtMost(GOAL_KIB)) }
    };
    rows.push(row("held lock", &held));
    rows.push(row("waiting name", &waiting).with_limit(tasks.median()));
    Ok(rows)
}

/// How many sessions that takes, and what a look at all of them does.
async fn held(server: &Cluster, arguments: Arguments) -> anyhow::Result<[Row; 2]> {
    let locker = Locker::postgres(server.options(), Options::default())?;
    let mut guards = Vec::new();
    for n in 0..MANY {
        guards.push(locker.lock(memory::name(n)).lock().await?);
    }
    let sessions: u32 = server.admin().one(SESSIONS);
    let mut plain = Plain::connect(&server.options(), 1).await?;
    plain.hold(MANY).await?;
    let (mut ours, mut limit) = (Spread::default(), Spread::default());
    for _ in 0..arguments.rounds() {
        let since = now();
        for _ in 0..LOOKS {
            plain.look().await?;
        }
        limit.add(now().saturating_sub(since) / LOOKS);
        let since = now();
        for _ in 0..LOOKS {
            anyhow::ensure!(guards[0].check().await, "it was lost");
        }
        ours.add(now().saturating_sub(since) / LOOKS);
    }
    plain.close().await?;
    drop(guards);
    locker.close().await;
    let what = |what| format!("{MANY} locks held: {what}");
    let sessions = Row::new(what("sessions of the server"), Unit::Sessions, sessions.into());
    Ok([
        sessions.with_goal(Goal::AtMost(1.0)),
        Row::spread(what("heartbeat"), &ours, &limit).with_goal(arguments.common.allow(Goal::AtMost(10.0))),
    ])
}
