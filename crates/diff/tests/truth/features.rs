//! Every kind of file system reads as the tree from which it was made.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};

use sandtree_diff::{Error, FileSystem, Kind, Path};

use super::support::{EXT4, HostTree, Image, both_ways, items, read};

/// Kinds of file systems, by their differences from the usual one.
const KINDS: [&str; 16] = [
    " -b 4096",
    " -b 1024",
    ",^64bit,^metadata_csum -b 4096",
    ",^extent,^64bit -b 4096",
    ",^extent,^64bit,^metadata_csum -b 1024",
    ",inline_data -b 4096 -I 256",
    ",inline_data,large_dir -b 1024 -I 1024",
    ",^has_journal,^extent,^64bit,^metadata_csum,^extra_isize -b 1024 -I 128",
    ",^has_journal,^extent,^64bit,^metadata_csum,^extra_isize,^filetype,^sparse_super,^resize_inode -b 4096 -I 128",
    ",^extent,^64bit,^flex_bg,^metadata_csum,^huge_file,^extra_isize -b 2048 -I 128",
    ",meta_bg,^resize_inode -b 1024 -g 256",
    ",meta_bg,sparse_super2,^resize_inode,^flex_bg -b 1024 -g 256",
    ",bigalloc -b 4096 -C 65536",
    ",ea_inode,metadata_csum_seed -b 4096",
    ",casefold -b 4096",
    ",^has_journal,^resize_inode -b 65536",
];

/// One node for each way in which a file system stores content.
fn tree() -> HostTree {
    let tree = HostTree::new();
    tree.file("empty", b"")
        .file("tiny", b"hello\n")
        .file("dir/deeper/deepest/file", b"down here");
    tree.file("inline", &[b'i'; 150])
        .file("large", &noise(3 << 20));
    tree.file(OsStr::from_bytes(b"names/new\nline"), b"1")
        .file(OsStr::from_bytes(b"names/\xff\xfe"), b"2");
    tree.file(format!("names/{}", "x".repeat(255)), b"3")
        .file("names/ space ", b"4");
    fs::create_dir(tree.path("empty dir")).unwrap();
    fs::set_permissions(tree.path("tiny"), fs::Permissions::from_mode(0o4751)).unwrap();
    for (name, len) in [("short", 10), ("border", 59), ("over", 60), ("long", 900)] {
        symlink("t".repeat(len), tree.path(format!("to-{name}"))).unwrap();
    }
    fs::hard_link(tree.path("tiny"), tree.path("dir/same as tiny")).unwrap();
    holes(&tree, "holes", 300);
    for index in 0..300 {
        tree.file(
            format!("many/a name of some length {index}"),
            &[index as u8],
        );
    }
    tree
}

/// Alternating blocks of data and holes.
fn holes(tree: &HostTree, name: &str, pieces: u64) {
    let file = File::create(tree.path(name)).unwrap();
    for index in 0..pieces {
        file.write_all_at(&[index as u8 | 1; 4096], index * 8192)
            .unwrap();
    }
}

fn noise(len: usize) -> Vec<u8> {
    let mut state = 1u32;
    std::iter::repeat_with(|| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    })
    .take(len)
    .collect()
}

#[test]
fn every_kind_of_file_system_reads_as_its_tree() {
    let tree = tree();
    for kind in KINDS {
        let bytes = Image::make(&format!("{EXT4}{kind}"), 32, Some(&tree)).bytes();
        let fs = FileSystem::open(&bytes).unwrap();
        let found = items(&fs);
        let expected = tree.items();
        assert!(
            found.keys().eq(expected.keys()),
            "{kind}: {:?}",
            found.keys()
        );
        for (path, item) in expected {
            let same = found[&path] == item;
            assert!(
                same,
                "{kind}: {path} is {:?} {:o}",
                found[&path].kind, found[&path].mode
            );
        }
        assert_eq!(
            fs.stat(&"/tiny".into()).unwrap().unwrap().links,
            2,
            "{kind}"
        );
    }
}

#[test]
fn unknown_features_are_refused_by_name() {
    let mut bytes = Image::usual(8, None).bytes();
    bytes[1024 + 98] |= 0x1;
    let error = FileSystem::open(&bytes).unwrap_err().to_string();
    assert!(error.contains("0x10000"), "{error}");
    assert!(matches!(
        FileSystem::open(&vec![0; 1 << 20]),
        Err(Error::NotExt4)
    ));
    assert!(matches!(
        FileSystem::open(&vec![0; 100]),
        Err(Error::NotExt4)
    ));
}

