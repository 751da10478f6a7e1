//! What the events say.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fmt;
use std::fs;
use std::sync::{Arc, Mutex};
use std::thread::{self, ThreadId};

use leasehold::{Lease, LossCause};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt as _};

use crate::support::{Log, Member, Stage, eventually, on_every_store, quick};

#[derive(Clone, Debug)]
struct Recorded {
    level: Level,
    thread: ThreadId,
    fields: BTreeMap<String, String>,
}

impl Recorded {
    fn is(&self, message: &str, name: &str) -> bool {
        self.get("message") == message && self.get("name") == name
    }

    fn get(&self, field: &str) -> &str {
        self.fields.get(field).map_or("", String::as_str)
    }
}

/// Records every event of the library.
#[derive(Clone, Default)]
struct Recorder(Arc<Mutex<Vec<Recorded>>>);

impl Recorder {
    fn all(&self) -> Vec<Recorded> {
        self.0.lock().unwrap().clone()
    }

    /// Waits for an event and gives it; there must be exactly one.
    async fn only(&self, message: &str, name: &str) -> Recorded {
        let what = format!("the event {message:?} of {name:?}");
        let enough = |all: &Vec<Recorded>| all.iter().any(|event| event.is(message, name));
        let all = eventually(&what, || self.all(), enough).await;
        let mut found = all.into_iter().filter(|event| event.is(message, name));
        let first = found.next().unwrap();
        assert_eq!(found.count(), 0, "{what} is there once");
        first
    }
}

impl<S: Subscriber> Layer<S> for Recorder {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        if event.metadata().target().starts_with("leasehold") {
            let mut fields = Fields(BTreeMap::new());
            event.record(&mut fields);
            let recorded = Recorded {
                level: *event.metadata().level(),
                thread: thread::current().id(),
                fields: fields.0,
            };
            self.0.lock().unwrap().push(recorded);
        }
    }
}

struct Fields(BTreeMap<String, String>);

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().to_owned(), value.to_owned());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.0.insert(field.name().to_owned(), format!("{value:?}"));
    }
}

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
