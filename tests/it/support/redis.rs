//! Redis servers of the tests' own, which they may break.
//!
//! A [`Server`] is a real one on a free port of the loopback interface, with its data in a temporary folder. It is gone at
//! the end of the test, however that ends: as those of PostgreSQL, it has a keeper (see `kept.rs`).
//!
//! One for each test: what is published reaches the clients of every database of a server, and a start takes some 10 ms.
//! One that is a cluster takes two seconds: so long a node holds back after it has started.
//!
//! The kit comes as a user of its own, `kit`, who needs no password and may do everything, so that the tests can take
//! rights from all others.

mod monitor;
mod proxy;

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::path::Path;
#[cfg(feature = "tls")]
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use redis::{Connection, FromRedisValue, IntoConnectionInfo as _, RedisResult};
use rustix::process::Signal;
use tempfile::TempDir;

pub(crate) use self::monitor::Monitor;
pub(crate) use self::proxy::Proxy;
use super::kept::{Kept, ServerLog, send};
use super::programs::{self, free_port};

/// In the log of a server that has its data.
const READY: &str = "Ready to accept connections";
/// In the log of one whose port is taken.
const FAILED: &str = "Failed listening on";
/// In the log of a node of a cluster: it takes commands, as all slots are served.
const SERVES: &str = "Cluster state changed: ok";
/// In the log of a replica that has the data of its primary.
const SYNCHRONIZED: &str = "sync: Finished with success";

/// Longest wait for an answer.
const LIMIT: Duration = Duration::from_secs(10);

/// What each server is started with. It logs to standard output; the keeper reads standard error.
const LOGGED: &str = r#"exec "$0" "$@" >&2"#;

/// The kit's own user.
const KIT: [&str; 7] = ["--user", "kit", "on", "nopass", "~*", "&*", "+@all"];

/// Of the port for TLS, in the settings.
#[cfg(feature = "tls")]
const TLS_PORT: &str = "--tls-port";

/// What a pause holds back.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Pause {
    /// Every command of every client, the kit's too.
    All,
    /// What writes or may write: scripts and PUBLISH, too.
    Writes,
}

/// What is left of the data at a restart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Data {
    /// All that was acknowledged, where the server is a [durable](Server::durable) one.
    Kept,
    Lost,
}

/// A server of the test's own.
pub(crate) struct Server {
    // In the order of their end.
    admin: Mutex<Option<Connection>>,
    /// Ends a pause of everything.
    unpausing: Mutex<Option<Connection>>,
    process: Option<Kept>,
    /// A replica's, to its primary.
    line: Option<Proxy>,
    dir: TempDir,
    port: u16,
    settings: Vec<String>,
    /// The addresses of the kit's connections.
    own: Arc<Mutex<HashSet<String>>>,
    log: ServerLog,
}

impl Server {
    /// An empty server, which keeps nothing on disk.
    pub(crate) fn start() -> Self {
        Self::with(&[])
    }

    /// A server with these words on its command line (`["--maxmemory", "1mb"]`).
    pub(crate) fn with(settings: &[&str]) -> Self {
        Self::launch(programs::folder(), settings, Vec::new)
    }

    /// A server that has on disk all that it acknowledges.
    pub(crate) fn durable() -> Self {
        Self::with(&["--appendonly", "yes", "--appendfsync", "always"])
    }

