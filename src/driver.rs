//! The driver: an actor, on a thread of its own, that owns the one session with the store.
//!
//! It is the only place that decides that a lease is lost. What it knows stands in [`machine`]; this file does the
//! waiting: it connects, carries out statements one after the other, gives the session up when it must, and goes on
//! taking requests all the while.
//!
//! ```text
//!   idle ──► connect ──► serve ──► (lost) tell every job, wait for them, close ──► back off ──► connect …
//!                          └─────► (all left) end in order
//! ```

pub(crate) mod command;
mod machine;
pub(crate) mod term;

use std::future::{self, Future};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use rand::RngExt as _;
use rand::rngs::StdRng;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;
use tracing::{debug, error, info, warn};

use crate::clock;
use crate::driver::command::{Id, Report, Request};
pub(crate) use crate::driver::machine::ANSWER_LIMIT;
use crate::driver::machine::{Batch, Machine, Statement};
use crate::error::{ConnectError, LossCause};
use crate::meter::{Meter, Open};
use crate::options::Options;
use crate::sabotage::Sabotage;
use crate::store::{Event, Exchanged, Session, Store};

/// Longest first wait before reconnecting; it doubles up to the retry interval. Short, since most outages are.
const FIRST_BACKOFF: Duration = Duration::from_millis(100);

/// How many requests are taken before the work at hand gets its turn.
const REQUESTS_AT_ONCE: usize = 64;

type HeldOf<S> = <<S as Store>::Session as Session>::Held;

pub(crate) struct Driver<S: Store> {
    store: S,
    session: Option<S::Session>,
    open: Option<Open>,
    options: Arc<Options>,
    meter: Meter,
    /// For the handles.
    report: watch::Sender<Report>,
    inbox: Inbox<S>,
    rng: StdRng,
    /// How many connections in a row have failed, or died before their first answer.
    failures: u32,
}

/// How [`Driver::serve`] ended.
enum Served {
    Lost(LossCause),
    /// Everybody has left.
    Done,
}

impl<S: Store> Driver<S> {
    pub(crate) fn new(
        store: S,
        options: Arc<Options>,
        meter: Meter,
        report: watch::Sender<Report>,
        mut rng: StdRng,
        requests: mpsc::UnboundedReceiver<Request>,
    ) -> Self {
        let machine_rng = rand::SeedableRng::seed_from_u64(rng.random());
        let machine = Machine::new(
            Arc::clone(&options),
            meter.clone(),
            report.borrow().enforcement,
            machine_rng,
            clock::now(),
        );
        let inbox = Inbox {
            machine,
            answered: None,
            told: None,
            requests,
            eager: None,
            closers: Vec::new(),
            closing: false,
            handles_gone: false,
            has_leftovers: false,
        };
        Self { store, session: None, open: None, options, meter, report, inbox, rng, failures: 0 }
    }

    /// Runs until every handle is gone or the Locker is closed.
    pub(crate) async fn run(mut self) {
        let identity = self.options.identity.clone();
        if catch_panic(self.drive()).await.is_err() {
            error!(%identity, "the driver panicked: every lease of this locker is lost");
            // The same order as for any loss: tell, wait for the jobs, then let go of the session.
            self.inbox.machine.on_session_lost(&LossCause::Driver, clock::now());
            self.inbox.machine.dismiss();
            self.let_jobs_end().await;
        }
        debug!(%identity, "the driver ends");
    }

    async fn drive(&mut self) {
        while self.idle().await {
            if !self.connect().await {
                continue;
            }
            match self.serve().await {
                Served::Lost(cause) => self.lose(cause).await,
                Served::Done => break,
            }
        }
        if self.session.is_none() && self.store.has_leftovers() {
            let connecting = tokio::time::timeout(self.options.query_timeout, self.store.connect());
            self.session = connecting.await.ok().and_then(Result::ok);
            self.open = self.session.is_some().then(|| self.meter.connected());
        }
        if let Some(session) = self.session.take() {
            let in_time = tokio::time::timeout(self.options.query_timeout, session.end()).await.is_ok();
            self.open = None;
            info!(identity = %self.options.identity, in_time, "session ended");
        }
        self.inbox.done();
    }

