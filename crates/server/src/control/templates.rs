//! Templates on the control plane: images and snapshots of the store.

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use hyper::StatusCode;
use sandtree::ErrorKind;
use serde_json::{Value, json};

use super::Id;
use super::shapes::ENVD_VERSION;
use super::snapshots;
use crate::error::{Fault, Result};
use crate::gateway::Gateway;
use crate::template::{self, BASE};

/// Every image and snapshot that has a name.
pub(super) async fn list(State(gateway): State<Gateway>) -> Result<Response> {
    let host = gateway.host();
    let images = host.images().await?;
    let images = images.iter().flat_map(|image| {
        let shown = |name: &String| shown(name, None);
        image.names.iter().map(shown).collect::<Vec<_>>()
    });
    let snapshots = host.snapshots().await?.snapshots;
    let snapshots = snapshots.iter().flat_map(|snapshot| {
        let shown = |name: &String| shown(name, Some(&snapshot.created_at));
        snapshot.names.iter().map(shown).collect::<Vec<_>>()
    });
    let all: Vec<Value> = images.chain(snapshots).collect();
    Ok(axum::Json(all).into_response())
}

/// The store does not record when an image was made.
fn shown(name: &str, created_at: Option<&str>) -> Value {
    let created_at = created_at.unwrap_or("1970-01-01T00:00:00Z");
    json!({
        "templateID": name,
        "buildID": "00000000-0000-0000-0000-000000000000",
        "aliases": [name],
        "names": [name],
        "public": false,
        "cpuCount": 1,
        "memoryMB": 512,
        "diskSizeMB": 0,
        "createdAt": created_at,
        "updatedAt": created_at,
        "createdBy": null,
        "lastSpawnedAt": null,
        "spawnCount": 0,
        "buildCount": 1,
        "buildStatus": "ready",
        "status": "READY",
        "envdVersion": ENVD_VERSION,
    })
}

pub(super) async fn exists(State(gateway): State<Gateway>, Id(alias): Id) -> Result<Response> {
    let host = gateway.host();
    let name = template::stored_name(gateway.config(), &alias);
    let is_here = template::image(host, &name).is_some()
        || host.inspect_snapshot(&name).await.is_ok()
        || alias == BASE;
    if !is_here {
        return Err(Fault::not_found(format!("template \"{alias}\" not found")));
    }
    let body = json!({ "templateID": alias, "public": false });
    Ok(axum::Json(body).into_response())
}

/// Removes a snapshot or the name of an image. Sandboxes that were made from it stay.
pub(super) async fn remove(State(gateway): State<Gateway>, Id(id): Id) -> Result<StatusCode> {
    let host = gateway.host();
    let name = template::stored_name(gateway.config(), &id);
    let removed = match template::image(host, &name) {
        Some(_) => host.remove_image(&name).await.map(drop),
        None => {
            snapshots::forget_checkpoint(&gateway, &name).await?;
            host.remove_snapshot(&name).await
        }
    };
    match removed {
        Ok(()) => Ok(StatusCode::NO_CONTENT),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Invalid) => {
            Err(Fault::not_found(format!("template \"{id}\" not found")))
        }
        Err(error) => Err(error.into()),
    }
}
