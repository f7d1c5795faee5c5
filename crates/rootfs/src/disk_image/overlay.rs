//! A qcow2 overlay on the disk below it.
//!
//! ```text
//!  overlay   | data | absent | zero | absent |
//!  below     | ...  | ...    | ...  |  (shorter)
//!  the disk  | data | below  | zero |  zeros |
//! ```
//!
//! Always: the disk has the size of the overlay. Beyond the end of the disk below, it is zero.

use std::path::Path;

use super::DiskLimits;
use super::error::DiskError;
use super::qcow2::{Below, Presence, Qcow2};
use super::source::{Raw, Run, Source};

/// An overlay without the disk below it.
#[derive(Debug)]
pub(super) struct Opened(Qcow2);

impl Opened {
    pub(super) fn open(path: &Path, limits: DiskLimits) -> Result<Self, DiskError> {
        Qcow2::open(Raw::open(path)?, limits, Below::Given).map(Self)
    }

    pub(super) fn table_bytes(&self) -> usize {
        self.0.table_bytes()
    }

    pub(super) fn on(self, below: Source) -> Source {
        Source::Overlay(Box::new(Overlay { top: self.0, below }))
    }
}

#[derive(Debug)]
pub(super) struct Overlay {
    top: Qcow2,
    below: Source,
}

impl Overlay {
    pub(super) fn bytes(&self) -> u64 {
        self.top.bytes()
    }

    pub(super) fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), DiskError> {
        let mut done = 0;
        while done < into.len() {
            let at = offset + done as u64;
            let (end, presence) = self.top.presence(at)?;
            let left = (end - at).min((into.len() - done) as u64) as usize;
            let part = &mut into[done..done + left];
            match presence {
                Presence::Absent => self.read_below(at, part)?,
                Presence::Zero => part.fill(0),
                Presence::Data => self.top.read(at, part)?,
            }
            done += left;
        }
        Ok(())
    }

    fn read_below(&self, at: u64, into: &mut [u8]) -> Result<(), DiskError> {
        let there = self.below.bytes().saturating_sub(at);
        let (inside, beyond) = into.split_at_mut(there.min(into.len() as u64) as usize);
        beyond.fill(0);
        if inside.is_empty() {
            return Ok(());
        }
        self.below.read(at, inside)
    }

    pub(super) fn run(&self, at: u64) -> Result<Run, DiskError> {
        let (end, presence) = self.top.presence(at)?;
        if presence != Presence::Absent || at >= self.below.bytes() {
            return Ok(Run {
                end,
                is_data: presence == Presence::Data,
            });
        }
        let below = self.below.run(at)?;
        Ok(Run {
            end: below.end.min(end),
            is_data: below.is_data,
        })
    }
}