    /// Waits until somebody needs a session, and after failures for as long as it takes to spare the store. False if
    /// everybody has left.
    async fn idle(&mut self) -> bool {
        self.inbox.has_leftovers = self.store.has_leftovers();
        let spare = self.backoff();
        let enough = |inbox: &Inbox<S>| !inbox.wants_session() || inbox.is_done();
        self.inbox.meanwhile(tokio::time::sleep(spare), enough).await.ok();
        self.inbox
            .meanwhile(future::pending::<()>(), |inbox| inbox.wants_session() || inbox.is_done())
            .await
            .ok();
        !self.inbox.is_done()
    }

    /// Full jitter over an exponential bound: "Exponential Backoff and Jitter", AWS Architecture Blog, 2015.
    fn backoff(&mut self) -> Duration {
        let Some(doublings) = self.failures.checked_sub(1) else { return Duration::ZERO };
        let bound = FIRST_BACKOFF.saturating_mul(1 << doublings.min(20)).min(self.options.retry_interval);
        bound.mul_f64(self.rng.random_range(0.0..=1.0))
    }

    /// Opens a session. False if that failed or nobody needs it any more.
    async fn connect(&mut self) -> bool {
        let limit = self.options.query_timeout;
        self.failures += 1;
        let connected = {
            let connecting = tokio::time::timeout(limit, self.store.connect());
            self.inbox.meanwhile(connecting, |inbox| !inbox.wants_session() || inbox.is_done()).await
        };
        let connected = match connected {
            Ok(Some(Ok(connected))) => connected,
            Ok(Some(Err(_elapsed))) => Err(ConnectError::Timeout { limit }),
            Ok(None) | Err(_) => return false,
        };
        let identity = &self.options.identity;
        match connected {
            Ok(session) => {
                info!(%identity, store = session.address(), "session up");
                let enforcement = session.enforcement();
                let (shortfalls, answered) = (session.shortfalls(), Some(clock::now()));
                self.report.send_replace(Report { enforcement, shortfalls, answered });
                self.session = Some(session);
                self.open = Some(self.meter.connected());
                self.inbox.machine.on_session(enforcement, clock::now());
                self.inbox.connected();
                true
            }
            Err(error) => {
                let (failures, is_permanent) = (self.failures, error.is_permanent());
                self.meter.connect_failed(is_permanent);
                // An outage is told when it begins, and then ever more seldom.
                if failures.is_power_of_two() || is_permanent {
                    let store = self.store.address();
                    warn!(%identity, store, %error, is_permanent, failures, "cannot connect to the store");
                } else {
                    debug!(%identity, %error, failures, "cannot connect to the store");
                }
                self.inbox.cannot_connect(error);
                false
            }
        }
    }

    /// Carries out statement after statement, and between them waits for what happens.
    async fn serve(&mut self) -> Served {
        let Self { session: Some(session), inbox, report, failures, .. } = self else {
            return Served::Done;
        };
        let lost = loop {
            let now = clock::now();
            inbox.answer_closers();
            if let Err(cause) = inbox.machine.on_time(now) {
                break cause;
            }
            // Before the last answers are told: the store has something to do meanwhile.
            if let Some(statement) = inbox.machine.next_statement(now) {
                if let Err(cause) = carry_out(session, inbox, statement).await {
                    break cause;
                }
                *failures = 0;
                inbox.report(report);
                continue;
            }
            if inbox.answered.is_some() {
                if let Err(cause) = inbox.tell_answers() {
                    break cause;
                }
                inbox.report(report);
                continue;
            }
            if inbox.is_done() {
                return Served::Done;
            }
            match inbox.idle(session.event()).await {
                Ok(Some(Event::Freed(freed))) => inbox.machine.on_freed(freed, clock::now()),
                Ok(Some(Event::Unregistered(key))) => inbox.machine.on_unregistered(key, clock::now()),
                Ok(Some(Event::Message(message))) => inbox.machine.on_message(message, clock::now()),
                Ok(Some(Event::Closed(cause))) | Err(cause) => break cause,
                Ok(Some(Event::Interrupted)) => inbox.machine.on_interrupted(clock::now()),
                Ok(Some(Event::Ignored) | None) => {}
            }
            // Events that come faster than they are taken must not keep the runtime from its timers and sockets.
            tokio::task::yield_now().await;
        };
        // It is lost either way.
        inbox.tell_answers().ok();
        inbox.told = None;
        Served::Lost(lost)
    }

