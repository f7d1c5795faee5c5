//! Writing a layer: pages in ascending order go in, a file that [`Layer::read`] takes comes out.
//!
//! Always: the header is written last, so what is cut short is no layer. At most 1 MiB is kept
//! back.
//!
//! When it fails: the file is of no use and its owner removes it.

use std::borrow::Borrow;
use std::fs::File;
use std::os::unix::fs::FileExt;

use super::layer::{MAX_RUNS, check_ram};
use super::{DataRun, Layer, PAGE, PIECE, PageRun, Stretch, stretches};
use crate::Error;

/// So many runs later, a stretch of zeros must be twice as long to be worth a run of its own.
const RUNS_PER_DOUBLING: usize = 4096;

/// Writes one layer into a new file, its own or a borrowed one.
#[derive(Debug)]
pub struct MemoryWriter<F> {
    file: F,
    layer: Layer,
    next_page: u64,
    /// Zero pages just before `next_page` that are neither stored nor in a zero run yet.
    undecided: u64,
    buffer: Vec<u8>,
}

impl<F: Borrow<File>> MemoryWriter<F> {
    pub fn new(file: F, ram_bytes: u64) -> Result<Self, Error> {
        check_ram(ram_bytes).map_err(|rule| Error::MemorySize {
            bytes: ram_bytes,
            rule,
        })?;
        refuse_content(file.borrow())?;
        let layer = Layer {
            ram_bytes,
            data: Vec::new(),
            zero: Vec::new(),
            data_bytes: 0,
        };
        Ok(Self {
            file,
            layer,
            next_page: 0,
            undecided: 0,
            buffer: Vec::new(),
        })
    }

    pub fn ram_bytes(&self) -> u64 {
        self.layer.ram_bytes
    }

    /// Adds whole pages behind all pages before. Zero pages take no space, unless there are so few
    /// of them between data that a run of their own would cost more than they do.
    pub fn append(&mut self, first_page: u64, bytes: &[u8]) -> Result<(), Error> {
        self.move_to(first_page, bytes.len())?;
        stretches(bytes).try_for_each(|stretch| match stretch {
            Stretch::Zero { pages } => self.leave_out(pages),
            Stretch::Data(bytes) => self.settle().and_then(|()| self.store(bytes)),
        })
    }

    /// Adds whole pages as data, whatever is in them: one run in the file where its neighbours are
    /// data, too.
    pub fn append_stored(&mut self, first_page: u64, bytes: &[u8]) -> Result<(), Error> {
        self.move_to(first_page, bytes.len())?;
        self.settle()?;
        self.store(bytes)
    }

    /// Adds zero pages behind all pages before, as [`append`](Self::append) does.
    pub(super) fn append_zeros(&mut self, first_page: u64, pages: u64) -> Result<(), Error> {
        self.move_to(first_page, (pages * PAGE) as usize)?;
        self.leave_out(pages)
    }

    /// Writes the run table, then the header. Not synced.
    pub fn finish(mut self) -> Result<Layer, Error> {
        self.settle()?;
        self.flush()?;
        let table = self.layer.table_bytes();
        write_at(self.file.borrow(), &table, PAGE + self.layer.data_bytes)?;
        write_at(self.file.borrow(), &self.layer.header_bytes(&table), 0)?;
        Ok(self.layer)
    }

    fn move_to(&mut self, first_page: u64, bytes: usize) -> Result<(), Error> {
        let pages = (bytes as u64).div_ceil(PAGE);
        let end = first_page.checked_add(pages);
        let rule = match end {
            _ if !(bytes as u64).is_multiple_of(PAGE) => "only whole pages can be",
            _ if first_page < self.next_page => "they are not behind the pages before",
            Some(end) if end <= self.layer.ram_bytes / PAGE => return self.leave_gap(first_page),
            _ => "guest memory ends before them",
        };
        Err(Error::MemoryPages {
            first_page,
            pages,
            rule,
        })
    }

    fn leave_gap(&mut self, first_page: u64) -> Result<(), Error> {
        if first_page > self.next_page {
            self.settle()?;
            self.next_page = first_page;
        }
        Ok(())
    }

    /// Counts pages as zero. Whether they become a run is known when the stretch is long enough, or
    /// ends.
    fn leave_out(&mut self, pages: u64) -> Result<(), Error> {
        self.undecided += pages;
        self.next_page += pages;
        let begin = self.next_page - self.undecided;
        let continues = self.layer.zero.last().is_some_and(|run| run.end() == begin);
        if continues || self.undecided >= self.worth_a_run() {
            self.add_zero_run()
        } else {
            Ok(())
        }
    }

