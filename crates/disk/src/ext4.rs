//! The ext4 file system, and its predecessors ext2 and ext3.

mod format;
pub mod probe;
pub mod read;
pub mod write;
