//! A machine: one QEMU process with its control connection, its link and its console.
//!
//! ```text
//!   Engine::start --> spawn --> greeting --> RAM found --> Machine --quit | kill | drop | guest ends--> Exit
//!                       \----------\------------\--> Error, nothing left
//!
//!   Start::Run:      running <--cont, stop--> stopped: save_devices, save_stream, memory
//!   Start::Incoming: waiting --load--> stopped
//! ```
//!
//! Always: a `Machine` that is dropped is killed, and a killed one is reaped.
//! When it fails: whatever was started is dropped on the way out and thereby killed.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::net::UnixStream;
use tokio::time::{Instant, timeout_at};

use crate::accel::Accel;
use crate::arch::Arch;
use crate::argv::{Drive, Ports, Screen, Shape, Start, argv, fd};
use crate::block::{Aio, Disk, DiskChain, Opening, PreparedOverlay};
use crate::blocks::{self, Firmware};
use crate::devices::{self, DeviceFile};
use crate::error::Error;
use crate::exit::Exit;
use crate::fdset::FdSets;
use crate::jail::{Confinement, Jail, Limits};
use crate::landlock::{Access, View};
use crate::mapping::{self, Expected, Handed, Memory, Preload};
use crate::network::{Announce, NetworkMode};
use crate::probe::{landlock_failed, socketpair};
use crate::process::{ExitWatch, Launch, Process};
use crate::qmp::{Cont, Ending, Events, Qmp, Quit, Stop};
use crate::ram::{GuestMemory, Protecting};
use crate::screen::{self, Picture};

/// QEMU's side of its sockets is closed when it is reaped; this only bounds a descriptor that
/// leaked.
const LAST_WORDS_DEADLINE: Duration = Duration::from_secs(1);

const MIB: u64 = 1 << 20;

/// As many overlays as a machine has descriptors for, with the base below them.
pub const OVERLAYS_MAX: usize = (fd::LAYER - fd::DISK) as usize - 1;

/// What to start.
#[derive(Debug)]
pub struct MachineSpec {
    pub name: String,
    /// A multiple of 1 MiB.
    pub memory_bytes: u64,
    pub cpus: u32,
    pub accel: Accel,
    /// One that the engine has.
    pub machine_type: String,
    /// One that the engine gave.
    pub cpu: String,
    /// Kernel and initramfs are opened again inside the jail: `jail.uid` must be allowed to read
    /// the files themselves, though not to reach them.
    pub kernel: File,
    pub initramfs: File,
    pub cmdline: String,
    pub disk: DiskChain,
    pub network: NetworkMode,
    pub announce: Announce,
    pub ports: Ports,
    pub display: Option<Screen>,
    /// What the guest's memory holds at the start.
    pub memory: Memory,
    pub start: Start,
    pub preload: Preload,
    /// Further arguments of QEMU, after ours.
    pub extra_args: Vec<String>,
    pub jail: Jail,
    pub limits: Limits,
}

impl MachineSpec {
    pub(crate) fn check(&self) -> Result<(), Error> {
        let spec = |detail: String| Err(Error::Spec { detail });
        if self.memory_bytes == 0 || !self.memory_bytes.is_multiple_of(MIB) {
            return spec(format!(
                "{} bytes of memory are not a multiple of 1 MiB",
                self.memory_bytes
            ));
        }
        if self.cpus == 0 {
            return spec("it needs a processor".into());
        }
        if self.disk.overlays.is_empty() || self.disk.overlays.len() > OVERLAYS_MAX {
            return spec(format!(
                "{} overlays are not within 1 to {OVERLAYS_MAX}",
                self.disk.overlays.len()
            ));
        }
        check_readable("kernel", &self.kernel, self.jail)?;
        check_readable("initramfs", &self.initramfs, self.jail)
    }

    pub(crate) fn opening(&self, aio: Aio) -> Opening {
        Opening {
            aio,
            flushes: self.disk.flushes,
        }
    }

