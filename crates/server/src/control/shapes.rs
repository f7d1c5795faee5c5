//! The JSON of sandboxes on the control plane.

use std::collections::BTreeMap;

use sandtree::{Access, ExpiryAction, Network, Phase, SandboxInfo};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::auth;
use crate::error::{Fault, Result};
use crate::labels::{Labels, VolumeMount};

/// The version of envd whose protocol the data plane speaks.
pub const ENVD_VERSION: &str = "0.6.13";
/// Nothing depends on it, and clients require it.
const CLIENT_ID: &str = "sandtree";
/// The end of a sandbox that does not expire, for clients that require one.
const NEVER: &str = "9999-12-31T23:59:59Z";

/// The longest lifetime of a sandbox. One that does not expire has it if its expiry must be known.
pub const FOREVER_MS: u64 = 10 * 365 * 86_400_000;

/// A request to create a sandbox.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NewSandbox {
    #[serde(rename = "templateID", default)]
    pub template: Option<String>,
    /// Seconds; -1: it does not expire.
    pub timeout: Option<i64>,
    pub auto_pause: Option<bool>,
    pub auto_pause_memory: Option<bool>,
    pub auto_resume: Option<AutoResume>,
    /// CubeSandbox's way to say the same.
    pub lifecycle: Option<Lifecycle>,
    pub secure: Option<bool>,
    #[serde(rename = "allow_internet_access")]
    pub internet: Option<bool>,
    pub network: Option<NetworkRules>,
    pub metadata: Option<BTreeMap<String, String>>,
    #[serde(default)]
    pub env_vars: Option<BTreeMap<String, String>>,
    /// `None`: those of the snapshot that it begins from.
    pub volume_mounts: Option<Vec<VolumeMount>>,
    pub iam: Option<Value>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub enum AutoResume {
    Plain(bool),
    Policy { enabled: bool },
}

