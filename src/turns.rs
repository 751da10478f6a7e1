//! Who of this process is next at a key: session locks are the session's, so its tasks exclude each other here.
//!
//! Tasks queue in the order of their arrival, and only the first one asks the store: `tokio::sync::RwLock`, which is fair.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{OwnedRwLockReadGuard, OwnedRwLockWriteGuard, RwLock};

use crate::name::Key;
use crate::store::Mode;

/// A queue for every key that somebody of this process holds or asks for.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    queues: Mutex<HashMap<Key, Arc<RwLock<()>>>>,
}

/// The right to ask for a key, and to hold it. Dropped, the next one has it.
#[derive(Debug)]
pub(crate) struct Turn {
    // In the order of their end: the queue is forgotten when nobody is left in it.
    #[expect(dead_code, reason = "held for its drop")]
    permit: Permit,
    #[expect(dead_code, reason = "held for its drop")]
    place: Place,
}

#[derive(Debug)]
#[expect(dead_code, reason = "held for their drop")]
enum Permit {
    Alone(OwnedRwLockWriteGuard<()>),
    WithOthers(OwnedRwLockReadGuard<()>),
}

/// One who has come to a queue.
#[derive(Debug)]
struct Place {
    turns: Arc<Turns>,
    key: Key,
    queue: Option<Arc<RwLock<()>>>,
}

/// There are too many keys.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Full;

impl Turns {
    fn queues(&self) -> MutexGuard<'_, HashMap<Key, Arc<RwLock<()>>>> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many keys there are.
    pub(crate) fn keys(&self) -> usize {
        self.queues().len()
    }

    fn place(self: &Arc<Self>, key: Key, room: usize) -> Result<(Place, Arc<RwLock<()>>), Full> {
        let mut queues = self.queues();
        let keys = queues.len();
        let queue = match queues.entry(key) {
            Entry::Occupied(queue) => Arc::clone(queue.get()),
            Entry::Vacant(_) if keys >= room => return Err(Full),
            Entry::Vacant(empty) => Arc::clone(empty.insert(Arc::default())),
        };
        drop(queues);
        let place = Place { turns: Arc::clone(self), key, queue: Some(Arc::clone(&queue)) };
        Ok((place, queue))
    }

    /// Takes the turn if it can be had at once.
    pub(crate) fn try_turn(
        self: &Arc<Self>,
        key: Key,
        mode: Mode,
        room: usize,
    ) -> Result<Option<Turn>, Full> {
        let (place, queue) = self.place(key, room)?;
        let permit = match mode {
            Mode::Exclusive | Mode::Write => queue.try_write_owned().map(Permit::Alone),
            Mode::Read => queue.try_read_owned().map(Permit::WithOthers),
        };
        Ok(permit.ok().map(|permit| Turn { permit, place }))
    }

    /// Waits for the turn. Cancel-safe: whoever gives up leaves the queue.
    pub(crate) async fn turn(self: &Arc<Self>, key: Key, mode: Mode, room: usize) -> Result<Turn, Full> {
        let (place, queue) = self.place(key, room)?;
        let permit = match mode {
            Mode::Exclusive | Mode::Write => Permit::Alone(queue.write_owned().await),
            Mode::Read => Permit::WithOthers(queue.read_owned().await),
        };
        Ok(Turn { permit, place })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut queues = self.turns.queues();
        self.queue = None;
        // Whoever comes takes a copy under the lock that is held here: one alone is the map's own.
        if let Entry::Occupied(queue) = queues.entry(self.key)
            && Arc::strong_count(queue.get()) == 1
        {
            queue.remove();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::name::Kind;

    const ROOM: usize = 2;

    fn key(name: &str) -> Key {
        Key::of(Kind::Lock, name)
    }

    #[tokio::test]
    async fn a_queue_is_forgotten_when_nobody_is_in_it() {
        let turns = Arc::new(Turns::default());
        let held = turns.turn(key("a"), Mode::Exclusive, ROOM).await.unwrap();
        assert!(turns.try_turn(key("a"), Mode::Exclusive, ROOM).unwrap().is_none());
        assert_eq!(turns.keys(), 1);
        let waits = tokio::time::timeout(std::time::Duration::ZERO, turns.turn(key("a"), Mode::Read, ROOM));
        assert!(waits.await.is_err());
        assert_eq!(turns.keys(), 1);
        drop(held);
        assert_eq!(turns.keys(), 0);
        let one = turns.try_turn(key("a"), Mode::Read, ROOM).unwrap().unwrap();
        let two = turns.try_turn(key("a"), Mode::Read, ROOM).unwrap().unwrap();
        assert!(turns.try_turn(key("a"), Mode::Write, ROOM).unwrap().is_none());
        drop(one);
        assert_eq!(turns.keys(), 1);
        drop(two);
        assert_eq!(turns.keys(), 0);
    }

    #[tokio::test]
    async fn there_is_room_for_so_many_keys_and_no_more() {
        let turns = Arc::new(Turns::default());
        let _a = turns.try_turn(key("a"), Mode::Exclusive, ROOM).unwrap().unwrap();
        let b = turns.try_turn(key("b"), Mode::Exclusive, ROOM).unwrap().unwrap();
        assert!(turns.try_turn(key("a"), Mode::Exclusive, ROOM).unwrap().is_none());
        turns.try_turn(key("c"), Mode::Exclusive, ROOM).unwrap_err();
        drop(b);
        assert!(turns.try_turn(key("c"), Mode::Exclusive, ROOM).unwrap().is_some());
    }

    /// L-03
    #[tokio::test]
    async fn tasks_have_their_turn_in_the_order_of_their_arrival() {
        let turns = Arc::new(Turns::default());
        let held = turns.turn(key("a"), Mode::Exclusive, ROOM).await.unwrap();
        let (order, mut seen) = tokio::sync::mpsc::unbounded_channel();
        let mut tasks = Vec::new();
        for n in 0..20 {
            let (turns, order) = (Arc::clone(&turns), order.clone());
            let mode = if n % 3 == 0 { Mode::Read } else { Mode::Exclusive };
            tasks.push(tokio::spawn(async move {
                let _turn = turns.turn(key("a"), mode, ROOM).await.unwrap();
                order.send(n).unwrap();
            }));
            tokio::task::yield_now().await;
        }
        drop((held, order));
        for task in tasks {
            task.await.unwrap();
        }
        let mut numbers = Vec::new();
        while let Some(n) = seen.recv().await {
            numbers.push(n);
        }
        assert_eq!(numbers, (0..20).collect::<Vec<_>>());
    }
}
