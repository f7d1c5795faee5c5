//! The part of FUSE's kernel interface that mounts use: requests as the kernel writes them to
//! `/dev/fuse`, and the answers that it reads. `include/uapi/linux/fuse.h` of the kernel defines
//! both.
//!
//! Always: the kernel's bytes are checked like anybody's. A request that is too short for its
//! fields is answered with EINVAL.

use rustix::io::Errno;
use sandtree_proto::mount::{Attr, Space};

const MAJOR: u32 = 7;
/// The version in which the kernel knows entries that expire. Earlier ones are refused.
const MINOR: u32 = 38;
const HEADER: usize = 40;
/// How long the kernel may rely on what the host watches. Changes are reported, so this bounds only
/// what a lost report costs.
const WATCHED_SECONDS: u64 = 3600;
/// Requests that the kernel has sent ahead: read-ahead, and writes of mapped pages.
const BACKGROUND: u16 = 16;
const PAGE: usize = 4096;

/// The most bytes of one read or write.
pub const DATA_MAX: usize = sandtree_proto::mount::DATA_MAX;
/// A request and its header fit.
pub const REQUEST_MAX: usize = DATA_MAX + PAGE;

mod flags {
    pub const ASYNC_READ: u64 = 1 << 0;
    pub const BIG_WRITES: u64 = 1 << 5;
    pub const DO_READDIRPLUS: u64 = 1 << 13;
    pub const READDIRPLUS_AUTO: u64 = 1 << 14;
    pub const NO_OPEN_SUPPORT: u64 = 1 << 17;
    pub const PARALLEL_DIROPS: u64 = 1 << 18;
    pub const MAX_PAGES: u64 = 1 << 22;
    pub const CACHE_SYMLINKS: u64 = 1 << 23;
    pub const NO_OPENDIR_SUPPORT: u64 = 1 << 24;
    pub const EXPLICIT_INVAL_DATA: u64 = 1 << 25;
    pub const HANDLE_KILLPRIV_V2: u64 = 1 << 28;
    pub const INIT_EXT: u64 = 1 << 30;
    pub const HAS_EXPIRE_ONLY: u64 = 1 << 35;
}

/// What the agent relies on. Not the write-back cache: size and times would then be the guest's,
/// so that changes on the host stay unseen, and a state would hold data that no host has.
const WANTED: u64 = flags::ASYNC_READ
    | flags::BIG_WRITES
    | flags::DO_READDIRPLUS
    | flags::READDIRPLUS_AUTO
    | flags::NO_OPEN_SUPPORT
    | flags::PARALLEL_DIROPS
    | flags::MAX_PAGES
    | flags::CACHE_SYMLINKS
    | flags::NO_OPENDIR_SUPPORT
    | flags::EXPLICIT_INVAL_DATA
    | flags::HANDLE_KILLPRIV_V2
    | flags::INIT_EXT
    | flags::HAS_EXPIRE_ONLY;

/// One request of the kernel.
#[derive(Debug, PartialEq, Eq)]
pub struct Request<'a> {
    /// The number that its answer has.
    pub unique: u64,
    pub node: u64,
    pub operation: Operation<'a>,
}

#[derive(Debug, PartialEq, Eq)]
pub enum Operation<'a> {
    Init {
        minor: u32,
        flags: u64,
        max_readahead: u32,
    },
    Destroy,
    Lookup {
        name: &'a [u8],
    },
    Forget {
        lookups: u64,
    },
    ForgetMany {
        /// Nodes, and how many lookups of each.
        nodes: Vec<(u64, u64)>,
    },
    GetAttr,
    SetAttr(SetAttr),
    ReadLink,
    Symlink {
        name: &'a [u8],
        target: &'a [u8],
    },
    /// A file without content, or one of a kind that mounts do not have.
    MakeNode {
        name: &'a [u8],
        mode: u32,
    },
    MakeDir {
        name: &'a [u8],
        mode: u32,
    },
    Unlink {
        name: &'a [u8],
    },
    RemoveDir {
        name: &'a [u8],
    },
    Rename {
        name: &'a [u8],
        new_parent: u64,
        new_name: &'a [u8],
        flags: u32,
    },
    Link {
        /// The node that gets another name, in the directory of the request.
        node: u64,
        name: &'a [u8],
    },
    Create {
        name: &'a [u8],
        flags: u32,
        mode: u32,
    },
    /// A file without a name, which a program opens.
    MakeUnnamed {
        mode: u32,
    },
    Read {
        offset: u64,
        size: u32,
    },
    Write {
        offset: u64,
        append: bool,
        data: &'a [u8],
    },
    List(Want),
    Sync,
    Space,
    Allocate {
        offset: u64,
        length: u64,
        mode: u32,
    },
    Seek {
        offset: u64,
        whence: u32,
    },
    Copy {
        offset: u64,
        to: u64,
        to_offset: u64,
        length: u64,
    },
    GetXattr {
        name: &'a [u8],
        room: u32,
    },
    ListXattr {
        room: u32,
    },
    /// Nothing to do, for the agent or the host.
    Release,
    Unknown,
}