    pub(crate) fn protecting(&self) -> Protecting {
        if self.accel == Accel::Kvm {
            Protecting::Found
        } else {
            Protecting::All
        }
    }

    pub(crate) fn shape(&self, arch: Arch, aio: Aio, drive: Drive) -> Shape {
        Shape {
            arch,
            accel: self.accel,
            machine_type: self.machine_type.clone(),
            cpu: self.cpu.clone(),
            name: self.name.clone(),
            memory_mib: self.memory_bytes / MIB,
            cpus: self.cpus,
            cmdline: self.cmdline.clone(),
            drive,
            aio,
            flushes: self.disk.flushes,
            network: self.network,
            announce: self.announce,
            ports: self.ports,
            display: self.display,
            start: self.start,
            extra_args: self.extra_args.clone(),
        }
    }
}

/// QEMU would only say "could not open"; here the reason is known.
fn check_readable(file: &'static str, opened: &File, jail: Jail) -> Result<(), Error> {
    let Some(uid) = jail.uid else { return Ok(()) };
    let status = opened.metadata().map_err(Error::io("look at", file))?;
    // The class decides alone, as in the kernel: an owner without permission is not helped by the
    // others' one.
    let needed = if status.uid() == uid {
        0o400
    } else if status.gid() == uid {
        0o040
    } else {
        0o004
    };
    if status.mode() & needed == 0 {
        Err(Error::Unreadable { file, uid })
    } else {
        Ok(())
    }
}

/// One running QEMU.
#[derive(Debug)]
pub struct Machine {
    process: Process,
    qmp: Qmp,
    memory: GuestMemory,
    disk: Disk,
    sets: FdSets,
    link: Option<UnixStream>,
    mounts: Option<UnixStream>,
    console: Option<UnixStream>,
    facts: Facts,
    /// What the state of the devices took last time: most of it is that of the screen.
    devices_bytes: AtomicU64,
}

/// What an engine adds to a spec.
pub(crate) struct Installed<'a> {
    pub binary: &'a std::path::Path,
    pub arch: Arch,
    pub aio: Aio,
    /// Where QEMU has its files, if nothing else is to be seen.
    pub visible: Option<&'a [PathBuf]>,
    pub firmware: Option<PathBuf>,
}

/// A QEMU that has greeted, with its connections.
#[derive(Debug)]
pub(crate) struct Greeted {
    pub process: Process,
    pub qmp: Qmp,
    link: UnixStream,
    mounts: Option<UnixStream>,
    console: UnixStream,
}

impl Greeted {
    pub(crate) async fn start(
        installed: &Installed<'_>,
        spec: MachineSpec,
        drive: Drive,
        ram: Handed,
    ) -> Result<Greeted, Error> {
        let (control, qmp_end) = socketpair()?;
        let (link, link_end) = socketpair()?;
        let (console, console_end) = socketpair()?;
        let mut ends = vec![
            (fd::QMP, qmp_end),
            (fd::LINK, link_end),
            (fd::CONSOLE, console_end),
        ];
        let mounts = match spec.ports {
            Ports::Link => None,
            Ports::LinkAndMounts => {
                let (mounts, end) = socketpair()?;
                ends.push((fd::MOUNTS, end));
                Some(mounts)
            }
        };
        let process = Process::spawn(launch(installed, spec, drive, (ram, ends))?).await?;
        let qmp = Qmp::connect(control, process.exit().clone())
            .await
            .map_err(|error| match error {
                Error::Died { exit } => Error::Start { exit },
                other => other,
            })?;
        Ok(Greeted {
            process,
            qmp,
            link,
            mounts,
            console,
        })
    }
}

/// What makes a QEMU that has greeted a machine.
pub(crate) struct Content {
    pub memory: GuestMemory,
    pub disk: Disk,
    pub sets: FdSets,
    pub facts: Facts,
}

/// What QEMU tells about its memory, which does not change as long as it runs.
#[derive(Debug)]
pub(crate) struct Facts {
    /// Present in a machine that waits for a state.
    firmware: Option<Firmware>,
    uncaptured: Vec<String>,
}

