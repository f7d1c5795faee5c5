//! Errors of the native API, as the library reports them.
//!
//! ```text
//!   sandtree::Error ──► Fault { report } ──┐
//!   a refusal of the server's own ──► Fault ┴─ layer ──► Problem { code, kind, message, … } and a status
//! ```

use std::collections::BTreeMap;

use axum::Json;
use axum::extract::Request;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use hyper::StatusCode;
use sandtree::{Code, ErrorKind, Report};
use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

use crate::error::Fault;

/// Why a request was refused, or failed.
///
/// Decide by `code`, `kind` and `arguments`; `message` and `causes` are for people.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[schema(as = Error)]
pub struct Problem {
    /// Which failure it is. `docs/errors.md` lists the codes of the library, `docs/guide/api.md`
    /// those of the server.
    #[schema(example = "no_sandbox")]
    pub code: String,
    /// The kind of failure, which also decides the status.
    #[schema(example = "not_found")]
    pub kind: String,
    pub message: String,
    /// From the nearest cause to the first.
    pub causes: Vec<String>,
    /// Values that belong to the code, by name.
    pub arguments: BTreeMap<String, Value>,
}

impl Problem {
    pub fn of(fault: &Fault) -> Self {
        match &fault.report {
            Some(report) => Self::reported(report),
            None => Self::own(fault),
        }
    }

    fn reported(report: &Report) -> Self {
        Self {
            code: report.code.clone(),
            kind: report.kind.as_str().to_owned(),
            message: report.message.clone(),
            causes: report.causes.clone(),
            arguments: report.arguments.clone(),
        }
    }

    /// A refusal of the server's own.
    fn own(fault: &Fault) -> Self {
        let (code, kind) = own_code(fault.status);
        Self {
            code: code.to_owned(),
            kind: kind.to_owned(),
            message: fault.message.clone(),
            causes: Vec::new(),
            arguments: BTreeMap::new(),
        }
    }
}

/// The code and the kind of a refusal that is not the library's.
fn own_code(status: StatusCode) -> (&'static str, &'static str) {
    match status.as_u16() {
        400 => ("invalid_request", "invalid"),
        401 => ("unauthorized", "denied"),
        403 => ("missing_scope", "denied"),
        404 => ("no_route", "not_found"),
        405 => ("no_method", "invalid"),
        408 => ("slow_client", "timeout"),
        409 => ("conflict", "wrong_state"),
        413 => ("request_too_large", "invalid"),
        429 => ("over_limit", "exhausted"),
        501 => ("not_implemented", "unsupported"),
        503 => ("server_busy", "busy"),
        _ => ("server_failed", "internal"),
    }
}

/// The status of an error of the library.
pub fn status(report: &Report) -> StatusCode {
    match report.code() {
        Some(Code::DiskFull | Code::GuestDiskFull | Code::NotEnoughSpace) => {
            StatusCode::INSUFFICIENT_STORAGE
        }
        Some(Code::GuestPermissionDenied) => StatusCode::FORBIDDEN,
        Some(Code::NotADirectory | Code::IsADirectory) => StatusCode::BAD_REQUEST,
        // What a client sent, not what this host has.
        Some(Code::DamagedArtifact | Code::MalformedInput | Code::TooLarge) => {
            StatusCode::UNPROCESSABLE_ENTITY
        }
        Some(
            Code::RegistryUnreachable
            | Code::RegistryTls
            | Code::RegistryRefused
            | Code::RegistryProtocol
            | Code::LinkBroken,
        ) => StatusCode::BAD_GATEWAY,
        _ => of_kind(report.kind),
    }
}

fn of_kind(kind: ErrorKind) -> StatusCode {
    match kind {
        ErrorKind::NotFound => StatusCode::NOT_FOUND,
        ErrorKind::AlreadyExists | ErrorKind::WrongState => StatusCode::CONFLICT,
        ErrorKind::Invalid => StatusCode::BAD_REQUEST,
        ErrorKind::Busy | ErrorKind::Exhausted => StatusCode::SERVICE_UNAVAILABLE,
        ErrorKind::Unsupported => StatusCode::NOT_IMPLEMENTED,
        ErrorKind::Timeout => StatusCode::GATEWAY_TIMEOUT,
        ErrorKind::Guest => StatusCode::UNPROCESSABLE_ENTITY,
        ErrorKind::Engine | ErrorKind::Corrupt | ErrorKind::Io | ErrorKind::Internal => {
            StatusCode::INTERNAL_SERVER_ERROR
        }
    }
}

/// Answers every refusal below this layer in the form of this API.
pub async fn in_native_form(request: Request, next: Next) -> Response {
    let mut response = next.run(request).await;
    if let Some(fault) = response.extensions_mut().remove::<Fault>() {
        return shaped(fault);
    }
    if response.status() != StatusCode::METHOD_NOT_ALLOWED {
        return response;
    }
    let allow = response.headers().get(hyper::header::ALLOW).cloned();
    let message = "this path has other methods: the header Allow lists them";
    let mut refused = shaped(Fault::new(StatusCode::METHOD_NOT_ALLOWED, message));
    let allow = allow.map(|methods| (hyper::header::ALLOW, methods));
    refused.headers_mut().extend(allow);
    refused
}

fn shaped(fault: Fault) -> Response {
    let problem = Problem::of(&fault);
    let status = match &fault.report {
        Some(report) => status(report),
        None => fault.status,
    };
    let mut response = (status, Json(problem)).into_response();
    fault.add_retry(response.headers_mut());
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_has_a_status_of_an_error() {
        for code in Code::ALL {
            let report = Report::new(*code, String::new(), BTreeMap::new());
            let status = status(&report);
            let is_error = status.is_client_error() || status.is_server_error();
            assert!(is_error, "{code:?}: {status}");
        }
        let missing = Report::new(Code::NoSandbox, String::new(), BTreeMap::new());
        assert_eq!(status(&missing), StatusCode::NOT_FOUND);
    }
}
