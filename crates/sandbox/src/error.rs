//! What can go wrong, by operation. Display states the fact; the source has its own.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use sandtree_engine as engine;
use sandtree_images as images;
use sandtree_proto::Failure;
use sandtree_registry as registry;
use sandtree_store::{self as store, ManifestError, Named};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::console::Console;
use crate::fault::Injected;
use crate::link::LinkError;
use crate::verb::{Phase, Verb};

pub type Result<T, E = Error> = std::result::Result<T, E>;

#[derive(Debug, Error)]
pub enum Error {
    #[error("{value:?} does not do as {what}: {rule}")]
    Invalid {
        what: String,
        value: String,
        rule: String,
    },
    #[error("there is no sandbox {name}")]
    NoSandbox { name: String },
    #[error("there is no detached command {id} in this sandbox")]
    NoExec { id: String },
    /// Of work on images.
    #[error(transparent)]
    Image(#[from] images::Error),
    #[error("{step:?} failed: {status}{}", said(output))]
    BuildStep {
        step: String,
        status: String,
        output: String,
    },
    #[error("sandbox {name} is {phase}{}; it cannot {verb}", because(*phase, reason.as_deref()))]
    WrongState {
        name: String,
        phase: Phase,
        reason: Option<String>,
        verb: Verb,
    },
    #[error("the name {name} is taken by sandbox {holder}")]
    NameTaken { name: String, holder: String },
    #[error("sandbox {name} is in use by another process")]
    Busy { name: String },
    #[error("{} has {available} MiB of memory to give, the sandbox asks for {wanted} MiB", giver(cgroup.as_deref()), available = available_bytes >> 20, wanted = wanted_bytes >> 20)]
    HostMemory {
        wanted_bytes: u64,
        available_bytes: u64,
        /// The control group whose limit it is.
        cgroup: Option<PathBuf>,
    },
    #[error("{path} has {available} MiB free, a sandbox needs {wanted} MiB to start", path = path.display(), available = available_bytes >> 20, wanted = wanted_bytes >> 20)]
    HostDisk {
        path: PathBuf,
        wanted_bytes: u64,
        available_bytes: u64,
    },
    #[error("{} is on a FUSE file system that only the user who mounted it may use, and machines run as users of their own", path.display())]
    ClosedPlace { path: PathBuf },
    #[error("the host's disk is full; the guest waits until there is space again")]
    Stalled,
    #[error("cannot listen on {address}")]
    Port {
        address: String,
        #[source]
        source: io::Error,
    },
    #[error("the guest did not come up within {} s; its console ends with:\n{console}", after.as_secs())]
    Boot { after: Duration, console: String },
    #[error("the guest ended while it started: {reason}; its console ends with:\n{console}")]
    BootEnded { reason: String, console: String },
    #[error("the disk of sandbox {name} is damaged: {what}")]
    DamagedDisk { name: String, what: String },
    #[error("cannot start {command}")]
    NotStarted {
        command: String,
        #[source]
        failure: Failure,
    },
    #[error("cannot {operation}")]
    Guest {
        operation: String,
        #[source]
        source: LinkError,
    },
    #[error("the command's output is over the limit of {limit} bytes")]
    OutputLimit { limit: usize },
    #[error("the guest's archive is refused: {what}")]
    Archive { what: String },
    #[error("QEMU cannot {operation}")]
    Engine {
        operation: &'static str,
        #[source]
        source: engine::Error,
    },
    #[error("the store cannot {operation}")]
    Store {
        operation: &'static str,
        #[source]
        source: store::Error,
    },
    #[error("cannot {operation} {path}", path = path.display())]
    Io {
        operation: String,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the keeper of sandbox {name} does not answer")]
    Keeper {
        name: String,
        #[source]
        source: io::Error,
    },
    #[error("{}", report.message)]
    Remote { report: Report },
    #[error("sandbox {name} has no state {state}")]
    NoState { name: String, state: String },
    #[error("the tag {tag} is taken in sandbox {name}")]
    TagTaken { name: String, tag: String },
    #[error("sandbox {name} has {possible} states to go {way} to, not {wanted}")]
    NoWay {
        name: String,
        way: &'static str,
        wanted: usize,
        possible: usize,
    },
    #[error("state {state} cannot be removed: {by}")]
    StateInUse { state: String, by: String },
    #[error("state {state} is not whole: {what}")]
    BrokenState { state: String, what: String },
    #[error("state {state} cannot go on here: its {what} is {then}, here it is {here}")]
    ForeignState {
        state: String,
        what: String,
        then: String,
        here: String,
    },
    #[error("state {state} cannot go on here: its processor has {}, which that of QEMU {qemu} lacks", features.join(", "))]
    LackingProcessor {
        state: String,
        qemu: String,
        features: Vec<String>,
    },
    #[error("cannot listen on {}: its file system has no sockets", path.display())]
    NoSockets {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(
        "state {state} cannot continue here: its guest can run guests of its own, which this sandbox does not allow"
    )]
    NestedState { state: String },
    #[error(
        "the disk of sandbox {name} has {layers} layers, too many to go on, and they could not be folded"
    )]
    TooDeep {
        name: String,
        layers: usize,
        #[source]
        source: Option<Box<Error>>,
    },
    #[error("the restored guest did not acknowledge its new identity within {} s", after.as_secs())]
    Unacknowledged { after: Duration },
    #[error("the snapshot is of a {there} machine, and machines here are {here}")]
    ForeignArch { there: String, here: String },
    #[error("there is no snapshot {reference}")]
    NoSnapshot { reference: String },
    #[error("it needs image {name} with digest {digest}, which is not here{}", is_other(here.as_deref()))]
    MissingImage {
        name: String,
        digest: String,
        /// What has the image's name here.
        here: Option<String>,
    },
    #[error(
        "the snapshot was saved with {saved:?} as its {what}, and its memory cannot go on with {asked:?}"
    )]
    NotAsSaved {
        what: &'static str,
        saved: String,
        asked: String,
    },
    #[error("the name {name} is taken by {by}")]
    SnapshotNameTaken { name: String, by: String },
    #[error("sandbox {name} stopped, and was not saved as {target}")]
    NotSaved {
        name: String,
        target: String,
        #[source]
        source: Box<Error>,
    },
    #[error("sandbox {name} is {phase}: it has no memory to save")]
    NoMemory { name: String, phase: Phase },
    #[error("the disks cannot be compared")]
    Diff {
        #[source]
        source: sandtree_diff::Error,
    },
    #[error("sandbox {name} stopped, and was not saved as {target}: {reason}")]
    StillUnsaved {
        name: String,
        target: String,
        reason: String,
    },
    #[error("snapshot {reference} is damaged: {}", list(damaged))]
    Damaged {
        reference: String,
        damaged: Vec<store::Damaged>,
    },
    #[error("sandbox {name} was to {by}, so it could not {verb}")]
    Interrupted { name: String, verb: Verb, by: Verb },
    #[error("sandbox {name} cannot {verb}: an internal error: {message}")]
    Panicked {
        name: String,
        verb: Verb,
        message: String,
    },
    #[error(
        "the keeper of sandbox {name} speaks {theirs} of the keeper protocol, this program version {ours}"
    )]
    KeeperVersion {
        name: String,
        theirs: String,
        ours: u32,
    },
    #[cfg(feature = "faults")]
    #[error("a test injected a fault at {step}")]
    Injected { step: crate::fault::Step },
}