impl Facts {
    /// Asks a QEMU that has greeted, and prepares one that waits for a state for its load. All of
    /// it is sent together.
    pub(crate) async fn ask(
        qmp: &Qmp,
        arch: Arch,
        start: Start,
        firmware: Option<PathBuf>,
    ) -> Result<Facts, Error> {
        if start == Start::Run {
            return Ok(Facts {
                firmware: None,
                uncaptured: blocks::uncaptured(qmp, arch).await?,
            });
        }
        let firmware = async {
            match firmware {
                Some(file) => Firmware::find(qmp, file).await.map(Some),
                None => Ok(None),
            }
        };
        let uncaptured = blocks::uncaptured(qmp, arch);
        let (expected, uncaptured, firmware) =
            tokio::join!(devices::expect(qmp), uncaptured, firmware);
        expected?;
        Ok(Facts {
            firmware: firmware?,
            uncaptured: uncaptured?,
        })
    }
}

impl Machine {
    pub(crate) async fn start(
        installed: Installed<'_>,
        mut spec: MachineSpec,
    ) -> Result<Machine, Error> {
        spec.check()?;
        let content = std::mem::replace(&mut spec.memory, Memory::Empty);
        let (ram, mut expected) =
            mapping::prepare(content, spec.preload, spec.memory_bytes, spec.jail)?;
        let protecting = spec.protecting();
        let opening = spec.opening(installed.aio);
        let overlays = spec.disk.overlays.len();
        let start = spec.start;
        let greeted = Greeted::start(&installed, spec, Drive::Overlays(overlays), ram)
            .await
            .map_err(|error| match error {
                Error::Start { .. } => expected.explain(error),
                other => other,
            })?;
        let memory = found(&greeted.process, expected)
            .await?
            .protecting(protecting);
        let qmp = &greeted.qmp;
        let content = Content {
            memory,
            disk: Disk::new(qmp.clone(), opening, overlays as u64),
            sets: FdSets::new(qmp.clone(), overlays as u64 + 1),
            facts: Facts::ask(qmp, installed.arch, start, installed.firmware).await?,
        };
        Ok(Self::assemble(greeted, content))
    }

    pub(crate) fn assemble(greeted: Greeted, content: Content) -> Machine {
        Machine {
            process: greeted.process,
            qmp: greeted.qmp,
            memory: content.memory,
            disk: content.disk,
            sets: content.sets,
            link: Some(greeted.link),
            mounts: greeted.mounts,
            console: Some(greeted.console),
            facts: content.facts,
            devices_bytes: AtomicU64::new(0),
        }
    }

    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    pub fn qmp(&self) -> &Qmp {
        &self.qmp
    }

    pub fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    /// Stops the virtual processors.
    pub async fn stop(&self) -> Result<(), Error> {
        self.qmp.run(Stop {}).await.map(drop)
    }

    /// Lets the virtual processors continue.
    pub async fn cont(&self) -> Result<(), Error> {
        self.qmp.run(Cont {}).await.map(drop)
    }

    /// Loads a state from a readable file into a machine of [`Start::Incoming`]; its guest is
    /// stopped then. After an error the machine is of no use.
    pub async fn load(&self, state: OwnedFd) -> Result<(), Error> {
        devices::load(&self.qmp, &self.sets, state).await
    }

    /// Gives a machine of [`Start::Incoming`] its firmware, which it does not load by itself. The
    /// guest is stopped.
    pub fn restore_firmware(&self) -> Result<(), Error> {
        match &self.facts.firmware {
            Some(firmware) => firmware.restore(&self.memory),
            None => Ok(()),
        }
    }

    /// Memory that the guest sees and that no layer holds, by QEMU's names.
    pub fn uncaptured_memory(&self) -> &[String] {
        &self.facts.uncaptured
    }

    /// What the screen shows. Only a machine with a screen has a picture.
    pub async fn picture(&self) -> Result<Picture, Error> {
        screen::picture(&self.qmp, &self.sets).await
    }

