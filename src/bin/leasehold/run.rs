//! `leasehold run`: a command that runs only while this process leads.

use std::cell::Cell;
use std::ops::ControlFlow;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, ValueEnum};
use leasehold::{Key, Kind, Lease, Reason, RunError, State};
use rand::RngExt as _;
use tracing::{info, warn};

use crate::common::{Common, now};
use crate::exit::{self, Usage};
use crate::output::complain;
use crate::wrapper::command::Ended;
use crate::wrapper::signals::{Mask, Signals};
use crate::wrapper::{self, CannotStart, Task, Wrapper};

/// First and longest pause before a command is started again. Half of it is random.
const RESTART_PAUSE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_mins(1));

/// How often `--no-wait` looks whether its one attempt has been answered.
const LOOK: Duration = Duration::from_millis(2);

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  leasehold run sweeper -- python sweep.py          # one replica at a time; the others stand by, each until its turn
  leasehold run --restart=always sweeper -- python sweep.py
  leasehold run --no-wait --once report -- ./report # ends at once, with exit code 75, while another one leads
  leasehold run sweeper -- sh -c 'a | b'            # there is no shell in between unless you ask for one

The command gets LEASEHOLD_NAME, LEASEHOLD_IDENTITY, LEASEHOLD_TERM (counted by this process) and LEASEHOLD_TOKEN: a \
number that grows with every term, whoever leads, for what can refuse a write that comes late. On PostgreSQL it gets \
LEASEHOLD_FENCE_SQL, too: as the first statement of a transaction in the same database, it lets that be committed in this \
term or not at all; and where this process dies, the next command starts when what was fenced so has ended.

It and all in its process group are sent TERM when the lease is lost or this process is told to stop, and KILL towards \
the end of --stop-grace; what leaves the group (setsid) is the command's own to end. When the command has ended, so does what it has left in its \
group: it is sent the same. After a loss the command is started \
again when this process leads again, unless --once is given. While the store cannot be reached, or refuses the login, \
this process waits for that, unless --no-wait or --wait is given.

TERM, INT, HUP, QUIT, USR1 and USR2 are passed on; all but the last two also end this process, and a second one kills \
at once. What is ignored when this process starts (nohup) stays ignored by both, but for PIPE and CHLD, \
which the command finds as they are by default. In front on a terminal, the command has \
the terminal: what is typed goes to it alone. Ctrl-C ends it, and is the end of --restart, too; if it ignores that, send \
TERM to this process. Ctrl-Z suspends nothing: one that leads does not stand still.

Exit codes: the command's own; 128 + n where signal n ended it, or this process before it led (TERM: 143); 127 if it was \
not found, 126 if it cannot be executed. leasehold's own: 2 bad usage, 69 the store cannot be reached, 70 a bug, 75 not \
acquired in time, 76 the lease was lost (--once), 78 the store must not be used.")]
pub(crate) struct Arguments {
    /// What is led: all that give the same name on the same store contend
    name: String,
    /// Start the command again when it has ended, and go on leading: `--restart` alone where it has failed, or
    /// `--restart=always`
    #[arg(long, value_enum, value_name = "WHEN", num_args = 0..=1, require_equals = true, default_missing_value = "on-failure")]
    restart: Option<Restart>,
    /// Run the command once: where the lease is lost, end with exit code 76 instead of waiting to lead again
    #[arg(long)]
    once: bool,
    /// Give up when this process does not lead by then, with exit code 75
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration, conflicts_with = "no_wait")]
    wait: Option<Duration>,
    /// Give up at once while somebody else leads, with exit code 75
    #[arg(long)]
    no_wait: bool,
    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<std::ffi::OsString>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Restart {
    /// Unless it ended with exit code 0
    OnFailure,
    Always,
}

pub(crate) fn main(common: &Common, arguments: Arguments) -> anyhow::Result<ExitCode> {
    let name = arguments.name.clone();
    wrapper::main(&name, async |mask| run(common, arguments, mask).await)
}

async fn run(common: &Common, mut arguments: Arguments, mask: Mask) -> anyhow::Result<ExitCode> {
    // Not to wait is to ask once, and not to leave before there is an answer.
    arguments.no_wait |= arguments.wait.take_if(|limit| limit.is_zero()).is_some();
    common.warn_of_relative_paths();
    // Before anybody can see this process in the store, and send it one.
    let signals = Signals::start()?;
    // Whoever does not wait for the leader does not wait for the store.
    let locker = match wrapper::locker(common, &signals, !arguments.no_wait).await? {
        ControlFlow::Continue(locker) => locker,
        ControlFlow::Break(code) => return Ok(code),
    };
    let task = Task {
        command: std::mem::take(&mut arguments.command),
        guard_file: common.guard_file(Key::of(Kind::Lease, arguments.name.as_str()), false)?,
        is_exclusive: true,
        delay: Duration::ZERO,
    };
    let wrapper = Wrapper::start(common, locker, signals, mask, task)?;
    Run { wrapper, arguments, last: Cell::new(None), verdict: Cell::new(None) }.run().await
}

/// One invocation.
struct Run {
    wrapper: Wrapper,
    arguments: Arguments,
    /// How the command ended last.
    last: Cell<Option<Ended>>,
    /// Why the candidacy was ended, where it was not a signal.
    verdict: Cell<Option<u8>>,
}

