//! One who serves slots: it looks, waits for the lock, claims, runs the job, and records its end.

use std::future::{self, Future};
use std::sync::Arc;
use std::time::Duration;

use rand::RngExt as _;
use rand::rngs::StdRng;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::plan::{Due, Next, Plan};
use super::{Every, Slot, SlotState, Taken};
use crate::clock;
use crate::driver::catch_panic;
use crate::driver::command::{Amend, Command, NotLooked};
use crate::driver::term::Reason;
use crate::error::{EveryError, LockError};
use crate::lock::{Lock, LockGuard};
use crate::locker::Inner;
use crate::meter::Outcome;
use crate::name::{Key, Kind};
use crate::options::JITTER;
use crate::sabotage::Sabotage;
use crate::store::slots::{Amended, Entry, Looked, Moment, NoSlots, Phase, Record, Slots};

/// Longest time without a look at the store's clock, which drifts from ours and can be set: so much later a slot may be
/// noticed after a step. The session itself asks the store more often.
const LONGEST_NAP: Duration = Duration::from_mins(1);

/// The first pause of one whom somebody else was ahead of, at most: by then that one has recorded the slot.
const FIRST_PAUSE: Duration = Duration::from_millis(250);

/// Over how long replicas look at a slot that begins: most of them find it claimed then, and need not ask for its lock.
const SPREAD: Duration = Duration::from_millis(20);

/// How often it is tried to record the end of a run.
const ATTEMPTS: u32 = 3;

/// See the module.
pub(super) struct Replica {
    locker: Arc<Inner>,
    lock: Lock,
    slots: Slots,
    plan: Plan,
    interval: Duration,
    until: Option<CancellationToken>,
    rng: StdRng,
    /// A claim whose job was not started, since the lock was lost in between, and what was recorded before it: nobody else
    /// can have run that slot.
    unused: Option<(Record, Option<Record>)>,
    /// It was told in the log that the store's clock must have been set back.
    told_of_the_clock: bool,
}

/// A slot that is ours.
pub(super) struct Claim {
    started: Record,
    before: Option<Record>,
}

/// What one who does not wait for slots came to.
pub(super) enum Entered {
    Locked(LockGuard),
    Taken(Taken),
}

/// What is to be done, and what that was told from.
struct Outlook {
    looked: Looked,
    /// What counts as recorded.
    record: Option<Record>,
    next: Next,
    /// The present slot came while the last run was in progress.
    is_overlapped: bool,
}

impl Replica {
    pub(super) fn new(every: Every) -> Result<Self, EveryError> {
        let Every { locker, name, schedule, until } = every;
        name.validate().map_err(EveryError::Name)?;
        let key = Key::of(Kind::Lock, &name);
        let plan = schedule.plan(key)?;
        locker.meter.serves(&name);
        // Those who were kept from the same slot do not come back at the same instant.
        let seed = Key::of(Kind::Lock, &locker.options.identity).get().cast_unsigned();
        Ok(Self {
            lock: Lock::new(Arc::clone(&locker), name.clone(), None).fenced(),
            slots: Slots { key, name },
            plan,
            interval: schedule.interval,
            until,
            rng: rand::SeedableRng::seed_from_u64(seed),
            unused: None,
            told_of_the_clock: false,
            locker,
        })
    }

    fn is_stopped(&self) -> bool {
        self.locker.closing.is_cancelled() || self.until.as_ref().is_some_and(CancellationToken::is_cancelled)
    }

    /// Waits for the lock, when there is a slot to be served. `None`: told to stop.
    pub(super) async fn next_lock(&mut self) -> Result<Option<LockGuard>, EveryError> {
        let (closing, until) = (self.locker.closing.clone(), self.until.clone());
        let entered = tokio::select! {
            biased;
            () = closing.cancelled() => return Ok(None),
            () = cancelled(until.as_ref()) => return Ok(None),
            entered = self.enter() => entered,
        };
        match entered {
            Err(_) if self.is_stopped() => Ok(None),
            entered => entered.map(Some),
        }
    }

