//! What goes wrong, and what must be reached then.

use std::time::Duration;

use leasehold::{Bounds, Options};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scenario {
    GracefulStop,
    StepDown,
    /// With a retry interval in which nobody would poll: only a push can be this quick.
    GracefulStopUnpolled,
    Kill,
    BackendTerminated,
    ServerRestarted,
    ReplicaPromoted,
    Frozen,
    CutIdle,
    CutInFlight,
    CutInStatement,
    SlowServer,
    BackendStopped,
    RuntimeBlocked,
}

/// What kind of promise is kept or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Class {
    /// Released in order; counted from the end of the old body.
    Handover,
    /// The server knows at once that the holder is gone, or the holder that the server is.
    Crash,
    /// The holder fell silent.
    Silent,
    /// Nothing that matters.
    Nothing,
}

impl Scenario {
    pub(crate) const ALL: [Self; 14] = [
        Self::GracefulStop,
        Self::StepDown,
        Self::GracefulStopUnpolled,
        Self::Kill,
        Self::BackendTerminated,
        Self::ServerRestarted,
        Self::ReplicaPromoted,
        Self::Frozen,
        Self::CutIdle,
        Self::CutInFlight,
        Self::CutInStatement,
        Self::SlowServer,
        Self::BackendStopped,
        Self::RuntimeBlocked,
    ];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::GracefulStop => "graceful stop",
            Self::StepDown => "step down",
            Self::GracefulStopUnpolled => "graceful stop, retry interval 1 h",
            Self::Kill => "kill -9",
            Self::BackendTerminated => "backend terminated",
            Self::ServerRestarted => "server restarted",
            Self::ReplicaPromoted => "replica promoted",
            Self::Frozen => "holder frozen",
            Self::CutIdle => "silent partition, idle",
            Self::CutInFlight => "silent partition, statement in flight",
            Self::CutInStatement => "half a statement delivered",
            Self::SlowServer => "server slow by query timeout + 1 s",
            Self::BackendStopped => "backend stopped 2 s, default options",
            Self::RuntimeBlocked => "caller's runtime blocked",
        }
    }

    pub(crate) const fn class(self) -> Class {
        match self {
            Self::GracefulStop | Self::StepDown | Self::GracefulStopUnpolled => Class::Handover,
            Self::Kill | Self::BackendTerminated | Self::ServerRestarted | Self::ReplicaPromoted => {
                Class::Crash
            }
            Self::Frozen | Self::CutIdle | Self::CutInFlight | Self::CutInStatement | Self::SlowServer => {
                Class::Silent
            }
            Self::BackendStopped | Self::RuntimeBlocked => Class::Nothing,
        }
    }

    /// A naive holder keeps its lock here, and its job goes on.
    pub(crate) const fn is_harmless_to_the_naive(self) -> bool {
        matches!(self, Self::SlowServer | Self::BackendStopped | Self::RuntimeBlocked)
    }

    /// The options of a replica, from those of the run.
    pub(crate) fn options(self, of_the_run: &Options) -> Options {
        let options = of_the_run.clone();
        match self {
            Self::GracefulStopUnpolled => options.retry_interval(Duration::from_hours(1)),
            Self::BackendStopped => Options::default(),
            _ => options,
        }
    }

    /// How long a body does not run because of the fault itself, or the server is away. Longer than the ttl where that
    /// is what it is about.
    pub(crate) fn lasts(self, bounds: &Bounds) -> Duration {
        match self {
            Self::BackendStopped => Duration::from_secs(2),
            Self::RuntimeBlocked => Duration::from_secs(10).max(bounds.ttl + Duration::from_secs(2)),
            _ => Duration::ZERO,
        }
    }

    /// Longest vacancy that the options promise, not counting for how long no server could have been asked.
    pub(crate) const fn bound(self, bounds: &Bounds) -> Option<Duration> {
        match self.class() {
            Class::Handover => Some(bounds.vacancy_released),
            Class::Crash => bounds.vacancy_crashed,
            Class::Silent => bounds.vacancy_silent,
            Class::Nothing => None,
        }
    }

    /// Longest overlap that the options promise.
    pub(crate) const fn overlap_bound(self, bounds: &Bounds) -> Duration {
        match self {
            Self::BackendTerminated | Self::ServerRestarted | Self::ReplicaPromoted => bounds.overlap_killed,
            _ => bounds.overlap_silent,
        }
    }

    pub(crate) fn goal(self, bounds: &Bounds) -> Goal {
        let ms = Duration::from_millis;
        let (median, worst, overlap) = match self.class() {
            Class::Handover => (Some(ms(10)), Some(ms(100)), ms(0)),
            // The jobs here stop at once.
            Class::Crash if self == Self::Kill => {
                (None, bounds.vacancy_crashed.map(|it| it + ms(100)), ms(0))
            }
            Class::Crash => (None, bounds.vacancy_crashed.map(|it| it + ms(100)), ms(50)),
            Class::Silent => (None, bounds.vacancy_silent.map(|it| it + ms(1000)), ms(0)),
            Class::Nothing => (None, None, ms(0)),
        };
        Goal { median, worst, overlap }
    }
}

/// What must be reached. Without a worst vacancy: no change of leader.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Goal {
    pub(crate) median: Option<Duration>,
    pub(crate) worst: Option<Duration>,
    pub(crate) overlap: Duration,
}

impl Goal {
    /// Where it is not zero, that much longer.
    pub(crate) fn with(self, allowance: Duration) -> Self {
        let longer = |limit: Duration| limit + allowance;
        Self {
            median: self.median.map(longer),
            worst: self.worst.map(longer),
            overlap: if self.overlap.is_zero() { self.overlap } else { longer(self.overlap) },
        }
    }
}
