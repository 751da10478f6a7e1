//! PostgreSQL servers of the tests' own, which they may break.
//!
//! A [`Cluster`] is a real server on a free port of the loopback interface, with its socket and data in a temporary
//! folder. It is gone at the end of the test: when it is dropped, in a panic as well; and when the test process is
//! killed, since the server has a keeper that waits for the end of a pipe to it (see `../kept.rs`). What stays then, is
//! the folder of a server that had been stopped.
//!
//! What needs no power over the server uses a [`Database`]: one of a server of its own, or, if the variable
//! `LEASEHOLD_TEST_POSTGRES` has a URL, a new one on that server.

mod admin;
mod bouncer;
mod host;
mod proxy;
mod stall;
#[cfg(target_os = "linux")]
mod traced;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use leasehold::Key;
use rustix::process::Signal;
use sqlx::postgres::PgConnectOptions;
use sqlx::{Connection as _, PgConnection};
use tempfile::TempDir;

pub(crate) use self::admin::{Admin, Rows};
pub(crate) use self::bouncer::{Mode as PoolMode, PgBouncer};
pub(crate) use self::host::RemoteHost;
pub(crate) use self::proxy::Proxy;
pub(crate) use self::stall::Stall;
#[cfg(target_os = "linux")]
pub(crate) use self::traced::Traced;
pub(crate) use super::kept::ServerLog;
use super::kept::{self, Kept, send};
use super::programs::{self, free_port};

const READY: &str = "database system is ready to accept";
/// The last line of a server that could not start.
const FAILED: &str = "database system is shut down";

/// Copies the data of a running server, but for what is of that run: the log of transactions is streamed afterwards.
/// Files that vanish or change meanwhile, which is what code 1 says, are made good by that log.
const COPY: &str = r#"
set -e
tar -cf "$2/data.tar" -C "$1" --exclude='data/pg_wal/*' --exclude='data/postmaster.*' --exclude='data/pg_stat_tmp/*' \
    --exclude='pg_internal.init*' data || [ $? = 1 ]
tar -xpf "$2/data.tar" -C "$2"
rm "$2/data.tar"
"#;

/// How a server is told to stop.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Stop {
    /// Ends its sessions, and then itself in order.
    Fast,
    /// Dies at once; the next start recovers.
    Immediate,
}

/// How the server lets clients in that come by TCP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Login {
    Trust,
    Scram,
}

/// A server of the test's own.
pub(crate) struct Cluster {
    // In the order of their end.
    admin: Admin,
    server: Option<Kept>,
    dir: TempDir,
    port: u16,
    settings: Vec<String>,
    log: ServerLog,
}

impl Cluster {
    pub(crate) fn new() -> Self {
        Self::with(Login::Trust, &[])
    }

    /// A server with these settings (`max_connections=20`), beside those that make it quick.
    pub(crate) fn with(login: Login, settings: &[&str]) -> Self {
        Self::on(Self::folder(login), settings)
    }

    /// A server that speaks TLS too, as `localhost`, with a [certificate](Self::certificate) that it signed itself.
    #[cfg(feature = "tls")]
    pub(crate) fn with_tls() -> Self {
        let dir = Self::folder(Login::Trust);
        // Where a server looks for them.
        let (key, certificate) = (dir.path().join("data/server.key"), dir.path().join("data/server.crt"));
        programs::certificate(&key, &certificate);
        Self::on(dir, &["ssl=on"])
    }

    /// The certificate of a server [with TLS](Self::with_tls), which is its own authority.
    #[cfg(feature = "tls")]
    pub(crate) fn certificate(&self) -> PathBuf {
        self.dir.path().join("data/server.crt")
    }

    /// The folder of a new server, with its data in it.
    fn folder(login: Login) -> TempDir {
        let dir = programs::folder();
        // As root it keeps the owner.
        programs::run(Command::new("cp").arg("-Rp").arg(template()).arg(dir.path().join("data")));
        let method = if login == Login::Scram { "scram-sha-256" } else { "trust" };
        let hba = format!(
            "local all all trust\nlocal replication all trust\nhost all all 127.0.0.1/32 {method}\n\
             host all all 198.18.0.0/15 {method}\n\
             host replication all 127.0.0.1/32 trust\n"
        );
        fs::write(dir.path().join("data/pg_hba.conf"), hba).unwrap();
        dir
    }

