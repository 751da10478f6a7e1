//! Single decisions of the machine, fed by hand. What they add up to is shown by the simulation.

use rand::SeedableRng as _;
use tokio::sync::{mpsc, watch};

use super::*;
use crate::clock;
use crate::driver::command::{Place, Purpose, Run};
use crate::driver::term::{OVERRUN_MARGIN, Shown, Term};
use crate::name::Kind;
use crate::name::Name;
#[cfg(feature = "postgres")]
use crate::store::Fence;
use crate::store::{Answer, Call, Exchanged, Message, Role};
use crate::watch::StateWatch;

type Grants = mpsc::UnboundedReceiver<Result<Arc<Term>, Arc<ConnectError>>>;

const ENFORCEMENT: Enforcement =
    Enforcement { frees_silent_holders: true, any_answer_renews: true, reconnects: false };

fn machine(options: Options) -> (Machine<u32>, Instant) {
    let now = clock::now();
    let mut machine =
        Machine::new(Arc::new(options), Meter::default(), ENFORCEMENT, StdRng::seed_from_u64(1), now);
    machine.on_session(ENFORCEMENT, now);
    (machine, now)
}

fn enlist(machine: &mut Machine<u32>, id: Id, name: &str, now: Instant) -> (Grants, StateWatch) {
    let (grants, granted) = mpsc::unbounded_channel();
    let shown = watch::Sender::new(Shown { candidate: Some(id), state: State::Standby });
    let watched = StateWatch::new(shown.subscribe());
    let (key, takeover_delay) = (Key::of(Kind::Lease, name), machine.options.takeover_delay);
    let run = Run { takeover_delay, shutdown: None, grants, shown };
    let place = Place { id, name: Name::from(name), key, kind: Kind::Lease, purpose: Purpose::Run(run) };
    machine.on_command(Command::Enlist(place), now);
    machine.on_command(Command::Contend(id, Again::AtOnce), now);
    (granted, watched)
}

fn batch(machine: &mut Machine<u32>, now: Instant) -> Batch<u32> {
    match machine.next_statement(now) {
        Some(Statement::Exchange(batch)) => batch,
        _ => panic!("no exchange to send"),
    }
}

fn answer(machine: &mut Machine<u32>, batch: Batch<u32>, answers: Vec<Answer<u32>>, now: Instant) {
    let released = vec![true; batch.exchange.releases.len()];
    machine.on_exchange(batch, Exchanged { released, answers }, now, now).unwrap();
}

fn lead(machine: &mut Machine<u32>, id: Id, name: &str, now: Instant) -> (Arc<Term>, StateWatch) {
    let (mut grants, state) = enlist(machine, id, name, now);
    let asked = batch(machine, now);
    answer(machine, asked, vec![Answer::Granted(7)], now);
    (grants.try_recv().unwrap().unwrap(), state)
}

fn freed() -> Freed {
    Freed { key: Key::of(Kind::Lease, "job"), is_clean: true }
}

const BUSY: Answer<u32> = Answer::Busy { registered: true };

/// What `f` logs.
fn logged(f: impl FnOnce()) -> String {
    let (mut reader, writer) = std::io::pipe().unwrap();
    let subscriber =
        tracing_subscriber::fmt().with_ansi(false).with_writer(std::sync::Mutex::new(writer)).finish();
    tracing::subscriber::with_default(subscriber, f);
    std::io::read_to_string(&mut reader).unwrap()
}

/// F-28: nobody has looked at the clock before the job ended, or its run was dropped: the loss is told, once, with its cause.
#[test]
fn a_deadline_that_passed_unnoticed_is_told_as_a_loss() {
    for is_dropped in [false, true] {
        let (mut machine, now) = machine(Options::default());
        let (term, _state) = lead(&mut machine, 1, "job", now);
        let late = term.deadline();
        assert!(!term.is_held(late), "its run has seen it");
        let log = logged(|| {
            let (done, _) = oneshot::channel();
            machine.on_command(
                if is_dropped {
                    Command::Leave(1, None)
                } else {
                    Command::Ended { id: 1, term: term.number, done }
                },
                late,
            );
            machine.on_session_lost(&LossCause::Deadline, late);
        });
        let told: Vec<_> = log.lines().filter(|line| line.contains(" lost ")).collect();
        assert_eq!(told.len(), 1, "{log}");
        assert!(told[0].contains("WARN") && told[0].contains("the deadline passed before"), "{log}");
    }
}

