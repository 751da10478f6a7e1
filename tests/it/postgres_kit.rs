//! The tests' own servers, and what breaks them: a fault that is not injected shows nothing.

use std::path::Path;
use std::process::{Command, Stdio};

use rustix::process::{Pid, test_kill_process};
use sqlx::{Connection as _, PgConnection, Row as _};

use crate::support::postgres::{Cluster, Database, Login, PgBouncer, PoolMode, Proxy, Stop};
use crate::support::{AT_ONCE, eventually, now, until};

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

/// Tells the test below that it is the process to be killed.
const TO_BE_KILLED: &str = "LEASEHOLD_TEST_TO_BE_KILLED";

#[tokio::test]
async fn a_cluster_is_gone_when_the_test_process_is_killed() {
    use std::io::{BufRead as _, BufReader};

    if std::env::var_os(TO_BE_KILLED).is_some() {
        let cluster = Cluster::new();
        println!("\ncluster {} {}", cluster.pid(), cluster.dir().display());
        std::io::copy(&mut std::io::stdin(), &mut std::io::sink()).unwrap();
        return;
    }
    let mut process = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "postgres_kit::a_cluster_is_gone_when_the_test_process_is_killed", "--nocapture"])
        .env(TO_BE_KILLED, "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
    let line = lines.by_ref().map(Result::unwrap).find(|line| line.starts_with("cluster ")).unwrap();
    let mut words = line.split(' ').skip(1);
    let (pid, dir) = (words.next().unwrap().parse().unwrap(), Path::new(words.next().unwrap()).to_owned());
    assert!(is_alive(pid) && dir.exists());
    process.kill().unwrap();
    process.wait().unwrap();
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
    let database = Database::new();
    let options = database.options();
    let proxy = Proxy::to(options.get_host(), options.get_port());
    let options = options.host("127.0.0.1").port(proxy.port());
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

#[tokio::test]
async fn a_cut_line_is_silent_and_open_until_it_heals() {
    let database = Database::new();
    let options = database.options();
    let proxy = Proxy::to(options.get_host(), options.get_port());
    let options = options.host("127.0.0.1").port(proxy.port());
    let mut connection = PgConnection::connect_with(&options).await.unwrap();
    sqlx::raw_sql("SET application_name = 'cut'").execute(&mut connection).await.unwrap();
    proxy.cut();
    let asked =
        tokio::spawn(async move { sqlx::raw_sql("CREATE TABLE arrived ()").execute(&mut connection).await });
    let late = tokio::spawn(async move { PgConnection::connect_with(&options).await });
    for _ in 0..20 {
        assert_eq!(database.admin().sql("SELECT to_regclass('arrived')"), [[""]]);
    }
    assert!(!asked.is_finished() && !late.is_finished());
    assert_eq!(database.admin().backends("cut").len(), 1);
    proxy.heal();
    asked.await.unwrap().unwrap();
    late.await.unwrap().unwrap();
    assert_eq!(database.admin().sql("SELECT to_regclass('arrived')"), [["arrived"]]);
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
}
