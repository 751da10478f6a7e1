//! Once per interval, over all processes that share a store.

use std::convert::Infallible;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use leasehold::{
    CancellationToken, Crashed, Every, EveryError, Key, Kind, LockError, Locker, Missed, Once, Options,
    Reason, Sabotage, ScheduleError, Slot, SlotState, Spacing,
};
use tokio::task::{JoinHandle, JoinSet};
use tracing::Level;
use tracing_subscriber::layer::SubscriberExt as _;

use crate::support::recorder::Recorder;
use crate::support::{Stage, eventually, on_every_store, quick, until};

const SECOND: Duration = Duration::from_secs(1);

/// Where no slot but the first one comes in a test: one begins every 365 days since 1970.
const LONG: Duration = Duration::from_hours(24 * 365);

const HOUR: Duration = Duration::from_hours(1);

/// Who has served which slot, in order of their start.
#[derive(Clone, Default)]
struct Served {
    all: Arc<Mutex<Vec<(String, u64, u32)>>>,
}

impl Served {
    fn add(&self, who: &str, slot: &Slot) {
        self.all.lock().unwrap().push((who.to_owned(), slot.number, slot.run));
    }

    fn all(&self) -> Vec<(String, u64, u32)> {
        self.all.lock().unwrap().clone()
    }

    fn numbers(&self) -> Vec<u64> {
        self.all().iter().map(|(_, number, _)| *number).collect()
    }

    fn count(&self) -> usize {
        self.all().len()
    }

    async fn until_there_are(&self, count: usize) {
        eventually(&format!("{count} runs"), || self.all(), |all| all.len() >= count).await;
    }
}

/// As [`quick`], for one who does not wait for the store: on a busy machine a second is no time.
fn patient(who: &str) -> Options {
    quick(who).query_timeout(Duration::from_secs(10))
}

/// A replica whose job only says so.
fn replica(every: Every, who: &str, served: &Served) -> JoinHandle<Result<(), EveryError>> {
    let (served, who) = (served.clone(), who.to_owned());
    {
        let every = every;
        tokio::spawn(async move {
            every
                .run(async |slot: Slot| {
                    served.add(&who, &slot);
                    Ok::<_, Infallible>(())
                })
                .await
        })
    }
}

/// No slot twice, and none left out after the first one: that may have been served so late in its time that the next one began
/// meanwhile.
fn assert_consecutive(numbers: &[u64]) {
    assert!(numbers.windows(2).all(|pair| pair[1] > pair[0]), "{numbers:?}");
    assert!(numbers[1..].windows(2).all(|pair| pair[1] == pair[0] + 1), "{numbers:?}");
}

/// E-01, D35: three replicas that start at odd times, and two of them are ended meanwhile; whoever serves a slot is done
/// with it at once.
#[tokio::test]
async fn each_slot_is_served_once_by_whichever_replica() {
    on_every_store(async |stage| {
        let served = Served::default();
        let mut replicas = Vec::new();
        for who in ["a", "b", "c"] {
            let locker = stage.locker(quick(who));
            replicas.push((replica(locker.every("job", SECOND), who, &served), locker));
            served.until_there_are(replicas.len().min(2)).await;
        }
        served.until_there_are(4).await;
        for (replica, locker) in replicas.drain(1..) {
            locker.close().await;
            replica.await.unwrap().unwrap();
            let seen = served.count();
            served.until_there_are(seen + 1).await;
        }
        for (replica, locker) in replicas {
            locker.close().await;
            replica.await.unwrap().unwrap();
        }
        assert_consecutive(&served.numbers());
        assert!(served.all().iter().all(|(_, _, run)| *run == 1));
        stage.until_nothing_is_held().await;
    })
    .await;
}

/// E-01, D35: the twin. Where a lock alone decides, a slot is served more than once.
#[tokio::test]
async fn where_the_lock_is_enough_a_slot_is_served_twice() {
    on_every_store(async |stage| {
        let served = Served::default();
        let locker = |who| stage.locker(quick(who).sabotage(Sabotage::LockIsEnough));
        let lockers = [locker("a"), locker("b")];
        let replicas = lockers.each_ref().map(|it| replica(it.every("job", LONG), it.identity(), &served));
        served.until_there_are(3).await;
        for (replica, locker) in replicas.into_iter().zip(lockers) {
            locker.close().await;
            replica.await.unwrap().unwrap();
        }
    })
    .await;
}

