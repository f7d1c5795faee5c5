//! Reads tar archives (ustar, GNU and PAX) in one pass and with bounded memory.
//!
//! Always: nothing is guessed. A header with a wrong checksum, an invalid number, or a sparse map
//! that does not fit its file is an error. The archive ends with two blocks of zeros, followed by
//! nothing but zeros, or with its last member, as GNU tar accepts it. Anything may follow the end
//! of a layer, because other tools accept that.

mod header;
mod number;
mod pax;
mod sparse;

use std::rc::Rc;

use sandtree_disk::ext4::write::{Attributes, Device, FileWriter, Kind, Time};

use crate::error::Error;
use crate::fault::{Fault, require, shown};
use crate::unpack::Unpacked;
use header::{BLOCK, Bad, Header, text};
use pax::Records;
use sparse::{MAX_PIECES, Piece};

/// The limit for a long name or an extended header.
const MAX_EXTENSION_BYTES: u64 = 1 << 20;
/// The limit for global extended headers, which may be copied for each member.
const MAX_GLOBAL_BYTES: usize = 64 << 10;

/// How the members of an archive are interpreted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TarRules {
    /// As files.
    Plain,
    /// As a layer of an OCI image, in which some names hide files of lower layers.
    Layer,
}

/// A member of an archive, from its header and the extended headers before it.
#[derive(Debug)]
pub(crate) struct Member {
    pub name: Vec<u8>,
    pub what: What,
    pub attributes: Attributes,
}

#[derive(Debug)]
pub(crate) enum What {
    File(Body),
    /// One more name of an existing node.
    HardLink(Vec<u8>),
    Node(Kind),
}

/// The content of a file. [`Archive::pour`] writes its bytes; otherwise they are skipped.
#[derive(Debug)]
pub(crate) struct Body {
    pub bytes: u64,
    pieces: Vec<Piece>,
}

pub(crate) struct Archive<'i, 'a> {
    input: &'i mut Unpacked<'a>,
    /// The bytes of the current member that were not read.
    left: u64,
    /// The padding after the current member.
    padding: u64,
    /// Records for all members.
    globals: Rc<Records>,
    rules: TarRules,
    /// How many headers there may be, and how many were read.
    max_headers: u64,
    headers: u64,
}

/// The extended headers before a member.
#[derive(Default)]
struct Extensions {
    /// There was a header that a member must follow.
    anything: bool,
    name: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    pax: Rc<Records>,
}

impl<'i, 'a> Archive<'i, 'a> {
    pub fn new(input: &'i mut Unpacked<'a>, rules: TarRules, max_headers: u64) -> Self {
        Self {
            input,
            left: 0,
            padding: 0,
            globals: Rc::default(),
            rules,
            max_headers,
            headers: 0,
        }
    }

    pub fn position(&self) -> u64 {
        self.input.position()
    }

    /// The next member. After the last one, the input was read completely.
    pub fn next(&mut self) -> Result<Option<Member>, Error> {
        self.skip()?;
        let mut extensions = Extensions {
            pax: Rc::clone(&self.globals),
            ..Extensions::default()
        };
        loop {
            let Some(header) = self.header()? else {
                return if extensions.anything {
                    Err(self.truncated())
                } else {
                    self.end().map(|()| None)
                };
            };
            match header.kind() {
                b'L' => extensions.name = Some(text(&self.extension(&header)?).to_vec()),
                b'K' => extensions.link = Some(text(&self.extension(&header)?).to_vec()),
                b'x' => extensions.pax = self.records(&header)?,
                b'g' => {
                    self.globals = self.records(&header)?;
                    if self.globals.weight() > MAX_GLOBAL_BYTES {
                        return Err(self.damaged("a global extended header has more than 64 KiB"));
                    }
                    extensions.pax = Rc::clone(&self.globals);
                    continue;
                }
                // The volume label.
                b'V' => {
                    self.begin(header.bytes().map_err(|bad| self.damaged(bad))?);
                    self.skip()?;
                }
                _ => return self.member(&header, extensions).map(Some),
            }
            extensions.anything = true;
        }
    }

