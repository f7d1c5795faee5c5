//! The link to the guest: a break loses nothing, and the machine's death ends every waiting call
//! with a reason. These tests use the library, because the command line cannot break a link.

use std::path::PathBuf;
use std::time::Duration;

use sandtree::{Error, Exec, ExecSpec, Host, HostConfig, Lifetime, Sandbox, SandboxSpec};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::support::{DEADLINE, World};

/// A sandbox of this process, in a store of its own.
async fn sandbox() -> (World, Sandbox) {
    let world = World::new();
    let path = std::env::var_os("PATH").unwrap_or_default();
    let host = Host::open(HostConfig::new(
        world.home(),
        std::env::split_paths(&path).collect::<Vec<PathBuf>>(),
    ));
    let host = host.await.unwrap();
    let sandbox = host.create(SandboxSpec::new("tiny")).await.unwrap();
    (world, sandbox)
}

async fn remove(world: World, sandbox: Sandbox) {
    sandbox.remove().await.unwrap();
    drop(sandbox);
    assert_eq!(world.residue(), Vec::<PathBuf>::new());
}

/// Breaks the link again and again until it is asked to stop; returns the number of breaks.
fn keep_breaking(sandbox: &Sandbox) -> JoinHandle<u32> {
    let sandbox = sandbox.clone();
    tokio::spawn(async move {
        for breaks in 0.. {
            if sandbox.break_link().await.is_err() {
                return breaks;
            }
            // A ping is answered only after the agent was greeted again, so each break hits a
            // working link.
            let Ok(guest) = sandbox.guest().await else {
                return breaks;
            };
            drop(guest.ping().await);
        }
        unreachable!("no test breaks a link so often")
    })
}

fn lines(count: u32, word: &str) -> Vec<u8> {
    (1..=count)
        .flat_map(|number| format!("{word}{number}\n").into_bytes())
        .collect()
}

