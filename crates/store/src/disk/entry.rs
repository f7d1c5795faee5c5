//! The entries of a qcow2's tables.

use super::check::Damage;
use super::header::require;

const OFFSET_BITS: u64 = 0x00ff_ffff_ffff_fe00;
/// Only this entry refers to the cluster: it may be written in place.
pub(super) const COPIED: u64 = 1 << 63;
pub(super) const COMPRESSED: u64 = 1 << 62;
pub(super) const READS_AS_ZERO: u64 = 1;

/// What an L2 entry says about one cluster of the guest's disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum L2Entry {
    /// It comes from below.
    Below,
    /// It is zero, whatever is below. A place may be set aside for it.
    Zero(Option<u64>),
    /// It is in the file, there.
    Data(u64),
}

/// Where the L2 table is, if there is one. `at` is where the entry stands, for the message.
pub(super) fn l1(at: u64, entry: u64) -> Result<Option<u64>, Damage> {
    require(
        entry & !(OFFSET_BITS | COPIED) == 0,
        Damage::Reserved { at },
    )?;
    Ok(place(entry))
}

pub(super) fn l2(at: u64, entry: u64) -> Result<L2Entry, Damage> {
    require(
        entry & COMPRESSED == 0,
        Damage::Unexpected("compressed clusters"),
    )?;
    require(
        entry & !(OFFSET_BITS | COPIED | READS_AS_ZERO) == 0,
        Damage::Reserved { at },
    )?;
    Ok(match (place(entry), entry & READS_AS_ZERO) {
        (place, READS_AS_ZERO) => L2Entry::Zero(place),
        (Some(offset), _) => L2Entry::Data(offset),
        (None, _) => L2Entry::Below,
    })
}

fn place(entry: u64) -> Option<u64> {
    Some(entry & OFFSET_BITS).filter(|offset| *offset != 0)
}
