//! A thread for what may hang: every operation on the disk.

use std::io;
use std::sync::mpsc;
use std::thread;

use tokio::sync::oneshot;

type Job = Box<dyn FnOnce() + Send>;

/// A thread that does one job after the other. It ends after the last one, when every clone of this is dropped.
///
/// Not the runtime's pool of blocking threads: that starts threads when it needs them, and panics where the system has
/// none to give. This one is there before a session is.
#[derive(Clone, Debug)]
pub(super) struct Disk {
    jobs: mpsc::Sender<Job>,
}

impl Disk {
    pub(super) fn new() -> io::Result<Self> {
        let (jobs, queue) = mpsc::channel::<Job>();
        let work = move || queue.into_iter().for_each(|job| job());
        thread::Builder::new().name("leasehold-disk".to_owned()).spawn(work)?;
        Ok(Self { jobs })
    }

    /// Does a job, to its end even if the returned future is dropped. `None` if an earlier job, or this one, panicked.
    pub(super) async fn run<T: Send + 'static>(&self, job: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        let (done, result) = oneshot::channel();
        let job = move || {
            done.send(job()).ok();
        };
        self.jobs.send(Box::new(job)).ok()?;
        result.await.ok()
    }
}
