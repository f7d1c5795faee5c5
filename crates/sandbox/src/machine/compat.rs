//! The machine a state needs: as it was when the state was taken, whichever QEMU is here now.
//!
//! ```text
//!   architecture                must be the same
//!   accelerator                 that of the state, unless the sandbox insists on another
//!   machine type                that of the state, if this QEMU has it
//!   processor                   with exactly the features of the state, if this QEMU's has them all
//!   network                     the device of the state; how far it reaches, the sandbox decides
//!   rate of the TSC             under emulation it is the host's: another rate needs another clock in the guest
//!   QEMU's version              any
//! ```
//!
//! Always: a guest never finds a processor that can do less, or more, than the one it looked at
//! when it booted. When it fails: nothing was started, and the error names what is not here.

use sandtree_engine::{self as engine, Accel, Cpu, Engine};
use sandtree_store::{AccelChoice, MachineRecord, SandboxRecord, StateManifest};

use crate::error::{Error, MachinePart, Result, engine_error};
use crate::inner::Inner;
use crate::machine::restore::label;
use crate::machine::spec::{chosen_accel, machine_record};

/// Rates that differ by less are the same: measuring is that exact, and a guest's clock is set at
/// every restore.
const TSC_TOLERANCE_PER_MILLE: u64 = 5;

/// The machine to load a state into.
#[derive(Debug)]
pub(crate) struct Fit {
    pub record: MachineRecord,
    pub accel: Accel,
    /// Why the guest's clock would run at another speed here.
    pub other_tsc: Option<String>,
}

/// The machine to load a state into, in a sandbox of this record.
pub(crate) async fn for_state(
    host: &Inner,
    record: &SandboxRecord,
    manifest: &StateManifest,
) -> Result<Fit> {
    let engine = host.engine().await?;
    let Some(then) = &manifest.machine else {
        let accel = chosen_accel(engine, record)?;
        return Ok(Fit {
            record: machine_record(host, record, accel).await?,
            accel,
            other_tsc: None,
        });
    };
    let accel = accel(engine, record, manifest, then)?;
    let here = machine_record(host, record, accel).await?;
    is_same(
        manifest,
        MachinePart::Architecture,
        then.arch.to_string(),
        here.arch.to_string(),
    )?;
    if !engine.has_machine_type(&then.machine_type) {
        let here = format!("none that QEMU {} has", engine.version());
        return Err(foreign(
            manifest,
            MachinePart::MachineType,
            then.machine_type.clone(),
            here,
        ));
    }
    let cpu = if then.cpu_features.is_empty() {
        unexamined(engine, manifest, then)?
    } else {
        same_cpu(engine, accel, manifest, then).await?
    };
    if accel == Accel::Kvm && cpu.nests() && !record.nested {
        return Err(Error::NestedState {
            state: label(manifest),
        });
    }
    host.keep_news(engine);
    let other_tsc = other_tsc(then.tsc_khz, here.tsc_khz);
    let record = MachineRecord {
        machine_type: then.machine_type.clone(),
        cpu: cpu.argument,
        cpu_features: cpu.features,
        network: then.network,
        // A guest that already has another clock keeps it; the rate that it measured at its boot
        // does not change.
        tsc_khz: then.tsc_khz.or(here.tsc_khz),
        silent_network: then.silent_network,
        mounts_port: then.mounts_port,
        display: then.display,
        ..here
    };
    Ok(Fit {
        record,
        accel,
        other_tsc,
    })
}

/// The accelerator of the state, where the sandbox leaves the choice to us and it works here.
fn accel(
    engine: &Engine,
    record: &SandboxRecord,
    manifest: &StateManifest,
    then: &MachineRecord,
) -> Result<Accel> {
    let here = match (record.accel, then.accelerator.parse()) {
        (AccelChoice::Auto, Ok(choice @ engine::AccelChoice::Only(_))) => {
            match engine.accel(choice) {
                Ok(accel) => return Ok(accel),
                Err(engine::Error::AccelUnusable { reason, .. }) => {
                    format!("it cannot be used: {reason}")
                }
                Err(error) => return Err(engine_error("be used")(error)),
            }
        }
        _ => {
            let chosen = chosen_accel(engine, record)?;
            if chosen.to_string() == then.accelerator {
                return Ok(chosen);
            }
            chosen.to_string()
        }
    };
    Err(foreign(
        manifest,
        MachinePart::Accelerator,
        then.accelerator.clone(),
        here,
    ))
}

/// Why a guest that measured the rate `then_khz` needs another clock at `here_khz`, if it does.
fn other_tsc(then_khz: Option<u64>, here_khz: Option<u64>) -> Option<String> {
    let then = then_khz?;
    let here = here_khz?;
    let tolerance = then / 1000 * TSC_TOLERANCE_PER_MILLE;
    let differs = then.abs_diff(here) > tolerance;
    differs.then(|| {
        format!(
            "the time-stamp counter runs at {} MHz here, {} MHz where it booted",
            here / 1000,
            then / 1000
        )
    })
}

async fn same_cpu(
    engine: &Engine,
    accel: Accel,
    manifest: &StateManifest,
    then: &MachineRecord,
) -> Result<Cpu> {
    let cpu = Cpu {
        argument: then.cpu.clone(),
        features: then.cpu_features.clone(),
    };
    engine
        .same_cpu(accel, &cpu)
        .await
        .map_err(|error| match error {
            engine::Error::CpuLacks { features } => Error::LackingProcessor {
                state: label(manifest),
                qemu: engine.version().to_string(),
                features,
            },
            engine::Error::UnknownCpu { model, version, .. } => foreign(
                manifest,
                MachinePart::Processor,
                model,
                format!("none that QEMU {version} has"),
            ),
            source => engine_error("resolve a processor model")(source),
        })
}

/// The processor of a state that does not list its features: only the same version of QEMU is known
/// to have them.
fn unexamined(engine: &Engine, manifest: &StateManifest, then: &MachineRecord) -> Result<Cpu> {
    is_same(
        manifest,
        MachinePart::Qemu,
        then.qemu_version.clone(),
        engine.version().to_string(),
    )?;
    Cpu::unexamined(&then.cpu).map_err(engine_error("resolve a processor model"))
}

fn is_same(manifest: &StateManifest, what: MachinePart, then: String, here: String) -> Result<()> {
    if then == here {
        Ok(())
    } else {
        Err(foreign(manifest, what, then, here))
    }
}

fn foreign(manifest: &StateManifest, what: MachinePart, then: String, here: String) -> Error {
    Error::ForeignState {
        state: label(manifest),
        what,
        then,
        here,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_another_one_beyond_what_measuring_gets_wrong() {
        assert_eq!(other_tsc(Some(2_000_000), Some(2_009_000)), None);
        assert_eq!(other_tsc(None, Some(2_000_000)), None);
        assert_eq!(other_tsc(Some(2_000_000), None), None);
        let reason = other_tsc(Some(2_000_000), Some(3_600_000)).unwrap();
        assert_eq!(
            reason,
            "the time-stamp counter runs at 3600 MHz here, 2000 MHz where it booted"
        );
    }
}