    /// A hot standby of a server, which streams from it.
    ///
    /// Not by `pg_basebackup`, which not every build of the server brings along.
    pub(crate) fn standby_of(primary: &Self) -> Self {
        let dir = programs::folder();
        // As PostgreSQL names them since version 15, and before.
        let (start, stop) = if primary.admin.one::<i32>("SHOW server_version_num") >= 150_000 {
            ("pg_backup_start('standby', true)", "pg_backup_stop(false)")
        } else {
            ("pg_start_backup('standby', true, false)", "pg_stop_backup(false, false)")
        };
        primary.admin.sql(&format!("SELECT {start}"));
        let mut copy = programs::command("/bin/sh");
        copy.args(["-c", COPY, "copy"]).arg(primary.dir.path()).arg(dir.path());
        programs::run(&mut copy);
        let label: String = primary.admin.one(&format!("SELECT labelfile FROM {stop}"));
        programs::write(&dir.path().join("data/backup_label"), &label);
        programs::write(&dir.path().join("data/standby.signal"), "");
        let from = format!(
            "primary_conninfo=host={} port={} user=postgres",
            primary.dir.path().display(),
            primary.port
        );
        Self::on(dir, &[&from])
    }

    fn on(dir: TempDir, settings: &[&str]) -> Self {
        let settings: Vec<String> = settings.iter().map(|&it| it.to_owned()).collect();
        let log = ServerLog::default();
        // Another process may take the port between the look and the start.
        for _ in 0..5 {
            let port = free_port();
            let server =
                Kept::start(&Self::command(dir.path(), port, &settings), Signal::QUIT, dir.path(), &log);
            if server.is_up(READY, FAILED) {
                let admin = Admin::new(Self::local(dir.path(), port));
                return Self { admin, server: Some(server), dir, port, settings, log };
            }
            // Its folder must stay.
            server.leave();
        }
        log.print("server");
        panic!("the server does not start");
    }

    fn command(dir: &Path, port: u16, settings: &[String]) -> Command {
        let mut command = Command::new(Self::program("postgres"));
        command.arg("-D").arg(dir.join("data"));
        let quick = ["fsync=off", "full_page_writes=off", "autovacuum=off", "jit=off", "shared_buffers=16MB"];
        let logged = ["log_connections=on", "log_disconnections=on", "log_line_prefix=%p %a: "];
        let here = ["listen_addresses=127.0.0.1"];
        for setting in quick.into_iter().chain(logged).chain(here).chain(settings.iter().map(String::as_str))
        {
            command.arg("-c").arg(setting);
        }
        command
            .arg("-c")
            .arg(format!("port={port}"))
            .arg("-c")
            .arg(format!("unix_socket_directories={}", dir.display()));
        command
    }

    /// By the socket, as the superuser.
    fn local(dir: &Path, port: u16) -> PgConnectOptions {
        let options = PgConnectOptions::new_without_pgpass().socket(dir).port(port);
        options.username("postgres").database("postgres").application_name("tests")
    }

    /// Where a program of the server's package is.
    pub(crate) fn program(name: &str) -> PathBuf {
        programs::postgres(name)
    }

    pub(crate) const fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    pub(crate) fn log(&self) -> &ServerLog {
        &self.log
    }

    /// The URL by TCP. A password only if it is not empty.
    pub(crate) fn url(&self, user: &str, password: &str, database: &str) -> String {
        let colon = if password.is_empty() { "" } else { ":" };
        format!("postgres://{user}{colon}{password}@127.0.0.1:{}/{database}", self.port)
    }

    /// By TCP, as the superuser.
    pub(crate) fn options(&self) -> PgConnectOptions {
        self.url("postgres", "", "postgres").parse().unwrap()
    }

    /// The socket's folder, for clients that come by it.
    pub(crate) fn socket_options(&self) -> PgConnectOptions {
        Self::local(self.dir.path(), self.port)
    }

