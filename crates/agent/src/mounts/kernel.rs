//! The guest's kernel as a mount sees it: one `/dev/fuse`, to which answers and notifications are
//! written.
//!
//! ```text
//!   answers ───────────────────────────────► /dev/fuse
//!   files to doubt, answers behind them ──► thread ──► /dev/fuse
//!   names to doubt ───────────────────────► thread ──► /dev/fuse
//! ```
//!
//! Below an overlay, the overlay remembers names as well, and has no notification: the kernel drops
//! what it does not use of all file systems instead.
//!
//! A notification may wait for a lock of the kernel that only an answer releases: the page that a
//! read fills, or the directory in which a name is looked up. So notifications have threads of
//! their own, names and files apart.

use std::io::IoSlice;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use sandtree_proto::Failure;

use super::abi::{self, Doubt};
use super::fence::Fence;
use super::thread::start;
use crate::failure::tolerate;

/// How long an overlay may show names as they were to programs that run on. To drop them costs the
/// whole guest its unused names, so it must not happen for each change.
const DROPPED_WITHIN: Duration = Duration::from_secs(1);

/// The answer to one request.
pub type Result = std::result::Result<Vec<u8>, Errno>;

#[derive(Debug)]
pub struct Kernel {
    fuse: Arc<OwnedFd>,
    files: Sender<Note>,
    names: Sender<Note>,
    above: Above,
    /// Whether the thread of names will drop what an overlay remembers.
    drops: Arc<AtomicBool>,
}

/// What lies above a mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Above {
    Programs,
    Overlay,
}

#[derive(Debug)]
enum Note {
    File(u64, Doubt),
    Name(u64, Vec<u8>),
    DropUnused(Arc<AtomicBool>),
    Answer(u64, Result),
    Reached(Fence),
}

impl Kernel {
    pub fn new(fuse: OwnedFd, above: Above) -> std::result::Result<Self, Failure> {
        let fuse = Arc::new(fuse);
        let (files, of_files) = channel();
        let (names, of_names) = channel();
        let for_files = Arc::clone(&fuse);
        start("the files of a mount", move || {
            of_files.iter().for_each(|note| carry_out(&for_files, note));
        })?;
        let for_names = Arc::clone(&fuse);
        start("the names of a mount", move || {
            carry_out_names(&for_names, &of_names, above);
        })?;
        Ok(Self {
            fuse,
            files,
            names,
            above,
            drops: Arc::default(),
        })
    }

    pub fn fuse(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.fuse)
    }

    pub fn answer(&self, unique: u64, result: &Result) {
        answer(self.fuse.as_fd(), unique, result);
    }

    /// Answers with bytes that belong to somebody else.
    pub fn answer_data(&self, unique: u64, data: &[u8]) {
        write_answer(self.fuse.as_fd(), unique, Ok(data));
    }

    /// Answers after everything that was doubted before: the kernel must not see the new
    /// attributes of a file while it has the old data.
    pub fn answer_behind_doubts(&self, unique: u64, result: Result) {
        send(&self.files, Note::Answer(unique, result));
    }

    pub fn doubt(&self, node: u64, doubt: Doubt) {
        send(&self.files, Note::File(node, doubt));
    }

    pub fn doubt_name(&self, directory: u64, name: Vec<u8>) {
        send(&self.names, Note::Name(directory, name));
    }

    pub fn is_below_overlay(&self) -> bool {
        self.above == Above::Overlay
    }

    /// After doubts: makes an overlay look at names again.
    pub fn end_doubts(&self) {
        if self.above == Above::Overlay && !self.drops.swap(true, Ordering::AcqRel) {
            send(&self.names, Note::DropUnused(Arc::clone(&self.drops)));
        }
    }

    /// Passes the fence when the kernel knows of all doubts so far.
    pub fn reach(&self, fence: &Fence) {
        for queue in [&self.files, &self.names] {
            send(queue, Note::Reached(fence.clone()));
        }
    }
}

/// How many times a fence is passed on each mount.
pub const QUEUES: usize = 2;

fn send(queue: &Sender<Note>, note: Note) {
    // It fails only when the thread is gone, and the process with it.
    tolerate(queue.send(note));
}

/// Below an overlay, what it remembers of names is also dropped a while after they were doubted:
/// programs may run on without a report to the host.
fn carry_out_names(fuse: &OwnedFd, notes: &Receiver<Note>, above: Above) {
    let mut due: Option<Instant> = None;
    loop {
        let left = due.map(|due| due.saturating_duration_since(Instant::now()));
        let note = match left {
            None => notes.recv().map_err(RecvTimeoutError::from),
            Some(left) if left.is_zero() => Err(RecvTimeoutError::Timeout),
            Some(left) => notes.recv_timeout(left),
        };
        match note {
            Ok(note) => {
                if matches!(note, Note::Name(..)) && above == Above::Overlay {
                    due.get_or_insert_with(|| Instant::now() + DROPPED_WITHIN);
                }
                if matches!(note, Note::DropUnused(_)) {
                    due = None;
                }
                carry_out(fuse, note);
            }
            Err(RecvTimeoutError::Timeout) => {
                due = None;
                drop_unused();
            }
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

/// Drops names and inodes of all file systems.
fn drop_unused() {
    // What is in use stays, and is old until it is not.
    tolerate(std::fs::write("/proc/sys/vm/drop_caches", "2"));
}

fn carry_out(fuse: &OwnedFd, note: Note) {
    match note {
        // The kernel may have forgotten the file or the name, or unmounted everything.
        Note::File(node, doubt) => {
            tolerate(rustix::io::write(fuse, &abi::invalidate_node(node, doubt)))
        }
        Note::Name(directory, name) => {
            tolerate(rustix::io::write(fuse, &abi::expire_name(directory, &name)));
        }
        Note::DropUnused(pending) => {
            pending.store(false, Ordering::Release);
            drop_unused();
        }
        Note::Answer(unique, result) => answer(fuse.as_fd(), unique, &result),
        Note::Reached(fence) => fence.pass(),
    }
}

fn answer(fuse: BorrowedFd<'_>, unique: u64, result: &Result) {
    let result = result.as_ref().map(Vec::as_slice);
    write_answer(fuse, unique, result.map_err(|error| *error));
}

fn write_answer(fuse: BorrowedFd<'_>, unique: u64, result: std::result::Result<&[u8], Errno>) {
    let header = abi::answer_header(unique, result.map(<[u8]>::len));
    let body = result.unwrap_or_default();
    // The asking process may have been killed, which withdraws its request.
    tolerate(rustix::io::writev(
        fuse,
        &[IoSlice::new(&header), IoSlice::new(body)],
    ));
}
