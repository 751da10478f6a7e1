//! What goes through the channels: messages of Lockers as `store::text` writes them, and releases.
//!
//! ```text
//! freed <session> <y|n: was clean> <key>
//! ```

use redis::{PushInfo, Value};

use crate::name::Key;
use crate::store::{Event, Freed, text};

const FREED: &str = "freed";

/// Most bytes of one message: the rest of it is a message of its own.
pub(super) const LIMIT: usize = 32 * 1024;

/// That a key was released by a session.
pub(super) fn freed(session: &str, freed: Freed) -> String {
    let is_clean = if freed.is_clean { 'y' } else { 'n' };
    format!("{FREED} {session} {is_clean} {}", freed.key)
}

/// What was pushed to this session.
pub(super) fn event(push: PushInfo, session: &str) -> Event {
    let Some(Value::BulkString(payload)) = push.data.into_iter().nth(1) else { return Event::Ignored };
    let Ok(payload) = String::from_utf8(payload) else { return Event::Ignored };
    match payload.strip_prefix(FREED) {
        Some(rest) => read_freed(rest, session).map_or(Event::Ignored, Event::Freed),
        None => text::read(&payload).map_or(Event::Ignored, Event::Message),
    }
}

/// None for our own: the driver knows of it.
fn read_freed(rest: &str, session: &str) -> Option<Freed> {
    let mut words = rest.strip_prefix(' ')?.split(' ');
    let is_own = words.next()? == session;
    let is_clean = match words.next()? {
        "y" => true,
        "n" => false,
        _ => return None,
    };
    let key: Key = text::read_key(words.next()?)?;
    (!is_own && words.next().is_none()).then_some(Freed { key, is_clean })
}

#[cfg(test)]
mod tests {
    use redis::PushKind;

    use super::*;
    use crate::name::Kind;

    fn pushed(payload: &str) -> PushInfo {
        let text = |text: &str| Value::BulkString(text.as_bytes().to_vec());
        PushInfo { kind: PushKind::Message, data: vec![text("channel"), text(payload)] }
    }

    #[test]
    fn a_release_is_read_as_it_was_written() {
        for key in [Key::of(Kind::Lock, "a"), Key::of_pair(-1, 2)] {
            for is_clean in [true, false] {
                let told = Freed { key, is_clean };
                let payload = freed("abc", told);
                assert!(
                    matches!(event(pushed(&payload), "def"), Event::Freed(read) if read == told),
                    "{payload}"
                );
                assert!(matches!(event(pushed(&payload), "abc"), Event::Ignored), "its own");
            }
        }
    }

    #[test]
    fn what_is_not_ours_is_ignored() {
        for payload in
            ["", "freed", "freed a", "freed a y", "freed a x 00", "freed a y zz", "hello", "freed a y 00 00"]
        {
            assert!(matches!(event(pushed(payload), "def"), Event::Ignored), "{payload}");
        }
        let none = PushInfo { kind: PushKind::Subscribe, data: Vec::new() };
        assert!(matches!(event(none, "def"), Event::Ignored));
    }
}
