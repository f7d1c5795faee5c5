//! Looking at files: attributes, absence, links, space, and what a restored guest remembers.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

use sandtree_proto::mount::{
    Answer, Attr, DATA_MAX, FileId, Known, MountId, Node, Request, Verdict, encode_item,
};

use crate::support::{EINVAL, EIO, ENAMETOOLONG, ENOTDIR, ESTALE, MOUNT, OWNER, World, at, split};

#[test]
fn attributes_are_those_of_the_host_with_its_user_mapped() {
    let mut world = World::new();
    world.write("file", "content");
    fs::set_permissions(world.host("file"), fs::Permissions::from_mode(0o751)).unwrap();
    let attr = world.client.attr("file");
    let host = fs::metadata(world.host("file")).unwrap();
    assert_eq!(attr.mode, 0o100751);
    assert_eq!((attr.uid, attr.gid), (OWNER.uid, OWNER.gid));
    assert_eq!(attr.id.ino, host.ino());
    assert_eq!(attr.version.size, 7);
    let mtime_ns = host.mtime() * 1_000_000_000 + host.mtime_nsec();
    assert_eq!(attr.version.mtime_ns, mtime_ns);
    assert_eq!(attr.links, 1);
    assert!(attr.watched, "the directory is watched");
}

#[test]
fn the_root_is_answered_whatever_its_identity() {
    let mut world = World::new();
    let Ok(Answer::Attr(attr)) = world.client.ask(Request::Root) else {
        panic!("the root has attributes")
    };
    assert_eq!(attr.mode & 0o170000, 0o040000);
    assert!(attr.watched);
    assert_eq!(world.client.attr("").id, attr.id);
}

#[test]
fn names_are_found_or_absent() {
    let mut world = World::new();
    world.write("here", "");
    let mut lookup = |path: &str| {
        let (directory, name) = split(path);
        world.client.ask(Request::Lookup { directory, name })
    };
    assert!(matches!(lookup("here"), Ok(Answer::Attr(_))));
    assert_eq!(lookup("gone"), Ok(Answer::Absent { watched: true }));
    assert_eq!(lookup("here/below"), Err(ENOTDIR));
}

#[test]
fn names_are_any_bytes_of_at_most_255() {
    let mut world = World::new();
    let longest = vec![0xff; 255];
    let odd = b"\x01 \n\\\xc3\x28\"".to_vec();
    for name in [longest, odd] {
        use std::os::unix::ffi::OsStrExt;
        let path = world.host("").join(std::ffi::OsStr::from_bytes(&name));
        fs::write(path, "x").unwrap();
        let request = Request::Lookup {
            directory: at(""),
            name,
        };
        assert!(matches!(world.client.ask(request), Ok(Answer::Attr(_))));
    }
    let refused = [
        (vec![b'x'; 256], ENAMETOOLONG),
        (vec![b'x'; 100_000], ENAMETOOLONG),
        (b"".to_vec(), EINVAL),
        (b".".to_vec(), EINVAL),
        (b"..".to_vec(), EINVAL),
        (b"a/b".to_vec(), EINVAL),
        (b"/".to_vec(), EINVAL),
        (b"a\0b".to_vec(), EINVAL),
    ];
    for (name, errno) in refused {
        let directory = at("");
        // Names over one frame cannot be sent by an honest guest.
        if name.len() < 60_000 {
            let answer = world.client.ask(Request::Lookup { directory, name });
            assert_eq!(answer, Err(errno));
        }
    }
}

#[test]
fn trees_deeper_than_a_path_of_the_kernel_are_reached() {
    let mut world = World::new();
    let component = "d".repeat(200);
    let mut path = String::new();
    for _ in 0..60 {
        let below = format!("{path}{component}");
        world.client.make_directory(&below);
        path = below + "/";
    }
    let file = path + "file";
    assert!(file.len() > 12_000);
    world.client.make_file(&file);
    let node = world.client.node(&file);
    world.client.write(node.clone(), 0, b"deep").unwrap();
    assert_eq!(world.client.read(node, 0, 10), Ok(b"deep".to_vec()));
}

#[test]
fn another_file_at_the_same_path_is_refused() {
    let mut world = World::new();
    world.write("file", "old");
    let node = world.client.node("file");
    world.write("new", "new");
    fs::rename(world.host("new"), world.host("file")).unwrap();
    let stat = Request::Stat { node: node.clone() };
    assert_eq!(world.client.ask(stat), Err(ESTALE));
    assert_eq!(world.client.read(node.clone(), 0, 3), Err(ESTALE));
    fs::remove_file(world.host("file")).unwrap();
    assert_eq!(world.client.ask(Request::Stat { node }), Err(ESTALE));
}

