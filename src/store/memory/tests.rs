//! The injectors, each by itself, and the rules that they break, at exact times of a paused clock.

use std::cell::Cell;

use tokio::time::{Instant, timeout};

use super::server::Held;
use super::session::MemorySession;
use super::*;
use crate::clock;
use crate::error::{ConnectError, LossCause};
use crate::store::{Answer, Ask, Event, Exchange, Exchanged, Message, Mode, Return, Session, Store};

const TTL: Duration = Duration::from_secs(10);
const MS: Duration = Duration::from_millis(1);

async fn connect(memory: &Memory, identity: &str) -> MemorySession {
    memory.store(identity, TTL).connect().await.unwrap()
}

fn ask(name: &str) -> Ask {
    let key = Key::of(Kind::Lease, name);
    Ask {
        key,
        name: name.into(),
        mode: Mode::Exclusive,
        ttl: TTL,
        kind: Kind::Lease,
        waits: true,
        is_fenced: false,
        register: false,
    }
}

fn shared(name: &str) -> Ask {
    Ask { mode: Mode::Read, ..ask(name) }
}

fn registering(name: &str) -> Ask {
    Ask { register: true, ..ask(name) }
}

fn asking(asks: impl IntoIterator<Item = Ask>) -> Exchange<Held> {
    Exchange { releases: vec![], withdrawals: vec![], asks: asks.into_iter().collect() }
}

fn clean(held: Held) -> Return<Held> {
    Return { held, is_clean: true, is_kept: false }
}

fn releasing(held: &Held) -> Exchange<Held> {
    Exchange { releases: vec![clean(held.clone())], withdrawals: vec![], asks: vec![] }
}

fn only(answered: Exchanged<Held>) -> Option<Held> {
    let [answer] = <[_; 1]>::try_from(answered.answers).unwrap();
    match answer {
        Answer::Granted(held) => Some(held),
        Answer::Busy { .. } => None,
        Answer::Failed(reason) => panic!("{reason}"),
        Answer::Fenced(..) => panic!("it has no transactions"),
    }
}

async fn try_take(session: &mut MemorySession, ask: Ask) -> Option<Held> {
    only(session.exchange(&asking([ask])).await.unwrap())
}

async fn take(session: &mut MemorySession, name: &str) -> Held {
    try_take(session, ask(name)).await.expect("free")
}

async fn release(session: &mut MemorySession, held: &Held) -> bool {
    session.exchange(&releasing(held)).await.unwrap().released == [true]
}

/// What is there by now: polls once.
async fn glance<T>(future: impl Future<Output = T>) -> Option<T> {
    let mut future = pin!(future);
    poll_fn(|context| match future.as_mut().poll(context) {
        Poll::Ready(value) => Poll::Ready(Some(value)),
        Poll::Pending => Poll::Ready(None),
    })
    .await
}

/// Polls a statement or a connect until it is sent, and then drops it.
async fn send_and_forget<T>(future: impl Future<Output = T>) {
    assert!(timeout(MS, future).await.is_err(), "still under way");
}

fn is_closed_with(event: Option<Event>, expected: Option<&str>) -> bool {
    matches!(event, Some(Event::Closed(LossCause::Closed { sqlstate, .. })) if sqlstate.as_deref() == expected)
}

fn is_freed(event: Option<&Event>, name: &str) -> bool {
    matches!(event, Some(Event::Freed(freed)) if freed.key == Key::of(Kind::Lease, name))
}

fn holders(memory: &Memory) -> Vec<String> {
    memory.holders(&"x".into())
}

async fn until(at: Instant) {
    clock::sleep_until(at).await;
    assert_eq!(clock::now(), at);
}

