//! The driver on the memory store under a paused clock, with random schedules of everything that can go wrong.
//!
//! A seed is one whole run: some hosts with a Locker each, names or critical sections they contend for, and faults. Bodies
//! report every poll of theirs to a [`World`], which knows what was done to whom and checks after every report; it
//! believes nothing that the product says of itself.
//!
//! `LEASEHOLD_SEED=n` replays one seed and prints what happened; `LEASEHOLD_SOAK=10m` goes on through fresh seeds.

mod sections;
mod slots;
mod world;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rand::RngExt as _;
use rand::SeedableRng as _;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom as _;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::sabotage::Sabotage;
use crate::{Lease, Locker, Memory, Options, clock};
use sections::Visitor;
use world::{Host, Section, World};

const SEEDS: u64 = 2_000;
/// Of those with critical sections: they have more to do.
const SECTION_SEEDS: u64 = 300;
const NAMES: [&str; 2] = ["sweeper", "warmer"];

const fn ms(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds)
}

fn between(rng: &mut StdRng, from: u64, to: u64) -> Duration {
    ms(rng.random_range(from..=to))
}

/// What a job does.
#[derive(Clone, Copy, Debug)]
enum Behaviour {
    /// Goes on until told to stop, and then that long.
    Stops(Duration),
    /// Goes on, told or not, for as long as there is anything to simulate.
    Ignores,
    Returns(Duration),
    Fails(Duration),
}

impl Behaviour {
    fn any(rng: &mut StdRng) -> Self {
        match rng.random_range(0..10) {
            0..4 => Self::Stops(Duration::ZERO),
            4..6 => Self::Stops(between(rng, 1, 12_000)),
            6..8 => Self::Ignores,
            8 => Self::Returns(between(rng, 1, 60_000)),
            _ => Self::Fails(between(rng, 1, 60_000)),
        }
    }
}

async fn body(
    world: World,
    host: Host,
    lease: Lease,
    behaviour: Behaviour,
    tick: Duration,
) -> Result<(), &'static str> {
    let body = world.started(host, &lease);
    let started = clock::now();
    let work = async {
        loop {
            tokio::select! {
                biased;
                () = lease.cancelled() => break,
                () = tokio::time::sleep(tick) => {}
            }
            match behaviour {
                Behaviour::Returns(after) if clock::now() >= started + after => return Ok(()),
                Behaviour::Fails(after) if clock::now() >= started + after => return Err("as planned"),
                _ => {}
            }
        }
        let told = clock::now();
        let wind_down = match behaviour {
            Behaviour::Stops(wind_down) => wind_down,
            Behaviour::Ignores => Duration::MAX,
            Behaviour::Returns(_) | Behaviour::Fails(_) => Duration::ZERO,
        };
        // In the end it gives in: without a drain timeout, closing waits for it for ever.
        while clock::now() - told < wind_down && !world.is_closing() {
            tokio::time::sleep(tick).await;
        }
        Ok(())
    };
    body.watch(work, &lease).await
}

/// One candidate of one host: runs the job, and when that has ended for whatever reason, again after a while.
struct Replica {
    shutdown: watch::Sender<CancellationToken>,
    dropped: watch::Sender<u64>,
    eligible: watch::Sender<bool>,
    name: &'static str,
}

