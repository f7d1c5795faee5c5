//! Hostile files are refused with a clear error and leave nothing.

use std::fs;
use std::path::Path;

use super::{busybox, end, files, host, published};
use crate::support::World;

/// A member of an archive.
struct Member<'a> {
    name: &'a str,
    kind: u8,
    target: &'a str,
    announced: u64,
    content: &'a [u8],
}

impl Member<'_> {
    const PLAIN: Member<'static> = Member {
        name: "x",
        kind: b'0',
        target: "",
        announced: 0,
        content: b"",
    };

    fn bytes(&self) -> Vec<u8> {
        let mut header = vec![0; 512];
        header[..self.name.len()].copy_from_slice(self.name.as_bytes());
        header[100..108].copy_from_slice(b"0000644\0");
        header[108..116].copy_from_slice(b"0000000\0");
        header[116..124].copy_from_slice(b"0000000\0");
        // A size is a number of 11 octal digits; larger ones have a binary form.
        header[124] = 0x80;
        header[128..136].copy_from_slice(&self.announced.to_be_bytes());
        header[136..148].copy_from_slice(b"00000000000\0");
        header[148..156].copy_from_slice(b"        ");
        header[156] = self.kind;
        header[157..157 + self.target.len()].copy_from_slice(self.target.as_bytes());
        header[257..265].copy_from_slice(b"ustar\x0000");
        if self.kind == b'3' {
            header[329..337].copy_from_slice(b"7777777\0");
        }
        let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
        header[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
        let mut content = self.content.to_vec();
        content.resize(content.len().next_multiple_of(512), 0);
        [header, content].concat()
    }
}

fn archive(members: &[Member<'_>]) -> Vec<u8> {
    let members = members.iter().flat_map(Member::bytes);
    members.chain([0; 1024]).collect()
}

#[track_caller]
fn refused(world: &World, path: &Path, words: &[&str]) {
    let before = published(world);
    let answer = world.run([
        "image".as_ref(),
        "import".as_ref(),
        path.as_os_str(),
        "--name".as_ref(),
        "bad".as_ref(),
    ]);
    answer.failed_with(words);
    assert_eq!(published(world), before);
    world.assert_empty();
}

#[test]
fn hostile_archives_are_refused() {
    let world = World::new();
    let dir = files();
    let path = dir.path().join("bad.tar");
    let with = |member: Member<'_>, words: &[&str]| {
        fs::write(&path, archive(&[member])).unwrap();
        refused(&world, &path, words);
    };
    with(
        Member {
            name: "../../outside",
            ..Member::PLAIN
        },
        &["../../outside", ".."],
    );
    with(
        Member {
            name: "a/../../outside",
            ..Member::PLAIN
        },
        &["a/../../outside", ".."],
    );
    with(
        Member {
            kind: b'1',
            target: "../../../etc/passwd",
            ..Member::PLAIN
        },
        &["x is refused"],
    );
    with(
        Member {
            kind: b'1',
            target: "/etc/passwd",
            ..Member::PLAIN
        },
        &["x is refused"],
    );
    with(
        Member {
            kind: b'3',
            ..Member::PLAIN
        },
        &["x is refused", "number"],
    );
    with(
        Member {
            announced: 1 << 60,
            ..Member::PLAIN
        },
        &["x "],
    );
    let through_a_link = [
        Member {
            name: "out",
            kind: b'2',
            target: dir.path().to_str().unwrap(),
            ..Member::PLAIN
        },
        Member {
            name: "out/written",
            announced: 1,
            content: b"w",
            ..Member::PLAIN
        },
    ];
    fs::write(&path, archive(&through_a_link)).unwrap();
    world.ok([
        "image",
        "import",
        path.to_str().unwrap(),
        "--name",
        "stays-inside",
    ]);
    assert!(
        !dir.path().join("written").exists(),
        "links lead to places in the image, not to ours"
    );
    end(&world, &["tiny"]);
}

