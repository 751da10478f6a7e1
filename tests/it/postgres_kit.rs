//! The tests' own servers, and what breaks them: a fault that is not injected shows nothing.

use std::io::{BufRead as _, BufReader, ErrorKind};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, test_kill_process};
use sqlx::postgres::{PgConnectOptions, PgQueryResult};
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, PgConnection, Row as _, SqlStr};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

use crate::support::postgres::{Cluster, Database, Login, PgBouncer, PoolMode, Proxy, Stop};
use crate::support::{AT_ONCE, eventually, now, pass, until};

fn is_alive(pid: i32) -> bool {
    test_kill_process(Pid::from_raw(pid).unwrap()).is_ok()
}

#[tokio::test]
async fn a_cluster_is_gone_with_its_folder_when_it_is_dropped() {
    let since = now();
    let cluster = Cluster::new();
    println!("a server was ready after {:?}", since.elapsed());
    let (pid, dir) = (cluster.pid(), cluster.dir().to_owned());
    let mut connection = cluster.connect().await;
    sqlx::raw_sql("SELECT 1").execute(&mut connection).await.unwrap();
    assert!(is_alive(pid) && dir.exists());
    let since = now();
    drop(cluster);
    println!("and gone within {:?}", since.elapsed());
    assert!(!is_alive(pid) && !dir.exists());
    sqlx::raw_sql("SELECT 1").execute(&mut connection).await.unwrap_err();
}

#[test]
fn a_cluster_is_gone_after_a_panic() {
    let (told, tell) = std::sync::mpsc::channel();
    let panicked = std::thread::spawn(move || {
        let cluster = Cluster::new();
        told.send((cluster.pid(), cluster.dir().to_owned())).unwrap();
        panic!("this panic belongs to the test");
    });
    panicked.join().unwrap_err();
    let (pid, dir) = tell.recv().unwrap();
    assert!(!is_alive(pid) && !dir.exists());
}

/// Tells a test that it is the process to be killed.
const TO_BE_KILLED: &str = "LEASEHOLD_TEST_TO_BE_KILLED";

fn is_to_be_killed() -> bool {
    std::env::var_os(TO_BE_KILLED).is_some()
}

/// Says what there is, and waits.
fn wait_to_be_killed(what: &str) {
    println!("\nready {what}");
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink()).unwrap();
}

/// Starts a test of this module in a process of its own, until it [waits](wait_to_be_killed); gives what it has said.
fn to_be_killed(test: &str) -> (String, Child) {
    let mut process = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &format!("postgres_kit::{test}"), "--nocapture"])
        .env(TO_BE_KILLED, "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(process.stdout.take().unwrap()).lines().map(Result::unwrap);
    let said = lines.find_map(|line| line.strip_prefix("ready ").map(str::to_owned)).unwrap();
    (said, process)
}

fn kill(mut process: Child) {
    process.kill().unwrap();
    process.wait().unwrap();
}

#[tokio::test]
async fn a_cluster_is_gone_when_the_test_process_is_killed() {
    if is_to_be_killed() {
        let cluster = Cluster::new();
        return wait_to_be_killed(&format!("{} {}", cluster.pid(), cluster.dir().display()));
    }
    let (said, process) = to_be_killed("a_cluster_is_gone_when_the_test_process_is_killed");
    let (pid, dir) = said.split_once(' ').unwrap();
    let (pid, dir) = (pid.parse().unwrap(), Path::new(dir));
    assert!(is_alive(pid) && dir.exists());
    kill(process);
    until("the server and its folder are gone", || !is_alive(pid) && !dir.exists()).await;
}

