//! Packs a tree into a tar stream.
//!
//! Always: a file that changes while it is read does not break the stream: it is cut or filled with
//! zeros to the size in its header.

use std::collections::HashMap;
use std::fs::{self, File, Metadata};
use std::io::{self, BufWriter, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use rustix::io::Errno;
use sandtree_proto::Failure;
use tar::{Builder, EntryType, Header};

use super::extents::{self, Extent, Extents};
use super::{LeftOut, XATTR_KEY};
use crate::failure::OrFailure;
use crate::open::open_without_waiting;

const BUFFER_SIZE: usize = 256 * 1024;

/// Writes the tree at `path`, with names relative to its parent, and lists what it leaves out.
pub fn pack(path: &Path, out: OwnedFd, left_out: &mut LeftOut) -> Result<(), Failure> {
    let mut packing = Packing {
        builder: Builder::new(BufWriter::with_capacity(BUFFER_SIZE, File::from(out))),
        linked: HashMap::new(),
        left_out,
    };
    // The root, or a path that ends in `..`, gets a name as well; the host replaces it.
    let name = path
        .file_name()
        .map_or_else(|| PathBuf::from("root"), PathBuf::from);
    packing.add_tree(path, &name)?;
    let message = || format!("cannot send {}", path.display());
    packing
        .builder
        .into_inner()
        .and_then(|mut out| out.flush())
        .or_failure(message)
}

struct Packing<'a> {
    builder: Builder<BufWriter<File>>,
    /// The archive's name of each file that has several names.
    linked: HashMap<(u64, u64), PathBuf>,
    left_out: &'a mut LeftOut,
}

impl Packing<'_> {
    /// Depth first, a directory before its members; with a stack of its own, because a guest may
    /// nest directories without limit.
    fn add_tree(&mut self, path: &Path, name: &Path) -> Result<(), Failure> {
        let mut waiting = vec![(path.to_path_buf(), name.to_path_buf())];
        while let Some((path, name)) = waiting.pop() {
            let message = || format!("cannot pack {}", path.display());
            let metadata = match fs::symlink_metadata(&path) {
                // It was removed after its directory was read.
                Err(error) if error.kind() == io::ErrorKind::NotFound && !waiting.is_empty() => {
                    continue;
                }
                other => other.or_failure(message)?,
            };
            self.add(&path, &name, &metadata).or_failure(message)?;
            if metadata.is_dir() {
                for entry in fs::read_dir(&path).or_failure(message)? {
                    let entry = entry.or_failure(message)?;
                    waiting.push((entry.path(), name.join(entry.file_name())));
                }
            }
        }
        Ok(())
    }

    fn add(&mut self, path: &Path, name: &Path, metadata: &Metadata) -> io::Result<()> {
        let kind = metadata.file_type();
        if kind.is_socket() {
            self.left_out.add(path, "a socket cannot be copied");
            return Ok(());
        }
        let mut header = header(metadata);
        if let Some(first) = self.first_name(name, metadata) {
            header.set_entry_type(EntryType::Link);
            return self.builder.append_link(&mut header, name, first);
        }
        self.add_attributes(path)?;
        if kind.is_symlink() {
            self.builder
                .append_link(&mut header, name, fs::read_link(path)?)
        } else if kind.is_file() {
            self.add_file(path, name, metadata, header)
        } else {
            self.builder.append_data(&mut header, name, io::empty())
        }
    }

    fn first_name(&mut self, name: &Path, metadata: &Metadata) -> Option<PathBuf> {
        if metadata.is_dir() || metadata.nlink() < 2 {
            return None;
        }
        let key = (metadata.dev(), metadata.ino());
        let first = self.linked.get(&key).cloned();
        if first.is_none() {
            self.linked.insert(key, name.to_path_buf());
        }
        first
    }

    fn add_file(
        &mut self,
        path: &Path,
        name: &Path,
        metadata: &Metadata,
        mut header: Header,
    ) -> io::Result<()> {
        // A pipe or a link may have replaced the file meanwhile.
        let file = open_without_waiting(path, OFlags::NOFOLLOW)?;
        if !file.metadata()?.is_file() {
            return Err(Errno::INVAL.into());
        }
        let size = metadata.size();
        let is_sparse = metadata.blocks().saturating_mul(512) < size;
        if let Some(found) = if is_sparse {
            extents::find(&file, size)?
        } else {
            None
        } {
            let more = extents::describe(&mut header, &found, size)?;
            return self.builder.append_data(
                &mut header,
                name,
                more.chain(Extents::new(&file, found)),
            );
        }
        header.set_size(size);
        let whole = vec![Extent {
            start: 0,
            length: size,
        }];
        self.builder
            .append_data(&mut header, name, Extents::new(&file, whole))
    }

    fn add_attributes(&mut self, path: &Path) -> io::Result<()> {
        let attributes = attributes(path)?;
        if attributes.is_empty() {
            return Ok(());
        }
        self.builder.append_pax_extensions(
            attributes
                .iter()
                .map(|(key, value)| (key.as_str(), value.as_slice())),
        )
    }
}

fn header(metadata: &Metadata) -> Header {
    let mut header = Header::new_gnu();
    header.set_metadata(metadata);
    header.set_size(0);
    header
}

fn attributes(path: &Path) -> io::Result<Vec<(String, Vec<u8>)>> {
    let mut names = vec![0; 4096];
    let length = match rustix::fs::llistxattr(path, &mut names[..]) {
        Err(rustix::io::Errno::OPNOTSUPP) => 0,
        other => other?,
    };
    let mut found = Vec::new();
    for name in names[..length]
        .split(|&b| b == 0)
        .filter(|name| !name.is_empty())
    {
        let mut value = vec![0; 65536];
        let length =
            rustix::fs::lgetxattr(path, std::ffi::OsStr::from_bytes(name), &mut value[..])?;
        value.truncate(length);
        // A name that is not UTF-8 cannot be a key of the archive.
        if let Ok(name) = std::str::from_utf8(name) {
            found.push((format!("{XATTR_KEY}{name}"), value));
        }
    }
    Ok(found)
}
