//! What the server and the network say, as our errors. Nothing of it holds a secret: the server never repeats a
//! password, and what sqlx says of a URL is not shown.

use std::io;

use sqlx::postgres::{PgDatabaseError, PgSeverity};

use crate::error::{ConnectError, LossCause};

const IS_IT_UP: &str = "is the server up, and are host and port right?";
const NO_SOCKET: &str = "there is no socket of a server in that folder";
const NO_ROOM: &str = "raise max_connections, or the CONNECTION LIMIT of the role or the database, or close \
    connections that nobody needs";

const NO_ROOM_IN_POOLER: &str = "raise max_client_conn of the pooler, or close connections that nobody needs";

/// Gives what the reason ends with, where that says what to look at.
pub(super) fn hint_in(reason: &str) -> Option<&'static str> {
    [IS_IT_UP, NO_SOCKET, NO_ROOM, NO_ROOM_IN_POOLER].into_iter().find(|hint| reason.ends_with(hint))
}

/// Whether the reason is that there is no room for a connection more.
pub(super) fn is_full(reason: &str) -> bool {
    reason.ends_with(NO_ROOM) || reason.ends_with(NO_ROOM_IN_POOLER)
}

/// Why there is no connection.
pub(super) fn of_connect(error: sqlx::Error) -> ConnectError {
    match error {
        sqlx::Error::Database(error) => {
            let (code, reason) = parts(&*error);
            match code.as_str() {
                // invalid_authorization_specification, invalid_password, insufficient_privilege
                "28000" | "28P01" | "42501" => ConnectError::Authentication { reason },
                // invalid_catalog_name
                "3D000" => ConnectError::UnknownDatabase { reason },
                // too_many_connections: of the server, the role or the database
                "53300" => ConnectError::Unreachable { reason: format!("{reason}: {NO_ROOM}") },
                // PgBouncer has no codes of its own: everything is a protocol violation.
                "08P01" if reason.contains("no more connections allowed") => {
                    ConnectError::Unreachable { reason: format!("{reason}: {NO_ROOM_IN_POOLER}") }
                }
                "08P01" if reason.contains("no such database") => ConnectError::UnknownDatabase { reason },
                "08P01" if reason.contains("no such user") || reason.contains("auth") => {
                    ConnectError::Authentication { reason }
                }
                _ => ConnectError::Unreachable { reason },
            }
        }
        sqlx::Error::Tls(error) => ConnectError::Tls { reason: chain(&*error) },
        // The TLS library speaks through the socket: a certificate that does not hold arrives as invalid data.
        sqlx::Error::Io(error) if error.kind() == io::ErrorKind::InvalidData => {
            ConnectError::Tls { reason: error.to_string() }
        }
        sqlx::Error::Io(error) => ConnectError::Unreachable { reason: of_io(&error) },
        sqlx::Error::Protocol(reason) => ConnectError::Unreachable {
            reason: format!("what answers does not speak PostgreSQL's protocol as expected: {reason}"),
        },
        sqlx::Error::Configuration(_) => {
            ConnectError::Unreachable { reason: "the connection options cannot be used".to_owned() }
        }
        error => ConnectError::Unreachable { reason: error.to_string() },
    }
}

/// Why a new session was not fit for use: a statement that every PostgreSQL server carries out failed on it.
pub(super) fn of_statement(error: sqlx::Error) -> ConnectError {
    match &error {
        sqlx::Error::Database(inner) => {
            let (code, reason) = parts(&**inner);
            // 42: syntax error, undefined function or object; 0A: feature not supported.
            if code != "42501" && (code.starts_with("42") || code.starts_with("0A")) {
                return ConnectError::Unsupported { reason };
            }
            of_connect(error)
        }
        sqlx::Error::RowNotFound | sqlx::Error::ColumnIndexOutOfBounds { .. } => {
            unsupported("a row is missing")
        }
        sqlx::Error::ColumnDecode { .. } | sqlx::Error::Decode(_) => {
            unsupported("a value is missing or of another type")
        }
        _ => of_connect(error),
    }
}

fn unsupported(what: &str) -> ConnectError {
    ConnectError::Unsupported { reason: format!("{what} in the answer to a look at the session") }
}

/// An error that the server answered and that left the session alive, as its code and its text.
pub(super) fn answered(error: &sqlx::Error) -> Option<(String, String)> {
    let sqlx::Error::Database(error) = error else { return None };
    let fatal = error
        .try_downcast_ref::<PgDatabaseError>()
        .is_none_or(|error| matches!(error.severity(), PgSeverity::Fatal | PgSeverity::Panic));
    (!fatal).then(|| parts(&**error))
}

/// Why a session is over whose statement failed without an answer, or with a fatal one.
pub(super) fn of_session(error: &sqlx::Error) -> LossCause {
    match error {
        sqlx::Error::Database(error) => {
            let (code, reason) = parts(&**error);
            LossCause::Closed { reason: format!("{reason}{}", hint(&code)), sqlstate: Some(code) }
        }
        sqlx::Error::Io(error) => LossCause::Closed { reason: of_io(error), sqlstate: None },
        // Its end is not known: the server may hold the locks still.
        error => LossCause::Distrusted { reason: error.to_string() },
    }
}

/// Why an answered error made an ask fail, and what to change.
pub(super) fn of_ask(code: &str, reason: &str) -> String {
    let remedy = match code {
        "53200" => ": raise max_locks_per_transaction on the server, or contend for fewer names",
        "55P03" | "57014" => ": the server is slow or its lock table is busy; asked again at the next poll",
        _ => "",
    };
    format!("{reason}{remedy}")
}

/// What to look at where the server ended the session.
fn hint(code: &str) -> &'static str {
    match code {
        // admin_shutdown
        "57P01" => ": an administrator, a job that ends idle sessions, or a restart",
        // idle_session_timeout
        "57P05" => {
            ": the server heard nothing for its idle limit: the process stood still, was cut off, or somebody lowered \
             idle_session_timeout"
        }
        // crash_shutdown
        "57P02" => ": another process of the server crashed",
        // idle_in_transaction_session_timeout, transaction_timeout
        "25P03" | "25P04" => ": a limit on transactions, though none was open: is there a pooler in between?",
        _ => "",
    }
}

fn parts(error: &dyn sqlx::error::DatabaseError) -> (String, String) {
    let code = error.code().unwrap_or_default().into_owned();
    let text = format!("{}, SQLSTATE {code}", error.message());
    (code, text)
}

fn of_io(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::ConnectionRefused => {
            format!("{error}: {IS_IT_UP}")
        }
        io::ErrorKind::NotFound => format!("{error}: {NO_SOCKET}"),
        io::ErrorKind::UnexpectedEof => "the connection was closed by the other end".to_owned(),
        _ => error.to_string(),
    }
}

/// An error of TLS says little without its sources.
fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let next = error.to_string();
        if !text.contains(&next) {
            text = format!("{text}: {next}");
        }
        source = error.source();
    }
    text
}
