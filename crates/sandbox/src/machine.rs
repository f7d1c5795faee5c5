//! The machine a state needs: as it was when the state was taken, whichever QEMU is here now.
//!
//! ```text
//!   architecture, accelerator   must be the same
//!   machine type                that of the state, if this QEMU has it
//!   processor                   with exactly the features of the state, if this QEMU's has them all
//!   QEMU's version              any
//! ```
//!
//! Always: a guest never finds a processor that can do less, or more, than the one it looked at when it booted.
//! When it fails: nothing was started, and the error names what is not here.

use sandtree_engine::{self as engine, Accel, Cpu, Engine};
use sandtree_store::{MachineRecord, SandboxRecord, StateManifest};

use crate::boot::{chosen_accel, machine_record};
use crate::capture::engine_error;
use crate::error::{Error, Result};
use crate::host::Inner;
use crate::restore::label;

/// The machine to load a state into, in a sandbox of this record.
pub(crate) async fn for_state(host: &Inner, record: &SandboxRecord, manifest: &StateManifest) -> Result<MachineRecord> {
    let here = machine_record(host, record).await?;
    let Some(then) = &manifest.machine else { return Ok(here) };
    let engine = host.engine().await?;
    is_same(manifest, "architecture", then.arch.to_string(), here.arch.to_string())?;
    is_same(manifest, "accelerator", then.accelerator.clone(), here.accelerator.clone())?;
    if !engine.has_machine_type(&then.machine_type) {
        let here = format!("none that QEMU {} has", engine.version());
        return Err(foreign(manifest, "machine type", then.machine_type.clone(), here));
    }
    let cpu = match then.cpu_features.is_empty() {
        true => unexamined(engine, manifest, then)?,
        false => same_cpu(engine, chosen_accel(engine, record)?, manifest, then).await?,
    };
    host.keep_news(engine);
    Ok(MachineRecord { machine_type: then.machine_type.clone(), cpu: cpu.argument, cpu_features: cpu.features, ..here })
}

async fn same_cpu(engine: &Engine, accel: Accel, manifest: &StateManifest, then: &MachineRecord) -> Result<Cpu> {
    let cpu = Cpu { argument: then.cpu.clone(), features: then.cpu_features.clone() };
    engine.same_cpu(accel, &cpu).await.map_err(|error| match error {
        engine::Error::CpuLacks { features } => {
            Error::LackingProcessor { state: label(manifest), qemu: engine.version().to_string(), features }
        }
        engine::Error::UnknownCpu { model, version, .. } => {
            foreign(manifest, "processor", model, format!("none that QEMU {version} has"))
        }
        source => engine_error("give it its processor")(source),
    })
}

/// Where nobody asked for the features, only the very same QEMU is known to have them.
fn unexamined(engine: &Engine, manifest: &StateManifest, then: &MachineRecord) -> Result<Cpu> {
    is_same(manifest, "QEMU", then.qemu_version.clone(), engine.version().to_string())?;
    Cpu::unexamined(&then.cpu).map_err(engine_error("give it its processor"))
}

fn is_same(manifest: &StateManifest, what: &str, then: String, here: String) -> Result<()> {
    if then == here { Ok(()) } else { Err(foreign(manifest, what, then, here)) }
}

fn foreign(manifest: &StateManifest, what: &str, then: String, here: String) -> Error {
    Error::ForeignState { state: label(manifest), what: what.into(), then, here }
}
