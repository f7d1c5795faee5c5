//! Keepers: background processes that each run one sandbox and serve it on a socket.
//!
//! ```text
//!   sandtree run -d ---- lease (socket pair) ----> keeper == driver == QEMU
//!   sandtree exec a ---- sandboxes/ID/keeper.sock ---^
//! ```
//!
//! A keeper gets its task on the lease, and answers there. If the lease closes before its release,
//! the keeper undoes its task: a created sandbox is removed, a started one is stopped. On the
//! socket a client makes one call and gets one answer; after `link` both speak the guest's
//! protocol. Every connection starts with a hello that names the version.
//!
//! Always: there is no central daemon. Other programs find a sandbox by its directory. When a
//! keeper dies, its QEMU dies with it, and the next program that checks finds the lock free and
//! records that.

mod client;
mod requests;
mod samples;
mod serve;
mod spawn;
mod stats;
mod wire;

pub use crate::config::KeeperProgram;
pub(crate) use client::{Connection, Keeper};
pub use samples::Sample;
pub(crate) use samples::sample;
pub use serve::run;
pub(crate) use spawn::Lease;
pub use spawn::leases_in_child;
pub use stats::Stats;
pub(crate) use stats::stats;
pub use wire::{FEATURES, PROTOCOL};
pub(crate) use wire::{Mission, Ready, Task};
