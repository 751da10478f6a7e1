//! What `diagnose` looks at: what a session is opened with, one by one and going on after what fails.
//!
//! Whatever would have to be made is made in a stand-in, and removed again: the directory of a service must not come
//! into being with the owner of whoever looked.

use std::fs;
use std::path::{Path, PathBuf};

use super::directory::{self, PEERS};
use super::disk::Disk;
use super::{ENFORCEMENT, peers, shortfalls};
use crate::diagnosis::{Check, Diagnosis};
use crate::error::ConnectError;
use crate::options::Options;

const DIRECTORY: &str = "directory";
const FILE_SYSTEM: &str = "file system";
const LOCKS: &str = "locks";
const WAKE_UPS: &str = "wake-ups";
const TTL: &str = "ttl";

/// Looks at a directory.
pub(crate) async fn examine(dir: &Path, options: &Options) -> Diagnosis {
    let (limit, identity) = (options.query_timeout, options.identity.clone());
    let looking = async {
        let path = std::path::absolute(dir).map_err(|error| directory::refused(dir, error))?;
        let disk =
            Disk::new().map_err(|error| super::unreachable(format!("no thread to be had: {error}")))?;
        let looked = disk.run(move || look(&path, &identity)).await;
        looked.ok_or_else(|| super::unreachable("looking at the directory panicked".to_owned()))
    };
    let looked = tokio::time::timeout(limit, looking).await.unwrap_or(Err(ConnectError::Timeout { limit }));
    let mut diagnosis = looked.unwrap_or_else(|error| {
        let hint = Some("see whether the disk answers");
        let mut diagnosis = Diagnosis::default();
        diagnosis.checks.push(Check::bad(DIRECTORY, &error, hint));
        diagnosis.error = Some(error);
        diagnosis
    });
    let reason = format!("it is not enforced: {}", shortfalls().join("; "));
    diagnosis.checks.push(Check::warning(TTL, reason, "where hosts freeze, use a PostgreSQL server"));
    if diagnosis.error.is_none() {
        diagnosis.bounds = Some(ENFORCEMENT.bounds(options, shortfalls()));
    }
    diagnosis
}

/// Where what the store does is tried out.
struct Place<'a> {
    /// The directory that is asked about.
    path: &'a Path,
    /// That one, or its stand-in.
    tried: PathBuf,
    /// The topmost directory of a stand-in, which nobody else knows of.
    stand_in: Option<PathBuf>,
}

impl<'a> Place<'a> {
    fn of(path: &'a Path) -> Self {
        let complete = path.join(PEERS);
        let is_in_the_way = path.symlink_metadata().is_ok() && !path.is_dir();
        if is_in_the_way || complete.symlink_metadata().is_ok() {
            return Self { path, tried: path.to_owned(), stand_in: None };
        }
        let there = path.ancestors().find(|ancestor| ancestor.exists()).unwrap_or(path);
        let top = there.join(format!(".probe-{:016x}.tmp", directory::random()));
        let missing = path.strip_prefix(there).unwrap_or(Path::new(""));
        Self { path, tried: top.join(missing), stand_in: Some(top) }
    }

    /// The error as one of the directory itself.
    fn told(&self, error: ConnectError) -> ConnectError {
        let own =
            |path: PathBuf| path.strip_prefix(&self.tried).map_or(path.clone(), |rest| self.path.join(rest));
        match error {
            ConnectError::Directory { path, remedy, source } => {
                // Without the slash that joining nothing leaves.
                ConnectError::Directory { path: own(path).components().collect(), remedy, source }
            }
            ConnectError::NetworkFileSystem { path, file_system } => {
                ConnectError::NetworkFileSystem { path: own(path).components().collect(), file_system }
            }
            error => error,
        }
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        if let Some(top) = &self.stand_in {
            let _ = fs::remove_dir_all(top);
        }
    }
}

fn look(path: &Path, identity: &str) -> Diagnosis {
    let place = Place::of(path);
    let mut diagnosis = Diagnosis::default();
    let bad = |diagnosis: &mut Diagnosis, what, error| {
        let error = place.told(error);
        diagnosis.checks.push(Check::bad(what, &error, None));
        diagnosis.error.get_or_insert(error);
    };
    if let Err(error) = directory::make(&place.tried) {
        bad(&mut diagnosis, DIRECTORY, error);
        return diagnosis;
    }
    diagnosis.checks.push(of_directory(path));
    match directory::check_file_system(&place.tried) {
        Ok(()) => {
            diagnosis.checks.push(Check::good(FILE_SYSTEM, "not one of those that other hosts mount too"));
        }
        Err(error) => bad(&mut diagnosis, FILE_SYSTEM, error),
    }
    if let Err(error) = directory::make_peers_in(&place.tried) {
        bad(&mut diagnosis, WAKE_UPS, error);
    } else {
        diagnosis.checks.push(match peers::try_out(&place.tried, identity) {
            Ok(()) => Check::good(WAKE_UPS, "a socket was sent to, and received it"),
            Err(error) => Check::warning(
                WAKE_UPS,
                format!("a released lease is noticed at the next poll only, since a socket cannot be used: {error}"),
                "choose a directory with a shorter path, on a file system that has sockets",
            ),
        });
    }
    match directory::try_a_lock(&place.tried) {
        Ok(()) => {
            diagnosis.checks.push(Check::good(LOCKS, "one of two open files had the lock, the other not"));
        }
        Err(error) => bad(&mut diagnosis, LOCKS, error),
    }
    diagnosis
}

/// A directory that can be used.
fn of_directory(path: &Path) -> Check {
    let shown = path.display();
    let Ok(metadata) = fs::metadata(path) else {
        return Check::good(DIRECTORY, format!("{shown} is not there yet, and can be made"));
    };
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt as _;
        let mode = metadata.permissions().mode() & 0o7777;
        if mode & 0o002 != 0 {
            return Check::warning(
                DIRECTORY,
                format!(
                    "{shown} has mode {mode:04o}: everybody on this host can take leases, and spoil them"
                ),
                "let only those write it who are to lead (chmod o-w), or choose a directory of its own",
            );
        }
        Check::good(DIRECTORY, format!("{shown} is there, with mode {mode:04o}"))
    }
    #[cfg(not(unix))]
    {
        let _ = metadata;
        Check::good(DIRECTORY, format!("{shown} is there"))
    }
}
