//! A scripted QEMU at the other end of a socket pair.

use std::fs::File;
use std::io::{IoSliceMut, Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, BufReader, Lines as TokioLines};

use super::*;
use crate::block::{Aio, Disk, Flushes, Opening, PreparedOverlay};
use crate::devices;
use crate::exit::Exit;
use crate::fdset::FdSets;
use crate::qmp::{Cont, Nothing, QueryStatus, Quit, Stop};

const GREETING: &str = r#"{"QMP": {"version": {"qemu": {"micro": 0, "minor": 2, "major": 7}, "package": ""}, "capabilities": []}}"#;
const SHUTDOWN: &str = r#"{"event": "SHUTDOWN", "data": {"guest": true, "reason": "guest-reset"}}"#;
const SOON: Duration = Duration::from_millis(50);

/// The scripted side. Dropping it closes the connection; `die` ends the process as well.
struct Peer {
    lines: TokioLines<BufReader<OwnedReadHalf>>,
    socket: OwnedWriteHalf,
    exit: watch::Sender<Option<Exit>>,
}

impl Peer {
    async fn say(&mut self, line: &str) {
        self.socket
            .write_all(format!("{line}\r\n").as_bytes())
            .await
            .unwrap();
    }

    /// Expects a command and returns its id.
    async fn hear(&mut self, name: &str) -> u64 {
        let line = self.lines.next_line().await.unwrap().expect("a command");
        let command: serde_json::Value = serde_json::from_str(&line).unwrap();
        assert_eq!(command["execute"], name);
        assert!(command.get("arguments").is_none(), "{line}");
        command["id"].as_u64().unwrap()
    }

    /// Expects a command and returns its id and arguments.
    async fn hear_more(&mut self, name: &str) -> (u64, Value) {
        let line = self.lines.next_line().await.unwrap().expect("a command");
        understand(line.as_bytes(), name)
    }

    /// Expects a command with a descriptor.
    async fn hear_with_fd(&mut self, name: &str) -> (u64, Value, File) {
        let socket = self.lines.get_ref().get_ref().as_ref();
        let (line, fd) = socket
            .async_io(Interest::READABLE, || receive(socket))
            .await
            .unwrap();
        let (id, arguments) = understand(&line, name);
        (id, arguments, fd.into())
    }

    /// Plays the beginning of a load up to its start, under 7.2.
    async fn load(&mut self) -> String {
        let (id, arguments, mut fd) = self.hear_with_fd("getfd").await;
        assert_eq!(arguments, json!({"fdname": "migration"}));
        self.reply(id, "{}").await;
        let (id, arguments) = self.hear_more("migrate-incoming").await;
        assert_eq!(arguments, json!({"uri": "fd:migration"}));
        self.reply(id, "{}").await;
        let mut state = String::new();
        fd.read_to_string(&mut state).unwrap();
        state
    }

    async fn tell_migration(&mut self, status: &str) {
        self.say(&format!(
            r#"{{"event": "MIGRATION", "data": {{"status": "{status}"}}}}"#
        ))
        .await;
    }

