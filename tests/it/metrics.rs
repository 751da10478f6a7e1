//! What a scrape shows, while what it speaks of happens for real. A metric's labels are asked for by what no other test has.

use std::convert::Infallible;
use std::future;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use leasehold::{CancellationToken, Lease, LockError, LockGuard, Locker, Memory, Options, RunError, Slot};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use crate::support::scrape::Scrape;
use crate::support::{Log, Member, Stage, on_every_store, quick, sleepy, until};

fn unix_now() -> f64 {
    #[expect(clippy::disallowed_methods, reason = "what the deadline is told in")]
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64()
}

/// M-01, M-02: who leads is told by name, also by those who do not; each term's begin and end is counted with its reason.
#[tokio::test]
async fn who_leads_is_a_gauge_and_every_change_is_counted_with_its_reason() {
    Scrape::set_up();
    on_every_store(async |stage| {
        let (name, log) = (format!("led on {}", stage.kind()), Log::default());
        let leading = async |sum| Scrape::until("leasehold_leading", &[("name", &name)], sum).await;
        let changes = async |transition: &str, reason: &str, count: u32| {
            let labels = [("name", name.as_str()), ("transition", transition), ("reason", reason)];
            Scrape::until("leasehold_transitions_total", &labels, count.into()).await;
        };
        let (a, b) = (stage.locker(quick("a")), stage.locker(sleepy("b")));
        let mut leader = Member::on(&a, name.as_str(), "a", &log);
        leader.leads().await;
        leading(1.0).await;
        changes("acquired", "vacant", 1).await;

        // Two Lockers of one process: the sum is how many of them lead.
        let mut standby = Member::on(&b, name.as_str(), "b", &log);
        standby.stands_by().await;
        leading(1.0).await;
        leader.stop().await.unwrap();
        standby.leads().await;
        changes("released", "shutdown", 1).await;
        changes("acquired", "handed_over", 1).await;
        leading(1.0).await;

        stage.take_away("b", &name);
        changes("lost", "gone", 1).await;
        standby.stop().await.unwrap();
        leading(0.0).await;
        let ends = a.run(name.as_str(), async |_: Lease| Ok::<_, Infallible>(())).await;
        assert_eq!(ends.unwrap(), Some(()));
        changes("released", "job_ended", 1).await;
        let deadline = Scrape::now().sum("leasehold_deadline_timestamp_seconds", &[("name", &name)]);
        assert_eq!(deadline, Some(0.0), "it has none");
    })
    .await;
}

/// M-01: the deadline lies ahead by what an answer is trusted for at most, and heartbeats move it on.
#[tokio::test]
async fn the_deadline_is_a_unix_time_that_heartbeats_move_on() {
    Scrape::set_up();
    on_every_store(async |stage| {
        let (name, log) = (format!("renewed on {}", stage.kind()), Log::default());
        let labels = [("name", name.as_str())];
        let deadline = || Scrape::now().sum("leasehold_deadline_timestamp_seconds", &labels).unwrap();
        let options = quick("a");
        let trust = options.bounds().trust.as_secs_f64();
        let before = unix_now();
        let mut leader = Member::join(stage, options, name.as_str(), &log);
        leader.leads().await;
        let first = deadline();
        assert!(before < first && first <= unix_now() + trust, "{before} {first}");
        Scrape::until_above("leasehold_deadline_timestamp_seconds", &labels, first).await;
        assert!(deadline() <= unix_now() + trust);
        leader.stop().await.unwrap();
        Scrape::until("leasehold_deadline_timestamp_seconds", &labels, 0.0).await;
    })
    .await;
}

