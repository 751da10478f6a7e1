//! How a [`Locker`](crate::Locker) behaves: [`Options`], and what they promise: [`Bounds`].

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use rand::RngExt as _;

use crate::sabotage::Sabotage;

/// How long a standby waits between two attempts, before jitter: 5 s.
///
/// A release is pushed to the standbys; this interval matters after a crash, and where a push got lost.
pub const DEFAULT_RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// How often a holder proves to itself that it still holds: 5 s. Far below the idle limits of middleboxes.
pub const DEFAULT_HEARTBEAT_INTERVAL: Duration = Duration::from_secs(5);

/// How long a statement may go unanswered before its session is given up: 10 s, to ride out a checkpoint.
pub const DEFAULT_QUERY_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a job may take to stop after its lease was lost, before it is dropped: 5 s.
pub const DEFAULT_STOP_GRACE: Duration = Duration::from_secs(5);

/// How many names one Locker may contend for at once: 1,000, well inside PostgreSQL's default lock table.
pub const DEFAULT_MAX_HELD: usize = 1_000;

/// Longest `ttl` that the options may add up to: 24 days. PostgreSQL keeps its timeouts as 32-bit milliseconds.
pub const MAX_TTL: Duration = Duration::from_hours(24 * 24);

/// Most bytes of an identity: PostgreSQL keeps 63 bytes of an `application_name`, and ten are `leasehold/`.
pub const MAX_IDENTITY_BYTES: usize = 53;

/// Shortest duration that makes sense where zero does not: stores count in milliseconds.
pub(crate) const SHORTEST: Duration = Duration::from_millis(1);

/// Random part of the polls' jitter: each wait is uniform in `[1, 1.2) ×` the retry interval.
pub(crate) const JITTER: f64 = 0.2;

/// How a [`Locker`](crate::Locker) behaves.
///
/// Every setter takes and gives the options by value; the values are checked when a Locker is made. The text form
/// lists `option=value` pairs, separated by commas; durations are written as in [humantime](humantime::parse_duration).
///
/// ```
/// use std::time::Duration;
/// use leasehold::Options;
///
/// let options = Options::default().heartbeat_interval(Duration::from_secs(2));
/// let same: Options = "heartbeat_interval=2s".parse()?;
/// assert_eq!(same.to_string(), options.identity(same.get_identity()).to_string());
/// # Ok::<(), leasehold::OptionsError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    pub(crate) retry_interval: Duration,
    pub(crate) heartbeat_interval: Duration,
    pub(crate) query_timeout: Duration,
    pub(crate) stop_grace: Duration,
    pub(crate) takeover_delay: Duration,
    pub(crate) drain_timeout: Option<Duration>,
    pub(crate) fence_limit: Option<Duration>,
    pub(crate) max_held: usize,
    pub(crate) trust_affinity: bool,
    pub(crate) answer_step_down: bool,
    pub(crate) identity: String,
    /// The product broken on purpose.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) sabotage: Option<Sabotage>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            retry_interval: DEFAULT_RETRY_INTERVAL,
            heartbeat_interval: DEFAULT_HEARTBEAT_INTERVAL,
            query_timeout: DEFAULT_QUERY_TIMEOUT,
            stop_grace: DEFAULT_STOP_GRACE,
            takeover_delay: Duration::ZERO,
            drain_timeout: None,
            fence_limit: None,
            max_held: DEFAULT_MAX_HELD,
            trust_affinity: false,
            answer_step_down: true,
            identity: default_identity(),
            #[cfg(any(test, feature = "testing"))]
            sabotage: None,
        }
    }
}

impl Options {
    /// Sets how long a standby waits between two attempts: uniform in `[1, 1.2) ×` this. Default 5 s.
    #[must_use]
    pub const fn retry_interval(mut self, interval: Duration) -> Self {
        self.retry_interval = interval;
        self
    }

    /// Sets how often a holder proves that it still holds. Default 5 s.
    #[must_use]
    pub const fn heartbeat_interval(mut self, interval: Duration) -> Self {
        self.heartbeat_interval = interval;
        self
    }

