//! The lease: what a job holds while its candidate leads.

use std::fmt;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::clock;
use crate::driver::command::{Command, Id, Request};
use crate::driver::term::{Reason, Term};
use crate::fence::{Fenced, FencingToken, TokenError};
use crate::name::Name;
use crate::store::{Fence, Minted};

/// One term of one name: from the grant to its end.
///
/// Clones stand for the same term. A lease that is kept beyond its job does not keep the term alive: the term ends
/// with the job.
///
/// What is written under a lease can arrive when it is over: the guide on [fencing](crate::guide::fencing) says when, and
/// what to do about it.
#[derive(Clone)]
pub struct Lease {
    term: Arc<Term>,
    id: Id,
    // Weak, so that a lease somebody kept does not keep the session open.
    driver: mpsc::WeakUnboundedSender<Request>,
}

impl Lease {
    pub(crate) const fn new(term: Arc<Term>, id: Id, driver: mpsc::WeakUnboundedSender<Request>) -> Self {
        Self { term, id, driver }
    }

    pub(crate) const fn shared(&self) -> &Arc<Term> {
        &self.term
    }

    /// Gives the name that is led.
    #[must_use]
    pub fn name(&self) -> &Name {
        &self.term.name
    }

    /// Gives the number of this term among the terms of its Locker, counted from 1 over all names.
    ///
    /// It tells terms apart in logs. It is no [fencing token](Self::fencing_token): the counts of two Lockers know nothing
    /// of each other.
    #[must_use]
    pub fn term(&self) -> u64 {
        self.term.number
    }

    /// Completes when the job is to stop: the lease is lost, or the candidate was asked to shut down or step down.
    ///
    /// After a loss the job has until `stop_grace` after the loss, or after the deadline if that came first, to end by
    /// itself; then its future is dropped.
    ///
    /// # Cancel safety
    ///
    /// Cancel-safe: it can be dropped and called again at any time.
    pub async fn cancelled(&self) {
        self.term.stop.cancelled().await;
    }

    /// Completes when the lease is lost, whether or not the job had been told to stop before: for a job that winds down
    /// under its lease, and has to be quicker without. It also completes at the end of the term.
    ///
    /// # Cancel safety
    ///
    /// Cancel-safe.
    pub async fn lost(&self) {
        self.term.lost.cancelled().await;
    }

    /// Gives the token that is cancelled when the job is to stop, to be handed on to parts of the job.
    #[must_use]
    pub fn cancellation(&self) -> &CancellationToken {
        &self.term.stop
    }

    /// Tells why the term ends or has ended; `None` while nothing ends it. A loss replaces any other reason.
    #[must_use]
    pub fn reason(&self) -> Option<Reason> {
        self.term.expire(clock::now());
        self.term.reason()
    }

