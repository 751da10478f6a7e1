//! The seam between the driver and what it coordinates through.
//!
//! A [`Store`] connects; a [`Session`] is one live connection, owned by one driver, and dies with it. Only the files
//! below this one know a protocol; the driver knows only what stands here, and nothing here knows the verbs.

pub(crate) mod file;
#[cfg(any(test, feature = "testing"))]
pub(crate) mod memory;
#[cfg(feature = "postgres")]
pub(crate) mod postgres;
#[cfg(feature = "redis")]
pub(crate) mod redis;
pub(crate) mod slots;
#[cfg_attr(
    not(any(unix, feature = "postgres", feature = "redis")),
    expect(dead_code, reason = "for stores that send text")
)]
mod text;

use std::future::Future;
use std::time::Duration;

#[cfg(feature = "postgres")]
pub(crate) use self::postgres::Fence;
use self::slots::{Amended, Entry, Looked, NoSlots, Record, Slots};
use crate::error::{ConnectError, LossCause, UrlError};
use crate::fence::FencingToken;
use crate::name::{Key, Kind, Name};
use crate::options::{Bounds, Options};

/// Which store a URL means.
pub(crate) enum Location {
    Directory(std::path::PathBuf),
    #[cfg(feature = "postgres")]
    Postgres(Vec<sqlx::postgres::PgConnectOptions>),
    #[cfg(feature = "redis")]
    Redis(crate::redis::Target),
}

impl Location {
    pub(crate) fn of_url(url: &str) -> Result<Self, UrlError> {
        let (scheme, _) = url.split_once(':').ok_or(UrlError::NoScheme)?;
        match scheme.to_ascii_lowercase().as_str() {
            "file" => Ok(Self::Directory(file::directory_of_url(url)?)),
            #[cfg(feature = "postgres")]
            "postgres" | "postgresql" => Ok(Self::Postgres(postgres::targets_of_url(url)?)),
            #[cfg(not(feature = "postgres"))]
            "postgres" | "postgresql" => {
                Err(UrlError::FeatureOff { scheme: scheme.to_owned(), feature: "postgres" })
            }
            #[cfg(feature = "redis")]
            scheme if redis::is_ours(scheme) => Ok(Self::Redis(redis::target_of_url(url)?)),
            #[cfg(not(feature = "redis"))]
            "redis" | "rediss" | "redis+cluster" | "rediss+cluster" | "valkey" | "valkeys" => {
                Err(UrlError::FeatureOff { scheme: scheme.to_owned(), feature: "redis" })
            }
            // What stands before the first colon of something that is no URL may be a secret, or a drive letter.
            _ if !is_scheme(scheme) => Err(UrlError::NoScheme),
            _ => Err(UrlError::UnknownScheme { scheme: scheme.to_owned() }),
        }
    }
}

/// RFC 3986, section 3.1. A scheme of one letter is a drive of Windows.
fn is_scheme(text: &str) -> bool {
    text.len() > 1
        && text.starts_with(|c: char| c.is_ascii_alphabetic())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c))
}

/// What a store does of its own, beyond arbitrating: what the guarantees rest on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Enforcement {
    /// It frees the leases of a session that has fallen silent, `ttl` after the last statement that it finished.
    pub(crate) frees_silent_holders: bool,
    /// Any statement that it answers restarts the clock of every lease of the session. Where not, only a heartbeat
    /// does, and the grant itself.
    pub(crate) any_answer_renews: bool,
    /// Its sessions outlive their connections: they connect anew by themselves while a statement has no answer, so that one
    /// without an answer may get it until the deadline of what is held.
    pub(crate) reconnects: bool,
}

impl Enforcement {
    /// What the options promise, less what is not enforced.
    pub(crate) fn bounds(self, options: &Options, shortfalls: Vec<String>) -> Bounds {
        let mut bounds = options.bounds();
        if !self.frees_silent_holders {
            bounds.vacancy_silent = None;
        }
        if !self.any_answer_renews {
            // Keys that live by themselves: the end of a process is a silence like any other.
            bounds.vacancy_crashed = bounds.vacancy_silent;
        }
        bounds.shortfalls = shortfalls;
        bounds
    }
}

/// Whether others may hold the key at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Nobody else.
    Exclusive,
    /// Others that read, of this session as well. Refused while somebody is known to wait for writing.
    Read,
    /// Nobody else. Whoever waits for it, registered as such, keeps new readers out.
    Write,
}

