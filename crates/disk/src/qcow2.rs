//! qcow2: headers and table entries.
//!
//! ```text
//!  place on the disk ──► L1 entry ──► L2 table ──► L2 entry ──► nothing | zeros | a cluster | a compressed cluster
//! ```
//!
//! This module only decodes and encodes. Which features an image may have, and whether its tables
//! fit its file, is decided by its two readers: `store`, which reads overlays of its own, and
//! `rootfs`, which reads images of others.

mod entry;
mod header;

pub use entry::{COMPRESSED, COPIED, Compressed, L1Entry, L2Entry, READS_AS_ZERO, Reserved};
pub use header::{
    ClusterSize, Features, HEADER_BYTES, Header, HeaderError, L1_OFFSET_AT, Layout, MAGIC,
    MAX_L1_BYTES, REFCOUNT_TABLE_OFFSET_AT, Version, incompatible,
};