#[tokio::test]
async fn a_server_that_is_restarted_ends_its_sessions_and_keeps_its_port() {
    let mut cluster = Cluster::new();
    for how in [Stop::Fast, Stop::Immediate] {
        let mut connection = PgConnection::connect_with(&cluster.options()).await.unwrap();
        let before = cluster.pid();
        cluster.stop(how).await;
        assert!(!is_alive(before));
        sqlx::raw_sql("SELECT 1").execute(&mut connection).await.unwrap_err();
        assert!(PgConnection::connect_with(&cluster.options()).await.is_err());
        cluster.start().await;
        let mut connection = PgConnection::connect_with(&cluster.options()).await.unwrap();
        sqlx::raw_sql("SELECT 1").execute(&mut connection).await.unwrap();
        // Its own connection is made anew.
        assert_eq!(cluster.admin().one::<i32>("SELECT 1"), 1);
    }
    assert_eq!(
        cluster.log().lines().iter().filter(|line| line.contains("was not properly shut down")).count(),
        1
    );
}

#[tokio::test]
async fn a_password_is_asked_for_where_the_login_says_so() {
    let cluster = Cluster::with(Login::Scram, &["max_connections=7"]);
    cluster.admin().sql("CREATE ROLE app LOGIN PASSWORD 'right'");
    assert_eq!(cluster.admin().one::<i32>("SHOW max_connections"), 7);
    PgConnection::connect(&cluster.url("app", "right", "postgres")).await.unwrap().close().await.unwrap();
    for password in ["", "wrong"] {
        PgConnection::connect(&cluster.url("app", password, "postgres")).await.unwrap_err();
    }
    let mut by_socket = PgConnection::connect_with(&cluster.socket_options()).await.unwrap();
    sqlx::raw_sql("SELECT 1").execute(&mut by_socket).await.unwrap();
}

#[tokio::test]
async fn a_frozen_backend_answers_only_when_it_goes_on_and_others_meanwhile() {
    let cluster = Cluster::new();
    let mut connection = cluster.connect().await;
    let pid: i32 = sqlx::query("SELECT pg_backend_pid()").fetch_one(&mut connection).await.unwrap().get(0);
    let frozen = Cluster::freeze(pid);
    let asked = tokio::spawn(async move { sqlx::raw_sql("SELECT 1").execute(&mut connection).await });
    for _ in 0..20 {
        assert_eq!(cluster.admin().one::<i32>("SELECT 1"), 1);
    }
    assert!(!asked.is_finished());
    drop(frozen);
    asked.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_frozen_server_answers_nobody_until_it_goes_on() {
    let cluster = Cluster::new();
    let mut connection = cluster.connect().await;
    let frozen = cluster.freeze_all();
    let asked = tokio::spawn(async move { sqlx::raw_sql("SELECT 1").execute(&mut connection).await });
    let options = cluster.options();
    let connected = tokio::spawn(async move { PgConnection::connect_with(&options).await });
    let other = Cluster::new();
    assert_eq!(other.admin().one::<i32>("SELECT 1"), 1);
    assert!(!asked.is_finished() && !connected.is_finished());
    drop(frozen);
    asked.await.unwrap().unwrap();
    connected.await.unwrap().unwrap();
}

#[tokio::test]
async fn what_is_slipped_into_a_session_happens_there_and_its_client_sees_none_of_it() {
    let (database, proxy, options) = behind_a_proxy();
    let mut connection = PgConnection::connect_with(&options).await.unwrap();
    let row = sqlx::query("SELECT pg_backend_pid(), pg_try_advisory_lock(1), pg_try_advisory_lock(2)");
    let pid: i32 = row.fetch_one(&mut connection).await.unwrap().get(0);
    proxy.slip_in(pid, "SELECT pg_advisory_unlock(1)").unwrap();
    assert_eq!(database.admin().holder(1), None);
    assert_eq!(database.admin().holder(2), Some(pid));
    assert!(proxy.slip_in(pid, "SELECT 1/0").unwrap_err().contains("division by zero"));
    proxy.slip_in(0, "SELECT 1").unwrap_err();
    let row = sqlx::query("SELECT 5").fetch_one(&mut connection).await.unwrap();
    assert_eq!(row.get::<i32, _>(0), 5);
}

/// A database, and a proxy before it; options for coming by the proxy.
fn behind_a_proxy() -> (Database, Proxy, PgConnectOptions) {
    let database = Database::new();
    let target = database.options();
    let proxy = Proxy::to(target.get_host(), target.get_port());
    let options = target.host("127.0.0.1").port(proxy.port()).application_name("client");
    (database, proxy, options)
}

/// Makes a table that shows by its name that the statement has reached the server.
fn create(mut connection: PgConnection, table: &str) -> JoinHandle<Result<PgQueryResult, sqlx::Error>> {
    let sql = format!("CREATE TABLE {table} ()");
    tokio::spawn(async move { sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut connection).await })
}

