//! The header of a qcow2 file, big-endian.
//!
//! ```text
//!   0 magic  4 version  8 backing offset  16 backing length  20 cluster bits  24 size  32 encryption  36 L1 entries
//!  40 L1 offset  48 refcount table offset  56 refcount table clusters  60 snapshots  64 snapshots offset
//!  from version 3 on: 72 incompatible  80 compatible  88 autoclear features  96 refcount order  100 header length
//!  in longer headers: 104 compression type
//! ```

use crate::disk::source::Raw;
use crate::disk::{DiskError, Qcow2Damage, Qcow2Refused};

pub(in crate::disk) const MAGIC: [u8; 4] = *b"QFI\xfb";
/// Where the L1 table's offset stands.
pub(super) const L1_OFFSET_AT: u64 = 40;

const LEN_V2: usize = 72;
const LEN_V3: usize = 104;
/// With the compression type.
const LEN_READ: usize = 112;
/// QEMU's own limits.
const MAX_L1_BYTES: u64 = 32 << 20;
const MAX_NAME_BYTES: u32 = 1023;

const DIRTY: u64 = 1;
const CORRUPT: u64 = 1 << 1;
const EXTERNAL_DATA: u64 = 1 << 2;
const COMPRESSION_TYPE: u64 = 1 << 3;
const EXTENDED_L2: u64 = 1 << 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Compression {
    Deflate,
    Zstd,
}

/// What of a header is needed to read the disk.
#[derive(Debug, Clone, Copy)]
pub(super) struct Header {
    /// Of the disk.
    pub bytes: u64,
    pub cluster_bits: u32,
    pub l1_offset: u64,
    l1_entries: u32,
    pub compression: Compression,
    /// Clusters may be said to be zero.
    pub has_zero_clusters: bool,
}

impl Header {
    pub(super) fn read(file: &Raw) -> Result<Self, DiskError> {
        let mut bytes = [0; LEN_READ];
        let len = file.bytes().min(LEN_READ as u64) as usize;
        file.read(0, &mut bytes[..len])?;
        if len < LEN_V2 {
            return Err(Qcow2Damage::Short.into());
        }
        let fields = Be(&bytes);
        let version = fields.u32(4);
        let compression = match version {
            2 => Compression::Deflate,
            3 => check_v3(&fields, len)?,
            _ => return Err(Qcow2Refused::Version(version).into()),
        };
        check_alone(&fields, file)?;
        let cluster_bits = fields.u32(20);
        if !(9..=21).contains(&cluster_bits) {
            return Err(Qcow2Damage::ClusterBits(cluster_bits).into());
        }
        Ok(Self {
            bytes: fields.u64(24),
            cluster_bits,
            l1_offset: fields.u64(L1_OFFSET_AT as usize),
            l1_entries: fields.u32(36),
            compression,
            has_zero_clusters: version >= 3,
        })
    }

    /// The L1 table must cover the disk, and be of a size that can be in memory.
    pub(super) fn check_l1(&self) -> Result<(), Qcow2Damage> {
        let needed = self.l1_entries_needed();
        let fine = needed <= self.l1_entries.into() && needed <= MAX_L1_BYTES / 8;
        if fine {
            Ok(())
        } else {
            Err(Qcow2Damage::L1Entries {
                entries: self.l1_entries,
                bytes: self.bytes,
            })
        }
    }

    pub(super) fn l1_entries_needed(&self) -> u64 {
        self.bytes.div_ceil(self.l2_span())
    }

    pub(super) fn cluster_bytes(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// How much of the disk one L2 table is about.
    pub(super) fn l2_span(&self) -> u64 {
        self.cluster_bytes() / 8 * self.cluster_bytes()
    }
}

fn check_v3(fields: &Be<'_>, len: usize) -> Result<Compression, DiskError> {
    if len < LEN_V3 {
        return Err(Qcow2Damage::Short.into());
    }
    let incompatible = fields.u64(72);
    check_features(incompatible)?;
    let header_bytes = fields.u32(100);
    if header_bytes < LEN_V3 as u32 || !header_bytes.is_multiple_of(8) {
        return Err(Qcow2Damage::HeaderBytes(header_bytes).into());
    }
    if header_bytes == LEN_V3 as u32 || incompatible & COMPRESSION_TYPE == 0 {
        return Ok(Compression::Deflate);
    }
    match fields.0[LEN_V3] {
        0 => Ok(Compression::Deflate),
        1 => Ok(Compression::Zstd),
        other => Err(Qcow2Refused::Compression(other).into()),
    }
}

fn check_features(incompatible: u64) -> Result<(), Qcow2Refused> {
    let refused = [
        (CORRUPT, Qcow2Refused::Corrupt),
        (DIRTY, Qcow2Refused::Dirty),
        (EXTERNAL_DATA, Qcow2Refused::ExternalData),
        (EXTENDED_L2, Qcow2Refused::ExtendedL2),
        (!COMPRESSION_TYPE, Qcow2Refused::Features(incompatible)),
    ];
    match refused
        .into_iter()
        .find(|(bits, _)| incompatible & bits != 0)
    {
        Some((_, why)) => Err(why),
        None => Ok(()),
    }
}

/// All of the disk is in this file, and can be read by anybody.
fn check_alone(fields: &Be<'_>, file: &Raw) -> Result<(), DiskError> {
    if fields.u32(32) != 0 {
        return Err(Qcow2Refused::Encryption.into());
    }
    match fields.u64(8) {
        0 => Ok(()),
        offset => {
            Err(Qcow2Refused::BackingFile(backing_name(file, offset, fields.u32(16))?).into())
        }
    }
}

/// As much of the name as there is in the file.
fn backing_name(file: &Raw, offset: u64, len: u32) -> Result<String, DiskError> {
    let len = u64::from(len.min(MAX_NAME_BYTES)).min(file.bytes().saturating_sub(offset));
    let mut name = vec![0; len as usize];
    file.read(offset.min(file.bytes()), &mut name)?;
    Ok(String::from_utf8_lossy(&name).into_owned())
}

struct Be<'a>(&'a [u8; LEN_READ]);

impl Be<'_> {
    fn u32(&self, at: usize) -> u32 {
        u32::from_be_bytes(self.0[at..at + 4].try_into().expect("four bytes"))
    }

    fn u64(&self, at: usize) -> u64 {
        u64::from_be_bytes(self.0[at..at + 8].try_into().expect("eight bytes"))
    }
}