impl From<Injected> for Error {
    #[cfg(feature = "faults")]
    fn from(injected: Injected) -> Self {
        Error::Injected {
            step: injected.step,
        }
    }

    #[cfg(not(feature = "faults"))]
    fn from(never: Injected) -> Self {
        match never {}
    }
}

pub(crate) fn unreachable_guest(source: LinkError) -> Error {
    Error::Guest {
        operation: "reach the guest".into(),
        source,
    }
}

pub(crate) fn store_error(operation: &'static str) -> impl FnOnce(store::Error) -> Error {
    move |source| Error::Store { operation, source }
}

pub(crate) fn engine_error(operation: &'static str) -> impl FnOnce(engine::Error) -> Error {
    move |source| Error::Engine { operation, source }
}

/// The dozen ways to fail that edges tell apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorKind {
    NotFound,
    AlreadyExists,
    Invalid,
    Busy,
    WrongState,
    Unsupported,
    Exhausted,
    Timeout,
    Guest,
    Engine,
    Corrupt,
    Io,
    /// A defect of this program.
    Internal,
}

/// An error as it crosses a process boundary, and as `--json` shows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    pub kind: ErrorKind,
    pub message: String,
    pub causes: Vec<String>,
    pub hint: Option<String>,
}

impl Error {
    pub fn invalid(what: &str, value: impl ToString, rule: &str) -> Self {
        Error::Invalid {
            what: what.into(),
            value: value.to_string(),
            rule: rule.into(),
        }
    }

