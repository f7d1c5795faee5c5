//! Files and trees into and out of a sandbox, through `sandtree cp` and the library's `Files`.

use std::ffi::OsStr;
use std::fs;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use sandtree::{ErrorKind, FileKind, Host, HostConfig, SandboxSpec};

use crate::support::shared::Shared;
use crate::support::{self, DEADLINE, World, finish, wait};

const MIB: u64 = 1 << 20;

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// A name that is not UTF-8 and contains a newline.
fn odd_name() -> &'static OsStr {
    OsStr::from_bytes(b"new\nline\xff")
}

/// A tree with one file of each kind.
fn make_tree(root: &Path) {
    fs::create_dir_all(root.join("empty")).unwrap();
    fs::create_dir_all(root.join("deep/er")).unwrap();
    fs::write(root.join("deep/er/plain"), b"\x00\xffbytes").unwrap();
    fs::write(root.join(odd_name()), "odd").unwrap();
    fs::write(root.join("x".repeat(200)), "long").unwrap();
    fs::write(root.join("tool"), "#!/bin/sh\necho ran\n").unwrap();
    fs::set_permissions(root.join("tool"), PermissionsExt::from_mode(0o751)).unwrap();
    fs::set_permissions(root.join("empty"), PermissionsExt::from_mode(0o700)).unwrap();
    symlink("deep/er/plain", root.join("link")).unwrap();
    symlink("/nowhere/at all", root.join("dangling")).unwrap();
    let sparse = fs::File::create(root.join("sparse")).unwrap();
    sparse.set_len(64 * MIB).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&sparse, b"island", 20 * MIB).unwrap();
    if is_root() {
        std::os::unix::fs::chown(root.join("tool"), Some(1000), Some(1001)).unwrap();
        std::os::unix::fs::lchown(root.join("link"), Some(1002), Some(1003)).unwrap();
    }
}

fn assert_same_tree(copy: &Path, original: &Path) {
    let left = listing(copy);
    let right = listing(original);
    assert_eq!(left, right);
    assert_eq!(
        fs::read(copy.join("deep/er/plain")).unwrap(),
        b"\x00\xffbytes"
    );
    assert_eq!(fs::read(copy.join(odd_name())).unwrap(), b"odd");
    assert!(fs::read(copy.join("sparse")).unwrap() == fs::read(original.join("sparse")).unwrap());
    assert!(
        allocated(&copy.join("sparse")) < MIB,
        "the holes are filled"
    );
}

fn allocated(path: &Path) -> u64 {
    path.symlink_metadata().unwrap().blocks() * 512
}

/// All metadata: path, kind and mode, owner, length or target.
fn listing(root: &Path) -> Vec<(PathBuf, u32, u32, u32, PathBuf, i64)> {
    let mut found = Vec::new();
    let mut waiting = vec![root.to_owned()];
    while let Some(path) = waiting.pop() {
        let meta = path.symlink_metadata().unwrap();
        let target = fs::read_link(&path).unwrap_or_else(|_| PathBuf::from(meta.len().to_string()));
        let target = if meta.is_dir() {
            PathBuf::new()
        } else {
            target
        };
        let time = if meta.is_symlink() { 0 } else { meta.mtime() };
        found.push((
            path.strip_prefix(root).unwrap().into(),
            meta.mode(),
            meta.uid(),
            meta.gid(),
            target,
            time,
        ));
        if meta.is_dir() {
            waiting.extend(
                fs::read_dir(&path)
                    .unwrap()
                    .map(|entry| entry.unwrap().path()),
            );
        }
    }
    found.sort();
    found
}

fn scratch() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

fn cp(a: &Shared, from: impl AsRef<OsStr>, to: impl AsRef<OsStr>) {
    a.ok([OsStr::new("cp"), from.as_ref(), to.as_ref()]);
}

#[test]
fn a_tree_is_unchanged_after_a_copy_in_and_out() {
    let a = Shared::sandbox();
    let dir = scratch();
    let original = dir.path().join("original");
    make_tree(&original);
    cp(&a, &original, "a:/srv/tree");
    let tool = if is_root() {
        "751 1000 1001"
    } else {
        "751 0 0"
    };
    assert_eq!(a.said("stat -c '%a %u %g' /srv/tree/tool").trim(), tool);
    assert_eq!(a.said("/srv/tree/tool"), "ran\n");
    assert_eq!(
        a.said("readlink /srv/tree/link; readlink /srv/tree/dangling"),
        "deep/er/plain\n/nowhere/at all\n"
    );
    assert_eq!(
        a.said("cat \"/srv/tree/$(printf 'new\\nline\\377')\""),
        "odd"
    );
    assert_eq!(
        a.said("[ $(du -k /srv/tree/sparse | cut -f1) -lt 1024 ] && wc -c < /srv/tree/sparse")
            .trim(),
        "67108864"
    );
    cp(&a, "a:/srv/tree", dir.path().join("back"));
    assert_same_tree(&dir.path().join("back"), &original);
}

