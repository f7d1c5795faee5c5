//! A root file system with every kind of file survives every kind of import, as a guest sees it.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, PermissionsExt, lchown, symlink};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;

use rustix::fs::{AtFlags, CWD, FileType, Mode, Timespec, Timestamps, XattrFlags};

use super::{busybox, digest, end, files, host, text};
use crate::support::World;
use crate::support::ordinary::Ordinary;

/// `cap_dac_override=ep`, as `setcap` writes it.
const CAPABILITY: [u8; 20] = [1, 0, 0, 2, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// Prints for every file below the working directory all that the tools of both the host and the
/// guest know; a record ends with a zero byte.
const LISTING: &str = r#"find . -exec sh -c '
for path; do
    printf "%s\n" "$path"
    if [ -d "$path" ] && [ ! -L "$path" ]; then stat -c "%f %u %g %Y" -- "$path"
    else stat -c "%f %u %g %Y %s %h %t:%T" -- "$path"; fi
    if [ -L "$path" ]; then readlink -- "$path"
    elif [ -f "$path" ]; then sha256sum < "$path"; fi
    printf "\0"
done' listing {} +"#;

type Listing = BTreeSet<Vec<u8>>;

fn records(listing: &[u8]) -> Listing {
    listing
        .split(|byte| *byte == 0)
        .filter(|record| !record.is_empty())
        .map(<[u8]>::to_vec)
        .collect()
}

/// `user::rw-,user:1000:r--,group::r--,mask::r--,other::---`, as system calls expect it.
fn acl() -> Vec<u8> {
    let entry = |tag: u16, bits: u16, id: u32| {
        [
            &tag.to_le_bytes()[..],
            &bits.to_le_bytes(),
            &id.to_le_bytes(),
        ]
        .concat()
    };
    let entries = [
        (1, 6, u32::MAX),
        (2, 4, 1000),
        (4, 4, u32::MAX),
        (16, 4, u32::MAX),
        (32, 0, u32::MAX),
    ];
    let entries = entries
        .iter()
        .flat_map(|(tag, bits, id)| entry(*tag, *bits, *id));
    2u32.to_le_bytes().into_iter().chain(entries).collect()
}

fn make(path: &Path, bytes: &[u8], mode: u32) {
    fs::write(path, bytes).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

fn xattr(path: &Path, name: &str, value: &[u8]) {
    rustix::fs::lsetxattr(path, name, value, XattrFlags::empty()).unwrap();
}

/// Fills a directory with every kind of file.
fn fill(dir: &Path) {
    fs::create_dir_all(dir.join("a/b/c")).unwrap();
    fs::set_permissions(dir.join("a/b"), fs::Permissions::from_mode(0o1777)).unwrap();
    make(&dir.join("empty"), b"", 0o600);
    make(
        &dir.join("a/odd size"),
        &(0..100_001u32)
            .map(|at| (at % 251) as u8)
            .collect::<Vec<_>>(),
        0o444,
    );
    make(&dir.join("set-ids"), b"x", 0o6755);
    for linked in ["linked", "a/b/linked", "a/b/c/linked"] {
        fs::hard_link(dir.join("a/odd size"), dir.join(linked)).unwrap();
    }
    symlink("a/b", dir.join("to-dir")).unwrap();
    symlink("/nowhere/at/all", dir.join("dangling")).unwrap();
    symlink("t".repeat(3000), dir.join("long target")).unwrap();
    let node = |name: &str, kind, device| {
        rustix::fs::mknodat(
            CWD,
            dir.join(name),
            kind,
            Mode::from_raw_mode(0o660),
            device,
        )
        .unwrap();
    };
    node("fifo", FileType::Fifo, 0);
    node("null", FileType::CharacterDevice, rustix::fs::makedev(1, 3));
    node(
        "vda300",
        FileType::BlockDevice,
        rustix::fs::makedev(254, 300),
    );
    drop(UnixListener::bind(dir.join("socket")).unwrap());
    let sparse = File::create(dir.join("sparse")).unwrap();
    sparse.set_len(32 << 20).unwrap();
    for at in [0, 3 << 20, 20 << 20] {
        sparse.write_all_at(&[7; 5000], at).unwrap();
    }
    let long = [b'n'; 255];
    let names: [&[u8]; 8] = [
        b"new\nline",
        &long,
        b"\xff\xfe not text",
        b" ",
        b"-rf",
        b"a\\b",
        b"tab\t\x01\x7f",
        "\u{1f980}".as_bytes(),
    ];
    names
        .iter()
        .for_each(|name| make(&dir.join(OsStr::from_bytes(name)), name, 0o644));
    make(&dir.join("owned"), b"x", 0o400);
    lchown(dir.join("owned"), Some(4_000_000_000), Some(3_000_000)).unwrap();
    lchown(dir.join("to-dir"), Some(1000), Some(1001)).unwrap();
    set_times(dir);
}

/// Two cases that need extended attributes: `user` reads one file by an access list, and another
/// one by a program with a capability.
fn fill_with_attributes(dir: &Path, busybox: &Path) {
    fs::create_dir(dir).unwrap();
    make(&dir.join("listed"), b"by a list", 0o640);
    xattr(&dir.join("listed"), "system.posix_acl_access", &acl());
    make(&dir.join("closed"), b"by a capability", 0o600);
    make(&dir.join("cat"), &fs::read(busybox).unwrap(), 0o755);
    xattr(&dir.join("cat"), "security.capability", &CAPABILITY);
    xattr(&dir.join("closed"), "user.binary", &[0, 1, 10, 255, b'=']);
    set_times(dir);
}

/// Deepest first, because a new entry changes the time of its directory.
fn set_times(dir: &Path) {
    let listed = host(
        "find",
        [dir.as_os_str(), "-depth".as_ref(), "-print0".as_ref()],
    );
    for (number, path) in listed
        .split(|byte| *byte == 0)
        .filter(|path| !path.is_empty())
        .enumerate()
    {
        let time = Timespec {
            tv_sec: 1_500_000_000 + number as i64,
            tv_nsec: number as i64 * 99_999_989 % 1_000_000_000,
        };
        let times = Timestamps {
            last_access: time,
            last_modification: time,
        };
        rustix::fs::utimensat(
            CWD,
            Path::new(OsStr::from_bytes(path)),
            &times,
            AtFlags::SYMLINK_NOFOLLOW,
        )
        .unwrap();
    }
}

/// The root file system of these tests: busybox, and the files to check.
fn rootfs(world: &World, root: &Path) {
    busybox(world, root);
    fill(&root.join("torture"));
    fill_with_attributes(&root.join("attributes"), &root.join("bin/busybox"));
}

fn of_host(dir: &Path) -> Listing {
    let output = Command::new("sh")
        .args(["-c", LISTING])
        .current_dir(dir)
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    records(&output.stdout)
}

/// The listing without sockets, which archives cannot hold.
fn without_sockets(listing: &Listing) -> Listing {
    listing
        .iter()
        .filter(|record| !record.starts_with(b"./socket\n"))
        .cloned()
        .collect()
}

fn tar(root: &Path, options: &[&str], archive: &Path) {
    let options = options.iter().map(OsStr::new).chain([
        "--numeric-owner".as_ref(),
        "-cf".as_ref(),
        archive.as_ref(),
    ]);
    host(
        "tar",
        options.chain(["-C".as_ref(), root.as_ref(), ".".as_ref()]),
    );
}

#[track_caller]
fn imported(world: &World, path: &Path, name: &str) -> String {
    let made = world.json([
        "image".as_ref(),
        "import".as_ref(),
        path.as_os_str(),
        "--name".as_ref(),
        name.as_ref(),
    ]);
    text(&made["digest"]).to_owned()
}

/// Boots an image and compares what its guest sees.
#[track_caller]
fn seen_inside(world: &World, image: &str, expected: &Listing, attributes: bool) {
    world.ok(["run", "--cold", "-d", "--name", image, image]);
    let printed = world.ok(["exec", "-w", "/torture", image, "--", "sh", "-c", LISTING]);
    let found = records(&printed.stdout);
    let text = |records: Vec<&Vec<u8>>| {
        records
            .iter()
            .map(|record| record.escape_ascii().to_string())
            .collect::<Vec<_>>()
    };
    let missing = text(expected.difference(&found).collect());
    assert!(
        found == *expected,
        "{image}:\nmissing {missing:#?}\nfound {:#?}",
        text(found.difference(expected).collect())
    );
    if attributes {
        let read = "cd /attributes; cat listed; ./cat closed; ! cat closed 2> /dev/null";
        let read = world.ok(["exec", "-u", "user", image, "--", "sh", "-c", read]);
        assert_eq!(read.out(), "by a listby a capability", "{image}");
    }
    world.ok(["rm", "-f", image]);
}

#[test]
fn every_kind_of_file_survives_archives_and_directories() {
    let world = World::new();
    let dir = files();
    let root = dir.path().join("root");
    rootfs(&world, &root);
    let expected = of_host(&root.join("torture"));
    let archives = without_sockets(&expected);
    let pax = dir.path().join("pax.tar");
    let gnu = dir.path().join("gnu.tar.gz");
    tar(
        &root,
        &[
            "--format=posix",
            "--xattrs",
            "--xattrs-include=*",
            "--sparse",
        ],
        &pax,
    );
    tar(&root, &["--format=gnu", "--gzip"], &gnu);
    imported(&world, &root, "dir");
    seen_inside(&world, "dir", &expected, true);
    let digest = imported(&world, &pax, "pax");
    seen_inside(&world, "pax", &archives, true);
    imported(&world, &gnu, "gnu");
    seen_inside(&world, "gnu", &archives, false);
    // Without sockets, a directory gives the same image as an archive, and compression makes no
    // difference.
    fs::remove_file(root.join("torture/socket")).unwrap();
    set_times(&root.join("torture"));
    let packed = dir.path().join("packed.tar.zst");
    tar(
        &root,
        &[
            "--format=posix",
            "--xattrs",
            "--xattrs-include=*",
            "--sort=name",
            "--zstd",
        ],
        &packed,
    );
    assert_eq!(
        imported(&world, &packed, "packed"),
        imported(&world, &root, "again")
    );
    same_for_an_ordinary_user(&pax, &digest);
    end(&world, &["tiny"]);
}

fn same_for_an_ordinary_user(archive: &Path, digest: &str) {
    let user = Ordinary::new();
    let made = user.ok(&["--json", "image", "import", archive.to_str().unwrap()]);
    let made: serde_json::Value = serde_json::from_slice(&made.stdout).unwrap();
    assert_eq!(
        (text(&made["digest"]), &made["names"]),
        (digest, &serde_json::json!(["pax"]))
    );
    user.ok(&["image", "rm", "pax"]);
    user.world.assert_empty();
}

/// Two layers made by common tools: the second removes files of the first.
#[test]
fn every_kind_of_file_survives_layouts_and_docker_archives() {
    let world = World::new();
    let dir = files();
    let root = dir.path().join("root");
    rootfs(&world, &root);
    fs::remove_file(root.join("torture/socket")).unwrap();
    // The tool rounds times to seconds.
    host(
        "find",
        [
            root.as_os_str(),
            "-exec".as_ref(),
            "touch".as_ref(),
            "-hd@1500000000".as_ref(),
            "{}".as_ref(),
            "+".as_ref(),
        ],
    );
    let expected = of_host(&root.join("torture"));
    let layout = dir.path().join("layout");
    let tagged = format!("{}:app", layout.display());
    host(
        "umoci",
        ["init".as_ref(), "--layout".as_ref(), layout.as_os_str()],
    );
    host("umoci", ["new", "--image", &tagged]);
    host(
        "umoci",
        ["insert", "--image", &tagged, root.to_str().unwrap(), "/"],
    );
    host(
        "umoci",
        [
            "insert",
            "--image",
            &tagged,
            "--whiteout",
            "/etc/os-release",
        ],
    );
    let config = [
        "--config.env=WHO=layout",
        "--config.user=user",
        "--config.workingdir=/torture",
        "--config.cmd=pwd",
    ];
    host(
        "umoci",
        ["config", "--image", &tagged].iter().chain(&config),
    );
    let docker = dir.path().join("docker.tar");
    host(
        "skopeo",
        [
            "copy",
            &format!("oci:{tagged}"),
            &format!("docker-archive:{}:team/app:1", docker.display()),
        ],
    );
    let packed = dir.path().join("oci.tar");
    host(
        "skopeo",
        [
            "copy",
            &format!("oci:{tagged}"),
            &format!("oci-archive:{}:app", packed.display()),
        ],
    );
    let made = imported(&world, &layout, "layout");
    assert_eq!(made, imported(&world, &docker, "docker"));
    assert_eq!(made, imported(&world, &packed, "oci"));
    assert_eq!(world.ok(["run", "docker"]).out(), "/torture\n");
    let asked = world.ok([
        "run",
        "docker",
        "--",
        "sh",
        "-c",
        "id -un; echo $WHO; test ! -e /etc/os-release",
    ]);
    assert_eq!(asked.out(), "user\nlayout\n");
    world.ok(["run", "--cold", "-d", "--name", "seen", "layout"]);
    let found = world.ok([
        "exec", "-u", "root", "-w", "/torture", "seen", "--", "sh", "-c", LISTING,
    ]);
    world.ok(["rm", "-f", "seen"]);
    let found = records(&found.stdout);
    let differs: Vec<_> = expected
        .symmetric_difference(&found)
        .map(|record| record.escape_ascii().to_string())
        .collect();
    assert!(differs.is_empty(), "{differs:#?}");
    assert_eq!(digest(&world, "layout"), made);
    end(&world, &["tiny"]);
}
