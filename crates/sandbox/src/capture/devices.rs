//! Writes the state of the devices to a file, with holes where it is zero.
//!
//! Three quarters of it are zeros: QEMU saves 1024 queues of each virtio device, and the guest uses
//! a few.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// The block of common file systems: a smaller hole saves nothing.
const BLOCK_BYTES: usize = 4096;

/// Writes a new file. Readers see the same bytes as without holes.
pub(super) fn write(path: &Path, devices: &[u8]) -> io::Result<()> {
    let file = File::options().write(true).create_new(true).open(path)?;
    for (number, block) in devices.chunks(BLOCK_BYTES).enumerate() {
        if block.iter().any(|byte| *byte != 0) {
            file.write_all_at(block, (number * BLOCK_BYTES) as u64)?;
        }
    }
    file.set_len(devices.len() as u64)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn zeros_become_holes_and_are_read_back() {
        let dir = tempfile::tempdir().expect("a directory can be made");
        let mut devices = vec![0; 50 * BLOCK_BYTES + 100];
        devices[3 * BLOCK_BYTES + 7] = 1;
        devices[40 * BLOCK_BYTES - 1] = 2;
        let path = dir.path().join("devices");
        write(&path, &devices).expect("it is written");
        assert_eq!(std::fs::read(&path).expect("it is read"), devices);
        let on_disk = path.metadata().expect("it is there").blocks() * 512;
        assert!(on_disk <= 4 * BLOCK_BYTES as u64, "{on_disk} bytes");
    }

    #[test]
    fn an_existing_file_is_not_replaced() {
        let dir = tempfile::tempdir().expect("a directory can be made");
        let path = dir.path().join("devices");
        write(&path, b"first").expect("it is written");
        assert!(write(&path, b"second").is_err());
        assert_eq!(std::fs::read(&path).expect("it is read"), b"first");
    }
}
