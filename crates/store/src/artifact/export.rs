//! A snapshot of the store becomes an artifact.
//!
//! Always: every byte that is written was hashed and is what its name says. Memory is bounded,
//! whatever the sizes are. When it fails: what was written so far is no artifact, and a reader says
//! so. A damaged layer is in quarantine.

use std::collections::BTreeSet;
use std::io::{self, Write};

use super::frame::Output;
use super::parts::{Part, Scope};
use super::pipeline::Chunk;
use super::record::ArtifactRecord;
use super::{Member, SparseMap, Writer};
use crate::{Digest, Error, Progress, Snapshot, Store};

/// What an export is to leave out, and how it is to be written.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ExportSpec {
    /// A plain tar archive, not compressed.
    pub plain: bool,
    /// Without image and kernel: the importing store has them.
    pub without_image: bool,
    /// Without the files of this snapshot: the importing store has it.
    pub since: Option<Digest>,
}

/// What an export wrote.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exported {
    pub members: u64,
    /// The sizes of all members.
    pub bytes_in: u64,
    pub bytes_out: u64,
}

impl Store {
    /// Writes a snapshot as an artifact.
    pub fn export(
        &self,
        snapshot: &Snapshot,
        spec: &ExportSpec,
        out: &mut dyn Write,
        progress: &dyn Progress,
    ) -> Result<Exported, Error> {
        let snapshot = self.pin(&snapshot.digest)?;
        let parts = self.parts_for(&snapshot, spec)?;
        let record = ArtifactRecord::new(&snapshot.digest, spec.since.clone(), !spec.without_image)
            .to_bytes();
        let manifest = snapshot.manifest.to_bytes();
        progress.begin(parts.iter().map(|part| part.blob.bytes).sum());
        let mut out = Counted { out, bytes: 0 };
        let output = if spec.plain {
            Output::plain(&mut out)
        } else {
            compressed(&mut out)?
        };
        let mut writer = Writer::new(output);
        writer.whole(&Member::Artifact, &record)?;
        writer.whole(&Member::Manifest, &manifest)?;
        parts
            .iter()
            .try_for_each(|part| self.write_part(part, &mut writer, progress))?;
        writer
            .finish()?
            .finish()
            .map_err(Error::artifact_io("write"))?;
        let bytes_in = (record.len() + manifest.len()) as u64
            + parts.iter().map(|part| part.blob.bytes).sum::<u64>();
        Ok(Exported {
            members: parts.len() as u64 + 2,
            bytes_in,
            bytes_out: out.bytes,
        })
    }

    fn parts_for(&self, snapshot: &Snapshot, spec: &ExportSpec) -> Result<Vec<Part>, Error> {
        let scope = if spec.without_image {
            Scope::WithoutImage
        } else {
            Scope::WithImage
        };
        let mut parts = self.parts(snapshot, scope)?;
        if let Some(since) = &spec.since {
            let base = self.parts(&self.snapshot(since)?, Scope::WithImage)?;
            let known: BTreeSet<_> = base.iter().map(|part| &part.blob.digest).collect();
            parts.retain(|part| !known.contains(&part.blob.digest));
        }
        Ok(parts)
    }

    fn write_part(
        &self,
        part: &Part,
        writer: &mut Writer<Output<'_>>,
        progress: &dyn Progress,
    ) -> Result<(), Error> {
        let begin = move |map: &SparseMap| {
            writer.begin(&Member::Blob(part.blob.digest.clone()), map)?;
            Ok(move |chunk: &Chunk| writer.data(&chunk.bytes))
        };
        self.read_part(part, progress, begin).map(drop)
    }
}

fn compressed<'a>(out: &'a mut Counted<'_>) -> Result<Output<'a>, Error> {
    Output::compressed(out).map_err(Error::artifact_io("write"))
}

/// Counts what goes through.
struct Counted<'a> {
    out: &'a mut dyn Write,
    bytes: u64,
}

impl Write for Counted<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.out.write(bytes)?;
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}
