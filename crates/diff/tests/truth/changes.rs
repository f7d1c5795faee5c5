//! Every change is reported, and nothing else.

use std::cell::Cell;
use std::fs;
use std::io;
use std::os::unix::fs::symlink;

use sandtree_diff::{Blocks, ContentDiff, FileSystem, Options, content_diff, diff};

use super::support::{EXT4, HostTree, Image, both_ways, changed, lines};

/// A file on the host, from which debugfs copies.
fn source(tree: &HostTree, name: &str, content: &[u8]) -> String {
    tree.file(name, content);
    tree.path(name).display().to_string()
}

#[test]
fn each_aspect_is_reported_by_name() {
    let tree = HostTree::new();
    let sources = HostTree::new();
    for name in [
        "same", "size", "content", "mode", "owner", "attr", "kind", "gone",
    ] {
        tree.file(name, name.as_bytes());
    }
    tree.file("dir/in", b"x").file("leaves/with", b"y");
    symlink("old", tree.path("link")).unwrap();
    let before = Image::usual(8, Some(&tree));
    before.debugfs(&["mknod device c 1 3"]);
    let after = before.copy();
    after.debugfs(&[
        "rm size".into(),
        format!(
            "write {} size",
            source(&sources, "1", b"longer than before")
        ),
        "rm content".into(),
        format!("write {} content", source(&sources, "2", b"CONTENT")),
        "sif mode mode 0100600".into(),
        "sif owner uid 7".into(),
        "ea_set attr user.color blue".into(),
        "rm kind".into(),
        "mkdir kind".into(),
        "rm gone".into(),
        "rm link".into(),
        "symlink link new".into(),
        "rm device".into(),
        "mknod device c 1 5".into(),
        format!("write {} dir/new", source(&sources, "3", b"new")),
        "rm leaves/with".into(),
        "rmdir leaves".into(),
        "sif same mtime 20200101000000".into(),
    ]);
    assert_eq!(
        lines(&both_ways(&before, &after)),
        [
            "M /attr: [Xattrs]",
            "M /content: [Content]",
            "M /device: [Device]",
            "+ /dir/new",
            "- /gone",
            "M /kind: [Kind, Mode]",
            "- /leaves",
            "- /leaves/with",
            "M /link: [Target]",
            "M /mode: [Mode]",
            "M /owner: [Owner]",
            "M /size: [Size, Content]",
        ]
    );
    let timed = diff(
        &before.bytes(),
        &after.bytes(),
        None,
        Options {
            times: true,
            ..Options::default()
        },
    )
    .unwrap();
    assert!(lines(&timed).contains(&"M /same: [Modified]".into()));
}

#[test]
fn the_reverse_comparison_reports_the_reverse_changes() {
    let tree = HostTree::new();
    tree.file("a", b"1").file("b", b"2");
    let before = Image::usual(8, Some(&tree));
    let after = before.copy();
    after.debugfs(&["rm a", "sif b mode 0100755"]);
    assert_eq!(lines(&both_ways(&before, &after)), ["- /a", "M /b: [Mode]"]);
    assert_eq!(lines(&both_ways(&after, &before)), ["+ /a", "M /b: [Mode]"]);
}

#[test]
fn extended_attributes_are_compared_wherever_they_are_stored() {
    let tree = HostTree::new();
    let sources = HostTree::new();
    tree.file("small", b"1")
        .file("block", b"2")
        .file("inode", b"3");
    for kind in ["", ",ea_inode,inline_data"] {
        let image = |large: &[u8], small: &str| {
            let image = Image::make(&format!("{EXT4}{kind} -b 4096 -I 256"), 8, Some(&tree));
            let value = source(&sources, "value", &large[..2000]);
            image.debugfs(&[
                format!("ea_set small user.a {small}"),
                format!("ea_set -f {value} block user.b"),
            ]);
            source(&sources, "value", large);
            // Without the feature for values in inodes, a value as large as a block cannot be set.
            image.try_debugfs(&[format!("ea_set -f {value} inode user.c")]);
            image
        };
        let before = image(&[7; 4096], "one");
        assert_eq!(
            lines(&both_ways(&before, &image(&[7; 4096], "one"))),
            [""; 0]
        );
        assert_eq!(
            lines(&both_ways(&before, &image(&[7; 4096], "two"))),
            ["M /small: [Xattrs]"]
        );
        let mut other = [7; 4096];
        other[4095] = 8;
        let at_the_end = lines(&both_ways(&before, &image(&other, "one")));
        assert_eq!(
            at_the_end,
            if kind.contains("ea_inode") {
                vec!["M /inode: [Xattrs]"]
            } else {
                vec![]
            }
        );
        other[0] = 8;
        assert!(
            lines(&both_ways(&before, &image(&other, "one")))
                .contains(&"M /block: [Xattrs]".into())
        );
    }
}

#[test]
fn a_file_with_several_names_changes_under_all_of_them() {
    let tree = HostTree::new();
    tree.file("one", &[1; 10_000]);
    fs::hard_link(tree.path("one"), tree.path("two")).unwrap();
    let before = Image::usual(8, Some(&tree));
    let mut bytes = before.bytes();
    let at = bytes
        .windows(5000)
        .position(|window| window == [1; 5000])
        .unwrap();
    bytes[at + 100] = 2;
    let after = before.copy();
    fs::write(after.path(), bytes).unwrap();
    assert_eq!(
        lines(&both_ways(&before, &after)),
        ["M /one: [Content]", "M /two: [Content]"]
    );
}

