//! The hub against agents that break the rules. Well-behaved ones are real: see `tests/vm`.

mod labels;
mod restore;

use std::time::Duration;

use sandtree_proto::frame::{Frame, StreamId, encode_preamble};
use sandtree_proto::message::{self, from_bytes};
use sandtree_proto::{
    AgentHello, AgentMessage, ChannelState, Decoded, Decoder, ExecStart, HostMessage, HubFailure,
    Open, Outcome, Reply, Request,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::timeout;

use super::{Hub, HubSpec};
use crate::link::{Channel, Link, LinkError, Refusal};

const PATIENCE: Duration = Duration::from_secs(10);
const WINDOW: u32 = 1000;

/// The other end of a hub's port, which sends whatever a test wants.
struct Agent {
    port: UnixStream,
    decoder: Decoder,
}

impl Agent {
    fn start() -> (Hub, Agent, tempfile::TempDir) {
        let execs = tempfile::tempdir().unwrap();
        let (hub, agent) = Agent::with(HubSpec::fresh(execs.path().to_owned()));
        (hub, agent, execs)
    }

    fn with(spec: HubSpec) -> (Hub, Agent) {
        let (agent, port) = Agent::port();
        (Hub::start(port, spec), agent)
    }

    /// An agent, and the port that leads to it.
    fn port() -> (Agent, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (
            Agent {
                port: ours,
                decoder: Decoder::new(),
            },
            theirs,
        )
    }

    async fn next(&mut self) -> Decoded {
        loop {
            match self.decoder.next() {
                Some(found) => return found.expect("the hub makes sense"),
                None => {
                    let mut buffer = vec![0; 1 << 16];
                    let count = timeout(PATIENCE, self.port.read(&mut buffer))
                        .await
                        .expect("the hub speaks")
                        .unwrap();
                    assert_ne!(count, 0, "the hub closed the port");
                    self.decoder.feed(&buffer[..count]);
                }
            }
        }
    }

    async fn message(&mut self) -> HostMessage {
        loop {
            match self.next().await {
                Decoded::Frame(Frame::Message(bytes)) => return from_bytes(&bytes).unwrap(),
                _ => continue,
            }
        }
    }

    async fn send(&mut self, frame: Frame) {
        let mut bytes = Vec::new();
        frame.encode(&mut bytes);
        self.port.write_all(&bytes).await.unwrap();
    }

    async fn say(&mut self, message: &AgentMessage) {
        self.send(message::to_frame(message).unwrap()).await;
    }

    /// Waits for a greeting and answers it.
    async fn greet(&mut self, channels: Vec<ChannelState>) {
        let nonce = loop {
            self.decoder.resync();
            if let Decoded::Preamble(nonce) = self.next().await {
                break nonce;
            }
        };
        assert!(matches!(self.message().await, HostMessage::Hello(_)));
        let mut bytes = Vec::new();
        encode_preamble(&mut bytes, nonce);
        self.port.write_all(&bytes).await.unwrap();
        self.say(&AgentMessage::Hello(AgentHello {
            version: 1,
            build: "test".into(),
            channels,
        }))
        .await;
    }

    /// Receives the next open.
    async fn opened(&mut self) -> u32 {
        match self.message().await {
            HostMessage::Open { channel, .. } => channel,
            other => panic!("{other:?}"),
        }
    }
}

fn exec() -> Open {
    let argv = vec![b"true".to_vec()];
    let env = Vec::new();
    let tag = "tag".into();
    let user = String::new();
    Open::Exec(ExecStart {
        tag,
        argv,
        env,
        cwd: Vec::new(),
        user,
        terminal: None,
        stdin: true,
        timeout_ms: None,
    })
}

async fn open(link: &Link, agent: &mut Agent) -> (Channel, u32) {
    let channel = link.open(exec(), WINDOW).unwrap();
    let number = agent.opened().await;
    (channel, number)
}

fn data(channel: u32, offset: u64, bytes: &[u8]) -> Frame {
    Frame::Data {
        channel,
        stream: StreamId::Out,
        offset,
        bytes: bytes.to_vec(),
    }
}

#[tokio::test]
async fn channels_opened_before_the_agent_answers_are_opened_when_it_does() {
    let (hub, mut agent, _execs) = Agent::start();
    let link = hub.connect().await.unwrap();
    let mut channel = link.open(exec(), WINDOW).unwrap();
    agent.greet(Vec::new()).await;
    let number = agent.opened().await;
    agent
        .say(&AgentMessage::Started {
            channel: number,
            pid: 7,
        })
        .await;
    assert_eq!(
        timeout(PATIENCE, channel.control.started())
            .await
            .unwrap()
            .unwrap(),
        Ok(7)
    );
}

#[tokio::test]
async fn a_break_neither_loses_nor_repeats_a_byte() {
    let (hub, mut agent, _execs) = Agent::start();
    agent.greet(Vec::new()).await;
    let link = hub.connect().await.unwrap();
    let (mut channel, number) = open(&link, &mut agent).await;
    channel.input.write(b"typed").await.unwrap();
    agent
        .say(&AgentMessage::Started {
            channel: number,
            pid: 7,
        })
        .await;
    agent.send(data(number, 0, b"abc")).await;
    assert_eq!(channel.out.next().await.unwrap().unwrap(), &b"abc"[..]);

    hub.resync().await;
    let state = ChannelState {
        channel: number,
        tag: "tag".into(),
        received: 2,
        out: (0, 5),
        err: (0, 0),
        outcome: None,
    };
    agent.greet(vec![state]).await;
    assert_eq!(
        agent.message().await,
        HostMessage::Resume {
            channel: number,
            out: 3,
            err: 0
        }
    );
    let resent = loop {
        if let Decoded::Frame(Frame::Data { offset, bytes, .. }) = agent.next().await {
            break (offset, bytes);
        }
    };
    assert_eq!(
        resent,
        (2, b"ped".to_vec()),
        "input continues from the bytes that the agent has"
    );
    agent.send(data(number, 2, b"cde")).await;
    assert_eq!(
        channel.out.next().await.unwrap().unwrap(),
        &b"de"[..],
        "what was heard before is not heard again"
    );
}

#[tokio::test]
async fn a_command_that_the_agent_has_lost_ends_with_that_reason() {
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
    channel.control.started().await.unwrap().unwrap();
    hub.resync().await;
    agent.greet(Vec::new()).await;
    let outcome = timeout(PATIENCE, channel.control.ended())
        .await
        .unwrap()
        .unwrap();
    assert!(matches!(outcome, Outcome::Lost { .. }), "{outcome:?}");
}

#[tokio::test]
async fn a_late_answer_is_not_used_for_the_next_request() {
    let (hub, mut agent, _execs) = Agent::start();
    agent.greet(Vec::new()).await;
    let link = hub.connect().await.unwrap();
    let late = link.request(Request::Ping, Duration::from_millis(1)).await;
    assert!(matches!(late, Err(LinkError::Timeout { .. })), "{late:?}");
    let HostMessage::Request { id: first, .. } = agent.message().await else {
        panic!("a request was sent")
    };
    let asking = tokio::spawn(async move { link.request(Request::Metrics, PATIENCE).await });
    let HostMessage::Request { id: second, .. } = agent.message().await else {
        panic!("a request was sent")
    };
    agent
        .say(&AgentMessage::Reply {
            id: first,
            reply: Ok(Reply::Done),
        })
        .await;
    let stat = sandtree_proto::Failure {
        errno: 5,
        message: "the second".into(),
    };
    agent
        .say(&AgentMessage::Reply {
            id: second,
            reply: Err(stat.clone()),
        })
        .await;
    let answer = asking.await.unwrap();
    assert!(
        matches!(&answer, Err(LinkError::Refused(Refusal::Guest(failure))) if *failure == stat),
        "{answer:?}"
    );
}

#[tokio::test]
async fn an_agent_that_keeps_exceeding_the_window_is_given_up_and_all_clients_learn_it() {
    let (hub, mut agent, _execs) = Agent::start();
    agent.greet(Vec::new()).await;
    let link = hub.connect().await.unwrap();
    let (mut channel, number) = open(&link, &mut agent).await;
    let state = || ChannelState {
        channel: number,
        tag: "tag".into(),
        received: 0,
        out: (0, 0),
        err: (0, 0),
        outcome: None,
    };
    for _ in 0..super::switch::RESYNC_MAX {
        agent
            .send(data(number, 0, &vec![0; WINDOW as usize + 1]))
            .await;
        agent.greet(vec![state()]).await;
    }
    agent
        .send(data(number, 0, &vec![0; WINDOW as usize + 1]))
        .await;
    let outcome = timeout(PATIENCE, channel.control.ended())
        .await
        .unwrap()
        .unwrap();
    assert!(
        matches!(&outcome, Outcome::Failed(failure)
            if failure.of_hub() == Some(HubFailure::Broken) && failure.message.contains("protocol")),
        "{outcome:?}"
    );
    let refused = timeout(PATIENCE, link.request(Request::Ping, PATIENCE))
        .await
        .unwrap();
    assert!(
        matches!(refused, Err(LinkError::Broken { .. })),
        "nothing waits for an agent that was given up: {refused:?}"
    );
}

#[tokio::test]
async fn what_the_hub_refuses_is_not_the_end_of_the_guest() {
    let (hub, mut agent, _execs) = Agent::start();
    agent.greet(Vec::new()).await;
    let link = hub.connect().await.unwrap();
    // The agent of these tests speaks version 1.
    let newer = link.request(Request::Thaw, PATIENCE).await;
    assert!(
        matches!(newer, Err(LinkError::Refused(Refusal::AgentTooOld))),
        "{newer:?}"
    );
    let tag = "0123456789ab".into();
    let channel = link.open(Open::Attach { tag }, WINDOW).unwrap();
    let mut control = channel.control;
    let unknown = timeout(PATIENCE, control.ended()).await.unwrap().unwrap();
    assert!(
        matches!(&unknown, Outcome::Failed(failure)
            if failure.of_hub() == Some(HubFailure::NoCommand)),
        "{unknown:?}"
    );
    hub.close("the test is over".into()).await;
    let ended = link.request(Request::Ping, PATIENCE).await;
    assert!(matches!(ended, Err(LinkError::Ended { .. })), "{ended:?}");
}

#[tokio::test]
async fn requests_over_the_bound_are_refused_and_the_connection_stays() {
    let (hub, _agent, _execs) = Agent::start();
    let link = hub.connect().await.unwrap();
    for _ in 0..super::switch::QUEUE_MAX {
        // Sent at its first poll, and given up at once.
        tokio::select! {
            biased;
            _ = link.request(Request::Ping, PATIENCE) => panic!("no agent answers"),
            () = std::future::ready(()) => {}
        }
    }
    let over = timeout(PATIENCE, link.request(Request::Ping, PATIENCE)).await;
    let over = over.expect("the hub answers");
    assert!(
        matches!(over, Err(LinkError::Refused(Refusal::QueueFull))),
        "{over:?}"
    );
}

#[tokio::test]
async fn an_agent_cannot_speak_for_the_hub() {
    let (hub, mut agent, _execs) = Agent::start();
    agent.greet(Vec::new()).await;
    let link = hub.connect().await.unwrap();
    let asking = tokio::spawn(async move { link.request(Request::Ping, PATIENCE).await });
    let HostMessage::Request { id, .. } = agent.message().await else {
        panic!("a request was sent")
    };
    let reply = Err(HubFailure::Ended.failure("made up"));
    agent.say(&AgentMessage::Reply { id, reply }).await;
    let answer = asking.await.unwrap();
    assert!(
        matches!(&answer, Err(LinkError::Refused(Refusal::Guest(failure))) if failure.errno == 0),
        "{answer:?}"
    );
}

#[tokio::test]
async fn the_channels_of_a_dropped_link_are_closed() {
    let (hub, mut agent, _execs) = Agent::start();
    agent.greet(Vec::new()).await;
    let link = hub.connect().await.unwrap();
    let (channel, number) = open(&link, &mut agent).await;
    channel.control.signal(15).unwrap();
    drop((channel, link));
    assert_eq!(
        agent.message().await,
        HostMessage::Signal {
            channel: number,
            signal: 15
        },
        "said before it was dropped"
    );
    assert_eq!(
        agent.message().await,
        HostMessage::Close { channel: number }
    );
}

#[tokio::test]
async fn a_closed_hub_closes_the_connections_of_its_clients() {
    let (hub, mut agent, _execs) = Agent::start();
    agent.greet(Vec::new()).await;
    let link = hub.connect().await.unwrap();
    hub.close("the test is over".into()).await;
    timeout(PATIENCE, link.down())
        .await
        .expect("an idle client hears of it, too");
}

/// A client reports used bytes as often as it likes; the agent receives the last report.
#[tokio::test]
async fn an_agent_that_does_not_read_gets_one_report_of_used_bytes() {
    let (hub, mut agent, _execs) = Agent::start();
    agent.greet(Vec::new()).await;
    let link = hub.connect().await.unwrap();
    let (mut channel, number) = open(&link, &mut agent).await;
    // Fills the port, so that nothing more goes out until it is read.
    let filler = link
        .open(
            Open::WriteFile {
                path: b"/x".to_vec(),
                mode: 0,
                uid: 0,
                gid: 0,
            },
            1 << 20,
        )
        .unwrap();
    let mut input = filler.input.clone();
    input.write(&vec![7; 1 << 20]).await.unwrap();
    for offset in 0..30_000 {
        agent.send(data(number, offset, b"x")).await;
        channel.out.next().await.unwrap().unwrap();
    }
    let mut reports = Vec::new();
    while reports.last() != Some(&30_000) {
        if let Decoded::Frame(Frame::Window { consumed, .. }) = agent.next().await {
            reports.push(consumed);
        }
    }
    assert!(reports.len() < 30, "{reports:?}");
}

#[tokio::test]
async fn one_client_that_breaks_the_protocol_does_not_harm_another() {
    let (hub, mut agent, _execs) = Agent::start();
    agent.greet(Vec::new()).await;
    let link = hub.connect().await.unwrap();
    let (mut rude, theirs) = UnixStream::pair().unwrap();
    hub.serve(theirs).await;
    let mut bytes = Vec::new();
    encode_preamble(&mut bytes, sandtree_proto::Nonce([1; 16]));
    bytes.extend([0xEE; 5000]);
    rude.write_all(&bytes).await.unwrap();
    let mut rest = Vec::new();
    timeout(PATIENCE, rude.read_to_end(&mut rest))
        .await
        .expect("it is cut off")
        .unwrap();
    let (_channel, number) = open(&link, &mut agent).await;
    assert!(number > 0);
}

/// With any invented frames of an agent, there is no panic, and the hub can always be closed with
/// the reason for all clients.
#[tokio::test]
async fn invented_frames_do_no_harm() {
    let seed = std::time::SystemTime::UNIX_EPOCH
        .elapsed()
        .unwrap()
        .as_nanos() as u64
        | 1;
    println!("seed {seed}");
    let mut random = seed;
    let mut number = move |limit: u64| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random % limit
    };
    for _ in 0..30 {
        let (hub, mut agent, _execs) = Agent::start();
        agent.greet(Vec::new()).await;
        let link = hub.connect().await.unwrap();
        let (mut channel, _) = open(&link, &mut agent).await;
        for _ in 0..40 {
            let channel = number(4) as u32;
            let offset = number(6) * 500;
            let stream = [StreamId::In, StreamId::Out, StreamId::Err][number(3) as usize];
            let frame = match number(6) {
                0 => Frame::Data {
                    channel,
                    stream,
                    offset,
                    bytes: vec![7; number(1500) as usize],
                },
                1 => Frame::Eof {
                    channel,
                    stream,
                    offset,
                },
                2 => Frame::Window {
                    channel,
                    stream,
                    consumed: offset,
                },
                3 => message::to_frame(&AgentMessage::Started { channel, pid: 1 }).unwrap(),
                4 => message::to_frame(&AgentMessage::Reply {
                    id: channel,
                    reply: Ok(Reply::Done),
                })
                .unwrap(),
                _ => Frame::Message((0..number(40)).map(|_| number(256) as u8).collect()),
            };
            agent.send(frame).await;
        }
        timeout(PATIENCE, hub.close("the test is over".into()))
            .await
            .expect("a hub closes whatever its agent did");
        let ended = timeout(PATIENCE, channel.control.ended())
            .await
            .expect("the channel ends");
        assert!(matches!(ended, Ok(Outcome::Lost { .. })), "{ended:?}");
    }
}
