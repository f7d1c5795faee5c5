//! The reader and the comparison against those who made the file systems: mke2fs, debugfs, e2fsck
//! and the kernel.

mod changes;
mod features;
mod hostile;
mod journal;
mod layers;
mod model;
mod mounted;
mod support;
