//! Everything that the guest's kernel knows of one mount: its files, by number, identity and name.
//!
//! ```text
//!   kernel ── node ──► File { identity, names, attributes }
//!                         ▲          ▲
//!   host ──── identity ───┘          └── directory and name ── host
//! ```
//!
//! Always: a node's number is never used for another file. A file is here as long as the kernel
//! may use its number, or as a directory of such a file.

use std::collections::{HashMap, HashSet};

use rustix::io::Errno;
use sandtree_proto::mount::{Attr, FileId, Node, PATH_MAX, Version};

/// The node of the mounted directory.
pub const ROOT: u64 = 1;
/// How many names without a file the kernel may remember; it asks for more each time.
const ABSENT_MAX: usize = 16_384;

const KIND: u32 = libc::S_IFMT;

/// Which file, for one who knows what kind it is: a number may be used again with the same time of
/// birth, where a file system has none.
type Identity = (FileId, u32);

/// What a name keeps when another file gets it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Names {
    /// Nothing: the other file has a number of its own.
    OfFiles,
    /// Its number. An overlay never forgets a name whose number went stale.
    OfNumbers,
}

#[derive(Debug)]
pub struct Table {
    keep: Names,
    files: HashMap<u64, File>,
    by_identity: HashMap<Identity, u64>,
    /// By directory.
    by_name: HashMap<u64, HashMap<Vec<u8>, u64>>,
    /// Names without a file, by directory.
    absent: HashMap<u64, HashSet<Vec<u8>>>,
    absent_count: usize,
    next: u64,
    /// Files that the host watches or keeps for nothing.
    forgotten: Vec<FileId>,
}

#[derive(Debug)]
pub struct File {
    id: FileId,
    kind: u32,
    /// Directory and name. More than one for a file with hard links. A directory has one.
    names: Vec<(u64, Vec<u8>)>,
    /// The last name is gone, and the host keeps the file.
    kept: bool,
    /// How many answers with this node the kernel has not given back.
    lookups: u64,
    /// Files below this directory.
    children: u64,
    /// The version of the data that the kernel may have cached.
    seen: Version,
    /// What the host said last, if it would report a change.
    fresh: Option<Attr>,
}

impl File {
    pub fn is_directory(&self) -> bool {
        self.kind == libc::S_IFDIR
    }

    pub fn id(&self) -> FileId {
        self.id
    }

    pub fn seen(&self) -> Version {
        self.seen
    }

    pub fn fresh(&self) -> Option<&Attr> {
        self.fresh.as_ref()
    }

    pub fn is_kept(&self) -> bool {
        self.kept
    }

    /// The error for a file without a name: nothing can be made in a removed directory, and
    /// another file has the name of a replaced one.
    fn nameless(&self) -> Errno {
        if self.is_directory() {
            Errno::NOENT
        } else {
            Errno::STALE
        }
    }
}

impl Table {
    pub fn new(keep: Names) -> Self {
        let root = File {
            id: FileId::default(),
            kind: libc::S_IFDIR,
            names: Vec::new(),
            kept: false,
            lookups: 1,
            children: 0,
            seen: Version::default(),
            fresh: None,
        };
        Self {
            keep,
            files: HashMap::from([(ROOT, root)]),
            by_identity: HashMap::new(),
            by_name: HashMap::new(),
            absent: HashMap::new(),
            absent_count: 0,
            next: ROOT + 1,
            forgotten: Vec::new(),
        }
    }

    pub fn get(&self, node: u64) -> Option<&File> {
        self.files.get(&node)
    }

    pub fn find(&self, id: FileId, kind: u32) -> Option<u64> {
        self.by_identity.get(&(id, kind)).copied()
    }

    pub fn named(&self, directory: u64, name: &[u8]) -> Option<u64> {
        self.by_name.get(&directory)?.get(name).copied()
    }

    /// Which file has a name, for the host; ino 0 if that is not known.
    pub fn file_named(&self, directory: u64, name: &[u8]) -> FileId {
        let node = self.named(directory, name);
        let file = node.and_then(|node| self.files.get(&node));
        file.map(File::id).unwrap_or_default()
    }

    pub fn nodes(&self) -> impl Iterator<Item = (u64, &File)> {
        self.files.iter().map(|(node, file)| (*node, file))
    }

    /// The names of a directory that the kernel may remember, with or without a file.
    pub fn names_in(&self, directory: u64) -> Vec<Vec<u8>> {
        let present = self.by_name.get(&directory).into_iter();
        let present = present.flat_map(|names| names.keys().cloned());
        let absent = self.absent.get(&directory).into_iter();
        present.chain(absent.flatten().cloned()).collect()
    }

