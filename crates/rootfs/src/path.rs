//! Checks names from outside, and follows them inside a tree.
//!
//! Always: a name never leads out of the tree. `..` in the name of a member is refused; in the
//! target of a symbolic link it stops at the root, as after `chroot`.

use sandtree_disk::ext4::write::{Kind, NodeId, Tree};

use crate::fault::{Fault, require};

const MAX_PATH_BYTES: usize = 4096;
const MAX_NAME_BYTES: usize = 255;
const MAX_DEPTH: usize = 1024;
/// The limit of Linux.
const MAX_LINKS: u32 = 40;

/// Normalizes a path: `/a//./b/` becomes `a/b`, and the root becomes empty.
pub(crate) fn plain(path: &[u8]) -> Result<Vec<u8>, Fault> {
    require(!path.is_empty(), "its name is empty")?;
    require(
        path.len() <= MAX_PATH_BYTES,
        "its name is longer than 4096 bytes",
    )?;
    let mut plain = Vec::with_capacity(path.len());
    for part in parts(path) {
        check_name(part)?;
        if !plain.is_empty() {
            plain.push(b'/');
        }
        plain.extend_from_slice(part);
    }
    Ok(plain)
}

/// Checks one name in a directory.
pub(crate) fn check_name(name: &[u8]) -> Result<(), Fault> {
    require(
        !name.is_empty() && name != b".",
        "a part of its name is empty",
    )?;
    require(name != b"..", "its name contains ..")?;
    require(!name.contains(&0), "its name has a NUL byte")?;
    require(!name.contains(&b'/'), "a part of its name has a slash")?;
    require(
        name.len() <= MAX_NAME_BYTES,
        "a part of its name is longer than 255 bytes",
    )
}

/// Checks the target of a symbolic link.
pub(crate) fn check_target(target: &[u8]) -> Result<(), Fault> {
    require(
        !target.is_empty(),
        "it is a symbolic link with an empty target",
    )?;
    require(
        target.len() < MAX_PATH_BYTES,
        "it is a symbolic link whose target has more than 4095 bytes",
    )?;
    require(
        !target.contains(&0),
        "it is a symbolic link whose target has a NUL byte",
    )
}

pub(crate) fn check_depth(depth: usize) -> Result<(), Fault> {
    require(depth <= MAX_DEPTH, "it is more than 1024 directories deep")
}

pub(crate) fn parts(path: &[u8]) -> impl Iterator<Item = &[u8]> {
    path.split(|byte| *byte == b'/')
        .filter(|part| !part.is_empty() && *part != b".")
}

/// The parent and the name of a path from [`plain`]; `None` for the root.
pub(crate) fn split(plain: &[u8]) -> Option<(&[u8], &[u8])> {
    let slash = plain.iter().rposition(|byte| *byte == b'/');
    match slash {
        _ if plain.is_empty() => None,
        Some(at) => Some((&plain[..at], &plain[at + 1..])),
        None => Some((&[], plain)),
    }
}

/// Follows a path through the tree, including symbolic links, also the last one.
#[derive(Debug)]
pub(crate) struct Walk {
    /// The nodes from the root to the current one.
    pub stack: Vec<NodeId>,
    rest: Vec<u8>,
    at: usize,
    links: u32,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Arrived,
    /// The current directory has no such name. The caller can create it and [`Walk::enter`] it; the
    /// walk then continues.
    Missing(Vec<u8>),
    /// The rest of the path needs a directory where there is none.
    NotADirectory,
}

impl Walk {
    pub fn new(path: &[u8]) -> Self {
        Self {
            stack: vec![Tree::ROOT],
            rest: path.to_vec(),
            at: 0,
            links: 0,
        }
    }

    pub fn here(&self) -> NodeId {
        self.stack.last().copied().unwrap_or(Tree::ROOT)
    }

    /// Follows the path as far as it exists.
    pub fn run(&mut self, tree: &Tree) -> Result<Step, Fault> {
        while let Some(part) = self.part() {
            let Kind::Dir(entries) = &tree.node(self.here()).kind else {
                return Ok(Step::NotADirectory);
            };
            let name = &self.rest[part.0..part.1];
            self.at = part.1;
            match (name, entries.get(name)) {
                (b"..", _) => self.up(),
                (_, None) => return Ok(Step::Missing(name.to_vec())),
                (_, Some(id)) => match &tree.node(*id).kind {
                    Kind::Symlink(target) => self.follow(target)?,
                    _ => self.enter(*id)?,
                },
            }
        }
        Ok(Step::Arrived)
    }

    pub fn enter(&mut self, id: NodeId) -> Result<(), Fault> {
        check_depth(self.stack.len())?;
        self.stack.push(id);
        Ok(())
    }

    fn up(&mut self) {
        if self.stack.len() > 1 {
            self.stack.pop();
        }
    }

    fn follow(&mut self, target: &[u8]) -> Result<(), Fault> {
        self.links += 1;
        require(
            self.links <= MAX_LINKS,
            "its path has more than 40 symbolic links",
        )?;
        if target.starts_with(b"/") {
            self.stack.truncate(1);
        }
        self.rest = [target, b"/", &self.rest[self.at..]].concat();
        self.at = 0;
        Ok(())
    }

    /// The start and the end of the next name in the path.
    fn part(&self) -> Option<(usize, usize)> {
        let mut start = self.at;
        loop {
            start += self.rest[start..].iter().position(|byte| *byte != b'/')?;
            let bytes = self.rest[start..].iter().position(|byte| *byte == b'/');
            let end = bytes.map_or(self.rest.len(), |bytes| start + bytes);
            if &self.rest[start..end] != b"." {
                return Some((start, end));
            }
            start = end;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_normalized_or_refused() {
        for (name, means) in [
            ("/", ""),
            ("./", ""),
            ("/a//./b/", "a/b"),
            ("./a", "a"),
            ("a/.b", "a/.b"),
        ] {
            assert_eq!(
                plain(name.as_bytes()).expect("it is allowed"),
                means.as_bytes()
            );
        }
        for name in ["", "..", "../a", "a/..", "a/../b", "a\0b"] {
            assert!(plain(name.as_bytes()).is_err(), "{name:?}");
        }
        assert!(plain(&[b'a'; 255]).is_ok() && plain(&[b'a'; 256]).is_err());
        assert!(plain(&b"a/".repeat(2048)).is_ok() && plain(&b"a/".repeat(2049)).is_err());
    }

    #[test]
    fn a_path_is_split_into_parent_and_name() {
        assert_eq!(split(b""), None);
        assert_eq!(split(b"a"), Some((&b""[..], &b"a"[..])));
        assert_eq!(split(b"a/b/c"), Some((&b"a/b"[..], &b"c"[..])));
    }
}
