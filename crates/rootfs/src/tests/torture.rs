//! A root file system with every kind of content, imported in every way.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, Mode, Timespec, Timestamps, XattrFlags};
use tempfile::TempDir;

use super::listing::{Entry, Listing, assert_same, of_host, of_image, of_tree, without};
use super::{Bench, run, tool};
use crate::{Error, TarRules};

/// `cap_net_raw=ep`, as `setcap` writes it.
const CAPABILITY: [u8; 20] = [
    1, 0, 0, 2, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
];

/// `user::rw-,user:12345:r--,group::r--,mask::r--,other::---`, as system calls encode it.
fn acl() -> Vec<u8> {
    let entry = |tag: u16, bits: u16, id: u32| {
        [
            &tag.to_le_bytes()[..],
            &bits.to_le_bytes(),
            &id.to_le_bytes(),
        ]
        .concat()
    };
    let entries = [
        (1, 6, u32::MAX),
        (2, 4, 12345),
        (4, 4, u32::MAX),
        (16, 4, u32::MAX),
        (32, 0, u32::MAX),
    ];
    let entries = entries
        .iter()
        .flat_map(|(tag, bits, id)| entry(*tag, *bits, *id));
    2u32.to_le_bytes().into_iter().chain(entries).collect()
}

fn is_root() -> bool {
    fs::metadata("/proc/self").is_ok_and(|meta| meta.uid() == 0)
}

/// A place for it: `None` is where temporary files are.
fn torture(place: Option<&str>) -> TempDir {
    let dir = match place {
        Some(place) => tempfile::tempdir_in(place),
        None => tempfile::tempdir(),
    };
    let dir = dir.expect("a directory can be made");
    let root = dir.path();
    fill_plain(&root.join("plain"));
    fill_odd(&root.join("odd"));
    fill_names(&root.join("names"));
    if is_root() {
        fill_of_root(&root.join("root"));
    }
    set_times(root, Clock::Fine);
    dir
}

fn make(path: &Path, bytes: &[u8], mode: u32) {
    fs::write(path, bytes).expect("a file can be written");
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("a mode can be set");
}

/// Content that ustar can represent.
fn fill_plain(dir: &Path) {
    fs::create_dir_all(dir.join("a/b/c")).expect("a directory can be made");
    make(&dir.join("empty"), b"", 0o600);
    make(&dir.join("a/one block"), &[1; 4096], 0o640);
    make(
        &dir.join("a/b/odd size"),
        &(0..100_001u32)
            .map(|at| (at % 251) as u8)
            .collect::<Vec<_>>(),
        0o444,
    );
    make(&dir.join("set-ids"), b"x", 0o6755);
    fs::set_permissions(dir.join("a/b"), fs::Permissions::from_mode(0o1777))
        .expect("a mode can be set");
    fs::hard_link(dir.join("a/one block"), dir.join("a/b/c/linked")).expect("a link can be made");
    fs::hard_link(dir.join("a/one block"), dir.join("linked")).expect("a link can be made");
    std::os::unix::fs::symlink("a/b", dir.join("to-dir")).expect("a link can be made");
    std::os::unix::fs::symlink("/nowhere/at/all", dir.join("dangling"))
        .expect("a link can be made");
    rustix::fs::mknodat(
        CWD,
        dir.join("fifo"),
        FileType::Fifo,
        Mode::from_raw_mode(0o622),
        0,
    )
    .expect("a fifo can be made");
    let long = dir.join("d".repeat(60)).join("e".repeat(60));
    fs::create_dir_all(&long).expect("a directory can be made");
    make(&long.join("f".repeat(60)), b"in the prefix", 0o600);
}