impl Replica {
    fn start(world: &World, host: Host, locker: &Locker, name: &'static str, mut rng: StdRng) -> Self {
        let shutdown = watch::Sender::new(CancellationToken::new());
        let (dropped, eligible) = (watch::Sender::new(0), watch::Sender::new(true));
        let replica = Self { shutdown, dropped, eligible, name };
        let (shutdown, mut dropped) = (replica.shutdown.subscribe(), replica.dropped.subscribe());
        let eligible = replica.eligible.subscribe();
        let (world, locker) = (world.clone(), locker.clone());
        let identity = locker.identity().to_owned();
        let memory = world.memory();
        let lives = async move {
            loop {
                let until = shutdown.borrow().clone();
                let mut behaviours = StdRng::from_rng(&mut rng);
                let job_world = world.clone();
                let candidate = locker.candidate(name).until(until).eligible(eligible.clone());
                world.contends(host, name, true);
                let run = candidate.run(|lease: Lease| {
                    let behaviour = Behaviour::any(&mut behaviours);
                    let tick = between(&mut behaviours, 5, 1_000);
                    body(job_world.clone(), host, lease, behaviour, tick)
                });
                dropped.mark_unchanged();
                tokio::select! {
                    biased;
                    result = run => world.returned(host, name, &result),
                    _ = dropped.changed() => world.note(format_args!("{host} {name}: run dropped")),
                }
                world.contends(host, name, false);
                if world.is_closing() {
                    return;
                }
                tokio::time::sleep(between(&mut rng, 0, 20_000)).await;
            }
        };
        tokio::spawn(memory.on(&identity, lives));
        replica
    }
}

/// Runs one seed to its end. Gives what happened, if asked for a trace, and the first thing that should not have.
fn simulate(seed: u64, sabotage: Option<Sabotage>, trace: bool) -> (Vec<String>, Result<(), String>) {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    runtime.block_on(async {
        let mut rng = StdRng::seed_from_u64(seed);
        let memory = if rng.random_bool(0.25) { Memory::expiring() } else { Memory::new() };
        let options = Options {
            sabotage,
            takeover_delay: if rng.random_bool(0.2) { between(&mut rng, 1, 8_000) } else { Duration::ZERO },
            drain_timeout: rng.random_bool(0.5).then(|| between(&mut rng, 1, 20_000)),
            ..Options::default()
        };
        let hosts = rng.random_range(2..=4);
        // With one name alone nothing else keeps its polls going.
        let names = &NAMES[..rng.random_range(1..=NAMES.len())];
        let world = World::new(&memory, &options, hosts, trace);
        let mut lockers = Vec::new();
        let mut replicas = Vec::new();
        for host in 0..hosts {
            let host = Host(host);
            let locker = Locker::memory(&memory, options.clone().identity(format!("{host}-{seed}"))).unwrap();
            for name in names {
                let replica = Replica::start(&world, host, &locker, name, StdRng::from_rng(&mut rng));
                replicas.push((host, replica));
            }
            lockers.push(locker);
        }
        world.name_hosts(&lockers);
        let end = clock::now() + between(&mut rng, 60_000, 300_000);
        while clock::now() < end {
            fault(&mut rng, &world, &lockers, &replicas);
            for _ in 0..rng.random_range(1..=6) {
                tokio::time::sleep(between(&mut rng, 0, 1_500)).await;
                world.check();
            }
        }
        world.heal_everything();
        // Everybody is well again: whoever cannot lead within the bound now is stuck.
        let settled = clock::now() + world.vacancy_limit();
        while clock::now() < settled {
            tokio::time::sleep(ms(500)).await;
            world.check();
        }
        world.close();
        for locker in &lockers {
            locker.close().await;
        }
        drop(replicas);
        world.check_that_nothing_is_left();
        world.verdict()
    })
}

/// Does something to a host that it may suffer whatever runs on it.
fn strike(rng: &mut StdRng, world: &World, host: Host, kind: u32, lasting: Duration) {
    match kind {
        0..2 => world.freeze(host, lasting),
        2..4 => world.partition(host, lasting),
        4..6 => {
            let (before, after) = (between(rng, 0, 12_000), between(rng, 0, 12_000));
            let few = rng.random_range(1..=10);
            world.slow(host, before / few, after / few, lasting);
        }
        _ => world.kill(host),
    }
}

