//! Two file systems side by side: which inodes need not be looked at, and whether two files have
//! the same bytes.
//!
//! Always: what is called untouched or the same is so. Where nothing is known about the disks,
//! everything is read.

use std::ops::Range;

use crate::Error;
use crate::ext4::{Content, FileReader, FileSystem, Inode, Next, XattrPlace};

/// How much of two files is compared at once.
const PIECE_BYTES: u64 = 256 << 10;

/// Both file systems, and what is known about where they can differ.
pub(crate) struct Sides<'b> {
    pub a: FileSystem<'b>,
    pub b: FileSystem<'b>,
    /// Sorted, apart from each other. None: anywhere.
    changed: Option<Vec<Range<u64>>>,
}

impl<'b> Sides<'b> {
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

    /// The inode of this number, if it is the same on both sides with all it refers to.
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
        match self.a.xattr_block(inode) {
            XattrPlace::Inode => true,
            XattrPlace::Block(block) => !self.can_blocks_differ(block, 1),
            XattrPlace::Elsewhere => false,
        }
    }

    fn is_content_untouched(&self, inode: &Inode) -> Result<bool, Error> {
        let Content::Mapped(map) = self.a.content(inode)? else {
            return Ok(true);
        };
        let nodes = map
            .nodes
            .iter()
            .all(|node| !self.can_blocks_differ(*node, 1));
        Ok(nodes
            && map
                .runs
                .iter()
                .all(|run| !self.can_blocks_differ(run.physical, run.blocks)))
    }

    /// In bytes; `a` and `b` have blocks of one size if anything is known.
    fn can_differ(&self, offset: u64, bytes: u64) -> bool {
        let size = self.a.block_bytes();
        let first = offset / size;
        self.can_blocks_differ(
            first,
            offset
                .saturating_add(bytes)
                .div_ceil(size)
                .saturating_sub(first),
        )
    }

    fn can_blocks_differ(&self, first: u64, count: u64) -> bool {
        let Some(changed) = &self.changed else {
            return true;
        };
        let size = self.a.block_bytes();
        let overlaps = |blocks: Range<u64>| {
            let (start, end) = (
                blocks.start.saturating_mul(size),
                blocks.end.saturating_mul(size),
            );
            let next = changed.partition_point(|range| range.end <= start);
            changed.get(next).is_some_and(|range| range.start < end)
        };
        let blocks = first..first.saturating_add(count);
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

    /// Whether two files of one size have the same bytes.
    pub(crate) fn is_content_same(&self, x: &Inode, y: &Inode) -> Result<bool, Error> {
        let mut left = FileReader::of(&self.a, x.clone())?;
        let mut right = FileReader::of(&self.b, y.clone())?;
        let mut pieces = [Vec::new(), Vec::new()];
        loop {
            let (in_a, in_b) = (left.next(), right.next());
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

    /// Known without reading.
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

/// The same ranges, none of them empty, sorted and apart from each other.
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
    fn ranges_in_any_order_become_sorted_and_apart() {
        assert_eq!(sorted(&[8..9, 0..4, 1..2, 5..5, 4..6]), [0..6, 8..9]);
    }
}
