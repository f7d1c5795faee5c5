//! Debian as its users expect it.

use std::fs;

use serde_json::json;

use super::{digest, end, host, image, say};
use crate::support::{World, warm_states, with_inits};

/// The name of the server from which the host's apt downloads Debian.
fn mirror() -> String {
    let sites = host(
        "apt-get",
        [
            "indextargets",
            "--format",
            "$(SITE)",
            "Created-By: Packages",
            "Origin: Debian",
        ],
    );
    let sites = String::from_utf8(sites).unwrap();
    let site = sites.lines().next().expect("apt has sources");
    let (_, rest) = site
        .split_once("://")
        .unwrap_or_else(|| panic!("{site} names no machine"));
    rest.split(['/', ':']).next().unwrap().to_owned()
}

/// The tools work for root and for `user`, without a network and without apt on the host.
#[test]
fn debian_has_the_usual_tools_and_starts_offline() {
    let world = World::debian();
    let before = warm_states(world.home());
    let mut command = world.command();
    // The search path has no tool that could build an image, but it has QEMU.
    let tools = tempfile::tempdir().unwrap();
    let qemu = host("sh", ["-c", "command -v qemu-system-x86_64"]);
    let qemu = String::from_utf8(qemu).unwrap();
    std::os::unix::fs::symlink(qemu.trim(), tools.path().join("qemu-system-x86_64")).unwrap();
    command
        .env("PATH", tools.path())
        .args(["run", "-d", "--name", "d", "debian"]);
    assert!(command.status().unwrap().success());
    assert_eq!(
        warm_states(world.home()),
        before,
        "it began from the state that was there"
    );
    let versions = say(
        &world,
        "d",
        "set -e; python3 --version; git --version; curl --version | head -n 1; apt-get --version",
    );
    for tool in ["Python 3.", "git version", "curl ", "apt "] {
        assert!(versions.contains(tool), "{versions}");
    }
    let python = "import json, sqlite3, ssl, venv, pip; print(json.dumps([1]))";
    assert_eq!(say(&world, "d", &format!("python3 -c '{python}'")), "[1]");
    assert_eq!(
        say(&world, "d", "echo $LANG; locale charmap; echo $HOME"),
        "C.UTF-8\nUTF-8\n/root"
    );
    assert_eq!(
        say(&world, "d", "echo $PATH"),
        "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    );
    assert_eq!(
        say(&world, "d", "date +%Z; TZ=Asia/Tokyo date +%Z"),
        "UTC\nJST"
    );
    let user = world.ok([
        "exec",
        "-u",
        "user",
        "d",
        "--",
        "sh",
        "-c",
        "id -un; pwd; sudo -n id -un; sudo -n cat /etc/shadow | head -c 4",
    ]);
    assert_eq!(user.out(), "user\n/home/user\nroot\nroot");
    let repository = "cd ~ && git init -q r && cd r && git -c user.name=u -c user.email=u@h commit -q --allow-empty -m one && git log --format=%s";
    assert_eq!(
        world
            .ok(["exec", "-u", "user", "d", "--", "sh", "-c", repository])
            .out(),
        "one\n"
    );
    assert_eq!(
        say(
            &world,
            "d",
            "hostname; getent hosts localhost | wc -l; test -w /etc/resolv.conf; echo $?"
        ),
        "d\n1\n0"
    );
    world.ok(["rm", "-f", "d"]);
    end(&world, &["debian", "with-inits"]);
}

#[test]
fn debian_installs_packages_and_trusts_what_the_host_trusts() {
    let world = World::debian();
    world.ok([
        "run",
        "-d",
        "--name",
        "d",
        "--cold",
        "--network",
        "full",
        "--ca-bundle",
        "debian",
    ]);
    let mirror = mirror();
    assert!(say(&world, "d", &format!("getent hosts {mirror}")).contains(&mirror));
    // The bundle is the host's. Programs with a bundle of their own get a variable that names it.
    let given = world.ok([
        "exec",
        "d",
        "--",
        "cat",
        "/etc/ssl/certs/ca-certificates.crt",
    ]);
    assert!(given.stdout == fs::read("/etc/ssl/certs/ca-certificates.crt").unwrap());
    let variables = "echo $SSL_CERT_FILE $CURL_CA_BUNDLE $REQUESTS_CA_BUNDLE $PIP_CERT $NODE_EXTRA_CA_CERTS $GIT_SSL_CAINFO";
    let variables = say(&world, "d", variables);
    assert_eq!(
        variables,
        ["/etc/ssl/certs/ca-certificates.crt"; 6].join(" ")
    );
    let python = "import ssl; print(len(ssl.create_default_context().get_ca_certs()) > 0)";
    assert_eq!(say(&world, "d", &format!("python3 -c '{python}'")), "True");
    // One source without translations is enough. Each command has its own deadline, because the
    // guest may be emulated.
    say(&world, "d", "head -n 1 /etc/apt/sources.list > /tmp/one");
    let as_user = |line: &str| world.ok(["exec", "-u", "user", "d", "--", "sh", "-c", line]);
    as_user("sudo apt-get -qq -o Dir::Etc::sourcelist=/tmp/one -o Acquire::Languages=none update");
    as_user("sudo DEBIAN_FRONTEND=noninteractive apt-get -qq install -y hello > /dev/null");
    assert_eq!(as_user("hello").out(), "Hello, world!\n");
    world.ok(["rm", "-f", "d"]);
    end(&world, &["debian", "with-inits"]);
}

/// An image with packages is reused, without apt and without mmdebstrap.
#[test]
fn a_recipe_with_packages_is_built_once() {
    let world = World::debian();
    let before = digest(&world, "with-inits");
    let mut command = world.command();
    let built = command
        .env("PATH", "/nonexistent")
        .args(["image", "build"])
        .arg(with_inits())
        .output()
        .unwrap();
    assert!(
        built.status.success(),
        "{}",
        String::from_utf8_lossy(&built.stderr)
    );
    assert_eq!(digest(&world, "with-inits"), before);
    assert_ne!(digest(&world, "debian"), before);
    assert_eq!(image(&world, "with-inits")["init"], "image");
    // The image that it was built from has no name and is listed by its digest.
    let listed = world.json(["image", "ls"]);
    let unnamed = listed
        .as_array()
        .unwrap()
        .iter()
        .find(|image| image["names"] == json!([]))
        .expect("it is kept");
    let unnamed = unnamed["digest"].as_str().unwrap();
    assert_eq!(
        world.json(["image", "rm", unnamed])["collected"],
        json!(true)
    );
    world
        .run(["image", "inspect", unnamed])
        .failed_with(&["there is no image"]);
    end(&world, &["debian", "with-inits"]);
}