/// M-03: what the session does: opened, lost with its cause, connected in vain; heartbeats and polls are counted meanwhile.
#[cfg(all(unix, feature = "postgres"))]
#[tokio::test]
async fn sessions_heartbeats_and_polls_are_counted_by_store() {
    Scrape::set_up();
    let (stage, log) = (Stage::postgres(), Log::default());
    let Stage::Postgres(postgres) = &stage else { unreachable!() };
    let address = format!(
        "127.0.0.1:{}/{}",
        postgres.proxy.port(),
        postgres.database.options().get_database().unwrap()
    );
    let store = [("store", address.as_str())];
    let locker = stage.locker(quick("a"));
    let mut leader = Member::on(&locker, "job", "a", &log);
    leader.leads().await;
    Scrape::until("leasehold_sessions", &store, 1.0).await;
    Scrape::until("leasehold_sessions_opened_total", &store, 1.0).await;
    Scrape::until_above("leasehold_heartbeat_seconds_count", &store, 3.0).await;
    let polls = Scrape::now().sum("leasehold_polls_total", &store).unwrap();
    let sleeps = stage.locker(quick("b"));
    let standby = Member::on(&sleeps, "job", "b", &log);
    Scrape::until_above("leasehold_polls_total", &store, polls + 3.0).await;
    standby.stop().await.unwrap();
    sleeps.close().await;

    let admin = postgres.database.admin();
    admin.backends("leasehold/a").into_iter().for_each(|pid| admin.terminate(pid));
    let ended = [("store", address.as_str()), ("cause", "session_closed")];
    Scrape::until("leasehold_sessions_lost_total", &ended, 1.0).await;
    leader.leads().await;
    Scrape::until("leasehold_sessions", &store, 1.0).await;
    postgres.proxy.cut();
    let silent = [("store", address.as_str()), ("cause", "timeout")];
    Scrape::until("leasehold_sessions_lost_total", &silent, 1.0).await;
    let failed = [("store", address.as_str()), ("result", "unreachable")];
    Scrape::until_above("leasehold_connect_failures_total", &failed, 0.0).await;
    postgres.proxy.heal();
    leader.leads().await;
    leader.stop().await.unwrap();
    locker.close().await;
    Scrape::until("leasehold_sessions", &store, 0.0).await;
}

/// M-03: the store's address is a label, and nothing of who asks there.
#[cfg(all(feature = "postgres", feature = "redis"))]
#[test]
fn no_label_tells_users_or_passwords() {
    Scrape::set_up();
    let urls = [
        "postgres://u5er:s3cret@shown-a:1,shown-b:2/db",
        "postgres://shown-c/db?user=u5er&password=s3cret",
        "postgres:///db?host=/tmp/shown-d&user=u5er&password=s3cret",
        "postgres://u5er:s3%40cret%2F@shown-e/db?application_name=u5er",
        "redis://u5er:s3cret@shown-f:1/3",
        "redis://:s3cret@shown-g/",
        "redis+cluster://u5er:s3cret@shown-h:1,shown-i:2",
    ];
    let lockers = urls.map(|url| Locker::at(url, Options::default()).unwrap());
    let scrape = Scrape::now();
    for host in 'a'..='i' {
        assert!(scrape.has(&format!("shown-{host}")), "{host}: {}", scrape.text());
    }
    assert!(["u5er", "s3", "cret"].iter().all(|secret| !scrape.has(secret)), "{}", scrape.text());
    drop(lockers);
}

