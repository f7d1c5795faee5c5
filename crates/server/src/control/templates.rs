//! Templates on the control plane: images and snapshots of the store.

use std::collections::BTreeMap;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use hyper::StatusCode;
use sandtree::{ErrorKind, ImageInfo, Shelf};
use serde::Deserialize;
use serde_json::{Value, json};

use super::query::PageQuery;
use super::shapes::ENVD_VERSION;
use super::{Asked, Body, Id, builds, snapshots, tags};
use crate::clock::rfc3339;
use crate::error::{Fault, Result};
use crate::gateway::Gateway;
use crate::naming::{self, TemplateName};
use crate::records::{self, BuildRecord, TagRecord, derived_build, tag_of};
use crate::template::{self, BASE, unknown};

/// The memory of a sandbox, unless its template says otherwise.
const MEMORY_MIB: u64 = 512;

/// A template, as it is shown.
#[derive(Debug, Clone, Default)]
struct Shown {
    name: String,
    /// All names that lead to it, with their tags.
    names: Vec<String>,
    build: String,
    disk_bytes: u64,
    created_at: Option<String>,
    tag: Option<TagRecord>,
}

impl Shown {
    fn json(&self) -> Value {
        // The store does not record when an image was made that no client built.
        let created_at = self.created_at.clone().unwrap_or_else(|| rfc3339(0));
        let shape = self.tag.as_ref().map(|tag| tag.shape).unwrap_or_default();
        let memory_mib = shape.memory_bytes.map_or(MEMORY_MIB, |bytes| bytes >> 20);
        json!({
            "templateID": self.name,
            "buildID": self.build,
            "aliases": self.aliases(),
            "names": self.names,
            "public": false,
            "cpuCount": shape.cpus.unwrap_or(1),
            "memoryMB": memory_mib,
            "diskSizeMB": self.disk_bytes >> 20,
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

    /// Its names without tags. A name that a client chose comes before one that the server made.
    fn aliases(&self) -> Vec<&str> {
        let plain = |name: &String| !name.contains(':') && !name.contains('.');
        let mut aliases: Vec<&str> = self
            .names
            .iter()
            .filter(|name| plain(name))
            .map(String::as_str)
            .collect();
        aliases.sort_by_key(|name| name.starts_with("tpl-"));
        if aliases.is_empty() {
            aliases.push(&self.name);
        }
        aliases
    }
}

/// Every image and snapshot that has a name.
pub(super) async fn list(State(gateway): State<Gateway>) -> Result<Response> {
    let images = images(&gateway).await?;
    let snapshots = gateway.host().snapshots().await?.snapshots;
    let snapshots = snapshots.iter().flat_map(|snapshot| {
        let shown = |name: &String| Shown {
            name: name.clone(),
            names: vec![name.clone()],
            build: derived_build(&snapshot.digest),
            created_at: Some(snapshot.created_at.clone()),
            ..Shown::default()
        };
        snapshot.names.iter().map(shown).collect::<Vec<_>>()
    });
    let all: Vec<Value> = images
        .into_iter()
        .chain(snapshots)
        .map(|shown| shown.json())
        .collect();
    Ok(axum::Json(all).into_response())
}

/// The templates that are images, each with its tags.
async fn images(gateway: &Gateway) -> Result<Vec<Shown>> {
    let images = gateway.host().images().await?;
    let mut templates: BTreeMap<String, Vec<(String, ImageInfo)>> = BTreeMap::new();
    for image in &images {
        for stored in &image.names {
            let (name, _) = naming::of_stored(stored);
            let tags = templates.entry(name.to_owned()).or_default();
            tags.push((stored.clone(), image.clone()));
        }
    }
    let shown = |(name, tags)| one(gateway, name, tags);
    templates.into_iter().map(shown).collect()
}

/// A template is shown as its default tag is, or another one if it has none.
fn one(gateway: &Gateway, name: String, tags: Vec<(String, ImageInfo)>) -> Result<Shown> {
    let default = tags.iter().find(|(stored, _)| *stored == name);
    let Some((stored, image)) = default.or(tags.first()) else {
        return Err(unknown(&name));
    };
    let tag = tag_of(gateway.host(), stored, &image.digest)?;
    let tagged = |(stored, _): &(String, ImageInfo)| match naming::of_stored(stored) {
        (name, naming::DEFAULT) => name.to_owned(),
        (name, tag) => format!("{name}:{tag}"),
    };
    let mut names: Vec<String> = tags.iter().map(tagged).collect();
    let others = image.names.iter().filter(|other| !other.contains('.'));
    names.extend(others.filter(|other| **other != name).cloned());
    Ok(Shown {
        build: tags::build_of(tag.as_ref(), image),
        disk_bytes: image.disk_bytes,
        created_at: tag.as_ref().map(|tag| rfc3339(tag.assigned_at_unix_ms)),
        name,
        names,
        tag,
    })
}

/// A template with its builds, newest first.
pub(super) async fn get(
    State(gateway): State<Gateway>,
    Id(id): Id,
    Asked(query): Asked<PageQuery>,
) -> Result<Response> {
    let name = TemplateName::parse(&id).map_err(|_| unknown(&id))?.name;
    let tags = tags::all(&gateway, &name).await?;
    let host = gateway.host();
    let mut found = Vec::new();
    for build in host.documents(Shelf::Builds)? {
        let record: Option<BuildRecord> = host.document(Shelf::Builds, &build)?;
        let record = record.filter(|record| record.template == name);
        found.extend(record.map(|record| (record.created_at_unix_ms, build, record)));
    }
    found.sort_by_key(|(created_at, _, _)| std::cmp::Reverse(*created_at));
    if tags.is_empty() && found.is_empty() {
        return Err(unknown(&id));
    }
    let limit = query.limit.unwrap_or(100).clamp(1, 100);
    let mut shown = Vec::new();
    for (_, build, record) in found.iter().take(limit) {
        shown.push(build_json(&gateway, build, record)?);
    }
    let mut body = if tags.is_empty() {
        Shown {
            names: vec![name.clone()],
            name,
            build: found
                .first()
                .map(|(_, build, _)| build.clone())
                .unwrap_or_default(),
            ..Shown::default()
        }
        .json()
    } else {
        one(&gateway, name, tags)?.json()
    };
    if let Some(newest) = shown.first() {
        body["buildStatus"] = newest["status"].clone();
        body["status"] = json!(newest["status"].as_str().unwrap_or_default().to_uppercase());
        body["lastError"] = newest["lastError"].clone();
    }
    body["builds"] = json!(shown);
    Ok(axum::Json(body).into_response())
}

fn build_json(gateway: &Gateway, id: &str, record: &BuildRecord) -> Result<Value> {
    let (status, reason) = builds::outcome(gateway, id, record)?;
    let memory_mib = record
        .shape
        .memory_bytes
        .map_or(MEMORY_MIB, |bytes| bytes >> 20);
    Ok(json!({
        "buildID": id,
        "status": status.word(),
        "tags": record.tags,
        "cpuCount": record.shape.cpus.unwrap_or(1),
        "memoryMB": memory_mib,
        "createdAt": rfc3339(record.created_at_unix_ms),
        "updatedAt": rfc3339(record.finished_at_unix_ms.unwrap_or(record.created_at_unix_ms)),
        "finishedAt": record.finished_at_unix_ms.map(rfc3339),
        "envdVersion": ENVD_VERSION,
        "lastError": reason.map(|reason| reason.message),
    }))
}

pub(super) async fn exists(State(gateway): State<Gateway>, Id(alias): Id) -> Result<Response> {
    let host = gateway.host();
    let stored = template::stored_name(gateway.config(), &alias);
    let is_here = template::image(host, &stored).is_some()
        || host.inspect_snapshot(&stored).await.is_ok()
        || alias == BASE
        || has_tags(&gateway, &alias).await?;
    if !is_here {
        return Err(unknown(&alias));
    }
    let body = json!({ "templateID": alias, "public": false });
    Ok(axum::Json(body).into_response())
}

/// Whether a name without a tag is that of a template that has only others.
async fn has_tags(gateway: &Gateway, alias: &str) -> Result<bool> {
    match TemplateName::parse(alias) {
        Ok(TemplateName { name, tag: None }) => Ok(!tags::all(gateway, &name).await?.is_empty()),
        _ => Ok(false),
    }
}

#[derive(Debug, Deserialize)]
pub(super) struct Updated {
    public: Option<bool>,
}

/// All holders of a key see all templates, and others see none.
pub(super) async fn update(
    State(gateway): State<Gateway>,
    Id(id): Id,
    Body(asked): Body<Updated>,
) -> Result<Response> {
    if asked.public == Some(true) {
        return Err(Fault::not_implemented("a public template"));
    }
    let name = TemplateName::parse(&id).map_err(|_| unknown(&id))?.name;
    let tags = tags::all(&gateway, &name).await?;
    if tags.is_empty() {
        return Err(unknown(&id));
    }
    let shown = one(&gateway, name, tags)?;
    Ok(axum::Json(json!({ "names": shown.names })).into_response())
}

#[derive(Debug, Deserialize)]
pub(super) struct Alias {
    alias: Option<String>,
}

/// Gives a template one more name, as CubeSandbox's client asks for it.
pub(super) async fn set_alias(
    State(gateway): State<Gateway>,
    Id(id): Id,
    Body(asked): Body<Alias>,
) -> Result<Response> {
    let host = gateway.host();
    let source = TemplateName::parse(&id).map_err(|_| unknown(&id))?;
    let alias = asked
        .alias
        .ok_or_else(|| Fault::bad_request("alias is missing"))?;
    let target = TemplateName::parse(&alias)?;
    let reserved = ["tpl-", "snap-"]
        .iter()
        .any(|prefix| alias.starts_with(prefix));
    if reserved || target.tag.is_some() {
        let message = format!("invalid alias {alias:?}: no tag, and neither tpl- nor snap-");
        return Err(Fault::bad_request(message));
    }
    let stored = source.stored();
    let image = template::image(host, &stored).ok_or_else(|| unknown(&id))?;
    host.tag_image(&image.digest, &target.stored()).await?;
    if let Some(record) = tag_of(host, &stored, &image.digest)? {
        let record = TagRecord {
            tag: naming::DEFAULT.to_owned(),
            ..record
        };
        records::set_tags(host, &target.name, vec![record])?;
    }
    let body = json!({ "templateID": source.name, "alias": target.name });
    Ok(axum::Json(body).into_response())
}

/// Removes a snapshot, a tag, or a template with all its tags. Sandboxes that were made from it
/// stay.
pub(super) async fn remove(State(gateway): State<Gateway>, Id(id): Id) -> Result<StatusCode> {
    let host = gateway.host();
    let stored = template::stored_name(gateway.config(), &id);
    if let Ok(parsed) = TemplateName::parse(&id)
        && remove_template(&gateway, &parsed).await?
    {
        return Ok(StatusCode::NO_CONTENT);
    }
    let removed = match template::image(host, &stored) {
        Some(_) => host.remove_image(&stored).await.map(drop),
        None => {
            snapshots::forget(&gateway, &stored).await?;
            host.remove_snapshot(&stored).await
        }
    };
    match removed {
        Ok(()) => Ok(StatusCode::NO_CONTENT),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Invalid) => {
            Err(unknown(&id))
        }
        Err(error) => Err(error.into()),
    }
}

/// Returns whether there was one.
async fn remove_template(gateway: &Gateway, wanted: &TemplateName) -> Result<bool> {
    let host = gateway.host();
    let name = template::stored_name(gateway.config(), &wanted.name);
    let is_meant = |stored: &String| wanted.tag.is_none() || *stored == wanted.stored();
    let tags = tags::all(gateway, &name).await?;
    let mut any = false;
    for (stored, _) in tags.iter().filter(|(stored, _)| is_meant(stored)) {
        host.remove_image(stored).await?;
        any = true;
    }
    let is_gone = |tag: &str| wanted.tag.is_none() || tag == wanted.tag();
    records::forget_tags(host, &name, is_gone)?;
    Ok(any)
}
