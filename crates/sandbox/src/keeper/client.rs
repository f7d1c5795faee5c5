//! The client's side of a keeper's socket.
//!
//! ```text
//!   connect ──► hello, call ──► hello ──► answer      then the connection ends, but for link, watch and lend
//! ```

use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use sandtree_engine::Picture;
use sandtree_store::SandboxDir;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep};

use super::samples::Sample;
use super::serve::short_path;
use super::stats::Stats;
use super::wire::{self, Answer, Call, Hello, PROTOCOL, PictureSize};
use crate::blocking::blocking;
use crate::boxed::Boxed;
use crate::error::{Error, Result, unreachable_guest};
use crate::hub::ExecEntry;
use crate::link::Link;
use crate::mounts::ServedMount;
use crate::order::{Anywhere, Order};
use crate::status::{State, StateWatch};

/// A keeper's socket appears right after its sandbox counts as running.
const APPEAR_DEADLINE: Duration = Duration::from_secs(3);
/// A keeper ends after it has answered its clients.
const LEAVE_DEADLINE: Duration = Duration::from_secs(10);
/// How long a keeper may take to take a state back: it may be executing an order.
const RETURN_DEADLINE: Duration = Duration::from_secs(10);
const POLL: Duration = Duration::from_millis(10);
/// The number of states that a watcher has not read yet. The keeper waits for a slower watcher.
const STATES: usize = 16;

/// The socket of one sandbox's keeper.
#[derive(Debug, Clone)]
pub(crate) struct Keeper {
    name: String,
    dir: PathBuf,
    socket: PathBuf,
}

/// A connection before its first message.
#[derive(Debug)]
pub(crate) struct Connection {
    keeper: Keeper,
    stream: UnixStream,
    /// Whether the keeper stays when its sandbox rests, as far as its hello was read.
    stays: bool,
}

impl Keeper {
    pub fn of(dir: &SandboxDir) -> Self {
        Self {
            name: dir.record().name.to_string(),
            dir: dir.path().to_owned(),
            socket: dir.keeper_socket(),
        }
    }

    /// Waits a moment for a socket that is about to appear.
    pub async fn connect(&self) -> Result<Connection> {
        let end = Instant::now() + APPEAR_DEADLINE;
        loop {
            match self.try_connect().await {
                Err(error) if is_early(&error) && Instant::now() < end => sleep(POLL).await,
                connected => return connected.map_err(|source| self.silent(source)),
            }
        }
    }

    pub async fn try_connect(&self) -> io::Result<Connection> {
        let dir = std::fs::File::open(&self.dir)?;
        let stream = UnixStream::connect(short_path(&dir, &self.socket)).await?;
        Ok(Connection {
            keeper: self.clone(),
            stream,
            stays: false,
        })
    }

    fn silent(&self, source: io::Error) -> Error {
        Error::Keeper {
            name: self.name.clone(),
            source,
        }
    }

    /// Waits until the keeper is gone; returns at once if it already was.
    async fn gone(&self, process: Option<OwnedFd>) -> Result<()> {
        let Some(process) = process else {
            return Ok(());
        };
        let is_gone = blocking(move || is_gone_within(&process, LEAVE_DEADLINE)).await;
        if is_gone {
            return Ok(());
        }
        Err(self.silent(io::ErrorKind::TimedOut.into()))
    }
}

