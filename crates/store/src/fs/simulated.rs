//! A file system in memory that fails and loses power on command.
//!
//! Every changing operation is counted. At a chosen one it stops (this and everything after it
//! fails, as for a process that was killed), fails once with an errno, or, if it is a write, stores
//! half of its bytes and fails then. [`Simulated::after_power_loss`] then tells what a machine
//! could find after a restart, under some assumptions about what was never synced:
//!
//! | [`Loss`] | content of files | entries of directories |
//! |---|---|---|
//! | `Nothing` | kept | kept: only the process died |
//! | `Content` | lost: empty | kept |
//! | `Everything` | lost: empty | lost |
//! | `AllButRemovals` | lost: empty | lost, but what was removed stays so |
//! | `OtherDevices` | lost on all devices but the first | likewise: their journals are not one |
//!
//! Each directory of the root is a device of its own: there are no links between them.
//!
//! A sync that fails has dropped what it was to write: a later one of the same file succeeds and
//! makes nothing durable, as with a kernel that has reported its error once.
//!
//! A rename is one change of both directories. Syncing a directory makes its changes durable, and
//! with them every earlier change of any directory they also touched, as a journal does.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::io::{self, Cursor, Read};
use std::ops::Range;
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use super::{Entry, FileWriter, Fs, Kind, Lock, ReadAt, Stat};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The process is killed before operation k.
    StopAt(usize),
    /// Operation k fails, others work.
    ErrorAt(usize, io::ErrorKind),
    /// Operation k, if it writes, stores half of its bytes and fails; others work.
    ShortWrite(usize, io::ErrorKind),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Loss {
    Nothing,
    Content,
    Everything,
    AllButRemovals,
    OtherDevices,
}

type Inode = usize;
const ROOT: Inode = 0;

#[derive(Debug, Clone)]
enum Node {
    /// Shared with what a power loss leaves, which is asked for many times.
    File {
        bytes: Arc<[u8]>,
        synced: Arc<[u8]>,
        sealed: bool,
        doubtful: bool,
        /// What was not synced is only in memory, and stays there.
        dropped: bool,
    },
    Dir {
        entries: BTreeMap<OsString, Inode>,
        synced: BTreeMap<OsString, Inode>,
    },
}

/// One change of one or two directories: entries that went and entries that came.
#[derive(Debug, Clone)]
struct Change {
    gone: Option<(Inode, OsString)>,
    come: Option<(Inode, OsString, Inode)>,
}

impl Change {
    fn dirs(&self) -> impl Iterator<Item = Inode> {
        let gone = self.gone.as_ref().map(|(dir, _)| *dir);
        gone.into_iter()
            .chain(self.come.as_ref().map(|(dir, ..)| *dir))
    }
}

#[derive(Debug, Default)]
struct State {
    nodes: Vec<Node>,
    unsynced: Vec<Change>,
    locked: BTreeSet<Inode>,
    /// The most locks that were held at once.
    locked_at_once: usize,
    /// How often a file was opened to be read.
    opened: usize,
    operations: usize,
    fault: Option<Fault>,
}

#[derive(Debug, Clone)]
pub(crate) struct Simulated {
    state: Arc<Mutex<State>>,
}

struct HeldLock {
    state: Arc<Mutex<State>>,
    inode: Inode,
}

impl Drop for HeldLock {
    fn drop(&mut self) {
        self.state.lock().unwrap().locked.remove(&self.inode);
    }
}

impl Simulated {
    pub(crate) fn new() -> Self {
        let state = State {
            nodes: vec![empty_dir()],
            ..State::default()
        };
        Self {
            state: Arc::new(Mutex::new(state)),
        }
    }

    pub(crate) fn arm(&self, fault: Fault) {
        let mut state = self.state();
        (state.operations, state.fault) = (0, Some(fault));
    }

    /// Changing operations since the file system was armed.
    pub(crate) fn operations(&self) -> usize {
        self.state().operations
    }

    pub(crate) fn locked_at_once(&self) -> usize {
        self.state().locked_at_once
    }

