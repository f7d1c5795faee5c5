//! Which places of a member are stored, and which are zero.
//!
//! ```text
//! pieces\n  offset\n bytes\n  offset\n bytes\n …  zeros up to 512      GNU's sparse format 1.0, in front of the pieces
//! ```
//!
//! Always: a hole is a whole aligned block of 64 KiB of zeros, whatever the file system has
//! allocated, so equal content makes equal bytes. Pieces ascend, do not touch, and begin and end at
//! blocks or at the end of the member. A member that ends with a hole has an empty piece at its
//! end: without it, GNU tar makes the file too short.

use std::io::{self, Read};

use super::header::SECTOR;
use super::{Damage, Member};
use crate::damage::artifact::MAX_PIECES;
use crate::fs::ReadAt;

/// What is a hole or is not, as a whole.
pub const BLOCK: u64 = 64 << 10;
/// What is looked at of a block before all of it is read. Most blocks that are not zero say so
/// here.
const PROBE: usize = 4096;

/// A range of a member that is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    pub offset: u64,
    pub bytes: u64,
}

impl Piece {
    pub fn end(&self) -> u64 {
        self.offset + self.bytes
    }
}

/// The size of a member, and the pieces of it that are stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SparseMap {
    bytes: u64,
    pieces: Vec<Piece>,
}

impl SparseMap {
    /// A member without holes.
    pub fn dense(bytes: u64) -> Self {
        let pieces = (bytes > 0).then_some(Piece { offset: 0, bytes });
        Self {
            bytes,
            pieces: pieces.into_iter().collect(),
        }
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The bytes of all pieces.
    pub fn data_bytes(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.bytes).sum()
    }

    pub fn pieces(&self) -> &[Piece] {
        &self.pieces
    }

    pub(super) fn is_dense(&self) -> bool {
        self.data_bytes() == self.bytes
    }

    /// The map of a file that can be read anywhere; what its file system knows to be holes is not
    /// read.
    pub(crate) fn of_file(file: &dyn ReadAt) -> io::Result<Self> {
        let mut map = Self {
            bytes: file.bytes()?,
            pieces: Vec::new(),
        };
        let whole = map.bytes - map.bytes % BLOCK;
        let mut at = 0;
        let mut buffer = vec![0; BLOCK as usize];
        while at < whole {
            let Some(extent) = file.next_data(at)? else {
                break;
            };
            at = at.max(extent.start - extent.start % BLOCK);
            while at < extent.end.min(whole) {
                if !is_hole(file, at, &mut buffer)? {
                    map.add(at, BLOCK);
                }
                at += BLOCK;
            }
        }
        map.add_end(whole);
        Ok(map)
    }

    /// The map of content that can only be read from front to back.
    pub fn of_stream(bytes: u64, content: &mut dyn Read) -> io::Result<Self> {
        let mut map = Self {
            bytes,
            pieces: Vec::new(),
        };
        let whole = bytes - bytes % BLOCK;
        let mut buffer = vec![0; BLOCK as usize];
        for at in (0..whole).step_by(BLOCK as usize) {
            content.read_exact(&mut buffer)?;
            if !is_zero(&buffer) {
                map.add(at, BLOCK);
            }
        }
        map.add_end(whole);
        Ok(map)
    }

    fn add(&mut self, offset: u64, bytes: u64) {
        let pieces = self.pieces.len() as u64;
        match self.pieces.last_mut() {
            // One is left for the end of a member that ends with a hole.
            Some(last) if last.end() == offset || pieces == MAX_PIECES - 1 => {
                last.bytes = offset + bytes - last.offset
            }
            _ => self.pieces.push(Piece { offset, bytes }),
        }
    }

    /// What is behind the last whole block is stored, whatever it is.
    fn add_end(&mut self, whole: u64) {
        if whole < self.bytes {
            self.add(whole, self.bytes - whole);
        }
    }

    /// What stands in front of the pieces of a sparse member.
    pub(super) fn to_text(&self) -> Vec<u8> {
        let end = self.end_piece();
        let mut text = format!("{}\n", self.pieces.len() + end.iter().len()).into_bytes();
        for piece in self.pieces.iter().chain(&end) {
            text.extend(format!("{}\n{}\n", piece.offset, piece.bytes).into_bytes());
        }
        text.resize(text.len().next_multiple_of(SECTOR), 0);
        text
    }

    /// The empty piece of a member that ends with a hole.
    fn end_piece(&self) -> Option<Piece> {
        let end = self.pieces.last().map_or(0, Piece::end);
        (end < self.bytes).then_some(Piece {
            offset: self.bytes,
            bytes: 0,
        })
    }
}

fn is_hole(file: &dyn ReadAt, offset: u64, block: &mut [u8]) -> io::Result<bool> {
    let (probe, rest) = block.split_at_mut(PROBE);
    file.read_exact_at(probe, offset)?;
    if !is_zero(probe) {
        return Ok(false);
    }
    file.read_exact_at(rest, offset + PROBE as u64)?;
    Ok(is_zero(rest))
}

