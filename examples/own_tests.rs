//! A job with its tests: no server, no waiting, and everything that can go wrong.
//!
//! ```text
//! cargo test --features testing --example own_tests   # the tests
//! cargo run --features testing --example own_tests    # the service, until its outbox is empty
//! ```
//!
//! [`deliver`] is the job, as you would write it. What is worth reading is below it: the tests run it on a store in memory
//! whose faults they cause, on a clock that is paused, so that an hour passes at once and always in the same order. In
//! `[dev-dependencies]` that takes leasehold with the feature `testing`, and tokio with `test-util`.
//!
//! The service delivers over a temporary directory. `LEASEHOLD_STORE=file:/some/where` names another store by its URL.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use leasehold::{Lease, Locker, Options};
use tokio::sync::watch;

/// The job: sends the mails of an outbox, one after the other, and ends when it is empty.
async fn deliver(lease: Lease, outbox: Arc<Outbox>) -> anyhow::Result<()> {
    while let Some(mail) = outbox.next() {
        if lease.cancellation().is_cancelled() {
            return Ok(());
        }
        // Who is told to shut down still leads, and finishes what was begun. Who has lost the lease does not.
        tokio::select! {
            biased;
            () = lease.lost() => return Ok(()),
            sent = outbox.send(mail, lease.term()) => sent?,
        }
    }
    Ok(())
}

/// Plays a table of mails and the server that sends them. What matters of it to a test: it is shared by the replicas, it
/// takes time, and it remembers who has sent what.
struct Outbox {
    mails: usize,
    takes: Duration,
    sent: watch::Sender<Vec<Sent>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Sent {
    mail: usize,
    term: u64,
}

impl Outbox {
    fn new(mails: usize, takes: Duration) -> Arc<Self> {
        Arc::new(Self { mails, takes, sent: watch::Sender::default() })
    }

    fn next(&self) -> Option<usize> {
        let sent = self.sent.borrow();
        (0..self.mails).find(|mail| !sent.iter().any(|sent| sent.mail == *mail))
    }

    async fn send(&self, mail: usize, term: u64) -> anyhow::Result<()> {
        tokio::time::sleep(self.takes).await;
        self.sent.send_modify(|sent| sent.push(Sent { mail, term }));
        Ok(())
    }
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let directory = tempfile::tempdir()?;
    let default = format!("file:{}", directory.path().display());
    let store = std::env::var("LEASEHOLD_STORE").unwrap_or(default);

    let outbox = Outbox::new(3, Duration::from_millis(50));
    let locker = Locker::connect(&store, Options::default()).await?;
    let job = locker.run("deliver", async |lease: Lease| deliver(lease, Arc::clone(&outbox)).await);
    tokio::time::timeout(Duration::from_mins(1), job).await.context("this replica did not get to lead")??;
    locker.close().await;

    println!("{} mails were sent", outbox.sent.borrow().len());
    ensure!(outbox.next().is_none(), "and some were not");
    Ok(())
}

#[cfg(test)]
mod tests {
    use leasehold::{CancellationToken, Memory, Name, RunError, State};
    use tokio::task::JoinHandle;

    use super::*;

    const MAILS: usize = 10;
    const TAKES: Duration = Duration::from_secs(1);

    type Run = JoinHandle<Result<Option<()>, RunError<anyhow::Error>>>;

    /// A replica: what the service does, on a store in memory, and who it is in the store and in the log of the outbox.
    struct Replica {
        locker: Locker,
        shutdown: CancellationToken,
        run: Run,
    }

    impl Replica {
        fn start(memory: &Memory, identity: &str, outbox: &Arc<Outbox>) -> Self {
            let locker = Locker::memory(memory, Options::default().identity(identity)).unwrap();
            let shutdown = CancellationToken::new();
            let outbox = Arc::clone(outbox);
            let run = locker
                .candidate("deliver")
                .until(shutdown.clone())
                .run(move |lease| deliver(lease, Arc::clone(&outbox)));
            // On the process of that identity, so that a freeze stops the job as well as the driver.
            let run = tokio::spawn(memory.on(identity, run));
            Self { locker, shutdown, run }
        }

        async fn leads(&self) {
            let mut watch = self.locker.subscribe("deliver");
            watch.wait_for(|state| matches!(state, State::Leading { .. })).await.unwrap();
        }

