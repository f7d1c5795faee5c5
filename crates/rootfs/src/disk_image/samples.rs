//! Disks for tests: file systems by mke2fs, tables and qcow2 files by hand.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use flate2::Compression;
use flate2::write::DeflateEncoder;

pub(super) const ROOT_UUID: &str = "3f1c0e5a-7a1b-4f0e-9d5c-0123456789ab";
/// `4f68bce3-e8cd-4db1-96e7-fbcaf984b709`, as it is stored.
pub(super) const TYPE_ROOT: [u8; 16] = [
    0xe3, 0xbc, 0x68, 0x4f, 0xcd, 0xe8, 0xb1, 0x4d, 0x96, 0xe7, 0xfb, 0xca, 0xf9, 0x84, 0xb7, 0x09,
];
/// Any other type.
pub(super) const TYPE_LINUX: [u8; 16] = [0xaf; 16];

/// An ext4 with an operating system. Its size is not a multiple of 4 KiB.
pub(super) fn root() -> Vec<u8> {
    static BYTES: OnceLock<Vec<u8>> = OnceLock::new();
    BYTES
        .get_or_init(|| make(&["etc", "usr/bin"], "1537"))
        .clone()
}

/// An ext4 for `/boot`.
pub(super) fn boot() -> Vec<u8> {
    static BYTES: OnceLock<Vec<u8>> = OnceLock::new();
    BYTES.get_or_init(|| make(&["grub"], "1024")).clone()
}

fn make(dirs: &[&str], kibibytes: &str) -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    let tree = dir.path().join("tree");
    let image = dir.path().join("image");
    for (index, name) in dirs.iter().enumerate() {
        fs::create_dir_all(tree.join(name)).unwrap();
        let content: Vec<u8> = (0..60_000u32)
            .map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8)
            .collect();
        fs::write(tree.join(name).join("file"), &content[index..]).unwrap();
    }
    fs::write(&image, []).unwrap();
    let mke2fs = tool("mke2fs")
        .args([
            "-q",
            "-F",
            "-t",
            "ext4",
            "-b",
            "1024",
            "-O",
            "^has_journal",
            "-L",
            "cloud",
            "-U",
            ROOT_UUID,
            "-d",
        ])
        .args([&tree, &image])
        .arg(kibibytes)
        .stdout(Stdio::null())
        .status();
    assert!(mke2fs.unwrap().success(), "mke2fs is in e2fsprogs");
    fs::read(&image).unwrap()
}

pub(super) fn is_sound(image: &Path) -> bool {
    tool("e2fsck")
        .args(["-f", "-n"])
        .arg(image)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .unwrap()
        .success()
}

pub(super) fn tool(name: &str) -> Command {
    // starts: the program of tool(…)
    let mut command = Command::new(name);
    let path = std::env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("{path}:/usr/sbin:/sbin"));
    command
}

/// How one cluster of a disk is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum How {
    Absent,
    Zero,
    Data,
    Packed,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Qcow2 {
    pub version: u32,
    pub cluster_bits: u32,
    pub is_zstd: bool,
}

impl Qcow2 {
    /// A file with the content `disk`. Its L1 table is in the second cluster, followed by the first
    /// L2 table.
    pub(super) fn file(self, disk: &[u8], how: impl Fn(usize, &[u8]) -> How) -> Vec<u8> {
        let cluster = 1usize << self.cluster_bits;
        let mut file = vec![0; cluster];
        let tables = disk.len().div_ceil(cluster / 8 * cluster);
        self.put_header(&mut file, disk.len(), tables);
        file.resize(cluster + (tables * 8).next_multiple_of(cluster), 0);
        let l2 = file.len();
        file.resize(l2 + tables * cluster, 0);
        for table in 0..tables {
            put_u64(
                &mut file,
                cluster + table * 8,
                (l2 + table * cluster) as u64 | 1 << 63,
            );
        }
        for (index, bytes) in disk.chunks(cluster).enumerate() {
            let entry = self.add(&mut file, bytes, how(index, bytes));
            put_u64(&mut file, l2 + index * 8, entry);
        }
        file
    }

    fn put_header(self, file: &mut [u8], bytes: usize, tables: usize) {
        file[..4].copy_from_slice(b"QFI\xfb");
        put_u32(file, 4, self.version);
        put_u32(file, 20, self.cluster_bits);
        put_u64(file, 24, bytes as u64);
        put_u32(file, 36, tables as u32);
        put_u64(file, 40, 1 << self.cluster_bits);
        if self.version == 3 {
            put_u64(file, 72, if self.is_zstd { 8 } else { 0 });
            put_u32(file, 96, 4);
            put_u32(file, 100, 112);
            file[104] = self.is_zstd.into();
        }
    }

