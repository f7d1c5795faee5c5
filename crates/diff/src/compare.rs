//! The comparison: one walk over both trees at once.
//!
//! If the caller knows which ranges of the disks can differ, an inode is skipped when the inode and
//! everything it refers to lie outside of them. The entries of a skipped directory are still
//! visited, because a file changes without a change of its directory.
//!
//! Always: memory holds the names of the directories on the current path, and the changes found so
//! far. Each directory is entered once.

use std::collections::{BTreeMap, HashMap, HashSet, btree_map};
use std::ops::Range;

use sandtree_disk::Blocks;
use sandtree_disk::ext4::read::{Error, FileSystem, Inode, Kind, Path};

use crate::changes::{Aspect, Change, ChangeKind, Diff};
use crate::pair::Pair;

/// The longest path that is visited: four times the kernel's limit for one path.
const MAX_PATH_BYTES: usize = 16 << 10;
/// How many files with several names are remembered, so that each is compared once.
const MAX_LINKED: usize = 1 << 20;

#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Whether a new modification time alone is a change.
    pub times: bool,
    /// After this many changes the walk ends, and the result is incomplete.
    pub max_changes: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            times: false,
            max_changes: 1_000_000,
        }
    }
}

/// The changes that turn the files on `a` into those on `b`.
///
/// `changed`: byte ranges outside of which both disks are equal. Without it, both disks are read
/// completely.
pub fn diff(
    a: &dyn Blocks,
    b: &dyn Blocks,
    changed: Option<&[Range<u64>]>,
    options: Options,
) -> Result<Diff, Error> {
    let pair = Pair::new(FileSystem::open(a)?, FileSystem::open(b)?, changed);
    Comparison::new(pair, options).run()
}

/// The inode numbers that one name has on the two disks.
#[derive(Debug, Clone, Copy, Default)]
struct Numbers {
    a: Option<u32>,
    b: Option<u32>,
}

type Children = BTreeMap<Box<[u8]>, Numbers>;

/// A directory whose entries are being visited.
struct Frame {
    path: Path,
    children: btree_map::IntoIter<Box<[u8]>, Numbers>,
}

struct Comparison<'b> {
    disks: Pair<'b>,
    options: Options,
    changes: Vec<Change>,
    incomplete: Vec<String>,
    /// A path was too long to visit.
    has_left_out: bool,
    /// The directories that were entered, by disk: each can be in one place only.
    entered: [HashSet<u32>; 2],
    /// The results for files with several names.
    linked: HashMap<(u32, u32), Vec<Aspect>>,
}

impl<'b> Comparison<'b> {
    fn new(disks: Pair<'b>, options: Options) -> Self {
        let missing =
            |side: &str, fs: &FileSystem<'_>| fs.incomplete().map(|what| format!("{side}: {what}"));
        let incomplete = [missing("before", &disks.a), missing("after", &disks.b)]
            .into_iter()
            .flatten()
            .collect();
        Self {
            disks,
            options,
            changes: Vec::new(),
            incomplete,
            has_left_out: false,
            entered: Default::default(),
            linked: HashMap::new(),
        }
    }

    fn run(mut self) -> Result<Diff, Error> {
        let root = Numbers {
            a: Some(self.disks.a.root()?.number),
            b: Some(self.disks.b.root()?.number),
        };
        let mut frames = Vec::from_iter(self.visit("/".into(), root)?);
        while let Some(frame) = frames.last_mut() {
            match frame.children.next() {
                Some((name, numbers)) => {
                    let path = frame.path.join(&name);
                    frames.extend(self.visit(path, numbers)?);
                }
                None => drop(frames.pop()),
            }
            if self.changes.len() > self.options.max_changes {
                self.changes.truncate(self.options.max_changes);
                self.incomplete.push(format!(
                    "only the first {} changes are listed",
                    self.options.max_changes
                ));
                break;
            }
        }
        Ok(self.finish())
    }

    fn finish(mut self) -> Diff {
        if self.has_left_out {
            self.incomplete.push(format!(
                "paths longer than {MAX_PATH_BYTES} bytes were left out"
            ));
        }
        let incomplete = Some(self.incomplete.join("; ")).filter(|what| !what.is_empty());
        Diff {
            changes: self.changes,
            incomplete,
        }
    }

    /// Compares the nodes at a path, and returns the directory to visit next.
    fn visit(&mut self, path: Path, numbers: Numbers) -> Result<Option<Frame>, Error> {
        if path.as_bytes().len() > MAX_PATH_BYTES {
            self.has_left_out = true;
            return Ok(None);
        }
        if let Some(inode) = self.untouched(numbers)? {
            return self.enter_untouched(path, &inode);
        }
        let before = numbers
            .a
            .map(|number| self.disks.a.inode(number))
            .transpose()?;
        let after = numbers
            .b
            .map(|number| self.disks.b.inode(number))
            .transpose()?;
        self.compare(&path, before.as_ref(), after.as_ref())?;
        self.enter(path, before, after)
    }

    /// The common inode of both disks, if it is known to be equal on both.
    fn untouched(&mut self, numbers: Numbers) -> Result<Option<Inode>, Error> {
        let Numbers {
            a: Some(a),
            b: Some(b),
        } = numbers
        else {
            return Ok(None);
        };
        if a != b || self.linked.contains_key(&(a, b)) {
            return Ok(None);
        }
        let found = self.disks.untouched(a)?;
        if let Some(inode) = &found {
            self.remember(inode, inode, &[]);
        }
        Ok(found)
    }

