//! A replica: this program again, in a process of its own, with leasehold or as the naive holder.
//!
//! `replica KIND URL NAME OPTIONS LOG WHO HEARING`. What it is to do comes by its standard input, a line each: `stop`,
//! `step-down`, `block MILLISECONDS`. At the end of that it exits at once, so that none outlives the bench.

use std::cell::Cell;
use std::future::poll_fn;
use std::path::Path;
use std::pin::pin;
use std::time::Duration;

use anyhow::{Context as _, bail};
use leasehold::{CancellationToken, Key, Kind, Lease, Locker, Options, State};
use sqlx::postgres::PgConnectOptions;
use sqlx::{Connection as _, PgConnection};
use tokio::sync::{Mutex, mpsc};
use tokio::time::sleep;

use crate::log::{Event, Writer, now};

/// How often a body shows that it is polled.
const TICK: Duration = Duration::from_millis(5);

enum Command {
    StepDown,
    Block(Duration),
}

type Commands = Mutex<mpsc::UnboundedReceiver<Command>>;

/// One thread for the job, and what else a service does; blocking it blocks all of that.
#[tokio::main(flavor = "current_thread")]
pub(crate) async fn play(arguments: &[String]) -> anyhow::Result<()> {
    let [kind, url, name, options, log, who, hearing] = arguments else { bail!("a replica has 7 arguments") };
    // Read where nobody takes over.
    tracing_subscriber::fmt().with_max_level(tracing::Level::DEBUG).with_writer(std::io::stderr).init();
    let options: Options = options.parse()?;
    let log = Writer::append(Path::new(log), who.chars().next().context("it has a name")?)?;
    let is_deaf = hearing == "deaf";
    let (send, commands) = mpsc::unbounded_channel();
    let (commands, shutdown) = (Commands::new(commands), CancellationToken::new());
    listen(send, shutdown.clone());
    match kind.as_str() {
        "leasehold" => lead(url, name, options, &log, is_deaf, &commands, shutdown).await,
        "naive" => lead_naively(url, name, &options, &log, &commands, &shutdown).await,
        other => bail!("there is no kind {other:?}"),
    }
}

fn listen(send: mpsc::UnboundedSender<Command>, shutdown: CancellationToken) {
    std::thread::spawn(move || {
        for line in std::io::stdin().lines().map_while(Result::ok) {
            match line.split_once(' ').unwrap_or((&line, "")) {
                ("stop", _) => shutdown.cancel(),
                ("step-down", _) => drop(send.send(Command::StepDown)),
                ("block", time) => {
                    let time = Duration::from_millis(time.parse().expect("a number of milliseconds"));
                    drop(send.send(Command::Block(time)));
                }
                (other, _) => panic!("there is no command {other:?}"),
            }
        }
        std::process::exit(0);
    });
}

async fn lead(
    url: &str,
    name: &str,
    options: Options,
    log: &Writer,
    is_deaf: bool,
    commands: &Commands,
    shutdown: CancellationToken,
) -> anyhow::Result<()> {
    // Lazy, as a service that starts before its server: the run keeps trying.
    let locker = Locker::postgres(url.parse::<PgConnectOptions>()?, options)?;
    let run = locker.candidate(name).until(shutdown).run(async |lease: Lease| {
        let body = Body::begin(log, lease.term());
        let told = async {
            if is_deaf {
                std::future::pending::<()>().await;
            } else {
                lease.cancelled().await;
            }
        };
        body.work(told, commands, || lease.step_down()).await;
        anyhow::Ok(())
    });
    let ready = async {
        while locker.state(name) == State::Ended {
            sleep(Duration::from_millis(1)).await;
        }
        // Answered after the candidate's first attempt, which was asked for before.
        while locker.step_down("a name that nobody leads").await.is_err() {}
        log.write(Event::Ready, 0, now());
        std::future::pending::<()>().await;
    };
    tokio::select! {
        done = run => drop(done?),
        () = ready => {}
    }
    locker.close().await;
    Ok(())
}

/// A session lock, as it is written in an afternoon: poll, lead, look now and then whether the connection lives.
async fn lead_naively(
    url: &str,
    name: &str,
    options: &Options,
    log: &Writer,
    commands: &Commands,
    shutdown: &CancellationToken,
) -> anyhow::Result<()> {
    let (target, key) = (url.parse::<PgConnectOptions>()?, Key::of(Kind::Lease, name).get());
    let (poll, heartbeat) = (duration(options, "retry_interval"), duration(options, "heartbeat_interval"));
    for term in 1.. {
        let mut connection = loop {
            if let Ok(connection) = wait_for(&target, key, poll, log).await {
                break connection;
            }
            sleep(poll).await;
        };
        let body = Body::begin(log, term);
        let beat = async {
            loop {
                sleep(heartbeat).await;
                if sqlx::query("SELECT 1").execute(&mut connection).await.is_err() {
                    break;
                }
            }
        };
        let ended = tokio::select! {
            () = body.work(shutdown.cancelled(), commands, || shutdown.cancel()) => true,
            () = beat => false,
        };
        if ended {
            sqlx::query("SELECT pg_advisory_unlock($1)").bind(key).execute(&mut connection).await?;
            connection.close().await?;
            break;
        }
    }
    Ok(())
}

async fn wait_for(
    target: &PgConnectOptions,
    key: i64,
    poll: Duration,
    log: &Writer,
) -> Result<PgConnection, sqlx::Error> {
    let mut connection = PgConnection::connect_with(target).await?;
    loop {
        let attempt = sqlx::query_scalar("SELECT pg_try_advisory_lock($1)").bind(key);
        if attempt.fetch_one(&mut connection).await? {
            return Ok(connection);
        }
        log.write(Event::Ready, 0, now());
        sleep(poll).await;
    }
}

/// A duration of the options, which show it in their text form only.
pub(crate) fn duration(options: &Options, option: &str) -> Duration {
    let text = options.to_string();
    let value = text.split(',').find_map(|pair| pair.strip_prefix(option)?.strip_prefix('='));
    humantime::parse_duration(value.expect("there is such an option")).expect("it is a duration")
}

struct Body<'a> {
    log: &'a Writer,
    term: u64,
    has_ended: bool,
}

impl<'a> Body<'a> {
    fn begin(log: &'a Writer, term: u64) -> Self {
        log.write(Event::Start, term, now());
        Self { log, term, has_ended: false }
    }

    /// Shows that it is polled until it is told to stop, and then returns at once.
    ///
    /// The stamps are of when a poll began: a process may be frozen in the middle of one, and goes on with that.
    async fn work(mut self, told: impl Future<Output = ()>, commands: &Commands, step_down: impl Fn()) {
        let begun = Cell::new(now());
        let work = async {
            let (mut told, mut commands) = (pin!(told), commands.lock().await);
            loop {
                tokio::select! {
                    biased;
                    () = &mut told => break,
                    Some(command) = commands.recv() => match command {
                        Command::StepDown => step_down(),
                        Command::Block(time) => std::thread::sleep(time),
                    },
                    () = sleep(TICK) => self.log.write(Event::Tick, self.term, begun.get()),
                }
            }
        };
        let mut work = pin!(work);
        poll_fn(|cx| {
            begun.set(now());
            work.as_mut().poll(cx)
        })
        .await;
        self.has_ended = true;
        self.log.write(Event::End, self.term, now());
    }
}

impl Drop for Body<'_> {
    fn drop(&mut self) {
        if !self.has_ended {
            self.log.write(Event::Dropped, self.term, now());
        }
    }
}
