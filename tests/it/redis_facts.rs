//! What the product relies on of Redis, in plain commands: these fail first when a version changes it.

use std::sync::mpsc;
use std::time::Duration;

use redis::{Connection, FromRedisValue, ProtocolVersion, RedisError, RedisResult, Value};

use crate::support::redis::{Data, Pause, Server};
use crate::support::{AT_ONCE, eventually, now, until};

/// Deletes a key if it has that value.
const RELEASE: &str =
    "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0";

const LONG: Duration = Duration::from_mins(1);

/// The server's word for what went wrong.
#[track_caller]
fn code<T: std::fmt::Debug>(answer: RedisResult<T>) -> String {
    let error = answer.unwrap_err();
    error.code().unwrap_or_else(|| panic!("{error:?} is no answer")).to_owned()
}

/// Runs a command.
fn ask<T: FromRedisValue>(connection: &mut Connection, words: &[&str]) -> RedisResult<T> {
    let mut command = redis::Cmd::new();
    for word in words {
        command.arg(word);
    }
    command.query(connection)
}

/// A client that gets what is pushed to it by a channel.
fn pushed(server: &Server, database: i64) -> (Connection, mpsc::Receiver<redis::PushInfo>) {
    let settings =
        redis::RedisConnectionInfo::default().set_protocol(ProtocolVersion::RESP3).set_db(database);
    let target = redis::IntoConnectionInfo::into_connection_info(server.url()).unwrap();
    let mut connection =
        redis::Client::open(target.set_redis_settings(settings)).unwrap().get_connection().unwrap();
    connection.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let (told, tells) = mpsc::channel();
    connection.set_push_sender(told);
    (connection, tells)
}

/// `SET NX PX GET` sets and gives nil, or sets nothing and gives what is there; a value of another type is an
/// error, and stays.
#[test]
fn a_set_that_gives_what_is_there_sets_only_where_nothing_is() {
    let server = Server::start();
    let set = |key: &str, value: &str| {
        server.try_ask::<Option<String>>(&["SET", key, value, "NX", "PX", "60000", "GET"])
    };
    assert_eq!(set("k", "one").unwrap(), None);
    let before = server.pttl("k").unwrap();
    assert!(before > LONG / 2 && before <= LONG, "{before:?}");
    server.ask::<()>(&["PEXPIRE", "k", "5000"]);
    assert_eq!(set("k", "two").unwrap().as_deref(), Some("one"));
    assert_eq!(server.get("k"), Some(b"one".to_vec()));
    assert!(server.pttl("k").unwrap() <= Duration::from_secs(5), "it was extended");
    // Without a time to live.
    server.ask::<()>(&["SET", "for ever", "one"]);
    assert_eq!(set("for ever", "two").unwrap().as_deref(), Some("one"));
    assert_eq!(server.pttl("for ever"), None);
    server.ask::<()>(&["RPUSH", "list", "one"]);
    assert_eq!(code(set("list", "two")), "WRONGTYPE");
    assert_eq!(server.ask::<String>(&["TYPE", "list"]), "list");
    // Without GET it is no error, and looks as a lock that somebody else holds.
    let answer: Value = server.ask(&["SET", "list", "two", "NX", "PX", "60000"]);
    assert_eq!(answer, Value::Nil);
}

/// D28: a time to live of zero is an error of SET, and a deletion by PEXPIRE; neither takes one that is out of range.
#[test]
fn no_time_to_live_is_an_error_of_set_and_a_deletion_by_pexpire() {
    let server = Server::start();
    for ttl in ["0", "-1", "9223372036854775807", "1.5"] {
        assert_eq!(code(server.try_ask::<()>(&["SET", "k", "v", "NX", "PX", ttl])), "ERR", "{ttl}");
        assert_eq!(server.get("k"), None, "{ttl}");
    }
    for ttl in ["0", "-1"] {
        server.ask::<()>(&["SET", "k", "v"]);
        assert_eq!(server.ask::<i32>(&["PEXPIRE", "k", ttl]), 1);
        assert_eq!(server.get("k"), None, "{ttl}");
    }
    server.ask::<()>(&["SET", "k", "v"]);
    assert_eq!(code(server.try_ask::<()>(&["PEXPIRE", "k", "9223372036854775807"])), "ERR");
    assert!(server.get("k").is_some());
    // None that has gone comes to life.
    assert_eq!(server.ask::<i32>(&["PEXPIRE", "gone", "1000"]), 0);
}