fn assert_same(what: &str, found: &[u8], wanted: &[u8]) {
    let differs = found.iter().zip(wanted).position(|(a, b)| a != b);
    assert_eq!(
        (differs, found.len()),
        (None, wanted.len()),
        "{what} differs at the first, of the second bytes"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_break_loses_and_doubles_no_byte() {
    let (world, sandbox) = sandbox().await;
    let breaking = keep_breaking(&sandbox);

    let line = "seq 60000 | sed s/^/o/ & seq 60000 | sed s/^/e/ >&2 & wait";
    let said = sandbox
        .exec(ExecSpec::shell(line))
        .await
        .unwrap()
        .output(64 << 20);
    let echo = ExecSpec {
        stdin: true,
        ..ExecSpec::argv(["cat"])
    };
    let mut echo = sandbox.exec(echo).await.unwrap();
    let sent = lines(300_000, "i");
    let feeding = tokio::spawn({
        let mut stdin = echo.stdin.clone();
        let sent = sent.clone();
        async move {
            for piece in sent.chunks(10_007) {
                stdin.write(piece).await.unwrap();
            }
            stdin.close().unwrap();
        }
    });
    let (said, echoed) = timeout(DEADLINE, async {
        tokio::join!(said, echo_output(&mut echo))
    })
    .await
    .unwrap();
    timeout(DEADLINE, feeding).await.unwrap().unwrap();

    let said = said.unwrap();
    assert!(said.status.success());
    assert_same("stdout", &said.stdout, &lines(60_000, "o"));
    assert_same("stderr", &said.stderr, &lines(60_000, "e"));
    assert_same("stdin", &echoed, &sent);
    assert!(echo.wait().await.unwrap().success());
    remove(world, sandbox).await;
    assert!(breaking.await.unwrap() > 20, "the link was hardly broken");
}

async fn echo_output(exec: &mut Exec) -> Vec<u8> {
    let mut all = Vec::new();
    let mut stdout = exec.stdout.take().unwrap();
    while let Some(bytes) = stdout.next().await.unwrap() {
        all.extend_from_slice(&bytes);
    }
    all
}

#[tokio::test(flavor = "multi_thread")]
async fn commands_start_and_end_across_breaks() {
    let (world, sandbox) = sandbox().await;
    let breaking = keep_breaking(&sandbox);
    for number in 0..40 {
        let run = async {
            let exec = sandbox
                .exec(ExecSpec::shell(format!("echo {number}; exit {number}")))
                .await
                .unwrap();
            exec.output(1 << 20).await.unwrap()
        };
        let said = timeout(DEADLINE, run)
            .await
            .unwrap_or_else(|_| panic!("command {number} is lost"));
        assert_eq!(
            (said.status.code(), said.stdout),
            (number, format!("{number}\n").into_bytes())
        );
    }
    remove(world, sandbox).await;
    assert!(breaking.await.unwrap() > 20, "the link was hardly broken");
}

#[tokio::test(flavor = "multi_thread")]
async fn any_number_of_detached_commands_can_have_ended() {
    let (world, sandbox) = sandbox().await;
    let guest = sandbox.guest().await.unwrap();
    // More than an agent has at a time.
    for number in 0..400 {
        let spec = ExecSpec {
            lifetime: Lifetime::Detached,
            ..ExecSpec::argv(["true"])
        };
        let mut exec = guest
            .exec(spec)
            .await
            .unwrap_or_else(|error| panic!("command {number}: {error:?}"));
        assert!(
            timeout(DEADLINE, exec.wait())
                .await
                .unwrap()
                .unwrap()
                .success()
        );
    }
    assert_eq!(sandbox.execs().await.unwrap().len(), 400);
    remove(world, sandbox).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_machines_death_ends_every_waiting_call_with_the_reason() {
    let (world, sandbox) = sandbox().await;
    let guest = sandbox.guest().await.unwrap();
    let sleep = || ExecSpec {
        stdin: true,
        ..ExecSpec::argv(["sleep", "1000"])
    };
    let mut waits = guest.exec(sleep()).await.unwrap();
    let reads = guest.exec(sleep()).await.unwrap();
    let mut writes = guest.exec(sleep()).await.unwrap();
    let detached = ExecSpec {
        lifetime: Lifetime::Detached,
        ..sleep()
    };
    let mut detached = guest.exec(detached).await.unwrap();
    let files = guest.files();
    guest
        .exec(ExecSpec::shell("truncate -s 64G /tmp/large"))
        .await
        .unwrap()
        .output(1)
        .await
        .unwrap();

    let mut calls: Vec<(&str, JoinHandle<Result<(), Error>>)> = vec![
        (
            "wait",
            tokio::spawn(async move { waits.wait().await.map(drop) }),
        ),
        (
            "output",
            tokio::spawn(async move { reads.output(1 << 20).await.map(drop) }),
        ),
        (
            "stdin",
            tokio::spawn(async move {
                // Nothing reads it, so a part of it stays unsent.
                writes.stdin.write(&vec![0; 8 << 20]).await?;
                writes.wait().await.map(drop)
            }),
        ),
        (
            "attached",
            tokio::spawn(async move { detached.wait().await.map(drop) }),
        ),
        (
            "read a file",
            tokio::spawn({
                let files = files.clone();
                async move {
                    files
                        .read("/tmp/large", &mut tokio::io::sink())
                        .await
                        .map(drop)
                }
            }),
        ),
        (
            "write a file",
            tokio::spawn(async move {
                let (mut source, _held) = tokio::io::duplex(16);
                files
                    .write("/tmp/file", &mut source, Default::default())
                    .await
                    .map(drop)
            }),
        ),
    ];
    // When the ping is answered, the earlier call has been sent.
    guest.ping().await.unwrap();
    sandbox.kill().await.unwrap();
    for (name, call) in calls.drain(..) {
        let ended = timeout(Duration::from_secs(20), call)
            .await
            .unwrap_or_else(|_| panic!("{name} still waits"));
        let report = ended.unwrap().expect_err(name).report();
        let message = [vec![report.message.clone()], report.causes.clone()]
            .concat()
            .join(": ");
        assert!(message.contains("killed"), "{name}: {message}");
    }
    let refused = sandbox.exec(ExecSpec::argv(["true"])).await.unwrap_err();
    assert_eq!(refused.kind(), sandtree::ErrorKind::WrongState, "{refused}");
    remove(world, sandbox).await;
}
