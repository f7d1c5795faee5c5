//! Every program that Sandtree, its tests or its scripts start on the host is in
//! `scripts/programs`, from which `scripts/setup` installs. So `make test` needs nothing but
//! Debian's essential packages, git, make and Rust.
//!
//! In Rust a program is the text in `Command::new("…")`. Where it is not a literal, a comment on
//! the line before declares what is started:
//!
//! ```text
//!   // starts: gzip, zstd                         these
//!   // starts: our own program                    what this workspace builds, unpacks or writes; a reason may follow
//!   // starts: nothing                            for a test that starts what is not there
//!   // starts: the program of tool(…)             a helper: the first literal of each call of it is a program
//!   // starts: the script of shell(…)             a helper: the first literal of each call of it is a shell script
//!   // starts: the program of run(…) in tests/vm  a helper that is called from elsewhere
//! ```
//!
//! `program()`, `example(…)` and `env!("CARGO_BIN_EXE_…")` are our own without a comment. A helper
//! counts in the directory of its file. `crates/agent/src` is left out: the agent starts programs
//! of the guest, not of the host.

mod rust;
mod shell;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use crate::sources::{self, Source};

/// What `scripts/programs` says of a program.
struct Listed {
    tier: String,
    package: String,
}

/// A program, and the place that starts it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Start {
    pub program: String,
    pub at: String,
}

const TIERS: [&str; 6] = ["essential", "rust", "optional", "run", "demo", "tests"];

fn listed() -> BTreeMap<String, Listed> {
    let source = sources::file("scripts/programs");
    let mut listed = BTreeMap::new();
    for line in source
        .text
        .lines()
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
    {
        let [tier, program, package] = line.split_whitespace().collect::<Vec<_>>()[..] else {
            panic!("{}: not `tier program package`: {line}", source.path)
        };
        assert!(
            TIERS.contains(&tier),
            "{}: unknown tier: {line}",
            source.path
        );
        let entry = Listed {
            tier: tier.to_owned(),
            package: package.to_owned(),
        };
        assert!(
            listed.insert(program.to_owned(), entry).is_none(),
            "{}: twice: {program}",
            source.path
        );
    }
    listed
}

/// Every program that is started, and the places where the program is not known.
fn started() -> (BTreeSet<Start>, Vec<String>) {
    let mut rust = sources::rust(&["crates", "tests/vm", "fuzz"]);
    rust.retain(|source| !source.path.starts_with("crates/agent/src"));
    let (mut starts, unclear) = rust::starts(&rust);
    for source in sources::scripts(&["scripts", ".ci"]) {
        starts.extend(shell::starts(&source.text, |offset| source.at(offset)));
    }
    let makefile = sources::file("Makefile");
    starts.extend(shell::starts(&recipes(&makefile), |offset| {
        makefile.at(offset)
    }));
    (starts, unclear)
}

/// The commands of a Makefile, each at its place; everything else is blank.
fn recipes(makefile: &Source) -> String {
    let line = |line: &str| match line.strip_prefix('\t') {
        // `@` is make's, and `$(NAME)` is a variable of make's, not a command.
        Some(command) => format!(
            " {}",
            command
                .replacen('@', " ", 1)
                .replace("$(", "${")
                .replace(')', "}")
        ),
        None => " ".repeat(line.len()),
    };
    makefile
        .text
        .lines()
        .map(line)
        .collect::<Vec<_>>()
        .join("\n")
}

#[test]
fn recipes_are_read_as_scripts() {
    let text = "a: b\n\t@tar x $(TARGET)/y\n\t$(CARGO) build && cpio\n";
    let makefile = Source {
        path: "Makefile".to_owned(),
        text: text.to_owned(),
    };
    let starts = shell::starts(&recipes(&makefile), |offset| makefile.at(offset));
    let starts: Vec<_> = starts
        .into_iter()
        .map(|start| (start.program, start.at))
        .collect();
    assert_eq!(
        starts,
        [
            ("cpio".to_owned(), "Makefile:3".to_owned()),
            ("tar".to_owned(), "Makefile:2".to_owned())
        ]
    );
}

fn missing(starts: &BTreeSet<Start>, listed: &BTreeMap<String, Listed>) -> Vec<String> {
    let unlisted = starts
        .iter()
        .filter(|start| !listed.contains_key(&start.program));
    unlisted
        .map(|Start { program, at }| format!("{at}: {program} is not in scripts/programs"))
        .collect()
}

#[test]
fn everything_that_is_started_is_installed() {
    let (starts, mut complaints) = started();
    complaints.extend(missing(&starts, &listed()));
    assert!(complaints.is_empty(), "\n{}\n", complaints.join("\n"));
    // The rule sees every kind of place.
    for place in [
        "scripts/setup",
        "scripts/demo",
        ".ci/run",
        "tests/vm",
        "crates/rootfs",
        "fuzz",
    ] {
        assert!(
            starts.iter().any(|start| start.at.starts_with(place)),
            "nothing is seen to be started in {place}"
        );
    }
}

#[test]
fn a_program_that_nothing_installs_is_found() {
    let (starts, _) = started();
    for (program, place) in [
        ("cpio", "tests/vm/images/kernels.rs:"),
        ("xz", "crates/rootfs/"),
        ("awk", "scripts/"),
    ] {
        let mut listed = listed();
        assert!(listed.remove(program).is_some(), "{program}");
        let missing = missing(&starts, &listed);
        assert!(
            missing
                .iter()
                .any(|line| line.starts_with(place) && line.contains(program)),
            "{program}: {missing:?}"
        );
    }
}

/// The list is true on the machine that runs this test, if that is Debian 12.
#[test]
fn packages_contain_their_programs() {
    let release = fs::read_to_string("/etc/os-release").unwrap_or_default();
    if !release.contains("VERSION_CODENAME=bookworm") {
        return eprintln!("not checked: this is not Debian 12");
    }
    let essential = essential_packages();
    for (program, Listed { tier, package }) in listed() {
        if tier == "essential" {
            assert!(
                essential.contains(&package),
                "{package} ({program}) is not essential"
            );
        }
        let Some(files) = files_of(&package) else {
            continue;
        };
        // `awk`, `cc` and `sh` are names that a package's scripts make or that another package of
        // its kind gives.
        let is_in = |dir: &str| {
            files
                .lines()
                .any(|file| Path::new(file) == Path::new(dir).join(&program))
        };
        let dirs = ["/bin", "/sbin", "/usr/bin", "/usr/sbin"];
        assert!(
            ["awk", "cc"].contains(&program.as_str()) || dirs.iter().any(|dir| is_in(dir)),
            "{program}: {package}"
        );
    }
}

/// The files of an installed package.
fn files_of(package: &str) -> Option<String> {
    let names = [format!("{package}.list"), format!("{package}:amd64.list")];
    names
        .iter()
        .find_map(|name| fs::read_to_string(Path::new("/var/lib/dpkg/info").join(name)).ok())
}

fn essential_packages() -> BTreeSet<String> {
    let status = fs::read_to_string("/var/lib/dpkg/status").expect("dpkg's status can be read");
    let essential = status
        .split("\n\n")
        .filter(|entry| entry.contains("\nEssential: yes"));
    let name = |entry: &str| {
        entry
            .lines()
            .find_map(|line| line.strip_prefix("Package: ").map(str::to_owned))
    };
    // base-files depends on an awk before it is unpacked: mawk is the default.
    essential
        .filter_map(name)
        .chain(["mawk".to_owned()])
        .collect()
}
