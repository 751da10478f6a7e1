//! The service as it runs: two processes, on a PostgreSQL server that the test starts and stops.

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, ExitStatus, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// The servers of leasehold's own tests.
#[path = "../../../tests/it/support"]
#[allow(dead_code, unexpected_cfgs, unused_imports, reason = "the tests of leasehold use all of it")]
mod support {
    mod kept;
    pub(crate) mod postgres;
    mod programs;
    mod wait;

    pub(crate) use self::wait::{eventually, now, until};
}

use support::postgres::{Cluster, PgBouncer, PoolMode, Stop};
use support::{eventually, until};

/// Intervals so short that nobody waits for them.
const QUICK: &str = "retry_interval=100ms,heartbeat_interval=100ms,query_timeout=1s,stop_grace=500ms";

/// One replica. Dropped, it is killed.
struct Service {
    process: Child,
    address: String,
    http: ureq::Agent,
}

impl Service {
    fn start(cluster: &Cluster) -> Self {
        Self::with(&cluster.url("postgres", "", "postgres"), cluster, QUICK)
    }

    /// Its pool goes by a URL of its own.
    fn with(pool: &str, cluster: &Cluster, options: &str) -> Self {
        let mut process = Command::new(env!("CARGO_BIN_EXE_axum_service"))
            .env("DATABASE_URL", pool)
            .env("LEASEHOLD_STORE", cluster.url("postgres", "", "postgres"))
            .env("LEASEHOLD_OPTIONS", options)
            .env("LISTEN", "127.0.0.1:0")
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("listening on ").expect("it listens").to_owned();
        let http = ureq::Agent::config_builder().http_status_as_error(false).build().into();
        Self { process, address, http }
    }

    /// Status and text, or that it does not answer.
    fn get(&self, path: &str) -> Option<(u16, String)> {
        let mut response = self.http.get(format!("http://{}{path}", self.address)).call().ok()?;
        Some((response.status().as_u16(), response.body_mut().read_to_string().ok()?))
    }

    fn status(&self, path: &str) -> Option<u16> {
        self.get(path).map(|(status, _)| status)
    }

    fn json(&self, path: &str) -> Value {
        let (_, text) = self.get(path).unwrap();
        serde_json::from_str(&text).unwrap_or(Value::Null)
    }

    fn pay(&self) -> i64 {
        let mut response = self.http.post(format!("http://{}/payments", self.address)).send_empty().unwrap();
        assert_eq!(response.status(), 201);
        response.body_mut().read_json().unwrap()
    }

    async fn until_settled(&self, id: i64) -> Value {
        let what = format!("payment {id} is settled");
        eventually(&what, || self.json(&format!("/payments/{id}")), |it| it["settled_by"].is_string()).await
    }

    /// The value of `leasehold_leading` in the scrape.
    fn leads(&self) -> Option<String> {
        let (_, text) = self.get("/metrics")?;
        let line = text.lines().find(|line| line.starts_with("leasehold_leading{"))?;
        Some(line.rsplit(' ').next()?.to_owned())
    }

    fn terminate(&self) {
        let pid = Pid::from_raw(self.process.id().cast_signed()).unwrap();
        kill_process(pid, Signal::TERM).unwrap();
    }

    async fn ended(mut self) -> ExitStatus {
        eventually("it ends", || self.process.try_wait().unwrap(), Option::is_some).await.unwrap()
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.process.kill().ok();
        self.process.wait().ok();
    }
}

/// The two of them, the one that leads first.
async fn two_replicas(cluster: &Cluster) -> [Service; 2] {
    // At the same time: both find no table.
    let (a, b) = std::thread::scope(|scope| {
        let a = scope.spawn(|| Service::start(cluster));
        (Service::start(cluster), a.join().unwrap())
    });
    let who = |service: &Service| service.json("/leader")["asked"].as_str().unwrap().to_owned();
    let (of_a, of_b) = (who(&a), who(&b));
    let told = eventually(
        "both see one leader and one standby",
        || [a.json("/leader"), b.json("/leader")],
        |told| {
            told.iter().all(|it| {
                it["leader"].is_string() && it["standbys"].as_array().is_some_and(|it| it.len() == 1)
            })
        },
    )
    .await;
    assert_eq!(told[0]["leader"], told[1]["leader"]);
    assert_eq!(told[0]["standbys"], told[1]["standbys"]);
    if told[0]["leader"] == of_a.as_str() {
        assert_eq!(told[0]["standbys"][0], of_b.as_str());
        [a, b]
    } else {
        assert_eq!(told[0]["leader"], of_b.as_str());
        [b, a]
    }
}

