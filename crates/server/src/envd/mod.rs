//! The data plane's commands and files: the protocol of E2B's envd, carried out through the agent
//! that every guest has.
//!
//! ```text
//!   POST /process.Process/…        commands    ──► detached commands of the keeper's hub
//!   POST /filesystem.Filesystem/…  directories ──► requests to the agent
//!   GET, POST /files               contents    ──► streams of the agent
//! ```

pub mod files;
mod filesystem;
mod process;
mod rpc;
mod user;

use std::path::PathBuf;

use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use hyper::{Method, StatusCode};
use sandtree::Phase;
use serde_json::json;

use crate::auth;
use crate::clock::now_unix_ms;
use crate::error::{Fault, Result};
use crate::gateway::{Connection, Gateway};
use crate::labels::Labels;
use crate::usage;

/// The port under which clients address commands and files.
pub const ENVD_PORT: u16 = 49983;

/// A request of the data plane that may be answered.
pub struct Call {
    pub gateway: Gateway,
    pub connection: Connection,
    /// The user that the client names, or else its template.
    pub user: Option<String>,
    /// The directory of commands that name none. `None`: the home of the user.
    pub workdir: Option<PathBuf>,
}

/// Answers a request for the commands and files of a sandbox.
pub async fn serve(gateway: Gateway, sandbox: &str, request: Request) -> Result<Response> {
    let path = request.uri().path().to_owned();
    let (sandbox, info) = gateway
        .sandbox(sandbox)
        .map_err(|_| Fault::sandbox_gone())?;
    // Without a token, so it must not resume the sandbox.
    if path == "/health" {
        return match info.state {
            Phase::Running => Ok(StatusCode::NO_CONTENT.into_response()),
            _ => Err(Fault::sandbox_gone()),
        };
    }
    let token = gateway.host().access()?.token(auth::ENVD, &info.id);
    let has_token = auth::has_token(request.headers(), "x-access-token", &token);
    let labels = Labels::of(&info);
    let needs_signature = labels.secure && !has_token;
    if needs_signature {
        if path != "/files" {
            let message = "unauthorized access, please provide a valid access token";
            return Err(Fault::unauthorized(message));
        }
        files::check_signature(&request, &token)?;
    }
    // A signature covers the user in the address, and no other.
    let user = if needs_signature {
        None
    } else {
        auth::basic_user(request.headers())?
    };
    let call = Call {
        connection: gateway.connect(sandbox, &info).await?,
        user: user.or(labels.user),
        workdir: labels.workdir.map(PathBuf::from),
        gateway,
    };
    if let Some(method) = path.strip_prefix("/process.Process/") {
        return process::serve(call, method, request).await;
    }
    if let Some(method) = path.strip_prefix("/filesystem.Filesystem/") {
        return filesystem::serve(call, method, request).await;
    }
    match (request.method(), path.as_str()) {
        (&Method::GET, "/files") => files::download(call, request).await,
        (&Method::POST, "/files") => files::upload(call, request).await,
        (&Method::GET, "/metrics") => metrics(call).await,
        (&Method::GET, "/envs") => Ok(axum::Json(call.connection.sandbox.env()?).into_response()),
        (method, path) => Err(Fault::not_found(format!("there is no {method} {path}"))),
    }
}

async fn metrics(call: Call) -> Result<Response> {
    let used = call.connection.guest.metrics().await?;
    let info = call.connection.sandbox.info()?;
    let memory_used = usage::memory_bytes(&used);
    let body = json!({
        "ts": now_unix_ms() / 1000,
        "cpu_count": info.cpus,
        "cpu_used_pct": usage::cpu_percent(&used),
        "mem_total": used.memory_total_bytes,
        "mem_used": memory_used,
        // What the guest's cache holds counts as free.
        "mem_cache": 0,
        "mem_total_mib": used.memory_total_bytes >> 20,
        "mem_used_mib": memory_used >> 20,
        "disk_used": usage::disk_bytes(&used),
        "disk_total": used.disk_total_bytes,
    });
    Ok(axum::Json(body).into_response())
}
