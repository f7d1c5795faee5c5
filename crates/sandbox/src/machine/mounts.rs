//! Mounting and unmounting in a running guest.
//!
//! ```text
//!   mounts.json lists the directory -> the thread serves it -> the guest mounts it -> the head lists it
//! ```
//!
//! Always: a mount that the head lists has its directory in `mounts.json`. When it fails: the
//! directory is not served, and a guest that mounts it all the same gets errors there.

use std::collections::BTreeMap;

use sandtree_proto::{MountEnd, MountStart};
use sandtree_store::{HostDirectory, MountAccess, MountPoint, Owned};

use super::running::Running;
use crate::degradation::Degradation;
use crate::error::{Error, Result, store_error};
use crate::mounts::{self, InUse, MOUNTS_MAX, MountSpec};
use crate::order::{Applied, Unmount};

/// Mounts a directory of the host in a running guest.
pub(crate) async fn mount(
    owned: &Owned,
    running: &Running,
    spec: &MountSpec,
) -> Result<MountPoint> {
    spec.check()?;
    let mut head = owned
        .head()
        .map_err(store_error("read where a sandbox stands"))?;
    if head.mounts.iter().any(|point| point.path == spec.guest) {
        return Err(Error::MountTaken {
            name: owned.record().name.to_string(),
            path: spec.guest.clone(),
        });
    }
    if head.mounts.len() >= MOUNTS_MAX {
        return Err(Error::invalid(
            "number of mounts",
            head.mounts.len() + 1,
            "at most 64",
        ));
    }
    let point = MountPoint {
        id: free_id(owned, &head.mounts)?,
        path: spec.guest.clone(),
        access: spec.access,
    };
    remember(owned, &point, spec)?;
    attach(owned, running, &point).await?;
    head.mounts.push(point.clone());
    let listed = owned.set_head(&head);
    if let Err(error) = listed {
        detach(running, &point, InUse::Detach).await?;
        return Err(store_error("write where a sandbox stands")(error));
    }
    Ok(point)
}

/// A number that no other mount has: the guest's disk keeps the changes of a copy-on-write mount
/// under it, also after the mount is gone, and a snapshot of that disk does not say so.
fn free_id(owned: &Owned, points: &[MountPoint]) -> Result<u32> {
    let known = mounts::known(owned)?;
    let states = owned
        .states()
        .map_err(store_error("list the states of a sandbox"))?;
    let of_states = states.readable.iter().flat_map(|state| &state.mounts);
    let points = points.iter().chain(of_states).map(|point| point.id);
    let directories = known.directories.iter().map(|directory| directory.id);
    let known: Vec<u32> = points.chain(directories).collect();
    loop {
        let mut bytes = [0; 4];
        getrandom::fill(&mut bytes).expect("the kernel has random bytes");
        let id = u32::from_le_bytes(bytes);
        if id != 0 && !known.contains(&id) {
            return Ok(id);
        }
    }
}

/// Records which directory of the host a mount is.
pub(crate) fn remember(owned: &Owned, point: &MountPoint, spec: &MountSpec) -> Result<()> {
    let mut known = mounts::known(owned)?;
    known.set(HostDirectory {
        id: point.id,
        path: spec.host.clone(),
        read_only: spec.access != MountAccess::ReadWrite,
        owner: spec.owner.map(|owner| (owner.uid, owner.gid)),
        applied: BTreeMap::new(),
    });
    owned
        .set_host_directories(&known)
        .map_err(store_error("write the mounts of a sandbox"))
}

/// Records the versions of files that were written to the host's directory of a mount.
pub(crate) fn applied(owned: &Owned, files: Applied) -> Result<()> {
    let mut known = mounts::known(owned)?;
    let of = known.directories.iter_mut().find(|of| of.id == files.mount);
    if let Some(of) = of {
        of.applied.extend(files.versions);
    }
    owned
        .set_host_directories(&known)
        .map_err(store_error("write the mounts of a sandbox"))
}

/// Makes the guest mount a point whose directory is known.
async fn attach(owned: &Owned, running: &Running, point: &MountPoint) -> Result<()> {
    let known = mounts::known(owned)?;
    let of = known.get(point.id).ok_or_else(|| Error::NoMount {
        name: owned.record().name.to_string(),
        path: point.path.clone(),
    })?;
    let port = running.hub.mounts();
    port.add(mounts::directory(point, of)?).await?;
    let mounted = running.guest.mount(start(point)).await;
    if mounted.is_err()
        && let Err(error) = port.remove(point.id).await
    {
        tracing::warn!(%error, "a directory that is not mounted is served");
    }
    mounted
}

fn start(point: &MountPoint) -> MountStart {
    let access = match point.access {
        MountAccess::ReadWrite => sandtree_proto::MountAccess::ReadWrite,
        MountAccess::ReadOnly => sandtree_proto::MountAccess::ReadOnly,
        MountAccess::CopyOnWrite => sandtree_proto::MountAccess::CopyOnWrite,
    };
    MountStart {
        id: point.id,
        path: point.path.clone().into_bytes(),
        access,
    }
}

/// Mounts everything that the head lists, in a guest that has booted. A directory that cannot be
/// mounted is reported, and the sandbox runs without it.
pub(crate) async fn mount_all(owned: &Owned, running: &mut Running) -> Result<()> {
    let head = owned
        .head()
        .map_err(store_error("read where a sandbox stands"))?;
    for point in &head.mounts {
        if let Err(error) = attach(owned, running, point).await {
            running.degraded.push(Degradation::MountUnavailable {
                path: point.path.clone(),
                reason: error.one_line(),
            });
        }
    }
    Ok(())
}

/// Unmounts a directory.
pub(crate) async fn unmount(owned: &Owned, running: &Running, which: &Unmount) -> Result<()> {
    let path = &which.path;
    let mut head = owned
        .head()
        .map_err(store_error("read where a sandbox stands"))?;
    let Some(at) = head.mounts.iter().position(|point| point.path == *path) else {
        return Err(Error::NoMount {
            name: owned.record().name.to_string(),
            path: path.clone(),
        });
    };
    let point = head.mounts.remove(at);
    detach(running, &point, which.in_use).await?;
    owned
        .set_head(&head)
        .map_err(store_error("write where a sandbox stands"))
}

async fn detach(running: &Running, point: &MountPoint, in_use: InUse) -> Result<()> {
    let end = MountEnd {
        id: point.id,
        force: in_use == InUse::Detach,
    };
    running.guest.unmount(end).await?;
    running.hub.mounts().remove(point.id).await
}