    /// A cluster of one node, which serves all slots.
    pub(crate) fn cluster() -> Self {
        let server = Self::node();
        server.ask::<()>(&["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]);
        server.wait_for(SERVES);
        server
    }

    /// A cluster of two nodes: the first has the slots below 8192.
    pub(crate) fn cluster_of_two() -> [Self; 2] {
        let nodes = [Self::node(), Self::node()];
        for (node, [from, to]) in nodes.iter().zip([["0", "8191"], ["8192", "16383"]]) {
            node.ask::<()>(&["CLUSTER", "ADDSLOTSRANGE", from, to]);
        }
        let (port, bus) = (nodes[1].port.to_string(), nodes[1].config("cluster-port"));
        nodes[0].ask::<()>(&["CLUSTER", "MEET", "127.0.0.1", &port, &bus]);
        for node in &nodes {
            node.wait_for(SERVES);
        }
        nodes
    }

    /// A node of a cluster that has no slots yet, and so answers CLUSTERDOWN.
    pub(crate) fn node() -> Self {
        let settings = ["--cluster-enabled", "yes", "--cluster-announce-ip", "127.0.0.1"];
        // By default it is 10,000 above the other one, which may be out of range.
        let bus = || vec!["--cluster-port".to_owned(), free_port().to_string()];
        Self::launch(programs::folder(), &settings, bus)
    }

    /// A server that speaks TLS on a port of its own, as `localhost`, with a [certificate](Self::certificate) that it
    /// signed itself; and without, on the other one.
    #[cfg(feature = "tls")]
    pub(crate) fn tls() -> Self {
        let dir = programs::folder();
        let (key, certificate) = (dir.path().join("server.key"), dir.path().join("server.crt"));
        programs::certificate(&key, &certificate);
        let file = |path: &Path| path.to_str().expect("a temporary folder's name is text").to_owned();
        let (key, certificate) = (file(&key), file(&certificate));
        let files =
            ["--tls-cert-file", &certificate, "--tls-key-file", &key, "--tls-ca-cert-file", &certificate];
        let settings = [&files[..], &["--tls-auth-clients", "no"]].concat();
        Self::launch(dir, &settings, || vec![TLS_PORT.to_owned(), free_port().to_string()])
    }

    /// The certificate of a server [with TLS](Self::tls), which is its own authority.
    #[cfg(feature = "tls")]
    pub(crate) fn certificate(&self) -> PathBuf {
        self.dir.path().join("server.crt")
    }

    /// The URL of a server [with TLS](Self::tls).
    #[cfg(feature = "tls")]
    pub(crate) fn tls_url(&self) -> String {
        let at = self.settings.iter().position(|word| word == TLS_PORT).expect("the server has TLS");
        format!("rediss://localhost:{}", self.settings[at + 1])
    }

    /// A replica of a server, with its data, on a line that can be [cut](Self::cut_replication).
    pub(crate) fn replica_of(primary: &Self) -> Self {
        let mut replica = Self::start();
        let line = Proxy::to(primary.port);
        // By command, not by setting: then it connects at once, and not at the next full second.
        replica.ask::<()>(&["CONFIG", "SET", "masteruser", "kit", "masterauth", "kit"]);
        replica.ask::<()>(&["REPLICAOF", "127.0.0.1", &line.port().to_string()]);
        replica.line = Some(line);
        replica.wait_for(SYNCHRONIZED);
        // The primary has been told so, too, and sends it what is written: before that an acknowledgement takes up to a second.
        primary.ask::<()>(&["SET", "replicated", "1"]);
        primary.ask::<u32>(&["DEL", "replicated"]);
        assert!(primary.wait(1, LIMIT) >= 1, "the primary knows of no replica");
        replica
    }

    fn launch(dir: TempDir, settings: &[&str], ports: impl Fn() -> Vec<String>) -> Self {
        let log = ServerLog::default();
        // Another process may take a port between the look and the start.
        for _ in 0..5 {
            let port = free_port();
            let settings: Vec<_> = settings.iter().map(|&it| it.to_owned()).chain(ports()).collect();
            let server = Self::run(dir.path(), port, &settings, &log);
            if server.is_up(READY, FAILED) {
                let (admin, unpausing, own) = Default::default();
                return Self {
                    admin,
                    unpausing,
                    process: Some(server),
                    line: None,
                    dir,
                    port,
                    settings,
                    own,
                    log,
                };
            }
            // Its folder must stay.
            server.leave();
        }
        log.print("redis");
        panic!("the server does not start");
    }

    fn run(dir: &Path, port: u16, settings: &[String], log: &ServerLog) -> Kept {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", LOGGED]).arg(programs::redis());
        command.args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--dir"]).arg(dir);
        command.args(["--save", "", "--enable-debug-command", "yes"]);
        // A replica is served at once.
        command.args(["--repl-diskless-sync-delay", "0"]).args(KIT).args(settings);
        // There is nothing to do in order.
        Kept::start(&command, Signal::KILL, dir, log)
    }

    #[track_caller]
    fn wait_for(&self, text: &str) {
        let server = self.process.as_ref().expect("the server runs");
        assert!(server.is_up(text, "# Bye bye"), "the server has ended");
    }

    pub(crate) const fn port(&self) -> u16 {
        self.port
    }

    /// Without user and password.
    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    pub(crate) fn url_of(&self, user: &str, password: &str) -> String {
        format!("redis://{user}:{password}@127.0.0.1:{}", self.port)
    }

    pub(crate) fn client(&self) -> redis::Client {
        redis::Client::open(self.url()).unwrap()
    }

    pub(crate) fn log(&self) -> &ServerLog {
        &self.log
    }

    pub(crate) fn pid(&self) -> i32 {
        self.process.as_ref().expect("the server runs").pid
    }

    /// A connection for plain commands, as the kit's user.
    pub(crate) fn connect(&self) -> RedisResult<Connection> {
        let settings = redis::RedisConnectionInfo::default().set_username("kit").set_password("kit");
        let target = self.url().into_connection_info()?.set_redis_settings(settings);
        let mut connection = redis::Client::open(target)?.get_connection_with_timeout(LIMIT)?;
        connection.set_read_timeout(Some(LIMIT))?;
        let info: String = redis::cmd("CLIENT").arg("INFO").query(&mut connection)?;
        let address = info.split(' ').find_map(|word| word.strip_prefix("addr=")).expect("it has an address");
        self.own.lock().unwrap().insert(address.to_owned());
        Ok(connection)
    }

    /// Runs a command on the kit's own connection, which it makes anew when the server was away.
    pub(crate) fn try_ask<T: FromRedisValue>(&self, words: &[&str]) -> RedisResult<T> {
        let mut admin = self.admin.lock().unwrap();
        loop {
            let is_old = admin.is_some();
            let mut connection = match admin.take() {
                Some(connection) => connection,
                None => self.connect()?,
            };
            let answer = command(words).query(&mut connection);
            match answer {
                Err(error) if error.is_io_error() && is_old && !error.is_timeout() => {}
                Err(error) if error.is_io_error() => return Err(error),
                _ => {
                    *admin = Some(connection);
                    return answer;
                }
            }
        }
    }

    /// As [`try_ask`](Self::try_ask); it must succeed.
    #[track_caller]
    pub(crate) fn ask<T: FromRedisValue>(&self, words: &[&str]) -> T {
        self.try_ask(words).unwrap_or_else(|error| panic!("{words:?}: {error}"))
    }

    /// The keys that match a pattern, in order.
    pub(crate) fn keys(&self, pattern: &str) -> Vec<String> {
        let mut keys: Vec<String> = self.ask(&["KEYS", pattern]);
        keys.sort_unstable();
        keys
    }

    /// A string's value.
    pub(crate) fn get(&self, key: &str) -> Option<Vec<u8>> {
        self.ask(&["GET", key])
    }

    /// How long a key still lives. `None` where there is none, or it lives for ever.
    pub(crate) fn pttl(&self, key: &str) -> Option<Duration> {
        u64::try_from(self.ask::<i64>(&["PTTL", key])).ok().map(Duration::from_millis)
    }

    /// A setting.
    pub(crate) fn config(&self, name: &str) -> String {
        let [_, value]: [String; 2] = self.ask::<Vec<String>>(&["CONFIG", "GET", name]).try_into().unwrap();
        value
    }

    pub(crate) fn config_set(&self, name: &str, value: &str) {
        self.ask::<()>(&["CONFIG", "SET", name, value]);
    }

    /// A field of INFO.
    #[track_caller]
    pub(crate) fn info(&self, field: &str) -> String {
        let text: String = self.ask(&["INFO", "everything"]);
        let value = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
        value.unwrap_or_else(|| panic!("INFO has no {field}")).to_owned()
    }

    /// Waits until so many replicas have all that was written, and tells how many they are.
    pub(crate) fn wait(&self, replicas: u32, limit: Duration) -> u32 {
        self.ask(&["WAIT", &replicas.to_string(), &limit.as_millis().to_string()])
    }

    /// A user with these rights (`["~job:*", "+@all", "-info"]`); an earlier one of that name is no more.
    pub(crate) fn user(&self, name: &str, password: &str, rights: &[&str]) {
        let password = format!(">{password}");
        self.ask::<()>(&[&["ACL", "SETUSER", name, "reset", "on", &password], rights].concat());
    }

    /// Forgets all scripts.
    pub(crate) fn script_flush(&self) {
        self.ask::<()>(&["SCRIPT", "FLUSH", "SYNC"]);
    }

    /// Holds commands back for so long, or until [`unpause`](Self::unpause). Afterwards they are carried out, also for
    /// those who wait no longer, as long as their connection is open.
    pub(crate) fn pause(&self, what: Pause, duration: Duration) {
        // In a pause of everything only those are heard who follow the commands of the others.
        let mut exempt = self.connect().unwrap();
        exempt.send_packed_command(&redis::cmd("MONITOR").get_packed_command()).unwrap();
        exempt.recv_response().unwrap();
        *self.unpausing.lock().unwrap() = Some(exempt);
        let what = match what {
            Pause::All => "ALL",
            Pause::Writes => "WRITE",
        };
        self.ask::<()>(&["CLIENT", "PAUSE", &duration.as_millis().to_string(), what]);
    }

    /// Ends a [pause](Self::pause).
    pub(crate) fn unpause(&self) {
        let mut exempt = self.unpausing.lock().unwrap().take().expect("there is a pause");
        exempt.send_packed_command(&redis::cmd("CLIENT").arg("UNPAUSE").get_packed_command()).unwrap();
        // What comes first are the commands of the others; its own is the last one to come.
        let is_done = |line: &redis::Value| matches!(line, redis::Value::Okay);
        while !is_done(&exempt.recv_response().unwrap()) {}
    }

    /// Halts the process: it answers nobody until it [goes on](Self::cont).
    pub(crate) fn stop(&self) {
        send(self.pid(), Signal::STOP);
    }

    pub(crate) fn cont(&self) {
        send(self.pid(), Signal::CONT);
    }

    /// The process dies.
    pub(crate) fn kill(&mut self) {
        let server = self.process.take().expect("the server runs");
        server.signal(Signal::KILL);
        server.leave();
    }

    /// Starts it again on the same port.
    pub(crate) async fn start_again(&mut self, data: Data) {
        self.begin(data, &[]);
        self.process.as_ref().unwrap().up(READY).await;
    }

    /// Kills and starts it.
    pub(crate) async fn restart(&mut self, data: Data) {
        self.kill();
        self.start_again(data).await;
    }

    /// Kills and starts it, so that it is loading its data (LOADING) until [`loaded`](Self::loaded), for ten
    /// seconds at most. Not a [durable](Self::durable) one, which looks for clients too seldom meanwhile.
    pub(crate) fn restart_slowly(&mut self) {
        for n in 0..2000 {
            self.ask::<()>(&["SET", &format!("ballast:{n}"), &"x".repeat(100)]);
        }
        self.ask::<()>(&["SAVE"]);
        self.kill();
        // It looks for clients once in so many bytes, and takes so many microseconds for a key.
        self.begin(
            Data::Kept,
            &["--loading-process-events-interval-bytes", "1024", "--key-load-delay", "5000"],
        );
        self.wait_for("Loading RDB");
    }

    /// The rest is loaded at once; when it has all, it is ready.
    pub(crate) async fn loaded(&self) {
        self.config_set("key-load-delay", "0");
        self.process.as_ref().unwrap().up(READY).await;
        self.ask::<()>(&["EVAL", "for n = 0, 1999 do redis.call('DEL', 'ballast:' .. n) end", "0"]);
    }

    fn begin(&mut self, data: Data, further: &[&str]) {
        assert!(self.process.is_none(), "the server runs");
        if data == Data::Lost {
            fs::remove_dir_all(self.dir.path().join("appendonlydir")).ok();
            fs::remove_file(self.dir.path().join("dump.rdb")).ok();
        }
        let mut settings = self.settings.clone();
        settings.extend(further.iter().map(|&it| it.to_owned()));
        self.process = Some(Self::run(self.dir.path(), self.port, &settings, &self.log));
    }

    /// The clients, each as what CLIENT LIST tells (`id`, `addr`, `name`, `db`, `sub`, `cmd`, `user`); not the kit's.
    pub(crate) fn clients(&self) -> Vec<BTreeMap<String, String>> {
        let text: String = self.ask(&["CLIENT", "LIST"]);
        let fields = |line: &str| {
            let fields = line.split(' ').filter_map(|field| field.split_once('='));
            fields.map(|(name, value)| (name.to_owned(), value.to_owned())).collect::<BTreeMap<_, _>>()
        };
        text.lines().map(fields).filter(|client| client["user"] != "kit").collect()
    }

    /// How many clients have a name that begins so.
    pub(crate) fn clients_named(&self, prefix: &str) -> usize {
        self.clients().iter().filter(|client| client["name"].starts_with(prefix)).count()
    }

    /// Ends the connections of the clients with a name that begins so; tells how many they were.
    pub(crate) fn kill_clients_named(&self, prefix: &str) -> usize {
        let all = self.clients();
        let named = all.iter().filter(|client| client["name"].starts_with(prefix));
        // One may have gone meanwhile.
        named.map(|client| self.ask::<usize>(&["CLIENT", "KILL", "ID", &client["id"]])).sum()
    }

    /// Ends the connections of a type (`normal`, `pubsub`, `replica`, `master`), but the kit's; tells how many they were.
    pub(crate) fn kill_clients_of_type(&self, kind: &str) -> usize {
        let listed: String = self.ask(&["CLIENT", "LIST", "TYPE", kind]);
        let is_kits = |line: &str| line.contains(" user=kit ") && kind != "replica";
        let ids = listed.lines().filter(|line| !is_kits(line)).filter_map(|line| {
            let id = line.split(' ').next()?.strip_prefix("id=")?;
            Some(self.ask::<usize>(&["CLIENT", "KILL", "ID", id]))
        });
        ids.sum()
    }

    /// Follows the commands of all clients from now on.
    pub(crate) fn monitor(&self) -> Monitor {
        Monitor::new(self)
    }

    /// From now on nothing that the primary writes reaches this replica, and nobody is told.
    pub(crate) fn cut_replication(&self) {
        self.line.as_ref().expect("it is a replica").cut();
    }

    pub(crate) fn heal_replication(&self) {
        self.line.as_ref().expect("it is a replica").heal();
    }

    /// Makes a primary of a replica, as it stands.
    pub(crate) fn promote(&self) {
        self.ask::<()>(&["REPLICAOF", "NO", "ONE"]);
    }

    /// Makes a replica of a primary, which forgets what it had; that begins at once, and ends some time later.
    pub(crate) fn demote(&self, primary: &Self) {
        self.ask::<()>(&["CONFIG", "SET", "masteruser", "kit", "masterauth", "kit"]);
        self.ask::<()>(&["REPLICAOF", "127.0.0.1", &primary.port.to_string()]);
    }
}

/// A command of these words.
fn command(words: &[&str]) -> redis::Cmd {
    let mut command = redis::Cmd::new();
    for word in words {
        command.arg(word);
    }
    command
}
