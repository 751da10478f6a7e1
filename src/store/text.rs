//! Messages as text, for the stores that carry nothing else: visible ASCII and blanks, no quote and no backslash.
//!
//! ```text
//! step-down <key>
//! roll-call <number> [<reply to>]
//! present <number> <reply to or -> <session or -> <identity> <y|n: steps down> <part>/<parts> [<standing> …]
//! ```
//!
//! A standing is `<role>:<term>:<milliseconds>:<name>`: a letter, two numbers that may be empty, and the name with all
//! but letters, digits and `-._~` percent-encoded (RFC 3986, section 2.1). A name that is not text begins with a `!`:
//! `!key:<number>`, `!pair:<number>:<number>`, `!autumn:<name>`, `!scope:<scope>:<bytes>:<how it shows there, or nothing>`.
//!
//! Anybody may send anything: what is not of this form, whole, is no message.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::time::Duration;

use super::{Call, Message, Presence, Role, Standing};
use crate::name::{Is, Key, Name};
use crate::scope::shown_by_default;

const STEP_DOWN: &str = "step-down";
const ROLL_CALL: &str = "roll-call";
const PRESENT: &str = "present";

/// Most bytes that say how a name in a scope shows there: with the longest name they fit into a notification.
const SHOWN_BYTES: usize = 2_048;

/// Stands for an empty text.
const NOTHING: &str = "-";

/// Writes a message as texts of at most `limit` bytes. A standing that is longer alone is a text of its own.
pub(super) fn write(message: &Message, limit: usize) -> Vec<String> {
    match message {
        Message::StepDown(key) => vec![format!("{STEP_DOWN} {key}")],
        Message::RollCall(Call { number, reply_to }) if reply_to.is_empty() => {
            vec![format!("{ROLL_CALL} {number:016x}")]
        }
        Message::RollCall(Call { number, reply_to }) => vec![format!("{ROLL_CALL} {number:016x} {reply_to}")],
        Message::Present(presence) => write_presence(presence, limit),
    }
}

fn write_presence(presence: &Presence, limit: usize) -> Vec<String> {
    let Presence { call, session, identity, steps_down, standings, .. } = presence;
    let or_nothing = |text: &str| if text.is_empty() { NOTHING.to_owned() } else { text.to_owned() };
    let head = format!(
        "{PRESENT} {:016x} {} {} {} {}",
        call.number,
        or_nothing(&call.reply_to),
        or_nothing(session),
        or_nothing(identity),
        if *steps_down { 'y' } else { 'n' }
    );
    // ` <part>/<parts>`, each of at most seven digits.
    let room = limit.saturating_sub(head.len() + 16);
    let mut bodies = vec![String::new()];
    for standing in standings {
        let word = write_standing(standing);
        match bodies.last_mut() {
            Some(body) if body.is_empty() || body.len() + word.len() <= room => body.push_str(&word),
            _ => bodies.push(word),
        }
    }
    let parts = bodies.len();
    bodies.iter().enumerate().map(|(n, body)| format!("{head} {}/{parts}{body}", n + 1)).collect()
}

/// With a blank before it.
fn write_standing(standing: &Standing) -> String {
    let Standing { name, role, term, held_for } = standing;
    let number = |number: Option<u64>| number.map(|it| it.to_string()).unwrap_or_default();
    let held_for = held_for.map(|it| it.as_millis().try_into().unwrap_or(u64::MAX));
    let word = format!(" {}:{}:{}:", letter(*role), number(*term), number(held_for));
    word + &write_name(name)
}