    /// Writes the bytes of the current member.
    pub fn pour(&mut self, body: &Body, into: &mut FileWriter<'_>) -> Result<(), Error> {
        let mut at = 0;
        for piece in &body.pieces {
            into.skip(piece.offset - at)?;
            self.pour_piece(piece.bytes, into)?;
            at = piece.offset + piece.bytes;
        }
        into.skip(body.bytes - at)?;
        Ok(())
    }

    fn pour_piece(&mut self, mut bytes: u64, into: &mut FileWriter<'_>) -> Result<(), Error> {
        while bytes > 0 {
            let chunk = self.some(bytes)?;
            into.write(chunk)?;
            let taken = chunk.len();
            self.input.consume(taken);
            bytes -= taken as u64;
            self.left -= taken as u64;
        }
        Ok(())
    }

    fn member(&mut self, header: &Header, extensions: Extensions) -> Result<Member, Error> {
        let sparse_name = extensions
            .pax
            .sparse
            .name
            .clone()
            .filter(|_| extensions.pax.sparse.is_sparse());
        let name = sparse_name
            .or_else(|| extensions.pax.path.clone())
            .or_else(|| extensions.name.clone());
        let name = name.unwrap_or_else(|| header.name());
        self.input.member.clone_from(&name);
        let what = self
            .what(header, &extensions, &name)
            .map_err(|fault| fault.of(&name))?;
        let attributes = attributes(header, Rc::unwrap_or_clone(extensions.pax))
            .map_err(|bad| Fault::Refused(bad).of(&name))?;
        Ok(Member {
            name,
            what,
            attributes,
        })
    }

    fn what(
        &mut self,
        header: &Header,
        extensions: &Extensions,
        name: &[u8],
    ) -> Result<What, Fault> {
        let link = || {
            extensions
                .pax
                .link
                .clone()
                .or_else(|| extensions.link.clone())
                .unwrap_or_else(|| header.link())
        };
        // Only files have content, whatever size another member claims; but the list of names of a
        // dumped directory follows its header.
        match header.kind() {
            b'0' | b'7' | 0 => return self.file(header, extensions, name),
            b'S' => return self.old_sparse(header, extensions).map(What::File),
            b'1' => return Ok(What::HardLink(link())),
            b'D' => self.begin(header.bytes()?),
            _ => {}
        }
        Ok(What::Node(match header.kind() {
            b'2' => Kind::Symlink(link()),
            b'3' => Kind::CharDevice(device(header, &extensions.pax)?),
            b'4' => Kind::BlockDevice(device(header, &extensions.pax)?),
            b'5' | b'D' => Kind::Dir(Default::default()),
            b'6' => Kind::Fifo,
            _ => return Err(Fault::Refused("its file type is not supported")),
        }))
    }

    fn file(
        &mut self,
        header: &Header,
        extensions: &Extensions,
        name: &[u8],
    ) -> Result<What, Fault> {
        let bytes = extensions.pax.bytes.map_or_else(|| header.bytes(), Ok)?;
        if name.ends_with(b"/") {
            // Old archives mark directories by a slash, not by a type.
            require(bytes == 0, "it is a directory with content")?;
            return Ok(What::Node(Kind::Dir(Default::default())));
        }
        self.begin(bytes);
        let sparse = &extensions.pax.sparse;
        if !sparse.is_sparse() {
            let pieces = vec![Piece { offset: 0, bytes }];
            return self.checked(Body { bytes, pieces }).map(What::File);
        }
        let pieces = if sparse.major == Some(1) {
            self.inner_map()?
        } else {
            sparse.map.clone()
        };
        let bytes = sparse.bytes.ok_or("it is a sparse file without a size")?;
        self.checked(Body { bytes, pieces }).map(What::File)
    }

