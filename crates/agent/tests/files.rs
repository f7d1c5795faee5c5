//! Files, trees and tunnels.

mod client;

use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::time::{Duration, Instant};

use client::{Agent, Seen};
use sandtree_proto::message::decode_item;
use sandtree_proto::{DirEntry, FileKind, HostMessage, Open, Outcome, Reply, Request};

fn bytes(path: &Path) -> Vec<u8> {
    path.as_os_str().as_bytes().to_vec()
}

fn write_file(path: &Path, mode: u32) -> Open {
    let own = fs::metadata("/proc/self").unwrap();
    Open::WriteFile {
        path: bytes(path),
        mode,
        uid: own.uid(),
        gid: own.gid(),
    }
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(dir)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn failure(seen: Seen) -> (i32, String) {
    match seen.outcome {
        Some(Outcome::Failed(failure)) => (failure.errno, failure.message),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_file_is_replaced_only_when_it_is_whole() {
    let mut agent = Agent::start(&[]);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    fs::write(&path, "old").unwrap();
    let big: Vec<u8> = (0..1_500_000u32).map(|i| (i / 3) as u8).collect();
    let channel = agent.client.open(write_file(&path, 0o640));
    agent.client.feed_some(channel, &big);
    assert_eq!(fs::read(&path).unwrap(), b"old");
    agent.client.end_input(channel);
    assert_eq!(agent.client.finish(channel).outcome, Some(Outcome::Done));
    assert!(fs::read(&path).unwrap() == big);
    assert_eq!(
        fs::metadata(&path).unwrap().permissions().mode() & 0o7777,
        0o640
    );
    let channel = agent.client.open(Open::ReadFile { path: bytes(&path) });
    assert!(agent.client.finish(channel).out == big);
}

#[test]
fn a_part_of_a_file_is_read_from_its_offset() {
    let mut agent = Agent::start(&[]);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    fs::write(&path, "0123456789").unwrap();
    let mut part = |offset, length| {
        let path = bytes(&path);
        let channel = agent.client.open(Open::ReadFrom {
            path,
            offset,
            length,
        });
        let read = agent.client.finish(channel);
        (read.outcome, String::from_utf8(read.out).unwrap())
    };
    let done = |text: &str| (Some(Outcome::Done), text.to_owned());
    assert_eq!(part(0, 3), done("012"));
    assert_eq!(part(7, u64::MAX), done("789"));
    assert_eq!(part(4, 0), done(""));
    assert_eq!(part(10, 5), done(""));
    let (refused, nothing) = part(u64::MAX, 1);
    assert!(matches!(refused, Some(Outcome::Failed(_))), "{refused:?}");
    assert_eq!(nothing, "");
}

#[test]
fn an_abandoned_write_leaves_nothing() {
    let mut agent = Agent::start(&[]);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    let channel = agent.client.open(write_file(&path, 0o644));
    agent.client.feed_some(channel, b"half");
    let deadline = Instant::now() + Duration::from_secs(10);
    while names(dir.path()).is_empty() {
        assert!(Instant::now() < deadline);
    }
    agent.client.send(&HostMessage::Close { channel });
    while !names(dir.path()).is_empty() {
        assert!(Instant::now() < deadline, "{:?}", names(dir.path()));
    }
}

#[test]
fn leftovers_of_an_interrupted_write_do_no_harm() {
    let mut agent = Agent::start(&[]);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    // Names that an agent of an earlier boot could have used.
    (0..10).for_each(|number| {
        fs::write(dir.path().join(format!(".file.sandtree-{number}")), "left").unwrap()
    });
    let channel = agent.client.open(write_file(&path, 0o644));
    agent.client.feed(channel, b"new");
    assert_eq!(agent.client.finish(channel).outcome, Some(Outcome::Done));
    assert_eq!(fs::read(&path).unwrap(), b"new");
}

#[test]
fn only_regular_files_are_read() {
    let mut agent = Agent::start(&[]);
    let dir = tempfile::tempdir().unwrap();
    let pipe = dir.path().join("pipe");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &pipe,
        rustix::fs::FileType::Fifo,
        0o600.into(),
        0,
    )
    .unwrap();
    for (path, errno) in [
        (&*pipe, libc::EINVAL),
        (Path::new("/dev/zero"), libc::EINVAL),
        (dir.path(), libc::EISDIR),
    ] {
        let channel = agent.client.open(Open::ReadFile { path: bytes(path) });
        assert_eq!(
            failure(agent.client.finish(channel)).0,
            errno,
            "{}",
            path.display()
        );
    }
}

#[test]
fn failures_carry_operation_path_and_number() {
    let mut agent = Agent::start(&[]);
    let channel = agent.client.open(Open::ReadFile {
        path: b"/no/such".to_vec(),
    });
    let expected = (
        libc::ENOENT,
        "cannot open /no/such: No such file or directory".to_owned(),
    );
    assert_eq!(failure(agent.client.finish(channel)), expected);
    let channel = agent.client.open(write_file(Path::new("/dev/null"), 0o644));
    assert_eq!(failure(agent.client.finish(channel)).0, libc::EINVAL);
    let error = agent
        .client
        .request(Request::Remove {
            path: b"/no/such".to_vec(),
            recursive: true,
        })
        .unwrap_err();
    assert_eq!(
        (error.errno, error.message.as_str()),
        (
            libc::ENOENT,
            "cannot remove /no/such: No such file or directory"
        )
    );
}

#[test]
fn directories_are_listed_with_their_entries() {
    let mut agent = Agent::start(&[]);
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("file"), "12345").unwrap();
    symlink("file", dir.path().join("link")).unwrap();
    for i in 0..2000 {
        fs::create_dir(dir.path().join(format!("d{i}"))).unwrap();
    }
    let channel = agent.client.open(Open::ListDir {
        path: bytes(dir.path()),
    });
    let mut listing = agent.client.finish(channel).out;
    let entries: Vec<_> =
        std::iter::from_fn(|| decode_item::<DirEntry>(&mut listing).unwrap()).collect();
    assert_eq!(entries.len(), 2002);
    let of = |name: &[u8]| {
        entries
            .iter()
            .find(|entry| entry.name == name)
            .unwrap()
            .stat
            .clone()
    };
    assert_eq!((of(b"file").kind, of(b"file").size), (FileKind::File, 5));
    assert_eq!(
        (of(b"link").kind, of(b"link").target),
        (FileKind::Symlink, b"file".to_vec())
    );
    let moved = Request::Rename {
        from: bytes(&dir.path().join("file")),
        to: bytes(&dir.path().join("moved")),
    };
    assert_eq!(agent.client.request(moved), Ok(Reply::Done));
    let stat = agent.client.request(Request::Stat {
        path: bytes(&dir.path().join("moved")),
        follow: true,
    });
    assert!(matches!(stat, Ok(Reply::Stat(stat)) if stat.size == 5));
}

fn make_tree(root: &Path) {
    fs::create_dir_all(root.join("sub")).unwrap();
    fs::write(root.join("sub/plain"), "content").unwrap();
    fs::set_permissions(root.join("sub/plain"), PermissionsExt::from_mode(0o4751)).unwrap();
    fs::hard_link(root.join("sub/plain"), root.join("other")).unwrap();
    symlink("../outside", root.join("sub/link")).unwrap();
    fs::write(root.join("n".repeat(180)), "long").unwrap();
    let sparse = fs::File::create(root.join("sparse")).unwrap();
    sparse.set_len(50_000_000).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&sparse, b"island", 20_000_000).unwrap();
}

