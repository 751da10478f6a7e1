//! What can go wrong, one variant for each decision that a caller can take.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::name::{Name, NameError};
use crate::options::OptionsError;

type Source = Box<dyn std::error::Error + Send + Sync>;

/// Why a [`Locker`](crate::Locker) could not be made, or a request to the store could not be sent.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The options are not usable.
    #[error(transparent)]
    Options(#[from] OptionsError),
    /// The name is not usable.
    #[error(transparent)]
    Name(#[from] NameError),
    /// The URL of the store cannot be used.
    #[error(transparent)]
    Url(#[from] UrlError),
    /// The store cannot be reached, or must not be used.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The store did not take the request, or not in time. It is not sent later.
    #[error(
        "the store did not take the request within {}: try again when it can be reached; on PostgreSQL the role needs \
         the right to call pg_notify",
        humantime::format_duration(*.limit)
    )]
    Unanswered {
        /// The query timeout.
        limit: Duration,
    },
    /// The Locker has been closed.
    #[error("the locker is closed")]
    Closed,
    /// The driver, which speaks with the store, is gone: a bug in leasehold, or its thread could not be started.
    #[error("the driver of the locker is gone: make a new Locker, and report this with the log")]
    Driver,
}

/// Why the URL of a store cannot be used. What is shown of the URL is its scheme alone: the rest may hold a password.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UrlError {
    /// There is no scheme before the first colon.
    #[error(
        "the store's URL has no scheme: write file:/var/lib/my-app/leases, postgres://user@host/database, or redis://host"
    )]
    NoScheme,
    /// The scheme is not one of a known store.
    #[error(
        "there is no store for {scheme:?} URLs: write file:/var/lib/my-app/leases, postgres://user@host/database, or redis://host"
    )]
    UnknownScheme {
        /// What stands before the first colon.
        scheme: String,
    },
    /// The store exists, but this build does not have it.
    #[error("{scheme:?} URLs need leasehold's feature {feature:?}, which this build does not have")]
    FeatureOff {
        /// What stands before the first colon.
        scheme: String,
        /// The Cargo feature that brings it.
        feature: &'static str,
    },
    /// A `postgres:` URL cannot be read.
    #[error("the URL of the PostgreSQL server cannot be used: {remedy}")]
    Postgres {
        /// What to change.
        remedy: String,
    },
    /// A `redis:` URL cannot be read.
    #[error("the URL of the Redis server cannot be used: {remedy}")]
    Redis {
        /// What to change.
        remedy: String,
    },
    /// A `file:` URL names a host.
    #[error("a file: URL takes a path on this host, not a host: write file:/var/lib/my-app/leases")]
    FileHost,
    /// A `file:` URL begins with what only a shell expands.
    #[error(
        "{start:?} is expanded by a shell, not in a URL: write the path in full, as in file:/var/lib/my-app/leases"
    )]
    FileShell {
        /// How the path begins.
        start: &'static str,
    },
    /// A `file:` URL has no path.
    #[error("the file: URL has no path: write file:/var/lib/my-app/leases")]
    FilePath,
}

/// What to change, where that is the same whatever the details.
mod remedy {
    pub(super) const LOGIN: &str = "check the user, the password, and on PostgreSQL pg_hba.conf and that the user may connect to the database";
    pub(super) const DATABASE: &str = "create it, or correct its name in the URL";
    pub(super) const TLS: &str = "check the server's certificate, the sslmode and sslrootcert of the URL, and leasehold's feature \"tls\"";
    pub(super) const POOLER: &str = "connect to the server itself, or to a pool with pool_mode = session";
    pub(super) const USED_SESSION: &str = "connect to the server itself, or make the pooler reset its connections \
        (PgBouncer: server_reset_query = DISCARD ALL)";
    pub(super) const SECOND_CONNECTION: &str =
        "leave room for one, or set trust_affinity where there is certainly no pooler in transaction mode";
    pub(super) const REPLICA: &str = "connect to the primary, such as by a host name that follows it";
    pub(super) const UNSUPPORTED: &str = "use a PostgreSQL server";
    pub(super) const EVICTS: &str =
        "set its maxmemory-policy to noeviction, or give leases a server of their own";
    pub(super) const REPLICAS: &str = "look at the replication, or ask for fewer by wait_for_replicas";
    pub(super) const TOO_OLD: &str = "use Redis 7.0 or newer, or Valkey";
    pub(super) const fn cluster(is_cluster: bool) -> &'static str {
        if is_cluster {
            "write redis+cluster:// (rediss+cluster:// for TLS), with some nodes of it"
        } else {
            "write redis:// (rediss:// for TLS)"
        }
    }
    pub(super) const LOCAL_DISK: &str = "use a directory on a local disk";
}

