//! The locks of one session: an open file for each key that it holds.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use super::directory::{self, Directory};
use super::{slots, tokens};
use crate::clock;
use crate::error::LossCause;
use crate::name::{Key, Name};
use crate::store::slots::{self as seam, Amended, Looked, Moment, NoSlots, Record};
use crate::store::{Answer, Ask, Freed, Minted, Mode, Return, text};

/// How often a lock file that is replaced under our hands is opened again. Nobody does that in a loop.
const REPLACEMENTS: usize = 8;

/// How the line in a lock file begins, before the identity.
const GRANTED_TO: &str = "granted to ";

/// Proof of one grant. A later grant of the same key has another number, and is not touched by this one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Held {
    key: Key,
    grant: u64,
}

/// Every lock of one session. Dropped, it unlocks them all.
#[derive(Debug)]
pub(super) struct Locks {
    directory: Directory,
    identity: String,
    grants: u64,
    held: HashMap<Key, Grant>,
    /// By which others see that we wait to write.
    intents: HashMap<Key, Lock>,
}

#[derive(Debug)]
struct Grant {
    /// Of all who hold it here: several readers, or one.
    numbers: Vec<u64>,
    is_shared: bool,
    lock: Lock,
}

impl Locks {
    pub(super) fn identity(&self) -> &str {
        &self.identity
    }

    pub(super) fn new(directory: Directory, identity: String) -> Self {
        Self { directory, identity, grants: 0, held: HashMap::new(), intents: HashMap::new() }
    }

    /// Tells whether the directory is still the one of the session.
    pub(super) fn check_directory(&self) -> Result<(), LossCause> {
        self.directory.check()
    }

    /// Tries to lock a key. A busy one always counts as registered: the socket takes in what is freed from the start of
    /// the session, so to ask again would tell nothing new, nor would it where there are no sockets.
    /// `waits`: it is to be known that we wait.
    pub(super) fn take(&mut self, ask: &Ask, waits: bool) -> Answer<Held> {
        let path = self.path(ask.key);
        self.try_to_take(ask, waits, &path).unwrap_or_else(|error| {
            let remedy = directory::remedy(&error);
            Answer::Failed(format!("cannot lock {}: {error}: {remedy}", path.display()))
        })
    }

    fn try_to_take(&mut self, ask: &Ask, waits: bool, path: &Path) -> io::Result<Answer<Held>> {
        let busy = Answer::Busy { registered: true };
        let number = self.grants + 1;
        let reads = ask.mode == Mode::Read;
        if reads && self.somebody_waits_to_write(ask.key)? {
            return Ok(busy);
        }
        if let Some(grant) = self.held.get_mut(&ask.key) {
            if !reads || !grant.is_shared {
                return Ok(busy);
            }
            grant.numbers.push(number);
        } else if let Some(lock) = acquire(path, ask.mode)? {
            if let Err(error) = lock.sign(&self.identity, &ask.name) {
                tracing::debug!(path = %path.display(), %error, "the lock file does not show who holds it");
            }
            self.held.insert(ask.key, Grant { numbers: vec![number], is_shared: reads, lock });
            self.intents.remove(&ask.key);
        } else if waits && ask.mode == Mode::Write && !self.intents.contains_key(&ask.key) {
            return self.show_intent(ask.key);
        } else {
            return Ok(busy);
        }
        self.grants = number;
        Ok(Answer::Granted(Held { key: ask.key, grant: number }))
    }

    /// Whoever waits to write locks a file of its own, and readers look whether they could lock it. Where only such a look
    /// is in the way, the driver asks once more.
    fn show_intent(&mut self, key: Key) -> io::Result<Answer<Held>> {
        let path = self.intent_path(key);
        let registered = match acquire(&path, Mode::Write)? {
            Some(lock) => {
                self.intents.insert(key, lock);
                true
            }
            None => acquire(&path, Mode::Read)?.is_none(),
        };
        Ok(Answer::Busy { registered })
    }

