//! What can go wrong, by operation. Display states the fact; the source has its own.
//!
//! ```text
//!   Error ── facts (code, arguments) ──► Report ── keeper's socket, HTTP, Python ──► Error::Remote
//!     └ descends into the errors of store, engine, images, registry, diff and link
//! ```
//!
//! Always: the code is that of the most specific error known, the kind is a function of the code,
//! and no decision depends on a message. Hints belong to the edges.

mod code;
mod facts;
mod parts;
mod report;
mod sources;
#[cfg(test)]
mod tests;

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use sandtree_engine as engine;
use sandtree_images as images;
use sandtree_proto::Failure;
use sandtree_store as store;
use thiserror::Error;

pub use self::code::{Code, ErrorKind};
pub use self::parts::{MachinePart, NameHolder, Setting, StateUser, Unsaved};
pub use self::report::{Arguments, Report};
use self::report::{Facts, Known};
use crate::console::Console;
use crate::fault::Injected;
use crate::link::LinkError;
use crate::verb::{Phase, Verb};

pub type Result<T, E = Error> = std::result::Result<T, E>;

#[derive(Debug, Error)]
pub enum Error {
    #[error("invalid {what} {value:?}: {rule}")]
    Invalid {
        what: String,
        value: String,
        rule: String,
    },
    #[error("there is no sandbox {name}")]
    NoSandbox { name: String },
    #[error("there is no detached command {id} in this sandbox")]
    NoExec { id: String },
    #[error("there is no key {id}")]
    NoKey { id: String },
    /// Of work on images.
    #[error(transparent)]
    Image(#[from] images::Error),
    #[error("{step:?} failed: {status}{}", said(output))]
    BuildStep {
        step: String,
        status: String,
        output: String,
    },
    #[error("sandbox {name} is {phase}{}; it cannot {verb}", in_brackets(reason.as_deref()))]
    WrongState {
        name: String,
        phase: Phase,
        /// What the phase does not say by itself.
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
    #[error(
        "{command:?}, which the image runs at each boot, {what}{}",
        said(output)
    )]
    Service {
        command: String,
        what: String,
        output: String,
    },
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
    #[error("sandbox {name} has no screen")]
    NoDisplay { name: String },
    #[error("the guest of sandbox {name} has no X server, which this needs")]
    NoXServer { name: String },
    #[error("the screen did not {what} within {} s", after.as_secs_f64())]
    ScreenTimeout { what: &'static str, after: Duration },
    #[error("sandbox {name} has no mount at {path}")]
    NoMount { name: String, path: String },
    #[error("sandbox {name} has a mount at {path} already")]
    MountTaken { name: String, path: String },
    #[error("{} changed in {} since the sandbox changed {}: {}", count(paths), host.display(), it(paths), listed(paths))]
    ApplyConflicts { host: PathBuf, paths: Vec<String> },
    #[error("the sandbox's machine has no port for mounts: it began under an older version")]
    NoMountPort {},
    #[error("the guest did not answer about its mounts within {} s", after.as_secs())]
    MountSilent { after: Duration },
    #[error("cannot serve a mount")]
    MountServer {
        #[source]
        source: sandtree_mounts::Error,
    },
    #[error("sandbox {name} has {possible} states to go {way} to, not {wanted}")]
    NoWay {
        name: String,
        way: &'static str,
        wanted: usize,
        possible: usize,
    },
    #[error("state {state} cannot be removed: {by}")]
    StateInUse { state: String, by: StateUser },
    #[error("state {state} is not whole: {what}")]
    BrokenState { state: String, what: String },
    #[error("state {state} cannot continue here: its {what} is {then}, here it is {here}")]
    ForeignState {
        state: String,
        what: MachinePart,
        then: String,
        here: String,
    },
    #[error("state {state} cannot continue here: its processor has {}, which that of QEMU {qemu} lacks", features.join(", "))]
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
        "the disk of sandbox {name} has {layers} layers, too many to continue, and they could not be folded"
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
        "the snapshot was saved with {saved:?} as its {what}, and its memory cannot continue with {asked:?}"
    )]
    NotAsSaved {
        what: Setting,
        saved: String,
        asked: String,
    },
    #[error("the name {name} is taken by {by}")]
    SnapshotNameTaken { name: String, by: NameHolder },
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
        reason: Unsaved,
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

impl Error {
    /// `what` is a noun without an article: it follows the word "invalid".
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

    /// Which failure it is. None for one of a keeper that is newer than this program.
    pub fn code(&self) -> Option<Code> {
        match self {
            Error::Remote { report } => report.code(),
            _ => Some(self.facts().code),
        }
    }

    pub fn kind(&self) -> ErrorKind {
        match self {
            Error::Remote { report } => report.kind,
            _ => self.facts().code.kind(),
        }
    }

    /// The error as data. One that came from a keeper is as the keeper reported it.
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
        let Facts { code, arguments } = self.facts();
        Report {
            causes,
            ..Report::new(code, self.to_string(), arguments)
        }
    }

    /// The message with its causes, for a place that has one line.
    pub(crate) fn one_line(&self) -> String {
        self.report().one_line()
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

fn in_brackets(reason: Option<&str>) -> String {
    reason
        .map(|reason| format!(" ({reason})"))
        .unwrap_or_default()
}

/// The end of a command's output, if it printed anything.
fn said(output: &str) -> String {
    if output.is_empty() {
        String::new()
    } else {
        format!("; its output ends with:\n{output}")
    }
}

fn count(paths: &[String]) -> String {
    match paths.len() {
        1 => "a file".to_owned(),
        count => format!("{count} files"),
    }
}

fn it(paths: &[String]) -> &'static str {
    if paths.len() == 1 { "it" } else { "them" }
}

/// The first of many.
fn listed(paths: &[String]) -> String {
    const SHOWN: usize = 5;
    let mut text = paths[..paths.len().min(SHOWN)].join(", ");
    if paths.len() > SHOWN {
        text.push_str(", …");
    }
    text
}
