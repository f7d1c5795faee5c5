//! Maps of sparse files: where their bytes belong.

use sandtree_disk::ext4::write::MAX_FILE_BYTES;

use super::header::Bad;
use super::number;

/// How many pieces a map may have; they need 16 MiB of memory.
pub(super) const MAX_PIECES: usize = 1 << 20;

/// Bytes that the archive contains. Bytes between two pieces are a hole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    pub offset: u64,
    pub bytes: u64,
}

/// Parses pieces of the old form: two numbers of twelve bytes each. Unused ones are zeros.
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
        return Err("its sparse map has more than 1048576 parts");
    }
    into.push(piece);
    Ok(())
}

/// Checks a map: its pieces are in order, inside the file, and have together as many bytes as the
/// archive contains.
pub(super) fn check(map: &[Piece], file_bytes: u64, held_bytes: u64) -> Result<(), Bad> {
    let mut end = 0;
    let mut sum = 0u64;
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
        return Err("the parts of a sparse file do not add up to its content");
    }
    Ok(())
}

const BEYOND: Bad = "a part of a sparse file is beyond its end";

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
    fn sparse_maps_must_match_their_file() {
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
