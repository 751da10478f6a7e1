//! How sessions tell each other what was freed, and more: one datagram socket per session, in the sub-directory `peers`.
//!
//! All of it is best effort: a datagram that gets lost costs a standby its poll interval, never correctness.

use std::collections::VecDeque;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::directory;
use crate::options::MAX_IDENTITY_BYTES;
use crate::store::{Call, Event, Freed, Holder, Message, Presence, Seen, text};

/// What was given back, in order or not.
const WORDS: [(&str, bool); 2] = [("freed", true), ("returned", false)];

/// A datagram stays below 1,000 bytes: the word, and for each key a blank and 17 characters at most.
const KEYS_PER_DATAGRAM: usize = 55;
/// Large where that is allowed: a queue holds few datagrams (`net.unix.max_dgram_qlen` is 10 on many systems), and an
/// answer to a roll call may have many names. Elsewhere 2048 bytes is the most (`net.local.dgram.maxdgram`).
const MESSAGE_BYTES: usize =
    if cfg!(any(target_os = "linux", target_os = "android")) { 32_000 } else { 2_000 };
const BUFFER_BYTES: usize = 32 * 1024;
/// How often and how long an answer waits for room in the queue of who has called, in which everybody's answers are.
const TRIES: u32 = 25;
const PAUSE: Duration = Duration::from_millis(2);
/// Bytes of a socket's path, the closing NUL included: `sun_path` of unix(7).
const SOCKET_PATH_BYTES: usize =
    if cfg!(any(target_os = "linux", target_os = "android")) { 108 } else { 104 };
/// `/`, the identity, `-`, 16 digits, and the ending.
const SOCKET_NAME_BYTES: usize = 1 + MAX_IDENTITY_BYTES + 1 + 16 + 5;

/// What sessions that can be sent to are named by. A socket gets this ending when it is ready: one that is just being
/// bound refuses what it is sent, and would be taken for a dead one.
const READY: &str = "sock";

/// The socket of a session before a runtime knows of it.
pub(super) type Idle = UnixDatagram;

/// Opens the socket of a new session. Where it cannot have one of its own, it polls.
pub(super) fn open(directory: &Path, identity: &str) -> io::Result<(Outbox, Inbox<Idle>)> {
    let sender = UnixDatagram::unbound()?;
    sender.set_nonblocking(true)?;
    let mut outbox = Outbox::new(directory.join(directory::PEERS), sender);
    let socket = outbox.bind(identity).map_or_else(
        |error| {
            tracing::warn!(
                peers = %outbox.peers.display(), %error,
                "no socket for wake-ups, so a released lease is noticed at the next poll only; if the path is too \
                 long for a socket, choose a shorter one"
            );
            None
        },
        Some,
    );
    Ok((outbox, Inbox::new(socket)))
}

/// Sends a datagram to a socket made for it, as sessions do to each other's.
pub(super) fn try_out(directory: &Path, identity: &str) -> io::Result<()> {
    let mut outbox = Outbox::new(directory.join(directory::PEERS), UnixDatagram::unbound()?);
    let socket = outbox.bind(identity)?;
    if let Some(own) = &outbox.own {
        outbox.sender.send_to(b"freed", outbox.address.join(own))?;
    }
    // What was sent is there: it need not be waited for.
    socket.recv(&mut [0; 8]).map(drop)
}

/// Sends to the other sessions. Dropped, it removes the name of the own session's socket.
#[derive(Debug)]
pub(super) struct Outbox {
    sender: UnixDatagram,
    peers: PathBuf,
    /// How the sub-directory is written in the address of a socket.
    address: PathBuf,
    /// What `address` goes through, if the path itself is too long.
    handle: Option<File>,
    own: Option<String>,
}

impl Drop for Outbox {
    fn drop(&mut self) {
        if let Some(own) = &self.own {
            let _ = fs::remove_file(self.peers.join(own));
        }
    }
}

impl Outbox {
    fn new(peers: PathBuf, sender: UnixDatagram) -> Self {
        if let Err(error) = directory::make_peers(&peers) {
            tracing::debug!(peers = %peers.display(), %error, "cannot make the directory of the sockets");
        }
        let (address, handle) = address_of(&peers);
        Self { sender, peers, address, handle, own: None }
    }

