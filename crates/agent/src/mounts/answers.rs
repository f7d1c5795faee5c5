//! The host's answers, and what the kernel learns from them.

use std::sync::mpsc::Sender;

use rustix::io::Errno;
use sandtree_proto::mount::{Answer, Attr, Rename, Verdict, Version, decode_items};

use super::abi::{Doubt, Out, Want, xattr_answer};
use super::kernel;
use super::listing::{Chunk, Page};
use super::requests::Turn;
use super::session::Mount;
use super::table::ROOT;
use crate::failure::tolerate;

/// What an answer of the host is for. `unique` is the number of the kernel's request.
#[derive(Debug)]
pub enum Asked {
    Found {
        unique: u64,
        directory: u64,
        name: Vec<u8>,
    },
    Attributes {
        unique: u64,
        node: u64,
    },
    /// Its version, as an extended attribute.
    Stamp {
        unique: u64,
        node: u64,
        room: u32,
    },
    Changed {
        unique: u64,
        node: u64,
    },
    Allocated {
        unique: u64,
        node: u64,
    },
    Made {
        unique: u64,
        directory: u64,
        name: Vec<u8>,
        how: Made,
    },
    Removed {
        unique: u64,
        directory: u64,
        name: Vec<u8>,
    },
    Renamed {
        unique: u64,
        from: (u64, Vec<u8>),
        to: (u64, Vec<u8>),
        how: Rename,
    },
    Written {
        unique: u64,
        node: u64,
    },
    Listed {
        unique: u64,
        directory: u64,
        want: Want,
    },
    /// The data of the answer is the kernel's answer.
    Data {
        unique: u64,
    },
    Done {
        unique: u64,
    },
    Position {
        unique: u64,
    },
    Space {
        unique: u64,
    },
    /// The mounted directory, for the thread that mounts it.
    Root {
        answer: Waiting,
    },
    /// The mounted directory, of a host that greeted.
    RootAgain,
    /// Whether these are what they were.
    Verdicts {
        nodes: Vec<u64>,
    },
}

/// How a file was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Made {
    /// It has a name, and no program has it open.
    Named,
    /// A program opens it, whether it is new or not.
    Opened,
    /// A program opens it, and it must be new.
    OpenedNew,
    /// A program opens it, and it has no name.
    Unnamed,
}

/// A thread that waits for the mounted directory.
#[derive(Debug)]
pub struct Waiting(pub Sender<Result<Attr, Errno>>);

impl Waiting {
    pub fn give(&self, result: Result<Answer, Errno>) {
        let attr = result.and_then(|answer| match answer {
            Answer::Attr(attr) => Ok(attr),
            _ => Err(Errno::IO),
        });
        // The thread may have stopped waiting.
        tolerate(self.0.send(attr));
    }
}

impl Asked {
    pub fn made(unique: u64, directory: u64, name: &[u8]) -> Self {
        Self::Made {
            unique,
            directory,
            name: name.to_vec(),
            how: Made::Named,
        }
    }

    /// The kernel's request, if it was one.
    pub fn unique(&self) -> Option<u64> {
        match self {
            Self::Found { unique, .. }
            | Self::Attributes { unique, .. }
            | Self::Stamp { unique, .. }
            | Self::Changed { unique, .. }
            | Self::Allocated { unique, .. }
            | Self::Made { unique, .. }
            | Self::Removed { unique, .. }
            | Self::Renamed { unique, .. }
            | Self::Written { unique, .. }
            | Self::Listed { unique, .. }
            | Self::Data { unique }
            | Self::Done { unique }
            | Self::Position { unique }
            | Self::Space { unique } => Some(*unique),
            Self::Root { .. } | Self::RootAgain | Self::Verdicts { .. } => None,
        }
    }

    /// The error for the kernel. If the host has made a file at the same moment, the kernel looks
    /// again and opens it: it would not truncate a file that it has just made.
    fn error(&self, error: Errno) -> Errno {
        match self {
            Self::Made {
                how: Made::Opened, ..
            } if error == Errno::EXIST => Errno::STALE,
            _ => error,
        }
    }

    /// Whether it compares what the guest knows with the host.
    pub fn is_comparison(&self) -> bool {
        matches!(self, Self::RootAgain | Self::Verdicts { .. })
    }
}

