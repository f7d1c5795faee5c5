//! Packs a file or tree of the host into a tar stream.

use std::ffi::OsStr;
use std::fs::{File, Metadata};
use std::io::{self, Read, Write};
use std::ops::Range;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::Path;

use bytes::Bytes;
use rustix::fs::{Mode, OFlags};
use tar::{Builder, EntryType, GnuExtSparseHeader, GnuSparseHeader, Header};
use tokio::sync::mpsc;

use super::{CHUNK, ChunkWriter, Skipped};
use crate::error::{Error, Result};

/// Both sides keep the map of a file's holes in memory; a file in more pieces is sent with its
/// zeros.
const PIECES_MAX: usize = 100_000;
/// The block size of tar; a sparse member's pieces must not end within a block.
const BLOCK: u64 = 512;

/// The owner of packed files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Owner {
    /// As on the host.
    AsFound,
    Root,
}

/// Packs the file or tree at `from` under `name`. Returns the list of files that could not be
/// packed.
pub fn pack(
    from: &Path,
    name: &OsStr,
    owner: Owner,
    chunks: mpsc::Sender<Bytes>,
) -> Result<Skipped> {
    let mut packing = Packing {
        owner,
        ..Packing::new(chunks)
    };
    packing.entry(from, Path::new(name))?;
    let Packing {
        builder, skipped, ..
    } = packing;
    let finished = builder.into_inner().and_then(|mut writer| writer.flush());
    finished.map_err(|e| Error::io("pack", from, e))?;
    Ok(skipped)
}

pub(super) struct Packing {
    pub(super) builder: Builder<ChunkWriter>,
    skipped: Skipped,
    owner: Owner,
}

impl Packing {
    pub(super) fn new(chunks: mpsc::Sender<Bytes>) -> Self {
        let builder = Builder::new(ChunkWriter {
            chunks,
            buffer: Vec::with_capacity(CHUNK),
        });
        Self {
            builder,
            skipped: Skipped::default(),
            owner: Owner::AsFound,
        }
    }

    fn entry(&mut self, from: &Path, name: &Path) -> Result<()> {
        let failed = |e| Error::io("read", from, e);
        let found = from.symlink_metadata().map_err(failed)?;
        let kind = found.file_type();
        if kind.is_socket() {
            self.skipped
                .add(&format!("{}: a socket cannot be copied", from.display()));
        } else if kind.is_file() {
            self.open_file(from, name).map_err(failed)?;
        } else if kind.is_symlink() {
            let target = from.read_link().map_err(failed)?;
            self.builder
                .append_link(&mut self.header(&found), name, target)
                .map_err(failed)?;
        } else {
            self.empty(&found, name).map_err(failed)?;
        }
        if kind.is_dir() {
            self.children(from, name)
        } else {
            Ok(())
        }
    }

    fn children(&mut self, from: &Path, name: &Path) -> Result<()> {
        let failed = |e| Error::io("read", from, e);
        let mut children: Vec<_> = from
            .read_dir()
            .map_err(failed)?
            .collect::<io::Result<_>>()
            .map_err(failed)?;
        children.sort_by_key(std::fs::DirEntry::file_name);
        children
            .iter()
            .try_for_each(|child| self.entry(&child.path(), &name.join(child.file_name())))
    }

    /// A directory, a pipe or a device.
    pub(super) fn empty(&mut self, found: &Metadata, name: &Path) -> io::Result<()> {
        let mut header = self.header(found);
        header.set_size(0);
        header.set_device_major(rustix::fs::major(found.rdev()))?;
        header.set_device_minor(rustix::fs::minor(found.rdev()))?;
        self.builder.append_data(&mut header, name, io::empty())
    }

    fn open_file(&mut self, from: &Path, name: &Path) -> io::Result<()> {
        // Does not block, even if a pipe has replaced the file.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = File::from(rustix::fs::open(from, flags, Mode::empty())?);
        let found = file.metadata()?;
        if !found.is_file() {
            self.skipped.add(&format!(
                "{}: it was replaced while it was copied",
                from.display()
            ));
        } else if self.file(&file, &found, name)? == Length::Shrank {
            self.skipped.add(&format!(
                "{}: its end, which was cut off while it was copied",
                from.display()
            ));
        }
        Ok(())
    }

