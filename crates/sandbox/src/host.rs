//! A host: an opened store, the QEMU beside it, and what they can do together.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use sandtree_engine::{self as engine, Engine, EngineConfig, Jail, KvmVerdict, Machine, Verdicts};
use sandtree_images::ToolEnv;
use sandtree_store::{
    self as store, Name, Owned, Phase, SandboxDir, SandboxId, StateRecord, Store,
};
use serde::{Deserialize, Serialize};
use tokio::sync::OnceCell;

use crate::blocking::blocking;
use crate::capture;
use crate::console;
use crate::driver::{self, Driven, Existence, Local, WeakLocal};
use crate::error::{Error, Result, store_error};
use crate::fault::{self, Step};
use crate::info::{HOST_WENT_DOWN, SandboxInfo};
use crate::keeper::KeeperProgram;
use crate::memory;
use crate::moment::{boot_id, now_unix_ms};
use crate::save;
use crate::spec::parse_name;
use crate::states::{self, StateInfo};
use crate::verb::{Verb, permits};

/// The first of the user ids that machines run as when we are root. Above every range that
/// distributions and container engines hand out.
const MACHINE_UIDS: u32 = 0x7000_0000;
/// How many there are: as many as six hexadecimal digits of a sandbox's id tell apart.
const MACHINES: u64 = 1 << 24;

/// How long a keeper may take to end once its sandbox rests: it waits for its clients.
const KEEPER_LEAVES: Duration = Duration::from_secs(5);
const KEEPER_POLL: Duration = Duration::from_millis(5);

/// What a host is opened with. The library reads no environment: whoever opens it says where things
/// are.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct HostConfig {
    /// The store's directory, made if missing.
    pub home: PathBuf,
    /// The QEMU to use.
    pub qemu: Option<PathBuf>,
    /// The directories to look for QEMU in, if it is not named, and for the tools that make images.
    pub search: Vec<PathBuf>,
    /// Variables that the host's tools get when images are made. Their `PATH` is `search`.
    #[serde(default)]
    pub tool_env: ToolEnv,
    /// Whom machines run as.
    #[serde(default)]
    pub machine_user: MachineUser,
    /// Where sandboxes run that this host starts. Not sent to keepers: theirs run in themselves.
    #[serde(skip)]
    pub run_in: RunIn,
    /// The faults that a test injects.
    #[cfg(feature = "faults")]
    #[serde(default)]
    pub faults: fault::Faults,
}

impl HostConfig {
    pub fn new(home: impl Into<PathBuf>, search: Vec<PathBuf>) -> Self {
        Self {
            home: home.into(),
            qemu: None,
            search,
            tool_env: ToolEnv::default(),
            machine_user: MachineUser::Auto,
            run_in: RunIn::ThisProcess,
            #[cfg(feature = "faults")]
            faults: fault::Faults::default(),
        }
    }

    #[cfg(feature = "faults")]
    fn fault_plan(&self) -> fault::Plan {
        fault::Plan::new(self.faults.clone())
    }

    #[cfg(not(feature = "faults"))]
    fn fault_plan(&self) -> fault::Plan {
        fault::Plan
    }
}

/// Where sandboxes run that a host starts.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum RunIn {
    /// They end with this process.
    #[default]
    ThisProcess,
    /// Each in a background process of its own, which outlives this one.
    Keeper(KeeperProgram),
}

/// Whom the QEMU processes of a host run as.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MachineUser {
    /// A user id of its own for each machine, where the caller can give one: as root, with such ids
    /// in the user namespace.
    #[default]
    Auto,
    /// The caller.
    Caller,
}

impl FromStr for MachineUser {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "auto" => Ok(Self::Auto),
            "caller" => Ok(Self::Caller),
            other => Err(Error::invalid(
                "whom machines run as",
                other,
                "auto or caller",
            )),
        }
    }
}

/// An opened host; clones share it.
#[derive(Debug, Clone)]
pub struct Host {
    pub(crate) inner: Arc<Inner>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    pub config: HostConfig,
    pub store: Store,
    pub faults: fault::Plan,
    engine: OnceCell<Engine>,
    /// The sandboxes that this process runs.
    drivers: Mutex<HashMap<SandboxId, WeakLocal>>,
}

