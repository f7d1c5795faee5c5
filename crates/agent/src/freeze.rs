//! Freezes the guest's file systems, so that a disk without its memory is consistent.
//!
//! Always: a freeze ends. The host ends it, or a deadline does, whatever happens to the host: the
//! thread that thaws starts before anything is frozen. File systems without a disk are never
//! frozen. When it fails: everything is thawed before the failure is reported.

use std::collections::BTreeSet;
use std::fs::File;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use sandtree_proto::Failure;

use crate::failure::{OrFailure, refusal, tolerate};
use crate::sys;

/// The upper bound for any request: writers wait during a freeze.
const LONGEST: Duration = Duration::from_secs(60);

#[derive(Debug, Default)]
pub struct Freezer {
    held: Mutex<Option<Held>>,
    thawed: Condvar,
}

/// The mount points that are frozen now, in order.
#[derive(Debug)]
struct Held {
    mounts: Vec<File>,
    number: u64,
}

impl Freezer {
    /// Freezes every file system on a disk, for at most `thaw_after`.
    pub fn freeze(self: &Arc<Self>, thaw_after: Duration) -> Result<(), Failure> {
        let mounts = disks()?;
        rustix::fs::sync();
        // A disk that cannot be trimmed only stays as large as it is.
        mounts.iter().for_each(|mount| tolerate(sys::trim(mount)));
        let number = self.begin()?;
        self.watch(number, thaw_after.min(LONGEST))
            .inspect_err(|_| tolerate(self.thaw()))?;
        mounts
            .into_iter()
            .try_for_each(|mount| self.freeze_one(mount, number))
            .inspect_err(|_| tolerate(self.thaw()))
    }

    fn begin(&self) -> Result<u64, Failure> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let mut held = self.lock();
        if held.is_some() {
            return Err(refusal(Errno::BUSY, "the disks are frozen already"));
        }
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        *held = Some(Held {
            mounts: Vec::new(),
            number,
        });
        Ok(number)
    }

    /// Runs without the lock: a slow file system must not keep the others frozen.
    fn freeze_one(&self, mount: File, number: u64) -> Result<(), Failure> {
        match sys::freeze(&mount) {
            Ok(()) => {}
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => return Ok(()),
            Err(error) => return Err(error).or_failure(|| "cannot freeze a file system".into()),
        }
        let mut held = self.lock();
        if let Some(held) = held.as_mut().filter(|held| held.number == number) {
            held.mounts.push(mount);
            return Ok(());
        }
        drop(held);
        sys::thaw(&mount).or_failure(|| "cannot thaw a file system".into())?;
        Err(refusal(
            Errno::TIMEDOUT,
            "the disks took too long to freeze",
        ))
    }

    fn lock(&self) -> MutexGuard<'_, Option<Held>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether anything was still frozen.
    pub fn thaw(&self) -> Result<bool, Failure> {
        let held = self.lock().take();
        self.thawed.notify_all();
        held.map_or(Ok(false), |held| held.thaw().map(|()| true))
    }

    /// Starts the thread that thaws at the deadline. The number identifies the freeze, because the
    /// next one has its own thread.
    fn watch(self: &Arc<Self>, number: u64, thaw_after: Duration) -> Result<(), Failure> {
        let freezer = Arc::clone(self);
        let watch = move || {
            let is_held =
                |held: &mut Option<Held>| held.as_ref().is_some_and(|held| held.number == number);
            let waited = freezer
                .thawed
                .wait_timeout_while(freezer.lock(), thaw_after, is_held);
            let (mut held, _) = waited.unwrap_or_else(PoisonError::into_inner);
            if is_held(&mut held) {
                // No request waits for this result. If a file system does not thaw, its writers
                // hang.
                tolerate(held.take().map_or(Ok(()), Held::thaw));
            }
        };
        let started = std::thread::Builder::new().spawn(watch);
        started
            .map(drop)
            .or_failure(|| "cannot start a thread in the guest".into())
    }
}

impl Held {
    /// Thaws all of them, last frozen first, and returns the first failure.
    fn thaw(self) -> Result<(), Failure> {
        let thawed: Vec<_> = self.mounts.iter().rev().map(sys::thaw).collect();
        thawed
            .into_iter()
            .collect::<Result<(), _>>()
            .or_failure(|| "cannot thaw a file system".into())
    }
}

/// Every writable file system on a disk, innermost mounts first.
fn disks() -> Result<Vec<File>, Failure> {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo")
        .or_failure(|| "cannot read the mounts".into())?;
    let mut seen = BTreeSet::new();
    let mut found = Vec::new();
    for (device, point) in mount_points(&mounts).into_iter().rev() {
        if seen.contains(&device) {
            continue;
        }
        match open(&point) {
            Ok(mount) => {
                seen.insert(device);
                found.push(mount);
            }
            // A single file is mounted here; its file system has another mount, or cannot be frozen
            // by this one.
            Err(error) if error == Errno::NOTDIR => {}
            Err(error) => return Err(error).or_failure(|| format!("cannot open {point}")),
        }
    }
    Ok(found)
}

fn open(point: &str) -> rustix::io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::open(point, flags, Mode::empty()).map(File::from)
}

/// The device and the mount point of every writable file system on a disk, from the text of a
/// `mountinfo`, in the order of the mounts.
fn mount_points(mountinfo: &str) -> Vec<(String, String)> {
    let writable = mountinfo.lines().filter_map(|line| {
        let (mount, super_block) = line.split_once(" - ")?;
        let fields: Vec<&str> = mount.split(' ').collect();
        let [_, _, device, _, point, options, ..] = fields.as_slice() else {
            return None;
        };
        // A file system without a disk has a device of major number 0. FUSE on a device asks a
        // process, which may be frozen.
        let on_disk = !device.starts_with("0:") && !super_block.starts_with("fuse");
        let is_rw = |options: &str| options.split(',').any(|option| option == "rw");
        let written = super_block.split(' ').nth(2).is_some_and(is_rw) && is_rw(options);
        (on_disk && written).then(|| ((*device).to_owned(), unescaped(point)))
    });
    writable.collect()
}

/// In a `mountinfo`, blanks, tabs, newlines and backslashes are three octal digits.
fn unescaped(point: &str) -> String {
    ["\\040", "\\011", "\\012", "\\134"]
        .iter()
        .zip([" ", "\t", "\n", "\\"])
        .fold(point.to_owned(), |point, (from, to)| {
            point.replace(from, to)
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writable_disks_are_found() {
        let mountinfo = "\
            21 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n\
            22 21 0:20 / /proc rw,nosuid - proc proc rw\n\
            23 21 254:0 /srv /mnt rw - ext4 /dev/vda rw\n\
            24 21 254:16 / /with\\040blank rw - xfs /dev/vdb rw,attr2\n\
            25 21 254:32 / /cdrom ro - iso9660 /dev/vdc ro\n\
            26 21 254:48 / /fuse rw - fuseblk /dev/vdd rw\n\
            27 21 0:30 / /tmp rw - tmpfs tmpfs rw\n";
        let found: Vec<_> = mount_points(mountinfo)
            .into_iter()
            .map(|(_, point)| point)
            .collect();
        assert_eq!(found, ["/", "/mnt", "/with blank"]);
    }
}
