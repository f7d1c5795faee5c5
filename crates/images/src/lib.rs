//! Images: makes bootable images from files, packages and registries.
//!
//! ```text
//! apt ──► linux-image .deb ──► kernel (vmlinux) and modules ──► kernel bundle ──► initramfs (with an agent)
//!     ──► busybox .deb, or a whole Debian ──┐                       │
//! tar, directory, OCI layers ───────────────┴──► ext4 ──────────────┴──► image
//! qcow2, raw ──► the partition that is the root ──┘
//!
//! registry ── OCI layers ──► ext4 ──► image                                                        pull
//! registry ◄── artifact of ours: one layer for each member, packed by zstd ──► image | snapshot    push, pull
//! ```
//!
//! The crate touches the store, the network and the host's tools (apt, dpkg, mmdebstrap); it knows
//! nothing of machines. Its functions block. Long work takes a [`Job`], which reports progress and
//! can be cancelled from another thread.
//!
//! Always:
//! - The crate reads no environment and no current directory. [`HostTools`] says where the host's
//!   programs are and which variables they get.
//! - Making an image needs no root, and root gets the same digests. Equal input gives equal digests
//!   on every host.
//! - Everything is made in the store's staging and published by the store. Every byte from a
//!   registry is checked against its digest before a name points at it.
//!
//! When it fails or is cancelled: nothing is left in the store; a registry keeps at most blobs that
//! no manifest lists, which it collects itself. When the process dies: files in staging, which the
//! store removes when it is opened next.

mod access;
mod added;
mod apt;
mod artifact;
mod built_in;
mod bundle;
mod catalog;
mod debian;
mod elf;
mod embedded;
mod error;
mod files;
mod hex;
mod import;
mod initramfs;
mod job;
mod kernel;
pub mod memo;
mod modules;
mod new_image;
mod oci;
mod pull;
mod push;
mod quicksand;
mod recipe;
mod spec;
mod tiny;
mod tool;
mod transfer;
mod unpacked;

pub use access::RegistryAccess;
pub use added::{AddedFiles, is_plain, with_files};
pub use built_in::{Reuse, debian_with, ensure, is_built_in, is_debian_ours, rebuild};
pub use bundle::{kernel, with_kernel};
pub use catalog::{
    ImageInfo, ImageRef, RemovedImage, check_name, find, find_by_digest, info, list, remove,
    set_name,
};
pub use error::{Error, Result};
pub use hex::hex;
pub use import::{default_name, import, is_bundle};
pub use initramfs::initramfs;
pub use job::{Job, Progress, Stage};
pub use pull::{Fetched, PulledKind, Remote, image_from_registry, look_up, pulled_name};
pub use push::{Pushed, push};
pub use quicksand::is_save;
pub use recipe::{
    Check, CopyFile, Kernel, KernelKind, Recipe, Run, RunStep, Size, TimedCheck, is_path,
    parse_mode,
};
pub use spec::{ImportSpec, KernelChoice, OwnKernel};
pub use tool::{HostTools, ToolEnv};
