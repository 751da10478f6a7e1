//! Memory: by how much a process grows with its names, critical sections as in the bench of those, and jobs that are led and
//! stood by for. In KiB.

use leasehold::{Lease, Locker, Options};
use tokio::task::JoinSet;

use crate::arguments::{Arguments, NAMES};
use crate::child::{self, Other};
use crate::crowd::{self, Member, name};
use crate::curve::{Curve, Slope};
use crate::memory::{self, resident};
use crate::report::{Goal, Row, Unit};
use crate::support::postgres::Cluster;

const GOAL_KIB: f64 = 2.0;

/// The role of a process that contends for names.
const CONTENDS: &str = "contends-for-many";

/// The part of the other process. False where that is none of these.
pub(crate) async fn play(role: &str, locker: &Locker, further: &[String]) -> anyhow::Result<bool> {
    let (CONTENDS, [count]) = (role, further) else { return Ok(false) };
    contend(locker, count.parse()?).await?;
    Ok(true)
}

/// As many tasks as names, each of which runs a job under one, or stands by. Tells by how much it has grown; and before that, by
/// how much for tasks that do nothing.
async fn contend(locker: &Locker, count: u32) -> anyhow::Result<()> {
    locker.run("first", async |_: Lease| anyhow::Ok(())).await?;
    let before = resident()?;
    let mut idle: JoinSet<()> = (0..count).map(|_| std::future::pending()).collect();
    child::tell(resident()? - before)?;
    let before = resident()?;
    let mut jobs = JoinSet::new();
    for n in 0..count {
        let candidate = locker.candidate(name(n));
        jobs.spawn(async {
            let job = async |lease: Lease| {
                lease.cancelled().await;
                anyhow::Ok(())
            };
            candidate.run(job).await
        });
    }
    tokio::task::spawn_blocking(child::go_on).await??;
    child::tell(resident()? - before)?;
    // Those that stand by would wait for ever.
    jobs.shutdown().await;
    idle.shutdown().await;
    Ok(())
}

/// For so many names, and for as many tasks that do nothing.
async fn contended_for(server: &Cluster, count: u32, stands_by: bool) -> anyhow::Result<(f64, f64)> {
    let mut leader = Member::new(server, Options::default())?;
    if stands_by {
        (0..count).for_each(|n| leader.contend(name(n)));
        crowd::are_led(server, count).await;
    }
    let mut other = Other::start(CONTENDS, &server.url("postgres", "", "postgres"), &[count.to_string()])?;
    let tasks = other.told()?;
    if stands_by {
        crowd::are_waited_for(server, count).await;
    } else {
        crowd::are_led(server, count).await;
    }
    other.go_on()?;
    let names = other.told()?;
    // Dropped first, or it would be handed what is released.
    drop(other);
    leader.close().await?;
    Ok((names, tasks))
}

pub(crate) async fn rows(arguments: Arguments) -> anyhow::Result<Vec<Row>> {
    let server = Cluster::new();
    let whats = ["locks held", "locks waited for", "names led", "names stood by for"];
    let mut curves = whats.map(|_| Curve::at(&NAMES));
    for _ in 0..arguments.processes() {
        for (at, &size) in NAMES.iter().enumerate() {
            let [held, waited_for, led, stood_by_for] = &mut curves;
            held.points[at].ours.push(memory::held(&server, size)?);
            let add = |curve: &mut Curve, (ours, limit)| {
                curve.points[at].ours.push(ours);
                curve.points[at].limit.push(limit);
            };
            add(waited_for, memory::waited_for(&server, size).await?);
            add(led, contended_for(&server, size, false).await?);
            add(stood_by_for, contended_for(&server, size, true).await?);
        }
    }
    let slope = Slope { unit: "KiB per name", times: 1.0 };
    let mut rows = Vec::new();
    for (what, curve) in whats.into_iter().zip(curves) {
        let mut curve = curve.rows(&format!("memory, by {what}"), Unit::KiB, slope);
        if !arguments.common.is_quick {
            // The last one is the slope.
            let slope = curve.pop().map(|row| row.with_goal(Goal::AtMost(GOAL_KIB)));
            curve.extend(slope);
        }
        rows.extend(curve);
    }
    Ok(rows)
}