/// F-06: any number of names is asked for in one statement.
#[test]
fn names_that_wait_are_asked_for_in_one_statement() {
    let (mut machine, now) = machine(Options::default());
    for id in 0..1_000 {
        enlist(&mut machine, id, &id.to_string(), now);
    }
    assert_eq!(batch(&mut machine, now).exchange.asks.len(), 1_000);
    assert!(machine.next_statement(now).is_none());
}

/// F-27: whoever asked has gone when the answer comes.
#[test]
fn a_grant_that_nobody_waits_for_is_released_and_a_registration_withdrawn() {
    let (mut machine, now) = machine(Options::default());
    for answered in [Answer::Granted(7), BUSY] {
        let granted = matches!(answered, Answer::Granted(_));
        enlist(&mut machine, 1, "job", now);
        let asked = batch(&mut machine, now);
        machine.on_command(Command::Leave(1, None), now);
        answer(&mut machine, asked, vec![answered], now);
        let Exchange { releases, withdrawals, asks } = batch(&mut machine, now).exchange;
        assert_eq!(
            (releases.len(), withdrawals.len(), asks.len()),
            (usize::from(granted), usize::from(!granted), 0)
        );
    }
}

/// F-30: it left and came back while its question was on its way; the withdrawal is yet to be sent.
#[test]
fn a_candidate_that_comes_back_registers_anew() {
    let (mut machine, now) = machine(Options::default());
    enlist(&mut machine, 1, "job", now);
    let asked = batch(&mut machine, now);
    answer(&mut machine, asked, vec![BUSY], now);
    machine.on_freed(freed(), now);
    let asked = batch(&mut machine, now);
    assert!(!asked.exchange.asks[0].register, "it is registered already");
    machine.on_command(Command::Rest(1), now);
    machine.on_command(Command::Contend(1, Again::AtOnce), now);
    answer(&mut machine, asked, vec![BUSY], now);
    let asked = batch(&mut machine, now);
    assert_eq!(asked.exchange.withdrawals.len(), 1);
    assert!(asked.exchange.asks[0].register, "or no release would be told");
}

/// A release that is told while the question is on its way may have come after the store had answered it.
#[test]
fn a_push_that_meets_a_question_on_its_way_causes_one_more() {
    let (mut machine, now) = machine(Options::default());
    enlist(&mut machine, 1, "job", now);
    let asked = batch(&mut machine, now);
    machine.on_freed(freed(), now);
    assert!(machine.next_statement(now).is_none(), "one question of a name at a time");
    answer(&mut machine, asked, vec![BUSY], now);
    let asked = batch(&mut machine, now);
    answer(&mut machine, asked, vec![BUSY], now);
    assert!(machine.next_statement(now).is_none());
}

/// F-39
#[test]
fn only_a_release_that_was_told_spares_the_takeover_delay() {
    let (mut machine, now) = machine(Options::default().takeover_delay(Duration::from_secs(9)));
    let (mut grants, state) = enlist(&mut machine, 1, "job", now);
    let asked = batch(&mut machine, now);
    answer(&mut machine, asked, vec![BUSY], now);
    // Told of a release, but somebody else was quicker, and may have ended uncleanly.
    machine.on_freed(freed(), now);
    let asked = batch(&mut machine, now);
    answer(&mut machine, asked, vec![BUSY], now);
    let later = now + Duration::from_secs(6);
    let asked = batch(&mut machine, later);
    answer(&mut machine, asked, vec![Answer::Granted(7)], later);
    assert_eq!(state.get(), State::Blocked);
    assert!(grants.try_recv().is_err());
    machine.on_time(later + Duration::from_secs(9)).unwrap();
    let term = grants.try_recv().unwrap().unwrap();
    let (done, _) = oneshot::channel();
    machine.on_command(Command::Ended { id: 1, term: term.number, done }, later);
    machine.on_command(Command::Contend(1, Again::AtOnce), later);

    // And now one that we did get.
    let released = batch(&mut machine, later);
    assert!(released.exchange.asks.is_empty(), "not in one breath with its own release");
    answer(&mut machine, released, vec![], later);
    let asked = batch(&mut machine, later);
    answer(&mut machine, asked, vec![BUSY], later);
    machine.on_freed(freed(), later);
    let asked = batch(&mut machine, later);
    answer(&mut machine, asked, vec![Answer::Granted(8)], later);
    assert!(grants.try_recv().is_ok());
}

