//! Leaders that the server does not hear any more, or that do not hear it in time: on real servers, as processes.
//!
//! The leader is `a`, its body does not stop when it is told to, and the standby `b` is near the server.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::process::Command;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use leasehold::{Key, Kind, Lease, Locker, Options, Reason, Sabotage, State};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use sqlx::postgres::PgConnectOptions;

use crate::support::log::assert_one_at_a_time;
use crate::support::postgres::{Cluster, Login, PgBouncer, PoolMode, Proxy, RemoteHost};
use crate::support::replica::{Lines, PROGRAM, Replica};
use crate::support::{AT_ONCE, Log, Member, block, now, pass, quick, until};

/// How a leader falls silent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Silence {
    /// The line is cut between two statements.
    Idle,
    /// The line is cut when a statement has reached the server; its answer is lost.
    InFlight,
    /// The line is cut when half a statement has reached the server.
    HalfAStatement,
    /// The server answers, but later than the leader waits for an answer.
    Late,
    /// Its host is off the network.
    Vanished,
    /// Its process is stopped.
    Frozen,
    /// Its process is stopped, and the line is cut: when it goes on, nobody tells it what has happened.
    FrozenAndCutOff,
    /// Its process is stopped, and the server ends its session.
    FrozenAndEnded,
}

impl Silence {
    async fn begin(self, scene: &Scene, leader: &Replica) {
        if self.is_frozen() {
            // Right after a tick: the next one is far away, so it does not stop in the middle of one.
            scene.lines.wait_for("a tick", scene.lines.all().len()).await;
            leader.stop().await;
        }
        match self {
            Self::Idle => scene.proxy.cut(),
            Self::FrozenAndCutOff => {
                // An answer that is on its way arrives, and tells nothing of what comes then.
                pass(Duration::from_millis(100)).await;
                scene.proxy.cut();
            }
            Self::InFlight => scene.proxy.cut_answers(),
            Self::HalfAStatement => scene.proxy.cut_in_statement(),
            Self::Late => scene.proxy.delay(TOO_LATE),
            Self::Vanished => scene.host().vanish(),
            Self::Frozen => {}
            Self::FrozenAndEnded => scene.cluster.admin().terminate(scene.holder().unwrap()),
        }
    }

    async fn end(self, scene: &Scene, leader: &Replica, ttl: Duration) {
        if self == Self::FrozenAndEnded {
            // Its deadline, and the grace: another one leads earlier than that.
            pass(ttl).await;
        }
        if self.is_frozen() {
            leader.cont();
            scene.lines.wait_for("a end 1", 0).await;
        }
        match self {
            Self::Vanished => scene.host().reappear(),
            _ => scene.proxy.heal(),
        }
    }

    const fn is_frozen(self) -> bool {
        matches!(self, Self::Frozen | Self::FrozenAndCutOff | Self::FrozenAndEnded)
    }
}

/// The query timeout of [`quick`] options, and 1 s.
const TOO_LATE: Duration = Duration::from_secs(2);

/// A server, and how the leader comes to it: by a proxy, or from a host of its own.
struct Scene {
    lines: Lines,
    proxy: Proxy,
    host: Option<RemoteHost>,
    cluster: Cluster,
}

impl Scene {
    /// `None` where there is to be no host that can vanish.
    fn for_a(silence: Silence) -> Option<Self> {
        if silence != Silence::Vanished {
            return Some(Self::on(Cluster::new(), None));
        }
        let host = RemoteHost::new()?;
        Some(Self::on(Cluster::with(Login::Trust, &[&host.listen_addresses()]), Some(host)))
    }

    fn on(cluster: Cluster, host: Option<RemoteHost>) -> Self {
        Self { lines: Lines::new(), proxy: Proxy::to("127.0.0.1", cluster.port()), host, cluster }
    }

    fn host(&self) -> &RemoteHost {
        self.host.as_ref().expect("the scene has a host that can vanish")
    }

