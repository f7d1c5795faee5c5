//! The journal (jbd2): blocks that are committed but not yet written to their final places.
//!
//! ```text
//! superblock | … | descriptor: which blocks follow | blocks … | revoke: forget these | commit | descriptor … | (end)
//! ```
//!
//! The log is a ring that starts where its superblock says. It ends at the first block without the
//! number of the expected transaction. A transaction counts only with its commit block. The reader
//! writes nothing: to replay means to remember, for each block, where the journal has its newest
//! version.
//!
//! Checksums of versions 2 and 3, which come with metadata checksums, are verified. The checksum of
//! version 1 is not: a transaction with its commit block counts as complete, as in a journal
//! without checksums.
//!
//! Always: no more blocks are read than the journal has. Anything in the journal that cannot be
//! replayed is reported.

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;

use super::map::Map;
use super::{Error, FileSystem, read_at};
use crate::blocks::Blocks;
use crate::crc32c::crc32c;
use crate::ext4::format::{JOURNAL_MAGIC, JOURNAL_SUPERBLOCK_V2};
use crate::fields::{Be, Le};

const HEADER: usize = 12;
const TAIL: usize = 4;
/// A journal of 1 GiB with the smallest blocks, of 4 GiB with the usual ones.
const MAX_BLOCKS: u64 = 1 << 20;
const MAX_REVOKED: usize = 1 << 20;

mod kind {
    pub const DESCRIPTOR: u32 = 1;
    pub const COMMIT: u32 = 2;
    pub const SUPERBLOCK_V1: u32 = 3;

    pub const REVOKE: u32 = 5;
}

mod feature {
    pub const REVOKE: u32 = 0x1;
    pub const IS_64BIT: u32 = 0x2;
    pub const ASYNC_COMMIT: u32 = 0x4;
    pub const CHECKSUM_V2: u32 = 0x8;
    pub const CHECKSUM_V3: u32 = 0x10;
    pub const FAST_COMMIT: u32 = 0x20;
    pub const KNOWN: u32 =
        REVOKE | IS_64BIT | ASYNC_COMMIT | CHECKSUM_V2 | CHECKSUM_V3 | FAST_COMMIT;
}

mod tag {
    /// The block starts with the journal's magic number, which the log replaces by zeros.
    pub const ESCAPED: u32 = 1;
    pub const SAME_UUID: u32 = 2;
    pub const LAST: u32 = 8;
}

/// The place of a block's newest version in the journal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Logged {
    /// The number of that block in the file system.
    pub at: u64,
    is_escaped: bool,
}

/// The blocks whose newest versions are in the journal.
#[derive(Debug, Default)]
pub(super) struct Replay {
    block_bytes: u64,
    blocks: BTreeMap<u64, Logged>,
    trouble: Option<String>,
}

impl Replay {
    /// What the journal has that could not be replayed.
    pub(super) fn trouble(&self) -> Option<&str> {
        self.trouble.as_deref()
    }

    pub(super) fn within(&self, blocks: Range<u64>) -> impl Iterator<Item = (u64, Logged)> {
        // `BTreeMap::range` panics on a range whose end is before its start.
        let range = if blocks.is_empty() { 0..0 } else { blocks };
        self.blocks
            .range(range)
            .map(|(block, logged)| (*block, *logged))
    }

    /// Replaces blocks, read from block `first` on, by their newer versions.
    pub(super) fn apply(
        &self,
        disk: &dyn Blocks,
        first: u64,
        into: &mut [u8],
        block_bytes: u64,
    ) -> Result<(), Error> {
        let count = into.len() as u64 / block_bytes;
        for (block, logged) in self.within(first..first + count) {
            let start = (block - first) * block_bytes;
            let place = &mut into[start as usize..(start + block_bytes) as usize];
            self.read(disk, logged, place)?;
        }
        Ok(())
    }

    /// Replaces a part of one block, read from `offset` of the disk, by its newer version.
    pub(super) fn apply_part(
        &self,
        disk: &dyn Blocks,
        offset: u64,
        into: &mut [u8],
    ) -> Result<(), Error> {
        let Some(block) = offset.checked_div(self.block_bytes) else {
            return Ok(());
        };
        if let Some(logged) = self.blocks.get(&block) {
            let mut bytes = vec![0; self.block_bytes as usize];
            self.read(disk, *logged, &mut bytes)?;
            let start = (offset % self.block_bytes) as usize;
            into.copy_from_slice(&bytes[start..start + into.len()]);
        }
        Ok(())
    }

