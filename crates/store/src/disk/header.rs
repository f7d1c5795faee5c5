//! Decides which qcow2 headers are accepted: only those of our own overlays.
//!
//! An overlay has a header of version 3 without anything optional. QEMU adds nothing to it.

use sandtree_disk::qcow2::{
    HEADER_BYTES, Header, HeaderError, Layout, MAX_L1_BYTES, Version, incompatible,
};

use crate::damage::disk::{Damage, require};

/// How many bytes of an overlay are needed to check its header.
pub(crate) const LEN: usize = HEADER_BYTES;
/// Smaller clusters would need more memory for a check.
const MIN_CLUSTER_BITS: u32 = 16;

/// Refuses every header that our overlays never have, so that the other checks need to know only
/// one kind of file.
pub(crate) fn parse(bytes: &[u8; LEN]) -> Result<Layout, Damage> {
    let header = Header::parse(bytes).map_err(not_a_header)?;
    require(header.version == Version::V3, Damage::Version(2))?;
    check_features(header.features.incompatible)?;
    check_plain(&header)?;
    let layout = header.layout;
    let bits = layout.cluster.bits();
    require(bits >= MIN_CLUSTER_BITS, Damage::ClusterBits(bits))?;
    Ok(layout)
}

fn not_a_header(error: HeaderError) -> Damage {
    match error {
        HeaderError::Short => Damage::Short,
        HeaderError::NotQcow2 => Damage::NotQcow2,
        HeaderError::Version(version) => Damage::Version(version),
        HeaderError::Length(_) => Damage::Unexpected(OTHER_LENGTH),
        HeaderError::ClusterBits(bits) => Damage::ClusterBits(bits),
    }
}

const OTHER_LENGTH: &str = "a header of another length";

fn check_features(incompatible: u64) -> Result<(), Damage> {
    let has = |feature| incompatible & feature != 0;
    require(!has(incompatible::CORRUPT), Damage::MarkedCorrupt)?;
    require(!has(incompatible::DIRTY), Damage::MarkedDirty)?;
    require(incompatible == 0, Damage::Feature(incompatible))
}

fn check_plain(header: &Header) -> Result<(), Damage> {
    let features = &header.features;
    let refused = [
        (header.backing_offset != 0, "a backing file name"),
        (header.encryption != 0, "encryption"),
        (header.snapshots != 0, "internal snapshots"),
        (
            !header.has_16_bit_refcounts(),
            "refcounts of other than 16 bits",
        ),
        (
            features.compatible != 0 || features.autoclear != 0,
            "optional features",
        ),
        (!header.has_v3_length(), OTHER_LENGTH),
        (header.has_extensions(), "header extensions"),
    ];
    match refused.into_iter().find(|(is_refused, _)| *is_refused) {
        Some((_, what)) => Err(Damage::Unexpected(what)),
        None => Ok(()),
    }
}

/// The L1 table must cover the disk, and be small enough for memory.
pub(crate) fn check_l1_size(layout: &Layout) -> Result<(), Damage> {
    let entries = u64::from(layout.l1_entries);
    let covers = layout.l1_entries_needed() <= entries;
    require(covers && entries * 8 <= MAX_L1_BYTES, Damage::L1Size)
}
