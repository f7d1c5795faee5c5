//! What a person could do about an error or a degradation, in the words of the command line.
//!
//! A hint depends on the code and the arguments of a report, never on its message. So it is the
//! same for an error of this process and for one that came from a keeper. `docs/errors.md` has the
//! remedies without the command line's words.

use sandtree::{Code, Degradation, Report};

/// None where no remedy is known, and for codes of a newer program.
pub fn of(report: &Report) -> Option<String> {
    by_code(report.code()?, report)
}

fn by_code(code: Code, report: &Report) -> Option<String> {
    let hint = match code {
        Code::Usage => "`sandtree help` shows the commands and their options",
        Code::NoSandbox => "`sandtree ps -a` lists the sandboxes of this store",
        Code::NoCommand => "`sandtree attach SANDBOX` lists them",
        Code::NoKey => "`sandtree key ls` lists the keys",
        Code::NoState => "`sandtree log SANDBOX` lists its states",
        Code::NoStep => "`sandtree log SANDBOX` shows where it stands",
        Code::NoImage => "`debian` and `tiny` are built in; `sandtree image ls` lists the others",
        Code::NoSnapshot => "`sandtree snapshot ls` lists the snapshots of this store",
        Code::NoImageOrSnapshot => {
            "`sandtree image ls` and `sandtree snapshot ls` list what is in the store"
        }
        Code::NotPulled => return not_pulled(report),
        Code::MissingImage => "export it again with its image, or import the image",
        Code::MissingKernel => "export it again with its image",
        Code::MissingBase => "import that snapshot first, or export without --since",
        Code::NoSaveBase => return no_save_base(report),
        Code::NoQemu => {
            "install QEMU (Debian: apt-get install qemu-system-x86), or name one with --qemu"
        }
        Code::SandboxNameTaken => "choose another --name, or remove the other with `sandtree rm`",
        Code::NameTaken => name_taken(report),
        Code::ScreensUnsupported => {
            "install QEMU's display devices (Debian: apt-get install qemu-system-common)"
        }
        Code::NoDisplay => {
            "create it with --display 1280x800, or from an image with a screen such as desktop"
        }
        Code::NoXServer => {
            "start one in the guest, or use the image desktop; pictures, keys and mouse need none"
        }
        Code::ScreenTimeout => "wait longer with --timeout; a blinking cursor is a change, too",
        Code::NoMount => "`sandtree mount ls SANDBOX` lists its mounts",
        Code::MountTaken => "choose another path, or `sandtree unmount` it first",
        Code::ApplyConflicts => {
            "`sandtree changes` shows them; --force overwrites the host's files"
        }
        Code::NoMountPort => "create the sandbox again; its disk can be saved and used for that",
        Code::MountServer => {
            "`sandtree mount ls SANDBOX` shows what is wrong; unmount it and mount it again"
        }
        Code::TagTaken => "choose another tag, or replace it with --force",
        Code::OtherKind => "`sandtree image` manages images, `sandtree snapshot` snapshots",
        Code::NotASnapshot => "only the directory of a snapshot is replaced or removed",
        Code::UnknownCpu => {
            "leave --cpu out for the best there is; Opteron_G3 is the same under every QEMU"
        }
        Code::UnknownFormat => {
            "give a tar archive, a directory, an OCI layout or archive, a save of Quicksand, a qcow2 \
             or a raw disk with an ext4 root"
        }
        Code::ForeignRoot => return foreign_root(report),
        Code::OpenRoot => return Some(format!("chmod go-w {}", report.text("path")?)),
        Code::NoRegistry => "begin with the registry's host, as in localhost:5000/team/app:1.2",
        Code::RegistryUnauthorized => {
            "give a user name and a password, or log in with the tool that keeps them"
        }
        Code::RegistryDenied => "ask the owner of the repository for access",
        Code::RegistryBusy => "try again later, or with credentials",
        Code::RegistryTls => "give the registry's CA file, or allow plain http",
        Code::RegistryRefused => return registry_refused(report),
        Code::WrongContent => "the registry, or something on the way, is damaged",
        Code::PortUnavailable => "choose another host port",
        Code::GuestQueueFull => "wait until the guest has answered earlier requests",
        Code::GuestNotRestored => "try again when the guest runs",
        Code::WrongState => return wrong_state(report),
        Code::StateInUse => state_in_use(report),
        Code::NoMemory => "leave --memory away: its disk is saved",
        Code::LinkEnded => "`sandtree inspect SANDBOX` shows how the sandbox ended",
        Code::NotAsSaved => not_as_saved(report),
        Code::ForeignArchitecture => "run it on a host of its architecture",
        Code::ForeignState => foreign_state(report),
        Code::NestedState => "`--nested` allows it; `--cold` boots a sandbox from its disk",
        Code::LackingProcessor => {
            "`--cold` boots a sandbox from its disk; one that is created with `--cpu Opteron_G3` \
             also continues under older versions of QEMU"
        }
        Code::NoSockets => {
            "put the store on a file system with Unix sockets, such as ext4, XFS, Btrfs or tmpfs, \
             with --home"
        }
        Code::ClosedFileSystem => {
            "mount it with the option allow_other, or choose another store with --home"
        }
        Code::KeeperVersion => {
            "stop the sandbox with the program that started it; `sandtree inspect` shows its process"
        }
        Code::AgentTooOld | Code::LinkVersion => {
            "its state is of an older program; `--cold` boots a sandbox from its disk"
        }
        Code::QemuTooOld => "install a newer QEMU, or name another one with --qemu",
        Code::AcceleratorUnusable => "use --accel auto; `sandtree doctor` shows what works here",
        Code::ToolMissing => return tool_missing(report),
        Code::UnknownPackage => "run `apt-get update`; Debian 12 and later have the package",
        Code::NoDebianSources => {
            "add Debian's archive to apt's sources and run `apt-get update`, or import another \
             root file system"
        }
        Code::DownloadFailed => "check the network and apt's sources, and run `apt-get update`",
        Code::NotEnoughMemory => not_enough_memory(report),
        Code::NotEnoughSpace | Code::DiskFull => {
            "free some space, perhaps by `sandtree gc`, or choose another store with --home"
        }
        Code::GuestStalled => {
            "free some space on the file system of the store; the guest continues by itself"
        }
        Code::GuestDiskFull => "free some space in the guest, or create it with a larger --disk",
        Code::TooManyLayers => "free some space: layers are folded into a new file",
        Code::BootTimeout => {
            "a slow host may need a longer --boot-timeout; `sandtree doctor` shows the accelerator"
        }
        Code::NestedGuestRuns => "stop the guests that it runs, and try again",
        Code::QemuNotEnded => {
            "it waits for a disk or file server that does not answer, or a debugger holds it; try \
             again when that is over"
        }
        Code::BuildStepFailed => {
            "the steps before it are kept: the next build continues from there"
        }
        Code::ServiceFailed => {
            "change `start` and `ready` in the recipe of the image; `ready` may have a longer timeout"
        }
        Code::Unacknowledged => "its agent does not answer; another state may be better",
        Code::QemuNotStarted => {
            "if --qemu-arg is given, look there first; `sandtree doctor` checks the rest"
        }
        Code::UnreadableByMachine => {
            "put the store on a file system that keeps owners and modes, such as ext4, with \
             --home, or run machines as yourself with --machine-user caller"
        }
        Code::DamagedDisk => {
            "its disk was not written out before the host went down; remove the sandbox, or keep \
             its directory for rescue"
        }
        Code::DamagedSnapshot => damaged_snapshot(report),
        Code::DamagedArtifact => "the file is cut, changed or not an artifact; export it again",
        Code::BrokenState => "go back to another state: `sandtree log SANDBOX` lists them",
        Code::ReadOnly => "choose a store that can be written with --home or SANDTREE_HOME",
        Code::NotSaved => "the sandbox is kept: `sandtree save SANDBOX NAME` saves it",
        Code::Panicked => "this is a defect of sandtree; the sandbox's keeper.log has the details",
        Code::NotInRegistry
        | Code::FileNotFound
        | Code::FileExists
        | Code::Invalid
        | Code::InvalidLabels
        | Code::InvalidRecipe
        | Code::InvalidReference
        | Code::InvalidDigest
        | Code::InvalidSize
        | Code::InvalidMachine
        | Code::NameIsAnId
        | Code::NotAStore
        | Code::MemoryDirectory
        | Code::RequestTooLong
        | Code::RegistryFile
        | Code::CredentialHelper
        | Code::SandboxBusy
        | Code::Interrupted
        | Code::NewerStore
        | Code::OlderStore
        | Code::NewerRecord
        | Code::NewerSnapshot
        | Code::UnfoldableLayers
        | Code::UnsupportedFileSystem
        | Code::UnknownMediaType
        | Code::NoPlatform
        | Code::ToolFailed
        | Code::IncompletePackage
        | Code::MissingModule
        | Code::OutputLimit
        | Code::GuestTimeout
        | Code::QemuTimeout
        | Code::BootFailed
        | Code::CommandNotFound
        | Code::CommandNotStarted
        | Code::LinkBroken
        | Code::GuestRefused
        | Code::GuestPermissionDenied
        | Code::NotADirectory
        | Code::IsADirectory
        | Code::DirectoryNotEmpty
        | Code::QemuVersionUnknown
        | Code::QemuEnded
        | Code::QemuRefused
        | Code::QemuProtocol
        | Code::JailFailed
        | Code::MemoryNotMapped
        | Code::MemoryUntracked
        | Code::StateNotLoaded
        | Code::StateNotTaken
        | Code::DiskNotCopied
        | Code::DiskSwitchedLate
        | Code::DamagedLayer
        | Code::DamagedRecord
        | Code::ArchiveRefused
        | Code::ImageRefused
        | Code::MalformedInput
        | Code::UnusableRoot
        | Code::TooLarge
        | Code::Io
        | Code::PermissionDenied
        | Code::Cancelled
        | Code::NotDurable
        | Code::IndexUnwritable
        | Code::RemovedUnsaved
        | Code::KeeperUnreachable
        | Code::NoRandomBytes
        | Code::RegistryUnreachable
        | Code::RegistryProtocol
        | Code::StoreMisused => return None,
    };
    Some(hint.to_owned())
}

