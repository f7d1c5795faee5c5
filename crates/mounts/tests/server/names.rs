//! Making, removing, renaming and linking.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};

use sandtree_proto::mount::{Answer, FileId, FromGuest, Make, Remove, Rename, Request};

use crate::support::{
    EEXIST, EIO, EISDIR, ENOENT, ENOTDIR, ENOTEMPTY, EPERM, ESTALE, MOUNT, World, at, kept, made,
    rename, split,
};

fn file(mode: u32, exclusive: bool) -> Make {
    Make::File { mode, exclusive }
}

fn symlink(target: &str) -> Make {
    Make::Symlink {
        target: target.into(),
    }
}

/// The guest does not know a file any longer.
fn forget(world: &mut World, id: FileId) {
    let forget = FromGuest::Forget {
        mount: MOUNT,
        files: vec![id],
    };
    world.client.send(&forget, &[]);
}

#[test]
fn files_directories_and_links_are_made_with_exact_modes() {
    let mut world = World::new();
    let attr = made(world.client.make("file", file(0o6777, true)));
    assert_eq!(attr.mode, 0o100777, "neither umask nor setuid");
    let attr = made(world.client.make("dir", Make::Directory { mode: 0o1733 }));
    assert_eq!(attr.mode, 0o040733);
    let attr = made(world.client.make("link", symlink("anywhere/at all")));
    assert_eq!(attr.mode & 0o170000, 0o120000);
    let mode = |path: &str| fs::symlink_metadata(world.host(path)).unwrap().mode();
    assert_eq!(mode("file"), 0o100777);
    assert_eq!(mode("dir"), 0o040733);
    let target = fs::read_link(world.host("link")).unwrap();
    assert_eq!(target.to_str(), Some("anywhere/at all"));
}

#[test]
fn exclusive_refuses_what_exists() {
    let mut world = World::new();
    world.client.make_file("file");
    assert_eq!(world.client.make("file", file(0o644, true)), Err(EEXIST));
    let again = made(world.client.make("file", file(0o600, false)));
    assert_eq!(again.mode, 0o100644, "an existing file keeps its mode");
    let directory = Make::Directory { mode: 0o755 };
    assert_eq!(world.client.make("file", directory), Err(EEXIST));
    assert_eq!(world.client.make("file", symlink("x")), Err(EEXIST));
    assert_eq!(world.client.make("no/file", file(0o644, true)), Err(ENOENT));
    assert_eq!(world.client.make("file/x", file(0o644, true)), Err(ENOTDIR));
}

#[test]
fn a_new_directory_is_watched_from_its_beginning() {
    let mut world = World::new();
    let answer = world.client.make("dir", Make::Directory { mode: 0o755 });
    let Ok(Answer::Made {
        attr,
        watched_from_birth,
        directory,
    }) = answer
    else {
        panic!("{answer:?}")
    };
    assert!(watched_from_birth && attr.watched && directory.watched);
    world.write("dir/file", "");
    let changed = world.client.next_change();
    let expected = sandtree_proto::mount::FromHost::Changed {
        mount: MOUNT,
        directory: attr.id,
        name: b"file".to_vec(),
    };
    assert_eq!(changed, expected);
}

#[test]
fn removal_says_what_lost_its_name() {
    let mut world = World::new();
    world.write("one", "x");
    fs::hard_link(world.host("one"), world.host("two")).unwrap();
    fs::create_dir_all(world.host("full/below")).unwrap();
    let attr = world.client.attr("one");
    assert!(!attr.watched, "another name of it may be changed unseen");
    let Ok(Answer::Removed {
        lost: Some(lost), ..
    }) = world.client.remove("one", Remove::File, false)
    else {
        panic!("it is removed")
    };
    assert_eq!((lost.id, lost.links), (attr.id, 1));
    assert_eq!(world.client.attr("two").id, attr.id);
    assert_eq!(world.client.remove("one", Remove::File, false), Err(ENOENT));
    let directory = Remove::Directory;
    assert_eq!(world.client.remove("two", directory, false), Err(ENOTDIR));
    assert_eq!(
        world.client.remove("full", Remove::File, false),
        Err(EISDIR)
    );
    assert_eq!(
        world.client.remove("full", directory, false),
        Err(ENOTEMPTY)
    );
    assert!(world.client.remove("full/below", directory, false).is_ok());
    assert!(world.client.remove("full", directory, false).is_ok());
}

