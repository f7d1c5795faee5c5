//! Watches on directories that the guest knows, and the changes that others make there.
//!
//! ```text
//!   inotify ──► event ──► expected of the request being answered? ── yes: the reply reports it
//!                                                 └─ no ──► Changed
//! ```
//!
//! Always: a watch stands before anything about the directory's content is answered. A cache: a
//! watch that is missing shows in the `watched` bits of answers, and the guest asks again sooner.
//!
//! A request's own events do not come back. Each request says which events it causes, and how many;
//! everything beyond that is reported. The kernel joins equal events that follow each other, so a
//! change of another program can hide in ours. Therefore a size that the request does not explain
//! is reported, and what was answered is compared with the file once more after the events are
//! read, and reported if it differs. What is not noticed: another program overwrites bytes of the
//! same file, without a change of its size, between the looks right before and after our write;
//! what it writes to a mapping; and what it writes through a second name that it gave the file in a
//! directory that is not watched. inotify says nothing of these.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::CString;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use rustix::io::Errno;
use sandtree_proto::mount::{Attr, FileId, MountId};

use crate::place;

/// Watches of one server. Each pins an inode in the kernel.
pub(crate) const WATCHES_MAX: usize = 16384;
/// Changes in one turn beyond which the guest doubts everything instead.
const CHANGES_MAX: usize = 4096;
/// Read from inotify at once.
const READ_BYTES: usize = 16 * 1024;

/// A directory's watch, as inotify numbers it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Watch(i32);

/// What others did.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Change {
    At {
        mount: MountId,
        directory: FileId,
        name: Vec<u8>,
    },
    /// Events were lost.
    All,
}

/// Why a directory is not watched, though there is an inotify.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refused {
    /// There are [`WATCHES_MAX`] already.
    Here,
    /// The kernel has no room for it.
    ByKernel(Errno),
}

#[derive(Debug, Default)]
pub(crate) struct Watches {
    inotify: Option<OwnedFd>,
    /// Why there is no inotify. It is not tried again.
    unavailable: Option<Errno>,
    /// Why the last directory that is not watched is not.
    refused: Option<Refused>,
    /// Two mounts of one directory share a watch.
    owners: BTreeMap<(Watch, MountId), FileId>,
    known: BTreeMap<(MountId, FileId), Watch>,
}

