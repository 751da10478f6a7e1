//! One session: the grants that it has, and the connection that it has them by, for now.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use rand::RngExt as _;
use rand::rngs::StdRng;
use redis::{Cmd, Pipeline, PushKind, Script, Value, cmd};
use tokio::time::Instant;
use tracing::{debug, warn};

use super::checks::{self, Found};
use super::grant::{self, Held, Token};
use super::keys::{self, Keys, Shared};
use super::link::{Link, Reply, batch};
use super::refusal::{self, Meaning, Refusal};
use super::{Common, ENFORCEMENT, wire};
use crate::clock;
use crate::error::{ConnectError, LossCause};
use crate::fence::FencingToken;
use crate::name::{Key, Kind};
use crate::redis::Layout;
use crate::store::slots::{Amended, Entry, Looked, Moment, NoSlots, Record, Slots};
use crate::store::{
    Answer, Ask, Call, Enforcement, Event, Exchange, Exchanged, Freed, Holder, Message, Minted, Mode,
    Presence, Return, Seen, Session, text,
};

/// How long it waits before it connects again, at first and at the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(500));

/// Of a command of ours: room for the usual ones.
const MOST_ARGUMENTS: usize = 12;
const USUAL_BYTES: usize = 384;

/// How many keys the server looks at before others have their turn.
const KEYS_AT_ONCE: usize = 1_000;

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
    /// Asked for, given up or given back, and perhaps still on its way to the server: until then.
    doubts: Vec<(Held, Instant)>,
    /// The connection was lost meanwhile, and that was not told yet.
    is_interrupted: bool,
}

/// The replies to one batch.
struct Carried {
    replies: Vec<Reply>,
    /// Some commands were sent more than once: those that were carried out may look as if others had been quicker.
    is_repeated: bool,
    /// And the server was the same one all the while, and lost nothing.
    is_same_server: bool,
}

/// Whether the server knew the scripts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Known {
    Yes,
    No,
}

impl RedisSession {
    /// Connects, looks whether the server can be trusted, and undoes what earlier sessions left behind.
    pub(super) async fn open(common: Arc<Common>) -> Result<Self, ConnectError> {
        let mut rng: StdRng = rand::make_rng();
        let id = format!("{:016x}", rng.random::<u64>());
        let member = grant::member(&common.config.identity, &id);
        let mut session = Self {
            common,
            link: None,
            id,
            member,
            found: Found::default(),
            shortfalls: Vec::new(),
            rng,
            grants: HashMap::new(),
            waiting: HashMap::new(),
            doubts: Vec::new(),
            is_interrupted: false,
        };
        session.reopen().await?;
        for shortfall in &session.shortfalls {
            warn!(identity = %session.common.config.identity, shortfall, "the store does less than it could");
        }
        session.undo_leftovers().await?;
        Ok(session)
    }

    /// Connects anew; the grants stay what they are.
    async fn reopen(&mut self) -> Result<(), ConnectError> {
        let Common { config, scripts, .. } = &*self.common;
        let mut link = Link::open(&config.target.place, config.query_timeout).await?;
        let found = checks::look(&mut link).await?;
        found.judge(link.is_cluster())?;
        let mut shortfalls = found.shortfalls();
        link.load(scripts.all()).await.map_err(|error| refusal::of_connect(&error))?;
        let database = self.common.database();
        let channels = [keys::channel(database), keys::own_channel(database, &self.id)];
        if let Err(error) = link.subscribe(&channels).await {
            match refusal::of_connect(&error) {
                ConnectError::Authentication { reason } => shortfalls.push(format!(
                    "releases are not pushed ({reason}): standbys notice them at their next poll; grant the user the \
                     channels leasehold:*"
                )),
                other => return Err(other),
            }
        }
        let mut name = cmd("CLIENT");
        name.arg("SETNAME").arg(format!("leasehold/{}", config.identity));
        // For people only. A cluster's connections are made by its client.
        if !link.is_cluster() {
            link.ask(name).await.map_err(|error| refusal::of_connect(&error))?;
        }
        (self.link, self.found, self.shortfalls) = (Some(link), found, shortfalls);
        Ok(())
    }

