//! Sandboxes on the control plane.

use std::collections::BTreeMap;
use std::time::Duration;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use hyper::StatusCode;
use sandtree::{
    Expiry, ExpiryAction, ForkSpec, KeyInfo, Network, Phase, Sandbox, SandboxInfo, SandboxSpec,
};
use serde::Deserialize;
use serde_json::json;

use super::query::{self, PageQuery};
use super::shapes::{Created, Detailed, Listed, NetworkRules, NewSandbox, state};
use super::{Asked, Body, Client, Id};
use crate::error::{Fault, Result};
use crate::gateway::{Gateway, New, is_shown, wake};
use crate::labels::Labels;
use crate::template::{self, BASE};

/// The longest lifetime that a client can ask for: that of any expiry.
const TIMEOUT_MAX: i64 = 10 * 365 * 86_400;
/// E2B's value for a sandbox that does not expire, from CubeSandbox.
const NEVER: i64 = -1;
const FORKS_MAX: usize = 20;
/// The memory of a sandbox, as the library chooses it.
const MEMORY_BYTES: u64 = 512 << 20;

/// Creates a sandbox.
pub(super) async fn create(
    State(gateway): State<Gateway>,
    client: Client,
    Body(new): Body<NewSandbox>,
) -> Result<Response> {
    refuse_unknown(&new)?;
    let needed = New {
        sandboxes: 1,
        memory_bytes: MEMORY_BYTES,
    };
    gateway.admit(&client.key, needed)?;
    let spec = spec(&gateway, &client.key, new).await?;
    let sandbox = gateway.host().create(spec).await?;
    let created = created(&gateway, &client, &sandbox.info()?)?;
    Ok((StatusCode::CREATED, axum::Json(created)).into_response())
}

/// Refuses what would otherwise be silently ignored.
fn refuse_unknown(new: &NewSandbox) -> Result<()> {
    if !new.volume_mounts.is_empty() {
        return Err(Fault::not_implemented("mounting volumes"));
    }
    if new.mcp.is_some() {
        return Err(Fault::not_implemented("the MCP gateway"));
    }
    if new.iam.is_some() {
        return Err(Fault::not_implemented("workload identity"));
    }
    new.network.as_ref().map_or(Ok(()), refuse_rules)
}

/// Rules of the network that this server cannot enforce.
fn refuse_rules(rules: &NetworkRules) -> Result<()> {
    let has_egress = !rules.allow_out.is_empty()
        || !rules.deny_out.is_empty()
        || !rules.dns_servers.is_empty()
        || rules.egress_proxy.is_some()
        || rules.rules.is_some();
    if has_egress {
        return Err(Fault::not_implemented("filtering outgoing traffic"));
    }
    if rules.mask_request_host.is_some() || !rules.https_ports.is_empty() {
        return Err(Fault::not_implemented("rewriting requests to ports"));
    }
    Ok(())
}

async fn spec(gateway: &Gateway, key: &KeyInfo, new: NewSandbox) -> Result<SandboxSpec> {
    let template = new.template.clone().unwrap_or_else(|| BASE.to_owned());
    let stored = template::origin(gateway.host(), gateway.config(), &template).await;
    let inherited = inherited(gateway, &stored).await?;
    let timeout = timeout(new.timeout, gateway)?;
    let network = match new.internet {
        Some(false) => Network::Isolated,
        Some(true) | None => Network::Full,
    };
    let labels = Labels {
        template: Some(template),
        metadata: new.metadata.clone().unwrap_or(inherited.metadata),
        auto_resume: auto_resume(&new).unwrap_or(inherited.auto_resume),
        public_traffic: new
            .network
            .as_ref()
            .and_then(|rules| rules.allow_public_traffic)
            .unwrap_or(inherited.public_traffic),
        secure: new.secure.unwrap_or(true),
        key: Some(key.id.clone()),
    };
    Ok(SandboxSpec {
        network: Some(network),
        labels: labels.write()?,
        env: environment(&new, &labels)?,
        expiry: Some(Expiry {
            after_ms: timeout.unwrap_or_default().as_millis() as u64,
            action: action(&new)?,
        })
        .filter(|_| timeout.is_some()),
        ..SandboxSpec::new(stored)
    })
}

/// What a sandbox from a snapshot inherits, unless its creator chooses: clients that clone send
/// nothing but the snapshot.
async fn inherited(gateway: &Gateway, stored: &str) -> Result<Labels> {
    if template::image(gateway.host(), stored).is_some() {
        return Ok(Labels::read(&BTreeMap::new()));
    }
    match gateway.host().inspect_snapshot(stored).await {
        Ok(details) => Ok(Labels::read(&details.manifest.labels)),
        Err(_) => Err(Fault::not_found(format!(
            "template \"{stored}\" not found: `sandtree image ls` and `sandtree snapshot ls` list them"
        ))),
    }
}

fn auto_resume(new: &NewSandbox) -> Option<bool> {
    let lifecycle = new.lifecycle.as_ref();
    let direct = new.auto_resume.as_ref().map(|policy| policy.is_on());
    direct.or_else(|| lifecycle?.auto_resume)
}

