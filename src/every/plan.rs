//! Which slot is to be served, and when: all that there is to decide, without any waiting. What goes in is what the store
//! shows, its clock included; no other clock is looked at.

use std::time::Duration;

use super::{Crashed, Missed, Spacing};
use crate::error::ScheduleError;
use crate::name::Key;
use crate::store::slots::{Moment, Phase, Record, micros};

/// Shorter ones are for a job of [`run`](crate::Locker::run), which need not ask the store each time.
pub(crate) const MIN_INTERVAL: Duration = Duration::from_secs(1);

/// Longer ones are a mistake of units.
pub(crate) const MAX_INTERVAL: Duration = Duration::from_hours(24 * 366);

/// What was asked for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Schedule {
    pub(super) interval: Duration,
    pub(super) offset: Duration,
    pub(super) jitter: Duration,
    pub(super) spacing: Spacing,
    pub(super) missed: Missed,
    pub(super) crashed: Crashed,
}

/// A schedule that can be used, of one name. Times are in microseconds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    interval: u64,
    offset: u64,
    jitter: u64,
    spacing: Spacing,
    missed: Missed,
    crashed: Crashed,
    /// Of the name: what its jitter comes from.
    seed: u64,
}

/// What to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Nothing before that.
    Rest { until: Moment },
    /// This one, by whoever gets the lock: who does not is told by that that somebody runs.
    Serve(Due),
}

/// A run that is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Due {
    pub(super) number: u64,
    /// When the slot began.
    pub(super) at: Moment,
    /// Which attempt, counted from 1.
    pub(super) run: u32,
}

impl Schedule {
    pub(super) fn plan(&self, key: Key) -> Result<Plan, ScheduleError> {
        let Self { interval, offset, jitter, spacing, missed, crashed } = *self;
        if !(MIN_INTERVAL..=MAX_INTERVAL).contains(&interval) {
            return Err(ScheduleError::Interval { interval });
        }
        if offset >= interval {
            return Err(ScheduleError::Offset { offset, interval });
        }
        if jitter >= interval {
            return Err(ScheduleError::Jitter { jitter, interval });
        }
        if spacing == Spacing::AfterFinish && !offset.is_zero() {
            return Err(ScheduleError::OffsetWithoutGrid);
        }
        let (interval, offset, jitter) = (micros(interval), micros(offset), micros(jitter));
        let seed = key.get().cast_unsigned();
        Ok(Plan { interval, offset, jitter, spacing, missed, crashed, seed })
    }
}

impl Plan {
    /// What is to be done where the store shows this. A record that says that a run has started is in progress, or crashed:
    /// who holds the lock knows that it crashed, and to all others the answer is the same, to try for the lock.
    pub(super) fn next(&self, now: Moment, record: Option<&Record>) -> Next {
        if let Some(Record { entry, .. }) = record
            && entry.phase == Phase::Started
            && entry.run == 1
            && self.crashed == Crashed::RetryOnce
        {
            return Next::Serve(Due { number: entry.number, at: entry.at, run: 2 });
        }
        match self.spacing {
            Spacing::Grid => self.next_on_grid(now, record),
            Spacing::AfterFinish => self.next_after_finish(now, record),
        }
    }

    /// Slots are told from each other by when they began, not by their numbers: those are of the interval, and a
    /// deployment can change that. Whatever the clock does, a slot that does not begin after the last one is not served.
    fn next_on_grid(&self, now: Moment, record: Option<&Record>) -> Next {
        let number = self.current(now);
        let at = self.begin(number);
        let serve = Next::Serve(Due { number, at, run: 1 });
        let Some(record) = record else { return serve };
        if at <= record.entry.at {
            let next = number.max(self.at_or_before(record.entry.at)).saturating_add(1);
            return Next::Rest { until: self.due(next) };
        }
        if self.is_overlapped(number, record) {
            return Next::Rest { until: self.due(number.saturating_add(1)) };
        }
        serve
    }

    /// One interval after the last run has finished, or was started where it crashed.
    fn next_after_finish(&self, now: Moment, record: Option<&Record>) -> Next {
        let Some(Record { entry, written }) = record else {
            return Next::Serve(Due { number: 1, at: now, run: 1 });
        };
        let number = entry.number.saturating_add(1);
        let at = Moment(written.0.saturating_add(self.interval).saturating_add(self.delay(number)));
        if now >= at { Next::Serve(Due { number, at, run: 1 }) } else { Next::Rest { until: at } }
    }