/// E-06: the job knows which slot it is and when that began, and it holds a lease.
#[tokio::test]
async fn the_job_gets_its_slot_and_the_lease() {
    on_every_store(async |stage| {
        let locker = stage.locker(patient("a"));
        let jobs = locker.every("job", LONG).offset(Duration::from_mins(7)).once(async |slot: Slot| {
            assert!(slot.is_held() && slot.check().await && slot.lease().is_held());
            assert_eq!(slot.name().as_str(), "job");
            let token = slot.fencing_token().await.unwrap();
            assert!(token.get() > 0);
            Ok::<_, EveryError>((slot.number, slot.at, slot.run))
        });
        let Once::Ran((number, at, run)) = jobs.await.unwrap() else { panic!("it was free") };
        let since_1970 = at.duration_since(UNIX_EPOCH).unwrap();
        assert_eq!((since_1970.as_secs(), run), (number * LONG.as_secs() + 420, 1));
        let now = if let Stage::Memory(memory) | Stage::Expiring(memory) = stage {
            memory.clock()
        } else {
            #[expect(clippy::disallowed_methods, reason = "the store's clock is that of this host")]
            SystemTime::now()
        };
        assert!(at <= now && now < at + LONG + LONG, "{at:?} {now:?}");
        // The lock of that name, and no other.
        locker.lock("job").try_lock().await.unwrap().unwrap().release().await.unwrap();
        locker.close().await;
        stage.until_nothing_is_held().await;
    })
    .await;
}

/// E-06: the first slot is served when its replica starts, unless it is served already; one who only looks is told by whom.
#[tokio::test]
async fn a_slot_that_is_served_is_told_to_whoever_comes_later() {
    on_every_store(async |stage| {
        let (a, b) = (stage.locker(patient("a")), stage.locker(patient("b")));
        let nothing = async |_: Slot| Ok::<_, EveryError>(());
        assert_eq!(a.every("job", LONG).once(nothing).await.unwrap(), Once::Ran(()));
        for locker in [&a, &b] {
            let body = async |_: Slot| -> Result<(), EveryError> { panic!("it is served") };
            let Once::Taken(taken) = locker.every("job", LONG).once(body).await.unwrap() else { panic!() };
            assert_eq!((taken.state, taken.by.as_deref()), (SlotState::Served, Some("a")));
            assert!(taken.next_in <= LONG, "{taken:?}");
            assert!(taken.to_string().contains("was served by a; the next one begins in"), "{taken}");
        }
        // Another name is another job.
        assert_eq!(b.every("other", LONG).once(nothing).await.unwrap(), Once::Ran(()));
        for locker in [a, b] {
            locker.close().await;
        }
    })
    .await;
}

/// E-02, D36: the slots that begin meanwhile are skipped.
#[tokio::test]
async fn a_run_that_is_longer_than_the_interval_does_not_overlap_itself() {
    let numbers = long_runs(Missed::Skip).await;
    assert!(numbers.windows(2).all(|pair| pair[1] >= pair[0] + 2), "{numbers:?}");
}

/// E-02, D36: or the latest of them is run as soon as there is room for it.
#[tokio::test]
async fn the_latest_slot_that_a_run_overlaps_is_served_on_demand() {
    let numbers = long_runs(Missed::RunLatest).await;
    assert!(numbers.windows(2).all(|pair| pair[1] > pair[0]), "{numbers:?}");
    assert!(numbers.windows(2).any(|pair| pair[1] == pair[0] + 1), "{numbers:?}");
}

/// Runs three replicas of a job that takes one and a half intervals, on every store; gives which slots were served.
async fn long_runs(missed: Missed) -> Vec<u64> {
    let all = Mutex::new(Vec::new());
    on_every_store(async |stage| {
        let served = Served::default();
        let room = Arc::new(tokio::sync::Semaphore::new(1));
        let mut replicas = JoinSet::new();
        let lockers = ["a", "b", "c"].map(|who| stage.locker(quick(who)));
        for locker in &lockers {
            let (served, room, who) = (served.clone(), Arc::clone(&room), locker.identity().to_owned());
            let every = locker.every("job", SECOND).missed(missed);
            replicas.spawn(async move {
                let job = async |slot: Slot| {
                    let alone = room.try_acquire().expect("nobody else is in");
                    served.add(&who, &slot);
                    tokio::time::sleep(SECOND * 3 / 2).await;
                    drop(alone);
                    Ok::<_, Infallible>(())
                };
                every.run(job).await
            });
        }
        served.until_there_are(3).await;
        for locker in &lockers {
            locker.close().await;
        }
        while let Some(ended) = replicas.join_next().await {
            ended.unwrap().unwrap();
        }
        // Those of one store after those of another one: as if a long time had passed.
        let mut all = all.lock().unwrap();
        let offset = all.last().map_or(0, |last| last + 1_000_000);
        let first = served.numbers()[0];
        all.extend(served.numbers().iter().map(|number| offset + number - first));
    })
    .await;
    all.into_inner().unwrap()
}

