//! Connections into the guest, carried by the agent: they need no network in the guest.

use std::net::SocketAddr;

use sandtree_proto::Open;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};

use super::{Guest, exec};
use crate::error::{Error, Result};
use crate::link::{Channel, Input, Link, LinkError, Output};

const WINDOW: u32 = 256 * 1024;
/// Connections of one forward at a time; further ones wait in the listener's queue.
const CONNECTIONS_MAX: usize = 512;

/// One connection to a port in the guest.
#[derive(Debug)]
pub struct Tunnel {
    channel: Channel,
}

impl Tunnel {
    pub(super) async fn open(link: &Link, port: u16) -> Result<Tunnel> {
        let failed = |source| Error::Guest { operation: format!("connect to port {port} in the guest"), source };
        let mut channel = link.open(Open::Connect { port }, WINDOW).map_err(failed)?;
        match channel.control.started().await.map_err(failed)? {
            Ok(_) => Ok(Tunnel { channel }),
            Err(outcome) => Err(failed(exec::lost(outcome))),
        }
    }

    /// Carries bytes both ways until both ends are done.
    pub async fn splice(self, stream: TcpStream) -> Result<()> {
        let Channel { out, input, .. } = self.channel;
        let (reader, writer) = stream.into_split();
        tokio::try_join!(to_guest(reader, input), from_guest(out, writer))
            .map(drop)
            .map_err(|source| Error::Guest { operation: "carry a connection".into(), source })
    }
}

async fn to_guest(mut reader: OwnedReadHalf, mut input: Input) -> Result<(), LinkError> {
    let mut buffer = vec![0; 64 * 1024];
    loop {
        match reader.read(&mut buffer).await {
            Ok(0) => return input.end(),
            Ok(count) => input.write(&buffer[..count]).await?,
            Err(_) => return Err(LinkError::Ended),
        }
    }
}

async fn from_guest(mut out: Output, mut writer: OwnedWriteHalf) -> Result<(), LinkError> {
    while let Some(chunk) = out.next().await? {
        writer.write_all(&chunk).await.map_err(|_| LinkError::Ended)?;
    }
    writer.shutdown().await.map_err(|_| LinkError::Ended)
}

/// A port of the host that leads into the guest. Dropping it closes the port and its connections.
#[derive(Debug)]
pub struct Forward {
    address: SocketAddr,
    task: JoinHandle<()>,
}

impl Forward {
    pub(super) fn start(guest: Guest, listener: TcpListener, port: u16) -> Result<Forward> {
        let address = listener.local_addr().map_err(|source| Error::io("read the address of", "a listener", source))?;
        Ok(Forward { address, task: tokio::spawn(accept_all(guest, listener, port)) })
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Waits until the forward ends by itself, which it does when the sandbox does.
    pub async fn ended(&mut self) {
        // A panic in the task ends the forward as well as anything.
        drop((&mut self.task).await);
    }
}

impl Drop for Forward {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn accept_all(guest: Guest, listener: TcpListener, port: u16) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept(), if connections.len() < CONNECTIONS_MAX => match accepted {
                Ok((stream, _)) => drop(connections.spawn(carry(guest.clone(), stream, port))),
                // Out of descriptors, most likely: wait for a connection to end rather than spin.
                Err(_) => drop(connections.join_next().await),
            },
            Some(ended) = connections.join_next() => if matches!(ended, Ok(Ending::LinkDown)) { return },
        }
    }
}

enum Ending {
    Done,
    LinkDown,
}

/// Carries one connection. When the guest's end fails, the client's is reset, so that it does not take it for an orderly end.
async fn carry(guest: Guest, stream: TcpStream, port: u16) -> Ending {
    let tunnel = match guest.connect(port).await {
        Ok(tunnel) => tunnel,
        Err(error) => {
            tracing::info!(port, %error, "a forwarded connection was refused");
            reset(&stream);
            let refused = matches!(&error, Error::Guest { source: LinkError::Refused(_), .. });
            return if refused { Ending::Done } else { Ending::LinkDown };
        }
    };
    if let Err(error) = tunnel.splice(stream).await {
        tracing::debug!(port, %error, "a forwarded connection broke");
    }
    Ending::Done
}

fn reset(stream: &TcpStream) {
    if let Err(error) = rustix::net::sockopt::set_socket_linger(stream, Some(std::time::Duration::ZERO)) {
        tracing::debug!(%error, "cannot reset a connection; it is closed instead");
    }
}
