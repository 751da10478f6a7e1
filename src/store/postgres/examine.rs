//! What `diagnose` looks at: the checks of a connection, one by one and going on after one that fails, and what is not
//! worth failing for.
//!
//! Only a session that those checks trust is set up and made to listen, as that of a Locker is. All else only reads.

mod room;

use std::future::Future;
use std::time::Duration;

use sqlx::Row as _;
use sqlx::postgres::{PgRow, PgSslMode};
use tokio::time::{Instant, timeout};

use self::room::{CONNECTIONS, SETTINGS};
use super::affinity::Affinity;
use super::checks::{self, Backend};
use super::link::{self, Link};
use super::setup::{self, InForce};
use super::{Config, PgConnectOptions, PgStore, Target, refusal, statements};
use crate::clock;
use crate::diagnosis::{Check, Diagnosis, Verdict};
use crate::error::ConnectError;
use crate::options::{Bounds, Options};

const REACHABLE: &str = "reachable";
const LOGIN: &str = "login";
const TLS: &str = "tls";
const VERSION: &str = "version";
const PRIMARY: &str = "primary";
const HOSTS: &str = "hosts";
const POOLER: &str = "pooler";
const SESSION: &str = "session";
const LOCKS: &str = "locks";
const TTL: &str = "ttl";
const WAKE_UPS: &str = "wake-ups";
const LATENCY: &str = "latency";

/// How many round trips are measured.
const ROUND_TRIPS: usize = 20;

/// What a clock of the server may differ from ours while a connection is made, and no more.
const CLOCK_SLACK: Duration = Duration::from_millis(100);

/// Looks at every server that the URL names.
pub(crate) async fn examine(targets: &[PgConnectOptions], options: &Options) -> Diagnosis {
    let store = PgStore::new(targets, options);
    let mut hosts = Vec::new();
    for target in &store.targets {
        let mut host = Host::new(target, &store.config, options);
        host.examine(store.targets.len()).await;
        hosts.push(host);
    }
    if hosts.len() > 1 { of_several(hosts) } else { hosts.pop().map(Host::alone).unwrap_or_default() }
}

/// Of several hosts one has to do. The others are told, but keep nobody from the one.
fn of_several(hosts: Vec<Host<'_>>) -> Diagnosis {
    let in_use = hosts.iter().position(|host| host.error.is_none());
    let mut writable: Vec<(String, Backend)> = Vec::new();
    let (mut diagnosis, mut tried) = (Diagnosis::default(), Vec::new());
    for (n, host) in hosts.into_iter().enumerate() {
        let at = host.target.address();
        if let Some(backend) = host.backend.filter(|_| !host.is_replica) {
            writable.push((at.clone(), backend));
        }
        for mut check in host.checks {
            if in_use.is_some() && host.error.is_some() && check.verdict == Verdict::Bad {
                check.verdict = Verdict::Warning;
                if check.what == PRIMARY && host.is_replica {
                    check = Check::good(PRIMARY, "a read replica: it is used when it has been promoted");
                }
            }
            check.at = Some(at.clone());
            diagnosis.checks.push(check);
        }
        if in_use == Some(n) {
            diagnosis.bounds = host.bounds;
        }
        tried.extend(host.error.map(|error| (at, error)));
    }
    // One server that has two names started once.
    let servers = |(_, one): &(String, Backend), (_, other): &(String, Backend)| one.server == other.server;
    if !writable.windows(2).all(|two| servers(&two[0], &two[1])) {
        let names: Vec<_> = writable.into_iter().map(|(at, _)| at).collect();
        let mut check = Check::warning(
            HOSTS,
            format!(
                "{} are writable servers of their own, each with its own locks: two may lead",
                names.join(" and ")
            ),
            "name one primary and its replicas",
        );
        check.verdict = Verdict::Bad;
        diagnosis.checks.push(check);
    }
    if in_use.is_none() {
        diagnosis.error = Some(ConnectError::NoHost { tried });
    }
    diagnosis
}