#[test]
fn an_unlinked_open_file_stays_usable() {
    let mut world = World::new();
    world.write("file", "content");
    let id = world.client.attr("file").id;
    world.client.remove("file", Remove::File, true).unwrap();
    assert!(!world.host("file").exists());
    assert_eq!(world.status().kept, 1);
    assert_eq!(world.client.read(kept(id), 3, 4), Ok(b"tent".to_vec()));
    let answer = world.client.write(kept(id), 0, b"CON");
    let Ok(Answer::Written { attr, .. }) = answer else {
        panic!("{answer:?}")
    };
    assert_eq!((attr.links, attr.watched), (0, false));
    assert_eq!(world.client.read(kept(id), 0, 9), Ok(b"CONtent".to_vec()));
    forget(&mut world, id);
    assert_eq!(world.client.read(kept(id), 0, 9), Err(ESTALE));
    assert_eq!(world.status().kept, 0);
}

#[test]
fn an_overwritten_open_file_stays_usable() {
    let mut world = World::new();
    world.write("old", "old");
    world.write("new", "new");
    let id = world.client.attr("old").id;
    let mut request = rename("new", "old", Rename::Replace);
    if let Request::Rename { keep, .. } = &mut request {
        *keep = true;
    }
    let answer = world.client.ask(request);
    let Ok(Answer::Renamed { other, .. }) = answer else {
        panic!("{answer:?}")
    };
    assert_eq!(other.map(|other| other.id), Some(id));
    assert_eq!(world.client.read(kept(id), 0, 9), Ok(b"old".to_vec()));
    assert_eq!(world.read("old"), b"new");
}

#[test]
fn renames_replace_refuse_or_exchange() {
    let mut world = World::new();
    fs::create_dir(world.host("dir")).unwrap();
    world.write("a", "a");
    world.write("dir/b", "b");
    let a = world.client.attr("a").id;
    let b = world.client.attr("dir/b").id;
    let refused = world.client.rename("a", "dir/b", Rename::NoReplace);
    assert_eq!(refused, Err(EEXIST));
    let answer = world.client.rename("a", "dir/b", Rename::Exchange);
    let Ok(Answer::Renamed { attr, other, .. }) = answer else {
        panic!("{answer:?}")
    };
    assert_eq!((attr.id, other.map(|other| other.id)), (a, Some(b)));
    assert_eq!(world.read("a"), b"b");
    let answer = world.client.rename("a", "dir/b", Rename::Replace);
    let Ok(Answer::Renamed { attr, other, .. }) = answer else {
        panic!("{answer:?}")
    };
    assert_eq!((attr.id, other.map(|other| other.id)), (b, Some(a)));
    assert_eq!(other.map(|other| other.links), Some(0));
    assert_eq!(world.read("dir/b"), b"b");
    let free = world.client.rename("dir/b", "c", Rename::NoReplace);
    assert!(matches!(free, Ok(Answer::Renamed { other: None, .. })));
    assert_eq!(world.client.rename("no", "c", Rename::Replace), Err(ENOENT));
    let into_itself = world.client.rename("dir", "dir/below", Rename::Replace);
    assert_eq!(into_itself, Err(crate::support::EINVAL));
}

#[test]
fn two_names_of_one_file_are_not_renamed_into_one() {
    let mut world = World::new();
    world.write("a", "");
    fs::hard_link(world.host("a"), world.host("b")).unwrap();
    let answer = world.client.rename("a", "b", Rename::Replace);
    assert!(matches!(answer, Ok(Answer::Renamed { other: None, .. })));
    assert!(world.host("a").exists());
}

#[test]
fn hard_links_share_a_file() {
    let mut world = World::new();
    let id = world.client.make_file("one").id;
    let link = |node, path| {
        let (directory, name) = split(path);
        Request::Link {
            node,
            directory,
            name,
        }
    };
    let node = world.client.node("one");
    let attr = made(world.client.ask(link(node.clone(), "two")));
    assert_eq!((attr.id, attr.links), (id, 2));
    let again = link(node.clone(), "two");
    assert_eq!(world.client.ask(again.clone()), Err(EEXIST));
    assert!(world.client.again(again).is_ok(), "its own effect");
    world.client.make_file("other");
    let other = link(node, "other");
    assert_eq!(world.client.again(other), Err(EEXIST));
    world.client.make_directory("dir");
    assert_eq!(world.client.ask(link(at("dir"), "dir2")), Err(EPERM));
}

