//! Starts the replicas, ends them one after the other, and has the log judged.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, bail};
use rustix::process::{Pid, Signal, kill_process};
use tokio::process::{Child, Command};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{sleep, timeout};

use crate::judge::{Limits, Verdict, judge};
use crate::log::{Event, Line, read};
use crate::replica::options;
use crate::timeline::{Timeline, milliseconds, say};

/// What the bounds do not count: processes that start, and a machine that is busy with something else.
const ALLOWANCE: Duration = Duration::from_secs(2);

/// How long each leader is left alone.
const REIGN: Duration = Duration::from_millis(700);

/// How often the log is looked at.
const LOOK: Duration = Duration::from_millis(5);

/// How long a replica that was asked to stop may take to exit.
const EXIT: Duration = Duration::from_secs(5);

/// Runs the whole play, and tells whether what the replicas promised was kept.
pub(crate) async fn play() -> anyhow::Result<bool> {
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    // Whichever way this ends, dropping the stage kills its processes, and then the directory goes.
    tokio::select! {
        kept = perform() => kept,
        _ = terminate.recv() => bail!("stopped by SIGTERM"),
        _ = interrupt.recv() => bail!("stopped by SIGINT"),
    }
}

async fn perform() -> anyhow::Result<bool> {
    let directory = tempfile::Builder::new().prefix("leasehold-").tempdir()?;
    let store = match std::env::var("LEASEHOLD_STORE") {
        Ok(url) => url,
        Err(_) => format!("file:{}", directory.path().join("leases").display()),
    };
    let bounds = options().bounds();
    let crashed = bounds.vacancy_crashed.context("these options promise no bound after a crash")?;
    let limits = Limits { released: bounds.vacancy_released + ALLOWANCE, crashed: crashed + ALLOWANCE };

    say("Three replicas of a service, one job: who leads?");
    say(&format!("Retry interval 300 ms, so nobody leads for {} ms at worst.\n", crashed.as_millis()));
    let mut stage = Stage::set(&store, directory.path(), limits)?;
    let played = stage.script().await;
    // However that went, what still runs is stopped as a service would be, and the log is judged.
    stage.clear().await?;
    let verdict = judge(&stage.lines, limits);
    if verdict.body_lines == 0 {
        return played.map(|()| false);
    }
    say("");
    stage.timeline.lanes(&stage.lines);
    say("");
    if let Err(trouble) = &played {
        say(&format!("{} {trouble:#}", stage.timeline.failed()));
    }
    stage.pronounce(&verdict, bounds.vacancy_released.max(crashed));
    Ok(played.is_ok() && verdict.faults.is_empty())
}

/// A replica, as the process that started it sees it.
struct Replica {
    name: &'static str,
    process: Child,
    /// It was told, or made, to end.
    ending: bool,
}

struct Stage {
    replicas: Vec<Replica>,
    log: PathBuf,
    lines: Vec<Line>,
    timeline: Timeline,
    limits: Limits,
}

impl Stage {
    /// Starts the replicas.
    fn set(store: &str, directory: &Path, limits: Limits) -> anyhow::Result<Self> {
        let log = directory.join("log");
        std::fs::write(&log, "")?;
        // A name of its own, so that two of these plays on one store do not disturb each other.
        let job = format!("failover-{}", std::process::id());
        let timeline = Timeline::new();
        let program = std::env::current_exe()?;
        let replicas = ["a", "b", "c"].into_iter().map(|name| {
            let process = Command::new(&program)
                .args(["replica", name, store, &job])
                .arg(&log)
                .stdin(Stdio::piped())
                .kill_on_drop(true)
                .spawn()
                .context("cannot start a replica")?;
            Ok(Replica { name, process, ending: false })
        });
        let replicas = replicas.collect::<anyhow::Result<_>>()?;
        Ok(Self { replicas, log, lines: Vec::new(), timeline, limits })
    }

    /// What happens to the replicas.
    async fn script(&mut self) -> anyhow::Result<()> {
        self.until("nobody leads", |stage| stage.leader().is_some()).await?;
        self.until("not all replicas stand by", |stage| stage.count(Event::Ready) == 3).await?;
        self.wait(REIGN).await?;

        let first = self.ask_to_stop("asked to stop: finishes what it has begun")?;
        self.until("nobody took over", |stage| stage.leader().is_some_and(|next| next != first)).await?;
        self.wait(REIGN).await?;

        let second = self.kill()?;
        self.until("nobody took over", |stage| stage.leader().is_some_and(|next| next != second)).await?;
        self.wait(REIGN).await?;

        let third = self.ask_to_stop("asked to stop")?;
        self.until("the last replica does not leave", |stage| {
            stage.lines.iter().any(|line| line.event == Event::Gone && line.replica == third)
        })
        .await
    }

