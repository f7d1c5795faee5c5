//! Commands over the real link, with the real agent on this machine.

mod client;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use client::{Agent, exec, shell};
use sandtree_proto::{ExecStart, HostMessage, Open, Outcome, TermSize};

const EXITED: Outcome = Outcome::Exited { code: 0 };

fn alive(pid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    !stat.is_empty() && !stat.contains(") Z")
}

fn wait_gone(pid: i32) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while alive(pid) {
        assert!(Instant::now() < deadline, "process {pid} lives on");
        std::thread::yield_now();
    }
}

#[test]
fn streams_are_separate_and_byte_exact() {
    let mut agent = Agent::start(&[]);
    let seen = agent.client.run(shell(
        r"printf 'a\0\377\nno newline'; printf 'err\r' >&2; exit 3",
    ));
    assert_eq!(seen.out, b"a\0\xff\nno newline");
    assert_eq!(seen.err, b"err\r");
    assert_eq!(seen.outcome, Some(Outcome::Exited { code: 3 }));
    let seen = agent.client.run(shell("kill -9 $$"));
    assert_eq!(seen.outcome, Some(Outcome::Signaled { signal: 9 }));
}

#[test]
fn stdin_is_binary_and_empty_without_one() {
    let mut agent = Agent::start(&[]);
    let bytes: Vec<u8> = (0..3_000_000u32).map(|i| (i * 7 + i / 251) as u8).collect();
    let channel = agent.client.open(Open::Exec(ExecStart {
        stdin: true,
        ..exec(&["cat"])
    }));
    agent.client.feed(channel, &bytes);
    let seen = agent.client.finish(channel);
    assert!(seen.out == bytes);
    assert_eq!(agent.client.run(exec(&["cat"])).out, b"");
}

#[test]
fn unread_input_does_not_hang() {
    let mut agent = Agent::start(&[]);
    let channel = agent.client.open(Open::Exec(ExecStart {
        stdin: true,
        ..shell("exec <&-; sleep 0.2")
    }));
    agent.client.feed(channel, &vec![1; 2_000_000]);
    assert_eq!(agent.client.finish(channel).outcome, Some(EXITED));
}

#[test]
fn commands_run_in_parallel() {
    let mut agent = Agent::start(&[]);
    let waiting = agent.client.open(Open::Exec(ExecStart {
        stdin: true,
        ..exec(&["cat"])
    }));
    let many: Vec<u32> = (0..50)
        .map(|i| agent.client.open(Open::Exec(shell(&format!("echo {i}")))))
        .collect();
    for (i, channel) in many.into_iter().enumerate() {
        assert_eq!(
            agent.client.finish(channel).out,
            format!("{i}\n").into_bytes()
        );
    }
    agent.client.feed(waiting, b"still here");
    assert_eq!(agent.client.finish(waiting).out, b"still here");
}

#[test]
fn a_command_that_cannot_start_reports_why() {
    let mut agent = Agent::start(&[]);
    let refused = |agent: &mut Agent, start: ExecStart| match agent.client.run(start).outcome {
        Some(Outcome::NotStarted(failure)) => (failure.errno, failure.message),
        other => panic!("{other:?}"),
    };
    // starts: nothing
    let missing = refused(&mut agent, exec(&["no-such-program"]));
    assert_eq!(missing, (libc::ENOENT, "no-such-program: not found".into()));
    assert_eq!(refused(&mut agent, exec(&["/etc/passwd"])).0, libc::EACCES);
    let (errno, message) = refused(
        &mut agent,
        ExecStart {
            cwd: b"/no/dir".to_vec(),
            ..shell("true")
        },
    );
    // Not ENOENT, which would mean a missing command.
    assert_eq!(
        (errno, message.as_str()),
        (
            libc::EINVAL,
            "cannot change to directory /no/dir: No such file or directory"
        )
    );
    let (_, message) = refused(
        &mut agent,
        ExecStart {
            user: "no-such-user".into(),
            ..shell("true")
        },
    );
    assert_eq!(message, "no user no-such-user in the guest");
    // starts: nothing
    assert_eq!(refused(&mut agent, exec(&[])).1, "the command is empty");
    let dir = tempfile::tempdir().unwrap();
    let script = dir.path().join("script");
    std::fs::write(&script, "echo no interpreter line\n").unwrap();
    std::fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    // starts: nothing
    let no_interpreter = refused(&mut agent, exec(&[script.to_str().unwrap()]));
    assert_eq!(no_interpreter.0, libc::ENOEXEC);
}

