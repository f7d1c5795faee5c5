//! Imports of disk images, as a user sees them.

mod hostile;
mod overlays;
mod qemu;
mod roots;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::process::Stdio;

use super::samples::{self, How, Qcow2, is_sound, root};
use super::{DiskError, DiskFormat, DiskLimits, ImportedDisk, Stop, import_disk, looks_like_disk};

const LIMITS: DiskLimits = DiskLimits {
    bytes: 64 << 20,
    written_bytes: u64::MAX,
};

/// Imports an image. Returns the new file, too; a failed import leaves none.
fn import(image: &[u8]) -> Result<(ImportedDisk, Vec<u8>), DiskError> {
    import_within(image, LIMITS)
}

fn import_within(image: &[u8], limits: DiskLimits) -> Result<(ImportedDisk, Vec<u8>), DiskError> {
    let dir = tempfile::tempdir().unwrap();
    let from = dir.path().join("from");
    let to = dir.path().join("to");
    fs::write(&from, image).unwrap();
    match import_disk(&from, &to, limits, &mut |_| Ok(())) {
        Ok(imported) => Ok((imported, fs::read(&to).unwrap())),
        Err(error) => {
            assert!(!to.exists(), "a file is left: {error}");
            Err(error)
        }
    }
}

fn message(image: &[u8]) -> String {
    import(image).unwrap_err().to_string()
}

/// The file system, and zeros up to a whole block.
fn padded(mut bytes: Vec<u8>) -> Vec<u8> {
    bytes.resize(bytes.len().next_multiple_of(4096), 0);
    bytes
}

#[test]
fn a_bare_file_system_is_imported_unchanged() {
    let dir = tempfile::tempdir().unwrap();
    let from = dir.path().join("from");
    let to = dir.path().join("to");
    fs::write(&from, [root(), vec![0xaa; 10_000]].concat()).unwrap();
    let mut heard = Vec::new();
    let mut watch = |bytes| {
        heard.push(bytes);
        Ok(())
    };
    let imported = import_disk(&from, &to, LIMITS, &mut watch).unwrap();
    assert!(
        fs::read(&to).unwrap() == padded(root()),
        "bytes after the file system are cut off"
    );
    assert!(is_sound(&to));
    let metadata = fs::metadata(&to).unwrap();
    assert_eq!((imported.bytes, metadata.len()), (1540 << 10, 1540 << 10));
    assert!(metadata.blocks() * 512 < 1 << 20, "zeros are holes");
    assert_eq!(
        (imported.format, imported.partition, imported.clean),
        (DiskFormat::Raw, None, true)
    );
    assert_eq!(imported.label.as_deref(), Some("cloud"));
    assert_eq!(imported.uuid[..4], [0x3f, 0x1c, 0x0e, 0x5a]);
    assert!(
        heard.is_sorted() && heard.last() == Some(&(1537 << 10)),
        "{heard:?}"
    );
}

#[test]
fn holes_are_not_read() {
    let dir = tempfile::tempdir().unwrap();
    let from = dir.path().join("from");
    let to = dir.path().join("to");
    let image = samples::tool("mke2fs")
        .args(["-q", "-F", "-t", "ext4", "-E", "lazy_itable_init=1"])
        .arg(&from)
        .arg("256M")
        .stdout(Stdio::null())
        .status();
    assert!(image.unwrap().success());
    let mut read = 0;
    let mut watch = |bytes| {
        read = bytes;
        Ok(())
    };
    import_disk(
        &from,
        &to,
        DiskLimits {
            bytes: 256 << 20,
            written_bytes: u64::MAX,
        },
        &mut watch,
    )
    .unwrap();
    assert!(read < 64 << 20, "{read} bytes were read");
    assert!(is_sound(&to) && fs::read(&to).unwrap() == fs::read(&from).unwrap());
}

#[test]
fn a_file_system_that_was_not_unmounted_is_imported_and_reported() {
    let mut image = root();
    image[1024 + 96] |= 4;
    assert!(!import(&image).unwrap().0.clean);
    let mut image = root();
    image[1024 + 58] = 0;
    assert!(!import(&image).unwrap().0.clean);
}