    async fn undo_leftovers(&mut self) -> Result<(), ConnectError> {
        let now = clock::now();
        self.doubts = std::mem::take(&mut *self.common.leftovers());
        self.doubts.retain(|(_, until)| now < *until);
        let undone = self.undoing();
        if undone.is_empty() {
            return Ok(());
        }
        debug!(grants = undone.len(), "undoes what an earlier session may have left behind");
        let Some(link) = &mut self.link else { return Ok(()) };
        let replies = link.send(&batch(undone)).await.map_err(|error| refusal::of_connect(&error))?;
        let refusal = replies.into_iter().find_map(Result::err);
        if let Some(refusal) = refusal.filter(|it| it.meaning() != Meaning::Foreign) {
            return Err(refusal::of_answer(&refusal));
        }
        // From now on only what is still on its way counts.
        let arrived = now + self.common.config.ttl;
        self.doubts.iter_mut().for_each(|(_, until)| *until = arrived.min(*until));
        Ok(())
    }

    /// Gives back what may have arrived in the server after all.
    fn undoing(&mut self) -> Vec<Cmd> {
        let (now, grants) = (clock::now(), &self.grants);
        self.doubts.retain(|(_, until)| now < *until);
        let given_up = self.doubts.iter().filter(|(held, _)| !grants.contains_key(&held.token));
        given_up.map(|(held, _)| self.releasing(held, false)).collect()
    }

    /// Sends a batch until every command has its reply, over as many connections as it takes. `is_write`: until the server
    /// can write, too.
    async fn carry_out(&mut self, commands: impl IntoIterator<Item = Cmd>, is_write: bool) -> Carried {
        let mut commands = batch(commands);
        let mut missing: Vec<usize> = (0..commands.len()).collect();
        let mut replies: Vec<Option<Reply>> = vec![None; commands.len()];
        let run = self.found.run.clone();
        let (mut pause, mut is_repeated) = (PAUSES.0, false);
        while !missing.is_empty() {
            let attempt = self.attempt(&commands, &missing, &mut replies, is_write).await;
            let pending = |nth: &usize| replies[missing[*nth]].is_none();
            let again: Vec<usize> = (0..missing.len()).filter(pending).collect();
            if !again.is_empty() {
                let is_forgotten = attempt == Ok(Known::No);
                let of_all: Vec<&Cmd> = commands.cmd_iter().collect();
                let same = |nth: &usize| of_all[*nth].clone();
                // Where the server has forgotten the scripts, it may do so again.
                let in_full =
                    |nth: &usize| self.common.scripts.in_full(of_all[*nth]).unwrap_or_else(|| same(nth));
                commands = batch(again.iter().map(|nth| if is_forgotten { in_full(nth) } else { same(nth) }));
            }
            missing = again.into_iter().map(|nth| missing[nth]).collect();
            if let Err(reason) = attempt {
                debug!(reason, "asks again");
                is_repeated = true;
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(PAUSES.1);
            }
        }
        let is_same_server = run.is_some() && run == self.found.run;
        Carried { replies: replies.into_iter().flatten().collect(), is_repeated, is_same_server }
    }

    /// One attempt at those that have no reply yet. The reason for another one, after a pause.
    async fn attempt(
        &mut self,
        commands: &Pipeline,
        missing: &[usize],
        replies: &mut [Option<Reply>],
        is_write: bool,
    ) -> Result<Known, String> {
        if self.link.is_none() {
            self.reopen().await.map_err(|error| error.to_string())?;
        }
        let Some(link) = &mut self.link else { return Err("no connection".to_owned()) };
        let answers = match link.send(commands).await {
            Ok(answers) => answers,
            Err(error) => return Err(self.interrupted(&error.to_string())),
        };
        let (mut forgotten, mut elsewhere, mut not_now) = (false, None, None);
        for (nth, reply) in missing.iter().zip(answers) {
            match reply.as_ref().map_err(|refusal| (refusal.meaning(), refusal.told())) {
                Err((Meaning::NoScript, _)) => forgotten = true,
                Err((Meaning::Elsewhere, told)) => elsewhere = Some(told),
                Err((Meaning::NotNow, told)) if is_write => not_now = Some(told),
                _ => replies[*nth] = Some(reply),
            }
        }
        if forgotten && let Err(error) = link.load(self.common.scripts.all()).await {
            return Err(self.interrupted(&error.to_string()));
        }
        match (elsewhere, not_now) {
            (Some(told), _) => Err(self.interrupted(&told)),
            (None, Some(told)) => Err(told),
            (None, None) if forgotten => Ok(Known::No),
            (None, None) => Ok(Known::Yes),
        }
    }

