//! Exit codes: those of sysexits.h where there is one, so that they are none that commands usually end with.

use std::process::ExitCode;

use leasehold::{Error, OptionsError};

/// As clap has it.
pub(crate) const USAGE: u8 = 2;
/// `EX_UNAVAILABLE`: the store cannot be reached.
pub(crate) const UNREACHABLE: u8 = 69;
/// `EX_SOFTWARE`: a bug in leasehold.
pub(crate) const BUG: u8 = 70;
/// `EX_TEMPFAIL`: somebody else leads.
pub(crate) const NOT_ACQUIRED: u8 = 75;
/// `EX_PROTOCOL`: the lease was lost while the command ran.
pub(crate) const LOST: u8 = 76;
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
    eprintln!("leasehold: {error:#}");
    ExitCode::from(code_of(error))
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
