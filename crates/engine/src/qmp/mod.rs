//! QMP, the control protocol of QEMU: typed commands out, replies and events in.
//!
//! ```text
//!   Qmp::run --line--> writer task --> socket --> QEMU
//!      ^                                            |
//!      +--reply by id-- reader task <-- socket <----+
//!                            \--events--> every subscriber, and `Ending`
//! ```
//!
//! Always: a reply goes to the command whose id it carries and to no other, however late it comes.
//! Every command has a deadline. A line is at most 1 MiB. Of commands that carry a descriptor one
//! is under way at a time: QEMU keeps but the last descriptors it received. QEMU is not trusted:
//! what does not parse ends the connection. When it fails: every waiting command ends with the same
//! cause, and so does every later one. The end of the process is seen at once, also by a command
//! whose reply never comes.

mod client;
mod command;
mod event;
mod message;
mod node;

pub use client::Qmp;
pub(crate) use command::{
    AddClient, AddFd, BlockResize, BlockdevAdd, BlockdevBackup, BlockdevDel, BlockdevReopen,
    BlockdevSnapshot, Capability, CpuModel, DeviceListProperties, GetFd, HumanMonitorCommand,
    Migrate, MigrateCancel, MigrateIncoming, MigrateSetCapabilities, MigrateSetParameters, QomSet,
    QueryBlock, QueryCpuDefinitions, QueryCpuModelExpansion, QueryFdsets, QueryMachines,
    QueryMigrate, RemoveFd, ScreenDump, XenSaveDevicesState,
};
pub use command::{
    Command, Cont, Job, JobDismiss, Nothing, QueryJobs, QueryStatus, Quit, SnapshotLoad,
    SnapshotSave, Status, Stop, SystemPowerdown,
};
pub use event::{Ending, Event, Events, Shutdown};
pub(crate) use node::{Below, Cache, Node};
