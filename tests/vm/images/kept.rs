//! Which images exist, which of them are warm, and how they are removed.

use serde_json::json;

use super::{digest, end, image, say, text};
use crate::support::{World, warm_states};

#[test]
fn images_are_listed_and_shown() {
    let world = World::new();
    let listed = world.json(["image", "ls"]);
    let [tiny] = listed.as_array().unwrap().as_slice() else {
        panic!("{listed}")
    };
    assert_eq!(tiny, &image(&world, "tiny"));
    assert_eq!(tiny, &image(&world, text(&tiny["digest"])));
    assert_eq!(
        (&tiny["names"], &tiny["init"], &tiny["warm"]),
        (&json!(["tiny"]), &json!("agent"), &json!(1))
    );
    let table = world.ok(["image", "ls"]);
    assert!(
        table.out().starts_with("NAME") && table.out().contains(&text(&tiny["digest"])[..12]),
        "{table:?}"
    );
    let shown = world.ok(["image", "inspect", "tiny"]);
    for word in [
        text(&tiny["digest"]),
        text(&tiny["kernel"]),
        "agent",
        "PATH=",
    ] {
        assert!(shown.out().contains(word), "{word}: {shown:?}");
    }
    world
        .run(["image", "inspect", "no-such-image"])
        .failed_with(&["there is no image no-such-image"]);
    world
        .run(["image", "rm", "no-such-image"])
        .failed_with(&["there is no image no-such-image"]);
    end(&world, &["tiny"]);
}

#[test]
fn an_image_in_use_loses_its_name_but_not_its_content() {
    let world = World::new();
    world.ok(["image", "build", "tiny", "--name", "mine"]);
    let digest = digest(&world, "mine");
    assert_eq!(
        image(&world, "tiny")["names"],
        json!(["mine", "tiny"]),
        "one content, two names"
    );
    world.start("a", &[]);
    let removed = world.json(["image", "rm", "tiny"]);
    assert_eq!(
        (&removed["collected"], &removed["digest"]),
        (&json!(false), &json!(digest))
    );
    let removed = world.ok(["image", "rm", "mine"]);
    assert!(removed.err().contains("1 sandbox"), "{removed:?}");
    let left = image(&world, &digest);
    assert_eq!(
        (&left["names"], &left["sandboxes"]),
        (&json!([]), &json!(1))
    );
    assert_eq!(
        world.json(["image", "rm", &digest])["collected"],
        json!(false),
        "by its digest it stays, too"
    );
    world.ok(["gc"]);
    assert_eq!(say(&world, "a", "echo lives"), "lives");
    world.ok(["stop", "a"]);
    world.ok(["start", "a"]);
    assert_eq!(say(&world, "a", "echo lives"), "lives");
    world.ok(["rm", "-f", "a"]);
    end(&world, &[]);
    world
        .run(["image", "inspect", &digest])
        .failed_with(&["there is no image"]);
    assert_eq!(
        warm_states(world.home()).len(),
        0,
        "with the image went its warm state"
    );
}

#[test]
fn a_warm_image_is_booted_once_per_shape() {
    let world = World::new();
    let removed = world.json(["image", "warm", "--rm", "tiny"]);
    assert_eq!(
        (&removed["removed"], &image(&world, "tiny")["warm"]),
        (&json!(1), &json!(0))
    );
    let shape = ["--memory", "256M", "--network", "none"];
    let warm = world.json([&["image", "warm", "tiny"][..], &shape].concat());
    assert_eq!(
        (&warm["memory_bytes"], &warm["network"]),
        (&json!(256 << 20), &json!("none"))
    );
    let before = warm_states(world.home());
    assert_eq!(
        (before.len(), &image(&world, "tiny")["warm"]),
        (1, &json!(1))
    );
    // Asking again for the same shape makes nothing new, by any verb; another shape does.
    world.ok([&["image", "warm", "tiny"][..], &shape].concat());
    world.ok([&["run"][..], &shape, &["tiny", "--", "true"]].concat());
    assert_eq!(warm_states(world.home()), before);
    world.ok(["image", "warm", "tiny", "--memory", "128M"]);
    assert_eq!(image(&world, "tiny")["warm"], 2);
    let listed = world.json(["image", "warm", "--ls"]);
    let of_images: Vec<_> = listed
        .as_array()
        .unwrap()
        .iter()
        .filter(|state| state["kernel"].is_null())
        .collect();
    assert_eq!(of_images.len(), 2);
    assert!(
        of_images
            .iter()
            .all(|state| state["image"] == digest(&world, "tiny").as_str()),
        "{listed:?}"
    );
    assert!(
        world
            .ok(["image", "warm", "--ls"])
            .out()
            .contains("128 MiB")
    );
    assert_eq!(world.json(["image", "warm", "--rm", "tiny"])["removed"], 2);
    end(&world, &["tiny"]);
}
