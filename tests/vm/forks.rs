//! Forks through the command line: all or none, with shared layers, and each with its own identity.

use crate::support::{dir_of, entries, held};

use std::collections::{BTreeSet, HashSet};
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::MetadataExt;
use std::process::Stdio;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use serde_json::Value;

use crate::support::mount::Mount;
use crate::support::{DEADLINE, World, finish, kill, processes_of, until};

fn keys(value: &Value) -> BTreeSet<&str> {
    value
        .as_object()
        .unwrap()
        .keys()
        .map(String::as_str)
        .collect()
}

fn names(world: &World) -> Vec<String> {
    let listed = world.json(["ps", "-a"]);
    let mut names: Vec<_> = listed
        .as_array()
        .unwrap()
        .iter()
        .map(|s| s["name"].as_str().unwrap().to_owned())
        .collect();
    names.sort();
    names
}

fn page(port: u16) -> String {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    stream.write_all(b"GET /word HTTP/1.0\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

/// The memory layers of a sandbox, by inode.
fn memory(world: &World, sandbox: &str) -> BTreeSet<u64> {
    entries(&dir_of(world, sandbox).join("memory"))
        .iter()
        .map(|path| fs::metadata(path).unwrap().ino())
        .collect()
}

#[test]
fn forks_are_running_copies_that_share_everything_and_depend_on_nothing() {
    let world = World::new();
    let made = world.start("a", &["--publish", "0:80"]);
    held::begin(&world, "a", "one");
    assert_eq!(world.sh("a", "httpd -p 80 -h /srv").code, 0);
    world.ok(["checkpoint", "a", "base"]);
    let qemu = world.inspect("a")["qemu_pid"].clone();
    let forked = world.json(["fork", "a", "-n", "3", "--name", "p"]);
    assert_eq!(
        keys(&forked),
        BTreeSet::from(["forks", "pause_ms", "total_ms", "degraded"]),
        "{forked}"
    );
    assert!(forked["pause_ms"].as_f64().unwrap() > 0.0, "{forked}");
    assert!(
        forked["pause_ms"].as_f64() < forked["total_ms"].as_f64(),
        "{forked}"
    );
    let forks = forked["forks"].as_array().unwrap();
    let fork_names: Vec<&str> = forks
        .iter()
        .map(|fork| fork["name"].as_str().unwrap())
        .collect();
    assert_eq!(fork_names, ["p-1", "p-2", "p-3"]);
    let ids: HashSet<&str> = forks
        .iter()
        .map(|fork| fork["id"].as_str().unwrap())
        .collect();
    assert!(ids.len() == 3 && !ids.contains(made["id"].as_str().unwrap()));

    // Each copy has its own host port.
    let port = |fork: &Value| u16::try_from(fork["ports"][0]["host"].as_u64().unwrap()).unwrap();
    let ports: HashSet<u16> = forks.iter().chain([&made]).map(port).collect();
    assert_eq!(ports.len(), 4, "{forked}");
    for fork in forks {
        let name = fork["name"].as_str().unwrap();
        assert_eq!(world.inspect(name)["ports"], fork["ports"]);
        held::assert_holds(&world, name, "one", 0);
        held::write(&world, name, name);
        assert!(page(port(fork)).ends_with(&format!("{name}\n")));
    }
    assert!(
        page(port(&made)).ends_with("one\n"),
        "the source has nothing of what forks wrote"
    );
    held::assert_holds(&world, "a", "one", 0);
    assert_eq!(world.inspect("a")["qemu_pid"], qemu, "the source went on");
    assert_eq!(world.json(["log", "a"]).as_array().unwrap().len(), 1);
    assert_eq!(
        entries(&dir_of(&world, "a").join("states")).len(),
        1,
        "what forks came from is gone"
    );
    assert_eq!(
        world.json(["log", "p-1"]),
        Value::Array(Vec::new()),
        "a fork begins without states"
    );
    let shared = memory(&world, "p-1");
    assert!(
        !shared.is_empty()
            && shared == memory(&world, "p-2")
            && shared.is_subset(&memory(&world, "a"))
    );

    // A fork of a fork; then the sandboxes are removed one by one.
    world.ok(["checkpoint", "p-1", "mine"]);
    let again = world.ok(["fork", "p-1"]);
    assert!(again.out().starts_with("p-1-1  "), "{again:?}");
    assert!(
        world.ok(["fork", "p-1"]).out().starts_with("p-1-2  "),
        "the next number that is free"
    );
    world.ok(["rm", "-f", "a", "p-2"]);
    held::assert_holds(&world, "p-1-1", "p-1", 0);
    held::write(&world, "p-1", "changed");
    world.ok(["revert", "p-1", "mine"]);
    held::assert_holds(&world, "p-1", "p-1", 0);
    world.ok(["rm", "-f", "p-1"]);
    for name in ["p-1-1", "p-1-2", "p-3"] {
        let word = if name == "p-3" { "p-3" } else { "p-1" };
        // From disk and memory, read again.
        assert_eq!(
            world
                .sh(
                    name,
                    "echo 3 > /proc/sys/vm/drop_caches; sha256sum /bin/busybox"
                )
                .code,
            0
        );
        world.ok(["checkpoint", name]);
        world.ok(["pause", name]);
        world.ok(["resume", name]);
        let holds = world.sh(name, "cat /srv/word /run/word");
        assert_eq!(holds.out(), format!("{word}\n{word}\n"));
    }
    world.ok(["rm", "-f", "p-1-1", "p-1-2", "p-3"]);
    world.assert_empty();
}

/// Asserts that only the source exists and that it continues undisturbed.
fn assert_only_source(world: &World, others: usize) {
    let machines = || processes_of(world.home()).len();
    until("no process of a fork is left", || {
        machines() == 2 * (1 + others)
    });
    until("what forks came from is gone", || {
        entries(&dir_of(world, "a").join("states")).is_empty()
    });
    // The next program that opens the store removes the unfinished work of a killed one.
    assert_eq!(names(world).len(), 1 + others);
    assert!(entries(&world.home().join("staging")).is_empty());
    assert_eq!(entries(&world.home().join("sandboxes")).len(), 1 + others);
    assert_eq!(
        entries(&world.home().join("names/sandboxes")).len(),
        1 + others
    );
}

#[test]
fn a_fork_creates_all_copies_or_none() {
    let Some(disk) = Mount::tmpfs(700) else {
        return;
    };
    let world = World::at(disk.path().join("home"));
    world.start("a", &[]);
    held::begin(&world, "a", "one");
    world.start("p-3", &[]);
    world
        .run(["fork", "a", "-n", "4", "--name", "p"])
        .failed_with(&["the name p-3 is taken", "rm"]);
    assert_only_source(&world, 1);
    held::assert_holds(&world, "a", "one", 0);
    for (args, word) in [
        (["fork", "a", "-n", "0"], "1 to 1000"),
        (["fork", "a", "-n", "1001"], "1 to 1000"),
        (["fork", "a", "--concurrency", "0"], "at least 1"),
        (["fork", "a", "--name", "../x"], "a-z"),
    ] {
        world.run(args).failed_with(&[word]);
    }
    // Less room than a sandbox needs to start.
    disk.fill(40 << 10);
    world
        .run(["fork", "a", "-n", "3", "--name", "q"])
        .failed_with(&["MiB free", "free some space"]);
    assert_only_source(&world, 1);
    disk.empty_again();
    held::assert_holds(&world, "a", "one", 1);
    world.ok(["fork", "a", "-n", "2", "--name", "q"]);
    assert_eq!(names(&world), ["a", "p-3", "q-1", "q-2"]);
    world.ok(["rm", "-f", "a", "p-3", "q-1", "q-2"]);
    world.assert_empty();
}

/// Kills or interrupts a fork as soon as a given number of its copies is visible.
#[test]
fn an_interrupted_fork_leaves_nothing() {
    let world = World::new();
    world.start("a", &[]);
    held::begin(&world, "a", "one");
    for (asked, (signal, seen)) in (0..).zip([("KILL", 1), ("KILL", 3), ("INT", 2), ("KILL", 4)]) {
        let mut command = world.command();
        command
            .args(["fork", "a", "-n", "4", "--name", "p"])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let forking = command.spawn().unwrap();
        until("copies appear", || {
            entries(&world.home().join("names/sandboxes")).len() > seen
        });
        kill(forking.id(), signal);
        let code = finish(forking).code;
        assert!([137, 130].contains(&code), "it had ended with {code}");
        assert_only_source(&world, 0);
        held::assert_holds(&world, "a", "one", asked);
    }
    world.ok(["rm", "-f", "a"]);
    world.assert_empty();
}

/// Two processes that draw random numbers from a seed of their own. A hook gives one of them a new
/// seed.
const DRAWING: &str = r#"
mkdir -p /etc/sandtree/resume.d
cat > /etc/sandtree/resume.d/10-seed <<'END'
#!/bin/sh
echo $(od -An -N3 -tu4 /dev/urandom) > /run/seeded.ask
END
chmod +x /etc/sandtree/resume.d/10-seed
for name in seeded unseeded; do
    mkfifo /run/$name.ask /run/$name.answer
    (x=4711; exec 3<>/run/$name.ask; while read -r word <&3; do
        if [ "$word" = next ]; then x=$(((x * 1103515245 + 12345) % 2147483648)); echo $x > /run/$name.answer; else x=$word; fi
    done) > /dev/null 2>&1 < /dev/null &
done
"#;

/// Everything that must be unique to a guest. The first bytes of a TLS connection hold the client
/// random.
const OWN: &str = r#"
printf '#!/bin/sh\nexec 3<&0\nexec ssl_client -s 3 < /dev/null > /dev/null 2>&1\n' > /run/tls; chmod +x /run/tls
nc -l -p 4433 > /run/hello & server=$!
until netstat -ltn | grep -q :4433; do usleep 10000; done
nc 127.0.0.1 4433 -e /run/tls & client=$!
until [ $(stat -c %s /run/hello) -ge 43 ]; do usleep 10000; done
kill $server $client
echo next > /run/seeded.ask; seeded=$(cat /run/seeded.answer)
echo next > /run/unseeded.ask; unseeded=$(cat /run/unseeded.answer)
echo urandom $(head -c 16 /dev/urandom | od -An -tx1 | tr -d ' ')
echo uuid $(cat /proc/sys/kernel/random/uuid)
echo tls $(tail -c +12 /run/hello | head -c 32 | od -An -v -tx1 | tr -d ' \n')
echo seeded $seeded
echo hostname $(hostname)
echo machine-id $(cat /etc/machine-id)
echo unseeded $unseeded
echo clock $(date +%s)
"#;

fn own(world: &World, sandbox: &str) -> Vec<(String, String)> {
    let before = now();
    let answer = world.run(["exec", "--timeout", "60s", sandbox, "--", "sh", "-c", OWN]);
    let after = now();
    assert_eq!(answer.code, 0, "{sandbox}: {answer:?}");
    let pairs: Vec<_> = answer
        .out()
        .lines()
        .filter_map(|line| line.split_once(' '))
        .collect();
    assert_eq!(pairs.len(), 8, "{answer:?}");
    let clock: u64 = pairs[7].1.parse().unwrap();
    assert!(
        (before - 1..=after + 1).contains(&clock),
        "{sandbox}: {clock} is not between {before} and {after}"
    );
    pairs
        .into_iter()
        .map(|(kind, value)| (kind.to_owned(), value.to_owned()))
        .collect()
}

fn now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap()
        .as_secs()
}

#[test]
fn twenty_forks_of_one_moment_are_unique() {
    let world = World::new();
    world.start("a", &[]);
    assert_eq!(world.sh("a", DRAWING).code, 0);
    world.ok(["fork", "a", "-n", "20", "--name", "p"]);
    let names: Vec<String> = (1..=20).map(|number| format!("p-{number}")).collect();
    let all: Vec<_> = names
        .iter()
        .map(String::as_str)
        .chain(["a"])
        .map(|name| own(&world, name))
        .collect();
    for (index, (kind, _)) in all[0].iter().enumerate().take(6) {
        let values: HashSet<&str> = all.iter().map(|own| own[index].1.as_str()).collect();
        assert_eq!(values.len(), 21, "{kind}: {values:?}");
        assert!(values.iter().all(|value| !value.is_empty()), "{kind}");
    }
    let tls: HashSet<usize> = all.iter().map(|own| own[2].1.len()).collect();
    assert_eq!(tls, HashSet::from([64]), "a client's random has 32 bytes");
    // A value that no hook changes is equal in all copies. This shows that they are copies.
    let unseeded: HashSet<&str> = all.iter().map(|own| own[6].1.as_str()).collect();
    assert_eq!(unseeded.len(), 1, "{unseeded:?}");
    let mut gone: Vec<&str> = names.iter().map(String::as_str).collect();
    gone.push("a");
    world.ok([&["rm", "-f"], &gone[..]].concat());
    world.assert_empty();
}

/// A failed hook is reported, and the fork exists.
#[test]
fn a_failed_hook_is_reported() {
    let world = World::new();
    world.start("a", &[]);
    let hook = "printf '#!/bin/sh\\nexit 3\\n' > /etc/sandtree/resume.d/50-bad; chmod +x /etc/sandtree/resume.d/50-bad";
    assert_eq!(world.sh("a", hook).code, 0);
    let forked = world.ok(["fork", "a"]);
    assert!(
        forked.err().contains("note: hook 50-bad failed: exit 3"),
        "{forked:?}"
    );
    world.ok(["checkpoint", "a", "base"]);
    let reverted = world.json(["revert", "a", "base"]);
    assert_eq!(
        reverted["hooks_failed"],
        serde_json::json!(["50-bad: exit 3"]),
        "{reverted}"
    );
    world.ok(["rm", "-f", "a", "a-1"]);
    world.assert_empty();
}

#[test]
fn fifty_forks_are_complete() {
    let world = World::new();
    world.start("a", &[]);
    held::begin(&world, "a", "one");
    let begun = Instant::now();
    let forked = world.json(["fork", "a", "-n", "50", "--name", "p"]);
    eprintln!(
        "50 forks: {} ms reported, {:?} in all",
        forked["total_ms"],
        begun.elapsed()
    );
    for number in 1..=50 {
        held::assert_holds(&world, &format!("p-{number}"), "one", 0);
    }
    eprintln!("all have answered after {:?}", begun.elapsed());
    let gone: Vec<String> = (1..=50)
        .map(|number| format!("p-{number}"))
        .chain(["a".into()])
        .collect();
    world.ok([vec!["rm".to_owned(), "-f".to_owned()], gone].concat());
    world.assert_empty();
}
