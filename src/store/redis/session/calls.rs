//! What is said to the server, as commands.

use redis::{Cmd, Script, cmd};

use super::RedisSession;
use crate::name::Key;
use crate::store::redis::grant::{self, Held};
use crate::store::redis::keys::{self, Keys, Shared};
use crate::store::redis::wire;
use crate::store::{Ask, Freed, Mode};

/// Of a command of ours: room for the usual ones.
const MOST_ARGUMENTS: usize = 12;
const USUAL_BYTES: usize = 384;

impl RedisSession {
    pub(super) fn channel(&self) -> String {
        keys::channel(self.common.database())
    }

    pub(super) fn freed(&self, key: Key, is_clean: bool) -> String {
        wire::freed(&self.id, Freed { key, is_clean })
    }

    pub(super) fn releasing(&self, held: &Held, is_clean: bool) -> Cmd {
        let scripts = &self.common.scripts;
        let Keys { holder, queue, shared, .. } = &*held.keys;
        let (script, first) = match shared {
            Some(Shared { readers, .. }) if held.is_read => (&scripts.release_read, readers),
            _ => (&scripts.release, holder),
        };
        let keys = [first].into_iter().chain(queue);
        let mut command = calling(script, keys);
        command.arg(&*held.value).arg(self.channel()).arg(self.freed(held.key, is_clean));
        command
    }

    pub(super) fn extending(&self, held: &Held) -> Cmd {
        let scripts = &self.common.scripts;
        let (script, key) = match &held.keys.shared {
            Some(Shared { readers, .. }) if held.is_read => (&scripts.extend_read, readers),
            _ => (&scripts.extend, &held.keys.holder),
        };
        let mut command = calling(script, [key]);
        command.arg(&*held.value).arg(held.ttl);
        command
    }

    pub(super) fn withdrawing(&self, key: Key, keys: &Keys) -> Option<Cmd> {
        let intents = keys.shared.iter().map(|shared| &shared.intents);
        let mut command = calling(&self.common.scripts.withdraw, keys.queue.iter().chain(intents));
        command.arg(&self.member).arg(self.channel()).arg(self.freed(key, false));
        keys.queue.is_some().then_some(command)
    }

    pub(super) fn asking(&self, ask: &Ask, held: &Held) -> Cmd {
        let scripts = &self.common.scripts;
        let life = grant::whole_millis(self.common.config.waiting);
        let Keys { holder, queue, shared, .. } = &*held.keys;
        match (queue, shared) {
            (Some(queue), Some(Shared { readers, intents })) => {
                let script = if ask.mode == Mode::Read { &scripts.read } else { &scripts.write };
                let waits = match (ask.waits, ask.mode) {
                    (false, _) => 0,
                    (true, Mode::Read | Mode::Exclusive) => 1,
                    (true, Mode::Write) => 2,
                };
                let mut command = calling(script, [holder, queue, readers, intents]);
                command.arg(&*held.value).arg(held.ttl).arg(&self.member).arg(life).arg(waits);
                command
            }
            (Some(queue), None) if ask.waits => {
                let mut command = calling(&scripts.acquire, [holder, queue]);
                command.arg(&*held.value).arg(held.ttl).arg(&self.member).arg(life);
                command
            }
            _ => {
                let mut command = Cmd::with_capacity(MOST_ARGUMENTS, USUAL_BYTES);
                command
                    .arg("SET")
                    .arg(&**holder)
                    .arg(&*held.value)
                    .arg("NX")
                    .arg("PX")
                    .arg(held.ttl)
                    .arg("GET");
                command
            }
        }
    }

    /// Until they have what was written on this connection before, or half of the query timeout is over.
    pub(super) fn waiting_for_replicas(&self) -> Cmd {
        let config = &self.common.config;
        let mut wait = cmd("WAIT");
        wait.arg(config.target.replicas).arg(grant::whole_millis(config.query_timeout / 2));
        wait
    }
}

pub(super) fn calling<'a>(script: &Script, keys: impl IntoIterator<Item = &'a Vec<u8>>) -> Cmd {
    let keys: Vec<&Vec<u8>> = keys.into_iter().collect();
    let mut command = Cmd::with_capacity(MOST_ARGUMENTS, USUAL_BYTES);
    command.arg("EVALSHA").arg(script.get_hash()).arg(keys.len());
    for key in keys {
        command.arg(&**key);
    }
    command
}
