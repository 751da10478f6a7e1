//! What really happened in a simulated run, and what must not have.

mod visits;

use std::collections::BTreeMap;
use std::fmt;
use std::future::{self, Future};
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::seq::IndexedRandom as _;
use tokio::time::Instant;

use self::visits::Visits;
pub(super) use self::visits::{Asking, LONGEST_KEPT, LONGEST_STAY, Patience, Section, Visit};
use super::NAMES;
use crate::name::Kind;
use crate::store::Mode;
use crate::{Bounds, Key, Lease, Locker, Memory, Name, Options, Reason, RunError, clock};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Host(pub(super) usize);

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "host{}", self.0)
    }
}

#[derive(Clone)]
pub(super) struct World(Arc<Mutex<State>>);

struct State {
    memory: Memory,
    bounds: Bounds,
    retry_interval: Duration,
    query_timeout: Duration,
    stop_grace: Duration,
    hosts: Vec<Faults>,
    /// When a fault last began or ended, of whomever.
    disturbed: Option<Instant>,
    down_until: Option<Instant>,
    up_since: Instant,
    bodies: Vec<Body>,
    /// How many bodies there have been.
    begun_bodies: u64,
    visits: Visits,
    /// When a body of that name was last polled.
    led: BTreeMap<&'static str, Instant>,
    /// Who holds the name on the server by which grant, and since when.
    held: BTreeMap<&'static str, (Vec<String>, u64, Instant)>,
    /// Since when a candidate could have asked.
    able: BTreeMap<(Host, &'static str), Option<Instant>>,
    eligible: BTreeMap<(Host, &'static str), bool>,
    last_term: BTreeMap<(Host, &'static str), u64>,
    /// Every lease there ever was: jobs keep them, and use them too late.
    leases: Vec<(Host, Lease)>,
    step_downs: Vec<(Host, u64)>,
    outside_requests: BTreeMap<&'static str, Instant>,
    closing: bool,
    begun: Instant,
    trace: Option<Vec<String>>,
    violation: Option<String>,
}

#[derive(Clone)]
struct Faults {
    identity: String,
    frozen_until: Option<Instant>,
    partitioned_until: Option<Instant>,
    slow_until: Option<Instant>,
    well_since: Instant,
    /// The server ended the session or took a lease away: by then the host has surely noticed, whatever else befell it.
    deprived_until: Option<Instant>,
    /// When anything last was wrong with it.
    troubled: Option<Instant>,
    thawed: Instant,
    /// It is never told of releases.
    is_deaf: bool,
    /// Its Locker is being closed.
    closed: Option<Instant>,
}

impl Faults {
    fn is_well(&self) -> bool {
        self.frozen_until.is_none() && self.partitioned_until.is_none() && self.slow_until.is_none()
    }
}

/// A body of a job, or one who is in a section, that has started and not ended.
struct Body {
    number: u64,
    host: Host,
    name: &'static str,
    mode: Mode,
    term: u64,
    started: Instant,
    /// The server took the lease from a healthy holder, or one that is cut off: then it may overlap for so long.
    may_overlap_until: Option<Instant>,
    /// When the server first took the lease.
    deprived: Option<Instant>,
}

impl Body {
    /// Of what is for one alone, or for many who read.
    fn excludes(&self, other: &Self) -> bool {
        let both_read = (self.mode, other.mode) == (Mode::Read, Mode::Read);
        self.name == other.name && self.number != other.number && !both_read
    }
}

impl State {
    fn note(&mut self, what: fmt::Arguments<'_>) {
        let at = clock::now() - self.begun;
        if let Some(trace) = &mut self.trace {
            trace.push(format!("{:>10.3} {what}", at.as_secs_f64()));
        }
    }

    fn violated(&mut self, what: &str) {
        self.note(format_args!("VIOLATION {what}"));
        let at = clock::now() - self.begun;
        self.violation.get_or_insert_with(|| format!("at {:.3} s: {what}", at.as_secs_f64()));
    }

    /// How long after the server has ended its session a holder that is cut off, or frozen, has surely given up.
    fn cut_off_limit(&self) -> Duration {
        self.bounds.trust + self.stop_grace
    }

    /// The server takes what a host holds.
    fn deprive(&mut self, host: Host, name: Option<&'static str>) {
        let now = clock::now();
        // After a kill the news travels at once, unless the host is cut off. After a revocation it comes with the next
        // heartbeat; one that was on its way, and a statement after it, may still be answered as if nothing were.
        let longest = match name {
            None => self.cut_off_limit(),
            Some(_) => self.bounds.trust + self.cut_off_limit(),
        };
        let allowance =
            if name.is_none() && self.hosts[host.0].is_well() { self.stop_grace } else { longest };
        let faults = &mut self.hosts[host.0];
        faults.deprived_until = faults.deprived_until.max(Some(now + longest));
        faults.troubled = Some(now);
        self.disturbed = Some(now);
        for body in self
            .bodies
            .iter_mut()
            .filter(|body| body.host == host && name.is_none_or(|name| name == body.name))
        {
            body.may_overlap_until = body.may_overlap_until.max(Some(now + allowance));
            body.deprived.get_or_insert(now);
        }
    }

    /// A fault begins on a host: news of an earlier kill may no longer reach it.
    fn cut_off(&mut self, host: Host) {
        let until = self.hosts[host.0].deprived_until;
        for body in
            self.bodies.iter_mut().filter(|body| body.host == host && body.may_overlap_until.is_some())
        {
            body.may_overlap_until = body.may_overlap_until.max(until);
        }
    }

    fn is_able_since(&self, host: Host, name: &'static str) -> Option<Instant> {
        let able = (*self.able.get(&(host, name))?)?;
        let eligible = *self.eligible.get(&(host, name)).unwrap_or(&true);
        self.reaches_the_server_since(host).filter(|_| eligible).map(|since| since.max(able))
    }

    fn reaches_the_server_since(&self, host: Host) -> Option<Instant> {
        let faults = &self.hosts[host.0];
        (faults.is_well() && self.down_until.is_none()).then(|| faults.well_since.max(self.up_since))
    }

    /// Somebody begins what the model judges. Gives its number.
    fn begin(&mut self, host: Host, name: &'static str, mode: Mode, term: u64) -> u64 {
        let now = clock::now();
        let number = self.begun_bodies;
        self.begun_bodies += 1;
        // It may not have heard yet that its session was ended.
        let may_overlap_until = self.hosts[host.0].deprived_until.filter(|at| *at > now);
        let (started, deprived) = (now, None);
        self.bodies.push(Body { number, host, name, mode, term, started, may_overlap_until, deprived });
        number
    }

    /// A body is about to be polled: whoever came after it must be one that it may be together with.
    fn acts(&mut self, number: u64) {
        let now = clock::now();
        let Some(body) = self.bodies.iter().find(|body| body.number == number) else { return };
        let (host, name, term) = (body.host, body.name, body.term);
        let others = self.bodies.iter().filter(|other| body.excludes(other));
        let overlaps =
            others.filter(|other| other.started >= body.started && other.number > number).find(|other| {
                // One that stands still does nothing. If it goes on, that is checked then.
                if self.hosts[other.host.0].frozen_until.is_some() {
                    return false;
                }
                let allowed = other.may_overlap_until.max(body.may_overlap_until);
                allowed.is_none_or(|until| now > until)
            });
        if let Some(other) = overlaps {
            let what = format!(
                "two at once: {name} on {host} in term {term} and on {} in term {}",
                other.host, other.term
            );
            self.violated(&what);
        }
        self.led.insert(name, now);
    }

    fn end(&mut self, number: u64) -> Option<Body> {
        let at = self.bodies.iter().position(|body| body.number == number)?;
        let body = self.bodies.remove(at);
        self.note(format_args!("{} {} term {} ends", body.host, body.name, body.term));
        self.led.insert(body.name, clock::now());
        Some(body)
    }

    /// For how long nobody has had a name, if that is longer than it may be. Whoever gets it may be struck as well before
    /// it has begun: then the bound is for the next one. But not without end.
    fn vacant_for(&mut self, name: &'static str, key: Key, limit: Duration) -> Option<Duration> {
        let now = clock::now();
        let (holders, grants) = (self.memory.holders_for(key), self.memory.grants_for(key));
        let (before, grants_before, _) = &self.held[name];
        if holders != *before || grants != *grants_before {
            self.note(format_args!("{name} is held by {holders:?}"));
            self.held.insert(name, (holders, grants, now));
        }
        let (led, held) = (now - self.led[name], now - self.held[name].2);
        (led.min(held) > limit || led > limit * 6).then_some(led)
    }
}

impl World {
    pub(super) fn new(memory: &Memory, options: &Options, hosts: usize, trace: bool) -> Self {
        let now = clock::now();
        let faults = Faults {
            identity: String::new(),
            frozen_until: None,
            partitioned_until: None,
            slow_until: None,
            well_since: now,
            deprived_until: None,
            troubled: None,
            thawed: now,
            is_deaf: false,
            closed: None,
        };
        let names = || NAMES.into_iter().chain(Section::ALL.map(|section| section.name));
        Self(Arc::new(Mutex::new(State {
            memory: memory.clone(),
            bounds: options.bounds(),
            retry_interval: options.retry_interval,
            query_timeout: options.query_timeout,
            stop_grace: options.stop_grace,
            hosts: vec![faults; hosts],
            disturbed: None,
            down_until: None,
            up_since: now,
            bodies: Vec::new(),
            begun_bodies: 0,
            visits: Visits::default(),
            led: names().map(|name| (name, now)).collect(),
            held: names().map(|name| (name, (Vec::new(), 0, now))).collect(),
            able: BTreeMap::new(),
            eligible: BTreeMap::new(),
            last_term: BTreeMap::new(),
            leases: Vec::new(),
            step_downs: Vec::new(),
            outside_requests: BTreeMap::new(),
            closing: false,
            begun: now,
            trace: trace.then(Vec::new),
            violation: None,
        })))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    pub(super) fn name_hosts(&self, lockers: &[Locker]) {
        for (faults, locker) in self.state().hosts.iter_mut().zip(lockers) {
            locker.identity().clone_into(&mut faults.identity);
        }
    }

    pub(super) fn memory(&self) -> Memory {
        self.state().memory.clone()
    }

    pub(super) fn note(&self, what: fmt::Arguments<'_>) {
        self.state().note(what);
    }

    pub(super) fn is_closing(&self) -> bool {
        self.state().closing
    }

    pub(super) fn verdict(&self) -> (Vec<String>, Result<(), String>) {
        let mut state = self.state();
        (state.trace.take().unwrap_or_default(), state.violation.take().map_or(Ok(()), Err))
    }

    // What happens to the hosts.

    fn identity(&self, host: Host) -> String {
        self.state().hosts[host.0].identity.clone()
    }

    fn fault(
        &self,
        host: Host,
        what: fmt::Arguments<'_>,
        lasting: Duration,
        until: fn(&mut Faults) -> &mut Option<Instant>,
    ) {
        let mut state = self.state();
        state.note(format_args!("{host} {what} for {lasting:?}"));
        let at = clock::now() + lasting;
        let until = until(&mut state.hosts[host.0]);
        let at = until.map_or(at, |earlier| earlier.max(at));
        *until = Some(at);
        state.disturbed = Some(clock::now());
        state.cut_off(host);
        drop(state);
        let world = self.clone();
        tokio::spawn(async move {
            clock::sleep_until(at).await;
            world.heal();
        });
    }

    pub(super) fn freeze(&self, host: Host, lasting: Duration) {
        self.fault(host, format_args!("frozen"), lasting, |faults| &mut faults.frozen_until);
        self.memory().freeze(&self.identity(host));
    }

    pub(super) fn partition(&self, host: Host, lasting: Duration) {
        self.fault(host, format_args!("partitioned"), lasting, |faults| &mut faults.partitioned_until);
        self.memory().partition(&self.identity(host));
    }

    pub(super) fn slow(&self, host: Host, before: Duration, after: Duration, lasting: Duration) {
        self.fault(host, format_args!("slow by {before:?} and {after:?}"), lasting, |faults| {
            &mut faults.slow_until
        });
        self.memory().slow(&self.identity(host), before, after);
    }

    pub(super) fn down(&self, lasting: Duration) {
        let mut state = self.state();
        state.note(format_args!("server down for {lasting:?}"));
        let at = clock::now() + lasting;
        state.down_until = state.down_until.max(Some(at));
        for host in 0..state.hosts.len() {
            state.deprive(Host(host), None);
        }
        state.memory.down();
        drop(state);
        let world = self.clone();
        tokio::spawn(async move {
            clock::sleep_until(at).await;
            world.heal();
        });
    }

    pub(super) fn kill(&self, host: Host) {
        let mut state = self.state();
        state.note(format_args!("{host} session killed"));
        state.deprive(host, None);
        let memory = state.memory.clone();
        drop(state);
        memory.kill(&self.identity(host));
    }

    pub(super) fn revoke(&self, host: Host, name: &'static str) {
        let mut state = self.state();
        state.note(format_args!("{host} {name} revoked"));
        state.deprive(host, Some(name));
        let memory = state.memory.clone();
        drop(state);
        memory.revoke(&self.identity(host), &Name::from(name));
    }

    /// Ends the faults whose time is over.
    fn heal(&self) {
        let mut state = self.state();
        let now = clock::now();
        let memory = state.memory.clone();
        for host in 0..state.hosts.len() {
            let faults = &mut state.hosts[host];
            let mut healed = false;
            if faults.frozen_until.is_some_and(|at| now >= at) {
                faults.thawed = now;
            }
            let mut ends = |until: &mut Option<Instant>, heal: &dyn Fn(&str), identity: &str| {
                if until.is_some_and(|at| now >= at) {
                    *until = None;
                    heal(identity);
                    healed = true;
                }
            };
            ends(&mut faults.frozen_until, &|id| memory.thaw(id), &faults.identity);
            ends(&mut faults.partitioned_until, &|id| memory.heal(id), &faults.identity);
            ends(
                &mut faults.slow_until,
                &|id| memory.slow(id, Duration::ZERO, Duration::ZERO),
                &faults.identity,
            );
            if healed {
                (faults.well_since, faults.troubled) = (now, Some(now));
                state.disturbed = Some(now);
                state.note(format_args!("{} healed", Host(host)));
            }
        }
        if state.down_until.is_some_and(|at| now >= at) {
            state.down_until = None;
            state.up_since = now;
            state.disturbed = Some(now);
            for faults in &mut state.hosts {
                faults.troubled = Some(now);
            }
            memory.up();
            state.note(format_args!("server up"));
        }
    }

    pub(super) fn heal_everything(&self) {
        let mut state = self.state();
        let now = Some(clock::now());
        state.note(format_args!("everything heals"));
        for faults in &mut state.hosts {
            for until in [&mut faults.frozen_until, &mut faults.partitioned_until, &mut faults.slow_until] {
                *until = until.and(now);
            }
        }
        state.down_until = state.down_until.and(now);
        drop(state);
        self.heal();
    }

    // What the candidates do, and what is done to them.

    pub(super) fn contends(&self, host: Host, name: &'static str, contends: bool) {
        self.state().able.insert((host, name), contends.then(clock::now));
    }

    pub(super) fn eligible(&self, host: Host, name: &'static str, eligible: bool) {
        let mut state = self.state();
        state.note(format_args!("{host} {name} eligible: {eligible}"));
        state.eligible.insert((host, name), eligible);
        if let Some(Some(since)) = state.able.get_mut(&(host, name)) {
            *since = clock::now();
        }
    }

    pub(super) fn asked_from_outside(&self, name: &'static str) {
        let mut state = self.state();
        state.note(format_args!("{name} asked to step down from outside"));
        state.outside_requests.insert(name, clock::now());
    }

    /// Steps down by a lease of the present or of an earlier term.
    pub(super) fn step_down_some_lease(&self, rng: &mut StdRng) {
        let mut state = self.state();
        let recent = state.leases.len().saturating_sub(6);
        let Some((host, lease)) = state.leases[recent..].choose(rng).cloned() else { return };
        state.note(format_args!("{host} {} term {} step down", lease.name(), lease.term()));
        state.step_downs.push((host, lease.term()));
        drop(state);
        lease.step_down();
    }

    pub(super) fn returned<T>(
        &self,
        host: Host,
        name: &'static str,
        result: &Result<Option<T>, RunError<&str>>,
    ) {
        let mut state = self.state();
        match result {
            Ok(value) => state.note(format_args!("{host} {name}: run returned a value: {}", value.is_some())),
            Err(RunError::Job("as planned")) => {
                state.note(format_args!("{host} {name}: run returned the job's error"));
            }
            Err(error) => state.violated(&format!("{host} {name}: run returned {error}")),
        }
    }

    pub(super) fn started(&self, host: Host, lease: &Lease) -> WatchedBody {
        let mut state = self.state();
        let name = NAMES.into_iter().find(|name| *name == lease.name().as_str()).unwrap();
        let term = lease.term();
        state.note(format_args!("{host} {name} term {term} starts"));
        if state.last_term.insert((host, name), term).is_some_and(|last| last >= term) {
            state.violated(&format!("{host} {name}: term {term} comes after a later one"));
        }
        let number = state.begin(host, name, Mode::Exclusive, term);
        state.leases.push((host, lease.clone()));
        drop(state);
        WatchedBody { world: self.clone(), number }
    }

    /// A body is about to be polled.
    fn polled(&self, number: u64, lease: &Lease) {
        let mut state = self.state();
        let now = clock::now();
        let Some(body) = state.bodies.iter().find(|body| body.number == number) else { return };
        let (host, name, term) = (body.host, body.name, body.term);
        state.acts(number);
        if lease.reason() == Some(Reason::SteppedDown) {
            let asked = state.step_downs.contains(&(host, term))
                // From outside: it may have been on its way through the longest partition.
                || state.outside_requests.get(name).is_some_and(|at| now - *at < Duration::from_secs(200));
            if !asked {
                state.violated(&format!("{host} {name} steps down in term {term}, and nobody asked it to"));
            }
        }
    }

    fn ended(&self, number: u64) {
        let mut state = self.state();
        let Some(body) = state.end(number) else { return };
        // Whoever handed over waits for an interval.
        if let Some(Some(since)) = state.able.get_mut(&(body.host, body.name)) {
            *since = clock::now();
        }
    }

    // What must hold.

    /// How long a name may be without a leader though somebody could lead all the while: after a silent death, and
    /// for one reconnection.
    pub(super) fn vacancy_limit(&self) -> Duration {
        let state = self.state();
        state.bounds.vacancy_silent.unwrap() + state.retry_interval + state.query_timeout
    }

    pub(super) fn check(&self) {
        let limit = self.vacancy_limit();
        let mut state = self.state();
        let now = clock::now();
        for name in NAMES {
            let able = (0..state.hosts.len())
                .map(Host)
                .find(|host| state.is_able_since(*host, name).is_some_and(|since| now - since > limit));
            let vacant = state.vacant_for(name, Key::of(Kind::Lease, name), limit);
            if let (Some(able), Some(led)) = (able, vacant) {
                state.violated(&format!("nobody leads {name} for {led:?}, though {able} could"));
            }
        }
        state.check_visits(limit);
    }

    pub(super) fn close(&self) {
        let mut state = self.state();
        state.closing = true;
        state.note(format_args!("everybody closes"));
    }

    pub(super) fn check_that_nothing_is_left(&self) {
        let mut state = self.state();
        let leases = NAMES.into_iter().map(|name| (name, Key::of(Kind::Lease, name)));
        for (name, key) in leases.chain(Section::ALL.map(|section| (section.name, section.key()))) {
            let (holders, waiters) = (state.memory.holders_for(key), state.memory.waiters_for(key));
            if !holders.is_empty() || waiters > 0 {
                state.violated(&format!("{name} is left to {holders:?}, {waiters} wait"));
            }
        }
        let sessions = state.memory.sessions();
        if sessions > 0 || !state.bodies.is_empty() {
            let bodies = state.bodies.len();
            state.violated(&format!("{sessions} sessions and {bodies} bodies are left"));
        }
    }
}

/// Reports the polls and the end of one body.
pub(super) struct WatchedBody {
    world: World,
    number: u64,
}

impl WatchedBody {
    pub(super) async fn watch<F: Future>(self, body: F, lease: &Lease) -> F::Output {
        let mut body = pin!(body);
        future::poll_fn(|cx| {
            self.world.polled(self.number, lease);
            body.as_mut().poll(cx)
        })
        .await
    }
}

impl Drop for WatchedBody {
    fn drop(&mut self) {
        self.world.ended(self.number);
    }
}
