//! Progress reports to the caller, and the caller's way to stop.

/// Receives the number of unpacked bytes read so far, again and again, and can stop the work.
pub type Watch<'a> = dyn FnMut(u64) -> Result<(), Stop> + 'a;

/// The caller does not want the result any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stop;
