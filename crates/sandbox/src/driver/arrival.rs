//! A stopped machine that holds the state a sandbox goes to, on a disk of its own.
//!
//! ```text
//!   revert:  present  --capture--> state it leaves   \
//!            target   --load-----> Arrival           /--> head written --> continued --> old machine ends
//! ```
//!
//! Always: an arrival needs nothing of the present, so it is loaded while the present is captured.
//! When it fails, or is dropped: its machine ends, and the next collection removes its overlay,
//! which no head lists.

use sandtree_store::{LayerId, MemoryState, Owned, StateManifest};

use crate::error::{Result, store_error};
use crate::fold;
use crate::inner::Inner;
use crate::machine::restore::{self, Checked, Loaded};

pub(super) struct Arrival {
    pub manifest: StateManifest,
    /// The state's layers, and an overlay of its own on top.
    pub disk: Vec<LayerId>,
    /// `None` for a state without memory: its guest boots.
    pub loaded: Option<Loaded>,
}

impl Arrival {
    pub async fn load(host: &Inner, owned: &Owned, state: Checked) -> Result<Self> {
        let manifest = state.manifest().clone();
        let overlay = owned
            .create_disk(manifest.disk_bytes)
            .map_err(store_error("make an overlay"))?;
        owned
            .sync_overlay(&overlay)
            .map_err(store_error("sync an overlay"))?;
        let disk: Vec<LayerId> = manifest.disk.iter().cloned().chain([overlay]).collect();
        let disk = fold::shallow(owned, &disk).await?;
        let loaded = if matches!(manifest.memory, MemoryState::None) {
            None
        } else {
            Some(restore::load(host, owned, state, &disk).await?)
        };
        Ok(Self {
            manifest,
            disk,
            loaded,
        })
    }
}
