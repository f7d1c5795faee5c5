//! The blocks of an archive: ustar headers, and the extended headers in front of them.
//!
//! A member is one plain ustar header, unless it is sparse or has 8 GiB and more. Then an extended
//! header (`x`) comes before it, with the keys of GNU's sparse format 1.0, `size`, or both.
//!
//! Always: a header that is read is taken apart, written anew and compared, so no field can say
//! what the writer would not have said.

use super::{Damage, Member};

/// Everything in an archive begins at a multiple of this.
pub(super) const SECTOR: usize = 512;
/// The largest size that fits a ustar header: eleven octal digits.
const MAX_USTAR_BYTES: u64 = 0o777_7777_7777;
/// An extended header of ours is far shorter; a longer one is not read.
pub(super) const MAX_PAX_BYTES: u64 = 1024;
/// What a sparse member is called for programs that do not know sparse members.
const SPARSE_DIR: &str = "GNUSparseFile.0/";
const PAX_DIR: &str = "PaxHeaders/";

pub(super) type Block = [u8; SECTOR];

const CHECKSUM: std::ops::Range<usize> = 148..156;
const KIND: usize = 156;
/// Where each field of a ustar header ends, and what it is called.
const FIELDS: [(usize, &str); 16] = [
    (100, "name"),
    (108, "mode"),
    (116, "user"),
    (124, "group"),
    (136, "size"),
    (148, "time"),
    (156, "checksum"),
    (157, "kind"),
    (257, "link target"),
    (263, "magic"),
    (265, "version"),
    (297, "user name"),
    (329, "group name"),
    (337, "device"),
    (345, "device"),
    (SECTOR, "name prefix"),
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    File,
    Pax,
}

/// One ustar header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Header {
    pub name: String,
    pub kind: Kind,
    /// Of what follows it. Zero where the extended header before it says more.
    pub bytes: u64,
}

impl Header {
    pub(super) fn to_block(&self) -> Block {
        let mut block = [0; SECTOR];
        block[..self.name.len()].copy_from_slice(self.name.as_bytes());
        let mut put =
            |at: usize, text: &str| block[at..at + text.len()].copy_from_slice(text.as_bytes());
        put(100, "0000644");
        put(108, "0000000");
        put(116, "0000000");
        put(124, &format!("{:011o}", self.bytes));
        put(136, "00000000000");
        put(KIND, if self.kind == Kind::File { "0" } else { "x" });
        put(257, "ustar\x0000");
        put(329, "0000000");
        put(337, "0000000");
        let sum = checksum(&block);
        block[CHECKSUM].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        block
    }

    pub(super) fn parse(block: &Block) -> Result<Self, Damage> {
        check_checksum(block)?;
        let name = text(&block[..100]);
        let header = Self {
            kind: parse_kind(&name, block[KIND])?,
            bytes: parse_size(&name, &block[124..136])?,
            name,
        };
        match first_difference(block, &header.to_block()) {
            Some(field) => Err(Damage::Field {
                name: header.name,
                field,
            }),
            None => Ok(header),
        }
    }
}

/// The sum over a header, with blanks where the sum itself stands.
fn checksum(block: &Block) -> u32 {
    let blanks = CHECKSUM.len() as u32 * u32::from(b' ');
    let sum = |bytes: &[u8]| bytes.iter().map(|byte| u32::from(*byte)).sum::<u32>();
    sum(&block[..CHECKSUM.start]) + blanks + sum(&block[CHECKSUM.end..])
}

fn check_checksum(block: &Block) -> Result<(), Damage> {
    let expected = checksum(block);
    let found = text(&block[CHECKSUM]);
    if u32::from_str_radix(found.trim(), 8) == Ok(expected) {
        return Ok(());
    }
    Err(Damage::Checksum { expected, found })
}

fn parse_kind(name: &str, kind: u8) -> Result<Kind, Damage> {
    let refused = match kind {
        b'0' => return Ok(Kind::File),
        b'x' => return Ok(Kind::Pax),
        b'1' => "a hard link",
        b'2' => "a symbolic link",
        b'3' | b'4' => "a device",
        b'5' => "a directory",
        b'6' => "a pipe",
        b'g' => "a global extended header",
        b'L' | b'K' => "a long name of GNU tar",
        b'S' => "a sparse file in the old form of GNU tar",
        _ => "of an unknown kind",
    };
    Err(Damage::Kind {
        name: name.to_owned(),
        kind: refused,
    })
}

