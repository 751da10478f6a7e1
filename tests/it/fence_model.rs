//! A model of the protocol by which a fenced transaction commits in its own term or not at all, searched exhaustively.
//!
//! # The protocol
//!
//! The keys of a name are advisory locks: `K` (the lease), `B` (the barrier), and one `T` for each term.
//!
//! * **To start a term**, in one statement: take `K`; take `B` alone, by try; see in the lock table that no other session
//!   has a term key of this name; drop `B`; take a new `T`. Where `B` is refused, or a term key is seen, `K` is kept, and
//!   it goes on from `B` a little later.
//! * **To fence**, in the user's transaction, on any connection: try `T` shared, and where that is granted the term is
//!   over; take `B` shared, by try, and where that is refused it is over; try `T` once more. Over is an error, so that the
//!   transaction cannot commit. `B` is freed after the commit.
//! * **To release**: free `T`, then `K`. What an error has left is given back in the same order.
//! * **Of a `RwLock`** readers hold `K` shared. Fences of writers take the barrier `Bw`, those of readers `Br`. A new writer
//!   passes both, and looks for all term keys; a new reader passes `Bw`, and `Br` shared, and looks for the term keys of
//!   writers.
//!
//! # What must not happen
//!
//! * A fenced transaction commits when the job of a newer term that excludes its own has started.
//! * A fence is told that its term is over, while the session of that term lives and holds it.
//! * A candidate is stuck: although everybody else is frozen or cut off for good, and the server has ended their sessions
//!   and transactions at its limits, it never gets to start a term, whatever it does. Neither does a reader, while
//!   another one reads.
//!
//! # What is modelled
//!
//! A step is one operation on one lock, so those of two statements come in any order; the look is one step for each term
//! key. PostgreSQL's own look is one instant, for it holds all partitions of its lock table meanwhile: nothing is lost by
//! looking slower. All that takes a lock is by try, and a try is one instant there.
//!
//! Any step may come next, after any time, or never: that is how a frozen process, its thaw, and a slow network are
//! modelled. A session may die at any instant, with its client or without it, in the middle of a statement or not; its
//! statement may have gone on when its client was gone. What it held is freed one key at a time, in any order, at any time:
//! its backend may linger. Answers arrive late, also when their session is dead and a successor leads, or never; then a job
//! starts that is over. A job goes on to fence for ever, dead or alive. A statement may end with an error after any of its
//! operations: what it took stays, and the session asks again or first gives that back. Fenced transactions may be
//! prepared, and the server may crash and be restarted.
//!
//! A candidate that gives its session up and connects anew is one more session, so what is bounded are the sessions that
//! live at a time. Sessions are alike, and so are transactions: states that differ only by who is who are one.
//!
//! # What is not
//!
//! Time: no step is owed to another in time, so nothing here rests on clocks. Names: there is one, and term keys never
//! collide, but for [`Change::SameNumber`]. Several guards of one `RwLock` on one session. Queues for a lock, of which
//! there are none. Replication and failover: another server has another lock table. A fence that was caught by a savepoint.
//!
//! # How many states
//!
//! | who | sessions | terms | transactions at a time | states | steps |
//! |---|---|---|---|---|---|
//! | one at a time | 3 | 4 | 2 | 37,728 | 387,140 |
//! | two that read or write | 2 | 2 | 1 | 133,850 | 1,321,697 |
//! | three that read or write, [coarser](Design::is_coarse) | 3 | 3 | 1 | 144,431 | 1,496,283 |
//!
//! Of transactions, one at a time is no loss: another one can only be in the way of those who start.
//!
//! # Why a search of our own
//!
//! It is some hundred lines. stateright 0.31 brings 38 packages, an HTTP server among them; it tells states apart by a
//! hash of 64 bits only, and does not look for states out of which there is no way.

mod design;
mod keys;
mod protocol;
mod search;
mod step;

use design::{Change, Design};
use protocol::Fault;
use search::{Found, search};
use step::Kind;

const FAULTS: &[Fault] = &[Fault::LateCommit, Fault::LivingTermRefused];

/// Searches all states, and finds nothing wrong.
fn holds(what: &str, design: Design) -> Found {
    let found = search(design, FAULTS);
    println!("{what}: {} states, {} steps", found.states, found.taken.values().sum::<usize>());
    if let Some((fault, trace)) = &found.fault {
        panic!("{what}: {fault:?}\n{trace}");
    }
    if let Some(trace) = &found.stuck {
        panic!("{what}: a candidate is stuck\n{trace}");
    }
    found
}

/// The model is not empty: every kind of step was taken.
fn takes_every_kind_of_step(found: &Found, without: &[Kind]) {
    for kind in Kind::ALL {
        let is_expected = !without.contains(&kind);
        assert_eq!(found.taken.contains_key(&kind), is_expected, "{kind:?}: {:?}", found.taken);
    }
}

