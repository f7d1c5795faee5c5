//! A host: an opened store, its QEMU, and the operations that need both.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use sandtree_engine::{Engine, Jail, KvmVerdict};
use sandtree_store::{SandboxId, Store};
use serde::Serialize;
use tokio::sync::OnceCell;

use crate::blocking::{blocking, in_place};
use crate::boxed::Boxed;
use crate::config::HostConfig;
use crate::console;
use crate::degradation::Degradation;
use crate::driver::{self, Driven, Drivers, Existence, Local};
use crate::error::{Error, Result, store_error};
#[cfg(feature = "faults")]
use crate::fault;
use crate::info::SandboxInfo;
use crate::inner::Inner;
use crate::memory;
use crate::plan;
use crate::states::{self, StateInfo};
use crate::verb::Verb;

/// An opened host; clones share it.
#[derive(Debug, Clone)]
pub struct Host {
    pub(crate) inner: Arc<Inner>,
    drivers: Arc<Drivers>,
}

impl Host {
    /// Opens the store, and removes what dead processes left unfinished in it. QEMU is looked for
    /// when it is needed.
    pub fn open(config: HostConfig) -> Boxed<'static, Result<Host>> {
        Box::pin(async move {
            let home = config.home.clone();
            let opened = blocking(move || Store::open(&home)).await;
            let store = opened.map_err(store_error("be opened"))?;
            let faults = config.fault_plan();
            Ok(Host {
                inner: Arc::new(Inner {
                    config,
                    store,
                    faults,
                    engine: OnceCell::new(),
                    serves_at_rest: AtomicBool::new(false),
                }),
                drivers: Arc::default(),
            })
        })
    }

    /// For tests: the faults of every sandbox of this host from now on.
    #[cfg(feature = "faults")]
    pub fn set_faults(&self, faults: fault::Faults) {
        self.inner.faults.set(faults);
    }

    /// The states of a sandbox, oldest first, and what could not be read.
    pub fn states(&self, reference: &str) -> Result<(Vec<StateInfo>, Vec<Error>)> {
        in_place(|| self.read_states(reference))
    }

    fn read_states(&self, reference: &str) -> Result<(Vec<StateInfo>, Vec<Error>)> {
        let dir = self.inner.find(reference)?;
        let head = dir
            .head()
            .map_err(store_error("read where a sandbox stands"))?;
        let (states, broken) = states::of(&dir)?;
        let listed = states.iter().filter(|manifest| manifest.kind.is_listed());
        let listed = listed
            .map(|manifest| StateInfo::new(&dir, manifest, head.parent.as_ref()))
            .collect();
        Ok((listed, broken))
    }

    /// The information about a sandbox, running or not, by its name or id.
    pub fn find(&self, reference: &str) -> Result<SandboxInfo> {
        let (dir, state) = in_place(|| self.inner.settled(reference))?;
        Ok(SandboxInfo::new(&dir, &state))
    }

    /// Every sandbox of the store, oldest first, and what could not be read.
    pub fn list(&self) -> Result<(Vec<SandboxInfo>, Vec<Error>)> {
        in_place(|| self.read_list())
    }

    fn read_list(&self) -> Result<(Vec<SandboxInfo>, Vec<Error>)> {
        let mut found = Vec::new();
        let mut broken = Vec::new();
        for listed in self
            .inner
            .store
            .sandboxes()
            .map_err(store_error("list its sandboxes"))?
        {
            let info = listed
                .sandbox
                .map_err(store_error("read a sandbox"))
                .and_then(|dir| self.inner.settle(dir));
            match info {
                Ok(Some((dir, state))) => found.push(SandboxInfo::new(&dir, &state)),
                Ok(None) => {}
                Err(error) => broken.push(error),
            }
        }
        found.sort_by(|a, b| (a.created_at_unix_ms, &a.id).cmp(&(b.created_at_unix_ms, &b.id)));
        Ok((found, broken))
    }

    /// The files that hold a guest's console: older bytes, newest bytes. Either may be missing.
    pub fn console(&self, reference: &str) -> Result<[PathBuf; 2]> {
        let newest = in_place(|| self.inner.find(reference))?.console();
        Ok([console::previous(&newest), newest])
    }

    /// Reports what this host can do, and the reason for each thing that it cannot do.
    pub fn doctor(&self) -> Boxed<'_, Doctor> {
        Box::pin(async move {
            let disk_free_bytes = self.inner.store.disk_free_bytes().ok();
            let memory_available_bytes = memory::available().ok().map(|available| available.bytes);
            let home = self.inner.config.home.clone();
            let qemu = match self.inner.engine().await {
                Ok(engine) => QemuReport::Found(Box::new(found(engine, self.inner.jail(None)))),
                Err(error) => QemuReport::Missing {
                    error: error.report(),
                },
            };
            Doctor {
                home,
                disk_free_bytes,
                memory_available_bytes,
                qemu,
            }
        })
    }
}

