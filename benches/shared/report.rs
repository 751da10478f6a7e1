//! The table, and the lines for programs: of the benches that hold each figure against a limit.

use std::process::ExitCode;
use std::time::Duration;

use serde_json::{Value, json};

#[derive(Clone, Copy)]
pub(crate) enum Unit {
    Ms,
    MiB,
    KiB,
    /// Of one core.
    Percent,
    PerSecond,
    Sessions,
    RoundTrips,
    /// Of one bench alone; the greatest is the worst.
    Other(&'static str),
}

impl Unit {
    const fn text(self) -> &'static str {
        match self {
            Self::Ms => "ms",
            Self::MiB => "MiB",
            Self::KiB => "KiB",
            Self::Percent => "% of a core",
            Self::PerSecond => "per s",
            Self::Sessions => "sessions",
            Self::RoundTrips => "round trips",
            Self::Other(text) => text,
        }
    }
}

/// What came of the rounds of one figure.
#[derive(Default)]
pub(crate) struct Spread(Vec<f64>);

impl Spread {
    /// In milliseconds.
    pub(crate) fn add(&mut self, value: Duration) {
        self.push(value.as_secs_f64() * 1e3);
    }

    pub(crate) fn push(&mut self, value: f64) {
        self.0.push(value);
    }

    pub(crate) const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn median(&self) -> f64 {
        let mut values = self.0.clone();
        values.sort_unstable_by(f64::total_cmp);
        let (low, high) = (values[(values.len() - 1) / 2], values[values.len() / 2]);
        f64::midpoint(low, high)
    }

    /// The longest time, the lowest rate.
    fn worst(&self, unit: Unit) -> f64 {
        let worse = if matches!(unit, Unit::PerSecond) { f64::min } else { f64::max };
        self.0.iter().copied().reduce(worse).unwrap_or_default()
    }
}

/// What is to be reached.
#[derive(Clone, Copy)]
pub(crate) enum Goal {
    /// The value stays below that.
    Below(f64),
    AtMost(f64),
    /// The value is at most so many times the limit.
    TimesAtMost(f64),
    TimesAtLeast(f64),
}

/// One figure.
pub(crate) struct Row {
    metric: String,
    unit: Unit,
    /// The median, where there were rounds.
    value: f64,
    worst: Option<f64>,
    limit: Option<f64>,
    goal: Option<Goal>,
}

impl Row {
    pub(crate) const fn new(metric: String, unit: Unit, value: f64) -> Self {
        Self { metric, unit, value, worst: None, limit: None, goal: None }
    }

    pub(crate) fn spread(metric: String, ours: &Spread, limit: &Spread) -> Self {
        Self::of(metric, Unit::Ms, ours).with_limit(limit.median())
    }

    pub(crate) fn of(metric: String, unit: Unit, ours: &Spread) -> Self {
        Self { worst: Some(ours.worst(unit)), ..Self::new(metric, unit, ours.median()) }
    }

    #[must_use]
    pub(crate) fn with_limit(self, limit: f64) -> Self {
        Self { limit: Some(limit), ..self }
    }

    #[must_use]
    pub(crate) fn with_goal(self, goal: Goal) -> Self {
        Self { goal: Some(goal), ..self }
    }

    /// `None` where there is no goal.
    fn is_ok(&self) -> Option<bool> {
        self.goal.map(|goal| match goal {
            Goal::Below(goal) => self.value < goal,
            Goal::AtMost(goal) => self.value <= goal,
            Goal::TimesAtMost(goal) => self.ratio().is_some_and(|ratio| ratio <= goal),
            Goal::TimesAtLeast(goal) => self.ratio().is_some_and(|ratio| ratio >= goal),
        })
    }

    fn is_missed(&self) -> bool {
        self.is_ok() == Some(false)
    }

    /// `None` also where the limit is nothing at all.
    fn ratio(&self) -> Option<f64> {
        self.limit.filter(|&limit| limit > 0.0).map(|limit| self.value / limit)
    }

    fn json(&self) -> Value {
        json!({
            "metric": self.metric,
            "unit": self.unit.text(),
            "value": rounded(self.value),
            "worst": self.worst.map(rounded),
            "limit": self.limit.map(rounded),
            "ratio": self.ratio().map(|ratio| (ratio * 100.0).round() / 100.0),
            "goal": self.goal.map(Goal::number),
            "goal_is": self.goal.map(Goal::word),
            "ok": self.is_ok(),
        })
    }

    fn cells(&self) -> [String; 7] {
        let unit = self.unit.text();
        let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
        [
            self.metric.clone(),
            format!("{} {unit}", text(self.value)),
            or_dash(self.worst.map(|worst| format!("{} {unit}", text(worst)))),
            or_dash(self.limit.map(|limit| format!("{} {unit}", text(limit)))),
            or_dash(self.ratio().map(|ratio| format!("{} ×", text(ratio)))),
            or_dash(self.goal.map(|goal| goal.text(unit))),
            or_dash(self.is_ok().map(|is_ok| if is_ok { "yes" } else { "NO" }.to_owned())),
        ]
    }
}

impl Goal {
    const fn number(self) -> f64 {
        match self {
            Self::Below(goal) | Self::AtMost(goal) | Self::TimesAtMost(goal) | Self::TimesAtLeast(goal) => {
                goal
            }
        }
    }

    /// For programs.
    const fn word(self) -> &'static str {
        match self {
            Self::Below(_) => "value below",
            Self::AtMost(_) => "value at most",
            Self::TimesAtMost(_) => "ratio at most",
            Self::TimesAtLeast(_) => "ratio at least",
        }
    }

    fn text(self, unit: &str) -> String {
        match self {
            Self::Below(goal) => format!("< {goal} {unit}"),
            Self::AtMost(goal) => format!("≤ {goal} {unit}"),
            Self::TimesAtMost(goal) => format!("≤ {goal} ×"),
            Self::TimesAtLeast(goal) => format!("≥ {goal} ×"),
        }
    }
}

pub(crate) fn table(rows: &[Row]) -> String {
    let head = ["what", "figure", "worst", "limit", "ratio", "goal", "reached"];
    let lines = [format!("| {} |", head.join(" | ")), format!("|{}", "---|".repeat(head.len()))];
    let lines = lines.into_iter().chain(rows.iter().map(|row| format!("| {} |", row.cells().join(" | "))));
    lines.map(|line| line + "\n").collect()
}

/// Three digits.
fn text(value: f64) -> String {
    let places = match value {
        0.0 => return "0".to_owned(),
        _ if value >= 100.0 => 0,
        _ if value >= 10.0 => 1,
        _ if value >= 1.0 => 2,
        _ if value >= 0.1 => 3,
        _ => 4,
    };
    format!("{value:.places$}")
}

fn rounded(value: f64) -> f64 {
    (value * 1e4).round() / 1e4
}

/// Of the last minute.
pub(crate) fn load() -> std::io::Result<String> {
    let text = std::fs::read_to_string("/proc/loadavg")?;
    Ok(text.split(' ').next().unwrap_or_default().to_owned())
}

/// How it was built, for people.
pub(crate) const BUILD: &str =
    if cfg!(debug_assertions) { "A build without optimisation." } else { "A build with optimisation." };

/// Prints the figures, and gives whether every goal was reached.
pub(crate) fn publish(rows: &[Row], summary: &str, is_json: bool) -> ExitCode {
    if is_json {
        for row in rows {
            println!("{}", row.json());
        }
        eprintln!("{summary}");
    } else {
        println!("{summary}");
    }
    if rows.iter().any(Row::is_missed) { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}