impl AutoResume {
    pub fn is_on(&self) -> bool {
        match self {
            Self::Plain(enabled) | Self::Policy { enabled } => *enabled,
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Lifecycle {
    /// `kill` or `pause`.
    pub on_timeout: Option<String>,
    pub auto_resume: Option<bool>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NetworkRules {
    #[serde(default)]
    pub allow_out: Vec<String>,
    #[serde(default)]
    pub deny_out: Vec<String>,
    pub allow_public_traffic: Option<bool>,
    pub mask_request_host: Option<String>,
    #[serde(default)]
    pub https_ports: Vec<u16>,
    #[serde(default)]
    pub dns_servers: Vec<String>,
    pub egress_proxy: Option<Value>,
    pub rules: Option<Value>,
}

/// Every address, as rules name them.
const EVERYWHERE: [&str; 2] = ["0.0.0.0/0", "::/0"];

impl NetworkRules {
    /// Whether the guest must reach nothing, which needs no filter.
    pub fn denies_everything(&self) -> bool {
        let is_every = |rule: &String| EVERYWHERE.contains(&rule.as_str());
        self.allow_out.is_empty()
            && self.deny_out.iter().any(|rule| rule == EVERYWHERE[0])
            && self.deny_out.iter().all(is_every)
    }

    /// Refuses rules that this server cannot enforce.
    pub fn check(&self) -> Result<()> {
        let has_egress = !self.allow_out.is_empty()
            || !(self.deny_out.is_empty() || self.denies_everything())
            || !self.dns_servers.is_empty()
            || self.egress_proxy.is_some()
            || self.rules.is_some();
        if has_egress {
            return Err(Fault::not_implemented("filtering outgoing traffic"));
        }
        if self.mask_request_host.is_some() || !self.https_ports.is_empty() {
            return Err(Fault::not_implemented("rewriting requests to ports"));
        }
        Ok(())
    }
}

/// What rules and the plain switch say of the way out of a sandbox. `None`: nothing.
pub fn network(internet: Option<bool>, rules: Option<&NetworkRules>) -> Option<Network> {
    if internet == Some(false) || rules.is_some_and(NetworkRules::denies_everything) {
        return Some(Network::Isolated);
    }
    internet.map(|_| Network::Full)
}

/// A sandbox, to its creator.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Created {
    #[serde(rename = "templateID")]
    template: String,
    #[serde(rename = "sandboxID")]
    pub sandbox: String,
    #[serde(rename = "clientID")]
    client: &'static str,
    envd_version: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    envd_access_token: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    traffic_access_token: Option<String>,
    domain: String,
}

impl Created {
    pub fn new(info: &SandboxInfo, access: &Access, domain: String) -> Self {
        let labels = Labels::of(info);
        let token = |purpose| access.token(purpose, &info.id);
        Self {
            template: template(info, &labels),
            sandbox: info.id.clone(),
            client: CLIENT_ID,
            envd_version: ENVD_VERSION,
            envd_access_token: labels.secure.then(|| token(auth::ENVD)),
            traffic_access_token: (!labels.public_traffic).then(|| token(auth::TRAFFIC)),
            domain,
        }
    }
}

/// A sandbox as lists show it.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Listed {
    #[serde(rename = "templateID")]
    template: String,
    alias: String,
    #[serde(rename = "sandboxID")]
    sandbox: String,
    #[serde(rename = "clientID")]
    client: &'static str,
    started_at: String,
    end_at: String,
    state: &'static str,
    cpu_count: u32,
    #[serde(rename = "memoryMB")]
    memory_mb: u64,
    #[serde(rename = "diskSizeMB")]
    disk_mb: u64,
    envd_version: &'static str,
    metadata: BTreeMap<String, String>,
}

impl Listed {
    pub fn new(info: &SandboxInfo) -> Self {
        let labels = Labels::of(info);
        let template = template(info, &labels);
        Self {
            alias: template.clone(),
            template,
            sandbox: info.id.clone(),
            client: CLIENT_ID,
            started_at: info.created_at.clone(),
            end_at: end(info),
            state: state(info.state),
            cpu_count: info.cpus,
            memory_mb: info.memory_bytes >> 20,
            disk_mb: info.disk_bytes >> 20,
            envd_version: ENVD_VERSION,
            metadata: labels.metadata,
        }
    }
}

/// A sandbox with all that the control plane knows of it.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Detailed {
    #[serde(flatten)]
    listed: Listed,
    domain: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    envd_access_token: Option<String>,
    allow_internet_access: bool,
    lifecycle: Value,
    volume_mounts: Vec<VolumeMount>,
}

impl Detailed {
    pub fn new(info: &SandboxInfo, access: &Access, domain: String) -> Self {
        let labels = Labels::of(info);
        let action = info.expiry.map(|expiry| expiry.action).unwrap_or_default();
        let on_timeout = match action {
            ExpiryAction::Remove => "kill",
            ExpiryAction::Pause | ExpiryAction::Stop => "pause",
        };
        let token = labels.secure.then(|| access.token(auth::ENVD, &info.id));
        Self {
            listed: Listed::new(info),
            domain,
            envd_access_token: token,
            allow_internet_access: info.network == Network::Full,
            lifecycle: serde_json::json!({
                "onTimeout": on_timeout,
                "autoResume": labels.auto_resume,
            }),
            volume_mounts: labels.volumes,
        }
    }
}

fn end(info: &SandboxInfo) -> String {
    let is_forever = info
        .expiry
        .is_some_and(|expiry| expiry.after_ms == FOREVER_MS);
    let lifetime_ms = info
        .expires_at_unix_ms
        .map(|at| at.saturating_sub(info.created_at_unix_ms));
    // A lifetime that was set later is shorter.
    let is_unchanged = lifetime_ms.is_none_or(|lifetime| lifetime >= FOREVER_MS);
    let end = info
        .expires_at
        .clone()
        .filter(|_| !(is_forever && is_unchanged));
    end.unwrap_or_else(|| NEVER.to_owned())
}

/// A sandbox of another program has its image as its template.
pub fn template(info: &SandboxInfo, labels: &Labels) -> String {
    let template = labels.template.clone();
    template.unwrap_or_else(|| info.image.clone())
}

/// A sandbox that has stopped or crashed continues from its disk, so it counts as paused.
pub fn state(phase: Phase) -> &'static str {
    match phase {
        Phase::Running => "running",
        _ => "paused",
    }
}
