//! Recognises the content of a part of a disk by magic numbers near its beginning.

use sandtree_disk::ext4::probe;

use super::copy::is_zero;
use super::error::DiskError;
use super::source::Source;

/// Enough for the farthest magic number, that of btrfs.
const START_BYTES: usize = 68 << 10;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Ext4,
    /// Not supported, but Linux can have its root on it.
    OtherRoot(&'static str),
    /// Never the root of a Linux system.
    NotRoot(&'static str),
    Zeros,
    Unknown,
}

impl Kind {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Ext4 => "ext4",
            Self::OtherRoot(name) | Self::NotRoot(name) => name,
            Self::Zeros => "only zeros",
            Self::Unknown => "unknown content",
        }
    }
}

const MAGICS: [(usize, &[u8], Kind); 18] = [
    (0, b"XFSB", Kind::OtherRoot("xfs")),
    (65536 + 64, b"_BHRfS_M", Kind::OtherRoot("btrfs")),
    (0, b"LUKS\xba\xbe", Kind::OtherRoot("LUKS")),
    (536, b"LVM2 001", Kind::OtherRoot("LVM")),
    (
        4096,
        b"\xfc\x4e\x2b\xa9",
        Kind::OtherRoot("a member of a RAID"),
    ),
    (1024, b"\x10\x20\xf5\xf2", Kind::OtherRoot("f2fs")),
    (1024, b"\xe2\xe1\xf5\xe0", Kind::OtherRoot("erofs")),
    (4096, b"\xc6\x85\x73\xf6", Kind::OtherRoot("bcachefs")),
    (0, b"hsqs", Kind::OtherRoot("squashfs")),
    (32769, b"CD001", Kind::OtherRoot("iso9660")),
    (4086, b"SWAPSPACE2", Kind::NotRoot("swap")),
    (65526, b"SWAPSPACE2", Kind::NotRoot("swap")),
    (3, b"NTFS    ", Kind::NotRoot("ntfs")),
    (3, b"EXFAT   ", Kind::NotRoot("exfat")),
    (54, b"FAT12   ", Kind::NotRoot("vfat")),
    (54, b"FAT16   ", Kind::NotRoot("vfat")),
    (82, b"FAT32   ", Kind::NotRoot("vfat")),
    (54, b"FAT     ", Kind::NotRoot("vfat")),
];

/// The beginning of a part of a disk, padded with zeros if the part is shorter.
pub(super) fn start(disk: &Source, start: u64, bytes: u64) -> Result<Vec<u8>, DiskError> {
    let mut buffer = vec![0; START_BYTES];
    let len = bytes.min(START_BYTES as u64) as usize;
    disk.read(start, &mut buffer[..len])?;
    Ok(buffer)
}

/// Recognises the content by its first 68 KiB.
pub(super) fn of(start: &[u8]) -> Kind {
    if probe::has_magic(start) {
        return Kind::Ext4;
    }
    let found = MAGICS
        .iter()
        .find(|(at, magic, _)| start[*at..].starts_with(magic));
    match found {
        Some((_, _, kind)) => *kind,
        None if is_zero(start) => Kind::Zeros,
        None => Kind::Unknown,
    }
}
