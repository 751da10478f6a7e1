//! Names of what is contended for, and the keys that stores know them by.

use std::borrow::Cow;
use std::cmp::Ordering;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use sha2::{Digest, Sha256};

/// Most bytes that a name may have: 1 KiB.
pub const MAX_NAME_BYTES: usize = 1024;

/// The first half of the keys that mark sessions on PostgreSQL: "leas" in ASCII. No name has such a key.
pub(crate) const MARKERS: i32 = 0x6c65_6173;

/// The first half of the keys by which a session on PostgreSQL shows that it waits to write: "leaw" in ASCII. No name has such
/// a key. The second half is a part of the hash of what is waited for: where two keys share it, readers of the one are kept
/// out as well while somebody waits to write the other.
pub(crate) const INTENTS: i32 = 0x6c65_6177;

/// The name of what is contended for: all replicas of a deployment agree on it.
///
/// Most are text. Names are compared byte by byte: no case folding, no Unicode normalisation. Any text makes a `Name`; the
/// verbs refuse an empty one and one of more than [`MAX_NAME_BYTES`] bytes with a [`NameError`].
///
/// ```
/// use leasehold::Name;
///
/// let name = Name::from("sweeper");
/// assert_eq!(name.as_str(), "sweeper");
/// assert!(Name::from("").validate().is_err());
/// ```
///
/// Others stand for a key that programs without leasehold use: [`Name::key`], [`Name::key_pair`] and [`Name::autumn`].
/// Those of a [`Scope`](crate::Scope) come from it. The debug form tells them apart: only that of text is in quotes.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(Is);

/// What a name is.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Is {
    Text(Arc<str>),
    Key(i64, Shown),
    Pair(i32, i32, Shown),
    Autumn(Arc<str>, Shown),
    Scoped { scope: Cow<'static, str>, bytes: Arc<[u8]>, shown: Shown },
}

/// How a name that is not text shows itself: it follows from the rest, or is for people alone, so it makes no difference.
#[derive(Clone, Eq)]
pub(crate) struct Shown(Arc<str>);

impl PartialEq for Shown {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl PartialOrd for Shown {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Shown {
    fn cmp(&self, _: &Self) -> Ordering {
        Ordering::Equal
    }
}

impl Hash for Shown {
    fn hash<H: Hasher>(&self, _: &mut H) {}
}

impl Name {
    /// Stands for exactly this key of PostgreSQL, as in `pg_advisory_lock(42)`, whatever the verb: for moving over, replica
    /// by replica, from code that uses it.
    ///
    /// Whoever does not use leasehold is not told who waits, and tells nobody of a release: a standby notices it at its
    /// next poll. On other stores such a name is like any other.
    ///
    /// ```
    /// use leasehold::{Key, Kind, Name};
    ///
    /// let name = Name::key(42);
    /// assert_eq!(name.to_string(), "key:42");
    /// assert_eq!(Key::of(Kind::Lease, &name).get(), 42);
    /// assert_eq!(Key::of(Kind::Lease, &name), Key::of(Kind::Lock, &name));
    /// ```
    #[must_use]
    pub fn key(key: i64) -> Self {
        Self(Is::Key(key, Shown(format!("key:{key}").into())))
    }

    /// Stands for exactly this key of PostgreSQL, as in `pg_advisory_lock(1, 2)`, whatever the verb. It is as
    /// [`Name::key`] otherwise. Pairs never contend with keys of 64 bits.
    ///
    /// ```
    /// use leasehold::{Key, Kind, Name};
    ///
    /// let name = Name::key_pair(1, 2);
    /// assert_eq!(name.to_string(), "key:1,2");
    /// assert_eq!(Key::of(Kind::Lease, &name).pair(), Some((1, 2)));
    /// ```
    #[must_use]
    pub fn key_pair(first: i32, second: i32) -> Self {
        Self(Is::Pair(first, second, Shown(format!("key:{first},{second}").into())))
    }