    /// Nothing of this has to be brought to its end: it may be dropped.
    async fn enter(&mut self) -> Result<LockGuard, EveryError> {
        let mut refusals = 0;
        loop {
            let outlook = match self.look().await {
                Ok(outlook) => outlook,
                Err(EveryError::Failed { reason }) => {
                    warn!(reason, "the store could not tell which slots were served");
                    self.pause(1).await;
                    continue;
                }
                Err(EveryError::Unanswered { .. }) => {
                    debug!("the store did not tell which slots were served");
                    self.pause(1).await;
                    continue;
                }
                Err(error) => return Err(error),
            };
            match outlook.next {
                Next::Rest { until } => {
                    refusals = 0;
                    self.rest(outlook.looked.now, until).await;
                }
                Next::Serve(due) => match self.lock.try_lock().await {
                    Ok(Some(guard)) => return Ok(guard),
                    Ok(None) => {
                        debug!(slot = due.number, "somebody else has the lock");
                        self.pause(refusals).await;
                        refusals += 1;
                    }
                    Err(error @ (LockError::Failed { .. } | LockError::Unanswered { .. })) => {
                        warn!(%error, slot = due.number, "the lock could not be asked for");
                        self.pause(1).await;
                    }
                    Err(error) => return Err(error.into()),
                },
            }
        }
    }

    /// As [`enter`](Self::enter), for one who does not wait for slots.
    pub(super) async fn lock_once(&mut self) -> Result<Entered, EveryError> {
        let patience = clock::now() + self.locker.options.bounds().ttl;
        let mut refusals = 0;
        loop {
            if self.is_stopped() {
                return Err(EveryError::Stopped);
            }
            let outlook = self.look().await?;
            let Next::Serve(_) = outlook.next else { return Ok(Entered::Taken(outlook.taken())) };
            match self.lock.try_lock().await? {
                Some(guard) => return Ok(Entered::Locked(guard)),
                None if clock::now() >= patience => return Ok(Entered::Taken(outlook.taken())),
                None => self.pause(refusals).await,
            }
            refusals += 1;
        }
    }

    async fn rest(&mut self, now: Moment, until: Moment) {
        let rest = until.since(now);
        if rest > self.interval * 3 && !self.told_of_the_clock {
            self.told_of_the_clock = true;
            warn!(
                rest = %humantime::format_duration(rest),
                "a slot is recorded that lies ahead of the store's clock, which was set back: none is served before that"
            );
        }
        let spread = SPREAD.mul_f64(self.rng.random_range(0.0..1.0));
        tokio::time::sleep(rest.min(LONGEST_NAP) + spread).await;
    }

    /// Between two attempts: the first one is over soon after the other one has claimed the slot.
    async fn pause(&mut self, refusals: u32) {
        let retry = self.locker.options.retry_interval.min(self.interval / 2);
        let pause = if refusals == 0 { retry.min(FIRST_PAUSE) } else { retry };
        tokio::time::sleep(pause.mul_f64(1.0 + self.rng.random_range(0.0..JITTER))).await;
    }

    /// Asks the store what is recorded and what its clock shows, and tells what is to be done.
    async fn look(&self) -> Result<Outlook, EveryError> {
        let (reply, answer) = oneshot::channel();
        self.locker.tell(Command::Slots(self.slots.clone(), reply));
        let looked = match answer.await {
            Ok(Ok(looked)) => looked,
            Ok(Err(NotLooked::NoSlots(error))) => return Err(error.into()),
            Ok(Err(NotLooked::Unanswered)) => {
                return Err(EveryError::Unanswered { limit: self.locker.options.query_timeout });
            }
            Ok(Err(NotLooked::Refused(error))) => return Err(EveryError::Refused(error)),
            Err(_) if self.locker.closing.is_cancelled() => return Err(EveryError::Stopped),
            Err(_) => return Err(EveryError::Driver),
        };
        let record = match &self.unused {
            Some((unused, before)) if looked.record.as_ref() == Some(unused) => before.clone(),
            _ if self.locker.options.is_broken(Sabotage::LockIsEnough) => None,
            _ => looked.record.clone(),
        };
        let is_by_the_client = self.locker.options.is_broken(Sabotage::ClientClock);
        let now = if is_by_the_client { Moment(clock::wall_micros()) } else { looked.now };
        let next = self.plan.next(now, record.as_ref());
        let is_overlapped = record.as_ref().is_some_and(|record| self.plan.skips_present(now, record));
        Ok(Outlook { looked, record, next, is_overlapped })
    }

