//! A proxy between clients and a server, which breaks the line and slips statements into sessions.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc as blocking;
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use super::super::{now, until};

/// Longest wait for a statement that was slipped in.
const LIMIT: Duration = Duration::from_secs(10);

/// A request for TLS or GSS, which comes before the start-up message.
const ENCRYPTION: [u32; 2] = [80_877_103, 80_877_104];

/// A proxy on the loopback interface; it knows the protocol's frames, and expects no encryption.
pub(crate) struct Proxy {
    address: SocketAddr,
    target: Target,
    sessions: Sessions,
    /// How many statements have passed to the server.
    statements: Arc<AtomicUsize>,
    condition: watch::Sender<Condition>,
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// What passes. A line that came to be cut stays so until it is open, whatever else is asked for meanwhile.
#[derive(Clone, Copy, Debug)]
enum Condition {
    /// Everything; what the server says, so much later.
    Open { delay: Duration },
    /// Nothing, in either direction, and nobody is told.
    Cut,
    /// All up to the end of the client's next statement, and then nothing.
    CutAfterStatement,
    /// All up to the middle of the client's next message, and then nothing.
    CutInStatement,
    /// Whoever comes is sent away, and everybody is told.
    Closed,
}

const OPEN: Condition = Condition::Open { delay: Duration::ZERO };

/// Host and port of the server.
type Target = Arc<Mutex<(String, u16)>>;

type Sessions = Arc<Mutex<Vec<Session>>>;

struct Session {
    backend: i32,
    statements: mpsc::UnboundedSender<Statement>,
}

struct Statement {
    sql: String,
    done: blocking::Sender<Result<(), String>>,
}

impl Proxy {
    /// A proxy of the server at this host and port.
    pub(crate) fn to(host: &str, port: u16) -> Self {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let (sessions, target) = (Sessions::default(), Target::new(Mutex::new((host.to_owned(), port))));
        let (condition, seen) = watch::channel(OPEN);
        let (stop, stopped) = tokio::sync::oneshot::channel();
        let (known, leads_to) = (sessions.clone(), target.clone());
        let statements = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&statements);
        let thread = thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let listener = TcpListener::from_std(listener).unwrap();
                let mut lines = JoinSet::new();
                let accept = async {
                    while let Ok((client, _)) = listener.accept().await {
                        let target = leads_to.lock().unwrap().clone();
                        let (seen, known) = (seen.clone(), known.clone());
                        let counter = Arc::clone(&counter);
                        lines.spawn(
                            async move { Line::serve(client, &target, seen, &known, counter).await.ok() },
                        );
                    }
                };
                tokio::select! {
                    () = accept => {}
                    _ = stopped => {}
                }
                lines.shutdown().await;
            });
        });
        Self { address, target, sessions, statements, condition, stop: Some(stop), thread: Some(thread) }
    }

    pub(crate) const fn port(&self) -> u16 {
        self.address.port()
    }

    /// How many statements clients have sent: a client waits for the answer to each, a round trip.
    pub(crate) fn statements(&self) -> usize {
        self.statements.load(Ordering::SeqCst)
    }

    /// Whoever comes from now on is led to the server at this port, as by an address that moves. The sessions stay.
    pub(crate) fn redirect(&self, port: u16) {
        self.target.lock().unwrap().1 = port;
    }

    /// From now on nothing passes, in either direction, and nobody is told.
    pub(crate) fn cut(&self) {
        self.condition.send_replace(Condition::Cut);
    }

    /// The next statement of each client still reaches the server; its answer does not come back, and from then on
    /// nothing passes. New clients are cut off at once.
    pub(crate) fn cut_answers(&self) {
        self.condition.send_replace(Condition::CutAfterStatement);
    }

    /// Of the next message of each client only the first half reaches the server, and from then on nothing passes. New
    /// clients are cut off at once.
    pub(crate) fn cut_in_statement(&self) {
        self.condition.send_replace(Condition::CutInStatement);
    }

    /// What was sent meanwhile arrives, and all that is sent from now on, at once.
    pub(crate) fn heal(&self) {
        self.condition.send_replace(OPEN);
    }

    /// From now on all that the servers say arrives so much later, in order. What clients send, their last words
    /// included, arrives at once.
    pub(crate) fn delay(&self, delay: Duration) {
        self.condition.send_replace(Condition::Open { delay });
    }

    /// Closes both sides of every line, as a proxy that dies does; whoever comes until it heals is sent away.
    pub(crate) async fn close(&self) {
        self.condition.send_replace(Condition::Closed);
        // Each line has a receiver, and so has the listener.
        until("the lines are closed", || self.condition.receiver_count() == 1).await;
    }

    /// Runs SQL in the session of a backend, between two statements of its client, which does not see it.
    pub(crate) fn slip_in(&self, backend: i32, sql: &str) -> Result<(), String> {
        let (done, is_done) = blocking::channel();
        {
            let mut sessions = self.sessions.lock().unwrap();
            sessions.retain(|session| !session.statements.is_closed());
            let session = sessions.iter().find(|session| session.backend == backend);
            let session = session.ok_or_else(|| format!("the backend {backend} has no session here"))?;
            session.statements.send(Statement { sql: sql.to_owned(), done }).ok();
        }
        is_done.recv_timeout(LIMIT).map_err(|error| format!("{error}: {sql}"))?
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.stop.take();
        if let Some(thread) = self.thread.take() {
            thread.join().ok();
        }
    }
}