#[test]
fn incomplete_and_unknown_files_are_refused() {
    let world = World::new();
    let dir = files();
    let root = dir.path().join("root");
    busybox(&world, &root);
    let whole = dir.path().join("whole.tar.gz");
    host(
        "tar",
        [
            "-czf".as_ref(),
            whole.as_os_str(),
            "-C".as_ref(),
            root.as_os_str(),
            ".".as_ref(),
        ],
    );
    let bytes = fs::read(&whole).unwrap();
    let cut = dir.path().join("cut.tar.gz");
    fs::write(&cut, &bytes[..bytes.len() / 2]).unwrap();
    refused(&world, &cut, &["archive"]);
    for (name, content) in [
        ("empty", &b""[..]),
        (
            "noise",
            b"neither a disk nor an archive".repeat(100).as_slice(),
        ),
    ] {
        fs::write(dir.path().join(name), content).unwrap();
        refused(
            &world,
            &dir.path().join(name),
            &[dir.path().join(name).to_str().unwrap()],
        );
    }
    refused(&world, &dir.path().join("gone"), &["gone"]);
    refused(
        &world,
        Path::new("/dev/zero"),
        &["neither a file nor a directory"],
    );
    // A disk with a false header.
    let mut disk = b"QFI\xfb\0\0\0\x03".to_vec();
    disk.resize(4096, 0xff);
    fs::write(dir.path().join("disk.qcow2"), disk).unwrap();
    refused(&world, &dir.path().join("disk.qcow2"), &[]);
    end(&world, &["tiny"]);
}

/// A small compressed archive that unpacks to more than the store has room for.
#[test]
fn a_decompression_bomb_is_limited() {
    let Some(small) = crate::support::mount::Mount::tmpfs(320) else {
        return;
    };
    let world = World::at(small.path().join("home"));
    let zeros = small.path().join("zeros");
    fs::File::create(&zeros).unwrap().set_len(4 << 30).unwrap();
    let bomb = small.path().join("bomb.tar.zst");
    host(
        "tar",
        [
            "--zstd".as_ref(),
            "-cf".as_ref(),
            bomb.as_os_str(),
            "-C".as_ref(),
            small.path().as_ref(),
            "zeros".as_ref(),
        ],
    );
    refused(&world, &bomb, &["zeros", "limit"]);
    end(&world, &["tiny"]);
}

#[test]
fn a_layout_with_a_wrong_layer_is_refused() {
    let world = World::new();
    let dir = files();
    let root = dir.path().join("root");
    fs::create_dir_all(root.join("etc")).unwrap();
    fs::write(root.join("etc/word"), "as it was").unwrap();
    let layout = dir.path().join("layout");
    let tagged = format!("{}:app", layout.display());
    host(
        "umoci",
        ["init".as_ref(), "--layout".as_ref(), layout.as_os_str()],
    );
    host("umoci", ["new", "--image", &tagged]);
    host(
        "umoci",
        ["insert", "--image", &tagged, root.to_str().unwrap(), "/"],
    );
    let blobs = super::entries(&layout.join("blobs/sha256"));
    let is_layer = |path: &&std::path::PathBuf| fs::read(path).unwrap().starts_with(&[0x1f, 0x8b]);
    let layer = blobs.iter().find(is_layer).expect("there is a layer");
    let whole = fs::read(layer).unwrap();
    world.ok([
        "image".as_ref(),
        "import".as_ref(),
        layout.as_os_str(),
        "--name".as_ref(),
        "whole".as_ref(),
    ]);
    let mut changed = whole.clone();
    // The time in gzip's header: the content stays the same.
    changed[4] ^= 1;
    fs::write(layer, &changed).unwrap();
    refused(
        &world,
        &layout,
        &[layer.file_name().unwrap().to_str().unwrap()],
    );
    fs::write(layer, &whole[..whole.len() - 9]).unwrap();
    refused(&world, &layout, &[]);
    fs::remove_file(layer).unwrap();
    refused(&world, &layout, &[]);
    end(&world, &["tiny"]);
}
