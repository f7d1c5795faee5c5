//! Trees as tar streams in both directions: modes, owners, times, symbolic and hard links, holes,
//! devices and extended attributes.

mod extents;
mod left_out;
mod pack;
mod unpack;

pub use left_out::LeftOut;
pub use pack::pack;
pub use unpack::unpack;

/// The prefix that GNU tar, libarchive and Docker use for extended attributes.
const XATTR_KEY: &str = "SCHILY.xattr.";