/// Why a session with the store could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The store did not answer in time.
    #[error("the store did not answer the connection within {}", humantime::format_duration(*.limit))]
    Timeout {
        /// The query timeout, which bounds connecting too; of several hosts, each has its share.
        limit: Duration,
    },
    /// The store cannot be reached.
    #[error("the store cannot be reached: {reason}")]
    Unreachable {
        /// What happened, and what to look at.
        reason: String,
    },
    /// The server refused the login, or what the login may do.
    #[error("the server refused the login ({reason}): {}", remedy::LOGIN)]
    Authentication {
        /// What the server said.
        reason: String,
    },
    /// The database does not exist.
    #[error("the server does not know the database ({reason}): {}", remedy::DATABASE)]
    UnknownDatabase {
        /// What the server said.
        reason: String,
    },
    /// The connection could not be encrypted as the URL demands.
    #[error("no TLS connection to the server: {reason}: {}", remedy::TLS)]
    Tls {
        /// What went wrong.
        reason: String,
    },
    /// A pooler in transaction or statement mode stands before the server: a lock would stay on a connection that
    /// others use next.
    #[error(
        "a pooler that shares server connections between statements stands before the server ({evidence}): {}",
        remedy::POOLER
    )]
    Pooler {
        /// What gave it away.
        evidence: String,
    },
    /// The session came with locks that somebody took before.
    #[error("the session came with advisory locks of an earlier client: {}", remedy::USED_SESSION)]
    UsedSession,
    /// Whether a pooler stands before the server could not be told.
    #[error(
        "a second connection, which tells whether a pooler stands before the server, could not be had ({reason}): {}",
        remedy::SECOND_CONNECTION
    )]
    NoSecondConnection {
        /// What went wrong.
        reason: String,
    },
    /// The server is a read replica: it grants locks that the primary knows nothing of.
    #[error("the server is a read replica: {}", remedy::REPLICA)]
    Replica,
    /// None of the hosts that the URL names can be used.
    #[error("none of the hosts can be used: {}", listed(.tried))]
    NoHost {
        /// Where, and why not; in the order in which they were tried.
        tried: Vec<(String, ConnectError)>,
    },
    /// The server does not have the lock functions of PostgreSQL, or has them do nothing.
    #[error("the server's advisory locks cannot be relied upon ({reason}): {}", remedy::UNSUPPORTED)]
    Unsupported {
        /// What gave it away.
        reason: String,
    },
    /// A Redis server deletes keys, leases among them, when its memory is full.
    #[error(
        "the server evicts keys, leases among them, when its memory is full (maxmemory-policy {policy}): {}",
        remedy::EVICTS
    )]
    Evicts {
        /// The policy that it has.
        policy: String,
    },
    /// A Redis server is too old.
    #[error("the server is too old (version {version}): {}", remedy::TOO_OLD)]
    TooOld {
        /// What it calls itself.
        version: String,
    },
    /// A Redis server has fewer replicas than have to acknowledge every grant: none would be given.
    #[error(
        "the server has {replicas} replicas, and {wanted} have to acknowledge every grant: {}",
        remedy::REPLICAS
    )]
    TooFewReplicas {
        /// How many are attached.
        replicas: u32,
        /// How many have to.
        wanted: u32,
    },
    /// A Redis server is a node of a cluster, and the URL is not that of one; or the other way round.
    #[error(
        "the server is {} cluster: {}",
        if *is_cluster { "a node of a" } else { "not a node of any" }, remedy::cluster(*is_cluster)
    )]
    Cluster {
        /// It is.
        is_cluster: bool,
    },
    /// The directory of the file store cannot be used.
    #[error("cannot use the directory {}: {remedy}", path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
        /// What to change.
        remedy: &'static str,
        /// What the system said.
        source: Source,
    },
    /// The directory of the file store lies on a file system whose locks cannot be trusted.
    #[error("{} lies on {file_system}, whose locks leasehold does not trust: {}", path.display(), remedy::LOCAL_DISK)]
    NetworkFileSystem {
        /// The directory.
        path: PathBuf,
        /// The kind of file system.
        file_system: &'static str,
    },
}

