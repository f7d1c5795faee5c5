//! Sandboxes: found, listed, started, stopped, paused and removed.

use std::io::SeekFrom;
use std::path::Path;

use axum::Json;
use axum::extract::State;
use hyper::StatusCode;
use sandtree::keeper::Stats;
use sandtree::{Error, KeyInfo, Paused, Report, RestoreReport, SandboxInfo};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt, AsyncSeekExt};
use utoipa::{IntoParams, ToSchema};

use super::request::{At, Native, OfSandbox, duration};
use crate::control::{Asked, Body, Client};
use crate::error::{Fault, Result};
use crate::gateway::is_shown;

const PAGE: usize = 100;
const PAGE_MAX: usize = 1000;
const CONSOLE_BYTES: u64 = 256 << 10;
const CONSOLE_BYTES_MAX: u64 = 4 << 20;

/// The key of this request: what its holder may do.
#[utoipa::path(
    get, path = "/key", tag = "access",
    responses((status = 200, body = KeyInfo)),
)]
pub async fn current_key(client: Client) -> Json<KeyInfo> {
    Json(client.key)
}

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub struct ListQuery {
    /// Only sandboxes in one of these states, separated by commas.
    #[param(example = "running,paused")]
    state: Option<String>,
    /// Only sandboxes with this label, as `name=value`.
    label: Option<String>,
    /// How many sandboxes a page has: 1 to 1000, 100 unless given.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<usize>,
    /// `next` of the page before.
    after: Option<String>,
}

/// Sandboxes, oldest first.
#[derive(Debug, Serialize, ToSchema)]
pub struct SandboxPage {
    pub sandboxes: Vec<SandboxInfo>,
    /// Why sandboxes are missing that could not be read.
    #[schema(value_type = Vec<super::problem::Problem>)]
    pub unreadable: Vec<Report>,
    /// Where the next page begins; null on the last page.
    pub next: Option<String>,
}

/// Lists sandboxes, a page at a time.
#[utoipa::path(
    get, path = "/sandboxes", tag = "sandboxes",
    params(ListQuery),
    responses((status = 200, body = SandboxPage)),
)]
pub async fn list_sandboxes(
    State(native): State<Native>,
    Asked(query): Asked<ListQuery>,
) -> Result<Json<SandboxPage>> {
    let limit = page_size(query.limit)?;
    let after = query.after.as_deref().map(position).transpose()?;
    let label = query.label.as_deref().map(sandtree::parse_label);
    let label = label.transpose()?;
    let states: Option<Vec<&str>> = query.state.as_deref().map(|text| text.split(',').collect());
    let (all, broken) = native.gateway.host().list()?;
    let is_wanted = |info: &SandboxInfo| {
        let state = info.state.to_string();
        let has_state = states.as_ref().is_none_or(|of| of.contains(&&*state));
        let has_label = label
            .as_ref()
            .is_none_or(|(name, value)| info.labels.get(name) == Some(value));
        is_shown(info.state) && has_state && has_label && after.as_ref() < Some(&place(info))
    };
    let mut sandboxes: Vec<_> = all.into_iter().filter(is_wanted).collect();
    let has_more = sandboxes.len() > limit;
    sandboxes.truncate(limit);
    let last = sandboxes.last().filter(|_| has_more);
    let next = last.map(place).map(|(at, id)| format!("{at}-{id}"));
    Ok(Json(SandboxPage {
        sandboxes,
        unreadable: broken.iter().map(Error::report).collect(),
        next,
    }))
}

fn page_size(limit: Option<usize>) -> Result<usize> {
    match limit.unwrap_or(PAGE) {
        limit @ 1..=PAGE_MAX => Ok(limit),
        other => Err(Fault::bad_request(format!(
            "invalid limit {other}: use 1 to {PAGE_MAX}"
        ))),
    }
}

/// Where a sandbox is in the list: it stays there when others are removed.
fn place(info: &SandboxInfo) -> (u64, String) {
    (info.created_at_unix_ms, info.id.clone())
}

