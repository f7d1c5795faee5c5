//! The content of files: reads, writes, times, sizes, holes, copies.

use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;

use rustix::thread::{CapabilitySet, CapabilitySets};
use sandtree_mounts::{Access, Server};
use sandtree_proto::mount::{Answer, Change, DATA_MAX, Make, Node, Request, Seek, Time, Version};

use crate::support::{
    Client, EINVAL, EIO, EISDIR, ENXIO, EOPNOTSUPP, MOUNT, NONCE, World, at, directory,
};

fn written(answer: Result<Answer, i32>) -> (u32, Version, Version) {
    match answer {
        Ok(Answer::Written {
            bytes,
            before,
            attr,
        }) => (bytes, before, attr.version),
        other => panic!("{other:?}"),
    }
}

fn append(node: Node) -> Request {
    Request::Write {
        node,
        offset: 0,
        append: true,
    }
}

#[test]
fn what_is_written_is_on_the_host_and_reported_with_the_version_before() {
    let mut world = World::new();
    world.write("file", "0123456789");
    let node = world.client.node("file");
    let known = world.client.attr("file").version;
    let (bytes, before, after) = written(world.client.write(node.clone(), 5, b"abcdefgh"));
    assert_eq!((bytes, before, after.size), (8, known, 13));
    assert_eq!(world.read("file"), b"01234abcdefgh");
    assert_eq!(world.client.read(node.clone(), 4, 3), Ok(b"4ab".to_vec()));
    assert_eq!(world.client.read(node.clone(), 10, 99), Ok(b"fgh".to_vec()));
    assert_eq!(world.client.read(node.clone(), 99, 9), Ok(Vec::new()));
    assert_eq!(world.client.read(node.clone(), u64::MAX, 9), Ok(Vec::new()));
    let far = world.client.write(node.clone(), u64::MAX, b"x");
    assert_eq!(far, Err(EINVAL));
    assert_eq!(world.client.read(at(""), 0, 9), Err(EISDIR));
    let length = DATA_MAX as u32 + 1;
    assert_eq!(world.client.read(node, 0, length), Err(EINVAL));
}

#[test]
fn one_packet_carries_a_mebibyte() {
    let mut world = World::new();
    world.client.make_file("file");
    let node = world.client.node("file");
    let data: Vec<u8> = (0..DATA_MAX).map(|i| (i * 7 / 5) as u8).collect();
    let (bytes, ..) = written(world.client.write(node.clone(), 0, &data));
    assert_eq!(bytes as usize, DATA_MAX);
    let read = world.client.read(node, 0, DATA_MAX as u32).unwrap();
    assert!(read == data && world.read("file") == data);
    let status = world.status();
    assert_eq!(status.bytes_written, DATA_MAX as u64);
    assert_eq!(status.bytes_read, DATA_MAX as u64);
}

#[test]
fn appends_find_the_end_wherever_it_is() {
    let mut world = World::new();
    world.write("log", "one\n");
    let node = world.client.node("log");
    world.write("log", "one\ntwo\n");
    let (_, _, after) = written(world.client.ask_with(append(node), b"three\n").0);
    assert_eq!(after.size, 14);
    assert_eq!(world.read("log"), b"one\ntwo\nthree\n");
}

/// A host may have carried out all of an append, a part of it, or nothing, when its guest was
/// captured without the answer.
#[test]
fn a_repeated_append_is_done_once() {
    let mut world = World::new();
    for (there, expected) in [
        ("one\ntwo\n", "one\ntwo\n"),
        ("one\ntw", "one\ntwo\n"),
        ("one\n", "one\ntwo\n"),
        ("one\ntwo\nmore\n", "one\ntwo\nmore\n"),
        ("one\nmore\n", "one\nmore\ntwo\n"),
        ("one\nmore\ntwo\n", "one\nmore\ntwo\n"),
        // What the guest knew before is not its append.
        ("two\n", "two\ntwo\n"),
        ("two\n\n", "two\n\ntwo\n"),
        ("o\ntwo\n", "o\ntwo\ntwo\n"),
        ("on", "ontwo\n"),
    ] {
        world.write("log", there);
        let request = Request::Write {
            node: at("log"),
            offset: 4,
            append: true,
        };
        let (bytes, _, after) = written(world.client.again_with(request, b"two\n"));
        assert_eq!(world.read("log"), expected.as_bytes(), "{there:?}");
        assert_eq!((bytes, after.size), (4, expected.len() as u64));
    }
    // The same bytes twice are wanted, unless the request is repeated.
    world.write("log", "two\n");
    written(world.client.ask_with(append(at("log")), b"two\n").0);
    assert_eq!(world.read("log"), b"two\ntwo\n");
    let collapse = Request::Allocate {
        node: at("log"),
        mode: 8,
        offset: 0,
        length: 4096,
    };
    assert_eq!(world.client.again(collapse), Err(EIO), "in doubt");
}