/// F-17, F-21: every lease is told before anything else is done; the releases under way are not kept waiting.
#[test]
fn a_lost_session_tells_every_lease_and_waits_for_their_jobs() {
    let (mut machine, now) = machine(Options::default());
    let (one, state) = lead(&mut machine, 1, "one", now);
    let (other, _) = lead(&mut machine, 2, "other", now);
    let cause = LossCause::Timeout { limit: Duration::from_secs(10) };
    machine.on_session_lost(&cause, now);
    for term in [&one, &other] {
        assert_eq!(term.reason(), Some(Reason::Lost(cause.clone())));
    }
    assert_eq!(state.get(), State::Draining);
    let grace = now + Duration::from_secs(5) + OVERRUN_MARGIN;
    assert_eq!(machine.lost_jobs_until(), Some(grace));
    let (done, mut parting) = oneshot::channel();
    machine.on_command(Command::Ended { id: 1, term: one.number, done }, now);
    assert_eq!(parting.try_recv(), Ok(Parting::Lost));
    assert_eq!(machine.lost_jobs_until(), Some(grace), "the other one has not ended");
    let (done, _) = oneshot::channel();
    machine.on_command(Command::Ended { id: 2, term: other.number, done }, now);
    assert_eq!(machine.lost_jobs_until(), None);
}

/// D05: after three refusals the store is asked who is in the way, and when there were twice as many; after a release
/// it is another holder, who has not refused anybody yet.
#[test]
fn who_is_refused_again_and_again_asks_by_whom() {
    let (mut machine, mut now) = machine(Options::default());
    let (_grants, _state) = enlist(&mut machine, 1, "job", now);
    // Refuses the name so often, and tells whether the store is asked by whom after each.
    let mut refuse = |times: usize, is_freed: bool| -> Vec<bool> {
        let mut refuse = |_| {
            if is_freed {
                machine.on_freed(freed(), now);
            }
            let asked = batch(&mut machine, now);
            answer(&mut machine, asked, vec![BUSY], now);
            now = machine.next_statement_at().unwrap();
            let inquiry = machine.inquiry();
            assert!(machine.inquiry().is_none(), "asked once");
            inquiry.is_some_and(|inquiry| inquiry.keys == [Key::of(Kind::Lease, "job")])
        };
        (0..times).map(&mut refuse).collect()
    };
    let (yes, no) = (true, false);
    assert_eq!(refuse(12, false), [no, no, yes, no, no, yes, no, no, no, no, no, yes]);
    assert_eq!(refuse(1, true), [no]);
    assert_eq!(refuse(3, false), [no, yes, no]);
}

/// F-43: a job that was not dropped in time blocks its thread; nothing is started beside it.
#[test]
fn a_job_that_overruns_its_grace_is_reported_and_its_name_is_not_asked_for() {
    let (mut machine, now) = machine(Options::default());
    let (term, state) = lead(&mut machine, 1, "job", now);
    machine.on_session_lost(&LossCause::Gone, now);
    machine.on_session(ENFORCEMENT, now);
    let grace = now + Duration::from_secs(5);
    machine.on_time(grace).unwrap();
    assert_eq!(state.get(), State::Draining);
    machine.on_time(grace + OVERRUN_MARGIN).unwrap();
    assert_eq!(state.get(), State::Overrun { since: grace + OVERRUN_MARGIN });
    machine.on_command(Command::Contend(1, Again::AtOnce), grace);
    assert!(machine.batch(grace + Duration::from_mins(1)).is_none());
    let (done, _) = oneshot::channel();
    machine.on_command(Command::Ended { id: 1, term: term.number, done }, grace);
    machine.on_command(Command::Contend(1, Again::AtOnce), grace);
    assert_eq!(batch(&mut machine, grace).exchange.asks.len(), 1);
}

