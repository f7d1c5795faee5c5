//! The content of volumes: E2B's API for files of a volume, without a sandbox.
//!
//! ```text
//!   /volumecontent/ID/file   GET reads, PUT replaces         each with the volume's token
//!   /volumecontent/ID/dir    GET lists, POST makes
//!   /volumecontent/ID/path   GET describes, PATCH changes, DELETE removes
//! ```
//!
//! Always: what guests put into a volume is hostile; paths are resolved by the library, beneath
//! the volume and through no symlink. A file is received completely before it replaces another.

use std::io;
use std::time::{Duration, UNIX_EPOCH};

use axum::Router;
use axum::body::Body;
use axum::extract::{FromRequestParts, State};
use axum::http::request::Parts as Head;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use futures_util::StreamExt;
use hyper::StatusCode;
use hyper::header::{AUTHORIZATION, CONTENT_LENGTH, CONTENT_TYPE};
use sandtree::{FileKind, Parents, VOLUME_OWNER, VolumeEntry, VolumeFiles, is_equal};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio_util::io::ReaderStream;

use crate::auth;
use crate::error::{Fault, Result};
use crate::gateway::Gateway;

const FILE_MAX: u64 = 16 << 30;
const DEPTH_MAX: usize = 64;
const BODY_MAX: usize = 64 << 10;

pub fn router() -> Router<Gateway> {
    Router::new()
        .route("/volumecontent/{id}/file", get(read).put(write))
        .route("/volumecontent/{id}/dir", get(list).post(make_dir))
        .route(
            "/volumecontent/{id}/path",
            get(stat).patch(change).delete(remove),
        )
}

/// The volume of a request that has its token.
struct Volume(VolumeFiles);

impl FromRequestParts<Gateway> for Volume {
    type Rejection = Fault;

    async fn from_request_parts(head: &mut Head, gateway: &Gateway) -> Result<Self> {
        let path = axum::extract::Path::<String>::from_request_parts(head, gateway).await;
        let axum::extract::Path(id) = path.map_err(|e| Fault::bad_request(e.body_text()))?;
        let host = gateway.host();
        let value = auth::header(&head.headers, AUTHORIZATION.as_str());
        let token = value.and_then(|value| value.strip_prefix("Bearer "));
        let expected = host.access()?.token(auth::VOLUME, &id);
        if !token.is_some_and(|token| is_equal(token.as_bytes(), expected.as_bytes())) {
            return Err(Fault::unauthorized("invalid token of a volume"));
        }
        let volume = host.volume(&id)?;
        let volume =
            volume.ok_or_else(|| Fault::not_found(format!("volume \"{id}\" not found")))?;
        Ok(Self(host.volume_files(&volume)?))
    }
}

#[derive(Debug)]
struct Query {
    path: String,
    depth: Option<usize>,
    change: Change,
    force: Option<bool>,
}

/// The query of a request, whose numbers are texts.
struct Asked(Query);

impl<S: Send + Sync> FromRequestParts<S> for Asked {
    type Rejection = Fault;

    async fn from_request_parts(head: &mut Head, state: &S) -> Result<Self> {
        type Texts = std::collections::HashMap<String, String>;
        let texts = axum::extract::Query::<Texts>::from_request_parts(head, state).await;
        let axum::extract::Query(texts) = texts.map_err(|e| Fault::bad_request(e.body_text()))?;
        let number = |name: &str| texts.get(name).map(|text| parsed(name, text)).transpose();
        let path = texts.get("path").cloned();
        let force = match texts.get("force").map(String::as_str) {
            None => None,
            Some("true" | "True") => Some(true),
            Some("false" | "False") => Some(false),
            Some(other) => return Err(Fault::bad_request(format!("invalid force {other:?}"))),
        };
        Ok(Self(Query {
            path: path.ok_or_else(|| Fault::bad_request("path is missing"))?,
            depth: number("depth")?.map(|depth| depth as usize),
            change: Change {
                uid: number("uid")?,
                gid: number("gid")?,
                mode: number("mode")?,
            },
            force,
        }))
    }
}

