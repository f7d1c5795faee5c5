//! Commands in a sandbox, through `sandtree run`, `exec`, `attach` and `shell`.

use crate::support::shared;

use std::fs;
use std::io::{Read, Write};
use std::process::{Child, Stdio};

use serde_json::json;

use crate::support::pty::Window;
use crate::support::shared::{A, Shared};
use crate::support::{Answer, DEADLINE, World, finish, kill, until, wait};

/// A repeatable sequence of bytes that are no text.
fn noise(length: usize) -> Vec<u8> {
    let step = |state: &mut u64| {
        *state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        Some((*state >> 56) as u8)
    };
    std::iter::repeat_n((), length)
        .scan(7, |state, ()| step(state))
        .collect()
}

/// Reads until `wanted` appears.
fn read_until(from: &mut impl Read, wanted: &[u8]) {
    let mut seen = Vec::new();
    while !seen.ends_with(wanted) {
        let mut byte = [0];
        assert_eq!(
            from.read(&mut byte).unwrap(),
            1,
            "it ended after {:?}",
            String::from_utf8_lossy(&seen)
        );
        seen.push(byte[0]);
    }
}

fn resident_kib(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status
        .lines()
        .find(|line| line.starts_with("VmHWM:"))
        .expect("a live process has a peak");
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn a_foreground_run_leaves_nothing_and_returns_the_exit_code() {
    let world = World::new();
    let answer = world.run([
        "run",
        "tiny",
        "--",
        "sh",
        "-c",
        "echo out; echo err >&2; exit 3",
    ]);
    assert_eq!(
        (answer.code, answer.out(), answer.err().as_str()),
        (3, "out\n", "err\n")
    );
    world.assert_empty();
}

#[test]
fn exit_codes_are_those_of_the_command_or_of_a_shell() {
    let a = Shared::sandbox();
    for (line, code) in [
        ("exit 0", 0),
        ("exit 3", 3),
        ("exit 255", 255),
        ("kill -9 $$", 137),
        ("kill -TERM $$", 143),
    ] {
        let answer = a.sh(A, line);
        assert_eq!((answer.code, answer.err().as_str()), (code, ""), "{line}");
    }
    for (program, code, why) in [
        ("nothing-of-that-name", 127, "not found"),
        ("/etc/passwd", 126, "ermission"),
        ("/etc", 126, "ermission"),
    ] {
        let answer = a.run(["exec", A, "--", program]);
        assert_eq!(answer.code, code, "{program}: {answer:?}");
        assert!(
            answer.err().contains(program) && answer.err().contains(why),
            "{answer:?}"
        );
    }
    assert_eq!(
        a.run(["exec", "--timeout", "300ms", A, "--", "sleep", "100"])
            .code,
        124
    );
    a.run(["exec", "missing", "--", "true"])
        .failed_with(&["missing"]);
}

#[test]
fn stdout_and_stderr_are_separate_and_byte_exact() {
    let a = Shared::sandbox();
    let octal = |bytes: &[u8]| {
        bytes
            .iter()
            .map(|byte| format!("\\{byte:03o}"))
            .collect::<String>()
    };
    let every: Vec<u8> = (0..=255).collect();
    let back: Vec<u8> = every.iter().rev().copied().collect();
    let answer = a.sh(
        A,
        &format!("printf '{}'; printf '{}' >&2", octal(&every), octal(&back)),
    );
    assert_eq!(
        (answer.code, answer.stdout, answer.stderr),
        (0, every, back)
    );
}

#[test]
fn bytes_pass_both_ways_while_the_command_runs() {
    let a = Shared::sandbox();
    let mut child = a.spawn(&[
        "exec",
        "-i",
        A,
        "--",
        "sh",
        "-c",
        "printf first; printf other >&2; cat",
    ]);
    let mut stdin = child.stdin.take().unwrap();
    let mut stdout = child.stdout.take().unwrap();
    read_until(&mut stdout, b"first");
    read_until(child.stderr.as_mut().unwrap(), b"other");
    for word in [&b"\xff\x00one"[..], b"two"] {
        stdin.write_all(word).unwrap();
        read_until(&mut stdout, word);
    }
    drop(stdin);
    child.stdout = Some(stdout);
    let answer = finish(child);
    assert_eq!((answer.code, answer.out()), (0, ""));
}

#[test]
fn stdin_is_streamed_whole_and_binary_safe() {
    let a = Shared::sandbox();
    let input = noise(8 << 20);
    let answer = a.run_with_input(["exec", "-i", A, "--", "cat"], &input);
    assert_eq!(
        (answer.code, answer.stdout.len()),
        (0, input.len()),
        "{}",
        answer.err()
    );
    assert!(answer.stdout == input, "the bytes differ");
}

#[test]
fn a_command_can_end_without_reading_its_stdin() {
    let a = Shared::sandbox();
    let answer = a.run_with_input(["exec", "-i", A, "--", "true"], &noise(4 << 20));
    assert_eq!((answer.code, answer.err().as_str()), (0, ""));
    // Without -i the command's stdin is empty, whatever ours contains.
    let answer = a.run_with_input(["exec", A, "--", "cat"], b"not for it");
    assert_eq!((answer.code, answer.out()), (0, ""));
}

#[test]
fn environment_directory_and_user_are_as_requested() {
    let a = Shared::sandbox();
    let with = |options: &[&str], line: &str| {
        let answer = a.run([&["exec"], options, &[A, "--", "sh", "-c", line]].concat());
        assert_eq!(answer.code, 0, "{answer:?}");
        answer.out().to_owned()
    };
    assert_eq!(with(&[], "pwd; id -u; echo $HOME"), "/root\n0\n/root\n");
    assert_eq!(
        with(
            &["--env", "K=a b=c\nd", "--env", "E="],
            "echo \"$K\"; env | grep ^E="
        ),
        "a b=c\nd\nE=\n"
    );
    assert_eq!(with(&["--workdir", "/usr/bin"], "pwd"), "/usr/bin\n");
    assert_eq!(
        with(
            &["--user", "daemon", "--workdir", "/tmp"],
            "id -un; id -gn; pwd"
        ),
        "daemon\ndaemon\n/tmp\n"
    );
    assert_eq!(
        with(&["--user", "1234:5678"], "id -u; id -g"),
        "1234\n5678\n"
    );
    assert_eq!(
        with(&["--user", "user"], "id -u; pwd; echo $HOME $USER"),
        "1000\n/home/user\n/home/user user\n"
    );
}

#[test]
fn an_unknown_user_or_directory_is_named() {
    let a = Shared::sandbox();
    let answer = a.run(["exec", "--user", "nosuch", A, "--", "true"]);
    assert_eq!(answer.code, 126, "{answer:?}");
    assert!(
        answer.err().contains("nosuch") && answer.err().contains("user"),
        "{answer:?}"
    );
    let answer = a.run(["exec", "--workdir", "/no/such", A, "--", "true"]);
    assert_eq!(answer.code, 126, "{answer:?}");
    assert!(answer.err().contains("/no/such"), "{answer:?}");
}

#[test]
fn a_timeout_ends_every_process_of_the_command_in_any_session() {
    let a = Shared::sandbox();
    let line = "trap '' TERM; setsid sh -c 'trap \"\" TERM; sleep 27182 & sleep 27182' & sleep 27182 & echo up; wait";
    // All of them must have started by then.
    let answer = a.run(["exec", "--timeout", "10s", A, "--", "sh", "-c", line]);
    assert_eq!((answer.code, answer.out()), (124, "up\n"));
    assert_eq!(a.said("ps -o args | grep -c '^sleep 27182' || true"), "0\n");
}

#[test]
fn a_background_child_outlives_its_command() {
    let a = Shared::sandbox();
    let line = "mkdir /tmp/b; (while [ ! -e /tmp/b/go ]; do echo beat; echo beat >> /tmp/b/beats; usleep 50000; done; \
                echo whole > /tmp/b/end) & echo x";
    let answer = a.sh(A, line);
    assert_eq!(answer.code, 0);
    assert!(answer.out().contains("x\n"), "{answer:?}");
    let beats = || {
        a.said("cat /tmp/b/beats | wc -l")
            .trim()
            .parse::<u32>()
            .unwrap()
    };
    let before = beats();
    until("it continues to write to an unread stdout", || {
        beats() > before + 3
    });
    a.said("touch /tmp/b/go");
    a.until_holds("grep -q whole /tmp/b/end");
}

#[test]
fn commands_run_at_the_same_time_on_one_processor() {
    let a = Shared::sandbox();
    assert_eq!(a.said("nproc; mkdir /tmp/r"), "1\n");
    // Each command waits for all others: if they ran in turn, even the first would not end.
    let line =
        "touch /tmp/r/$N; until [ $(ls /tmp/r | wc -l) -eq 20 ]; do usleep 100000; done; echo met";
    let start = |number: u32| {
        let number = format!("N={number}");
        a.spawn(&[
            "exec",
            "--env",
            &number,
            "--timeout",
            "90s",
            A,
            "--",
            "sh",
            "-c",
            line,
        ])
    };
    let children: Vec<Child> = (0..20).map(start).collect();
    for child in children {
        let answer = finish(child);
        assert_eq!(
            (answer.code, answer.out()),
            (0, "met\n"),
            "{}",
            answer.err()
        );
    }
}

#[test]
fn a_stopped_reader_delays_only_its_own_command() {
    const LENGTH: u64 = 1 << 30;
    const RESIDENT_MAX_KIB: u64 = 150 << 10;
    /// More than a pipe holds: a client that has this much left to write still runs.
    const UNWRITTEN: u64 = 4 << 20;
    let world = World::new();
    let keeper = {
        world.start(A, &[]);
        world.inspect(A)["keeper_pid"].as_u64().unwrap() as u32
    };
    let line = "echo $$ > /tmp/pid; exec dd if=/dev/zero bs=1M count=1024";
    let mut command = world.command();
    command
        .args(["exec", A, "--", "sh", "-c", line])
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    let mut child = command.spawn().unwrap();
    let blocked = "grep -q pipe_write /proc/$(cat /tmp/pid)/wchan";
    until(
        "the command waits for its reader, and others do not",
        || world.sh(A, blocked).code == 0,
    );
    let written = world.sh(A, "grep wchar /proc/$(cat /tmp/pid)/io | cut -d' ' -f2");
    let written: u64 = written.out().trim().parse().unwrap();
    assert!(
        written < 16 << 20,
        "{written} bytes were taken from a command whose reader has taken none"
    );

    let mut stdout = child.stdout.take().unwrap();
    let mut buffer = vec![0; 1 << 20];
    let mut count = 0;
    let mut peak = 0;
    loop {
        let length = stdout.read(&mut buffer).unwrap();
        if length == 0 {
            break;
        }
        assert!(buffer[..length].iter().all(|byte| *byte == 0));
        count += length as u64;
        if count < LENGTH - UNWRITTEN {
            peak = peak.max(resident_kib(child.id()));
        }
    }
    assert_eq!((count, wait(&mut child, DEADLINE)), (LENGTH, Some(0)));
    assert!(peak < RESIDENT_MAX_KIB, "the client held {peak} KiB");
    assert!(
        resident_kib(keeper) < RESIDENT_MAX_KIB,
        "the keeper held {} KiB",
        resident_kib(keeper)
    );
    let agent = world.sh(A, "grep VmHWM /proc/1/status | tr -dc 0-9");
    assert!(
        agent.out().parse::<u64>().unwrap() < 32 << 10,
        "the agent held {} KiB",
        agent.out()
    );
    shared::remove(&world);
}

#[test]
fn a_command_ends_with_its_client_unless_it_is_detached() {
    let a = Shared::sandbox();
    let mut child = a.spawn(&[
        "exec",
        A,
        "--",
        "sh",
        "-c",
        "echo up; setsid sleep 16180 & sleep 16180",
    ]);
    read_until(child.stdout.as_mut().unwrap(), b"up\n");
    let id = a
        .ok(["exec", "--detach", A, "--", "sleep", "14142"])
        .out()
        .trim()
        .to_owned();
    a.until_holds("[ $(ps -o args | grep -c '^sleep 16180') -eq 2 ]");
    kill(child.id(), "KILL");
    assert_eq!(wait(&mut child, DEADLINE), Some(137));
    a.until_holds("! ps -o args | grep -q '^sleep 16180'");
    assert!(a.holds("ps -o args | grep -q '^sleep 14142'"));
    a.said("kill $(pidof sleep)");
    assert_eq!(a.run(["attach", A, &id]).code, 143);
}

#[test]
fn a_command_ends_when_its_reader_leaves() {
    let a = Shared::sandbox();
    let mut child = a.spawn(&["exec", A, "--", "yes", "endless"]);
    read_until(child.stdout.as_mut().unwrap(), b"endless\n");
    drop(child.stdout.take());
    assert_eq!(wait(&mut child, DEADLINE), Some(141));
    a.until_holds("! ps -o args | grep -q '^yes endless'");
}

#[test]
fn attach_shows_a_detached_command_from_its_first_byte() {
    let a = Shared::sandbox();
    let line = "mkfifo /tmp/d; echo first; echo low >&2; read x < /tmp/d; echo $x; exit 5";
    let id = a
        .ok(["exec", "--detach", A, "--", "sh", "-c", line])
        .out()
        .trim()
        .to_owned();
    let mut joined: Vec<Child> = (0..2).map(|_| a.spawn(&["attach", A, &id])).collect();
    joined
        .iter_mut()
        .for_each(|child| read_until(child.stdout.as_mut().unwrap(), b"first\n"));
    let listed = a.json(["attach", A]);
    let entry = listed
        .as_array()
        .unwrap()
        .iter()
        .find(|entry| entry["id"] == *id)
        .unwrap();
    assert_eq!(
        (&entry["ended"], &entry["stdout_bytes"]),
        (&json!(null), &json!(6))
    );
    a.said("echo last > /tmp/d");
    for child in joined {
        let answer = finish(child);
        assert_eq!(
            (answer.code, answer.out(), answer.err().as_str()),
            (5, "last\n", "low\n")
        );
    }
    let Answer {
        code,
        stdout,
        stderr,
    } = a.run(["attach", A, &id]);
    assert_eq!(
        (code, &stdout[..], &stderr[..]),
        (5, &b"first\nlast\n"[..], &b"low\n"[..]),
        "after its end"
    );
    let row = a
        .ok(["attach", A])
        .out()
        .lines()
        .find(|row| row.starts_with(&id))
        .unwrap()
        .to_owned();
    assert!(row.contains("exit 5") && row.contains("mkfifo"), "{row}");
    a.run(["attach", A, "000000000000"])
        .failed_with(&["000000000000"]);
    a.run(["attach", A, "../x"]).failed_with(&["../x"]);
}

#[test]
fn an_attached_client_can_write_to_the_command() {
    let a = Shared::sandbox();
    let id = a.json(["exec", "--detach", "-i", A, "--", "cat"])["id"]
        .as_str()
        .unwrap()
        .to_owned();
    let input = noise(3 << 20);
    let answer = a.run_with_input(["attach", "-i", A, &id], &input);
    assert_eq!(
        (answer.code, answer.stdout.len()),
        (0, input.len()),
        "{}",
        answer.err()
    );
    assert!(answer.stdout == input, "the bytes differ");
}

#[test]
fn json_contains_the_commands_output() {
    let a = Shared::sandbox();
    let answer = a.run([
        "--json",
        "exec",
        A,
        "--",
        "sh",
        "-c",
        "echo out; printf '\\377' >&2; exit 3",
    ]);
    assert_eq!(answer.code, 3);
    let parsed: serde_json::Value = serde_json::from_slice(&answer.stdout).unwrap();
    assert_eq!(
        parsed,
        json!({ "exit_code": 3, "timed_out": false, "stdout": "out\n", "stderr_base64": "/w==" })
    );
    let answer = a.run([
        "--json",
        "exec",
        "--timeout",
        "200ms",
        A,
        "--",
        "sleep",
        "9",
    ]);
    let parsed: serde_json::Value = serde_json::from_slice(&answer.stdout).unwrap();
    assert_eq!((answer.code, &parsed["timed_out"]), (124, &json!(true)));
    let answer = a.run_with_input(["--json", "exec", "-i", A, "--", "cat"], b"passed on");
    let parsed: serde_json::Value = serde_json::from_slice(&answer.stdout).unwrap();
    assert_eq!(parsed["stdout"], "passed on");
    let answer = a.run(["--json", "exec", A, "--", "nothing-of-that-name"]);
    let parsed: serde_json::Value = serde_json::from_slice(&answer.stderr).unwrap();
    assert_eq!(
        (answer.code, parsed["error"]["message"].is_string()),
        (127, true),
        "{parsed}"
    );
}

#[test]
fn signals_to_the_client_reach_the_command() {
    let a = Shared::sandbox();
    for (signal, code) in [("INT", 7), ("TERM", 8)] {
        let line = format!(
            "trap 'echo caught; exit {code}' {signal}; echo ready; while :; do sleep 0.1; done"
        );
        let mut child = a.spawn(&["exec", A, "--", "sh", "-c", &line]);
        read_until(child.stdout.as_mut().unwrap(), b"ready\n");
        kill(child.id(), signal);
        let answer = finish(child);
        assert_eq!(
            (answer.code, answer.out()),
            (code, "caught\n"),
            "{}",
            answer.err()
        );
    }
}

#[test]
fn a_shell_has_a_real_terminal() {
    let a = Shared::sandbox();
    let mut command = a.command();
    command.args(["shell", A]);
    let mut window = Window::open(&command, (33, 101));
    window.type_in("echo at $((40 + 2)); stty size; echo $TERM; tty\n");
    window.expect("at 42\r\n");
    window.expect("33 101\r\n");
    window.expect("xterm\r\n");
    window.expect("/dev/pts/");
    assert!(
        !window.shown().contains("job control"),
        "{}",
        window.shown()
    );

    window.resize(50, 132);
    window.type_in(
        "until [ \"$(stty size)\" = '50 132' ]; do usleep 10000; done; echo now $((1 + 1))\n",
    );
    window.expect("now 2\r\n");

    window.type_in("echo go $((2 + 1)); sleep 1000\n");
    window.expect("go 3\r\n");
    window.type_in("\x03");
    window.type_in("echo code $?\n");
    window.expect("code 130\r\n");

    window.type_in("sleep 999 & jobs; kill %1; echo end $((2 * 2))\n");
    window.expect("Running");
    window.expect("end 4\r\n");
    window.type_in("exit 6\n");
    assert_eq!(window.close(DEADLINE), Some(6));
}

#[test]
fn exec_and_run_use_a_terminal_on_request() {
    let a = Shared::sandbox();
    let mut command = a.command();
    command.args([
        "exec",
        "-it",
        A,
        "--",
        "sh",
        "-c",
        "tty && read -r line && echo \"<$line>\" >&2",
    ]);
    let mut window = Window::open(&command, (24, 80));
    window.expect("/dev/pts/");
    window.type_in("typed\n");
    window.expect("<typed>\r\n");
    assert_eq!(window.close(DEADLINE), Some(0));
    a.run(["exec", "-t", A, "--", "true"])
        .failed_with(&["terminal"]);

    let mut command = a.command();
    command.args(["run", "-it", "tiny"]);
    let mut window = Window::open(&command, (24, 80));
    window.expect("# ");
    window.type_in("tty; exit 9\n");
    window.expect("/dev/pts/");
    assert!(
        !window.shown().contains("job control"),
        "{}",
        window.shown()
    );
    assert_eq!(window.close(DEADLINE), Some(9));
}
