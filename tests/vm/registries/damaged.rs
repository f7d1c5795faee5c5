//! Our artifacts with false claims.

use serde_json::{Value, json};

use super::server::{Kind, Registry};
use super::shelf::digest;
use super::{document, elsewhere, put_document, refused, text};
use crate::support::World;

const MEMBER_DIGEST: &str = "dev.sandtree.member.digest";
const MEMBER_BYTES: &str = "dev.sandtree.member.bytes";

/// Pushes a changed manifest next to the right one, and asserts that it is refused with these
/// words.
#[track_caller]
fn refuses(world: &World, registry: &Registry, edit: impl FnOnce(&mut Value), words: &[&str]) {
    let (media_type, mut manifest) = document(registry, "x:right");
    edit(&mut manifest);
    put_document(registry, "x:wrong", &media_type, &manifest);
    let reference = format!("{}/x:wrong", registry.host);
    let named = format!("cannot pull {reference}");
    refused(
        world,
        &["pull", &reference, "--name", "got"],
        &[words, &[&named]].concat(),
    );
}

fn layer_of<'a>(manifest: &'a mut Value, role: &str) -> &'a mut Value {
    let layers = manifest["layers"].as_array_mut().unwrap().iter_mut();
    let mut found = layers.filter(|layer| layer["annotations"]["dev.sandtree.member.role"] == role);
    found
        .next()
        .unwrap_or_else(|| panic!("no layer is a {role}"))
}

fn annotation<'a>(manifest: &'a mut Value, role: &str, key: &str) -> &'a mut Value {
    &mut layer_of(manifest, role)["annotations"][key]
}

/// Changes the length that the manifest gives for a member.
fn lengthened(by: i64) -> impl FnOnce(&mut Value) {
    move |manifest| {
        let said = annotation(manifest, "rootfs", MEMBER_BYTES);
        *said = (text(said).parse::<i64>().unwrap() + by).to_string().into();
    }
}

#[test]
fn an_artifact_with_false_claims_is_refused_and_leaves_nothing() {
    let world = World::new();
    let registry = Registry::start(Kind::Open);
    world.ok(["push", "tiny", &format!("{}/x:right", registry.host)]);
    let (_dir, other) = elsewhere();
    other.ok(["image", "ls"]);
    let (_, manifest) = document(&registry, "x:right");
    let first = role(&manifest["layers"][0]);
    let rootfs =
        text(&layer_of(&mut manifest.clone(), "rootfs")["annotations"][MEMBER_DIGEST]).to_owned();
    let refuses =
        |edit: &dyn Fn(&mut Value), words: &[&str]| refuses(&other, &registry, edit, words);
    for missing in [first, "rootfs"] {
        let member = text(&layer_of(&mut manifest.clone(), missing)["annotations"][MEMBER_DIGEST])
            .to_owned();
        let without = |manifest: &mut Value| {
            manifest["layers"]
                .as_array_mut()
                .unwrap()
                .retain(|layer| role(layer) != missing);
        };
        refuses(&without, &[&member]);
    }
    refuses(
        &|manifest| lengthened(1 << 60)(manifest),
        &["bytes instead of"],
    );
    refuses(
        &|manifest| lengthened(-1)(manifest),
        &["unpacks to more than its annotated size"],
    );
    let another = digest(b"another");
    let another = another.strip_prefix("sha256:").unwrap();
    refuses(
        &|manifest| *annotation(manifest, "rootfs", MEMBER_DIGEST) = another.into(),
        &[&rootfs],
    );
    refuses(
        &|manifest| *annotation(manifest, "rootfs", MEMBER_DIGEST) = "../../x".into(),
        &["which member it is"],
    );
    refuses(
        &|manifest| *annotation(manifest, "rootfs", MEMBER_BYTES) = "-1".into(),
        &["which member it is"],
    );
    refuses(
        &|manifest| layer_of(manifest, "rootfs")["annotations"] = json!({}),
        &["which member it is"],
    );
    refuses(
        &|manifest| manifest["annotations"]["dev.sandtree.digest"] = another.into(),
        &[another],
    );
    refuses(
        &|manifest| manifest["annotations"] = json!({}),
        &["does not say what it is"],
    );
    let as_snapshot = "application/vnd.sandtree.snapshot.v1";
    refuses(
        &|manifest| manifest["artifactType"] = as_snapshot.into(),
        &["is not a usable snapshot"],
    );
    // Another member in place of the right one.
    let swapped = |manifest: &mut Value| {
        let other = layer_of(manifest, first).clone();
        let layer = layer_of(manifest, "rootfs");
        (layer["digest"], layer["size"]) = (other["digest"].clone(), other["size"].clone());
    };
    refuses(
        &swapped,
        &[&rootfs, "neither among its files nor in the store"],
    );
    // After all refusals, the right one is accepted.
    other.ok(["pull", &format!("{}/x:right", registry.host)]);
    other.assert_empty();
    world.assert_empty();
}

fn role(layer: &Value) -> &str {
    text(&layer["annotations"]["dev.sandtree.member.role"])
}