#[test]
fn paths_lead_to_their_nodes() {
    let bytes = Image::usual(32, Some(&tree())).bytes();
    let fs = FileSystem::open(&bytes).unwrap();
    let stat = |path: &str| fs.stat(&path.into()).unwrap().map(|node| node.kind);
    assert_eq!(stat("/"), Some(Kind::Directory));
    assert_eq!(stat("dir//deeper/./deepest/"), Some(Kind::Directory));
    assert_eq!(stat("/dir/nothing"), None);
    assert_eq!(stat("/tiny/below"), None);
    assert!(matches!(
        fs.read_file(&"/dir".into()),
        Err(Error::OtherKind {
            kind: Kind::Directory,
            ..
        })
    ));
    assert!(matches!(
        fs.read_file(&"/gone".into()),
        Err(Error::NotFound(_))
    ));
    assert!(matches!(
        fs.list(&"/tiny".into()),
        Err(Error::OtherKind {
            wanted: Kind::Directory,
            ..
        })
    ));
}

#[test]
fn a_directory_of_twenty_thousand_names_is_read_with_its_index() {
    for (options, names) in [("-b 1024", 3000), ("-b 4096 -N 21000", 20_000)] {
        let tree = HostTree::new();
        for index in 0..names {
            tree.file(format!("large/entry {index}"), b"");
        }
        let image = Image::make(&format!("{EXT4} {options}"), 48, Some(&tree));
        // With -D, e2fsck rebuilds the indexes.
        let indexed = image.checked("-fyD");
        assert!(
            indexed.debugfs(&["stat /large"]).contains("Flags: 0x81000"),
            "it has an index and extents"
        );
        let bytes = indexed.bytes();
        let fs = FileSystem::open(&bytes).unwrap();
        assert_eq!(fs.list(&"/large".into()).unwrap().len(), names);
        assert_eq!(both_ways(&image, &indexed).changes, []);
    }
}

#[test]
fn deep_extent_trees_are_followed_to_their_leaves() {
    let tree = HostTree::new();
    holes(&tree, "deep", 2000);
    let image = Image::make(&format!("{EXT4} -b 1024"), 32, Some(&tree));
    assert!(
        image.debugfs(&["ex /deep"]).contains(" 2/ 2"),
        "the tree has two levels below its root"
    );
    let bytes = image.bytes();
    let fs = FileSystem::open(&bytes).unwrap();
    assert!(read(&fs, &"/deep".into()) == fs::read(tree.path("deep")).unwrap());
}

#[test]
fn allocated_but_unwritten_blocks_read_as_zeros() {
    let tree = HostTree::new();
    tree.file("old", &[0xaa; 64 << 10]);
    let image = Image::usual(8, Some(&tree));
    image.debugfs(&[
        "rm old",
        "write /dev/null new",
        "fallocate new 0 15",
        "sif new size 75536",
    ]);
    let bytes = image.bytes();
    let fs = FileSystem::open(&bytes).unwrap();
    assert!(read(&fs, &"/new".into()) == vec![0; 75_536]);
}

#[test]
fn devices_and_owners_are_read() {
    let image = Image::usual(8, None);
    image.debugfs(&[
        "mknod null c 1 3",
        "mknod far b 259 60000",
        "mknod pipe p",
        "sif null uid 70001",
        "sif null gid 131072",
        "sif null mode 020640",
    ]);
    let bytes = image.bytes();
    let fs = FileSystem::open(&bytes).unwrap();
    let stat = |path: &str| fs.stat(&Path::from(path)).unwrap().unwrap();
    let null = stat("/null");
    assert_eq!(
        (null.kind, null.device, null.mode),
        (Kind::CharDevice, Some((1, 3)), 0o640)
    );
    assert_eq!((null.uid, null.gid), (70_001, 131_072));
    assert_eq!(
        (stat("/far").kind, stat("/far").device),
        (Kind::BlockDevice, Some((259, 60_000)))
    );
    assert_eq!(
        (stat("/pipe").kind, stat("/pipe").device),
        (Kind::Fifo, None)
    );
}