    /// Stands for the key that autumn's locks have of this name, whatever the verb: the first 8 bytes, big-endian, of
    /// SHA-256 over `autumn:lock:v1`, a NUL byte, and the name. It is as [`Name::key`] otherwise.
    ///
    /// ```
    /// use leasehold::{Key, Kind, Name};
    ///
    /// let name = Name::autumn("nightly-cleanup");
    /// assert_eq!(name.to_string(), "autumn:nightly-cleanup");
    /// assert_eq!(Key::of(Kind::Lease, &name).get(), 8_196_277_404_596_522_564);
    /// ```
    #[must_use]
    pub fn autumn(name: &str) -> Self {
        Self(Is::Autumn(name.into(), Shown(format!("autumn:{}", word(name)).into())))
    }

    /// A name in a scope. `shown`: how it shows there, made by [`word`] or as safe.
    pub(crate) fn scoped(scope: Cow<'static, str>, bytes: &[u8], shown: &str) -> Self {
        let shown = Shown(format!("{}/{shown}", word(&scope)).into());
        Self(Is::Scoped { scope, bytes: bytes.into(), shown })
    }

    /// How a name in a scope shows there.
    pub(crate) fn shown_in_scope(&self) -> Option<&str> {
        match &self.0 {
            Is::Scoped { scope, shown, .. } => shown.0.strip_prefix(&*word(scope))?.strip_prefix('/'),
            _ => None,
        }
    }

    pub(crate) const fn is(&self) -> &Is {
        &self.0
    }

    /// Gives the text of the name. One that is not text gives how it is shown: `key:42`, `invoice/42`. A text may look
    /// the same and be another name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        match &self.0 {
            Is::Text(text) => text,
            Is::Key(_, shown) | Is::Pair(_, _, shown) | Is::Autumn(_, shown) | Is::Scoped { shown, .. } => {
                &shown.0
            }
        }
    }

    /// Tells whether the verbs will take this name.
    ///
    /// # Errors
    ///
    /// [`NameError::Empty`] for an empty name, [`NameError::TooLong`] for one of more than [`MAX_NAME_BYTES`] bytes, that
    /// of its scope included, [`NameError::Reserved`] for a key that leasehold uses itself.
    pub fn validate(&self) -> Result<(), NameError> {
        let (bytes, of_scope) = match &self.0 {
            Is::Text(text) | Is::Autumn(text, _) => (text.len(), 0),
            Is::Scoped { scope, bytes, .. } => (bytes.len(), scope.len()),
            &Is::Pair(first @ (MARKERS | INTENTS), second, _) => {
                return Err(NameError::Reserved { first, second });
            }
            Is::Pair(..) | Is::Key(..) => return Ok(()),
        };
        match bytes + of_scope {
            _ if bytes == 0 => Err(NameError::Empty),
            1..=MAX_NAME_BYTES => Ok(()),
            bytes => Err(NameError::TooLong { bytes }),
        }
    }
}

/// One word for people: as it is if nobody can take it for anything else, else in quotes and escaped.
pub(crate) fn word(text: &str) -> String {
    let is_plain = |c: char| c.is_alphanumeric() || "-._~:@+=".contains(c);
    if !text.is_empty() && text.chars().all(is_plain) { text.to_owned() } else { format!("{text:?}") }
}

impl<T: AsRef<str> + ?Sized> From<&T> for Name {
    fn from(name: &T) -> Self {
        Self(Is::Text(name.as_ref().into()))
    }
}

impl From<String> for Name {
    fn from(name: String) -> Self {
        Self(Is::Text(name.into()))
    }
}

impl From<&Self> for Name {
    fn from(name: &Self) -> Self {
        name.clone()
    }
}

/// Text in quotes and escaped; all else as it is shown, which never begins with a quote unless its scope has to.
impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Is::Text(text) => fmt::Debug::fmt(text, f),
            _ => f.write_str(self.as_str()),
        }
    }
}

