//! What is answered: payments, and what operators ask.

use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use leasehold::{CancellationToken, Locker, Observer, Trouble};
use metrics_exporter_prometheus::PrometheusHandle;
use serde::Serialize;
use sqlx::PgPool;

use crate::payments::{self, RECONCILER};

#[derive(Clone)]
pub struct App {
    locker: Locker,
    observer: Observer,
    pool: PgPool,
    recorder: PrometheusHandle,
    shutdown: CancellationToken,
}

impl App {
    pub fn new(
        locker: &Locker,
        pool: &PgPool,
        recorder: PrometheusHandle,
        shutdown: CancellationToken,
    ) -> Self {
        Self { locker: locker.clone(), observer: locker.observer(), pool: pool.clone(), recorder, shutdown }
    }
}

pub fn router(app: App) -> Router {
    Router::new()
        .route("/payments", post(new_payment))
        .route("/payments/{id}", get(payment))
        .route("/leader", get(leader))
        .route("/livez", get(live))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics))
        .with_state(app)
}

/// Whether a new process would do better. An outage of the store mends itself, and a restart would not mend it.
async fn live(State(app): State<App>) -> Result<&'static str, Failure> {
    let mends_itself = |trouble: &Trouble| matches!(trouble, Trouble::Unanswered { .. });
    match app.locker.health().troubles.iter().find(|trouble| !mends_itself(trouble)) {
        Some(trouble) => Err(Failure::unavailable(trouble)),
        None => Ok("alive\n"),
    }
}

/// Whether this replica should be sent requests. It need not lead for that.
async fn ready(State(app): State<App>) -> Result<&'static str, Failure> {
    if app.shutdown.is_cancelled() {
        return Err(Failure::unavailable("shutting down"));
    }
    let health = app.locker.health();
    if health.is_good() { Ok("ready\n") } else { Err(Failure::unavailable(health)) }
}

#[derive(Serialize)]
struct Leader {
    /// Who leads, whichever replica is asked.
    leader: Option<String>,
    leads_for_seconds: Option<u64>,
    standbys: Vec<String>,
    /// Who answers.
    asked: String,
}

async fn leader(State(app): State<App>) -> Result<Json<Leader>, Failure> {
    let elections = app.observer.leaders().await.map_err(Failure::unavailable)?;
    let election = elections
        .into_iter()
        .find(|election| election.name.as_ref().is_some_and(|name| name.as_str() == RECONCILER));
    let (leader, standbys) = election.map_or((None, Vec::new()), |it| (it.leader, it.standbys));
    Ok(Json(Leader {
        leads_for_seconds: leader.as_ref().and_then(|leader| leader.held_for).map(|it| it.as_secs()),
        leader: leader.and_then(|leader| leader.identity),
        standbys: standbys.into_iter().filter_map(|standby| standby.identity).collect(),
        asked: app.locker.identity().to_owned(),
    }))
}

async fn metrics(State(app): State<App>) -> impl IntoResponse {
    // Else what histograms were told piles up until somebody looks.
    app.recorder.run_upkeep();
    ([(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], app.recorder.render())
}

async fn new_payment(State(app): State<App>) -> Result<(StatusCode, Json<i64>), Failure> {
    let id = payments::add(&app.pool).await.map_err(Failure::unavailable)?;
    Ok((StatusCode::CREATED, Json(id)))
}

async fn payment(State(app): State<App>, Path(id): Path<i64>) -> Result<Json<payments::Payment>, Failure> {
    let payment = payments::get(&app.pool, id).await.map_err(Failure::unavailable)?;
    payment.map(Json).ok_or(Failure(StatusCode::NOT_FOUND, format!("there is no payment {id}")))
}

pub struct Failure(StatusCode, String);

impl Failure {
    fn unavailable(why: impl ToString) -> Self {
        Self(StatusCode::SERVICE_UNAVAILABLE, why.to_string())
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        (self.0, self.1 + "\n").into_response()
    }
}