/// Holes, attributes, sockets.
fn fill_odd(dir: &Path) {
    fs::create_dir(dir).expect("a directory can be made");
    for (name, pieces, bytes) in [
        ("all hole", &[][..], 10_000_000u64),
        ("hole first", &[(5 << 20, 5000u64)][..], (5 << 20) + 5000),
        ("hole last", &[(0, 4096)][..], 9_000_001),
        (
            "many holes",
            &[
                (0, 1),
                (1 << 20, 8192),
                (3 << 20, 100_000),
                (7 << 20, 4096),
                (15 << 20, 1),
            ][..],
            32 << 20,
        ),
    ] {
        let file = File::create(dir.join(name)).expect("a file can be made");
        file.set_len(bytes).expect("it can be made longer");
        for (offset, bytes) in pieces {
            file.write_all_at(&vec![7; *bytes as usize], *offset)
                .expect("it can be written");
        }
    }
    let every_other = File::create(dir.join("sixty pieces")).expect("a file can be made");
    (0..60u64).for_each(|at| {
        every_other
            .write_all_at(&[at as u8 + 1; 4096], at * 65536)
            .expect("it can be written")
    });
    drop(UnixListener::bind(dir.join("socket")).expect("a socket can be made"));
    for (name, value) in [
        ("user.short", &b"v"[..]),
        ("user.binary", &[0, 1, 10, 255, b'=']),
        ("user.long", &[b'l'; 1500]),
    ] {
        rustix::fs::lsetxattr(dir.join("hole last"), name, value, XattrFlags::empty())
            .expect("it can be set");
    }
    rustix::fs::lsetxattr(dir, "user.of a directory", b"x", XattrFlags::empty())
        .expect("it can be set");
}

fn fill_names(dir: &Path) {
    fs::create_dir(dir).expect("a directory can be made");
    let long = [b'n'; 255];
    let names: [&[u8]; 9] = [
        b"new\nline",
        &long,
        b"\xff\xfe not text",
        b" ",
        b"-rf",
        b"a\\b",
        b"tab\t\x01\x7f",
        "\u{fc}\u{1f980}".as_bytes(),
        b".wh",
    ];
    for name in names {
        make(&dir.join(OsStr::from_bytes(name)), name, 0o644);
    }
    let deep = (0..12).fold(dir.join("deep"), |path, _| path.join("x".repeat(100)));
    fs::create_dir_all(&deep).expect("a directory can be made");
    make(&deep.join("bottom"), b"bottom", 0o600);
    std::os::unix::fs::symlink("t".repeat(3000), dir.join("long target"))
        .expect("a link can be made");
    fs::hard_link(deep.join("bottom"), dir.join("top")).expect("a link can be made");
}

fn fill_of_root(dir: &Path) {
    fs::create_dir(dir).expect("a directory can be made");
    for (name, kind, major, minor) in [
        ("null", FileType::CharacterDevice, 1, 3),
        ("vda300", FileType::BlockDevice, 254, 300),
    ] {
        let device = rustix::fs::makedev(major, minor);
        rustix::fs::mknodat(
            CWD,
            dir.join(name),
            kind,
            Mode::from_raw_mode(0o660),
            device,
        )
        .expect("it can be made");
    }
    make(&dir.join("ping"), b"\x7fELF", 0o755);
    make(&dir.join("acl"), b"acl", 0o640);
    make(&dir.join("owned"), b"x", 0o400);
    std::os::unix::fs::lchown(dir.join("owned"), Some(4_000_000_000), Some(3_000_000))
        .expect("it can be owned");
    std::os::unix::fs::symlink("owned", dir.join("link")).expect("a link can be made");
    std::os::unix::fs::lchown(dir.join("link"), Some(1000), Some(1001)).expect("it can be owned");
    let set = |name: &str, key: &str, value: &[u8]| {
        rustix::fs::lsetxattr(dir.join(name), key, value, XattrFlags::empty())
            .expect("it can be set");
    };
    set("ping", "security.capability", &CAPABILITY);
    set("acl", "system.posix_acl_access", &acl());
}

/// The times that an archive can represent.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Clock {
    /// Seconds, since 1970.
    Whole,
    /// Nanoseconds, also before 1970. Below `plain`, only times that every format can represent.
    Fine,
}