/// Does something to somebody.
fn fault(rng: &mut StdRng, world: &World, lockers: &[Locker], replicas: &[(Host, Replica)]) {
    let Some(&(host, ref replica)) = replicas.choose(rng) else { return };
    let lasting = if rng.random_bool(0.5) { between(rng, 1, 6_000) } else { between(rng, 1, 60_000) };
    match rng.random_range(0..14) {
        kind @ 0..=6 => strike(rng, world, host, kind, lasting),
        7 => world.revoke(host, replica.name),
        8 => world.down(between(rng, 1, 8_000)),
        9 => world.step_down_some_lease(rng),
        10 => {
            world.asked_from_outside(replica.name);
            let (locker, name) = (lockers[host.0].clone(), replica.name);
            let memory = world.memory();
            let identity = locker.identity().to_owned();
            // Whoever asks also looks: everybody answers, whatever state they are in.
            let observer = locker.observer();
            tokio::spawn(memory.on(&identity, async move { observer.snapshot().await.ok() }));
            tokio::spawn(memory.on(&identity, async move { locker.step_down(name).await.ok() }));
        }
        11 => {
            world.note(format_args!("{host} {} shut down", replica.name));
            let mut earlier = None;
            replica.shutdown.send_modify(|token| earlier = Some(std::mem::take(token)));
            earlier.unwrap().cancel();
        }
        12 => replica.dropped.send_modify(|count| *count += 1),
        _ => {
            let eligible = rng.random_bool(0.7);
            world.eligible(host, replica.name, eligible);
            replica.eligible.send_replace(eligible);
        }
    }
}

/// What a seed is simulated as.
type Simulate = fn(u64, Option<Sabotage>, bool) -> (Vec<String>, Result<(), String>);

/// Does something to a host with critical sections. True if its Locker is to be closed.
fn fault_of_sections(rng: &mut StdRng, world: &World, host: Host, contended: &[Section]) -> bool {
    let most = if rng.random_bool(0.5) { 6_000 } else { 60_000 };
    let lasting = between(rng, 1, most);
    match rng.random_range(0..20) {
        kind @ 0..=6 => strike(rng, world, host, kind, lasting),
        7 | 8 => world.revoke_section(host, *contended.choose(rng).unwrap()),
        9 => world.down(between(rng, 1, 8_000)),
        10 => return true,
        _ => {}
    }
    false
}

/// Everybody who waits gets in, and then nothing is left of them, though the sessions live.
async fn empty(world: &World, ttl: Duration) {
    world.heal_everything();
    world.drain();
    let settled = clock::now() + world.longest_visit();
    while world.somebody_asks() && clock::now() < settled {
        tokio::time::sleep(ms(500)).await;
        world.check();
    }
    if world.somebody_asks() {
        world.hangs("somebody who waits");
    }
    // What was lost with its session expires.
    tokio::time::sleep(ttl * 2).await;
    world.check_that_nobody_is_in();
}