    /// Gives the session up. The order is the safety argument: *tell* every job; *wait* until the last one has ended
    /// or was dropped, since closing the session is a release; then *close* it, and only then connect anew. Where the
    /// store has ended the session itself, there is nothing left to wait for.
    async fn lose(&mut self, cause: LossCause) {
        self.inbox.machine.on_session_lost(&cause, clock::now());
        warn!(identity = %self.options.identity, %cause, "session lost");
        self.meter.session_lost(&cause);
        let is_closed = matches!(cause, LossCause::Closed { .. });
        if !is_closed && !self.options.is_broken(Sabotage::CloseBeforeEnd) {
            self.let_jobs_end().await;
        }
        (self.session, self.open) = (None, None);
        self.failures = self.failures.max(1);
    }

    async fn let_jobs_end(&mut self) {
        let Some(at) = self.inbox.machine.lost_jobs_until() else { return };
        let ended = |inbox: &Inbox<S>| inbox.machine.lost_jobs_until().is_none();
        self.inbox.meanwhile(clock::sleep_until(at), ended).await.ok();
    }
}

/// Dropped in the middle, with the runtime that it runs on: nobody renews what it has, and its session is about to go.
impl<S: Store> Drop for Driver<S> {
    fn drop(&mut self) {
        self.inbox.machine.on_session_lost(&LossCause::Driver, clock::now());
    }
}

/// Sends one statement and takes its answer; one that takes longer than the driver has patience for is not waited for.
async fn carry_out<S: Store>(
    session: &mut S::Session,
    inbox: &mut Inbox<S>,
    statement: Statement<HeldOf<S>>,
) -> Result<(), LossCause> {
    // Before anything is sent: the store's clock for this statement cannot start earlier.
    let sent = clock::now();
    let limit = inbox.machine.patience(sent);
    let unanswered = match statement {
        Statement::Heartbeat(heartbeat) => {
            match inbox.answer(limit, session.heartbeat(&heartbeat.held)).await {
                Ok(ours) => return inbox.machine.on_heartbeat(heartbeat, &ours, sent, clock::now()),
                Err(cause) => (Statement::Heartbeat(heartbeat), cause),
            }
        }
        Statement::Exchange(batch) => match inbox.answer(limit, session.exchange(&batch.exchange)).await {
            Ok(exchanged) => {
                inbox.answered = Some(Answered { batch, exchanged, sent });
                return Ok(());
            }
            Err(cause) => (Statement::Exchange(batch), cause),
        },
        Statement::Publish(message, reply) => {
            match inbox.answer(limit, session.publish(message.clone())).await {
                Ok(taken) => return inbox.machine.on_published(reply, taken, sent, clock::now()),
                Err(cause) => (Statement::Publish(message, reply), cause),
            }
        }
        Statement::Survey(reply) => match inbox.answer(limit, session.survey()).await {
            Ok(seen) => return inbox.machine.on_survey(reply, seen, sent, clock::now()),
            Err(cause) => (Statement::Survey(reply), cause),
        },
        Statement::Mint(minting) => match inbox.answer(limit, session.mint(&minting.held)).await {
            Ok(minted) => return inbox.machine.on_minted(minting, minted, sent, clock::now()),
            Err(cause) => (Statement::Mint(minting), cause),
        },
        Statement::Slots(slots, reply) => match inbox.answer(limit, session.slots(&slots)).await {
            Ok(looked) => return inbox.machine.on_slots(reply, looked, sent, clock::now()),
            Err(cause) => (Statement::Slots(slots, reply), cause),
        },
        Statement::Amend(held, amend, reply) => {
            let amending = session.amend(&held, &amend.slots, amend.expected.as_ref(), &amend.next);
            match inbox.answer(limit, amending).await {
                Ok(amended) => return inbox.machine.on_amended(&amend, reply, amended, sent, clock::now()),
                Err(cause) => (Statement::Amend(held, amend, reply), cause),
            }
        }
        Statement::Who(key, reply) => match inbox.answer(limit, session.holders(&[key])).await {
            Ok(holders) => return inbox.machine.on_who(reply, holders, sent, clock::now()),
            Err(cause) => (Statement::Who(key, reply), cause),
        },
        Statement::Pass(passage) => match inbox.answer(limit, session.pass(&passage.held)).await {
            Ok(fences) => return inbox.machine.on_passed(passage, fences, sent, clock::now()),
            Err(cause) => (Statement::Pass(passage), cause),
        },
        Statement::Blockers(passage, reply) => {
            match inbox.answer(limit, session.blockers(&passage.held)).await {
                Ok(blockers) => {
                    return inbox.machine.on_blockers(&passage, reply, blockers, sent, clock::now());
                }
                Err(cause) => (Statement::Blockers(passage, reply), cause),
            }
        }
        Statement::Inquiry(inquiry) => match inbox.answer(limit, session.holders(&inquiry.keys)).await {
            Ok(holders) => return inbox.machine.on_holders(&inquiry, holders, sent, clock::now()),
            Err(cause) => (Statement::Inquiry(inquiry), cause),
        },
    };
    let (statement, cause) = unanswered;
    statement.unanswered();
    Err(cause)
}

