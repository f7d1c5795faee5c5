//! What the store promises, tested through its own interface.

mod crash;
mod qemu;
mod store;

use crate::{AccelChoice, Arch, Digest, Network, SandboxId, SandboxRecord};

fn record(name: &str) -> SandboxRecord {
    SandboxRecord {
        schema: SandboxRecord::SCHEMA,
        id: SandboxId::random().unwrap(),
        name: name.parse().unwrap(),
        image: "tiny".parse().unwrap(),
        image_digest: Digest::of(b"image"),
        kernel_digest: Digest::of(b"kernel"),
        arch: Arch::X86_64,
        memory_bytes: 512 << 20,
        cpus: 1,
        disk_bytes: 1 << 30,
        network: Network::Isolated,
        accel: AccelChoice::Auto,
        qemu_args: Vec::new(),
        ports: Vec::new(),
        created_at_unix_ms: 1,
        auto_remove: false,
    }
}
