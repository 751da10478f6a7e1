//! Which slot of a name was served last: a file for each name.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use super::{directory, tokens};
use crate::name::Key;
use crate::store::slots::{NoSlots, Record};

fn path(directory: &Path, key: Key) -> PathBuf {
    directory.join(format!("{key}.slot"))
}

pub(super) fn read(directory: &Path, key: Key) -> Result<Option<Record>, NoSlots> {
    let path = path(directory, key);
    match fs::read_to_string(&path) {
        // What it does not say might have been served: nobody guesses.
        Ok(text) => text.trim().parse().map(Some).map_err(|()| {
            let path = path.display();
            NoSlots::Forbidden(format!(
                "there is no record of a slot in {path}: remove it, and the present slot is served"
            ))
        }),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed("read", &path, &error)),
    }
}

/// On disk before it returns.
pub(super) fn write(directory: &Path, key: Key, record: &Record) -> Result<(), NoSlots> {
    let path = path(directory, key);
    tokens::keep(directory, &path, record).map_err(|error| failed("write", &path, &error))
}

fn failed(what: &str, path: &Path, error: &io::Error) -> NoSlots {
    let text = format!("cannot {what} {}: {error}: {}", path.display(), directory::remedy(error));
    match error.kind() {
        ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem | ErrorKind::IsADirectory => {
            NoSlots::Forbidden(text)
        }
        _ => NoSlots::Failed(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::name::Kind;
    use crate::store::slots::{Entry, Moment, Phase};

    /// E-04: what a crash leaves half is never taken for a record, nor for none.
    #[test]
    fn a_record_is_replaced_as_a_whole_and_what_is_none_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let key = Key::of(Kind::Lock, "job");
        assert_eq!(read(dir.path(), key), Ok(None));
        for (number, phase) in [(1, Phase::Started), (1, Phase::Finished), (2, Phase::Started)] {
            let entry = Entry { number, at: Moment(5), run: 1, phase, by: "a".to_owned() };
            let record = Record { entry, written: Moment(6) };
            // What a crash in the middle leaves behind is in nobody's way.
            fs::write(dir.path().join(format!("{key}.slot.new")), "slot 7 of").unwrap();
            write(dir.path(), key, &record).unwrap();
            assert_eq!(read(dir.path(), key), Ok(Some(record)));
        }
        for garbage in ["", "nonsense", "slot 7 of"] {
            fs::write(path(dir.path(), key), garbage).unwrap();
            assert!(matches!(read(dir.path(), key), Err(NoSlots::Forbidden(_))), "{garbage:?}");
        }
        fs::remove_file(path(dir.path(), key)).unwrap();
        fs::create_dir(path(dir.path(), key)).unwrap();
        assert!(matches!(read(dir.path(), key), Err(NoSlots::Forbidden(_))));
    }
}
