//! Inodes: everything about a file except its name and its bytes.

use super::error::Error;
use super::node::Kind;
use crate::ext4::format::{BLOCK_FIELD_BYTES, OLD_INODE_BYTES, inode_flag};
use crate::fields::Le;

#[derive(Debug, Clone)]
pub struct Inode {
    pub number: u32,
    pub kind: Kind,
    pub mode: u16,
    pub uid: u32,
    pub gid: u32,
    pub links: u16,
    /// In bytes, for every kind.
    pub size: u64,
    pub modified_unix_s: i64,
    pub modified_ns: u32,
    /// When it was created; `None` if the inode has no room for that.
    pub born_unix_ns: Option<i64>,
    flags: u32,
    pub(super) block_field: [u8; BLOCK_FIELD_BYTES],
    /// The block with the extended attributes that did not fit into the inode; 0 for none.
    pub(super) xattr_block: u64,
    /// The bytes after the fields: extended attributes.
    pub(super) behind_fields: Box<[u8]>,
}

/// How many bits of a directory's size are used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DirSizes {
    /// 32.
    Small,
    /// 64, with the feature `large_dir`.
    Large,
}

impl Inode {
    /// Parses an inode. The upper half of a directory's size counts only with [`DirSizes::Large`].
    pub(super) fn parse(number: u32, bytes: &[u8], dir_sizes: DirSizes) -> Result<Self, Error> {
        let fields = Le(bytes);
        let mode = fields.u16(0);
        let kind = kind(mode)
            .ok_or_else(|| Error::damaged(format!("inode {number} is in use but has no type")))?;
        let has_large_size = match kind {
            Kind::File => true,
            Kind::Directory => dir_sizes == DirSizes::Large,
            _ => false,
        };
        let extra_fields = usize::from(fields.u16(OLD_INODE_BYTES));
        let behind_fields = bytes.get(OLD_INODE_BYTES + extra_fields..);
        let mut block_field = [0; BLOCK_FIELD_BYTES];
        block_field.copy_from_slice(&bytes[40..40 + BLOCK_FIELD_BYTES]);
        let modified_extra = if extra_fields >= 12 {
            fields.u32(136)
        } else {
            0
        };
        let born_unix_ns = (extra_fields >= 24).then(|| {
            let extra = fields.u32(148);
            let seconds = i64::from(fields.u32(144).cast_signed()) + (i64::from(extra & 3) << 32);
            seconds
                .saturating_mul(1_000_000_000)
                .saturating_add(i64::from(extra >> 2))
        });
        Ok(Self {
            number,
            kind,
            mode: mode & 0o7777,
            uid: u32::from(fields.u16(120)) << 16 | u32::from(fields.u16(2)),
            gid: u32::from(fields.u16(122)) << 16 | u32::from(fields.u16(24)),
            links: fields.u16(26),
            size: if has_large_size {
                fields.halves(4, 108)
            } else {
                fields.u32(4).into()
            },
            // Two more bits than 32, for times after 2038.
            modified_unix_s: i64::from(fields.u32(16).cast_signed())
                + (i64::from(modified_extra & 3) << 32),
            modified_ns: modified_extra >> 2,
            born_unix_ns,
            flags: fields.u32(32),
            block_field,
            xattr_block: fields.halves48(104, 118),
            behind_fields: behind_fields.unwrap_or_default().into(),
        })
    }

    pub(super) fn has_extents(&self) -> bool {
        self.flags & inode_flag::EXTENTS != 0
    }

    /// Its content is inside the inode.
    pub(super) fn has_inline_data(&self) -> bool {
        self.flags & inode_flag::INLINE_DATA != 0
    }

    /// Its target is stored in the field for block numbers.
    pub(super) fn is_short_symlink(&self) -> bool {
        let fits = self.kind == Kind::Symlink && self.size < BLOCK_FIELD_BYTES as u64;
        fits && !self.has_extents() && !self.has_inline_data()
    }

    /// Its content is in blocks outside the inode.
    pub(super) fn has_blocks(&self) -> bool {
        let can = matches!(self.kind, Kind::File | Kind::Directory | Kind::Symlink);
        can && !self.has_inline_data() && !self.is_short_symlink()
    }

    /// The major and minor number of a device.
    pub fn device(&self) -> Option<(u32, u32)> {
        if !matches!(self.kind, Kind::CharDevice | Kind::BlockDevice) {
            return None;
        }
        let fields = Le(&self.block_field);
        Some(match (fields.u32(0), fields.u32(4)) {
            (0, new) => (
                (new & 0xf_ff00) >> 8,
                (new & 0xff) | ((new >> 12) & 0xf_ff00),
            ),
            (old, _) => ((old >> 8) & 0xff, old & 0xff),
        })
    }
}

fn kind(mode: u16) -> Option<Kind> {
    Some(match mode >> 12 {
        0o10 => Kind::File,
        0o4 => Kind::Directory,
        0o12 => Kind::Symlink,
        0o2 => Kind::CharDevice,
        0o6 => Kind::BlockDevice,
        0o1 => Kind::Fifo,
        0o14 => Kind::Socket,
        _ => return None,
    })
}
