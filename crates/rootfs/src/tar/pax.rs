//! Extended headers: records of `LENGTH KEY=VALUE\n` for everything that does not fit into a
//! header.

use std::collections::BTreeMap;

use base64::Engine;
use base64::alphabet::STANDARD;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use sandtree_disk::ext4::write::Time;

use super::header::Bad;
use super::number::{decimal, time};
use super::sparse::Piece;
use crate::staging::is_kept_xattr;

const DAMAGED: Bad = "an extended header is damaged";
/// Accepts padding, but does not require it.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// The extended headers of a member. An empty value cancels the value for all members.
#[derive(Debug, Clone, Default)]
pub(super) struct Records {
    pub path: Option<Vec<u8>>,
    pub link: Option<Vec<u8>>,
    pub bytes: Option<u64>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub modified: Option<Time>,
    pub major: Option<u32>,
    pub minor: Option<u32>,
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    /// The form of bsdtar, which writes both forms or only this one.
    libarchive_xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    pub sparse: Sparse,
}

/// The records of a sparse file, in any of the three forms of GNU tar.
#[derive(Debug, Clone, Default)]
pub(super) struct Sparse {
    pub name: Option<Vec<u8>>,
    pub bytes: Option<u64>,
    /// Form 1.0: the map is before the bytes.
    pub major: Option<u32>,
    /// The map of the forms 0.0 and 0.1.
    pub map: Vec<Piece>,
    offset: Option<u64>,
}

impl Records {
    pub fn read(&mut self, mut bytes: &[u8]) -> Result<(), Bad> {
        while !bytes.is_empty() {
            let space = bytes.iter().position(|byte| *byte == b' ').ok_or(DAMAGED)?;
            let length: usize = decimal(&bytes[..space])?;
            let record = bytes.get(space + 1..length).ok_or(DAMAGED)?;
            let record = record.strip_suffix(b"\n").ok_or(DAMAGED)?;
            let equals = record
                .iter()
                .position(|byte| *byte == b'=')
                .ok_or(DAMAGED)?;
            self.take(&record[..equals], &record[equals + 1..])?;
            bytes = &bytes[length..];
        }
        Ok(())
    }

    /// The memory that the records use.
    pub fn weight(&self) -> usize {
        let pairs = self.xattrs.iter().chain(&self.libarchive_xattrs);
        let texts = [&self.path, &self.link, &self.sparse.name];
        pairs
            .map(|(name, value)| name.len() + value.len() + 64)
            .sum::<usize>()
            + texts
                .iter()
                .filter_map(|text| text.as_ref())
                .map(Vec::len)
                .sum::<usize>()
            + self.sparse.map.len() * size_of::<Piece>()
    }

    pub fn into_xattrs(self) -> BTreeMap<Vec<u8>, Vec<u8>> {
        let mut all = self.libarchive_xattrs;
        all.extend(self.xattrs);
        all
    }

    fn take(&mut self, key: &[u8], value: &[u8]) -> Result<(), Bad> {
        match key {
            b"path" => self.path = text(value),
            b"linkpath" => self.link = text(value),
            b"size" => self.bytes = number(value)?,
            b"uid" => self.uid = number(value)?,
            b"gid" => self.gid = number(value)?,
            b"mtime" => {
                self.modified = if value.is_empty() {
                    None
                } else {
                    Some(time(value)?)
                }
            }
            b"SCHILY.devmajor" => self.major = number(value)?,
            b"SCHILY.devminor" => self.minor = number(value)?,
            _ => return self.take_other(key, value),
        }
        Ok(())
    }

    fn take_other(&mut self, key: &[u8], value: &[u8]) -> Result<(), Bad> {
        if let Some(name) = key.strip_prefix(b"SCHILY.xattr.") {
            if is_kept_xattr(name) {
                self.xattrs.insert(name.to_vec(), value.to_vec());
            }
        } else if let Some(name) = key.strip_prefix(b"LIBARCHIVE.xattr.") {
            let name = percent(name)?;
            let value = BASE64.decode(value).map_err(|_| DAMAGED)?;
            if is_kept_xattr(&name) {
                self.libarchive_xattrs.insert(name, value);
            }
        } else if let Some(key) = key.strip_prefix(b"GNU.sparse.") {
            self.sparse.take(key, value)?;
        }
        Ok(())
    }
}