    fn interrupted(&mut self, reason: &str) -> String {
        // A cluster's connection finds its nodes again by itself.
        if self.link.as_ref().is_some_and(|link| !link.is_cluster()) {
            self.link = None;
        }
        self.is_interrupted = true;
        reason.to_owned()
    }

    fn channel(&self) -> String {
        keys::channel(self.common.database())
    }

    fn freed(&self, key: Key, is_clean: bool) -> String {
        wire::freed(&self.id, Freed { key, is_clean })
    }

    fn releasing(&self, held: &Held, is_clean: bool) -> Cmd {
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

    fn extending(&self, held: &Held) -> Cmd {
        let scripts = &self.common.scripts;
        let (script, key) = match &held.keys.shared {
            Some(Shared { readers, .. }) if held.is_read => (&scripts.extend_read, readers),
            _ => (&scripts.extend, &held.keys.holder),
        };
        let mut command = calling(script, [key]);
        command.arg(&*held.value).arg(held.ttl);
        command
    }

    fn withdrawing(&self, key: Key, keys: &Keys) -> Option<Cmd> {
        let intents = keys.shared.iter().map(|shared| &shared.intents);
        let mut command = calling(&self.common.scripts.withdraw, keys.queue.iter().chain(intents));
        command.arg(&self.member).arg(self.channel()).arg(self.freed(key, false));
        keys.queue.is_some().then_some(command)
    }

    fn asking(&self, ask: &Ask, held: &Held) -> Cmd {
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
        let until = clock::now() + self.common.config.ttl;
        self.doubts.extend(refused.iter().map(|held| (held.clone(), until)));
        let commands: Vec<Cmd> = refused.iter().map(|held| self.releasing(held, false)).collect();
        let replies = self.carry_out(commands, false).await.replies;
        let is_done = |held: &Held| {
            let nth = refused.iter().position(|it| it.token == held.token);
            nth.and_then(|nth| replies.get(nth)).is_some_and(Result::is_ok)
        };
        self.doubts.retain(|(held, _)| !is_done(held));
    }

    /// Until they have what was written on this connection before, or half of the query timeout is over.
    fn waiting_for_replicas(&self) -> Cmd {
        let config = &self.common.config;
        let mut wait = cmd("WAIT");
        wait.arg(config.target.replicas).arg(grant::whole_millis(config.query_timeout / 2));
        wait
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

fn calling<'a>(script: &Script, keys: impl IntoIterator<Item = &'a Vec<u8>>) -> Cmd {
    let keys: Vec<&Vec<u8>> = keys.into_iter().collect();
    let mut command = Cmd::with_capacity(MOST_ARGUMENTS, USUAL_BYTES);
    command.arg("EVALSHA").arg(script.get_hash()).arg(keys.len());
    for key in keys {
        command.arg(&**key);
    }
    command
}

/// How many replicas have what was written.
fn acknowledged(reply: Option<Reply>) -> i64 {
    match reply.and_then(Result::ok) {
        Some(Value::Int(count)) => count,
        _ => 0,
    }
}

fn slots_key(layout: Layout, slots: &Slots) -> Result<Vec<u8>, NoSlots> {
    let keys = Keys::of(layout, Kind::Lock, &slots.name).map_err(NoSlots::Forbidden)?;
    keys.slots.ok_or_else(|| {
        NoSlots::Forbidden("wakuwaku's layout has no slots: use a name that is in no scope".to_owned())
    })
}

fn read_look(told: Value) -> Option<Looked> {
    let Value::Array(parts) = told else { return None };
    let [Value::BulkString(now), record] = <[Value; 2]>::try_from(parts).ok()? else { return None };
    let now = Moment(String::from_utf8(now).ok()?.parse().ok()?);
    let record = match record {
        Value::Nil => None,
        Value::BulkString(line) => Some(read_record(line)?),
        _ => return None,
    };
    Some(Looked { now, record })
}

fn read_record(line: Vec<u8>) -> Option<Record> {
    String::from_utf8(line).ok()?.parse().ok()
}

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
            let until = clock::now() + self.common.config.ttl;
            self.doubts.extend(prepared.iter().flatten().map(|held| (held.clone(), until)));
        }
        let mut replies = replies.into_iter().skip(others);
        let mut released = Vec::with_capacity(releases.len());
        for Return { held, .. } in releases {
            self.grants.remove(&held.token);
            // A release that was sent again finds nothing where it was carried out before.
            let is_done = replies.next().is_some_and(|reply| reply == Ok(Value::Int(1)));
            released.push(is_done || is_repeated && is_same_server);
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
        Ok(Exchanged { released, answers })
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
        let layout = self.common.config.target.layout;
        let key = match slots_key(layout, slots) {
            Ok(key) => key,
            Err(why) => return Ok(Err(why)),
        };
        let asking = calling(&self.common.scripts.slots, [&key]);
        Ok(match self.carry_out([asking], false).await.replies.pop() {
            Some(Ok(told)) => read_look(told).ok_or_else(|| NoSlots::Failed(foreign_key(&key))),
            Some(Err(refusal)) if refusal.meaning() == Meaning::Foreign => {
                Err(NoSlots::Forbidden(foreign_key(&key)))
            }
            Some(Err(refusal)) => Err(NoSlots::Failed(refusal.told())),
            None => Err(NoSlots::Failed("the server did not answer".to_owned())),
        })
    }

