//! The code and the arguments of each error of this crate.

use std::path::Path;

use super::code::Code;
use super::parts::Unsaved;
use super::report::{Facts, Known};
use super::sources::io_facts;
use super::{Error, Report};
use crate::link::{LinkError, Refusal};

/// A code with its arguments: `code!(NoSandbox, sandbox: name)`. A name alone is that of its value.
macro_rules! code {
    ($code:ident $(, $name:ident $(: $value:expr)?)* $(,)?) => {
        Facts::of(Code::$code)$(.with(stringify!($name), code!(@value $name $(, $value)?)))*
    };
    (@value $name:ident) => { $name };
    (@value $name:ident, $value:expr) => { $value };
}

/// Makes the exhaustive match of a table with one row for each variant.
macro_rules! facts {
    ($error:ty: $($(#[$when:meta])* $row:pat $(if $guard:expr)? => $facts:expr),* $(,)?) => {
        impl Known for $error {
            fn facts(&self) -> Facts {
                match self {
                    $($(#[$when])* $row $(if $guard)? => $facts,)*
                }
            }
        }
    };
}

pub(super) use {code, facts};

facts! { Error:
    Self::Invalid { what, value, rule } => code!(Invalid, what, value, rule),
    Self::NoSandbox { name } => code!(NoSandbox, sandbox: name),
    Self::NoExec { id } => code!(NoCommand, command: id),
    Self::NoKey { id } => code!(NoKey, key: id),
    Self::Image(source) => source.facts(),
    Self::BuildStep { step, status, output } => code!(BuildStepFailed, step, status, output),
    Self::WrongState { name, phase, reason, verb } =>
        code!(WrongState, sandbox: name, phase, reason, verb: verb.name()),
    Self::NameTaken { name, holder } => code!(SandboxNameTaken, name, holder),
    Self::Busy { name } => code!(SandboxBusy, sandbox: name),
    Self::HostMemory { wanted_bytes, available_bytes, cgroup } =>
        code!(NotEnoughMemory, wanted_bytes, available_bytes, cgroup: cgroup.as_deref().map(shown)),
    Self::HostDisk { path, wanted_bytes, available_bytes } =>
        code!(NotEnoughSpace, wanted_bytes, available_bytes, path: shown(path)),
    Self::ClosedPlace { path } => code!(ClosedFileSystem, path: shown(path)),
    Self::Stalled => code!(GuestStalled),
    Self::Port { address, source } => code!(PortUnavailable, address, errno: source.raw_os_error()),
    Self::Boot { after, console } => code!(BootTimeout, after_ms: ms(*after), console),
    Self::BootEnded { reason, console } => code!(BootFailed, reason, console),
    Self::Service { command, what, output } =>
        code!(ServiceFailed, command, reason: what, output),
    Self::DamagedDisk { name, what } => code!(DamagedDisk, sandbox: name, what),
    Self::NotStarted { command, failure } if failure.errno == ENOENT =>
        code!(CommandNotFound, command),
    Self::NotStarted { command, failure } =>
        code!(CommandNotStarted, command, errno: failure.errno),
    Self::Guest { source, .. } => source.facts(),
    Self::OutputLimit { limit } => code!(OutputLimit, limit_bytes: limit),
    Self::Archive { what } => code!(ArchiveRefused, what),
    Self::Engine { source, .. } => source.facts(),
    Self::Store { source, .. } => source.facts(),
    Self::Io { operation, path, source } => io_facts(operation, shown(path), source),
    Self::Keeper { name, source } =>
        code!(KeeperUnreachable, sandbox: name, errno: source.raw_os_error()),
    Self::Remote { report } => remote(report),
    Self::NoState { name, state } => code!(NoState, sandbox: name, state),
    Self::TagTaken { name, tag } => code!(TagTaken, sandbox: name, tag),
    Self::NoDisplay { name } => code!(NoDisplay, sandbox: name),
    Self::NoXServer { name } => code!(NoXServer, sandbox: name),
    Self::ScreenTimeout { what, after } => code!(ScreenTimeout, what, after_ms: ms(*after)),
    Self::NoMount { name, path } => code!(NoMount, sandbox: name, path),
    Self::MountTaken { name, path } => code!(MountTaken, sandbox: name, path),
    Self::ApplyConflicts { host, paths } => code!(ApplyConflicts, host: shown(host), paths),
    Self::NoMountPort {} => code!(NoMountPort),
    Self::MountSilent { after } => code!(GuestTimeout, after_ms: ms(*after)),
    Self::MountServer { source } => source.facts(),
    Self::NoWay { name, way, wanted, possible } =>
        code!(NoStep, sandbox: name, way, wanted, possible),
    Self::StateInUse { state, by } => code!(StateInUse, state, by: by.name()),
    Self::BrokenState { state, what } => code!(BrokenState, state, what),
    Self::ForeignState { state, what, then, here } =>
        code!(ForeignState, state, what: what.name(), saved: then, here),
    Self::LackingProcessor { state, qemu, features } =>
        code!(LackingProcessor, state, qemu, features),
    Self::NoSockets { path, .. } => code!(NoSockets, path: shown(path)),
    Self::NestedState { state } => code!(NestedState, state),
    Self::TooDeep { name, layers, .. } => code!(TooManyLayers, sandbox: name, layers),
    Self::Unacknowledged { after } => code!(Unacknowledged, after_ms: ms(*after)),
    Self::ForeignArch { there, here } => code!(ForeignArchitecture, saved: there, here),
    Self::NoSnapshot { reference } => code!(NoSnapshot, reference),
    Self::MissingImage { name, digest, here } => code!(MissingImage, name, digest, here),
    Self::NotAsSaved { what, saved, asked } => code!(NotAsSaved, what: what.name(), saved, asked),
    Self::SnapshotNameTaken { name, by } => code!(NameTaken, name, by: by.name()),
    Self::NotSaved { name, target, source } =>
        code!(NotSaved, sandbox: name, target, cause: source.report().code),
    Self::NoMemory { name, phase } => code!(NoMemory, sandbox: name, phase),
    Self::Diff { source } => source.facts(),
    Self::StillUnsaved { name, target, reason: Unsaved::Removed } =>
        code!(RemovedUnsaved, sandbox: name, target),
    Self::StillUnsaved { name, target, .. } => code!(NotSaved, sandbox: name, target),
    Self::Damaged { reference, damaged } => code!(
        DamagedSnapshot,
        reference,
        parts: damaged.iter().map(|part| &part.what).collect::<Vec<_>>(),
        quarantined: damaged.iter().any(|part| part.quarantined.is_some()),
    ),
    Self::Interrupted { name, verb, by } =>
        code!(Interrupted, sandbox: name, verb: verb.name(), by: by.name()),
    Self::Panicked { name, verb, .. } => code!(Panicked, sandbox: name, verb: verb.name()),
    Self::KeeperVersion { name, theirs, ours } => code!(KeeperVersion, sandbox: name, theirs, ours),
    #[cfg(feature = "faults")]
    Self::Injected { .. } => code!(Io),
}

facts! { LinkError:
    Self::Ended { reason } => code!(LinkEnded, reason),
    Self::Broken { what } => code!(LinkBroken, what),
    Self::Timeout { after } => code!(GuestTimeout, after_ms: ms(*after)),
    Self::Refused(refusal) => refusal.facts(),
}

facts! { Refusal:
    Self::QueueFull => code!(GuestQueueFull),
    Self::AgentTooOld => code!(AgentTooOld),
    Self::NotRestored => code!(GuestNotRestored),
    Self::NoCommand => code!(NoCommand),
    Self::Version => code!(LinkVersion),
    Self::TooLong(_) => code!(RequestTooLong),
    Self::Guest(failure) => Facts::of(guest_code(failure.errno)).with("errno", failure.errno),
}

const EPERM: i32 = 1;
const ENOENT: i32 = 2;
const EACCES: i32 = 13;
const EEXIST: i32 = 17;
const ENOTDIR: i32 = 20;
const EISDIR: i32 = 21;
const ENOSPC: i32 = 28;
const ENOTEMPTY: i32 = 39;
const EDQUOT: i32 = 122;

/// What the guest's kernel refused, by Linux's number.
fn guest_code(errno: i32) -> Code {
    match errno {
        ENOENT => Code::FileNotFound,
        EEXIST => Code::FileExists,
        EPERM | EACCES => Code::GuestPermissionDenied,
        ENOTDIR => Code::NotADirectory,
        EISDIR => Code::IsADirectory,
        ENOTEMPTY => Code::DirectoryNotEmpty,
        ENOSPC | EDQUOT => Code::GuestDiskFull,
        _ => Code::GuestRefused,
    }
}

/// As reported by a keeper; a code that this program does not know becomes that of its kind.
fn remote(report: &Report) -> Facts {
    Facts {
        code: report.code().unwrap_or(Code::Io),
        arguments: report.arguments.clone(),
    }
}

pub(super) fn shown(path: &Path) -> String {
    path.display().to_string()
}

pub(super) fn ms(duration: std::time::Duration) -> u64 {
    duration.as_millis().try_into().unwrap_or(u64::MAX)
}
