//! Starting a keeper, and holding its lease.
//!
//! ```text
//!   start ─► loaded ─ go ─► ready ─ [own] ─ commit ─► committed ─ release      a copy
//!   start ────────────────► ready ─ [own] ─ commit ─► committed ─ release      a new sandbox
//!   start ────────────────► ready ─────────────────────────────── release      an order to a sandbox at rest
//! ```
//!
//! Always: if a lease is dropped before its release, the keeper undoes its task. An owned sandbox
//! of a committed batch is removed, too. A lease is listed for forked children as long as it is
//! open.

use std::collections::BTreeSet;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream as StdStream;
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

use super::client::check_hello;
use super::wire::{self, Hello, Mission, News, Ready, Word};
use crate::config::KeeperProgram;
use crate::error::{Error, Result};

/// How long a keeper may take to undo its task when its lease closes.
const UNDO_DEADLINE: Duration = Duration::from_secs(60);

/// The hold on a keeper. If it is dropped before its release, the keeper undoes its task, and the
/// drop waits for that.
#[derive(Debug)]
pub(crate) struct Lease {
    name: String,
    /// `None` after the release.
    stream: Option<Stream>,
}

/// Our end of a lease. Fields are dropped in this order: another file can get the number of a
/// closed descriptor.
#[derive(Debug)]
struct Stream {
    listed: Listed,
    stream: UnixStream,
}

/// An entry of [`LEASES`].
#[derive(Debug)]
struct Listed(RawFd);

/// The descriptors of all leases of this process.
static LEASES: Mutex<BTreeSet<RawFd>> = Mutex::new(BTreeSet::new());

/// The leases that a child of `fork` has from its parent, for the child to close: it would keep the
/// sandboxes of its parent.
pub fn leases_in_child() -> Vec<RawFd> {
    // Another thread of the parent may have held the lock; then it is never free.
    match LEASES.try_lock() {
        Ok(leases) => leases.iter().copied().collect(),
        Err(_) => Vec::new(),
    }
}

fn leases() -> MutexGuard<'static, BTreeSet<RawFd>> {
    LEASES.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for Listed {
    fn drop(&mut self) {
        leases().remove(&self.0);
    }
}

impl Lease {
    /// Starts a keeper for a task. `name` is the sandbox's, for errors.
    pub async fn start(program: &KeeperProgram, mission: &Mission, name: &str) -> Result<Lease> {
        let failed = |e| Error::io("start a keeper with", &program.path, e);
        let mut lease = Lease {
            name: name.to_owned(),
            stream: Some(spawn(program).map_err(failed)?),
        };
        wire::write_both(lease.stream(), &Hello::of_client(), mission)
            .await
            .map_err(failed)?;
        let theirs = wire::read(lease.stream()).await;
        check_hello(name, theirs)?;
        Ok(lease)
    }

    /// Waits until the sandbox runs.
    pub async fn ready(&mut self) -> Result<Ready> {
        match self.news().await? {
            News::Ready(ready) => Ok(*ready),
            News::Failed(report) => Err(Error::Remote { report }),
            News::Loaded | News::Committed | News::Saved { .. } => Err(self.out_of_turn()),
        }
    }

    /// Waits until a copy holds its state.
    pub async fn loaded(&mut self) -> Result<()> {
        match self.news().await? {
            News::Loaded => Ok(()),
            News::Failed(report) => Err(Error::Remote { report }),
            News::Ready(_) | News::Committed | News::Saved { .. } => Err(self.out_of_turn()),
        }
    }

    /// Lets a loaded copy continue.
    pub async fn go(&mut self) -> Result<()> {
        self.say(Word::Go).await
    }

    /// Makes this process the owner of a new sandbox, before its commit.
    pub async fn own(&mut self) -> Result<()> {
        self.say(Word::Own).await
    }

    /// Makes a new sandbox exist for others. The lease is still held.
    pub async fn commit(&mut self) -> Result<()> {
        self.say(Word::Commit).await?;
        match self.news().await? {
            News::Committed => Ok(()),
            News::Failed(report) => Err(Error::Remote { report }),
            News::Ready(_) | News::Loaded | News::Saved { .. } => Err(self.out_of_turn()),
        }
    }

