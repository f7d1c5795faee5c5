//! How a transfer reports its progress, and how it is cancelled.

/// The watch of a transfer no longer wants it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cancelled;

/// Called with the number of bytes that were moved, and with zero during a wait. An error cancels
/// the transfer.
pub type Watch<'a> = &'a (dyn Fn(u64) -> Result<(), Cancelled> + Sync);
