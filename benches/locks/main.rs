//! What critical sections cost, each figure beside its limit measured in the same run.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::time::{Duration, Instant};

use leasehold::{Lease, LockError, Locker, Options};
use sqlx::{Connection as _, PgConnection};

#[path = "../../tests/it/support"]
#[allow(dead_code, unused_imports, reason = "made for the tests, which use all of it")]
mod support {
    pub(crate) mod postgres;
    mod wait;
    pub(crate) use self::wait::{eventually, now, pass, until};
}

use support::postgres::Cluster;

#[expect(clippy::disallowed_methods, reason = "a bench looks at the clock")]
fn now() -> Instant {
    Instant::now()
}

#[tokio::main]
async fn main() {
    let cluster = Cluster::with(support::postgres::Login::Trust, &["max_connections=300"]);
    let locker = Locker::postgres(cluster.options(), Options::default()).unwrap();
    let n = 3000;
    let mut plain = PgConnection::connect_with(&cluster.options()).await.unwrap();
    for round in 0..3 {
        let since = now();
        for _ in 0..n {
            sqlx::query_scalar::<_, bool>("SELECT pg_try_advisory_lock(1)")
                .fetch_one(&mut plain)
                .await
                .unwrap();
            sqlx::query_scalar::<_, bool>("SELECT pg_advisory_unlock(1)")
                .fetch_one(&mut plain)
                .await
                .unwrap();
        }
        let raw = since.elapsed() / n;
        let lock = locker.lock("job");
        let since = now();
        for _ in 0..n {
            lock.try_with(async |_: Lease| Ok::<_, LockError>(())).await.unwrap().unwrap();
        }
        let own = since.elapsed() / n;
        println!(
            "round {round}: raw {raw:?}, try_with {own:?}: {:.2}",
            own.as_secs_f64() / raw.as_secs_f64()
        );
    }
    let limit = Duration::from_secs(3);
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..200_i64 {
        let mut plain = PgConnection::connect_with(&cluster.options()).await.unwrap();
        tasks.spawn(async move {
            let (since, mut cycles) = (now(), 0_u64);
            while since.elapsed() < limit {
                sqlx::query_scalar::<_, bool>("SELECT pg_try_advisory_lock($1)")
                    .bind(task)
                    .fetch_one(&mut plain)
                    .await
                    .unwrap();
                sqlx::query_scalar::<_, bool>("SELECT pg_advisory_unlock($1)")
                    .bind(task)
                    .fetch_one(&mut plain)
                    .await
                    .unwrap();
                cycles += 1;
            }
            cycles
        });
    }
    let raw: u64 = tasks.join_all().await.into_iter().sum();
    let raw = raw as f64 / limit.as_secs_f64();
    for _ in 0..2 {
        let mut tasks = tokio::task::JoinSet::new();
        for task in 0..256 {
            let lock = locker.lock(format!("job-{task}"));
            tasks.spawn(async move {
                let (since, mut cycles) = (now(), 0_u64);
                while since.elapsed() < limit {
                    lock.try_with(async |_: Lease| Ok::<_, LockError>(())).await.unwrap().unwrap();
                    cycles += 1;
                }
                cycles
            });
        }
        let own: u64 = tasks.join_all().await.into_iter().sum();
        let own = own as f64 / limit.as_secs_f64();
        println!("200 connections {raw:.0}/s, 256 tasks {own:.0}/s: {:.1}", own / raw);
    }
}
