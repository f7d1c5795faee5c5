//! Entries of a directory that the host sent ahead: the kernel asks for a page of them at a time.

use sandtree_proto::mount::Entry;

use super::abi::{Listed, Listing, Want};
use super::session::Mount;

/// How many bytes of entries the host sends at once.
pub const CHUNK: u32 = 128 * 1024;
/// Directories that are listed at the same time; more are asked for again.
const CHUNKS_MAX: usize = 64;

#[derive(Debug)]
pub struct Chunk {
    /// The cookie after which it begins.
    pub from: u64,
    pub entries: Vec<Entry>,
    /// No entry follows.
    pub end: bool,
    /// The mount's count of changes when the host answered.
    pub changes: u64,
}

impl Chunk {
    /// The index of the first entry after `cookie`.
    fn after(&self, cookie: u64) -> Option<usize> {
        if self.from == cookie {
            return Some(0);
        }
        let at = self.entries.iter().position(|entry| entry.cookie == cookie);
        at.map(|at| at + 1)
    }
}

/// A page of entries for the kernel.
#[derive(Debug)]
pub struct Page {
    pub bytes: Vec<u8>,
    /// Files whose cached data is of another version.
    pub stale: Vec<u64>,
}

impl Mount {
    /// The entries that were sent ahead, as many as the kernel has room for. None:
    /// the host has to be asked.
    pub fn list_ahead(&mut self, directory: u64, want: Want) -> Option<Page> {
        let chunk = self.chunks.remove(&directory)?;
        let page = self.page(&chunk, directory, want);
        // A program that has got everything does not ask again.
        let is_read = page.as_ref().is_some_and(|page| page.bytes.is_empty());
        if !is_read && self.chunks.len() < CHUNKS_MAX {
            self.chunks.insert(directory, chunk);
        }
        page
    }

    fn page(&mut self, chunk: &Chunk, directory: u64, want: Want) -> Option<Page> {
        let first = chunk.after(want.cookie)?;
        if first == chunk.entries.len() && !chunk.end {
            return None;
        }
        let is_current = chunk.changes == self.changes;
        let mut listing = Listing::new(want);
        let mut stale = Vec::new();
        for entry in &chunk.entries[first..] {
            if !listing.has_room(&entry.name) {
                break;
            }
            let listed = Listed {
                ino: entry.ino,
                cookie: entry.cookie,
                kind: entry.kind,
                name: &entry.name,
            };
            // Old attributes are left out, and the kernel asks for those it needs.
            let attr = entry.attr.filter(|_| want.attributes && is_current);
            let known = attr.map(|attr| (self.table.learn(directory, &entry.name, &attr), attr));
            if let Some((node, attr)) = known
                && self.table.see(node, &attr, None)
            {
                stale.push(node);
            }
            listing.push(&listed, known.as_ref().map(|(node, attr)| (*node, attr)));
        }
        Some(Page {
            bytes: listing.into_bytes(),
            stale,
        })
    }
}
