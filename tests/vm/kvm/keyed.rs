//! Stores that are made once for all tests, and again when their inputs have changed.

use std::collections::hash_map::DefaultHasher;
use std::fs;
use std::hash::{Hash, Hasher};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::support::{entries, program};

pub const QEMU: &str = "/usr/bin/qemu-system-x86_64";

/// The inputs of a store: the two programs that made it, and what its maker names.
pub fn key(others: &[&str]) -> String {
    let mut hasher = DefaultHasher::new();
    for program in [program(), Path::new(QEMU)] {
        let file = fs::metadata(program).unwrap_or_else(|e| panic!("{}: {e}", program.display()));
        (file.len(), file.mtime(), file.mtime_nsec()).hash(&mut hasher);
    }
    others.hash(&mut hasher);
    format!("{:016x}", hasher.finish())
}

/// The directory `PREFIX-KEY` of these tests, made if it is missing. Directories with other keys
/// are removed.
pub fn made_once(prefix: &str, key: &str, make: impl FnOnce(&Path)) -> PathBuf {
    let tests = Path::new(env!("CARGO_TARGET_TMPDIR"));
    fs::create_dir_all(tests).unwrap();
    let lock = fs::File::create(tests.join(format!("{prefix}.lock"))).unwrap();
    lock.lock().unwrap();
    let path = tests.join(format!("{prefix}-{key}"));
    if !path.exists() {
        let is_old = |path: &PathBuf| {
            path.is_dir() && path.to_string_lossy().contains(&format!("/{prefix}-"))
        };
        entries(tests)
            .iter()
            .filter(|path| is_old(path))
            .for_each(|old| fs::remove_dir_all(old).unwrap());
        // An interrupted maker leaves nothing that looks finished.
        let unfinished = tests.join(format!("{prefix}-unfinished"));
        make(&unfinished);
        fs::rename(&unfinished, &path).unwrap();
    }
    path
}