/// Which entries of a directory the kernel wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Want {
    /// Those after the one with this cookie; 0 for the first.
    pub cookie: u64,
    /// How many bytes it has room for.
    pub size: u32,
    pub attributes: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SetAttr {
    pub valid: u32,
    pub size: u64,
    pub atime_ns: i64,
    pub mtime_ns: i64,
    pub mode: u32,
}

impl SetAttr {
    pub const MODE: u32 = 1 << 0;
    pub const SIZE: u32 = 1 << 3;
    pub const ATIME: u32 = 1 << 4;
    pub const MTIME: u32 = 1 << 5;
    pub const ATIME_NOW: u32 = 1 << 7;
    pub const MTIME_NOW: u32 = 1 << 8;

    pub fn has(&self, bit: u32) -> bool {
        self.valid & bit != 0
    }
}

/// Reads numbers and names off a request.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    fn u32(&mut self) -> Option<u32> {
        let bytes = self.take(4)?;
        Some(u32::from_ne_bytes(bytes.try_into().ok()?))
    }

    fn u64(&mut self) -> Option<u64> {
        let bytes = self.take(8)?;
        Some(u64::from_ne_bytes(bytes.try_into().ok()?))
    }

    fn skip(&mut self, count: usize) -> Option<()> {
        self.take(count).map(drop)
    }

    /// A name, which a zero byte ends.
    fn name(&mut self) -> Option<&'a [u8]> {
        let end = self.0.iter().position(|byte| *byte == 0)?;
        let name = self.take(end)?;
        self.skip(1)?;
        Some(name)
    }
}

impl<'a> Request<'a> {
    /// Parses what one read of `/dev/fuse` returned. Without the number of the request there is
    /// no request to answer.
    pub fn parse(bytes: &'a [u8]) -> Option<(u64, Result<Self, Errno>)> {
        let mut header = Fields(bytes.get(..HEADER)?);
        let _length = header.u32()?;
        let opcode = header.u32()?;
        let unique = header.u64()?;
        let node = header.u64()?;
        let operation = operation(opcode, Fields(&bytes[HEADER..])).ok_or(Errno::INVAL);
        let request = operation.map(|operation| Self {
            unique,
            node,
            operation,
        });
        Some((unique, request))
    }
}

fn operation<'a>(opcode: u32, mut fields: Fields<'a>) -> Option<Operation<'a>> {
    Some(match opcode {
        1 => Operation::Lookup {
            name: fields.name()?,
        },
        2 => Operation::Forget {
            lookups: fields.u64()?,
        },
        3 => Operation::GetAttr,
        4 => set_attr(&mut fields)?,
        5 => Operation::ReadLink,
        6 => Operation::Symlink {
            name: fields.name()?,
            target: fields.name()?,
        },
        8 => {
            let mode = fields.u32()?;
            // Device number, umask, padding.
            fields.skip(12)?;
            Operation::MakeNode {
                name: fields.name()?,
                mode,
            }
        }
        9 => {
            let mode = fields.u32()?;
            fields.skip(4)?;
            Operation::MakeDir {
                name: fields.name()?,
                mode,
            }
        }
        10 => Operation::Unlink {
            name: fields.name()?,
        },
        11 => Operation::RemoveDir {
            name: fields.name()?,
        },
        12 | 45 => rename(opcode, &mut fields)?,
        13 => Operation::Link {
            node: fields.u64()?,
            name: fields.name()?,
        },
        15 | 16 | 28 | 44 => data(opcode, &mut fields)?,
        17 => Operation::Space,
        18 | 29 => Operation::Release,
        20 | 30 => Operation::Sync,
        22 | 23 => xattr(opcode, &mut fields)?,
        26 => init(&mut fields)?,
        35 => create(&mut fields)?,
        38 => Operation::Destroy,
        42 => forget_many(&mut fields)?,
        51 => make_unnamed(&mut fields)?,
        43 | 46 | 47 => ranges(opcode, &mut fields)?,
        _ => Operation::Unknown,
    })
}