    fn read(&self, disk: &dyn Blocks, logged: Logged, into: &mut [u8]) -> Result<(), Error> {
        read_at(disk, logged.at * self.block_bytes, into)?;
        if logged.is_escaped {
            into[..4].copy_from_slice(&JOURNAL_MAGIC.to_be_bytes());
        }
        Ok(())
    }
}

/// Why a journal cannot be replayed.
type Reason = String;

/// Reads the journal of a file system that needs recovery. The inner error says why this journal
/// cannot be replayed.
pub(super) fn read(fs: &FileSystem<'_>) -> Result<Result<Replay, Reason>, Error> {
    let number = fs.superblock().journal_inode;
    if number == 0 {
        return Ok(Err("it is on another disk".into()));
    }
    let map = Map::of(fs, &fs.inode(number)?)?;
    let log = match Log::open(fs, &map)? {
        Ok(log) => log,
        Err(reason) => return Ok(Err(reason)),
    };
    Ok(Ok(Scan::new(log).run()?))
}

/// The journal's superblock, and its blocks.
struct Log<'f, 'b> {
    fs: &'f FileSystem<'b>,
    map: &'f Map,
    first: u64,
    /// The end of the ring.
    end: u64,
    start: u64,
    sequence: u32,
    features: u32,
    seed: u32,
}

impl<'f, 'b> Log<'f, 'b> {
    fn open(fs: &'f FileSystem<'b>, map: &'f Map) -> Result<Result<Self, Reason>, Error> {
        let Some(at) = map.physical(0) else {
            return Ok(Err("it is empty".into()));
        };
        let block = fs.block(at)?;
        let fields = Be(&block);
        let is_v2 = fields.u32(4) == JOURNAL_SUPERBLOCK_V2;
        if fields.u32(0) != JOURNAL_MAGIC || !(is_v2 || fields.u32(4) == kind::SUPERBLOCK_V1) {
            return Ok(Err("it has no superblock".into()));
        }
        let features = if is_v2 { fields.u32(40) } else { 0 };
        let fast_blocks = match (features & feature::FAST_COMMIT, fields.u32(84)) {
            (0, _) => 0,
            (_, 0) => 256,
            (_, blocks) => blocks,
        };
        let log = Self {
            fs,
            map,
            first: fields.u32(20).into(),
            end: u64::from(fields.u32(16)).saturating_sub(fast_blocks.into()),
            start: fields.u32(28).into(),
            sequence: fields.u32(24),
            features,
            seed: crc32c(!0, &block[48..64]),
        };
        Ok(log.check(fields.u32(12)).map(|()| log))
    }

    fn check(&self, block_bytes: u32) -> Result<(), Reason> {
        let is_ring = self.first > 0 && self.first < self.end;
        let starts_inside = self.start == 0 || (self.first..self.end).contains(&self.start);
        match self.features & !feature::KNOWN {
            _ if u64::from(block_bytes) != self.fs.block_bytes() => {
                Err("its block size differs from the file system's".into())
            }
            _ if !is_ring || !starts_inside => Err("its sizes are inconsistent".into()),
            _ if self.end > MAX_BLOCKS => Err(format!(
                "it has {} blocks, more than the supported {MAX_BLOCKS}",
                self.end
            )),
            0 => Ok(()),
            unknown => Err(format!("it uses features with the bits {unknown:#x}")),
        }
    }

    fn has(&self, features: u32) -> bool {
        self.features & features != 0
    }

    fn has_checksums(&self) -> bool {
        self.has(feature::CHECKSUM_V2 | feature::CHECKSUM_V3)
    }

    fn next(&self, at: u64) -> u64 {
        if at + 1 >= self.end {
            self.first
        } else {
            at + 1
        }
    }

    /// The place on the disk and the bytes of a block of the journal. No block of the journal has a
    /// newer version in the journal.
    fn block(&self, at: u64) -> Result<Option<(u64, Vec<u8>)>, Error> {
        let Some(physical) = self.map.physical(at) else {
            return Ok(None);
        };
        let mut bytes = vec![0; self.fs.block_bytes() as usize];
        read_at(self.fs.disk, physical * self.fs.block_bytes(), &mut bytes)?;
        Ok(Some((physical, bytes)))
    }

