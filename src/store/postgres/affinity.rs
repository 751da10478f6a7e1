//! Whether a connection stays with one server process, or a pooler moves it between statements.
//!
//! A second connection and the first ask in turns who answers them, and what the other one's server process does
//! meanwhile. Through a pool that nobody else uses, the server process that one has just left serves the other next, or
//! the one that asks twice is moved. Others who use the pool leave a trace: what a server process does, and since when,
//! changes only by what its client asks of it, and it counts its transactions, of which each statement of ours is one.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgConnection, PgRow};
use sqlx::{AssertSqlSafe, Connection as _, Row as _};
use tokio::time::timeout;

use super::{checks::Backend, link::Link, refusal, statements};
use crate::error::ConnectError;

/// What is known of a target: how many comparisons in a row were clear. A clone is the same.
#[derive(Clone, Default)]
pub(super) struct Affinity(Arc<AtomicU32>);

impl Affinity {
    /// Its connections stay with one server process each.
    pub(super) fn is_known(&self) -> bool {
        self.0.load(Ordering::Relaxed) >= CLEAR_ROUNDS
    }

    fn was_clear(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    /// Something speaks against it: from the start, then.
    pub(super) fn doubt(&self) {
        self.0.store(0, Ordering::Relaxed);
    }
}

/// Which of the two connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    First,
    Second,
}

/// One answer to a connection.
#[derive(Clone, Debug)]
struct Answer {
    backend: Backend,
    /// The number of the transaction that it was given in, on that server process.
    transaction: i64,
    /// What the server process of the other connection did, and since when. `None` where the server does not tell.
    other: Option<String>,
}

impl Answer {
    fn read(rows: &[PgRow]) -> Result<Self, sqlx::Error> {
        let row = rows.first().ok_or(sqlx::Error::RowNotFound)?;
        Ok(Self { backend: Backend::read(row)?, transaction: row.try_get(2)?, other: row.try_get(3)? })
    }
}

/// How often the comparison has to be clear. Each time with a new second connection: several poolers may share an
/// address.
const CLEAR_ROUNDS: u32 = 3;

/// How often it is made at most.
const ROUNDS: u32 = 3 * CLEAR_ROUNDS;

/// For others to come by, while one connection watches the other.
const PAUSE: Duration = Duration::from_millis(5);

/// Who is asked in a comparison, in this order: whether after a pause, and what goes before the question.
///
/// In turns, for a pooler that gives out what came back last; twice in a row, for one that gives out what came back
/// first; and the first once more while the second is in a transaction.
const TURNS: [(Side, bool, &str); 7] = [
    (Side::First, false, ""),
    (Side::Second, false, ""),
    (Side::Second, false, ""),
    (Side::Second, true, ""),
    (Side::First, false, ""),
    (Side::First, true, ""),
    (Side::Second, false, "BEGIN;"),
];

/// Compares the session, which `backend` answered, with a second connection. Nothing is left on either.
///
/// A server process begins a transaction of its own now and then, to catch up with what others did to the catalogue: on
/// a server that did nothing but make and drop tables that showed in 19 comparisons of 100, and in nearly all of them
/// when the machine had far too much to do. So that alone is no evidence; and only where the server does not tell what
/// its processes do, a comparison that shows it is made again.
pub(super) async fn check(
    link: &mut Link,
    backend: &Backend,
    target: &PgConnectOptions,
    limit: Duration,
    known: &Affinity,
) -> Result<(), ConnectError> {
    let mut last = ask(link, None).await.map_err(refusal::of_statement)?;
    if last.backend != *backend {
        return Err(pooler(MOVED));
    }
    for _ in 0..ROUNDS {
        let compared = compare(link, &mut last, target, limit).await;
        if matches!(compared, Err(ConnectError::Pooler { .. })) {
            known.doubt();
        }
        let trace = compared?;
        // Where nobody used the server processes while they were watched, it was their own doing.
        if trace.others == 0 || !trace.is_hidden {
            // What was clear stays so when the time is over in the middle: far away, a comparison takes a while.
            known.was_clear();
            if known.is_known() {
                return Ok(());
            }
        }
    }
    Err(unclear("other transactions came in between"))
}

/// What a comparison without evidence of a pooler has shown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Trace {
    /// In how many of the steps from one answer to the next another transaction came in between.
    others: usize,
    /// The server does not tell what its processes do.
    is_hidden: bool,
}