/// One client and its connection to the server.
struct Line {
    client: Frames,
    server: Frames,
    to_client: OwnedWriteHalf,
    to_server: OwnedWriteHalf,
    /// What the server has said, and when it is to arrive. After an error there is nothing.
    on_the_way: VecDeque<(Instant, io::Result<Vec<u8>>)>,
    /// Statements of the client that the server has still to answer; the start-up counts as one.
    unanswered: usize,
    /// Of all lines.
    statements: Arc<AtomicUsize>,
    /// The client has sent the first messages of a statement.
    in_the_middle: bool,
    slipped_in: Option<(Statement, Result<(), String>)>,
}

impl Line {
    async fn serve(
        client: TcpStream,
        target: &(String, u16),
        mut condition: watch::Receiver<Condition>,
        sessions: &Sessions,
        statements: Arc<AtomicUsize>,
    ) -> io::Result<()> {
        until_open(&mut condition).await?;
        let server = TcpStream::connect((target.0.as_str(), target.1)).await?;
        client.set_nodelay(true)?;
        server.set_nodelay(true)?;
        let ((from_client, to_client), (from_server, to_server)) = (client.into_split(), server.into_split());
        let (client, server) = (Frames::new(from_client), Frames::new(from_server));
        let mut line = Self {
            client,
            server,
            to_client,
            to_server,
            on_the_way: VecDeque::new(),
            unanswered: 1,
            statements,
            in_the_middle: false,
            slipped_in: None,
        };
        line.start_up().await?;
        let (slip_in, mut statements) = mpsc::unbounded_channel();
        loop {
            let now_is = *condition.borrow_and_update();
            let delay = match now_is {
                Condition::Cut | Condition::Closed => until_open(&mut condition).await?,
                Condition::Open { delay } => delay,
                Condition::CutAfterStatement | Condition::CutInStatement => Duration::ZERO,
            };
            let idle = line.unanswered == 0 && !line.in_the_middle && line.slipped_in.is_none();
            let server_speaks = !matches!(line.on_the_way.back(), Some((_, Err(_))));
            let arrives = line.on_the_way.front().map(|(at, _)| *at);
            tokio::select! {
                biased;
                _ = condition.changed() => {}
                () = sleep_until(arrives.unwrap_or_else(now)), if arrives.is_some() => {
                    if let Some((_, frame)) = line.on_the_way.pop_front() {
                        line.answer(&frame?, sessions, &slip_in).await?;
                    }
                }
                frame = line.server.next(), if server_speaks => {
                    // Not by way of a timer, which has whole milliseconds only.
                    if delay.is_zero() && arrives.is_none() {
                        line.answer(&frame?, sessions, &slip_in).await?;
                    } else {
                        line.on_the_way.push_back((now() + delay, frame));
                    }
                }
                Some(statement) = statements.recv(), if idle => {
                    let body = [statement.sql.as_bytes(), &[0]].concat();
                    let length = u32::try_from(body.len() + 4).unwrap().to_be_bytes();
                    line.to_server.write_all(&[b"Q".as_slice(), &length, &body].concat()).await?;
                    line.slipped_in = Some((statement, Ok(())));
                }
                frame = line.client.next(), if line.slipped_in.is_none() => {
                    line.ask(&frame?, now_is, &mut condition).await?;
                }
            }
        }
    }

