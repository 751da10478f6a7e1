//! Redis and Valkey as the store: [`Target`] says where it is, and what is asked of it.
//!
//! [`Locker::redis`](crate::Locker::redis) takes a client of the crate `redis`, or a [`Target`] for more;
//! [`Locker::connect`](crate::Locker::connect) takes `redis://` URLs.
//!
//! # What holds, and what does not
//!
//! Every lease is one key with a time to live, which the server's clock counts and the heartbeat restarts. A lost connection
//! alone is no loss: whoever is back before the deadline goes on with what the server confirms. All of
//! [what holds](crate#what-holds) holds as long as the server keeps what it has acknowledged.
//!
//! **Replication is asynchronous.** A primary that dies takes along what its replicas did not have yet: after a failover a
//! lease may be granted though somebody else still works under it, until that one notices at its next heartbeat. A server
//! that restarts without its data (or with `appendfsync everysec`, without the last second of it) is the same. What makes it
//! rarer is [`Target::wait_for_replicas`]; what makes it harmless is a
//! [fencing token](crate::Lease::fencing_token), which grows after a loss of data too as long as the server's clock did not
//! go back. **The server's clock counts the ttl**: where it is set forward, leases end early by that, and so before their holders
//! give up. Work that cannot bear either belongs on PostgreSQL. Several independent servers ("Redlock") are not offered: they do
//! not remove the need for a fence.
//!
//! # What the server needs
//!
//! * Redis 7.0 or newer, or Valkey.
//! * For `rediss://`, a certificate that the system trusts. It is always looked at.
//! * `maxmemory-policy noeviction`, if `maxmemory` is set: one that may evict a lease is refused.
//! * Of an ACL: `+set +get +ping +evalsha +eval +script|load +time +publish +subscribe +info +client|setname`, what the scripts
//!   call (`get set del pexpire pexpireat pttl exists zadd zrem zrange zscore zremrangebyscore`), the keys `leasehold:*`, and
//!   the channels `leasehold:*`. Where `subscribe` is denied standbys poll, where `info` is, nobody can tell whether the server evicts.
//!   More of it: `+pubsub|channels +scan` for an [`Observer`](crate::Observer) and `leasehold status`, `+wait` for
//!   [`Target::wait_for_replicas`], `+cluster|slots` on a cluster, and the keys `@@wakuwaku-entity:*` for [`Layout::Wakuwaku`].
//!
//! # Keys
//!
//! | key | what | until |
//! |---|---|---|
//! | `leasehold:{<kind>:<name>}:h` | who holds it: a string, of which only the holder knows 128 bits | its ttl |
//! | `leasehold:{rwlock:<name>}:r` | its readers: a sorted set, scored by when each one's lease ends, in milliseconds | the last one's ttl |
//! | `leasehold:{rwlock:<name>}:i` | who waits to write: a sorted set, as the one above | twice the retry interval |
//! | `leasehold:{<kind>:<name>}:q` | who waits: a sorted set, as the one above | twice the retry interval |
//! | `leasehold:{lock:<name>}:s` | which slot of an `every` was served last, by whom: a string | for ever |
//! | `leasehold:{token:<0 to 1023>}` | the last fencing token given under any name that hashes there | for ever |
//!
//! `<kind>` is `lease`, `lock` or `rwlock`. A name in a scope is written `<kind>+scope:<bytes of the scope's name>:<scope><name>`,
//! one that stands for a key `<kind>+key:<key>`, for a pair `<kind>+pair:<first>,<second>`. All keys of one name are in one slot of a cluster, and no two names share a key, whatever
//! braces and colons they have. Wake-ups and messages go through the channels `leasehold:<database>` and
//! `leasehold:<database>:<session>`.

use std::fmt;

use ::redis::{Client, ConnectionInfo, IntoConnectionInfo, RedisError};

use crate::name::{Kind, Name};

/// Where a Redis or Valkey is, and what is asked of it.
///
/// ```
/// use leasehold::redis::{Layout, Target};
///
/// # fn main() -> Result<(), redis::RedisError> {
/// let target = Target::from(redis::Client::open("redis://cache.internal/0")?).wait_for_replicas(1);
/// let cluster = Target::cluster(["redis://10.0.0.1:6379", "redis://10.0.0.2:6379"])?.layout(Layout::Wakuwaku);
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Target {
    pub(crate) place: Place,
    pub(crate) layout: Layout,
    pub(crate) replicas: u32,
}