    fn somebody_waits_to_write(&self, key: Key) -> io::Result<bool> {
        let path = self.intent_path(key);
        // Where nobody ever has, there is no such file.
        Ok(fs::exists(&path)? && acquire(&path, Mode::Read)?.is_none())
    }

    /// We no longer wait for the key. Tells whether readers were kept out by that.
    pub(super) fn withdraw(&mut self, key: Key) -> bool {
        self.intents.remove(&key).is_some()
    }

    /// Ends a grant, and unlocks with the last one; then the key is added to `freed`. Tells whether it was still ours.
    pub(super) fn release(&mut self, lease: &Return<Held>, freed: &mut Vec<Freed>) -> bool {
        let Return { held, is_clean, is_kept: _ } = *lease;
        let path = self.path(held.key);
        let Entry::Occupied(mut entry) = self.held.entry(held.key) else { return false };
        if !entry.get().numbers.contains(&held.grant) {
            return false;
        }
        let is_at = entry.get().lock.is_at(&path);
        entry.get_mut().numbers.retain(|number| *number != held.grant);
        if entry.get().numbers.is_empty() {
            freed.push(Freed { key: held.key, is_clean });
            entry.remove();
        }
        is_at
    }

    /// Unlocks everything and tells which keys that frees.
    pub(super) fn release_all(&mut self) -> Vec<Freed> {
        self.held.drain().map(|(key, _)| Freed { key, is_clean: false }).collect()
    }

    /// Tells whether it is still ours. One that is not is forgotten: its lock is worth nothing.
    pub(super) fn confirm(&mut self, held: Held) -> bool {
        let path = self.path(held.key);
        let Entry::Occupied(entry) = self.held.entry(held.key) else { return false };
        if !entry.get().numbers.contains(&held.grant) {
            return false;
        }
        let ours = entry.get().lock.is_at(&path);
        if !ours {
            entry.remove();
        }
        ours
    }

    /// Makes a fencing token, if it is still ours.
    pub(super) fn mint(&mut self, held: Held) -> Minted {
        if !self.confirm(held) {
            return Minted::Gone;
        }
        tokens::next(self.directory.path(), held.key)
            .map_or_else(|error| Minted::Failed(error.to_string()), Minted::Token)
    }

    /// Looks at the slots of a name. The host's clock is the store's.
    pub(super) fn slots(&self, key: Key) -> Result<Looked, NoSlots> {
        let record = slots::read(self.directory.path(), key)?;
        Ok(Looked { now: Moment(clock::wall_micros()), record })
    }

    /// Sets their record, if the lock is still ours.
    pub(super) fn amend(
        &mut self,
        held: Held,
        key: Key,
        expected: Option<&Record>,
        next: seam::Entry,
    ) -> Amended {
        if !self.confirm(held) {
            return Amended::Gone;
        }
        match slots::read(self.directory.path(), key) {
            Ok(present) if present.as_ref() == expected => {
                let record = Record { entry: next, written: Moment(clock::wall_micros()) };
                match slots::write(self.directory.path(), key, &record) {
                    Ok(()) => Amended::Done(record),
                    Err(error) => Amended::Failed(error),
                }
            }
            Ok(_) => Amended::Changed,
            Err(error) => Amended::Failed(error),
        }
    }

    /// Tells to whom a key was granted last: who holds it, where somebody does.
    pub(super) fn signature(&self, key: Key) -> Option<String> {
        let line = fs::read_to_string(self.path(key)).ok()?;
        // An identity has no blanks.
        Some(line.strip_prefix(GRANTED_TO)?.split_once(' ')?.0.to_owned())
    }

    /// Tells of every key that somebody holds exclusively now, and which process does: where the system shows its locks
    /// to everybody, else nothing. Looking at them takes none, so nobody is refused meanwhile.
    pub(super) fn held(&self) -> Vec<(Key, i32)> {
        let (Ok(table), Ok(entries)) = (fs::read_to_string(LOCK_TABLE), fs::read_dir(self.directory.path()))
        else {
            return Vec::new();
        };
        let holders = read_lock_table(&table);
        let held = |entry: fs::DirEntry| {
            let name = entry.file_name();
            let key = text::read_key(name.to_str()?.strip_suffix(".lock")?)?;
            Some((key, *holders.get(&shown(&entry.metadata().ok()?))?))
        };
        entries.flatten().filter_map(held).collect()
    }