    pub fn io(operation: &str, path: impl AsRef<Path>, source: io::Error) -> Self {
        Error::Io {
            operation: operation.into(),
            path: path.as_ref().to_owned(),
            source,
        }
    }

    /// Adds the console's last lines to an error that is about a guest that did not come up.
    pub(crate) fn with_console(mut self, log: &Console) -> Self {
        if let Error::Boot { console, .. } | Error::BootEnded { console, .. } = &mut self {
            *console = log.tail();
        }
        self
    }

    pub fn kind(&self) -> ErrorKind {
        match self {
            Error::Invalid { .. } => ErrorKind::Invalid,
            Error::BuildStep { .. } => ErrorKind::Guest,
            Error::Image(source) => image_kind(source),
            Error::NoSandbox { .. } | Error::NoExec { .. } | Error::NoState { .. } => {
                ErrorKind::NotFound
            }
            Error::NoWay { .. } | Error::NoSnapshot { .. } | Error::MissingImage { .. } => {
                ErrorKind::NotFound
            }
            Error::NotAsSaved { .. } | Error::ForeignArch { .. } => ErrorKind::Unsupported,
            Error::NoMemory { .. } => ErrorKind::WrongState,
            Error::StillUnsaved { .. } => ErrorKind::Io,
            Error::Damaged { .. } => ErrorKind::Corrupt,
            Error::Diff { source } => diff_kind(source),
            Error::SnapshotNameTaken { .. } => ErrorKind::AlreadyExists,
            Error::NotSaved { source, .. } => source.kind(),
            Error::StateInUse { .. } => ErrorKind::WrongState,
            Error::BrokenState { .. } => ErrorKind::Corrupt,
            Error::ForeignState { .. }
            | Error::LackingProcessor { .. }
            | Error::NestedState { .. }
            | Error::NoSockets { .. } => ErrorKind::Unsupported,
            Error::Unacknowledged { .. } => ErrorKind::Guest,
            Error::TooDeep { .. } => ErrorKind::Exhausted,
            Error::WrongState { .. } => ErrorKind::WrongState,
            Error::NameTaken { .. } | Error::TagTaken { .. } => ErrorKind::AlreadyExists,
            Error::Busy { .. } | Error::Port { .. } => ErrorKind::Busy,
            Error::HostMemory { .. }
            | Error::HostDisk { .. }
            | Error::Stalled
            | Error::OutputLimit { .. } => ErrorKind::Exhausted,
            Error::ClosedPlace { .. } => ErrorKind::Unsupported,
            Error::Boot { .. } => ErrorKind::Timeout,
            Error::BootEnded { .. } | Error::NotStarted { .. } => ErrorKind::Guest,
            Error::DamagedDisk { .. } | Error::Archive { .. } => ErrorKind::Corrupt,
            Error::Guest { source, .. } => link_kind(source),
            Error::Engine { source, .. } => engine_kind(source),
            Error::Store { source, .. } => store_kind(source),
            Error::Io { source, .. } | Error::Keeper { source, .. } => io_kind(source),
            Error::Remote { report } => report.kind,
            Error::Interrupted { .. } => ErrorKind::WrongState,
            Error::Panicked { .. } => ErrorKind::Internal,
            Error::KeeperVersion { .. } => ErrorKind::Unsupported,
            #[cfg(feature = "faults")]
            Error::Injected { .. } => ErrorKind::Io,
        }
    }