fn no_save_base(report: &Report) -> Option<String> {
    let name = report.text("name")?;
    Some(format!(
        "`sandtree image import FILE --name {name}`, with the qcow2 of the package quicksand-{name}"
    ))
}

fn not_pulled(report: &Report) -> Option<String> {
    let reference = report.text("reference")?;
    Some(format!(
        "`sandtree pull {reference}` brings it here, and prints the name to run it by"
    ))
}

fn name_taken(report: &Report) -> &'static str {
    match report.text("by") {
        Some("image") => "choose another name: images are not replaced",
        Some("save") => "choose another name, or remove that sandbox",
        _ => "choose another name, or replace it with --force",
    }
}

fn foreign_root(report: &Report) -> Option<String> {
    let path = report.text("path")?;
    let user = report.arguments.get("user")?;
    Some(format!(
        "choose another store with --home; or, if everything in it is yours: \
         chown -R {user} {path}"
    ))
}

fn registry_refused(report: &Report) -> Option<String> {
    const CONTENT_TOO_LARGE: u64 = 413;
    let is_size = report.arguments.get("status")?.as_u64() == Some(CONTENT_TOO_LARGE);
    is_size.then(|| "a proxy in front of the registry limits the size of requests".to_owned())
}

fn wrong_state(report: &Report) -> Option<String> {
    let hint = match (report.text("phase")?, report.text("verb")?) {
        ("stopped" | "crashed", _) => "`sandtree start` starts it again",
        ("running", "remove") => {
            "stop it with `sandtree stop`, or remove it as it runs with `sandtree rm -f`"
        }
        ("paused", _) => "`sandtree resume` continues it",
        _ => return None,
    };
    Some(hint.to_owned())
}