/// E-03, D36: a run whose end nobody has recorded is not repeated, or is once; then the schedule goes on.
#[tokio::test]
async fn a_crashed_run_is_repeated_only_where_that_was_asked_for() {
    on_every_store(async |stage| {
        for (crashed, name) in [(Crashed::AtMostOnce, "never"), (Crashed::RetryOnce, "once")] {
            let (a, b) = (stage.locker(patient("a")), stage.locker(patient("b")));
            let started = CancellationToken::new();
            let told = started.clone();
            let crashes = {
                let every = a.every(name, LONG);
                tokio::spawn(async move {
                    every
                        .run(async |_: Slot| {
                            told.cancel();
                            std::future::pending::<Result<(), Infallible>>().await
                        })
                        .await
                })
            };
            started.cancelled().await;
            crashes.abort();
            assert!(crashes.await.unwrap_err().is_cancelled());
            let served = Served::default();
            let every = b.every(name, LONG).crashed(crashed);
            let once = every.clone().once(async |slot: Slot| {
                served.add("b", &slot);
                Ok::<_, EveryError>(())
            });
            let once = once.await.unwrap();
            if crashed == Crashed::RetryOnce {
                assert_eq!((once, served.all()[0].2), (Once::Ran(()), 2));
            } else {
                let Once::Taken(taken) = once else { panic!("it was repeated") };
                assert_eq!((taken.state, taken.by.as_deref()), (SlotState::Started, Some("a")));
                assert_eq!(served.count(), 0);
            }
            let body = async |_: Slot| -> Result<(), EveryError> { panic!("it has had its runs") };
            assert!(matches!(every.once(body).await.unwrap(), Once::Taken(_)));
            for locker in [a, b] {
                locker.close().await;
            }
        }
    })
    .await;
}

/// E-03: the next slot is served after a crash.
#[tokio::test]
async fn the_slot_after_a_crash_is_served() {
    on_every_store(async |stage| {
        let (a, b) = (stage.locker(quick("a")), stage.locker(quick("b")));
        let served = Served::default();
        let (crashing, is_in) = (served.clone(), CancellationToken::new());
        let told = is_in.clone();
        let crashes = {
            let every = a.every("job", SECOND);
            tokio::spawn(async move {
                every
                    .run(async |slot: Slot| {
                        crashing.add("a", &slot);
                        told.cancel();
                        std::future::pending::<Result<(), Infallible>>().await
                    })
                    .await
            })
        };
        is_in.cancelled().await;
        let goes_on = replica(b.every("job", SECOND), "b", &served);
        crashes.abort();
        assert!(crashes.await.unwrap_err().is_cancelled());
        served.until_there_are(3).await;
        b.close().await;
        goes_on.await.unwrap().unwrap();
        a.close().await;
        let all = served.all();
        assert_eq!((all[0].0.as_str(), all[1].0.as_str()), ("a", "b"));
        assert!(all.iter().all(|(_, _, run)| *run == 1), "{all:?}");
        assert!(all[1].1 > all[0].1, "{all:?}");
        assert_consecutive(&served.numbers()[1..]);
    })
    .await;
}

/// E-05: a job that fails, or panics when it is called or later, has had its slot.
#[tokio::test]
async fn an_error_or_a_panic_of_the_job_does_not_end_the_schedule() {
    on_every_store(async |stage| {
        let locker = stage.locker(quick("a"));
        let served = Served::default();
        let (seen, mut calls) = (served.clone(), 0);
        let goes_on = tokio::spawn(locker.every("job", SECOND).run(move |slot: Slot| {
            seen.add("a", &slot);
            calls += 1;
            assert!(calls != 1, "this panic belongs to the test");
            async move {
                assert!(calls != 2, "this panic belongs to the test");
                if calls == 3 { Err("it fails") } else { Ok(()) }
            }
        }));
        served.until_there_are(4).await;
        locker.close().await;
        goes_on.await.unwrap().unwrap();
        assert_consecutive(&served.numbers());
        assert!(served.all().iter().all(|(_, _, run)| *run == 1));
    })
    .await;
}