/// D31: after a flush, and after a restart, a script is not known by its hash; EVAL makes it known.
#[tokio::test]
async fn a_script_is_forgotten_by_a_flush_and_by_a_restart() {
    let mut server = Server::durable();
    let hash: String = server.ask(&["SCRIPT", "LOAD", RELEASE]);
    let release = |server: &Server| server.try_ask::<i32>(&["EVALSHA", &hash, "1", "k", "token"]);
    for round in 0..2 {
        server.ask::<()>(&["SET", "k", "token"]);
        assert_eq!(release(&server).unwrap(), 1, "{round}");
        server.ask::<()>(&["SET", "k", "token"]);
        if round == 0 {
            server.script_flush();
        } else {
            server.restart(Data::Kept).await;
        }
        assert_eq!(code(release(&server)), "NOSCRIPT", "{round}");
        assert_eq!(server.ask::<i32>(&["EVAL", RELEASE, "1", "k", "token"]), 1);
    }
    assert_eq!(release(&server).unwrap(), 0);
}

/// F-30: what is published reaches the subscribers of every database, by RESP3 on the connection that commands use.
#[test]
fn what_is_published_reaches_every_database_on_the_connection_of_commands() {
    let server = Server::start();
    let (mut one, told) = pushed(&server, 0);
    one.subscribe_resp3("channel").unwrap();
    let (mut other, _told) = pushed(&server, 9);
    assert_eq!(ask::<i32>(&mut other, &["PUBLISH", "channel", "wake"]).unwrap(), 1);
    // Its next answer comes after what was pushed.
    assert_eq!(ask::<String>(&mut one, &["ECHO", "x"]).unwrap(), "x");
    let messages: Vec<_> = told.try_iter().filter(|it| it.kind == redis::PushKind::Message).collect();
    let text = |it: &str| Value::BulkString(it.into());
    assert_eq!(messages.len(), 1);
    assert_eq!(messages[0].data, [text("channel"), text("wake")]);
    // A client of RESP2 that subscribes can ask nothing else.
    let mut old = server.client().get_connection().unwrap();
    let mut listener = old.as_pubsub();
    listener.subscribe("channel").unwrap();
    let clients = server.clients();
    assert_eq!(clients.iter().filter(|client| client["sub"] == "1").count(), 2, "{clients:?}");
}

/// F-30: a message of a script leaves when the script has ended, so that who wakes finds the key free.
#[test]
fn a_message_of_a_script_leaves_after_what_the_script_did() {
    let server = Server::start();
    let (mut waiter, told) = pushed(&server, 0);
    waiter.subscribe_resp3("channel").unwrap();
    let release = "redis.call('PUBLISH', ARGV[1], ''); return redis.call('DEL', KEYS[1])";
    for _ in 0..100 {
        server.ask::<()>(&["SET", "k", "v"]);
        server.ask::<()>(&["EVAL", release, "1", "k", "channel"]);
        let set = ask::<bool>(&mut waiter, &["SET", "k", "mine", "NX"]);
        assert!(set.unwrap() && told.try_iter().any(|it| it.kind == redis::PushKind::Message));
    }
}

