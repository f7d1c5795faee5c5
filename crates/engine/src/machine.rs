//! A machine: one QEMU process with its control connection, its link and its console.
//!
//! ```text
//!   Engine::start --> spawn --> greeting --> Machine (guest running) --quit | kill | drop | guest ends--> Exit
//!                       \----------\--> Error, nothing left
//! ```
//!
//! Always: a `Machine` that is dropped is killed, and a killed one is reaped.
//! When it fails: whatever was started is dropped on the way out and thereby killed.

use std::fs::File;
use std::os::fd::{OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use tokio::net::UnixStream;
use tokio::time::{Instant, timeout_at};

use crate::accel::Accel;
use crate::arch::Arch;
use crate::argv::{NetworkMode, Shape, argv, fd};
use crate::block::{Aio, DiskChain};
use crate::error::Error;
use crate::jail::{CHILD_FD_END, Confinement, Jail, Limits};
use crate::probe::socketpair;
use crate::process::{Exit, ExitWatch, Launch, Process};
use crate::qmp::{Ending, Events, Qmp, Quit};

/// QEMU's side of its sockets is closed when it is reaped; this only bounds a descriptor that leaked.
const LAST_WORDS_DEADLINE: Duration = Duration::from_secs(1);

const MIB: u64 = 1 << 20;

/// What to start.
#[derive(Debug)]
pub struct MachineSpec {
    pub name: String,
    /// A multiple of 1 MiB.
    pub memory_bytes: u64,
    pub cpus: u32,
    pub accel: Accel,
    /// Kernel and initramfs are opened again inside the jail: `jail.uid` must be allowed to read the files themselves,
    /// though not to reach them.
    pub kernel: File,
    pub initramfs: File,
    pub cmdline: String,
    pub disk: DiskChain,
    pub network: NetworkMode,
    /// Further arguments of QEMU, after ours.
    pub extra_args: Vec<String>,
    pub jail: Jail,
    pub limits: Limits,
}

impl MachineSpec {
    fn check(&self) -> Result<(), Error> {
        let spec = |detail: String| Err(Error::Spec { detail });
        if self.memory_bytes == 0 || !self.memory_bytes.is_multiple_of(MIB) {
            return spec(format!("{} bytes of memory are not a multiple of 1 MiB", self.memory_bytes));
        }
        if self.cpus == 0 {
            return spec("it needs a processor".into());
        }
        let overlays_max = (CHILD_FD_END - fd::DISK) as usize - 1;
        if self.disk.overlays.is_empty() || self.disk.overlays.len() > overlays_max {
            return spec(format!("{} overlays are not within 1 to {overlays_max}", self.disk.overlays.len()));
        }
        check_readable("kernel", &self.kernel, self.jail)?;
        check_readable("initramfs", &self.initramfs, self.jail)
    }

    fn shape(&self, arch: Arch, aio: Aio) -> Shape {
        Shape {
            arch,
            accel: self.accel,
            name: self.name.clone(),
            memory_mib: self.memory_bytes / MIB,
            cpus: self.cpus,
            cmdline: self.cmdline.clone(),
            overlays: self.disk.overlays.len(),
            aio,
            network: self.network,
            extra_args: self.extra_args.clone(),
        }
    }
}

/// QEMU would only say "could not open"; here the reason is known.
fn check_readable(file: &'static str, opened: &File, jail: Jail) -> Result<(), Error> {
    let Some(uid) = jail.uid else { return Ok(()) };
    let status = opened.metadata().map_err(Error::io("look at", file))?;
    // The class decides alone, as in the kernel: an owner without permission is not helped by the others' one.
    let needed = match () {
        () if status.uid() == uid => 0o400,
        () if status.gid() == uid => 0o040,
        () => 0o004,
    };
    if status.mode() & needed == 0 { Err(Error::Unreadable { file, uid }) } else { Ok(()) }
}

/// One running QEMU.
#[derive(Debug)]
pub struct Machine {
    process: Process,
    qmp: Qmp,
    link: Option<UnixStream>,
    console: Option<UnixStream>,
}

/// What an engine adds to a spec.
pub(crate) struct Installed<'a> {
    pub binary: &'a std::path::Path,
    pub arch: Arch,
    pub aio: Aio,
}

impl Machine {
    pub(crate) async fn start(installed: Installed<'_>, spec: MachineSpec) -> Result<Machine, Error> {
        spec.check()?;
        let (control, qmp_end) = socketpair()?;
        let (link, link_end) = socketpair()?;
        let (console, console_end) = socketpair()?;
        let ends = [(fd::QMP, qmp_end), (fd::LINK, link_end), (fd::CONSOLE, console_end)];
        let process = Process::spawn(launch(&installed, spec, ends)).await?;
        let qmp = Qmp::connect(control, process.exit().clone()).await.map_err(|error| match error {
            Error::Died { exit } => Error::Start { exit },
            other => other,
        })?;
        Ok(Machine { process, qmp, link: Some(link), console: Some(console) })
    }

    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    pub fn qmp(&self) -> &Qmp {
        &self.qmp
    }

    /// The host's end of the guest's port, once.
    pub fn take_link(&mut self) -> Option<UnixStream> {
        self.link.take()
    }

    /// The host's end of the serial console, once. A console nobody reads slows the guest down.
    pub fn take_console(&mut self) -> Option<UnixStream> {
        self.console.take()
    }

    pub fn events(&self) -> Events {
        self.qmp.events()
    }

    /// What QEMU told about the machine's end; complete once `exited` has returned.
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
        if tokio::time::timeout(LAST_WORDS_DEADLINE, self.qmp.closed()).await.is_err() {
            tracing::warn!(pid = self.pid(), "somebody holds the control connection of a QEMU that is gone");
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
        timeout_at(end, self.exited()).await.map_err(|_| Error::Timeout { command: "quit", after: deadline })
    }

    /// Kills QEMU and waits until it is reaped.
    pub async fn kill(&self) -> Exit {
        self.process.kill();
        self.exited().await
    }
}

fn launch(installed: &Installed<'_>, spec: MachineSpec, ends: [(RawFd, OwnedFd); 3]) -> Launch {
    let args = argv(&spec.shape(installed.arch, installed.aio));
    let confinement = Confinement::new(spec.jail, spec.limits, spec.memory_bytes, spec.accel);
    let mut descriptors = Vec::from(ends);
    descriptors.push((fd::KERNEL, spec.kernel.into()));
    descriptors.push((fd::INITRAMFS, spec.initramfs.into()));
    descriptors.extend(spec.disk.into_descriptors(fd::DISK));
    Launch { name: spec.name, binary: installed.binary.to_owned(), args, descriptors, confinement }
}