/// One server, and what was found out about it.
struct Host<'a> {
    target: &'a Target,
    config: &'a Config,
    options: &'a Options,
    checks: Vec<Check>,
    /// The first thing that a connection would have failed with.
    error: Option<ConnectError>,
    /// How long the steps took that a connection takes as well.
    spent: Duration,
    /// The session was set up, so it has to be ended in order.
    is_set_up: bool,
    is_replica: bool,
    backend: Option<Backend>,
    bounds: Option<Bounds>,
}

impl<'a> Host<'a> {
    fn new(target: &'a Target, config: &'a Config, options: &'a Options) -> Self {
        Self {
            target,
            config,
            options,
            checks: Vec::new(),
            error: None,
            spent: Duration::ZERO,
            is_set_up: false,
            is_replica: false,
            backend: None,
            bounds: None,
        }
    }

    fn alone(self) -> Diagnosis {
        Diagnosis { checks: self.checks, bounds: self.bounds, error: self.error }
    }

    fn good(&mut self, what: &'static str, reason: impl Into<String>) {
        self.checks.push(Check::good(what, reason));
    }

    fn warning(&mut self, what: &'static str, reason: impl Into<String>, remedy: impl Into<String>) {
        self.checks.push(Check::warning(what, reason, remedy));
    }

    /// Something that a connection would have failed with, too.
    fn bad(&mut self, what: &'static str, error: ConnectError) {
        let hint = match &error {
            ConnectError::Unreachable { reason } => {
                let of_server = reason.contains("SQLSTATE").then_some("see what the server's log says");
                refusal::hint_in(reason).or(of_server).or(Some(
                    "see that the host's name and its port are right, and that a PostgreSQL server is up there",
                ))
            }
            ConnectError::Timeout { .. } => Some(
                "see what holds it up, such as a firewall that drops what is sent; or raise query_timeout",
            ),
            _ => None,
        };
        self.checks.push(Check::bad(what, &error, hint));
        self.error.get_or_insert(error);
    }

    /// A step that a connection takes as well. What takes too long, or costs the session, ends the examination; any
    /// other failure is told.
    fn settle<T>(
        &mut self,
        link: &Link,
        what: &'static str,
        stepped: Result<T, ConnectError>,
    ) -> Result<Option<T>, ConnectError> {
        match stepped {
            Ok(value) => Ok(Some(value)),
            Err(error) if link.is_over() || matches!(error, ConnectError::Timeout { .. }) => Err(error),
            Err(error) => {
                self.bad(what, error);
                Ok(None)
            }
        }
    }

    async fn step<T>(
        &mut self,
        step: impl Future<Output = Result<T, ConnectError>>,
    ) -> Result<T, ConnectError> {
        let (limit, since) = (self.config.query_timeout, clock::now());
        let stepped = timeout(limit, step).await.unwrap_or(Err(ConnectError::Timeout { limit }));
        self.spent += clock::now() - since;
        stepped
    }

    async fn examine(&mut self, hosts: usize) {
        let (since, limit) = (clock::now(), self.config.query_timeout);
        let mut link = match self.step(Link::open(&self.target.options, limit)).await {
            Ok(link) => link,
            Err(error) => return self.not_opened(error),
        };
        let took = self.spent;
        self.good(REACHABLE, format!("{} answers", self.target.address()));
        self.good(LOGIN, format!("{} may come in, which took {}", self.user(), text(took)));
        let looked = match self.look(&mut link, since).await {
            Ok(()) => self.measure(&mut link, hosts).await,
            Err(error) => Err(error),
        };
        match looked {
            Ok(()) if self.is_set_up => {
                let leaving = async {
                    // What a pooler without a reset would hand on to the next client.
                    link.fetch("RESET ALL".to_owned()).await.ok();
                    link.close().await;
                };
                timeout(limit, leaving).await.ok();
            }
            Ok(()) => {}
            Err(error) if matches!(error, ConnectError::Unsupported { .. }) => self.bad(LOCKS, error),
            Err(error) => self.bad(SESSION, error),
        }
    }