/// As [`Name::as_str`].
impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self.as_str(), f)
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
    /// The name stands for a key that leasehold uses itself on PostgreSQL.
    #[error(
        "the key ({first}, {second}) can be no name's: leasehold uses the pairs that begin with {first} itself"
    )]
    Reserved {
        /// The first half of the key.
        first: i32,
        /// The second half of the key.
        second: i32,
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
    pub(crate) const fn label(self) -> &'static str {
        match self {
            Self::Lease => "lease",
            Self::Lock => "lock",
            Self::RwLock => "rwlock",
        }
    }

    const fn label_in_scope(self) -> &'static str {
        match self {
            Self::Lease => "lease+scope",
            Self::Lock => "lock+scope",
            Self::RwLock => "rwlock+scope",
        }
    }
}

/// The key by which a store knows a name: 64 bits, but for [pairs](Name::key_pair).
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
///
/// A name [in a scope](crate::Scope) has the kind `<kind>+scope`, and for a name the length of that of its scope in
/// bytes, a colon, the scope's name, and its own bytes:
///
/// | kind | scope | name | key |
/// |---|---|---|---|
/// | lock | `invoice` | `42` | 1225849170640561399 |
/// | lock | `ab` | `c` | 4101606890099709318 |
/// | lock | `a` | `bc` | -1004269782233755194 |
/// | lease | `invoice` | `42` | -5276656053616982084 |
/// | lock | `delta` | `-7` | 2060346048585824907 |
/// | lock | `blob` | the bytes 0 and 255 | 4212002534241787226 |
///
/// ```sql
/// SELECT ('x' || encode(substr(sha256('leasehold/v1/lock+scope'::bytea || '\x00'::bytea
///        || convert_to('7:invoice' || 42, 'UTF8')), 1, 8), 'hex'))::bit(64)::bigint;
/// ```
///
/// [`Name::key`], [`Name::key_pair`] and [`Name::autumn`] name keys of others, which are the same for each kind. A pair of
/// 32-bit integers is a key of its own: PostgreSQL never takes it for one of 64 bits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key(Width);

/// The two lock spaces of PostgreSQL.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Width {
    Whole(i64),
    Pair(i32, i32),
}

impl Key {
    /// The key that everybody who waits for this one holds in shared mode, on a store whose lock table tells who waits.
    pub(crate) fn waiting(self) -> Self {
        Self::hash("waiting", [self.to_string().as_bytes()])
    }

    /// What a transaction shares that is fenced by a lease of this key, or by a reader's: see `store::postgres::fence`.
    #[cfg(feature = "postgres")]
    pub(crate) fn barrier(self, is_read: bool) -> Self {
        Self::hash(if is_read { "read barrier" } else { "barrier" }, [self.to_string().as_bytes()])
    }

    /// The first half of the keys of its terms, or of those of readers: see `store::postgres::fence`.
    #[cfg(feature = "postgres")]
    pub(crate) fn term_class(self, is_read: bool) -> i32 {
        let hash = Self::hash(if is_read { "read term" } else { "term" }, [self.to_string().as_bytes()]);
        (hash.get() >> 32) as i32
    }

    /// The key of which a lock table shows the two halves in one number, and which space it is of: 1 for 64 bits, 2 for
    /// pairs. `None`: there is no other.
    #[cfg(feature = "postgres")]
    pub(crate) const fn shown(number: i64, space: i32) -> Option<Self> {
        match space {
            1 => Some(Self(Width::Whole(number))),
            #[expect(clippy::cast_possible_truncation, reason = "the lower half")]
            2 => Some(Self::of_pair((number >> 32) as i32, number as i32)),
            _ => None,
        }
    }

    pub(crate) const fn of_pair(first: i32, second: i32) -> Self {
        Self(Width::Pair(first, second))
    }

    /// Maps a name to its key. Total: any name has one, also one that the verbs refuse.
    #[must_use]
    pub fn of(kind: Kind, name: impl Into<Name>) -> Self {
        match name.into().is() {
            Is::Text(text) => Self::hash(kind.label(), [text.as_bytes()]),
            &Is::Key(key, _) => Self(Width::Whole(key)),
            &Is::Pair(first, second, _) => Self::of_pair(first, second),
            Is::Autumn(name, _) => Self::digest(["autumn:lock:v1", "\0", name].map(str::as_bytes)),
            Is::Scoped { scope, bytes, .. } => {
                let length = format!("{}:", scope.len());
                Self::hash(kind.label_in_scope(), [length.as_bytes(), scope.as_bytes(), bytes])
            }
        }
    }

