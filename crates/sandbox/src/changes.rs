//! The changes that a sandbox has made on top of a copy-on-write mount, and writing them to the
//! host's directory.
//!
//! ```text
//!   the sandbox's disk ──► upper directory ─┐
//!                                           ├──► changes ──► apply: each file replaced as a whole
//!   the host's directory, as it is now ─────┘        └─ conflicts: both sides changed
//! ```
//!
//! A file that the guest changes in place has the version of the host's file that it was copied
//! from, so a conflict is known exactly. Where the guest removed or made a file, also by renaming
//! another over it, the time decides: a file of the host that is as new is a conflict.
//!
//! Always: nothing is written outside of the host's directory, and nothing at all if there are
//! conflicts, unless the caller overrules them. When it fails in the middle: the files written so
//! far are whole, and the same call can be repeated.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::path::PathBuf;

use sandtree_diff::{
    ChangeKind, ContentDiff, FileSystem, Kind, Path, Upper, UpperKind, Versions, text_diff, upper,
};
use sandtree_mounts::{Found, Tree};
use sandtree_proto::mount::{KEPT, VERSION_XATTR};
use sandtree_store::disk::Chain;
use sandtree_store::{HostDirectory, MountAccess};
use serde::Serialize;

use crate::blocking::blocking;
use crate::boxed::Boxed;
use crate::chain::{Disk, diff_error};
use crate::error::{Error, Result, store_error};
use crate::mounts;
use crate::order::{Applied, Wanted};
use crate::sandbox::Sandbox;

/// The clocks of guest and host differ by less than this.
const CLOCKS_DIFFER_NS: i64 = 1_000_000_000;
/// The largest file whose lines are compared.
const TEXT_MAX: u64 = 4 << 20;
const COMPARED_AT_ONCE: usize = 64 * 1024;
/// How many files one message to a keeper lists.
const VERSIONS_AT_ONCE: usize = 1000;

/// The changes of a copy-on-write mount.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct MountChanges {
    /// The path of the mount in the guest.
    pub mount: String,
    /// The host's directory.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub host: PathBuf,
    /// By path.
    pub changes: Vec<MountChange>,
    /// Devices, sockets and FIFOs, which the host does not get.
    #[cfg_attr(feature = "schema", schema(value_type = Vec<String>))]
    pub left_out: Vec<Path>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct MountChange {
    /// Below the mount, with a slash in front.
    #[cfg_attr(feature = "schema", schema(value_type = String))]
    pub path: Path,
    pub change: ChangeKind,
    /// What it is in the guest, or was on the host.
    pub kind: Kind,
    /// Why the host's file would lose something.
    pub conflict: Option<String>,
    /// The version of the host's file that this was compared with.
    #[serde(skip)]
    host: Option<String>,
}

/// How changes are written to the host.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ApplyOptions {
    /// Writes nothing.
    pub dry_run: bool,
    /// Overwrites what changed on the host.
    pub force: bool,
}

impl MountChanges {
    pub fn conflicts(&self) -> impl Iterator<Item = &MountChange> {
        self.changes
            .iter()
            .filter(|change| change.conflict.is_some())
    }
}

impl Sandbox {
    /// What the sandbox has changed on top of a copy-on-write mount. Its machine may run, be
    /// paused or be stopped.
    pub fn changes<'a>(&'a self, mount: &'a str) -> Boxed<'a, Result<MountChanges>> {
        Box::pin(async move { self.with_changes(mount, |look| look.changes()).await })
    }

    /// The changes of a copy-on-write mount as text, in the form of `diff -u`.
    pub fn patch<'a>(&'a self, mount: &'a str) -> Boxed<'a, Result<String>> {
        Box::pin(async move { self.with_changes(mount, |look| look.patch()).await })
    }