/// The leader settles what any replica takes, once; `/leader` tells who that is.
#[tokio::test]
async fn payments_that_any_replica_takes_are_settled_by_the_leader() {
    let cluster = Cluster::new();
    let [leader, standby] = two_replicas(&cluster).await;
    let leading = leader.json("/leader")["leader"].clone();
    for service in [&leader, &standby] {
        let settled = service.until_settled(service.pay()).await;
        assert_eq!((&settled["settled_by"], &settled["settled"]), (&leading, &Value::from(1)));
    }
    assert_eq!(leader.status("/payments/4711"), Some(404));
    assert_eq!((leader.leads().as_deref(), standby.leads().as_deref()), (Some("1"), Some("0")));
}

/// Two replicas share the server connections of a pooler in transaction mode, in turn; their leases go past it.
#[tokio::test]
async fn the_pool_may_go_through_a_pooler_in_transaction_mode() {
    let cluster = Cluster::new();
    for server_connections in [1, 3] {
        let pooler = PgBouncer::new(&cluster, PoolMode::Transaction, server_connections);
        let services = [(); 2].map(|()| Service::with(&pooler.url(), &cluster, QUICK));
        for _ in 0..5 {
            for service in &services {
                let settled = service.until_settled(service.pay()).await;
                assert_eq!(settled["settled"], 1);
            }
        }
    }
}

