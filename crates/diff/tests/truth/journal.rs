//! A file system that was not unmounted reads as after recovery.

use std::path::Path as HostPath;

use sandtree_diff::{FileSystem, Options, diff};

use super::support::{EXT4, HostTree, Image, both_ways, items, lines, read};

/// Kinds of journals: features of the file system, its block size, and the options with which
/// debugfs opens the journal.
const KINDS: [(&str, usize, &str); 4] = [
    ("", 4096, "jo -c -v 3"),
    ("", 4096, "jo -c -v 2"),
    ("", 1024, "jo -c"),
    (",^64bit,^metadata_csum", 1024, "jo"),
];

fn tree() -> HostTree {
    let tree = HostTree::new();
    tree.file("kept", b"as it was")
        .file("gone", b"x")
        .file("dir/file", &[5; 9000])
        .file("mode", b"m");
    tree
}

fn make(features: &str, block_bytes: usize) -> Image {
    Image::make(
        &format!("{EXT4}{features} -b {block_bytes}"),
        8,
        Some(&tree()),
    )
}

/// The numbers of blocks in which two disks differ.
fn changed_blocks(a: &[u8], b: &[u8], block_bytes: usize) -> Vec<usize> {
    let pairs = a.chunks(block_bytes).zip(b.chunks(block_bytes));
    pairs
        .enumerate()
        .filter(|(_, (a, b))| a != b)
        .map(|(number, _)| number)
        .collect()
}

/// Commits blocks of `from` to the journal of `image`, a transaction for every few.
fn commit(image: &Image, from: &[u8], blocks: &[usize], block_bytes: usize, open: &str) {
    let scratch = HostTree::new();
    let mut commands = vec![open.to_owned()];
    for (index, blocks) in blocks.chunks(4).enumerate() {
        let content: Vec<u8> = blocks
            .iter()
            .flat_map(|block| &from[block * block_bytes..][..block_bytes])
            .copied()
            .collect();
        scratch.file(index.to_string(), &content);
        commands.push(write_command(blocks, &scratch.path(index.to_string())));
    }
    commands.push("jc".into());
    image.debugfs(&commands);
}

fn write_command(blocks: &[usize], content: &HostPath) -> String {
    let numbers: Vec<_> = blocks.iter().map(ToString::to_string).collect();
    format!("jw -b {} {}", numbers.join(","), content.display())
}

/// Whether the file system is marked as mounted. debugfs sets that mark when it opens the journal.
fn needs_recovery(bytes: &[u8]) -> bool {
    bytes[1024 + 96] & 4 != 0
}

#[test]
fn committed_blocks_are_read_from_the_journal() {
    for (features, block_bytes, open) in KINDS {
        let before = make(features, block_bytes);
        let after = before.copy();
        after.debugfs(&[
            "rm gone",
            "mkdir new",
            "symlink new/link target",
            "sif mode mode 0100600",
            "rm dir/file",
        ]);
        let old = before.bytes();
        let new = after.bytes();
        let live = before.copy();
        commit(
            &live,
            &new,
            &changed_blocks(&old, &new, block_bytes),
            block_bytes,
            open,
        );
        let bytes = live.bytes();
        assert!(needs_recovery(&bytes), "{open}");
        assert!(
            changed_blocks(&old, &bytes, block_bytes).len() > 8,
            "{open}: the journal was written"
        );

        let fs = FileSystem::open(&bytes).unwrap();
        assert_eq!(fs.incomplete(), None, "{open}");
        let expected = [
            "- /dir/file",
            "- /gone",
            "M /mode: [Mode]",
            "+ /new",
            "+ /new/link",
        ];
        assert_eq!(lines(&both_ways(&before, &live)), expected, "{open}");
        assert_eq!(both_ways(&live, &after).changes, [], "{open}");
        assert_eq!(
            both_ways(&live, &live.recovered()).changes,
            [],
            "{open}: what e2fsck makes of it is the same"
        );
    }
}

