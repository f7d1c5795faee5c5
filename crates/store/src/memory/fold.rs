//! Folding: a stack of layers becomes one layer, or one plain file.
//!
//! Both take a whole stack, from the bottom on. What no layer has is zero there, so zero runs need
//! not be kept and a gap between runs may be filled with zeros.

use std::borrow::Borrow;
use std::fs::File;

use super::layer::read_at;
use super::writer::{refuse_content, write_at};
use super::{
    Layer, Mapping, MemoryWriter, PAGE, PIECE, PageRun, Stretch, coalesce, plan, stretches,
};
use crate::Error;

/// The most runs a folded layer has: each is a mapping in every machine that uses it.
pub const MAX_FOLDED_RUNS: usize = 4096;

/// Writes one layer with the content of all `layers`, bottom first. Its runs are at most
/// [`MAX_FOLDED_RUNS`]; where there were more, the smallest gaps are stored as zero pages.
pub fn fold<F: Borrow<File>>(
    layers: &[(Layer, File)],
    mut out: MemoryWriter<F>,
) -> Result<Layer, Error> {
    require_same_ram(layers, out.ram_bytes())?;
    let mappings = plan(layers.iter().map(|(layer, _)| layer));
    let runs = mappings
        .iter()
        .map(|mapping| PageRun {
            first: mapping.first_page,
            count: mapping.pages,
        })
        .collect();
    let mut source = Source::new(layers);
    let mut mappings = mappings.into_iter().peekable();
    for run in coalesce(runs, MAX_FOLDED_RUNS) {
        let mut written = run.first;
        while let Some(mapping) = mappings.next_if(|mapping| mapping.first_page < run.end()) {
            out.store_zeros(mapping.first_page - written)?;
            source.each_piece(&mapping, |first_page, bytes| {
                out.append_stored(first_page, bytes)
            })?;
            written = mapping.end();
        }
    }
    out.finish()
}

/// Writes all of guest memory into an empty file, which stays sparse where it is zero.
pub fn flatten(layers: &[(Layer, File)], out: &File) -> Result<(), Error> {
    let Some((Layer { ram_bytes, .. }, _)) = layers.first() else {
        return Err(Error::MemorySize {
            bytes: 0,
            rule: "there is no layer",
        });
    };
    require_same_ram(layers, *ram_bytes)?;
    refuse_content(out)?;
    out.set_len(*ram_bytes)
        .map_err(Error::layer_io("make a file for guest memory", *ram_bytes))?;
    let mut source = Source::new(layers);
    for mapping in plan(layers.iter().map(|(layer, _)| layer)) {
        source.each_piece(&mapping, |first_page, bytes| {
            write_sparse(out, first_page * PAGE, bytes)
        })?;
    }
    Ok(())
}

fn require_same_ram(layers: &[(Layer, File)], ram_bytes: u64) -> Result<(), Error> {
    match layers
        .iter()
        .find(|(layer, _)| layer.ram_bytes != ram_bytes)
    {
        Some((layer, _)) => Err(Error::MemorySize {
            bytes: layer.ram_bytes,
            rule: "the other layers have another",
        }),
        None => Ok(()),
    }
}

fn write_sparse(out: &File, mut offset: u64, bytes: &[u8]) -> Result<(), Error> {
    for stretch in stretches(bytes) {
        offset += match stretch {
            Stretch::Zero { pages } => pages * PAGE,
            Stretch::Data(bytes) => {
                write_at(out, bytes, offset)?;
                bytes.len() as u64
            }
        };
    }
    Ok(())
}

/// The data pages of the layers, read a piece at a time.
struct Source<'a> {
    layers: &'a [(Layer, File)],
    piece: Vec<u8>,
}

impl<'a> Source<'a> {
    fn new(layers: &'a [(Layer, File)]) -> Self {
        Self {
            layers,
            piece: vec![0; PIECE],
        }
    }

    /// Calls `write` with the first page and the bytes of each piece.
    fn each_piece(
        &mut self,
        mapping: &Mapping,
        mut write: impl FnMut(u64, &[u8]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let (_, file) = &self.layers[mapping.layer];
        let bytes = mapping.pages * PAGE;
        for done in (0..bytes).step_by(PIECE) {
            let piece = &mut self.piece[..PIECE.min((bytes - done) as usize)];
            read_at(file, piece, mapping.file_offset + done)?;
            write(mapping.first_page + done / PAGE, piece)?;
        }
        Ok(())
    }
}