impl ConnectError {
    /// Gives what to change, where the text of the error ends with that.
    pub(crate) fn remedy(&self) -> Option<&str> {
        Some(match self {
            Self::Authentication { .. } => remedy::LOGIN,
            Self::UnknownDatabase { .. } => remedy::DATABASE,
            Self::Tls { .. } => remedy::TLS,
            Self::Pooler { .. } => remedy::POOLER,
            Self::UsedSession => remedy::USED_SESSION,
            Self::NoSecondConnection { .. } => remedy::SECOND_CONNECTION,
            Self::Replica => remedy::REPLICA,
            Self::Unsupported { .. } => remedy::UNSUPPORTED,
            Self::Evicts { .. } => remedy::EVICTS,
            Self::TooOld { .. } => remedy::TOO_OLD,
            Self::TooFewReplicas { .. } => remedy::REPLICAS,
            Self::Cluster { is_cluster } => remedy::cluster(*is_cluster),
            Self::Directory { remedy, .. } => remedy,
            Self::NetworkFileSystem { .. } => remedy::LOCAL_DISK,
            // What is to be done depends on the reason, which says it where it is known.
            Self::Unreachable { .. } | Self::Timeout { .. } | Self::NoHost { .. } => return None,
        })
    }

    /// Tells whether trying again cannot help: what stands at the other end must not be used.
    ///
    /// Then a run ends with [`RunError::Refused`]. All else may mend itself while a run waits: servers start late,
    /// passwords rotate, replicas are promoted.
    #[must_use]
    pub fn is_permanent(&self) -> bool {
        match self {
            Self::Pooler { .. }
            | Self::Unsupported { .. }
            | Self::Evicts { .. }
            | Self::TooOld { .. }
            | Self::Cluster { .. } => true,
            Self::NoHost { tried } => tried.iter().all(|(_, error)| error.is_permanent()),
            _ => false,
        }
    }
}

fn listed(tried: &[(String, ConnectError)]) -> String {
    let texts: Vec<_> = tried.iter().map(|(address, error)| format!("{address}: {error}")).collect();
    texts.join("; ")
}

/// Why a [`Lock`](crate::Lock) or [`RwLock`](crate::RwLock) was not acquired, or not held to the end. That somebody else holds it is no error,
/// unless there was a limit to waiting.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LockError {
    /// It was not this one's turn within the limit.
    #[error(
        "{name:?} was not to be had within {}{}",
        humantime::format_duration(rounded(*.waited)), held_by(holder.as_deref())
    )]
    Timeout {
        /// The name.
        name: Name,
        /// How long was waited.
        waited: Duration,
        /// Who held it, where that could be told in time.
        holder: Option<String>,
    },
    /// The lock was lost while it was held: somebody else may have been in as well.
    #[error("the lock was lost while it was held: {cause}")]
    Lost {
        /// Why.
        cause: LossCause,
    },
    /// The Locker is closed, or was while this one waited.
    #[error("the locker is closed")]
    Closed,
    /// The store must not be used, and trying again cannot mend that: see [`ConnectError::is_permanent`].
    #[error(transparent)]
    Refused(Arc<ConnectError>),
    /// The name is not usable.
    #[error(transparent)]
    Name(NameError),
    /// This Locker contends for as many names as [`Options::max_held`](crate::Options::max_held) allows.
    #[error("this locker already contends for {max_held} names: raise max_held, or use a second Locker")]
    TooManyNames {
        /// How many that is.
        max_held: usize,
    },
    /// The time to live of the lock is not usable.
    #[error(
        "a lock cannot have a ttl of {}: give it one from 1 ms to {}",
        humantime::format_duration(*.ttl), humantime::format_duration(crate::options::MAX_TTL)
    )]
    Ttl {
        /// What was asked for.
        ttl: Duration,
    },
    /// The store frees locks with their session, so none can be [kept](crate::LockGuard::keep) without a handle.
    #[error(
        "the store frees locks with their session, so nothing can be left to its ttl: hold the guard for as long"
    )]
    EndsWithSession,
    /// The store could not tell. It holds nothing for this one.
    #[error("the store could not tell: {reason}")]
    Failed {
        /// What it said, and what to change.
        reason: String,
    },
    /// The store did not answer one who does not wait for others.
    #[error("the store did not answer within {}", humantime::format_duration(*.limit))]
    Unanswered {
        /// The query timeout.
        limit: Duration,
    },
    /// The driver, which speaks with the store, is gone: a bug in leasehold.
    #[error("the driver of the locker is gone: make a new Locker, and report this with the log")]
    Driver,
}

