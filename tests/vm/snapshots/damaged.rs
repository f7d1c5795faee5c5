//! Each kind of file of a snapshot is damaged: bytes are changed or cut. The damage is found, named
//! and put aside; the file is never used, and nothing else is affected.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use serde_json::Value;

use super::{
    assert_nothing_staged, entries, in_memory, names, put, remove, saved_with_memory, stopped, text,
};
use crate::support::{Answer, World, finish};

/// How a list shows a damaged snapshot.
const UNUSABLE: &str = "cannot be used";

/// A change of a file, and who must find it in addition to `verify`, which finds every change.
#[derive(Clone)]
struct Damage {
    what: &'static str,
    harm: Harm,
    /// Starting a machine finds it.
    run: bool,
    export: bool,
}

#[derive(Clone, Copy)]
enum Harm {
    Flip(usize),
    /// At this many bytes from the end.
    FlipBack(usize),
    Keep(usize),
    CutBack(usize),
    Longer,
}

impl Harm {
    fn to(self, content: &[u8]) -> Vec<u8> {
        let mut bytes = content.to_vec();
        match self {
            Harm::Flip(at) => bytes[at] ^= 0x55,
            Harm::FlipBack(back) => bytes[content.len() - back] ^= 0x55,
            Harm::Keep(length) => bytes.truncate(length),
            Harm::CutBack(back) => bytes.truncate(content.len() - back),
            Harm::Longer => bytes.push(0),
        }
        bytes
    }
}

fn seen(what: &'static str, harm: Harm) -> Damage {
    Damage {
        what,
        harm,
        run: true,
        export: false,
    }
}

/// Damage that is found only by reading every byte.
fn hidden(what: &'static str, harm: Harm) -> Damage {
    Damage {
        what,
        harm,
        run: false,
        export: true,
    }
}

fn cuts(content: &[u8]) -> [Damage; 4] {
    [
        Damage {
            export: true,
            ..seen("all of it", Harm::Keep(0))
        },
        seen("half of it", Harm::Keep(content.len() / 2)),
        seen("its last byte", Harm::CutBack(1)),
        seen("a byte more", Harm::Longer),
    ]
}

/// A file of the store that a snapshot needs.
struct Target<'a> {
    world: &'a World,
    snapshot: &'a str,
    path: PathBuf,
    /// What `verify` calls it: `layer`, `image`, `kernel` or `snapshot`, and a digest.
    part: String,
}

