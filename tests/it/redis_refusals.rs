//! What the store on Redis refuses, and what it says: replicas, servers that load or evict, foreign values, users without
//! rights, TLS, passwords.

use std::convert::Infallible;
use std::time::Duration;

use leasehold::{
    ConnectError, Error, EveryError, Lease, LockError, Locker, Observer, Options, RunError, State, TokenError,
};
use tracing_subscriber::layer::SubscriberExt as _;

use crate::support::recorder::Recorder;
use crate::support::redis::Server;
use crate::support::replica::{Lines, Replica};
use crate::support::{Log, Member, Stage, eventually, quick, until};

const LONG: Duration = Duration::from_secs(20);

fn locker(server: &Server, options: Options) -> Locker {
    Locker::redis(server.client(), options).unwrap()
}

async fn refused(url: &str) -> ConnectError {
    match Locker::connect(url, quick("refused")).await {
        Err(Error::Connect(error)) => error,
        other => panic!("{other:?}"),
    }
}

/// A candidate that waits for its server, and what it is told meanwhile.
struct Waiting {
    member: Member,
    recorder: Recorder,
    log: Log,
}

impl Waiting {
    fn at(url: &str) -> Self {
        let (recorder, log) = (Recorder::default(), Log::default());
        let _current =
            tracing::subscriber::set_default(tracing_subscriber::registry().with(recorder.clone()));
        let member = Member::on(&Locker::at(url, quick("a")).unwrap(), "job", "a", &log);
        Self { member, recorder, log }
    }

    /// Until it has tried a few times, in vain, for such a reason.
    async fn waits(&self, reason: &str) {
        let told = || self.recorder.all();
        let is_told = |event: &crate::support::recorder::Recorded| event.get("error").contains(reason);
        eventually("it tells why it waits", told, |all| all.iter().filter(|it| is_told(it)).count() >= 3)
            .await;
        assert_eq!(self.log.lines(), [""; 0]);
        assert_ne!(self.member.locker.state("job"), State::Ended);
    }

    async fn leads(mut self) {
        self.member.leads().await;
        self.member.stop().await.unwrap();
    }
}

/// R-09, D32: a replica is refused by connect, and waited for by run, also one whose primary is gone.
#[tokio::test]
async fn a_replica_is_waited_for_until_it_is_promoted() {
    let primary = Server::start();
    let replica = Server::replica_of(&primary);
    assert!(matches!(refused(&replica.url()).await, ConnectError::Replica));
    let waiting = Waiting::at(&replica.url());
    waiting.waits("read replica").await;
    replica.cut_replication();
    replica.config_set("replica-serve-stale-data", "no");
    replica.config_set("repl-timeout", "1");
    until("it has noticed", || replica.info("master_link_status") == "down").await;
    assert_eq!(replica.try_ask::<()>(&["GET", "k"]).unwrap_err().code(), Some("MASTERDOWN"));
    let error = refused(&replica.url()).await;
    assert!(!error.is_permanent(), "{error}");
    println!("{error}");
    waiting.waits("").await;
    replica.promote();
    waiting.leads().await;
}

/// R-09: a primary that is made a replica under a Locker is one no more; when it is promoted again, standbys and locks go on.
#[tokio::test]
async fn a_primary_that_becomes_a_replica_is_left() {
    let (server, other) = (Server::start(), Server::start());
    let log = Log::default();
    let (a, b) = (locker(&server, quick("a")), locker(&server, quick("b")));
    let mut member = Member::on(&a, "job", "a", &log);
    let lease = member.leads().await;
    // It forgets what it had.
    server.demote(&other);
    until("the lease is over", || !lease.is_held()).await;
    let late = b.lock("job").lock_timeout(Duration::from_millis(300)).await.unwrap_err();
    assert!(matches!(late, LockError::Timeout { .. }), "{late:?}");
    server.promote();
    b.lock("job").lock_timeout(LONG).await.unwrap().release().await.unwrap();
    member.leads().await;
    member.stop().await.unwrap();
    log.assert_one_at_a_time();
    a.close().await;
    b.close().await;
}