    /// Reads the old form of a sparse file. More of its map follows the header, in blocks of 21
    /// pieces.
    fn old_sparse(&mut self, header: &Header, extensions: &Extensions) -> Result<Body, Fault> {
        let mut pieces = Vec::new();
        let (fields, mut more) = header.old_sparse();
        sparse::old_pieces(fields, &mut pieces)?;
        while more {
            let block = self.block()?.ok_or_else(|| self.truncated())?;
            sparse::old_pieces(&block[..504], &mut pieces)?;
            more = block[504] != 0;
        }
        self.begin(extensions.pax.bytes.map_or_else(|| header.bytes(), Ok)?);
        self.checked(Body {
            bytes: header.old_sparse_bytes()?,
            pieces,
        })
    }

    fn checked(&self, body: Body) -> Result<Body, Fault> {
        sparse::check_file_bytes(body.bytes)?;
        sparse::check(&body.pieces, body.bytes, self.left)?;
        Ok(body)
    }

    /// Reads a sparse map before the bytes: lines with one number each, first the number of pieces.
    fn inner_map(&mut self) -> Result<Vec<Piece>, Fault> {
        let mut lines = Lines {
            block: [0; BLOCK],
            at: BLOCK,
        };
        let count = lines.number(self)?;
        require(
            count <= MAX_PIECES as u64,
            "its sparse map has more than 1048576 parts",
        )?;
        (0..count)
            .map(|_| {
                Ok(Piece {
                    offset: lines.number(self)?,
                    bytes: lines.number(self)?,
                })
            })
            .collect()
    }

    /// The next header; `None` at the end.
    fn header(&mut self) -> Result<Option<Header>, Error> {
        let Some(block) = self.block()? else {
            return Ok(None);
        };
        if block != [0; BLOCK] {
            self.count()?;
            return Header::new(block)
                .map(Some)
                .map_err(|bad| self.damaged(bad));
        }
        match self.block()? {
            Some(block) if block != [0; BLOCK] => {
                Err(self.damaged("a lone block of zeros is between two members"))
            }
            _ => Ok(None),
        }
    }

    fn count(&mut self) -> Result<(), Error> {
        self.headers += 1;
        if self.headers <= self.max_headers {
            return Ok(());
        }
        let name = if self.input.member.is_empty() {
            "the archive".into()
        } else {
            shown(&self.input.member)
        };
        Err(Error::Limit {
            name,
            limit: "headers in one archive",
            allowed: self.max_headers,
        })
    }

    /// The content of a long name or an extended header.
    fn extension(&mut self, header: &Header) -> Result<Vec<u8>, Error> {
        let bytes = header.bytes().map_err(|bad| self.damaged(bad))?;
        if bytes > MAX_EXTENSION_BYTES {
            return Err(self.damaged("a long name or an extended header has more than 1 MiB"));
        }
        self.begin(bytes);
        let mut all = Vec::new();
        while self.left > 0 {
            let chunk = self.some(self.left)?;
            all.extend_from_slice(chunk);
            let taken = chunk.len();
            self.input.consume(taken);
            self.left -= taken as u64;
        }
        self.skip()?;
        Ok(all)
    }

    /// The records of this extended header, on top of those for all members.
    fn records(&mut self, header: &Header) -> Result<Rc<Records>, Error> {
        let bytes = self.extension(header)?;
        let mut onto = Records::clone(&self.globals);
        onto.read(&bytes).map_err(|bad| self.damaged(bad))?;
        if onto.weight() as u64 > 2 * MAX_EXTENSION_BYTES {
            return Err(self.damaged("extended headers need more than 2 MiB of memory"));
        }
        Ok(Rc::new(onto))
    }

    fn begin(&mut self, bytes: u64) {
        self.left = bytes;
        self.padding = bytes.wrapping_neg() % BLOCK as u64;
    }

    /// Skips the rest of the member. Some programs write neither an end mark nor the padding of the
    /// last member; that is accepted.
    fn skip(&mut self) -> Result<(), Error> {
        let mut left = std::mem::take(&mut self.left);
        let mut padding = std::mem::take(&mut self.padding);
        while left > 0 {
            let taken = self.some(left)?.len();
            self.input.consume(taken);
            left -= taken as u64;
        }
        while padding > 0 && !self.input.chunk()?.is_empty() {
            let taken = self.some(padding)?.len();
            self.input.consume(taken);
            padding -= taken as u64;
        }
        Ok(())
    }

