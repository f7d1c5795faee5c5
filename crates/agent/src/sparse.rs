//! Writes files with holes where their content is zero.

use std::fs::File;
use std::io::{self, BufRead, Read, Seek, SeekFrom, Write};

/// The unit of holes.
const BLOCK: usize = 4096;
const BUFFER_SIZE: usize = 256 * 1024;

/// Writes the data, and leaves holes for whole blocks of zeros.
pub fn write_sparse(file: &File, entry: &mut impl Read) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER_SIZE];
    let mut position = 0u64;
    loop {
        let count = fill(entry, &mut buffer)?;
        if count == 0 {
            return file.set_len(position);
        }
        write_runs(file, &buffer[..count])?;
        position += count as u64;
    }
}

/// As [`write_sparse`], from the pieces of a stream. Only the blocks that two pieces share are
/// copied.
pub fn write_pieces(mut file: &File, input: &mut impl BufRead) -> io::Result<()> {
    let mut shared = Vec::with_capacity(BLOCK);
    let mut length = 0;
    loop {
        let piece = input.fill_buf()?;
        if piece.is_empty() {
            file.write_all(&shared)?;
            return file.set_len(length);
        }
        let count = if shared.is_empty() && piece.len() >= BLOCK {
            let whole = piece.len() - piece.len() % BLOCK;
            write_runs(file, &piece[..whole])?;
            whole
        } else {
            let missing = (BLOCK - shared.len()).min(piece.len());
            shared.extend_from_slice(&piece[..missing]);
            missing
        };
        if shared.len() == BLOCK {
            write_runs(file, &shared)?;
            shared.clear();
        }
        input.consume(count);
        length += count as u64;
    }
}

fn write_runs(mut file: &File, blocks: &[u8]) -> io::Result<()> {
    for (data, run) in runs(blocks) {
        if data {
            file.write_all(run)?;
        } else {
            file.seek(SeekFrom::Current(run.len() as i64))?;
        }
    }
    Ok(())
}

/// Reads until the buffer is full or the stream ends, so that blocks stay aligned.
fn fill(from: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut count = 0;
    while count < buffer.len() {
        match from.read(&mut buffer[count..]) {
            Ok(0) => break,
            Ok(more) => count += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(count)
}

static NOTHING: [u8; BLOCK] = [0; BLOCK];

/// Splits into runs of blocks with data and runs of zero blocks.
fn runs(bytes: &[u8]) -> impl Iterator<Item = (bool, &[u8])> {
    let mut rest = bytes;
    std::iter::from_fn(move || {
        // Compares whole blocks: under emulation, a loop over bytes is the bottleneck of an upload.
        let holds_data = |block: &[u8]| block != NOTHING;
        let data = holds_data(rest.chunks(BLOCK).next()?);
        let length: usize = rest
            .chunks(BLOCK)
            .take_while(|block| holds_data(block) == data)
            .map(<[u8]>::len)
            .sum();
        let (run, after) = rest.split_at(length);
        rest = after;
        Some((data, run))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A stream that arrives in pieces of this length.
    fn pieces(bytes: &[u8], length: usize) -> impl BufRead {
        io::BufReader::with_capacity(length, bytes)
    }

    #[test]
    fn a_file_is_the_same_however_its_stream_is_cut() {
        let mut bytes: Vec<u8> = (0..5 * BLOCK + 77).map(|at| (at % 251) as u8).collect();
        bytes[BLOCK..3 * BLOCK].fill(0);
        for length in [1, 100, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 8 * BLOCK] {
            let file = tempfile::NamedTempFile::new().unwrap();
            write_pieces(file.as_file(), &mut pieces(&bytes, length)).unwrap();
            assert_eq!(std::fs::read(file.path()).unwrap(), bytes, "{length}");
            let first_hole = rustix::fs::seek(&file, rustix::fs::SeekFrom::Hole(0)).unwrap();
            assert_eq!(first_hole, BLOCK as u64, "{length}");
        }
    }

    #[test]
    fn zero_blocks_at_the_end_count_for_the_length() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut zeros = pieces(&[0; 3 * BLOCK], BLOCK);
        write_pieces(file.as_file(), &mut zeros).unwrap();
        assert_eq!(file.as_file().metadata().unwrap().len(), 3 * BLOCK as u64);
    }

    #[test]
    fn zero_blocks_and_data_are_separate_runs() {
        let mut bytes = vec![0; 3 * BLOCK + 5];
        bytes[BLOCK] = 1;
        let shape: Vec<_> = runs(&bytes).map(|(data, run)| (data, run.len())).collect();
        assert_eq!(
            shape,
            [(false, BLOCK), (true, BLOCK), (false, BLOCK), (true, 5)]
        );
    }
}
