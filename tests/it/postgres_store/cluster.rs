//! A PostgreSQL server of a test's own, and poolers before it. Gone when dropped.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use sqlx::postgres::{PgConnectOptions, PgConnection};
use sqlx::{AssertSqlSafe, Connection as _, Row as _};
use tempfile::TempDir;

pub(crate) struct Cluster {
    dir: TempDir,
    pub(crate) port: u16,
    server: Child,
    others: Vec<Child>,
}

fn bin(name: &str) -> PathBuf {
    let folder = std::env::var("LEASEHOLD_TEST_PG_BIN").map_or_else(
        |_| {
            let mut versions: Vec<_> = fs::read_dir("/usr/lib/postgresql")
                .expect("no PostgreSQL: apt-get install postgresql")
                .map(|version| version.unwrap().path().join("bin"))
                .collect();
            versions.sort();
            versions.pop().unwrap()
        },
        PathBuf::from,
    );
    folder.join(name)
}

/// A command as a user that PostgreSQL agrees to run as.
fn unprivileged(program: &Path) -> Command {
    if !rustix::process::geteuid().is_root() {
        return Command::new(program);
    }
    let mut command = Command::new("setpriv");
    command.args(["--reuid=postgres", "--regid=postgres", "--clear-groups"]).arg(program);
    command
}

fn run(command: &mut Command) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

impl Cluster {
    pub(crate) async fn start(settings: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let data = dir.path().join("data");
        give_away(dir.path());
        run(unprivileged(&bin("initdb"))
            .args(["--auth=trust", "--username=postgres", "--no-sync", "--encoding=UTF8", "-D"])
            .arg(&data)
            .current_dir(dir.path()));
        fs::write(
            data.join("pg_hba.conf"),
            "local all all trust\nhost all secretive 127.0.0.1/32 scram-sha-256\nhost all all 127.0.0.1/32 trust\n\
             host replication all 127.0.0.1/32 trust\n",
        )
        .unwrap();
        Self::serve(dir, settings).await
    }

    async fn serve(dir: TempDir, settings: &[&str]) -> Self {
        let port = free_port();
        let server = spawn(dir.path(), port, settings);
        let cluster = Self { dir, port, server, others: Vec::new() };
        cluster.wait().await;
        cluster
    }

    async fn wait(&self) {
        for _ in 0..500 {
            if PgConnection::connect_with(&self.options()).await.is_ok() {
                return;
            }
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
        panic!("the server does not come up");
    }

    /// A hot standby of this server.
    pub(crate) async fn standby(&self) -> Self {
        let dir = tempfile::tempdir().unwrap();
        give_away(dir.path());
        run(unprivileged(&bin("pg_basebackup"))
            .args([
                "-h",
                "127.0.0.1",
                "-U",
                "postgres",
                "-R",
                "-c",
                "fast",
                "-p",
                &self.port.to_string(),
                "-D",
            ])
            .arg(dir.path().join("data"))
            .current_dir(dir.path()));
        Self::serve(dir, &[]).await
    }

    pub(crate) fn options(&self) -> PgConnectOptions {
        PgConnectOptions::new_without_pgpass()
            .host("127.0.0.1")
            .port(self.port)
            .username("postgres")
            .database("postgres")
    }

    pub(crate) fn url(&self) -> String {
        format!("postgres://postgres@127.0.0.1:{}/postgres", self.port)
    }

    pub(crate) async fn admin(&self) -> PgConnection {
        PgConnection::connect_with(&self.options()).await.unwrap()
    }

    /// Runs statements, and gives the first column of the rows as text.
    pub(crate) async fn query(&self, sql: &str) -> Vec<String> {
        query(&mut self.admin().await, sql).await
    }

    /// A pooler before this server, and its port.
    pub(crate) async fn pooler(&mut self, mode: &str, size: u32, settings: &str) -> u16 {
        let port = free_port();
        let file = self.dir.path().join(format!("pgbouncer-{port}.ini"));
        fs::write(
            &file,
            format!(
                "[databases]\npostgres = host=127.0.0.1 port={} user=postgres\n[pgbouncer]\nlisten_addr = 127.0.0.1\n\
                 listen_port = {port}\nunix_socket_dir =\nauth_type = any\npool_mode = {mode}\n\
                 default_pool_size = {size}\n{settings}\n",
                self.port
            ),
        )
        .unwrap();
        let log = fs::File::create(self.dir.path().join(format!("pgbouncer-{port}.log"))).unwrap();
        let child = unprivileged(Path::new("/usr/sbin/pgbouncer"))
            .arg(&file)
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        self.others.push(child);
        for _ in 0..500 {
            if std::net::TcpStream::connect(("127.0.0.1", port)).is_ok() {
                return port;
            }
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
        panic!("the pooler does not come up");
    }

    pub(crate) fn stop_last_pooler(&mut self) {
        end(self.others.pop().unwrap(), Signal::KILL);
    }

    /// Ends the server at once, as a crash does.
    pub(crate) fn crash(&mut self) {
        kill_process(Pid::from_child(&self.server), Signal::QUIT).unwrap();
        self.server.wait().unwrap();
    }

    pub(crate) fn start_again(&mut self, settings: &[&str]) {
        self.server = spawn(self.dir.path(), self.port, settings);
    }
}

pub(crate) async fn query(connection: &mut PgConnection, sql: &str) -> Vec<String> {
    let rows = sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).fetch_all(connection).await.unwrap();
    rows.iter().map(|row| row.try_get_unchecked::<String, _>(0).unwrap_or_default()).collect()
}

pub(crate) fn give_away(path: &Path) {
    if rustix::process::geteuid().is_root() {
        run(Command::new("chown").arg("postgres:").arg(path));
    }
}

fn spawn(dir: &Path, port: u16, settings: &[&str]) -> Child {
    let log = fs::OpenOptions::new().create(true).append(true).open(dir.join("log")).unwrap();
    let mut command = unprivileged(&bin("postgres"));
    command.arg("-D").arg(dir.join("data")).args(["-p", &port.to_string(), "-k", "", "-c", "fsync=off"]);
    for setting in settings {
        command.args(["-c", setting]);
    }
    command.current_dir(dir).stdout(Stdio::null()).stderr(log).spawn().unwrap()
}

fn end(mut child: Child, signal: Signal) {
    kill_process(Pid::from_child(&child), signal).ok();
    child.wait().ok();
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for child in self.others.drain(..) {
            end(child, Signal::KILL);
        }
        kill_process(Pid::from_child(&self.server), Signal::QUIT).ok();
        self.server.wait().ok();
    }
}