#[test]
fn files_over_four_gibibytes_are_sparse() {
    let mut world = World::new();
    world.client.make_file("big");
    let node = world.client.node("big");
    let far = 5 << 30;
    let (_, _, after) = written(world.client.write(node.clone(), far, b"end"));
    assert_eq!(after.size, far + 3);
    assert_eq!(world.client.read(node.clone(), far, 9), Ok(b"end".to_vec()));
    assert_eq!(world.client.read(node.clone(), 1 << 32, 2), Ok(vec![0; 2]));
    assert!(fs::metadata(world.host("big")).unwrap().blocks() < 100);
    let mut seek = |offset, what| {
        let node = node.clone();
        world.client.ask(Request::Seek { node, offset, what })
    };
    let data = seek(0, Seek::Data);
    assert!(matches!(data, Ok(Answer::Position { offset }) if offset <= far && offset > 1 << 32));
    let hole = seek(0, Seek::Hole);
    assert_eq!(hole, Ok(Answer::Position { offset: 0 }));
    assert_eq!(seek(far + 3, Seek::Data), Err(ENXIO));
}

#[test]
fn size_mode_and_times_change() {
    let mut world = World::new();
    world.write("file", "0123456789");
    let node = world.client.node("file");
    let known = world.client.attr("file").version;
    let change = Change {
        mode: Some(0o4640),
        size: Some(4),
        atime: Some(Time::At { unix_ns: -1 }),
        mtime: Some(Time::At {
            unix_ns: 1_234_567_890_123_456_789,
        }),
    };
    let answer = world.client.ask(Request::Change {
        node: node.clone(),
        change,
    });
    let Ok(Answer::Changed { before, attr }) = answer else {
        panic!("{answer:?}")
    };
    assert_eq!(before, known);
    assert_eq!(attr.mode, 0o100640, "setuid does not reach the host");
    assert_eq!(attr.version.size, 4);
    assert_eq!(attr.atime_ns, -1);
    assert_eq!(attr.version.mtime_ns, 1_234_567_890_123_456_789);
    let now = Change {
        mtime: Some(Time::Now),
        ..Change::default()
    };
    let answer = world.client.ask(Request::Change { node, change: now });
    let Ok(Answer::Changed { attr, .. }) = answer else {
        panic!("{answer:?}")
    };
    assert_eq!(attr.atime_ns, -1, "what is not named stays");
    assert!(attr.version.mtime_ns > 1_500_000_000_000_000_000);
    assert_eq!(world.read("file"), b"0123");
    let size = Change {
        size: Some(0),
        ..Change::default()
    };
    let answer = world.client.ask(Request::Change {
        node: at(""),
        change: size,
    });
    assert_eq!(answer, Err(EISDIR));
}

#[test]
fn space_is_allocated_and_punched() {
    let mut world = World::new();
    world.client.make_file("file");
    let node = world.client.node("file");
    let allocate = |mode, offset, length| Request::Allocate {
        node: node.clone(),
        mode,
        offset,
        length,
    };
    let answer = world.client.ask(allocate(0, 0, 1 << 20));
    assert!(matches!(answer, Ok(Answer::Changed { attr, .. }) if attr.version.size == 1 << 20));
    world.client.write(node.clone(), 0, &[1; 8192]).unwrap();
    world.client.ask(allocate(1 | 2, 0, 4096)).unwrap();
    let start = world.client.read(node.clone(), 4095, 2);
    assert_eq!(start, Ok(vec![0, 1]));
    assert_eq!(world.client.ask(allocate(4, 0, 1)), Err(EOPNOTSUPP));
    assert_eq!(world.client.ask(allocate(0, 0, 0)), Err(EINVAL));
}

