//! The table, and the lines for programs.

use std::time::Duration;

use serde_json::{Value, json};

#[derive(Clone, Copy)]
pub(crate) enum Unit {
    Ms,
    MiB,
    /// Of one core.
    Percent,
    PerSecond,
}

impl Unit {
    const fn text(self) -> &'static str {
        match self {
            Self::Ms => "ms",
            Self::MiB => "MiB",
            Self::Percent => "% of a core",
            Self::PerSecond => "per s",
        }
    }
}

/// What came of the rounds of one figure.
#[derive(Default)]
pub(crate) struct Spread(Vec<Duration>);

impl Spread {
    pub(crate) fn add(&mut self, value: Duration) {
        self.0.push(value);
    }

    /// Median and worst, in milliseconds.
    fn ms(&self) -> (f64, f64) {
        let mut values: Vec<_> = self.0.iter().map(|value| value.as_secs_f64() * 1e3).collect();
        values.sort_unstable_by(f64::total_cmp);
        let (low, high) = (values[(values.len() - 1) / 2], values[values.len() / 2]);
        (f64::midpoint(low, high), values[values.len() - 1])
    }
}

/// One figure.
pub(crate) struct Row {
    metric: String,
    unit: Unit,
    /// The median, where there were rounds.
    value: f64,
    worst: Option<f64>,
    limit: Option<f64>,
    /// What the value must stay below.
    goal: Option<f64>,
}

impl Row {
    pub(crate) const fn new(metric: String, unit: Unit, value: f64) -> Self {
        Self { metric, unit, value, worst: None, limit: None, goal: None }
    }

    pub(crate) fn spread(metric: String, ours: &Spread, limit: &Spread) -> Self {
        let (median, worst) = ours.ms();
        Self { worst: Some(worst), ..Self::new(metric, Unit::Ms, median) }.with_limit(limit.ms().0)
    }

    #[must_use]
    pub(crate) fn with_limit(self, limit: f64) -> Self {
        Self { limit: Some(limit), ..self }
    }

    #[must_use]
    pub(crate) fn with_goal(self, goal: f64) -> Self {
        Self { goal: Some(goal), ..self }
    }

    /// `None` where there is no goal.
    fn is_ok(&self) -> Option<bool> {
        self.goal.map(|goal| self.value < goal)
    }

    pub(crate) fn is_missed(&self) -> bool {
        self.is_ok() == Some(false)
    }

    /// `None` also where the limit is nothing at all.
    fn ratio(&self) -> Option<f64> {
        self.limit.filter(|&limit| limit > 0.0).map(|limit| self.value / limit)
    }

    pub(crate) fn json(&self) -> Value {
        json!({
            "metric": self.metric,
            "unit": self.unit.text(),
            "value": rounded(self.value),
            "worst": self.worst.map(rounded),
            "limit": self.limit.map(rounded),
            "ratio": self.ratio().map(|ratio| (ratio * 100.0).round() / 100.0),
            "goal": self.goal,
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
            or_dash(self.goal.map(|goal| format!("< {goal} {unit}"))),
            or_dash(self.is_ok().map(|is_ok| if is_ok { "yes" } else { "NO" }.to_owned())),
        ]
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
