//! Starting a keeper, and holding its lease.

use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream as StdStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::UnixStream;

use super::wire::{self, News, Order, RELEASE};
use crate::error::{Error, Result};
use crate::info::SandboxInfo;

/// How long a keeper may take to undo what it began, when its lease closes.
const UNDO_DEADLINE: Duration = Duration::from_secs(60);

/// The hold on a keeper. Dropped before it is released, it makes the keeper take back what it was started for, and waits
/// for that.
#[derive(Debug)]
pub struct Lease {
    /// Nothing once it is released.
    stream: Option<UnixStream>,
}

impl Lease {
    /// Starts `program` with `args` as a keeper. It finds its end of the lease as its standard input, and must call
    /// [`run`](super::run) with it.
    pub async fn start(program: &Path, args: &[&str], order: &Order) -> Result<Lease> {
        let failed = |e| Error::io("start a keeper with", program, e);
        let (ours, theirs) = StdStream::pair().map_err(failed)?;
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
        Ok(Lease { stream: Some(stream) })
    }

    /// Waits until the sandbox runs, or the keeper says why it does not.
    pub async fn ready(&mut self) -> Result<SandboxInfo> {
        let stream = self.stream.as_mut().expect("a lease has its stream until it is released");
        match wire::read(stream).await {
            Ok(News::Ready(info)) => Ok(*info),
            Ok(News::Failed(report)) => Err(Error::Remote { report }),
            Err(source) => Err(Error::Keeper { name: "that was to be started".into(), source }),
        }
    }

    /// Lets the sandbox live on by itself.
    pub async fn release(mut self) -> Result<()> {
        let stream = self.stream.as_mut().expect("a lease has its stream until it is released");
        let told = stream.write_u8(RELEASE).await;
        told.map_err(|source| Error::Keeper { name: "that was just started".into(), source })?;
        self.stream = None;
        Ok(())
    }
}

impl Drop for Lease {
    /// Closes the lease and waits for the keeper's end, so that nothing of the sandbox is left when we return.
    fn drop(&mut self) {
        let Some(stream) = self.stream.take() else { return };
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