    /// Appends a cluster. Returns its entry.
    fn add(self, file: &mut Vec<u8>, bytes: &[u8], how: How) -> u64 {
        let cluster = 1usize << self.cluster_bits;
        let whole = || [bytes, &vec![0; cluster - bytes.len()]].concat();
        match how {
            How::Absent => 0,
            How::Zero => 1,
            How::Data => {
                file.resize(file.len().next_multiple_of(cluster), 0);
                file.extend(whole());
                (file.len() - cluster) as u64 | 1 << 63
            }
            How::Packed => {
                let packed = if self.is_zstd {
                    zstd::bulk::compress(&whole(), 1).unwrap()
                } else {
                    deflate(&whole())
                };
                file.extend(&packed);
                packed_entry(file.len() - packed.len(), packed.len(), self.cluster_bits)
            }
        }
    }
}

pub(super) fn packed_entry(offset: usize, len: usize, cluster_bits: u32) -> u64 {
    let more_sectors = (offset + len - 1) / 512 - offset / 512;
    1 << 62 | (more_sectors as u64) << (62 - (cluster_bits - 8)) | offset as u64
}

pub(super) fn deflate(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = DeflateEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// A disk with an MBR. Each partition starts at a mebibyte.
pub(super) fn with_mbr(parts: &[(u8, &[u8])]) -> Vec<u8> {
    let mut disk = vec![0; 512];
    disk[510..].copy_from_slice(&[0x55, 0xaa]);
    for (index, (kind, bytes)) in parts.iter().enumerate() {
        let start = add_part(&mut disk, bytes);
        let entry = 446 + index * 16;
        disk[entry + 4] = *kind;
        disk[entry + 8..entry + 12].copy_from_slice(&(start as u32 / 512).to_le_bytes());
        disk[entry + 12..entry + 16]
            .copy_from_slice(&(bytes.len().div_ceil(512) as u32).to_le_bytes());
    }
    disk
}

/// A disk with a GPT and its second copy. Each partition starts at a mebibyte.
pub(super) fn with_gpt(sector: usize, parts: &[([u8; 16], &[u8])]) -> Vec<u8> {
    let mut disk = vec![0; 512];
    disk[510..].copy_from_slice(&[0x55, 0xaa]);
    disk[446 + 4] = 0xee;
    disk[446 + 8..446 + 16].copy_from_slice(&[1, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]);
    let mut entries = vec![0; 128 * 128];
    for (index, (kind, bytes)) in parts.iter().enumerate() {
        let start = add_part(&mut disk, bytes) / sector;
        let entry = &mut entries[index * 128..][..128];
        entry[..16].copy_from_slice(kind);
        entry[32..40].copy_from_slice(&(start as u64).to_le_bytes());
        entry[40..48]
            .copy_from_slice(&((start + bytes.len().div_ceil(sector) - 1) as u64).to_le_bytes());
    }
    disk.resize(disk.len().next_multiple_of(1 << 20) + (1 << 20), 0);
    let last = disk.len() / sector - 1;
    for (header, table) in [(1, 2), (last, last - entries.len() / sector)] {
        disk[table * sector..][..entries.len()].copy_from_slice(&entries);
        disk[header * sector..][..92].copy_from_slice(&gpt_header(header, table, &entries));
    }
    disk
}

fn gpt_header(number: usize, table: usize, entries: &[u8]) -> [u8; 92] {
    let mut header = [0; 92];
    header[..8].copy_from_slice(b"EFI PART");
    header[8..16].copy_from_slice(&[0, 0, 1, 0, 92, 0, 0, 0]);
    header[24..32].copy_from_slice(&(number as u64).to_le_bytes());
    header[72..80].copy_from_slice(&(table as u64).to_le_bytes());
    header[80..88].copy_from_slice(&[128, 0, 0, 0, 128, 0, 0, 0]);
    header[88..92].copy_from_slice(&crc32fast::hash(entries).to_le_bytes());
    let crc = crc32fast::hash(&header);
    header[16..20].copy_from_slice(&crc.to_le_bytes());
    header
}

fn add_part(disk: &mut Vec<u8>, bytes: &[u8]) -> usize {
    let start = (disk.len() + 1).next_multiple_of(1 << 20);
    disk.resize(start, 0);
    disk.extend(bytes);
    disk.resize(disk.len().next_multiple_of(4096), 0);
    start
}

/// Bytes with a magic number at a place.
pub(super) fn magic(at: usize, magic: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; 128 << 10];
    bytes[at..at + magic.len()].copy_from_slice(magic);
    bytes
}

pub(super) fn put_u32(file: &mut [u8], at: usize, value: u32) {
    file[at..at + 4].copy_from_slice(&value.to_be_bytes());
}

pub(super) fn put_u64(file: &mut [u8], at: usize, value: u64) {
    file[at..at + 8].copy_from_slice(&value.to_be_bytes());
}
