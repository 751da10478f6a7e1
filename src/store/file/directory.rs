//! The directory of the file store: whether locks in it can be trusted.

use std::fs::{self, DirBuilder, OpenOptions, TryLockError};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use rand::RngExt;

use crate::error::{ConnectError, LossCause};

/// The sub-directory of the sessions' sockets.
pub(super) const PEERS: &str = "peers";

/// Makes the directory where it is missing, and tries out what the store does in it. A failure leaves nothing behind.
pub(super) fn prepare(path: &Path) -> Result<(), ConnectError> {
    let peers = path.join(PEERS);
    let missing: Vec<&Path> = peers.ancestors().take_while(|ancestor| !ancestor.exists()).collect();
    try_out(path).inspect_err(|_| {
        // Deepest first. One that somebody has put something into meanwhile stays.
        for made in missing {
            let _ = fs::remove_dir(made);
        }
    })
}

fn try_out(path: &Path) -> Result<(), ConnectError> {
    make(path)?;
    check_file_system(path)?;
    make_peers_in(path)?;
    try_a_lock(path)
}

/// Makes the directory where it is missing.
pub(super) fn make(path: &Path) -> Result<(), ConnectError> {
    let mut private = DirBuilder::new();
    private.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut private, 0o700);
    private.create(path).map_err(|error| match error.kind() {
        ErrorKind::NotFound => refused_with(path, "no directory can be made there: choose another", error),
        _ => refused(path, error),
    })
}

/// Makes the sub-directory of the sockets, where there are such sockets.
pub(super) fn make_peers_in(path: &Path) -> Result<(), ConnectError> {
    let peers = path.join(PEERS);
    if cfg!(unix) { make_peers(&peers).map_err(|error| refused(&peers, error)) } else { Ok(()) }
}

/// Makes the sub-directory of the sockets. The directory above guards it, so the umask may decide who shares it.
pub(super) fn make_peers(peers: &Path) -> io::Result<()> {
    match fs::create_dir(peers) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists || !peers.is_dir() => Err(error),
        _ => Ok(()),
    }
}

/// Takes a lock on a file that is opened twice: one has it, the other does not, and gets it afterwards.
pub(super) fn try_a_lock(path: &Path) -> Result<(), ConnectError> {
    let probe = path.join(format!("probe-{:016x}.tmp", random()));
    let locked = lock_in_turns(&probe);
    // Where it could not be made there is nothing to remove.
    let removed = fs::remove_file(&probe);
    locked.and(removed).map_err(|error| refused(path, error))
}

fn lock_in_turns(probe: &Path) -> io::Result<()> {
    let mut options = OpenOptions::new();
    options.read(true).write(true);
    let one = options.clone().create_new(true).open(probe)?;
    let other = options.open(probe)?;
    one.try_lock()?;
    match other.try_lock() {
        Err(TryLockError::WouldBlock) => {}
        Err(TryLockError::Error(error)) => return Err(error),
        // What grants a lock twice has none.
        Ok(()) => return Err(ErrorKind::Unsupported.into()),
    }
    one.unlock()?;
    other.try_lock().map_err(io::Error::from)
}

/// A number for a name that nobody else has or will have.
pub(super) fn random() -> u64 {
    rand::make_rng::<rand::rngs::StdRng>().random()
}

/// The directory as one session has found it, kept open so that its inode number is not given to another.
#[derive(Debug)]
pub(super) struct Directory {
    path: PathBuf,
    #[cfg(unix)]
    handle: fs::File,
}

impl Directory {
    /// Opens a directory that exists. It is not made anew: whoever still holds locks in one that was removed would
    /// not be seen in the new one.
    pub(super) fn open(path: PathBuf) -> Result<Self, ConnectError> {
        let is_directory = fs::metadata(&path).map_err(|error| refused(&path, error))?.is_dir();
        if !is_directory {
            return Err(refused(&path, ErrorKind::NotADirectory.into()));
        }
        check_file_system(&path)?;
        #[cfg(unix)]
        let handle = fs::File::open(&path).map_err(|error| refused(&path, error))?;
        Ok(Self {
            path,
            #[cfg(unix)]
            handle,
        })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Ends a session whose directory was replaced by another: its peers look for its socket in the new one. One that
    /// is merely gone fails the asks, each with its reason.
    #[cfg(unix)]
    pub(super) fn check(&self) -> Result<(), LossCause> {
        let (Ok(opened), Ok(there)) = (self.handle.metadata(), fs::metadata(&self.path)) else {
            return Ok(());
        };
        if inode(&opened) == inode(&there) {
            return Ok(());
        }
        Err(LossCause::Closed {
            reason: format!("the directory {} was replaced by another", self.path.display()),
            sqlstate: None,
        })
    }

    #[cfg(not(unix))]
    #[expect(clippy::unused_self, clippy::unnecessary_wraps, reason = "the interface of the other platforms")]
    pub(super) fn check(&self) -> Result<(), LossCause> {
        Ok(())
    }
}

/// What tells a file from every other one that exists.
#[cfg(unix)]
pub(super) fn inode(metadata: &fs::Metadata) -> (u64, u64) {
    use std::os::unix::fs::MetadataExt;
    (metadata.dev(), metadata.ino())
}

pub(super) fn refused(path: &Path, error: io::Error) -> ConnectError {
    refused_with(path, remedy(&error), error)
}

fn refused_with(path: &Path, remedy: &'static str, error: io::Error) -> ConnectError {
    ConnectError::Directory { path: path.to_owned(), remedy, source: error.into() }
}

/// Says what to change so that a file operation succeeds.
pub(super) fn remedy(error: &io::Error) -> &'static str {
    #[cfg(unix)]
    match rustix::io::Errno::from_io_error(error) {
        Some(rustix::io::Errno::MFILE) => {
            return "raise the limit of open files (ulimit -n), or contend for fewer names";
        }
        Some(rustix::io::Errno::NFILE) => return "raise the system's limit of open files (fs.file-max)",
        Some(rustix::io::Errno::NOLCK) => {
            return "raise the system's limit of locks, or contend for fewer names";
        }
        _ => {}
    }
    match error.kind() {
        ErrorKind::NotFound => {
            "the directory was removed: create it again when no process holds a lease in it any more"
        }
        ErrorKind::PermissionDenied => {
            "let the user that this process runs as create and write it, and all replicas run as that user; or choose \
             another directory"
        }
        ErrorKind::ReadOnlyFilesystem => "choose a directory on a file system that can be written",
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => "free space or inodes on its disk",
        ErrorKind::AlreadyExists | ErrorKind::IsADirectory | ErrorKind::NotADirectory => {
            "something else stands in its place: remove that, or choose another directory"
        }
        ErrorKind::Unsupported => "its file system has no locks: choose a directory on a local disk",
        _ => "mend what the system names, or choose another directory",
    }
}

