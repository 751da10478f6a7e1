//! Grants: asked for, given back, and undone where nobody may have them.

use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, Value};

use super::connection::Carried;
use super::{Doubt, RedisSession, foreign, foreign_key};
use crate::clock;
use crate::name::Key;
use crate::store::redis::grant::{self, Held};
use crate::store::redis::keys::Keys;
use crate::store::redis::link::Reply;
use crate::store::redis::refusal::Meaning;
use crate::store::{Answer, Ask, Exchange, Exchanged, Return};

impl RedisSession {
    pub(super) async fn exchange_all(&mut self, exchange: &Exchange<Held>) -> Exchanged<Held> {
        let Exchange { releases, withdrawals, asks } = exchange;
        let mut commands: Vec<Cmd> = Vec::with_capacity(releases.len() + withdrawals.len() + asks.len());
        for Return { held, is_clean, is_kept } in releases {
            commands.push(if *is_kept { self.extending(held) } else { self.releasing(held, *is_clean) });
        }
        let prepared: Vec<Result<Held, String>> = asks.iter().map(|ask| self.prepare(ask)).collect();
        // After the releases: their replies come first, those of the asks next.
        for (ask, held) in asks.iter().zip(&prepared) {
            if let Ok(held) = held {
                commands.push(self.asking(ask, held));
            }
        }
        let replicas = self.common.config.target.replicas;
        let waits_for_replicas = replicas > 0 && prepared.iter().any(Result::is_ok);
        commands.extend(waits_for_replicas.then(|| self.waiting_for_replicas()));
        // Before them, in the order that the seam asks for; nobody looks at what comes of these.
        let gone = withdrawals.iter().filter_map(|key| Some((*key, self.waiting.remove(key)?)));
        let gone: Vec<(Key, Arc<Keys>)> = gone.collect();
        let mut first: Vec<Cmd> =
            gone.iter().filter_map(|(key, keys)| self.withdrawing(*key, keys)).collect();
        first.extend(self.undoing());
        let others = first.len();
        first.append(&mut commands);

        let Carried { mut replies, is_repeated, is_same_server } = self.carry_out(first, false).await;
        let acknowledged = waits_for_replicas.then(|| acknowledged(replies.pop()));
        if is_repeated {
            for held in prepared.iter().flatten() {
                self.doubt(held);
            }
        }
        let mut replies = replies.into_iter().skip(others);
        let mut released = Vec::with_capacity(releases.len());
        for Return { held, is_kept, .. } in releases {
            self.grants.remove(&held.token);
            // A release that was sent again finds nothing where it was carried out before.
            let reply = replies.next();
            if matches!(&reply, Some(Err(refusal)) if refusal.meaning() != Meaning::Foreign) {
                self.doubt(held);
            }
            let is_done = reply == Some(Ok(Value::Int(1)));
            let may_be_done = matches!(reply, Some(Ok(_))) && is_repeated && is_same_server;
            released.push(is_done || !is_kept && may_be_done);
        }
        let mut answers = Vec::with_capacity(asks.len());
        let mut refused = Vec::new();
        for (ask, held) in asks.iter().zip(prepared) {
            answers.push(match held {
                Ok(held) => match replies.next() {
                    Some(reply) => {
                        refused.extend(reply.is_err().then(|| held.clone()));
                        self.answer(ask, held, reply)
                    }
                    None => Answer::Failed("the server did not answer".to_owned()),
                },
                Err(why) => Answer::Failed(why),
            });
        }
        self.give_back(&refused).await;
        if let Some(acknowledged) = acknowledged.filter(|count| *count < i64::from(replicas)) {
            self.undo(&mut answers, acknowledged).await;
        }
        Exchanged { released, answers }
    }

    /// It may be in the server though nobody has it, or get there yet: it is undone again and again for as long as that.
    fn doubt(&mut self, held: &Held) {
        let until = clock::now() + self.common.config.ttl.max(Duration::from_millis(held.ttl));
        self.doubts.push(Doubt::new(held.clone(), until));
    }

    /// A grant to be, noted before anything is sent.
    fn prepare(&mut self, ask: &Ask) -> Result<Held, String> {
        let config = &self.common.config;
        let keys = match self.waiting.get(&ask.key) {
            Some(keys) => Arc::clone(keys),
            None => Arc::new(Keys::of(config.target.layout, ask.kind, &ask.name)?),
        };
        let who = (self.id.as_str(), config.identity.as_str());
        let held = Held::new(ask.key, keys, ask.mode, ask.ttl, who, &mut self.rng);
        self.grants.insert(held.token, held.clone());
        Ok(held)
    }

    fn answer(&mut self, ask: &Ask, held: Held, reply: Reply) -> Answer<Held> {
        let refused = match reply {
            Ok(Value::Nil) => None,
            // Ours already, by an earlier attempt.
            Ok(Value::BulkString(by)) if by == held.value.as_bytes() => None,
            Ok(Value::BulkString(by)) if grant::is_ours(&by) || held.keys.is_others => {
                Some(Answer::Busy { registered: ask.waits })
            }
            Ok(_) => Some(Answer::Failed(foreign_key(&held.keys.holder))),
            Err(refusal) if refusal.meaning() == Meaning::Foreign => {
                Some(Answer::Failed(foreign(&held.keys)))
            }
            Err(refusal) => Some(Answer::Failed(refusal.told())),
        };
        match refused {
            None => {
                self.waiting.remove(&ask.key);
                Answer::Granted(held)
            }
            Some(refused) => {
                self.grants.remove(&held.token);
                if matches!(refused, Answer::Busy { registered: true }) {
                    self.waiting.insert(ask.key, held.keys);
                }
                refused
            }
        }
    }

    /// Undoes what scripts did before they ended in an error: the server does not.
    async fn give_back(&mut self, refused: &[Held]) {
        if refused.is_empty() {
            return;
        }
        // Known until it is done, should the session be given up meanwhile.
        for held in refused {
            self.doubt(held);
        }
        let commands: Vec<Cmd> = refused.iter().map(|held| self.releasing(held, false)).collect();
        let replies = self.carry_out(commands, false).await.replies;
        let is_done = |held: &Held| {
            let nth = refused.iter().position(|it| it.token == held.token);
            nth.and_then(|nth| replies.get(nth)).is_some_and(Result::is_ok)
        };
        self.doubts.retain(|doubt| !is_done(&doubt.held));
    }

    /// Undoes grants that the replicas did not acknowledge.
    async fn undo(&mut self, answers: &mut [Answer<Held>], acknowledged: i64) {
        let wanted = self.common.config.target.replicas;
        let why = format!(
            "{acknowledged} of {wanted} replicas acknowledged the grant in time, so it was undone: look at the replication, or \
             ask for fewer"
        );
        let mut undone = Vec::new();
        for answer in answers {
            if let Answer::Granted(held) = answer {
                undone.push(held.clone());
                *answer = Answer::Failed(why.clone());
            }
        }
        let commands: Vec<Cmd> = undone.iter().map(|held| self.releasing(held, false)).collect();
        self.carry_out(commands, true).await;
        for held in &undone {
            self.grants.remove(&held.token);
        }
    }
}

/// How many replicas have what was written.
pub(super) fn acknowledged(reply: Option<Reply>) -> i64 {
    match reply.and_then(Result::ok) {
        Some(Value::Int(count)) => count,
        _ => 0,
    }
}
