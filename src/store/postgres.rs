//! The PostgreSQL store: session-level advisory locks on one dedicated session, wake-ups by LISTEN and NOTIFY.
//!
//! | part | role |
//! |---|---|
//! | `url` | `postgres://…` to connection options |
//! | `link` | the one connection: statements, notifications, its graceful and its hard end |
//! | `affinity` | whether a pooler stands in between |
//! | `checks` | what is looked at before the session is trusted, with nothing left behind |
//! | `setup` | the session's settings, by SET and read back |
//! | `statements` | the SQL |
//! | `session` | the seam's `Session`: what it holds, what it waits for, how it is reconciled after an error |
//! | `slots` | the one table, of `every` |
//! | `fence` | how transactions are kept from outliving a term |
//! | `examine` | all of that one by one, and what else matters, for `diagnose` |
//! | `refusal` | what the server says, as our errors |
//!
//! A lock belongs to its session: the server frees it when the session ends, for whatever reason. Everything follows
//! from keeping exactly one session, noticing its end at once, and making the server end it in time when its holder
//! falls silent (`idle_session_timeout`).

mod affinity;
mod checks;
mod claims;
mod examine;
mod fence;
mod link;
mod refusal;
mod session;
mod setup;
mod slots;
mod statements;
mod url;

use std::time::Duration;

use sqlx::ConnectOptions as _;
use sqlx::postgres::PgConnectOptions;

use self::affinity::Affinity;
pub(crate) use self::examine::examine;
pub(crate) use self::fence::{Fence, NO_TRANSACTION, OTHER_DATABASE, OVER, REPLICA, abort};
use self::link::Link;
use self::session::{Fencing, PgSession};
pub(crate) use self::slots::schema as slots_schema;
pub(crate) use self::statements::try_xact_lock;
pub(crate) use self::url::targets_of_url;
use super::{Enforcement, Store};
use crate::clock;
use crate::error::ConnectError;
use crate::options::Options;
use crate::sabotage::Sabotage;

/// What a session needs to know of its Locker.
#[derive(Clone, Debug)]
struct Config {
    identity: String,
    query_timeout: Duration,
    trust: Duration,
    ttl: Duration,
    trust_affinity: bool,
    /// The server is told to end the session when it has fallen silent: always, but for the twin of the test that
    /// shows it.
    ends_silent_sessions: bool,
    /// Each session has a lock of its own that shows it to others: always, but for the twin.
    is_marked: bool,
    /// How long a transaction may be idle that is fenced.
    fence_limit: Duration,
    /// Not at all, but for the twins.
    broken_fence: fence::Broken,
}

/// The servers that a session may be opened with: the first one that is a primary.
pub(crate) struct PgStore {
    targets: Vec<Target>,
    /// The one that the last session was with; it is tried first.
    at: usize,
    config: Config,
}

/// One server.
struct Target {
    options: PgConnectOptions,
    /// A connection to it was found to stay with one backend. A session that moves all the same takes it back.
    affinity: Affinity,
}

impl PgStore {
    /// No I/O.
    pub(crate) fn new<'a>(
        targets: impl IntoIterator<Item = &'a PgConnectOptions>,
        options: &Options,
    ) -> Self {
        let bounds = options.bounds();
        // PgBouncer refuses that start-up option, and nothing here reads a floating-point number. The driver has events
        // of its own for what sqlx would log of each statement.
        let target = |target: &PgConnectOptions| Target {
            options: target.clone().extra_float_digits(None).disable_statement_logging(),
            affinity: Affinity::default(),
        };
        Self {
            targets: targets.into_iter().map(target).collect(),
            at: 0,
            config: Config {
                identity: options.identity.clone(),
                query_timeout: options.query_timeout,
                trust: bounds.trust,
                ttl: bounds.ttl,
                trust_affinity: options.trust_affinity,
                ends_silent_sessions: !options.is_broken(Sabotage::NoServerTtl),
                is_marked: !options.is_broken(Sabotage::NoMarker),
                fence_limit: options.fence_limit.unwrap_or(bounds.ttl),
                broken_fence: fence::Broken {
                    no_barrier: options.is_broken(Sabotage::NoBarrier),
                    no_look: options.is_broken(Sabotage::NoTermLook),
                },
            },
        }
    }
}

impl Target {
    /// Opens a session with this server; what is tried takes no longer than the limit.
    async fn connect(&self, limit: Duration, config: &Config) -> Result<PgSession, ConnectError> {
        let connecting = async {
            let mut link = Link::open(&self.options, limit).await?;
            let knows_affinity = config.trust_affinity || self.affinity.is_known();
            let second = (!knows_affinity).then_some(&self.options);
            let backend = checks::look(&mut link, second, limit, &self.affinity, config).await?;
            let in_force = setup::apply(&mut link, config).await?;
            in_force.warn(&backend, config);
            link.listen(statements::CHANNEL).await.map_err(refusal::of_statement)?;
            let in_force = (in_force.enforcement, in_force.shortfalls());
            let marker =
                checks::mark(&mut link, &backend, config).await.inspect_err(|_| self.affinity.doubt())?;
            let place = checks::place(&mut link).await?;
            let fencing = Fencing { place, limit: config.fence_limit, broken: config.broken_fence };
            let affinity = self.affinity.clone();
            Ok(PgSession::new(link, self.address(), (backend, marker), in_force, affinity, fencing))
        };
        let connected = tokio::time::timeout(limit, connecting).await;
        connected.unwrap_or(Err(ConnectError::Timeout { limit }))
    }

    /// For people: where it is.
    fn address(&self) -> String {
        if let Some(path) = link::unix_socket(&self.options) {
            return path.display().to_string();
        }
        format!("{}:{}", self.options.get_host(), self.options.get_port())
    }
}

impl Store for PgStore {
    type Session = PgSession;

    fn enforcement(&self) -> Enforcement {
        Enforcement { frees_silent_holders: true, any_answer_renews: true, reconnects: false }
    }

    fn address(&self) -> String {
        let hosts = self.targets.iter().map(Target::address).collect::<Vec<_>>().join(",");
        // All of them are of one database.
        match self.targets.first().and_then(|target| target.options.get_database()) {
            Some(database) => format!("{hosts}/{database}"),
            None => hosts,
        }
    }

    async fn connect(&mut self) -> Result<PgSession, ConnectError> {
        let count = self.targets.len();
        let until = clock::now() + self.config.query_timeout;
        let mut failures = Vec::new();
        for nth in 0..count {
            let at = (self.at + nth) % count;
            // Those that do not answer leave the others their share of the time.
            let left = until.saturating_duration_since(clock::now());
            let share = left.as_millis() / (count - nth) as u128;
            let share = Duration::from_millis(share.try_into().unwrap_or(u64::MAX));
            match self.targets[at].connect(share, &self.config).await {
                Ok(session) => {
                    self.at = at;
                    return Ok(session);
                }
                Err(error) => failures.push((self.targets[at].address(), error)),
            }
        }
        match failures.pop() {
            Some((address, ConnectError::Unreachable { reason })) if count == 1 => {
                Err(ConnectError::Unreachable { reason: format!("{address}: {reason}") })
            }
            Some((_, error)) if count == 1 => Err(error),
            last => Err(ConnectError::NoHost { tried: failures.into_iter().chain(last).collect() }),
        }
    }
}
