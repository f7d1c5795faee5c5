//! A running guest, as its clients use it: commands, files, connections.
//!
//! A [`Guest`] is the same whether this process or a keeper runs the sandbox: it is a connection to
//! the sandbox's hub. Dropping it ends the commands that it started and did not detach.

mod defaults;
mod exec;
mod files;
mod forward;
mod screen;
mod tree;
mod watch;

use std::sync::Arc;
use std::time::Duration;

pub(crate) use defaults::{Defaults, has_entrypoint, image_of, main_command};
pub(crate) use exec::Tail;
pub use exec::{Exec, ExecHandle, ExecId, ExecSpec, ExitStatus, Lifetime, Output, Stdin};
pub use files::{FileOwner, Files, Transfer};
pub use forward::{Forward, Tunnel};
use sandtree_proto::{
    Boot, HookFailure, Identity, Metrics, MountEnd, MountStart, Rebirth, Reply, Request,
};
use tokio::net::TcpListener;
pub(crate) use tree::check_archive;
pub use watch::Watch;

use crate::boxed::Boxed;
use crate::error::{Error, Result};
use crate::link::{self, Link, LinkError};

/// How long the guest may take for a small request.
const REQUEST_DEADLINE: Duration = Duration::from_secs(30);
/// More than disk, hooks and the parallel parts of the boot may take together.
const LONG_REQUEST_DEADLINE: Duration = Duration::from_secs(90);

/// More than an agent waits for an image's own init, which is longer than most inits take under
/// emulation.
const SETTLE_DEADLINE: Duration = Duration::from_secs(200);

#[derive(Debug, Clone)]
pub struct Guest {
    link: Link,
    defaults: Arc<Defaults>,
}

impl Guest {
    pub(crate) fn new(link: Link) -> Self {
        Self {
            link,
            defaults: Arc::default(),
        }
    }

    /// Commands in it get the defaults of its image and its sandbox.
    pub(crate) fn with_defaults(link: Link, defaults: Arc<Defaults>) -> Self {
        Self { link, defaults }
    }

