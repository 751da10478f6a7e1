//! What every subcommand takes: the store, the options, and how to log.

use std::path::Path;
#[cfg(unix)]
use std::time::Duration;

use clap::{ArgAction, Args, ValueEnum};
use leasehold::{Locker, Observer, Options};

use crate::exit::Usage;
#[cfg(unix)]
use crate::wrapper::guard::GuardFile;

/// How long a leader waits after an unclean end of another one: what kills the other one's command has that long.
const TAKEOVER_DELAY: &str = "1s";

#[derive(Debug, Args)]
pub(crate) struct Common {
    /// Where the leases are, such as `postgres://user@host/database`, `redis://host` or `file:/var/lib/my-app/leases`
    #[arg(long, global = true, env = "LEASEHOLD_STORE", hide_env_values = true, value_name = "URL")]
    store: Option<String>,
    /// Between two attempts of a standby [default: 5s]
    #[arg(
        long,
        global = true,
        env = "LEASEHOLD_RETRY_INTERVAL",
        value_name = "TIME",
        help_heading = "Options of the lease"
    )]
    retry_interval: Option<String>,
    /// Between two proofs that the lease is still held [default: 5s]
    #[arg(
        long,
        global = true,
        env = "LEASEHOLD_HEARTBEAT_INTERVAL",
        value_name = "TIME",
        help_heading = "Options of the lease"
    )]
    heartbeat_interval: Option<String>,
    /// How long a statement may go unanswered [default: 10s]
    #[arg(
        long,
        global = true,
        env = "LEASEHOLD_QUERY_TIMEOUT",
        value_name = "TIME",
        help_heading = "Options of the lease"
    )]
    query_timeout: Option<String>,
    /// How long the command may take to end when it is told to [default: 5s]; it is killed after four fifths of that, and the
    /// rest is for it to be gone
    #[arg(
        long,
        global = true,
        env = "LEASEHOLD_STOP_GRACE",
        value_name = "TIME",
        help_heading = "Options of the lease"
    )]
    stop_grace: Option<String>,
    /// How long to wait where the end of the term before may have been unclean, as before the first one [default: 1s; 0s on
    /// files]; `lock` and `once` wait it each time, and not at all by default
    #[arg(
        long,
        global = true,
        env = "LEASEHOLD_TAKEOVER_DELAY",
        value_name = "TIME",
        help_heading = "Options of the lease"
    )]
    takeover_delay: Option<String>,
    /// What this process is called in logs and in the store (also `LEASEHOLD_IDENTITY`, unless a
    /// `run`, `lock` or `once` around this one has set it)
    #[arg(long, global = true, value_name = "TEXT", help_heading = "Options of the lease")]
    identity: Option<String>,
    /// On PostgreSQL, do without the second connection by which a pooler in transaction mode is found out: only where there is
    /// certainly none, since behind one two can lead
    #[arg(long, global = true, env = "LEASEHOLD_TRUST_AFFINITY", help_heading = "Options of the lease")]
    trust_affinity: bool,
    /// Hand over when asked to from outside, by `step-down` [default: true]
    #[arg(
        long,
        global = true,
        env = "LEASEHOLD_ANSWER_STEP_DOWN",
        value_name = "BOOL",
        help_heading = "Options of the lease"
    )]
    answer_step_down: Option<bool>,
    /// Log more: -v debug, -vv all
    #[arg(short, long, global = true, action = ArgAction::Count, conflicts_with = "quiet")]
    pub(crate) verbose: u8,
    /// Log errors only
    #[arg(short, long, global = true)]
    pub(crate) quiet: bool,
    /// How to log
    #[arg(long, global = true, env = "LEASEHOLD_LOG_FORMAT", value_name = "FORMAT", default_value = "text")]
    pub(crate) log_format: LogFormat,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    Text,
    Json,
}

/// The monotonic clock.
pub(crate) fn now() -> tokio::time::Instant {
    #[expect(clippy::disallowed_methods, reason = "the library's own is private")]
    tokio::time::Instant::now()
}

