//! Hostile archives: each is refused or harmless, and nothing but the image is written.

use std::io::{Read, Write};

use sandtree_disk::ext4::write::{Device, Kind, Tree};

use super::Bench;
use super::archive::{Archive, put, raw_header, seal};
use crate::{Error, Limits, TarRules};

const SMALL: Limits = Limits {
    nodes: 1000,
    bytes: 64 << 20,
    names_bytes: 1 << 20,
    written_bytes: 64 << 20,
};

/// The error of an archive that must be refused, after which only the image exists.
fn refusal(archive: &[u8]) -> String {
    let mut bench = Bench::with(SMALL);
    let error = bench.plain(archive).expect_err("it is refused");
    let names: Vec<_> = std::fs::read_dir(bench.dir.path())
        .expect("it can be listed")
        .collect();
    assert_eq!(names.len(), 1, "only the image was made");
    error.to_string()
}

#[test]
fn names_that_lead_out_of_the_tree_are_refused() {
    for name in ["../x", "a/../../x", "a/..", "..", "./../x", "/../x"] {
        let error = refusal(&Archive::default().file(name, "x").end());
        assert_eq!(error, format!("{name} is refused: its name contains .."));
    }
    let long = "n".repeat(256);
    let error = refusal(
        &Archive::default()
            .pax(&[("path", &long)])
            .file("x", "x")
            .end(),
    );
    assert!(error.contains("longer than 255 bytes"), "{error}");
    let error = refusal(
        &Archive::default()
            .pax(&[("path", &"n/".repeat(2049))])
            .dir("x")
            .end(),
    );
    assert!(error.contains("longer than 4096 bytes"), "{error}");
    let deep = Archive::default()
        .pax(&[("path", &"n/".repeat(1500))])
        .dir("x")
        .end();
    let error = Bench::new()
        .plain(&deep)
        .expect_err("it is refused")
        .to_string();
    assert!(error.contains("1024 directories"), "{error}");
    assert_eq!(
        refusal(
            &Archive::default()
                .pax(&[("path", "a\0b")])
                .file("x", "")
                .end()
        ),
        "a\\x00b is refused: its name has a NUL byte"
    );
    assert_eq!(
        refusal(&Archive::default().file("", "x").end()),
        " is refused: its name is empty"
    );
}

#[test]
fn absolute_names_are_relative_to_the_tree() {
    let mut bench = Bench::new();
    bench
        .plain(
            &Archive::default()
                .file("/etc/x", "1")
                .file("./etc//./y", "2")
                .end(),
        )
        .expect("it is taken");
    assert_eq!(
        (bench.text("etc/x"), bench.text("/etc/y")),
        (Some("1".into()), Some("2".into()))
    );
}

#[test]
fn a_member_through_a_link_out_of_the_tree_stays_inside() {
    let outside = tempfile::tempdir().expect("a directory can be made");
    let target = outside.path().to_str().expect("it is text").to_owned();
    let mut bench = Bench::new();
    let archive = Archive::default()
        .symlink("out", &target)
        .file("out/x", "in")
        .symlink("up", "../../../../..")
        .file("up/y", "top")
        .end();
    bench.plain(&archive).expect("it is taken");
    assert_eq!(
        std::fs::read_dir(outside.path())
            .expect("it can be listed")
            .count(),
        0
    );
    assert_eq!(bench.text(&format!("{target}/x")), Some("in".into()));
    assert_eq!(bench.text("y"), Some("top".into()));
}

#[test]
fn links_are_followed_as_after_chroot() {
    let mut bench = Bench::new();
    let lower = Archive::default()
        .dir("usr/bin")
        .symlink("bin", "usr/bin")
        .symlink("a", "/./bin/")
        .symlink("b", "usr/../a");
    bench.layer(&lower.end()).expect("it is taken");
    bench
        .layer(
            &Archive::default()
                .file("b/x", "x")
                .symlink("to-x", "b/x")
                .end(),
        )
        .expect("it is taken");
    assert_eq!(bench.text("usr/bin/x"), Some("x".into()));
    assert_eq!(bench.text("to-x"), Some("x".into()));
    assert!(
        bench.builder.exists(b"bin/x")
            && !bench.builder.exists(b"bin/y")
            && !bench.builder.exists(b"to-x/y")
    );
}

#[test]
fn symlink_loops_and_files_as_parents_are_refused() {
    let loops = Archive::default()
        .symlink("a", "b")
        .symlink("b", "a")
        .file("a/x", "x");
    assert!(refusal(&loops.end()).contains("more than 40 symbolic links"));
    let file = Archive::default().file("a", "x").file("a/x", "x");
    assert_eq!(
        refusal(&file.end()),
        "a/x is refused: one of its parents is not a directory"
    );
    let file = Archive::default()
        .file("a", "x")
        .symlink("l", "a")
        .file("l/x", "x");
    assert_eq!(
        refusal(&file.end()),
        "l/x is refused: one of its parents is not a directory"
    );
}

