//! The commands that are used, each with the type of its reply.

use std::collections::BTreeMap;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::node::Node;

/// One QMP command: its fields serialise to the arguments.
pub trait Command: Serialize {
    const NAME: &'static str;
    type Reply: DeserializeOwned;
}

/// The reply of commands that only succeed. QEMU sends an empty object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub struct Nothing {}

#[derive(Debug, Serialize)]
pub(crate) struct Capabilities {}

impl Command for Capabilities {
    const NAME: &'static str = "qmp_capabilities";
    type Reply = Nothing;
}

#[derive(Debug, Serialize)]
pub struct QueryStatus {}

impl Command for QueryStatus {
    const NAME: &'static str = "query-status";
    type Reply = Status;
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Status {
    pub running: bool,
    /// QEMU's own word: `running`, `paused`, `guest-panicked`, `internal-error`, `io-error`, ...
    pub status: String,
}

/// Stops the virtual processors.
#[derive(Debug, Serialize)]
pub struct Stop {}

impl Command for Stop {
    const NAME: &'static str = "stop";
    type Reply = Nothing;
}

/// Lets the virtual processors continue.
#[derive(Debug, Serialize)]
pub struct Cont {}

impl Command for Cont {
    const NAME: &'static str = "cont";
    type Reply = Nothing;
}

/// Ends QEMU in an orderly way: disk images are closed.
#[derive(Debug, Serialize)]
pub struct Quit {}

impl Command for Quit {
    const NAME: &'static str = "quit";
    type Reply = Nothing;
}

/// Presses the power button; what follows is up to the guest.
#[derive(Debug, Serialize)]
pub struct SystemPowerdown {}

impl Command for SystemPowerdown {
    const NAME: &'static str = "system_powerdown";
    type Reply = Nothing;
}

/// Takes the descriptor sent along under a name.
#[derive(Debug, Serialize)]
pub(crate) struct GetFd<'a> {
    pub fdname: &'a str,
}

impl Command for GetFd<'_> {
    const NAME: &'static str = "getfd";
    type Reply = Nothing;
}

/// Writes what the first screen shows, as a PPM image.
#[derive(Debug, Serialize)]
pub(crate) struct ScreenDump<'a> {
    pub filename: &'a str,
}

impl Command for ScreenDump<'_> {
    const NAME: &'static str = "screendump";
    type Reply = Nothing;
}

/// Makes a descriptor that `getfd` took the connection of a client.
#[derive(Debug, Serialize)]
pub(crate) struct AddClient<'a> {
    pub protocol: &'static str,
    pub fdname: &'a str,
    pub skipauth: bool,
}

impl Command for AddClient<'_> {
    const NAME: &'static str = "add_client";
    type Reply = Nothing;
}

/// Takes the descriptor sent along into an fd set.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct AddFd {
    pub fdset_id: u64,
}

impl Command for AddFd {
    const NAME: &'static str = "add-fd";
    type Reply = AddedFd;
}

#[derive(Clone, Copy, Debug, Deserialize)]
pub(crate) struct AddedFd {
    /// Its number in QEMU's process.
    pub fd: i64,
}

/// The fd sets there are, and the descriptors in them.
#[derive(Debug, Serialize)]
pub(crate) struct QueryFdsets {}

impl Command for QueryFdsets {
    const NAME: &'static str = "query-fdsets";
    type Reply = Vec<Fdset>;
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Fdset {
    pub fdset_id: u64,
    pub fds: Vec<AddedFd>,
}

/// A command of the monitor for people, for what no other one tells.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct HumanMonitorCommand<'a> {
    pub command_line: &'a str,
}

impl Command for HumanMonitorCommand<'_> {
    const NAME: &'static str = "human-monitor-command";
    type Reply = String;
}

/// Sets a property of an object.
#[derive(Debug, Serialize)]
pub(crate) struct QomSet<'a> {
    pub path: &'a str,
    pub property: &'a str,
    pub value: &'a str,
}