fn action(new: &NewSandbox) -> Result<ExpiryAction> {
    let lifecycle = new.lifecycle.as_ref();
    let on_timeout = lifecycle.and_then(|lifecycle| lifecycle.on_timeout.as_deref());
    let pauses = match on_timeout {
        Some("pause") => true,
        Some("kill") => false,
        Some(other) => {
            let message = format!("invalid onTimeout {other:?}: use kill or pause");
            return Err(Fault::bad_request(message));
        }
        None => new.auto_pause.unwrap_or(false),
    };
    Ok(match (pauses, new.auto_pause_memory) {
        (false, _) => ExpiryAction::Remove,
        (true, Some(false)) => ExpiryAction::Stop,
        (true, _) => ExpiryAction::Pause,
    })
}

/// The variables of every command. Programs find out by them that they are in a sandbox.
fn environment(new: &NewSandbox, labels: &Labels) -> Result<BTreeMap<String, String>> {
    let mut env = new.env_vars.clone().unwrap_or_default();
    if env.len() > 1000 {
        return Err(Fault::bad_request("at most 1000 variables"));
    }
    let template = labels.template.clone().unwrap_or_default();
    env.insert("E2B_SANDBOX".into(), "true".into());
    env.insert("E2B_TEMPLATE_ID".into(), template);
    Ok(env)
}

/// How long a sandbox runs. `None`: it does not expire.
fn timeout(seconds: Option<i64>, gateway: &Gateway) -> Result<Option<Duration>> {
    match seconds {
        None => Ok(Some(gateway.config().timeout)),
        Some(NEVER) => Ok(None),
        Some(seconds @ 0..=TIMEOUT_MAX) => Ok(Some(Duration::from_secs(seconds.unsigned_abs()))),
        Some(other) => Err(Fault::bad_request(format!(
            "invalid timeout {other}: use a number of seconds, or -1 for none"
        ))),
    }
}

fn created(gateway: &Gateway, client: &Client, info: &SandboxInfo) -> Result<Created> {
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
    /// `asc` or `desc`, by the time of creation.
    order: Option<String>,
}

/// The running sandboxes, newest first.
pub(super) async fn list_running(
    State(gateway): State<Gateway>,
    Asked(query): Asked<ListQuery>,
) -> Result<Response> {
    let state = Some(query.state.unwrap_or_else(|| "running".to_owned()));
    let found = listed(&gateway, &ListQuery { state, ..query })?;
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
    page.page(found)
}

