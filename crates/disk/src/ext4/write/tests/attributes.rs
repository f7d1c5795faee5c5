//! Attributes, links and devices.

use super::MIB;
use super::image::Maker;
use crate::ext4::read;
use crate::ext4::write::{Device, Error, Kind, NodeId, Time, Tree};

#[test]
fn owners_modes_and_times_are_stored() {
    let mut maker = Maker::new();
    let file = maker.file(Tree::ROOT, "file", b"x");
    let attributes = &mut maker.node(file).attributes;
    attributes.mode = 0o6751;
    attributes.uid = 70_000;
    attributes.gid = u32::MAX - 1;
    attributes.modified = Time {
        seconds: 5_000_000_000,
        nanoseconds: 999_999_999,
    };
    let old = maker.file(Tree::ROOT, "old", b"x");
    maker.node(old).attributes.modified = Time {
        seconds: -5,
        nanoseconds: 1,
    };
    let image = maker.clean(MIB);
    let stat = image.debugfs("stat /file");
    for expected in [
        "Mode:  06751",
        "User: 70000",
        "Group:    -2",
        "mtime: 0x2a05f200:ee6b27fd",
    ] {
        assert!(stat.contains(expected), "{expected}: {stat}");
    }
    let seen = |path: &str| image.with_fs(|fs| fs.stat(&path.into())).unwrap().unwrap();
    assert_eq!(
        (seen("/file").mode, seen("/file").uid, seen("/file").gid),
        (0o6751, 70_000, u32::MAX - 1)
    );
    assert_eq!(
        (seen("/file").modified_unix_s, seen("/old").modified_unix_s),
        (5_000_000_000, -5)
    );
}

#[test]
fn nodes_of_every_kind_are_stored() {
    let mut maker = Maker::new();
    let small = Device { major: 1, minor: 3 };
    let large = Device {
        major: 259,
        minor: 70_000,
    };
    maker.add(Tree::ROOT, "null", Kind::CharDevice(small));
    maker.add(Tree::ROOT, "disk", Kind::BlockDevice(large));
    maker.add(Tree::ROOT, "fifo", Kind::Fifo);
    maker.add(Tree::ROOT, "socket", Kind::Socket);
    let file = maker.file(Tree::ROOT, "file", b"x");
    maker.link(Tree::ROOT, "hard", file);
    let image = maker.clean(MIB);
    image.with_fs(|fs| {
        let stat = |path: &str| fs.stat(&path.into()).unwrap().unwrap();
        assert_eq!(stat("/null").device, Some((1, 3)));
        assert_eq!(stat("/disk").device, Some((259, 70_000)));
        assert_eq!(stat("/fifo").kind, read::Kind::Fifo);
        assert_eq!(stat("/socket").kind, read::Kind::Socket);
        assert_eq!((stat("/hard").links, stat("/hard").size), (2, 1));
    });
}

#[test]
fn short_and_long_symlink_targets_are_stored() {
    let mut maker = Maker::new();
    let lengths = [1, 58, 59, 60, 61, 1000, 4095];
    for length in lengths {
        let link = maker.add(
            Tree::ROOT,
            length.to_string(),
            Kind::Symlink(vec![b't'; length]),
        );
        maker
            .node(link)
            .attributes
            .xattrs
            .insert(b"security.x".to_vec(), vec![b'v'; 200]);
    }
    let image = maker.clean(MIB);
    for length in lengths {
        let seen = image
            .with_fs(|fs| fs.stat(&format!("/{length}").into()))
            .unwrap()
            .unwrap();
        assert_eq!(seen.target.unwrap().as_bytes(), vec![b't'; length]);
    }
}

#[test]
fn nodes_that_ext4_cannot_store_are_refused_with_their_path() {
    let refused = |kind: Kind| {
        let mut maker = Maker::new();
        let dir = maker.dir(Tree::ROOT, "dir\n");
        maker.add(dir, "node", kind);
        maker
            .finish(0)
            .map(|image| image.made)
            .unwrap_err()
            .to_string()
    };
    for target in [vec![], vec![b't'; 4096], b"a\0b".to_vec()] {
        assert!(
            refused(Kind::Symlink(target))
                .starts_with(r"/dir\n/node is a symbolic link with an invalid target of ")
        );
    }
    let device = Device {
        major: 4096,
        minor: 0,
    };
    assert!(
        refused(Kind::CharDevice(device))
            .starts_with(r"/dir\n/node is a device with the numbers 4096:0")
    );
}

