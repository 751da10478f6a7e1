//! The client's side: what a driver sees of the in-memory server.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::error::{ConnectError, LossCause};
use crate::name::Key;
use crate::store::slots::{Amended, Entry, Looked, NoSlots, Record, Slots};
use crate::store::{Enforcement, Event, Exchange, Exchanged, Holder, Message, Minted, Seen, Session, Store};

use super::network::{Delays, Port, World};
use super::server::{Held, Rule, Server, SessionId};

/// Opens sessions of one process with an in-memory server.
#[derive(Debug)]
pub(crate) struct MemoryStore {
    world: Arc<World>,
    identity: String,
    ttl: Duration,
}

impl MemoryStore {
    pub(super) fn new(world: Arc<World>, identity: String, ttl: Duration) -> Self {
        Self { world, identity, ttl }
    }
}

impl Store for MemoryStore {
    type Session = MemorySession;

    fn enforcement(&self) -> Enforcement {
        enforcement(&self.world)
    }

    fn address(&self) -> String {
        "memory".to_owned()
    }

    async fn connect(&mut self) -> Result<MemorySession, ConnectError> {
        // A real await point, as in a statement.
        tokio::task::yield_now().await;
        let Self { world, identity, ttl } = self;
        let Delays { before, after } = world.delays(identity);
        world.travel(identity, before).await;
        // Made before the answer travels: dropped on the way, it hangs up.
        let session = world.with(|state, now| state.accept(identity, *ttl, now)).map(|id| MemorySession {
            world: Arc::clone(world),
            identity: identity.clone(),
            id,
            in_flight: None,
        });
        world.travel(identity, after).await;
        let session = session.ok_or_else(|| unreachable("connection refused: the server is down"))?;
        match world.with(|state, _| state.port(session.id).and_then(Port::closed)) {
            None => Ok(session),
            Some(cause) => Err(unreachable(&cause.to_string())),
        }
    }
}

fn enforcement(world: &World) -> Enforcement {
    let rule = world.with(|state, _| state.server.rule());
    Enforcement { frees_silent_holders: true, any_answer_renews: rule == Rule::Session, reconnects: false }
}

fn unreachable(reason: &str) -> ConnectError {
    ConnectError::Unreachable { reason: reason.to_owned() }
}

/// One connection to an in-memory server.
#[derive(Debug)]
pub(crate) struct MemorySession {
    world: Arc<World>,
    identity: String,
    id: SessionId,
    /// The last statement that was sent as a message. It outlives the future that sent it.
    in_flight: Option<JoinHandle<()>>,
}

impl MemorySession {
    /// Sends a statement and waits for its answer, or for the news that the session is over.
    ///
    /// # Panics
    ///
    /// When [`Memory::panic_driver`](super::Memory::panic_driver) asked for it.
    async fn statement<T: Send + 'static>(
        &mut self,
        statement: impl FnOnce(&mut Server, SessionId, Instant) -> T + Send + 'static,
    ) -> Result<T, LossCause> {
        assert!(!self.world.takes_panic(&self.identity), "asked to panic, by Memory::panic_driver");
        // A real await point: a future that is dropped here has sent nothing.
        tokio::task::yield_now().await;

        let Delays { before, after } = self.world.delays(&self.identity);
        let is_clear = before.is_zero()
            && after.is_zero()
            && !self.world.process(&self.identity, |process| process.is_cut_off())
            && self.in_flight.as_ref().is_none_or(JoinHandle::is_finished);
        if is_clear {
            let id = self.id;
            return match self.world.with(|state, now| state.server.carry_out(id, now, statement)) {
                Some(answer) => Ok(answer),
                None => Err(self.closed().await),
            };
        }

        let (answer_to, answer) = oneshot::channel();
        let previous = self.in_flight.take();
        let (world, identity, id) = (Arc::clone(&self.world), self.identity.clone(), self.id);
        self.in_flight = Some(tokio::spawn(async move {
            // One after the other, as a connection sends them.
            if let Some(previous) = previous {
                drop(previous.await);
            }
            world.travel(&identity, before).await;
            let answer = world.with(|state, now| state.server.carry_out(id, now, statement));
            world.travel(&identity, after).await;
            // No answer: what the client hears is that the session was closed. No client: nobody hears it.
            if let Some(answer) = answer {
                drop(answer_to.send(answer));
            }
        }));
        tokio::select! {
            biased;
            Ok(answer) = answer => Ok(answer),
            cause = self.closed() => Err(cause),
        }
    }

    async fn closed(&self) -> LossCause {
        self.world.arrival(self.id, |port| port.closed()).await
    }
}

impl Session for MemorySession {
    type Held = Held;

    fn enforcement(&self) -> Enforcement {
        enforcement(&self.world)
    }

    fn address(&self) -> String {
        "memory".to_owned()
    }

    async fn exchange(&mut self, exchange: &Exchange<Held>) -> Result<Exchanged<Held>, LossCause> {
        let exchange = Exchange {
            releases: exchange.releases.clone(),
            withdrawals: exchange.withdrawals.clone(),
            asks: exchange.asks.clone(),
        };
        self.statement(move |server, id, now| server.exchange(id, &exchange, now)).await
    }

    async fn heartbeat(&mut self, held: &[Held]) -> Result<Vec<bool>, LossCause> {
        let held = held.to_vec();
        self.statement(move |server, _, now| server.heartbeat(&held, now)).await
    }

    async fn mint(&mut self, held: &Held) -> Result<Minted, LossCause> {
        let held = held.clone();
        self.statement(move |server, _, _| server.mint(&held)).await
    }

    async fn slots(&mut self, slots: &Slots) -> Result<Result<Looked, NoSlots>, LossCause> {
        let key = slots.key;
        self.statement(move |server, _, now| server.slots(key, now)).await.map(Ok)
    }

    async fn amend(
        &mut self,
        held: &Held,
        slots: &Slots,
        expected: Option<&Record>,
        next: &Entry,
    ) -> Result<Amended, LossCause> {
        let (held, key, expected, next) = (held.clone(), slots.key, expected.cloned(), next.clone());
        self.statement(move |server, _, now| server.amend(&held, key, expected.as_ref(), next, now)).await
    }

    async fn publish(&mut self, message: Message) -> Result<bool, LossCause> {
        self.statement(move |server, id, _| server.publish(id, message)).await.map(|()| true)
    }

    async fn holders(&mut self, keys: &[Key]) -> Result<Vec<Option<Holder>>, LossCause> {
        let keys = keys.to_vec();
        self.statement(move |server, _, _| server.tell_holders(&keys)).await
    }

    async fn survey(&mut self) -> Result<Option<Vec<Seen>>, LossCause> {
        self.statement(|server, _, _| server.survey()).await.map(Some)
    }

    async fn event(&mut self) -> Event {
        self.world.arrival(self.id, Port::next).await
    }

    async fn end(mut self) {
        // Over either way.
        drop(self.statement(|server, id, _| server.end(id)).await);
    }
}

impl Drop for MemorySession {
    fn drop(&mut self) {
        self.world.with(|state, _| state.hang_up(self.id));
    }
}
