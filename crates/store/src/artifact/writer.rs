//! Writing an archive.
//!
//! Always: members come whole and in the order they are given; what is written is a function of
//! their content. When it fails: the output is no artifact, and a reader says so.

use std::io::Write;

use super::header::{MemberHeader, SECTOR};
use super::{Member, SparseMap};
use crate::Error;

/// Writes the members of an archive, one after the other.
#[derive(Debug)]
pub struct Writer<W> {
    out: W,
    /// How far behind a sector's beginning the output is.
    over: usize,
}

impl<W: Write> Writer<W> {
    pub fn new(out: W) -> Self {
        Self { out, over: 0 }
    }

    /// A whole member without holes.
    pub fn whole(&mut self, member: &Member, content: &[u8]) -> Result<(), Error> {
        self.begin(member, &SparseMap::dense(content.len() as u64))?;
        self.data(content)
    }

    /// Begins a member; the bytes of its pieces follow by [`Self::data`].
    pub fn begin(&mut self, member: &Member, map: &SparseMap) -> Result<(), Error> {
        let text = if map.is_dense() {
            Vec::new()
        } else {
            map.to_text()
        };
        let header = MemberHeader {
            member: member.clone(),
            stored_bytes: text.len() as u64 + map.data_bytes(),
            sparse_bytes: (!map.is_dense()).then_some(map.bytes()),
        };
        self.pad()?;
        self.put(&header.to_blocks())?;
        self.put(&text)
    }

    pub fn data(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.over = (self.over + bytes.len()) % SECTOR;
        self.put(bytes)
    }

    /// Ends the archive.
    pub fn finish(mut self) -> Result<W, Error> {
        self.pad()?;
        self.put(&[0; 2 * SECTOR])?;
        Ok(self.out)
    }

    fn pad(&mut self) -> Result<(), Error> {
        let padding = self.over.next_multiple_of(SECTOR) - self.over;
        self.over = 0;
        self.put(&[0; SECTOR][..padding])
    }

    fn put(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.out
            .write_all(bytes)
            .map_err(Error::artifact_io("write"))
    }
}
