//! What the jobs' bodies report, in order.

use std::fmt;
use std::sync::{Arc, Mutex};

use tokio::time::Instant;

use super::{eventually, now};

/// A log that every job of a test writes to. A clone is the same log.
#[derive(Clone, Default)]
pub(crate) struct Log {
    lines: Arc<Mutex<Vec<(String, Instant)>>>,
}

/// A job's body: `<who> start` when it is made, `<who> end` when it is dropped, however it ends.
pub(crate) struct Body {
    log: Log,
    who: String,
}

impl Log {
    pub(crate) fn write(&self, line: &str) {
        self.lines.lock().unwrap().push((line.to_owned(), now()));
    }

    pub(crate) fn body(&self, who: &str) -> Body {
        self.write(&format!("{who} start"));
        Body { log: self.clone(), who: who.to_owned() }
    }

    pub(crate) fn lines(&self) -> Vec<String> {
        self.lines.lock().unwrap().iter().map(|(line, _)| line.clone()).collect()
    }

    pub(crate) fn count(&self, line: &str) -> usize {
        self.lines().iter().filter(|it| *it == line).count()
    }

    /// When a line was written for the nth time, counted from 1.
    pub(crate) fn nth(&self, line: &str, n: usize) -> Instant {
        let lines = self.lines.lock().unwrap();
        lines.iter().filter(|(it, _)| it == line).nth(n - 1).expect("the line is there").1
    }

    /// Waits until a line has been written that many times.
    pub(crate) async fn wait_for(&self, line: &str, times: usize) {
        let what = format!("{line:?} {times} times in the log");
        eventually(&what, || self.lines(), |lines| lines.iter().filter(|it| *it == line).count() >= times)
            .await;
    }

    /// As the next, of names that are led beside each other: the log knows each by a name of its own.
    #[track_caller]
    #[cfg_attr(not(feature = "postgres"), expect(dead_code, reason = "for several names on one server"))]
    pub(crate) fn assert_one_at_a_time_of_each(&self) -> usize {
        let mut leading = std::collections::BTreeSet::new();
        let mut terms = 0;
        for line in self.lines() {
            let (who, what) = line.rsplit_once(' ').unwrap();
            match what {
                "start" => {
                    assert!(leading.insert(who.to_owned()), "{line:?} while it leads");
                    terms += 1;
                }
                _ => assert!(leading.remove(who), "{line:?} while it does not lead"),
            }
        }
        assert!(leading.is_empty(), "still lead at the end: {leading:?}");
        terms
    }

    /// Asserts that no body started before the previous one had ended, and that all have ended. Gives how many.
    #[track_caller]
    pub(crate) fn assert_one_at_a_time(&self) -> usize {
        assert_one_at_a_time(self.lines().iter().map(String::as_str))
    }
}

/// As [`Log::assert_one_at_a_time`], of lines of which others than `start` and `end` are no matter.
#[track_caller]
pub(crate) fn assert_one_at_a_time<'a>(lines: impl Iterator<Item = &'a str>) -> usize {
    let mut leader = None;
    let mut terms = 0;
    for (number, line) in lines.enumerate() {
        let mut words = line.split(' ');
        let (who, what) = (words.next().unwrap(), words.next().unwrap());
        match what {
            "start" => {
                assert_eq!(leader, None, "line {number}: {line:?} while another one leads");
                leader = Some(who.to_owned());
                terms += 1;
            }
            "end" => assert_eq!(leader.take().as_deref(), Some(who), "line {number}: {line:?}"),
            _ => {}
        }
    }
    assert_eq!(leader, None, "still leads at the end");
    terms
}

impl fmt::Debug for Log {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lines().fmt(f)
    }
}

impl Drop for Body {
    fn drop(&mut self) {
        self.log.write(&format!("{} end", self.who));
    }
}
