//! Whether a connection stays with one server process, or a pooler moves it between statements.
//!
//! A second connection asks three times outside of a transaction and once inside of one that stays open while the first
//! asks again: through an idle pool that alone gave a pooler away 20 times of 20, where a single ask missed it 20 times
//! of 20. Through a pool that others keep busy chance plays along; but they leave a trace: a server process counts its
//! transactions, and each statement of ours is one.

use std::pin::pin;
use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgConnection, PgRow};
use sqlx::{AssertSqlSafe, Connection as _, Row as _};

use super::{checks::Backend, link::Link, refusal, statements};
use crate::error::ConnectError;

/// One answer to a connection.
#[derive(Clone, Debug)]
struct Answer {
    backend: Backend,
    /// The number of the transaction that it was given in, on that server process.
    transaction: i64,
}

impl Answer {
    fn read(rows: &[PgRow]) -> Result<Self, sqlx::Error> {
        let row = rows.first().ok_or(sqlx::Error::RowNotFound)?;
        Ok(Self { backend: Backend::read(row)?, transaction: row.try_get(2)? })
    }
}

/// How often the comparison has to be clear: through a pool with little to do, one was by chance in 2 of 92 connections.
const CLEAR_ROUNDS: usize = 3;

/// How often it is made at most.
const ROUNDS: usize = 3 * CLEAR_ROUNDS;

/// Between two comparisons, for others to come by.
const PAUSE: Duration = Duration::from_millis(15);

/// Compares the session with a second connection. Nothing is left on either.
///
/// A server process begins a transaction of its own now and then, to catch up with what others did to the catalogue: on
/// a server that did nothing but make and drop tables that showed in 19 comparisons of 100. So one that is not clear is
/// made again, and only where most answers of all of them show it, others share the connection.
pub(super) async fn check(
    link: &mut Link,
    target: &PgConnectOptions,
    limit: Duration,
) -> Result<(), ConnectError> {
    let mut found = Trace::default();
    let mut clear = 0;
    for _ in 0..ROUNDS {
        let trace = compare(link, target, limit).await?;
        if trace.others == 0 {
            clear += 1;
            if clear == CLEAR_ROUNDS {
                return Ok(());
            }
            tokio::time::sleep(PAUSE).await;
            continue;
        }
        found = Trace { others: found.others + trace.others, steps: found.steps + trace.steps };
    }
    Err(if 2 * found.others > found.steps {
        pooler("transactions of others came in between")
    } else {
        unclear("other transactions came in between")
    })
}

/// In how many of the steps from one answer to the next another transaction came in between.
#[derive(Debug, Default, PartialEq, Eq)]
struct Trace {
    others: usize,
    steps: usize,
}

async fn compare(link: &mut Link, target: &PgConnectOptions, limit: Duration) -> Result<Trace, ConnectError> {
    let rows = link.fetch(statements::WHO.to_owned()).await.map_err(refusal::of_statement)?;
    let mut firsts = vec![Answer::read(&rows).map_err(refusal::of_statement)?];
    let mut seconds = Vec::new();
    let asking = async {
        let mut second = PgConnection::connect_with(target).await?;
        for prefix in ["", "", "", "BEGIN;"] {
            let sql = AssertSqlSafe(format!("{prefix}{}", statements::WHO));
            seconds.push(Answer::read(&sqlx::raw_sql(sql).fetch_all(&mut second).await?)?);
        }
        Ok::<_, sqlx::Error>(second)
    };
    let second = match tokio::time::timeout(limit, asking).await {
        Ok(Ok(second)) => Ok(second),
        Ok(Err(error)) => Err(refusal::of_connect(error).to_string()),
        Err(_) => Err("it was not served in time".to_owned()),
    };
    let second = match second {
        Ok(second) => second,
        Err(reason) => {
            judge(&firsts, &seconds)?;
            // PgBouncer's words for a transaction where it shares connections between single statements.
            let shares_statements = reason.contains("statement pooling");
            return Err(if shares_statements { pooler(&reason) } else { unclear(&reason) });
        }
    };

    if let Err(found) = judge(&firsts, &seconds) {
        leave(second).await;
        return Err(found);
    }

    let asking = async {
        for _ in 0..3 {
            firsts.push(Answer::read(&link.fetch(statements::WHO.to_owned()).await?)?);
        }
        Ok::<_, sqlx::Error>(())
    };
    // Where no server connection is left, a pooler cannot serve the first while the second is in a transaction: that one
    // ends then, and where the first is answered afterwards tells whether it was a pooler or a slow server.
    let asked = {
        let mut asking = pin!(asking);
        if let Ok(asked) = tokio::time::timeout(limit, &mut asking).await {
            leave(second).await;
            asked
        } else {
            tokio::join!(leave(second), asking).1
        }
    };
    asked.map_err(refusal::of_statement)?;
    judge(&firsts, &seconds)
}

/// Ends the second connection, its transaction first: a pooler would throw the server connection away with it.
async fn leave(mut second: PgConnection) {
    if sqlx::raw_sql("ROLLBACK").execute(&mut second).await.is_ok() {
        second.close().await.ok();
    }
}

/// What the answers to two connections, each in their order, say.
fn judge(firsts: &[Answer], seconds: &[Answer]) -> Result<Trace, ConnectError> {
    if firsts.iter().any(|first| seconds.iter().any(|second| first.backend == second.backend)) {
        return Err(pooler("two connections were answered by one server process"));
    }
    let steps = || firsts.windows(2).chain(seconds.windows(2));
    if steps().any(|step| step[0].backend != step[1].backend) {
        return Err(pooler("one connection was answered by two server processes"));
    }
    let others = steps().filter(|step| step[1].transaction != step[0].transaction + 1).count();
    Ok(Trace { others, steps: steps().count() })
}

fn pooler(evidence: &str) -> ConnectError {
    ConnectError::Pooler { evidence: evidence.to_owned() }
}

fn unclear(reason: &str) -> ConnectError {
    ConnectError::NoSecondConnection { reason: reason.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answers(answers: &[(i32, i64)]) -> Vec<Answer> {
        let backend = |pid| Backend { pid, server: "since then".to_owned() };
        answers.iter().map(|&(pid, transaction)| Answer { backend: backend(pid), transaction }).collect()
    }

    #[test]
    fn a_connection_of_its_own_is_told_from_a_shared_one() {
        let one = answers(&[(1, 7), (1, 8), (1, 9), (1, 10)]);
        let two = answers(&[(2, 3), (2, 4), (2, 5), (2, 6)]);
        assert_eq!(judge(&one, &two).unwrap(), Trace { others: 0, steps: 6 });
        for (first, second) in [
            (one.clone(), answers(&[(2, 3), (1, 4)])),
            (answers(&[(1, 7), (3, 8)]), two.clone()),
            (one.clone(), answers(&[(2, 3), (3, 4)])),
        ] {
            assert!(judge(&first, &second).unwrap_err().is_permanent());
        }
        let used = answers(&[(1, 7), (1, 9), (1, 12)]);
        assert_eq!(judge(&used, &two).unwrap(), Trace { others: 2, steps: 5 });
    }
}
