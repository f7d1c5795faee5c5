//! The engine: one QEMU installation and what it can do on this host.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::accel::{Accel, AccelChoice};
use crate::arch::Arch;
use crate::cpu::{Cpu, CpuChoice, Expansion, Expansions, Model};
use crate::error::Error;
use crate::install::{self, EngineConfig};
use crate::jail::Jail;
use crate::machine::{Installed, Machine, MachineSpec};
use crate::probe::{Asked, Installation, Key, KvmVerdict, Probe, Verdicts, probe_kvm};
use crate::spare::Spare;
use crate::version::Version;

/// How many models an error names.
const MODELS_NAMED: usize = 8;

#[derive(Debug)]
pub struct Engine {
    arch: Arch,
    jail: Jail,
    verdicts: Verdicts,
    /// What machines see of the file system, where that is restricted.
    visible: Option<Vec<PathBuf>>,
    learned: Mutex<Learned>,
}

/// What was found out about processors, at the opening and since.
#[derive(Debug)]
struct Learned {
    expansions: Expansions,
    is_news: bool,
}

impl Engine {
    /// Finds QEMU and what it can do. `cached` saves running it when nothing changed; what is true
    /// now is in [`Engine::verdicts`], for the caller to keep.
    pub async fn open(config: &EngineConfig, cached: Option<Verdicts>) -> Result<Engine, Error> {
        let installation = Installation::of(install::find(config)?)?;
        let known = cached
            .as_ref()
            .filter(|verdicts| verdicts.key.installation == installation);
        let version = match known {
            Some(verdicts) => verdicts.key.version,
            None => install::version(&installation.binary).await?,
        };
        install::check_age(&installation.binary, version)?;
        let key = Key::now(installation, version, config.jail)?;
        let binary = key.installation.binary.clone();
        let probe = Probe {
            binary: &binary,
            arch: config.arch,
            jail: config.jail,
            seeing: None,
        };
        let now_unix_s = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default()
            .as_secs();
        let verdicts = match cached.filter(|verdicts| verdicts.key == key) {
            None => probe.run_all(key, now_unix_s).await?,
            Some(verdicts) if verdicts.kvm.holds(now_unix_s) => verdicts,
            Some(verdicts) => {
                let installed = verdicts.visible();
                let probe = Probe {
                    seeing: installed.as_deref(),
                    ..probe
                };
                Verdicts {
                    kvm: probe_kvm(&probe, now_unix_s).await,
                    ..verdicts
                }
            }
        };
        let visible = verdicts.visible();
        let learned = Mutex::new(Learned {
            expansions: verdicts.expansions.clone(),
            is_news: false,
        });
        Ok(Engine {
            arch: config.arch,
            jail: config.jail,
            verdicts,
            visible,
            learned,
        })
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

    /// The processor of a fresh machine.
    pub async fn cpu(&self, accel: Accel, choice: CpuChoice<'_>) -> Result<Cpu, Error> {
        let model = Model::chosen(self.arch, accel, choice)?;
        let expansion = self.expansion(accel, &model).await?;
        Ok(Cpu::fresh(
            self.arch,
            accel,
            model,
            &expansion,
            &self.verdicts.miscomputed,
        ))
    }

    /// The processor that is here what one was under another engine; or what this engine's lacks.
    pub async fn same_cpu(&self, accel: Accel, then: &Cpu) -> Result<Cpu, Error> {
        let model = then.argument.parse::<Model>()?.bare();
        self.expansion(accel, &model).await?.same(model, then)
    }

    async fn expansion(&self, accel: Accel, model: &Model) -> Result<Expansion, Error> {
        if let Some(known) = self.learned().expansions.find(accel, model) {
            return Ok(known.clone());
        }
        self.check_model(&model.name)?;
        let asked = Asked::start(&self.probe(), accel).await?;
        let expansion = asked.expand(model).await?;
        let mut learned = self.learned();
        learned.expansions.insert(accel, model, expansion.clone());
        learned.is_news = true;
        Ok(expansion)
    }

    fn check_model(&self, model: &str) -> Result<(), Error> {
        let known = &self.verdicts.catalogue.models;
        if known.contains(model) {
            return Ok(());
        }
        // Versions of a model are many, and a user who wants one knows its name.
        let plain = known
            .iter()
            .filter(|name| !name.contains("-v"))
            .take(MODELS_NAMED)
            .cloned();
        let known = plain.chain(["…".to_owned()]).collect();
        Err(Error::UnknownCpu {
            model: model.to_owned(),
            version: self.version(),
            known,
        })
    }

    /// Whether a state of a machine of this type can be loaded: types of another kind are not ours.
    pub fn has_machine_type(&self, name: &str) -> bool {
        name.starts_with(self.arch.machine_types())
            && self.verdicts.catalogue.machine_types.contains(name)
    }

    /// Fails if this QEMU lacks the devices of a screen.
    pub fn check_screens(&self) -> Result<(), Error> {
        match &self.verdicts.catalogue.screens_refused {
            None => Ok(()),
            Some(reason) => Err(Error::NoScreens {
                reason: reason.clone(),
            }),
        }
    }

    /// What was found out since the engine was opened, once, for the caller to keep with the rest.
    pub fn take_news(&self) -> Option<Verdicts> {
        let mut learned = self.learned();
        let is_news = std::mem::take(&mut learned.is_news);
        is_news.then(|| Verdicts {
            expansions: learned.expansions.clone(),
            ..self.verdicts.clone()
        })
    }

    fn learned(&self) -> MutexGuard<'_, Learned> {
        self.learned.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn probe(&self) -> Probe<'_> {
        Probe {
            binary: self.binary(),
            arch: self.arch,
            jail: self.jail,
            seeing: self.visible.as_deref(),
        }
    }

