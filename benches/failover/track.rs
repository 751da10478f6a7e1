//! The rounds of one scenario: two replicas on a server of their own, of which one leads; the fault; what comes of it.

use std::fs::{self, File};
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use leasehold::{Key, Kind, Options};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::judge::{Outcome, first, is_over, last_poll, successor};
use crate::log::{Event, Line, Reader, now};
use crate::replica::duration;
use crate::scenario::{Class, Scenario};
use crate::support::postgres::{Cluster, Proxy, Stop};

/// Processes that start, and everything that takes no time but on a busy machine.
const LIMIT: Duration = Duration::from_secs(30);

/// How often the log is looked at. The stamps in it do not depend on that.
const LOOK: Duration = Duration::from_millis(4);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Holder {
    Leasehold,
    Naive,
}

/// One scenario with one kind of holder.
#[derive(Clone, Debug)]
pub(crate) struct Track {
    pub(crate) scenario: Scenario,
    pub(crate) holder: Holder,
    pub(crate) options: Options,
    pub(crate) rounds: usize,
    /// How long to wait for somebody to take over from a naive holder.
    pub(crate) patience: Duration,
}

/// The servers, and the way to them.
struct Ground {
    // In the order of their end.
    proxy: Proxy,
    standby: Option<Cluster>,
    server: Cluster,
    dir: TempDir,
}

impl Track {
    /// Runs all rounds. `told` hears of each.
    pub(crate) fn run(&self, told: impl Fn(usize, Outcome)) -> anyhow::Result<Vec<Outcome>> {
        let mut ground = None;
        let mut outcomes = Vec::new();
        for number in 0..self.rounds {
            // A replica that was promoted is no replica any more.
            if self.scenario == Scenario::ReplicaPromoted {
                ground = None;
            }
            let ground = match &mut ground {
                Some(ground) => ground,
                none => none.insert(self.ground()?),
            };
            let outcome = self.round(ground, number).with_context(|| format!("round {}", number + 1))?;
            told(number + 1, outcome);
            outcomes.push(outcome);
        }
        Ok(outcomes)
    }

    fn ground(&self) -> anyhow::Result<Ground> {
        let server = Cluster::new();
        let standby = (self.scenario == Scenario::ReplicaPromoted).then(|| Cluster::standby_of(&server));
        let proxy = Proxy::to("127.0.0.1", server.port());
        Ok(Ground { proxy, standby, server, dir: tempfile::tempdir()? })
    }

    fn round(&self, ground: &mut Ground, number: usize) -> anyhow::Result<Outcome> {
        let mut round = Round::new(self, ground, number)?;
        let proxied = ground.proxy.port();
        let is_by_proxy = |who| match self.scenario {
            Scenario::ReplicaPromoted => true,
            Scenario::CutIdle | Scenario::CutInFlight | Scenario::CutInStatement | Scenario::SlowServer => {
                who == 'a'
            }
            _ => false,
        };
        let port = |who| if is_by_proxy(who) { proxied } else { ground.server.port() };
        let (a_port, b_port) = (port('a'), port('b'));
        let mut a = round.spawn('a', a_port)?;
        round.wait("a leads", LIMIT, |lines| first(lines).is_some())?;
        round.pass(self.lead(number))?;
        let b = round.spawn('b', b_port)?;
        let is_ready = |line: &Line| line.who == 'b' && line.event == Event::Ready;
        round.wait("b stands by", LIMIT, |lines| lines.iter().any(is_ready))?;
        round.pass(self.phase(number))?;

        let fault = round.inject(ground, &mut a)?;
        let lasts = self.scenario.lasts(&self.options.bounds());
        let patience = match (self.holder, self.scenario.class()) {
            (_, Class::Nothing) => lasts + self.heartbeat() + Duration::from_millis(1500),
            (Holder::Naive, _) if self.scenario.is_harmless_to_the_naive() => {
                self.scenario.bound(&self.options.bounds()).unwrap_or_default()
            }
            (Holder::Naive, _) => self.patience,
            (Holder::Leasehold, _) => self.scenario.bound(&self.options.bounds()).unwrap_or_default() + LIMIT,
        };
        let deadline = fault.at + patience;
        let mut undo = fault.undo;
        let started = loop {
            let started = successor(round.log.lines()?);
            if started.is_some() || now() > deadline {
                break started;
            }
            if undo.as_ref().is_some_and(|undo| undo.due.is_some_and(|due| now() >= due)) {
                undo = None;
            }
            std::thread::sleep(LOOK);
        };
        if started.is_none() && self.holder == Holder::Leasehold && self.scenario.class() != Class::Nothing {
            self.explain(ground, &round)?;
        }
        // A frozen holder is thawed, and a line is healed, when somebody else leads: now the old body shows whether it
        // knows.
        drop(undo);
        ground.proxy.heal();
        let Some(started) = started else {
            let kept = self.scenario.class() == Class::Nothing || self.scenario.is_harmless_to_the_naive();
            if kept && Self::holder_lives(&mut round)? {
                return Ok(Outcome::Kept);
            }
            return Ok(Outcome::Vacant { over: patience });
        };
        if self.scenario != Scenario::Kill {
            // A naive holder notices by its heartbeat, or never.
            let limit = self.heartbeat() + self.options.bounds().ttl;
            round.try_wait(limit, is_over)?;
        }
        round.pass(Duration::from_millis(200))?;
        drop((a, b));
        let lines = round.log.lines()?;
        let last = last_poll(lines).context("the first body was polled")?;
        let from = if self.scenario.class() == Class::Handover { last } else { fault.at };
        Ok(Outcome::Changed {
            vacancy: started.saturating_sub(from),
            overlap: last.saturating_sub(started),
            outage: fault.outage,
        })
    }