/// R-09: a server that loads its data is waited for.
#[tokio::test]
async fn a_server_that_loads_is_waited_for() {
    let mut server = Server::start();
    server.restart_slowly();
    let error = refused(&server.url()).await;
    assert!(matches!(&error, ConnectError::Unreachable { reason } if reason.contains("loading")), "{error}");
    let waiting = Waiting::at(&server.url());
    waiting.waits("loading").await;
    server.loaded().await;
    waiting.leads().await;
}

/// R-09: a cluster that is down is waited for, and told; a node of one is no server of its own, and the other way round.
#[tokio::test]
async fn a_cluster_that_is_down_is_waited_for() {
    let node = Server::node();
    let url = node.url().replacen("redis:", "redis+cluster:", 1);
    let error = refused(&url).await;
    println!("{error}");
    assert!(!error.is_permanent(), "{error}");
    let waiting = Waiting::at(&url);
    waiting.waits("").await;
    node.ask::<()>(&["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]);
    waiting.leads().await;

    let wrong = refused(&node.url()).await;
    assert!(matches!(wrong, ConnectError::Cluster { is_cluster: true }), "{wrong}");
    assert!(wrong.to_string().contains("redis+cluster://"), "{wrong}");
    let plain = Server::start();
    let wrong = refused(&plain.url().replacen("redis:", "redis+cluster:", 1)).await;
    println!("{wrong}");
    assert!(!wrong.to_string().contains("redis+cluster"), "{wrong}");
}

/// R-09: a server that may evict leases is refused, by connect and by whoever runs or locks.
#[tokio::test]
async fn a_server_that_evicts_is_refused() {
    for policy in ["allkeys-lru", "volatile-lru", "volatile-ttl", "allkeys-random"] {
        let server = Server::with(&["--maxmemory", "100mb", "--maxmemory-policy", policy]);
        let error = refused(&server.url()).await;
        assert!(matches!(&error, ConnectError::Evicts { policy: it } if it == policy), "{error}");
        assert!(error.to_string().contains("noeviction") && error.is_permanent());
        let a = locker(&server, quick("a"));
        let run = a.run("job", async |_: Lease| Ok::<_, Infallible>(())).await;
        assert!(matches!(&run, Err(RunError::Refused(error)) if error.is_permanent()), "{run:?}");
        let lock = a.lock("job").lock().await;
        assert!(matches!(lock, Err(LockError::Refused(_))), "{lock:?}");
        a.close().await;
        // Without a limit to its memory it evicts nothing; and with one, if it is told not to.
        server.config_set("maxmemory", "0");
        Locker::connect(&server.url(), quick("b")).await.unwrap().close().await;
        server.config_set("maxmemory", "100mb");
        server.config_set("maxmemory-policy", "noeviction");
        Locker::connect(&server.url(), quick("b")).await.unwrap().close().await;
    }
}

/// All that locks, runs, readers, writers, tokens and `every` need of the server.
async fn use_everything(url: &str) {
    let (a, b) = (Locker::connect(url, quick("a")).await.unwrap(), Locker::at(url, quick("b")).unwrap());
    let lock = a.lock("job").lock().await.unwrap();
    assert!(lock.check().await);
    lock.fencing_token().await.unwrap();
    let limit = Duration::from_secs(2);
    let late = b.lock("job").lock_timeout(limit).await.unwrap_err();
    assert!(late.to_string().contains("by a"), "{late}");
    let (waited, released) = tokio::join!(async { b.lock("job").lock_timeout(LONG).await }, lock.release());
    released.unwrap();
    waited.unwrap().keep().await.unwrap();
    let read = a.rw_lock("job").read().await.unwrap();
    assert!(read.check().await);
    let late = b.rw_lock("job").write_timeout(limit).await.unwrap_err();
    assert!(late.to_string().contains("by a"), "{late}");
    let (waited, released) =
        tokio::join!(async { b.rw_lock("job").write_timeout(LONG).await }, read.release());
    released.unwrap();
    let write = waited.unwrap();
    assert!(write.check().await);
    assert!(a.rw_lock("job").try_read().await.unwrap().is_none());
    write.release().await.unwrap();

    let log = Log::default();
    let mut leads = Member::on(&a, "led", "a", &log);
    leads.leads().await;
    let mut stands_by = Member::on(&b, "led", "b", &log);
    stands_by.stands_by().await;
    b.step_down("led").await.unwrap();
    stands_by.leads().await;
    leads.stop().await.unwrap();
    stands_by.stop().await.unwrap();
    let end = leasehold::CancellationToken::new();
    let served = a.every("often", Duration::from_secs(1)).until(end.clone()).run(async |_| {
        end.cancel();
        Ok::<_, EveryError>(())
    });
    served.await.unwrap();
    a.close().await;
    b.close().await;
}

/// The rights that the documentation of `leasehold::redis` lists for all, word by word; and those for more.
fn documented_rights() -> (Vec<String>, Vec<String>) {
    let docs = include_str!("../../src/redis.rs").replace("\n//!", "");
    let (_, docs) = docs.split_once("* Of an ACL:").expect("the docs list the rights");
    let (docs, _) = docs.split_once("# Keys").unwrap();
    let (all, more) = docs.split_once("More of it:").unwrap();
    let quoted = |text: &str| text.split('`').skip(1).step_by(2).map(str::to_owned).collect::<Vec<_>>();
    let all = quoted(all);
    let called = all[1].split_whitespace().map(|it| format!("+{it}"));
    let mut rights: Vec<String> = all[0].split_whitespace().map(str::to_owned).chain(called).collect();
    rights.extend([format!("~{}", all[2]), format!("&{}", all[3])]);
    let more = quoted(more).join(" ");
    let more = more.split_whitespace().filter(|it| it.starts_with('+') || it.starts_with("@@"));
    let more: Vec<_> =
        more.map(|it| if it.starts_with('@') { format!("~{it}") } else { it.to_owned() }).collect();
    println!("{rights:?} {more:?}");
    assert!(rights.iter().chain(&more).all(|it| !it.contains("@all")) && more.len() == 5, "{more:?}");
    (rights, more)
}

fn words(rights: &[String]) -> Vec<&str> {
    rights.iter().map(String::as_str).collect()
}

/// What was refused, as `<command>` or `<key>`; but for what the client says of itself, which nobody needs.
fn denied(server: &Server) -> Vec<String> {
    let entries: Vec<redis::Value> = server.ask(&["ACL", "LOG"]);
    let object = |entry| {
        let fields: std::collections::HashMap<String, redis::Value> = redis::from_redis_value(entry).unwrap();
        redis::from_redis_value::<String>(fields["object"].clone()).unwrap()
    };
    entries.into_iter().map(object).filter(|it| it != "client|setinfo").collect()
}

/// R-09: the rights that the documentation lists are enough for all locks, runs and tokens, and for `every`; those that it lists
/// for more are for that.
#[tokio::test]
async fn the_rights_that_are_documented_are_enough() {
    let server = Server::start();
    let (rights, more) = documented_rights();
    server.user("app", "secret", &words(&rights));
    let url = server.url_of("app", "secret");
    use_everything(&url).await;
    assert_eq!(denied(&server), [""; 0]);

    // Who looks on is not told that nobody is there.
    let observer = Observer::connect(&url, quick("o")).await.unwrap();
    let none = observer.leaders().await;
    assert!(matches!(none, Err(Error::Unanswered { .. })), "{none:?}");
    observer.close().await;
    server.ask::<()>(&["ACL", "LOG", "RESET"]);
    server.user("app", "secret", &[words(&rights), words(&more)].concat());
    let (a, log) = (Locker::at(&url, quick("a")).unwrap(), Log::default());
    let mut leads = Member::on(&a, "led", "a", &log);
    leads.leads().await;
    let elections = a.observer().leaders().await.unwrap();
    assert_eq!(elections.len(), 1, "{elections:?}");
    leads.stop().await.unwrap();
    let replica = Server::replica_of(&server);
    for url in [format!("{url}?wait_for_replicas=1"), format!("{url}?layout=wakuwaku")] {
        let b = Locker::at(&url, quick("b")).unwrap();
        let orders = b.scope(leasehold::Scope::<str>::new("orders"));
        orders.lock("42").lock().await.unwrap().release().await.unwrap();
        orders.rw_lock("42").write().await.unwrap().release().await.unwrap();
        orders.rw_lock("42").read().await.unwrap().release().await.unwrap();
        b.close().await;
    }
    drop(replica);
    a.close().await;
    assert_eq!(denied(&server), [""; 0]);
}

/// R-09: of a cluster, too.
#[tokio::test]
async fn the_rights_that_are_documented_are_enough_on_a_cluster() {
    let server = Server::cluster();
    let (rights, more) = documented_rights();
    server.user("app", "secret", &[words(&rights), words(&more)].concat());
    let url = server.url_of("app", "secret").replacen("redis:", "redis+cluster:", 1);
    use_everything(&url).await;
    assert_eq!(denied(&server), [""; 0]);
}

/// R-09: where one right is missing that can be done without, that is told; and one that cannot is named.
#[tokio::test]
async fn a_right_that_is_missing_is_named() {
    let server = Server::start();
    let ((rights, _), secret) = (documented_rights(), "secret");
    let without = |right: &str| {
        assert!(rights.iter().any(|it| it == right), "{right} is not listed");
        let left: Vec<&str> = rights.iter().map(String::as_str).filter(|it| *it != right).collect();
        server.user("app", secret, &left);
        server.url_of("app", secret)
    };
    for (right, told) in [("+info", "maxmemory-policy"), ("+subscribe", "releases are not pushed")] {
        let url = without(right);
        let a = Locker::connect(&url, quick("a")).await.unwrap();
        let shortfalls = a.bounds().shortfalls;
        assert!(shortfalls.len() == 1 && shortfalls[0].contains(told), "{right}: {shortfalls:?}");
        // Standbys come in all the same.
        let b = Locker::at(&url, quick("b")).unwrap();
        let guard = a.lock("job").lock().await.unwrap();
        assert!(b.lock("job").lock_timeout(Duration::from_millis(200)).await.is_err());
        guard.release().await.unwrap();
        b.lock("job").lock_timeout(LONG).await.unwrap().release().await.unwrap();
        a.close().await;
        b.close().await;
    }
    let url = without("+script|load");
    let error = refused(&url).await;
    assert!(error.to_string().contains("script"), "{error}");
    let url = without("+set");
    let a = Locker::connect(&url, quick("a")).await.unwrap();
    let error = a.lock("job").try_lock().await.unwrap_err();
    assert!(matches!(&error, LockError::Failed { reason } if reason.contains("NOPERM")), "{error:?}");
    assert!(error.to_string().contains("leasehold::redis"), "{error}");
    // Nothing of it is held by anybody.
    a.close().await;
    assert_eq!(server.keys("*"), [""; 0]);
}

/// R-09: what leasehold did not write is neither taken for a lock that is held nor overwritten, and the error says which name
/// it is about and what to change.
#[tokio::test]
async fn what_others_have_at_a_key_is_an_error_and_stays() {
    let server = Server::start();
    let (a, b) = (locker(&server, quick("a")), locker(&server, quick("b")));
    let short = Duration::from_millis(1500);
    for (suffix, with) in
        [(":h", "string"), (":h", "list"), (":r", "string"), (":i", "list"), (":q", "string")]
    {
        for base in ["leasehold:{lock:job}", "leasehold:{rwlock:job}"] {
            if base.contains("{lock") && suffix != ":h" && suffix != ":q" {
                continue;
            }
            let (key, case) = (format!("{base}{suffix}"), format!("{base}{suffix} {with}"));
            // Who has to wait for somebody comes to the queue.
            let held = match suffix {
                ":q" if base.contains("{lock") => Some(b.lock("job").try_lock().await.unwrap().unwrap()),
                _ => None,
            };
            match with {
                "string" => server.ask::<()>(&["SET", &key, "of others"]),
                _ => server.ask::<()>(&["RPUSH", &key, "of others"]),
            }
            let before: redis::Value = server.ask(&["DUMP", &key]);
            let ends = async |what: &str, end: Result<Option<leasehold::LockGuard>, LockError>| match end {
                Err(LockError::Failed { reason }) => {
                    assert!(
                        reason.contains("did not write") && reason.contains("job"),
                        "{case} {what}: {reason}"
                    );
                    1
                }
                // Not all that it does needs each of the keys.
                Ok(Some(guard)) => guard.release().await.map_or(0, |()| 0),
                Ok(None) if held.is_some() => 0,
                other => panic!("{case} {what}: {other:?}"),
            };
            let errors = if base.contains("{lock") {
                ends("try", a.lock("job").try_lock().await).await
                    + ends("wait", a.lock("job").lock_timeout(short).await.map(Some)).await
            } else {
                ends("write", a.rw_lock("job").try_write().await).await
                    + ends("read", a.rw_lock("job").try_read().await).await
                    + ends("wait", a.rw_lock("job").write_timeout(short).await.map(Some)).await
            };
            assert!(errors > 0, "{case}: nobody is told");
            assert_eq!(server.ask::<redis::Value>(&["DUMP", &key]), before, "{case}");
            server.ask::<u32>(&["DEL", &key]);
            if let Some(held) = held {
                held.release().await.unwrap();
            }
            // Nothing is left but that.
            eventually("nothing else is left", || server.keys("*"), Vec::is_empty).await;
        }
    }
    a.close().await;
    b.close().await;
}

/// R-09, T-07: a counter of tokens or a record of slots that is none of ours is an error as well, and stays.
#[tokio::test]
async fn a_foreign_counter_or_record_is_an_error_and_stays() {
    let server = Server::start();
    let a = locker(&server, quick("a"));
    let guard = a.lock("job").lock().await.unwrap();
    guard.fencing_token().await.unwrap();
    guard.release().await.unwrap();
    let counter = server.keys("leasehold:{token:*").remove(0);
    for value in ["of others", "", "-5", "1e300", "0x10", "9007199254740993", "99999999999999999999", " 7"] {
        server.ask::<()>(&["SET", &counter, value]);
        let guard = a.lock("job").lock().await.unwrap();
        let none = guard.fencing_token().await.unwrap_err();
        let text = none.to_string();
        assert!(matches!(none, TokenError::Refused { .. }), "{value}: {none:?}");
        assert!(text.contains(&counter) && text.contains("did not write"), "{value}: {text}");
        assert_eq!(server.get(&counter).as_deref(), Some(value.as_bytes()));
        guard.release().await.unwrap();
    }
    server.ask::<u32>(&["DEL", &counter]);
    server.ask::<()>(&["RPUSH", &counter, "of others"]);
    let guard = a.lock("job").lock().await.unwrap();
    let text = guard.fencing_token().await.unwrap_err().to_string();
    assert!(text.contains(&counter) && text.contains("did not write"), "{text}");
    guard.release().await.unwrap();
    assert_eq!(server.ask::<String>(&["TYPE", &counter]), "list");
    server.ask::<u32>(&["DEL", &counter]);

    for list in [false, true] {
        let key = "leasehold:{lock:often}:s";
        if list {
            server.ask::<()>(&["RPUSH", key, "of others"]);
        } else {
            server.ask::<()>(&["SET", key, "of others"]);
        }
        let before: redis::Value = server.ask(&["DUMP", key]);
        let end = leasehold::CancellationToken::new();
        let often = a.every("often", Duration::from_secs(1)).until(end.clone());
        let error = tokio::time::timeout(
            Duration::from_secs(2),
            often.run(async |_| -> Result<(), EveryError> { panic!("it was served") }),
        )
        .await;
        println!("{list}: {error:?}");
        if let Ok(error) = error {
            assert!(error.unwrap_err().to_string().contains(key));
        }
        assert_eq!(server.ask::<redis::Value>(&["DUMP", key]), before);
        server.ask::<u32>(&["DEL", key]);
    }
    a.close().await;
}

/// R-02, R-09: a server repeats what it was told with a command that it does not know, a password or the value of a grant: nobody
/// else does.
#[tokio::test]
async fn what_a_server_repeats_of_a_command_is_not_shown() {
    let server = Server::with(&["--requirepass", "verysecret", "--rename-command", "HELLO", ""]);
    let url = server.url_of("default", "verysecret");
    let repeated = server.try_ask::<()>(&["HELLO", "3", "AUTH", "default", "verysecret"]).unwrap_err();
    assert!(repeated.to_string().contains("verysecret"), "the server does not repeat it: {repeated}");
    let error = refused(&url).await;
    let diagnosis = leasehold::diagnose(&url, &quick("a")).await.unwrap();
    for told in [error.to_string(), format!("{error:?}"), format!("{diagnosis:?}")] {
        assert!(told.contains("HELLO") && !told.contains("verysecret"), "{told}");
    }

    let server = Server::with(&["--rename-command", "SET", ""]);
    let locker = locker(&server, quick("a"));
    let Err(LockError::Failed { reason, .. }) = locker.lock("job").try_lock().await else { panic!("no SET") };
    assert!(reason.contains("SET") && !reason.contains("leasehold"), "{reason}");
    locker.close().await;
}

/// R-09: a wrong user or password is told as that, and is never shown; nor is that of any URL.
#[tokio::test]
async fn passwords_are_never_shown() {
    let server = Server::with(&["--requirepass", "default-secret"]);
    server.user("app", "right-secret", &["~*", "&*", "+@all"]);
    let recorder = Recorder::default();
    let current = tracing::subscriber::set_default(tracing_subscriber::registry().with(recorder.clone()));
    let mut told = Vec::new();
    let secrets = ["wrong-secret", "right-secret", "default-secret"];
    for url in [server.url(), server.url_of("app", "wrong-secret"), server.url_of("nobody", "right-secret")] {
        let error = refused(&url).await;
        assert!(matches!(error, ConnectError::Authentication { .. }) && !error.is_permanent(), "{error}");
        told.push(format!("{error} {error:?} "));
        // A run waits: passwords change.
        let waiting = Waiting::at(&url);
        waiting.waits("refused the login").await;
        told.push(format!("{:?} {:?}", waiting.recorder.all(), waiting.member.locker));
        waiting.member.stop().await.unwrap();
    }
    let port = server.port();
    for url in [
        format!("redis://app:wrong-secret@127.0.0.1:{port}/nine"),
        format!("redis://app:wrong?right-secret=1@127.0.0.1:{port}"),
        format!("redis://app:wrong/secret?wrong-secret@127.0.0.1:{port}"),
        format!("redis://app:wrong-secret@127.0.0.1:{port}/99"),
    ] {
        let error = Locker::connect(&url, quick("a")).await.unwrap_err();
        told.push(format!("{error} {error:?} "));
    }
    let good = Locker::connect(&server.url_of("app", "right-secret"), quick("a")).await.unwrap();
    let target =
        leasehold::redis::Target::from(redis::Client::open(server.url_of("app", "right-secret")).unwrap());
    good.lock("job").lock().await.unwrap().release().await.unwrap();
    told.push(format!("{good:?} {target:?} {} {:?}", good.address(), good.observer()));
    let error = refused(&server.url_of("app", "right-secret").replace(&port.to_string(), "1")).await;
    told.push(format!("{error} {error:?} {:?}", recorder.all()));
    good.close().await;
    drop(current);
    let told = told.join(" ");
    for secret in secrets {
        assert!(!told.contains(secret), "{secret} is told: {told}");
    }
    assert!(!told.contains("wrong/secret"), "{told}");
    // A database that is none.
    let error = refused(&format!("redis://app:right-secret@127.0.0.1:{port}/99")).await;
    assert!(matches!(error, ConnectError::UnknownDatabase { .. }), "{error}");
}

/// R-09: by TLS, where the system trusts the certificate; one that it does not trust is told as such.
#[cfg(feature = "tls")]
#[tokio::test]
async fn tls_needs_a_certificate_that_the_system_trusts() {
    use std::process::Command;

    use crate::support::replica::PROGRAM;

    let (server, lines) = (Server::tls(), Lines::new());
    let error = refused(&server.tls_url()).await;
    assert!(matches!(error, ConnectError::Tls { .. }), "{error:?}");
    println!("{error}");
    // Its name is that of the certificate.
    let wrong_name = server.tls_url().replace("localhost", "127.0.0.1");
    let mut trusting = Command::new(PROGRAM);
    trusting.env("SSL_CERT_FILE", server.certificate()).env_remove("SSL_CERT_DIR");
    let mut member = Replica::by(trusting, &server.tls_url(), &quick("a"), "job", &lines, &["hold"]);
    lines.wait_for("a start", 0).await;
    assert!(server.get("leasehold:{lease:job}:h").is_some());
    server.kill_clients_named("leasehold/a");
    until("it is back", || server.clients_named("leasehold/a") == 1).await;
    member.terminate();
    assert!(member.wait().await.success());
    assert_eq!(lines.count("start"), 1);

    let mut misnamed = Command::new(PROGRAM);
    misnamed.env("SSL_CERT_FILE", server.certificate()).stderr(std::process::Stdio::null());
    let mut member = Replica::by(misnamed, &wrong_name, &quick("b"), "job", &lines, &["hold"]);
    assert!(!member.wait().await.success());
    // Nobody connects without a look at it.
    let unseen = Locker::connect(&format!("{}#insecure", server.tls_url()), quick("c")).await.unwrap_err();
    assert!(matches!(unseen, Error::Url(_)), "{unseen:?}");
    // A server that does not speak it.
    let plain = refused(&server.url().replace("redis:", "rediss:").replace("127.0.0.1", "localhost")).await;
    println!("{plain:?}");
}

/// C-06, D05: a leader whose process stands still is seen as the one who holds the lease, and as silent; those who stand by
/// answer.
#[tokio::test]
async fn a_frozen_leader_is_seen_as_the_holder() {
    let (stage, lines, log) = (Stage::redis(), Lines::new(), Log::default());
    let mut leader = Replica::spawn(&stage, &quick("leader"), "job", &lines, "hold");
    lines.wait_for("leader start", 0).await;
    let standby = Member::join(&stage, quick("standby"), "job", &log);
    standby.stands_by().await;
    let observer = stage.locker(quick("o")).observer();
    leader.stop().await;
    let snapshot = observer.snapshot().await.unwrap();
    println!("{snapshot:?}");
    let election = snapshot.of(&"job".into());
    let holder = election.leader.expect("somebody holds it");
    assert_eq!((holder.identity.as_deref(), holder.role), (Some("leader"), None));
    assert!(holder.silent_for.is_some());
    assert_eq!(election.standbys[0].identity.as_deref(), Some("standby"));
    leader.cont();
    let answers = async || observer.snapshot().await.unwrap().of(&"job".into()).leader.and_then(|it| it.role);
    while answers().await.is_none() {}
    leader.terminate();
    assert!(leader.wait().await.success());
    standby.stop().await.unwrap();
    observer.close().await;
}

/// R-09: where fewer replicas are attached than have to acknowledge every grant, none would be given; and wake-ups are looked at
/// on the channel of the URL's own database.
#[tokio::test]
async fn what_the_url_asks_for_is_what_is_diagnosed() {
    let server = Server::start();
    let diagnosis =
        leasehold::diagnose(&format!("{}/0?wait_for_replicas=1", server.url()), &quick("a")).await.unwrap();
    assert!(!diagnosis.is_go(), "{diagnosis}");
    assert!(matches!(diagnosis.error, Some(ConnectError::TooFewReplicas { replicas: 0, wanted: 1 })));
    server.user("app", "secret", &["~*", "+@all", "&leasehold:3", "&leasehold:3:*"]);
    for (database, is_pushed) in [(3, true), (4, false)] {
        let url = format!("{}/{database}", server.url_of("app", "secret"));
        let diagnosis = leasehold::diagnose(&url, &quick("a")).await.unwrap();
        let told = diagnosis.checks.iter().find(|check| check.what == "wake-ups").unwrap();
        assert_eq!(told.verdict == leasehold::Verdict::Good, is_pushed, "{database}: {told}");
    }
}
