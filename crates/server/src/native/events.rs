//! Changes of sandboxes, as they happen.

use axum::extract::State;
use axum::response::Response;
use tokio::sync::broadcast;
use tokio::sync::broadcast::error::RecvError;

use super::feed::{self, Known, SandboxEvent};
use super::request::{At, Native, OfSandbox};
use super::sse::{self, Events};
use crate::error::Result;

/// Follows the state of a sandbox.
///
/// Each event `state` is a state, the first one the present. After the sandbox is removed, `phase`
/// is null and the stream ends. A state that lasts only for a moment may be left out.
#[utoipa::path(
    get, path = "/sandboxes/{sandbox}/events", tag = "events",
    params(OfSandbox),
    responses((status = 200, body = SandboxEvent, content_type = "text/event-stream")),
)]
pub async fn sandbox_events(
    State(native): State<Native>,
    At(of): At<OfSandbox>,
) -> Result<Response> {
    let sandbox = native.sandbox(&of.sandbox)?;
    let mut watch = sandbox.watch().await?;
    let (events, response) = sse::channel();
    tokio::spawn(async move {
        let mut next = Some(watch.now().clone());
        while let Some(state) = next {
            let is_last = state.phase.is_none();
            let event = SandboxEvent {
                id: sandbox.id().to_owned(),
                name: sandbox.name().to_owned(),
                state,
            };
            if !events.send("state", &event).await {
                return;
            }
            if is_last {
                break;
            }
            let Some(changed) = events.wait(watch.changed()).await else {
                return;
            };
            next = changed;
        }
        events.finish().await;
    });
    Ok(response)
}

/// Follows the states of all sandboxes.
///
/// Begins with one event `state` for each sandbox; then there is one for each change, also of
/// sandboxes that appear later. A sandbox that is removed has the `phase` null. States that last
/// less than some 250 ms may be left out.
#[utoipa::path(
    get, path = "/events", tag = "events",
    responses((status = 200, body = SandboxEvent, content_type = "text/event-stream")),
)]
pub async fn all_events(State(native): State<Native>) -> Result<Response> {
    let (events, response) = sse::channel();
    // Before the list, so that no change falls between them.
    let changes = native.feed.subscribe(native.gateway.host());
    tokio::spawn(follow(native, changes, events));
    Ok(response)
}

async fn follow(native: Native, mut changes: broadcast::Receiver<SandboxEvent>, events: Events) {
    let mut known = Known::new();
    let mut news = feed::news(native.gateway.host(), &mut known);
    loop {
        for event in news {
            if !events.send("state", &event).await {
                return;
            }
        }
        news = match events.wait(changes.recv()).await {
            None => return,
            Some(Ok(change)) => new_to(&mut known, change),
            Some(Err(RecvError::Lagged(_))) => feed::news(native.gateway.host(), &mut known),
            Some(Err(RecvError::Closed)) => break,
        };
    }
    events.finish().await;
}

/// A change, unless its client knows of it.
fn new_to(known: &mut Known, change: SandboxEvent) -> Vec<SandboxEvent> {
    let before = match change.state.phase {
        Some(_) => known.insert(change.id.clone(), change.clone()),
        None if known.remove(&change.id).is_none() => return Vec::new(),
        None => None,
    };
    if before.as_ref() == Some(&change) {
        return Vec::new();
    }
    vec![change]
}
