//! What a pushed hand-over can cost at least: unlock and notify on one plain connection, and a plain listener that
//! wakes and takes the lock.

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgListener, PgPoolOptions};
use sqlx::{Connection as _, PgConnection};

use crate::now;

pub(crate) const ROUNDS: usize = 10;

/// Before each, as the replicas are idle before a hand-over: who has just run, runs sooner.
pub(crate) const PAUSE: Duration = Duration::from_millis(200);

/// What each costs: from before the statement that unlocks to after the one that takes the lock.
pub(crate) fn hand_overs(target: &PgConnectOptions) -> anyhow::Result<Vec<Duration>> {
    let (released, is_released) = mpsc::channel();
    let (waits, next) = mpsc::channel();
    let taker_target = target.clone();
    let taker = thread::spawn(move || {
        runtime()?.block_on(async {
            let pool = PgPoolOptions::new().max_connections(1).connect_with(taker_target).await?;
            let mut listener = PgListener::connect_with(&pool).await?;
            listener.listen("raw").await?;
            let mut instants = Vec::new();
            for _ in 0..ROUNDS {
                waits.send(())?;
                listener.recv().await?;
                let attempt = sqlx::query_scalar::<_, bool>("SELECT pg_try_advisory_lock(1)");
                let is_taken = attempt.fetch_one(&mut listener).await?;
                instants.push(now());
                anyhow::ensure!(is_taken, "the lock was not free");
                sqlx::query("SELECT pg_advisory_unlock(1)").execute(&mut listener).await?;
            }
            anyhow::Ok(instants)
        })
    });
    runtime()?.block_on(async {
        let mut holder = PgConnection::connect_with(target).await?;
        for _ in 0..ROUNDS {
            next.recv()?;
            // The other one gave it back before it waited.
            sqlx::query("SELECT pg_advisory_lock(1)").execute(&mut holder).await?;
            thread::sleep(PAUSE);
            released.send(now())?;
            sqlx::query("SELECT pg_advisory_unlock(1), pg_notify('raw', '')").execute(&mut holder).await?;
        }
        holder.close().await?;
        anyhow::Ok(())
    })?;
    let instants = taker.join().expect("the taker does not panic")?;
    drop(released);
    let costs =
        is_released.iter().zip(instants).map(|(from, to): (Duration, Duration)| to.saturating_sub(from));
    Ok(costs.collect())
}

fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()
}
