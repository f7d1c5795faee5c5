//! Kernel states: captured machines whose kernel is up and whose agent waits for a root. A boot
//! continues from one of them on the sandbox's own disk.
//!
//! ```text
//!   find the state, or make it -> link its memory -> load -> the agent waits -> root, identity -> running
//!        \ it cannot be made, or does not load: boot from power-on, and a note reports why
//! ```
//!
//! A kernel state serves every image and every disk with the same kernel, agent and shape. It is
//! made at the first boot of a shape, which is longer by a capture and a restore; later boots need
//! a third of the time.
//!
//! Always: a kernel state has no identity, no root and no disk. A guest that continues from it gets
//! its own randomness and the time before it looks at its disk. When it fails: a state that does
//! not load is removed, and made again once. Then, or if this sandbox cannot use it, the machine
//! boots from power-on.

use std::sync::Arc;
use std::time::Duration;

use sandtree_images as images;
use sandtree_store::{
    Digest, KernelBundle, MachineRecord, Owned, SandboxRecord, StateSource, WarmOf,
};
use serde::Serialize;

use super::kept::{self, Warm, is_about_the_state};
use crate::degradation::Degradation;
use crate::error::{Error, ErrorKind, Result, store_error};
use crate::fold;
use crate::inner::Inner;
use crate::machine::boot::{self, Boot};
use crate::machine::restore::{self, Loading};
use crate::machine::running::Running;
use crate::machine::spec::{AGENT, boot_options, chosen_accel, machine_record, waiting_cmdline};
use crate::machine::wait::{Root, Waiting, boot_kernel};
use crate::unfinished::Unfinished;

/// Part of every key. It changes when the steps between power-on and capture change.
const RECIPE: u32 = 1;

/// The size of the disk of a machine that is captured before it has a root. It is empty.
const DISK_BYTES: u64 = 1 << 20;

/// Boots a machine from the kernel state of its shape, which is made if it is missing.
pub(super) async fn boot(host: &Arc<Inner>, owned: &Owned, boot: Boot<'_>) -> Result<Running> {
    let key = key(host, owned.record()).await?;
    let mut notes = Vec::new();
    let found = host
        .store
        .warm(&key)
        .map_err(store_error("read a kernel state"));
    let found = match found {
        Ok(None) => Woken::No,
        Ok(Some(state)) => {
            let woken = wake(host, owned, &state, &boot).await;
            usable(host, &key, woken, &mut notes)?
        }
        Err(error) => usable(host, &key, Err(error), &mut notes)?,
    };
    let woken = match found {
        Woken::No => match make(host, owned.record(), &key, boot.timeout).await {
            Ok(state) => {
                let woken = wake(host, owned, &state, &boot).await;
                usable(host, &key, woken, &mut notes)?
            }
            Err(NotMade::Final(error)) => return Err(error),
            Err(NotMade::Kept(error)) => {
                let reason = error.one_line();
                notes.push(Degradation::KernelStateNotKept { reason });
                Woken::NotHere
            }
        },
        found => found,
    };
    let mut running = match woken {
        Woken::Waits(waiting) => waiting.boot(host, root(host, owned, boot)?).await?,
        Woken::No | Woken::NotHere => boot::boot(host, owned, boot).await?,
    };
    running.degraded.extend(notes);
    Ok(running)
}

/// What a guest gets on its way from a kernel state.
fn root(host: &Inner, owned: &Owned, boot: Boot<'_>) -> Result<Root> {
    let image = host
        .store
        .image_by_digest(&owned.record().image_digest)
        .map_err(store_error("read an image"))?;
    Ok(Root {
        options: boot_options(image.record.init),
        identity: boot.identity,
        timeout: boot.timeout,
    })
}

/// What came of the attempt to continue from a kernel state.
enum Woken {
    Waits(Box<Waiting>),
    /// There is no state, or none any more.
    No,
    /// The state may be good, and this sandbox cannot use it.
    NotHere,
}

/// Judges an attempt. A state that does not load is removed. A note reports each failure that a
/// boot from power-on makes up for.
fn usable(
    host: &Inner,
    key: &Digest,
    woken: Result<Waiting>,
    notes: &mut Vec<Degradation>,
) -> Result<Woken> {
    let error = match woken {
        Ok(waiting) => return Ok(Woken::Waits(Box::new(waiting))),
        Err(error) => error,
    };
    let reason = error.one_line();
    if is_about_the_state(&error) {
        let removed = host.store.remove_warm(key);
        removed.map_err(store_error("remove a kernel state"))?;
        notes.push(Degradation::KernelStateUnusable { reason });
        return Ok(Woken::No);
    }
    if !is_about_files(&error) {
        return Err(error);
    }
    notes.push(Degradation::KernelStateUnusable { reason });
    Ok(Woken::NotHere)
}

