//! The HTTP server: programs for E2B and CubeSandbox run on Sandtree unchanged.
//!
//! ```text
//!                   ┌─ control: X-API-KEY ──► create, list, pause, fork, snapshots, templates ──┐
//!   client ── port ─┤                                                                           ├─ keepers
//!                   └─ data: sandbox and port ─┬─ 49983 ──► commands and files (envd's protocol)┤
//!                                              └─ others ─► HTTP and WebSocket in the guest ────┘
//! ```
//!
//! Always: the server keeps nothing that matters. Sandboxes run in keepers, which also end them in
//! time; labels, expiry and keys are in the store. A server that is killed harms no sandbox, and
//! another one finds everything.

mod auth;
mod body;
mod builds;
mod clock;
mod config;
mod content;
mod control;
mod digits;
mod envd;
mod error;
mod first_use;
mod gateway;
mod labels;
mod listen;
mod locked;
mod naming;
mod native;
mod observe;
mod observed;
mod plan;
mod plane;
mod processes;
mod proxy;
mod records;
mod remainder;
mod repeats;
mod template;
mod texts;
mod turn;
mod usage;
mod watchers;
mod wire;

pub use config::{Config, ConfigError, FileConfig, MetricsAccess, Options, TlsFiles};
pub use error::Fault;
pub use gateway::Gateway;
pub use listen::{Bound, ServeError};
pub use template::prepare;
