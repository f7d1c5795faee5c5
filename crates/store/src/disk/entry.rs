//! Decides which table entries of an overlay are accepted: compressed clusters are refused.

use sandtree_disk::qcow2::{self, ClusterSize, L1Entry, Version};

use crate::damage::disk::Damage;

/// The meaning of an L2 entry for one cluster of the guest's disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum L2Entry {
    /// The cluster comes from the layer below.
    Below,
    /// The cluster is zero, whatever is below. A place may be allocated for it.
    Zero(Option<u64>),
    /// The cluster is in the file, at this offset.
    Data(u64),
}

/// The offset of the L2 table, if it exists. `at` is the place of the entry, for errors.
pub(super) fn l1(at: u64, entry: u64) -> Result<Option<u64>, Damage> {
    match L1Entry::parse(entry) {
        Ok(L1Entry::Unallocated) => Ok(None),
        Ok(L1Entry::Table(offset)) => Ok(Some(offset)),
        Err(_) => Err(Damage::Reserved { at }),
    }
}

pub(super) fn l2(at: u64, entry: u64, cluster: ClusterSize) -> Result<L2Entry, Damage> {
    let parsed = qcow2::L2Entry::parse(entry, Version::V3, cluster);
    let parsed = parsed.map_err(|_| Damage::Reserved { at })?;
    match parsed {
        qcow2::L2Entry::Unallocated => Ok(L2Entry::Below),
        qcow2::L2Entry::Zero { allocated } => Ok(L2Entry::Zero(allocated)),
        qcow2::L2Entry::Data(offset) => Ok(L2Entry::Data(offset)),
        qcow2::L2Entry::Compressed(_) => Err(Damage::Unexpected("compressed clusters")),
    }
}