/// Sets times, deepest first, because a new entry changes the time of its directory.
fn set_times(root: &Path, clock: Clock) {
    let mut paths = vec![root.to_path_buf()];
    let mut at = 0;
    while let Some(path) = paths.get(at).cloned() {
        if fs::symlink_metadata(&path).expect("it is there").is_dir() {
            paths.extend(
                fs::read_dir(&path)
                    .expect("it can be listed")
                    .map(|child| child.expect("it is there").path()),
            );
        }
        at += 1;
    }
    paths.sort();
    for (number, path) in paths.iter().enumerate().rev() {
        let is_plain =
            clock == Clock::Whole || path.components().any(|part| part.as_os_str() == "plain");
        let (seconds, nanoseconds) = if is_plain {
            (1_500_000_000, 0)
        } else {
            (
                number as i64 * 77_777_777 % 4_000_000_000 - 1_000_000_000,
                number as i64 * 99_999_989 % 1_000_000_000,
            )
        };
        let time = Timespec {
            tv_sec: seconds,
            tv_nsec: nanoseconds,
        };
        let times = Timestamps {
            last_access: time,
            last_modification: time,
        };
        rustix::fs::utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW)
            .expect("a time can be set");
    }
}

fn tar(dir: &Path, options: &[&str]) -> Vec<u8> {
    run(tool("tar")
        .args(options)
        .args(["--numeric-owner", "--sort=name", "-c", "-C"])
        .arg(dir)
        .arg("."))
}

fn no_sockets(mut listing: Listing) -> Listing {
    listing.retain(|_, entry| entry.kind != "socket");
    listing
}

/// Removes details that the reader of images does not return.
fn seen(entry: &mut Entry) {
    entry.modified.1 = 0;
    entry.xattrs.clear();
    entry.names.1.clear();
}

/// Asserts that the tree in memory and the finished image equal the expected listing.
fn comes_through(bench: Bench, expected: &Listing) -> (TempDir, PathBuf) {
    assert_same(&of_tree(&bench.builder.staging), expected);
    let (dir, image, made) = bench.finish();
    assert_same(&of_image(&image), &without(expected.clone(), seen));
    assert!(made.used_bytes < 32 << 20, "holes take no room");
    (dir, image)
}

#[test]
fn a_tree_is_unchanged_after_import_from_a_directory() {
    let torture = torture(None);
    let mut bench = Bench::new();
    bench
        .builder
        .add_dir(torture.path(), &mut |_| Ok(()))
        .expect("it is taken");
    let (_dir, image) = comes_through(bench, &of_host(torture.path()));
    if is_root() {
        let read = |command: &str| run(tool("debugfs").args(["-R", command]).arg(&image));
        let value = read("ea_get -x /root/ping security.capability");
        assert!(
            String::from_utf8_lossy(&value).contains("01 00 00 02 00 20"),
            "{}",
            value.escape_ascii()
        );
        let value =
            String::from_utf8_lossy(&read("ea_get /root/acl system.posix_acl_access")).into_owned();
        assert!(value.contains("02 00 04 00 39 30 00 00"), "{value}");
    }
}

/// Writes the tree of a directory, and adds the written image to another builder.
fn read_back(dir: &Path) -> (Listing, Result<Bench, Error>) {
    let mut first = Bench::new();
    let added = first.builder.add_dir(dir, &mut |_| Ok(()));
    added.expect("the directory can be added");
    let listing = of_tree(&first.builder.staging);
    let (_kept, image, _) = first.finish();
    let mut second = Bench::new();
    let added = second.builder.add_file_system(&image, &mut |_| Ok(()));
    (listing, added.map(|_| second))
}

