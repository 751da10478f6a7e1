//! How the keys of a name are called: the table in `leasehold::redis`.

use crate::name::{Is, Key, Kind, Name};
use crate::redis::Layout;
use crate::scope::shown_by_default;

const PREFIX: &str = "leasehold:";

/// How many counters of fencing tokens there are: a number of keys that does not grow with that of the names.
const COUNTERS: i64 = 1024;

/// The keys of one name, all in one slot of a cluster.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Keys {
    /// Who holds it, or writes.
    pub(super) holder: Vec<u8>,
    /// Who waits. None where everybody is told of a release.
    pub(super) queue: Option<Vec<u8>>,
    /// What is kept of the slots of `every`. None where no key of the same slot of a cluster can be had.
    pub(super) slots: Option<Vec<u8>>,
    pub(super) shared: Option<Shared>,
    /// They are of a layout of others, whose values are theirs.
    pub(super) is_others: bool,
}

/// What a lock that can be shared has more.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Shared {
    pub(super) readers: Vec<u8>,
    /// Who waits to write.
    pub(super) intents: Vec<u8>,
}

impl Keys {
    /// # Errors
    ///
    /// What to change, where the layout cannot have the name.
    pub(super) fn of(layout: Layout, kind: Kind, name: &Name) -> Result<Self, String> {
        match (layout, kind, name.is()) {
            (Layout::Wakuwaku, Kind::Lock | Kind::RwLock, Is::Scoped { scope, bytes, .. }) => {
                Self::of_wakuwaku(kind, scope, bytes)
            }
            _ => Ok(Self::of_leasehold(kind, name)),
        }
    }

    /// In the layout of leasehold.
    pub(super) fn of_leasehold(kind: Kind, name: &Name) -> Self {
        // The slot is that of what stands between the first opening brace and the first closing one after it. The kind
        // is in there, so it is never empty; and all that comes before a suffix is the same for all keys of a name.
        let mut base = format!("{PREFIX}{{{}", label(kind)).into_bytes();
        match name.is() {
            Is::Text(text) => {
                base.push(b':');
                base.extend_from_slice(text.as_bytes());
            }
            Is::Scoped { scope, bytes, .. } => {
                // The length says where the scope ends.
                base.extend_from_slice(format!("+scope:{}:{scope}", scope.len()).as_bytes());
                base.extend_from_slice(bytes);
            }
            // As everywhere, they contend with those that stand for the same key.
            Is::Key(..) | Is::Autumn(..) => {
                base.extend_from_slice(format!("+key:{}", Key::of(kind, name).get()).as_bytes());
            }
            Is::Pair(first, second, _) => {
                base.extend_from_slice(format!("+pair:{first},{second}").as_bytes());
            }
        }
        base.push(b'}');
        // Suffixes of one length: no name with the one can be taken for another name with the other.
        let shared =
            (kind == Kind::RwLock).then(|| Shared { readers: with(&base, ":r"), intents: with(&base, ":i") });
        Self {
            holder: with(&base, ":h"),
            queue: Some(with(&base, ":q")),
            slots: Some(with(&base, ":s")),
            shared,
            is_others: false,
        }
    }

    fn of_wakuwaku(kind: Kind, scope: &str, name: &[u8]) -> Result<Self, String> {
        if scope.contains([':', '{', '}']) {
            return Err(format!(
                "the scope {scope:?} cannot have a key in wakuwaku's layout, where it could be taken for another one: use a name \
                 without colon and braces"
            ));
        }
        let entity = |head: &str, tail: &str| {
            let mut key = format!("@@wakuwaku-entity:{head}{scope}:").into_bytes();
            key.extend_from_slice(name);
            key.extend_from_slice(tail.as_bytes());
            key
        };
        Ok(if kind == Kind::RwLock {
            let base = entity("RwLock:{", "}");
            let shared = Shared { readers: with(&base, ":r"), intents: with(&base, ":i") };
            Self {
                holder: with(&base, ":w"),
                queue: Some(with(&base, ":q")),
                slots: None,
                shared: Some(shared),
                is_others: true,
            }
        } else {
            // Another key of the same slot cannot be had for every name.
            Self { holder: entity("Lock:", ""), queue: None, slots: None, shared: None, is_others: true }
        })
    }
}

/// Matches the keys of leaders, and perhaps others.
pub(super) const LEADERS: &str = "leasehold:{lease*}:h";

/// Reads the key of a leader, if it is one.
pub(super) fn read_leader(key: &[u8]) -> Option<Key> {
    let rest = key.strip_prefix(PREFIX.as_bytes())?.strip_prefix(b"{lease")?.strip_suffix(b"}:h")?;
    let text = |bytes: &[u8]| std::str::from_utf8(bytes).ok().map(str::to_owned);
    let name = if let Some(name) = rest.strip_prefix(b":") {
        Name::from(text(name)?)
    } else {
        let colon = rest.iter().position(|byte| *byte == b':')?;
        let (what, rest) = (&rest[..colon], &rest[colon + 1..]);
        match what {
            b"+key" => Name::key(text(rest)?.parse().ok()?),
            b"+pair" => {
                let pair = text(rest)?;
                let (first, second) = pair.split_once(',')?;
                Name::key_pair(first.parse().ok()?, second.parse().ok()?)
            }
            b"+scope" => {
                let colon = rest.iter().position(|byte| *byte == b':')?;
                let length: usize = text(&rest[..colon])?.parse().ok()?;
                let (scope, bytes) = rest[colon + 1..].split_at_checked(length)?;
                Name::scoped(text(scope)?.into(), bytes, &shown_by_default(bytes))
            }
            _ => return None,
        }
    };
    Some(Key::of(Kind::Lease, &name))
}

