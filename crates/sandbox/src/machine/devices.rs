//! The file with the state of a machine's devices.
//!
//! Three quarters of it are zeros: QEMU saves 1024 queues of each virtio device, and the guest uses
//! a few. These become holes. The devices of a machine with a screen hold its picture, too, some
//! megabytes of it; their file is compressed.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::{MemfdFlags, memfd_create};
use sandtree_store::MachineRecord;

/// The block of common file systems: a smaller hole saves nothing.
const BLOCK_BYTES: usize = 4096;
/// zstd's fastest: it compresses a picture of a desktop to a fiftieth.
const LEVEL: i32 = 1;
/// What the engine takes of QEMU at most.
const DEVICES_BYTES_MAX: u64 = 64 << 20;

/// How a file holds the state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Packing {
    /// As QEMU reads it, with holes where it is zero.
    Sparse,
    Zstd,
}

impl Packing {
    /// That of a state in layers of this machine.
    pub fn of(machine: &MachineRecord) -> Self {
        match machine.display {
            None => Self::Sparse,
            Some(_) => Self::Zstd,
        }
    }
}

/// Writes a new file.
pub(crate) fn write(path: &Path, devices: &[u8], packing: Packing) -> io::Result<()> {
    let mut file = File::options().write(true).create_new(true).open(path)?;
    if packing == Packing::Zstd {
        return file.write_all(&zstd::bulk::compress(devices, LEVEL)?);
    }
    for (number, block) in devices.chunks(BLOCK_BYTES).enumerate() {
        if block.iter().any(|byte| *byte != 0) {
            file.write_all_at(block, (number * BLOCK_BYTES) as u64)?;
        }
    }
    file.set_len(devices.len() as u64)
}

/// The content of a compressed file, as QEMU reads it. The file may come from anyone.
pub(crate) fn unpacked(file: File) -> io::Result<File> {
    let mut unpacked = File::from(memfd_create("devices", MemfdFlags::CLOEXEC)?);
    let mut decoder = zstd::stream::read::Decoder::new(file)?.take(DEVICES_BYTES_MAX + 1);
    if io::copy(&mut decoder, &mut unpacked)? > DEVICES_BYTES_MAX {
        let what = "the state of the devices is larger than 64 MiB";
        return Err(io::Error::new(io::ErrorKind::InvalidData, what));
    }
    Ok(unpacked)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    fn read_packed(path: &Path) -> io::Result<Vec<u8>> {
        let file = unpacked(File::open(path)?)?;
        let mut bytes = vec![0; file.metadata()?.len() as usize];
        file.read_exact_at(&mut bytes, 0)?;
        Ok(bytes)
    }

    #[test]
    fn zeros_become_holes_and_are_read_back() {
        let dir = tempfile::tempdir().expect("a directory can be made");
        let mut devices = vec![0; 50 * BLOCK_BYTES + 100];
        devices[3 * BLOCK_BYTES + 7] = 1;
        devices[40 * BLOCK_BYTES - 1] = 2;
        let path = dir.path().join("devices");
        write(&path, &devices, Packing::Sparse).expect("it is written");
        assert_eq!(std::fs::read(&path).expect("it is read"), devices);
        let on_disk = path.metadata().expect("it is there").blocks() * 512;
        assert!(on_disk <= 4 * BLOCK_BYTES as u64, "{on_disk} bytes");
    }

    #[test]
    fn a_picture_is_small_and_is_read_back() {
        let dir = tempfile::tempdir().expect("a directory can be made");
        let devices = [0x20, 0x40, 0x60, 0xff].repeat(1 << 20);
        let path = dir.path().join("devices");
        write(&path, &devices, Packing::Zstd).expect("it is written");
        assert_eq!(read_packed(&path).expect("it is read"), devices);
        let bytes = path.metadata().expect("it is there").len();
        assert!(bytes < 100 << 10, "{bytes} bytes");
    }

    #[test]
    fn a_file_that_is_not_compressed_or_too_large_is_refused() {
        let dir = tempfile::tempdir().expect("a directory can be made");
        let path = dir.path().join("devices");
        write(&path, b"QEVM", Packing::Sparse).expect("it is written");
        assert!(read_packed(&path).is_err());
        let large = dir.path().join("large");
        let zeros = vec![0; DEVICES_BYTES_MAX as usize + 1];
        write(&large, &zeros, Packing::Zstd).expect("it is written");
        let refused = read_packed(&large).expect_err("it is too large");
        assert_eq!(refused.kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn an_existing_file_is_not_replaced() {
        let dir = tempfile::tempdir().expect("a directory can be made");
        let path = dir.path().join("devices");
        write(&path, b"first", Packing::Sparse).expect("it is written");
        assert!(write(&path, b"second", Packing::Sparse).is_err());
        assert_eq!(std::fs::read(&path).expect("it is read"), b"first");
    }
}
