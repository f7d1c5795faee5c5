//! The limits for everything that is added to one root file system together.

use sandtree_disk::ext4::write::{Attributes, Kind};

use crate::fault::Fault;

/// The memory for a name or an attribute, in addition to its bytes.
const NAME_COST_BYTES: u64 = 64;
/// The memory for an extent, including the spare capacity of its list.
const EXTENT_COST_BYTES: u64 = 24;
/// Up to three additional headers precede a member of an archive, and some members have no node.
const HEADERS_PER_NODE: u64 = 8;

/// The limits for building one root file system. A node that a later layer replaces still counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// All nodes together. An archive may have eight headers for each.
    pub nodes: u64,
    /// Unpacked bytes of archives, and bytes of other files. Holes do not count.
    pub bytes: u64,
    /// Memory for names, targets of links, extended attributes and lists of blocks together.
    pub names_bytes: u64,
    /// Bytes of files and directories that are written to the image. Zeros do not count.
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

/// The used part of the limits.
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

    /// Charges a hard link, whose name is also kept while its archive is read.
    pub fn take_link(&mut self, name: &[u8]) -> Result<(), Fault> {
        self.take_name(name)?;
        self.take_name(name)
    }

    /// How many extents the next file may have.
    pub fn extents_left(&self) -> u64 {
        (self.limits.names_bytes - self.names_bytes) / EXTENT_COST_BYTES
    }

    /// How many headers one archive may have.
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