const fn label(kind: Kind) -> &'static str {
    match kind {
        Kind::Lease => "lease",
        Kind::Lock => "lock",
        Kind::RwLock => "rwlock",
    }
}

fn with(base: &[u8], suffix: &str) -> Vec<u8> {
    [base, suffix.as_bytes()].concat()
}

/// The counter of the fencing tokens of a key.
pub(super) fn counter(key: Key) -> String {
    format!("{PREFIX}{{token:{}}}", key.get().rem_euclid(COUNTERS))
}

/// Where a release and messages to everybody are told. Channels are the same in every database of a server.
pub(super) fn channel(database: i64) -> String {
    format!("{PREFIX}{database}")
}

/// Where one session is told something.
pub(super) fn own_channel(database: i64, session: &str) -> String {
    format!("{PREFIX}{database}:{session}")
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::Scope;

    fn text(key: &[u8]) -> String {
        String::from_utf8_lossy(key).into_owned()
    }

    fn all(keys: &Keys) -> Vec<String> {
        let shared = keys.shared.iter().flat_map(|it| [&it.readers, &it.intents]);
        [&keys.holder].into_iter().chain(&keys.queue).chain(shared).map(|key| text(key)).collect()
    }

    /// As the cluster specification says.
    fn hash_tag(key: &str) -> &str {
        let Some(open) = key.find('{') else { return key };
        match key[open + 1..].find('}') {
            Some(0) | None => key,
            Some(length) => &key[open + 1..open + 1 + length],
        }
    }

    fn leasehold(kind: Kind, name: &Name) -> Keys {
        Keys::of(Layout::Leasehold, kind, name).unwrap()
    }

    /// R-10
    #[test]
    fn keys_are_as_the_table_says() {
        assert_eq!(
            all(&leasehold(Kind::Lease, &"sweeper".into())),
            ["leasehold:{lease:sweeper}:h", "leasehold:{lease:sweeper}:q"]
        );
        assert_eq!(
            all(&leasehold(Kind::RwLock, &"a".into())),
            [
                "leasehold:{rwlock:a}:h",
                "leasehold:{rwlock:a}:q",
                "leasehold:{rwlock:a}:r",
                "leasehold:{rwlock:a}:i"
            ]
        );
        let scoped = Scope::<u64>::new("invoice").name(&42);
        assert_eq!(text(&leasehold(Kind::Lock, &scoped).holder), "leasehold:{lock+scope:7:invoice42}:h");
        assert_eq!(text(&leasehold(Kind::Lock, &Name::key(-1)).holder), "leasehold:{lock+key:-1}:h");
        assert_eq!(counter(Key::of_pair(0, 1025)), "leasehold:{token:1}");
    }

    /// R-10, D31: no two names share a key, and the keys of a name share a slot, whatever braces and colons it has.
    #[test]
    fn keys_are_injective_and_share_a_slot() {
        let texts = [
            "a",
            "a:b",
            "}",
            "{",
            "{}",
            "a}:h",
            "a}:h}",
            "a}:",
            "}:w",
            "7:invoice42",
            "+key:1",
            "scope:1:ab",
        ];
        let mut names: Vec<Name> = texts.into_iter().map(Name::from).collect();
        for scope in [
            Scope::<str>::new("a"),
            Scope::new("ab"),
            Scope::new("a:b"),
            Scope::new("{x}"),
            Scope::new("1:a"),
        ] {
            names.extend(texts.iter().chain(&["b", "bc", "c"]).map(|name| scope.name(name)));
        }
        names.extend([
            Name::key(1),
            Name::key(-1),
            Name::key_pair(0, 1),
            Name::key_pair(1, 0),
            Name::autumn("a"),
        ]);
        let mut seen = HashMap::new();
        for name in &names {
            for kind in [Kind::Lease, Kind::Lock, Kind::RwLock] {
                let keys = all(&leasehold(kind, name));
                let slot = hash_tag(&keys[0]).to_owned();
                assert!(!slot.is_empty());
                let leader = (kind == Kind::Lease).then(|| Key::of(kind, name));
                assert_eq!(read_leader(keys[0].as_bytes()), leader, "{name:?}");
                for key in keys {
                    assert_eq!(hash_tag(&key), slot, "{key}");
                    if let Some(other) = seen.insert(key.clone(), (kind, name)) {
                        panic!("{key} is of {other:?} and {:?}", (kind, name));
                    }
                }
            }
        }
    }

    /// R-10: the golden keys.
    #[test]
    fn the_other_layout_is_that_of_wakuwaku() {
        let wakuwaku = |kind, name: &Name| Keys::of(Layout::Wakuwaku, kind, name);
        let name = Scope::<str>::new("orders").name("42");
        assert_eq!(text(&wakuwaku(Kind::Lock, &name).unwrap().holder), "@@wakuwaku-entity:Lock:orders:42");
        let keys = wakuwaku(Kind::RwLock, &name).unwrap();
        assert_eq!(text(&keys.holder), "@@wakuwaku-entity:RwLock:{orders:42}:w");
        assert_eq!(text(&keys.shared.unwrap().readers), "@@wakuwaku-entity:RwLock:{orders:42}:r");
        for (kind, name) in [(Kind::Lease, &name), (Kind::Lock, &Name::from("plain"))] {
            assert!(wakuwaku(kind, name) == Ok(leasehold(kind, name)));
        }
        let ambiguous = Scope::<str>::new("a:b").name("c");
        assert!(wakuwaku(Kind::Lock, &ambiguous).is_err_and(|why| why.contains("a:b")));
    }
}
