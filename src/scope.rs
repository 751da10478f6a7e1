//! Scopes: families of names of one type, which nothing outside of them can contend with.

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;
use std::time::Duration;

use crate::name::{self, MAX_NAME_BYTES, Name};
use crate::options::MAX_TTL;

/// A family of names, all of one type: a constant that the whole program shares.
///
/// Names of different scopes are never the same, nor is one of a scope and one without: what stands where is part of the
/// [key](crate::Key), so that ("ab", "c") and ("a", "bc") differ.
///
/// ```
/// use std::time::Duration;
/// use leasehold::Scope;
///
/// /// One lock for each invoice.
/// pub const INVOICES: Scope<u64> = Scope::new("invoice").ttl(Duration::from_secs(30));
/// pub const CUSTOMERS: Scope<str> = Scope::new("customer");
///
/// assert_eq!(INVOICES.name(&42).to_string(), "invoice/42");
/// assert_eq!(CUSTOMERS.name("acme").to_string(), "customer/acme");
/// ```
///
/// The type of its names is checked:
///
/// ```compile_fail,E0308
/// # use leasehold::Scope;
/// const INVOICES: Scope<u64> = Scope::new("invoice");
/// INVOICES.name("42"); // expected `&u64`, found `&str`
/// ```
///
/// So is its own name, where the scope is a constant:
///
/// ```compile_fail,E0080
/// # use leasehold::Scope;
/// const NAMELESS: Scope<u64> = Scope::new("");
/// # NAMELESS.name(&42);
/// ```
pub struct Scope<N: ?Sized> {
    name: &'static str,
    pub(crate) ttl: Option<Duration>,
    names: PhantomData<fn(&N)>,
}

impl<N: ?Sized> Scope<N> {
    /// Makes a scope. Its name says what its names are of, as `invoice`.
    ///
    /// Scopes of the same name are the same scope, whatever their types.
    ///
    /// # Panics
    ///
    /// If the name is empty or has [`MAX_NAME_BYTES`] bytes or more, since those of the names count too. The compiler says
    /// so where the scope is a constant.
    #[must_use]
    pub const fn new(name: &'static str) -> Self {
        assert!(
            !name.is_empty(),
            "the name of a scope must not be empty: say what its names are of, such as \"invoice\""
        );
        assert!(name.len() < MAX_NAME_BYTES, "the name of a scope leaves no room for names: shorten it");
        Self { name, ttl: None, names: PhantomData }
    }

    /// Sets how long, at least, a store keeps a lock of this scope for a holder that has fallen silent, where each of its locks has a
    /// time to live of its own. It is never less than the ttl of [`Options::bounds`](crate::Options::bounds), which is the
    /// default. PostgreSQL and files free locks with their session, and do not use it.
    ///
    /// # Panics
    ///
    /// If it is zero, or more than [`MAX_TTL`]. The compiler says so where the scope is a constant.
    #[must_use]
    pub const fn ttl(self, ttl: Duration) -> Self {
        assert!(!ttl.is_zero(), "the ttl of a scope must not be zero");
        assert!(ttl.as_nanos() <= MAX_TTL.as_nanos(), "the ttl of a scope is longer than MAX_TTL");
        Self { ttl: Some(ttl), ..self }
    }
}

impl<N: ScopedName + ?Sized> Scope<N> {
    /// Names one of them. The verbs refuse one without bytes, and one that has with its scope more than
    /// [`MAX_NAME_BYTES`] bytes.
    #[must_use]
    pub fn name(&self, name: &N) -> Name {
        let bytes = name.name_bytes();
        let shown = as_a_word(&bytes, &fmt::from_fn(|f| name.show_name(f)).to_string());
        Name::scoped(Cow::Borrowed(self.name), &bytes, &shown)
    }
}

impl<N: ?Sized> Clone for Scope<N> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<N: ?Sized> Copy for Scope<N> {}

impl<N: ?Sized> fmt::Debug for Scope<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scope").field("name", &self.name).field("ttl", &self.ttl).finish()
    }
}

/// What can be a name in a [`Scope`].
///
/// | type | its bytes |
/// |---|---|
/// | `str`, `String` | those of the text |
/// | integers | those of the decimal digits, a minus sign before them where it is negative: the same for each type |
/// | `[u8]`, `Vec<u8>`, `[u8; N]` | the same |
///
/// A type of your own gives bytes that no other value of it has; where it has several parts, each with its length before it,
/// or of a fixed length.
///
/// ```
/// use std::borrow::Cow;
/// use leasehold::{Scope, ScopedName};
///
/// struct Seat { row: u16, number: u16 }
///
/// impl ScopedName for Seat {
///     fn name_bytes(&self) -> Cow<'_, [u8]> {
///         [self.row.to_be_bytes(), self.number.to_be_bytes()].concat().into()
///     }
///
///     fn show_name(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
///         write!(f, "{}-{}", self.row, self.number)
///     }
/// }
///
/// const SEATS: Scope<Seat> = Scope::new("seat");
/// assert_eq!(SEATS.name(&Seat { row: 12, number: 3 }).to_string(), "seat/12-3");
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be a name in a scope",
    note = "implement `leasehold::ScopedName` for it: give bytes that no other value of the type has"
)]
pub trait ScopedName {
    /// Gives the bytes of the name: the same in every process and version, and never the same for two different names.
    fn name_bytes(&self) -> Cow<'_, [u8]>;