fn exists(database: &Database, table: &str) -> bool {
    database.admin().sql(&format!("SELECT to_regclass('{table}')")) == [[table]]
}

#[tokio::test]
async fn a_proxy_that_is_redirected_leads_new_clients_to_another_server() {
    let (database, proxy, options) = behind_a_proxy();
    let other = Cluster::new();
    let old = PgConnection::connect_with(&options).await.unwrap();
    proxy.redirect(other.port());
    let new = PgConnection::connect_with(&options.database("postgres")).await.unwrap();
    assert_eq!(database.admin().backends("client").len(), 1);
    assert_eq!(other.admin().backends("client").len(), 1);
    old.close().await.unwrap();
    new.close().await.unwrap();
}

#[tokio::test]
async fn a_cut_line_is_silent_and_open_until_it_heals() {
    let (database, proxy, options) = behind_a_proxy();
    let connection = PgConnection::connect_with(&options).await.unwrap();
    proxy.cut();
    let asked = create(connection, "arrived");
    let late = tokio::spawn(async move { PgConnection::connect_with(&options).await });
    for _ in 0..20 {
        assert!(!exists(&database, "arrived"));
    }
    assert!(!asked.is_finished() && !late.is_finished());
    assert_eq!(database.admin().backends("client").len(), 1);
    proxy.heal();
    asked.await.unwrap().unwrap();
    late.await.unwrap().unwrap();
    assert!(exists(&database, "arrived"));
}

#[tokio::test]
async fn a_line_that_loses_its_answers_takes_one_statement_more_to_the_server() {
    let (database, proxy, options) = behind_a_proxy();
    let simple = PgConnection::connect_with(&options).await.unwrap();
    let mut prepared =
        PgConnection::connect_with(&options.clone().application_name("prepared")).await.unwrap();
    proxy.cut_answers();
    let late = tokio::spawn(async move { PgConnection::connect_with(&options).await });
    let asked = create(simple, "arrived");
    // Three messages, of which the last ends the statement.
    let described =
        tokio::spawn(async move { prepared.prepare(SqlStr::from_static("SELECT 1")).await.map(drop) });
    until("the statement reaches the server", || exists(&database, "arrived")).await;
    let sql = "SELECT query, state FROM pg_stat_activity WHERE application_name = 'prepared'";
    let last = || database.admin().sql(sql);
    eventually("the messages reach the server", last, |rows| *rows == [["SELECT 1", "idle"]]).await;
    assert!(!asked.is_finished() && !described.is_finished() && !late.is_finished());
    assert_eq!(database.admin().backends("client").len(), 1);
    proxy.heal();
    asked.await.unwrap().unwrap();
    described.await.unwrap().unwrap();
    late.await.unwrap().unwrap();
}

#[tokio::test]
async fn half_a_statement_is_none_until_the_line_heals() {
    let (database, proxy, options) = behind_a_proxy();
    let connection = PgConnection::connect_with(&options).await.unwrap();
    proxy.cut_in_statement();
    let asked = create(connection, "arrived");
    for _ in 0..20 {
        assert!(!exists(&database, "arrived"));
    }
    assert!(!asked.is_finished());
    proxy.heal();
    asked.await.unwrap().unwrap();
    assert!(exists(&database, "arrived"));
}