    pub(crate) fn opened(&self) -> usize {
        self.state().opened
    }

    pub(crate) fn after_power_loss(&self, loss: Loss) -> Self {
        let state = self.state();
        let kept = if loss == Loss::OtherDevices {
            state.first_device()
        } else {
            BTreeSet::new()
        };
        let loss_of = |inode| {
            if kept.contains(&inode) {
                Loss::Nothing
            } else {
                loss
            }
        };
        let mut nodes: Vec<_> = (0..)
            .zip(&state.nodes)
            .map(|(inode, node)| after_loss(node, loss_of(inode)))
            .collect();
        if loss == Loss::AllButRemovals {
            state.redo_removals(&mut nodes);
        }
        let state = State {
            nodes,
            ..State::default()
        };
        Self {
            state: Arc::new(Mutex::new(state)),
        }
    }

    /// Every path that exists, for comparing.
    pub(crate) fn paths(&self) -> Vec<PathBuf> {
        let state = self.state();
        let mut found = Vec::new();
        state.collect(ROOT, Path::new("/"), &mut found);
        found
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Adds to a file's content: one operation.
    fn append(&self, inode: Inode, content: &[u8]) -> io::Result<()> {
        let mut state = self.state();
        let stored = state.count_write(content.len());
        let (len, failure) = match stored {
            Ok(()) => (content.len(), Ok(())),
            Err((len, error)) => (len, Err(error)),
        };
        if let Node::File { bytes, .. } = &mut state.nodes[inode]
            && len > 0
        {
            *bytes = [bytes, &content[..len]].concat().into();
        }
        failure
    }

    fn changing(&self) -> io::Result<MutexGuard<'_, State>> {
        let mut state = self.state();
        state.count()?;
        Ok(state)
    }
}

fn empty_file() -> Node {
    file(Arc::default(), Arc::default())
}

fn file(bytes: Arc<[u8]>, synced: Arc<[u8]>) -> Node {
    Node::File {
        bytes,
        synced,
        sealed: false,
        doubtful: false,
        dropped: false,
    }
}

fn empty_dir() -> Node {
    Node::Dir {
        entries: BTreeMap::new(),
        synced: BTreeMap::new(),
    }
}

fn device(path: &Path) -> Option<Component<'_>> {
    path.components().nth(1)
}

fn names_of(node: &Node, inode: Inode) -> u64 {
    match node {
        Node::Dir { entries, .. } => {
            entries.values().filter(|found| **found == inode).count() as u64
        }
        Node::File { .. } => 0,
    }
}

fn after_loss(node: &Node, loss: Loss) -> Node {
    match node {
        Node::File { .. } if loss == Loss::Nothing => node.clone(),
        Node::File { synced, .. } => file(synced.clone(), synced.clone()),
        Node::Dir { entries, synced } => {
            let entries = if matches!(loss, Loss::Nothing | Loss::Content) {
                entries
            } else {
                synced
            };
            Node::Dir {
                entries: entries.clone(),
                synced: entries.clone(),
            }
        }
    }
}

impl State {
    fn count(&mut self) -> io::Result<()> {
        let operation = self.operations;
        self.operations += 1;
        match self.fault {
            Some(Fault::StopAt(at)) if operation >= at => Err(io::Error::other("killed")),
            Some(Fault::ErrorAt(at, kind)) if operation == at => Err(kind.into()),
            _ => Ok(()),
        }
    }

    /// How much is stored all the same, and the error.
    fn count_write(&mut self, len: usize) -> Result<(), (usize, io::Error)> {
        match self.fault {
            Some(Fault::ShortWrite(at, kind)) if self.operations == at => {
                self.operations += 1;
                Err((len / 2, kind.into()))
            }
            _ => self.count().map_err(|error| (0, error)),
        }
    }

    fn collect(&self, dir: Inode, path: &Path, found: &mut Vec<PathBuf>) {
        let Node::Dir { entries, .. } = &self.nodes[dir] else {
            return;
        };
        for (name, inode) in entries {
            let path = path.join(name);
            self.collect(*inode, &path, found);
            found.push(path);
        }
    }