#[test]
fn hard_links_need_an_existing_file() {
    for target in [
        "../etc/passwd",
        "/etc/passwd",
        "missing",
        "dir",
        "dir/missing",
    ] {
        let error = refusal(&Archive::default().dir("dir").hard_link("x", target).end());
        assert!(error.starts_with("x is refused: "), "{error}");
    }
    let out = Archive::default()
        .symlink("out", "/etc")
        .hard_link("x", "out/passwd");
    assert_eq!(
        refusal(&out.end()),
        "x is refused: it is a hard link to a file that does not exist"
    );
}

#[test]
fn a_hard_link_may_replace_the_directory_of_its_target() {
    let mut bench = Bench::new();
    bench
        .plain(
            &Archive::default()
                .file("a/b", "b")
                .hard_link("a", "a/b")
                .hard_link("a", "a")
                .end(),
        )
        .expect("it is taken");
    assert_eq!(bench.text("a"), Some("b".into()));
    assert_eq!(bench.finish().2.nodes, 2);
}

#[test]
fn the_last_member_with_a_name_wins() {
    let mut bench = Bench::new();
    let archive = Archive::default()
        .file("x", "first")
        .dir("y")
        .file("y/z", "z")
        .file("x", "last")
        .file("y", "file");
    bench.plain(&archive.end()).expect("it is taken");
    assert_eq!(
        (bench.text("x"), bench.text("y")),
        (Some("last".into()), Some("file".into()))
    );
    assert!(!bench.builder.exists(b"y/z"));
}

#[test]
fn devices_are_stored_and_checked() {
    let mut device = raw_header("null", b'3', 0);
    put(&mut device, 329, b"0000001\0");
    put(&mut device, 337, b"0000003\0");
    let mut bench = Bench::new();
    bench
        .plain(&Archive(seal(device)).end())
        .expect("it is taken");
    let node = bench
        .builder
        .staging
        .find(b"null")
        .expect("it is found")
        .expect("it is there");
    assert_eq!(
        bench.builder.staging.tree.node(node).kind,
        Kind::CharDevice(Device { major: 1, minor: 3 })
    );
    put(&mut device, 329, b"7777777\0");
    assert!(refusal(&Archive(seal(device)).end()).contains("too large for Linux"));
}

fn sparse(map: &str, file_bytes: &str, bytes: &[u8]) -> Vec<u8> {
    let records = [
        ("GNU.sparse.size", file_bytes),
        ("GNU.sparse.name", "s"),
        ("GNU.sparse.map", map),
    ];
    Archive::default()
        .pax(&records)
        .member("x", b'0', bytes)
        .end()
}

#[test]
fn maps_of_sparse_files_are_checked() {
    for (map, bytes) in [
        ("0,5", "4"),
        ("8,4,0,4", "100"),
        ("0,4,2,1", "100"),
        ("0,4", "100"),
        ("0,4,4", "9"),
        ("18446744073709551615,5", "100"),
    ] {
        let error = refusal(&sparse(map, bytes, b"12345"));
        assert!(error.contains("sparse"), "{map}: {error}");
    }
    let error = refusal(&sparse("0,5", "17592186044416", b"12345"));
    assert_eq!(error, "s is refused: a file is larger than 16 TiB");
    let inner = |text: &str| {
        let records = [
            ("GNU.sparse.major", "1"),
            ("GNU.sparse.minor", "0"),
            ("GNU.sparse.realsize", "4096"),
        ];
        let mut bytes = text.as_bytes().to_vec();
        bytes.resize(512, 0);
        Archive::default()
            .pax(&records)
            .member("x", b'0', &bytes)
            .end()
    };
    for map in [
        "1\n0\n512\n",
        "99999999999\n",
        "1\n",
        "\n",
        "x\n",
        "1\n99999999999999999999999\n1\n",
        "2\n0\n0\n",
    ] {
        assert!(refusal(&inner(map)).contains("sparse"), "{map:?}");
    }
    let error = refusal(
        &Archive::default()
            .pax(&[("GNU.sparse.major", "1"), ("GNU.sparse.realsize", "9")])
            .file("x", "1\n")
            .end(),
    );
    assert!(error.contains("longer than its content"), "{error}");
}

