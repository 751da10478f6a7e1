//! Payments: taken by every replica, settled by the one that leads.
//!
//! Queries are sent so that a pooler in transaction mode can stand in between: each with arguments in a transaction and not
//! `persistent`, since what was prepared is on a connection that others use as well. Without such a pooler leave that out.

use std::time::Duration;

use anyhow::Context as _;
use leasehold::{CancellationToken, Lease, Locker, RunError};
use serde::Serialize;
use sqlx::{PgPool, Row as _};
use tracing::{error, info};

/// What the leader is the leader of. All replicas use the same name.
pub const RECONCILER: &str = "payments/reconciler";

/// How long after a payment came in it is looked at, at most.
const INTERVAL: Duration = Duration::from_secs(1);

/// Before a job that failed is tried again, here or by another replica that has taken over meanwhile.
const PAUSE: Duration = Duration::from_secs(5);

#[derive(Serialize)]
pub struct Payment {
    pub id: i64,
    /// By which replica.
    pub settled_by: Option<String>,
    /// How often that was done. It is to be once.
    pub settled: i32,
}

/// Makes the table. Two replicas that start at once would be in each other's way, also with IF NOT EXISTS.
pub async fn make_table(locker: &Locker, pool: &PgPool) -> anyhow::Result<()> {
    let lock = locker.lock("payments/schema");
    lock.with_timeout(Duration::from_secs(30), async |_: Lease| {
        sqlx::raw_sql(
            "CREATE TABLE IF NOT EXISTS payments (
                id bigint PRIMARY KEY GENERATED ALWAYS AS IDENTITY,
                settled_by text,
                settled int NOT NULL DEFAULT 0
            )",
        )
        .execute(pool)
        .await
        .context("the table of payments")?;
        anyhow::Ok(())
    })
    .await
}

pub async fn add(pool: &PgPool) -> sqlx::Result<i64> {
    sqlx::raw_sql("INSERT INTO payments DEFAULT VALUES RETURNING id").fetch_one(pool).await?.try_get(0)
}

pub async fn get(pool: &PgPool, id: i64) -> sqlx::Result<Option<Payment>> {
    let query = sqlx::query_as("SELECT settled_by, settled FROM payments WHERE id = $1").bind(id);
    let mut tx = pool.begin().await?;
    let row = query.persistent(false).fetch_optional(&mut *tx).await?;
    tx.commit().await?;
    Ok(row.map(|(settled_by, settled)| Payment { id, settled_by, settled }))
}

/// Leads, or stands by, until the service shuts down. An error of the job releases the lease, and it goes on.
pub async fn reconcile(locker: Locker, pool: PgPool, shutdown: CancellationToken) -> anyhow::Result<()> {
    while !shutdown.is_cancelled() {
        let candidate = locker.candidate(RECONCILER).until(shutdown.clone());
        let identity = locker.identity();
        match candidate.run(async |lease| settle_payments(&lease, &pool, identity).await).await {
            Ok(_) => {}
            Err(RunError::Job(error)) => {
                error!("payments are not settled: {error:#}");
                tokio::select! {
                    () = shutdown.cancelled() => {}
                    () = tokio::time::sleep(PAUSE) => {}
                }
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// The job. It looks whether it is to stop between two payments, never in the middle of one.
async fn settle_payments(lease: &Lease, pool: &PgPool, identity: &str) -> anyhow::Result<()> {
    info!(term = lease.term(), "settling payments");
    let mut ticks = tokio::time::interval(INTERVAL);
    loop {
        tokio::select! {
            () = lease.cancelled() => return Ok(()),
            _ = ticks.tick() => {}
        }
        while !lease.cancellation().is_cancelled() && settle_next(lease, pool, identity).await? {}
    }
}

/// Settles one, if there is one. Where a provider is called, [`Lease::fencing_token`] is what it should see as well.
async fn settle_next(lease: &Lease, pool: &PgPool, identity: &str) -> anyhow::Result<bool> {
    let mut tx = pool.begin().await?;
    // Committed in this term, or not at all: also where this process stands still here for an hour.
    lease.fence(&mut tx).await?;
    let settled = sqlx::query(
        "UPDATE payments SET settled_by = $1, settled = settled + 1
         WHERE id = (SELECT id FROM payments WHERE settled_by IS NULL ORDER BY id LIMIT 1)",
    )
    .bind(identity)
    .persistent(false)
    .execute(&mut *tx)
    .await?;
    tx.commit().await?;
    Ok(settled.rows_affected() > 0)
}
