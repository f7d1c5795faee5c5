//! Whether the layers below a machine can be used.

use sandtree_store::disk::check::Verdict;
use sandtree_store::memory::Layer;
use sandtree_store::{LayerId, SandboxDir};
use std::fs::File;

/// A memory layer as far as its tables tell, or why it cannot be used.
pub(crate) fn read_layer(dir: &SandboxDir, id: &LayerId) -> Result<Layer, String> {
    let path = dir.memory_layer(id);
    let opened = File::open(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    Layer::read(&opened).map_err(|error| format!("{}: {error}", path.display()))
}

/// Whether an overlay can be used. QEMU takes one that was cut short, and fails the guest's reads
/// later.
pub(crate) fn check_overlay(dir: &SandboxDir, id: &LayerId) -> Result<(), String> {
    let path = dir.disk_layer(id);
    match dir.check_overlay(id) {
        Ok(Verdict::Clean { .. }) => Ok(()),
        Ok(Verdict::Corrupt(damage)) => Err(format!("{}: {damage}", path.display())),
        Err(_) if !path.exists() => Err(format!("{} is missing", path.display())),
        Err(error) => Err(format!("{}: {error}", path.display())),
    }
}
