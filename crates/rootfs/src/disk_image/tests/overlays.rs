//! Overlays on a file system: good, damaged and hostile ones.

use std::fs;
use std::path::PathBuf;

use proptest::collection::vec;
use proptest::prelude::{ProptestConfig, any};
use proptest::{prop_assert, proptest};

use super::super::samples::{How, Qcow2, put_u32, put_u64, root};
use super::super::{DiskError, DiskLayers, import_overlays};
use super::{LIMITS, padded};

const CLUSTER: usize = 4096;
const QCOW2: Qcow2 = Qcow2 {
    version: 3,
    cluster_bits: 12,
    is_zstd: false,
};

/// The disk of the base with other bytes in the clusters of these numbers.
fn changed(disk: &[u8], clusters: &[usize], byte: u8) -> Vec<u8> {
    let mut disk = disk.to_vec();
    for cluster in clusters {
        let start = cluster * CLUSTER;
        let end = disk.len().min(start + CLUSTER);
        disk[start..end].fill(byte);
    }
    disk
}

/// An overlay with the clusters in which `disk` differs from the one below.
fn overlay(below: &[u8], disk: &[u8]) -> Vec<u8> {
    let how = |index: usize, bytes: &[u8]| {
        let start = index * CLUSTER;
        if below.get(start..start + bytes.len()) == Some(bytes) {
            How::Absent
        } else if bytes.iter().all(|byte| *byte == 0) {
            How::Zero
        } else if index.is_multiple_of(2) {
            How::Data
        } else {
            How::Packed
        }
    };
    let mut file = QCOW2.file(disk, how);
    name_backing(&mut file);
    file
}

/// As QEMU writes it: the name lies in the first cluster.
fn name_backing(file: &mut [u8]) {
    put_u64(file, 8, 512);
    put_u32(file, 16, 11);
    file[512..523].copy_from_slice(b"/etc/shadow");
}

fn import(overlays: &[Vec<u8>]) -> Result<Vec<u8>, DiskError> {
    let dir = tempfile::tempdir().unwrap();
    let base = dir.path().join("base");
    let to = dir.path().join("to");
    fs::write(&base, root()).unwrap();
    let paths: Vec<PathBuf> = (0..overlays.len())
        .map(|at| dir.path().join(at.to_string()))
        .collect();
    for (path, overlay) in paths.iter().zip(overlays) {
        fs::write(path, overlay).unwrap();
    }
    let layers = DiskLayers {
        base: &base,
        overlays: &paths,
    };
    match import_overlays(layers, &to, LIMITS, &mut |_| Ok(())) {
        Ok(_) => Ok(fs::read(&to).unwrap()),
        Err(error) => {
            assert!(!to.exists(), "a file is left: {error}");
            Err(error)
        }
    }
}

#[test]
fn the_newest_layer_wins() {
    let first = changed(&root(), &[40, 41, 42, 43], 1);
    let second = changed(&first, &[42, 50], 2);
    let third = changed(&second, &[43, 51], 0);
    let overlays = [
        overlay(&root(), &first),
        overlay(&first, &second),
        overlay(&second, &third),
    ];
    let imported = import(&overlays).unwrap();
    assert!(imported == padded(third), "the disk is another one");
}

#[test]
fn an_overlay_may_be_larger_than_its_base() {
    let larger = [root(), vec![0; 100_000]].concat();
    let imported = import(&[overlay(&root(), &larger)]).unwrap();
    assert!(imported == padded(root()), "the file system has its size");
}

#[test]
fn overlays_of_another_base_are_refused() {
    let mut other = root();
    other[1024 + 104..1024 + 120].fill(7);
    let error = import(&[overlay(&root(), &other)]).unwrap_err();
    assert!(matches!(error, DiskError::OtherBase), "{error}");
    let gone = changed(&root(), &[0], 0);
    let error = import(&[overlay(&root(), &gone)]).unwrap_err();
    assert!(matches!(error, DiskError::Unknown), "{error}");
}

#[test]
fn an_overlay_that_is_too_short_or_none_at_all_is_refused() {
    let short = overlay(&root(), &root()[..64 << 10]);
    assert!(matches!(
        import(&[short]).unwrap_err(),
        DiskError::FileSystemBeyond { .. }
    ));
    assert!(import(&[b"no qcow2".to_vec()]).is_err());
    assert!(import(&[Vec::new()]).is_err());
    let many = vec![overlay(&root(), &root()); 129];
    let error = import(&many).unwrap_err();
    assert!(matches!(error, DiskError::TooManyOverlays(129)), "{error}");
}

#[test]
fn an_overlay_for_a_huge_disk_is_refused_before_its_tables_are_read() {
    let mut huge = overlay(&root(), &root());
    put_u64(&mut huge, 24, 1 << 50);
    let error = import(&[huge]).unwrap_err();
    assert!(matches!(error, DiskError::TooLarge { .. }), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    /// Damage is an error or other content, and never a panic or a loop.
    #[test]
    fn damage_is_survived(places in vec((0usize..3 * CLUSTER, any::<u8>()), 1..8)) {
        let first = changed(&root(), &[40, 41, 300], 1);
        let mut damaged = overlay(&root(), &first);
        for (at, byte) in places {
            damaged[at] = byte;
        }
        let imported = import(&[damaged]);
        prop_assert!(imported.is_err() || imported.is_ok_and(|bytes| bytes.len() < 64 << 20));
    }
}
