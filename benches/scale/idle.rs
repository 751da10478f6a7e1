//! What Lockers cost while nothing happens, at default options: statements, and the server's processor time.
//!
//! A server for each size, all of them at once, since they are idle.

use std::collections::HashMap;
use std::fs;
use std::time::Duration;

use leasehold::Options;
use rustix::process::Pid;
use tokio::task::JoinSet;

use crate::arguments::{Arguments, NAMES};
use crate::crowd::{self, Member, name};
use crate::curve::{Curve, Slope};
use crate::logged::{self, COUNTED};
use crate::now;
use crate::report::{Goal, Row, Unit};
use crate::support::postgres::{Cluster, Login};
use crate::usage::Work;

/// The default of `heartbeat_interval` and of `retry_interval`.
const INTERVAL: Duration = Duration::from_secs(5);

/// How long they are left alone first: past the first heartbeat and the first poll.
const SETTLING: Duration = Duration::from_secs(7);

/// Each Locker makes two connections at its start, and a third one for a moment: not all at once, on a machine of few cores.
const AT_ONCE: usize = 8;

/// Sessions of two hundred Lockers, while some of them compare theirs with a second one.
const MAX_CONNECTIONS: &str = "max_connections=300";

const STATEMENTS: Unit = Unit::Other("statements per s");
const PROCESSOR: Unit = Unit::Other("ms per s");

/// A server and who is on it.
struct Site {
    server: Cluster,
    members: Vec<Member>,
}

/// What a site has told within the window.
struct Told {
    /// Of each Locker, a second, in their order.
    statements: Vec<f64>,
    /// Of all processes of the server, in milliseconds a second.
    processor: f64,
}

pub(crate) async fn rows(arguments: Arguments) -> anyhow::Result<Vec<Row>> {
    let sites = sites(arguments).await?;
    tokio::time::sleep(SETTLING).await;
    let before = sites.iter().map(|site| Ok((site.server.log().len(), processor(&site.server)?)));
    let before = before.collect::<anyhow::Result<Vec<_>>>()?;
    let since = now();
    tokio::time::sleep(arguments.window()).await;
    let after = sites.iter().map(|site| processor(&site.server)).collect::<anyhow::Result<Vec<_>>>()?;
    let seconds = now().saturating_sub(since).as_secs_f64();
    let mut told = Vec::new();
    for ((site, (from, before)), after) in sites.iter().zip(before).zip(after) {
        let used =
            after.iter().map(|(pid, work)| work.saturating_sub(before.get(pid).copied().unwrap_or_default()));
        let lines = logged::since(site.server.log(), from);
        let statements = site.members.iter().map(|member| {
            let application = member.application();
            let count = lines.iter().filter(|line| line.application == application).count();
            #[expect(clippy::cast_precision_loss, reason = "few")]
            let count = count as f64;
            count / seconds
        });
        let statements = statements.collect();
        told.push(Told { statements, processor: used.sum::<Duration>().as_secs_f64() * 1e3 / seconds });
    }
    leave(sites).await?;
    Ok(judged(arguments, &told))
}

/// Nobody; then one for each number of names; then one for each number of Lockers.
async fn sites(arguments: Arguments) -> anyhow::Result<Vec<Site>> {
    let server = || Cluster::with(Login::Trust, &[COUNTED, MAX_CONNECTIONS]);
    let mut filling = JoinSet::new();
    let nobody = Site { server: server(), members: Vec::new() };
    for (at, &names) in NAMES.iter().enumerate() {
        let server = server();
        filling.spawn(async move { anyhow::Ok((at, two(server, names).await?)) });
    }
    for (at, &lockers) in arguments.lockers().iter().enumerate() {
        let server = server();
        filling.spawn(async move { anyhow::Ok((NAMES.len() + at, many(server, lockers).await?)) });
    }
    let filled = filling.join_all().await;
    let mut filled = filled.into_iter().collect::<anyhow::Result<Vec<_>>>()?;
    filled.sort_by_key(|(at, _)| *at);
    Ok([nobody].into_iter().chain(filled.into_iter().map(|(_, site)| site)).collect())
}

/// One Locker leads so many names, and another one stands by for them.
async fn two(server: Cluster, names: u32) -> anyhow::Result<Site> {
    let mut members = Vec::new();
    for identity in ["leads", "stands-by"] {
        let mut member = Member::new(&server, Options::default().identity(identity))?;
        (0..names).for_each(|n| member.contend(name(n)));
        members.push(member);
        crowd::are_led(&server, names).await;
    }
    crowd::are_waited_for(&server, names).await;
    Ok(Site { server, members })
}

