//! The specification of a new sandbox.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::time::Duration;

use sandtree_images::is_bundle;
use sandtree_store::{
    AccelChoice, Arch, DisplaySize, Expiry, ImageRecord, Network, PublishedPort, SaveOnStop,
    Settings, check_labels,
};
use serde::{Deserialize, Serialize};

use crate::ca;
use crate::error::{Error, Result, store_error};
use crate::image::OwnKernel;
use crate::mode::MemoryMode;
use crate::mounts::MountSpec;
use crate::names::parse_name;
use crate::reference::{Reference, no_snapshot};

const MIB: u64 = 1 << 20;
const MEMORY_MIN: u64 = 64 * MIB;
const MEMORY_MAX: u64 = 1 << 42;
const CPUS_MAX: u32 = 64;
const PORTS_MAX: usize = 64;
const DISK_MAX: u64 = 1 << 43;
/// Linux refuses a longer string of an environment.
const VARIABLE_MAX: usize = 128 << 10;
const EXPIRY_MAX_MS: u64 = 10 * 366 * 86_400_000;

/// Published ports listen here and nowhere else.
pub const PUBLISH_ADDRESS: Ipv4Addr = Ipv4Addr::LOCALHOST;

/// What to create. [`new`](Self::new) gives the defaults. If the sandbox begins from a snapshot, a
/// field that is `None` or empty has the snapshot's value.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxSpec {
    /// What to begin from: an image or a snapshot by name, or a snapshot by its digest or the path
    /// of its directory.
    pub image: Option<String>,
    /// The same for what must be a snapshot. Exactly one of the two fields is set.
    pub snapshot: Option<String>,
    /// `None`: the id serves as the name.
    pub name: Option<String>,
    /// `None`: 512 MiB, and 2 GiB with a screen.
    pub memory_bytes: Option<u64>,
    /// `None`: 1, and 2 with a screen.
    pub cpus: Option<u32>,
    /// `None`: the image's size. The file system grows to the disk's size at the first start.
    pub disk_bytes: Option<u64>,
    /// `None`: isolated.
    pub network: Option<Network>,
    /// `None`: the best of this host.
    pub accel: Option<AccelChoice>,
    pub arch: Arch,
    /// Whether the guest may run guests of its own by KVM. A snapshot does not decide this.
    #[serde(default)]
    pub nested: bool,
    /// A processor model of QEMU. `None`: the best of this host. A state captured with it continues
    /// only on a host whose processor is as good.
    #[serde(default)]
    pub cpu: Option<String>,
    pub publish: Vec<PublishedPort>,
    /// Further arguments of QEMU.
    pub qemu_args: Vec<String>,
    /// `None`: 60 s, and three times as long under emulation.
    pub boot_timeout: Option<Duration>,
    /// Removes the sandbox when it stops, for any reason.
    pub auto_remove: bool,
    /// Boots, even if a warm state or a snapshot's memory exists.
    pub cold: bool,
    /// Boots, and neither starts the service of the image nor waits for it.
    #[serde(default)]
    pub without_start: bool,
    /// Where memory layers are kept. `None`: in the store.
    pub memory_dir: Option<PathBuf>,
    /// The best mode of capturing memory that may be used. `None`: the best of this host.
    pub memory_mode: Option<MemoryMode>,
    /// Takes a checkpoint before every command, and keeps this many at most.
    pub auto_checkpoint: Option<u32>,
    /// Passes the guest's flushes to the host's disk: data that the guest has synced survives a
    /// power loss of the host.
    #[serde(default)]
    pub durable: bool,
    /// Saves the sandbox when it stops, for any reason.
    pub save_on_stop: Option<SaveOnStop>,
    /// A file of certificate authorities of the host that the guest's programs are to trust.
    #[serde(default)]
    pub ca_bundle: Option<PathBuf>,
    /// A kernel to use instead of the image's.
    #[serde(default)]
    pub kernel: Option<OwnKernel>,
    /// Directories of the host to mount. For a snapshot that was saved with a mount at the same
    /// path, the directory of this host.
    #[serde(default)]
    pub mounts: Vec<MountSpec>,
    /// The environment of every command, over that of the image.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// Notes of the caller, which lists show.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// What happens after the sandbox has run for some time. `None`: it runs until it is ended.
    #[serde(default)]
    pub expiry: Option<Expiry>,
    /// The size of the screen. `None`: that of the image, which may have none.
    #[serde(default)]
    pub display: Option<DisplaySize>,
}

