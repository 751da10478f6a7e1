//! From one leader to the next: by release, step down, eligibility; and the takeover delay.

use std::convert::Infallible;
use std::time::Duration;

use leasehold::{CancellationToken, Lease, LossCause, Memory, Reason, State};
use tokio::sync::watch;

use crate::support::member::over;
use crate::support::{AT_ONCE, Log, Member, Stage, now, on_every_store, quick, sleepy, until};

/// F-30: with an hour between two polls, twenty times; prints the median.
#[tokio::test]
async fn a_graceful_release_wakes_the_standby_at_once() {
    on_every_store(async |stage| {
        let log = Log::default();
        let mut leader = Member::join(stage, sleepy("0"), "job", &log);
        let mut gaps = Vec::new();
        leader.leads().await;
        for round in 1..=20 {
            let mut standby = Member::join(stage, sleepy(&round.to_string()), "job", &log);
            standby.stands_by().await;
            assert_eq!(leader.stop().await.unwrap(), None);
            standby.leads().await;
            let (ended, started) = (format!("{} end", round - 1), format!("{round} start"));
            gaps.push(log.nth(&started, 1) - log.nth(&ended, 1));
            leader = standby;
        }
        leader.stop().await.unwrap();
        assert_eq!(log.assert_one_at_a_time(), 21);
        gaps.sort();
        let median = gaps[gaps.len() / 2];
        println!("{}: from the end of a job to the start of the next: median {median:?}", stage.kind());
        assert!(median < AT_ONCE, "{gaps:?}");
    })
    .await;
}

/// F-37: by the lease, and from another Locker; the candidate that stepped down stands by.
#[tokio::test]
async fn a_leader_that_steps_down_is_followed_by_a_standby() {
    on_every_store(async |stage| {
        let log = Log::default();
        let mut a = Member::join(stage, sleepy("a"), "job", &log);
        let lease = a.leads().await;
        let mut b = Member::join(stage, quick("b"), "job", &log);
        b.stands_by().await;

        lease.step_down();
        let next = b.leads().await;
        assert_eq!(lease.reason(), Some(Reason::SteppedDown));
        until("it stands by again", || a.locker.state("job") == State::Standby).await;

        // `a` would ask by itself in an hour only, and only what is sent to it wakes it before: nobody has led since.
        let mut c = Member::join(stage, sleepy("c"), "job", &log);
        c.stands_by().await;
        a.locker.step_down("job").await.unwrap();
        c.leads().await;
        assert_eq!(next.reason(), Some(Reason::SteppedDown));
        for member in [a, b, c] {
            assert_eq!(member.stop().await.unwrap(), None);
        }
        assert_eq!(log.lines()[..5], ["a start", "a end", "b start", "b end", "c start"]);
    })
    .await;
}

/// F-37: alone, it leads again no earlier than after one interval.
#[tokio::test]
async fn a_leader_that_stepped_down_waits_for_an_interval_before_it_asks_again() {
    on_every_store(async |stage| {
        let (log, interval) = (Log::default(), Duration::from_millis(300));
        let mut member = Member::join(stage, quick("a").retry_interval(interval), "job", &log);
        for term in 1..=3 {
            let lease = member.leads().await;
            assert_eq!(lease.term(), term);
            lease.step_down();
        }
        member.leads().await;
        member.stop().await.unwrap();
        for term in 1..=3 {
            let pause = log.nth("a start", term + 1) - log.nth("a end", term);
            assert!(pause >= interval, "{pause:?}");
        }
    })
    .await;
}

/// F-38: a candidate that is not eligible does not take a free name; one that no longer is hands over.
#[tokio::test]
async fn an_ineligible_candidate_never_leads() {
    on_every_store(async |stage| {
        let log = Log::default();
        let (locker, shutdown) = (stage.locker(quick("a")), CancellationToken::new());
        let (eligible, is_eligible) = watch::channel(false);
        let candidate = locker.candidate("job").eligible(is_eligible).until(shutdown.clone());
        let job_log = log.clone();
        let run = tokio::spawn(async move {
            let job = async |lease: Lease| {
                let _body = job_log.body("a");
                lease.cancelled().await;
                job_log.write(&format!("a is told: {}", lease.reason().unwrap()));
                Ok::<_, Infallible>(())
            };
            candidate.run(job).await
        });
        until("it stands by", || locker.state("job") == State::Standby).await;
        // The name is free again and again, for whoever asks.
        for _ in 0..3 {
            let mut other = Member::join(stage, quick("b"), "job", &log);
            other.leads().await;
            other.stop().await.unwrap();
        }
        assert_eq!((log.count("b start"), log.count("a start")), (3, 0));
        assert!(stage.is_free("job"));

        eligible.send(true).unwrap();
        log.wait_for("a start", 1).await;
        let mut next = Member::join(stage, quick("c"), "job", &log);
        next.stands_by().await;
        eligible.send(false).unwrap();
        next.leads().await;
        until("it stands by again", || locker.state("job") == State::Standby).await;
        next.stop().await.unwrap();
        shutdown.cancel();
        assert_eq!(run.await.unwrap().unwrap(), None);
        let expected = ["a start", "a is told: no longer eligible", "a end", "c start", "c end"];
        assert_eq!(log.lines()[6..], expected);
    })
    .await;
}

