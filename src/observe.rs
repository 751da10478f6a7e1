//! Who leads, who waits: [`Observer`], from the outside, for every name of a store.
//!
//! Two sources are put together. The *store* shows who holds what at this instant, as far as it can tell, but knows
//! keys and no names. The *Lockers* know the names, and what they are doing: a **roll call** asks all of them over the
//! store's own push channel, and every one with a session answers. What nobody answers for is shown all the same.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::time::Duration;

use rand::RngExt as _;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use crate::clock;
use crate::driver::ANSWER_LIMIT;
use crate::driver::command::Command;
use crate::error::{ConnectError, Error};
use crate::locker::Locker;
use crate::name::{Key, Kind, Name};
use crate::options::Options;
pub use crate::store::Role;
use crate::store::{Call, Holder, Location, Message, Presence, Seen, Standing};

/// How many parts of answers wait to be taken. More that come at once are a flood.
const ANSWERS_AT_ONCE: usize = 4096;

/// How often is looked anew where the store and the answers do not agree: a lease changed hands meanwhile.
const LOOKS: usize = 3;

/// How often is looked at a name that is to change hands.
const HANDOVER_INTERVAL: Duration = Duration::from_millis(100);

/// Looks at who leads and who stands by, on all names of a store. It takes no lease, and no other lock.
///
/// Each look calls the roll: every Locker with a session answers with the names that it contends for and what it does
/// about each. The look is over when every session that the store shows has answered, or after **500 ms** (half of the
/// query timeout, if that is less): who has not answered by then (frozen, cut off, or no leasehold process at all) shows as [silent](Snapshot::silent), and as a
/// leader without a [role](Participant::role) where it holds something. Where a lease changes hands in the middle of it, it
/// is looked once or twice more. No look takes longer than the [query timeout](Options::query_timeout).
///
/// Critical sections ([`Lock`](crate::Lock), [`RwLock`](crate::RwLock)) are no elections, and are not shown, unless their holder
/// does not answer.
///
/// What the store itself can tell, without an answer:
///
/// | | holders | who waits | where from |
/// |---|---|---|---|
/// | PostgreSQL | every advisory lock of 64 bits in the database, whoever took it | yes | to roles that may see the sessions of others (`pg_read_all_stats`) |
/// | files | on Linux, for the processes of one pid namespace; elsewhere not | no | |
/// | memory | yes | yes | |
///
/// ```compile_fail,E0599
/// # async fn no_lease(observer: leasehold::Observer) {
/// // An observer leads nothing.
/// observer.run("sweeper", async |lease: leasehold::Lease| anyhow::Ok(())).await;
/// # }
/// ```
///
/// ```compile_fail,E0599
/// # fn no_lock(observer: leasehold::Observer) {
/// // Nor does it enter anything.
/// observer.lock("invoice:42");
/// # }
/// ```
///
/// # Examples
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), leasehold::Error> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let url = format!("file:{}", dir.path().display());
/// use leasehold::{Observer, Options};
///
/// let observer = Observer::connect(&url, Options::default()).await?;
/// for election in observer.leaders().await? {
///     println!("{election}");
/// }
/// assert_eq!(observer.standbys("sweeper").await?.len(), 0);
/// observer.close().await;
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct Observer {
    locker: Locker,
    /// The session is for this observer alone.
    is_own: bool,
}

impl Locker {
    /// Gives an observer of all names of the store, over the session of this Locker.
    #[must_use]
    pub fn observer(&self) -> Observer {
        Observer { locker: self.clone(), is_own: false }
    }
}

impl Observer {
    /// Connects to the store of a URL, as [`Locker::connect`] does, for looking only.
    ///
    /// # Errors
    ///
    /// As for [`Locker::connect`].
    ///
    /// # Cancel safety
    ///
    /// Dropped in the middle it leaves nothing open.
    pub async fn connect(url: &str, options: Options) -> Result<Self, Error> {
        if let Location::Directory(path) = Location::of_url(url)?
            && let Err(source) = std::fs::metadata(&path)
            && source.kind() == std::io::ErrorKind::NotFound
        {
            // Whoever only looks makes nothing, and what nobody has made shows nothing.
            let remedy = "nobody has led there yet: is the path right?";
            return Err(ConnectError::Directory { path, remedy, source: source.into() }.into());
        }
        Ok(Self { locker: Locker::connect(url, options).await?, is_own: true })
    }

