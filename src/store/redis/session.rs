//! One session: the grants that it has, and the connection that it has them by, for now.

mod calls;
mod connection;
mod exchange;
mod sight;
mod slots;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use rand::rngs::StdRng;
use redis::{Cmd, PushKind, Value, cmd};
use tokio::time::Instant;
use tracing::warn;

use self::calls::calling;
pub(super) use self::connection::load;
use super::checks::Found;
use super::grant::{Held, Token};
use super::keys::{self, Keys};
use super::link::{Link, Reply};
use super::refusal::{Meaning, Refusal};
use super::{Common, ENFORCEMENT, wire};
use crate::clock;
use crate::error::LossCause;
use crate::fence::FencingToken;
use crate::name::Key;
use crate::store::slots::{Amended, Entry, Looked, NoSlots, Record, Slots};
use crate::store::{
    Call, Enforcement, Event, Exchange, Exchanged, Holder, Message, Minted, Presence, Seen, Session, text,
};

pub(crate) struct RedisSession {
    common: Arc<Common>,
    /// None while there is no connection.
    link: Option<Link>,
    /// Tells it from all others.
    id: String,
    /// How it shows that it waits.
    member: String,
    found: Found,
    shortfalls: Vec<String>,
    rng: StdRng,
    /// What it has, or has asked for and may have.
    grants: HashMap<Token, Held>,
    waiting: HashMap<Key, Arc<Keys>>,
    doubts: Vec<Doubt>,
    /// The connection was lost meanwhile, and that was not told yet.
    is_interrupted: bool,
}

/// A grant that was asked for, given up or given back, and is perhaps still on its way to the server.
struct Doubt {
    held: Held,
    /// Until then.
    until: Instant,
    /// When it is undone next, and how long after that again.
    due: Instant,
    pause: Duration,
}

impl Doubt {
    fn new(held: Held, until: Instant) -> Self {
        Self { held, until, due: clock::now(), pause: FIRST_PAUSE }
    }
}

/// How long after it was undone a grant in doubt is undone again, at first: it doubles, up to the query timeout. A connection that
/// is lost under many tasks leaves hundreds of them, and exchanges may be less than a millisecond apart.
const FIRST_PAUSE: Duration = Duration::from_millis(50);

/// The server does not say which one it is.
fn foreign(keys: &Keys) -> String {
    let shared = keys.shared.iter().flat_map(|shared| [&shared.readers, &shared.intents]);
    let all = [&keys.holder].into_iter().chain(&keys.queue).chain(shared);
    let all: Vec<_> = all.map(|key| format!("{:?}", String::from_utf8_lossy(key))).collect();
    is_foreign(&format!("one of the keys {}", all.join(", ")))
}

fn foreign_key(key: &[u8]) -> String {
    is_foreign(&format!("the key {:?}", String::from_utf8_lossy(key)))
}

fn is_foreign(what: &str) -> String {
    format!("{what} has something that leasehold did not write: use another name, or another database")
}

impl Session for RedisSession {
    type Held = Held;

    fn enforcement(&self) -> Enforcement {
        ENFORCEMENT
    }

    fn shortfalls(&self) -> Vec<String> {
        self.shortfalls.clone()
    }

    fn address(&self) -> String {
        self.common.config.target.place.to_string()
    }

    async fn exchange(&mut self, exchange: &Exchange<Held>) -> Result<Exchanged<Held>, LossCause> {
        Ok(self.exchange_all(exchange).await)
    }

    async fn heartbeat(&mut self, held: &[Held]) -> Result<Vec<bool>, LossCause> {
        let mut commands: Vec<Cmd> = held.iter().map(|held| self.extending(held)).collect();
        commands.extend(self.undoing());
        if commands.is_empty() {
            commands.push(cmd("PING"));
        }
        let replies = self.carry_out(commands, true).await.replies;
        let is_ours = |reply: Reply| reply == Ok(Value::Int(1));
        let ours: Vec<bool> = replies.into_iter().map(is_ours).take(held.len()).collect();
        for (held, _) in held.iter().zip(&ours).filter(|(_, ours)| !**ours) {
            self.grants.remove(&held.token);
        }
        Ok(ours)
    }

