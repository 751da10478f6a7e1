//! What clients ask of a server, as the server tells.

use std::collections::HashSet;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{self, JoinHandle};

use super::{LIMIT, Server};

/// Tells the marks apart.
static MARK: AtomicUsize = AtomicUsize::new(0);

type Lines = Arc<(Mutex<Vec<String>>, Condvar)>;

/// Follows the commands of a server, until it is dropped or the server ends.
pub(crate) struct Monitor {
    stream: TcpStream,
    lines: Lines,
    thread: Option<JoinHandle<()>>,
    own: Arc<Mutex<HashSet<String>>>,
}

/// A command that the server has carried out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    /// The address of the client; `lua` for what a script has called.
    pub(crate) client: String,
    /// The command's name is in capitals. What is no text of ASCII stands as `\xff`.
    pub(crate) words: Vec<String>,
}

impl Seen {
    pub(crate) fn name(&self) -> &str {
        &self.words[0]
    }

    /// Whether it came from a client, as a message of its own.
    pub(crate) fn was_sent(&self) -> bool {
        self.client != "lua"
    }
}

impl Monitor {
    pub(super) fn new(server: &Server) -> Self {
        let mut stream =
            TcpStream::connect(("127.0.0.1", server.port())).expect("the server lets the kit in");
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        let lines = Lines::default();
        stream.write_all(b"AUTH kit kit\r\nMONITOR\r\n").unwrap();
        for _ in 0..2 {
            let mut line = String::new();
            reader.read_line(&mut line).unwrap();
            assert_eq!(line, "+OK\r\n");
        }
        let written = Arc::clone(&lines);
        let thread = thread::spawn(move || {
            for line in reader.split(b'\n').map_while(Result::ok) {
                written.0.lock().unwrap().push(String::from_utf8_lossy(&line).trim_end().to_owned());
                written.1.notify_all();
            }
        });
        Self { stream, lines, thread: Some(thread), own: Arc::clone(&server.own) }
    }

    /// All commands of clients up to now, in their order, but for the kit's own.
    pub(crate) fn seen(&self, server: &Server) -> Vec<Seen> {
        let mark = format!("mark {}", MARK.fetch_add(1, Ordering::Relaxed));
        let quoted = format!("\"{mark}\"");
        server.ask::<()>(&["ECHO", &mark]);
        let (lines, is_written) = &*self.lines;
        let is_missing = |lines: &mut Vec<String>| !lines.iter().any(|line| line.ends_with(&quoted));
        let (lines, waited) =
            is_written.wait_timeout_while(lines.lock().unwrap(), LIMIT, is_missing).unwrap();
        assert!(!waited.timed_out(), "not within {LIMIT:?}: {quoted}");
        let own = self.own.lock().unwrap();
        lines.iter().filter_map(|line| parse(line)).filter(|seen| !own.contains(&seen.client)).collect()
    }

    /// Forgets all commands up to now.
    pub(crate) fn forget(&self, server: &Server) {
        self.seen(server);
        self.lines.0.lock().unwrap().clear();
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        // The server may have closed it.
        self.stream.shutdown(Shutdown::Both).ok();
        if let Some(thread) = self.thread.take() {
            thread.join().ok();
        }
    }
}

/// A line like `+1339518083.107412 [0 127.0.0.1:60866] "set" "k" "v"`.
fn parse(line: &str) -> Option<Seen> {
    let (head, words) = line.split_once("] ")?;
    let client = head.split_once('[')?.1.split_once(' ')?.1.to_owned();
    let mut words: Vec<String> = quoted(words);
    words.first_mut()?.make_ascii_uppercase();
    Some(Seen { client, words })
}

/// The words of a text, each in quotes.
fn quoted(text: &str) -> Vec<String> {
    let (mut words, mut letters) = (Vec::new(), text.chars());
    while letters.by_ref().any(|letter| letter == '"') {
        let mut word = String::new();
        while let Some(letter) = letters.next().filter(|&letter| letter != '"') {
            match (letter, letter == '\\') {
                (_, false) => word.push(letter),
                (_, true) => match letters.next() {
                    Some('n') => word.push('\n'),
                    Some('r') => word.push('\r'),
                    Some('t') => word.push('\t'),
                    Some(letter @ ('"' | '\\')) => word.push(letter),
                    other => word.extend(['\\'].into_iter().chain(other)),
                },
            }
        }
        words.push(word);
    }
    words
}