impl Watches {
    /// The descriptor to wait at.
    pub(crate) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.inotify.as_ref().map(AsFd::as_fd)
    }

    pub(crate) fn count(&self, mount: MountId) -> usize {
        self.known.keys().filter(|key| key.0 == mount).count()
    }

    pub(crate) fn len(&self) -> usize {
        self.known.len()
    }

    /// Why a watch was refused for lack of room, unless there is room again.
    pub(crate) fn refused(&self) -> Option<Refused> {
        self.refused
    }

    pub(crate) fn unavailable(&self) -> Option<Errno> {
        self.unavailable
    }

    pub(crate) fn known(&self, mount: MountId, id: FileId) -> Option<Watch> {
        self.known.get(&(mount, id)).copied()
    }

    /// Watches a pinned directory, from now on if it was not yet. None: it cannot be.
    pub(crate) fn watch(
        &mut self,
        mount: MountId,
        id: FileId,
        directory: impl AsFd,
    ) -> Option<Watch> {
        if let Some(watch) = self.known(mount, id) {
            return Some(watch);
        }
        if self.known.len() >= WATCHES_MAX {
            self.refused = Some(Refused::Here);
            return None;
        }
        let inotify = self.open()?;
        match inotify::add_watch(inotify, place::by_descriptor(directory), watched_events()) {
            Ok(number) => {
                let watch = Watch(number);
                self.owners.insert((watch, mount), id);
                self.known.insert((mount, id), watch);
                self.refused = None;
                Some(watch)
            }
            Err(errno) => {
                if matches!(errno, Errno::NOSPC | Errno::NOMEM) {
                    self.refused = Some(Refused::ByKernel(errno));
                }
                None
            }
        }
    }

    fn open(&mut self) -> Option<BorrowedFd<'_>> {
        if self.inotify.is_none() && self.unavailable.is_none() {
            match inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK) {
                Ok(opened) => self.inotify = Some(opened),
                Err(errno) => self.unavailable = Some(errno),
            }
        }
        self.descriptor()
    }

    pub(crate) fn forget(&mut self, mount: MountId, id: FileId) {
        let Some(watch) = self.known.remove(&(mount, id)) else {
            return;
        };
        // The guest asks again for what is not watched, which is tried again then.
        self.refused = None;
        self.owners.remove(&(watch, mount));
        if self.owners_of(watch).is_empty() {
            self.remove(watch);
        }
    }

    pub(crate) fn forget_mount(&mut self, mount: MountId) {
        let keys = self.known.keys().filter(|key| key.0 == mount);
        let ids: Vec<FileId> = keys.map(|key| key.1).collect();
        ids.into_iter().for_each(|id| self.forget(mount, id));
    }

    fn remove(&self, watch: Watch) {
        if let Some(inotify) = &self.inotify {
            // The kernel removes the watch of a removed directory itself.
            inotify::remove_watch(inotify, watch.0).ok();
        }
    }

    fn owners_of(&self, watch: Watch) -> Vec<(MountId, FileId)> {
        let all = (watch, MountId(0))..=(watch, MountId(u32::MAX));
        let owners = self.owners.range(all);
        owners.map(|((_, mount), id)| (*mount, *id)).collect()
    }

    /// Reads all events, and returns those that `own` does not expect.
    pub(crate) fn drain(&mut self, own: &mut Own) -> Vec<Change> {
        let mut changes = Changes::default();
        let Some(inotify) = self.inotify.take() else {
            return Vec::new();
        };
        let mut buffer = [MaybeUninit::uninit(); READ_BYTES];
        let mut reader = inotify::Reader::new(&inotify, &mut buffer);
        loop {
            match reader.next() {
                Ok(event) => self.take(&event, own, &mut changes),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                // Nothing can be said of what happened: doubt everything.
                Err(_) => {
                    changes.lose();
                    break;
                }
            }
        }
        self.inotify = Some(inotify);
        changes.into_vec()
    }

    fn take(&mut self, event: &inotify::Event<'_>, own: &mut Own, changes: &mut Changes) {
        let bits = event.events();
        if bits.contains(ReadFlags::QUEUE_OVERFLOW) {
            changes.lose();
            return;
        }
        let watch = Watch(event.wd());
        let name = event.file_name().map_or(&b""[..], |name| name.to_bytes());
        let owned_by = own.takes(watch, name, bits);
        let is_end = bits.intersects(ReadFlags::IGNORED | ReadFlags::MOVE_SELF);
        for (mount, directory) in self.owners_of(watch) {
            if owned_by == Some(mount) {
                continue;
            }
            changes.add(mount, directory, name);
            if is_end {
                // It was removed, or moved to where it may not be part of the mount any longer.
                self.forget(mount, directory);
            }
        }
    }

    /// Reports what does not look any longer as it was answered.
    pub(crate) fn recheck(
        &self,
        own: Own,
        look: impl Fn(BorrowedFd<'_>, &CString) -> Option<Attr>,
    ) -> Vec<Change> {
        let mut changes = Changes::default();
        let of_own = |watch| {
            let owners = self.owners_of(watch).into_iter();
            owners.filter(|(mount, _)| *mount == own.mount)
        };
        for (watch, name) in &own.doubted {
            for (mount, directory) in of_own(*watch) {
                changes.add(mount, directory, name);
            }
        }
        for shown in own.shown {
            let now = look(shown.file.as_fd(), &shown.path);
            let is_same =
                now.is_some_and(|now| now.id == shown.attr.id && now.version == shown.attr.version);
            if is_same {
                continue;
            }
            for (mount, directory) in of_own(shown.watch) {
                changes.add(mount, directory, &shown.name);
            }
        }
        changes.into_vec()
    }
}

