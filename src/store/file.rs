//! The file store: OS locks in a directory that the processes of one host share. No server; the kernel frees what a
//! dead process held.
//!
//! ```text
//! <directory>/<key, 16 hex digits>.lock      one file per key, never unlinked; its line says who got it last
//! <directory>/<key, 16 hex digits>.writes    locked by who waits to write, so that no new readers come in
//! <directory>/<key, 16 hex digits>.token     the last fencing token of the key
//! <directory>/<key, 16 hex digits>.slot      which slot of the name was served last: see `Every`
//! <directory>/peers/<identity>-<random>.sock one datagram socket per session (Unix): wake-ups and messages
//! ```
//!
//! Everything that touches the disk runs on a thread of the session's own, so that a hung disk costs the driver a timeout and not
//! its thread. A statement that the driver drops runs on there, and keeps what the session shares alive until it is
//! done: whichever of the two ends last frees the locks.

mod directory;
mod disk;
mod examine;
mod locks;
#[cfg_attr(not(unix), path = "file/no_peers.rs")]
mod peers;
mod slots;
mod tokens;

use std::collections::{HashSet, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use self::directory::Directory;
use self::disk::Disk;
pub(crate) use self::examine::examine;
pub(crate) use self::locks::Held;
use self::locks::Locks;
use self::peers::{Inbox, Outbox};
use super::slots::{Amended, Entry, Looked, NoSlots, Record, Slots};
use super::{
    Answer, Enforcement, Event, Exchange, Exchanged, Freed, Holder, Message, Minted, Seen, Session, Store,
};
use crate::error::{ConnectError, LossCause, UrlError};
use crate::name::Key;

/// Parses `file:PATH` and `file:///PATH`. The path is taken as it stands: no percent-decoding, no query, no fragment,
/// so that every path can be written.
pub(crate) fn directory_of_url(url: &str) -> Result<PathBuf, UrlError> {
    let (scheme, rest) = url.split_once(':').ok_or(UrlError::NoScheme)?;
    if !scheme.eq_ignore_ascii_case("file") {
        return Err(UrlError::UnknownScheme { scheme: scheme.to_owned() });
    }
    let path = match rest.strip_prefix("//") {
        None => rest,
        Some(path) if path.is_empty() || path.starts_with('/') => path,
        Some(_) => return Err(UrlError::FileHost),
    };
    // No directory is meant to be called so, and what it would coordinate nobody knows.
    if let Some(start) = ["~", "$"].into_iter().find(|start| path.starts_with(start)) {
        return Err(UrlError::FileShell { start });
    }
    if path.is_empty() { Err(UrlError::FilePath) } else { Ok(path.into()) }
}

/// The kernel frees at the death of a process, never before.
const ENFORCEMENT: Enforcement =
    Enforcement { frees_silent_holders: false, any_answer_renews: true, reconnects: false };

fn shortfalls() -> Vec<String> {
    vec![
        "the kernel frees a lock when its holder's process ends: one that is frozen keeps its leases"
            .to_owned(),
    ]
}

/// A directory that has been found fit to hold locks.
#[derive(Debug)]
pub(crate) struct FileStore {
    path: PathBuf,
    identity: String,
}

impl FileStore {
    /// Makes the directory where it is missing, and checks at once that locks can be taken in it.
    ///
    /// A relative path is resolved now, so that a later change of the working directory changes nothing.
    pub(crate) fn open(dir: &Path, identity: &str) -> Result<Self, ConnectError> {
        let path = std::path::absolute(dir).map_err(|error| directory::refused(dir, error))?;
        directory::prepare(&path)?;
        Ok(Self { path, identity: identity.to_owned() })
    }
}

impl Store for FileStore {
    type Session = FileSession;

    fn enforcement(&self) -> Enforcement {
        ENFORCEMENT
    }

    fn shortfalls(&self) -> Vec<String> {
        shortfalls()
    }

    fn address(&self) -> String {
        self.path.display().to_string()
    }

    async fn connect(&mut self) -> Result<FileSession, ConnectError> {
        let disk = Disk::new().map_err(|error| unreachable(format!("no thread to be had: {error}")))?;
        self.connect_on(disk).await
    }
}

fn unreachable(reason: String) -> ConnectError {
    ConnectError::Unreachable { reason }
}

impl FileStore {
    async fn connect_on(&self, disk: Disk) -> Result<FileSession, ConnectError> {
        let (path, identity) = (self.path.clone(), self.identity.clone());
        let opened = disk.run(move || Shared::open(path, &identity)).await;
        let (shared, inbox) =
            opened.ok_or_else(|| unreachable("opening the directory panicked".to_owned()))??;
        Ok(FileSession {
            shared: Arc::new(shared),
            path: self.path.clone(),
            disk,
            inbox: inbox.register().map_err(|error| unreachable(error.to_string()))?,
            waiting: HashSet::new(),
            events: VecDeque::new(),
        })
    }
}

/// What a session shares with the statement that runs on its disk thread. Its drop is the end of the session: the
/// locks go first, then the socket.
#[derive(Debug)]
struct Shared {
    /// Locked on the disk thread only, as is the outbox.
    locks: Mutex<Locks>,
    outbox: Mutex<Outbox>,
}

impl Shared {
    fn open(path: PathBuf, identity: &str) -> Result<(Self, Inbox<peers::Idle>), ConnectError> {
        let directory = Directory::open(path)?;
        let (outbox, inbox) = peers::open(directory.path(), identity)
            .map_err(|error| directory::refused(directory.path(), error))?;
        let locks = Mutex::new(Locks::new(directory, identity.to_owned()));
        Ok((Self { locks, outbox: Mutex::new(outbox) }, inbox))
    }

    fn outbox(&self) -> MutexGuard<'_, Outbox> {
        self.outbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The session is gone: only a statement that it dropped is left.
    fn is_abandoned(self: &Arc<Self>) -> bool {
        Arc::strong_count(self) == 1
    }
}

/// One live session: its locks and its socket.
#[derive(Debug)]
pub(crate) struct FileSession {
    // First, so that on drop the locks and the name of the socket go before the socket: no peer sends to a dead one.
    shared: Arc<Shared>,
    path: PathBuf,
    disk: Disk,
    inbox: Inbox,
    waiting: HashSet<Key>,
    events: VecDeque<Event>,
}

impl FileSession {
    /// Runs `work` on the disk thread, to its end even if the returned future is dropped. Then sees to it that others
    /// can still send here: what cleans a directory up may have removed the name of the socket.
    async fn statement<T: Send + 'static>(
        &mut self,
        work: impl FnOnce(&Arc<Shared>, &mut Locks) -> Result<T, LossCause> + Send + 'static,
    ) -> Result<T, LossCause> {
        let shared = Arc::clone(&self.shared);
        let done = self.disk.run(move || {
            let mut locks = shared.locks.lock().unwrap_or_else(PoisonError::into_inner);
            let result = work(&shared, &mut locks)?;
            let renewed = shared.outbox().renew(locks.identity());
            Ok((result, renewed))
        });
        let (result, renewed) = done.await.unwrap_or_else(|| {
            Err(LossCause::Closed { reason: "a file operation panicked".to_owned(), sqlstate: None })
        })?;
        if let Some(inbox) = renewed {
            match inbox.register() {
                Ok(inbox) => self.inbox = inbox,
                Err(error) => {
                    tracing::warn!(%error, "no socket for wake-ups: released leases are noticed by polling");
                }
            }
        }
        Ok(result)
    }
}