/// Makes one comparison. `last` is the last answer to the first connection, before and after.
async fn compare(
    link: &mut Link,
    last: &mut Answer,
    target: &PgConnectOptions,
    limit: Duration,
) -> Result<Trace, ConnectError> {
    // A login takes longer than an answer.
    let mut second = match timeout(2 * limit, PgConnection::connect_with(target)).await {
        Ok(Ok(second)) => second,
        Ok(Err(error)) => return Err(unclear(&refusal::of_connect(error).to_string())),
        Err(_) => return Err(unclear(NOT_SERVED)),
    };
    let mut seen = Seen::new(last.clone());
    let taken = take_turns(link, &mut second, &mut seen, limit).await;
    if let Err(found) = taken {
        timeout(limit, leave(second)).await.ok();
        return Err(found);
    }

    // Where no server connection is left, a pooler cannot serve the first while the second is in a transaction: that one
    // ends then, and where the first is answered afterwards tells whether it was a pooler or a slow server.
    let answered = {
        let mut asking = pin!(ask(link, seen.second.as_ref()));
        if let Ok(answered) = timeout(limit, &mut asking).await {
            leave(second).await;
            answered
        } else {
            let answered = tokio::join!(leave(second), asking).1;
            // What the second was doing then is not known.
            answered.map(|answer| Answer { other: None, ..answer })
        }
    };
    seen.add(Side::First, answered.map_err(refusal::of_statement)?)?;
    *last = seen.first;
    Ok(seen.trace)
}

/// Asks both in their turns, and leaves the second in a transaction.
async fn take_turns(
    link: &mut Link,
    second: &mut PgConnection,
    seen: &mut Seen,
    limit: Duration,
) -> Result<(), ConnectError> {
    for (side, pause, begin) in TURNS {
        if pause {
            tokio::time::sleep(PAUSE).await;
        }
        let answered = match side {
            Side::First => ask(link, seen.second.as_ref()).await.map_err(refusal::of_statement)?,
            Side::Second => {
                let sql = format!("{begin}{}", statements::who(Some(seen.first.backend.pid)));
                let asking = sqlx::raw_sql(AssertSqlSafe(sql)).fetch_all(&mut *second);
                let reason = match timeout(limit, asking).await {
                    Ok(Ok(rows)) => {
                        Answer::read(&rows).map_err(|error| refusal::of_connect(error).to_string())
                    }
                    Ok(Err(error)) => Err(refusal::of_connect(error).to_string()),
                    Err(_) => Err(NOT_SERVED.to_owned()),
                };
                // PgBouncer's words for a transaction where it shares connections between single statements.
                let shares_statements = |reason: &str| reason.contains("statement pooling");
                reason.map_err(
                    |reason| if shares_statements(&reason) { pooler(&reason) } else { unclear(&reason) },
                )?
            }
        };
        seen.add(side, answered)?;
    }
    Ok(())
}

async fn ask(link: &mut Link, second: Option<&Answer>) -> Result<Answer, sqlx::Error> {
    let other = second.map(|answer| answer.backend.pid);
    Answer::read(&link.fetch(statements::who(other)).await?)
}

/// Ends the second connection, its transaction first: a pooler would throw the server connection away with it.
async fn leave(mut second: PgConnection) {
    if sqlx::raw_sql("ROLLBACK").execute(&mut second).await.is_ok() {
        second.close().await.ok();
    }
}

/// What the answers to the two connections have told so far.
struct Seen {
    /// The last answer to each.
    first: Answer,
    second: Option<Answer>,
    /// What each saw the other's server process do since that was asked last.
    watched: [Option<String>; 2],
    trace: Trace,
}

impl Seen {
    fn new(first: Answer) -> Self {
        Self { first, second: None, watched: [None, None], trace: Trace::default() }
    }