/// Heartbeats that take longer than their interval leave room for everything else.
#[test]
fn heartbeats_that_are_always_due_take_turns_with_exchanges() {
    let (mut machine, now) = machine(Options::default());
    lead(&mut machine, 1, "job", now);
    enlist(&mut machine, 2, "other", now);
    let late = now + Duration::from_secs(9);
    let Some(Statement::Heartbeat(heartbeat)) = machine.next_statement(late) else { panic!("it is due") };
    let later = late + Duration::from_secs(9);
    machine.on_heartbeat(heartbeat, &[true], late, later).unwrap();
    let asked = batch(&mut machine, later);
    answer(&mut machine, asked, vec![BUSY], later);
    assert!(matches!(machine.next_statement(later), Some(Statement::Heartbeat(_))));
}

/// Exchanges that take longer than the poll interval leave room for a message, which goes after what was asked before.
#[test]
fn exchanges_that_are_always_due_let_a_message_pass() {
    let (mut machine, now) = machine(Options::default());
    enlist(&mut machine, 1, "job", now);
    let (sent, _is_sent) = oneshot::channel();
    machine.on_command(Command::Publish(Message::StepDown(Key::of(Kind::Lease, "other")), sent), now);
    let asked = batch(&mut machine, now);
    let late = now + Duration::from_secs(9);
    let exchanged = Exchanged { released: Vec::new(), answers: vec![BUSY] };
    machine.on_exchange(asked, exchanged, now, late).unwrap();
    assert!(matches!(machine.next_statement(late), Some(Statement::Publish(..))));
    batch(&mut machine, late);
}

/// F-36: an answer that comes after the deadline gives the session up.
#[test]
fn a_late_answer_revives_nothing() {
    let (mut machine, now) = machine(Options::default());
    let (term, _) = lead(&mut machine, 1, "job", now);
    let sent = now + Duration::from_secs(5);
    let Some(Statement::Heartbeat(heartbeat)) = machine.next_statement(sent) else { panic!("it is due") };
    let thawed = now + Duration::from_secs(20);
    assert_eq!(machine.on_heartbeat(heartbeat, &[true], sent, thawed), Err(LossCause::Deadline));
    assert!(!term.is_held(thawed));
}

/// F-37: a request is about one term, and a message that cannot be sent in time is not sent later.
#[test]
fn requests_do_not_outlive_what_they_are_about() {
    let (mut machine, now) = machine(Options::default());
    let (term, _) = lead(&mut machine, 1, "job", now);
    let stale = Command::Stop { id: 1, term: term.number + 1, reason: Reason::SteppedDown };
    machine.on_command(stale, now);
    assert_eq!(term.reason(), None);

    let (sent, mut is_sent) = oneshot::channel();
    machine.on_command(Command::Publish(Message::StepDown(Key::of(Kind::Lease, "job")), sent), now);
    let expires = now + Duration::from_secs(10);
    assert_eq!(machine.next_alarm(), Some(expires));
    machine.on_time(expires).unwrap();
    assert_eq!(is_sent.try_recv(), Ok(false));
    assert!(!machine.wants_session());
}

/// F-37: a Locker that forbids it leads on when it is asked from outside; its own job may step down all the same.
#[test]
fn a_request_from_outside_is_ignored_where_the_options_say_so() {
    for (answers, reason) in [(true, Some(Reason::SteppedDown)), (false, None)] {
        let (mut machine, now) = machine(Options::default().answer_step_down(answers));
        let (term, _) = lead(&mut machine, 1, "job", now);
        machine.on_message(Message::StepDown(Key::of(Kind::Lease, "other")), now);
        assert_eq!(term.reason(), None);
        machine.on_message(Message::StepDown(Key::of(Kind::Lease, "job")), now);
        assert_eq!(term.reason(), reason);
        let asked = Command::Stop { id: 1, term: term.number, reason: Reason::SteppedDown };
        machine.on_command(asked, now);
        assert_eq!(term.reason(), Some(Reason::SteppedDown));
    }
}

fn call(number: u64) -> Message {
    Message::RollCall(Call { number, reply_to: "there".to_owned() })
}

