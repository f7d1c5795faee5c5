//! The kernel's requests: answered from what is known, or passed to the host.

use rustix::io::Errno;
use sandtree_proto::mount::{Change, Make, Remove, Rename, Request, Seek, Time, VERSION_XATTR};

use super::abi::{self, Operation, Out, SetAttr, Want, xattr_answer};
use super::answers::{Asked, Made};
use super::body::Body;
use super::kernel;
use super::listing::CHUNK;
use super::session::{Mount, Question};

/// What becomes of a request.
#[derive(Debug)]
pub enum Turn {
    Answer(kernel::Result),
    /// The answer needs what was doubted to be gone.
    AnswerBehindDoubts(kernel::Result),
    Ask(Box<Question>),
    /// The kernel expects no answer.
    Nothing,
}

impl Mount {
    /// Whether a request may pass while the guest is being captured: it changes nothing and asks
    /// nothing.
    pub fn is_silent(operation: &Operation<'_>) -> bool {
        matches!(
            operation,
            Operation::Init { .. }
                | Operation::Forget { .. }
                | Operation::ForgetMany { .. }
                | Operation::Unknown
                | Operation::Release
                | Operation::Destroy
        )
    }

    pub fn request(&mut self, request: &abi::Request<'_>) -> Turn {
        self.turn(request)
            .unwrap_or_else(|error| Turn::Answer(Err(error)))
    }

    fn turn(&mut self, request: &abi::Request<'_>) -> Result<Turn, Errno> {
        let unique = request.unique;
        let node = request.node;
        match &request.operation {
            Operation::Init {
                minor,
                flags,
                max_readahead,
            } => {
                let out = Out::init(*minor, *flags, *max_readahead)?;
                Ok(Turn::Answer(Ok(out.into_bytes())))
            }
            Operation::Forget { lookups } => {
                self.forget(node, *lookups);
                Ok(Turn::Nothing)
            }
            Operation::ForgetMany { nodes } => {
                for (node, lookups) in nodes {
                    self.forget(*node, *lookups);
                }
                Ok(Turn::Nothing)
            }
            Operation::Release | Operation::Destroy => Ok(Turn::Answer(Ok(Vec::new()))),
            Operation::Unknown => Err(Errno::NOSYS),
            Operation::GetAttr => self.attributes(unique, node),
            Operation::SetAttr(change) => self.set_attributes(unique, node, *change),
            Operation::ListXattr { room } if self.kernel.is_below_overlay() => {
                let names = [VERSION_XATTR.as_bytes(), &[0]].concat();
                xattr_answer(&names, *room).map(|bytes| Turn::Answer(Ok(bytes)))
            }
            Operation::GetXattr { name, room } if self.kernel.is_below_overlay() => {
                self.version(unique, node, name, *room)
            }
            Operation::ListXattr { .. } | Operation::GetXattr { .. } => Err(Errno::NOSYS),
            Operation::List(want) => self.list(unique, node, *want),
            operation => {
                let question = self.ask(unique, node, operation)?;
                Ok(Turn::Ask(Box::new(question)))
            }
        }
    }

    fn forget(&mut self, node: u64, lookups: u64) {
        self.table.forget(node, lookups);
        if self.table.get(node).is_none() {
            self.chunks.remove(&node);
        }
    }

    fn attributes(&mut self, unique: u64, node: u64) -> Result<Turn, Errno> {
        let file = self.table.get(node).ok_or(Errno::STALE)?;
        if let Some(attr) = file.fresh() {
            let mut out = Out::default();
            out.attributes(attr);
            return Ok(Turn::Answer(Ok(out.into_bytes())));
        }
        let request = Request::Stat {
            node: self.table.at(node)?,
        };
        Ok(ask(request, Asked::Attributes { unique, node }))
    }

    /// The version of a file, as an attribute that an overlay copies with it: so the host knows
    /// later which version the guest has changed.
    fn version(&mut self, unique: u64, node: u64, name: &[u8], room: u32) -> Result<Turn, Errno> {
        if name != VERSION_XATTR.as_bytes() {
            return Err(Errno::NODATA);
        }
        let file = self.table.get(node).ok_or(Errno::STALE)?;
        if let Some(attr) = file.fresh() {
            let value = xattr_answer(attr.stamp().as_bytes(), room)?;
            return Ok(Turn::Answer(Ok(value)));
        }
        let request = Request::Stat {
            node: self.table.at(node)?,
        };
        Ok(ask(request, Asked::Stamp { unique, node, room }))
    }

