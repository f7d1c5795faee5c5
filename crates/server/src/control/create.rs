//! Creation of sandboxes on the control plane.

use std::collections::BTreeMap;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use hyper::StatusCode;
use sandtree::image::is_built_in;
use sandtree::{Expiry, ExpiryAction, Network, SandboxInfo, SandboxSpec};

use super::sandboxes::{created, timeout};
use super::shapes::{self, FOREVER_MS, NetworkRules, NewSandbox};
use super::volumes;
use super::{Body, Client};
use crate::error::{Fault, Result};
use crate::gateway::{Gateway, New};
use crate::labels::Labels;
use crate::observe::{self, Trail};
use crate::records::{self, SnapshotRecord, TagRecord, tag_of};
use crate::template::{self, BASE};

/// The memory of a sandbox, as the library chooses it.
const MEMORY_BYTES: u64 = 512 << 20;

/// Creates a sandbox.
pub(super) async fn create(
    State(gateway): State<Gateway>,
    client: Client,
    Body(new): Body<NewSandbox>,
) -> Result<Response> {
    refuse_unknown(&new)?;
    let _alone = match &client.request {
        Some(request) => Some(gateway.repeats().enter(request).await),
        None => None,
    };
    if let Some(made) = repeated(&gateway, &client)? {
        let created = created(&gateway, &client, &made)?;
        return Ok((StatusCode::CREATED, axum::Json(created)).into_response());
    }
    let spec = spec(&gateway, &client, new).await?;
    let needed = New {
        sandboxes: 1,
        memory_bytes: spec.memory_bytes.unwrap_or(MEMORY_BYTES),
    };
    let _admission = gateway.admit(&client.key, needed).await?;
    gateway.first_uses().ready(gateway.host(), &spec).await?;
    let sandbox = gateway.host().create(spec).await?;
    Trail::created(&sandbox);
    observe::sample(&sandbox);
    let created = created(&gateway, &client, &sandbox.info()?)?;
    Ok((StatusCode::CREATED, axum::Json(created)).into_response())
}

/// The sandbox that the same request has created before.
pub(crate) fn repeated(gateway: &Gateway, client: &Client) -> Result<Option<SandboxInfo>> {
    if client.request.is_none() {
        return Ok(None);
    }
    let (all, _) = gateway.host().list()?;
    let is_its = |info: &SandboxInfo| Labels::of(info).request == client.request;
    Ok(all.into_iter().find(is_its))
}

/// Refuses what would otherwise be silently ignored.
fn refuse_unknown(new: &NewSandbox) -> Result<()> {
    if new.iam.is_some() {
        return Err(Fault::not_implemented("workload identity"));
    }
    new.network.as_ref().map_or(Ok(()), NetworkRules::check)
}

async fn spec(gateway: &Gateway, client: &Client, new: NewSandbox) -> Result<SandboxSpec> {
    let template = new.template.clone().unwrap_or_else(|| BASE.to_owned());
    let stored = template::origin(gateway.host(), gateway.config(), &template).await;
    let origin = Origin::of(gateway, &stored).await?;
    let inherited = origin.labels();
    let tag = tag(gateway, &stored)?;
    let shape = tag.as_ref().map(|tag| tag.shape).unwrap_or_default();
    let volumes = new.volume_mounts.clone().unwrap_or(inherited.volumes);
    let mounts = volumes::mounts(gateway, &volumes)?;
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
        key: Some(client.key.id.clone()),
        request: client.request.clone(),
        user: tag.as_ref().map_or(inherited.user, |tag| tag.user.clone()),
        workdir: tag
            .as_ref()
            .map_or(inherited.workdir, |tag| tag.workdir.clone()),
        volumes,
    };
    Ok(SandboxSpec {
        network: origin.network(&new),
        memory_bytes: shape.memory_bytes,
        cpus: shape.cpus,
        mounts,
        labels: labels.write()?,
        env: environment(origin.env(), &new, &labels)?,
        expiry: expiry(gateway, &origin, &new)?,
        ..SandboxSpec::new(stored)
    })
}

/// What a sandbox begins from. From a snapshot it inherits what its creator does not choose:
/// clients that clone send nothing but the snapshot.
enum Origin {
    Image,
    Snapshot(Box<Inherited>),
}

struct Inherited {
    labels: Labels,
    /// `None`: the snapshot was not taken by a server with this store.
    record: Option<SnapshotRecord>,
}

impl Origin {
    async fn of(gateway: &Gateway, stored: &str) -> Result<Self> {
        let host = gateway.host();
        if template::image(host, stored).is_some() || is_built_in(stored) {
            return Ok(Self::Image);
        }
        let Ok(details) = host.inspect_snapshot(stored).await else {
            return Err(Fault::not_found(format!(
                "template \"{stored}\" not found: `sandtree image ls` and `sandtree snapshot ls` list them"
            )));
        };
        Ok(Self::Snapshot(Box::new(Inherited {
            labels: Labels::read(&details.manifest.labels),
            record: records::snapshot_of(host, stored, &details.digest)?,
        })))
    }

