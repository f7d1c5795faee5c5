//! Reading an archive that may be hostile.
//!
//! Always: only what the writer writes is accepted, and a refusal names the rule. Memory is a few
//! sectors and the map of one member, whatever the input claims. Which members may come in which
//! order is for the caller to say.

use std::io::Read;

use super::frame::read_some;
use super::header::{Block, Header, Kind, MAX_PAX_BYTES, MemberHeader, SECTOR};
use super::sparse::MapParser;
use super::{Damage, Member, SparseMap};
use crate::Error;
use crate::damage::artifact::MAX_MEMBER_BYTES;

/// Reads the members of an archive, one after the other.
#[derive(Debug)]
pub struct Reader<R> {
    input: R,
    current: Option<Current>,
}

/// A member whose headers were read. The bytes of its pieces follow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    pub member: Member,
    pub map: SparseMap,
}

#[derive(Debug)]
struct Current {
    member: Member,
    left: u64,
    padding: usize,
}

impl<R: Read> Reader<R> {
    pub fn new(input: R) -> Self {
        Self {
            input,
            current: None,
        }
    }

    /// The next member; what was not read of the one before it is passed over. After the last one,
    /// the input is at its end.
    pub fn next_member(&mut self) -> Result<Option<Found>, Error> {
        self.end_current()?;
        let Some(header) = self.headers()? else {
            return self.end().map(|()| None);
        };
        check_size(&header)?;
        let map = match header.sparse_bytes {
            None => SparseMap::dense(header.stored_bytes),
            Some(bytes) => self.map(&header, bytes)?,
        };
        let left = map.data_bytes();
        let padding = (left.next_multiple_of(SECTOR as u64) - left) as usize;
        self.current = Some(Current {
            member: header.member.clone(),
            left,
            padding,
        });
        Ok(Some(Found {
            member: header.member,
            map,
        }))
    }

    /// The next bytes of the pieces of the current member: as many as fit, until there are none
    /// left.
    pub fn read(&mut self, buffer: &mut [u8]) -> Result<usize, Error> {
        let left = self.current.as_ref().map_or(0, |current| current.left);
        let bytes = left.min(buffer.len() as u64) as usize;
        self.fill(&mut buffer[..bytes], "a member")?;
        if let Some(current) = &mut self.current {
            current.left -= bytes as u64;
        }
        Ok(bytes)
    }

    fn end_current(&mut self) -> Result<(), Error> {
        let mut rest = [0; 8 * SECTOR];
        while self.read(&mut rest)? > 0 {}
        let Some(Current {
            member, padding, ..
        }) = self.current.take()
        else {
            return Ok(());
        };
        let padding = &mut rest[..padding];
        self.fill(padding, "the padding of a member")?;
        if padding.iter().any(|byte| *byte != 0) {
            return Err(Damage::Padding { member }.into());
        }
        Ok(())
    }

    /// The headers in front of a member; none if the archive ends here.
    fn headers(&mut self) -> Result<Option<MemberHeader>, Error> {
        let block = self.block()?;
        if block == [0; SECTOR] {
            return Ok(None);
        }
        let header = Header::parse(&block)?;
        match header.kind {
            Kind::File => Ok(Some(MemberHeader::plain(header)?)),
            Kind::Pax => self.extended(header).map(Some),
        }
    }

    fn extended(&mut self, pax: Header) -> Result<MemberHeader, Error> {
        let refused = |rule| {
            Error::from(Damage::Pax {
                name: pax.name.clone(),
                rule,
            })
        };
        if pax.bytes > MAX_PAX_BYTES {
            return Err(refused("it is too long"));
        }
        let mut records = vec![0; (pax.bytes as usize).next_multiple_of(SECTOR)];
        self.fill(&mut records, "an extended header")?;
        let padding = records.split_off(pax.bytes as usize);
        if padding.iter().any(|byte| *byte != 0) {
            return Err(refused("the bytes behind it are not zero"));
        }
        let header = Header::parse(&self.block()?)?;
        if header.kind != Kind::File {
            return Err(refused("there is another one behind it"));
        }
        Ok(MemberHeader::extended(&pax, &records, header)?)
    }

    fn map(&mut self, header: &MemberHeader, bytes: u64) -> Result<SparseMap, Error> {
        let mut parser = MapParser::new(&header.member, bytes);
        let mut text_bytes = 0;
        loop {
            let block = self.block()?;
            text_bytes += SECTOR as u64;
            if let Some(map) = parse_block(&mut parser, &block, &header.member)? {
                let member = header.member.clone();
                let found = header.stored_bytes;
                let expected = text_bytes + map.data_bytes();
                return if expected == found {
                    Ok(map)
                } else {
                    Err(Damage::StoredBytes {
                        member,
                        expected,
                        found,
                    }
                    .into())
                };
            }
        }
    }

    fn end(&mut self) -> Result<(), Error> {
        if self.block()? != [0; SECTOR] {
            return Err(Damage::End.into());
        }
        match read_some(&mut self.input, &mut [0]).map_err(read_error)? {
            0 => Ok(()),
            _ => Err(Damage::Trailing.into()),
        }
    }

    fn block(&mut self) -> Result<Block, Error> {
        let mut block = [0; SECTOR];
        self.fill(&mut block, "a header")?;
        Ok(block)
    }

    fn fill(&mut self, buffer: &mut [u8], what: &'static str) -> Result<(), Error> {
        let mut filled = 0;
        while filled < buffer.len() {
            match read_some(&mut self.input, &mut buffer[filled..]).map_err(read_error)? {
                0 => return Err(Damage::Truncated(what).into()),
                read => filled += read,
            }
        }
        Ok(())
    }
}

fn check_size(header: &MemberHeader) -> Result<(), Damage> {
    let bytes = header.sparse_bytes.unwrap_or(0).max(header.stored_bytes);
    if bytes > MAX_MEMBER_BYTES {
        return Err(Damage::TooLarge {
            member: header.member.clone(),
            bytes,
        });
    }
    Ok(())
}

/// Feeds a sector to the map. Behind its last number, only zeros may stand.
fn parse_block(
    parser: &mut MapParser<'_>,
    block: &Block,
    member: &Member,
) -> Result<Option<SparseMap>, Damage> {
    for (at, byte) in block.iter().enumerate() {
        if let Some(map) = parser.take(*byte)? {
            let rule = "there is something behind it";
            let is_end = block[at + 1..].iter().all(|byte| *byte == 0);
            return if is_end {
                Ok(Some(map))
            } else {
                Err(Damage::Map {
                    member: member.clone(),
                    rule,
                })
            };
        }
    }
    Ok(None)
}

/// The frame below speaks of its own damage through `io::Error`.
fn read_error(error: std::io::Error) -> Error {
    match error.downcast::<Damage>() {
        Ok(damage) => damage.into(),
        Err(source) => Error::ArtifactIo {
            operation: "read",
            source,
        },
    }
}
