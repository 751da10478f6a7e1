//! What the events say.

use std::convert::Infallible;
use std::fs;
use std::thread;

use leasehold::{Lease, LossCause};
use tracing::Level;
use tracing_subscriber::layer::SubscriberExt as _;

use crate::support::recorder::{Recorded, Recorder};
use crate::support::{Log, Member, Stage, eventually, on_every_store, quick};

/// F-28: acquired, lost with its cause, and released, each once for each term, with name, term and identity.
#[tokio::test]
async fn the_events_of_a_lease_reach_the_subscriber_where_the_locker_was_made() {
    on_every_store(async |stage| {
        let recorder = Recorder::default();
        let guard = tracing::subscriber::set_default(tracing_subscriber::registry().with(recorder.clone()));
        let locker = stage.locker(quick("the-replica"));
        // Only what was current where the Locker was made counts.
        drop(guard);
        let log = Log::default();

        let kept = locker.run("kept", async |_: Lease| Ok::<_, Infallible>(())).await.unwrap();
        assert_eq!(kept, Some(()));
        let mut losing = Member::on(&locker, "taken away", "a", &log);
        losing.leads().await;
        stage.take_away("the-replica", "taken away");
        losing.leads().await;
        losing.stop().await.unwrap();
        locker.close().await;

        let acquired = recorder.only("acquired", "kept").await;
        let released = recorder.only("released", "kept").await;
        let lost = recorder.only("lost", "taken away").await;
        for (event, level, term) in
            [(&acquired, Level::INFO, "1"), (&released, Level::INFO, "1"), (&lost, Level::WARN, "2")]
        {
            assert_eq!((event.level, event.get("term")), (level, term), "{event:?}");
            assert_eq!(event.get("identity"), "the-replica", "{event:?}");
            let on_own_thread = event.thread != thread::current().id();
            assert_eq!(on_own_thread, !matches!(stage, Stage::Memory(_) | Stage::Expiring(_)), "{event:?}");
        }
        assert_eq!(lost.get("cause"), LossCause::Gone.to_string());
        let all = recorder.all();
        let session_events: Vec<_> = all
            .iter()
            .filter(|event| event.level <= Level::INFO && event.get("message").starts_with("session"))
            .collect();
        assert_eq!(session_events.len(), 2, "{session_events:?}");
        assert!(session_events.iter().all(|event| event.get("identity") == "the-replica"));
    })
    .await;
}

/// F-28: the store could not tell; the reason says what to change.
#[tokio::test]
async fn a_refusal_of_the_store_is_told_with_what_to_change() {
    let (stage, recorder, log) = (Stage::files(), Recorder::default(), Log::default());
    let guard = tracing::subscriber::set_default(tracing_subscriber::registry().with(recorder.clone()));
    fs::create_dir(stage.lock_file("job")).unwrap();
    let mut member = Member::join(&stage, quick("a"), "job", &log);
    drop(guard);
    let enough = |all: &Vec<Recorded>| all.iter().filter(|event| event.is("refused", "job")).count() >= 2;
    let all = eventually("two refusals", || recorder.all(), enough).await;
    let refused = all.iter().find(|event| event.is("refused", "job")).unwrap();
    assert_eq!((refused.level, refused.get("identity")), (Level::WARN, "a"));
    assert!(refused.get("why").contains("choose another directory"), "{refused:?}");

    // It goes on trying, and leads when that is mended.
    fs::remove_dir(stage.lock_file("job")).unwrap();
    member.leads().await;
    member.stop().await.unwrap();
}

