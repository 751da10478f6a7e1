//! Many small jobs on one session: twenty caches, each kept warm by one replica, and all by those who are there.
//!
//! ```text
//! cargo run --example cache_warmer
//! ```
//!
//! [`Replica::start`] is the service, as you would write it: however many jobs it has, it is one Locker, and so one
//! connection. The rest plays two replicas in one process, and closes the one that has more to do. The exit code is 0 only
//! if the other one took over all of it, and no cache was ever warmed by two at once.
//!
//! The replicas meet in a temporary directory. `LEASEHOLD_STORE=file:/some/where` names another store by its URL, for one
//! such play at a time.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use leasehold::{Lease, Locker, Options, RunError, Scope};
use tokio::sync::{Mutex, MutexGuard, watch};
use tokio::task::JoinSet;
use tokio::time::{interval, timeout};

/// One name for each cache, by its number.
const CACHES: Scope<u32> = Scope::new("cache");

/// How long a cache stays warm. Minutes, where one is really filled.
const REFRESH: Duration = Duration::from_millis(100);

/// A process of the service.
struct Replica {
    identity: &'static str,
    locker: Locker,
    jobs: JoinSet<Result<Option<()>, RunError<anyhow::Error>>>,
}

impl Replica {
    async fn start(store: &str, identity: &'static str, caches: &[Arc<Cache>]) -> anyhow::Result<Self> {
        let options = Options::default().retry_interval(Duration::from_secs(1)).identity(identity);
        let locker = Locker::connect(store, options).await?;
        let mut jobs = JoinSet::new();
        for cache in caches {
            let (candidate, cache) = (locker.candidate(CACHES.name(&cache.number)), Arc::clone(cache));
            // Each is a task of its own: one that fails, or is slow to stop, is no matter to the others.
            jobs.spawn(candidate.run(move |lease| keep_warm(lease, Arc::clone(&cache), identity)));
        }
        Ok(Self { identity, locker, jobs })
    }

    /// Hands over everything, and tells what went wrong with any of the jobs.
    async fn close(mut self) -> anyhow::Result<()> {
        // Tells all jobs to stop, and releases each lease when its job has returned: the slowest one holds up no other.
        self.locker.close().await;
        while let Some(job) = self.jobs.join_next().await {
            job??;
        }
        Ok(())
    }

    fn keeps(&self, caches: &[Arc<Cache>]) -> usize {
        caches.iter().filter(|cache| cache.warmth.borrow().by == self.identity).count()
    }
}

/// The job of one cache.
async fn keep_warm(lease: Lease, cache: Arc<Cache>, identity: &'static str) -> anyhow::Result<()> {
    let _alone = cache.enter()?;
    let mut refresh = interval(REFRESH);
    loop {
        tokio::select! {
            () = lease.cancelled() => return Ok(()),
            _ = refresh.tick() => cache.warm(identity),
        }
    }
}

/// Plays a cache, which both replicas can see.
struct Cache {
    number: u32,
    /// Held by whoever warms it, so that a second one is found out.
    warmer: Mutex<()>,
    warmth: watch::Sender<Warmth>,
}

#[derive(Default)]
struct Warmth {
    times: u64,
    /// By whom it was warmed, the last time.
    by: &'static str,
    /// Two were in at once.
    is_shared: bool,
}

impl Cache {
    fn new(number: u32) -> Arc<Self> {
        Arc::new(Self { number, warmer: Mutex::default(), warmth: watch::Sender::default() })
    }

    fn enter(&self) -> anyhow::Result<MutexGuard<'_, ()>> {
        let entered = self.warmer.try_lock();
        if entered.is_err() {
            self.warmth.send_modify(|warmth| warmth.is_shared = true);
        }
        entered.context("a cache is warmed by two at once")
    }

    fn warm(&self, identity: &'static str) {
        self.warmth.send_modify(|warmth| {
            warmth.times += 1;
            warmth.by = identity;
        });
    }

    async fn until(&self, is_wanted: impl Fn(&Warmth) -> bool) -> anyhow::Result<()> {
        let mut warmth = self.warmth.subscribe();
        let warmth = warmth.wait_for(|warmth| warmth.is_shared || is_wanted(warmth)).await?;
        ensure!(!warmth.is_shared, "a cache is warmed by two at once");
        Ok(())
    }
}

async fn play() -> anyhow::Result<()> {
    let directory = tempfile::tempdir()?;
    let default = format!("file:{}", directory.path().display());
    let store = std::env::var("LEASEHOLD_STORE").unwrap_or(default);

    let caches: Vec<_> = (0..20).map(Cache::new).collect();
    let (a, b) =
        tokio::try_join!(Replica::start(&store, "a", &caches), Replica::start(&store, "b", &caches))?;
    for cache in &caches {
        // More than once, so that the other replica has asked for it too.
        cache.until(|warmth| warmth.times > 3).await?;
    }
    // Whoever asks first has it: leases are not dealt out evenly.
    println!("all are warm: a keeps {}, b keeps {}", a.keeps(&caches), b.keeps(&caches));

    let (leaves, stays) = if a.keeps(&caches) < b.keeps(&caches) { (b, a) } else { (a, b) };
    println!("{} is closed", leaves.identity);
    leaves.close().await?;
    for cache in &caches {
        cache.until(|warmth| warmth.by == stays.identity).await?;
    }
    println!("{} keeps {}", stays.identity, stays.keeps(&caches));
    ensure!(stays.keeps(&caches) == caches.len(), "one that had left still warmed a cache");
    stays.close().await
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    timeout(Duration::from_mins(1), play()).await.context("some caches were left cold")?
}
