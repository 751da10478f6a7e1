//! What happens as numbers, for the `metrics` facade. Without the feature of that name nothing of it is compiled in.
//!
//! Names and types follow the conventions of Prometheus: base units, `_total` for what only grows. What stands in `ALL` is
//! described to the recorder, and is what the guide's table has.
#![cfg_attr(
    not(feature = "metrics"),
    expect(unused_variables, clippy::unused_self, reason = "every method is empty then")
)]

#[cfg(feature = "metrics")]
use std::collections::BTreeMap;
#[cfg(feature = "metrics")]
use std::sync::atomic::{AtomicU64, Ordering};
#[cfg(feature = "metrics")]
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::time::Instant;

#[cfg(feature = "metrics")]
use crate::clock;
use crate::driver::command::{Place, Purpose};
use crate::driver::term::{Reason, Term};
use crate::error::LossCause;
use crate::name::{Kind, Name};

/// Counts for one Locker. All that it counts is labelled by the store: a process may have several.
#[derive(Clone, Debug, Default)]
pub(crate) struct Meter {
    #[cfg(feature = "metrics")]
    store: Arc<Told>,
}

/// What this process has of one store, all its Lockers together: gauges are set to that. Were they counted up and down, a recorder
/// that is installed after a term has begun would be wrong for good; and a Locker that has lost a name would take the deadline from
/// another one that leads it by then.
#[cfg(feature = "metrics")]
#[derive(Debug, Default)]
struct Told {
    address: Arc<str>,
    tally: Mutex<Tally>,
}

#[cfg(feature = "metrics")]
#[derive(Debug, Default)]
struct Tally {
    sessions: u32,
    held: BTreeMap<&'static str, u32>,
    /// By name, of each term: until when its lease is trusted.
    leading: BTreeMap<Name, BTreeMap<u64, f64>>,
}

/// Those that Lockers are told of.
#[cfg(feature = "metrics")]
static STORES: Mutex<Vec<Weak<Told>>> = Mutex::new(Vec::new());

/// Tells terms apart, those of several Lockers too.
#[cfg(feature = "metrics")]
static NEXT_TERM: AtomicU64 = AtomicU64::new(0);

/// A session that is open. Dropped, it is open no more.
#[derive(Debug)]
pub(crate) struct Open(Meter);

/// A term that has begun: a job leads, or somebody is in a section. Dropped, the process does so no more.
#[derive(Debug)]
#[cfg_attr(not(feature = "metrics"), expect(dead_code, reason = "for its drop"))]
pub(crate) struct Begun {
    meter: Meter,
    what: What,
    #[cfg(feature = "metrics")]
    id: u64,
}

#[derive(Debug)]
#[cfg_attr(not(feature = "metrics"), expect(dead_code, reason = "for what is counted"))]
enum What {
    Leading(Name),
    Section(Kind),
}

/// Somebody asks for a lock. Dropped without an outcome, whoever asked went away.
#[derive(Debug)]
#[cfg_attr(not(feature = "metrics"), expect(dead_code, reason = "for its drop"))]
pub(crate) struct Asking {
    meter: Meter,
    kind: Kind,
    #[cfg(feature = "metrics")]
    since: Instant,
    outcome: &'static str,
}

/// What became of slots.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Outcome {
    Ok,
    Error,
    Panic,
    Dropped,
    Crashed,
    Skipped,
}

#[cfg(feature = "metrics")]
mod names {
    pub(super) const LEADING: &str = "leasehold_leading";
    pub(super) const DEADLINE: &str = "leasehold_deadline_timestamp_seconds";
    pub(super) const TRANSITIONS: &str = "leasehold_transitions_total";
    pub(super) const OVERRUNS: &str = "leasehold_overruns_total";
    pub(super) const HEARTBEAT: &str = "leasehold_heartbeat_seconds";
    pub(super) const POLLS: &str = "leasehold_polls_total";
    pub(super) const SESSIONS: &str = "leasehold_sessions";
    pub(super) const OPENED: &str = "leasehold_sessions_opened_total";
    pub(super) const LOST: &str = "leasehold_sessions_lost_total";
    pub(super) const FAILED: &str = "leasehold_connect_failures_total";
    pub(super) const WAITED: &str = "leasehold_lock_wait_seconds";
    pub(super) const HELD: &str = "leasehold_locks_held";
    pub(super) const LOCKS_LOST: &str = "leasehold_locks_lost_total";
    pub(super) const SLOTS: &str = "leasehold_slots_total";
}
#[cfg(feature = "metrics")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Type {
    Counter,
    Gauge,
    Histogram,
}

