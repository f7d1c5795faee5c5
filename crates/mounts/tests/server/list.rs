//! Listing directories.

use std::collections::BTreeSet;
use std::fs;

use sandtree_proto::mount::{Answer, Entry, Node, Request, decode_items};

use crate::support::{Client, EINVAL, ENOTDIR, World, at};

/// One piece of a listing, and whether it is the last.
fn piece(client: &mut Client, node: &Node, cookie: u64, max_bytes: u32) -> (Vec<Entry>, bool) {
    let request = Request::List {
        directory: node.clone(),
        cookie,
        max_bytes,
        attributes: true,
    };
    let (answer, data) = client.ask_with(request, &[]);
    let Ok(Answer::Entries { watched, end }) = answer else {
        panic!("{answer:?}")
    };
    assert!(watched);
    assert!(data.len() <= max_bytes as usize);
    (decode_items(&data).expect("entries"), end)
}

fn name(entry: &Entry) -> String {
    String::from_utf8(entry.name.clone()).expect("names of the test")
}

#[test]
fn entries_have_names_kinds_and_attributes() {
    let mut world = World::new();
    world.write("file", "abc");
    fs::create_dir(world.host("dir")).unwrap();
    std::os::unix::fs::symlink("x", world.host("link")).unwrap();
    let root = world.client.node("");
    let (entries, end) = piece(&mut world.client, &root, 0, 1 << 20);
    assert!(end);
    let mut names: Vec<String> = entries.iter().map(name).collect();
    names.sort();
    assert_eq!(names, [".", "..", "dir", "file", "link"]);
    for entry in &entries {
        let is_dot = entry.name.starts_with(b".");
        assert_eq!(entry.attr.is_none(), is_dot);
        if is_dot {
            assert_eq!(entry.ino, root.id.ino, "nothing outside is named");
        }
        if let Some(attr) = entry.attr {
            assert_eq!(attr.id.ino, entry.ino);
            assert_eq!(attr.mode >> 12, u32::from(entry.kind));
            assert!(attr.watched);
        }
    }
    world.write("dir/new", "");
    let found = world.client.next_change();
    assert!(format!("{found:?}").contains("Changed"), "{found:?}");
}

#[test]
fn what_cannot_be_listed_is_refused() {
    let mut world = World::new();
    world.write("file", "");
    let list = |path: &str, cookie, max_bytes| Request::List {
        directory: at(path),
        cookie,
        max_bytes,
        attributes: false,
    };
    assert_eq!(world.client.ask(list("file", 0, 4096)), Err(ENOTDIR));
    assert_eq!(world.client.ask(list("", 0, 3)), Err(EINVAL));
    assert_eq!(world.client.ask(list("", u64::MAX, 4096)), Err(EINVAL));
}

#[test]
fn a_hundred_thousand_entries_are_listed_while_some_are_removed() {
    list_while_removing(World::in_memory(), 100_000);
}

/// The file system of a disk numbers its entries in another way.
#[test]
fn entries_on_a_disk_are_listed_while_some_are_removed() {
    list_while_removing(World::new(), 5_000);
}

fn list_while_removing(mut world: World, count: usize) {
    for number in 0..count {
        fs::File::create(world.host(&format!("file-{number}"))).unwrap();
    }
    let root = world.client.node("");
    let mut seen = BTreeSet::new();
    let mut removed = BTreeSet::new();
    let mut cookie = 0;
    loop {
        let (entries, end) = piece(&mut world.client, &root, cookie, 64 * 1024);
        for entry in &entries {
            assert!(seen.insert(name(entry)), "listed twice: {}", name(entry));
        }
        // As `rm -r` does: what was listed goes while the listing continues.
        for entry in entries.iter().filter(|entry| entry.attr.is_some()).take(50) {
            fs::remove_file(world.host(&name(entry))).unwrap();
            removed.insert(name(entry));
        }
        world.client.news.clear();
        if end {
            break;
        }
        cookie = entries.last().expect("progress").cookie;
    }
    assert_eq!(seen.len(), count + 2);
    assert!(removed.len() >= count / 100);
}
