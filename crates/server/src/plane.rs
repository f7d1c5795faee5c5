//! Sends each request to its plane: the control API, or a port of a sandbox.
//!
//! | request | plane |
//! |---|---|
//! | header `E2b-Sandbox-Id` | data, with the port in `E2b-Sandbox-Port` |
//! | host name `PORT-ID.…` | data |
//! | `/files` with a signature | data: the sandbox whose token made the signature |
//! | anything else | control |

use axum::body::Body;
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use hyper::StatusCode;
use hyper::header::HOST;

use crate::auth;
use crate::envd::{self, ENVD_PORT};
use crate::error::{Fault, Result};
use crate::gateway::Gateway;
use crate::observe::{Plane, Trail};
use crate::{control, native, observed, proxy, remainder};

/// A port of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    pub sandbox: String,
    pub port: u16,
}

/// All planes of a server.
pub fn router(gateway: Gateway) -> axum::Router {
    let control = control::router(gateway.clone()).merge(native::router(gateway.clone()));
    let divided = axum::middleware::from_fn_with_state(gateway.clone(), divide);
    let observed = axum::middleware::from_fn_with_state(gateway, observed::observe);
    let read = axum::middleware::from_fn(remainder::read_before_refusal);
    control.layer(divided).layer(read).layer(observed)
}

async fn divide(State(gateway): State<Gateway>, request: Request, next: Next) -> Response {
    let place = match place(&gateway, &request) {
        Ok(place) => place,
        Err(fault) => return fault.into_response(),
    };
    let Some(place) = place else {
        return next.run(request).await;
    };
    let sandbox = place.sandbox.clone();
    let plane = match place.port {
        ENVD_PORT => Plane::Envd,
        _ => Plane::Port,
    };
    Trail::goes_to(plane, &sandbox);
    let answered = match place.port {
        ENVD_PORT => envd::serve(gateway, &place.sandbox, request).await,
        port => proxy::serve(&gateway, &place.sandbox, port, request).await,
    };
    answered.unwrap_or_else(|fault| refused(&sandbox, fault))
}

/// The data plane names a sandbox that it cannot reach.
fn refused(sandbox: &str, fault: Fault) -> Response {
    if fault.status != StatusCode::BAD_GATEWAY {
        return fault.into_response();
    }
    let code = fault.status.as_u16();
    let body = serde_json::json!({
        "sandboxId": sandbox,
        "message": fault.message,
        "code": code,
    });
    fault.mark((fault.status, axum::Json(body)).into_response())
}

/// Where a request of the data plane goes. `None`: it is for the control plane.
fn place(gateway: &Gateway, request: &Request<Body>) -> Result<Option<Place>> {
    let headers = request.headers();
    if let Some(sandbox) = auth::header(headers, "e2b-sandbox-id") {
        let port = match auth::header(headers, "e2b-sandbox-port") {
            None => ENVD_PORT,
            Some(port) => port
                .parse()
                .map_err(|_| Fault::bad_request(format!("invalid port {port:?}")))?,
        };
        return Ok(Some(Place {
            sandbox: sandbox.to_owned(),
            port,
        }));
    }
    let host = auth::header(headers, HOST.as_str());
    if let Some(place) = host.and_then(of_host) {
        return Ok(Some(place));
    }
    if request.uri().path() == "/files" {
        return signer(gateway, request);
    }
    Ok(None)
}

/// `49983-0123456789abcdef.localhost:3000`
fn of_host(host: &str) -> Option<Place> {
    let (label, _) = host.split_once('.')?;
    let (port, sandbox) = label.split_once('-')?;
    let is_plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    if sandbox.is_empty() || !sandbox.bytes().all(is_plain) {
        return None;
    }
    Some(Place {
        sandbox: sandbox.to_owned(),
        port: port.parse().ok()?,
    })
}

/// The sandbox whose token made the signature of an address.
fn signer(gateway: &Gateway, request: &Request<Body>) -> Result<Option<Place>> {
    let query = envd::files::Query::of(request.uri())?;
    let Some(signature) = &query.signature else {
        return Ok(None);
    };
    let signed = query.signed(request.method());
    let access = gateway.host().access()?;
    let (all, _) = gateway.host().list()?;
    let found = all.iter().find(|info| {
        let token = access.token(auth::ENVD, &info.id);
        signed.matches(&token, signature)
    });
    match found {
        Some(info) => Ok(Some(Place {
            sandbox: info.id.clone(),
            port: ENVD_PORT,
        })),
        None => Err(Fault::unauthorized("invalid signature")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_names_lead_to_ports() {
        let place = Place {
            sandbox: "0a1b".into(),
            port: 8000,
        };
        assert_eq!(of_host("8000-0a1b.localhost:3000"), Some(place.clone()));
        assert_eq!(of_host("8000-0a1b.example.org"), Some(place));
        for other in [
            "127.0.0.1:3000",
            "localhost:3000",
            "8000-.localhost",
            "x-0a1b.localhost",
            "70000-0a1b.localhost",
            "8000-../x.localhost",
            "8000-0A.localhost",
        ] {
            assert_eq!(of_host(other), None, "{other}");
        }
    }
}
