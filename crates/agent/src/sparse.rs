//! Writes files with holes where their content is zero.

use std::fs::File;
use std::io::{self, Read, Write};

/// The unit of holes.
const BLOCK: usize = 4096;
const BUFFER_SIZE: usize = 256 * 1024;

/// Writes the data, and leaves holes for whole blocks of zeros.
pub fn write_sparse(mut file: &File, entry: &mut impl Read) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER_SIZE];
    let mut position = 0u64;
    loop {
        let count = fill(entry, &mut buffer)?;
        if count == 0 {
            return file.set_len(position);
        }
        for (data, piece) in runs(&buffer[..count]) {
            if data {
                file.write_all(piece)?;
            } else {
                io::Seek::seek(&mut file, io::SeekFrom::Current(piece.len() as i64))?;
            }
        }
        position += count as u64;
    }
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