    /// Gives where the store is, without any secret.
    #[must_use]
    pub fn address(&self) -> &str {
        self.locker.address()
    }

    /// Gives what this process is called in logs and in the store.
    #[must_use]
    pub fn identity(&self) -> &str {
        self.locker.identity()
    }

    /// Ends the session in order, unless it is that of a Locker.
    ///
    /// # Cancel safety
    ///
    /// Dropped in the middle, closing goes on.
    pub async fn close(&self) {
        if self.is_own {
            self.locker.close().await;
        }
    }

    /// Looks at everything: who holds, who stands by, and who does not answer.
    ///
    /// # Errors
    ///
    /// [`Error::Unanswered`] if the store does not answer within the query timeout, or will not carry the roll call;
    /// [`Error::Closed`] if the Locker is closed meanwhile.
    ///
    /// # Cancel safety
    ///
    /// Cancel-safe: nothing is left of a look that is dropped.
    pub async fn snapshot(&self) -> Result<Snapshot, Error> {
        let limit = self.locker.options().query_timeout;
        let patience = ANSWER_LIMIT.min(limit / 2);
        let look = async {
            let until = clock::now() + limit;
            let mut found = self.roll_call(limit, patience).await?;
            for _ in 1..LOOKS {
                if found.agrees() || clock::now() + 2 * patience > until {
                    break;
                }
                found = self.roll_call(limit, patience).await?;
            }
            Ok(found.snapshot())
        };
        tokio::time::timeout(limit, look).await.unwrap_or(Err(Error::Unanswered { limit }))
    }

    /// Tells of every lease that somebody holds: of every election that has a leader.
    ///
    /// # Errors
    ///
    /// As for [`snapshot`](Self::snapshot).
    ///
    /// # Cancel safety
    ///
    /// As for [`snapshot`](Self::snapshot).
    pub async fn leaders(&self) -> Result<Vec<Election>, Error> {
        let mut elections = self.snapshot().await?.elections;
        elections.retain(|election| election.leader.is_some());
        Ok(elections)
    }

    /// Tells who stands by for `name`.
    ///
    /// # Errors
    ///
    /// [`Error::Name`], and as for [`snapshot`](Self::snapshot).
    ///
    /// # Cancel safety
    ///
    /// As for [`snapshot`](Self::snapshot).
    pub async fn standbys(&self, name: impl Into<Name>) -> Result<Vec<Participant>, Error> {
        let name = name.into();
        name.validate()?;
        Ok(self.snapshot().await?.of(&name).standbys)
    }

    /// Watches everything: see [`Watch`].
    #[must_use = "a watch does nothing until it is asked"]
    pub fn watch(&self) -> Watch {
        let every = self.locker.options().retry_interval;
        Watch { observer: self.clone(), every, due: None, last: None }
    }

    /// Asks whoever leads `name` to hand over. Completes when that has been sent: as [`Locker::step_down`].
    ///
    /// # Errors
    ///
    /// As for [`Locker::step_down`].
    ///
    /// # Cancel safety
    ///
    /// Dropped in the middle, the request may be sent all the same.
    pub async fn step_down(&self, name: impl Into<Name>) -> Result<(), Error> {
        self.locker.step_down(name).await
    }

    /// Asks whoever leads `name` to hand over, and waits until a new term has begun: that of a standby, or of the same
    /// candidate once more, where nobody else stands by.
    ///
    /// It waits for as long as the job takes to stop: bound it with `tokio::time::timeout`. It watches, and asks once.
    ///
    /// # Errors
    ///
    /// [`Error::Name`], and as for [`snapshot`](Self::snapshot).
    ///
    /// # Cancel safety
    ///
    /// Dropped in the middle, the request may be sent all the same.
    pub async fn hand_over(&self, name: impl Into<Name>) -> Result<Handover, Error> {
        let name = name.into();
        name.validate()?;
        let Some(from) = self.snapshot().await?.of(&name).leader else { return Ok(Handover::NobodyLeads) };
        if from.answers_step_down == Some(false) {
            return Ok(Handover::Refused { leader: from });
        }
        self.step_down(name.clone()).await?;
        loop {
            if let Some(by) = self.snapshot().await?.of(&name).leader
                && !by.is_term_of(&from)
            {
                return Ok(Handover::TakenOver { from, by });
            }
            clock::sleep_until(clock::now() + HANDOVER_INTERVAL).await;
        }
    }

