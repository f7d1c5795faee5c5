//! The hub of a guest that is captured, restored, paused and resumed. The agents are scripted: they
//! act as those of a restored memory.

use std::path::Path;

use sandtree_proto::Failure;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

use super::*;
use super::{Agent, PATIENCE, WINDOW, data, exec, open};
use crate::guest::Guest;
use crate::hub::{Activity, ExecRecord, Gate, Restored};

fn detached(tag: &str) -> Open {
    let Open::Exec(start) = exec() else {
        unreachable!("it is one")
    };
    Open::Detached(ExecStart {
        tag: tag.into(),
        argv: vec![b"serve".to_vec(), b"it".to_vec()],
        ..start
    })
}

fn state(channel: u32, tag: &str, out: (u64, u64)) -> ChannelState {
    ChannelState {
        channel,
        tag: tag.into(),
        received: 0,
        out,
        err: (0, 0),
        outcome: None,
    }
}

fn restored(execs: &Path, records: Vec<ExecRecord>, from: &Path) -> HubSpec {
    let restored = Restored {
        records,
        from: from.to_owned(),
    };
    HubSpec {
        restored: Some(restored),
        ..HubSpec::fresh(execs.to_owned())
    }
}

/// Reads exactly `count` bytes.
async fn read(channel: &mut Channel, count: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    while bytes.len() < count {
        let next = timeout(PATIENCE, channel.out.next())
            .await
            .expect("bytes come")
            .unwrap();
        bytes.extend_from_slice(&next.expect("the stream continues"));
    }
    assert_eq!(bytes.len(), count, "{bytes:?}");
    bytes
}

async fn rest(channel: &mut Channel) -> Vec<u8> {
    let mut bytes = Vec::new();
    while let Some(next) = timeout(PATIENCE, channel.out.next())
        .await
        .expect("the stream ends")
        .unwrap()
    {
        bytes.extend_from_slice(&next);
    }
    bytes
}

async fn outcome(channel: &mut Channel) -> Outcome {
    timeout(PATIENCE, channel.control.ended())
        .await
        .expect("it ends")
        .unwrap()
}

/// The next bytes the hub sends into the guest.
async fn input(agent: &mut Agent) -> (u64, Vec<u8>) {
    loop {
        if let Decoded::Frame(Frame::Data { offset, bytes, .. }) = agent.next().await {
            return (offset, bytes);
        }
    }
}

async fn end(agent: &mut Agent, channel: u32, out: u64, code: i32) {
    for (stream, offset) in [(StreamId::Out, out), (StreamId::Err, 0)] {
        agent
            .send(Frame::Eof {
                channel,
                stream,
                offset,
            })
            .await;
    }
    agent
        .say(&AgentMessage::Ended {
            channel,
            outcome: Outcome::Exited { code },
        })
        .await;
}

/// A hub with a detached command that has printed `said`, all of it kept.
async fn serving(execs: &Path, tag: &str, said: &[u8]) -> (Hub, Agent, Link, Channel, u32) {
    let (hub, mut agent) = Agent::with(HubSpec::fresh(execs.to_owned()));
    agent.greet(Vec::new()).await;
    let link = hub.connect().await.unwrap();
    let mut channel = link.open(detached(tag), WINDOW).unwrap();
    let number = agent.opened().await;
    agent
        .say(&AgentMessage::Started {
            channel: number,
            pid: 7,
        })
        .await;
    agent.send(data(number, 0, said)).await;
    assert_eq!(read(&mut channel, said.len()).await, said);
    (hub, agent, link, channel, number)
}

