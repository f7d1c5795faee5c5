//! A restored agent: hooks, connections that must not survive, repeated numbers.

mod client;

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use client::{Agent, shell};
use sandtree_proto::{
    HookFailure, HostMessage, Identity, Network, Open, Outcome, Rebirth, Reply, Request,
};

fn rebirth() -> Request {
    let identity = Identity {
        hostname: "copy".into(),
        machine_id: "0".repeat(32),
        unix_time_ns: 0,
        entropy: vec![],
        network: Network::None,
    };
    Request::Restored(Rebirth {
        generation: [0xab; 16],
        identity,
        disk_bytes: None,
    })
}

fn hook(dir: &Path, name: &str, script: &str) {
    let path = dir.join(name);
    fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
}

fn restored(agent: &mut Agent) -> Vec<HookFailure> {
    match agent.client.request(rebirth()) {
        Ok(Reply::Restored { hooks }) => hooks,
        other => panic!("{other:?}"),
    }
}

#[test]
fn hooks_run_in_the_order_of_their_names_and_failures_are_reported() {
    let dir = tempfile::tempdir().unwrap();
    let hooks = dir.path().join("hooks");
    let log = dir.path().join("log");
    fs::create_dir(&hooks).unwrap();
    let say = |what: &str| format!("echo {what} >> {}", log.display());
    hook(
        &hooks,
        "10-first",
        &say("$SANDTREE_GENERATION $SANDTREE_HOSTNAME ${PATH:+path} $(cat | wc -c)"),
    );
    hook(&hooks, "20-fails", &format!("{}; exit 3", say("fails")));
    hook(&hooks, "30-killed", "kill -9 $$");
    hook(&hooks, "9-last", &say("last"));
    hook(&hooks, "README", "exit 1");
    fs::set_permissions(hooks.join("README"), fs::Permissions::from_mode(0o644)).unwrap();
    fs::create_dir(hooks.join("40-directory")).unwrap();
    fs::write(hooks.join("50-no-program"), [0x7f, 0]).unwrap();
    fs::set_permissions(
        hooks.join("50-no-program"),
        fs::Permissions::from_mode(0o755),
    )
    .unwrap();

    let mut agent = Agent::start(&["--hooks", hooks.to_str().unwrap()]);
    let failures = restored(&mut agent);
    let reported: Vec<_> = failures
        .iter()
        .map(|failure| (failure.name.as_str(), failure.what.as_str()))
        .collect();
    assert_eq!(
        reported[..2],
        [("20-fails", "exit 3"), ("30-killed", "signal 9")]
    );
    assert_eq!(
        (reported.len(), reported[2].0),
        (3, "50-no-program"),
        "{reported:?}"
    );
    let expected = format!("{} copy path 0\nfails\nlast\n", "ab".repeat(16));
    assert_eq!(fs::read_to_string(&log).unwrap(), expected);
    assert_eq!(restored(&mut agent).len(), 3, "it may be restored again");
}

#[test]
fn a_restore_without_hooks_runs_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let mut agent = Agent::start(&["--hooks", dir.path().join("none").to_str().unwrap()]);
    assert_eq!(restored(&mut agent), []);
    assert_eq!(agent.client.request(Request::Settle), Ok(Reply::Done));
}

#[test]
fn a_hook_that_hangs_is_ended_and_the_agent_serves_meanwhile() {
    let dir = tempfile::tempdir().unwrap();
    let pid = dir.path().join("pid");
    let hooks = dir.path().join("hooks");
    fs::create_dir(&hooks).unwrap();
    hook(
        &hooks,
        "hangs",
        &format!(
            "trap '' TERM HUP; sleep 1000 & echo $! > {}; wait",
            pid.display()
        ),
    );
    hook(&hooks, "later", "exit 0");
    let mut agent = Agent::start(&["--hooks", hooks.to_str().unwrap()]);
    let began = Instant::now();
    agent.client.send(&HostMessage::Request {
        id: 9999,
        request: rebirth(),
    });
    assert_eq!(
        agent.client.run(shell("echo meanwhile")).out,
        b"meanwhile\n"
    );
    assert!(
        began.elapsed() < Duration::from_secs(8),
        "the loop continues while a hook runs"
    );
    agent.client.until("the hooks' end", |client| {
        client.replies.contains_key(&9999)
    });
    let hooks = vec![HookFailure {
        name: "hangs".into(),
        what: "ended after 10 s".into(),
    }];
    assert_eq!(
        agent.client.replies.remove(&9999),
        Some(Ok(Reply::Restored { hooks }))
    );
    let sleep = fs::read_to_string(&pid).unwrap();
    let deadline = Instant::now() + Duration::from_secs(5);
    while Path::new("/proc").join(sleep.trim()).join("exe").exists() {
        assert!(
            Instant::now() < deadline,
            "what a hook started is ended with it"
        );
        std::thread::yield_now();
    }
}

