//! Snapshots: saved, listed, inspected, verified, named and removed.

use std::collections::BTreeMap;

use axum::Json;
use axum::extract::State;
use hyper::StatusCode;
use sandtree::{Progress, SaveSpec, Saved, SnapshotDetails, SnapshotInfo, Verified, parse_target};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::create::check_labels;
use super::request::{At, Native, OfSandbox, OfSnapshot, check_reference};
use crate::control::{Body, Client};
use crate::error::Result;

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SaveOptions {
    /// The name of the snapshot. A directory of the host needs the scope `host-files`.
    target: String,
    /// With memory and processes: a sandbox from the snapshot continues exactly there.
    #[serde(default)]
    memory: bool,
    /// A state by tag or id, with its memory if it has one, instead of the present.
    #[serde(default)]
    from: Option<String>,
    /// Whether it replaces the snapshot that has the name, once it is complete.
    #[serde(default)]
    replace: bool,
    #[serde(default)]
    labels: BTreeMap<String, String>,
    /// Stored compressed. Sandboxes from the snapshot take longer to start.
    #[serde(default)]
    compress: bool,
    /// Removes the states of the sandbox after the save.
    #[serde(default)]
    delete_checkpoints: bool,
}

/// Saves a sandbox, or one of its states, as a snapshot; the guest continues.
#[utoipa::path(
    post, path = "/sandboxes/{sandbox}/save", tag = "snapshots",
    params(OfSandbox), request_body = SaveOptions,
    responses((status = 201, description = "It is complete.", body = Saved)),
)]
pub async fn save(
    State(native): State<Native>,
    At(of): At<OfSandbox>,
    client: Client,
    Body(options): Body<SaveOptions>,
) -> Result<(StatusCode, Json<Saved>)> {
    check_reference(&client.key, &options.target)?;
    check_labels(&options.labels)?;
    let spec = SaveSpec {
        target: parse_target(&options.target)?,
        replace: options.replace.into(),
        memory: options.memory,
        from: options.from,
        labels: options.labels,
        compress: options.compress,
        delete_checkpoints: options.delete_checkpoints,
    };
    let _place = native.transfer()?;
    let sandbox = native.sandbox(&of.sandbox)?;
    let saved = sandbox.save(spec, Progress::silent()).await?;
    Ok((StatusCode::CREATED, Json(saved)))
}

/// Every snapshot of the store, oldest first.
#[derive(Debug, Serialize, ToSchema)]
pub struct Snapshots {
    pub snapshots: Vec<SnapshotInfo>,
    /// Why the index cannot be used. The list is right anyway.
    pub trouble: Option<String>,
}

/// Lists snapshots.
#[utoipa::path(
    get, path = "/snapshots", tag = "snapshots",
    responses((status = 200, body = Snapshots)),
)]
pub async fn list_snapshots(State(native): State<Native>) -> Result<Json<Snapshots>> {
    let listed = native.gateway.host().snapshots().await?;
    Ok(Json(Snapshots {
        snapshots: listed.snapshots,
        trouble: listed.trouble,
    }))
}

/// All information about a snapshot.
#[utoipa::path(
    get, path = "/snapshots/{snapshot}", tag = "snapshots",
    params(OfSnapshot),
    responses((status = 200, body = SnapshotDetails)),
)]
pub async fn inspect_snapshot(
    State(native): State<Native>,
    At(of): At<OfSnapshot>,
    client: Client,
) -> Result<Json<SnapshotDetails>> {
    check_reference(&client.key, &of.snapshot)?;
    let host = native.gateway.host();
    Ok(Json(host.inspect_snapshot(&of.snapshot).await?))
}

/// Removes a name of a snapshot; with its last name, the snapshot is removed.
#[utoipa::path(
    delete, path = "/snapshots/{snapshot}", tag = "snapshots",
    params(OfSnapshot),
    responses((status = 204, description = "It is removed.")),
)]
pub async fn remove_snapshot(
    State(native): State<Native>,
    At(of): At<OfSnapshot>,
    client: Client,
) -> Result<StatusCode> {
    check_reference(&client.key, &of.snapshot)?;
    let host = native.gateway.host();
    host.remove_snapshot(&of.snapshot).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Reads every byte of a snapshot and of its image.
///
/// Damaged files are moved aside, and listed.
#[utoipa::path(
    post, path = "/snapshots/{snapshot}/verify", tag = "snapshots",
    params(OfSnapshot),
    responses((status = 200, body = Verified)),
)]
pub async fn verify_snapshot(
    State(native): State<Native>,
    At(of): At<OfSnapshot>,
    client: Client,
) -> Result<Json<Verified>> {
    check_reference(&client.key, &of.snapshot)?;
    let _place = native.transfer()?;
    let host = native.gateway.host();
    Ok(Json(host.verify(&of.snapshot, Progress::silent()).await?))
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TagOptions {
    /// A further name of the snapshot.
    name: String,
    /// Whether it takes the name from the snapshot that has it.
    #[serde(default)]
    replace: bool,
}

/// Gives a snapshot a further name.
#[utoipa::path(
    post, path = "/snapshots/{snapshot}/names", tag = "snapshots",
    params(OfSnapshot), request_body = TagOptions,
    responses((status = 200, body = SnapshotDetails)),
)]
pub async fn tag_snapshot(
    State(native): State<Native>,
    At(of): At<OfSnapshot>,
    client: Client,
    Body(options): Body<TagOptions>,
) -> Result<Json<SnapshotDetails>> {
    check_reference(&client.key, &of.snapshot)?;
    let host = native.gateway.host();
    host.tag_snapshot(&of.snapshot, &options.name, options.replace.into())
        .await?;
    Ok(Json(host.inspect_snapshot(&options.name).await?))
}
