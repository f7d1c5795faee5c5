//! A damaged disk ends in an error or in a result, never in a panic or an endless loop.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;

use proptest::collection::vec;
use proptest::prelude::{ProptestConfig, any, proptest};
use sandtree_diff::{Error, FileSystem, Options, diff};

use super::support::{EXT4, HostTree, Image};

fn damage(bytes: &Vec<u8>) -> String {
    match diff(bytes, bytes, None, Options::default()) {
        Err(Error::Damaged(what)) => what,
        other => panic!("not found: {other:?}"),
    }
}

#[test]
fn a_directory_inside_itself_is_refused() {
    let image = Image::usual(8, None);
    image.debugfs(&["mkdir a", "mkdir a/b", "ln a a/b/up"]);
    assert!(damage(&image.bytes()).contains("two places"));
}

#[test]
fn paths_that_are_too_long_are_reported_as_left_out() {
    let image = Image::usual(8, None);
    let name = "d".repeat(250);
    let levels = (0..70).flat_map(|_| [format!("mkdir {name}"), format!("cd {name}")]);
    image.debugfs(
        &levels
            .chain(["cd /".into(), "mkdir z".into()])
            .collect::<Vec<_>>(),
    );
    let found = diff(
        &Image::usual(8, None).bytes(),
        &image.bytes(),
        None,
        Options::default(),
    )
    .unwrap();
    assert_eq!(found.changes.len(), (16 << 10) / 251 + 1);
    assert_eq!(found.changes.last().unwrap().path, "/z".into());
    assert!(
        found
            .incomplete
            .unwrap()
            .contains("longer than 16384 bytes were left out")
    );
}

/// A file with so many extents that its tree has three levels.
fn deep() -> Vec<u8> {
    let tree = HostTree::new();
    let file = File::create(tree.path("deep")).unwrap();
    (0..2000).for_each(|index| file.write_all_at(&[1; 1024], index * 8192).unwrap());
    Image::make(&format!("{EXT4} -b 1024"), 32, Some(&tree)).bytes()
}

#[test]
fn invalid_extent_trees_are_refused() {
    let sound = deep();
    let is_index = |block: &[u8]| block.starts_with(&[0x0a, 0xf3]) && block[6..8] == [1, 0];
    let index = sound.chunks(1024).position(is_index).unwrap();
    let entry = |number: usize| index * 1024 + 12 * (number + 1) + 4;

    let mut round = sound.clone();
    round[entry(0)..entry(0) + 4].copy_from_slice(&(index as u32).to_le_bytes());
    assert!(damage(&round).contains("wrong depth"));

    let mut shared = sound.clone();
    shared.copy_within(entry(0)..entry(0) + 4, entry(1));
    assert!(damage(&shared).contains("not sorted"));

    let mut outside = sound.clone();
    outside[entry(0)..entry(0) + 4].fill(0xff);
    assert!(damage(&outside).contains("outside"));

    let mut full = sound;
    full[index * 1024 + 2..index * 1024 + 4].fill(0xff);
    assert!(damage(&full).contains("more extents than fit"));
}

/// A block that lists only itself makes a file of sixteen million blocks.
#[test]
fn an_indirect_block_that_lists_itself_is_refused() {
    let tree = HostTree::new();
    tree.file("file", b"").file("list", &[1; 1024]);
    let image = Image::make(&format!("{EXT4},^extent,^64bit -b 1024"), 32, Some(&tree));
    let list = image
        .bytes()
        .chunks(1024)
        .position(|block| block == [1; 1024])
        .unwrap() as u32;
    image.debugfs(&[format!("sif file block[TIND] {list}")]);
    let mut bytes = image.bytes();
    bytes[list as usize * 1024..][..1024].copy_from_slice(&list.to_le_bytes().repeat(256));
    assert!(damage(&bytes).contains("more blocks than it has"));
}

#[test]
fn a_disk_that_is_shorter_than_its_file_system_is_refused() {
    let mut bytes = Image::usual(8, None).bytes();
    bytes.truncate(7 << 20);
    assert!(matches!(FileSystem::open(&bytes), Err(Error::Damaged(_))));
}

/// A small disk with nodes of every kind, and the places of its used bytes.
fn sample() -> &'static (Vec<u8>, Vec<usize>) {
    static SAMPLE: OnceLock<(Vec<u8>, Vec<usize>)> = OnceLock::new();
    SAMPLE.get_or_init(|| {
        let tree = HostTree::new();
        tree.file("dir/file", &[7; 3000])
            .file("inline", b"content")
            .file("other/deep/er", &[1; 100]);
        let image = Image::make(
            &format!("{EXT4},inline_data -b 1024 -I 256"),
            4,
            Some(&tree),
        );
        let value = tree.path("inline");
        image.debugfs(&[
            "ea_set dir/file user.name value".into(),
            "symlink link target".into(),
            "jo -c".into(),
            format!("jw -b 900 {}", value.display()),
            "jw -r 900".into(),
            "jc".into(),
        ]);
        let bytes = image.bytes();
        let used = bytes
            .iter()
            .enumerate()
            .filter(|(at, byte)| **byte != 0 || at % 1024 < 64)
            .map(|(at, _)| at)
            .collect();
        (bytes, used)
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(400) })]

    #[test]
    fn any_damage_ends_in_a_result(damage in vec((any::<proptest::sample::Index>(), any::<u8>()), 1..12)) {
        let (sound, used) = sample();
        let mut bytes = sound.clone();
        for (at, byte) in damage {
            bytes[used[at.index(used.len())]] = byte;
        }
        drop(diff(&bytes, sound, None, Options::default()));
    }
}