/// A connection into the guest: the agent's channel, and a server's end there.
fn tunnel(agent: &mut Agent) -> (u32, TcpStream) {
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let channel = agent.client.open(Open::Connect {
        port: server.local_addr().unwrap().port(),
    });
    let (end, _) = server.accept().unwrap();
    end.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    agent.client.until("the connection", |client| {
        client.channels[&channel].pid.is_some()
    });
    (channel, end)
}

#[test]
fn a_connection_that_is_closed_in_the_middle_is_reset() {
    let mut agent = Agent::start(&[]);
    for half_closed in [false, true] {
        let (channel, mut end) = tunnel(&mut agent);
        agent.client.feed_some(channel, b"hello");
        end.read_exact(&mut [0; 5]).unwrap();
        if half_closed {
            agent.client.end_input(channel);
            assert_eq!(end.read(&mut [0]).unwrap(), 0);
        }
        end.write_all(b"unread").unwrap();
        agent.client.send(&HostMessage::Close { channel });
        let error = loop {
            match if half_closed {
                end.write(b"more")
            } else {
                end.read(&mut [0])
            } {
                Ok(_) => std::thread::yield_now(),
                Err(error) => break error,
            }
        };
        assert!(
            matches!(
                error.kind(),
                ErrorKind::ConnectionReset | ErrorKind::BrokenPipe
            ),
            "{error}"
        );
    }
}

#[test]
fn a_connection_that_both_sides_have_ended_is_not_reset() {
    let mut agent = Agent::start(&[]);
    let (channel, mut end) = tunnel(&mut agent);
    agent.client.feed(channel, b"question");
    let mut asked = Vec::new();
    end.read_to_end(&mut asked).unwrap();
    end.write_all(b"answer").unwrap();
    end.shutdown(std::net::Shutdown::Write).unwrap();
    let seen = agent.client.finish(channel);
    assert_eq!(
        (asked, seen.out, seen.outcome),
        (
            b"question".to_vec(),
            b"answer".to_vec(),
            Some(Outcome::Done)
        )
    );
    assert_eq!(end.read(&mut [0]).unwrap(), 0);
    assert!(end.take_error().unwrap().is_none());
}

/// Another hub counts channels from zero, while a thread of the first hub may still work.
#[test]
fn a_thread_of_a_closed_channel_is_ignored_by_the_next_channel_of_its_number() {
    let dir = tempfile::tempdir().unwrap();
    let mut agent = Agent::start(&[]);
    let path = dir
        .path()
        .join("file")
        .into_os_string()
        .into_encoded_bytes();
    let uid = rustix::process::getuid().as_raw();
    let gid = rustix::process::getgid().as_raw();
    let write = || Open::WriteFile {
        path: path.clone(),
        mode: 0o644,
        uid,
        gid,
    };
    for _ in 0..50 {
        let channel = agent.client.open(write());
        agent.client.send(&HostMessage::Close { channel });
        agent.client.connect();
        agent.client.send(&HostMessage::Open {
            channel,
            window: client::WINDOW,
            open: write(),
        });
        agent.client.feed(channel, b"whole");
        let seen = agent.client.finish(channel);
        assert_eq!(seen.outcome, Some(Outcome::Done));
        assert_eq!(fs::read(dir.path().join("file")).unwrap(), b"whole");
    }
}