    /// Gives a new socket, where the name of the present one is gone.
    pub(super) fn renew(&mut self, identity: &str) -> Option<Inbox<Idle>> {
        let own = self.own.as_ref()?;
        if self.peers.join(own).symlink_metadata().is_ok() {
            return None;
        }
        directory::make_peers(&self.peers).ok();
        (self.address, self.handle) = address_of(&self.peers);
        let socket = self.bind(identity).ok()?;
        tracing::warn!(peers = %self.peers.display(), "somebody removed this session's socket: bound a new one");
        Some(Inbox::new(Some(socket)))
    }

    /// Binds a socket under a name that no session has had or will have, so that the name of a dead one can be removed
    /// without a look at whose it is now.
    fn bind(&mut self, identity: &str) -> io::Result<UnixDatagram> {
        let name = format!("{identity}-{:016x}", directory::random());
        let (unready, ready) = (format!("{name}.new"), format!("{name}.{READY}"));
        let socket = UnixDatagram::bind(self.address.join(&unready))?;
        let made_ready = socket
            .set_nonblocking(true)
            .and_then(|()| fs::rename(self.peers.join(&unready), self.peers.join(&ready)));
        if let Err(error) = made_ready {
            let _ = fs::remove_file(self.peers.join(&unready));
            return Err(error);
        }
        self.own = Some(ready);
        Ok(socket)
    }

    /// Tells the other sessions which keys were freed.
    pub(super) fn freed(&self, freed: &[Freed]) {
        let mut datagrams = Vec::new();
        for (word, is_clean) in WORDS {
            let keys: Vec<_> = freed.iter().filter(|it| it.is_clean == is_clean).collect();
            datagrams.extend(keys.chunks(KEYS_PER_DATAGRAM).map(|freed| {
                freed.iter().fold(word.to_owned(), |text, freed| format!("{text} {}", freed.key))
            }));
        }
        self.broadcast(&datagrams, |_| true);
    }

    /// Sends a message to the other sessions, or an answer to who has called. Gives it back if it is for the own
    /// session too. A request to step down goes only to the sessions of the leader's process, if that is named.
    pub(super) fn publish(&self, message: Message, leader: Option<&str>) -> Option<Message> {
        let own = || self.own.clone().unwrap_or_default();
        match message {
            Message::StepDown(_) => {
                let leads = |peer: &str| leader.is_none_or(|leader| is_of(peer, leader));
                self.broadcast(&text::write(&message, MESSAGE_BYTES), leads);
                Some(message)
            }
            Message::RollCall(call) => {
                let message = Message::RollCall(Call { reply_to: own(), ..call });
                self.broadcast(&text::write(&message, MESSAGE_BYTES), |_| true);
                Some(message)
            }
            Message::Present(presence) => {
                let presence = Presence { session: own(), ..presence };
                let caller = presence.call.reply_to.clone();
                let message = Message::Present(presence);
                if caller == own() {
                    return Some(message);
                }
                if is_name_of_a_socket(&caller) {
                    self.answer(&caller, &text::write(&message, MESSAGE_BYTES));
                }
                None
            }
        }
    }

    /// Sends to one session. All answer at once, so a full queue is waited for, a little.
    fn answer(&self, caller: &str, datagrams: &[String]) {
        let address = self.address.join(caller);
        let mut tries = 0;
        for datagram in datagrams {
            while let Err(error) = self.sender.send_to(datagram.as_bytes(), &address) {
                tries += 1;
                if error.kind() != ErrorKind::WouldBlock || tries > TRIES {
                    tracing::debug!(caller, %error, "a roll call could not be answered");
                    return;
                }
                // On the session's own disk thread.
                std::thread::sleep(PAUSE);
            }
        }
    }

    /// Tells of every session that has a socket. Those of dead processes are removed by whoever sends to them.
    pub(super) fn sessions(&self) -> Vec<Seen> {
        let Ok(entries) = fs::read_dir(&self.peers) else { return Vec::new() };
        let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
        let seen = |name: String| {
            // `<identity>-<16 digits>.sock`
            let identity = name.strip_suffix(".sock")?.rsplit_once('-')?.0.to_owned();
            let who = Holder { identity: Some(identity), ..Holder::default() };
            is_name_of_a_socket(&name).then(|| Seen { session: name, who, answers: true, ..Seen::default() })
        };
        names.filter_map(seen).collect()
    }

