//! Which rounds there are, and how many at once.

use std::collections::{BTreeMap, VecDeque};
use std::process::ExitCode;
use std::sync::Mutex;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use leasehold::Options;

use crate::judge::{Outcome, Spread, Summary};
use crate::log::now;
use crate::report::{Row, notes, table};
use crate::scenario::{Class, Scenario};
use crate::support::postgres::Cluster;
use crate::track::{Holder, Track};
use crate::{raw, replica};

const USAGE: &str = "\
usage: cargo bench --bench failover -- [--quick] [--json] [--only TEXT]... [--rounds N] [--jobs N] [--no-naive]
       [--allowance DURATION]

Measures how long nobody leads, and how long two do, when things go wrong, and compares with a naive holder of a
session lock. Prints a Markdown table. Exits with 1 if a goal is missed.

  --quick      short intervals instead of the default options
  --json       a line of JSON for each scenario; the table goes to standard error
  --only TEXT  only the scenarios whose name has that text
  --rounds N   rounds of each scenario, 5 by default; hand-overs have 4 times as many
  --jobs N     how many scenarios at once, each on its own server; hand-overs are alone. Default 12, with --quick 8
  --no-naive   leasehold only
  --allowance DURATION
               for a machine that is busy with something else: goals that are not zero are that much longer";

/// How many times as many rounds hand-overs have: they take no time.
const HAND_OVERS: usize = 4;

struct Arguments {
    is_quick: bool,
    is_json: bool,
    has_naive: bool,
    only: Vec<String>,
    rounds: usize,
    jobs: Option<usize>,
    allowance: Duration,
}

pub(crate) fn main() -> anyhow::Result<ExitCode> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.first().is_some_and(|first| first == "replica") {
        replica::play(&arguments[1..])?;
        return Ok(ExitCode::SUCCESS);
    }
    let Some(arguments) = Arguments::parse(arguments)? else {
        println!("{USAGE}");
        return Ok(ExitCode::SUCCESS);
    };
    measure(&arguments)
}

impl Arguments {
    /// `None` is a cry for help.
    fn parse(arguments: Vec<String>) -> anyhow::Result<Option<Self>> {
        let mut parsed = Self {
            is_quick: false,
            is_json: false,
            has_naive: true,
            only: Vec::new(),
            rounds: 5,
            jobs: None,
            allowance: Duration::ZERO,
        };
        let mut arguments = arguments.into_iter();
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().with_context(|| format!("{argument} needs a value\n{USAGE}"));
            match argument.as_str() {
                "-h" | "--help" => return Ok(None),
                "--quick" => parsed.is_quick = true,
                "--json" => parsed.is_json = true,
                "--no-naive" => parsed.has_naive = false,
                "--only" => parsed.only.push(value()?),
                "--rounds" => parsed.rounds = value()?.parse().context("--rounds needs a number")?,
                "--jobs" => parsed.jobs = Some(value()?.parse().context("--jobs needs a number")?),
                "--allowance" => parsed.allowance = humantime::parse_duration(&value()?)?,
                // Cargo says that to every bench.
                "--bench" => {}
                other => bail!("there is no {other}\n{USAGE}"),
            }
        }
        ensure!(parsed.rounds > 0 && parsed.jobs != Some(0), "a number is zero\n{USAGE}");
        Ok(Some(parsed))
    }

    /// With short intervals a ttl of 2.75 s.
    fn options(&self) -> Options {
        if !self.is_quick {
            return Options::default();
        }
        Options::default()
            .retry_interval(Duration::from_millis(100))
            .heartbeat_interval(Duration::from_millis(100))
            .query_timeout(Duration::from_secs(1))
            .stop_grace(Duration::from_millis(500))
    }

    fn jobs(&self) -> usize {
        self.jobs.unwrap_or(if self.is_quick { 8 } else { 12 })
    }

    fn track(&self, scenario: Scenario, holder: Holder) -> Track {
        let is_many = scenario.class() == Class::Handover && holder == Holder::Leasehold;
        let options = match (scenario, holder) {
            // It polls, and has nothing else.
            (Scenario::GracefulStopUnpolled, Holder::Naive) => self.options(),
            _ => scenario.options(&self.options()),
        };
        let patience = Duration::from_secs(if self.is_quick { 6 } else { 60 });
        Track {
            scenario,
            holder,
            options,
            rounds: self.rounds * if is_many { HAND_OVERS } else { 1 },
            patience,
        }
    }
}

