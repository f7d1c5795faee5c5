//! The constants that identify every written file system.

use super::tree::Time;
use crate::crc32c::crc32c;

/// The creation date of the file system.
pub(super) const EPOCH: u32 = 1_700_000_000;
pub(super) const EPOCH_TIME: Time = Time {
    seconds: EPOCH as i64,
    nanoseconds: 0,
};
pub(super) const UUID: [u8; 16] = 0x7d0e4bd5_8b1e_4a52_9a6c_2f1c5a7e0001_u128.to_be_bytes();
pub(super) const HASH_SEED: [u8; 16] = 0x7d0e4bd5_8b1e_4a52_9a6c_2f1c5a7e0002_u128.to_be_bytes();
pub(super) const LABEL: &[u8; 13] = b"sandtree-root";

/// The start value of all checksums except the superblock's.
pub(super) fn seed() -> u32 {
    crc32c(!0, &UUID)
}