    /// Starts a command.
    pub fn exec(&self, spec: ExecSpec) -> Boxed<'_, Result<Exec>> {
        Box::pin(async move { Exec::start(&self.link, self.defaults.complete(spec)).await })
    }

    /// Attaches to a detached command, from the first byte of its output.
    pub fn attach(&self, id: ExecId) -> Boxed<'_, Result<Exec>> {
        Box::pin(async move { Exec::attach(&self.link, id).await })
    }

    /// Removes a detached command that has ended, with its output.
    pub async fn discard(&self, id: &ExecId) -> Result<()> {
        Exec::discard(&self.link, id).await
    }

    pub fn files(&self) -> Files {
        Files::new(self.link.clone())
    }

    /// Connects to a port on the guest's loopback.
    pub async fn connect(&self, port: u16) -> Result<Tunnel> {
        Tunnel::open(&self.link, port).await
    }

    /// Accepts connections on `listener` and forwards each to `port` in the guest, until the result
    /// is dropped. The listener may be shared: with [`Forward::listener`] another guest can take
    /// over the port.
    pub fn forward(&self, listener: impl Into<Arc<TcpListener>>, port: u16) -> Result<Forward> {
        Forward::start(self.clone(), listener.into(), port)
    }

    /// Waits until the connection is lost, which happens when the sandbox ends or is reverted.
    pub async fn down(&self) -> LinkError {
        self.link.down().await
    }

    /// One round trip to the agent.
    pub async fn ping(&self) -> Result<()> {
        self.ping_within(REQUEST_DEADLINE).await
    }

    pub(crate) async fn ping_within(&self, deadline: Duration) -> Result<()> {
        self.request_within("ping the guest", Request::Ping, deadline)
            .await
            .map(drop)
    }

    pub async fn metrics(&self) -> Result<Metrics> {
        match self
            .request("read the guest's metrics", Request::Metrics)
            .await?
        {
            Reply::Metrics(metrics) => Ok(metrics),
            _ => Err(unexpected("read the guest's metrics")),
        }
    }

    /// Writes all unsynced data of the guest to its disk.
    pub async fn sync(&self) -> Result<()> {
        self.request("sync the guest's disk", Request::Sync)
            .await
            .map(drop)
    }

    pub(crate) async fn configure(&self, identity: Identity) -> Result<()> {
        self.request("give the guest its identity", Request::Configure(identity))
            .await
            .map(drop)
    }

    /// Boots a guest that waits without a root. The caller limits the time of the whole boot.
    pub(crate) async fn boot(&self, boot: Boot, deadline: Duration) -> Result<()> {
        self.request_within("boot the guest", Request::Boot(boot), deadline)
            .await
            .map(drop)
    }

    /// Gives a restored guest its new identity, and waits for the acknowledgement. Returns the
    /// hooks that failed.
    pub(crate) async fn restored(&self, rebirth: Rebirth) -> Result<Vec<HookFailure>> {
        let operation = "report the restore to the guest";
        match self
            .request_within(operation, Request::Restored(rebirth), LONG_REQUEST_DEADLINE)
            .await?
        {
            Reply::Restored { hooks } => Ok(hooks),
            _ => Err(unexpected(operation)),
        }
    }

    /// Moves the guest's clock by `step_ns`, and returns its new time.
    pub(crate) async fn clock(&self, step_ns: i64) -> Result<u64> {
        let operation = "set the guest's clock";
        match self.request(operation, Request::Clock { step_ns }).await? {
            Reply::Clock { unix_time_ns } => Ok(unix_time_ns),
            _ => Err(unexpected(operation)),
        }
    }

    /// Waits until the parallel parts of the boot are done.
    pub(crate) async fn settle(&self) -> Result<()> {
        self.request_within(
            "wait for the guest to settle",
            Request::Settle,
            SETTLE_DEADLINE,
        )
        .await
        .map(drop)
    }

    /// Writes everything out, trims free blocks, and blocks all writes to disks. The freeze ends by
    /// itself after `longest`.
    pub(crate) async fn freeze(&self, longest: Duration) -> Result<()> {
        let thaw_after_ms = longest.as_millis().try_into().unwrap_or(u32::MAX);
        let request = Request::Freeze { thaw_after_ms };
        self.request_within("freeze the guest's disks", request, LONG_REQUEST_DEADLINE)
            .await
            .map(drop)
    }

    /// Returns whether the disks were frozen until now.
    pub(crate) async fn thaw(&self) -> Result<bool> {
        match self
            .request("thaw the guest's disks", Request::Thaw)
            .await?
        {
            Reply::Thawed { held } => Ok(held),
            _ => Err(unexpected("thaw the guest's disks")),
        }
    }

    /// Mounts a directory that the host serves.
    pub(crate) async fn mount(&self, start: MountStart) -> Result<()> {
        let request = Request::Mount(start);
        self.request_within("mount a directory", request, LONG_REQUEST_DEADLINE)
            .await
            .map(drop)
    }

    pub(crate) async fn unmount(&self, end: MountEnd) -> Result<()> {
        let request = Request::Unmount(end);
        self.request("unmount a directory", request).await.map(drop)
    }

    /// Replaces a clock that runs at another rate than the guest assumes.
    pub(crate) async fn leave_tsc(&self) -> Result<()> {
        self.request("give the guest another clock", Request::LeaveTsc)
            .await
            .map(drop)
    }

    pub(crate) async fn shutdown(&self, grace: Duration) -> Result<()> {
        let grace_ms = grace.as_millis().try_into().unwrap_or(u32::MAX);
        self.request("ask the guest to shut down", Request::Shutdown { grace_ms })
            .await
            .map(drop)
    }

    async fn request(&self, operation: &'static str, request: Request) -> Result<Reply> {
        self.request_within(operation, request, REQUEST_DEADLINE)
            .await
    }

    async fn request_within(
        &self,
        operation: &'static str,
        request: Request,
        deadline: Duration,
    ) -> Result<Reply> {
        self.link
            .request(request, deadline)
            .await
            .map_err(|source| Error::Guest {
                operation: operation.into(),
                source,
            })
    }
}

/// An answer that does not match its request.
fn unexpected(operation: &str) -> Error {
    let source = link::protocol("an answer to another question");
    Error::Guest {
        operation: operation.into(),
        source,
    }
}