impl Connection {
    /// Opened before the keeper is asked to end: afterwards another process could have its number.
    fn process(&self) -> Option<OwnedFd> {
        let pid = self.stream.peer_cred().ok()?.pid()?;
        pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()).ok()
    }

    /// Asks for a verb. If the verb also ends the keeper, waits for that: then nothing of the
    /// sandbox runs any more.
    pub async fn ask<A: Anywhere>(self, ask: A) -> Result<A::Answer> {
        let keeper = self.keeper.clone();
        let answer = self.order(ask.into()).await?;
        serde_json::from_value(answer).map_err(|e| keeper.silent(e.into()))
    }

    fn order(mut self, order: Order) -> Boxed<'static, Result<serde_json::Value>> {
        Box::pin(async move {
            let process = self.process();
            let removes = matches!(order, Order::Remove(_));
            let ends = matches!(order, Order::Stop(_) | Order::Kill(_));
            let pauses = matches!(order, Order::Pause(_));
            let answer: serde_json::Value = self.call(&Call::Order(order)).await?;
            let is_awaited = answer["awaited"] == serde_json::Value::Bool(true);
            let rests = ends || (pauses && !is_awaited);
            if removes || (rests && !self.stays) {
                self.keeper.gone(process).await?;
            }
            Ok(answer)
        })
    }

    /// Asks for a state that is lent as long as the connection is open.
    pub async fn lend<A: Anywhere>(mut self, ask: A) -> Result<(A::Answer, Self)> {
        let lent = self.call(&Call::Order(ask.into())).await?;
        Ok((lent, self))
    }

    /// Ends a connection on which a state was lent, and waits until the keeper has taken it back.
    pub async fn end(mut self) -> Result<()> {
        let ended = async {
            self.stream.shutdown().await?;
            let mut rest = Vec::new();
            self.stream.read_to_end(&mut rest).await.map(drop)
        };
        let ended = tokio::time::timeout(RETURN_DEADLINE, ended).await;
        let ended = ended.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
        ended.map_err(|source| self.keeper.silent(source))
    }

    pub async fn link(mut self) -> Result<Link> {
        self.call::<()>(&Call::Link).await?;
        Link::connect(self.stream).await.map_err(unreachable_guest)
    }

    pub async fn stats(mut self) -> Result<Stats> {
        self.call(&Call::Stats).await
    }

    pub async fn samples(mut self) -> Result<Vec<Sample>> {
        self.call(&Call::Samples).await
    }

    pub async fn execs(mut self) -> Result<Vec<ExecEntry>> {
        self.call(&Call::Execs).await
    }

    pub async fn mounts(mut self) -> Result<Vec<ServedMount>> {
        self.call(&Call::Mounts).await
    }

    pub async fn picture(mut self) -> Result<Picture> {
        let size: PictureSize = self.call(&Call::Picture).await?;
        let silent = |source| self.keeper.silent(source);
        let bytes = size.bytes().ok_or(io::ErrorKind::InvalidData);
        let mut rgb = vec![0; bytes.map_err(|kind| silent(kind.into()))?];
        self.stream.read_exact(&mut rgb).await.map_err(silent)?;
        Ok(Picture {
            width: size.width,
            height: size.height,
            rgb,
        })
    }

    pub async fn view(mut self) -> Result<UnixStream> {
        self.call::<()>(&Call::View).await?;
        Ok(self.stream)
    }

    pub async fn watch(mut self) -> Result<StateWatch> {
        let first: State = self.call(&Call::Watch).await?;
        let (states, watched) = mpsc::channel(STATES);
        tokio::spawn(async move {
            loop {
                let next = tokio::select! {
                    next = wire::read::<Answer<State>>(&mut self.stream) => next,
                    () = states.closed() => return,
                };
                let Ok(Ok(state)) = next else { return };
                if states.send(state).await.is_err() {
                    return;
                }
            }
        });
        Ok(StateWatch::fed(first, watched))
    }

    async fn call<T: DeserializeOwned>(&mut self, call: &Call) -> Result<T> {
        let keeper = self.keeper.clone();
        let silent = |source| keeper.silent(source);
        wire::write_both(&mut self.stream, &Hello::of_client(), call)
            .await
            .map_err(silent)?;
        let theirs = wire::read(&mut self.stream).await;
        self.stays = check_hello(&self.keeper.name, theirs)?.stays();
        let answer: Answer<T> = wire::read(&mut self.stream).await.map_err(silent)?;
        answer.map_err(|report| Error::Remote { report })
    }
}

/// Refuses a peer with another version. A peer from before versions closes the connection.
pub(super) fn check_hello(name: &str, theirs: io::Result<Hello>) -> Result<Hello> {
    let foreign = |theirs: String| Error::KeeperVersion {
        name: name.to_owned(),
        theirs,
        ours: PROTOCOL,
    };
    match theirs {
        Ok(hello) if hello.protocol == PROTOCOL => Ok(hello),
        Ok(hello) => Err(foreign(format!(
            "version {} (sandtree {})",
            hello.protocol, hello.program
        ))),
        Err(error) if error.kind() == io::ErrorKind::InvalidData => {
            Err(foreign("an unknown version".into()))
        }
        Err(source) => Err(Error::Keeper {
            name: name.to_owned(),
            source,
        }),
    }
}

/// Waits for a process's end.
fn is_gone_within(process: &OwnedFd, deadline: Duration) -> bool {
    let limit = Timespec {
        tv_sec: deadline.as_secs() as i64,
        tv_nsec: 0,
    };
    let mut ends = [PollFd::new(process, PollFlags::IN)];
    poll(&mut ends, Some(&limit)).is_ok_and(|count| count > 0)
}

fn is_early(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
    )
}
