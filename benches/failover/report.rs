//! The table, and the lines for programs.

use std::time::Duration;

use leasehold::Options;
use serde_json::{Value, json};

use crate::judge::{Spread, Summary};
use crate::scenario::{Goal, Scenario};

/// Everything about one scenario.
pub(crate) struct Row {
    pub(crate) scenario: Scenario,
    pub(crate) options: Options,
    pub(crate) goal: Goal,
    pub(crate) ours: Summary,
    pub(crate) naive: Option<Summary>,
    /// What a hand-over costs at least.
    pub(crate) raw: Option<Spread>,
}

impl Row {
    pub(crate) fn is_ok(&self) -> bool {
        self.ours.reaches(&self.goal)
    }

    fn ratio(&self) -> Option<f64> {
        let (raw, vacancy) = (self.raw?, self.ours.vacancy?);
        Some(vacancy.median.as_secs_f64() / raw.median.as_secs_f64())
    }

    pub(crate) fn json(&self) -> Value {
        let bounds = self.options.bounds();
        let mut line = json!({
            "scenario": self.scenario.name(),
            "vacancy_ms": self.ours.vacancy.map(spread),
            "overlap_ms": spread(self.ours.overlap),
            "bound_ms": self.scenario.bound(&bounds).map(ms),
            "bound_overlap_ms": ms(self.scenario.overlap_bound(&bounds)),
            "changes_of_leader": self.ours.changes,
        });
        let mut add = |key: &str, value: Value| line[key] = value;
        if let Some(over) = self.ours.over {
            add("vacancy_over_ms", ms(over));
        }
        if let Some(outage) = self.ours.outage {
            add("outage_ms", spread(outage));
        }
        if let Some(naive) = &self.naive {
            add("naive_vacancy_ms", naive.vacancy.map(spread).into());
            if let Some(over) = naive.over {
                add("naive_vacancy_over_ms", ms(over));
            }
            add("naive_overlap_ms", spread(naive.overlap));
            add("naive_changes_of_leader", naive.changes.into());
        }
        if let (Some(raw), Some(ratio)) = (self.raw, self.ratio()) {
            add("raw_ms", spread(raw));
            add("vacancy_to_raw", json!((ratio * 100.0).round() / 100.0));
        }
        add("rounds", self.ours.rounds.into());
        add("goal", self.goal.to_string().into());
        add("ok", self.is_ok().into());
        line
    }

    fn cells(&self) -> [String; 7] {
        let bounds = self.options.bounds();
        let bound = self.scenario.bound(&bounds).map_or_else(|| "no change of leader".to_owned(), text);
        let bound = if self.ours.outage.is_some() { format!("outage + {bound}") } else { bound };
        let (naive, naive_overlap) = self
            .naive
            .as_ref()
            .map_or_else(|| ("-".to_owned(), "-".to_owned()), |naive| (vacancy(naive), pair(naive.overlap)));
        [
            self.scenario.name().to_owned(),
            vacancy(&self.ours),
            bound,
            pair(self.ours.overlap),
            naive,
            naive_overlap,
            if self.is_ok() { "yes" } else { "NO" }.to_owned(),
        ]
    }
}

pub(crate) fn table(rows: &[Row]) -> String {
    let head = [
        "fault",
        "nobody leads",
        "bound",
        "two lead",
        "naive holder: nobody leads",
        "naive: two lead",
        "goal reached",
    ];
    let lines = [format!("| {} |", head.join(" | ")), format!("|{}", "---|".repeat(head.len()))];
    let lines = lines.into_iter().chain(rows.iter().map(|row| format!("| {} |", row.cells().join(" | "))));
    lines.map(|line| line + "\n").collect()
}

/// What stands below the table.
pub(crate) fn notes(rows: &[Row]) -> String {
    let mut notes = Vec::new();
    for row in rows {
        let name = row.scenario.name();
        if let (Some(raw), Some(ratio)) = (row.raw, row.ratio()) {
            notes.push(format!(
                "{name}: {ratio:.2} × the raw hand-over ({} with plain connections).\n",
                pair(raw)
            ));
        }
        if let Some(outage) = row.ours.outage {
            notes.push(format!("{name}: of this the server was away for {}.\n", pair(outage)));
        }
        if !row.is_ok() {
            notes.push(format!("{name}: MISSED {}.\n", row.goal));
        }
    }
    notes.concat()
}

fn vacancy(summary: &Summary) -> String {
    match (summary.vacancy, summary.over) {
        (_, Some(over)) => format!("> {}", text(over)),
        (Some(_), _) if summary.changes == 0 => "no change of leader".to_owned(),
        (Some(vacancy), _) => pair(vacancy),
        (None, None) => "-".to_owned(),
    }
}

fn pair(spread: Spread) -> String {
    if spread.max.is_zero() {
        "0".to_owned()
    } else {
        format!("{}, {}", text(spread.median), text(spread.max))
    }
}

/// Three digits.
fn text(duration: Duration) -> String {
    let ms = duration.as_secs_f64() * 1e3;
    if ms == 0.0 {
        "0".to_owned()
    } else if ms < 10.0 {
        format!("{ms:.1} ms")
    } else if ms < 1000.0 {
        format!("{ms:.0} ms")
    } else if ms < 600e3 {
        format!("{:.1} s", ms / 1e3)
    } else {
        format!("{:.0} min", ms / 60e3)
    }
}

fn ms(duration: Duration) -> Value {
    json!((duration.as_secs_f64() * 1e5).round() / 1e2)
}

fn spread(spread: Spread) -> Value {
    json!({"median": ms(spread.median), "max": ms(spread.max)})
}

impl std::fmt::Display for Goal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self.median, self.worst) {
            (Some(median), Some(worst)) => {
                write!(f, "vacancy: median at most {}, worst at most {}", text(median), text(worst))?;
            }
            (_, Some(worst)) => write!(f, "vacancy at most {}", text(worst))?,
            (_, None) => write!(f, "no change of leader")?,
        }
        write!(f, "; overlap at most {}", text(self.overlap))
    }
}
