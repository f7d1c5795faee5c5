//! What a sandbox is asked to be.

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::time::Duration;

use sandtree_store::{AccelChoice, Arch, Name, Network, PublishedPort, Tag};
use serde::{Deserialize, Serialize};

use crate::capture::MemoryMode;
use crate::error::{Error, Result};

const MIB: u64 = 1 << 20;
const MEMORY_MIN: u64 = 64 * MIB;
const MEMORY_MAX: u64 = 1 << 42;
const CPUS_MAX: u32 = 64;
const DISK_MAX: u64 = 1 << 43;

/// Published ports listen here and nowhere else.
pub const PUBLISH_ADDRESS: Ipv4Addr = Ipv4Addr::LOCALHOST;

/// What to create. [`new`](Self::new) gives the defaults.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxSpec {
    pub image: String,
    /// `None`: the id serves as the name.
    pub name: Option<String>,
    pub memory_bytes: u64,
    pub cpus: u32,
    /// `None`: as large as the image. The file system grows with it at the first start.
    pub disk_bytes: Option<u64>,
    pub network: Network,
    pub accel: AccelChoice,
    pub arch: Arch,
    pub publish: Vec<PublishedPort>,
    /// Further arguments of QEMU.
    pub qemu_args: Vec<String>,
    /// `None`: 60 s, and three times as long under emulation.
    pub boot_timeout: Option<Duration>,
    /// Removed when it stops, whatever way it stops.
    pub auto_remove: bool,
    /// Boots, even if there is a warm state to begin from.
    pub cold: bool,
    /// Where memory layers are kept. `None`: in the store.
    pub memory_dir: Option<PathBuf>,
    /// The best way to capture memory that may be used. `None`: the best there is.
    pub memory_mode: Option<MemoryMode>,
    /// A checkpoint before every command, so many at most.
    pub auto_checkpoint: Option<u32>,
}

impl SandboxSpec {
    pub fn new(image: impl Into<String>) -> Self {
        Self {
            image: image.into(),
            name: None,
            memory_bytes: 512 * MIB,
            cpus: 1,
            disk_bytes: None,
            network: Network::Isolated,
            accel: AccelChoice::Auto,
            arch: host_arch(),
            publish: Vec::new(),
            qemu_args: Vec::new(),
            boot_timeout: None,
            auto_remove: false,
            cold: false,
            memory_dir: None,
            memory_mode: None,
            auto_checkpoint: None,
        }
    }

    /// Refuses what cannot be, before anything is touched.
    pub fn check(&self) -> Result<()> {
        parse_name("an image's name", &self.image)?;
        self.name.as_deref().map_or(Ok(()), |name| parse_name("a sandbox's name", name).map(drop))?;
        if !(MEMORY_MIN..=MEMORY_MAX).contains(&self.memory_bytes) || !self.memory_bytes.is_multiple_of(MIB) {
            return Err(Error::invalid("memory", self.memory_bytes, "a whole number of MiB, from 64 MiB to 4 TiB"));
        }
        if !(1..=CPUS_MAX).contains(&self.cpus) {
            return Err(Error::invalid("the number of cpus", self.cpus, "1 to 64"));
        }
        if self.disk_bytes.is_some_and(|disk| disk > DISK_MAX || !disk.is_multiple_of(MIB)) {
            let disk = self.disk_bytes.unwrap_or_default();
            return Err(Error::invalid("a disk's size", disk, "a whole number of MiB, at most 8 TiB"));
        }
        if self.memory_dir.as_ref().is_some_and(|dir| !dir.is_absolute() || !dir.is_dir()) {
            let dir = self.memory_dir.as_ref().map(|dir| dir.display().to_string()).unwrap_or_default();
            return Err(Error::invalid("a directory for memory layers", dir, "an absolute path to a directory"));
        }
        if self.auto_checkpoint == Some(0) {
            return Err(Error::invalid("the number of automatic checkpoints", 0, "at least 1"));
        }
        if self.arch != host_arch() {
            let arch = format!("{:?}", self.arch).to_lowercase();
            return Err(Error::invalid("an architecture", arch, "guests have the host's for now"));
        }
        Ok(())
    }
}

/// Refuses what can be neither a sandbox's name nor its id. Touches nothing.
pub fn check_reference(reference: &str) -> Result<()> {
    parse_name("a sandbox's name or id", reference).map(drop)
}

pub(crate) fn parse_name(what: &str, name: &str) -> Result<Name> {
    let rule = "1 to 63 of a-z, 0-9, '.', '_' and '-', the first a letter or digit";
    name.parse().map_err(|_| Error::invalid(what, name, rule))
}

pub(crate) fn parse_tag(tag: &str) -> Result<Tag> {
    let rule = "1 to 63 of a-z, 0-9, '.', '_' and '-', the first a letter or digit, and not like a state's id";
    tag.parse().map_err(|_| Error::invalid("a tag", tag, rule))
}

pub(crate) fn host_arch() -> Arch {
    if cfg!(target_arch = "aarch64") { Arch::Aarch64 } else { Arch::X86_64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_would_leave_the_store_are_refused() {
        for name in ["", "..", "../x", "a/b", "A", "-a", ".a", "a\n", &"a".repeat(64)] {
            let spec = SandboxSpec { name: Some(name.into()), ..SandboxSpec::new("tiny") };
            assert!(spec.check().is_err(), "{name:?}");
            assert!(SandboxSpec::new(name).check().is_err(), "{name:?} as an image");
        }
        let spec = SandboxSpec { name: Some("a.b_c-9".into()), ..SandboxSpec::new("tiny") };
        spec.check().unwrap();
    }

    #[test]
    fn sizes_that_cannot_be_are_refused() {
        let spec = SandboxSpec::new("tiny");
        assert!(SandboxSpec { memory_bytes: MIB, ..spec.clone() }.check().is_err());
        assert!(SandboxSpec { memory_bytes: 512 * MIB + 1, ..spec.clone() }.check().is_err());
        assert!(SandboxSpec { cpus: 0, ..spec.clone() }.check().is_err());
        assert!(SandboxSpec { disk_bytes: Some(u64::MAX), ..spec }.check().is_err());
    }
}
