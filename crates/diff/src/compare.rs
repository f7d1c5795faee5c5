//! The comparison: one walk over both trees at once.
//!
//! Where the caller knows which ranges of the disks can differ, an inode with everything it refers
//! to outside of them is not looked at further. What is in its directory is, because a file changes
//! without its directory changing.
//!
//! Always: memory is the names of the directories on the way to where the walk is, and the changes
//! that were found. Each directory is entered once.

use std::collections::{BTreeMap, HashMap, HashSet, btree_map};
use std::ops::Range;

use crate::error::require;
use crate::ext4::{FileSystem, Inode};
use crate::sides::Sides;
use crate::{Aspect, Blocks, Change, ChangeKind, Diff, Error, Kind, Path};

/// How deep a walk goes; four times what can be said to a kernel at once.
const MAX_PATH_BYTES: usize = 16 << 10;
/// Of files with several names, how many are remembered to be looked at once.
const MAX_LINKED: usize = 1 << 20;

/// What is wanted.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// A new time of modification alone is a change.
    pub times: bool,
    /// After so many changes the walk ends, and the answer is incomplete.
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

/// What must be done to the files on `a` to get those on `b`.
///
/// `changed`: ranges of bytes outside of which both disks are equal; without, all of both is read.
pub fn diff(
    a: &dyn Blocks,
    b: &dyn Blocks,
    changed: Option<&[Range<u64>]>,
    options: Options,
) -> Result<Diff, Error> {
    let sides = Sides::new(FileSystem::open(a)?, FileSystem::open(b)?, changed);
    Comparison::new(sides, options).run()
}

/// The inode that a name stands for on either side.
#[derive(Debug, Clone, Copy, Default)]
struct Pair {
    a: Option<u32>,
    b: Option<u32>,
}

type Children = BTreeMap<Box<[u8]>, Pair>;

/// A directory whose entries are visited.
struct Frame {
    path: Path,
    children: btree_map::IntoIter<Box<[u8]>, Pair>,
}

struct Comparison<'b> {
    sides: Sides<'b>,
    options: Options,
    changes: Vec<Change>,
    incomplete: Vec<String>,
    /// Something is too deep.
    has_left_out: bool,
    /// The directories that were entered: each can be in one place only.
    entered: [HashSet<u32>; 2],
    /// What was found about files that have several names.
    linked: HashMap<(u32, u32), Vec<Aspect>>,
}

impl<'b> Comparison<'b> {
    fn new(sides: Sides<'b>, options: Options) -> Self {
        let told =
            |side: &str, fs: &FileSystem<'_>| fs.incomplete().map(|what| format!("{side}: {what}"));
        let incomplete = [told("before", &sides.a), told("after", &sides.b)]
            .into_iter()
            .flatten()
            .collect();
        Self {
            sides,
            options,
            changes: Vec::new(),
            incomplete,
            has_left_out: false,
            entered: Default::default(),
            linked: HashMap::new(),
        }
    }

    fn run(mut self) -> Result<Diff, Error> {
        let root = Pair {
            a: Some(self.sides.a.root()?.number),
            b: Some(self.sides.b.root()?.number),
        };
        let mut frames = Vec::from_iter(self.visit("/".into(), root)?);
        while let Some(frame) = frames.last_mut() {
            match frame.children.next() {
                Some((name, pair)) => {
                    let path = frame.path.join(&name);
                    frames.extend(self.visit(path, pair)?);
                }
                None => drop(frames.pop()),
            }
            if self.changes.len() > self.options.max_changes {
                self.changes.truncate(self.options.max_changes);
                self.incomplete.push(format!(
                    "the first {} changes are told",
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
                "what has a path of more than {MAX_PATH_BYTES} bytes was left out"
            ));
        }
        let incomplete = Some(self.incomplete.join("; ")).filter(|what| !what.is_empty());
        Diff {
            changes: self.changes,
            incomplete,
        }
    }

    /// Compares what is at a path, and gives what is below it.
    fn visit(&mut self, path: Path, pair: Pair) -> Result<Option<Frame>, Error> {
        if path.as_bytes().len() > MAX_PATH_BYTES {
            self.has_left_out = true;
            return Ok(None);
        }
        if let Some(inode) = self.untouched(pair)? {
            return self.enter_untouched(path, &inode);
        }
        let before = pair
            .a
            .map(|number| self.sides.a.inode(number))
            .transpose()?;
        let after = pair
            .b
            .map(|number| self.sides.b.inode(number))
            .transpose()?;
        self.compare(&path, before.as_ref(), after.as_ref())?;
        self.enter(path, before, after)
    }

    /// The inode that both names stand for, if it is known to be the same on both sides.
    fn untouched(&mut self, pair: Pair) -> Result<Option<Inode>, Error> {
        let Pair {
            a: Some(a),
            b: Some(b),
        } = pair
        else {
            return Ok(None);
        };
        if a != b || self.linked.contains_key(&(a, b)) {
            return Ok(None);
        }
        let found = self.sides.untouched(a)?;
        if let Some(inode) = &found {
            self.remember(inode, inode, &[]);
        }
        Ok(found)
    }

    /// The same names stand for the same inodes; these may have changed all the same.
    fn enter_untouched(&mut self, path: Path, inode: &Inode) -> Result<Option<Frame>, Error> {
        if inode.kind != Kind::Directory {
            return Ok(None);
        }
        self.note_entered(0, inode.number)?;
        self.note_entered(1, inode.number)?;
        let entries = self.sides.a.entries(inode)?.into_iter();
        let children: Children = entries
            .map(|(name, child)| {
                (
                    name,
                    Pair {
                        a: Some(child),
                        b: Some(child),
                    },
                )
            })
            .collect();
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
        let (before, after) = (before.filter(is_directory), after.filter(is_directory));
        if before.is_none() && after.is_none() {
            return Ok(None);
        }
        let mut children = Children::new();
        if let Some(directory) = before {
            self.note_entered(0, directory.number)?;
            for (name, child) in self.sides.a.entries(&directory)? {
                children.entry(name).or_default().a = Some(child);
            }
        }
        if let Some(directory) = after {
            self.note_entered(1, directory.number)?;
            for (name, child) in self.sides.b.entries(&directory)? {
                children.entry(name).or_default().b = Some(child);
            }
        }
        Ok(Some(Frame {
            path,
            children: children.into_iter(),
        }))
    }

    fn note_entered(&mut self, side: usize, number: u32) -> Result<(), Error> {
        let is_new = self.entered[side].insert(number);
        require(is_new, || {
            format!("the directory of inode {number} is in two places")
        })
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
        let before = before.map(|inode| self.sides.a.node(inode)).transpose()?;
        let after = after.map(|inode| self.sides.b.node(inode)).transpose()?;
        self.changes.push(Change {
            path: path.clone(),
            change,
            what,
            before,
            after,
        });
        Ok(())
    }

    /// A file with several names is compared once.
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
        let Sides { a, b, .. } = &self.sides;
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

    /// What only files, links or devices can differ in.
    fn kind_differences(&self, x: &Inode, y: &Inode) -> Result<Vec<Aspect>, Error> {
        let Sides { a, b, .. } = &self.sides;
        let differs = match x.kind {
            Kind::File if x.size != y.size => return Ok(vec![Aspect::Size, Aspect::Content]),
            Kind::File => !self.sides.is_content_same(x, y)?,
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
