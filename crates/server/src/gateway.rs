//! What all requests share: the host, connections to guests, and the commands and watches that
//! clients find again by number.
//!
//! Always: everything here can be found anew from keepers and the store, but for watches that
//! clients poll.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use sandtree::{ErrorKind, Guest, Host, KeyInfo, Phase, Sandbox, SandboxInfo};
use tokio::sync::{OwnedMutexGuard, watch};

use crate::builds::Builds;
use crate::config::Config;
use crate::error::{Fault, Result, Retry};
use crate::first_use::FirstUses;
use crate::labels::Labels;
use crate::locked::lock;
use crate::observe::{self, Figures, Operation, Spans, Trail};
use crate::processes::Processes;
use crate::repeats::Repeats;
use crate::texts::Texts;
use crate::watchers::Watchers;

/// What a sandbox that traffic resumes runs for, at least.
const AUTO_RESUME_LEAST: Duration = Duration::from_secs(300);
/// How long the end of a guest may take to be recorded. A sandbox that was reverted runs on.
const RECORDED_WITHIN: Duration = Duration::from_secs(1);
const RECORDED_POLL: Duration = Duration::from_millis(10);
const MINUTE: Duration = Duration::from_secs(60);

/// The state of a server; clones share it.
#[derive(Debug, Clone)]
pub struct Gateway {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    host: Host,
    config: Config,
    connections: Mutex<HashMap<String, Connection>>,
    /// When each key created sandboxes in the last minute.
    creations: Mutex<HashMap<String, Vec<Instant>>>,
    pub processes: Processes,
    pub watchers: Watchers,
    repeats: Repeats,
    /// Keys with limits whose sandboxes are being made.
    admissions: Repeats,
    first_uses: FirstUses,
    figures: Figures,
    spans: Spans,
    builds: Builds,
}

/// What a request would make run.
#[derive(Debug, Clone, Copy)]
pub struct New {
    pub sandboxes: u32,
    /// Of all of them together.
    pub memory_bytes: u64,
}

/// The permission to make sandboxes run.
#[derive(Debug)]
pub struct Admission {
    _turn: Option<OwnedMutexGuard<()>>,
}

/// A connection to a running guest, which all requests for it share.
#[derive(Debug, Clone)]
pub struct Connection {
    pub sandbox: Sandbox,
    pub guest: Guest,
    pub(crate) texts: Texts,
    /// Closes when the sandbox stops running or goes to another state.
    alive: watch::Receiver<()>,
}

impl Connection {
    pub fn id(&self) -> &str {
        self.sandbox.id()
    }

    /// Waits until the sandbox stops running, or goes to another state.
    pub async fn ended(&self) {
        let mut alive = self.alive.clone();
        while alive.changed().await.is_ok() {}
        self.recorded().await;
    }

    /// Waits for a short time until the store says that the sandbox does not run: clients whose
    /// stream broke ask at once why.
    pub async fn recorded(&self) {
        let end = Instant::now() + RECORDED_WITHIN;
        while self.sandbox.info().is_ok_and(|info| info.is_running()) && Instant::now() < end {
            tokio::time::sleep(RECORDED_POLL).await;
        }
    }

    pub(crate) fn is_alive(&self) -> bool {
        self.alive.has_changed().is_ok() && self.guest.down().now_or_never().is_none()
    }
}

impl Gateway {
    pub fn new(host: Host, config: Config) -> Self {
        Self {
            inner: Arc::new(Inner {
                host,
                spans: Spans::new(config.traces.as_ref()),
                config,
                connections: Mutex::default(),
                creations: Mutex::default(),
                processes: Processes::default(),
                watchers: Watchers::default(),
                repeats: Repeats::default(),
                admissions: Repeats::default(),
                first_uses: FirstUses::default(),
                figures: Figures::default(),
                builds: Builds::default(),
            }),
        }
    }

    pub fn host(&self) -> &Host {
        &self.inner.host
    }

