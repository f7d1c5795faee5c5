//! Probes: what only a trial can find, and the key under which the verdicts stay valid.
//!
//! Probes run under the same jail and filter as machines, so that what they find holds for
//! machines.

mod catalogue;
mod kvm;
mod testguest;
mod tracking;
mod tsc;

use std::ffi::OsString;
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::net::UnixStream as StdUnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{MemfdFlags, memfd_create};
use serde::{Deserialize, Serialize};
use tokio::net::UnixStream;

use crate::accel::Accel;
use crate::arch::Arch;
use crate::argv::{fd, probe_argv};
use crate::block::Aio;
use crate::cpu::{CpuChoice, Expansions, Model};
use crate::error::Error;
use crate::install;
use crate::jail::{Confinement, Jail, Limits, Step};
use crate::landlock::{self, View};
use crate::network::NetworkMode;
use crate::process::{Launch, Process};
use crate::qmp::{Qmp, Quit};
use crate::version::Version;

pub(crate) use catalogue::Asked;
pub use kvm::KvmVerdict;
pub(crate) use kvm::{KvmFinding, probe_kvm};
#[cfg(test)]
pub(crate) use kvm::{Refusal, round_trip};
pub use tracking::TrackingVerdict;

use catalogue::Catalogue;
use kvm::KvmDevice;
use testguest::{Body, Report, TestGuest, Wrong};

const QUIT_DEADLINE: Duration = Duration::from_secs(5);

/// The test guest takes a tenth of a second. What it cannot report in time is switched off, which
/// costs little.
const INSTRUCTIONS_DEADLINE: Duration = Duration::from_secs(20);

/// What the probes found. The caller may keep it and hand it to the next `Engine::open`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verdicts {
    pub(crate) key: Key,
    pub(crate) kvm: KvmFinding,
    pub aio: Aio,
    /// Why the slower way of disk input and output is used.
    pub aio_reason: Option<String>,
    /// Which ways of telling written pages work.
    pub tracking: TrackingVerdict,
    /// Whether QEMU runs with its view of the file system restricted.
    pub landlock: Verdict,
    pub(crate) data_dirs: Vec<PathBuf>,
    /// Features of emulated processors that compute wrong results under this QEMU; they are off in
    /// fresh machines.
    pub miscomputed: Vec<String>,
    /// The rate of the time-stamp counter that emulated guests read.
    pub tsc_khz: Option<u64>,
    pub(crate) catalogue: Catalogue,
    pub(crate) expansions: Expansions,
}

impl Verdicts {
    pub fn kvm(&self) -> &KvmVerdict {
        &self.kvm.verdict
    }

    /// What machines see of the file system in addition to what every program needs; `None` where
    /// all of it is visible.
    pub(crate) fn visible(&self) -> Option<Vec<PathBuf>> {
        let restricted = self.landlock == Verdict::Usable;
        restricted.then(|| installed(&self.key.installation.binary, &self.data_dirs))
    }
}

/// Whether something can be used, and why not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "verdict")]
pub enum Verdict {
    Usable,
    Unusable { reason: String },
}

impl Verdict {
    pub fn usable(&self) -> Result<(), String> {
        match self {
            Verdict::Usable => Ok(()),
            Verdict::Unusable { reason } => Err(reason.clone()),
        }
    }
}

impl From<Result<(), String>> for Verdict {
    fn from(found: Result<(), String>) -> Self {
        match found {
            Ok(()) => Verdict::Usable,
            Err(reason) => Verdict::Unusable { reason },
        }
    }
}

/// What verdicts depend on: they are probed again when any of it differs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Key {
    pub installation: Installation,
    pub version: Version,
    kernel_release: String,
    boot_id: String,
    euid: u32,
    /// What the caller may do, as the kernel writes it: looking into machines of other users takes
    /// a capability.
    capabilities: String,
    own_user: bool,
    kvm: KvmDevice,
}

/// One file, by what is known without running it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Installation {
    pub binary: PathBuf,
    size_bytes: u64,
    /// Seconds and nanoseconds.
    modified: (i64, i64),
}

impl Installation {
    pub(crate) fn of(binary: PathBuf) -> Result<Self, Error> {
        let file = std::fs::metadata(&binary).map_err(Error::io("look at", &binary))?;
        Ok(Self {
            binary,
            size_bytes: file.size(),
            modified: (file.mtime(), file.mtime_nsec()),
        })
    }
}