#[tokio::test]
async fn a_recorded_command_continues_in_a_copy_with_every_byte_once() {
    let root = tempfile::tempdir().unwrap();
    let [execs, copy, first, second] =
        ["execs", "copy", "first", "second"].map(|name| root.path().join(name));
    let (hub, mut agent, _link, mut channel, number) = serving(&execs, "abc", b"one ").await;
    hub.record(first).await.unwrap();
    agent.send(data(number, 4, b"two ")).await;
    read(&mut channel, 4).await;
    let records = hub.record(second.clone()).await.unwrap();
    assert_eq!(records.len(), 1);
    let bounds: Vec<_> = records[0]
        .out
        .iter()
        .map(|segment| (segment.start, segment.bytes))
        .collect();
    assert_eq!(
        (records[0].command.as_str(), records[0].pid, bounds),
        ("serve it", Some(7), vec![(0, 4), (4, 4)])
    );
    // Later output is in no recorded file.
    agent.send(data(number, 8, b"here alone")).await;
    read(&mut channel, 10).await;
    assert_eq!(std::fs::read(second.join("abc/out.1")).unwrap(), b"two ");
    assert_eq!(
        std::fs::read(execs.join("abc/out.2")).unwrap(),
        b"here alone"
    );

    let (hub, mut agent) = Agent::with(restored(&copy, records, &second));
    agent
        .greet(vec![ChannelState {
            received: 3,
            ..state(number, "abc", (6, 10))
        }])
        .await;
    assert_eq!(
        agent.message().await,
        HostMessage::Resume {
            channel: number,
            out: 8,
            err: 0
        }
    );
    agent
        .say(&AgentMessage::Started {
            channel: number,
            pid: 7,
        })
        .await;
    agent
        .send(Frame::Window {
            channel: number,
            stream: StreamId::In,
            consumed: 1,
        })
        .await;
    agent.send(data(number, 8, b"three")).await;
    let link = hub.connect().await.unwrap();
    let mut channel = link
        .open(Open::Attach { tag: "abc".into() }, WINDOW)
        .unwrap();
    assert_eq!(read(&mut channel, 13).await, b"one two three");
    channel.input.write(b"typed").await.unwrap();
    assert_eq!(
        input(&mut agent).await,
        (3, b"typed".to_vec()),
        "input continues from the bytes that the guest has"
    );
    end(&mut agent, number, 13, 5).await;
    assert_eq!(
        (rest(&mut channel).await, outcome(&mut channel).await),
        (Vec::new(), Outcome::Exited { code: 5 })
    );
    assert_eq!(hub.execs().await[0].stdout_bytes, 13);
    // A record of the copy has everything again, and numbers of the old hub are not reused.
    let records = hub.record(root.path().join("third")).await.unwrap();
    assert_eq!(
        records[0]
            .out
            .iter()
            .map(|segment| segment.bytes)
            .sum::<u64>(),
        13
    );
    assert_eq!(
        agent.message().await,
        HostMessage::Close { channel: number }
    );
    let _next = link.open(exec(), WINDOW).unwrap();
    assert_eq!(agent.opened().await, number + 1);
}

#[tokio::test]
async fn a_revert_drops_output_after_the_capture_even_next_to_the_old_hub() {
    let root = tempfile::tempdir().unwrap();
    let [execs, into] = ["execs", "into"].map(|name| root.path().join(name));
    let (old, _old_agent, _link, _channel, number) =
        serving(&execs, "abc", b"captured later").await;
    let records = old.record(into.clone()).await.unwrap();
    let (hub, mut agent) = Agent::with(restored(&execs, records, &into));
    agent.greet(vec![state(number, "abc", (2, 8))]).await;
    assert_eq!(
        agent.message().await,
        HostMessage::Resume {
            channel: number,
            out: 8,
            err: 0
        }
    );
    agent.send(data(number, 8, b" again")).await;
    let link = hub.connect().await.unwrap();
    let mut channel = link
        .open(Open::Attach { tag: "abc".into() }, WINDOW)
        .unwrap();
    assert_eq!(read(&mut channel, 14).await, b"captured again");
    let records = hub.record(root.path().join("next")).await.unwrap();
    let kept: Vec<u8> = records[0]
        .out
        .iter()
        .flat_map(|s| std::fs::read(root.path().join("next/abc").join(&s.file)).unwrap())
        .collect();
    assert_eq!(
        kept, b"captured again",
        "recorded files hold what is kept and nothing more"
    );
    assert_eq!(
        std::fs::read(into.join("abc/out.0")).unwrap(),
        b"captured later"
    );
}

