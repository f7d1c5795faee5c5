//! The versions of the protocol.

/// The versions this build speaks. The host offers its range, the agent picks the highest both
/// know.
pub const VERSION_MIN: u16 = 1;
pub const VERSION_MAX: u16 = 9;