    /// Tells whether the lease is held now. It waits for nothing: it compares the clock with the deadline, and is
    /// right also in a process that was stopped and has just been thawed. Once false it stays false.
    ///
    /// True while draining: a job that was told to stop still holds its lease until it has ended.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.term.is_held(clock::now())
    }

    /// Gives the instant up to which the last answer of the store may be trusted; each further answer moves it on.
    ///
    /// Nobody else is granted the lease before `stop_grace` after it, on a store that enforces the ttl.
    #[must_use]
    pub fn deadline(&self) -> Instant {
        clock::timer(self.term.deadline())
    }

    /// Waits until the deadline is later than `known`, and gives it: for what has to be told of it, such as a watchdog.
    ///
    /// It never completes once the lease is over.
    ///
    /// # Cancel safety
    ///
    /// Cancel-safe.
    pub async fn deadline_after(&self, known: Instant) -> Instant {
        loop {
            let mut renewed = pin!(self.term.renewed.notified());
            // From now on, or one would be missed between the look and the wait.
            renewed.as_mut().enable();
            let deadline = self.deadline();
            if deadline > known {
                return deadline;
            }
            renewed.await;
        }
    }

    /// Gives the time left until the [`deadline`](Self::deadline); zero if the lease is not held.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        let now = clock::now();
        if self.term.is_held(now) {
            self.term.deadline().saturating_duration_since(now)
        } else {
            Duration::ZERO
        }
    }

    /// Asks the store whether the lease is still held, in one round trip, and renews it where the store has expiry.
    ///
    /// False if it is not, or if the store did not answer within the query timeout.
    ///
    /// # Cancel safety
    ///
    /// Cancel-safe: the store may be asked all the same.
    pub async fn check(&self) -> bool {
        let (reply, answer) = oneshot::channel();
        let check = Command::Check { id: self.id, term: self.term(), reply };
        self.tell(check) && answer.await.unwrap_or(false) && self.is_held()
    }

    /// Gives the fencing token of this term: a number that is greater than that of every earlier term of the name. The
    /// first call makes it, in one round trip in which the store keeps it, and on Redis one more; further calls wait for nothing. How a resource
    /// checks it: [the guide](crate::guide::fencing).
    ///
    /// # Errors
    ///
    /// [`TokenError::Over`] if the lease is not held any more, also where a token had been given before;
    /// [`TokenError::Refused`] if the store did not make one, or not within the query timeout.
    ///
    /// # Cancel safety
    ///
    /// Cancel-safe: a token that nobody was given is never seen again, and the next call makes another one.
    pub async fn fencing_token(&self) -> Result<FencingToken, TokenError> {
        if !self.term.is_exclusive {
            let reason = "readers have none: others hold the lock at the same time".to_owned();
            return Err(TokenError::Refused { reason });
        }
        let token = self.term.token.get_or_try_init(|| self.mint()).await;
        match self.reason() {
            Some(reason) if !self.is_held() => Err(TokenError::Over { reason }),
            _ => token.copied(),
        }
    }

    async fn mint(&self) -> Result<FencingToken, TokenError> {
        let (reply, answer) = oneshot::channel();
        let refused = |reason: &str| TokenError::Refused { reason: reason.to_owned() };
        if !self.tell(Command::Mint { id: self.id, term: self.term(), reply }) {
            return Err(refused("the locker is gone"));
        }
        match answer.await {
            Ok(Minted::Token(token)) => Ok(token),
            Ok(Minted::Gone) => Err(TokenError::Over { reason: self.reason().unwrap_or(Reason::Ended) }),
            Ok(Minted::Failed(reason)) => Err(TokenError::Refused { reason }),
            Err(_) => Err(refused("the driver is gone")),
        }
    }

    /// Gives the SQL statement that fences a transaction of the lease's own database: the transaction can be committed in
    /// this term, or not at all. It is for other languages and tools; in Rust, `fence` sends it and tells what became of it.
    /// [The guide](crate::guide::fencing) has Python and psql.
    ///
    /// Send it, as it is and without parameters, as the **first** statement of the **outermost** transaction, on any
    /// connection to the primary, also through a pooler in transaction mode. Where the term is over it is an error, and
    /// the server has aborted the transaction; there is no result to be looked at. Else no later term of the name begins
    /// before the transaction has ended.
    ///
    /// # What to know
    ///
    /// * What was written, or read at an older snapshot, *before* it in the transaction is fenced as well, but may have been
    ///   computed before the term began. In `REPEATABLE READ` and `SERIALIZABLE` the snapshot is that of the first statement.
    /// * A savepoint that is rolled back takes along a fence that came after it. `COMMIT AND CHAIN` begins a transaction that is
    ///   not fenced.
    /// * What turns errors into rollbacks to a savepoint turns this one into nothing: `\set ON_ERROR_ROLLBACK` of `psql`,
    ///   `autosave` of JDBC, an `EXCEPTION` block of PL/pgSQL. Do without, or end the transaction at any error of the fence.
    /// * A transaction that is left open delays the next term. For it alone, `idle_in_transaction_session_timeout` is set to
    ///   [`Options::fence_limit`](crate::Options::fence_limit), where it was not less: a host that freezes or vanishes
    ///   delays it by that at most. A prepared transaction keeps its fence until it is committed or rolled back.
    /// * Sent outside of a transaction it is an error too, where it comes as one message of the simple protocol, as `psql`
    ///   and most drivers send what has no parameters.
    ///
    /// # Errors
    ///
    /// [`Fenced::Unsupported`] where the store is not PostgreSQL; [`Fenced::NotFenced`] for a lock that was not asked for
    /// by [`fenced`](crate::Lock::fenced). That the term is over is for the server to say.
    pub fn fence_sql(&self) -> Result<String, Fenced> {
        let fence = self.by_what()?;
        #[cfg(feature = "postgres")]
        return Ok(fence.sql());
        #[cfg(not(feature = "postgres"))]
        match *fence {}
    }

    /// By what its transactions are fenced.
    pub(crate) fn by_what(&self) -> Result<&Fence, Fenced> {
        self.term.fence.get().ok_or(if self.term.is_fenced { Fenced::Unsupported } else { Fenced::NotFenced })
    }

    /// Asks for this term to end in order: the job is told to stop, the lease is released when it has ended, and a
    /// standby takes over. The candidate asks again after one jittered retry interval.
    ///
    /// Does nothing if the term is over.
    pub fn step_down(&self) {
        self.tell(Command::Stop { id: self.id, term: self.term(), reason: Reason::SteppedDown });
    }

    fn tell(&self, command: Command) -> bool {
        self.driver.upgrade().is_some_and(|driver| driver.send(Request::Command(command)).is_ok())
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease")
            .field("name", self.name())
            .field("term", &self.term())
            .field("is_held", &self.is_held())
            .finish_non_exhaustive()
    }
}