    /// Asks everybody, and looks at what the store shows meanwhile.
    async fn roll_call(&self, limit: Duration, patience: Duration) -> Result<Found, Error> {
        let number = rand::make_rng::<rand::rngs::StdRng>().random();
        let (answers, mut answered) = mpsc::channel(ANSWERS_AT_ONCE);
        self.locker.command(Command::Listen(number, answers))?;
        let (reply, sent) = oneshot::channel();
        let call = Message::RollCall(Call { number, reply_to: String::new() });
        self.locker.command(Command::Publish(call, reply))?;
        if !sent.await.map_err(|_| self.locker.gone())? {
            return Err(Error::Unanswered { limit });
        }
        let until = clock::now() + patience;
        let (reply, seen) = oneshot::channel();
        self.locker.command(Command::Survey(reply))?;
        let seen = seen.await.map_err(|_| self.locker.gone())?.ok_or(Error::Unanswered { limit })?;
        let mut found = Found { seen, answers: BTreeMap::new() };
        while !found.is_complete() {
            match tokio::time::timeout_at(clock::timer(until), answered.recv()).await {
                Ok(Some(presence)) => found.add(presence),
                Ok(None) => return Err(self.locker.gone()),
                Err(_) => break,
            }
        }
        Ok(found)
    }
}

/// Watches all names of a store: from [`Observer::watch`].
///
/// It looks once per interval and tells when what it sees has changed: who leads, in which term and state, who stands
/// by, who is silent. That time passes is no change.
#[derive(Clone, Debug)]
#[must_use = "a watch does nothing until it is asked"]
pub struct Watch {
    observer: Observer,
    every: Duration,
    due: Option<Instant>,
    last: Option<Snapshot>,
}

impl Watch {
    /// Sets how long to wait from one look to the next. Default: the [retry interval](Options::retry_interval).
    pub const fn every(mut self, interval: Duration) -> Self {
        self.every = interval;
        self
    }

    /// Waits for the next snapshot, changed or not: at once for the first one, then one interval after the one before.
    ///
    /// # Errors
    ///
    /// As for [`Observer::snapshot`]. The next call looks again, one interval later.
    ///
    /// # Cancel safety
    ///
    /// Cancel-safe: what was not given yet is given by the next call.
    pub async fn next(&mut self) -> Result<Snapshot, Error> {
        if let Some(due) = self.due {
            clock::sleep_until(due).await;
        }
        let looked = self.observer.snapshot().await;
        self.due = Some(clock::now() + self.every);
        let snapshot = looked?;
        self.last = Some(snapshot.clone());
        Ok(snapshot)
    }

    /// Waits for a snapshot that differs from the one that was given before, and gives it: at once for the first one.
    ///
    /// # Errors
    ///
    /// As for [`next`](Self::next).
    ///
    /// # Cancel safety
    ///
    /// As for [`next`](Self::next).
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), leasehold::Error> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// use leasehold::{Locker, Options};
    ///
    /// let locker = Locker::file(dir.path(), Options::default())?;
    /// let mut watch = locker.observer().watch();
    /// let snapshot = watch.changed().await?;
    /// assert!(snapshot.elections.is_empty());
    /// # Ok(()) }
    /// ```
    pub async fn changed(&mut self) -> Result<Snapshot, Error> {
        loop {
            let before = self.last.clone();
            let snapshot = self.next().await?;
            if before.is_none_or(|before| !before.shows_the_same_as(&snapshot)) {
                return Ok(snapshot);
            }
        }
    }
}

/// What was to be seen of all names at about one instant.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Snapshot {
    /// Every name that somebody holds or contends for, in their order; then the keys that somebody holds and whose
    /// names nobody has told.
    pub elections: Vec<Election>,
    /// The Lockers that show in the store and have not answered, or not all of it.
    pub silent: Vec<Participant>,
}

/// One name: who leads, and who else is there.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Election {
    /// The name. `None`: somebody holds the key, and nobody has told what it stands for.
    pub name: Option<Name>,
    /// The key by which the store knows it.
    pub key: Key,
    /// Who holds the lease.
    pub leader: Option<Participant>,
    /// Who stands by; without a role, those who have not answered and wait for it in the store.
    pub standbys: Vec<Participant>,
    /// Who is a candidate, and neither holds the lease nor asks for it: ineligible, or on the way out of a term that
    /// was lost.
    pub aside: Vec<Participant>,
}