impl Target<'_> {
    fn suffers(&self, damages: &[Damage]) {
        let content = fs::read(&self.path).unwrap();
        for damage in damages {
            let harmed = damage.harm.to(&content);
            let case = format!("{} of {}", damage.what, self.path.display());
            if damage.run {
                put(&self.path, &harmed);
                self.refuses_to_run(&case);
            }
            if damage.export {
                self.restore(&content);
                put(&self.path, &harmed);
                self.refuses_to_export(&case);
            }
            self.restore(&content);
            put(&self.path, &harmed);
            self.is_verified_not(&case, &harmed);
            self.restore(&content);
        }
    }

    fn refuses_to_run(&self, case: &str) {
        let answer = self
            .world
            .run(["run", "-d", "--name", "never", self.snapshot]);
        assert_refused(&answer, case);
        assert_nothing_staged(self.world);
        let listed = self.world.json(["ps", "-a"]);
        assert!(
            !listed
                .as_array()
                .unwrap()
                .iter()
                .any(|info| info["name"] == "never"),
            "{case}: {listed}"
        );
    }

    fn refuses_to_export(&self, case: &str) {
        let mut command = self.world.command();
        command.args([
            "snapshot",
            "export",
            self.snapshot,
            "-o",
            "-",
            "--plain-tar",
        ]);
        assert_refused(
            &finish(
                command
                    .stdout(Stdio::null())
                    .stderr(Stdio::piped())
                    .spawn()
                    .unwrap(),
            ),
            case,
        );
        assert_nothing_staged(self.world);
    }

    fn is_verified_not(&self, case: &str, harmed: &[u8]) {
        let answer = self.world.run(["snapshot", "verify", self.snapshot]);
        assert_refused(&answer, case);
        assert!(
            answer.err().contains(&self.part),
            "{case}: {} is not named: {answer:?}",
            self.part
        );
        let aside = self.aside();
        let kept = if aside.is_dir() {
            aside.join(self.path.file_name().unwrap())
        } else {
            aside
        };
        assert!(
            fs::read(&kept).unwrap() == harmed,
            "{case}: {} is something else",
            kept.display()
        );
        assert!(!self.path.exists(), "{case}: it is still in its place");
        assert_eq!(self.world.ok(["gc"]).code, 0);
        assert!(kept.exists(), "{case}: gc took what was put aside");
        let again = self.world.run(["snapshot", "verify", self.snapshot]);
        assert_refused(&again, case);
        let listed = self.world.ok(["snapshot", "ls"]);
        let is_listed = |line: &str| line.starts_with(self.snapshot) && line.contains(UNUSABLE);
        assert!(listed.out().lines().any(is_listed), "{case}: {listed:?}");
        assert!(
            names(self.world).contains(&"other".to_owned()),
            "{case}: other snapshots are not listed"
        );
        assert_nothing_staged(self.world);
    }

    /// The only file in quarantine.
    fn aside(&self) -> PathBuf {
        let found = entries(&self.world.home().join("quarantine"));
        assert_eq!(found.len(), 1, "{found:?}");
        found.into_iter().next().unwrap()
    }

    /// Restores the original file.
    fn restore(&self, content: &[u8]) {
        for aside in entries(&self.world.home().join("quarantine")) {
            if aside.is_dir() {
                fs::rename(&aside, self.path.parent().unwrap()).unwrap();
            } else {
                fs::remove_file(&aside).unwrap();
            }
        }
        put(&self.path, content);
    }
}

#[track_caller]
fn assert_refused(answer: &Answer, case: &str) {
    assert_eq!(answer.code, 125, "{case}: {answer:?}");
    assert!(
        answer.err().starts_with("sandtree: ") && !answer.err().contains("panicked"),
        "{case}: {answer:?}"
    );
}

fn manifest(world: &World, snapshot: &str) -> Value {
    world.json(["snapshot", "inspect", snapshot])["manifest"].clone()
}

fn layer<'a>(world: &'a World, snapshot: &'a str, digest: &Value) -> Target<'a> {
    let plain = world.home().join("layers").join(text(digest));
    let path = if plain.exists() {
        plain
    } else {
        plain.with_extension("zst")
    };
    Target {
        world,
        snapshot,
        path,
        part: format!("layer {}", text(digest)),
    }
}

fn number(content: &[u8], at: usize) -> usize {
    usize::try_from(u64::from_be_bytes(content[at..at + 8].try_into().unwrap())).unwrap()
}

/// The top layer of its disk.
fn top(manifest: &Value) -> &Value {
    &manifest["disk"]["layers"]
        .as_array()
        .unwrap()
        .last()
        .unwrap()["digest"]
}

#[test]
fn damage_to_a_disk_layer_is_found() {
    let world = World::new();
    stopped(&world, "a", "one");
    world.ok(["save", "a", "s"]);
    world.ok(["save", "a", "other"]);
    let manifest = manifest(&world, "s");
    let target = layer(&world, "s", top(&manifest));
    let content = fs::read(&target.path).unwrap();
    // The offsets of the tables in a qcow2 file.
    let active = number(&content, 40);
    let counts = number(&content, 48);
    let damages = [
        seen("the first byte", Harm::Flip(0)),
        seen("its version", Harm::Flip(7)),
        // The size of the disk, which the layer above also has.
        hidden("its size", Harm::Flip(30)),
        seen("its table of clusters", Harm::Flip(active + 5)),
        seen("its table of counts", Harm::Flip(counts + 5)),
        hidden("data", Harm::FlipBack(4096)),
        hidden("the last byte", Harm::FlipBack(1)),
    ];
    target.suffers(&[damages.as_slice(), &cuts(&content)].concat());
    world.ok(["snapshot", "verify", "other"]);
    remove(&world, &["a"]);
}

