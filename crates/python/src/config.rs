//! The configuration of a host: what the caller gives, and what the environment says.

use std::path::PathBuf;

use sandtree::keeper::KeeperProgram;
use sandtree::{Error, HostConfig, MachineUser, RegistryAccess, Result, RunIn, Spares, ToolEnv};
use serde::Deserialize;

use crate::convert::parse;

/// What Python gives. A field that is absent is read from the environment, or has its default.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Given {
    /// The `sandtree` that keepers run.
    program: PathBuf,
    home: Option<PathBuf>,
    qemu: Option<PathBuf>,
    machine_user: Option<String>,
    spares: Option<String>,
}

pub fn config(given: &str) -> Result<HostConfig> {
    let given: Given = parse("configuration of a host", given)?;
    let home = match given.home.or_else(|| path_of("SANDTREE_HOME")) {
        Some(home) => absolute(home)?,
        None => HostConfig::default_home(|name| std::env::var_os(name))?,
    };
    let qemu = given.qemu.or_else(|| path_of("SANDTREE_QEMU"));
    let machine_user = given
        .machine_user
        .or_else(|| text_of("SANDTREE_MACHINE_USER"));
    let spares = given.spares.or_else(|| text_of("SANDTREE_SPARES"));
    let keeper = KeeperProgram {
        path: given.program,
        args: vec!["keeper".into()],
    };
    Ok(HostConfig {
        qemu: qemu.map(absolute).transpose()?,
        tool_env: ToolEnv::from_lookup(|name| std::env::var(name).ok()),
        machine_user: machine_user.map_or(Ok(MachineUser::default()), |text| text.parse())?,
        spares: spares.map_or(Ok(Spares::default()), |text| text.parse())?,
        run_in: RunIn::Keeper(keeper),
        ..HostConfig::new(home, search())
    })
}

/// Access to registries, from the environment. Options of the caller are added to it.
pub fn registry_access() -> RegistryAccess {
    RegistryAccess {
        docker_config: RegistryAccess::docker_config(|name| std::env::var_os(name)),
        search: search(),
        helper_env: std::env::vars_os().collect(),
        ..RegistryAccess::default()
    }
}

pub fn absolute(path: PathBuf) -> Result<PathBuf> {
    std::path::absolute(&path).map_err(|e| Error::io("resolve", &path, e))
}

/// What a user calls a snapshot, with a path made absolute.
pub fn absolute_reference(text: &str) -> Result<String> {
    let cwd = std::env::current_dir().map_err(|e| Error::io("find", "our directory", e))?;
    sandtree::absolute_reference(text, &cwd)
}

fn search() -> Vec<PathBuf> {
    std::env::var_os("PATH")
        .map(|path| std::env::split_paths(&path).collect())
        .unwrap_or_default()
}

fn path_of(name: &str) -> Option<PathBuf> {
    let value = std::env::var_os(name).filter(|value| !value.is_empty());
    value.map(PathBuf::from)
}

fn text_of(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}