/// D05: a standby that is refused again and again says who is in the way, and on a server from where and since when.
#[tokio::test]
async fn a_standby_that_keeps_being_refused_names_the_holder() {
    on_every_store(async |stage| {
        let (recorder, log) = (Recorder::default(), Log::default());
        let mut leader = Member::join(stage, quick("the-leader"), "job", &log);
        leader.leads().await;
        let guard = tracing::subscriber::set_default(tracing_subscriber::registry().with(recorder.clone()));
        let standby = Member::join(stage, quick("the-standby"), "job", &log);
        drop(guard);
        let told = |all: &Vec<Recorded>| {
            all.iter().filter(|event| event.is("still held by somebody else", "job")).count() == 2
        };
        let all = eventually("it is told twice", || recorder.all(), told).await;
        let mut named = all.iter().filter(|event| event.is("still held by somebody else", "job"));
        for refusals in ["3", "6"] {
            let event = named.next().unwrap();
            assert_eq!(event.level, Level::INFO);
            assert_eq!(
                (event.get("held_by"), event.get("identity")),
                ("the-leader", "the-standby"),
                "{event:?}"
            );
            assert_eq!(event.get("refusals"), refusals, "{event:?}");
            #[cfg(all(unix, feature = "postgres"))]
            if let Stage::Postgres(postgres) = stage {
                let admin = postgres.database.admin();
                assert_eq!(
                    admin.backends("leasehold/the-leader"),
                    [event.get("pid").parse::<i32>().unwrap()]
                );
                assert!(event.get("address").starts_with("127.0.0.1:"), "{event:?}");
                for age in ["session_age", "silent_for"] {
                    // It may have been heard of in this very millisecond.
                    assert!(event.get(age).ends_with('s'), "{age}: {event:?}");
                }
            }
        }
        standby.stop().await.unwrap();
        leader.stop().await.unwrap();
    })
    .await;
}

/// D05: somebody who holds the very key and says nothing for long, such as a person at a prompt, is told from a leader.
#[cfg(all(unix, feature = "postgres"))]
#[tokio::test]
async fn a_holder_that_is_silent_for_long_is_warned_of() {
    let (stage, recorder) = (Stage::postgres(), Recorder::default());
    let Stage::Postgres(postgres) = &stage else { unreachable!("it was made so") };
    let key = leasehold::Key::of(leasehold::Kind::Lease, "job").get();
    postgres.database.admin().sql(&format!("SELECT pg_advisory_lock({key})"));
    let guard = tracing::subscriber::set_default(tracing_subscriber::registry().with(recorder.clone()));
    let options = quick("the-standby").query_timeout(std::time::Duration::from_millis(200));
    let standby = Member::join(&stage, options, "job", &Log::default());
    drop(guard);
    let message = "still held by somebody else, of whom the store has heard nothing for long: frozen, cut off, or no \
                   leasehold process";
    let warned = |all: &Vec<Recorded>| all.iter().any(|event| event.is(message, "job"));
    let all = eventually("it is warned of", || recorder.all(), warned).await;
    let event = all.iter().find(|event| event.is(message, "job")).unwrap();
    assert_eq!((event.level, event.get("held_by")), (Level::WARN, "unknown"), "{event:?}");
    standby.stop().await.unwrap();
}

/// D26, F-28: an outage is warned of when it begins, and then ever more seldom.
#[tokio::test]
async fn an_outage_does_not_fill_the_log() {
    let (memory, recorder) = (leasehold::Memory::new(), Recorder::default());
    memory.down();
    let guard = tracing::subscriber::set_default(tracing_subscriber::registry().with(recorder.clone()));
    let member = Member::join(&Stage::Memory(memory), quick("a"), "job", &Log::default());
    drop(guard);
    let failures = |level| -> Vec<String> {
        let all = recorder.all().into_iter();
        all.filter(|event| event.level == level && event.get("message") == "cannot connect to the store")
            .map(|event| event.get("failures").to_owned())
            .collect()
    };
    let warned = eventually("four warnings", || failures(Level::WARN), |warned| warned.len() == 4).await;
    assert_eq!(warned, ["1", "2", "4", "8"]);
    assert_eq!(failures(Level::DEBUG), ["3", "5", "6", "7"]);
    member.stop().await.unwrap();
}