#[test]
fn damage_to_a_compressed_layer_is_found() {
    let world = World::new();
    stopped(&world, "a", "one");
    world.ok(["save", "a", "s", "--compress"]);
    world.ok(["save", "a", "other"]);
    let manifest = manifest(&world, "s");
    let target = layer(&world, "s", top(&manifest));
    assert_eq!(target.path.extension().unwrap(), "zst");
    let content = fs::read(&target.path).unwrap();
    let damages = [
        seen("the first byte", Harm::Flip(0)),
        seen("its frame's header", Harm::Flip(6)),
        hidden("data", Harm::Flip(content.len() / 2)),
        hidden("the last byte", Harm::FlipBack(1)),
        seen("all of it", Harm::Keep(0)),
        hidden("half of it", Harm::Keep(content.len() / 2)),
        hidden("its last byte", Harm::CutBack(1)),
    ];
    // A compressed layer is read as a whole, so a start finds all damage.
    let damages = damages.map(|damage| Damage {
        run: true,
        ..damage
    });
    target.suffers(&damages);
    remove(&world, &["a"]);
}

#[test]
fn damage_to_memory_and_devices_is_found() {
    let world = World::new();
    saved_with_memory(&world, "a", "one", "live");
    world.ok(["save", "a", "other"]);
    world.ok(["rm", "-f", "a"]);
    let manifest = manifest(&world, "live");
    let memory = &manifest["memory"];
    let target = layer(
        &world,
        "live",
        &memory["layers"].as_array().unwrap().last().unwrap()["digest"],
    );
    let content = fs::read(&target.path).unwrap();
    let damages = [
        seen("the first byte", Harm::Flip(0)),
        seen("its size", Harm::Flip(18)),
        seen("its checksum", Harm::Flip(60)),
        seen("its runs", Harm::FlipBack(20)),
        seen("the last byte", Harm::FlipBack(1)),
        hidden("data", Harm::Flip(4096 + 77)),
    ];
    target.suffers(&[damages.as_slice(), &cuts(&content)].concat());
    let target = layer(&world, "live", &memory["devices"]["digest"]);
    let content = fs::read(&target.path).unwrap();
    let damages = [
        seen("the first byte", Harm::Flip(0)),
        hidden("data", Harm::Flip(content.len() / 2)),
        hidden("the last byte", Harm::FlipBack(1)),
    ];
    target.suffers(&[damages.as_slice(), &cuts(&content)].concat());
    world.ok(["snapshot", "verify", "live"]);
    remove(&world, &[]);
}

