//! The fencing tokens of the file store: a counter for each key, on disk before it is given.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Write as _};
use std::path::{Path, PathBuf};

use crate::clock;
use crate::fence::FencingToken;
use crate::name::Key;

/// Gives the next token of a key. Only who holds the key's lock may ask.
///
/// The greater of the last one and one, and of the clock: where the counter is lost, the clock has gone on. Replaced as a
/// whole, so that a crash leaves the one or the other.
pub(super) fn next(directory: &Path, key: Key) -> io::Result<FencingToken> {
    let path = directory.join(format!("{key}.token"));
    let last: u64 = match fs::read_to_string(&path) {
        Ok(text) => text.trim().parse().unwrap_or_else(|_| {
            tracing::warn!(path = %path.display(), "there is no number in it: tokens go on from the clock");
            0
        }),
        Err(error) if error.kind() == ErrorKind::NotFound => 0,
        Err(error) => return Err(described(&path, &error)),
    };
    let number = clock::wall_micros().max(last.saturating_add(1));
    keep(directory, &path, &number).map_err(|error| described(&path, &error))?;
    FencingToken::new(number).ok_or_else(|| io::Error::other(format!("{} is at its end", path.display())))
}

/// Replaces a file of one line as a whole, so that a crash leaves the old or the new one. Only who holds the lock of the key
/// may.
pub(super) fn keep(directory: &Path, path: &Path, line: &impl fmt::Display) -> io::Result<()> {
    let mut draft = path.as_os_str().to_owned();
    draft.push(".new");
    let draft = PathBuf::from(draft);
    // A link or a file that somebody has left there is not written through.
    match fs::remove_file(&draft) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = File::create_new(&draft)?;
    writeln!(file, "{line}")?;
    file.sync_all()?;
    fs::rename(&draft, path)?;
    // The name too has to be there after a crash.
    if cfg!(unix) { File::open(directory)?.sync_all() } else { Ok(()) }
}

fn described(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("cannot keep a fencing token in {}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::name::Kind;

    /// T-01, T-07, on files: also after the clock went back, and after the loss of the counter.
    #[test]
    fn tokens_grow_whatever_happens_to_the_counter_or_to_the_clock() {
        let dir = tempfile::tempdir().unwrap();
        let key = Key::of(Kind::Lease, "job");
        let path = dir.path().join(format!("{key}.token"));
        let first = next(dir.path(), key).unwrap();
        let second = next(dir.path(), key).unwrap();
        assert!(second > first);
        // To the counter, the clock has gone back by a day.
        let ahead = second.get() + 86_400_000_000;
        fs::write(&path, format!("{ahead}\n")).unwrap();
        assert_eq!(next(dir.path(), key).unwrap().get(), ahead + 1);
        for garbage in ["", "nonsense", "-1"] {
            fs::write(&path, garbage).unwrap();
            assert!(next(dir.path(), key).unwrap() > second, "{garbage:?}");
        }
        fs::remove_file(&path).unwrap();
        assert!(next(dir.path(), key).unwrap() > second);
    }

    #[test]
    fn a_counter_that_cannot_be_kept_gives_no_token() {
        let dir = tempfile::tempdir().unwrap();
        let key = Key::of(Kind::Lease, "job");
        fs::create_dir(dir.path().join(format!("{key}.token"))).unwrap();
        next(dir.path(), key).unwrap_err();
        let other = Key::of(Kind::Lease, "other");
        fs::write(dir.path().join(format!("{other}.token")), u64::MAX.to_string()).unwrap();
        next(dir.path(), other).unwrap_err();
    }
}
