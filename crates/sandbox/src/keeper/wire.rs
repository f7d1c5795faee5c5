//! What is said on a lease and on a keeper's socket: JSON, each message with its length before it
//! as a little-endian u32.

use std::io;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use crate::error::Report;
use crate::host::HostConfig;
use crate::info::SandboxInfo;
use crate::lend::Wanted;
use crate::spec::SandboxSpec;
use crate::states::{Forget, Goal, RestoreReport, Reverted};

/// The longest message, in bytes.
const LIMIT: u32 = 1 << 20;

/// What a keeper is started for.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Order {
    pub config: HostConfig,
    pub task: Task,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Task {
    Create(Box<SandboxSpec>),
    Start {
        reference: String,
        boot_timeout: Option<Duration>,
    },
    /// A sandbox that rests goes to a state.
    GoTo {
        reference: String,
        goal: Goal,
    },
    Resume {
        reference: String,
    },
    /// A copy of `source` from one of its states. It stands still until it is told to go on.
    Copy {
        source: String,
        state: String,
        name: String,
    },
}

/// On a lease whose sandbox runs: it lives on by itself, and the lease means nothing any more. One
/// byte, so that whoever reads it among other things cannot lose half of it.
pub(super) const RELEASE: u8 = b'r';

/// On a lease: what it was given for is not wanted after all. Nothing of it is saved.
pub(super) const GIVE_UP: u8 = b'x';

/// On a lease whose copy is loaded: it goes on.
pub(super) const GO: u8 = b'g';

/// A keeper's answer on its lease.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum News {
    /// A copy holds its state, and waits to be told to go on.
    Loaded,
    Ready(Box<Ready>),
    Failed(Report),
    /// It has ended, and was saved as this snapshot, as it was to be.
    Saved {
        digest: String,
    },
}

/// A sandbox that runs, and what came of the way there.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Ready {
    pub info: SandboxInfo,
    pub way: Way,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Way {
    Booted,
    Reverted(Reverted),
    Resumed(RestoreReport),
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Request {
    Link,
    Stats,
    Execs,
    Stop { grace_ms: Option<u64> },
    Kill,
    Remove,
    Checkpoint { tag: Option<String>, replace: bool },
    GoTo(Goal),
    Forget(Forget),
    Lend(Wanted),
    TakeBack { state: String },
    Pause,
    Resume,
}

/// An answer, or why there is none.
pub(super) type Answer<T> = Result<T, Report>;

pub(super) async fn write<T: Serialize>(
    stream: &mut (impl AsyncWrite + Unpin),
    message: &T,
) -> io::Result<()> {
    let body = serde_json::to_vec(message)?;
    let length = u32::try_from(body.len())
        .ok()
        .filter(|l| *l <= LIMIT)
        .ok_or(io::ErrorKind::InvalidInput)?;
    let mut bytes = length.to_le_bytes().to_vec();
    bytes.extend(body);
    stream.write_all(&bytes).await
}

pub(super) async fn read<T: DeserializeOwned>(
    stream: &mut (impl AsyncRead + Unpin),
) -> io::Result<T> {
    let length = stream.read_u32_le().await?;
    if length > LIMIT {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut body = vec![0; length as usize];
    stream.read_exact(&mut body).await?;
    Ok(serde_json::from_slice(&body)?)
}