#[test]
fn a_huge_sparse_file_costs_nothing() {
    let mut bench = Bench::with(SMALL);
    bench
        .plain(&sparse("1099511627776,5", "17592186040320", b"12345"))
        .expect("it is taken");
    let (_dir, image, made) = bench.finish();
    assert!(
        made.used_bytes < 64 << 20
            && std::fs::metadata(image).expect("it is there").len() < 64 << 20
    );
}

/// An archive whose member claims a gibibyte, but has no content.
fn claim(kind: u8) -> Vec<u8> {
    Archive(seal(raw_header("x", kind, 1 << 30))).end()
}

#[test]
fn long_names_and_extended_headers_are_limited() {
    for kind in [b'x', b'g', b'L', b'K'] {
        assert_eq!(
            refusal(&claim(kind)),
            "the archive is damaged at byte 512: a long name or an extended header has more than 1 MiB"
        );
    }
    let mut many = Archive::default();
    for at in 0..4 {
        let value = "v".repeat(900 << 10);
        let text = format!("{} SCHILY.xattr.user.{at}={value}\n", value.len() + 28);
        many = many.member("pax", b'g', text.as_bytes());
    }
    assert!(
        refusal(&many.file("x", "").end())
            .contains("a global extended header has more than 64 KiB")
    );
}

#[test]
fn a_decompression_bomb_is_stopped_at_the_limit() {
    let limits = Limits {
        bytes: 8 << 20,
        ..SMALL
    };
    let header = seal(raw_header("zeros", b'0', 4 << 30));
    let zeros = std::io::Cursor::new(header)
        .chain(std::io::repeat(0))
        .take(1 << 30);
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    std::io::copy(&mut zeros.take(64 << 20), &mut gzip).expect("it is packed");
    let bomb = gzip.finish().expect("it is packed");
    let error = Bench::with(limits).plain(&bomb).expect_err("it is refused");
    assert_eq!(
        error.to_string(),
        "zeros exceeds the limit of 8388608 bytes of input"
    );
    // Zeros after the end count as well, and so do earlier archives.
    let mut bench = Bench::with(limits);
    bench
        .plain(&Archive::default().bytes(&vec![0; 5 << 20]).end())
        .expect("so much is allowed");
    let error = bench
        .plain(&Archive::default().bytes(&vec![0; 5 << 20]).end())
        .expect_err("it is refused");
    assert_eq!(
        error.to_string(),
        "the archive exceeds the limit of 8388608 bytes of input"
    );
}

#[test]
fn more_nodes_than_allowed_are_refused() {
    let mut archive = Vec::new();
    for at in 0..1001 {
        archive.extend(seal(raw_header(&format!("f{at}"), b'0', 0)));
    }
    assert_eq!(refusal(&archive), "f1000 exceeds the limit of 1000 nodes");
    let endless = std::iter::from_fn(|| Some(seal(raw_header("same", b'0', 0))))
        .take(1_000_000)
        .flatten();
    let error = Bench::with(SMALL)
        .from(Bytes(endless))
        .expect_err("it is refused");
    assert_eq!(error.to_string(), "same exceeds the limit of 1000 nodes");
}

struct Bytes<I>(I);

impl<I: Iterator<Item = u8>> Read for Bytes<I> {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        Ok(into
            .iter_mut()
            .zip(&mut self.0)
            .map(|(to, from)| *to = from)
            .count())
    }
}

#[test]
fn extended_attributes_are_limited() {
    let value = "v".repeat(33 << 10);
    let two = [
        ("SCHILY.xattr.user.a", &value[..]),
        ("SCHILY.xattr.user.b", &value),
    ];
    let error = refusal(&Archive::default().pax(&two).file("x", "").end());
    assert_eq!(
        error,
        "x is refused: its extended attributes have more than 64 KiB"
    );
    let mut bomb = Archive::default();
    for at in 0..40 {
        bomb = bomb.pax(&two[..1]).file(&format!("f{at}"), "");
    }
    assert!(refusal(&bomb.end()).ends_with(
        "exceeds the limit of 1048576 bytes of names, links, attributes and lists of blocks"
    ));
}

#[test]
fn extended_attributes_that_linux_does_not_store_are_skipped() {
    let records = [
        ("SCHILY.xattr.com.apple.x", "v"),
        ("SCHILY.xattr.system.data", "v"),
        ("SCHILY.xattr.user.x", "v"),
    ];
    let mut bench = Bench::new();
    bench
        .plain(&Archive::default().pax(&records).file("x", "").end())
        .expect("it is taken");
    let staging = &bench.builder.staging;
    let node = staging
        .find(b"x")
        .expect("it is found")
        .expect("it is there");
    assert_eq!(
        staging.tree.node(node).attributes.xattrs,
        [(b"user.x".to_vec(), b"v".to_vec())].into()
    );
}

