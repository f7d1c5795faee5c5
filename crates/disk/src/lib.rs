//! The formats that disks come in, each in one place.
//!
//! ```text
//!  ext4::read    any disk ──► files, directories, attributes; the journal is replayed in memory
//!  ext4::write   a tree and the bytes of its files ──► an ext4 file system in one sparse file
//!  qcow2         headers and table entries
//!  partitions    MBR and GPT
//! ```
//!
//! This crate knows bytes, not policies: callers decide which images they accept, where files lie
//! and what they are for.
//!
//! Always: a disk that is read is hostile. Every number is checked before use, memory is bounded,
//! and damage is an error, never a panic.

mod blocks;
mod crc32c;
pub mod ext4;
mod fields;
pub mod partitions;
pub mod qcow2;

pub use blocks::Blocks;
