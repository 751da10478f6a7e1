//! Shows on the terminal what happens, while it happens.

use std::io::{IsTerminal as _, Write as _};
use std::time::Duration;

use crate::log::{Event, Line, now};

/// Columns of the picture at the end.
const WIDTH: u32 = 64;

/// Prints one line for each thing that happens.
#[derive(Debug)]
pub(crate) struct Timeline {
    began: Duration,
    colours: bool,
    /// The last line that the body of a job wrote.
    latest: Option<Line>,
}

impl Timeline {
    pub(crate) fn new() -> Self {
        let refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        Self { began: now(), colours: std::io::stdout().is_terminal() && !refused, latest: None }
    }

    /// Shows a line of the log, if a reader wants to know.
    pub(crate) fn log(&mut self, line: &Line) {
        match line.event {
            Event::Ready => self.show(line.at, &line.replica, "stands by", ""),
            Event::Start => {
                let remark = self.latest.as_ref().map_or_else(String::new, |last| {
                    let after = line.at.saturating_sub(last.at).as_secs_f64() * 1e3;
                    format!("{after:.1} ms after {}'s last line", last.replica)
                });
                self.show(line.at, &line.replica, "LEADS", &remark);
            }
            Event::Tick => {}
            Event::End => self.show(line.at, &line.replica, "done", "its job has returned"),
            Event::Gone => self.show(line.at, &line.replica, "gone", ""),
        }
        if line.is_body() {
            self.latest = Some(line.clone());
        }
    }

    /// Shows something that is done to a replica now.
    pub(crate) fn act(&self, replica: &str, what: &str, remark: &str) {
        self.show(now(), replica, what, remark);
    }

    fn show(&self, at: Duration, replica: &str, what: &str, remark: &str) {
        let at = at.saturating_sub(self.began).as_secs_f64();
        let what = format!("{what:<10}");
        let style = match what.trim_end() {
            "LEADS" => "1;32",
            "SIGTERM" => "33",
            "SIGKILL" => "31",
            _ => "",
        };
        let entry = format!(
            "{at:>7.3} s  {}  {} {remark}",
            self.paint(colour(replica), replica),
            self.paint(style, &what)
        );
        say(entry.trim_end());
    }

    pub(crate) fn passed(&self) -> String {
        self.paint("1;32", "✓")
    }

    pub(crate) fn failed(&self) -> String {
        self.paint("1;31", "✗")
    }

    /// Wraps text in an escape sequence, on a terminal.
    fn paint(&self, style: &str, text: &str) -> String {
        if self.colours && !style.is_empty() {
            format!("\x1b[{style}m{text}\x1b[0m")
        } else {
            text.to_owned()
        }
    }

    /// Draws one lane for each replica: `█` it led, `·` it stood by, `✗` it was killed.
    pub(crate) fn lanes(&self, lines: &[Line]) {
        let (Some(first), Some(last)) = (lines.first(), lines.last()) else { return };
        let slice = (last.at.saturating_sub(first.at) / WIDTH).max(Duration::from_micros(1));
        let mut replicas: Vec<&str> = lines.iter().map(|line| line.replica.as_str()).collect();
        replicas.sort_unstable();
        replicas.dedup();
        for replica in replicas {
            let own: Vec<&Line> = lines.iter().filter(|line| line.replica == replica).collect();
            let (Some(ready), Some(leaves)) = (own.first(), own.last()) else { continue };
            let mut lane = String::new();
            for column in 0..=WIDTH {
                let (from, to) = (first.at + slice * column, first.at + slice * (column + 1));
                let led = own.iter().any(|line| line.is_body() && (from..to).contains(&line.at));
                let here = ready.at < to && from <= leaves.at;
                let killed = leaves.event != Event::Gone && (from..to).contains(&leaves.at);
                lane.push(if killed {
                    '✗'
                } else if led {
                    '█'
                } else if here {
                    '·'
                } else {
                    ' '
                });
            }
            say(&format!("  {}", self.paint(colour(replica), &format!("{replica}  {}", lane.trim_end()))));
        }
    }
}

/// Gives each replica a colour of its own.
fn colour(replica: &str) -> &'static str {
    ["36", "35", "34"][usize::from(replica.bytes().next().unwrap_or_default()) % 3]
}

/// Prints a line. A reader that has gone away, such as `head`, is no reason to stop judging.
pub(crate) fn say(line: &str) {
    let _gone = writeln!(std::io::stdout(), "{line}");
}

/// Writes durations as milliseconds: `1.2 ms, 230.0 ms`.
pub(crate) fn milliseconds(durations: &[Duration]) -> String {
    let each = durations.iter().map(|duration| format!("{:.1} ms", duration.as_secs_f64() * 1e3));
    each.collect::<Vec<_>>().join(", ")
}
