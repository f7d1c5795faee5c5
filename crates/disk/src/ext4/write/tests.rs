//! Images as e2fsprogs and our own reader see them.

mod attributes;
mod contents;
mod image;
mod random;

use std::path::Path;

use image::{Maker, assert_clean, run};

use super::{Error, Kind, Tree};

const MIB: u64 = 1 << 20;

fn pattern(seed: u64, bytes: usize) -> Vec<u8> {
    (0..bytes as u64)
        .map(|at| (at / 4096 * 31 + at * 7 + seed) as u8 | 1)
        .collect()
}

#[test]
fn an_empty_tree_is_a_file_system() {
    let image = Maker::new().clean(16 * MIB);
    assert_eq!(image.made.nodes, 1);
    assert!(image.made.bytes - image.made.used_bytes >= 16 * MIB);
    let listed = image.debugfs("ls -l /");
    assert!(
        listed.contains(" 40700 (2)      0      0    4096 14-Nov-2023 22:13 lost+found"),
        "{listed}"
    );
}

#[test]
fn names_of_all_lengths_and_bytes_are_stored() {
    let mut maker = Maker::new();
    let long = vec![b'n'; 255];
    let names: [&[u8]; 6] = [b"a", b"with blank", b"new\nline", b"\xff\xfe", &long, b"z"];
    let sub = maker.dir(Tree::ROOT, "sub");
    for name in names {
        maker.file(sub, name, name);
    }
    let image = maker.clean(MIB);
    let mut expected: Vec<Box<[u8]>> = names.iter().map(|name| (*name).into()).collect();
    expected.sort();
    assert_eq!(
        image.with_fs(|fs| fs.list(&"/sub".into())).unwrap(),
        expected
    );
    for name in names {
        assert_eq!(image.read(&[b"/sub/", name].concat()), name);
    }
}

#[test]
fn invalid_names_are_refused() {
    for name in [&b""[..], b".", b"..", b"a/b", b"a\0b", &[b'n'; 256]] {
        let mut maker = Maker::new();
        let sub = maker.dir(Tree::ROOT, "sub");
        maker.file(sub, name, b"");
        let Err(Error::BadName { path }) = maker.finish(0) else {
            panic!("{name:?} was taken")
        };
        assert!(path.starts_with("/sub/"), "{path}");
    }
}

#[test]
fn a_large_directory_gets_an_index() {
    let mut maker = Maker::new();
    let many = maker.dir(Tree::ROOT, "many");
    let one = maker.file(many, "name-00000", b"one");
    for index in 1..20_000 {
        maker.link(many, format!("name-{index:05}"), one);
    }
    let image = maker.clean(MIB);
    let names = image.with_fs(|fs| fs.list(&"/many".into())).unwrap();
    assert_eq!((names.len(), &*names[19_999]), (20_000, &b"name-19999"[..]));
    let index = image.debugfs("htree_dump /many");
    assert!(
        index.contains("Hash Version: 1") && index.contains("Indirect levels: 0"),
        "{}",
        &index[..500]
    );
    // debugfs finds the name by its hash.
    assert!(
        image
            .debugfs("stat /many/name-12345")
            .contains("Links: 20000")
    );
}

#[test]
fn a_larger_directory_gets_an_index_of_two_levels() {
    let mut maker = Maker::new();
    let many = maker.dir(Tree::ROOT, "many");
    let long = "x".repeat(240);
    let nodes: Vec<_> = (0..2)
        .map(|index| maker.file(Tree::ROOT, format!("{index}"), b""))
        .collect();
    for index in 0..10_000 {
        maker.link(many, format!("{long}{index:05}"), nodes[index % 2]);
    }
    let image = maker.clean(MIB);
    assert!(
        image
            .debugfs("htree_dump /many")
            .contains("Indirect levels: 1")
    );
    assert_eq!(
        image.with_fs(|fs| fs.list(&"/many".into())).unwrap().len(),
        10_000
    );
}

#[test]
fn a_directory_may_have_more_subdirectories_than_its_link_count_can_hold() {
    let mut maker = Maker::new();
    let many = maker.dir(Tree::ROOT, "many");
    for index in 0..65_010 {
        maker.dir(many, format!("{index}"));
    }
    let image = maker.clean(MIB);
    assert_eq!(
        image
            .with_fs(|fs| fs.stat(&"/many".into()))
            .unwrap()
            .unwrap()
            .links,
        1
    );
    // So many inodes need more groups than the blocks of their directories.
    assert_eq!(image.made.nodes, 65_012);
}

