//! Where members come from: an archive, or a directory that a user copied here.

use std::collections::BTreeSet;
use std::io::Read;
use std::path::{Path, PathBuf};

use super::pipeline::Chunk;
use super::{Damage, Input, Member, Reader, SparseMap};
use crate::fs::{Files, Kind, ReadAt, io_error};
use crate::{Digest, Error};

/// Far more than any description of ours has.
pub(super) const MAX_RECORD_BYTES: u64 = 1 << 20;

/// Gives out the members that it is asked for, one after the other.
pub(super) trait Intake {
    /// Goes to the member that must come next.
    fn open(&mut self, member: &Member) -> Result<SparseMap, Error>;
    /// The next bytes of its pieces.
    fn fill(&mut self, chunk: &mut Chunk) -> Result<(), Error>;
    /// No member may be left.
    fn finish(&mut self) -> Result<(), Error>;
    /// Whether a member need not be read to come to the next one.
    fn passes_over(&self) -> bool;
    /// Where a blob is that may be linked instead of copied, once it was read.
    fn lent(&self, _: &Digest) -> Option<PathBuf> {
        None
    }

    /// A description, which has only its digest to be known by.
    fn description(&mut self, digest: &Digest) -> Result<Vec<u8>, Error> {
        let member = Member::Blob(digest.clone());
        let bytes = self.small(&member, MAX_RECORD_BYTES)?;
        if Digest::of(&bytes) == *digest {
            Ok(bytes)
        } else {
            Err(Damage::Content { member }.into())
        }
    }

    /// A whole member that is small.
    fn small(&mut self, member: &Member, limit: u64) -> Result<Vec<u8>, Error> {
        let map = self.open(member)?;
        if map.bytes() > limit {
            return Err(Damage::LongRecord {
                member: member.clone(),
                bytes: map.bytes(),
                limit,
            }
            .into());
        }
        let mut content = vec![0; map.bytes() as usize];
        for piece in map.pieces() {
            let mut chunk = Chunk {
                offset: piece.offset,
                bytes: vec![0; piece.bytes as usize],
            };
            self.fill(&mut chunk)?;
            content[piece.offset as usize..piece.end() as usize].copy_from_slice(&chunk.bytes);
        }
        Ok(content)
    }
}

/// An archive that comes as a stream.
pub(super) struct Archive<R> {
    reader: Reader<Input<R>>,
    seen: BTreeSet<Member>,
}

impl<R: Read> Archive<R> {
    pub(super) fn new(input: R) -> Result<Self, Error> {
        Ok(Self {
            reader: Reader::new(Input::new(input)?),
            seen: BTreeSet::new(),
        })
    }
}

impl<R: Read> Intake for Archive<R> {
    fn open(&mut self, member: &Member) -> Result<SparseMap, Error> {
        let Some(found) = self.reader.next_member()? else {
            return Err(Damage::Missing {
                member: member.clone(),
            }
            .into());
        };
        match found.member {
            found if self.seen.contains(&found) => Err(Damage::Twice { member: found }.into()),
            found if found != *member => Err(Damage::Order {
                expected: member.clone(),
                found,
            }
            .into()),
            same => {
                self.seen.insert(same);
                Ok(found.map)
            }
        }
    }

    fn fill(&mut self, chunk: &mut Chunk) -> Result<(), Error> {
        self.reader.read(&mut chunk.bytes).map(drop)
    }

    fn finish(&mut self) -> Result<(), Error> {
        match self.reader.next_member()? {
            None => Ok(()),
            Some(found) if self.seen.contains(&found.member) => Err(Damage::Twice {
                member: found.member,
            }
            .into()),
            Some(found) => Err(Damage::Surplus {
                member: found.member,
            }
            .into()),
        }
    }

    fn passes_over(&self) -> bool {
        false
    }
}

/// A directory with the members as files. Other files in it are ignored.
pub(super) struct Directory {
    files: Files,
    dir: PathBuf,
    current: Option<(PathBuf, Box<dyn ReadAt>)>,
}

impl Directory {
    pub(super) fn new(files: Files, dir: &Path) -> Self {
        Self {
            files,
            dir: dir.to_owned(),
            current: None,
        }
    }

    fn open_file(&mut self, path: PathBuf) -> Result<SparseMap, Error> {
        if self.files.kind(&path)? != Some(Kind::File) {
            return Err(Error::corrupt(path, "it is not a plain file"));
        }
        let file = self.files.open_at(&path)?;
        let map = SparseMap::of_file(&*file).map_err(io_error("read", &path))?;
        self.current = Some((path, file));
        Ok(map)
    }
}

impl Intake for Directory {
    fn open(&mut self, member: &Member) -> Result<SparseMap, Error> {
        let path = self.dir.join(member.to_string());
        match self.files.kind(&path)? {
            Some(_) => self.open_file(path),
            None => Err(Error::corrupt(path, "missing")),
        }
    }

    fn fill(&mut self, chunk: &mut Chunk) -> Result<(), Error> {
        match &self.current {
            Some((path, file)) => file
                .read_exact_at(&mut chunk.bytes, chunk.offset)
                .map_err(io_error("read", path)),
            None => Ok(()),
        }
    }

    fn finish(&mut self) -> Result<(), Error> {
        Ok(())
    }

    fn passes_over(&self) -> bool {
        true
    }
}

/// Files that are named by their digests, in a staging directory of the store.
pub(super) struct Loose(Directory);

impl Loose {
    pub(super) fn new(files: Files, dir: &Path) -> Self {
        Self(Directory::new(files, dir))
    }

    pub(super) fn path(&self, digest: &Digest) -> PathBuf {
        self.0.dir.join(digest.as_str())
    }

    pub(super) fn has(&self, digest: &Digest) -> Result<bool, Error> {
        Ok(self.0.files.kind(&self.path(digest))?.is_some())
    }
}

impl Intake for Loose {
    fn open(&mut self, member: &Member) -> Result<SparseMap, Error> {
        match member {
            Member::Blob(digest) if self.has(digest)? => self.0.open_file(self.path(digest)),
            Member::Blob(digest) => Err(Damage::Absent {
                digest: digest.clone(),
            }
            .into()),
            other => Err(Damage::Missing {
                member: other.clone(),
            }
            .into()),
        }
    }

    fn fill(&mut self, chunk: &mut Chunk) -> Result<(), Error> {
        self.0.fill(chunk)
    }

    fn finish(&mut self) -> Result<(), Error> {
        self.0.finish()
    }

    fn passes_over(&self) -> bool {
        true
    }

    fn lent(&self, digest: &Digest) -> Option<PathBuf> {
        Some(self.path(digest))
    }
}