#[test]
fn the_host_copies_between_files() {
    let mut world = World::new();
    fs::write(world.host("from"), vec![7; 20 << 20]).unwrap();
    world.write("to", "head");
    let copy = Request::Copy {
        from: world.client.node("from"),
        offset: 1,
        to: world.client.node("to"),
        to_offset: 4,
        length: u64::MAX,
    };
    let (bytes, before, after) = written(world.client.ask(copy));
    assert!(bytes > 0 && bytes <= 16 << 20);
    assert_eq!((before.size, after.size), (4, 4 + u64::from(bytes)));
    let mut start = [0; 6];
    let to = fs::File::open(world.host("to")).unwrap();
    to.read_exact_at(&mut start, 0).unwrap();
    assert_eq!(&start, b"head\x07\x07");
}

#[test]
fn files_and_directories_are_synced() {
    let mut world = World::new();
    world.write("file", "");
    for path in ["file", ""] {
        let node = world.client.node(path);
        let answer = world.client.ask(Request::Sync { node });
        assert_eq!(answer, Ok(Answer::Done));
    }
}

/// git writes to objects that it creates with mode 0444. The server opens each time anew, and the
/// host's user need not be root.
#[test]
fn a_file_that_was_made_without_write_permission_is_written() {
    let temporary = tempfile::tempdir().unwrap();
    let path = temporary.path().to_owned();
    let served = directory(MOUNT, &path, Access::ReadWrite);
    let (port, stream) = UnixStream::pair().unwrap();
    let start = move || {
        drop_override();
        Server::start(port, NONCE, vec![served]).expect("the server starts")
    };
    let server = std::thread::spawn(start).join().unwrap();
    let mut client = Client::connect(stream, NONCE);
    let what = Make::File {
        mode: 0o444,
        exclusive: true,
    };
    client.make("object", what).unwrap();
    let node = client.node("object");
    written(client.write(node.clone(), 0, b"blob"));
    assert_eq!(fs::read(path.join("object")).unwrap(), b"blob");
    let mode = fs::metadata(path.join("object")).unwrap().permissions();
    assert_eq!(mode.mode(), 0o100444);
    let change = Change {
        mode: Some(0),
        ..Change::default()
    };
    client
        .ask(Request::Change {
            node: node.clone(),
            change,
        })
        .unwrap();
    assert_eq!(client.changes_so_far(), [], "own changes do not come back");
    assert_eq!(client.read(node, 0, 9), Ok(b"blob".to_vec()));
    drop(server);
}

/// Makes root's thread, and those that it starts, obey permissions.
fn drop_override() {
    let none = CapabilitySets {
        effective: CapabilitySet::empty(),
        permitted: CapabilitySet::empty(),
        inheritable: CapabilitySet::empty(),
    };
    rustix::thread::set_capabilities(None, none).expect("capabilities can be given away");
}

#[test]
fn special_files_are_neither_opened_nor_waited_for() {
    let mut world = World::new();
    let fifo = world.host("fifo");
    let kind = rustix::fs::FileType::Fifo;
    let mode = rustix::fs::Mode::from_raw_mode(0o666);
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, kind, mode, 0).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(world.host("socket")).unwrap();
    for path in ["fifo", "socket"] {
        let node = world.client.node(path);
        assert_eq!(world.client.read(node.clone(), 0, 9), Err(ENXIO));
        assert_eq!(world.client.write(node.clone(), 0, b"x"), Err(ENXIO));
        assert_eq!(world.client.ask(Request::Sync { node }), Err(ENXIO));
        let what = Make::File {
            mode: 0o644,
            exclusive: false,
        };
        assert!(world.client.make(path, what).is_ok(), "looked at only");
    }
}
