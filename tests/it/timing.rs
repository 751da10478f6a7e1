//! Exact times, on a paused clock over the store in memory.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use leasehold::{CancellationToken, Error, Lease, Locker, LossCause, Memory, Name, Options, Reason, State};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, sleep_until};

const fn ms(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds)
}

const fn s(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

#[expect(clippy::disallowed_methods, reason = "a test reads the paused clock as its users do")]
fn now() -> Instant {
    Instant::now()
}

fn locker(memory: &Memory, identity: &str, options: Options) -> Locker {
    Locker::memory(memory, options.identity(identity)).unwrap()
}

/// When the bodies of a job started and ended.
type Bodies = Arc<Mutex<Vec<(Instant, Option<Instant>)>>>;

/// A candidate whose job tells its leases, and stops that long after it was told to.
struct Candidate {
    leases: mpsc::UnboundedReceiver<Lease>,
    bodies: Bodies,
    shutdown: CancellationToken,
    run: JoinHandle<Option<()>>,
}

impl Candidate {
    fn start(memory: &Memory, locker: &Locker, name: &'static str, stops_after: Duration) -> Self {
        let (tell, leases) = mpsc::unbounded_channel();
        let bodies = Bodies::default();
        let shutdown = CancellationToken::new();
        let candidate = locker.candidate(name).until(shutdown.clone());
        let log = Arc::clone(&bodies);
        let run = async move {
            let job = |lease: Lease| {
                let body = Body::start(&log);
                tell.send(lease.clone()).unwrap();
                async move {
                    let _body = body;
                    lease.cancelled().await;
                    sleep(stops_after).await;
                    Ok::<(), std::convert::Infallible>(())
                }
            };
            candidate.run(job).await.unwrap()
        };
        Self { leases, bodies, shutdown, run: tokio::spawn(memory.on(locker.identity(), run)) }
    }

    async fn leads(&mut self) -> Lease {
        self.leases.recv().await.unwrap()
    }

    /// When its bodies started and ended.
    fn bodies(&self) -> Vec<(Instant, Option<Instant>)> {
        self.bodies.lock().unwrap().clone()
    }

    async fn stop(self) {
        self.shutdown.cancel();
        assert_eq!(self.run.await.unwrap(), None);
    }
}

struct Body(Bodies);

impl Body {
    fn start(bodies: &Bodies) -> Self {
        bodies.lock().unwrap().push((now(), None));
        Self(Arc::clone(bodies))
    }
}

impl Drop for Body {
    fn drop(&mut self) {
        if let Some((_, ended)) = self.0.lock().unwrap().last_mut() {
            *ended = Some(now());
        }
    }
}

/// Waits until a count of statements is passed, and gives the instant.
async fn next_statement(memory: &Memory, identity: &str) -> Instant {
    let before = memory.statements(identity);
    while memory.statements(identity) == before {
        sleep(ms(1)).await;
    }
    now()
}

/// F-05
#[tokio::test(start_paused = true)]
async fn a_standby_asks_at_once_and_then_at_jittered_intervals() {
    let memory = Memory::new();
    let leader = locker(&memory, "leader", Options::default());
    let mut leads = Candidate::start(&memory, &leader, "job", s(0));
    leads.leads().await;

    let standby = locker(&memory, "standby", Options::default());
    let begun = now();
    let waits = Candidate::start(&memory, &standby, "job", s(0));
    let mut last = next_statement(&memory, "standby").await;
    assert!(last - begun <= ms(1), "the first attempt came after {:?}", last - begun);
    let mut intervals = Vec::new();
    for _ in 0..50 {
        let at = next_statement(&memory, "standby").await;
        intervals.push(at - last);
        last = at;
    }
    // A millisecond for the grain of this test's own looking.
    assert!(intervals.iter().all(|i| (s(5)..=ms(6_001)).contains(i)), "{intervals:?}");
    let (shortest, longest) = (intervals.iter().min().unwrap(), intervals.iter().max().unwrap());
    assert!(*longest > *shortest + ms(500), "the jitter spreads the polls: {intervals:?}");
    waits.stop().await;
    leads.stop().await;
}

/// F-22, D09: twenty replies in a row at 0.95 × the query timeout, at default options.
#[tokio::test(start_paused = true)]
async fn replies_slower_than_the_heartbeat_but_inside_of_the_query_timeout_keep_the_lease() {
    let memory = Memory::new();
    let locker = locker(&memory, "slow", Options::default());
    let mut candidate = Candidate::start(&memory, &locker, "job", s(0));
    let lease = candidate.leads().await;
    memory.slow("slow", ms(4_750), ms(4_750));
    let before = memory.statements("slow");
    while memory.statements("slow") < before + 20 {
        sleep(ms(100)).await;
        assert!(lease.is_held(), "lost: {:?}", lease.reason());
    }
    // Neither do the heartbeats, which follow each other without a pause now, starve another name.
    let mut other = Candidate::start(&memory, &locker, "other", s(0));
    let asked = now();
    other.leads().await;
    assert!(now() - asked <= s(20), "the other name was granted after {:?}", now() - asked);
    assert!(lease.is_held() && lease.reason().is_none());
    assert_eq!(candidate.bodies().len(), 1);
    memory.slow("slow", s(0), s(0));
    candidate.stop().await;
    other.stop().await;
}

/// F-17, F-21: a server that answers after the query timeout and one second. Closing the session would free the lease.
#[tokio::test(start_paused = true)]
async fn a_session_that_was_given_up_stays_open_until_its_jobs_have_ended() {
    let memory = Memory::new();
    let (old, new) = (locker(&memory, "old", Options::default()), locker(&memory, "new", Options::default()));
    let mut leads = Candidate::start(&memory, &old, "job", s(3));
    let mut beside = Candidate::start(&memory, &old, "beside", s(0));
    let (lease, lease_beside) = (leads.leads().await, beside.leads().await);
    let mut waits = Candidate::start(&memory, &new, "job", s(0));

    memory.slow("old", s(0), s(11));
    let sent = next_statement(&memory, "old").await;
    lease.cancelled().await;
    let limit = s(10);
    assert_eq!(lease.reason(), Some(Reason::Lost(LossCause::Timeout { limit })));
    assert_eq!(lease_beside.reason(), lease.reason());
    assert!((limit..=limit + ms(1)).contains(&(now() - sent + ms(1))), "told after {:?}", now() - sent);
    let told = now();
    // It may not lead again before we have looked.
    memory.slow("old", s(0), s(60));

    waits.leads().await;
    let (_, ended) = leads.bodies()[0];
    assert_eq!(ended.unwrap() - told, s(3));
    assert!(waits.bodies()[0].0 >= ended.unwrap());
    assert!(waits.bodies()[0].0 - ended.unwrap() <= s(6), "the connection was closed when the job had ended");
    memory.slow("old", s(0), s(0));
    for candidate in [waits, leads, beside] {
        candidate.stop().await;
    }
}

/// F-15, F-16, D19: a job that does not stop.
#[tokio::test(start_paused = true)]
async fn a_job_that_does_not_stop_is_dropped_at_the_end_of_its_grace_and_then_called_anew() {
    let memory = Memory::new();
    let locker = locker(&memory, "one", Options::default());
    let mut candidate = Candidate::start(&memory, &locker, "job", s(1_000));
    let lease = candidate.leads().await;
    memory.kill("one");
    let killed = now();
    lease.cancelled().await;
    assert_eq!(now(), killed, "the loss is told at once");
    assert_eq!(
        lease.reason().map(|reason| matches!(reason, Reason::Lost(LossCause::Closed { .. }))),
        Some(true)
    );
    candidate.leads().await;
    let bodies = candidate.bodies();
    assert_eq!(bodies[0].1, Some(killed + s(5)));
    assert!(bodies[1].0 >= killed + s(5), "no second call while the first lives");
    // It has to be dropped again, this time with the whole candidate.
    candidate.run.abort();
    assert!(candidate.run.await.unwrap_err().is_cancelled());
    locker.close().await;
}

/// F-15: what a job returns after the loss of its lease does not count.
#[tokio::test(start_paused = true)]
async fn a_value_that_comes_after_the_loss_is_not_returned() {
    let memory = Memory::new();
    let locker = locker(&memory, "one", Options::default());
    let calls = Mutex::new(0);
    let job = async |lease: Lease| {
        let call = {
            let mut calls = calls.lock().unwrap();
            *calls += 1;
            *calls
        };
        match call {
            1 => {
                memory.kill("one");
                lease.cancelled().await;
                Ok(1)
            }
            2 => {
                memory.kill("one");
                lease.cancelled().await;
                Err("too late")
            }
            call => Ok(call),
        }
    };
    assert_eq!(locker.run("job", job).await.unwrap(), Some(3));
    locker.close().await;
}

/// F-36, D11: silent partition, at default options: told at the query timeout, dropped before the server frees it.
#[tokio::test(start_paused = true)]
async fn a_silent_partition_leads_to_no_overlap_and_a_bounded_vacancy() {
    let memory = Memory::new();
    let options = Options::default();
    let bounds = options.bounds();
    let (old, new) = (locker(&memory, "old", options.clone()), locker(&memory, "new", options));
    let mut leads = Candidate::start(&memory, &old, "job", s(1_000));
    let lease = leads.leads().await;
    let mut waits = Candidate::start(&memory, &new, "job", s(0));
    let last_answered = next_statement(&memory, "old").await;
    memory.partition("old");

    lease.cancelled().await;
    assert!(now() - last_answered <= bounds.trust, "given up after {:?}", now() - last_answered);
    waits.leads().await;
    let started = waits.bodies()[0].0;
    let dropped = leads.bodies()[0].1.unwrap();
    assert!(dropped <= last_answered + bounds.trust + s(5) && dropped < started, "{dropped:?} {started:?}");
    assert!(
        started - last_answered <= bounds.vacancy_silent.unwrap() + ms(2),
        "{:?}",
        started - last_answered
    );

    memory.heal("old");
    waits.stop().await;
    leads.leads().await;
    leads.run.abort();
    assert!(leads.run.await.unwrap_err().is_cancelled());
}

/// F-36, D11: a process that stood still for longer than its deadline and grace polls its job no more.
#[tokio::test(start_paused = true)]
async fn a_job_is_not_polled_when_its_process_is_thawed_too_late() {
    let memory = Memory::new();
    let (old, new) = (locker(&memory, "old", Options::default()), locker(&memory, "new", Options::default()));
    let polled = Arc::new(Mutex::new(now()));
    let last = Arc::clone(&polled);
    let (tell, mut leases) = mpsc::unbounded_channel();
    let candidate = old.candidate("job");
    let run = async move {
        let job = async |lease: Lease| {
            tell.send(lease).unwrap();
            loop {
                *last.lock().unwrap() = now();
                sleep(ms(10)).await;
            }
        };
        candidate.run(job).await.map(|_: Option<()>| ()).map_err(|error: leasehold::RunError<String>| error)
    };
    let run = tokio::spawn(memory.on("old", run));
    let lease = leases.recv().await.unwrap();
    let mut waits = Candidate::start(&memory, &new, "job", s(0));
    sleep(s(3)).await;
    memory.freeze("old");
    let frozen = now();
    waits.leads().await;
    assert!(!lease.is_held(), "by the clock alone: nothing of that process has run");
    assert_eq!(lease.remaining(), s(0));
    memory.thaw("old");
    sleep(s(1)).await;
    assert!(
        *polled.lock().unwrap() <= frozen,
        "polled {:?} after it froze",
        *polled.lock().unwrap() - frozen
    );
    run.abort();
    assert!(run.await.unwrap_err().is_cancelled());
    waits.stop().await;
}

/// F-12, D07, D20: the lease is kept, and its heartbeats go on, for as long as the job takes to stop.
#[tokio::test(start_paused = true)]
async fn a_job_that_is_told_to_shut_down_keeps_its_lease_for_as_long_as_it_takes() {
    let memory = Memory::new();
    let (old, new) = (locker(&memory, "old", Options::default()), locker(&memory, "new", Options::default()));
    let mut leads = Candidate::start(&memory, &old, "job", s(3_600));
    let lease = leads.leads().await;
    let mut waits = Candidate::start(&memory, &new, "job", s(0));
    let told = now();
    leads.shutdown.cancel();
    lease.cancelled().await;
    assert_eq!(lease.reason(), Some(Reason::Shutdown));
    sleep_until(told + ms(3_599_999)).await;
    assert!(lease.is_held());
    assert_eq!(old.state("job"), State::Draining);
    assert_eq!(memory.holders(&Name::from("job")), ["old"]);
    waits.leads().await;
    assert_eq!(now(), told + s(3_600), "the release wakes the standby");
    assert_eq!(leads.run.await.unwrap(), None);
    assert!(!lease.is_held());
    waits.stop().await;
}

/// D07: a loss while draining escalates like any other.
#[tokio::test(start_paused = true)]
async fn a_loss_while_draining_gives_the_job_its_grace_and_no_more() {
    let memory = Memory::new();
    let locker = locker(&memory, "one", Options::default());
    let mut candidate = Candidate::start(&memory, &locker, "job", s(3_600));
    let lease = candidate.leads().await;
    candidate.shutdown.cancel();
    sleep(s(60)).await;
    memory.kill("one");
    let killed = now();
    assert_eq!(candidate.run.await.unwrap(), None);
    assert_eq!(now(), killed + s(5));
    assert!(matches!(lease.reason(), Some(Reason::Lost(_))));
}

#[tokio::test(start_paused = true)]
async fn a_drain_timeout_ends_a_job_that_does_not_stop() {
    let memory = Memory::new();
    let locker = locker(&memory, "one", Options::default().drain_timeout(Some(s(30))));
    let mut candidate = Candidate::start(&memory, &locker, "job", s(3_600));
    candidate.leads().await;
    let told = now();
    candidate.shutdown.cancel();
    assert_eq!(candidate.run.await.unwrap(), None);
    assert_eq!(now(), told + s(30));
    assert!(memory.holders(&Name::from("job")).is_empty());
}

/// F-37: the one that stepped down asks again after one jittered interval at the earliest, though nobody else does.
#[tokio::test(start_paused = true)]
async fn a_leader_that_stepped_down_asks_again_after_an_interval() {
    let memory = Memory::new();
    let locker = locker(&memory, "one", Options::default());
    let mut candidate = Candidate::start(&memory, &locker, "job", s(0));
    let lease = candidate.leads().await;
    let told = now();
    lease.step_down();
    candidate.leads().await;
    let after = now() - told;
    assert!((s(5)..ms(6_001)).contains(&after), "again after {after:?}");
    // A lease of an earlier term has no say in this one.
    lease.step_down();
    assert!(!lease.check().await);
    sleep(s(1)).await;
    assert_eq!(candidate.bodies().len(), 2);
    candidate.stop().await;
}

/// F-20: a check asks the store at once, and does not wait for the next heartbeat.
#[tokio::test(start_paused = true)]
async fn a_check_finds_a_lease_that_is_gone() {
    let memory = Memory::new();
    let locker = locker(&memory, "one", Options::default());
    let mut candidate = Candidate::start(&memory, &locker, "job", s(0));
    let lease = candidate.leads().await;
    assert!(lease.check().await);
    memory.revoke("one", &Name::from("job"));
    let revoked = now();
    assert!(lease.is_held(), "nobody has noticed");
    assert!(!lease.check().await);
    assert_eq!(now(), revoked);
    assert_eq!(lease.reason(), Some(Reason::Lost(LossCause::Gone)));
    candidate.stop().await;
}

/// The server is down when the first candidate comes: it keeps trying, and is not in a hurry.
#[tokio::test(start_paused = true)]
async fn a_candidate_waits_for_a_store_that_is_down_without_a_busy_loop() {
    let memory = Memory::new();
    memory.down();
    let locker = locker(&memory, "one", Options::default());
    let mut candidate = Candidate::start(&memory, &locker, "job", s(0));
    sleep(s(600)).await;
    assert_eq!(locker.state("job"), State::Standby);
    memory.up();
    let up = now();
    candidate.leads().await;
    assert!(now() - up <= s(5), "leads {:?} after the store is up", now() - up);
    candidate.stop().await;
}

/// F-37: a request that could not be sent in time is not sent much later, when somebody else may lead.
#[tokio::test(start_paused = true)]
async fn a_request_to_step_down_that_cannot_be_sent_is_given_up() {
    let memory = Memory::new();
    let (one, other) =
        (locker(&memory, "one", Options::default()), locker(&memory, "other", Options::default()));
    let mut candidate = Candidate::start(&memory, &one, "job", s(0));
    let lease = candidate.leads().await;
    memory.partition("other");
    let asked = now();
    let limit = s(10);
    assert!(matches!(other.step_down("job").await, Err(Error::Unanswered { limit: told }) if told == limit));
    assert_eq!(now() - asked, limit);
    memory.heal("other");
    sleep(s(60)).await;
    assert!(lease.is_held() && lease.reason().is_none());
    other.step_down("job").await.unwrap();
    lease.cancelled().await;
    candidate.stop().await;
}

/// F-05, F-18: a candidate that waits out its takeover delay, is asked to hand over, and stands by again.
#[tokio::test(start_paused = true)]
async fn a_candidate_that_handed_over_before_its_job_started_goes_on_asking() {
    let memory = Memory::new();
    let careful = locker(&memory, "careful", Options::default().takeover_delay(s(60)));
    let other = locker(&memory, "other", Options::default());
    let mut careful_leads = Candidate::start(&memory, &careful, "job", s(0));
    let mut state = careful.subscribe("job");
    state.wait_for(|state| state == State::Blocked).await.unwrap();
    // Longer than its polls, of which there are none while it holds.
    sleep(s(30)).await;
    let mut other_leads = Candidate::start(&memory, &other, "job", s(0));
    next_statement(&memory, "other").await;
    other.step_down("job").await.unwrap();
    other_leads.leads().await;
    sleep(s(30)).await;
    memory.freeze("other");
    memory.kill("other");
    let killed = now();
    careful_leads.leads().await;
    assert!(now() - killed <= s(60) + s(6), "after {:?}", now() - killed);
    memory.thaw("other");
    careful_leads.stop().await;
    other_leads.stop().await;
}

/// F-25: two jobs that both close the Locker they run on.
#[tokio::test(start_paused = true)]
async fn jobs_that_close_their_locker_do_not_wait_for_each_other() {
    let memory = Memory::new();
    let locker = locker(&memory, "one", Options::default());
    let closes = async |lease: Lease| {
        lease.check().await;
        locker.close().await;
        Ok::<(), String>(())
    };
    let (one, other) = tokio::join!(locker.run("one", closes), locker.run("other", closes));
    assert_eq!((one.unwrap(), other.unwrap()), (None, None));
    locker.close().await;
    assert_eq!(memory.sessions(), 0);
}

/// F-25: a release that is on its way is waited for, also by who closes from inside of a job.
#[tokio::test(start_paused = true)]
async fn a_close_waits_for_the_releases_under_way() {
    let memory = Memory::new();
    let locker = locker(&memory, "one", Options::default());
    let mut beside = Candidate::start(&memory, &locker, "beside", s(0));
    beside.leads().await;
    let closes = async |_: Lease| {
        memory.slow("one", s(3), s(0));
        locker.close().await;
        assert!(memory.holders(&Name::from("beside")).is_empty());
        Ok::<(), String>(())
    };
    assert_eq!(locker.run("job", closes).await.unwrap(), None);
    beside.stop().await;
}

/// A check is answered also where there is no session to ask on.
#[tokio::test(start_paused = true)]
async fn a_check_of_a_lost_lease_is_false_at_once() {
    let memory = Memory::new();
    let locker = locker(&memory, "one", Options::default());
    let mut candidate = Candidate::start(&memory, &locker, "job", s(3));
    let lease = candidate.leads().await;
    memory.down();
    lease.cancelled().await;
    let lost = now();
    assert!(!lease.check().await);
    assert_eq!(now(), lost);
    candidate.stop().await;
}

/// F-14: the job ended while its lease was held; that the release is not answered takes nothing away from that.
#[tokio::test(start_paused = true)]
async fn a_value_is_returned_also_when_the_release_goes_unanswered() {
    let memory = Memory::new();
    let locker = locker(&memory, "one", Options::default());
    let begun = now();
    let job = async |_: Lease| {
        memory.partition("one");
        Ok::<_, String>(42)
    };
    assert_eq!(locker.run("job", job).await.unwrap(), Some(42));
    assert_eq!(now() - begun, s(10));
    memory.heal("one");
    locker.close().await;
    assert!(memory.holders(&Name::from("job")).is_empty());
}

/// F-36: a process that stood still while the grant was on its way does not start the job under it.
#[tokio::test(start_paused = true)]
async fn a_job_is_not_called_under_a_lease_whose_deadline_has_passed() {
    let memory = Memory::new();
    let options = Options::default();
    let trust = options.bounds().trust;
    let locker = locker(&memory, "one", options);
    memory.slow("one", s(0), s(5));
    let begun = now();
    let mut candidate = Candidate::start(&memory, &locker, "job", s(0));
    while memory.grants(&Name::from("job")) == 0 {
        sleep(ms(1)).await;
    }
    memory.freeze("one");
    sleep(trust).await;
    memory.slow("one", s(0), s(0));
    memory.thaw("one");
    let lease = candidate.leads().await;
    assert_eq!(candidate.bodies().len(), 1);
    assert!(lease.term() > 1, "the first grant was not worth starting");
    assert!(now() - begun > trust);
    candidate.stop().await;
}