/// Of whole blocks, or the probe of one.
fn is_zero(bytes: &[u8]) -> bool {
    bytes.chunks(PROBE).all(|chunk| *chunk == [0; PROBE])
}

/// Reads the text of a map, a byte at a time, and checks every rule of it.
pub(super) struct MapParser<'a> {
    member: &'a Member,
    bytes: u64,
    number: Option<u64>,
    expected: Option<u64>,
    offset: Option<u64>,
    pieces: Vec<Piece>,
}

impl<'a> MapParser<'a> {
    pub(super) fn new(member: &'a Member, bytes: u64) -> Self {
        Self {
            member,
            bytes,
            number: None,
            expected: None,
            offset: None,
            pieces: Vec::new(),
        }
    }

    /// Takes one byte. Gives the map once the last number ended; only zeros may follow in the same
    /// sector.
    pub(super) fn take(&mut self, byte: u8) -> Result<Option<SparseMap>, Damage> {
        match byte {
            b'0'..=b'9' => self.digit(byte - b'0').map(|()| None),
            b'\n' => self.line(),
            _ => Err(self.refused("it holds something else than numbers")),
        }
    }

    fn refused(&self, rule: &'static str) -> Damage {
        Damage::Map {
            member: self.member.clone(),
            rule,
        }
    }

    fn digit(&mut self, digit: u8) -> Result<(), Damage> {
        if self.number == Some(0) {
            return Err(self.refused("a number begins with a zero"));
        }
        let number = self
            .number
            .unwrap_or(0)
            .checked_mul(10)
            .and_then(|number| number.checked_add(digit.into()));
        self.number = Some(number.ok_or_else(|| self.refused("a number is too large"))?);
        Ok(())
    }

    fn line(&mut self) -> Result<Option<SparseMap>, Damage> {
        let number = self
            .number
            .take()
            .ok_or_else(|| self.refused("a line is empty"))?;
        match (self.expected, self.offset.take()) {
            (None, _) => self.begin(number)?,
            (Some(_), None) => self.offset = Some(number),
            (Some(_), Some(offset)) => self.piece(Piece {
                offset,
                bytes: number,
            })?,
        }
        let is_last = self.offset.is_none() && self.expected == Some(self.pieces.len() as u64);
        if is_last {
            self.finish().map(Some)
        } else {
            Ok(None)
        }
    }

    fn begin(&mut self, pieces: u64) -> Result<(), Damage> {
        match pieces {
            0 => Err(self.refused("it has no pieces")),
            1..=MAX_PIECES => {
                self.expected = Some(pieces);
                Ok(())
            }
            _ => Err(Damage::TooManyPieces {
                member: self.member.clone(),
                pieces,
            }),
        }
    }

    fn piece(&mut self, piece: Piece) -> Result<(), Damage> {
        let after = self.pieces.last().map(Piece::end);
        let end = piece
            .offset
            .checked_add(piece.bytes)
            .filter(|end| *end <= self.bytes);
        let end = end.ok_or_else(|| self.refused("a piece ends behind the member"))?;
        let is_end = piece.bytes == 0
            && piece.offset == self.bytes
            && Some(self.pieces.len() as u64 + 1) == self.expected;
        let on_blocks =
            piece.offset.is_multiple_of(BLOCK) && (end.is_multiple_of(BLOCK) || end == self.bytes);
        match after {
            Some(after) if piece.offset < after => {
                return Err(self.refused("pieces overlap or run backwards"));
            }
            Some(after) if piece.offset == after => return Err(self.refused("pieces touch")),
            _ if is_end => {}
            _ if piece.bytes == 0 => return Err(self.refused("a piece is empty")),
            _ if !on_blocks => {
                return Err(self.refused("a piece does not begin and end at blocks of 64 KiB"));
            }
            _ => {}
        }
        self.pieces.push(piece);
        Ok(())
    }

