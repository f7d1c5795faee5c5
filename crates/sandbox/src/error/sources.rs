//! The code and the arguments of each error of the crates below this one.

use std::io;

use sandtree_diff as diff;
use sandtree_engine as engine;
use sandtree_images as images;
use sandtree_mounts as mounts;
use sandtree_registry as registry;
use sandtree_store::{self as store, ManifestError};

use super::code::Code;
use super::facts::{code, facts, ms, shown};
use super::parts::NameHolder;
use super::report::{Facts, Known};

facts! { mounts::Error:
    Self::Open { path, source } => io_facts("open", shown(path), source),
    Self::Thread(source) => io_facts("start", "a thread for mounts".into(), source),
    Self::Kernel { .. } => code!(MountServer),
    Self::Exists { .. } => code!(MountServer),
    Self::Unknown { .. } => code!(MountServer),
    Self::Closed => code!(MountServer),
    Self::Refused => code!(MountServer),
    Self::Released => code!(MountServer),
    Self::Ended => code!(MountServer),
}

facts! { store::Error:
    Self::Io { operation, path, source } => io_facts(operation, shown(path), source),
    Self::LayerIo { operation, source, .. } => io_facts(operation, "a layer".into(), source),
    Self::ArtifactIo { operation, source } => io_facts(operation, "the artifact".into(), source),
    Self::Doubtful { path } => code!(NotDurable, path: shown(path)),
    Self::NewerFormat { root, found, known } => code!(NewerStore, path: shown(root), found, known),
    Self::OlderFormat { root, found, known } => code!(OlderStore, path: shown(root), found, known),
    Self::ForeignRoot { root, owner, user } => code!(ForeignRoot, path: shown(root), owner, user),
    Self::OpenRoot { root, mode } => code!(OpenRoot, path: shown(root), mode),
    Self::NotAStore { root } => code!(NotAStore, path: shown(root)),
    Self::NewerSchema { path, found, known } => code!(NewerRecord, path: shown(path), found, known),
    Self::Corrupt { path, what } => code!(DamagedRecord, path: shown(path), what),
    Self::Index { path, what } => code!(IndexUnwritable, path: shown(path), what),
    Self::NameTaken { name, holder } =>
        code!(SandboxNameTaken, name: name.to_string(), holder: holder.to_string()),
    Self::NameIsAnId { name } => code!(NameIsAnId, name: name.to_string()),
    Self::UnknownImage { name } => code!(NoImage, name: name.to_string()),
    Self::UnknownSandbox { reference } => code!(NoSandbox, sandbox: reference),
    Self::UnknownState { sandbox, state } =>
        code!(NoState, sandbox: sandbox.to_string(), state: state.to_string()),
    Self::MemoryDir { path, rule } => code!(MemoryDirectory, path: shown(path), rule),
    Self::Busy { id } => code!(SandboxBusy, sandbox: id.to_string()),
    Self::DiskSize { bytes, rule } => code!(InvalidSize, bytes, rule),
    Self::MemorySize { bytes, rule } => code!(InvalidSize, bytes, rule),
    Self::MemoryPages { rule, .. } => code!(StoreMisused, rule),
    Self::NotEmpty => code!(StoreMisused, rule: "a new layer needs an empty file"),
    Self::MemoryLayer(_) => code!(DamagedLayer),
    Self::DiskLayer { .. } => code!(DamagedLayer),
    Self::DiskChain { .. } => code!(DamagedLayer),
    Self::DiskFold { rule } => code!(UnfoldableLayers, rule),
    Self::Artifact(_) => code!(DamagedArtifact),
    Self::MissingBase { base } => code!(MissingBase, digest: base.to_string()),
    Self::NotEnoughSpace { needed_bytes, free_bytes } =>
        code!(NotEnoughSpace, wanted_bytes: needed_bytes, available_bytes: free_bytes),
    Self::NotASnapshotDir { path, .. } => code!(NotASnapshot, path: shown(path)),
    Self::NameInUse { name, holder } =>
        code!(NameTaken, name: name.to_string(), by: NameHolder::from(holder.clone()).name()),
    Self::OtherKind { name, found, .. } =>
        code!(OtherKind, name: name.to_string(), found: NameHolder::from(found.clone()).name()),
    Self::UnknownSnapshot { reference } => code!(NoSnapshot, reference),
    Self::Manifest { source, .. } => source.facts(),
    Self::MissingImage { name, digest, here } => code!(
        MissingImage,
        name: name.to_string(),
        digest: digest.to_string(),
        here: here.as_ref().map(ToString::to_string),
    ),
    Self::Labels(_) => code!(InvalidLabels),
    Self::MissingKernel { digest } => code!(MissingKernel, digest: digest.to_string()),
    Self::NoMemory => code!(NoMemory),
    Self::Cancelled => code!(Cancelled),
    Self::Random(_) => code!(NoRandomBytes),
}