fn write_name(name: &Name) -> String {
    match name.is() {
        Is::Text(text) => encode(text.as_bytes()),
        Is::Key(key, _) => format!("!key:{key}"),
        Is::Pair(first, second, _) => format!("!pair:{first}:{second}"),
        Is::Autumn(name, _) => format!("!autumn:{}", encode(name.as_bytes())),
        Is::Scoped { scope, bytes, .. } => {
            let shown = name
                .shown_in_scope()
                .filter(|shown| *shown != shown_by_default(bytes))
                .map(|it| encode(it.as_bytes()));
            let shown = shown.filter(|it| it.len() <= SHOWN_BYTES).unwrap_or_default();
            format!("!scope:{}:{}:{shown}", encode(scope.as_bytes()), encode(bytes))
        }
    }
}

fn encode(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for &byte in bytes {
        if is_plain(byte) {
            text.push(char::from(byte));
        } else {
            write!(text, "%{byte:02X}").ok();
        }
    }
    text
}

const fn is_plain(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~')
}

const fn letter(role: Role) -> char {
    match role {
        Role::Leading => 'l',
        Role::Draining => 'd',
        Role::Blocked => 'b',
        Role::Standby => 's',
        Role::Ineligible => 'i',
        Role::Lost => 'x',
    }
}

/// Reads a message, whole or not at all.
pub(super) fn read(text: &str) -> Option<Message> {
    // Every word is visible ASCII: nothing that is shown to people can change what a terminal does.
    if !text.bytes().all(|byte| byte == b' ' || byte.is_ascii_graphic()) {
        return None;
    }
    let mut words = text.split(' ');
    match words.next()? {
        STEP_DOWN => {
            let key = read_key(words.next()?)?;
            words.next().is_none().then_some(Message::StepDown(key))
        }
        ROLL_CALL => {
            let (number, reply_to) = (read_hex(words.next()?)?, words.next().unwrap_or_default().to_owned());
            words.next().is_none().then_some(Message::RollCall(Call { number, reply_to }))
        }
        PRESENT => read_presence(words).map(Message::Present),
        _ => None,
    }
}

fn read_presence<'a>(mut words: impl Iterator<Item = &'a str>) -> Option<Presence> {
    let text = |word: &str| match word {
        "" => None,
        NOTHING => Some(String::new()),
        word => Some(word.to_owned()),
    };
    let number = read_hex(words.next()?)?;
    let call = Call { number, reply_to: text(words.next()?)? };
    let (session, identity) = (text(words.next()?)?, text(words.next()?)?);
    let steps_down = match words.next()? {
        "y" => true,
        "n" => false,
        _ => return None,
    };
    let (part, parts) = words.next()?.split_once('/')?;
    let part = (read_number(part)?.try_into().ok()?, read_number(parts)?.try_into().ok()?);
    if part.0 == 0 || part.0 > part.1 {
        return None;
    }
    let standings = words.map(read_standing).collect::<Option<_>>()?;
    Some(Presence { call, session, identity, steps_down, part, standings })
}

fn read_standing(word: &str) -> Option<Standing> {
    let mut fields = word.splitn(4, ':');
    let role = match fields.next()? {
        "l" => Role::Leading,
        "d" => Role::Draining,
        "b" => Role::Blocked,
        "s" => Role::Standby,
        "i" => Role::Ineligible,
        "x" => Role::Lost,
        _ => return None,
    };
    let number = |field: &str| if field.is_empty() { Some(None) } else { read_number(field).map(Some) };
    let term = number(fields.next()?)?;
    let held_for = number(fields.next()?)?.map(Duration::from_millis);
    Some(Standing { name: read_name(fields.next()?)?, role, term, held_for })
}

fn read_name(text: &str) -> Option<Name> {
    let name = match text.strip_prefix('!') {
        None => Name::from(decode_text(text)?),
        Some(other) => read_other(other)?,
    };
    Some(name).filter(|name| name.validate().is_ok())
}

