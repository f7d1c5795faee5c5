//! Disks: qcow2 overlays on top of an image's raw root file system.
//!
//! An overlay holds the writes of one machine. It names no backing file, so it never contains a
//! path of the host: the program that opens it passes the layers below.

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
