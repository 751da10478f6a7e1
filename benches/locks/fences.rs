//! What it costs to fence a transaction, and to begin a term that can.

use leasehold::{Lease, Locker, Options};
use sqlx::{Connection as _, PgConnection};

use crate::arguments::Arguments;
use crate::now;
use crate::report::{Goal, Row, Spread};
use crate::support::postgres::Cluster;

/// A round trip of the same sort, and no more in it than one lock.
const RAW: &str = "SELECT pg_catalog.pg_try_advisory_xact_lock_shared($1)";

pub(crate) async fn rows(server: &Cluster, arguments: Arguments) -> anyhow::Result<[Row; 2]> {
    let locker = Locker::postgres(server.options(), Options::default())?;
    let (plain, fenced) = (locker.lock("plain"), locker.lock("fenced").fenced());
    // Connected, and prepared.
    plain.try_with(async |_: Lease| anyhow::Ok(())).await?;
    let (mut with_term, mut without) = (Spread::default(), Spread::default());
    for _ in 0..arguments.rounds() {
        for (lock, spread) in [(&plain, &mut without), (&fenced, &mut with_term)] {
            let since = now();
            for _ in 0..arguments.cycles() {
                lock.try_with(async |_: Lease| anyhow::Ok(())).await?;
            }
            spread.add(now().saturating_sub(since) / arguments.cycles());
        }
    }
    let guard = fenced.lock().await?;
    let mut connection = PgConnection::connect_with(&server.options()).await?;
    // As the connections of a service: it keeps prepared statements.
    sqlx::query(RAW).bind(1_i64).execute(&mut connection).await?;
    let (mut ours, mut limit) = (Spread::default(), Spread::default());
    for _ in 0..arguments.rounds() {
        for (is_ours, spread) in [(false, &mut limit), (true, &mut ours)] {
            let mut spent = std::time::Duration::ZERO;
            for _ in 0..arguments.cycles() {
                let mut tx = connection.begin().await?;
                let since = now();
                if is_ours {
                    guard.fence(&mut tx).await?;
                } else {
                    sqlx::query(RAW).bind(1_i64).execute(&mut *tx).await?;
                }
                spent += now().saturating_sub(since);
                tx.rollback().await?;
            }
            spread.add(spent / arguments.cycles());
        }
    }
    guard.release().await?;
    connection.close().await?;
    locker.close().await;
    let fence = Row::spread("fence".to_owned(), &ours, &limit);
    let fence = if arguments.common.is_quick { fence } else { fence.with_goal(Goal::TimesAtMost(1.25)) };
    Ok([fence, Row::spread("cycle of `try_with`, fenced".to_owned(), &with_term, &without)])
}
