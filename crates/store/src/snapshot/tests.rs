//! Manifests: the golden one, and what is refused.

use proptest::prelude::{any, prop_assert, proptest};
use serde_json::{Value, json};

use super::SnapshotManifest;
use crate::Digest;
use crate::damage::manifest::ManifestError;

/// The vector of docs/format.md, byte for byte.
const GOLDEN: &[u8] = include_bytes!("../../../../docs/vectors/snapshot-manifest.json");
const GOLDEN_DIGEST: &str = "91436924b6834ca943ace8ed1020d67543465581bdc4e8617cac39ef854cd093";

fn golden() -> Value {
    serde_json::from_slice(GOLDEN).unwrap()
}

fn parse(value: &Value) -> Result<SnapshotManifest, ManifestError> {
    Ok(SnapshotManifest::parse(&serde_json::to_vec(value).unwrap())?.0)
}

/// The golden manifest with one value exchanged.
fn with(pointer: &str, value: Value) -> Result<SnapshotManifest, ManifestError> {
    let mut manifest = golden();
    *manifest
        .pointer_mut(pointer)
        .unwrap_or_else(|| panic!("{pointer}")) = value;
    parse(&manifest)
}

fn refused(pointer: &str, value: Value) -> String {
    let error = with(pointer, value.clone()).expect_err(&format!("{pointer} = {value}"));
    assert!(
        matches!(error, ManifestError::Invalid { .. }),
        "{pointer} = {value}: {error:?}"
    );
    error.to_string()
}

#[test]
fn the_golden_manifest_is_what_the_format_says() {
    let (manifest, digest) = SnapshotManifest::parse(GOLDEN).unwrap();
    assert_eq!(digest.as_str(), GOLDEN_DIGEST);
    assert_eq!(manifest.to_bytes(), GOLDEN);
    let document = include_str!("../../../../docs/format.md");
    assert!(
        document.contains(GOLDEN_DIGEST),
        "docs/format.md tells another digest"
    );
    assert!(
        manifest.memory.is_some() && !manifest.labels.is_empty(),
        "it shows everything"
    );
}

#[test]
fn later_schemas_and_features_are_refused_by_name() {
    assert_eq!(
        with("/schema", json!(2)),
        Err(ManifestError::Schema { found: 2, known: 1 })
    );
    let feature = "holograms".to_owned();
    assert_eq!(
        with("/requires", json!(["commands", "holograms"])),
        Err(ManifestError::Requires { feature })
    );
    // Also where the rest of it is nothing we know.
    let bytes = br#"{"schema":7,"what":[1,2]}"#;
    assert_eq!(
        SnapshotManifest::parse(bytes),
        Err(ManifestError::Schema { found: 7, known: 1 })
    );
}

#[test]
fn other_spellings_of_the_same_are_refused() {
    let text = std::str::from_utf8(GOLDEN).unwrap();
    let first = "\"arch\":\"x86_64\"";
    let spellings = [
        text.replacen(':', ": ", 1),
        format!("{text}\n"),
        text.replacen("\"arch\"", "\"\\u0061rch\"", 1),
        text.replacen(first, &format!("{first},{first}"), 1),
        text.replacen("{\"arch\"", "{\"aa\":1,\"arch\"", 1),
        text.replacen("\"purpose\":", "\"purpose\":\"a\",\"purpose\":", 1),
        text.replacen("\"bytes\":1073741824", "\"bytes\":1073741824.0", 1),
        text.replacen("\"cpu_features\":[\"avx\",\"sse2\"],", "", 1),
        text.replacen("\"parent\":null,", "", 1),
    ];
    for other in spellings {
        assert_ne!(
            other, text,
            "the golden manifest does not have what is to be changed"
        );
        let error = SnapshotManifest::parse(other.as_bytes()).expect_err(&other);
        assert!(
            matches!(
                error,
                ManifestError::NotCanonical | ManifestError::NotAManifest(_)
            ),
            "{error:?}"
        );
    }
}

#[test]
fn what_is_out_of_bounds_is_refused() {
    let digest = |text: &str| Digest::of(text.as_bytes()).to_string();
    let layer = |text: &str, bytes: u64| json!({"bytes": bytes, "digest": digest(text)});
    let many = |count: usize| Value::from_iter((0..count).map(|at| layer(&at.to_string(), 1)));
    refused("/created_at_unix_ms", json!(1u64 << 53));
    refused("/disk/bytes", json!(513));
    refused("/disk/bytes", json!(u64::MAX));
    refused("/disk/file_system", json!("../ext4"));
    refused("/disk/layers", many(513));
    refused("/disk/layers", json!([layer("a", 0)]));
    refused("/disk/layers", json!([layer("a", 1), layer("a", 1)]));
    refused("/disk/layers", json!([layer("a", u64::MAX), layer("b", 2)]));
    refused("/disk/layers", json!([layer("a", 1 << 53)]));
    refused("/memory/layers", many(513));
    refused("/memory/layers", json!([]));
    refused("/memory/kind", json!("stream"));
    refused("/memory/bytes", json!(4097));
    refused("/memory/devices/bytes", json!(0));
    refused("/memory/commands/bytes", json!((16 << 20) + 1));
    refused("/memory/machine/arch", json!("aarch64"));
    refused("/memory/machine/cpu_features", json!(["sse2", "avx"]));
    refused("/settings/cpus", json!(0));
    refused("/settings/memory_bytes", json!(0));
    refused("/requires", json!(["memory-layers", "commands"]));
    refused("/requires", json!([]));
    let same_start = format!("{}{}", &digest("a")[..16], "0".repeat(48));
    let message = refused(
        "/disk/layers",
        json!([layer("a", 1), {"bytes": 1, "digest": same_start}]),
    );
    assert!(message.contains("one name"), "{message}");
    let other_length = json!({"bytes": 1, "digest": golden()["disk"]["layers"][0]["digest"]});
    assert!(refused("/memory/devices", other_length).contains("two lengths"));
}

