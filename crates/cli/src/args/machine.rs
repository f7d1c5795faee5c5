//! The options that describe a machine.

use std::time::Duration;

use sandtree::{AccelChoice, Arch, DisplaySize, Network, SandboxSpec};

use super::values::{duration, size};

/// The machine: everything on which its warm image depends.
#[derive(Debug, Clone, clap::Args)]
pub struct Shape {
    /// Memory size of the guest [default: 512M, with a screen 2G, or the snapshot's]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub memory: Option<u64>,
    /// Number of processors of the guest [default: 1, with a screen 2, or the snapshot's]
    #[arg(long, value_name = "N")]
    pub cpus: Option<u32>,
    /// none: no network device; isolated: a device that reaches nothing; full: NAT through the host
    /// [default: isolated, or the snapshot's]
    #[arg(long, value_name = "none|isolated|full", value_parser = network)]
    pub network: Option<Network>,
    /// kvm: hardware virtualization; tcg: emulation; auto: kvm if it works
    #[arg(long, value_name = "auto|kvm|tcg", value_parser = accel)]
    pub accel: Option<AccelChoice>,
    /// Architecture of the guest; only the host's is supported
    #[arg(long, value_name = "ARCH", value_parser = arch)]
    pub arch: Option<Arch>,
    /// Processor model of QEMU; Opteron_G3 is the same in all supported versions [default: the best
    /// available]
    #[arg(long, value_name = "MODEL")]
    pub cpu: Option<String>,
    /// Allow KVM inside the guest, which exposes more of the host's kernel to it
    #[arg(long)]
    pub nested: bool,
    /// Time limit for the boot [default: 180s]
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub boot_timeout: Option<Duration>,
    /// Give the guest a screen of this size, with keyboard and mouse [default: that of the image]
    #[arg(long, value_name = "WIDTHxHEIGHT")]
    pub display: Option<DisplaySize>,
    /// Additional argument for QEMU (repeatable)
    #[arg(long, value_name = "ARG", allow_hyphen_values = true)]
    pub qemu_arg: Vec<String>,
}

impl Shape {
    /// Returns the specification with a machine of this shape.
    pub fn of(&self, spec: SandboxSpec) -> SandboxSpec {
        SandboxSpec {
            memory_bytes: self.memory,
            cpus: self.cpus,
            network: self.network,
            accel: self.accel,
            arch: self.arch.unwrap_or(spec.arch),
            cpu: self.cpu.clone(),
            nested: self.nested,
            boot_timeout: self.boot_timeout,
            display: self.display,
            qemu_args: self.qemu_arg.clone(),
            ..spec
        }
    }
}

fn network(text: &str) -> Result<Network, String> {
    match text {
        "none" => Ok(Network::None),
        "isolated" => Ok(Network::Isolated),
        "full" => Ok(Network::Full),
        _ => Err("use none, isolated or full".into()),
    }
}

fn accel(text: &str) -> Result<AccelChoice, String> {
    match text {
        "auto" => Ok(AccelChoice::Auto),
        "kvm" => Ok(AccelChoice::Kvm),
        "tcg" => Ok(AccelChoice::Tcg),
        _ => Err("use auto, kvm or tcg".into()),
    }
}

fn arch(text: &str) -> Result<Arch, String> {
    match text {
        "x86_64" => Ok(Arch::X86_64),
        "aarch64" => Ok(Arch::Aarch64),
        _ => Err("use x86_64 or aarch64".into()),
    }
}
