use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use sandtree_engine as engine;
use sandtree_images as images;
use sandtree_proto::{Failure, HubFailure};
use sandtree_registry as registry;
use sandtree_store::{self as store, ManifestError, Named};

use super::*;
use crate::degradation::Degradation;
use crate::link::Refusal;

const PAGE: &str = include_str!("../../../../docs/errors.md");

/// A row of the page: what it says of one code.
struct Row {
    kind: Option<String>,
    cells: Vec<String>,
}

impl Row {
    /// The names in backquotes of the last column that are not explanations of a value.
    fn allows(&self, argument: &str) -> bool {
        self.cells[3].contains(&format!("`{argument}`"))
    }
}

/// The rows of a part of the page by code.
fn rows(part: &str) -> BTreeMap<String, Row> {
    let mut kind = None;
    let mut rows = BTreeMap::new();
    for line in part.lines() {
        if let Some(heading) = line.strip_prefix("### ") {
            kind = Some(heading.to_owned());
        }
        let Some(row) = line.strip_prefix("| `") else {
            continue;
        };
        let (code, rest) = row.split_once("` |").expect("a row begins with its code");
        let cells: Vec<String> = format!("`{code}` |{rest}")
            .trim_end_matches(" |")
            .split(" | ")
            .map(|cell| cell.trim_matches([' ', '|']).to_owned())
            .chain([String::new()])
            .collect();
        let kind = kind.clone();
        let before = rows.insert(code.to_owned(), Row { kind, cells });
        assert!(before.is_none(), "{code} has two rows");
    }
    rows
}

fn parts() -> (&'static str, &'static str) {
    let codes = PAGE.split_once("\n## Codes\n").expect("the page has codes");
    let parts = codes.1.split_once("\n## Degradations\n");
    parts.expect("the page has degradations")
}

#[test]
fn the_page_lists_every_code_with_its_kind_cause_and_remedy() {
    let mut rows = rows(parts().0);
    for code in Code::ALL {
        let row = rows.remove(code.as_str());
        let row = row.unwrap_or_else(|| panic!("{code} is not in docs/errors.md"));
        assert_eq!(row.kind.as_deref(), Some(code.kind().as_str()), "{code}");
        let told = row.cells[1..3].iter().all(|cell| !cell.is_empty());
        assert!(told, "{code} lacks a cause or a remedy");
        assert_eq!(Code::parse(code.as_str()), Some(*code));
    }
    let unknown: Vec<_> = rows.keys().collect();
    assert!(unknown.is_empty(), "these codes do not exist: {unknown:?}");
}

#[test]
fn the_page_lists_every_degradation() {
    let listed: BTreeSet<String> = rows(parts().1).into_keys().collect();
    let known = Degradation::CODES.iter().map(|code| (*code).to_owned());
    assert_eq!(listed, known.collect());
}

fn digest() -> store::Digest {
    "ab".repeat(32).parse().expect("a digest")
}

fn name() -> store::Name {
    "dev".parse().expect("a name")
}

fn refused() -> io::Error {
    io::Error::from_raw_os_error(5)
}

fn link(source: LinkError) -> Error {
    unreachable_guest(source)
}

fn by_guest(errno: i32) -> Error {
    let message = "no".into();
    link(Failure { errno, message }.into())
}

fn by_store(source: store::Error) -> Error {
    store_error("work")(source)
}

fn by_engine(source: engine::Error) -> Error {
    engine_error("work")(source)
}

fn by_registry(source: registry::Error) -> Error {
    Error::Image(source.into())
}