#[tokio::test]
async fn a_clients_command_can_be_attached_in_a_copy_from_the_guests_remaining_bytes() {
    let root = tempfile::tempdir().unwrap();
    let [execs, into] = ["execs", "into"].map(|name| root.path().join(name));
    let (hub, mut agent) = Agent::with(HubSpec::fresh(execs.clone()));
    agent.greet(Vec::new()).await;
    let link = hub.connect().await.unwrap();
    let (mut channel, number) = open(&link, &mut agent).await;
    agent
        .say(&AgentMessage::Started {
            channel: number,
            pid: 7,
        })
        .await;
    channel.control.started().await.unwrap().unwrap();
    let records = hub.record(into.clone()).await.unwrap();
    assert_eq!(
        (
            records[0].tag.as_str(),
            records[0].pid,
            records[0].out.len()
        ),
        ("tag", Some(7), 0)
    );

    let (hub, mut agent) = Agent::with(restored(&execs, records, &into));
    agent.greet(vec![state(number, "tag", (100, 103))]).await;
    assert_eq!(
        agent.message().await,
        HostMessage::Resume {
            channel: number,
            out: 100,
            err: 0
        }
    );
    agent.send(data(number, 100, b"abc")).await;
    let link = hub.connect().await.unwrap();
    let mut channel = link
        .open(Open::Attach { tag: "tag".into() }, WINDOW)
        .unwrap();
    assert_eq!(read(&mut channel, 3).await, b"abc");
    end(&mut agent, number, 103, 0).await;
    assert_eq!(outcome(&mut channel).await, Outcome::Exited { code: 0 });
    assert_eq!(hub.execs().await[0].stdout_bytes, 3);
}

#[tokio::test]
async fn ended_and_lost_commands_are_listed_and_other_channels_are_closed() {
    let root = tempfile::tempdir().unwrap();
    let [execs, into, copy] = ["execs", "into", "copy"].map(|name| root.path().join(name));
    let (hub, mut agent, link, mut channel, number) = serving(&execs, "ended", b"all of it").await;
    end(&mut agent, number, 9, 3).await;
    assert_eq!(outcome(&mut channel).await, Outcome::Exited { code: 3 });
    let _late = link.open(detached("late"), WINDOW).unwrap();
    while agent.message().await == (HostMessage::Close { channel: number }) {}
    let records = hub.record(into.clone()).await.unwrap();
    assert_eq!(records.len(), 2);

    let (hub, mut agent) = Agent::with(restored(&copy, records, &into));
    let hostile = ["", "../up", "tag", "tag"].map(|tag| tag.to_owned());
    let listed = hostile
        .iter()
        .zip(40..)
        .map(|(tag, channel)| state(channel, tag, (0, 0)))
        .collect();
    agent.greet(listed).await;
    let mut told = [
        agent.message().await,
        agent.message().await,
        agent.message().await,
        agent.message().await,
    ];
    told.sort_by_key(|message| format!("{message:?}"));
    let closed = [40, 41, 43].map(|channel| HostMessage::Close { channel });
    assert_eq!(told[..3], closed);
    assert_eq!(
        told[3],
        HostMessage::Resume {
            channel: 42,
            out: 0,
            err: 0
        }
    );
    hub.ready(PATIENCE).await.unwrap();
    let listed: Vec<_> = hub
        .execs()
        .await
        .into_iter()
        .map(|exec| (exec.id, exec.ended))
        .collect();
    let lost = super::super::from_agent::FORGOTTEN.to_owned();
    let wanted = [
        ("ended", Some("exit 3".to_owned())),
        ("late", Some(lost)),
        ("tag", None),
    ];
    assert_eq!(listed, wanted.map(|(id, ended)| (id.to_owned(), ended)));
    let link = hub.connect().await.unwrap();
    let mut channel = link
        .open(
            Open::Attach {
                tag: "ended".into(),
            },
            WINDOW,
        )
        .unwrap();
    assert_eq!(
        (rest(&mut channel).await, outcome(&mut channel).await),
        (b"all of it".to_vec(), Outcome::Exited { code: 3 })
    );
    let _next = link.open(exec(), WINDOW).unwrap();
    assert_eq!(agent.opened().await, 44);
}

