//! Builds of templates on the control plane: requested, given their files, started and followed.

use axum::extract::{FromRequestParts, State};
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use hyper::{HeaderMap, StatusCode};
use sandtree::{ExecDefaults, RegistryAccess, Scope, Shelf};
use serde::Deserialize;
use serde_json::{Value, json};

use super::building::Building;
use super::{Asked, Body, Client, Id, uploads};
use crate::auth;
use crate::clock::now_unix_ms;
use crate::digits;
use crate::error::{Fault, Result};
use crate::gateway::{Gateway, New};
use crate::naming::{DEFAULT, TemplateName};
use crate::plan::{self, Base, Plan, Wanted};
use crate::records::{BuildRecord, BuildStatus, Level, LogEntry, LogRecord, Reason, Shape, tag_of};
use crate::template;

/// Records of builds. The oldest go first, and those that are never started after a day.
const BUILDS_MAX: usize = 500;
const WAITING_MS: u64 = 24 * 3600 * 1000;
const TAGS_MAX: usize = 32;
const CPUS_MAX: u32 = 64;
const MEMORY_MIB: std::ops::RangeInclusive<u64> = 128..=(1 << 20);
/// The entries of one answer.
const ENTRIES_MAX: usize = 100;
/// The memory of the machine that does the steps.
const MACHINE_BYTES: u64 = 1 << 30;
/// Images that the program makes itself, from which others begin.
const BUILT_IN: [&str; 2] = ["debian", "tiny"];

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct NewBuild {
    name: Option<String>,
    /// The name, for clients of earlier versions.
    alias: Option<String>,
    #[serde(default)]
    tags: Vec<String>,
    cpu_count: Option<u32>,
    #[serde(rename = "memoryMB")]
    memory_mib: Option<u64>,
    min_free_disk_mb: Option<u64>,
}

/// Begins a build: the client sends its files next, and starts it then.
pub(super) async fn request(
    State(gateway): State<Gateway>,
    Body(new): Body<NewBuild>,
) -> Result<Response> {
    let name = new.name.as_deref().or(new.alias.as_deref());
    let name = name.ok_or_else(|| Fault::bad_request("name is missing"))?;
    let name = TemplateName::parse(name)?;
    let record = BuildRecord {
        free_mib: new.min_free_disk_mb,
        ..waiting(
            &name.name,
            tags(&name, &new.tags)?,
            shape(new.cpu_count, new.memory_mib)?,
        )?
    };
    let id = add(&gateway, &record)?;
    let names: Vec<String> = record
        .tags
        .iter()
        .map(|tag| format!("{}:{tag}", record.template))
        .collect();
    let body = json!({
        "templateID": record.template,
        "buildID": id,
        "public": false,
        "names": names,
        "tags": record.tags,
        "aliases": [record.template],
    });
    Ok((StatusCode::ACCEPTED, axum::Json(body)).into_response())
}

/// A build that was not started yet.
pub(super) fn waiting(template: &str, tags: Vec<String>, shape: Shape) -> Result<BuildRecord> {
    if BUILT_IN.contains(&template) {
        let message =
            format!("the name \"{template}\" is that of a built-in image: choose another");
        return Err(Fault::conflict(message));
    }
    Ok(BuildRecord {
        template: template.to_owned(),
        tags,
        shape,
        free_mib: None,
        created_at_unix_ms: now_unix_ms(),
        finished_at_unix_ms: None,
        status: BuildStatus::Waiting,
        work: None,
        reason: None,
        image: None,
    })
}

/// The tags of a build: that of its name and the others, or the default one.
fn tags(name: &TemplateName, others: &[String]) -> Result<Vec<String>> {
    if others.len() > TAGS_MAX {
        return Err(Fault::bad_request("a build has at most 32 tags"));
    }
    let mut tags: Vec<String> = name.tag.clone().into_iter().collect();
    for tag in others {
        let with_tag = TemplateName::parse(&format!("{}:{tag}", name.name))?;
        let tag = with_tag.tag().to_owned();
        if !tags.contains(&tag) {
            tags.push(tag);
        }
    }
    if tags.is_empty() {
        tags.push(DEFAULT.to_owned());
    }
    Ok(tags)
}