/// D29: what is held back by a pause is carried out afterwards, although its client waits no longer, while the connection
/// is open; and not when it has been closed.
#[tokio::test]
async fn a_write_that_was_held_back_lands_after_its_client_has_given_up() {
    let server = Server::start();
    for stays in [true, false] {
        let mut client = server.client().get_connection().unwrap();
        client.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        server.pause(Pause::Writes, LONG);
        let set = ask::<()>(&mut client, &["SET", "k", "v", "NX", "PX", "60000"]);
        assert!(set.unwrap_err().is_timeout());
        let mut left = Some(client);
        if !stays {
            left.take();
            until("its end is seen", || server.clients().is_empty()).await;
        }
        assert_eq!(server.get("k"), None);
        server.unpause();
        // What is asked for afterwards comes afterwards.
        server.ask::<()>(&["SET", "after", "1"]);
        if stays {
            until("it has landed", || server.get("k").is_some()).await;
        }
        assert_eq!(server.get("k").is_some(), stays);
        server.ask::<()>(&["DEL", "k"]);
        drop(left);
    }
}

/// R-09, D32: a replica refuses what writes, and scripts that do; it lets read, also what has expired at its primary.
#[tokio::test]
async fn a_replica_refuses_what_writes() {
    let primary = Server::start();
    primary.ask::<()>(&["SET", "k", "v", "PX", "60000"]);
    let replica = Server::replica_of(&primary);
    assert_eq!(code(replica.try_ask::<()>(&["SET", "k", "w", "NX", "PX", "1000"])), "READONLY");
    assert_eq!(code(replica.try_ask::<()>(&["EVAL", RELEASE, "1", "k", "v"])), "READONLY");
    assert_eq!(replica.get("k"), Some(b"v".to_vec()));
    assert!(replica.pttl("k").is_some());
    // Without its line it serves what it has, unless it is told not to.
    replica.cut_replication();
    replica.config_set("replica-serve-stale-data", "no");
    replica.config_set("repl-timeout", "1");
    let look = || replica.try_ask::<()>(&["GET", "k"]).map_err(|error| error.code().map(str::to_owned));
    let down = eventually("it has noticed", look, Result::is_err).await;
    assert_eq!(down, Err(Some("MASTERDOWN".to_owned())));
    // Whether that may write is looked at first.
    assert_eq!(code(replica.try_ask::<()>(&["SET", "k", "w", "NX"])), "READONLY");
    assert_eq!(code(replica.try_ask::<()>(&["EVAL", RELEASE, "1", "k", "v"])), "MASTERDOWN");
    // Promoted, it takes what it refused.
    replica.promote();
    assert_eq!(replica.ask::<i32>(&["EVAL", RELEASE, "1", "k", "v"]), 1);
}

/// while it loads its data, a server refuses every key, and lets log in.
#[tokio::test]
async fn a_server_that_loads_refuses_every_key() {
    let mut server = Server::start();
    server.restart_slowly();
    assert_eq!(code(server.try_ask::<()>(&["SET", "k", "v", "NX", "PX", "1000"])), "LOADING");
    assert_eq!(code(server.try_ask::<()>(&["EVAL", RELEASE, "1", "k", "v"])), "LOADING");
    assert_eq!(code(server.try_ask::<()>(&["PING"])), "LOADING");
    assert_eq!(server.info("loading"), "1");
    server.loaded().await;
    server.ask::<()>(&["SET", "k", "v", "NX", "PX", "1000"]);
}

/// a cluster that does not serve all slots refuses every key.
#[test]
fn a_cluster_without_all_slots_is_down() {
    let node = Server::node();
    assert_eq!(code(node.try_ask::<()>(&["SET", "k", "v", "NX"])), "CLUSTERDOWN");
    assert_eq!(code(node.try_ask::<()>(&["EVAL", RELEASE, "1", "k", "v"])), "CLUSTERDOWN");
}