    /// Whether the keeper still has its end open.
    pub fn is_held(&mut self) -> bool {
        let mut byte = [0];
        let read = self.stream().try_read(&mut byte);
        matches!(read, Err(error) if error.kind() == io::ErrorKind::WouldBlock)
    }

    /// Releases the sandbox, which then continues by itself.
    pub async fn release(mut self) -> Result<()> {
        self.say(Word::Release).await?;
        self.stream = None;
        Ok(())
    }

    /// Lets the keeper undo its task, and waits for that. Returns the snapshot of the sandbox, if
    /// it was saved.
    pub async fn end(mut self) -> Result<Option<String>> {
        let name = self.name.clone();
        let failed = |source| Error::Keeper { name, source };
        let ended = async {
            let stream = self.stream();
            stream.shutdown().await?;
            // A save has no deadline.
            let saved = match wire::read(stream).await {
                Ok(News::Saved { digest }) => Some(digest),
                _ => None,
            };
            let mut rest = Vec::new();
            stream.read_to_end(&mut rest).await?;
            Ok(saved)
        };
        let saved = ended.await.map_err(failed)?;
        self.stream = None;
        Ok(saved)
    }

    /// Lets the keeper undo its task without a save.
    pub async fn give_up(mut self) {
        if let Err(error) = self.say(Word::GiveUp).await {
            tracing::warn!(%error, "a keeper does not hear that its sandbox is not wanted");
        }
        tokio::task::block_in_place(|| drop(self));
    }

    async fn say(&mut self, word: Word) -> Result<()> {
        let said = self.stream().write_u8(word.byte()).await;
        said.map_err(|source| self.silent(source))
    }

    async fn news(&mut self) -> Result<News> {
        let heard = wire::read(self.stream()).await;
        heard.map_err(|source| self.silent(source))
    }

    fn out_of_turn(&self) -> Error {
        self.silent(io::ErrorKind::InvalidData.into())
    }

    fn silent(&self, source: io::Error) -> Error {
        Error::Keeper {
            name: self.name.clone(),
            source,
        }
    }

    fn stream(&mut self) -> &mut UnixStream {
        let held = self.stream.as_mut();
        let held = held.expect("a lease has its stream until it is released");
        &mut held.stream
    }
}

/// The keeper's end of the lease is its standard input.
fn spawn(program: &KeeperProgram) -> io::Result<Stream> {
    let (listed, ours, theirs) = pair()?;
    // starts: our own program
    let mut keeper = Command::new(&program.path)
        .args(&program.args)
        .current_dir("/")
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .stdout(Stdio::null())
        .spawn()?;
    // The keeper outlives the lease; a thread reaps it.
    std::thread::spawn(move || drop(keeper.wait()));
    ours.set_nonblocking(true)?;
    let stream = UnixStream::from_std(ours)?;
    Ok(Stream { listed, stream })
}

/// A listed end of ours, and the keeper's.
fn pair() -> io::Result<(Listed, StdStream, StdStream)> {
    let mut leases = leases();
    let (ours, theirs) = StdStream::pair()?;
    leases.insert(ours.as_raw_fd());
    Ok((Listed(ours.as_raw_fd()), ours, theirs))
}

impl Drop for Lease {
    /// Closes the lease and waits for the keeper's end, so that nothing of the sandbox is left.
    fn drop(&mut self) {
        let Some(stream) = self.stream.take() else {
            return;
        };
        if let Err(error) = wait_for_end(stream) {
            tracing::warn!(%error, "a keeper did not say that it is done");
        }
    }
}

fn wait_for_end(ended: Stream) -> io::Result<()> {
    let mut stream = ended.stream.into_std()?;
    let listed = ended.listed;
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(UNDO_DEADLINE))?;
    stream.shutdown(std::net::Shutdown::Write)?;
    // No copy of the descriptor keeps the sandbox from here on.
    drop(listed);
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest).map(drop)
}