#[derive(Clone)]
pub(crate) enum Place {
    Server(Box<ConnectionInfo>),
    /// Some nodes of it.
    Cluster(Vec<ConnectionInfo>),
}

/// How the keys of locks are called.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Layout {
    /// As in [the table](crate::redis#keys).
    #[default]
    Leasehold,
    /// Locks and readers-writer locks [in a scope](crate::Scope) as wakuwaku has them, so that both keep each other out:
    /// `@@wakuwaku-entity:Lock:<scope>:<name>`, and `@@wakuwaku-entity:RwLock:{<scope>:<name>}` with `:w` and `:r`. All other
    /// names, and the leases of `run`, are as in [`Layout::Leasehold`].
    ///
    /// Who waits there is not told to others: a release is pushed to everybody. A scope with a colon or a brace in its name is
    /// refused, since it could be taken for another one.
    Wakuwaku,
}

/// Gives the key whose value says who holds a name, or writes under it: the first one of [the table](crate::redis#keys). What
/// the value has for people are the second word, the ttl in milliseconds, and the last one, the identity; the third one is the proof of the
/// grant, and a secret.
///
/// ```
/// use leasehold::{Kind, redis::holder_key};
///
/// assert_eq!(holder_key(Kind::Lease, "sweeper"), b"leasehold:{lease:sweeper}:h");
/// ```
#[must_use]
pub fn holder_key(kind: Kind, name: impl Into<Name>) -> Vec<u8> {
    crate::store::redis::holder_key(kind, &name.into())
}

impl Target {
    /// A cluster, of which some nodes are known.
    ///
    /// # Errors
    ///
    /// What the crate `redis` says of a URL that it cannot read.
    pub fn cluster<T: IntoConnectionInfo>(nodes: impl IntoIterator<Item = T>) -> Result<Self, RedisError> {
        let nodes =
            nodes.into_iter().map(IntoConnectionInfo::into_connection_info).collect::<Result<_, _>>()?;
        Ok(Self { place: Place::Cluster(nodes), layout: Layout::default(), replicas: 0 })
    }

    /// Sets how the keys of locks are called.
    #[must_use]
    pub const fn layout(mut self, layout: Layout) -> Self {
        self.layout = layout;
        self
    }

    /// Sets how many replicas have to acknowledge a grant before it counts. Default none.
    ///
    /// A grant that they do not acknowledge within half of the query timeout is undone, and has failed. It makes a loss of
    /// leases by a failover rarer and not impossible: a replica that has acknowledged nothing may be promoted. Each grant
    /// waits for them; others on the same Locker wait behind it. Not for a cluster.
    #[must_use]
    pub const fn wait_for_replicas(mut self, replicas: u32) -> Self {
        self.replicas = replicas;
        self
    }
}

impl From<Client> for Target {
    fn from(client: Client) -> Self {
        Self::from(client.get_connection_info().clone())
    }
}

impl From<&Client> for Target {
    fn from(client: &Client) -> Self {
        Self::from(client.get_connection_info().clone())
    }
}

impl From<ConnectionInfo> for Target {
    fn from(info: ConnectionInfo) -> Self {
        Self { place: Place::Server(Box::new(info)), layout: Layout::default(), replicas: 0 }
    }
}

/// Without user and password.
impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Target")
            .field("at", &self.place.to_string())
            .field("layout", &self.layout)
            .field("replicas", &self.replicas)
            .finish()
    }
}

impl Place {
    /// The number of the database. A cluster has one.
    pub(crate) fn database(&self) -> i64 {
        match self {
            Self::Server(info) => info.redis_settings().db(),
            Self::Cluster(_) => 0,
        }
    }
}

/// Without user and password.
impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Server(info) => match self.database() {
                0 => write!(f, "{}", info.addr()),
                db => write!(f, "{}/{db}", info.addr()),
            },
            Self::Cluster(nodes) => {
                let nodes: Vec<_> = nodes.iter().map(|node| node.addr().to_string()).collect();
                f.write_str(&nodes.join(","))
            }
        }
    }
}