#[tokio::test]
async fn a_resumed_guest_continues_with_each_byte_in_flight_once() {
    let (hub, mut agent, _execs) = Agent::start();
    agent.greet(Vec::new()).await;
    let link = hub.connect().await.unwrap();
    let (mut channel, number) = open(&link, &mut agent).await;
    agent
        .say(&AgentMessage::Started {
            channel: number,
            pid: 7,
        })
        .await;
    agent.send(data(number, 0, b"abc")).await;
    assert_eq!(read(&mut channel, 3).await, b"abc");
    channel.input.write(b"12345").await.unwrap();
    assert_eq!(input(&mut agent).await, (0, b"12345".to_vec()));

    hub.suspend("it pauses".into()).await;
    drop(agent);
    // Messages in the meantime wait: those to the command, and those to the guest.
    channel.input.write(b"678").await.unwrap();
    let mut late = link.open(exec(), WINDOW).unwrap();
    let asking = tokio::spawn({
        let link = link.clone();
        async move { link.request(Request::Ping, PATIENCE).await }
    });
    assert!(
        hub.ready(Duration::from_millis(10)).await.is_err(),
        "there is no agent to be ready"
    );

    let (mut agent, port) = Agent::port();
    hub.reconnect(port).await;
    // Two of the five input bytes were lost; of five output bytes, three had arrived.
    agent
        .greet(vec![ChannelState {
            received: 3,
            ..state(number, "tag", (0, 5))
        }])
        .await;
    hub.ready(PATIENCE).await.unwrap();
    hub.admit().await;
    let mut resumed = false;
    let mut opened = None;
    let mut arrived = Vec::new();
    while !resumed || opened.is_none() || arrived.len() < 5 {
        match agent.next().await {
            Decoded::Frame(Frame::Data { offset, bytes, .. }) => {
                assert_eq!(offset, 3 + arrived.len() as u64);
                arrived.extend(bytes);
            }
            Decoded::Frame(Frame::Message(bytes)) => match from_bytes(&bytes).unwrap() {
                HostMessage::Resume { channel, out, err } => {
                    assert_eq!((channel, out, err), (number, 3, 0));
                    resumed = true;
                }
                HostMessage::Open { channel, .. } => opened = Some(channel),
                HostMessage::Request { id, .. } => {
                    agent
                        .say(&AgentMessage::Reply {
                            id,
                            reply: Ok(Reply::Done),
                        })
                        .await
                }
                other => panic!("{other:?}"),
            },
            _ => {}
        }
    }
    assert_eq!(arrived, b"45678");
    agent.send(data(number, 3, b"de")).await;
    assert_eq!(read(&mut channel, 2).await, b"de");
    let opened = opened.unwrap();
    agent
        .say(&AgentMessage::Started {
            channel: opened,
            pid: 8,
        })
        .await;
    assert_eq!(
        timeout(PATIENCE, late.control.started())
            .await
            .unwrap()
            .unwrap(),
        Ok(8)
    );
    drop(asking.await.unwrap());
}

