//! Keepers: background processes that each run one sandbox and serve it on a socket.
//!
//! ```text
//!   sandtree run -d ---- lease (socket pair) ----> keeper == driver == QEMU
//!   sandtree exec a ---- sandboxes/ID/keeper.sock ---^
//! ```
//!
//! On the lease a keeper hears what to do, and answers. Until the lease is released, its closing
//! takes back what it was given for: a sandbox that was created is removed, one that was started is
//! stopped. On the socket a client makes one call and gets one answer; after `link` both speak the
//! guest's protocol. Every connection begins with a hello that names the version.
//!
//! Always: there is no central daemon. Other programs find a sandbox by its directory. A keeper
//! that dies takes its QEMU with it, and the next program that looks finds the lock free and
//! records that.

mod client;
mod serve;
mod spawn;
mod stats;
mod wire;

pub use crate::config::KeeperProgram;
pub(crate) use client::{Connection, Keeper};
pub use serve::run;
pub(crate) use spawn::Lease;
pub use stats::Stats;
pub(crate) use stats::stats;
pub use wire::{FEATURES, PROTOCOL};
pub(crate) use wire::{Mission, Task};
