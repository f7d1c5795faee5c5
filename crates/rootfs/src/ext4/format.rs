//! What every image has in common.

use sandtree_diff::crc32c;

use crate::Time;

/// The date of the file system itself.
pub(super) const EPOCH: u32 = 1_700_000_000;
pub(super) const EPOCH_TIME: Time = Time {
    seconds: EPOCH as i64,
    nanoseconds: 0,
};
pub(super) const UUID: [u8; 16] = 0x7d0e4bd5_8b1e_4a52_9a6c_2f1c5a7e0001_u128.to_be_bytes();
pub(super) const HASH_SEED: [u8; 16] = 0x7d0e4bd5_8b1e_4a52_9a6c_2f1c5a7e0002_u128.to_be_bytes();
pub(super) const LABEL: &[u8; 13] = b"sandtree-root";

/// What all checksums but that of the superblock begin with.
pub(super) fn seed() -> u32 {
    crc32c(!0, &UUID)
}