    pub fn config(&self) -> &Config {
        &self.inner.config
    }

    pub(crate) fn processes(&self) -> &Processes {
        &self.inner.processes
    }

    pub(crate) fn builds(&self) -> &Builds {
        &self.inner.builds
    }

    pub(crate) fn repeats(&self) -> &Repeats {
        &self.inner.repeats
    }

    pub(crate) fn first_uses(&self) -> &FirstUses {
        &self.inner.first_uses
    }

    pub(crate) fn figures(&self) -> &Figures {
        &self.inner.figures
    }

    pub(crate) fn spans(&self) -> &Spans {
        &self.inner.spans
    }

    pub(crate) fn watchers(&self) -> &Watchers {
        &self.inner.watchers
    }

    /// A sandbox by its id, for the control plane.
    pub fn sandbox(&self, id: &str) -> Result<(Sandbox, SandboxInfo)> {
        let found = || -> sandtree::Result<_> {
            // To find it and to read its state are reads of the store; one of them is enough here.
            let sandbox = match self.known(id) {
                Some(known) => known.sandbox,
                None => self.host().sandbox(id)?,
            };
            let info = sandbox.info()?;
            Ok((sandbox, info))
        };
        let shown = |info: &SandboxInfo| is_shown(info.state);
        match found() {
            Ok((sandbox, info)) if shown(&info) => Ok((sandbox, info)),
            Ok(_) => Err(no_sandbox(id)),
            Err(error) if error.kind() == ErrorKind::NotFound => Err(no_sandbox(id)),
            // What cannot be a name is the name of nothing.
            Err(error) if error.kind() == ErrorKind::Invalid => Err(no_sandbox(id)),
            Err(error) => Err(error.into()),
        }
    }

    /// A connection to a sandbox that runs, or that traffic resumes.
    pub async fn connect(&self, sandbox: Sandbox, info: &SandboxInfo) -> Result<Connection> {
        if info.state != Phase::Running {
            // What is known belongs to the guest before the pause.
            lock(&self.inner.connections).remove(&info.id);
            self.resume_for_traffic(&sandbox, info).await?;
        } else if let Some(known) = self.known(&info.id) {
            return Ok(known);
        }
        self.join(sandbox).await
    }

    fn known(&self, id: &str) -> Option<Connection> {
        let mut connections = lock(&self.inner.connections);
        let known = connections.get(id)?;
        if known.is_alive() {
            return Some(known.clone());
        }
        connections.remove(id);
        None
    }

    async fn resume_for_traffic(&self, sandbox: &Sandbox, info: &SandboxInfo) -> Result<()> {
        // Traffic continues a guest where it was; it does not boot one from its disk.
        if !Labels::of(info).auto_resume || info.state != Phase::Paused {
            return Err(Fault::sandbox_gone());
        }
        wake(sandbox, info.state).await?;
        let after = info.expiry.map(|expiry| expiry.after_ms);
        let after = after.map(|ms| Duration::from_millis(ms).max(AUTO_RESUME_LEAST));
        if after.is_some() {
            sandbox.expire(after).await?;
        }
        Ok(())
    }

    async fn join(&self, sandbox: Sandbox) -> Result<Connection> {
        let mut states = sandbox.watch().await?;
        let guest = sandbox.guest().await?;
        let (living, alive) = watch::channel(());
        let connection = Connection {
            sandbox: sandbox.clone(),
            guest: guest.clone(),
            texts: Texts::default(),
            alive,
        };
        let gateway = self.clone();
        tokio::spawn(async move {
            let stopped = async {
                while let Some(state) = states.changed().await {
                    if state.phase != Some(Phase::Running) {
                        return;
                    }
                }
            };
            tokio::select! {
                () = stopped => {}
                _ = guest.down() => {}
                // The connection was not kept.
                () = living.closed() => {}
            }
            drop(living);
            gateway.forget(&sandbox);
        });
        let mut connections = lock(&self.inner.connections);
        let known = connections.get(connection.id());
        if let Some(known) = known.filter(|known| known.is_alive()) {
            // Another request was faster; ours closes.
            return Ok(known.clone());
        }
        connections.insert(connection.id().to_owned(), connection.clone());
        Ok(connection)
    }

