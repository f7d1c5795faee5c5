//! Registries: push and pull, with their progress.
//!
//! Progress is a stream of events and not a resource of its own: the work belongs to the request,
//! so a client that leaves ends it, and the server has nothing to keep or to lose.

use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use hyper::HeaderMap;
use hyper::header::ACCEPT;
use sandtree::image::Progress;
use sandtree::{PullSpec, Pulled, Pushed, RegistryAccess, Scope};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use utoipa::ToSchema;

use super::request::Native;
use super::sse::{self, EVENT_STREAM, Events};
use super::stream::Work;
use crate::auth;
use crate::control::{Body, Client};
use crate::error::Result;

/// The least time between two reports of progress.
const REPORTED_EVERY: Duration = Duration::from_millis(200);

/// How the registry is reached. Without a user name, the credentials of the server's user are used.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Credentials {
    username: Option<String>,
    password: Option<String>,
    /// Without TLS, also for a registry on another machine.
    plain_http: bool,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PushOptions {
    /// Name or digest of an image or a snapshot.
    what: String,
    /// `HOST[:PORT]/REPOSITORY[:TAG]`
    reference: String,
    #[serde(default)]
    access: Credentials,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PullOptions {
    /// `HOST[:PORT]/REPOSITORY[:TAG][@DIGEST]`
    reference: String,
    /// The last part of the repository unless given, with the tag unless that is `latest`.
    #[serde(default)]
    name: Option<String>,
    /// Whether it takes the name from the snapshot that has it.
    #[serde(default)]
    replace: bool,
    #[serde(default)]
    access: Credentials,
}

/// How far the work is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub struct TransferProgress {
    #[schema(example = "fetching")]
    pub stage: String,
    pub done_bytes: u64,
    /// Null: it is not known.
    pub total_bytes: Option<u64>,
}

impl From<Progress> for TransferProgress {
    fn from(progress: Progress) -> Self {
        Self {
            stage: progress.stage.as_str().to_owned(),
            done_bytes: progress.done_bytes,
            total_bytes: progress.total_bytes,
        }
    }
}

/// Sends an image or a snapshot to a registry.
///
/// With `Accept: text/event-stream`, the answer is a stream of events: `progress`, then `done` with
/// the result or `error`. A client that leaves ends the work.
#[utoipa::path(
    post, path = "/push", tag = "registries",
    request_body = PushOptions,
    responses((
        status = 200,
        content((Pushed = "application/json"), (TransferProgress = "text/event-stream")),
    )),
)]
pub async fn push(
    State(native): State<Native>,
    client: Client,
    headers: HeaderMap,
    Body(options): Body<PushOptions>,
) -> Result<Response> {
    auth::need(&client.key, Scope::Registries, "push")?;
    let place = native.transfer()?;
    let host = native.gateway.host().clone();
    let access = access(&native, options.access);
    let (told, progress) = telling();
    let work = Work::start(async move {
        let _place = place;
        let pushing = host.push(&options.what, &options.reference, access, told);
        Ok(pushing.await?)
    });
    answer::<Pushed>(&headers, work, progress).await
}

/// Brings an image or a snapshot from a registry.
///
/// With `Accept: text/event-stream`, the answer is a stream of events: `progress`, then `done` with
/// the result or `error`. A client that leaves ends the work.
#[utoipa::path(
    post, path = "/pull", tag = "registries",
    request_body = PullOptions,
    responses((
        status = 200,
        content((Pulled = "application/json"), (TransferProgress = "text/event-stream")),
    )),
)]
pub async fn pull(
    State(native): State<Native>,
    client: Client,
    headers: HeaderMap,
    Body(options): Body<PullOptions>,
) -> Result<Response> {
    auth::need(&client.key, Scope::Registries, "pull")?;
    let place = native.transfer()?;
    let host = native.gateway.host().clone();
    let spec = PullSpec {
        name: options.name,
        replace: options.replace,
        access: access(&native, options.access),
        ..PullSpec::default()
    };
    let (told, progress) = telling();
    let work = Work::start(async move {
        let _place = place;
        let pulling = host.pull(&options.reference, &spec, told);
        Ok(pulling.await?)
    });
    answer::<Pulled>(&headers, work, progress).await
}

fn access(native: &Native, given: Credentials) -> RegistryAccess {
    RegistryAccess {
        username: given.username,
        password: given.password,
        plain_http: given.plain_http,
        ..native.gateway.config().registry.clone()
    }
}

type Reports = watch::Receiver<Option<TransferProgress>>;

/// The progress that work reports; only the last report is kept.
fn telling() -> (impl FnMut(Progress) + Send + 'static, Reports) {
    let (sender, reports) = watch::channel(None);
    let told = move |progress: Progress| {
        sender.send_replace(Some(progress.into()));
    };
    (told, reports)
}

async fn answer<T: Serialize + Send + Sync + 'static>(
    headers: &HeaderMap,
    mut work: Work<T>,
    progress: Reports,
) -> Result<Response> {
    let accepted = auth::header(headers, ACCEPT.as_str()).unwrap_or_default();
    if !accepted.contains(EVENT_STREAM) {
        return Ok(Json(work.done().await?).into_response());
    }
    let (events, response) = sse::channel();
    tokio::spawn(report(events, work, progress));
    Ok(response)
}

async fn report<T: Serialize + Send + Sync + 'static>(
    events: Events,
    mut work: Work<T>,
    mut progress: Reports,
) {
    let done = loop {
        let next = async {
            tokio::select! {
                done = work.done() => Some(done),
                Ok(()) = progress.changed() => None,
            }
        };
        match events.wait(next).await {
            None => return,
            Some(Some(done)) => break done,
            Some(None) => {}
        }
        let at = progress.borrow_and_update().clone();
        if !events.send("progress", &at).await {
            return;
        }
        tokio::time::sleep(REPORTED_EVERY).await;
    };
    match done {
        Ok(result) => {
            events.send("done", &result).await;
            events.finish().await;
        }
        Err(fault) => events.fail(&fault).await,
    }
}
