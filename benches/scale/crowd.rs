//! A Locker and the jobs on it, which do nothing but wait to be told to stop.

use leasehold::{Lease, Locker, Options};
use tokio::task::JoinSet;

use crate::support::postgres::Cluster;
use crate::support::until;

/// Names that are led. The markers of sessions are pairs, which the server numbers 2.
const LED: &str = "SELECT count(*) FROM pg_locks \
    WHERE locktype = 'advisory' AND mode = 'ExclusiveLock' AND objsubid = 1";

/// Names that are stood by for, counted for each session that does.
const WAITED_FOR: &str = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ShareLock'";

pub(crate) struct Member {
    locker: Locker,
    jobs: JoinSet<anyhow::Result<()>>,
}

impl Member {
    pub(crate) fn new(server: &Cluster, options: Options) -> anyhow::Result<Self> {
        Ok(Self { locker: Locker::postgres(server.options(), options)?, jobs: JoinSet::new() })
    }

    /// As the server knows it.
    pub(crate) fn application(&self) -> String {
        format!("leasehold/{}", self.locker.identity())
    }

    pub(crate) fn contend(&mut self, name: String) {
        let candidate = self.locker.candidate(name);
        self.jobs.spawn(async {
            let job = async |lease: Lease| {
                lease.cancelled().await;
                anyhow::Ok(())
            };
            candidate.run(job).await?;
            Ok(())
        });
    }

    pub(crate) async fn close(self) -> anyhow::Result<()> {
        self.locker.close().await;
        self.jobs.join_all().await.into_iter().collect()
    }
}

pub(crate) fn name(n: u32) -> String {
    format!("job-{n}")
}

pub(crate) async fn are_led(server: &Cluster, count: u32) {
    until("all are led", || server.admin().one::<u32>(LED) == count).await;
}

pub(crate) async fn are_waited_for(server: &Cluster, count: u32) {
    until("all are stood by for", || server.admin().one::<u32>(WAITED_FOR) == count).await;
}
