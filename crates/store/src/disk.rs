//! Disks: qcow2 overlays over an image's raw root file system.
//!
//! An overlay holds what one machine wrote. It names no backing file: who opens it says what lies
//! below it, so no host path is ever inside.

mod chain;
pub mod check;
mod entry;
pub mod fold;
pub(crate) mod header;
mod layer;
pub mod overlay;
#[cfg(test)]
mod samples;

pub use chain::{Chain, Where, changed};
