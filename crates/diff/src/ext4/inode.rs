//! Inodes: what a file is, apart from its name and its bytes.

use super::fields::Le;
use crate::{Error, Kind};

pub(super) const ROOT: u32 = 2;

const FLAG_EXTENTS: u32 = 0x8_0000;
const FLAG_INLINE_DATA: u32 = 0x1000_0000;
/// The bytes for 15 block numbers, or for the root of an extent tree, or for a little content.
pub(super) const BLOCK_FIELD: usize = 60;

#[derive(Debug, Clone)]
pub(crate) struct Inode {
    pub number: u32,
    pub kind: Kind,
    pub mode: u16,
    pub uid: u32,
    pub gid: u32,
    pub links: u16,
    /// In bytes; of directories, too.
    pub size: u64,
    pub modified_unix_s: i64,
    pub modified_ns: u32,
    flags: u32,
    pub(super) block_field: [u8; BLOCK_FIELD],
    /// Where extended attributes are that did not fit into the inode; 0 for none.
    pub(super) xattr_block: u64,
    /// What follows the fields: extended attributes.
    pub(super) behind_fields: Box<[u8]>,
}

impl Inode {
    /// Of an inode's bytes. The upper half of a directory's size means something only with
    /// `large_dirs`.
    pub(super) fn parse(number: u32, bytes: &[u8], large_dirs: bool) -> Result<Self, Error> {
        let fields = Le(bytes);
        let mode = fields.u16(0);
        let kind = kind(mode)
            .ok_or_else(|| Error::damaged(format!("inode {number} is in use and has no kind")))?;
        let has_large_size = kind == Kind::File || (kind == Kind::Directory && large_dirs);
        let extra_fields = usize::from(fields.u16(128));
        let mut block_field = [0; BLOCK_FIELD];
        block_field.copy_from_slice(&bytes[40..40 + BLOCK_FIELD]);
        let modified_extra = if extra_fields >= 12 {
            fields.u32(136)
        } else {
            0
        };
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
            // Two bits more than 32, so that time goes on after 2038.
            modified_unix_s: i64::from(fields.u32(16).cast_signed())
                + (i64::from(modified_extra & 3) << 32),
            modified_ns: modified_extra >> 2,
            flags: fields.u32(32),
            block_field,
            xattr_block: fields.halves48(104, 118),
            behind_fields: bytes.get(128 + extra_fields..).unwrap_or_default().into(),
        })
    }

    pub(super) fn has_extents(&self) -> bool {
        self.flags & FLAG_EXTENTS != 0
    }

    /// Its content is in the inode itself.
    pub(super) fn has_inline_data(&self) -> bool {
        self.flags & FLAG_INLINE_DATA != 0
    }

    /// Its target is where block numbers would be.
    pub(super) fn is_short_symlink(&self) -> bool {
        let fits = self.kind == Kind::Symlink && self.size < BLOCK_FIELD as u64;
        fits && !self.has_extents() && !self.has_inline_data()
    }

    /// Has bytes outside of the inode.
    pub(super) fn has_blocks(&self) -> bool {
        let can = matches!(self.kind, Kind::File | Kind::Directory | Kind::Symlink);
        can && !self.has_inline_data() && !self.is_short_symlink()
    }

    /// Of a device: major and minor number.
    pub(crate) fn device(&self) -> Option<(u32, u32)> {
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