fn presence(statement: Option<Statement<u32>>) -> Presence {
    match statement {
        Some(Statement::Publish(Message::Present(presence), None)) => presence,
        _ => panic!("no answer to send"),
    }
}

/// C-06: an answer tells what every candidate does when it is sent.
#[test]
fn a_roll_call_is_answered_with_what_every_candidate_does() {
    let (mut machine, now) = machine(Options::default().identity("me").answer_step_down(false));
    machine.on_message(call(1), now);
    assert_eq!(presence(machine.next_statement(now)).standings, []);

    let (term, _) = lead(&mut machine, 1, "leads", now);
    let _draining = lead(&mut machine, 2, "drains", now);
    machine.on_command(Command::Stop { id: 2, term: 2, reason: Reason::SteppedDown }, now);
    enlist(&mut machine, 3, "stands by", now);
    let asked = batch(&mut machine, now);
    answer(&mut machine, asked, vec![BUSY], now);
    enlist(&mut machine, 4, "ineligible", now);
    machine.on_command(Command::Rest(4), now);
    machine.on_message(call(2), now);
    let later = now + Duration::from_millis(300);
    let answered = presence(machine.next_statement(later));
    assert_eq!((answered.identity.as_str(), answered.steps_down, answered.part), ("me", false, (1, 1)));
    assert_eq!(answered.call, Call { number: 2, reply_to: "there".to_owned() });
    let held = Some(later - now);
    let told: Vec<_> =
        answered.standings.iter().map(|it| (it.name.as_str(), it.role, it.term, it.held_for)).collect();
    let expected = [
        ("leads", Role::Leading, Some(term.number), held),
        ("drains", Role::Draining, Some(2), held),
        ("stands by", Role::Standby, None, None),
        ("ineligible", Role::Ineligible, None, None),
    ];
    assert_eq!(told, expected);
}

/// C-06: what keeps the leases comes first, our own errands next; and an answer that nobody waits for is not sent.
#[test]
fn an_answer_delays_neither_heartbeats_nor_exchanges_and_expires() {
    let (mut machine, now) = machine(Options::default());
    lead(&mut machine, 1, "job", now);
    let beat = now + Duration::from_secs(5);
    machine.on_message(call(1), beat);
    assert!(!machine.wants_session(), "nobody connects only to answer");
    let (sent, _is_sent) = oneshot::channel();
    machine.on_command(Command::Publish(Message::StepDown(Key::of(Kind::Lease, "other")), sent), beat);
    enlist(&mut machine, 2, "other job", beat);
    let Some(Statement::Heartbeat(heartbeat)) = machine.next_statement(beat) else { panic!("it is due") };
    machine.on_heartbeat(heartbeat, &[true], beat, beat).unwrap();
    let asked = batch(&mut machine, beat);
    answer(&mut machine, asked, vec![BUSY], beat);
    assert!(matches!(machine.next_statement(beat), Some(Statement::Publish(Message::StepDown(_), Some(_)))));
    assert_eq!(presence(machine.next_statement(beat)).call.number, 1);

    machine.on_message(call(2), beat);
    let late = beat + ANSWER_LIMIT;
    assert_eq!(machine.next_alarm(), Some(late));
    machine.on_time(late).unwrap();
    assert!(machine.next_statement(late).is_none());
    machine.on_message(call(3), beat);
    machine.on_session_lost(&LossCause::Gone, beat);
    machine.on_session(ENFORCEMENT, beat);
    batch(&mut machine, beat);
    assert!(machine.next_statement(beat).is_none(), "a question to the session before");
}

/// C-06: a flood of roll calls, and of answers that nobody asked for, is cut down to a few.
#[test]
fn a_flood_of_roll_calls_is_answered_in_part() {
    let (mut machine, now) = machine(Options::default());
    for number in (0..1_000).chain(0..1_000) {
        machine.on_message(call(number), now);
    }
    let mut count = 0;
    while let Some(statement) = machine.next_statement(now) {
        assert_eq!(presence(Some(statement)).call.number, count);
        count += 1;
    }
    assert_eq!(count, 8);

    let (heard, mut answers) = mpsc::channel(2);
    machine.on_command(Command::Listen(7, heard), now);
    machine.on_message(call(7), now);
    let answer = presence(machine.next_statement(now));
    for number in [7, 8, 7, 7] {
        let call = Call { number, reply_to: String::new() };
        machine.on_message(Message::Present(Presence { call, ..answer.clone() }), now);
    }
    assert_eq!(answers.try_recv().unwrap().call.number, 7);
    assert_eq!(answers.try_recv().unwrap().call.number, 7);
    assert!(answers.try_recv().is_err(), "what does not fit is dropped");
}