    /// Enters a directory that is equal on both disks: its names have the same inode numbers, but
    /// these inodes may have changed.
    fn enter_untouched(&mut self, path: Path, inode: &Inode) -> Result<Option<Frame>, Error> {
        if inode.kind != Kind::Directory {
            return Ok(None);
        }
        self.note_entered(0, inode.number)?;
        self.note_entered(1, inode.number)?;
        let mut children = Children::new();
        for (name, child) in self.disks.a.entries(inode)? {
            let numbers = Numbers {
                a: Some(child),
                b: Some(child),
            };
            children.insert(name, numbers);
        }
        Ok(Some(Frame {
            path,
            children: children.into_iter(),
        }))
    }

    fn enter(
        &mut self,
        path: Path,
        before: Option<Inode>,
        after: Option<Inode>,
    ) -> Result<Option<Frame>, Error> {
        let is_directory = |inode: &Inode| inode.kind == Kind::Directory;
        let before = before.filter(is_directory);
        let after = after.filter(is_directory);
        if before.is_none() && after.is_none() {
            return Ok(None);
        }
        let mut children = Children::new();
        if let Some(directory) = before {
            self.note_entered(0, directory.number)?;
            for (name, child) in self.disks.a.entries(&directory)? {
                children.entry(name).or_default().a = Some(child);
            }
        }
        if let Some(directory) = after {
            self.note_entered(1, directory.number)?;
            for (name, child) in self.disks.b.entries(&directory)? {
                children.entry(name).or_default().b = Some(child);
            }
        }
        Ok(Some(Frame {
            path,
            children: children.into_iter(),
        }))
    }

    fn note_entered(&mut self, side: usize, number: u32) -> Result<(), Error> {
        if self.entered[side].insert(number) {
            return Ok(());
        }
        Err(Error::Damaged(format!(
            "the directory of inode {number} is in two places"
        )))
    }

    fn compare(
        &mut self,
        path: &Path,
        before: Option<&Inode>,
        after: Option<&Inode>,
    ) -> Result<(), Error> {
        let (change, what) = match (before, after) {
            (Some(x), Some(y)) => (ChangeKind::Changed, self.aspects(x, y)?),
            (Some(_), None) => (ChangeKind::Removed, Vec::new()),
            (None, _) => (ChangeKind::Added, Vec::new()),
        };
        if change == ChangeKind::Changed && what.is_empty() {
            return Ok(());
        }
        let before = before.map(|inode| self.disks.a.node(inode)).transpose()?;
        let after = after.map(|inode| self.disks.b.node(inode)).transpose()?;
        self.changes.push(Change {
            path: path.clone(),
            change,
            what,
            before,
            after,
        });
        Ok(())
    }

    /// How two inodes differ. A file with several names is compared once.
    fn aspects(&mut self, x: &Inode, y: &Inode) -> Result<Vec<Aspect>, Error> {
        if let Some(known) = self.linked.get(&(x.number, y.number)) {
            return Ok(known.clone());
        }
        let found = self.differences(x, y)?;
        self.remember(x, y, &found);
        Ok(found)
    }

    fn remember(&mut self, x: &Inode, y: &Inode, found: &[Aspect]) {
        let is_linked = x.kind == Kind::File && (x.links > 1 || y.links > 1);
        if is_linked && self.linked.len() < MAX_LINKED {
            self.linked.insert((x.number, y.number), found.to_vec());
        }
    }

    fn differences(&self, x: &Inode, y: &Inode) -> Result<Vec<Aspect>, Error> {
        let Pair { a, b, .. } = &self.disks;
        let mut found = if x.kind == y.kind {
            self.kind_differences(x, y)?
        } else {
            vec![Aspect::Kind]
        };
        let mut add = |differs: bool, aspect| found.extend(differs.then_some(aspect));
        add(x.mode != y.mode, Aspect::Mode);
        add((x.uid, x.gid) != (y.uid, y.gid), Aspect::Owner);
        add(a.xattrs(x)? != b.xattrs(y)?, Aspect::Xattrs);
        let modified = |inode: &Inode| (inode.modified_unix_s, inode.modified_ns);
        add(
            self.options.times && modified(x) != modified(y),
            Aspect::Modified,
        );
        Ok(found)
    }

    /// The differences that only files, links or devices can have.
    fn kind_differences(&self, x: &Inode, y: &Inode) -> Result<Vec<Aspect>, Error> {
        let Pair { a, b, .. } = &self.disks;
        let differs = match x.kind {
            Kind::File if x.size != y.size => return Ok(vec![Aspect::Size, Aspect::Content]),
            Kind::File => !self.disks.is_content_same(x, y)?,
            Kind::Symlink => a.node(x)?.target != b.node(y)?.target,
            Kind::CharDevice | Kind::BlockDevice => x.device() != y.device(),
            Kind::Directory | Kind::Fifo | Kind::Socket => false,
        };
        let aspect = match x.kind {
            Kind::File => Aspect::Content,
            Kind::Symlink => Aspect::Target,
            _ => Aspect::Device,
        };
        Ok(Vec::from_iter(differs.then_some(aspect)))
    }
}
