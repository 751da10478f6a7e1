//! What is measured, and in which order.

use std::process::ExitCode;
use std::time::Duration;

use crate::arguments::{Arguments, USAGE};
use crate::place::Place;
use crate::process::{self, now};
use crate::report::{self, BUILD, load, table};
use crate::{hand_over, idle, start};

/// `started` is when this process's first instruction ran.
pub(crate) fn main(started: Duration) -> anyhow::Result<ExitCode> {
    let mut arguments = std::env::args().skip(1);
    if let (Some("command"), Some(then)) = (arguments.next().as_deref(), arguments.next()) {
        process::play(&then, started)?;
        return Ok(ExitCode::SUCCESS);
    }
    let Some(arguments) = Arguments::parse(std::env::args().skip(1))? else {
        println!("{USAGE}");
        return Ok(ExitCode::SUCCESS);
    };
    measure(arguments)
}

fn measure(arguments: Arguments) -> anyhow::Result<ExitCode> {
    let since = now();
    let load_before = load()?;
    let places = [Place::directory()?, Place::server()];
    let mut rows = Vec::new();
    for place in &places {
        eprintln!("{}: start-up and end, hand-over, memory", place.label);
        rows.extend(start::rows(place, arguments)?);
        rows.push(hand_over::row(place, arguments.hand_overs())?);
        rows.extend(idle::memory(place, arguments)?);
        rows.push(idle::warm_work(place, arguments)?);
    }
    eprintln!("processor time of idle processes");
    rows.extend(idle::work(&places, arguments)?);

    let summary = format!(
        "{}\nMedian of {} starts and ends, of {} hand-overs. Processor time within {} s. Load average before {load_before}, \
         after {}. {BUILD} All of it took {} s.",
        table(&rows),
        arguments.starts(),
        arguments.hand_overs(),
        arguments.window().as_secs(),
        load()?,
        now().saturating_sub(since).as_secs(),
    );
    Ok(report::publish(&rows, &summary, arguments.common.is_json))
}
