//! A sandbox, which this process owns or has found.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use pyo3::IntoPyObject;
use pyo3::prelude::{Py, PyAny, PyResult, pyclass, pymethods};
use sandtree::{
    ApplyOptions, Error, ExecSpec, Forget, ForkSpec, Goal, InUse, MountSpec, OwnedSandbox, Result,
    SaveSpec, parse_target,
};
use serde::Deserialize;
use tokio::net::TcpListener;

use crate::command::{Ended, ExecRequest, GuestCommand, ended};
use crate::convert::{Blob, json, parse, reports};
use crate::display::Display;
use crate::files::Files;
use crate::progress::Meter;
use crate::runtime::{self, Operation};
use crate::watch::Watch;

/// The newest bytes of a console that are read.
const CONSOLE_MAX: usize = 4 << 20;

#[pyclass(frozen)]
#[derive(Debug)]
pub struct Sandbox {
    sandbox: sandtree::Sandbox,
    /// Present as long as the sandbox belongs to this process.
    owned: Mutex<Option<OwnedSandbox>>,
}

/// A verb with its arguments and a JSON answer.
#[derive(Debug, Deserialize)]
#[serde(tag = "verb", rename_all = "snake_case", deny_unknown_fields)]
enum Call {
    Info,
    State,
    States,
    Stats,
    Execs,
    Checkpoint {
        tag: Option<String>,
        replace: bool,
    },
    GoTo {
        goal: Goal,
    },
    Forget {
        which: Forget,
    },
    Pause,
    Resume,
    Stop {
        grace_ms: Option<u64>,
    },
    Kill,
    Start {
        boot_timeout_ms: Option<u64>,
    },
    Remove,
    Save(Save),
    Mount {
        spec: MountSpec,
    },
    Unmount {
        path: String,
        in_use: InUse,
    },
    Changes {
        mount: String,
    },
    Patch {
        mount: String,
    },
    Apply {
        mount: String,
        dry_run: bool,
        force: bool,
    },
}

#[derive(Debug, Deserialize)]
struct Save {
    target: String,
    replace: bool,
    memory: bool,
    state: Option<String>,
    labels: BTreeMap<String, String>,
    compress: bool,
    delete_checkpoints: bool,
}