impl Command for QomSet<'_> {
    const NAME: &'static str = "qom-set";
    type Reply = Nothing;
}

/// Gives up an fd set, or one descriptor of it. What was opened through it stays open.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct RemoveFd {
    pub fdset_id: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fd: Option<i64>,
}

impl Command for RemoveFd {
    const NAME: &'static str = "remove-fd";
    type Reply = Nothing;
}

/// Writes the state of all devices without RAM. It has nothing to do with Xen but its first user.
#[derive(Debug, Serialize)]
pub(crate) struct XenSaveDevicesState<'a> {
    pub filename: &'a str,
    pub live: bool,
}

impl Command for XenSaveDevicesState<'_> {
    const NAME: &'static str = "xen-save-devices-state";
    type Reply = Nothing;
}

#[derive(Debug, Serialize)]
pub(crate) struct MigrateIncoming<'a> {
    pub uri: &'a str,
}

impl Command for MigrateIncoming<'_> {
    const NAME: &'static str = "migrate-incoming";
    type Reply = Nothing;
}

#[derive(Debug, Serialize)]
pub(crate) struct Migrate<'a> {
    pub uri: &'a str,
}

impl Command for Migrate<'_> {
    const NAME: &'static str = "migrate";
    type Reply = Nothing;
}

#[derive(Debug, Serialize)]
pub(crate) struct MigrateCancel {}

impl Command for MigrateCancel {
    const NAME: &'static str = "migrate_cancel";
    type Reply = Nothing;
}

#[derive(Debug, Serialize)]
pub(crate) struct MigrateSetCapabilities<'a> {
    pub capabilities: &'a [Capability],
}

#[derive(Debug, Serialize)]
pub(crate) struct Capability {
    pub capability: &'static str,
    pub state: bool,
}

impl Command for MigrateSetCapabilities<'_> {
    const NAME: &'static str = "migrate-set-capabilities";
    type Reply = Nothing;
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct MigrateSetParameters {
    /// Bytes per second.
    pub max_bandwidth: u64,
}

impl Command for MigrateSetParameters {
    const NAME: &'static str = "migrate-set-parameters";
    type Reply = Nothing;
}

#[derive(Debug, Serialize)]
pub(crate) struct QueryMigrate {}

impl Command for QueryMigrate {
    const NAME: &'static str = "query-migrate";
    type Reply = Migration;
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Migration {
    pub status: Option<String>,
    pub error_desc: Option<String>,
}

#[derive(Debug, Serialize)]
#[serde(transparent)]
pub(crate) struct BlockdevAdd(pub Node);

impl Command for BlockdevAdd {
    const NAME: &'static str = "blockdev-add";
    type Reply = Nothing;
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct BlockdevDel<'a> {
    pub node_name: &'a str,
}

impl Command for BlockdevDel<'_> {
    const NAME: &'static str = "blockdev-del";
    type Reply = Nothing;
}

/// Changes options of nodes in use. Options that are not given return to their defaults.
#[derive(Debug, Serialize)]
pub(crate) struct BlockdevReopen<'a> {
    pub options: &'a [Node],
}

impl Command for BlockdevReopen<'_> {
    const NAME: &'static str = "blockdev-reopen";
    type Reply = Nothing;
}

/// The disks of the guest.
#[derive(Debug, Serialize)]
pub(crate) struct QueryBlock {}

impl Command for QueryBlock {
    const NAME: &'static str = "query-block";
    type Reply = Vec<BlockDevice>;
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct BlockDevice {
    pub inserted: Option<InsertedNode>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct InsertedNode {
    /// The node that the device uses.
    pub node_name: String,
}

/// Puts `overlay` above `node`, which is not written to any more.
#[derive(Debug, Serialize)]
pub(crate) struct BlockdevSnapshot<'a> {
    pub node: &'a str,
    pub overlay: &'a str,
}

impl Command for BlockdevSnapshot<'_> {
    const NAME: &'static str = "blockdev-snapshot";
    type Reply = Nothing;
}

