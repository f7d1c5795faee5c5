//! Sandboxes on the control plane.

use std::time::Duration;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use hyper::StatusCode;
use sandtree::{ForkMounts, ForkSpec, Network, Phase, Sandbox, SandboxInfo};
use serde::Deserialize;
use serde_json::json;

use super::query::{self, Order, PageQuery, Place};
use super::shapes::{self, Created, Detailed, FOREVER_MS, Listed, NetworkRules, state};
use super::{Asked, Body, Client, Id};
use crate::clock::now_unix_ms;
use crate::error::{Fault, Result};
use crate::gateway::{Admission, Gateway, New, is_shown, wake};
use crate::labels::Labels;
use crate::observe::{self, Operation, Trail};
use crate::template;

/// The longest lifetime that a client can ask for: that of any expiry.
const TIMEOUT_MAX: i64 = (FOREVER_MS / 1000) as i64;
/// E2B's value for a sandbox that does not expire, from CubeSandbox.
const NEVER: i64 = -1;
const FORKS_MAX: usize = 20;
/// How long a healthy guest may take to answer.
const HEALTH_WITHIN: Duration = Duration::from_secs(10);

/// How long a sandbox runs. `None`: it does not expire.
pub(super) fn timeout(seconds: Option<i64>, gateway: &Gateway) -> Result<Option<Duration>> {
    match seconds {
        None => Ok(Some(gateway.config().timeout)),
        Some(NEVER) => Ok(None),
        Some(seconds @ 0..=TIMEOUT_MAX) => Ok(Some(Duration::from_secs(seconds.unsigned_abs()))),
        Some(other) => Err(Fault::bad_request(format!(
            "invalid timeout {other}: use a number of seconds, or -1 for none"
        ))),
    }
}

pub(super) fn created(gateway: &Gateway, client: &Client, info: &SandboxInfo) -> Result<Created> {
    let access = gateway.host().access()?;
    Ok(Created::new(info, &access, client.domain.clone()))
}

