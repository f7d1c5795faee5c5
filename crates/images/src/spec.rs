//! Settings for making an image.

use std::path::PathBuf;

use sandtree_store::Init;
use serde::{Deserialize, Serialize};

/// The kernel of an image.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum KernelChoice {
    /// Debian's kernel for virtual machines: small, with everything that a guest without a screen
    /// needs.
    #[default]
    Cloud,
    /// Debian's kernel for every machine, with graphics.
    Full,
    Own(OwnKernel),
}

/// The user's own kernel. It needs ext4, virtio disks and virtio consoles, built in or as modules.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct OwnKernel {
    /// A bzImage, or a vmlinux with a PVH entry.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub kernel: PathBuf,
    /// A cpio archive that is unpacked before ours.
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    pub initramfs: Option<PathBuf>,
    /// The directory `lib/modules/RELEASE`, if some needed drivers are not built in.
    #[cfg_attr(feature = "schema", schema(value_type = Option<String>))]
    pub modules: Option<PathBuf>,
}

/// How a root file system, a disk or an OCI image becomes an image.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImportSpec {
    pub kernel: KernelChoice,
    /// `None`: the agent, except on a disk, which boots by its own init.
    pub init: Option<Init>,
    /// The size of the disk that sandboxes get. `None`: at least 4 GiB larger than the image.
    pub disk_bytes: Option<u64>,
}