#[test]
fn settings_and_texts_keep_their_bounds() {
    let many = |count: usize| Value::from_iter((0..count).map(|at| format!("{at:04}")));
    let ports =
        |count: u16| Value::from_iter((0..count).map(|at| json!({"guest": at, "host": at})));
    for cpus in [0, 65, u32::MAX] {
        refused("/settings/cpus", json!(cpus));
        refused("/memory/machine/cpus", json!(cpus));
    }
    with("/settings/cpus", json!(64)).unwrap();
    with("/settings/ports", ports(64)).unwrap();
    refused("/settings/ports", ports(65));
    let message = refused("/settings/memory_bytes", json!((512 << 20) + 4096));
    assert!(message.contains("MiB"), "{message}");
    let message = refused("/settings/memory_bytes", json!(256 << 20));
    assert!(message.contains("settings"), "{message}");
    refused("/memory/bytes", json!(256 << 20));
    let lists = [
        ("/settings/qemu_args", 256),
        ("/memory/machine/qemu_args", 256),
        ("/memory/machine/cpu_features", 1024),
        ("/capture/degraded", 64),
    ];
    for (pointer, most) in lists {
        with(pointer, many(most)).unwrap();
        refused(pointer, many(most + 1));
        with(pointer, json!(["x".repeat(4096)])).unwrap();
        refused(pointer, json!(["x".repeat(4097)]));
        refused(pointer, json!(["two\nlines"]));
    }
    let machine = ["machine_type", "cpu", "accelerator", "qemu_version"]
        .map(|text| format!("/memory/machine/{text}"));
    let settings = ["/settings/cpu", "/settings/memory_mode", "/capture/mode"].map(str::to_owned);
    for pointer in machine.iter().chain(&settings) {
        with(pointer, json!("größe")).unwrap();
        refused(pointer, json!("x".repeat(4097)));
        for control in ["\n", "\x1b[2J", "\0", "\u{7f}", "\u{9b}"] {
            refused(pointer, json!(control));
        }
    }
}

#[test]
fn labels_keep_their_rules() {
    let labels =
        |count: usize| Value::from_iter((0..count).map(|at| (format!("k{at}"), json!("v"))));
    with("/labels", labels(64)).unwrap();
    with("/labels", json!({"a.b/c_d-0": "ü".repeat(2048)})).unwrap();
    refused("/labels", labels(65));
    refused("/labels", json!({"a": "x".repeat(4097)}));
    with("/labels", json!({"a": "two\nlines"})).unwrap();
    for control in ["\x1b[2J", "\r", "\0", "\u{7f}", "\u{9b}"] {
        refused("/labels", json!({"a": control}));
    }
    for key in ["", "A", "-a", "a b", "ä", &"a".repeat(64)] {
        refused("/labels", json!({key: "v"}));
    }
}

#[test]
fn outputs_are_harmless_paths() {
    let blob = golden()["memory"]["devices"].clone();
    let outputs =
        |count: usize| Value::from_iter((0..count).map(|at| (format!("o{at}"), blob.clone())));
    with("/memory/outputs", outputs(4096)).unwrap();
    with(
        "/memory/outputs",
        json!({"a/b/c.0": blob, "a/b-c": blob, "a0": blob}),
    )
    .unwrap();
    refused("/memory/outputs", outputs(4097));
    for path in [
        "",
        "/a",
        "a/",
        "../a",
        "a/../b",
        ".a",
        "a//b",
        "a/.b",
        "a\\b",
        "a\0",
        "ä",
        &"a".repeat(256),
    ] {
        refused("/memory/outputs", json!({path: blob}));
    }
    let message = refused(
        "/memory/outputs",
        json!({"a": blob, "a-b": blob, "a/b": blob}),
    );
    assert!(message.contains("directory"), "{message}");
}

#[test]
fn what_is_too_large_or_no_json_is_refused() {
    let large = vec![b' '; (1 << 20) + 1];
    assert_eq!(
        SnapshotManifest::parse(&large),
        Err(ManifestError::TooLarge { bytes: large.len() })
    );
    let deep = "[".repeat(100_000);
    for bytes in [
        &b""[..],
        b"{",
        b"null",
        &[0xff; 10],
        deep.as_bytes(),
        &GOLDEN[..GOLDEN.len() - 1],
    ] {
        assert!(matches!(
            SnapshotManifest::parse(bytes),
            Err(ManifestError::NotAManifest(_))
        ));
    }
}

proptest! {
    /// Whatever is accepted keeps the rules, and is its own canonical form.
    #[test]
    fn bent_manifests_are_refused_or_whole(at in 0..GOLDEN.len(), byte in any::<u8>()) {
        let mut bytes = GOLDEN.to_vec();
        bytes[at] = byte;
        if let Ok((manifest, digest)) = SnapshotManifest::parse(&bytes) {
            prop_assert!(manifest.to_bytes() == bytes && digest == Digest::of(&bytes));
        }
    }
}
