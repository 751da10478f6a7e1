//! Slots that many replicas serve, while sessions are killed, runs dropped and Lockers closed around the times at which
//! slots begin; and the wall clock of each replica is off by up to an hour.

use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rand::RngExt as _;
use rand::SeedableRng as _;
use rand::rngs::StdRng;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::{between, ms};
use crate::sabotage::Sabotage;
use crate::store::slots::Moment;
use crate::{Locker, Memory, Options, Slot, clock};

const SLOTS: u64 = 10_000;

/// Longer than a replica takes to connect anew, and so short that sessions need few heartbeats in between.
const INTERVAL: Duration = Duration::from_secs(5);

/// In microseconds.
const HOUR: u64 = 3_600_000_000;

/// One run, and when it began by the store's clock.
type Run = (u64, Moment);

/// How a replica is disturbed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// The server ends its session.
    Kill,
    /// Its run is dropped, and begins anew.
    Drop,
    /// Its Locker is closed, and it makes another one.
    Close,
}

struct Replica {
    identity: String,
    faults: watch::Sender<Fault>,
    lives: JoinHandle<()>,
}

#[derive(Clone)]
struct World {
    memory: Memory,
    runs: Arc<Mutex<Vec<Run>>>,
    /// Who serves, or has served last.
    leader: Arc<Mutex<usize>>,
    is_over: watch::Sender<bool>,
    /// Slots are put off.
    is_jittered: bool,
    sabotage: Option<Sabotage>,
}

impl World {
    fn start(&self, number: usize, mut rng: StdRng) -> Replica {
        let identity = format!("r{number}");
        let (faults, mut disturbed) = watch::channel(Fault::Kill);
        let skew = rng.random_range(0..=2 * HOUR);
        let shows = Moment::from(self.memory.clock()).0 + skew - HOUR;
        let (world, who) = (self.clone(), identity.clone());
        let lives = async move {
            let mut is_over = world.is_over.subscribe();
            tokio::time::sleep(between(&mut rng, 2_000, 4_000)).await;
            while !*is_over.borrow() {
                let options = Options { sabotage: world.sabotage, ..Options::default().identity(&who) };
                let locker = Locker::memory(&world.memory, options).unwrap();
                while !*is_over.borrow() {
                    let jitter = if world.is_jittered { INTERVAL / 3 } else { Duration::ZERO };
                    let every = locker.every("job", INTERVAL).jitter(jitter);
                    let run = every.run(|slot: Slot| {
                        world.serves(number, &slot);
                        let takes = between(&mut rng, 0, 300);
                        async move {
                            tokio::select! {
                                () = slot.cancelled() => {}
                                () = tokio::time::sleep(takes) => {}
                            }
                            Ok::<_, &str>(())
                        }
                    });
                    let mut run = pin!(run);
                    tokio::select! {
                        biased;
                        ended = &mut run => panic!("nobody has told it to stop: {ended:?}"),
                        _ = is_over.wait_for(|is_over| *is_over) => {}
                        _ = disturbed.changed() => {
                            if *disturbed.borrow_and_update() == Fault::Drop {
                                continue;
                            }
                        }
                    }
                    let (ended, ()) = tokio::join!(run, locker.close());
                    ended.unwrap();
                    break;
                }
                locker.close().await;
            }
        };
        let lives = tokio::spawn(clock::WALL.scope((clock::now(), shows), lives));
        Replica { identity, faults, lives }
    }

    fn serves(&self, number: usize, slot: &Slot) {
        *self.leader.lock().unwrap() = number;
        self.runs.lock().unwrap().push((slot.number, self.memory.clock().into()));
    }
}