/// One error for each variant of this crate.
fn own_errors() -> Vec<Error> {
    let text = || "x".to_owned();
    let path = || PathBuf::from("/x");
    let verb = Verb::Pause;
    let phase = Phase::Stopped;
    let after = Duration::from_secs(1);
    vec![
        Error::invalid("sandbox name", "../x", "use a-z"),
        Error::NoSandbox { name: text() },
        Error::NoExec { id: text() },
        Error::NoKey { id: text() },
        Error::BuildStep {
            step: text(),
            status: text(),
            output: text(),
        },
        Error::WrongState {
            name: text(),
            phase,
            reason: Some(text()),
            verb,
        },
        Error::NameTaken {
            name: text(),
            holder: text(),
        },
        Error::Busy { name: text() },
        Error::HostMemory {
            wanted_bytes: 2,
            available_bytes: 1,
            cgroup: Some(path()),
        },
        Error::HostDisk {
            path: path(),
            wanted_bytes: 2,
            available_bytes: 1,
        },
        Error::ClosedPlace { path: path() },
        Error::Stalled,
        Error::Port {
            address: text(),
            source: refused(),
        },
        Error::Boot {
            after,
            console: text(),
        },
        Error::BootEnded {
            reason: text(),
            console: text(),
        },
        Error::Service {
            command: text(),
            what: text(),
            output: text(),
        },
        Error::DamagedDisk {
            name: text(),
            what: text(),
        },
        Error::NotStarted {
            command: text(),
            failure: Failure {
                errno: 2,
                message: text(),
            },
        },
        Error::NotStarted {
            command: text(),
            failure: Failure {
                errno: 13,
                message: text(),
            },
        },
        link(LinkError::ended()),
        link(LinkError::Broken { what: text() }),
        link(LinkError::Timeout { after }),
        link(LinkError::Refused(Refusal::Version)),
        Error::OutputLimit { limit: 1 },
        Error::Archive { what: text() },
        Error::io("read", "/x", refused()),
        Error::Keeper {
            name: text(),
            source: refused(),
        },
        Error::NoState {
            name: text(),
            state: text(),
        },
        Error::TagTaken {
            name: text(),
            tag: text(),
        },
        Error::NoDisplay { name: text() },
        Error::NoXServer { name: text() },
        Error::ScreenTimeout {
            what: "change",
            after: Duration::from_secs(1),
        },
        Error::NoMount {
            name: text(),
            path: text(),
        },
        Error::MountTaken {
            name: text(),
            path: text(),
        },
        Error::ApplyConflicts {
            host: "/x".into(),
            paths: vec![text()],
        },
        Error::NoMountPort {},
        Error::MountSilent {
            after: Duration::from_secs(1),
        },
        Error::MountServer {
            source: sandtree_mounts::Error::Closed,
        },
        Error::NoWay {
            name: text(),
            way: "back",
            wanted: 2,
            possible: 1,
        },
        Error::StateInUse {
            state: text(),
            by: StateUser::Paused,
        },
        Error::BrokenState {
            state: text(),
            what: text(),
        },
        Error::ForeignState {
            state: text(),
            what: MachinePart::Qemu,
            then: text(),
            here: text(),
        },
        Error::LackingProcessor {
            state: text(),
            qemu: text(),
            features: vec![text()],
        },
        Error::NoSockets {
            path: path(),
            source: refused(),
        },
        Error::NestedState { state: text() },
        Error::TooDeep {
            name: text(),
            layers: 9,
            source: None,
        },
        Error::Unacknowledged { after },
        Error::ForeignArch {
            there: text(),
            here: text(),
        },
        Error::NoSnapshot { reference: text() },
        Error::MissingImage {
            name: text(),
            digest: text(),
            here: None,
        },
        Error::NotAsSaved {
            what: Setting::Cpus,
            saved: text(),
            asked: text(),
        },
        Error::SnapshotNameTaken {
            name: text(),
            by: NameHolder::Files,
        },
        Error::NotSaved {
            name: text(),
            target: text(),
            source: Box::new(Error::Stalled),
        },
        Error::NoMemory {
            name: text(),
            phase,
        },
        Error::StillUnsaved {
            name: text(),
            target: text(),
            reason: Unsaved::Phase(phase),
        },
        Error::StillUnsaved {
            name: text(),
            target: text(),
            reason: Unsaved::Removed,
        },
        Error::Damaged {
            reference: text(),
            damaged: Vec::new(),
        },
        Error::Interrupted {
            name: text(),
            verb,
            by: Verb::Kill,
        },
        Error::Panicked {
            name: text(),
            verb,
            message: text(),
        },
        Error::KeeperVersion {
            name: text(),
            theirs: text(),
            ours: 3,
        },
    ]
}