impl Key {
    pub(crate) fn now(
        installation: Installation,
        version: Version,
        jail: Jail,
    ) -> Result<Self, Error> {
        const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
        let boot_id = std::fs::read_to_string(BOOT_ID).map_err(Error::io("read", BOOT_ID))?;
        Ok(Self {
            installation,
            version,
            kernel_release: rustix::system::uname()
                .release()
                .to_string_lossy()
                .into_owned(),
            boot_id: boot_id.trim().to_owned(),
            euid: rustix::process::geteuid().as_raw(),
            capabilities: effective_capabilities()?,
            own_user: jail.uid.is_some(),
            kvm: KvmDevice::now(),
        })
    }
}

fn effective_capabilities() -> Result<String, Error> {
    const STATUS: &str = "/proc/self/status";
    let status = std::fs::read_to_string(STATUS).map_err(Error::io("read", STATUS))?;
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    Ok(line.unwrap_or_default().trim().to_owned())
}

/// One QEMU to try things with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Probe<'a> {
    pub binary: &'a Path,
    pub arch: Arch,
    pub jail: Jail,
    /// Where QEMU has its files, if nothing else is to be seen.
    pub seeing: Option<&'a [PathBuf]>,
}

impl Probe<'_> {
    pub(crate) async fn run_all(self, key: Key, now_unix_s: u64) -> Result<Verdicts, Error> {
        let data_dirs = install::data_dirs(self.binary).await?;
        let installed = installed(self.binary, &data_dirs);
        let restricted = Probe {
            seeing: Some(&installed),
            ..self
        };
        let (landlock, miscomputed) = restricted.landlock_and_instructions().await;
        let probe = if landlock == Verdict::Usable {
            restricted
        } else {
            self
        };
        // Alone: a busy processor must not make KVM miss its deadline.
        let kvm = probe_kvm(&probe, now_unix_s).await;
        let (tsc_khz, io_uring, tracking, asked) = tokio::join!(
            tsc::measure_khz(),
            probe.io_uring(),
            tracking::probe(self.jail),
            Asked::start(&probe, Accel::Tcg)
        );
        let (aio, aio_reason) = match io_uring {
            Ok(()) => (Aio::IoUring, None),
            Err(error) => (Aio::Threads, Some(describe(&error))),
        };
        let asked = asked?;
        let catalogue = asked.catalogue().await?;
        let mut expansions = Expansions::default();
        let model = Model::chosen(self.arch, Accel::Tcg, CpuChoice::default())?;
        expansions.insert(Accel::Tcg, &model, asked.expand(&model).await?);
        let verdicts = Verdicts {
            key,
            kvm,
            aio,
            aio_reason,
            tracking,
            landlock,
            data_dirs,
            miscomputed,
            tsc_khz,
            catalogue,
            expansions,
        };
        tracing::debug!(?verdicts, "QEMU probed");
        Ok(verdicts)
    }

    /// One test guest finds both: whether QEMU starts with its view restricted, and which
    /// instructions it gets wrong. Instructions that could not be tried count as wrong.
    async fn landlock_and_instructions(&self) -> (Verdict, Vec<String>) {
        let supported = landlock::version()
            .map(drop)
            .map_err(|error| format!("the kernel has no Landlock: {error}"));
        let landlock = match &supported {
            Ok(()) => match self.wrong_instructions().await {
                Ok(wrong) => return (Verdict::Usable, named(wrong)),
                Err(reason) => Err(format!("QEMU does not run under it: {reason}")),
            },
            Err(_) => supported.clone(),
        };
        match (Probe {
            seeing: None,
            ..*self
        })
        .wrong_instructions()
        .await
        {
            Ok(wrong) => (landlock.into(), named(wrong)),
            Err(reason) => {
                tracing::warn!(reason, "the emulator's instructions cannot be tried");
                // Landlock is not what keeps the guest from running.
                (
                    supported.into(),
                    named(Wrong {
                        adx: true,
                        bmi1: true,
                    }),
                )
            }
        }
    }

    async fn wrong_instructions(&self) -> Result<Wrong, String> {
        if self.arch != Arch::X86_64 {
            return kvm::round_trip(self, Accel::Tcg, INSTRUCTIONS_DEADLINE)
                .await
                .map(|()| Wrong {
                    adx: false,
                    bmi1: false,
                })
                .map_err(|refusal| refusal.to_string());
        }
        let guest = TestGuest::start(self, Accel::Tcg, Body::Instructions)
            .await
            .map_err(|error| describe(&error))?;
        match guest.report(INSTRUCTIONS_DEADLINE).await {
            Some(Ok(Report::Instructions(wrong))) => Ok(wrong),
            Some(Ok(other)) => Err(format!("a test guest reported {other:?}")),
            Some(Err(exit)) => Err(format!("a test guest did not run: {exit}")),
            None => Err(format!(
                "no sign of life within {} s",
                INSTRUCTIONS_DEADLINE.as_secs()
            )),
        }
    }

    pub(crate) async fn launch(
        &self,
        name: &str,
        accel: Accel,
        args: Vec<OsString>,
        descriptors: Vec<(RawFd, OwnedFd)>,
    ) -> Result<Process, Error> {
        let mut confinement = Confinement::new(self.jail, Limits::default(), 0, accel);
        if let Some(installed) = self.seeing {
            let view = View {
                installed,
                files: Vec::new(),
                accel,
                network: NetworkMode::None,
            };
            confinement = confinement.seeing(&view).map_err(landlock_failed)?;
        }
        let binary = self.binary.to_owned();
        Process::spawn(Launch {
            name: name.into(),
            binary,
            args,
            environment: Vec::new(),
            descriptors,
            confinement,
        })
        .await
    }

    /// QEMU reads the header and tables of a disk image when it opens it: a greeting means that
    /// io_uring carried them.
    async fn io_uring(&self) -> Result<(), Error> {
        let (ours, theirs) = socketpair()?;
        let image = empty_image().map_err(Error::io("create", "a disk image in memory"))?;
        let qmp = format!("socket,id=qmp,fd={}", fd::QMP);
        let disk = format!("fd={},set=0", fd::DISK);
        let args = probe_argv(&[
            "-machine",
            "none",
            "-chardev",
            &qmp,
            "-mon",
            "chardev=qmp,mode=control",
            "-add-fd",
            &disk,
            "-blockdev",
            "driver=file,node-name=file,filename=/dev/fdset/0,read-only=on,aio=io_uring",
            "-blockdev",
            "driver=qcow2,node-name=disk,file=file,read-only=on",
        ]);
        let descriptors = vec![(fd::QMP, theirs), (fd::DISK, image.into())];
        let process = self
            .launch("probe-aio", Accel::Tcg, args, descriptors)
            .await?;
        let qmp = Qmp::connect(ours, process.exit().clone()).await?;
        qmp.run_within(Quit {}, QUIT_DEADLINE).await?;
        Ok(())
    }
}