    /// The replica whose body wrote last, by the log, unless that body has ended.
    fn leader(&self) -> Option<&str> {
        let last = self.lines.iter().rfind(|line| line.is_body())?;
        (last.event != Event::End).then_some(&*last.replica)
    }

    fn count(&self, event: Event) -> usize {
        self.lines.iter().filter(|line| line.event == event).count()
    }

    fn ask_to_stop(&mut self, remark: &str) -> anyhow::Result<String> {
        let leader = self.end_leader(Signal::TERM)?;
        self.timeline.act(&leader, "SIGTERM", remark);
        Ok(leader)
    }

    fn kill(&mut self) -> anyhow::Result<String> {
        let leader = self.end_leader(Signal::KILL)?;
        self.timeline.act(&leader, "SIGKILL", "no time for anything");
        Ok(leader)
    }

    fn end_leader(&mut self, signal: Signal) -> anyhow::Result<String> {
        let leader = self.leader().context("nobody leads any more")?.to_owned();
        let replica = self.replicas.iter_mut().find(|replica| replica.name == leader);
        let replica = replica.context("an unknown replica leads")?;
        replica.ending = true;
        kill_process(replica.pid().context("the leader has exited")?, signal)?;
        Ok(leader)
    }

    /// Waits for something to show in the log, somewhat longer than the judge allows.
    async fn until(&mut self, or_else: &str, reached: impl Fn(&Self) -> bool) -> anyhow::Result<()> {
        let limit = self.limits.released.max(self.limits.crashed) + ALLOWANCE / 2;
        let watch = async {
            while !reached(self) {
                sleep(LOOK).await;
                self.look()?;
            }
            anyhow::Ok(())
        };
        match timeout(limit, watch).await {
            Ok(watched) => watched,
            Err(_) => bail!("{or_else} within {:.1} s", limit.as_secs_f64()),
        }
    }

    /// Lets time pass.
    async fn wait(&mut self, time: Duration) -> anyhow::Result<()> {
        let watch = async {
            loop {
                sleep(LOOK).await;
                self.look()?;
            }
        };
        timeout(time, watch).await.unwrap_or(Ok(()))
    }

    /// Shows what is new in the log. A replica that exits unasked ends the play: the reason is on its standard error.
    fn look(&mut self) -> anyhow::Result<()> {
        let lines = read(&self.log).context("the log cannot be read")?;
        for line in lines.iter().skip(self.lines.len()) {
            self.timeline.log(line);
        }
        self.lines = lines;
        for replica in self.replicas.iter_mut().filter(|replica| !replica.ending) {
            if let Some(status) = replica.process.try_wait()? {
                bail!("replica {} ended by itself: {status}", replica.name);
            }
        }
        Ok(())
    }

    /// Ends what still runs: gracefully, and where that does not help, by force.
    async fn clear(&mut self) -> anyhow::Result<()> {
        for replica in &mut self.replicas {
            if let Some(pid) = replica.pid().filter(|_| !replica.ending) {
                kill_process(pid, Signal::TERM)?;
            }
            replica.ending = true;
        }
        for replica in &mut self.replicas {
            if timeout(EXIT, replica.process.wait()).await.is_err() {
                self.timeline.act(replica.name, "SIGKILL", "did not stop when it was asked to");
                replica.process.kill().await?;
            }
        }
        self.look()
    }

    fn pronounce(&self, verdict: &Verdict, bound: Duration) {
        for fault in &verdict.faults {
            say(&format!("{} {fault}", self.timeline.failed()));
        }
        if verdict.faults.is_empty() {
            let passed = self.timeline.passed();
            say(&format!("{passed} never two leaders: {} lines of their jobs, in order", verdict.body_lines));
            say(&format!(
                "{passed} never none for long: {} after a release, {} after a crash",
                milliseconds(&verdict.released),
                milliseconds(&verdict.crashed)
            ));
            say(&format!(
                "  bound: {} ms, and {} s for a busy machine",
                bound.as_millis(),
                ALLOWANCE.as_secs()
            ));
        }
    }
}

impl Replica {
    /// The process, unless it has exited and its number may be another's.
    fn pid(&self) -> Option<Pid> {
        Pid::from_raw(i32::try_from(self.process.id()?).ok()?)
    }
}