    fn set_attributes(&mut self, unique: u64, node: u64, set: SetAttr) -> Result<Turn, Errno> {
        let time = |set_bit, now_bit, unix_ns| {
            let time = if set.has(now_bit) {
                Time::Now
            } else {
                Time::At { unix_ns }
            };
            set.has(set_bit).then_some(time)
        };
        let change = Change {
            mode: set.has(SetAttr::MODE).then_some(set.mode),
            size: set.has(SetAttr::SIZE).then_some(set.size),
            atime: time(SetAttr::ATIME, SetAttr::ATIME_NOW, set.atime_ns),
            mtime: time(SetAttr::MTIME, SetAttr::MTIME_NOW, set.mtime_ns),
        };
        // The owner of a file is the host's user, whatever the guest's root wants.
        if change == Change::default() {
            return self.attributes(unique, node);
        }
        let request = Request::Change {
            node: self.table.at(node)?,
            change,
        };
        Ok(ask(request, Asked::Changed { unique, node }))
    }

    fn list(&mut self, unique: u64, directory: u64, want: Want) -> Result<Turn, Errno> {
        // A program that starts over wants to see new entries.
        if want.cookie != 0
            && let Some(page) = self.list_ahead(directory, want)
        {
            return Ok(self.listed(page));
        }
        let request = Request::List {
            directory: self.table.at(directory)?,
            cookie: want.cookie,
            max_bytes: CHUNK,
            attributes: want.attributes,
        };
        let asked = Asked::Listed {
            unique,
            directory,
            want,
        };
        Ok(ask(request, asked))
    }

    fn ask(
        &mut self,
        unique: u64,
        node: u64,
        operation: &Operation<'_>,
    ) -> Result<Question, Errno> {
        match *operation {
            Operation::Read { .. }
            | Operation::Write { .. }
            | Operation::Sync
            | Operation::Seek { .. } => self.ask_data(unique, node, operation),
            Operation::Allocate { .. } | Operation::Copy { .. } => {
                self.ask_ranges(unique, node, operation)
            }
            Operation::Lookup { name } => {
                let request = Request::Lookup {
                    directory: self.table.at(node)?,
                    name: name.to_vec(),
                };
                let asked = Asked::Found {
                    unique,
                    directory: node,
                    name: name.to_vec(),
                };
                Ok(plain(request, asked))
            }
            Operation::ReadLink => {
                let node = self.table.at(node)?;
                Ok(plain(Request::ReadLink { node }, Asked::Data { unique }))
            }
            Operation::Space => Ok(plain(Request::Space, Asked::Space { unique })),
            Operation::Unlink { name } => self.remove(unique, node, name, Remove::File),
            Operation::RemoveDir { name } => self.remove(unique, node, name, Remove::Directory),
            Operation::Rename {
                name,
                new_parent,
                new_name,
                flags,
            } => self.rename(unique, (node, name), (new_parent, new_name), flags),
            Operation::Link { node: linked, name } => {
                let request = Request::Link {
                    node: self.table.at(linked)?,
                    directory: self.table.at(node)?,
                    name: name.to_vec(),
                };
                Ok(plain(request, Asked::made(unique, node, name)))
            }
            _ => self.make(unique, node, operation),
        }
    }

    fn make(
        &mut self,
        unique: u64,
        directory: u64,
        operation: &Operation<'_>,
    ) -> Result<Question, Errno> {
        let exclusive = true;
        let (name, what, how) = match *operation {
            Operation::Create { name, flags, mode } => {
                let how = if flags & libc::O_EXCL as u32 != 0 {
                    Made::OpenedNew
                } else {
                    Made::Opened
                };
                (name, Make::File { mode, exclusive }, how)
            }
            Operation::MakeNode { name, mode } if is_plain_file(mode) => {
                (name, Make::File { mode, exclusive }, Made::Named)
            }
            Operation::MakeNode { .. } => return Err(Errno::PERM),
            Operation::MakeUnnamed { mode } => (&[][..], Make::Unnamed { mode }, Made::Unnamed),
            Operation::MakeDir { name, mode } => (name, Make::Directory { mode }, Made::Named),
            Operation::Symlink { name, target } => {
                let target = target.to_vec();
                (name, Make::Symlink { target }, Made::Named)
            }
            _ => return Err(Errno::NOSYS),
        };
        let request = Request::Make {
            directory: self.table.at(directory)?,
            name: name.to_vec(),
            what,
        };
        let asked = Asked::Made {
            unique,
            directory,
            name: name.to_vec(),
            how,
        };
        Ok(plain(request, asked))
    }

