//! A layer at rest: the header and the run table, read from a file that may be hostile.
//!
//! ```text
//!   0 magic "SandtMem"  8 version  12 page size  16 RAM bytes  24 data bytes  32 data runs  40 zero runs
//!  48 SHA-256 of bytes 0 to 47 and the table  80 zeros up to 4096
//!     then data bytes, then the table: (first page, pages) of every data run, then of every zero run
//! ```
//!
//! Little-endian. There are no offsets in it: data pages stand in the order of their runs without a
//! gap, so a layer cannot point outside its file or twice into it.

use std::fs::File;

use sha2::{Digest as _, Sha256};

use super::{DataRun, PAGE, PIECE, PageRun};
use crate::Error;
use crate::damage::memory::{Damage, RunKind};
use crate::fs::ReadAt;

const MAGIC: [u8; 8] = *b"SandtMem";
const VERSION: u32 = 1;
/// What the checksum covers of the header.
const FIELDS: usize = 48;
const CHECKSUM: std::ops::Range<usize> = FIELDS..FIELDS + 32;
const ENTRY: u64 = 16;

/// The most guest memory a layer can belong to.
pub const MAX_RAM_BYTES: u64 = 4 << 40;
/// The most runs a layer can have, data and zero together: 16 MiB of table.
pub const MAX_RUNS: u64 = 1 << 20;

/// What a layer holds. Runs are ascending and disjoint, also data against zero.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layer {
    pub ram_bytes: u64,
    pub data: Vec<DataRun>,
    pub zero: Vec<PageRun>,
    pub data_bytes: u64,
}

impl Layer {
    /// How many pieces of memory it has: each is a mapping of a machine restored from it.
    pub fn pieces(&self) -> usize {
        self.data.len() + self.zero.len()
    }

    /// Reads and checks everything but the data pages, which are not touched.
    pub fn read(file: &File) -> Result<Self, Error> {
        Self::read_from(file)
    }

    pub(crate) fn read_from(file: &dyn ReadAt) -> Result<Self, Error> {
        let len = file
            .bytes()
            .map_err(Error::layer_io("measure a memory layer", 0))?;
        require(len >= PAGE, Damage::Short)?;
        let mut page = [0; PAGE as usize];
        read_at(file, &mut page, 0)?;
        let header = Header::parse(&page, len)?;
        let mut table = Table {
            file,
            at: header.table_offset(),
            hash: Sha256::new_with_prefix(&page[..FIELDS]),
        };
        let data = table.runs(RunKind::Data, header.data_runs, header.ram_bytes / PAGE)?;
        let zero = table.runs(RunKind::Zero, header.zero_runs, header.ram_bytes / PAGE)?;
        require(
            table.hash.finalize()[..] == page[CHECKSUM],
            Damage::Checksum,
        )?;
        refuse_common_pages(&data, &zero)?;
        let layer = Self::new(header.ram_bytes, &data, zero);
        let runs = layer.data_bytes;
        let header = header.data_bytes;
        require(runs == header, Damage::DataBytes { runs, header })?;
        Ok(layer)
    }

    fn new(ram_bytes: u64, data: &[PageRun], zero: Vec<PageRun>) -> Self {
        let mut end = PAGE;
        let place = |pages: &PageRun| {
            let file_offset = end;
            end += pages.count * PAGE;
            DataRun {
                pages: *pages,
                file_offset,
            }
        };
        let data = data.iter().map(place).collect();
        Self {
            ram_bytes,
            data,
            zero,
            data_bytes: end - PAGE,
        }
    }

    /// The length of the file.
    pub fn len_bytes(&self) -> u64 {
        PAGE + self.data_bytes + (self.data.len() + self.zero.len()) as u64 * ENTRY
    }

    pub(super) fn table_bytes(&self) -> Vec<u8> {
        let runs = self.data.iter().map(|run| &run.pages).chain(&self.zero);
        runs.flat_map(|run| [run.first.to_le_bytes(), run.count.to_le_bytes()])
            .flatten()
            .collect()
    }

    pub(super) fn header_bytes(&self, table: &[u8]) -> Vec<u8> {
        let mut page = Vec::with_capacity(PAGE as usize);
        page.extend(MAGIC);
        page.extend(VERSION.to_le_bytes());
        page.extend((PAGE as u32).to_le_bytes());
        for field in [
            self.ram_bytes,
            self.data_bytes,
            self.data.len() as u64,
            self.zero.len() as u64,
        ] {
            page.extend(field.to_le_bytes());
        }
        let checksum = Sha256::new_with_prefix(&page)
            .chain_update(table)
            .finalize();
        page.extend(checksum);
        page.resize(PAGE as usize, 0);
        page
    }
}

/// Whether a guest can have this much memory, and if not, by which rule.
pub(crate) fn check_ram(bytes: u64) -> Result<(), &'static str> {
    match bytes {
        0 => Err("it must hold something"),
        _ if bytes > MAX_RAM_BYTES => Err("4 TiB is the most"),
        _ if !bytes.is_multiple_of(PAGE) => Err("it must be a multiple of 4096"),
        _ => Ok(()),
    }
}

