//! Starts a machine on a sandbox's own disk: from a kernel state, or from power-on.

pub(crate) mod kept;
pub(crate) mod kernel;
mod service;

use std::sync::Arc;
use std::time::Duration;

use sandtree_proto::Identity;
use sandtree_store::{Init, Owned, Phase, SandboxDir, SandboxRecord, StateRecord};

use crate::degradation::Degradation;
use crate::error::{Error, Result, store_error};
use crate::fault::Step;
use crate::guest::image_of;
use crate::inner::Inner;
use crate::machine::boot::{Boot, DISK_RESERVE};
use crate::machine::mounts::mount_all;
use crate::machine::ports::{self, Listener, listen};
use crate::machine::running::{self, Running};
use crate::machine::{self, identity};
use crate::moment::{boot_id, now_unix_ms};
use crate::{fold, memory, place};

pub(crate) use self::service::Service;

/// What a boot begins from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum From {
    /// A kernel that is up and waits for its root, if there can be one.
    KernelState,
    PowerOn,
}

/// Boots a machine on a disk of a sandbox.
pub(crate) async fn boot(
    host: &Arc<Inner>,
    owned: &Owned,
    from: From,
    boot: Boot<'_>,
) -> Result<Running> {
    match from {
        From::KernelState => kernel::boot(host, owned, boot).await,
        From::PowerOn => machine::boot::boot(host, owned, boot).await,
    }
}

/// Who boots, and from where.
pub(crate) struct Head {
    pub identity: Identity,
    pub from: From,
    pub service: Service,
    /// How long the boot may take; `None` for the default.
    pub timeout: Option<Duration>,
}

/// Boots a machine on the head of a sandbox.
pub(crate) async fn boot_head(host: &Arc<Inner>, owned: &Owned, head: Head) -> Result<Running> {
    let Head {
        identity,
        from,
        service,
        timeout,
    } = head;
    let disk = fold::head(owned).await?;
    let asked = Boot {
        disk: &disk,
        identity,
        timeout,
    };
    let mut running = boot(host, owned, from, asked).await?;
    let image = image_of(host, owned.record())?;
    if image.record.init == Init::Image {
        // The next client finds services that have started.
        let settled = running.guest.settle();
        match timeout {
            None => settled.await?,
            Some(within) => match tokio::time::timeout(within, settled).await {
                Ok(settled) => settled?,
                Err(_) => running.degraded.push(Degradation::StillStarting {}),
            },
        }
    }
    mount_all(owned, &mut running).await?;
    if service != Service::Left {
        service::tell_variables(&image.record, owned.record(), &running.guest).await?;
    }
    service::start(&image.record, &mut running, service).await?;
    Ok(running)
}

/// Starts the service of a sandbox's image after a boot in which nothing else was started.
pub(crate) async fn service(host: &Inner, owned: &Owned, running: &mut Running) -> Result<()> {
    let image = image_of(host, owned.record())?;
    service::tell_variables(&image.record, owned.record(), &running.guest).await?;
    service::start(&image.record, running, Service::Noted).await
}

/// Gives the variables of a sandbox to the service that continues in it.
pub(crate) async fn tell_variables(host: &Inner, owned: &Owned, running: &Running) -> Result<()> {
    let image = image_of(host, owned.record())?;
    service::tell_variables(&image.record, owned.record(), &running.guest).await
}

/// The state of a sandbox after a boot that was not finished: it may have written to the disk.
pub(crate) fn unsynced(before: &StateRecord) -> StateRecord {
    StateRecord {
        clean: false,
        ..before.clone()
    }
}

/// Boots a machine on a sandbox's own disk.
pub(crate) async fn reboot(
    host: &Arc<Inner>,
    owned: &mut Owned,
    boot_timeout: Option<Duration>,
) -> Result<Running> {
    check_resources(host, owned.record().memory_bytes)?;
    let state = owned
        .state()
        .map_err(store_error("read a sandbox's state"))?;
    if !state.clean {
        check_disk(owned)?;
    }
    let ports = listen(&owned.record().ports).await?;
    running::clear_execs(owned, None)?;
    let starting = StateRecord {
        boot_id: Some(boot_id()),
        ..state.followed_by(Phase::Starting, now_unix_ms())
    };
    owned
        .set_state(&starting)
        .map_err(store_error("write a sandbox's state"))?;
    owned
        .writable_head()
        .map_err(store_error("read where a sandbox stands"))?;
    let head = Head {
        identity: identity::identity(owned.record()),
        from: From::KernelState,
        service: Service::Noted,
        timeout: boot_timeout,
    };
    let running = boot_head(host, owned, head).await?;
    connected(host, running, &ports)
}

pub(crate) fn check_disk(dir: &SandboxDir) -> Result<()> {
    match dir
        .check_chain()
        .map_err(store_error("check a sandbox's disk"))?
        .first()
    {
        None => Ok(()),
        Some(damaged) => Err(Error::DamagedDisk {
            name: dir.record().name.to_string(),
            what: damaged.damage.to_string(),
        }),
    }
}

pub(crate) fn check_resources(host: &Inner, memory_bytes: u64) -> Result<()> {
    if host.jail(None).uid.is_some() {
        place::check(host.store.root())?;
    }
    let memory::Available {
        bytes: available_bytes,
        cgroup,
    } = memory::available()?;
    if memory_bytes > available_bytes {
        return Err(Error::HostMemory {
            wanted_bytes: memory_bytes,
            available_bytes,
            cgroup,
        });
    }
    let available_bytes = host
        .store
        .disk_free_bytes()
        .map_err(store_error("read its free space"))?;
    if available_bytes < DISK_RESERVE {
        let path = host.store.root().to_owned();
        return Err(Error::HostDisk {
            path,
            wanted_bytes: DISK_RESERVE,
            available_bytes,
        });
    }
    Ok(())
}

/// The state of a sandbox whose machine runs from now on; `before` is its earlier state, if any.
pub(crate) fn running_state(
    running: &Running,
    record: &SandboxRecord,
    before: Option<&StateRecord>,
) -> StateRecord {
    let now = now_unix_ms();
    let fresh = record
        .expiry
        .map(|expiry| now.saturating_add(expiry.after_ms));
    StateRecord {
        boot_id: Some(boot_id()),
        pids: sandtree_store::Pids {
            keeper: Some(std::process::id()),
            qemu: Some(running.machine.pid()),
        },
        accelerator: Some(running.record.accelerator.clone()),
        qemu_version: Some(running.record.qemu_version.clone()),
        degraded: Degradation::notes(&running.degraded),
        saved: before.and_then(|before| before.saved.clone()),
        expires_at_unix_ms: match before {
            // A sandbox that goes to another state of its own has not started anew.
            Some(before) if before.phase == Phase::Running => before.expires_at_unix_ms,
            _ => fresh,
        },
        ..StateRecord::new(Phase::Running, now)
    }
}

pub(crate) fn connected(host: &Inner, mut running: Running, ports: &[Listener]) -> Result<Running> {
    running.forwards = ports::forward(&running.guest, ports)?;
    host.reach(Step::Forward, None)?;
    Ok(running)
}