impl Host {
    /// Opens the store, and removes what dead processes left unfinished in it. QEMU is looked for
    /// when it is needed.
    pub async fn open(config: HostConfig) -> Result<Host> {
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
                drivers: Mutex::default(),
            }),
        })
    }

    /// For tests: the faults of every sandbox of this host from now on.
    #[cfg(feature = "faults")]
    pub fn set_faults(&self, faults: fault::Faults) {
        self.inner.faults.set(faults);
    }

    /// The states of a sandbox, oldest first, and what could not be read.
    pub fn states(&self, reference: &str) -> Result<(Vec<StateInfo>, Vec<Error>)> {
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

    /// What is known of a sandbox, running or not, by its name or id.
    pub fn find(&self, reference: &str) -> Result<SandboxInfo> {
        self.inner
            .settled(reference)
            .map(|(dir, state)| SandboxInfo::new(&dir, &state))
    }

    /// Every sandbox of the store, oldest first, and what could not be read.
    pub fn list(&self) -> Result<(Vec<SandboxInfo>, Vec<Error>)> {
        let (mut found, mut broken) = (Vec::new(), Vec::new());
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
        let newest = self.inner.find(reference)?.console();
        Ok([console::previous(&newest), newest])
    }

    /// What this host can do, and why it cannot do what it cannot.
    pub async fn doctor(&self) -> Doctor {
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
    pub memory_modes_refused: Vec<String>,
    /// Whether each machine gets a user id of its own.
    pub own_uid: bool,
    /// Why QEMU sees all of the file system that its user does.
    pub landlock_refused: Option<String>,
    /// Features that are off in emulated processors because this QEMU computes them wrongly.
    pub miscomputed: Vec<String>,
}

fn found(engine: &Engine, jail: Jail) -> QemuFound {
    let verdicts = engine.verdicts();
    let kvm_refused = match verdicts.kvm() {
        KvmVerdict::Usable => None,
        KvmVerdict::Unusable { reason } => Some(reason.clone()),
    };
    let modes = capture::best_mode(&verdicts.tracking);
    QemuFound {
        binary: engine.binary().to_owned(),
        version: engine.version().to_string(),
        accelerator: if kvm_refused.is_none() {
            "kvm".into()
        } else {
            "tcg".into()
        },
        kvm_refused,
        disk_aio: verdicts.aio.name().into(),
        io_uring_refused: verdicts.aio_reason.clone(),
        memory_mode: modes.mode.to_string(),
        memory_modes_refused: modes.degraded,
        own_uid: jail.uid.is_some(),
        landlock_refused: verdicts.landlock.usable().err(),
        miscomputed: verdicts.miscomputed.clone(),
    }
}

impl Inner {
    /// A verb has come to this step. A test may make it fail or wait.
    pub fn reach(&self, step: Step, machine: Option<&Machine>) -> Result<()> {
        Ok(self.faults.reach(step, machine)?)
    }

    /// Each sandbox's machine is another user to the kernel, where we may choose: one that breaks
    /// out reaches no other.
    pub fn jail(&self, id: Option<&SandboxId>) -> Jail {
        let number = id
            .and_then(|id| u32::from_str_radix(id.as_str().get(..6)?, 16).ok())
            .unwrap_or(0);
        let own = self.config.machine_user == MachineUser::Auto && can_switch_user();
        Jail {
            uid: own.then_some(MACHINE_UIDS + number),
        }
    }

    /// The QEMU of this host. What was found out about it is kept in the store's cache, because
    /// finding it out takes time.
    pub async fn engine(&self) -> Result<&Engine> {
        self.engine.get_or_try_init(|| self.open_engine()).await
    }

    async fn open_engine(&self) -> Result<Engine> {
        let cached: Option<Verdicts> = self.store.cached(&engine_key()).unwrap_or_else(|error| {
            tracing::warn!(%error, "the cached findings about QEMU cannot be read");
            None
        });
        let config = EngineConfig {
            binary: self.config.qemu.clone(),
            search: self.config.search.clone(),
            arch: engine::Arch::HOST,
            jail: self.jail(None),
        };
        let engine = Engine::open(&config, cached)
            .await
            .map_err(|source| Error::Engine {
                operation: "be used",
                source,
            })?;
        self.keep(engine.verdicts());
        Ok(engine)
    }

    /// Keeps what was found out about processors since the engine was opened.
    pub fn keep_news(&self, engine: &Engine) {
        if let Some(verdicts) = engine.take_news() {
            self.keep(&verdicts);
        }
    }

    fn keep(&self, verdicts: &Verdicts) {
        if let Err(error) = self.store.cache(&engine_key(), verdicts) {
            tracing::warn!(%error, "the findings about QEMU cannot be cached; they are found anew each time");
        }
    }

    pub fn find(&self, reference: &str) -> Result<SandboxDir> {
        let name = parse_name("a sandbox's name or id", reference)?;
        self.store.find_sandbox(&name).map_err(|error| match error {
            store::Error::UnknownSandbox { .. } => Error::NoSandbox {
                name: reference.into(),
            },
            source => Error::Store {
                operation: "read a sandbox",
                source,
            },
        })
    }

    /// A sandbox with the state it is really in.
    pub fn settled(&self, reference: &str) -> Result<(SandboxDir, StateRecord)> {
        let dir = self.find(reference)?;
        self.settle(dir)?.ok_or_else(|| Error::NoSandbox {
            name: reference.into(),
        })
    }

    /// Corrects a state whose owner died before it could: the lock is free, and the record says it
    /// runs. `None`: it was to be removed with its end, and now it is.
    fn settle(&self, dir: SandboxDir) -> Result<Option<(SandboxDir, StateRecord)>> {
        let state = dir.state().map_err(store_error("read a sandbox's state"))?;
        if !matches!(
            state.phase,
            Phase::Starting | Phase::Running | Phase::Stopping
        ) {
            return Ok(Some((dir, state)));
        }
        let Some(mut owned) = self
            .store
            .try_own(&dir)
            .map_err(store_error("lock a sandbox"))?
        else {
            return Ok(Some((dir, state)));
        };
        // Its owner may have ended in good order between the two looks.
        let state = dir.state().map_err(store_error("read a sandbox's state"))?;
        if !matches!(
            state.phase,
            Phase::Starting | Phase::Running | Phase::Stopping
        ) {
            return Ok(Some((dir, state)));
        }
        // One that was to be saved first is all there is of it.
        if dir.record().auto_remove && dir.record().save_on_stop.is_none() {
            self.store
                .remove_sandbox(owned)
                .map_err(store_error("remove a sandbox"))?;
            return Ok(None);
        }
        let save_failed = dir
            .record()
            .save_on_stop
            .as_ref()
            .map(|_| "its keeper was gone before it could".to_owned());
        let reason = Some(death(&state));
        let state = StateRecord {
            reason,
            save_failed,
            ..state.followed_by(Phase::Crashed, now_unix_ms())
        };
        remove_if_there(&dir.keeper_socket())?;
        // What cannot be written down now, on a disk that is full, is found out again by the next
        // one who looks.
        if let Err(error) = owned.set_state(&state) {
            tracing::warn!(%error, "the end of a sandbox cannot be recorded");
        }
        Ok(Some((dir, state)))
    }

    pub fn register(&self, id: &SandboxId, local: &Local) {
        let mut drivers = self.drivers.lock().unwrap_or_else(PoisonError::into_inner);
        drivers.retain(|_, driver| driver.upgrade().is_some());
        drivers.insert(id.clone(), local.downgrade());
    }

    /// The driver of a sandbox that this process runs.
    pub fn local(&self, id: &SandboxId) -> Option<Local> {
        let drivers = self.drivers.lock().unwrap_or_else(PoisonError::into_inner);
        drivers.get(id)?.upgrade()
    }

    /// Takes a sandbox that no process runs, without starting it.
    pub async fn adopt(self: &Arc<Self>, reference: &str, verb: Verb) -> Result<Local> {
        let owned = self.own(reference, verb).await?;
        let state = owned
            .state()
            .map_err(store_error("read a sandbox's state"))?;
        let driven = Driven {
            owned,
            running: None,
            state,
            existence: Existence::Committed,
        };
        Ok(driver::start(self.clone(), driven))
    }

    /// Takes a sandbox that nobody runs. One that has just stopped still has its keeper for a
    /// moment.
    pub async fn own(&self, reference: &str, verb: Verb) -> Result<Owned> {
        let end = Instant::now() + KEEPER_LEAVES;
        loop {
            let (dir, state) = self.settled(reference)?;
            let name = dir.record().name.to_string();
            if !permits(state.phase, verb) || state.phase == Phase::Running {
                return Err(Error::WrongState {
                    name,
                    phase: state.phase,
                    reason: state.reason,
                    verb,
                });
            }
            match self
                .store
                .try_own(&dir)
                .map_err(store_error("lock a sandbox"))?
            {
                Some(owned) => return Ok(owned),
                None if Instant::now() > end => return Err(Error::Busy { name }),
                None => tokio::time::sleep(KEEPER_POLL).await,
            }
        }
    }

    pub async fn remove(self: &Arc<Self>, owned: Owned) -> Result<()> {
        let host = self.clone();
        let removed = blocking(move || {
            save::release_target(&owned);
            host.store.remove_sandbox(owned)
        });
        removed.await.map_err(store_error("remove a sandbox"))
    }
}

fn engine_key() -> Name {
    "engine".parse().expect("it is a name")
}

/// Why a sandbox's owner is gone, as far as its last state tells.
fn death(state: &StateRecord) -> String {
    match (&state.boot_id, state.pids.keeper) {
        (Some(boot), _) if *boot != boot_id() => HOST_WENT_DOWN.into(),
        (_, Some(pid)) => format!("its keeper, process {pid}, died"),
        (_, None) => "the process that ran it died".into(),
    }
}

pub(crate) fn remove_if_there(path: &Path) -> Result<()> {
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Error::io("remove", path, e)),
        _ => Ok(()),
    }
}

