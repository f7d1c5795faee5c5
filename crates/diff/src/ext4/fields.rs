//! Numbers in structures. A structure that ends before a number is one of an older kind, and the
//! number is 0.

/// ext4 itself counts from the little end.
#[derive(Debug, Clone, Copy)]
pub(super) struct Le<'a>(pub &'a [u8]);

impl Le<'_> {
    pub(super) fn u8(self, at: usize) -> u8 {
        u8::from_le_bytes(array(self.0, at))
    }

    pub(super) fn u16(self, at: usize) -> u16 {
        u16::from_le_bytes(array(self.0, at))
    }

    pub(super) fn u32(self, at: usize) -> u32 {
        u32::from_le_bytes(array(self.0, at))
    }

    /// A number in two halves of 32 bits.
    pub(super) fn halves(self, low: usize, high: usize) -> u64 {
        u64::from(self.u32(high)) << 32 | u64::from(self.u32(low))
    }

    /// A number of 48 bits, the upper 16 elsewhere.
    pub(super) fn halves48(self, low: usize, high: usize) -> u64 {
        u64::from(self.u16(high)) << 32 | u64::from(self.u32(low))
    }
}

/// Its journal counts from the big end.
#[derive(Debug, Clone, Copy)]
pub(super) struct Be<'a>(pub &'a [u8]);

impl Be<'_> {
    pub(super) fn u16(self, at: usize) -> u16 {
        u16::from_be_bytes(array(self.0, at))
    }

    pub(super) fn u32(self, at: usize) -> u32 {
        u32::from_be_bytes(array(self.0, at))
    }
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let found = at.checked_add(N).and_then(|end| bytes.get(at..end));
    found
        .and_then(|found| found.try_into().ok())
        .unwrap_or([0; N])
}