/// Finds the one fault, and prints a shortest way to it.
fn fails(what: &str, design: Design, fault: Fault) {
    let found = search(design, &[fault]);
    let (_, trace) = found.fault.unwrap_or_else(|| panic!("{what}: no {fault:?} in {} states", found.states));
    println!("{what}: {fault:?} after {} states\n{trace}", found.states);
}

/// Finds nobody who commits too late, but a candidate who never gets to start.
fn gets_stuck(what: &str, design: Design) {
    let found = search(design, FAULTS);
    assert_eq!(found.fault, None, "{what}");
    let trace = found.stuck.unwrap_or_else(|| panic!("{what}: nobody is stuck in {} states", found.states));
    println!("{what}: a candidate is stuck\n{trace}");
}

/// T-05: three candidates, four terms, any number of fenced transactions, two at a time.
#[test]
fn a_fenced_transaction_commits_in_its_term_or_not_at_all() {
    let found = holds("one at a time", Design::EXCLUSIVE);
    assert_eq!(found.states, 37_728);
    takes_every_kind_of_step(&found, &[]);
}

/// T-05: three sessions that read or write, three terms; fenced transactions one at a time.
#[test]
fn a_fenced_section_of_three_commits_before_one_that_it_excludes() {
    let found = holds("three that read or write", Design::THREE_READERS_OR_WRITERS);
    assert_eq!(found.states, 144_431);
    takes_every_kind_of_step(&found, &Kind::FINE);
}

/// T-05: two sessions that read or write, two terms, every kind of step.
#[test]
fn a_fenced_section_of_two_commits_before_one_that_it_excludes() {
    let found = holds("two that read or write", Design::TWO_READERS_OR_WRITERS);
    assert_eq!(found.states, 133_850);
    takes_every_kind_of_step(&found, &[]);
}

/// T-05: the twins. Whatever part is taken away, the search finds how it goes wrong.
///
/// What each is for: the barrier, for transactions that were fenced in time; the look, for backends that die slowly; `T`
/// before `K`, for releases that end with an error in between, since the look leaves out what the own session has (where it
/// does not, a candidate is stuck: see below); the second try, for terms that end within the fence.
#[test]
fn without_any_part_of_the_protocol_a_late_commit_is_found() {
    for change in [
        Change::NoBarrier,
        Change::NoLook,
        Change::LeaseKeyFirst,
        Change::LookAfterBarrier,
        Change::TermKeyTriedFirstOnly,
        Change::TermKeyNotTried,
        Change::OverIsSaid,
        Change::SameNumber,
        Change::GrantedByLeaseKey,
    ] {
        fails(&format!("{change:?}"), Design::EXCLUSIVE.with(change), Fault::LateCommit);
    }
    let sections = Design::THREE_READERS_OR_WRITERS;
    for change in [Change::NoBarrier, Change::NoLook, Change::ReaderPassesNone, Change::WriterPassesOne] {
        fails(&format!("{change:?}, with readers"), sections.with(change), Fault::LateCommit);
    }
    let sections = Design::TWO_READERS_OR_WRITERS;
    fails("LeaseKeyFirst, with readers", sections.with(Change::LeaseKeyFirst), Fault::LateCommit);
}

/// T-05: what is relied on of the server is needed.
#[test]
fn where_the_server_does_not_keep_its_word_a_late_commit_is_found() {
    for change in [Change::UnlockBeforeCommit, Change::PreparedForgotten] {
        fails(&format!("{change:?}"), Design::EXCLUSIVE.with(change), Fault::LateCommit);
    }
}

/// T-05: a writer that died while it started may hold `Br` still, when a reader has got `K`.
#[test]
fn where_readers_do_not_pass_their_own_barrier_a_living_one_is_refused() {
    let design = Design::THREE_READERS_OR_WRITERS.with(Change::ReaderPassesOne);
    fails("ReaderPassesOne", design, Fault::LivingTermRefused);
}

/// T-05: the ways in which a candidate never gets to start are found.
#[test]
fn where_leftovers_stay_a_candidate_is_stuck() {
    gets_stuck("NothingReconciled", Design::EXCLUSIVE.with(Change::NothingReconciled));
    let own = Design::EXCLUSIVE.with(Change::LookAtOwn);
    gets_stuck("LookAtOwn and LeaseKeyFirst", own.with(Change::LeaseKeyFirst));
    let readers = Design::TWO_READERS_OR_WRITERS.with(Change::ReaderLooksAtReaders);
    gets_stuck("ReaderLooksAtReaders", readers);
}

/// T-05: what could be otherwise. The first try of the term key only spares the barrier those who are over; the look may
/// come before the barrier; the barrier may belong to the starting statement, so that no error leaves it behind.
#[test]
fn what_the_protocol_could_do_otherwise() {
    for change in [
        Change::TermKeyTriedLastOnly,
        Change::LookBeforeBarrier,
        Change::LookAtOwn,
        Change::TermKeyBeforeLook,
        Change::BarrierOfStatement,
    ] {
        holds(&format!("{change:?}"), Design::EXCLUSIVE.with(change));
    }
}