facts! { ManifestError:
    Self::Schema { .. } | Self::Requires { .. } => code!(NewerSnapshot),
    Self::TooLarge { .. } | Self::NotAManifest(_) => code!(DamagedSnapshot),
    Self::NotCanonical | Self::Invalid { .. } => code!(DamagedSnapshot),
}

facts! { engine::Error:
    Self::NotFound { program, .. } => code!(NoQemu, program),
    Self::TooOld { binary, found } =>
        code!(QemuTooOld, path: shown(binary), version: found.to_string()),
    Self::VersionUnknown { binary, output } =>
        code!(QemuVersionUnknown, path: shown(binary), output),
    Self::AccelUnusable { accel, reason } =>
        code!(AcceleratorUnusable, accelerator: accel.to_string(), reason),
    Self::UnknownCpu { model, version, known } =>
        code!(UnknownCpu, model, version: version.to_string(), known),
    Self::CpuLacks { features } => code!(LackingProcessor, features),
    Self::NoScreens { reason } => code!(ScreensUnsupported, reason),
    Self::Spec { detail } => code!(InvalidMachine, rule: detail),
    Self::Unreadable { file, uid } => code!(UnreadableByMachine, file, uid),
    Self::Jail { step, .. } => code!(JailFailed, step: step.to_string()),
    Self::Start { exit } => code!(QemuNotStarted, reason: exit.to_string()),
    Self::NotMapped { reason } => code!(MemoryNotMapped, reason),
    Self::Untracked { .. } => code!(MemoryUntracked),
    Self::NotLoaded { reason } => code!(StateNotLoaded, reason),
    Self::NotSaved { reason } => code!(StateNotTaken, reason),
    Self::InNestedGuest => code!(NestedGuestRuns),
    Self::NotCopied { reason } => code!(DiskNotCopied, reason),
    Self::PivotedLate => code!(DiskSwitchedLate),
    Self::Died { exit } => code!(QemuEnded, reason: exit.to_string()),
    Self::Qmp { command, class, .. } => code!(QemuRefused, command, class),
    Self::NotEnded { pid, after } => code!(QemuNotEnded, pid, after_ms: ms(*after)),
    Self::Timeout { command, after } => code!(QemuTimeout, command, after_ms: ms(*after)),
    Self::Protocol { detail } => code!(QemuProtocol, what: detail),
    Self::Io { op, path, source } => io_facts(op, shown(path), source),
}

facts! { images::Error:
    Self::Make { source, .. } | Self::Transfer { source, .. } => source.facts(),
    Self::NoImage { name } => code!(NoImage, name),
    Self::NoImageOrSnapshot { reference } => code!(NoImageOrSnapshot, reference),
    Self::NotAnImage { name, found } =>
        code!(OtherKind, name, found: NameHolder::from(found.clone()).name()),
    Self::NameTaken { name, by } => code!(NameTaken, name, by: NameHolder::from(by.clone()).name()),
    Self::Store { source, .. } | Self::Publish(source) => source.facts(),
    Self::ToolMissing { program, package } => code!(ToolMissing, program, package),
    Self::ToolFailed { program, status, .. } =>
        code!(ToolFailed, program, status: status.to_string()),
    Self::UnknownPackage { package } => code!(UnknownPackage, package),
    Self::NoDebianSources => code!(NoDebianSources),
    Self::Download { .. } => code!(DownloadFailed),
    Self::Incomplete { package, what } => code!(IncompletePackage, package, what),
    Self::Malformed { what, why } => code!(MalformedInput, what, rule: why),
    Self::ModuleMissing { module, needed_by } => code!(MissingModule, module, needed_by),
    Self::Io { operation, path, source } => io_facts(operation, shown(path), source),
    Self::Cancelled => code!(Cancelled),
    Self::Recipe { what } => code!(InvalidRecipe, what),
    Self::Unknown { path, why } => code!(UnknownFormat, path: shown(path), what: why),
    Self::WrongLayer { digest } => code!(WrongContent, what: format!("layer {digest}")),
    Self::Config { what } | Self::Save { what } => code!(ImageRefused, what),
    Self::NoSaveBase { name } => code!(NoSaveBase, name),
    Self::Rootfs(source) => by_system(&**source),
    Self::Disk(source) => by_system(&**source),
    Self::Registry(source) => source.facts(),
}