fn set(maker: &mut Maker, id: NodeId, name: &str, value: &[u8]) {
    maker
        .node(id)
        .attributes
        .xattrs
        .insert(name.into(), value.to_vec());
}

#[test]
fn extended_attributes_are_stored_in_the_inode_and_in_a_block() {
    let mut maker = Maker::new();
    let file = maker.file(Tree::ROOT, "file", b"x");
    set(&mut maker, file, "user.small", b"value");
    set(&mut maker, file, "user.empty", b"");
    set(&mut maker, file, "trusted.overlay.opaque", b"y");
    set(&mut maker, file, "user.large", &[b'l'; 3000]);
    set(
        &mut maker,
        file,
        &format!("user.{}", "n".repeat(250)),
        b"long name",
    );
    let capability = [1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    set(&mut maker, file, "security.capability", &capability);
    let dir = maker.dir(Tree::ROOT, "dir");
    set(&mut maker, dir, "user.alone", b"fits");
    let image = maker.clean(MIB);
    let listed = image.debugfs("ea_list /file");
    for expected in [
        "user.small (5) = \"value\"",
        "user.empty (0)",
        "trusted.overlay.opaque (1) = \"y\"",
        "user.large (3000)",
    ] {
        assert!(listed.contains(expected), "{expected}: {listed}");
    }
    let kept = image.path.with_extension("value");
    image.debugfs(&format!(
        "ea_get -f {} /file security.capability",
        kept.display()
    ));
    assert_eq!(std::fs::read(&kept).unwrap(), capability);
    assert!(image.debugfs("stat /file").contains("Blockcount: 16\n"));
    assert!(image.debugfs("stat /dir").contains("Blockcount: 8\n"));
    assert!(
        image
            .debugfs("ea_list /dir")
            .contains("user.alone (4) = \"fits\"")
    );
}

#[test]
fn access_control_lists_are_stored_unchanged() {
    let entry = |tag: u16, permissions: u16, id: u32| {
        [
            &tag.to_le_bytes()[..],
            &permissions.to_le_bytes(),
            &id.to_le_bytes(),
        ]
        .concat()
    };
    // Entries without a named user or group store no id, and debugfs shows 0 for it.
    let none = 0;
    let entries = [
        entry(1, 7, none),
        entry(2, 6, 1001),
        entry(4, 5, none),
        entry(8, 4, 2002),
        entry(16, 7, none),
        entry(32, 0, none),
    ];
    let list = [2u32.to_le_bytes().to_vec(), entries.concat()].concat();
    let mut maker = Maker::new();
    let dir = maker.dir(Tree::ROOT, "dir");
    set(&mut maker, dir, "system.posix_acl_access", &list);
    set(&mut maker, dir, "system.posix_acl_default", &list);
    let image = maker.clean(MIB);
    let kept = image.path.with_extension("value");
    for name in ["system.posix_acl_access", "system.posix_acl_default"] {
        image.debugfs(&format!("ea_get -f {} /dir {name}", kept.display()));
        assert_eq!(std::fs::read(&kept).unwrap(), list);
    }
}

#[test]
fn extended_attributes_that_do_not_fit_are_refused_with_their_path() {
    let refused = |name: &str, bytes| {
        let mut maker = Maker::new();
        let file = maker.file(Tree::ROOT, "file", b"x");
        set(&mut maker, file, name, &vec![0; bytes]);
        maker.finish(0).map(|image| image.made).unwrap_err()
    };
    let failed = refused("user.x", 4045);
    assert!(
        matches!(&failed, Error::XattrsTooLarge { path, bytes: 4068, .. } if path == "/file"),
        "{failed}"
    );
    for name in ["com.apple.x", "system.posix_acl_access", "user."] {
        let failed = refused(name, 10);
        assert!(
            matches!(&failed, Error::BadXattr { path, .. } if path == "/file"),
            "{failed}"
        );
    }
}
