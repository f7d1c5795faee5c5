//! The pieces of one blob on their way: read, hashed and written at the same time.
//!
//! ```text
//!  ┌─► fill ──► hash ──► drain ─┐      each in a thread of its own, one of them the caller's
//!  └────────── empty ◄──────────┘
//! ```
//!
//! Always: no more than [`CHUNKS`] chunks exist, so memory is bounded whatever the sizes are. Every
//! byte that is drained was hashed before, in its place, with the holes between as zeros. When it
//! fails: the stages end one after the other, because their channels close; the first cause is
//! returned.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, ScopedJoinHandle};

use sha2::{Digest as _, Sha256};

use super::sparse::{Piece, SparseMap};
use crate::{Digest, Error, Progress, progress};

const CHUNK_BYTES: u64 = 1 << 20;
const CHUNKS: usize = 8;
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// Some bytes of a blob and where they belong.
#[derive(Debug, Default)]
pub(super) struct Chunk {
    pub offset: u64,
    pub bytes: Vec<u8>,
}

/// Fills a chunk whose place and length are set.
pub(super) type Fill<'a> = dyn FnMut(&mut Chunk) -> Result<(), Error> + 'a;
pub(super) type SendFill<'a> = dyn FnMut(&mut Chunk) -> Result<(), Error> + Send + 'a;
pub(super) type Drain<'a> = dyn FnMut(&Chunk) -> Result<(), Error> + 'a;
pub(super) type SendDrain<'a> = dyn FnMut(&Chunk) -> Result<(), Error> + Send + 'a;

/// Brings the pieces of a blob to the caller's thread.
pub(super) fn pull(
    map: &SparseMap,
    fill: &mut SendFill<'_>,
    drain: &mut Drain<'_>,
    progress: &dyn Progress,
) -> Result<Digest, Error> {
    if map.data_bytes() <= CHUNK_BYTES {
        return in_place(map, fill, drain, progress);
    }
    thread::scope(|scope| {
        let circle = Circle::new();
        let filling = scope.spawn(move || fill_all(map, fill, circle.empty, circle.to_hash));
        let hashing = scope.spawn(move || hash_all(map, circle.filled, circle.to_drain, progress));
        let drained = drain_all(drain, circle.hashed, circle.to_fill);
        let digest = joined(hashing);
        joined(filling).and(drained).and(digest)
    })
}

/// Takes the pieces of a blob from the caller's thread.
pub(super) fn push(
    map: &SparseMap,
    fill: &mut Fill<'_>,
    drain: &mut SendDrain<'_>,
    progress: &dyn Progress,
) -> Result<Digest, Error> {
    if map.data_bytes() <= CHUNK_BYTES {
        return in_place(map, fill, drain, progress);
    }
    thread::scope(|scope| {
        let circle = Circle::new();
        let draining = scope.spawn(move || drain_all(drain, circle.hashed, circle.to_fill));
        let hashing = scope.spawn(move || hash_all(map, circle.filled, circle.to_drain, progress));
        let filled = fill_all(map, fill, circle.empty, circle.to_hash);
        let digest = joined(hashing);
        filled.and(joined(draining)).and(digest)
    })
}

/// Without threads, which cost more than they bring here.
fn in_place(
    map: &SparseMap,
    fill: &mut Fill<'_>,
    drain: &mut Drain<'_>,
    progress: &dyn Progress,
) -> Result<Digest, Error> {
    let mut chunk = Chunk::default();
    let mut hasher = PieceHasher::new(progress);
    for part in parts(map) {
        chunk.place(part);
        fill(&mut chunk)?;
        hasher.take(&chunk)?;
        drain(&chunk)?;
    }
    hasher.finish(map)
}

/// The pieces of a map, in parts that fit a chunk.
fn parts(map: &SparseMap) -> impl Iterator<Item = Piece> {
    map.pieces().iter().flat_map(|piece| {
        let end = piece.end();
        let offsets = (piece.offset..end).step_by(CHUNK_BYTES as usize);
        offsets.map(move |offset| Piece {
            offset,
            bytes: CHUNK_BYTES.min(end - offset),
        })
    })
}