fn state_in_use(report: &Report) -> &'static str {
    match report.text("by") {
        Some("borrower") => "try again when the save or the copy is complete",
        _ => "resume the sandbox first",
    }
}

fn not_as_saved(report: &Report) -> &'static str {
    match (report.text("what"), report.text("saved")) {
        (Some("qemu_arguments"), _) => {
            "repeat them with --qemu-arg, if you trust the one who saved it, or boot from its disk \
             with --cold"
        }
        (Some("network"), Some("full")) => {
            "--network isolated cuts it off from everything; --cold boots from its disk"
        }
        _ => "leave the option away, or boot from its disk with --cold",
    }
}

fn foreign_state(report: &Report) -> &'static str {
    match (report.text("what"), report.text("saved")) {
        (Some("accelerator"), Some("tcg")) => {
            "`--accel tcg` continues it by emulation; `--cold` boots a sandbox from its disk"
        }
        _ => {
            "`sandtree run --cold` boots a snapshot from its disk; `sandtree save SANDBOX NAME` \
             makes one of a sandbox"
        }
    }
}

fn tool_missing(report: &Report) -> Option<String> {
    let hint = match report.text("package") {
        // Users other than root need more than the package.
        Some("mmdebstrap") => {
            "install the package mmdebstrap; for users other than root uidmap, too, and a line for \
             the user in /etc/subuid and /etc/subgid"
        }
        Some(package) => return Some(format!("install the package {package}")),
        None => "building this image needs a Debian or Ubuntu host with apt and dpkg",
    };
    Some(hint.to_owned())
}