impl Mount {
    /// Passes the host's answer to the kernel.
    pub fn answer(&mut self, asked: Asked, result: Result<Answer, Errno>, data: &[u8]) {
        if asked.is_comparison() {
            return self.compare(asked, result);
        }
        let Some(unique) = asked.unique() else {
            return;
        };
        let turn = match result {
            // Without a copy: it may be a mebibyte.
            Ok(Answer::Done) if matches!(asked, Asked::Data { .. }) => {
                return self.kernel.answer_data(unique, data);
            }
            Ok(answer) => self.learn(asked, answer, data),
            Err(error) => Err(asked.error(error)),
        };
        match turn {
            Ok(Turn::AnswerBehindDoubts(result)) => {
                self.kernel.answer_behind_doubts(unique, result);
            }
            Ok(Turn::Answer(result)) => self.kernel.answer(unique, &result),
            Ok(Turn::Ask(_) | Turn::Nothing) => {}
            Err(error) => self.kernel.answer(unique, &Err(error)),
        }
    }

    /// An answer of another kind than asked for is the host's fault.
    fn learn(&mut self, asked: Asked, answer: Answer, data: &[u8]) -> Result<Turn, Errno> {
        let mut out = Out::default();
        match (asked, answer) {
            (Asked::Done { .. }, Answer::Done) => {}
            (Asked::Position { .. }, Answer::Position { offset }) => {
                out.u64(offset);
            }
            (Asked::Space { .. }, Answer::Space(space)) => {
                out.space(&space);
            }
            (
                Asked::Found {
                    directory, name, ..
                },
                answer,
            ) => return self.found(directory, &name, answer),
            (Asked::Attributes { node, .. }, Answer::Attr(attr)) => {
                self.table.refresh(node, &attr);
                out.attributes(&attr);
                return Ok(self.behind(node, &attr, out));
            }
            (Asked::Stamp { node, room, .. }, Answer::Attr(attr)) => {
                self.table.refresh(node, &attr);
                return Ok(Turn::Answer(xattr_answer(attr.stamp().as_bytes(), room)));
            }
            (Asked::Changed { node, .. }, Answer::Changed { before, attr }) => {
                self.own_change(node, &attr, before);
                out.attributes(&attr);
            }
            (Asked::Allocated { node, .. }, Answer::Changed { before, attr }) => {
                self.own_change(node, &attr, before);
            }
            (
                Asked::Written { node, .. },
                Answer::Written {
                    bytes,
                    before,
                    attr,
                },
            ) => {
                self.own_change(node, &attr, before);
                out.u32(bytes).u32(0);
            }
            (
                Asked::Listed {
                    directory, want, ..
                },
                Answer::Entries { end, .. },
            ) => {
                let chunk = Chunk {
                    from: want.cookie,
                    entries: decode_items(data).map_err(|_| Errno::IO)?,
                    end,
                    changes: self.changes,
                };
                self.chunks.insert(directory, chunk);
                let page = self.list_ahead(directory, want).ok_or(Errno::IO)?;
                return Ok(self.listed(page));
            }
            (asked, answer) => return self.learn_names(asked, answer),
        }
        Ok(Turn::Answer(Ok(out.into_bytes())))
    }

    fn learn_names(&mut self, asked: Asked, answer: Answer) -> Result<Turn, Errno> {
        let mut out = Out::default();
        self.changes += 1;
        match (asked, answer) {
            (
                Asked::Made {
                    directory,
                    name,
                    how,
                    ..
                },
                Answer::Made {
                    attr,
                    directory: after,
                    ..
                },
            ) => {
                let node = match how {
                    Made::Unnamed => self.table.learn_unnamed(&attr),
                    _ => self.table.learn(directory, &name, &attr),
                };
                self.table.see(node, &attr, None);
                self.table.refresh(directory, &after);
                out.entry(node, &attr);
                if how != Made::Named {
                    out.opened();
                }
            }
            (
                Asked::Removed {
                    directory, name, ..
                },
                Answer::Removed {
                    lost,
                    directory: after,
                },
            ) => {
                self.table.displace(directory, &name);
                lost.iter().for_each(|lost| self.lost_a_name(lost));
                self.table.refresh(directory, &after);
            }
            (
                Asked::Renamed {
                    from: old,
                    to: new,
                    how,
                    ..
                },
                Answer::Renamed {
                    attr,
                    other,
                    from,
                    to,
                },
            ) => {
                self.renamed(&old, &new, how);
                self.table.refresh(old.0, &from);
                self.table.refresh(new.0, &to);
                self.renew_attributes(&attr);
                other.iter().for_each(|other| self.lost_a_name(other));
            }
            _ => return Err(Errno::IO),
        }
        Ok(Turn::Answer(Ok(out.into_bytes())))
    }

    fn found(&mut self, directory: u64, name: &[u8], answer: Answer) -> Result<Turn, Errno> {
        let mut out = Out::default();
        match answer {
            Answer::Attr(attr) => {
                let node = self.table.learn(directory, name, &attr);
                out.entry(node, &attr);
                Ok(self.behind(node, &attr, out))
            }
            Answer::Absent { watched } => {
                self.table.displace(directory, name);
                if !watched || !self.table.remember_absent(directory, name) {
                    return Err(Errno::NOENT);
                }
                out.absent();
                Ok(Turn::Answer(Ok(out.into_bytes())))
            }
            _ => Err(Errno::IO),
        }
    }

