//! Checks whether the layers below a machine can be used.

use sandtree_store::disk::check::Verdict;
use sandtree_store::memory::Layer;
use sandtree_store::{LayerId, SandboxDir};
use std::fs::File;

/// Reads the tables of a memory layer, or returns why the layer cannot be used.
pub(crate) fn read_layer(dir: &SandboxDir, id: &LayerId) -> Result<Layer, String> {
    let path = dir.memory_layer(id);
    let opened = File::open(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    Layer::read(&opened).map_err(|error| format!("{}: {error}", path.display()))
}

/// Returns why an overlay cannot be used, if so. QEMU would open a truncated overlay, and fail the
/// guest's reads later.
pub(crate) fn check_overlay(dir: &SandboxDir, id: &LayerId) -> Result<(), String> {
    let path = dir.disk_layer(id);
    match dir.check_overlay(id) {
        Ok(Verdict::Clean { .. }) => Ok(()),
        Ok(Verdict::Corrupt(damage)) => Err(format!("{}: {damage}", path.display())),
        Err(_) if !path.exists() => Err(format!("{} is missing", path.display())),
        Err(error) => Err(format!("{}: {error}", path.display())),
    }
}