    /// Connects a viewer to the screen, by RFB. The connection ends with this machine.
    pub async fn view(&self) -> Result<UnixStream, Error> {
        screen::view(&self.qmp, &self.sets).await
    }

    /// Makes a place for the state of the devices, to save them into within the stop.
    pub async fn prepare_devices(&self) -> Result<DeviceFile, Error> {
        let bytes = self.devices_bytes.load(Ordering::Relaxed);
        devices::prepare(&self.sets, bytes).await
    }

    /// Saves the devices. The guest is stopped, or a `stop` that was sent before is yet to be
    /// answered.
    pub async fn save_devices(&self, into: &DeviceFile) -> Result<(), Error> {
        devices::save(&self.qmp, into).await
    }

    /// What was saved, at leisure; nothing, if nothing was. Fails with [`Error::InNestedGuest`] if
    /// QEMU could not load it.
    pub async fn take_devices(&self, from: DeviceFile) -> Result<Vec<u8>, Error> {
        let taken = devices::take(&self.sets, from).await?;
        let bytes = taken.len() as u64;
        self.devices_bytes.store(bytes, Ordering::Relaxed);
        Ok(taken)
    }

    /// Writes the whole state of a stopped machine, its memory included. From then on until
    /// [`Machine::cont`] the disk is inactive: what has to be done to it comes before.
    pub async fn save_stream(&self, into: OwnedFd, deadline: Duration) -> Result<(), Error> {
        devices::save_stream(&self.qmp, &self.sets, into, deadline).await
    }

    /// Opens an empty overlay for a pivot, while the guest runs.
    pub async fn prepare_overlay(&self, file: File) -> Result<PreparedOverlay, Error> {
        self.disk.prepare(&self.sets, file).await
    }

    /// Freezes the active overlay: from now on the guest writes to this one.
    pub async fn pivot(&self, overlay: PreparedOverlay) -> Result<(), (PreparedOverlay, Error)> {
        self.disk.pivot(overlay).await
    }

    /// Closes what QEMU could write to the overlay with that the last pivot froze. `file` is that
    /// overlay, opened read-only.
    pub async fn give_up_writing(&self, file: File) -> Result<(), Error> {
        self.disk.give_up_writing(&self.sets, file).await
    }

    /// Closes what a spare had opened and this machine, which it became, does not need. The guest
    /// runs.
    pub async fn close_unneeded(&self) -> Result<(), Error> {
        self.disk.close_unneeded(&self.sets).await
    }

    /// Closes an overlay that was not needed.
    pub async fn discard_overlay(&self, overlay: PreparedOverlay) -> Result<(), Error> {
        self.disk.discard(&self.sets, overlay).await
    }

    /// Exchanges all overlays below the active one for files that together hold the same, oldest
    /// first, while the guest runs.
    pub async fn rebase(&self, below: Vec<File>) -> Result<(), Error> {
        self.disk.rebase(&self.sets, below).await
    }

    /// Copies what lies below the active overlay into an empty qcow2 image without backing, while
    /// the guest runs. A pivot, an exchange or a resize asked for meanwhile waits until the copy is
    /// there.
    pub async fn copy_disk(&self, into: File) -> Result<(), Error> {
        self.disk.copy(&self.sets, into).await
    }

    pub async fn resize_disk(&self, bytes: u64) -> Result<(), Error> {
        self.disk.resize(bytes).await
    }

    /// The host's end of the guest's port, once.
    pub fn take_link(&mut self) -> Option<UnixStream> {
        self.link.take()
    }

    /// The host's end of the port of mounts, once. A machine of an older program has none.
    pub fn take_mounts(&mut self) -> Option<UnixStream> {
        self.mounts.take()
    }

    /// The host's end of the serial console, once. A console that is not read slows the guest down.
    pub fn take_console(&mut self) -> Option<UnixStream> {
        self.console.take()
    }

    pub fn events(&self) -> Events {
        self.qmp.events()
    }

    /// What QEMU reported about the machine's end; complete once `exited` has returned.
    pub fn ending(&self) -> Ending {
        self.qmp.ending()
    }

