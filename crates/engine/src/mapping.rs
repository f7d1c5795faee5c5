//! The guest's RAM at the start of a machine: what QEMU gets to map, and where it mapped it.
//!
//! ```text
//!   Memory --prepare--> descriptors 8 plan, 9 RAM, 10 report, 11 library, 64.. layers --> QEMU
//!                                                                                          |
//!   GuestMemory <--locate-- report of the library, else /proc/PID/maps <-------------------+
//!
//!   prepare_later --> descriptors 8 socket, 9 RAM, 10 report, 11 library --> QEMU, which waits for a state
//!   Later --lay: plan and layers over the socket--> report --> GuestMemory
//! ```
//!
//! Always: layers are mapped or the start fails; a machine never runs on half of its memory. The
//! library is sealed: a QEMU gone wrong cannot change what the next one loads. The file QEMU maps
//! is the machine's own.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, IoSlice, PipeReader, PipeWriter, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Gid, MemfdFlags, SealFlags, Uid, fchown, fcntl_add_seals, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use crate::argv::fd;
use crate::blocking::in_place;
use crate::error::{Error, Untracked};
use crate::jail::Jail;
use crate::preload::format::{Base, Entry, Failure, LAYERS_MAX, PAGE_BYTES, Plan, Report};
use crate::process::Process;
use crate::ram::{GuestMemory, Mapped, Place};

/// Built by build.rs.
static LIBRARY: &[u8] = include_bytes!(env!("SANDTREE_PRELOAD"));

/// How long the library may take to lay a plan: thousands of system calls on a busy host.
const LAID_WITHIN: Timespec = Timespec {
    tv_sec: 10,
    tv_nsec: 0,
};

/// What the guest's RAM holds at the start.
#[derive(Debug)]
pub enum Memory {
    /// Zeros.
    Empty,
    /// The pages of layers over zeros. Layers are opened read-only and never change again; needs
    /// [`Preload::Use`].
    Mapped {
        entries: Vec<MapEntry>,
        layers: Vec<File>,
    },
    /// The bytes of a file of this machine's own, as long as its RAM and open for reading and
    /// writing. QEMU does not change it. It is given to the machine's user, who opens it again.
    Flat { file: File },
}

/// A run of pages of one layer. All in multiples of 4096 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapEntry {
    pub guest_offset: u64,
    pub bytes: u64,
    /// Which of the layers.
    pub layer: usize,
    pub file_offset: u64,
}

/// Whether our library is loaded into QEMU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Preload {
    #[default]
    Use,
    Skip,
}

/// What goes into QEMU for its RAM.
#[derive(Debug)]
pub(crate) struct Handed {
    pub descriptors: Vec<(RawFd, OwnedFd)>,
    pub environment: Vec<OsString>,
}

/// What finds the RAM again once QEMU has mapped it.
#[derive(Debug)]
pub(crate) struct Expected {
    bytes: u64,
    inode: u64,
    /// Layers that are not there would be wrong memory; a machine without layers can do without the
    /// library.
    needs_report: bool,
    report: Option<PipeReader>,
}

/// Prepares the RAM of a machine.
pub(crate) fn prepare(
    memory: Memory,
    preload: Preload,
    bytes: u64,
    jail: Jail,
) -> Result<(Handed, Expected), Error> {
    let failed = || Error::io("create", "the guest's memory");
    let (ram, base, entries, layers) = match memory {
        Memory::Empty => (
            marker(bytes).map_err(failed())?,
            Base::Zeros,
            Vec::new(),
            Vec::new(),
        ),
        Memory::Mapped { entries, layers } => (
            marker(bytes).map_err(failed())?,
            Base::Zeros,
            entries,
            layers,
        ),
        Memory::Flat { file } => (own(file, bytes, jail)?, Base::File, Vec::new(), Vec::new()),
    };
    let inode = ram.metadata().map_err(failed())?.ino();
    let mut handed = Handed {
        descriptors: vec![(fd::RAM, ram.into())],
        environment: Vec::new(),
    };
    let mut expected = Expected {
        bytes,
        inode,
        needs_report: !layers.is_empty(),
        report: None,
    };
    match preload {
        Preload::Skip if expected.needs_report => {
            return Err(Error::Spec {
                detail: "layers cannot be mapped without the library".into(),
            });
        }
        Preload::Skip => {}
        Preload::Use => {
            let plan = plan(base, bytes, &entries, &layers)?;
            let plan = in_memory("plan", &plan).map_err(failed())?;
            let report = handed.add_library(plan.into()).map_err(failed())?;
            expected.report = Some(report);
            handed
                .descriptors
                .extend((fd::LAYER..).zip(layers.into_iter().map(OwnedFd::from)));
        }
    }
    Ok((handed, expected))
}

