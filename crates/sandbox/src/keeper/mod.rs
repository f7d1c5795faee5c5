//! Keepers: background processes that each run one sandbox and serve it on a socket.
//!
//! ```text
//!   sandtree run -d ---- lease (socket pair) ----> keeper == library's Sandbox == QEMU
//!   sandtree exec a ---- sandboxes/ID/keeper.sock ---^
//! ```
//!
//! The lease is how a keeper is told what to do and how it answers. Until it is released, a lease
//! that closes takes back what it was given for: a sandbox that was created is removed, one that
//! was started is stopped.
//!
//! On the socket a client sends one request and gets one answer; after a `link` request both speak
//! the guest's protocol.
//!
//! Always: there is no central daemon. Other programs find a sandbox by its directory. A keeper
//! that dies takes its QEMU with it, and the next one who looks finds the lock free and says so.

mod client;
mod serve;
mod spawn;
mod wire;

pub(crate) use client::Borrowing;
pub use client::Client;
pub use serve::{Stats, run};
pub use spawn::Lease;
pub use wire::{Order, Ready, Task, Way};