    /// One block; `None` at the end of the input.
    fn block(&mut self) -> Result<Option<[u8; BLOCK]>, Error> {
        let mut block = [0; BLOCK];
        let mut filled = 0;
        while filled < BLOCK {
            let chunk = self.input.chunk()?;
            if chunk.is_empty() {
                return if filled == 0 {
                    Ok(None)
                } else {
                    Err(self.truncated())
                };
            }
            let taken = chunk.len().min(BLOCK - filled);
            block[filled..filled + taken].copy_from_slice(&chunk[..taken]);
            self.input.consume(taken);
            filled += taken;
        }
        Ok(Some(block))
    }

    /// The available part of the next `bytes`, at least one byte.
    fn some(&mut self, bytes: u64) -> Result<&[u8], Error> {
        let at = self.input.position();
        let chunk = self.input.chunk()?;
        if chunk.is_empty() {
            return Err(Error::Archive {
                offset: at,
                problem: TRUNCATED,
            });
        }
        Ok(&chunk[..usize::try_from(bytes)
            .unwrap_or(usize::MAX)
            .min(chunk.len())])
    }

    fn end(&mut self) -> Result<(), Error> {
        let may_follow = self.rules == TarRules::Layer;
        loop {
            let chunk = self.input.chunk()?;
            if chunk.is_empty() {
                return Ok(());
            }
            if !may_follow && chunk.iter().any(|byte| *byte != 0) {
                return Err(self.damaged("data follows its end"));
            }
            let taken = chunk.len();
            self.input.consume(taken);
        }
    }

    fn truncated(&self) -> Error {
        self.damaged(TRUNCATED)
    }

    fn damaged(&self, problem: Bad) -> Error {
        Error::Archive {
            offset: self.input.position(),
            problem,
        }
    }
}

/// Whether a file starts like an uncompressed archive.
pub(crate) fn has_magic(start: &[u8]) -> bool {
    start.get(257..262) == Some(b"ustar")
}

const TRUNCATED: Bad = "it ends inside a member";

fn attributes(header: &Header, pax: Records) -> Result<Attributes, Bad> {
    let seconds = || {
        header.modified_s().map(|seconds| Time {
            seconds,
            nanoseconds: 0,
        })
    };
    Ok(Attributes {
        mode: header.mode()?,
        uid: pax.uid.map_or_else(|| header.uid(), Ok)?,
        gid: pax.gid.map_or_else(|| header.gid(), Ok)?,
        modified: pax.modified.map_or_else(seconds, Ok)?,
        xattrs: pax.into_xattrs(),
    })
}

fn device(header: &Header, pax: &Records) -> Result<Device, Bad> {
    let major = pax.major.map_or_else(|| header.major(), Ok)?;
    Ok(Device {
        major,
        minor: pax.minor.map_or_else(|| header.minor(), Ok)?,
    })
}

/// Reads numbers from the blocks of a member, each on its own line.
struct Lines {
    block: [u8; BLOCK],
    at: usize,
}

impl Lines {
    fn number(&mut self, archive: &mut Archive<'_, '_>) -> Result<u64, Fault> {
        let mut number = 0u64;
        for digits in 0.. {
            match self.byte(archive)? {
                b'\n' if digits > 0 => break,
                digit @ b'0'..=b'9' => {
                    let longer = number
                        .checked_mul(10)
                        .and_then(|number| number.checked_add(u64::from(digit - b'0')));
                    number = longer.ok_or("its sparse map has a number that is too large")?;
                    require(digits < 32, "its sparse map has a number that is too long")?;
                }
                _ => return Err(Fault::Refused("its sparse map is damaged")),
            }
        }
        Ok(number)
    }

    fn byte(&mut self, archive: &mut Archive<'_, '_>) -> Result<u8, Fault> {
        if self.at == BLOCK {
            archive.left = archive
                .left
                .checked_sub(BLOCK as u64)
                .ok_or("its sparse map is longer than its content")?;
            self.block = archive.block()?.ok_or_else(|| archive.truncated())?;
            self.at = 0;
        }
        self.at += 1;
        Ok(self.block[self.at - 1])
    }
}
