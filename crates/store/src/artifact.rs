//! Artifacts: a snapshot as one file, for another store.
//!
//! ```text
//! artifact.json | manifest.json | blobs/<digest> … | end        a tar archive, inside one zstd frame or plain
//! ```
//!
//! The layers of the codec, each strict on its own: `frame` takes the zstd frame off, `header`
//! knows the blocks of an archive, `sparse` the places of a member that are not zero, `writer` and
//! `reader` put them together.
//!
//! Always: what the writer writes depends on the content alone: no time, owner, path or allocation
//! of the machine is in it. The reader accepts what the writer writes and nothing else, in memory
//! that the input does not decide.

pub(crate) mod dir;
mod export;
mod frame;
mod header;
mod image_files;
mod import;
mod intake;
mod packing;
mod parts;
mod pipeline;
mod reader;
mod record;
mod sparse;
mod structure;
mod unpack;
mod writer;

pub use export::{ExportSpec, Exported};
pub use frame::Input;
pub use packing::{Packable, PackedMember, Role};
pub use reader::{Found, Reader};
pub use sparse::{BLOCK, Piece, SparseMap};
pub use writer::Writer;

pub use crate::damage::artifact::{Damage, MAX_MEMBER_BYTES, MAX_PIECES};
pub use crate::damage::member::Member;

#[cfg(test)]
mod tests;
