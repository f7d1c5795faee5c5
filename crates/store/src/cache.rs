//! The cache: JSON values that are expensive to compute and may be deleted at any time.
//!
//! Always: an entry is whole or counts as absent. Nothing here is synced.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::fs::optional;
use crate::{Error, Name, Store};

impl Store {
    /// The value under `key`; an entry that cannot be understood is one that is not there.
    pub fn cached<T: DeserializeOwned>(&self, key: &Name) -> Result<Option<T>, Error> {
        let bytes = self
            .files
            .read_if_exists(&self.layout.cache().join(key.as_str()))?;
        Ok(bytes.and_then(|bytes| serde_json::from_slice(&bytes).ok()))
    }

    pub fn cache<T: Serialize>(&self, key: &Name, value: &T) -> Result<(), Error> {
        let path = self.layout.cache().join(key.as_str());
        let bytes = serde_json::to_vec(value).map_err(|error| Error::corrupt(&path, error))?;
        let staged = self.stage()?;
        let new = staged.path().join("entry");
        self.files.create(&new, &bytes)?;
        self.files.rename(&new, &path)
    }

    /// Removes what is under `key`. Nothing being there is fine.
    pub fn forget_cached(&self, key: &Name) -> Result<(), Error> {
        optional(
            self.files
                .remove_file(&self.layout.cache().join(key.as_str())),
        )
        .map(drop)
    }
}
