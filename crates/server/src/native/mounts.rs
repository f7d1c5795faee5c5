//! Directories of the host in a guest. All of it needs the scope `host-files`, but for the list.

use axum::Json;
use axum::extract::State;
use sandtree::{ApplyOptions, InUse, MountChanges, MountInfo, MountSpec, Sandbox, Scope};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::request::{At, Native, OfSandbox};
use crate::auth;
use crate::control::{Asked, Body, Client};
use crate::error::Result;

/// The mounts of a sandbox.
#[derive(Debug, Serialize, ToSchema)]
pub struct Mounts {
    pub mounts: Vec<MountInfo>,
}

/// The sandbox, if the holder of the key may use files of the host.
fn reached(native: &Native, client: &Client, sandbox: &str) -> Result<Sandbox> {
    auth::need(&client.key, Scope::HostFiles, "a mount")?;
    native.sandbox(sandbox)
}

async fn mounts(sandbox: &Sandbox) -> Result<Json<Mounts>> {
    let mounts = sandbox.mounts().await?;
    Ok(Json(Mounts { mounts }))
}

/// Lists the mounts of a sandbox.
#[utoipa::path(
    get, path = "/sandboxes/{sandbox}/mounts", tag = "mounts",
    params(OfSandbox),
    responses((status = 200, body = Mounts)),
)]
pub async fn list_mounts(
    State(native): State<Native>,
    At(of): At<OfSandbox>,
) -> Result<Json<Mounts>> {
    mounts(&native.sandbox(&of.sandbox)?).await
}

/// Mounts a directory of the host in a running guest. Needs the scope `host-files`.
#[utoipa::path(
    post, path = "/sandboxes/{sandbox}/mounts", tag = "mounts",
    params(OfSandbox), request_body = MountSpec,
    responses((status = 200, body = Mounts)),
)]
pub async fn add_mount(
    State(native): State<Native>,
    At(of): At<OfSandbox>,
    client: Client,
    Body(spec): Body<MountSpec>,
) -> Result<Json<Mounts>> {
    let sandbox = reached(&native, &client, &of.sandbox)?;
    sandbox.mount(spec).await?;
    mounts(&sandbox).await
}

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub struct UnmountQuery {
    /// The path of the mount in the guest.
    guest: String,
    /// Whether to unmount even if programs use the directory; they get errors.
    #[serde(default)]
    force: bool,
}

/// Unmounts a directory. Needs the scope `host-files`.
#[utoipa::path(
    delete, path = "/sandboxes/{sandbox}/mounts", tag = "mounts",
    params(OfSandbox, UnmountQuery),
    responses((status = 200, body = Mounts)),
)]
pub async fn remove_mount(
    State(native): State<Native>,
    At(of): At<OfSandbox>,
    client: Client,
    Asked(query): Asked<UnmountQuery>,
) -> Result<Json<Mounts>> {
    let sandbox = reached(&native, &client, &of.sandbox)?;
    let in_use = if query.force {
        InUse::Detach
    } else {
        InUse::Refuse
    };
    sandbox.unmount(&query.guest, in_use).await?;
    mounts(&sandbox).await
}

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub struct MountQuery {
    /// The path of a copy-on-write mount in the guest.
    guest: String,
}

/// What the sandbox changed on top of a copy-on-write mount. Needs the scope `host-files`.
#[utoipa::path(
    get, path = "/sandboxes/{sandbox}/mounts/changes", tag = "mounts",
    params(OfSandbox, MountQuery),
    responses((status = 200, body = MountChanges)),
)]
pub async fn mount_changes(
    State(native): State<Native>,
    At(of): At<OfSandbox>,
    client: Client,
    Asked(query): Asked<MountQuery>,
) -> Result<Json<MountChanges>> {
    let sandbox = reached(&native, &client, &of.sandbox)?;
    let _place = native.transfer()?;
    Ok(Json(sandbox.changes(&query.guest).await?))
}

/// Changes of a mount, as `diff -u` shows them.
#[derive(Debug, Serialize, ToSchema)]
pub struct Patch {
    pub patch: String,
}

/// The changed lines of a copy-on-write mount. Needs the scope `host-files`.
#[utoipa::path(
    get, path = "/sandboxes/{sandbox}/mounts/patch", tag = "mounts",
    params(OfSandbox, MountQuery),
    responses((status = 200, body = Patch)),
)]
pub async fn mount_patch(
    State(native): State<Native>,
    At(of): At<OfSandbox>,
    client: Client,
    Asked(query): Asked<MountQuery>,
) -> Result<Json<Patch>> {
    let sandbox = reached(&native, &client, &of.sandbox)?;
    let _place = native.transfer()?;
    let patch = sandbox.patch(&query.guest).await?;
    Ok(Json(Patch { patch }))
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ApplyRequest {
    /// The path of a copy-on-write mount in the guest.
    guest: String,
    /// Writes nothing.
    #[serde(default)]
    dry_run: bool,
    /// Overwrites what changed on the host.
    #[serde(default)]
    force: bool,
}

/// Writes the changes of a copy-on-write mount to the host's directory. Needs the scope
/// `host-files`.
#[utoipa::path(
    post, path = "/sandboxes/{sandbox}/mounts/apply", tag = "mounts",
    params(OfSandbox), request_body = ApplyRequest,
    responses((status = 200, body = MountChanges)),
)]
pub async fn apply_mount(
    State(native): State<Native>,
    At(of): At<OfSandbox>,
    client: Client,
    Body(asked): Body<ApplyRequest>,
) -> Result<Json<MountChanges>> {
    let sandbox = reached(&native, &client, &of.sandbox)?;
    let options = ApplyOptions {
        dry_run: asked.dry_run,
        force: asked.force,
    };
    let _place = native.transfer()?;
    Ok(Json(sandbox.apply(&asked.guest, options).await?))
}