    fn user(&self) -> String {
        let options = &self.target.options;
        let (user, database) =
            (options.get_username(), options.get_database().unwrap_or(options.get_username()));
        format!("the user {user:?} of the database {database:?}")
    }

    fn not_opened(&mut self, error: ConnectError) {
        let what = match &error {
            ConnectError::Authentication { .. } | ConnectError::UnknownDatabase { .. } => LOGIN,
            ConnectError::Tls { .. } => TLS,
            ConnectError::Unreachable { reason } if refusal::is_full(reason) => CONNECTIONS,
            _ => REACHABLE,
        };
        if what != REACHABLE {
            self.good(REACHABLE, format!("{} answers", self.target.address()));
        }
        self.bad(what, error);
    }

    /// An error ends it: the session is of no use any more.
    async fn look(&mut self, link: &mut Link, since: Instant) -> Result<(), ConnectError> {
        let look = self.step(checks::see(link)).await?;
        let settings = self.settings(link).await?;
        if let Some(version) = settings.get("server_version") {
            self.good(VERSION, format!("PostgreSQL {}", version.value));
        }
        self.tls(link).await?;
        match look.of_a_primary() {
            Ok(()) => self.good(PRIMARY, "it takes writes"),
            Err(error) => {
                self.is_replica = true;
                self.bad(PRIMARY, error);
            }
        }
        let is_own = self.pooler(link, &look.backend, since).await?;
        let is_unused = self.settle(link, SESSION, look.of_an_unused_session())?.is_some();
        if is_unused {
            self.good(SESSION, "it came without locks of an earlier client");
        }
        self.backend = Some(look.backend);
        let tried = self.step(checks::try_a_lock(link, self.config)).await;
        let is_real = self.settle(link, LOCKS, tried)?.is_some();
        if is_real {
            self.good(LOCKS, "a lock that was taken shows in the server's lock table");
        }
        let mut in_force = None;
        if is_own && is_unused && is_real {
            self.is_set_up = true;
            let applied = self.step(setup::apply(link, self.config)).await;
            in_force = self.settle(link, SETTINGS, applied)?;
        }
        if let Some(in_force) = &in_force {
            self.ttl(in_force);
        }
        self.limits(&settings, in_force.as_ref());
        if self.is_set_up && !self.is_replica {
            self.wake_ups(link).await?;
        }
        self.connections(link, &settings).await?;
        self.lock_table(link, &settings).await?;
        self.replication(link, &settings).await
    }

    /// Asks for what is not worth failing for: where the server does not tell, that is a warning.
    async fn ask(
        &mut self,
        link: &mut Link,
        what: &'static str,
        sql: String,
    ) -> Result<Option<Vec<PgRow>>, ConnectError> {
        let limit = self.config.query_timeout;
        match timeout(limit, link.fetch(sql)).await {
            Ok(Ok(rows)) => Ok(Some(rows)),
            Ok(Err(error)) => match refusal::answered(&error) {
                Some((_, reason)) => {
                    self.untold(what, &reason);
                    Ok(None)
                }
                None => Err(refusal::of_statement(error)),
            },
            Err(_) => Err(ConnectError::Timeout { limit }),
        }
    }

    fn untold(&mut self, what: &'static str, reason: &str) {
        self.warning(what, format!("the server does not tell: {reason}"), "look at it on the server");
    }

    async fn tls(&mut self, link: &mut Link) -> Result<(), ConnectError> {
        let Some(rows) = self.ask(link, TLS, statements::TLS.to_owned()).await? else { return Ok(()) };
        let encrypted: Option<String> = rows.first().and_then(|row| row.try_get(0).ok());
        let options = &self.target.options;
        let host = options.get_host();
        let is_local = host == "localhost" || host.parse().is_ok_and(|it: std::net::IpAddr| it.is_loopback());
        let is_verified = matches!(options.get_ssl_mode(), PgSslMode::VerifyCa | PgSslMode::VerifyFull);
        let remedy = "add sslmode=verify-full to the URL";
        match encrypted {
            _ if link::unix_socket(options).is_some() => self.good(TLS, "not needed on a Unix socket"),
            Some(how) if is_verified => {
                self.good(TLS, format!("{how}, and the server's certificate was verified"));
            }
            Some(how) if is_local => {
                self.good(TLS, format!("{how}; the server's certificate was not verified"));
            }
            Some(how) => {
                let reason = format!(
                    "{how}, but the server's certificate was not verified: who is in between is not noticed"
                );
                self.warning(TLS, reason, remedy);
            }
            None if is_local => {
                self.good(TLS, "the server does not encrypt, which is not needed on this host");
            }
            None => self.warning(
                TLS,
                "the server does not encrypt: who is in between can read and change it",
                remedy,
            ),
        }
        Ok(())
    }