#[test]
fn a_tree_is_unchanged_after_import_from_its_image() {
    let dir = torture(None);
    if is_root() {
        // An access list is stored in another form than it is seen.
        let (_, refused) = read_back(dir.path());
        assert!(matches!(refused, Err(Error::Refused { .. })));
        fs::remove_file(dir.path().join("root/acl")).expect("it can be removed");
    }
    let (expected, second) = read_back(dir.path());
    let second = second.expect("the image can be added");
    assert_same(&of_tree(&second.builder.staging), &expected);
    second.finish();
}

#[test]
fn a_tree_is_unchanged_after_import_from_pax_archives() {
    let torture = torture(None);
    let expected = no_sockets(of_host(torture.path()));
    for sparse in [
        "--sparse-version=0.0",
        "--sparse-version=0.1",
        "--sparse-version=1.0",
    ] {
        let options = [
            "--format=posix",
            "--xattrs",
            "--xattrs-include=*",
            "--sparse",
            sparse,
        ];
        let mut bench = Bench::new();
        bench
            .plain(&tar(torture.path(), &options))
            .expect("it is taken");
        comes_through(bench, &expected);
    }
}

#[test]
fn a_tree_is_unchanged_after_import_from_gnu_archives() {
    let torture = torture(None);
    let expected = without(no_sockets(of_host(torture.path())), |entry| {
        entry.modified.1 = 0;
        entry.xattrs.clear();
    });
    for options in [&["--format=gnu", "--sparse"][..], &["--format=gnu"]] {
        let mut bench = Bench::new();
        bench
            .plain(&tar(torture.path(), options))
            .expect("it is taken");
        comes_through(bench, &expected);
    }
}

#[test]
fn a_tree_is_unchanged_after_import_from_ustar_archives() {
    let torture = torture(None);
    let dir = torture.path().join("plain");
    for format in ["--format=ustar", "--format=v7"] {
        if format == "--format=v7" {
            // ustar has no long names and no pipes.
            fs::remove_dir_all(dir.join("d".repeat(60))).expect("it can be removed");
            fs::remove_file(dir.join("fifo")).expect("it can be removed");
            set_times(torture.path(), Clock::Fine);
        }
        let mut bench = Bench::new();
        bench.plain(&tar(&dir, &[format])).expect("it is taken");
        comes_through(bench, &of_host(&dir));
    }
}

#[test]
fn compressed_and_plain_archives_give_equal_images() {
    let torture = torture(None);
    let plain = tar(torture.path(), &["--format=posix", "--xattrs", "--sparse"]);
    let whole = |bytes: &[u8]| {
        let mut bench = Bench::new();
        let added = bench.plain(bytes).expect("it is taken");
        (added, bench.finished_bytes())
    };
    let (added, image) = whole(&plain);
    assert_eq!(added.bytes, plain.len() as u64);
    assert_eq!(
        added.sha256,
        <[u8; 32]>::from(<sha2::Sha256 as sha2::Digest>::digest(&plain))
    );
    let dir = tempfile::tempdir().expect("a directory can be made");
    let half = plain.len() / 2;
    let packed = |program: &str, bytes: &[u8]| {
        let file = dir.path().join("file");
        fs::write(&file, bytes).expect("a file can be written");
        // starts: gzip, xz, zstd
        run(tool(program).arg("-c").arg(&file))
    };
    for program in ["gzip", "zstd", "xz"] {
        // In two members, which some programs write.
        let bytes = [
            packed(program, &plain[..half]),
            packed(program, &plain[half..]),
        ]
        .concat();
        assert!(whole(&bytes) == (added, image.clone()), "{program}");
    }
}

#[test]
fn equal_input_gives_equal_images() {
    let image = |dir: &Path| {
        let mut bench = Bench::new();
        bench
            .builder
            .add_dir(dir, &mut |_| Ok(()))
            .expect("it is taken");
        bench.finished_bytes()
    };
    let here = torture(None);
    let first = image(here.path());
    assert!(first == image(here.path()));
    let in_memory = torture(Some("/dev/shm"));
    assert_same(&of_host(in_memory.path()), &of_host(here.path()));
    assert!(
        first == image(in_memory.path()),
        "the file system of the host makes no difference"
    );
}