/// The answers to an exchange, which nobody has been told of yet.
struct Answered<H> {
    batch: Batch<H>,
    exchanged: Exchanged<H>,
    sent: Instant,
}

/// What the driver is asked, and what it knows.
struct Inbox<S: Store> {
    machine: Machine<HeldOf<S>>,
    /// Told as soon as the next statement is on its way, if there is one.
    answered: Option<Answered<HeldOf<S>>>,
    /// When they were, if the handles have not heard of that.
    told: Option<Instant>,
    requests: mpsc::UnboundedReceiver<Request>,
    /// Who waits for the first connection.
    eager: Option<oneshot::Sender<Result<(), ConnectError>>>,
    closers: Vec<(Vec<Id>, oneshot::Sender<()>)>,
    /// To end when everybody has left: asked to, or every handle is gone.
    closing: bool,
    handles_gone: bool,
    /// Of the store: see [`Store::has_leftovers`].
    has_leftovers: bool,
}

impl<S: Store> Inbox<S> {
    /// Does `work`, and meanwhile takes requests and looks at the clock. `None` as soon as `enough` holds.
    ///
    /// # Errors
    ///
    /// The cause, if a deadline has passed meanwhile.
    async fn meanwhile<F: Future>(
        &mut self,
        work: F,
        enough: impl Fn(&Self) -> bool,
    ) -> Result<Option<F::Output>, LossCause> {
        self.until(work, Machine::next_alarm, |inbox, _| enough(inbox)).await
    }

    /// As [`meanwhile`](Self::meanwhile), until there is something to send, or everybody has left.
    async fn idle<F: Future>(&mut self, work: F) -> Result<Option<F::Output>, LossCause> {
        let enough = |inbox: &Self, now| inbox.is_done() || inbox.machine.has_statement(now);
        self.until(
            work,
            |machine| machine.next_alarm().into_iter().chain(machine.next_statement_at()).min(),
            enough,
        )
        .await
    }

    async fn until<F: Future>(
        &mut self,
        work: F,
        wake: impl Fn(&Machine<HeldOf<S>>) -> Option<Instant>,
        enough: impl Fn(&Self, Instant) -> bool,
    ) -> Result<Option<F::Output>, LossCause> {
        let mut work = pin!(work);
        let (mut request, mut is_sent) = (None, false);
        loop {
            if is_sent {
                self.tell_answers()?;
            }
            // Once for all that follows: with many tasks, this loop is where the driver spends its time.
            let now = clock::now();
            if let Some(request) = request.take() {
                self.take(request, now);
            }
            // Before work that may be there whenever it is looked for, such as a flood of events.
            for _ in 0..REQUESTS_AT_ONCE {
                let Ok(request) = self.requests.try_recv() else { break };
                self.take(Some(request), now);
            }
            self.machine.on_time(now)?;
            if enough(self, now) {
                return Ok(None);
            }
            let wake = wake(&self.machine);
            tokio::select! {
                biased;
                output = &mut work => return Ok(Some(output)),
                taken = self.requests.recv(), if !self.handles_gone => request = Some(taken),
                () = clock::sleep_until_some(wake) => {}
                () = tokio::task::yield_now(), if self.answered.is_some() => is_sent = true,
            }
        }
    }

