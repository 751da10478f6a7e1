//! The tests' own Redis servers, and what breaks them: a fault that is not injected shows nothing.

use std::time::Duration;

use redis::{Connection, RedisResult};
use rustix::process::{Pid, test_kill_process};

use crate::support::redis::{Data, Pause, Proxy, Server};
use crate::support::{eventually, now, until};

const LONG: Duration = Duration::from_mins(1);

fn is_alive(pid: i32) -> bool {
    test_kill_process(Pid::from_raw(pid).unwrap()).is_ok()
}

/// A client with a name, which waits ten seconds for an answer.
fn client(url: &str, name: &str) -> Connection {
    let mut connection = redis::Client::open(url).unwrap().get_connection().unwrap();
    connection.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    redis::cmd("CLIENT").arg("SETNAME").arg(name).exec(&mut connection).unwrap();
    connection
}

fn set(connection: &mut Connection, key: &str) -> RedisResult<()> {
    redis::cmd("SET").arg(key).arg(1).exec(connection)
}

/// Runs on a thread of its own what waits for an answer.
fn asks<T: Send + 'static>(
    mut connection: Connection,
    ask: impl FnOnce(&mut Connection) -> RedisResult<T> + Send + 'static,
) -> std::thread::JoinHandle<RedisResult<T>> {
    std::thread::spawn(move || ask(&mut connection))
}

#[test]
fn a_server_is_gone_with_its_folder_when_it_is_dropped() {
    let since = now();
    let server = Server::start();
    println!("a server was ready after {:?}", since.elapsed());
    let (pid, dir) = (server.pid(), server.config("dir"));
    let mut connection = client(&server.url(), "client");
    set(&mut connection, "k").unwrap();
    assert!(is_alive(pid) && std::path::Path::new(&dir).exists());
    let since = now();
    drop(server);
    println!("and gone within {:?}", since.elapsed());
    assert!(!is_alive(pid) && !std::path::Path::new(&dir).exists());
    set(&mut connection, "k").unwrap_err();
}

#[tokio::test]
async fn a_server_that_is_restarted_keeps_its_port_and_only_a_durable_one_its_data() {
    for (mut server, how, left) in [
        (Server::start(), Data::Kept, None),
        (Server::durable(), Data::Kept, Some(b"v".to_vec())),
        (Server::durable(), Data::Lost, None),
    ] {
        let (before, url) = (server.pid(), server.url());
        let mut connection = client(&url, "client");
        server.ask::<()>(&["SET", "k", "v"]);
        server.kill();
        assert!(!is_alive(before));
        set(&mut connection, "k").unwrap_err();
        server.try_ask::<()>(&["PING"]).unwrap_err();
        server.start_again(how).await;
        assert_eq!((server.get("k"), server.url()), (left.clone(), url));
        server.restart(how).await;
        assert_eq!(server.get("k"), left);
    }
}

#[test]
fn a_pause_of_everything_ends_when_it_is_told_to() {
    let server = Server::start();
    let mut other = client(&server.url(), "other");
    server.pause(Pause::All, LONG);
    other.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    assert!(redis::cmd("PING").exec(&mut other).unwrap_err().is_timeout());
    let asked = asks(client_while_paused(&server), |it| redis::cmd("PING").query::<String>(it));
    let since = now();
    server.unpause();
    assert_eq!(asked.join().unwrap().unwrap(), "PONG");
    assert!(since.elapsed() < LONG / 2);
}

/// A client that asks nothing when it comes.
fn client_while_paused(server: &Server) -> Connection {
    let settings = redis::RedisConnectionInfo::default().set_skip_set_lib_name();
    let target = redis::IntoConnectionInfo::into_connection_info(server.url()).unwrap();
    redis::Client::open(target.set_redis_settings(settings)).unwrap().get_connection().unwrap()
}

#[test]
fn a_pause_of_writes_lets_reads_through() {
    let server = Server::start();
    let (mut reads, writes) = (client(&server.url(), "reads"), client(&server.url(), "writes"));
    server.pause(Pause::Writes, LONG);
    let written = asks(writes, |it| set(it, "k"));
    let blocked = || server.info("blocked_clients");
    tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(eventually(
        "the write is held back",
        blocked,
        |blocked| blocked == "1",
    ));
    assert_eq!(redis::cmd("GET").arg("k").query::<Option<i32>>(&mut reads).unwrap(), None);
    server.unpause();
    written.join().unwrap().unwrap();
    assert_eq!(server.get("k"), Some(b"1".to_vec()));
}

#[test]
fn a_halted_server_answers_nobody_until_it_goes_on() {
    let server = Server::start();
    let connection = client(&server.url(), "client");
    server.stop();
    let other = Server::start();
    let asked = asks(connection, |it| set(it, "k"));
    for _ in 0..20 {
        other.ask::<()>(&["PING"]);
    }
    assert!(!asked.is_finished());
    server.cont();
    asked.join().unwrap().unwrap();
    // One that is dropped while it is halted is gone, too.
    server.stop();
    let pid = server.pid();
    drop(server);
    assert!(!is_alive(pid));
}