/// One attempt to take a key.
#[derive(Clone, Debug)]
pub(crate) struct Ask {
    pub(crate) key: Key,
    /// For people: what the key stands for.
    pub(crate) name: Name,
    pub(crate) mode: Mode,
    /// What the name is used for.
    pub(crate) kind: Kind,
    /// How long the store keeps the key for a silent holder, where it can.
    #[cfg_attr(
        not(any(test, feature = "testing", feature = "redis")),
        expect(dead_code, reason = "for stores that keep it by the key, not by the session")
    )]
    pub(crate) ttl: Duration,
    /// Whoever asks waits for the key if it is held, and asks again.
    #[cfg_attr(not(feature = "redis"), expect(dead_code, reason = "for stores that forget who waits"))]
    pub(crate) waits: bool,
    /// Its term is to be able to fence transactions, where the store has any.
    #[cfg_attr(not(feature = "postgres"), expect(dead_code, reason = "for stores with transactions"))]
    pub(crate) is_fenced: bool,
    /// Register as waiting before trying, so that a release of the key is pushed here.
    pub(crate) register: bool,
}

impl Ask {
    /// For a critical section: one of many that come and go.
    #[cfg_attr(not(feature = "postgres"), expect(dead_code, reason = "for stores that make a difference"))]
    pub(crate) fn is_section(&self) -> bool {
        self.kind != Kind::Lease
    }
}

/// What a store says to an [`Ask`]. It never waits for the key to become free.
#[derive(Debug)]
pub(crate) enum Answer<H> {
    /// The key is this session's, and this session no longer waits for it.
    Granted(H),
    /// The same, for a term that can fence transactions by what comes with it. `None`: it may not begin yet, since a
    /// transaction that an earlier term has fenced may still be open. The driver asks whether it may, by
    /// [`pass`](Session::pass), and keeps the key meanwhile.
    #[cfg_attr(not(feature = "postgres"), expect(dead_code, reason = "for stores with transactions"))]
    Fenced(H, Option<Fence>),
    /// Somebody else holds it.
    Busy {
        /// A release from now on will be pushed here. Where not, the driver asks once more at once.
        registered: bool,
    },
    /// The store could not tell; the session goes on. The text says why and what to change.
    Failed(String),
}

/// By what a transaction is fenced: without a store that has transactions, nothing.
#[cfg(not(feature = "postgres"))]
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fence {}

/// Who is in the way of a term that may not begin yet: for people, and as much as the store can tell.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Blocker {
    /// Who has the transaction open, as it calls itself.
    pub(crate) application: Option<String>,
    /// The server's process that serves it. `None` for a prepared transaction.
    pub(crate) pid: Option<i32>,
    /// The name of a prepared transaction.
    pub(crate) prepared: Option<String>,
    /// For how long the transaction has been open.
    pub(crate) age: Option<Duration>,
    /// How long ago its last statement began.
    pub(crate) since_query: Option<Duration>,
}

/// As one who is in the way.
impl From<Blocker> for Holder {
    fn from(Blocker { application, pid, prepared, .. }: Blocker) -> Self {
        let prepared = prepared.map(|name| format!("the prepared transaction {name:?}"));
        let whose = application.filter(|name| !name.is_empty()).map(|name| format!(" of {name}"));
        let identity =
            prepared.unwrap_or_else(|| format!("a fenced transaction{}", whose.unwrap_or_default()));
        Self { identity: Some(identity), pid, ..Self::default() }
    }
}

/// A lease to be given back.
#[derive(Clone, Debug)]
pub(crate) struct Return<H> {
    pub(crate) held: H,
    /// No job runs under the name any more, and none that may still run is older than this lease. Not so where the lease
    /// is given back before its job began: it may have waited for somebody who does not know yet that he has lost.
    pub(crate) is_clean: bool,
    /// Leave the key to its time to live, which begins anew, where each key has one.
    #[cfg_attr(
        not(any(test, feature = "testing", feature = "redis")),
        expect(dead_code, reason = "for stores that can")
    )]
    pub(crate) is_kept: bool,
}

/// A key was given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Freed {
    pub(crate) key: Key,
    /// As in [`Return`].
    pub(crate) is_clean: bool,
}

/// One batch of releases and attempts, done in one round trip, releases first.
#[derive(Debug)]
pub(crate) struct Exchange<H> {
    pub(crate) releases: Vec<Return<H>>,
    /// Keys that this session no longer waits for.
    pub(crate) withdrawals: Vec<Key>,
    pub(crate) asks: Vec<Ask>,
}

/// The answers to an [`Exchange`], in the order of its parts.
#[derive(Debug)]
pub(crate) struct Exchanged<H> {
    /// Whether the key was still this session's when it was released.
    pub(crate) released: Vec<bool>,
    pub(crate) answers: Vec<Answer<H>>,
}