    /// A connection for plain SQL.
    pub(crate) async fn connect(&self) -> PgConnection {
        PgConnection::connect_with(&self.socket_options()).await.expect("the server lets the tests in")
    }

    pub(crate) fn admin(&self) -> &Admin {
        &self.admin
    }

    /// The postmaster.
    pub(crate) fn pid(&self) -> i32 {
        self.server.as_ref().expect("the server runs").pid
    }

    pub(crate) async fn stop(&mut self, how: Stop) {
        let server = self.server.take().expect("the server runs");
        server.signal(match how {
            Stop::Fast => Signal::INT,
            Stop::Immediate => Signal::QUIT,
        });
        server.ended().await;
    }

    pub(crate) async fn start(&mut self) {
        assert!(self.server.is_none(), "the server runs");
        let command = Self::command(self.dir.path(), self.port, &self.settings);
        let server = self.server.insert(Kept::start(&command, Signal::QUIT, self.dir.path(), &self.log));
        server.up(READY).await;
    }

    pub(crate) async fn restart(&mut self, how: Stop) {
        self.stop(how).await;
        self.start().await;
    }

    /// Stops a backend's process until the guard is dropped.
    pub(crate) fn freeze(backend: i32) -> Frozen {
        Frozen::new(vec![backend])
    }

    /// Stops the whole server until the guard is dropped.
    pub(crate) fn freeze_all(&self) -> Frozen {
        let output = Command::new("ps").args(["-A", "-o", "pid=,ppid="]).output().expect("ps runs");
        let postmaster = self.pid();
        // First the postmaster, so that it makes no more.
        let mut pids = vec![postmaster];
        for line in String::from_utf8_lossy(&output.stdout).lines() {
            let mut numbers = line.split_whitespace().map(|number| number.parse::<i32>().unwrap());
            if let (Some(pid), Some(parent)) = (numbers.next(), numbers.next())
                && parent == postmaster
            {
                pids.push(pid);
            }
        }
        Frozen::new(pids)
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.log.print("server");
        }
    }
}

/// Processes that stand still until this is dropped.
#[must_use = "dropped, it lets the processes go on"]
pub(crate) struct Frozen {
    pids: Vec<i32>,
}

impl Frozen {
    fn new(pids: Vec<i32>) -> Self {
        for &pid in &pids {
            send(pid, Signal::STOP);
        }
        Self { pids }
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        for &pid in &self.pids {
            // It may have been killed meanwhile.
            kept::try_send(pid, Signal::CONT);
        }
    }
}

/// Tells the databases of one process apart, on a server that others use too.
static NUMBER: AtomicU32 = AtomicU32::new(0);

/// An empty database.
pub(crate) struct Database {
    // In the order of their end.
    admin: Admin,
    options: PgConnectOptions,
    host: Host,
}

enum Host {
    Own(#[expect(dead_code, reason = "dropped at the end")] Box<Cluster>),
    Given { server: Admin, name: String },
}

impl Database {
    pub(crate) fn new() -> Self {
        let Some(url) = std::env::var_os("LEASEHOLD_TEST_POSTGRES") else {
            let cluster = Cluster::new();
            let options = cluster.options();
            return Self { admin: Admin::new(options.clone()), options, host: Host::Own(Box::new(cluster)) };
        };
        let url = url.to_str().expect("LEASEHOLD_TEST_POSTGRES is text");
        let options: PgConnectOptions = url.parse().expect("LEASEHOLD_TEST_POSTGRES is a URL");
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("leasehold_test_{}_{number}", std::process::id());
        let server = Admin::new(options.clone());
        server.sql(&format!("CREATE DATABASE {name}"));
        let options = options.database(&name);
        Self { admin: Admin::new(options.clone()), options, host: Host::Given { server, name } }
    }

    pub(crate) fn options(&self) -> PgConnectOptions {
        self.options.clone()
    }

    pub(crate) fn admin(&self) -> &Admin {
        &self.admin
    }

