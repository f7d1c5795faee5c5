//! The protocol between the host and the agent in the guest: frames, messages, stream buffers.
//!
//! Nothing here does I/O. Both ends feed bytes in and take frames out, so both ends can be fuzzed
//! as plain functions, and `docs/protocol.md` can quote golden bytes that a test checks.
//!
//! Always: the bytes of the other side are hostile. Every length is bounded before anything is
//! allocated, and a stream that stops making sense is an error of the link, never a panic.

pub mod frame;
pub mod message;
pub mod mount;
pub mod screen;
pub mod stream;
mod version;

pub use frame::{Decoded, Decoder, Frame, FrameError, MAX_PAYLOAD, Nonce, StreamId};
pub use message::{
    AgentHello, AgentMessage, Boot, ChannelState, DirEntry, ExecStart, Failure, FileKind,
    HookFailure, HostHello, HostMessage, HubFailure, Identity, Metrics, MountAccess, MountEnd,
    MountStart, Network, Open, Outcome, Rebirth, Reply, Request, Stat, TermSize, WatchChange,
    WatchEvent, WatchScope,
};
pub use screen::{ScreenInput, ScreenRequest, ScreenState};
pub use stream::{Outgoing, StreamError};
pub use version::{VERSION_MAX, VERSION_MIN};

/// The name of the virtio-serial port. Port numbers move with the device layout; the name does not.
pub const PORT_NAME: &str = "dev.sandtree.agent";
