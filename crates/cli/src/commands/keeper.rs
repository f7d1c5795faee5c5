//! `sandtree keeper`: runs one sandbox in the background. Other commands start it; users do not.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream as StdStream;
use std::process::ExitCode;

use sandtree::{Error, Result, keeper};
use tokio::net::UnixStream;

use super::Outcome;

pub async fn run() -> Outcome {
    keeper::run(take_lease()?).await?;
    Ok(ExitCode::SUCCESS)
}

/// Standard input is the lease. `/dev/null` replaces it, so that nothing else reads from the lease.
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