/// Why a schedule of [`Every`](crate::Every) cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ScheduleError {
    /// The interval is too short or too long.
    #[error(
        "the interval must be at least {} and at most {}, it is {}",
        humantime::format_duration(crate::every::MIN_INTERVAL),
        humantime::format_duration(crate::every::MAX_INTERVAL),
        humantime::format_duration(*.interval)
    )]
    Interval {
        /// What was asked for.
        interval: Duration,
    },
    /// The offset is not shorter than the interval.
    #[error(
        "the offset must be shorter than the interval, which is {}; it is {}",
        humantime::format_duration(*.interval), humantime::format_duration(*.offset)
    )]
    Offset {
        /// What was asked for.
        offset: Duration,
        /// The interval.
        interval: Duration,
    },
    /// The jitter is not shorter than the interval.
    #[error(
        "the jitter must be shorter than the interval, which is {}; it is {}",
        humantime::format_duration(*.interval), humantime::format_duration(*.jitter)
    )]
    Jitter {
        /// What was asked for.
        jitter: Duration,
        /// The interval.
        interval: Duration,
    },
    /// An offset without a grid.
    #[error("an offset moves the grid of slots, and Spacing::AfterFinish has none: leave one of them out")]
    OffsetWithoutGrid,
}

/// Why [`Every`](crate::Every) does not serve slots, or not to the end.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EveryError {
    /// The schedule is not usable.
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
    /// The name is not usable.
    #[error(transparent)]
    Name(NameError),
    /// This Locker contends for as many names as [`Options::max_held`](crate::Options::max_held) allows.
    #[error("this locker already contends for {max_held} names: raise max_held, or use a second Locker")]
    TooManyNames {
        /// How many that is.
        max_held: usize,
    },
    /// The store must not be used, and trying again cannot mend that: see [`ConnectError::is_permanent`].
    #[error(transparent)]
    Refused(Arc<ConnectError>),
    /// The store cannot keep which slots were served, and trying again does not mend that: on PostgreSQL the table is
    /// missing, and this role may not make it.
    #[error("the store cannot keep which slots were served: {reason}")]
    Forbidden {
        /// What it said, and what to change; on PostgreSQL with the SQL to run.
        reason: String,
    },
    /// The store could not tell which slots were served, or keep it: only of [`once`](crate::Every::once).
    #[error("the store could not tell which slots were served: {reason}")]
    Failed {
        /// What it said.
        reason: String,
    },
    /// The store did not answer: only of [`once`](crate::Every::once).
    #[error("the store did not answer within {}", humantime::format_duration(*.limit))]
    Unanswered {
        /// The query timeout.
        limit: Duration,
    },
    /// The lock was lost while the slot was served: only of [`once`](crate::Every::once).
    #[error("the lock was lost while the slot was served: {cause}")]
    Lost {
        /// Why.
        cause: LossCause,
    },
    /// The Locker is closed, or it was to stop before it had served the slot: only of [`once`](crate::Every::once).
    #[error("told to stop before the slot was served")]
    Stopped,
    /// The driver, which speaks with the store, is gone: a bug in leasehold.
    #[error("the driver of the locker is gone: make a new Locker, and report this with the log")]
    Driver,
}

