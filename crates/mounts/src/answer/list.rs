//! Listing a directory.
//!
//! A cookie is the host's own (`d_off`), so the server keeps no position: each request opens the
//! directory and seeks. Entries that are removed or made meanwhile do not disturb the others.
//!
//! `.` and `..` are listed as the host's kernel lists them, without attributes. The `..` of the
//! mounted directory has the number of the mounted directory.

use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;

use rustix::fs::{FileType, OFlags, RawDir, SeekFrom};
use rustix::io::Errno;
use sandtree_proto::mount::{Answer, Attr, Entry, Node, Request, encode_item};

use super::{Desk, Found, is_reported};
use crate::place::{self, Name};
use crate::watch::WATCHES_MAX;

/// The most that one request lists.
const BYTES_MAX: usize = 256 * 1024;
/// Read from the kernel at once.
const READ_BYTES: usize = 32 * 1024;
/// Listed directories get watches while there are plenty: the rest is for those that are used.
const WATCHES_FOR_LISTED: usize = WATCHES_MAX / 2;

/// What the entries of a request share.
struct Listing<'a> {
    directory: &'a Found,
    is_root: bool,
    attributes: bool,
    bytes_max: usize,
}

impl Desk<'_> {
    pub(super) fn list(&mut self, request: &Request) -> Result<Answer, Errno> {
        let Request::List {
            directory: node,
            cookie,
            max_bytes,
            attributes,
        } = request
        else {
            return Err(Errno::INVAL);
        };
        let directory = self.directory(node)?;
        let listing = Listing {
            directory: &directory,
            is_root: is_root(node),
            attributes: *attributes,
            bytes_max: (*max_bytes as usize).min(BYTES_MAX),
        };
        let opened = place::open(&directory.file, OFlags::RDONLY | OFlags::DIRECTORY)?;
        if *cookie != 0 {
            rustix::fs::seek(&opened, SeekFrom::Start(*cookie))?;
        }
        Ok(Answer::Entries {
            watched: directory.watch.is_some(),
            end: self.entries(&listing, &opened)?,
        })
    }

    /// Appends entries while there is room. Returns whether all of them are listed.
    fn entries(&mut self, listing: &Listing<'_>, opened: &OwnedFd) -> Result<bool, Errno> {
        let mut buffer = vec![MaybeUninit::uninit(); READ_BYTES];
        let mut entries = RawDir::new(opened, &mut buffer);
        while let Some(entry) = entries.next() {
            let entry = entry?;
            let listed = self.entry(
                listing,
                Entry {
                    cookie: entry.next_entry_cookie(),
                    ino: entry.ino(),
                    kind: kind(entry.file_type()),
                    name: entry.file_name().to_bytes().to_vec(),
                    attr: None,
                },
            );
            let before = self.out.len();
            encode_item(&listed, self.out);
            if self.out.len() > listing.bytes_max {
                self.out.truncate(before);
                // Not even one entry fits: the guest would ask forever.
                return if before == 0 {
                    Err(Errno::INVAL)
                } else {
                    Ok(false)
                };
            }
        }
        Ok(true)
    }

    fn entry(&mut self, listing: &Listing<'_>, mut entry: Entry) -> Entry {
        if matches!(entry.name.as_slice(), b"." | b"..") {
            if entry.name == b"." || listing.is_root {
                entry.ino = listing.directory.attr.id.ino;
            }
            return entry;
        }
        if listing.attributes {
            // An entry that is gone meanwhile, or a mount point, has none.
            entry.attr = self.listed(listing.directory, &entry.name).ok();
        }
        if let Some(attr) = &entry.attr {
            entry.ino = attr.id.ino;
            entry.kind = kind(FileType::from_raw_mode(attr.mode));
        }
        entry
    }

    fn listed(&mut self, directory: &Found, name: &[u8]) -> Result<Attr, Errno> {
        let name = Name::new(name)?;
        if self.watches.len() < WATCHES_FOR_LISTED {
            return self.child(directory, &name);
        }
        let mut attr = self.mount.view.child(&directory.file, name.as_c_str())?;
        let own = self.watches.known(self.mount.id(), attr.id);
        attr.watched = directory.watch.is_some() && is_reported(&attr, directory.watch, own);
        Ok(attr)
    }
}

/// As `d_type`. Some file systems do not know it without a look at the file.
fn kind(found: FileType) -> u8 {
    match found {
        FileType::Unknown => 0,
        known => (known.as_raw_mode() >> 12) as u8,
    }
}

fn is_root(node: &Node) -> bool {
    node.path.is_empty()
}
