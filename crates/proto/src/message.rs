//! Messages between host and agent, in postcard encoding inside message frames.
//!
//! ```text
//!   host                                   agent
//!    | preamble(nonce), Hello ------------> |
//!    | <------------ preamble(nonce), Hello |   version, channels that live on, requests still unanswered are void
//!    | Resume{channel} ------------------> |   for each channel that the host continues
//!    |                                      |
//!    | Open{channel} ---------------------> |
//!    | <------------------ Started{channel} |   commands and connections only
//!    | <= Data, Eof, Window both ways ====> |
//!    | <-------------------- Ended{channel} |   after the last byte of every guest-to-host stream was produced
//!    | Close{channel} --------------------> |   forget it; what still runs in it is ended
//!    |                                      |
//!    | Request{id} -----------------------> |
//!    | <------------------------- Reply{id} |
//! ```
//!
//! Always: enum variants are only ever appended, for an agent inside a restored memory may be older
//! than its host. Channel numbers and request ids are chosen by the host and never reused while the
//! guest lives. Paths and arguments are bytes, as Linux has them.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::frame::{Frame, MAX_PAYLOAD};
use crate::screen::{ScreenRequest, ScreenState};
use crate::version::{VERSION_MAX, VERSION_MIN};

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum HostMessage {
    Hello(HostHello),
    Open {
        channel: u32,
        window: u32,
        open: Open,
    },
    /// After a break: continue sending from these offsets.
    Resume {
        channel: u32,
        out: u64,
        err: u64,
    },
    /// To the command's whole process group.
    Signal {
        channel: u32,
        signal: i32,
    },
    Resize {
        channel: u32,
        size: TermSize,
    },
    /// Forget the channel. A command in it that still runs is ended with everything it started.
    Close {
        channel: u32,
    },
    Request {
        id: u32,
        request: Request,
    },
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum AgentMessage {
    Hello(AgentHello),
    Started {
        channel: u32,
        pid: u32,
    },
    Ended {
        channel: u32,
        outcome: Outcome,
    },
    Reply {
        id: u32,
        reply: Result<Reply, Failure>,
    },
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostHello {
    pub version_min: u16,
    pub version_max: u16,
}

impl HostHello {
    /// The highest version that both know, or 0.
    pub fn agreed(&self) -> u16 {
        let highest = self.version_max.min(VERSION_MAX);
        if highest >= self.version_min.max(VERSION_MIN) {
            highest
        } else {
            0
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentHello {
    /// The version both will speak, or 0 if there is none.
    pub version: u16,
    /// The agent's build, for people.
    pub build: String,
    pub channels: Vec<ChannelState>,
}

/// A channel that outlived a break.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChannelState {
    pub channel: u32,
    /// The command's tag, as given at its start; empty for what is not a command.
    pub tag: String,
    /// How much of the stream to the guest has arrived.
    pub received: u64,
    /// What is held of the streams to the host: first byte held, bytes produced so far.
    pub out: (u64, u64),
    pub err: (u64, u64),
    pub outcome: Option<Outcome>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Open {
    Exec(ExecStart),
    /// The file's bytes on `Out`, then `Outcome::Done`.
    ReadFile {
        path: Vec<u8>,
    },
    /// The bytes of `In` into a temporary file next to `path`, renamed over it when the stream has
    /// ended.
    WriteFile {
        path: Vec<u8>,
        mode: u32,
        uid: u32,
        gid: u32,
    },
    /// [`DirEntry`]s on `Out`, each with its encoded length as a little-endian u32 before it.
    ListDir {
        path: Vec<u8>,
    },
    /// A tar stream of the file or tree at `path` on `Out`; its members are named relative to
    /// `path`'s parent.
    TarOut {
        path: Vec<u8>,
    },
    /// Unpacks the tar stream of `In` below the directory `path`, which is made if missing.
    TarIn {
        path: Vec<u8>,
    },
    /// A TCP connection to this port on the guest's loopback.
    Connect {
        port: u16,
    },
    /// As `Exec`, but the command outlives its channel. Answered on the host, which starts it as
    /// `Exec` and keeps its output; an agent refuses it.
    Detached(ExecStart),
    /// Joins a detached command from its first byte. Answered on the host; an agent refuses it.
    Attach {
        tag: String,
    },
    /// Removes a detached command that has ended, with its output. Answered on the host; an agent
    /// refuses it.
    Discard {
        tag: String,
    },
    /// [`WatchEvent`]s on `Out`, each with its encoded length as a little-endian u32 before it,
    /// until the channel is closed or the directory is removed. From version 6 on.
    Watch {
        path: Vec<u8>,
        scope: WatchScope,
    },
    /// As `Detached`, for a client that finds its commands again. Answered on the host; an agent
    /// refuses it. From version 7 on.
    DetachedAs {
        start: ExecStart,
        /// What lists of commands call it; of at most [`LABEL_MAX`] bytes.
        label: Option<String>,
        /// How long the command and its output are kept after its end. Without it, as long as the
        /// guest.
        kept_ms: Option<u64>,
    },
    /// As `ReadFile`, from an offset, and at most so many bytes. From version 7 on.
    ReadFrom {
        path: Vec<u8>,
        offset: u64,
        length: u64,
    },
    /// The text of the screen's clipboard on `Out`, in UTF-8, then `Outcome::Done`. From version 8
    /// on.
    ReadClipboard,
    /// The bytes of `In`, which are UTF-8, become the screen's clipboard when the stream has ended.
    /// From version 8 on.
    WriteClipboard,
}

/// The longest label of a command, in bytes.
pub const LABEL_MAX: usize = 256;

impl Open {
    /// The lowest version of the protocol that knows it.
    pub fn version(&self) -> u16 {
        match self {
            Open::ReadClipboard | Open::WriteClipboard => 8,
            Open::DetachedAs { .. } | Open::ReadFrom { .. } => 7,
            Open::Watch { .. } => 6,
            _ => 1,
        }
    }
}

/// How much of a directory is watched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum WatchScope {
    Directory,
    /// Directories below it, too, also those that are made later.
    Tree,
}

/// A change below a watched directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WatchEvent {
    pub change: WatchChange,
    /// Relative to the watched directory. Empty for events that concern no file.
    pub path: Vec<u8>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum WatchChange {
    /// The first event: from here on, changes are reported.
    Watching,
    /// Created, or moved here.
    Created,
    Written,
    Removed,
    MovedAway,
    /// Mode, owner or times.
    Attributes,
    /// Changes came faster than they were read: some are not reported.
    Missed,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecStart {
    /// Chosen by the host and sent again after a break, so that a command can be found in a copy of
    /// its guest.
    pub tag: String,
    pub argv: Vec<Vec<u8>>,
    pub env: Vec<(Vec<u8>, Vec<u8>)>,
    /// Empty: the user's home.
    pub cwd: Vec<u8>,
    /// A name or a number, with `:group` if wanted. Empty: root.
    pub user: String,
    /// With a terminal, `Out` carries all output and `Err` is empty.
    pub terminal: Option<TermSize>,
    /// Without, the command's stdin is empty.
    pub stdin: bool,
    pub timeout_ms: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TermSize {
    pub rows: u16,
    pub cols: u16,
}

/// How a channel ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    Exited {
        code: i32,
    },
    Signaled {
        signal: i32,
    },
    /// The deadline passed; the command and everything it started are gone.
    TimedOut,
    /// The command could not be started.
    NotStarted(Failure),
    /// What is not a command has done its work.
    Done,
    Failed(Failure),
    /// The guest has ended, or is not the one in which this channel was opened. Sent by the host;
    /// no agent sends it.
    Lost {
        reason: String,
    },
}

/// An operation the guest's kernel refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Error)]
#[error("{message}")]
pub struct Failure {
    /// As Linux numbers them; 0 where no system call failed. Below 0 it is the number of a
    /// [`HubFailure`].
    pub errno: i32,
    pub message: String,
}

/// What the hub ended or refused by itself, in place of an errno. No agent sends one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HubFailure {
    /// The guest, or its connection to the host, has ended.
    Ended = -1,
    /// The link to the guest broke before the answer came.
    Broken = -2,
    /// Too many requests wait for the guest.
    QueueFull = -3,
    /// The agent in the guest does not know the request.
    AgentTooOld = -4,
    /// The guest is being restored.
    NotRestored = -5,
    /// No command of this tag was detached.
    NoCommand = -6,
}

impl HubFailure {
    pub const ALL: [Self; 6] = [
        Self::Ended,
        Self::Broken,
        Self::QueueFull,
        Self::AgentTooOld,
        Self::NotRestored,
        Self::NoCommand,
    ];

    pub fn failure(self, message: impl Into<String>) -> Failure {
        Failure {
            errno: self as i32,
            message: message.into(),
        }
    }
}

impl Failure {
    /// What the hub said by itself; None for a failure of the guest.
    pub fn of_hub(&self) -> Option<HubFailure> {
        HubFailure::ALL
            .into_iter()
            .find(|failure| *failure as i32 == self.errno)
    }

    /// The failure as one of the guest: an agent that sends a hub's number has no errno.
    pub fn of_guest(self) -> Self {
        Self {
            errno: self.errno.max(0),
            ..self
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    Ping,
    Stat {
        path: Vec<u8>,
        follow: bool,
    },
    MakeDir {
        path: Vec<u8>,
        parents: bool,
        mode: u32,
    },
    Rename {
        from: Vec<u8>,
        to: Vec<u8>,
    },
    Remove {
        path: Vec<u8>,
        recursive: bool,
    },
    /// Who this guest is. Sent once after every boot, before anything else.
    Configure(Identity),
    Metrics,
    /// Writes everything out to the disk.
    Sync,
    /// Ends every process, syncs, unmounts and powers off. Answered before it begins.
    Shutdown {
        grace_ms: u32,
    },
    /// This guest's memory is that of an earlier moment, or of another guest. Answered when it is
    /// one of its own.
    Restored(Rebirth),
    /// Answered when the rest of the boot, in addition to the agent's work, is done.
    Settle,
    /// Writes everything out, gives back the blocks that no file has, and lets no process write to
    /// a disk any more: until [`Request::Thaw`], or so many milliseconds, whichever comes first.
    /// From version 2 on.
    Freeze {
        thaw_after_ms: u32,
    },
    /// From version 2 on.
    Thaw,
    /// Moves the clock by so much, which may be nothing, and answers what it shows then. From
    /// version 3 on.
    Clock {
        step_ns: i64,
    },
    /// Switches to a clock that does not depend on the processor's time-stamp counter, which runs
    /// at another rate than at the guest's boot. From version 3 on.
    LeaveTsc,
    /// Boots a guest that waits without a root. Answered when its root is mounted. From version 4
    /// on.
    Boot(Boot),
    /// Mounts a directory of the host, which the host serves on the port of mounts. Answered when
    /// programs can use it. From version 5 on.
    Mount(MountStart),
    /// From version 5 on.
    Unmount(MountEnd),
    /// Of the file itself, also if it is a link. From version 6 on.
    SetOwner {
        path: Vec<u8>,
        uid: u32,
        gid: u32,
    },
    /// The extended attributes of a file whose names begin with `prefix`. From version 6 on.
    Attributes {
        path: Vec<u8>,
        prefix: Vec<u8>,
    },
    /// Replaces all extended attributes whose names begin with `prefix`. From version 6 on.
    SetAttributes {
        path: Vec<u8>,
        prefix: Vec<u8>,
        /// Names without the prefix.
        attributes: Vec<Attribute>,
    },
    /// To the guest's X server. From version 8 on.
    Screen(ScreenRequest),
}

/// An extended attribute: its name, without the prefix that was asked for, and its value.
pub type Attribute = (Vec<u8>, Vec<u8>);

impl Request {
    /// The lowest version of the protocol that knows it.
    pub fn version(&self) -> u16 {
        match self {
            Request::Freeze { .. } | Request::Thaw => 2,
            Request::Clock { .. } => 3,
            Request::LeaveTsc => 3,
            Request::Boot(_) => 4,
            Request::Mount(_) | Request::Unmount(_) => 5,
            Request::SetOwner { .. } => 6,
            Request::Attributes { .. } | Request::SetAttributes { .. } => 6,
            Request::Screen(request) => request.version(),
            _ => 1,
        }
    }
}

/// What a guest that waits without a root needs to boot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Boot {
    pub unix_time_ns: u64,
    /// Random bytes from the host, mixed into the guest's pool before anything else runs.
    pub entropy: Vec<u8>,
    /// The agent's options, as on a kernel's command line.
    pub options: String,
}

/// A directory of the host, and where the guest sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountStart {
    /// Chosen by the host; see [`MountId`](crate::mount::MountId).
    pub id: u32,
    /// Where; an absolute path. Created if it does not exist.
    pub path: Vec<u8>,
    pub access: MountAccess,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountEnd {
    pub id: u32,
    /// Also if programs use it.
    pub force: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum MountAccess {
    ReadWrite,
    ReadOnly,
    /// The guest keeps changes on its own disk, on top of what the host has.
    CopyOnWrite,
}

/// What makes a restored guest one of its own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rebirth {
    /// Different for every restore; the guest's hooks get it.
    pub generation: [u8; 16],
    pub identity: Identity,
    /// How large the root's disk is now, if it was made larger and its file system is to grow to
    /// it.
    pub disk_bytes: Option<u64>,
}

/// A hook of the guest that did not do its work.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HookFailure {
    pub name: String,
    pub what: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Empty for a restored guest that keeps its names, because it is in the sandbox it was
    /// captured in.
    pub hostname: String,
    /// 32 hexadecimal digits.
    pub machine_id: String,
    pub unix_time_ns: u64,
    /// Random bytes from the host, mixed into the guest's pool.
    pub entropy: Vec<u8>,
    pub network: Network,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Network {
    /// Loopback only.
    None,
    /// The interface has its address and no route leads anywhere.
    Isolated,
    /// Address, route and name server of QEMU's user-mode network.
    Full,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    Done,
    Stat(Stat),
    Metrics(Metrics),
    Restored {
        hooks: Vec<HookFailure>,
    },
    /// Whether the disks were frozen until now.
    Thawed {
        held: bool,
    },
    Clock {
        unix_time_ns: u64,
    },
    Attributes(Vec<Attribute>),
    Screen(ScreenState),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum FileKind {
    File,
    Dir,
    Symlink,
    Other,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stat {
    pub kind: FileKind,
    /// Permission bits, set-id and sticky bits included.
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub size: u64,
    pub modified_ns: i64,
    /// Where a symbolic link points; empty otherwise.
    pub target: Vec<u8>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirEntry {
    pub name: Vec<u8>,
    pub stat: Stat,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Metrics {
    pub uptime_ms: u64,
    pub memory_total_bytes: u64,
    pub memory_available_bytes: u64,
    pub disk_total_bytes: u64,
    pub disk_available_bytes: u64,
    /// Of all processors together since boot.
    pub cpu_busy_ms: u64,
    pub processes: u32,
}

#[derive(Debug, Error, PartialEq, Eq)]
pub enum MessageError {
    #[error("message does not decode")]
    Malformed,
    #[error("message of {0} bytes is over the limit of {MAX_PAYLOAD}")]
    TooLong(usize),
}

/// Encodes a message into a frame. One that is too long is refused here, before anything was sent:
/// a caller's argument list must not cost the link.
pub fn to_frame<M: Serialize>(message: &M) -> Result<Frame, MessageError> {
    let bytes = postcard::to_stdvec(message).expect("encoding into a vector does not fail");
    if bytes.len() > MAX_PAYLOAD {
        return Err(MessageError::TooLong(bytes.len()));
    }
    Ok(Frame::Message(bytes))
}

/// Decodes a message. Bytes left over are an error: both sides know the same variants or refuse.
pub fn from_bytes<'a, M: Deserialize<'a>>(bytes: &'a [u8]) -> Result<M, MessageError> {
    match postcard::take_from_bytes(bytes) {
        Ok((message, [])) => Ok(message),
        _ => Err(MessageError::Malformed),
    }
}

/// Encodes one item of a stream of items, with its length before it.
pub fn encode_item<T: Serialize>(item: &T) -> Vec<u8> {
    let body = postcard::to_stdvec(item).expect("encoding into a vector does not fail");
    let mut bytes = (body.len() as u32).to_le_bytes().to_vec();
    bytes.extend(body);
    bytes
}

/// Takes the first item off `bytes`, if it is complete.
pub fn decode_item<T: DeserializeOwned>(bytes: &mut Vec<u8>) -> Result<Option<T>, MessageError> {
    let Some(length) = bytes
        .first_chunk::<4>()
        .map(|b| u32::from_le_bytes(*b) as usize)
    else {
        return Ok(None);
    };
    if length > MAX_PAYLOAD {
        return Err(MessageError::TooLong(length));
    }
    let Some(body) = bytes.get(4..4 + length) else {
        return Ok(None);
    };
    let item = from_bytes(body)?;
    bytes.drain(..4 + length);
    Ok(Some(item))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::screen::ScreenInput;

    fn hex<M: Serialize>(message: &M) -> String {
        postcard::to_stdvec(message)
            .unwrap()
            .iter()
            .map(|b| format!("{b:02x}"))
            .collect()
    }

    /// These bytes stand in `docs/protocol.md`. A change here is a change of the protocol's
    /// version.
    #[test]
    fn golden_messages() {
        assert_eq!(
            hex(&HostMessage::Hello(HostHello {
                version_min: 1,
                version_max: 1
            })),
            "000101"
        );
        assert_eq!(
            hex(&HostMessage::Request {
                id: 300,
                request: Request::Ping
            }),
            "06ac0200"
        );
        assert_eq!(
            hex(&AgentMessage::Ended {
                channel: 2,
                outcome: Outcome::Exited { code: 3 }
            }),
            "02020006"
        );
        let exec = ExecStart {
            tag: "t".into(),
            argv: vec![b"ls".to_vec()],
            env: vec![(b"A".to_vec(), b"b".to_vec())],
            cwd: vec![],
            user: String::new(),
            terminal: Some(TermSize { rows: 24, cols: 80 }),
            stdin: true,
            timeout_ms: None,
        };
        let open = HostMessage::Open {
            channel: 1,
            window: 4096,
            open: Open::Exec(exec),
        };
        assert_eq!(
            hex(&open),
            "0101802000017401026c7301014101620000011850".to_owned() + "0100"
        );
    }

    #[test]
    fn golden_rebirth() {
        let identity = Identity {
            hostname: "b".into(),
            machine_id: "0".repeat(32),
            unix_time_ns: 5,
            entropy: vec![9],
            network: Network::Isolated,
        };
        let rebirth = Rebirth {
            generation: [0xab; 16],
            identity,
            disk_bytes: Some(300),
        };
        let request = HostMessage::Request {
            id: 1,
            request: Request::Restored(rebirth),
        };
        let expected = [
            "060109",
            &"ab".repeat(16),
            "0162",
            "20",
            &"30".repeat(32),
            "05",
            "0109",
            "01",
            "01ac02",
        ];
        assert_eq!(hex(&request), expected.concat());
        assert_eq!(
            hex(&HostMessage::Request {
                id: 2,
                request: Request::Settle
            }),
            "06020a"
        );
        let hooks = vec![HookFailure {
            name: "n".into(),
            what: "w".into(),
        }];
        assert_eq!(
            hex(&AgentMessage::Reply {
                id: 1,
                reply: Ok(Reply::Restored { hooks })
            }),
            "0301000301016e0177"
        );
    }

    #[test]
    fn golden_freeze() {
        let freeze = HostMessage::Request {
            id: 3,
            request: Request::Freeze { thaw_after_ms: 300 },
        };
        assert_eq!(hex(&freeze), "06030bac02");
        assert_eq!(
            hex(&HostMessage::Request {
                id: 4,
                request: Request::Thaw
            }),
            "06040c"
        );
        assert_eq!(
            hex(&AgentMessage::Reply {
                id: 4,
                reply: Ok(Reply::Thawed { held: true })
            }),
            "0304000401"
        );
    }

    #[test]
    fn golden_clock() {
        let clock = HostMessage::Request {
            id: 5,
            request: Request::Clock { step_ns: -300 },
        };
        assert_eq!(hex(&clock), "06050dd704");
        let reply = Reply::Clock { unix_time_ns: 300 };
        assert_eq!(
            hex(&AgentMessage::Reply {
                id: 5,
                reply: Ok(reply)
            }),
            "03050005ac02"
        );
    }

    #[test]
    fn golden_boot() {
        let boot = Boot {
            unix_time_ns: 300,
            entropy: vec![9],
            options: "a=b".into(),
        };
        let request = HostMessage::Request {
            id: 6,
            request: Request::Boot(boot),
        };
        assert_eq!(hex(&request), "06060fac02010903613d62");
    }

    #[test]
    fn golden_mounts() {
        let request = |id, request| hex(&HostMessage::Request { id, request });
        let start = MountStart {
            id: 7,
            path: b"/w".to_vec(),
            access: MountAccess::CopyOnWrite,
        };
        assert_eq!(request(7, Request::Mount(start)), "06071007022f7702");
        let end = MountEnd { id: 7, force: true };
        assert_eq!(request(8, Request::Unmount(end)), "0608110701");
    }

    #[test]
    fn golden_watches_and_attributes() {
        let open = HostMessage::Open {
            channel: 1,
            window: 4096,
            open: Open::Watch {
                path: b"/w".to_vec(),
                scope: WatchScope::Tree,
            },
        };
        assert_eq!(hex(&open), "010180200a022f7701");
        let event = WatchEvent {
            change: WatchChange::Written,
            path: b"a".to_vec(),
        };
        assert_eq!(encode_item(&event), [3, 0, 0, 0, 2, 1, b'a']);
        let request = |id, request| hex(&HostMessage::Request { id, request });
        let path = b"/w".to_vec();
        let own = Request::SetOwner {
            path: path.clone(),
            uid: 300,
            gid: 1,
        };
        assert_eq!(request(9, own), "060912022f77ac0201");
        let set = Request::SetAttributes {
            path,
            prefix: b"p".to_vec(),
            attributes: vec![(b"k".to_vec(), b"v".to_vec())],
        };
        assert_eq!(request(10, set), "060a14022f77017001016b0176");
    }

    #[test]
    fn golden_parts_of_files_and_labels() {
        let opened = |open| {
            hex(&HostMessage::Open {
                channel: 1,
                window: 4096,
                open,
            })
        };
        let part = Open::ReadFrom {
            path: b"/w".to_vec(),
            offset: 300,
            length: 5,
        };
        assert_eq!(opened(part), "010180200c022f77ac0205");
        let start = ExecStart {
            tag: "t".into(),
            argv: vec![b"ls".to_vec()],
            env: vec![],
            cwd: vec![],
            user: String::new(),
            terminal: None,
            stdin: false,
            timeout_ms: None,
        };
        let detached = Open::DetachedAs {
            start,
            label: Some("l".into()),
            kept_ms: Some(300),
        };
        let expected = "010180200b017401026c7300000000000001016c01ac02";
        assert_eq!(opened(detached), expected);
    }

    #[test]
    fn golden_screens() {
        let request = |id, request| {
            hex(&HostMessage::Request {
                id,
                request: Request::Screen(request),
            })
        };
        assert_eq!(request(11, ScreenRequest::Look), "060b1500");
        let inputs = vec![
            ScreenInput::Key {
                keysym: 0xffe3,
                down: true,
            },
            ScreenInput::Text("a".into()),
            ScreenInput::Move { x: 300, y: 1 },
            ScreenInput::Button {
                number: 1,
                down: false,
            },
            ScreenInput::Pause { ms: 300 },
            ScreenInput::Point { x: 300, y: 1 },
        ];
        assert_eq!(
            request(12, ScreenRequest::Input(inputs)),
            "060c15010600e3ff0301".to_owned()
                + "010161"
                + "02ac0201"
                + "030100"
                + "04ac02"
                + "05ac0201"
        );
        let size = ScreenRequest::SetSize {
            width: 300,
            height: 200,
        };
        assert_eq!(request(13, size), "060d1502ac02c801");
        let state = ScreenState {
            width: 300,
            height: 200,
            x: 1,
            y: 2,
            session: true,
        };
        let reply = AgentMessage::Reply {
            id: 11,
            reply: Ok(Reply::Screen(state)),
        };
        assert_eq!(hex(&reply), "030b0007ac02c801010201");
    }

    #[test]
    fn golden_clipboards() {
        let opened = |open| {
            hex(&HostMessage::Open {
                channel: 1,
                window: 4096,
                open,
            })
        };
        assert_eq!(opened(Open::ReadClipboard), "010180200d");
        assert_eq!(opened(Open::WriteClipboard), "010180200e");
    }

    #[test]
    fn versions_agree_on_the_highest_both_know() {
        let hello = |version_min, version_max| HostHello {
            version_min,
            version_max,
        };
        assert_eq!(hello(1, 99).agreed(), 9);
        assert_eq!(hello(1, 2).agreed(), 2);
        assert_eq!(hello(1, 1).agreed(), 1);
        assert_eq!(hello(10, 11).agreed(), 0);
        assert_eq!(hello(0, 0).agreed(), 0);
    }

    #[test]
    fn what_is_left_over_is_refused() {
        let mut bytes = postcard::to_stdvec(&Request::Ping).unwrap();
        bytes.push(0);
        assert_eq!(from_bytes::<Request>(&bytes), Err(MessageError::Malformed));
    }

    #[test]
    fn an_argument_list_over_the_limit_is_refused_before_it_is_sent() {
        let request = Request::Stat {
            path: vec![b'a'; MAX_PAYLOAD],
            follow: true,
        };
        let message = HostMessage::Request { id: 1, request };
        assert!(matches!(to_frame(&message), Err(MessageError::TooLong(_))));
    }

    #[test]
    fn directory_entries_come_one_by_one_from_any_cut() {
        let stat = Stat {
            kind: FileKind::File,
            mode: 0o644,
            uid: 0,
            gid: 0,
            size: 5,
            modified_ns: -1,
            target: vec![],
        };
        let entries = [b"a".to_vec(), b"\xff\n".to_vec()].map(|name| DirEntry {
            name,
            stat: stat.clone(),
        });
        let all: Vec<u8> = entries.iter().flat_map(encode_item).collect();
        let mut bytes = Vec::new();
        let mut seen = Vec::new();
        for byte in all {
            bytes.push(byte);
            seen.extend(decode_item::<DirEntry>(&mut bytes).unwrap());
        }
        assert_eq!(seen, entries);
    }
}
