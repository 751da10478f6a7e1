//! Logs go to the standard error: the standard output is the command's.

use std::io::{self, IsTerminal as _};

use tracing_subscriber::filter::EnvFilter;

use crate::common::{Common, LogFormat};

/// Starts the log, at this level unless the command line says otherwise. `LEASEHOLD_LOG`, if it is set, is a filter as of
/// `tracing_subscriber`.
pub(crate) fn start(common: &Common, level: &str) {
    let level = match (common.quiet, common.verbose) {
        (true, _) => "error",
        (false, 0) => level,
        (false, 1) => "leasehold=debug",
        (false, _) => "trace",
    };
    let filter = EnvFilter::try_from_env("LEASEHOLD_LOG").unwrap_or_else(|_| EnvFilter::new(level));
    let colours = io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|it| it.is_empty());
    let log =
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr).log_internal_errors(false);
    match common.log_format {
        LogFormat::Json => log.json().flatten_event(true).init(),
        LogFormat::Text => log.with_ansi(colours).with_target(false).init(),
    }
}