/// F-15: whoever returns after the deadline has lost, also if nobody has noticed yet.
#[test]
fn a_job_that_ends_after_its_deadline_has_lost() {
    let (mut machine, now) = machine(Options::default());
    let (term, _) = lead(&mut machine, 1, "job", now);
    let (done, mut parting) = oneshot::channel();
    let late = now + Duration::from_secs(20);
    machine.on_command(Command::Ended { id: 1, term: term.number, done }, late);
    assert_eq!(parting.try_recv(), Ok(Parting::Lost));
    let given_back = machine.batch(late).unwrap().exchange.releases;
    assert!(matches!(given_back[..], [Return { held: 7, is_clean: true, is_kept: false }]));
}

/// The grant itself was proof enough: the first heartbeat comes one interval later, however long nothing was held.
#[test]
fn the_first_lease_starts_the_heartbeats() {
    let (mut machine, now) = machine(Options::default());
    let later = now + Duration::from_secs(18);
    lead(&mut machine, 1, "job", later);
    assert!(machine.next_statement(later).is_none());
    let due = later + Duration::from_secs(5);
    assert_eq!(machine.next_statement_at(), Some(due));
    assert!(matches!(machine.next_statement(due), Some(Statement::Heartbeat(_))));
}

/// D07, D19: a job that does not stop is not waited for in silence, nor more often than now and then.
#[test]
fn a_job_that_goes_on_is_complained_of_now_and_then() {
    let (mut machine, now) = machine(Options::default());
    lead(&mut machine, 1, "job", now);
    machine.stop_all(&Reason::Closed, now);
    for n in 1..4 {
        let due = now + REMINDER * n;
        assert!(machine.on_answer(due, true, due).is_ok());
        assert_eq!(machine.next_alarm(), Some(due));
        machine.on_time(due).unwrap();
        assert_eq!(machine.next_alarm(), Some(due + REMINDER));
    }
}

/// F-30: the store says that it pushes no releases any more.
#[test]
fn a_lost_registration_is_renewed_at_once() {
    let (mut machine, now) = machine(Options::default());
    enlist(&mut machine, 1, "job", now);
    let asked = batch(&mut machine, now);
    answer(&mut machine, asked, vec![BUSY], now);
    assert!(machine.next_statement(now).is_none());
    machine.on_unregistered(Key::of(Kind::Lease, "job"), now);
    assert!(batch(&mut machine, now).exchange.asks[0].register);
}

/// F-39: a release that somebody else was quicker to take spares no delay, registered or not.
#[test]
fn a_release_that_was_missed_is_not_a_clean_end() {
    let (mut machine, now) = machine(Options::default().takeover_delay(Duration::from_secs(9)));
    let (_, state) = enlist(&mut machine, 1, "job", now);
    let asked = batch(&mut machine, now);
    answer(&mut machine, asked, vec![BUSY], now);
    machine.on_freed(freed(), now);
    let asked = batch(&mut machine, now);
    answer(&mut machine, asked, vec![Answer::Busy { registered: false }], now);
    let asked = batch(&mut machine, now);
    answer(&mut machine, asked, vec![Answer::Granted(7)], now);
    assert_eq!(state.get(), State::Blocked);
}

