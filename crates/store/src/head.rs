//! Where a sandbox is now: `head.json`.
//!
//! ```text
//! root file system ◄── disk[0] ◄── … ◄── disk[n-1]   the last one is active: the only layer that is ever written
//! ```
//!
//! Always: replaced as a whole; every layer it lists is in `disks/` before it is.

use serde::{Deserialize, Serialize};

use crate::record::Record;
use crate::{LayerId, MountPoint, StateId};

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Head {
    pub schema: u64,
    /// The parent state; it may be another sandbox's, or removed.
    pub parent: Option<StateId>,
    /// Bottom first; the last one is active.
    pub disk: Vec<LayerId>,
    /// Where undo goes, nearest last.
    pub past: Vec<StateId>,
    /// Where redo goes, nearest last.
    pub future: Vec<StateId>,
    /// Where its guest has directories of the host.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mounts: Vec<MountPoint>,
}

impl Head {
    pub const SCHEMA: u64 = 1;

    pub fn new(parent: Option<StateId>, disk: Vec<LayerId>) -> Self {
        Self {
            schema: Self::SCHEMA,
            parent,
            disk,
            past: Vec::new(),
            future: Vec::new(),
            mounts: Vec::new(),
        }
    }

    /// The overlay that is written. A head that was read has one.
    pub fn active(&self) -> Option<&LayerId> {
        self.disk.last()
    }
}

impl Record for Head {
    const SCHEMA: u64 = Self::SCHEMA;
}
