//! The ext4 reader and the comparison, tested against mke2fs, debugfs, e2fsck and the kernel.

mod changes;
mod features;
mod hostile;
mod journal;
mod layers;
mod model;
mod mounted;
mod support;