impl Handed {
    /// Adds the library, and where it finds its plan. Returns where its report comes.
    fn add_library(&mut self, plan: OwnedFd) -> io::Result<PipeReader> {
        let (report, writer) = pipe()?;
        self.descriptors.push((fd::PLAN, plan));
        self.descriptors.push((fd::REPORT, writer.into()));
        self.descriptors.push((fd::LIBRARY, library()?.into()));
        self.environment
            .push(format!("LD_PRELOAD=/proc/self/fd/{}", fd::LIBRARY).into());
        Ok(report)
    }
}

/// A pipe whose reader does not wait.
fn pipe() -> io::Result<(PipeReader, PipeWriter)> {
    let (reader, writer) = io::pipe()?;
    rustix::io::ioctl_fionbio(&reader, true)?;
    Ok((reader, writer))
}

/// The way to give a machine its memory once it is up.
#[derive(Debug)]
pub(crate) struct Later {
    socket: UnixStream,
    expected: Expected,
}

/// Prepares the RAM of a machine whose content is not known yet.
pub(crate) fn prepare_later(bytes: u64) -> Result<(Handed, Later), Error> {
    let failed = || Error::io("create", "the guest's memory");
    let ram = marker(bytes).map_err(failed())?;
    let inode = ram.metadata().map_err(failed())?.ino();
    let (socket, theirs) = UnixStream::pair().map_err(failed())?;
    let mut handed = Handed {
        descriptors: vec![(fd::RAM, ram.into())],
        environment: Vec::new(),
    };
    let report = handed.add_library(theirs.into()).map_err(failed())?;
    let expected = Expected {
        bytes,
        inode,
        needs_report: true,
        report: Some(report),
    };
    Ok((handed, Later { socket, expected }))
}

impl Later {
    /// Why QEMU ended while starting, if its memory is the reason.
    pub(crate) fn explain(&mut self, error: Error) -> Error {
        self.expected.explain(error)
    }

    /// Begins to map layers over the RAM of a QEMU whose guest stands still.
    pub(crate) fn lay(self, entries: &[MapEntry], layers: &[File]) -> Result<Laying, Error> {
        let failed = || Error::io("hand over", "the guest's memory");
        let plan = plan(Base::Zeros, self.expected.bytes, entries, layers)?;
        let plan = in_memory("plan", &plan).map_err(failed())?;
        send(&self.socket, &plan, layers).map_err(failed())?;
        Ok(Laying(self))
    }

    /// Without a report in time, [`Expected::locate`] finds none and says so.
    fn await_report(&self) -> io::Result<()> {
        let Some(report) = &self.expected.report else {
            return Ok(());
        };
        let mut ends = [PollFd::new(report, PollFlags::IN)];
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // Mostly it is there, and the thread need not be left.
        if poll(&mut ends, Some(&now))? == 0 {
            in_place(|| poll(&mut ends, Some(&LAID_WITHIN)))?;
        }
        Ok(())
    }
}

/// Memory that the library in QEMU is mapping. QEMU can do other work meanwhile that does not use
/// the guest's memory.
#[derive(Debug)]
pub(crate) struct Laying(Later);