pub(super) fn shape(cpus: Option<u32>, memory_mib: Option<u64>) -> Result<Shape> {
    if cpus.is_some_and(|cpus| !(1..=CPUS_MAX).contains(&cpus)) {
        return Err(Fault::bad_request("cpuCount is a number from 1 to 64"));
    }
    if memory_mib.is_some_and(|mib| !MEMORY_MIB.contains(&mib)) {
        return Err(Fault::bad_request(
            "memoryMB is a number from 128 to 1048576",
        ));
    }
    Ok(Shape {
        cpus,
        memory_bytes: memory_mib.map(|mib| mib << 20),
    })
}

/// Records a new build. Returns its id.
pub(super) fn add(gateway: &Gateway, record: &BuildRecord) -> Result<String> {
    prune(gateway)?;
    let id = crate::records::derived_build(&digits::random::<16>());
    let host = gateway.host();
    host.put_document(Shelf::Builds, &id, record.clone())?;
    Ok(id)
}

/// Forgets builds that are not needed any more.
fn prune(gateway: &Gateway) -> Result<()> {
    let host = gateway.host();
    let now_ms = now_unix_ms();
    let mut ended = Vec::new();
    for id in host.documents(Shelf::Builds)? {
        let Some(record) = host.document::<BuildRecord>(Shelf::Builds, &id)? else {
            continue;
        };
        let age_ms = now_ms.saturating_sub(record.created_at_unix_ms);
        match record.status {
            BuildStatus::Waiting if age_ms > WAITING_MS => {
                host.remove_document(Shelf::Builds, &id)?;
            }
            BuildStatus::Waiting => ended.push((record.created_at_unix_ms, id)),
            _ if gateway.builds().log(&id).is_some() => {}
            _ => ended.push((record.created_at_unix_ms, id)),
        }
    }
    ended.sort();
    let excess = (ended.len() + 1).saturating_sub(BUILDS_MAX);
    for (_, id) in ended.into_iter().take(excess) {
        host.remove_document(Shelf::Builds, &id)?;
        host.remove_document(Shelf::Logs, &id)?;
    }
    Ok(())
}

/// The template and the second name of a path.
#[derive(Debug)]
pub(super) struct Two(pub String, pub String);

impl<S: Send + Sync> FromRequestParts<S> for Two {
    type Rejection = Fault;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self> {
        let path = axum::extract::Path::<(String, String)>::from_request_parts(parts, state).await;
        path.map(|axum::extract::Path((one, other))| Self(one, other))
            .map_err(|error| Fault::bad_request(error.body_text()))
    }
}

/// A build of a template.
pub(super) fn find(gateway: &Gateway, template: &str, id: &str) -> Result<BuildRecord> {
    let name = TemplateName::parse(template)?.name;
    let found: Option<BuildRecord> = gateway.host().document(Shelf::Builds, id)?;
    found
        .filter(|record| record.template == name)
        .ok_or_else(|| Fault::not_found(format!("template \"{name}\" has no build \"{id}\"")))
}

/// Where a client sends the files of a COPY step, if they are not here.
pub(super) async fn files(
    State(gateway): State<Gateway>,
    Two(template, hash): Two,
    headers: HeaderMap,
) -> Result<Response> {
    let name = TemplateName::parse(&template)?.name;
    let key = uploads::key(&name, &hash)?;
    gateway.host().sweep_archives()?;
    let is_present = gateway.host().archive(&key)?.is_some();
    let url = uploads::address(&gateway, &headers, &name, &hash)?;
    let body = json!({ "present": is_present, "url": url, "headers": {} });
    Ok((StatusCode::CREATED, axum::Json(body)).into_response())
}

/// Starts a build.
pub(super) async fn start(
    State(gateway): State<Gateway>,
    Two(template, id): Two,
    client: Client,
    Body(wanted): Body<Wanted>,
) -> Result<Response> {
    let record = find(&gateway, &template, &id)?;
    begin(&gateway, &client, (id, record), wanted).await?;
    Ok((StatusCode::ACCEPTED, axum::Json(json!({}))).into_response())
}