    /// Waits for an answer of the store, meanwhile taking requests.
    async fn answer<T>(
        &mut self,
        limit: Duration,
        statement: impl Future<Output = Result<T, LossCause>>,
    ) -> Result<T, LossCause> {
        let answer = self.meanwhile(tokio::time::timeout(limit, statement), |_| false).await?;
        self.tell_answers()?;
        match answer {
            Some(Ok(answer)) => answer,
            Some(Err(_)) | None => Err(LossCause::Timeout { limit }),
        }
    }

    /// # Errors
    ///
    /// The cause, if a deadline had passed before the answers came.
    fn tell_answers(&mut self) -> Result<(), LossCause> {
        match self.answered.take() {
            Some(Answered { batch, exchanged, sent }) => {
                let now = clock::now();
                self.told = Some(now);
                self.machine.on_exchange(batch, exchanged, sent, now)
            }
            None => Ok(()),
        }
    }

    /// Tells the handles that there was an answer, once they see what it says: whoever looks for the one finds the other.
    fn report(&mut self, report: &watch::Sender<Report>) {
        // Any other statement was told at once.
        let told = self.told.take().or_else(|| self.answered.is_none().then(clock::now));
        if let Some(told) = told {
            report.send_modify(|report| report.answered = Some(told));
        }
    }

    /// `None`: every handle is gone.
    fn take(&mut self, request: Option<Request>, now: Instant) {
        match request {
            Some(Request::Command(command)) => self.machine.on_command(command, now),
            Some(Request::Connect(reply)) => self.eager = Some(reply),
            Some(Request::Close { within, reply }) => {
                self.closing = true;
                self.machine.close(now);
                self.closers.push((within, reply));
            }
            None => (self.closing, self.handles_gone) = (true, true),
        }
        self.answer_closers();
    }

    /// Whoever closes from inside of a job is not kept waiting for that job.
    fn answer_closers(&mut self) {
        // Nor for that of another who closes as well, and is in the same position.
        let within: Vec<Id> = self.closers.iter().flat_map(|(within, _)| within).copied().collect();
        if !within.is_empty() && self.machine.is_left_to(&within) {
            for (_, reply) in self.closers.extract_if(.., |(within, _)| !within.is_empty()) {
                reply.send(()).ok();
            }
        }
    }

    fn wants_session(&self) -> bool {
        self.eager.is_some() || self.has_leftovers || self.machine.wants_session()
    }

    fn is_done(&self) -> bool {
        self.closing && self.machine.is_left_to(&[])
    }

    fn connected(&mut self) {
        if let Some(eager) = self.eager.take() {
            eager.send(Ok(())).ok();
        }
    }

    /// Whoever waits for the first connection learns of any failure; the runs of one that trying again cannot mend.
    fn cannot_connect(&mut self, error: ConnectError) {
        match self.eager.take() {
            Some(eager) => drop(eager.send(Err(error))),
            None if error.is_permanent() => self.machine.refuse(&Arc::new(error)),
            None => {}
        }
    }

    fn done(&mut self) {
        for (_, reply) in self.closers.drain(..) {
            reply.send(()).ok();
        }
    }
}

