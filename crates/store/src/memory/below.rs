//! Leaves out of a new layer the pages that are as the layers below have them: an idle guest writes
//! many pages without changing them.
//!
//! Always: a page that is left out has, byte for byte, the content that the layers below give it.

use std::fs::File;

use super::layer::read_at;
use super::{Layer, Mapping, PAGE, PageRun, plan};
use crate::Error;

/// The memory that layers make together, with the files to read it from.
#[derive(Debug)]
pub struct Below {
    /// Bottom first.
    files: Vec<File>,
    mappings: Vec<Mapping>,
}

/// Neighbouring pages, and their content.
#[derive(Debug, PartialEq, Eq)]
pub struct Changed<'a> {
    pub first_page: u64,
    pub bytes: &'a [u8],
}

impl Below {
    /// Layers are bottom first.
    pub fn of(layers: Vec<(Layer, File)>) -> Self {
        let mappings = plan(layers.iter().map(|(layer, _)| layer));
        let files = layers.into_iter().map(|(_, file)| file).collect();
        Self { files, mappings }
    }

    /// The parts of whole pages, the first of which is `first_page`, that differ from what is below
    /// them. It reads as much as it is given.
    pub fn changed<'a>(&self, first_page: u64, bytes: &'a [u8]) -> Result<Vec<Changed<'a>>, Error> {
        let pages = PageRun {
            first: first_page,
            count: bytes.len() as u64 / PAGE,
        };
        let old = self.read(pages)?;
        let page = PAGE as usize;
        let mut changed: Vec<Changed<'a>> = Vec::new();
        let mut began = None;
        for at in (0..bytes.len()).step_by(page).chain([bytes.len()]) {
            let differs = at < bytes.len() && bytes[at..at + page] != old[at..at + page];
            if differs {
                began.get_or_insert(at);
            } else if let Some(start) = began.take() {
                changed.push(Changed {
                    first_page: first_page + (start / page) as u64,
                    bytes: &bytes[start..at],
                });
            }
        }
        Ok(changed)
    }

    fn read(&self, pages: PageRun) -> Result<Vec<u8>, Error> {
        let mut bytes = vec![0; (pages.count * PAGE) as usize];
        let begin = self
            .mappings
            .partition_point(|mapping| mapping.end() <= pages.first);
        let within = self.mappings[begin..]
            .iter()
            .take_while(|mapping| mapping.first_page < pages.end());
        for mapping in within {
            let first = mapping.first_page.max(pages.first);
            let end = mapping.end().min(pages.end());
            let into = (first - pages.first) * PAGE..(end - pages.first) * PAGE;
            let offset = mapping.file_offset + (first - mapping.first_page) * PAGE;
            read_at(
                &self.files[mapping.layer],
                &mut bytes[into.start as usize..into.end as usize],
                offset,
            )?;
        }
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::memory::MemoryWriter;

    const RAM_PAGES: u64 = 24;

    /// Pages by their fill byte; 0 is a zero page.
    fn layer(pages: &[(u64, u8)]) -> (Layer, File) {
        let file = tempfile::tempfile().expect("a file can be made");
        let mut writer = MemoryWriter::new(&file, RAM_PAGES * PAGE).expect("it begins");
        for (page, fill) in pages {
            writer
                .append(*page, &[*fill; PAGE as usize])
                .expect("it is written");
        }
        let layer = writer.finish().expect("it is written");
        (layer, file)
    }

    fn filled(fills: &[u8]) -> Vec<u8> {
        fills
            .iter()
            .flat_map(|fill| [*fill; PAGE as usize])
            .collect()
    }

    #[test]
    fn pages_with_the_content_of_the_newest_layer_are_left_out() {
        let below = Below::of(vec![
            layer(&[(2, 1), (3, 1), (4, 1)]),
            layer(&[(3, 9), (4, 0)]),
        ]);
        // As below: page 2, page 3 as in the newer layer, page 4 as zero, and page 6, which no
        // layer has.
        let bytes = filled(&[1, 9, 0, 5, 0]);
        let changed = below.changed(2, &bytes).expect("it is read");
        let expected = Changed {
            first_page: 5,
            bytes: &bytes[3 * PAGE as usize..4 * PAGE as usize],
        };
        assert_eq!(changed, [expected]);
    }

    #[test]
    fn one_byte_makes_a_difference() {
        let below = Below::of(vec![layer(&[(0, 7), (1, 7)])]);
        let mut bytes = filled(&[7, 7]);
        assert_eq!(below.changed(0, &bytes).expect("it is read"), []);
        bytes[2 * PAGE as usize - 1] = 8;
        let changed = below.changed(0, &bytes).expect("it is read");
        assert_eq!(changed.len(), 1);
        assert_eq!(changed[0].first_page, 1);
    }

    #[test]
    fn a_file_that_is_cut_short_is_an_error() {
        let (layer, file) = layer(&[(0, 7)]);
        file.set_len(PAGE + 1).expect("it is cut");
        let below = Below::of(vec![(layer, file)]);
        assert!(below.changed(0, &filled(&[7])).is_err());
    }

    /// Each page is missing, zero, or filled.
    fn pages() -> impl Strategy<Value = Vec<(u64, u8)>> {
        let fill = prop::option::of(0u8..3);
        let numbered = |fills: Vec<Option<u8>>| {
            (0..)
                .zip(fills)
                .filter_map(|(page, fill)| Some((page, fill?)))
                .collect()
        };
        prop::collection::vec(fill, RAM_PAGES as usize).prop_map(numbered)
    }

    proptest! {
        #[test]
        fn layers_and_changed_pages_make_the_captured_memory(
            layers in prop::collection::vec(pages(), 0..4),
            first in 0..RAM_PAGES,
            fills in prop::collection::vec(0u8..3, 1..RAM_PAGES as usize),
        ) {
            let fills = &fills[..fills.len().min((RAM_PAGES - first) as usize)];
            let mut memory = vec![0u8; RAM_PAGES as usize];
            for (page, fill) in layers.iter().flatten() {
                memory[*page as usize] = *fill;
            }
            let below = Below::of(layers.iter().map(|pages| layer(pages)).collect());
            let bytes = filled(fills);
            for changed in below.changed(first, &bytes).expect("it is read") {
                for (number, page) in changed.bytes.chunks(PAGE as usize).enumerate() {
                    let place = changed.first_page as usize + number;
                    prop_assert!(memory[place] != page[0], "page {} has not changed", place);
                    memory[place] = page[0];
                }
            }
            prop_assert_eq!(&memory[first as usize..first as usize + fills.len()], fills);
        }
    }
}