    fn hash<const N: usize>(kind: &str, parts: [&[u8]; N]) -> Self {
        Self::digest([b"leasehold/v1/", kind.as_bytes(), &[0]].into_iter().chain(parts))
    }

    fn digest<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> Self {
        let mut digest = Sha256::new();
        for part in parts {
            digest.update(part);
        }
        let mut first = [0; 8];
        first.copy_from_slice(&digest.finalize()[..8]);
        Self(Width::Whole(i64::from_be_bytes(first)))
    }

    /// Gives the key as the signed number that SQL shows. Of a [pair](Self::pair), the two halves in one number, the
    /// first one as the upper half: that number as a key is another key.
    #[must_use]
    pub const fn get(self) -> i64 {
        match self.0 {
            Width::Whole(key) => key,
            Width::Pair(first, second) => ((first as i64) << 32) | second.cast_unsigned() as i64,
        }
    }

    /// Gives the two halves of a key that is a pair of 32-bit integers: [`Name::key_pair`].
    #[must_use]
    pub const fn pair(self) -> Option<(i32, i32)> {
        match self.0 {
            Width::Whole(_) => None,
            Width::Pair(first, second) => Some((first, second)),
        }
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({self})")
    }
}

/// Prints the key as 16 hexadecimal digits; a pair as 8, a dash, and 8.
impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Width::Whole(key) => write!(f, "{key:016x}"),
            Width::Pair(first, second) => write!(f, "{first:08x}-{second:08x}"),
        }
    }
}

/// Reads the hexadecimal digits that [`Display`](fmt::Display) prints.
impl std::str::FromStr for Key {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let half = |text| u32::from_str_radix(text, 16).map(u32::cast_signed);
        match text.split_once('-') {
            Some((first, second)) => Ok(Self::of_pair(half(first)?, half(second)?)),
            None => u64::from_str_radix(text, 16).map(|bits| Self(Width::Whole(bits.cast_signed()))),
        }
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

    /// L-15, L-20: the vectors of scoped names too, which `scope.rs` pins.
    #[test]
    fn the_documented_vectors_of_scopes_are_the_computed_ones() {
        use crate::Scope;

        let source = include_str!("name.rs");
        for (kind, name) in [
            (Kind::Lock, Scope::<u64>::new("invoice").name(&42)),
            (Kind::Lock, Scope::<str>::new("ab").name("c")),
            (Kind::Lock, Scope::<str>::new("a").name("bc")),
            (Kind::Lease, Scope::<u64>::new("invoice").name(&42)),
            (Kind::Lock, Scope::<i8>::new("delta").name(&-7)),
            (Kind::Lock, Scope::<[u8]>::new("blob").name(&[0, 255])),
        ] {
            let key = Key::of(kind, &name).get();
            assert!(source.contains(&format!("| {key} |")), "the docs lack {key} of {name}");
        }
    }

    /// L-19: golden vectors, computed with another implementation (Python's hashlib).
    #[test]
    fn the_keys_of_autumn_are_pinned_by_golden_vectors() {
        for (name, key) in [
            ("nightly-cleanup", 8_196_277_404_596_522_564),
            ("daily-digest", 5_479_149_427_445_094_842),
            ("link-checker:shard:7", 5_208_121_625_103_246_321),
            ("", -8_886_457_957_962_227_329),
            ("\u{e9}", 8_734_372_192_880_840_647),
        ] {
            for kind in KINDS {
                assert_eq!(Key::of(kind, Name::autumn(name)), Key(Width::Whole(key)), "{name}");
            }
        }
    }

    const KINDS: [Kind; 3] = [Kind::Lease, Kind::Lock, Kind::RwLock];