    /// Starts the leader, which may be broken in some way, and waits until it leads.
    async fn leader(&self, behaviour: &str, broken: Option<&str>) -> Replica {
        let how: Vec<&str> = [behaviour].into_iter().chain(broken).collect();
        let (command, url) = match &self.host {
            Some(host) => (host.command(PROGRAM), host.url(&self.cluster)),
            None => (
                Command::new(PROGRAM),
                format!("postgres://postgres@127.0.0.1:{}/postgres", self.proxy.port()),
            ),
        };
        let leader = Replica::by(command, &url, &options("a"), "job", &self.lines, &how);
        self.lines.wait_for("a start 1", 0).await;
        leader
    }

    /// Starts the standby, and waits until it stands by.
    async fn standby(&self) -> Replica {
        let url = self.cluster.url("postgres", "", "postgres");
        let standby = Replica::by(Command::new(PROGRAM), &url, &options("b"), "job", &self.lines, &["hold"]);
        self.until_one_waits().await;
        standby
    }

    async fn until_one_waits(&self) {
        until("one stands by", || self.cluster.admin().waiters(Key::of(Kind::Lease, "job")) == 1).await;
    }

    /// The process of the server that has the lease.
    fn holder(&self) -> Option<i32> {
        self.cluster.admin().holder(Key::of(Kind::Lease, "job").get())
    }

    /// Ends a replica in order.
    async fn end(mut replica: Replica) {
        replica.terminate();
        assert!(replica.wait().await.success(), "{}", replica.who);
    }

    async fn until_nothing_is_left(&self) {
        until("the sessions are gone", || self.cluster.admin().backends("leasehold/%").is_empty()).await;
        assert!(self.cluster.admin().advisory_rows().is_empty());
    }
}

fn options(who: &str) -> Options {
    // What ends a stubborn job at the end of the test.
    quick(who).drain_timeout(Some(Duration::from_millis(100)))
}

/// What the bodies wrote in the course of a silence.
struct Story {
    lines: Vec<String>,
    /// The number of the line after the standby's start.
    taken_over: usize,
}

impl Story {
    /// What the leader's body wrote after another one had started.
    fn old_body_afterwards(&self) -> Vec<&str> {
        let lines = self.lines[self.taken_over..].iter().map(String::as_str);
        lines.filter(|line| line.starts_with("a ") && line.ends_with(" 1")).collect()
    }

    /// No body started before the other one had ended, and that of the leader ended before the standby led.
    #[track_caller]
    fn assert_no_overlap(&self) {
        let what: Vec<&str> =
            self.lines.iter().map(String::as_str).filter(|line| !line.contains("tick")).collect();
        assert_eq!(what[..3], ["a start 1", "a end 1", "b start 1"], "{what:?}");
        assert!(assert_one_at_a_time(what.into_iter()) >= 3);
    }
}

/// A leader falls silent, and in time the standby leads instead. Then the leader is heard again, stands by, and takes
/// over when the other one leaves. `None` where that fault cannot be had.
async fn silence(silence: Silence, broken: Option<&str>) -> Option<Story> {
    let scene = Scene::for_a(silence)?;
    let bounds = options("a").bounds();
    let vacancy_bound = bounds.vacancy_silent.unwrap() + Duration::from_secs(1);
    let a = scene.leader("stubborn", broken).await;
    let b = scene.standby().await;

    silence.begin(&scene, &a).await;
    let since = now();
    let taken_over = scene.lines.wait_for("b start", 0).await;
    let vacancy = since.elapsed();
    println!("{silence:?}: another one led after {vacancy:?}; the bound is {vacancy_bound:?}");
    assert!(vacancy < vacancy_bound + AT_ONCE, "{vacancy:?}");
    // Several ticks of the old body, if it were alive.
    for _ in 0..3 {
        scene.lines.wait_for("b tick", scene.lines.all().len()).await;
    }
    silence.end(&scene, &a, bounds.ttl).await;

    scene.until_one_waits().await;
    Scene::end(b).await;
    scene.lines.wait_for("a start", taken_over).await;
    Scene::end(a).await;
    scene.until_nothing_is_left().await;
    Some(Story { lines: scene.lines.all(), taken_over })
}

async fn no_overlap(kind: Silence) {
    if let Some(story) = silence(kind, None).await {
        story.assert_no_overlap();
    }
}

/// F-29: the leader is cut off between two statements.
#[tokio::test]
async fn a_leader_that_is_cut_off_has_ended_before_another_one_starts() {
    no_overlap(Silence::Idle).await;
}

