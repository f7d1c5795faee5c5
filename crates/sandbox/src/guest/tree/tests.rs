//! Archives that no guest of ours would make.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::Mode;
use tar::{Archive, EntryType, Header};

use super::pack::{Length, Packing};
use super::unpack::{Attributes, DIR_COST, Dirs, HEADERS_MAX};
use super::*;
use crate::error::{Error, Result};

/// An archive of a hostile guest: names are written into headers unchecked.
#[derive(Default)]
struct Forged(Vec<u8>);

impl Forged {
    fn member(mut self, kind: EntryType, name: &str, link: &str, bytes: &[u8]) -> Self {
        let mut header = Header::new_gnu();
        header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
        header.as_old_mut().linkname[..link.len()].copy_from_slice(link.as_bytes());
        header.set_entry_type(kind);
        header.set_mode(0o755);
        header.set_uid(rustix::process::geteuid().as_raw().into());
        header.set_gid(rustix::process::getegid().as_raw().into());
        header.set_mtime(1_000_000);
        header.set_size(bytes.len() as u64);
        self.header(header);
        self.0.extend_from_slice(bytes);
        self.0.resize(self.0.len().next_multiple_of(512), 0);
        self
    }

    fn header(&mut self, mut header: Header) {
        header.set_cksum();
        self.0.extend_from_slice(header.as_bytes());
    }

    fn dir(self, name: &str) -> Self {
        self.member(EntryType::Directory, name, "", b"")
    }

    fn file(self, name: &str, bytes: &[u8]) -> Self {
        self.member(EntryType::Regular, name, "", bytes)
    }

    fn link(self, kind: EntryType, name: &str, target: &str) -> Self {
        self.member(kind, name, target, b"")
    }

    fn unpack(self, to: &Path) -> Result<Vec<String>> {
        let (chunks, queue) = mpsc::channel(1 << 16);
        for chunk in self.0.chunks(1000) {
            chunks.try_send(Bytes::copy_from_slice(chunk)).unwrap();
        }
        drop(chunks);
        unpack(queue, to).map(Skipped::into_lines)
    }
}

/// A chosen directory, with a neighbour that must not change.
struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("neighbour"), "untouched").unwrap();
        Self(dir)
    }

    fn chosen(&self) -> PathBuf {
        self.0.path().join("chosen")
    }

    fn assert_contained(&self) {
        let names = fs::read_dir(self.0.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name());
        let others: Vec<_> = names.filter(|name| name != "chosen").collect();
        assert_eq!(others, ["neighbour"]);
        assert_eq!(
            fs::read(self.0.path().join("neighbour")).unwrap(),
            b"untouched"
        );
    }
}

#[test]
fn names_that_lead_out_are_refused() {
    for name in [
        "/etc/x",
        "../x",
        "x/../../y",
        "x/..",
        "./..",
        "..",
        ".",
        "/",
        "",
    ] {
        let place = Place::new();
        let refused = Forged::default()
            .dir("x")
            .file(name, b"bad")
            .unpack(&place.chosen());
        assert!(
            matches!(refused, Err(Error::Archive { .. })),
            "{name:?}: {refused:?}"
        );
        place.assert_contained();
    }
}

#[test]
fn nothing_is_written_through_a_link() {
    for target in ["..", "/tmp", ".", "../neighbour", "inner"] {
        let place = Place::new();
        let forged =
            Forged::default()
                .dir("x")
                .dir("x/inner")
                .link(EntryType::Symlink, "x/l", target);
        let refused = forged.file("x/l/planted", b"bad").unpack(&place.chosen());
        assert!(refused.is_err(), "{target}");
        assert!(!place.chosen().join("inner/planted").exists());
        place.assert_contained();
    }
    // A file in the place of a link replaces the link, not its target.
    let place = Place::new();
    let forged = Forged::default()
        .dir("x")
        .link(EntryType::Symlink, "x/l", "../neighbour");
    forged.file("x/l", b"own").unpack(&place.chosen()).unwrap();
    assert!(
        place
            .chosen()
            .join("l")
            .symlink_metadata()
            .unwrap()
            .is_file()
    );
    place.assert_contained();
}

#[test]
fn the_tree_itself_cannot_become_a_link() {
    let place = Place::new();
    let forged = Forged::default()
        .link(EntryType::Symlink, "x", ".")
        .file("x/planted", b"bad");
    assert!(forged.unpack(&place.chosen()).is_err());
    place.assert_contained();
}

