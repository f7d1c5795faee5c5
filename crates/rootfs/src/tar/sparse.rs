//! Where the bytes of a file with holes belong.

use super::header::Bad;
use super::number;
use crate::tree::MAX_FILE_BYTES;

/// How many pieces a map may have; they take 16 MiB.
pub(super) const MAX_PIECES: usize = 1 << 20;

/// Bytes that are in the archive; what is between two pieces is a hole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    pub offset: u64,
    pub bytes: u64,
}

/// Pieces of the old form: each two numbers of twelve bytes, and unused ones of zeros.
pub(super) fn old_pieces(fields: &[u8], into: &mut Vec<Piece>) -> Result<(), Bad> {
    for field in fields
        .chunks_exact(24)
        .take_while(|field| field.iter().any(|byte| *byte != 0))
    {
        push(
            into,
            Piece {
                offset: number::unsigned(&field[..12])?,
                bytes: number::unsigned(&field[12..])?,
            },
        )?;
    }
    Ok(())
}

pub(super) fn push(into: &mut Vec<Piece>, piece: Piece) -> Result<(), Bad> {
    if into.len() >= MAX_PIECES {
        return Err("the map of a sparse file has more than 1048576 parts");
    }
    into.push(piece);
    Ok(())
}

/// What a map claims: its pieces in order, inside of the file, and as many bytes as the archive
/// holds for them.
pub(super) fn check(map: &[Piece], file_bytes: u64, held_bytes: u64) -> Result<(), Bad> {
    let (mut end, mut sum) = (0, 0u64);
    for piece in map {
        if piece.offset < end {
            return Err("the parts of a sparse file are not in order");
        }
        end = piece
            .offset
            .checked_add(piece.bytes)
            .filter(|end| *end <= file_bytes)
            .ok_or(BEYOND)?;
        sum += piece.bytes;
    }
    if sum != held_bytes {
        return Err("the parts of a sparse file do not have the size of its bytes");
    }
    Ok(())
}

const BEYOND: Bad = "a part of a sparse file lies beyond its end";

pub(super) fn check_file_bytes(bytes: u64) -> Result<u64, Bad> {
    if bytes > MAX_FILE_BYTES {
        Err("a file is larger than 16 TiB")
    } else {
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claims_that_hold_and_those_that_do_not() {
        let piece = |offset, bytes| Piece { offset, bytes };
        assert_eq!(
            check(&[piece(0, 5), piece(5, 5), piece(100, 0)], 100, 10),
            Ok(())
        );
        assert_eq!(check(&[], 1 << 40, 0), Ok(()));
        for (map, held) in [
            (vec![piece(5, 5), piece(0, 5)], 10),
            (vec![piece(0, 5), piece(4, 5)], 10),
            (vec![piece(99, 2)], 2),
            (vec![piece(u64::MAX, 2)], 2),
            (vec![piece(0, 5)], 6),
            (vec![piece(0, 5)], 4),
        ] {
            assert!(check(&map, 100, held).is_err(), "{map:?}");
        }
    }
}