/// F-29: its statement reaches the server, which counts from then on; the leader counts from when it sent the last one
/// that was answered.
#[tokio::test]
async fn a_leader_that_is_cut_off_from_an_answer_has_ended_before_another_one_starts() {
    no_overlap(Silence::InFlight).await;
}

/// F-29: a server that has read half a statement still counts.
#[tokio::test]
async fn a_leader_that_is_cut_off_in_a_statement_has_ended_before_another_one_starts() {
    no_overlap(Silence::HalfAStatement).await;
}

/// F-17, F-23, F-29: the server answers after the query timeout + 1 s. The session stays open until the body has ended.
#[tokio::test]
async fn a_leader_that_is_answered_too_late_has_ended_before_another_one_starts() {
    no_overlap(Silence::Late).await;
}

/// F-29, D05, D06: packets are dropped both ways, and nobody is told. The process recovers without a restart.
#[tokio::test]
async fn a_leader_on_a_host_that_vanishes_has_ended_before_another_one_starts() {
    no_overlap(Silence::Vanished).await;
}

/// F-29, F-36, D11: stopped until another one leads; thawed, it polls its body no more.
#[tokio::test]
async fn a_leader_that_was_frozen_polls_its_body_no_more() {
    for kind in [Silence::Frozen, Silence::FrozenAndEnded, Silence::FrozenAndCutOff] {
        let story = silence(kind, None).await.unwrap();
        assert_eq!(story.old_body_afterwards(), ["a end 1"], "{kind:?}");
    }
}

/// F-29, the twin: without the deadline a thawed process goes on until it has news.
#[tokio::test]
async fn without_the_deadline_a_thawed_leader_leads_beside_another_one() {
    let story = silence(Silence::FrozenAndCutOff, Some("no-deadline")).await.unwrap();
    assert!(story.old_body_afterwards().contains(&"a tick 1"), "{:?}", story.lines);
}

/// F-17, the twin: closing the session is a release.
#[tokio::test]
async fn without_waiting_for_the_body_a_session_given_up_is_a_release() {
    let story = silence(Silence::Late, Some("close-before-end")).await.unwrap();
    assert!(story.old_body_afterwards().contains(&"a tick 1"), "{:?}", story.lines);
}

/// F-29, D05, the twin: without the server's ttl the lease stays with a session that nobody hears any more.
#[tokio::test]
async fn without_the_servers_ttl_nobody_leads_after_a_silent_partition() {
    let scene = Scene::for_a(Silence::Idle).unwrap();
    let a = scene.leader("stubborn", Some("no-server-ttl")).await;
    let b = scene.standby().await;
    let old = scene.holder().unwrap();
    Silence::Idle.begin(&scene, &a).await;
    scene.lines.wait_for("a end 1", 0).await;
    pass(options("a").bounds().vacancy_silent.unwrap() + AT_ONCE).await;
    assert_eq!(scene.holder(), Some(old));
    assert!(!scene.lines.all().iter().any(|line| line.starts_with("b start")));
    scene.cluster.admin().terminate(old);
    scene.lines.wait_for("b start", 0).await;
    scene.proxy.heal();
    scene.until_one_waits().await;
    Scene::end(a).await;
    Scene::end(b).await;
    scene.until_nothing_is_left().await;
}

/// F-36: the deadline has passed while the process stood still. A thread that polls nothing looks at the lease.
#[tokio::test]
async fn a_lease_is_over_at_the_first_look_after_a_long_standstill() {
    let scene = Scene::for_a(Silence::Frozen).unwrap();
    let a = scene.leader("look", None).await;
    let looked =
        |lines: &[String]| lines.iter().find(|line| line.contains("held") || line.contains("over")).cloned();
    // If it is stopped in the middle of a look, that tells nothing.
    for _ in 0..3 {
        let terms = scene.lines.count("start");
        a.stop().await;
        pass(options("a").bounds().trust + Duration::from_millis(1)).await;
        a.cont();
        until("it stands by and leads again", || scene.lines.count("start") > terms).await;
        if let Some(line) = looked(&scene.lines.all()) {
            assert_eq!(line, format!("a over {terms}"));
            return Scene::end(a).await;
        }
    }
    panic!("it was always in the middle of a look: {:?}", scene.lines.all());
}