fn parsed(name: &str, text: &str) -> Result<u32> {
    let message = || format!("invalid {name} {text:?}: use a number");
    text.parse().map_err(|_| Fault::bad_request(message()))
}

/// What a client wants a file to be.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
struct Change {
    uid: Option<u32>,
    gid: Option<u32>,
    mode: Option<u32>,
}

impl Change {
    /// The mode. All files of a volume belong to one user, so another owner is refused.
    fn mode(self) -> Result<Option<u32>> {
        let is_other = |asked: Option<u32>, own: u32| asked.is_some_and(|asked| asked != own);
        if is_other(self.uid, VOLUME_OWNER.uid) || is_other(self.gid, VOLUME_OWNER.gid) {
            return Err(Fault::not_implemented(
                "another owner than 1000:1000 in a volume",
            ));
        }
        if self.mode.is_some_and(|mode| mode > 0o777) {
            return Err(Fault::bad_request("mode has the bits of 0o777 only"));
        }
        Ok(self.mode)
    }
}

impl Query {
    fn parents(&self) -> Parents {
        match self.force {
            Some(true) => Parents::Make,
            _ => Parents::Require,
        }
    }
}

/// Does work on files where it may block.
async fn on_files<T: Send + 'static>(
    Volume(files): Volume,
    path: &str,
    work: impl FnOnce(&VolumeFiles) -> io::Result<T> + Send + 'static,
) -> Result<T> {
    let done = tokio::task::spawn_blocking(move || work(&files)).await;
    let done = done.map_err(|_| Fault::internal("the request failed"))?;
    done.map_err(|error| refused(path, &error))
}

fn refused(path: &str, error: &io::Error) -> Fault {
    let status = match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => StatusCode::NOT_FOUND,
        io::ErrorKind::AlreadyExists => StatusCode::CONFLICT,
        io::ErrorKind::PermissionDenied => StatusCode::FORBIDDEN,
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            StatusCode::INSUFFICIENT_STORAGE
        }
        _ => StatusCode::BAD_REQUEST,
    };
    Fault::new(status, format!("{path}: {error}"))
}

async fn stat(volume: Volume, Asked(query): Asked) -> Result<Response> {
    let path = query.path.clone();
    let entry = on_files(volume, &query.path, move |files| files.stat(&path)).await?;
    Ok(axum::Json(shown(&entry)).into_response())
}

async fn list(volume: Volume, Asked(query): Asked) -> Result<Response> {
    let depth = query.depth.unwrap_or(1).clamp(1, DEPTH_MAX);
    let path = query.path.clone();
    let entries = on_files(volume, &query.path, move |files| files.list(&path, depth)).await?;
    let entries: Vec<Value> = entries.iter().map(shown).collect();
    Ok(axum::Json(entries).into_response())
}

async fn make_dir(volume: Volume, Asked(query): Asked) -> Result<Response> {
    let mode = query.change.mode()?;
    let parents = query.parents();
    let path = query.path.clone();
    let made = move |files: &VolumeFiles| files.make_dir(&path, mode, parents);
    let entry = on_files(volume, &query.path, made).await?;
    Ok((StatusCode::CREATED, axum::Json(shown(&entry))).into_response())
}

