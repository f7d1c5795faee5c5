//! Memory layers: the pages of guest memory that one capture took, in one immutable file.
//!
//! ```text
//! header page | data pages, in the order of their runs | run table
//! ```
//!
//! A state's memory is a stack of layers over zeros, bottom first; for each page the newest layer
//! that has it wins. A layer has a page as data or as zero, and says nothing about the others.
//! [`plan`] returns which part of which file is mapped where; [`fold`] makes one layer of many,
//! [`flatten`] one plain file.
//!
//! Always: a file without a valid header is no layer, and the header is written last. Nothing is
//! synced here: the code that publishes a layer syncs it. Memory used is bounded by the number of
//! runs and pieces of 1 MiB, never by the size of the guest.
//!
//! Deliberately absent: a digest of the data pages. A layer is mapped without being read; sealing
//! and importing read it whole.

mod below;
mod fold;
mod layer;
mod plan;
#[cfg(test)]
mod tests;
mod writer;

pub use below::{Below, Changed};
pub use fold::{Gaps, MAX_FOLDED_RUNS, flatten, fold};
pub(crate) use layer::check_ram;
pub use layer::{Layer, MAX_RAM_BYTES, MAX_RUNS};
pub use plan::{coalesce, plan};
pub use writer::MemoryWriter;

pub use crate::damage::memory::{Damage, RunKind};

/// The unit of every offset, length and run.
pub const PAGE: u64 = 4096;

/// How much is read or written at once.
const PIECE: usize = 1 << 20;

/// Neighbouring pages of guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageRun {
    pub first: u64,
    pub count: u64,
}

impl PageRun {
    /// The page behind the last one.
    pub fn end(&self) -> u64 {
        self.first + self.count
    }
}

/// Pages whose content is in the layer's file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DataRun {
    pub pages: PageRun,
    pub file_offset: u64,
}

/// Pages that come from one place of one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mapping {
    pub first_page: u64,
    pub pages: u64,
    /// Index into the layers that were planned, bottom first.
    pub layer: usize,
    pub file_offset: u64,
}

impl Mapping {
    fn run(&self) -> PageRun {
        PageRun {
            first: self.first_page,
            count: self.pages,
        }
    }

    fn end(&self) -> u64 {
        self.first_page + self.pages
    }
}

/// Neighbouring pages that are all zero, or all not.
enum Stretch<'a> {
    Zero { pages: u64 },
    Data(&'a [u8]),
}

/// Cuts whole pages where zero pages begin and end.
fn stretches(bytes: &[u8]) -> impl Iterator<Item = Stretch<'_>> {
    // Comparing slices is `memcmp`: vectors wide, and it ends at the first byte that differs.
    let is_zero = |page: &[u8]| page == [0; PAGE as usize];
    let mut rest = bytes;
    std::iter::from_fn(move || {
        let mut pages = rest.chunks(PAGE as usize);
        let zero = is_zero(pages.next()?);
        let count = 1 + pages.take_while(|page| is_zero(page) == zero).count();
        let (stretch, behind) = rest.split_at(count * PAGE as usize);
        rest = behind;
        Some(if zero {
            Stretch::Zero {
                pages: count as u64,
            }
        } else {
            Stretch::Data(stretch)
        })
    })
}
