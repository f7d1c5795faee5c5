//! Encodes inodes.

use super::extents::Map;
use super::layout::{BLOCK, EXTRA_INODE_BYTES, INODE_BYTES, XATTR_BODY_BYTES, put};
use super::tree::{Device, Kind, Time};
use crate::crc32c::crc32c;
use crate::ext4::format::{BLOCK_FIELD_BYTES, OLD_INODE_BYTES};

pub(super) const RESIZE: u32 = 7;
pub(super) const JOURNAL: u32 = 8;
/// The first inode that is not reserved.
pub(super) const FIRST: u32 = 11;

const SECTORS_PER_BLOCK: u64 = BLOCK as u64 / 512;
/// The times that 34 bits can express: two more than the signed 32 of old inodes.
const SECONDS: std::ops::RangeInclusive<i64> = -(1 << 31)..=(1 << 34) - (1 << 31) - 1;

/// The bits of a mode for a directory, and for a file.
pub(super) const KIND_DIR: u16 = 0o040_000;
pub(super) const KIND_FILE: u16 = 0o100_000;

/// The content of an inode, and its place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Shape {
    pub bytes: u64,
    /// The number of its blocks, including those of tables and attributes.
    pub blocks: u64,
    pub flags: u32,
    pub map: Map,
    /// The block with extended attributes; 0 for none.
    pub xattr_block: u64,
}

impl Default for Shape {
    fn default() -> Self {
        Self {
            bytes: 0,
            blocks: 0,
            flags: 0,
            map: [0; BLOCK_FIELD_BYTES],
            xattr_block: 0,
        }
    }
}

/// Everything that an inode records.
#[derive(Debug)]
pub(super) struct Inode {
    /// Including the bits of the kind.
    pub mode: u16,
    pub uid: u32,
    pub gid: u32,
    pub links: u16,
    pub modified: Time,
    pub shape: Shape,
    /// The extended attributes that fit into the inode.
    pub body: [u8; XATTR_BODY_BYTES],
}

impl Inode {
    /// Encodes the inode. `seed` is the start value of its checksum, as [`seed`] returns it.
    pub(super) fn encode(&self, seed: u32) -> [u8; INODE_BYTES] {
        let mut bytes = [0; INODE_BYTES];
        self.put_fields(&mut bytes);
        self.put_times(&mut bytes);
        bytes[OLD_INODE_BYTES + EXTRA_INODE_BYTES..].copy_from_slice(&self.body);
        let checksum = crc32c(seed, &bytes);
        put(&mut bytes, 124, (checksum as u16).to_le_bytes());
        put(&mut bytes, 130, ((checksum >> 16) as u16).to_le_bytes());
        bytes
    }

    pub(super) fn is_dir(&self) -> bool {
        self.mode & 0o170_000 == KIND_DIR
    }

    fn put_fields(&self, bytes: &mut [u8]) {
        let Shape {
            bytes: size,
            blocks,
            flags,
            map,
            xattr_block,
        } = &self.shape;
        let sectors = blocks * SECTORS_PER_BLOCK;
        put(bytes, 0, self.mode.to_le_bytes());
        put(bytes, 2, (self.uid as u16).to_le_bytes());
        put(bytes, 4, (*size as u32).to_le_bytes());
        put(bytes, 24, (self.gid as u16).to_le_bytes());
        put(bytes, 26, self.links.to_le_bytes());
        put(bytes, 28, (sectors as u32).to_le_bytes());
        put(bytes, 32, flags.to_le_bytes());
        put(bytes, 40, *map);
        put(bytes, 104, (*xattr_block as u32).to_le_bytes());
        put(bytes, 108, ((size >> 32) as u32).to_le_bytes());
        put(bytes, 116, ((sectors >> 32) as u16).to_le_bytes());
        put(bytes, 118, ((xattr_block >> 32) as u16).to_le_bytes());
        put(bytes, 120, ((self.uid >> 16) as u16).to_le_bytes());
        put(bytes, 122, ((self.gid >> 16) as u16).to_le_bytes());
        let extra_bytes = (EXTRA_INODE_BYTES as u16).to_le_bytes();
        put(bytes, OLD_INODE_BYTES, extra_bytes);
    }