    pub fn verdicts(&self) -> &Verdicts {
        &self.verdicts
    }

    /// Turns a choice into an accelerator that works here, or says why it does not.
    pub fn accel(&self, choice: AccelChoice) -> Result<Accel, Error> {
        let unusable = |accel, reason: &str| {
            Err(Error::AccelUnusable {
                accel,
                reason: reason.into(),
            })
        };
        match (choice, self.verdicts.kvm()) {
            (AccelChoice::Only(Accel::Tcg), _) => Ok(Accel::Tcg),
            (AccelChoice::Auto | AccelChoice::Only(Accel::Kvm), KvmVerdict::Usable) => {
                Ok(Accel::Kvm)
            }
            (AccelChoice::Auto, KvmVerdict::Unusable { .. }) => Ok(Accel::Tcg),
            (AccelChoice::Only(Accel::Kvm), KvmVerdict::Unusable { reason }) => {
                unusable(Accel::Kvm, reason)
            }
            (AccelChoice::Only(Accel::Hvf), _) => unusable(Accel::Hvf, "it exists on macOS only"),
            (AccelChoice::Only(Accel::Whpx), _) => {
                unusable(Accel::Whpx, "it exists on Windows only")
            }
        }
    }

    /// Starts a machine; its guest runs when this returns.
    pub async fn start(&self, spec: MachineSpec) -> Result<Machine, Error> {
        Machine::start(self.installed(), spec).await
    }

    /// Starts a QEMU that waits to become a machine like this one, on a disk of that size. Memory
    /// and images of `spec` are not used.
    pub async fn prepare(&self, spec: MachineSpec, disk_bytes: u64) -> Result<Spare, Error> {
        Spare::start(self.installed(), spec, disk_bytes).await
    }

    fn installed(&self) -> Installed<'_> {
        Installed {
            binary: self.binary(),
            arch: self.arch,
            aio: self.verdicts.aio,
            visible: self.visible.as_deref(),
            firmware: install::firmware(self.arch, &self.verdicts.data_dirs),
        }
    }
}

#[cfg(test)]
#[path = "engine_tests.rs"]
mod tests;
