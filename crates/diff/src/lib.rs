//! Compares the files on two disks, as their guests would see them.
//!
//! ```text
//!  disk a ──► ext4, its journal replayed in memory ─┐
//!                                                   ├─► one walk over both trees ──► changes, by path
//!  disk b ──► ext4, its journal replayed in memory ─┘
//!                    ▲
//!                    └── byte ranges outside of which both disks are known to be equal
//! ```
//!
//! The crate `disk` reads the file systems: nothing is mounted and nothing is written. If the
//! caller knows the ranges that can differ, a file whose inode, tables and data all lie outside of
//! them is not read.
//!
//! Always: the disks are hostile. Damage ends in an error, in bounded memory. Anything that could
//! not be compared is reported in [`Diff::incomplete`], never left out silently.

mod changes;
mod clean;
mod compare;
mod pair;
mod text;
mod upper;

pub use changes::{Aspect, Change, ChangeKind, Diff};
pub use clean::{is_clean, is_same_but_for_notes};
pub use compare::{Options, diff};
pub use sandtree_disk::Blocks;
pub use sandtree_disk::ext4::read::{Error, FileReader, FileSystem, Kind, Node, Path};
pub use text::{ContentDiff, Versions, content_diff, text_diff};
pub use upper::{Upper, UpperKind, upper};
