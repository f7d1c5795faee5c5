//! `artifact.json`: what the rest of an artifact is.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::record::{self, Record};
use crate::{Digest, Error};

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ArtifactRecord {
    pub schema: u64,
    pub snapshot: Digest,
    /// The snapshot whose members are left out.
    pub since: Option<Digest>,
    /// Whether image and kernel belong to it.
    pub image: bool,
}

impl Record for ArtifactRecord {
    const SCHEMA: u64 = 1;
}

impl ArtifactRecord {
    pub(super) fn new(snapshot: &Digest, since: Option<Digest>, image: bool) -> Self {
        Self {
            schema: Self::SCHEMA,
            snapshot: snapshot.clone(),
            since,
            image,
        }
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        record::canonical(self)
    }

    pub(super) fn parse(bytes: &[u8]) -> Result<Self, Error> {
        let path = Path::new("artifact.json");
        let record: Self = record::parse_canonical(path, bytes)?;
        match record.schema {
            Self::SCHEMA => Ok(record),
            other => Err(Error::corrupt(path, format!("there is no schema {other}"))),
        }
    }
}