impl Session for FileSession {
    type Held = Held;

    fn enforcement(&self) -> Enforcement {
        ENFORCEMENT
    }

    fn shortfalls(&self) -> Vec<String> {
        shortfalls()
    }

    fn address(&self) -> String {
        self.path.display().to_string()
    }

    async fn exchange(&mut self, exchange: &Exchange<Held>) -> Result<Exchanged<Held>, LossCause> {
        for key in &exchange.withdrawals {
            self.waiting.remove(key);
        }
        let withdrawals = exchange.withdrawals.clone();
        let registered = exchange.asks.iter().filter(|ask| ask.register).map(|ask| ask.key);
        self.waiting.extend(registered);

        let giving_back = exchange.releases.clone();
        let asks: Vec<_> =
            exchange.asks.iter().map(|ask| (ask.clone(), self.waiting.contains(&ask.key))).collect();
        let work = move |shared: &Arc<Shared>, locks: &mut Locks| {
            locks.check_directory()?;
            let mut freed = Vec::new();
            let released = giving_back.iter().map(|lease| locks.release(lease, &mut freed)).collect();
            let withdrawn = withdrawals.iter().filter(|key| locks.withdraw(**key));
            freed.extend(withdrawn.map(|key| Freed { key: *key, is_clean: false }));
            shared.outbox().freed(&freed);
            let mut answers = Vec::with_capacity(asks.len());
            for (ask, waits) in &asks {
                if shared.is_abandoned() {
                    break;
                }
                answers.push(locks.take(ask, *waits));
            }
            Ok((Exchanged { released, answers }, freed))
        };
        let (exchanged, freed) = self.statement(work).await?;

        self.events.extend(freed.into_iter().map(Event::Freed));
        for (ask, answer) in exchange.asks.iter().zip(&exchanged.answers) {
            if let Answer::Granted(_) = answer {
                self.waiting.remove(&ask.key);
            }
        }
        Ok(exchanged)
    }