/// Name, type, unit, and what it is.
#[cfg(feature = "metrics")]
const ALL: [(&str, Type, metrics::Unit, &str); 14] = {
    use Type::{Counter, Gauge, Histogram};
    use metrics::Unit::{Count, Seconds};
    [
        (
            names::LEADING,
            Gauge,
            Count,
            "Whether this process leads the name: 1 from the start of its job to the end of the lease",
        ),
        (
            names::DEADLINE,
            Gauge,
            Seconds,
            "Until when the lease is trusted, as a Unix time: moved on by each heartbeat, 0 when there is none",
        ),
        (names::TRANSITIONS, Counter, Count, "Terms that began, were released, or were lost, and why"),
        (
            names::OVERRUNS,
            Counter,
            Count,
            "Jobs and guards that went on though their lease was lost and their grace over",
        ),
        (names::HEARTBEAT, Histogram, Seconds, "How long the store took to answer a heartbeat"),
        (
            names::POLLS,
            Counter,
            Count,
            "Statements that asked for names or locks; each asks for all that are due",
        ),
        (
            names::SESSIONS,
            Gauge,
            Count,
            "Sessions with the store that are open: one for each Locker that is in use",
        ),
        (names::OPENED, Counter, Count, "Sessions with the store that were opened"),
        (names::LOST, Counter, Count, "Sessions with the store that were lost, and why"),
        (names::FAILED, Counter, Count, "Attempts to open a session that failed"),
        (names::WAITED, Histogram, Seconds, "How long was waited for a lock, and what came of it"),
        (names::HELD, Gauge, Count, "Locks that this process holds"),
        (names::LOCKS_LOST, Counter, Count, "Locks that were lost while they were held, and why"),
        (
            names::SLOTS,
            Counter,
            Count,
            "Slots of jobs that are done once per interval, and what became of them",
        ),
    ]
};

impl Meter {
    pub(crate) fn new(store: &str) -> Self {
        #[cfg(feature = "metrics")]
        for (name, is, unit, help) in ALL {
            match is {
                Type::Counter => metrics::describe_counter!(name, unit, help),
                Type::Gauge => metrics::describe_gauge!(name, unit, help),
                Type::Histogram => metrics::describe_histogram!(name, unit, help),
            }
        }
        let meter = Self {
            #[cfg(feature = "metrics")]
            store: Told::of(store),
        };
        meter.begin_at_zero();
        meter
    }

    /// What alerts look at is there before it happens, at zero: the first one would not be an increase otherwise.
    fn begin_at_zero(&self) {
        #[cfg(feature = "metrics")]
        {
            for cause in CAUSES {
                metrics::counter!(names::LOST, "store" => self.store(), "cause" => cause).increment(0);
                for kind in [Kind::Lock, Kind::RwLock] {
                    metrics::counter!(
                        names::LOCKS_LOST,
                        "store" => self.store(), "kind" => kind.label(), "cause" => cause
                    )
                    .increment(0);
                }
            }
            for result in [REFUSED, UNREACHABLE] {
                metrics::counter!(names::FAILED, "store" => self.store(), "result" => result).increment(0);
            }
            for kind in [Kind::Lock, Kind::RwLock] {
                self.overruns(kind, String::new()).increment(0);
            }
            self.sessions(|sessions| sessions);
        }
    }

    #[cfg(feature = "metrics")]
    fn store(&self) -> metrics::SharedString {
        Arc::clone(&self.store.address).into()
    }

    /// The recorder is told while this is locked, or it would not be told in order.
    #[cfg(feature = "metrics")]
    fn tally(&self) -> MutexGuard<'_, Tally> {
        self.store.tally.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[cfg(feature = "metrics")]
    fn sessions(&self, change: impl FnOnce(u32) -> u32) {
        let mut tally = self.tally();
        tally.sessions = change(tally.sessions);
        metrics::gauge!(names::SESSIONS, "store" => self.store()).set(tally.sessions);
    }

    #[cfg(feature = "metrics")]
    fn held(&self, kind: Kind, change: impl FnOnce(u32) -> u32) {
        let mut tally = self.tally();
        let held = tally.held.entry(kind.label()).or_default();
        *held = change(*held);
        metrics::gauge!(names::HELD, "store" => self.store(), "kind" => kind.label()).set(*held);
    }