/// As [`simulate`], for critical sections: visitors on every host, and often candidates beside them on the same sessions.
fn simulate_sections(
    seed: u64,
    sabotage: Option<Sabotage>,
    trace: bool,
) -> (Vec<String>, Result<(), String>) {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    runtime.block_on(async {
        let mut rng = StdRng::seed_from_u64(seed);
        let memory = if rng.random_bool(0.3) { Memory::expiring() } else { Memory::stacking() };
        let options = Options {
            sabotage,
            drain_timeout: rng.random_bool(0.5).then(|| between(&mut rng, 1, 20_000)),
            ..Options::default()
        };
        let hosts = rng.random_range(2..=3);
        let world = World::new(&memory, &options, hosts, trace);
        let sections = rng.random_range(1..=2);
        let contended: Vec<_> = Section::ALL.sample(&mut rng, sections).copied().collect();
        let leads = rng.random_bool(0.3);
        let (mut lockers, mut replicas, mut visitors) = (Vec::new(), Vec::new(), Vec::new());
        for host in (0..hosts).map(Host) {
            let locker = Locker::memory(&memory, options.clone().identity(format!("{host}-{seed}"))).unwrap();
            if leads {
                replicas.push(Replica::start(&world, host, &locker, NAMES[0], StdRng::from_rng(&mut rng)));
            }
            lockers.push(locker);
        }
        world.name_hosts(&lockers);
        for host in (0..hosts).map(Host) {
            if rng.random_bool(0.1) {
                world.deafen(host);
            }
        }
        for section in &contended {
            for (host, locker) in lockers.iter().enumerate() {
                for number in 0..rng.random_range(1..=3) {
                    let habits = sections::habits(*section, (host, number) == (0, 0), &mut rng);
                    let chance = StdRng::from_rng(&mut rng);
                    visitors.push(Visitor::start(&world, Host(host), locker, *section, habits, chance));
                }
            }
        }
        // Where nothing goes wrong, or not with one of them, much less may happen.
        let struck: Vec<Host> = match rng.random_range(0..4) {
            0 => Vec::new(),
            1 => (1..hosts).map(Host).collect(),
            _ => (0..hosts).map(Host).collect(),
        };
        let mut closed = Vec::new();
        let end = clock::now() + between(&mut rng, 30_000, 150_000);
        while clock::now() < end {
            if let Some(&host) = struck.choose(&mut rng)
                && fault_of_sections(&mut rng, &world, host, &contended)
                && closed.len() + 1 < hosts
            {
                world.closes(host);
                let locker = lockers[host.0].clone();
                let close = async move { locker.close().await };
                closed.push(tokio::spawn(memory.on(lockers[host.0].identity(), close)));
            }
            for _ in 0..rng.random_range(1..=6) {
                tokio::time::sleep(between(&mut rng, 0, 1_500)).await;
                world.check();
            }
        }
        if rng.random_bool(0.5) {
            empty(&world, options.bounds().ttl).await;
        }
        world.close();
        for (host, locker) in lockers.iter().enumerate() {
            world.closes(Host(host));
            closed.push(tokio::spawn({
                let locker = locker.clone();
                async move { locker.close().await }
            }));
        }
        for task in closed.into_iter().chain(visitors) {
            match tokio::time::timeout(ms(600_000), task).await {
                Ok(ended) => ended.unwrap(),
                Err(_) => world.hangs("a close or a visitor"),
            }
        }
        drop(replicas);
        world.heal_everything();
        tokio::time::sleep(options.bounds().ttl * 2).await;
        world.check_that_nothing_is_left();
        world.verdict()
    })
}

/// Simulates seeds on all cores until one fails or there are none left. Gives the first that failed.
fn first_failure(
    simulate: Simulate,
    seeds: std::ops::Range<u64>,
    sabotage: Option<Sabotage>,
) -> Option<(u64, String)> {
    let next = AtomicU64::new(seeds.start);
    let failed = std::sync::Mutex::new(None::<(u64, String)>);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..cores {
            scope.spawn(|| {
                while failed.lock().unwrap().is_none() {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds.end {
                        break;
                    }
                    if let (_, Err(violation)) = simulate(seed, sabotage, false) {
                        *failed.lock().unwrap() = Some((seed, violation));
                    }
                }
            });
        }
    });
    failed.into_inner().unwrap()
}

/// How the seeds of a test are simulated, how many, and how one is replayed.
struct Seeds {
    simulate: Simulate,
    count: u64,
    replay: &'static str,
}

const ELECTION: Seeds = Seeds { simulate, count: SEEDS, replay: "scripts/soak --seed" };
const SECTIONS: Seeds =
    Seeds { simulate: simulate_sections, count: SECTION_SEEDS, replay: "scripts/soak --sections --seed" };

impl Seeds {
    fn assert_none_fails(&self, seeds: std::ops::Range<u64>) {
        if let Some((seed, violation)) = first_failure(self.simulate, seeds, None) {
            panic!("seed {seed}: {violation}\nreplay it with: {} {seed}", self.replay);
        }
    }

