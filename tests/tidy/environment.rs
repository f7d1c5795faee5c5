//! The environment and the working directory are read at the edges and passed in: by `cli`,
//! `python` and `agent`, by build scripts, and by tests and benchmarks. The clock, the network and
//! asynchronous code are not the store's, and `proto` does no I/O.

use crate::code::Code;
use crate::modules::{self, Crate};

/// Crates that are edges.
const EDGES: [&str; 5] = ["agent", "bench", "bench-guest", "cli", "python"];

const READS: [&str; 11] = [
    "env::var(",
    "env::var_os(",
    "env::vars(",
    "env::vars_os(",
    "env::current_dir(",
    "env::set_current_dir(",
    "env::home_dir(",
    "env::temp_dir(",
    "env::split_paths(",
    // Of a relative path, these read the working directory.
    "path::absolute",
    "canonicalize(",
];

/// Files below an edge that use one of these all the same: they resolve the links of paths that
/// their callers give them. A row that is not needed fails.
const EXCEPTIONS: &[(&str, &str)] = &[
    ("crates/engine/src/install.rs", "canonicalize("),
    ("crates/engine/src/landlock.rs", "canonicalize("),
    ("crates/registry/src/layout.rs", "canonicalize("),
    ("crates/sandbox/src/guest/files.rs", "canonicalize("),
    ("crates/sandbox/src/place.rs", "canonicalize("),
];

/// What a crate must not mention.
const FORBIDDEN: &[(&str, &[&str])] = &[
    (
        "store",
        &[
            "SystemTime::now(",
            "Instant::now(",
            "std::net",
            "tokio::",
            "Command::new(",
        ],
    ),
    (
        "proto",
        &[
            "SystemTime::now(",
            "Instant::now(",
            "std::net",
            "std::fs",
            "tokio::",
        ],
    ),
    ("engine", &["TcpStream", "TcpListener"]),
];

/// The places of a text in a file, outside of tests.
fn places<'a>(code: &'a Code, text: &'a str) -> impl Iterator<Item = usize> + 'a {
    code.places(text).filter(|&at| !code.in_test(at))
}

fn is_build_script(code: &Code) -> bool {
    code.path().ends_with("/build.rs")
}

fn reads(crates: &[Crate], exceptions: &[(&str, &str)]) -> Vec<String> {
    let inner = crates
        .iter()
        .filter(|read| !EDGES.contains(&read.name.as_str()));
    let codes: Vec<&Code> = inner
        .flat_map(|read| read.files.iter().map(|file| &file.code))
        .filter(|code| !is_build_script(code))
        .collect();
    let mut found = Vec::new();
    for code in &codes {
        for read in READS {
            if exceptions.contains(&(code.path(), read)) {
                continue;
            }
            let complaint = |at| format!("{}: {read}…) outside of an edge", code.at(at));
            found.extend(places(code, read).map(complaint));
        }
    }
    let is_needed = |(path, read): &(&str, &str)| {
        let mut files = codes.iter().filter(|code| code.path() == *path);
        files.any(|code| places(code, read).next().is_some())
    };
    let stale = exceptions.iter().filter(|exception| !is_needed(exception));
    found.extend(
        stale.map(|(path, read)| format!("{path}: no {read}…) is left: remove the exception")),
    );
    found
}

fn forbidden(crates: &[Crate]) -> Vec<String> {
    let mut found = Vec::new();
    for (name, texts) in FORBIDDEN {
        let files = crates.iter().filter(|read| read.name == *name);
        for code in files.flat_map(|read| read.files.iter().map(|file| &file.code)) {
            for text in *texts {
                let complaint = |at| format!("{}: {text} in {name}", code.at(at));
                found.extend(places(code, text).map(complaint));
            }
        }
    }
    found
}

#[test]
fn only_edges_read_the_environment() {
    let crates = modules::crates();
    let found = [reads(&crates, EXCEPTIONS), forbidden(&crates)].concat();
    assert!(found.is_empty(), "\n{}\n", found.join("\n"));
}

#[test]
fn a_read_of_the_environment_is_found() {
    let text =
        "fn f() { std::env::var_os(\"A\"); }\n#[cfg(test)]\nmod t { fn f() { env::var(\"A\") } }";
    let sample = |name: &str, file: &str| {
        let path = format!("crates/{name}/{file}");
        Crate::sample(name, &[(&path, text)])
    };
    let path = "crates/store/src/lib.rs";
    assert_eq!(reads(&[sample("store", "src/lib.rs")], &[]).len(), 1);
    assert_eq!(
        reads(&[sample("store", "src/lib.rs")], &[(path, "env::var_os(")]).len(),
        0
    );
    assert_eq!(
        reads(&[sample("store", "src/lib.rs")], &[(path, "env::vars(")]).len(),
        2
    );
    assert_eq!(reads(&[sample("store", "build.rs")], &[]).len(), 0);
    assert_eq!(reads(&[sample("store", "tests/a.rs")], &[]).len(), 0);
    assert_eq!(reads(&[sample("cli", "src/main.rs")], &[]).len(), 0);
}

#[test]
fn what_a_crate_must_not_mention_is_found() {
    let text = "fn f() { SystemTime::now(); }";
    let store = Crate::sample("store", &[("crates/store/src/lib.rs", text)]);
    let engine = Crate::sample("engine", &[("crates/engine/src/lib.rs", text)]);
    assert_eq!(forbidden(&[store]).len(), 1);
    assert_eq!(forbidden(&[engine]).len(), 0);
}