#[test]
fn a_qcow2_of_any_version_and_cluster_size_is_imported() {
    // Every fifth cluster of zeros is stored, although it could be absent.
    let zeros = |index: usize| match index {
        _ if index.is_multiple_of(5) => How::Packed,
        _ if index.is_multiple_of(3) => How::Zero,
        _ => How::Absent,
    };
    let data = |index: usize| match index % 2 {
        0 => How::Packed,
        _ => How::Data,
    };
    let any = |index: usize, bytes: &[u8]| {
        if bytes.iter().all(|byte| *byte == 0) {
            zeros(index)
        } else {
            data(index)
        }
    };
    let without_zeros = |index: usize, bytes: &[u8]| match any(index, bytes) {
        How::Zero => How::Absent,
        how => how,
    };
    for cluster_bits in [9, 10, 12, 16, 21] {
        let v2 = Qcow2 {
            version: 2,
            cluster_bits,
            is_zstd: false,
        };
        for image in [
            v2.file(&root(), without_zeros),
            Qcow2 { version: 3, ..v2 }.file(&root(), any),
            Qcow2 {
                version: 3,
                is_zstd: true,
                ..v2
            }
            .file(&root(), any),
        ] {
            let (imported, bytes) = import(&image).unwrap();
            assert!(
                bytes == padded(root()),
                "clusters of 2^{cluster_bits} bytes"
            );
            assert_eq!(imported.format, DiskFormat::Qcow2);
        }
    }
}

#[test]
fn a_stopped_import_leaves_no_file() {
    let dir = tempfile::tempdir().unwrap();
    let from = dir.path().join("from");
    let to = dir.path().join("to");
    fs::write(&from, root()).unwrap();
    let mut watch = |bytes| if bytes == 0 { Ok(()) } else { Err(Stop) };
    let result = import_disk(&from, &to, LIMITS, &mut watch);
    assert!(matches!(result, Err(DiskError::GivenUp)) && !to.exists());
}

#[test]
fn an_existing_file_is_not_overwritten() {
    let dir = tempfile::tempdir().unwrap();
    let from = dir.path().join("from");
    let to = dir.path().join("to");
    fs::write(&from, root()).unwrap();
    fs::write(&to, "mine").unwrap();
    import_disk(&from, &to, LIMITS, &mut |_| Ok(())).unwrap_err();
    assert_eq!(fs::read(&to).unwrap(), b"mine");
    let error =
        import_disk(dir.path(), &dir.path().join("new"), LIMITS, &mut |_| Ok(())).unwrap_err();
    assert!(matches!(error, DiskError::NotAFile(_)), "{error}");
}

#[test]
fn disks_are_distinguished_from_other_files() {
    let qcow2 = Qcow2 {
        version: 3,
        cluster_bits: 16,
        is_zstd: false,
    }
    .file(&root(), |_, _| How::Data);
    let look = |bytes: &[u8]| looks_like_disk(&bytes[..bytes.len().min(4096)]);
    assert_eq!(look(&qcow2), Some(DiskFormat::Qcow2));
    assert_eq!(look(&root()), Some(DiskFormat::Raw));
    assert_eq!(
        look(&samples::with_mbr(&[(0x83, &root())])),
        Some(DiskFormat::Raw)
    );
    assert_eq!(look(&samples::with_gpt(512, &[])), Some(DiskFormat::Raw));
    assert_eq!(look(&samples::with_gpt(4096, &[])), Some(DiskFormat::Raw));
    for other in [
        &b""[..],
        b"QFI",
        &[0x1f, 0x8b, 8, 0],
        &[0; 4096],
        &samples::magic(510, &[0x55, 0xaa]),
    ] {
        assert_eq!(look(other), None);
    }
}

#[test]
fn an_archive_is_never_recognised_as_a_disk() {
    let mut tar = root()[..4096].to_vec();
    tar[257..262].copy_from_slice(b"ustar");
    assert_eq!(looks_like_disk(&tar), None);
    for magic in [&[0x1f, 0x8b][..], &[0x28, 0xb5, 0x2f, 0xfd], b"\xfd7zXZ\0"] {
        let mut packed = root()[..4096].to_vec();
        packed[..magic.len()].copy_from_slice(magic);
        assert_eq!(looks_like_disk(&packed), None, "{magic:?}");
    }
    assert_eq!(
        looks_like_disk(&samples::magic(1080, &[0x53, 0xef])),
        None,
        "the magic number alone is not a file system"
    );
    for (at, value) in [(0, 0), (4, 0), (24, 7), (76, 2)] {
        let mut image = root()[..4096].to_vec();
        samples::put_u32(&mut image, 1024 + at, u32::swap_bytes(value));
        assert_eq!(looks_like_disk(&image), None, "{value} at {at}");
    }
}

#[test]
fn no_more_data_is_written_than_allowed() {
    let limits = DiskLimits {
        written_bytes: 1 << 20,
        ..LIMITS
    };
    import_within(&root(), limits).unwrap();
    // Many entries refer to one cluster with data.
    let mut qcow2 = Qcow2 {
        version: 3,
        cluster_bits: 12,
        is_zstd: false,
    }
    .file(&root(), |_, _| How::Data);
    let first = qcow2[8192..8200].to_vec();
    for entry in 100..root().len() / 4096 {
        qcow2[8192 + entry * 8..][..8].copy_from_slice(&first);
    }
    let error = import_within(&qcow2, limits).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the file system has more data than the limit of 1048576 bytes"
    );
}
