//! The entries of a qcow2's tables.

use super::header::Header;
use crate::disk::Qcow2Damage;

const OFFSET_BITS: u64 = 0x00ff_ffff_ffff_fe00;
/// Only this entry refers to the cluster. Nothing to a reader.
const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;
const READS_AS_ZERO: u64 = 1;
const SECTOR: u64 = 512;

/// What an L2 entry says about one cluster of the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cluster {
    Nothing,
    /// Whatever place is set aside for it.
    Zero,
    Data(u64),
    Packed(Packed),
}

/// Where a packed cluster is, in whole sectors: it may end before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Packed {
    pub offset: u64,
    pub bytes: u64,
}

/// Where the L2 table is, if there is one. `at` is where the entry stands, for the message.
pub(super) fn l1(at: u64, entry: u64) -> Result<Option<u64>, Qcow2Damage> {
    if entry & !(OFFSET_BITS | COPIED) != 0 {
        return Err(Qcow2Damage::Reserved { at });
    }
    Ok(Some(place(entry)).filter(|offset| *offset != 0))
}

pub(super) fn l2(at: u64, entry: u64, header: &Header) -> Result<Cluster, Qcow2Damage> {
    if entry & COMPRESSED != 0 {
        return Ok(Cluster::Packed(packed(entry, header.cluster_bits)));
    }
    let zero_bit = if header.has_zero_clusters {
        READS_AS_ZERO
    } else {
        0
    };
    if entry & !(OFFSET_BITS | COPIED | zero_bit) != 0 {
        return Err(Qcow2Damage::Reserved { at });
    }
    let offset = place(entry);
    if !offset.is_multiple_of(header.cluster_bytes()) {
        return Err(Qcow2Damage::Unaligned { at, offset });
    }
    Ok(match offset {
        _ if entry & READS_AS_ZERO != 0 => Cluster::Zero,
        0 => Cluster::Nothing,
        _ => Cluster::Data(offset),
    })
}

/// Whether a cluster has to be read, or looked at because its entry is not as it should be.
pub(super) fn has_bytes(entry: u64, header: &Header) -> bool {
    !matches!(l2(0, entry, header), Ok(Cluster::Nothing | Cluster::Zero))
}

pub(super) fn place(entry: u64) -> u64 {
    entry & OFFSET_BITS
}

/// The larger the clusters, the more bits count the sectors that follow the first, and the fewer
/// are left for the place.
fn packed(entry: u64, cluster_bits: u32) -> Packed {
    let offset_bits = 62 - (cluster_bits - 8);
    let offset = entry & ((1 << offset_bits) - 1);
    let more_sectors = (entry & (COMPRESSED - 1)) >> offset_bits;
    Packed {
        offset,
        bytes: (more_sectors + 1) * SECTOR - offset % SECTOR,
    }
}
