//! Starting a keeper, and holding its lease.

use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream as StdStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

use super::wire::{self, GIVE_UP, GO, News, Order, RELEASE, Ready};
use crate::error::{Error, Result};

/// How long a keeper may take to undo what it began, when its lease closes.
const UNDO_DEADLINE: Duration = Duration::from_secs(60);

/// The hold on a keeper. Dropped before it is released, it makes the keeper take back what it was
/// started for, and waits for that.
#[derive(Debug)]
pub struct Lease {
    /// Nothing once it is released.
    stream: Option<UnixStream>,
}

impl Lease {
    /// Starts `program` with `args` as a keeper. It finds its end of the lease as its standard
    /// input, and must call [`run`](super::run) with it.
    pub async fn start(program: &Path, args: &[&str], order: &Order) -> Result<Lease> {
        let failed = |e| Error::io("start a keeper with", program, e);
        let (ours, theirs) = StdStream::pair().map_err(failed)?;
        // starts: our own program
        let mut keeper = Command::new(program)
            .args(args)
            .current_dir("/")
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .spawn()
            .map_err(failed)?;
        // It outlives the lease; somebody must take note of its end.
        std::thread::spawn(move || drop(keeper.wait()));
        ours.set_nonblocking(true).map_err(failed)?;
        let mut stream = UnixStream::from_std(ours).map_err(failed)?;
        wire::write(&mut stream, order).await.map_err(failed)?;
        Ok(Lease {
            stream: Some(stream),
        })
    }

    /// Waits until the sandbox runs, or the keeper says why it does not.
    pub async fn ready(&mut self) -> Result<Ready> {
        match self.news().await? {
            News::Ready(ready) => Ok(*ready),
            News::Failed(report) => Err(Error::Remote { report }),
            News::Loaded | News::Saved { .. } => Err(out_of_turn()),
        }
    }

    /// Waits until a copy holds its state.
    pub async fn loaded(&mut self) -> Result<()> {
        match self.news().await? {
            News::Loaded => Ok(()),
            News::Failed(report) => Err(Error::Remote { report }),
            News::Ready(_) | News::Saved { .. } => Err(out_of_turn()),
        }
    }

    /// Lets a copy that is loaded go on.
    pub async fn go(&mut self) -> Result<()> {
        let told = self.stream().write_u8(GO).await;
        told.map_err(|source| Error::Keeper {
            name: "that was to go on".into(),
            source,
        })
    }

    async fn news(&mut self) -> Result<News> {
        let heard = wire::read(self.stream()).await;
        heard.map_err(|source| Error::Keeper {
            name: "that was to be started".into(),
            source,
        })
    }

    fn stream(&mut self) -> &mut UnixStream {
        self.stream
            .as_mut()
            .expect("a lease has its stream until it is released")
    }

    /// Takes back what the keeper was started for, and waits for that. Tells which snapshot it was
    /// saved as, if it was.
    pub async fn end(mut self) -> Result<Option<String>> {
        let failed = |source| Error::Keeper {
            name: "that was to end".into(),
            source,
        };
        let stream = self.stream();
        stream.shutdown().await.map_err(failed)?;
        // Saving takes as long as it takes.
        let saved = match wire::read(stream).await {
            Ok(News::Saved { digest }) => Some(digest),
            _ => None,
        };
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).await.map_err(failed)?;
        self.stream = None;
        Ok(saved)
    }

    /// Gives up what the keeper was started for: it is not saved, whatever it was to be.
    pub async fn give_up(mut self) {
        if let Err(error) = self.stream().write_u8(GIVE_UP).await {
            tracing::warn!(%error, "the keeper cannot be told that its sandbox is not wanted");
        }
        tokio::task::block_in_place(|| drop(self));
    }

    /// Lets the sandbox live on by itself.
    pub async fn release(mut self) -> Result<()> {
        let told = self.stream().write_u8(RELEASE).await;
        told.map_err(|source| Error::Keeper {
            name: "that was just started".into(),
            source,
        })?;
        self.stream = None;
        Ok(())
    }
}

fn out_of_turn() -> Error {
    let source = std::io::ErrorKind::InvalidData.into();
    Error::Keeper {
        name: "that was to be started".into(),
        source,
    }
}

impl Drop for Lease {
    /// Closes the lease and waits for the keeper's end, so that nothing of the sandbox is left when
    /// we return.
    fn drop(&mut self) {
        let Some(stream) = self.stream.take() else {
            return;
        };
        if let Err(error) = wait_for_end(stream) {
            tracing::warn!(%error, "the keeper did not say that it is done");
        }
    }
}

fn wait_for_end(stream: UnixStream) -> std::io::Result<()> {
    let mut stream = stream.into_std()?;
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(UNDO_DEADLINE))?;
    stream.shutdown(std::net::Shutdown::Write)?;
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest).map(drop)
}