/// Starts a job that copies a node.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct BlockdevBackup<'a> {
    pub job_id: &'a str,
    pub device: &'a str,
    pub target: &'a str,
    pub sync: &'static str,
    /// Otherwise its outcome is gone before it can be asked for.
    pub auto_dismiss: bool,
}

impl Command for BlockdevBackup<'_> {
    const NAME: &'static str = "blockdev-backup";
    type Reply = Nothing;
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct BlockResize<'a> {
    pub node_name: &'a str,
    pub size: u64,
}

impl Command for BlockResize<'_> {
    const NAME: &'static str = "block_resize";
    type Reply = Nothing;
}

/// Starts a job that saves the whole machine, its memory included, inside a qcow2 image.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct SnapshotSave<'a> {
    pub job_id: &'a str,
    pub tag: &'a str,
    /// The node that takes the memory.
    pub vmstate: &'a str,
    pub devices: &'a [&'a str],
}

impl Command for SnapshotSave<'_> {
    const NAME: &'static str = "snapshot-save";
    type Reply = Nothing;
}

/// Starts a job that goes back to what [`SnapshotSave`] has saved.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct SnapshotLoad<'a> {
    pub job_id: &'a str,
    pub tag: &'a str,
    pub vmstate: &'a str,
    pub devices: &'a [&'a str],
}

impl Command for SnapshotLoad<'_> {
    const NAME: &'static str = "snapshot-load";
    type Reply = Nothing;
}

#[derive(Debug, Serialize)]
pub struct QueryJobs {}

impl Command for QueryJobs {
    const NAME: &'static str = "query-jobs";
    type Reply = Vec<Job>;
}

#[derive(Clone, Debug, Deserialize)]
pub struct Job {
    pub id: String,
    pub status: String,
    pub error: Option<String>,
}

#[derive(Debug, Serialize)]
pub struct JobDismiss<'a> {
    pub id: &'a str,
}

impl Command for JobDismiss<'_> {
    const NAME: &'static str = "job-dismiss";
    type Reply = Nothing;
}

#[derive(Debug, Serialize)]
pub(crate) struct QueryMachines {}

impl Command for QueryMachines {
    const NAME: &'static str = "query-machines";
    type Reply = Vec<MachineType>;
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct MachineType {
    pub name: String,
}

/// The properties of a type of device. QEMU loads the module of the type, if it is in one.
#[derive(Debug, Serialize)]
pub(crate) struct DeviceListProperties<'a> {
    pub typename: &'a str,
}

impl Command for DeviceListProperties<'_> {
    const NAME: &'static str = "device-list-properties";
    type Reply = Vec<Value>;
}

#[derive(Debug, Serialize)]
pub(crate) struct QueryCpuDefinitions {}

impl Command for QueryCpuDefinitions {
    const NAME: &'static str = "query-cpu-definitions";
    type Reply = Vec<CpuDefinition>;
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct CpuDefinition {
    pub name: String,
    /// What the model has and the accelerator cannot do.
    #[serde(default)]
    pub unavailable_features: Vec<String>,
}

#[derive(Debug, Serialize)]
pub(crate) struct QueryCpuModelExpansion<'a> {
    #[serde(rename = "type")]
    pub kind: &'static str,
    pub model: CpuModel<'a>,
}

#[derive(Debug, Serialize)]
pub(crate) struct CpuModel<'a> {
    pub name: &'a str,
    pub props: BTreeMap<&'a str, Value>,
}

impl Command for QueryCpuModelExpansion<'_> {
    const NAME: &'static str = "query-cpu-model-expansion";
    type Reply = CpuModelExpansion;
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct CpuModelExpansion {
    pub model: ExpandedCpuModel,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct ExpandedCpuModel {
    pub props: BTreeMap<String, Value>,
}
