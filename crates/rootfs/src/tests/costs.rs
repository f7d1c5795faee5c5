//! The limits for the cost of an archive: memory, blocks of the image, bytes on the host, and time.

use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;

use super::Bench;
use super::archive::{Archive, raw_header, seal};
use crate::{Error, Limits, New, NewKind, Options, Stop, TarRules, Time};

const MIB: u64 = 1 << 20;

fn linked() -> Bench {
    let mut archive = Archive::default().member("blobs/first", b'0', &[7; MIB as usize]);
    for at in 0..20 {
        archive = archive
            .hard_link(&format!("h{at}"), "blobs/first")
            .symlink(&format!("a{at}"), "blobs/first");
    }
    let mut bench = Bench::new();
    bench
        .plain(
            &archive
                .symlink("dir", "blobs")
                .symlink("nothing", "missing")
                .end(),
        )
        .expect("it is taken");
    bench
}

#[test]
fn links_do_not_count_when_files_are_copied_out() {
    let bench = linked();
    let out = tempfile::tempdir().expect("a directory can be made");
    let mut reported = Vec::new();
    let mut watch = |bytes| {
        reported.push(bytes);
        Ok(())
    };
    bench
        .builder
        .copy_out(out.path(), MIB, &mut watch)
        .expect("it is copied");
    assert!(
        reported.is_sorted() && reported.last() == Some(&MIB),
        "{reported:?}"
    );
    let first = std::fs::metadata(out.path().join("blobs/first")).expect("it is there");
    for name in (0..20).flat_map(|at| [format!("h{at}"), format!("a{at}")]) {
        let path = out.path().join(name);
        assert!(
            std::fs::symlink_metadata(&path)
                .expect("it is there")
                .is_file()
        );
        assert_eq!(
            std::fs::metadata(&path).expect("it is there").ino(),
            first.ino()
        );
    }
    assert!(std::fs::read(out.path().join("a0")).expect("it can be read") == [7; MIB as usize]);
    assert!(!out.path().join("dir").exists() && !out.path().join("nothing").exists());
}

#[test]
fn copying_out_can_be_stopped_and_is_limited() {
    let bench = linked();
    let out = tempfile::tempdir().expect("a directory can be made");
    let mut watch = |bytes| if bytes == 0 { Ok(()) } else { Err(Stop) };
    let stopped = bench.builder.copy_out(out.path(), MIB, &mut watch);
    assert!(matches!(stopped, Err(Error::GivenUp)), "{stopped:?}");
    let out = tempfile::tempdir().expect("a directory can be made");
    let error = bench
        .builder
        .copy_out(out.path(), MIB - 1, &mut |_| Ok(()))
        .expect_err("it is refused");
    assert_eq!(
        error.to_string(),
        "/a0 exceeds the limit of 1048575 bytes to copy"
    );
}

/// A file whose bytes each need a separate block and extent.
fn scattered(pieces: u64) -> Vec<u8> {
    let map: Vec<String> = (0..pieces).map(|at| format!("{},1", at * 8192)).collect();
    let file_bytes = (pieces * 8192).to_string();
    let records = [
        ("GNU.sparse.size", &file_bytes[..]),
        ("GNU.sparse.name", "s"),
        ("GNU.sparse.map", &map.join(",")),
    ];
    Archive::default()
        .pax(&records)
        .member("x", b'0', &vec![7; pieces as usize])
        .end()
}

#[test]
fn scattered_bytes_count_as_whole_blocks() {
    let limits = Limits {
        written_bytes: MIB,
        ..Limits::default()
    };
    let error = Bench::with(limits)
        .plain(&scattered(1000))
        .expect_err("it is refused");
    assert_eq!(
        error.to_string(),
        "the image exceeds the limit of 1048576 bytes written to it"
    );
    let limits = Limits {
        written_bytes: 8 * MIB,
        ..Limits::default()
    };
    let mut bench = Bench::with(limits);
    bench.plain(&scattered(1000)).expect("so much is allowed");
    bench.finish();
}

#[test]
fn scattered_bytes_count_as_memory_for_extents() {
    let limits = Limits {
        names_bytes: 1000 * 24,
        ..Limits::default()
    };
    let error = Bench::with(limits)
        .plain(&scattered(1001))
        .expect_err("it is refused");
    assert_eq!(
        error.to_string(),
        "a file exceeds the limit of 1000 extents"
    );
    let mut bench = Bench::with(limits);
    bench.plain(&scattered(900)).expect("so much is allowed");
    let error = bench.plain(&scattered(900)).expect_err("it is refused");
    assert!(
        error
            .to_string()
            .starts_with("a file exceeds the limit of "),
        "{error}"
    );
}

#[test]
fn a_bomb_without_zeros_is_stopped_before_it_fills_the_disk() {
    let limits = Limits {
        written_bytes: 4 * MIB,
        ..Limits::default()
    };
    let header = seal(raw_header("ones", b'0', 64 * MIB));
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    let mut ones = std::io::Cursor::new(header)
        .chain(std::io::repeat(1))
        .take(64 * MIB + 512);
    std::io::copy(&mut ones, &mut gzip).expect("it is packed");
    let mut bench = Bench::with(limits);
    let error = bench
        .plain(&gzip.finish().expect("it is packed"))
        .expect_err("it is refused");
    assert_eq!(
        error.to_string(),
        "the image exceeds the limit of 4194304 bytes written to it"
    );
    let image = std::fs::metadata(bench.dir.path().join("image")).expect("it is there");
    assert!(image.blocks() * 512 <= 5 * MIB);
}

