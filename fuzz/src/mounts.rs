//! Requests of a hostile guest to the server of mounts, mutated: each into a server of its own, on
//! a directory with a link that leads out.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use sandtree_mounts::{Access, Directory, Owner, Server};
use sandtree_proto::frame::{Frame, MAX_PAYLOAD, Nonce, StreamId, encode_data, encode_preamble};
use sandtree_proto::mount::{
    Arrived, Assembler, Change, FileId, FromGuest, FromHost, Known, Make, MountId, Node, Remove,
    Rename, Request, Seek, Time, Version, decode, encode, encode_item,
};

const MOUNT: MountId = MountId(1);
const NONCE: Nonce = Nonce([3; 16]);
/// The request behind the mutated one.
const LAST: u64 = u64::MAX;
/// Real space that one input may allocate.
const ALLOCATED_MAX: u64 = 1 << 20;

/// Any packet is answered or refused, the server serves on, and nothing outside of the directory is
/// read or changed.
pub fn check(input: &[u8]) {
    if is_large(input) {
        return;
    }
    let temporary = tempfile::tempdir().expect("a directory can be made");
    let outside = temporary.path().join("outside");
    let shared = temporary.path().join("shared");
    prepare(&shared, &outside);
    let (port, stream) = UnixStream::pair().expect("a pair of sockets");
    let served = Directory {
        mount: MOUNT,
        root: File::open(&shared).expect("it was made").into(),
        path: shared,
        access: Access::ReadWrite,
        owner: Owner { uid: 0, gid: 0 },
    };
    let server = Server::start(port, NONCE, vec![served]).expect("a server starts");
    converse(stream, input);
    drop(server);
    let canary = fs::read(outside.join("canary")).expect("the canary lives");
    assert_eq!(canary, b"canary");
    let count = fs::read_dir(&outside).expect("it was made").count();
    assert_eq!(count, 1, "something was made outside");
}

/// Whether it would only fill the disk, which a guest may.
fn is_large(input: &[u8]) -> bool {
    let Ok((FromGuest::Request { request, .. }, _)) = decode::<FromGuest>(input) else {
        return false;
    };
    matches!(request, Request::Allocate { length, .. } if length > ALLOCATED_MAX)
}

fn prepare(shared: &Path, outside: &Path) {
    let made = || {
        fs::create_dir(outside)?;
        fs::write(outside.join("canary"), "canary")?;
        fs::create_dir_all(shared.join("dir"))?;
        fs::write(shared.join("file"), "content")?;
        fs::write(shared.join("dir/file"), "content")?;
        symlink("../outside", shared.join("link"))
    };
    made().expect("files can be made");
}

/// Sends the packet, and waits until the server has dealt with it: it answers the request behind
/// it, or greets anew.
fn converse(mut stream: UnixStream, input: &[u8]) {
    let limit = Some(Duration::from_secs(30));
    stream.set_read_timeout(limit).expect("a timeout is set");
    let mut bytes = Vec::new();
    encode_preamble(&mut bytes, NONCE);
    frames(input, &mut bytes);
    let last = request(LAST, Request::Space);
    encode(&last, &[], &mut bytes).expect("it is short");
    stream.write_all(&bytes).expect("the server reads");
    let mut heard = Assembler::default();
    let mut greetings = 0;
    loop {
        while let Some(found) = heard.next() {
            match found {
                // The zeros in front of a greeting.
                Err(_) => {}
                Ok(Arrived::Preamble(_)) => greetings += 1,
                Ok(Arrived::Packet(packet)) => {
                    let (message, data) = decode(&packet).expect("a message");
                    let is_leaked = data.windows(6).any(|piece| piece == b"canary");
                    assert!(!is_leaked, "the canary was read");
                    if matches!(message, FromHost::Reply { id: LAST, .. }) {
                        return;
                    }
                }
            }
        }
        if greetings > 1 {
            return;
        }
        let count = stream.read(heard.spare(1 << 16));
        match count.expect("the server answers") {
            0 => return,
            count => heard.filled(count),
        }
    }
}

fn frames(input: &[u8], out: &mut Vec<u8>) {
    let mut rest = input;
    while rest.len() > MAX_PAYLOAD {
        let (piece, behind) = rest.split_at(MAX_PAYLOAD);
        encode_data(out, 0, StreamId::In, 0, piece);
        rest = behind;
    }
    Frame::Message(rest.to_vec()).encode(out);
}

fn request(id: u64, request: Request) -> FromGuest {
    FromGuest::Request {
        id,
        mount: MOUNT,
        replay: false,
        request,
    }
}

fn node(path: &str) -> Node {
    Node {
        path: path.into(),
        id: FileId::default(),
        kept: false,
    }
}

