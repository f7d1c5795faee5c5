//! Greeting, readiness, barriers, holding, and what breaks a connection.

use std::io::Write;
use std::os::unix::net::UnixStream;

use sandtree_mounts::{Access, Error, Guest, Server};
use sandtree_proto::mount::{Answer, FromGuest, FromHost, Make, Request, encode};

use crate::support::{Call, MOUNT, NONCE, World, at, directory, split};

#[test]
fn readiness_is_reported_once_the_guest_says_so() {
    let mut world = World::new();
    let ready = Call::new(|done| world.server.on_ready(done));
    assert!(!ready.is_done());
    world.client.changes_so_far();
    assert_eq!(world.status().guest, Guest::Revalidating);
    world.client.ready();
    ready.wait().unwrap();
    Call::new(|done| world.server.on_ready(done))
        .wait()
        .unwrap();
    assert_eq!(world.status().guest, Guest::Ready);
}

#[test]
fn a_barrier_ends_when_the_guest_has_applied_all_changes() {
    let mut world = World::new();
    world.client.attr("");
    let early = Call::new(|done| world.server.barrier(done));
    assert!(!early.is_done());
    world.client.ready();
    early.wait().expect("a guest that is ready has seen all");
    let idle = Call::new(|done| world.server.barrier(done));
    idle.wait().expect("nothing is new");
    assert!(world.client.news.is_empty());

    world.write("file", "");
    let first = Call::new(|done| world.server.barrier(done));
    let second = Call::new(|done| world.server.barrier(done));
    assert!(matches!(
        world.client.next_change(),
        FromHost::Changed { .. }
    ));
    let FromHost::Mark { number } = world.client.next_change() else {
        panic!("the mark follows the change")
    };
    assert!(!first.is_done() && !second.is_done());
    world.client.send(&FromGuest::Marked { number }, &[]);
    first.wait().unwrap();
    second.wait().unwrap();
}

#[test]
fn a_barrier_covers_changes_that_were_reported_before() {
    let mut world = World::new();
    world.client.attr("");
    world.client.ready();
    world.write("file", "");
    assert!(matches!(
        world.client.next_change(),
        FromHost::Changed { .. }
    ));
    let barrier = Call::new(|done| world.server.barrier(done));
    assert!(!barrier.is_done());
    let FromHost::Mark { number } = world.client.next_change() else {
        panic!("a mark")
    };
    world.client.send(&FromGuest::Marked { number }, &[]);
    barrier.wait().unwrap();
}

#[test]
fn a_held_port_is_left_alone() {
    let mut world = World::new();
    world.client.attr("");
    let hold = Call::new(|done| world.server.hold(done));
    assert_eq!(world.client.next_change(), FromHost::Hold);
    assert!(!hold.is_done());
    let before = world.client.request(Request::Root, &[], false);
    world.client.reply(before).0.expect("it still asks");
    world.client.send(&FromGuest::Held, &[]);
    hold.wait().unwrap();
    Call::new(|done| world.server.hold(done))
        .wait()
        .expect("it holds already");

    let asked = world.client.request(Request::Root, &[], false);
    world.write("file", "");
    let barrier = Call::new(|done| world.server.barrier(done));
    assert!(!barrier.is_done());
    world.client.stream.set_nonblocking(true).unwrap();
    let mut byte = [0];
    let read = std::io::Read::read(&mut world.client.stream, &mut byte);
    assert_eq!(
        read.unwrap_err().kind(),
        std::io::ErrorKind::WouldBlock,
        "nothing is sent"
    );
    world.client.stream.set_nonblocking(false).unwrap();
    world.server.go();
    assert_eq!(world.client.next_change(), FromHost::Go);
    world.client.reply(asked).0.expect("it is answered now");
}

#[test]
fn a_silent_guest_is_parked() {
    let mut world = World::new();
    let hold = Call::new(|done| world.server.hold(done));
    assert_eq!(world.client.next_change(), FromHost::Hold);
    Call::new(|done| world.server.park(done)).wait().unwrap();
    assert!(!hold.is_done());
    let asked = world.client.request(Request::Root, &[], false);
    world.server.go();
    assert!(matches!(hold.wait(), Err(Error::Released)));
    assert_eq!(world.client.next_change(), FromHost::Go);
    world.client.reply(asked).0.expect("it is served again");
    // A guest that answers the hold after that holds now, and is released again.
    world.client.send(&FromGuest::Held, &[]);
    assert_eq!(world.client.next_change(), FromHost::Go);
    world.client.changes_so_far();
}

#[test]
fn packets_that_arrived_with_held_are_answered_after_go() {
    let mut world = World::new();
    let hold = Call::new(|done| world.server.hold(done));
    assert_eq!(world.client.next_change(), FromHost::Hold);
    let mut bytes = Vec::new();
    encode(&FromGuest::Held, &[], &mut bytes).unwrap();
    let request = FromGuest::Request {
        id: 50,
        mount: MOUNT,
        replay: false,
        request: Request::Root,
    };
    encode(&request, &[], &mut bytes).unwrap();
    world.client.stream.write_all(&bytes).unwrap();
    hold.wait().unwrap();
    world.server.go();
    world.client.reply(50).0.expect("it was not lost");
}

