//! One header block of an archive.

use super::number;

pub(super) const BLOCK: usize = 512;

pub(super) type Bad = &'static str;

/// A block whose checksum is right.
pub(super) struct Header {
    block: [u8; BLOCK],
}

impl Header {
    pub fn new(block: [u8; BLOCK]) -> Result<Self, Bad> {
        let stated = number::unsigned(&block[148..156])?;
        let counted = |range: std::ops::Range<usize>| block[range].iter();
        let others = || counted(0..148).chain(counted(156..BLOCK));
        let spaces = 8 * u64::from(b' ');
        let sum = spaces + others().map(|byte| u64::from(*byte)).sum::<u64>();
        // Some old programs sum signed bytes.
        let signed = spaces.cast_signed()
            + others()
                .map(|byte| i64::from(byte.cast_signed()))
                .sum::<i64>();
        if stated != sum && stated.cast_signed() != signed {
            return Err("the checksum of a header is wrong");
        }
        Ok(Self { block })
    }

    pub fn kind(&self) -> u8 {
        self.block[156]
    }

    /// The name, including the prefix field of ustar.
    pub fn name(&self) -> Vec<u8> {
        let name = text(&self.block[..100]);
        let prefix = match (&self.block[257..263], &self.block[508..512]) {
            (b"ustar\0", b"tar\0") => text(&self.block[345..476]),
            (b"ustar\0", _) => text(&self.block[345..500]),
            _ => &[],
        };
        if prefix.is_empty() {
            name.to_vec()
        } else {
            [prefix, b"/", name].concat()
        }
    }

    pub fn link(&self) -> Vec<u8> {
        text(&self.block[157..257]).to_vec()
    }

    /// The permissions. In some archives, higher bits contain the file type.
    pub fn mode(&self) -> Result<u16, Bad> {
        Ok((number::unsigned(&self.block[100..108])? & 0o7777) as u16)
    }

    pub fn uid(&self) -> Result<u32, Bad> {
        number::id(&self.block[108..116])
    }

    pub fn gid(&self) -> Result<u32, Bad> {
        number::id(&self.block[116..124])
    }

    pub fn bytes(&self) -> Result<u64, Bad> {
        number::unsigned(&self.block[124..136])
    }

    pub fn modified_s(&self) -> Result<i64, Bad> {
        number::field(&self.block[136..148])
    }

    pub fn major(&self) -> Result<u32, Bad> {
        number::id(&self.block[329..337])
    }

    pub fn minor(&self) -> Result<u32, Bad> {
        number::id(&self.block[337..345])
    }

    /// The first part of the sparse map of a member of type `S`, and whether more follows.
    pub fn old_sparse(&self) -> (&[u8], bool) {
        (&self.block[386..482], self.block[482] != 0)
    }

    pub fn old_sparse_bytes(&self) -> Result<u64, Bad> {
        number::unsigned(&self.block[483..495])
    }
}

/// The text before the first NUL.
pub(super) fn text(field: &[u8]) -> &[u8] {
    let end = field.iter().position(|byte| *byte == 0);
    &field[..end.unwrap_or(field.len())]
}
