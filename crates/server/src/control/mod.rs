//! The control plane: E2B's API for sandboxes, snapshots and templates, with CubeSandbox's
//! additions.

mod building;
mod builds;
mod create;
mod query;
mod samples;
mod sandboxes;
mod shapes;
mod snapshots;
mod tags;
mod templates;
mod uploads;
mod volumes;

use axum::Router;
use axum::extract::{FromRequestParts, Request, State};
use axum::http::request::Parts;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get, patch, post, put};
use sandtree::{KeyInfo, Scope};
use serde::de::DeserializeOwned;
use serde_json::json;

pub(crate) use create::repeated;

use crate::auth;
use crate::body;
use crate::config::MetricsAccess;
use crate::content;
use crate::error::{Fault, Result};
use crate::gateway::Gateway;
use crate::observe::Trail;
use crate::observed;

/// The body of a request of the control plane. Templates' files are uploaded elsewhere.
const BODY_MAX: usize = 4 << 20;

pub fn router(gateway: Gateway) -> Router {
    let keyed = axum::middleware::from_fn_with_state(gateway.clone(), guard);
    let guarded = Router::new()
        .route(
            "/sandboxes",
            get(sandboxes::list_running).post(create::create),
        )
        .route("/v2/sandboxes", get(sandboxes::list).post(create::create))
        .route(
            "/sandboxes/{id}",
            get(sandboxes::get).delete(sandboxes::kill),
        )
        .route("/sandboxes/{id}/connect", post(sandboxes::connect))
        .route("/v2/sandboxes/{id}/connect", post(sandboxes::connect))
        .route("/sandboxes/{id}/resume", post(sandboxes::resume))
        .route("/sandboxes/{id}/pause", post(sandboxes::pause))
        .route("/sandboxes/{id}/timeout", post(sandboxes::set_timeout))
        .route("/sandboxes/{id}/refreshes", post(sandboxes::refresh))
        .route("/sandboxes/metrics", get(samples::of_several))
        .route("/sandboxes/{id}/metrics", get(samples::of_one))
        .route("/sandboxes/{id}/logs", get(sandboxes::logs))
        .route("/v2/sandboxes/{id}/logs", get(sandboxes::logs))
        .route("/sandboxes/{id}/network", put(sandboxes::network))
        .route("/sandboxes/{id}/fork", post(sandboxes::fork))
        .route("/sandboxes/{id}/snapshots", post(snapshots::create))
        .route("/sandboxes/{id}/rollback", post(snapshots::rollback))
        .route("/snapshots", get(snapshots::list))
        .merge(templates())
        .route("/volumes", get(volumes::list).post(volumes::create))
        .route("/volumes/{id}", get(volumes::get).delete(volumes::remove))
        .route("/secrets", any(secrets))
        .route("/secrets/{*rest}", any(secrets))
        .fallback(unknown)
        .layer(keyed.clone());
    let figures = Router::new().route("/metrics", get(observed::scrape));
    let figures = match gateway.config().metrics {
        MetricsAccess::Key => figures.route_layer(keyed),
        MetricsAccess::Loopback => figures,
    };
    Router::new()
        .route("/health", get(health))
        .route("/healthz", get(health))
        .merge(figures)
        .route("/templates/{id}/files/{hash}", put(uploads::receive))
        .merge(content::router())
        .merge(guarded)
        .with_state(gateway)
}

fn templates() -> Router<Gateway> {
    Router::new()
        .route("/templates", get(templates::list).post(builds::cube_build))
        .route("/v2/templates", get(templates::list).post(builds::request))
        .route("/v3/templates", post(builds::request))
        .route("/templates/tags", post(tags::assign).delete(tags::remove))
        .route("/templates/aliases/{alias}", get(templates::exists))
        .route(
            "/templates/{id}",
            get(templates::get)
                .post(builds::cube_rebuild)
                .patch(templates::update)
                .delete(templates::remove),
        )
        .route("/v2/templates/{id}", patch(templates::update))
        .route("/templates/{id}/alias", put(templates::set_alias))
        .route("/templates/{id}/tags", get(tags::list))
        .route("/templates/{id}/files/{hash}", get(builds::files))
        .route("/v2/templates/{id}/builds/{build}", post(builds::start))
        .route("/templates/{id}/builds/{build}/status", get(builds::status))
        .route("/templates/{id}/builds/{build}/logs", get(builds::logs))
}