#[test]
fn one_file_keeps_mode_owner_and_holes_in_both_directions() {
    let a = Shared::sandbox();
    let dir = scratch();
    let original = dir.path().join("original");
    make_tree(&original);
    for name in ["tool", "sparse"] {
        cp(&a, original.join(name), format!("a:/srv/one-{name}"));
        let back = dir.path().join(name);
        cp(&a, format!("a:/srv/one-{name}"), &back);
        let facts = |path: &Path| {
            let meta = path.metadata().unwrap();
            (meta.mode(), meta.uid(), meta.gid(), meta.len())
        };
        assert_eq!(facts(&back), facts(&original.join(name)), "{name}");
        assert!(
            fs::read(&back).unwrap() == fs::read(original.join(name)).unwrap(),
            "{name}"
        );
    }
    assert!(
        a.holds("[ $(du -k /srv/one-sparse | cut -f1) -lt 1024 ]"),
        "the guest's disk holds the zeros"
    );
    assert!(
        allocated(&dir.path().join("sparse")) < MIB,
        "the host's disk holds the zeros"
    );
}

#[test]
fn a_copy_goes_into_a_directory_or_takes_the_new_name() {
    let a = Shared::sandbox();
    let dir = scratch();
    let file = dir.path().join("file");
    fs::write(&file, "one").unwrap();
    a.said("mkdir -p /srv/into");
    cp(&a, &file, "a:/srv/into");
    cp(&a, &file, "a:/srv/into/new");
    assert_eq!(a.said("cat /srv/into/file /srv/into/new"), "oneone");
    fs::write(&file, "two").unwrap();
    cp(&a, &file, "a:/srv/into/new");
    assert_eq!(a.said("cat /srv/into/new"), "two");

    cp(&a, "a:/srv/into/new", dir.path());
    assert_eq!(fs::read(dir.path().join("new")).unwrap(), b"two");
    cp(&a, "a:/srv/into", dir.path());
    cp(&a, "a:/srv/into", dir.path().join("named"));
    for copy in ["into/file", "named/file"] {
        assert_eq!(fs::read(dir.path().join(copy)).unwrap(), b"one", "{copy}");
    }
    cp(&a, dir.path().join("into"), "a:/srv/into");
    assert_eq!(a.said("cat /srv/into/into/file"), "one");

    cp(&a, "a:/srv/into/into/..", dir.path().join("above"));
    assert_eq!(
        fs::read(dir.path().join("above/into/file")).unwrap(),
        b"one"
    );
    a.said("ln -s /no/where /srv/into/dangling");
    cp(&a, "a:/srv/into/dangling", dir.path());
    assert_eq!(
        fs::read_link(dir.path().join("dangling")).unwrap(),
        Path::new("/no/where")
    );
}

#[test]
fn one_file_is_a_stream_to_and_from_a_pipe() {
    let a = Shared::sandbox();
    let answer = a.ok(["cp", "a:/etc/os-release", "-"]);
    assert_eq!(answer.out(), a.said("cat /etc/os-release"));
    let bytes: Vec<u8> = (0..=255).cycle().take(300_000).collect();
    assert_eq!(
        a.run_with_input(["cp", "-", "a:/srv/stream"], &bytes).code,
        0
    );
    assert!(
        a.ok(["cp", "a:/srv/stream", "-"]).stdout == bytes,
        "the bytes differ"
    );
}

#[test]
fn a_failed_copy_names_the_path_and_leaves_nothing() {
    let a = Shared::sandbox();
    let dir = scratch();
    let here = |name: &str| {
        dir.path()
            .join(name)
            .into_os_string()
            .into_string()
            .unwrap()
    };
    a.run(["cp", "a:/no/such", &here("x")])
        .failed_with(&["/no/such", "No such file"]);
    a.run(["cp", "a:/no/such", "-"])
        .failed_with(&["/no/such", "No such file"]);
    a.run(["cp", &here("missing"), "a:/srv"])
        .failed_with(&["missing", "No such file"]);
    a.run(["cp", "a:/etc/passwd", &here("no/dir/x")])
        .failed_with(&["no/dir", "No such file"]);
    a.run(["cp", "a:/etc/passwd", "a:/tmp/x"])
        .failed_with(&["SANDBOX:PATH"]);
    a.run(["cp", "missing:/etc/passwd", "-"])
        .failed_with(&["missing"]);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);

    // The guest's refusal arrives although the pipe stays open.
    let mut child = a.spawn(&["cp", "-", "a:/no/dir/x"]);
    child.stdin.as_mut().unwrap().write_all(b"begun").unwrap();
    let stdin = child.stdin.take();
    assert_eq!(
        wait(&mut child, DEADLINE),
        Some(125),
        "it waits for the pipe"
    );
    finish(child).failed_with(&["/no/dir/x", "No such file"]);
    drop(stdin);
}

