//! The control plane: E2B's API for sandboxes, snapshots and templates, with CubeSandbox's additions.

pub mod labels;
mod query;
mod sandboxes;
mod shapes;
mod snapshots;
mod templates;

use axum::Router;
use axum::extract::{FromRequestParts, Request, State};
use axum::http::request::Parts;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post, put};
use hyper::StatusCode;
use sandtree::KeyInfo;
use serde::de::DeserializeOwned;
use serde_json::json;

use crate::auth;
use crate::error::{Fault, Result};
use crate::gateway::Gateway;

/// The body of a request of the control plane. Templates' files are uploaded elsewhere.
const BODY_MAX: usize = 4 << 20;

pub fn router(gateway: Gateway) -> Router {
    let guarded = Router::new()
        .route("/sandboxes", get(sandboxes::list_running).post(sandboxes::create))
        .route("/v2/sandboxes", get(sandboxes::list).post(sandboxes::create))
        .route("/sandboxes/{id}", get(sandboxes::get).delete(sandboxes::kill))
        .route("/sandboxes/{id}/connect", post(sandboxes::connect))
        .route("/v2/sandboxes/{id}/connect", post(sandboxes::connect))
        .route("/sandboxes/{id}/resume", post(sandboxes::resume))
        .route("/sandboxes/{id}/pause", post(sandboxes::pause))
        .route("/sandboxes/{id}/timeout", post(sandboxes::set_timeout))
        .route("/sandboxes/{id}/refreshes", post(sandboxes::refresh))
        .route("/sandboxes/{id}/metrics", get(sandboxes::metrics))
        .route("/sandboxes/{id}/logs", get(sandboxes::logs))
        .route("/v2/sandboxes/{id}/logs", get(sandboxes::logs))
        .route("/sandboxes/{id}/network", put(sandboxes::network))
        .route("/sandboxes/{id}/fork", post(sandboxes::fork))
        .route("/sandboxes/{id}/snapshots", post(snapshots::create))
        .route("/sandboxes/{id}/rollback", post(snapshots::rollback))
        .route("/snapshots", get(snapshots::list))
        .route("/templates", get(templates::list))
        .route("/v2/templates", get(templates::list))
        .route("/templates/aliases/{alias}", get(templates::exists))
        .route("/templates/{id}", delete(templates::remove))
        .fallback(unknown)
        .layer(axum::middleware::from_fn_with_state(gateway.clone(), guard));
    Router::new()
        .route("/health", get(health))
        .route("/healthz", get(health))
        .merge(guarded)
        .with_state(gateway)
}

/// Lets only holders of a key pass, and tells handlers which key it is.
async fn guard(State(gateway): State<Gateway>, mut request: Request, next: Next) -> Response {
    let admitted = gateway
        .host()
        .access()
        .map_err(Fault::from)
        .and_then(|access| auth::key(&access, request.headers()));
    match admitted {
        Ok(key) => {
            request.extensions_mut().insert(Holder(key));
            next.run(request).await
        }
        Err(fault) => fault.into_response(),
    }
}

/// The key of a request.
#[derive(Debug, Clone)]
struct Holder(KeyInfo);

impl<S: Sync> FromRequestParts<S> for Holder {
    type Rejection = Fault;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self> {
        let holder = parts.extensions.get::<Holder>().cloned();
        holder.ok_or_else(|| Fault::unauthorized("no API key"))
    }
}

/// The JSON of a request. No body at all is the empty object, as some clients send it.
#[derive(Debug)]
struct Body<T>(T);

impl<S: Send + Sync, T: DeserializeOwned> axum::extract::FromRequest<S> for Body<T> {
    type Rejection = Fault;

    async fn from_request(request: Request, _: &S) -> Result<Self> {
        let bytes = axum::body::to_bytes(request.into_body(), BODY_MAX)
            .await
            .map_err(|_| Fault::new(StatusCode::PAYLOAD_TOO_LARGE, "the body is too large"))?;
        let bytes: &[u8] = if bytes.is_empty() { b"{}" } else { &bytes };
        serde_json::from_slice(bytes)
            .map(Self)
            .map_err(|error| Fault::bad_request(format!("invalid body: {error}")))
    }
}

async fn unknown(request: Request) -> Fault {
    let method = request.method();
    let path = request.uri().path();
    Fault::not_found(format!("this server has no {method} {path}"))
}

async fn health(State(gateway): State<Gateway>) -> Result<Response> {
    let (all, _) = gateway.host().list()?;
    let running = all.iter().filter(|info| info.is_running()).count();
    let body = json!({ "status": "ok", "sandboxes": running });
    Ok(axum::Json(body).into_response())
}