    /// What a person could do about it, where we know.
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            Error::NoSandbox { .. } => "`sandtree ps -a` lists the sandboxes of this store",
            Error::NoExec { .. } => "`sandtree attach SANDBOX` lists them",
            Error::KeeperVersion { .. } => {
                "stop the sandbox with the program that started it; `sandtree inspect` shows its process"
            }
            Error::Panicked { .. } => {
                "this is a defect of sandtree; the sandbox's keeper.log has the details"
            }
            Error::BuildStep { .. } => {
                "the steps before it are kept: the next build goes on from there"
            }
            Error::WrongState {
                phase: Phase::Stopped | Phase::Crashed,
                ..
            } => "`sandtree start` starts it again",
            Error::WrongState {
                phase: Phase::Running,
                verb: Verb::Remove,
                ..
            } => "stop it with `sandtree stop`, or remove it as it runs with `sandtree rm -f`",
            Error::WrongState {
                phase: Phase::Paused,
                ..
            } => "`sandtree resume` lets it go on",
            Error::NoState { .. } => "`sandtree log SANDBOX` lists its states",
            Error::TagTaken { .. } => "choose another tag, or replace it with --force",
            Error::NoWay { .. } => "`sandtree log SANDBOX` shows where it stands",
            Error::StateInUse { .. } => "resume the sandbox first",
            Error::BrokenState { .. } => {
                "go back to another state: `sandtree log SANDBOX` lists them"
            }
            Error::NoSnapshot { .. } => "`sandtree snapshot ls` lists the snapshots of this store",
            Error::MissingImage { .. } => "export it again with its image, or import the image",
            Error::NotAsSaved {
                what: "arguments of QEMU",
                ..
            } => {
                "say them again with --qemu-arg, if you trust whoever saved it, or boot from its disk with --cold"
            }
            Error::NotAsSaved {
                what: "network",
                saved,
                ..
            } if saved == "full" => {
                "--network isolated cuts it off from everything; --cold boots from its disk"
            }
            Error::NotAsSaved { .. } => "leave the option away, or boot from its disk with --cold",
            Error::SnapshotNameTaken { by, .. } if by.starts_with("image ") => {
                "choose another name: images are not replaced"
            }
            Error::SnapshotNameTaken { by, .. } if by.starts_with("the save to come") => {
                "choose another name, or remove that sandbox"
            }
            Error::SnapshotNameTaken { .. } => "choose another name, or replace it with --force",
            Error::ForeignArch { .. } => "run it on a host of its architecture",
            Error::NoMemory { .. } => "leave --memory away: its disk is saved",
            Error::Damaged { damaged, .. }
                if damaged.iter().all(|part| part.quarantined.is_none()) =>
            {
                "`sandtree snapshot verify` tells all that is damaged; import the snapshot again, or use another"
            }
            Error::Damaged { .. } => {
                "what is damaged was moved to quarantine/ in the store; import the snapshot again, or use another"
            }
            Error::StillUnsaved { reason, .. } if reason == "it was removed" => return None,
            Error::NotSaved { .. } | Error::StillUnsaved { .. } => {
                "the sandbox is kept: `sandtree save SANDBOX NAME` saves it"
            }
            Error::ForeignState { what, then, .. } if what == "accelerator" && then == "tcg" => {
                "`--accel tcg` continues it by emulation; `--cold` boots a sandbox from its disk"
            }
            Error::ForeignState { .. } => {
                "`sandtree run --cold` boots a snapshot from its disk; `sandtree save SANDBOX NAME` \
                 makes one of a sandbox"
            }
            Error::NoSockets { .. } => {
                "put the store on a file system with Unix sockets, such as ext4, XFS, Btrfs or tmpfs, with --home"
            }
            Error::NestedState { .. } => {
                "`--nested` allows it; `--cold` boots a sandbox from its disk"
            }
            Error::LackingProcessor { .. } => {
                "`--cold` boots a sandbox from its disk; one that is created with `--cpu Opteron_G3` goes on under older ones, too"
            }
            Error::TooDeep { .. } => "free some space: layers are folded into a new file",
            Error::Unacknowledged { .. } => {
                "its agent does not answer; another state may be better"
            }
            Error::NameTaken { .. } => {
                "choose another --name, or remove the other with `sandtree rm`"
            }
            Error::HostMemory {
                cgroup: Some(_), ..
            } => "give it less with --memory, or raise the group's memory limit",
            Error::HostMemory { .. } => "give it less with --memory, or stop another sandbox",
            Error::HostDisk { .. } => "free some space, or choose another store with --home",
            Error::ClosedPlace { .. } => {
                "mount it with the option allow_other, or choose another store with --home"
            }
            Error::Stalled => {
                "free some space on the file system of the store; the guest goes on by itself"
            }
            Error::Guest {
                source: LinkError::Ended,
                ..
            } => "`sandtree inspect` tells what became of the sandbox",
            Error::Port { .. } => "choose another host port",
            Error::Boot { .. } => {
                "a slow host may need a longer --boot-timeout; `sandtree doctor` shows the accelerator"
            }
            Error::DamagedDisk { .. } => {
                "its disk was not written out before the host went down; remove the sandbox, or keep its directory for rescue"
            }
            Error::Engine { source, .. } => return engine_hint(source),
            Error::Store { source, .. } => return store_hint(source),
            Error::Image(source) => return image_hint(source),
            Error::Remote { report } => return report.hint.clone(),
            _ => return None,
        };
        Some(hint.to_owned())
    }

    pub fn report(&self) -> Report {
        if let Error::Remote { report } = self {
            return report.clone();
        }
        let mut causes = Vec::new();
        let mut source = std::error::Error::source(self);
        while let Some(cause) = source {
            causes.push(cause.to_string());
            source = cause.source();
        }
        Report {
            kind: self.kind(),
            message: self.to_string(),
            causes,
            hint: self.hint(),
        }
    }

    /// The message with its causes, for a place that has one line.
    pub(crate) fn one_line(&self) -> String {
        let report = self.report();
        std::iter::once(report.message)
            .chain(report.causes)
            .collect::<Vec<_>>()
            .join(": ")
    }
}

