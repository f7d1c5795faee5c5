//! Snapshots on the control plane, and CubeSandbox's rollback.

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use hyper::StatusCode;
use sandtree::{Forget, Phase, Progress, Replace, SandboxInfo, SaveSpec, Shelf, SnapshotInfo};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::query::{Order, PageQuery, Place};
use super::{Asked, Body, Id};
use crate::digits;
use crate::error::{Fault, Result};
use crate::gateway::Gateway;
use crate::observe::{self, Operation, Trail};
use crate::records::SnapshotRecord;
use crate::template;

/// The label with the sandbox that a snapshot was taken of.
const OF: &str = "e2b/sandbox";
/// The beginning of the names that the server chooses; CubeSandbox knows snapshots by it.
const PREFIX: &str = "snap-";

#[derive(Debug, Default, Deserialize)]
pub(super) struct NewSnapshot {
    name: Option<String>,
    memory: Option<bool>,
}

#[derive(Debug, Serialize)]
struct Shown {
    #[serde(rename = "snapshotID")]
    snapshot: String,
    names: Vec<String>,
}

impl Shown {
    fn of(info: &SnapshotInfo) -> Option<Self> {
        Some(Self {
            snapshot: info.names.first()?.clone(),
            names: info.names.clone(),
        })
    }
}

/// Takes a snapshot of a sandbox, which continues.
pub(super) async fn create(
    State(gateway): State<Gateway>,
    Id(id): Id,
    Body(asked): Body<NewSnapshot>,
) -> Result<Response> {
    let (sandbox, info) = gateway.sandbox(&id)?;
    let name = match &asked.name {
        Some(name) => chosen_name(&gateway, name)?,
        None => unused_name(),
    };
    let wants_memory = asked.memory.unwrap_or(true);
    let with_memory = wants_memory && info.is_running();
    let mut spec = SaveSpec {
        replace: Replace::Yes,
        // Files that its guest has not written out are in the memory of a paused sandbox.
        memory: wants_memory && info.state == Phase::Paused,
        labels: labels(&info),
        ..SaveSpec::new(&name)?
    };
    if with_memory {
        // The checkpoint stays in the sandbox, for a rollback. Both share their layers.
        spec.from = Some(name.clone());
    }
    let expiry = info.expiry;
    let taken = name.clone();
    let taking = async move {
        if with_memory {
            sandbox.checkpoint(Some(&taken), Replace::Yes).await?;
        }
        let saved = sandbox.save(spec, Progress::silent()).await?;
        let record = SnapshotRecord {
            snapshot: saved.digest,
            env: sandbox.env()?,
            expiry,
        };
        let host = gateway.host();
        host.put_document(Shelf::Snapshots, &taken, record)
    };
    // A client that leaves in between must not leave a part of it.
    let taken = observe::spawn(taking).await;
    taken.map_err(|_| Fault::internal("the snapshot failed"))??;
    let shown = Shown {
        snapshot: name.clone(),
        names: vec![name],
    };
    Ok((StatusCode::CREATED, axum::Json(shown)).into_response())
}

/// The name of a snapshot. Other clients create from images and configured templates, so their
/// names are taken.
fn chosen_name(gateway: &Gateway, name: &str) -> Result<String> {
    let config = gateway.config();
    let stored = template::stored_name(config, name);
    let is_taken = stored == template::BASE
        || config.templates.values().any(|image| *image == stored)
        || template::image(gateway.host(), &stored).is_some();
    if is_taken {
        let message = format!("the name \"{name}\" is that of a template");
        return Err(Fault::conflict(message));
    }
    Ok(stored)
}

/// What sandboxes from a snapshot inherit, on every host.
fn labels(info: &SandboxInfo) -> std::collections::BTreeMap<String, String> {
    let mut labels = info.labels.clone();
    labels.insert(OF.to_owned(), info.id.clone());
    labels
}

fn unused_name() -> String {
    format!("{PREFIX}{}", digits::random::<12>())
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ListQuery {
    #[serde(rename = "sandboxID")]
    sandbox: Option<String>,
    name: Option<String>,
    limit: Option<usize>,
    next_token: Option<String>,
}

/// A page of the snapshots, newest first.
pub(super) async fn list(
    State(gateway): State<Gateway>,
    Asked(query): Asked<ListQuery>,
) -> Result<Response> {
    let ListQuery {
        sandbox,
        name,
        limit,
        next_token,
    } = query;
    let name = name.map(|name| template::stored_name(gateway.config(), &name));
    let mut all = gateway.host().snapshots().await?.snapshots;
    all.reverse();
    let wanted = |info: &&SnapshotInfo| {
        let is_of = sandbox
            .as_ref()
            .is_none_or(|id| info.labels.get(OF) == Some(id));
        is_of && name.as_ref().is_none_or(|name| info.names.contains(name))
    };
    let placed = |info: &SnapshotInfo| {
        let shown = Shown::of(info)?;
        let place = Place {
            at_unix_ms: info.created_at_unix_ms,
            id: shown.snapshot.clone(),
        };
        Some((place, shown))
    };
    let found = all.iter().filter(wanted).filter_map(placed);
    PageQuery { limit, next_token }.page(found.collect(), Order::Desc)
}

#[derive(Debug, Deserialize)]
pub(super) struct RollbackBody {
    #[serde(rename = "snapshotID")]
    snapshot: Option<String>,
}

/// Returns a sandbox to one of its snapshots: to the checkpoint that was taken with it.
pub(super) async fn rollback(
    State(gateway): State<Gateway>,
    Id(id): Id,
    Body(asked): Body<RollbackBody>,
) -> Result<Response> {
    let (sandbox, _) = gateway.sandbox(&id)?;
    let Some(snapshot) = asked.snapshot else {
        return Err(Fault::bad_request("snapshotID is missing"));
    };
    let name = template::stored_name(gateway.config(), &snapshot);
    let (states, _) = sandbox.states()?;
    let is_kept = states
        .iter()
        .any(|state| state.tag.as_deref() == Some(&name));
    if !is_kept {
        let message =
            format!("template \"{snapshot}\" not found among the checkpoints of sandbox \"{id}\"");
        return Err(Fault::not_found(message));
    }
    let reverted = sandbox.revert(&name).await?;
    Trail::restored(Operation::Rollback, &reverted.restore);
    let body = json!({
        "sandboxID": id,
        "snapshotID": snapshot,
        "operationID": unused_name(),
        "status": "READY",
    });
    Ok(axum::Json(body).into_response())
}

/// Removes what the server keeps of a snapshot: its record, and the checkpoint that was taken with
/// it, if its sandbox still has that.
pub(super) async fn forget(gateway: &Gateway, name: &str) -> Result<()> {
    let Ok(details) = gateway.host().inspect_snapshot(name).await else {
        return Ok(());
    };
    gateway.host().remove_document(Shelf::Snapshots, name)?;
    let Some(id) = details.manifest.labels.get(OF) else {
        return Ok(());
    };
    let Ok((sandbox, _)) = gateway.sandbox(id) else {
        return Ok(());
    };
    let (states, _) = sandbox.states()?;
    if states
        .iter()
        .any(|state| state.tag.as_deref() == Some(name))
    {
        let which = Forget::These(vec![name.to_owned()]);
        sandbox.forget(which).await?;
    }
    Ok(())
}
