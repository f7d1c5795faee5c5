//! Records: JSON files with a schema number.
//!
//! Canonical JSON here is RFC 8785 restricted to what our records hold: objects with sorted ASCII
//! keys, no blanks, integers below 2^53. Identity of an image or a kernel bundle is the SHA-256 of
//! these bytes.

use std::path::Path;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::Error;
use crate::fs::Files;

/// A record that says which schema it is written in.
pub(crate) trait Record: Serialize + DeserializeOwned {
    /// The largest that is known.
    const SCHEMA: u64;

    /// Whether no smaller schema could say the same. Otherwise one content would have two
    /// identities.
    fn has_least_schema(&self) -> bool {
        true
    }
}

#[derive(Deserialize)]
struct Schema {
    schema: u64,
}

pub(crate) fn canonical<T: Serialize>(record: &T) -> Vec<u8> {
    let mut value = serde_json::to_value(record).expect("records hold nothing that JSON cannot");
    // Sorted already, unless some crate of the build turns on serde_json's `preserve_order`.
    value.sort_all_objects();
    serde_json::to_vec(&value).expect("a value is always JSON")
}

/// Reads a record that may hold fields of later versions of its schema.
pub(crate) fn read<T: Record>(files: &Files, path: &Path) -> Result<T, Error> {
    parse(path, &files.read(path)?)
}

/// Reads a record whose bytes are its identity: duplicate keys, unknown fields and other spellings
/// are refused.
pub(crate) fn read_canonical<T: Record>(files: &Files, path: &Path) -> Result<(T, Vec<u8>), Error> {
    let bytes = files.read(path)?;
    Ok((parse_canonical(path, &bytes)?, bytes))
}

/// Like `read_canonical`, for bytes that come from elsewhere under the name `path`.
pub(crate) fn parse_canonical<T: Record>(path: &Path, bytes: &[u8]) -> Result<T, Error> {
    let record: T = parse(path, bytes)?;
    if !record.has_least_schema() || canonical(&record) != bytes {
        return Err(Error::corrupt(path, "not in canonical form"));
    }
    Ok(record)
}

fn parse<T: Record>(path: &Path, bytes: &[u8]) -> Result<T, Error> {
    let Schema { schema } =
        serde_json::from_slice(bytes).map_err(|error| Error::corrupt(path, error))?;
    if schema > T::SCHEMA {
        return Err(Error::NewerSchema {
            path: path.to_owned(),
            found: schema,
            known: T::SCHEMA,
        });
    }
    serde_json::from_slice(bytes).map_err(|error| Error::corrupt(path, error))
}