    /// The deadlines of the terms of a name, as they are after a change.
    #[cfg(feature = "metrics")]
    fn leading(&self, name: &Name, change: impl FnOnce(&mut BTreeMap<u64, f64>)) {
        let mut tally = self.tally();
        let mut terms = tally.leading.remove(name).unwrap_or_default();
        change(&mut terms);
        let count = u32::try_from(terms.len()).unwrap_or(u32::MAX);
        let deadline = terms.values().copied().fold(0.0, f64::max);
        metrics::gauge!(names::LEADING, "store" => self.store(), "name" => name.to_string()).set(count);
        metrics::gauge!(names::DEADLINE, "store" => self.store(), "name" => name.to_string()).set(deadline);
        if count > 0 {
            tally.leading.insert(name.clone(), terms);
        }
    }

    /// A candidate takes its seat: that it does not lead is told from the start.
    pub(crate) fn enlisted(&self, name: &Name) {
        #[cfg(feature = "metrics")]
        {
            self.leading(name, |_| ());
            for cause in CAUSES {
                self.transition(name, "lost", cause).increment(0);
            }
            for reason in [FAILED, DROPPED] {
                self.transition(name, "released", reason).increment(0);
            }
            self.overruns(Kind::Lease, name.to_string()).increment(0);
        }
    }

    /// A term begins, by a release that was told to this process or for whatever reason the name was free.
    pub(crate) fn began(&self, place: &Place, term: &Term) -> Begun {
        let what = match &place.purpose {
            Purpose::Run(_) => What::Leading(place.name.clone()),
            Purpose::Section(_) => What::Section(place.kind),
        };
        let begun = Begun {
            meter: self.clone(),
            what,
            #[cfg(feature = "metrics")]
            id: NEXT_TERM.fetch_add(1, Ordering::Relaxed),
        };
        #[cfg(feature = "metrics")]
        match &begun.what {
            What::Leading(name) => {
                let reason = if term.is_handed_over { "handed_over" } else { "vacant" };
                self.transition(name, "acquired", reason).increment(1);
                begun.renewed(term.deadline());
            }
            What::Section(kind) => self.held(*kind, |held| held.saturating_add(1)),
        }
        begun
    }

    #[cfg(feature = "metrics")]
    fn transition(&self, name: &Name, transition: &'static str, reason: &'static str) -> metrics::Counter {
        metrics::counter!(
            names::TRANSITIONS,
            "store" => self.store(), "name" => name.to_string(), "transition" => transition, "reason" => reason
        )
    }

    #[cfg(feature = "metrics")]
    fn overruns(&self, kind: Kind, name: String) -> metrics::Counter {
        metrics::counter!(names::OVERRUNS, "store" => self.store(), "kind" => kind.label(), "name" => name)
    }

    /// What should have ended has not.
    pub(crate) fn overran(&self, place: &Place) {
        #[cfg(feature = "metrics")]
        {
            // Names of locks are as many as what they lock.
            let name = if place.is_run() { place.name.to_string() } else { String::new() };
            self.overruns(place.kind, name).increment(1);
        }
    }

    /// A heartbeat was answered.
    pub(crate) fn heartbeat(&self, round_trip: Duration) {
        #[cfg(feature = "metrics")]
        metrics::histogram!(names::HEARTBEAT, "store" => self.store()).record(round_trip);
    }

    /// Names are asked for.
    pub(crate) fn polled(&self) {
        #[cfg(feature = "metrics")]
        metrics::counter!(names::POLLS, "store" => self.store()).increment(1);
    }

    pub(crate) fn connected(&self) -> Open {
        #[cfg(feature = "metrics")]
        {
            self.sessions(|sessions| sessions.saturating_add(1));
            metrics::counter!(names::OPENED, "store" => self.store()).increment(1);
        }
        Open(self.clone())
    }

    pub(crate) fn session_lost(&self, cause: &LossCause) {
        #[cfg(feature = "metrics")]
        metrics::counter!(names::LOST, "store" => self.store(), "cause" => label(cause)).increment(1);
    }

    /// Refused: trying again cannot mend it.
    pub(crate) fn connect_failed(&self, is_refused: bool) {
        #[cfg(feature = "metrics")]
        {
            let result = if is_refused { REFUSED } else { UNREACHABLE };
            metrics::counter!(names::FAILED, "store" => self.store(), "result" => result).increment(1);
        }
    }

    pub(crate) fn asks(&self, kind: Kind) -> Asking {
        Asking {
            meter: self.clone(),
            kind,
            #[cfg(feature = "metrics")]
            since: clock::now(),
            outcome: "cancelled",
        }
    }