#[test]
fn hard_links_stay_inside() {
    for target in ["../neighbour", "/etc/passwd", "x/../../neighbour"] {
        let place = Place::new();
        let refused = Forged::default()
            .dir("x")
            .link(EntryType::Link, "x/h", target)
            .unpack(&place.chosen());
        assert!(refused.is_err(), "{target}");
        assert!(!place.chosen().join("h").exists());
        place.assert_contained();
    }
    // Also not through a symbolic link.
    let place = Place::new();
    let forged = Forged::default()
        .dir("x")
        .link(EntryType::Symlink, "x/up", "..");
    assert!(
        forged
            .link(EntryType::Link, "x/h", "x/up/neighbour")
            .unpack(&place.chosen())
            .is_err()
    );
    place.assert_contained();
    let place = Place::new();
    let forged = Forged::default()
        .dir("x")
        .file("x/a", b"one")
        .link(EntryType::Link, "x/b", "x/a");
    forged.unpack(&place.chosen()).unwrap();
    assert_eq!(fs::read(place.chosen().join("b")).unwrap(), b"one");
}

#[test]
fn devices_are_left_out_and_named() {
    let place = Place::new();
    let forged = Forged::default()
        .dir("x")
        .link(EntryType::Char, "x/c", "")
        .link(EntryType::Fifo, "x/f", "");
    let skipped = forged
        .file("x/after", b"kept")
        .unpack(&place.chosen())
        .unwrap();
    assert_eq!(skipped.len(), 2, "{skipped:?}");
    assert!(!place.chosen().join("c").exists() && !place.chosen().join("f").exists());
    assert_eq!(fs::read(place.chosen().join("after")).unwrap(), b"kept");
}

#[test]
fn set_id_bits_are_dropped_and_the_sticky_bit_is_kept() {
    let place = Place::new();
    let mut forged = Forged::default();
    for (kind, name) in [(EntryType::Directory, "x"), (EntryType::Regular, "x/f")] {
        let mut header = Header::new_gnu();
        header.set_path(name).unwrap();
        header.set_entry_type(kind);
        header.set_mode(0o7751);
        header.set_uid(rustix::process::geteuid().as_raw().into());
        header.set_gid(rustix::process::getegid().as_raw().into());
        header.set_mtime(1_000_000);
        header.set_size(0);
        forged.header(header);
    }
    forged.unpack(&place.chosen()).unwrap();
    for path in [place.chosen(), place.chosen().join("f")] {
        assert_eq!(
            path.metadata().unwrap().permissions().mode() & 0o7777,
            0o1751,
            "{path:?}"
        );
        assert_eq!(path.metadata().unwrap().mtime(), 1_000_000);
    }
}

#[test]
fn the_last_of_two_members_with_one_name_stays() {
    let place = Place::new();
    let forged = Forged::default()
        .dir("x")
        .file("x/a", b"longer first")
        .file("x/a", b"last");
    forged.unpack(&place.chosen()).unwrap();
    assert_eq!(fs::read(place.chosen().join("a")).unwrap(), b"last");
    let forged = Forged::default()
        .dir("x")
        .dir("x/d")
        .file("x/d", b"in the way");
    assert!(
        forged.unpack(&place.chosen()).is_err(),
        "a directory is not replaced by a file"
    );
}

/// A member of a few bytes that claims this length.
fn sparse(claimed: u64) -> Forged {
    let mut header = Header::new_gnu();
    header.set_path("x").unwrap();
    header.set_entry_type(EntryType::GNUSparse);
    header.set_mode(0o644);
    header.set_uid(rustix::process::geteuid().as_raw().into());
    header.set_gid(rustix::process::getegid().as_raw().into());
    header.set_mtime(0);
    header.set_size(512);
    let gnu = header.as_gnu_mut().unwrap();
    gnu.set_is_extended(false);
    gnu.set_real_size(claimed);
    gnu.sparse[0].set_offset(0);
    gnu.sparse[0].set_length(512);
    gnu.sparse[1].set_offset(claimed);
    gnu.sparse[1].set_length(0);
    let mut forged = Forged::default();
    forged.header(header);
    forged.0.extend_from_slice(&[1; 512]);
    forged
}

