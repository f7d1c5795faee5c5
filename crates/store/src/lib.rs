//! The store: every durable byte of Sandtree.
//!
//! It owns the files below one root and touches no others. It knows no QEMU, network, environment
//! or clock. Where everything is, and what is done about whatever a crash leaves: see the table in
//! `layout`.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let store = sandtree_store::Store::open("/var/lib/sandtree".as_ref())?;
//! let image = store.image(&"tiny".parse()?)?;
//! println!("{} is {}", image.digest, image.rootfs().display());
//! # Ok(()) }
//! ```
//!
//! Always: one rename publishes; what is published is complete and synced. Names are pointers, ids
//! are never reused. Any number of processes may have one store open; locks die with their holders.
//! After a failed sync of a layer, no later sync of it counts.

mod access;
pub mod artifact;
mod blob;
mod cache;
mod choice;
mod damage;
pub mod disk;
mod document;
mod error;
mod fs;
mod gc;
mod head;
mod id;
mod image;
mod index;
mod layout;
mod lock;
pub mod memory;
mod mount;
mod name;
mod named;
mod note;
mod pin;
mod progress;
mod publish;
mod random;
mod record;
mod sandbox;
mod save;
mod snapshot;
mod state;
mod store;
mod tag;
#[cfg(test)]
mod tests;
mod upload;
mod volume;
mod warm;

pub use access::{AccessRecord, KeyLimits, KeyRecord, Scope};
pub use artifact::{ExportSpec, Exported, Packable, PackedMember, Role};
pub use blob::Blob;
pub use choice::{AccelChoice, DisplaySize, Network, ParseDisplaySizeError, PublishedPort};
pub use damage::manifest::ManifestError;
pub use document::Shelf;
pub use error::Error;
pub use fs::rename_noreplace;
pub use gc::{Garbage, GarbageKind, GcReport, KindUsage, Usage, UsageKind};
pub use head::Head;
pub use id::{BatchId, Digest, LayerId, ParseIdError, SandboxId, StateId};
pub use image::{
    Arch, ExecDefaults, Image, ImageRecord, ImageSpec, ImageSummary, Init, KernelBundle,
    KernelFormat, KernelRecord, KernelSpec, ModuleRecord, NamedImage, Ready,
};
pub use index::{Listing, Reindexed, SnapshotSummary};
pub use mount::{HostDirectories, HostDirectory, MountAccess, MountPoint};
pub use name::{Name, ParseNameError};
pub use named::Named;
pub use note::{Note, Notes};
pub use progress::{Progress, Silent};
pub use publish::{Published, Staged};
pub use sandbox::{
    Batch, Collected, DamagedLayer, Ended, Expiry, ExpiryAction, HeldState, ListedSandbox,
    NewOverlay, Origin, Owned, Phase, Pids, SandboxDir, SandboxRecord, SaveOnStop, SaveTarget,
    StagedState, StateRecord, States, UnreadableState,
};
pub use save::{SaveSpec, check_labels};
pub use snapshot::{
    CaptureRecord, Consistency, Damaged, DiskFormat, ImageReference, ListedName, ListedSnapshot,
    MemoryKind, Pinned, RemovedImage, Settings, Snapshot, SnapshotDisk, SnapshotDiskFiles,
    SnapshotManifest, SnapshotMemory, Target, Verified,
};
pub use state::{MachineRecord, MemoryState, StateKind, StateManifest, StateSource};
pub use store::{Recovered, Store};
pub use tag::{ParseTagError, Tag};
pub use upload::Receiving;
pub use volume::VolumeRecord;
pub use warm::{WarmOf, WarmRecord, WarmSummary};