#[test]
fn a_replay_finds_its_own_effect() {
    let mut world = World::new();
    let make = |path: &str, what| {
        let (directory, name) = split(path);
        Request::Make {
            directory,
            name,
            what,
        }
    };
    for (name, what) in [
        ("file", file(0o644, true)),
        ("dir", Make::Directory { mode: 0o755 }),
        ("link", symlink("target")),
    ] {
        let request = make(name, what);
        world.client.ask(request.clone()).unwrap();
        let again = world.client.again(request.clone());
        let Ok(Answer::Made {
            watched_from_birth, ..
        }) = again
        else {
            panic!("{again:?}")
        };
        assert!(!watched_from_birth);
        assert_eq!(world.client.ask(request), Err(EEXIST));
    }
    let other = make("dir", file(0o644, true));
    assert_eq!(world.client.again(other), Err(EEXIST), "not its own effect");
    let other = make("link", symlink("other"));
    assert_eq!(world.client.again(other), Err(EEXIST), "not its own effect");

    let moving = rename("file", "moved", Rename::Replace);
    world.client.ask(moving.clone()).unwrap();
    assert!(matches!(
        world.client.again(moving),
        Ok(Answer::Renamed { .. })
    ));
    let never = rename("no", "nowhere", Rename::Replace);
    assert_eq!(world.client.again(never), Err(ENOENT));
    let exchange = rename("moved", "link", Rename::Exchange);
    assert_eq!(world.client.again(exchange), Err(EIO), "in doubt");

    let (directory, name) = split("moved");
    let remove = Request::Remove {
        directory,
        name,
        what: Remove::File,
        keep: false,
        file: FileId::default(),
    };
    world.client.ask(remove.clone()).unwrap();
    let again = world.client.again(remove);
    assert!(matches!(again, Ok(Answer::Removed { lost: None, .. })));

    let id = made(world.client.make("", Make::Unnamed { mode: 0o644 })).id;
    let (directory, name) = split("named");
    let link = Request::Link {
        node: kept(id),
        directory,
        name,
    };
    assert_eq!(made(world.client.ask(link.clone())).id, id);
    let again = made(world.client.again(link.clone()));
    assert_eq!(again.id, id, "the server keeps it");
    // A server that never had it finds it by its new name only.
    forget(&mut world, id);
    assert_eq!(made(world.client.again(link.clone())).id, id);
    assert_eq!(world.client.ask(link.clone()), Err(ESTALE));
    fs::rename(world.host("named"), world.host("elsewhere")).unwrap();
    assert_eq!(world.client.again(link.clone()), Err(ESTALE), "not done");
    world.write("named", "another's");
    assert_eq!(world.client.again(link), Err(ESTALE), "not its own effect");
}

/// A name may have got another file since a request was done the first time.
#[test]
fn a_replay_leaves_newer_files_alone() {
    let mut world = World::new();
    let known = |mut request: Request, id: FileId| {
        if let Request::Rename { file, .. } = &mut request {
            *file = id;
        }
        request
    };
    let (directory, name) = split("file");
    let remove = Request::Remove {
        directory,
        name,
        what: Remove::File,
        keep: false,
        file: world.client.make_file("file").id,
    };
    // The file itself is removed, if the request was not done before.
    let first = world.client.again(remove.clone());
    assert!(matches!(first, Ok(Answer::Removed { lost: Some(_), .. })));
    world.write("file", "newer");
    let again = world.client.again(remove);
    assert!(matches!(again, Ok(Answer::Removed { lost: None, .. })));
    assert_eq!(world.read("file"), b"newer");

    for how in [Rename::Replace, Rename::NoReplace, Rename::Exchange] {
        world.write("a", "moved");
        if how == Rename::Exchange {
            world.write("b", "other");
        }
        let id = world.client.attr("a").id;
        let moving = known(rename("a", "b", how), id);
        let first = world.client.again(moving.clone());
        assert!(matches!(first, Ok(Answer::Renamed { .. })), "{first:?}");
        fs::write(world.host("new"), "newer").unwrap();
        fs::rename(world.host("new"), world.host("a")).unwrap();
        let again = world.client.again(moving.clone());
        assert!(matches!(again, Ok(Answer::Renamed { .. })), "{again:?}");
        assert_eq!(world.read("a"), b"newer", "{how:?}");
        assert_eq!(world.read("b"), b"moved", "{how:?}");
        fs::remove_file(world.host("b")).unwrap();
        assert_eq!(world.client.again(moving), Err(ENOENT), "{how:?}");
        fs::remove_file(world.host("a")).unwrap();
    }
}