    /// Writes the changes of a copy-on-write mount to the host's directory.
    pub fn apply<'a>(
        &'a self,
        mount: &'a str,
        options: ApplyOptions,
    ) -> Boxed<'a, Result<MountChanges>> {
        Box::pin(async move {
            let applied = self.with_changes(mount, move |look| look.apply(options));
            let (changes, number, versions) = applied.await?;
            // The guest may change the same files again, and that is no conflict.
            let mut versions = versions.into_iter().peekable();
            while versions.peek().is_some() {
                let versions = versions.by_ref().take(VERSIONS_AT_ONCE).collect();
                let mount = number;
                self.ask(Applied { mount, versions }).await?;
            }
            Ok(changes)
        })
    }

    async fn with_changes<T: Send + 'static>(
        &self,
        mount: &str,
        work: impl FnOnce(&Look<'_>) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let of = self.copy_on_write(mount)?;
        let loan = self.borrow(Wanted::Disk).await?;
        let chain = self.host().inner.lent(self.id(), &loan.lent.state);
        let done = match chain {
            Ok(chain) => {
                let mount = mount.to_owned();
                blocking(move || Look::with(&chain, mount, of, work)).await
            }
            Err(error) => Err(error),
        };
        loan.give_back().await;
        done
    }

    /// The host's directory of a copy-on-write mount.
    fn copy_on_write(&self, mount: &str) -> Result<HostDirectory> {
        let no_mount = || Error::NoMount {
            name: self.name().to_owned(),
            path: mount.to_owned(),
        };
        let dir = self.host().inner.find(self.id())?;
        let head = dir
            .head()
            .map_err(store_error("read where a sandbox stands"))?;
        let point = head.mounts.iter().find(|point| point.path == mount);
        let point = point.ok_or_else(no_mount)?;
        if point.access != MountAccess::CopyOnWrite {
            let rule = "a mount with :cow; the changes of others are on the host already";
            return Err(Error::invalid("mount", mount, rule));
        }
        let known = mounts::known(&dir)?;
        known.get(point.id).cloned().ok_or_else(no_mount)
    }
}

/// What was written: the changes, the number of the mount, and the versions of the host's files.
type Written = (MountChanges, u32, BTreeMap<String, String>);

/// A look at both sides.
struct Look<'a> {
    fs: &'a FileSystem<'a>,
    /// The upper directory on the sandbox's disk.
    root: Path,
    /// Sorted by path.
    upper: Vec<Upper>,
    tree: Tree,
    mount: String,
    host: PathBuf,
    number: u32,
    /// The versions of the host's files that earlier calls wrote.
    applied: BTreeMap<String, String>,
}

