//! The state of a machine's devices: out of a stopped machine and into one that waits for it.
//!
//! ```text
//!   stopped --save--> stopped            a few hundred kilobytes, no RAM
//!   stopped --save_stream--> stopped     QEMU's own migration, RAM included; disks are inactive until `cont`
//!   Start::Incoming --load--> stopped    either of the two
//! ```
//!
//! Always: a state is read through a descriptor of its own offset, so that many machines can load
//! one file. What `take` gives can be loaded. When it fails: a load that fails leaves a machine
//! that is of no use, and mostly QEMU has ended. A save that fails leaves the machine stopped as it
//! was.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::time::Duration;

use rustix::fs::{FallocateFlags, MemfdFlags, OFlags, fallocate, fcntl_getfl, memfd_create};
use rustix::io::Errno;
use tokio::time::timeout;

use crate::error::Error;
use crate::fdset::{self, FdSets, reopen};
use crate::nested;
use crate::qmp::{
    Capability, Command, Event, Events, GetFd, Migrate, MigrateCancel, MigrateIncoming,
    MigrateSetCapabilities, MigrateSetParameters, Qmp, QueryMigrate, QueryStatus,
    XenSaveDevicesState,
};
use crate::version::Version;

/// Devices take a few hundred kilobytes. QEMU is not trusted to keep to that.
const DEVICES_BYTES_MAX: u64 = 64 << 20;

const DEVICES: &str = "the state of the devices";

/// For a whole memory from a slow disk.
const LOAD_DEADLINE: Duration = Duration::from_secs(300);

/// The first version that migrates to and from files by name. Older ones take regular files as
/// `fd:`.
const FILE_MIGRATION: Version = Version {
    major: 8,
    minor: 2,
    micro: 0,
};

/// More than any disk does; QEMU's own limit is that of a network.
const BANDWIDTH_MAX: u64 = 1 << 40;

/// A place in memory for the state of the devices. Made before the stop and read after it, so that
/// the stop is short.
#[derive(Debug)]
pub struct DeviceFile {
    file: File,
    set: u64,
}

/// Makes a place that has memory for so many bytes already. It can take more.
pub(crate) async fn prepare(sets: &FdSets, bytes: u64) -> Result<DeviceFile, Error> {
    let failed = |errno: Errno| Error::io("keep", DEVICES)(errno.into());
    let file = memfd_create("devices", MemfdFlags::CLOEXEC);
    let file = File::from(file.map_err(failed)?);
    if bytes > 0 {
        // Its length stays what QEMU writes. Without this memory, QEMU's writes allocate it.
        let allocated = fallocate(&file, FallocateFlags::KEEP_SIZE, 0, bytes);
        tracing::trace!(?allocated, "memory for the devices");
    }
    let set = sets
        .add(reopen(&file, File::options().write(true))?.into())
        .await?;
    Ok(DeviceFile { file, set })
}

/// Saves the devices of a stopped machine.
pub(crate) async fn save(qmp: &Qmp, into: &DeviceFile) -> Result<(), Error> {
    // `live` would give the disks away.
    qmp.run(XenSaveDevicesState {
        filename: &fdset::path(into.set),
        live: false,
    })
    .await
    .map(drop)
}

/// What was saved; nothing, if nothing was. Fails if QEMU could not load it.
pub(crate) async fn take(sets: &FdSets, from: DeviceFile) -> Result<Vec<u8>, Error> {
    sets.release(from.set).await;
    let devices = read(&from)?;
    if nested::is_refused(&devices) {
        return Err(Error::InNestedGuest);
    }
    Ok(devices)
}

fn read(from: &DeviceFile) -> Result<Vec<u8>, Error> {
    let failed = || Error::io("keep", DEVICES);
    let length = from.file.metadata().map_err(failed())?.len();
    if length > DEVICES_BYTES_MAX {
        return Err(Error::Protocol {
            detail: format!("{length} bytes of devices are more than {DEVICES_BYTES_MAX}"),
        });
    }
    let mut state = vec![0; length as usize];
    from.file.read_exact_at(&mut state, 0).map_err(failed())?;
    Ok(state)
}

/// Saves the whole machine by QEMU's own migration. Until `cont` its disks are inactive: no pivot
/// in between.
pub(crate) async fn save_stream(
    qmp: &Qmp,
    sets: &FdSets,
    into: OwnedFd,
    deadline: Duration,
) -> Result<(), Error> {
    let into = if access(&into)? == OFlags::WRONLY {
        into
    } else {
        reopen(&into, File::options().write(true))?.into()
    };
    tell_migration(qmp).await?;
    qmp.run(MigrateSetParameters {
        max_bandwidth: BANDWIDTH_MAX,
    })
    .await?;
    let channel = Channel::open(qmp, sets, into).await?;
    let mut events = qmp.events();
    let saving = async {
        qmp.run(Migrate { uri: &channel.uri }).await?;
        let ended = settled(qmp, &mut events).await?;
        finalized(qmp).await?;
        ended.map_err(|reason| Error::NotSaved { reason })
    };
    let saved = match timeout(deadline, saving).await {
        Ok(saved) => saved,
        Err(_) => Err(cancel(qmp, deadline).await),
    };
    channel.close(sets).await;
    saved
}