    /// Until the client has said who it is: these messages have no type.
    async fn start_up(&mut self) -> io::Result<()> {
        loop {
            let message = self.client.next_untyped().await?;
            self.to_server.write_all(&message).await?;
            let code = u32::from_be_bytes(message[4..8].try_into().unwrap());
            if !ENCRYPTION.contains(&code) {
                return Ok(());
            }
            let answer = self.server.take(1).await?;
            assert_eq!(answer, b"N", "the server encrypts");
            self.to_client.write_all(&answer).await?;
        }
    }

    /// Passes on a message of the client.
    async fn ask(
        &mut self,
        frame: &[u8],
        now_is: Condition,
        condition: &mut watch::Receiver<Condition>,
    ) -> io::Result<()> {
        let ends_statement = matches!(frame[0], b'Q' | b'S');
        if ends_statement {
            self.unanswered += 1;
            self.statements.fetch_add(1, Ordering::SeqCst);
            self.in_the_middle = false;
        } else if frame[0] != b'p' {
            // Not the answer to a question of the log-in.
            self.in_the_middle = true;
        }
        let at_once = match now_is {
            Condition::CutInStatement => frame.len() / 2,
            _ => frame.len(),
        };
        let (first, second) = frame.split_at(at_once);
        self.to_server.write_all(first).await?;
        if !second.is_empty() || ends_statement && matches!(now_is, Condition::CutAfterStatement) {
            until_open(condition).await?;
        }
        self.to_server.write_all(second).await
    }

    /// Passes on a message of the server.
    async fn answer(
        &mut self,
        frame: &[u8],
        sessions: &Sessions,
        statements: &mpsc::UnboundedSender<Statement>,
    ) -> io::Result<()> {
        if frame[0] == b'K' {
            let backend = i32::from_be_bytes(frame[5..9].try_into().unwrap());
            sessions.lock().unwrap().push(Session { backend, statements: statements.clone() });
        }
        match (&mut self.slipped_in, frame[0]) {
            // Notifications, notices and parameters may come at any time, and are the client's.
            (None, _) | (Some(_), b'A' | b'N' | b'S') => {
                if frame[0] == b'Z' {
                    self.unanswered = self.unanswered.saturating_sub(1);
                }
                self.to_client.write_all(frame).await?;
            }
            (Some((_, outcome)), b'E') => {
                *outcome = Err(String::from_utf8_lossy(&frame[5..]).replace('\0', " "));
            }
            (Some(_), b'Z') => {
                if let Some((statement, outcome)) = self.slipped_in.take() {
                    statement.done.send(outcome).ok();
                }
            }
            (Some(_), _) => {}
        }
        Ok(())
    }
}

/// Waits until the line is open, and gives its delay. An error if it is closed instead.
async fn until_open(condition: &mut watch::Receiver<Condition>) -> io::Result<Duration> {
    let over = |it: &Condition| matches!(it, Condition::Open { .. } | Condition::Closed);
    // The proxy lives as long as its lines.
    match condition.wait_for(over).await.map(|it| *it) {
        Ok(Condition::Open { delay }) => Ok(delay),
        _ => Err(io::ErrorKind::ConnectionAborted.into()),
    }
}

/// The messages of one direction. Cancel-safe.
struct Frames {
    from: OwnedReadHalf,
    read: Vec<u8>,
}

impl Frames {
    fn new(from: OwnedReadHalf) -> Self {
        Self { from, read: Vec::new() }
    }

    async fn next(&mut self) -> io::Result<Vec<u8>> {
        self.fill(5).await?;
        let length = u32::from_be_bytes(self.read[1..5].try_into().unwrap());
        self.take(1 + length as usize).await
    }

    async fn next_untyped(&mut self) -> io::Result<Vec<u8>> {
        self.fill(4).await?;
        let length = u32::from_be_bytes(self.read[..4].try_into().unwrap());
        self.take(length as usize).await
    }

    async fn take(&mut self, bytes: usize) -> io::Result<Vec<u8>> {
        self.fill(bytes).await?;
        let rest = self.read.split_off(bytes);
        Ok(std::mem::replace(&mut self.read, rest))
    }

    async fn fill(&mut self, bytes: usize) -> io::Result<()> {
        while self.read.len() < bytes {
            if self.from.read_buf(&mut self.read).await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        Ok(())
    }
}
