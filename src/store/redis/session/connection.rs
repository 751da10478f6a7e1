//! The connection, for as long as it lasts; and how a batch is carried out, over as many of them as it takes.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use rand::RngExt as _;
use rand::rngs::StdRng;
use redis::{Cmd, Pipeline, cmd};
use tracing::{debug, info, warn};

use super::{Doubt, RedisSession};
use crate::clock;
use crate::error::ConnectError;
use crate::store::redis::checks::{self, Found};
use crate::store::redis::link::{Link, Reply, batch};
use crate::store::redis::refusal::{self, Meaning};
use crate::store::redis::scripts::Scripts;
use crate::store::redis::{Common, grant, keys};

/// How long it waits before it connects again, at first and at the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(500));

/// The replies to one batch.
pub(super) struct Carried {
    pub(super) replies: Vec<Reply>,
    /// Some commands were sent more than once: those that were carried out may look as if others had been quicker.
    pub(super) is_repeated: bool,
    /// And the server was the same one all the while, and lost nothing.
    pub(super) is_same_server: bool,
}

/// Whether the server knew the scripts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Known {
    Yes,
    No,
}

impl RedisSession {
    /// Connects, looks whether the server can be trusted, and undoes what earlier sessions left behind.
    pub(in crate::store::redis) async fn open(common: Arc<Common>) -> Result<Self, ConnectError> {
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
        load(&mut link, scripts).await?;
        let database = self.common.database();
        let channels = [keys::channel(database), keys::own_channel(database, &self.id)];
        if let Err(error) = link.subscribe(&channels).await {
            // Whatever the server has against it: what is pushed is not needed.
            match refusal::answered(Err(error)).map_err(|error| refusal::of_connect(&error))? {
                Ok(_) => {}
                Err(refusal) => shortfalls.push(format!(
                    "releases are not pushed ({}): standbys notice them at their next poll; grant the user the channels \
                     leasehold:*",
                    refusal.told()
                )),
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
        let leftovers = std::mem::take(&mut *self.common.leftovers());
        self.doubts = leftovers.into_iter().map(|(held, until)| Doubt::new(held, until)).collect();
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
        self.doubts.iter_mut().for_each(|doubt| doubt.until = arrived.min(doubt.until));
        Ok(())
    }

    /// Gives back what may have arrived in the server after all.
    pub(super) fn undoing(&mut self) -> Vec<Cmd> {
        let (now, longest, grants) = (clock::now(), self.common.config.query_timeout, &self.grants);
        self.doubts.retain(|doubt| now < doubt.until);
        let mut given_up = Vec::new();
        for doubt in &mut self.doubts {
            if now >= doubt.due && !grants.contains_key(&doubt.held.token) {
                doubt.due = now + doubt.pause;
                doubt.pause = (doubt.pause * 2).min(longest);
                given_up.push(doubt.held.clone());
            }
        }
        given_up.iter().map(|held| self.releasing(held, false)).collect()
    }

    /// The next one that is sent undoes all of them.
    pub(super) fn undo_all_at_once(&mut self) {
        let now = clock::now();
        self.doubts.iter_mut().for_each(|doubt| doubt.due = now);
    }

    /// Sends a batch until every command has its reply, over as many connections as it takes. `is_write`: until the server
    /// can write, too.
    pub(super) async fn carry_out(
        &mut self,
        commands: impl IntoIterator<Item = Cmd>,
        is_write: bool,
    ) -> Carried {
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
        let limit = self.common.config.query_timeout;
        if self.link.is_none() {
            let reopened = tokio::time::timeout(limit, self.reopen()).await;
            reopened.map_err(|_| "no connection in time".to_owned())?.map_err(|error| error.to_string())?;
            info!(identity = %self.common.config.identity, "connected to the store again");
        }
        let Some(link) = &mut self.link else { return Err("no connection".to_owned()) };
        let answers = match tokio::time::timeout(limit, link.send(commands)).await {
            Ok(Ok(answers)) => answers,
            Ok(Err(error)) => return Err(self.interrupted(&error.to_string())),
            // The connection may be dead, though nobody has said so.
            Err(_) => return Err(self.interrupted("no answer in time")),
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
        if forgotten && let Err(error) = load(link, &self.common.scripts).await {
            return Err(self.interrupted(&error.to_string()));
        }
        match (elsewhere, not_now) {
            (Some(told), _) => Err(self.interrupted(&told)),
            (None, Some(told)) => Err(told),
            (None, None) if forgotten => Ok(Known::No),
            (None, None) => Ok(Known::Yes),
        }
    }

    pub(super) fn interrupted(&mut self, reason: &str) -> String {
        // A cluster's connection finds its nodes again by itself.
        if self.link.as_ref().is_some_and(|link| !link.is_cluster()) {
            let identity = &self.common.config.identity;
            warn!(%identity, reason, "the connection to the store is lost; what is held is held, up to its deadline");
            self.link = None;
        }
        self.is_interrupted = true;
        reason.to_owned()
    }
}

/// Makes the server, or every node, know the scripts.
pub(in crate::store::redis) async fn load(link: &mut Link, scripts: &Scripts) -> Result<(), ConnectError> {
    let replies = link.send(&batch(scripts.loading())).await.map_err(|error| refusal::of_connect(&error))?;
    match replies.into_iter().find_map(Result::err) {
        Some(refusal) => Err(refusal::of_answer(&refusal)),
        None => Ok(()),
    }
}
