//! The identity of a guest, and the message that a guest gets after a restore.

use sandtree_proto::{self as proto, Identity, Rebirth};
use sandtree_store::{Network, SandboxRecord};

use crate::moment::now_unix_ns;

/// The identity of a sandbox's guest.
pub(crate) fn identity(record: &SandboxRecord) -> Identity {
    use sha2::{Digest, Sha256};
    let digest = Sha256::digest(record.id.as_str());
    let machine_id = digest.iter().take(16).map(|b| format!("{b:02x}")).collect();
    Identity {
        machine_id,
        hostname: record.name.to_string(),
        ..without_sandbox(record)
    }
}

/// The identity of a guest that belongs to no sandbox yet.
pub(crate) fn without_sandbox(record: &SandboxRecord) -> Identity {
    Identity {
        hostname: "sandtree".into(),
        machine_id: "0".repeat(32),
        unix_time_ns: now_unix_ns(),
        entropy: random_bytes(64),
        network: match record.network {
            Network::None => proto::Network::None,
            Network::Isolated => proto::Network::Isolated,
            Network::Full => proto::Network::Full,
        },
    }
}

/// Whether a guest that continues from a state is in the sandbox it was captured in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Belongs {
    /// The guest keeps its names.
    Here,
    /// The guest gets the names of the sandbox.
    Elsewhere,
}

/// The message to a guest that continues from a state with a disk of `disk_bytes`.
pub(crate) fn rebirth(record: &SandboxRecord, belongs: Belongs, disk_bytes: u64) -> Rebirth {
    let generation = random_bytes(16).try_into().expect("sixteen bytes");
    let identity = match belongs {
        Belongs::Here => Identity {
            hostname: String::new(),
            machine_id: String::new(),
            ..without_sandbox(record)
        },
        Belongs::Elsewhere => identity(record),
    };
    let disk_bytes = (record.disk_bytes > disk_bytes).then_some(record.disk_bytes);
    Rebirth {
        generation,
        identity,
        disk_bytes,
    }
}

pub(super) fn random_bytes(count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count];
    getrandom::fill(&mut bytes).expect("the kernel gives random bytes");
    bytes
}
