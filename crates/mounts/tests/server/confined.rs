//! Mounts that come and go, and the threads that serve them.

use std::fs;
use std::io::Write;

use sandtree_mounts::{Access, Confinement, Error};
use sandtree_proto::mount::{FromGuest, MountId, Remove, Request};

use crate::support::{Call, EIO, EROFS, MOUNT, World, at, directory, kept};

fn ask(world: &mut World, mount: MountId, request: Request) -> Result<(), i32> {
    let message = FromGuest::Request {
        id: 900,
        mount,
        replay: false,
        request,
    };
    world.client.send(&message, &[]);
    world.client.reply(900).0.map(drop)
}

#[test]
fn the_thread_is_confined_where_the_kernel_can() {
    let world = World::new();
    let confinement = world.status().confinement;
    let is_known = std::path::Path::new("/proc/sys/kernel").exists();
    assert!(is_known);
    // A kernel without Landlock says so.
    match confinement {
        Confinement::Landlock { version } => assert!(version >= 1),
        Confinement::None { errno } => assert!(errno == 38 || errno == 95, "{errno}"),
    }
}

#[test]
fn mounts_are_added_and_removed_while_files_are_open() {
    let mut world = World::new();
    world.write("open", "content");
    let id = world.client.attr("open").id;
    world.client.remove("open", Remove::File, true).unwrap();
    let path = world.temporary.path().join("second");
    fs::create_dir(&path).unwrap();
    fs::write(path.join("file"), "second").unwrap();
    let second = MountId(2);
    let add = directory(second, &path, Access::ReadOnly);
    Call::new(|done| world.server.add(add, done))
        .wait()
        .unwrap();
    let read = Request::Read {
        node: at("file"),
        offset: 0,
        length: 9,
    };
    assert_eq!(ask(&mut world, second, read.clone()), Ok(()));
    let write = Request::Write {
        node: at("file"),
        offset: 0,
        append: false,
    };
    assert_eq!(ask(&mut world, second, write), Err(EROFS));
    let content = world.client.read(kept(id), 0, 9);
    assert_eq!(content, Ok(b"content".to_vec()), "kept files stay usable");
    world.client.make_file("new");

    let twice = directory(second, &path, Access::ReadOnly);
    let twice = Call::new(|done| world.server.add(twice, done)).wait();
    assert!(matches!(twice, Err(Error::Exists { mount }) if mount == second));
    Call::new(|done| world.server.remove(second, done))
        .wait()
        .unwrap();
    assert_eq!(ask(&mut world, second, read), Err(EIO));
    let gone = Call::new(|done| world.server.remove(second, done)).wait();
    assert!(matches!(gone, Err(Error::Unknown { .. })));
    assert!(ask(&mut world, MOUNT, Request::Root).is_ok());
}

#[test]
fn many_changes_of_the_mounts_follow_each_other() {
    let mut world = World::new();
    let path = world.temporary.path().join("second");
    fs::create_dir(&path).unwrap();
    let mut calls = Vec::new();
    for number in 0..20 {
        let add = directory(MountId(100 + number), &path, Access::ReadWrite);
        calls.push(Call::new(|done| world.server.add(add, done)));
    }
    calls.into_iter().for_each(|call| call.wait().unwrap());
    world.client.stream.write_all(&[0xaa; 100]).unwrap();
    world.client.greeting();
    assert_eq!(
        world.client.served.len(),
        21,
        "the next greeting lists them"
    );
    assert!(ask(&mut world, MountId(119), Request::Root).is_ok());
}

#[test]
fn the_umask_of_the_process_stays() {
    let world = World::new();
    fs::write(world.host("file"), "").unwrap();
    let mode = fs::metadata(world.host("file")).unwrap();
    use std::os::unix::fs::PermissionsExt;
    assert_eq!(mode.permissions().mode() & 0o002, 0, "0022 or stricter");
}
