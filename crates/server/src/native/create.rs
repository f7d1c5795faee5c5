//! Creation of sandboxes with all their settings.

use std::collections::BTreeMap;
use std::path::PathBuf;

use axum::Json;
use axum::extract::State;
use hyper::StatusCode;
use sandtree::image::OwnKernel;
use sandtree::{
    AccelChoice, DisplaySize, Expiry, MemoryMode, MountSpec, Network, PublishedPort, SandboxInfo,
    SandboxSpec, SaveOnStop, Scope, is_path, parse_target,
};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::request::{Native, duration};
use crate::auth;
use crate::control::{Body, Client, repeated};
use crate::error::{Fault, Result};
use crate::gateway::New;
use crate::labels::Labels;

/// The memory of a sandbox from an image, as the library chooses it.
const MEMORY_BYTES: u64 = 512 << 20;
/// Labels that begin so are the server's own.
const RESERVED: &str = "e2b/";

/// What to create, from an image or from a snapshot. A sandbox from a snapshot has the snapshot's
/// value of each setting that is missing.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct NewSandbox {
    /// The name of an image or a snapshot, or the digest of a snapshot. Either this or `snapshot`.
    #[schema(example = "debian")]
    pub image: Option<String>,
    /// The same for what must be a snapshot.
    pub snapshot: Option<String>,
    /// Without a name, the id serves as one.
    pub name: Option<String>,
    /// 512 MiB unless given; with a screen 2 GiB.
    pub memory_bytes: Option<u64>,
    /// 1 unless given; with a screen 2.
    pub cpus: Option<u32>,
    /// The size of the image unless given; a whole number of MiB.
    pub disk_bytes: Option<u64>,
    /// `isolated` unless given.
    pub network: Option<Network>,
    /// The best of the host unless given.
    pub accel: Option<AccelChoice>,
    /// Whether the guest may run guests of its own by KVM.
    pub nested: bool,
    /// A processor model of QEMU.
    pub cpu: Option<String>,
    /// The size of the screen, such as `1280x800`; that of the image unless given.
    pub display: Option<DisplaySize>,
    /// Ports of the guest on the host's 127.0.0.1.
    pub publish: Vec<PublishedPort>,
    /// Further arguments of QEMU. Needs the scope `host-files`.
    pub qemu_args: Vec<String>,
    pub boot_timeout_ms: Option<u64>,
    /// Removes the sandbox when it stops, for any reason.
    pub auto_remove: bool,
    /// Boots, even if a warm state or the memory of a snapshot exists.
    pub cold: bool,
    /// A directory of the host for memory layers. Needs the scope `host-files`.
    pub memory_dir: Option<String>,
    /// The best mode of capturing memory that may be used.
    pub memory_mode: Option<MemoryMode>,
    /// Takes a checkpoint before every command, and keeps this many at most.
    pub auto_checkpoint: Option<u32>,
    /// Passes flushes of the guest to the disk of the host.
    pub durable: bool,
    /// Saves the sandbox when it stops, for any reason.
    pub save_on_stop: Option<SaveOnStopSpec>,
    /// A file of the host with certificate authorities that the guest is to trust. Needs the scope
    /// `host-files`.
    pub ca_bundle: Option<String>,
    /// A kernel of the host instead of the image's. Needs the scope `host-files`.
    pub kernel: Option<OwnKernel>,
    /// Directories of the host. Need the scope `host-files`.
    pub mounts: Vec<MountSpec>,
    /// The environment of every command.
    pub env: BTreeMap<String, String>,
    /// Notes of the caller, which lists show. Names that begin with `e2b/` are the server's own.
    pub labels: BTreeMap<String, String>,
    /// What happens after the sandbox has run for some time. Without it, it runs until it is ended.
    pub expiry: Option<Expiry>,
}

/// A save that is due when a sandbox stops.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SaveOnStopSpec {
    /// The name of the snapshot. A directory of the host needs the scope `host-files`.
    pub target: String,
    /// Whether it replaces the snapshot that has the name by then.
    #[serde(default)]
    pub replace: bool,
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    #[serde(default)]
    pub compress: bool,
}

/// Creates a sandbox, and answers when its guest is ready.
///
/// A client that leaves before the answer leaves no sandbox behind. With the header
/// `Idempotency-Key`, a request that is sent again finds the sandbox that it made.
#[utoipa::path(
    post, path = "/sandboxes", tag = "sandboxes",
    request_body = NewSandbox,
    params((
        "Idempotency-Key" = Option<String>, Header,
        description = "Any text, new for each sandbox",
    )),
    responses((status = 201, description = "It runs.", body = SandboxInfo)),
)]
pub async fn create_sandbox(
    State(native): State<Native>,
    client: Client,
    Body(new): Body<NewSandbox>,
) -> Result<(StatusCode, Json<SandboxInfo>)> {
    if let Some(what) = reach(&new) {
        auth::need(&client.key, Scope::HostFiles, what)?;
    }
    let repeats = native.gateway.repeats();
    let _alone = match &client.request {
        Some(request) => Some(repeats.enter(request).await),
        None => None,
    };
    if let Some(made) = repeated(&native.gateway, &client)? {
        return Ok((StatusCode::CREATED, Json(made)));
    }
    let needed = New {
        sandboxes: 1,
        memory_bytes: new.memory_bytes.unwrap_or(MEMORY_BYTES),
    };
    let _admission = native.gateway.admit(&client.key, needed).await?;
    let spec = spec(new, &client)?;
    let sandbox = native.gateway.host().create(spec).await?;
    Ok((StatusCode::CREATED, Json(sandbox.info()?)))
}