/// A guest that has just continued may show what the host's directories were.
#[tokio::test]
async fn a_resumed_guest_gets_commands_when_it_is_admitted() {
    let (hub, mut agent, _execs) = Agent::start();
    agent.greet(Vec::new()).await;
    let link = hub.connect().await.unwrap();
    hub.suspend("it pauses".into()).await;
    drop(agent);
    let mut before = link.open(exec(), WINDOW).unwrap();
    before.input.write(b"12").await.unwrap();
    let (mut agent, port) = Agent::port();
    hub.reconnect(port).await;
    agent.greet(Vec::new()).await;
    hub.ready(PATIENCE).await.unwrap();
    let mut after = link.open(exec(), WINDOW).unwrap();
    after.input.write(b"34").await.unwrap();
    // Requests pass: one of them asks the guest to get ready.
    let asking = tokio::spawn({
        let link = link.clone();
        async move { link.request(Request::Ping, PATIENCE).await }
    });
    let HostMessage::Request { id, .. } = agent.message().await else {
        panic!("nothing but the request passes")
    };
    let reply = Ok(Reply::Done);
    agent.say(&AgentMessage::Reply { id, reply }).await;
    drop(asking.await.unwrap());
    hub.admit().await;
    let mut opened = Vec::new();
    let mut arrived = Vec::new();
    while arrived.len() < 2 {
        match agent.next().await {
            Decoded::Frame(Frame::Message(bytes)) => match from_bytes(&bytes).unwrap() {
                HostMessage::Open { channel, .. } => opened.push(channel),
                other => panic!("{other:?}"),
            },
            Decoded::Frame(Frame::Data { channel, bytes, .. }) => {
                assert!(opened.contains(&channel), "input follows its open");
                arrived.push(bytes);
            }
            _ => {}
        }
    }
    arrived.sort();
    assert_eq!(arrived, [b"12", b"34"]);
}

/// An agent ignores what is for a command that it does not know.
#[tokio::test]
async fn a_signal_for_a_command_that_waits_follows_its_open() {
    let (hub, mut agent, _execs) = Agent::start();
    agent.greet(Vec::new()).await;
    let link = hub.connect().await.unwrap();
    hub.suspend("it pauses".into()).await;
    drop(agent);
    let before = link.open(exec(), WINDOW).unwrap();
    before.control.signal(2).unwrap();
    let (mut agent, port) = Agent::port();
    hub.reconnect(port).await;
    agent.greet(Vec::new()).await;
    hub.ready(PATIENCE).await.unwrap();
    let after = link.open(exec(), WINDOW).unwrap();
    for signal in 0..100 {
        after.control.signal(signal).unwrap();
    }
    // The hub has read the signals when it has read the request.
    let asking = tokio::spawn({
        let link = link.clone();
        async move { link.request(Request::Ping, PATIENCE).await }
    });
    let HostMessage::Request { id, .. } = agent.message().await else {
        panic!("nothing but the request passes")
    };
    let reply = Ok(Reply::Done);
    agent.say(&AgentMessage::Reply { id, reply }).await;
    drop(asking.await.unwrap());
    hub.admit().await;
    let first = agent.opened().await;
    let signal = |channel, signal| HostMessage::Signal { channel, signal };
    assert_eq!(agent.message().await, signal(first, 2));
    let second = agent.opened().await;
    // Of many, the latest.
    for number in 36..100 {
        assert_eq!(agent.message().await, signal(second, number));
    }
}

#[tokio::test]
async fn connections_are_lost_and_requests_void_when_the_guest_pauses() {
    let (hub, mut agent, _execs) = Agent::start();
    agent.greet(Vec::new()).await;
    let link = hub.connect().await.unwrap();
    let mut connection = link.open(Open::Connect { port: 80 }, WINDOW).unwrap();
    let number = agent.opened().await;
    let (mut command, running) = open(&link, &mut agent).await;
    let asking = tokio::spawn({
        let link = link.clone();
        async move { link.request(Request::Ping, PATIENCE).await }
    });
    assert!(matches!(agent.message().await, HostMessage::Request { .. }));
    hub.suspend("it pauses".into()).await;
    assert_eq!(
        outcome(&mut connection).await,
        Outcome::Lost {
            reason: "it pauses".into()
        }
    );
    let refused = asking.await.unwrap();
    assert!(
        matches!(&refused, Err(LinkError::Ended { reason: Some(reason) }) if reason == "it pauses"),
        "{refused:?}"
    );

    let (mut agent, port) = Agent::port();
    hub.reconnect(port).await;
    agent
        .greet(vec![
            state(number, "", (0, 0)),
            state(running, "tag", (0, 0)),
        ])
        .await;
    let mut told = [agent.message().await, agent.message().await];
    told.sort_by_key(|message| format!("{message:?}"));
    let wanted = [
        HostMessage::Close { channel: number },
        HostMessage::Resume {
            channel: running,
            out: 0,
            err: 0,
        },
    ];
    assert_eq!(told, wanted, "the guest's end is closed, which resets it");
    end(&mut agent, running, 0, 0).await;
    assert_eq!(outcome(&mut command).await, Outcome::Exited { code: 0 });
}

