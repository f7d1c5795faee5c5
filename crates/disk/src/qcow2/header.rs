//! The header of a qcow2 file, big-endian.
//!
//! ```text
//!   0 magic  4 version  8 backing offset  16 backing length  20 cluster bits  24 size  32 encryption  36 L1 entries
//!  40 L1 offset  48 refcount table offset  56 refcount table clusters  60 snapshots  64 snapshots offset
//!  from version 3 on: 72 incompatible  80 compatible  88 autoclear features  96 refcount order  100 header length
//!  in longer headers: 104 compression type; after the header: extensions, ended by eight zeros
//! ```

use std::ops::RangeInclusive;

use thiserror::Error as ThisError;

use crate::fields::Be;

pub const MAGIC: [u8; 4] = *b"QFI\xfb";
/// How many bytes of a file are enough to parse its header: version 3, and eight bytes more for the
/// compression type or the end of extensions.
pub const HEADER_BYTES: usize = LEN_V3 as usize + 8;
/// The place of the L1 table's offset in the header.
pub const L1_OFFSET_AT: u64 = 40;
/// The place of the refcount table's offset in the header.
pub const REFCOUNT_TABLE_OFFSET_AT: u64 = 48;
/// QEMU's limit for the L1 table.
pub const MAX_L1_BYTES: u64 = 32 << 20;

const LEN_V2: usize = 72;
const LEN_V3: u32 = 104;
/// The refcounts of version 2, and QEMU's default: 2^4 bits each.
const REFCOUNT_ORDER_16_BITS: u32 = 4;
/// QEMU's limits.
const CLUSTER_BITS: RangeInclusive<u32> = 9..=21;

/// Incompatible features: a reader that does not know one must refuse the image.
pub mod incompatible {
    pub const DIRTY: u64 = 1;
    pub const CORRUPT: u64 = 1 << 1;
    pub const EXTERNAL_DATA: u64 = 1 << 2;
    pub const COMPRESSION_TYPE: u64 = 1 << 3;
    pub const EXTENDED_L2: u64 = 1 << 4;
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    /// Without feature bits and zero clusters.
    V2,
    V3,
}

/// The size of clusters: 512 bytes to 2 MiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClusterSize {
    bits: u32,
}

/// The sizes and places of disk and tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    pub cluster: ClusterSize,
    /// The size of the disk.
    pub size: u64,
    pub l1_entries: u32,
    pub l1_offset: u64,
    pub refcount_table_offset: u64,
    pub refcount_table_clusters: u32,
}

/// The feature bits; all zero in version 2.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Features {
    pub incompatible: u64,
    pub compatible: u64,
    pub autoclear: u64,
}

/// A decoded header. Only its own structure is checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    pub version: Version,
    pub layout: Layout,
    /// The offset of the backing file's name; 0 for none.
    pub backing_offset: u64,
    pub backing_bytes: u32,
    /// The encryption method; 0 for none.
    pub encryption: u32,
    /// The number of internal snapshots.
    pub snapshots: u32,
    pub features: Features,
    /// Refcounts have 2^order bits.
    pub refcount_order: u32,
    /// The length of the header.
    pub bytes: u32,
    /// The eight bytes after the fields of version 3.
    behind: [u8; 8],
}

/// Why the bytes are not a header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ThisError)]
pub enum HeaderError {
    #[error("it is shorter than its header")]
    Short,
    #[error("it is not a qcow2 file")]
    NotQcow2,
    #[error("its qcow2 version is {0}")]
    Version(u32),
    #[error("its header has an invalid length of {0} bytes")]
    Length(u32),
    #[error("its clusters have an invalid size of 2^{0} bytes")]
    ClusterBits(u32),
}

impl ClusterSize {
    pub const KIB_64: Self = Self { bits: 16 };

    fn new(bits: u32) -> Option<Self> {
        CLUSTER_BITS.contains(&bits).then_some(Self { bits })
    }

    pub fn bits(self) -> u32 {
        self.bits
    }

    pub fn bytes(self) -> u64 {
        1 << self.bits
    }

    /// How much of the disk one L2 table describes: a cluster full of 8-byte entries.
    pub fn l2_span(self) -> u64 {
        self.bytes() / 8 * self.bytes()
    }
}

impl Layout {
    /// How many L1 entries the size of the disk requires.
    pub fn l1_entries_needed(&self) -> u64 {
        self.size.div_ceil(self.cluster.l2_span())
    }

    /// A header of version 3 with refcounts of 16 bits and without anything optional. QEMU adds
    /// nothing to such a header when it writes to the file.
    pub fn to_header(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        put(0, &MAGIC);
        put(4, &3u32.to_be_bytes());
        put(20, &self.cluster.bits.to_be_bytes());
        put(24, &self.size.to_be_bytes());
        put(36, &self.l1_entries.to_be_bytes());
        put(40, &self.l1_offset.to_be_bytes());
        put(48, &self.refcount_table_offset.to_be_bytes());
        put(56, &self.refcount_table_clusters.to_be_bytes());
        put(96, &REFCOUNT_ORDER_16_BITS.to_be_bytes());
        put(100, &LEN_V3.to_be_bytes());
        bytes
    }
}