/// A sandbox that cannot be read is left out: the others must still be found.
fn listed(gateway: &Gateway, query: &ListQuery) -> Result<Vec<Listed>> {
    let wanted = query.metadata.as_deref().map(query::metadata);
    let wanted = wanted.transpose()?.unwrap_or_default();
    let states: Option<Vec<&str>> = query.state.as_deref().map(|text| text.split(',').collect());
    let (mut all, broken) = gateway.host().list()?;
    for error in broken {
        tracing::warn!(error = %error.report().one_line(), "a sandbox cannot be listed");
    }
    if query.order.as_deref() != Some("asc") {
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
    let shown = all.iter().filter(|info| is_shown(info.state));
    let found = shown.filter(|info| has_state(info) && has_metadata(info));
    Ok(found.map(Listed::new).collect())
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

/// Joins a sandbox: resumes one that is paused, and makes one that runs expire later, never
/// earlier.
pub(super) async fn connect(
    State(gateway): State<Gateway>,
    Id(id): Id,
    client: Client,
    Body(asked): Body<TimeoutBody>,
) -> Result<Response> {
    let (sandbox, info) = gateway.sandbox(&id)?;
    check_timeout(&gateway, asked.timeout)?;
    let was = Was::of(info.state);
    if was == Was::AtRest {
        admit_again(&gateway, &client, &info)?;
        wake(&sandbox, info.state).await?;
    }
    extend(&gateway, &sandbox, asked.timeout, was).await?;
    let created = created(&gateway, &client, &sandbox.info()?)?;
    Ok(axum::Json(created).into_response())
}

/// As `connect`, for clients of earlier versions.
pub(super) async fn resume(
    State(gateway): State<Gateway>,
    Id(id): Id,
    client: Client,
    Body(asked): Body<TimeoutBody>,
) -> Result<Response> {
    let (sandbox, info) = gateway.sandbox(&id)?;
    if info.state == Phase::Running {
        return Err(Fault::conflict(format!("sandbox \"{id}\" is running")));
    }
    check_timeout(&gateway, asked.timeout)?;
    admit_again(&gateway, &client, &info)?;
    wake(&sandbox, info.state).await?;
    extend(&gateway, &sandbox, asked.timeout, Was::AtRest).await?;
    let created = created(&gateway, &client, &sandbox.info()?)?;
    Ok((StatusCode::CREATED, axum::Json(created)).into_response())
}

/// Refuses a lifetime before anything is done for it.
fn check_timeout(gateway: &Gateway, seconds: Option<i64>) -> Result<()> {
    if seconds == Some(0) {
        return Err(Fault::bad_request("invalid timeout 0"));
    }
    timeout(seconds, gateway).map(drop)
}

/// A sandbox that continues counts as one more that runs.
fn admit_again(gateway: &Gateway, client: &Client, info: &SandboxInfo) -> Result<()> {
    let needed = New {
        sandboxes: 1,
        memory_bytes: info.memory_bytes,
    };
    gateway.admit(&client.key, needed)
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

fn now_unix_ms() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.unwrap_or_default().as_millis() as u64
}

#[derive(Debug, Default, Deserialize)]
pub(super) struct PauseBody {
    memory: Option<bool>,
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
    match asked.memory {
        Some(false) => sandbox.stop(None).await?,
        _ => {
            sandbox.pause().await?;
        }
    }
    Ok(StatusCode::NO_CONTENT)
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

#[derive(Debug, Default, Deserialize)]
pub(super) struct MetricsQuery {
    start: Option<f64>,
    end: Option<f64>,
}

/// What a sandbox uses at this moment. Earlier moments are not recorded.
pub(super) async fn metrics(
    State(gateway): State<Gateway>,
    Id(id): Id,
    Asked(query): Asked<MetricsQuery>,
) -> Result<Response> {
    let (sandbox, info) = gateway.sandbox(&id)?;
    let now_ms = now_unix_ms();
    let now_s = now_ms as f64 / 1000.0;
    let is_asked = query.start.is_none_or(|start| start <= now_s)
        && query.end.is_none_or(|end| end + 1.0 >= now_s);
    if !is_asked || info.state != Phase::Running {
        return Ok(axum::Json(json!([])).into_response());
    }
    let used = sandbox.stats().await?.guest;
    let busy = used.cpu_busy_ms as f64 / used.uptime_ms.max(1) as f64;
    let at = std::time::UNIX_EPOCH + Duration::from_millis(now_ms);
    let sample = json!({
        "timestamp": humantime::format_rfc3339_millis(at).to_string(),
        "timestampUnix": now_ms / 1000,
        "cpuCount": info.cpus,
        "cpuUsedPct": (busy * 10_000.0).round() / 100.0,
        "memUsed": used.memory_total_bytes.saturating_sub(used.memory_available_bytes),
        "memTotal": used.memory_total_bytes,
        "memCache": 0,
        "diskUsed": used.disk_total_bytes.saturating_sub(used.disk_available_bytes),
        "diskTotal": used.disk_total_bytes,
    });
    Ok(axum::Json(json!([sample])).into_response())
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
    #[serde(flatten)]
    rules: NetworkRules,
}

/// Replaces the rules for outgoing traffic. There are none, so only their removal succeeds.
pub(super) async fn network(
    State(gateway): State<Gateway>,
    Id(id): Id,
    Body(asked): Body<NetworkBody>,
) -> Result<StatusCode> {
    gateway.sandbox(&id)?;
    refuse_rules(&asked.rules)?;
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
    gateway.admit(&client.key, needed)?;
    let (copies, _) = sandbox.fork(ForkSpec::new(count)).await?;
    let mut answers = Vec::new();
    for copy in copies {
        copy.expire(after).await?;
        let created = created(&gateway, &client, &copy.info()?)?;
        answers.push(json!({ "sandbox": created }));
    }
    Ok((StatusCode::CREATED, axum::Json(answers)).into_response())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lifetime_ends_as_its_creator_chooses() {
        let chosen = |text: &str| action(&serde_json::from_str(text).unwrap());
        assert_eq!(chosen("{}").unwrap(), ExpiryAction::Remove);
        assert_eq!(
            chosen(r#"{"autoPause":true}"#).unwrap(),
            ExpiryAction::Pause
        );
        let disk = r#"{"autoPause":true,"autoPauseMemory":false}"#;
        assert_eq!(chosen(disk).unwrap(), ExpiryAction::Stop);
        let cube = r#"{"lifecycle":{"onTimeout":"pause"}}"#;
        assert_eq!(chosen(cube).unwrap(), ExpiryAction::Pause);
        assert!(chosen(r#"{"lifecycle":{"onTimeout":"x"}}"#).is_err());
    }

    #[test]
    fn traffic_resumes_as_the_creator_chooses() {
        let chosen = |text: &str| auto_resume(&serde_json::from_str(text).unwrap());
        assert_eq!(chosen("{}"), None);
        assert_eq!(chosen(r#"{"autoResume":{"enabled":true}}"#), Some(true));
        assert_eq!(chosen(r#"{"autoResume":false}"#), Some(false));
        assert_eq!(chosen(r#"{"lifecycle":{"autoResume":true}}"#), Some(true));
    }

    #[test]
    fn rules_that_cannot_be_enforced_are_refused() {
        let refused = |text: &str| refuse_unknown(&serde_json::from_str(text).unwrap()).is_err();
        assert!(!refused(r#"{"network":{"allowPublicTraffic":false}}"#));
        assert!(refused(r#"{"network":{"denyOut":["0.0.0.0/0"]}}"#));
        assert!(refused(r#"{"network":{"rules":{}}}"#));
        assert!(refused(r#"{"mcp":{}}"#));
        assert!(refused(r#"{"volumeMounts":[{"name":"v","path":"/v"}]}"#));
    }
}