#[tokio::test]
async fn a_guest_of_another_moment_does_not_continue_a_stream() {
    let (hub, mut agent, _execs) = Agent::start();
    agent.greet(Vec::new()).await;
    let link = hub.connect().await.unwrap();
    let (mut channel, number) = open(&link, &mut agent).await;
    agent.send(data(number, 0, b"abc")).await;
    read(&mut channel, 3).await;
    hub.resync().await;
    agent.greet(vec![state(number, "tag", (0, 2))]).await;
    assert!(matches!(outcome(&mut channel).await, Outcome::Lost { .. }));
    assert_eq!(
        agent.message().await,
        HostMessage::Close { channel: number }
    );
}

#[tokio::test]
async fn a_gate_admits_or_refuses_commands_and_nothing_else() {
    let execs = tempfile::tempdir().unwrap();
    let (gate, mut asked) = mpsc::channel::<Gate>(1);
    let (hub, mut agent) = Agent::with(HubSpec {
        gate: Some(gate),
        ..HubSpec::fresh(execs.path().to_owned())
    });
    agent.greet(Vec::new()).await;
    let link = hub.connect().await.unwrap();
    let mut refused = link.open(exec(), WINDOW).unwrap();
    let first = timeout(PATIENCE, asked.recv()).await.unwrap().unwrap();
    let _file = hub
        .connect()
        .await
        .unwrap()
        .open(
            Open::ListDir {
                path: b"/".to_vec(),
            },
            WINDOW,
        )
        .unwrap();
    agent.opened().await;
    first.reply.send(Err("the disk is full".into())).unwrap();
    let wanted = Outcome::NotStarted(Failure {
        errno: 0,
        message: "the disk is full".into(),
    });
    assert_eq!(outcome(&mut refused).await, wanted);
    let mut admitted = link.open(detached("abc"), WINDOW).unwrap();
    let second = timeout(PATIENCE, asked.recv()).await.unwrap().unwrap();
    second.reply.send(Ok(())).unwrap();
    let number = loop {
        if let HostMessage::Open {
            channel,
            open: Open::Exec(_),
            ..
        } = agent.message().await
        {
            break channel;
        }
    };
    end(&mut agent, number, 0, 0).await;
    assert_eq!(outcome(&mut admitted).await, Outcome::Exited { code: 0 });
    drop(asked);
    let mut late = link.open(exec(), WINDOW).unwrap();
    assert!(
        matches!(outcome(&mut late).await, Outcome::NotStarted(_)),
        "a gate that is gone admits no command"
    );
}

#[tokio::test]
async fn activity_counts_what_may_have_changed_the_guest() {
    let (hub, mut agent, _execs) = Agent::start();
    agent.greet(Vec::new()).await;
    hub.ready(PATIENCE).await.unwrap();
    let link = hub.connect().await.unwrap();
    assert_eq!((hub.activity(), hub.clients()), (Activity::default(), 0));
    let reading = link
        .open(
            Open::ReadFile {
                path: b"/x".to_vec(),
            },
            WINDOW,
        )
        .unwrap();
    agent.opened().await;
    assert_eq!((hub.activity(), hub.clients()), (Activity::default(), 1));
    drop(reading);
    timeout(PATIENCE, hub.idle()).await.unwrap();
    assert!(matches!(agent.message().await, HostMessage::Close { .. }));

    let (mut channel, number) = open(&link, &mut agent).await;
    let during = hub.activity();
    assert!(during.busy && during.count > 0);
    end(&mut agent, number, 0, 0).await;
    outcome(&mut channel).await;
    let mut census = hub.census.clone();
    timeout(PATIENCE, census.wait_for(|census| !census.activity.busy))
        .await
        .unwrap()
        .unwrap();
    let after = hub.activity();
    assert!(after.count > during.count, "an end counts, too");
    drop(channel);
    timeout(PATIENCE, hub.idle()).await.unwrap();
    assert_eq!(hub.activity(), after);
    let changing = Request::MakeDir {
        path: b"/x".to_vec(),
        parents: false,
        mode: 0o755,
    };
    for (request, counts) in [(Request::Metrics, 0), (changing, 1)] {
        let before = hub.activity().count;
        drop(link.request(request, Duration::from_millis(1)).await);
        while !matches!(agent.message().await, HostMessage::Request { .. }) {}
        assert_eq!(hub.activity().count, before + counts);
    }
}

