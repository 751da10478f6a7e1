//! What a session holds and waits for, as far as it was told.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};

use rand::RngExt as _;
use rand::rngs::StdRng;

use super::checks::Lock;
use super::fence::{BLOCKED, Beginner, FENCED};
use super::statements::{self, Take, Waiting};
use crate::name::Key;
use crate::store::{Answer, Ask, Mode};

/// One grant of this session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Held {
    pub(super) key: Key,
    pub(super) mode: Mode,
    pub(super) is_section: bool,
    /// Tells apart the grants of one key, whether they follow each other or are those of several readers.
    serial: u64,
}

pub(super) struct Claims {
    /// Session locks stack, and the server does not tell how high: several readers of a session share one lock.
    held: HashMap<Key, Vec<Held>>,
    /// The keys that this session is registered as waiting for.
    waiting: HashSet<Key>,
    /// Those of them that it is seen to wait for to write.
    intents: HashSet<Key>,
    /// The term keys of what it holds.
    terms: HashMap<Key, Key>,
    /// Those of what it was found not to hold any more: to be given back, or nobody else's term would begin.
    orphans: Vec<Key>,
    serial: u64,
    /// Of the last term. The first one is random; no two terms of a session have the same.
    number: i32,
}

/// The last grant of a key has ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ended {
    pub(super) term: Option<Key>,
}

/// There is a lock that this session did not take, or one is missing without which another one is worth nothing.
#[derive(Clone, Copy, Debug)]
pub(super) struct Foreign;

impl Claims {
    pub(super) fn new() -> Self {
        Self {
            held: HashMap::new(),
            waiting: HashSet::new(),
            intents: HashSet::new(),
            terms: HashMap::new(),
            orphans: Vec::new(),
            serial: 0,
            number: rand::make_rng::<StdRng>().random(),
        }
    }

    pub(super) fn holds(&self, held: &Held) -> bool {
        self.held.get(&held.key).is_some_and(|grants| grants.contains(held))
    }

    pub(super) fn waits_for(&self, key: Key) -> bool {
        self.waiting.contains(&key)
    }

    pub(super) fn intends(&self, key: Key) -> bool {
        self.intents.contains(&key)
    }

    pub(super) fn all_held(&self) -> impl Iterator<Item = Held> {
        self.held.values().filter_map(|grants| grants.first().copied())
    }

    pub(super) fn all_waited_for(&self) -> impl Iterator<Item = Key> {
        self.waiting.iter().copied()
    }

    /// The term key by which what is held of this key fences transactions.
    pub(super) fn term(&self, key: Key) -> Option<Key> {
        self.terms.get(&key).copied()
    }

    /// A term has begun, or may: what is held of this key fences transactions.
    pub(super) fn begin(&mut self, key: Key, term: Key) {
        self.terms.insert(key, term);
    }

    pub(super) fn all_terms(&self) -> impl Iterator<Item = Key> {
        self.terms.values().copied()
    }

    /// Whoever holds that begins a term.
    pub(super) fn beginner(&mut self, held: &Held) -> Beginner {
        Beginner { key: held.key, mode: held.mode, number: next(&mut self.number) }
    }

    pub(super) fn all_intents(&self) -> impl Iterator<Item = Key> {
        self.intents.iter().copied()
    }

    /// What of these is worth asking the server for, and whose asks each is: several readers ask as one. What is held
    /// already, by others than readers, is not asked for: the server would grant it once more.
    pub(super) fn takes(&mut self, asks: &[Ask]) -> Vec<(Vec<usize>, Take)> {
        let mut takes: Vec<(Vec<usize>, Take)> = Vec::with_capacity(asks.len());
        let mut places: HashMap<Key, usize> = HashMap::with_capacity(asks.len());
        for (n, ask) in asks.iter().enumerate() {
            let held = self.held.get(&ask.key).and_then(|grants| grants.first());
            let (joins, has_term) = (held.is_some(), self.terms.contains_key(&ask.key));
            if held.is_some_and(|held| (held.mode, ask.mode) != (Mode::Read, Mode::Read)) {
                continue;
            }
            match places.entry(ask.key) {
                Entry::Occupied(at) => {
                    let (asking, take) = &mut takes[*at.get()];
                    if (take.mode, ask.mode) == (Mode::Read, Mode::Read) {
                        asking.push(n);
                        if ask.is_fenced && !has_term {
                            take.number.get_or_insert_with(|| next(&mut self.number));
                        }
                        if take.waiting == Waiting::No && ask.register {
                            take.waiting = Waiting::Register;
                        }
                    }
                }
                Entry::Vacant(at) => {
                    at.insert(takes.len());
                    let waiting = if self.waits_for(ask.key) {
                        Waiting::Registered
                    } else if ask.register {
                        Waiting::Register
                    } else {
                        Waiting::No
                    };
                    let (key, mode, intends) = (ask.key, ask.mode, self.intends(ask.key));
                    let number = (ask.is_fenced && !has_term).then(|| next(&mut self.number));
                    let is_section = ask.is_section();
                    let take = Take { key, mode, waiting, is_section, number, joins, intends };
                    takes.push((vec![n], take));
                }
            }
        }
        takes
    }