fn parse_size(name: &str, field: &[u8]) -> Result<u64, Damage> {
    let digits = field
        .strip_suffix(&[0])
        .and_then(|digits| std::str::from_utf8(digits).ok());
    let size = digits.and_then(|digits| u64::from_str_radix(digits, 8).ok());
    size.ok_or_else(|| Damage::Field {
        name: name.to_owned(),
        field: "size",
    })
}

/// What a field says, for reading it and for showing it.
fn text(field: &[u8]) -> String {
    let end = field
        .iter()
        .position(|byte| *byte == 0)
        .unwrap_or(field.len());
    String::from_utf8_lossy(&field[..end]).into_owned()
}

/// The checksum differs with everything else, so it is looked at last.
fn first_difference(a: &Block, b: &Block) -> Option<&'static str> {
    let mut places = (0..SECTOR)
        .filter(|at| !CHECKSUM.contains(at))
        .chain(CHECKSUM);
    let at = places.find(|at| a[*at] != b[*at])?;
    FIELDS
        .iter()
        .find(|(end, _)| at < *end)
        .map(|(_, field)| *field)
}

/// What the headers in front of a member say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct MemberHeader {
    pub member: Member,
    /// What follows the headers, without the padding: for a sparse member its map and its pieces.
    pub stored_bytes: u64,
    /// How large the member is when it is sparse.
    pub sparse_bytes: Option<u64>,
}

impl MemberHeader {
    pub(super) fn to_blocks(&self) -> Vec<u8> {
        let mut blocks = Vec::with_capacity(3 * SECTOR);
        if let Some(pax) = self.pax() {
            let name = format!("{PAX_DIR}{}", self.member);
            blocks.extend(
                Header {
                    name,
                    kind: Kind::Pax,
                    bytes: pax.len() as u64,
                }
                .to_block(),
            );
            blocks.extend(pax);
            blocks.resize(blocks.len().next_multiple_of(SECTOR), 0);
        }
        blocks.extend(self.ustar().to_block());
        blocks
    }

    fn ustar(&self) -> Header {
        let prefix = if self.sparse_bytes.is_some() {
            SPARSE_DIR
        } else {
            ""
        };
        let bytes = if self.stored_bytes > MAX_USTAR_BYTES {
            0
        } else {
            self.stored_bytes
        };
        Header {
            name: format!("{prefix}{}", self.member),
            kind: Kind::File,
            bytes,
        }
    }

    /// The records of the extended header, in their order.
    fn pax(&self) -> Option<Vec<u8>> {
        let mut records = Vec::new();
        if let Some(bytes) = self.sparse_bytes {
            records.extend(record("GNU.sparse.major", "1"));
            records.extend(record("GNU.sparse.minor", "0"));
            records.extend(record("GNU.sparse.name", &self.member.to_string()));
            records.extend(record("GNU.sparse.realsize", &bytes.to_string()));
        }
        if self.stored_bytes > MAX_USTAR_BYTES {
            records.extend(record("size", &self.stored_bytes.to_string()));
        }
        (!records.is_empty()).then_some(records)
    }

    /// Of a member without an extended header.
    pub(super) fn plain(header: Header) -> Result<Self, Damage> {
        Ok(Self {
            member: Member::parse(&header.name)?,
            stored_bytes: header.bytes,
            sparse_bytes: None,
        })
    }

    /// Of a member whose extended header had these records.
    pub(super) fn extended(pax: &Header, records: &[u8], header: Header) -> Result<Self, Damage> {
        let said = Said::parse(&header.name, records)?;
        let name = said.sparse_name.as_deref().unwrap_or(&header.name);
        let found = Self {
            member: Member::parse(name)?,
            stored_bytes: said.bytes.unwrap_or(header.bytes),
            sparse_bytes: said.sparse_bytes,
        };
        let refused = |rule| {
            Err(Damage::Pax {
                name: header.name.clone(),
                rule,
            })
        };
        if found.pax().as_deref() != Some(records) {
            return refused("it is not written as this format does");
        }
        if found.ustar() != header {
            return refused("it does not fit the header behind it");
        }
        if pax.name != format!("{PAX_DIR}{}", found.member) {
            return refused("it has another name");
        }
        Ok(found)
    }
}