fn giver(cgroup: Option<&Path>) -> String {
    cgroup.map_or_else(
        || "the host".into(),
        |group| format!("the control group {}", group.display()),
    )
}

fn list(damaged: &[store::Damaged]) -> String {
    damaged
        .iter()
        .map(|part| format!("{}: {}", part.what, part.reason))
        .collect::<Vec<_>>()
        .join("; ")
}

fn is_other(here: Option<&str>) -> String {
    here.map(|digest| format!("; the image of that name here is {digest}"))
        .unwrap_or_default()
}

/// A sandbox that was stopped needs no further reason.
fn because(phase: Phase, reason: Option<&str>) -> String {
    match reason {
        Some(reason) if reason != phase.to_string() => format!(" ({reason})"),
        _ => String::new(),
    }
}

fn image_kind(error: &images::Error) -> ErrorKind {
    use images::Error as Image;
    match error {
        Image::Make { source, .. } | Image::Transfer { source, .. } => image_kind(source),
        Image::NoImage { .. } | Image::NoImageOrSnapshot { .. } => ErrorKind::NotFound,
        Image::NotAnImage { .. } => ErrorKind::Invalid,
        Image::NameTaken { .. } => ErrorKind::AlreadyExists,
        Image::Store { source, .. } | Image::Publish(source) => store_kind(source),
        Image::Io { source, .. } => io_kind(source),
        Image::Cancelled => ErrorKind::Io,
        Image::Recipe { .. } | Image::Unknown { .. } => ErrorKind::Invalid,
        Image::Config { .. } | Image::WrongLayer { .. } | Image::Malformed { .. } => {
            ErrorKind::Corrupt
        }
        Image::Rootfs(source) => system_kind(&**source),
        Image::Disk(source) => system_kind(&**source),
        Image::Registry(source) => registry_kind(source),
        Image::ToolMissing { .. }
        | Image::ToolFailed { .. }
        | Image::UnknownPackage { .. }
        | Image::NoDebianSources
        | Image::Download { .. }
        | Image::Incomplete { .. }
        | Image::ModuleMissing { .. } => ErrorKind::Unsupported,
    }
}

fn registry_kind(error: &registry::Error) -> ErrorKind {
    use registry::Error as Registry;
    match error {
        Registry::NotFound { .. } => ErrorKind::NotFound,
        Registry::Reference { .. }
        | Registry::NoRegistry { .. }
        | Registry::Digest(_)
        | Registry::Denied { .. }
        | Registry::Unauthorized { .. }
        | Registry::Helper { .. }
        | Registry::File { .. } => ErrorKind::Invalid,
        Registry::TooManyRequests { .. } => ErrorKind::Busy,
        Registry::UnknownMediaType { .. } | Registry::NoPlatform { .. } => ErrorKind::Unsupported,
        Registry::WrongDigest { .. }
        | Registry::WrongSize { .. }
        | Registry::TooLarge { .. }
        | Registry::Document { .. } => ErrorKind::Corrupt,
        Registry::ConnectionLost { .. }
        | Registry::Tls { .. }
        | Registry::Redirects { .. }
        | Registry::Registry { .. }
        | Registry::Protocol { .. }
        | Registry::Cancelled
        | Registry::Io { .. } => ErrorKind::Io,
    }
}