/// E-05: told to stop, it waits for the run in progress, whose lease says why, and the slot has been served.
#[tokio::test]
async fn shutdown_waits_for_the_run_in_progress() {
    on_every_store(async |stage| {
        for by_close in [false, true] {
            let locker = stage.locker(patient("a"));
            let (shutdown, is_in) = (CancellationToken::new(), CancellationToken::new());
            let served = Served::default();
            let (told, seen) = (is_in.clone(), served.clone());
            let name = if by_close { "closed" } else { "until" };
            let every = locker.every(name, LONG).crashed(Crashed::RetryOnce).until(shutdown.clone());
            let run = {
                let every = every.clone();
                tokio::spawn(async move {
                    every
                        .run(async |slot: Slot| {
                            told.cancel();
                            slot.cancelled().await;
                            let reason = if by_close { Reason::Closed } else { Reason::Shutdown };
                            assert_eq!(slot.lease().reason(), Some(reason));
                            // It goes on, under its lease.
                            for _ in 0..3 {
                                tokio::time::sleep(Duration::from_millis(50)).await;
                                assert!(slot.check().await);
                            }
                            seen.add("a", &slot);
                            Ok::<_, Infallible>(())
                        })
                        .await
                })
            };
            is_in.cancelled().await;
            if by_close {
                locker.close().await;
            } else {
                shutdown.cancel();
            }
            run.await.unwrap().unwrap();
            assert_eq!(served.count(), 1);
            locker.close().await;
            // Told beforehand, it does not so much as ask.
            every.run(async |_: Slot| -> Result<(), Infallible> { panic!("it was to stop") }).await.unwrap();
            let other = stage.locker(patient("b"));
            let body = async |_: Slot| -> Result<(), EveryError> { panic!("it was served") };
            let Once::Taken(taken) = other.every(name, LONG).once(body).await.unwrap() else { panic!() };
            assert_eq!(taken.state, SlotState::Served);
            other.close().await;
        }
    })
    .await;
}

/// E-02: an operator who holds the lock keeps the job from running, and it runs when he lets go.
#[tokio::test]
async fn whoever_holds_the_lock_of_that_name_keeps_the_job_from_running() {
    on_every_store(async |stage| {
        let (a, b) = (stage.locker(quick("a")), stage.locker(quick("b")));
        // It is connected: what follows does not wait for the store.
        a.lock("other").lock().await.unwrap().release().await.unwrap();
        let held = b.lock("job").lock().await.unwrap();
        let served = Served::default();
        let waits = replica(a.every("job", LONG), "a", &served);
        let body = async |_: Slot| -> Result<(), EveryError> { panic!("the lock is held") };
        let Once::Taken(taken) = a.every("job", LONG).once(body).await.unwrap() else { panic!() };
        assert_eq!((taken.state, taken.number), (SlotState::Held, None));
        assert_eq!(served.count(), 0);
        held.release().await.unwrap();
        served.until_there_are(1).await;
        for locker in [a, b] {
            locker.close().await;
        }
        waits.await.unwrap().unwrap();
    })
    .await;
}

/// E-03, E-05: the lock is taken away in the middle of a run: the job is told, and its slot has not been served to the end.
#[tokio::test]
async fn a_lost_lock_stops_the_job_and_counts_as_a_crash() {
    on_every_store(async |stage| {
        let locker = stage.locker(patient("a"));
        let lost = locker.every("job", LONG).once(async |slot: Slot| {
            stage.take_key_away("a", Key::of(Kind::Lock, "job"));
            slot.cancelled().await;
            Ok::<_, EveryError>(())
        });
        let lost = lost.await;
        assert!(matches!(lost, Err(EveryError::Lost { .. })), "{lost:?}");
        let other = stage.locker(patient("b"));
        let again = other.every("job", LONG).crashed(Crashed::RetryOnce);
        let again = again.once(async |slot: Slot| Ok::<_, EveryError>(slot.run)).await.unwrap();
        assert_eq!(again, Once::Ran(2));
        for locker in [locker, other] {
            locker.close().await;
        }
    })
    .await;
}

