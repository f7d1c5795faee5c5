//! Recipes: what they build, what is built only once, and what failed and interrupted builds leave.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use serde_json::Value;

use super::{digest, end, entries, files, image, published, say, say_in, text};
use crate::support::{Answer, DEADLINE, World, finish, kill, processes_of, until, wait};

const RANDOM: &str = "head -c 16 /dev/urandom | od -An -tx1 > /srv/random";

fn write(dir: &Path, name: &str, content: &str) -> PathBuf {
    let path = dir.join(name);
    fs::write(&path, content).unwrap();
    path
}

fn build(world: &World, recipe: &Path, options: &[&str]) -> Answer {
    world.run(
        [
            &["--json", "image", "build", recipe.to_str().unwrap()],
            options,
        ]
        .concat(),
    )
}

#[track_caller]
fn built(world: &World, recipe: &Path, options: &[&str]) -> Value {
    let answer = build(world, recipe, options);
    assert_eq!(answer.code, 0, "{answer:?}");
    serde_json::from_slice(&answer.stdout).unwrap()
}

#[test]
fn an_image_has_the_content_and_the_defaults_of_its_recipe() {
    let world = World::new();
    let dir = files();
    fs::create_dir_all(dir.path().join("app/lib")).unwrap();
    write(dir.path(), "app/lib/words", "from the host\n");
    write(dir.path(), "tool", "#!/bin/sh\necho tool: \"$@\"\n");
    let recipe = write(
        dir.path(),
        "app.toml",
        r#"
        from = "tiny"
        files = [
            { source = "app", target = "/opt/app", owner = "user:user" },
            { source = "tool", target = "/usr/local/bin/tool", mode = "0755" },
        ]
        run = [
            "id -un > /srv/root; pwd >> /srv/root; chmod 777 /srv",
            { command = "id -un > who; pwd >> who; echo $SHARED $OWN >> who", user = "user", workdir = "/srv", env = { OWN = "own" } },
        ]
        env = { SHARED = "shared" }
        user = "user"
        workdir = "/opt/app"
        entrypoint = ["tool", "always"]
        cmd = ["unless", "given others"]
        size = "256M"
        "#,
    );
    let made = built(&world, &recipe, &[]);
    assert_eq!(
        (&made["names"], &made["disk_bytes"]),
        (&serde_json::json!(["app"]), &(256u64 << 20).into())
    );
    // The entry point, with the image's arguments and with others.
    assert_eq!(
        world.ok(["run", "app"]).out(),
        "tool: always unless given others\n"
    );
    assert_eq!(
        world.ok(["run", "app", "--", "one", "two"]).out(),
        "tool: always one two\n"
    );
    assert_eq!(
        world
            .ok(["run", "--entrypoint", "cat", "app", "--", "lib/words"])
            .out(),
        "from the host\n"
    );
    let seen = say_in(
        &world,
        "app",
        "id -un; pwd; echo $SHARED; stat -c '%U %a' lib/words; cat /srv/root /srv/who",
    );
    assert_eq!(
        seen,
        "user\n/opt/app\nshared\nuser 644\nroot\n/\nuser\n/srv\nshared own"
    );
    assert_eq!(
        world
            .run([
                "run",
                "-u",
                "root",
                "-w",
                "/",
                "--entrypoint",
                "",
                "app",
                "--",
                "pwd"
            ])
            .out(),
        "/\n"
    );
    // The entry point also runs in the background; `attach` shows it.
    let started = world.json(["run", "-d", "--name", "b", "app", "--", "detached"]);
    let joined = world.ok(["attach", "b", text(&started["exec"])]);
    assert_eq!(joined.out(), "tool: always detached\n");
    assert_eq!(
        say(&world, "b", "pwd"),
        "/opt/app",
        "exec knows the defaults, and no entry point"
    );
    world.ok(["rm", "-f", "b"]);
    end(&world, &["tiny"]);
}