    /// Tells whether the session is this client's own.
    async fn pooler(
        &mut self,
        link: &mut Link,
        backend: &Backend,
        since: Instant,
    ) -> Result<bool, ConnectError> {
        let (limit, target) = (self.config.query_timeout, &self.target.options);
        let (before, is_trusted) = (self.spent, self.config.trust_affinity);
        let stays = self.step(checks::stays(link, backend, target, limit, &Affinity::default())).await;
        if is_trusted {
            self.spent = before;
        }
        match stays {
            // As if it had not been asked, which is what a connection does.
            Err(error @ ConnectError::Pooler { .. }) if is_trusted => {
                let mut check = Check::bad(POOLER, &error, None);
                check.reason = format!("trust_affinity is set, but {}", check.reason);
                self.checks.push(check);
                Ok(false)
            }
            Err(error @ ConnectError::NoSecondConnection { .. }) if is_trusted => {
                let mut check = Check::bad(POOLER, &error, None);
                check.verdict = Verdict::Warning;
                check.reason = format!("none is taken for granted (trust_affinity); {}", check.reason);
                self.checks.push(check);
                Ok(true)
            }
            stays => {
                let is_own = self.settle(link, POOLER, stays)?.is_some();
                if is_own {
                    self.direct(link, since).await?;
                }
                Ok(is_own)
            }
        }
    }

    /// A server process that is older than the connection to it was another client's before.
    async fn direct(&mut self, link: &mut Link, since: Instant) -> Result<(), ConnectError> {
        let Some(rows) = self.ask(link, POOLER, statements::AGE.to_owned()).await? else { return Ok(()) };
        let here = clock::now() - since;
        let age =
            rows.first().and_then(|row| row.try_get::<i64, _>(0).ok()).and_then(|ms| u64::try_from(ms).ok());
        let reason = match age.map(Duration::from_millis) {
            Some(age) if age > here + CLOCK_SLACK => format!(
                "one that keeps a server connection for its client (session mode), which works: one server process \
                 answered throughout, and it is {} older than the connection",
                text(age.saturating_sub(here))
            ),
            _ => "none is seen, or one that keeps a server connection for its client (session mode): one server \
                  process answered throughout, and nobody else used it"
                .to_owned(),
        };
        self.good(POOLER, reason);
        Ok(())
    }

    fn ttl(&mut self, in_force: &InForce) {
        let bounds = in_force.enforcement.bounds(self.options, in_force.shortfalls());
        match bounds.vacancy_silent {
            Some(vacancy) => self.good(
                TTL,
                format!(
                    "the server frees the leases of a silent holder after {}, so that nobody leads for {} at most",
                    text(bounds.ttl),
                    text(vacancy)
                ),
            ),
            None => self.warning(
                TTL,
                format!("{}, so that nobody may lead for as long as it is silent", bounds.shortfalls.join("; ")),
                "use PostgreSQL 14 or later, and let the role set what is named",
            ),
        }
        self.bounds = Some(bounds);
    }

