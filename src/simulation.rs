//! The driver on the memory store under a paused clock, with random schedules of everything that can go wrong.
//!
//! A seed is one whole run: some hosts with a Locker each, names they contend for, and faults. Job bodies report every
//! poll of theirs to a [`World`], which knows what was done to whom and checks after every report; it believes nothing
//! that the product says of itself.
//!
//! `LEASEHOLD_SEED=n` replays one seed and prints what happened; `LEASEHOLD_SOAK=10m` goes on through fresh seeds.

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
use world::{Host, World};

const SEEDS: u64 = 2_000;
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

/// Does something to somebody.
fn fault(rng: &mut StdRng, world: &World, lockers: &[Locker], replicas: &[(Host, Replica)]) {
    let Some(&(host, ref replica)) = replicas.choose(rng) else { return };
    let lasting = if rng.random_bool(0.5) { between(rng, 1, 6_000) } else { between(rng, 1, 60_000) };
    match rng.random_range(0..14) {
        0..2 => world.freeze(host, lasting),
        2..4 => world.partition(host, lasting),
        4..6 => {
            let (before, after) = (between(rng, 0, 12_000), between(rng, 0, 12_000));
            let few = rng.random_range(1..=10);
            world.slow(host, before / few, after / few, lasting);
        }
        6 => world.kill(host),
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

/// Simulates seeds on all cores until one fails or there are none left. Gives the first that failed.
fn first_failure(seeds: std::ops::Range<u64>, sabotage: Option<Sabotage>) -> Option<(u64, String)> {
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

fn assert_none_fails(seeds: std::ops::Range<u64>) {
    if let Some((seed, violation)) = first_failure(seeds, None) {
        panic!("seed {seed}: {violation}\nreplay it with: scripts/soak --seed {seed}");
    }
}

/// F-04, F-17, D11: no schedule of 2,000 breaks a guarantee.
#[test]
fn seeds_hold_the_guarantees() {
    if let Ok(seed) = std::env::var("LEASEHOLD_SEED") {
        let seed = seed.parse().expect("LEASEHOLD_SEED is the number of a seed");
        let (trace, verdict) = simulate(seed, None, true);
        println!("{}", trace.join("\n"));
        return verdict.unwrap();
    }
    if let Ok(soak) = std::env::var("LEASEHOLD_SOAK") {
        let soak = humantime::parse_duration(&soak).expect("LEASEHOLD_SOAK is a duration such as 10m");
        #[expect(clippy::disallowed_methods, reason = "how long to soak is a matter of the real clock")]
        let begun = std::time::Instant::now();
        let mut from = rand::make_rng::<StdRng>().random_range(0..u64::MAX / 2);
        while begun.elapsed() < soak {
            assert_none_fails(from..from + SEEDS);
            from += SEEDS;
            println!("{SEEDS} more seeds hold, up to {from}");
        }
        return;
    }
    assert_none_fails(0..SEEDS);
}

/// The twin of [`seeds_hold_the_guarantees`]: a broken product is found.
fn assert_is_found(sabotage: Sabotage, what: &str) {
    let (seed, violation) = first_failure(0..SEEDS, Some(sabotage)).expect("the simulation finds nothing");
    println!("{sabotage:?} is found by seed {seed}: {violation}");
    assert!(violation.contains(what), "{sabotage:?} is found by seed {seed}, but as: {violation}");
}

/// F-17, D07
#[test]
fn a_release_before_the_job_ended_is_found() {
    assert_is_found(Sabotage::ReleaseBeforeEnd, "two at once");
}

/// F-17
#[test]
fn a_session_closed_before_its_jobs_ended_is_found() {
    assert_is_found(Sabotage::CloseBeforeEnd, "two at once");
}

/// F-36, D11
#[test]
fn a_deadline_that_is_not_kept_is_found() {
    assert_is_found(Sabotage::NoDeadline, "two at once");
}

#[test]
fn stale_events_that_are_taken_are_found() {
    assert_is_found(Sabotage::StaleEvents, "nobody asked");
}

/// F-16, D11
#[test]
fn a_grace_that_starts_on_noticing_is_found() {
    assert_is_found(Sabotage::GraceFromNotice, "two at once");
}

/// The same seed gives the same run, or replaying would be worth nothing.
#[test]
fn a_seed_replays_exactly() {
    for seed in 0..20 {
        assert_eq!(simulate(seed, None, true), simulate(seed, None, true), "seed {seed}");
    }
}