    /// Somebody serves the slots of this name: what has not become of any is told from the start.
    pub(crate) fn serves(&self, name: &Name) {
        for outcome in Outcome::ALL {
            self.slots(name, outcome, 0);
        }
    }

    /// This became of so many slots.
    pub(crate) fn slots(&self, name: &Name, outcome: Outcome, count: u64) {
        #[cfg(feature = "metrics")]
        metrics::counter!(
            names::SLOTS,
            "store" => self.store(), "name" => name.to_string(), "outcome" => outcome.label()
        )
        .increment(count);
    }
}

#[cfg(feature = "metrics")]
impl Told {
    /// That of this address, which all Lockers over it share.
    fn of(address: &str) -> Arc<Self> {
        let mut stores = STORES.lock().unwrap_or_else(PoisonError::into_inner);
        stores.retain(|told| told.strong_count() > 0);
        let known = stores.iter().filter_map(Weak::upgrade).find(|told| &*told.address == address);
        known.unwrap_or_else(|| {
            let told = Arc::new(Self { address: address.into(), tally: Mutex::default() });
            stores.push(Arc::downgrade(&told));
            told
        })
    }
}

impl Outcome {
    const ALL: [Self; 6] = [Self::Ok, Self::Error, Self::Panic, Self::Dropped, Self::Crashed, Self::Skipped];

    #[cfg(feature = "metrics")]
    const fn label(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Error => "error",
            Self::Panic => "panic",
            Self::Dropped => "dropped",
            Self::Crashed => "crashed",
            Self::Skipped => "skipped",
        }
    }
}

impl Begun {
    /// A heartbeat has moved the deadline on.
    pub(crate) fn renewed(&self, deadline: Instant) {
        #[cfg(feature = "metrics")]
        if let What::Leading(name) = &self.what {
            let left = deadline.saturating_duration_since(clock::now());
            let deadline = (Duration::from_micros(clock::wall_micros()) + left).as_secs_f64();
            self.meter.leading(name, |terms| _ = terms.insert(self.id, deadline));
        }
    }

    /// The lease is over; its job has returned well, or not, or has not returned at all.
    pub(crate) fn ended(self, reason: &Reason, job: Option<bool>) {
        #[cfg(feature = "metrics")]
        match &self.what {
            What::Leading(name) => {
                let (transition, reason) = match reason {
                    Reason::Shutdown => ("released", "shutdown"),
                    Reason::Closed => ("released", "close"),
                    Reason::SteppedDown => ("released", "step_down"),
                    Reason::Ineligible => ("released", "ineligible"),
                    Reason::Ended => (
                        "released",
                        match job {
                            Some(true) => "job_ended",
                            Some(false) => FAILED,
                            None => DROPPED,
                        },
                    ),
                    Reason::Lost(cause) => ("lost", label(cause)),
                };
                self.meter.transition(name, transition, reason).increment(1);
            }
            What::Section(kind) => {
                if let Reason::Lost(cause) = reason {
                    metrics::counter!(
                        names::LOCKS_LOST,
                        "store" => self.meter.store(), "kind" => kind.label(), "cause" => label(cause)
                    )
                    .increment(1);
                }
            }
        }
    }
}

impl Asking {
    pub(crate) fn came_to(&mut self, outcome: &'static str) {
        self.outcome = outcome;
    }
}

#[cfg(feature = "metrics")]
impl Drop for Open {
    fn drop(&mut self) {
        self.0.sessions(|sessions| sessions.saturating_sub(1));
    }
}

#[cfg(feature = "metrics")]
impl Drop for Begun {
    fn drop(&mut self) {
        match &self.what {
            What::Leading(name) => self.meter.leading(name, |terms| _ = terms.remove(&self.id)),
            What::Section(kind) => self.meter.held(*kind, |held| held.saturating_sub(1)),
        }
    }
}

#[cfg(feature = "metrics")]
impl Drop for Asking {
    fn drop(&mut self) {
        metrics::histogram!(
            names::WAITED,
            "store" => self.meter.store(), "kind" => self.kind.label(), "outcome" => self.outcome
        )
        .record(clock::now().saturating_duration_since(self.since));
    }
}

/// The job returned an error.
#[cfg(feature = "metrics")]
const FAILED: &str = "job_failed";

/// The job panicked, or the future of its run was dropped.
#[cfg(feature = "metrics")]
const DROPPED: &str = "job_dropped";

#[cfg(feature = "metrics")]
const REFUSED: &str = "refused";

