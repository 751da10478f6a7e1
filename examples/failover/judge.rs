//! Judges a log: were there ever two leaders, and was there ever none for too long?

use std::collections::BTreeSet;
use std::fmt;
use std::time::Duration;

use crate::log::{Event, Line};

/// How long there may be no leader.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// After a leader has ended its job.
    pub(crate) released: Duration,
    /// After a leader has fallen silent, and before the first one.
    pub(crate) crashed: Duration,
}

/// What was found wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// A body went on after a later one had started.
    TwoLeaders { earlier: String, later: String },
    /// A body wrote before its start, after its end, or started twice.
    Disorder { replica: String, line: String },
    /// Nobody led for too long although somebody stood ready.
    NoLeader { vacancy: Duration, limit: Duration },
    /// The log does not show what it should: without a takeover it says nothing about takeovers.
    NoTakeover { after: &'static str },
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TwoLeaders { earlier, later } => {
                write!(f, "two leaders: the job of {earlier} went on after that of {later} had started")
            }
            Self::Disorder { replica, line } => write!(f, "out of order: {replica} wrote {line:?}"),
            Self::NoLeader { vacancy, limit } => write!(
                f,
                "no leader for {:.1} s, the bound is {:.1} s",
                vacancy.as_secs_f64(),
                limit.as_secs_f64()
            ),
            Self::NoTakeover { after } => write!(f, "nobody took over after a {after}: nothing was shown"),
        }
    }
}

/// What the log shows.
#[derive(Debug, Default)]
pub(crate) struct Verdict {
    /// Everything that is wrong.
    pub(crate) faults: Vec<Fault>,
    /// Vacancies that ended in a new leader, after a release.
    pub(crate) released: Vec<Duration>,
    /// Vacancies that ended in a new leader, after a crash.
    pub(crate) crashed: Vec<Duration>,
    /// Lines that bodies of jobs wrote.
    pub(crate) body_lines: usize,
}

/// Judges the lines in the order of the file, which is the order in which things happened.
///
/// A run is ended by its `end`, or, where it was killed, by the `start` of another: from then on it must be silent.
/// Time without a leader counts from the last line of the last body while anybody stands ready to lead; so a leader
/// that stands still counts as none.
pub(crate) fn judge(lines: &[Line], limits: Limits) -> Verdict {
    let mut verdict = Verdict::default();
    let mut started: Vec<(&str, u64)> = Vec::new();
    let mut leading: Option<(&str, u64)> = None;
    let mut ready = BTreeSet::new();
    let mut vacant_since: Option<Duration> = None;
    let mut limit = limits.crashed;
    let mut worst: Option<(Duration, Duration)> = None;

    for line in lines {
        let vacancy = vacant_since.map_or(Duration::ZERO, |since| line.at.saturating_sub(since));
        if vacancy > limit && worst.is_none_or(|(known, _)| vacancy > known) {
            worst = Some((vacancy, limit));
        }
        if line.is_body() {
            verdict.body_lines += 1;
            let run = line.run();
            if line.event == Event::Start {
                if let Some((predecessor, _)) = started.last() {
                    let takeovers =
                        if leading.is_some() { &mut verdict.crashed } else { &mut verdict.released };
                    takeovers.push(vacancy);
                    if leading.is_some() {
                        ready.remove(predecessor);
                    }
                }
                if started.contains(&run) {
                    verdict.disorder(line);
                }
                started.push(run);
                leading = Some(run);
            } else if leading != Some(run) {
                match started.last() {
                    Some(later) if *later != run && started.contains(&run) => {
                        verdict.two_leaders(run, *later);
                    }
                    _ => verdict.disorder(line),
                }
            }
            vacant_since = Some(line.at);
            limit = limits.crashed;
            if line.event == Event::End && leading == Some(run) {
                leading = None;
                limit = limits.released;
            }
        } else if line.event == Event::Ready {
            ready.insert(line.replica.as_str());
            vacant_since.get_or_insert(line.at);
        } else {
            ready.remove(line.replica.as_str());
            if ready.is_empty() {
                vacant_since = None;
            }
        }
    }

    verdict.faults.extend(worst.map(|(vacancy, limit)| Fault::NoLeader { vacancy, limit }));
    for (takeovers, after) in [(&verdict.released, "release"), (&verdict.crashed, "crash")] {
        if takeovers.is_empty() {
            verdict.faults.push(Fault::NoTakeover { after });
        }
    }
    verdict
}

impl Verdict {
    fn two_leaders(&mut self, earlier: (&str, u64), later: (&str, u64)) {
        let fault = Fault::TwoLeaders { earlier: earlier.0.to_owned(), later: later.0.to_owned() };
        if !self.faults.contains(&fault) {
            self.faults.push(fault);
        }
    }

