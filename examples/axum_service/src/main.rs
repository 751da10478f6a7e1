//! A service of several replicas: each answers requests, and one of them, whichever leads, settles payments.
//!
//! ```text
//! DATABASE_URL=postgres://app@localhost/app LISTEN=127.0.0.1:8080 cargo run
//! curl -X POST localhost:8080/payments         # any replica takes it; the leader settles it
//! curl localhost:8080/leader                   # who is that?
//! curl localhost:8080/livez              # also /readyz, /metrics
//! ```
//!
//! `LEASEHOLD_STORE` is the URL for the leases, if it is not that of the pool: the same database, where the pool goes through a
//! pooler in transaction mode. `LEASEHOLD_OPTIONS` sets intervals: `retry_interval=1s,drain_timeout=10s`.

mod http;
mod payments;

use std::env;
use std::time::Duration;

use anyhow::Context as _;
use leasehold::{CancellationToken, Locker, Options};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder};
use sqlx::PgPool;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing::{info, warn};

/// Seconds: from what a healthy store takes to what a lease does not survive.
const BUCKETS: [f64; 7] = [0.001, 0.005, 0.025, 0.1, 0.5, 2.0, 10.0];

/// How long those who are being served have when the service ends, and then the pool: one who sends half a request, and then
/// nothing, would keep it for ever, as would a statement that waits for a lock. With the drain timeout this is less than the
/// 30 s after which Kubernetes kills.
const DRAIN: Duration = Duration::from_secs(3);

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    // Before the Locker is made, which tells the recorder from then on.
    let recorder = PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Prefix("leasehold_".into()), &BUCKETS)?
        .install_recorder()?;
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let url = env::var("DATABASE_URL").context("DATABASE_URL is not set")?;
    // Also while it waits for a database that does not answer.
    let (pool, locker) = tokio::select! {
        started = start(&url) => started?,
        () = told_to_stop(&mut terminate, &mut interrupt) => return Ok(()),
    };

    let (shutdown, serving) = (CancellationToken::new(), CancellationToken::new());
    let app = http::App::new(&locker, &pool, recorder, shutdown.clone());
    let address = env::var("LISTEN").unwrap_or_else(|_| "127.0.0.1:8080".to_owned());
    let listener = TcpListener::bind(&address).await.with_context(|| address.clone())?;
    println!("listening on {}", listener.local_addr()?);
    let server =
        axum::serve(listener, http::router(app)).with_graceful_shutdown(serving.clone().cancelled_owned());
    let mut server = tokio::spawn(server.into_future());
    let mut reconciler = tokio::spawn(payments::reconcile(locker.clone(), pool.clone(), shutdown.clone()));

    let ended = tokio::select! {
        () = told_to_stop(&mut terminate, &mut interrupt) => None,
        // Only if leasehold must not be used as it is: there is nothing left to wait for.
        ended = &mut reconciler => Some(ended),
    };

    // The order matters. First: no new requests from the balancer, which asks /readyz.
    info!("shutting down");
    shutdown.cancel();
    // The job finishes the payment at hand; then its lease is released, and another replica leads at once. Requests are
    // still answered meanwhile, and so are probes and the scrape.
    let reconciled = match ended {
        Some(ended) => ended,
        None => reconciler.await,
    };
    // Then those who are being served, and nobody new.
    serving.cancel();
    if let Ok(served) = tokio::time::timeout(DRAIN, &mut server).await {
        served??;
    } else {
        warn!("somebody is still being served after {DRAIN:?}, and is left");
        server.abort();
    }
    // Nobody uses the session any more.
    locker.close().await;
    // Last, what all of them have used.
    if tokio::time::timeout(DRAIN, pool.close()).await.is_err() {
        warn!("the database is still busy for this process after {DRAIN:?}, and is left");
    }
    reconciled?
}

async fn told_to_stop(terminate: &mut Signal, interrupt: &mut Signal) {
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
}

/// Everything that needs the database before anybody is served.
async fn start(url: &str) -> anyhow::Result<(PgPool, Locker)> {
    // For poolers: PgBouncer refuses that option as it is delivered, and through transaction mode nothing may be prepared under
    // a name. Without one leave both out.
    let target = url.parse::<PgConnectOptions>()?.extra_float_digits(None).statement_cache_capacity(0);
    let pool = PgPoolOptions::new().connect_with(target).await.context("the database")?;
    // A job that hangs must not hold up a deployment: after 20 s its future is dropped, and its lease released.
    let options = env::var("LEASEHOLD_OPTIONS").unwrap_or_else(|_| "drain_timeout=20s".to_owned());
    let options: Options = options.parse().context("LEASEHOLD_OPTIONS")?;
    // One session for everything that this process coordinates; it takes no connection from the pool.
    let locker = Locker::at(&env::var("LEASEHOLD_STORE").unwrap_or_else(|_| url.to_owned()), options)?;
    payments::make_table(&locker, &pool).await?;
    Ok((pool, locker))
}
