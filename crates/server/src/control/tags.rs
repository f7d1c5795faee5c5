//! Tags of templates on the control plane. A tag is a name of the store.

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use hyper::StatusCode;
use sandtree::{ErrorKind, ImageInfo};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{Body, Id};
use crate::clock::{now_unix_ms, rfc3339};
use crate::error::{Fault, Result};
use crate::gateway::Gateway;
use crate::naming::{self, DEFAULT, TemplateName};
use crate::records::{self, TagRecord, derived_build, tag_of};
use crate::template::{self, unknown};

const TAGS_MAX: usize = 100;

#[derive(Debug, Deserialize)]
pub(super) struct Assigned {
    target: String,
    tags: Vec<String>,
}

/// Gives an image more tags.
pub(super) async fn assign(
    State(gateway): State<Gateway>,
    Body(asked): Body<Assigned>,
) -> Result<Response> {
    let target = TemplateName::parse(&asked.target)?;
    let tags = parsed(&target.name, &asked.tags)?;
    let host = gateway.host();
    let stored = target.stored();
    let image = template::image(host, &stored).ok_or_else(|| unknown(&asked.target))?;
    let before = tag_of(host, &stored, &image.digest)?;
    let build = build_of(before.as_ref(), &image);
    let now_ms = now_unix_ms();
    let mut new = Vec::new();
    for tag in &tags {
        let name = naming::stored(&target.name, tag);
        host.tag_image(&image.digest, &name).await?;
        new.push(TagRecord {
            tag: tag.clone(),
            build: build.clone(),
            image: image.digest.clone(),
            assigned_at_unix_ms: now_ms,
            shape: before
                .as_ref()
                .map(|before| before.shape)
                .unwrap_or_default(),
            user: before.as_ref().and_then(|before| before.user.clone()),
            workdir: before.as_ref().and_then(|before| before.workdir.clone()),
        });
    }
    records::set_tags(host, &target.name, new)?;
    let body = json!({ "tags": tags, "buildID": build });
    Ok((StatusCode::CREATED, axum::Json(body)).into_response())
}

#[derive(Debug, Deserialize)]
pub(super) struct Removed {
    name: String,
    tags: Vec<String>,
}

/// Takes tags away. The image stays as long as it has another name or a user.
pub(super) async fn remove(
    State(gateway): State<Gateway>,
    Body(asked): Body<Removed>,
) -> Result<StatusCode> {
    let name = TemplateName::parse(&asked.name)?.name;
    let tags = parsed(&name, &asked.tags)?;
    if tags.iter().any(|tag| tag == DEFAULT) {
        let message = "the tag \"default\" stays as long as its template";
        return Err(Fault::bad_request(message));
    }
    let host = gateway.host();
    if all(&gateway, &name).await?.is_empty() {
        return Err(unknown(&asked.name));
    }
    for tag in &tags {
        match host.remove_image(&naming::stored(&name, tag)).await {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error.into()),
            _ => {}
        }
    }
    records::forget_tags(host, &name, |tag| tags.iter().any(|gone| gone == tag))?;
    Ok(StatusCode::NO_CONTENT)
}

pub(super) async fn list(State(gateway): State<Gateway>, Id(id): Id) -> Result<Response> {
    let name = TemplateName::parse(&id)?.name;
    let found = all(&gateway, &name).await?;
    if found.is_empty() {
        return Err(unknown(&id));
    }
    let mut tags: Vec<Value> = Vec::new();
    for (stored, image) in &found {
        let record = tag_of(gateway.host(), stored, &image.digest)?;
        let assigned = record.as_ref().map_or(0, |tag| tag.assigned_at_unix_ms);
        tags.push(json!({
            "tag": naming::of_stored(stored).1,
            "buildID": build_of(record.as_ref(), image),
            "createdAt": rfc3339(assigned),
        }));
    }
    Ok(axum::Json(tags).into_response())
}

/// The names in the store of a template's tags, with their images.
pub(super) async fn all(gateway: &Gateway, name: &str) -> Result<Vec<(String, ImageInfo)>> {
    let mut found = Vec::new();
    for image in gateway.host().images().await? {
        for stored in &image.names {
            if naming::of_stored(stored).0 == name {
                found.push((stored.clone(), image.clone()));
            }
        }
    }
    found.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(found)
}

/// The build of an image: its client's, or one that follows from its content.
pub(super) fn build_of(record: Option<&TagRecord>, image: &ImageInfo) -> String {
    record.map_or_else(|| derived_build(&image.digest), |tag| tag.build.clone())
}

fn parsed(name: &str, tags: &[String]) -> Result<Vec<String>> {
    if tags.is_empty() || tags.len() > TAGS_MAX {
        return Err(Fault::bad_request("tags are 1 to 100 names"));
    }
    let parse = |tag: &String| {
        let with_tag = TemplateName::parse(&format!("{name}:{tag}"))?;
        Ok(with_tag.tag().to_owned())
    };
    tags.iter().map(parse).collect()
}