/// E-06: with `AfterFinish` the next run comes one interval after the end of the last one, of whichever replica.
#[tokio::test]
async fn after_a_finish_the_next_run_is_an_interval_away() {
    on_every_store(async |stage| {
        let lockers = ["a", "b"].map(|who| stage.locker(quick(who)));
        let served = Served::default();
        let ended: Arc<Mutex<Option<tokio::time::Instant>>> = Arc::default();
        let mut replicas = JoinSet::new();
        for locker in &lockers {
            let (served, ended, who) = (served.clone(), Arc::clone(&ended), locker.identity().to_owned());
            let every = locker.every("job", SECOND).spacing(Spacing::AfterFinish);
            {
                let every = every;
                replicas.spawn(async move {
                    every
                        .run(async |slot: Slot| {
                            if let Some(ended) = *ended.lock().unwrap() {
                                // Less what lies between the two clocks, and the end of the job and its record.
                                assert!(
                                    ended.elapsed() >= Duration::from_millis(980),
                                    "{:?}",
                                    ended.elapsed()
                                );
                            }
                            served.add(&who, &slot);
                            tokio::time::sleep(SECOND / 2).await;
                            *ended.lock().unwrap() = Some(crate::support::now());
                            Ok::<_, Infallible>(())
                        })
                        .await
                })
            };
        }
        served.until_there_are(3).await;
        for locker in lockers {
            locker.close().await;
        }
        while let Some(ended) = replicas.join_next().await {
            ended.unwrap().unwrap();
        }
        let numbers = served.numbers();
        assert_eq!(numbers[..3], [1, 2, 3]);
    })
    .await;
}

/// E-06: before anything is asked.
#[tokio::test]
async fn what_cannot_be_a_schedule_is_refused_at_once() {
    on_every_store(async |stage| {
        let locker = stage.locker(quick("a"));
        let ms = Duration::from_millis;
        let body = || async |_: Slot| -> Result<(), EveryError> { panic!("it is refused") };
        for (every, expected) in [
            (locker.every("job", ms(999)), "at least 1s"),
            (locker.every("job", Duration::MAX), "at most"),
            (locker.every("job", SECOND).offset(SECOND), "the offset must be shorter"),
            (locker.every("job", SECOND).jitter(SECOND * 2), "the jitter must be shorter"),
            (locker.every("job", SECOND).offset(ms(1)).spacing(Spacing::AfterFinish), "has none"),
            (locker.every("", SECOND), "must not be empty"),
        ] {
            let (run, once) = (every.clone().run(body()).await, every.once(body()).await);
            for error in [run.unwrap_err(), once.unwrap_err()] {
                assert!(matches!(error, EveryError::Schedule(_) | EveryError::Name(_)), "{error:?}");
                assert!(error.to_string().contains(expected), "{error}");
            }
        }
        let interval = locker.every("job", ms(5)).once(body()).await.unwrap_err();
        assert!(matches!(interval, EveryError::Schedule(ScheduleError::Interval { interval }) if interval == ms(5)));
        assert_eq!(stage.sessions(), 0);
        locker.close().await;
        let closed = locker.every("job", SECOND).once(body()).await.unwrap_err();
        assert!(matches!(closed, EveryError::Stopped), "{closed:?}");
    })
    .await;
}

/// E-06: the future needs neither `Send` nor `'static`; dropped, it drops the job, and the lock is free.
#[tokio::test]
async fn a_job_may_borrow_and_is_dropped_with_its_future() {
    on_every_store(async |stage| {
        let locker = stage.locker(quick("a"));
        let count = std::cell::Cell::new(0);
        let rc = std::rc::Rc::new(());
        let job = async |_: Slot| {
            let _here = std::rc::Rc::clone(&rc);
            count.set(count.get() + 1);
            std::future::pending::<Result<(), Infallible>>().await
        };
        let mut run = Box::pin(locker.every("job", LONG).run(job));
        tokio::select! {
            ended = &mut run => panic!("{ended:?}"),
            () = until("it runs", || count.get() == 1) => {}
        }
        assert_eq!(std::rc::Rc::strong_count(&rc), 2);
        drop(run);
        assert_eq!(std::rc::Rc::strong_count(&rc), 1);
        let guard = locker.lock("job").lock_timeout(Duration::from_secs(20)).await;
        assert!(!matches!(guard, Err(LockError::Timeout { .. })), "{guard:?}");
        drop(guard);
        locker.close().await;
    })
    .await;
}

