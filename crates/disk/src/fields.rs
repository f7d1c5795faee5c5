//! Numbers at fixed places of a structure.
//!
//! Reading never panics: a number after the end of the structure reads as 0, because a shorter
//! structure is one of an older version.

/// Little-endian numbers: ext4 and partition tables.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Le<'a>(pub &'a [u8]);

impl Le<'_> {
    pub(crate) fn u8(self, at: usize) -> u8 {
        u8::from_le_bytes(array(self.0, at))
    }

    pub(crate) fn u16(self, at: usize) -> u16 {
        u16::from_le_bytes(array(self.0, at))
    }

    pub(crate) fn u32(self, at: usize) -> u32 {
        u32::from_le_bytes(array(self.0, at))
    }

    pub(crate) fn u64(self, at: usize) -> u64 {
        u64::from_le_bytes(array(self.0, at))
    }

    /// A number of 64 bits whose halves are in different places.
    pub(crate) fn halves(self, low: usize, high: usize) -> u64 {
        u64::from(self.u32(high)) << 32 | u64::from(self.u32(low))
    }

    /// A number of 48 bits whose upper 16 bits are in another place.
    pub(crate) fn halves48(self, low: usize, high: usize) -> u64 {
        u64::from(self.u16(high)) << 32 | u64::from(self.u32(low))
    }
}

/// Big-endian numbers: ext4's journal and qcow2.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Be<'a>(pub &'a [u8]);

impl Be<'_> {
    pub(crate) fn u16(self, at: usize) -> u16 {
        u16::from_be_bytes(array(self.0, at))
    }

    pub(crate) fn u32(self, at: usize) -> u32 {
        u32::from_be_bytes(array(self.0, at))
    }

    pub(crate) fn u64(self, at: usize) -> u64 {
        u64::from_be_bytes(array(self.0, at))
    }
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let found = at.checked_add(N).and_then(|end| bytes.get(at..end));
    found
        .and_then(|found| found.try_into().ok())
        .unwrap_or([0; N])
}
