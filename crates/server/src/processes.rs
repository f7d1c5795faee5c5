//! The commands that clients find again by number.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};

use sandtree::{ExecEntry, ExecHandle, ExecId, Stdin};
use serde::Deserialize;

use crate::locked::lock;

/// The commands of all sandboxes that this server knows, by sandbox and process id. Others are
/// found again in their keepers.
#[derive(Debug, Default)]
pub struct Processes(Mutex<HashMap<(String, u32), Arc<Process>>>);

/// A command that runs, or has ended a moment ago.
#[derive(Debug)]
pub struct Process {
    pub exec: ExecId,
    /// Its number in the guest.
    pub pid: u32,
    pub tag: Option<String>,
    pub config: ProcessConfig,
    pub terminal: bool,
    pub takes_input: bool,
    pub handle: ExecHandle,
    /// Writers wait for each other, so that their bytes do not mix.
    pub stdin: tokio::sync::Mutex<Stdin>,
}

impl Processes {
    /// Drops the commands of a sandbox that does not run any more.
    pub fn forget(&self, sandbox: &str) {
        lock(&self.0).retain(|(of, _), _| of != sandbox);
    }

    pub fn get(&self, sandbox: &str, pid: u32) -> Option<Arc<Process>> {
        lock(&self.0).get(&(sandbox.to_owned(), pid)).cloned()
    }

    pub fn tagged(&self, sandbox: &str, tag: &str) -> Option<Arc<Process>> {
        let all = lock(&self.0);
        let mut of = all.iter().filter(|((of, _), _)| of == sandbox);
        let found = of.find(|(_, process)| process.tag.as_deref() == Some(tag));
        found.map(|(_, process)| process.clone())
    }

    pub fn add(&self, sandbox: &str, process: Process) -> Arc<Process> {
        let process = Arc::new(process);
        let key = (sandbox.to_owned(), process.pid);
        lock(&self.0).insert(key, process.clone());
        process
    }

    /// Removes a command, unless another one has its number by now.
    pub fn remove(&self, sandbox: &str, process: &Process) {
        let key = (sandbox.to_owned(), process.pid);
        let mut all = lock(&self.0);
        if all
            .get(&key)
            .is_some_and(|known| known.exec == process.exec)
        {
            all.remove(&key);
        }
    }
}

/// A command as its client started it.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct ProcessConfig {
    pub cmd: String,
    #[serde(default)]
    pub args: Vec<String>,
    #[serde(default)]
    pub envs: BTreeMap<String, String>,
    pub cwd: Option<String>,
}

impl ProcessConfig {
    /// The directory that its client names.
    pub fn directory(&self) -> Option<&str> {
        self.cwd.as_deref().filter(|cwd| !cwd.is_empty())
    }

    /// A command as the hub knows it: without its environment, which may be secret.
    pub fn of(entry: &ExecEntry) -> Self {
        let Some(config) = &entry.details.config else {
            return Self {
                cmd: entry.command.clone(),
                ..Self::default()
            };
        };
        let mut argv = config.argv.iter().cloned();
        Self {
            cmd: argv.next().unwrap_or_default(),
            args: argv.collect(),
            envs: BTreeMap::new(),
            cwd: config.workdir.clone(),
        }
    }
}