/// M-04: how long was waited and what came of it, what is held, and what was lost; without the names, which may be as many
/// as there are invoices.
#[tokio::test]
async fn waiting_for_locks_is_told_by_kind_and_outcome() {
    Scrape::set_up();
    let stage = Stage::files();
    let store = stage.dir().path().canonicalize().unwrap().display().to_string();
    let outcomes = |kind: &str, outcome: &str| {
        let labels = [("store", store.as_str()), ("kind", kind), ("outcome", outcome)];
        Scrape::now().sum("leasehold_lock_wait_seconds_count", &labels)
    };
    let held = async |kind: &str, count: f64| {
        Scrape::until("leasehold_locks_held", &[("store", &store), ("kind", kind)], count).await;
    };
    let locker = stage.locker(quick("a"));
    let guard = locker.lock("invoice:42").lock().await.unwrap();
    held("lock", 1.0).await;
    assert!(locker.lock("invoice:42").try_lock().await.unwrap().is_none());
    let limit = Duration::from_millis(20);
    let late = locker.lock("invoice:42").lock_timeout(limit).await;
    assert!(matches!(late, Err(LockError::Timeout { .. })), "{late:?}");
    let other = locker.lock("invoice:42");
    assert!(tokio::time::timeout(limit, other.lock()).await.is_err());
    assert!(matches!(locker.lock("").lock().await, Err(LockError::Name(_))));
    for outcome in ["granted", "busy", "timeout", "cancelled", "error"] {
        assert_eq!(outcomes("lock", outcome), Some(1.0), "{outcome}");
    }
    let seconds =
        Scrape::now().sum("leasehold_lock_wait_seconds_sum", &[("store", &store), ("outcome", "timeout")]);
    assert!(seconds.unwrap() >= limit.as_secs_f64(), "{seconds:?}");
    guard.release().await.unwrap();
    held("lock", 0.0).await;

    let reads = locker.rw_lock("catalogue").read().await.unwrap();
    held("rwlock", 1.0).await;
    stage.take_key_away("a", reads_key());
    let lost = [("store", store.as_str()), ("kind", "rwlock"), ("cause", "gone")];
    Scrape::until("leasehold_locks_lost_total", &lost, 1.0).await;
    held("rwlock", 0.0).await;
    assert!(reads.release().await.is_err());
    assert!(!Scrape::now().has("invoice:42") && !Scrape::now().has("catalogue"));
    locker.close().await;
}

fn reads_key() -> leasehold::Key {
    leasehold::Key::of(leasehold::Kind::RwLock, "catalogue")
}

/// M-02: a job that failed, and one that panicked, are told from one that has ended.
#[tokio::test(start_paused = true)]
async fn how_a_job_ended_is_told_by_the_reason_of_its_release() {
    Scrape::set_up();
    let locker = Locker::memory(&Memory::new(), quick("a")).unwrap();
    let name = "ends badly";
    let count = |reason| {
        let labels = [("name", name), ("transition", "released"), ("reason", reason)];
        Scrape::now().sum("leasehold_transitions_total", &labels)
    };
    let failed = locker.run(name, async |_: Lease| Err::<(), _>("it failed")).await;
    assert!(matches!(failed, Err(RunError::Job("it failed"))), "{failed:?}");
    assert_eq!((count("job_failed"), count("job_dropped"), count("job_ended")), (Some(1.0), Some(0.0), None));
    let of_task = locker.clone();
    let panics = tokio::spawn(async move {
        of_task.run(name, async |_: Lease| -> Result<(), Infallible> { panic!("it panicked") }).await
    });
    assert!(panics.await.unwrap_err().is_panic());
    let ended = locker.run(name, async |_: Lease| Ok::<_, Infallible>(())).await;
    assert_eq!(ended.unwrap(), Some(()));
    assert_eq!(
        (count("job_failed"), count("job_dropped"), count("job_ended")),
        (Some(1.0), Some(1.0), Some(1.0))
    );
    locker.close().await;
}

