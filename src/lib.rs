//! One leader, hot standbys.

mod candidate;
mod clock;
mod driver;
mod error;
mod lease;
mod locker;
mod name;
mod options;
mod sabotage;
mod store;

pub use candidate::Candidate;
pub use driver::term::{Reason, State};
pub use error::{ConnectError, Error, LossCause, RunError, UrlError};
pub use lease::Lease;
pub use locker::Locker;
pub use name::{Key, Kind, MAX_NAME_BYTES, Name, NameError};
pub use options::{
    Bounds, DEFAULT_HEARTBEAT_INTERVAL, DEFAULT_MAX_HELD, DEFAULT_QUERY_TIMEOUT, DEFAULT_RETRY_INTERVAL,
    DEFAULT_STOP_GRACE, MAX_IDENTITY_BYTES, MAX_TTL, Options, OptionsError,
};
#[cfg(any(test, feature = "testing"))]
pub use store::memory::Memory;
/// Re-exported, since [`Lease::cancellation`] and [`Candidate::until`] speak of it.
pub use tokio_util::sync::CancellationToken;
