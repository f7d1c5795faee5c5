//! What a machine's network reaches.

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum NetworkMode {
    /// No interface.
    None,
    /// An interface that reaches nothing, the host's loopback included.
    #[default]
    Isolated,
    /// User-mode NAT. Reaches what the host reaches, its loopback by 10.0.2.2 included.
    Full,
    /// The device of [`NetworkMode::Full`], for a state that has it, cut off from everything.
    Restricted,
}

/// Whether the network device asks its guest to announce its address after a restore. Guests agree
/// on that with the device at their boot, so a state needs the same device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Announce {
    Asked,
    /// Nothing on these networks learns addresses, and the announcement costs an emulated guest a
    /// tenth of what it executes before it answers.
    #[default]
    NotAsked,
}
