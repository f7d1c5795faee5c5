//! A small host that drives the real agent over a socket.
#![allow(dead_code, reason = "each test binary uses its own part of it")]

use std::collections::HashMap;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use sandtree_proto::frame::{encode_data, encode_host_preamble};
use sandtree_proto::message::{from_bytes, to_frame};
use sandtree_proto::{
    AgentHello, AgentMessage, Decoded, Decoder, ExecStart, Failure, Frame, HostHello, HostMessage,
    MAX_PAYLOAD, Nonce, Open, Outcome, Reply, Request, StreamId,
};

pub const WINDOW: u32 = 256 * 1024;
const DEADLINE: Duration = Duration::from_secs(30);

/// Everything that one channel has received.
#[derive(Debug, Default)]
pub struct Seen {
    pub pid: Option<u32>,
    pub out: Vec<u8>,
    pub err: Vec<u8>,
    /// The number of received bytes of `Out` and `Err`, kept or not.
    pub counts: [u64; 2],
    pub ended: [bool; 2],
    pub outcome: Option<Outcome>,
    pub in_sent: u64,
    pub in_consumed: u64,
    /// Counts the bytes without keeping them.
    pub forget: bool,
    /// Does not return the windows, like a reader that has stopped.
    pub stalled: bool,
}

impl Seen {
    pub fn is_over(&self) -> bool {
        self.outcome.is_some() && self.ended == [true, true]
    }
}

pub struct Client {
    socket: UnixStream,
    decoder: Decoder,
    nonce: u8,
    next: u32,
    buffer: Vec<u8>,
    pub hello: Option<AgentHello>,
    pub channels: HashMap<u32, Seen>,
    pub replies: HashMap<u32, Result<Reply, Failure>>,
}

/// The agent under test; dropping it closes the socket, which ends it, and waits.
pub struct Agent {
    pub client: Client,
    pub process: Child,
}

impl Agent {
    pub fn start(arguments: &[&str]) -> Self {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_sandtree-agent"));
        let process = command
            .args(["--fd", "0"])
            .args(arguments)
            .stdin(OwnedFd::from(theirs))
            .spawn()
            .unwrap();
        let mut client = Client::new(ours);
        client.connect();
        Self { client, process }
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.client
            .socket
            .shutdown(std::net::Shutdown::Both)
            .unwrap();
        let status = self.process.wait().unwrap();
        assert!(
            status.success() || std::thread::panicking(),
            "the agent ended with {status}"
        );
    }
}

pub fn exec(argv: &[&str]) -> ExecStart {
    ExecStart {
        tag: "test".into(),
        argv: argv
            .iter()
            .map(|argument| argument.as_bytes().to_vec())
            .collect(),
        env: vec![],
        cwd: b"/".to_vec(),
        user: String::new(),
        terminal: None,
        stdin: false,
        timeout_ms: None,
    }
}

pub fn shell(script: &str) -> ExecStart {
    // starts: the program of exec(…) in crates/agent/tests
    // starts: the script of shell(…) in crates/agent/tests
    exec(&["sh", "-c", script])
}

impl Client {
    pub fn new(socket: UnixStream) -> Self {
        socket
            .set_read_timeout(Some(Duration::from_millis(100)))
            .unwrap();
        Self {
            socket,
            decoder: Decoder::new(),
            nonce: 0,
            next: 1,
            buffer: vec![0; 256 * 1024],
            hello: None,
            channels: HashMap::new(),
            replies: HashMap::new(),
        }
    }

    /// Starts again, as after a break, and waits for the agent's hello.
    pub fn connect(&mut self) {
        self.nonce += 1;
        self.hello = None;
        self.decoder = Decoder::new();
        let mut bytes = Vec::new();
        encode_host_preamble(&mut bytes, Nonce([self.nonce; 16]));
        self.raw(&bytes);
        self.send(&HostMessage::Hello(HostHello {
            version_min: 1,
            version_max: 1,
        }));
        self.until("hello", |client| client.hello.is_some());
    }

    /// Continues every channel from the offsets of this end.
    pub fn resume_all(&mut self) {
        let offsets: Vec<_> = self
            .channels
            .iter()
            .map(|(&channel, seen)| (channel, seen.counts))
            .collect();
        for (channel, [out, err]) in offsets {
            self.send(&HostMessage::Resume { channel, out, err });
        }
    }

    pub fn raw(&mut self, bytes: &[u8]) {
        self.socket.write_all(bytes).unwrap();
    }

    pub fn send(&mut self, message: &HostMessage) {
        let mut bytes = Vec::new();
        to_frame(message).unwrap().encode(&mut bytes);
        self.raw(&bytes);
    }

    pub fn open(&mut self, open: Open) -> u32 {
        self.open_with(WINDOW, open)
    }

    pub fn open_with(&mut self, window: u32, open: Open) -> u32 {
        let channel = self.next;
        self.next += 1;
        self.channels.insert(channel, Seen::default());
        self.send(&HostMessage::Open {
            channel,
            window,
            open,
        });
        channel
    }

    pub fn request(&mut self, request: Request) -> Result<Reply, Failure> {
        let id = self.next;
        self.next += 1;
        self.send(&HostMessage::Request { id, request });
        self.until("reply", |client| client.replies.contains_key(&id));
        self.replies.remove(&id).unwrap()
    }

    /// Runs a command to its end.
    pub fn run(&mut self, start: ExecStart) -> Seen {
        let channel = self.open(Open::Exec(start));
        self.finish(channel)
    }