    /// A regular file, exactly as long as it was when it was `found`.
    pub(super) fn file(
        &mut self,
        file: &File,
        found: &Metadata,
        name: &Path,
    ) -> io::Result<Length> {
        let mut header = self.header(found);
        let size = found.len();
        let pieces = data_of(file, size);
        let whole = pieces
            .iter()
            .map(|piece| piece.end - piece.start)
            .sum::<u64>()
            == size;
        let map = if whole {
            Vec::new()
        } else {
            describe_holes(&mut header, &pieces, size)
        };
        let data = Pieces {
            file,
            left: pieces.into_iter(),
            now: 0..0,
        };
        self.builder
            .append_data(&mut header, name, Read::chain(map.as_slice(), data))?;
        Ok(if file.metadata()?.len() < size {
            Length::Shrank
        } else {
            Length::Kept
        })
    }

    fn header(&self, found: &Metadata) -> Header {
        let mut header = Header::new_gnu();
        header.set_metadata(found);
        if self.owner == Owner::Root {
            header.set_uid(0);
            header.set_gid(0);
        }
        header
    }
}

/// The ranges of a file below `size` that have data. All other bytes read as zeros.
fn data_of(file: &File, size: u64) -> Vec<Range<u64>> {
    use rustix::fs::{SeekFrom, seek};
    let whole = || std::iter::once(0..size).collect();
    let mut pieces = Vec::new();
    let mut at = 0;
    while at < size {
        let data = match seek(file, SeekFrom::Data(at)) {
            Ok(data) if data < size => data,
            Ok(_) | Err(rustix::io::Errno::NXIO) => break,
            // Some file systems do not report holes.
            Err(_) => return whole(),
        };
        let hole = seek(file, SeekFrom::Hole(data))
            .unwrap_or(size)
            .max(data + 1);
        let end = hole.next_multiple_of(BLOCK).min(size);
        pieces.push((data - data % BLOCK).max(at)..end);
        at = end;
        if pieces.len() > PIECES_MAX {
            return whole();
        }
    }
    pieces
}

/// Makes a member sparse. Returns the part of its map that does not fit the header and comes before
/// the data.
fn describe_holes(header: &mut Header, pieces: &[Range<u64>], size: u64) -> Vec<u8> {
    let mut places: Vec<_> = pieces
        .iter()
        .map(|piece| (piece.start, piece.end - piece.start))
        .collect();
    header.set_entry_type(EntryType::GNUSparse);
    header.set_size(places.iter().map(|(_, length)| length).sum());
    // The last entry has no bytes: it marks the end of the file.
    places.push((size, 0));
    let gnu = header.as_gnu_mut().expect("it was made as one");
    gnu.set_real_size(size);
    let (first, rest) = places.split_at(places.len().min(gnu.sparse.len()));
    write_places(&mut gnu.sparse, first);
    gnu.set_is_extended(!rest.is_empty());
    let mut map = Vec::new();
    let mut groups = rest
        .chunks(GnuExtSparseHeader::new().sparse.len())
        .peekable();
    while let Some(group) = groups.next() {
        let mut extension = GnuExtSparseHeader::new();
        write_places(&mut extension.sparse, group);
        extension.set_is_extended(groups.peek().is_some());
        map.extend_from_slice(extension.as_bytes());
    }
    map
}

fn write_places(fields: &mut [GnuSparseHeader], places: &[(u64, u64)]) {
    for (field, (offset, length)) in fields.iter_mut().zip(places) {
        field.set_offset(*offset);
        field.set_length(*length);
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Length {
    Kept,
    Shrank,
}

/// The pieces of a file one after the other, with zeros for bytes that the file no longer has.
struct Pieces<'a> {
    file: &'a File,
    left: std::vec::IntoIter<Range<u64>>,
    now: Range<u64>,
}

impl Read for Pieces<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.now.is_empty() {
            match self.left.next() {
                Some(piece) => self.now = piece,
                None => return Ok(0),
            }
        }
        let wanted = (self.now.end - self.now.start).min(buffer.len() as u64) as usize;
        let mut count = self.file.read_at(&mut buffer[..wanted], self.now.start)?;
        if count == 0 && wanted > 0 {
            buffer[..wanted].fill(0);
            count = wanted;
        }
        self.now.start += count as u64;
        Ok(count)
    }
}