    fn broadcast(&self, datagrams: &[String], is_meant: impl Fn(&str) -> bool) {
        if datagrams.is_empty() {
            return;
        }
        let entries = match fs::read_dir(&self.peers) {
            Ok(entries) => entries,
            Err(error) => {
                tracing::debug!(peers = %self.peers.display(), %error, "cannot find the other sessions");
                return;
            }
        };
        for entry in entries.flatten() {
            let name = entry.file_name();
            let own = self.own.as_deref().is_some_and(|own| name == *own);
            let ready = Path::new(&name).extension() == Some(OsStr::new(READY));
            // What is no socket refuses as a dead one does, but is not ours to remove.
            let meant = name.to_str().is_none_or(&is_meant);
            if !own && ready && meant && entry.file_type().is_ok_and(|kind| kind.is_socket()) {
                self.send(&name, datagrams);
            }
        }
    }

    fn send(&self, peer: &OsStr, datagrams: &[String]) {
        let address = self.address.join(peer);
        for datagram in datagrams {
            match self.sender.send_to(datagram.as_bytes(), &address) {
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
                    tracing::debug!(?peer, "removing the socket of a session whose process is dead");
                    let _ = fs::remove_file(self.peers.join(peer));
                    return;
                }
                // Its queue is full, most likely: what follows would not fit either.
                Err(error) => {
                    tracing::debug!(?peer, %error, "a session could not be told");
                    return;
                }
            }
        }
    }
}

/// Nothing but a socket beside ours: what comes in a datagram must not lead elsewhere.
fn is_name_of_a_socket(name: &str) -> bool {
    name.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'/')
        && Path::new(name).extension() == Some(OsStr::new(READY))
}

/// Whether a socket is of a session of this process, by its name: see [`Outbox::bind`].
fn is_of(socket: &str, identity: &str) -> bool {
    socket.strip_prefix(identity).and_then(|rest| rest.strip_prefix('-')).is_some_and(|rest| {
        rest.strip_suffix(READY).is_some_and(|random| random.len() == 17 && !random.contains('-'))
    })
}

/// Finds a way to write the sub-directory that leaves room for a socket's name.
fn address_of(peers: &Path) -> (PathBuf, Option<File>) {
    let fits = peers.as_os_str().len() + SOCKET_NAME_BYTES < SOCKET_PATH_BYTES;
    if !fits
        && cfg!(any(target_os = "linux", target_os = "android"))
        && let Ok(handle) = File::open(peers)
    {
        let descriptor = std::os::fd::AsRawFd::as_raw_fd(&handle);
        return (format!("/proc/self/fd/{descriptor}").into(), Some(handle));
    }
    (peers.to_owned(), None)
}

/// Receives what other sessions send.
#[derive(Debug)]
pub(super) struct Inbox<S = tokio::net::UnixDatagram> {
    socket: Option<S>,
    buffer: Box<[u8]>,
}

impl<S> Inbox<S> {
    fn new(socket: Option<S>) -> Self {
        Self { socket, buffer: vec![0; BUFFER_BYTES].into() }
    }
}

impl Inbox<Idle> {
    /// Makes the socket known to the runtime that this is called in.
    pub(super) fn register(self) -> io::Result<Inbox> {
        let socket = self.socket.map(tokio::net::UnixDatagram::from_std).transpose()?;
        Ok(Inbox { socket, buffer: self.buffer })
    }
}

impl Inbox {
    /// Waits for a datagram and adds what it says to `events`. Cancel-safe: nothing is awaited once it was taken out.
    pub(super) async fn receive(&mut self, events: &mut VecDeque<Event>) {
        let Some(socket) = &self.socket else { return std::future::pending().await };
        match socket.recv(&mut self.buffer).await {
            Ok(bytes) => {
                if let Some(read) = parse(&self.buffer[..bytes]) {
                    events.extend(read);
                } else {
                    tracing::debug!(bytes, "ignored a datagram that cannot be read");
                }
            }
            Err(error) => {
                tracing::warn!(%error, "the socket for wake-ups is broken, released leases are noticed by polling");
                self.socket = None;
            }
        }
    }
}

