//! One leader, hot standbys.

mod clock;
mod error;
mod name;
mod options;
#[cfg(test)]
mod sabotage;
mod store;

pub use error::{ConnectError, Error, LossCause, RunError, UrlError};
pub use name::{Key, Kind, MAX_NAME_BYTES, Name, NameError};
pub use options::{
    Bounds, DEFAULT_HEARTBEAT_INTERVAL, DEFAULT_MAX_HELD, DEFAULT_QUERY_TIMEOUT, DEFAULT_RETRY_INTERVAL,
    DEFAULT_STOP_GRACE, MAX_IDENTITY_BYTES, MAX_TTL, Options, OptionsError,
};
