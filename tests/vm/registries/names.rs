//! Names after a pull, and which names a pull may replace.

use super::made::{Made, Packing};
use super::server::{Kind, Registry};
use super::{content, end, refused, text};
use crate::support::World;

#[test]
fn a_reference_is_no_name_until_it_is_pulled() {
    let world = World::new();
    let reference = "localhost:5000/team/app:1.2";
    for arguments in [&["run", reference][..], &["run", "-d", reference]] {
        refused(
            &world,
            arguments,
            &[reference, &format!("hint: `sandtree pull {reference}`")],
        );
    }
    for (wrong, words) in [
        ("app:1", "begin with the registry's host"),
        ("localhost:5000/App:1", "not the name of an image"),
        ("localhost:5000/app:", "not the name of an image"),
        ("localhost:5000/app@sha256:12", "sha256"),
    ] {
        refused(&world, &["pull", wrong], &[wrong, words]);
        refused(&world, &["push", "tiny", wrong], &[wrong, words]);
    }
    refused(
        &world,
        &["push", "missing", "localhost:5000/app:1"],
        &["missing"],
    );
    refused(
        &world,
        &["push", "tiny", "localhost:5000/app:1@sha256:12"],
        &["sha256"],
    );
    world.assert_empty();
}

#[test]
fn names_move_as_their_kinds_allow() {
    let world = World::new();
    let registry = Registry::start(Kind::Open);
    let at = |rest: &str| format!("{}/{rest}", registry.host);
    Made::new(&world, "blue").send(&registry, "team/app:latest", Packing::Gzip);
    Made::new(&world, "red").send(&registry, "team/app:V2", Packing::Gzip);
    world.start("a", &[]);
    world.ok(["stop", "a"]);
    let saved = world.json(["save", "a", "saved"]);
    world.ok(["push", "saved", &at("saved:1")]);
    world.ok(["rm", "a"]);

    // Names of images move without an option.
    let pull = |arguments: &[&str]| world.json([&["pull"], arguments].concat());
    let blue = pull(&[&at("team/app")]);
    assert_eq!(
        (
            text(&blue["name"]),
            text(&pull(&[&at("team/app:V2")])["name"])
        ),
        ("app", "app-v2")
    );
    let red = pull(&[&at("team/app:V2"), "--name", "app"]);
    assert_ne!(red["digest"], blue["digest"]);
    assert_eq!(text(&world.json(["image", "ls"])[0]["digest"]).len(), 64);

    // Names of snapshots move only with an option.
    assert_eq!(pull(&[&at("saved:1")])["name"], "saved-1");
    refused(
        &world,
        &["pull", &at("saved:1")],
        &["the name saved-1 is taken", "--force"],
    );
    assert_eq!(
        pull(&[&at("saved:1"), "--force"])["digest"],
        saved["digest"]
    );

    // A name never moves between kinds, and nothing is fetched for it.
    world.ok(["image", "rm", "app-v2"]);
    let fresh = at("team/app:V2");
    for force in [&[][..], &["--force"]] {
        refused(
            &world,
            &[&["pull", &at("saved:1"), "--name", "app"], force].concat(),
            &["the name app is taken"],
        );
        refused(
            &world,
            &[&["pull", &fresh, "--name", "saved"], force].concat(),
            &["the name saved is taken"],
        );
    }
    world.ok(["snapshot", "rm", "saved", "saved-1"]);
    world.ok(["gc"]);
    refused(
        &world,
        &["pull", &at("saved:1"), "--name", "tiny"],
        &["tiny"],
    );
    let before = content(&world);
    refused(
        &world,
        &["pull", &at("saved:1"), "--name", "No Name"],
        &["No Name"],
    );
    assert_eq!(content(&world), before);
    end(&world, &[]);
}