/// The file's names together refer to more blocks than the file system has, which is not damage.
#[test]
fn a_large_file_may_have_many_names() {
    let tree = HostTree::new();
    tree.file("one", &vec![1; 5 << 20]);
    for index in 0..200 {
        fs::hard_link(tree.path("one"), tree.path(format!("name {index}"))).unwrap();
    }
    let before = Image::usual(16, Some(&tree));
    let after = before.copy();
    after.debugfs(&["mkdir new"]);
    assert_eq!(lines(&both_ways(&before, &after)), ["+ /new"]);
}

#[test]
fn file_systems_with_different_features_are_compared_by_content() {
    let tree = HostTree::new();
    tree.file("a", &[1; 100]).file("b", &[2; 100_000]);
    let one = Image::make(
        &format!("{EXT4},inline_data -b 1024 -I 256"),
        8,
        Some(&tree),
    );
    let other = Image::make(&format!("{EXT4},^extent,^64bit -b 4096"), 16, Some(&tree));
    assert_eq!(lines(&both_ways(&one, &other)), [""; 0]);
    tree.file("b", &[3; 100_000]);
    let other = Image::make(&format!("{EXT4},^extent,^64bit -b 4096"), 16, Some(&tree));
    assert_eq!(lines(&both_ways(&one, &other)), ["M /b: [Content]"]);
}

#[test]
fn changes_beyond_the_limit_are_reported_as_missing() {
    let tree = HostTree::new();
    for index in 0..10 {
        tree.file(index.to_string(), b"");
    }
    let empty = Image::usual(8, None).bytes();
    let full = Image::usual(8, Some(&tree)).bytes();
    let some = diff(
        &empty,
        &full,
        None,
        Options {
            max_changes: 4,
            ..Options::default()
        },
    )
    .unwrap();
    assert_eq!(some.changes.len(), 4);
    assert!(some.incomplete.unwrap().contains("first 4"));
    let all = diff(
        &empty,
        &full,
        None,
        Options {
            max_changes: 10,
            ..Options::default()
        },
    )
    .unwrap();
    assert_eq!((all.changes.len(), all.incomplete), (10, None));
}

/// Counts the bytes read.
struct Counted(Vec<u8>, Cell<u64>);

impl Blocks for Counted {
    fn bytes(&self) -> u64 {
        self.0.bytes()
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.1.set(self.1.get() + into.len() as u64);
        self.0.read_at(offset, into)
    }
}

#[test]
fn files_that_cannot_differ_are_not_read() {
    let tree = HostTree::new();
    let sources = HostTree::new();
    for index in 0..500 {
        tree.file(format!("d{}/f{index}", index % 20), &[index as u8; 60_000]);
    }
    let before = Image::usual(64, Some(&tree));
    let after = before.copy();
    after.debugfs(&[
        "rm d3/f3".into(),
        format!("write {} d3/f3", source(&sources, "new", &[9; 60_000])),
    ]);
    let before = before.bytes();
    let after = after.bytes();
    let ranges = changed(&before, &after);
    let [a, b] = [before, after].map(|bytes| Counted(bytes, Cell::new(0)));
    let found = diff(&a, &b, Some(&ranges), Options::default()).unwrap();
    assert_eq!(lines(&found), ["M /d3/f3: [Content]"]);
    assert!(
        a.1.get() + b.1.get() < 2 << 20,
        "{} of 30 MB were read",
        a.1.get() + b.1.get()
    );
}

#[test]
fn the_content_of_a_file_is_shown_as_a_unified_diff() {
    let tree = |text: &[u8], binary: &[u8]| {
        let tree = HostTree::new();
        tree.file("text", text)
            .file("binary", binary)
            .file("same", b"same")
            .file("large", &vec![b'x'; 5 << 20]);
        tree
    };
    let old = tree(b"one\ntwo\nthree\n", b"\0\x01");
    old.file("old", b"gone\n");
    let [a, b] = [old, tree(b"one\n2 \xff\nthree", b"\0\x02")]
        .map(|tree| Image::usual(16, Some(&tree)).bytes());
    let a = FileSystem::open(&a).unwrap();
    let b = FileSystem::open(&b).unwrap();
    let content = |path: &str| content_diff(&a, &b, &path.into()).unwrap();
    let expected = "--- a/text\n+++ b/text\n@@ -1,3 +1,3 @@\n one\n-two\n-three\n+2 \\xff\n+three\n\\ No newline at end of file\n";
    assert_eq!(content("/text"), ContentDiff::Text(expected.into()));
    assert_eq!(
        content("/old"),
        ContentDiff::Text("--- a/old\n+++ /dev/null\n@@ -1 +0,0 @@\n-gone\n".into())
    );
    assert_eq!(content("/binary"), ContentDiff::Binary);
    assert_eq!(content("/same"), ContentDiff::Same);
    assert_eq!(
        content("/large"),
        ContentDiff::TooLarge {
            limit_bytes: 4 << 20
        }
    );
    assert!(content_diff(&a, &b, &"/none".into()).is_err());
}