    fn finish(&mut self) -> Result<SparseMap, Damage> {
        let mut pieces = std::mem::take(&mut self.pieces);
        if pieces.last().map(Piece::end) != Some(self.bytes) {
            return Err(self.refused("its last piece does not end with the member"));
        }
        pieces.pop_if(|piece| piece.bytes == 0);
        let map = SparseMap {
            bytes: self.bytes,
            pieces,
        };
        if map.is_dense() {
            return Err(self.refused("it has no holes"));
        }
        Ok(map)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Content by blocks: `.` is zero, everything else is not; `-` at the end is a short block of
    /// zeros.
    fn content(blocks: &str) -> Vec<u8> {
        let block = |c| match c {
            '.' => vec![0; BLOCK as usize],
            '-' => vec![0; 100],
            _ => [vec![0; BLOCK as usize - 1], vec![1]].concat(),
        };
        blocks.chars().flat_map(block).collect()
    }

    fn map_of(content: &[u8]) -> SparseMap {
        let file: &dyn ReadAt = &content.to_vec();
        let map = SparseMap::of_file(file).unwrap();
        assert_eq!(
            SparseMap::of_stream(content.len() as u64, &mut &content[..]).unwrap(),
            map
        );
        map
    }

    fn parse(bytes: u64, text: &[u8]) -> Result<SparseMap, Damage> {
        let mut parser = MapParser::new(&Member::Manifest, bytes);
        for byte in text {
            if let Some(map) = parser.take(*byte)? {
                return Ok(map);
            }
        }
        panic!("{text:?} does not end");
    }

    fn rule(bytes: u64, text: &str) -> String {
        parse(bytes, text.as_bytes()).unwrap_err().to_string()
    }

    #[test]
    fn holes_are_whole_blocks_of_zeros() {
        let pieces = |blocks: &str| {
            let map = map_of(&content(blocks));
            map.pieces()
                .iter()
                .map(|piece| (piece.offset / BLOCK, piece.bytes))
                .collect::<Vec<_>>()
        };
        assert_eq!(pieces("x.xx..x"), [(0, BLOCK), (2, 2 * BLOCK), (6, BLOCK)]);
        assert_eq!(pieces("..x."), [(2, BLOCK)]);
        assert_eq!(pieces(".-"), [(1, 100)]);
        assert_eq!(pieces("x-"), [(0, BLOCK + 100)]);
        assert_eq!(pieces("..."), []);
        assert_eq!(pieces(""), []);
    }

    #[test]
    fn a_map_reads_back_from_its_text() {
        for blocks in ["x.x", ".", "..x.", "x.-", "...x.x.x.x...-"] {
            let map = map_of(&content(blocks));
            let text = map.to_text();
            assert_eq!(text.len() % SECTOR, 0);
            assert_eq!(parse(map.bytes(), &text).unwrap(), map, "{blocks}");
        }
        assert_eq!(map_of(&content(".")).to_text()[..10], *b"1\n65536\n0\n");
    }

    #[test]
    fn what_the_file_system_allocated_does_not_matter() {
        use std::os::unix::fs::FileExt;
        let content = content("..x...x.-");
        let sparse = tempfile::tempfile().unwrap();
        let dense = tempfile::tempfile().unwrap();
        dense.write_all_at(&content, 0).unwrap();
        sparse.set_len(content.len() as u64).unwrap();
        for block in [2, 6] {
            sparse.write_all_at(&[1], (block + 1) * BLOCK - 1).unwrap();
        }
        assert_eq!(SparseMap::of_file(&sparse).unwrap(), map_of(&content));
        assert_eq!(SparseMap::of_file(&dense).unwrap(), map_of(&content));
    }

    #[test]
    fn a_file_with_too_many_pieces_is_stored_whole_from_some_point_on() {
        let mut map = SparseMap {
            bytes: u64::MAX,
            pieces: Vec::new(),
        };
        (0..MAX_PIECES + 5).for_each(|index| map.add(index * 2 * BLOCK, BLOCK));
        assert_eq!(map.pieces().len() as u64, MAX_PIECES - 1);
        assert_eq!(
            map.pieces().last().unwrap().end(),
            (MAX_PIECES + 4) * 2 * BLOCK + BLOCK
        );
    }

    #[test]
    fn a_map_that_breaks_a_rule_is_refused_by_it() {
        let bytes = 8 * BLOCK;
        let block = BLOCK;
        let two = |a: (u64, u64), b: (u64, u64)| format!("2\n{}\n{}\n{}\n{}\n", a.0, a.1, b.0, b.1);
        assert!(rule(bytes, &two((0, 2 * block), (block, 7 * block))).contains("overlap"));
        assert!(rule(bytes, &two((4 * block, block), (0, block))).contains("backwards"));
        assert!(rule(bytes, &two((0, block), (block, 7 * block))).contains("touch"));
        assert!(
            rule(bytes, &two((0, block), (4 * block, 5 * block))).contains("behind the member")
        );
        assert!(rule(bytes, &two((0, block), (u64::MAX, 2))).contains("behind the member"));
        assert!(rule(bytes, &two((0, block), (4 * block, block))).contains("does not end with"));
        assert!(rule(bytes, &two((0, 0), (bytes, 0))).contains("empty"));
        assert!(rule(bytes, &two((512, block), (bytes, 0))).contains("64 KiB"));
        assert!(rule(bytes, &two((0, 512), (bytes, 0))).contains("64 KiB"));
        assert!(rule(bytes, &format!("1\n0\n{bytes}\n")).contains("no holes"));
        assert!(rule(bytes, "0\n").contains("no pieces"));
        assert!(rule(bytes, "1048577\n").contains("the most"));
        assert!(rule(bytes, "01\n").contains("begins with a zero"));
        assert!(rule(bytes, "\n").contains("empty"));
        assert!(rule(bytes, "-1\n").contains("numbers"));
        assert!(rule(bytes, "99999999999999999999\n").contains("too large"));
    }
}