/// Reads a datagram, whole or not at all.
fn parse(datagram: &[u8]) -> Option<Vec<Event>> {
    let datagram = std::str::from_utf8(datagram).ok()?;
    for (word, is_clean) in WORDS {
        if let Some(keys) = datagram.strip_prefix(word).and_then(|rest| rest.strip_prefix(' ')) {
            let freed = |key| text::read_key(key).map(|key| Event::Freed(Freed { key, is_clean }));
            return keys.split(' ').map(freed).collect();
        }
    }
    Some(vec![Event::Message(text::read(datagram)?)])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::name::{Key, Kind};

    fn shown(datagram: &[u8]) -> Option<String> {
        parse(datagram).map(|events| format!("{events:?}"))
    }

    #[test]
    fn datagrams_are_read_whole_or_not_at_all() {
        assert_eq!(
            shown(b"freed 00000000000000ff ffffffffffffffff").unwrap(),
            "[Freed(Freed { key: Key(00000000000000ff), is_clean: true }), \
             Freed(Freed { key: Key(ffffffffffffffff), is_clean: true })]"
        );
        assert_eq!(
            shown(b"step-down 0000000000000001").unwrap(),
            "[Message(StepDown(Key(0000000000000001)))]"
        );
        for malformed in [
            "",
            "hello 00000000000000ff",
            "freed",
            "freed ",
            "freed ff",
            "freed 00000000000000ff ",
            "freed 00000000000000ff x",
            "freed +0000000000000fg",
            "step-down",
        ] {
            assert_eq!(shown(malformed.as_bytes()), None, "{malformed:?}");
        }
        assert_eq!(shown(b"freed \xff\xfe"), None);
    }

    /// F-37: whoever leads when the request is made is asked, and nobody who leads later.
    #[test]
    fn a_message_to_one_process_goes_to_its_sessions_only() {
        let dir = tempfile::tempdir().unwrap();
        let (sender, _own) = open(dir.path(), "sender").unwrap();
        let names = ["a", "a", "a-b", "ab", "b"];
        let opened = names.map(|identity| open(dir.path(), identity).unwrap());
        sender.publish(Message::StepDown(Key::of(Kind::Lease, "x")), Some("a"));
        let mut buffer = [0; 1024];
        let told =
            opened.each_ref().map(|(_, inbox)| inbox.socket.as_ref().unwrap().recv(&mut buffer).is_ok());
        assert_eq!(told, [true, true, false, false, false]);
    }

    #[test]
    fn many_freed_keys_are_split_into_datagrams_below_1000_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let (sender, _) = open(dir.path(), "sender").unwrap();
        let (_receiver, inbox) = open(dir.path(), "receiver").unwrap();
        let key = |i: u32| Key::of(Kind::Lease, crate::Name::key_pair(1, i.cast_signed()));
        let freed: Vec<_> = (0..150).map(|i| Freed { key: key(i), is_clean: i < 100 }).collect();
        sender.freed(&freed);

        let mut read = Vec::new();
        let mut buffer = [0; 1024];
        while let Ok(bytes) = inbox.socket.as_ref().unwrap().recv(&mut buffer) {
            assert!(bytes < 1000, "{bytes}");
            read.extend(parse(&buffer[..bytes]).unwrap());
        }
        let expected: Vec<_> = freed.into_iter().map(Event::Freed).collect();
        assert_eq!(format!("{read:?}"), format!("{expected:?}"));
    }

    #[test]
    fn only_dead_sockets_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let (sender, _inbox) = open(dir.path(), "same").unwrap();
        let (_alive, _alive_inbox) = open(dir.path(), "same").unwrap();
        let peers = dir.path().join(directory::PEERS);
        drop(UnixDatagram::bind(peers.join("dead.sock")).unwrap());
        drop(UnixDatagram::bind(peers.join("being-bound.new")).unwrap());
        fs::write(peers.join("no-socket.sock"), "").unwrap();

        sender.freed(&[Freed { key: Key::of(Kind::Lease, "x"), is_clean: true }]);
        let mut left: Vec<_> = fs::read_dir(&peers)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        left.sort();
        assert_eq!(left.len(), 4, "{left:?}");
        assert_eq!(left[..2], ["being-bound.new", "no-socket.sock"]);
        assert!(left[2..].iter().all(|name| name.starts_with("same-")), "{left:?}");
    }
}