#[tokio::test]
async fn of_a_statement_that_is_cut_the_first_half_reaches_the_server() {
    // A server that shows what it reads; PostgreSQL does not.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let proxy = Proxy::to("127.0.0.1", listener.local_addr().unwrap().port());
    let mut client = TcpStream::connect(("127.0.0.1", proxy.port())).await.unwrap();
    let start_up = [0, 0, 0, 8, 0, 3, 0, 0];
    client.write_all(&start_up).await.unwrap();
    let (mut server, _) = listener.accept().await.unwrap();
    let mut read = [0; 8];
    server.read_exact(&mut read).await.unwrap();
    assert_eq!(read, start_up);
    proxy.cut_in_statement();
    client.write_all(b"Q\0\0\0\x0dSELECT 1\0").await.unwrap();
    let mut half = [0; 7];
    server.read_exact(&mut half).await.unwrap();
    assert_eq!(&half, b"Q\0\0\0\x0dSE");
    pass(Duration::from_millis(100)).await;
    assert_eq!(server.try_read(&mut read).unwrap_err().kind(), ErrorKind::WouldBlock);
    proxy.heal();
    let mut rest = [0; 7];
    server.read_exact(&mut rest).await.unwrap();
    assert_eq!(&rest, b"LECT 1\0");
}

#[tokio::test]
async fn answers_that_are_late_come_in_order() {
    let (database, proxy, options) = behind_a_proxy();
    let mut connection = PgConnection::connect_with(&options).await.unwrap();
    let delay = Duration::from_millis(300);
    proxy.delay(delay);
    for number in 0..3 {
        let since = now();
        let rows = sqlx::raw_sql(AssertSqlSafe(format!("SELECT {number}")))
            .fetch_all(&mut connection)
            .await
            .unwrap();
        assert_eq!(rows[0].get::<i32, _>(0), number);
        assert!(since.elapsed() >= delay);
    }
    let since = now();
    let late = create(connection, "arrived");
    until("the statement reaches the server", || exists(&database, "arrived")).await;
    // Asked for after the answer was sent, and so no way past it.
    proxy.delay(Duration::ZERO);
    let mut connection = PgConnection::connect_with(&options).await.unwrap();
    sqlx::raw_sql("SELECT 1").execute(&mut connection).await.unwrap();
    // However long that took on a busy machine.
    assert!(!late.is_finished() || since.elapsed() >= delay);
    late.await.unwrap().unwrap();
    assert!(since.elapsed() >= delay);
}

#[tokio::test]
async fn a_proxy_that_closes_ends_the_sessions_at_both_sides() {
    let (database, proxy, options) = behind_a_proxy();
    let mut connection = PgConnection::connect_with(&options).await.unwrap();
    proxy.close().await;
    until("the server's side is closed", || database.admin().backends("client").is_empty()).await;
    let error = sqlx::raw_sql("SELECT 1").execute(&mut connection).await.unwrap_err();
    assert!(matches!(error, sqlx::Error::Io(_)), "{error:?}");
    PgConnection::connect_with(&options).await.unwrap_err();
    proxy.heal();
    PgConnection::connect_with(&options).await.unwrap();
}

#[tokio::test]
async fn a_pooler_gives_a_client_one_backend_or_every_one_in_turn() {
    let cluster = Cluster::new();
    for (mode, backends) in [(PoolMode::Session, 1), (PoolMode::Transaction, 2), (PoolMode::Statement, 2)] {
        let bouncer = PgBouncer::new(&cluster, mode, 2);
        let mut connection = PgConnection::connect_with(&bouncer.options()).await.unwrap();
        let (mut seen, since) = (std::collections::BTreeSet::new(), now());
        // Its second server connection comes when it comes.
        while seen.len() < backends && since.elapsed() < 5 * AT_ONCE || since.elapsed() < AT_ONCE / 10 {
            let rows = sqlx::raw_sql("SELECT pg_backend_pid()").fetch_all(&mut connection).await.unwrap();
            seen.insert(rows[0].get::<i32, _>(0));
        }
        assert_eq!(seen.len(), backends, "{mode:?}");
        let pid = bouncer.pid();
        drop(bouncer);
        assert!(!is_alive(pid));
    }
}