#[test]
fn holes_stay_holes_and_those_beyond_any_disk_are_refused() {
    let place = Place::new();
    sparse(256 << 20).unpack(&place.chosen()).unwrap();
    let written = place.chosen().metadata().unwrap();
    assert_eq!(written.len(), 256 << 20);
    assert!(written.blocks() * 512 < 1 << 20);
    let refused = sparse(1 << 60).unpack(&place.chosen()).unwrap_err();
    assert!(
        refused
            .report()
            .causes
            .iter()
            .any(|cause| cause.contains("too large")),
        "{:?}",
        refused.report()
    );
}

#[test]
fn headers_without_end_do_not_fill_the_memory() {
    for kind in [
        EntryType::GNULongName,
        EntryType::GNULongLink,
        EntryType::XHeader,
    ] {
        let place = Place::new();
        let forged =
            Forged::default().member(kind, "long", "", &vec![b'a'; HEADERS_MAX as usize + 1]);
        let refused = forged.file("x", b"").unpack(&place.chosen()).unwrap_err();
        assert!(
            refused
                .report()
                .causes
                .iter()
                .any(|cause| cause.contains("without end")),
            "{:?}",
            refused.report()
        );
    }
}

#[test]
fn an_archive_that_is_cut_off_is_an_error() {
    let place = Place::new();
    let mut forged = Forged::default().dir("x").file("x/a", &[7; 2000]);
    forged.0.truncate(forged.0.len() - 1000);
    assert!(forged.unpack(&place.chosen()).is_err());
}

#[test]
fn members_without_end_do_not_fill_the_memory() {
    let place = Place::new();
    let mut forged = Forged::default().dir("x").dir("x/d");
    for _ in 0..3000 {
        forged = forged.dir("x/d").link(EntryType::Fifo, "x/\x1b[2Jf", "");
    }
    let skipped = forged.unpack(&place.chosen()).unwrap();
    assert_eq!(skipped.len(), SKIPPED_LINES + 1);
    assert!(skipped[0].contains("\\u{1b}[2Jf: a Fifo"), "{}", skipped[0]);
    assert_eq!(skipped[SKIPPED_LINES], "and 2000 more");
    let mut long = Skipped::default();
    (0..3).for_each(|_| long.add(&"x".repeat(SKIPPED_BYTES / 2)));
    assert_eq!(long.into_lines().pop().unwrap(), "and 1 more");
}

#[test]
fn each_directory_is_kept_once_and_their_number_is_limited() {
    let attributes = Attributes::of(&owned_by(0)).unwrap();
    let mut dirs = Dirs::new(2 * DIR_COST + 10);
    (0..100).for_each(|_| dirs.keep(Path::new("x"), attributes).unwrap());
    dirs.keep(Path::new("x/a"), attributes).unwrap();
    assert!(matches!(
        dirs.keep(Path::new("x/b"), attributes),
        Err(Error::Archive { .. })
    ));
    let order: Vec<_> = dirs.innermost_first().map(|(path, _)| path).collect();
    assert_eq!(order, [Path::new("x/a"), Path::new("x")]);
}

fn owned_by(uid: u64) -> Header {
    let mut header = Header::new_gnu();
    header.set_path("x").unwrap();
    header.set_entry_type(EntryType::Regular);
    header.set_mode(0o644);
    header.set_uid(uid);
    header.set_gid(0);
    header.set_mtime(0);
    header.set_size(0);
    header
}

#[test]
fn an_impossible_owner_is_refused() {
    for uid in [u64::from(u32::MAX), 1 << 32] {
        let place = Place::new();
        let mut forged = Forged::default();
        forged.header(owned_by(uid));
        assert!(
            matches!(forged.unpack(&place.chosen()), Err(Error::Archive { .. })),
            "{uid}"
        );
        assert!(!place.chosen().exists());
    }
}

/// Runs `pack` and returns the archive with its result.
fn packed<T>(pack: impl FnOnce(mpsc::Sender<Bytes>) -> T) -> (Forged, T) {
    let (chunks, mut queue) = mpsc::channel(1 << 16);
    let given = pack(chunks);
    let mut archive = Vec::new();
    while let Some(chunk) = queue.blocking_recv() {
        archive.extend_from_slice(&chunk);
    }
    (Forged(archive), given)
}

