//! What other programs do is reported; what the guest does itself is not.

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;

use sandtree_mounts::{Access, Watching};
use sandtree_proto::mount::{
    Answer, Change, FileId, FromGuest, FromHost, Make, MountId, Remove, Rename, Request, Time,
};

use crate::support::{Call, MOUNT, World, at, directory, rename, split};

fn changed(directory: FileId, name: &str) -> FromHost {
    FromHost::Changed {
        mount: MOUNT,
        directory,
        name: name.into(),
    }
}

#[test]
fn a_foreign_change_is_reported_once_and_before_the_next_reply() {
    let mut world = World::new();
    world.write("file", "");
    let root = world.client.attr("").id;
    world.client.attr("file");
    // One system call, so that there is one event.
    let mut file = fs::File::options()
        .append(true)
        .open(world.host("file"))
        .unwrap();
    file.write_all(b"more").unwrap();
    assert_eq!(world.client.changes_so_far(), [changed(root, "file")]);
    assert_eq!(world.client.changes_so_far(), []);
    fs::rename(world.host("file"), world.host("moved")).unwrap();
    let mut names = world.client.changes_so_far();
    names.sort_by_key(|change| format!("{change:?}"));
    assert_eq!(names, [changed(root, "file"), changed(root, "moved")]);
    fs::set_permissions(world.host("moved"), fs::Permissions::from_mode(0o600)).unwrap();
    assert_eq!(world.client.changes_so_far(), [changed(root, "moved")]);
    fs::remove_file(world.host("moved")).unwrap();
    assert_eq!(world.client.changes_so_far(), [changed(root, "moved")]);
}

#[test]
fn a_watched_directory_reports_itself_without_a_name() {
    let mut world = World::new();
    let root = world.client.attr("").id;
    fs::set_permissions(world.host(""), fs::Permissions::from_mode(0o711)).unwrap();
    assert_eq!(world.client.changes_so_far(), [changed(root, "")]);
    let directory = world.client.make_directory("dir");
    fs::remove_dir(world.host("dir")).unwrap();
    let changes = world.client.changes_so_far();
    assert!(changes.contains(&changed(root, "dir")));
    assert!(changes.contains(&changed(directory.id, "")));
    assert_eq!(world.status().watches, 1, "its watch is gone");
}

#[test]
fn a_directory_that_is_moved_away_is_watched_no_longer() {
    let mut world = World::new();
    let directory = world.client.make_directory("dir");
    let away = world.temporary.path().join("outside/dir");
    fs::rename(world.host("dir"), &away).unwrap();
    let changes = world.client.changes_so_far();
    assert!(changes.contains(&changed(directory.id, "")));
    fs::write(away.join("secret"), "").unwrap();
    assert_eq!(world.client.changes_so_far(), []);
}

#[test]
fn own_changes_do_not_come_back() {
    let mut world = World::new();
    world.client.attr("");
    for request in own_changes() {
        let data: &[u8] = match request {
            Request::Write { .. } | Request::SetXattr { .. } => b"data",
            _ => b"",
        };
        let (answer, _) = world.client.ask_with(request.clone(), data);
        assert!(answer.is_ok(), "{request:?}: {answer:?}");
        assert_eq!(world.client.changes_so_far(), [], "{request:?}");
    }
}

fn own_changes() -> Vec<Request> {
    let make = |path: &str, what| {
        let (directory, name) = split(path);
        Request::Make {
            directory,
            name,
            what,
        }
    };
    let remove = |path: &str, what| {
        let (directory, name) = split(path);
        Request::Remove {
            directory,
            name,
            what,
            keep: true,
            file: FileId::default(),
        }
    };
    let change = |path: &str, change| Request::Change {
        node: at(path),
        change,
    };
    let file = Make::File {
        mode: 0o644,
        exclusive: true,
    };
    let everything = Change {
        mode: Some(0o700),
        size: Some(9),
        atime: Some(Time::Now),
        mtime: Some(Time::Now),
    };
    let mode = Change {
        mode: Some(0o700),
        ..Change::default()
    };
    vec![
        make("dir", Make::Directory { mode: 0o755 }),
        make("dir/below", Make::Directory { mode: 0o755 }),
        make("dir/file", file.clone()),
        make("other", file),
        make("link", Make::Symlink { target: "x".into() }),
        Request::Write {
            node: at("dir/file"),
            offset: 0,
            append: true,
        },
        change("dir/file", everything),
        change("dir", mode),
        change("", mode),
        Request::SetXattr {
            node: at("dir/file"),
            name: "user.x".into(),
            flags: 0,
        },
        Request::RemoveXattr {
            node: at("dir/file"),
            name: "user.x".into(),
        },
        Request::Allocate {
            node: at("dir/file"),
            mode: 0,
            offset: 0,
            length: 5000,
        },
        Request::Copy {
            from: at("dir/file"),
            offset: 0,
            to: at("other"),
            to_offset: 0,
            length: 100,
        },
        Request::Link {
            node: at("other"),
            directory: at("dir"),
            name: "second".into(),
        },
        rename("dir", "moved", Rename::NoReplace),
        rename("moved/file", "other", Rename::Replace),
        rename("moved/second", "other", Rename::Exchange),
        rename("moved", "link", Rename::Exchange),
        rename("link", "moved2", Rename::Replace),
        remove("moved2/second", Remove::File),
        remove("moved2/below", Remove::Directory),
        remove("moved2", Remove::Directory),
        remove("other", Remove::File),
    ]
}