/// M-08: the endpoint for Prometheus: every metric that has happened, with its help and type, in the text format.
#[tokio::test]
async fn the_scrape_is_what_the_guide_says() {
    let cluster = Cluster::new();
    let [leader, standby] = two_replicas(&cluster).await;
    let response = leader.http.get(format!("http://{}/metrics", leader.address)).call().unwrap();
    assert_eq!(response.headers()["content-type"], "text/plain; version=0.0.4; charset=utf-8");
    until("a heartbeat is answered", || {
        leader.get("/metrics").unwrap().1.contains("leasehold_heartbeat_seconds_bucket")
    })
    .await;

    let table: Vec<(&str, &str)> = include_str!("../../../docs/metrics.md")
        .lines()
        .filter_map(|line| line.strip_prefix("| `leasehold_")?.split_once("` | "))
        .map(|(name, rest)| (name, rest.split(" | ").next().unwrap()))
        .collect();
    // No job here is done once per interval.
    let expected: BTreeSet<_> = table.iter().copied().filter(|(name, _)| *name != "slots_total").collect();
    let (_, text) = leader.get("/metrics").unwrap();
    let typed: BTreeSet<_> =
        text.lines().filter_map(|line| line.strip_prefix("# TYPE leasehold_")?.split_once(' ')).collect();
    assert_eq!(typed, expected, "{text}");
    for (name, _) in &expected {
        assert!(text.contains(&format!("# HELP leasehold_{name} ")), "{name}: {text}");
    }
    let series = |line: &&str| !line.starts_with('#') && !line.is_empty();
    for line in text.lines().filter(series) {
        let (series, value) = line.rsplit_once(' ').unwrap();
        assert!(series.starts_with("leasehold_") && series.ends_with('}'), "{line}");
        assert!(value.parse::<f64>().is_ok(), "{line}");
    }
    let acquired = r#"name="payments/reconciler",transition="acquired",reason="vacant"} 1"#;
    assert!(text.contains(acquired), "{text}");
    assert!(text.contains(r#"outcome="granted",le="10"} 1"#), "it has locked the schema: {text}");
    drop(standby);
}

/// A store that is away is no reason to restart, and no reason to be sent requests.
#[tokio::test]
async fn an_outage_of_the_store_is_told_by_readiness_and_not_by_liveness() {
    let mut cluster = Cluster::new();
    let service = Service::start(&cluster);
    until("it is ready", || service.status("/readyz") == Some(200)).await;
    cluster.stop(Stop::Immediate).await;
    until("it is not ready", || service.status("/readyz") == Some(503)).await;
    assert_eq!(service.status("/livez"), Some(200));
    cluster.start().await;
    until("it is ready again", || service.status("/readyz") == Some(200)).await;
    service.until_settled(service.pay()).await;
}

/// The order of a shutdown: not ready; the payment at hand is settled, still under the lease, while probes and the scrape
/// are answered; the standby leads; the process ends well, and its session is gone.
#[tokio::test]
async fn a_shutdown_finishes_the_work_at_hand_before_it_hands_over() {
    let cluster = Cluster::new();
    let [leader, standby] = two_replicas(&cluster).await;
    let of_leader = leader.json("/leader")["asked"].clone();
    let of_standby = standby.json("/leader")["asked"].clone();
    // The leader is in the middle of a payment for as long as we look at that.
    let admin = cluster.admin();
    admin.sql("BEGIN");
    admin.sql("LOCK TABLE payments IN SHARE MODE");
    let id = admin.one::<i64>("INSERT INTO payments DEFAULT VALUES RETURNING id");
    let waits = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'payments'::regclass";
    let watch = support::postgres::Admin::new(cluster.options());
    until("it waits for the table", || watch.one::<i64>(waits) == 1).await;

    leader.terminate();
    until("it is not ready", || leader.status("/readyz") == Some(503)).await;
    assert_eq!((leader.status("/livez"), leader.leads().as_deref()), (Some(200), Some("1")));
    assert_eq!(standby.json("/leader")["leader"], of_leader, "not before the work is done");
    assert_eq!(standby.leads().as_deref(), Some("0"));
    admin.sql("COMMIT");
    until("the standby leads", || standby.leads().as_deref() == Some("1")).await;
    assert!(leader.ended().await.success());
    assert_eq!(standby.json("/leader")["leader"], of_standby);
    let settled = standby.until_settled(id).await;
    assert_eq!(settled["settled"], 1);
    let sessions = format!(
        "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'leasehold/{}'",
        of_leader.as_str().unwrap()
    );
    until("its session is gone", || watch.one::<i64>(&sessions) == 0).await;
}

/// It ends when it is told to, whatever somebody who connected to it does not do.
#[tokio::test]
async fn half_a_request_keeps_nobody_from_ending() {
    let cluster = Cluster::new();
    let service = Service::start(&cluster);
    let mut connection = TcpStream::connect(&service.address).unwrap();
    connection.write_all(b"GET /livez HTTP/1.1\r\nHo").unwrap();
    // Whoever connected later is answered: so that one has been let in.
    assert_eq!(service.status("/livez"), Some(200));
    service.terminate();
    assert!(service.ended().await.success());
}

/// It ends at once while it waits for a database that takes connections, and then does not say a word.
#[tokio::test]
async fn a_service_that_waits_for_its_database_can_be_told_to_end() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("postgres://app@{}/app", silent.local_addr().unwrap());
    let process = Command::new(env!("CARGO_BIN_EXE_axum_service"))
        .env("DATABASE_URL", url)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let http = ureq::Agent::new_with_defaults();
    let service = Service { process, address: String::new(), http };
    let (_connection, _) = silent.accept().unwrap();
    service.terminate();
    assert!(service.ended().await.success());
}

/// A job that hangs in a statement is dropped, and the process ends though the server goes on with that statement.
#[tokio::test]
async fn a_statement_that_hangs_keeps_nobody_from_ending() {
    let cluster = Cluster::new();
    let service = Service::with(
        &cluster.url("postgres", "", "postgres"),
        &cluster,
        &format!("{QUICK},drain_timeout=500ms"),
    );
    let admin = cluster.admin();
    admin.sql("BEGIN");
    admin.sql("LOCK TABLE payments IN SHARE MODE");
    admin.sql("INSERT INTO payments DEFAULT VALUES");
    let watch = support::postgres::Admin::new(cluster.options());
    let waits = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'payments'::regclass";
    until("it waits for the table", || watch.one::<i64>(waits) == 1).await;
    service.terminate();
    assert!(service.ended().await.success());
    admin.sql("COMMIT");
    until("what it waited for has come to nothing", || watch.one::<i64>(waits) == 0).await;
    assert_eq!(watch.one::<i64>("SELECT count(*) FROM payments WHERE settled > 0"), 0);
}