    /// Doubling keeps a guest full of scattered zero pages from becoming a layer of countless runs,
    /// each of which is a mapping later: at most 4096 of them per power of two of its pages.
    fn worth_a_run(&self) -> u64 {
        let doublings = (self.layer.data.len() + self.layer.zero.len()) / RUNS_PER_DOUBLING;
        1u64.checked_shl(doublings as u32).unwrap_or(u64::MAX)
    }

    /// Decides about a stretch of zeros that ended while it was short.
    fn settle(&mut self) -> Result<(), Error> {
        let begin = self.next_page - self.undecided;
        let behind_data = self
            .layer
            .data
            .last()
            .is_some_and(|run| run.pages.end() == begin);
        match self.undecided {
            0 => Ok(()),
            pages if behind_data => {
                self.next_page = begin;
                self.undecided = 0;
                self.store_zeros(pages)
            }
            _ => self.add_zero_run(),
        }
    }

    fn add_zero_run(&mut self) -> Result<(), Error> {
        let run = PageRun {
            first: self.next_page - self.undecided,
            count: self.undecided,
        };
        self.undecided = 0;
        if let Some(last) = self
            .layer
            .zero
            .last_mut()
            .filter(|last| last.end() == run.first)
        {
            last.count += run.count;
            return Ok(());
        }
        self.refuse_too_many_runs(run)?;
        self.layer.zero.push(run);
        Ok(())
    }

    /// Stores zero pages at the place that is next.
    pub(super) fn store_zeros(&mut self, pages: u64) -> Result<(), Error> {
        let piece = vec![0; PIECE.min((pages * PAGE) as usize)];
        let mut left = pages * PAGE;
        while left > 0 {
            let bytes = left.min(PIECE as u64);
            self.store(&piece[..bytes as usize])?;
            left -= bytes;
        }
        Ok(())
    }

    fn store(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let run = PageRun {
            first: self.next_page,
            count: bytes.len() as u64 / PAGE,
        };
        if run.count == 0 {
            return Ok(());
        }
        self.add_data_run(run)?;
        self.next_page = run.end();
        self.write(bytes)
    }

    fn add_data_run(&mut self, run: PageRun) -> Result<(), Error> {
        let last = self
            .layer
            .data
            .last_mut()
            .filter(|last| last.pages.end() == run.first);
        match last {
            Some(last) => last.pages.count += run.count,
            None => {
                self.refuse_too_many_runs(run)?;
                self.layer.data.push(DataRun {
                    pages: run,
                    file_offset: PAGE + self.layer.data_bytes,
                });
            }
        }
        Ok(())
    }

    fn refuse_too_many_runs(&self, run: PageRun) -> Result<(), Error> {
        if ((self.layer.data.len() + self.layer.zero.len()) as u64) < MAX_RUNS {
            return Ok(());
        }
        Err(Error::MemoryPages {
            first_page: run.first,
            pages: run.count,
            rule: "it has as many runs as it can",
        })
    }

    /// Small pieces are gathered; a large one goes out from where it is.
    fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        if self.buffer.len() + bytes.len() > PIECE {
            self.flush()?;
        }
        if bytes.len() < PIECE {
            self.buffer.extend_from_slice(bytes);
        } else {
            write_at(self.file.borrow(), bytes, PAGE + self.layer.data_bytes)?;
        }
        self.layer.data_bytes += bytes.len() as u64;
        Ok(())
    }

    fn flush(&mut self) -> Result<(), Error> {
        let offset = PAGE + self.layer.data_bytes - self.buffer.len() as u64;
        write_at(self.file.borrow(), &self.buffer, offset)?;
        self.buffer.clear();
        Ok(())
    }
}

/// Old content could look like a header before there is one.
pub(super) fn refuse_content(file: &File) -> Result<(), Error> {
    match file
        .metadata()
        .map_err(Error::layer_io("measure a new layer", 0))?
        .len()
    {
        0 => Ok(()),
        _ => Err(Error::NotEmpty),
    }
}

pub(super) fn write_at(file: &File, bytes: &[u8], offset: u64) -> Result<(), Error> {
    file.write_all_at(bytes, offset)
        .map_err(Error::layer_io("write guest memory", offset))
}