/// T-02, T-03: a term that may not begin is held and kept alive; it is tried again after 5 ms, then ever more seldom; after
/// three times the store is asked why; and its job starts when it may.
#[cfg(feature = "postgres")]
#[test]
fn a_term_waits_for_what_earlier_ones_have_fenced() {
    let (mut machine, mut now) = machine(Options::default());
    let (mut grants, state) = enlist(&mut machine, 1, "job", now);
    let asked = batch(&mut machine, now);
    assert!(asked.exchange.asks[0].is_fenced);
    answer(&mut machine, asked, vec![Answer::Fenced(7, None)], now);
    assert_eq!(state.get(), State::Blocked);
    let mut pauses = Vec::new();
    let mut questions = Vec::new();
    for _ in 0..8 {
        assert!(machine.next_statement(now).is_none());
        let due = machine.next_statement_at().unwrap();
        pauses.push((due - now).as_millis());
        now = due;
        let Some(Statement::Pass(passage)) = machine.next_statement(now) else { panic!("not asked") };
        assert_eq!(passage.held, [7]);
        machine.on_passed(passage, vec![None], now, now).unwrap();
        questions.push(match machine.next_statement(now) {
            Some(Statement::Blockers(passage, None)) => {
                machine.on_blockers(&passage, None, vec![None], now, now).unwrap();
                true
            }
            _ => false,
        });
    }
    assert_eq!(pauses, [5, 10, 20, 40, 80, 160, 250, 250]);
    assert_eq!(questions, [false, true, false, false, true, false, false, false]);
    assert!(grants.try_recv().is_err());
    now = machine.next_statement_at().unwrap();
    let Some(Statement::Pass(passage)) = machine.next_statement(now) else { panic!("not asked") };
    machine.on_passed(passage, vec![Some(Fence::example())], now, now).unwrap();
    machine.on_time(now).unwrap();
    let term = grants.try_recv().unwrap().unwrap();
    assert_eq!(term.fence.get(), Some(&Fence::example()));
    assert!(matches!(state.get(), State::Leading { .. }));
}

/// T-02: one that is told to stop, or leaves, before it may begin gives its lease back, and not as after a clean end.
#[cfg(feature = "postgres")]
#[test]
fn a_term_that_has_not_begun_is_given_back_when_it_is_told_to_stop() {
    for leaves in [true, false] {
        let (mut machine, now) = machine(Options::default());
        let (mut grants, _state) = enlist(&mut machine, 1, "job", now);
        let asked = batch(&mut machine, now);
        answer(&mut machine, asked, vec![Answer::Fenced(7, None)], now);
        let later = machine.next_statement_at().unwrap();
        let Some(Statement::Pass(passage)) = machine.next_statement(later) else { panic!("not asked") };
        if leaves {
            machine.on_command(Command::Leave(1, None), later);
        } else {
            machine.on_message(Message::StepDown(Key::of(Kind::Lease, "job")), later);
        }
        // It was too late.
        machine.on_passed(passage, vec![Some(Fence::example())], later, later).unwrap();
        machine.on_time(later).unwrap();
        let released = batch(&mut machine, later).exchange.releases;
        assert_eq!((released.len(), released[0].is_clean), (1, false));
        assert!(grants.try_recv().is_err());
    }
}

/// T-03: the takeover delay and the transactions of earlier terms are waited for together.
#[cfg(feature = "postgres")]
#[test]
fn a_term_begins_after_the_takeover_delay_and_after_what_was_fenced() {
    let delay = Duration::from_secs(9);
    for passes_first in [true, false] {
        let (mut machine, now) = machine(Options::default().takeover_delay(delay));
        let (mut grants, _state) = enlist(&mut machine, 1, "job", now);
        let asked = batch(&mut machine, now);
        answer(&mut machine, asked, vec![Answer::Fenced(7, None)], now);
        let passes_at = if passes_first { now + Duration::from_secs(1) } else { now + 2 * delay };
        machine.on_time(now + delay - Duration::from_millis(1)).unwrap();
        if !passes_first {
            machine.on_time(now + delay).unwrap();
            assert!(grants.try_recv().is_err());
        }
        let Some(Statement::Pass(passage)) = machine.next_statement(passes_at.min(now + delay / 2)) else {
            panic!("not asked")
        };
        machine.on_passed(passage, vec![Some(Fence::example())], now, now).unwrap();
        machine.on_time(now + delay - Duration::from_millis(1)).unwrap();
        assert!(grants.try_recv().is_err());
        machine.on_time(now + delay).unwrap();
        assert!(grants.try_recv().is_ok());
    }
}