pub(super) async fn begin(
    gateway: &Gateway,
    client: &Client,
    (id, record): (String, BuildRecord),
    wanted: Wanted,
) -> Result<()> {
    if record.status != BuildStatus::Waiting {
        return Err(Fault::conflict("the build has been started"));
    }
    let needed = New {
        sandboxes: 1,
        memory_bytes: MACHINE_BYTES,
    };
    let _admission = gateway.admit(&client.key, needed).await?;
    let access = registry_access(wanted.from_image_registry.as_ref())?;
    let base = base(gateway, client, &wanted).await?;
    let plan = planned(gateway, &record, wanted, base)?;
    let building = Building::new(gateway, id, record)?;
    building.start(plan, access)
}

fn planned(gateway: &Gateway, record: &BuildRecord, wanted: Wanted, base: Base) -> Result<Plan> {
    let archive = |hash: &str| {
        let key = uploads::key(&record.template, hash)?;
        let found = gateway.host().archive(&key)?;
        found.ok_or_else(|| {
            let message = "its files were not uploaded, or more than a day ago: build again";
            Fault::bad_request(message)
        })
    };
    plan::plan(wanted, base, record.free_mib, archive)
}

/// What a template begins from: another one, an image of the store, or one of a registry.
async fn base(gateway: &Gateway, client: &Client, wanted: &Wanted) -> Result<Base> {
    let host = gateway.host();
    match (&wanted.from_template, &wanted.from_image) {
        (Some(template), _) => of_template(gateway, template).await,
        (None, Some(name)) => match template::image_for(host, name) {
            Some(stored) => {
                let image = host.ensure_image(&stored, |_| ()).await?;
                let has_user = stored == template::DEBIAN;
                let defaults = ExecDefaults {
                    user: None,
                    ..image.defaults.clone()
                };
                Ok(Base {
                    has_user,
                    ..from_image(stored, image.bytes, &defaults)
                })
            }
            None if names_registry(name) => {
                // The server connects to any address, with the credentials of its user.
                auth::need(&client.key, Scope::Registries, "an image of a registry")?;
                Ok(Base {
                    from: name.clone(),
                    ..Base::default()
                })
            }
            None => {
                let message = format!(
                    "image \"{name}\" is not in the store, and the name has no registry: use \
                     HOST/NAME:TAG, or bring it by `sandtree pull` or `sandtree image import`"
                );
                Err(Fault::bad_request(message))
            }
        },
        (None, None) => Err(Fault::bad_request("fromImage or fromTemplate is missing")),
    }
}

/// A template that was built before continues with its user. Other images have a user for their own
/// commands, and that is not the one of templates.
async fn of_template(gateway: &Gateway, template: &str) -> Result<Base> {
    let host = gateway.host();
    let stored = template::origin(host, gateway.config(), template).await;
    // The library takes these for paths of the host.
    if stored.starts_with(['.', '/']) {
        return Err(template::unknown(template));
    }
    let Some(image) = template::image(host, &stored) else {
        let found = host.inspect_snapshot(&stored).await;
        let missing = |_| template::unknown(template);
        let bytes = found.map_err(missing)?.manifest.disk.bytes;
        return Ok(Base {
            has_user: true,
            ..from_image(stored, bytes, &ExecDefaults::default())
        });
    };
    let tag = tag_of(host, &stored, &image.digest)?;
    let has_user = tag.is_some() || stored == template::DEBIAN;
    let defaults = ExecDefaults {
        user: tag.and_then(|tag| tag.user),
        ..image.defaults
    };
    Ok(Base {
        has_user,
        ..from_image(stored, image.bytes, &defaults)
    })
}

/// Whether the name of an image begins with a host, as those of registries do.
fn names_registry(name: &str) -> bool {
    let host = name.split_once('/').map(|(host, _)| host);
    host.is_some_and(|host| {
        host == "localhost" || host.trim_start_matches('.').contains(['.', ':'])
    })
}

fn from_image(from: String, bytes: u64, defaults: &ExecDefaults) -> Base {
    Base {
        from,
        bytes,
        user: defaults.user.clone(),
        workdir: defaults.workdir.clone(),
        env: defaults.env.clone(),
        ..Base::default()
    }
}