impl Sparse {
    pub fn is_sparse(&self) -> bool {
        self.bytes.is_some() || self.major.is_some() || !self.map.is_empty()
    }

    fn take(&mut self, key: &[u8], value: &[u8]) -> Result<(), Bad> {
        match key {
            b"name" => self.name = text(value),
            b"size" | b"realsize" => self.bytes = number(value)?,
            b"major" => self.major = number(value)?,
            b"offset" => self.offset = number(value)?,
            b"numbytes" => {
                let offset = self
                    .offset
                    .take()
                    .ok_or("a part of a sparse file has no offset")?;
                self.map.push(Piece {
                    offset,
                    bytes: decimal(value)?,
                });
            }
            b"map" => self.map = pieces(value)?,
            _ => {}
        }
        Ok(())
    }
}

/// Parses `OFFSET,BYTES,OFFSET,BYTES…`.
fn pieces(value: &[u8]) -> Result<Vec<Piece>, Bad> {
    let numbers = value
        .split(|byte| *byte == b',')
        .filter(|_| !value.is_empty());
    let numbers = numbers.map(decimal).collect::<Result<Vec<u64>, Bad>>()?;
    let (pairs, rest) = numbers.as_chunks::<2>();
    if !rest.is_empty() {
        return Err("a part of a sparse file has no size");
    }
    Ok(pairs
        .iter()
        .map(|[offset, bytes]| Piece {
            offset: *offset,
            bytes: *bytes,
        })
        .collect())
}

fn text(value: &[u8]) -> Option<Vec<u8>> {
    (!value.is_empty()).then(|| value.to_vec())
}

fn number<T: std::str::FromStr>(value: &[u8]) -> Result<Option<T>, Bad> {
    if value.is_empty() {
        Ok(None)
    } else {
        decimal(value).map(Some)
    }
}

fn percent(text: &[u8]) -> Result<Vec<u8>, Bad> {
    let mut rest = text.iter();
    let mut plain = Vec::with_capacity(text.len());
    let digit = |byte: Option<&u8>| {
        byte.and_then(|byte| char::from(*byte).to_digit(16))
            .ok_or(DAMAGED)
    };
    while let Some(byte) = rest.next() {
        plain.push(match byte {
            b'%' => (digit(rest.next())? << 4 | digit(rest.next())?) as u8,
            _ => *byte,
        });
    }
    Ok(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_read_and_cancelled() {
        let mut records = Records::default();
        records
            .read(b"13 path=a\nbc\n10 uid=77\n19 mtime=-1.250000\n")
            .expect("they are fine");
        assert_eq!(records.path.as_deref(), Some(&b"a\nbc"[..]));
        assert_eq!(records.uid, Some(77));
        assert_eq!(
            records.modified,
            Some(Time {
                seconds: -2,
                nanoseconds: 750_000_000
            })
        );
        records.read(b"8 path=\n").expect("it is fine");
        assert_eq!(records.path, None);
        for bad in [
            &b"0 a=b\n"[..],
            b"3 a=b\n",
            b"99 a=b\n",
            b"6 a=bc",
            b"5 ab\n",
            b"a",
            b"99999999999999999999 a=b\n",
            b"2 ",
        ] {
            assert!(Records::default().read(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn extended_attributes_of_bsdtar_are_read() {
        let mut records = Records::default();
        records
            .take(b"LIBARCHIVE.xattr.user.a%3Db", b"aGVsbG8")
            .expect("it is fine");
        records
            .take(b"LIBARCHIVE.xattr.com.apple.x", b"aGVsbG8=")
            .expect("it is fine");
        assert_eq!(
            records.into_xattrs(),
            [(b"user.a=b".to_vec(), b"hello".to_vec())].into()
        );
    }
}