    /// Everything that is or was durably below the entry of the root that was made first.
    fn first_device(&self) -> BTreeSet<Inode> {
        let mut found = BTreeSet::new();
        let mut next = Vec::new();
        next.extend(
            self.entries(ROOT)
                .ok()
                .and_then(|entries| entries.values().min()),
        );
        while let Some(inode) = next.pop() {
            if let (true, Node::Dir { entries, synced }) = (found.insert(inode), &self.nodes[inode])
            {
                next.extend(entries.values().chain(synced.values()));
            }
        }
        found
    }

    fn redo_removals(&self, nodes: &mut [Node]) {
        for removal in self.unsynced.iter().filter(|change| change.come.is_none()) {
            apply(nodes, removal, Side::Present);
            apply(nodes, removal, Side::Synced);
        }
    }

    fn entries(&self, dir: Inode) -> io::Result<&BTreeMap<OsString, Inode>> {
        match &self.nodes[dir] {
            Node::Dir { entries, .. } => Ok(entries),
            Node::File { .. } => Err(io::ErrorKind::NotADirectory.into()),
        }
    }

    fn find(&self, path: &Path) -> io::Result<Inode> {
        path.components()
            .try_fold(ROOT, |dir, component| match component {
                Component::Normal(name) => self
                    .entries(dir)?
                    .get(name)
                    .copied()
                    .ok_or(io::ErrorKind::NotFound.into()),
                _ => Ok(dir),
            })
    }

    /// The directory a path is in, and its name there.
    fn place(&self, path: &Path) -> io::Result<(Inode, OsString)> {
        let dir = self.find(path.parent().ok_or(io::ErrorKind::InvalidInput)?)?;
        self.entries(dir)?;
        Ok((
            dir,
            path.file_name()
                .ok_or(io::ErrorKind::InvalidInput)?
                .to_owned(),
        ))
    }

    fn vacant(&self, path: &Path) -> io::Result<(Inode, OsString)> {
        let (dir, name) = self.place(path)?;
        if self.entries(dir)?.contains_key(&name) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        Ok((dir, name))
    }

    fn add(&mut self, path: &Path, node: Node) -> io::Result<Inode> {
        let (dir, name) = self.vacant(path)?;
        self.nodes.push(node);
        let inode = self.nodes.len() - 1;
        self.change(Change {
            gone: None,
            come: Some((dir, name, inode)),
        });
        Ok(inode)
    }

    fn change(&mut self, change: Change) {
        apply(&mut self.nodes, &change, Side::Present);
        self.unsynced.push(change);
    }

    fn remove(&mut self, path: &Path) -> io::Result<()> {
        let place = self.place(path)?;
        self.change(Change {
            gone: Some(place),
            come: None,
        });
        Ok(())
    }

    fn move_to(&mut self, from: &Path, (dir, name): (Inode, OsString)) -> io::Result<()> {
        let inode = self.find(from)?;
        let place = self.place(from)?;
        self.change(Change {
            gone: Some(place),
            come: Some((dir, name, inode)),
        });
        Ok(())
    }

    fn sync_dir(&mut self, dir: Inode) {
        let mut dirs = BTreeSet::from([dir]);
        let mut due = vec![false; self.unsynced.len()];
        for (index, change) in self.unsynced.iter().enumerate().rev() {
            if change.dirs().any(|dir| dirs.contains(&dir)) {
                due[index] = true;
                dirs.extend(change.dirs());
            }
        }
        let mut due = due.into_iter();
        let changes = std::mem::take(&mut self.unsynced);
        let (now, later): (Vec<_>, Vec<_>) =
            changes.into_iter().partition(|_| due.next() == Some(true));
        now.iter()
            .for_each(|change| apply(&mut self.nodes, change, Side::Synced));
        self.unsynced = later;
    }
}

#[derive(Clone, Copy)]
enum Side {
    Present,
    Synced,
}