#[test]
fn environment_and_signals_start_clean() {
    let mut agent = Agent::start(&[]);
    let env = vec![
        (b"PATH".to_vec(), b"/bin:/usr/bin".to_vec()),
        (b"A".to_vec(), b"b=c".to_vec()),
    ];
    let seen = agent.client.run(ExecStart {
        env,
        ..shell("echo $A $PATH $CARGO_PKG_NAME; umask; grep Sig.*: /proc/self/status")
    });
    let text = String::from_utf8(seen.out).unwrap();
    assert!(text.starts_with("b=c /bin:/usr/bin\n0022\n"), "{text}");
    assert!(text.contains("SigBlk:\t0000000000000000"), "{text}");
    let ignored = text
        .lines()
        .find_map(|line| line.strip_prefix("SigIgn:\t"))
        .expect("the kernel tells it");
    let ignored = u64::from_str_radix(ignored, 16).unwrap();
    // The process that started the tests may ignore the C library's own two signals, 32 and 33.
    assert_eq!(ignored & !0x1_8000_0000, 0, "{text}");
}

#[test]
fn a_command_does_not_wait_for_its_background_child() {
    let mut agent = Agent::start(&[]);
    let begun = Instant::now();
    let seen = agent.client.run(shell(
        "(while :; do echo noise; sleep 0.01; done) & echo $!",
    ));
    assert!(begun.elapsed() < Duration::from_secs(5));
    let text = String::from_utf8(seen.out).unwrap();
    let pid: i32 = text
        .lines()
        .find(|line| *line != "noise")
        .unwrap()
        .parse()
        .unwrap();
    agent.client.run(exec(&["sleep", "0.1"]));
    assert!(alive(pid), "it writes into a pipe that is still read");
    agent.client.run(exec(&["kill", "-9", &pid.to_string()]));
    wait_gone(pid);
}

#[test]
fn output_written_just_before_the_end_is_not_lost() {
    let mut agent = Agent::start(&[]);
    let start = shell("sleep 5 & head -c 400000 /dev/zero; kill $!");
    let channel = agent.client.open_with(1000, Open::Exec(start));
    assert_eq!(agent.client.finish(channel).out.len(), 400_000);
}

fn pids(agent: &mut Agent, channel: u32, count: usize) -> Vec<i32> {
    agent.client.until("pids", |client| {
        client.channels[&channel]
            .out
            .iter()
            .filter(|&&b| b == b'\n')
            .count()
            == count
    });
    let text = String::from_utf8(agent.client.channels[&channel].out.clone()).unwrap();
    text.lines().map(|line| line.parse().unwrap()).collect()
}

#[test]
fn a_timeout_ends_the_group_even_if_it_ignores_sigterm() {
    let mut agent = Agent::start(&[]);
    let start = shell("trap '' TERM; sleep 100 & echo $$; echo $!; while :; do sleep 1; done");
    let channel = agent.client.open(Open::Exec(ExecStart {
        timeout_ms: Some(200),
        ..start
    }));
    let pids = pids(&mut agent, channel, 2);
    assert_eq!(
        agent.client.finish(channel).outcome,
        Some(Outcome::TimedOut)
    );
    assert!(!pids.iter().any(|&pid| alive(pid)));
}

/// A cgroup for one test, removed with it.
struct Hierarchy(String);

impl Hierarchy {
    /// `None` if this user may not create one.
    fn make() -> Option<Self> {
        let mounts = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];
        let mount = mounts
            .into_iter()
            .find(|mount| std::path::Path::new(mount).join("cgroup.procs").exists())?;
        let path = format!("{mount}/sandtree-test-{}", std::process::id());
        std::fs::create_dir(&path).ok().map(|()| Self(path))
    }

    /// The cgroups of commands.
    fn groups(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(format!("{}/sandtree", self.0)).unwrap();
        let paths = entries.map(|entry| entry.unwrap().path());
        paths.filter(|path| path.is_dir()).collect()
    }
}

impl Drop for Hierarchy {
    fn drop(&mut self) {
        for group in self.groups() {
            std::fs::remove_dir(group).unwrap();
        }
        std::fs::remove_dir(format!("{}/sandtree", self.0)).unwrap();
        std::fs::remove_dir(&self.0).unwrap();
    }
}