#[test]
fn clients_are_killed_by_name_and_by_type() {
    let server = Server::start();
    let mut one = client(&server.url(), "one");
    let mut two = client(&server.url(), "two");
    assert_eq!((server.clients_named("one"), server.clients_named("")), (1, 2));
    assert_eq!(server.kill_clients_named("one"), 1);
    set(&mut one, "k").unwrap_err();
    set(&mut two, "k").unwrap();
    let mut listener = two.as_pubsub();
    listener.subscribe("channel").unwrap();
    assert_eq!(server.clients()[0]["sub"], "1");
    assert_eq!(server.kill_clients_of_type("pubsub"), 1);
    listener.get_message().unwrap_err();
    let _three = client(&server.url(), "three");
    assert_eq!(server.kill_clients_of_type("normal"), 1);
    assert_eq!(server.clients_named(""), 0);
}

#[test]
fn the_commands_of_clients_are_seen_in_order_and_the_kits_are_not() {
    let server = Server::start();
    let mut client = client(&server.url(), "client");
    let monitor = server.monitor();
    server.ask::<()>(&["SET", "kits", "1"]);
    redis::cmd("set").arg("k").arg(b"a \"b\" \\ \n\xff").exec(&mut client).unwrap();
    let call = "return redis.call('INCR', KEYS[1])";
    redis::cmd("EVAL").arg(call).arg(1).arg("n").exec(&mut client).unwrap();
    let seen = monitor.seen(&server);
    let names: Vec<_> = seen.iter().map(|it| (it.name(), it.was_sent())).collect();
    assert_eq!(names, [("SET", true), ("EVAL", true), ("INCR", false)], "{seen:?}");
    assert_eq!(seen[0].words, ["SET", "k", "a \"b\" \\ \n\\xff"]);
    monitor.forget(&server);
    assert!(monitor.seen(&server).is_empty());
    set(&mut client, "k").unwrap();
    assert_eq!(monitor.seen(&server).len(), 1);
}

#[tokio::test]
async fn a_replica_has_what_was_written_until_its_line_is_cut() {
    let mut primary = Server::start();
    primary.ask::<()>(&["SET", "before", "1"]);
    let replica = Server::replica_of(&primary);
    primary.ask::<()>(&["SET", "k", "1"]);
    assert_eq!(primary.wait(1, LONG), 1);
    assert_eq!(replica.keys("*"), ["before", "k"]);
    replica.cut_replication();
    primary.ask::<()>(&["SET", "lost", "1"]);
    assert_eq!(primary.wait(1, Duration::from_millis(200)), 0);
    replica.heal_replication();
    assert_eq!(primary.wait(1, LONG), 1);
    assert_eq!(replica.keys("lost"), ["lost"]);
    replica.cut_replication();
    primary.ask::<()>(&["SET", "lost again", "1"]);
    primary.kill();
    replica.promote();
    replica.ask::<()>(&["SET", "k", "2"]);
    assert_eq!(replica.keys("*"), ["before", "k", "lost"]);
    // Who comes back is one too many, until it is told.
    primary.start_again(Data::Kept).await;
    primary.demote(&replica);
    until("it has what the other one has", || primary.get("k") == Some(b"2".to_vec())).await;
}

#[tokio::test]
async fn a_server_that_loads_says_so_until_it_has_its_data() {
    let mut server = Server::start();
    server.ask::<()>(&["SET", "k", "v"]);
    server.restart_slowly();
    let look = || server.try_ask::<()>(&["GET", "k"]).map_err(|error| error.code().map(str::to_owned));
    let loads = eventually("it loads", look, Result::is_err).await;
    assert_eq!(loads, Err(Some("LOADING".to_owned())));
    server.loaded().await;
    assert_eq!(server.keys("*"), ["k"]);
}

#[test]
fn a_cluster_of_one_node_serves_all_slots() {
    let since = now();
    let server = Server::cluster();
    println!("a cluster was ready after {:?}", since.elapsed());
    let client = redis::cluster::ClusterClient::new([server.url()]).unwrap();
    let mut connection = client.get_connection().unwrap();
    for key in ["a", "{b}", "c{d}e"] {
        redis::cmd("SET").arg(key).arg(1).exec(&mut connection).unwrap();
    }
    assert_eq!(server.keys("*").len(), 3);
}

#[test]
fn a_cluster_of_two_nodes_parts_the_slots() {
    let nodes = Server::cluster_of_two();
    let client = redis::cluster::ClusterClient::new([nodes[0].url()]).unwrap();
    let mut connection = client.get_connection().unwrap();
    for n in 0..100 {
        redis::cmd("SET").arg(format!("k{n}")).arg(1).exec(&mut connection).unwrap();
    }
    assert!(nodes[0].log().has("Cluster state changed: ok", 0));
    let each = nodes.each_ref().map(|node| node.keys("*").len());
    assert!(each[0] > 10 && each[1] > 10 && each[0] + each[1] == 100, "{each:?}");
}

