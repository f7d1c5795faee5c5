//! The process that serves the link.

/// Where the agent runs, and so what it may do to the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The agent is the guest's init.
    Init,
    /// The image's own init runs the guest.
    UnderInit,
    /// The agent runs on a socket outside of a guest, and must not change the machine.
    Guestless,
}