/// F-29: fifteen cuts of all kinds, each at an instant of its own between two heartbeats or in the middle of one.
#[tokio::test]
async fn cuts_at_random_instants_lead_to_no_overlap() {
    const LANES: u64 = 3;
    const ROUNDS: usize = 5;

    let cluster = Arc::new(Cluster::new());
    let lanes = (0..LANES).map(|seed| tokio::spawn(cut_again_and_again(Arc::clone(&cluster), seed, ROUNDS)));
    for lane in lanes.collect::<Vec<_>>() {
        lane.await.unwrap();
    }
    until("nothing is left", || cluster.admin().backends("leasehold/%").is_empty()).await;
    assert!(cluster.admin().advisory_rows().is_empty());
}

/// Two contend for a name; whoever leads is cut off, in turn.
async fn cut_again_and_again(cluster: Arc<Cluster>, seed: u64, rounds: usize) {
    let mut random = StdRng::seed_from_u64(seed);
    let (log, name) = (Log::default(), format!("job {seed}"));
    let member = |who: &str| {
        let proxy = Proxy::to("127.0.0.1", cluster.port());
        let locker =
            Locker::postgres(cluster.options().port(proxy.port()), quick(&format!("{who}{seed}"))).unwrap();
        let member = Member::on(&locker, &name, who, &log);
        (member, proxy)
    };
    let mut leader = member("a");
    let mut lease = leader.0.leads().await;
    let mut standby = member("b");
    let key = Key::of(Kind::Lease, &name);
    until("one stands by", || cluster.admin().waiters(key) == 1).await;
    for round in 0..rounds {
        let phase = Duration::from_micros(random.random_range(0..200_000));
        pass(phase).await;
        let kind = random.random_range(0..3);
        match kind {
            0 => leader.1.cut(),
            1 => leader.1.cut_answers(),
            _ => leader.1.cut_in_statement(),
        }
        let since = now();
        let next = standby.0.leads().await;
        println!(
            "seed {seed}, round {round}: cut of kind {kind} after {phase:?}, led after {:?}",
            since.elapsed()
        );
        assert!(!lease.is_held() && matches!(lease.reason(), Some(Reason::Lost(_))), "{lease:?}");
        lease = next;
        leader.1.heal();
        (leader, standby) = (standby, leader);
    }
    for (member, _proxy) in [leader, standby] {
        member.stop().await.unwrap();
    }
    assert!(log.assert_one_at_a_time() > rounds);
}

/// D06: while a statement gets no answer, whoever asks about the lease gets one at once.
#[tokio::test]
async fn what_is_known_of_a_lease_is_told_at_once_while_the_server_is_silent() {
    let cluster = Cluster::new();
    let proxy = Proxy::to("127.0.0.1", cluster.port());
    // Whoever waited for the server here would wait for longer than the test allows.
    let options = quick("a").query_timeout(Duration::from_mins(1));
    let locker = Locker::postgres(cluster.options().port(proxy.port()), options).unwrap();
    let mut member = Member::on(&locker, "job", "a", &Log::default());
    let lease = member.leads().await;
    proxy.cut_answers();
    // Several heartbeats: one has reached the server.
    let deadline = {
        pass(Duration::from_millis(500)).await;
        lease.deadline()
    };
    let since = now();
    let mut longest = Duration::ZERO;
    for _ in 0..1_000 {
        let asked = now();
        assert!(lease.is_held() && lease.reason().is_none() && lease.deadline() == deadline);
        assert!(!lease.remaining().is_zero());
        assert!(matches!(locker.state("job"), State::Leading { term: 1, .. }));
        assert_eq!(locker.bounds().trust, Duration::from_mins(2));
        longest = longest.max(asked.elapsed());
    }
    println!("a thousand times in {:?}, at most {longest:?}", since.elapsed());
    assert!(longest < AT_ONCE / 10, "{longest:?}");
    proxy.heal();
    assert!(lease.check().await);
    member.stop().await.unwrap();
    locker.close().await;
}