/// Polls a future to its end or its panic. What the future borrowed is whole afterwards: its owner tidies up.
pub(crate) async fn catch_panic<F: Future>(future: F) -> std::thread::Result<F::Output> {
    let mut future = pin!(future);
    future::poll_fn(move |cx| match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(cx))) {
        Ok(poll) => poll.map(Ok),
        Err(panic) => std::task::Poll::Ready(Err(panic)),
    })
    .await
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;
    use crate::name::Key;
    use crate::store::slots::{Amended, Entry, Looked, NoSlots, Record, Slots};
    use crate::store::{Answer, Enforcement, Exchange, Exchanged, Holder, Message, Minted, Seen};
    use crate::{Lease, Locker};

    const ENFORCEMENT: Enforcement =
        Enforcement { frees_silent_holders: true, any_answer_renews: true, reconnects: false };

    /// A store that grants everything, and has always something to tell.
    struct Flooding;

    impl Store for Flooding {
        type Session = Self;

        fn enforcement(&self) -> Enforcement {
            ENFORCEMENT
        }

        fn address(&self) -> String {
            String::new()
        }

        async fn connect(&mut self) -> Result<Self, ConnectError> {
            Ok(Self)
        }
    }

    impl Session for Flooding {
        type Held = ();

        fn enforcement(&self) -> Enforcement {
            ENFORCEMENT
        }

        fn address(&self) -> String {
            String::new()
        }

        async fn exchange(&mut self, exchange: &Exchange<()>) -> Result<Exchanged<()>, LossCause> {
            let answers = exchange.asks.iter().map(|_| Answer::Granted(())).collect();
            Ok(Exchanged { released: vec![true; exchange.releases.len()], answers })
        }

        async fn heartbeat(&mut self, held: &[()]) -> Result<Vec<bool>, LossCause> {
            Ok(vec![true; held.len()])
        }

        async fn mint(&mut self, (): &()) -> Result<Minted, LossCause> {
            Ok(Minted::Gone)
        }

        async fn slots(&mut self, _: &Slots) -> Result<Result<Looked, NoSlots>, LossCause> {
            Ok(Err(NoSlots::Failed(String::new())))
        }

        async fn amend(
            &mut self,
            (): &(),
            _: &Slots,
            _: Option<&Record>,
            _: &Entry,
        ) -> Result<Amended, LossCause> {
            Ok(Amended::Gone)
        }

        async fn publish(&mut self, _: Message) -> Result<bool, LossCause> {
            Ok(true)
        }

        async fn holders(&mut self, keys: &[Key]) -> Result<Vec<Option<Holder>>, LossCause> {
            Ok(vec![None; keys.len()])
        }

        async fn survey(&mut self) -> Result<Option<Vec<Seen>>, LossCause> {
            Ok(None)
        }

        async fn event(&mut self) -> Event {
            Event::Ignored
        }

        async fn end(self) {}
    }

    /// D06, D21: whatever floods a session, the driver looks at its requests and its clock.
    #[tokio::test]
    async fn a_flood_of_events_starves_neither_requests_nor_heartbeats() {
        let options = Options::default()
            .heartbeat_interval(Duration::from_millis(10))
            .query_timeout(Duration::from_millis(100))
            .identity("flooded");
        let locker = Locker::on_thread(Flooding, options).unwrap();
        let trust = locker.bounds().trust;
        let led = locker.run("job", async |lease: Lease| {
            let deadline = lease.deadline();
            while lease.deadline() < deadline + trust {
                assert!(lease.check().await, "{:?}", lease.reason());
            }
            Ok::<_, Infallible>(())
        });
        let led = tokio::time::timeout(Duration::from_mins(1), led).await.expect("the driver is starved");
        assert_eq!(led.unwrap(), Some(()));
        locker.close().await;
    }

    /// Whoever sees that the store has answered sees what it said: a candidate that has asked, and does not lead then, was
    /// refused. On two threads, as often as it takes to look in between.
    #[test]
    fn an_answer_is_reported_when_what_it_says_can_be_seen() {
        for round in 0..300 {
            let locker = Locker::on_thread(Flooding, Options::default()).unwrap();
            one_thread().block_on(locker.connected()).unwrap();
            let before = locker.last_answer();
            let of_thread = locker.clone();
            let leads = std::thread::spawn(move || {
                one_thread().block_on(of_thread.run("job", async |lease: Lease| {
                    lease.cancelled().await;
                    Ok::<_, Infallible>(())
                }))
            });
            while locker.last_answer() == before {
                std::hint::spin_loop();
            }
            let state = locker.state("job");
            assert!(matches!(state, crate::State::Leading { .. }), "round {round}: {state:?}");
            one_thread().block_on(locker.close());
            leads.join().unwrap().unwrap();
        }
    }

    fn one_thread() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
    }
}