#[tokio::test]
async fn a_standby_follows_its_primary() {
    let since = now();
    let primary = Cluster::new();
    let standby = Cluster::standby_of(&primary);
    println!("a primary and a standby were ready after {:?}", since.elapsed());
    assert_eq!(standby.admin().one::<String>("SELECT pg_is_in_recovery()"), "t");
    primary.admin().sql("CREATE TABLE arrived ()");
    let look = || standby.admin().sql("SELECT to_regclass('arrived')");
    eventually("the table arrives", look, |rows| *rows == [["arrived"]]).await;
    assert!(standby.admin().try_sql("CREATE TABLE refused ()").is_err());
    assert_eq!(standby.admin().sql("SELECT pg_promote()"), [["t"]]);
    standby.admin().sql("CREATE TABLE taken ()");
}

#[tokio::test]
async fn a_paused_pooler_answers_nobody_until_it_goes_on() {
    let cluster = Cluster::new();
    let bouncer = PgBouncer::new(&cluster, PoolMode::Session, 2);
    let console = bouncer.console();
    console.sql("PAUSE");
    let options = bouncer.options();
    let asks = tokio::spawn(async move { PgConnection::connect_with(&options).await });
    pass(std::time::Duration::from_millis(200)).await;
    assert!(!asks.is_finished());
    console.sql("RESUME");
    asks.await.unwrap().unwrap().close().await.unwrap();
}

mod hosts {
    use super::*;
    use crate::support::postgres::RemoteHost;
    use crate::support::quick;
    use crate::support::replica::{Lines, PROGRAM, Replica};

    fn has_cable(interface: &str) -> bool {
        Path::new("/sys/class/net").join(interface).exists()
    }

    #[tokio::test]
    async fn a_vanished_host_is_silent_and_its_connections_stay_open_until_it_reappears() {
        let Some(host) = RemoteHost::new() else { return };
        let cluster = Cluster::with(Login::Trust, &[&host.listen_addresses()]);
        let lines = Lines::new();
        let options = quick("a").query_timeout(Duration::from_secs(10));
        let (command, url) = (host.command(PROGRAM), host.url(&cluster));
        let mut replica = Replica::by(command, &url, &options, "job", &lines, &["hold"]);
        lines.wait_for("a tick", 0).await;
        let last = || {
            cluster.admin().sql(
                "SELECT host(client_addr), query_start FROM pg_stat_activity \
                 WHERE application_name = 'leasehold/a'",
            )
        };
        host.vanish();
        let before = last();
        assert_eq!(before[0][0], host.address());
        // Several heartbeats. Both sides are there meanwhile.
        for _ in 0..10 {
            lines.wait_for("a tick", lines.all().len()).await;
            assert_eq!(last(), before);
        }
        host.reappear();
        eventually("the process is heard again", last, |now| now.len() == 1 && *now != before).await;
        replica.terminate();
        assert!(replica.wait().await.success());
        assert!(lines.all().iter().all(|line| line.ends_with(" 1")), "it never lost its session");
    }

    #[tokio::test]
    async fn a_host_is_gone_when_it_is_dropped() {
        let Some(host) = RemoteHost::new() else { return };
        let Some(other) = RemoteHost::new() else { return };
        assert_ne!(host.interface(), other.interface());
        for host in [host, other] {
            let interface = host.interface();
            assert!(has_cable(&interface));
            drop(host);
            // The kernel takes a moment to tidy up.
            until("its cable is gone", || !has_cable(&interface)).await;
        }
    }

    #[tokio::test]
    async fn a_host_is_gone_when_the_test_process_is_killed() {
        let test = "a_host_is_gone_when_the_test_process_is_killed";
        if is_to_be_killed() {
            if let Some(host) = RemoteHost::new() {
                wait_to_be_killed(&host.interface());
            }
            return;
        }
        if RemoteHost::new().is_none() {
            return;
        }
        let (interface, process) = to_be_killed(&format!("hosts::{test}"));
        assert!(has_cable(&interface));
        kill(process);
        until("the host is gone", || !has_cable(&interface)).await;
    }
}
