//! Inodes as bytes.

use sandtree_diff::crc32c;

use super::extents::{MAP_BYTES, Map};
use super::layout::{BLOCK, INODE_BYTES, put};
use super::xattr::BODY_BYTES;
use crate::{Device, Kind, Time};

pub(super) const ROOT: u32 = 2;
pub(super) const RESIZE: u32 = 7;
pub(super) const JOURNAL: u32 = 8;
/// Those before it belong to the file system.
pub(super) const FIRST: u32 = 11;

/// Of the fields after the first 128 bytes.
pub(super) const EXTRA_BYTES: usize = 32;
const OLD_BYTES: usize = 128;
const SECTORS_PER_BLOCK: u64 = BLOCK as u64 / 512;
/// Two more bits than the signed 32 of old.
const SECONDS: std::ops::RangeInclusive<i64> = -(1 << 31)..=(1 << 34) - (1 << 31) - 1;

/// The bits of a mode that tell a directory, and a file.
pub(super) const KIND_DIR: u16 = 0o040_000;
pub(super) const KIND_FILE: u16 = 0o100_000;

pub(super) mod flag {
    pub const INDEX: u32 = 0x1000;
    pub const EXTENTS: u32 = 0x8_0000;
}

/// Where the content of an inode is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Shape {
    pub bytes: u64,
    /// All that it has, also those that say where others are.
    pub blocks: u64,
    pub flags: u32,
    pub map: Map,
    /// 0 if there is none.
    pub xattr_block: u64,
}

impl Default for Shape {
    fn default() -> Self {
        Self {
            bytes: 0,
            blocks: 0,
            flags: 0,
            map: [0; MAP_BYTES],
            xattr_block: 0,
        }
    }
}

/// All that an inode says.
#[derive(Debug)]
pub(super) struct Inode {
    /// With the bits of the kind.
    pub mode: u16,
    pub uid: u32,
    pub gid: u32,
    pub links: u16,
    pub modified: Time,
    pub shape: Shape,
    /// Extended attributes that fit in.
    pub body: [u8; BODY_BYTES],
}

impl Inode {
    /// `seed` begins its checksum, as [`seed`] tells.
    pub(super) fn encode(&self, seed: u32) -> [u8; INODE_BYTES] {
        let mut bytes = [0; INODE_BYTES];
        self.put_fields(&mut bytes);
        self.put_times(&mut bytes);
        bytes[OLD_BYTES + EXTRA_BYTES..].copy_from_slice(&self.body);
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
        put(bytes, OLD_BYTES, (EXTRA_BYTES as u16).to_le_bytes());
    }

    /// Of access, change, modification and creation, which are all the same.
    fn put_times(&self, bytes: &mut [u8]) {
        let (seconds, extra) = encode_time(self.modified);
        for (at, extra_at) in [(8, 140), (12, 132), (16, 136), (144, 148)] {
            put(bytes, at, seconds);
            put(bytes, extra_at, extra);
        }
    }
}

/// Seconds, and their upper bits with the nanoseconds. What cannot be told becomes the nearest that
/// can.
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

/// The field that tells a device, unless its numbers are too large for Linux.
pub(super) fn device_map(device: Device) -> Option<Map> {
    let Device { major, minor } = device;
    let mut map = [0; MAP_BYTES];
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

/// The bits of a mode that tell the kind.
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

/// What the checksums of an inode, its directory blocks and its extents begin with.
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
    fn times_of_four_centuries() {
        assert_eq!(encoded(0, 5), (0, 5 << 2));
        assert_eq!(encoded(-1, 0), (0xffff_ffff, 0));
        assert_eq!(encoded(1 << 31, 0), (0x8000_0000, 1));
        assert_eq!(encoded(i64::MAX, 7), (0x7fff_ffff, 3));
        assert_eq!(encoded(i64::MIN, 7), (0x8000_0000, 0));
    }

    #[test]
    fn devices_in_the_old_and_the_new_form() {
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
