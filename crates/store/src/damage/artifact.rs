//! Why a stream is not an artifact.

use thiserror::Error as ThisError;

use super::member::Member;
use crate::Digest;

/// The most pieces of a member: 16 MiB of memory. What is behind the last but one of a file with
/// more is one piece.
pub const MAX_PIECES: u64 = 1 << 20;
/// The most bytes of a member: the largest disk there is.
pub const MAX_MEMBER_BYTES: u64 = 64 << 40;

/// Which rule of the format a stream breaks.
#[derive(Debug, Clone, PartialEq, Eq, ThisError)]
pub enum Damage {
    #[error("it is neither a tar archive nor compressed with zstd")]
    NotAnArtifact,
    #[error("its compression is damaged: {0}")]
    Compression(String),
    #[error("it ends in the middle of {0}")]
    Truncated(&'static str),
    #[error("there is data after its end")]
    Trailing,
    #[error("a header has the checksum {found}, where its bytes make {expected}")]
    Checksum { expected: u32, found: String },
    #[error("{name:?} is {kind}; only plain files are accepted")]
    Kind { name: String, kind: &'static str },
    #[error("{name:?} is not a name of a member: {rule}")]
    Name { name: String, rule: &'static str },
    #[error("the {field} of {name:?} is not written as this format does")]
    Field { name: String, field: &'static str },
    #[error("the extended header of {name:?} is refused: {rule}")]
    Pax { name: String, rule: &'static str },
    #[error("the extended header {key:?} of {name:?} is none of this format")]
    PaxKey { name: String, key: String },
    #[error("{member} has {bytes} bytes; {MAX_MEMBER_BYTES} are the most")]
    TooLarge { member: Member, bytes: u64 },
    #[error("{member} has {pieces} pieces; {MAX_PIECES} are the most")]
    TooManyPieces { member: Member, pieces: u64 },
    #[error("the map of pieces of {member} is refused: {rule}")]
    Map { member: Member, rule: &'static str },
    #[error("{member} stores {found} bytes, where its map makes {expected}")]
    StoredBytes {
        member: Member,
        expected: u64,
        found: u64,
    },
    #[error("the bytes between {member} and the next member are not zero")]
    Padding { member: Member },
    #[error("its end is one block of zeros, where two belong")]
    End,
    #[error("it ends where {member} belongs")]
    Missing { member: Member },
    #[error("{found} comes where {expected} belongs")]
    Order { expected: Member, found: Member },
    #[error("{member} comes twice")]
    Twice { member: Member },
    #[error("{member} belongs to nothing that the manifest lists")]
    Surplus { member: Member },
    #[error("{member} has {found} bytes, where {expected} belong")]
    Bytes {
        member: Member,
        expected: u64,
        found: u64,
    },
    #[error("{member} has {bytes} bytes; a record has at most {limit}")]
    LongRecord {
        member: Member,
        bytes: u64,
        limit: u64,
    },
    #[error("the bytes of {member} are not those it is named by")]
    Content { member: Member },
    #[error("{digest} is neither among its files nor in the store")]
    Absent { digest: Digest },
    #[error("its manifest is that of snapshot {found}, where {expected} belongs")]
    OtherSnapshot { expected: Digest, found: Digest },
    #[error("its image cannot be: {rule}")]
    Image { rule: &'static str },
    #[error(
        "its disk layer {layer} shows a disk of {bytes} bytes, which does not fit above the one below or in the whole"
    )]
    DiskBytes { layer: usize, bytes: u64 },
    #[error(
        "its memory layer {layer} is of a guest with {found} bytes of memory, where {expected} belong"
    )]
    RamBytes {
        layer: usize,
        expected: u64,
        found: u64,
    },
}