    /// # Errors
    ///
    /// [`ConnectError::Pooler`], where the answer cannot be that of a connection with a server process of its own.
    fn add(&mut self, side: Side, answer: Answer) -> Result<(), ConnectError> {
        let (own, other) = match side {
            Side::First => (Some(&self.first), self.second.as_ref()),
            Side::Second => (self.second.as_ref(), Some(&self.first)),
        };
        if other.is_some_and(|other| other.backend == answer.backend) {
            return Err(pooler("two connections were answered by one server process"));
        }
        if let Some(own) = own {
            if own.backend != answer.backend {
                return Err(pooler(MOVED));
            }
            self.trace.others += usize::from(answer.transaction != own.transaction + 1);
        }
        if let Some(other) = other {
            // Behind one address there may be several servers, each with its own processes of that number.
            let is_same_server = other.backend.server == answer.backend.server;
            self.watch(side, answer.other.clone().filter(|_| is_same_server))?;
        }
        match side {
            Side::First => self.first = answer,
            Side::Second => self.second = Some(answer),
        }
        Ok(())
    }

    /// The process of the other connection is at rest, and has done nothing since the last look.
    fn watch(&mut self, side: Side, doing: Option<String>) -> Result<(), ConnectError> {
        // It is asked itself now.
        self.watched[1 - side as usize] = None;
        let Some(doing) = doing else {
            self.trace.is_hidden = true;
            return Ok(());
        };
        let before = self.watched[side as usize].replace(doing.clone());
        if !doing.starts_with("idle") || before.is_some_and(|before| before != doing) {
            return Err(pooler(
                "somebody else used the server process of a connection that asked for nothing",
            ));
        }
        Ok(())
    }
}

const MOVED: &str = "one connection was answered by two server processes";

const NOT_SERVED: &str = "it was not served in time";

fn pooler(evidence: &str) -> ConnectError {
    ConnectError::Pooler { evidence: evidence.to_owned() }
}

fn unclear(reason: &str) -> ConnectError {
    ConnectError::NoSecondConnection { reason: reason.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Side::{First, Second};

    #[test]
    fn what_another_server_says_of_its_own_processes_is_no_evidence() {
        let mut seen = Seen::new(answer((1, 7, "")));
        let elsewhere = answer((2, 3, "active since 8"));
        let server = "another time".to_owned();
        seen.add(Second, Answer { backend: Backend { server, ..elsewhere.backend }, ..elsewhere }).unwrap();
        assert_eq!(seen.trace, Trace { others: 0, is_hidden: true });
    }

    fn answer((pid, transaction, other): (i32, i64, &str)) -> Answer {
        let other = Some(other.to_owned()).filter(|other| !other.is_empty());
        Answer { backend: Backend { pid, server: "since then".to_owned() }, transaction, other }
    }

    /// Of a first connection that process 1 answered in its transaction 7.
    fn seen(answers: &[(Side, (i32, i64, &str))]) -> Result<Trace, ConnectError> {
        let mut seen = Seen::new(answer((1, 7, "")));
        for (side, it) in answers {
            seen.add(*side, answer(*it))?;
        }
        Ok(seen.trace)
    }

    #[test]
    fn a_connection_of_its_own_is_told_from_a_shared_one() {
        let own = [
            (First, (1, 8, "")),
            (Second, (2, 3, "idle since 8")),
            (Second, (2, 4, "idle since 8")),
            (First, (1, 9, "idle since 4")),
            (Second, (2, 5, "idle since 9")),
            (First, (1, 10, "idle in transaction since 5")),
        ];
        assert_eq!(seen(&own).unwrap(), Trace { others: 0, is_hidden: false });
        for shared in [
            // One process for both; either moved; used while it was watched; used at this moment.
            &[(Second, (1, 8, "idle since 7"))][..],
            &[(First, (3, 8, ""))],
            &[(Second, (2, 3, "idle since 7")), (Second, (3, 4, "idle since 7"))],
            &[(Second, (2, 3, "idle since 7")), (Second, (2, 4, "idle since 8"))],
            &[(Second, (2, 3, "active since 8"))],
        ] {
            assert!(seen(shared).unwrap_err().is_permanent(), "{shared:?}");
        }
    }

    #[test]
    fn transactions_of_the_servers_own_are_counted_and_what_is_hidden_is_told() {
        let caught_up =
            [(First, (1, 9, "")), (Second, (2, 3, "idle since 9")), (First, (1, 12, "idle since 3"))];
        assert_eq!(seen(&caught_up).unwrap(), Trace { others: 2, is_hidden: false });
        let hidden = [(Second, (2, 3, "")), (Second, (2, 4, ""))];
        assert_eq!(seen(&hidden).unwrap(), Trace { others: 0, is_hidden: true });
    }
}