/// Errors of the crates below, one for each code that they add.
fn foreign_errors() -> Vec<Error> {
    let text = || "x".to_owned();
    let path = || PathBuf::from("/x");
    let after = Duration::from_secs(1);
    let manifest = |source| {
        by_store(store::Error::Manifest {
            path: path(),
            source,
        })
    };
    let mut errors = vec![
        by_store(store::Error::ForeignRoot {
            root: path(),
            owner: 1,
            user: 2,
        }),
        by_store(store::Error::OpenRoot {
            root: path(),
            mode: 0o777,
        }),
        by_store(store::Error::NotAStore { root: path() }),
        by_store(store::Error::NewerFormat {
            root: path(),
            found: 9,
            known: 3,
        }),
        by_store(store::Error::OlderFormat {
            root: path(),
            found: 1,
            known: 3,
        }),
        by_store(store::Error::NewerSchema {
            path: path(),
            found: 9,
            known: 3,
        }),
        by_store(store::Error::Corrupt {
            path: path(),
            what: text(),
        }),
        by_store(store::Error::Index {
            path: path(),
            what: text(),
        }),
        by_store(store::Error::Doubtful { path: path() }),
        by_store(store::Error::NameIsAnId { name: name() }),
        by_store(store::Error::MemoryDir {
            path: path(),
            rule: "x",
        }),
        by_store(store::Error::DiskSize {
            bytes: 1,
            rule: "x",
        }),
        by_store(store::Error::NotEmpty),
        by_store(store::Error::DiskChain { rule: "x" }),
        by_store(store::Error::DiskFold { rule: "x" }),
        by_store(store::Error::MissingBase { base: digest() }),
        by_store(store::Error::MissingKernel { digest: digest() }),
        by_store(store::Error::NotEnoughSpace {
            needed_bytes: 2,
            free_bytes: 1,
        }),
        by_store(store::Error::NotASnapshotDir {
            path: path(),
            foreign: None,
        }),
        by_store(store::Error::NameInUse {
            name: name(),
            holder: Named::Image(digest()),
        }),
        by_store(store::Error::Labels(ManifestError::NotCanonical)),
        by_store(store::Error::Cancelled),
        manifest(ManifestError::Requires { feature: text() }),
        manifest(ManifestError::NotCanonical),
        by_engine(engine::Error::NotFound {
            program: text(),
            looked: Vec::new(),
        }),
        by_engine(engine::Error::VersionUnknown {
            binary: path(),
            output: text(),
        }),
        by_engine(engine::Error::AccelUnusable {
            accel: engine::Accel::Kvm,
            reason: text(),
        }),
        by_engine(engine::Error::NoScreens { reason: text() }),
        by_engine(engine::Error::Spec { detail: text() }),
        by_engine(engine::Error::Unreadable {
            file: "kernel",
            uid: 1,
        }),
        by_engine(engine::Error::NotMapped { reason: text() }),
        by_engine(engine::Error::NotLoaded { reason: text() }),
        by_engine(engine::Error::NotSaved { reason: text() }),
        by_engine(engine::Error::NotCopied { reason: text() }),
        by_engine(engine::Error::PivotedLate),
        by_engine(engine::Error::InNestedGuest),
        by_engine(engine::Error::Qmp {
            command: "x",
            class: text(),
            desc: text(),
        }),
        by_engine(engine::Error::NotEnded { pid: 1, after }),
        by_engine(engine::Error::Timeout {
            command: "x",
            after,
        }),
        by_engine(engine::Error::Protocol { detail: text() }),
        Error::Image(images::Error::NoImage { name: text() }.making("x")),
        Error::Image(images::Error::NoImageOrSnapshot { reference: text() }),
        Error::Image(images::Error::NotAnImage {
            name: text(),
            found: Named::Snapshot(digest()),
        }),
        Error::Image(images::Error::ToolMissing {
            program: "x",
            package: Some("x"),
        }),
        Error::Image(images::Error::UnknownPackage { package: text() }),
        Error::Image(images::Error::NoDebianSources),
        Error::Image(images::Error::Download { stderr: text() }),
        Error::Image(images::Error::Incomplete {
            package: text(),
            what: "x",
        }),
        Error::Image(images::Error::ModuleMissing {
            module: text(),
            needed_by: text(),
        }),
        Error::Image(images::Error::Recipe { what: text() }),
        Error::Image(images::Error::Unknown {
            path: path(),
            why: text(),
        }),
        Error::Image(images::Error::WrongLayer { digest: text() }),
        Error::Image(images::Error::Config { what: text() }),
        Error::Image(images::Error::Save { what: text() }),
        Error::Image(images::Error::NoSaveBase { name: text() }),
        by_registry(registry::Error::Reference {
            text: text(),
            rule: "x",
        }),
        by_registry(registry::Error::NoRegistry { text: text() }),
        by_registry(registry::Error::Unauthorized {
            registry: text(),
            said: Default::default(),
        }),
        by_registry(registry::Error::Denied {
            registry: text(),
            said: Default::default(),
        }),
        by_registry(registry::Error::NotFound {
            what: text(),
            said: Default::default(),
        }),
        by_registry(registry::Error::TooManyRequests {
            registry: text(),
            waited_s: 1,
        }),
        by_registry(registry::Error::ConnectionLost {
            url: text(),
            tries: 4,
            source: refused(),
        }),
        by_registry(registry::Error::Tls {
            url: text(),
            source: refused(),
        }),
        by_registry(registry::Error::TooLarge {
            what: text(),
            limit_bytes: 1,
        }),
        by_registry(registry::Error::UnknownMediaType { media_type: text() }),
        by_registry(registry::Error::NoPlatform {
            wanted: text(),
            available: Vec::new(),
        }),
        by_registry(registry::Error::Document {
            what: "x",
            rule: text(),
        }),
        by_registry(registry::Error::Registry {
            url: text(),
            status: 500,
            said: Default::default(),
        }),
        by_registry(registry::Error::Protocol {
            url: text(),
            rule: "x",
        }),
        by_registry(registry::Error::Helper {
            helper: text(),
            rule: text(),
        }),
        by_registry(registry::Error::File {
            path: path(),
            rule: "x",
        }),
        Error::Diff {
            source: sandtree_diff::Error::NotExt4,
        },
    ];
    errors.extend([1, 2, 17, 20, 21, 28, 39, 5].map(by_guest));
    errors.extend(HubFailure::ALL.map(|cause| link(cause.failure("no").into())));
    errors.extend(
        [2, 17, 13, 30, 28]
            .map(|errno| Error::io("write", "/x", io::Error::from_raw_os_error(errno))),
    );
    errors
}

