//! The two file systems of a comparison: which inodes can be skipped, and whether two files have
//! equal bytes.
//!
//! Always: an inode or piece that is reported as equal is equal. Without knowledge about the disks,
//! everything is read.

use std::ops::Range;

use sandtree_disk::ext4::read::{Error, FileReader, FileSystem, Inode, Next, XattrPlace};

/// How much of two files is compared at once.
const PIECE_BYTES: u64 = 256 << 10;

/// Both file systems, and the ranges in which they can differ.
pub(crate) struct Pair<'b> {
    pub a: FileSystem<'b>,
    pub b: FileSystem<'b>,
    /// Sorted and not overlapping. None: they can differ anywhere.
    changed: Option<Vec<Range<u64>>>,
}

impl<'b> Pair<'b> {
    pub(crate) fn new(
        a: FileSystem<'b>,
        b: FileSystem<'b>,
        changed: Option<&[Range<u64>]>,
    ) -> Self {
        let known = changed.filter(|_| a.is_laid_out_like(&b));
        Self {
            a,
            b,
            changed: known.map(sorted),
        }
    }

    /// The inode with this number, if the inode and everything it refers to are equal on both
    /// disks.
    pub(crate) fn untouched(&self, number: u32) -> Result<Option<Inode>, Error> {
        if self.changed.is_none() {
            return Ok(None);
        }
        let offset = self.a.inode_offset(number)?;
        if offset != self.b.inode_offset(number)? || self.can_differ(offset, 1) {
            return Ok(None);
        }
        let inode = self.a.inode(number)?;
        let is_untouched =
            self.are_xattrs_untouched(&inode) && self.is_content_untouched(&inode)?;
        Ok(Some(inode).filter(|_| is_untouched))
    }

    fn are_xattrs_untouched(&self, inode: &Inode) -> bool {
        match self.a.xattr_place(inode) {
            XattrPlace::Inode => true,
            XattrPlace::Block(block) => !self.can_blocks_differ(block..block.saturating_add(1)),
            XattrPlace::Elsewhere => false,
        }
    }

    fn is_content_untouched(&self, inode: &Inode) -> Result<bool, Error> {
        let mut blocks = self.a.content_blocks(inode)?.into_iter();
        Ok(blocks.all(|blocks| !self.can_blocks_differ(blocks)))
    }

    /// Whether a range of bytes can differ. If anything is known, `a` and `b` have blocks of one
    /// size.
    fn can_differ(&self, offset: u64, bytes: u64) -> bool {
        let size = self.a.block_bytes();
        let first = offset / size;
        let end = offset.saturating_add(bytes).div_ceil(size);
        self.can_blocks_differ(first..end.max(first))
    }

    fn can_blocks_differ(&self, blocks: Range<u64>) -> bool {
        let Some(changed) = &self.changed else {
            return true;
        };
        let size = self.a.block_bytes();
        let overlaps = |blocks: Range<u64>| {
            let start = blocks.start.saturating_mul(size);
            let end = blocks.end.saturating_mul(size);
            let next = changed.partition_point(|range| range.end <= start);
            changed.get(next).is_some_and(|range| range.start < end)
        };
        overlaps(blocks.clone())
            || !self
                .a
                .logged(blocks.clone())
                .eq(self.b.logged(blocks.clone()))
            || self
                .a
                .logged(blocks)
                .any(|(_, logged)| overlaps(logged.at..logged.at + 1))
    }

    /// Whether two files of equal size have equal bytes.
    pub(crate) fn is_content_same(&self, x: &Inode, y: &Inode) -> Result<bool, Error> {
        let mut left = FileReader::of(&self.a, x.clone())?;
        let mut right = FileReader::of(&self.b, y.clone())?;
        let mut pieces = [Vec::new(), Vec::new()];
        loop {
            let in_a = left.next();
            let in_b = right.next();
            let bytes = in_a.bytes().min(in_b.bytes());
            if bytes == 0 {
                return Ok(in_a == in_b);
            }
            if self.is_piece_same(in_a, in_b, bytes) {
                left.skip(bytes);
                right.skip(bytes);
                continue;
            }
            let bytes = bytes.min(PIECE_BYTES) as usize;
            pieces.iter_mut().for_each(|piece| piece.resize(bytes, 0));
            left.read_exactly(&mut pieces[0])?;
            right.read_exactly(&mut pieces[1])?;
            if pieces[0] != pieces[1] {
                return Ok(false);
            }
        }
    }

    /// Whether the next bytes are known to be equal without reading them.
    fn is_piece_same(&self, in_a: Next, in_b: Next, bytes: u64) -> bool {
        match (in_a, in_b) {
            (Next::Zeros(_), Next::Zeros(_)) => true,
            (Next::Stored { offset: x, .. }, Next::Stored { offset: y, .. }) => {
                x == y && !self.can_differ(x, bytes)
            }
            _ => false,
        }
    }
}

/// The same ranges, sorted, joined where they touch, and without empty ones.
fn sorted(ranges: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut all: Vec<_> = ranges
        .iter()
        .filter(|range| !range.is_empty())
        .cloned()
        .collect();
    all.sort_by_key(|range| range.start);
    let mut apart: Vec<Range<u64>> = Vec::with_capacity(all.len());
    for range in all {
        match apart.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => apart.push(range),
        }
    }
    apart
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_sorted_and_joined() {
        assert_eq!(sorted(&[8..9, 0..4, 1..2, 5..5, 4..6]), [0..6, 8..9]);
    }
}
