//! A proxy between clients and a server, which breaks the line. It passes bytes and knows no protocol.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use super::super::{now, until};

/// A proxy on the loopback interface.
pub(crate) struct Proxy {
    address: SocketAddr,
    /// The server's port.
    target: Arc<AtomicU16>,
    turns: Arc<AtomicUsize>,
    condition: watch::Sender<Condition>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// What passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Condition {
    /// Everything; what the server says, so much later.
    Open { delay: Duration },
    /// Nothing, in either direction, and nobody is told.
    Cut,
    /// Only what clients say.
    CutAnswers,
    /// The first half of what each client says next.
    CutInRequest,
    /// Whoever comes is sent away, and everybody is told.
    Closed,
}

const OPEN: Condition = Condition::Open { delay: Duration::ZERO };

/// What the lines have in common.
#[derive(Clone)]
struct Shared {
    target: Arc<AtomicU16>,
    turns: Arc<AtomicUsize>,
    condition: watch::Receiver<Condition>,
}

impl Proxy {
    /// A proxy of the server at this port.
    pub(crate) fn to(port: u16) -> Self {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let (target, turns) = (Arc::new(AtomicU16::new(port)), Arc::default());
        let (condition, seen) = watch::channel(OPEN);
        let (stop, stopped) = oneshot::channel();
        let shared = Shared { target: Arc::clone(&target), turns: Arc::clone(&turns), condition: seen };
        let thread = thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let listener = TcpListener::from_std(listener).unwrap();
                let mut lines = JoinSet::new();
                let accept = async {
                    while let Ok((client, _)) = listener.accept().await {
                        lines.spawn(serve(client, shared.clone()));
                    }
                };
                tokio::select! {
                    () = accept => {}
                    _ = stopped => {}
                }
                lines.shutdown().await;
            });
        });
        Self { address, target, turns, condition, stop: Some(stop), thread: Some(thread) }
    }

    pub(crate) const fn port(&self) -> u16 {
        self.address.port()
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port())
    }

    /// How often clients have spoken, on all lines together: what one sends before the server answers counts once, so that
    /// a pipeline is one, as a command is. One of some ten thousand bytes or more may be answered before it is sent.
    pub(crate) fn turns(&self) -> usize {
        self.turns.load(Ordering::SeqCst)
    }

    /// Whoever comes from now on is led to the server at this port, as by an address that moves. The lines stay.
    pub(crate) fn redirect(&self, port: u16) {
        self.target.store(port, Ordering::SeqCst);
    }

    /// From now on nothing passes, in either direction, and nobody is told.
    pub(crate) fn cut(&self) {
        self.condition.send_replace(Condition::Cut);
    }

    /// From now on what clients say still reaches the server, and its answers do not come back. New clients are cut off.
    pub(crate) fn cut_answers(&self) {
        self.condition.send_replace(Condition::CutAnswers);
    }

    /// Of what each client says next only the first half reaches the server, and from then on nothing passes. New clients
    /// are cut off at once.
    pub(crate) fn cut_in_request(&self) {
        self.condition.send_replace(Condition::CutInRequest);
    }

    /// What was sent meanwhile arrives, and all that is sent from now on, at once.
    pub(crate) fn heal(&self) {
        self.condition.send_replace(OPEN);
    }

    /// From now on all that the server says arrives so much later, in order. What clients send arrives at once.
    pub(crate) fn delay(&self, delay: Duration) {
        self.condition.send_replace(Condition::Open { delay });
    }

    /// Closes both sides of every line, as a proxy that dies does; whoever comes until it heals is sent away.
    pub(crate) async fn close(&self) {
        self.condition.send_replace(Condition::Closed);
        // Each line has some, and the listener has one.
        until("the lines are closed", || self.condition.receiver_count() == 1).await;
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

/// One client and its connection to the server. When either ends, so does the other.
async fn serve(client: TcpStream, shared: Shared) {
    let mut condition = shared.condition.clone();
    let closed = async {
        // The proxy lives as long as its lines.
        condition.wait_for(|it| *it == Condition::Closed).await.ok();
    };
    tokio::select! {
        _ = pass(client, shared) => {}
        () = closed => {}
    }
}

async fn pass(client: TcpStream, mut shared: Shared) -> io::Result<()> {
    until_it_passes(&mut shared.condition, |it| matches!(it, Condition::Open { .. })).await;
    let server = TcpStream::connect(("127.0.0.1", shared.target.load(Ordering::SeqCst))).await?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let ((from_client, to_client), (from_server, to_server)) = (client.into_split(), server.into_split());
    let server_spoke = AtomicBool::new(true);
    let (turns, condition) = (&*shared.turns, shared.condition);
    tokio::select! {
        ended = ask(from_client, to_server, condition.clone(), &server_spoke, turns) => ended,
        ended = answer(from_server, to_client, condition, &server_spoke) => ended,
    }
}

async fn until_it_passes(condition: &mut watch::Receiver<Condition>, passes: impl Fn(&Condition) -> bool) {
    condition.wait_for(|it| passes(it)).await.ok();
}

/// Until the client closes.
async fn ask(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    mut condition: watch::Receiver<Condition>,
    server_spoke: &AtomicBool,
    turns: &AtomicUsize,
) -> io::Result<()> {
    let mut read = vec![0; 64 * 1024];
    loop {
        let length = from.read(&mut read).await?;
        // Looked at after the read, so that nothing passes that was sent after the cut.
        until_it_passes(&mut condition, |it| *it != Condition::Cut && *it != Condition::Closed).await;
        if length == 0 {
            until_it_passes(&mut condition, |it| *it != Condition::CutInRequest).await;
            return Ok(());
        }
        if server_spoke.swap(false, Ordering::SeqCst) {
            turns.fetch_add(1, Ordering::SeqCst);
        }
        let is_halved = *condition.borrow() == Condition::CutInRequest;
        let (first, second) = read[..length].split_at(if is_halved { length / 2 } else { length });
        to.write_all(first).await?;
        if is_halved {
            until_it_passes(&mut condition, |it| matches!(it, Condition::Open { .. })).await;
            to.write_all(second).await?;
        }
    }
}

/// Until the server closes.
async fn answer(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    mut condition: watch::Receiver<Condition>,
    server_spoke: &AtomicBool,
) -> io::Result<()> {
    let mut on_the_way: VecDeque<(Instant, io::Result<Vec<u8>>)> = VecDeque::new();
    let mut read = vec![0; 64 * 1024];
    loop {
        let arrives = on_the_way.front().map(|(at, _)| *at);
        let speaks = !matches!(on_the_way.back(), Some((_, Err(_))));
        tokio::select! {
            biased;
            // At once where it is due: timers have whole milliseconds only.
            () = until_due(arrives), if arrives.is_some() => {
                until_it_passes(&mut condition, |it| matches!(it, Condition::Open { .. })).await;
                let Some((_, said)) = on_the_way.pop_front() else { continue };
                server_spoke.store(true, Ordering::SeqCst);
                to.write_all(&said?).await?;
            }
            length = from.read(&mut read), if speaks => {
                let said = match length {
                    Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
                    Ok(length) => Ok(read[..length].to_vec()),
                    Err(error) => Err(error),
                };
                let delay = match *condition.borrow() {
                    Condition::Open { delay } => delay,
                    _ => Duration::ZERO,
                };
                on_the_way.push_back((now() + delay, said));
            }
        }
    }
}

async fn until_due(at: Option<Instant>) {
    if let Some(at) = at.filter(|at| *at > now()) {
        sleep_until(at).await;
    }
}