    /// Shows it to people, in logs and in `leasehold status`. What is more than a word is put in quotes there. By default
    /// its bytes, as text if they are text, else in hexadecimal digits.
    ///
    /// # Errors
    ///
    /// Those of the formatter.
    fn show_name(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        show_bytes(&self.name_bytes(), f)
    }
}

fn as_a_word(bytes: &[u8], shown: &str) -> String {
    // Bytes that are no text show like this: a text must not look like them.
    let is_deceptive = shown.starts_with("0x") && shown.as_bytes() == bytes;
    if is_deceptive { format!("{shown:?}") } else { name::word(shown) }
}

/// How a name with these bytes shows in its scope, if its type says nothing else.
pub(crate) fn shown_by_default(bytes: &[u8]) -> String {
    as_a_word(bytes, &fmt::from_fn(|f| show_bytes(bytes, f)).to_string())
}

fn show_bytes(bytes: &[u8], f: &mut fmt::Formatter<'_>) -> fmt::Result {
    if let Ok(text) = std::str::from_utf8(bytes) {
        return f.write_str(text);
    }
    f.write_str("0x")?;
    bytes.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
}

impl ScopedName for str {
    fn name_bytes(&self) -> Cow<'_, [u8]> {
        self.as_bytes().into()
    }
}

impl ScopedName for String {
    fn name_bytes(&self) -> Cow<'_, [u8]> {
        self.as_bytes().into()
    }
}

impl ScopedName for [u8] {
    fn name_bytes(&self) -> Cow<'_, [u8]> {
        self.into()
    }
}

impl ScopedName for Vec<u8> {
    fn name_bytes(&self) -> Cow<'_, [u8]> {
        self.into()
    }
}

impl<const N: usize> ScopedName for [u8; N] {
    fn name_bytes(&self) -> Cow<'_, [u8]> {
        self.as_slice().into()
    }
}

macro_rules! integers {
    ($($integer:ty)*) => {$(
        impl ScopedName for $integer {
            fn name_bytes(&self) -> Cow<'_, [u8]> {
                self.to_string().into_bytes().into()
            }
        }
    )*};
}