/// Whether a file was in the way, which a boot from power-on does not need: another process removed
/// the state meanwhile, or the sandbox's memory directory is full or gone.
fn is_about_files(error: &Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::NotFound | ErrorKind::Invalid | ErrorKind::Exhausted | ErrorKind::Io
    )
}

/// Continues from a kernel state on a disk of the sandbox. The sandbox gets links to the memory of
/// the state, because its own states will be based on it.
async fn wake(
    host: &Inner,
    owned: &Owned,
    state: &StateSource,
    boot: &Boot<'_>,
) -> Result<Waiting> {
    owned
        .adopt_memory(state)
        .map_err(store_error("link a kernel state"))?;
    let checked = restore::check_kernel(owned, state.clone())?;
    let loading = Loading {
        host,
        owned,
        disk: boot.disk,
        spare: None,
    };
    let loaded = restore::load(loading, checked).await?;
    Waiting::wake(host, owned, loaded).await
}

/// Why there is no kernel state.
enum NotMade {
    /// A boot from power-on would fail as well, or was interrupted.
    Final(Error),
    /// A machine without a state can still boot.
    Kept(Error),
}

impl NotMade {
    /// A failure before the kernel waits.
    fn early(error: Error) -> Self {
        let is_guests = matches!(error.kind(), ErrorKind::Guest);
        if is_guests || is_about_files(&error) {
            Self::Kept(error)
        } else {
            Self::Final(error)
        }
    }
}

/// Boots a temporary machine without an identity and without content on its disk, and keeps its
/// state. The machine ends, because it has the state's disk open for writing.
async fn make(
    host: &Arc<Inner>,
    like: &SandboxRecord,
    key: &Digest,
    timeout: Option<Duration>,
) -> Result<StateSource, NotMade> {
    let record = kept::temporary(like, DISK_BYTES).map_err(NotMade::early)?;
    let maker = Unfinished::make(host.clone(), record)
        .await
        .map_err(NotMade::early)?;
    let disk = fold::head(maker.owned()).await.map_err(NotMade::early)?;
    let mut running = boot_kernel(host, maker.owned(), &disk, timeout)
        .await
        .map_err(NotMade::early)?;
    let warm = Warm {
        key: key.clone(),
        of: WarmOf::Kernel(like.kernel_digest.clone()),
    };
    let kept = kept::keep(host, maker.owned(), &mut running, warm).await;
    running.machine.kill().await;
    running.hub.close("its state is kept".into()).await;
    kept.map_err(NotMade::Kept)
}

/// Everything that a kernel without a root depends on.
#[derive(Serialize)]
struct Shape {
    kernel_recipe: u32,
    initramfs: String,
    cmdline: String,
    memory_bytes: u64,
    machine: MachineRecord,
}

/// The key of the kernel state that a sandbox boots from.
async fn key(host: &Inner, record: &SandboxRecord) -> Result<Digest> {
    let accel = chosen_accel(host.engine().await?, record)?;
    let kernel = host
        .store
        .kernel(&record.kernel_digest)
        .map_err(store_error("read a kernel"))?;
    let shape = Shape {
        kernel_recipe: RECIPE,
        initramfs: initramfs_name(host, record, &kernel)?,
        cmdline: waiting_cmdline(accel),
        memory_bytes: record.memory_bytes,
        machine: keyed_machine(host, record).await?,
    };
    let bytes = serde_json::to_vec(&shape).expect("a shape is plain data");
    Ok(Digest::of(&bytes))
}

/// The machine as a part of a key.
pub(crate) async fn keyed_machine(host: &Inner, record: &SandboxRecord) -> Result<MachineRecord> {
    let accel = chosen_accel(host.engine().await?, record)?;
    Ok(MachineRecord {
        // The rate is measured, and differs a little each time.
        tsc_khz: None,
        ..machine_record(host, record, accel).await?
    })
}

/// Named by the digest of agent, kernel and recipe.
pub(crate) fn initramfs_name(
    host: &Inner,
    record: &SandboxRecord,
    kernel: &KernelBundle,
) -> Result<String> {
    let path = images::initramfs(&host.store, AGENT, kernel)
        .map_err(|error| error.making(&record.image))?;
    Ok(path
        .file_name()
        .map(|name| name.to_string_lossy().into_owned())
        .unwrap_or_default())
}
