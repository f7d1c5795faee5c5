//! The configuration that a host is opened with.

use std::ffi::OsString;
use std::path::PathBuf;
use std::str::FromStr;

use sandtree_images::ToolEnv;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::fault;

/// The configuration that a host is opened with. The library reads no environment variables: the
/// caller passes every path.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct HostConfig {
    /// The store's directory, made if missing.
    pub home: PathBuf,
    /// The QEMU to use.
    pub qemu: Option<PathBuf>,
    /// The directories to search for QEMU, if `qemu` is `None`, and for the tools that make images.
    pub search: Vec<PathBuf>,
    /// Variables that the host's tools get when they make images. Their `PATH` is `search`.
    #[serde(default)]
    pub tool_env: ToolEnv,
    /// The user that machines run as.
    #[serde(default)]
    pub machine_user: MachineUser,
    /// When QEMU is started ahead of a revert.
    #[serde(default)]
    pub spares: Spares,
    /// Where the sandboxes that this host starts run. Not sent to keepers: a keeper runs its
    /// sandbox itself.
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
            spares: Spares::AfterCheckpoint,
            run_in: RunIn::ThisProcess,
            #[cfg(feature = "faults")]
            faults: fault::Faults::default(),
        }
    }

    /// Where the store of a user is, unless the user chooses: below `XDG_DATA_HOME` or `HOME`, as
    /// `variable` gives them.
    pub fn default_home(variable: impl Fn(&str) -> Option<OsString>) -> Result<PathBuf> {
        let set = |name| variable(name).filter(|dir| !dir.is_empty());
        let data = set("XDG_DATA_HOME").map(PathBuf::from);
        let local = set("HOME").map(|home| PathBuf::from(home).join(".local/share"));
        let rule = "set HOME or SANDTREE_HOME";
        let base = data
            .or(local)
            .ok_or_else(|| Error::invalid("place of the store", "", rule))?;
        Ok(base.join("sandtree"))
    }

    #[cfg(feature = "faults")]
    pub(crate) fn fault_plan(&self) -> fault::Plan {
        fault::Plan::new(self.faults.clone())
    }

    #[cfg(not(feature = "faults"))]
    pub(crate) fn fault_plan(&self) -> fault::Plan {
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
            other => Err(Error::invalid("user of machines", other, "auto or caller")),
        }
    }
}

/// When a running sandbox has a spare: a QEMU that was started ahead of the next revert.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Spares {
    Never,
    /// For some minutes after each checkpoint and each revert: a checkpoint is the best sign of a
    /// later revert.
    #[default]
    AfterCheckpoint,
    /// As long as it runs.
    Always,
}

impl FromStr for Spares {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "never" => Ok(Self::Never),
            "after-checkpoint" => Ok(Self::AfterCheckpoint),
            "always" => Ok(Self::Always),
            other => {
                let expected = "never, after-checkpoint or always";
                Err(Error::invalid("choice of spares", other, expected))
            }
        }
    }
}

/// The program that keepers run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeeperProgram {
    pub path: PathBuf,
    /// With these arguments it calls [`keeper::run`](crate::keeper::run) with its standard input.
    pub args: Vec<String>,
}