impl SandboxSpec {
    /// From an image or a snapshot.
    pub fn new(image: impl Into<String>) -> Self {
        Self {
            image: Some(image.into()),
            snapshot: None,
            name: None,
            memory_bytes: None,
            cpus: None,
            disk_bytes: None,
            network: None,
            accel: None,
            nested: false,
            cpu: None,
            arch: Arch::HOST,
            publish: Vec::new(),
            qemu_args: Vec::new(),
            boot_timeout: None,
            auto_remove: false,
            cold: false,
            without_start: false,
            memory_dir: None,
            memory_mode: None,
            auto_checkpoint: None,
            durable: false,
            save_on_stop: None,
            ca_bundle: None,
            kernel: None,
            mounts: Vec::new(),
            env: BTreeMap::new(),
            labels: BTreeMap::new(),
            expiry: None,
            display: None,
        }
    }

    /// From what must be a snapshot.
    pub fn from_snapshot(snapshot: impl Into<String>) -> Self {
        Self {
            image: None,
            snapshot: Some(snapshot.into()),
            ..Self::new("")
        }
    }

    /// What it begins from.
    pub(crate) fn beginning(&self) -> Result<Reference> {
        match (&self.image, &self.snapshot) {
            (Some(reference), None) | (None, Some(reference)) => Reference::parse(reference),
            (Some(image), Some(snapshot)) => {
                let both = format!("{image} and {snapshot}");
                Err(Error::invalid(
                    "origin of a sandbox",
                    both,
                    "an image or a snapshot, not both",
                ))
            }
            (None, None) => Err(Error::invalid(
                "origin of a sandbox",
                "nothing",
                "the name of an image or a snapshot",
            )),
        }
    }

    /// Refuses an invalid specification, before anything is created.
    pub fn check(&self) -> Result<()> {
        if let Reference::Path(path) = self.beginning()?
            && !path.is_dir()
            && !is_bundle(&path)
        {
            return Err(no_snapshot(&path.to_string_lossy()));
        }
        self.name
            .as_deref()
            .map_or(Ok(()), |name| parse_name("sandbox name", name).map(drop))?;
        self.memory_bytes.map_or(Ok(()), check_memory)?;
        self.cpus.map_or(Ok(()), check_cpus)?;
        check_ports(&self.publish)?;
        if self
            .disk_bytes
            .is_some_and(|disk| disk > DISK_MAX || !disk.is_multiple_of(MIB))
        {
            let disk = self.disk_bytes.unwrap_or_default();
            return Err(Error::invalid(
                "disk size",
                disk,
                "a whole number of MiB, at most 8 TiB",
            ));
        }
        if self
            .memory_dir
            .as_ref()
            .is_some_and(|dir| !dir.is_absolute() || !dir.is_dir())
        {
            let dir = self
                .memory_dir
                .as_ref()
                .map(|dir| dir.display().to_string())
                .unwrap_or_default();
            return Err(Error::invalid(
                "directory for memory layers",
                dir,
                "an absolute path to a directory",
            ));
        }
        self.ca_bundle.as_deref().map_or(Ok(()), ca::check)?;
        self.mounts.iter().try_for_each(MountSpec::check)?;
        self.env.iter().try_for_each(check_variable)?;
        check_labels(&self.labels).map_err(store_error("label a sandbox"))?;
        self.expiry
            .map_or(Ok(()), |expiry| check_expiry(expiry.after_ms))?;
        if self.auto_checkpoint == Some(0) {
            return Err(Error::invalid(
                "number of automatic checkpoints",
                0,
                "at least 1",
            ));
        }
        if self.arch != Arch::HOST {
            let arch = format!("{:?}", self.arch).to_lowercase();
            return Err(Error::invalid(
                "architecture",
                arch,
                "guests have the host's for now",
            ));
        }
        Ok(())
    }

    /// The settings of a sandbox from an image: those of this specification, or the defaults.
    pub(crate) fn settings(&self, image: &ImageRecord) -> Settings {
        let display = self.display.or(image.defaults.display);
        let (memory_mib, cpus) = match display {
            None => (512, 1),
            Some(_) => (2048, 2),
        };
        Settings {
            memory_bytes: self.memory_bytes.unwrap_or(memory_mib * MIB),
            cpus: self.cpus.unwrap_or(cpus),
            display,
            disk_bytes: self
                .disk_bytes
                .or(image.disk_bytes)
                .unwrap_or(image.rootfs.bytes),
            network: self.network.unwrap_or(Network::Isolated),
            accel: self.accel.unwrap_or(AccelChoice::Auto),
            cpu: self.cpu.clone(),
            qemu_args: self.qemu_args.clone(),
            ports: self.publish.clone(),
            memory_mode: self.memory_mode.map(|mode| mode.to_string()),
            auto_checkpoint: self.auto_checkpoint,
        }
    }