#[test]
fn a_file_without_a_name_is_kept_and_can_get_one() {
    let mut world = World::new();
    let unnamed = || Make::Unnamed { mode: 0o6750 };
    let attr = made(world.client.make("", unnamed()));
    assert_eq!((attr.mode, attr.links), (0o100750, 0));
    assert_eq!(fs::read_dir(world.host("")).unwrap().count(), 0);
    let node = kept(attr.id);
    world.client.write(node.clone(), 0, b"content").unwrap();
    assert_eq!(world.status().kept, 1);
    let (directory, name) = split("named");
    let link = Request::Link {
        node: node.clone(),
        directory,
        name,
    };
    assert_eq!(made(world.client.ask(link)).id, attr.id);
    assert_eq!(world.read("named"), b"content");
    // A guest that has not read the answer may ask for the file as before.
    let read = world.client.read(node.clone(), 0, 9);
    assert_eq!(read, Ok(b"content".to_vec()));
    world.client.write(node, 0, b"C").unwrap();
    assert_eq!(world.read("named"), b"Content");
    assert_eq!(world.status().kept, 1);
    forget(&mut world, attr.id);
    assert_eq!(world.client.read(at("named"), 0, 1), Ok(b"C".to_vec()));
    assert_eq!(world.status().kept, 0);
    // Nothing of a forgotten one stays.
    let id = made(world.client.make("", unnamed())).id;
    forget(&mut world, id);
    assert_eq!(world.client.read(kept(id), 0, 9), Err(ESTALE));
    // As many as a guest likes.
    for _ in 0..3000 {
        made(world.client.make("", unnamed()));
    }
    assert_eq!(world.status().kept, 1024);
}

#[test]
fn kept_files_are_bounded() {
    let mut world = World::in_memory();
    let mut ids: Vec<FileId> = Vec::new();
    let before = descriptors();
    let base = world.client.node("");
    for batch in 0..200 {
        let names = (0..500).map(|number| format!("file-{batch}-{number}"));
        let asked: Vec<u64> = names
            .map(|name| {
                fs::File::create(world.host(&name)).unwrap();
                let remove = Request::Remove {
                    directory: base.clone(),
                    name: name.into_bytes(),
                    what: Remove::File,
                    keep: true,
                    file: FileId::default(),
                };
                world.client.request(remove, &[], false)
            })
            .collect();
        for id in asked {
            let (answer, _) = world.client.reply(id);
            let Ok(Answer::Removed {
                lost: Some(lost), ..
            }) = answer
            else {
                panic!("{answer:?}")
            };
            ids.push(lost.id);
        }
        world.client.news.clear();
    }
    assert_eq!(ids.len(), 100_000);
    // Other tests of this process open some, too.
    assert!(descriptors() <= before + 1024 + 500);
    assert_eq!(world.status().kept, 1024);
    assert_eq!(world.client.read(kept(ids[0]), 0, 1), Err(ESTALE));
    let last = *ids.last().unwrap();
    assert_eq!(world.client.read(kept(last), 0, 1), Ok(Vec::new()));
}

fn descriptors() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn directories_keep_setgid_and_never_get_it() {
    let mut world = World::new();
    fs::create_dir(world.host("shared")).unwrap();
    fs::create_dir(world.host("plain")).unwrap();
    let setgid = fs::Permissions::from_mode(0o2755);
    fs::set_permissions(world.host("shared"), setgid).unwrap();
    for (path, expected) in [("shared", 0o042700), ("plain", 0o040700)] {
        let change = sandtree_proto::mount::Change {
            mode: Some(0o7700),
            ..Default::default()
        };
        let node = world.client.node(path);
        let answer = world.client.ask(Request::Change { node, change });
        let Ok(Answer::Changed { attr, .. }) = answer else {
            panic!("{answer:?}")
        };
        assert_eq!(attr.mode, expected, "{path}");
    }
}
