//! Memory: by how much a process grows with its names.

use crate::arguments::{Arguments, NAMES};
use crate::curve::{Curve, Slope};
use crate::memory;
use crate::report::{Goal, Row, Unit};
use crate::support::postgres::Cluster;

const GOAL_KIB: f64 = 2.0;

pub(crate) async fn rows(arguments: Arguments) -> anyhow::Result<Vec<Row>> {
    let server = Cluster::new();
    let (mut held, mut waited_for) = (Curve::at(&NAMES), Curve::at(&NAMES));
    for _ in 0..arguments.processes() {
        for (held, waited_for) in held.points.iter_mut().zip(&mut waited_for.points) {
            held.ours.push(memory::held(&server, held.size)?);
            let (waits, idle) = memory::waited_for(&server, waited_for.size).await?;
            waited_for.ours.push(waits);
            waited_for.limit.push(idle);
        }
    }
    let slope = Slope { unit: "KiB per name", times: 1.0 };
    let mut rows = Vec::new();
    for (curve, what) in [(held, "held"), (waited_for, "waited for")] {
        let mut curve = curve.rows(&format!("memory, by names {what}"), Unit::KiB, slope);
        if !arguments.common.is_quick {
            curve = with_goal(curve);
        }
        rows.extend(curve);
    }
    Ok(rows)
}

/// The last one is the slope.
fn with_goal(mut rows: Vec<Row>) -> Vec<Row> {
    let slope = rows.pop().map(|row| row.with_goal(Goal::AtMost(GOAL_KIB)));
    rows.into_iter().chain(slope).collect()
}