fn init<'a>(fields: &mut Fields<'a>) -> Option<Operation<'a>> {
    let _major = fields.u32()?;
    let minor = fields.u32()?;
    let max_readahead = fields.u32()?;
    let low = u64::from(fields.u32()?);
    // Kernels before 7.36 have no second word.
    let high = fields.u32().map_or(0, u64::from);
    Some(Operation::Init {
        minor,
        flags: low | high << 32,
        max_readahead,
    })
}

fn set_attr<'a>(fields: &mut Fields<'a>) -> Option<Operation<'a>> {
    let valid = fields.u32()?;
    // Padding, file handle.
    fields.skip(12)?;
    let size = fields.u64()?;
    // Lock owner.
    fields.skip(8)?;
    let atime = fields.u64()?;
    let mtime = fields.u64()?;
    let _ctime = fields.u64()?;
    let atime_ns = fields.u32()?;
    let mtime_ns = fields.u32()?;
    let _ctime_ns = fields.u32()?;
    let mode = fields.u32()?;
    Some(Operation::SetAttr(SetAttr {
        valid,
        size,
        atime_ns: nanoseconds(atime, atime_ns),
        mtime_ns: nanoseconds(mtime, mtime_ns),
        mode,
    }))
}

fn nanoseconds(seconds: u64, nanoseconds: u32) -> i64 {
    (seconds as i64)
        .saturating_mul(1_000_000_000)
        .saturating_add(nanoseconds.into())
}

fn rename<'a>(opcode: u32, fields: &mut Fields<'a>) -> Option<Operation<'a>> {
    let new_parent = fields.u64()?;
    let mut flags = 0;
    if opcode == 45 {
        flags = fields.u32()?;
        fields.skip(4)?;
    }
    Some(Operation::Rename {
        name: fields.name()?,
        new_parent,
        new_name: fields.name()?,
        flags,
    })
}

fn create<'a>(fields: &mut Fields<'a>) -> Option<Operation<'a>> {
    let flags = fields.u32()?;
    let mode = fields.u32()?;
    // Umask, flags for the open.
    fields.skip(8)?;
    Some(Operation::Create {
        name: fields.name()?,
        flags,
        mode,
    })
}

/// As for a create; the kernel's name of it means nothing.
fn make_unnamed<'a>(fields: &mut Fields<'a>) -> Option<Operation<'a>> {
    let _flags = fields.u32()?;
    let mode = fields.u32()?;
    Some(Operation::MakeUnnamed { mode })
}

fn xattr<'a>(opcode: u32, fields: &mut Fields<'a>) -> Option<Operation<'a>> {
    let room = fields.u32()?;
    fields.skip(4)?;
    Some(match opcode {
        22 => Operation::GetXattr {
            name: fields.name()?,
            room,
        },
        _ => Operation::ListXattr { room },
    })
}

fn data<'a>(opcode: u32, fields: &mut Fields<'a>) -> Option<Operation<'a>> {
    /// The kernel writes back pages of a mapping, at their own place.
    const WRITE_CACHE: u32 = 1;
    // File handle.
    fields.skip(8)?;
    let offset = fields.u64()?;
    let size = fields.u32()?;
    let how = fields.u32()?;
    // Lock owner.
    fields.skip(8)?;
    let open_flags = fields.u32()?;
    fields.skip(4)?;
    Some(match opcode {
        15 => Operation::Read { offset, size },
        16 => Operation::Write {
            offset,
            append: open_flags & libc::O_APPEND as u32 != 0 && how & WRITE_CACHE == 0,
            // The kernel's data ends the request: a large write takes it from there.
            data: fields.take(size as usize).filter(|_| fields.0.is_empty())?,
        },
        _ => Operation::List(Want {
            cookie: offset,
            size,
            attributes: opcode == 44,
        }),
    })
}