/// `length key=value\n`, where the length counts itself.
fn record(key: &str, value: &str) -> Vec<u8> {
    let rest = key.len() + value.len() + 3;
    let digits = |number: usize| number.to_string().len();
    let mut length = rest + digits(rest);
    length = rest + digits(length);
    format!("{length} {key}={value}\n").into_bytes()
}

/// What the records of an extended header say.
#[derive(Default)]
struct Said {
    sparse_name: Option<String>,
    sparse_bytes: Option<u64>,
    bytes: Option<u64>,
}

impl Said {
    fn parse(name: &str, mut records: &[u8]) -> Result<Self, Damage> {
        let refused = |rule| Damage::Pax {
            name: name.to_owned(),
            rule,
        };
        let mut said = Self::default();
        while !records.is_empty() {
            let (key, value, rest) = split_record(records)
                .ok_or_else(|| refused("a record of it has a wrong length"))?;
            let number = || {
                value
                    .parse()
                    .map_err(|_| refused("a size in it is no number"))
            };
            match key {
                "GNU.sparse.major" | "GNU.sparse.minor" => {}
                "GNU.sparse.name" => said.sparse_name = Some(value.to_owned()),
                "GNU.sparse.realsize" => said.sparse_bytes = Some(number()?),
                "size" => said.bytes = Some(number()?),
                key => {
                    return Err(Damage::PaxKey {
                        name: name.to_owned(),
                        key: key.to_owned(),
                    });
                }
            }
            records = rest;
        }
        Ok(said)
    }
}

