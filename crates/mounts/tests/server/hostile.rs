//! A guest that wants out.

use std::fs;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::fs::symlink;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use sandtree_mounts::Guest;
use sandtree_proto::frame::Frame;
use sandtree_proto::mount::{
    Answer, Change, FileId, FromGuest, Make, Node, PATH_MAX, Remove, Rename, Request, Time, encode,
};

use crate::support::{
    DEADLINE, EINVAL, ENAMETOOLONG, ENOENT, ESTALE, EXDEV, MOUNT, World, at, kept, rename,
};

/// Requests of every kind that name a file by its path.
fn requests(path: &[u8]) -> Vec<(Request, &'static [u8])> {
    let node = Node {
        path: path.to_vec(),
        ..at("")
    };
    let n = || node.clone();
    let file = Make::File {
        mode: 0o777,
        exclusive: false,
    };
    let change = Change {
        mode: Some(0o777),
        size: Some(0),
        atime: Some(Time::Now),
        mtime: Some(Time::Now),
    };
    vec![
        (Request::Stat { node: n() }, b""),
        (Request::Change { node: n(), change }, b""),
        (Request::ReadLink { node: n() }, b""),
        (
            Request::Read {
                node: n(),
                offset: 0,
                length: 4096,
            },
            b"",
        ),
        (
            Request::Write {
                node: n(),
                offset: 0,
                append: false,
            },
            b"hacked",
        ),
        (Request::Sync { node: n() }, b""),
        (
            Request::Lookup {
                directory: n(),
                name: "canary".into(),
            },
            b"",
        ),
        (
            Request::Make {
                directory: n(),
                name: "hacked".into(),
                what: file,
            },
            b"",
        ),
        (
            Request::Remove {
                directory: n(),
                name: "canary".into(),
                what: Remove::File,
                keep: true,
                file: FileId::default(),
            },
            b"",
        ),
        (
            Request::Rename {
                from: n(),
                name: "canary".into(),
                to: at(""),
                new_name: "stolen".into(),
                how: Rename::Replace,
                keep: true,
                file: FileId::default(),
            },
            b"",
        ),
        (
            Request::Link {
                node: n(),
                directory: at(""),
                name: "linked".into(),
            },
            b"",
        ),
        (
            Request::List {
                directory: n(),
                cookie: 0,
                max_bytes: 65536,
                attributes: true,
            },
            b"",
        ),
        (
            Request::SetXattr {
                node: n(),
                name: "user.hacked".into(),
                flags: 0,
            },
            b"x",
        ),
    ]
}

#[test]
fn no_path_leads_out() {
    let mut world = World::new();
    let outside = world.temporary.path().join("outside");
    fs::create_dir(world.host("dir")).unwrap();
    symlink(&outside, world.host("absolute")).unwrap();
    symlink("../outside", world.host("relative")).unwrap();
    symlink("../../outside", world.host("dir/up")).unwrap();
    symlink("/proc/self/root", world.host("magic")).unwrap();
    symlink(outside.join("canary"), world.host("canary-link")).unwrap();
    let absolute = outside.to_str().unwrap();
    let paths = [
        "../outside",
        "../outside/canary",
        "dir/../../outside/canary",
        "dir/../canary-link",
        "./dir",
        "dir/.",
        "dir//up",
        "dir/",
        "/",
        "/etc/passwd",
        "absolute/canary",
        "relative/canary",
        "dir/up/canary",
        "magic/etc/passwd",
        absolute,
        &format!("{absolute}/canary"),
        "/proc/self/cwd",
        "/proc/self/fd/0",
    ];
    for path in paths {
        for (request, data) in requests(path.as_bytes()) {
            let (answer, _) = world.client.ask_with(request.clone(), data);
            let errno = answer.expect_err(path);
            let usual = [EINVAL, ENOENT, 20, 40, EXDEV];
            assert!(usual.contains(&errno), "{path}: {request:?}: {errno}");
        }
    }
    // The links themselves are files of the mount; their targets are not.
    for path in ["absolute", "relative", "canary-link", "dir/up", "magic"] {
        for (request, data) in requests(path.as_bytes()) {
            let is_about_link = matches!(
                request,
                Request::Stat { .. } | Request::ReadLink { .. } | Request::Link { .. }
            );
            let (answer, _) = world.client.ask_with(request.clone(), data);
            assert!(is_about_link || answer.is_err(), "{path}: {request:?}");
        }
    }
    world.assert_outside_is_untouched();
    assert_eq!(world.status().kept, 0);
}

