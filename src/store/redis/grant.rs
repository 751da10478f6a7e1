//! What stands in the server for one grant, and for one session that waits.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use rand::RngExt as _;
use rand::rngs::StdRng;
use redis::Value;

use super::keys::Keys;
use crate::name::Key;
use crate::store::{Holder, Mode};

/// How every value of ours begins.
const OURS: &str = "leasehold ";

/// 128 random bits, of each grant its own.
pub(super) type Token = u128;

/// One grant. The value proves it, so it is not shown.
#[derive(Clone)]
pub(crate) struct Held {
    pub(super) key: Key,
    pub(super) keys: Arc<Keys>,
    pub(super) token: Token,
    /// `leasehold <ttl in ms> <token> <session> <identity>`: all but the token for people.
    pub(super) value: Arc<str>,
    pub(super) is_read: bool,
    /// In whole milliseconds, rounded up: never shorter than what the holder counts with.
    pub(super) ttl: u64,
}

impl Held {
    pub(super) fn new(
        key: Key,
        keys: Arc<Keys>,
        mode: Mode,
        ttl: Duration,
        (session, identity): (&str, &str),
        rng: &mut StdRng,
    ) -> Self {
        let token: Token = rng.random();
        let ttl = whole_millis(ttl);
        let value = format!("{OURS}{ttl} {token:032x} {session} {identity}").into();
        Self { key, keys, token, value, is_read: mode == Mode::Read, ttl }
    }
}

/// Without what proves it.
impl fmt::Debug for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Held").field("key", &self.key).field("is_read", &self.is_read).finish_non_exhaustive()
    }
}

/// Rounded up.
pub(super) fn whole_millis(duration: Duration) -> u64 {
    let millis = duration.as_nanos().div_ceil(1_000_000);
    millis.try_into().unwrap_or(u64::MAX)
}

/// How a session shows that it waits: `leasehold <identity> <session>`.
pub(super) fn member(identity: &str, session: &str) -> String {
    format!("{OURS}{identity} {session}")
}

pub(super) fn is_ours(value: &[u8]) -> bool {
    value.starts_with(OURS.as_bytes())
}

/// Reads what the script tells of a holder: its value, and for how long it is valid yet. With the session that it is.
pub(super) fn holder(told: Value) -> Option<(String, Holder)> {
    let Value::Array(parts) = told else { return None };
    let [Value::BulkString(value), left] = <[Value; 2]>::try_from(parts).ok()? else { return None };
    let left = match left {
        Value::Int(millis) => millis.try_into().ok().map(Duration::from_millis),
        _ => None,
    };
    let value = String::from_utf8(value).ok()?;
    let mut words = value.strip_prefix(OURS)?.splitn(4, ' ');
    let ttl = words.next()?.parse().ok().map(Duration::from_millis);
    let session = words.nth(1)?.to_owned();
    let identity = words.next()?.to_owned();
    let silence = ttl.zip(left).map(|(ttl, left)| ttl.saturating_sub(left));
    Some((session, Holder { identity: Some(identity), silence, ..Holder::default() }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::name::{Kind, Name};
    use crate::redis::Layout;

    fn held(ttl: Duration) -> Held {
        let keys = Keys::of(Layout::Leasehold, Kind::Lock, &Name::from("a")).ok().unwrap();
        let key = Key::of(Kind::Lock, "a");
        Held::new(key, Arc::new(keys), Mode::Exclusive, ttl, ("abc", "me"), &mut rand::make_rng())
    }

    ///
    #[test]
    fn a_grant_has_random_bits_of_its_own_and_shows_none() {
        let (one, other) = (held(Duration::from_secs(1)), held(Duration::from_secs(1)));
        assert_ne!(one.token, other.token);
        let digits = format!("{:032x}", one.token);
        assert!(one.value.contains(&digits) && !format!("{one:?}").contains(&digits), "{one:?}");
    }

    /// D28: milliseconds, and never fewer than were meant.
    #[test]
    fn a_ttl_is_in_whole_milliseconds() {
        assert_eq!(held(Duration::from_millis(1900)).ttl, 1900);
        assert_eq!(held(Duration::from_micros(1500)).ttl, 2);
        assert_eq!(held(Duration::from_nanos(1)).ttl, 1);
    }

    #[test]
    fn a_holder_is_read_from_its_value() {
        let held = held(Duration::from_secs(10));
        let told = |value: &str, left| {
            Value::Array(vec![Value::BulkString(value.as_bytes().to_vec()), Value::Int(left)])
        };
        let (session, read) = holder(told(&held.value, 9_000)).unwrap();
        assert_eq!(session, "abc");
        assert_eq!((read.identity.as_deref(), read.silence), (Some("me"), Some(Duration::from_secs(1))));
        assert_eq!(holder(told("something else", 1)), None);
        assert_eq!(holder(Value::Nil), None);
        assert!(is_ours(held.value.as_bytes()) && !is_ours(b"x"));
    }
}
