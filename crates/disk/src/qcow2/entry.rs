//! The entries of L1 and L2 tables.

use thiserror::Error as ThisError;

use super::header::{ClusterSize, Version};

const OFFSET_BITS: u64 = 0x00ff_ffff_ffff_fe00;
/// The bit of an entry that alone refers to its cluster: the cluster may be written in place.
pub const COPIED: u64 = 1 << 63;
/// The bit of an L2 entry whose cluster is compressed.
pub const COMPRESSED: u64 = 1 << 62;
/// The bit of an L2 entry whose cluster reads as zeros.
pub const READS_AS_ZERO: u64 = 1;
const SECTOR: u64 = 512;

/// An entry has reserved bits set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ThisError)]
#[error("reserved bits are set")]
pub struct Reserved;

/// The meaning of an L1 entry. Offsets are not checked against anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum L1Entry {
    Unallocated,
    /// The offset of an L2 table.
    Table(u64),
}

/// The meaning of an L2 entry for one cluster of the disk. Offsets are not checked against
/// anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum L2Entry {
    /// The cluster comes from the backing file, or reads as zeros.
    Unallocated,
    /// The cluster reads as zeros. A place may be allocated for it.
    Zero {
        allocated: Option<u64>,
    },
    /// The offset of the cluster.
    Data(u64),
    Compressed(Compressed),
}

/// The place of a compressed cluster. Its length is a multiple of sectors; the compressed data may
/// end earlier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Compressed {
    pub offset: u64,
    pub bytes: u64,
}

impl L1Entry {
    pub fn parse(entry: u64) -> Result<Self, Reserved> {
        if entry & !(OFFSET_BITS | COPIED) != 0 {
            return Err(Reserved);
        }
        Ok(offset(entry).map_or(Self::Unallocated, Self::Table))
    }
}

impl L2Entry {
    pub fn parse(entry: u64, version: Version, cluster: ClusterSize) -> Result<Self, Reserved> {
        if entry & COMPRESSED != 0 {
            return Ok(Self::Compressed(Compressed::parse(entry, cluster)));
        }
        let zero_bit = match version {
            Version::V2 => 0,
            Version::V3 => READS_AS_ZERO,
        };
        if entry & !(OFFSET_BITS | COPIED | zero_bit) != 0 {
            return Err(Reserved);
        }
        let offset = offset(entry);
        if entry & READS_AS_ZERO != 0 {
            return Ok(Self::Zero { allocated: offset });
        }
        Ok(offset.map_or(Self::Unallocated, Self::Data))
    }
}

impl Compressed {
    /// The larger the clusters, the more bits of the entry count the sectors after the first, and
    /// the fewer bits are left for the offset.
    fn parse(entry: u64, cluster: ClusterSize) -> Self {
        let offset_bits = 62 - (cluster.bits() - 8);
        let offset = entry & ((1 << offset_bits) - 1);
        let more_sectors = (entry & (COMPRESSED - 1)) >> offset_bits;
        Self {
            offset,
            bytes: (more_sectors + 1) * SECTOR - offset % SECTOR,
        }
    }
}

fn offset(entry: u64) -> Option<u64> {
    Some(entry & OFFSET_BITS).filter(|offset| *offset != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLUSTER: ClusterSize = ClusterSize::KIB_64;

    fn l2(entry: u64) -> Result<L2Entry, Reserved> {
        L2Entry::parse(entry, Version::V3, CLUSTER)
    }

    #[test]
    fn entries_mean_what_the_format_says() {
        assert_eq!(
            L1Entry::parse(COPIED | 0x50000),
            Ok(L1Entry::Table(0x50000))
        );
        assert_eq!(L1Entry::parse(0), Ok(L1Entry::Unallocated));
        assert_eq!(l2(0), Ok(L2Entry::Unallocated));
        assert_eq!(l2(COPIED | 0x50000), Ok(L2Entry::Data(0x50000)));
        assert_eq!(l2(1), Ok(L2Entry::Zero { allocated: None }));
        let allocated = Some(0x50000);
        assert_eq!(l2(COPIED | 0x50001), Ok(L2Entry::Zero { allocated }));
    }

    #[test]
    fn reserved_bits_are_refused() {
        assert_eq!(L1Entry::parse(1), Err(Reserved));
        assert_eq!(L1Entry::parse(COMPRESSED), Err(Reserved));
        assert_eq!(l2(2), Err(Reserved));
        assert_eq!(l2(1 << 56), Err(Reserved));
        assert_eq!(L2Entry::parse(1, Version::V2, CLUSTER), Err(Reserved));
    }

    #[test]
    fn a_compressed_cluster_ends_with_a_sector() {
        let more_sectors = 3;
        let offset = 0x12345;
        let entry = COMPRESSED | more_sectors << 54 | offset;
        let bytes = 4 * 512 - offset % 512;
        assert_eq!(
            l2(entry),
            Ok(L2Entry::Compressed(Compressed { offset, bytes }))
        );
    }
}
