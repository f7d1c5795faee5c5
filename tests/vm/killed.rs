//! Processes are killed at random moments of their work. Everything that a store has published is
//! whole: either the old content or the new one.
//!
//! `KILLED_SECONDS` is the duration over all file systems (25 by default); `KILLED_SEED` repeats a
//! run.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use sandtree_store::Digest;
use serde_json::Value;

use crate::support::mount::Mount;
use crate::support::{DEADLINE, World, finish, wait};

const SECONDS: u64 = 25;
/// How often all content is read, in addition to what is new.
const VERIFY_EVERY: usize = 24;
/// The names that are saved, replaced and removed.
const NAMES: [&str; 3] = ["s-1", "s-2", "s-3"];

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Work {
    Save,
    Promote,
    Compress,
    Import,
    Remove,
    Collect,
    Tag,
    Directory,
    Export,
}

const WORKS: [Work; 9] = [
    Work::Save,
    Work::Promote,
    Work::Compress,
    Work::Import,
    Work::Remove,
    Work::Collect,
    Work::Tag,
    Work::Directory,
    Work::Export,
];

/// Quick kinds of work, which can be killed often.
const OFTEN: [Work; 7] = [
    Work::Save,
    Work::Promote,
    Work::Compress,
    Work::Import,
    Work::Remove,
    Work::Collect,
    Work::Tag,
];

/// The digest of the snapshot under each name.
type Names = BTreeMap<String, String>;

/// Random numbers that a seed repeats.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit.max(1)
    }

    fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
        all[usize::try_from(self.below(all.len() as u64)).unwrap()]
    }
}

struct Bench {
    world: World,
    random: Random,
    /// How long each kind of work takes without a kill.
    lasts: BTreeMap<Work, Duration>,
    /// The files that were read and found whole, by inode, length and time.
    whole: BTreeSet<(u64, u64, i64)>,
    /// The digest of the snapshot in the exported file.
    travels: String,
    file: PathBuf,
    dir: PathBuf,
    /// The names at the last check.
    names: Names,
    number: usize,
    killed: usize,
}

/// Prints a line even if the test passes.
fn say(line: &str) {
    writeln!(std::io::stderr(), "{line}").expect("it is open");
}

fn variable(name: &str) -> Option<u64> {
    std::env::var(name)
        .ok()
        .map(|text| text.parse().unwrap_or_else(|e| panic!("{name}: {e}")))
}

#[test]
fn nothing_published_is_ever_incomplete() {
    let now = u64::try_from(
        SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap()
            .as_nanos(),
    )
    .unwrap();
    let seed = variable("KILLED_SEED").unwrap_or(now | 1);
    let seconds = variable("KILLED_SECONDS").unwrap_or(SECONDS);
    say(&format!("KILLED_SEED={seed}"));
    let own = tempfile::Builder::new().prefix("st-").tempdir().unwrap();
    let mounts: Vec<(&str, Option<Mount>)> = ["ext4", "xfs", "btrfs"]
        .into_iter()
        .map(|kind| (kind, Mount::of_kind(kind, 1024)))
        .collect();
    for (kind, _) in mounts.iter().filter(|(_, mount)| mount.is_none()) {
        say(&format!(
            "\nSKIPPED, nothing was killed on {kind}: mounting it takes root\n"
        ));
    }
    let mut places: Vec<(&str, &Path)> = mounts
        .iter()
        .filter_map(|(kind, mount)| Some((*kind, mount.as_ref()?.path())))
        .collect();
    if places.is_empty() {
        places.push(("the file system of temporary files", own.path()));
    }
    let each = Duration::from_secs(seconds) / u32::try_from(places.len()).unwrap();
    for (number, (kind, path)) in places.iter().enumerate() {
        let mut bench = Bench::new(path, Random(seed.wrapping_add(number as u64) | 1));
        bench.run(each);
        say(&format!(
            "{kind}: {} works begun, {} of them killed before their end",
            bench.number, bench.killed
        ));
        assert!(bench.killed > 0, "on {kind} no kill came in time");
        bench.end();
    }
}

