//! One connection with a server, or those with the nodes of a cluster: batches of commands out, replies and pushes in.

use std::io;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::cluster::ClusterClientBuilder;
use redis::cluster_async::ClusterConnection;
use redis::io::tcp::TcpSettings;
use redis::{
    AsyncConnectionConfig, Client, Cmd, ConnectionAddr, ConnectionInfo, Pipeline, ProtocolVersion, PushInfo,
    RedisError, Value,
};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::refusal::{self, Refusal};
use crate::error::ConnectError;
use crate::redis::Place;

/// How often a cluster's connection tries a command again by itself, after a redirection or a broken connection. We try again as
/// well.
const RETRIES: u32 = 3;

/// What the server said to one command.
pub(super) type Reply = Result<Value, Refusal>;

pub(super) struct Link {
    connection: Connection,
    /// What the server says unasked.
    pub(super) pushes: mpsc::UnboundedReceiver<PushInfo>,
}

#[derive(Clone)]
enum Connection {
    Server(MultiplexedConnection),
    /// Two of them: when a cluster's connection finds its nodes again, it subscribes again to several channels in one command, and
    /// takes what the server says of the second one for the reply to the next command. From then on all replies on it are
    /// those to others; so nothing is asked on the one that listens.
    Cluster {
        asks: ClusterConnection,
        listens: ClusterConnection,
    },
}

impl Link {
    /// Connects and logs in. Nothing is asked of the server yet.
    pub(super) async fn open(place: &Place, limit: Duration) -> Result<Self, ConnectError> {
        use_a_provider();
        let (sender, pushes) = mpsc::unbounded_channel();
        let opened = match place {
            Place::Server(info) => {
                let config = AsyncConnectionConfig::new()
                    .set_connection_timeout(Some(limit))
                    .set_response_timeout(None)
                    .set_push_sender(sender);
                match Client::open(with_pushes(info, limit)) {
                    Ok(client) => client
                        .get_multiplexed_async_connection_with_config(&config)
                        .await
                        .map(Connection::Server),
                    Err(error) => Err(error),
                }
            }
            Place::Cluster(nodes) => {
                let builder = || {
                    ClusterClientBuilder::new(nodes.iter().map(|node| with_pushes(node, limit)))
                        .use_protocol(ProtocolVersion::RESP3)
                        .tcp_settings(settings(limit))
                        .connection_timeout(limit)
                        .response_timeout(limit)
                        .retries(RETRIES)
                        .push_sender(sender.clone())
                };
                match (builder().build(), builder().build()) {
                    (Ok(asks), Ok(listens)) => {
                        tokio::try_join!(asks.get_async_connection(), listens.get_async_connection())
                            .map(|(asks, listens)| Connection::Cluster { asks, listens })
                    }
                    (Err(error), _) | (_, Err(error)) => Err(error),
                }
            }
        };
        match opened {
            Ok(connection) => Ok(Self { connection, pushes }),
            Err(error) => Err(refusal::of_connect(&error)),
        }
    }

    pub(super) const fn is_cluster(&self) -> bool {
        matches!(self.connection, Connection::Cluster { .. })
    }

    /// Sends commands in one write, and gives a reply for each. In a cluster each goes to its node.
    pub(super) async fn send(&mut self, commands: &Pipeline) -> Result<Vec<Reply>, RedisError> {
        match &mut self.connection {
            Connection::Server(connection) => {
                let values = connection.send_packed_commands(commands, 0, commands.len()).await?;
                Ok(values.into_iter().map(Refusal::or_value).collect())
            }
            Connection::Cluster { asks: connection, .. } => {
                let mut sent = JoinSet::new();
                for (nth, command) in commands.cmd_iter().enumerate() {
                    let (mut connection, command) = (connection.clone(), command.clone());
                    sent.spawn(async move { (nth, command.query_async::<Value>(&mut connection).await) });
                }
                let mut replies: Vec<Option<Reply>> = vec![None; commands.len()];
                while let Some(answered) = sent.join_next().await {
                    let (nth, reply) = answered.map_err(io::Error::from)?;
                    replies[nth] = Some(refusal::answered(reply)?);
                }
                // Each has answered: none is missing, or those after it would be taken for others.
                Ok(replies.into_iter().flatten().collect())
            }
        }
    }

    /// As [`send`](Self::send), for one.
    pub(super) async fn ask(&mut self, command: Cmd) -> Result<Option<Reply>, RedisError> {
        Ok(self.send(&batch([command])).await?.pop())
    }

    pub(super) async fn subscribe(&mut self, channels: &[String]) -> Result<(), RedisError> {
        match &mut self.connection {
            Connection::Server(connection) => connection.subscribe(channels).await,
            Connection::Cluster { listens, .. } => listens.subscribe(channels).await,
        }
    }
}

/// Commands to be sent in one write.
pub(super) fn batch(commands: impl IntoIterator<Item = Cmd>) -> Pipeline {
    let mut pipeline = Pipeline::new();
    for command in commands {
        pipeline.add_command(command);
    }
    pipeline
}

/// As whoever made it wanted it, but with pushes on the same connection, and without bytes that are sent on for long after it
/// was given up: a command may be among them.
fn with_pushes(info: &ConnectionInfo, limit: Duration) -> ConnectionInfo {
    let settings_of_server = info.redis_settings().clone().set_protocol(ProtocolVersion::RESP3);
    let info = info.clone().set_redis_settings(settings_of_server);
    match info.addr() {
        ConnectionAddr::Unix(_) => info,
        _ => info.set_tcp_settings(settings(limit)),
    }
}

fn settings(limit: Duration) -> TcpSettings {
    let settings = TcpSettings::default().set_nodelay(true);
    #[cfg(target_os = "linux")]
    let settings = settings.set_user_timeout(limit);
    #[cfg(not(target_os = "linux"))]
    let _ = limit;
    settings
}

/// The client asks for the process's provider of cryptography, and the process may have none.
fn use_a_provider() {
    #[cfg(feature = "tls")]
    if rustls::crypto::CryptoProvider::get_default().is_none() {
        // Somebody else may have been quicker.
        rustls::crypto::ring::default_provider().install_default().ok();
    }
}
