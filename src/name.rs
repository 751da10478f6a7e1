//! Names of what is contended for, and the 64-bit keys that stores know them by.

use std::fmt;
use std::sync::Arc;

use sha2::{Digest, Sha256};

/// Most bytes that a name may have: 1 KiB.
pub const MAX_NAME_BYTES: usize = 1024;

/// The name of a lease: text that all replicas of a deployment agree on.
///
/// Names are compared byte by byte: no case folding, no Unicode normalisation. Any text makes a `Name`; the verbs
/// refuse an empty one and one of more than [`MAX_NAME_BYTES`] bytes with a [`NameError`].
///
/// ```
/// use leasehold::Name;
///
/// let name = Name::from("sweeper");
/// assert_eq!(name.as_str(), "sweeper");
/// assert!(Name::from("").validate().is_err());
/// ```
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(Arc<str>);

impl Name {
    /// Gives the text of the name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Tells whether the verbs will take this name.
    ///
    /// # Errors
    ///
    /// [`NameError::Empty`] for an empty name, [`NameError::TooLong`] for one of more than [`MAX_NAME_BYTES`] bytes.
    pub fn validate(&self) -> Result<(), NameError> {
        match self.0.len() {
            0 => Err(NameError::Empty),
            1..=MAX_NAME_BYTES => Ok(()),
            bytes => Err(NameError::TooLong { bytes }),
        }
    }
}

impl<T: AsRef<str> + ?Sized> From<&T> for Name {
    fn from(name: &T) -> Self {
        Self(name.as_ref().into())
    }
}

impl From<String> for Name {
    fn from(name: String) -> Self {
        Self(name.into())
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// Why a [`Name`] is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NameError {
    /// The name has no bytes.
    #[error("a name must not be empty: give the job a name that all replicas share, such as \"sweeper\"")]
    Empty,
    /// The name has more than [`MAX_NAME_BYTES`] bytes.
    #[error(
        "a name may have at most {MAX_NAME_BYTES} bytes, this one has {bytes}: shorten it, or use a digest of it"
    )]
    TooLong {
        /// How many bytes it has.
        bytes: usize,
    },
}

/// What a name is used for. Equal names of different kinds never contend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Kind {
    /// A leader's lease: [`Locker::run`](crate::Locker::run).
    Lease,
    /// A critical section, one at a time.
    Lock,
    /// A critical section, many readers or one writer.
    RwLock,
}

impl Kind {
    const fn label(self) -> &'static str {
        match self {
            Self::Lease => "lease",
            Self::Lock => "lock",
            Self::RwLock => "rwlock",
        }
    }
}

/// The 64-bit key by which a store knows a name.
///
/// The key is the first 8 bytes, big-endian, of SHA-256 over `leasehold/v1/<kind>`, a NUL byte, and the name; on
/// PostgreSQL it is the argument of `pg_advisory_lock`. This mapping is part of the public interface: it is the same
/// on every platform and toolchain, and only a major version may change it.
///
/// | kind | name | key |
/// |---|---|---|
/// | lease | *(empty)* | -1951043747994973914 |
/// | lease | `sweeper` | 6967397450550235450 |
/// | lease | `café`, é as one code point | -3952338041569238216 |
/// | lease | `café`, é as e and an accent | -5762222694720751518 |
/// | lease | `a`, NUL, `b` | -6127547694603980999 |
/// | lease | 10,000 times `x` | -1858743123512207816 |
/// | lock | `sweeper` | -8357211186384576236 |
/// | rwlock | `sweeper` | 8221161949109762087 |
///
/// Whoever waits for a key holds another one in shared mode on PostgreSQL: that of the kind `waiting` and the 16
/// hexadecimal digits of the first.
///
/// The same in SQL (PostgreSQL, names in UTF-8):
///
/// ```sql
/// SELECT ('x' || encode(substr(sha256('leasehold/v1/lease'::bytea || '\x00'::bytea
///        || convert_to('sweeper', 'UTF8')), 1, 8), 'hex'))::bit(64)::bigint;
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key(i64);

