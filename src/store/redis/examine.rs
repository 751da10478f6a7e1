//! What `diagnose` looks at: what a session is opened with, one by one, and what is not worth failing for.

use std::time::Duration;

use redis::cmd;

use super::checks::{self, Found};
use super::link::Link;
use super::scripts::Scripts;
use super::{ENFORCEMENT, keys, refusal, session};
use crate::clock;
use crate::diagnosis::{Check, Diagnosis};
use crate::error::ConnectError;
use crate::options::Options;
use crate::redis::Target;

const REACHABLE: &str = "reachable";
const LOGIN: &str = "login";
const TLS: &str = "tls";
const VERSION: &str = "version";
const PRIMARY: &str = "primary";
const EVICTION: &str = "eviction";
const SCRIPTS: &str = "scripts";
const WAKE_UPS: &str = "wake-ups";
const REPLICATION: &str = "replication";
const PERSISTENCE: &str = "persistence";
const LATENCY: &str = "latency";
const TTL: &str = "ttl";

/// How many round trips the latency is the median of.
const ROUND_TRIPS: usize = 5;

/// Looks at a server, or at a cluster.
pub(crate) async fn examine(target: &Target, options: &Options) -> Diagnosis {
    let limit = options.query_timeout;
    let mut diagnosis = Diagnosis::default();
    let looking = look(target, options, &mut diagnosis);
    let looked = tokio::time::timeout(limit, looking).await.unwrap_or(Err(ConnectError::Timeout { limit }));
    if let Err(error) = looked {
        if diagnosis.is_go() {
            let what = match &error {
                ConnectError::Authentication { .. } | ConnectError::UnknownDatabase { .. } => LOGIN,
                ConnectError::Tls { .. } => TLS,
                _ => REACHABLE,
            };
            diagnosis.checks.push(Check::bad(what, &error, Some("see whether the server answers")));
        }
        diagnosis.error = Some(error);
    }
    diagnosis
}

async fn look(target: &Target, options: &Options, diagnosis: &mut Diagnosis) -> Result<(), ConnectError> {
    let mut link = Link::open(&target.place, options.query_timeout).await?;
    diagnosis.checks.push(Check::good(REACHABLE, format!("it answers at {}", target.place)));
    let found = checks::look(&mut link).await?;
    diagnosis.checks.push(Check::good(LOGIN, "it lets this user in".to_owned()));
    let judged = found.judge(link.is_cluster());
    diagnosis.checks.extend(of_server(&found, &judged));
    judged?;

    session::load(&mut link, &Scripts::new()).await?;
    diagnosis.checks.push(Check::good(SCRIPTS, "it takes them".to_owned()));
    let is_pushed = link.subscribe(&[keys::channel(target.place.database())]).await.is_ok();
    diagnosis.checks.push(if is_pushed {
        Check::good(WAKE_UPS, "releases are pushed".to_owned())
    } else {
        let reason = "the user may not subscribe: standbys notice a release at their next poll".to_owned();
        Check::warning(WAKE_UPS, reason, "grant the user the channels leasehold:*")
    });
    if let Some(replicas) = found.replicas.filter(|replicas| *replicas < target.replicas) {
        let error = ConnectError::TooFewReplicas { replicas, wanted: target.replicas };
        diagnosis.checks.push(Check::bad(REPLICATION, &error, None));
        return Err(error);
    }
    diagnosis.checks.push(of_replication(&found, target.replicas));
    diagnosis.checks.push(of_persistence(&found));
    diagnosis.checks.push(latency(&mut link, options).await?);
    let bounds = options.bounds();
    let ttl = humantime::format_duration(bounds.ttl);
    diagnosis.checks.push(Check::good(TTL, format!("the server frees a silent holder's lease after {ttl}")));
    diagnosis.bounds = Some(ENFORCEMENT.bounds(options, found.shortfalls()));
    Ok(())
}

/// What the server says of itself, of which only the first that is bad is told as such.
fn of_server(found: &Found, judged: &Result<(), ConnectError>) -> Vec<Check> {
    let Some(version) = &found.version else {
        let reason = found.denied.clone().unwrap_or_else(|| "it does not tell of itself".to_owned());
        let hint = "see that it is 7.0 or newer, a primary, and that its maxmemory-policy is noeviction";
        return vec![Check::warning(VERSION, reason, hint)];
    };
    let mut checks = Vec::new();
    let bad = |what, error: &ConnectError| Check::bad(what, error, None);
    match judged {
        Err(error @ ConnectError::TooOld { .. }) => checks.push(bad(VERSION, error)),
        _ => checks.push(Check::good(VERSION, version.clone())),
    }
    match judged {
        Err(
            error @ (ConnectError::Replica | ConnectError::Cluster { .. } | ConnectError::Unreachable { .. }),
        ) => {
            checks.push(bad(PRIMARY, error));
        }
        _ => checks.push(Check::good(PRIMARY, "it takes writes".to_owned())),
    }
    match judged {
        Err(error @ ConnectError::Evicts { .. }) => checks.push(bad(EVICTION, error)),
        _ => checks.push(Check::good(EVICTION, "it keeps its keys when memory is full".to_owned())),
    }
    checks
}

/// Where there are as many as are wanted.
fn of_replication(found: &Found, wanted: u32) -> Check {
    match found.replicas {
        Some(0) | None => Check::good(REPLICATION, "no replica is attached".to_owned()),
        Some(replicas) if wanted == 0 => {
            let reason = format!(
                "{replicas} attached, which get what is written a moment later: a failover can lose leases that were granted"
            );
            Check::warning(REPLICATION, reason, "fence writes by a token, or set wait_for_replicas")
        }
        Some(replicas) => {
            Check::good(REPLICATION, format!("{wanted} of {replicas} replicas acknowledge every grant"))
        }
    }
}

fn of_persistence(found: &Found) -> Check {
    match found.is_persistent {
        Some(false) => {
            let reason = "without an append-only file: a restart loses all leases, also those that are held"
                .to_owned();
            Check::warning(PERSISTENCE, reason, "set appendonly yes, or fence writes by a token")
        }
        Some(true) => Check::good(PERSISTENCE, "it has an append-only file".to_owned()),
        None => Check::good(PERSISTENCE, "not told".to_owned()),
    }
}

async fn latency(link: &mut Link, options: &Options) -> Result<Check, ConnectError> {
    let mut times = Vec::with_capacity(ROUND_TRIPS);
    for _ in 0..ROUND_TRIPS {
        let sent = clock::now();
        link.ask(cmd("PING")).await.map_err(|error| refusal::of_connect(&error))?;
        times.push(clock::now() - sent);
    }
    times.sort_unstable();
    let median = times[ROUND_TRIPS / 2];
    let shown =
        humantime::format_duration(Duration::from_micros(median.as_micros().try_into().unwrap_or(u64::MAX)));
    let reason = format!("a round trip takes {shown}");
    Ok(if median > options.query_timeout / 10 {
        Check::warning(LATENCY, reason, "raise query_timeout, or use a server that is nearer")
    } else {
        Check::good(LATENCY, reason)
    })
}