fn forget_many<'a>(fields: &mut Fields<'a>) -> Option<Operation<'a>> {
    let count = fields.u32()?;
    fields.skip(4)?;
    let nodes = (0..count).map(|_| Some((fields.u64()?, fields.u64()?)));
    Some(Operation::ForgetMany {
        nodes: nodes.collect::<Option<_>>()?,
    })
}

fn ranges<'a>(opcode: u32, fields: &mut Fields<'a>) -> Option<Operation<'a>> {
    // File handle.
    fields.skip(8)?;
    let offset = fields.u64()?;
    Some(match opcode {
        43 => Operation::Allocate {
            offset,
            length: fields.u64()?,
            mode: fields.u32()?,
        },
        46 => Operation::Seek {
            offset,
            whence: fields.u32()?,
        },
        _ => {
            let to = fields.u64()?;
            fields.skip(8)?;
            Operation::Copy {
                offset,
                to,
                to_offset: fields.u64()?,
                length: fields.u64()?,
            }
        }
    })
}

/// The bytes of an answer.
#[derive(Debug, Default)]
pub struct Out(Vec<u8>);

impl Out {
    pub fn into_bytes(self) -> Vec<u8> {
        self.0
    }

    pub fn u32(&mut self, value: u32) -> &mut Self {
        self.0.extend_from_slice(&value.to_ne_bytes());
        self
    }

    pub fn u64(&mut self, value: u64) -> &mut Self {
        self.0.extend_from_slice(&value.to_ne_bytes());
        self
    }

    fn u16(&mut self, value: u16) -> &mut Self {
        self.0.extend_from_slice(&value.to_ne_bytes());
        self
    }

    fn attr(&mut self, attr: &Attr) -> &mut Self {
        let version = attr.version;
        let times = [attr.atime_ns, version.mtime_ns, version.ctime_ns];
        self.u64(attr.id.ino).u64(version.size).u64(attr.blocks);
        for time in times {
            self.u64(time.div_euclid(1_000_000_000) as u64);
        }
        for time in times {
            self.u32(time.rem_euclid(1_000_000_000) as u32);
        }
        self.u32(attr.mode)
            .u32(attr.links)
            .u32(attr.uid)
            .u32(attr.gid)
            .u32(attr.device)
            .u32(attr.block_size)
            // Flags.
            .u32(0)
    }

    /// A name and what it stands for.
    pub fn entry(&mut self, node: u64, attr: &Attr) -> &mut Self {
        let seconds = validity(attr);
        self.u64(node).u64(0).u64(seconds).u64(seconds).u64(0);
        self.attr(attr)
    }

    /// A name that no file has, as the host would report.
    pub fn absent(&mut self) -> &mut Self {
        self.u64(0).u64(0).u64(WATCHED_SECONDS).u64(0).u64(0);
        self.attr(&Attr::default())
    }

    /// A name without a word about its file.
    fn unknown(&mut self) -> &mut Self {
        self.u64(0).u64(0).u64(0).u64(0).u64(0);
        self.attr(&Attr::default())
    }

    pub fn attributes(&mut self, attr: &Attr) -> &mut Self {
        self.u64(validity(attr)).u64(0);
        self.attr(attr)
    }

    /// What follows the entry in the answer to a Create. Handles are not used.
    pub fn opened(&mut self) -> &mut Self {
        const KEEP_CACHE: u32 = 1 << 1;
        self.u64(0).u32(KEEP_CACHE).u32(0)
    }

    pub fn space(&mut self, space: &Space) -> &mut Self {
        self.u64(space.blocks)
            .u64(space.free)
            .u64(space.available)
            .u64(space.files)
            .u64(space.files_free)
            .u32(space.block_size)
            .u32(space.name_max)
            .u32(space.block_size)
            // Padding, spare.
            .u32(0)
            .u64(0)
            .u64(0)
            .u64(0)
    }

    /// The answer to Init, or EPROTO for a kernel that lacks something.
    pub fn init(minor: u32, offered: u64, max_readahead: u32) -> Result<Self, Errno> {
        if minor < MINOR || offered & WANTED != WANTED {
            return Err(Errno::PROTO);
        }
        let mut out = Self::default();
        out.u32(MAJOR)
            .u32(MINOR)
            .u32(max_readahead.max(DATA_MAX as u32))
            .u32(WANTED as u32)
            .u16(BACKGROUND)
            .u16(BACKGROUND * 3 / 4)
            .u32(DATA_MAX as u32)
            // The granularity of times, in nanoseconds.
            .u32(1)
            .u16((DATA_MAX / PAGE) as u16)
            .u16(0)
            .u32((WANTED >> 32) as u32);
        out.0.resize(64, 0);
        Ok(out)
    }
}

