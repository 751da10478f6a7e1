//! What one heartbeat costs, from before it is asked for to its answer: beside as many locks of its own, and beside locks of
//! somebody else in the same server. The limit is a plain session that looks at as many locks, on a server of its own, so that
//! neither's locks are in the other's way.

use leasehold::{LockGuard, Locker, Options};

use crate::arguments::{Arguments, FOREIGN, NAMES};
use crate::curve::{Curve, Slope};
use crate::look::Plain;
use crate::report::{Goal, Row, Spread, Unit};
use crate::support::postgres::{Cluster, Login};
use crate::support::until;
use crate::{memory, now};

/// Room for ten thousand locks, and for ours.
pub(crate) const LOCKS: &str = "max_locks_per_transaction=256";

/// Keys of others begin here, in plain numbers.
pub(crate) const ELSEWHERE: i64 = 1_000_000;

const GOAL_MS: f64 = 20.0;

const HELD: &str = "SELECT count(*) FROM pg_locks \
    WHERE locktype = 'advisory' AND mode = 'ExclusiveLock' AND objsubid = 1";

/// What is compared, each with its server.
struct Pair {
    ours: Cluster,
    locker: Locker,
    guards: Vec<LockGuard>,
    foreign: Plain,
    plain: Plain,
    plain_foreign: Plain,
    _plain_server: Cluster,
}

impl Pair {
    async fn start() -> anyhow::Result<Self> {
        let server = || Cluster::with(Login::Trust, &[LOCKS]);
        let (ours, plain_server) = (server(), server());
        Ok(Self {
            locker: Locker::postgres(ours.options(), Options::default())?,
            guards: Vec::new(),
            foreign: Plain::connect(&ours.options(), ELSEWHERE).await?,
            plain: Plain::connect(&plain_server.options(), 1).await?,
            plain_foreign: Plain::connect(&plain_server.options(), ELSEWHERE).await?,
            ours,
            _plain_server: plain_server,
        })
    }

    /// Both hold so many locks.
    async fn hold(&mut self, names: u32) -> anyhow::Result<()> {
        self.guards.truncate(names.try_into()?);
        for n in u32::try_from(self.guards.len())?..names {
            self.guards.push(self.locker.lock(memory::name(n)).lock().await?);
        }
        until("the rest has been released", || self.ours.admin().one::<u32>(HELD) == names).await;
        self.plain.hold(names).await
    }

    async fn look(&mut self, looks: usize, ours: &mut Spread, limit: &mut Spread) -> anyhow::Result<()> {
        for _ in 0..looks {
            let since = now();
            self.plain.look().await?;
            limit.add(now().saturating_sub(since));
            let since = now();
            anyhow::ensure!(self.guards[0].check().await, "it was lost");
            ours.add(now().saturating_sub(since));
        }
        Ok(())
    }
}

pub(crate) async fn rows(arguments: Arguments) -> anyhow::Result<Vec<Row>> {
    let mut pair = Pair::start().await?;
    let mut least = Spread::default();
    let mut names = Curve::at(&NAMES);
    for _ in 0..arguments.rounds() {
        for _ in 0..arguments.looks() {
            let since = now();
            sqlx::raw_sql("SELECT 1").fetch_all(&mut pair.plain.connection).await?;
            least.add(now().saturating_sub(since));
        }
        for point in &mut names.points {
            pair.hold(point.size).await?;
            pair.look(arguments.looks(), &mut point.ours, &mut point.limit).await?;
        }
    }
    pair.hold(1).await?;
    let mut foreign = Curve::at(&FOREIGN);
    for _ in 0..arguments.rounds() {
        for point in &mut foreign.points {
            pair.foreign.hold(point.size).await?;
            pair.plain_foreign.hold(point.size).await?;
            pair.look(arguments.looks(), &mut point.ours, &mut point.limit).await?;
        }
    }
    pair.guards.clear();
    pair.locker.close().await;

    let mut rows = vec![Row::of("round trip: `SELECT 1`".to_owned(), Unit::Ms, &least)];
    let slope = Slope { unit: "µs per name", times: 1e3 };
    rows.extend(names.rows("heartbeat, by names held", Unit::Ms, slope));
    let slope = Slope { unit: "ms per 1,000 locks", times: 1e3 };
    rows.extend(foreign.rows("heartbeat, by foreign locks", Unit::Ms, slope));
    let added = |of: fn(&crate::curve::Point) -> &Spread| {
        (of(foreign.last()).median() - of(foreign.first()).median()).max(0.0)
    };
    let metric = "heartbeat, by foreign locks: what 10,000 add".to_owned();
    let row = Row::new(metric, Unit::Ms, added(|point| &point.ours)).with_limit(added(|point| &point.limit));
    rows.push(row.with_goal(arguments.common.allow(Goal::AtMost(GOAL_MS))));
    Ok(rows)
}