/// A QEMU that does not exist shows that none is started.
#[test]
fn plain_files_need_no_machine() {
    let world = World::new();
    let dir = files();
    write(dir.path(), "tool", "#!/bin/sh\necho tool\n");
    write(dir.path(), "words", "from the host\n");
    let recipe = write(
        dir.path(),
        "plain.toml",
        r#"
        from = "tiny"
        files = [
            { source = "tool", target = "/usr/local/bin/tool", mode = "0755" },
            { source = "words", target = "/opt/deep/words", owner = "root:root", mode = "0640" },
        ]
        env = { SHARED = "shared" }
        "#,
    );
    let without_qemu = || {
        let mut command = world.command();
        command.args(["--json", "--qemu", "/nonexistent", "image", "build"]);
        let answer = command.arg(&recipe).output().unwrap();
        assert!(answer.status.success(), "{answer:?}");
        serde_json::from_slice::<Value>(&answer.stdout).unwrap()
    };
    let made = without_qemu();
    assert_eq!(without_qemu()["digest"], made["digest"]);
    world.ok(["run", "-d", "--name", "p", "plain"]);
    assert_eq!(say(&world, "p", "tool; echo $SHARED"), "tool\nshared");
    let look = "cd /opt/deep; stat -c '%a %u %g' words; cat words; cd /; ls -d bin etc";
    assert_eq!(say(&world, "p", look), "640 0 0\nfrom the host\nbin\netc");
    // A directory is not replaced by a file, however it is copied.
    let wrong = write(
        dir.path(),
        "wrong.toml",
        "from = \"tiny\"\nfiles = [{ source = \"words\", target = \"/etc\" }]",
    );
    assert_ne!(build(&world, &wrong, &[]).code, 0);
    world.ok(["rm", "-f", "p"]);
}

#[test]
fn a_step_runs_once() {
    let world = World::new();
    let dir = files();
    write(dir.path(), "data", "first\n");
    let text = format!(
        "from = \"tiny\"\nfiles = [{{ source = \"data\", target = \"/opt/data\" }}]\nrun = [\"{RANDOM}\", \"true\"]"
    );
    let recipe = write(dir.path(), "once.toml", &text);
    let read = |name: &str| say_in(&world, name, "cat /srv/random /opt/data");
    let first = built(&world, &recipe, &[]);
    let random = read("once");
    assert_eq!(built(&world, &recipe, &[])["digest"], first["digest"]);
    // Another last step or another default: the earlier steps do not run again.
    let other = write(
        dir.path(),
        "other.toml",
        &text.replace("\"true\"]", "\"echo other > /srv/other\"]\nuser = \"user\""),
    );
    built(&world, &other, &[]);
    assert_eq!(read("other"), random);
    built(&world, &recipe, &["--no-cache", "--name", "anew"]);
    let anew = read("anew");
    assert_ne!(anew, random);
    // A changed file is copied again, and the later steps run again.
    write(dir.path(), "data", "second\n");
    built(&world, &recipe, &[]);
    let second = read("once");
    assert!(
        second.ends_with("second") && second[..32] != random[..32] && second[..32] != anew[..32],
        "{second}"
    );
    end(&world, &["tiny"]);
}

#[test]
fn a_failed_step_is_reported_and_keeps_the_name_and_earlier_steps() {
    let world = World::new();
    let dir = files();
    let text = |last: &str| format!("from = \"tiny\"\nrun = [\"{RANDOM}\", \"{last}\"]");
    let recipe = write(dir.path(), "app.toml", &text("echo good > /srv/state"));
    built(&world, &recipe, &["--name", "other"]);
    let random = say_in(&world, "other", "cat /srv/random");
    let before = published(&world);
    write(
        dir.path(),
        "app.toml",
        &text("echo it went wrong >&2; exit 3"),
    );
    let failed = build(&world, &recipe, &["--name", "other"]);
    failed.failed_with(&[
        "echo it went wrong >&2; exit 3",
        "exit code 3",
        "it went wrong",
    ]);
    assert_eq!(published(&world), before);
    world.assert_empty();
    // The first step runs again neither in the failed build nor in the next one.
    write(dir.path(), "app.toml", &text("echo better > /srv/state"));
    built(&world, &recipe, &["--name", "other"]);
    assert_eq!(
        say_in(&world, "other", "cat /srv/random /srv/state"),
        format!("{random}\nbetter")
    );
    // A step that exceeds its time fails.
    write(
        dir.path(),
        "app.toml",
        "from = \"tiny\"\nrun = [{ command = \"sleep 1000\", timeout = 1 }]",
    );
    build(&world, &recipe, &[]).failed_with(&["sleep 1000"]);
    end(&world, &["tiny"]);
}

