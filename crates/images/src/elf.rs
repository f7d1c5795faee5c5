//! The parts of 64-bit little-endian ELF that tell kernels and modules apart.
//!
//! Always: every offset from the file is checked before its use; a malformed file gives `None`.

const PT_NOTE: u32 = 4;
const MAGIC: &[u8] = b"\x7fELF\x02\x01";

#[derive(Debug, Clone, Copy)]
pub(crate) struct Elf<'a>(&'a [u8]);

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Note<'a> {
    pub name: &'a [u8],
    pub kind: u32,
}

impl<'a> Elf<'a> {
    pub(crate) fn parse(bytes: &'a [u8]) -> Option<Self> {
        bytes.starts_with(MAGIC).then_some(Self(bytes))
    }

    /// The content of the section of that name.
    pub(crate) fn section(self, name: &str) -> Option<&'a [u8]> {
        let table = u64_at(self.0, 40)?;
        let count = u16_at(self.0, 60)?;
        let header = |index: u16| slice(self.0, table.checked_add(u64::from(index) * 64)?, 64);
        let content = |header: &[u8]| slice(self.0, u64_at(header, 24)?, u64_at(header, 32)?);
        let names = content(header(u16_at(self.0, 62)?)?)?;
        let is_wanted = |header: &&[u8]| {
            let start = u32_at(header, 0).map(|at| at as usize);
            start.and_then(|start| names.get(start..)?.strip_prefix(name.as_bytes())?.first())
                == Some(&0)
        };
        content((0..count).filter_map(header).find(is_wanted)?)
    }

    /// All notes of all note segments.
    pub(crate) fn notes(self) -> Vec<Note<'a>> {
        self.note_segments()
            .unwrap_or_default()
            .into_iter()
            .flat_map(notes_of)
            .collect()
    }

    fn note_segments(self) -> Option<Vec<&'a [u8]>> {
        let table = u64_at(self.0, 32)?;
        let count = u16_at(self.0, 56)?;
        let header = |index: u16| slice(self.0, table.checked_add(u64::from(index) * 56)?, 56);
        let notes = (0..count)
            .filter_map(header)
            .filter(|header| u32_at(header, 0) == Some(PT_NOTE));
        notes
            .map(|header| slice(self.0, u64_at(header, 8)?, u64_at(header, 32)?))
            .collect()
    }
}

fn notes_of(mut segment: &[u8]) -> Vec<Note<'_>> {
    let mut notes = Vec::new();
    while let Some((note, rest)) = next_note(segment) {
        notes.push(note);
        segment = rest;
    }
    notes
}

fn next_note(segment: &[u8]) -> Option<(Note<'_>, &[u8])> {
    let name_len = u32_at(segment, 0)? as usize;
    let content_len = u32_at(segment, 4)? as usize;
    let name = segment.get(12..12usize.checked_add(name_len)?)?;
    let end = 12 + name_len.next_multiple_of(4) + content_len.next_multiple_of(4);
    let kind = u32_at(segment, 8)?;
    Some((Note { name, kind }, segment.get(end..)?))
}

fn slice(bytes: &[u8], offset: u64, len: u64) -> Option<&[u8]> {
    let start = usize::try_from(offset).ok()?;
    bytes.get(start..start.checked_add(usize::try_from(len).ok()?)?)
}

pub(crate) fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}
