//! What the machine makes of the store's answers.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;
use tracing::{debug, info, warn};

use super::Machine;
use super::candidate::{Barrier, Before, Candidate, Phase, Waiting};
use super::statement::{Batch, Heartbeat, Inquiry, Minting, Passage, Release};
use crate::driver::command::{Admission, Amend, Id, NotLooked, Parting};
use crate::driver::term::{State, Term};
use crate::error::LossCause;
use crate::store::slots::{Amended, Looked, NoSlots};
use crate::store::{Answer, Ask, Blocker, Exchanged, Fence, Holder, Minted, Seen};

/// Whether a term that was granted may begin, as far as fenced transactions go.
#[derive(Debug)]
enum Passed {
    /// It was not to be able to fence any, or the store has none.
    NotAsked,
    /// It fences by this.
    By(Fence),
    NotYet,
}

impl<H: Clone> Machine<H> {
    /// Takes the answer to a heartbeat: what is no longer ours is lost, the rest is trusted on.
    ///
    /// # Errors
    ///
    /// The cause, if a deadline had passed before the answer came: then the session is to be given up.
    pub(crate) fn on_heartbeat(
        &mut self,
        heartbeat: Heartbeat<H>,
        ours: &[bool],
        sent: Instant,
        now: Instant,
    ) -> Result<(), LossCause> {
        for (&(id, number), ours) in heartbeat.terms.iter().zip(ours) {
            if !ours
                && self.holds(id, number)
                && let Some(candidate) = self.candidates.get_mut(id)
            {
                candidate.lose(&LossCause::Gone, &self.options.identity, now);
            }
        }
        self.on_answer(sent, true, now)?;
        self.meter.heartbeat(now.saturating_duration_since(sent));
        if cfg!(feature = "metrics") {
            for candidate in self.candidates.values() {
                if let Phase::Held { term, .. } = &candidate.phase {
                    term.tell_deadline();
                }
            }
        }
        for check in heartbeat.checks {
            check.reply.send(self.holds(check.id, check.term)).ok();
        }
        Ok(())
    }

    /// Takes the answers to an exchange.
    ///
    /// # Errors
    ///
    /// As for [`on_heartbeat`](Self::on_heartbeat).
    pub(crate) fn on_exchange(
        &mut self,
        batch: Batch<H>,
        exchanged: Exchanged<H>,
        sent: Instant,
        now: Instant,
    ) -> Result<(), LossCause> {
        self.releasing = self.releasing.saturating_sub(batch.releases.len());
        self.wake_waiting(&batch.releases, now);
        for (release, ours) in batch.releases.into_iter().zip(exchanged.released) {
            let (name, term, identity) = (&release.name, release.term, &self.options.identity);
            match (ours, term) {
                (true, Some(_)) if !release.is_run => debug!(%name, term, %identity, "released"),
                (true, Some(_)) => info!(%name, term, %identity, "released"),
                (true, None) => debug!(%name, %identity, "released what was granted to nobody"),
                (false, _) => warn!(%name, term, %identity, "the lease had been lost before its release"),
            }
            release.done(if ours { Parting::Released } else { Parting::Lost });
        }
        // What is held already is trusted on before anything new is granted: a grant has its own deadline.
        let trusted = self.on_answer(sent, false, now);
        for ((id, ask), answer) in batch.asking.into_iter().zip(batch.exchange.asks).zip(exchanged.answers) {
            self.on_asked(id, &ask, answer, sent, now);
        }
        trusted
    }

    fn on_asked(&mut self, id: Id, ask: &Ask, answer: Answer<H>, sent: Instant, now: Instant) {
        let next_poll = sent + self.poll_interval();
        let Some(candidate) = self.candidates.get_mut(id) else {
            // Whoever asked has gone. Nobody may hold, or wait for, what no handle stands for.
            match answer {
                Answer::Granted(held) | Answer::Fenced(held, _) => {
                    self.releases.push(Release::orphan(held, ask));
                }
                Answer::Busy { registered: true } => self.withdraw(ask.key),
                Answer::Busy { registered: false } | Answer::Failed(_) => {}
            }
            return;
        };
        let place = &mut candidate.place;
        match (&mut candidate.phase, answer) {
            // Free, but not to be had at once.
            (Phase::Waiting(_), Answer::Fenced(held, None)) if place.try_until().is_some() => {
                self.releases.push(Release::orphan(held, ask));
                self.turn_away(id, Admission::Busy, now);
            }
            (Phase::Waiting(_), Answer::Granted(held)) => {
                self.on_granted(id, held, Passed::NotAsked, sent, now);
            }
            (Phase::Waiting(_), Answer::Fenced(held, fence)) => {
                self.on_granted(id, held, fence.map_or(Passed::NotYet, Passed::By), sent, now);
            }
            (Phase::Waiting(_), Answer::Busy { .. }) if place.try_until().is_some() => {
                self.turn_away(id, Admission::Busy, now);
            }
            (Phase::Waiting(_), Answer::Failed(why)) if !place.is_run() => {
                self.turn_away(id, Admission::Failed(why), now);
            }
            (Phase::Waiting(waiting), Answer::Busy { registered }) => {
                if waiting.registered || !place.is_run() {
                    debug!(name = %place.name, "held by somebody else");
                } else {
                    info!(name = %place.name, identity = %self.options.identity, "stands by: held by somebody else");
                }
                waiting.asking = false;
                waiting.refused();
                self.poll_at.get_or_insert(next_poll);
                // A withdrawal that is yet to be sent is for whoever asked before.
                waiting.registered = registered && !self.withdrawals.contains(&ask.key);
                // Whoever was quicker may end uncleanly. A release told while we asked stays told: `due` is set.
                waiting.freed &= waiting.due.is_some();
                if !registered && waiting.due.is_none() {
                    waiting.due = Some(now);
                }
            }
            (Phase::Waiting(waiting), Answer::Failed(why)) => {
                warn!(name = %place.name, identity = %self.options.identity, why, "refused");
                waiting.asking = false;
                self.poll_at.get_or_insert(next_poll);
                waiting.registered = false;
                waiting.freed &= waiting.due.is_some();
            }
            (_, Answer::Granted(held) | Answer::Fenced(held, _)) => {
                self.releases.push(Release::orphan(held, ask));
            }
            (_, Answer::Busy { registered: true }) => self.withdraw(ask.key),
            (_, Answer::Busy { .. } | Answer::Failed(_)) => {}
        }
    }

