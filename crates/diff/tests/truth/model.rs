//! Random edits are reported as changes.

use std::collections::BTreeMap;

use proptest::collection::vec;
use proptest::prelude::{ProptestConfig, Strategy, prop_assert_eq, prop_oneof, proptest};
use sandtree_diff::Kind;
use tempfile::TempDir;

use super::support::{EXT4, Image, Item, Tree, both_ways, expected, lines};

const DIRS: [&str; 4] = ["", "/d", "/d/e", "/f"];
const NAMES: [&str; 4] = ["w", "x", "y", "z"];
const KINDS: [&str; 3] = [
    " -b 4096",
    ",inline_data -b 1024 -I 256",
    ",^extent,^64bit -b 1024",
];

#[derive(Debug, Clone)]
enum Edit {
    Write { at: usize, seed: u8, bytes: usize },
    Link { at: usize, target: u8 },
    Remove { at: usize },
    MakeDir { dir: usize },
    Mode { at: usize, mode: u16 },
}

fn edits() -> impl Strategy<Value = Vec<Edit>> {
    let at = 0..DIRS.len() * NAMES.len();
    let bytes = prop_oneof![0usize..200, 900usize..5000, 60_000usize..70_000];
    let edit = prop_oneof![
        4 => (at.clone(), 1u8..4, bytes).prop_map(|(at, seed, bytes)| Edit::Write { at, seed, bytes }),
        1 => (at.clone(), 1u8..90).prop_map(|(at, target)| Edit::Link { at, target }),
        2 => at.clone().prop_map(|at| Edit::Remove { at }),
        2 => (1..DIRS.len()).prop_map(|dir| Edit::MakeDir { dir }),
        1 => (at, 0u16..0o1000).prop_map(|(at, mode)| Edit::Mode { at, mode }),
    ];
    vec(edit, 0..24)
}

/// The content of a file system, and the commands with which debugfs makes the same edits.
struct Model {
    items: BTreeMap<String, Item>,
    sources: TempDir,
    commands: Vec<String>,
}

impl Model {
    fn apply(&mut self, edit: &Edit) {
        match *edit {
            Edit::Write { at, seed, bytes } => self.write(&path(at), seed, bytes),
            Edit::Link { at, target } => self.link(&path(at), &"t".repeat(target.into())),
            Edit::Remove { at } => self.remove(&path(at)),
            Edit::MakeDir { dir } => self.make_dir(DIRS[dir]),
            Edit::Mode { at, mode } => self.set_mode(&path(at), mode),
        }
    }

    fn has_parent(&self, path: &str) -> bool {
        let parent = path.rsplit_once('/').unwrap().0;
        parent.is_empty() || self.items.contains_key(parent)
    }

    fn write(&mut self, path: &str, seed: u8, bytes: usize) {
        if !self.has_parent(path) {
            return;
        }
        self.remove(path);
        let content: Vec<u8> = (0..bytes)
            .map(|index| (index / 1000) as u8 ^ seed)
            .collect();
        let source = self.sources.path().join(format!("{seed}-{bytes}"));
        std::fs::write(&source, &content).unwrap();
        self.commands
            .push(format!("write {} {path}", source.display()));
        self.commands.push(format!("sif {path} mode 0100644"));
        self.items.insert(
            path.into(),
            Item {
                kind: Kind::File,
                mode: 0o644,
                content,
            },
        );
    }

    fn link(&mut self, path: &str, target: &str) {
        if !self.has_parent(path) {
            return;
        }
        self.remove(path);
        self.commands.push(format!("symlink {path} {target}"));
        self.items.insert(
            path.into(),
            Item {
                kind: Kind::Symlink,
                mode: 0o777,
                content: target.into(),
            },
        );
    }

    fn make_dir(&mut self, path: &str) {
        if self.has_parent(path) && !self.items.contains_key(path) {
            self.commands.push(format!("mkdir {path}"));
            self.items.insert(
                path.into(),
                Item {
                    kind: Kind::Directory,
                    mode: 0o755,
                    content: Vec::new(),
                },
            );
        }
    }

    fn remove(&mut self, path: &str) {
        if self.items.remove(path).is_some() {
            self.commands.push(format!("rm {path}"));
        }
    }

    fn set_mode(&mut self, path: &str, mode: u16) {
        if let Some(item) = self
            .items
            .get_mut(path)
            .filter(|item| item.kind == Kind::File)
        {
            item.mode = mode;
            self.commands
                .push(format!("sif {path} mode 0100{mode:03o}"));
        }
    }

    fn run(&mut self, edits: &[Edit], image: &Image) -> BTreeMap<String, Item> {
        edits.iter().for_each(|edit| self.apply(edit));
        image.debugfs(&std::mem::take(&mut self.commands));
        self.items.clone()
    }
}

fn path(at: usize) -> String {
    format!("{}/{}", DIRS[at / NAMES.len()], NAMES[at % NAMES.len()])
}

fn tree(items: &BTreeMap<String, Item>) -> Tree {
    items
        .iter()
        .map(|(path, item)| (path.as_str().into(), item.clone()))
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(40) })]

    #[test]
    fn random_edits_are_reported_as_changes(first in edits(), second in edits(), kind in 0..KINDS.len()) {
        let sources = tempfile::tempdir().unwrap();
        let mut model = Model { items: BTreeMap::new(), sources, commands: Vec::new() };
        let before = Image::make(&format!("{EXT4}{}", KINDS[kind]), 8, None);
        let old = model.run(&first, &before);
        let after = before.copy();
        let new = model.run(&second, &after);
        prop_assert_eq!(lines(&both_ways(&before, &after)), expected(&tree(&old), &tree(&new)));
    }
}