/// One candidate of a name, or whoever holds its key.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Participant {
    /// What its process is called: its identity, or what PostgreSQL calls the session of another program.
    pub identity: Option<String>,
    /// What it is doing. `None`: it has not answered.
    pub role: Option<Role>,
    /// Which term of its Locker this is: see [`Lease::term`](crate::Lease::term).
    pub term: Option<u64>,
    /// How long ago that term began.
    pub held_for: Option<Duration>,
    /// Where its session comes from.
    pub address: Option<String>,
    /// On PostgreSQL the server's process that serves it; on files the process itself.
    pub pid: Option<i32>,
    /// How old its session is.
    pub session_age: Option<Duration>,
    /// How long ago the store last answered it.
    pub silent_for: Option<Duration>,
    /// Whether it hands over when it is asked to: [`Options::answer_step_down`].
    pub answers_step_down: Option<bool>,
}

/// What came of a request to hand over: [`Observer::hand_over`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Handover {
    /// Nobody leads: nobody was asked.
    NobodyLeads,
    /// It does not hand over when it is asked to, so it was not: [`Options::answer_step_down`].
    Refused {
        /// Who leads on.
        leader: Participant,
    },
    /// A new term has begun.
    TakenOver {
        /// Who led before.
        from: Participant,
        /// Who leads now.
        by: Participant,
    },
}

impl Snapshot {
    /// Gives what was to be seen of one name: also of one that nobody holds or contends for.
    #[must_use]
    pub fn of(&self, name: &Name) -> Election {
        let key = Key::of(Kind::Lease, name);
        let found = self.elections.iter().find(|election| election.key == key).cloned();
        let mut election = found.unwrap_or_else(|| Election::of_nobody(key));
        election.name = Some(name.clone());
        election
    }

    fn shows_the_same_as(&self, other: &Self) -> bool {
        let same = |ours: &[Participant], theirs: &[Participant]| {
            ours.len() == theirs.len() && ours.iter().zip(theirs).all(|(a, b)| a.is_same(b))
        };
        let is_same = |(a, b): (&Election, &Election)| {
            (&a.name, a.key) == (&b.name, b.key)
                && same(a.leader.as_slice(), b.leader.as_slice())
                && same(&a.standbys, &b.standbys)
                && same(&a.aside, &b.aside)
        };
        self.elections.len() == other.elections.len()
            && self.elections.iter().zip(&other.elections).all(is_same)
            && same(&self.silent, &other.silent)
    }
}

impl Election {
    const fn of_nobody(key: Key) -> Self {
        Self { name: None, key, leader: None, standbys: Vec::new(), aside: Vec::new() }
    }
}

/// For people, on one line.
impl fmt::Display for Election {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.name {
            Some(name) => write!(f, "{name:?}: ")?,
            None => match self.key.pair() {
                Some((first, second)) => write!(f, "key ({first}, {second}): ")?,
                None => write!(f, "key {}: ", self.key.get())?,
            },
        }
        match &self.leader {
            Some(leader) => write!(f, "{leader}")?,
            None => f.write_str("nobody leads")?,
        }
        match self.standbys.len() {
            0 => f.write_str(", nobody stands by"),
            1 => f.write_str(", 1 stands by"),
            count => write!(f, ", {count} stand by"),
        }
    }
}

impl Participant {
    fn new(seen: Option<&Seen>, answer: Option<&Answer>) -> Self {
        let unknown = Holder::default();
        let who = seen.map_or(&unknown, |seen| &seen.who);
        let answered = answer.map(|answer| answer.identity.clone()).filter(|identity| !identity.is_empty());
        Self {
            identity: answered.or_else(|| who.identity.clone().filter(|identity| !identity.is_empty())),
            role: None,
            term: None,
            held_for: None,
            address: who.address.clone(),
            pid: who.pid,
            session_age: who.age,
            silent_for: who.silence,
            answers_step_down: answer.map(|answer| answer.steps_down),
        }
    }

    fn standing(mut self, standing: &Standing) -> Self {
        let Standing { role, term, held_for, .. } = standing;
        (self.role, self.term, self.held_for) = (Some(*role), *term, *held_for);
        self
    }

    /// But for the time that has passed.
    fn is_same(&self, other: &Self) -> bool {
        let told = |it: &Self| (it.identity.clone(), it.role, it.term, it.pid, it.answers_step_down);
        told(self) == told(other)
    }