#[test]
fn a_timeout_ends_processes_that_left_the_session() {
    let Some(hierarchy) = Hierarchy::make() else {
        return eprintln!("no writable cgroup here; not tested");
    };
    let mut agent = Agent::start(&["--cgroup", &hierarchy.0]);
    let start = shell("setsid sh -c 'echo $$; sleep 100' & setsid sleep 100 & echo $!; wait");
    let channel = agent.client.open(Open::Exec(ExecStart {
        timeout_ms: Some(300),
        ..start
    }));
    let pids = pids(&mut agent, channel, 2);
    assert_eq!(
        agent.client.finish(channel).outcome,
        Some(Outcome::TimedOut)
    );
    assert!(!pids.iter().any(|&pid| alive(pid)));
    let channel = agent
        .client
        .open(Open::Exec(shell("setsid sleep 100 & echo $!; wait")));
    let pids = self::pids(&mut agent, channel, 1);
    let is_empty = |group: &PathBuf| {
        let events = std::fs::read_to_string(group.join("cgroup.events"));
        events.is_ok_and(|events| events.contains("populated 0"))
    };
    let mut of_command = hierarchy.groups();
    of_command.retain(|group| !is_empty(group));
    assert_eq!(of_command.len(), 1);
    agent.client.send(&HostMessage::Close { channel });
    wait_gone(pids[0]);
    // The last cgroup is removed when the agent has seen the end of its last process. That of the
    // next command is left, without processes.
    let deadline = Instant::now() + Duration::from_secs(10);
    let is_next = |group: &PathBuf| !of_command.contains(group) && is_empty(group);
    while !matches!(&hierarchy.groups()[..], [next] if is_next(next)) {
        assert!(Instant::now() < deadline, "a cgroup is left");
    }
    // Root of the guest may remove the one that waits.
    std::fs::remove_dir(&hierarchy.groups()[0]).unwrap();
    let channel = agent.client.open(Open::Exec(shell("exit 3")));
    let seen = agent.client.finish(channel);
    assert_eq!(seen.outcome, Some(Outcome::Exited { code: 3 }));
    // A command that cannot be started leaves none.
    let count = hierarchy.groups().len();
    let mut start = shell("true");
    start.argv[0] = b"a\0b".to_vec();
    let channel = agent.client.open(Open::Exec(start));
    let seen = agent.client.finish(channel);
    assert!(
        matches!(seen.outcome, Some(Outcome::NotStarted(_))),
        "{:?}",
        seen.outcome
    );
    assert!(hierarchy.groups().len() <= count);
}

#[test]
fn signals_reach_the_group_and_close_ends_it() {
    let mut agent = Agent::start(&[]);
    let channel = agent.client.open(Open::Exec(shell(
        "trap 'echo got' USR1; echo $$; while :; do sleep 0.01; done",
    )));
    let pid = pids(&mut agent, channel, 1)[0];
    agent.client.send(&HostMessage::Signal {
        channel,
        signal: libc::SIGUSR1,
    });
    agent.client.until("trap", |client| {
        client.channels[&channel].out.ends_with(b"got\n")
    });
    agent.client.send(&HostMessage::Close { channel });
    wait_gone(pid);
}

#[test]
fn a_terminal_has_size_job_control_and_an_end() {
    let mut agent = Agent::start(&[]);
    let terminal = Some(TermSize {
        rows: 33,
        cols: 101,
    });
    let script = "stty size; test -t 0 && test -t 2 && echo tty; read line; echo got:$line; stty size; sleep 100 & tty >/dev/tty";
    let channel = agent.client.open(Open::Exec(ExecStart {
        terminal,
        stdin: true,
        ..shell(script)
    }));
    agent.client.until("prompt", |client| {
        client.channels[&channel].out.ends_with(b"tty\r\n")
    });
    agent.client.send(&HostMessage::Resize {
        channel,
        size: TermSize { rows: 10, cols: 20 },
    });
    agent.client.feed_some(channel, b"hello\n");
    let seen = agent.client.finish(channel);
    let text = String::from_utf8(seen.out).unwrap();
    assert!(text.starts_with("33 101\r\ntty\r\n"), "{text:?}");
    assert!(text.contains("got:hello\r\n10 20\r\n/dev/pts/"), "{text:?}");
    assert_eq!(seen.outcome, Some(EXITED));
}

#[test]
fn a_terminals_input_ends_and_interrupts() {
    let mut agent = Agent::start(&[]);
    let terminal = Some(TermSize { rows: 24, cols: 80 });
    let channel = agent.client.open(Open::Exec(ExecStart {
        terminal,
        stdin: true,
        ..exec(&["cat"])
    }));
    agent.client.feed(channel, b"line\n");
    assert_eq!(agent.client.finish(channel).outcome, Some(EXITED));
    let channel = agent.client.open(Open::Exec(ExecStart {
        terminal,
        stdin: true,
        ..exec(&["sleep", "100"])
    }));
    agent
        .client
        .until("start", |client| client.channels[&channel].pid.is_some());
    agent.client.feed_some(channel, b"\x03");
    assert_eq!(
        agent.client.finish(channel).outcome,
        Some(Outcome::Signaled {
            signal: libc::SIGINT
        })
    );
}

fn resident_kib(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))
        .unwrap();
    line.trim().trim_end_matches(" kB").trim().parse().unwrap()
}

#[test]
fn a_stopped_reader_stops_the_command_and_memory_stays_bounded() {
    let mut agent = Agent::start(&[]);
    let channel = agent
        .client
        .open(Open::Exec(shell("head -c 100000000 /dev/zero")));
    let seen = agent.client.channels.get_mut(&channel).unwrap();
    (seen.forget, seen.stalled) = (true, true);
    agent.client.until("a full window", |client| {
        client.channels[&channel].counts[0] == u64::from(client::WINDOW)
    });
    assert_eq!(
        agent.client.run(shell("echo meanwhile")).out,
        b"meanwhile\n"
    );
    assert_eq!(agent.client.channels[&channel].outcome, None);
    agent.client.unstall(channel);
    assert_eq!(agent.client.finish(channel).counts[0], 100_000_000);
    let peak = resident_kib(agent.process.id());
    assert!(peak < 16 * 1024, "the agent grew to {peak} KiB");
}
