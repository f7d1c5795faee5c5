//! The one namespace of images and snapshots.
//!
//! ```text
//! "<digest>\n" an image | "snapshot <digest>\n" | "reserved <sandbox id>\n" a save to come
//! ```
//!
//! Always: a name is one file that is replaced by rename and changed only under the store's lock,
//! so two claims to one name cannot both win, and what was looked at is what is replaced. What it
//! points at was durable before it.

use std::collections::BTreeMap;

use crate::fs::{Lock, optional};
use crate::named::Named;
use crate::publish::Staged;
use crate::{Digest, Error, Name, SandboxId, Store, lock};

/// A name and what it stands for; one that cannot be read is listed with the reason.
pub type ListedName = (Name, Result<Named, Error>);

/// The names of all snapshots.
#[derive(Debug, Default)]
pub(crate) struct SnapshotNames {
    pub by_digest: BTreeMap<Digest, Vec<Name>>,
    /// Names that may be anything's, and why.
    pub unreadable: Vec<(Name, Error)>,
}

/// Where a snapshot is to be found.
#[derive(Debug, Clone, Copy)]
pub enum Target<'a> {
    /// With `replace`, instead of the snapshot that has the name now.
    Name { name: &'a Name, replace: bool },
    /// No name: kept by the pin that is returned, then collectable.
    Unnamed,
}

/// An image that lost a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemovedImage {
    pub digest: Digest,
    /// Whether it is gone with all of its content. If not, something still reaches it.
    pub collected: bool,
}

/// Who points a name at a snapshot, and what it may take the place of.
#[derive(Debug, Clone, Copy)]
pub(super) struct Claim<'a> {
    pub name: &'a Name,
    pub replace: bool,
    /// The sandbox that is saved: its own reservation gives way.
    pub by: Option<&'a SandboxId>,
}

impl Store {
    /// What a name stands for. A reservation whose sandbox is gone is none.
    pub fn named(&self, name: &Name) -> Result<Option<Named>, Error> {
        match self.read_name(name)? {
            Some(Named::Reserved(sandbox)) if !self.is_alive(&sandbox)? => Ok(None),
            found => Ok(found),
        }
    }

    /// Every name of an image, a snapshot or a save to come.
    pub fn names(&self) -> Result<Vec<ListedName>, Error> {
        let entries = self.files.list(&self.layout.image_names())?;
        let names = entries
            .iter()
            .filter_map(|entry| entry.name.to_str()?.parse::<Name>().ok());
        let named = names.filter_map(|name| Some((self.named(&name).transpose()?, name)));
        Ok(named.map(|(named, name)| (name, named)).collect())
    }

    /// Gives a snapshot a name; with `replace`, instead of the snapshot that has it now.
    pub fn tag_snapshot(&self, digest: &Digest, name: &Name, replace: bool) -> Result<(), Error> {
        let staged = self.stage()?;
        let named = Named::Snapshot(digest.clone());
        self.write_name(&staged, &named)?;
        let held = lock::store(&self.files, &self.layout)?;
        self.snapshot(digest)?;
        self.check_claim(Claim {
            name,
            replace,
            by: None,
        })?;
        self.put_name(&held, &staged, name)
    }

    /// Reserves a name for the later save of a sandbox. Fails if the name is taken.
    pub fn reserve_name(&self, name: &Name, by: &SandboxId) -> Result<(), Error> {
        let staged = self.stage()?;
        self.write_name(&staged, &Named::Reserved(by.clone()))?;
        let held = lock::store(&self.files, &self.layout)?;
        match self.named(name)? {
            Some(holder) if holder != Named::Reserved(by.clone()) => Err(Error::NameInUse {
                name: name.clone(),
                holder,
            }),
            _ => self.put_name(&held, &staged, name),
        }
    }

    /// Releases a name that was reserved for a sandbox. A name that stands for something else by
    /// now stays.
    pub fn release_name(&self, name: &Name, by: &SandboxId) -> Result<(), Error> {
        let held = lock::store(&self.files, &self.layout)?;
        match self.read_name(name)? {
            Some(Named::Reserved(holder)) if holder == *by => self.drop_name(&held, name),
            _ => Ok(()),
        }
    }

    /// Removes the name of a snapshot, and with its last name the snapshot. Returns its digest.
    pub fn remove_snapshot_name(&self, name: &Name) -> Result<Digest, Error> {
        let digest = {
            let held = lock::store(&self.files, &self.layout)?;
            let digest = match self.named(name)? {
                Some(Named::Snapshot(digest)) => digest,
                Some(found) => {
                    return Err(Error::OtherKind {
                        name: name.clone(),
                        found,
                        expected: "a snapshot",
                    });
                }
                None => {
                    return Err(Error::UnknownSnapshot {
                        reference: name.to_string(),
                    });
                }
            };
            self.drop_name(&held, name)?;
            digest
        };
        self.collect_snapshot(&digest)?;
        Ok(digest)
    }