impl Save {
    fn spec(self) -> Result<SaveSpec> {
        Ok(SaveSpec {
            target: parse_target(&self.target)?,
            replace: self.replace.into(),
            memory: self.memory,
            from: self.state,
            labels: self.labels,
            compress: self.compress,
            delete_checkpoints: self.delete_checkpoints,
        })
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Fork {
    count: usize,
    name: Option<String>,
    concurrency: Option<usize>,
    mounts: sandtree::ForkMounts,
}

impl Fork {
    fn spec(self) -> ForkSpec {
        let spec = ForkSpec::new(self.count);
        ForkSpec {
            name: self.name,
            concurrency: self.concurrency.unwrap_or(spec.concurrency),
            mounts: self.mounts,
            ..spec
        }
    }
}

/// A value of [`Sandbox::display`].
#[derive(Debug, IntoPyObject)]
enum Screen {
    Display(Display),
    Missing(String),
}

impl Sandbox {
    pub fn found(sandbox: sandtree::Sandbox) -> Self {
        Self {
            sandbox,
            owned: Mutex::new(None),
        }
    }

    pub fn owned(owned: OwnedSandbox) -> Self {
        Self {
            sandbox: owned.sandbox().clone(),
            owned: Mutex::new(Some(owned)),
        }
    }

    fn handle(&self) -> sandtree::Sandbox {
        self.sandbox.clone()
    }

    /// Takes the ownership, to end or to release the sandbox.
    fn take(&self) -> Option<OwnedSandbox> {
        let mut owned = self.owned.lock().unwrap_or_else(PoisonError::into_inner);
        owned.take()
    }
}

impl Drop for Sandbox {
    /// A sandbox that belongs to this process is removed, in the background.
    fn drop(&mut self) {
        if let Some(owned) = self.take() {
            runtime::drop_later(owned);
        }
    }
}

#[pymethods]
impl Sandbox {
    #[getter]
    fn id(&self) -> &str {
        self.sandbox.id()
    }

    #[getter]
    fn name(&self) -> &str {
        self.sandbox.name()
    }

    /// Whether the sandbox is removed with this object.
    #[getter]
    fn is_owned(&self) -> bool {
        let owned = self.owned.lock().unwrap_or_else(PoisonError::into_inner);
        owned.is_some()
    }

    /// The files of the guest.
    fn files(&self) -> Files {
        Files::new(self.handle())
    }

    /// The screen, or a report as JSON if the sandbox has none.
    fn display(&self) -> Screen {
        match self.sandbox.display() {
            Ok(display) => Screen::Display(Display::new(display)),
            Err(error) => Screen::Missing(json(&error.report()).unwrap_or_default()),
        }
    }

    /// Carries out a verb. Request and result are JSON.
    fn call(
        &self,
        request: &str,
        progress: Option<Py<PyAny>>,
        done: Py<PyAny>,
    ) -> PyResult<Operation> {
        let request: Result<Call> = parse("request", request);
        let sandbox = self.handle();
        let meter = Meter::new(progress);
        runtime::start(
            done,
            async move { answer(&sandbox, request?, &meter).await },
        )
    }

    /// Starts a command. The result is a [`GuestCommand`].
    fn exec(&self, request: ExecRequest, done: Py<PyAny>) -> PyResult<Operation> {
        let sandbox = self.handle();
        runtime::start(done, async move {
            let exec = sandbox.exec(request.spec()?).await?;
            Ok(GuestCommand::of(exec))
        })
    }

    /// Starts what `run` runs: the image's entry point, or another. The result is a
    /// [`GuestCommand`].
    fn exec_main(
        &self,
        request: ExecRequest,
        entrypoint: Option<Vec<OsString>>,
        done: Py<PyAny>,
    ) -> PyResult<Operation> {
        let sandbox = self.handle();
        runtime::start(done, async move {
            let spec = request.spec()?;
            let argv = sandbox.main_command(spec.argv, entrypoint)?;
            let exec = sandbox.exec(ExecSpec { argv, ..spec }).await?;
            Ok(GuestCommand::of(exec))
        })
    }

    /// Joins a detached command. The result is a [`GuestCommand`].
    fn attach(&self, id: &str, done: Py<PyAny>) -> PyResult<Operation> {
        let sandbox = self.handle();
        let id = id.parse();
        runtime::start(done, async move {
            Ok(GuestCommand::of(sandbox.attach(id?).await?))
        })
    }

    /// Runs a command to its end. The result is how it ended, its stdout and its stderr, at most
    /// `limit` bytes of each.
    fn run(
        &self,
        request: ExecRequest,
        stdin: Option<Vec<u8>>,
        limit: usize,
        done: Py<PyAny>,
    ) -> PyResult<Operation> {
        let sandbox = self.handle();
        runtime::start(done, async move {
            ran(&sandbox, request.spec()?, stdin, limit).await
        })
    }

    /// Makes running copies. The result is the copies, and the report as JSON.
    fn fork(&self, request: &str, done: Py<PyAny>) -> PyResult<Operation> {
        let request: Result<Fork> = parse("request", request);
        let sandbox = self.handle();
        runtime::start(done, async move {
            let (begun, report) = sandbox.begin_fork(request?.spec()).await?;
            let owned = begun.own().await?.commit().await?.owned();
            let copies: Vec<_> = owned.into_iter().map(Sandbox::owned).collect();
            Ok((copies, json(&report)?))
        })
    }

    /// Lets the sandbox continue without this process.
    fn detach(&self, done: Py<PyAny>) -> PyResult<Operation> {
        let owned = self.take();
        runtime::start(done, async move {
            match owned {
                Some(owned) => owned.release().await.map(drop),
                None => Ok(()),
            }
        })
    }

    /// Removes a sandbox that belongs to this process. The result is the digest of its snapshot,
    /// if it was saved.
    fn end(&self, done: Py<PyAny>) -> PyResult<Operation> {
        let owned = self.take();
        runtime::start(done, async move {
            match owned {
                Some(owned) => owned.end().await,
                None => Ok(None),
            }
        })
    }

    /// Every state from the present one on. The result is a [`Watch`].
    fn watch(&self, done: Py<PyAny>) -> PyResult<Operation> {
        let sandbox = self.handle();
        runtime::start(done, async move { Ok(Watch::new(sandbox.watch().await?)) })
    }

    /// Forwards a port of the host's loopback into the guest. The result is a [`Forward`].
    fn forward(&self, guest: u16, host: u16, done: Py<PyAny>) -> PyResult<Operation> {
        let sandbox = self.handle();
        runtime::start(done, async move {
            let address = (Ipv4Addr::LOCALHOST, host);
            let listener = TcpListener::bind(address).await;
            let listener = listener.map_err(|e| Error::io("listen on", "127.0.0.1", e))?;
            let forward = sandbox.forward(listener, guest).await?;
            Ok(Forward {
                port: forward.address().port(),
                forward: Mutex::new(Some(forward)),
            })
        })
    }

    /// The newest part of the guest's console.
    fn console(&self, done: Py<PyAny>) -> PyResult<Operation> {
        let sandbox = self.handle();
        runtime::start(done, async move {
            let files = sandbox.host().console(sandbox.id())?;
            let read = tokio::task::spawn_blocking(move || console(&files));
            let bytes = read.await.expect("reading does not panic")?;
            Ok(Blob(Bytes::from(bytes)))
        })
    }
}

/// A port of the host that leads into a guest, until it is closed or dropped.
#[pyclass(frozen)]
#[derive(Debug)]
pub struct Forward {
    #[pyo3(get)]
    port: u16,
    forward: Mutex<Option<sandtree::Forward>>,
}

#[pymethods]
impl Forward {
    fn close(&self) {
        let forward = self
            .forward
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        runtime::drop_later(forward);
    }
}

async fn ran(
    sandbox: &sandtree::Sandbox,
    spec: ExecSpec,
    stdin: Option<Vec<u8>>,
    limit: usize,
) -> Result<(Ended, Blob, Blob)> {
    let exec = sandbox.exec(spec).await?;
    let mut input = exec.stdin.clone();
    let feeding = async {
        if let Some(stdin) = stdin {
            input.write(&stdin).await?;
            input.close()?;
        }
        Ok(())
    };
    let (output, ()) = tokio::try_join!(exec.output(limit), feeding)?;
    let stdout = Blob(Bytes::from(output.stdout));
    let stderr = Blob(Bytes::from(output.stderr));
    Ok((ended(output.status), stdout, stderr))
}

fn console(files: &[PathBuf; 2]) -> Result<Vec<u8>> {
    let mut all = Vec::new();
    for file in files {
        match std::fs::read(file) {
            Ok(bytes) => all.extend(bytes),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(Error::io("read", file, error)),
        }
    }
    let surplus = all.len().saturating_sub(CONSOLE_MAX);
    all.drain(..surplus);
    Ok(all)
}

/// The same word for each verb as in `Call`, and the library's own answer as JSON.
async fn answer(sandbox: &sandtree::Sandbox, call: Call, meter: &Meter) -> Result<String> {
    let duration = |ms: Option<u64>| ms.map(Duration::from_millis);
    match call {
        Call::Info => json(&sandbox.info()?),
        Call::State => json(&sandbox.state()),
        Call::States => {
            let (states, errors) = sandbox.states()?;
            json(&serde_json::json!({ "states": states, "errors": reports(&errors) }))
        }
        Call::Stats => json(&sandbox.stats().await?),
        Call::Execs => json(&sandbox.execs().await?),
        Call::Checkpoint { tag, replace } => {
            json(&sandbox.checkpoint(tag.as_deref(), replace.into()).await?)
        }
        Call::GoTo { goal } => json(&sandbox.go_to(goal).await?),
        Call::Forget { which } => json(&sandbox.forget(which).await?),
        Call::Pause => json(&sandbox.pause().await?),
        Call::Resume => json(&sandbox.resume().await?),
        Call::Stop { grace_ms } => json(&sandbox.stop(duration(grace_ms)).await?),
        Call::Kill => json(&sandbox.kill().await?),
        Call::Start { boot_timeout_ms } => json(&sandbox.start(duration(boot_timeout_ms)).await?),
        Call::Remove => json(&sandbox.remove().await?),
        Call::Save(save) => json(&sandbox.save(save.spec()?, meter.transfer("saving")).await?),
        Call::Mount { spec } => json(&sandbox.mount(spec).await?),
        Call::Unmount { path, in_use } => json(&sandbox.unmount(&path, in_use).await?),
        Call::Changes { mount } => json(&sandbox.changes(&mount).await?),
        Call::Patch { mount } => json(&sandbox.patch(&mount).await?),
        Call::Apply {
            mount,
            dry_run,
            force,
        } => {
            let options = ApplyOptions { dry_run, force };
            json(&sandbox.apply(&mount, options).await?)
        }
    }
}