#[test]
fn a_file_with_too_many_names_is_refused() {
    let mut maker = Maker::new();
    let file = maker.file(Tree::ROOT, "0", b"");
    for index in 1..=65_000 {
        maker.link(Tree::ROOT, format!("{index}"), file);
    }
    let failed = maker.finish(0).map(|image| image.made).unwrap_err();
    assert!(
        matches!(&failed, Error::TooManyNames { path, names: 65_001, .. } if path == "/0"),
        "{failed}"
    );
}

#[test]
fn many_empty_files_get_inodes() {
    let mut maker = Maker::new();
    for dir in 0..70 {
        let dir = maker.dir(Tree::ROOT, format!("{dir}"));
        for name in 0..1000 {
            maker.add(dir, format!("{name}"), Kind::Fifo);
        }
    }
    let image = maker.clean(0);
    assert_eq!(image.made.nodes, 70_071);
}

#[test]
fn a_lost_and_found_in_the_tree_is_kept() {
    let mut maker = Maker::new();
    let dir = maker.dir(Tree::ROOT, "lost+found");
    maker.node(dir).attributes.mode = 0o711;
    let image = maker.clean(MIB);
    let stat = image
        .with_fs(|fs| fs.stat(&"/lost+found".into()))
        .unwrap()
        .unwrap();
    assert_eq!((stat.mode, stat.uid), (0o711, 1000));
}

/// A tree with some nodes of every kind.
fn sample() -> Maker {
    let mut maker = Maker::new();
    let dir = maker.dir(Tree::ROOT, "dir");
    maker.file(dir, "small", b"text");
    maker.file(dir, "large", &pattern(1, 3 << 20));
    let fragments = maker.fragments(400);
    maker.add(dir, "fragments", Kind::File(fragments));
    let gone = maker.content(&pattern(2, 1 << 20));
    maker.area.free(&gone);
    maker.add(dir, "link", Kind::Symlink(b"x".repeat(300)));
    for index in 0..500 {
        maker.dir(dir, format!("directory-{index}"));
    }
    maker
}

#[test]
fn equal_trees_give_equal_bytes() {
    let one = sample().clean(MIB);
    let other = sample().clean(MIB);
    assert!(std::fs::read(&one.path).unwrap() == std::fs::read(&other.path).unwrap());
}

#[test]
fn blocks_of_zeros_become_holes() {
    use std::os::unix::fs::MetadataExt;
    let image = sample().clean(1 << 30);
    let stored_bytes = std::fs::metadata(&image.path).unwrap().blocks() * 512;
    assert!(
        image.made.bytes > 1 << 30 && stored_bytes < 12 * MIB,
        "{stored_bytes} are stored"
    );
}

fn resize(image: &Path, size: &str) {
    run("resize2fs", &["-f", image.to_str().unwrap(), size]);
    assert_clean(image);
}

#[test]
fn resize2fs_grows_and_shrinks_an_image() {
    let image = sample().clean(300 * MIB);
    let bytes = image.read(b"/dir/large");
    for size in ["2G", "20G", "200M", "1000G"] {
        resize(&image.path, size);
    }
    run("resize2fs", &["-f", "-M", image.path.to_str().unwrap()]);
    assert_clean(&image.path);
    assert!(image.read(b"/dir/large") == bytes);
}

#[test]
fn every_amount_of_free_space_is_provided() {
    for free_mib in [0, 1, 110, 115, 120, 124, 250, 380, 500, 5000] {
        let image = sample().clean(free_mib * MIB);
        assert!(image.made.bytes - image.made.used_bytes >= free_mib * MIB);
    }
}

#[test]
fn a_file_system_above_the_size_limit_is_refused() {
    let failed = Maker::new()
        .finish(1 << 40)
        .map(|image| image.made)
        .unwrap_err();
    assert!(
        matches!(
            failed,
            Error::TooLarge {
                what: "the file system",
                ..
            }
        ),
        "{failed}"
    );
    Maker::new().clean(900 << 30);
}