    fn intent_path(&self, key: Key) -> PathBuf {
        self.directory.path().join(format!("{key}.writes"))
    }

    fn path(&self, key: Key) -> PathBuf {
        self.directory.path().join(format!("{key}.lock"))
    }
}

/// Where Linux shows the locks of all processes: proc(5). Those of other pid namespaces it leaves out.
const LOCK_TABLE: &str = "/proc/locks";

/// The exclusive locks on whole files, by the file as the table names it: `12: FLOCK  ADVISORY  WRITE 4711
/// fe:00:5587425 0 EOF` is one of process 4711. A line with an arrow is of one who waits.
fn read_lock_table(table: &str) -> HashMap<String, i32> {
    let lines = table.lines().filter_map(|line| {
        let words: Vec<_> = line.split_whitespace().collect();
        match words.as_slice() {
            [_, "FLOCK", _, "WRITE", pid, file, ..] => Some(((*file).to_owned(), pid.parse().ok()?)),
            _ => None,
        }
    });
    lines.collect()
}

/// A file as the lock table names it.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn shown(metadata: &fs::Metadata) -> String {
    use std::os::unix::fs::MetadataExt;
    let device = metadata.dev();
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    format!("{major:02x}:{minor:02x}:{}", metadata.ino())
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
const fn shown(_: &fs::Metadata) -> String {
    String::new()
}

/// A locked file. Dropped, it is unlocked first and then closed: a forked child keeps a merely closed lock alive.
#[derive(Debug)]
struct Lock {
    file: File,
    #[cfg(unix)]
    inode: (u64, u64),
}

impl Drop for Lock {
    fn drop(&mut self) {
        if let Err(error) = self.file.unlock() {
            tracing::debug!(%error, "a lock file was closed without unlocking it");
        }
    }
}

impl Lock {
    /// Tells whether the path still leads to the locked file, which others would lock. Where that cannot be told, no.
    #[cfg(unix)]
    fn is_at(&self, path: &Path) -> bool {
        match fs::symlink_metadata(path) {
            Ok(there) => directory::inode(&there) == self.inode,
            Err(error) => {
                tracing::debug!(path = %path.display(), %error, "the lock file cannot be looked at");
                false
            }
        }
    }

    /// A file that is open without sharing its deletion cannot be replaced.
    #[cfg(not(unix))]
    #[expect(clippy::unused_self, reason = "the interface of the other platforms")]
    fn is_at(&self, path: &Path) -> bool {
        fs::symlink_metadata(path).is_ok()
    }

    /// Writes who got the lock, for people. It stays after the release, as who got it last. With a shared lock the
    /// last holder shows.
    ///
    /// Cut after the writing, not before: ext4 flushes a file at its closing if it was emptied while open.
    fn sign(&self, identity: &str, name: &Name) -> io::Result<()> {
        let line = format!("{GRANTED_TO}{identity} for {name:?}\n");
        (&self.file).write_all(line.as_bytes())?;
        let bytes = line.len() as u64;
        if self.file.metadata()?.len() > bytes { self.file.set_len(bytes) } else { Ok(()) }
    }
}

enum Attempt {
    Locked(Lock),
    Busy,
    /// The path leads to another file than the one that was opened.
    Replaced,
}

fn acquire(path: &Path, mode: Mode) -> io::Result<Option<Lock>> {
    for _ in 0..REPLACEMENTS {
        match try_lock(open(path)?, path, mode)? {
            Attempt::Locked(lock) => return Ok(Some(lock)),
            Attempt::Busy => return Ok(None),
            Attempt::Replaced => {}
        }
    }
    Err(io::Error::other("something replaces the file all the time"))
}

