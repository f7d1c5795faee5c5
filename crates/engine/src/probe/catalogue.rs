//! What a QEMU knows: its machine types, its processor models, and what it makes of a model.
//!
//! Always: it is asked of a QEMU that never runs a guest, under the machine type and the
//! accelerator that the answer is for.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::{Probe, socketpair};
use crate::accel::Accel;
use crate::arch::Arch;
use crate::argv::{SCREEN_DEVICES, fd, probe_argv};
use crate::cpu::{Expansion, Model};
use crate::error::Error;
use crate::process::Process;
use crate::qmp::{
    CpuModel, DeviceListProperties, Qmp, QueryCpuDefinitions, QueryCpuModelExpansion, QueryMachines,
};

/// The names a QEMU knows, whatever accelerates it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Catalogue {
    pub machine_types: BTreeSet<String>,
    pub models: BTreeSet<String>,
    /// Why it has no screens, if it has none: distributions put the device into a module.
    #[serde(default)]
    pub screens_refused: Option<String>,
}

/// A QEMU that waits for questions. Dropped, it is killed.
#[derive(Debug)]
pub(crate) struct Asked {
    _process: Process,
    qmp: Qmp,
    arch: Arch,
}

impl Asked {
    pub async fn start(probe: &Probe<'_>, accel: Accel) -> Result<Asked, Error> {
        let (ours, theirs) = socketpair()?;
        let accel_name = accel.to_string();
        let qmp = format!("socket,id=qmp,fd={}", fd::QMP);
        let machine = [
            "-machine",
            probe.arch.machine_type(),
            "-accel",
            &accel_name,
            "-m",
            "16M",
            "-S",
        ];
        let control = ["-chardev", &qmp, "-mon", "chardev=qmp,mode=control"];
        let args = probe_argv(&[&machine[..], &control].concat());
        let process = probe
            .launch("probe-cpu", accel, args, vec![(fd::QMP, theirs)])
            .await?;
        let qmp = Qmp::connect(ours, process.exit().clone()).await?;
        Ok(Asked {
            _process: process,
            qmp,
            arch: probe.arch,
        })
    }

    pub async fn catalogue(&self) -> Result<Catalogue, Error> {
        let machines = self.qmp.run(QueryMachines {}).await?;
        let models = self.qmp.run(QueryCpuDefinitions {}).await?;
        Ok(Catalogue {
            machine_types: machines.into_iter().map(|machine| machine.name).collect(),
            models: models.into_iter().map(|model| model.name).collect(),
            screens_refused: self.screens_refused().await?,
        })
    }

    async fn screens_refused(&self) -> Result<Option<String>, Error> {
        for typename in SCREEN_DEVICES {
            match self.qmp.run(DeviceListProperties { typename }).await {
                Ok(_) => {}
                Err(Error::Qmp { .. }) => {
                    return Ok(Some(format!("it does not know the device {typename}")));
                }
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }

    /// The features of a model that are on in a machine.
    pub async fn expand(&self, model: &Model) -> Result<Expansion, Error> {
        let definitions = self.qmp.run(QueryCpuDefinitions {}).await?;
        let definition = definitions
            .into_iter()
            .find(|definition| definition.name == model.name);
        // QEMU expands to what the model has by its name, and leaves these out later.
        let left_out = definition
            .map(|definition| definition.unavailable_features)
            .unwrap_or_default();
        let model = CpuModel {
            name: &model.name,
            props: model.properties(),
        };
        let expanded = self
            .qmp
            .run(QueryCpuModelExpansion {
                kind: self.kind(),
                model,
            })
            .await?;
        let on = expanded
            .model
            .props
            .into_iter()
            .filter(|(_, value)| *value == serde_json::Value::Bool(true));
        Ok(Expansion(
            on.map(|(feature, _)| feature)
                .filter(|feature| !left_out.contains(feature))
                .collect(),
        ))
    }

    /// The expansion that lists features and no other properties.
    fn kind(&self) -> &'static str {
        match self.arch {
            Arch::X86_64 => "static",
            Arch::Aarch64 => "full",
        }
    }
}