    /// Shows what the server and the replicas know, where nobody takes over.
    fn explain(&self, ground: &Ground, round: &Round<'_>) -> anyhow::Result<()> {
        let server = ground.standby.as_ref().unwrap_or(&ground.server).admin();
        eprintln!("{}: nobody takes over; the locks are {:?}", self.scenario.name(), server.advisory_rows());
        for row in server.sql(
            "SELECT pid, application_name, state, wait_event, now() - state_change AS since, query \
             FROM pg_stat_activity WHERE backend_type = 'client backend'",
        ) {
            eprintln!("    {row:?}");
        }
        for who in ['a', 'b'] {
            eprintln!("{who} said:\n{}", fs::read_to_string(round.said(who))?);
        }
        Ok(())
    }

    /// How much sooner the leader is there: its heartbeats and the polls of the other one, which have the same
    /// interval, shall not go in step. Spread evenly, and in another order than [`phase`](Self::phase).
    #[expect(clippy::cast_precision_loss, reason = "there are few rounds")]
    fn lead(&self, number: usize) -> Duration {
        if self.scenario.class() == Class::Handover && self.holder == Holder::Leasehold {
            return Duration::ZERO;
        }
        let golden = (5_f64.sqrt() - 1.0) / 2.0;
        self.heartbeat().mul_f64(((number + 1) as f64 * golden).fract())
    }

    /// Rounds meet the holder at different instants between two heartbeats.
    #[expect(clippy::cast_precision_loss, reason = "there are few rounds")]
    fn phase(&self, number: usize) -> Duration {
        let heartbeat = self.heartbeat();
        match self.scenario {
            // So that a heartbeat falls into the two seconds.
            Scenario::BackendStopped => {
                let next = heartbeat.saturating_sub(self.lead(number));
                (next + heartbeat).saturating_sub(Duration::from_secs(1))
            }
            _ if self.scenario.class() == Class::Handover && self.holder == Holder::Leasehold => {
                Duration::from_millis(200)
            }
            _ => heartbeat.mul_f64((number as f64 + 0.5) / self.rounds as f64),
        }
    }

    fn heartbeat(&self) -> Duration {
        duration(&self.options, "heartbeat_interval")
    }

    /// Whether the first body still ticks.
    fn holder_lives(round: &mut Round<'_>) -> anyhow::Result<bool> {
        let (lines, since) = (round.log.lines()?, now());
        if is_over(lines) {
            return Ok(false);
        }
        round.try_wait(LIMIT, |lines| last_poll(lines).is_some_and(|last| last > since))
    }
}

/// What was done to the holder, and since when.
struct Fault {
    at: Duration,
    /// For how long nobody could have been asked.
    outage: Duration,
    undo: Option<Undo>,
}

/// Undone when it is dropped.
struct Undo {
    due: Option<Duration>,
    #[expect(dead_code, reason = "dropped")]
    guard: Box<dyn std::any::Any>,
}

/// A process that is thawed when this is dropped.
struct Stopped(Pid);

impl Drop for Stopped {
    fn drop(&mut self) {
        kill_process(self.0, Signal::CONT).ok();
    }
}

struct Round<'a> {
    track: &'a Track,
    name: String,
    log: Reader,
    runtime: tokio::runtime::Runtime,
}

impl<'a> Round<'a> {
    fn new(track: &'a Track, ground: &Ground, number: usize) -> anyhow::Result<Self> {
        let log = Reader::create(ground.dir.path().join(format!("log-{number}")))?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        // A name of its own: what is left of the round before does not matter.
        Ok(Self { track, name: format!("job-{number}"), log, runtime })
    }

    /// The file that a replica's standard error goes to.
    fn said(&self, who: char) -> PathBuf {
        self.log.path().with_extension(who.to_string())
    }

    fn spawn(&self, who: char, port: u16) -> anyhow::Result<Replica> {
        let Track { scenario, holder, options, .. } = self.track;
        // Where it takes the deadline and the grace to stop a job, it is one that does not stop by itself.
        let hearing = if scenario.class() == Class::Silent { "deaf" } else { "hears" };
        let program: PathBuf = std::env::current_exe()?;
        let mut process = Command::new(program)
            .args(["replica", if *holder == Holder::Naive { "naive" } else { "leasehold" }])
            .arg(format!("postgres://postgres@127.0.0.1:{port}/postgres"))
            .args([&self.name, &options.clone().identity(who).to_string()])
            .arg(self.log.path())
            .args([&who.to_string(), hearing])
            // Alone in its group: of an orphaned one the kernel lets the stopped processes go on.
            .process_group(0)
            .stdin(Stdio::piped())
            .stderr(File::create(self.said(who))?)
            .spawn()?;
        let stdin = process.stdin.take();
        Ok(Replica { process, stdin })
    }

