//! Makes empty overlays, and recognises them.
//!
//! ```text
//! cluster 0  header | 1  refcount table | 2  refcount block | 3…  L1 table, all zero: everything comes from below
//! ```
//!
//! The store writes overlays itself, without a library: an overlay has four clusters, which go
//! through the store's one file-system seam like every other byte.

use std::io::{self, Read};

use sandtree_disk::qcow2::{ClusterSize, Layout};

use super::header;
use crate::Error;

pub(super) const CLUSTER: u64 = 1 << 16;
/// How much of the disk one L2 table describes: a cluster full of 8-byte entries.
pub(super) const L2_SPAN: u64 = CLUSTER / 8 * CLUSTER;
const L1_OFFSET: u64 = 3 * CLUSTER;
const SECTOR: u64 = 512;
/// Far below the size whose L1 table one refcount block can count.
const MAX_BYTES: u64 = 64 << 40;

/// The bytes of an empty overlay for a disk of `disk_bytes`.
pub fn empty(disk_bytes: u64) -> Result<Vec<u8>, Error> {
    check_size(disk_bytes).map_err(|rule| Error::DiskSize {
        bytes: disk_bytes,
        rule,
    })?;
    let l1_entries = disk_bytes.div_ceil(L2_SPAN);
    let layout = Layout {
        cluster: ClusterSize::KIB_64,
        size: disk_bytes,
        l1_entries: l1_entries as u32,
        l1_offset: L1_OFFSET,
        refcount_table_offset: CLUSTER,
        refcount_table_clusters: 1,
    };
    let mut bytes = vec![0; (L1_OFFSET + l1_entries * 8) as usize];
    put(&mut bytes, 0, &layout.to_header());
    put(&mut bytes, CLUSTER, &(2 * CLUSTER).to_be_bytes());
    for cluster in 0..3 + (l1_entries * 8).div_ceil(CLUSTER) {
        put(&mut bytes, 2 * CLUSTER + cluster * 2, &1u16.to_be_bytes());
    }
    Ok(bytes)
}

/// Whether an overlay is empty, so that every cluster comes from below. A file that is not an
/// overlay is not empty.
pub(crate) fn is_empty(file: &mut dyn Read) -> io::Result<bool> {
    match l1_table(file) {
        Ok(table) => Ok(table.is_some_and(|table| table.iter().all(|byte| *byte == 0))),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}

/// The L1 table, if it is in the place where [`empty`] puts it.
fn l1_table(file: &mut dyn Read) -> io::Result<Option<Vec<u8>>> {
    let mut start = [0; header::LEN];
    file.read_exact(&mut start)?;
    let Ok(layout) = header::parse(&start) else {
        return Ok(None);
    };
    if layout.l1_offset != L1_OFFSET || header::check_l1_size(&layout).is_err() {
        return Ok(None);
    }
    let between = L1_OFFSET - header::LEN as u64;
    io::copy(&mut file.take(between), &mut io::sink())?;
    let mut table = vec![0; layout.l1_entries as usize * 8];
    file.read_exact(&mut table)?;
    Ok(Some(table))
}

fn put(bytes: &mut [u8], offset: u64, value: &[u8]) {
    let offset = offset as usize;
    bytes[offset..offset + value.len()].copy_from_slice(value);
}

/// Checks the size of a disk. The error is the broken rule.
pub(crate) fn check_size(bytes: u64) -> Result<(), &'static str> {
    match bytes {
        0 => Err("it must not be empty"),
        _ if bytes > MAX_BYTES => Err("the limit is 64 TiB"),
        _ if !bytes.is_multiple_of(SECTOR) => Err("it must be a multiple of 512"),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::check::{Verdict, bytes as check};

    #[test]
    fn an_empty_overlay_of_any_size_is_clean() {
        for disk_bytes in [
            512,
            1 << 20,
            512 << 20,
            (512 << 20) + 512,
            2 << 30,
            5 << 40,
            64 << 40,
        ] {
            assert_eq!(
                check(&empty(disk_bytes).unwrap()).unwrap(),
                Verdict::Clean { leaked_clusters: 0 }
            );
        }
    }

    #[test]
    fn an_overlay_with_a_table_is_not_empty() {
        let bytes = empty(1 << 30).unwrap();
        assert!(is_empty(&mut &bytes[..]).unwrap());
        let mut used = bytes.clone();
        *used.last_mut().unwrap() = 1;
        for other in [
            &used[..],
            &bytes[..bytes.len() - 1],
            &bytes[..50],
            b"",
            &[7; 1 << 20],
        ] {
            assert!(!is_empty(&mut &other[..]).unwrap());
        }
    }

    #[test]
    fn invalid_disk_sizes_are_refused() {
        for disk_bytes in [0, 1, 513, (64 << 40) + 512, u64::MAX] {
            assert!(
                matches!(empty(disk_bytes), Err(Error::DiskSize { .. })),
                "{disk_bytes}"
            );
        }
    }
}