/// Requests of every kind, at paths that are fine and at paths that are not.
pub fn seeds() -> Vec<Vec<u8>> {
    let paths = [
        "",
        "file",
        "dir",
        "dir/file",
        "link/canary",
        "../outside/canary",
    ];
    let mut seeds = Vec::new();
    for path in paths {
        let all = looks(path).into_iter().chain(changes(path));
        seeds.extend(all.map(|(asked, data)| packet(&request(1, asked), &data)));
    }
    let forget = FromGuest::Forget {
        mount: MOUNT,
        files: vec![FileId { ino: 1, born_ns: 1 }],
    };
    let marked = FromGuest::Marked { number: 0 };
    let others = [forget, marked, FromGuest::Ready, FromGuest::Held];
    seeds.extend(others.iter().map(|message| packet(message, &[])));
    seeds
}

fn packet(message: &FromGuest, data: &[u8]) -> Vec<u8> {
    let mut packet = Vec::new();
    encode_item(message, &mut packet);
    packet.extend_from_slice(data);
    packet
}

fn looks(path: &str) -> Vec<(Request, Vec<u8>)> {
    let n = || node(path);
    let mut known = Vec::new();
    let version = Version::default();
    encode_item(&Known { node: n(), version }, &mut known);
    let lookup = Request::Lookup {
        directory: n(),
        name: "file".into(),
    };
    let read = Request::Read {
        node: n(),
        offset: 0,
        length: 100,
    };
    let list = Request::List {
        directory: n(),
        cookie: 0,
        max_bytes: 4096,
        attributes: true,
    };
    let seek = Request::Seek {
        node: n(),
        offset: 0,
        what: Seek::Hole,
    };
    let get = Request::GetXattr {
        node: n(),
        name: "user.x".into(),
    };
    let without_data = [
        Request::Root,
        lookup,
        Request::Stat { node: n() },
        Request::ReadLink { node: n() },
        read,
        list,
        seek,
        get,
        Request::ListXattr { node: n() },
        Request::Sync { node: n() },
    ];
    let without_data = without_data.into_iter().map(|asked| (asked, Vec::new()));
    without_data.chain([(Request::Revalidate, known)]).collect()
}

fn changes(path: &str) -> Vec<(Request, Vec<u8>)> {
    let mut all = changes_of_names(path);
    let n = || node(path);
    let change = Change {
        mode: Some(0o777),
        size: Some(3),
        atime: Some(Time::Now),
        mtime: Some(Time::At { unix_ns: 5 }),
    };
    let write = Request::Write {
        node: n(),
        offset: 2,
        append: false,
    };
    let allocate = Request::Allocate {
        node: n(),
        mode: 0,
        offset: 0,
        length: 5000,
    };
    let copy = Request::Copy {
        from: node("file"),
        offset: 0,
        to: n(),
        to_offset: 3,
        length: 100,
    };
    let set = Request::SetXattr {
        node: n(),
        name: "user.x".into(),
        flags: 0,
    };
    let remove = Request::RemoveXattr {
        node: n(),
        name: "user.x".into(),
    };
    all.extend([
        (Request::Change { node: n(), change }, Vec::new()),
        (write, b"written".to_vec()),
        (allocate, Vec::new()),
        (copy, Vec::new()),
        (set, b"value".to_vec()),
        (remove, Vec::new()),
    ]);
    all
}

fn changes_of_names(path: &str) -> Vec<(Request, Vec<u8>)> {
    let n = || node(path);
    let file = Make::File {
        mode: 0o644,
        exclusive: false,
    };
    let symlink = Make::Symlink {
        target: "../outside/canary".into(),
    };
    let unnamed = Make::Unnamed { mode: 0o755 };
    let kinds = [file, Make::Directory { mode: 0o755 }, symlink, unnamed];
    let makes = kinds.map(|what| Request::Make {
        directory: n(),
        name: "new".into(),
        what,
    });
    let removes = [Remove::File, Remove::Directory].map(|what| Request::Remove {
        directory: n(),
        name: "file".into(),
        what,
        keep: true,
        file: FileId::default(),
    });
    let ways = [Rename::Replace, Rename::NoReplace, Rename::Exchange];
    let renames = ways.map(|how| Request::Rename {
        from: n(),
        name: "file".into(),
        to: node("dir"),
        new_name: "canary".into(),
        how,
        keep: true,
        file: FileId::default(),
    });
    let link = Request::Link {
        node: n(),
        directory: node("dir"),
        name: "second".into(),
    };
    let all = makes.into_iter().chain(removes).chain(renames);
    let all = all.chain([link]);
    all.map(|asked| (asked, Vec::new())).collect()
}