/// M-05: a job that blocks its thread past its grace.
#[test]
fn a_job_that_cannot_be_dropped_is_counted() {
    Scrape::set_up();
    let (memory, name) = (Memory::new(), "cannot be dropped");
    let locker = Locker::memory(&memory, quick("blocks")).unwrap();
    let ((unblock, blocked), (begins, begun)) = (mpsc::channel::<()>(), mpsc::channel());
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (stop, of_thread) = (CancellationToken::new(), locker.clone());
    let until_then = stop.clone();
    let blocks = thread::spawn(move || {
        let job = async |lease: Lease| {
            begins.send(()).unwrap();
            blocked.recv().ok();
            lease.cancelled().await;
            Ok::<_, Infallible>(())
        };
        runtime().block_on(of_thread.candidate(name).until(until_then).run(job)).unwrap()
    });
    begun.recv().unwrap();
    runtime().block_on(async {
        Scrape::until("leasehold_leading", &[("name", name)], 1.0).await;
        memory.kill("blocks");
        Scrape::until("leasehold_overruns_total", &[("name", name), ("kind", "lease")], 1.0).await;
        Scrape::until("leasehold_leading", &[("name", name)], 0.0).await;
    });
    stop.cancel();
    drop(unblock);
    assert_eq!(blocks.join().unwrap(), None);
}

/// M-06: what became of the slots of a job that is done once per interval.
#[tokio::test(start_paused = true)]
async fn slots_are_counted_by_what_became_of_them() {
    Scrape::set_up();
    let (memory, stop) = (Memory::new(), CancellationToken::new());
    let locker = Locker::memory(&memory, Options::default()).unwrap();
    let (hour, runs) = (Duration::from_hours(1), std::cell::Cell::new(0));
    let every = locker.every("counted slots", hour).until(stop.clone());
    let serves = every.run(async |_: Slot| {
        runs.set(runs.get() + 1);
        match runs.get() {
            1 => Ok(()),
            2 => Err("it failed"),
            // Three slots begin meanwhile, all of them while this one is served.
            3 => {
                tokio::time::sleep(3 * hour).await;
                Ok(())
            }
            4 => panic!("it panicked"),
            // Never ends by itself: crashes when its lock is lost.
            5 => {
                memory.kill(locker.identity());
                future::pending().await
            }
            _ => {
                stop.cancel();
                Ok(())
            }
        }
    });
    serves.await.unwrap();
    for (outcome, count) in
        [("ok", 3.0), ("error", 1.0), ("panic", 1.0), ("dropped", 1.0), ("crashed", 1.0), ("skipped", 3.0)]
    {
        let sum =
            Scrape::now().sum("leasehold_slots_total", &[("name", "counted slots"), ("outcome", outcome)]);
        assert_eq!(sum, Some(count), "{outcome}");
    }
    locker.close().await;
}

/// M-01: a candidate that is dropped with its Locker leaves no gauge behind.
#[tokio::test]
async fn a_run_that_is_dropped_leads_no_more() {
    Scrape::set_up();
    on_every_store(async |stage| {
        let (name, log) = (format!("dropped on {}", stage.kind()), Log::default());
        let mut leader = Member::join(stage, quick("a"), name.as_str(), &log);
        leader.leads().await;
        Scrape::until("leasehold_leading", &[("name", &name)], 1.0).await;
        leader.abort().await;
        Scrape::until("leasehold_leading", &[("name", &name)], 0.0).await;
        until("it is free", || stage.is_free(&name)).await;
    })
    .await;
}

/// M-01, M-02: a lease that somebody still has when the runtime is gone that its Locker ran on.
#[test]
fn a_lease_that_outlives_its_driver_is_lost_and_leads_no_more() {
    Scrape::set_up();
    let (memory, name) = (Memory::new(), "outlives its driver");
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let (kept, keeps) = mpsc::channel();
    let leads = async {
        let locker = Locker::memory(&memory, quick("a")).unwrap();
        tokio::spawn(async move {
            let job = async |lease: Lease| {
                kept.send(lease.clone()).unwrap();
                lease.cancelled().await;
                Ok::<_, Infallible>(())
            };
            locker.run(name, job).await
        });
    };
    runtime.block_on(leads);
    let lease = keeps.recv().unwrap();
    runtime.shutdown_timeout(Duration::from_mins(1));
    let count = |transition| {
        let labels = [("name", name), ("transition", transition)];
        Scrape::now().sum("leasehold_transitions_total", &labels).unwrap_or_default()
    };
    assert_eq!(Scrape::now().sum("leasehold_leading", &[("name", name)]), Some(0.0));
    assert_eq!(Scrape::now().sum("leasehold_deadline_timestamp_seconds", &[("name", name)]), Some(0.0));
    assert!((count("acquired") - count("released") - count("lost")).abs() < f64::EPSILON);
    assert!(!lease.is_held());
}