    /// The names of one file.
    pub fn names_of(&self, node: u64) -> Vec<(u64, Vec<u8>)> {
        let file = self.files.get(&node);
        file.map(|file| file.names.clone()).unwrap_or_default()
    }

    /// A file as the host's protocol names it.
    pub fn at(&self, node: u64) -> Result<Node, Errno> {
        let file = self.files.get(&node).ok_or(Errno::STALE)?;
        if file.kept {
            return Ok(Node {
                path: Vec::new(),
                id: file.id,
                kept: true,
            });
        }
        Ok(Node {
            path: self.path(node)?,
            id: file.id,
            kept: false,
        })
    }

    fn path(&self, node: u64) -> Result<Vec<u8>, Errno> {
        let mut parts = Vec::new();
        let mut length = 0;
        let mut at = node;
        while at != ROOT {
            let file = self.files.get(&at).ok_or(Errno::STALE)?;
            let (directory, name) = file.names.first().ok_or(file.nameless())?;
            parts.push(name.as_slice());
            length += name.len() + 1;
            if length > PATH_MAX {
                return Err(Errno::NAMETOOLONG);
            }
            at = *directory;
        }
        parts.reverse();
        Ok(parts.join(&b'/'))
    }

    /// The mounted directory, as the host has it now.
    pub fn set_root(&mut self, attr: &Attr) {
        self.by_identity.retain(|_, node| *node != ROOT);
        self.by_identity.insert((attr.id, libc::S_IFDIR), ROOT);
        if let Some(root) = self.files.get_mut(&ROOT) {
            root.id = attr.id;
        }
        self.refresh(ROOT, attr);
    }

    /// The node of what the host says has this name; the kernel gets it once more.
    pub fn learn(&mut self, directory: u64, name: &[u8], attr: &Attr) -> u64 {
        let identity = (attr.id, attr.mode & KIND);
        let node = match self.rebound(directory, name, identity) {
            Some(node) => node,
            None => match self.by_identity.get(&identity) {
                Some(node) => *node,
                None => self.add(identity, attr),
            },
        };
        self.place(node, directory, name);
        if let Some(file) = self.files.get_mut(&node) {
            file.lookups += 1;
        }
        self.refresh(node, attr);
        node
    }

    /// The node of a new file without a name, which the host keeps.
    pub fn learn_unnamed(&mut self, attr: &Attr) -> u64 {
        let node = self.add((attr.id, attr.mode & KIND), attr);
        if let Some(file) = self.files.get_mut(&node) {
            file.kept = true;
            file.lookups = 1;
        }
        node
    }

    /// The number that a name keeps, now for the file with this identity.
    fn rebound(&mut self, directory: u64, name: &[u8], identity: Identity) -> Option<u64> {
        if self.keep == Names::OfFiles {
            return None;
        }
        let node = self.named(directory, name);
        let file = node.and_then(|node| self.files.get_mut(&node));
        let Some(file) = file.filter(|file| file.kind == identity.1) else {
            // Another name of the same file has another number.
            self.by_identity.remove(&identity);
            return None;
        };
        let before = (std::mem::replace(&mut file.id, identity.0), file.kind);
        if before != identity {
            if self.by_identity.get(&before).copied() == node {
                self.by_identity.remove(&before);
            }
            self.by_identity.extend(node.map(|node| (identity, node)));
        }
        node
    }

    fn add(&mut self, identity: Identity, attr: &Attr) -> u64 {
        let node = self.next;
        self.next += 1;
        self.by_identity.insert(identity, node);
        let file = File {
            id: identity.0,
            kind: identity.1,
            names: Vec::new(),
            kept: false,
            lookups: 0,
            children: 0,
            seen: attr.version,
            fresh: None,
        };
        self.files.insert(node, file);
        node
    }

    /// Gives a file a name, which no other file has from now on.
    pub fn place(&mut self, node: u64, directory: u64, name: &[u8]) {
        self.not_absent(directory, name);
        if self.named(directory, name) == Some(node) {
            return;
        }
        self.displace(directory, name);
        let Some(file) = self.files.get_mut(&node) else {
            return;
        };
        if std::mem::take(&mut file.kept) {
            // Requests that are under way name it as kept. The report follows them.
            self.forgotten.push(file.id);
        }
        let earlier = if file.is_directory() {
            std::mem::take(&mut file.names)
        } else {
            Vec::new()
        };
        file.names.push((directory, name.to_vec()));
        let names = self.by_name.entry(directory).or_default();
        names.insert(name.to_vec(), node);
        if let Some(parent) = self.files.get_mut(&directory) {
            parent.children += 1;
        }
        for (directory, name) in earlier {
            self.unname(directory, &name);
            self.childless(directory);
        }
    }

