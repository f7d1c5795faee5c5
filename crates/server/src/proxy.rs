//! Ports of a guest: HTTP and WebSocket, in every network mode, through the guest's agent. So
//! services are reached that listen on the guest's loopback only.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use axum::body::Body;
use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use hyper::body::{Frame, Incoming, SizeHint};
use hyper::header::{CONNECTION, HOST, HeaderName, UPGRADE};
use hyper::{HeaderMap, StatusCode, Uri, Version};
use hyper_util::rt::TokioIo;
use sandtree::ErrorKind;

use crate::auth;
use crate::error::{Fault, Result};
use crate::gateway::{Connection, Gateway};
use crate::labels::Labels;

/// Headers between two neighbours, which a proxy does not pass on.
const HOP_BY_HOP: [HeaderName; 7] = [
    hyper::header::CONNECTION,
    hyper::header::PROXY_AUTHENTICATE,
    hyper::header::PROXY_AUTHORIZATION,
    hyper::header::TE,
    hyper::header::TRAILER,
    hyper::header::TRANSFER_ENCODING,
    hyper::header::UPGRADE,
];
/// Headers for this server, and those between neighbours that have no constant.
const OURS: [&str; 7] = [
    "e2b-sandbox-id",
    "e2b-sandbox-port",
    "e2b-traffic-access-token",
    "keep-alive",
    "proxy-connection",
    "x-access-token",
    "x-api-key",
];

/// Passes a request on to a port of a sandbox.
pub async fn serve(
    gateway: &Gateway,
    sandbox: &str,
    port: u16,
    request: Request,
) -> Result<Response> {
    if request.method() == hyper::Method::CONNECT {
        let message = "ports are reached by requests to them";
        return Err(Fault::new(StatusCode::METHOD_NOT_ALLOWED, message));
    }
    let (sandbox, info) = gateway
        .sandbox(sandbox)
        .map_err(|_| Fault::sandbox_gone())?;
    if !Labels::of(&info).public_traffic {
        let expected = gateway.host().access()?.token(auth::TRAFFIC, &info.id);
        let headers = request.headers();
        if !auth::has_token(headers, "e2b-traffic-access-token", &expected) {
            let message = "missing or wrong traffic access token";
            return Err(Fault::new(StatusCode::FORBIDDEN, message));
        }
    }
    let connection = gateway.connect(sandbox, &info).await?;
    match forward(&connection, port, request).await {
        Ok(response) => Ok(response),
        Err(Unreached::Closed) => Ok(closed(&info.id, port)),
        Err(Unreached::Broken(reason)) => {
            let message = format!("port {port} of the sandbox did not answer: {reason}");
            Err(Fault::new(StatusCode::BAD_GATEWAY, message))
        }
    }
}

/// A port on which nothing listens. Clients look for these words.
fn closed(sandbox: &str, port: u16) -> Response {
    let body = serde_json::json!({
        "sandboxId": sandbox,
        "message": "The sandbox is running but port is not open",
        "port": port,
        "code": 502,
    });
    (StatusCode::BAD_GATEWAY, axum::Json(body)).into_response()
}

enum Unreached {
    /// Nothing listens.
    Closed,
    Broken(String),
}

impl From<hyper::Error> for Unreached {
    fn from(error: hyper::Error) -> Self {
        Self::Broken(error.to_string())
    }
}

async fn forward(
    connection: &Connection,
    port: u16,
    mut request: Request,
) -> Result<Response, Unreached> {
    let tunnel = connection.guest.connect(port).await;
    let tunnel = tunnel.map_err(|error| match error.kind() {
        ErrorKind::Guest => Unreached::Closed,
        _ => Unreached::Broken(error.report().one_line()),
    })?;
    let stream = TokioIo::new(tunnel.into_stream());
    let (mut sender, carrying) = hyper::client::conn::http1::handshake(stream).await?;
    tokio::spawn(carrying.with_upgrades());
    let upgrade = upgrade_of(request.headers());
    let ours = hyper::upgrade::on(&mut request);
    let outgoing = rewritten(request, port, upgrade.as_ref());
    let mut response = sender.send_request(outgoing).await?;
    if response.status() != StatusCode::SWITCHING_PROTOCOLS {
        let (mut parts, body) = response.into_parts();
        remove_neighbours(&mut parts.headers);
        let body = Passed {
            body,
            connection: connection.clone(),
            broken: None,
        };
        return Ok(Response::from_parts(parts, Body::new(body)));
    }
    if upgrade.is_none() {
        return Err(Unreached::Broken("it switched protocols unasked".into()));
    }
    let theirs = hyper::upgrade::on(&mut response);
    tokio::spawn(join(ours, theirs));
    Ok(response.map(Body::new))
}