    async fn reply(&mut self, id: u64, value: &str) {
        self.say(&format!(r#"{{"return": {value}, "id": {id}}}"#))
            .await;
    }

    /// QEMU is killed.
    fn die(&self) {
        self.die_of(9);
    }

    fn die_of(&self, signal: i32) {
        let exit = Exit {
            status: ExitStatus::from_raw(signal),
            stderr: "last words".into(),
        };
        self.exit.send_replace(Some(exit));
    }
}

fn understand(line: &[u8], name: &str) -> (u64, Value) {
    let mut command: Value = serde_json::from_slice(line).unwrap();
    assert_eq!(command["execute"], name);
    (command["id"].as_u64().unwrap(), command["arguments"].take())
}

fn receive(socket: &UnixStream) -> io::Result<(Vec<u8>, OwnedFd)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut beside = RecvAncillaryBuffer::new(&mut space);
    let mut line = vec![0; 4096];
    let received = recvmsg(
        socket,
        &mut [IoSliceMut::new(&mut line)],
        &mut beside,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    line.truncate(received.bytes);
    let mut fds: Vec<OwnedFd> = Vec::new();
    for message in beside.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    assert_eq!(fds.len(), 1);
    Ok((line, fds.pop().unwrap()))
}

/// A file whose offset is at its end, as after writing it.
fn state() -> OwnedFd {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(b"a state").unwrap();
    file.into()
}

fn pair() -> (UnixStream, ExitWatch, Peer) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let (exit, watch) = ExitWatch::new();
    let (read, socket) = theirs.into_split();
    (
        ours,
        watch,
        Peer {
            lines: BufReader::new(read).lines(),
            socket,
            exit,
        },
    )
}

/// A connection past its negotiation.
async fn connected() -> (Qmp, Peer) {
    connected_to(GREETING).await
}

async fn connected_to(greeting: &str) -> (Qmp, Peer) {
    let (stream, exit, mut peer) = pair();
    let script = async {
        peer.say(greeting).await;
        let id = peer.hear("qmp_capabilities").await;
        peer.reply(id, "{}").await;
    };
    let (qmp, ()) = tokio::join!(Qmp::connect(stream, exit), script);
    (qmp.unwrap(), peer)
}

#[tokio::test]
async fn replies_find_their_commands_in_any_order_between_events() {
    let (qmp, mut peer) = connected().await;
    let mut events = qmp.events();
    let script = async {
        let status = peer.hear("query-status").await;
        let stop = peer.hear("stop").await;
        peer.say(r#"{"event": "STOP", "timestamp": {"seconds": 1, "microseconds": 1}}"#)
            .await;
        peer.reply(stop, "{}").await;
        peer.say(r#"{"event": "NEWER", "data": {}}"#).await;
        peer.reply(
            status,
            r#"{"running": false, "singlestep": false, "status": "paused"}"#,
        )
        .await;
    };
    let (status, stop, ()) = tokio::join!(qmp.run(QueryStatus {}), qmp.run(Stop {}), script);
    assert_eq!(status.unwrap().status, "paused");
    assert_eq!(stop.unwrap(), Nothing {});
    assert_eq!(
        events.next().await,
        Some(Event::Stop {
            at: Duration::from_micros(1_000_001)
        })
    );
    assert_eq!(
        events.next().await,
        Some(Event::Other {
            name: "NEWER".into()
        })
    );
}

#[tokio::test]
async fn a_refusal_carries_class_and_description() {
    let (qmp, mut peer) = connected().await;
    let script = async {
        let id = peer.hear("cont").await;
        peer.say(&format!(
            r#"{{"id": {id}, "error": {{"class": "GenericError", "desc": "no way"}}}}"#
        ))
        .await;
    };
    let (result, ()) = tokio::join!(qmp.run(Cont {}), script);
    assert_eq!(
        result.unwrap_err().to_string(),
        "QEMU refused cont: no way (GenericError)"
    );
}

#[tokio::test]
async fn a_late_reply_is_not_taken_for_the_next() {
    let (qmp, mut peer) = connected().await;
    let timed_out = qmp.run_within(Stop {}, SOON).await;
    assert!(matches!(
        timed_out,
        Err(Error::Timeout {
            command: "stop",
            after: SOON
        })
    ));
    let script = async {
        let late = peer.hear("stop").await;
        let next = peer.hear("query-status").await;
        peer.reply(late, "{}").await;
        peer.reply(next, r#"{"running": true, "status": "running"}"#)
            .await;
    };
    let (status, ()) = tokio::join!(qmp.run(QueryStatus {}), script);
    assert!(status.unwrap().running);
}

#[tokio::test]
async fn death_before_the_greeting() {
    let (stream, exit, peer) = pair();
    peer.die();
    drop(peer);
    assert!(
        matches!(Qmp::connect(stream, exit).await, Err(Error::Died { exit }) if exit.stderr == "last words")
    );
}

#[tokio::test]
async fn death_between_greeting_and_negotiation() {
    let (stream, exit, mut peer) = pair();
    peer.say(GREETING).await;
    peer.die();
    drop(peer);
    assert!(matches!(
        Qmp::connect(stream, exit).await,
        Err(Error::Died { .. })
    ));
}

#[tokio::test]
async fn death_ends_every_waiting_command_and_every_later_one() {
    let (qmp, mut peer) = connected().await;
    let script = async {
        peer.hear("stop").await;
        peer.hear("cont").await;
        peer.die();
        // The connection stays open: death alone is enough.
        peer
    };
    let (stop, cont, peer) = tokio::join!(qmp.run(Stop {}), qmp.run(Cont {}), script);
    assert!(matches!(stop, Err(Error::Died { .. })));
    assert!(matches!(cont, Err(Error::Died { .. })));
    drop(peer);
    qmp.closed().await;
    assert!(matches!(qmp.run(Quit {}).await, Err(Error::Died { .. })));
    assert_eq!(qmp.events().next().await, None);
}

#[tokio::test(start_paused = true)]
async fn a_connection_closed_by_a_running_process_is_a_breach() {
    let (
        qmp,
        Peer {
            lines,
            socket,
            exit,
        },
    ) = connected().await;
    drop((lines, socket));
    assert!(matches!(
        qmp.run(Stop {}).await,
        Err(Error::Protocol { .. })
    ));
    drop(exit);
}

#[tokio::test]
async fn the_ending_is_kept_for_who_asks_late() {
    let (qmp, mut peer) = connected().await;
    peer.say(r#"{"event": "GUEST_PANICKED", "data": {"action": "poweroff"}}"#)
        .await;
    peer.say(SHUTDOWN).await;
    drop(peer);
    qmp.closed().await;
    let shutdown = crate::Shutdown {
        guest: true,
        reason: "guest-reset".into(),
    };
    assert_eq!(
        qmp.ending(),
        Ending {
            panicked: true,
            shutdown: Some(shutdown)
        }
    );
}

#[tokio::test]
async fn a_slow_subscriber_learns_how_much_it_lost() {
    let (qmp, mut peer) = connected().await;
    let mut events = qmp.events();
    for _ in 0..EVENTS_HELD + 1 {
        peer.say(r#"{"event": "RESUME"}"#).await;
    }
    drop(peer);
    qmp.closed().await;
    assert_eq!(events.next().await, Some(Event::Lost { count: 1 }));
    assert_eq!(
        events.next().await,
        Some(Event::Resume { at: Duration::ZERO })
    );
}

#[tokio::test]
async fn what_is_not_qmp_ends_the_connection() {
    for line in ["nonsense", GREETING, r#"{"return": {}}"#] {
        let (qmp, mut peer) = connected().await;
        let script = async {
            peer.hear("stop").await;
            peer.say(line).await;
        };
        let (result, ()) = tokio::join!(qmp.run(Stop {}), script);
        assert!(matches!(result, Err(Error::Protocol { .. })), "{line}");
    }
}

#[tokio::test]
async fn an_endless_line_ends_the_connection() {
    let (qmp, mut peer) = connected().await;
    let flood = vec![b'x'; 2 * LINE_BYTES_MAX];
    // The connection closes in the middle of this, which fails it.
    let script = async { peer.socket.write_all(&flood).await };
    let (result, _) = tokio::join!(qmp.run(Stop {}), script);
    assert!(matches!(result, Err(Error::Protocol { detail }) if detail.contains("1048576")));
}

#[tokio::test]
async fn a_descriptor_travels_with_its_command_and_no_other() {
    let (qmp, mut peer) = connected().await;
    let sets = FdSets::new(qmp.clone(), 7);
    let script = async {
        let (id, arguments, mut fd) = peer.hear_with_fd("add-fd").await;
        assert_eq!(arguments, json!({"fdset-id": 7}));
        let mut content = String::new();
        fd.read_to_string(&mut content).unwrap();
        // The second waits for the reply of the first.
        peer.reply(id, r#"{"fdset-id": 7, "fd": 20}"#).await;
        let (second, arguments, _) = peer.hear_with_fd("add-fd").await;
        assert_eq!(arguments, json!({"fdset-id": 8}));
        peer.reply(second, r#"{"fdset-id": 8, "fd": 21}"#).await;
        content
    };
    let first = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(first.path(), "first").unwrap();
    let reopened = File::open(first.path()).unwrap();
    let (one, two, content) = tokio::join!(sets.add(reopened.into()), sets.add(state()), script);
    assert_eq!(
        (one.unwrap(), two.unwrap(), content.as_str()),
        (7, 8, "first")
    );
}

#[tokio::test]
async fn commands_are_sent_before_earlier_ones_are_answered() {
    let (qmp, mut peer) = connected().await;
    let stopped = qmp.begin(&Stop {});
    let continued = qmp.begin(&Cont {});
    let script = async {
        let first = peer.hear("stop").await;
        let second = peer.hear("cont").await;
        let refusal = r#""error": {"class": "GenericError", "desc": "not now"}"#;
        peer.say(&format!(r#"{{{refusal}, "id": {first}}}"#)).await;
        peer.reply(second, "{}").await;
    };
    let (stopped, continued, ()) = tokio::join!(stopped, continued, script);
    assert!(matches!(stopped, Err(Error::Qmp { desc, .. }) if desc == "not now"));
    continued.unwrap();
}

#[tokio::test]
async fn a_machine_that_expects_a_state_reports_on_its_load() {
    let (qmp, mut peer) = connected().await;
    let script = async {
        let (id, arguments) = peer.hear_more("migrate-set-capabilities").await;
        assert_eq!(
            arguments,
            json!({"capabilities": [{"capability": "events", "state": true}]})
        );
        peer.reply(id, "{}").await;
    };
    let (expected, ()) = tokio::join!(devices::expect(&qmp), script);
    expected.unwrap();
}

#[tokio::test]
async fn a_state_is_loaded_from_its_beginning() {
    let (qmp, mut peer) = connected().await;
    let script = async {
        let state = peer.load().await;
        peer.tell_migration("setup").await;
        peer.tell_migration("active").await;
        peer.tell_migration("completed").await;
        state
    };
    let sets = FdSets::new(qmp.clone(), 1);
    let (loaded, read) = tokio::join!(devices::load(&qmp, &sets, state()), script);
    loaded.unwrap();
    assert_eq!(read, "a state");
}

#[tokio::test]
async fn a_newer_qemu_loads_from_an_fd_set() {
    let (qmp, mut peer) = connected_to(&GREETING.replace("7", "9")).await;
    let script = async {
        let (id, arguments, _) = peer.hear_with_fd("add-fd").await;
        assert_eq!(arguments, json!({"fdset-id": 3}));
        peer.reply(id, r#"{"fdset-id": 3, "fd": 20}"#).await;
        let (id, arguments) = peer.hear_more("migrate-incoming").await;
        assert_eq!(arguments, json!({"uri": "file:/dev/fdset/3"}));
        peer.reply(id, "{}").await;
        peer.tell_migration("completed").await;
        let (id, _) = peer.hear_more("remove-fd").await;
        peer.reply(id, "{}").await;
    };
    let sets = FdSets::new(qmp.clone(), 3);
    let (loaded, ()) = tokio::join!(devices::load(&qmp, &sets, state()), script);
    loaded.unwrap();
}

/// As by a kernel without memory.
#[tokio::test]
async fn a_qemu_that_is_killed_while_it_loads_says_nothing_about_the_state() {
    let (qmp, mut peer) = connected().await;
    let script = async {
        peer.load().await;
        peer.die();
        drop(peer);
    };
    let sets = FdSets::new(qmp.clone(), 1);
    let (loaded, ()) = tokio::join!(devices::load(&qmp, &sets, state()), script);
    assert!(matches!(loaded, Err(Error::Died { .. })), "{loaded:?}");
}

#[tokio::test]
async fn a_qemu_that_dies_of_a_state_is_quoted() {
    let (qmp, mut peer) = connected().await;
    let script = async {
        peer.load().await;
        peer.tell_migration("active").await;
        peer.die_of(6);
        drop(peer);
    };
    let sets = FdSets::new(qmp.clone(), 1);
    let (loaded, ()) = tokio::join!(devices::load(&qmp, &sets, state()), script);
    let error = loaded.unwrap_err();
    assert!(
        matches!(error, Error::NotLoaded { .. }) && error.to_string().contains("last words"),
        "{error}"
    );
}

#[tokio::test]
async fn a_load_that_fails_tells_qemus_reason() {
    let (qmp, mut peer) = connected().await;
    let script = async {
        peer.load().await;
        peer.tell_migration("failed").await;
        let id = peer.hear("query-migrate").await;
        peer.reply(id, r#"{"status": "failed", "error-desc": "wrong version"}"#)
            .await;
    };
    let sets = FdSets::new(qmp.clone(), 1);
    let (loaded, ()) = tokio::join!(devices::load(&qmp, &sets, state()), script);
    assert_eq!(
        loaded.unwrap_err().to_string(),
        "QEMU cannot load the state: wrong version"
    );
}

#[tokio::test]
async fn a_stream_that_takes_too_long_is_cancelled() {
    let (qmp, mut peer) = connected().await;
    let script = async {
        for name in ["migrate-set-capabilities", "migrate-set-parameters"] {
            let (id, _) = peer.hear_more(name).await;
            peer.reply(id, "{}").await;
        }
        let (id, ..) = peer.hear_with_fd("getfd").await;
        peer.reply(id, "{}").await;
        let (id, arguments) = peer.hear_more("migrate").await;
        assert_eq!(arguments, json!({"uri": "fd:migration"}));
        peer.reply(id, "{}").await;
        let id = peer.hear("migrate_cancel").await;
        peer.reply(id, "{}").await;
    };
    let sets = FdSets::new(qmp.clone(), 1);
    let (saved, ()) = tokio::join!(devices::save_stream(&qmp, &sets, state(), SOON), script);
    assert!(matches!(
        saved,
        Err(Error::Timeout {
            command: "migrate",
            after: SOON
        })
    ));
}

fn disk(qmp: &Qmp) -> Disk {
    let opening = Opening {
        aio: Aio::Threads,
        flushes: Flushes::Ignored,
    };
    Disk::new(qmp.clone(), opening, 1)
}

/// Opens an overlay in the scripted QEMU, which gets the fd set 2.
async fn prepared(disk: &Disk, sets: &FdSets, peer: &mut Peer) -> PreparedOverlay {
    let script = async {
        let (id, ..) = peer.hear_with_fd("add-fd").await;
        peer.reply(id, r#"{"fdset-id": 2, "fd": 20}"#).await;
        for _ in 0..2 {
            let (id, _) = peer.hear_more("blockdev-add").await;
            peer.reply(id, "{}").await;
        }
    };
    let file = tempfile::tempfile().unwrap();
    tokio::join!(disk.prepare(sets, file), script).0.unwrap()
}

fn disk_on(node: &str) -> String {
    format!(r#"[{{"device": "", "inserted": {{"node-name": "{node}", "ro": false}}}}]"#)
}

/// A pivot that QEMU makes after its deadline is found, and no state begins from an overlay that
/// was written to.
#[tokio::test(start_paused = true)]
async fn a_pivot_that_is_late_is_found_and_the_next_one_stands_on_it() {
    let (qmp, mut peer) = connected().await;
    let disk = disk(&qmp);
    let sets = FdSets::new(qmp.clone(), 2);
    let overlay = prepared(&disk, &sets, &mut peer).await;
    // Neither the pivot nor the question is answered.
    let (overlay, error) = disk.pivot(overlay).await.unwrap_err();
    assert!(
        matches!(
            error,
            Error::Timeout {
                command: "blockdev-snapshot",
                ..
            }
        ),
        "{error}"
    );

    let script = async {
        let pivot = peer.hear_more("blockdev-snapshot").await.0;
        peer.reply(pivot, "{}").await;
        let late = peer.hear("query-block").await;
        peer.reply(late, &disk_on("disk2")).await;
        let asked = peer.hear("query-block").await;
        peer.reply(asked, &disk_on("disk2")).await;
    };
    let (pivoted, ()) = tokio::join!(disk.pivot(overlay), script);
    assert!(matches!(pivoted, Err((_, Error::PivotedLate))));
}

/// A pivot that is answered late, but within the question that follows, has been made.
#[tokio::test(start_paused = true)]
async fn a_pivot_that_is_late_by_little_has_been_made() {
    let (qmp, mut peer) = connected().await;
    let disk = disk(&qmp);
    let sets = FdSets::new(qmp.clone(), 2);
    let overlay = prepared(&disk, &sets, &mut peer).await;
    let script = async {
        peer.hear_more("blockdev-snapshot").await;
        let asked = peer.hear("query-block").await;
        peer.reply(asked, &disk_on("disk2")).await;
    };
    let (pivoted, ()) = tokio::join!(disk.pivot(overlay), script);
    assert!(pivoted.is_ok());
}