    /// Drops what belongs to a guest that does not run any more. Watches of one that is paused
    /// wait for it.
    fn forget(&self, sandbox: &Sandbox) {
        let id = sandbox.id();
        // Another request may have joined the next guest already.
        if self.known(id).is_some() {
            return;
        }
        self.inner.processes.forget(id);
        if sandbox.state().is_over() {
            self.inner.watchers.forget(id);
        }
    }

    /// Refuses what is over the limits of a key. The caller keeps the admission until its sandboxes
    /// run: they count from then on, and other requests of the key wait until then.
    pub async fn admit(&self, key: &KeyInfo, new: New) -> Result<Admission> {
        self.admit_rate(key, new.sandboxes)?;
        let limits = &key.limits;
        if limits.sandboxes.is_none() && limits.memory_bytes.is_none() {
            return Ok(Admission { _turn: None });
        }
        let turn = self.inner.admissions.enter(&key.id).await;
        let (all, _) = self.host().list()?;
        let mine = all
            .iter()
            .filter(|info| info.is_running() && Labels::of(info).key.as_deref() == Some(&key.id));
        let mut count = new.sandboxes;
        let mut memory = new.memory_bytes;
        for info in mine {
            count += 1;
            memory = memory.saturating_add(info.memory_bytes);
        }
        if let Some(most) = limits.sandboxes.filter(|most| count > *most) {
            let message = format!("this key may run {most} sandboxes at a time");
            return Err(Fault::too_many(message, Retry::Never));
        }
        if let Some(most) = limits.memory_bytes.filter(|most| memory > *most) {
            let most = most >> 20;
            let message = format!("this key may use {most} MiB of memory at a time");
            return Err(Fault::too_many(message, Retry::Never));
        }
        Ok(Admission { _turn: Some(turn) })
    }

    fn admit_rate(&self, key: &KeyInfo, new: u32) -> Result<()> {
        let Some(most) = key.limits.creates_per_minute else {
            return Ok(());
        };
        let now = Instant::now();
        let mut creations = lock(&self.inner.creations);
        let recent = creations.entry(key.id.clone()).or_default();
        recent.retain(|at| now.duration_since(*at) < MINUTE);
        if recent.len() + new as usize <= most as usize {
            recent.extend(std::iter::repeat_n(now, new as usize));
            return Ok(());
        }
        let oldest = recent
            .first()
            .map_or(MINUTE, |at| MINUTE.saturating_sub(now.duration_since(*at)));
        let message = format!("this key may create {most} sandboxes a minute");
        let retry = Retry::AfterSeconds(oldest.as_secs() + 1);
        Err(Fault::too_many(message, retry))
    }
}

/// Makes a sandbox run that does not: resumed with its memory, or booted from its disk.
pub async fn wake(sandbox: &Sandbox, phase: Phase) -> Result<()> {
    let woken = match phase {
        Phase::Paused => sandbox.resume().await.map(Some),
        _ => sandbox.start(None).await.map(|()| None),
    };
    Trail::did(Operation::Resume, &woken);
    if let Ok(Some(report)) = &woken {
        Trail::restored(Operation::Resume, report);
    }
    observe::sample(sandbox);
    match woken.map(drop) {
        // Another request was faster.
        Err(_) if sandbox.info().is_ok_and(|info| info.is_running()) => Ok(()),
        other => Ok(other?),
    }
}

/// Whether the control plane shows a sandbox in this phase.
pub fn is_shown(phase: Phase) -> bool {
    phase != Phase::Creating
}

pub fn no_sandbox(id: &str) -> Fault {
    Fault::not_found(format!("sandbox \"{id}\" not found"))
}
