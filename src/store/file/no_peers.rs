//! Where there are no datagram sockets on paths, sessions poll and nothing is pushed.

use std::collections::VecDeque;
use std::io;
use std::marker::PhantomData;
use std::path::Path;

use crate::store::{Event, Freed, Message, Seen};

#[derive(Debug)]
pub(super) struct Idle;
#[derive(Debug)]
pub(super) struct Registered;

#[derive(Debug)]
pub(super) struct Outbox;

#[derive(Debug)]
pub(super) struct Inbox<S = Registered>(PhantomData<S>);

#[expect(clippy::unnecessary_wraps, reason = "the interface of the other platforms")]
pub(super) fn open(_: &Path, _: &str) -> io::Result<(Outbox, Inbox<Idle>)> {
    Ok((Outbox, Inbox(PhantomData)))
}

pub(super) fn try_out(_: &Path, _: &str) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

#[expect(clippy::unused_self, reason = "the interface of the other platforms")]
impl Outbox {
    pub(super) fn renew(&mut self, _: &str) -> Option<Inbox<Idle>> {
        None
    }

    pub(super) fn freed(&self, _: &[Freed]) {}

    pub(super) fn publish(&self, message: Message, _: Option<&str>) -> Option<Message> {
        Some(message)
    }

    pub(super) fn sessions(&self) -> Vec<Seen> {
        Vec::new()
    }
}

impl Inbox<Idle> {
    #[expect(clippy::unused_self, clippy::unnecessary_wraps, reason = "the interface of the other platforms")]
    pub(super) fn register(self) -> io::Result<Inbox> {
        Ok(Inbox(PhantomData))
    }
}

impl Inbox {
    pub(super) async fn receive(&mut self, _: &mut VecDeque<Event>) {
        std::future::pending::<()>().await;
    }
}