/// Connects through a forward; `started` says how far its connection into the guest has come.
async fn forwarded(
    agent: &mut Agent,
    address: std::net::SocketAddr,
    started: bool,
) -> (TcpStream, u32) {
    let stream = TcpStream::connect(address).await.unwrap();
    let number = agent.opened().await;
    if started {
        agent
            .say(&AgentMessage::Started {
                channel: number,
                pid: 0,
            })
            .await;
        agent.send(data(number, 0, b"x")).await;
        let mut byte = [0];
        timeout(PATIENCE, stream.readable()).await.unwrap().unwrap();
        assert_eq!(stream.try_read(&mut byte).unwrap(), 1);
    }
    (stream, number)
}

async fn is_reset(mut stream: TcpStream) -> bool {
    let read = timeout(PATIENCE, stream.read(&mut [0]))
        .await
        .expect("a connection does not hang");
    matches!(read, Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset)
}

#[tokio::test]
async fn a_dropped_forward_resets_its_connections_and_leaves_its_port_to_the_next() {
    let (hub, mut agent, _execs) = Agent::start();
    agent.greet(Vec::new()).await;
    let guest = Guest::new(hub.connect().await.unwrap());
    let forward = guest
        .forward(TcpListener::bind("127.0.0.1:0").await.unwrap(), 80)
        .unwrap();
    let address = forward.address();
    let listener = forward.listener();
    let (open, _) = forwarded(&mut agent, address, true).await;
    let (opening, _) = forwarded(&mut agent, address, false).await;
    drop(forward);
    assert!(is_reset(open).await && is_reset(opening).await);

    let (hub, mut agent, _execs) = Agent::start();
    agent.greet(Vec::new()).await;
    let guest = Guest::new(hub.connect().await.unwrap());
    let forward = guest.forward(listener, 80).unwrap();
    assert_eq!(forward.address(), address);
    let (paused, _) = forwarded(&mut agent, address, true).await;
    hub.suspend("it pauses".into()).await;
    assert!(is_reset(paused).await);
}

#[tokio::test]
async fn a_forwarded_connection_is_closed_only_after_the_guest_has_its_last_bytes() {
    let (hub, mut agent, _execs) = Agent::start();
    agent.greet(Vec::new()).await;
    let guest = Guest::new(hub.connect().await.unwrap());
    let forward = guest
        .forward(TcpListener::bind("127.0.0.1:0").await.unwrap(), 80)
        .unwrap();
    let (mut stream, number) = forwarded(&mut agent, forward.address(), true).await;
    agent
        .send(Frame::Eof {
            channel: number,
            stream: StreamId::Out,
            offset: 1,
        })
        .await;
    stream.write_all(b"the last bytes").await.unwrap();
    stream.shutdown().await.unwrap();
    let mut arrived = Vec::new();
    loop {
        match agent.next().await {
            Decoded::Frame(Frame::Data { bytes, .. }) => arrived.extend(bytes),
            Decoded::Frame(Frame::Eof { .. }) => break,
            Decoded::Frame(Frame::Message(bytes)) => {
                panic!("{:?}", from_bytes::<HostMessage>(&bytes))
            }
            _ => {}
        }
    }
    assert_eq!(arrived, b"the last bytes");
    agent
        .say(&AgentMessage::Ended {
            channel: number,
            outcome: Outcome::Done,
        })
        .await;
    assert_eq!(
        agent.message().await,
        HostMessage::Close { channel: number }
    );
    assert!(!is_reset(stream).await);
}
