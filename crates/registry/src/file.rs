//! Whole files of a bounded size.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use crate::error::Error;

/// Reads a file. A file of more than `limit` bytes is refused.
pub(crate) fn read_bounded(path: &Path, limit: u64) -> Result<Vec<u8>, Error> {
    let failed = |source| Error::io("read", path.display(), source);
    let mut bytes = Vec::new();
    File::open(path)
        .map_err(failed)?
        .take(limit + 1)
        .read_to_end(&mut bytes)
        .map_err(failed)?;
    if bytes.len() as u64 > limit {
        return Err(Error::TooLarge {
            what: path.display().to_string(),
            limit_bytes: limit,
        });
    }
    Ok(bytes)
}
