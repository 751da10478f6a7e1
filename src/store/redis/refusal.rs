//! What the server and the network say, as our errors. Nothing of it holds a secret: values of keys are not shown, and what a
//! server repeats of a command that it does not know is left out, since it may be a password or the value of a grant.

use std::error::Error;
use std::io;
use std::sync::Arc;

use redis::{ErrorKind, RedisError, ServerErrorKind, Value};

use super::link::Reply;
use crate::error::ConnectError;

const IS_IT_UP: &str = "is the server up, and are host and port right?";

/// An error that the server answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    /// The first word of it.
    pub(super) code: String,
    text: String,
}

/// What an error means for the command that it answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Meaning {
    /// The server does not know the script.
    NoScript,
    /// This is not, or not yet, the server that has the keys: connect anew.
    Elsewhere,
    /// It cannot write now.
    NotNow,
    /// The key has something else.
    Foreign,
    Final,
}

impl Refusal {
    fn new(code: &str, detail: Option<&str>) -> Self {
        let text =
            detail.map_or_else(|| code.to_owned(), |detail| format!("{code} {}", without_arguments(detail)));
        Self { code: code.to_owned(), text }
    }

    pub(super) fn or_value(value: Value) -> Reply {
        match value {
            Value::ServerError(error) => Err(Self::new(error.code(), error.details())),
            value => Ok(value),
        }
    }

    pub(super) fn meaning(&self) -> Meaning {
        match self.code.as_str() {
            "NOSCRIPT" => Meaning::NoScript,
            "READONLY" | "LOADING" | "MASTERDOWN" | "CLUSTERDOWN" | "MOVED" | "ASK" | "TRYAGAIN"
            | "NOAUTH" => Meaning::Elsewhere,
            "BUSY" | "MISCONF" | "NOREPLICAS" | "OOM" => Meaning::NotNow,
            "WRONGTYPE" => Meaning::Foreign,
            // Inside of a script.
            _ if self.text.contains("WRONGTYPE") => Meaning::Foreign,
            _ if self.text.contains("READONLY") => Meaning::Elsewhere,
            _ if self.text.contains("OOM command not allowed") => Meaning::NotNow,
            _ => Meaning::Final,
        }
    }

    /// For people: what it said, and what to change.
    pub(super) fn told(&self) -> String {
        let remedy = match self.code.as_str() {
            "NOPERM" => "grant the user what leasehold::redis lists",
            "OOM" => "the server's memory is full: raise maxmemory, or give leases a server of their own",
            "MISCONF" => "the server cannot write its data to disk: look at its log",
            "NOREPLICAS" => "the server has fewer replicas than its min-replicas-to-write",
            "BUSY" => "a script of somebody else keeps the server busy",
            _ if self.text.contains("OOM command not allowed") => {
                "the server's memory is full: raise maxmemory, or give leases a server of their own"
            }
            _ => return self.text.clone(),
        };
        format!("{}: {remedy}", self.text)
    }
}

/// What a server says of a command that it does not know, up to where it repeats the arguments.
fn without_arguments(said: &str) -> &str {
    let end = said.find("with args");
    end.map_or(said, |end| said[..end].trim_end_matches([' ', ',']))
}

/// An error that the server answered is a reply; any other one is that of the connection.
pub(super) fn answered(reply: Result<Value, RedisError>) -> Result<Reply, RedisError> {
    match reply {
        Ok(value) => Ok(Refusal::or_value(value)),
        Err(error) => match error.kind() {
            ErrorKind::Server(_) | ErrorKind::Extension => {
                Ok(Err(Refusal::new(error.code().unwrap_or("ERR"), error.detail())))
            }
            _ => Err(error),
        },
    }
}

/// Why there is no connection.
pub(super) fn of_connect(error: &RedisError) -> ConnectError {
    let said = || {
        let code = error.code().unwrap_or_default();
        error.detail().map_or_else(
            || error.category().to_owned(),
            |detail| format!("{code} {}", without_arguments(detail)).trim().to_owned(),
        )
    };
    match error.kind() {
        ErrorKind::AuthenticationFailed | ErrorKind::Server(ServerErrorKind::NoPerm) => {
            ConnectError::Authentication { reason: said() }
        }
        ErrorKind::RESP3NotSupported => ConnectError::TooOld { version: "older than 6".to_owned() },
        ErrorKind::Server(ServerErrorKind::BusyLoading) => loading(),
        ErrorKind::Io => of_io(error),
        _ => match error.code() {
            Some("NOAUTH" | "WRONGPASS" | "NOPERM") => ConnectError::Authentication { reason: said() },
            _ if error.detail().is_some_and(|it| it.contains("DB index is out of range")) => {
                ConnectError::UnknownDatabase { reason: said() }
            }
            _ => ConnectError::Unreachable { reason: said() },
        },
    }
}

/// Why a server that answered cannot be used.
pub(super) fn of_answer(refusal: &Refusal) -> ConnectError {
    match refusal.code.as_str() {
        "LOADING" => loading(),
        "READONLY" => ConnectError::Replica,
        "NOPERM" | "NOAUTH" | "WRONGPASS" => ConnectError::Authentication { reason: refusal.told() },
        _ => ConnectError::Unreachable { reason: refusal.told() },
    }
}

pub(super) fn loading() -> ConnectError {
    ConnectError::Unreachable { reason: "the server is still loading its data".to_owned() }
}

fn of_io(error: &RedisError) -> ConnectError {
    match io_of(error) {
        // The TLS library speaks through the socket.
        Some(io) if io.kind() == io::ErrorKind::InvalidData => ConnectError::Tls { reason: io.to_string() },
        Some(io) => ConnectError::Unreachable { reason: format!("{io}: {IS_IT_UP}") },
        None => ConnectError::Unreachable { reason: format!("{error}: {IS_IT_UP}") },
    }
}

/// What the system said.
fn io_of(error: &RedisError) -> Option<&io::Error> {
    let source = Error::source(error)?;
    // The client shows the shared pointer to it.
    match source.downcast_ref::<Arc<dyn Error + Send + Sync>>() {
        Some(shared) => shared.downcast_ref(),
        None => source.downcast_ref(),
    }
}
