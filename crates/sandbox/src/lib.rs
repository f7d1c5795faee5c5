//! Sandboxes for AI agents: virtual machines on stock QEMU.
//!
//! A [`Host`] is an opened store with its QEMU. It creates a [`Sandbox`], which is a running
//! Linux machine: a caller runs commands in it, reads and writes its files, and reaches its ports.
//!
//! ```no_run
//! use sandtree::{ExecSpec, Host, HostConfig, SandboxSpec};
//!
//! # async fn example() -> sandtree::Result<()> {
//! let host = Host::open(HostConfig::new("/var/tmp/sandtree", vec!["/usr/bin".into()])).await?;
//! let sandbox = host.create(SandboxSpec::new("tiny")).await?;
//!
//! let said = sandbox.exec(ExecSpec::shell("echo hello from $(uname -s)")).await?.output(1 << 20).await?;
//! assert_eq!(said.stdout, b"hello from Linux\n");
//! assert!(said.status.success());
//!
//! sandbox.files().await?.write("/srv/note", &mut &b"kept"[..], Default::default()).await?;
//! sandbox.stop(None).await?;
//! sandbox.remove().await
//! # }
//! ```
//!
//! Always: the library never touches terminal or environment; [`HostConfig`] says where files and
//! programs are and which variables the host's tools get. What runs a sandbox owns it: when the
//! last [`Sandbox`] handle, or the process, is gone, so is the machine. [`keeper`] is the way to
//! run one in the background.

mod access;
mod begun;
#[cfg(feature = "bench")]
pub mod bench;
mod blocking;
mod boxed;
mod build;
pub mod ca;
mod capture;
mod cause;
mod chain;
mod changes;
mod compare;
mod config;
mod console;
mod create;
mod degradation;
mod display;
mod documents;
mod driver;
mod error;
mod export;
mod fault;
mod files;
mod fold;
mod fork;
mod guest;
mod held;
mod history;
mod host;
mod hub;
pub mod image;
mod images;
mod info;
mod inner;
pub mod keeper;
mod lend;
mod link;
mod machine;
mod manifest;
mod memory;
mod mode;
mod moment;
mod mounts;
mod names;
mod order;
mod pages;
mod place;
mod plan;
mod progress;
mod publish;
mod reference;
mod sandbox;
mod save;
mod settle;
mod snapshots;
mod spec;
mod start;
mod states;
mod status;
mod together;
mod tree;
mod unfinished;
mod verb;
mod volumes;

pub use access::{Access, KeyInfo, NewKey, is_equal};
pub use begun::{Begun, Committed, OwnedSandbox};
pub use boxed::Boxed;
pub use build::{BuildEvent, BuildSpec, BuildWatch};
pub use cause::Cause;
pub use changes::{ApplyOptions, MountChange, MountChanges};
pub use compare::{Aspect, Change, ChangeKind, ContentDiff, Diff, DiffOptions, Node, NodeKind};
pub use config::{HostConfig, MachineUser, RunIn, Spares};
pub use create::{Prepared, WarmInfo};
pub use degradation::Degradation;
pub use display::{
    Button, Display, Password, Place, ScreenInfo, Screenshot, ViewListener, Viewers,
};
pub use documents::{NewArchive, Work};
pub use error::{
    Arguments, Code, Error, ErrorKind, MachinePart, NameHolder, Report, Result, Setting, StateUser,
    Unsaved,
};
pub use export::FileExport;
#[cfg(feature = "faults")]
pub use fault::{Fault, Faults, Step};
pub use fork::{ForkMounts, ForkReport, ForkSpec, default_concurrency};
pub use guest::{
    Exec, ExecHandle, ExecId, ExecSpec, ExitStatus, FileOwner, Files, Forward, Guest, Lifetime,
    Output, Stdin, Transfer, Tunnel, Watch,
};
pub use host::{Doctor, Host, QemuFound, QemuReport};
pub use hub::{ExecConfig, ExecDetails, ExecEntry};
pub use images::{PullSpec, Pulled};
pub use info::SandboxInfo;
pub use link::{LinkError, Output as ByteStream, Refusal};
pub use mode::MemoryMode;
pub use mounts::{InUse, MountInfo, MountOwner, MountSpec};
pub use names::check_reference;
pub use progress::{Advance, Progress};
pub use reference::{absolute_reference, is_path};
pub use sandbox::Sandbox;
pub use sandtree_images::{ImageInfo, PulledKind, Pushed, RegistryAccess, RemovedImage, ToolEnv};
pub use sandtree_proto::{
    DirEntry, FileKind, Metrics, Stat, TermSize, WatchChange, WatchEvent, WatchScope,
};
pub use sandtree_store::{
    AccelChoice, Arch, Consistency, DisplaySize, Ended, ExecDefaults, Expiry, ExpiryAction, Init,
    KeyLimits, MountAccess, Network, PublishedPort, SaveOnStop, SaveTarget, Scope, Shelf,
    StateKind, Verified, rename_noreplace,
};
pub use save::{SaveSpec, Saved, parse_label, parse_target};
pub use snapshots::{
    ExportOptions, Exported, Imported, SnapshotDetails, SnapshotInfo, SnapshotList,
};
pub use spec::{PUBLISH_ADDRESS, SandboxSpec};
pub use states::{
    Checkpoint, Durability, Forget, Forgotten, Goal, Paused, Replace, RestoreReport, Reverted,
    StateInfo,
};
pub use status::{State, StateWatch};
pub use tree::{Tree, TreeKind, TreeNode};
pub use verb::{Phase, Verb, permits};
pub use volumes::{Parents, VOLUME_OWNER, VolumeEntry, VolumeFiles, VolumeInfo, VolumeRemoval};