fn image_hint(error: &images::Error) -> Option<String> {
    use images::Error as Image;
    let hint = match error {
        Image::Make { source, .. } | Image::Transfer { source, .. } => return image_hint(source),
        Image::NoImage { .. } => {
            "`debian` and `tiny` are built in; `sandtree image ls` lists the others"
        }
        Image::NoImageOrSnapshot { .. } => {
            "`sandtree image ls` and `sandtree snapshot ls` list what there is"
        }
        Image::NotAnImage { .. } => "`sandtree snapshot` looks after snapshots",
        Image::NameTaken { by, .. } => match by {
            Named::Image(_) => "choose another name: images are not replaced",
            Named::Snapshot(_) => "choose another name, or replace it with --force",
            Named::Reserved(_) => "choose another name, or remove that sandbox",
        },
        Image::Store { source, .. } => return store_hint(source),
        Image::ToolMissing { hint, .. } => hint,
        Image::UnknownPackage { .. } => {
            "run `apt-get update`; Debian 12 and later have the package"
        }
        Image::NoDebianSources => {
            "add Debian's archive to apt's sources and run `apt-get update`, or import another root file system"
        }
        Image::Unknown { .. } => {
            "give a tar archive, a directory, an OCI layout or archive, a qcow2 or a raw disk with an ext4 root"
        }
        Image::Download { .. } => "check the network and apt's sources, and run `apt-get update`",
        Image::Registry(source) => source.hint()?,
        Image::Publish(_)
        | Image::ToolFailed { .. }
        | Image::Incomplete { .. }
        | Image::Malformed { .. }
        | Image::ModuleMissing { .. }
        | Image::Io { .. }
        | Image::Cancelled
        | Image::Recipe { .. }
        | Image::WrongLayer { .. }
        | Image::Config { .. }
        | Image::Rootfs(_)
        | Image::Disk(_) => return None,
    };
    Some(hint.to_owned())
}