fn watched_events() -> WatchFlags {
    WatchFlags::CREATE
        | WatchFlags::DELETE
        | WatchFlags::MOVE
        | WatchFlags::MOVE_SELF
        | WatchFlags::MODIFY
        | WatchFlags::ATTRIB
        | WatchFlags::ONLYDIR
        | WatchFlags::EXCL_UNLINK
}

/// Changes without repetition, bounded.
#[derive(Default)]
struct Changes {
    found: BTreeSet<Change>,
    lost: bool,
}

impl Changes {
    fn add(&mut self, mount: MountId, directory: FileId, name: &[u8]) {
        if self.lost {
            return;
        }
        let name = name.to_vec();
        self.found.insert(Change::At {
            mount,
            directory,
            name,
        });
        if self.found.len() > CHANGES_MAX {
            self.lose();
        }
    }

    fn lose(&mut self) {
        self.found.clear();
        self.lost = true;
    }

    fn into_vec(self) -> Vec<Change> {
        if self.lost {
            return vec![Change::All];
        }
        self.found.into_iter().collect()
    }
}

/// What a request does itself.
#[derive(Debug)]
pub(crate) struct Own {
    mount: MountId,
    expected: Vec<Expected>,
    shown: Vec<Shown>,
    /// Names at which somebody else did something, too.
    doubted: Vec<(Watch, Vec<u8>)>,
}

#[derive(Debug)]
struct Expected {
    watch: Watch,
    name: Vec<u8>,
    bits: ReadFlags,
    left: u32,
}

/// What the reply says of a file, and how to look again: at `path` from `file`.
#[derive(Debug)]
struct Shown {
    watch: Watch,
    name: Vec<u8>,
    file: OwnedFd,
    path: CString,
    attr: Attr,
}

impl Own {
    pub(crate) const CONTENT: ReadFlags = ReadFlags::MODIFY.union(ReadFlags::ATTRIB);

    pub(crate) fn new(mount: MountId) -> Self {
        Self {
            mount,
            expected: Vec::new(),
            shown: Vec::new(),
            doubted: Vec::new(),
        }
    }

    /// Whether the request changes anything that is watched.
    pub(crate) fn is_empty(&self) -> bool {
        self.expected.is_empty() && self.shown.is_empty() && self.doubted.is_empty()
    }

    /// One event is the request's. Without a name: of the watched directory itself.
    pub(crate) fn expect(&mut self, watch: Option<Watch>, name: &[u8], bits: ReadFlags) {
        let Some(watch) = watch else { return };
        let same = self.expected.iter_mut().find(|expected| {
            expected.watch == watch && expected.name == name && expected.bits == bits
        });
        if let Some(expected) = same {
            expected.left += 1;
            return;
        }
        self.expected.push(Expected {
            watch,
            name: name.to_vec(),
            bits,
            left: 1,
        });
    }

    /// The reply says `attr` of what has this name in a watched directory.
    pub(crate) fn show(
        &mut self,
        watch: Option<Watch>,
        name: &[u8],
        at: (BorrowedFd<'_>, CString),
        attr: Attr,
    ) {
        let Some(watch) = watch else { return };
        let (file, path) = at;
        // Without a descriptor to spare, the comparison is left out.
        let Ok(file) = file.try_clone_to_owned() else {
            return;
        };
        self.shown.push(Shown {
            watch,
            name: name.to_vec(),
            file,
            path,
            attr,
        });
    }

    /// The request does not explain what a file with this name looks like.
    pub(crate) fn doubt(&mut self, watch: Option<Watch>, name: &[u8]) {
        self.doubted
            .extend(watch.map(|watch| (watch, name.to_vec())));
    }

    /// The mount whose request caused the event.
    fn takes(&mut self, watch: Watch, name: &[u8], bits: ReadFlags) -> Option<MountId> {
        let bits = bits - ReadFlags::ISDIR;
        let expected = self.expected.iter_mut().find(|expected| {
            expected.watch == watch
                && expected.name == name
                && expected.left > 0
                && expected.bits.contains(bits)
        })?;
        expected.left -= 1;
        Some(self.mount)
    }
}