#[test]
fn trees_keep_modes_links_and_holes_in_both_directions() {
    let mut agent = Agent::start(&[]);
    let dir = tempfile::tempdir().unwrap();
    let from = dir.path().join("tree");
    let to = dir.path().join("made/here");
    make_tree(&from);
    let channel = agent.client.open(Open::TarOut { path: bytes(&from) });
    let packed = agent.client.finish(channel);
    assert_eq!(packed.outcome, Some(Outcome::Done));
    assert!(packed.out.len() < 1_000_000, "holes are not sent");
    let channel = agent.client.open(Open::TarIn { path: bytes(&to) });
    agent.client.feed(channel, &packed.out);
    assert_eq!(agent.client.finish(channel).outcome, Some(Outcome::Done));
    let made = to.join("tree");
    assert_eq!(names(&made), names(&from));
    let stat = |path: &Path| fs::symlink_metadata(path).unwrap();
    assert_eq!(
        stat(&made.join("sub/plain")).mode(),
        stat(&from.join("sub/plain")).mode()
    );
    assert_eq!(
        stat(&made.join("sub/plain")).mtime(),
        stat(&from.join("sub/plain")).mtime()
    );
    assert_eq!(
        stat(&made.join("sub")).mtime(),
        stat(&from.join("sub")).mtime()
    );
    assert_eq!(
        stat(&made.join("sub/plain")).ino(),
        stat(&made.join("other")).ino()
    );
    assert_eq!(
        fs::read_link(made.join("sub/link")).unwrap(),
        Path::new("../outside")
    );
    assert!(fs::read(made.join("sparse")).unwrap() == fs::read(from.join("sparse")).unwrap());
    assert!(
        stat(&made.join("sparse")).blocks() * 512 < 1_000_000,
        "holes stay holes"
    );
}

fn archive(entries: &[(&str, tar::EntryType, &str)]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (name, kind, content) in entries {
        let mut header = tar::Header::new_gnu();
        header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
        header.set_entry_type(*kind);
        header.set_mode(0o755);
        let own = fs::metadata("/proc/self").unwrap();
        header.set_uid(u64::from(own.uid()));
        header.set_gid(u64::from(own.gid()));
        header.set_mtime(0);
        let is_file = *kind == tar::EntryType::Regular;
        header.set_size(if is_file { content.len() as u64 } else { 0 });
        if !is_file {
            header.set_link_name_literal(content).unwrap();
        }
        header.set_cksum();
        builder
            .append(&header, if is_file { content.as_bytes() } else { b"" })
            .unwrap();
    }
    builder.into_inner().unwrap()
}