#[test]
fn a_packed_tree_is_unchanged_after_unpacking() {
    let place = Place::new();
    let source = tempfile::tempdir().unwrap();
    let at = |name: &str| source.path().join(name);
    let long = "n".repeat(200);
    let island = 100 << 20;
    fs::create_dir(at("dir")).unwrap();
    fs::set_permissions(at("dir"), PermissionsExt::from_mode(0o1755)).unwrap();
    fs::write(at(&long), "long").unwrap();
    std::os::unix::fs::symlink(&long, at("link")).unwrap();
    let sparse = File::create(at("sparse")).unwrap();
    sparse.set_len(200 << 20).unwrap();
    // More pieces than the header has places; the file does not fill the last block.
    (0..40).for_each(|i| sparse.write_all_at(b"island", island + (i << 16)).unwrap());
    sparse.write_all_at(b"shore", 200 << 20).unwrap();
    let (archive, skipped) =
        packed(|chunks| pack(source.path(), OsStr::new("x"), Owner::AsFound, chunks));
    assert!(skipped.unwrap().into_lines().is_empty());
    assert!(
        archive.0.len() < 1 << 20,
        "holes are sent: {}",
        archive.0.len()
    );
    archive.unpack(&place.chosen()).unwrap();
    let there = |name: &str| place.chosen().join(name);
    assert_eq!(fs::read(there(&long)).unwrap(), b"long");
    assert_eq!(fs::read_link(there("link")).unwrap(), Path::new(&long));
    assert_eq!(
        there("dir").metadata().unwrap().mode(),
        at("dir").metadata().unwrap().mode()
    );
    assert!(fs::read(there("sparse")).unwrap() == fs::read(at("sparse")).unwrap());
    assert!(there("sparse").metadata().unwrap().blocks() * 512 < 1 << 20);
}

#[test]
fn pipes_are_packed_in_their_place_and_sockets_named() {
    let source = tempfile::tempdir().unwrap();
    let mode = Mode::from_raw_mode(0o640);
    rustix::fs::mknodat(
        rustix::fs::CWD,
        source.path().join("pipe"),
        rustix::fs::FileType::Fifo,
        mode,
        0,
    )
    .unwrap();
    drop(std::os::unix::net::UnixListener::bind(source.path().join("socket")).unwrap());
    let (archive, skipped) =
        packed(|chunks| pack(source.path(), OsStr::new("x"), Owner::AsFound, chunks));
    let skipped = skipped.unwrap().into_lines();
    assert!(
        skipped.len() == 1 && skipped[0].contains("socket"),
        "{skipped:?}"
    );
    let mut archive = Archive::new(&archive.0[..]);
    let members = archive.entries().unwrap().map(|entry| {
        let entry = entry.unwrap();
        (
            entry.path().unwrap().into_owned(),
            entry.header().entry_type(),
        )
    });
    let members: Vec<_> = members.collect();
    assert_eq!(
        members,
        [
            ("x".into(), EntryType::Directory),
            ("x/pipe".into(), EntryType::Fifo)
        ]
    );
}

/// Packs a file of 1000 bytes that has another length when it is read.
fn changed(length: u64) -> (Vec<u8>, Length) {
    let place = Place::new();
    let source = tempfile::NamedTempFile::new().unwrap();
    let file = source.as_file();
    file.write_all_at(&[7; 1000], 0).unwrap();
    let found = file.metadata().unwrap();
    file.set_len(length).unwrap();
    let (archive, kept) = packed(|chunks| {
        let mut packing = Packing::new(chunks);
        packing
            .empty(&place.0.path().metadata().unwrap(), Path::new("x"))
            .unwrap();
        let kept = packing.file(file, &found, Path::new("x/changed")).unwrap();
        packing
            .empty(&place.0.path().metadata().unwrap(), Path::new("x/after"))
            .unwrap();
        packing.builder.into_inner().unwrap().flush().unwrap();
        kept
    });
    archive.unpack(&place.chosen()).unwrap();
    assert!(place.chosen().join("after").is_dir());
    (fs::read(place.chosen().join("changed")).unwrap(), kept)
}

#[test]
fn a_file_that_changes_while_it_is_packed_keeps_the_length_it_had() {
    assert_eq!(changed(1000), (vec![7; 1000], Length::Kept));
    assert_eq!(changed(100_000), (vec![7; 1000], Length::Kept));
    let (bytes, kept) = changed(600);
    assert_eq!(
        (&bytes[..600], &bytes[600..], kept),
        (&[7; 600][..], &[0; 400][..], Length::Shrank)
    );
    assert_eq!(changed(0), (vec![0; 1000], Length::Shrank));
}