fn position(text: &str) -> Result<(u64, String)> {
    let parts = text.split_once('-');
    let parsed = parts.and_then(|(at, id)| Some((at.parse().ok()?, id.to_owned())));
    parsed.ok_or_else(|| {
        Fault::bad_request(format!(
            "invalid after {text:?}: use `next` of another page"
        ))
    })
}

/// A sandbox.
#[utoipa::path(
    get, path = "/sandboxes/{sandbox}", tag = "sandboxes",
    params(OfSandbox),
    responses((status = 200, body = SandboxInfo)),
)]
pub async fn get_sandbox(
    State(native): State<Native>,
    At(of): At<OfSandbox>,
) -> Result<Json<SandboxInfo>> {
    Ok(Json(native.sandbox(&of.sandbox)?.info()?))
}

/// Ends a sandbox, if it runs, and removes everything of it.
#[utoipa::path(
    delete, path = "/sandboxes/{sandbox}", tag = "sandboxes",
    params(OfSandbox),
    responses((status = 204, description = "It is gone.")),
)]
pub async fn remove_sandbox(
    State(native): State<Native>,
    At(of): At<OfSandbox>,
) -> Result<StatusCode> {
    native.sandbox(&of.sandbox)?.remove().await?;
    Ok(StatusCode::NO_CONTENT)
}

#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct StartOptions {
    /// 60 s unless given, and three times as long under emulation.
    boot_timeout_ms: Option<u64>,
}

/// Boots a sandbox again after a stop.
#[utoipa::path(
    post, path = "/sandboxes/{sandbox}/start", tag = "sandboxes",
    params(OfSandbox), request_body = StartOptions,
    responses((status = 200, body = SandboxInfo)),
)]
pub async fn start_sandbox(
    State(native): State<Native>,
    At(of): At<OfSandbox>,
    client: Client,
    Body(options): Body<StartOptions>,
) -> Result<Json<SandboxInfo>> {
    let sandbox = native.sandbox(&of.sandbox)?;
    let _admission = native.admit(&client.key, &sandbox.info()?, 1).await?;
    sandbox.start(duration(options.boot_timeout_ms)).await?;
    Ok(Json(sandbox.info()?))
}

#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct StopOptions {
    /// How long the guest's processes may take to end: 10 s unless given, 90 s with the image's own
    /// init.
    grace_ms: Option<u64>,
}

/// Shuts the guest down and syncs its disk.
///
/// Answers with null if the sandbox is removed when it stops.
#[utoipa::path(
    post, path = "/sandboxes/{sandbox}/stop", tag = "sandboxes",
    params(OfSandbox), request_body = StopOptions,
    responses((status = 200, body = Option<SandboxInfo>)),
)]
pub async fn stop_sandbox(
    State(native): State<Native>,
    At(of): At<OfSandbox>,
    Body(options): Body<StopOptions>,
) -> Result<Json<Option<SandboxInfo>>> {
    let sandbox = native.sandbox(&of.sandbox)?;
    sandbox.stop(duration(options.grace_ms)).await?;
    Ok(Json(sandbox.info().ok()))
}

/// Ends the machine at once, as if its plug were pulled; the disk stays.
///
/// Answers with null if the sandbox is removed when it stops.
#[utoipa::path(
    post, path = "/sandboxes/{sandbox}/kill", tag = "sandboxes",
    params(OfSandbox),
    responses((status = 200, body = Option<SandboxInfo>)),
)]
pub async fn kill_sandbox(
    State(native): State<Native>,
    At(of): At<OfSandbox>,
) -> Result<Json<Option<SandboxInfo>>> {
    let sandbox = native.sandbox(&of.sandbox)?;
    sandbox.kill().await?;
    Ok(Json(sandbox.info().ok()))
}

/// Writes memory and processes to disk and ends the machine.
#[utoipa::path(
    post, path = "/sandboxes/{sandbox}/pause", tag = "sandboxes",
    params(OfSandbox),
    responses((status = 200, body = Paused)),
)]
pub async fn pause_sandbox(
    State(native): State<Native>,
    At(of): At<OfSandbox>,
) -> Result<Json<Paused>> {
    Ok(Json(native.sandbox(&of.sandbox)?.pause().await?))
}

