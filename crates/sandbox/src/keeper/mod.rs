//! Keepers: background processes that each run one sandbox and serve it on a socket.
//!
//! ```text
//!   sandtree run -d ---- lease (socket pair) ----> keeper == library's Sandbox == QEMU
//!   sandtree exec a ---- sandboxes/ID/keeper.sock ---^
//! ```
//!
//! The lease is how a keeper is told what to do and how it answers. Until it has answered, or for as long as the sandbox is
//! meant to last only as long as its caller, a lease that closes takes the sandbox with it.
//!
//! On the socket a client sends one request and gets one answer; after a `link` request both speak the guest's protocol.
//!
//! Always: there is no central daemon. Other programs find a sandbox by its directory. A keeper that dies takes its QEMU
//! with it, and the next one who looks finds the lock free and says so.

mod client;
mod serve;
mod spawn;
mod wire;

pub use client::Client;
pub use serve::{Stats, run};
pub use spawn::Lease;
pub use wire::{Holding, Order, Task};
