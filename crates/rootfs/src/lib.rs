//! Builds a root file system from files that users have, as an ext4 in one file.
//!
//! ```text
//! tar | layers of an OCI image | host directory | single nodes ──► a tree: names, attributes, places of bytes ──► ext4
//!                       └── bytes of files go straight into the image file, in order of arrival ──┘
//! ```
//!
//! The crate `disk` writes the ext4. This crate turns archives, directories and disk images into
//! the tree that `disk` writes.
//!
//! Always: equal input in equal order gives equal bytes, on any host and for any user. All input is
//! hostile: its cost is limited, and it can write nothing but the image file. No root privileges,
//! no mounts and no tools of the host are needed.

mod builder;
mod copy_out;
mod dir;
mod disk_image;
mod error;
mod ext4;
mod fault;
mod layer;
mod limits;
mod path;
mod staging;
mod tar;
#[cfg(test)]
mod tests;
mod unpack;
mod watch;

pub use builder::{Added, Builder, New, NewKind};
pub use disk_image::{
    DiskError, DiskFormat, DiskLayers, DiskLimits, FoundPartition, ImportedDisk, Qcow2Damage,
    Qcow2Refused, import_disk, import_overlays, looks_like_disk,
};
pub use error::Error;
pub use limits::Limits;
pub use sandtree_disk::ext4::write::{Made, Options, Time};
pub use tar::TarRules;
pub use watch::{Stop, Watch};
