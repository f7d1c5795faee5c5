//! Disk images that are small enough to be inputs: an ext4 of 64 KiB, alone, in a partition, and in
//! a qcow2 file.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use sandtree_rootfs::{DiskLimits, import_disk};

const LIMITS: DiskLimits = DiskLimits {
    bytes: 1 << 20,
    written_bytes: 1 << 20,
};
const FS_KIBIBYTES: usize = 64;
const CLUSTER: usize = 512;
const L1: usize = CLUSTER;

/// Any image is imported within the limit or refused, and a refused one leaves no file.
pub fn check(input: &[u8]) {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let from = dir.path().join("from");
    let to = dir.path().join("to");
    fs::write(&from, input).expect("room for an input");
    match import_disk(&from, &to, LIMITS, &mut |_| Ok(())) {
        Ok(imported) => {
            let len = fs::metadata(&to).expect("it was made").len();
            assert!(len == imported.bytes && len <= LIMITS.bytes && len.is_multiple_of(4096));
        }
        Err(_) => assert!(!to.exists(), "a file is left"),
    }
}

pub fn seeds() -> Vec<Vec<u8>> {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let bare = make(dir.path());
    let partitioned = with_mbr(&bare);
    let seeds = vec![qcow2(2, &bare), qcow2(3, &partitioned), partitioned, bare];
    for seed in &seeds {
        fs::write(dir.path().join("seed"), seed).expect("room for a seed");
        let taken = import_disk(
            &dir.path().join("seed"),
            &dir.path().join("taken"),
            LIMITS,
            &mut |_| Ok(()),
        );
        taken.expect("a seed is a disk image");
        fs::remove_file(dir.path().join("taken")).expect("it was made");
    }
    seeds
}

fn make(dir: &Path) -> Vec<u8> {
    let tree = dir.join("tree");
    let image = dir.join("image");
    fs::create_dir_all(tree.join("etc")).expect("a directory can be made");
    let path = std::env::var("PATH").unwrap_or_default();
    let mke2fs = Command::new("mke2fs")
        .env("PATH", format!("{path}:/usr/sbin:/sbin"))
        .args([
            "-q",
            "-F",
            "-t",
            "ext4",
            "-b",
            "1024",
            "-N",
            "16",
            "-O",
            "^has_journal,^resize_inode",
            "-d",
        ])
        .args([&tree, &image])
        .arg(FS_KIBIBYTES.to_string())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    assert!(
        mke2fs.is_ok_and(|status| status.success()),
        "mke2fs works; it is in e2fsprogs"
    );
    let mut bytes = fs::read(&image).expect("the image can be read");
    // The file ends with the last block that was written.
    bytes.resize(FS_KIBIBYTES << 10, 0);
    bytes
}

/// One partition, from the eighth sector on.
fn with_mbr(fs: &[u8]) -> Vec<u8> {
    let mut disk = vec![0; 8 * 512];
    disk[446 + 4] = 0x83;
    disk[446 + 8] = 8;
    disk[446 + 12..446 + 16].copy_from_slice(&(fs.len() as u32 / 512).to_le_bytes());
    disk[510..512].copy_from_slice(&[0x55, 0xaa]);
    [disk, fs.to_vec()].concat()
}

/// A header, L1 table, L2 tables, and each cluster that is not zero: every second one compressed.
fn qcow2(version: u32, disk: &[u8]) -> Vec<u8> {
    let tables = disk.len().div_ceil(CLUSTER / 8 * CLUSTER);
    let l2 = 2 * CLUSTER;
    let mut file = vec![0; l2 + tables * CLUSTER];
    file[..4].copy_from_slice(b"QFI\xfb");
    put(&mut file, 4, &version.to_be_bytes());
    put(&mut file, 20, &CLUSTER.ilog2().to_be_bytes());
    put(&mut file, 24, &(disk.len() as u64).to_be_bytes());
    put(&mut file, 36, &(tables as u32).to_be_bytes());
    put(&mut file, 40, &(L1 as u64).to_be_bytes());
    put(
        &mut file,
        100,
        &if version == 3 { 104u32 } else { 0 }.to_be_bytes(),
    );
    (0..tables).for_each(|table| {
        put(
            &mut file,
            L1 + table * 8,
            &((l2 + table * CLUSTER) as u64).to_be_bytes(),
        )
    });
    for (index, cluster) in disk.chunks_exact(CLUSTER).enumerate() {
        if cluster.iter().any(|byte| *byte != 0) {
            let entry = add(&mut file, cluster, index % 2 == 0);
            put(&mut file, l2 + index * 8, &entry.to_be_bytes());
        }
    }
    file
}

/// Appends a cluster unchanged, or as one stored deflate block. Returns its entry.
fn add(file: &mut Vec<u8>, cluster: &[u8], is_packed: bool) -> u64 {
    let offset = file.len() as u64;
    if is_packed {
        let len = (CLUSTER as u16).to_le_bytes();
        file.extend([1, len[0], len[1], !len[0], !len[1]]);
    }
    file.extend(cluster);
    file.resize(file.len().next_multiple_of(CLUSTER), 0);
    if is_packed {
        1 << 62 | 1 << 61 | offset
    } else {
        offset
    }
}

fn put(file: &mut [u8], at: usize, bytes: &[u8]) {
    file[at..at + bytes.len()].copy_from_slice(bytes);
}