/// So many Lockers, each of which leads a name, and stands by for that of the next one.
async fn many(server: Cluster, lockers: u32) -> anyhow::Result<Site> {
    let mut members = Vec::new();
    for n in 0..lockers {
        let mut member = Member::new(&server, Options::default().identity(format!("member-{n}")))?;
        member.contend(name(n));
        members.push(member);
        if members.len().is_multiple_of(AT_ONCE) {
            crowd::are_led(&server, n + 1).await;
        }
    }
    crowd::are_led(&server, lockers).await;
    for (n, member) in (1..).zip(&mut members) {
        member.contend(name(n % lockers));
    }
    crowd::are_waited_for(&server, lockers).await;
    Ok(Site { server, members })
}

async fn leave(sites: Vec<Site>) -> anyhow::Result<()> {
    for site in sites {
        // Whoever stands by goes first, or would be handed what is released.
        let mut leaving: JoinSet<_> = site.members.into_iter().rev().map(Member::close).collect();
        while let Some(left) = leaving.join_next().await {
            left??;
        }
        drop(site.server);
    }
    Ok(())
}

/// What each process of a server has used so far.
fn processor(server: &Cluster) -> anyhow::Result<HashMap<i32, Duration>> {
    let mut used = HashMap::new();
    let postmaster = server.pid();
    for entry in fs::read_dir("/proc")? {
        let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        // One that ends meanwhile does not count.
        let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else { continue };
        // Behind the program's name, which may contain anything: the state, and the parent.
        let parent = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(1)?.parse().ok());
        if pid == postmaster || parent == Some(postmaster) {
            let Some(pid) = Pid::from_raw(pid) else { continue };
            if let Ok(work) = Work::of(pid) {
                used.insert(pid.as_raw_pid(), work.cpu);
            }
        }
    }
    Ok(used)
}

fn judged(arguments: Arguments, told: &[Told]) -> Vec<Row> {
    let [nobody, sites @ ..] = told else { return Vec::new() };
    let (of_names, of_lockers) = sites.split_at(NAMES.len());
    let mut rows = Vec::new();
    let per_names = Slope { unit: "statements per s per 1,000 names", times: 1e3 };
    for (at, what, interval) in [(0, "led", "heartbeat"), (1, "stood by for", "retry")] {
        let mut curve = Curve::at(&NAMES);
        curve.points.iter_mut().zip(of_names).for_each(|(point, told)| point.ours.push(told.statements[at]));
        let what = format!("statements of an idle Locker, by names {what}");
        rows.extend(curve.rows(&what, STATEMENTS, per_names));
        let (first, last) = (curve.first().ours.median(), curve.last().ours.median());
        let goal = ((first + 1.0 / INTERVAL.as_secs_f64()) * 1e4).round() / 1e4;
        let metric = format!("{what}: 1,000, at most as 1 and one more per {interval} interval");
        rows.push(Row::new(metric, STATEMENTS, last).with_goal(Goal::AtMost(goal)));
    }
    let mut curve = Curve::at(arguments.lockers());
    for (point, told) in curve.points.iter_mut().zip(of_lockers) {
        told.statements.iter().for_each(|&rate| point.ours.push(rate));
    }
    let per_locker = Slope { unit: "statements per s per Locker", times: 1.0 };
    rows.extend(curve.rows("statements of an idle Locker, by Lockers on a server", STATEMENTS, per_locker));
    let busiest = sites.iter().flat_map(|told| &told.statements).copied().fold(0.0, f64::max);
    let metric = "statements of an idle Locker: the busiest one of all".to_owned();
    rows.push(Row::new(metric, STATEMENTS, busiest).with_goal(Goal::AtMost(1.0)));

    let what = "processor time of an idle server";
    rows.push(Row::new(format!("{what}: nobody on it"), PROCESSOR, nobody.processor));
    let mut curve = Curve::at(&NAMES);
    curve.points.iter_mut().zip(of_names).for_each(|(point, told)| point.ours.push(told.processor));
    let slope = Slope { unit: "ms per s per 1,000 names", times: 1e3 };
    rows.extend(curve.rows(&format!("{what}, by names led and stood by for"), PROCESSOR, slope));
    let mut curve = Curve::at(arguments.lockers());
    curve.points.iter_mut().zip(of_lockers).for_each(|(point, told)| point.ours.push(told.processor));
    let slope = Slope { unit: "ms per s per Locker", times: 1.0 };
    rows.extend(curve.rows(&format!("{what}, by Lockers on it"), PROCESSOR, slope));
    rows
}
