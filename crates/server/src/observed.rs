//! The outermost layer of the server, which observes every request, and `GET /metrics`.

use axum::extract::{MatchedPath, Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use hyper::header::{CONTENT_TYPE, HeaderName, HeaderValue};
use sandtree::{Cause, Phase};

use crate::auth;
use crate::digits;
use crate::error::Result;
use crate::gateway::Gateway;
use crate::observe::{self, Refused, Trail};

const TEXT: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// The name of a request: the client's, if it is well formed, or one of ours.
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Names a request, follows it to the end of its answer's body, and reports it.
pub async fn observe(State(gateway): State<Gateway>, mut request: Request, next: Next) -> Response {
    let cause = name(&request);
    let matched = request.extensions().get::<MatchedPath>();
    let matched = matched.map(|path| path.as_str().to_owned());
    let trail = Trail::begin(
        gateway.figures(),
        gateway.spans(),
        &request,
        (cause.clone(), matched),
    );
    // The guest's service gets the same name.
    request.headers_mut().insert(REQUEST_ID, value(&cause));
    let request = request.map(|body| observe::received(body, &trail));
    let answered = trail.clone().of(cause.clone().of(next.run(request)));
    let mut response = answered.await;
    let headers = response.headers_mut();
    // A service in a guest may have named it in its own way.
    if !headers.contains_key(REQUEST_ID) {
        headers.insert(REQUEST_ID, value(&cause));
    }
    let code = response.extensions().get::<Refused>().copied();
    trail.answered(response.status(), code.map(|Refused(code)| code));
    response.map(|body| observe::sent(body, trail))
}

fn name(request: &Request) -> Cause {
    let theirs = auth::header(request.headers(), REQUEST_ID.as_str()).and_then(Cause::parse);
    theirs.unwrap_or_else(|| {
        Cause::parse(&digits::random::<16>()).expect("hexadecimal digits are plain")
    })
}

fn value(cause: &Cause) -> HeaderValue {
    HeaderValue::from_str(cause.as_str()).expect("a cause is plain")
}

/// The figures of the server, for Prometheus.
pub async fn scrape(State(gateway): State<Gateway>) -> Result<Response> {
    let (all, _) = gateway.host().list()?;
    let states: Vec<Phase> = all.iter().map(|info| info.state).collect();
    let text = gateway.figures().text(&states);
    Ok(([(CONTENT_TYPE, TEXT)], text).into_response())
}