    /// Sets how long any one statement may go unanswered before its session, and every lease on it, is given up.
    /// It bounds connecting as well. Default 10 s.
    #[must_use]
    pub const fn query_timeout(mut self, timeout: Duration) -> Self {
        self.query_timeout = timeout;
        self
    }

    /// Sets how long a job may take to stop after its lease was lost; then its future is dropped. Zero drops it at
    /// once. Default 5 s.
    #[must_use]
    pub const fn stop_grace(mut self, grace: Duration) -> Self {
        self.stop_grace = grace;
        self
    }

    /// Sets how long a candidate that won holds the lease before its job starts, where the previous term may not have
    /// ended cleanly: everywhere but right after a release that this candidate was told of. Default zero.
    #[must_use]
    pub const fn takeover_delay(mut self, delay: Duration) -> Self {
        self.takeover_delay = delay;
        self
    }

    /// Sets how long a job may take to return after it was asked to stop while its lease is still held (shutdown,
    /// step down); then its future is dropped. Default none: as long as it takes.
    #[must_use]
    pub const fn drain_timeout(mut self, timeout: Option<Duration>) -> Self {
        self.drain_timeout = timeout;
        self
    }

    /// Sets how long a transaction that was [fenced](crate::Lease::fence_sql) may be idle before the server ends it, where
    /// its own `idle_in_transaction_session_timeout` is not less. That is how long a host that freezes or vanishes between
    /// the fence and the commit keeps the next term from beginning, at the longest. Default none: the
    /// [`ttl`](Bounds::ttl), 25.5 s with all else as by default.
    #[must_use]
    pub const fn fence_limit(mut self, limit: Option<Duration>) -> Self {
        self.fence_limit = limit;
        self
    }

    /// Sets how many names the Locker may contend for at once. Default 1,000.
    #[must_use]
    pub const fn max_held(mut self, names: usize) -> Self {
        self.max_held = names;
        self
    }

    /// Sets whether to take for granted that no pooler in transaction mode stands before a PostgreSQL server. Default
    /// false: the first connection to it is compared with a second one, which is closed again. For where a second
    /// connection cannot be had.
    ///
    /// Behind such a pooler two may lead at once.
    #[must_use]
    pub const fn trust_affinity(mut self, trust: bool) -> Self {
        self.trust_affinity = trust;
        self
    }

    /// Sets whether to hand over when somebody else asks for it: [`Locker::step_down`](crate::Locker::step_down),
    /// [`Observer::step_down`](crate::Observer::step_down), `leasehold step-down`. Default true. Where it is false, a
    /// request is logged and changes nothing; [`Lease::step_down`](crate::Lease::step_down) works all the same.
    ///
    /// Whoever may use the store may ask. It protects from mistakes, not from those who mean it: they could end the
    /// session as well.
    #[must_use]
    pub const fn answer_step_down(mut self, answer: bool) -> Self {
        self.answer_step_down = answer;
        self
    }

    /// Sets what this process is called in logs and in the store. Default `host:pid-suffix`, the suffix random;
    /// of a long host name its end.
    #[must_use]
    pub fn identity(mut self, identity: impl Into<String>) -> Self {
        self.identity = identity.into();
        self
    }

    /// Gives how long a job may take to stop after its lease was lost.
    #[must_use]
    pub const fn get_stop_grace(&self) -> Duration {
        self.stop_grace
    }

    /// Gives what this process is called.
    #[must_use]
    pub fn get_identity(&self) -> &str {
        &self.identity
    }