    async fn mint(&mut self, held: &Held) -> Result<Minted, LossCause> {
        // The token first: if the lease is ours afterwards, it was when the token was made.
        let counter = keys::counter(held.key).into_bytes();
        let mint = calling(&self.common.scripts.mint, [&counter]);
        let mut replies = self.carry_out([mint], false).await.replies;
        let token = match replies.pop() {
            Some(Ok(Value::BulkString(token))) => {
                let token = String::from_utf8(token).ok().and_then(|token| token.parse::<u64>().ok());
                token.and_then(|token| FencingToken::try_from(token).ok())
            }
            Some(Ok(Value::Nil)) => return Ok(Minted::Failed(foreign_key(&counter))),
            Some(Err(refusal)) if refusal.meaning() == Meaning::Foreign => {
                return Ok(Minted::Failed(foreign_key(&counter)));
            }
            Some(Err(refusal)) => return Ok(Minted::Failed(refusal.told())),
            _ => None,
        };
        let extending = self.extending(held);
        let is_ours = self.carry_out([extending], false).await.replies.pop();
        Ok(match (is_ours, token) {
            (Some(Ok(Value::Int(1))), Some(token)) => Minted::Token(token),
            (Some(Ok(Value::Int(1))), None) => {
                Minted::Failed("the counter of tokens has no number".to_owned())
            }
            (Some(Err(refusal)), _) if refusal.meaning() != Meaning::Foreign => {
                Minted::Failed(refusal.told())
            }
            _ => Minted::Gone,
        })
    }

    async fn slots(&mut self, slots: &Slots) -> Result<Result<Looked, NoSlots>, LossCause> {
        Ok(self.look_at_slots(slots).await)
    }

    async fn amend(
        &mut self,
        held: &Held,
        slots: &Slots,
        expected: Option<&Record>,
        next: &Entry,
    ) -> Result<Amended, LossCause> {
        Ok(self.amend_slots(held, slots, expected, next).await)
    }

    async fn publish(&mut self, message: Message) -> Result<bool, LossCause> {
        let database = self.common.database();
        let (channel, message) = match message {
            Message::StepDown(_) => (self.channel(), message),
            Message::RollCall(call) => {
                (self.channel(), Message::RollCall(Call { reply_to: self.id.clone(), ..call }))
            }
            Message::Present(presence) => {
                let channel = keys::own_channel(database, &presence.call.reply_to);
                (channel, Message::Present(Presence { session: self.id.clone(), ..presence }))
            }
        };
        let telling = |text: String| {
            let mut command = cmd("PUBLISH");
            command.arg(channel.as_str()).arg(text);
            command
        };
        let commands: Vec<Cmd> = text::write(&message, wire::LIMIT).into_iter().map(telling).collect();
        let replies = self.carry_out(commands, false).await.replies;
        let refused: Option<Refusal> = replies.into_iter().find_map(Result::err);
        if let Some(refusal) = &refused {
            warn!(reason = refusal.told(), "a message could not be sent");
        }
        Ok(refused.is_none())
    }

    async fn holders(&mut self, keys: &[Key]) -> Result<Vec<Option<Holder>>, LossCause> {
        Ok(self.holders_of(keys).await)
    }

    async fn survey(&mut self) -> Result<Option<Vec<Seen>>, LossCause> {
        Ok(self.look_around().await)
    }

    async fn event(&mut self) -> Event {
        if std::mem::take(&mut self.is_interrupted) {
            return Event::Interrupted;
        }
        // Without a connection there is nothing to be told; the next statement makes one.
        let Some(link) = &mut self.link else { return std::future::pending().await };
        match link.pushes.recv().await {
            Some(push) if push.kind == PushKind::Message => wire::event(push, &self.id),
            Some(push) if push.kind != PushKind::Disconnection => Event::Ignored,
            Some(_) | None => {
                self.interrupted("the connection was closed");
                std::mem::take(&mut self.is_interrupted);
                Event::Interrupted
            }
        }
    }

    async fn end(mut self) {
        self.undo_all_at_once();
        let left: Vec<Cmd> = self.grants.values().map(|held| self.releasing(held, false)).collect();
        let queued: Vec<Cmd> =
            self.waiting.iter().filter_map(|(key, keys)| self.withdrawing(*key, keys)).collect();
        let commands: Vec<Cmd> = left.into_iter().chain(queued).chain(self.undoing()).collect();
        self.carry_out(commands, false).await;
        self.grants.clear();
        self.doubts.clear();
    }
}

/// What it had is undone by the next session, or goes when its time has come.
impl Drop for RedisSession {
    fn drop(&mut self) {
        let (now, ttl) = (clock::now(), self.common.config.ttl);
        // Each is there for as long as its own ttl, unless somebody undoes it.
        let until = |held: &Held| now + ttl.max(Duration::from_millis(held.ttl));
        let doubts = self.doubts.drain(..).map(|doubt| doubt.held);
        let left = self.grants.drain().map(|(_, held)| held).chain(doubts);
        self.common.leftovers().extend(left.map(|held| {
            let until = until(&held);
            (held, until)
        }));
    }
}
