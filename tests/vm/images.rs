//! Images through the command line: Debian, recipes, imports, and how images are listed and
//! removed.

mod debian;
mod disks;
mod hostile;
mod inits;
mod kept;
mod kernels;
mod recipes;
mod services;
mod torture;

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::support::{World, entries, say, text};

fn image(world: &World, reference: &str) -> Value {
    world.json(["image", "inspect", reference])
}

fn digest(world: &World, reference: &str) -> String {
    text(&image(world, reference)["digest"]).to_owned()
}

/// Runs a shell line in a temporary sandbox of an image, and returns its output.
#[track_caller]
fn say_in(world: &World, image: &str, line: &str) -> String {
    let answer = world.run([
        "run",
        "--cold",
        "--entrypoint",
        "",
        image,
        "--",
        "sh",
        "-c",
        line,
    ]);
    assert_eq!(answer.code, 0, "{line}: {answer:?}");
    answer.out().trim_end().to_owned()
}

/// The images of a store and their names.
fn published(world: &World) -> BTreeSet<PathBuf> {
    ["images", "names/images"]
        .iter()
        .flat_map(|dir| entries(&world.home().join(dir)))
        .collect()
}

/// A directory for files of a test, open to everyone.
fn files() -> tempfile::TempDir {
    let dir = tempfile::Builder::new()
        .prefix("st-")
        .tempdir()
        .expect("a temporary directory can be made");
    fs::set_permissions(
        dir.path(),
        std::os::unix::fs::PermissionsExt::from_mode(0o755),
    )
    .unwrap();
    dir
}

/// Runs a program of the host that must succeed, and returns its output.
#[track_caller]
fn host<S: AsRef<OsStr>>(program: &str, args: impl IntoIterator<Item = S>) -> Vec<u8> {
    // starts: the program of host(…) in tests/vm/images
    let output = Command::new(program)
        .args(args)
        .stdin(Stdio::null())
        .output();
    let output = output.unwrap_or_else(|e| panic!("{program}: {e}"));
    assert!(
        output.status.success(),
        "{program}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    output.stdout
}

/// The root file system of `tiny`, as files of the host.
fn busybox(world: &World, into: &Path) {
    fs::create_dir_all(into).unwrap();
    let raw = world
        .home()
        .join("images")
        .join(digest(world, "tiny"))
        .join("rootfs.raw");
    host(
        "debugfs",
        [
            "-R".as_ref(),
            format!("rdump / {}", into.display()).as_ref(),
            raw.as_os_str(),
        ],
    );
    // It belongs to the file system, not to its content.
    fs::remove_dir(into.join("lost+found")).unwrap();
}

/// Ends a test: removes everything except these images, and asserts that nothing else was left.
#[track_caller]
fn end(world: &World, left: &[&str]) {
    let listed = world.json(["image", "ls"]);
    let names = listed
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|image| image["names"].as_array().unwrap());
    let names: Vec<&str> = names
        .map(text)
        .filter(|name| !left.contains(name))
        .collect();
    if !names.is_empty() {
        world.ok(["image", "rm"].iter().chain(&names));
    }
    world.ok(["gc"]);
    assert_eq!(entries(&world.home().join("images")).len(), left.len());
    for dir in ["snapshots", "layers"] {
        assert_eq!(
            entries(&world.home().join(dir)),
            BTreeSet::new(),
            "in {dir}"
        );
    }
    world.assert_empty();
}