    fn inject(&self, ground: &mut Ground, a: &mut Replica) -> anyhow::Result<Fault> {
        let key = Key::of(Kind::Lease, self.name.as_str()).get();
        let backend = ground.server.admin().holder(key).context("nobody has the lock")?;
        let at = now();
        let mut fault = Fault { at, outage: Duration::ZERO, undo: None };
        match self.track.scenario {
            Scenario::GracefulStop | Scenario::GracefulStopUnpolled => a.say("stop")?,
            Scenario::StepDown => a.say("step-down")?,
            Scenario::Kill => a.process.kill()?,
            Scenario::BackendTerminated => ground.server.admin().terminate(backend),
            Scenario::ServerRestarted => {
                self.runtime.block_on(ground.server.restart(Stop::Fast));
                fault.outage = now().saturating_sub(at);
            }
            Scenario::ReplicaPromoted => {
                let standby = ground.standby.as_ref().context("there is a replica")?;
                self.runtime.block_on(ground.server.stop(Stop::Immediate));
                // Whoever comes meanwhile meets a server that only reads.
                ground.proxy.redirect(standby.port());
                // Not waiting in the server, which looks ten times a second.
                standby.admin().sql("SELECT pg_promote(false)");
                while standby.admin().one::<String>("SELECT pg_is_in_recovery()") == "t" {
                    ensure!(now() < at + LIMIT, "the replica is not promoted");
                }
                fault.outage = now().saturating_sub(at);
            }
            Scenario::Frozen => {
                kill_process(a.pid()?, Signal::STOP)?;
                fault.undo = Some(Undo { due: None, guard: Box::new(Stopped(a.pid()?)) });
            }
            Scenario::CutIdle => ground.proxy.cut(),
            Scenario::CutInFlight => {
                let last = || {
                    let sql = format!("SELECT query_start FROM pg_stat_activity WHERE pid = {backend}");
                    ground.server.admin().one::<String>(&sql)
                };
                let before = last();
                ground.proxy.cut_answers();
                // It falls silent with the next statement that it sends.
                while last() == before {
                    ensure!(now() < at + LIMIT, "the holder sends nothing");
                    std::thread::sleep(LOOK);
                }
                fault.at = now();
            }
            Scenario::CutInStatement => ground.proxy.cut_in_statement(),
            Scenario::SlowServer => {
                ground.proxy.delay(duration(&self.track.options, "query_timeout") + Duration::from_secs(1));
            }
            Scenario::BackendStopped => {
                let due = Some(at + self.track.scenario.lasts(&self.track.options.bounds()));
                fault.undo = Some(Undo { due, guard: Box::new(Cluster::freeze(backend)) });
            }
            Scenario::RuntimeBlocked => {
                let time = self.track.scenario.lasts(&self.track.options.bounds());
                a.say(&format!("block {}", time.as_millis()))?;
            }
        }
        Ok(fault)
    }

    fn wait(&mut self, what: &str, limit: Duration, holds: impl Fn(&[Line]) -> bool) -> anyhow::Result<()> {
        if self.try_wait(limit, holds)? {
            return Ok(());
        }
        let said = ['a', 'b'].map(|who| fs::read_to_string(self.said(who)).unwrap_or_default());
        bail!("not within {limit:?}: {what}; a and b said:\n{}\n{}", said[0], said[1]);
    }

    fn try_wait(&mut self, limit: Duration, holds: impl Fn(&[Line]) -> bool) -> anyhow::Result<bool> {
        let deadline = now() + limit;
        while !holds(self.log.lines()?) {
            if now() > deadline {
                return Ok(false);
            }
            std::thread::sleep(LOOK);
        }
        Ok(true)
    }

    fn pass(&mut self, time: Duration) -> anyhow::Result<()> {
        self.try_wait(time, |_| false).map(drop)
    }
}

/// A process that is killed when this is dropped.
struct Replica {
    process: Child,
    stdin: Option<ChildStdin>,
}

impl Replica {
    fn say(&mut self, command: &str) -> anyhow::Result<()> {
        use std::io::Write as _;
        let Some(stdin) = &mut self.stdin else { bail!("it hears nothing") };
        writeln!(stdin, "{command}").context("it has ended")
    }

    fn pid(&self) -> anyhow::Result<Pid> {
        Pid::from_raw(self.process.id().try_into()?).context("it has a number")
    }
}

impl Drop for Replica {
    fn drop(&mut self) {
        // One that has ended already is no matter.
        self.process.kill().ok();
        self.process.wait().ok();
    }
}
