//! How answers and the store are put together, fed by hand.

use super::*;

fn seen(session: &str, holds: &[&str], waits: &[&str]) -> Seen {
    let key = |name: &&str| Key::of(Kind::Lease, name);
    Seen {
        session: session.to_owned(),
        who: Holder { identity: Some(format!("id-{session}")), ..Holder::default() },
        answers: true,
        holds: holds.iter().map(key).collect(),
        shares: waits.iter().map(|name| key(name).waiting()).collect(),
    }
}

fn presence(session: &str, part: (u32, u32), standings: &[(&str, Role)]) -> Presence {
    let standing = |(name, role): &(&str, Role)| Standing {
        name: Name::from(*name),
        role: *role,
        term: role.holds().then_some(1),
        held_for: role.holds().then_some(Duration::from_secs(1)),
    };
    Presence {
        call: Call { number: 1, reply_to: String::new() },
        session: session.to_owned(),
        identity: format!("id-{session}"),
        steps_down: true,
        part,
        standings: standings.iter().map(standing).collect(),
    }
}

fn found(seen: Vec<Seen>, answers: Vec<Presence>) -> Found {
    let mut found = Found { seen, answers: BTreeMap::new() };
    for answer in answers {
        found.add(answer);
    }
    found
}

fn who(participants: &[Participant]) -> Vec<(&str, Option<Role>)> {
    participants.iter().map(|it| (it.identity.as_deref().unwrap(), it.role)).collect()
}

/// C-06
#[test]
fn a_look_is_over_when_every_part_of_every_answer_is_there() {
    let both = || vec![seen("1", &[], &[]), seen("2", &[], &[])];
    let (one, two) = (presence("1", (1, 1), &[]), |part| presence("2", (part, 2), &[]));
    assert!(!found(both(), vec![one.clone()]).is_complete());
    assert!(!found(both(), vec![one.clone(), two(1), two(1)]).is_complete());
    assert!(found(both(), vec![two(2), one.clone(), two(1)]).is_complete());
    // Whoever is no Locker is not waited for.
    let psql = Seen { answers: false, ..seen("3", &["x"], &[]) };
    assert!(found(vec![psql, seen("1", &[], &[])], vec![one]).is_complete());
}

/// C-06: names come from the answers; what nobody answers for is shown by its key.
#[test]
fn a_holder_that_nobody_answers_for_is_shown_by_its_key() {
    let all = vec![
        seen("1", &["led"], &[]),
        seen("2", &[], &["led", "frozen"]),
        seen("3", &["frozen"], &["led"]),
        Seen { answers: false, ..seen("4", &["psql"], &[]) },
    ];
    let answers = vec![
        presence("1", (1, 1), &[("led", Role::Leading)]),
        presence("2", (1, 1), &[("led", Role::Standby), ("frozen", Role::Standby)]),
    ];
    let found = found(all, answers);
    assert!(found.agrees());
    let snapshot = found.snapshot();
    let names: Vec<_> = snapshot.elections.iter().map(|it| it.name.as_ref().map(Name::as_str)).collect();
    assert_eq!(names, [Some("frozen"), Some("led"), None]);
    let [frozen, led, psql] = snapshot.elections.as_slice() else { panic!("{snapshot:?}") };
    assert_eq!(who(frozen.leader.as_slice()), [("id-3", None)]);
    assert_eq!(who(&frozen.standbys), [("id-2", Some(Role::Standby))]);
    assert_eq!(who(led.leader.as_slice()), [("id-1", Some(Role::Leading))]);
    assert_eq!(who(&led.standbys), [("id-2", Some(Role::Standby)), ("id-3", None)]);
    assert_eq!((psql.key, psql.leader.as_ref().unwrap().role), (Key::of(Kind::Lease, "psql"), None));
    assert_eq!(who(&snapshot.silent), [("id-3", None)]);
    // Whoever knows the name finds it all the same.
    let asked = snapshot.of(&Name::from("psql"));
    assert_eq!((asked.name.unwrap().as_str(), who(asked.leader.as_slice())), ("psql", vec![("id-4", None)]));
    assert_eq!(snapshot.of(&Name::from("nobody's")).leader, None);
}

/// C-06: a lease that changes hands in the middle of a look shows once, with whom the store shows.
#[test]
fn what_the_store_shows_counts_for_more_than_what_was_said_before() {
    let all = vec![seen("1", &[], &["job"]), seen("2", &["job"], &[])];
    let answers = vec![
        presence("1", (1, 1), &[("job", Role::Draining)]),
        presence("2", (1, 1), &[("job", Role::Standby)]),
    ];
    let found = found(all, answers);
    assert!(!found.agrees());
    let election = found.snapshot().of(&Name::from("job"));
    assert_eq!(who(election.leader.as_slice()), [("id-2", None)]);
    assert_eq!(who(&election.standbys), []);
    assert_eq!(who(&election.aside), [("id-1", Some(Role::Draining))]);
}

/// C-06: a store that shows no holders, as files do where the system does not show its locks.
#[test]
fn without_a_lock_table_the_answers_tell_who_leads() {
    let all = vec![seen("1", &[], &[]), seen("2", &[], &[])];
    let answers = vec![
        presence("1", (1, 1), &[("job", Role::Leading)]),
        presence("2", (1, 1), &[("job", Role::Ineligible)]),
    ];
    let found = found(all, answers);
    assert!(found.agrees());
    let election = found.snapshot().of(&Name::from("job"));
    assert_eq!(who(election.leader.as_slice()), [("id-1", Some(Role::Leading))]);
    assert_eq!(who(&election.aside), [("id-2", Some(Role::Ineligible))]);
    assert_eq!(election.to_string(), "\"job\": id-1 leading, term 1, for 1s, nobody stands by");
}

/// C-06
#[test]
fn that_time_passes_is_no_change_and_a_new_term_is() {
    let look = |term, seconds| {
        let mut answer = presence("1", (1, 1), &[("job", Role::Leading)]);
        answer.standings[0].term = Some(term);
        answer.standings[0].held_for = Some(Duration::from_secs(seconds));
        found(vec![seen("1", &["job"], &[])], vec![answer]).snapshot()
    };
    assert!(look(1, 1).shows_the_same_as(&look(1, 9)));
    assert!(!look(1, 1).shows_the_same_as(&look(2, 1)));
    assert!(!look(1, 1).shows_the_same_as(&Snapshot::default()));
}