/// To milliseconds: nobody reads more.
fn rounded(duration: Duration) -> Duration {
    Duration::from_millis(duration.as_millis().try_into().unwrap_or(u64::MAX))
}

fn held_by(holder: Option<&str>) -> String {
    holder.map(|holder| format!(": held by {holder}")).unwrap_or_default()
}

/// Why [`run`](crate::Locker::run) ended without the job's value.
///
/// It implements [`std::error::Error`] for every `E` that can be shown, also one that is no error itself, such as
/// `anyhow::Error`; so `?` works.
#[derive(Debug)]
#[non_exhaustive]
pub enum RunError<E> {
    /// The job returned this error while it held the lease, which was released.
    Job(E),
    /// The name is in use on this Locker: a candidate of that name stands by, leads or drains.
    AlreadyRunning {
        /// The name.
        name: Name,
    },
    /// The name is not usable.
    Name(NameError),
    /// This Locker contends for as many names as [`Options::max_held`](crate::Options::max_held) allows.
    TooManyNames {
        /// How many that is.
        max_held: usize,
    },
    /// The options of this candidate are not usable.
    Options(OptionsError),
    /// The store must not be used, and trying again cannot mend that: see [`ConnectError::is_permanent`].
    Refused(Arc<ConnectError>),
    /// The driver, which speaks with the store, is gone: a bug in leasehold. No lease of this Locker is held.
    Driver,
}

impl<E: fmt::Display> fmt::Display for RunError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            // Alternate: with its causes, for the kinds of error that can tell them. They cannot be handed on as
            // `source`, since not every error of a job is a `std::error::Error`.
            Self::Job(error) => write!(f, "the job failed: {error:#}"),
            Self::AlreadyRunning { name } => {
                write!(
                    f,
                    "a candidate for {name:?} is already running on this locker: use a second Locker to contend with yourself"
                )
            }
            Self::Name(error) => error.fmt(f),
            Self::TooManyNames { max_held } => {
                write!(
                    f,
                    "this locker already contends for {max_held} names: raise max_held, or use a second Locker"
                )
            }
            Self::Options(error) => error.fmt(f),
            Self::Refused(error) => error.fmt(f),
            Self::Driver => f.write_str(
                "the driver of the locker is gone: make a new Locker, and report this with the log",
            ),
        }
    }
}

impl<E: fmt::Debug + fmt::Display> std::error::Error for RunError<E> {}

impl<E> RunError<E> {
    /// Gives the job's own error, if that is what it was.
    pub fn into_job(self) -> Option<E> {
        match self {
            Self::Job(error) => Some(error),
            _ => None,
        }
    }
}

/// Why a lease was lost.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LossCause {
    /// A statement went unanswered for the query timeout; the session was given up.
    #[error("the store did not answer within {}", humantime::format_duration(*.limit))]
    Timeout {
        /// The query timeout.
        limit: Duration,
    },
    /// The deadline passed before anything was answered: the process or its host stood still.
    #[error(
        "the deadline passed before the store answered: this process or its host stood still, or was starved"
    )]
    Deadline,
    /// The store ended the session.
    #[error("the store ended the session: {reason}")]
    Closed {
        /// What the store, or the socket, said.
        reason: String,
        /// The SQLSTATE, where the store is a database and sent one in answer to a statement. What PostgreSQL says to a
        /// session that is idle when it ends it does not come through the client library: then this is `None`.
        sqlstate: Option<String>,
    },
    /// The session was alive, but could not be trusted any more; it was given up.
    #[error("the session cannot be trusted any more: {reason}")]
    Distrusted {
        /// What was wrong with it.
        reason: String,
    },
    /// The session is alive, but the lease is no longer this session's.
    #[error("the store no longer has this lease for the session")]
    Gone,
    /// The driver panicked: a bug in leasehold.
    #[error("the driver is gone")]
    Driver,
}
