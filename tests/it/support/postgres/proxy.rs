//! A proxy between clients and a server, which breaks the line and slips statements into sessions.

use std::io;
use std::net::SocketAddr;
use std::sync::mpsc as blocking;
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

/// Longest wait for a statement that was slipped in.
const LIMIT: Duration = Duration::from_secs(10);

/// A request for TLS or GSS, which comes before the start-up message.
const ENCRYPTION: [u32; 2] = [80_877_103, 80_877_104];

/// A proxy on the loopback interface; it knows the protocol's frames, and expects no encryption.
pub(crate) struct Proxy {
    address: SocketAddr,
    sessions: Sessions,
    cut: watch::Sender<bool>,
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

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
        let (sessions, target) = (Sessions::default(), (host.to_owned(), port));
        let (cut, is_cut) = watch::channel(false);
        let (stop, stopped) = tokio::sync::oneshot::channel();
        let known = sessions.clone();
        let thread = thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let listener = TcpListener::from_std(listener).unwrap();
                let mut lines = JoinSet::new();
                let accept = async {
                    while let Ok((client, _)) = listener.accept().await {
                        let (target, is_cut, known) = (target.clone(), is_cut.clone(), known.clone());
                        lines.spawn(async move { Line::serve(client, &target, is_cut, &known).await.ok() });
                    }
                };
                tokio::select! {
                    () = accept => {}
                    _ = stopped => {}
                }
                lines.shutdown().await;
            });
        });
        Self { address, sessions, cut, stop: Some(stop), thread: Some(thread) }
    }

    pub(crate) const fn port(&self) -> u16 {
        self.address.port()
    }

    /// From now on nothing passes, in either direction, and nobody is told.
    pub(crate) fn cut(&self) {
        self.cut.send_replace(true);
    }

    /// What was sent meanwhile arrives.
    pub(crate) fn heal(&self) {
        self.cut.send_replace(false);
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
    /// Statements of the client that the server has still to answer; the start-up counts as one.
    unanswered: usize,
    /// The client has sent the first messages of a statement.
    in_the_middle: bool,
    slipped_in: Option<(Statement, Result<(), String>)>,
}

impl Line {
    async fn serve(
        client: TcpStream,
        target: &(String, u16),
        mut is_cut: watch::Receiver<bool>,
        sessions: &Sessions,
    ) -> io::Result<()> {
        wait_until_healed(&mut is_cut).await;
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
            unanswered: 1,
            in_the_middle: false,
            slipped_in: None,
        };
        line.start_up().await?;
        let (slip_in, mut statements) = mpsc::unbounded_channel();
        loop {
            wait_until_healed(&mut is_cut).await;
            let idle = line.unanswered == 0 && !line.in_the_middle && line.slipped_in.is_none();
            tokio::select! {
                biased;
                _ = is_cut.changed() => {}
                frame = line.server.next() => {
                    let frame = frame?;
                    if frame[0] == b'K' {
                        let backend = i32::from_be_bytes(frame[5..9].try_into().unwrap());
                        let session = Session { backend, statements: slip_in.clone() };
                        sessions.lock().unwrap().push(session);
                    }
                    line.answer(&frame).await?;
                }
                Some(statement) = statements.recv(), if idle => {
                    let body = [statement.sql.as_bytes(), &[0]].concat();
                    let length = u32::try_from(body.len() + 4).unwrap().to_be_bytes();
                    line.to_server.write_all(&[b"Q".as_slice(), &length, &body].concat()).await?;
                    line.slipped_in = Some((statement, Ok(())));
                }
                frame = line.client.next(), if line.slipped_in.is_none() => {
                    let frame = frame?;
                    match frame[0] {
                        b'Q' | b'S' => {
                            line.unanswered += 1;
                            line.in_the_middle = false;
                        }
                        // The answer to a question of the log-in.
                        b'p' => {}
                        _ => line.in_the_middle = true,
                    }
                    line.to_server.write_all(&frame).await?;
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

    async fn answer(&mut self, frame: &[u8]) -> io::Result<()> {
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

async fn wait_until_healed(is_cut: &mut watch::Receiver<bool>) {
    // The proxy lives as long as its lines.
    is_cut.wait_for(|cut| !cut).await.ok();
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