    /// Verifies the checksum at `place` of a block. It is computed with zeros at that place.
    fn is_whole(&self, block: &[u8], place: usize) -> bool {
        if !self.has_checksums() {
            return true;
        }
        let [before, behind] = [&block[..place], &block[place + 4..]];
        let sum = crc32c(crc32c(crc32c(self.seed, before), &[0; 4]), behind);
        sum == Be(block).u32(place)
    }

    /// The part of a descriptor or revoke block that can hold entries.
    fn entries<'a>(&self, block: &'a [u8]) -> &'a [u8] {
        &block[..block.len() - if self.has_checksums() { TAIL } else { 0 }]
    }

    fn has_whole_tail(&self, block: &[u8]) -> bool {
        self.is_whole(block, block.len() - TAIL)
    }

    fn tags(&self, block: &[u8]) -> Vec<Tag> {
        let mut tags = Vec::new();
        let mut rest = &self.entries(block)[HEADER..];
        while rest.len() >= self.tag_bytes() {
            let tag = self.tag(Be(rest));
            let has_uuid = tag.flags & tag::SAME_UUID == 0;
            let is_last = tag.flags & tag::LAST != 0;
            tags.push(tag);
            if is_last {
                break;
            }
            rest = rest
                .get(self.tag_bytes() + if has_uuid { 16 } else { 0 }..)
                .unwrap_or_default();
        }
        tags
    }

    fn tag(&self, fields: Be<'_>) -> Tag {
        let is_v3 = self.has(feature::CHECKSUM_V3);
        let high = if self.has(feature::IS_64BIT) {
            fields.u32(8)
        } else {
            0
        };
        Tag {
            block: u64::from(high) << 32 | u64::from(fields.u32(0)),
            flags: if is_v3 {
                fields.u32(4)
            } else {
                fields.u16(6).into()
            },
            checksum: if is_v3 {
                fields.u32(12)
            } else {
                fields.u16(4).into()
            },
        }
    }

    fn tag_bytes(&self) -> usize {
        let half = if self.has(feature::IS_64BIT) { 12 } else { 8 };
        match (
            self.has(feature::CHECKSUM_V3),
            self.has(feature::CHECKSUM_V2),
        ) {
            (true, _) => 16,
            (_, true) => half + 2,
            _ => half,
        }
    }

    fn is_data_whole(&self, tag: &Tag, sequence: u32, data: &[u8]) -> bool {
        let sum = crc32c(crc32c(self.seed, &sequence.to_be_bytes()), data);
        match (
            self.has(feature::CHECKSUM_V3),
            self.has(feature::CHECKSUM_V2),
        ) {
            (true, _) => sum == tag.checksum,
            (_, true) => sum & 0xffff == tag.checksum,
            _ => true,
        }
    }

    fn revoked<'a>(&self, block: &'a [u8]) -> impl Iterator<Item = u64> + use<'a> {
        let width = if self.has(feature::IS_64BIT) { 8 } else { 4 };
        let end = (Be(block).u32(HEADER) as usize).min(self.entries(block).len());
        let records = block.get(HEADER + 4..end).unwrap_or_default();
        records.chunks_exact(width).map(|record| {
            record
                .iter()
                .fold(0, |number, byte| number << 8 | u64::from(*byte))
        })
    }

    /// Whether there are fast commits: a second, smaller log after the ring, in another format. One
    /// block separates it from the ring.
    fn has_fast_commits(&self, sequence: u32) -> Result<bool, Error> {
        const HEAD: u16 = 9;
        if !self.has(feature::FAST_COMMIT) {
            return Ok(false);
        }
        let block = self.block(self.end + 1)?;
        Ok(block.is_some_and(|(_, bytes)| {
            let fields = Le(&bytes);
            fields.u16(0) == HEAD && fields.u32(8) == sequence
        }))
    }
}

/// The entry of a descriptor for one block.
struct Tag {
    block: u64,
    flags: u32,
    checksum: u32,
}

/// The blocks of a transaction until its commit block is read.
#[derive(Default)]
struct Pending {
    blocks: Vec<(u64, Logged)>,
    revoked: HashSet<u64>,
}