impl Bench {
    fn new(place: &Path, random: Random) -> Self {
        let world = World::at(place.join("home"));
        world.start("a", &[]);
        assert_eq!(world.sh("a", "echo one > /srv/word; sync").code, 0);
        world.ok(["checkpoint", "a", "live"]);
        assert_eq!(world.sh("a", "echo two > /srv/word; sync").code, 0);
        world.ok(["stop", "a"]);
        let file = place.join("kept.tar.zst");
        let travels = world.json(["save", "a", "kept", "--label", "number=0"])["digest"]
            .as_str()
            .unwrap()
            .to_owned();
        world.ok([
            "snapshot",
            "export",
            "kept",
            "-o",
            file.to_str().unwrap(),
            "--without-image",
        ]);
        let dir = place.join("dir");
        world.ok(["save", "a", dir.to_str().unwrap(), "--label", "number=0"]);
        let lasts = BTreeMap::new();
        let whole = BTreeSet::new();
        let mut bench = Bench {
            world,
            random,
            lasts,
            whole,
            travels,
            file,
            dir,
            names: Names::new(),
            number: 0,
            killed: 0,
        };
        bench.names = bench.listed();
        for work in WORKS {
            bench.work(work, None);
        }
        bench
    }

    fn run(&mut self, time: Duration) {
        let began = Instant::now();
        while began.elapsed() < time || self.killed == 0 {
            assert!(
                began.elapsed() < DEADLINE + time,
                "no kill ever came in time"
            );
            let work = if self.random.below(8) == 0 {
                self.random.one_of(&WORKS)
            } else {
                self.random.one_of(&OFTEN)
            };
            let lasts = self.lasts[&work].as_micros();
            let after = self.random.below(u64::try_from(lasts).unwrap());
            self.work(work, Some(Duration::from_micros(after)));
            if self.number.is_multiple_of(VERIFY_EVERY) {
                self.verify_all();
            }
        }
    }

    /// Does one piece of work, killed after a time or not, and checks everything.
    fn work(&mut self, work: Work, kill_after: Option<Duration>) {
        self.number += 1;
        let name = self.random.one_of(&NAMES);
        let before = self.names.clone();
        let old_dir = self.label(&self.dir.join("manifest.json"));
        let began = Instant::now();
        let child = self.begin(work, name);
        let code = match kill_after {
            None => {
                let answer = finish(child);
                assert!(
                    answer.code == 0 || work == Work::Remove || work == Work::Tag,
                    "{work:?}: {answer:?}"
                );
                self.lasts.insert(work, began.elapsed());
                answer.code
            }
            Some(after) => killed(child, after),
        };
        if code == 128 + 9 {
            self.killed += 1;
        }
        self.assert_whole(work, name, &before);
        let new_dir = self.label(&self.dir.join("manifest.json"));
        let own = work == Work::Directory && new_dir == self.number.to_string();
        assert!(
            own || new_dir == old_dir,
            "the directory is of {new_dir}, and was of {old_dir}"
        );
    }

    fn begin(&self, work: Work, name: &str) -> Child {
        let label = format!("number={}", self.number);
        let file = self.file.to_str().unwrap();
        let written = self.file.with_file_name("written.tar.zst");
        let args: Vec<&str> = match work {
            Work::Save => vec!["save", "a", name, "--force", "--label", &label],
            Work::Promote => vec![
                "save", "a", name, "--force", "--label", &label, "--from", "live",
            ],
            Work::Compress => vec![
                "save",
                "a",
                name,
                "--force",
                "--label",
                &label,
                "--compress",
            ],
            Work::Import => vec!["snapshot", "import", file, "--name", name, "--force"],
            Work::Remove => vec!["snapshot", "rm", name],
            Work::Collect => vec!["gc"],
            Work::Tag => vec!["snapshot", "tag", "kept", name, "--force"],
            Work::Directory => vec![
                "save",
                "a",
                self.dir.to_str().unwrap(),
                "--force",
                "--label",
                &label,
            ],
            Work::Export => {
                vec![
                    "snapshot",
                    "export",
                    "kept",
                    "-o",
                    written.to_str().unwrap(),
                    "--force",
                    "--without-image",
                ]
            }
        };
        self.world
            .command()
            .args(args)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    }

