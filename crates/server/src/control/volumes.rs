//! Volumes on the control plane: made, listed, removed. Their content has a plane of its own.

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use hyper::StatusCode;
use sandtree::{Access, MountAccess, MountSpec, VOLUME_OWNER, VolumeInfo, VolumeRemoval};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{Body, Id};
use crate::auth;
use crate::error::{Fault, Result};
use crate::gateway::Gateway;
use crate::labels::VolumeMount;

/// A sandbox has no more mounts.
const MOUNTS_MAX: usize = 64;

#[derive(Debug, Deserialize)]
pub(super) struct NewVolume {
    name: Option<String>,
    driver: Option<String>,
}

pub(super) async fn create(
    State(gateway): State<Gateway>,
    Body(new): Body<NewVolume>,
) -> Result<Response> {
    if let Some(driver) = new.driver.filter(|driver| !driver.is_empty()) {
        return Err(Fault::not_implemented(&format!(
            "the volume driver {driver:?}"
        )));
    }
    let name = new.name.unwrap_or_default();
    let made = gateway.host().create_volume(&name)?;
    let volume = made.ok_or_else(|| {
        let message = format!("there is a volume \"{name}\" already");
        Fault::conflict(message)
    })?;
    let shown = detailed(&volume, &gateway.host().access()?);
    Ok((StatusCode::CREATED, axum::Json(shown)).into_response())
}

pub(super) async fn list(State(gateway): State<Gateway>) -> Result<Response> {
    let volumes = gateway.host().volumes()?;
    let shown: Vec<Value> = volumes
        .iter()
        .map(|volume| json!({ "volumeID": volume.id, "name": volume.name }))
        .collect();
    Ok(axum::Json(shown).into_response())
}

pub(super) async fn get(State(gateway): State<Gateway>, Id(id): Id) -> Result<Response> {
    let volume = gateway.host().volume(&id)?.ok_or_else(|| unknown(&id))?;
    let shown = detailed(&volume, &gateway.host().access()?);
    Ok(axum::Json(shown).into_response())
}

pub(super) async fn remove(State(gateway): State<Gateway>, Id(id): Id) -> Result<StatusCode> {
    match gateway.host().remove_volume(&id).await? {
        VolumeRemoval::Removed => Ok(StatusCode::NO_CONTENT),
        VolumeRemoval::Unknown => Err(unknown(&id)),
        VolumeRemoval::Mounted(by) => Err(Fault::conflict(format!(
            "volume \"{id}\" is mounted in sandbox {}: kill it first",
            by.join(", ")
        ))),
    }
}

fn detailed(volume: &VolumeInfo, access: &Access) -> Value {
    json!({
        "volumeID": volume.id,
        "name": volume.name,
        "token": access.token(auth::VOLUME, &volume.id),
    })
}

fn unknown(id: &str) -> Fault {
    Fault::not_found(format!("volume \"{id}\" not found"))
}

/// The mounts of a new sandbox.
pub(super) fn mounts(gateway: &Gateway, wanted: &[VolumeMount]) -> Result<Vec<MountSpec>> {
    if wanted.is_empty() {
        return Ok(Vec::new());
    }
    if wanted.len() > MOUNTS_MAX {
        return Err(Fault::bad_request("a sandbox has at most 64 volumes"));
    }
    let volumes = gateway.host().volumes()?;
    let spec = |mount: &VolumeMount| {
        let is_it = |volume: &&VolumeInfo| volume.name == mount.name || volume.id == mount.name;
        let volume = volumes.iter().find(is_it).ok_or_else(|| {
            let message = format!("volume \"{}\" not found", mount.name);
            Fault::bad_request(message)
        })?;
        let access = match mount.read_only {
            Some(true) => MountAccess::ReadOnly,
            _ => MountAccess::ReadWrite,
        };
        Ok(MountSpec {
            host: volume.path.clone(),
            guest: mount.path.clone(),
            access,
            owner: Some(VOLUME_OWNER),
        })
    };
    wanted.iter().map(spec).collect()
}