/// What `doctor` finds.
#[derive(Debug, Clone, Serialize)]
pub struct Doctor {
    pub home: PathBuf,
    pub disk_free_bytes: Option<u64>,
    pub memory_available_bytes: Option<u64>,
    pub qemu: QemuReport,
}

#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum QemuReport {
    Found(Box<QemuFound>),
    Missing { error: crate::Report },
}

#[derive(Debug, Clone, Serialize)]
pub struct QemuFound {
    pub binary: PathBuf,
    pub version: String,
    pub accelerator: String,
    /// Why it is not KVM.
    pub kvm_refused: Option<String>,
    pub disk_aio: String,
    pub io_uring_refused: Option<String>,
    /// The best way to capture memory that works here.
    pub memory_mode: String,
    /// Why it is not a better one.
    pub memory_modes_refused: Vec<Degradation>,
    /// Whether each machine gets a user id of its own.
    pub own_uid: bool,
    /// Why QEMU sees all of the file system that its user does.
    pub landlock_refused: Option<String>,
    /// Why sandboxes cannot have a screen.
    pub screens_refused: Option<String>,
    /// Features that are off in emulated processors because this QEMU computes them wrongly.
    pub miscomputed: Vec<String>,
}

fn found(engine: &Engine, jail: Jail) -> QemuFound {
    let verdicts = engine.verdicts();
    let kvm_refused = match verdicts.kvm() {
        KvmVerdict::Usable => None,
        KvmVerdict::Unusable { reason } => Some(reason.clone()),
    };
    let modes = plan::best_mode(&verdicts.tracking);
    QemuFound {
        binary: engine.binary().to_owned(),
        version: engine.version().to_string(),
        accelerator: if kvm_refused.is_none() {
            "kvm".into()
        } else {
            "tcg".into()
        },
        kvm_refused,
        screens_refused: engine.check_screens().err().map(|error| error.to_string()),
        disk_aio: verdicts.aio.name().into(),
        io_uring_refused: verdicts.aio_reason.clone(),
        memory_mode: modes.mode.to_string(),
        memory_modes_refused: modes.degraded,
        own_uid: jail.uid.is_some(),
        landlock_refused: verdicts.landlock.usable().err(),
        miscomputed: verdicts.miscomputed.clone(),
    }
}

impl Host {
    /// Begins to drive a sandbox in this process.
    pub(crate) fn drive(&self, driven: Driven) -> Local {
        let id = driven.owned.id().clone();
        let local = driver::start(self.inner.clone(), driven);
        self.drivers.add(&id, &local);
        local
    }

    /// The driver of a sandbox that this process runs.
    pub(crate) fn local(&self, id: &SandboxId) -> Option<Local> {
        self.drivers.get(id)
    }

    /// Takes a sandbox that no process runs, without starting it.
    pub(crate) fn adopt<'a>(&'a self, reference: &'a str, verb: Verb) -> Boxed<'a, Result<Local>> {
        Box::pin(async move {
            let owned = self.inner.own(reference, verb).await?;
            let state =
                in_place(|| owned.state()).map_err(store_error("read a sandbox's state"))?;
            Ok(self.drive(Driven {
                owned,
                running: None,
                state,
                existence: Existence::Committed,
            }))
        })
    }
}
