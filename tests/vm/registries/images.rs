//! Images that other tools made, and how they run here.

use super::made::{Made, Packing, REPORT, layer_types};
use super::server::{Kind, Registry};
use super::{content, elsewhere, end, text};
use crate::support::World;

#[test]
fn an_image_runs_with_its_own_defaults_in_any_packing() {
    let world = World::new();
    let registry = Registry::start(Kind::Open);
    let made = Made::new(&world, "blue");
    made.send(&registry, "team/app:gzip", Packing::Gzip);
    made.send(&registry, "team/app:docker", Packing::Docker);
    made.send_index(&registry, "team/app", "several");
    // skopeo does not send an image again in another packing to the same registry.
    let second = Registry::start(Kind::Open);
    made.send(&second, "team/app:zstd", Packing::Zstd);
    assert!(layer_types(&second, "team/app:zstd").contains("tar+zstd"));
    assert!(layer_types(&registry, "team/app:docker").contains("vnd.docker."));

    let pull = |tag: &str| {
        let registry = if tag == "zstd" { &second } else { &registry };
        world.json(["pull", &format!("{}/team/app:{tag}", registry.host)])
    };
    let pulled = ["gzip", "zstd", "docker", "several"].map(pull);
    for (pulled, tag) in pulled.iter().zip(["gzip", "zstd", "docker", "several"]) {
        assert_eq!(
            (&pulled["kind"], text(&pulled["name"])),
            (&"image".into(), format!("app-{tag}").as_str())
        );
    }
    let digests = pulled.each_ref().map(|pulled| text(&pulled["digest"]));
    assert_eq!(digests, [digests[0]; 4], "one image, packed in four ways");
    assert!(
        pulled[0]["fetched_bytes"].as_u64().unwrap() > 500_000,
        "{}",
        pulled[0]
    );

    assert_eq!(world.ok(["run", "app-gzip"]).out(), REPORT);
    let other = REPORT.replace("one\narg two words", "three");
    assert_eq!(world.ok(["run", "app-several", "--", "three"]).out(), other);

    let before = content(&world);
    assert_eq!(pull("gzip")["fetched_bytes"], 0);
    assert_eq!(content(&world), before);
    end(&world, &[]);
}

#[test]
fn a_moved_tag_moves_the_name_but_not_running_sandboxes() {
    let world = World::new();
    let registry = Registry::start(Kind::Open);
    let reference = format!("{}/app:1", registry.host);
    let color = |image: &str| {
        world
            .ok(["run", "--entrypoint", "", image, "--", "cat", "/etc/color"])
            .out()
            .to_owned()
    };
    Made::new(&world, "blue").send(&registry, "app:1", Packing::Gzip);
    let blue = world.json(["pull", &reference]);
    world.ok(["run", "-d", "--name", "old", "--entrypoint", "", "app-1"]);
    Made::new(&world, "red").send(&registry, "app:1", Packing::Gzip);
    let red = world.json(["pull", &reference]);
    assert_ne!(blue["digest"], red["digest"]);
    assert_ne!(red["fetched_bytes"], 0);
    assert_eq!(color("app-1"), "red");
    world.ok(["gc"]);
    assert_eq!(
        world.ok(["exec", "old", "--", "cat", "/etc/color"]).out(),
        "blue"
    );
    // A digest always names the same content.
    let by_digest = format!("{}/app@{}", registry.host, text(&blue["manifest"]));
    let again = world.json(["pull", &by_digest, "--name", "blue"]);
    assert_eq!(
        (&again["digest"], &again["fetched_bytes"]),
        (&blue["digest"], &0.into())
    );
    end(&world, &["old"]);
}

#[test]
fn an_image_that_was_pushed_is_the_same_in_another_store() {
    let world = World::new();
    let registry = Registry::start(Kind::Open);
    Made::new(&world, "blue").send(&registry, "app:1", Packing::Gzip);
    let ours = world.json(["pull", &format!("{}/app:1", registry.host)]);
    let to = format!("{}/ours/app:2", registry.host);
    let pushed = world.json(["push", "app-1", &to]);
    assert_eq!(pushed["digest"], ours["digest"]);
    assert_eq!(
        world.json(["push", text(&ours["digest"]), &to])["sent_bytes"],
        0
    );

    let (_dir, other) = elsewhere();
    let home = other.home().to_str().unwrap();
    let pulled = world.json(["--home", home, "pull", &to]);
    assert_eq!(
        (&pulled["digest"], text(&pulled["name"])),
        (&ours["digest"], "app-2")
    );
    assert_eq!(pulled["manifest"], pushed["manifest"]);
    assert_eq!(other.json(["pull", &to])["fetched_bytes"], 0);
    assert_eq!(other.ok(["run", "app-2"]).out(), REPORT);
    assert_eq!(
        other.json(["push", "app-2", &to])["manifest"],
        pushed["manifest"]
    );
    end(&other, &[]);
    end(&world, &[]);
}