impl Header {
    /// Parses the beginning of a file: [`HEADER_BYTES`] of it, or all of a shorter one.
    pub fn parse(start: &[u8]) -> Result<Self, HeaderError> {
        let fields = Be(start);
        if start.len() < LEN_V2 {
            return Err(HeaderError::Short);
        }
        if !start.starts_with(&MAGIC) {
            return Err(HeaderError::NotQcow2);
        }
        let header = match fields.u32(4) {
            2 => Self::decode(fields, Version::V2)?,
            3 if start.len() < LEN_V3 as usize => return Err(HeaderError::Short),
            3 => Self::decode(fields, Version::V3)?.with_v3(fields),
            other => return Err(HeaderError::Version(other)),
        };
        let is_v3 = header.version == Version::V3;
        if is_v3 && (header.bytes < LEN_V3 || !header.bytes.is_multiple_of(8)) {
            return Err(HeaderError::Length(header.bytes));
        }
        Ok(header)
    }

    fn decode(fields: Be<'_>, version: Version) -> Result<Self, HeaderError> {
        let cluster_bits = fields.u32(20);
        let cluster = ClusterSize::new(cluster_bits);
        Ok(Self {
            version,
            layout: Layout {
                cluster: cluster.ok_or(HeaderError::ClusterBits(cluster_bits))?,
                size: fields.u64(24),
                l1_entries: fields.u32(36),
                l1_offset: fields.u64(L1_OFFSET_AT as usize),
                refcount_table_offset: fields.u64(REFCOUNT_TABLE_OFFSET_AT as usize),
                refcount_table_clusters: fields.u32(56),
            },
            backing_offset: fields.u64(8),
            backing_bytes: fields.u32(16),
            encryption: fields.u32(32),
            snapshots: fields.u32(60),
            features: Features::default(),
            refcount_order: REFCOUNT_ORDER_16_BITS,
            bytes: LEN_V2 as u32,
            behind: [0; 8],
        })
    }

    fn with_v3(self, fields: Be<'_>) -> Self {
        Self {
            features: Features {
                incompatible: fields.u64(72),
                compatible: fields.u64(80),
                autoclear: fields.u64(88),
            },
            refcount_order: fields.u32(96),
            bytes: fields.u32(100),
            behind: fields.u64(LEN_V3 as usize).to_be_bytes(),
            ..self
        }
    }

    /// Whether the header has exactly the fields of version 3.
    pub fn has_v3_length(&self) -> bool {
        self.bytes == LEN_V3
    }

    pub fn has_16_bit_refcounts(&self) -> bool {
        self.refcount_order == REFCOUNT_ORDER_16_BITS
    }

    /// Whether extensions follow a header of version 3 without further fields.
    pub fn has_extensions(&self) -> bool {
        self.has_v3_length() && self.behind != [0; 8]
    }

    /// The number of the compression type: 0 is deflate, 1 is zstd.
    pub fn compression_type(&self) -> u8 {
        let has_type = self.features.incompatible & incompatible::COMPRESSION_TYPE != 0;
        if has_type && self.bytes > LEN_V3 {
            self.behind[0]
        } else {
            0
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYOUT: Layout = Layout {
        cluster: ClusterSize::KIB_64,
        size: 1 << 30,
        l1_entries: 2,
        l1_offset: 3 << 16,
        refcount_table_offset: 1 << 16,
        refcount_table_clusters: 1,
    };

    #[test]
    fn a_written_header_is_parsed_again() {
        let header = Header::parse(&LAYOUT.to_header()).unwrap();
        assert_eq!((header.version, header.layout), (Version::V3, LAYOUT));
        assert_eq!(header.features, Features::default());
        assert!(header.has_16_bit_refcounts() && !header.has_extensions());
        assert_eq!((header.backing_offset, header.compression_type()), (0, 0));
    }

    #[test]
    fn bytes_that_are_not_a_header_are_refused() {
        let good = LAYOUT.to_header();
        let with = |at: usize, value: u32| {
            let mut bytes = good;
            bytes[at..at + 4].copy_from_slice(&value.to_be_bytes());
            Header::parse(&bytes).unwrap_err()
        };
        assert_eq!(with(0, 0), HeaderError::NotQcow2);
        assert_eq!(with(4, 4), HeaderError::Version(4));
        assert_eq!(with(20, 8), HeaderError::ClusterBits(8));
        assert_eq!(with(20, 22), HeaderError::ClusterBits(22));
        assert_eq!(with(100, 96), HeaderError::Length(96));
        assert_eq!(with(100, 108), HeaderError::Length(108));
        for len in [0, 4, 71, 72, 103] {
            assert_eq!(
                Header::parse(&good[..len]),
                Err(HeaderError::Short),
                "{len}"
            );
        }
        assert!(Header::parse(&good[..104]).is_ok());
    }

    #[test]
    fn version_2_has_no_features() {
        let mut bytes = LAYOUT.to_header();
        bytes[7] = 2;
        bytes[72..].fill(0xff);
        let header = Header::parse(&bytes[..80]).unwrap();
        assert_eq!((header.version, header.layout), (Version::V2, LAYOUT));
        assert_eq!(header.features, Features::default());
        assert!(header.has_16_bit_refcounts());
        assert_eq!(header.compression_type(), 0);
    }
}