/// D21, F-33: for 10 s, with a heartbeat of 1 s and a query timeout of 2 s: twice the ttl. The server sees the heartbeats
/// go on.
#[tokio::test]
async fn heartbeats_go_on_while_the_job_blocks_its_thread() {
    let cluster = Cluster::new();
    let options =
        |who| quick(who).heartbeat_interval(Duration::from_secs(1)).query_timeout(Duration::from_secs(2));
    let blocked_for = Duration::from_secs(10);
    assert!(blocked_for > options("a").bounds().ttl * 2);
    let locker = Locker::postgres(cluster.options(), options("a")).unwrap();
    let log = Log::default();
    let (job_log, of_thread) = (log.clone(), locker.clone());
    let blocking = thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(of_thread.run("job", async |lease: Lease| {
            let _body = job_log.body("a");
            block(blocked_for);
            Ok::<_, Infallible>((lease.term(), lease.is_held(), lease.reason()))
        }))
    });
    log.wait_for("a start", 1).await;
    let other = Locker::postgres(cluster.options(), options("b")).unwrap();
    let mut standby = Member::on(&other, "job", "b", &log);
    let mut heartbeats = BTreeSet::new();
    while !blocking.is_finished() {
        let sql = "SELECT query_start FROM pg_stat_activity WHERE application_name = 'leasehold/a'";
        heartbeats.insert(cluster.admin().sql(sql));
        pass(Duration::from_millis(100)).await;
    }
    assert_eq!(blocking.join().unwrap().unwrap(), Some((1, true, None)));
    println!("{} statements were seen", heartbeats.len());
    assert!(heartbeats.len() >= 5, "{heartbeats:?}");
    standby.leads().await;
    standby.stop().await.unwrap();
    log.assert_one_at_a_time();
    locker.close().await;
}

/// D21: a process that gets 5 ms of every 100 ms, as under a limit of its CPU time, for longer than the ttl.
#[tokio::test]
async fn a_leader_that_is_short_of_cpu_time_keeps_its_lease() {
    let scene = Scene::for_a(Silence::Idle).unwrap();
    let a = scene.leader("hold", None).await;
    let b = scene.standby().await;
    let since = now();
    while since.elapsed() < options("a").bounds().ttl * 3 / 2 {
        a.stop().await;
        pass(Duration::from_millis(95)).await;
        a.cont();
        pass(Duration::from_millis(5)).await;
    }
    let ticks = scene.lines.count("tick");
    scene.lines.wait_for("a tick 1", scene.lines.all().len()).await;
    println!("{ticks} ticks in {:?}", since.elapsed());
    assert_eq!((scene.lines.count("start"), scene.lines.count("end")), (1, 0));
    Scene::end(a).await;
    scene.lines.wait_for("b start", 0).await;
    Scene::end(b).await;
    scene.until_nothing_is_left().await;
}

/// F-31, D02, the twin: who trusts a pooler in transaction mode leads beside another one, or leaves the lock on a session
/// that is nobody's. It may go well for a while.
#[tokio::test]
async fn without_the_affinity_check_a_transaction_pooler_gives_two_leaders_or_none_ever() {
    let cluster = Cluster::new();
    let bouncer = PgBouncer::new(&cluster, PoolMode::Transaction, 2);
    let key = Key::of(Kind::Lease, "job").get();
    let options = |who| quick(who).trust_affinity(true).sabotage(Sabotage::NoMarker);
    for round in 0..20 {
        let log = Log::default();
        let [(a, one), (b, two)] = ["a", "b"].map(|who| {
            let target: PgConnectOptions = bouncer.url().parse().unwrap();
            let locker = Locker::postgres(target, options(who)).unwrap();
            (Member::on(&locker, "job", who, &log), locker)
        });
        until("one has taken the lock", || cluster.admin().holder(key).is_some()).await;
        tokio::join!(one.close(), two.close());
        assert_eq!((a.outcome().await.unwrap(), b.outcome().await.unwrap()), (None, None));
        let both_led = log.lines().get(1).is_some_and(|line| line.ends_with("start"));
        let is_stranded = cluster.admin().holder(key).is_some();
        println!("round {round}: both led: {both_led}; the lock is stranded: {is_stranded}");
        if both_led || is_stranded {
            return;
        }
    }
    panic!("a pooler in transaction mode did no harm");
}
