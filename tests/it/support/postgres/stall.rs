//! A server that falls silent while a client connects.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

/// A relay to a server that lets pass so many bytes of the server's answers, of all connections together. Then nothing
/// passes any more, in either direction, and nobody is told; a client that comes later is let in and hears nothing.
pub(crate) struct Stall {
    address: SocketAddr,
    line: Arc<Line>,
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

struct Line {
    target: (String, u16),
    /// How many bytes may still pass.
    left: AtomicUsize,
    /// How many have passed.
    passed: AtomicUsize,
    /// Clients whose sockets are open.
    open: AtomicUsize,
    /// Clients that there have been.
    clients: AtomicUsize,
}

impl Stall {
    pub(crate) fn after(bytes: usize, host: &str, port: u16) -> Self {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let line = Arc::new(Line {
            target: (host.to_owned(), port),
            left: AtomicUsize::new(bytes),
            passed: AtomicUsize::new(0),
            open: AtomicUsize::new(0),
            clients: AtomicUsize::new(0),
        });
        let (stop, stopped) = tokio::sync::oneshot::channel();
        let known = Arc::clone(&line);
        let thread = thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let listener = TcpListener::from_std(listener).unwrap();
                let mut clients = JoinSet::new();
                let accept = async {
                    while let Ok((client, _)) = listener.accept().await {
                        known.open.fetch_add(1, Ordering::SeqCst);
                        known.clients.fetch_add(1, Ordering::SeqCst);
                        let line = Arc::clone(&known);
                        clients.spawn(async move {
                            line.serve(client).await;
                            line.open.fetch_sub(1, Ordering::SeqCst);
                        });
                    }
                };
                tokio::select! {
                    () = accept => {}
                    _ = stopped => {}
                }
                clients.shutdown().await;
            });
        });
        Self { address, line, stop: Some(stop), thread: Some(thread) }
    }

    pub(crate) const fn port(&self) -> u16 {
        self.address.port()
    }

    /// How many bytes of the server's answers have passed.
    pub(crate) fn passed(&self) -> usize {
        self.line.passed.load(Ordering::SeqCst)
    }

    /// Somebody has come, and nothing passes any more.
    pub(crate) fn has_stalled(&self) -> bool {
        self.line.has_fallen_silent() && self.line.clients.load(Ordering::SeqCst) > 0
    }

    /// How many clients have not closed their sockets.
    pub(crate) fn open(&self) -> usize {
        self.line.open.load(Ordering::SeqCst)
    }
}

impl Line {
    fn has_fallen_silent(&self) -> bool {
        self.left.load(Ordering::SeqCst) == 0
    }

    /// Until the client closes its socket, or the server does before it falls silent.
    async fn serve(&self, mut client: TcpStream) {
        // Its side stays open as long as the client's.
        let mut server = None;
        if !self.has_fallen_silent() {
            let Ok(connected) = TcpStream::connect((self.target.0.as_str(), self.target.1)).await else {
                return;
            };
            self.relay(&mut client, server.insert(connected)).await.ok();
            if !self.has_fallen_silent() {
                return;
            }
        }
        while matches!(client.read(&mut [0; 4096]).await, Ok(1..)) {}
    }

    async fn relay(&self, client: &mut TcpStream, server: &mut TcpStream) -> io::Result<()> {
        let (mut question, mut answer) = ([0; 4096], [0; 4096]);
        loop {
            tokio::select! {
                read = client.read(&mut question) => match read? {
                    1.. if self.has_fallen_silent() => return Ok(()),
                    read @ 1.. => server.write_all(&question[..read]).await?,
                    0 => return Ok(()),
                },
                read = server.read(&mut answer) => {
                    // One thread serves all: nobody changes it in between.
                    let left = self.left.load(Ordering::SeqCst);
                    let passing = read?.min(left);
                    if passing == 0 {
                        return Ok(());
                    }
                    self.left.store(left - passing, Ordering::SeqCst);
                    self.passed.fetch_add(passing, Ordering::SeqCst);
                    client.write_all(&answer[..passing]).await?;
                }
            }
        }
    }
}

impl Drop for Stall {
    fn drop(&mut self) {
        self.stop.take();
        if let Some(thread) = self.thread.take() {
            thread.join().ok();
        }
    }
}
