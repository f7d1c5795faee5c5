//! Files that lost their last known name while the guest has them open.
//!
//! Always: a cache. At most [`KEPT_MAX`] files are pinned; of more, the oldest is dropped, and its
//! next use is refused with ESTALE.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use sandtree_proto::mount::{FileId, MountId};

pub(crate) const KEPT_MAX: usize = 1024;

type Key = (MountId, FileId);

#[derive(Debug, Default)]
pub(crate) struct Kept {
    files: BTreeMap<Key, OwnedFd>,
    /// The oldest first.
    order: VecDeque<Key>,
}

impl Kept {
    pub(crate) fn find(&self, mount: MountId, id: FileId) -> Option<BorrowedFd<'_>> {
        self.files.get(&(mount, id)).map(AsFd::as_fd)
    }

    pub(crate) fn keep(&mut self, mount: MountId, id: FileId, pinned: OwnedFd) {
        let key = (mount, id);
        if self.files.insert(key, pinned).is_none() {
            self.order.push_back(key);
        }
        while self.files.len() > KEPT_MAX {
            let Some(oldest) = self.order.pop_front() else {
                return;
            };
            self.files.remove(&oldest);
        }
    }

    pub(crate) fn forget(&mut self, mount: MountId, id: FileId) {
        let key = (mount, id);
        if self.files.remove(&key).is_some() {
            self.order.retain(|kept| *kept != key);
        }
    }

    pub(crate) fn forget_mount(&mut self, mount: MountId) {
        self.files.retain(|key, _| key.0 != mount);
        self.order.retain(|key| key.0 != mount);
    }

    pub(crate) fn count(&self, mount: MountId) -> usize {
        self.order.iter().filter(|key| key.0 == mount).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(ino: u64) -> FileId {
        FileId { ino, born_ns: 0 }
    }

    fn pinned() -> OwnedFd {
        let (one, _) = std::os::unix::net::UnixStream::pair().expect("descriptors");
        one.into()
    }

    #[test]
    fn the_oldest_is_dropped_and_each_mount_has_its_own() {
        let mut kept = Kept::default();
        for ino in 0..KEPT_MAX as u64 {
            kept.keep(MountId(1), id(ino), pinned());
        }
        kept.keep(MountId(1), id(0), pinned());
        assert_eq!(kept.count(MountId(1)), KEPT_MAX, "the same file again");
        kept.keep(MountId(2), id(0), pinned());
        assert!(kept.find(MountId(1), id(0)).is_none(), "the oldest");
        assert!(kept.find(MountId(1), id(1)).is_some());
        assert!(kept.find(MountId(2), id(0)).is_some());
        kept.forget(MountId(1), id(1));
        kept.forget(MountId(1), id(1));
        assert_eq!(kept.count(MountId(1)), KEPT_MAX - 2);
        kept.forget_mount(MountId(1));
        assert_eq!((kept.count(MountId(1)), kept.count(MountId(2))), (0, 1));
    }
}