fn simulate(
    replicas: usize,
    slots: u64,
    is_jittered: bool,
    seed: u64,
    sabotage: Option<Sabotage>,
) -> (Vec<Run>, u64) {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    runtime.block_on(async {
        let mut rng = StdRng::seed_from_u64(seed);
        let world = World {
            memory: Memory::new(),
            runs: Arc::default(),
            leader: Arc::default(),
            is_over: watch::Sender::new(false),
            is_jittered,
            sabotage,
        };
        let all: Vec<Replica> =
            (0..replicas).map(|number| world.start(number, StdRng::from_rng(&mut rng))).collect();
        // The clock of the store shows midnight now: slots begin at multiples of the interval from here.
        let began = clock::now();
        for slot in 1..slots {
            let boundary = began + INTERVAL * u32::try_from(slot).unwrap();
            if rng.random_bool(0.7) {
                continue;
            }
            let fault = [Fault::Kill, Fault::Drop, Fault::Close][rng.random_range(0..3)];
            // A run that is dropped between its claim and the job has crashed, and its slot is lost for good: not at the very
            // instant at which slots are claimed.
            let late = between(&mut rng, 1, 40);
            let at = match rng.random_range(0..3) {
                0 => boundary - late,
                1 if fault != Fault::Drop => boundary,
                _ => boundary + late,
            };
            if fault == Fault::Drop && is_jittered {
                continue;
            }
            tokio::time::sleep_until(clock::timer(at)).await;
            let leads = *world.leader.lock().unwrap();
            let whom = if rng.random_bool(0.7) { leads } else { rng.random_range(0..replicas) };
            match fault {
                Fault::Kill => world.memory.kill(&all[whom].identity),
                fault => _ = all[whom].faults.send_replace(fault),
            }
        }
        let end = began + INTERVAL * u32::try_from(slots).unwrap() - ms(500);
        tokio::time::sleep_until(clock::timer(end)).await;
        world.is_over.send_replace(true);
        let mut statements = 0;
        for replica in all {
            replica.lives.await.unwrap();
            statements += world.memory.statements(&replica.identity);
        }
        (world.runs.lock().unwrap().clone(), statements)
    })
}

/// What is wrong with these runs: every slot is to be served once, in its own time by the store's clock.
fn wrong(runs: &[Run], slots: u64) -> Option<String> {
    let interval = u64::try_from(INTERVAL.as_micros()).unwrap();
    for (n, (number, at)) in runs.iter().enumerate() {
        if at.0 / interval != *number {
            return Some(format!("slot {number} is served at {}", at.0));
        }
        if n > 0 && runs[n - 1].0 + 1 != *number {
            return Some(format!("slot {number} after {}", runs[n - 1].0));
        }
    }
    (runs.len() as u64 != slots).then(|| format!("{} runs", runs.len()))
}

fn holds(replicas: usize, is_jittered: bool) {
    let (runs, statements) = simulate(replicas, SLOTS, is_jittered, replicas as u64, None);
    assert_eq!(wrong(&runs, SLOTS), None);
    // Of which nine are for the run, at most, and the rest for those that look at who was quicker.
    let most = SLOTS * (9 + 2 * replicas as u64);
    assert!(statements <= most, "{statements} statements, more than {most}");
    println!("{statements} statements");
}

/// E-01, E-04, D35
#[test]
fn one_replica_serves_each_of_ten_thousand_slots_once() {
    holds(1, false);
}

/// E-01, E-04, D35
#[test]
fn two_replicas_serve_each_of_ten_thousand_slots_once() {
    holds(2, false);
}

/// E-01, E-04, D35
#[test]
fn three_replicas_serve_each_of_ten_thousand_slots_once() {
    holds(3, false);
}

/// E-01, E-04, D35: with slots that are put off.
#[test]
fn seven_replicas_serve_each_of_ten_thousand_slots_once() {
    holds(7, true);
}

/// E-01, E-04, D35
#[test]
fn fifty_replicas_serve_each_of_ten_thousand_slots_once() {
    holds(50, false);
}

/// E-04: the twin. Where each goes by its own clock, slots are served at the wrong time, or not at all.
#[test]
fn replicas_that_go_by_their_own_clocks_are_found_out() {
    for seed in 0..5 {
        let (runs, _) = simulate(3, 100, false, seed, Some(Sabotage::ClientClock));
        assert!(wrong(&runs, 100).is_some(), "seed {seed}");
    }
}

/// E-01, D35: the twin. Where a lock is enough, slots are served again.
#[test]
fn replicas_to_whom_the_lock_is_enough_are_found_out() {
    for seed in 0..5 {
        let (runs, _) = simulate(3, 100, false, seed, Some(Sabotage::LockIsEnough));
        assert!(wrong(&runs, 100).is_some(), "seed {seed}");
    }
}