/// Continues a sandbox exactly where it was paused.
#[utoipa::path(
    post, path = "/sandboxes/{sandbox}/resume", tag = "sandboxes",
    params(OfSandbox),
    responses((status = 200, body = RestoreReport)),
)]
pub async fn resume_sandbox(
    State(native): State<Native>,
    At(of): At<OfSandbox>,
    client: Client,
) -> Result<Json<RestoreReport>> {
    let sandbox = native.sandbox(&of.sandbox)?;
    let _admission = native.admit(&client.key, &sandbox.info()?, 1).await?;
    Ok(Json(sandbox.resume().await?))
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ExpireOptions {
    /// From now on; null: it does not expire.
    #[serde(deserialize_with = "Option::deserialize")]
    #[schema(required = true)]
    after_ms: Option<u64>,
}

/// Sets when a running sandbox expires.
///
/// What happens then was chosen at its creation; without a choice, it is removed.
#[utoipa::path(
    post, path = "/sandboxes/{sandbox}/expire", tag = "sandboxes",
    params(OfSandbox), request_body = ExpireOptions,
    responses((status = 200, body = SandboxInfo)),
)]
pub async fn expire_sandbox(
    State(native): State<Native>,
    At(of): At<OfSandbox>,
    Body(options): Body<ExpireOptions>,
) -> Result<Json<SandboxInfo>> {
    let sandbox = native.sandbox(&of.sandbox)?;
    sandbox.expire(duration(options.after_ms)).await?;
    Ok(Json(sandbox.info()?))
}

/// What a running sandbox uses, of its guest and of the host.
#[utoipa::path(
    get, path = "/sandboxes/{sandbox}/stats", tag = "sandboxes",
    params(OfSandbox),
    responses((status = 200, body = Stats)),
)]
pub async fn sandbox_stats(
    State(native): State<Native>,
    At(of): At<OfSandbox>,
) -> Result<Json<Stats>> {
    Ok(Json(native.sandbox(&of.sandbox)?.stats().await?))
}

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub struct LogsQuery {
    /// How much of the end is wanted: at most 4 MiB, 256 KiB unless given.
    #[param(maximum = 4194304)]
    tail_bytes: Option<u64>,
}

/// The console of a guest.
#[derive(Debug, Serialize, ToSchema)]
pub struct Logs {
    /// Bytes that are not UTF-8 are replaced.
    pub console: String,
}

/// The end of the guest's console, also of a sandbox that does not run.
#[utoipa::path(
    get, path = "/sandboxes/{sandbox}/logs", tag = "sandboxes",
    params(OfSandbox, LogsQuery),
    responses((status = 200, body = Logs)),
)]
pub async fn sandbox_logs(
    State(native): State<Native>,
    At(of): At<OfSandbox>,
    Asked(query): Asked<LogsQuery>,
) -> Result<Json<Logs>> {
    let most = query.tail_bytes.unwrap_or(CONSOLE_BYTES);
    let most = most.min(CONSOLE_BYTES_MAX);
    let [before, newest] = native.gateway.host().console(&of.sandbox)?;
    let newest = tail(&newest, most).await?;
    let mut bytes = tail(&before, most - newest.len() as u64).await?;
    bytes.extend(newest);
    let console = String::from_utf8_lossy(&bytes).into_owned();
    Ok(Json(Logs { console }))
}

/// The last bytes of a file. One that does not exist has none.
async fn tail(path: &Path, most: u64) -> Result<Vec<u8>> {
    let failed = |error| Error::io("read", path, error);
    let mut file = match tokio::fs::File::open(path).await {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(failed(error).into()),
    };
    let length = file.metadata().await.map_err(failed)?.len();
    let start = SeekFrom::Start(length.saturating_sub(most));
    file.seek(start).await.map_err(failed)?;
    let mut bytes = Vec::new();
    file.take(most)
        .read_to_end(&mut bytes)
        .await
        .map_err(failed)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_continues_where_another_ended() {
        assert_eq!(position("12-0a").unwrap(), (12, "0a".to_owned()));
        assert!(position("0a").is_err());
        assert!(position("x-0a").is_err());
        assert!(page_size(Some(0)).is_err());
        assert!(page_size(Some(1001)).is_err());
        assert_eq!(page_size(None).unwrap(), PAGE);
    }
}