/// The body of a guest's answer. Where it breaks with its sandbox, its client learns that only when
/// the store says why.
struct Passed {
    body: Incoming,
    connection: Connection,
    broken: Option<(hyper::Error, Recording)>,
}

type Recording = Pin<Box<dyn Future<Output = ()> + Send>>;

impl hyper::body::Body for Passed {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        if self.broken.is_none() {
            match ready!(Pin::new(&mut self.body).poll_frame(context)) {
                Some(Err(error)) => {
                    let connection = self.connection.clone();
                    let recording = async move { connection.recorded().await };
                    self.broken = Some((error, Box::pin(recording)));
                }
                passed => return Poll::Ready(passed),
            }
        }
        if let Some((_, recording)) = &mut self.broken {
            ready!(recording.as_mut().poll(context));
        }
        Poll::Ready(self.broken.take().map(|(error, _)| Err(error)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The protocol that a client asks to continue with.
fn upgrade_of(headers: &HeaderMap) -> Option<hyper::header::HeaderValue> {
    let asks = auth::header(headers, CONNECTION.as_str())?;
    let wants = asks
        .split(',')
        .any(|word| word.trim().eq_ignore_ascii_case("upgrade"));
    headers.get(UPGRADE).filter(|_| wants).cloned()
}

/// The request as the guest's server gets it.
fn rewritten(request: Request, port: u16, upgrade: Option<&hyper::header::HeaderValue>) -> Request {
    let (mut parts, body) = request.into_parts();
    remove_neighbours(&mut parts.headers);
    for name in OURS {
        parts.headers.remove(name);
    }
    if let Some(protocol) = upgrade {
        parts.headers.insert(UPGRADE, protocol.clone());
        let word = hyper::header::HeaderValue::from_static("upgrade");
        parts.headers.insert(CONNECTION, word);
    }
    let path = parts.uri.path_and_query().cloned();
    parts.uri = path.map_or_else(|| Uri::from_static("/"), Uri::from);
    parts.version = Version::HTTP_11;
    let host = format!("localhost:{port}");
    if !parts.headers.contains_key(HOST) {
        parts
            .headers
            .insert(HOST, host.parse().expect("a plain name"));
    }
    Request::from_parts(parts, body)
}

fn remove_neighbours(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    for name in HOP_BY_HOP.iter().chain(&named) {
        headers.remove(name);
    }
}

/// Carries the bytes of a connection that both sides have taken over.
async fn join(ours: hyper::upgrade::OnUpgrade, theirs: hyper::upgrade::OnUpgrade) {
    let (Ok(ours), Ok(theirs)) = tokio::join!(ours, theirs) else {
        return;
    };
    let mut ours = TokioIo::new(ours);
    let mut theirs = TokioIo::new(theirs);
    if let Err(error) = tokio::io::copy_bidirectional(&mut ours, &mut theirs).await {
        tracing::debug!(%error, "an upgraded connection broke");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_between_neighbours_and_ours_are_not_passed_on() {
        let request = Request::builder()
            .uri("http://127.0.0.1:3000/a?b=c")
            .header("host", "8000-0a.localhost:3000")
            .header("connection", "keep-alive, x-private")
            .header("x-private", "1")
            .header("transfer-encoding", "chunked")
            .header("e2b-sandbox-id", "0a")
            .header("x-api-key", "secret")
            .header("x-access-token", "secret")
            .header("x-other", "2")
            .body(Body::empty())
            .unwrap();
        let sent = rewritten(request, 8000, None);
        let names: Vec<&str> = sent.headers().keys().map(HeaderName::as_str).collect();
        assert_eq!(names, ["host", "x-other"]);
        assert_eq!(sent.uri(), "/a?b=c");
    }

    #[test]
    fn upgrades_are_passed_on() {
        let mut headers = HeaderMap::new();
        headers.insert(CONNECTION, "Keep-Alive, Upgrade".parse().unwrap());
        assert!(upgrade_of(&headers).is_none());
        headers.insert(UPGRADE, "websocket".parse().unwrap());
        assert_eq!(upgrade_of(&headers).unwrap(), "websocket");
    }
}