#[cfg(feature = "tls")]
#[test]
fn a_server_with_tls_shows_its_certificate() {
    let server = Server::tls();
    let root_cert = Some(std::fs::read(server.certificate()).unwrap());
    let trusted = redis::TlsCertificates { client_tls: None, root_cert };
    let client = redis::Client::build_with_tls(server.tls_url(), trusted).unwrap();
    set(&mut client.get_connection().unwrap(), "k").unwrap();
    assert_eq!(server.get("k"), Some(b"1".to_vec()));
    let without = redis::Client::open(server.tls_url()).unwrap();
    assert!(without.get_connection().is_err(), "trusted without reason");
}

#[test]
fn users_may_do_what_they_were_given() {
    let server = Server::with(&["--requirepass", "secret"]);
    server.user("app", "right", &["~app:*", "+@all", "-info"]);
    assert!(redis::Client::open(server.url_of("app", "wrong")).unwrap().get_connection().is_err());
    let mut app = client(&server.url_of("app", "right"), "app");
    set(&mut app, "app:k").unwrap();
    assert_eq!(set(&mut app, "k").unwrap_err().code(), Some("NOPERM"));
    assert_eq!(redis::cmd("INFO").exec(&mut app).unwrap_err().code(), Some("NOPERM"));
    let mut nobody = redis::Client::open(server.url()).unwrap().get_connection().unwrap();
    assert_eq!(set(&mut nobody, "k").unwrap_err().code(), Some("NOAUTH"));
    set(&mut client(&server.url_of("", "secret"), "default"), "k").unwrap();
}

#[test]
fn a_line_that_is_cut_passes_nothing_until_it_heals() {
    let server = Server::start();
    let proxy = Proxy::to(server.port());
    let connection = client(&proxy.url(), "client");
    proxy.cut();
    let asked = asks(connection, |it| set(it, "k"));
    let new = Server::start();
    for _ in 0..20 {
        new.ask::<()>(&["PING"]);
    }
    assert!(!asked.is_finished() && server.get("k").is_none());
    proxy.heal();
    asked.join().unwrap().unwrap();
}

#[tokio::test]
async fn a_line_without_answers_still_carries_what_is_asked() {
    let server = Server::start();
    let proxy = Proxy::to(server.port());
    let connection = client(&proxy.url(), "client");
    proxy.cut_answers();
    let asked = asks(connection, |it| set(it, "k"));
    until("it is carried out", || server.get("k").is_some()).await;
    // Time enough for an answer.
    for _ in 0..200 {
        server.ask::<()>(&["PING"]);
    }
    assert!(!asked.is_finished());
    proxy.heal();
    asked.join().unwrap().unwrap();
}

#[tokio::test]
async fn a_line_that_is_cut_in_a_request_carries_half_of_it() {
    let server = Server::start();
    let proxy = Proxy::to(server.port());
    let connection = client(&proxy.url(), "client");
    proxy.cut_in_request();
    // Half of a value is in the server's buffer then.
    let asked = asks(connection, |it| redis::cmd("SET").arg("k").arg("v".repeat(1000)).exec(it));
    let half = || server.clients().iter().filter(|it| it["name"] == "client" && it["qbuf"] != "0").count();
    until("half of it has come", || half() == 1).await;
    assert!(!asked.is_finished() && server.get("k").is_none());
    proxy.heal();
    asked.join().unwrap().unwrap();
    assert!(server.get("k").is_some());
}

#[tokio::test]
async fn a_line_that_is_closed_ends_both_sides_and_may_lead_elsewhere() {
    let (server, other) = (Server::start(), Server::start());
    let proxy = Proxy::to(server.port());
    let mut connection = client(&proxy.url(), "client");
    proxy.close().await;
    set(&mut connection, "k").unwrap_err();
    until("the server has seen it", || server.clients_named("client") == 0).await;
    assert!(redis::Client::open(proxy.url()).unwrap().get_connection().is_err());
    proxy.heal();
    proxy.redirect(other.port());
    set(&mut client(&proxy.url(), "client"), "k").unwrap();
    assert_eq!((server.get("k"), other.get("k").is_some()), (None, true));
}

#[test]
fn answers_are_late_and_turns_are_counted() {
    let server = Server::start();
    let proxy = Proxy::to(server.port());
    let mut connection = client(&proxy.url(), "client");
    let before = proxy.turns();
    set(&mut connection, "k").unwrap();
    let mut pipeline = redis::pipe();
    for n in 0..100 {
        pipeline.cmd("SET").arg(n).arg(1);
    }
    pipeline.exec(&mut connection).unwrap();
    assert_eq!(proxy.turns() - before, 2);
    proxy.delay(Duration::from_millis(300));
    let since = now();
    set(&mut connection, "k").unwrap();
    assert!(since.elapsed() >= Duration::from_millis(300));
}

#[test]
fn scripts_are_forgotten() {
    let server = Server::start();
    let hash: String = server.ask(&["SCRIPT", "LOAD", "return 1"]);
    assert_eq!(server.ask::<Vec<bool>>(&["SCRIPT", "EXISTS", &hash]), [true]);
    server.script_flush();
    assert_eq!(server.ask::<Vec<bool>>(&["SCRIPT", "EXISTS", &hash]), [false]);
}