    async fn amend(
        &mut self,
        held: &Held,
        slots: &Slots,
        expected: Option<&Record>,
        next: &Entry,
    ) -> Result<Amended, LossCause> {
        let Common { config, scripts, .. } = &*self.common;
        let key = match slots_key(config.target.layout, slots) {
            Ok(key) => key,
            Err(why) => return Ok(Amended::Failed(why)),
        };
        let Entry { number, at, run, phase, by } = next;
        let expected = expected.map(Record::to_string).unwrap_or_default();
        let mut amending = calling(&scripts.amend, [&held.keys.holder, &key]);
        amending.arg(&*held.value).arg(expected);
        amending
            .arg(format!("slot {number} of {} run {run} {} ", at.0, phase.word()))
            .arg(format!(" by {by}"));
        let replicas = config.target.replicas;
        let mut commands = vec![amending];
        commands.extend((replicas > 0).then(|| self.waiting_for_replicas()));
        let mut replies = self.carry_out(commands, false).await.replies.into_iter();
        let failed = |why: String| Amended::Failed(NoSlots::Failed(why));
        let amended = match replies.next() {
            Some(Ok(Value::Int(0))) => Amended::Gone,
            Some(Ok(Value::Nil)) => Amended::Changed,
            Some(Ok(Value::BulkString(line))) => match read_record(line) {
                Some(record) => Amended::Done(record),
                None => failed(foreign_key(&key)),
            },
            Some(Err(refusal)) => failed(refusal.told()),
            _ => failed("the server did not answer".to_owned()),
        };
        Ok(match (amended, acknowledged(replies.next())) {
            (Amended::Done(_), count) if count < i64::from(replicas) => {
                failed(format!("{count} of {replicas} replicas acknowledged the slot in time"))
            }
            (amended, _) => amended,
        })
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
        Ok(holders)
    }

    async fn survey(&mut self) -> Result<Option<Vec<Seen>>, LossCause> {
        let until = clock::now() + self.common.config.query_timeout / 2;
        let listening = |session| Seen { session, answers: true, ..Seen::default() };
        let Some(sessions) = self.sessions().await else { return Ok(None) };
        let mut all: Vec<Seen> = sessions.into_iter().map(listening).collect();
        // A cluster is not searched: each node has a part of the keys.
        if self.link.as_ref().is_some_and(|link| !link.is_cluster()) {
            let Some(leaders) = self.leaders(until).await else { return Ok(None) };
            for (key, session, who) in leaders {
                match all.iter_mut().find(|seen| seen.session == session) {
                    Some(seen) => {
                        seen.who = who;
                        seen.holds.push(key);
                    }
                    None => all.push(Seen { session, who, holds: vec![key], ..Seen::default() }),
                }
            }
        }
        Ok(Some(all))
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
        let doubts = self.doubts.drain(..).map(|(held, _)| held);
        let left = self.grants.drain().map(|(_, held)| held).chain(doubts);
        self.common.leftovers().extend(left.map(|held| {
            let until = until(&held);
            (held, until)
        }));
    }
}