    fn remove(
        &mut self,
        unique: u64,
        directory: u64,
        name: &[u8],
        what: Remove,
    ) -> Result<Question, Errno> {
        let request = Request::Remove {
            directory: self.table.at(directory)?,
            name: name.to_vec(),
            what,
            // A program may have it open: no request says when a file is opened.
            keep: self.table.named(directory, name).is_some(),
            file: self.table.file_named(directory, name),
        };
        let asked = Asked::Removed {
            unique,
            directory,
            name: name.to_vec(),
        };
        Ok(plain(request, asked))
    }

    fn rename(
        &mut self,
        unique: u64,
        (directory, name): (u64, &[u8]),
        (to, new_name): (u64, &[u8]),
        flags: u32,
    ) -> Result<Question, Errno> {
        let how = match flags {
            0 => Rename::Replace,
            libc::RENAME_NOREPLACE => Rename::NoReplace,
            libc::RENAME_EXCHANGE => Rename::Exchange,
            _ => return Err(Errno::INVAL),
        };
        let request = Request::Rename {
            from: self.table.at(directory)?,
            name: name.to_vec(),
            to: self.table.at(to)?,
            new_name: new_name.to_vec(),
            how,
            keep: self.table.named(to, new_name).is_some(),
            file: self.table.file_named(directory, name),
        };
        let asked = Asked::Renamed {
            unique,
            from: (directory, name.to_vec()),
            to: (to, new_name.to_vec()),
            how,
        };
        Ok(plain(request, asked))
    }

    fn ask_data(
        &mut self,
        unique: u64,
        number: u64,
        operation: &Operation<'_>,
    ) -> Result<Question, Errno> {
        let node = self.table.at(number)?;
        Ok(match *operation {
            Operation::Read { offset, size } => {
                let length = size.min(abi::DATA_MAX as u32);
                let request = Request::Read {
                    node,
                    offset,
                    length,
                };
                plain(request, Asked::Data { unique })
            }
            Operation::Write {
                offset,
                append,
                data,
            } => Question {
                request: Request::Write {
                    node,
                    offset,
                    append,
                },
                data: Body::Tail(data.len()),
                asked: Asked::Written {
                    unique,
                    node: number,
                },
            },
            Operation::Sync => plain(Request::Sync { node }, Asked::Done { unique }),
            Operation::Seek { offset, whence } => {
                let what = seek(whence)?;
                let request = Request::Seek { node, offset, what };
                plain(request, Asked::Position { unique })
            }
            _ => return Err(Errno::NOSYS),
        })
    }

    fn ask_ranges(
        &mut self,
        unique: u64,
        number: u64,
        operation: &Operation<'_>,
    ) -> Result<Question, Errno> {
        let node = self.table.at(number)?;
        match *operation {
            Operation::Allocate {
                offset,
                length,
                mode,
            } => {
                let request = Request::Allocate {
                    node,
                    mode,
                    offset,
                    length,
                };
                let node = number;
                Ok(plain(request, Asked::Allocated { unique, node }))
            }
            Operation::Copy {
                offset,
                to,
                to_offset,
                length,
            } => {
                let request = Request::Copy {
                    from: node,
                    offset,
                    to: self.table.at(to)?,
                    to_offset,
                    length,
                };
                Ok(plain(request, Asked::Written { unique, node: to }))
            }
            _ => Err(Errno::NOSYS),
        }
    }
}

fn seek(whence: u32) -> Result<Seek, Errno> {
    match whence as i32 {
        libc::SEEK_DATA => Ok(Seek::Data),
        libc::SEEK_HOLE => Ok(Seek::Hole),
        _ => Err(Errno::INVAL),
    }
}

/// Without a kind it is a file as well.
fn is_plain_file(mode: u32) -> bool {
    matches!(mode & libc::S_IFMT, 0 | libc::S_IFREG)
}

fn ask(request: Request, asked: Asked) -> Turn {
    Turn::Ask(Box::new(plain(request, asked)))
}

fn plain(request: Request, asked: Asked) -> Question {
    Question {
        request,
        data: Body::default(),
        asked,
    }
}