#[test]
fn a_full_disk_in_the_guest_is_reported_and_leaves_no_partial_file() {
    let a = Shared::sandbox();
    let dir = scratch();
    a.said(
        "mkdir /srv/small; mount -t tmpfs -o size=1M tmpfs /srv/small; echo old > /srv/small/kept",
    );
    let big = dir.path().join("big");
    fs::write(&big, vec![7; 3 << 20]).unwrap();
    let big = big.to_str().unwrap();
    a.run(["cp", big, "a:/srv/small/kept"])
        .failed_with(&["/srv/small/kept", "No space left"]);
    assert_eq!(
        a.said("cat /srv/small/kept; ls -A /srv/small"),
        "old\nkept\n"
    );
    a.run_with_input(["cp", "-", "a:/srv/small/kept"], &vec![7; 3 << 20])
        .failed_with(&["No space left"]);
    assert_eq!(
        a.said("cat /srv/small/kept; ls -A /srv/small"),
        "old\nkept\n"
    );
    a.run(["cp", dir.path().to_str().unwrap(), "a:/srv/small/tree"])
        .failed_with(&["big", "No space left"]);
    a.said("umount /srv/small");
}

#[test]
fn sockets_and_devices_are_left_out_and_named() {
    let a = Shared::sandbox();
    let dir = scratch();
    let tree = dir.path().join("tree");
    fs::create_dir(&tree).unwrap();
    fs::write(tree.join("kept"), "kept").unwrap();
    drop(std::os::unix::net::UnixListener::bind(tree.join("socket")).unwrap());
    let pipe = rustix::fs::FileType::Fifo;
    let mode = rustix::fs::Mode::from_raw_mode(0o640);
    rustix::fs::mknodat(rustix::fs::CWD, tree.join("pipe"), pipe, mode, 0).unwrap();
    let answer = a.ok(["cp", tree.to_str().unwrap(), "a:/srv/special"]);
    assert!(answer.err().contains("socket"), "{answer:?}");
    assert_eq!(
        a.said("ls -A /srv/special; [ -p /srv/special/pipe ] && echo a pipe"),
        "kept\npipe\na pipe\n"
    );
    a.said(
        "mknod /srv/special/device c 1 3; chmod 6755 /srv/special/kept; chmod 1777 /srv/special",
    );
    // syslogd follows the link and listens there.
    a.said("ln -sf /srv/special/listener /dev/log; syslogd; until [ -S /srv/special/listener ]; do :; done");
    let back = dir.path().join("back");
    let answer = a.ok(["cp", "a:/srv/special", back.to_str().unwrap()]);
    for left_out in ["device", "pipe", "listener"] {
        assert!(answer.err().contains(left_out), "{left_out}: {answer:?}");
    }
    assert_eq!(fs::read_dir(&back).unwrap().count(), 1);
    assert_eq!(
        back.metadata().unwrap().mode() & 0o7777,
        0o1777,
        "the sticky bit is kept"
    );
    assert_eq!(
        back.join("kept").metadata().unwrap().mode() & 0o7777,
        0o755,
        "set-id bits are dropped"
    );
}

