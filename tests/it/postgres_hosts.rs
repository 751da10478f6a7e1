//! Several hosts in one URL, and servers that change their role.

use std::fs;
use std::net::TcpListener;
use std::time::Duration;

use leasehold::{ConnectError, Error, Key, Kind, Locker, LossCause, Options, Reason};

use crate::support::member::over;
use crate::support::postgres::{Cluster, Stop};
use crate::support::{self, AT_ONCE, Log, Member, now, pass, until};

/// Time enough for each of several hosts.
fn quick(who: &str) -> Options {
    support::quick(who).query_timeout(Duration::from_secs(4))
}

/// A URL that names the servers on these ports, in this order.
fn url(ports: &[u16]) -> String {
    let hosts: Vec<_> = ports.iter().map(|port| format!("127.0.0.1:{port}")).collect();
    format!("postgres://postgres@{}/postgres", hosts.join(","))
}

fn is_led_on(cluster: &Cluster) -> bool {
    cluster.admin().holder(Key::of(Kind::Lease, "job").get()).is_some()
}

/// F-31: a port without a server, one that takes connections and says nothing, a read replica, and then the primary.
#[tokio::test]
async fn the_primary_is_found_among_several_hosts() {
    let primary = Cluster::new();
    let standby = Cluster::standby_of(&primary);
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let ports = [closed, silent.local_addr().unwrap().port(), standby.port(), primary.port()];
    let log = Log::default();
    let since = now();
    let locker = Locker::connect(&url(&ports), quick("a")).await.unwrap();
    println!("connected after {:?}", since.elapsed());
    let mut member = Member::on(&locker, "job", "a", &log);
    member.leads().await;
    assert!(is_led_on(&primary));
    member.stop().await.unwrap();
    locker.close().await;
    assert!(standby.admin().advisory_rows().is_empty());
}

/// F-31: the error names every host, and why it will not do.
#[tokio::test]
async fn where_no_host_will_do_each_one_is_told() {
    let primary = Cluster::new();
    let standby = Cluster::standby_of(&primary);
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let error = Locker::connect(&url(&[standby.port(), closed]), quick("a")).await.unwrap_err();
    let Error::Connect(error) = error else { panic!("{error:?}") };
    assert!(!error.is_permanent());
    let text = error.to_string();
    let ConnectError::NoHost { tried } = error else { panic!("{error:?}") };
    assert_eq!(tried[0].0, format!("127.0.0.1:{}", standby.port()));
    assert!(matches!(tried[0].1, ConnectError::Replica), "{tried:?}");
    assert!(matches!(tried[1].1, ConnectError::Unreachable { .. }), "{tried:?}");
    assert!(text.contains(&format!("127.0.0.1:{closed}")) && text.contains("read replica"), "{text}");
}

/// F-24: the primary dies and its replica is promoted; the same Locker leads there, with no restart.
#[tokio::test]
async fn after_a_failover_the_promoted_replica_is_used() {
    let mut primary = Cluster::new();
    let standby = Cluster::standby_of(&primary);
    let log = Log::default();
    let locker = Locker::connect(&url(&[primary.port(), standby.port()]), quick("a")).await.unwrap();
    let mut member = Member::on(&locker, "job", "a", &log);
    let lease = member.leads().await;
    primary.stop(Stop::Immediate).await;
    assert!(matches!(over(&lease).await, Some(Reason::Lost(LossCause::Closed { .. }))));
    pass(Duration::from_millis(300)).await;
    assert_eq!(log.count("a start"), 1, "a replica elects nobody");
    assert_eq!(standby.admin().sql("SELECT pg_promote()"), [["t"]]);
    let since = now();
    member.leads().await;
    println!("led {:?} after the promotion", since.elapsed());
    assert!(since.elapsed() < AT_ONCE);
    assert!(is_led_on(&standby));
    member.stop().await.unwrap();
    log.assert_one_at_a_time();
}

/// F-31, F-24: a primary that comes back as a replica is a loss, and elects nobody until it is promoted.
#[tokio::test]
async fn a_primary_that_was_demoted_is_a_loss() {
    let mut cluster = Cluster::new();
    let log = Log::default();
    let locker = Locker::postgres(cluster.options(), quick("a")).unwrap();
    let mut member = Member::on(&locker, "job", "a", &log);
    let lease = member.leads().await;
    cluster.stop(Stop::Fast).await;
    fs::write(cluster.dir().join("data/standby.signal"), "").unwrap();
    cluster.start().await;
    assert!(matches!(over(&lease).await, Some(Reason::Lost(_))));
    until("it is a replica", || cluster.admin().one::<String>("SELECT pg_is_in_recovery()") == "t").await;
    pass(Duration::from_millis(300)).await;
    assert_eq!(log.lines(), ["a start", "a end"]);
    assert!(cluster.admin().advisory_rows().is_empty());
    assert_eq!(cluster.admin().sql("SELECT pg_promote()"), [["t"]]);
    member.leads().await;
    member.stop().await.unwrap();
    log.assert_one_at_a_time();
}