    async fn heartbeat(&mut self, held: &[Held]) -> Result<Vec<bool>, LossCause> {
        let held = held.to_vec();
        let work = move |_: &Arc<Shared>, locks: &mut Locks| {
            locks.check_directory()?;
            Ok(held.into_iter().map(|held| locks.confirm(held)).collect())
        };
        self.statement(work).await
    }

    async fn mint(&mut self, held: &Held) -> Result<Minted, LossCause> {
        let held = *held;
        let work = move |_: &Arc<Shared>, locks: &mut Locks| {
            locks.check_directory()?;
            Ok(locks.mint(held))
        };
        self.statement(work).await
    }

    async fn slots(&mut self, slots: &Slots) -> Result<Result<Looked, NoSlots>, LossCause> {
        let key = slots.key;
        let work = move |_: &Arc<Shared>, locks: &mut Locks| {
            locks.check_directory()?;
            Ok(locks.slots(key))
        };
        self.statement(work).await
    }

    async fn amend(
        &mut self,
        held: &Held,
        slots: &Slots,
        expected: Option<&Record>,
        next: &Entry,
    ) -> Result<Amended, LossCause> {
        let (held, key, expected, next) = (*held, slots.key, expected.cloned(), next.clone());
        let work = move |_: &Arc<Shared>, locks: &mut Locks| {
            locks.check_directory()?;
            Ok(locks.amend(held, key, expected.as_ref(), next))
        };
        self.statement(work).await
    }

    async fn publish(&mut self, message: Message) -> Result<bool, LossCause> {
        // To itself without a socket: that cannot get lost.
        let work = move |shared: &Arc<Shared>, locks: &mut Locks| {
            // To whoever has the lease now: one who gets it meanwhile was not asked to hand it over.
            let leader = match &message {
                Message::StepDown(key) => locks.signature(*key),
                Message::RollCall(_) | Message::Present(_) => None,
            };
            Ok(shared.outbox().publish(message, leader.as_deref()))
        };
        let own = self.statement(work).await?;
        self.events.extend(own.map(Event::Message));
        Ok(true)
    }

    async fn holders(&mut self, keys: &[Key]) -> Result<Vec<Option<Holder>>, LossCause> {
        let keys = keys.to_vec();
        let work = move |_: &Arc<Shared>, locks: &mut Locks| {
            let signed =
                |key| locks.signature(key).map(|who| Holder { identity: Some(who), ..Holder::default() });
            Ok(keys.into_iter().map(signed).collect())
        };
        self.statement(work).await
    }

    async fn survey(&mut self) -> Result<Option<Vec<Seen>>, LossCause> {
        let work = move |shared: &Arc<Shared>, locks: &mut Locks| {
            let mut all = shared.outbox().sessions();
            for (key, pid) in locks.held() {
                // Who has signed the file, unless it is the one before: a grant and its signature are no one step.
                let identity = locks.signature(key);
                let session = all.iter_mut().find(|seen| identity.is_some() && seen.who.identity == identity);
                if let Some(seen) = session {
                    seen.who.pid = Some(pid);
                    seen.holds.push(key);
                } else {
                    let who = Holder { identity, pid: Some(pid), ..Holder::default() };
                    all.push(Seen { who, holds: vec![key], ..Seen::default() });
                }
            }
            Ok(Some(all))
        };
        self.statement(work).await
    }

    async fn event(&mut self) -> Event {
        if self.events.is_empty() {
            self.inbox.receive(&mut self.events).await;
        }
        while let Some(event) = self.events.pop_front() {
            match event {
                Event::Freed(freed) if !self.waiting.contains(&freed.key) => {}
                event => return event,
            }
        }
        // Not waited out here: anybody who may write the directory may send, and as much as they like.
        Event::Ignored
    }

    async fn end(mut self) {
        let work = |shared: &Arc<Shared>, locks: &mut Locks| {
            shared.outbox().freed(&locks.release_all());
            Ok(())
        };
        if let Err(cause) = self.statement(work).await {
            tracing::debug!(%cause, "the session of the file store did not end in order");
        }
    }
}

#[cfg(test)]
mod tests;