#[test]
fn a_tree_that_changes_during_the_copy_arrives_whole() {
    let a = Shared::sandbox();
    let dir = scratch();
    let tree = dir.path().join("tree");
    fs::create_dir(&tree).unwrap();
    fs::write(tree.join("a-log"), vec![7; 1 << 20]).unwrap();
    fs::write(tree.join("after"), "after").unwrap();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let log = fs::OpenOptions::new()
                .append(true)
                .open(tree.join("a-log"))
                .unwrap();
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                (&log).write_all(&[7; 1000]).unwrap();
                if log.metadata().unwrap().len() > 4 << 20 {
                    log.set_len(1 << 20).unwrap();
                }
            }
        });
        let copied: Vec<_> = (0..3)
            .map(|i| a.run(["cp", tree.to_str().unwrap(), &format!("a:/srv/live-{i}")]))
            .collect();
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(copied.iter().all(|answer| answer.code == 0), "{copied:?}");
    });
    assert_eq!(a.said("cat /srv/live-?/after"), "afterafterafter");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_library_lists_inspects_creates_moves_and_removes_files() {
    let world = World::new();
    let path = std::env::var_os("PATH").unwrap_or_default();
    let host = Host::open(HostConfig::new(
        world.home(),
        std::env::split_paths(&path).collect(),
    ))
    .await
    .unwrap();
    let sandbox = host.create(SandboxSpec::new("tiny")).await.unwrap();
    let files = sandbox.files().await.unwrap();

    files.make_dir("/srv/a/b", 0o750).await.unwrap();
    files
        .write("/srv/a/b/file", &mut &b"bytes"[..], Default::default())
        .await
        .unwrap();
    let odd = Path::new("/srv/a/b").join(odd_name());
    files
        .write(
            &odd,
            &mut &b""[..],
            sandtree::FileOwner {
                mode: 0o600,
                uid: 7,
                gid: 8,
            },
        )
        .await
        .unwrap();
    let stat = files.stat("/srv/a/b").await.unwrap();
    assert_eq!((stat.kind, stat.mode), (FileKind::Dir, 0o750));
    let mut entries = files.list("/srv/a/b").await.unwrap();
    entries.sort_by(|x, y| x.name.cmp(&y.name));
    let found: Vec<_> = entries
        .iter()
        .map(|e| (&e.name[..], e.stat.size, e.stat.mode, e.stat.uid))
        .collect();
    assert_eq!(
        found,
        [
            (&b"file"[..], 5, 0o644, 0),
            (odd_name().as_bytes(), 0, 0o600, 7)
        ]
    );
    files.rename("/srv/a/b/file", "/srv/a/moved").await.unwrap();
    assert_eq!(
        files.read_to_vec("/srv/a/moved", 100).await.unwrap(),
        b"bytes"
    );
    assert_eq!(
        files
            .read_to_vec("/srv/a/moved", 4)
            .await
            .unwrap_err()
            .kind(),
        ErrorKind::Exhausted
    );
    files.remove("/srv/a").await.unwrap();
    for refused in [
        files.stat("/srv/a").await.err(),
        files.list("/srv/a").await.err(),
        files.remove("/srv/a").await.err(),
        files.rename("/srv/a", "/srv/b").await.err(),
        files.read_to_vec("/srv/a", 1).await.err(),
    ] {
        let error = refused.expect("what is not there cannot be used");
        assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    }

    // Until a write is complete, readers see the old file.
    files
        .write("/srv/atomic", &mut &b"old"[..], Default::default())
        .await
        .unwrap();
    let (mut source, mut sink) = tokio::io::duplex(64);
    let writing = tokio::spawn({
        let files = files.clone();
        async move {
            files
                .write("/srv/atomic", &mut source, Default::default())
                .await
        }
    });
    tokio::io::AsyncWriteExt::write_all(&mut sink, b"new and longer")
        .await
        .unwrap();
    until_staged(&files).await;
    assert_eq!(files.read_to_vec("/srv/atomic", 100).await.unwrap(), b"old");
    drop(sink);
    writing.await.unwrap().unwrap();
    assert_eq!(
        files.read_to_vec("/srv/atomic", 100).await.unwrap(),
        b"new and longer"
    );
    assert_eq!(
        files.list("/srv").await.unwrap().len(),
        1,
        "a temporary file is left"
    );

    // An interrupted write leaves the old file and nothing else.
    let (mut source, _sink) = tokio::io::duplex(64);
    let broken = tokio::spawn({
        let files = files.clone();
        async move {
            files
                .write("/srv/atomic", &mut source, Default::default())
                .await
        }
    });
    until_staged(&files).await;
    broken.abort();
    until_count(&files, 1).await;
    assert_eq!(
        files.read_to_vec("/srv/atomic", 100).await.unwrap(),
        b"new and longer"
    );
    sandbox.remove().await.unwrap();
    drop((files, sandbox));
    assert_eq!(world.residue(), Vec::<PathBuf>::new());
}

/// Waits until the unfinished file has its temporary name.
async fn until_staged(files: &sandtree::Files) {
    until_count(files, 2).await;
}

async fn until_count(files: &sandtree::Files, count: usize) {
    let look = async {
        while files.list("/srv").await.unwrap().len() != count {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(support::DEADLINE, look)
        .await
        .expect("never as many files");
}
