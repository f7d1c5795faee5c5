//! Decompresses clusters.
//!
//! Always: the result is exactly one cluster, or nothing. Bytes after the compressed data in its
//! last sector are ignored.

use flate2::{Decompress, FlushDecompress};
use zstd::stream::raw::{DParameter, Decoder, InBuffer, Operation, OutBuffer};

/// More than the largest cluster needs. A frame can request a window of gigabytes.
const WINDOW_LOG_MAX: u32 = 23;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Compression {
    Deflate,
    Zstd,
}

pub(super) fn cluster(
    compression: Compression,
    input: &[u8],
    cluster_bytes: usize,
) -> Option<Vec<u8>> {
    let mut cluster = vec![0; cluster_bytes];
    let is_whole = match compression {
        Compression::Deflate => inflate(input, &mut cluster),
        Compression::Zstd => unzstd(input, &mut cluster),
    };
    is_whole.then_some(cluster)
}

fn inflate(input: &[u8], cluster: &mut [u8]) -> bool {
    let mut state = Decompress::new(false);
    let done = state.decompress(input, cluster, FlushDecompress::Finish);
    done.is_ok() && state.total_out() == cluster.len() as u64
}

fn unzstd(input: &[u8], cluster: &mut [u8]) -> bool {
    let Ok(mut decoder) = Decoder::new() else {
        return false;
    };
    if decoder
        .set_parameter(DParameter::WindowLogMax(WINDOW_LOG_MAX))
        .is_err()
    {
        return false;
    }
    let mut from = InBuffer::around(input);
    let mut to = OutBuffer::around(cluster);
    loop {
        let before = (from.pos(), to.pos());
        let Ok(hint) = decoder.run(&mut from, &mut to) else {
            return false;
        };
        let is_full = to.pos() == to.capacity();
        if is_full && hint == 0 {
            return true;
        }
        if (from.pos(), to.pos()) == before {
            return false;
        }
    }
}