/// R-08, D31: keys of one command or script are of one slot, the hash of what stands in the first braces; a script's word
/// for a key that it was not given is an error where another node has it.
#[test]
fn keys_of_one_script_are_of_one_slot() {
    let [node, other] = Server::cluster_of_two();
    // Slots 12182 and 5061.
    assert_eq!(node.ask::<[i32; 2]>(&["EVAL", "return {1, 2}", "0"]), [1, 2]);
    let slot = |key: &str| node.ask::<u16>(&["CLUSTER", "KEYSLOT", key]);
    assert_eq!((slot("foo"), slot("bar")), (12182, 5061));
    for (key, same) in [("{foo}", "foo"), ("a{foo}b", "foo"), ("a{foo}{bar}", "foo"), ("{{foo}", "{foo")] {
        assert_eq!(slot(key), slot(same), "{key}");
    }
    // An empty tag is none.
    assert_ne!(slot("{}foo"), slot("{}bar"));
    let moved: RedisResult<()> = node.try_ask(&["SET", "foo", "v"]);
    assert_eq!(
        moved.as_ref().unwrap_err().redirect_node(),
        Some((&*format!("127.0.0.1:{}", other.port()), 12182))
    );
    assert_eq!(code(moved), "MOVED");
    let both = ["EVAL", "return 1", "2", "foo", "bar"];
    assert_eq!(code(node.try_ask::<()>(&both)), "CROSSSLOT");
    node.ask::<()>(&["EVAL", "return redis.call('SET', KEYS[1], '1')", "1", "bar"]);
    let undeclared = ["EVAL", "return redis.call('GET', 'foo')", "1", "bar"];
    let error: RedisError = node.try_ask::<()>(&undeclared).unwrap_err();
    assert!(error.to_string().contains("non local key"), "{error}");
}

/// F-30, R-08: what a script of one node publishes reaches the subscribers of every other one.
#[tokio::test]
async fn a_message_of_a_script_reaches_every_node_of_a_cluster() {
    let [node, other] = Server::cluster_of_two();
    let (mut waiter, told) = pushed(&other, 0);
    waiter.subscribe_resp3("channel").unwrap();
    // It counts who is at its own node only.
    let publish = ["EVAL", "return redis.call('PUBLISH', ARGV[1], 'wake')", "1", "bar", "channel"];
    assert_eq!(node.ask::<i32>(&publish), 0);
    until("it has come", || {
        ask::<()>(&mut waiter, &["PING"]).unwrap();
        told.try_iter().any(|it| it.kind == redis::PushKind::Message)
    })
    .await;
}

/// a server without room refuses what needs some with OOM; a script when it comes to its first write, if that needs
/// room. What frees and what extends goes on.
#[test]
fn out_of_memory_is_an_answer() {
    let server = Server::start();
    server.ask::<()>(&["SET", "k", "v", "PX", "60000"]);
    server.config_set("maxmemory", "1");
    assert_eq!(server.config("maxmemory-policy"), "noeviction");
    assert_eq!(code(server.try_ask::<()>(&["SET", "new", "v", "NX", "PX", "60000"])), "OOM");
    let set = "return redis.call('SET', KEYS[1], ARGV[1])";
    assert_eq!(code(server.try_ask::<()>(&["EVAL", set, "1", "k", "w"])), "OOM");
    assert_eq!(server.get("k"), Some(b"v".to_vec()));
    // Once it has written, it is let end.
    let after = "redis.call('PEXPIRE', KEYS[1], 50000); return redis.call('SET', KEYS[1], ARGV[1])";
    server.ask::<()>(&["EVAL", after, "1", "k", "v"]);
    // Caught, it is not the script's end, and nothing was done.
    let caught = "return redis.pcall('SET', KEYS[1], ARGV[1])['err']";
    assert!(server.ask::<String>(&["EVAL", caught, "1", "k", "w"]).starts_with("OOM"));
    assert_eq!(server.ask::<i32>(&["PEXPIRE", "k", "50000"]), 1);
    let extend = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('PEXPIRE', KEYS[1], 1000) end return 0";
    assert_eq!(server.ask::<i32>(&["EVAL", extend, "1", "k", "v"]), 1);
    assert_eq!(server.ask::<i32>(&["EVAL", RELEASE, "1", "k", "v"]), 1);
    // Scripts can still be made known.
    server.ask::<()>(&["SCRIPT", "LOAD", "return 2"]);
}

