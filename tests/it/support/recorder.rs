//! What the events of the library say.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex};
use std::thread::{self, ThreadId};

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer};

use super::eventually;

#[derive(Clone, Debug)]
pub(crate) struct Recorded {
    pub(crate) level: Level,
    pub(crate) thread: ThreadId,
    fields: BTreeMap<String, String>,
}

impl Recorded {
    pub(crate) fn is(&self, message: &str, name: &str) -> bool {
        self.get("message") == message && self.get("name") == name
    }

    pub(crate) fn get(&self, field: &str) -> &str {
        self.fields.get(field).map_or("", String::as_str)
    }
}

/// Records every event of the library.
#[derive(Clone, Default)]
pub(crate) struct Recorder(Arc<Mutex<Vec<Recorded>>>);

impl Recorder {
    pub(crate) fn all(&self) -> Vec<Recorded> {
        self.0.lock().unwrap().clone()
    }

    /// Waits for an event and gives it; there must be exactly one.
    pub(crate) async fn only(&self, message: &str, name: &str) -> Recorded {
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