#[test]
fn links_are_data() {
    let mut world = World::new();
    symlink("/etc/passwd", world.host("link")).unwrap();
    let node = world.client.node("link");
    assert_eq!(world.client.attr("link").mode & 0o170000, 0o120000);
    let (answer, data) = world.client.ask_with(Request::ReadLink { node }, &[]);
    assert_eq!((answer, data), (Ok(Answer::Done), b"/etc/passwd".to_vec()));
    let root = Request::ReadLink { node: at("") };
    assert_eq!(world.client.ask(root), Err(EINVAL));
}

#[test]
fn the_space_is_that_of_the_host() {
    let mut world = World::new();
    let Ok(Answer::Space(space)) = world.client.ask(Request::Space) else {
        panic!("the space is known")
    };
    assert!(space.blocks >= space.free && space.block_size >= 512);
    assert_eq!(space.name_max, 255);
}

#[test]
fn a_mount_that_is_not_served_fails() {
    let mut world = World::new();
    let message = sandtree_proto::mount::FromGuest::Request {
        id: 9,
        mount: MountId(77),
        replay: false,
        request: Request::Root,
    };
    world.client.send(&message, &[]);
    assert_eq!(world.client.reply(9).0, Err(EIO));
    assert_eq!(MOUNT, MountId(1));
}

fn known(path: &str, attr: &Attr) -> Known {
    Known {
        node: Node {
            id: attr.id,
            ..at(path)
        },
        version: attr.version,
    }
}

#[test]
fn a_restored_guest_learns_what_differs() {
    let mut world = World::new();
    world.write("same", "1");
    world.write("changed", "1");
    world.write("removed", "1");
    world.write("replaced", "1");
    fs::create_dir(world.host("dir")).unwrap();
    let paths = ["dir", "", "same", "changed", "removed", "replaced"];
    let all: Vec<Known> = paths
        .iter()
        .map(|path| known(path, &world.client.attr(path)))
        .collect();
    world.write("changed", "22");
    fs::remove_file(world.host("removed")).unwrap();
    world.write("new", "1");
    fs::rename(world.host("new"), world.host("replaced")).unwrap();
    let mut data = Vec::new();
    all.iter().for_each(|known| encode_item(known, &mut data));
    let (answer, _) = world.client.ask_with(Request::Revalidate, &data);
    let expected = [
        Verdict::Same,
        Verdict::Differs,
        Verdict::Same,
        Verdict::Differs,
        Verdict::Gone,
        Verdict::Gone,
    ];
    assert_eq!(answer, Ok(Answer::Verdicts(expected.to_vec())));
    let kept = Known {
        node: Node {
            kept: true,
            id: FileId { ino: 7, born_ns: 7 },
            ..at("")
        },
        version: Default::default(),
    };
    data.clear();
    encode_item(&kept, &mut data);
    let (answer, _) = world.client.ask_with(Request::Revalidate, &data);
    assert_eq!(answer, Ok(Answer::Verdicts(vec![Verdict::Gone])));
}

#[test]
fn ten_thousand_known_files_are_revalidated_at_once() {
    let mut world = World::new();
    let mut data = Vec::new();
    for number in 0..10_000 {
        let path = format!("file-{number}");
        world.write(&path, "");
        let attr = world.client.attr(&path);
        encode_item(&known(&path, &attr), &mut data);
    }
    assert!(data.len() < DATA_MAX);
    let (answer, _) = world.client.ask_with(Request::Revalidate, &data);
    assert_eq!(answer, Ok(Answer::Verdicts(vec![Verdict::Same; 10_000])));
}

#[test]
fn a_removed_root_answers_as_a_local_disk() {
    let mut world = World::new();
    world.write("file", "");
    let node = world.client.node("file");
    assert!(!world.status().is_removed);
    fs::remove_dir_all(world.host("")).unwrap();
    assert!(world.status().is_removed);
    let (directory, name) = split("file");
    assert_eq!(
        world.client.ask(Request::Lookup {
            directory: directory.clone(),
            name: name.clone()
        }),
        Ok(Answer::Absent { watched: true })
    );
    assert_eq!(world.client.ask(Request::Stat { node }), Err(ESTALE));
    let what = sandtree_proto::mount::Make::Directory { mode: 0o755 };
    let make = Request::Make {
        directory,
        name,
        what,
    };
    assert_eq!(world.client.ask(make), Err(crate::support::ENOENT));
}