/// where the policy may evict them, keys with a time to live are gone before their time, and nobody is told.
#[test]
fn keys_with_a_time_to_live_are_evicted_where_the_policy_lets() {
    for policy in [
        "allkeys-lru",
        "allkeys-lfu",
        "allkeys-random",
        "volatile-lru",
        "volatile-lfu",
        "volatile-random",
        "volatile-ttl",
    ] {
        let server = Server::with(&["--maxmemory-policy", policy]);
        for n in 0..100 {
            server.ask::<()>(&["SET", &format!("lease:{n}"), "v", "PX", "3600000"]);
        }
        server.config_set("maxmemory", "1");
        // Every key had to go, and it was not enough.
        assert_eq!(code(server.try_ask::<()>(&["SET", "new", "v"])), "OOM", "{policy}");
        assert_eq!((server.keys("*").len(), server.info("evicted_keys")), (0, "100".to_owned()), "{policy}");
        assert_eq!(server.info("maxmemory_policy"), policy);
    }
}

/// D32: WAIT tells how many replicas have all that was written, by anybody, up to the last command of its connection; it is
/// no error when they are too few, and it is none of the commands that scripts may call.
#[test]
fn wait_counts_the_replicas_that_have_it() {
    let primary = Server::start();
    assert_eq!(primary.ask::<u32>(&["WAIT", "0", "0"]), 0);
    let replica = Server::replica_of(&primary);
    primary.ask::<()>(&["SET", "k", "v"]);
    assert_eq!(primary.ask::<u32>(&["WAIT", "1", "10000"]), 1);
    assert_eq!(replica.get("k"), Some(b"v".to_vec()));
    replica.cut_replication();
    let mut writer = primary.connect().unwrap();
    ask::<()>(&mut writer, &["SET", "k", "w"]).unwrap();
    let since = now();
    assert_eq!(ask::<u32>(&mut writer, &["WAIT", "1", "200"]).unwrap(), 0);
    assert!(since.elapsed() >= Duration::from_millis(200));
    assert_eq!(replica.get("k"), Some(b"v".to_vec()));
    // Nor is who has written nothing told of less.
    let mut reader = primary.connect().unwrap();
    assert_eq!(ask::<u32>(&mut reader, &["WAIT", "1", "200"]).unwrap(), 0);
    replica.heal_replication();
    assert_eq!(ask::<u32>(&mut reader, &["WAIT", "1", "10000"]).unwrap(), 1);
    let script = ["EVAL", "return redis.call('WAIT', 1, 0)", "0"];
    assert_eq!(code(ask::<()>(&mut writer, &script)), "ERR");
}

/// T-07, R-06: TIME is in seconds and microseconds, in scripts too. It may go on while a script runs, for which no key's
/// time ends meanwhile: a script asks for it once.
#[test]
fn scripts_know_the_time_of_the_server() {
    let server = Server::start();
    let micros = |[seconds, micros]: [u64; 2]| seconds * 1_000_000 + micros;
    let before = micros(server.ask(&["TIME"]));
    let script = "local a = redis.call('TIME'); for n = 1, 1000000 do end; local b = redis.call('TIME'); \
                  redis.call('SET', KEYS[1], a[1]); return {a[1], a[2], b[1], b[2]}";
    let times: [u64; 4] = server.ask(&["EVAL", script, "1", "k"]);
    let after = micros(server.ask(&["TIME"]));
    let (first, second) = (micros([times[0], times[1]]), micros([times[2], times[3]]));
    assert!(before <= first && first <= second && second <= after, "{before} {times:?} {after}");
    println!("a million loops of a script take {} µs by its TIME", second - first);
    let lasts = "redis.call('SET', KEYS[1], '1', 'PX', '1'); for n = 1, 10000000 do end; \
                 return redis.call('EXISTS', KEYS[1])";
    assert_eq!(server.ask::<i32>(&["EVAL", lasts, "1", "short"]), 1);
    assert_eq!(server.ask::<i32>(&["EXISTS", "short"]), 0);
}