fn not_enough_memory(report: &Report) -> &'static str {
    if report.text("cgroup").is_some() {
        "give it less with --memory, or raise the group's memory limit"
    } else {
        "give it less with --memory, or stop another sandbox"
    }
}

fn damaged_snapshot(report: &Report) -> &'static str {
    let is_moved = report.arguments.get("quarantined") == Some(&true.into());
    if is_moved {
        "the damaged files were moved to quarantine/ in the store; import the snapshot again, or \
         use another"
    } else {
        "`sandtree snapshot verify` reports everything that is damaged; import the snapshot again, \
         or use another"
    }
}

/// What a person could do about a degradation.
pub fn of_degradation(degradation: &Degradation) -> Option<String> {
    match degradation {
        Degradation::UnwrittenData {} => Some("--memory keeps that, too".to_owned()),
        Degradation::NetworkWithheld {} => Some("--network full grants it".to_owned()),
        Degradation::PortsWithheld { ports } => {
            Some(format!("--publish {}", ports.join(" --publish ")))
        }
        Degradation::MountUnavailable { path, .. } => {
            Some(format!("--mount DIR:{path} gives it a directory"))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use sandtree::{Arguments, Error, NameHolder, Phase, Setting, Verb};
    use serde_json::json;

    use super::*;

    /// The hint for an error of this process, and for the same error from a keeper.
    fn hint(error: &Error) -> Option<String> {
        let report = error.report();
        let sent = serde_json::to_string(&report).expect("a report is JSON");
        let came: Report = serde_json::from_str(&sent).expect("it is read");
        let remote = Error::Remote { report: came };
        assert_eq!(of(&remote.report()), of(&report));
        of(&report)
    }

    #[track_caller]
    fn assert_hint(error: &Error, words: &str) {
        let hint = hint(error).unwrap_or_default();
        assert!(hint.contains(words), "{error}: {hint:?}");
    }

    #[test]
    fn a_hint_depends_on_the_arguments() {
        let wrong = |phase, verb| Error::WrongState {
            name: "a".into(),
            phase,
            reason: None,
            verb,
        };
        assert_hint(&wrong(Phase::Stopped, Verb::Use), "sandtree start");
        assert_hint(&wrong(Phase::Paused, Verb::Stop), "sandtree resume");
        assert_hint(&wrong(Phase::Running, Verb::Remove), "rm -f");
        assert_eq!(hint(&wrong(Phase::Creating, Verb::Use)), None);
        let memory = |cgroup| Error::HostMemory {
            wanted_bytes: 2,
            available_bytes: 1,
            cgroup,
        };
        assert_hint(&memory(None), "stop another sandbox");
        let group = Some(PathBuf::from("/sys/fs/cgroup/a"));
        assert_hint(&memory(group), "the group's memory limit");
        let changed = |what, saved: &str| Error::NotAsSaved {
            what,
            saved: saved.into(),
            asked: "other".into(),
        };
        assert_hint(&changed(Setting::QemuArguments, "-s"), "--qemu-arg");
        assert_hint(&changed(Setting::Network, "full"), "--network isolated");
        assert_hint(&changed(Setting::Memory, "full"), "--cold");
        let digest: String = "ab".repeat(32);
        let taken = |by| Error::SnapshotNameTaken {
            name: "dev".into(),
            by,
        };
        let image = NameHolder::Image(digest.parse().expect("a digest"));
        assert_hint(&taken(image), "not replaced");
        let snapshot = NameHolder::Snapshot(digest.parse().expect("a digest"));
        assert_hint(&taken(snapshot), "--force");
    }

    #[test]
    fn a_code_of_a_newer_program_has_no_hint_and_stays_as_it_is() {
        let report = Report {
            code: "of_the_future".into(),
            arguments: Arguments::from([("sandbox".into(), json!("a"))]),
            ..Report::new(Code::Io, "it failed".into(), Arguments::new())
        };
        assert_eq!(of(&report), None);
        let remote = Error::Remote {
            report: report.clone(),
        };
        assert_eq!(remote.code(), None);
        assert_eq!(remote.report(), report);
    }
}