    /// Writes the times of access, change, modification and creation, which are all equal.
    fn put_times(&self, bytes: &mut [u8]) {
        let (seconds, extra) = encode_time(self.modified);
        for (at, extra_at) in [(8, 140), (12, 132), (16, 136), (144, 148)] {
            put(bytes, at, seconds);
            put(bytes, extra_at, extra);
        }
    }
}

/// Encodes a time: seconds, and their upper bits together with the nanoseconds. A time out of range
/// becomes the nearest possible one.
fn encode_time(time: Time) -> ([u8; 4], [u8; 4]) {
    let seconds = time.seconds.clamp(*SECONDS.start(), *SECONDS.end());
    let nanoseconds = if seconds == time.seconds {
        time.nanoseconds.min(999_999_999)
    } else {
        0
    };
    let epoch = ((seconds - i64::from(seconds as i32)) >> 32) as u32;
    (
        (seconds as u32).to_le_bytes(),
        (epoch | nanoseconds << 2).to_le_bytes(),
    )
}

/// Encodes the numbers of a device. `None`: they are too large for Linux.
pub(super) fn device_map(device: Device) -> Option<Map> {
    let Device { major, minor } = device;
    let mut map = [0; BLOCK_FIELD_BYTES];
    match (major, minor) {
        (..=0xff, ..=0xff) => put(&mut map, 0, (major << 8 | minor).to_le_bytes()),
        (..=0xfff, ..=0xf_ffff) => {
            put(
                &mut map,
                4,
                (minor & 0xff | major << 8 | (minor & !0xff) << 12).to_le_bytes(),
            );
        }
        _ => return None,
    }
    Some(map)
}

/// The bits of a mode for a kind.
pub(super) fn kind_bits(kind: &Kind) -> u16 {
    match kind {
        Kind::Dir(_) => KIND_DIR,
        Kind::File(_) => KIND_FILE,
        Kind::Symlink(_) => 0o120_000,
        Kind::CharDevice(_) => 0o020_000,
        Kind::BlockDevice(_) => 0o060_000,
        Kind::Fifo => 0o010_000,
        Kind::Socket => 0o140_000,
    }
}

/// The start value for the checksums of an inode, its directory blocks and its extents.
pub(super) fn seed(fs_seed: u32, number: u32) -> u32 {
    let generation = [0; 4];
    crc32c(crc32c(fs_seed, &number.to_le_bytes()), &generation)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encoded(seconds: i64, nanoseconds: u32) -> (u32, u32) {
        let (seconds, extra) = encode_time(Time {
            seconds,
            nanoseconds,
        });
        (u32::from_le_bytes(seconds), u32::from_le_bytes(extra))
    }

    #[test]
    fn times_are_encoded_and_clamped() {
        assert_eq!(encoded(0, 5), (0, 5 << 2));
        assert_eq!(encoded(-1, 0), (0xffff_ffff, 0));
        assert_eq!(encoded(1 << 31, 0), (0x8000_0000, 1));
        assert_eq!(encoded(i64::MAX, 7), (0x7fff_ffff, 3));
        assert_eq!(encoded(i64::MIN, 7), (0x8000_0000, 0));
    }

    #[test]
    fn devices_have_an_old_and_a_new_form() {
        let words = |major, minor| {
            let map = device_map(Device { major, minor })?;
            Some([0, 4].map(|at| u32::from_le_bytes(map[at..at + 4].try_into().unwrap())))
        };
        assert_eq!(words(1, 3), Some([0x103, 0]));
        assert_eq!(words(259, 0x12345), Some([0, 0x1231_0345]));
        assert_eq!(words(4096, 0), None);
        assert_eq!(words(0, 1 << 20), None);
    }
}