    /// The next command finds every name unchanged, except the one that was worked on, which may
    /// have its old or its new content.
    fn assert_whole(&mut self, work: Work, name: &str, before: &Names) {
        let after = self.listed();
        let staging: Vec<_> = fs::read_dir(self.world.home().join("staging"))
            .unwrap()
            .collect();
        assert!(staging.is_empty(), "{work:?} left {staging:?}");
        let all: BTreeSet<&String> = before.keys().chain(after.keys()).collect();
        for one in all {
            let old = before.get(one);
            let new = after.get(one);
            let is_as_wished = one == name && self.is_as_wished(work, new);
            assert!(
                old == new || is_as_wished,
                "{work:?} of {name}: {one} was {old:?} and is {new:?}"
            );
        }
        for digest in after.values() {
            self.read_new(digest);
        }
        self.names = after;
        self.assert_files(work);
    }

    fn is_as_wished(&self, work: Work, found: Option<&String>) -> bool {
        let home = self.world.home();
        let label = |digest: &String| {
            self.label(&home.join("snapshots").join(digest).join("manifest.json"))
        };
        match (work, found) {
            (Work::Save | Work::Promote | Work::Compress, Some(digest)) => {
                label(digest) == self.number.to_string()
            }
            (Work::Import | Work::Tag, Some(digest)) => *digest == self.travels,
            (Work::Remove, None) => true,
            _ => false,
        }
    }

    /// The names that the next command lists. All of them must be usable.
    fn listed(&self) -> Names {
        let listed = self.world.json(["snapshot", "ls"]);
        let mut names = Names::new();
        for snapshot in listed.as_array().unwrap() {
            assert_eq!(snapshot["unreadable"], Value::Null, "{snapshot}");
            for name in snapshot["names"].as_array().unwrap() {
                names.insert(
                    name.as_str().unwrap().to_owned(),
                    snapshot["digest"].as_str().unwrap().to_owned(),
                );
            }
        }
        names
    }

    /// The work that wrote a manifest.
    fn label(&self, manifest: &Path) -> String {
        let bytes = fs::read(manifest).unwrap_or_else(|e| panic!("{}: {e}", manifest.display()));
        let manifest: Value = serde_json::from_slice(&bytes).unwrap();
        manifest["labels"]["number"].as_str().unwrap().to_owned()
    }

    /// Reads the unread files of a snapshot, by other means than the product's.
    fn read_new(&mut self, digest: &str) {
        let home = self.world.home().to_owned();
        let path = home.join("snapshots").join(digest).join("manifest.json");
        let bytes = fs::read(&path).unwrap();
        assert_eq!(Digest::of(&bytes).to_string(), digest, "{}", path.display());
        let manifest: Value = serde_json::from_slice(&bytes).unwrap();
        let memory = manifest["memory"]["layers"]
            .as_array()
            .into_iter()
            .flatten();
        let devices = Some(&manifest["memory"]["devices"]).filter(|devices| devices.is_object());
        for layer in manifest["disk"]["layers"]
            .as_array()
            .unwrap()
            .iter()
            .chain(memory)
            .chain(devices)
        {
            let digest = layer["digest"].as_str().unwrap();
            let plain = home.join("layers").join(digest);
            // Only the product can read a compressed layer; `verify_all` does that.
            if plain.exists() {
                self.read_file(&plain, digest);
            } else {
                let compressed = plain.with_extension("zst");
                assert!(compressed.exists(), "{} is missing", plain.display());
            }
        }
    }