/// QEMU reports the end of a migration a moment before `cont` works again, and does not report that
/// moment.
async fn finalized(qmp: &Qmp) -> Result<(), Error> {
    while qmp.run(QueryStatus {}).await?.status == "finish-migrate" {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    Ok(())
}

async fn cancel(qmp: &Qmp, deadline: Duration) -> Error {
    match qmp.run(MigrateCancel {}).await {
        Ok(_) => Error::Timeout {
            command: Migrate::NAME,
            after: deadline,
        },
        Err(error) => error,
    }
}

/// Prepares a machine that was started to wait for a state for the load.
pub(crate) async fn expect(qmp: &Qmp) -> Result<(), Error> {
    tell_migration(qmp).await
}

/// Loads a state into a machine that was started to wait for one, after [`expect`]. It is stopped
/// then.
pub(crate) async fn load(qmp: &Qmp, sets: &FdSets, state: OwnedFd) -> Result<(), Error> {
    let state = reopen(&state, File::options().read(true))?;
    let channel = Channel::open(qmp, sets, state.into()).await?;
    let mut events = qmp.events();
    let loading = async {
        qmp.run(MigrateIncoming { uri: &channel.uri }).await?;
        settled(qmp, &mut events)
            .await?
            .map_err(|reason| Error::NotLoaded { reason })
    };
    let loaded = timeout(LOAD_DEADLINE, loading).await;
    match loaded.unwrap_or(Err(Error::Timeout {
        command: MigrateIncoming::NAME,
        after: LOAD_DEADLINE,
    })) {
        Ok(()) => {
            channel.close(sets).await;
            Ok(())
        }
        // QEMU ends when it cannot make sense of what it loads. One that was killed says nothing
        // about what it loads.
        Err(Error::Died { exit }) if !exit.is_kill() => Err(Error::NotLoaded {
            reason: exit.to_string(),
        }),
        Err(error) => Err(error),
    }
}

async fn tell_migration(qmp: &Qmp) -> Result<(), Error> {
    let capabilities = [Capability {
        capability: "events",
        state: true,
    }];
    qmp.run(MigrateSetCapabilities {
        capabilities: &capabilities,
    })
    .await
    .map(drop)
}

/// Waits for the end of a migration, either way. The inner error is QEMU's reason.
async fn settled(qmp: &Qmp, events: &mut Events) -> Result<Result<(), String>, Error> {
    loop {
        let status = match events.next().await {
            Some(Event::Migration { status }) => status,
            // The one waited for may be among them. And when the connection has ended, asking tells
            // why.
            Some(Event::Lost { .. }) | None => {
                qmp.run(QueryMigrate {}).await?.status.unwrap_or_default()
            }
            Some(_) => continue,
        };
        match status.as_str() {
            "completed" => return Ok(Ok(())),
            "failed" | "cancelled" => {
                let reason = qmp.run(QueryMigrate {}).await?.error_desc;
                return Ok(Err(reason.unwrap_or(status)));
            }
            _ => {}
        }
    }
}

/// A descriptor as a migration address.
struct Channel {
    uri: String,
    set: Option<u64>,
}

impl Channel {
    async fn open(qmp: &Qmp, sets: &FdSets, fd: OwnedFd) -> Result<Self, Error> {
        const NAME: &str = "migration";
        if qmp.version() < FILE_MIGRATION {
            qmp.run_with_fd(GetFd { fdname: NAME }, fd).await?;
            return Ok(Self {
                uri: format!("fd:{NAME}"),
                set: None,
            });
        }
        let set = sets.add(fd).await?;
        Ok(Self {
            uri: format!("file:{}", fdset::path(set)),
            set: Some(set),
        })
    }

    async fn close(self, sets: &FdSets) {
        if let Some(set) = self.set {
            sets.release(set).await;
        }
    }
}

fn access(fd: &impl std::os::fd::AsFd) -> Result<OFlags, Error> {
    let flags = fcntl_getfl(fd).map_err(|errno| {
        Error::io("look at", format!("descriptor {}", fd.as_fd().as_raw_fd()))(errno.into())
    })?;
    Ok(flags & OFlags::ACCMODE)
}
