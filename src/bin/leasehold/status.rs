//! `leasehold status`: who leads, since when, from where, in which term, and how many stand by.

use std::collections::HashMap;
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use clap::Args;
use leasehold::{Election, Key, Name, Observer, Participant, Role, Snapshot};
use serde_json::{Value, json};

use crate::common::Common;
use crate::{exit, output};

#[derive(Debug, Args)]
#[command(after_help = "\
This is about leaders. Who holds a lock (`leasehold lock`) is told by the statement that `leasehold key --kind=rwlock NAME \
--sql` prints.

Names that you do not give are found by asking every live process; whoever holds something and does not answer within \
500 ms is shown as `no answer`, with the key and the process that the store shows: on PostgreSQL, that of the server.

With names, the exit code is 67 if nobody leads one of them. In JSON, `aside` are candidates that neither lead nor stand \
by (ineligible, or still ending a term that they have lost), and `silent` are processes that did not answer; `pid` is on \
PostgreSQL the server's process for that session.

Examples:
  leasehold status
  leasehold status sweeper nightly-cleanup
  leasehold status --json | jq -r '.elections[] | select(.leader == null) | .name'
  leasehold status --watch
  leasehold status --watch sweeper >> sweeper.log    # a line for each change")]
pub(crate) struct Arguments {
    /// Show these names only, also where nobody leads
    #[arg(value_name = "NAME")]
    names: Vec<String>,
    /// Print a JSON object; with --watch, one on a line of its own for each change
    #[arg(long)]
    json: bool,
    /// Go on looking: redraw on a terminal, else print a line for each change
    #[arg(short, long)]
    watch: bool,
    /// With --watch: how often to look [default: 2s]
    #[arg(long, value_name = "TIME", value_parser = interval, requires = "watch")]
    interval: Option<Duration>,
}

/// Often enough for a person who looks on.
const INTERVAL: Duration = Duration::from_secs(2);

/// Not without a pause: that asks the store for all that it can do.
fn interval(text: &str) -> Result<Duration, String> {
    let interval = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    if interval.is_zero() { Err("it must not be zero, for example 2s".to_owned()) } else { Ok(interval) }
}

const HEAD: [&str; 7] = ["NAME", "STATE", "LEADER", "SINCE", "FROM", "TERM", "STANDBYS"];

/// Which column is the state.
const STATE: usize = 1;

pub(crate) fn main(common: &Common, arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let names: Vec<Name> = arguments.names.iter().map(Name::from).collect();
    for name in &names {
        name.validate().map_err(leasehold::Error::from)?;
    }
    crate::runtime()?.block_on(async {
        let observer = common.observer().await?;
        let shown = if arguments.watch {
            watch(&observer, &names, arguments).await
        } else {
            let snapshot = View::of(observer.snapshot().await?, &names, observer.address());
            let text = if arguments.json { format!("{}\n", snapshot.json()) } else { snapshot.table() };
            output::print(&text).map(|_| snapshot.code())
        };
        observer.close().await;
        shown
    })
}