    pub(crate) async fn connect(&self) -> PgConnection {
        PgConnection::connect_with(&self.options).await.expect("the server lets the tests in")
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        if let Host::Given { server, name } = &self.host {
            server.try_sql(&format!("DROP DATABASE {name} WITH (FORCE)")).ok();
        }
    }
}

/// What the tests look at, in the database of the connection, and what they break.
impl Admin {
    /// Who holds advisory locks: process and key, as PostgreSQL shows it.
    pub(crate) fn advisory_rows(&self) -> Rows {
        self.sql(
            "SELECT pid, classid::bigint << 32 | objid::bigint, mode FROM pg_locks \
             WHERE locktype = 'advisory' AND granted AND objsubid = 1 \
             AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) ORDER BY 1, 2, 3",
        )
    }

    /// The process that holds a key exclusively.
    pub(crate) fn holder(&self, key: i64) -> Option<i32> {
        let rows = self.advisory_rows();
        let key = key.to_string();
        let holder = rows.iter().find(|row| row[1] == key && row[2] == "ExclusiveLock")?;
        Some(holder[0].parse().unwrap())
    }

    /// Counts who waits for a key: who holds its key of the kind `waiting`, shared.
    pub(crate) fn waiters(&self, key: Key) -> usize {
        let waiting: String = self.one(&format!(
            "SELECT ('x' || encode(substr(sha256('leasehold/v1/waiting'::bytea || '\\x00'::bytea || '{key}'::bytea), \
             1, 8), 'hex'))::bit(64)::bigint"
        ));
        self.advisory_rows().iter().filter(|row| row[1] == waiting && row[2] == "ShareLock").count()
    }

    /// The processes of the clients with an `application_name` LIKE that.
    pub(crate) fn backends(&self, application_name: &str) -> Vec<i32> {
        let rows = self.sql(&format!(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() \
             AND backend_type = 'client backend' AND application_name LIKE '{application_name}' ORDER BY backend_start"
        ));
        rows.iter().map(|row| row[0].parse().unwrap()).collect()
    }

    pub(crate) fn terminate(&self, pid: i32) {
        assert_eq!(self.one::<String>(&format!("SELECT pg_terminate_backend({pid})")), "t", "{pid}");
    }
}

/// A folder of the build's own. Cargo names it to tests and benches; for an example it is where they have it.
fn scratch() -> PathBuf {
    let Some(dir) = option_env!("CARGO_TARGET_TMPDIR") else {
        let program = std::env::current_exe().expect("a program knows where it is");
        let dir = program.ancestors().nth(3).expect("Cargo puts an example three folders down").join("tmp");
        fs::create_dir_all(&dir).expect("the build's own folder can be written");
        return dir;
    };
    dir.into()
}

/// The data of a new server, made once per build directory and version: copying it takes a fifth of the time.
fn template() -> &'static Path {
    static TEMPLATE: OnceLock<PathBuf> = OnceLock::new();
    TEMPLATE.get_or_init(|| {
        let initdb = Cluster::program("initdb");
        let version = Command::new(&initdb).arg("--version").output().expect("initdb runs").stdout;
        let version: String =
            String::from_utf8_lossy(&version).chars().filter(char::is_ascii_alphanumeric).collect();
        let base = &scratch();
        let ready = base.join(format!("template-{version}-{}", rustix::process::geteuid().as_raw()));
        // The tests of a run start at once, each in a process of its own.
        let lock = File::create(base.join("template.lock")).unwrap();
        lock.lock().unwrap();
        if !ready.exists() {
            let dir = programs::folder();
            let data = dir.path().join("data");
            let mut command = programs::command(initdb);
            command.args([
                "--no-sync",
                "--username=postgres",
                "--auth=trust",
                "--encoding=UTF8",
                "--locale=C",
            ]);
            programs::run(command.arg("--wal-segsize=1").arg("--pgdata").arg(&data));
            let unfinished = base.join("template.unfinished");
            fs::remove_dir_all(&unfinished).ok();
            programs::run(Command::new("cp").arg("-Rp").arg(&data).arg(&unfinished));
            fs::rename(&unfinished, &ready).unwrap();
        }
        ready
    })
}