pub(super) async fn get(
    State(gateway): State<Gateway>,
    Id(id): Id,
    client: Client,
) -> Result<Response> {
    let (_, info) = gateway.sandbox(&id)?;
    let access = gateway.host().access()?;
    let detailed = Detailed::new(&info, &access, client.domain);
    Ok(axum::Json(detailed).into_response())
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ListQuery {
    metadata: Option<String>,
    /// One or several, separated by commas.
    state: Option<String>,
    limit: Option<usize>,
    next_token: Option<String>,
    /// By the time of creation.
    #[serde(default)]
    order: Order,
    /// The end of the time before which sandboxes are left out.
    started_after: Option<String>,
    /// A template by its id or by a name.
    template: Option<String>,
}

/// The running sandboxes, newest first.
pub(super) async fn list_running(
    State(gateway): State<Gateway>,
    Asked(query): Asked<ListQuery>,
) -> Result<Response> {
    let state = Some(query.state.unwrap_or_else(|| "running".to_owned()));
    let found = listed(&gateway, &ListQuery { state, ..query })?;
    let found: Vec<Listed> = found.into_iter().map(|(_, listed)| listed).collect();
    Ok(axum::Json(found).into_response())
}

/// A page of the sandboxes, newest first.
pub(super) async fn list(
    State(gateway): State<Gateway>,
    Asked(query): Asked<ListQuery>,
) -> Result<Response> {
    let found = listed(&gateway, &query)?;
    let page = PageQuery {
        limit: query.limit,
        next_token: query.next_token,
    };
    page.page(found, query.order)
}

/// A sandbox that cannot be read is left out: the others must still be found.
fn listed(gateway: &Gateway, query: &ListQuery) -> Result<Vec<(Place, Listed)>> {
    let after_ms = query.started_after.as_deref().map(query::unix_ms);
    let after_ms = after_ms.transpose()?.unwrap_or(0);
    let template = query.template.as_deref();
    let template = template.map(|name| template::stored_name(gateway.config(), name));
    let wanted = query.metadata.as_deref().map(query::metadata);
    let wanted = wanted.transpose()?.unwrap_or_default();
    let states: Option<Vec<&str>> = query.state.as_deref().map(|text| text.split(',').collect());
    let (mut all, broken) = gateway.host().list()?;
    for error in broken {
        tracing::warn!(error = %error.report().one_line(), "a sandbox cannot be listed");
    }
    if query.order == Order::Desc {
        all.reverse();
    }
    let has_state = |info: &SandboxInfo| {
        let state = state(info.state);
        states.as_ref().is_none_or(|states| states.contains(&state))
    };
    let has_metadata = |info: &SandboxInfo| {
        let has = Labels::of(info).metadata;
        wanted
            .iter()
            .all(|(key, value)| has.get(key) == Some(value))
    };
    let is_of_template = |info: &SandboxInfo| {
        let of = shapes::template(info, &Labels::of(info));
        let of = template::stored_name(gateway.config(), &of);
        template.as_ref().is_none_or(|wanted| of == *wanted)
    };
    let shown = all.iter().filter(|info| is_shown(info.state));
    let found = shown.filter(|info| {
        info.created_at_unix_ms >= after_ms
            && has_state(info)
            && has_metadata(info)
            && is_of_template(info)
    });
    let placed = found.map(|info| {
        let place = Place {
            at_unix_ms: info.created_at_unix_ms,
            id: info.id.clone(),
        };
        (place, Listed::new(info))
    });
    Ok(placed.collect())
}

pub(super) async fn kill(State(gateway): State<Gateway>, Id(id): Id) -> Result<StatusCode> {
    let (sandbox, _) = gateway.sandbox(&id)?;
    sandbox.remove().await?;
    Ok(StatusCode::NO_CONTENT)
}

#[derive(Debug, Default, Deserialize)]
pub(super) struct TimeoutBody {
    timeout: Option<i64>,
}

#[derive(Debug, Default, Deserialize)]
pub(super) struct JoinBody {
    timeout: Option<i64>,
    /// Whether a paused sandbox continues with its memory, as without this, or boots.
    memory: Option<bool>,
}

/// Joins a sandbox: resumes one that is paused, and makes one that runs expire later, never
/// earlier.
pub(super) async fn connect(
    State(gateway): State<Gateway>,
    Id(id): Id,
    client: Client,
    Body(asked): Body<JoinBody>,
) -> Result<Response> {
    let found = gateway.sandbox(&id)?;
    let joined = join(&gateway, &client, found, &asked).await?;
    Ok(axum::Json(joined).into_response())
}

/// As `connect`, for clients of earlier versions.
pub(super) async fn resume(
    State(gateway): State<Gateway>,
    Id(id): Id,
    client: Client,
    Body(asked): Body<JoinBody>,
) -> Result<Response> {
    let found = gateway.sandbox(&id)?;
    if found.1.state == Phase::Running {
        return Err(Fault::conflict(format!("sandbox \"{id}\" is running")));
    }
    let joined = join(&gateway, &client, found, &asked).await?;
    Ok((StatusCode::CREATED, axum::Json(joined)).into_response())
}

/// Makes a sandbox run, for at least so many seconds.
async fn join(
    gateway: &Gateway,
    client: &Client,
    (sandbox, info): (Sandbox, SandboxInfo),
    asked: &JoinBody,
) -> Result<Created> {
    let seconds = asked.timeout;
    check_timeout(gateway, seconds)?;
    if Was::of(info.state) == Was::Running {
        let extended = extend(gateway, &sandbox, seconds, Was::Running).await;
        let now = sandbox.info()?;
        // Otherwise it was being paused.
        if Was::of(now.state) == Was::Running {
            extended?;
            return created(gateway, client, &now);
        }
    }
    let info = sandbox.info()?;
    let _admission = admit_again(gateway, client, &info).await?;
    wake(&sandbox, info.state).await?;
    if asked.memory == Some(false) && info.state == Phase::Paused {
        // Its guest writes its files out before it boots anew.
        sandbox.stop(None).await?;
        sandbox.start(None).await?;
    }
    extend(gateway, &sandbox, seconds, Was::AtRest).await?;
    created(gateway, client, &sandbox.info()?)
}

/// Refuses a lifetime before anything is done for it.
fn check_timeout(gateway: &Gateway, seconds: Option<i64>) -> Result<()> {
    if seconds == Some(0) {
        return Err(Fault::bad_request("invalid timeout 0"));
    }
    timeout(seconds, gateway).map(drop)
}

/// A sandbox that continues counts as one more that runs.
async fn admit_again(gateway: &Gateway, client: &Client, info: &SandboxInfo) -> Result<Admission> {
    let needed = New {
        sandboxes: 1,
        memory_bytes: info.memory_bytes,
    };
    gateway.admit(&client.key, needed).await
}

/// What a sandbox was doing when a client asked for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Was {
    Running,
    AtRest,
}