    /// An answer with a file's attributes; data of another version goes first.
    fn behind(&mut self, node: u64, attr: &Attr, out: Out) -> Turn {
        let result: kernel::Result = Ok(out.into_bytes());
        if !self.table.see(node, attr, None) {
            return Turn::Answer(result);
        }
        self.kernel.doubt(node, Doubt::Data);
        Turn::AnswerBehindDoubts(result)
    }

    /// The guest changed a file. If somebody else did, too, what the kernel has cached is doubtful.
    /// The answer does not wait for that: a write of mapped pages would wait for itself.
    fn own_change(&mut self, node: u64, attr: &Attr, before: Version) {
        self.changes += 1;
        self.table.refresh(node, attr);
        if self.table.see(node, attr, Some(before)) {
            self.kernel.doubt(node, Doubt::Data);
        }
    }

    /// One name less. The host keeps a file that has none.
    fn lost_a_name(&mut self, lost: &Attr) {
        let Some(node) = self.table.find(lost.id, lost.mode & libc::S_IFMT) else {
            return;
        };
        self.table.keep(node);
        self.renew_attributes(lost);
    }

    /// A change of its names has changed a file's times and links.
    fn renew_attributes(&mut self, attr: &Attr) {
        let Some(node) = self.table.find(attr.id, attr.mode & libc::S_IFMT) else {
            return;
        };
        self.table.refresh(node, attr);
        self.table.see(node, attr, None);
        self.kernel.doubt(node, Doubt::Attributes);
    }

    fn renamed(&mut self, from: &(u64, Vec<u8>), to: &(u64, Vec<u8>), how: Rename) {
        let moved = self.table.displace(from.0, &from.1);
        let replaced = self.table.displace(to.0, &to.1);
        if let Some(node) = moved {
            self.table.place(node, to.0, &to.1);
        }
        if let Some(node) = replaced
            && how == Rename::Exchange
        {
            self.table.place(node, from.0, &from.1);
        }
    }

    /// A page of entries; old data of listed files goes first.
    pub fn listed(&mut self, page: Page) -> Turn {
        if page.stale.is_empty() {
            return Turn::Answer(Ok(page.bytes));
        }
        for node in page.stale {
            self.kernel.doubt(node, Doubt::Data);
        }
        Turn::AnswerBehindDoubts(Ok(page.bytes))
    }

    /// After a restore: doubts what is not as it was.
    fn compare(&mut self, asked: Asked, result: Result<Answer, Errno>) {
        match (asked, result) {
            (Asked::RootAgain, Ok(Answer::Attr(attr))) => {
                let is_same = self.table.get(ROOT).is_some_and(|root| {
                    root.id() == attr.id && root.seen() == attr.version && attr.watched
                });
                self.table.set_root(&attr);
                self.table.see(ROOT, &attr, None);
                if !is_same {
                    self.doubt_directory(ROOT);
                }
            }
            (Asked::Verdicts { nodes }, Ok(Answer::Verdicts(verdicts)))
                if nodes.len() == verdicts.len() =>
            {
                for (node, verdict) in nodes.into_iter().zip(verdicts) {
                    if verdict != Verdict::Same {
                        self.doubt_file(node);
                    }
                }
            }
            // The host cannot say.
            (Asked::Verdicts { nodes }, _) => {
                nodes.into_iter().for_each(|node| self.doubt_file(node));
            }
            _ => self.doubt_directory(ROOT),
        }
    }

    fn doubt_file(&mut self, node: u64) {
        self.has_doubts.set(true);
        if self.table.get(node).is_some_and(|file| file.is_directory()) {
            return self.doubt_directory(node);
        }
        self.table.stale(node);
        self.kernel.doubt(node, Doubt::Data);
        for (directory, name) in self.table.names_of(node) {
            self.kernel.doubt_name(directory, name);
        }
    }

    /// What is in a directory may have changed.
    pub fn doubt_directory(&mut self, node: u64) {
        self.has_doubts.set(true);
        self.table.stale(node);
        self.kernel.doubt(node, Doubt::Data);
        for (directory, name) in self.table.names_of(node) {
            self.kernel.doubt_name(directory, name);
        }
        for name in self.table.names_in(node) {
            if let Some(child) = self.table.named(node, &name) {
                self.table.stale(child);
                self.kernel.doubt(child, Doubt::Attributes);
            }
            self.kernel.doubt_name(node, name);
        }
    }
}
