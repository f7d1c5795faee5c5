//! Creation of sandboxes on the control plane.

use std::collections::BTreeMap;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use hyper::StatusCode;
use sandtree::image::is_built_in;
use sandtree::{Expiry, ExpiryAction, Network, SandboxInfo, SandboxSpec};

use super::sandboxes::{created, timeout};
use super::shapes::{NetworkRules, NewSandbox};
use super::volumes;
use super::{Body, Client};
use crate::error::{Fault, Result};
use crate::gateway::{Gateway, New};
use crate::labels::Labels;
use crate::observe::{self, Trail};
use crate::records::{TagRecord, tag_of};
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
    gateway.admit(&client.key, needed)?;
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
    let inherited = inherited(gateway, &stored).await?;
    let tag = tag(gateway, &stored)?;
    let shape = tag.as_ref().map(|tag| tag.shape).unwrap_or_default();
    let volumes = new.volume_mounts.clone().unwrap_or(inherited.volumes);
    let mounts = volumes::mounts(gateway, &volumes)?;
    let timeout = timeout(new.timeout, gateway)?;
    let action = action(&new)?;
    let rules = new.network.as_ref();
    let is_isolated =
        new.internet == Some(false) || rules.is_some_and(NetworkRules::denies_everything);
    let network = if is_isolated {
        Network::Isolated
    } else {
        Network::Full
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
        key: Some(client.key.id.clone()),
        request: client.request.clone(),
        user: tag.as_ref().map_or(inherited.user, |tag| tag.user.clone()),
        workdir: tag
            .as_ref()
            .map_or(inherited.workdir, |tag| tag.workdir.clone()),
        volumes,
    };
    Ok(SandboxSpec {
        network: Some(network),
        memory_bytes: shape.memory_bytes,
        cpus: shape.cpus,
        mounts,
        labels: labels.write()?,
        env: environment(&new, &labels)?,
        expiry: timeout.map(|timeout| Expiry {
            after_ms: timeout.as_millis() as u64,
            action,
        }),
        ..SandboxSpec::new(stored)
    })
}

/// What a sandbox from a snapshot inherits, unless its creator chooses: clients that clone send
/// nothing but the snapshot.
async fn inherited(gateway: &Gateway, stored: &str) -> Result<Labels> {
    if template::image(gateway.host(), stored).is_some() || is_built_in(stored) {
        return Ok(Labels::read(&BTreeMap::new()));
    }
    match gateway.host().inspect_snapshot(stored).await {
        Ok(details) => Ok(Labels::read(&details.manifest.labels)),
        Err(_) => Err(Fault::not_found(format!(
            "template \"{stored}\" not found: `sandtree image ls` and `sandtree snapshot ls` list them"
        ))),
    }
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
        assert!(refused(r#"{"network":{"denyOut":["8.8.8.8"]}}"#));
        assert!(refused(
            r#"{"network":{"denyOut":["0.0.0.0/0"],"allowOut":["1.1.1.1"]}}"#
        ));
        assert!(!refused(r#"{"network":{"denyOut":["0.0.0.0/0"]}}"#));
        assert!(refused(r#"{"network":{"rules":{}}}"#));
    }
}
