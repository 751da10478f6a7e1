//! A server process that ends with the test that started it, however that ends.

use std::io::{BufRead as _, BufReader, Read as _};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use super::{eventually, programs, until};

/// Longest wait for a server to be ready.
const LIMIT: Duration = Duration::from_secs(20);

/// Starts the server and waits for its end. When standard input ends, since the test process has closed it or is no
/// more, it ends the server at once and removes its folder.
const KEEPER: &str = r#"
dir=$1 end=$2; shift 2
gone=
trap 'gone=1; kill -CONT "$server"; kill -"$end" "$server"' TERM
exec 3<&0
"$@" 3<&- </dev/null & server=$!
echo "$server"
exec >&-
(read -r _ <&3; kill -TERM $$) & watcher=$!
exec 3<&-
wait "$server"; code=$?
# The first wait was interrupted.
[ -z "$gone" ] || wait "$server"
kill "$watcher" 2>/dev/null
[ -z "$gone" ] || rm -rf -- "$dir"
exit "$code"
"#;

/// What a server has written, as long as its folder lives. A clone is the same log.
#[derive(Clone, Default)]
pub(crate) struct ServerLog {
    shared: Arc<(Mutex<Vec<String>>, Condvar)>,
}

impl ServerLog {
    pub(crate) fn lines(&self) -> Vec<String> {
        self.shared.0.lock().unwrap().clone()
    }

    pub(crate) fn len(&self) -> usize {
        self.shared.0.lock().unwrap().len()
    }

    /// Tells whether a line after the first `from` ones has that text.
    pub(crate) fn has(&self, text: &str, from: usize) -> bool {
        self.shared.0.lock().unwrap().iter().skip(from).any(|line| line.contains(text))
    }

    /// Waits for one of these texts in a line after the first `from` ones, and tells whether it was the first of them.
    fn wait_for(&self, ready: &str, failed: &str, from: usize) -> bool {
        let (lines, written) = &*self.shared;
        let has = |lines: &[String], text: &str| lines.iter().skip(from).any(|line| line.contains(text));
        let (lines, waited) = written
            .wait_timeout_while(lines.lock().unwrap(), LIMIT, |lines| {
                !has(lines, ready) && !has(lines, failed)
            })
            .unwrap();
        assert!(!waited.timed_out(), "not within {LIMIT:?}: {ready:?}; the log says {lines:#?}");
        has(&lines, ready)
    }

    fn push(&self, line: String) {
        self.shared.0.lock().unwrap().push(line);
        self.shared.1.notify_all();
    }

    /// Prints it, for a test that fails.
    pub(super) fn print(&self, who: &str) {
        for line in self.lines() {
            eprintln!("{who}: {line}");
        }
    }
}

/// A running server and its keeper. Dropped, it ends, and its folder is removed.
pub(super) struct Kept {
    keeper: Child,
    /// Closed, it tells the keeper that it is time.
    stdin: Option<ChildStdin>,
    reader: Option<JoinHandle<()>>,
    pub(super) pid: i32,
    log: ServerLog,
    from: usize,
}

impl Kept {
    /// Starts a server that ends at once by this signal.
    pub(super) fn start(server: &Command, end: Signal, dir: &Path, log: &ServerLog) -> Self {
        let from = log.len();
        let mut keeper = programs::command("/bin/sh")
            .args(["-c", KEEPER, "keeper"])
            .arg(dir)
            .arg(end.as_raw().to_string())
            .arg(server.get_program())
            .args(server.get_args())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("a shell starts");
        let (stdout, stderr) = (keeper.stdout.take().unwrap(), keeper.stderr.take().unwrap());
        let mut pid = String::new();
        BufReader::new(stdout.take(32)).read_line(&mut pid).unwrap();
        let (stdin, lines) = (keeper.stdin.take(), log.clone());
        let reader = thread::spawn(move || {
            for line in BufReader::new(stderr).split(b'\n').map_while(Result::ok) {
                lines.push(String::from_utf8_lossy(&line).into_owned());
            }
        });
        let pid = pid.trim().parse().expect("the keeper says the server's number");
        Self { keeper, stdin, reader: Some(reader), pid, log: log.clone(), from }
    }

    /// Waits until the log says that it is ready, or that it failed: `false` then.
    pub(super) fn is_up(&self, ready: &str, failed: &str) -> bool {
        self.log.wait_for(ready, failed, self.from)
    }

    /// As [`is_up`](Self::is_up), without blocking the thread; it must not fail.
    pub(super) async fn up(&self, ready: &str) {
        until(ready, || self.log.has(ready, self.from)).await;
    }

    pub(super) fn signal(&self, signal: Signal) {
        send(self.pid, signal);
    }

    /// Leaves one that has failed to start, and the folder.
    pub(super) fn leave(mut self) {
        self.keeper.wait().ok();
    }

    /// Waits for the end of the server, which was asked of it.
    pub(super) async fn ended(mut self) -> ExitStatus {
        let end = eventually("the server ends", || self.keeper.try_wait().unwrap(), Option::is_some);
        end.await.unwrap()
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.stdin.take();
        self.keeper.wait().ok();
        if let Some(reader) = self.reader.take() {
            reader.join().ok();
        }
    }
}

/// Sends a signal to a process of the tests' own servers.
pub(super) fn send(pid: i32, signal: Signal) {
    let pid = Pid::from_raw(pid).expect("a process's number");
    kill_process(pid, signal).unwrap_or_else(|error| panic!("{signal:?} to {pid:?}: {error}"));
}

/// As [`send`], to one that may be gone.
pub(super) fn try_send(pid: i32, signal: Signal) {
    if let Some(pid) = Pid::from_raw(pid) {
        kill_process(pid, signal).ok();
    }
}