    /// Takes a name from the file that has it. Returns that file.
    pub fn displace(&mut self, directory: u64, name: &[u8]) -> Option<u64> {
        let node = self.unname(directory, name)?;
        if let Some(file) = self.files.get_mut(&node) {
            file.names
                .retain(|known| known.0 != directory || known.1 != name);
        }
        self.childless(directory);
        Some(node)
    }

    fn unname(&mut self, directory: u64, name: &[u8]) -> Option<u64> {
        let names = self.by_name.get_mut(&directory)?;
        let node = names.remove(name);
        if names.is_empty() {
            self.by_name.remove(&directory);
        }
        node
    }

    /// The host keeps a file that has lost its last name.
    pub fn keep(&mut self, node: u64) {
        if let Some(file) = self.files.get_mut(&node) {
            file.kept = file.names.is_empty() && file.kind == libc::S_IFREG;
        }
    }

    /// Another name of the file is tried first from now on: this one may be another's.
    pub fn doubt_name(&mut self, directory: u64, name: &[u8]) {
        let Some(node) = self.named(directory, name) else {
            return;
        };
        if let Some(file) = self.files.get_mut(&node)
            && let Some(at) = file.names.iter().position(|known| known.1 == name)
        {
            let doubted = file.names.remove(at);
            file.names.push(doubted);
        }
    }

    fn childless(&mut self, directory: u64) {
        self.one_child_less(directory);
        self.release(directory);
    }

    fn one_child_less(&mut self, directory: u64) {
        if let Some(parent) = self.files.get_mut(&directory) {
            parent.children = parent.children.saturating_sub(1);
        }
    }

    /// The kernel gives back `lookups` answers with this node.
    pub fn forget(&mut self, node: u64, lookups: u64) {
        if let Some(file) = self.files.get_mut(&node) {
            file.lookups = file.lookups.saturating_sub(lookups);
        }
        self.release(node);
    }

    /// The files that the host need not watch or keep any longer, since the last call.
    pub fn take_forgotten(&mut self) -> Vec<FileId> {
        std::mem::take(&mut self.forgotten)
    }

    /// How many [`take_forgotten`](Self::take_forgotten) would return.
    pub fn forgotten(&self) -> usize {
        self.forgotten.len()
    }

    /// Drops a file that the kernel does not know any longer, and directories that stayed for it
    /// alone: a tree may be deeper than a stack.
    fn release(&mut self, node: u64) {
        let mut waiting = vec![node];
        while let Some(node) = waiting.pop() {
            let is_used = |file: &File| file.lookups > 0 || file.children > 0;
            if node == ROOT || self.files.get(&node).is_none_or(is_used) {
                continue;
            }
            let Some(file) = self.files.remove(&node) else {
                continue;
            };
            self.drop_file(node, &file);
            for (directory, name) in &file.names {
                self.unname(*directory, name);
                self.one_child_less(*directory);
                waiting.push(*directory);
            }
        }
    }

    fn drop_file(&mut self, node: u64, file: &File) {
        if let Some(names) = self.absent.remove(&node) {
            self.absent_count -= names.len();
        }
        let identity = (file.id, file.kind);
        if self.by_identity.get(&identity) != Some(&node) {
            // Another number stands for the same file.
            return;
        }
        self.by_identity.remove(&identity);
        if file.is_directory() || file.kept {
            self.forgotten.push(file.id);
        }
    }

    /// Remembers what the host says of a file, as long as it reports changes.
    pub fn refresh(&mut self, node: u64, attr: &Attr) {
        if let Some(file) = self.files.get_mut(&node) {
            file.fresh = attr.watched.then_some(*attr);
        }
    }

    /// What the host said of a file may not hold any longer.
    pub fn stale(&mut self, node: u64) {
        if let Some(file) = self.files.get_mut(&node) {
            file.fresh = None;
        }
    }

    /// Remembers the version of a file's data. Returns whether the kernel may have another one
    /// cached. `before` is the version that the guest's own change found.
    pub fn see(&mut self, node: u64, attr: &Attr, before: Option<Version>) -> bool {
        let Some(file) = self.files.get_mut(&node) else {
            return false;
        };
        let expected = before.unwrap_or(attr.version);
        let is_other = expected != file.seen;
        file.seen = attr.version;
        is_other && file.kind == libc::S_IFREG
    }

    /// The kernel is about to remember that no file has this name. Returns whether it may.
    pub fn remember_absent(&mut self, directory: u64, name: &[u8]) -> bool {
        if self.absent_count >= ABSENT_MAX || !self.files.contains_key(&directory) {
            return false;
        }
        let names = self.absent.entry(directory).or_default();
        self.absent_count += usize::from(names.insert(name.to_vec()));
        true
    }