/// Refuses file systems that others mount too: their locks may be lost unnoticed, or not reach the other hosts.
pub(super) fn check_file_system(path: &Path) -> Result<(), ConnectError> {
    match network_file_system(path).map_err(|error| refused(path, error))? {
        None => Ok(()),
        Some(file_system) => Err(ConnectError::NetworkFileSystem { path: path.to_owned(), file_system }),
    }
}

#[cfg(any(target_os = "linux", target_os = "android"))]
fn network_file_system(path: &Path) -> io::Result<Option<&'static str>> {
    Ok(network_magic(rustix::fs::statfs(path)?.f_type.into()))
}

/// `f_type` of statfs(2), a type of another width and sign on each platform: only its 32 bits count.
#[cfg(any(target_os = "linux", target_os = "android"))]
const fn network_magic(f_type: i128) -> Option<&'static str> {
    match f_type & 0xFFFF_FFFF {
        0x6969 => Some("NFS"),
        0x517B => Some("SMB"),
        0xFE53_4D42 => Some("SMB2"),
        0xFF53_4D42 => Some("CIFS"),
        _ => None,
    }
}

#[cfg(any(target_vendor = "apple", target_os = "freebsd"))]
fn network_file_system(path: &Path) -> io::Result<Option<&'static str>> {
    let bytes = rustix::fs::statfs(path)?.f_fstypename.map(|c| c.to_ne_bytes()[0]);
    Ok(match bytes.split(|byte| *byte == 0).next() {
        Some(b"nfs") => Some("NFS"),
        Some(b"smbfs") => Some("SMB"),
        _ => None,
    })
}

#[cfg(not(any(target_os = "linux", target_os = "android", target_vendor = "apple", target_os = "freebsd")))]
#[expect(clippy::unnecessary_wraps, reason = "the interface of the other platforms")]
const fn network_file_system(_: &Path) -> io::Result<Option<&'static str>> {
    Ok(None)
}

#[cfg(test)]
#[cfg(target_os = "linux")]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn network_file_systems_are_told_by_their_magic_whatever_its_width() {
        for (magic, name) in [
            (0x6969, Some("NFS")),
            (0x517B, Some("SMB")),
            (0xFE53_4D42, Some("SMB2")),
            (0xFF53_4D42, Some("CIFS")),
            (i128::from(0xFF53_4D42_u32.cast_signed()), Some("CIFS")),
            (0xEF53, None),
            (0x0102_1994, None),
            (0x794C_7630, None),
        ] {
            assert_eq!(network_magic(magic), name, "{magic:#x}");
        }
    }

    #[test]
    fn a_missing_directory_is_made_private_and_an_existing_one_keeps_its_mode() {
        let base = tempfile::tempdir().unwrap();
        fs::set_permissions(base.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let dir = base.path().join("a/b");
        prepare(&dir).unwrap();
        assert_eq!((mode(base.path()), mode(&base.path().join("a")), mode(&dir)), (0o755, 0o700, 0o700));

        fs::set_permissions(&dir, fs::Permissions::from_mode(0o750)).unwrap();
        prepare(&dir).unwrap();
        assert_eq!(mode(&dir), 0o750);
        let left: Vec<_> = fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, [PEERS], "the probe is gone");
    }

    #[test]
    fn a_directory_that_cannot_be_used_is_refused_with_what_to_change() {
        let base = tempfile::tempdir().unwrap();
        let file = base.path().join("file");
        fs::write(&file, "").unwrap();
        for dir in [file.clone(), file.join("below/it"), "/proc/leases".into()] {
            let error = prepare(&dir).unwrap_err();
            assert!(matches!(&error, ConnectError::Directory { path, .. } if *path == dir), "{error:?}");
            assert!(std::error::Error::source(&error).is_some(), "{error:?}");
            assert!(error.to_string().contains("choose a"), "{error}");
        }
    }

    #[test]
    fn a_refused_directory_is_left_as_it_was() {
        let base = tempfile::tempdir().unwrap();
        fs::write(base.path().join(PEERS), "in the way").unwrap();
        prepare(base.path()).unwrap_err();
        assert_eq!(fs::read_dir(base.path()).unwrap().count(), 1);

        // A name longer than a file may have: its parents can be made, it cannot.
        let dir = base.path().join("a/b").join("x".repeat(300));
        prepare(&dir).unwrap_err();
        assert!(!base.path().join("a").exists());
    }
}