#[test]
fn a_revoked_block_is_not_read_from_the_journal() {
    for (features, block_bytes, open) in KINDS {
        let image = make(features, block_bytes);
        let data = [5; 1024];
        let block = image
            .bytes()
            .chunks(block_bytes)
            .position(|block| block.starts_with(&data))
            .unwrap();
        let scratch = HostTree::new();
        scratch.file("wrong", &vec![6; block_bytes]);
        let write = write_command(&[block], &scratch.path("wrong"));
        let replaced = image.copy();
        replaced.debugfs(&[open, &write, "jc"]);
        image.debugfs(&[open, &write, &format!("jw -r {block}"), "jc"]);
        let content = |image: &Image| {
            let bytes = image.bytes();
            let fs = FileSystem::open(&bytes).unwrap();
            (
                read(&fs, &"/dir/file".into())[0],
                fs.incomplete().map(str::to_owned),
            )
        };
        assert_eq!(content(&replaced), (6, None), "{open}");
        assert_eq!(content(&image), (5, None), "{open}");
        assert_eq!(content(&image.recovered()), (5, None), "{open}");
    }
}

#[test]
fn a_block_with_the_journals_magic_number_is_read_unchanged() {
    for (features, block_bytes, open) in KINDS {
        let image = make(features, block_bytes);
        let block = image
            .bytes()
            .chunks(block_bytes)
            .position(|block| block.starts_with(&[5; 1024]))
            .unwrap();
        let scratch = HostTree::new();
        let mut content = vec![7; block_bytes];
        content[..4].copy_from_slice(&0xc03b_3998u32.to_be_bytes());
        scratch.file("escaped", &content);
        image.debugfs(&[
            open,
            &write_command(&[block], &scratch.path("escaped")),
            "jc",
        ]);
        let bytes = image.bytes();
        let fs = FileSystem::open(&bytes).unwrap();
        assert!(
            read(&fs, &"/dir/file".into())[..block_bytes] == content,
            "{open}"
        );
    }
}

#[test]
fn an_unfinished_transaction_is_ignored() {
    let before = make("", 4096);
    let after = before.copy();
    after.debugfs(&["rm gone"]);
    let old = before.bytes();
    let new = after.bytes();
    let live = before.copy();
    commit(
        &live,
        &new,
        &changed_blocks(&old, &new, 4096),
        4096,
        "jo -c",
    );
    let mut bytes = live.bytes();
    let is_commit = |block: &[u8]| block.starts_with(&[0xc0, 0x3b, 0x39, 0x98, 0, 0, 0, 2]);
    while let Some(commit) = bytes.chunks(4096).position(is_commit) {
        bytes[commit * 4096..][..4096].fill(0);
    }
    let fs = FileSystem::open(&bytes).unwrap();
    assert_eq!(fs.incomplete(), None);
    assert!(items(&fs).contains_key(&"/gone".into()));
}

#[test]
fn a_journal_that_cannot_be_replayed_is_reported() {
    let image = make("", 4096);
    let live = image.copy();
    live.debugfs(&["rm gone"]);
    let new = live.bytes();
    let old = image.bytes();
    let live = image.copy();
    commit(
        &live,
        &new,
        &changed_blocks(&old, &new, 4096),
        4096,
        "jo -c",
    );
    let bytes = live.bytes();
    let starts_with = |start: [u8; 8]| {
        bytes
            .chunks(4096)
            .position(|block| block.starts_with(&start))
            .unwrap()
            * 4096
    };
    let superblock = starts_with([0xc0, 0x3b, 0x39, 0x98, 0, 0, 0, 4]);
    let descriptor = starts_with([0xc0, 0x3b, 0x39, 0x98, 0, 0, 0, 1]);
    let damages: [(usize, u8, &str); 5] = [
        (superblock, 0, "no superblock"),
        (superblock + 40, 1, "features"),
        (superblock + 15, 1, "block size differs"),
        (descriptor + 100, 1, "has a wrong checksum"),
        (descriptor + 4096 + 8, 0xff, "has a wrong checksum"),
    ];
    for (at, byte, reason) in damages {
        let mut damaged = bytes.clone();
        damaged[at] ^= byte | 0x40;
        let incomplete = diff(&damaged, &new, None, Options::default())
            .unwrap()
            .incomplete
            .unwrap_or_default();
        assert!(
            incomplete.starts_with("before: its journal was") && incomplete.contains(reason),
            "{reason}: {incomplete}"
        );
    }
    assert_eq!(FileSystem::open(&bytes).unwrap().incomplete(), None);
}
