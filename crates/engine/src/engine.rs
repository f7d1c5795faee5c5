//! The engine: one QEMU installation and what it can do on this host.

use std::path::Path;

use crate::accel::{Accel, AccelChoice, KvmVerdict};
use crate::arch::Arch;
use crate::argv::cpu;
use crate::error::Error;
use crate::install::{self, EngineConfig, Version};
use crate::machine::{Installed, Machine, MachineSpec};
use crate::probe::{Installation, Key, Probe, Verdicts};

#[derive(Debug)]
pub struct Engine {
    arch: Arch,
    verdicts: Verdicts,
}

impl Engine {
    /// Finds QEMU and what it can do. `cached` saves running it when nothing changed; what is true now is in
    /// [`Engine::verdicts`], for the caller to keep.
    pub async fn open(config: &EngineConfig, cached: Option<Verdicts>) -> Result<Engine, Error> {
        let installation = Installation::of(install::find(config)?)?;
        let known = cached.as_ref().filter(|verdicts| verdicts.key.installation == installation);
        let version = match known {
            Some(verdicts) => verdicts.key.version,
            None => install::version(&installation.binary).await?,
        };
        install::check_age(&installation.binary, version)?;
        let key = Key::now(installation, version, config.jail)?;
        let verdicts = match cached {
            Some(verdicts) if verdicts.key == key => verdicts,
            _ => probe(config, key).await,
        };
        Ok(Engine { arch: config.arch, verdicts })
    }

    pub fn version(&self) -> Version {
        self.verdicts.key.version
    }

    pub fn binary(&self) -> &Path {
        &self.verdicts.key.installation.binary
    }

    pub fn arch(&self) -> Arch {
        self.arch
    }

    /// The processor its machines have.
    pub fn cpu(&self, accel: Accel) -> &'static str {
        cpu(self.arch, accel)
    }

    pub fn verdicts(&self) -> &Verdicts {
        &self.verdicts
    }

    /// Turns a choice into an accelerator that works here, or says why it does not.
    pub fn accel(&self, choice: AccelChoice) -> Result<Accel, Error> {
        let unusable = |accel, reason: &str| Err(Error::AccelUnusable { accel, reason: reason.into() });
        match (choice, &self.verdicts.kvm) {
            (AccelChoice::Only(Accel::Tcg), _) => Ok(Accel::Tcg),
            (AccelChoice::Auto | AccelChoice::Only(Accel::Kvm), KvmVerdict::Usable) => Ok(Accel::Kvm),
            (AccelChoice::Auto, KvmVerdict::Unusable { .. }) => Ok(Accel::Tcg),
            (AccelChoice::Only(Accel::Kvm), KvmVerdict::Unusable { reason }) => unusable(Accel::Kvm, reason),
            (AccelChoice::Only(Accel::Hvf), _) => unusable(Accel::Hvf, "it exists on macOS only"),
            (AccelChoice::Only(Accel::Whpx), _) => unusable(Accel::Whpx, "it exists on Windows only"),
        }
    }

    /// Starts a machine; its guest runs when this returns.
    pub async fn start(&self, spec: MachineSpec) -> Result<Machine, Error> {
        let installed = Installed { binary: self.binary(), arch: self.arch, aio: self.verdicts.aio };
        Machine::start(installed, spec).await
    }
}

async fn probe(config: &EngineConfig, key: Key) -> Verdicts {
    let binary = key.installation.binary.clone();
    Probe { binary: &binary, arch: config.arch, jail: config.jail }.run_all(key).await
}

#[cfg(test)]
#[path = "engine_tests.rs"]
mod tests;
