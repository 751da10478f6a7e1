//! A candidate in a task of its own, with the most ordinary job: it leads until it is told to stop.

use std::convert::Infallible;

use leasehold::{CancellationToken, Lease, Locker, Name, Options, Reason, State};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::{Log, Outcome, Stage, until};

pub(crate) struct Member {
    pub(crate) locker: Locker,
    name: Name,
    who: String,
    log: Log,
    stop: CancellationToken,
    leases: mpsc::UnboundedReceiver<Lease>,
    task: JoinHandle<Outcome>,
}

impl Member {
    /// Contends for `name` on a Locker of its own; the log knows it by its identity.
    pub(crate) fn join(stage: &Stage, options: Options, name: impl Into<Name>, log: &Log) -> Self {
        let who = options.get_identity().to_owned();
        Self::on(&stage.locker(options), name, &who, log)
    }

    /// Contends for `name` on this Locker; the log knows it as `who`.
    pub(crate) fn on(locker: &Locker, name: impl Into<Name>, who: &str, log: &Log) -> Self {
        let name = name.into();
        let stop = CancellationToken::new();
        let candidate = locker.candidate(&name).until(stop.clone());
        let (grants, leases) = mpsc::unbounded_channel();
        let (job_log, job_who) = (log.clone(), who.to_owned());
        let task = tokio::spawn(async move {
            let job = async |lease: Lease| {
                let _body = job_log.body(&job_who);
                grants.send(lease.clone()).ok();
                lease.cancelled().await;
                Ok::<_, Infallible>(())
            };
            candidate.run(job).await
        });
        let (locker, who, log) = (locker.clone(), who.to_owned(), log.clone());
        Self { locker, name, who, log, stop, leases, task }
    }

    /// What the log knows it as.
    #[cfg_attr(not(feature = "postgres"), expect(dead_code, reason = "for tests with more than two members"))]
    pub(crate) fn who(&self) -> &str {
        &self.who
    }

    /// Waits until it leads, and gives the lease of its first term that this has not given before.
    pub(crate) async fn leads(&mut self) -> Lease {
        let limit = std::time::Duration::from_secs(20);
        match tokio::time::timeout(limit, self.leases.recv()).await {
            Ok(Some(lease)) => lease,
            _ => panic!("{} does not lead {:?}: {:?}", self.who, self.name, self.log),
        }
    }

    /// Waits until it has been told that somebody else leads: it stands by, and has a session with the store.
    ///
    /// A Locker answers a request about the store itself only after what was asked before.
    pub(crate) async fn stands_by(&self) {
        until("the candidate is known", || self.locker.state(&self.name) != State::Ended).await;
        self.locker.step_down("a name that nobody leads").await.unwrap();
    }

    /// Asks it to shut down, and gives what its run gave.
    pub(crate) async fn stop(self) -> Outcome {
        self.stop.cancel();
        self.task.await.unwrap()
    }

    /// Drops its run future.
    pub(crate) async fn abort(self) {
        self.task.abort();
        assert!(self.task.await.unwrap_err().is_cancelled());
    }

    pub(crate) async fn outcome(self) -> Outcome {
        self.task.await.unwrap()
    }
}

/// Waits until a lease is over, and gives why.
pub(crate) async fn over(lease: &Lease) -> Option<Reason> {
    until("the lease is over", || !lease.is_held()).await;
    lease.reason()
}
