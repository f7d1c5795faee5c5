//! The hub's side of the guest's port: greeting, frames in, frames out.

use std::collections::BTreeMap;
use std::io;

use sandtree_proto::frame::{Frame, encode_host_preamble};
use sandtree_proto::{AgentHello, AgentMessage, Decoded, Decoder, HostMessage, Nonce, message};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};

use super::slot::Slot;
use crate::link::{Outbox, READ_SIZE, fresh_nonce, hello_frame};

#[derive(Debug, PartialEq, Eq)]
enum Phase {
    /// There is no port.
    Away,
    /// Waiting for the preamble with this nonce.
    Greeting(Nonce),
    /// The preamble has arrived; its hello is next.
    Greeted,
    Up,
}

/// A message or data from the agent.
#[derive(Debug)]
pub(super) enum Heard {
    Hello(AgentHello),
    Message(AgentMessage),
    Stream(Frame),
}

#[derive(Debug)]
pub(super) struct AgentSide {
    port: Option<(OwnedReadHalf, OwnedWriteHalf)>,
    decoder: Decoder,
    phase: Phase,
    outbox: Outbox,
    /// Encoded bytes; `written` of them have been sent.
    bytes: Vec<u8>,
    written: usize,
}

impl AgentSide {
    pub fn new(port: UnixStream) -> Self {
        let mut agent = Self {
            port: Some(port.into_split()),
            decoder: Decoder::new(),
            phase: Phase::Away,
            outbox: Outbox::default(),
            bytes: Vec::new(),
            written: 0,
        };
        agent.greet();
        agent
    }

    /// Starts a new stream in both directions. Unsent data of the old one is dropped.
    pub fn greet(&mut self) {
        self.leave_stream();
        if self.port.is_some() {
            self.begin_stream();
        }
    }

    /// Closes the port. Later messages wait for the next port.
    pub fn suspend(&mut self) {
        self.leave_stream();
        self.port = None;
    }

    /// Greets the agent behind a new port.
    pub fn reconnect(&mut self, port: UnixStream) {
        if self.port.replace(port.into_split()).is_some() {
            self.leave_stream();
        }
        self.begin_stream();
    }

    fn leave_stream(&mut self) {
        self.phase = Phase::Away;
        self.outbox = Outbox::default();
        self.bytes.clear();
        self.written = 0;
    }

    fn begin_stream(&mut self) {
        let nonce = fresh_nonce();
        self.decoder = Decoder::new();
        self.phase = Phase::Greeting(nonce);
        encode_host_preamble(&mut self.bytes, nonce);
        hello_frame().encode(&mut self.bytes);
    }

    pub fn send(&mut self, message: &HostMessage) -> Result<(), message::MessageError> {
        self.outbox.push(message::to_frame(message)?);
        Ok(())
    }

    pub fn send_frame(&mut self, frame: Frame) {
        self.outbox.push(frame);
    }

    pub fn is_up(&self) -> bool {
        self.phase == Phase::Up
    }

    pub fn queued(&self) -> usize {
        self.outbox.len()
    }

    /// The other side has closed the port.
    pub fn lost_port(&mut self) {
        self.port = None;
    }

    /// Reads or writes, whichever is possible first. Returns the number of bytes read; 0 is a
    /// write, an error the end. Without a port it waits without end.
    pub async fn turn(&mut self, channels: &mut BTreeMap<u32, Slot>) -> io::Result<usize> {
        if self.written == self.bytes.len() {
            self.bytes.clear();
            self.written = 0;
            if self.phase == Phase::Up {
                self.outbox.fill(channels, &mut self.bytes);
            }
        }
        let Some((reader, writer)) = &mut self.port else {
            return std::future::pending().await;
        };
        let unsent = &self.bytes[self.written..];
        tokio::select! {
            count = reader.read(self.decoder.spare(READ_SIZE)) => match count? {
                0 => Err(io::ErrorKind::UnexpectedEof.into()),
                count => Ok(count),
            },
            count = writer.write(unsent), if !unsent.is_empty() => {
                self.written += count?;
                Ok(0)
            }
        }
    }

    /// Takes in the bytes that a [`turn`](Self::turn) has read.
    pub fn take_in(&mut self, count: usize) {
        self.decoder.filled(count);
    }

    /// The agent's next message. An error means that its stream is invalid.
    pub fn next(&mut self) -> Option<Result<Heard, String>> {
        loop {
            match (self.decoder.next()?, &self.phase) {
                (Ok(Decoded::Preamble(echo)), Phase::Greeting(nonce)) if echo == *nonce => {
                    self.phase = Phase::Greeted
                }
                (Ok(Decoded::Frame(frame)), Phase::Greeted) => return Some(self.hello(frame)),
                (Ok(Decoded::Frame(frame)), Phase::Up) => return Some(heard(frame)),
                (Err(error), Phase::Greeted | Phase::Up) => return Some(Err(error.to_string())),
                // The answer to an earlier greeting; its frame may be cut, and must not swallow
                // ours.
                (Ok(Decoded::Preamble(_)), Phase::Greeting(_)) => self.decoder.resync(),
                // The rest of the previous stream; the decoder continues to search.
                (_, Phase::Greeting(_) | Phase::Away) => {}
                (Ok(Decoded::Preamble(_)), _) => {
                    return Some(Err("an unexpected preamble".into()));
                }
            }
        }
    }

    fn hello(&mut self, frame: Frame) -> Result<Heard, String> {
        match heard(frame)? {
            Heard::Message(AgentMessage::Hello(hello)) => {
                self.phase = Phase::Up;
                Ok(Heard::Hello(hello))
            }
            _ => Err("no hello".into()),
        }
    }
}

fn heard(frame: Frame) -> Result<Heard, String> {
    match frame {
        Frame::Message(bytes) => message::from_bytes(&bytes)
            .map(Heard::Message)
            .map_err(|e| e.to_string()),
        other => Ok(Heard::Stream(other)),
    }
}
