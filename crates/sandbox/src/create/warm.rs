//! Warm images: the captured state of an image just after boot, from which sandboxes of the same
//! shape begin.
//!
//! Always: a warm state has no identity. It is captured before the guest has a name, and every
//! sandbox made from it gets its own randomness, time, name and machine id before it counts as
//! created. When it fails: the sandbox boots instead, and a note reports the reason. A warm state
//! that does not load is removed, and made again.

use std::sync::Arc;
use std::time::Duration;

use sandtree_images as images;
use sandtree_store::{
    Digest, Image, KernelBundle, MachineRecord, Named, Network, Owned, SandboxId, SandboxRecord,
    StateKind, StateSource, WarmRecord, WarmSummary,
};
use serde::Serialize;

use super::origin::Beginning;
use super::unfinished::Unfinished;
use crate::capture::{After, Capture, Purpose};
use crate::create;
use crate::error::{Error, Result, store_error};
use crate::host::Host;
use crate::info::rfc3339;
use crate::inner::Inner;
use crate::machine::running::Running;
use crate::machine::spec::{AGENT, chosen_accel, cmdline, machine_record};
use crate::machine::{identity, start};
use crate::mode::MemoryMode;
use crate::names::parse_name;
use crate::progress::Progress;
use crate::spec::SandboxSpec;

/// Part of every key. It changes when the steps between boot and capture change.
const RECIPE: u32 = 1;

/// The number of warm states that a store keeps. Each has the memory that a guest has written when
/// it has booted, some 60 MiB.
const WARM_MAX: usize = 8;

/// A captured boot, as lists show it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct WarmInfo {
    pub key: String,
    /// The digest of its image. Warm states of older versions do not record it.
    pub image: Option<String>,
    pub memory_bytes: Option<u64>,
    pub cpus: Option<u32>,
    pub network: Option<Network>,
    pub accelerator: Option<String>,
    /// Its size on disk.
    pub bytes: u64,
    /// RFC 3339, in UTC.
    pub created_at: String,
    /// Why it cannot be used.
    pub unreadable: Option<String>,
}

impl WarmInfo {
    fn new(summary: WarmSummary) -> Self {
        let record = summary.record;
        Self {
            key: summary.key.to_string(),
            image: record.as_ref().map(|record| record.image.to_string()),
            memory_bytes: record.as_ref().map(|record| record.memory_bytes),
            cpus: record.as_ref().map(|record| record.cpus),
            network: record.as_ref().map(|record| record.network),
            accelerator: record.map(|record| record.accelerator),
            bytes: summary.bytes,
            created_at: rfc3339(summary.created_at_unix_ms),
            unreadable: summary.unreadable,
        }
    }
}

impl Host {
    /// Makes sure that there is a captured boot for sandboxes like this one.
    pub async fn warm_image(&self, spec: &SandboxSpec) -> Result<WarmInfo> {
        spec.check()?;
        let beginning = self
            .inner
            .beginning(spec, Progress::silent(), |_| {})
            .await?;
        let image = match beginning {
            Beginning::Image(image) => image,
            Beginning::Snapshot(snapshot) => {
                let name = spec.image.clone().unwrap_or_default();
                let found = Named::Snapshot(snapshot.digest.clone());
                return Err(images::Error::NotAnImage { name, found }.into());
            }
        };
        let record = create::record_of(spec, &image)?;
        let key = key(&self.inner, &record, &image).await?;
        let there = self
            .inner
            .store
            .warm(&key)
            .map_err(store_error("read a warm state"))?;
        if there.is_none() {
            start::check_resources(&self.inner, record.memory_bytes)?;
            make(&self.inner, &record, &image, &key, spec.boot_timeout).await??;
        }
        let listed = self
            .warm_states()?
            .into_iter()
            .find(|warm| warm.key == key.as_str());
        listed.ok_or_else(|| Error::NoState {
            name: record.image.to_string(),
            state: key.to_string(),
        })
    }

    /// Every captured boot, oldest first.
    pub fn warm_states(&self) -> Result<Vec<WarmInfo>> {
        let mut listed = self
            .inner
            .store
            .warm_list()
            .map_err(store_error("list warm states"))?;
        listed.sort_by_key(|warm| warm.created_at_unix_ms);
        Ok(listed.into_iter().map(WarmInfo::new).collect())
    }

    /// Removes every captured boot of an image; how many there were.
    pub async fn forget_warm(&self, reference: &str) -> Result<usize> {
        let image = self.inner.find_image(reference)?;
        let listed = self
            .inner
            .store
            .warm_list()
            .map_err(store_error("list warm states"))?;
        let of_image = |warm: &WarmSummary| {
            warm.record
                .as_ref()
                .is_some_and(|record| record.image == image.digest)
        };
        let keys: Vec<_> = listed
            .into_iter()
            .filter(of_image)
            .map(|warm| warm.key)
            .collect();
        let removed = keys
            .iter()
            .try_for_each(|key| self.inner.store.remove_warm(key));
        removed.map_err(store_error("remove a warm state"))?;
        Ok(keys.len())
    }
}

