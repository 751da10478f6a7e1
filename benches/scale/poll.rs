//! What one poll costs the server: one message, which asks for all names that are stood by for. Its time is what the server
//! tells of it, since nobody but the driver sees its answer. The limit is the same text on a plain connection.

use std::time::Duration;

use anyhow::Context as _;
use leasehold::Options;
use sqlx::AssertSqlSafe;

use crate::arguments::{Arguments, FOREIGN, NAMES};
use crate::crowd::{self, Member, name};
use crate::curve::{Curve, Point, Slope};
use crate::heartbeat::{ELSEWHERE, LOCKS};
use crate::logged::{self, Logged, TOLD};
use crate::look::Plain;
use crate::report::{Goal, Row, Spread, Unit};
use crate::support::postgres::{Cluster, Login};

/// Far more often than by default, to see many of them: each is the same.
const INTERVAL: Duration = Duration::from_millis(20);

/// Names of the poll that is compared beside foreign locks: enough that it does something, and not so many that a little more
/// would not show.
const NAMES_BESIDE: u32 = 100;

/// Ten thousand foreign locks add nothing: the median of all polls beside them is within a tenth of that beside none.
const GOAL: f64 = 1.1;

const LEAST: &str = "SELECT 1";

struct Place {
    server: Cluster,
    plain: Plain,
}

pub(crate) async fn rows(arguments: Arguments) -> anyhow::Result<Vec<Row>> {
    let server = Cluster::with(Login::Trust, &[LOCKS, TOLD]);
    let mut leader = Member::new(&server, Options::default())?;
    let all = NAMES[NAMES.len() - 1];
    (0..all).for_each(|n| leader.contend(name(n)));
    crowd::are_led(&server, all).await;
    let plain = Plain::connect(&server.options(), 1).await?;
    let mut place = Place { server, plain };

    let (mut names, mut least) = (Curve::at(&NAMES), Spread::default());
    for _ in 0..arguments.rounds() {
        for point in &mut names.points {
            let standby = place.standby(point.size).await?;
            place.watch(&standby, point.size, arguments.polls_window(), point).await?;
            standby.close().await?;
        }
        place.repeat(LEAST, arguments.looks(), &mut least).await?;
    }
    let mut foreign = Curve::at(&FOREIGN);
    let mut holder = Plain::connect(&place.server.options(), ELSEWHERE).await?;
    let standby = place.standby(NAMES_BESIDE).await?;
    for _ in 0..arguments.rounds() {
        for point in &mut foreign.points {
            holder.hold(point.size).await?;
            place.watch(&standby, NAMES_BESIDE, arguments.polls_window(), point).await?;
        }
    }
    standby.close().await?;
    leader.close().await?;
    holder.close().await?;
    place.plain.close().await?;

    let mut rows = vec![Row::of("the server's time for `SELECT 1`".to_owned(), Unit::Ms, &least)];
    let slope = Slope { unit: "µs per name", times: 1e3 };
    rows.extend(names.rows("poll, by names stood by for", Unit::Ms, slope));
    let slope = Slope { unit: "µs per 1,000 locks", times: 1e6 };
    let what = format!("poll of {NAMES_BESIDE} names, by foreign locks");
    rows.extend(foreign.rows(&what, Unit::Ms, slope));
    let metric = format!("{what}: 10,000 to none");
    let row = Row::of(metric, Unit::Ms, &foreign.last().ours).with_limit(foreign.first().ours.median());
    rows.push(row.with_goal(arguments.common.allow(Goal::TimesAtMost(GOAL))));
    Ok(rows)
}

impl Place {
    async fn standby(&self, names: u32) -> anyhow::Result<Member> {
        let mut standby = Member::new(&self.server, Options::default().retry_interval(INTERVAL))?;
        (0..names).for_each(|n| standby.contend(name(n)));
        crowd::are_waited_for(&self.server, names).await;
        Ok(standby)
    }

    /// What its polls take, and as many of the same text.
    async fn watch(
        &mut self,
        standby: &Member,
        names: u32,
        window: Duration,
        point: &mut Point,
    ) -> anyhow::Result<()> {
        let from = self.server.log().len();
        tokio::time::sleep(window).await;
        let application = standby.application();
        let is_poll = |it: &Logged| it.application == application && asked_for(&it.text) == Some(names);
        let polls: Vec<Logged> = logged::since(self.server.log(), from).into_iter().filter(is_poll).collect();
        let text = &polls.last().context("nobody has polled for all of the names")?.text;
        for poll in &polls {
            point.ours.push(poll.ms);
        }
        self.repeat(text, polls.len(), &mut point.limit).await
    }

    /// What the server takes for the same text on a plain connection.
    async fn repeat(&mut self, text: &str, count: usize, spread: &mut Spread) -> anyhow::Result<()> {
        let from = self.server.log().len();
        for _ in 0..count {
            sqlx::raw_sql(AssertSqlSafe(text)).fetch_all(&mut self.plain.connection).await?;
            // As long idle as ours, for a processor that is slower after a rest.
            tokio::time::sleep(INTERVAL).await;
        }
        let log = logged::since(self.server.log(), from);
        log.iter().filter(|it| it.application == "plain").for_each(|it| spread.push(it.ms));
        Ok(())
    }
}

/// For how many names a message asks, if it asks for any: a row of values for each.
fn asked_for(text: &str) -> Option<u32> {
    let values =
        text.contains("SELECT 'a'").then(|| text.split_once("(VALUES (")?.1.split_once(") v(")).flatten()?.0;
    (values.matches("),(").count() + 1).try_into().ok()
}