integers!(i8 i16 i32 i64 i128 isize u8 u16 u32 u64 u128 usize);

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::name::{Key, Kind, NameError};

    const INVOICES: Scope<u64> = Scope::new("invoice").ttl(Duration::from_secs(30));
    const BLOBS: Scope<[u8]> = Scope::new("blob");

    const fn is_copy_and_sync<T: Copy + Send + Sync>(_: &T) {}

    /// L-20
    #[test]
    fn a_scope_is_a_constant_that_is_copied_whatever_its_names_are() {
        const OF_WHAT_IS_NEITHER: Scope<std::cell::RefCell<String>> = Scope::new("x");
        is_copy_and_sync(&OF_WHAT_IS_NEITHER);
        assert_eq!(format!("{INVOICES:?}"), "Scope { name: \"invoice\", ttl: Some(30s) }");
    }

    /// L-15, L-20: golden vectors, computed with another implementation (Python's hashlib). They must never change.
    #[test]
    fn keys_of_scoped_names_are_pinned_by_golden_vectors() {
        for (kind, name, key) in [
            (Kind::Lock, INVOICES.name(&42), 1_225_849_170_640_561_399),
            (Kind::Lease, INVOICES.name(&42), -5_276_656_053_616_982_084),
            (Kind::RwLock, INVOICES.name(&42), 7_420_579_817_654_366_960),
            (Kind::Lock, Scope::<str>::new("ab").name("c"), 4_101_606_890_099_709_318),
            (Kind::Lock, Scope::<str>::new("a").name("bc"), -1_004_269_782_233_755_194),
            (Kind::Lock, Scope::<i16>::new("delta").name(&-7), 2_060_346_048_585_824_907),
            (Kind::Lock, BLOBS.name(&[0, 255]), 4_212_002_534_241_787_226),
            (Kind::Lock, Scope::<str>::new("caf\u{e9}").name("\u{e9}"), -5_097_578_848_402_283_594),
            (Kind::Lock, Scope::<str>::new("invoice").name(""), 1_723_929_077_884_926_234),
            (Kind::Lock, Scope::<u128>::new("wide").name(&u128::MAX), 6_857_756_266_795_478_995),
            (Kind::Lock, Scope::<i128>::new("wide").name(&i128::MIN), -4_760_487_228_111_297_598),
        ] {
            assert_eq!(Key::of(kind, &name).get(), key, "{kind:?} {name}");
        }
    }

    /// L-15: the integer types agree, so that one can be widened; so do the types of text and those of bytes.
    #[test]
    fn a_name_has_one_encoding_whatever_its_type() {
        let name = Scope::<u8>::new("n").name(&7);
        assert_eq!(name, Scope::<i128>::new("n").name(&7));
        assert_eq!(name, Scope::<usize>::new("n").name(&7));
        assert_eq!(name, Scope::<str>::new("n").name("7"));
        assert_eq!(name, Scope::<String>::new("n").name(&"7".to_owned()));
        assert_eq!(name, Scope::<[u8]>::new("n").name(b"7"));
        assert_eq!(name, Scope::<Vec<u8>>::new("n").name(&b"7".to_vec()));
        assert_eq!(name, Scope::<[u8; 1]>::new("n").name(b"7"));
    }

    /// L-15, D24: every way to cut a text in two, of digits and colons so that the frame itself is put to the test. No two
    /// names of it are the same or have the same key, and none has that of a name without a scope, of any kind.
    #[test]
    fn names_with_shifted_boundaries_are_never_the_same() {
        let text: &'static str = "1:1:11:1::12:1:12:1:11:1:1:3:1:1";
        let (mut names, mut keys, mut count) = (HashSet::new(), HashSet::new(), 0);
        for from in 0..text.len() {
            for to in from + 1..=text.len() {
                for cut in from + 1..to {
                    let name = Scope::<str>::new(&text[from..cut]).name(&text[cut..to]);
                    names.insert(name);
                }
            }
        }
        for from in 0..text.len() {
            for to in from + 1..=text.len() {
                names.insert(Name::from(&text[from..to]));
            }
        }
        for name in &names {
            for kind in [Kind::Lease, Kind::Lock, Kind::RwLock] {
                keys.insert(Key::of(kind, name));
                count += 1;
            }
        }
        assert!(names.len() > 1_000, "{}", names.len());
        assert_eq!(keys.len(), count);
        // What they are, without the kinds: pairs are told apart by the lengths of their parts.
        let parts: HashSet<String> = names.iter().map(|name| format!("{name:?}")).collect();
        assert_eq!(parts.len(), names.len());
    }

    /// D24: a million names of two scopes and of none have a million keys.
    #[test]
    fn a_million_names_have_a_million_keys() {
        let mut keys = HashSet::new();
        for n in 0..1_000_000_u64 {
            let key = match n % 3 {
                0 => Key::of(Kind::Lock, INVOICES.name(&n)),
                1 => Key::of(Kind::Lock, Scope::<u64>::new("order").name(&n)),
                _ => Key::of(Kind::Lock, format!("invoice:{n}")),
            };
            assert!(keys.insert(key), "{n}");
        }
    }

    /// L-15: as text names, and no normalisation.
    #[test]
    fn scoped_names_are_refused_at_the_limits_of_text_names_only() {
        let texts = Scope::<str>::new("text");
        assert_eq!(texts.name("").validate(), Err(NameError::Empty));
        assert_eq!(texts.name(&"x".repeat(1020)).validate(), Ok(()));
        assert_eq!(texts.name(&"x".repeat(1021)).validate(), Err(NameError::TooLong { bytes: 1025 }));
        assert_eq!(BLOBS.name(&[0]).validate(), Ok(()));
        assert_ne!(texts.name("caf\u{e9}"), texts.name("cafe\u{301}"));
        assert_ne!(texts.name("A"), texts.name("a"));
    }

    /// L-15: on one line, and so that no two names of a scope look the same.
    #[test]
    fn scoped_names_show_what_they_are() {
        struct Odd;
        impl ScopedName for Odd {
            fn name_bytes(&self) -> Cow<'_, [u8]> {
                (&[1, 2][..]).into()
            }

            fn show_name(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("two\nlines")
            }
        }
        let texts = Scope::<str>::new("text");
        for (name, shown) in [
            (INVOICES.name(&42), "invoice/42"),
            (texts.name("acme"), "text/acme"),
            (texts.name("a b/c"), "text/\"a b/c\""),
            (texts.name("\"a\""), r#"text/"\"a\"""#),
            (texts.name(""), "text/\"\""),
            (texts.name("0x00ff"), "text/\"0x00ff\""),
            (BLOBS.name(&[0, 255]), "blob/0x00ff"),
            (BLOBS.name(b"0x00ff"), "blob/\"0x00ff\""),
            (Scope::<str>::new("a/b").name("c"), "\"a/b\"/c"),
            (Scope::<str>::new("a").name("b/c"), "a/\"b/c\""),
            (Scope::<Odd>::new("odd").name(&Odd), "odd/\"two\\nlines\""),
        ] {
            assert_eq!((name.to_string().as_str(), format!("{name:?}").as_str()), (shown, shown));
            assert_ne!(format!("{:?}", Name::from(shown)), shown, "the text of the same letters");
        }
    }
}
