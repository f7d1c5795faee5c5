//! Whole files and directories of the host, with the path in every error.

use std::path::Path;

use crate::error::{Result, io_error};

pub(crate) fn read(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).map_err(io_error("read", path))
}

pub(crate) fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    std::fs::write(path, bytes).map_err(io_error("write", path))
}

pub(crate) fn create_dir(path: &Path) -> Result<()> {
    std::fs::create_dir_all(path).map_err(io_error("create directory", path))
}
