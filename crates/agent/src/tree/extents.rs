//! The bytes of a file that an archive has announced, even if the file changes meanwhile.
//!
//! ```text
//!   file    | data | hole        | data | hole   |
//!   archive | header: extents, size | ext. header … | data | data | padding
//! ```
//!
//! Always: exactly as many bytes as the extents announce are read: a file that shrinks is filled
//! with zeros, a file that grows is cut.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;

use rustix::fs::SeekFrom;
use rustix::io::Errno;
use tar::{EntryType, GnuExtSparseHeader, GnuSparseHeader, Header};

/// Extents start and end at multiples of this, except for the end of the file: an archive's blocks
/// have 512 bytes.
const ALIGNMENT: u64 = 4096;

/// Bytes of a file, from `start` on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    pub start: u64,
    pub length: u64,
}

/// The extents of a file of `size` bytes that have data; `None` if its file system does not know.
pub fn find(file: &File, size: u64) -> io::Result<Option<Vec<Extent>>> {
    let mut found = Vec::new();
    let mut position = 0;
    while position < size {
        let start = match rustix::fs::seek(file, SeekFrom::Data(position)) {
            Err(Errno::NXIO) => break,
            Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok(None),
            other => (other? / ALIGNMENT * ALIGNMENT).max(position),
        };
        let end = match rustix::fs::seek(file, SeekFrom::Hole(start)) {
            // The file has become shorter.
            Err(Errno::NXIO) => break,
            // At least one step, because a changing file may report anything.
            other => other?.max(start + 1).next_multiple_of(ALIGNMENT).min(size),
        };
        if start >= size {
            break;
        }
        found.push(Extent {
            start,
            length: end - start,
        });
        position = end;
    }
    Ok(Some(found))
}

/// Reads the extents one after the other.
#[derive(Debug)]
pub struct Extents<'a> {
    file: &'a File,
    rest: std::vec::IntoIter<Extent>,
    current: Extent,
}

impl<'a> Extents<'a> {
    pub fn new(file: &'a File, extents: Vec<Extent>) -> Self {
        Self {
            file,
            rest: extents.into_iter(),
            current: Extent {
                start: 0,
                length: 0,
            },
        }
    }
}

impl Read for Extents<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.current.length == 0 {
            let Some(next) = self.rest.next() else {
                return Ok(0);
            };
            self.current = next;
        }
        let want = usize::try_from(self.current.length)
            .unwrap_or(usize::MAX)
            .min(buffer.len());
        let mut count = self.file.read_at(&mut buffer[..want], self.current.start)?;
        if count == 0 {
            buffer[..want].fill(0);
            count = want;
        }
        self.current.start += count as u64;
        self.current.length -= count as u64;
        Ok(count)
    }
}

/// Turns the header into that of a GNU sparse entry. Returns the headers that follow it, before the
/// data.
pub fn describe(header: &mut Header, extents: &[Extent], size: u64) -> io::Result<Vec<u8>> {
    header.set_entry_type(EntryType::GNUSparse);
    header.set_size(extents.iter().map(|extent| extent.length).sum());
    // An empty extent at the end gives the size of the file, also if it ends with a hole.
    let mut listed = extents.to_vec();
    listed.push(Extent {
        start: size,
        length: 0,
    });
    let gnu = header
        .as_gnu_mut()
        .ok_or_else(|| io::Error::other("sparse files need a GNU header"))?;
    gnu.set_real_size(size);
    let rest = list(&mut gnu.sparse, &listed);
    gnu.set_is_extended(!rest.is_empty());
    Ok(more_headers(rest))
}

fn more_headers(mut extents: &[Extent]) -> Vec<u8> {
    let mut bytes = Vec::new();
    while !extents.is_empty() {
        let mut header = GnuExtSparseHeader::new();
        extents = list(header.sparse_mut(), extents);
        header.set_is_extended(!extents.is_empty());
        bytes.extend_from_slice(header.as_bytes());
    }
    bytes
}

/// Fills the places with extents. Returns the extents that did not fit.
fn list<'a>(places: &mut [GnuSparseHeader], extents: &'a [Extent]) -> &'a [Extent] {
    let (listed, rest) = extents.split_at(extents.len().min(places.len()));
    for (place, extent) in places.iter_mut().zip(listed) {
        place.set_offset(extent.start);
        place.set_length(extent.length);
    }
    rest
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sparse_file() -> File {
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 20).unwrap();
        file.write_all_at(&[1; 5000], 1 << 18).unwrap();
        file
    }

    /// As in `pack`, but with a change of the file after its extents were found.
    fn archived(file: &File, change: impl FnOnce(&File)) -> Vec<u8> {
        let size = file.metadata().unwrap().len();
        let extents = find(file, size).unwrap().unwrap();
        let mut header = Header::new_gnu();
        let more = describe(&mut header, &extents, size).unwrap();
        change(file);
        let mut builder = tar::Builder::new(Vec::new());
        builder
            .append_data(
                &mut header,
                "sparse",
                more.chain(Extents::new(file, extents)),
            )
            .unwrap();
        let mut after = Header::new_gnu();
        after.set_size(5);
        builder
            .append_data(&mut after, "after", &b"after"[..])
            .unwrap();
        builder.into_inner().unwrap()
    }

    fn contents(archive: &[u8]) -> Vec<Vec<u8>> {
        let mut archive = tar::Archive::new(archive);
        let read = |entry: io::Result<tar::Entry<'_, _>>| {
            let mut bytes = Vec::new();
            entry
                .unwrap()
                .read_to_end(&mut bytes)
                .map(|_| bytes)
                .unwrap()
        };
        archive.entries().unwrap().map(read).collect()
    }

    #[test]
    fn a_sparse_file_that_shrinks_or_grows_keeps_its_promised_size() {
        let changes: [fn(&File); 3] = [
            |_| {},
            |file| file.set_len((1 << 18) + 100).unwrap(),
            |file| file.write_all_at(&[2; 1 << 20], 1 << 20).unwrap(),
        ];
        for (change, kept) in changes.into_iter().zip([5000, 100, 5000]) {
            let members = contents(&archived(&sparse_file(), change));
            let mut expected = vec![0; 1 << 20];
            expected[1 << 18..][..kept].fill(1);
            assert!(members[0] == expected);
            assert_eq!(members[1], b"after");
        }
    }

    #[test]
    fn many_extents_take_more_headers() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(100 << 16).unwrap();
        (0..100u64).for_each(|i| file.write_all_at(&[i as u8 + 1; 10], i << 16).unwrap());
        let members = contents(&archived(&file, |_| {}));
        let mut expected = vec![0; 100 << 16];
        (0..100).for_each(|i| expected[i << 16..][..10].fill(i as u8 + 1));
        assert!(members[0] == expected && members[1] == b"after");
    }
}