#[test]
fn a_tree_is_unchanged_after_import_from_oci_layers() {
    let torture = torture(None);
    // Layers have no sockets, and umoci fails if it finds one. It stores whole seconds.
    fs::remove_file(torture.path().join("odd/socket")).expect("it can be removed");
    set_times(torture.path(), Clock::Whole);
    let dir = tempfile::tempdir().expect("a directory can be made");
    let image = dir.path().join("oci");
    let umoci = |args: &[&str], more: &[&Path]| run(tool("umoci").args(args).args(more));
    let tagged = format!("{}:t", image.display());
    umoci(&["init", "--layout"], &[&image]);
    umoci(&["new", "--image", &tagged], &[]);
    let bundle = dir.path().join("bundle");
    let flags: &[&str] = if is_root() { &[] } else { &["--rootless"] };
    umoci(
        &[&["unpack", "--image", &tagged][..], flags].concat(),
        &[&bundle],
    );
    let rootfs = bundle.join("rootfs");
    run(tool("cp")
        .args(["-a", "--sparse=always"])
        .arg(torture.path().join("."))
        .arg(&rootfs));
    umoci(
        &["repack", "--refresh-bundle", "--image", &tagged],
        &[&bundle],
    );
    change(&rootfs);
    umoci(
        &["repack", "--refresh-bundle", "--image", &tagged],
        &[&bundle],
    );
    let mut bench = Bench::new();
    for layer in layers(&image) {
        let mut file = File::open(&layer).expect("it opens");
        bench
            .builder
            .add_tar(&mut file, TarRules::Layer, &mut |_| Ok(()))
            .expect("it is taken");
    }
    comes_through(bench, &no_sockets(of_host(&rootfs)));
}

/// Changes for a second layer: removed, replaced, added and newly linked files.
fn change(rootfs: &Path) {
    fs::remove_dir_all(rootfs.join("names/deep")).expect("it can be removed");
    fs::remove_file(rootfs.join("plain/empty")).expect("it can be removed");
    fs::remove_dir_all(rootfs.join("plain/a/b")).expect("it can be removed");
    make(&rootfs.join("plain/a/b"), b"now a file", 0o600);
    fs::remove_file(rootfs.join("plain/to-dir")).expect("it can be removed");
    fs::create_dir(rootfs.join("plain/to-dir")).expect("it can be made");
    make(&rootfs.join("plain/to-dir/x"), b"x", 0o644);
    make(&rootfs.join("names/new\nline"), b"other bytes", 0o755);
    set_times(rootfs, Clock::Whole);
}

/// Files of the layers, lowest first.
fn layers(image: &Path) -> Vec<PathBuf> {
    let json = |path: &Path| -> serde_json::Value {
        serde_json::from_slice(&fs::read(path).expect("it can be read")).expect("it is JSON")
    };
    let blob = |of: &serde_json::Value| {
        let digest = of["digest"].as_str().expect("it has a digest");
        image.join("blobs").join(digest.replace(':', "/"))
    };
    let manifest = json(&blob(&json(&image.join("index.json"))["manifests"][0]));
    manifest["layers"]
        .as_array()
        .expect("it has layers")
        .iter()
        .map(blob)
        .collect()
}

#[test]
fn a_file_that_changes_while_it_is_read_is_an_error() {
    let dir = tempfile::tempdir().expect("a directory can be made");
    let path = dir.path().join("growing");
    fs::write(&path, vec![1; 1 << 20]).expect("a file can be written");
    let mut bench = Bench::new();
    let error = bench.builder.add_dir(dir.path(), &mut |_| {
        fs::OpenOptions::new()
            .append(true)
            .open(&path)
            .and_then(|file| file.write_all_at(b"x", 0))
            .expect("it grows");
        Ok(())
    });
    assert!(matches!(error, Err(crate::Error::Changed { path: changed }) if changed == path));
}