    /// Simulates what the environment asks for, or as many seeds as the test has.
    fn assert_all_hold(&self) {
        if let Ok(seed) = std::env::var("LEASEHOLD_SEED") {
            let seed = seed.parse().expect("LEASEHOLD_SEED is the number of a seed");
            let (trace, verdict) = (self.simulate)(seed, None, true);
            println!("{}", trace.join("\n"));
            return verdict.unwrap();
        }
        if let Ok(soak) = std::env::var("LEASEHOLD_SOAK") {
            let soak = humantime::parse_duration(&soak).expect("LEASEHOLD_SOAK is a duration such as 10m");
            #[expect(clippy::disallowed_methods, reason = "how long to soak is a matter of the real clock")]
            let begun = std::time::Instant::now();
            let mut from = rand::make_rng::<StdRng>().random_range(0..u64::MAX / 2);
            while begun.elapsed() < soak {
                self.assert_none_fails(from..from + self.count);
                from += self.count;
                println!("{} more seeds hold, up to {from}", self.count);
            }
            return;
        }
        self.assert_none_fails(0..self.count);
    }

    /// The twin of [`assert_all_hold`](Self::assert_all_hold): a broken product is found, as one of these.
    fn assert_finds(&self, sabotage: Sabotage, expected: &[&str]) {
        let found = first_failure(self.simulate, 0..self.count, Some(sabotage));
        let (seed, violation) = found.expect("the simulation finds nothing");
        println!("{sabotage:?} is found by seed {seed}: {violation}");
        let is_expected = expected.iter().any(|what| violation.contains(what));
        assert!(is_expected, "{sabotage:?} is found by seed {seed}, but as: {violation}");
    }
}

/// F-04, F-17, D11: no schedule of 2,000 breaks a guarantee.
#[test]
fn seeds_hold_the_guarantees() {
    ELECTION.assert_all_hold();
}

/// L-04, L-10, L-11, L-16, L-17: at most one writer or any readers are in, and nobody waits for ever.
#[test]
fn seeds_of_sections_hold_the_guarantees() {
    SECTIONS.assert_all_hold();
}

/// F-17, D07
#[test]
fn a_release_before_the_job_ended_is_found() {
    ELECTION.assert_finds(Sabotage::ReleaseBeforeEnd, &["two at once"]);
}

/// F-17
#[test]
fn a_session_closed_before_its_jobs_ended_is_found() {
    ELECTION.assert_finds(Sabotage::CloseBeforeEnd, &["two at once"]);
}

/// F-36, D11
#[test]
fn a_deadline_that_is_not_kept_is_found() {
    ELECTION.assert_finds(Sabotage::NoDeadline, &["two at once"]);
}

#[test]
fn stale_events_that_are_taken_are_found() {
    ELECTION.assert_finds(Sabotage::StaleEvents, &["nobody asked"]);
}

/// F-16, D11
#[test]
fn a_grace_that_starts_on_noticing_is_found() {
    ELECTION.assert_finds(Sabotage::GraceFromNotice, &["two at once"]);
}

/// L-06, L-16
#[test]
fn a_section_released_before_its_body_ended_is_found() {
    SECTIONS.assert_finds(Sabotage::ReleaseBeforeEnd, &["two at once", "without a reason"]);
}

/// L-16: session locks stack.
#[test]
fn tasks_of_one_process_that_take_no_turns_are_found() {
    SECTIONS.assert_finds(Sabotage::NoTurns, &["two at once"]);
}

/// L-17
#[test]
fn readers_that_do_not_respect_a_waiting_writer_are_found() {
    SECTIONS.assert_finds(Sabotage::NoIntent, &["others always come first"]);
}

/// L-10
#[test]
fn somebody_left_registered_as_waiting_is_found() {
    SECTIONS
        .assert_finds(Sabotage::NoWithdrawal, &["nobody uses", "others always come first", "nobody is in"]);
}

/// The same seed gives the same run, or replaying would be worth nothing.
#[test]
fn a_seed_replays_exactly() {
    for seed in 0..20 {
        for simulate in [simulate, simulate_sections] as [Simulate; 2] {
            assert_eq!(simulate(seed, None, true), simulate(seed, None, true), "seed {seed}");
        }
    }
}