impl Look<'_> {
    fn with<T>(
        chain: &Chain,
        mount: String,
        of: HostDirectory,
        work: impl FnOnce(&Look<'_>) -> Result<T>,
    ) -> Result<T> {
        let disk = Disk(chain);
        let fs = FileSystem::open(&disk).map_err(diff_error)?;
        let root = Path::from(format!("{KEPT}/{}/upper", of.id));
        let host = of.path;
        let stamp = VERSION_XATTR.trim_start_matches("trusted.").as_bytes();
        let upper = upper(&fs, &root, stamp).map_err(diff_error)?;
        let tree = Tree::open(&host).map_err(|e| Error::io("open", &host, e))?;
        let look = Look {
            fs: &fs,
            root,
            upper,
            tree,
            mount,
            host,
            number: of.id,
            applied: of.applied,
        };
        work(&look)
    }

    fn changes(&self) -> Result<MountChanges> {
        let mut changes = Vec::new();
        for entry in &self.upper {
            let host = self.on_host(&entry.path)?;
            changes.extend(self.change(entry, host)?);
            if entry.what == UpperKind::Opaque && host.is_some_and(|host| host.is_directory()) {
                changes.extend(self.hidden(entry)?);
            }
        }
        changes.sort_by(|a, b| a.path.as_bytes().cmp(b.path.as_bytes()));
        let special = |entry: &&Upper| entry.what == UpperKind::Special;
        Ok(MountChanges {
            mount: self.mount.clone(),
            host: self.host.clone(),
            changes,
            left_out: self
                .upper
                .iter()
                .filter(special)
                .map(|entry| shown(&entry.path))
                .collect(),
        })
    }

    /// What the guest changed at a path.
    fn entry(&self, path: &[u8]) -> Option<&Upper> {
        let at = self
            .upper
            .binary_search_by(|entry| entry.path.as_slice().cmp(path));
        at.ok().map(|at| &self.upper[at])
    }

    fn on_host(&self, path: &[u8]) -> Result<Option<Found>> {
        self.tree
            .find(path)
            .map_err(|e| self.host_error("read", path, e))
    }

    fn host_error(&self, operation: &'static str, path: &[u8], error: io::Error) -> Error {
        let name = String::from_utf8_lossy(path).into_owned();
        Error::io(operation, self.host.join(name), error)
    }

    fn change(&self, entry: &Upper, host: Option<Found>) -> Result<Option<MountChange>> {
        let change = match (entry.what, &host) {
            (UpperKind::Special, _) | (UpperKind::Removed, None) => return Ok(None),
            (UpperKind::Removed, Some(_)) => ChangeKind::Removed,
            (_, None) => ChangeKind::Added,
            (_, Some(host)) if self.is_same(entry, host)? => return Ok(None),
            (_, Some(_)) => ChangeKind::Changed,
        };
        let kind = match (change, &host) {
            (ChangeKind::Removed, Some(host)) => kind_of(host),
            _ => entry.node.kind,
        };
        Ok(Some(MountChange {
            path: shown(&entry.path),
            change,
            kind,
            conflict: self.conflict(entry, host.as_ref())?,
            host: host.map(|host| host.attr.stamp()),
        }))
    }

    /// Files of the host that an opaque directory hides.
    fn hidden(&self, entry: &Upper) -> Result<Vec<MountChange>> {
        let names = self.tree.names(&entry.path);
        let names = names.map_err(|e| self.host_error("list", &entry.path, e))?;
        let mut hidden = Vec::new();
        for name in names {
            let path = [&entry.path, b"/".as_slice(), &name].concat();
            if self.entry(&path).is_some() {
                continue;
            }
            if let Some(host) = self.on_host(&path)? {
                hidden.push(MountChange {
                    path: shown(&path),
                    change: ChangeKind::Removed,
                    kind: kind_of(&host),
                    conflict: self.unseen(entry, &path, &host)?,
                    host: Some(host.attr.stamp()),
                });
            }
        }
        Ok(hidden)
    }

    fn is_same(&self, entry: &Upper, host: &Found) -> Result<bool> {
        match entry.what {
            UpperKind::Directory | UpperKind::Opaque => Ok(host.is_directory()),
            UpperKind::Symlink if host.is_symlink() => {
                let target = self.tree.read_link(&entry.path);
                let target = target.map_err(|e| self.host_error("read", &entry.path, e))?;
                Ok(entry.node.target.as_ref().map(Path::as_bytes) == Some(target.as_slice()))
            }
            UpperKind::File if host.is_file() => {
                let same_mode = u32::from(entry.node.mode) & 0o777 == host.permissions();
                let same_size = entry.node.size == host.attr.version.size;
                Ok(same_mode && same_size && self.has_same_content(entry)?)
            }
            _ => Ok(false),
        }
    }

    fn has_same_content(&self, entry: &Upper) -> Result<bool> {
        let mut guest = self.content(entry)?;
        let mut host = self.host_file(&entry.path)?;
        let mut ours = vec![0; COMPARED_AT_ONCE];
        let mut theirs = vec![0; COMPARED_AT_ONCE];
        loop {
            let count = fill(&mut guest, &mut ours)
                .map_err(|e| self.host_error("compare", &entry.path, e))?;
            let other = fill(&mut host, &mut theirs)
                .map_err(|e| self.host_error("compare", &entry.path, e))?;
            if ours[..count] != theirs[..other] {
                return Ok(false);
            }
            if count == 0 {
                return Ok(true);
            }
        }
    }

    fn content(&self, entry: &Upper) -> Result<impl Read + '_> {
        let path = Path::from([self.root.as_bytes(), b"/", &entry.path].concat());
        self.fs.read_file(&path).map_err(diff_error)
    }

    fn host_file(&self, path: &[u8]) -> Result<std::fs::File> {
        self.tree
            .read(path)
            .map_err(|e| self.host_error("open", path, e))
    }

    fn patch(&self) -> Result<String> {
        let mut text = String::new();
        for change in self.changes()?.changes {
            let path = &change.path.as_bytes()[1..];
            let entry = self.entry(path);
            let entry = entry.filter(|entry| entry.what == UpperKind::File);
            let after = entry.map(|entry| self.content(entry)).transpose()?;
            let host = self.on_host(path)?.filter(Found::is_file);
            let before = host.map(|_| self.host_file(path)).transpose()?;
            if after.is_none() && before.is_none() {
                continue;
            }
            let read = |error| self.host_error("read", path, error);
            let before = before.map(at_most).transpose().map_err(read)?;
            let after = after.map(at_most).transpose().map_err(read)?;
            let versions = Versions {
                before: before.as_deref(),
                after: after.as_deref(),
            };
            text.push_str(&match text_diff(versions, &change.path) {
                ContentDiff::Text(text) => text,
                ContentDiff::Same => continue,
                ContentDiff::Binary => format!("Binary files {} differ\n", change.path),
                ContentDiff::TooLarge { .. } => {
                    format!("Files {} differ and are too large to show\n", change.path)
                }
            });
        }
        Ok(text)
    }

    /// Why the host would lose something if it got this change.
    fn conflict(&self, entry: &Upper, host: Option<&Found>) -> Result<Option<String>> {
        let is_directory = matches!(entry.what, UpperKind::Directory | UpperKind::Opaque);
        match (&entry.stamp, host) {
            (None, None) => Ok(None),
            (Some(_), None) if is_directory => Ok(None),
            (Some(_), None) => Ok(Some("it was removed on the host since".into())),
            (_, Some(host)) if self.is_own(&entry.path, host) => Ok(None),
            (Some(stamp), Some(host)) if !host.is_directory() => {
                let is_same = *stamp == host.attr.stamp().into_bytes();
                Ok((!is_same).then(|| "it changed on the host since".into()))
            }
            (_, Some(host)) => self.unseen(entry, &entry.path, host),
        }
    }

    /// Whether an earlier call wrote the host's file, which has not changed since.
    fn is_own(&self, path: &[u8], host: &Found) -> bool {
        let written = self.applied.get(shown(path).to_string().as_str());
        !host.is_directory() && written == Some(&host.attr.stamp())
    }

    /// Without a version, the time decides: what is as new on the host as the guest's change may be
    /// something that the guest has never seen. Of a directory, everything in it counts.
    fn unseen(&self, entry: &Upper, path: &[u8], host: &Found) -> Result<Option<String>> {
        if self.is_own(path, host) {
            return Ok(None);
        }
        if host.is_directory() {
            let names = self.tree.names(path);
            for name in names.map_err(|e| self.host_error("list", path, e))? {
                let path = [path, b"/".as_slice(), &name].concat();
                let Some(child) = self.on_host(&path)? else {
                    continue;
                };
                if let Some(reason) = self.unseen(entry, &path, &child)? {
                    return Ok(Some(reason));
                }
            }
            return Ok(None);
        }
        let changed = host.attr.version.ctime_ns;
        let is_older = entry
            .born_unix_ns
            .is_some_and(|born| changed < born.saturating_sub(CLOCKS_DIFFER_NS));
        Ok((!is_older).then(|| "the host has a file that is as new".into()))
    }

    /// Refuses to write if the host's file is not the one that was compared.
    fn check_unchanged(&self, change: &MountChange) -> Result<()> {
        let path = &change.path.as_bytes()[1..];
        let now = self.on_host(path)?;
        // What is in a directory has been written meanwhile.
        let is_directory = now.is_some_and(|now| now.is_directory());
        if is_directory || now.map(|now| now.attr.stamp()) == change.host {
            return Ok(());
        }
        Err(Error::ApplyConflicts {
            host: self.host.clone(),
            paths: vec![change.path.to_string()],
        })
    }

    fn apply(&self, options: ApplyOptions) -> Result<Written> {
        let found = self.changes()?;
        let conflicts: Vec<String> = found
            .conflicts()
            .map(|change| change.path.to_string())
            .collect();
        if !options.force && !conflicts.is_empty() {
            return Err(Error::ApplyConflicts {
                host: self.host.clone(),
                paths: conflicts,
            });
        }
        let mut versions = BTreeMap::new();
        if options.dry_run {
            return Ok((found, self.number, versions));
        }
        for change in &found.changes {
            if change.change != ChangeKind::Removed {
                self.check_unchanged(change)?;
                let path = &change.path.as_bytes()[1..];
                self.write(path)?;
                let host = self.on_host(path)?;
                versions.extend(host.map(|host| (change.path.to_string(), host.attr.stamp())));
            }
        }
        // What is in a directory goes before the directory.
        for change in found.changes.iter().rev() {
            if change.change == ChangeKind::Removed {
                self.check_unchanged(change)?;
                let path = &change.path.as_bytes()[1..];
                let removed = self.tree.remove(path);
                removed.map_err(|e| self.host_error("remove", path, e))?;
            }
        }
        Ok((found, self.number, versions))
    }

    /// Writes one file of the guest to the host. What is in its place goes first if it is of
    /// another kind.
    fn write(&self, path: &[u8]) -> Result<()> {
        let Some(entry) = self.entry(path) else {
            return Ok(());
        };
        let failed = |e| self.host_error("write", path, e);
        let is_directory = matches!(entry.what, UpperKind::Directory | UpperKind::Opaque);
        let host = self.on_host(path)?;
        if is_directory && host.is_some_and(|host| !host.is_directory()) {
            self.tree.remove(path).map_err(failed)?;
        }
        let permissions = u32::from(entry.node.mode) & 0o777;
        match (&entry.what, &entry.node.target) {
            (UpperKind::Directory | UpperKind::Opaque, _) => {
                self.tree.make_directory(path, permissions).map_err(failed)
            }
            (UpperKind::Symlink, Some(target)) => self
                .tree
                .replace_symlink(path, target.as_bytes())
                .map_err(failed),
            _ => {
                let modified = entry.modified_unix_ns;
                let mut content = self.content(entry)?;
                let replaced = self
                    .tree
                    .replace_file(path, permissions, modified, &mut content);
                replaced.map_err(failed)
            }
        }
    }
}

fn shown(path: &[u8]) -> Path {
    Path::from([b"/", path].concat())
}

fn kind_of(host: &Found) -> Kind {
    if host.is_directory() {
        Kind::Directory
    } else if host.is_symlink() {
        Kind::Symlink
    } else {
        Kind::File
    }
}

fn at_most(file: impl Read) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.take(TEXT_MAX + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn fill(from: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut count = 0;
    while count < buffer.len() {
        match from.read(&mut buffer[count..]) {
            Ok(0) => break,
            Ok(read) => count += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(count)
}