fn open(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    // In a directory that others may write, a link must not make us create or write a file elsewhere.
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(
        &mut options,
        rustix::fs::OFlags::NOFOLLOW.bits().cast_signed(),
    );
    // FILE_SHARE_READ and FILE_SHARE_WRITE, without FILE_SHARE_DELETE.
    #[cfg(windows)]
    std::os::windows::fs::OpenOptionsExt::share_mode(&mut options, 1 | 2);
    options.open(path)
}

fn try_lock(file: File, path: &Path, mode: Mode) -> io::Result<Attempt> {
    #[cfg(unix)]
    let inode = directory::inode(&file.metadata()?);
    let tried = match mode {
        Mode::Exclusive | Mode::Write => file.try_lock(),
        Mode::Read => file.try_lock_shared(),
    };
    match tried {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => return Ok(Attempt::Busy),
        Err(TryLockError::Error(error)) => return Err(error),
    }
    let lock = Lock {
        file,
        #[cfg(unix)]
        inode,
    };
    Ok(if lock.is_at(path) { Attempt::Locked(lock) } else { Attempt::Replaced })
}

#[cfg(test)]
#[cfg(unix)]
mod tests {
    use super::*;

    #[test]
    fn a_file_replaced_between_open_and_lock_is_not_trusted() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key.lock");
        let opened = open(&path).unwrap();
        fs::remove_file(&path).unwrap();
        let gone = try_lock(opened.try_clone().unwrap(), &path, Mode::Exclusive).unwrap();
        assert!(matches!(gone, Attempt::Replaced));
        fs::write(&path, "").unwrap();
        let replaced = try_lock(opened, &path, Mode::Exclusive).unwrap();
        assert!(matches!(replaced, Attempt::Replaced));

        let lock = acquire(&path, Mode::Exclusive).unwrap().expect("the new file is free");
        assert!(lock.is_at(&path));
    }

    #[test]
    fn the_lock_table_is_read_line_by_line() {
        let table = "1: FLOCK  ADVISORY  WRITE 25132 fe:00:5587425 0 EOF\n\
                     1: -> FLOCK  ADVISORY  WRITE 7 fe:00:5587425 0 EOF\n\
                     2: FLOCK  ADVISORY  READ 25120 fe:00:10133507 0 EOF\n\
                     3: POSIX  ADVISORY  WRITE 8 fe:00:9 0 EOF\n4: FLOCK\n\nnonsense";
        assert_eq!(read_lock_table(table), HashMap::from([("fe:00:5587425".to_owned(), 25132)]));
    }

    #[test]
    fn a_link_in_the_place_of_a_lock_file_is_an_error_and_not_a_lock() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key.lock");
        let elsewhere = dir.path().join("elsewhere");
        std::os::unix::fs::symlink(&elsewhere, &path).unwrap();
        acquire(&path, Mode::Exclusive).unwrap_err();
        assert!(!elsewhere.exists());
    }

    #[test]
    fn a_copy_of_the_descriptor_as_a_forked_child_has_it_does_not_keep_a_released_lock() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key.lock");
        let lock = acquire(&path, Mode::Exclusive).unwrap().unwrap();
        let _child = lock.file.try_clone().unwrap();
        assert!(acquire(&path, Mode::Exclusive).unwrap().is_none());
        drop(lock);
        assert!(acquire(&path, Mode::Exclusive).unwrap().is_some());
    }

    #[test]
    fn the_line_in_the_file_names_the_last_holder_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key.lock");
        for name in ["a long name with\na line end and \"quotes\"", "short"] {
            let lock = acquire(&path, Mode::Exclusive).unwrap().unwrap();
            lock.sign("host:1-a", &Name::from(name)).unwrap();
            drop(lock);
            let text = fs::read_to_string(&path).unwrap();
            assert_eq!(text, format!("granted to host:1-a for {name:?}\n"));
            assert_eq!(text.lines().count(), 1);
        }
    }
}