#[test]
fn a_truncated_archive_is_accepted_only_after_the_content_of_a_member() {
    let long = "n".repeat(200);
    // The number of padding bytes at the end of each.
    let pieces = [
        (Archive::default().file("a", &"a".repeat(700)), 324),
        (
            Archive::default()
                .member("././@LongLink", b'L', long.as_bytes())
                .file("b", "b"),
            511,
        ),
        (
            Archive::default()
                .pax(&[("path", "c")])
                .file("x", &"c".repeat(1024)),
            0,
        ),
    ];
    let ends: Vec<std::ops::RangeInclusive<usize>> = pieces
        .iter()
        .scan(0, |end, (piece, padding)| {
            *end += piece.0.len();
            Some(*end - padding..=*end)
        })
        .collect();
    let whole: Vec<u8> = pieces
        .iter()
        .flat_map(|(piece, _)| piece.0.clone())
        .collect();
    for cut in (0..whole.len())
        .step_by(512)
        .flat_map(|at| [at, at + 1, at + 511])
    {
        let taken = Bench::new().plain(&whole[..cut]);
        assert_eq!(
            taken.is_ok(),
            cut == 0 || ends.iter().any(|end| end.contains(&cut)),
            "cut at {cut}"
        );
    }
}

#[test]
fn damage_is_reported() {
    let good = Archive::default().file("a", "a").end();
    for at in (0..512).filter(|at| !(148..156).contains(at)) {
        let mut bad = good.clone();
        bad[at] ^= 1;
        assert!(
            refusal(&bad).starts_with("the archive is damaged at byte 512: the checksum"),
            "{at}"
        );
    }
    let mut lone = Archive::default()
        .file("a", "a")
        .bytes(&[0; 512])
        .file("b", "b")
        .end();
    assert!(refusal(&lone).contains("a lone block of zeros"));
    lone = good.clone();
    lone.extend_from_slice(b"more");
    assert!(refusal(&lone).contains("data follows its end"));
    assert!(refusal(b"this is no archive, but it is long enough").contains("ends inside a member"));
    assert!(
        refusal(&Archive::default().member("x", b'?', b"").end())
            .contains("file type is not supported")
    );
}

/// A layer as `umoci insert` writes it.
#[test]
fn an_archive_may_end_with_the_last_byte_of_its_last_member() {
    let whole = Archive::default()
        .file("a", "first")
        .file("b", "last")
        .end();
    for bytes in [3 * 512 + 4, 3 * 512 + 5, 4 * 512 - 1, 4 * 512, 5 * 512] {
        let mut bench = Bench::new();
        bench.plain(&whole[..bytes]).expect("it is taken");
        assert_eq!(
            (bench.text("a"), bench.text("b")),
            (Some("first".into()), Some("last".into())),
            "{bytes}"
        );
    }
}

#[test]
fn damaged_compressed_input_is_reported() {
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(&Archive::default().file("a", "a").end())
        .expect("it is packed");
    let gzip = gzip.finish().expect("it is packed");
    let zstd =
        zstd::encode_all(&Archive::default().file("a", "a").end()[..], 1).expect("it is packed");
    for packed in [&gzip[..gzip.len() - 9], &zstd[..zstd.len() - 3]] {
        let error = Bench::new().plain(packed).expect_err("it is refused");
        assert!(matches!(error, Error::Input { .. }), "{error}");
    }
}

#[test]
fn the_caller_can_stop_an_addition() {
    let mut bench = Bench::new();
    let mut endless = Archive(seal(raw_header("x", b'0', 1 << 32))).0.to_vec();
    endless.extend_from_slice(&[1; 512]);
    let mut input = std::io::Cursor::new(endless).chain(std::io::repeat(1));
    let mut reported = 0;
    let stopped = bench
        .builder
        .add_tar(&mut input, TarRules::Plain, &mut |bytes| {
            reported = bytes;
            if bytes < 10 << 20 {
                Ok(())
            } else {
                Err(crate::Stop)
            }
        });
    assert!(matches!(stopped, Err(Error::GivenUp)) && reported >= 10 << 20);
}

#[test]
fn the_root_must_stay_a_directory() {
    assert!(
        refusal(&Archive::default().symlink("./", "/etc").end())
            .contains("would replace the root directory")
    );
    let mut bench = Bench::new();
    bench
        .plain(&Archive::default().dir("./").end())
        .expect("it is taken");
    assert_eq!(
        bench.builder.staging.tree.node(Tree::ROOT).attributes.mode,
        0o644
    );
    assert!(bench.builder.remove(b"/").is_err());
}
