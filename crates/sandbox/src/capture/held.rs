//! Writes the pages that were read inside the stop to a layer, without those that have not changed.

use std::fs::File;
use std::path::PathBuf;

use sandtree_store::memory::{Below, Layer, MemoryWriter, PAGE, PageRun};

use crate::error::{Error, Result, store_error};

/// Up to this much is compared with the layers below. It is read from them, so more would make a
/// checkpoint slower than it makes it smaller.
const COMPARED_BYTES: usize = 4 << 20;

/// Pages that were read, and where they go.
pub(super) struct Held {
    pub runs: Vec<PageRun>,
    /// Of all runs, in their order.
    pub bytes: Vec<u8>,
    pub ram_bytes: u64,
    /// The files of the layers below the new one, bottom first.
    pub below: Vec<PathBuf>,
}

impl Held {
    pub fn write(self, file: File) -> Result<Layer> {
        let failed = store_error("write a memory layer");
        let below = if self.bytes.len() <= COMPARED_BYTES {
            self.comparable()
        } else {
            None
        };
        let mut writer = MemoryWriter::new(file, self.ram_bytes).map_err(failed)?;
        let mut rest = self.bytes.as_slice();
        for run in &self.runs {
            let (piece, behind) = rest.split_at((run.count * PAGE) as usize);
            append(&mut writer, below.as_ref(), (run.first, piece))?;
            rest = behind;
        }
        writer.finish().map_err(store_error("write a memory layer"))
    }

    /// The layers below, if they can be read: comparing only saves space.
    fn comparable(&self) -> Option<Below> {
        let below = read_below(&self.below);
        below
            .inspect_err(|error| tracing::warn!(%error, "memory is not compared with layers below"))
            .ok()
    }
}

/// Appends a page and those that follow it.
fn append(
    writer: &mut MemoryWriter<File>,
    below: Option<&Below>,
    (first, bytes): (u64, &[u8]),
) -> Result<()> {
    let failed = || store_error("write a memory layer");
    let Some(below) = below else {
        return writer.append(first, bytes).map_err(failed());
    };
    let changed = match below.changed(first, bytes) {
        Ok(changed) => changed,
        // The pages are here, and the layer is whole with all of them.
        Err(error) => {
            tracing::warn!(%error, "memory cannot be compared with the layers below");
            return writer.append(first, bytes).map_err(failed());
        }
    };
    for changed in changed {
        writer
            .append(changed.first_page, changed.bytes)
            .map_err(failed())?;
    }
    Ok(())
}

fn read_below(paths: &[PathBuf]) -> Result<Below> {
    let layers = paths.iter().map(|path| {
        let file = File::open(path).map_err(|e| Error::io("open", path, e))?;
        let layer = Layer::read(&file).map_err(store_error("read a memory layer"))?;
        Ok((layer, file))
    });
    layers.collect::<Result<_>>().map(Below::of)
}