/// How a registry is asked for an image.
fn registry_access(registry: Option<&Value>) -> Result<RegistryAccess> {
    let Some(registry) = registry.filter(|registry| !registry.is_null()) else {
        return Ok(RegistryAccess::default());
    };
    if registry["type"] != "registry" {
        return Err(Fault::not_implemented("a registry of AWS or GCP"));
    }
    let text = |field: &str| registry[field].as_str().map(str::to_owned);
    Ok(RegistryAccess {
        username: text("username"),
        password: text("password"),
        ..RegistryAccess::default()
    })
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct StatusQuery {
    logs_offset: Option<usize>,
    limit: Option<usize>,
    level: Option<String>,
}

pub(super) async fn status(
    State(gateway): State<Gateway>,
    Two(template, id): Two,
    Asked(query): Asked<StatusQuery>,
) -> Result<Response> {
    let record = find(&gateway, &template, &id)?;
    let (status, reason) = outcome(&gateway, &id, &record)?;
    let entries = entries(&gateway, &id, &query)?;
    let logs: Vec<&str> = entries.iter().map(|entry| entry.message.as_str()).collect();
    let mut body = json!({
        "templateID": record.template,
        "buildID": id,
        "status": status.word(),
        "logs": logs,
        "logEntries": entries.iter().map(shown).collect::<Vec<_>>(),
        "progress": if status == BuildStatus::Ready { 100 } else { 0 },
        "message": reason.as_ref().map(|reason| reason.message.clone()).unwrap_or_default(),
    });
    if let Some(reason) = reason {
        body["reason"] = json!({
            "message": reason.message,
            "step": reason.step,
            "logEntries": [],
        });
    }
    Ok(axum::Json(body).into_response())
}

pub(super) async fn logs(
    State(gateway): State<Gateway>,
    Two(template, id): Two,
    Asked(query): Asked<StatusQuery>,
) -> Result<Response> {
    find(&gateway, &template, &id)?;
    let entries = entries(&gateway, &id, &query)?;
    let entries: Vec<Value> = entries.iter().map(shown).collect();
    Ok(axum::Json(json!({ "logs": entries })).into_response())
}

/// How a build stands. One whose server is gone has failed.
pub(super) fn outcome(
    gateway: &Gateway,
    id: &str,
    record: &BuildRecord,
) -> Result<(BuildStatus, Option<Reason>)> {
    let is_at_work = match &record.work {
        Some(work) => gateway.host().is_at_work(work)?,
        None => false,
    };
    // It may have ended after its record was read.
    let newer: Option<BuildRecord> = gateway.host().document(Shelf::Builds, id)?;
    let record = newer.as_ref().unwrap_or(record);
    if record.status == BuildStatus::Building && !is_at_work {
        let reason = Reason {
            message: "the server ended during the build: build it again".to_owned(),
            step: "base".to_owned(),
        };
        return Ok((BuildStatus::Error, Some(reason)));
    }
    Ok((record.status, record.reason.clone()))
}

/// A page of what a build wrote.
fn entries(gateway: &Gateway, id: &str, query: &StatusQuery) -> Result<Vec<LogEntry>> {
    let all = match gateway.builds().log(id) {
        Some(entries) => entries,
        None => {
            let log: Option<LogRecord> = gateway.host().document(Shelf::Logs, id)?;
            log.unwrap_or_default().entries
        }
    };
    let is_wanted =
        |entry: &LogEntry| query.level.as_deref() != Some("error") || entry.level == Level::Error;
    let limit = query.limit.unwrap_or(ENTRIES_MAX).min(ENTRIES_MAX);
    let page = all.into_iter().filter(is_wanted);
    Ok(page
        .skip(query.logs_offset.unwrap_or(0))
        .take(limit)
        .collect())
}

fn shown(entry: &LogEntry) -> Value {
    let level = match entry.level {
        Level::Info => "info",
        Level::Error => "error",
    };
    let mut shown = json!({
        "timestamp": crate::clock::rfc3339(entry.at_unix_ms),
        "level": level,
        "message": entry.message,
    });
    if let Some(step) = &entry.step {
        shown["step"] = json!(step);
    }
    shown
}

/// A build of an image by its reference, as CubeSandbox's client asks for it.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct CubeBuild {
    image: Option<String>,
    name: Option<String>,
    /// Thousandths of a processor.
    cpu: Option<u32>,
    /// MiB.
    memory: Option<u64>,
    #[serde(default)]
    env: Vec<String>,
    registry_username: Option<String>,
    registry_password: Option<String>,
    /// Every port of a guest is reachable.
    #[serde(rename = "exposedPorts")]
    _exposed_ports: Option<Value>,
    #[serde(flatten)]
    others: serde_json::Map<String, Value>,
}

