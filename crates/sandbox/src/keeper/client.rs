//! The other side of a keeper's socket: what every program but the keeper uses.

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use sandtree_store::{Phase, SandboxDir, SandboxRecord, StateRecord};
use serde::de::DeserializeOwned;
use tokio::net::UnixStream;
use tokio::time::{Instant, sleep};

use super::serve::{Stats, short_path};
use super::wire::{self, Answer, Request};
use crate::driver::Verb;
use crate::error::{Error, Result};
use crate::guest::{Defaults, Guest, has_entrypoint, main_command};
use crate::host::{Host, Inner};
use crate::hub::ExecEntry;
use crate::info::SandboxInfo;
use crate::lend::{LentState, Wanted};
use crate::link::Link;
use crate::sandbox::Replace;
use crate::states::{Checkpoint, Forget, Forgotten, Goal, Paused, RestoreReport, Reverted};

/// A keeper's socket appears right after its sandbox counts as running.
const APPEAR_DEADLINE: Duration = Duration::from_secs(3);
/// A keeper ends when its clients have their answers.
const LEAVE_DEADLINE: Duration = Duration::from_secs(10);
const POLL: Duration = Duration::from_millis(10);

/// A running sandbox of another process.
#[derive(Debug, Clone)]
pub struct Client {
    info: SandboxInfo,
    dir: PathBuf,
    socket: PathBuf,
    host: Arc<Inner>,
    record: SandboxRecord,
}

impl Host {
    /// Finds a running sandbox's keeper.
    pub fn client(&self, reference: &str) -> Result<Client> {
        self.client_for(reference, Verb::Use)
    }

    /// The keeper of a sandbox, if it has one: a paused one may have, too.
    pub async fn keeper_of(&self, reference: &str) -> Result<Option<Client>> {
        let (dir, state) = self.inner.settled(reference)?;
        let client = self.client_of(&dir, &state);
        match (client.info.state, client.try_connect().await) {
            (Phase::Running, _) | (_, Ok(_)) => Ok(Some(client)),
            _ => Ok(None),
        }
    }

    /// As [`client`](Self::client), for what is named in the error when the sandbox does not run.
    pub fn client_for(&self, reference: &str, verb: Verb) -> Result<Client> {
        let (dir, state) = self.inner.settled(reference)?;
        if state.phase != Phase::Running {
            let name = dir.record().name.to_string();
            return Err(Error::WrongState {
                name,
                phase: state.phase,
                reason: state.reason,
                verb,
            });
        }
        Ok(self.client_of(&dir, &state))
    }

    fn client_of(&self, dir: &SandboxDir, state: &StateRecord) -> Client {
        Client {
            info: SandboxInfo::new(dir, state),
            dir: dir.path().to_owned(),
            socket: dir.keeper_socket(),
            host: self.inner.clone(),
            record: dir.record().clone(),
        }
    }
}

/// A state of a keeper's sandbox, lent to us as long as we are there.
#[derive(Debug)]
pub(crate) struct Borrowing {
    pub lent: LentState,
    client: Client,
    _stream: UnixStream,
}

impl Borrowing {
    pub async fn give_back(&self) -> Result<()> {
        self.client
            .call(&Request::TakeBack {
                state: self.lent.state.clone(),
            })
            .await
    }
}

impl Client {
    /// What `run` runs: the image's entry point, or another, with `args` instead of the image's
    /// own. Without either, a shell.
    pub fn main_command(
        &self,
        args: Vec<OsString>,
        entrypoint: Option<Vec<OsString>>,
    ) -> Result<Vec<OsString>> {
        main_command(&self.host, &self.record, args, entrypoint)
    }

    /// Whether the image says by itself what is to run in it.
    pub fn has_entrypoint(&self) -> Result<bool> {
        has_entrypoint(&self.host, &self.record)
    }

    pub fn info(&self) -> &SandboxInfo {
        &self.info
    }

    /// A connection to the guest.
    pub async fn guest(&self) -> Result<Guest> {
        let defaults = Arc::new(Defaults::of(&self.host, &self.record)?);
        let mut stream = self.connect().await?;
        self.ask::<()>(&mut stream, &Request::Link).await?;
        let link = Link::connect(stream).await;
        let link = link.map_err(|source| Error::Guest {
            operation: "reach the guest".into(),
            source,
        })?;
        Ok(Guest::with_defaults(link, defaults))
    }

    pub async fn stats(&self) -> Result<Stats> {
        self.call(&Request::Stats).await
    }

