//! A root file system, from the files people have to an ext4 in one file.
//!
//! ```text
//! tar | layers of an OCI image | host directory | single nodes ──► names, attributes, where bytes are ──► ext4
//!                       └── bytes of files go straight into the image file, as they come ──┘
//! ```
//!
//! Always: equal input in equal order gives equal bytes, on any host and for any user. Everything
//! that comes in is hostile: what it may cost is limited, and it leads nowhere but into the image
//! file. No root, no mount, no tools of the host are needed.

mod builder;
mod dir;
mod disk;
mod edit;
mod error;
mod ext4;
mod fault;
mod layer;
mod limits;
mod outward;
mod path;
mod tar;
#[cfg(test)]
mod tests;
mod tree;
mod unpack;

pub use builder::{Added, Builder, New, NewKind, Stop, TarRules, Watch};
pub use disk::{
    DiskError, DiskFormat, DiskLimits, FoundPartition, ImportedDisk, Qcow2Damage, Qcow2Refused,
    import_disk, looks_like_disk,
};
pub use error::Error;
pub use ext4::{Made, Options};
pub use limits::Limits;
pub use tree::{Attributes, BLOCK_BYTES, Content, Device, Extent, Kind, Node, NodeId, Time, Tree};