    fn not_absent(&mut self, directory: u64, name: &[u8]) {
        let Some(names) = self.absent.get_mut(&directory) else {
            return;
        };
        self.absent_count -= usize::from(names.remove(name));
        if names.is_empty() {
            self.absent.remove(&directory);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attr(ino: u64, mode: u32) -> Attr {
        Attr {
            id: FileId { ino, born_ns: 5 },
            mode,
            watched: true,
            ..Attr::default()
        }
    }

    #[test]
    fn a_file_below_a_renamed_directory_has_its_new_path() {
        let mut table = Table::new(Names::OfFiles);
        let directory = table.learn(ROOT, b"a", &attr(2, libc::S_IFDIR));
        let file = table.learn(directory, b"f", &attr(3, libc::S_IFREG));
        table.displace(ROOT, b"a");
        table.place(directory, ROOT, b"b");
        assert_eq!(table.at(file).unwrap().path, b"b/f");
    }

    #[test]
    fn a_file_that_loses_one_of_two_names_has_the_other() {
        let mut table = Table::new(Names::OfFiles);
        let file = table.learn(ROOT, b"a", &attr(3, libc::S_IFREG));
        assert_eq!(table.learn(ROOT, b"b", &attr(3, libc::S_IFREG)), file);
        table.displace(ROOT, b"a");
        table.keep(file);
        let at = table.at(file).unwrap();
        assert_eq!((at.path.as_slice(), at.kept), (b"b".as_slice(), false));
        table.displace(ROOT, b"b");
        table.keep(file);
        assert!(table.at(file).unwrap().kept);
        table.forget(file, 2);
        assert_eq!(table.take_forgotten(), [attr(3, 0).id]);
    }

    #[test]
    fn a_file_without_a_name_is_kept_until_it_gets_one() {
        let mut table = Table::new(Names::OfFiles);
        let file = table.learn_unnamed(&attr(3, libc::S_IFREG));
        assert!(table.at(file).unwrap().kept);
        assert_eq!(table.learn(ROOT, b"a", &attr(3, libc::S_IFREG)), file);
        let at = table.at(file).unwrap();
        assert_eq!((at.path.as_slice(), at.kept), (b"a".as_slice(), false));
        assert_eq!(table.take_forgotten(), [attr(3, 0).id]);
        table.learn(ROOT, b"c", &attr(3, libc::S_IFREG));
        assert!(table.take_forgotten().is_empty(), "it is kept no longer");
        assert_eq!(table.file_named(ROOT, b"a"), attr(3, 0).id);
        assert_eq!(table.file_named(ROOT, b"b").ino, 0);
    }

    #[test]
    fn a_directory_stays_until_its_last_file_is_forgotten() {
        let mut table = Table::new(Names::OfFiles);
        let directory = table.learn(ROOT, b"a", &attr(2, libc::S_IFDIR));
        let file = table.learn(directory, b"f", &attr(3, libc::S_IFREG));
        table.forget(directory, 1);
        assert_eq!(table.at(file).unwrap().path, b"a/f");
        assert!(table.take_forgotten().is_empty());
        table.forget(file, 1);
        assert!(table.get(directory).is_none());
        assert_eq!(table.take_forgotten(), [attr(2, 0).id]);
    }

    #[test]
    fn another_file_of_the_same_name_has_another_node() {
        let mut table = Table::new(Names::OfFiles);
        let old = table.learn(ROOT, b"a", &attr(3, libc::S_IFREG));
        let new = table.learn(ROOT, b"a", &attr(4, libc::S_IFREG));
        assert_ne!(old, new);
        assert_eq!(table.at(new).unwrap().path, b"a");
        assert_eq!(table.at(old), Err(Errno::STALE));
    }

    #[test]
    fn below_an_overlay_a_name_keeps_its_number() {
        let mut table = Table::new(Names::OfNumbers);
        let old = table.learn(ROOT, b"a", &attr(3, libc::S_IFREG));
        let new = table.learn(ROOT, b"a", &attr(4, libc::S_IFREG));
        assert_eq!(old, new);
        assert_eq!(table.at(new).unwrap().id.ino, 4);
        let directory = table.learn(ROOT, b"a", &attr(5, libc::S_IFDIR));
        assert_ne!(directory, new);
    }

    #[test]
    fn names_without_a_file_are_remembered_until_they_get_one() {
        let mut table = Table::new(Names::OfFiles);
        assert!(table.remember_absent(ROOT, b"a"));
        assert_eq!(table.names_in(ROOT), [b"a".to_vec()]);
        table.learn(ROOT, b"a", &attr(3, libc::S_IFREG));
        table.displace(ROOT, b"a");
        assert!(table.names_in(ROOT).is_empty());
    }
}