impl Key {
    /// The key that everybody who waits for this one holds in shared mode, on a store whose lock table tells who waits.
    pub(crate) fn waiting(self) -> Self {
        Self::hash("waiting", &self.to_string())
    }

    /// The key of a number that a lock table shows.
    #[cfg(feature = "postgres")]
    pub(crate) const fn shown(number: i64) -> Self {
        Self(number)
    }

    /// Maps a name to its key. Total: any text has one, also text that the verbs refuse as a name.
    #[must_use]
    pub fn of(kind: Kind, name: &str) -> Self {
        Self::hash(kind.label(), name)
    }

    fn hash(kind: &str, name: &str) -> Self {
        let digest = Sha256::new()
            .chain_update("leasehold/v1/")
            .chain_update(kind)
            .chain_update([0])
            .chain_update(name)
            .finalize();
        let mut first = [0; 8];
        first.copy_from_slice(&digest[..8]);
        Self(i64::from_be_bytes(first))
    }

    /// Gives the key as the signed number that SQL shows.
    #[must_use]
    pub const fn get(self) -> i64 {
        self.0
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({self})")
    }
}

/// Prints the key as 16 hexadecimal digits.
impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// Reads the 16 hexadecimal digits that [`Display`](fmt::Display) prints.
impl std::str::FromStr for Key {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        u64::from_str_radix(text, 16).map(|bits| Self(bits.cast_signed()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// F-03, D23: golden vectors, computed with another implementation (Python's hashlib). They must never change.
    #[test]
    fn keys_are_pinned_by_golden_vectors() {
        let long = "x".repeat(10_000);
        for (kind, name, key) in [
            (Kind::Lease, "", -1_951_043_747_994_973_914),
            (Kind::Lease, "sweeper", 6_967_397_450_550_235_450),
            (Kind::Lease, "nightly-cleanup", -4_763_059_338_616_244_394),
            (Kind::Lease, "caf\u{e9}", -3_952_338_041_569_238_216),
            (Kind::Lease, "cafe\u{301}", -5_762_222_694_720_751_518),
            (Kind::Lease, "a\0b", -6_127_547_694_603_980_999),
            (Kind::Lease, &long, -1_858_743_123_512_207_816),
            (Kind::Lock, "", -759_065_842_677_001_849),
            (Kind::Lock, "sweeper", -8_357_211_186_384_576_236),
            (Kind::Lock, "nightly-cleanup", 3_110_167_724_620_423_385),
            (Kind::RwLock, "", -2_422_145_023_095_012_054),
            (Kind::RwLock, "sweeper", 8_221_161_949_109_762_087),
        ] {
            assert_eq!(Key::of(kind, name).get(), key, "{kind:?} {:?}", &name[..name.len().min(20)]);
        }
    }

    /// F-03: the vectors in the docs are the ones that the code gives, and some of them are above 2^63 as unsigned.
    #[test]
    fn the_documented_vectors_are_the_computed_ones() {
        let source = include_str!("name.rs");
        for key in [Key::of(Kind::Lease, ""), Key::of(Kind::Lease, "sweeper"), Key::of(Kind::Lock, "sweeper")]
        {
            assert!(source.contains(&format!("| {} |", key.get())), "the docs lack {}", key.get());
        }
        assert!(Key::of(Kind::Lease, "").get() < 0);
    }

    #[test]
    fn a_key_reads_back_from_its_text() {
        for name in ["", "sweeper", "nightly-cleanup"] {
            let key = Key::of(Kind::Lease, name);
            assert_eq!(key.to_string().len(), 16);
            assert_eq!(key.to_string().parse(), Ok(key));
        }
    }

    #[test]
    fn names_are_refused_at_their_limits_only() {
        assert_eq!(Name::from("").validate(), Err(NameError::Empty));
        assert_eq!(Name::from("x".repeat(1024)).validate(), Ok(()));
        assert_eq!(Name::from("x".repeat(1025)).validate(), Err(NameError::TooLong { bytes: 1025 }));
    }
}
