//! `sandtree keeper`: one sandbox in the background. Started by `run` and `start`, never by hand.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream as StdStream;
use std::process::ExitCode;

use sandtree::keeper::{self, Lease, Order, Ready};
use sandtree::{Error, Result};
use tokio::net::UnixStream;

use super::Outcome;
use crate::{progress, show};

/// Starts a keeper and waits until its sandbox runs.
pub async fn start(order: &Order, message: &str) -> Result<(Lease, Ready)> {
    let spinner = progress::spinner(message);
    let mut lease = spawn(order).await?;
    let ready = lease.ready().await;
    spinner.finish_and_clear();
    let ready = ready?;
    show::notes(&ready.info.degraded);
    Ok((lease, ready))
}

/// Starts a keeper and waits for nothing.
pub async fn spawn(order: &Order) -> Result<Lease> {
    let program = std::env::current_exe().map_err(|e| Error::io("find", "our own program", e))?;
    Lease::start(&program, &["keeper"], order).await
}

pub async fn run() -> Outcome {
    keeper::run(take_lease()?).await?;
    Ok(ExitCode::SUCCESS)
}

/// The lease is our standard input; `/dev/null` takes its place, so that nothing else can read from
/// it.
fn take_lease() -> Result<UnixStream> {
    let failed = |e: std::io::Error| Error::io("take", "the lease from standard input", e);
    let lease: OwnedFd = rustix::stdio::stdin()
        .try_clone_to_owned()
        .map_err(failed)?;
    let null = std::fs::File::open("/dev/null").map_err(failed)?;
    rustix::stdio::dup2_stdin(&null).map_err(|e| failed(e.into()))?;
    let lease = StdStream::from(lease);
    lease.set_nonblocking(true).map_err(failed)?;
    UnixStream::from_std(lease).map_err(failed)
}