    /// Gives what these options promise, as numbers, on a store that enforces the ttl.
    ///
    /// [`Locker::bounds`](crate::Locker::bounds) tells what holds on the store at hand.
    ///
    /// ```
    /// use std::time::Duration;
    /// use leasehold::Options;
    ///
    /// let bounds = Options::default().bounds();
    /// assert_eq!(bounds.trust, Duration::from_secs(20));
    /// assert_eq!(bounds.ttl, Duration::from_millis(25_500));
    /// // Nobody leads, at the longest: after a release whose push got lost, after a crash, after a silent death.
    /// assert_eq!(bounds.vacancy_released, Duration::from_secs(6));
    /// assert_eq!(bounds.vacancy_crashed, Some(Duration::from_secs(6)));
    /// assert_eq!(bounds.vacancy_silent, Some(Duration::from_millis(31_500)));
    /// // Two lead, at the longest: after a frozen host or a partition; after the server ended the session; after the
    /// // server ended the session of a holder that is cut off or frozen as well.
    /// assert_eq!(bounds.overlap_silent, Duration::ZERO);
    /// assert_eq!(bounds.overlap_killed, Duration::from_secs(5));
    /// assert_eq!(bounds.overlap_killed_and_cut_off, Duration::from_secs(25));
    /// ```
    #[must_use]
    pub fn bounds(&self) -> Bounds {
        let trust = self.heartbeat_interval.max(self.query_timeout).saturating_add(self.query_timeout);
        let told_to_stopped = trust.saturating_add(self.stop_grace);
        let slack = Duration::from_millis(250).max(told_to_stopped / 50);
        let ttl = told_to_stopped.saturating_add(slack);
        // 1.2 × the interval: the longest jittered wait. In integers, so that the figure is exact.
        let poll = self.retry_interval.saturating_add(self.retry_interval / 5);
        let takeover = poll.saturating_add(self.takeover_delay);
        Bounds {
            trust,
            ttl,
            vacancy_released: takeover,
            vacancy_crashed: Some(takeover),
            vacancy_silent: Some(ttl.saturating_add(takeover)),
            overlap_silent: Duration::ZERO,
            overlap_killed: self.stop_grace.saturating_sub(self.takeover_delay),
            overlap_killed_and_cut_off: told_to_stopped.saturating_sub(self.takeover_delay),
            shortfalls: Vec::new(),
        }
    }

    /// Checks every value and how they go together.
    ///
    /// # Errors
    ///
    /// [`OptionsError`] names the rule that is broken and a value that would do.
    pub fn validate(&self) -> Result<(), OptionsError> {
        for (option, value, default) in [
            ("retry_interval", self.retry_interval, DEFAULT_RETRY_INTERVAL),
            ("heartbeat_interval", self.heartbeat_interval, DEFAULT_HEARTBEAT_INTERVAL),
            ("query_timeout", self.query_timeout, DEFAULT_QUERY_TIMEOUT),
            ("drain_timeout", self.drain_timeout.unwrap_or(SHORTEST), DEFAULT_STOP_GRACE),
            ("fence_limit", self.fence_limit.unwrap_or(SHORTEST), DEFAULT_STOP_GRACE),
        ] {
            if value < SHORTEST {
                return Err(OptionsError::TooShort { option, value, suggestion: default });
            }
        }
        for (option, value) in [
            ("retry_interval", self.retry_interval),
            ("takeover_delay", self.takeover_delay),
            ("drain_timeout", self.drain_timeout.unwrap_or_default()),
            ("fence_limit", self.fence_limit.unwrap_or_default()),
        ] {
            if value > MAX_TTL {
                return Err(OptionsError::TooLong { option, value });
            }
        }
        let ttl = self.bounds().ttl;
        if ttl > MAX_TTL {
            return Err(OptionsError::TtlTooLong {
                ttl,
                heartbeat_interval: self.heartbeat_interval,
                query_timeout: self.query_timeout,
                stop_grace: self.stop_grace,
            });
        }
        if self.max_held == 0 {
            return Err(OptionsError::NoNames);
        }
        if !(1..=MAX_IDENTITY_BYTES).contains(&self.identity.len())
            || !self.identity.bytes().all(|b| b.is_ascii_graphic() && b != b',' && b != b'/')
        {
            return Err(OptionsError::Identity { identity: self.identity.clone() });
        }
        Ok(())
    }

    /// Breaks the product in this way, so that a test can show that it would notice. Not part of the public API.
    #[cfg(any(test, feature = "testing"))]
    #[doc(hidden)]
    #[must_use]
    pub const fn sabotage(mut self, way: Sabotage) -> Self {
        self.sabotage = Some(way);
        self
    }