/// F-39: the first start counts as one after an unclean end.
#[tokio::test]
async fn the_first_start_comes_after_the_takeover_delay() {
    on_every_store(async |stage| {
        let (log, delay, hour) = (Log::default(), Duration::from_millis(300), Duration::from_hours(1));
        let member = Member::join(stage, quick("a").takeover_delay(hour), "job", &log);
        until("it is blocked", || member.locker.state("job") == State::Blocked).await;
        assert!(!stage.is_free("job"));
        assert_eq!(member.stop().await.unwrap(), None);
        stage.until_free("job").await;
        assert!(log.lines().is_empty());

        let asked = now();
        let mut member = Member::join(stage, quick("a").takeover_delay(delay), "job", &log);
        let lease = member.leads().await;
        assert!(log.nth("a start", 1) - asked >= delay);
        assert!(lease.check().await);
        member.stop().await.unwrap();
    })
    .await;
}

/// F-39: with a delay of an hour.
#[tokio::test]
async fn a_clean_release_is_followed_without_the_takeover_delay() {
    on_every_store(async |stage| {
        let log = Log::default();
        let mut leader = Member::join(stage, quick("a"), "job", &log);
        leader.leads().await;
        let hour = Duration::from_hours(1);
        let mut next = Member::join(stage, sleepy("b").takeover_delay(hour), "job", &log);
        next.stands_by().await;
        let since = now();
        leader.stop().await.unwrap();
        next.leads().await;
        assert!(since.elapsed() < AT_ONCE);
        next.stop().await.unwrap();
        assert_eq!(log.lines(), ["a start", "a end", "b start", "b end"]);
    })
    .await;
}

/// F-39: a candidate that leaves while it waits out its delay has led nothing. Whoever is told that, asks at once, with an
/// hour between two polls, and waits out a delay too.
#[tokio::test]
async fn who_leaves_during_the_takeover_delay_makes_no_end_clean() {
    on_every_store(async |stage| {
        let (log, delay, hour) = (Log::default(), Duration::from_millis(300), Duration::from_hours(1));
        for how in ["stop", "abort", "step down", "close"] {
            let first = Member::join(stage, quick("a").takeover_delay(hour), "job", &log);
            until("it is blocked", || first.locker.state("job") == State::Blocked).await;
            let mut next = Member::join(stage, sleepy("b").takeover_delay(delay), "job", &log);
            next.stands_by().await;
            let left = now();
            let left_behind = match how {
                "stop" => {
                    first.stop().await.unwrap();
                    None
                }
                "abort" => {
                    first.abort().await;
                    None
                }
                "close" => {
                    first.locker.close().await;
                    Some(first)
                }
                _ => {
                    first.locker.step_down("job").await.unwrap();
                    Some(first)
                }
            };
            next.leads().await;
            assert!(left.elapsed() >= delay, "{how}: {:?}", left.elapsed());
            if let Some(first) = left_behind {
                first.stop().await.unwrap();
            }
            next.stop().await.unwrap();
            stage.until_nobody_waits("job").await;
        }
        assert_eq!(log.count("a start"), 0);
    })
    .await;
}

/// F-39: the session of a leader that stands still is killed.
#[tokio::test]
async fn a_killed_leader_is_followed_after_the_takeover_delay() {
    let (memory, log) = (Memory::new(), Log::default());
    let (stage, delay) = (Stage::Memory(memory.clone()), Duration::from_millis(300));
    let mut leader = Member::join(&stage, quick("a"), "job", &log);
    let lease = leader.leads().await;
    let mut next = Member::join(&stage, quick("b").takeover_delay(delay), "job", &log);
    next.stands_by().await;

    memory.freeze("a");
    let killed = now();
    memory.kill("a");
    next.leads().await;
    assert!(log.nth("b start", 1) - killed >= delay);
    memory.thaw("a");
    let why = over(&lease).await;
    assert!(matches!(why, Some(Reason::Lost(LossCause::Closed { .. } | LossCause::Deadline))), "{why:?}");
    leader.stop().await.unwrap();
    next.stop().await.unwrap();
}
