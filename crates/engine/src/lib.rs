//! One running QEMU: its arguments, its control protocol, its block graph, its jail, and the probes
//! that find what the installed QEMU can do.
//!
//! ```text
//!   EngineConfig --Engine::open--> Engine (version, verdicts) --start(MachineSpec)--> Machine --> Exit
//! ```
//!
//! Always: QEMU is stock and not trusted. It gets descriptors and no paths, no network but the
//! guest's own, and it ends when this process ends, in whatever way. The engine reads no
//! environment and knows nothing of what is on the disks it passes on or of what the guest says on
//! its port.

mod accel;
mod arch;
mod argv;
mod block;
mod blocking;
mod blocks;
mod cpu;
mod devices;
mod engine;
mod error;
mod exit;
mod fdset;
mod install;
mod jail;
mod landlock;
mod machine;
mod mapping;
mod nested;
mod network;
mod preload;
mod probe;
mod process;
pub mod qmp;
mod ram;
mod screen;
mod spare;
mod version;

pub use accel::{Accel, AccelChoice, UnknownAccel};
pub use arch::Arch;
pub use argv::{Drive, LINK_PORT, MOUNTS_PORT, Ports, Screen, Shape, Start, argv};
pub use block::{Aio, DiskChain, Flushes, PreparedOverlay};
pub use blocking::in_place;
pub use cpu::{Cpu, CpuChoice, Nesting};
pub use devices::DeviceFile;
pub use engine::Engine;
pub use error::{Error, Untracked};
pub use exit::Exit;
pub use install::EngineConfig;
pub use jail::{Jail, Limits, Step};
pub use machine::{Machine, MachineSpec, OVERLAYS_MAX};
pub use mapping::{MapEntry, Memory, Preload};
pub use network::{Announce, NetworkMode};
pub use probe::{KvmVerdict, TrackingVerdict, Verdict, Verdicts};
pub use process::ExitWatch;
pub use qmp::{Ending, Event, Events, Qmp, Shutdown};
pub use ram::{ByteRun, GuestMemory, Mapped, Tracking};
pub use screen::Picture;
pub use spare::Spare;
pub use version::Version;