#[test]
fn a_broken_packet_begins_a_new_greeting() {
    let mut world = World::new();
    world.client.ready();
    Call::new(|done| world.server.on_ready(done))
        .wait()
        .unwrap();
    world.client.stream.write_all(&[0xaa; 100]).unwrap();
    let nonce = world.client.greeting();
    assert_ne!(nonce, NONCE, "a nonce is used once");
    assert!(world.client.ask(Request::Root).is_ok());
    assert_eq!(world.status().guest, Guest::Revalidating);
}

#[test]
fn a_request_that_is_cut_by_a_greeting_is_void() {
    let mut world = World::new();
    let (directory, name) = split("file");
    let message = FromGuest::Request {
        id: 1,
        mount: MOUNT,
        replay: false,
        request: Request::Make {
            directory,
            name,
            what: Make::Directory { mode: 0o755 },
        },
    };
    let mut bytes = Vec::new();
    encode(&message, &[], &mut bytes).unwrap();
    bytes.truncate(bytes.len() - 5);
    bytes.extend([0; 5]);
    world.client.stream.write_all(&bytes).unwrap();
    world.client.greeting();
    assert!(!world.host("file").exists());
}

#[test]
fn a_guest_that_does_not_stop_is_refused() {
    let mut world = World::new();
    for _ in 0..5 {
        world.client.stream.write_all(&[0xaa; 100]).unwrap();
        world.client.greeting();
    }
    world.client.stream.write_all(&[0xaa; 100]).unwrap();
    assert!(world.client.is_closed());
    assert_eq!(world.status().guest, Guest::Refused);
    let barrier = Call::new(|done| world.server.barrier(done)).wait();
    assert!(matches!(barrier, Err(Error::Refused)));
    let hold = Call::new(|done| world.server.hold(done)).wait();
    assert!(matches!(hold, Err(Error::Refused)));
}

#[test]
fn everything_before_the_echo_is_ignored() {
    let temporary = tempfile::tempdir().unwrap();
    let served = directory(MOUNT, temporary.path(), Access::ReadWrite);
    let (port, mut stream) = UnixStream::pair().unwrap();
    let mut stale = vec![0x55; 300];
    sandtree_proto::frame::encode_preamble(&mut stale, sandtree_proto::Nonce([9; 16]));
    let (directory, name) = split("stale");
    let request = FromGuest::Request {
        id: 1,
        mount: MOUNT,
        replay: false,
        request: Request::Make {
            directory,
            name,
            what: Make::Directory { mode: 0o755 },
        },
    };
    encode(&request, &[], &mut stale).unwrap();
    stream.write_all(&stale).unwrap();
    let _server = Server::start(port, NONCE, vec![served]).unwrap();
    let mut client = crate::support::Client::connect(stream, NONCE);
    assert!(client.ask(Request::Root).is_ok());
    assert!(!temporary.path().join("stale").exists());
}

/// A guest that sends requests and reads no reply gets stuck itself, and nothing else does.
#[test]
fn a_guest_that_never_reads_costs_bounded_memory() {
    let mut world = World::new();
    std::fs::write(world.host("file"), vec![1; 1 << 20]).unwrap();
    let node = world.client.node("file");
    world.client.stream.set_nonblocking(true).unwrap();
    let mut bytes = Vec::new();
    for id in 0..5000 {
        let message = FromGuest::Request {
            id: 1000 + id,
            mount: MOUNT,
            replay: false,
            request: Request::Read {
                node: node.clone(),
                offset: 0,
                length: 1 << 20,
            },
        };
        encode(&message, &[], &mut bytes).unwrap();
    }
    let mut sent = 0;
    let end = std::time::Instant::now() + std::time::Duration::from_secs(2);
    while std::time::Instant::now() < end && sent < bytes.len() {
        match world.client.stream.write(&bytes[sent..]) {
            Ok(count) => sent += count,
            Err(_) => std::thread::yield_now(),
        }
    }
    assert!(sent < bytes.len(), "the server does not read without end");
    let served = world.status().requests;
    assert!(served < 30, "{served} replies of 1 MiB wait");
    world.client.stream.set_nonblocking(false).unwrap();
    for id in 0..20 {
        let (answer, data) = world.client.reply(1000 + id);
        assert_eq!((answer, data.len()), (Ok(Answer::Done), 1 << 20));
    }
}

#[test]
fn a_closed_port_ends_every_wait() {
    let world = World::new();
    let ready = Call::new(|done| world.server.on_ready(done));
    let World {
        client,
        server,
        temporary,
    } = world;
    drop(client);
    assert!(matches!(ready.wait(), Err(Error::Closed)));
    let late = Call::new(|done| server.hold(done));
    assert!(matches!(late.wait(), Err(Error::Closed)));
    drop((server, temporary));
}

#[test]
fn dropping_the_server_calls_every_completion() {
    let world = World::new();
    let ready = Call::new(|done| world.server.on_ready(done));
    let barrier = Call::new(|done| world.server.barrier(done));
    drop(world.server);
    assert!(matches!(ready.wait(), Err(Error::Ended)));
    assert!(matches!(barrier.wait(), Err(Error::Ended)));
}

#[test]
fn data_behind_a_message_without_data_breaks_the_protocol() {
    let mut world = World::new();
    world
        .client
        .request(Request::Stat { node: at("") }, b"x", false);
    world.client.greeting();
    world.client.send(&FromGuest::Marked { number: 7 }, &[]);
    world.client.greeting();
}