    /// Whether this may be the same term of the same session, in whichever state: nothing that both tell differs.
    fn is_term_of(&self, other: &Self) -> bool {
        fn differs<T: PartialEq>(one: Option<T>, other: Option<T>) -> bool {
            one.zip(other).is_some_and(|(one, other)| one != other)
        }
        !differs(self.identity.as_ref(), other.identity.as_ref())
            && !differs(self.pid, other.pid)
            && !differs(self.term, other.term)
    }
}

/// For people: who it is and what it does.
impl fmt::Display for Participant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.identity.as_deref().unwrap_or("unknown"))?;
        match self.role {
            Some(role) => write!(f, " {role}")?,
            None => f.write_str(" does not answer")?,
        }
        if let Some(term) = self.term {
            write!(f, ", term {term}")?;
        }
        if let Some(held_for) = self.held_for {
            write!(f, ", for {}", humantime::format_duration(Duration::from_secs(held_for.as_secs())))?;
        }
        if let Some(pid) = self.pid {
            write!(f, ", pid {pid}")?;
        }
        if let Some(address) = &self.address {
            write!(f, ", from {address}")?;
        }
        Ok(())
    }
}

/// What one Locker has answered so far.
struct Answer {
    identity: String,
    steps_down: bool,
    /// With the key of each, which takes a while to find.
    parts: BTreeMap<u32, Vec<(Key, Standing)>>,
    count: u32,
}

impl Answer {
    fn is_complete(&self) -> bool {
        u32::try_from(self.parts.len()) == Ok(self.count)
    }

    fn standings(&self) -> impl Iterator<Item = &(Key, Standing)> {
        self.parts.values().flatten()
    }
}

/// What the store shows, and what the Lockers have answered, by session.
struct Found {
    seen: Vec<Seen>,
    /// A session without a name in the store is told by its identity.
    answers: BTreeMap<(String, String), Answer>,
}

/// One name as it is put together.
#[derive(Default)]
struct Sketch<'a> {
    name: Option<&'a Name>,
    /// Who says so, and which session that is in the store.
    said: Vec<(Option<usize>, Participant)>,
    /// Who holds the key in the store: the sessions there.
    shown: Vec<usize>,
}

impl Found {
    fn add(&mut self, presence: Presence) {
        let Presence { session, identity, steps_down, part: (part, count), standings, .. } = presence;
        let by =
            if session.is_empty() { (String::new(), identity.clone()) } else { (session, String::new()) };
        let nothing = || Answer { identity, steps_down, parts: BTreeMap::new(), count };
        let key = |it: Standing| (Key::of(Kind::Lease, &it.name), it);
        let standings = standings.into_iter().map(key).collect();
        self.answers.entry(by).or_insert_with(nothing).parts.insert(part, standings);
    }

    /// Everybody who can be expected to has answered.
    fn is_complete(&self) -> bool {
        self.seen.iter().filter(|seen| seen.answers).all(|seen| self.has_answered(seen))
            && self.answers.values().all(Answer::is_complete)
    }

    fn answer_of(&self, seen: &Seen) -> Option<&Answer> {
        self.answers.get(&(seen.session.clone(), String::new())).filter(|_| !seen.session.is_empty())
    }

    fn has_answered(&self, seen: &Seen) -> bool {
        self.answer_of(seen).is_some_and(Answer::is_complete)
    }

    /// As [`has_answered`](Self::has_answered), where the store knows who holds something by the identity alone.
    fn is_told_by_identity(&self, seen: &Seen) -> bool {
        let is_it =
            |answer: &Answer| answer.is_complete() && Some(&answer.identity) == seen.who.identity.as_ref();
        seen.session.is_empty() && self.answers.values().any(is_it)
    }

