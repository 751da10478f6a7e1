//! One figure at several sizes, and its slope.

use crate::report::{Row, Spread, Unit};

pub(crate) struct Point {
    pub(crate) size: u32,
    pub(crate) ours: Spread,
    pub(crate) limit: Spread,
}

/// Of which the slope is told.
#[derive(Clone, Copy)]
pub(crate) struct Slope {
    pub(crate) unit: &'static str,
    /// By what the figure's own unit, per one, is multiplied.
    pub(crate) times: f64,
}

pub(crate) struct Curve {
    pub(crate) points: Vec<Point>,
}

impl Curve {
    pub(crate) fn at(sizes: &[u32]) -> Self {
        let point = |&size| Point { size, ours: Spread::default(), limit: Spread::default() };
        Self { points: sizes.iter().map(point).collect() }
    }

    /// A row for each size, and one for the slope.
    pub(crate) fn rows(&self, what: &str, unit: Unit, slope: Slope) -> Vec<Row> {
        let rows = self.points.iter().map(|point| {
            let row = Row::of(format!("{what}: {}", grouped(point.size)), unit, &point.ours);
            if point.limit.is_empty() { row } else { row.with_limit(point.limit.median()) }
        });
        rows.chain([self.slope_row(format!("{what}: slope"), slope)]).collect()
    }

    fn slope_row(&self, metric: String, slope: Slope) -> Row {
        let (ours, limit) = (self.slope(|point| &point.ours), self.slope(|point| &point.limit));
        let row = Row::new(metric, Unit::Other(slope.unit), ours.unwrap_or_default() * slope.times);
        match limit {
            Some(limit) => row.with_limit(limit * slope.times),
            None => row,
        }
    }

    /// `None` where there is a point without any.
    pub(crate) fn slope(&self, of: impl Fn(&Point) -> &Spread) -> Option<f64> {
        let points = self.points.iter().map(|point| {
            let spread = of(point);
            (!spread.is_empty()).then(|| (f64::from(point.size), spread.median()))
        });
        points.collect::<Option<Vec<_>>>().map(|points| least_squares(&points))
    }

    /// At its greatest size.
    pub(crate) fn last(&self) -> &Point {
        self.points.last().expect("a curve has points")
    }

    /// At its least size.
    pub(crate) fn first(&self) -> &Point {
        self.points.first().expect("a curve has points")
    }
}

/// The slope of the straight line that fits best.
fn least_squares(points: &[(f64, f64)]) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "few")]
    let count = points.len() as f64;
    let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / count;
    let (x, y) = (mean(|it| it.0), mean(|it| it.1));
    let (above, below) = points.iter().fold((0.0, 0.0), |(above, below), it| {
        ((it.0 - x).mul_add(it.1 - y, above), (it.0 - x).mul_add(it.0 - x, below))
    });
    above / below
}

/// `10,000`.
fn grouped(number: u32) -> String {
    if number < 1_000 { number.to_string() } else { format!("{},{:03}", number / 1_000, number % 1_000) }
}
