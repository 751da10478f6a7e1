//! `PgBouncer` before a server.

use std::fs;
use std::process::Command;

use rustix::process::Signal;
use sqlx::postgres::PgConnectOptions;
use tempfile::TempDir;

use super::super::kept::{Kept, ServerLog};
use super::super::programs::{self, free_port};
use super::{Admin, Cluster};

/// For how long a client keeps a server connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Session,
    Transaction,
    Statement,
}

/// A pooler of the test's own; its connections are the superuser's.
pub(crate) struct PgBouncer {
    // In the order of their end.
    server: Kept,
    #[expect(dead_code, reason = "removed at the end")]
    dir: TempDir,
    port: u16,
    log: ServerLog,
}

impl PgBouncer {
    /// A pooler with this many server connections, which it uses in turn.
    pub(crate) fn new(cluster: &Cluster, mode: Mode, server_connections: u32) -> Self {
        let settings = format!("min_pool_size = {server_connections}\nserver_round_robin = 1");
        Self::with(cluster, mode, server_connections, &settings)
    }

    /// A pooler with so many server connections at most, as it is delivered but for these lines of settings.
    pub(crate) fn with(cluster: &Cluster, mode: Mode, server_connections: u32, settings: &str) -> Self {
        let (dir, log) = (programs::folder(), ServerLog::default());
        let pool_mode = match mode {
            Mode::Session => "session",
            Mode::Transaction => "transaction",
            Mode::Statement => "statement",
        };
        for _ in 0..5 {
            let port = free_port();
            let ini = dir.path().join("pgbouncer.ini");
            let text = format!(
                "[databases]\n* = host={} port={} user=postgres\n[pgbouncer]\nlisten_addr = 127.0.0.1\n\
                 listen_port = {port}\nunix_socket_dir =\nauth_type = any\nadmin_users = postgres\npool_mode = {pool_mode}\n\
                 default_pool_size = {server_connections}\n{settings}\n",
                cluster.dir().display(),
                cluster.port(),
            );
            fs::write(&ini, text).unwrap();
            let mut command = Command::new(programs::pgbouncer());
            command.arg(&ini);
            let server = Kept::start(&command, Signal::KILL, dir.path(), &log);
            if server.is_up("process up", "FATAL") {
                return Self { server, dir, port, log };
            }
            server.leave();
        }
        log.print("PgBouncer");
        panic!("PgBouncer does not start");
    }

    /// For plain SQL: without the start-up option that poolers refuse.
    pub(crate) fn options(&self) -> PgConnectOptions {
        self.url().parse::<PgConnectOptions>().unwrap().extra_float_digits(None)
    }

    pub(crate) fn url(&self) -> String {
        format!("postgres://postgres@127.0.0.1:{}/postgres", self.port)
    }

    /// The pooler's own console, which takes commands such as `PAUSE`.
    pub(crate) fn console(&self) -> Admin {
        Admin::new(self.options().database("pgbouncer"))
    }

    pub(crate) const fn log(&self) -> &ServerLog {
        &self.log
    }

    pub(crate) const fn pid(&self) -> i32 {
        self.server.pid
    }
}

impl Drop for PgBouncer {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.log.print("PgBouncer");
        }
    }
}
