//! A spare: a QEMU that was started ahead of time, and gets its memory and its disk later.
//!
//! ```text
//!   Engine::prepare --> Spare: QEMU waits for a state, on zeros and on a disk without data; closed images are open
//!   fill: layers mapped, other images opened --> the disk switched to them --> Machine, as `start` with `Incoming` gives it
//! ```
//!
//! Always: a spare has the jail of the machine that it becomes, and it becomes only a machine that
//! was asked for with the same arguments, files, user and limits. Images that it opens ahead are
//! closed: nothing writes to them any more. When it fails: QEMU is killed, and a machine can be
//! started as if there were no spare.

use std::ffi::OsString;
use std::fs::File;

use crate::arch::Arch;
use crate::argv::{Drive, Start, argv};
use crate::block::{Aio, Disk, FileIdentity, OpenedAhead};
use crate::error::Error;
use crate::fdset::FdSets;
use crate::jail::{Jail, Limits};
use crate::machine::{Content, Facts, Greeted, Installed, Machine, MachineSpec};
use crate::mapping::{self, Later, Memory};

#[derive(Debug)]
pub struct Spare {
    greeted: Greeted,
    memory: Later,
    likeness: Likeness,
    arch: Arch,
    aio: Aio,
    drive: Drive,
    sets: FdSets,
    images: OpenedAhead,
    facts: Facts,
}

/// Everything that a spare has in common with the machine that it becomes.
#[derive(Debug, PartialEq, Eq)]
struct Likeness {
    args: Vec<OsString>,
    jail: Jail,
    limits: Limits,
    /// Kernel and initramfs.
    files: [FileIdentity; 2],
}

impl Likeness {
    fn of(spec: &MachineSpec, arch: Arch, aio: Aio, drive: Drive) -> Result<Self, Error> {
        Ok(Self {
            args: argv(&spec.shape(arch, aio, drive)),
            jail: spec.jail,
            limits: spec.limits,
            files: [
                FileIdentity::of(&spec.kernel)?,
                FileIdentity::of(&spec.initramfs)?,
            ],
        })
    }
}

impl Spare {
    /// Starts a QEMU for a machine like this one. Of `spec`, the closed images are opened; memory
    /// and the active overlay are not used.
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
        let opening = spec.opening(aio);
        let closed = spec.disk.closed().map(File::try_clone);
        let closed = closed
            .collect::<Result<Vec<_>, _>>()
            .map_err(Error::io("share", "an image"))?;
        let greeted = Greeted::start(&installed, spec, drive, ram)
            .await
            .map_err(|error| match error {
                Error::Start { .. } => memory.explain(error),
                other => other,
            })?;
        let qmp = &greeted.qmp;
        let facts = Facts::ask(qmp, arch, Start::Incoming, installed.firmware).await?;
        let sets = FdSets::new(qmp.clone(), 0);
        let images = OpenedAhead::open(qmp.clone(), opening, &sets, closed).await?;
        Ok(Spare {
            greeted,
            memory,
            likeness,
            arch,
            aio,
            drive,
            sets,
            images,
            facts,
        })
    }

    /// Whether it can become this machine, and still runs.
    pub fn fits(&self, spec: &MachineSpec) -> bool {
        let wanted = Likeness::of(spec, self.arch, self.aio, self.drive);
        let is_mapped = matches!(spec.memory, Memory::Mapped { .. });
        let runs = self.greeted.process.exit().now().is_none();
        let is_like_this = wanted.is_ok_and(|wanted| wanted == self.likeness);
        runs && is_mapped && is_like_this && self.images.fits(&spec.disk)
    }

    /// Makes it the machine, which then waits for its state.
    pub async fn fill(self, spec: MachineSpec) -> Result<Machine, Error> {
        let Memory::Mapped { entries, layers } = &spec.memory else {
            let detail = "a spare gets its memory from layers".into();
            return Err(Error::Spec { detail });
        };
        let protecting = spec.protecting();
        let opening = spec.opening(self.aio);
        let laying = self.memory.lay(entries, layers)?;
        let disk = Disk::attach(self.images, &self.sets, opening, spec.disk).await?;
        let memory = laying.laid(&self.greeted.process)?;
        let content = Content {
            memory: memory.protecting(protecting),
            disk,
            sets: self.sets,
            facts: self.facts,
        };
        Ok(Machine::assemble(self.greeted, content))
    }

    pub fn pid(&self) -> u32 {
        self.greeted.process.pid()
    }
}
