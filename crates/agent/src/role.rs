//! Which process serves the link.

/// Where the agent runs, and so what it may do to its surroundings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// It is the guest's init.
    Init,
    /// The image's own init runs the guest.
    BesideInit,
    /// It runs somewhere else, on a socket, and must not touch the machine.
    Guestless,
}