#[test]
fn damage_to_a_manifest_and_to_a_name_is_found() {
    let world = World::new();
    stopped(&world, "a", "one");
    world.ok(["save", "a", "s"]);
    world.ok(["save", "a", "other"]);
    let digest = super::digest(&world, "s");
    let path = world
        .home()
        .join("snapshots")
        .join(&digest)
        .join("manifest.json");
    let content = fs::read(&path).unwrap();
    let target = Target {
        world: &world,
        snapshot: "s",
        path,
        part: format!("snapshot {digest}"),
    };
    let flips = [
        ("the first byte", 0),
        ("a key", 3),
        ("in the middle", content.len() / 2),
    ];
    let flips = flips.map(|(what, at)| Damage {
        export: true,
        ..seen(what, Harm::Flip(at))
    });
    target.suffers(
        &[
            flips.as_slice(),
            &[seen("the last byte", Harm::FlipBack(1))],
            &cuts(&content),
        ]
        .concat(),
    );

    // A snapshot in quarantine is listed by its name, with the reason, and can be replaced or
    // removed.
    put(&target.path, b"{}");
    assert_refused(&world.run(["snapshot", "verify", "s"]), "no manifest");
    let listed = world.json(["snapshot", "ls"]);
    let broken = listed
        .as_array()
        .unwrap()
        .iter()
        .find(|snapshot| snapshot["names"][0] == "s")
        .expect("it is listed");
    assert!(text(&broken["unreadable"]).contains("missing"), "{broken}");
    assert!(world.ok(["snapshot", "ls"]).out().contains(UNUSABLE));
    let held_back = world.ok(["gc"]);
    assert!(held_back.err().contains(&digest), "{held_back:?}");
    world
        .run(["save", "a", "s"])
        .failed_with(&["the name s is taken"]);
    world.ok(["save", "a", "s", "--force"]);
    world.ok(["snapshot", "verify", "s"]);
    let aside = target.aside();
    world.ok(["gc"]);
    assert!(
        aside.join("manifest.json").exists(),
        "what was put aside stays"
    );

    // The file of a name.
    let path = world.home().join("names/images/s");
    let content = fs::read(&path).unwrap();
    for harm in [
        Harm::Flip(0),
        Harm::Flip(20),
        Harm::FlipBack(1),
        Harm::Keep(0),
        Harm::Keep(40),
        Harm::Longer,
    ] {
        put(&path, &harm.to(&content));
        for args in [
            ["run", "-d", "s"].as_slice(),
            &["snapshot", "verify", "s"],
            &["snapshot", "export", "s", "-o", "-"],
        ] {
            assert_refused(&world.run(args), "a damaged name");
        }
        world.ok(["snapshot", "verify", "other"]);
        assert!(
            world
                .ok(["snapshot", "ls"])
                .out()
                .lines()
                .any(|line| line.starts_with("s ") && line.contains(UNUSABLE))
        );
        let collected = world.ok(["gc"]);
        assert!(collected.err().contains("name s"), "{collected:?}");
        assert_nothing_staged(&world);
    }
    put(&path, &content);
    world.ok(["snapshot", "verify", "s"]);
    // A removal puts the file aside and frees the name.
    put(&path, b"nothing");
    world.ok(["snapshot", "rm", "s"]);
    assert_eq!(
        fs::read(world.home().join("quarantine/name-s")).unwrap(),
        b"nothing"
    );
    world.ok(["save", "a", "s"]);
    remove(&world, &["a"]);
}

#[test]
fn damage_to_an_image_and_to_its_kernel_is_found() {
    let world = World::new();
    saved_with_memory(&world, "a", "one", "live");
    world.ok(["save", "a", "other"]);
    world.ok(["rm", "-f", "a"]);
    let manifest = manifest(&world, "live");
    let of = |kind: &'static str, dir: &str, key: &str, file: &str| {
        let digest = text(&manifest["image"][key]);
        let path = world.home().join(dir).join(digest).join(file);
        Target {
            world: &world,
            snapshot: "live",
            path,
            part: format!("{kind} {digest}"),
        }
    };
    let descriptions = [
        of("image", "images", "digest", "image.json"),
        of("kernel", "kernels", "kernel", "bundle.json"),
    ];
    for target in descriptions {
        target.suffers(&[
            seen("the first byte", Harm::Flip(0)),
            Damage {
                export: true,
                ..seen("a digit", Harm::Flip(60))
            },
            seen("all of it", Harm::Keep(0)),
            seen("its last byte", Harm::CutBack(1)),
        ]);
    }
    for target in [
        of("image", "images", "digest", "rootfs.raw"),
        of("kernel", "kernels", "kernel", "kernel"),
    ] {
        target.suffers(&[
            hidden("the first byte", Harm::Flip(0)),
            hidden("data", Harm::Flip(1 << 20)),
            Damage {
                export: true,
                ..seen("its last byte", Harm::CutBack(1))
            },
        ]);
    }
    world.ok(["snapshot", "verify", "live"]);
    world.ok(["snapshot", "verify", "other"]);
    remove(&world, &[]);
}