    /// A handle to wait for the end with, without holding the machine.
    pub fn exit(&self) -> ExitWatch {
        self.process.exit().clone()
    }

    /// Waits until the process is reaped and its last words are read.
    pub async fn exited(&self) -> Exit {
        let exit = self.process.exit().wait().await;
        if tokio::time::timeout(LAST_WORDS_DEADLINE, self.qmp.closed())
            .await
            .is_err()
        {
            tracing::warn!(
                pid = self.pid(),
                "somebody holds the control connection of a QEMU that is gone"
            );
        }
        exit
    }

    /// Ends QEMU in an orderly way. After a timeout it still runs.
    pub async fn quit(&self, deadline: Duration) -> Result<Exit, Error> {
        let end = Instant::now() + deadline;
        match self.qmp.run_within(Quit {}, deadline).await {
            // It may end before its reply is read.
            Ok(_) | Err(Error::Died { .. }) => {}
            Err(error) => return Err(error),
        }
        timeout_at(end, self.exited())
            .await
            .map_err(|_| Error::Timeout {
                command: "quit",
                after: deadline,
            })
    }

    /// Kills QEMU and waits for nothing.
    pub fn kill_now(&self) {
        self.process.kill();
    }

    /// Kills QEMU and waits until it is reaped, but no longer than that may take: one that waits in
    /// the kernel, or that a debugger holds, ends later or never.
    pub async fn kill_within(&self, deadline: Duration) -> Result<Exit, Error> {
        self.process.kill();
        let ended = tokio::time::timeout(deadline, self.exited()).await;
        ended.map_err(|_| Error::NotEnded {
            pid: self.pid(),
            after: deadline,
        })
    }

    /// Kills QEMU and waits until it is reaped.
    pub async fn kill(&self) -> Exit {
        self.process.kill();
        self.exited().await
    }
}

/// A QEMU on the wrong memory must be gone before the caller starts another one.
async fn found(process: &Process, expected: Expected) -> Result<GuestMemory, Error> {
    let found = expected.locate(process);
    if found.is_err() {
        process.kill();
        process.exit().wait().await;
    }
    found
}

fn launch(
    installed: &Installed<'_>,
    spec: MachineSpec,
    drive: Drive,
    (ram, ends): (Handed, Vec<(RawFd, OwnedFd)>),
) -> Result<Launch, Error> {
    let args = argv(&spec.shape(installed.arch, installed.aio, drive));
    let confinement = confinement(installed, &spec, &ram)?;
    let Handed {
        mut descriptors,
        environment,
    } = ram;
    descriptors.extend(ends);
    descriptors.push((fd::KERNEL, spec.kernel.into()));
    descriptors.push((fd::INITRAMFS, spec.initramfs.into()));
    if let Drive::Overlays(_) = drive {
        descriptors.extend(spec.disk.into_descriptors(fd::DISK));
    }
    Ok(Launch {
        name: spec.name,
        binary: installed.binary.to_owned(),
        args,
        environment,
        descriptors,
        confinement,
    })
}

fn confinement(
    installed: &Installed<'_>,
    spec: &MachineSpec,
    ram: &Handed,
) -> Result<Confinement, Error> {
    let confinement = Confinement::new(spec.jail, spec.limits, spec.memory_bytes, spec.accel);
    // Arguments of the caller's may name any file.
    let Some(visible) = installed.visible.filter(|_| spec.extra_args.is_empty()) else {
        return Ok(confinement);
    };
    let ram = ram
        .descriptors
        .iter()
        .filter(|(number, _)| *number == fd::RAM);
    let mut files: Vec<_> = ram
        .map(|(_, file)| (file.as_fd(), Access::ReadWrite))
        .collect();
    files.extend([&spec.kernel, &spec.initramfs].map(|file| (file.as_fd(), Access::Read)));
    let view = View {
        installed: visible,
        files,
        accel: spec.accel,
        network: spec.network,
    };
    confinement.seeing(&view).map_err(landlock_failed)
}