/// Ends terms and locks in every way that there is, at random instants, and begins them anew.
async fn storm(stage: &Stage, locker: &Locker, name: &str, seed: u64) {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut some = move |limit: u64| rng.random_range(0..limit);
    for _ in 0..30 {
        let (way, patience) = (some(9), Duration::from_millis(some(60)));
        let (stop, (eligible, watch)) = (CancellationToken::new(), tokio::sync::watch::channel(true));
        let (own, candidate) = (locker.clone(), locker.candidate(name).until(stop.clone()).eligible(watch));
        let candidate = if way == 8 { candidate.takeover_delay(patience / 4) } else { candidate };
        let run = tokio::spawn(async move {
            let job = async |lease: Lease| {
                match way {
                    0 => return Err("it failed"),
                    // As a panic does, but for the message.
                    1 => std::panic::resume_unwind(Box::new("it panicked")),
                    2 => lease.step_down(),
                    3 => return Ok(()),
                    4 => drop(own.step_down(lease.name()).await),
                    _ => {}
                }
                lease.cancelled().await;
                Ok(())
            };
            candidate.run(job).await
        });
        let (lock, rw_lock) = (locker.lock("stormy"), locker.rw_lock("stormy"));
        let section = async {
            match way % 4 {
                0 => drop(lock.lock().await),
                1 => drop(lock.try_lock().await.map(|guard| guard.map(LockGuard::release))),
                2 => drop(tokio::join!(rw_lock.read(), rw_lock.read())),
                _ => drop(rw_lock.write().await),
            }
        };
        tokio::time::timeout(patience, section).await.ok();
        match way {
            5 => stop.cancel(),
            6 => drop(eligible.send(false)),
            7 => stage.end_session(locker.identity()),
            _ => {}
        }
        tokio::time::sleep(patience / 2).await;
        if way == 5 {
            run.await.unwrap().ok();
        } else {
            run.abort();
            run.await.ok();
        }
    }
}

/// M-01, M-02, M-04: whatever ends them, at whatever instant: what began has ended once, and no gauge stays behind.
#[tokio::test]
async fn after_a_storm_everything_that_began_has_ended_once() {
    Scrape::set_up();
    on_every_store(async |stage| {
        let name = &format!("odd \"name\" in\ntwo lines, with \\ on {}", stage.kind());
        let lockers = ["a", "b", "c"].map(|who| stage.locker(quick(who)));
        let [a, b, c] = &lockers;
        tokio::join!(storm(stage, a, name, 1), storm(stage, b, name, 2), storm(stage, c, name, 3));
        Scrape::until("leasehold_leading", &[("name", name)], 0.0).await;
        let now = Scrape::now();
        let count = |transition| {
            now.sum("leasehold_transitions_total", &[("name", name), ("transition", transition)]).unwrap()
        };
        let (acquired, released, lost) = (count("acquired"), count("released"), count("lost"));
        assert!(acquired > 10.0 && (acquired - released - lost).abs() < f64::EPSILON, "{}", now.text());
        assert_eq!(now.sum("leasehold_deadline_timestamp_seconds", &[("name", name)]), Some(0.0));
        for locker in &lockers {
            locker.close().await;
        }
        // Other tests have Lockers in memory as well, where those of this test have no address of their own.
        let store = now.label("leasehold_leading", "store", &[("name", name)]);
        if store != "memory" {
            Scrape::until("leasehold_locks_held", &[("store", &store)], 0.0).await;
            Scrape::until("leasehold_sessions", &[("store", &store)], 0.0).await;
        }
    })
    .await;
}
