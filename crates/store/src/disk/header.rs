//! The header of a qcow2 file, version 3: 104 bytes, big-endian, and the end of the extensions
//! behind it.
//!
//! ```text
//!   0 magic  4 version  8 backing offset  16 backing length  20 cluster bits  24 size  32 encryption  36 L1 entries
//!  40 L1 offset  48 refcount table offset  56 refcount table clusters  60 snapshots  64 snapshots offset
//!  72 incompatible  80 compatible  88 autoclear features  96 refcount order  100 header length  104 extensions: none
//! ```
//!
//! QEMU adds nothing to the headers of overlays that it writes for us.

use super::check::Damage;

/// As much as is read: the header, and eight zeros that say that there are no extensions.
pub(crate) const LEN: usize = HEADER_LEN as usize + 8;
const HEADER_LEN: u32 = 104;
const MAGIC: u32 = u32::from_be_bytes(*b"QFI\xfb");
const VERSION: u32 = 3;
/// 2^4 bits per refcount: what QEMU makes by default, and all we read.
const REFCOUNT_ORDER: u32 = 4;

/// QEMU's own limit.
const MAX_L1_BYTES: u64 = 32 << 20;

const DIRTY: u64 = 1;
const CORRUPT: u64 = 2;

/// What of a header describes the tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    pub cluster_bits: u32,
    pub size: u64,
    pub l1_entries: u32,
    pub l1_offset: u64,
    pub refcount_table_offset: u64,
    pub refcount_table_clusters: u32,
}

impl Header {
    pub(crate) fn to_bytes(self) -> [u8; LEN] {
        let mut bytes = [0; LEN];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        put(0, &MAGIC.to_be_bytes());
        put(4, &VERSION.to_be_bytes());
        put(20, &self.cluster_bits.to_be_bytes());
        put(24, &self.size.to_be_bytes());
        put(36, &self.l1_entries.to_be_bytes());
        put(40, &self.l1_offset.to_be_bytes());
        put(48, &self.refcount_table_offset.to_be_bytes());
        put(56, &self.refcount_table_clusters.to_be_bytes());
        put(96, &REFCOUNT_ORDER.to_be_bytes());
        put(100, &HEADER_LEN.to_be_bytes());
        bytes
    }

    /// The L1 table must cover the disk, and be of a size that can be in memory.
    pub(crate) fn check_l1_size(&self) -> Result<(), Damage> {
        let (cluster, entries) = (1u64 << self.cluster_bits, u64::from(self.l1_entries));
        let covers = self.size.div_ceil(cluster / 8 * cluster) <= entries;
        require(covers && entries * 8 <= MAX_L1_BYTES, Damage::L1Size)
    }

    /// Refuses everything our overlays never are, so that the rest of the check needs to know only
    /// one kind of file.
    pub(crate) fn parse(bytes: &[u8; LEN]) -> Result<Self, Damage> {
        let u32_at =
            |at: usize| u32::from_be_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let u64_at =
            |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        require(u32_at(0) == MAGIC, Damage::NotQcow2)?;
        require(u32_at(4) == VERSION, Damage::Version(u32_at(4)))?;
        check_features(u64_at(72))?;
        require(u64_at(8) == 0, Damage::Unexpected("a backing file name"))?;
        require(u32_at(32) == 0, Damage::Unexpected("encryption"))?;
        require(u32_at(60) == 0, Damage::Unexpected("internal snapshots"))?;
        require(
            u32_at(96) == REFCOUNT_ORDER,
            Damage::Unexpected("refcounts of other than 16 bits"),
        )?;
        require(
            u64_at(80) == 0 && u64_at(88) == 0,
            Damage::Unexpected("optional features"),
        )?;
        require(
            u32_at(100) == HEADER_LEN,
            Damage::Unexpected("a header of another length"),
        )?;
        require(u64_at(104) == 0, Damage::Unexpected("header extensions"))?;
        require(
            (16..=21).contains(&u32_at(20)),
            Damage::ClusterBits(u32_at(20)),
        )?;
        Ok(Self {
            cluster_bits: u32_at(20),
            size: u64_at(24),
            l1_entries: u32_at(36),
            l1_offset: u64_at(40),
            refcount_table_offset: u64_at(48),
            refcount_table_clusters: u32_at(56),
        })
    }
}

fn check_features(incompatible: u64) -> Result<(), Damage> {
    require(incompatible & CORRUPT == 0, Damage::MarkedCorrupt)?;
    require(incompatible & DIRTY == 0, Damage::MarkedDirty)?;
    require(incompatible == 0, Damage::Feature(incompatible))
}

pub(super) fn require(fine: bool, damage: Damage) -> Result<(), Damage> {
    if fine { Ok(()) } else { Err(damage) }
}