struct Header {
    ram_bytes: u64,
    data_bytes: u64,
    data_runs: u64,
    zero_runs: u64,
}

impl Header {
    /// Every number in it is bounded once this returns, and the table is where the file has it.
    fn parse(page: &[u8; PAGE as usize], len: u64) -> Result<Self, Error> {
        let u32_at =
            |at: usize| u32::from_le_bytes(page[at..at + 4].try_into().expect("four bytes"));
        let u64_at =
            |at: usize| u64::from_le_bytes(page[at..at + 8].try_into().expect("eight bytes"));
        require(page[..8] == MAGIC, Damage::NotALayer)?;
        require(u32_at(8) == VERSION, Damage::Version(u32_at(8)))?;
        require(u64::from(u32_at(12)) == PAGE, Damage::PageSize(u32_at(12)))?;
        let [ram_bytes, data_bytes, data_runs, zero_runs] = [16, 24, 32, 40].map(u64_at);
        let header = Self {
            ram_bytes,
            data_bytes,
            data_runs,
            zero_runs,
        };
        require(check_ram(ram_bytes).is_ok(), Damage::RamBytes(ram_bytes))?;
        let few = data_runs
            .checked_add(zero_runs)
            .is_some_and(|runs| runs <= MAX_RUNS);
        require(
            few,
            Damage::Runs {
                data: data_runs,
                zero: zero_runs,
            },
        )?;
        require(data_bytes <= ram_bytes, Damage::TooMuchData(data_bytes))?;
        let expected = header.table_offset() + (data_runs + zero_runs) * ENTRY;
        require(
            expected == len,
            Damage::Length {
                expected,
                found: len,
            },
        )?;
        match page[CHECKSUM.end..].iter().position(|byte| *byte != 0) {
            Some(at) => Err(Error::MemoryLayer(Damage::Padding {
                at: CHECKSUM.end + at,
            })),
            None => Ok(header),
        }
    }

    fn table_offset(&self) -> u64 {
        PAGE + self.data_bytes
    }
}

/// The run table, read once from front to back.
struct Table<'a> {
    file: &'a dyn ReadAt,
    at: u64,
    hash: Sha256,
}

impl Table<'_> {
    fn runs(&mut self, kind: RunKind, count: u64, ram_pages: u64) -> Result<Vec<PageRun>, Error> {
        let mut runs = Vec::new();
        let mut free = 0;
        let mut piece = vec![0; PIECE.min((count * ENTRY) as usize)];
        while (runs.len() as u64) < count {
            let left = (count - runs.len() as u64) * ENTRY;
            let piece = &mut piece[..PIECE.min(left as usize)];
            read_at(self.file, piece, self.at)?;
            self.at += piece.len() as u64;
            self.hash.update(&*piece);
            for entry in piece.chunks_exact(ENTRY as usize) {
                let run = check_run(entry, free, ram_pages)
                    .map_err(|wrong| wrong.of(kind, runs.len() as u64))?;
                free = run.end();
                runs.push(run);
            }
        }
        Ok(runs)
    }
}

/// What is wrong with one run.
enum Wrong {
    Empty,
    Order(u64),
    Outside,
}

impl Wrong {
    fn of(self, kind: RunKind, index: u64) -> Error {
        Error::MemoryLayer(match self {
            Self::Empty => Damage::EmptyRun { kind, index },
            Self::Order(first) => Damage::Order { kind, index, first },
            Self::Outside => Damage::Outside { kind, index },
        })
    }
}

/// `free` is the first page that no run before this one has.
fn check_run(entry: &[u8], free: u64, ram_pages: u64) -> Result<PageRun, Wrong> {
    let number = |at: usize| u64::from_le_bytes(entry[at..at + 8].try_into().expect("eight bytes"));
    let first = number(0);
    let count = number(8);
    match first.checked_add(count) {
        _ if count == 0 => Err(Wrong::Empty),
        _ if first < free => Err(Wrong::Order(first)),
        Some(end) if end <= ram_pages => Ok(PageRun { first, count }),
        _ => Err(Wrong::Outside),
    }
}

/// Both lists are in order, so one step through both finds every overlap.
fn refuse_common_pages(data: &[PageRun], zero: &[PageRun]) -> Result<(), Error> {
    let mut data = data.iter().peekable();
    for zero in zero {
        while data.next_if(|run| run.end() <= zero.first).is_some() {}
        if let Some(run) = data.peek().filter(|run| run.first < zero.end()) {
            return Err(Error::MemoryLayer(Damage::DataAndZero {
                page: run.first.max(zero.first),
            }));
        }
    }
    Ok(())
}

pub(super) fn read_at(file: &dyn ReadAt, into: &mut [u8], offset: u64) -> Result<(), Error> {
    file.read_exact_at(into, offset)
        .map_err(Error::layer_io("read a memory layer", offset))
}

fn require(fine: bool, damage: Damage) -> Result<(), Error> {
    if fine {
        Ok(())
    } else {
        Err(Error::MemoryLayer(damage))
    }
}
