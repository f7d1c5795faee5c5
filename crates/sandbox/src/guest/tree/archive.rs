//! Archives that a user made, on their way into a guest: checked, and then sent as they are.
//!
//! Always: an archive is hostile. Here only its headers are read, in bounded memory; it is unpacked
//! in the guest, below one directory.

use std::cell::Cell;
use std::fs::File;
use std::io::{self, BufReader, Read, Write};
use std::path::{Component, Path};
use std::rc::Rc;

use bytes::Bytes;
use tar::{Archive, Entry, EntryType};
use tokio::sync::mpsc;

use super::unpack::HEADERS_MAX;
use super::{CHUNK, ChunkWriter};
use crate::error::{Error, Result};

const MEMBERS_MAX: u64 = 1_000_000;
/// What the files of an archive may have together.
const BYTES_MAX: u64 = 64 << 30;

/// Refuses an archive whose members could lead out of the directory that it is unpacked to, are no
/// files, directories or links, or are too many.
pub fn check_archive(path: &Path) -> Result<()> {
    let failed = |e| Error::io("read the archive", path, e);
    let file = File::open(path).map_err(failed)?;
    let allowance = Rc::new(Cell::new(HEADERS_MAX));
    let mut archive = Archive::new(Bounded {
        inner: BufReader::with_capacity(CHUNK, file),
        allowance: allowance.clone(),
    });
    let mut members = 0;
    let mut bytes = 0u64;
    for entry in archive.entries().map_err(failed)? {
        let mut entry = entry.map_err(failed)?;
        check_member(&entry)?;
        members += 1;
        bytes = bytes.saturating_add(entry.size());
        if members > MEMBERS_MAX || bytes > BYTES_MAX {
            let rule = "at most a million members, with 64 GiB in them";
            return Err(Error::invalid("archive", path.display(), rule));
        }
        allowance.set(u64::MAX);
        io::copy(&mut entry, &mut io::sink()).map_err(failed)?;
        allowance.set(HEADERS_MAX);
    }
    Ok(())
}

fn check_member(entry: &Entry<'_, Bounded>) -> Result<()> {
    let name = entry.path_bytes();
    let refused = |rule: &str| {
        let shown = String::from_utf8_lossy(&name).into_owned();
        Err(Error::invalid("member of an archive", shown, rule))
    };
    match entry.header().entry_type() {
        EntryType::Regular | EntryType::Continuous | EntryType::Directory | EntryType::Symlink => {}
        EntryType::Link => {
            let target = entry.link_name_bytes().unwrap_or_default();
            if !is_inside(&target) {
                return refused("it is a link that leads out of the archive");
            }
        }
        EntryType::XGlobalHeader => return Ok(()),
        _ => return refused("only files, directories and links are unpacked"),
    }
    if is_inside(&name) {
        return Ok(());
    }
    refused("it leads out of the archive")
}

fn is_inside(name: &[u8]) -> bool {
    use std::os::unix::ffi::OsStrExt;
    let path = Path::new(std::ffi::OsStr::from_bytes(name));
    let is_plain = |part: Component<'_>| matches!(part, Component::Normal(_) | Component::CurDir);
    !name.is_empty() && path.components().all(is_plain)
}

/// Sends an archive as it is.
pub fn send(path: &Path, chunks: mpsc::Sender<Bytes>) -> Result<()> {
    let failed = |e| Error::io("read the archive", path, e);
    let mut file = File::open(path).map_err(failed)?;
    let mut writer = ChunkWriter {
        chunks,
        buffer: Vec::with_capacity(CHUNK),
    };
    let sent = io::copy(&mut file, &mut writer).and_then(|_| writer.flush());
    match sent {
        // The guest stopped reading: its own error says why.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        sent => sent.map_err(failed),
    }
}

/// A reader that gives no more than allowed.
struct Bounded {
    inner: BufReader<File>,
    /// How many bytes may still be read before the next member must be complete.
    allowance: Rc<Cell<u64>>,
}

impl Read for Bounded {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        let left = self.allowance.get().checked_sub(count as u64);
        let left = left.ok_or_else(|| io::Error::other("headers without end"))?;
        self.allowance.set(left);
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A header with any name, which `tar` itself would refuse to write.
    fn member(name: &str, kind: EntryType, link: &str, content: &[u8]) -> Vec<u8> {
        let mut header = tar::Header::new_ustar();
        header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
        header.as_old_mut().linkname[..link.len()].copy_from_slice(link.as_bytes());
        header.set_entry_type(kind);
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        header.set_cksum();
        let mut bytes = header.as_bytes().to_vec();
        bytes.extend_from_slice(content);
        bytes.resize(bytes.len().next_multiple_of(512), 0);
        bytes
    }

    fn checked(bytes: &[u8]) -> Result<()> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.tar");
        std::fs::write(&path, bytes).unwrap();
        check_archive(&path)
    }

    #[test]
    fn members_that_lead_out_are_refused() {
        let file = |name| member(name, EntryType::Regular, "", b"x");
        checked(&[file("a"), file("./b/c")].concat()).unwrap();
        for name in ["/etc/passwd", "../x", "a/../../x", ""] {
            let error = checked(&[file("a"), file(name)].concat()).unwrap_err();
            assert!(error.to_string().contains("leads out"), "{error}");
        }
        let link = member("l", EntryType::Link, "/etc/passwd", b"");
        assert!(checked(&link).is_err());
        let symlink = member("l", EntryType::Symlink, "/etc/passwd", b"");
        checked(&symlink).unwrap();
        let device = member("d", EntryType::Block, "", b"");
        assert!(checked(&device).is_err());
    }

    #[test]
    fn what_is_no_archive_is_refused() {
        assert!(checked(&[b'x'; 2048]).is_err());
        let long = member("x", EntryType::GNULongName, "", b"");
        let mut header = long[..512].to_vec();
        header[124..136].copy_from_slice(b"77777777777\0");
        let mut fixed = tar::Header::new_old();
        fixed.as_mut_bytes().copy_from_slice(&header);
        fixed.set_cksum();
        let mut endless = fixed.as_bytes().to_vec();
        endless.resize((HEADERS_MAX as usize) * 2, b'a');
        let error = checked(&endless).unwrap_err().one_line();
        assert!(error.contains("headers without end"), "{error}");
    }
}
