//! The host's end of mounts: answers a guest's file requests beneath directories of the host.
//!
//! ```text
//!   guest ── virtio port ── QEMU ── UnixStream ── Server ── openat2 beneath ── a host directory
//! ```
//!
//! A [`Server`] is one thread for one guest. It speaks the protocol of
//! [`sandtree_proto::mount`] (`docs/mount-protocol.md`) and serves all mounts of the guest.
//!
//! Always:
//! - Nothing outside of the mounted directories is opened, changed or listed, whatever the guest
//!   sends and whatever happens on the host meanwhile. Symlinks are data, which the guest resolves.
//!   Mount points inside of a mounted directory are refused with EXDEV.
//! - Only regular files and directories are opened. Devices, FIFOs and sockets are neither made nor
//!   opened. Setuid, setgid, sticky and owners never reach the host.
//! - Nothing is kept for a guest that cannot be lost: pinned files without a name and watches are
//!   caches, and bounded. So a guest that is restored somewhere else continues with another server.
//! - Memory, descriptors and watches are bounded, whatever the guest sends.
//!
//! What a guest with a writable mount can do, as every program of the host's user could: plant
//! files that the host's user runs later, and fill the disk.
//!
//! When it fails: errors of the host are answers to the guest, and the last one is in the
//! [`Status`]. A guest that breaks the protocol is greeted anew, and refused for good if it does
//! not stop. Dropping the server closes everything.

mod answer;
mod confine;
mod directory;
mod error;
mod kept;
mod place;
mod port;
mod serve;
mod server;
mod status;
mod tree;
mod watch;

pub use directory::{Access, Directory, Owner};
pub use error::{Error, Outcome};
pub use server::Server;
pub use status::{Confinement, Guest, HostError, Status, Watching};
pub use tree::{Found, Tree};