    fn read_file(&mut self, path: &Path, digest: &str) {
        let stat = fs::metadata(path).unwrap();
        if self
            .whole
            .insert((stat.ino(), stat.len(), stat.mtime_nsec()))
        {
            assert_eq!(
                Digest::of(&fs::read(path).unwrap()).to_string(),
                digest,
                "{}",
                path.display()
            );
        }
    }

    /// A file outside of the store is whole or absent. Leftovers have names that no command reads.
    fn assert_files(&mut self, work: Work) {
        let place = self.file.parent().unwrap().to_owned();
        let written = place.join("written.tar.zst");
        if work == Work::Export && written.exists() {
            assert!(
                fs::read(&written).unwrap() == fs::read(&self.file).unwrap(),
                "half a file has its name"
            );
        }
        if work == Work::Directory {
            for blob in fs::read_dir(self.dir.join("blobs")).unwrap() {
                let path = blob.unwrap().path();
                self.read_file(&path, path.file_name().unwrap().to_str().unwrap());
            }
        }
        for entry in fs::read_dir(&place).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            match name.strip_prefix('.') {
                Some(_) if path.is_dir() => fs::remove_dir_all(&path).unwrap(),
                Some(_) => fs::remove_file(&path).unwrap(),
                None => assert!(
                    [
                        "home",
                        "kept.tar.zst",
                        "dir",
                        "written.tar.zst",
                        "lost+found"
                    ]
                    .contains(&&*name),
                    "{name}"
                ),
            }
        }
    }

    fn verify_all(&self) {
        for digest in self.names.values().collect::<BTreeSet<_>>() {
            self.world.ok(["snapshot", "verify", digest]);
        }
        self.world
            .ok(["snapshot", "verify", self.dir.to_str().unwrap()]);
        let quarantine: Vec<_> = fs::read_dir(self.world.home().join("quarantine"))
            .unwrap()
            .collect();
        assert!(quarantine.is_empty(), "{quarantine:?}");
    }

    /// Checks everything once more, and removes all of it.
    fn end(self) {
        self.verify_all();
        let report = self.world.json(["gc"]);
        assert_eq!(report["held_back"], Value::Null, "{report}");
        let used = self.world.json(["df"]);
        let kinds = used["kinds"].as_array().unwrap();
        assert_eq!(
            used["bytes"],
            kinds
                .iter()
                .map(|kind| kind["bytes"].as_u64().unwrap())
                .sum::<u64>(),
            "{used}"
        );
        assert_eq!(used["reclaimable_bytes"], 0, "{used}");
        let count =
            |kind: &str| kinds.iter().find(|found| found["kind"] == kind).unwrap()["count"].clone();
        let snapshots = self.names.values().collect::<BTreeSet<_>>().len();
        assert_eq!(
            (count("snapshots"), count("staging"), count("quarantine")),
            (snapshots.into(), 0.into(), 0.into())
        );
        // The sandbox that was saved has lost nothing.
        assert_eq!(self.world.json(["log", "a"]).as_array().unwrap().len(), 1);
        self.world.ok(["revert", "a", "live"]);
        assert_eq!(self.world.sh("a", "cat /srv/word").out(), "one\n");
        self.world.ok(["rm", "-f", "a"]);
        for name in self.names.keys() {
            self.world.ok(["snapshot", "rm", name]);
        }
        self.world.ok(["gc"]);
        for dir in ["snapshots", "layers"] {
            assert_eq!(
                fs::read_dir(self.world.home().join(dir)).unwrap().count(),
                0,
                "{dir}"
            );
        }
        self.world.assert_empty();
    }
}

/// Kills a process after a time; returns its exit code, 137 if the kill came before its end.
fn killed(mut child: Child, after: Duration) -> i32 {
    // The test waits for the moment itself, which is random.
    std::thread::park_timeout(after);
    child.kill().unwrap();
    wait(&mut child, DEADLINE).expect("a killed process ends")
}