#[test]
fn senseless_paths_are_refused() {
    let mut world = World::new();
    let mut stat = |path: Vec<u8>| {
        let node = Node { path, ..at("") };
        world.client.ask(Request::Stat { node })
    };
    assert_eq!(stat(b"a\0b".to_vec()), Err(EINVAL));
    assert_eq!(stat(vec![b'a'; 5000]), Err(ENAMETOOLONG));
    assert_eq!(stat(vec![b'a'; PATH_MAX + 1]), Err(ENAMETOOLONG));
    let deep = b"a/".repeat(20_000);
    assert_eq!(stat(deep[..deep.len() - 1].to_vec()), Err(ENOENT));
}

#[test]
fn forged_identities_are_stale() {
    let mut world = World::new();
    world.write("file", "content");
    let real = world.client.node("file");
    let forged = [
        FileId {
            ino: real.id.ino + 1,
            ..real.id
        },
        FileId {
            born_ns: real.id.born_ns + 1,
            ..real.id
        },
    ];
    for id in forged {
        let node = Node { id, ..real.clone() };
        assert_eq!(world.client.read(node, 0, 9), Err(ESTALE));
        assert_eq!(world.client.read(kept(id), 0, 9), Err(ESTALE));
    }
    assert_eq!(world.client.read(kept(real.id), 0, 9), Err(ESTALE));
    let canary = world.temporary.path().join("outside/canary");
    let ino = std::os::unix::fs::MetadataExt::ino(&fs::metadata(canary).unwrap());
    let id = FileId { ino, born_ns: 0 };
    assert_eq!(world.client.read(kept(id), 0, 9), Err(ESTALE));
}

/// Needs root: a file system is mounted inside of the directory.
#[test]
fn mount_points_are_refused() {
    let mut world = World::new();
    fs::create_dir(world.host("mnt")).unwrap();
    let target = world.host("mnt");
    let source = world.temporary.path().join("outside");
    let mounted = std::process::Command::new("mount")
        .arg("--bind")
        .args([&source, &target])
        .status();
    if !mounted.is_ok_and(|status| status.success()) {
        println!("not checked: this test cannot mount");
        return;
    }
    let _unmount = Unmount(target);
    for path in ["mnt", "mnt/canary"] {
        for (request, data) in requests(path.as_bytes()) {
            let (answer, _) = world.client.ask_with(request.clone(), data);
            assert_eq!(answer, Err(EXDEV), "{path}: {request:?}");
        }
    }
    let lookup = Request::Lookup {
        directory: at(""),
        name: "mnt".into(),
    };
    assert_eq!(world.client.ask(lookup), Err(EXDEV));
    world.assert_outside_is_untouched();
}

struct Unmount(std::path::PathBuf);

impl Drop for Unmount {
    fn drop(&mut self) {
        let unmounted = std::process::Command::new("umount").arg(&self.0).status();
        assert!(unmounted.is_ok_and(|status| status.success()));
    }
}

/// Somebody swaps a directory for a link to the outside, again and again, while the guest tries
/// every request through it.
#[test]
fn a_swap_of_directory_and_link_never_leads_out() {
    let mut world = World::new();
    fs::create_dir(world.host("dir")).unwrap();
    let inside = std::fs::File::open(world.host("dir")).unwrap().into();
    symlink("../outside", world.host("link")).unwrap();
    let is_over = Arc::new(AtomicBool::new(false));
    let swapper = {
        let is_over = is_over.clone();
        let dir = world.host("dir");
        let link = world.host("link");
        std::thread::spawn(move || {
            let flags = rustix::fs::RenameFlags::EXCHANGE;
            let cwd = rustix::fs::CWD;
            let mut swaps = 0u64;
            while !is_over.load(Ordering::Relaxed) {
                rustix::fs::renameat_with(cwd, &dir, cwd, &link, flags).unwrap();
                swaps += 1;
            }
            swaps
        })
    };
    let start = Instant::now();
    let mut served = 0u64;
    while start.elapsed() < Duration::from_secs(1) || served < 100 {
        assert!(start.elapsed() < DEADLINE, "{served} requests served");
        refill(&inside);
        for path in ["dir", "dir/canary"] {
            for (request, data) in requests(path.as_bytes()) {
                let (answer, data) = world.client.ask_with(request, data);
                served += u64::from(answer.is_ok());
                let is_leaked = data.windows(6).any(|window| window == b"canary");
                let is_listing = matches!(answer, Ok(Answer::Entries { .. }));
                assert!(!is_leaked || is_listing);
            }
        }
        world.client.news.clear();
        for name in ["stolen", "linked", "hacked"] {
            // It may not be there.
            drop(fs::remove_file(world.host(name)));
        }
        world.assert_outside_is_untouched();
    }
    is_over.store(true, Ordering::Relaxed);
    let swaps = swapper.join().unwrap();
    println!("{swaps} swaps, {served} requests served");
    assert!(swaps > 100);
    world.assert_outside_is_untouched();
}