fn read_other(text: &str) -> Option<Name> {
    let (what, rest) = text.split_once(':')?;
    match what {
        "key" => Some(Name::key(read_signed(rest)?)),
        "pair" => {
            let (first, second) = rest.split_once(':')?;
            Some(Name::key_pair(read_signed(first)?, read_signed(second)?))
        }
        "autumn" => Some(Name::autumn(&decode_text(rest)?)),
        "scope" => {
            let (scope, rest) = rest.split_once(':')?;
            let (bytes, shown) = rest.split_once(':')?;
            let (scope, bytes, shown) = (decode_text(scope)?, decode(bytes)?, decode_text(shown)?);
            // An honest one is on one line: what is not could deceive whoever reads it.
            let shown =
                if shown.is_empty() || shown.contains(is_odd) { shown_by_default(&bytes) } else { shown };
            (!scope.is_empty()).then(|| Name::scoped(Cow::Owned(scope), &bytes, &shown))
        }
        _ => None,
    }
}

/// What Rust would escape in a text in quotes, but for the quotes and what escapes them.
fn is_odd(c: char) -> bool {
    !matches!(c, '"' | '\'' | '\\') && c.escape_debug().len() > 1
}

fn decode_text(text: &str) -> Option<String> {
    String::from_utf8(decode(text)?).ok()
}

fn decode(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'%' => read_digit(rest.next()?)? << 4 | read_digit(rest.next()?)?,
            byte if is_plain(byte) => byte,
            _ => return None,
        });
    }
    Some(bytes)
}

fn read_digit(byte: u8) -> Option<u8> {
    char::from(byte).to_digit(16)?.try_into().ok()
}

/// Decimal digits alone: `parse` would take a sign as well.
fn read_number(text: &str) -> Option<u64> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
}

/// As it is written, and no other way: `parse` would take a plus and zeros as well.
fn read_signed<T: std::str::FromStr + ToString>(text: &str) -> Option<T> {
    text.parse().ok().filter(|number: &T| number.to_string() == text)
}

fn read_hex(text: &str) -> Option<u64> {
    let is_hex = text.len() == 16 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_hex.then(|| u64::from_str_radix(text, 16).ok())?
}