async fn remove(volume: Volume, Asked(query): Asked) -> Result<StatusCode> {
    let path = query.path.clone();
    on_files(volume, &query.path, move |files| files.remove(&path)).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn change(volume: Volume, Asked(query): Asked, body: Body) -> Result<Response> {
    let body = axum::body::to_bytes(body, BODY_MAX).await;
    let body = body.map_err(|_| Fault::new(StatusCode::PAYLOAD_TOO_LARGE, "too large"))?;
    let change: Change = serde_json::from_slice(&body)
        .map_err(|error| Fault::bad_request(format!("invalid body: {error}")))?;
    let mode = change.mode()?;
    let path = query.path.clone();
    let changed = move |files: &VolumeFiles| match mode {
        Some(mode) => files.set_mode(&path, mode),
        None => files.stat(&path),
    };
    let entry = on_files(volume, &query.path, changed).await?;
    Ok(axum::Json(shown(&entry)).into_response())
}

async fn read(volume: Volume, Asked(query): Asked) -> Result<Response> {
    let path = query.path.clone();
    let opened = on_files(volume, &query.path, move |files| {
        let file = files.read(&path)?;
        let bytes = file.metadata()?.len();
        Ok((file, bytes))
    });
    let (file, bytes) = opened.await?;
    // A guest may change the file meanwhile; the answer has the length that it announces.
    let file = tokio::io::AsyncReadExt::take(tokio::fs::File::from_std(file), bytes);
    let headers = [
        (CONTENT_TYPE, "application/octet-stream".to_owned()),
        (CONTENT_LENGTH, bytes.to_string()),
    ];
    Ok((headers, Body::from_stream(ReaderStream::new(file))).into_response())
}

async fn write(
    State(gateway): State<Gateway>,
    volume: Volume,
    Asked(query): Asked,
    body: Body,
) -> Result<Response> {
    let mode = query.change.mode()?;
    let mut received = gateway.host().new_archive()?;
    let mut stream = body.into_data_stream();
    let mut bytes = 0;
    while let Some(piece) = stream.next().await {
        let piece = piece.map_err(|_| Fault::bad_request("the body was cut off"))?;
        bytes += piece.len() as u64;
        if bytes > FILE_MAX {
            let message = "a file has at most 16 GiB";
            return Err(Fault::new(StatusCode::PAYLOAD_TOO_LARGE, message));
        }
        received.write(&piece)?;
    }
    // Two writers of one file would use one temporary name.
    let _alone = gateway.repeats().enter("volume content").await;
    let parents = query.parents();
    let path = query.path.clone();
    let written = move |files: &VolumeFiles| {
        let mut content = std::fs::File::open(received.path())?;
        files.write(&path, mode, parents, &mut content)
    };
    let entry = on_files(volume, &query.path, written).await?;
    Ok((StatusCode::CREATED, axum::Json(shown(&entry))).into_response())
}

fn shown(entry: &VolumeEntry) -> Value {
    let kind = match entry.kind {
        FileKind::File => "file",
        FileKind::Dir => "directory",
        FileKind::Symlink => "symlink",
        FileKind::Other => "unknown",
    };
    let name = entry.path.rsplit('/').next().unwrap_or_default();
    let mut shown = json!({
        "name": name,
        "type": kind,
        "path": entry.path,
        "size": entry.bytes,
        "mode": entry.mode,
        "uid": entry.uid,
        "gid": entry.gid,
        "atime": moment(entry.accessed_ns),
        "mtime": moment(entry.modified_ns),
        "ctime": moment(entry.changed_ns),
    });
    if let Some(target) = &entry.target {
        shown["target"] = json!(target);
    }
    shown
}

/// A guest can set any time; those that the form cannot express become the nearest.
fn moment(ns: i64) -> String {
    const LAST_NS: u64 = 9_000_000_000 * 1_000_000_000;
    let ns = u64::try_from(ns).unwrap_or(0).min(LAST_NS);
    humantime::format_rfc3339_micros(UNIX_EPOCH + Duration::from_nanos(ns)).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_time_of_a_guest_has_a_form() {
        assert_eq!(moment(-1), "1970-01-01T00:00:00.000000Z");
        assert!(moment(i64::MAX).starts_with("22"));
    }

    #[test]
    fn owners_that_cannot_be_set_are_refused() {
        let change = |text: &str| serde_json::from_str::<Change>(text).unwrap().mode();
        assert_eq!(change(r#"{"mode":420,"uid":1000}"#).unwrap(), Some(0o644));
        assert!(change(r#"{"uid":0}"#).is_err());
        assert!(change(r#"{"mode":2541}"#).is_err());
    }
}