impl Laying {
    /// Waits until all of it is mapped.
    pub(crate) fn laid(self, process: &Process) -> Result<GuestMemory, Error> {
        let Self(later) = self;
        let failed = Error::io("hand over", "the guest's memory");
        later.await_report().map_err(failed)?;
        later.expected.locate(process)
    }
}

/// One byte, and the descriptors of a plan and its layers with it.
fn send(socket: &UnixStream, plan: &File, layers: &[File]) -> io::Result<()> {
    const SPACE: usize = rustix::cmsg_space!(ScmRights(1 + LAYERS_MAX));
    let mut space = [MaybeUninit::uninit(); SPACE];
    let mut beside = SendAncillaryBuffer::new(&mut space);
    let fds: Vec<_> = std::iter::once(plan)
        .chain(layers)
        .map(AsFd::as_fd)
        .collect();
    assert!(
        beside.push(SendAncillaryMessage::ScmRights(&fds)),
        "a plan has no more layers than there is space for"
    );
    sendmsg(
        socket,
        &[IoSlice::new(&[0])],
        &mut beside,
        SendFlags::NOSIGNAL,
    )?;
    Ok(())
}

/// A sparse file that marks the mapping. Its size is sealed, so that QEMU cannot use it to take the
/// host's memory.
fn marker(bytes: u64) -> io::Result<File> {
    let file = File::from(memfd_create(
        "guest-ram",
        MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
    )?);
    file.set_len(bytes)?;
    fcntl_add_seals(&file, SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL)?;
    Ok(file)
}

/// The machine's user opens the file again, so it has to be that user's.
fn own(file: File, bytes: u64, jail: Jail) -> Result<File, Error> {
    let failed = || Error::io("hand over", "the file of the guest's memory");
    let found = file.metadata().map_err(failed())?.len();
    if found != bytes {
        return Err(Error::Spec {
            detail: format!("a file of {found} bytes is not the memory of {bytes}"),
        });
    }
    if let Some(id) = jail.uid {
        fchown(&file, Some(Uid::from_raw(id)), Some(Gid::from_raw(id)))
            .map_err(|errno| failed()(errno.into()))?;
    }
    Ok(file)
}

fn in_memory(name: &str, content: &[u8]) -> io::Result<File> {
    let mut file = File::from(memfd_create(
        name,
        MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
    )?);
    file.write_all(content)?;
    fcntl_add_seals(
        &file,
        SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL,
    )?;
    Ok(file)
}

fn library() -> io::Result<File> {
    in_memory("sandtree-preload", LIBRARY)
}

/// Encodes the plan. What the library cannot see is checked here: that a layer exists and is long
/// enough, since access behind the end of a file would kill QEMU later.
fn plan(
    base: Base,
    ram_bytes: u64,
    entries: &[MapEntry],
    layers: &[File],
) -> Result<Vec<u8>, Error> {
    let refuse = |reason: String| Error::NotMapped { reason };
    if layers.len() > LAYERS_MAX {
        return Err(refuse(format!(
            "{} layers are more than {LAYERS_MAX}",
            layers.len()
        )));
    }
    let lengths = layers
        .iter()
        .map(|layer| layer.metadata().map(|status| status.len()));
    let lengths = lengths
        .collect::<io::Result<Vec<_>>>()
        .map_err(Error::io("look at", "a memory layer"))?;
    let mut plan = Vec::with_capacity(Plan::BYTES + entries.len() * Entry::BYTES);
    plan.extend(
        Plan {
            base,
            ram_bytes,
            entries: entries.len() as u64,
        }
        .encode(),
    );
    for (index, entry) in entries.iter().enumerate() {
        let end = entry.file_offset.checked_add(entry.bytes);
        match (lengths.get(entry.layer), end) {
            (Some(length), Some(end)) if end <= *length => {}
            (Some(length), _) => {
                return Err(refuse(format!(
                    "region {index} ends behind the {length} bytes of layer {}",
                    entry.layer
                )));
            }
            (None, _) => {
                return Err(refuse(format!(
                    "region {index} is of layer {}, which is not there",
                    entry.layer
                )));
            }
        }
        let MapEntry {
            guest_offset,
            bytes,
            layer,
            file_offset,
        } = *entry;
        let descriptor = fd::LAYER as u32 + layer as u32;
        plan.extend(
            Entry {
                guest_offset,
                bytes,
                file_offset,
                descriptor,
            }
            .encode(),
        );
    }
    Ok(plan)
}