/// Reads the text of a key, as it is written and no other way.
pub(super) fn read_key(text: &str) -> Option<Key> {
    let is_digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_hexdigit());
    let is_of_form = match text.split_once('-') {
        None => text.len() == 16 && is_digits(text),
        Some((first, second)) => {
            first.len() == 8 && second.len() == 8 && is_digits(first) && is_digits(second)
        }
    };
    is_of_form.then(|| text.parse().ok())?
}

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::{RngExt as _, SeedableRng as _};

    use super::*;
    use crate::Scope;
    use crate::name::{Kind, MAX_NAME_BYTES};

    const LIMIT: usize = 300;

    fn presence(standings: Vec<Standing>) -> Presence {
        let call = Call { number: 7, reply_to: "there".to_owned() };
        let (session, identity) = ("s-1.sock".to_owned(), "host:1-a".to_owned());
        Presence { call, session, identity, steps_down: true, part: (1, 1), standings }
    }

    fn standing(name: &str, role: Role, term: Option<u64>) -> Standing {
        Standing { name: Name::from(name), role, term, held_for: term.map(Duration::from_millis) }
    }

    /// Names that text is easily broken by.
    fn names() -> Vec<String> {
        let mut names: Vec<String> = [
            "job",
            "a b",
            "a:b%20",
            "'; DROP TABLE x; --",
            "\"\\",
            "line\nend\0",
            "sp\u{e4}t",
            "\u{1f980}",
            "%",
            "-",
        ]
        .map(str::to_owned)
        .into();
        names.push("\u{e9}".repeat(MAX_NAME_BYTES / 2));
        names
    }

    #[test]
    fn names_that_are_not_text_read_back_with_how_they_show() {
        let long = "\u{1f980}".repeat(MAX_NAME_BYTES / 4 - 1);
        let texts = Scope::<str>::new("s");
        for name in [
            Name::key(42),
            Name::key(i64::MIN),
            Name::key_pair(1, -2),
            Name::autumn("nightly cleanup"),
            Scope::<u64>::new("invoice").name(&42),
            Scope::<str>::new("a/b:c").name("x:y"),
            Scope::<[u8]>::new("blob").name(&[0, 255, b'\'']),
            Scope::<[u8]>::new("blob").name(&[255; 1000]),
            texts.name("two\nlines \"and\" \\ quotes"),
            texts.name("0x00"),
            texts.name(&long),
        ] {
            let written = write_name(&name);
            assert!(written.bytes().all(|b| b.is_ascii_graphic() && b != b'\'' && b != b'\\'), "{written}");
            let read = read_name(&written).expect(&written);
            assert_eq!((&read, read.as_str()), (&name, name.as_str()));
        }
        let read = |text: &str| read_name(text).expect(text).to_string();
        assert_eq!(read("!scope:seat:%00%01:12-3"), "seat/12-3");
        assert_eq!(read("!scope:seat:%00%FF:%0Afree"), "seat/0x00ff", "not one line");
        assert_eq!(read("!scope:seat:a:%E2%80%AEfree"), "seat/a", "written from right to left");
    }

    /// L-19: the longest names fit into a notification of PostgreSQL.
    #[test]
    fn the_longest_names_are_short_enough() {
        let texts = Scope::<str>::new("s");
        for name in [
            Name::from("\u{e9}".repeat(MAX_NAME_BYTES / 2)),
            Name::autumn(&"\u{e9}".repeat(MAX_NAME_BYTES / 2)),
            texts.name(&"\u{1}".repeat(MAX_NAME_BYTES - 1)),
            Scope::<[u8]>::new("s").name(&[255; MAX_NAME_BYTES - 1]),
        ] {
            assert_eq!(name.validate(), Ok(()));
            let long = Standing { name, ..standing("", Role::Standby, Some(u64::MAX)) };
            let text = write(&Message::Present(presence(vec![long.clone()])), 7_900).remove(0);
            assert!(text.len() < 7_900, "{}", text.len());
            let Some(Message::Present(read)) = read(&text) else { panic!("{text}") };
            assert_eq!(read.standings, [long]);
        }
    }

    #[test]
    fn messages_read_back_as_what_was_written() {
        let key = Key::of(Kind::Lease, "");
        assert!(key.get() < 0);
        for message in [
            Message::StepDown(key),
            Message::StepDown(Key::of(Kind::Lease, Name::key_pair(-1, 2))),
            Message::RollCall(Call { number: u64::MAX, reply_to: String::new() }),
            Message::RollCall(Call { number: 0, reply_to: "a-0.sock".to_owned() }),
            Message::Present(presence(Vec::new())),
            Message::Present(Presence {
                call: Call { number: 1, reply_to: String::new() },
                session: String::new(),
                steps_down: false,
                ..presence(vec![standing("job", Role::Leading, Some(3))])
            }),
        ] {
            let texts = write(&message, LIMIT);
            assert_eq!(texts.len(), 1);
            assert_eq!(read(&texts[0]), Some(message), "{texts:?}");
        }
    }

    #[test]
    fn an_answer_of_many_names_is_split_and_loses_none() {
        let roles =
            [Role::Leading, Role::Draining, Role::Blocked, Role::Standby, Role::Ineligible, Role::Lost];
        let all: Vec<Standing> = names()
            .iter()
            .zip(roles.iter().cycle())
            .map(|(name, role)| standing(name, *role, role.holds().then_some(u64::MAX)))
            .collect();
        let texts = write(&Message::Present(presence(all.clone())), LIMIT);
        let mut read_back = Vec::new();
        for (n, text) in texts.iter().enumerate() {
            assert!(text.bytes().all(|b| (b' '..=b'~').contains(&b) && b != b'\'' && b != b'\\'), "{text}");
            let Some(Message::Present(part)) = read(text) else { panic!("{text}") };
            assert!(text.len() <= LIMIT || part.standings.len() == 1, "{} bytes: {text}", text.len());
            assert_eq!(part.part, (u32::try_from(n + 1).unwrap(), u32::try_from(texts.len()).unwrap()));
            read_back.extend(part.standings);
        }
        assert!(texts.len() > 1);
        assert_eq!(read_back, all);
    }

    #[test]
    fn what_is_malformed_is_no_message() {
        let good = "present 0000000000000007 - - host:1-a y 1/1";
        assert!(read(good).is_some());
        for foreign in [
            "",
            " ",
            "hello",
            "step-down",
            "step-down ",
            "step-down x",
            "step-down +000000000000001",
            "step-down 0000000000000001 ",
            "step-down 0000000000000001 x",
            "roll-call",
            "roll-call 7",
            "roll-call 0000000000000007 a b",
            "present",
            "present 0000000000000007",
            "roll-call 0000000000000007 \x1b",
            "step-down 00000001-0000000",
            "step-down 0000001-000000002",
            "step-down 00000001-0000000+",
            "step-down 00000001-00000002-",
        ]
        .map(str::to_owned)
        .into_iter()
        .chain(["2/1", "0/1", "1/0", "/", "1", "+1/1", "1/99999999999"].map(|part| good.replace("1/1", part)))
        .chain(
            [
                "",
                "l",
                "l::",
                "q:::a",
                "l:::",
                "l:-1::a",
                "l::x:a",
                "l:::%",
                "l:::%4",
                "l:::%GG",
                "l:::%FF",
                "l:::a/b",
                "l:::!",
                "l:::!key",
                "l:::!key:",
                "l:::!key:+1",
                "l:::!key:01",
                "l:::!x:1",
                "l:::!key:9223372036854775808",
                "l:::!pair:1",
                "l:::!pair:1:",
                "l:::!pair:1:2:3",
                "l:::!pair:1818583411:1",
                "l:::!autumn:",
                "l:::!autumn:%FF",
                "l:::!scope:a",
                "l:::!scope:a:b",
                "l:::!scope::b:",
                "l:::!scope:a::",
                "l:::!scope:%FF:b:",
                "l:::!scope:a:b:%FF",
            ]
            .map(|standing| format!("{good} {standing}")),
        )
        .chain([format!("{good} l:::{}", "x".repeat(MAX_NAME_BYTES + 1))])
        {
            assert_eq!(read(&foreign), None, "{foreign:?}");
        }
    }

    /// Random bytes, and messages that a few random bytes were written into: nothing panics, and what is read is what
    /// would be written.
    #[test]
    fn nothing_that_anybody_sends_is_more_than_ignored() {
        let mut rng = StdRng::seed_from_u64(5);
        let standings = names().iter().map(|name| standing(name, Role::Leading, Some(1))).collect();
        let whole = write(&Message::Present(presence(standings)), usize::MAX).remove(0);
        let mut read_some = 0;
        for _ in 0..20_000 {
            let mut bytes: Vec<u8> = if rng.random_bool(0.5) {
                whole.bytes().take(rng.random_range(0..whole.len())).collect()
            } else {
                (0..rng.random_range(0..80)).map(|_| rng.random::<u8>()).collect()
            };
            for _ in 0..rng.random_range(0..3) {
                if !bytes.is_empty() {
                    let at = rng.random_range(0..bytes.len());
                    bytes[at] = rng.random();
                }
            }
            if let Some(message) = read(&String::from_utf8_lossy(&bytes)) {
                read_some += 1;
                let again = write(&message, usize::MAX).remove(0);
                let Message::Present(part) = &message else { continue };
                let Some(Message::Present(read_again)) = read(&again) else { panic!("{again}") };
                assert_eq!(read_again.standings, part.standings);
            }
        }
        assert!(read_some > 100, "{read_some}");
    }
}