/// What the scan does after a block of the log.
enum Step {
    /// It reads the block at this place.
    Next(u64),
    /// The log ends here.
    End,
    /// The log breaks off here, for this reason.
    Trouble(String),
}

impl Step {
    fn unreadable() -> Self {
        Self::Trouble("it has a hole or no end".into())
    }
}

struct Scan<'f, 'b> {
    log: Log<'f, 'b>,
    /// How many more blocks may be read: each block of the ring once.
    left: u64,
    /// The number of the current transaction.
    sequence: u32,
    replay: Replay,
    pending: Pending,
}

impl<'f, 'b> Scan<'f, 'b> {
    fn new(log: Log<'f, 'b>) -> Self {
        let replay = Replay {
            block_bytes: log.fs.block_bytes(),
            ..Replay::default()
        };
        Self {
            left: log.end - log.first,
            sequence: log.sequence,
            replay,
            pending: Pending::default(),
            log,
        }
    }

    fn run(mut self) -> Result<Replay, Error> {
        let mut at = self.log.start;
        while self.log.start != 0 {
            match self.step(at)? {
                Step::Next(next) => at = next,
                Step::End => break,
                Step::Trouble(what) => {
                    self.replay.trouble =
                        Some(format!("its journal was replayed only in part: {what}"));
                    break;
                }
            }
        }
        if self.log.has_fast_commits(self.sequence)? {
            self.replay.trouble =
                Some("its journal has fast commits, which were not replayed".into());
        }
        Ok(self.replay)
    }

    fn block(&mut self, at: u64) -> Result<Option<(u64, Vec<u8>)>, Error> {
        let Some(left) = self.left.checked_sub(1) else {
            return Ok(None);
        };
        self.left = left;
        self.log.block(at)
    }

    fn step(&mut self, at: u64) -> Result<Step, Error> {
        let Some((_, block)) = self.block(at)? else {
            return Ok(Step::unreadable());
        };
        let fields = Be(&block);
        if fields.u32(0) != JOURNAL_MAGIC || fields.u32(8) != self.sequence {
            return Ok(Step::End);
        }
        match fields.u32(4) {
            kind::DESCRIPTOR if self.log.has_whole_tail(&block) => self.descriptor(at, &block),
            kind::REVOKE if self.log.has_whole_tail(&block) => Ok(self.revoke(at, &block)),
            kind::COMMIT if self.log.is_whole(&block, 16) => {
                self.commit();
                Ok(Step::Next(self.log.next(at)))
            }
            kind::DESCRIPTOR | kind::REVOKE | kind::COMMIT => Ok(Step::Trouble(format!(
                "its block {at} has a wrong checksum"
            ))),
            _ => Ok(Step::End),
        }
    }

    fn descriptor(&mut self, mut at: u64, block: &[u8]) -> Result<Step, Error> {
        for tag in self.log.tags(block) {
            at = self.log.next(at);
            let Some((physical, data)) = self.block(at)? else {
                return Ok(Step::unreadable());
            };
            if tag.block >= self.log.fs.blocks() {
                return Ok(Step::Trouble(format!(
                    "it has a block {}, which is outside the file system",
                    tag.block
                )));
            }
            if !self.log.is_data_whole(&tag, self.sequence, &data) {
                return Ok(Step::Trouble(format!(
                    "its block {at} has a wrong checksum"
                )));
            }
            let logged = Logged {
                at: physical,
                is_escaped: tag.flags & tag::ESCAPED != 0,
            };
            self.pending.blocks.push((tag.block, logged));
        }
        Ok(Step::Next(self.log.next(at)))
    }

    fn revoke(&mut self, at: u64, block: &[u8]) -> Step {
        for revoked in self.log.revoked(block) {
            if self.pending.revoked.len() >= MAX_REVOKED {
                return Step::Trouble(format!("it revokes more than {MAX_REVOKED} blocks"));
            }
            self.pending.revoked.insert(revoked);
        }
        Step::Next(self.log.next(at))
    }

    /// Applies a transaction. Blocks that it revokes are not replayed from it or earlier ones.
    fn commit(&mut self) {
        let Pending { blocks, revoked } = std::mem::take(&mut self.pending);
        self.replay.blocks.extend(blocks);
        for block in revoked {
            self.replay.blocks.remove(&block);
        }
        self.sequence = self.sequence.wrapping_add(1);
    }
}
