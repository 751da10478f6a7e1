//! The stores under test. A further store is added here, and only here.

use std::fs::{self, File};
use std::path::PathBuf;
use std::thread;

use leasehold::{Key, Kind, Locker, Memory, Name, Options};
use tempfile::TempDir;

#[cfg(all(unix, feature = "postgres"))]
use super::postgres::{Database, Proxy};
#[cfg(all(unix, feature = "redis"))]
use super::redis::Server;
use super::until;

/// A store under test, empty at first.
pub(crate) enum Stage {
    Files(TempDir),
    /// Locks belong to sessions.
    Memory(Memory),
    /// Locks have a time to live of their own.
    Expiring(Memory),
    #[cfg(all(unix, feature = "postgres"))]
    Postgres(Box<Postgres>),
    #[cfg(all(unix, feature = "redis"))]
    Redis(Box<Server>),
    /// A cluster of one node.
    #[cfg(all(unix, feature = "redis"))]
    Cluster(Box<Server>),
}

/// A database of the test's own. Its Lockers come through a proxy.
#[cfg(all(unix, feature = "postgres"))]
pub(crate) struct Postgres {
    pub(crate) proxy: Proxy,
    pub(crate) database: Database,
}

/// Runs the body on every store; a failure names the store.
pub(crate) async fn on_every_store(body: impl AsyncFn(&Stage)) {
    for stage in Stage::all() {
        let named = Named(stage.kind());
        body(&stage).await;
        drop(named);
    }
}

/// As [`on_every_store`], for bodies that make runtimes of their own: every driver is on its own thread then.
pub(crate) fn on_every_store_outside_of_a_runtime(body: impl Fn(&Stage)) {
    for stage in Stage::all() {
        let named = Named(stage.kind());
        body(&stage);
        drop(named);
    }
}

struct Named(&'static str);

impl Drop for Named {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("failed on the store: {}", self.0);
        }
    }
}

impl Stage {
    /// One after the other, since a server takes a while to start.
    fn all() -> impl Iterator<Item = Self> {
        let all: &[fn() -> Self] = &[
            Self::files,
            || Self::Memory(Memory::new()),
            || Self::Expiring(Memory::expiring()),
            #[cfg(all(unix, feature = "postgres"))]
            Self::postgres,
            #[cfg(all(unix, feature = "redis"))]
            Self::redis,
            #[cfg(all(unix, feature = "redis"))]
            Self::cluster,
        ];
        all.iter().map(|stage| stage())
    }

    #[cfg(all(unix, feature = "postgres"))]
    pub(crate) fn postgres() -> Self {
        let database = Database::new();
        let target = database.options();
        let proxy = Proxy::to(target.get_host(), target.get_port());
        Self::Postgres(Box::new(Postgres { proxy, database }))
    }

    #[cfg(all(unix, feature = "redis"))]
    pub(crate) fn redis() -> Self {
        Self::Redis(Box::new(Server::start()))
    }

    #[cfg(all(unix, feature = "redis"))]
    pub(crate) fn cluster() -> Self {
        Self::Cluster(Box::new(Server::cluster()))
    }

    pub(crate) fn files() -> Self {
        Self::Files(tempfile::tempdir().unwrap())
    }

