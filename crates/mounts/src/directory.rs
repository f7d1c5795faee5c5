//! A directory of the host that a guest may use, and how its files are shown there.

use std::ffi::CStr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

use rustix::fs::{AtFlags, FileType, Statx, StatxAttributes, StatxFlags, StatxTimestamp, statx};
use rustix::io::Errno;
use sandtree_proto::mount::{Attr, FileId, MountId, Version};

/// One directory of the host that a guest may use.
#[derive(Debug)]
pub struct Directory {
    pub mount: MountId,
    /// Opened with `O_PATH` and `O_DIRECTORY`. It stays the same directory when it is renamed.
    pub root: OwnedFd,
    /// Only for messages.
    pub path: PathBuf,
    pub access: Access,
    pub owner: Owner,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    ReadOnly,
    ReadWrite,
}

/// The guest's user as whom the host's own user is shown. Other users are shown as they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owner {
    pub uid: u32,
    pub gid: u32,
}

/// How a guest sees the attributes of files beneath one directory.
#[derive(Debug)]
pub(crate) struct View {
    owner: Owner,
    host_uid: u32,
    device: (u32, u32),
}

/// An `Attr` with the file's user on the host.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Seen {
    pub attr: Attr,
    pub is_own: bool,
}

impl View {
    pub(crate) fn new(directory: &Directory) -> Result<Self, Errno> {
        let root = look(&directory.root, c"")?;
        Ok(Self {
            owner: directory.owner,
            host_uid: rustix::process::geteuid().as_raw(),
            device: (root.stx_dev_major, root.stx_dev_minor),
        })
    }

    /// The attributes of an open file, whatever it is.
    pub(crate) fn of(&self, file: impl AsFd) -> Result<Seen, Errno> {
        Ok(self.show(&look(file, c"")?))
    }

    /// The attributes of what is at a path of at most one component.
    pub(crate) fn at(&self, file: impl AsFd, path: &CStr) -> Result<Attr, Errno> {
        Ok(self.show(&look(file, path)?).attr)
    }

    /// The attributes of what has a name in a directory. A mount point is refused: what is mounted
    /// there is not part of the directory.
    pub(crate) fn child(&self, directory: impl AsFd, name: &CStr) -> Result<Attr, Errno> {
        let found = look(directory, name)?;
        if found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT) {
            return Err(Errno::XDEV);
        }
        Ok(self.show(&found).attr)
    }

    fn show(&self, found: &Statx) -> Seen {
        let is_own = found.stx_uid == self.host_uid;
        let has_birth = found.stx_mask & StatxFlags::BTIME.bits() != 0;
        let attr = Attr {
            id: FileId {
                ino: self.number(found),
                born_ns: if has_birth {
                    nanoseconds(&found.stx_btime)
                } else {
                    0
                },
            },
            mode: found.stx_mode.into(),
            links: found.stx_nlink,
            uid: if is_own {
                self.owner.uid
            } else {
                found.stx_uid
            },
            gid: if is_own {
                self.owner.gid
            } else {
                found.stx_gid
            },
            version: Version {
                mtime_ns: nanoseconds(&found.stx_mtime),
                ctime_ns: nanoseconds(&found.stx_ctime),
                size: found.stx_size,
            },
            atime_ns: nanoseconds(&found.stx_atime),
            blocks: found.stx_blocks,
            block_size: found.stx_blksize,
            device: device_number(found.stx_rdev_major, found.stx_rdev_minor),
            watched: false,
        };
        Seen { attr, is_own }
    }

    /// Subvolumes of btrfs are devices of their own without being mounts, and their numbers
    /// coincide with those of others.
    fn number(&self, found: &Statx) -> u64 {
        if (found.stx_dev_major, found.stx_dev_minor) == self.device {
            return found.stx_ino;
        }
        let device = u64::from(found.stx_dev_major) << 52 ^ u64::from(found.stx_dev_minor) << 44;
        found.stx_ino ^ device
    }
}

fn look(file: impl AsFd, name: &CStr) -> Result<Statx, Errno> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
    statx(
        file,
        name,
        flags,
        StatxFlags::BASIC_STATS | StatxFlags::BTIME,
    )
}

fn nanoseconds(time: &StatxTimestamp) -> i64 {
    let seconds = time.tv_sec.saturating_mul(1_000_000_000);
    seconds.saturating_add(time.tv_nsec.into())
}

/// As the kernel encodes a device in 32 bits.
fn device_number(major: u32, minor: u32) -> u32 {
    (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12)
}

pub(crate) fn kind(attr: &Attr) -> FileType {
    FileType::from_raw_mode(attr.mode)
}

pub(crate) fn is_directory(attr: &Attr) -> bool {
    kind(attr) == FileType::Directory
}

pub(crate) fn is_regular(attr: &Attr) -> bool {
    kind(attr) == FileType::RegularFile
}