/// Everything that a booted machine depends on, except its disk's size and its identity.
#[derive(Serialize)]
struct Shape<'a> {
    recipe: u32,
    image: &'a Digest,
    initramfs: String,
    cmdline: String,
    memory_bytes: u64,
    machine: MachineRecord,
}

/// The key of the warm state that a sandbox begins from.
pub(crate) async fn key(host: &Inner, record: &SandboxRecord, image: &Image) -> Result<Digest> {
    let kernel = host
        .store
        .kernel(&record.kernel_digest)
        .map_err(store_error("read a kernel"))?;
    let accel = chosen_accel(host.engine().await?, record)?;
    let shape = Shape {
        recipe: RECIPE,
        image: &record.image_digest,
        initramfs: initramfs_name(host, record, &kernel)?,
        cmdline: cmdline(image.record.init, accel),
        memory_bytes: record.memory_bytes,
        // The rate is measured, and differs a little each time.
        machine: MachineRecord {
            tsc_khz: None,
            ..machine_record(host, record, accel).await?
        },
    };
    let bytes = serde_json::to_vec(&shape).expect("a shape is plain data");
    Ok(Digest::of(&bytes))
}

/// Named by the digest of agent, kernel and recipe.
fn initramfs_name(host: &Inner, record: &SandboxRecord, kernel: &KernelBundle) -> Result<String> {
    let path = sandtree_images::initramfs(&host.store, AGENT, kernel)
        .map_err(|error| error.making(&record.image))?;
    Ok(path
        .file_name()
        .map(|name| name.to_string_lossy().into_owned())
        .unwrap_or_default())
}

/// Boots a temporary machine without an identity, captures it, and keeps the state for all
/// sandboxes of the same shape. The machine ends, because it has the state's disk open for writing,
/// and no running machine may have that.
///
/// An inner error: the machine booted, and its state cannot be kept.
pub(crate) async fn make(
    host: &Arc<Inner>,
    like: &SandboxRecord,
    image: &Image,
    key: &Digest,
    timeout: Option<Duration>,
) -> Result<Result<StateSource>> {
    let maker = Unfinished::make(host.clone(), maker(like, image)?).await?;
    let mut running = start::boot_head(
        host,
        maker.owned(),
        identity::without_sandbox(like),
        timeout,
    )
    .await?;
    let kept = keep(host, maker.owned(), &mut running, key).await;
    running.machine.kill().await;
    running.hub.close("its state is kept".into()).await;
    Ok(kept)
}

/// The record of the temporary machine. Its disk has the image's size, because a warm state is for
/// disks of any size.
fn maker(like: &SandboxRecord, image: &Image) -> Result<SandboxRecord> {
    let id = SandboxId::random().map_err(store_error("make an id"))?;
    let name = parse_name("sandbox name", id.as_str())?;
    let disk_bytes = image.record.rootfs.bytes;
    let ports = Vec::new();
    let like = like.clone();
    Ok(SandboxRecord {
        id,
        name,
        disk_bytes,
        ports,
        memory_dir: None,
        memory_mode: None,
        auto_checkpoint: None,
        snapshot: None,
        save_on_stop: None,
        ..like
    })
}

async fn keep(
    host: &Inner,
    owned: &Owned,
    running: &mut Running,
    key: &Digest,
) -> Result<StateSource> {
    running.guest.settle().await?;
    let accelerator = running.record.accelerator.clone();
    let disk_bytes = owned.record().disk_bytes;
    let mut capture = Capture {
        host,
        owned,
        running,
        wanted: MemoryMode::WriteProtect,
        disk_bytes,
    };
    let purpose = Purpose {
        kind: StateKind::Warm,
        tag: None,
        after: After::StayStopped,
    };
    let manifest = capture.take(purpose).await?.manifest;
    let record = owned.record();
    let warm = WarmRecord {
        schema: WarmRecord::SCHEMA,
        image: record.image_digest.clone(),
        memory_bytes: record.memory_bytes,
        cpus: record.cpus,
        network: record.network,
        accelerator,
    };
    let published =
        tokio::task::block_in_place(|| host.store.publish_warm(key, &warm, owned, &manifest.id));
    published.map_err(store_error("keep a warm state"))?;
    prune(host, key)?;
    let kept = host
        .store
        .warm(key)
        .map_err(store_error("read a warm state"))?;
    kept.ok_or_else(|| Error::NoState {
        name: owned.record().name.to_string(),
        state: key.to_string(),
    })
}

/// Removes the oldest warm states above the limit. Most likely, they are of images, QEMUs, agents
/// and shapes that are no longer used. A warm state that is needed again is made again.
fn prune(host: &Inner, but: &Digest) -> Result<()> {
    let mut others = Vec::new();
    for key in host
        .store
        .warm_keys()
        .map_err(store_error("list warm states"))?
    {
        // A warm state that cannot be read is removed first.
        let made = host
            .store
            .warm(&key)
            .ok()
            .flatten()
            .map_or(0, |state| state.manifest().created_at_unix_ms);
        others.extend((key != *but).then_some((made, key)));
    }
    others.sort();
    let excess = others.len().saturating_sub(WARM_MAX - 1);
    let removed = others
        .iter()
        .take(excess)
        .try_for_each(|(_, key)| host.store.remove_warm(key));
    removed.map_err(store_error("remove a warm state"))
}
