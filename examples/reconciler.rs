//! A reconciler: compares what is wanted with what is there, and does what is missing. One replica at a time.
//!
//! ```text
//! cargo run --example reconciler
//! ```
//!
//! [`reconcile`] is the job, as you would write it; the rest is a provider of machines that is played, and two replicas in
//! one process. The exit code is 0 only if what is wanted was brought about each time: at first, after somebody else had
//! changed it, after another replica had taken over; and if the provider refused a call of the earlier leader.
//!
//! The replicas meet in a temporary directory. `LEASEHOLD_STORE=file:/some/where` names another store by its URL, for one
//! such play at a time.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use leasehold::{FencingToken, Lease, Locker, Options, RunError};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{MissedTickBehavior, interval, timeout};

/// How often to compare when nothing was told to have changed. Minutes, where the provider is not played.
const RESYNC: Duration = Duration::from_millis(200);

/// How many machines each service has, or is to have.
type Machines = BTreeMap<&'static str, u32>;

/// The job: called when this replica begins to lead, and over when it returns.
async fn reconcile(
    lease: Lease,
    mut wanted: watch::Receiver<Machines>,
    provider: Arc<Provider>,
) -> anyhow::Result<()> {
    // One for the whole term. The provider refuses calls with it as soon as it has seen that of a later term: what was sent
    // before the lease was lost may arrive after that.
    let token = lease.fencing_token().await?;
    let mut ticks = interval(RESYNC);
    // After a call that took long there is one comparison to be made, not one for each tick that was missed.
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            biased;
            () = lease.cancelled() => return Ok(()),
            changed = wanted.changed() => changed.context("nobody says any more what is wanted")?,
            // The first one at once: what happened before this term, nobody told.
            _ = ticks.tick() => {}
        }
        let wanted = wanted.borrow_and_update().clone();
        if let Err(error) = bring_about(&wanted, &lease, &provider, token).await {
            // No reason to give up the lease: the next comparison finds what is still to be done.
            println!("  {error}");
        }
    }
}

/// Compares the whole, not what has changed since the last time: so it does not matter what was missed, done by half, or
/// done by somebody else.
async fn bring_about(
    wanted: &Machines,
    lease: &Lease,
    provider: &Provider,
    token: FencingToken,
) -> Result<(), Late> {
    let actual = provider.machines();
    let services: BTreeSet<_> = wanted.keys().chain(actual.keys()).copied().collect();
    for service in services {
        let count = |machines: &Machines| machines.get(service).copied().unwrap_or(0);
        // Each call takes time: who was told to stop begins none.
        if count(wanted) != count(&actual) && !lease.cancellation().is_cancelled() {
            provider.scale(token, service, count(wanted)).await?;
        }
    }
    Ok(())
}

/// Plays the third party. What it takes to refuse late calls is one comparison.
struct Provider {
    account: watch::Sender<Account>,
}

#[derive(Default)]
struct Account {
    machines: Machines,
    /// The greatest token that came with a call.
    newest: Option<FencingToken>,
}

#[derive(Debug, thiserror::Error)]
#[error("refused: a later leader has called")]
struct Late;

impl Provider {
    fn machines(&self) -> Machines {
        self.account.borrow().machines.clone()
    }

    async fn scale(&self, token: FencingToken, service: &'static str, count: u32) -> Result<(), Late> {
        tokio::task::yield_now().await; // it is not here
        let is_done = self.account.send_if_modified(|account| {
            let admitted = account.newest.is_none_or(|newest| token.admits(newest));
            if admitted {
                account.newest = Some(token);
                account.machines.insert(service, count);
                account.machines.retain(|_, count| *count > 0);
            }
            admitted
        });
        if is_done {
            println!("  token {token}: {service} has {count} machines");
        }
        is_done.then_some(()).ok_or(Late)
    }

    /// Waits until the machines are these.
    async fn until(&self, machines: &Machines) -> anyhow::Result<()> {
        self.account.subscribe().wait_for(|account| account.machines == *machines).await?;
        Ok(())
    }
}

type Run = JoinHandle<Result<Option<()>, RunError<anyhow::Error>>>;

async fn start(
    store: &str,
    identity: &str,
    wanted: &watch::Sender<Machines>,
    provider: &Arc<Provider>,
) -> anyhow::Result<(Locker, Run)> {
    let options = Options::default().retry_interval(Duration::from_secs(1)).identity(identity);
    let locker = Locker::connect(store, options).await?;
    let (wanted, provider) = (wanted.subscribe(), Arc::clone(provider));
    let run = locker
        .candidate("reconciler")
        .run(move |lease| reconcile(lease, wanted.clone(), Arc::clone(&provider)));
    Ok((locker, tokio::spawn(run)))
}

async fn play() -> anyhow::Result<()> {
    let directory = tempfile::tempdir()?;
    let default = format!("file:{}", directory.path().display());
    let store = std::env::var("LEASEHOLD_STORE").unwrap_or(default);

    let provider = Arc::new(Provider { account: watch::Sender::default() });
    let mut machines = Machines::from([("api", 2), ("web", 3)]);
    let wanted = watch::Sender::new(machines.clone());

    println!("a leads, and brings about what is wanted");
    let (a, run_a) = start(&store, "a", &wanted, &provider).await?;
    provider.until(&machines).await?;
    let (b, run_b) = start(&store, "b", &wanted, &provider).await?;

    println!("somebody removes all of web, and tells nobody: the next tick finds it");
    provider.account.send_modify(|account| account.machines.retain(|service, _| *service != "web"));
    provider.until(&machines).await?;

    println!("one more of api is wanted");
    machines.insert("api", 3);
    wanted.send_replace(machines.clone());
    provider.until(&machines).await?;
    let earlier = provider.account.borrow().newest.context("a has called")?;

    println!("a is closed, and web is wanted no more: b takes over");
    a.close().await;
    machines.remove("web");
    wanted.send_replace(machines.clone());
    provider.until(&machines).await?;

    println!("a call of a arrives that was held up on the way");
    let late = provider.scale(earlier, "web", 3).await;
    ensure!(late.is_err(), "the provider has done what an earlier leader wanted");
    println!("  {Late}");
    ensure!(provider.machines() == machines, "it changed something all the same");

    b.close().await;
    for run in [run_a, run_b] {
        run.await??;
    }
    Ok(())
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    timeout(Duration::from_mins(1), play()).await.context("what is wanted was not brought about")?
}