/// Of work on files that is refused for what they are, unless it is the system that refused.
fn system_kind(error: &(dyn std::error::Error + 'static)) -> ErrorKind {
    let chain = std::iter::successors(Some(error), |error| error.source());
    let refused = chain
        .filter_map(|error| error.downcast_ref::<io::Error>())
        .find(|e| e.raw_os_error().is_some());
    refused.map_or(ErrorKind::Corrupt, io_kind)
}

/// The end of what a command said, if it said anything.
fn said(output: &str) -> String {
    if output.is_empty() {
        String::new()
    } else {
        format!("; it said:\n{output}")
    }
}

fn link_kind(error: &LinkError) -> ErrorKind {
    match error {
        LinkError::Ended | LinkError::Lost { .. } => ErrorKind::WrongState,
        LinkError::Timeout { .. } => ErrorKind::Timeout,
        LinkError::Version => ErrorKind::Unsupported,
        LinkError::Request(_) => ErrorKind::Invalid,
        LinkError::Protocol { .. } => ErrorKind::Guest,
        LinkError::Refused(failure) => match failure.errno {
            2 => ErrorKind::NotFound,
            17 => ErrorKind::AlreadyExists,
            28 | 122 => ErrorKind::Exhausted,
            _ => ErrorKind::Guest,
        },
    }
}

fn io_kind(error: &io::Error) -> ErrorKind {
    match error.kind() {
        io::ErrorKind::NotFound => ErrorKind::NotFound,
        io::ErrorKind::AlreadyExists => ErrorKind::AlreadyExists,
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ErrorKind::Exhausted,
        _ => ErrorKind::Io,
    }
}

fn engine_kind(error: &engine::Error) -> ErrorKind {
    match error {
        engine::Error::NotFound { .. } => ErrorKind::NotFound,
        engine::Error::TooOld { .. }
        | engine::Error::AccelUnusable { .. }
        | engine::Error::CpuLacks { .. } => ErrorKind::Unsupported,
        engine::Error::Spec { .. } | engine::Error::UnknownCpu { .. } => ErrorKind::Invalid,
        engine::Error::Timeout { .. } | engine::Error::NotEnded { .. } => ErrorKind::Timeout,
        engine::Error::InNestedGuest => ErrorKind::Busy,
        engine::Error::Io { source, .. } => io_kind(source),
        _ => ErrorKind::Engine,
    }
}

fn engine_hint(error: &engine::Error) -> Option<String> {
    let hint = match error {
        engine::Error::NotFound { .. } => {
            "install QEMU (Debian: apt-get install qemu-system-x86), or name one with --qemu"
        }
        engine::Error::NotEnded { .. } => {
            "it waits for a disk or file server that does not answer, or a debugger holds it; try again when that is over"
        }
        engine::Error::Unreadable { .. } => {
            "put the store on a file system that keeps owners and modes, such as ext4, with --home, or run machines as \
             yourself with --machine-user caller"
        }
        engine::Error::InNestedGuest => "stop the guests that it runs",
        engine::Error::TooOld { .. } => "install a newer QEMU, or name another one with --qemu",
        engine::Error::UnknownCpu { .. } => {
            "leave --cpu out for the best there is; Opteron_G3 is the same under every QEMU"
        }
        engine::Error::AccelUnusable { .. } => {
            "use --accel auto; `sandtree doctor` shows what works here"
        }
        engine::Error::Start { .. } => {
            "if --qemu-arg is given, look there first; `sandtree doctor` checks the rest"
        }
        _ => return None,
    };
    Some(hint.to_owned())
}

fn diff_kind(error: &sandtree_diff::Error) -> ErrorKind {
    match error {
        sandtree_diff::Error::NotFound(_) => ErrorKind::NotFound,
        sandtree_diff::Error::Io { .. } => ErrorKind::Io,
        _ => ErrorKind::Corrupt,
    }
}

fn store_kind(error: &store::Error) -> ErrorKind {
    use store::Error as Store;
    match error {
        Store::Io { source, .. }
        | Store::LayerIo { source, .. }
        | Store::ArtifactIo { source, .. } => io_kind(source),
        Store::NewerFormat { .. } | Store::OlderFormat { .. } | Store::NewerSchema { .. } => {
            ErrorKind::Unsupported
        }
        Store::Manifest {
            source: ManifestError::Schema { .. } | ManifestError::Requires { .. },
            ..
        } => ErrorKind::Unsupported,
        Store::NotAStore { .. }
        | Store::ForeignRoot { .. }
        | Store::OpenRoot { .. }
        | Store::NotASnapshotDir { .. }
        | Store::DiskSize { .. }
        | Store::MemorySize { .. }
        | Store::NameIsAnId { .. }
        | Store::OtherKind { .. }
        | Store::Labels(_) => ErrorKind::Invalid,
        Store::Corrupt { .. }
        | Store::MemoryLayer(_)
        | Store::DiskLayer { .. }
        | Store::DiskChain { .. }
        | Store::Artifact(_)
        | Store::Manifest { .. } => ErrorKind::Corrupt,
        Store::NameTaken { .. } | Store::NameInUse { .. } => ErrorKind::AlreadyExists,
        Store::UnknownImage { .. }
        | Store::UnknownSandbox { .. }
        | Store::UnknownSnapshot { .. }
        | Store::UnknownState { .. }
        | Store::MissingImage { .. }
        | Store::MissingKernel { .. }
        | Store::MissingBase { .. } => ErrorKind::NotFound,
        Store::NotEnoughSpace { .. } => ErrorKind::Exhausted,
        Store::Busy { .. } => ErrorKind::Busy,
        _ => ErrorKind::Io,
    }
}

fn store_hint(error: &store::Error) -> Option<String> {
    use store::Error as Store;
    let hint = match error {
        Store::ForeignRoot { root, user, .. } => {
            let root = root.display();
            return Some(format!(
                "choose another store with --home; or, if nobody else put anything there: chown -R {user} {root}"
            ));
        }
        Store::OpenRoot { root, .. } => return Some(format!("chmod go-w {}", root.display())),
        Store::MissingImage { .. } | Store::MissingKernel { .. } => {
            "export it again with its image"
        }
        Store::MissingBase { .. } => "import that snapshot first, or export without --since",
        Store::NotEnoughSpace { .. } => {
            "free some space, perhaps by `sandtree gc`, or choose another store with --home"
        }
        Store::Io { source, .. } if source.kind() == io::ErrorKind::ReadOnlyFilesystem => {
            "choose a store that can be written with --home or SANDTREE_HOME"
        }
        Store::Artifact(_) => "the file is cut, changed or none of ours; export it again",
        Store::NotASnapshotDir { .. } => "only the directory of a snapshot is replaced or removed",
        _ => return None,
    };
    Some(hint.to_owned())
}