fn apply(nodes: &mut [Node], change: &Change, side: Side) {
    let mut edit = |dir: Inode, edit: &mut dyn FnMut(&mut BTreeMap<OsString, Inode>)| match (
        &mut nodes[dir],
        side,
    ) {
        (Node::Dir { entries, .. }, Side::Present) => edit(entries),
        (Node::Dir { synced, .. }, Side::Synced) => edit(synced),
        (Node::File { .. }, _) => unreachable!("changes are made to directories"),
    };
    if let Some((dir, name)) = &change.gone {
        edit(*dir, &mut |entries| {
            entries.retain(|found, _| found != name)
        });
    }
    if let Some((dir, name, inode)) = &change.come {
        edit(*dir, &mut |entries| {
            entries.extend([(name.clone(), *inode)])
        });
    }
}

/// Zeros are written like everything else: there are no holes.
struct Writer {
    fs: Simulated,
    inode: Inode,
}

impl FileWriter for Writer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.fs.append(self.inode, bytes)
    }

    fn skip(&mut self, bytes: u64) -> io::Result<()> {
        self.fs.append(self.inode, &vec![0; bytes as usize])
    }

    fn finish(&mut self) -> io::Result<()> {
        self.fs.changing().map(drop)
    }
}

/// A file in memory has no holes.
impl ReadAt for Vec<u8> {
    fn bytes(&self) -> io::Result<u64> {
        Ok(self.len() as u64)
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.get(offset as usize..)
            .unwrap_or_default()
            .read_exact(buffer)
    }

    fn next_data(&self, offset: u64) -> io::Result<Option<Range<u64>>> {
        let end = self.len() as u64;
        Ok((offset < end).then_some(offset..end))
    }
}

impl Fs for Simulated {
    fn has_paths(&self) -> bool {
        false
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn Read + Send>> {
        let mut state = self.state();
        state.opened += 1;
        match &state.nodes[state.find(path)?] {
            Node::File { bytes, .. } => Ok(Box::new(Cursor::new(bytes.clone()))),
            Node::Dir { .. } => Err(io::ErrorKind::IsADirectory.into()),
        }
    }

    fn open_at(&self, path: &Path) -> io::Result<Box<dyn ReadAt>> {
        let state = self.state();
        match &state.nodes[state.find(path)?] {
            Node::File { bytes, .. } => Ok(Box::new(bytes.to_vec())),
            Node::Dir { .. } => Err(io::ErrorKind::IsADirectory.into()),
        }
    }

    fn stat(&self, path: &Path) -> io::Result<Stat> {
        let state = self.state();
        let inode = state.find(path)?;
        let (len, doubtful) = match &state.nodes[inode] {
            Node::File {
                bytes, doubtful, ..
            } => (bytes.len() as u64, *doubtful),
            Node::Dir { .. } => (0, false),
        };
        let links = state.nodes.iter().map(|node| names_of(node, inode)).sum();
        Ok(Stat {
            len,
            disk_bytes: len,
            links,
            id: (0, inode as u64),
            // The numbers of its files are not used again.
            changed: (0, 0),
            doubtful,
            own: true,
        })
    }

    fn kind(&self, path: &Path) -> io::Result<Kind> {
        let state = self.state();
        match &state.nodes[state.find(path)?] {
            Node::File { .. } => Ok(Kind::File),
            Node::Dir { .. } => Ok(Kind::Dir),
        }
    }

    fn list(&self, path: &Path) -> io::Result<Vec<Entry>> {
        let state = self.state();
        let entries = state.entries(state.find(path)?)?.iter();
        let kind = |inode: &Inode| match state.nodes[*inode] {
            Node::File { .. } => Kind::File,
            Node::Dir { .. } => Kind::Dir,
        };
        Ok(entries
            .map(|(name, inode)| Entry {
                name: name.clone(),
                kind: kind(inode),
            })
            .collect())
    }

    fn free_bytes(&self, _: &Path) -> io::Result<u64> {
        Ok(u64::MAX)
    }

    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.changing()?.add(path, empty_dir()).map(drop)
    }

    /// Two operations, so that a stop or an error between them leaves an empty file.
    fn create(&self, path: &Path, content: &[u8]) -> io::Result<()> {
        let inode = self.changing()?.add(path, empty_file())?;
        self.append(inode, content)
    }

