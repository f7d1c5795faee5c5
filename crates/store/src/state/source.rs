//! Reading a state, wherever it lives: in a sandbox or as a warm image.

use std::path::{Path, PathBuf};

use super::{Sealed, StateManifest, disk_file, memory_file};
use crate::fs::{Files, Kind, optional};
use crate::{Error, LayerId, record};

/// A state and where its parts are.
#[derive(Debug, Clone)]
pub struct StateSource {
    pub(super) files: Files,
    manifest: StateManifest,
    places: Places,
}

/// The three directories that the parts of a state are in.
#[derive(Debug, Clone)]
pub(crate) struct Places {
    /// Manifest, devices, the output of commands.
    pub own: PathBuf,
    pub disks: PathBuf,
    pub memory: PathBuf,
}

impl StateSource {
    pub(crate) fn read(files: &Files, places: Places) -> Result<Self, Error> {
        let path = places.own.join("manifest.json");
        let manifest: StateManifest = record::read(files, &path)?;
        Ok(Self {
            files: files.clone(),
            manifest,
            places,
        })
    }

    pub fn manifest(&self) -> &StateManifest {
        &self.manifest
    }

    /// The state of the devices; there is none where the disk alone was captured.
    pub fn devices(&self) -> PathBuf {
        self.places.own.join("devices")
    }

    /// What commands had written; segments name files below it.
    pub fn execs(&self) -> PathBuf {
        self.places.own.join("execs")
    }

    pub fn disk_layer(&self, layer: &LayerId) -> PathBuf {
        self.places.disks.join(disk_file(layer))
    }

    pub fn memory_layer(&self, layer: &LayerId) -> PathBuf {
        self.places.memory.join(memory_file(layer))
    }

    /// Whether it is durable, all of it.
    pub fn is_sealed(&self) -> Result<bool, Error> {
        Ok(self.sealed()?.is_some())
    }

    /// Whether a file of it could not be synced.
    pub(crate) fn is_doubtful(&self) -> Result<bool, Error> {
        for (_, path) in self.members()? {
            if self.files.is_doubtful(&path)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    pub(crate) fn sealed(&self) -> Result<Option<Sealed>, Error> {
        optional(record::read(
            &self.files,
            &self.places.own.join("sealed.json"),
        ))
    }

    pub(crate) fn places(&self) -> &Places {
        &self.places
    }

    /// Every file of the state under its name in `sealed.json`, which is its path in a warm image.
    pub(crate) fn members(&self) -> Result<Vec<(String, PathBuf)>, Error> {
        let own = |name: &str| (name.to_owned(), self.places.own.join(name));
        let mut found = vec![own("manifest.json")];
        if self.files.kind(&self.devices())?.is_some() {
            found.push(own("devices"));
        }
        self.add_tree("execs", &self.execs(), &mut found)?;
        let disks = self
            .manifest
            .disk
            .iter()
            .map(|id| (format!("disks/{}", disk_file(id)), self.disk_layer(id)));
        let memory = self.manifest.memory.layers().iter();
        let memory =
            memory.map(|id| (format!("memory/{}", memory_file(id)), self.memory_layer(id)));
        found.extend(disks.chain(memory));
        Ok(found)
    }

    fn add_tree(
        &self,
        name: &str,
        path: &Path,
        found: &mut Vec<(String, PathBuf)>,
    ) -> Result<(), Error> {
        for entry in optional(self.files.list(path))?.unwrap_or_default() {
            let path = path.join(&entry.name);
            let file = entry
                .name
                .to_str()
                .ok_or_else(|| Error::corrupt(&path, "its name is not text"))?;
            let name = format!("{name}/{file}");
            match entry.kind {
                Kind::Dir => self.add_tree(&name, &path, found)?,
                Kind::File => found.push((name, path)),
                Kind::Other => return Err(Error::corrupt(path, "neither a file nor a directory")),
            }
        }
        Ok(())
    }
}
