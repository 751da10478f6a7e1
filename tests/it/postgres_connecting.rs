//! Connecting ends in time, wherever the other side falls silent; who is told to stop meanwhile stops at once; and
//! nothing is left.

use std::net::SocketAddr;
use std::time::Duration;

use leasehold::{ConnectError, Error, Locker, Options};
use sqlx::{Connection as _, PgConnection};
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::JoinSet;

use crate::support::postgres::{Cluster, Login, Stall};
use crate::support::{AT_ONCE, Log, Member, now, pass, quick, until};

/// So long that it plays no part.
fn patient(who: &str) -> Options {
    quick(who).query_timeout(Duration::from_mins(1))
}

fn url(port: u16, tls: &str) -> String {
    format!("postgres://postgres@localhost:{port}/postgres?sslmode={tls}")
}

fn stall(cluster: &Cluster, after: usize) -> Stall {
    Stall::after(after, "127.0.0.1", cluster.port())
}

/// The injector: what has passed by then arrives, what comes later does not, and nobody is told.
#[tokio::test]
async fn a_stalled_line_is_silent_and_open_until_its_client_closes_it() {
    let cluster = Cluster::new();
    let open = stall(&cluster, usize::MAX);
    let options = |stall: &Stall| cluster.options().port(stall.port());
    let mut connection = PgConnection::connect_with(&options(&open)).await.unwrap();
    let login = open.passed();
    sqlx::raw_sql("SELECT 1").execute(&mut connection).await.unwrap();
    assert!(open.passed() > login && !open.has_stalled() && open.open() == 1);
    connection.close().await.unwrap();

    let stalled = stall(&cluster, login + 1);
    let mut connection = PgConnection::connect_with(&options(&stalled)).await.unwrap();
    let asked =
        tokio::spawn(async move { sqlx::raw_sql("CREATE TABLE arrived ()").execute(&mut connection).await });
    until("silence", || stalled.has_stalled()).await;
    let options = options(&stalled);
    let late = tokio::spawn(async move { PgConnection::connect_with(&options).await });
    until("both are there", || stalled.open() == 2).await;
    assert_eq!(cluster.admin().sql("SELECT to_regclass('arrived')"), [["arrived"]]);
    assert!(!asked.is_finished() && !late.is_finished());
    asked.abort();
    late.abort();
    until("their sockets are closed", || stalled.open() == 0 && open.open() == 0).await;
    until_nothing_is_left(&cluster).await;
}

/// How many bytes of answers it takes to connect, about: some of the values vary in length.
async fn bytes_to_connect(cluster: &Cluster, tls: &str) -> usize {
    let stall = stall(cluster, usize::MAX);
    let locker = Locker::connect(&url(stall.port(), tls), patient("undisturbed")).await.unwrap();
    let bytes = stall.passed();
    locker.close().await;
    until("its sockets are closed", || stall.open() == 0).await;
    println!("{bytes} bytes of answers to connect, sslmode={tls}");
    bytes
}

async fn until_nothing_is_left(cluster: &Cluster) {
    until("no connection", || cluster.admin().backends("%").is_empty()).await;
    assert!(cluster.admin().advisory_rows().is_empty());
}

/// Connects again and again to a server that falls silent after so many bytes, and gives how often that succeeded, since
/// it took less.
async fn connect_to_silence(cluster: &Cluster, tls: &'static str, after: &[usize]) -> usize {
    let mut connected = 0;
    // Beside each other, since each takes its time, but not all: the machine has to keep up.
    for after in after.chunks(8) {
        let mut attempts = JoinSet::new();
        for &after in after {
            let stall = stall(cluster, after);
            attempts.spawn(async move {
                let since = now();
                let error = match Locker::connect(&url(stall.port(), tls), quick("one")).await {
                    Ok(locker) => {
                        locker.close().await;
                        return 1;
                    }
                    Err(Error::Connect(error)) => error,
                    Err(error) => panic!("after {after} bytes: {error}"),
                };
                let elapsed = since.elapsed();
                println!("silent after {after} bytes: {error}, after {elapsed:?}");
                // That of the second connection has a limit of its own, which is less.
                let timed_out =
                    matches!(error, ConnectError::Timeout { .. } | ConnectError::NoSecondConnection { .. });
                assert!(timed_out && !error.is_permanent(), "after {after} bytes: {error}");
                assert!(elapsed < Duration::from_secs(1) + AT_ONCE, "after {after} bytes: {elapsed:?}");
                until("its sockets are closed", || stall.open() == 0).await;
                0
            });
        }
        connected += attempts.join_all().await.into_iter().sum::<usize>();
    }
    until_nothing_is_left(cluster).await;
    connected
}