/// Makes a template from an image, as CubeSandbox's client asks for it.
pub(super) async fn cube_build(
    State(gateway): State<Gateway>,
    client: Client,
    Body(new): Body<CubeBuild>,
) -> Result<Response> {
    let mut others = new.others.iter().filter(|(_, value)| !value.is_null());
    if let Some((name, _)) = others.next() {
        let what = format!("\"{name}\" of a template");
        return Err(Fault::not_implemented(&what));
    }
    let image = new
        .image
        .ok_or_else(|| Fault::bad_request("image is missing"))?;
    let name = match &new.name {
        Some(name) => TemplateName::parse(name)?,
        None => TemplateName::parse(&format!("tpl-{}", digits::random::<12>()))?,
    };
    let cpus = new.cpu.map(|milli| milli.div_ceil(1000));
    let record = BuildRecord {
        image: Some(crate::records::ImageSource {
            image,
            env: new.env,
        }),
        ..waiting(&name.name, tags(&name, &[])?, shape(cpus, new.memory)?)?
    };
    let registry = new.registry_username.map(|username| {
        json!({ "type": "registry", "username": username, "password": new.registry_password })
    });
    cube_begin(&gateway, &client, record, registry).await
}

/// Makes a template again from the image that it was made from.
pub(super) async fn cube_rebuild(
    State(gateway): State<Gateway>,
    Id(id): Id,
    client: Client,
) -> Result<Response> {
    let name = TemplateName::parse(&id)?.name;
    let host = gateway.host();
    let mut newest: Option<BuildRecord> = None;
    for id in host.documents(Shelf::Builds)? {
        let record: Option<BuildRecord> = host.document(Shelf::Builds, &id)?;
        let is_newer = |record: &BuildRecord| {
            let before = newest
                .as_ref()
                .map_or(0, |newest| newest.created_at_unix_ms);
            record.created_at_unix_ms >= before
        };
        let of_image = record.filter(|record| record.template == name && record.image.is_some());
        newest = of_image.filter(is_newer).or(newest);
    }
    let Some(before) = newest else {
        let message = format!("template \"{name}\" not found among those made from an image");
        return Err(Fault::not_found(message));
    };
    let record = BuildRecord {
        image: before.image,
        ..waiting(&name, before.tags, before.shape)?
    };
    cube_begin(&gateway, &client, record, None).await
}

async fn cube_begin(
    gateway: &Gateway,
    client: &Client,
    record: BuildRecord,
    registry: Option<Value>,
) -> Result<Response> {
    let source = record.image.clone();
    let source = source.ok_or_else(|| Fault::bad_request("image is missing"))?;
    let mut variables = Vec::new();
    for variable in &source.env {
        let (name, value) = variable
            .split_once('=')
            .ok_or_else(|| Fault::bad_request(format!("invalid variable {variable:?}")))?;
        variables.extend([name.to_owned(), value.to_owned()]);
    }
    let wanted = Wanted {
        from_image: Some(source.image),
        from_image_registry: registry,
        steps: vec![plan::Step {
            kind: "ENV".to_owned(),
            args: variables,
            files_hash: None,
            force: None,
        }],
        ..Wanted::default()
    };
    let template = record.template.clone();
    let id = add(gateway, &record)?;
    begin(gateway, client, (id.clone(), record), wanted).await?;
    let body = json!({
        "jobID": id,
        "buildID": id,
        "templateID": template,
        "status": "building",
        "phase": "building",
        "progress": 0,
        "errorMessage": "",
    });
    Ok((StatusCode::ACCEPTED, axum::Json(body)).into_response())
}
