//! Fencing tokens.

use std::fs;
use std::time::Duration;

#[cfg(all(unix, feature = "postgres"))]
use leasehold::FencingToken;
use leasehold::{Key, Kind, Locker, Reason, TokenError};

#[cfg(all(unix, feature = "postgres"))]
use crate::support::postgres::{Cluster, Database, Login, Stop};
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
    let locker = Locker::postgres(cluster.options(), quick("a")).unwrap();
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

/// T-07, on files: also where the counter is lost, or all of the directory, while nobody leads.
#[tokio::test]
async fn tokens_of_files_grow_after_the_loss_of_the_directory() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("leases");
    let (log, mut last) = (Log::default(), None);
    for round in 0..6 {
        let locker = Locker::file(&path, quick(&format!("replica-{round}"))).unwrap();
        let mut member = Member::on(&locker, "job", "it", &log);
        let token = member.leads().await.fencing_token().await.unwrap();
        assert!(last < Some(token), "{token} comes after {last:?}");
        last = Some(token);
        member.stop().await.unwrap();
        locker.close().await;
        match round % 3 {
            0 => {}
            1 => fs::remove_file(path.join(format!("{}.token", Key::of(Kind::Lease, "job")))).unwrap(),
            _ => fs::remove_dir_all(&path).unwrap(),
        }
    }
}

/// T-07: the documented check of a resource, on a table: equal or newer is taken, older is refused and changes nothing. It
/// takes what [`FencingToken::admits`](leasehold::FencingToken::admits) takes, of any store.
#[cfg(all(unix, feature = "postgres"))]
#[tokio::test]
async fn a_resource_takes_equal_or_newer_tokens_and_refuses_older_ones() {
    let resource = Database::new();
    resource.admin().sql("CREATE TABLE resource (id int, value text, fence bigint NOT NULL DEFAULT 0)");
    on_every_store(async |stage| {
        let log = Log::default();
        let mut tokens = Vec::new();
        for who in ["a", "b"] {
            let mut member = Member::join(stage, quick(who), "job", &log);
            tokens.push(member.leads().await.fencing_token().await.unwrap());
            member.stop().await.unwrap();
        }
        let [earlier, later] = tokens[..] else { panic!("{tokens:?}") };
        resource.admin().sql("DELETE FROM resource; INSERT INTO resource VALUES (1, 'first')");
        let mut connection = resource.connect().await;
        let mut stored = FencingToken::try_from(0_i64).unwrap();
        for (what, token) in
            [("a", earlier), ("a again", earlier), ("b", later), ("a late", earlier), ("b again", later)]
        {
            let check = "UPDATE resource SET value = $1, fence = $2 WHERE id = 1 AND fence <= $2";
            let update = sqlx::query(check).bind(what).bind(token.as_i64()).execute(&mut connection);
            let is_taken = update.await.unwrap().rows_affected() == 1;
            assert_eq!(is_taken, what != "a late", "{what}");
            assert_eq!(is_taken, token.admits(stored), "{what}");
            stored = if is_taken { token } else { stored };
            let rows = resource.admin().sql("SELECT value, fence FROM resource");
            let is_shown = rows[0][0] == what;
            assert_eq!((is_shown, &*rows[0][1]), (is_taken, &*stored.to_string()), "{what}");
        }
    })
    .await;
}
