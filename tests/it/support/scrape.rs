//! What a scrape of this process shows.

use std::collections::BTreeSet;
use std::sync::OnceLock;

use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};

use super::eventually;

/// The labels of a metric in the guide's table.
fn documented(metric: &str) -> BTreeSet<&'static str> {
    let metric = metric.trim_end_matches("_count").trim_end_matches("_sum");
    let row = format!("| `{metric}` | ");
    let mut rows = include_str!("../../../docs/metrics.md").lines();
    let row =
        rows.find(|line| line.starts_with(&row)).unwrap_or_else(|| panic!("{metric} is not documented"));
    let labels = row.split(" | ").nth(2).unwrap();
    labels.split(", ").map(|label| label.trim_matches('`')).collect()
}

/// The text that Prometheus would get, line by line.
pub(crate) struct Scrape(String);

impl Scrape {
    /// Installs the recorder of this process, unless a test before has.
    pub(crate) fn set_up() {
        Self::recorder();
    }

    fn recorder() -> &'static PrometheusHandle {
        static RECORDER: OnceLock<PrometheusHandle> = OnceLock::new();
        RECORDER.get_or_init(|| PrometheusBuilder::new().install_recorder().unwrap())
    }

    /// Whatever is shown has the labels that the guide says, and no other.
    pub(crate) fn now() -> Self {
        let scrape = Self(Self::recorder().render());
        for line in scrape.0.lines().filter(|line| line.starts_with("leasehold_")) {
            let (metric, rest) = line.split_once('{').unwrap();
            let (series, _) = rest.rsplit_once("} ").unwrap();
            let labels: BTreeSet<_> = series
                .split("\",")
                .map(|label| label.split_once('=').unwrap().0)
                // Of the recorder, where it was given no buckets.
                .filter(|label| *label != "quantile")
                .collect();
            assert_eq!(labels, documented(metric), "{line}");
        }
        scrape
    }

    pub(crate) fn text(&self) -> &str {
        &self.0
    }

    /// The value of a label of the one series of a metric that has these labels.
    pub(crate) fn label(&self, metric: &str, label: &str, labels: &[(&str, &str)]) -> String {
        let has = |series: &&str| {
            labels.iter().all(|(label, value)| series.contains(&format!("{label}={value:?}")))
        };
        let series = self.0.lines().filter(|line| line.starts_with(metric)).find(has).unwrap();
        let (_, value) = series.split_once(&format!("{label}=\"")).unwrap();
        value.split_once('"').unwrap().0.to_owned()
    }

    /// The sum of all series of a metric that have these labels; nothing, if there are none.
    pub(crate) fn sum(&self, metric: &str, labels: &[(&str, &str)]) -> Option<f64> {
        let has =
            |series: &str| labels.iter().all(|(label, value)| series.contains(&format!("{label}={value:?}")));
        let values = self.0.lines().filter_map(|line| {
            let rest = line.strip_prefix(metric)?.strip_prefix('{')?;
            let (series, value) = rest.rsplit_once("} ")?;
            has(series).then(|| value.parse::<f64>().unwrap())
        });
        values.reduce(|sum, value| sum + value)
    }

    pub(crate) fn has(&self, text: &str) -> bool {
        self.0.contains(text)
    }

    /// Waits until the sum is that.
    pub(crate) async fn until(metric: &str, labels: &[(&str, &str)], wanted: f64) {
        let what = format!("{metric} {labels:?} is {wanted}");
        let is_wanted = |sum: &Option<f64>| sum.is_some_and(|sum| (sum - wanted).abs() < f64::EPSILON);
        eventually(&what, || Self::now().sum(metric, labels), is_wanted).await;
    }

    /// Waits until the sum is greater than that.
    pub(crate) async fn until_above(metric: &str, labels: &[(&str, &str)], limit: f64) {
        let what = format!("{metric} {labels:?} is above {limit}");
        let is_above = |sum: &Option<f64>| sum.is_some_and(|sum| sum > limit);
        eventually(&what, || Self::now().sum(metric, labels), is_above).await;
    }
}
