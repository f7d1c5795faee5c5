//! A spare: a QEMU that was started ahead of time, and gets its memory and its disk later.
//!
//! ```text
//!   Engine::prepare --> Spare: QEMU waits for a state, on zeros and on a disk without data
//!   fill: layers mapped --> images opened --> the disk switched to them --> Machine, as `start` with `Incoming` gives it
//! ```
//!
//! Always: a spare has the jail of the machine that it becomes, and it becomes only a machine that
//! was asked for with the same arguments, files, user and limits. When it fails: QEMU is killed,
//! and a machine can be started as if there were no spare.

use std::ffi::OsString;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use crate::arch::Arch;
use crate::argv::{Drive, Start, argv};
use crate::block::{Aio, Disk};
use crate::blocks;
use crate::error::Error;
use crate::fdset::FdSets;
use crate::jail::{Jail, Limits};
use crate::machine::{Content, Greeted, Installed, Machine, MachineSpec};
use crate::mapping::{self, Later, Memory};

#[derive(Debug)]
pub struct Spare {
    greeted: Greeted,
    memory: Later,
    likeness: Likeness,
    arch: Arch,
    aio: Aio,
    drive: Drive,
    firmware: Option<PathBuf>,
    uncaptured: Vec<String>,
}

/// Everything that a spare has in common with the machine that it becomes.
#[derive(Debug, PartialEq, Eq)]
struct Likeness {
    args: Vec<OsString>,
    jail: Jail,
    limits: Limits,
    /// Device and inode of kernel and initramfs.
    files: [(u64, u64); 2],
}

impl Likeness {
    fn of(spec: &MachineSpec, arch: Arch, aio: Aio, drive: Drive) -> Result<Self, Error> {
        let identity = |file: &File| {
            let status = file.metadata().map_err(Error::io("look at", "a kernel"))?;
            Ok((status.dev(), status.ino()))
        };
        Ok(Self {
            args: argv(&spec.shape(arch, aio, drive)),
            jail: spec.jail,
            limits: spec.limits,
            files: [identity(&spec.kernel)?, identity(&spec.initramfs)?],
        })
    }
}

impl Spare {
    /// Starts a QEMU for a machine like this one. Memory and images of `spec` are not used.
    pub(crate) async fn start(
        installed: Installed<'_>,
        spec: MachineSpec,
        disk_bytes: u64,
    ) -> Result<Spare, Error> {
        spec.check()?;
        if spec.start != Start::Incoming {
            let detail = "a spare waits for a state".into();
            return Err(Error::Spec { detail });
        }
        let drive = Drive::Later { bytes: disk_bytes };
        let Installed { arch, aio, .. } = installed;
        let likeness = Likeness::of(&spec, arch, aio, drive)?;
        let (ram, mut memory) = mapping::prepare_later(spec.memory_bytes)?;
        let greeted = Greeted::start(&installed, spec, drive, ram)
            .await
            .map_err(|error| match error {
                Error::Start { .. } => memory.explain(error),
                other => other,
            })?;
        let uncaptured = blocks::uncaptured(&greeted.qmp, arch).await?;
        Ok(Spare {
            greeted,
            memory,
            likeness,
            arch,
            aio,
            drive,
            firmware: installed.firmware,
            uncaptured,
        })
    }

    /// Whether it can become this machine, and still runs.
    pub fn fits(&self, spec: &MachineSpec) -> bool {
        let wanted = Likeness::of(spec, self.arch, self.aio, self.drive);
        let is_mapped = matches!(spec.memory, Memory::Mapped { .. });
        let runs = self.greeted.process.exit().now().is_none();
        runs && is_mapped && wanted.is_ok_and(|wanted| wanted == self.likeness)
    }

    /// Makes it the machine, which then waits for its state.
    pub async fn fill(self, spec: MachineSpec) -> Result<Machine, Error> {
        let Memory::Mapped { entries, layers } = &spec.memory else {
            let detail = "a spare gets its memory from layers".into();
            return Err(Error::Spec { detail });
        };
        let process = &self.greeted.process;
        let memory = self.memory.lay(process, entries, layers)?;
        let memory = memory.protecting(spec.protecting());
        let qmp = &self.greeted.qmp;
        let sets = FdSets::new(qmp.clone(), 0);
        let opening = spec.opening(self.aio);
        let disk = Disk::attach(qmp.clone(), opening, &sets, spec.disk).await?;
        let content = Content {
            memory,
            disk,
            sets,
            firmware: self.firmware,
            uncaptured: self.uncaptured,
        };
        Ok(Machine::assemble(self.greeted, content))
    }

    pub fn pid(&self) -> u32 {
        self.greeted.process.pid()
    }
}