    /// The settings of a sandbox from a snapshot: those of this specification, or the saved ones.
    pub(crate) fn settings_over(&self, saved: &Settings) -> Settings {
        Settings {
            memory_bytes: self.memory_bytes.unwrap_or(saved.memory_bytes),
            cpus: self.cpus.unwrap_or(saved.cpus),
            disk_bytes: self.disk_bytes.unwrap_or(saved.disk_bytes),
            network: self.network.unwrap_or(saved.network),
            accel: self.accel.unwrap_or(saved.accel),
            cpu: self.cpu.clone().or(saved.cpu.clone()),
            display: self.display.or(saved.display),
            // They reach into the host, so a snapshot's arguments are not used.
            qemu_args: self.qemu_args.clone(),
            ports: if self.publish.is_empty() {
                saved.ports.clone()
            } else {
                self.publish.clone()
            },
            memory_mode: self
                .memory_mode
                .map(|mode| mode.to_string())
                .or(saved.memory_mode.clone()),
            auto_checkpoint: self.auto_checkpoint.or(saved.auto_checkpoint),
        }
    }
}

/// Refuses settings that a specification could not ask for. They may be those of a snapshot, which
/// may come from anyone.
pub(crate) fn check_settings(settings: &Settings) -> Result<()> {
    check_memory(settings.memory_bytes)?;
    check_cpus(settings.cpus)?;
    check_ports(&settings.ports)?;
    settings
        .memory_mode
        .as_deref()
        .map_or(Ok(()), |mode| mode.parse::<MemoryMode>().map(drop))
}

fn check_memory(bytes: u64) -> Result<()> {
    if (MEMORY_MIN..=MEMORY_MAX).contains(&bytes) && bytes.is_multiple_of(MIB) {
        return Ok(());
    }
    Err(Error::invalid(
        "memory",
        bytes,
        "a whole number of MiB, from 64 MiB to 4 TiB",
    ))
}

fn check_cpus(cpus: u32) -> Result<()> {
    if (1..=CPUS_MAX).contains(&cpus) {
        return Ok(());
    }
    Err(Error::invalid("number of cpus", cpus, "1 to 64"))
}

/// A time to expire in. The longest keeps sums of times small enough for any reader.
pub(crate) fn check_expiry(after_ms: u64) -> Result<()> {
    if after_ms <= EXPIRY_MAX_MS {
        return Ok(());
    }
    let rule = "at most 10 years";
    Err(Error::invalid("time to expire in", after_ms, rule))
}

fn check_variable((name, value): (&String, &String)) -> Result<()> {
    let fits = !name.is_empty() && !name.contains(['=', '\0']) && !value.contains('\0');
    if fits && name.len() + value.len() <= VARIABLE_MAX {
        return Ok(());
    }
    let rule = "a name without '=' and a value, at most 128 KiB together, without NUL";
    Err(Error::invalid("environment variable", name, rule))
}

fn check_ports(ports: &[PublishedPort]) -> Result<()> {
    if ports.len() <= PORTS_MAX {
        return Ok(());
    }
    Err(Error::invalid("number of ports", ports.len(), "at most 64"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_would_leave_the_store_are_refused() {
        for name in [
            "",
            "..",
            "../x",
            "a/b",
            "A",
            "-a",
            ".a",
            "a\n",
            &"a".repeat(64),
        ] {
            let spec = SandboxSpec {
                name: Some(name.into()),
                ..SandboxSpec::new("tiny")
            };
            assert!(spec.check().is_err(), "{name:?}");
        }
        let spec = SandboxSpec {
            name: Some("a.b_c-9".into()),
            ..SandboxSpec::new("tiny")
        };
        spec.check().unwrap();
    }

    #[test]
    fn sizes_that_cannot_be_are_refused() {
        let spec = SandboxSpec::new("tiny");
        assert!(
            SandboxSpec {
                memory_bytes: Some(MIB),
                ..spec.clone()
            }
            .check()
            .is_err()
        );
        assert!(
            SandboxSpec {
                memory_bytes: Some(512 * MIB + 1),
                ..spec.clone()
            }
            .check()
            .is_err()
        );
        assert!(
            SandboxSpec {
                cpus: Some(0),
                ..spec.clone()
            }
            .check()
            .is_err()
        );
        assert!(
            SandboxSpec {
                disk_bytes: Some(u64::MAX),
                ..spec
            }
            .check()
            .is_err()
        );
    }
}
