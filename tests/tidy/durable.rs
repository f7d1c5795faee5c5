//! Names, modes and syncs of durable files are the store's, and go through its file-system seam:
//! only there the crash tests see them. What else `store` and `sandbox` write has a reason here.

use crate::code::Code;
use crate::modules::{self, Crate};

/// Crates that work below the store's root.
const CRATES: [&str; 2] = ["sandbox", "store"];

/// The seam itself.
const SEAM: [&str; 2] = ["crates/store/src/fs.rs", "crates/store/src/fs/"];

/// What creates, changes, renames, removes or syncs a file.
const CALLS: [&str; 22] = [
    ".set_len(",
    ".set_permissions(",
    ".sync_all(",
    ".sync_data(",
    "DirBuilder::new",
    "File::create",
    "File::options",
    "OpenOptions::new",
    "fallocate(",
    "fs::copy(",
    "fs::create_dir(",
    "fs::create_dir_all(",
    "fs::hard_link(",
    "fs::remove_dir(",
    "fs::remove_dir_all(",
    "fs::remove_file(",
    "fs::rename(",
    "fs::set_permissions(",
    "fs::write(",
    "linkat(",
    "mkdirat(",
    "renameat",
];

/// A file outside the seam, what it calls, and why that needs no seam. A row that is not needed
/// fails.
const REASONS: &[(&str, &[&str], &str)] = &[
    (
        "crates/sandbox/src/machine/devices.rs",
        &["File::options", ".set_len("],
        "a staged state is synced when the store seals it",
    ),
    (
        "crates/sandbox/src/capture/mod.rs",
        &["File::options"],
        "QEMU writes to the overlay",
    ),
    (
        "crates/sandbox/src/capture/stop.rs",
        &["File::options"],
        "QEMU writes its own stream; a staged state is synced when the store seals it",
    ),
    (
        "crates/sandbox/src/capture/whole.rs",
        &["File::options"],
        "QEMU writes to the copy of a disk, which the store syncs",
    ),
    (
        "crates/sandbox/src/console.rs",
        &["OpenOptions::new", "fs::rename("],
        "console.log and keeper.log are not durable",
    ),
    (
        "crates/sandbox/src/export.rs",
        &[
            ".sync_all(",
            "File::options",
            "fs::remove_file(",
            "fs::rename(",
        ],
        "a file of the user's, outside of the store",
    ),
    (
        "crates/sandbox/src/fault/injected.rs",
        &["fs::write("],
        "for tests: in a directory of the test",
    ),
    (
        "crates/sandbox/src/files.rs",
        &["fs::remove_file("],
        "a keeper's socket means nothing without its keeper",
    ),
    (
        "crates/sandbox/src/guest/tree/unpack.rs",
        &["OpenOptions::new"],
        "files that a user copies out of a guest",
    ),
    (
        "crates/sandbox/src/hub/record.rs",
        &[
            "File::create",
            "File::options",
            "fs::create_dir_all(",
            "fs::hard_link(",
        ],
        "output of commands: of a machine it is not durable, of a staged state the store syncs it",
    ),
    (
        "crates/sandbox/src/hub/spool.rs",
        &["File::create", "fs::create_dir_all(", "fs::remove_dir_all("],
        "output of commands is durable only as part of a state",
    ),
    (
        "crates/sandbox/src/volumes.rs",
        &[".set_permissions("],
        "files of a volume are the user's, and go through the crate `mounts`",
    ),
    (
        "crates/sandbox/src/machine/restore.rs",
        &[".set_permissions(", "fs::remove_dir_all("],
        "a file without a name, and the output of commands of a machine that failed",
    ),
    (
        "crates/sandbox/src/machine/running.rs",
        &["fs::create_dir_all(", "fs::remove_dir_all("],
        "output of commands is durable only as part of a state",
    ),
    (
        "crates/sandbox/src/machine/spec.rs",
        &["File::options"],
        "QEMU writes to the overlay, which the store syncs",
    ),
    (
        "crates/sandbox/src/publish.rs",
        &["fs::create_dir(", "fs::remove_dir("],
        "a user's directory that is claimed for a save, outside the store",
    ),
    (
        "crates/store/src/disk/chain/raw.rs",
        &[".set_len(", "fallocate("],
        "bytes of a staged disk, which is synced when it is published",
    ),
    (
        "crates/store/src/disk/fold/output.rs",
        &[".set_len("],
        "bytes of an overlay that nothing lists before it is synced",
    ),
    (
        "crates/store/src/index/database.rs",
        &["OpenOptions::new"],
        "the index: SQLite writes it, and nothing relies on it",
    ),
    (
        "crates/store/src/memory/fold.rs",
        &[".set_len("],
        "bytes of a flat file of memory, which has no name",
    ),
    (
        "crates/store/src/store.rs",
        &["fs::create_dir_all("],
        "the directories above the store's root",
    ),
];

fn is_seam(path: &str) -> bool {
    SEAM.iter().any(|seam| path.starts_with(seam))
}

fn places(code: &Code, call: &str) -> Vec<usize> {
    code.places(call).filter(|&at| !code.in_test(at)).collect()
}

fn outside(crates: &[Crate], reasons: &[(&str, &[&str], &str)]) -> Vec<String> {
    let codes: Vec<&Code> = crates
        .iter()
        .filter(|read| CRATES.contains(&read.name.as_str()))
        .flat_map(|read| read.files.iter().map(|file| &file.code))
        .filter(|code| !is_seam(code.path()))
        .collect();
    let has_reason = |path: &str, call: &str| {
        let mut rows = reasons.iter().filter(|(of, ..)| *of == path);
        rows.any(|(_, calls, _)| calls.contains(&call))
    };
    let mut found = Vec::new();
    for code in &codes {
        for call in CALLS.iter().filter(|call| !has_reason(code.path(), call)) {
            let complaint = |at| format!("{}: {call} outside of the store's seam", code.at(at));
            found.extend(places(code, call).into_iter().map(complaint));
        }
    }
    for (path, calls, _) in reasons {
        let code = codes.iter().find(|code| code.path() == *path);
        let is_needed = |call: &str| code.is_some_and(|code| !places(code, call).is_empty());
        let unneeded = calls.iter().filter(|call| !is_needed(call));
        found.extend(unneeded.map(|call| format!("{path}: no {call} is left: remove the row")));
    }
    found
}

#[test]
fn durable_files_change_only_behind_the_seam() {
    let found = outside(&modules::crates(), REASONS);
    assert!(found.is_empty(), "\n{}\n", found.join("\n"));
}

#[test]
fn a_durable_write_outside_of_the_seam_is_found() {
    let text = "fn f() { std::fs::rename(a, b); }\n#[cfg(test)]\nmod t { fn f() { fs::write(a) } }";
    let sample = |name: &str, file: &str| {
        let path = format!("crates/{name}/{file}");
        Crate::sample(name, &[(&path, text)])
    };
    let path = "crates/store/src/save.rs";
    let of = |call: &'static str| -> usize {
        let reasons: &[(&str, &[&str], &str)] = &[(path, &[call], "")];
        outside(&[sample("store", "src/save.rs")], reasons).len()
    };
    assert_eq!(outside(&[sample("store", "src/save.rs")], &[]).len(), 1);
    assert_eq!(of("fs::rename("), 0);
    assert_eq!(of("fs::copy("), 2, "one without a reason, one row unneeded");
    assert_eq!(outside(&[sample("store", "src/fs/disk.rs")], &[]).len(), 0);
    assert_eq!(outside(&[sample("cli", "src/main.rs")], &[]).len(), 0);
}
