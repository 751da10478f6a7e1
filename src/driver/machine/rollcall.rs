//! What Lockers tell each other: requests to step down, roll calls and their answers; and the errands that carry them.

use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;
use tracing::info;

use super::candidate::{Candidate, Phase};
use super::statement::{Errand, Minting, Task};
use super::{Machine, Statement};
use crate::driver::command::Id;
use crate::driver::term::Reason;
use crate::name::Key;
use crate::store::slots::Amended;
use crate::store::{Call, Message, Minted, Presence, Role, Standing};

/// How long whoever calls the roll waits for the answers: one that cannot be sent by then is not sent.
pub(crate) const ANSWER_LIMIT: Duration = Duration::from_millis(500);

/// How many roll calls are answered after each other. More at once are a flood.
const CALLS_AT_ONCE: usize = 8;

impl<H: Clone> Machine<H> {
    pub(super) fn run_errand(&mut self, task: Task, now: Instant) {
        let expires = now + self.options.query_timeout;
        self.errands.push_back(Errand { task, expires, has_waited: false });
    }

    /// Who calls the roll takes the answers from now on.
    pub(super) fn listen(&mut self, call: u64, answers: mpsc::Sender<Presence>) {
        self.listeners.retain(|(_, answers)| !answers.is_closed());
        self.listeners.push((call, answers));
    }

    /// The next errand: our own first, then the answers to others.
    pub(super) fn errand(&mut self, now: Instant) -> Option<Statement<H>> {
        let errand = self.errands.pop_front().or_else(|| self.calls.pop_front())?;
        let statement = match errand.task {
            Task::Publish(message, sent) => Statement::Publish(message, Some(sent)),
            Task::Survey(reply) => Statement::Survey(reply),
            Task::Who(key, reply) => match self.blocked_on(key) {
                // It is held here, and something else is waited for.
                Some(passage) => Statement::Blockers(passage, Some(reply)),
                None => Statement::Who(key, reply),
            },
            Task::Answer(call) => Statement::Publish(Message::Present(self.presence(call, now)), None),
            Task::Mint { id, term, reply } => {
                let Some(held) = self.held(id, term) else {
                    reply.send(Minted::Gone).ok();
                    return None;
                };
                Statement::Mint(Minting { held, id, term, reply })
            }
            Task::Slots(slots, reply) => Statement::Slots(slots, reply),
            Task::Amend(amend, reply) => {
                let Some(held) = self.held(amend.id, amend.term) else {
                    reply.send(Amended::Gone).ok();
                    return None;
                };
                Statement::Amend(held, amend, reply)
            }
        };
        self.sent = now;
        Some(statement)
    }

    pub(crate) fn on_message(&mut self, message: Message, now: Instant) {
        match message {
            Message::StepDown(key) => self.on_step_down(key, now),
            Message::RollCall(call) => self.on_roll_call(call, now),
            Message::Present(presence) => {
                let call = presence.call.number;
                if let Some((_, answers)) = self.listeners.iter().find(|(number, _)| *number == call) {
                    // Nobody is waited for: what comes faster than it is taken is a flood.
                    answers.try_send(presence).ok();
                }
            }
        }
    }

    fn on_step_down(&mut self, key: Key, now: Instant) {
        let asked =
            |(_, candidate): &(Id, &Candidate<H>)| candidate.place.is_run() && candidate.place.key == key;
        let ids: Vec<Id> = self.candidates.iter().filter(asked).map(|(id, _)| id).collect();
        for id in ids {
            let Some(candidate) = self.candidates.get(id) else { continue };
            if self.options.answer_step_down {
                self.stop(id, None, Reason::SteppedDown, now);
            } else if let Phase::Held { term, .. } = &candidate.phase {
                info!(
                    name = %term.name, term = term.number, identity = %self.options.identity,
                    "asked to step down, and leads on: answer_step_down is false"
                );
            }
        }
    }

    fn on_roll_call(&mut self, call: Call, now: Instant) {
        let is_known = |errand: &Errand| matches!(&errand.task, Task::Answer(known) if *known == call);
        if self.calls.len() < CALLS_AT_ONCE && !self.calls.iter().any(is_known) {
            let expires = now + ANSWER_LIMIT;
            self.calls.push_back(Errand { task: Task::Answer(call), expires, has_waited: false });
        }
    }

    /// What every candidate here is doing.
    fn presence(&self, call: Call, now: Instant) -> Presence {
        Presence {
            call,
            session: String::new(),
            identity: self.options.identity.clone(),
            steps_down: self.options.answer_step_down,
            part: (1, 1),
            standings: self
                .candidates
                .values()
                .filter(|candidate| candidate.place.is_run())
                .map(|candidate| candidate.standing(now))
                .collect(),
        }
    }
}

impl<H> Candidate<H> {
    fn standing(&self, now: Instant) -> Standing {
        let (role, term) = match &self.phase {
            Phase::Resting => (Role::Ineligible, None),
            Phase::Waiting(_) => (Role::Standby, None),
            Phase::Held { term, before: Some(_), .. } => (Role::Blocked, Some(term)),
            Phase::Held { term, .. } if term.reason().is_some() => (Role::Draining, Some(term)),
            Phase::Held { term, .. } => (Role::Leading, Some(term)),
            Phase::Lost { term, .. } => (Role::Lost, Some(term)),
        };
        Standing {
            name: self.place.name.clone(),
            role,
            term: term.map(|term| term.number),
            held_for: term.map(|term| now.saturating_duration_since(term.since)),
        }
    }
}
