//! How much is taken in at most, over all that is added to one root file system.

use crate::fault::Fault;
use crate::tree::{Attributes, Kind};

/// Of a name or an attribute, beside its bytes.
const NAME_COST_BYTES: u64 = 64;
/// Of an extent, with the room that its list has to spare.
const EXTENT_COST_BYTES: u64 = 24;
/// A member of an archive has up to three headers of its own before it, and some have no node.
const HEADERS_PER_NODE: u64 = 8;

/// What a root file system may cost to make. Nothing is given back for what a later layer replaces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Nodes that are made in all. An archive may have eight headers for each.
    pub nodes: u64,
    /// Unpacked bytes of archives, and bytes of files from elsewhere. Holes cost nothing.
    pub bytes: u64,
    /// Memory for names, targets of links, extended attributes and lists of blocks, together.
    pub names_bytes: u64,
    /// Bytes of files and directories that are really written to the image. Zeros cost nothing.
    pub written_bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            nodes: 4_000_000,
            bytes: 1 << 40,
            names_bytes: 1 << 30,
            written_bytes: 1 << 40,
        }
    }
}

/// What was used of the limits.
#[derive(Debug)]
pub(crate) struct Meter {
    limits: Limits,
    nodes: u64,
    bytes: u64,
    names_bytes: u64,
}

impl Meter {
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            nodes: 0,
            bytes: 0,
            names_bytes: 0,
        }
    }

    pub fn bytes_left(&self) -> u64 {
        self.limits.bytes - self.bytes
    }

    pub fn nodes_left(&self) -> u64 {
        self.limits.nodes - self.nodes
    }

    pub fn take_bytes(&mut self, bytes: u64) -> Result<(), Fault> {
        take(&mut self.bytes, bytes, self.limits.bytes).ok_or_else(|| self.beyond_bytes())
    }

    pub fn beyond_bytes(&self) -> Fault {
        Fault::Limit {
            limit: "bytes of input",
            allowed: self.limits.bytes,
        }
    }

    pub fn beyond_nodes(&self) -> Fault {
        Fault::Limit {
            limit: "nodes",
            allowed: self.limits.nodes,
        }
    }

    pub fn take_node(&mut self) -> Result<(), Fault> {
        take(&mut self.nodes, 1, self.limits.nodes).ok_or_else(|| self.beyond_nodes())
    }

    pub fn take_name(&mut self, name: &[u8]) -> Result<(), Fault> {
        self.take_names_bytes(name.len() as u64 + NAME_COST_BYTES)
    }

    /// Of a hard link, which is also remembered as long as its archive is read.
    pub fn take_link(&mut self, name: &[u8]) -> Result<(), Fault> {
        self.take_name(name)?;
        self.take_name(name)
    }

    /// How many there may be of one file.
    pub fn extents_left(&self) -> u64 {
        (self.limits.names_bytes - self.names_bytes) / EXTENT_COST_BYTES
    }

    /// How many one archive may have.
    pub fn headers(&self) -> u64 {
        self.limits.nodes.saturating_mul(HEADERS_PER_NODE)
    }

    pub fn take_kind(&mut self, kind: &Kind) -> Result<(), Fault> {
        match kind {
            Kind::Symlink(target) => self.take_names_bytes(target.len() as u64),
            Kind::File(content) => {
                self.take_names_bytes(content.extents.len() as u64 * EXTENT_COST_BYTES)
            }
            _ => Ok(()),
        }
    }

    pub fn take_xattrs(&mut self, attributes: &Attributes) -> Result<(), Fault> {
        self.take_names_bytes(
            xattrs_bytes(attributes) + attributes.xattrs.len() as u64 * NAME_COST_BYTES,
        )
    }

    fn take_names_bytes(&mut self, bytes: u64) -> Result<(), Fault> {
        let allowed = self.limits.names_bytes;
        let beyond = Fault::Limit {
            limit: "bytes of names, links, attributes and lists of blocks",
            allowed,
        };
        take(&mut self.names_bytes, bytes, allowed).ok_or(beyond)
    }
}

pub(crate) fn xattrs_bytes(attributes: &Attributes) -> u64 {
    attributes
        .xattrs
        .iter()
        .map(|(name, value)| (name.len() + value.len()) as u64)
        .sum()
}

fn take(used: &mut u64, more: u64, allowed: u64) -> Option<()> {
    *used = used.checked_add(more).filter(|sum| *sum <= allowed)?;
    Some(())
}
