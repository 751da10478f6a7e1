//! Who holds what, for people.

use redis::{Cmd, Value, cmd};
use tokio::time::Instant;
use tracing::warn;

use super::RedisSession;
use super::calls::calling;
use crate::clock;
use crate::name::Key;
use crate::store::redis::{grant, keys};
use crate::store::{Holder, Seen};

/// How many keys the server looks at before others have their turn.
const KEYS_AT_ONCE: usize = 1_000;

impl RedisSession {
    pub(super) async fn holders_of(&mut self, keys: &[Key]) -> Vec<Option<Holder>> {
        let (mut commands, mut asked) = (Vec::new(), Vec::new());
        for (nth, key) in keys.iter().enumerate() {
            // Only those who wait ask.
            if let Some(keys) = self.waiting.get(key) {
                let readers = keys.shared.iter().map(|shared| &shared.readers);
                commands.push(calling(&self.common.scripts.who, [&keys.holder].into_iter().chain(readers)));
                asked.push(nth);
            }
        }
        let mut holders = vec![None; keys.len()];
        let replies = self.carry_out(commands, false).await.replies;
        for (nth, told) in asked.into_iter().zip(replies) {
            holders[nth] = told.ok().and_then(grant::holder).map(|(_, holder)| holder);
        }
        holders
    }

    pub(super) async fn look_around(&mut self) -> Option<Vec<Seen>> {
        let until = clock::now() + self.common.config.query_timeout / 2;
        let listening = |session| Seen { session, answers: true, ..Seen::default() };
        let mut all: Vec<Seen> = self.sessions().await?.into_iter().map(listening).collect();
        // A cluster is not searched: each node has a part of the keys.
        if self.link.as_ref().is_some_and(|link| !link.is_cluster()) {
            for (key, session, who) in self.leaders(until).await? {
                match all.iter_mut().find(|seen| seen.session == session) {
                    Some(seen) => {
                        seen.who = who;
                        seen.holds.push(key);
                    }
                    None => all.push(Seen { session, who, holds: vec![key], ..Seen::default() }),
                }
            }
        }
        Some(all)
    }

    /// The keys of leaders, as far as the server can be searched in the time. None where that is refused.
    async fn leaders(&mut self, until: Instant) -> Option<Vec<(Key, String, Holder)>> {
        let mut leaders = Vec::new();
        let mut cursor = b"0".to_vec();
        while clock::now() < until {
            let mut scan = cmd("SCAN");
            scan.arg(cursor.as_slice()).arg("MATCH").arg(keys::LEADERS).arg("COUNT").arg(KEYS_AT_ONCE);
            let Value::Array(page) = self.look(scan).await? else { break };
            let Ok([Value::BulkString(next), Value::Array(found)]) = <[Value; 2]>::try_from(page) else {
                break;
            };
            let found = found.into_iter().filter_map(|key| match key {
                Value::BulkString(key) => keys::read_leader(&key).map(|read| (read, key)),
                _ => None,
            });
            let found: Vec<_> = found.collect();
            let ask = |(_, key): &(Key, Vec<u8>)| calling(&self.common.scripts.who, [key]);
            let asks: Vec<Cmd> = found.iter().map(ask).collect();
            for ((key, _), told) in found.iter().zip(self.carry_out(asks, false).await.replies) {
                leaders.extend(told.ok().and_then(grant::holder).map(|(session, who)| (*key, session, who)));
            }
            if next == b"0" {
                break;
            }
            cursor = next;
        }
        Some(leaders)
    }

    /// Asks for what only those need who look on.
    async fn look(&mut self, command: Cmd) -> Option<Value> {
        match self.carry_out([command], false).await.replies.pop()? {
            Ok(value) => Some(value),
            Err(refusal) => {
                // Nothing seen would be taken for nobody there.
                warn!(reason = refusal.told(), "who leads and who stands by cannot be looked at");
                None
            }
        }
    }

    /// Those that listen. None where that is refused.
    async fn sessions(&mut self) -> Option<Vec<String>> {
        let prefix = keys::own_channel(self.common.database(), "");
        let mut channels = cmd("PUBSUB");
        channels.arg("CHANNELS").arg(format!("{prefix}*"));
        let Value::Array(found) = self.look(channels).await? else { return Some(Vec::new()) };
        let session = |channel: Value| match channel {
            Value::BulkString(channel) => {
                String::from_utf8(channel).ok()?.strip_prefix(&prefix).map(str::to_owned)
            }
            _ => None,
        };
        Some(found.into_iter().filter_map(session).collect())
    }
}
