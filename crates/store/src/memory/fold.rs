//! Folding: a stack of layers becomes one layer, or one plain file.
//!
//! At the bottom of a stack, what no layer has is zero, so zero runs need not be kept and a gap
//! between runs may be filled with zeros. On top of other layers, both are kept.

use std::borrow::Borrow;
use std::fs::File;

use super::layer::read_at;
use super::writer::{refuse_content, write_at};
use super::{
    Layer, Mapping, MemoryWriter, PAGE, PIECE, PageRun, Stretch, coalesce, plan, stretches,
};
use crate::Error;

/// The most runs of a layer that was folded from the bottom: each is a mapping in every machine
/// that uses it.
pub const MAX_FOLDED_RUNS: usize = 4096;

/// The pages that no folded layer has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gaps {
    /// They are zero: no layer is below.
    Zero,
    /// The layers below have them.
    Below,
}

/// Writes one layer with the content of all `layers`, bottom first. If its gaps are zero, its runs
/// are at most [`MAX_FOLDED_RUNS`]; where there were more, the smallest gaps are stored as zero
/// pages.
pub fn fold<F: Borrow<File>>(
    layers: &[(Layer, File)],
    gaps: Gaps,
    mut out: MemoryWriter<F>,
) -> Result<Layer, Error> {
    require_same_ram(layers, out.ram_bytes())?;
    let mappings = plan(layers.iter().map(|(layer, _)| layer));
    let runs = match gaps {
        Gaps::Zero => coalesce(mappings.iter().map(Mapping::run).collect(), MAX_FOLDED_RUNS),
        Gaps::Below => covered(layers),
    };
    let mut source = Source::new(layers);
    let mut mappings = mappings.into_iter().peekable();
    for run in runs {
        let mut written = run.first;
        while let Some(mapping) = mappings.next_if(|mapping| mapping.first_page < run.end()) {
            add_zeros(&mut out, written, mapping.first_page, gaps)?;
            source.each_piece(&mapping, |first_page, bytes| {
                out.append_stored(first_page, bytes)
            })?;
            written = mapping.end();
        }
        add_zeros(&mut out, written, run.end(), gaps)?;
    }
    out.finish()
}

/// Adds the pages from `first` to `end`, which are zero. On top of other layers they cost a run;
/// otherwise they are stored, so that there are fewer runs.
fn add_zeros<F: Borrow<File>>(
    out: &mut MemoryWriter<F>,
    first: u64,
    end: u64,
    gaps: Gaps,
) -> Result<(), Error> {
    match gaps {
        Gaps::Zero => out.store_zeros(end - first),
        Gaps::Below => out.append_zeros(first, end - first),
    }
}

/// The pages that any of the layers has, zero or not, as few runs.
fn covered(layers: &[(Layer, File)]) -> Vec<PageRun> {
    let all = layers
        .iter()
        .flat_map(|(layer, _)| super::plan::runs(layer));
    let mut runs: Vec<PageRun> = all.map(|(pages, _)| pages).collect();
    runs.sort_unstable_by_key(|run| run.first);
    runs.dedup_by(|next, run| {
        let touches = next.first <= run.end();
        if touches {
            run.count = run.end().max(next.end()) - run.first;
        }
        touches
    });
    runs
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