impl Expected {
    /// Why QEMU ended while starting, if its memory is the reason.
    pub(crate) fn explain(&mut self, error: Error) -> Error {
        match self.take_report() {
            Ok(Report {
                mapping: Err(failure),
                regions,
                ..
            }) => not_mapped(failure, regions),
            _ => error,
        }
    }

    /// Finds the RAM of a QEMU that has greeted, and so has mapped it.
    pub(crate) fn locate(mut self, process: &Process) -> Result<GuestMemory, Error> {
        let reason = match self.take_report() {
            Ok(report) => return self.reported(process, report),
            Err(reason) if self.needs_report => return Err(Error::NotMapped { reason }),
            Err(reason) => reason,
        };
        let address = find_mapping(process.pid(), self.inode, self.bytes)?;
        let tracking = Err(Untracked::NoLibrary {
            reason: reason.clone(),
        });
        let place = Place {
            address,
            bytes: self.bytes,
        };
        Ok(GuestMemory::new(
            process.pid(),
            process.pidfd(),
            place,
            Mapped::File { reason },
            tracking,
        ))
    }

    fn reported(&self, process: &Process, report: Report) -> Result<GuestMemory, Error> {
        if let Err(failure) = report.mapping {
            return Err(not_mapped(failure, report.regions));
        }
        if report.bytes != self.bytes || !report.address.is_multiple_of(PAGE_BYTES) {
            return Err(Error::NotMapped {
                reason: format!("the library reports another memory: {report:?}"),
            });
        }
        let place = Place {
            address: report.address,
            bytes: report.bytes,
        };
        let mapped = Mapped::Preload {
            regions: report.regions,
        };
        let tracking = report.tracking.map_err(Untracked::from);
        Ok(GuestMemory::new(
            process.pid(),
            process.pidfd(),
            place,
            mapped,
            tracking,
        ))
    }

    /// The report, or why there is none. It is in the pipe by the time QEMU has greeted or ended.
    fn take_report(&mut self) -> Result<Report, String> {
        let mut pipe = self.report.take().ok_or("the library was not asked for")?;
        let mut bytes = [0; Report::BYTES];
        match pipe.read(&mut bytes) {
            Ok(Report::BYTES) => {
                Report::decode(&bytes).ok_or_else(|| "the library's report is none".into())
            }
            Ok(count) => Err(format!("the library's report has {count} bytes")),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                Err("QEMU did not load the library".into())
            }
            Err(error) => Err(format!("the library's report cannot be read: {error}")),
        }
    }
}

fn not_mapped(failure: Failure, regions: u64) -> Error {
    Error::NotMapped {
        reason: format!("after {regions} regions {failure}"),
    }
}

/// Where a process has mapped the file. By inode alone: some file systems give another device
/// number there.
fn find_mapping(pid: u32, inode: u64, bytes: u64) -> Result<u64, Error> {
    let path = format!("/proc/{pid}/maps");
    let maps = std::fs::read_to_string(&path).map_err(Error::io("read", &path))?;
    maps.lines()
        .filter_map(parse_mapping)
        .find(|(start, end, found)| *found == inode && end - start == bytes)
        .map(|(start, ..)| start)
        .ok_or_else(|| Error::NotMapped {
            reason: format!("{path} does not show the guest's memory"),
        })
}

/// Start, end and inode of a line of `/proc/PID/maps`.
fn parse_mapping(line: &str) -> Option<(u64, u64, u64)> {
    let mut fields = line.split_ascii_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let hex = |text| u64::from_str_radix(text, 16).ok();
    Some((hex(start)?, hex(end)?, fields.nth(3)?.parse().ok()?))
}

#[cfg(test)]
#[path = "mapping_tests.rs"]
mod tests;
