//! What the server answers when it cannot do what a client asks.
//!
//! ```text
//!   sandtree::Error ── kind ──► Fault { status, message } ──► control: {"code": 404, "message"}
//!                                                        └──► RPC:     {"code": "not_found", "message"}
//! ```

use axum::Json;
use axum::response::{IntoResponse, Response};
use hyper::{HeaderMap, StatusCode};
use sandtree::{Code, Error, ErrorKind, Report};
use serde_json::json;

use crate::observe::Refused;

pub type Result<T, E = Fault> = std::result::Result<T, E>;

/// A refusal, or a failure of the server's own.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{message}")]
pub struct Fault {
    pub status: StatusCode,
    pub message: String,
    /// Whether a client may send the same request again. `None`: the status decides.
    pub retry: Option<Retry>,
    /// The error of the library behind it, which the native API reports as a whole.
    pub report: Option<Box<Report>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Retry {
    Never,
    AfterSeconds(u64),
}

impl Fault {
    pub fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self {
            status,
            message: message.into(),
            retry: None,
            report: None,
        }
    }

    pub fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    pub fn unauthorized(message: impl Into<String>) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, message)
    }

    pub fn forbidden(message: impl Into<String>) -> Self {
        Self::new(StatusCode::FORBIDDEN, message)
    }

    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, message)
    }

    pub fn conflict(message: impl Into<String>) -> Self {
        Self::new(StatusCode::CONFLICT, message)
    }

    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, message)
    }

    pub fn not_implemented(what: &str) -> Self {
        let message = format!("{what} is not implemented by this server");
        Self {
            retry: Some(Retry::Never),
            ..Self::new(StatusCode::NOT_IMPLEMENTED, message)
        }
    }

    /// Too many requests of a kind.
    pub fn too_many(message: impl Into<String>, retry: Retry) -> Self {
        Self {
            retry: Some(retry),
            ..Self::new(StatusCode::TOO_MANY_REQUESTS, message)
        }
    }

    /// The data plane of a sandbox that does not run. Clients look for these words.
    pub fn sandbox_gone() -> Self {
        Self::new(StatusCode::BAD_GATEWAY, "The sandbox was not found")
    }

    /// Tells a client whether it may send the same request again.
    pub fn add_retry(&self, headers: &mut HeaderMap) {
        match self.retry {
            Some(Retry::Never) => {
                headers.insert("should-retry", "false".parse().expect("a plain word"));
            }
            Some(Retry::AfterSeconds(seconds)) => {
                headers.insert("retry-after", seconds.into());
            }
            None => {}
        }
    }

    /// Gives an answer what the log reports of it: the code of the library's error, or a name for
    /// the status.
    pub fn mark(&self, mut response: Response) -> Response {
        let code = self.report.as_ref().and_then(|report| report.code());
        let refused = Refused(code.map_or_else(|| self.rpc_code(), Code::as_str));
        response.extensions_mut().insert(refused);
        response
    }

    /// The name of the failure in the Connect protocol.
    pub fn rpc_code(&self) -> &'static str {
        match self.status.as_u16() {
            400 => "invalid_argument",
            401 => "unauthenticated",
            403 => "permission_denied",
            404 => "not_found",
            409 => "already_exists",
            412 => "failed_precondition",
            429 | 507 => "resource_exhausted",
            499 => "canceled",
            501 => "unimplemented",
            502 | 503 => "unavailable",
            504 => "deadline_exceeded",
            _ => "internal",
        }
    }
}

impl IntoResponse for Fault {
    fn into_response(self) -> Response {
        let code = self.status.as_u16();
        let body = Json(json!({ "code": code, "message": self.message }));
        let mut response = self.mark((self.status, body).into_response());
        self.add_retry(response.headers_mut());
        // The native API answers with the same fault in its own form.
        response.extensions_mut().insert(self);
        response
    }
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        let status = match (error.code(), error.kind()) {
            (Some(Code::DiskFull | Code::GuestDiskFull | Code::NotEnoughSpace), _) => {
                StatusCode::INSUFFICIENT_STORAGE
            }
            (Some(Code::NotADirectory | Code::IsADirectory), _) => StatusCode::BAD_REQUEST,
            (Some(Code::GuestPermissionDenied), _) => StatusCode::FORBIDDEN,
            (Some(Code::LinkEnded), _) => StatusCode::BAD_GATEWAY,
            // It ends, or another program takes its sandbox: clients ask again.
            (Some(Code::KeeperUnreachable), _) => StatusCode::SERVICE_UNAVAILABLE,
            (_, kind) => of_kind(kind),
        };
        let message = match status {
            StatusCode::BAD_GATEWAY => Self::sandbox_gone().message,
            _ => error.report().one_line(),
        };
        if status.is_server_error() {
            tracing::warn!(error = %error.report().one_line(), "a request failed");
        }
        Self {
            report: Some(Box::new(error.report())),
            ..Self::new(status, message)
        }
    }
}

fn of_kind(kind: ErrorKind) -> StatusCode {
    match kind {
        ErrorKind::NotFound => StatusCode::NOT_FOUND,
        ErrorKind::AlreadyExists => StatusCode::CONFLICT,
        ErrorKind::Invalid => StatusCode::BAD_REQUEST,
        ErrorKind::Busy | ErrorKind::Exhausted => StatusCode::SERVICE_UNAVAILABLE,
        ErrorKind::WrongState => StatusCode::CONFLICT,
        ErrorKind::Timeout => StatusCode::GATEWAY_TIMEOUT,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    }
}
