//! Connections into the guest through the agent: they need no network in the guest.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use sandtree_proto::{Open, Outcome};
use sandtree_store::PublishedPort;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};

use super::{Guest, exec};
use crate::error::{Error, Result};
use crate::link::{Channel, Control, Input, Link, LinkError, Output};

const WINDOW: u32 = 256 * 1024;
/// The bytes between a connection and its reader in this process.
const STREAM_BUFFER: usize = 64 * 1024;
/// Connections of one forward at a time; further ones wait in the listener's queue.
const CONNECTIONS_MAX: usize = 512;
/// How long the guest may take to read the last bytes of a connection that both sides have ended.
const LAST_BYTES: Duration = Duration::from_secs(30);
/// How long a listener waits after a failed accept.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// One connection to a port in the guest.
#[derive(Debug)]
pub struct Tunnel {
    channel: Channel,
}

impl Tunnel {
    pub(super) async fn open(link: &Link, port: u16) -> Result<Tunnel> {
        let failed = |source| Error::Guest {
            operation: format!("connect to port {port} in the guest"),
            source,
        };
        let mut channel = link.open(Open::Connect { port }, WINDOW).map_err(failed)?;
        match channel.control.started().await.map_err(failed)? {
            Ok(_) => Ok(Tunnel { channel }),
            Err(outcome) => Err(failed(exec::lost(outcome))),
        }
    }

    /// The connection as a stream. Dropping it closes the connection.
    pub fn into_stream(self) -> DuplexStream {
        let (ours, mut theirs) = tokio::io::duplex(STREAM_BUFFER);
        tokio::spawn(async move {
            // A connection that breaks shows its reader the end of the stream.
            if let Err(error) = carry_both_ways(self.channel, &mut theirs).await {
                tracing::debug!(%error, "a connection into a guest ended");
            }
        });
        ours
    }

    /// Moves bytes in both directions until both ends are done. If either end fails, or the future
    /// is dropped, both ends are reset, so that neither sees an orderly end.
    pub async fn splice(self, mut stream: TcpStream) -> Result<()> {
        close_by(&stream, Close::Reset);
        let carried = carry_both_ways(self.channel, &mut stream).await;
        if carried.is_ok() {
            close_by(&stream, Close::Orderly);
        }
        carried.map_err(|source| Error::Guest {
            operation: "carry a connection".into(),
            source,
        })
    }
}

/// The channel must not be closed before the guest has read everything; otherwise the guest's end
/// would be reset with unread bytes.
async fn carry_both_ways<S>(channel: Channel, stream: &mut S) -> Result<(), LinkError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let Channel {
        out,
        input,
        mut control,
        ..
    } = channel;
    let (reader, writer) = tokio::io::split(stream);
    tokio::try_join!(
        to_guest(reader, input),
        from_guest(out, control.clone(), writer)
    )?;
    let ended = tokio::time::timeout(LAST_BYTES, control.ended()).await;
    match ended.map_err(|_| LinkError::Timeout { after: LAST_BYTES })?? {
        Outcome::Done => Ok(()),
        outcome => Err(exec::lost(outcome)),
    }
}

async fn to_guest(mut reader: impl AsyncRead + Unpin, mut input: Input) -> Result<(), LinkError> {
    let mut buffer = vec![0; 64 * 1024];
    loop {
        match reader.read(&mut buffer).await {
            Ok(0) => return input.end(),
            Ok(count) => input.write(&buffer[..count]).await?,
            Err(_) => return Err(LinkError::ended()),
        }
    }
}

async fn from_guest(
    mut out: Output,
    control: Control,
    mut writer: impl AsyncWrite + Unpin,
) -> Result<(), LinkError> {
    while let Some(chunk) = out.next().await? {
        writer
            .write_all(&chunk)
            .await
            .map_err(|_| LinkError::ended())?;
    }
    match control.outcome()? {
        None | Some(Outcome::Done) => {}
        Some(outcome) => return Err(exec::lost(outcome)),
    }
    writer.shutdown().await.map_err(|_| LinkError::ended())
}

/// A port of the host that leads into the guest. Dropping it resets its connections, and closes the
/// port unless its listener is kept.
#[derive(Debug)]
pub struct Forward {
    address: SocketAddr,
    guest_port: u16,
    listener: Arc<TcpListener>,
    task: JoinHandle<()>,
}

impl Forward {
    pub(super) fn start(guest: Guest, listener: Arc<TcpListener>, port: u16) -> Result<Forward> {
        let address = listener
            .local_addr()
            .map_err(|source| Error::io("read the address of", "a listener", source))?;
        let task = tokio::spawn(accept_all(guest, listener.clone(), port));
        Ok(Forward {
            address,
            guest_port: port,
            listener,
            task,
        })
    }

    /// The host's port, and the guest's it leads to.
    pub fn port(&self) -> PublishedPort {
        PublishedPort {
            host: self.address.port(),
            guest: self.guest_port,
        }
    }

    /// The listening socket, for the guest that replaces this one, so that no other program can
    /// take the port in between.
    pub fn listener(&self) -> Arc<TcpListener> {
        self.listener.clone()
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Waits until the forward ends by itself, which happens when the sandbox ends.
    pub async fn ended(&mut self) {
        // A panic in the task also ends the forward.
        drop((&mut self.task).await);
    }
}

impl Drop for Forward {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn accept_all(guest: Guest, listener: Arc<TcpListener>, port: u16) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept(), if connections.len() < CONNECTIONS_MAX => match accepted {
                Ok((stream, _)) => {
                    connections.spawn(carry(guest.clone(), stream, port));
                }
                // Most likely there are no free descriptors; there will be some again.
                Err(_) => tokio::time::sleep(ACCEPT_PAUSE).await,
            },
            Some(_) = connections.join_next() => {}
            _ = guest.down() => break,
        }
    }
    // Open connections learn of the end through their channels, and reset their clients.
    while connections.join_next().await.is_some() {}
}

/// Handles one connection.
async fn carry(guest: Guest, stream: TcpStream, port: u16) {
    // From here on, because this task may be aborted at any moment.
    close_by(&stream, Close::Reset);
    let tunnel = match guest.connect(port).await {
        Ok(tunnel) => tunnel,
        Err(error) => {
            tracing::info!(port, %error, "a forwarded connection was refused");
            return;
        }
    };
    if let Err(error) = tunnel.splice(stream).await {
        tracing::debug!(port, %error, "a forwarded connection broke");
    }
}

/// What a client sees when its connection is dropped.
enum Close {
    Orderly,
    Reset,
}

fn close_by(stream: &TcpStream, close: Close) {
    let linger = match close {
        Close::Orderly => None,
        Close::Reset => Some(Duration::ZERO),
    };
    if let Err(error) = rustix::net::sockopt::set_socket_linger(stream, linger) {
        tracing::debug!(%error, "cannot choose how a connection ends");
    }
}
