//! The program that is shipped has no code for tests or benchmarks. `make build` builds the package
//! `sandtree-cli` alone; this asks cargo which features of the library that enables.

use std::process::Command;

use crate::sources;

#[test]
fn the_shipped_program_has_neither_faults_nor_benchmarks() {
    let tree = Command::new("cargo")
        .args(["tree", "--locked", "--offline", "--package", "sandtree-cli"])
        .args(["--edges", "normal", "--prefix", "none"])
        .args(["--format", "{p}|{f}"])
        .current_dir(sources::top())
        .output()
        .expect("cargo runs");
    assert!(tree.status.success(), "{tree:?}");
    let tree = String::from_utf8(tree.stdout).expect("it is text");
    let library = tree
        .lines()
        .find(|line| line.starts_with("sandtree v"))
        .expect("the program needs the library");
    let (_, features) = library.split_once('|').expect("it has this form");
    // The server needs schemas of the library's types.
    assert_eq!(features, "schema", "{library}");
}