/// F-27: a listener that says nothing, and a server that falls silent in its login, its answers to the looks, to the
/// second connection, to the settings, to the LISTEN.
#[tokio::test]
async fn connecting_to_a_server_that_falls_silent_ends_in_time_in_every_phase() {
    let cluster = Cluster::with(Login::Trust, &["log_statement=all"]);
    let bytes = bytes_to_connect(&cluster, "disable").await;
    let from = cluster.log().len();
    let seldom = (0..40).map(|n| n * bytes / 40);
    // The settings and the LISTEN come last, and are read back in a few bytes.
    let often = (0..16).map(|n| bytes - 10 * n - 1);
    let after: Vec<_> = seldom.chain(often).collect();
    let connected = connect_to_silence(&cluster, "disable", &after).await;
    println!("{connected} of {} connected", after.len());
    let lines = cluster.log().lines().split_off(from);
    for (phase, least) in
        [("BEGIN;", 1), ("pg_try_advisory_xact_lock", 1), ("SET search_path", 1), ("LISTEN ", 1 + connected)]
    {
        let reached =
            lines.iter().filter(|line| line.contains("statement: ") && line.contains(phase)).count();
        println!("{reached} reached {phase:?}");
        assert!(reached >= least, "{reached} reached {phase:?}");
    }
}

/// F-27: the same in the handshake of TLS, and through TLS.
#[cfg(feature = "tls")]
#[tokio::test]
async fn connecting_by_tls_to_a_server_that_falls_silent_ends_in_time_in_every_phase() {
    let cluster = Cluster::with_tls();
    let bytes = bytes_to_connect(&cluster, "require").await;
    let handshake = (0..16).map(|n| 100 * n + 1);
    let after: Vec<_> = handshake.chain((1..16).map(|n| n * bytes / 16)).collect();
    assert_eq!(connect_to_silence(&cluster, "require", &after).await, 0);
}

/// F-27, D20: a standby that is told to stop while it connects stops at once, and closes its sockets, in every phase.
#[tokio::test]
async fn a_standby_that_connects_to_silence_stops_at_once_in_every_phase() {
    let cluster = Cluster::new();
    let bytes = bytes_to_connect(&cluster, "disable").await;
    for n in 0..32 {
        let after = n * bytes / 32;
        let stall = stall(&cluster, after);
        let locker = Locker::postgres(cluster.options().port(stall.port()), patient("one")).unwrap();
        let member = Member::on(&locker, "job", "one", &Log::default());
        until("silence", || stall.has_stalled()).await;
        let since = now();
        assert_eq!(member.stop().await.unwrap(), None);
        let elapsed = since.elapsed();
        until("its sockets are closed", || stall.open() == 0).await;
        println!(
            "silent after {after} bytes: stopped in {elapsed:?}, sockets closed in {:?}",
            since.elapsed()
        );
        assert!(elapsed < AT_ONCE, "after {after} bytes: {elapsed:?}");
        locker.close().await;
    }
    until_nothing_is_left(&cluster).await;
}

/// F-27: an address that does not answer: a listener whose queue is full, to which nobody gets through.
#[tokio::test]
async fn connecting_to_a_black_hole_ends_in_time_and_a_standby_there_stops_at_once() {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    let listener = socket.listen(1).unwrap();
    let address = listener.local_addr().unwrap();
    let mut queue = Vec::new();
    while let Ok(connected) =
        tokio::time::timeout(Duration::from_millis(300), TcpStream::connect(address)).await
    {
        queue.push(connected.unwrap());
    }
    println!("a queue of {}", queue.len());

    let since = now();
    let error = Locker::connect(&url(address.port(), "disable"), quick("one")).await.unwrap_err();
    println!("{error}, after {:?}", since.elapsed());
    assert!(matches!(error, Error::Connect(ConnectError::Timeout { .. })), "{error}");
    assert!(since.elapsed() < Duration::from_secs(1) + AT_ONCE, "{:?}", since.elapsed());

    let target = url(address.port(), "disable").parse::<sqlx::postgres::PgConnectOptions>().unwrap();
    let locker = Locker::postgres(target, patient("two")).unwrap();
    let member = Member::on(&locker, "job", "two", &Log::default());
    pass(Duration::from_millis(100)).await;
    let since = now();
    assert_eq!(member.stop().await.unwrap(), None);
    locker.close().await;
    assert!(since.elapsed() < AT_ONCE, "{:?}", since.elapsed());

    // Nobody else has come meanwhile, or comes now.
    for _ in 0..queue.len() {
        listener.accept().await.unwrap();
    }
    let late = tokio::time::timeout(Duration::from_millis(300), listener.accept()).await;
    assert!(late.is_err(), "{late:?}");
}