/// Until nobody reads it any more, or a signal comes.
async fn watch(observer: &Observer, names: &[Name], arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let interval = arguments.interval.unwrap_or(INTERVAL);
    let mut watch = observer.watch().every(interval);
    let redraws = output::is_terminal() && !arguments.json;
    let mut lines = HashMap::new();
    let mut interrupted = std::pin::pin!(exit::interrupted());
    loop {
        let snapshot = tokio::select! {
            code = &mut interrupted => return code,
            snapshot = watch.next() => snapshot,
        };
        let view = match snapshot {
            Ok(snapshot) => View::of(snapshot, names, observer.address()),
            // It may be back at the next look.
            Err(error @ leasehold::Error::Unanswered { .. }) => {
                output::complain(format_args!("{error}"));
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        let news = view.news(&mut lines);
        let text = if redraws {
            let at = humantime::format_rfc3339_seconds(wall_clock());
            // Home, and clear what was there.
            format!("\x1b[H\x1b[2J{at}, every {}\n\n{}", humantime::format_duration(interval), view.table())
        } else if news.is_empty() {
            if output::is_read() {
                continue;
            }
            return Ok(ExitCode::SUCCESS);
        } else if arguments.json {
            format!("{}\n", view.json())
        } else {
            news
        };
        if !output::print(&text)? {
            return Ok(ExitCode::SUCCESS);
        }
    }
}

/// What is shown of a snapshot.
struct View {
    at: SystemTime,
    elections: Vec<Election>,
    silent: Vec<Participant>,
    store: String,
    /// Names were asked for, and nobody leads one of them.
    is_leaderless: bool,
}

impl View {
    fn of(snapshot: Snapshot, names: &[Name], store: &str) -> Self {
        let at = wall_clock();
        if names.is_empty() {
            let Snapshot { elections, silent, .. } = snapshot;
            return Self { at, elections, silent, store: store.to_owned(), is_leaderless: false };
        }
        let elections: Vec<_> = names.iter().map(|name| snapshot.of(name)).collect();
        let is_leaderless = elections.iter().any(|election| election.leader.is_none());
        Self { at, elections, silent: Vec::new(), store: store.to_owned(), is_leaderless }
    }

    fn code(&self) -> ExitCode {
        ExitCode::from(if self.is_leaderless { exit::NOBODY_LEADS } else { 0 })
    }

    fn table(&self) -> String {
        if self.elections.is_empty() && self.silent.is_empty() {
            return format!("nobody leads, and nobody stands by, on {}\n", self.store);
        }
        let rows: Vec<[String; 7]> = self.elections.iter().map(row).collect();
        let width = |column: usize| {
            let cells = rows.iter().map(|row| row[column].chars().count());
            cells.chain([HEAD[column].len()]).max().unwrap_or_default()
        };
        let widths: Vec<usize> = (0..HEAD.len()).map(width).collect();
        let colours = output::has_colours();
        let line = |cells: &[String; 7], colour: &str| {
            let padded = cells.iter().zip(&widths).enumerate().map(|(column, (cell, &width))| {
                let cell = format!("{cell:<width$}");
                if column == STATE && colours && !colour.is_empty() {
                    format!("{colour}{cell}\x1b[0m")
                } else {
                    cell
                }
            });
            padded.collect::<Vec<_>>().join("  ").trim_end().to_owned() + "\n"
        };
        let mut text = line(&HEAD.map(str::to_owned), "");
        for (election, row) in self.elections.iter().zip(&rows) {
            text += &line(row, colour(election));
        }
        for participant in &self.silent {
            text.push_str("\nno answer from ");
            text.push_str(&participant_text(participant));
        }
        if !self.silent.is_empty() {
            text.push('\n');
        }
        text
    }

    /// A line for each name that is not as it was.
    fn news(&self, before: &mut HashMap<Key, String>) -> String {
        let at = humantime::format_rfc3339_seconds(self.at);
        let mut news = Vec::new();
        let mut gone: HashMap<Key, String> = std::mem::take(before);
        for election in &self.elections {
            let key = election.key;
            let line = plain(election);
            if gone.remove(&key).as_ref() != Some(&line) {
                news.push(format!("{at} {line}\n"));
            }
            before.insert(key, line);
        }
        for line in gone.values() {
            let name = line.split(" state=").next().unwrap_or(line);
            news.push(format!("{at} {name} state=gone\n"));
        }
        news.concat()
    }

    fn json(&self) -> Value {
        json!({
            "at": humantime::format_rfc3339_millis(self.at).to_string(),
            "elections": self.elections.iter().map(|it| self.election(it)).collect::<Vec<_>>(),
            "silent": self.participants(&self.silent),
        })
    }

    fn election(&self, election: &Election) -> Value {
        json!({
            "name": election.name.as_ref().map(Name::as_str),
            "key": election.key.get().to_string(),
            "hex": election.key.to_string(),
            "state": state(election),
            "leader": election.leader.as_ref().map(|it| self.participant(it)),
            "standbys": self.participants(&election.standbys),
            "aside": self.participants(&election.aside),
        })
    }

    fn participants(&self, participants: &[Participant]) -> Vec<Value> {
        participants.iter().map(|it| self.participant(it)).collect()
    }

    fn participant(&self, it: &Participant) -> Value {
        let since = it.held_for.and_then(|ago| self.at.checked_sub(ago));
        let ms =
            |duration: Option<Duration>| duration.map(|it| u64::try_from(it.as_millis()).unwrap_or(u64::MAX));
        json!({
            "identity": it.identity,
            "role": it.role.map(|role| role.to_string()),
            "term": it.term,
            "since": since.map(|at| humantime::format_rfc3339_millis(at).to_string()),
            "held_for_ms": ms(it.held_for),
            "address": it.address,
            "pid": it.pid,
            "session_age_ms": ms(it.session_age),
            "silent_for_ms": ms(it.silent_for),
            "answers_step_down": it.answers_step_down,
        })
    }
}

fn state(election: &Election) -> String {
    match &election.leader {
        None => "nobody".to_owned(),
        Some(leader) => leader.role.map_or_else(|| "no answer".to_owned(), |role| role.to_string()),
    }
}

/// Of the state: green is well, yellow passes, red wants a look.
fn colour(election: &Election) -> &'static str {
    match election.leader.as_ref().map(|leader| leader.role) {
        Some(Some(Role::Leading)) => "\x1b[32m",
        Some(Some(Role::Draining | Role::Blocked)) => "\x1b[33m",
        _ => "\x1b[31m",
    }
}

fn title(election: &Election) -> String {
    match &election.name {
        Some(name) => output::name(name),
        None => match election.key.pair() {
            Some((first, second)) => format!("key:{first},{second}"),
            None => format!("key:{}", election.key.get()),
        },
    }
}

fn row(election: &Election) -> [String; 7] {
    let leader = election.leader.clone().unwrap_or_default();
    let or_nothing = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    [
        title(election),
        state(election),
        or_nothing(leader.identity.as_deref().map(output::word)),
        or_nothing(leader.held_for.map(ago)),
        or_nothing(whence(&leader)),
        or_nothing(leader.term.map(|term| term.to_string())),
        election.standbys.len().to_string(),
    ]
}

/// For logs: without what changes with time alone.
fn plain(election: &Election) -> String {
    let mut line = format!("{} state={}", title(election), state(election).replace(' ', "-"));
    if let Some(leader) = &election.leader {
        let identity = leader.identity.as_deref().map(output::word);
        line += &identity.map(|it| format!(" leader={it}")).unwrap_or_default();
        line += &leader.term.map(|it| format!(" term={it}")).unwrap_or_default();
        line += &leader.pid.map(|it| format!(" pid={it}")).unwrap_or_default();
        line +=
            &leader.address.as_deref().map(|it| format!(" from={}", output::word(it))).unwrap_or_default();
    }
    line + &format!(" standbys={}", election.standbys.len())
}

fn whence(participant: &Participant) -> Option<String> {
    // Where the store has connections, it is the server's process for that of the participant.
    let what = if participant.address.is_some() { "server process" } else { "pid" };
    let pid = participant.pid.map(|pid| format!("{what} {pid}"));
    let parts: Vec<String> = participant.address.clone().into_iter().chain(pid).collect();
    (!parts.is_empty()).then(|| parts.join(", "))
}

/// Who, and where from.
pub(crate) fn participant_text(participant: &Participant) -> String {
    let identity =
        participant.identity.as_deref().map_or_else(|| "an unknown session".to_owned(), output::word);
    match whence(participant) {
        Some(whence) => format!("{identity} ({whence})"),
        None => identity,
    }
}

/// For people. Nothing is decided by it.
fn wall_clock() -> SystemTime {
    #[expect(clippy::disallowed_methods, reason = "shown, not compared")]
    SystemTime::now()
}

/// In whole seconds: nobody reads more.
fn ago(duration: Duration) -> String {
    humantime::format_duration(Duration::from_secs(duration.as_secs())).to_string() + " ago"
}