#[test]
fn every_error_crosses_a_process_boundary_with_its_code_and_arguments() {
    let rows = rows(parts().0);
    for error in own_errors().into_iter().chain(foreign_errors()) {
        let report = error.report();
        let code = error.code().expect("its code is ours");
        assert_eq!(
            (report.code.as_str(), report.kind),
            (code.as_str(), code.kind())
        );
        for argument in report.arguments.keys() {
            let row = &rows[code.as_str()];
            assert!(
                row.allows(argument),
                "{code} has {argument}, which is not in docs/errors.md"
            );
        }
        let sent = serde_json::to_string(&report).expect("a report is JSON");
        let came: Report = serde_json::from_str(&sent).expect("it is read");
        let remote = Error::Remote { report: came };
        assert_eq!(remote.report(), report);
        assert_eq!((remote.code(), remote.kind()), (Some(code), error.kind()));
        assert_eq!(remote.to_string(), error.to_string());
    }
}

/// Codes whose errors cannot be made here: of the command line, or of types that only their own
/// crates can make.
const NOT_MADE: [Code; 14] = [
    Code::Usage,
    Code::NotPulled,
    Code::InvalidDigest,
    Code::UnknownCpu,
    Code::QemuTooOld,
    Code::QemuNotStarted,
    Code::QemuEnded,
    Code::JailFailed,
    Code::MemoryUntracked,
    Code::DamagedArtifact,
    Code::NoRandomBytes,
    Code::ToolFailed,
    Code::UnusableRoot,
    Code::RequestTooLong,
];

#[test]
fn every_code_is_that_of_an_error() {
    let errors = own_errors().into_iter().chain(foreign_errors());
    let made: BTreeSet<Code> = errors.filter_map(|error| error.code()).collect();
    for code in Code::ALL {
        assert!(made.contains(code) != NOT_MADE.contains(code), "{code}");
    }
}

#[test]
fn the_code_is_that_of_the_most_specific_error() {
    let full = io::Error::from_raw_os_error(28);
    let source = store::Error::Io {
        operation: "write",
        path: "/x".into(),
        source: full,
    };
    let error = Error::Image(images::Error::Publish(source).making("dev"));
    let report = error.report();
    assert_eq!(error.code(), Some(Code::DiskFull));
    assert_eq!(
        (report.text("path"), report.text("operation")),
        (Some("/x"), Some("write"))
    );
    assert_eq!(report.arguments["errno"], 28);
}

#[test]
fn links_that_ended_refused_and_broke_have_different_codes() {
    let code = |source: LinkError| link(source).code().expect("its code is ours");
    assert_eq!(
        code(HubFailure::Ended.failure("stopped").into()),
        Code::LinkEnded
    );
    assert_eq!(
        code(HubFailure::Broken.failure("no").into()),
        Code::LinkBroken
    );
    assert_eq!(
        code(HubFailure::QueueFull.failure("no").into()),
        Code::GuestQueueFull
    );
    assert_eq!(
        code(HubFailure::AgentTooOld.failure("no").into()),
        Code::AgentTooOld
    );
    assert_eq!(by_guest(2).code(), Some(Code::FileNotFound));
}
