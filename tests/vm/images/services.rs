//! Services of images: what each boot starts and waits for.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::{digest, end, files, image};
use crate::support::{World, entries, say, warm_states};

/// It writes a line at each start, and is ready when a file appears in memory, which no disk has.
const SERVICE: &str = r#"
start = "echo $WORD $(whoami) >> log; sleep 1; touch /dev/shm/up; exec sleep 100000"
ready = "test -e /dev/shm/up && test ! -e broken"
env = { WORD = "started" }
user = "root"
workdir = "/srv"
"#;

fn write(dir: &Path, name: &str, content: &str) -> PathBuf {
    let path = dir.join(name);
    fs::write(&path, content).unwrap();
    path
}

#[track_caller]
fn built(world: &World, dir: &Path, name: &str, content: &str) -> Value {
    let recipe = write(dir, &format!("{name}.toml"), content);
    world.json(["image", "build", recipe.to_str().unwrap()])
}

fn starts(world: &World, sandbox: &str) -> usize {
    say(world, sandbox, "cat /srv/log").lines().count()
}

/// Which service it is: its process, and when it became ready.
fn service(world: &World, sandbox: &str) -> String {
    say(
        world,
        sandbox,
        "pgrep -f 'sleep 100000'; stat -c %Y /dev/shm/up",
    )
}

#[test]
fn a_service_runs_in_every_sandbox_and_starts_at_every_boot() {
    let world = World::new();
    let dir = files();
    let made = built(
        &world,
        dir.path(),
        "svc",
        &format!("from = \"tiny\"\n{SERVICE}"),
    );
    let defaults = &image(&world, "svc")["defaults"];
    assert_eq!(defaults["ready"]["timeout_ms"], 300_000);
    assert!(defaults["start"].as_str().unwrap().contains("sleep 100000"));
    assert_ne!(made["digest"], image(&world, "tiny")["digest"]);

    // All sandboxes of one warm image continue with the one service that was started for it.
    world.ok(["run", "-d", "--name", "a", "svc"]);
    world.ok(["run", "-d", "--name", "b", "svc"]);
    assert_eq!(say(&world, "a", "cat /srv/log"), "started root");
    assert_eq!(starts(&world, "b"), 1);
    assert_eq!(service(&world, "a"), service(&world, "b"));

    // A later boot starts it again, and waits.
    world.ok(["stop", "b"]);
    world.ok(["start", "b"]);
    assert_eq!(starts(&world, "b"), 2);
    assert_ne!(service(&world, "a"), service(&world, "b"));
    let cold = ["run", "-d", "--name", "c", "--cold", "--auto-checkpoint"];
    world.ok(cold.iter().chain(&["svc"]));
    assert_eq!(say(&world, "c", "cat /srv/log"), "started root");
    world.ok(["rm", "-f", "a", "b", "c"]);

    // A sandbox whose service fails can still be started and repaired.
    let short = SERVICE.replace("ready = ", "ready = { timeout = 8, command = ");
    let short = short.replace("broken\"", "broken\" }");
    built(
        &world,
        dir.path(),
        "short",
        &format!("from = \"tiny\"\n{short}"),
    );
    world.ok(["run", "-d", "--name", "b", "short"]);
    say(&world, "b", "touch /srv/broken");
    world.ok(["stop", "b"]);
    world.ok(["start", "b"]);
    let degraded = world.inspect("b")["degraded"].to_string();
    assert!(degraded.contains("service_not_ready"), "{degraded}");
    assert_eq!(starts(&world, "b"), 2);
    world.ok(["rm", "-f", "b"]);
    end(&world, &["tiny"]);
}

#[test]
fn a_service_that_fails_makes_no_sandbox_and_no_warm_image() {
    let world = World::new();
    let dir = files();
    let before = warm_states(world.home()).len();
    for (name, content, says) in [
        (
            "fails",
            "start = \"echo no port left; exit 3\"\nready = \"false\"",
            ["exit code 3", "no port left"],
        ),
        (
            "late",
            "start = \"echo begun; sleep 1000\"\nready = { command = \"echo not yet; false\", timeout = 2 }",
            ["did not succeed within 2 s", "not yet\nbegun"],
        ),
    ] {
        built(
            &world,
            dir.path(),
            name,
            &format!("from = \"tiny\"\n{content}"),
        );
        let answer = world.run(["run", name, "--", "true"]);
        assert_eq!(answer.code, 125, "{answer:?}");
        for said in says {
            assert!(answer.err().contains(said), "{name}: {answer:?}");
        }
        world.assert_empty();
    }
    assert_eq!(warm_states(world.home()).len(), before);
    end(&world, &["tiny"]);
}

#[test]
fn an_image_inherits_a_service_whose_recipe_does_not_start_it() {
    let world = World::new();
    let dir = files();
    built(
        &world,
        dir.path(),
        "svc",
        &format!("from = \"tiny\"\n{SERVICE}"),
    );
    // The steps of a recipe run without the service of its base.
    let child = "from = \"svc\"\nrun = [\"test ! -e /srv/log && touch /srv/child\"]";
    built(&world, dir.path(), "child", child);
    assert_eq!(
        image(&world, "child")["defaults"],
        image(&world, "svc")["defaults"]
    );
    world.ok(["run", "-d", "--name", "a", "child"]);
    assert_eq!(
        say(&world, "a", "cat /srv/log; ls /srv"),
        "started root\nchild\nlog"
    );
    world.ok(["rm", "-f", "a"]);
    // Without it, the image is the one that it would have been.
    built(&world, dir.path(), "plain", "from = \"svc\"\nstart = \"\"");
    let plain = &image(&world, "plain")["defaults"];
    assert!(
        plain.get("start").is_none() && plain.get("ready").is_none(),
        "{plain}"
    );
    assert_ne!(digest(&world, "plain"), digest(&world, "svc"));
    assert_eq!(entries(&world.home().join("images")).len(), 4);
    end(&world, &["tiny"]);
}
