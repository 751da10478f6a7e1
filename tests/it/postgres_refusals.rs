//! What must not be used, or cannot be reached: an error that says what to change, and tells no secret.

use std::convert::Infallible;
use std::fmt::Write as _;
use std::time::Duration;

use leasehold::{ConnectError, Error, Lease, Locker, Options};

use crate::support::member::over;
use crate::support::postgres::{Cluster, Login, Stop};
use crate::support::{Log, Member, pass, quick, until};

/// A login by password takes its time on a machine that is busy with other tests.
fn patient(who: &str) -> Options {
    quick(who).query_timeout(Duration::from_secs(10))
}

async fn refused(url: &str) -> ConnectError {
    let error = match Locker::connect(url, patient("a")).await {
        Err(Error::Connect(error)) => error,
        Err(error) => panic!("{error:?}"),
        Ok(_) => panic!("it connected to {url}"),
    };
    let mut text = format!("{error} {error:?}");
    let mut source = std::error::Error::source(&error);
    while let Some(error) = source {
        write!(text, " {error} {error:?}").unwrap();
        source = error.source();
    }
    println!("{error}");
    assert!(!text.contains("s3cret"), "{text}");
    error
}

/// F-28, "bad input": down, nowhere, a wrong password, a database or a user that is not there or may not, no TLS.
#[tokio::test]
async fn connect_says_what_to_change() {
    let mut cluster = Cluster::with(Login::Scram, &[]);
    cluster.admin().sql("CREATE ROLE app LOGIN PASSWORD 'right'");
    let locker = Locker::connect(&cluster.url("app", "right", "postgres"), patient("a")).await.unwrap();
    assert_eq!(locker.run("job", async |_: Lease| Ok::<_, Infallible>(1)).await.unwrap(), Some(1));
    locker.close().await;

    let error = refused(&cluster.url("app", "s3cret", "postgres")).await;
    assert!(matches!(error, ConnectError::Authentication { .. }), "{error:?}");
    assert!(error.to_string().contains("check the user, the password"), "{error}");
    // Who may not come in does not learn what there is.
    for url in [cluster.url("app", "s3cret", "nowhere"), cluster.url("nobody", "s3cret", "postgres")] {
        let error = refused(&url).await;
        assert!(matches!(error, ConnectError::Authentication { .. }), "{error:?}");
        assert!(error.to_string().contains("check the user, the password"), "{error}");
    }
    cluster.admin().sql("ALTER ROLE app PASSWORD 's3cret'");
    let error = refused(&cluster.url("app", "s3cret", "nowhere")).await;
    assert!(matches!(error, ConnectError::UnknownDatabase { .. }), "{error:?}");
    assert!(error.to_string().contains("does not know the database"), "{error}");
    cluster.admin().sql("CREATE DATABASE closed");
    cluster.admin().sql("REVOKE CONNECT ON DATABASE closed FROM PUBLIC");
    let error = refused(&cluster.url("app", "s3cret", "closed")).await;
    assert!(error.to_string().contains("may connect to the database"), "{error}");
    let error = refused(&format!("{}?sslmode=require", cluster.url("app", "s3cret", "postgres"))).await;
    assert!(matches!(error, ConnectError::Tls { .. }), "{error:?}");
    assert!(error.to_string().contains("no TLS connection"), "{error}");
    let error = refused("postgres://app:s3cret@127.0.0.1:1/postgres").await;
    assert!(error.to_string().contains("is the server up"), "{error}");
    let error = refused("postgres://app:s3cret@no-such-host.invalid/postgres").await;
    assert!(error.to_string().contains("cannot be reached"), "{error}");
    until("nothing is left", || cluster.admin().backends("%").is_empty()).await;
    cluster.stop(Stop::Fast).await;
    let error = refused(&cluster.url("app", "s3cret", "postgres")).await;
    assert!(matches!(error, ConnectError::Unreachable { .. }), "{error:?}");
}

/// F-24: down at the start, and three times more: `connect` says so, and `run` leads whenever the server is back.
#[tokio::test]
async fn a_server_that_is_down_is_refused_and_waited_for() {
    let mut cluster = Cluster::new();
    cluster.stop(Stop::Immediate).await;
    let error = refused(&cluster.url("postgres", "s3cret", "postgres")).await;
    assert!(matches!(error, ConnectError::Unreachable { .. }), "{error:?}");
    let locker = Locker::postgres(cluster.options(), quick("a")).unwrap();
    let mut member = Member::on(&locker, "job", "a", &Log::default());
    for _ in 0..3 {
        cluster.start().await;
        let lease = member.leads().await;
        cluster.stop(Stop::Immediate).await;
        println!("{:?}", over(&lease).await);
    }
    member.stop().await.unwrap();
    locker.close().await;
}

/// F-24, F-31: a read replica is refused by `connect` and waited for by `run`, until it is promoted.
#[tokio::test]
async fn a_read_replica_is_refused_and_waited_for() {
    let primary = Cluster::new();
    let standby = Cluster::standby_of(&primary);
    let error = refused(&standby.url("postgres", "", "postgres")).await;
    assert!(matches!(error, ConnectError::Replica), "{error:?}");
    let log = Log::default();
    let locker = Locker::postgres(standby.options(), quick("a")).unwrap();
    let mut member = Member::on(&locker, "job", "a", &log);
    pass(Duration::from_millis(500)).await;
    assert!(log.lines().is_empty() && standby.admin().advisory_rows().is_empty());
    assert_eq!(standby.admin().sql("SELECT pg_promote()"), [["t"]]);
    member.leads().await;
    member.stop().await.unwrap();
    locker.close().await;
}
