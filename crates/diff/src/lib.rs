//! What differs between two disks: files, as their guests would see them.
//!
//! ```text
//!  disk a ──► ext4, its journal replayed in memory ─┐
//!                                                   ├─► one walk over both trees ──► changes, by path
//!  disk b ──► ext4, its journal replayed in memory ─┘
//!                    ▲
//!                    └── ranges of bytes outside of which both disks are known to be equal
//! ```
//!
//! A disk is anything that can be read at an offset ([`Blocks`]); nothing is mounted, and nothing
//! is written. With the ranges that can differ, a file whose inode, tables and data all lie outside
//! of them is not read.
//!
//! Always: what a disk says is not trusted. Numbers that lie, loops, and tables that share blocks
//! end in an error, in bounded memory. What could not be taken into account is told in
//! [`Diff::incomplete`], never left out silently.

mod blocks;
mod bookkeeping;
mod changes;
mod compare;
mod error;
mod ext4;
mod path;
mod sides;
mod text;

pub use blocks::Blocks;
pub use bookkeeping::{is_clean, is_same_but_for_notes};
pub use changes::{Aspect, Change, ChangeKind, Diff, Kind, Node};
pub use compare::{Options, diff};
pub use error::Error;
/// For those who write what is read here.
#[doc(hidden)]
pub use ext4::crc32c;
pub use ext4::{FileReader, FileSystem};
pub use path::Path;
pub use text::{ContentDiff, content_diff};