/// The answer about an extended attribute: its bytes, or without room for them their number.
pub fn xattr_answer(value: &[u8], room: u32) -> Result<Vec<u8>, Errno> {
    match room as usize {
        0 => {
            let mut out = Out::default();
            out.u32(value.len() as u32).u32(0);
            Ok(out.into_bytes())
        }
        room if room < value.len() => Err(Errno::RANGE),
        _ => Ok(value.to_vec()),
    }
}

fn validity(attr: &Attr) -> u64 {
    if attr.watched { WATCHED_SECONDS } else { 0 }
}

/// The entries of a directory, as many as fit.
#[derive(Debug)]
pub struct Listing {
    out: Out,
    room: usize,
    attributes: bool,
}

/// One entry to list.
#[derive(Debug)]
pub struct Listed<'a> {
    pub ino: u64,
    pub cookie: u64,
    pub kind: u8,
    pub name: &'a [u8],
}

impl Listing {
    pub fn new(want: Want) -> Self {
        Self {
            out: Out::default(),
            room: (want.size as usize).min(DATA_MAX),
            attributes: want.attributes,
        }
    }

    pub fn has_room(&self, name: &[u8]) -> bool {
        let entry = if self.attributes { 128 } else { 0 };
        self.out.0.len() + entry + Self::padded(name) <= self.room
    }

    /// Adds an entry; `known` is its node and attributes, where the kernel gets them with it.
    pub fn push(&mut self, entry: &Listed<'_>, known: Option<(u64, &Attr)>) {
        if self.attributes {
            match known {
                Some((node, attr)) => self.out.entry(node, attr),
                None => self.out.unknown(),
            };
        }
        let end = self.out.0.len() + Self::padded(entry.name);
        self.out
            .u64(entry.ino)
            .u64(entry.cookie)
            .u32(entry.name.len() as u32)
            .u32(entry.kind.into());
        self.out.0.extend_from_slice(entry.name);
        self.out.0.resize(end, 0);
    }

    pub fn into_bytes(self) -> Vec<u8> {
        self.out.0
    }

    fn padded(name: &[u8]) -> usize {
        (24 + name.len()).next_multiple_of(8)
    }
}

/// A whole answer: its header and its bytes are written together.
pub fn answer_header(unique: u64, result: Result<usize, Errno>) -> [u8; 16] {
    let (length, error) = match result {
        Ok(length) => (length, 0),
        Err(error) => (0, -error.raw_os_error()),
    };
    header(16 + length, error, unique)
}

fn header(length: usize, error: i32, unique: u64) -> [u8; 16] {
    let mut header = [0; 16];
    header[..4].copy_from_slice(&(length as u32).to_ne_bytes());
    header[4..8].copy_from_slice(&error.to_ne_bytes());
    header[8..].copy_from_slice(&unique.to_ne_bytes());
    header
}

/// What the kernel must drop of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Doubt {
    /// Attributes are asked again.
    Attributes,
    /// Attributes and cached data.
    Data,
}

/// Makes the kernel drop what it has of a file.
pub fn invalidate_node(node: u64, doubt: Doubt) -> Vec<u8> {
    const INVAL_INODE: i32 = 2;
    let offset: i64 = match doubt {
        Doubt::Attributes => -1,
        Doubt::Data => 0,
    };
    let mut out = Out(header(16 + 24, INVAL_INODE, 0).to_vec());
    // Length 0: to the end.
    out.u64(node).u64(offset as u64).u64(0);
    out.0
}

/// Makes the kernel look a name up again before it uses it.
pub fn expire_name(directory: u64, name: &[u8]) -> Vec<u8> {
    const INVAL_ENTRY: i32 = 3;
    const EXPIRE_ONLY: u32 = 1;
    let mut out = Out(header(16 + 16 + name.len() + 1, INVAL_ENTRY, 0).to_vec());
    out.u64(directory).u32(name.len() as u32).u32(EXPIRE_ONLY);
    out.0.extend_from_slice(name);
    out.0.push(0);
    out.0
}