impl Chunk {
    fn place(&mut self, part: Piece) {
        self.offset = part.offset;
        self.bytes.resize(part.bytes as usize, 0);
    }
}

/// The channels between the stages, each with room for every chunk, so that sending never waits.
struct Circle {
    empty: Receiver<Chunk>,
    to_hash: SyncSender<Chunk>,
    filled: Receiver<Chunk>,
    to_drain: SyncSender<Chunk>,
    hashed: Receiver<Chunk>,
    to_fill: SyncSender<Chunk>,
}

impl Circle {
    fn new() -> Self {
        let (to_fill, empty) = sync_channel(CHUNKS);
        let (to_hash, filled) = sync_channel(CHUNKS);
        let (to_drain, hashed) = sync_channel(CHUNKS);
        for _ in 0..CHUNKS {
            hand_on(&to_fill, Chunk::default());
        }
        Self {
            empty,
            to_hash,
            filled,
            to_drain,
            hashed,
            to_fill,
        }
    }
}

/// Returns whether the next stage took it. A stage that ended has returned its own error.
fn hand_on(to: &SyncSender<Chunk>, chunk: Chunk) -> bool {
    to.send(chunk).is_ok()
}

fn fill_all(
    map: &SparseMap,
    fill: &mut Fill<'_>,
    empty: Receiver<Chunk>,
    to_hash: SyncSender<Chunk>,
) -> Result<(), Error> {
    for part in parts(map) {
        let Ok(mut chunk) = empty.recv() else { break };
        chunk.place(part);
        fill(&mut chunk)?;
        if !hand_on(&to_hash, chunk) {
            break;
        }
    }
    Ok(())
}

fn hash_all(
    map: &SparseMap,
    filled: Receiver<Chunk>,
    to_drain: SyncSender<Chunk>,
    progress: &dyn Progress,
) -> Result<Digest, Error> {
    let mut hasher = PieceHasher::new(progress);
    for chunk in filled {
        hasher.take(&chunk)?;
        if !hand_on(&to_drain, chunk) {
            break;
        }
    }
    hasher.finish(map)
}

fn drain_all(
    drain: &mut Drain<'_>,
    hashed: Receiver<Chunk>,
    to_fill: SyncSender<Chunk>,
) -> Result<(), Error> {
    for chunk in hashed {
        drain(&chunk)?;
        // The filling stage needs no more chunks once all parts are read.
        hand_on(&to_fill, chunk);
    }
    Ok(())
}

fn joined<T>(thread: ScopedJoinHandle<'_, T>) -> T {
    thread
        .join()
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// SHA-256 over a blob of which only the pieces come along. It goes through every byte, so it also
/// tells how far it is.
struct PieceHasher<'a> {
    hash: Sha256,
    at: u64,
    progress: &'a dyn Progress,
}

impl<'a> PieceHasher<'a> {
    fn new(progress: &'a dyn Progress) -> Self {
        Self {
            hash: Sha256::new(),
            at: 0,
            progress,
        }
    }

    fn take(&mut self, chunk: &Chunk) -> Result<(), Error> {
        self.zeros_up_to(chunk.offset)?;
        self.add(&chunk.bytes)
    }

    fn zeros_up_to(&mut self, offset: u64) -> Result<(), Error> {
        while self.at < offset {
            let bytes = (offset - self.at).min(ZEROS.len() as u64);
            self.add(&ZEROS[..bytes as usize])?;
        }
        Ok(())
    }

    fn add(&mut self, bytes: &[u8]) -> Result<(), Error> {
        progress::check(self.progress)?;
        self.hash.update(bytes);
        self.at += bytes.len() as u64;
        self.progress.advance(bytes.len() as u64);
        Ok(())
    }