    /// A key was granted: it is waited for no more.
    pub(super) fn grant(&mut self, take: &Take) -> Held {
        self.serial += 1;
        let Take { key, mode, is_section, .. } = *take;
        let held = Held { key, mode, is_section, serial: self.serial };
        self.held.entry(take.key).or_default().push(held);
        self.waiting.remove(&take.key);
        // By others' grants of the same key, such as those of a lease with a raw one, the server does not give it back.
        if take.mode == Mode::Write && take.intends {
            self.intents.remove(&take.key);
        }
        held
    }

    /// What the server says to one who asks, in the words of its statement.
    pub(super) fn answer(&mut self, take: &Take, outcome: &str) -> Answer<Held> {
        match outcome {
            "busy" => Answer::Busy { registered: false },
            "waiting" | "intends" | "again" => {
                self.waiting.insert(take.key);
                if outcome == "intends" {
                    self.intents.insert(take.key);
                }
                Answer::Busy { registered: outcome != "again" }
            }
            BLOCKED => Answer::Fenced(self.grant(take), None),
            outcome => {
                if let Some(beginner) = take.beginner().filter(|_| outcome == FENCED) {
                    self.begin(take.key, beginner.term());
                }
                Answer::Granted(self.grant(take))
            }
        }
    }

    /// A grant has ended. Where it was the last one of its key, that is to be unlocked, and its term key before.
    pub(super) fn end(&mut self, held: &Held) -> Option<Ended> {
        let Entry::Occupied(mut grants) = self.held.entry(held.key) else { return None };
        grants.get_mut().retain(|it| it != held);
        grants.get().is_empty().then(|| {
            grants.remove();
            Ended { term: self.terms.remove(&held.key) }
        })
    }

    /// The key is not held any more, by nobody.
    pub(super) fn forget(&mut self, key: Key) {
        self.held.remove(&key);
        self.orphans.extend(self.terms.remove(&key));
    }

    /// The term keys to be given back that nothing else would give back.
    pub(super) fn take_orphans(&mut self) -> Vec<Key> {
        std::mem::take(&mut self.orphans)
    }

    /// It waits for the key no more. Tells whether it did.
    pub(super) fn withdraw(&mut self, key: Key) -> bool {
        self.waiting.remove(&key)
    }

    /// It does not keep readers out any more. Tells whether it did.
    pub(super) fn give_way(&mut self, key: Key) -> bool {
        self.intents.remove(&key)
    }

    /// Compares with what the lock table shows, and forgets what is not there. Gives the keys that it does not wait for any
    /// more.
    ///
    /// # Errors
    ///
    /// Somebody else runs statements on it, or an earlier one is carried out twice.
    pub(super) fn compare<'a>(&mut self, locks: impl Iterator<Item = &'a Lock>) -> Result<Vec<Key>, Foreign> {
        let waiting: HashMap<Key, Key> = self.all_waited_for().map(|key| (key.waiting(), key)).collect();
        let intents: HashMap<Key, Key> =
            self.all_intents().map(|key| (statements::intent(key), key)).collect();
        let mut missing: HashSet<Key> = self.held.keys().copied().collect();
        let (mut unregistered, mut no_intents) = (self.waiting.clone(), self.intents.clone());
        let mut terms: HashMap<Key, Key> = self.terms.iter().map(|(key, term)| (*term, *key)).collect();
        for lock in locks {
            let held = self.held.get(&lock.key).and_then(|grants| grants.first());
            if held.is_some_and(|held| lock.is_in(held.mode)) {
                missing.remove(&lock.key);
            } else if let Some(key) = waiting.get(&lock.key).filter(|_| lock.is_in(Mode::Read)) {
                unregistered.remove(key);
            } else if let Some(key) = intents.get(&lock.key).filter(|_| lock.is_in(Mode::Write)) {
                no_intents.remove(key);
            } else if !lock.is_in(Mode::Exclusive) || terms.remove(&lock.key).is_none() {
                return Err(Foreign);
            }
        }
        if terms.values().any(|key| !missing.contains(key)) {
            // The lease is there, and what fences its transactions is not: they could outlive it.
            return Err(Foreign);
        }
        let orphans = self.terms.extract_if(|key, _| missing.contains(key)).map(|(_, term)| term);
        self.orphans.extend(orphans.filter(|term| !terms.contains_key(term)));
        self.held.retain(|key, _| !missing.contains(key));
        self.waiting.retain(|key| !unregistered.contains(key));
        self.intents.retain(|key| !no_intents.contains(key));
        Ok(unregistered.into_iter().collect())
    }
}

fn next(number: &mut i32) -> i32 {
    *number = number.wrapping_add(1);
    *number
}