/// What of the settings reaches files of the host.
fn reach(new: &NewSandbox) -> Option<&'static str> {
    let named = |name: &Option<String>| name.as_deref().is_some_and(is_path);
    let saved = new.save_on_stop.as_ref();
    let reaching = [
        (!new.mounts.is_empty(), "mounts"),
        (!new.qemu_args.is_empty(), "qemu_args"),
        (new.memory_dir.is_some(), "memory_dir"),
        (new.ca_bundle.is_some(), "ca_bundle"),
        (new.kernel.is_some(), "kernel"),
        (named(&new.image), "a path as image"),
        (named(&new.snapshot), "a path as snapshot"),
        (
            saved.is_some_and(|save| is_path(&save.target)),
            "a path in save_on_stop",
        ),
    ];
    let mut reaching = reaching.into_iter();
    reaching.find_map(|(is_given, what)| is_given.then_some(what))
}

fn spec(new: NewSandbox, client: &Client) -> Result<SandboxSpec> {
    let save_on_stop = new.save_on_stop.map(save_on_stop).transpose()?;
    Ok(SandboxSpec {
        image: new.image,
        snapshot: new.snapshot,
        name: new.name,
        memory_bytes: new.memory_bytes,
        cpus: new.cpus,
        disk_bytes: new.disk_bytes,
        network: new.network,
        accel: new.accel,
        nested: new.nested,
        cpu: new.cpu,
        display: new.display,
        publish: new.publish,
        qemu_args: new.qemu_args,
        boot_timeout: duration(new.boot_timeout_ms),
        auto_remove: new.auto_remove,
        cold: new.cold,
        memory_dir: new.memory_dir.map(PathBuf::from),
        memory_mode: new.memory_mode,
        auto_checkpoint: new.auto_checkpoint,
        durable: new.durable,
        save_on_stop,
        ca_bundle: new.ca_bundle.map(PathBuf::from),
        kernel: new.kernel,
        mounts: new.mounts,
        env: new.env,
        labels: labels(new.labels, client)?,
        expiry: new.expiry,
        ..SandboxSpec::new("")
    })
}

fn save_on_stop(asked: SaveOnStopSpec) -> Result<SaveOnStop> {
    Ok(SaveOnStop {
        target: parse_target(&asked.target)?,
        replace: asked.replace,
        labels: asked.labels,
        compress: asked.compress,
    })
}

/// The labels of the caller, and those by which the server finds the sandbox again.
fn labels(asked: BTreeMap<String, String>, client: &Client) -> Result<BTreeMap<String, String>> {
    check_labels(&asked)?;
    let own = Labels {
        key: Some(client.key.id.clone()),
        request: client.request.clone(),
        ..Labels::read(&BTreeMap::new())
    };
    let mut labels = own.write()?;
    labels.extend(asked);
    Ok(labels)
}

/// Refuses labels with a meaning for the server.
pub fn check_labels(labels: &BTreeMap<String, String>) -> Result<()> {
    match labels.keys().find(|name| name.starts_with(RESERVED)) {
        None => Ok(()),
        Some(name) => Err(Fault::bad_request(format!(
            "invalid label {name:?}: names that begin with {RESERVED} are the server's own"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn new(text: &str) -> NewSandbox {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn what_reaches_the_host_is_known() {
        for plain in [
            r#"{"image":"debian"}"#,
            r#"{"snapshot":"dev","save_on_stop":{"target":"dev"}}"#,
        ] {
            assert_eq!(reach(&new(plain)), None, "{plain}");
        }
        for reaching in [
            r#"{"image":"/srv/snapshot"}"#,
            r#"{"image":"../x"}"#,
            r#"{"snapshot":"./x"}"#,
            r#"{"image":"a","mounts":[{"host":"/","guest":"/h","access":"read_only"}]}"#,
            r#"{"image":"a","qemu_args":["-drive"]}"#,
            r#"{"image":"a","memory_dir":"/dev/shm"}"#,
            r#"{"image":"a","ca_bundle":"/etc/x"}"#,
            r#"{"image":"a","kernel":{"kernel":"/boot/x","initramfs":null,"modules":null}}"#,
            r#"{"image":"a","save_on_stop":{"target":"/srv/x"}}"#,
        ] {
            assert!(reach(&new(reaching)).is_some(), "{reaching}");
        }
    }

    #[test]
    fn misspelled_settings_are_refused() {
        assert!(serde_json::from_str::<NewSandbox>(r#"{"memory":5}"#).is_err());
    }

    #[test]
    fn labels_of_the_server_are_refused() {
        let label = |name: &str| [(name.to_owned(), String::new())].into();
        assert!(check_labels(&label("team")).is_ok());
        assert!(check_labels(&label("e2b/key")).is_err());
    }
}