    /// Removes the name of an image, and the image with its warm images and its kernel unless
    /// something still reaches them.
    pub fn remove_image_name(&self, name: &Name) -> Result<RemovedImage, Error> {
        let digest = {
            let held = lock::store(&self.files, &self.layout)?;
            let digest = match self.named(name)? {
                Some(Named::Image(digest)) => digest,
                Some(found) => {
                    return Err(Error::OtherKind {
                        name: name.clone(),
                        found,
                        expected: "an image",
                    });
                }
                None => return Err(Error::UnknownImage { name: name.clone() }),
            };
            self.drop_name(&held, name)?;
            digest
        };
        self.remove_unused_image(digest)
    }

    /// Removes an image with its warm images and its kernel, unless something still reaches them; a
    /// name does, too.
    pub fn remove_unused_image(&self, digest: Digest) -> Result<RemovedImage, Error> {
        self.collect_image(&digest)?;
        let collected = self.files.kind(&self.layout.image(&digest))?.is_none();
        Ok(RemovedImage { digest, collected })
    }

    /// Moves a name whose file cannot be understood to quarantine. A name that is valid by now
    /// stays.
    pub fn put_name_aside(&self, name: &Name) -> Result<(), Error> {
        let held = lock::store(&self.files, &self.layout)?;
        if matches!(self.read_name(name), Err(Error::Corrupt { .. })) {
            self.quarantine(
                &held,
                &self.layout.image_name(name),
                &format!("name-{name}"),
            )?;
        }
        Ok(())
    }

    /// Points a name at an image, instead of the image it pointed at before.
    pub fn set_image_name(&self, name: &Name, digest: &Digest) -> Result<(), Error> {
        let staged = self.stage()?;
        self.write_name(&staged, &Named::Image(digest.clone()))?;
        let held = lock::store(&self.files, &self.layout)?;
        self.image_by_digest(digest)?;
        match self.named(name)? {
            None | Some(Named::Image(_)) => self.put_name(&held, &staged, name),
            Some(holder) => Err(Error::NameInUse {
                name: name.clone(),
                holder,
            }),
        }
    }

    /// Refuses what a claim may not take the place of.
    pub(super) fn check_claim(&self, claim: Claim<'_>) -> Result<(), Error> {
        match self.named(claim.name)? {
            None => Ok(()),
            Some(Named::Snapshot(_)) if claim.replace => Ok(()),
            Some(Named::Reserved(sandbox)) if claim.by == Some(&sandbox) => Ok(()),
            Some(holder) => Err(Error::NameInUse {
                name: claim.name.clone(),
                holder,
            }),
        }
    }

    /// Writes what a name is to hold, durably, for `put_name`.
    pub(super) fn write_name(&self, staged: &Staged, named: &Named) -> Result<(), Error> {
        let path = staged.path().join("name");
        self.files.create(&path, named.to_line().as_bytes())?;
        self.files.sync_file(&path)
    }

    /// The step after which others see the name; under the store's lock.
    pub(super) fn put_name(&self, _held: &Lock, staged: &Staged, name: &Name) -> Result<(), Error> {
        self.files
            .rename(&staged.path().join("name"), &self.layout.image_name(name))?;
        self.files.sync_dir(&self.layout.image_names())
    }

    pub(crate) fn drop_name(&self, _held: &Lock, name: &Name) -> Result<(), Error> {
        self.files.remove_file(&self.layout.image_name(name))?;
        self.files.sync_dir(&self.layout.image_names())
    }

    /// What the file of a name says, whether or not it still holds.
    pub(crate) fn read_name(&self, name: &Name) -> Result<Option<Named>, Error> {
        let path = self.layout.image_name(name);
        let Some(bytes) = optional(self.files.read_small(&path))? else {
            return Ok(None);
        };
        let named = std::str::from_utf8(&bytes).ok().and_then(Named::parse);
        named
            .map(Some)
            .ok_or_else(|| Error::corrupt(path, "its content is not known"))
    }

    pub(crate) fn names_by_snapshot(&self) -> Result<SnapshotNames, Error> {
        let mut found = SnapshotNames::default();
        for (name, named) in self.names()? {
            match named {
                Ok(Named::Snapshot(digest)) => {
                    found.by_digest.entry(digest).or_default().push(name)
                }
                Ok(Named::Image(_) | Named::Reserved(_)) => {}
                Err(error) => found.unreadable.push((name, error)),
            }
        }
        Ok(found)
    }

    /// Whether a sandbox exists or is being created.
    fn is_alive(&self, sandbox: &SandboxId) -> Result<bool, Error> {
        let places = [
            self.layout.sandbox(sandbox),
            self.layout.staging().join(sandbox.as_str()),
        ];
        for place in places {
            if self.files.kind(&place)?.is_some() {
                return Ok(true);
            }
        }
        Ok(false)
    }
}
