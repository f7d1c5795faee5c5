//! Every test that SPECIFICATION.md names exists, in the file that it names.
//!
//! The last cell of a table's row holds tests. In backquotes are names of functions, whole files of
//! `tests/vm` as `vm::forks`, and paths. A name directly before "in `path`" is in that file or
//! below that directory. A test that a macro makes is the macro's argument.

use std::collections::{BTreeMap, BTreeSet};

use crate::code::{self, Code};
use crate::sources::{self, Source};

/// The words of each file's code.
type Words = BTreeMap<String, BTreeSet<String>>;

fn words() -> Words {
    let rust = sources::rust(&["crates", "tests", "fuzz"]).into_iter();
    let rust = rust.map(Code::new).map(|code| {
        let names = test_names(&code.bare);
        (code.source.path.clone(), names)
    });
    let python = sources::python(&["tests/python", "tests/sdk"]).into_iter();
    let python = python.map(|source| {
        let names = test_names(&source.text);
        (source.path, names)
    });
    rust.chain(python).collect()
}

fn test_names(text: &str) -> BTreeSet<String> {
    let words = text.split(|c| !code::is_name(c));
    let names = words.filter(|word| is_test_name(word));
    names.map(str::to_owned).collect()
}

/// The tests that a document names, each with its line.
fn complaints(document: &Source, words: &Words) -> Vec<String> {
    let mut found = Vec::new();
    for (number, line) in document.text.lines().enumerate() {
        let at = format!("{}:{}", document.path, number + 1);
        let wrong = last_cell(line)
            .into_iter()
            .flat_map(|cell| cell.split(';'))
            .flat_map(|part| missing(part, words));
        found.extend(wrong.map(|name| format!("{at}: there is no {name}")));
    }
    found
}

fn last_cell(line: &str) -> Option<&str> {
    let row = line.strip_prefix('|')?.trim_end().strip_suffix('|')?;
    row.rsplit('|').next()
}

/// What is named in one part of a cell and does not exist.
fn missing(part: &str, words: &Words) -> Vec<String> {
    let pieces: Vec<&str> = part.split('`').collect();
    let quoted = (1..pieces.len()).step_by(2);
    let wrong = quoted.filter(|&at| {
        let is_placed = pieces.get(at + 1) == Some(&" in ");
        let within = if is_placed {
            place(pieces[at + 2])
        } else {
            String::new()
        };
        !is_found(pieces[at], &within, words)
    });
    wrong.map(|at| format!("`{}`", pieces[at])).collect()
}

/// A file or directory as a path.
fn place(name: &str) -> String {
    match name.strip_prefix("vm::") {
        Some(file) => format!("tests/vm/{}", file.replace("::", "/")),
        None => name.to_owned(),
    }
}

fn is_found(name: &str, within: &str, words: &Words) -> bool {
    if name.contains('/') || name.starts_with("vm::") {
        return exists(&place(name), words);
    }
    !is_test_name(name) || is_defined(name, within, words)
}

/// Test names are sentences: other names in a cell are shorter.
fn is_test_name(name: &str) -> bool {
    let is_part = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    name.chars().all(is_part) && name.matches('_').count() >= 2
}

/// A file, with or without its extension, or a directory with files.
fn exists(path: &str, words: &Words) -> bool {
    let path = path.trim_end_matches('/');
    let names = [path.to_owned(), format!("{path}.rs")];
    let is_known = names.iter().any(|name| words.contains_key(name));
    let below = format!("{path}/");
    is_known || words.keys().any(|file| file.starts_with(&below))
}

fn is_defined(name: &str, within: &str, words: &Words) -> bool {
    let mut files = words
        .iter()
        .filter(|(file, _)| file.starts_with(within) || file.ends_with(&format!("/{within}")));
    files.any(|(_, names)| names.contains(name))
}

#[test]
fn every_test_of_the_specification_exists() {
    let found = complaints(&sources::file("SPECIFICATION.md"), &words());
    assert!(found.is_empty(), "\n{}\n", found.join("\n"));
}

#[test]
fn a_name_without_a_test_is_found() {
    let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
    let words = Words::from([
        (
            "crates/a/src/b.rs".to_owned(),
            names(&["one_two_three", "x"]),
        ),
        ("tests/vm/forks.rs".to_owned(), names(&["four_five_six"])),
    ]);
    let row = |cell: &str| Source {
        path: "SPECIFICATION.md".to_owned(),
        text: format!("`not_a_test_here`\n| promise | {cell} |\n"),
    };
    for (expected, cell) in [
        (
            0,
            "`four_five_six`, `vm::forks`; `one_two_three` in `crates/a/src/b.rs`",
        ),
        (
            0,
            "`one_two_three` in `b.rs`; `crates/a/src`; fuzz target `one-two`; `boot_id`",
        ),
        (1, "`one_two_four`"),
        (1, "`vm::spoons`"),
        (1, "`crates/a/src/c.rs`"),
        (1, "`four_five_six` in `crates/a/src/b.rs`"),
    ] {
        assert_eq!(complaints(&row(cell), &words).len(), expected, "{cell}");
    }
}
