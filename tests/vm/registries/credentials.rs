//! Credentials: typed, from Docker's configuration, from a helper; and no password is ever shown.

use std::fs;
use std::path::Path;
use std::process::Stdio;

use super::server::{Kind, PASSWORD, Registry, USER, run};
use super::unchanged;
use crate::support::{Answer, World, finish};

/// Runs the command with all log messages, and with a configuration and a search path of the test.
fn asked(world: &World, config: &Path, arguments: &[&str], input: Option<&str>) -> Answer {
    let path = format!("{}:{}", config.display(), std::env::var("PATH").unwrap());
    let mut command = world.command();
    command
        .env("DOCKER_CONFIG", config)
        .env("PATH", path)
        .env("RUST_LOG", "trace")
        .env("SANDTREE_LOG", "trace");
    command
        .args(arguments)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    if let Some(input) = input {
        let given = config.join("input");
        fs::write(&given, input).unwrap();
        command.stdin(fs::File::open(given).unwrap());
    }
    let answer = finish(command.spawn().unwrap());
    let shown = format!("{}{}", answer.out(), answer.err());
    for secret in [
        PASSWORD,
        "wrong-horse",
        &encoded(PASSWORD),
        &encoded("wrong-horse"),
    ] {
        assert!(!shown.contains(secret), "{secret} is shown: {shown}");
    }
    answer
}

/// User and password as headers and Docker's configuration encode them.
fn encoded(password: &str) -> String {
    run(
        "sh",
        &[
            "-c",
            "printf %s \"$1\" | base64 -w0",
            "sh",
            &format!("{USER}:{password}"),
        ],
    )
}

#[test]
fn credentials_are_typed_or_kept_by_docker_and_never_shown() {
    let world = World::new();
    let registry = Registry::start(Kind::Password);
    let dir = tempfile::tempdir().unwrap();
    let write = |config: &str| fs::write(dir.path().join("config.json"), config).unwrap();
    let reference = format!("{}/team/x:1", registry.host);
    let typed = ["--username", USER, "--password-stdin"];
    let push = |input| {
        asked(
            &world,
            dir.path(),
            &[&["push", "tiny", &reference], &typed[..]].concat(),
            Some(input),
        )
    };
    let pull = || asked(&world, dir.path(), &["pull", &reference], None);
    let refused = |answer: Answer| {
        answer.failed_with(&[
            &registry.host,
            "does not accept these credentials",
            "hint: give a user name",
        ]);
    };

    unchanged(&world, || {
        refused(asked(
            &world,
            dir.path(),
            &["push", "tiny", &reference],
            None,
        ))
    });
    unchanged(&world, || refused(push("wrong-horse\n")));
    let right = push(&format!("{PASSWORD}\n"));
    assert_eq!(right.code, 0, "{right:?}");
    unchanged(&world, || refused(pull()));
    let typed = asked(
        &world,
        dir.path(),
        &[&["pull", &reference], &typed[..]].concat(),
        Some(PASSWORD),
    );
    assert_eq!(typed.code, 0, "{typed:?}");

    let kept = |password: &str| {
        format!(
            r#"{{"auths":{{"{}":{{"auth":"{}"}}}}}}"#,
            registry.host,
            encoded(password)
        )
    };
    write(&kept(PASSWORD));
    assert_eq!(pull().code, 0);
    write(&kept("wrong-horse"));
    unchanged(&world, || refused(pull()));
    // Another process writes the program: a file that this process has open for writing cannot be
    // executed.
    let script = r#"read r; [ "$1" = get ] && echo "{\"ServerURL\":\"$r\",\"Username\":\"tester\",\"Secret\":\"correct-horse\"}""#;
    let helper = dir.path().join("docker-credential-ours");
    let save = r#"printf '#!/bin/sh\n%s\n' "$1" > "$2" && chmod 755 "$2""#;
    run("sh", &["-c", save, "sh", script, helper.to_str().unwrap()]);
    write(r#"{"credsStore":"ours"}"#);
    assert_eq!(pull().code, 0);
    write(&format!(
        r#"{{"credHelpers":{{"{}":"nobodys"}}}}"#,
        registry.host
    ));
    unchanged(&world, || {
        pull().failed_with(&["credential helper", "nobodys"])
    });
    write("{ this is no json");
    unchanged(&world, || pull().failed_with(&["config.json"]));
    world.assert_empty();
}

#[test]
fn a_password_is_no_argument_and_needs_a_user_name() {
    let world = World::new();
    let pull = ["pull", "localhost:1/x:1"];
    let typed = world.run([&pull[..], &["--username", USER, "--password", PASSWORD]].concat());
    assert_eq!(typed.code, 125, "{typed:?}");
    for half in [&["--username", USER][..], &["--password-stdin"]] {
        let answer = world.run_with_input([&pull[..], half].concat(), b"word");
        answer.failed_with(&["--"]);
    }
    let none = world.run_with_input(
        [&pull[..], &["--username", USER, "--password-stdin"]].concat(),
        b"\n",
    );
    none.failed_with(&["password", "it is empty"]);
    world.assert_empty();
}