#[tokio::test(start_paused = true)]
async fn one_session_at_a_time_holds_a_key_and_never_twice() {
    let memory = Memory::new();
    let (mut a, mut b) = (connect(&memory, "a").await, connect(&memory, "b").await);
    let held = take(&mut a, "x").await;
    assert_eq!(try_take(&mut b, ask("x")).await, None);
    assert_eq!(try_take(&mut a, ask("x")).await, None, "not twice");
    assert_eq!((holders(&memory), memory.grants(&"x".into())), (vec!["a".to_owned()], 1));
    assert!(release(&mut a, &held).await);
    take(&mut b, "x").await;
    assert_eq!((holders(&memory), memory.grants(&"x".into())), (vec!["b".to_owned()], 2));
    assert_eq!((memory.statements("a"), memory.statements("b"), memory.statements("?")), (3, 2, 0));
}

#[tokio::test(start_paused = true)]
async fn a_batch_releases_before_it_asks_and_answers_in_order() {
    let memory = Memory::new();
    let mut a = connect(&memory, "a").await;
    let held = take(&mut a, "x").await;
    let batch = Exchange {
        releases: vec![clean(held)],
        withdrawals: vec![],
        asks: vec![ask("x"), ask("x"), ask("y")],
    };
    let Exchanged { released, answers } = a.exchange(&batch).await.unwrap();
    assert_eq!(released, [true]);
    assert!(
        matches!(answers[..], [Answer::Granted(_), Answer::Busy { .. }, Answer::Granted(_)]),
        "{answers:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_stale_proof_neither_releases_nor_confirms_a_newer_grant() {
    for memory in [Memory::new(), Memory::expiring()] {
        let mut a = connect(&memory, "a").await;
        let old = take(&mut a, "x").await;
        assert!(release(&mut a, &old).await);
        let new = take(&mut a, "x").await;
        assert!(!release(&mut a, &old).await);
        assert_eq!(a.heartbeat(&[old, new]).await, Ok(vec![false, true]));
        assert_eq!(holders(&memory), ["a"]);
    }
}

#[tokio::test(start_paused = true)]
async fn readers_share_and_keep_a_writer_out_until_the_last_is_gone() {
    for memory in [Memory::new(), Memory::expiring()] {
        let (mut a, mut b, mut c) =
            (connect(&memory, "a").await, connect(&memory, "b").await, connect(&memory, "c").await);
        let first = try_take(&mut a, shared("x")).await.unwrap();
        let second = try_take(&mut b, shared("x")).await.unwrap();
        // Each reader of a session has a grant of its own.
        let third = try_take(&mut a, shared("x")).await.unwrap();
        for held in [first, third] {
            assert_eq!(try_take(&mut c, ask("x")).await, None);
            assert!(release(&mut a, &held).await);
        }
        assert_eq!(try_take(&mut c, ask("x")).await, None);
        assert!(release(&mut b, &second).await);
        take(&mut c, "x").await;
        assert_eq!(try_take(&mut a, shared("x")).await, None);
    }
}

#[tokio::test(start_paused = true)]
async fn a_release_is_pushed_once_and_only_to_the_others_that_wait() {
    let memory = Memory::new();
    let (mut a, mut b, mut c) =
        (connect(&memory, "a").await, connect(&memory, "b").await, connect(&memory, "c").await);
    let held = take(&mut a, "x").await;
    let other = take(&mut a, "y").await;
    let busy = b.exchange(&asking([registering("x")])).await.unwrap();
    assert!(matches!(busy.answers[..], [Answer::Busy { registered: true }]), "{busy:?}");
    let busy = c.exchange(&asking([ask("x")])).await.unwrap();
    assert!(matches!(busy.answers[..], [Answer::Busy { registered: false }]), "{busy:?}");
    assert_eq!(try_take(&mut a, registering("x")).await, None, "the releaser itself waits too");
    assert_eq!(memory.waiters(&"x".into()), 2);

    assert!(release(&mut a, &other).await);
    assert!(glance(b.event()).await.is_none(), "another key");
    assert!(release(&mut a, &held).await);
    assert!(holders(&memory).is_empty(), "released before it is pushed");
    assert!(is_freed(glance(b.event()).await.as_ref(), "x"));
    assert!(glance(b.event()).await.is_none(), "once");
    assert!(glance(c.event()).await.is_none() && glance(a.event()).await.is_none());
    assert!(!release(&mut a, &held).await);
    assert!(glance(b.event()).await.is_none(), "nothing was released");
}

#[tokio::test(start_paused = true)]
async fn waiting_ends_with_the_grant_the_withdrawal_or_the_session() {
    let memory = Memory::new();
    let waiters = || memory.waiters(&"x".into());
    let (mut a, mut b) = (connect(&memory, "a").await, connect(&memory, "b").await);
    let held = try_take(&mut a, registering("x")).await.unwrap();
    assert_eq!(waiters(), 0, "granted");
    try_take(&mut b, registering("x")).await;
    assert_eq!(waiters(), 1);
    let withdraw = Exchange { releases: vec![], withdrawals: vec![ask("x").key], asks: vec![] };
    b.exchange(&withdraw).await.unwrap();
    assert_eq!(waiters(), 0, "withdrawn");
    assert!(release(&mut a, &held).await);
    assert!(glance(b.event()).await.is_none());
    take(&mut a, "x").await;
    try_take(&mut b, registering("x")).await;
    drop(b);
    assert_eq!(waiters(), 0, "over");
}

#[tokio::test(start_paused = true)]
async fn a_push_wakes_who_waits_for_it_and_a_dropped_event_future_loses_none() {
    let memory = Memory::new();
    let (mut a, mut b) = (connect(&memory, "a").await, connect(&memory, "b").await);
    let held = take(&mut a, "x").await;
    try_take(&mut b, registering("x")).await;
    for _ in 0..3 {
        assert!(glance(b.event()).await.is_none());
    }
    let start = clock::now();
    let (event, released) = tokio::join!(b.event(), release(&mut a, &held));
    assert!(released && is_freed(Some(&event), "x"));
    assert_eq!(clock::now(), start);
}

#[tokio::test(start_paused = true)]
async fn messages_reach_every_session_the_senders_own_included() {
    let memory = Memory::new();
    let (mut a, mut b) = (connect(&memory, "a").await, connect(&memory, "b").await);
    let message = Message::StepDown(ask("x").key);
    a.publish(message.clone()).await.unwrap();
    for session in [&mut a, &mut b] {
        assert!(matches!(glance(session.event()).await, Some(Event::Message(m)) if m == message));
        assert!(glance(session.event()).await.is_none());
    }
}

#[tokio::test(start_paused = true)]
async fn a_graceful_end_releases_and_wakes_and_a_hard_one_only_frees() {
    let memory = Memory::new();
    let mut b = connect(&memory, "b").await;
    for graceful in [true, false] {
        let mut a = connect(&memory, "a").await;
        take(&mut a, "x").await;
        try_take(&mut b, registering("x")).await;
        if graceful {
            a.end().await;
        } else {
            drop(a);
        }
        assert!(holders(&memory).is_empty());
        assert_eq!((memory.sessions(), memory.connections("a"), memory.connections("b")), (1, 0, 1));
        assert_eq!(is_freed(glance(b.event()).await.as_ref(), "x"), graceful);
    }
}

#[tokio::test(start_paused = true)]
async fn a_kill_frees_at_once_tells_the_client_and_wakes_nobody() {
    let memory = Memory::new();
    let (mut a, mut b) = (connect(&memory, "a").await, connect(&memory, "b").await);
    take(&mut a, "x").await;
    try_take(&mut b, registering("x")).await;
    memory.kill("nobody");
    memory.kill("a");
    assert!(holders(&memory).is_empty());
    assert_eq!((memory.sessions(), memory.connections("a")), (1, 0));
    assert!(is_closed_with(glance(a.event()).await, Some("57P01")));
    assert!(is_closed_with(glance(a.event()).await, Some("57P01")), "it stays closed");
    assert!(matches!(a.heartbeat(&[]).await, Err(LossCause::Closed { .. })));
    assert!(glance(b.event()).await.is_none());
}

#[tokio::test(start_paused = true)]
async fn a_kill_fails_the_statement_under_way_and_it_is_not_carried_out() {
    let memory = Memory::new();
    let mut a = connect(&memory, "a").await;
    memory.slow("a", 100 * MS, Duration::ZERO);
    let start = clock::now();
    let killer = async {
        until(start + 30 * MS).await;
        memory.kill("a");
    };
    let asked = asking([ask("x")]);
    let (answer, ()) = tokio::join!(a.exchange(&asked), killer);
    assert!(matches!(answer, Err(LossCause::Closed { .. })), "{answer:?}");
    assert_eq!(clock::now(), start + 30 * MS);
    until(start + 200 * MS).await;
    assert_eq!((memory.statements("a"), memory.grants(&"x".into())), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_partition_hides_a_kill_until_it_heals() {
    let memory = Memory::new();
    let mut a = connect(&memory, "a").await;
    take(&mut a, "x").await;
    memory.partition("a");
    memory.kill("a");
    assert!(holders(&memory).is_empty(), "free at once on the server");
    assert!(timeout(3600 * TTL, a.event()).await.is_err());
    memory.heal("a");
    assert!(is_closed_with(glance(a.event()).await, Some("57P01")));
}

#[tokio::test(start_paused = true)]
async fn what_arrived_before_a_partition_is_read_during_it_and_the_rest_after_it() {
    let memory = Memory::new();
    let (mut a, mut b) = (connect(&memory, "a").await, connect(&memory, "b").await);
    let (before, during) = (Message::StepDown(ask("x").key), Message::StepDown(ask("y").key));
    b.publish(before.clone()).await.unwrap();
    memory.partition("a");
    memory.partition("a");
    b.publish(during.clone()).await.unwrap();
    assert!(matches!(glance(a.event()).await, Some(Event::Message(m)) if m == before));
    assert!(glance(a.event()).await.is_none());
    memory.heal("a");
    assert!(matches!(glance(a.event()).await, Some(Event::Message(m)) if m == during));
    assert!(glance(a.event()).await.is_none());
    memory.heal("a");
}

#[tokio::test(start_paused = true)]
async fn an_ask_sent_in_a_partition_is_granted_after_it_though_nobody_waits() {
    let memory = Memory::new();
    let mut a = connect(&memory, "a").await;
    memory.partition("a");
    send_and_forget(a.exchange(&asking([ask("x")]))).await;
    assert_eq!((holders(&memory), memory.statements("a")), (vec![], 0));
    memory.heal("a");
    tokio::time::sleep(MS).await;
    assert_eq!((holders(&memory), memory.statements("a")), (vec!["a".to_owned()], 1), "a late grant");
    drop(a);
    assert!(holders(&memory).is_empty());
}

#[tokio::test(start_paused = true)]
async fn an_answer_is_held_back_by_a_partition_too() {
    let memory = Memory::new();
    let mut a = connect(&memory, "a").await;
    memory.slow("a", MS, 2 * MS);
    let start = clock::now();
    let breaker = async {
        until(start + 2 * MS).await;
        memory.partition("a");
        assert_eq!(holders(&memory), ["a"], "carried out");
        until(start + 500 * MS).await;
        memory.heal("a");
    };
    let asked = asking([ask("x")]);
    let (answer, ()) = tokio::join!(a.exchange(&asked), breaker);
    assert!(only(answer.unwrap()).is_some());
    assert_eq!(clock::now(), start + 500 * MS);
}

#[tokio::test(start_paused = true)]
async fn a_session_dropped_behind_a_partition_is_open_on_the_server_until_it_heals() {
    let memory = Memory::new();
    let mut a = connect(&memory, "a").await;
    take(&mut a, "x").await;
    memory.partition("a");
    send_and_forget(a.exchange(&asking([ask("y")]))).await;
    drop(a);
    assert_eq!((memory.connections("a"), holders(&memory)), (1, vec!["a".to_owned()]));
    memory.heal("a");
    assert_eq!((memory.connections("a"), holders(&memory)), (0, vec![]));
    tokio::time::sleep(MS).await;
    assert_eq!(memory.grants(&"y".into()), 0, "the statement under way came after the close");
}

#[tokio::test(start_paused = true)]
async fn a_statement_under_way_is_not_carried_out_once_the_session_was_dropped() {
    let memory = Memory::new();
    let mut a = connect(&memory, "a").await;
    memory.slow("a", 100 * MS, Duration::ZERO);
    send_and_forget(a.exchange(&asking([ask("x")]))).await;
    drop(a);
    tokio::time::sleep(200 * MS).await;
    assert_eq!(memory.grants(&"x".into()), 0);
}

#[tokio::test(start_paused = true)]
async fn a_statement_dropped_before_it_was_sent_is_not_carried_out() {
    let memory = Memory::new();
    let mut a = connect(&memory, "a").await;
    assert!(glance(a.exchange(&asking([ask("x")]))).await.is_none());
    tokio::time::sleep(MS).await;
    assert_eq!(memory.statements("a"), 0);
}

#[tokio::test(start_paused = true)]
async fn statements_of_one_session_are_carried_out_in_order() {
    let memory = Memory::new();
    let mut a = connect(&memory, "a").await;
    memory.slow("a", 100 * MS, Duration::ZERO);
    send_and_forget(a.exchange(&asking([ask("x")]))).await;
    memory.slow("a", Duration::ZERO, Duration::ZERO);
    assert_eq!(try_take(&mut a, ask("x")).await, None, "the slow one came first");
    assert_eq!((memory.grants(&"x".into()), memory.statements("a")), (1, 2));
}

#[tokio::test(start_paused = true)]
async fn a_silent_session_ends_exactly_one_ttl_after_its_last_finished_statement() {
    let memory = Memory::new();
    let mut a = connect(&memory, "a").await;
    let start = clock::now();
    take(&mut a, "x").await;
    until(start + 3 * MS).await;
    memory.slow("a", 4 * MS, 5 * MS);
    a.heartbeat(&[]).await.unwrap();
    let finished = start + 7 * MS;
    until(finished + TTL - MS).await;
    assert_eq!((holders(&memory), memory.sessions()), (vec!["a".to_owned()], 1));
    until(finished + TTL).await;
    assert_eq!((holders(&memory), memory.sessions()), (vec![], 0));
    assert!(is_closed_with(glance(a.event()).await, Some("57P05")));
}

#[tokio::test(start_paused = true)]
async fn the_client_hears_of_the_idle_limit_when_it_waits_and_nobody_else_looks() {
    let memory = Memory::new();
    let mut a = connect(&memory, "a").await;
    let start = clock::now();
    assert!(is_closed_with(Some(a.event().await), Some("57P05")));
    assert_eq!(clock::now(), start + TTL);

    let mut a = connect(&memory, "a").await;
    memory.slow("a", 2 * TTL, Duration::ZERO);
    assert!(a.heartbeat(&[]).await.is_err());
    assert_eq!(clock::now(), start + 2 * TTL, "also in the middle of a statement");
}

#[tokio::test(start_paused = true)]
async fn the_idle_limit_backs_up_a_close_that_never_arrives() {
    let memory = Memory::new();
    let mut a = connect(&memory, "a").await;
    let start = clock::now();
    take(&mut a, "x").await;
    memory.partition("a");
    drop(a);
    until(start + TTL - MS).await;
    assert_eq!(holders(&memory), ["a"]);
    until(start + TTL).await;
    assert!(holders(&memory).is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_slow_statement_is_carried_out_after_the_one_time_and_answered_after_the_other() {
    let memory = Memory::new();
    let mut a = connect(&memory, "a").await;
    memory.slow("a", 30 * MS, 40 * MS);
    let start = clock::now();
    let observer = async {
        until(start + 29 * MS).await;
        assert!(holders(&memory).is_empty());
        until(start + 31 * MS).await;
        assert_eq!(holders(&memory), ["a"]);
    };
    let (_, ()) = tokio::join!(take(&mut a, "x"), observer);
    assert_eq!(clock::now(), start + 70 * MS);
    memory.slow("a", Duration::ZERO, Duration::ZERO);
    a.heartbeat(&[]).await.unwrap();
    assert_eq!(clock::now(), start + 70 * MS, "no longer slow");
}

#[tokio::test(start_paused = true)]
async fn a_frozen_process_is_not_polled_until_it_is_thawed() {
    let memory = Memory::new();
    let polls = Cell::new(0);
    let count = poll_fn(|context| {
        polls.set(polls.get() + 1);
        context.waker().wake_by_ref();
        if polls.get() == 5 { Poll::Ready(()) } else { Poll::Pending }
    });
    let mut process = pin!(memory.on("a", count));
    assert!(glance(process.as_mut()).await.is_none());
    memory.freeze("a");
    memory.freeze("b");
    for _ in 0..3 {
        assert!(glance(process.as_mut()).await.is_none());
    }
    assert_eq!(polls.get(), 1);
    let start = clock::now();
    let thaw = async {
        until(start + 50 * MS).await;
        assert_eq!(polls.get(), 1);
        memory.thaw("a");
    };
    tokio::join!(process, thaw);
    assert_eq!((polls.get(), clock::now()), (5, start + 50 * MS));
}

#[tokio::test(start_paused = true)]
async fn what_runs_on_a_process_is_dropped_with_it_frozen_or_not() {
    let memory = Memory::new();
    for (polled, frozen) in [(false, false), (true, false), (false, true), (true, true)] {
        let alive = Arc::new(());
        let inner = Arc::clone(&alive);
        let mut process = Box::pin(memory.on("a", async move {
            std::future::pending::<()>().await;
            drop(inner);
        }));
        if polled {
            assert!(glance(process.as_mut()).await.is_none());
        }
        if frozen {
            memory.freeze("a");
            assert!(glance(process.as_mut()).await.is_none());
        }
        drop(process);
        assert_eq!(Arc::strong_count(&alive), 1);
        memory.thaw("a");
    }
}

#[tokio::test(start_paused = true)]
async fn what_a_frozen_process_sent_is_carried_out_meanwhile() {
    let memory = Memory::new();
    let mut a = connect(&memory, "a").await;
    memory.slow("a", 10 * MS, Duration::ZERO);
    let start = clock::now();
    let observer = async {
        until(start + 5 * MS).await;
        memory.freeze("a");
        until(start + 20 * MS).await;
        assert_eq!(holders(&memory), ["a"]);
        until(start + 30 * MS).await;
        memory.thaw("a");
    };
    tokio::join!(memory.on("a", take(&mut a, "x")), observer);
    assert_eq!(clock::now(), start + 30 * MS);
}

#[tokio::test(start_paused = true)]
async fn a_revoked_lease_is_denied_by_the_heartbeat_and_the_others_are_not() {
    for memory in [Memory::new(), Memory::expiring()] {
        let mut a = connect(&memory, "a").await;
        let held = [take(&mut a, "x").await, take(&mut a, "y").await, take(&mut a, "z").await];
        memory.revoke("b", &"x".into());
        assert_eq!(a.heartbeat(&held).await, Ok(vec![true, true, true]));
        memory.revoke("a", &"y".into());
        assert_eq!(a.heartbeat(&held).await, Ok(vec![true, false, true]));
        memory.revoke_all("a");
        assert_eq!(a.heartbeat(&held).await, Ok(vec![false, false, false]));
        assert_eq!(memory.sessions(), 1, "the session lives");
    }
}

#[tokio::test(start_paused = true)]
async fn an_expiring_lock_goes_by_its_own_clock_and_only_its_heartbeat_restarts_it() {
    let memory = Memory::expiring();
    let mut a = connect(&memory, "a").await;
    let start = clock::now();
    let x = take(&mut a, "x").await;
    let y = try_take(&mut a, Ask { ttl: 2 * TTL, ..ask("y") }).await.unwrap();
    until(start + 5 * MS).await;
    assert_eq!(a.heartbeat(std::slice::from_ref(&x)).await, Ok(vec![true]));
    until(start + 9 * MS).await;
    a.exchange(&asking([ask("other")])).await.unwrap();

    until(start + TTL + 4 * MS).await;
    assert_eq!(holders(&memory), ["a"]);
    until(start + TTL + 5 * MS).await;
    assert!(holders(&memory).is_empty(), "the heartbeat counts, the other statement does not");
    assert_eq!(a.heartbeat(&[x, y]).await, Ok(vec![false, true]), "not revived; the other has more time");
    assert!(holders(&memory).is_empty());
    assert!(glance(a.event()).await.is_none(), "the session lives");

    until(start + 3 * TTL + 4 * MS).await;
    assert_eq!(memory.holders(&"y".into()), ["a"]);
    until(start + 3 * TTL + 5 * MS).await;
    assert!(memory.holders(&"y".into()).is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_closed_or_killed_connection_frees_no_expiring_lock_and_a_graceful_end_does() {
    for kill in [true, false] {
        let memory = Memory::expiring();
        let mut a = connect(&memory, "a").await;
        let start = clock::now();
        take(&mut a, "x").await;
        if kill {
            memory.kill("a");
        } else {
            drop(a);
        }
        assert_eq!((holders(&memory), memory.sessions()), (vec!["a".to_owned()], 0));
        let mut a = connect(&memory, "a").await;
        assert_eq!(try_take(&mut a, ask("x")).await, None, "a new session owns nothing");
        until(start + TTL).await;
        take(&mut a, "x").await;
        a.end().await;
        assert!(holders(&memory).is_empty());
    }
}

#[tokio::test(start_paused = true)]
async fn each_reader_of_an_expiring_lock_has_its_own_clock() {
    let memory = Memory::expiring();
    let (mut a, mut b) = (connect(&memory, "a").await, connect(&memory, "b").await);
    let start = clock::now();
    try_take(&mut a, shared("x")).await.unwrap();
    until(start + MS).await;
    try_take(&mut b, shared("x")).await.unwrap();
    assert_eq!(holders(&memory), ["a", "b"]);
    until(start + TTL).await;
    assert_eq!(holders(&memory), ["b"]);
    until(start + TTL + MS).await;
    assert!(holders(&memory).is_empty());
}

/// L-17: a process that stands still does not keep readers out for ever, though its session lives on.
#[tokio::test(start_paused = true)]
async fn where_keys_expire_the_intent_to_write_does_too() {
    let memory = Memory::expiring();
    let (mut reads, mut writes) = (connect(&memory, "a").await, connect(&memory, "b").await);
    let start = clock::now();
    let held = try_take(&mut reads, shared("x")).await.unwrap();
    let intent = Ask { mode: Mode::Write, ..registering("x") };
    assert_eq!(try_take(&mut writes, intent).await, None);
    assert!(release(&mut reads, &held).await);
    until(start + TTL - MS).await;
    assert_eq!(try_take(&mut reads, shared("x")).await, None);
    until(start + TTL).await;
    assert!(try_take(&mut reads, shared("x")).await.is_some());
}

#[tokio::test(start_paused = true)]
async fn lost_pushes_are_gone_for_good_but_a_close_is_told() {
    let memory = Memory::new();
    let (mut a, mut b) = (connect(&memory, "a").await, connect(&memory, "b").await);
    memory.lose_pushes("b", true);
    let held = take(&mut a, "x").await;
    try_take(&mut b, registering("x")).await;
    assert!(release(&mut a, &held).await);
    a.publish(Message::StepDown(ask("x").key)).await.unwrap();
    memory.lose_pushes("b", false);
    assert!(glance(b.event()).await.is_none());
    let held = take(&mut a, "x").await;
    assert!(release(&mut a, &held).await);
    assert!(is_freed(glance(b.event()).await.as_ref(), "x"));
    memory.lose_pushes("b", true);
    memory.kill("b");
    assert!(is_closed_with(glance(b.event()).await, Some("57P01")));
}

#[tokio::test(start_paused = true)]
async fn a_server_that_is_down_has_ended_everything_and_refuses_until_it_is_up() {
    for memory in [Memory::new(), Memory::expiring()] {
        let mut a = connect(&memory, "a").await;
        take(&mut a, "x").await;
        memory.down();
        assert!(holders(&memory).is_empty() && memory.sessions() == 0);
        assert!(is_closed_with(glance(a.event()).await, None));
        let refused = memory.store("a", TTL).connect().await;
        assert!(matches!(refused, Err(ConnectError::Unreachable { .. })), "{refused:?}");
        memory.up();
        take(&mut connect(&memory, "a").await, "x").await;
        assert_eq!(memory.grants(&"x".into()), 2);
    }
}

#[tokio::test(start_paused = true)]
async fn connecting_through_a_partition_waits_and_leaves_nothing_when_dropped() {
    let memory = Memory::new();
    memory.partition("a");
    let mut store = memory.store("a", TTL);
    assert!(timeout(TTL, store.connect()).await.is_err());
    memory.heal("a");
    tokio::time::sleep(MS).await;
    assert_eq!(memory.connections("a"), 0);

    memory.partition("a");
    let start = clock::now();
    let heal = async {
        until(start + 7 * MS).await;
        memory.heal("a");
    };
    let (session, ()) = tokio::join!(store.connect(), heal);
    assert_eq!((session.is_ok(), memory.connections("a"), clock::now()), (true, 1, start + 7 * MS));
}

#[tokio::test(start_paused = true)]
async fn a_slow_connect_takes_both_times_and_hangs_up_when_dropped_on_the_way() {
    let memory = Memory::new();
    memory.slow("a", 20 * MS, 30 * MS);
    let mut store = memory.store("a", TTL);
    let start = clock::now();
    let session = store.connect().await;
    assert_eq!((session.is_ok(), clock::now()), (true, start + 50 * MS));
    drop(session);
    {
        let mut connecting = pin!(store.connect());
        assert!(timeout(40 * MS, connecting.as_mut()).await.is_err());
        assert_eq!(memory.connections("a"), 1, "accepted, and the answer is under way");
    }
    assert_eq!(memory.connections("a"), 0);
    let killer = async {
        tokio::time::sleep(40 * MS).await;
        memory.kill("a");
    };
    let (session, ()) = tokio::join!(store.connect(), killer);
    assert!(matches!(session, Err(ConnectError::Unreachable { .. })), "{session:?}");
}

#[tokio::test(start_paused = true)]
async fn a_driver_asked_to_panic_does_so_in_its_next_statement_once() {
    let memory = Memory::new();
    memory.panic_driver("a");
    let mut a = connect(&memory, "a").await;
    let mut b = connect(&memory, "b").await;
    b.heartbeat(&[]).await.unwrap();
    let panicked = tokio::spawn(async move { a.heartbeat(&[]).await }).await;
    assert!(panicked.unwrap_err().is_panic());
    assert_eq!((memory.connections("a"), memory.statements("a")), (0, 0), "unwinding closed the session");
    connect(&memory, "a").await.heartbeat(&[]).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_clone_is_the_same_server() {
    let memory = Memory::default();
    let _a = connect(&memory.clone(), "a").await;
    assert_eq!(format!("{memory:?}"), "Memory { sessions: 1, .. }");
}

#[test]
fn futures_on_a_process_can_be_spawned() {
    fn is_send<T: Send>(_: &T) {}
    let memory = Memory::new();
    is_send(&memory.on("a", async {}));
}
