//! What must not be used, or cannot be reached: an error that says what to change, and tells no secret.

use std::convert::Infallible;
use std::fmt::Write as _;

use leasehold::{ConnectError, Error, Lease, Locker, RunError};

use crate::support::postgres::{Cluster, Login, PgBouncer, PoolMode, Stop};
use crate::support::{Log, Member, pass, quick, until};

async fn refused(url: &str) -> ConnectError {
    let error = match Locker::connect(url, quick("a")).await {
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

/// F-28: down, a wrong password, a database or a user that is not there.
#[tokio::test]
async fn connect_says_what_to_change() {
    let mut cluster = Cluster::with(Login::Scram, &[]);
    cluster.admin().sql("CREATE ROLE app LOGIN PASSWORD 'right'");
    let locker = Locker::connect(&cluster.url("app", "right", "postgres"), quick("a")).await.unwrap();
    assert_eq!(locker.run("job", async |_: Lease| Ok::<_, Infallible>(1)).await.unwrap(), Some(1));
    locker.close().await;

    let error = refused(&cluster.url("app", "s3cret", "postgres")).await;
    assert!(matches!(error, ConnectError::Authentication { .. }), "{error:?}");
    assert!(error.to_string().contains("password"), "{error}");
    let error = refused(&cluster.url("nobody", "s3cret", "postgres")).await;
    assert!(matches!(error, ConnectError::Authentication { .. }), "{error:?}");
    cluster.admin().sql("ALTER ROLE app PASSWORD 's3cret'");
    let error = refused(&cluster.url("app", "s3cret", "nowhere")).await;
    assert!(matches!(error, ConnectError::UnknownDatabase { .. }), "{error:?}");
    let error = refused(&format!("{}?sslmode=require", cluster.url("app", "s3cret", "postgres"))).await;
    assert!(matches!(error, ConnectError::Tls { .. }), "{error:?}");
    until("nothing is left", || cluster.admin().backends("%").is_empty()).await;
    cluster.stop(Stop::Fast).await;
    let error = refused(&cluster.url("app", "s3cret", "postgres")).await;
    assert!(matches!(error, ConnectError::Unreachable { .. }), "{error:?}");
}

/// F-34: a pooler in transaction mode, with one server connection or more, is found every time; nothing stays behind
/// on its connections. In session mode it will do.
#[tokio::test]
async fn a_transaction_pooler_is_refused_and_a_session_pooler_serves() {
    let cluster = Cluster::new();
    for server_connections in [1, 2, 3] {
        let bouncer = PgBouncer::new(&cluster, PoolMode::Transaction, server_connections);
        for _ in 0..5 {
            let error = refused(&bouncer.url()).await;
            assert!(matches!(error, ConnectError::Pooler { .. }), "{server_connections}: {error:?}");
        }
        let lazy = Locker::postgres(bouncer.options(), quick("a")).unwrap();
        let error = lazy.run("job", async |_: Lease| Ok::<_, Infallible>(1)).await.unwrap_err();
        assert!(matches!(error, RunError::Refused(_)), "{error:?}");
        lazy.close().await;
        assert!(cluster.admin().advisory_rows().is_empty());
        assert!(cluster.admin().backends("leasehold/%").is_empty());
        drop(bouncer);
    }
    let bouncer = PgBouncer::new(&cluster, PoolMode::Session, 3);
    let locker = Locker::connect(&bouncer.url(), quick("a")).await.unwrap();
    let mut member = Member::on(&locker, "job", "a", &Log::default());
    let lease = member.leads().await;
    assert!(lease.check().await);
    member.stop().await.unwrap();
    locker.close().await;
}

/// F-24: a read replica is refused by `connect` and waited for by `run`, until it is promoted.
#[tokio::test]
async fn a_read_replica_is_refused_and_waited_for() {
    let primary = Cluster::new();
    let standby = Cluster::standby_of(&primary);
    let error = refused(&standby.url("postgres", "", "postgres")).await;
    assert!(matches!(error, ConnectError::Replica), "{error:?}");
    let log = Log::default();
    let locker = Locker::postgres(standby.options(), quick("a")).unwrap();
    let mut member = Member::on(&locker, "job", "a", &log);
    pass(std::time::Duration::from_millis(500)).await;
    assert!(log.lines().is_empty() && standby.admin().advisory_rows().is_empty());
    standby.admin().sql("SELECT pg_promote()");
    member.leads().await;
    member.stop().await.unwrap();
    locker.close().await;
}