    /// Records that the slot is ours, under the lock. `None`: somebody else was quicker, or it could not be recorded; then
    /// the next look tells.
    ///
    /// Once it is asked for it is brought to its end, also where this is told to stop meanwhile: a slot that is claimed and
    /// not served is lost.
    pub(super) async fn claim(&mut self, guard: &LockGuard) -> Result<Option<(Slot, Claim)>, EveryError> {
        let outlook = match self.look().await {
            Ok(outlook) => outlook,
            Err(EveryError::Failed { .. } | EveryError::Unanswered { .. } | EveryError::Stopped) => {
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        let Next::Serve(due) = outlook.next else { return Ok(None) };
        if self.is_stopped() {
            return Ok(None);
        }
        let Due { number, at, run } = due;
        let by = self.locker.options.identity.clone();
        let entry = Entry { number, at, run, phase: Phase::Started, by };
        let started = match self.amend(guard, outlook.looked.record.as_ref(), entry).await {
            Amended::Done(record) => record,
            Amended::Failed(error @ NoSlots::Forbidden(_)) => return Err(error.into()),
            not_done => {
                debug!(slot = number, ?not_done, "the slot was not claimed");
                return Ok(None);
            }
        };
        let claim = Claim { started, before: outlook.record };
        if !guard.is_held() {
            self.unused = Some((claim.started, claim.before));
            return Ok(None);
        }
        self.tell_of_the_past(claim.before.as_ref(), &due);
        info!(slot = number, run, term = guard.term(), "serves the slot");
        let slot = Slot { number, at: at.to_system_time(), run, lease: guard.lease().clone() };
        Ok(Some((slot, claim)))
    }

    /// What became of the slots before this one. One replica tells it: who claims this one.
    fn tell_of_the_past(&self, before: Option<&Record>, due: &Due) {
        let Some(before) = before else { return };
        let Entry { number, phase, by, .. } = &before.entry;
        if *phase == Phase::Started {
            self.count(Outcome::Crashed, 1);
            warn!(slot = number, by, is_repeated = due.run > 1, "the run of a slot crashed");
        }
        let skipped = self.plan.missed(before, due);
        if skipped > 0 {
            self.count(Outcome::Skipped, skipped);
            warn!(skipped, after = number, "slots were skipped: nobody served them");
        }
    }

    fn count(&self, outcome: Outcome, slots: u64) {
        self.locker.meter.slots(&self.slots.name, outcome, slots);
    }

    /// Counts a run that has ended: `None` if it had to be dropped.
    pub(super) fn tell_end<T, E>(&self, returned: Option<&std::thread::Result<Result<T, E>>>) {
        let outcome = match returned {
            Some(Ok(Ok(_))) => Outcome::Ok,
            Some(Ok(Err(_))) => Outcome::Error,
            Some(Err(_)) => Outcome::Panic,
            None => Outcome::Dropped,
        };
        self.count(outcome, 1);
    }

    /// Polls the job, and records its end. `None` if it had to be dropped.
    ///
    /// The one place where a job ends before its lock is released, by the caller: `attend` drops its future before it
    /// returns.
    pub(super) async fn serve<T>(
        &self,
        guard: &LockGuard,
        claim: Claim,
        job: impl Future<Output = T>,
    ) -> Option<std::thread::Result<T>> {
        let number = claim.started.entry.number;
        let stop = async {
            cancelled(self.until.as_ref()).await;
            let term = guard.lease().shared();
            term.stop(Reason::Shutdown, clock::now());
            self.locker.tell(Command::Stop { id: guard.id(), term: term.number, reason: Reason::Shutdown });
        };
        // What the panic leaves half done of the job's future is dropped, and not looked at.
        let returned = guard.attend(catch_panic(job), stop).await;
        if returned.is_none() {
            warn!(
                slot = number,
                "the job was dropped, since it did not stop in time: its slot counts as crashed"
            );
            return None;
        }
        let entry = Entry { phase: Phase::Finished, ..claim.started.entry.clone() };
        for attempt in 1..=ATTEMPTS {
            match self.amend(guard, Some(&claim.started), entry.clone()).await {
                Amended::Done(finished) => {
                    let skipped = self.plan.overlapped(&finished);
                    if skipped > 0 {
                        self.count(Outcome::Skipped, skipped);
                        warn!(
                            skipped,
                            after = number,
                            "slots were skipped: they began while this one was served"
                        );
                    }
                    break;
                }
                Amended::Failed(NoSlots::Failed(reason)) if guard.is_held() && attempt < ATTEMPTS => {
                    debug!(slot = number, reason, "the end of the run could not be recorded yet");
                }
                not_done => {
                    warn!(
                        slot = number,
                        ?not_done,
                        "the end of the run was not recorded: its slot counts as crashed"
                    );
                    break;
                }
            }
        }
        returned
    }

    async fn amend(&self, guard: &LockGuard, expected: Option<&Record>, next: Entry) -> Amended {
        let (reply, amended) = oneshot::channel();
        let amend = Amend {
            id: guard.id(),
            term: guard.term(),
            slots: self.slots.clone(),
            expected: expected.cloned(),
            next,
        };
        self.locker.tell(Command::Amend(Box::new(amend), reply));
        // The driver is gone, and the lock with it.
        amended.await.unwrap_or(Amended::Gone)
    }
}

impl Outlook {
    fn taken(&self) -> Taken {
        let (state, next_in) = match (&self.next, &self.record) {
            (Next::Rest { until }, Some(record)) => {
                let state = match record.entry.phase {
                    Phase::Started => SlotState::Started,
                    Phase::Finished if self.is_overlapped => SlotState::Overlapped,
                    Phase::Finished => SlotState::Served,
                };
                (state, until.since(self.looked.now))
            }
            (Next::Rest { until }, None) => (SlotState::Served, until.since(self.looked.now)),
            (Next::Serve(_), _) => (SlotState::Held, Duration::ZERO),
        };
        let entry = self.record.as_ref().map(|record| &record.entry);
        Taken {
            state,
            number: entry.map(|entry| entry.number),
            at: entry.map(|entry| entry.at.to_system_time()),
            by: entry.map(|entry| entry.by.clone()),
            next_in,
        }
    }
}

async fn cancelled(until: Option<&CancellationToken>) {
    match until {
        Some(shutdown) => shutdown.cancelled().await,
        None => future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use std::task::Poll;

    use super::*;
    use crate::error::LossCause;
    use crate::{Locker, Memory, Options};

    /// E-01, E-04: the lock is lost between the claim and the job: nobody has run that slot, and it is served by whoever
    /// claimed it, when that one has the lock again. To all others it looks like a run that has crashed.
    #[tokio::test(start_paused = true)]
    async fn a_claim_whose_job_was_not_started_is_not_lost() {
        let memory = Memory::new();
        let key = Key::of(Kind::Lock, "job");
        let replica = |who: &str| {
            let locker = Locker::memory(&memory, Options::default().identity(who)).unwrap();
            Replica::new(locker.every("job", Duration::from_hours(1))).unwrap()
        };
        let (mut a, mut b) = (replica("a"), replica("b"));
        let guard = a.enter().await.unwrap();
        let term = Arc::clone(guard.lease().shared());
        // Polled before what hears that the claim is recorded.
        let loses = future::poll_fn(|_| {
            if memory.has_slot_of(key) {
                term.lose(LossCause::Gone, clock::now());
                return Poll::Ready(());
            }
            Poll::Pending
        });
        let ((), claimed) = tokio::join!(biased; loses, a.claim(&guard));
        assert!(claimed.unwrap().is_none());
        guard.release().await.unwrap_err();

        let Entered::Taken(taken) = b.lock_once().await.unwrap() else { panic!("it looks like a crash") };
        assert_eq!((taken.state, taken.by.as_deref()), (SlotState::Started, Some("a")));
        let guard = a.enter().await.unwrap();
        let (slot, claim) = a.claim(&guard).await.unwrap().expect("it is served after all");
        assert_eq!((Some(slot.number), slot.run), (taken.number, 1));
        assert!(a.serve(&guard, claim, future::ready(())).await.is_some());
        guard.release().await.unwrap();
        for replica in [&mut a, &mut b] {
            let Entered::Taken(taken) = replica.lock_once().await.unwrap() else { panic!("it is served") };
            assert_eq!(taken.state, SlotState::Served);
        }
    }
    /// E-05: told that the lock is lost, whoever served does not wait for the store, which may be away for long.
    #[tokio::test(start_paused = true)]
    async fn the_end_of_a_run_whose_lock_is_lost_is_not_waited_for() {
        let memory = Memory::new();
        let locker = Locker::memory(&memory, Options::default()).unwrap();
        let since = clock::now();
        let lost = locker.every("job", Duration::from_hours(1)).once(async |slot: Slot| {
            memory.down();
            slot.cancelled().await;
            Ok::<_, EveryError>(())
        });
        let lost = lost.await;
        assert!(matches!(lost, Err(EveryError::Lost { .. })), "{lost:?}");
        assert_eq!(clock::now() - since, Duration::ZERO);
        memory.up();
        locker.close().await;
    }
}
