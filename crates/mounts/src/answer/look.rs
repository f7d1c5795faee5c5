//! Requests that look at one file, or at many known ones.

use rustix::fs::FileType;
use rustix::io::Errno;
use sandtree_proto::mount::{Answer, Known, Node, Space, Verdict, decode_items};

use super::Desk;
use crate::directory::{is_directory, kind};
use crate::place::Name;

/// Files of one Revalidate: its verdicts must fit the message.
const VERDICTS_MAX: usize = 60_000;

impl Desk<'_> {
    pub(super) fn root(&mut self) -> Result<Answer, Errno> {
        let root = Node {
            path: Vec::new(),
            id: Default::default(),
            kept: false,
        };
        Ok(Answer::Attr(self.directory(&root)?.attr))
    }

    pub(super) fn lookup(&mut self, directory: &Node, name: &[u8]) -> Result<Answer, Errno> {
        let name = Name::new(name)?;
        let directory = self.directory(directory)?;
        match self.child(&directory, &name) {
            Ok(attr) => Ok(Answer::Attr(attr)),
            Err(Errno::NOENT) => Ok(Answer::Absent {
                watched: directory.watch.is_some(),
            }),
            Err(errno) => Err(errno),
        }
    }

    pub(super) fn stat(&mut self, node: &Node) -> Result<Answer, Errno> {
        Ok(Answer::Attr(self.find(node)?.attr))
    }

    pub(super) fn read_link(&mut self, node: &Node) -> Result<Answer, Errno> {
        let found = self.locate(node)?;
        if kind(&found.attr) != FileType::Symlink {
            return Err(Errno::INVAL);
        }
        let target = rustix::fs::readlinkat(&found.file, c"", Vec::new())?;
        self.out.extend_from_slice(target.as_bytes());
        Ok(Answer::Done)
    }

    pub(super) fn space(&mut self) -> Result<Answer, Errno> {
        let found = rustix::fs::fstatvfs(&self.mount.directory.root)?;
        let number = |wide: u64| u32::try_from(wide).unwrap_or(u32::MAX);
        Ok(Answer::Space(Space {
            block_size: number(found.f_frsize),
            blocks: found.f_blocks,
            free: found.f_bfree,
            available: found.f_bavail,
            files: found.f_files,
            files_free: found.f_ffree,
            name_max: number(found.f_namemax),
        }))
    }

    /// After a restore: which files are as the guest remembers them. The guest lists directories
    /// first, so that each is watched before the files in it are compared.
    pub(super) fn revalidate(&mut self) -> Result<Answer, Errno> {
        let known: Vec<Known> = decode_items(self.data).map_err(|_| Errno::INVAL)?;
        if known.len() > VERDICTS_MAX {
            return Err(Errno::TOOBIG);
        }
        let verdicts = known.iter().map(|known| self.verdict(known));
        Ok(Answer::Verdicts(verdicts.collect()))
    }

    fn verdict(&mut self, known: &Known) -> Verdict {
        let found = self.locate(&known.node);
        match found.and_then(|found| self.watch_itself(found)) {
            Err(Errno::STALE | Errno::NOENT) => Verdict::Gone,
            Err(_) => Verdict::Differs,
            Ok(found) => {
                let is_watched = !is_directory(&found.attr) || found.watch.is_some();
                if is_watched && found.attr.version == known.version {
                    Verdict::Same
                } else {
                    Verdict::Differs
                }
            }
        }
    }
}