/// Lets only holders of a key for sandboxes pass, and tells handlers which key it is.
pub(crate) async fn guard(
    State(gateway): State<Gateway>,
    mut request: Request,
    next: Next,
) -> Response {
    let admitted = gateway
        .host()
        .access()
        .map_err(Fault::from)
        .and_then(|access| auth::key(&access, request.headers()))
        .and_then(|key| auth::need(&key, Scope::Sandboxes, "this API").map(|()| key));
    match admitted {
        Ok(key) => {
            Trail::has_key(&key.id);
            request.extensions_mut().insert(Holder(key));
            next.run(request).await
        }
        Err(fault) => fault.into_response(),
    }
}

/// The key of a request.
#[derive(Debug, Clone)]
struct Holder(KeyInfo);

/// Who asks, and where.
#[derive(Debug, Clone)]
pub(crate) struct Client {
    pub(crate) key: KeyInfo,
    /// The domain below which the client finds ports of sandboxes.
    domain: String,
    /// Names the request, for a client that may send it again.
    pub(crate) request: Option<String>,
}

impl<S: Sync> FromRequestParts<S> for Client {
    type Rejection = Fault;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self> {
        let holder = parts.extensions.get::<Holder>().cloned();
        let Holder(key) = holder.ok_or_else(|| Fault::unauthorized("no API key"))?;
        let domain = domain(auth::header(&parts.headers, "host"));
        let repeatable = auth::header(&parts.headers, "idempotency-key");
        let request = repeatable.map(|text| auth::request_name(&key.id, text));
        Ok(Self {
            key,
            domain,
            request,
        })
    }
}

/// The host that a request was sent to. `localhost` has names below it, an address has none.
fn domain(host: Option<&str>) -> String {
    let host = host.unwrap_or("localhost");
    let (name, port) = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) => (name, Some(port)),
        _ => (host, None),
    };
    let is_address = name.starts_with('[') || name.parse::<std::net::Ipv4Addr>().is_ok();
    let name = if is_address { "localhost" } else { name };
    // A client with a domain of its own asks this API at `api.DOMAIN`.
    let name = name.strip_prefix("api.").unwrap_or(name);
    port.map_or_else(|| name.to_owned(), |port| format!("{name}:{port}"))
}

/// The part of the path that names something.
#[derive(Debug)]
struct Id(String);

impl<S: Send + Sync> FromRequestParts<S> for Id {
    type Rejection = Fault;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self> {
        let path = axum::extract::Path::<String>::from_request_parts(parts, state).await;
        path.map(|axum::extract::Path(id)| Self(id))
            .map_err(|error| Fault::bad_request(error.body_text()))
    }
}

/// The query of a request.
#[derive(Debug)]
pub(crate) struct Asked<T>(pub(crate) T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequestParts<S> for Asked<T> {
    type Rejection = Fault;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self> {
        let query = axum::extract::Query::<T>::from_request_parts(parts, state).await;
        query
            .map(|axum::extract::Query(query)| Self(query))
            .map_err(|error| Fault::bad_request(error.body_text()))
    }
}

/// The JSON of a request. No body at all is the empty object, as some clients send it.
#[derive(Debug)]
pub(crate) struct Body<T>(pub(crate) T);

impl<S: Send + Sync, T: DeserializeOwned> axum::extract::FromRequest<S> for Body<T> {
    type Rejection = Fault;

    async fn from_request(request: Request, _: &S) -> Result<Self> {
        let bytes = body::whole(request.into_body(), BODY_MAX).await?;
        let bytes: &[u8] = if bytes.is_empty() { b"{}" } else { &bytes };
        serde_json::from_slice(bytes)
            .map(Self)
            .map_err(|error| Fault::bad_request(format!("invalid body: {error}")))
    }
}

async fn secrets() -> Fault {
    Fault::not_implemented("storing secrets")
}

async fn unknown(request: Request) -> Fault {
    let method = request.method();
    let path = request.uri().path();
    Fault::not_found(format!("this server has no {method} {path}"))
}

/// Says that the server answers, and nothing of its sandboxes: this needs no key.
async fn health() -> Response {
    axum::Json(json!({ "status": "ok" })).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_below_the_host_of_the_request() {
        let below = |host: &str| domain(Some(host));
        assert_eq!(below("127.0.0.1:3000"), "localhost:3000");
        assert_eq!(below("[::1]:3000"), "localhost:3000");
        assert_eq!(below("box.example.org"), "box.example.org");
        assert_eq!(below("box.example.org:80"), "box.example.org:80");
        assert_eq!(domain(None), "localhost");
    }
}