        /// Waits for the end of the run. `None` where the replica was told to stop.
        async fn ended(self) -> Option<()> {
            self.run.await.unwrap().unwrap()
        }
    }

    impl Outbox {
        /// Waits until so many mails were sent. With a paused clock, time passes only while somebody waits for it.
        async fn until(&self, count: usize) -> Vec<Sent> {
            let mut sent = self.sent.subscribe();
            sent.wait_for(|sent| sent.len() >= count).await.unwrap().clone()
        }

        fn count(&self) -> usize {
            self.sent.borrow().len()
        }

        /// Every mail was sent once, in order.
        fn is_in_order(&self) -> bool {
            self.sent.borrow().iter().map(|sent| sent.mail).eq(0..self.mails)
        }
    }

    /// Two replicas on one store, the first of which leads and has sent a mail.
    async fn two(memory: &Memory, outbox: &Arc<Outbox>) -> (Replica, Replica) {
        let a = Replica::start(memory, "a", outbox);
        a.leads().await;
        let b = Replica::start(memory, "b", outbox);
        outbox.until(1).await;
        (a, b)
    }

    #[tokio::test(start_paused = true)]
    async fn it_ends_when_all_is_sent() {
        let (memory, outbox) = (Memory::new(), Outbox::new(MAILS, TAKES));
        assert_eq!(Replica::start(&memory, "a", &outbox).ended().await, Some(()));
        assert!(outbox.is_in_order());
    }

    #[tokio::test(start_paused = true)]
    async fn a_loss_stops_it_at_once_and_the_next_term_does_what_was_left() {
        let (memory, outbox) = (Memory::new(), Outbox::new(MAILS, TAKES));
        let a = Replica::start(&memory, "a", &outbox);
        outbox.until(3).await;
        // As if an administrator had ended the session. The fourth mail is on its way.
        memory.kill("a");
        let sent = outbox.until(4).await;
        assert_eq!(sent[2..], [Sent { mail: 2, term: 1 }, Sent { mail: 3, term: 2 }]);
        assert_eq!(a.ended().await, Some(()), "of the second term");
        assert!(outbox.is_in_order());
    }

    #[tokio::test(start_paused = true)]
    async fn a_shutdown_lets_it_finish_what_it_has_begun_and_hands_over() {
        let (memory, outbox) = (Memory::new(), Outbox::new(MAILS, TAKES));
        let (a, b) = two(&memory, &outbox).await;
        let begun = outbox.next();
        a.shutdown.cancel();
        assert_eq!(a.ended().await, None);
        assert_eq!((outbox.count(), begun), (2, Some(1)), "the second mail, and no third one");
        assert_eq!(b.ended().await, Some(()));
        assert!(outbox.is_in_order());
    }

    #[tokio::test(start_paused = true)]
    async fn cut_off_it_ends_before_another_may_begin() {
        let (memory, outbox) = (Memory::new(), Outbox::new(1000, TAKES));
        let (a, b) = two(&memory, &outbox).await;
        memory.partition("a");
        // The server keeps the lease until the ttl is over; the replica gives it up earlier than that, by its own clock.
        let mut state = a.locker.subscribe("deliver");
        state.wait_for(|state| state == State::Standby).await.unwrap();
        let count = outbox.count();
        assert_eq!(memory.holders(&Name::from("deliver")), ["a"], "nobody else yet");
        b.leads().await;
        assert_eq!(outbox.count(), count, "the mails of a are all from before");
        outbox.until(count + 3).await;

        memory.heal("a");
        for replica in [a, b] {
            replica.shutdown.cancel();
            assert_eq!(replica.ended().await, None);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn frozen_in_the_middle_of_a_mail_it_does_not_send_it_when_it_is_thawed() {
        let (memory, outbox) = (Memory::new(), Outbox::new(1000, TAKES));
        let (a, b) = two(&memory, &outbox).await;
        // A pause of the virtual machine: it is not asked, and does not know how long it was.
        memory.freeze("a");
        let begun = outbox.next().unwrap();
        b.leads().await;
        // The same mail is sent by the other one, and so are those after it.
        let sent = outbox.until(5).await;
        assert_eq!(sent[1].mail, begun);

        memory.thaw("a");
        let sent = outbox.until(10).await;
        assert!(sent.iter().enumerate().all(|(index, sent)| sent.mail == index), "{sent:?}");
        for replica in [a, b] {
            replica.shutdown.cancel();
            assert_eq!(replica.ended().await, None);
        }
    }
}