/// E-01: several of one name on one Locker are several replicas.
#[tokio::test]
async fn replicas_may_share_a_locker() {
    on_every_store(async |stage| {
        let locker = stage.locker(quick("a"));
        let served = Served::default();
        let replicas = ["1", "2"].map(|who| replica(locker.every("job", SECOND), who, &served));
        served.until_there_are(3).await;
        locker.close().await;
        for replica in replicas {
            replica.await.unwrap().unwrap();
        }
        assert_consecutive(&served.numbers());
    })
    .await;
}

/// E-04: the store's clock is set, forth and back: nothing is served twice.
#[tokio::test(start_paused = true)]
async fn a_clock_that_is_set_back_repeats_nothing() {
    let memory = leasehold::Memory::new();
    let lockers = ["a", "b"].map(|who| Locker::memory(&memory, quick(who)).unwrap());
    let served = Served::default();
    let minute = Duration::from_mins(1);
    let replicas =
        lockers.each_ref().map(|locker| replica(locker.every("job", minute), locker.identity(), &served));
    tokio::time::sleep(minute * 5).await;
    memory.set_clock(memory.clock() + HOUR);
    tokio::time::sleep(minute * 5).await;
    let before = served.numbers();
    memory.set_clock(memory.clock() - HOUR);
    tokio::time::sleep(minute * 30).await;
    assert_eq!(served.numbers(), before, "all of that hour are served, or are not any more");
    tokio::time::sleep(minute * 40).await;
    for (replica, locker) in replicas.into_iter().zip(lockers) {
        locker.close().await;
        replica.await.unwrap().unwrap();
    }
    let numbers = served.numbers();
    assert!(numbers.windows(2).all(|pair| pair[0] < pair[1]), "{numbers:?}");
    assert!(numbers.len() > before.len() + 8, "{numbers:?}");
    assert_consecutive(&numbers[before.len() - 1..]);
}

/// E-02, E-03, E-05, D36: what is not as it should be is in the log, and one replica tells it.
#[tokio::test(start_paused = true)]
async fn what_was_skipped_and_what_went_wrong_is_told_once() {
    let recorder = Recorder::default();
    let _guard = tracing::subscriber::set_default(tracing_subscriber::registry().with(recorder.clone()));
    let memory = leasehold::Memory::new();
    let calls = AtomicUsize::new(0);
    let minute = Duration::from_mins(1);
    let job = async |_: Slot| {
        match calls.fetch_add(1, Ordering::Relaxed) {
            // Two more slots begin meanwhile.
            0 => tokio::time::sleep(minute * 5 / 2).await,
            1 => panic!("this panic belongs to the test"),
            2 => return Err("it fails"),
            // Until its future is dropped.
            3 => std::future::pending().await,
            _ => {}
        }
        Ok(())
    };
    for _ in 0..2 {
        let lockers = ["a", "b"].map(|who| Locker::memory(&memory, quick(who)).unwrap());
        let [a, b] = lockers.each_ref().map(|locker| locker.every("job", minute).run(job));
        let some_slots = tokio::time::timeout(minute * 6, async { tokio::join!(a, b) });
        Box::pin(some_slots).await.expect_err("nobody has told them to stop");
        for locker in lockers {
            locker.close().await;
        }
        tokio::time::sleep(minute * 7).await;
    }
    let told: Vec<_> = recorder
        .all()
        .into_iter()
        .filter(|event| event.level <= Level::WARN)
        .map(|event| {
            let of = |field: &str| event.get(field).to_owned();
            (of("message"), of("slot") + &of("after"), of("skipped") + &of("panic"))
        })
        .collect();
    // The clock shows midnight at first, in minutes since 1970.
    let first = 1_767_225_600 / 60;
    let expected = [
        ("slots were skipped: they began while this one was served", 0, "2"),
        ("the job panicked", 3, "this panic belongs to the test"),
        ("the job failed: it fails", 4, ""),
        // In the sixth slot it was dropped, and for seven minutes nobody was there.
        ("the run of a slot crashed", 5, ""),
        ("slots were skipped: nobody served them", 5, "7"),
    ];
    let expected = expected
        .map(|(message, slot, more)| (message.to_owned(), (first + slot).to_string(), more.to_owned()));
    assert_eq!(told, expected);
}