    /// Whether the product is to be broken in this way: never outside of tests.
    #[cfg_attr(
        not(any(test, feature = "testing")),
        expect(clippy::unused_self, reason = "the field is there in tests only")
    )]
    pub(crate) fn is_broken(&self, way: Sabotage) -> bool {
        #[cfg(any(test, feature = "testing"))]
        return self.sabotage == Some(way);
        #[cfg(not(any(test, feature = "testing")))]
        {
            let _ = way;
            false
        }
    }

    fn set(self, option: &str, value: &str) -> Result<Self, OptionsError> {
        let duration = || {
            humantime::parse_duration(value)
                .map_err(|_| OptionsError::Value { option: option.to_owned(), value: value.to_owned() })
        };
        let switch = || {
            value
                .parse()
                .map_err(|_| OptionsError::Switch { option: option.to_owned(), value: value.to_owned() })
        };
        Ok(match option {
            "retry_interval" => self.retry_interval(duration()?),
            "heartbeat_interval" => self.heartbeat_interval(duration()?),
            "query_timeout" => self.query_timeout(duration()?),
            "stop_grace" => self.stop_grace(duration()?),
            "takeover_delay" => self.takeover_delay(duration()?),
            "drain_timeout" if value == "none" => self.drain_timeout(None),
            "drain_timeout" => self.drain_timeout(Some(duration()?)),
            "fence_limit" if value == "none" => self.fence_limit(None),
            "fence_limit" => self.fence_limit(Some(duration()?)),
            "max_held" => {
                self.max_held(value.parse().map_err(|_| OptionsError::Count {
                    option: option.to_owned(),
                    value: value.to_owned(),
                })?)
            }
            "trust_affinity" => self.trust_affinity(switch()?),
            "answer_step_down" => self.answer_step_down(switch()?),
            "identity" => self.identity(value),
            _ => return Err(OptionsError::Unknown { option: option.to_owned() }),
        })
    }
}

/// Reads `option=value` pairs, separated by commas; what is not named keeps its default. The values are checked.
impl FromStr for Options {
    type Err = OptionsError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let pairs = text.split(',').map(str::trim).filter(|pair| !pair.is_empty());
        let options = pairs.into_iter().try_fold(Self::default(), |options, pair| {
            let (option, value) =
                pair.split_once('=').ok_or_else(|| OptionsError::NoValue { option: pair.to_owned() })?;
            options.set(option.trim(), value.trim())
        })?;
        options.validate()?;
        Ok(options)
    }
}

/// Prints every option, in the form that [`FromStr`] reads.
impl fmt::Display for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (option, value) in [
            ("retry_interval", self.retry_interval),
            ("heartbeat_interval", self.heartbeat_interval),
            ("query_timeout", self.query_timeout),
            ("stop_grace", self.stop_grace),
            ("takeover_delay", self.takeover_delay),
        ] {
            write!(f, "{option}={},", humantime::format_duration(value))?;
        }
        for (option, value) in [("drain_timeout", self.drain_timeout), ("fence_limit", self.fence_limit)] {
            match value {
                Some(value) => write!(f, "{option}={},", humantime::format_duration(value))?,
                None => write!(f, "{option}=none,")?,
            }
        }
        let Self { max_held, trust_affinity, answer_step_down, identity, .. } = self;
        write!(f, "max_held={max_held},trust_affinity={trust_affinity},")?;
        write!(f, "answer_step_down={answer_step_down},identity={identity}")
    }
}

/// What a set of [`Options`] promises, as numbers: where all replicas have the same ones. Where they differ, as in the
/// middle of a deployment, the holder's ttl and the standby's intervals count.
///
/// *Vacancy* is time in which nobody leads though a healthy candidate waits; *overlap* is time in which the body of an
/// old term still runs while a new one's has started. `None` is no bound.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Bounds {
    /// How long a holder trusts its last answered statement, counted from before that statement was sent:
    /// `max(heartbeat_interval, query_timeout) + query_timeout`.
    pub trust: Duration,
    /// How long the store lets a silent holder keep its leases: `trust + stop_grace + slack`, the slack being the
    /// larger of 250 ms and 2 %.
    pub ttl: Duration,
    /// Longest vacancy after a release. A pushed release takes about a round trip; this is where the push got lost.
    pub vacancy_released: Duration,
    /// Longest vacancy after the holder's process died. Where the store does not notice that, as on Redis, it is as after a
    /// silence.
    pub vacancy_crashed: Option<Duration>,
    /// Longest vacancy after a holder fell silent: host frozen, partition.
    pub vacancy_silent: Option<Duration>,
    /// Longest overlap after a holder fell silent.
    pub overlap_silent: Duration,
    /// Longest overlap after the server ended the holder's session: how long the job takes to stop, at most this.
    pub overlap_killed: Duration,
    /// Longest overlap after the server ended the session of a holder that is cut off from it, or frozen: it gives up
    /// at its deadline.
    pub overlap_killed_and_cut_off: Duration,
    /// Why less holds than the options promise: a sentence for each thing that the store at hand does not enforce.
    pub shortfalls: Vec<String>,
}

