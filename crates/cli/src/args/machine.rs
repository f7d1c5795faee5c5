//! The options that describe a machine.

use std::time::Duration;

use sandtree::{AccelChoice, Arch, Network, SandboxSpec};

use super::values::{duration, size};

/// The machine: everything on which its warm image depends.
#[derive(Debug, Clone, clap::Args)]
pub struct Shape {
    /// Memory of the guest [default: 512M, or the snapshot's]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub memory: Option<u64>,
    /// Processors of the guest [default: 1, or the snapshot's]
    #[arg(long, value_name = "N")]
    pub cpus: Option<u32>,
    /// What the guest can reach: nothing and no interface, nothing, or what the host can [default:
    /// isolated, or the snapshot's]
    #[arg(long, value_name = "none|isolated|full", value_parser = network)]
    pub network: Option<Network>,
    /// How the guest's processor is made
    #[arg(long, value_name = "auto|kvm|tcg", value_parser = accel)]
    pub accel: Option<AccelChoice>,
    /// The guest's architecture; the host's for now
    #[arg(long, value_name = "ARCH", value_parser = arch)]
    pub arch: Option<Arch>,
    /// A processor model of QEMU; Opteron_G3 is the same under all of them [default: the best there
    /// is]
    #[arg(long, value_name = "MODEL")]
    pub cpu: Option<String>,
    /// Let the guest run guests of its own by KVM (it then reaches more of the host's kernel)
    #[arg(long)]
    pub nested: bool,
    /// How long the guest may take to come up [default: 180s]
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub boot_timeout: Option<Duration>,
    /// A further argument of QEMU (repeatable)
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
        _ => Err("it is none, isolated or full".into()),
    }
}

fn accel(text: &str) -> Result<AccelChoice, String> {
    match text {
        "auto" => Ok(AccelChoice::Auto),
        "kvm" => Ok(AccelChoice::Kvm),
        "tcg" => Ok(AccelChoice::Tcg),
        _ => Err("it is auto, kvm or tcg".into()),
    }
}

fn arch(text: &str) -> Result<Arch, String> {
    match text {
        "x86_64" => Ok(Arch::X86_64),
        "aarch64" => Ok(Arch::Aarch64),
        _ => Err("it is x86_64 or aarch64".into()),
    }
}
