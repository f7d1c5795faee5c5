//! Warm images: the captured state of an image just after boot, from which sandboxes of the same
//! shape begin.
//!
//! Always: a warm state has no identity. It continues with the service of its image, ready. It is
//! captured before the guest has a name, and every sandbox made from it gets its own randomness,
//! time, name and machine id before it counts as created. When it fails: the sandbox boots instead,
//! and a note reports the reason. A warm state that does not load is removed, and made again.

use std::sync::Arc;
use std::time::Duration;

use sandtree_images as images;
use sandtree_store::{
    Digest, Image, MachineRecord, Named, Network, SandboxRecord, StateSource, WarmOf, WarmSummary,
};
use serde::Serialize;

use super::origin::Beginning;
use crate::boxed::Boxed;
use crate::create;
use crate::degradation::Degradation;
use crate::error::{Error, Result, store_error};
use crate::host::Host;
use crate::info::rfc3339;
use crate::inner::Inner;
use crate::machine::identity;
use crate::machine::spec::{chosen_accel, cmdline};
use crate::progress::Progress;
use crate::spec::SandboxSpec;
use crate::start;
use crate::start::kept::{self, Warm};
use crate::start::kernel::{initramfs_name, keyed_machine};
use crate::unfinished::Unfinished;

/// Part of every key. It changes when the steps between boot and capture change.
const RECIPE: u32 = 2;

/// A captured boot, as lists show it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct WarmInfo {
    pub key: String,
    /// The digest of its image. Kernel states have none, and warm states of older versions do not
    /// record it.
    pub image: Option<String>,
    /// The digest of the kernel of a kernel state.
    pub kernel: Option<String>,
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
        let of = record.as_ref().map(|record| &record.of);
        Self {
            key: summary.key.to_string(),
            image: of.and_then(WarmOf::image).map(Digest::to_string),
            kernel: of.and_then(WarmOf::kernel).map(Digest::to_string),
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
    pub fn warm_image<'a>(&'a self, spec: &'a SandboxSpec) -> Boxed<'a, Result<WarmInfo>> {
        Box::pin(async move {
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
                let made = make(&self.inner, &record, &image, &key, spec.boot_timeout).await?;
                made.state?;
            }
            let listed = self
                .warm_states()?
                .into_iter()
                .find(|warm| warm.key == key.as_str());
            listed.ok_or_else(|| Error::NoState {
                name: record.image.to_string(),
                state: key.to_string(),
            })
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
                .is_some_and(|record| record.of.image() == Some(&image.digest))
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
        machine: keyed_machine(host, record).await?,
    };
    let bytes = serde_json::to_vec(&shape).expect("a shape is plain data");
    Ok(Digest::of(&bytes))
}

/// The result of a boot for a warm state.
pub(crate) struct Made {
    /// An error: the machine booted, and its state cannot be kept.
    pub state: Result<StateSource>,
    /// How the boot was done in a lesser way.
    pub degraded: Vec<Degradation>,
}

/// Boots a temporary machine without an identity, captures it, and keeps the state for all
/// sandboxes of the same shape. The machine ends, because it has the state's disk open for writing,
/// and no running machine may have that. Its disk has the image's size, because a warm state is for
/// disks of any size.
pub(crate) async fn make(
    host: &Arc<Inner>,
    like: &SandboxRecord,
    image: &Image,
    key: &Digest,
    timeout: Option<Duration>,
) -> Result<Made> {
    let record = kept::temporary(like, image.record.rootfs.bytes)?;
    let maker = Unfinished::make(host.clone(), record).await?;
    let head = start::Head {
        identity: identity::without_sandbox(like),
        from: start::From::KernelState,
        service: start::Service::Required,
        timeout,
    };
    let mut running = start::boot_head(host, maker.owned(), head).await?;
    let warm = Warm {
        key: key.clone(),
        of: WarmOf::Image(like.image_digest.clone()),
    };
    let state = match running.guest.settle().await {
        Ok(()) => kept::keep(host, maker.owned(), &mut running, warm).await,
        Err(error) => Err(error),
    };
    running.machine.kill().await;
    running.hub.close("its state is kept".into()).await;
    let is_of_kernel = |note: &Degradation| {
        matches!(
            note,
            Degradation::KernelStateUnusable { .. } | Degradation::KernelStateNotKept { .. }
        )
    };
    running.degraded.retain(is_of_kernel);
    Ok(Made {
        state,
        degraded: running.degraded,
    })
}