#[cfg(feature = "metrics")]
const UNREACHABLE: &str = "unreachable";

/// Why something is lost: what [`label`] gives.
#[cfg(feature = "metrics")]
const CAUSES: [&str; 6] = ["timeout", "deadline", "session_closed", "distrusted", "gone", "driver"];

#[cfg(feature = "metrics")]
const fn label(cause: &LossCause) -> &'static str {
    CAUSES[match cause {
        LossCause::Timeout { .. } => 0,
        LossCause::Deadline => 1,
        LossCause::Closed { .. } => 2,
        LossCause::Distrusted { .. } => 3,
        LossCause::Gone => 4,
        LossCause::Driver => 5,
    }]
}

#[cfg(all(test, feature = "metrics"))]
mod tests {
    use super::*;

    use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusRecorder};
    use tokio::sync::{mpsc, watch};

    use crate::driver::command::Run;
    use crate::driver::term::Shown;
    use crate::name::Key;
    use crate::options::Options;

    /// A term of a Locker over this store, which is trusted for so many seconds from now on.
    fn began(store: &Meter, seconds: u64) -> Begun {
        let (grants, shown) = (mpsc::unbounded_channel().0, watch::Sender::new(Shown::NOBODY));
        let run = Run { takeover_delay: Duration::ZERO, shutdown: None, grants, shown };
        let (key, purpose) = (Key::of(Kind::Lease, "job"), Purpose::Run(run));
        let place = Place { id: 1, name: "job".into(), key, kind: Kind::Lease, purpose };
        let now = clock::now();
        let deadline = now + Duration::from_secs(seconds);
        store.began(&place, &Term::new(&place, (1, false), now, deadline, Arc::new(Options::default())))
    }

    fn value(recorder: &PrometheusRecorder, metric: &str) -> Option<f64> {
        let text = recorder.handle().render();
        let line = text.lines().find(|line| line.starts_with(&format!("{metric}{{")))?;
        line.rsplit(' ').next()?.parse().ok()
    }

    /// M-01: what a recorder was not told, since it came later, does not make it wrong for good.
    #[test]
    fn a_recorder_that_is_installed_late_is_right_from_the_next_heartbeat_on() {
        let meter = Meter::new("installed late");
        let (session, term) = (meter.connected(), began(&meter, 20));
        let recorder = PrometheusBuilder::new().build_recorder();
        metrics::with_local_recorder(&recorder, || {
            term.renewed(clock::now() + Duration::from_secs(20));
            assert_eq!(value(&recorder, names::LEADING), Some(1.0));
            term.ended(&Reason::Ended, Some(true));
            assert_eq!(value(&recorder, names::LEADING), Some(0.0));
            drop(session);
            assert_eq!(value(&recorder, names::SESSIONS), Some(0.0));
        });
    }

    /// M-01: of two Lockers of one process, one leads before the other has noticed that it does so no more.
    #[test]
    fn the_end_of_a_term_does_not_take_the_deadline_of_the_next_one() {
        let recorder = PrometheusBuilder::new().build_recorder();
        metrics::with_local_recorder(&recorder, || {
            let (a, b) = (Meter::new("two lockers"), Meter::new("two lockers"));
            let (earlier, later) = (began(&a, 10), began(&b, 20));
            assert_eq!(value(&recorder, names::LEADING), Some(2.0));
            let deadline = value(&recorder, names::DEADLINE);
            earlier.ended(&Reason::Lost(LossCause::Gone), None);
            assert_eq!(value(&recorder, names::LEADING), Some(1.0));
            assert_eq!(value(&recorder, names::DEADLINE), deadline);
            later.ended(&Reason::Ended, Some(true));
            assert_eq!(value(&recorder, names::DEADLINE), Some(0.0));
        });
    }

    /// M-07: the guide's table has every metric with its type and its text, and no other.
    #[test]
    fn the_table_of_the_guide_is_what_is_described_to_the_recorder() {
        let rows: Vec<_> = include_str!("../docs/metrics.md")
            .lines()
            .filter(|line| line.starts_with("| `leasehold_"))
            .map(|line| line.split(" | ").map(|cell| cell.trim_matches([' ', '|', '`'])).collect::<Vec<_>>())
            .collect();
        let described: Vec<_> =
            ALL.iter().map(|(name, is, _, help)| (*name, format!("{is:?}").to_lowercase(), *help)).collect();
        let in_table: Vec<_> = rows.iter().map(|row| (row[0], row[1].to_owned(), row[3])).collect();
        assert_eq!(in_table, described);
    }
}