/// Why a set of [`Options`] is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OptionsError {
    /// A duration that has to be at least 1 ms is shorter.
    #[error("{option} must be at least 1ms, it is {}: try {option}={}", text(*value), text(*suggestion))]
    TooShort {
        /// Which option.
        option: &'static str,
        /// What it was set to.
        value: Duration,
        /// A value that would do.
        suggestion: Duration,
    },
    /// A duration is longer than [`MAX_TTL`].
    #[error("{option} must be at most {}, it is {}: try {option}=1h", text(MAX_TTL), text(*value))]
    TooLong {
        /// Which option.
        option: &'static str,
        /// What it was set to.
        value: Duration,
    },
    /// The ttl that the options add up to is longer than [`MAX_TTL`].
    #[error(
        "ttl = max(heartbeat_interval, query_timeout) + query_timeout + stop_grace + slack must be at most {}, it is {} \
         (heartbeat_interval={}, query_timeout={}, stop_grace={}): try heartbeat_interval=5s, query_timeout=10s, \
         stop_grace=5s",
        text(MAX_TTL), text(*ttl), text(*heartbeat_interval), text(*query_timeout), text(*stop_grace)
    )]
    TtlTooLong {
        /// What the options add up to.
        ttl: Duration,
        /// What it was set to.
        heartbeat_interval: Duration,
        /// What it was set to.
        query_timeout: Duration,
        /// What it was set to.
        stop_grace: Duration,
    },
    /// `max_held` is zero.
    #[error("max_held must be at least 1, it is 0: try max_held={DEFAULT_MAX_HELD}")]
    NoNames,
    /// The identity cannot be shown everywhere.
    #[error(
        "identity must be 1 to {MAX_IDENTITY_BYTES} visible ASCII characters without ',' and '/', it is {identity:?}: \
         try identity=host1:4711-a"
    )]
    Identity {
        /// What it was set to.
        identity: String,
    },
    /// There is no such option.
    #[error(
        "there is no option {option:?}: use retry_interval, heartbeat_interval, query_timeout, stop_grace, \
         takeover_delay, drain_timeout, fence_limit, max_held, trust_affinity, answer_step_down or identity"
    )]
    Unknown {
        /// What was written.
        option: String,
    },
    /// An option was named without a value.
    #[error("option {option:?} has no value: write {option}=5s")]
    NoValue {
        /// What was written.
        option: String,
    },
    /// The value of a duration cannot be read.
    #[error("{option} needs a duration with its unit, it is {value:?}: try {option}=5s")]
    Value {
        /// Which option.
        option: String,
        /// What was written.
        value: String,
    },
    /// The value of a switch cannot be read.
    #[error("{option} is either true or false, it is {value:?}: try {option}=false")]
    Switch {
        /// Which option.
        option: String,
        /// What was written.
        value: String,
    },
    /// The value of a count cannot be read.
    #[error("{option} needs a whole number, it is {value:?}: try {option}={DEFAULT_MAX_HELD}")]
    Count {
        /// Which option.
        option: String,
        /// What was written.
        value: String,
    },
}

fn text(duration: Duration) -> humantime::FormattedDuration {
    humantime::format_duration(duration)
}

/// `host:pid-suffix`, cut to what every store can show: at the front, since pods of one deployment differ at the end. The
/// suffix tells apart Lockers of one process, and processes of different containers that have the same host name and pid.
fn default_identity() -> String {
    identity_on(&host_name())
}