    /// A slot that came while the run before was in progress.
    fn is_overlapped(&self, number: u64, record: &Record) -> bool {
        self.missed == Missed::Skip
            && record.entry.phase == Phase::Finished
            && self.due(number) < record.written
    }

    /// Whether the present slot is skipped for that.
    pub(super) fn skips_present(&self, now: Moment, record: &Record) -> bool {
        let number = self.current(now);
        self.spacing == Spacing::Grid
            && self.begin(number) > record.entry.at
            && self.is_overlapped(number, record)
    }

    /// How many slots came while the run was in progress that has just finished, and will not be served for that.
    pub(super) fn overlapped(&self, finished: &Record) -> u64 {
        if self.spacing != Spacing::Grid || self.missed != Missed::Skip {
            return 0;
        }
        // One that came at that very instant is served.
        let last = self.current(Moment(finished.written.0.saturating_sub(1)));
        last.saturating_sub(self.at_or_before(finished.entry.at))
    }

    /// How many slots were served by nobody between what is recorded and what is served now, but for those that were
    /// [`overlapped`](Self::overlapped).
    pub(super) fn missed(&self, record: &Record, due: &Due) -> u64 {
        if self.spacing != Spacing::Grid || due.run > 1 {
            return 0;
        }
        let told = match record.entry.phase {
            Phase::Finished => self.overlapped(record),
            Phase::Started => 0,
        };
        due.number.saturating_sub(self.at_or_before(record.entry.at)).saturating_sub(1).saturating_sub(told)
    }

    /// The latest slot whose time has come.
    fn current(&self, now: Moment) -> u64 {
        let number = self.at_or_before(now);
        if self.due(number) > now { number.saturating_sub(1) } else { number }
    }

    fn at_or_before(&self, moment: Moment) -> u64 {
        moment.0.saturating_sub(self.offset) / self.interval
    }

    fn begin(&self, number: u64) -> Moment {
        Moment(number.saturating_mul(self.interval).saturating_add(self.offset))
    }

    /// When the time of a slot has come. These grow with the number, since the jitter is shorter than the interval.
    fn due(&self, number: u64) -> Moment {
        Moment(self.begin(number).0.saturating_add(self.delay(number)))
    }

    /// What a slot is put off by: of its number and the name alone, so that all replicas agree, of whatever version.
    fn delay(&self, number: u64) -> u64 {
        if self.jitter == 0 { 0 } else { splitmix64(self.seed ^ splitmix64(number)) % self.jitter }
    }
}

/// Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
const fn splitmix64(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::name::Kind;
    use crate::store::slots::Entry;

    const SECOND: u64 = 1_000_000;

    fn schedule() -> Schedule {
        Schedule {
            interval: Duration::from_secs(10),
            offset: Duration::ZERO,
            jitter: Duration::ZERO,
            spacing: Spacing::Grid,
            missed: Missed::Skip,
            crashed: Crashed::AtMostOnce,
        }
    }

    fn plan(schedule: Schedule) -> Plan {
        schedule.plan(Key::of(Kind::Lock, "job")).unwrap()
    }

    /// Seconds.
    const fn at(seconds: u64) -> Moment {
        Moment(seconds * SECOND)
    }

    fn record(number: u64, began: u64, phase: Phase, written: u64) -> Record {
        let entry = Entry { number, at: at(began), run: 1, phase, by: "a".to_owned() };
        Record { entry, written: at(written) }
    }

    fn serve(number: u64, began: u64) -> Next {
        Next::Serve(Due { number, at: at(began), run: 1 })
    }

    const fn rest(until: u64) -> Next {
        Next::Rest { until: at(until) }
    }

    /// E-01, E-04, E-06: the present slot unless it is served; its number is that of the clock, not of who asks when.
    #[test]
    fn the_present_slot_is_served_once_and_older_ones_never() {
        let plan = plan(schedule());
        assert_eq!(plan.next(at(25), None), serve(2, 20));
        assert_eq!(plan.next(at(20), None), serve(2, 20));
        for phase in [Phase::Started, Phase::Finished] {
            assert_eq!(plan.next(at(25), Some(&record(2, 20, phase, 21))), rest(30));
            assert_eq!(plan.next(at(30), Some(&record(2, 20, phase, 21))), serve(3, 30));
        }
        let old = record(2, 20, Phase::Finished, 21);
        assert_eq!(plan.next(at(99), Some(&old)), serve(9, 90));
        assert_eq!(plan.missed(&old, &Due { number: 9, at: at(90), run: 1 }), 6);
        assert_eq!(plan.missed(&old, &Due { number: 3, at: at(30), run: 1 }), 0);
    }

    /// E-04: whatever the store's clock does, no slot is served twice; and another interval is another grid.
    #[test]
    fn a_slot_that_does_not_begin_after_the_last_one_is_not_served() {
        let plan = plan(schedule());
        let ahead = record(7, 70, Phase::Finished, 71);
        for now in [0, 30, 69, 70, 79] {
            assert_eq!(plan.next(at(now), Some(&ahead)), rest(80), "{now}");
        }
        assert_eq!(plan.next(at(80), Some(&ahead)), serve(8, 80));
        // Its number is of an interval of one second: larger than any here for a long time.
        let other = record(71, 71, Phase::Finished, 72);
        assert_eq!(plan.next(at(79), Some(&other)), rest(80));
        assert_eq!(plan.next(at(80), Some(&other)), serve(8, 80));
        assert_eq!(plan.missed(&other, &Due { number: 8, at: at(80), run: 1 }), 0);
    }

    /// E-02, D36: what came while a run was in progress is skipped, and told, or the latest of it is run, once.
    #[test]
    fn slots_that_a_run_overlaps_are_skipped_or_the_latest_is_run() {
        let skips = plan(schedule());
        let runs = plan(Schedule { missed: Missed::RunLatest, ..schedule() });
        let long = record(2, 20, Phase::Finished, 45);
        assert_eq!((skips.next(at(45), Some(&long)), skips.overlapped(&long)), (rest(50), 2));
        assert_eq!((runs.next(at(45), Some(&long)), runs.overlapped(&long)), (serve(4, 40), 0));
        assert_eq!(runs.missed(&long, &Due { number: 4, at: at(40), run: 1 }), 1);
        assert_eq!(skips.next(at(50), Some(&long)), serve(5, 50));
        assert_eq!(skips.missed(&long, &Due { number: 5, at: at(50), run: 1 }), 0);
        assert_eq!(skips.missed(&long, &Due { number: 8, at: at(80), run: 1 }), 3);
        // It had finished when that one came.
        let exact = record(2, 20, Phase::Finished, 30);
        assert_eq!((skips.next(at(30), Some(&exact)), skips.overlapped(&exact)), (serve(3, 30), 0));
        assert_eq!(skips.overlapped(&record(2, 20, Phase::Finished, 29)), 0);
    }

    /// E-03: a run that has started, and whose lock is to be had, has crashed.
    #[test]
    fn a_crashed_run_is_not_repeated_or_is_once() {
        let never = plan(schedule());
        let once = plan(Schedule { crashed: Crashed::RetryOnce, ..schedule() });
        let crashed = record(2, 20, Phase::Started, 20);
        assert_eq!(never.next(at(25), Some(&crashed)), rest(30));
        assert_eq!(never.next(at(31), Some(&crashed)), serve(3, 30));
        let again = Due { number: 2, at: at(20), run: 2 };
        for now in [25, 31, 99] {
            assert_eq!(once.next(at(now), Some(&crashed)), Next::Serve(again), "{now}");
        }
        let mut twice = crashed;
        twice.entry.run = 2;
        assert_eq!(once.next(at(25), Some(&twice)), rest(30));
        assert_eq!(once.next(at(31), Some(&twice)), serve(3, 30));
        assert_eq!(once.missed(&twice, &again), 0);
    }

    /// E-06: one interval after the finish; after a crash, after the start.
    #[test]
    fn after_a_finish_the_next_one_comes_an_interval_later() {
        for crashed in [Crashed::AtMostOnce, Crashed::RetryOnce] {
            let plan = plan(Schedule { spacing: Spacing::AfterFinish, crashed, ..schedule() });
            assert_eq!(plan.next(at(23), None), serve(1, 23));
            let finished = record(1, 23, Phase::Finished, 48);
            assert_eq!(plan.next(at(57), Some(&finished)), rest(58));
            assert_eq!(plan.next(at(58), Some(&finished)), serve(2, 58));
            assert_eq!(plan.next(at(90), Some(&finished)), serve(2, 58));
            let started = record(1, 23, Phase::Started, 23);
            let next = plan.next(at(25), Some(&started));
            match crashed {
                Crashed::AtMostOnce => assert_eq!(next, rest(33)),
                Crashed::RetryOnce => assert_eq!(next, Next::Serve(Due { number: 1, at: at(23), run: 2 })),
            }
        }
    }

    #[test]
    fn an_offset_moves_the_grid() {
        let plan = plan(Schedule { offset: Duration::from_secs(3), ..schedule() });
        assert_eq!(plan.next(at(22), None), serve(1, 13));
        assert_eq!(plan.next(at(23), None), serve(2, 23));
        assert_eq!(plan.next(at(23), Some(&record(2, 23, Phase::Finished, 23))), rest(33));
    }

    /// E-01: all replicas agree, and so do versions: the delays are pinned.
    #[test]
    fn jitter_puts_a_slot_off_by_what_its_number_says() {
        let jittered = plan(Schedule { jitter: Duration::from_secs(9), ..schedule() });
        let delays: Vec<u64> = (0..4).map(|number| jittered.delay(number)).collect();
        assert_eq!(delays, PINNED);
        let other = Schedule { jitter: Duration::from_secs(9), ..schedule() };
        let other = other.plan(Key::of(Kind::Lock, "other")).unwrap();
        assert_ne!((0..4).map(|number| other.delay(number)).collect::<Vec<_>>(), delays);
        for number in 1..10_000 {
            let (before, due) = (jittered.due(number - 1), jittered.due(number));
            assert!(before < due && due < Moment(jittered.begin(number).0 + 9 * SECOND));
            assert_eq!(jittered.next(due, None), serve(number, number * 10));
            assert_eq!(jittered.next(Moment(due.0 - 1), None), serve(number - 1, number * 10 - 10));
            let last = record(number - 1, number * 10 - 10, Phase::Started, number * 10 - 1);
            assert_eq!(jittered.next(Moment(due.0 - 1), Some(&last)), Next::Rest { until: due });
        }
    }

    const PINNED: [u64; 4] = [2_770_740, 4_454_772, 699_267, 923_031];

    /// E-06, D36
    #[test]
    fn schedules_that_cannot_be_kept_are_refused() {
        let key = Key::of(Kind::Lock, "job");
        let ms = Duration::from_millis;
        let interval = |interval| Schedule { interval, ..schedule() }.plan(key).map(drop);
        for wrong in [Duration::ZERO, ms(999), MAX_INTERVAL + ms(1), Duration::MAX] {
            assert_eq!(interval(wrong), Err(ScheduleError::Interval { interval: wrong }));
        }
        assert_eq!((interval(MIN_INTERVAL), interval(MAX_INTERVAL)), (Ok(()), Ok(())));
        let ten = ms(10_000);
        let offset = |offset| Schedule { offset, ..schedule() }.plan(key).map(drop);
        assert_eq!(offset(ten), Err(ScheduleError::Offset { offset: ten, interval: ten }));
        assert_eq!(offset(ms(9_999)), Ok(()));
        let jitter = |jitter| Schedule { jitter, ..schedule() }.plan(key).map(drop);
        assert_eq!(jitter(ten), Err(ScheduleError::Jitter { jitter: ten, interval: ten }));
        assert_eq!(jitter(ms(9_999)), Ok(()));
        let gridless = Schedule { offset: ms(1), spacing: Spacing::AfterFinish, ..schedule() };
        assert_eq!(gridless.plan(key).map(drop), Err(ScheduleError::OffsetWithoutGrid));
        let text = interval(ms(5)).unwrap_err().to_string();
        assert!(text.contains("at least 1s") && text.contains("it is 5ms"), "{text}");
    }
}