/// T-07: numbers of scripts are exact up to 2^53 only, and become text with 14 digits; what counts stays in commands.
#[test]
fn numbers_of_scripts_are_exact_up_to_two_to_the_53() {
    let server = Server::start();
    let limit = 1_i64 << 53;
    let through = |text: &str, number: &str| server.ask::<String>(&["EVAL", text, "1", "k", number]);
    let (fits, too_big) = ((limit - 1).to_string(), (limit + 1).to_string());
    let whole = "return string.format('%.0f', tonumber(ARGV[1]))";
    assert_eq!(through(whole, &fits), fits);
    assert_eq!(through(whole, &too_big), limit.to_string());
    // Microseconds since 1970 have 16 digits: more than a number shows as text, fewer than it knows.
    let micros = "1764000000123456";
    assert_ne!(through("return tostring(tonumber(ARGV[1]))", micros), micros);
    assert_eq!(through(whole, micros), micros);
    assert_eq!(server.ask::<i64>(&["EVAL", "return tonumber(ARGV[1])", "0", micros]), 1_764_000_000_123_456);
    // As an argument of a command it keeps all its digits; as part of a text it does not.
    server.ask::<()>(&["EVAL", "redis.call('SET', KEYS[1], tonumber(ARGV[1]))", "1", "k", micros]);
    assert_eq!(server.get("k"), Some(micros.as_bytes().to_vec()));
    server.ask::<()>(&["EVAL", "redis.call('SET', KEYS[1], tonumber(ARGV[1]) .. '')", "1", "k", micros]);
    assert_eq!(server.get("k"), Some(b"1.7640000001235e+15".to_vec()));
    // The commands count with 64 bits.
    server.ask::<()>(&["SET", "k", &i64::MAX.wrapping_sub(1).to_string()]);
    assert_eq!(server.ask::<i64>(&["INCR", "k"]), i64::MAX);
    assert_eq!(code(server.try_ask::<()>(&["INCR", "k"])), "ERR");
    // A score is a number as those of scripts.
    server.ask::<()>(&["ZADD", "z", micros, "reader"]);
    assert_eq!(server.ask::<String>(&["ZSCORE", "z", "reader"]), micros);
}

/// a key is gone for every command when its time is over, also while nobody has swept it away.
#[tokio::test]
async fn a_key_is_gone_when_its_time_is_over() {
    let server = Server::start();
    server.ask::<()>(&["DEBUG", "SET-ACTIVE-EXPIRE", "0"]);
    let since = now();
    server.ask::<()>(&["SET", "k", "token", "PX", "100"]);
    until("it is gone", || server.get("k").is_none()).await;
    let after = since.elapsed();
    println!("gone after {after:?}");
    assert!(after >= Duration::from_millis(99) && after < AT_ONCE, "{after:?}");
    server.ask::<()>(&["SET", "k", "token", "PX", "1"]);
    crate::support::pass(Duration::from_millis(5)).await;
    assert_eq!(server.ask::<i32>(&["EVAL", RELEASE, "1", "k", "token"]), 0);
    assert_eq!(server.ask::<i32>(&["PEXPIRE", "k", "1000"]), 0);
}

/// F-26: what a client sent before it closed is still carried out, without anybody to answer to.
#[tokio::test]
async fn what_was_sent_before_the_end_is_carried_out() {
    let server = Server::start();
    for n in 0..50 {
        let key = format!("k{n}");
        let mut client = server.client().get_connection().unwrap();
        client.send_packed_command(&redis::cmd("SET").arg(&key).arg("v").get_packed_command()).unwrap();
        drop(client);
        until("it was carried out", || server.get(&key).is_some()).await;
    }
}
