//! Crates depend on each other in the direction that ARCHITECTURE.md draws. Dependencies of tests
//! may lead anywhere.

use std::collections::BTreeSet;

use crate::sources::{self, Source};

/// What a crate may depend on of ours, and which libraries it must not have.
struct Allowed {
    name: &'static str,
    ours: &'static [&'static str],
    not: &'static [&'static str],
}

const RUNTIME: &[&str] = &["tokio", "ureq", "rustls"];

/// A row may name a crate that does not exist yet.
const ALLOWED: &[Allowed] = &[
    allowed(
        "agent",
        &["sandtree-proto"],
        &["tokio", "ureq", "rustls", "serde_json"],
    ),
    allowed(
        "bench",
        &[
            "sandtree",
            "sandtree-engine",
            "sandtree-registry",
            "sandtree-store",
        ],
        &[],
    ),
    allowed("bench-guest", &["sandtree-proto"], RUNTIME),
    allowed(
        "cli",
        &["sandtree", "sandtree-server"],
        &["ureq", "rustls", "rusqlite"],
    ),
    allowed("diff", &["sandtree-disk"], RUNTIME),
    allowed("disk", &[], RUNTIME),
    allowed("engine", &[], &["ureq", "rustls", "rusqlite"]),
    allowed(
        "images",
        &[
            "sandtree-disk",
            "sandtree-registry",
            "sandtree-rootfs",
            "sandtree-store",
        ],
        &["tokio"],
    ),
    allowed("mounts", &["sandtree-proto"], RUNTIME),
    allowed("preload", &[], &["tokio", "serde", "thiserror"]),
    allowed("proto", &[], &["tokio", "ureq", "rustls", "rustix", "libc"]),
    allowed("python", &["sandtree"], &["ureq", "rustls", "rusqlite"]),
    allowed("registry", &[], &["tokio"]),
    allowed("rootfs", &["sandtree-diff", "sandtree-disk"], RUNTIME),
    allowed(
        "sandbox",
        &[
            "sandtree-diff",
            "sandtree-disk",
            "sandtree-engine",
            "sandtree-images",
            "sandtree-mounts",
            "sandtree-proto",
            "sandtree-registry",
            "sandtree-rootfs",
            "sandtree-store",
        ],
        &["clap", "indicatif"],
    ),
    allowed(
        "server",
        &["sandtree"],
        &["clap", "indicatif", "rusqlite", "ureq"],
    ),
    allowed("store", &["sandtree-disk"], RUNTIME),
];

const fn allowed(
    name: &'static str,
    ours: &'static [&'static str],
    not: &'static [&'static str],
) -> Allowed {
    Allowed { name, ours, not }
}

/// The names in the tables of dependencies that a product is built with.
fn dependencies(manifest: &Source) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut is_table = false;
    for line in manifest.text.lines().map(str::trim) {
        if let Some(table) = line.strip_prefix('[') {
            let table = table.trim_end_matches(']');
            let is_of_tests = table.contains("dev-dependencies");
            is_table = table.ends_with("dependencies") && !is_of_tests;
            continue;
        }
        let name = line.split(['.', '=', ' ']).next().unwrap_or_default();
        let is_name = name.starts_with(|c: char| c.is_ascii_alphabetic());
        if is_table && is_name && line.contains('=') {
            found.insert(name.to_owned());
        }
    }
    found
}

fn complaints(name: &str, manifest: &Source) -> Vec<String> {
    let path = &manifest.path;
    let Some(allowed) = ALLOWED.iter().find(|allowed| allowed.name == name) else {
        return vec![format!(
            "{path}: add {name} to ALLOWED in tests/tidy/crates.rs"
        )];
    };
    let found = dependencies(manifest).into_iter().filter(|dependency| {
        let is_ours = dependency.starts_with("sandtree");
        let is_allowed = allowed.ours.contains(&dependency.as_str());
        (is_ours && !is_allowed) || allowed.not.contains(&dependency.as_str())
    });
    found
        .map(|dependency| format!("{path}: {name} must not depend on {dependency}"))
        .collect()
}

#[test]
fn crates_depend_in_one_direction() {
    let names = sources::directories("crates");
    let found: Vec<String> = names
        .iter()
        .flat_map(|name| complaints(name, &sources::file(&format!("crates/{name}/Cargo.toml"))))
        .collect();
    assert!(found.is_empty(), "\n{}\n", found.join("\n"));
}

#[test]
fn a_forbidden_dependency_is_found() {
    let manifest = |text: &str| Source {
        path: "Cargo.toml".to_owned(),
        text: text.to_owned(),
    };
    let samples = [
        (
            "engine",
            1,
            "[dependencies]\nsandtree-store.workspace = true\n",
        ),
        (
            "store",
            1,
            "[dependencies]\nsandtree-engine = { path = \"../engine\" }\n",
        ),
        (
            "store",
            1,
            "[dependencies]\nserde.workspace = true\n\n[target.x.dependencies]\ntokio = \"1\"\n",
        ),
        (
            "cli",
            2,
            "[dependencies]\nsandtree.workspace = true\nsandtree-engine = \"1\"\nsandtree-store = \"1\"\n",
        ),
        ("proto", 1, "[build-dependencies]\nsandtree-store = \"1\"\n"),
        (
            "cli",
            0,
            "[dependencies]\nsandtree.workspace = true\n[dev-dependencies]\nsandtree-store = \"1\"\n",
        ),
        ("new", 1, ""),
    ];
    for (name, expected, text) in samples {
        assert_eq!(
            complaints(name, &manifest(text)).len(),
            expected,
            "{name}: {text}"
        );
    }
}
