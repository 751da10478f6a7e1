//! Fencing tokens.

use std::time::Duration;

use leasehold::{Reason, TokenError};

#[cfg(all(unix, feature = "postgres"))]
use crate::support::postgres::{Cluster, Login, Stop};
use crate::support::{Log, Member, on_every_store, quick};

/// T-01: one token a term, however often it is asked for, and greater than all of the terms before.
#[tokio::test]
async fn tokens_are_stable_in_a_term_and_grow_from_term_to_term() {
    on_every_store(async |stage| {
        let log = Log::default();
        let mut last = None;
        for round in 0..6 {
            // Another process each time, so that no session remembers anything.
            let who = format!("replica-{round}");
            let mut member = Member::join(stage, quick(&who), "job", &log);
            let lease = member.leads().await;
            let (one, two) = tokio::join!(lease.fencing_token(), lease.fencing_token());
            let token = one.unwrap();
            assert_eq!((two.unwrap(), lease.fencing_token().await.unwrap()), (token, token));
            assert!(last < Some(token), "{token} comes after {last:?}");
            last = Some(token);
            member.stop().await.unwrap();
            let over = lease.fencing_token().await;
            assert_eq!(over, Err(TokenError::Over { reason: Reason::Shutdown }));
        }
    })
    .await;
}

/// T-01: whoever has lost the lease without knowing it gets no token, or it would be greater than that of the next term.
#[tokio::test]
async fn there_is_no_token_for_a_lease_that_was_taken_away() {
    on_every_store(async |stage| {
        let log = Log::default();
        // No heartbeat tells it.
        let options = quick("a").heartbeat_interval(Duration::from_mins(1));
        let mut member = Member::join(stage, options, "job", &log);
        let lease = member.leads().await;
        stage.take_away("a", "job");
        let none = lease.fencing_token().await;
        assert!(matches!(none, Err(TokenError::Over { reason: Reason::Lost(_) })), "{none:?}");
        member.stop().await.unwrap();
    })
    .await;
}

/// T-01: a token that was given is never given again, though the server crashes right after it, and writes to its log
/// late.
#[cfg(all(unix, feature = "postgres"))]
#[tokio::test]
async fn a_token_outlives_a_crash_of_the_server() {
    let settings = ["synchronous_commit=off", "wal_writer_delay=10s"];
    let mut cluster = Cluster::with(Login::Trust, &settings);
    let log = Log::default();
    let locker = leasehold::Locker::postgres(cluster.options(), quick("a")).unwrap();
    let mut member = Member::on(&locker, "job", "a", &log);
    let mut last = None;
    for _ in 0..20 {
        let token = member.leads().await.fencing_token().await.unwrap();
        cluster.stop(Stop::Immediate).await;
        assert!(last < Some(token), "{token} comes after {last:?}");
        last = Some(token);
        cluster.start().await;
    }
    member.stop().await.unwrap();
}
