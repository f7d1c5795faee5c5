//! Names as they come from outside, and the way along them inside of a tree.
//!
//! Always: a name never leads out of the tree. `..` in the name of a member is refused; in the
//! target of a symbolic link it stops at the root, as after `chroot`.

use crate::fault::{Fault, require};
use crate::tree::{Kind, NodeId, Tree};

const MAX_PATH_BYTES: usize = 4096;
const MAX_NAME_BYTES: usize = 255;
const MAX_DEPTH: usize = 1024;
/// As Linux has it.
const MAX_LINKS: u32 = 40;

/// The same path without what says nothing: `/a//./b/` is `a/b`, and the root is empty.
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

/// Whether it can be a name in a directory.
pub(crate) fn check_name(name: &[u8]) -> Result<(), Fault> {
    require(
        !name.is_empty() && name != b".",
        "a part of its name is empty",
    )?;
    require(name != b"..", "its name leads upwards with ..")?;
    require(!name.contains(&0), "its name has a NUL byte")?;
    require(!name.contains(&b'/'), "a part of its name has a slash")?;
    require(
        name.len() <= MAX_NAME_BYTES,
        "a part of its name is longer than 255 bytes",
    )
}

/// What a symbolic link may say.
pub(crate) fn check_target(target: &[u8]) -> Result<(), Fault> {
    require(!target.is_empty(), "it is a symbolic link to nothing")?;
    require(
        target.len() < MAX_PATH_BYTES,
        "it is a symbolic link to a name of more than 4095 bytes",
    )?;
    require(
        !target.contains(&0),
        "it is a symbolic link to a name with a NUL byte",
    )
}

pub(crate) fn check_depth(depth: usize) -> Result<(), Fault> {
    require(depth <= MAX_DEPTH, "it is more than 1024 directories deep")
}

pub(crate) fn parts(path: &[u8]) -> impl Iterator<Item = &[u8]> {
    path.split(|byte| *byte == b'/')
        .filter(|part| !part.is_empty() && *part != b".")
}

/// Parent and name of what [`plain`] gave; nothing for the root.
pub(crate) fn split(plain: &[u8]) -> Option<(&[u8], &[u8])> {
    let slash = plain.iter().rposition(|byte| *byte == b'/');
    match slash {
        _ if plain.is_empty() => None,
        Some(at) => Some((&plain[..at], &plain[at + 1..])),
        None => Some((&[], plain)),
    }
}

/// A way through the tree that follows symbolic links, the last one too.
#[derive(Debug)]
pub(crate) struct Walk {
    /// From the root to where it is.
    pub stack: Vec<NodeId>,
    rest: Vec<u8>,
    at: usize,
    links: u32,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Arrived,
    /// There is nothing of this name here; if something is made and put onto the stack, the walk
    /// goes on.
    Missing(Vec<u8>),
    /// Something that is no directory has to be one for the rest of the way.
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

    /// Goes as far as there is a way.
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
            "the way to it goes over more than 40 symbolic links",
        )?;
        if target.starts_with(b"/") {
            self.stack.truncate(1);
        }
        self.rest = [target, b"/", &self.rest[self.at..]].concat();
        self.at = 0;
        Ok(())
    }

    /// Where the next part of the name starts and ends.
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
    fn what_a_name_means() {
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
    fn parents_and_names() {
        assert_eq!(split(b""), None);
        assert_eq!(split(b"a"), Some((&b""[..], &b"a"[..])));
        assert_eq!(split(b"a/b/c"), Some((&b"a/b"[..], &b"c"[..])));
    }
}