#[test]
fn an_interrupted_build_leaves_nothing_and_the_next_one_continues() {
    let world = World::new();
    let dir = files();
    let text = |last: &str| format!("from = \"tiny\"\nrun = [\"{RANDOM}\", \"{last}\"]");
    let recipe = write(dir.path(), "app.toml", &text("echo waiting; sleep 1000"));
    let before = published(&world);
    let mut command = world.command();
    command
        .args(["image", "build"])
        .arg(&recipe)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let noted = |path: &PathBuf| {
        path.file_name()
            .unwrap()
            .to_string_lossy()
            .starts_with("step-")
    };
    until("the first step is kept and noted", || {
        entries(&world.home().join("cache")).iter().any(noted)
    });
    let kept = entries(&world.home().join("snapshots"));
    assert_eq!(kept.len(), 1);
    kill(child.id(), "INT");
    assert_eq!(wait(&mut child, DEADLINE), Some(130), "{:?}", finish(child));
    assert_eq!(
        world.residue(),
        Vec::<PathBuf>::new(),
        "it is gone when the command has ended"
    );
    world.assert_empty();
    assert_eq!(published(&world), before);
    write(dir.path(), "app.toml", &text("true"));
    built(&world, &recipe, &[]);
    assert!(
        entries(&world.home().join("snapshots")).is_superset(&kept),
        "the first step was done before"
    );
    assert_eq!(entries(&world.home().join("snapshots")).len(), 2);
    end(&world, &["tiny"]);
}

#[test]
fn an_invalid_recipe_is_refused_before_any_step() {
    let dir = files();
    // An empty store, in which any started step would be visible.
    let world = World::empty_at(dir.path().join("home"));
    for (recipe, words) in [
        ("from = \"tiny\"\nrnu = []", vec!["unknown field", "rnu"]),
        ("run = []", vec!["from"]),
        (
            "from = \"tiny\"\nfiles = [{ source = \"gone\", target = \"/x\" }]",
            vec!["gone"],
        ),
        ("from = \"tiny\"\nsize = \"1\"", vec!["size"]),
        ("from = \"tiny\"\npackages = [\"-o x\"]", vec!["package"]),
        ("from = \"no-such-image\"", vec!["no-such-image"]),
        ("from = \"./gone.tar\"", vec!["gone.tar"]),
    ] {
        let path = write(dir.path(), "r.toml", recipe);
        build(&world, &path, &[]).failed_with(&words);
        assert!(
            !world.home().exists() || published(&world).is_empty(),
            "{recipe}"
        );
        assert_eq!(processes_of(world.home()), Vec::<u32>::new());
    }
}

#[test]
fn a_name_moves_and_content_in_use_stays() {
    let world = World::new();
    let dir = files();
    let recipe = write(
        dir.path(),
        "app.toml",
        "from = \"tiny\"\nrun = [\"echo old > /srv/state\"]",
    );
    built(&world, &recipe, &[]);
    let old = digest(&world, "app");
    world.ok(["run", "-d", "--name", "a", "app"]);
    say(&world, "a", "echo mine > /srv/mine; sync");
    world.ok(["stop", "a"]);
    write(
        dir.path(),
        "app.toml",
        "from = \"tiny\"\nrun = [\"echo new > /srv/state\"]",
    );
    built(&world, &recipe, &[]);
    assert_ne!(digest(&world, "app"), old);
    assert_eq!(say_in(&world, "app", "cat /srv/state"), "new");
    // A sandbox of the old content continues with it, also after a collection.
    world.ok(["gc"]);
    assert_eq!(image(&world, &old)["names"], serde_json::json!([]));
    world.ok(["start", "a"]);
    assert_eq!(say(&world, "a", "cat /srv/state /srv/mine"), "old\nmine");
    world.ok(["rm", "-f", "a"]);
    world.ok(["gc"]);
    world
        .run(["image", "inspect", &old])
        .failed_with(&["there is no image"]);
    end(&world, &["tiny"]);
}

#[test]
fn a_recipe_starts_from_a_snapshot_or_from_another_recipes_image() {
    let world = World::new();
    let dir = files();
    world.start("a", &[]);
    say(&world, "a", "echo saved > /srv/state; sync");
    world.ok(["save", "a", "mine"]);
    world.ok(["rm", "-f", "a"]);
    let recipe = write(
        dir.path(),
        "one.toml",
        "from = \"mine\"\nrun = [\"echo one >> /srv/state\"]",
    );
    built(&world, &recipe, &[]);
    let recipe = write(
        dir.path(),
        "two.toml",
        "from = \"one\"\nname = \"second\"\nenv = { TWO = \"2\" }",
    );
    assert_eq!(
        built(&world, &recipe, &[])["names"],
        serde_json::json!(["second"])
    );
    world.ok(["snapshot", "rm", "mine"]);
    assert_eq!(
        say_in(&world, "second", "cat /srv/state; echo $TWO"),
        "saved\none\n2"
    );
    end(&world, &["tiny"]);
}