/// Makes the file inside again, wherever its directory is now.
fn refill(inside: &OwnedFd) {
    let flags = rustix::fs::OFlags::CREATE | rustix::fs::OFlags::WRONLY;
    let mode = rustix::fs::Mode::from_raw_mode(0o644);
    let file = rustix::fs::openat(inside, "canary", flags, mode).unwrap();
    rustix::io::write(file, b"inside").unwrap();
}

/// A small generator, so that a failure can be repeated.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

#[test]
fn random_packets_are_answered_or_refused() {
    let seed = 0x5eed_1234_5678_9abc;
    println!("seed {seed:#x}");
    let mut random = Random(seed);
    let mut world = World::new();
    let paths = ["", "dir", "dir/canary", "../outside/canary", "link/canary"];
    for round in 0..20_000 {
        if world.status_if(round % 500 == 0) == Some(Guest::Refused) {
            world.assert_outside_is_untouched();
            world = World::new();
        }
        let path = paths[random.next() as usize % paths.len()];
        let mut all = requests(path.as_bytes());
        let (request, data) = all.swap_remove(random.next() as usize % all.len());
        let message = FromGuest::Request {
            id: random.next(),
            mount: MOUNT,
            replay: random.next().is_multiple_of(2),
            request,
        };
        let mut packet = Vec::new();
        let mut encoded = Vec::new();
        encode(&message, data, &mut encoded).unwrap();
        packet.extend_from_slice(&encoded[24..encoded.len() - 4]);
        for _ in 0..random.next() % 4 {
            let at = random.next() as usize % packet.len();
            packet[at] = random.next() as u8;
        }
        let mut bytes = Vec::new();
        Frame::Message(packet).encode(&mut bytes);
        // A refused guest's port is closed.
        drop(world.client.stream.write_all(&bytes));
        world.client.skim();
    }
    world.assert_outside_is_untouched();
}

impl World {
    fn status_if(&self, wanted: bool) -> Option<Guest> {
        wanted.then(|| self.status().guest)
    }
}

impl crate::support::Client {
    /// Reads what has come, and answers greetings.
    fn skim(&mut self) {
        use sandtree_proto::mount::{Arrived, Assembler};
        use std::io::Read;
        self.stream.set_nonblocking(true).unwrap();
        let mut input = Assembler::default();
        loop {
            let spare = input.spare(64 * 1024);
            match self.stream.read(spare) {
                Ok(0) | Err(_) => break,
                Ok(count) => input.filled(count),
            }
            while let Some(found) = input.next() {
                if let Ok(Arrived::Preamble(nonce)) = found {
                    let mut echo = Vec::new();
                    sandtree_proto::frame::encode_preamble(&mut echo, nonce);
                    drop(self.stream.write_all(&echo));
                }
            }
        }
        self.stream.set_nonblocking(false).unwrap();
    }
}

#[test]
fn an_oversized_packet_begins_a_new_greeting() {
    let mut world = World::new();
    let mut bytes = Vec::new();
    for number in 0..18u64 {
        Frame::Data {
            channel: 0,
            stream: sandtree_proto::StreamId::In,
            offset: number << 16,
            bytes: vec![0; 1 << 16],
        }
        .encode(&mut bytes);
    }
    world.client.stream.write_all(&bytes).unwrap();
    world.client.greeting();
    assert!(world.client.ask(Request::Root).is_ok());
}

#[test]
fn renames_of_the_guest_stay_inside() {
    let mut world = World::new();
    world.client.make_directory("dir");
    symlink("../outside", world.host("link")).unwrap();
    for how in [Rename::Replace, Rename::NoReplace, Rename::Exchange] {
        let out = rename("dir", "link/dir", how);
        assert!(world.client.ask(out).is_err());
        let back = rename("link/canary", "stolen", how);
        assert!(world.client.ask(back).is_err());
    }
    world.assert_outside_is_untouched();
}