#[test]
fn a_copy_reports_what_it_leaves_out() {
    let mut agent = Agent::start(&[]);
    let dir = tempfile::tempdir().unwrap();
    let tree = dir.path().join("tree");
    fs::create_dir(&tree).unwrap();
    fs::write(tree.join("file"), "content").unwrap();
    let socket = tree.join("a\nsocket");
    drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
    let channel = agent.client.open(Open::TarOut { path: bytes(&tree) });
    let packed = agent.client.finish(channel);
    assert_eq!(packed.outcome, Some(Outcome::Done));
    let expected = format!("{}/a\\nsocket: a socket cannot be copied\n", tree.display());
    assert_eq!(String::from_utf8(packed.err).unwrap(), expected);

    let archive = archive(&[
        ("pax", tar::EntryType::XGlobalHeader, ""),
        ("odd", tar::EntryType::new(b'V'), ""),
    ]);
    let to = dir.path().join("to");
    let channel = agent.client.open(Open::TarIn { path: bytes(&to) });
    agent.client.feed(channel, &archive);
    let unpacked = agent.client.finish(channel);
    assert_eq!(unpacked.outcome, Some(Outcome::Done));
    let expected = format!(
        "{}/odd: an entry of type 'V' cannot be unpacked\n",
        to.display()
    );
    assert_eq!(String::from_utf8(unpacked.err).unwrap(), expected);
}

#[test]
fn a_copy_does_not_wait_for_a_host_that_ignores_its_report() {
    let mut agent = Agent::start(&[]);
    let dir = tempfile::tempdir().unwrap();
    for number in 0..1200 {
        drop(
            std::os::unix::net::UnixListener::bind(dir.path().join(format!("s{number}"))).unwrap(),
        );
    }
    let channel = agent.client.open_with(
        3000,
        Open::TarOut {
            path: bytes(dir.path()),
        },
    );
    agent.client.channels.get_mut(&channel).unwrap().stalled = true;
    agent
        .client
        .until("end", |client| client.channels[&channel].outcome.is_some());
    let seen = agent.client.finish(channel);
    assert_eq!(seen.outcome, Some(Outcome::Done));
    let err = String::from_utf8(seen.err).unwrap();
    assert!(
        err.lines()
            .last()
            .is_some_and(|line| line.ends_with(" more")),
        "{err}"
    );
}

#[test]
fn an_archive_cannot_write_outside() {
    use tar::EntryType::{Link, Regular, Symlink};
    let mut agent = Agent::start(&[]);
    let dir = tempfile::tempdir().unwrap();
    let outside = dir.path().join("outside");
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("secret"), "secret").unwrap();
    let target = outside.to_str().unwrap();
    let attacks = [
        archive(&[("../outside/evil", Regular, "x")]),
        archive(&[("link", Symlink, target), ("link/evil", Regular, "x")]),
        archive(&[("link", Symlink, "../outside"), ("link/evil", Regular, "x")]),
        archive(&[
            ("link", Symlink, &format!("{target}/evil")),
            ("link", Regular, "x"),
        ]),
        archive(&[
            ("hard", Link, &format!("{target}/secret")),
            ("hard", Regular, "x"),
        ]),
        archive(&[(&format!("{target}/evil")[..], Regular, "x")]),
    ];
    for (number, attack) in attacks.iter().enumerate() {
        let root = dir.path().join(format!("root{number}"));
        let channel = agent.client.open(Open::TarIn { path: bytes(&root) });
        agent.client.feed(channel, attack);
        agent.client.finish(channel);
        assert_eq!(names(&outside), ["secret"], "attack {number}");
        assert_eq!(
            fs::read(outside.join("secret")).unwrap(),
            b"secret",
            "attack {number}"
        );
    }
}

#[test]
fn a_tunnel_works_in_both_directions_and_half_closes() {
    let mut agent = Agent::start(&[]);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let server = std::thread::spawn(move || {
        let (mut socket, _) = listener.accept().unwrap();
        let mut all = Vec::new();
        socket.read_to_end(&mut all).unwrap();
        all.reverse();
        socket.write_all(&all).unwrap();
    });
    let sent: Vec<u8> = (0..2_000_000u32).map(|i| (i / 5) as u8).collect();
    let channel = agent.client.open(Open::Connect { port });
    agent.client.feed(channel, &sent);
    let seen = agent.client.finish(channel);
    server.join().unwrap();
    assert_eq!((seen.pid, seen.outcome), (Some(0), Some(Outcome::Done)));
    assert!(seen.out.iter().rev().eq(sent.iter()));
    let channel = agent.client.open(Open::Connect { port });
    assert_eq!(failure(agent.client.finish(channel)).0, libc::ECONNREFUSED);
}