    /// The detached commands of this guest.
    pub async fn execs(&self) -> Result<Vec<ExecEntry>> {
        self.call(&Request::Execs).await
    }

    /// Shuts the guest down. Its disk is synced when this returns.
    pub async fn stop(&self, grace: Option<Duration>) -> Result<()> {
        let grace_ms = grace.map(|grace| grace.as_millis().try_into().unwrap_or(u64::MAX));
        self.end(&Request::Stop { grace_ms }).await
    }

    pub async fn kill(&self) -> Result<()> {
        self.end(&Request::Kill).await
    }

    /// Ends the machine and removes everything of the sandbox.
    pub async fn remove(&self) -> Result<()> {
        self.end(&Request::Remove).await
    }

    pub async fn checkpoint(&self, tag: Option<String>, replace: Replace) -> Result<Checkpoint> {
        self.call(&Request::Checkpoint {
            tag,
            replace: replace.is_yes(),
        })
        .await
    }

    /// Goes to another state.
    pub async fn go_to(&self, goal: Goal) -> Result<Reverted> {
        self.call(&Request::GoTo(goal)).await
    }

    /// Removes states.
    pub async fn forget(&self, which: Forget) -> Result<Forgotten> {
        self.call(&Request::Forget(which)).await
    }

    /// Borrows a state; to be given back when it is not needed any more. It goes back, too, when
    /// this is dropped.
    pub(crate) async fn borrow(&self, wanted: Wanted) -> Result<Borrowing> {
        let mut stream = self.connect().await?;
        let lent = self.ask(&mut stream, &Request::Lend(wanted)).await?;
        Ok(Borrowing {
            lent,
            client: self.clone(),
            _stream: stream,
        })
    }

    /// Writes everything to disk and ends the machine. The keeper stays while clients wait for it
    /// to go on.
    pub async fn pause(&self) -> Result<Paused> {
        let keeper = self.keeper();
        let paused: Paused = self.call(&Request::Pause).await?;
        if !paused.awaited {
            self.gone(keeper).await?;
        }
        Ok(paused)
    }

    /// Lets a sandbox go on whose keeper stayed.
    pub async fn resume(&self) -> Result<RestoreReport> {
        self.call(&Request::Resume).await
    }

    /// Asks for something that ends the keeper, and waits for that, too: then nothing of the
    /// sandbox runs any more.
    async fn end(&self, request: &Request) -> Result<()> {
        let keeper = self.keeper();
        self.call::<()>(request).await?;
        self.gone(keeper).await
    }

    /// To be opened before it is asked to end: afterwards the number could be another's.
    fn keeper(&self) -> Option<OwnedFd> {
        let pid = self
            .info
            .keeper_pid
            .and_then(|pid| Pid::from_raw(pid.try_into().ok()?))?;
        pidfd_open(pid, PidfdFlags::empty()).ok()
    }

    /// Waits until the keeper is gone. One that was gone already needs no waiting.
    async fn gone(&self, keeper: Option<OwnedFd>) -> Result<()> {
        let Some(keeper) = keeper else { return Ok(()) };
        let gone =
            tokio::task::spawn_blocking(move || is_gone_within(&keeper, LEAVE_DEADLINE)).await;
        match gone.expect("waiting does not panic") {
            true => Ok(()),
            false => Err(self.silent(io::ErrorKind::TimedOut.into())),
        }
    }

    async fn call<T: DeserializeOwned>(&self, request: &Request) -> Result<T> {
        let mut stream = self.connect().await?;
        self.ask(&mut stream, request).await
    }

    async fn ask<T: DeserializeOwned>(
        &self,
        stream: &mut UnixStream,
        request: &Request,
    ) -> Result<T> {
        wire::write(stream, request)
            .await
            .map_err(|e| self.silent(e))?;
        let answer: Answer<T> = wire::read(stream).await.map_err(|e| self.silent(e))?;
        answer.map_err(|report| Error::Remote { report })
    }

    async fn connect(&self) -> Result<UnixStream> {
        let end = Instant::now() + APPEAR_DEADLINE;
        loop {
            match self.try_connect().await {
                Err(e) if is_early(&e) && Instant::now() < end => sleep(POLL).await,
                connected => return connected.map_err(|e| self.silent(e)),
            }
        }
    }

    async fn try_connect(&self) -> io::Result<UnixStream> {
        let dir = std::fs::File::open(&self.dir)?;
        UnixStream::connect(short_path(&dir, &self.socket)).await
    }

    fn silent(&self, source: io::Error) -> Error {
        Error::Keeper {
            name: self.info.name.clone(),
            source,
        }
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
