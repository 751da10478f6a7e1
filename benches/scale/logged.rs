//! What the server's log tells of the statements that were sent to it. It has one line for each message: nothing is missed,
//! and nothing counted that is somebody else's.

use crate::support::postgres::ServerLog;

/// Logs each message without its text, which would cost more than the message where that has a thousand names.
pub(crate) const COUNTED: &str = "log_duration=on";

/// Logs each message with its text.
pub(crate) const TOLD: &str = "log_min_duration_statement=0";

/// One message.
pub(crate) struct Logged {
    pub(crate) application: String,
    /// How long the server took for it, without what it took to log it.
    pub(crate) ms: f64,
    /// Where that is told.
    pub(crate) text: String,
}

/// The messages after the first `from` lines.
pub(crate) fn since(log: &ServerLog, from: usize) -> Vec<Logged> {
    log.lines().iter().skip(from).filter_map(|line| read(line)).collect()
}

/// `4711 NAME: LOG:  duration: 0.081 ms  statement: TEXT`
fn read(line: &str) -> Option<Logged> {
    let (head, tail) = line.split_once(": LOG:  duration: ")?;
    let (ms, text) = tail.split_once(" ms")?;
    let application = head.split_once(' ')?.1.to_owned();
    let text = text.trim_start();
    let text = text.strip_prefix("statement: ").unwrap_or(text).to_owned();
    Some(Logged { application, ms: ms.parse().ok()?, text })
}