    fn labels(&self) -> Labels {
        match self {
            Self::Image => Labels::read(&BTreeMap::new()),
            Self::Snapshot(inherited) => inherited.labels.clone(),
        }
    }

    fn record(&self) -> Option<&SnapshotRecord> {
        match self {
            Self::Image => None,
            Self::Snapshot(inherited) => inherited.record.as_ref(),
        }
    }

    fn env(&self) -> BTreeMap<String, String> {
        let record = self.record();
        record.map(|record| record.env.clone()).unwrap_or_default()
    }

    /// `None`: that of the snapshot.
    fn network(&self, new: &NewSandbox) -> Option<Network> {
        let chosen = shapes::network(new.internet, new.network.as_ref());
        match self {
            Self::Image => Some(chosen.unwrap_or(Network::Full)),
            Self::Snapshot(_) => chosen,
        }
    }
}

fn expiry(gateway: &Gateway, origin: &Origin, new: &NewSandbox) -> Result<Option<Expiry>> {
    let saved = origin.record().map(|record| record.expiry);
    let action = action(new)?.or(saved.flatten().map(|expiry| expiry.action));
    let action = action.unwrap_or_default();
    let after_ms = match saved {
        Some(saved) if new.timeout.is_none() => saved.map(|expiry| expiry.after_ms),
        _ => timeout(new.timeout, gateway)?.map(|timeout| timeout.as_millis() as u64),
    };
    // A lifetime that is set later ends as its creator chose.
    let after_ms = match action {
        ExpiryAction::Remove => after_ms,
        _ => Some(after_ms.unwrap_or(FOREVER_MS)),
    };
    Ok(after_ms.map(|after_ms| Expiry { after_ms, action }))
}

/// What the builder of a template chose.
fn tag(gateway: &Gateway, stored: &str) -> Result<Option<TagRecord>> {
    match template::image(gateway.host(), stored) {
        Some(image) => tag_of(gateway.host(), stored, &image.digest),
        None => Ok(None),
    }
}

fn auto_resume(new: &NewSandbox) -> Option<bool> {
    let lifecycle = new.lifecycle.as_ref();
    let direct = new.auto_resume.as_ref().map(|policy| policy.is_on());
    direct.or_else(|| lifecycle?.auto_resume)
}

/// `None`: the creator does not choose.
fn action(new: &NewSandbox) -> Result<Option<ExpiryAction>> {
    let lifecycle = new.lifecycle.as_ref();
    let on_timeout = lifecycle.and_then(|lifecycle| lifecycle.on_timeout.as_deref());
    let pauses = match on_timeout {
        Some("pause") => true,
        Some("kill") => false,
        Some(other) => {
            let message = format!("invalid onTimeout {other:?}: use kill or pause");
            return Err(Fault::bad_request(message));
        }
        None => match new.auto_pause {
            Some(pauses) => pauses,
            None => return Ok(None),
        },
    };
    Ok(Some(match (pauses, new.auto_pause_memory) {
        (false, _) => ExpiryAction::Remove,
        (true, Some(false)) => ExpiryAction::Stop,
        (true, _) => ExpiryAction::Pause,
    }))
}

/// The variables of every command: those of the origin, and over them those of the creator.
/// Programs find out by them that they are in a sandbox.
fn environment(
    mut env: BTreeMap<String, String>,
    new: &NewSandbox,
    labels: &Labels,
) -> Result<BTreeMap<String, String>> {
    env.extend(new.env_vars.clone().unwrap_or_default());
    if env.len() > 1000 {
        return Err(Fault::bad_request("at most 1000 variables"));
    }
    let template = labels.template.clone().unwrap_or_default();
    env.insert("E2B_SANDBOX".into(), "true".into());
    env.insert("E2B_TEMPLATE_ID".into(), template);
    Ok(env)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lifetime_ends_as_its_creator_chooses() {
        let chosen = |text: &str| action(&serde_json::from_str(text).unwrap());
        assert_eq!(chosen("{}").unwrap(), None);
        let kept = chosen(r#"{"autoPause":true}"#).unwrap();
        assert_eq!(kept, Some(ExpiryAction::Pause));
        let ended = chosen(r#"{"autoPause":false}"#).unwrap();
        assert_eq!(ended, Some(ExpiryAction::Remove));
        let disk = r#"{"autoPause":true,"autoPauseMemory":false}"#;
        assert_eq!(chosen(disk).unwrap(), Some(ExpiryAction::Stop));
        let cube = r#"{"lifecycle":{"onTimeout":"pause"}}"#;
        assert_eq!(chosen(cube).unwrap(), Some(ExpiryAction::Pause));
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
        assert!(refused(r#"{"network":{"denyOut":["8.8.8.8"]}}"#));
        assert!(refused(
            r#"{"network":{"denyOut":["0.0.0.0/0"],"allowOut":["1.1.1.1"]}}"#
        ));
        assert!(!refused(r#"{"network":{"denyOut":["0.0.0.0/0"]}}"#));
        assert!(refused(r#"{"network":{"rules":{}}}"#));
    }
}