fn identity_on(host: &str) -> String {
    let suffix: u32 = rand::make_rng::<rand::rngs::StdRng>().random();
    let process = format!(":{}-{suffix:08x}", std::process::id());
    let host: Vec<char> =
        host.chars().map(|c| if c.is_ascii_alphanumeric() || ".-_".contains(c) { c } else { '-' }).collect();
    let too_long = host.len().saturating_sub(MAX_IDENTITY_BYTES - process.len());
    host[too_long..].iter().collect::<String>() + &process
}

#[cfg(unix)]
fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

#[cfg(not(unix))]
fn host_name() -> String {
    std::env::var("COMPUTERNAME").unwrap_or_else(|_| "host".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    type Setter = fn(Options) -> Options;

    /// What tells pods apart stands at the end of a host's name.
    #[test]
    fn a_default_identity_keeps_the_end_of_a_long_host_name() {
        let identities = ["x2x4k", "zz9qq"].map(|pod| {
            let identity = identity_on(&format!("payments-réconciler-production-eu-7d9c8b6f5d-{pod}"));
            assert_eq!(identity.len(), MAX_IDENTITY_BYTES);
            identity.split_once(':').unwrap().0.to_owned()
        });
        assert!(identities[0].ends_with("r-production-eu-7d9c8b6f5d-x2x4k"), "{identities:?}");
        assert_ne!(identities[0], identities[1]);
        assert!(identity_on("web-1").starts_with("web-1:"));
    }

    const fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    /// F-01
    #[test]
    fn the_defaults_are_the_public_constants_and_each_is_settable_on_its_own() {
        let defaults = Options::default();
        assert_eq!(defaults.retry_interval, s(5));
        assert_eq!(defaults.heartbeat_interval, s(5));
        assert_eq!(defaults.query_timeout, s(10));
        assert_eq!(defaults.stop_grace, s(5));
        assert_eq!(
            (DEFAULT_RETRY_INTERVAL, DEFAULT_HEARTBEAT_INTERVAL, DEFAULT_QUERY_TIMEOUT, DEFAULT_STOP_GRACE),
            (s(5), s(5), s(10), s(5))
        );
        let setters: [(&str, Setter); 10] = [
            ("retry_interval=7s", |o| o.retry_interval(s(7))),
            ("heartbeat_interval=7s", |o| o.heartbeat_interval(s(7))),
            ("query_timeout=7s", |o| o.query_timeout(s(7))),
            ("stop_grace=7s", |o| o.stop_grace(s(7))),
            ("takeover_delay=7s", |o| o.takeover_delay(s(7))),
            ("drain_timeout=7s", |o| o.drain_timeout(Some(s(7)))),
            ("max_held=7", |o| o.max_held(7)),
            ("trust_affinity=true", |o| o.trust_affinity(true)),
            ("answer_step_down=false", |o| o.answer_step_down(false)),
            ("identity=seven", |o| o.identity("seven")),
        ];
        for (text, set) in setters {
            let base = Options::default().identity("me");
            let changed = set(base.clone());
            let (before, after) = (base.to_string(), changed.to_string());
            let differing: Vec<_> = before.split(',').zip(after.split(',')).filter(|(a, b)| a != b).collect();
            assert_eq!(differing.len(), 1, "{text} changes one option: {differing:?}");
            assert_eq!(differing[0].1, text);
            assert_eq!(
                text.parse::<Options>().unwrap().identity("me").to_string(),
                changed.identity("me").to_string()
            );
        }
    }

    /// F-02, D11
    #[test]
    fn bad_values_are_refused_with_the_rule_and_a_value_that_would_do() {
        let valid = Options::default;
        for (options, rule, remedy) in [
            (valid().retry_interval(s(0)), "retry_interval must be at least 1ms", "retry_interval=5s"),
            (
                valid().heartbeat_interval(s(0)),
                "heartbeat_interval must be at least 1ms",
                "heartbeat_interval=5s",
            ),
            (valid().query_timeout(s(0)), "query_timeout must be at least 1ms", "query_timeout=10s"),
            (valid().drain_timeout(Some(s(0))), "drain_timeout must be at least 1ms", "drain_timeout=5s"),
            (
                valid().retry_interval(Duration::MAX),
                "retry_interval must be at most 24days",
                "retry_interval=1h",
            ),
            (
                valid().takeover_delay(Duration::MAX),
                "takeover_delay must be at most 24days",
                "takeover_delay=1h",
            ),
            (
                valid().drain_timeout(Some(Duration::MAX)),
                "drain_timeout must be at most 24days",
                "drain_timeout=1h",
            ),
            (valid().query_timeout(Duration::MAX), "ttl = max(", "query_timeout=10s"),
            (valid().heartbeat_interval(Duration::MAX), "ttl = max(", "heartbeat_interval=5s"),
            (valid().stop_grace(Duration::MAX), "ttl = max(", "stop_grace=5s"),
            (valid().query_timeout(s(11 * 86_400)).heartbeat_interval(s(13 * 86_400)), "ttl = max(", "5s"),
            (valid().max_held(0), "max_held must be at least 1", "max_held=1000"),
            (valid().identity(""), "identity must be", "identity=host1:4711-a"),
            (valid().identity("a b"), "identity must be", "identity=host1:4711-a"),
            (valid().identity("../x"), "identity must be", "identity=host1:4711-a"),
            (valid().identity("x".repeat(54)), "identity must be", "identity=host1:4711-a"),
        ] {
            let message = options.validate().expect_err(rule).to_string();
            assert!(message.contains(rule) && message.contains(remedy), "{message}");
        }
        assert_eq!(valid().validate(), Ok(()));
        assert_eq!(valid().stop_grace(s(0)).identity("x".repeat(53)).validate(), Ok(()));
    }

    /// F-02
    #[test]
    fn unreadable_text_is_refused_by_name() {
        for (text, expected) in [
            ("retry_intervall=5s", "there is no option \"retry_intervall\""),
            ("retry_interval", "option \"retry_interval\" has no value"),
            ("retry_interval=5", "retry_interval needs a duration with its unit, it is \"5\""),
            ("retry_interval=-5s", "retry_interval needs a duration"),
            ("retry_interval=0s", "retry_interval must be at least 1ms"),
            ("query_timeout=99999999999999999999s", "query_timeout needs a duration"),
            ("query_timeout=999999years", "ttl = max("),
            ("max_held=many", "max_held needs a whole number"),
            ("trust_affinity=1", "trust_affinity is either true or false"),
            ("answer_step_down=no", "answer_step_down is either true or false"),
        ] {
            let message = text.parse::<Options>().expect_err(text).to_string();
            assert!(message.contains(expected), "{text}: {message}");
        }
    }

    /// F-02
    #[test]
    fn text_reads_back_as_what_was_printed() {
        let options = Options::default()
            .retry_interval(Duration::from_millis(1500))
            .drain_timeout(Some(s(90)))
            .takeover_delay(s(3600))
            .max_held(3);
        assert_eq!(options.to_string().parse::<Options>().unwrap(), options);
        assert_eq!("".parse::<Options>().unwrap().identity("x"), Options::default().identity("x"));
    }

    /// D11: the holder's own timing stays below the server-side release that the options configure.
    #[test]
    fn a_holder_has_stopped_before_the_store_frees_its_lease() {
        for (heartbeat, query, grace) in [(1, 1, 0), (5, 10, 5), (60, 1, 30), (1, 60, 3600), (100_000, 7, 1)]
        {
            let options = Options::default()
                .heartbeat_interval(Duration::from_millis(heartbeat))
                .query_timeout(Duration::from_millis(query))
                .stop_grace(Duration::from_millis(grace));
            let bounds = options.bounds();
            assert!(
                bounds.trust + options.stop_grace + Duration::from_millis(250) <= bounds.ttl,
                "{bounds:?}"
            );
        }
    }

    #[test]
    fn identities_of_two_lockers_differ_and_are_valid() {
        let (one, two) = (Options::default(), Options::default());
        assert_ne!(one.identity, two.identity);
        assert!(one.identity.contains(&format!(":{}-", std::process::id())), "{}", one.identity);
        assert_eq!(one.validate(), Ok(()));
    }
}
