//! A read-only mount refuses every change itself.

use std::fs;
use std::os::unix::fs::MetadataExt;

use sandtree_mounts::Access;
use sandtree_proto::mount::{Answer, Change, FileId, Make, Remove, Rename, Request, Time};

use crate::support::{EROFS, World, at, rename, split};

#[test]
fn every_changing_request_is_refused_and_every_other_one_is_not() {
    let mut world = World::with(Access::ReadOnly);
    world.write("file", "content");
    fs::create_dir(world.host("dir")).unwrap();
    let ctime = |world: &World| {
        let host = fs::metadata(world.host("file")).unwrap();
        (host.ctime(), host.ctime_nsec())
    };
    let before = ctime(&world);
    for (request, data) in changing() {
        for replay in [false, true] {
            let id = world.client.request(request.clone(), data, replay);
            assert_eq!(world.client.reply(id).0, Err(EROFS), "{request:?}");
        }
    }
    assert_eq!(world.status().last_error, None, "no trouble of the host's");
    assert_eq!(world.read("file"), b"content");
    assert_eq!(ctime(&world), before);
    assert_eq!(fs::read_dir(world.host("")).unwrap().count(), 2);
    let node = world.client.node("file");
    assert_eq!(
        world.client.read(node.clone(), 0, 9),
        Ok(b"content".to_vec())
    );
    let sync = Request::Sync { node };
    assert_eq!(world.client.ask(sync), Ok(Answer::Done));
}

fn changing() -> Vec<(Request, &'static [u8])> {
    let (directory, name) = split("new");
    let make = |what| Request::Make {
        directory: directory.clone(),
        name: name.clone(),
        what,
    };
    let file = || at("file");
    let change = |change| Request::Change {
        node: file(),
        change,
    };
    let remove = |name: &str, what| Request::Remove {
        directory: at(""),
        name: name.into(),
        what,
        keep: true,
        file: FileId::default(),
    };
    vec![
        (
            make(Make::File {
                mode: 0o644,
                exclusive: false,
            }),
            b"",
        ),
        (make(Make::Directory { mode: 0o755 }), b""),
        (make(Make::Symlink { target: "x".into() }), b""),
        (remove("file", Remove::File), b""),
        (remove("dir", Remove::Directory), b""),
        (rename("file", "new", Rename::Replace), b""),
        (rename("file", "dir", Rename::Exchange), b""),
        (
            Request::Link {
                node: file(),
                directory: at(""),
                name: "new".into(),
            },
            b"",
        ),
        (
            change(Change {
                mode: Some(0o600),
                ..Change::default()
            }),
            b"",
        ),
        (
            change(Change {
                size: Some(0),
                ..Change::default()
            }),
            b"",
        ),
        (
            change(Change {
                mtime: Some(Time::Now),
                ..Change::default()
            }),
            b"",
        ),
        (
            Request::Write {
                node: file(),
                offset: 0,
                append: false,
            },
            b"x",
        ),
        (
            Request::Allocate {
                node: file(),
                mode: 0,
                offset: 0,
                length: 100,
            },
            b"",
        ),
        (
            Request::Copy {
                from: file(),
                offset: 0,
                to: file(),
                to_offset: 50,
                length: 2,
            },
            b"",
        ),
        (
            Request::SetXattr {
                node: file(),
                name: "user.x".into(),
                flags: 0,
            },
            b"x",
        ),
        (
            Request::RemoveXattr {
                node: file(),
                name: "user.x".into(),
            },
            b"",
        ),
    ]
}