#[test]
fn every_name_counts_more_than_its_bytes() {
    let limits = Limits {
        names_bytes: 64 << 10,
        ..Limits::default()
    };
    let mut files = Archive::default();
    let mut links = Archive::default().file("f", "");
    for at in 0..1000 {
        files = files.file(&format!("{at}"), "");
        links = links.hard_link(&format!("{at}"), "f");
    }
    for archive in [files, links] {
        let error = Bench::with(limits)
            .plain(&archive.end())
            .expect_err("it is refused")
            .to_string();
        assert!(
            error.ends_with("65536 bytes of names, links, attributes and lists of blocks"),
            "{error}"
        );
    }
}

#[test]
fn headers_without_nodes_are_limited() {
    let limits = Limits {
        nodes: 10,
        ..Limits::default()
    };
    for kind in [b'x', b'g', b'V', b'L'] {
        let mut many = Archive::default();
        for _ in 0..81 {
            many = many.member("h", kind, b"");
        }
        let error = Bench::with(limits)
            .plain(&many.file("f", "").end())
            .expect_err("it is refused");
        assert_eq!(
            error.to_string(),
            "the archive exceeds the limit of 80 headers in one archive"
        );
    }
}

#[test]
fn global_headers_are_limited_and_count_only_if_used() {
    let said = |key: &str, bytes: usize| {
        let rest = format!(" {key}={}\n", "v".repeat(bytes));
        let text = format!("{}{rest}", rest.len() + 5);
        Archive::default()
            .member("pax", b'g', text.as_bytes())
            .file("f", "")
            .end()
    };
    let error = Bench::new()
        .plain(&said("SCHILY.xattr.user.a", 70_000))
        .expect_err("it is refused")
        .to_string();
    assert!(
        error.ends_with("a global extended header has more than 64 KiB"),
        "{error}"
    );
    Bench::new()
        .plain(&said("SCHILY.xattr.com.apple.a", 70_000))
        .expect("nothing is kept of it");
}

#[test]
fn after_a_failure_every_call_fails() {
    let mut bench = Bench::new();
    bench
        .plain(&Archive::default().file("a", "a").end())
        .expect("it is taken");
    bench
        .plain(&Archive::default().file("b", "b").file("../c", "c").end())
        .expect_err("it is refused");
    let dir = tempfile::tempdir().expect("a directory can be made");
    let later = [
        bench.plain(&Archive::default().end()).map(drop),
        bench.builder.add_dir(dir.path(), &mut |_| Ok(())).map(drop),
        bench.builder.put(b"d", dir_node()),
        bench.builder.remove(b"a").map(drop),
        bench.builder.read(b"a", 10).map(drop),
        bench.builder.copy_out(dir.path(), MIB, &mut |_| Ok(())),
    ];
    assert!(!bench.builder.exists(b"a"));
    let last = bench.builder.finish(&Options::default()).map(drop);
    assert!(
        later
            .into_iter()
            .chain([last])
            .all(|result| matches!(result, Err(Error::FailedBefore)))
    );
    let mut bench = Bench::new();
    bench
        .builder
        .put(b"../d", dir_node())
        .expect_err("it is refused");
    assert!(matches!(
        bench.builder.finish(&Options::default()),
        Err(Error::FailedBefore)
    ));
}

fn dir_node() -> New<'static> {
    New {
        mode: 0o755,
        uid: 0,
        gid: 0,
        modified: Time::default(),
        kind: NewKind::Dir,
    }
}

#[test]
fn anything_may_follow_the_end_of_a_layer() {
    let mut archive = Archive::default().file("a", "a").end();
    archive.extend(b"more");
    let mut bench = Bench::new();
    let added = bench.layer(&archive).expect("it is taken");
    assert_eq!(added.bytes, archive.len() as u64);
    assert_eq!(bench.text("a"), Some("a".into()));
}

#[test]
fn zeros_may_follow_a_gzip() {
    let archive = Archive::default().file("a", "a").end();
    let packed = |bytes: &[u8]| {
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(bytes).expect("it is packed");
        gzip.finish().expect("it is packed")
    };
    let two = [packed(&archive[..700]), packed(&archive[700..])].concat();
    for rules in [TarRules::Plain, TarRules::Layer] {
        let take = |bytes: &[u8]| {
            Bench::new()
                .builder
                .add_tar(&mut &*bytes, rules, &mut |_| Ok(()))
        };
        let bare = take(&two).expect("it is taken");
        assert_eq!(bare.bytes, archive.len() as u64);
        assert_eq!(
            take(&[&two[..], &[0; 10_000]].concat()).expect("it is taken"),
            bare
        );
        for rest in [&b"x"[..], b"\0\0x", &vec![0; 3 << 20]] {
            assert!(matches!(
                take(&[&two[..], rest].concat()),
                Err(Error::Input { .. })
            ));
        }
    }
}