    fn disorder(&mut self, line: &Line) {
        self.faults.push(Fault::Disorder { replica: line.replica.clone(), line: line.to_string() });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits =
        Limits { released: Duration::from_millis(50), crashed: Duration::from_millis(400) };

    /// Reads lines whose times are milliseconds, and judges them.
    fn verdict(text: &str) -> Verdict {
        let lines: Vec<Line> = text
            .lines()
            .map(str::trim)
            .filter(|line| !line.is_empty())
            .map(|line| {
                let (at, rest) = line.split_once(' ').unwrap();
                format!("{at}000 {rest}").parse().unwrap()
            })
            .collect();
        judge(&lines, LIMITS)
    }

    fn ms(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    #[test]
    fn a_release_and_a_crash_with_a_takeover_each_are_fine() {
        let verdict = verdict(
            "0 a 0 ready
             1 a 7 start
             2 b 0 ready
             2 c 0 ready
             10 a 7 tick
             20 a 7 end
             23 b 8 start
             24 a 0 gone
             30 b 8 tick
             330 c 9 start
             340 c 9 tick
             350 c 9 end
             351 c 0 gone",
        );
        assert_eq!(verdict.faults, []);
        assert_eq!((verdict.released, verdict.crashed), (vec![ms(3)], vec![ms(300)]));
        assert_eq!(verdict.body_lines, 8);
    }

    #[test]
    fn one_line_of_an_earlier_run_after_a_later_start_is_two_leaders() {
        let two_leaders = [Fault::TwoLeaders { earlier: "a".into(), later: "b".into() }];
        let prefix = "0 a 0 ready
                      0 b 0 ready
                      0 c 0 ready
                      1 a 1 start
                      10 b 1 start\n";
        let suffix = "\n20 b 1 end
                      21 c 1 start";
        // The file's order counts, not the times: a line that claims to be older is as bad.
        for line in ["11 a 1 tick", "11 a 1 end", "9 a 1 tick"] {
            assert_eq!(verdict(&format!("{prefix}{line}{suffix}")).faults, two_leaders, "{line}");
        }
        // Reported once, however often it happens.
        assert_eq!(verdict(&format!("{prefix}11 a 1 tick\n12 a 1 tick{suffix}")).faults, two_leaders);
    }

    #[test]
    fn terms_of_one_replica_are_told_apart() {
        let verdict = verdict(
            "0 a 0 ready
             1 a 1 start
             2 a 2 start
             3 a 1 tick
             4 a 2 end
             5 a 3 start",
        );
        assert_eq!(verdict.faults, [Fault::TwoLeaders { earlier: "a".into(), later: "a".into() }]);
    }

    #[test]
    fn nobody_for_longer_than_the_bound_is_found_after_a_release() {
        let verdict = verdict(
            "0 a 0 ready
             0 b 0 ready
             0 c 0 ready
             1 a 1 start
             2 a 1 end
             53 b 1 start
             54 c 1 start",
        );
        assert_eq!(verdict.faults, [Fault::NoLeader { vacancy: ms(51), limit: ms(50) }]);
    }

    #[test]
    fn nobody_for_longer_than_the_bound_is_found_after_a_crash_and_at_the_start() {
        let rest = "500 a 1 end
                    501 b 1 start
                    902 c 1 start";
        let ready = "0 a 0 ready\n0 b 0 ready\n0 c 0 ready\n";
        let late = [Fault::NoLeader { vacancy: ms(401), limit: ms(400) }];
        assert_eq!(verdict(&format!("{ready}300 a 1 start\n{rest}")).faults, late);
        let rest = rest.replace("902", "600");
        assert_eq!(verdict(&format!("{ready}401 a 1 start\n{rest}")).faults, late);
    }

    #[test]
    fn nobody_for_longer_than_the_bound_is_found_when_nobody_ever_takes_over() {
        let verdict = verdict(
            "0 a 0 ready
             0 b 0 ready
             1 a 1 start
             2 a 1 end
             3 a 0 gone
             500 b 0 gone",
        );
        assert!(verdict.faults.contains(&Fault::NoLeader { vacancy: ms(498), limit: ms(50) }));
    }

    #[test]
    fn time_in_which_nobody_stands_ready_is_not_counted() {
        let verdict = verdict(
            "0 a 0 ready
             1 a 1 start
             2 a 1 end
             3 a 0 gone
             5000 b 0 ready
             5000 c 0 ready
             5001 b 1 start
             5002 c 1 start",
        );
        assert_eq!(verdict.faults, []);
    }

    #[test]
    fn a_log_without_takeovers_proves_nothing() {
        let none = [Fault::NoTakeover { after: "release" }, Fault::NoTakeover { after: "crash" }];
        assert_eq!(verdict("").faults, none);
        assert_eq!(verdict("0 a 0 ready\n1 a 1 start\n2 a 1 tick\n3 a 1 end\n4 a 0 gone").faults, none);
        let released = "0 a 0 ready\n0 b 0 ready\n1 a 1 start\n2 a 1 end\n3 b 1 start\n4 b 1 end";
        assert_eq!(verdict(released).faults, none[1..]);
    }

    #[test]
    fn bodies_have_one_start_before_and_nothing_after_their_end() {
        for log in ["1 a 1 tick", "1 a 1 start\n2 a 1 end\n3 a 1 tick", "1 a 1 start\n2 a 1 end\n3 a 1 start"]
        {
            let faults = verdict(log).faults;
            assert!(faults.iter().any(|fault| matches!(fault, Fault::Disorder { .. })), "{log}: {faults:?}");
        }
    }

    #[test]
    fn lines_read_back_as_what_was_written_and_garbage_is_refused() {
        for text in ["12 a 3 start", "0 b 0 ready"] {
            assert_eq!(text.parse::<Line>().unwrap().to_string(), text);
        }
        for garbage in ["", "12 a 3", "x a 3 tick", "12 a x tick", "12 a 3 tock", "12 a 3 tick 13 b 4 tick"] {
            assert!(garbage.parse::<Line>().is_err(), "{garbage:?}");
        }
    }
}
