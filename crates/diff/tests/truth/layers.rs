//! Disks of the store: a root file system, and overlays with later writes.

use std::fs;
use std::io;
use std::path::{Path as HostPath, PathBuf};

use sandtree_diff::{Blocks, Options, diff};
use sandtree_store::disk::{Chain, changed, overlay};

use super::support::{CLUSTER, HostTree, Image, lines};

/// A chain as a disk.
struct Disk(Chain);

impl Blocks for Disk {
    fn bytes(&self) -> u64 {
        self.0.bytes()
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.0.read_at(offset, into).map_err(io::Error::other)
    }
}

/// Writes an overlay that turns `before` into `after`.
fn overlay_of(before: &[u8], after: &[u8], path: &HostPath) {
    const COPIED: u64 = 1 << 63;
    let l1 = 3 * CLUSTER;
    let l2 = 4 * CLUSTER;
    let mut file = overlay::empty(after.len() as u64).unwrap();
    file.resize(l2 + CLUSTER, 0);
    put(&mut file, l1, &(l2 as u64 | COPIED).to_be_bytes());
    let clusters = before
        .chunks(CLUSTER)
        .zip(after.chunks(CLUSTER))
        .enumerate();
    for (index, (_, new)) in clusters.filter(|(_, (old, new))| old != new) {
        let entry = file.len() as u64 | COPIED;
        put(&mut file, l2 + index * 8, &entry.to_be_bytes());
        file.extend_from_slice(new);
    }
    for cluster in 0..file.len() / CLUSTER {
        put(&mut file, 2 * CLUSTER + cluster * 2, &1u16.to_be_bytes());
    }
    fs::write(path, file).unwrap();
}

fn put(file: &mut [u8], at: usize, bytes: &[u8]) {
    file[at..at + bytes.len()].copy_from_slice(bytes);
}

#[test]
fn changes_in_layers_are_found_by_the_layers_alone() {
    let tree = HostTree::new();
    for index in 0..200 {
        tree.file(format!("dir/file {index}"), &[index as u8; 20_000]);
    }
    let base = Image::usual(16, Some(&tree));
    let steps = [base.copy(), base.copy()];
    steps[0].debugfs(&["rm \"dir/file 7\"", "mkdir first"]);
    fs::copy(steps[0].path(), steps[1].path()).unwrap();
    steps[1].debugfs(&["sif \"dir/file 9\" mode 0100600", "mkdir first/second"]);
    let layers: Vec<PathBuf> = ["1", "2"].iter().map(|name| tree.path(name)).collect();
    overlay_of(&base.bytes(), &steps[0].bytes(), &layers[0]);
    overlay_of(&steps[0].bytes(), &steps[1].bytes(), &layers[1]);

    let changes = |from: usize, to: usize| {
        let [a, b] = [from, to].map(|count| Chain::open(base.path(), &layers[..count]).unwrap());
        let ranges = changed(&a, &b).unwrap();
        assert!(
            ranges
                .iter()
                .map(|range| range.end - range.start)
                .sum::<u64>()
                < 4 << 20
        );
        lines(&diff(&Disk(a), &Disk(b), Some(&ranges), Options::default()).unwrap())
    };
    assert_eq!(changes(0, 0), [""; 0]);
    assert_eq!(changes(0, 1), ["- /dir/file 7", "+ /first"]);
    assert_eq!(changes(1, 2), ["M /dir/file 9: [Mode]", "+ /first/second"]);
    assert_eq!(
        changes(2, 0),
        [
            "+ /dir/file 7",
            "M /dir/file 9: [Mode]",
            "- /first",
            "- /first/second"
        ]
    );
}