    /// Listens as a Locker does, and hears a word of its own.
    async fn wake_ups(&mut self, link: &mut Link) -> Result<(), ConnectError> {
        let limit = self.config.query_timeout;
        let listening = async { link.listen(statements::CHANNEL).await.map_err(refusal::of_statement) };
        let listens = self.step(listening).await;
        if self.settle(link, WAKE_UPS, listens)?.is_none() {
            return Ok(());
        }
        let (word, since) = (format!("{:016x} of a doctor", checks::random()), clock::now());
        let sent = timeout(limit, link.fetch(statements::say(&word))).await;
        if let Err(error) = sent.unwrap_or(Err(sqlx::Error::PoolTimedOut)) {
            let Some((code, reason)) = refusal::answered(&error) else {
                return Err(refusal::of_statement(error));
            };
            let remedy = match code.as_str() {
                "42501" => "let the role call it: GRANT EXECUTE ON FUNCTION pg_catalog.pg_notify(text, text)",
                _ => {
                    "see what keeps a commit with a notification from ending, such as one that waits for a replica"
                }
            };
            let reason =
                format!("none can be sent ({reason}): standbys learn of a release by their next poll");
            self.warning(WAKE_UPS, reason, remedy);
            return Ok(());
        }
        let hearing = async {
            while link.next().await?.payload() != word {}
            Ok(())
        };
        match timeout(limit, hearing).await {
            Ok(Ok(())) => self.good(WAKE_UPS, format!("one came back after {}", text(clock::now() - since))),
            Ok(Err::<(), crate::LossCause>(cause)) => {
                return Err(ConnectError::Unreachable { reason: cause.to_string() });
            }
            Err(_) => self.warning(
                WAKE_UPS,
                format!("one that was sent did not come back within {}", text(limit)),
                "see whether something between here and the server holds notifications back",
            ),
        }
        Ok(())
    }

    /// Times the statement of the heartbeat, and what a connection would have taken.
    async fn measure(&mut self, link: &mut Link, hosts: usize) -> Result<(), ConnectError> {
        let limit = self.config.query_timeout;
        let (spent, begin) = (self.spent, clock::now());
        let mut times = Vec::with_capacity(ROUND_TRIPS);
        while times.len() < ROUND_TRIPS && (times.is_empty() || clock::now() - begin < 2 * limit) {
            let since = clock::now();
            let seen = self.step(checks::see(link)).await;
            if self.settle(link, LATENCY, seen)?.is_none() {
                return Ok(());
            }
            times.push(clock::now() - since);
        }
        times.sort();
        let (Some(&min), Some(&max)) = (times.first(), times.last()) else { return Ok(()) };
        let median = times[times.len() / 2];
        let interval = self.options.heartbeat_interval;
        let reason = format!(
            "{} round trips took {}, {} and {} (least, median, most), and {} to connect",
            times.len(),
            text(min),
            text(median),
            text(max),
            text(spent)
        );
        if spent > limit {
            self.bad(LATENCY, ConnectError::Timeout { limit });
        } else if spent > limit / u32::try_from(hosts).unwrap_or(u32::MAX) {
            let reason =
                format!("{reason}, while each host has its share of the query timeout of {}", text(limit));
            self.warning(LATENCY, reason, format!("raise query_timeout to {} or more", text(spent * 2)));
        } else if max > limit / 4 {
            let reason = format!("{reason}, while an answer later than {} costs every lease", text(limit));
            self.warning(LATENCY, reason, format!("raise query_timeout to {} or more", text(max * 10)));
        } else if median > interval {
            let reason =
                format!("{reason}, which is longer than the heartbeat interval of {}", text(interval));
            self.warning(
                LATENCY,
                reason,
                format!("raise heartbeat_interval to {} or more", text(median * 2)),
            );
        } else {
            let reason = format!(
                "{reason}; the query timeout is {}, the heartbeat interval {}",
                text(limit),
                text(interval)
            );
            self.good(LATENCY, reason);
        }
        Ok(())
    }
}

/// To the microsecond below a millisecond, to the millisecond above.
fn text(duration: Duration) -> String {
    let unit = if duration < Duration::from_millis(10) { 1_000 } else { 1_000_000 };
    let nanos = u64::try_from(duration.as_nanos() / unit * unit).unwrap_or(u64::MAX);
    humantime::format_duration(Duration::from_nanos(nanos)).to_string()
}
