//! Exit codes: those of sysexits.h where there is one, so that they are none that commands usually end with.

use std::process::ExitCode;

use leasehold::{Error, OptionsError};

use crate::output;

/// As clap has it.
pub(crate) const USAGE: u8 = 2;
/// `EX_NOUSER`: nobody leads, so nobody can be asked.
pub(crate) const NOBODY_LEADS: u8 = 67;
/// `EX_UNAVAILABLE`: the store cannot be reached.
pub(crate) const UNREACHABLE: u8 = 69;
/// `EX_SOFTWARE`: a bug in leasehold.
pub(crate) const BUG: u8 = 70;
/// `EX_TEMPFAIL`: somebody else leads, or goes on leading, or has the lock.
pub(crate) const NOT_ACQUIRED: u8 = 75;
/// `EX_PROTOCOL`: the lease or lock was lost while the command ran.
pub(crate) const LOST: u8 = 76;
/// `EX_NOPERM`: the leader does not do what it is asked.
pub(crate) const NOT_PERMITTED: u8 = 77;
/// `EX_CONFIG`: the store must not be used.
pub(crate) const REFUSED: u8 = 78;
/// As shells have it.
pub(crate) const CANNOT_EXECUTE: u8 = 126;
/// As shells have it.
pub(crate) const NOT_FOUND: u8 = 127;

/// As shells have it: 128 and the signal's number.
pub(crate) fn of_signal(signal: i32) -> u8 {
    u8::try_from(128 + signal).unwrap_or(u8::MAX)
}

/// What was asked for makes no sense.
#[derive(Debug)]
pub(crate) struct Usage(String);

impl Usage {
    pub(crate) fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }
}

impl std::fmt::Display for Usage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}

/// Says what went wrong, and gives the code for it.
pub(crate) fn report(error: &anyhow::Error) -> ExitCode {
    output::complain(format_args!("{error:#}"));
    ExitCode::from(code_of(error))
}

/// Waits for a signal that ends this process, and gives the code that a shell has for it.
pub(crate) async fn interrupted() -> anyhow::Result<ExitCode> {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        let (mut interrupt, mut terminate) =
            (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
        let signal = tokio::select! {
            _ = interrupt.recv() => SignalKind::interrupt(),
            _ = terminate.recv() => SignalKind::terminate(),
        };
        Ok(ExitCode::from(u8::try_from(128 + signal.as_raw_value())?))
    }
    #[cfg(not(unix))]
    {
        tokio::signal::ctrl_c().await?;
        Ok(ExitCode::from(130))
    }
}

fn code_of(error: &anyhow::Error) -> u8 {
    if error.is::<Usage>() || error.is::<OptionsError>() {
        return USAGE;
    }
    match error.downcast_ref::<Error>() {
        Some(Error::Options(_) | Error::Name(_) | Error::Url(_)) => USAGE,
        Some(Error::Connect(error)) if error.is_permanent() => REFUSED,
        Some(Error::Connect(_) | Error::Unanswered { .. }) => UNREACHABLE,
        _ => BUG,
    }
}