type Outcomes = BTreeMap<(&'static str, bool), Vec<Outcome>>;

fn measure(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let is_asked_for = |scenario: &Scenario| {
        arguments.only.is_empty() || arguments.only.iter().any(|text| scenario.name().contains(text.as_str()))
    };
    let scenarios: Vec<Scenario> = Scenario::ALL.into_iter().filter(is_asked_for).collect();
    ensure!(
        !scenarios.is_empty(),
        "no scenario has that name; there are: {:?}",
        Scenario::ALL.map(Scenario::name)
    );
    let since = now();
    let server = Cluster::new();
    let version: String = server.admin().one("SHOW server_version");
    let mut outcomes = Outcomes::new();
    let (alone, beside): (Vec<_>, Vec<_>) = scenarios
        .iter()
        .flat_map(|&scenario| {
            [Holder::Leasehold, Holder::Naive].map(|holder| arguments.track(scenario, holder))
        })
        .filter(|track| arguments.has_naive || track.holder == Holder::Leasehold)
        .partition(|track| track.scenario.class() == Class::Handover && track.holder == Holder::Leasehold);
    // Milliseconds are measured alone, and what is possible at least before and after them, since machines are noisy.
    let mut raw = BTreeMap::new();
    for track in alone {
        let name = track.scenario.name();
        let mut costs = raw::hand_overs(&server.options())?;
        run_all(vec![track], 1, &mut outcomes)?;
        costs.extend(raw::hand_overs(&server.options())?);
        raw.extend(Spread::of(costs.into_iter()).map(|costs| (name, costs)));
    }
    run_all(beside, arguments.jobs(), &mut outcomes)?;

    let rows = scenarios
        .iter()
        .map(|&scenario| row(arguments, scenario, raw.get(scenario.name()).copied(), &outcomes));
    let rows = rows.collect::<anyhow::Result<Vec<_>>>()?;
    let summary = format!(
        "{}\n{}Median, worst; of {} rounds, hand-overs of {}. PostgreSQL {version}, loopback. Up to {} scenarios at once, \
         each on its own server; hand-overs alone. All of it took {} s. Options: {}",
        table(&rows),
        notes(&rows),
        arguments.rounds,
        arguments.rounds * HAND_OVERS,
        arguments.jobs(),
        now().saturating_sub(since).as_secs(),
        arguments.options().identity("-"),
    );
    if arguments.is_json {
        for row in &rows {
            println!("{}", row.json());
        }
        eprintln!("{summary}");
    } else {
        println!("{summary}");
    }
    Ok(if rows.iter().all(Row::is_ok) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn row(
    arguments: &Arguments,
    scenario: Scenario,
    raw: Option<Spread>,
    outcomes: &Outcomes,
) -> anyhow::Result<Row> {
    let summary = |is_naive| outcomes.get(&(scenario.name(), is_naive)).and_then(|all| Summary::of(all));
    let options = arguments.track(scenario, Holder::Leasehold).options;
    Ok(Row {
        scenario,
        goal: scenario.goal(&options.bounds()).with(arguments.allowance),
        options,
        ours: summary(false).with_context(|| format!("{} was not measured", scenario.name()))?,
        naive: summary(true),
        raw,
    })
}

/// Runs them, so many at once, the longest first.
fn run_all(mut tracks: Vec<Track>, jobs: usize, outcomes: &mut Outcomes) -> anyhow::Result<()> {
    tracks.sort_by_key(|track| match (track.scenario.class(), track.holder) {
        (Class::Silent, Holder::Naive) | (Class::Nothing, _) => 0,
        (Class::Silent, Holder::Leasehold) => 1,
        (Class::Handover | Class::Crash, _) => 2,
    });
    let (queue, done) = (Mutex::new(VecDeque::from(tracks)), Mutex::new(Vec::new()));
    let work = || {
        loop {
            let next = queue.lock().unwrap().pop_front();
            let Some(track) = next else { break };
            let name = track.scenario.name();
            let is_naive = track.holder == Holder::Naive;
            let who = if is_naive { "naive: " } else { "" };
            let outcome = track.run(|round, outcome| eprintln!("{who}{name}, round {round}: {outcome:?}"));
            let outcome = outcome.with_context(|| format!("{who}{name}"));
            done.lock().unwrap().push(((name, is_naive), outcome));
        }
    };
    thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(work);
        }
    });
    for (key, outcome) in done.into_inner().unwrap() {
        outcomes.insert(key, outcome?);
    }
    Ok(())
}