/// The first record, and what is behind it.
fn split_record(records: &[u8]) -> Option<(&str, &str, &[u8])> {
    let blank = records.iter().position(|byte| *byte == b' ')?;
    let length: usize = std::str::from_utf8(&records[..blank]).ok()?.parse().ok()?;
    let (record, rest) = records.split_at_checked(length)?;
    let (key, value) = std::str::from_utf8(record.get(blank + 1..)?)
        .ok()?
        .strip_suffix('\n')?
        .split_once('=')?;
    Some((key, value, rest))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Digest;

    fn blob() -> Member {
        Member::Blob(Digest::of(b"a blob"))
    }

    fn block(bytes: &[u8]) -> Block {
        bytes.try_into().unwrap()
    }

    /// Gives a header that was bent the checksum it needs to be looked at.
    fn with_checksum(mut block: Block) -> Block {
        let sum = checksum(&block);
        block[CHECKSUM].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        block
    }

    #[test]
    fn a_plain_header_is_one_block_and_reads_back() {
        let written = MemberHeader {
            member: blob(),
            stored_bytes: MAX_USTAR_BYTES,
            sparse_bytes: None,
        };
        let blocks = written.to_blocks();
        assert_eq!(
            MemberHeader::plain(Header::parse(&block(&blocks)).unwrap()).unwrap(),
            written
        );
    }

    #[test]
    fn what_needs_an_extended_header_has_one_and_reads_back() {
        for (stored_bytes, sparse_bytes) in [
            (1024, Some(1 << 40)),
            (MAX_USTAR_BYTES + 1, None),
            (1 << 40, Some(1 << 41)),
        ] {
            let written = MemberHeader {
                member: blob(),
                stored_bytes,
                sparse_bytes,
            };
            let blocks = written.to_blocks();
            assert_eq!(blocks.len(), 3 * SECTOR);
            let pax = Header::parse(&block(&blocks[..SECTOR])).unwrap();
            let records = &blocks[SECTOR..SECTOR + pax.bytes as usize];
            let header = Header::parse(&block(&blocks[2 * SECTOR..])).unwrap();
            assert_eq!(pax.kind, Kind::Pax);
            assert_eq!(
                MemberHeader::extended(&pax, records, header).unwrap(),
                written
            );
        }
    }

    #[test]
    fn a_record_counts_its_own_length() {
        assert_eq!(record("size", "1"), b"9 size=1\n");
        assert_eq!(record("a", "12345"), b"11 a=12345\n");
        for value in 0..120 {
            let record = record("key", &"v".repeat(value));
            assert!(record.starts_with(format!("{} ", record.len()).as_bytes()));
        }
    }

    #[test]
    fn every_bit_of_a_header_counts() {
        let whole = MemberHeader {
            member: blob(),
            stored_bytes: 5,
            sparse_bytes: None,
        }
        .to_blocks();
        for bit in 0..SECTOR * 8 {
            let mut bent = block(&whole);
            bent[bit / 8] ^= 1 << (bit % 8);
            assert!(Header::parse(&bent).is_err(), "bit {bit}");
            let header = Header::parse(&with_checksum(bent));
            // Name and size say something else now. Nothing but the checksum of a block vouches for
            // them.
            let differs =
                header.is_ok_and(|header| header.name == blob().to_string() && header.bytes == 5);
            assert!(!differs || CHECKSUM.contains(&(bit / 8)), "bit {bit}");
        }
    }

    #[test]
    fn each_kind_of_entry_is_refused_by_its_name() {
        let whole = MemberHeader {
            member: blob(),
            stored_bytes: 0,
            sparse_bytes: None,
        }
        .to_blocks();
        let kinds = [
            (b'1', "hard link"),
            (b'2', "symbolic"),
            (b'3', "device"),
            (b'5', "directory"),
            (b'g', "global"),
        ];
        for (kind, expected) in kinds {
            let mut bent = block(&whole);
            bent[KIND] = kind;
            let refused = Header::parse(&with_checksum(bent)).unwrap_err().to_string();
            assert!(refused.contains(expected), "{refused}");
        }
    }

    #[test]
    fn fields_that_tell_of_the_machine_are_refused_by_their_name() {
        let whole = MemberHeader {
            member: blob(),
            stored_bytes: 0,
            sparse_bytes: None,
        }
        .to_blocks();
        for (at, expected) in [
            (106, "mode"),
            (110, "user"),
            (130, "size"),
            (140, "time"),
            (270, "user name"),
            (400, "prefix"),
        ] {
            let mut bent = block(&whole);
            bent[at] = b'7';
            match Header::parse(&with_checksum(bent)) {
                Err(Damage::Field { field, .. }) => assert!(field.contains(expected), "{field}"),
                Ok(header) => assert_eq!((expected, header.bytes != 0), ("size", true)),
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn other_extended_headers_are_refused() {
        let sparse = MemberHeader {
            member: blob(),
            stored_bytes: 512,
            sparse_bytes: Some(1 << 20),
        };
        let pax = Header {
            name: format!("{PAX_DIR}{}", blob()),
            kind: Kind::Pax,
            bytes: 0,
        };
        let records = sparse.pax().unwrap();
        let refused =
            |records: &[u8]| MemberHeader::extended(&pax, records, sparse.ustar()).unwrap_err();
        assert!(
            matches!(refused(&record("mtime", "1")), Damage::PaxKey { key, .. } if key == "mtime")
        );
        assert!(matches!(refused(b"5 a=\n"), Damage::PaxKey { .. }));
        assert!(matches!(
            refused(&[&records[..], b"99 size=1\n"].concat()),
            Damage::Pax { .. }
        ));
        assert!(matches!(
            refused(&[&records[..], &record("size", "512")].concat()),
            Damage::Pax { .. }
        ));
        assert!(matches!(
            refused(&[&records[..], &records].concat()),
            Damage::Pax { .. }
        ));
        assert!(matches!(refused(b""), Damage::Name { .. }));
        assert!(matches!(
            refused(b"18446744073709551615 size=1\n"),
            Damage::Pax { .. }
        ));
        let other = Header {
            name: "x".to_owned(),
            ..pax.clone()
        };
        assert!(MemberHeader::extended(&other, &records, sparse.ustar()).is_err());
        assert!(MemberHeader::extended(&pax, &records, sparse.ustar()).is_ok());
    }
}