/// Another program appends before, during or after a write of the guest: the guest learns of it by
/// the version before its own write, or by a report.
#[test]
fn a_foreign_change_of_the_same_name_is_not_lost() {
    let mut world = World::new();
    world.write("file", "");
    let node = world.client.node("file");
    let mut known = world.client.attr("file").version;
    for round in 0..500 {
        let path = world.host("file");
        let append = move || {
            let mut file = fs::File::options().append(true).open(path).unwrap();
            file.write_all(b"foreign").unwrap();
        };
        let writer = std::thread::spawn(append);
        for _ in 0..round % 4 {
            std::thread::yield_now();
        }
        let answer = world.client.write(node.clone(), 0, b"own");
        let Ok(Answer::Written { attr, before, .. }) = answer else {
            panic!("{answer:?}")
        };
        writer.join().unwrap();
        let reported = world.client.changes_so_far();
        let is_noticed = before != known || !reported.is_empty();
        assert!(is_noticed, "round {round}: {attr:?}");
        let now = world.client.attr("file").version;
        assert!(attr.version == now || !reported.is_empty(), "round {round}");
        known = now;
    }
}

#[test]
fn a_mount_sees_the_changes_that_another_one_makes() {
    let mut world = World::new();
    let second = directory(MountId(2), &world.host(""), Access::ReadWrite);
    Call::new(|done| world.server.add(second, done))
        .wait()
        .unwrap();
    let root = world.client.attr("").id;
    let message = FromGuest::Request {
        id: 77,
        mount: MountId(2),
        replay: false,
        request: Request::Root,
    };
    world.client.send(&message, &[]);
    assert!(world.client.reply(77).0.is_ok());
    world.client.make_file("file");
    let expected = FromHost::Changed {
        mount: MountId(2),
        directory: root,
        name: "file".into(),
    };
    assert_eq!(world.client.changes_so_far(), [expected]);
}

#[test]
fn a_forgotten_directory_is_watched_no_longer() {
    let mut world = World::new();
    let root = world.client.attr("").id;
    assert_eq!(world.status().watches, 1);
    let forget = FromGuest::Forget {
        mount: MOUNT,
        files: vec![root],
    };
    world.client.send(&forget, &[]);
    world.client.changes_so_far();
    assert_eq!(world.status().watches, 0);
    world.write("file", "");
    assert_eq!(world.client.changes_so_far(), []);
}

#[test]
fn more_changes_than_fit_doubt_everything() {
    let mut world = World::new();
    world.client.attr("");
    Call::new(|done| world.server.park(done)).wait().unwrap();
    for number in 0..5000 {
        world.write(&format!("file-{number}"), "");
    }
    world.server.go();
    let changes = world.client.changes_so_far();
    assert_eq!(changes, [FromHost::ChangedAll { mount: MOUNT }]);
}

#[test]
fn watches_are_bounded() {
    let mut world = World::in_memory();
    for number in 0..16_500 {
        fs::create_dir(world.host(&format!("dir-{number}"))).unwrap();
    }
    let mut watched = Vec::new();
    for number in 0..16_500 {
        let attr = world.client.attr(&format!("dir-{number}"));
        watched.extend(attr.watched.then_some(attr.id));
    }
    let status = world.status();
    assert!(watched.len() <= 16_400 && status.watches <= 16_384);
    assert_eq!(status.watching, Watching::Limited { most: 16_384 });
    let forget = FromGuest::Forget {
        mount: MOUNT,
        files: watched[..200].to_vec(),
    };
    world.client.send(&forget, &[]);
    assert!(world.client.attr("dir-16499").watched);
    assert_eq!(world.status().watching, Watching::Full);
}
