//! Making an empty overlay.
//!
//! ```text
//! cluster 0  header | 1  refcount table | 2  refcount block | 3…  L1 table, all zero: everything comes from below
//! ```
//!
//! Written by ourselves rather than by a library: it is four clusters, and this way they go through the store's one
//! file-system seam like every other byte.

use super::header::Header;
use crate::Error;

pub(super) const CLUSTER_BITS: u32 = 16;
pub(super) const CLUSTER: u64 = 1 << CLUSTER_BITS;
/// What one L1 entry spans: one cluster full of 8-byte L2 entries.
pub(super) const L2_SPAN: u64 = CLUSTER / 8 * CLUSTER;
const L1_OFFSET: u64 = 3 * CLUSTER;
const SECTOR: u64 = 512;
/// Far below what one refcount block can count.
const MAX_BYTES: u64 = 64 << 40;

/// The bytes of an overlay that a guest sees as a disk of `disk_bytes`.
pub fn empty(disk_bytes: u64) -> Result<Vec<u8>, Error> {
    check_size(disk_bytes)?;
    let l1_entries = disk_bytes.div_ceil(L2_SPAN);
    let header = Header {
        cluster_bits: CLUSTER_BITS,
        size: disk_bytes,
        l1_entries: l1_entries as u32,
        l1_offset: L1_OFFSET,
        refcount_table_offset: CLUSTER,
        refcount_table_clusters: 1,
    };
    let mut bytes = vec![0; (L1_OFFSET + l1_entries * 8) as usize];
    put(&mut bytes, 0, &header.to_bytes());
    put(&mut bytes, CLUSTER, &(2 * CLUSTER).to_be_bytes());
    for cluster in 0..3 + (l1_entries * 8).div_ceil(CLUSTER) {
        put(&mut bytes, 2 * CLUSTER + cluster * 2, &1u16.to_be_bytes());
    }
    Ok(bytes)
}

fn put(bytes: &mut [u8], offset: u64, value: &[u8]) {
    let offset = offset as usize;
    bytes[offset..offset + value.len()].copy_from_slice(value);
}

fn check_size(bytes: u64) -> Result<(), Error> {
    let rule = match bytes {
        0 => "it must hold something",
        _ if bytes > MAX_BYTES => "64 TiB is the most",
        _ if !bytes.is_multiple_of(SECTOR) => "it must be a multiple of 512",
        _ => return Ok(()),
    };
    Err(Error::DiskSize { bytes, rule })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::check::{Verdict, bytes as check};

    #[test]
    fn an_empty_overlay_of_any_size_is_clean() {
        for disk_bytes in [512, 1 << 20, 512 << 20, (512 << 20) + 512, 2 << 30, 5 << 40, 64 << 40] {
            assert_eq!(check(&empty(disk_bytes).unwrap()).unwrap(), Verdict::Clean { leaked_clusters: 0 });
        }
    }

    #[test]
    fn impossible_sizes_are_refused() {
        for disk_bytes in [0, 1, 513, (64 << 40) + 512, u64::MAX] {
            assert!(matches!(empty(disk_bytes), Err(Error::DiskSize { .. })), "{disk_bytes}");
        }
    }
}