    fn sketches(&self) -> HashMap<Key, Sketch<'_>> {
        let by_session: HashMap<&str, usize> =
            self.seen.iter().enumerate().map(|(n, seen)| (seen.session.as_str(), n)).collect();
        let mut sketches: HashMap<Key, Sketch<'_>> = HashMap::new();
        for ((session, _), answer) in &self.answers {
            let at = by_session.get(session.as_str()).copied().filter(|_| !session.is_empty());
            for (key, standing) in answer.standings() {
                let sketch = sketches.entry(*key).or_default();
                sketch.name = Some(&standing.name);
                let seen = at.and_then(|at| self.seen.get(at));
                sketch.said.push((at, Participant::new(seen, Some(answer)).standing(standing)));
            }
        }
        for (at, seen) in self.seen.iter().enumerate() {
            // What one who has answered holds, and no candidate has told of, is a critical section of its.
            let tells_all = self.has_answered(seen) || self.is_told_by_identity(seen);
            for key in &seen.holds {
                if tells_all && !sketches.contains_key(key) {
                    continue;
                }
                sketches.entry(*key).or_default().shown.push(at);
            }
        }
        sketches
    }

    /// Whether who holds a lease in the store is who says so. Else it has changed hands between the two.
    fn agrees(&self) -> bool {
        self.sketches().values().all(|sketch| {
            let said = |at: usize, holds: bool| {
                sketch.said.iter().any(|(by, it)| self.is_of(*by, it, at) && it.holds() == holds)
            };
            let others_hold =
                |at: usize| sketch.said.iter().any(|(by, it)| !self.is_of(*by, it, at) && it.holds());
            sketch.shown.iter().all(|&at| said(at, true) || !(said(at, false) || others_hold(at)))
        })
    }

    /// Whether what a session said is of the one that the store shows. Where the store knows a holder by its identity
    /// alone, so does this.
    fn is_of(&self, by: Option<usize>, said: &Participant, at: usize) -> bool {
        let shown = self.seen.get(at).and_then(|seen| seen.who.identity.as_ref());
        by == Some(at) || (shown.is_some() && shown == said.identity.as_ref())
    }

    fn snapshot(&self) -> Snapshot {
        let mut elections: Vec<Election> =
            self.sketches().into_iter().map(|(key, sketch)| self.election(key, sketch)).collect();
        elections.sort_by(|a, b| (a.name.is_none(), &a.name, a.key).cmp(&(b.name.is_none(), &b.name, b.key)));
        let is_silent = |seen: &&Seen| seen.answers && !self.has_answered(seen);
        let mut silent: Vec<Participant> = self
            .seen
            .iter()
            .filter(is_silent)
            .map(|seen| Participant::new(Some(seen), self.answer_of(seen)))
            .collect();
        silent.sort_by(|a, b| (&a.identity, a.pid).cmp(&(&b.identity, b.pid)));
        Snapshot { elections, silent }
    }

    fn election(&self, key: Key, sketch: Sketch<'_>) -> Election {
        let mut election = Election { name: sketch.name.cloned(), ..Election::of_nobody(key) };
        let said = |at: usize| sketch.said.iter().any(|(by, _)| *by == Some(at));
        let silent = |(at, seen): &(usize, &Seen)| !seen.shares.is_empty() && !said(*at);
        let mut silent = self.seen.iter().enumerate().filter(silent).peekable();
        if silent.peek().is_some() {
            let waiting = key.waiting();
            let waits = silent.filter(|(_, seen)| seen.shares.contains(&waiting));
            election
                .standbys
                .extend(waits.map(|(_, seen)| Participant::new(Some(seen), self.answer_of(seen))));
        }

        // What the store shows counts for more than what somebody said a moment ago.
        let shown = sketch.shown.first().map(|&at| {
            let claim = sketch.said.iter().position(|(by, it)| self.is_of(*by, it, at) && it.holds());
            (at, claim)
        });
        let claim = if let Some((_, claim)) = shown {
            claim
        } else {
            let claims = sketch.said.iter().enumerate().filter(|(_, (_, it))| it.holds());
            claims.min_by_key(|(_, (_, it))| it.held_for).map(|(n, _)| n)
        };
        if let (Some((at, _)), None) = (shown, claim) {
            let seen = self.seen.get(at);
            election.leader = Some(Participant::new(seen, seen.and_then(|seen| self.answer_of(seen))));
        }
        for (n, (by, participant)) in sketch.said.into_iter().enumerate() {
            let leads = claim == Some(n);
            match participant.role {
                _ if leads => election.leader = Some(participant),
                // It won meanwhile: it is shown above.
                Some(Role::Standby) if by.is_some() && by == shown.map(|(at, _)| at) => {}
                Some(Role::Standby) => election.standbys.push(participant),
                _ => election.aside.push(participant),
            }
        }
        let order = |a: &Participant, b: &Participant| (&a.identity, a.pid).cmp(&(&b.identity, b.pid));
        election.standbys.sort_by(order);
        election.aside.sort_by(order);
        election
    }
}

impl Participant {
    fn holds(&self) -> bool {
        self.role.is_some_and(Role::holds)
    }
}

#[cfg(test)]
mod tests;