facts! { registry::Error:
    Self::Reference { text, rule } => code!(InvalidReference, reference: text, rule),
    Self::NoRegistry { text } => code!(NoRegistry, reference: text),
    Self::Digest(source) => code!(InvalidDigest, what: source.to_string()),
    Self::Unauthorized { registry, .. } => code!(RegistryUnauthorized, registry),
    Self::Denied { registry, .. } => code!(RegistryDenied, registry),
    Self::NotFound { what, .. } => code!(NotInRegistry, what),
    Self::TooManyRequests { registry, waited_s } => code!(RegistryBusy, registry, waited_s),
    Self::WrongDigest { what, .. } | Self::WrongSize { what, .. } => code!(WrongContent, what),
    Self::ConnectionLost { url, tries, .. } => code!(RegistryUnreachable, url, tries),
    Self::Tls { url, .. } => code!(RegistryTls, url),
    Self::Redirects { url, rule } => code!(RegistryProtocol, url, rule),
    Self::TooLarge { what, limit_bytes } => code!(TooLarge, what, limit_bytes),
    Self::UnknownMediaType { media_type } => code!(UnknownMediaType, media_type),
    Self::NoPlatform { wanted, available } => code!(NoPlatform, wanted, available),
    Self::Document { what, rule } => code!(MalformedInput, what, rule),
    Self::Registry { url, status, .. } => code!(RegistryRefused, url, status),
    Self::Protocol { url, rule } => code!(RegistryProtocol, url, rule),
    Self::Helper { helper, rule } => code!(CredentialHelper, helper, rule),
    Self::File { path, rule } => code!(RegistryFile, path: shown(path), rule),
    Self::Cancelled => code!(Cancelled),
    Self::Io { operation, what, source } => io_facts(operation, what.clone(), source),
}

facts! { diff::Error:
    Self::Io { source, .. } => io_facts("read", "the disk".into(), source),
    Self::NotExt4 => code!(UnsupportedFileSystem),
    Self::Unsupported(what) => code!(UnsupportedFileSystem, what),
    Self::Damaged(what) => code!(DamagedDisk, what),
    Self::TooLarge { what, limit_bytes } => code!(TooLarge, what, limit_bytes),
    Self::NotFound(path) => code!(FileNotFound, path: path.to_string()),
    Self::OtherKind { path, kind, .. } =>
        code!(OtherKind, name: path.to_string(), found: kind.to_string()),
}

/// What the host's system refused.
pub(super) fn io_facts(operation: &str, path: String, source: &io::Error) -> Facts {
    let code = match source.kind() {
        io::ErrorKind::NotFound => Code::FileNotFound,
        io::ErrorKind::AlreadyExists => Code::FileExists,
        io::ErrorKind::PermissionDenied => Code::PermissionDenied,
        io::ErrorKind::ReadOnlyFilesystem => Code::ReadOnly,
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Code::DiskFull,
        _ => Code::Io,
    };
    Facts::of(code)
        .with("operation", operation)
        .with("path", path)
        .with("errno", source.raw_os_error())
}

/// Work on files that is refused for their content, unless it is the system that refused.
fn by_system(error: &(dyn std::error::Error + 'static)) -> Facts {
    let chain = std::iter::successors(Some(error), |error| error.source());
    let refused = chain
        .filter_map(|error| error.downcast_ref::<io::Error>())
        .find(|e| e.raw_os_error().is_some());
    refused.map_or_else(
        || Facts::of(Code::UnusableRoot),
        |refused| io_facts("read", "the files".into(), refused),
    )
}
