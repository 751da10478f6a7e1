//! Looks at a store before anybody relies on it: [`diagnose`].

use crate::diagnosis::Diagnosis;
use crate::error::Error;
use crate::options::Options;
use crate::store::{Location, file};

/// Looks at the store of a URL, and tells whether it can be used with these options, and what to change.
///
/// It makes the very checks of [`Locker::connect`](crate::Locker::connect), but goes on after one that failed wherever
/// there is more to be told, and looks at what is not worth failing for: room, latency, limits, what the store does not
/// enforce. A URL that names several PostgreSQL servers has all of them looked at.
///
/// Each step is bounded by the query timeout. Nothing is left on the server or in the directory.
///
/// # Errors
///
/// [`Error::Options`] and [`Error::Url`] for what cannot be used. All else is told by the [`Diagnosis`].
///
/// # Cancel safety
///
/// Dropped in the middle it leaves nothing open.
///
/// # Examples
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), leasehold::Error> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let url = format!("file:{}/leases", dir.path().display());
/// use leasehold::{Options, Verdict};
///
/// let diagnosis = leasehold::diagnose(&url, &Options::default()).await?;
/// assert!(diagnosis.is_go(), "{diagnosis}");
/// for check in diagnosis.checks.iter().filter(|check| check.verdict != Verdict::Good) {
///     println!("{check}");
/// }
/// # Ok(()) }
/// ```
pub async fn diagnose(url: &str, options: &Options) -> Result<Diagnosis, Error> {
    let location = Location::of_url(url)?;
    options.validate()?;
    Ok(match location {
        Location::Directory(dir) => file::examine(&dir, options).await,
        #[cfg(feature = "postgres")]
        Location::Postgres(targets) => crate::store::postgres::examine(&targets, options).await,
        #[cfg(feature = "redis")]
        Location::Redis(target) => crate::store::redis::examine(&target, options).await,
    })
}