    /// Pairs at their limits, and as PostgreSQL shows them: unsigned halves, the first one above.
    const PAIRS: [(i32, i32, i64, &str); 5] = [
        (1, 2, 0x1_0000_0002, "00000001-00000002"),
        (0, 0, 0, "00000000-00000000"),
        (-1, -1, -1, "ffffffff-ffffffff"),
        (0, -1, 0xffff_ffff, "00000000-ffffffff"),
        (i32::MIN, i32::MAX, i64::MIN | 0x7fff_ffff, "80000000-7fffffff"),
    ];

    /// L-19: whatever the kind.
    #[test]
    fn keys_of_others_are_exactly_those() {
        for kind in KINDS {
            for key in [42, 0, -1, i64::MIN, i64::MAX] {
                assert_eq!(Key::of(kind, Name::key(key)).get(), key);
                assert_eq!(Key::of(kind, Name::key(key)).pair(), None);
            }
            for (first, second, number, text) in PAIRS {
                let key = Key::of(kind, Name::key_pair(first, second));
                assert_eq!((key.pair(), key.get()), (Some((first, second)), number));
                assert_ne!(key, Key::of(kind, Name::key(number)), "a lock space of its own");
                assert_ne!(key.waiting(), Key::of(kind, Name::key(number)).waiting());
                assert_eq!(key.waiting().pair(), None);
                assert_eq!((key.to_string().as_str(), text.parse()), (text, Ok(key)));
            }
        }
    }

    #[cfg(feature = "postgres")]
    #[test]
    fn a_lock_table_shows_the_key() {
        for (first, second, number, _) in PAIRS {
            assert_eq!(Key::shown(number, 2), Some(Key::of_pair(first, second)));
            assert_eq!(Key::shown(number, 1), Some(Key(Width::Whole(number))));
            assert_eq!(Key::shown(number, 3), None);
        }
    }

    /// L-19: in the debug form only text is in quotes.
    #[test]
    fn names_that_are_not_text_show_what_they_are() {
        for (name, shown) in [
            (Name::key(-42), "key:-42"),
            (Name::key_pair(1, -2), "key:1,-2"),
            (Name::autumn("nightly-cleanup"), "autumn:nightly-cleanup"),
            (Name::autumn("a b\n"), "autumn:\"a b\\n\""),
        ] {
            assert_eq!((name.as_str(), name.to_string().as_str()), (shown, shown));
            assert_eq!(format!("{name:?}"), shown);
            let text = Name::from(shown);
            assert_eq!((text.as_str(), format!("{text:?}")), (shown, format!("{shown:?}")));
            assert_ne!(text, name);
            assert_ne!(Key::of(Kind::Lease, &text), Key::of(Kind::Lease, &name));
        }
    }

    #[test]
    fn a_key_reads_back_from_its_text() {
        for name in ["", "sweeper", "nightly-cleanup"] {
            let key = Key::of(Kind::Lease, name);
            assert_eq!(key.to_string().len(), 16);
            assert_eq!(key.to_string().parse(), Ok(key));
        }
        for foreign in ["", "-", "1-", "-1", "1-2-3", "x", "00000001-0000000g", "00000001-100000000"] {
            assert!(foreign.parse::<Key>().is_err(), "{foreign}");
        }
    }

    #[test]
    fn names_are_refused_at_their_limits_only() {
        assert_eq!(Name::from("").validate(), Err(NameError::Empty));
        assert_eq!(Name::from("x".repeat(1024)).validate(), Ok(()));
        assert_eq!(Name::from("x".repeat(1025)).validate(), Err(NameError::TooLong { bytes: 1025 }));
        assert_eq!(Name::autumn("").validate(), Err(NameError::Empty));
        assert_eq!(Name::key(0).validate(), Ok(()));
        assert_eq!(Name::key_pair(0, 0).validate(), Ok(()));
        assert!(Name::key_pair(INTENTS, 7).validate().is_err());
        let reserved = Name::key_pair(MARKERS, 7).validate().unwrap_err();
        assert_eq!(reserved, NameError::Reserved { first: MARKERS, second: 7 });
        assert!(reserved.to_string().contains("(1818583411, 7)"), "{reserved}");
    }
}