impl Run {
    async fn run(self) -> anyhow::Result<ExitCode> {
        let name = self.arguments.name.as_str();
        let candidate = self.wrapper.locker.candidate(name).until(self.wrapper.shutdown.clone());
        let leads = candidate.run(async |lease: Lease| self.lead(lease).await);
        let led = {
            let mut leads = std::pin::pin!(leads);
            tokio::select! {
                biased;
                led = &mut leads => led,
                () = self.give_up() => leads.await,
            }
        };
        let code = self.code(led);
        self.wrapper.end().await;
        Ok(ExitCode::from(code?))
    }

    fn code(&self, led: Result<Option<Ended>, RunError<CannotStart>>) -> anyhow::Result<u8> {
        Ok(match led {
            Ok(Some(ended)) => ended.code(),
            Ok(None) => self.code_of_a_stop(),
            Err(RunError::Job(error)) => error.report(),
            Err(RunError::Refused(error)) => {
                complain(error);
                exit::REFUSED
            }
            Err(error @ (RunError::Name(_) | RunError::Options(_))) => {
                return Err(Usage::new(error.to_string()).into());
            }
            Err(error) => return Err(anyhow::anyhow!("{error}")),
        })
    }

    fn code_of_a_stop(&self) -> u8 {
        if let Some(verdict) = self.verdict.get() {
            return verdict;
        }
        self.last.get().map(Ended::code).or_else(|| self.wrapper.signals.code()).unwrap_or(exit::BUG)
    }

    /// Ends the candidacy on a signal, and where it was not to wait any longer. Never completes otherwise.
    async fn give_up(&self) {
        let impatient = async {
            match self.arguments.wait {
                Some(limit) => {
                    tokio::time::sleep(limit).await;
                    self.does_not_lead()
                }
                None if self.arguments.no_wait => self.is_refused().await,
                None => false,
            }
        };
        tokio::select! {
            biased;
            () = self.wrapper.signals.asked_to_stop() => {}
            true = impatient => {
                let is_reached = self.wrapper.locker.last_answer().is_some();
                let why = if is_reached { "somebody else leads" } else { "the store cannot be reached" };
                info!(name = self.arguments.name, "giving up: {why}");
                self.verdict.set(Some(if is_reached { exit::NOT_ACQUIRED } else { exit::UNREACHABLE }));
            }
        }
        self.wrapper.shutdown.cancel();
    }

    fn does_not_lead(&self) -> bool {
        self.wrapper.locker.state(self.arguments.name.as_str()) == State::Standby && self.last.get().is_none()
    }

    /// Waits for the answer to the first attempt. The session was there before, so the first answer is that.
    async fn is_refused(&self) -> bool {
        let before = self.wrapper.locker.last_answer();
        while self.wrapper.locker.last_answer() == before {
            tokio::time::sleep(LOOK).await;
        }
        self.does_not_lead()
    }

    /// One term: the command, again and again if so wished, until it has ended or is to stop.
    async fn lead(&self, lease: Lease) -> Result<Ended, CannotStart> {
        let mut pause = RESTART_PAUSE.0;
        loop {
            let since = now();
            let Some(ended) = self.wrapper.run(&lease).await? else {
                self.after_a_stop(&lease);
                // Nobody hears that: the term is over.
                return Ok(Ended::Code(0));
            };
            self.last.set(Some(ended));
            let again = match self.arguments.restart {
                Some(Restart::Always) => true,
                Some(Restart::OnFailure) => ended.code() != 0,
                None => false,
            };
            if lease.cancellation().is_cancelled() {
                self.after_a_stop(&lease);
                return Ok(ended);
            }
            if !again || self.wrapper.shutdown.is_cancelled() {
                return Ok(ended);
            }
            if since.elapsed() > RESTART_PAUSE.1 {
                pause = RESTART_PAUSE.0;
            }
            let jittered = pause.mul_f64(rand::make_rng::<rand::rngs::StdRng>().random_range(0.5..1.0));
            warn!(name = self.arguments.name, code = ended.code(), pause = %humantime::format_duration(Duration::from_millis(jittered.as_millis().try_into().unwrap_or(u64::MAX))), "the command ended: starting it again");
            pause = (2 * pause).min(RESTART_PAUSE.1);
            tokio::select! {
                biased;
                () = lease.cancelled() => {
                    self.after_a_stop(&lease);
                    return Ok(ended);
                }
                () = tokio::time::sleep(jittered) => {}
            }
        }
    }

    /// The term is over. The command that it ended says nothing about the next one.
    fn after_a_stop(&self, lease: &Lease) {
        match lease.reason() {
            Some(Reason::Shutdown | Reason::Closed) => {}
            Some(Reason::Lost(_)) if self.arguments.once => {
                self.verdict.set(Some(exit::LOST));
                self.wrapper.shutdown.cancel();
            }
            // The command's own code, then: it was not lost.
            Some(Reason::SteppedDown) if self.arguments.once => {
                if self.last.get().is_none() {
                    self.verdict.set(Some(exit::NOT_ACQUIRED));
                }
                self.wrapper.shutdown.cancel();
            }
            _ => self.last.set(None),
        }
    }
}