/// Whether this process can start others under the user ids of machines. Inside a user namespace,
/// root may have no ids but its own, and may not be allowed to drop groups.
fn can_switch_user() -> bool {
    let read = |path| std::fs::read_to_string(path).unwrap_or_default();
    let is_root = rustix::process::geteuid().is_root();
    is_root
        && maps_machines(&read("/proc/self/uid_map"))
        && read("/proc/self/setgroups").trim() != "deny"
        && may_change_ids(&read("/proc/self/status"))
}

/// Whether a process has CAP_SETGID and CAP_SETUID, which the root of a container may lack.
fn may_change_ids(status: &str) -> bool {
    const IDS: u64 = 1 << 6 | 1 << 7;
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    effective
        .and_then(|digits| u64::from_str_radix(digits.trim(), 16).ok())
        .is_some_and(|caps| caps & IDS == IDS)
}

/// Whether a user namespace has all the ids that machines may get. Each line: first id inside,
/// first outside, count.
fn maps_machines(uid_map: &str) -> bool {
    let ranges = uid_map.lines().filter_map(|line| {
        let mut numbers = line
            .split_ascii_whitespace()
            .map(|word| word.parse::<u64>().ok());
        let (first, _, count) = (numbers.next()??, numbers.next()??, numbers.next()??);
        Some(first..first + count)
    });
    let (first, last) = (
        u64::from(MACHINE_UIDS),
        u64::from(MACHINE_UIDS) + MACHINES - 1,
    );
    ranges
        .into_iter()
        .any(|range| range.contains(&first) && range.contains(&last))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changing_ids_takes_both_capabilities() {
        assert!(may_change_ids(
            "Name:\tx\nCapEff:\t000001ffffffffff\nCapBnd:\t0\n"
        ));
        assert!(may_change_ids("CapEff:\t00000000000000c0\n"));
        assert!(!may_change_ids("CapEff:\t0000000000000080\n"));
        assert!(!may_change_ids(
            "CapEff:\t0000000000000000\nCapBnd:\t000001ffffffffff\n"
        ));
        assert!(!may_change_ids(""));
    }

    #[test]
    fn a_user_namespace_has_ids_for_machines_or_not() {
        assert!(maps_machines("         0          0 4294967295\n"));
        assert!(!maps_machines("         0       1000          1\n"));
        // As rootless containers have it.
        assert!(!maps_machines(
            "         0       1000          1\n         1     100000      65536\n"
        ));
        assert!(!maps_machines("0 0 1879048193\n"), "only the first of them");
        assert!(!maps_machines(""));
    }
}