    /// A term begins, or waits for that.
    #[cfg_attr(
        not(feature = "postgres"),
        expect(clippy::needless_pass_by_value, reason = "it has a fence where a store has any")
    )]
    fn on_granted(&mut self, id: Id, held: H, passed: Passed, sent: Instant, now: Instant) {
        let first_lease = !self.holds_any();
        let number = self.terms + 1;
        let Some(ttl) = self.candidates.get(id).map(|candidate| self.ttl(&candidate.place)) else { return };
        let deadline = sent + self.trust(ttl);
        let Some(Candidate { place, phase }) = self.candidates.get_mut(id) else { return };
        // A clean end of the term before: we were told of the release, and got the lease by asking then.
        let clean = matches!(phase, Phase::Waiting(Waiting { freed: true, .. }));
        self.terms = number;
        if first_lease {
            self.heartbeat_sent = sent;
        }
        let term = Arc::new(Term::new(place, (number, clean), now, deadline, Arc::clone(&self.options)));
        let identity = &self.options.identity;
        if place.is_run() {
            info!(name = %place.name, term = number, %identity, handed_over = clean, "acquired");
        } else {
            debug!(name = %place.name, term = number, %identity, "acquired");
        }
        let delay = if clean { Duration::ZERO } else { place.takeover_delay() };
        if !delay.is_zero() {
            let delay = humantime::format_duration(delay).to_string();
            info!(name = %place.name, term = number, delay, "waits: the term before may not have ended in order");
        }
        let barrier = match passed {
            Passed::NotYet => Some(Barrier::new(now)),
            Passed::By(fence) => {
                term.fence.get_or_init(|| fence);
                None
            }
            Passed::NotAsked => None,
        };
        let before = (barrier.is_some() || !delay.is_zero())
            .then(|| Box::new(Before { start_at: now + delay, barrier }));
        if before.is_some() {
            place.show(State::Blocked);
        } else {
            place.begin(&self.meter, &term, now);
        }
        *phase = Phase::Held { held, term, before, remind_at: None };
    }

    /// Takes by what terms fence transactions that could not begin before.
    ///
    /// # Errors
    ///
    /// As for [`on_heartbeat`](Self::on_heartbeat).
    pub(crate) fn on_passed(
        &mut self,
        passage: Passage<H>,
        fences: Vec<Option<Fence>>,
        sent: Instant,
        now: Instant,
    ) -> Result<(), LossCause> {
        for ((id, number), fence) in passage.terms.into_iter().zip(fences) {
            let Some(Candidate { phase: Phase::Held { term, before: Some(before), .. }, .. }) =
                self.candidates.get_mut(id)
            else {
                continue;
            };
            if term.number != number {
                continue;
            }
            if let Some(fence) = fence {
                term.fence.get_or_init(|| fence);
                before.barrier = None;
            } else if let Some(barrier) = &mut before.barrier {
                barrier.refused(now);
            }
        }
        self.on_answer(sent, false, now)
    }

    /// Tells in the log who keeps terms from beginning, or whoever asked who is in the way.
    ///
    /// # Errors
    ///
    /// As for [`on_heartbeat`](Self::on_heartbeat).
    pub(crate) fn on_blockers(
        &mut self,
        passage: &Passage<H>,
        reply: Option<oneshot::Sender<Option<Holder>>>,
        blockers: Vec<Option<Blocker>>,
        sent: Instant,
        now: Instant,
    ) -> Result<(), LossCause> {
        if let Some(reply) = reply {
            reply.send(blockers.into_iter().next().flatten().map(Holder::from)).ok();
            return self.on_answer(sent, false, now);
        }
        for ((id, _), blocker) in passage.terms.iter().zip(&blockers) {
            if let Some(candidate) = self.candidates.get(*id) {
                candidate.name_blocker(blocker.as_ref(), &self.options.identity);
            }
        }
        self.on_answer(sent, false, now)
    }

    /// A statement was answered: what is held is trusted on.
    pub(super) fn on_answer(
        &mut self,
        sent: Instant,
        heartbeat: bool,
        now: Instant,
    ) -> Result<(), LossCause> {
        if !heartbeat && !self.enforcement.any_answer_renews {
            return self.on_time(now);
        }
        for candidate in self.candidates.values() {
            if let Phase::Held { term, .. } = &candidate.phase
                && !term.renew(sent + self.trust(self.ttl(&candidate.place)), now)
            {
                return Err(LossCause::Deadline);
            }
        }
        Ok(())
    }

    /// Tells in the log who is in the way of those who were refused again and again.
    ///
    /// # Errors
    ///
    /// As for [`on_heartbeat`](Self::on_heartbeat).
    pub(crate) fn on_holders(
        &mut self,
        inquiry: &Inquiry,
        holders: Vec<Option<Holder>>,
        sent: Instant,
        now: Instant,
    ) -> Result<(), LossCause> {
        for (id, holder) in inquiry.asking.iter().zip(holders) {
            if let (Some(candidate), Some(holder)) = (self.candidates.get_mut(*id), holder) {
                candidate.name_holder(&holder, &self.options, self.bounds.trust);
            }
        }
        self.on_answer(sent, false, now)
    }

    /// Takes a fencing token, or that there is none.
    ///
    /// # Errors
    ///
    /// As for [`on_heartbeat`](Self::on_heartbeat).
    pub(crate) fn on_minted(
        &mut self,
        minting: Minting<H>,
        minted: Minted,
        sent: Instant,
        now: Instant,
    ) -> Result<(), LossCause> {
        let Minting { id, term, reply, .. } = minting;
        if minted == Minted::Gone
            && self.holds(id, term)
            && let Some(candidate) = self.candidates.get_mut(id)
        {
            candidate.lose(&LossCause::Gone, &self.options.identity, now);
        }
        reply.send(minted).ok();
        self.on_answer(sent, false, now)
    }

    /// Takes what the store shows of the slots of a name.
    ///
    /// # Errors
    ///
    /// As for [`on_heartbeat`](Self::on_heartbeat).
    pub(crate) fn on_slots(
        &mut self,
        reply: oneshot::Sender<Result<Looked, NotLooked>>,
        looked: Result<Looked, NoSlots>,
        sent: Instant,
        now: Instant,
    ) -> Result<(), LossCause> {
        reply.send(looked.map_err(NotLooked::NoSlots)).ok();
        self.on_answer(sent, false, now)
    }

    /// Takes what became of a record that was to be set.
    ///
    /// # Errors
    ///
    /// As for [`on_heartbeat`](Self::on_heartbeat).
    pub(crate) fn on_amended(
        &mut self,
        amend: &Amend,
        reply: oneshot::Sender<Amended>,
        amended: Amended,
        sent: Instant,
        now: Instant,
    ) -> Result<(), LossCause> {
        if amended == Amended::Gone
            && self.holds(amend.id, amend.term)
            && let Some(candidate) = self.candidates.get_mut(amend.id)
        {
            candidate.lose(&LossCause::Gone, &self.options.identity, now);
        }
        reply.send(amended).ok();
        self.on_answer(sent, false, now)
    }

    /// Tells who holds a key.
    ///
    /// # Errors
    ///
    /// As for [`on_heartbeat`](Self::on_heartbeat).
    pub(crate) fn on_who(
        &mut self,
        reply: oneshot::Sender<Option<Holder>>,
        holders: Vec<Option<Holder>>,
        sent: Instant,
        now: Instant,
    ) -> Result<(), LossCause> {
        reply.send(holders.into_iter().next().flatten()).ok();
        self.on_answer(sent, false, now)
    }

    /// A message was sent.
    ///
    /// # Errors
    ///
    /// As for [`on_heartbeat`](Self::on_heartbeat).
    pub(crate) fn on_published(
        &mut self,
        reply: Option<oneshot::Sender<bool>>,
        taken: bool,
        sent: Instant,
        now: Instant,
    ) -> Result<(), LossCause> {
        if let Some(reply) = reply {
            reply.send(taken).ok();
        }
        self.on_answer(sent, false, now)
    }

    /// Takes what the store shows of everybody.
    ///
    /// # Errors
    ///
    /// As for [`on_heartbeat`](Self::on_heartbeat).
    pub(crate) fn on_survey(
        &mut self,
        reply: oneshot::Sender<Option<Vec<Seen>>>,
        seen: Option<Vec<Seen>>,
        sent: Instant,
        now: Instant,
    ) -> Result<(), LossCause> {
        reply.send(seen).ok();
        self.on_answer(sent, false, now)
    }
}