/// What a session is told without asking.
#[derive(Debug)]
pub(crate) enum Event {
    /// A key that this session waits for was released.
    Freed(Freed),
    /// The store no longer pushes releases of this key here; one may have been missed.
    #[cfg_attr(
        not(feature = "postgres"),
        expect(dead_code, reason = "for stores that can lose a registration")
    )]
    Unregistered(Key),
    /// The connection was lost, the session was not: releases and messages may have been missed, and what it holds is to
    /// be confirmed.
    #[cfg_attr(
        not(feature = "redis"),
        expect(dead_code, reason = "for stores whose sessions outlive a connection")
    )]
    Interrupted,
    /// Something that is nobody's. The driver looks at its clock and its requests before it waits for more.
    Ignored,
    /// Somebody sent a message.
    Message(Message),
    /// The session is over: the store holds nothing for it any more.
    #[cfg_attr(
        not(any(test, feature = "testing", feature = "postgres")),
        expect(dead_code, reason = "for stores with a connection")
    )]
    Closed(LossCause),
}

/// Who holds a key: for people, and as much as the store can tell.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Holder {
    /// What its process is called.
    pub(crate) identity: Option<String>,
    /// Where it comes from.
    pub(crate) address: Option<String>,
    /// The server's process that serves it.
    pub(crate) pid: Option<i32>,
    /// How old its session is.
    pub(crate) age: Option<Duration>,
    /// How long ago its last statement ended.
    pub(crate) silence: Option<Duration>,
}

/// A session, as the store shows it to everybody: of whom an answer may be expected, and what speaks for one who gives
/// none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Seen {
    /// Which session: the same text as in a [`Presence`] of it. Empty where the store cannot tell.
    pub(crate) session: String,
    pub(crate) who: Holder,
    /// It is one of a Locker, which answers a roll call.
    pub(crate) answers: bool,
    /// The keys that it holds exclusively.
    pub(crate) holds: Vec<Key>,
    /// The keys that it holds shared. Who waits for a key shows by its [waiting key](Key::waiting).
    pub(crate) shares: Vec<Key>,
}

/// What a store says when it is asked for a fencing token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Minted {
    Token(FencingToken),
    /// The key is not this session's any more.
    Gone,
    /// The store could not make one; the session goes on. The text says why.
    Failed(String),
}

/// What Lockers tell each other through the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Message {
    /// Whoever leads this key is asked to hand it over.
    StepDown(Key),
    /// Everybody is asked what they are doing.
    RollCall(Call),
    /// The answer to a roll call, or a part of it. The store need not take it to anybody but who has called.
    Present(Presence),
}

/// One roll call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Call {
    /// Tells it from every other one.
    pub(crate) number: u64,
    /// Where the store takes the answers. The store of the caller fills it in, nobody else reads it.
    pub(crate) reply_to: String,
}

/// What one Locker is doing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Presence {
    pub(crate) call: Call,
    /// Which session: filled in by the store.
    pub(crate) session: String,
    pub(crate) identity: String,
    /// It hands over when it is asked to.
    pub(crate) steps_down: bool,
    /// Which part of how many, counted from 1: a store may have to split an answer.
    pub(crate) part: (u32, u32),
    pub(crate) standings: Vec<Standing>,
}

/// What one candidate is doing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Standing {
    pub(crate) name: Name,
    pub(crate) role: Role,
    /// Of the term that it is in, where it is in one.
    pub(crate) term: Option<u64>,
    /// How long ago that term began.
    pub(crate) held_for: Option<Duration>,
}

/// What a candidate is doing, as its Locker tells others: [`Participant`](crate::Participant).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Role {
    /// It leads: its job runs under the lease.
    Leading,
    /// It holds the lease, and its job was told to stop and has not ended yet.
    Draining,
    /// It holds the lease, and its job may not start yet.
    Blocked,
    /// It stands by and asks for the lease.
    Standby,
    /// It does not ask for the lease: [`Candidate::eligible`](crate::Candidate::eligible).
    Ineligible,
    /// Its lease is lost, and its job has not ended yet.
    Lost,
}

impl Role {
    /// Tells whether who has it holds the lease.
    #[must_use]
    pub const fn holds(self) -> bool {
        matches!(self, Self::Leading | Self::Draining | Self::Blocked)
    }
}

impl std::fmt::Display for Role {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::Leading => "leading",
            Self::Draining => "draining",
            Self::Blocked => "blocked",
            Self::Standby => "standby",
            Self::Ineligible => "ineligible",
            Self::Lost => "lost",
        })
    }
}