    pub(crate) const fn kind(&self) -> &'static str {
        match self {
            Self::Files(_) => "files",
            Self::Memory(_) => "memory",
            Self::Expiring(_) => "memory with expiry",
            #[cfg(all(unix, feature = "postgres"))]
            Self::Postgres(_) => "PostgreSQL",
            #[cfg(all(unix, feature = "redis"))]
            Self::Redis(_) => "Redis",
            #[cfg(all(unix, feature = "redis"))]
            Self::Cluster(_) => "a cluster of Redis",
        }
    }

    pub(crate) fn locker(&self, options: Options) -> Locker {
        match self {
            Self::Files(dir) => Locker::file(dir.path(), options).unwrap(),
            Self::Memory(memory) | Self::Expiring(memory) => Locker::memory(memory, options).unwrap(),
            #[cfg(all(unix, feature = "postgres"))]
            Self::Postgres(postgres) => {
                let target = postgres.database.options().host("127.0.0.1").port(postgres.proxy.port());
                Locker::postgres(target, options).unwrap()
            }
            #[cfg(all(unix, feature = "redis"))]
            Self::Redis(_) | Self::Cluster(_) => Locker::at(&self.url(), options).unwrap(),
        }
    }

    /// The directory of the file store.
    pub(crate) fn dir(&self) -> &TempDir {
        match self {
            Self::Files(dir) => dir,
            _ => panic!("{} has no directory", self.kind()),
        }
    }

    /// Where other processes find the store. On PostgreSQL directly, without the proxy.
    pub(crate) fn url(&self) -> String {
        match self {
            #[cfg(all(unix, feature = "postgres"))]
            Self::Postgres(postgres) => {
                sqlx::ConnectOptions::to_url_lossy(&postgres.database.options()).to_string()
            }
            #[cfg(all(unix, feature = "redis"))]
            Self::Redis(server) => server.url(),
            #[cfg(all(unix, feature = "redis"))]
            Self::Cluster(server) => server.url().replacen("redis:", "redis+cluster:", 1),
            _ => format!("file:{}", self.dir().path().display()),
        }
    }

    pub(crate) fn lock_file(&self, name: &str) -> PathBuf {
        self.dir().path().join(format!("{}.lock", Key::of(Kind::Lease, name)))
    }

    /// Tells whether nobody holds the lease at this instant, as the store sees it.
    pub(crate) fn is_free(&self, name: &str) -> bool {
        match self {
            Self::Files(_) => match File::open(self.lock_file(name)) {
                Ok(file) => file.try_lock().is_ok_and(|()| file.unlock().is_ok()),
                Err(_) => true,
            },
            Self::Memory(memory) | Self::Expiring(memory) => memory.holders(&Name::from(name)).is_empty(),
            #[cfg(all(unix, feature = "postgres"))]
            Self::Postgres(postgres) => {
                postgres.database.admin().holder(Key::of(Kind::Lease, name).get()).is_none()
            }
            #[cfg(all(unix, feature = "redis"))]
            Self::Redis(server) | Self::Cluster(server) => {
                server.get(&format!("leasehold:{{lease:{name}}}:h")).is_none()
            }
        }
    }

    /// Takes one lease away from whoever has it, without a word; its session lives.
    pub(crate) fn take_away(&self, identity: &str, name: &str) {
        self.take_key_away(identity, Key::of(Kind::Lease, name));
    }

    /// As [`take_away`](Self::take_away), of any kind.
    pub(crate) fn take_key_away(&self, identity: &str, key: Key) {
        match self {
            Self::Files(dir) => {
                let other = dir.path().join("other");
                File::create(&other).unwrap();
                fs::rename(other, dir.path().join(format!("{key}.lock"))).unwrap();
            }
            Self::Memory(memory) | Self::Expiring(memory) => memory.revoke_key(identity, key),
            #[cfg(all(unix, feature = "postgres"))]
            Self::Postgres(postgres) => {
                let key = key.get();
                let backend = postgres.database.admin().holder(key).expect("somebody has the lease");
                let theirs = postgres.database.admin().backends(&format!("leasehold/{identity}"));
                assert!(theirs.contains(&backend), "{identity} has {theirs:?}, the lease is with {backend}");
                postgres.proxy.slip_in(backend, &format!("SELECT pg_advisory_unlock({key})")).unwrap();
            }
            #[cfg(all(unix, feature = "redis"))]
            Self::Redis(server) | Self::Cluster(server) => {
                let is_it = |name: &String| {
                    let held = name.strip_suffix(":h").or_else(|| name.strip_suffix(":r"));
                    held.is_some_and(|held| key_of_redis(held) == Some(key))
                };
                let name = server.keys("leasehold:{*").into_iter().find(is_it).expect("somebody has it");
                let theirs = match server.try_ask::<Vec<u8>>(&["GET", &name]) {
                    Ok(value) => vec![value],
                    Err(_) => server.ask::<Vec<Vec<u8>>>(&["ZRANGE", &name, "0", "-1"]),
                };
                let is_theirs = |value: &Vec<u8>| value.ends_with(format!(" {identity}").as_bytes());
                assert!(theirs.iter().all(is_theirs), "{name} is not {identity}'s");
                server.ask::<u32>(&["DEL", &name]);
            }
        }
    }

    /// Ends the session of this Locker, if it has one; on files, where nobody can, the lease of nobody.
    #[cfg(feature = "metrics")]
    pub(crate) fn end_session(&self, identity: &str) {
        match self {
            Self::Files(_) => {}
            Self::Memory(memory) | Self::Expiring(memory) => memory.kill(identity),
            #[cfg(all(unix, feature = "postgres"))]
            Self::Postgres(postgres) => {
                let admin = postgres.database.admin();
                for pid in admin.backends(&format!("leasehold/{identity}")) {
                    admin.terminate(pid);
                }
            }
            #[cfg(all(unix, feature = "redis"))]
            Self::Redis(server) | Self::Cluster(server) => {
                server.ask::<u32>(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
            }
        }
    }

    /// Counts the sessions with the store.
    pub(crate) fn sessions(&self) -> usize {
        match self {
            Self::Files(dir) => match fs::read_dir(dir.path().join("peers")) {
                Ok(entries) => entries.count(),
                Err(_) => 0,
            },
            Self::Memory(memory) | Self::Expiring(memory) => memory.sessions(),
            #[cfg(all(unix, feature = "postgres"))]
            Self::Postgres(postgres) => postgres.database.admin().backends("leasehold/%").len(),
            #[cfg(all(unix, feature = "redis"))]
            Self::Redis(server) | Self::Cluster(server) => {
                server.ask::<Vec<String>>(&["PUBSUB", "CHANNELS", "leasehold:0:*"]).len()
            }
        }
    }

    /// Counts who is registered as waiting; `None` where the store does not know.
    pub(crate) fn waiters(&self, name: &str) -> Option<usize> {
        self.waiters_of(Kind::Lease, name)
    }

    pub(crate) fn waiters_of(&self, kind: Kind, name: &str) -> Option<usize> {
        let key = Key::of(kind, name);
        match self {
            Self::Files(_) => None,
            Self::Memory(memory) | Self::Expiring(memory) => Some(memory.waiters_for(key)),
            #[cfg(all(unix, feature = "postgres"))]
            Self::Postgres(postgres) => Some(postgres.database.admin().waiters(key)),
            #[cfg(all(unix, feature = "redis"))]
            Self::Redis(server) | Self::Cluster(server) => {
                let kind = match kind {
                    Kind::Lease => "lease",
                    Kind::Lock => "lock",
                    Kind::RwLock => "rwlock",
                    other => panic!("{other:?} is new"),
                };
                Some(server.ask::<usize>(&["ZCARD", &format!("leasehold:{{{kind}:{name}}}:q")]))
            }
        }
    }

    /// Waits until nobody waits for the name any more.
    pub(crate) async fn until_nobody_waits_of(&self, kind: Kind, name: &str) {
        until("nobody is registered as waiting", || self.waiters_of(kind, name).unwrap_or(0) == 0).await;
    }

    /// Waits until the store holds nothing for anybody.
    pub(crate) async fn until_nothing_is_held(&self) {
        match self {
            Self::Files(dir) => {
                let is_free = |path: PathBuf| File::open(path).is_ok_and(|file| file.try_lock().is_ok());
                let all = || fs::read_dir(dir.path()).unwrap().flatten().map(|entry| entry.path());
                until("every file is free", || all().filter(|path| path.is_file()).all(is_free)).await;
            }
            Self::Memory(memory) | Self::Expiring(memory) => {
                until("nothing is held", || memory.held() == 0).await;
            }
            #[cfg(all(unix, feature = "postgres"))]
            Self::Postgres(postgres) => {
                let rows = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' \
                            AND (objsubid = 1 OR classid <> x'6c656173'::int::oid)";
                let left = || postgres.database.admin().one::<u32>(rows);
                crate::support::eventually("no advisory row is left", left, |left| *left == 0).await;
            }
            #[cfg(all(unix, feature = "redis"))]
            Self::Redis(server) | Self::Cluster(server) => {
                // But for what is kept on purpose.
                let is_left = |name: &String| !name.starts_with("leasehold:{token:") && !name.ends_with(":s");
                let left = || server.keys("*").into_iter().filter(is_left).collect::<Vec<_>>();
                crate::support::eventually("no key is left", left, Vec::is_empty).await;
            }
        }
    }

    /// Waits until nobody waits for the name any more.
    pub(crate) async fn until_nobody_waits(&self, name: &str) {
        until("nobody is registered as waiting", || self.waiters(name).unwrap_or(0) == 0).await;
    }

    /// Waits until the lease is free.
    pub(crate) async fn until_free(&self, name: &str) {
        until("the lease is free", || self.is_free(name)).await;
    }
}

/// The key of the name that these keys of Redis are of.
#[cfg(all(unix, feature = "redis"))]
fn key_of_redis(base: &str) -> Option<Key> {
    let (kind, name) = base.strip_prefix("leasehold:{")?.strip_suffix('}')?.split_once(':')?;
    let kind = match kind {
        "lease" => Kind::Lease,
        "lock" => Kind::Lock,
        "rwlock" => Kind::RwLock,
        _ => return None,
    };
    Some(Key::of(kind, name))
}