/// The features that hold these instructions. C libraries that find the second set of bit
/// instructions use the first without asking, as no processor has one without the other.
fn named(wrong: Wrong) -> Vec<String> {
    let features = [
        (wrong.adx, "adx"),
        (wrong.bmi1, "bmi1"),
        (wrong.bmi1, "bmi2"),
    ];
    features
        .into_iter()
        .filter(|(is_wrong, _)| *is_wrong)
        .map(|(_, feature)| feature.to_owned())
        .collect()
}

/// Everything that belongs to a QEMU.
pub(crate) fn installed(binary: &Path, data_dirs: &[PathBuf]) -> Vec<PathBuf> {
    data_dirs
        .iter()
        .cloned()
        .chain(landlock::beside(binary))
        .collect()
}

pub(crate) fn landlock_failed(source: std::io::Error) -> Error {
    Error::Jail {
        step: Step::Landlock,
        source,
    }
}

/// The chain of causes in one line, since a verdict is kept as text.
pub(crate) fn describe(error: &Error) -> String {
    let cause = std::error::Error::source(error);
    cause.map_or_else(|| error.to_string(), |cause| format!("{error}: {cause}"))
}

/// Our end for the runtime, theirs to hand over.
pub(crate) fn socketpair() -> Result<(UnixStream, OwnedFd), Error> {
    let make = || {
        let (ours, theirs) = StdUnixStream::pair()?;
        ours.set_nonblocking(true)?;
        Ok((UnixStream::from_std(ours)?, theirs.into()))
    };
    make().map_err(Error::io("create", "a socket pair"))
}

/// The smallest qcow2 image: a header, and tables of zeros at their clusters of 64 KiB.
fn empty_image() -> std::io::Result<File> {
    let words: [u32; 26] = [
        0x5146_49fb,
        3,
        0,
        0,
        0,
        16, // magic, version, no backing file, bits of a cluster
        0,
        1 << 16,
        0,
        1,
        0,
        3 << 16, // size, no encryption, one table entry, where its table is
        0,
        1 << 16,
        1,
        0,
        0,
        0, // where the reference counts are, one cluster of them, no snapshots
        0,
        0,
        0,
        0,
        0,
        0,
        4,
        104, // no features, width of a count, length of this header
    ];
    let file = File::from(memfd_create("probe-disk", MemfdFlags::CLOEXEC)?);
    file.set_len(4 << 16)?;
    file.write_all_at(&words.map(u32::to_be_bytes).concat(), 0)?;
    // QEMU takes a descriptor of an fd set only for the access it was opened with.
    File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))
}