    fn writer(&self, path: &Path) -> io::Result<Box<dyn FileWriter>> {
        let inode = self.changing()?.add(path, empty_file())?;
        Ok(Box::new(Writer {
            fs: self.clone(),
            inode,
        }))
    }

    fn copy(&self, from: &Path, to: &Path) -> io::Result<()> {
        let mut content = Vec::new();
        self.open(from)?.read_to_end(&mut content)?;
        self.create(to, &content)
    }

    fn clone_file(&self, _: &Path, _: &Path) -> io::Result<bool> {
        Ok(false)
    }

    fn seal(&self, path: &Path) -> io::Result<()> {
        let mut state = self.changing()?;
        let inode = state.find(path)?;
        if let Node::File {
            sealed, doubtful, ..
        } = &mut state.nodes[inode]
        {
            (*sealed, *doubtful) = (true, false);
        }
        Ok(())
    }

    fn doubtful(&self, path: &Path) -> io::Result<()> {
        let mut state = self.changing()?;
        let inode = state.find(path)?;
        if let Node::File {
            sealed: true,
            doubtful,
            ..
        } = &mut state.nodes[inode]
        {
            *doubtful = true;
        }
        Ok(())
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let mut state = self.changing()?;
        let place = state.place(to)?;
        state.move_to(from, place)
    }

    fn rename_noreplace(&self, from: &Path, to: &Path) -> io::Result<()> {
        let mut state = self.changing()?;
        state.find(from)?;
        let place = state.vacant(to)?;
        state.move_to(from, place)
    }

    /// Both changes are of one directory, so they are synced together.
    fn exchange(&self, a: &Path, b: &Path) -> io::Result<()> {
        let mut state = self.changing()?;
        let at_a = state.find(a)?;
        let at_b = state.find(b)?;
        for (path, inode) in [(a, at_b), (b, at_a)] {
            let (dir, name) = state.place(path)?;
            state.change(Change {
                gone: None,
                come: Some((dir, name, inode)),
            });
        }
        Ok(())
    }

    fn hard_link(&self, from: &Path, to: &Path) -> io::Result<()> {
        let mut state = self.changing()?;
        let inode = state.find(from)?;
        if device(from) != device(to) {
            return Err(io::ErrorKind::CrossesDevices.into());
        }
        let (dir, name) = state.vacant(to)?;
        state.change(Change {
            gone: None,
            come: Some((dir, name, inode)),
        });
        Ok(())
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        let mut state = self.changing()?;
        state.find(path)?;
        state.remove(path)
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        let mut state = self.changing()?;
        let inode = state.find(path)?;
        if !state.entries(inode)?.is_empty() {
            return Err(io::ErrorKind::DirectoryNotEmpty.into());
        }
        state.remove(path)
    }

    fn sync_file(&self, path: &Path) -> io::Result<()> {
        let mut state = self.state();
        let counted = state.count();
        let inode = state.find(path)?;
        if let Node::File {
            bytes,
            synced,
            dropped,
            ..
        } = &mut state.nodes[inode]
        {
            *dropped |= counted.is_err();
            if !*dropped {
                synced.clone_from(bytes);
            }
        }
        counted
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        let mut state = self.changing()?;
        let inode = state.find(path)?;
        state.sync_dir(inode);
        Ok(())
    }

    fn lock(&self, path: &Path) -> io::Result<Lock> {
        self.try_lock(path)?
            .ok_or_else(|| panic!("waiting for {} would never end", path.display()))
    }

    fn try_lock(&self, path: &Path) -> io::Result<Option<Lock>> {
        let inode = match self.kind(path) {
            Ok(_) => self.state().find(path)?,
            Err(_) => self.changing()?.add(path, empty_file())?,
        };
        let mut state = self.state();
        let fresh = state.locked.insert(inode);
        state.locked_at_once = state.locked_at_once.max(state.locked.len());
        drop(state);
        Ok(fresh.then(|| {
            Lock::new(HeldLock {
                state: self.state.clone(),
                inode,
            })
        }))
    }
}