    fn finish(mut self, map: &SparseMap) -> Result<Digest, Error> {
        self.zeros_up_to(map.bytes())?;
        Ok(Digest::finish(self.hash))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Silent;
    use crate::fs::ReadAt;

    /// Larger than all chunks together, with holes.
    fn content() -> Vec<u8> {
        let mut content: Vec<u8> = (0..(CHUNKS as u64 + 3) * CHUNK_BYTES + 77)
            .map(|at| (at / 4093) as u8 | 1)
            .collect();
        content[1 << 20..3 << 20].fill(0);
        content
    }

    fn map_of(content: &Vec<u8>) -> SparseMap {
        let file: &dyn ReadAt = content;
        SparseMap::of_file(file).unwrap()
    }

    fn filler(content: &[u8]) -> impl FnMut(&mut Chunk) -> Result<(), Error> + Send {
        |chunk| {
            let start = chunk.offset as usize;
            let len = chunk.bytes.len();
            chunk.bytes.copy_from_slice(&content[start..start + len]);
            Ok(())
        }
    }

    fn drainer(found: &mut [u8]) -> impl FnMut(&Chunk) -> Result<(), Error> + Send {
        |chunk| {
            let start = chunk.offset as usize;
            found[start..start + chunk.bytes.len()].copy_from_slice(&chunk.bytes);
            Ok(())
        }
    }

    #[test]
    fn every_byte_arrives_in_its_place_and_is_hashed() {
        for content in [content(), b"small".to_vec(), Vec::new(), vec![0; 1 << 20]] {
            let map = map_of(&content);
            for forward in [true, false] {
                let mut found = vec![0; content.len()];
                let mut fill = filler(&content);
                let mut drain = drainer(&mut found);
                let digest = if forward {
                    push(&map, &mut fill, &mut drain, &Silent)
                } else {
                    pull(&map, &mut fill, &mut drain, &Silent)
                };
                assert_eq!(digest.unwrap(), Digest::of(&content));
                drop((fill, drain));
                assert!(found == content);
            }
        }
    }

    #[test]
    fn a_stage_that_fails_ends_the_others_and_returns_its_error() {
        let content = content();
        let failure = || Err(Error::NotEmpty);
        let map = map_of(&content);
        for at in [0, 5 << 20] {
            let mut found = vec![0; content.len()];
            let mut fill = |chunk: &mut Chunk| {
                if chunk.offset >= at {
                    failure()
                } else {
                    filler(&content)(chunk)
                }
            };
            assert!(matches!(
                push(&map, &mut fill, &mut drainer(&mut found), &Silent),
                Err(Error::NotEmpty)
            ));
            assert!(matches!(
                pull(&map, &mut fill, &mut drainer(&mut found), &Silent),
                Err(Error::NotEmpty)
            ));
            let mut drain = |chunk: &Chunk| {
                if chunk.offset >= at {
                    failure()
                } else {
                    Ok(())
                }
            };
            assert!(matches!(
                push(&map, &mut filler(&content), &mut drain, &Silent),
                Err(Error::NotEmpty)
            ));
            assert!(matches!(
                pull(&map, &mut filler(&content), &mut drain, &Silent),
                Err(Error::NotEmpty)
            ));
        }
    }

    /// Cancelled after some bytes.
    struct Cancelled(std::sync::atomic::AtomicU64);

    impl Progress for Cancelled {
        fn begin(&self, _: u64) {}

        fn advance(&self, bytes: u64) {
            self.0
                .fetch_add(bytes, std::sync::atomic::Ordering::Relaxed);
        }

        fn is_cancelled(&self) -> bool {
            self.0.load(std::sync::atomic::Ordering::Relaxed) > 5 << 20
        }
    }

    #[test]
    fn cancelling_ends_it_also_in_the_middle_of_a_hole() {
        let content = content();
        let mut found = vec![0; content.len()];
        let cancelled = || Cancelled(Default::default());
        let mut fill = filler(&content);
        let mut drain = drainer(&mut found);
        assert!(matches!(
            push(&map_of(&content), &mut fill, &mut drain, &cancelled()),
            Err(Error::Cancelled)
        ));
        assert!(matches!(
            pull(&map_of(&content), &mut fill, &mut drain, &cancelled()),
            Err(Error::Cancelled)
        ));
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 40).unwrap();
        let endless = SparseMap::of_file(&file).unwrap();
        assert!(matches!(
            pull(&endless, &mut fill, &mut drain, &cancelled()),
            Err(Error::Cancelled)
        ));
    }
}
