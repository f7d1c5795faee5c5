//! Errors of the engine. Each message states its own fact with its values and does not repeat its
//! source.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use thiserror::Error;

use crate::accel::Accel;
use crate::exit::Exit;
use crate::jail::Step;
use crate::preload::format::Failure;
use crate::version::Version;

#[derive(Debug, Error)]
pub enum Error {
    #[error("no {program} found; looked in {}", list(looked))]
    NotFound {
        program: String,
        looked: Vec<PathBuf>,
    },

    #[error("QEMU {found} at {binary} is too old: {needed} or newer is needed", binary = binary.display(), needed = Version::OLDEST)]
    TooOld { binary: PathBuf, found: Version },

    #[error("{binary} does not print a QEMU version; it printed {output:?}", binary = binary.display())]
    VersionUnknown { binary: PathBuf, output: String },

    #[error("accelerator {accel} cannot be used: {reason}")]
    AccelUnusable { accel: Accel, reason: String },

    #[error("QEMU {version} has no processor {model:?}; it has {}", known.join(", "))]
    UnknownCpu {
        model: String,
        version: Version,
        known: Vec<String>,
    },

    #[error("the processor lacks {}", features.join(", "))]
    CpuLacks { features: Vec<String> },

    #[error("this QEMU has no screens: {reason}")]
    NoScreens { reason: String },

    #[error("invalid machine: {detail}")]
    Spec { detail: String },

    /// The kernel and the initramfs are opened again by the machine's own user.
    #[error("the {file} is not readable for user id {uid}, which the machine runs as")]
    Unreadable { file: &'static str, uid: u32 },

    #[error("cannot confine QEMU: {step}")]
    Jail {
        step: Step,
        #[source]
        source: io::Error,
    },

    #[error("QEMU ended while starting: {exit}")]
    Start { exit: Exit },

    /// The caller may start again with the same memory in a file of its own.
    #[error("cannot map the guest's memory from its layers: {reason}")]
    NotMapped { reason: String },

    #[error("writes to the guest's memory are not tracked")]
    Untracked {
        #[source]
        source: Untracked,
    },

    #[error("QEMU cannot load the state: {reason}")]
    NotLoaded { reason: String },

    #[error("QEMU cannot save the state: {reason}")]
    NotSaved { reason: String },

    /// It leaves that guest for each interrupt: the next stop may find it outside.
    #[error("its processor executes a guest of its own, and QEMU cannot load that under emulation")]
    InNestedGuest,

    #[error("QEMU cannot copy the disk: {reason}")]
    NotCopied { reason: String },
    #[error(
        "QEMU switched the disk after its deadline; a state taken now begins from another overlay"
    )]
    PivotedLate,

    #[error("QEMU has ended: {exit}")]
    Died { exit: Exit },

    #[error("QEMU refused {command}: {desc} ({class})")]
    Qmp {
        command: &'static str,
        class: String,
        desc: String,
    },

    #[error("QEMU, process {pid}, was killed and has not ended within {after:?}")]
    NotEnded { pid: u32, after: Duration },

    #[error("QEMU did not answer {command} within {after:?}")]
    Timeout {
        command: &'static str,
        after: Duration,
    },

    #[error("QEMU broke the control protocol: {detail}")]
    Protocol { detail: String },

    #[error("cannot {op} {path}", path = path.display())]
    Io {
        op: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// Why writes are not tracked by write protection.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Untracked {
    #[error("{reason}")]
    NoLibrary { reason: String },
    #[error("{step}: {}", io::Error::from_raw_os_error(*errno))]
    Refused { step: &'static str, errno: i32 },
}

impl From<Failure> for Untracked {
    fn from(Failure { step, errno }: Failure) -> Self {
        Untracked::Refused {
            step: step.describe(),
            errno,
        }
    }
}

impl Error {
    pub(crate) fn io(
        op: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(io::Error) -> Error {
        let path = path.into();
        move |source| Error::Io { op, path, source }
    }
}

fn list(paths: &[PathBuf]) -> String {
    if paths.is_empty() {
        return "no directory at all".into();
    }
    paths
        .iter()
        .map(|path| path.display().to_string())
        .collect::<Vec<_>>()
        .join(", ")
}