    /// Waits for a channel's end, closes it and returns what it received.
    pub fn finish(&mut self, channel: u32) -> Seen {
        self.until("end of channel", |client| {
            client.channels[&channel].is_over()
        });
        self.send(&HostMessage::Close { channel });
        self.channels.remove(&channel).unwrap()
    }

    /// Sends input, within the window, and its end.
    pub fn feed(&mut self, channel: u32, bytes: &[u8]) {
        self.feed_some(channel, bytes);
        self.end_input(channel);
    }

    pub fn feed_some(&mut self, channel: u32, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            self.until("window", |client| {
                let seen = &client.channels[&channel];
                seen.in_sent < seen.in_consumed + u64::from(WINDOW) || seen.outcome.is_some()
            });
            let seen = self.channels.get_mut(&channel).unwrap();
            if seen.outcome.is_some() {
                return;
            }
            let room = seen.in_consumed + u64::from(WINDOW) - seen.in_sent;
            let (piece, rest) = bytes.split_at(bytes.len().min(room as usize).min(MAX_PAYLOAD));
            let mut frame = Vec::new();
            encode_data(&mut frame, channel, StreamId::In, seen.in_sent, piece);
            seen.in_sent += piece.len() as u64;
            self.raw(&frame);
            bytes = rest;
        }
    }

    pub fn end_input(&mut self, channel: u32) {
        let offset = self.channels[&channel].in_sent;
        self.frame(&Frame::Eof {
            channel,
            stream: StreamId::In,
            offset,
        });
    }

    pub fn frame(&mut self, frame: &Frame) {
        let mut bytes = Vec::new();
        frame.encode(&mut bytes);
        self.raw(&bytes);
    }

    /// Handles the agent's messages until the condition holds.
    pub fn until(&mut self, what: &str, mut condition: impl FnMut(&Self) -> bool) {
        let deadline = Instant::now() + DEADLINE;
        while !condition(self) {
            assert!(
                Instant::now() < deadline,
                "no {what} in time; channels: {:?}",
                self.summary()
            );
            self.take_in();
        }
    }

    fn summary(&self) -> Vec<String> {
        let line = |(channel, seen): (&u32, &Seen)| {
            format!(
                "{channel}: {:?} {:?} {:?}",
                seen.counts, seen.ended, seen.outcome
            )
        };
        self.channels.iter().map(line).collect()
    }

    /// Reads the socket once.
    pub fn take_in(&mut self) {
        match self.socket.read(&mut self.buffer) {
            Ok(0) => panic!("the agent closed the link"),
            Ok(count) => self.decoder.feed(&self.buffer[..count]),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                return;
            }
            Err(error) => panic!("the link broke: {error}"),
        }
        while let Some(decoded) = self.decoder.next() {
            match decoded.expect("the agent's frames are valid") {
                Decoded::Preamble(nonce) => assert!(nonce.0[0] <= self.nonce),
                Decoded::Frame(frame) => self.handle(frame),
            }
        }
    }

    /// Reads once and drops the data, as a break does.
    pub fn lose(&mut self) -> usize {
        self.socket.read(&mut self.buffer).unwrap_or(0)
    }

    fn handle(&mut self, frame: Frame) {
        match frame {
            Frame::Message(bytes) => self.message(from_bytes(&bytes).unwrap()),
            Frame::Data {
                channel,
                stream,
                offset,
                bytes,
            } => self.data(channel, stream, offset, &bytes),
            Frame::Eof {
                channel,
                stream,
                offset,
            } => {
                let Some(seen) = self.channels.get_mut(&channel) else {
                    return;
                };
                let index = stream as usize - 1;
                assert_eq!(seen.counts[index], offset);
                seen.ended[index] = true;
            }
            Frame::Window {
                channel, consumed, ..
            } => {
                if let Some(seen) = self.channels.get_mut(&channel) {
                    seen.in_consumed = seen.in_consumed.max(consumed);
                }
            }
        }
    }

    fn data(&mut self, channel: u32, stream: StreamId, offset: u64, bytes: &[u8]) {
        let Some(seen) = self.channels.get_mut(&channel) else {
            return;
        };
        let index = stream as usize - 1;
        assert_eq!(
            seen.counts[index], offset,
            "bytes of {stream:?} come in order"
        );
        seen.counts[index] += bytes.len() as u64;
        if !seen.forget {
            if index == 0 {
                &mut seen.out
            } else {
                &mut seen.err
            }
            .extend_from_slice(bytes);
        }
        let consumed = seen.counts[index];
        if !seen.stalled {
            self.frame(&Frame::Window {
                channel,
                stream,
                consumed,
            });
        }
    }

    /// Returns the windows after a stall.
    pub fn unstall(&mut self, channel: u32) {
        let seen = self.channels.get_mut(&channel).unwrap();
        seen.stalled = false;
        let counts = seen.counts;
        for (stream, consumed) in [(StreamId::Out, counts[0]), (StreamId::Err, counts[1])] {
            self.frame(&Frame::Window {
                channel,
                stream,
                consumed,
            });
        }
    }

    fn message(&mut self, message: AgentMessage) {
        match message {
            AgentMessage::Hello(hello) => self.hello = Some(hello),
            AgentMessage::Started { channel, pid } => {
                if let Some(seen) = self.channels.get_mut(&channel) {
                    seen.pid = Some(pid);
                }
            }
            AgentMessage::Ended { channel, outcome } => {
                if let Some(seen) = self.channels.get_mut(&channel) {
                    seen.outcome = Some(outcome);
                }
            }
            AgentMessage::Reply { id, reply } => {
                self.replies.insert(id, reply);
            }
        }
    }
}