/// Where sessions come from.
pub(crate) trait Store: Send + 'static {
    type Session: Session;

    /// What is to be expected of the store before the first session tells.
    fn enforcement(&self) -> Enforcement;

    /// Why that is less than it could be.
    fn shortfalls(&self) -> Vec<String> {
        Vec::new()
    }

    /// For people: where it is, without any secret.
    fn address(&self) -> String;

    /// Something is to be undone that an earlier session may have left behind: [`connect`](Self::connect) does that, and
    /// is to be called for it though nobody needs a session.
    fn has_leftovers(&self) -> bool {
        false
    }

    /// Opens a session and checks that it can be trusted. The driver bounds it with the query timeout; dropped in the
    /// middle it leaves nothing open.
    fn connect(&mut self) -> impl Future<Output = Result<Self::Session, ConnectError>> + Send;
}

/// One live connection to a store.
///
/// Statements are never started beside each other. A dropped statement may still be carried out: the driver then uses
/// the session no more. An `Err` of any statement ends it: [`LossCause::Closed`] says that the store has ended it already,
/// and that it holds nothing any more; any other cause, that it is to be given up.
///
/// Dropping a session is its *hard* end: nothing is sent, and the store frees what it held as soon as it notices.
pub(crate) trait Session: Send + 'static {
    /// The store's proof of one grant; opaque to the driver.
    type Held: Clone + std::fmt::Debug + Send + Sync + 'static;

    /// What the store does of its own for this session.
    fn enforcement(&self) -> Enforcement;

    /// Why that is less than it could be: a sentence for each thing that is not in force.
    fn shortfalls(&self) -> Vec<String> {
        Vec::new()
    }

    /// For people: what it is with, without any secret.
    fn address(&self) -> String;

    /// Carries out releases and attempts, in this order, in one round trip.
    fn exchange(
        &mut self,
        exchange: &Exchange<Self::Held>,
    ) -> impl Future<Output = Result<Exchanged<Self::Held>, LossCause>> + Send;

    /// Tries once more whether the terms of these grants may begin: by what each of them fences transactions, or `None`
    /// where it may not yet. Each is the answer to an [`Answer::Fenced`] without.
    fn pass(
        &mut self,
        held: &[Self::Held],
    ) -> impl Future<Output = Result<Vec<Option<Fence>>, LossCause>> + Send {
        std::future::ready(Ok(vec![None; held.len()]))
    }

    /// Tells who is in the way of the terms of these grants, for people: for each, one of them.
    fn blockers(
        &mut self,
        held: &[Self::Held],
    ) -> impl Future<Output = Result<Vec<Option<Blocker>>, LossCause>> + Send {
        std::future::ready(Ok(vec![None; held.len()]))
    }

    /// Tells, for each grant, whether it is still this session's: ownership, not liveness. Never re-acquires.
    fn heartbeat(&mut self, held: &[Self::Held])
    -> impl Future<Output = Result<Vec<bool>, LossCause>> + Send;

    /// Makes a fencing token under a grant: greater than all that were made under earlier ones of the key, and kept by the
    /// store before it is given.
    fn mint(&mut self, held: &Self::Held) -> impl Future<Output = Result<Minted, LossCause>> + Send;

    /// Looks at the slots of a name, whoever holds its lock.
    fn slots(
        &mut self,
        slots: &Slots,
    ) -> impl Future<Output = Result<Result<Looked, NoSlots>, LossCause>> + Send;

    /// Sets the record of a name, under the grant of its lock, if the present one is `expected`. It is kept, as far as the
    /// store keeps anything, before this says so; the time in it is that of the store's own clock.
    fn amend(
        &mut self,
        held: &Self::Held,
        slots: &Slots,
        expected: Option<&Record>,
        next: &Entry,
    ) -> impl Future<Output = Result<Amended, LossCause>> + Send;

    /// Sends a message to every session of the store, or an answer to who has called, best effort. False if the store would not take it.
    fn publish(&mut self, message: Message) -> impl Future<Output = Result<bool, LossCause>> + Send;

    /// Tells who holds these keys, exclusively, for people. `None` where nobody does, or the store cannot tell.
    fn holders(
        &mut self,
        keys: &[Key],
    ) -> impl Future<Output = Result<Vec<Option<Holder>>, LossCause>> + Send;

    /// Tells of every session that shows in the store, and what each of them holds: as much as the store can tell
    /// without asking them. `None` if it would not.
    fn survey(&mut self) -> impl Future<Output = Result<Option<Vec<Seen>>, LossCause>> + Send;

    /// Waits for the next event. Cancel-safe: no event is lost when the future is dropped.
    fn event(&mut self) -> impl Future<Output = Event> + Send;

    /// Ends the session in order: frees what it holds, tells the store. The driver bounds it.
    fn end(self) -> impl Future<Output = ()> + Send;
}