impl Common {
    /// The store's URL. There is no default: one that silently coordinates nothing would be unsafe.
    pub(crate) fn store(&self) -> anyhow::Result<&str> {
        let store = self.store.as_deref().filter(|store| !store.is_empty());
        Ok(store.ok_or(Usage::new(
            "which store? Give --store URL, or set LEASEHOLD_STORE:\n  postgres://app:secret@db.example/app   a PostgreSQL \
             server\n  postgres://app@db-1,db-2/app           whichever of them is the primary\n  \
             redis://user:password@host:6379/0      a Redis or Valkey (a build with the feature redis)\n  \
             file:/var/lib/my-app/leases            a directory, for the processes of one host",
        ))?)
    }

    /// The library's options: what was given, by its text form.
    pub(crate) fn options(&self) -> anyhow::Result<Options> {
        // What a command is told is who runs it: another leasehold in there is another process.
        let is_inside = std::env::var_os("LEASEHOLD_TERM").is_some();
        let inherited = std::env::var("LEASEHOLD_IDENTITY").ok().filter(|_| !is_inside);
        let given = [
            ("retry_interval", self.retry_interval.as_deref()),
            ("heartbeat_interval", self.heartbeat_interval.as_deref()),
            ("query_timeout", self.query_timeout.as_deref()),
            ("stop_grace", self.stop_grace.as_deref()),
            ("takeover_delay", self.takeover_delay.as_deref().or_else(|| self.default_takeover_delay())),
            ("identity", self.identity.as_deref().or(inherited.as_deref())),
            ("trust_affinity", self.trust_affinity.then_some("true")),
            ("answer_step_down", self.answer_step_down.map(|answers| if answers { "true" } else { "false" })),
        ];
        let mut pairs = Vec::new();
        for (option, value) in given {
            let Some(value) = value else { continue };
            // It would begin another option, which nobody has asked for.
            if value.contains(',') {
                return Err(Usage::new(format!("{option} must not contain ',', it is {value:?}")).into());
            }
            pairs.push(format!("{option}={value}"));
        }
        Ok(pairs.join(",").parse()?)
    }

    /// An observer that is connected.
    pub(crate) async fn observer(&self) -> anyhow::Result<Observer> {
        Ok(Observer::connect(self.store()?, self.options()?).await?)
    }

    /// What was given, where nothing else would be waited for: nobody tells whether a lock was released in order.
    #[cfg(unix)]
    pub(crate) fn delay_of_a_lock(&self) -> anyhow::Result<Duration> {
        let given = self.takeover_delay.as_deref().map(humantime::parse_duration).transpose();
        Ok(given.map_err(|error| Usage::new(format!("takeover_delay: {error}")))?.unwrap_or_default())
    }

    /// None on this host's files: there the guard of the one before is waited for itself.
    fn default_takeover_delay(&self) -> Option<&'static str> {
        self.directory().is_none().then_some(TAKEOVER_DELAY)
    }

    /// The directory of a store on this host.
    fn directory(&self) -> Option<&Path> {
        let (scheme, path) = self.store.as_deref()?.split_once(':')?;
        scheme.eq_ignore_ascii_case("file").then(|| Path::new(path.strip_prefix("//").unwrap_or(path)))
    }

    /// What the guards of a name hold one after the other, where they are on one host.
    #[cfg(unix)]
    pub(crate) fn guard_file(
        &self,
        key: leasehold::Key,
        is_shared: bool,
    ) -> anyhow::Result<Option<GuardFile>> {
        let Some(directory) = self.directory() else { return Ok(None) };
        let path = std::path::absolute(directory)?.join(format!("{key}.guard"));
        Ok(Some(GuardFile { path, is_shared }))
    }

    /// Says what two processes in two working directories would not agree on.
    pub(crate) fn warn_of_relative_paths(&self) {
        if let Some(directory) = self.directory().filter(|it| it.is_relative()) {
            let is_at = std::path::absolute(directory).unwrap_or_default();
            tracing::warn!(is_at = %is_at.display(), "the store's path is relative: it is another one in another directory");
        }
    }

    /// A Locker that connects when it is first needed.
    pub(crate) fn locker(&self) -> anyhow::Result<Locker> {
        Ok(Locker::at(self.store()?, self.options()?)?)
    }
}