/// A directory belongs to its owner: damaged files are named and stay in place.
#[test]
fn damage_to_a_directory_is_found_and_stays_there() {
    let world = World::new();
    let place = in_memory();
    saved_with_memory(&world, "a", "one", "live");
    let dir = place.path().join("work/dir");
    fs::create_dir(dir.parent().unwrap()).unwrap();
    let path = dir.to_str().unwrap();
    world.ok(["save", "a", path, "--memory"]);
    world.ok(["snapshot", "verify", path]);
    let manifest = manifest(&world, path);
    world.ok(["rm", "-f", "a"]);
    // A store without these layers must read all of them.
    let other = World::empty_at(place.path().join("home"));
    let blob = |value: &Value| dir.join("blobs").join(text(value));
    let files = [
        (dir.join("artifact.json"), "artifact"),
        (dir.join("manifest.json"), ""),
        (blob(top(&manifest)), text(top(&manifest))),
        (
            blob(&manifest["memory"]["layers"][0]["digest"]),
            text(&manifest["memory"]["layers"][0]["digest"]),
        ),
        (
            blob(&manifest["memory"]["devices"]["digest"]),
            text(&manifest["memory"]["devices"]["digest"]),
        ),
        (
            blob(&manifest["image"]["digest"]),
            text(&manifest["image"]["digest"]),
        ),
        (
            blob(&manifest["image"]["kernel"]),
            text(&manifest["image"]["kernel"]),
        ),
    ];
    for (file, named) in files {
        let content = fs::read(&file).unwrap();
        for harm in [
            Harm::Flip(0),
            Harm::Flip(content.len() / 2),
            Harm::FlipBack(1),
            Harm::Keep(content.len() / 2),
        ] {
            put(&file, &harm.to(&content));
            let case = file.display().to_string();
            let answer = world.run(["snapshot", "verify", path]);
            assert_refused(&answer, &case);
            assert!(answer.err().contains(named), "{case}: {answer:?}");
            assert!(
                fs::read(&file).unwrap() == harm.to(&content),
                "{case} was touched"
            );
            assert_refused(&other.run(["run", "-d", path]), &case);
            assert_empty(&other);
        }
        fs::remove_file(&file).unwrap();
        assert_refused(&world.run(["snapshot", "verify", path]), "a missing file");
        assert_refused(&other.run(["run", "-d", path]), "a missing file");
        put(&file, &content);
    }
    world.ok(["snapshot", "verify", path]);
    other.ok(["run", "-d", "--name", "b", path]);
    crate::support::held::assert_holds(&other, "b", "one", 0);
    let listed = world.json([
        "snapshot",
        "ls",
        "--workspace",
        dir.parent().unwrap().to_str().unwrap(),
    ]);
    assert_eq!(listed[0]["names"][0], "dir", "{listed}");
    world.ok([
        "snapshot",
        "rm",
        "dir",
        "--workspace",
        dir.parent().unwrap().to_str().unwrap(),
    ]);
    assert_eq!(entries(dir.parent().unwrap()).len(), 0);
    remove(&other, &["b"]);
    remove(&world, &[]);
}

fn assert_empty(world: &World) {
    assert_nothing_staged(world);
    for dir in ["snapshots", "layers", "images", "kernels", "sandboxes"] {
        assert_eq!(entries(&world.home().join(dir)).len(), 0, "{dir}");
    }
}

/// A plain directory is never used as a snapshot.
#[test]
fn a_directory_that_is_no_snapshot_is_refused() {
    let world = World::new();
    let place = in_memory();
    let dir: &Path = place.path();
    fs::write(dir.join("file"), "mine").unwrap();
    let path = dir.to_str().unwrap();
    for args in [
        ["snapshot", "verify", path].as_slice(),
        &["snapshot", "inspect", path],
        &["snapshot", "rm", path],
        &["run", "-d", path],
    ] {
        assert_refused(&world.run(args), &args.join(" "));
    }
    assert_eq!(fs::read(dir.join("file")).unwrap(), b"mine");
    world.assert_empty();
}