impl Was {
    fn of(phase: Phase) -> Self {
        match phase {
            Phase::Running => Self::Running,
            _ => Self::AtRest,
        }
    }
}

/// Makes a sandbox expire later, never earlier. One that was at rest gets a new lifetime.
async fn extend(
    gateway: &Gateway,
    sandbox: &Sandbox,
    seconds: Option<i64>,
    was: Was,
) -> Result<()> {
    if seconds.is_none() && was == Was::Running {
        return Ok(());
    }
    let wanted = timeout(seconds, gateway)?;
    let expires_at = sandbox.info()?.expires_at_unix_ms;
    let is_later = match (wanted, expires_at) {
        (None, _) => true,
        // It does not expire.
        (Some(_), None) => false,
        (Some(wanted), Some(at)) => now_unix_ms() + wanted.as_millis() as u64 > at,
    };
    if is_later || was == Was::AtRest {
        sandbox.expire(wanted).await?;
    }
    Ok(())
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct PauseBody {
    memory: Option<bool>,
    /// Whether a guest that does not answer is not paused.
    require_healthy_guest: Option<bool>,
}

pub(super) async fn pause(
    State(gateway): State<Gateway>,
    Id(id): Id,
    Body(asked): Body<PauseBody>,
) -> Result<StatusCode> {
    let (sandbox, info) = gateway.sandbox(&id)?;
    if info.state != Phase::Running {
        return Err(Fault::conflict(format!(
            "sandbox \"{id}\" is already paused"
        )));
    }
    if asked.require_healthy_guest == Some(true) {
        check_health(&sandbox).await?;
    }
    match asked.memory {
        Some(false) => sandbox.stop(None).await?,
        _ => {
            sandbox.pause().await?;
        }
    }
    Ok(StatusCode::NO_CONTENT)
}

/// Refuses a sandbox whose guest does not answer.
async fn check_health(sandbox: &Sandbox) -> Result<()> {
    let answer = async { sandbox.guest().await?.metrics().await };
    match tokio::time::timeout(HEALTH_WITHIN, answer).await {
        Ok(Ok(_)) => Ok(()),
        _ => {
            let id = sandbox.id();
            let message = format!("sandbox \"{id}\" does not answer, and was not paused");
            Err(Fault::conflict(message))
        }
    }
}

pub(super) async fn set_timeout(
    State(gateway): State<Gateway>,
    Id(id): Id,
    Body(asked): Body<TimeoutBody>,
) -> Result<StatusCode> {
    let Some(seconds) = asked.timeout else {
        return Err(Fault::bad_request("timeout is missing"));
    };
    let after = timeout(Some(seconds), &gateway)?;
    let (sandbox, info) = gateway.sandbox(&id)?;
    if info.state != Phase::Running {
        return Err(Fault::not_found(format!("sandbox \"{id}\" is not running")));
    }
    sandbox.expire(after).await?;
    Ok(StatusCode::NO_CONTENT)
}

#[derive(Debug, Default, Deserialize)]
pub(super) struct RefreshBody {
    duration: Option<i64>,
}

/// Makes a sandbox expire later, never earlier.
pub(super) async fn refresh(
    State(gateway): State<Gateway>,
    Id(id): Id,
    Body(asked): Body<RefreshBody>,
) -> Result<StatusCode> {
    let (sandbox, _) = gateway.sandbox(&id)?;
    let seconds = asked.duration.unwrap_or(60).clamp(1, 3600);
    extend(&gateway, &sandbox, Some(seconds), Was::Running).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// The end of the guest's console.
pub(super) async fn logs(State(gateway): State<Gateway>, Id(id): Id) -> Result<Response> {
    const LINES: usize = 1000;
    const BYTES: usize = 256 << 10;
    let (_, info) = gateway.sandbox(&id)?;
    let [_, newest] = gateway.host().console(&info.id)?;
    let text = match tokio::fs::read(&newest).await {
        Ok(bytes) => bytes[bytes.len().saturating_sub(BYTES)..].to_vec(),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
        Err(error) => return Err(sandtree::Error::io("read", newest, error).into()),
    };
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().collect();
    let lines = &lines[lines.len().saturating_sub(LINES)..];
    let entry = |line: &&str| {
        json!({
            "timestamp": info.created_at,
            "line": line,
            "message": line,
            "level": "info",
            "fields": {},
        })
    };
    let entries: Vec<_> = lines.iter().map(entry).collect();
    Ok(axum::Json(json!({ "logs": entries, "logEntries": entries })).into_response())
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct NetworkBody {
    #[serde(rename = "allow_internet_access", alias = "allowInternetAccess")]
    internet: Option<bool>,
    #[serde(flatten)]
    rules: NetworkRules,
}

/// Replaces the rules for outgoing traffic, and whether ports need a token. Neither can change, so
/// only what is so already succeeds: a client must not take a sandbox for closed that is open.
pub(super) async fn network(
    State(gateway): State<Gateway>,
    Id(id): Id,
    Body(asked): Body<NetworkBody>,
) -> Result<StatusCode> {
    let (_, info) = gateway.sandbox(&id)?;
    let NetworkBody { internet, rules } = asked;
    rules.check()?;
    let wanted = shapes::network(internet, Some(&rules)).unwrap_or(Network::Full);
    let is_public = rules.allow_public_traffic;
    if (wanted == Network::Full) != (info.network == Network::Full) {
        return Err(Fault::not_implemented(
            "changing the network of a sandbox that exists",
        ));
    }
    if is_public.is_some_and(|is_public| is_public != Labels::of(&info).public_traffic) {
        return Err(Fault::not_implemented(
            "changing who reaches the ports of a sandbox that exists",
        ));
    }
    Ok(StatusCode::NO_CONTENT)
}

#[derive(Debug, Default, Deserialize)]
pub(super) struct ForkBody {
    count: Option<usize>,
    timeout: Option<i64>,
}

/// Makes running copies of a sandbox: all of them, or none.
pub(super) async fn fork(
    State(gateway): State<Gateway>,
    Id(id): Id,
    client: Client,
    Body(asked): Body<ForkBody>,
) -> Result<Response> {
    let count = asked.count.unwrap_or(1);
    if !(1..=FORKS_MAX).contains(&count) {
        return Err(Fault::bad_request("count is a number from 1 to 20"));
    }
    let after = timeout(asked.timeout, &gateway)?;
    let (sandbox, info) = gateway.sandbox(&id)?;
    let needed = New {
        sandboxes: count as u32,
        memory_bytes: info.memory_bytes.saturating_mul(count as u64),
    };
    let _admission = gateway.admit(&client.key, needed).await?;
    // A client that leaves in between must not leave copies without an end.
    let forking = observe::spawn(fork_for(sandbox, count, after));
    let copies = forking
        .await
        .map_err(|_| Fault::internal("the fork failed"))??;
    let mut answers = Vec::new();
    for copy in copies {
        let created = created(&gateway, &client, &copy.info()?)?;
        answers.push(json!({ "sandbox": created }));
    }
    Ok((StatusCode::CREATED, axum::Json(answers)).into_response())
}

/// Copies that expire after a time.
async fn fork_for(sandbox: Sandbox, count: usize, after: Option<Duration>) -> Result<Vec<Sandbox>> {
    let has_volumes = !Labels::of(&sandbox.info()?).volumes.is_empty();
    let mounts = if has_volumes {
        // Volumes are for all who have them.
        ForkMounts::Shared
    } else {
        ForkMounts::default()
    };
    let spec = ForkSpec {
        mounts,
        ..ForkSpec::new(count)
    };
    let (copies, _) = sandbox.fork(spec).await?;
    for copy in &copies {
        if let Some(report) = copy.created() {
            Trail::restored(Operation::Fork, report);
        }
        observe::sample(copy);
        copy.expire(after).await?;
    }
    Ok(copies)
}
