//! The sandboxes of a run, and what every benchmark shares.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use sandtree::{Error, ExecSpec, ForkSpec, Guest, Host, Result, Sandbox, SandboxSpec};
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;

use crate::config::Global;
use crate::failure::Failure;
use crate::progress;

/// The image that most figures are measured with.
pub const IMAGE: &str = "tiny";

/// Runs a benchmark and removes its sandboxes, however it ends.
pub async fn measured<T>(
    global: &Global,
    work: impl AsyncFnOnce(&Crew) -> Result<T>,
) -> Result<T, Failure> {
    let config = global.config()?;
    let crew = Crew {
        home: config.home.clone(),
        host: Host::open(config).await?,
        made: Mutex::default(),
    };
    let bar = progress::spinner("measuring".to_owned());
    let measured = tokio::select! {
        measured = prepared(&crew, work) => measured.map_err(Failure::from),
        signal = signalled() => Err(signal.err().map_or(Failure::Interrupted, Failure::from)),
    };
    bar.finish_and_clear();
    let cleared = crew.clear().await;
    let measured = measured?;
    cleared?;
    Ok(measured)
}

async fn prepared<T>(crew: &Crew, work: impl AsyncFnOnce(&Crew) -> Result<T>) -> Result<T> {
    crew.host
        .ensure_image(IMAGE, progress::image(IMAGE))
        .await?;
    work(crew).await
}

/// Returns when a signal asks this program to end.
pub async fn signalled() -> Result<()> {
    let listen = |kind| signal(kind).map_err(|e| Error::io("listen for", "signals", e));
    let mut interrupt = listen(SignalKind::interrupt())?;
    let mut terminate = listen(SignalKind::terminate())?;
    let mut hangup = listen(SignalKind::hangup())?;
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
        _ = hangup.recv() => {}
    }
    Ok(())
}

/// The finished sandboxes of a run. A sandbox that is being created when a signal arrives removes
/// itself.
pub struct Crew {
    /// The directory of the host's store.
    pub home: PathBuf,
    pub host: Host,
    made: Mutex<Vec<Sandbox>>,
}

impl Crew {
    pub async fn create(&self, spec: SandboxSpec) -> Result<Sandbox> {
        self.create_on(&self.host, spec).await
    }

    /// Creates a sandbox in another store, which must outlive the crew.
    pub async fn create_on(&self, host: &Host, spec: SandboxSpec) -> Result<Sandbox> {
        let sandbox = host.create(spec).await?;
        self.join([sandbox.clone()]);
        Ok(sandbox)
    }

    pub async fn fork(&self, sandbox: &Sandbox, count: usize) -> Result<Vec<Sandbox>> {
        let (copies, _) = sandbox.fork(ForkSpec::new(count)).await?;
        self.join(copies.clone());
        Ok(copies)
    }

    /// Takes a sandbox that another program has created, to remove it at the end.
    pub fn adopt(&self, name: &str) -> Result<Sandbox> {
        let sandbox = self.host.sandbox(name)?;
        self.join([sandbox.clone()]);
        Ok(sandbox)
    }

    fn join(&self, sandboxes: impl IntoIterator<Item = Sandbox>) {
        self.made
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .extend(sandboxes);
    }

    pub async fn remove(&self, sandbox: Sandbox) -> Result<()> {
        sandbox.remove().await?;
        self.made
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .retain(|made| made.id() != sandbox.id());
        Ok(())
    }

    /// Removes all sandboxes but one.
    pub async fn clear_except(&self, kept: &Sandbox) -> Result<()> {
        let cleared = self.remove_all_but(Some(kept.id())).await;
        self.join([kept.clone()]);
        cleared
    }

    /// Removes all sandboxes that are left.
    pub async fn clear(&self) -> Result<()> {
        self.remove_all_but(None).await
    }

    async fn remove_all_but(&self, kept: Option<&str>) -> Result<()> {
        let mut left =
            std::mem::take(&mut *self.made.lock().unwrap_or_else(PoisonError::into_inner));
        left.retain(|sandbox| Some(sandbox.id()) != kept);
        let mut removals: JoinSet<_> = left
            .into_iter()
            .map(|sandbox| async move { sandbox.remove().await })
            .collect();
        let mut cleared = Ok(());
        while let Some(removed) = removals.join_next().await {
            cleared = cleared.and(removed.expect("a removal does not panic"));
        }
        cleared
    }
}

pub fn median<T: PartialOrd + Copy>(mut values: Vec<T>) -> T {
    values.sort_by(|a, b| a.partial_cmp(b).expect("measurements are numbers"));
    values[values.len() / 2]
}

pub fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

pub async fn true_once(guest: &Guest) -> Result<()> {
    guest
        .exec(ExecSpec::argv(["/bin/true"]))
        .await?
        .wait()
        .await
        .map(drop)
}

/// Runs a script in the guest, which must succeed.
pub async fn shell(sandbox: &Sandbox, script: &str) -> Result<()> {
    let status = sandbox.exec(ExecSpec::shell(script)).await?.wait().await?;
    if status.success() {
        return Ok(());
    }
    let ended = format!("it ended with {status:?}");
    Err(Error::invalid("script in the guest", script, &ended))
}

/// Writes a file that does not compress.
pub async fn write_random(sandbox: &Sandbox, path: &str, megabytes: u64) -> Result<()> {
    let script = format!("dd if=/dev/urandom of={path} bs=1M count={megabytes} 2>/dev/null");
    shell(sandbox, &script).await
}
