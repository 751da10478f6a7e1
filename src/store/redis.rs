//! The store on Redis and Valkey: each grant is a key with a time to live of its own.
//!
//! A session is its set of grants, not its connection: while a statement has not been answered it connects anew and asks
//! again, which every command here bears, since a grant is known by its 128 random bits. The driver bounds that by the query
//! timeout.
//!
//! | file | role |
//! |---|---|
//! | `keys` | how the keys of a name are called |
//! | `grant` | what stands in them |
//! | `scripts` | what the server does in one go |
//! | `link` | a connection, or those of a cluster |
//! | `checks` | what is asked of a server first |
//! | `session` | the seam's `Session` |
//! | `wire` | releases and messages as text |
//! | `refusal`, `url`, `examine` | errors; URLs; `diagnose` |

mod checks;
mod examine;
mod grant;
mod keys;
mod link;
mod refusal;
mod scripts;
mod session;
mod url;
mod wire;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

pub(crate) use self::examine::examine;
use self::grant::Held;
use self::keys::Keys;
use self::scripts::Scripts;
use self::session::RedisSession;
pub(crate) use self::url::{is_ours, target_of_url};
use crate::clock;
use crate::error::ConnectError;
use crate::name::{Kind, Name};
use crate::options::Options;
use crate::redis::Target;
use crate::store::{Enforcement, Store};

/// The key whose value says who holds a name.
pub(crate) fn holder_key(kind: Kind, name: &Name) -> Vec<u8> {
    Keys::of_leasehold(kind, name).holder
}

/// Shortest life of what shows that somebody waits.
const SHORTEST_WAIT: Duration = Duration::from_millis(500);

const ENFORCEMENT: Enforcement =
    Enforcement { frees_silent_holders: true, any_answer_renews: false, reconnects: true };

/// What a session needs of the options.
struct Config {
    target: Target,
    identity: String,
    query_timeout: Duration,
    ttl: Duration,
    /// How long it shows that a session waits, which asks at every retry interval.
    waiting: Duration,
}

/// What the sessions of one Locker share.
struct Common {
    config: Config,
    scripts: Scripts,
    /// Grants that a session left behind when it was given up, and until when they may still arrive in the server.
    leftovers: Mutex<Vec<(Held, Instant)>>,
}

impl Common {
    fn leftovers(&self) -> MutexGuard<'_, Vec<(Held, Instant)>> {
        self.leftovers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of the database.
    fn database(&self) -> i64 {
        self.config.target.place.database()
    }
}

pub(crate) struct RedisStore {
    common: Arc<Common>,
}

impl RedisStore {
    /// No I/O.
    pub(crate) fn new(target: Target, options: &Options) -> Self {
        let config = Config {
            target,
            identity: options.identity.clone(),
            query_timeout: options.query_timeout,
            ttl: options.bounds().ttl,
            waiting: options.retry_interval.saturating_mul(2).max(SHORTEST_WAIT),
        };
        Self { common: Arc::new(Common { config, scripts: Scripts::new(), leftovers: Mutex::default() }) }
    }
}

impl Store for RedisStore {
    type Session = RedisSession;

    fn enforcement(&self) -> Enforcement {
        ENFORCEMENT
    }

    fn address(&self) -> String {
        self.common.config.target.place.to_string()
    }

    fn has_leftovers(&self) -> bool {
        let now = clock::now();
        self.common.leftovers().iter().any(|(_, until)| now < *until)
    }

    async fn connect(&mut self) -> Result<RedisSession, ConnectError> {
        RedisSession::open(Arc::clone(&self.common)).await
    }
}
