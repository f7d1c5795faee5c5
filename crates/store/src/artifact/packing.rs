//! Snapshots and images as lists of members, for stores that keep content by its digest.
//!
//! ```text
//! snapshot   manifest.json, then everything of its image, then its blobs
//! image      image.json, bundle.json, kernel, initramfs, modules, rootfs.raw
//! ```
//!
//! Always: each content once, in the order in which it travels in an artifact. What is read to its
//! end is what it is named by, or the last read fails. When it fails: a damaged layer is in
//! quarantine, as after an export.

use std::fmt;
use std::io::{self, Read};

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::parts::{Part, Scope};
use super::{Damage, Member};
use crate::image::KernelRecord;
use crate::{Digest, Error, Image, Pinned, Store};

/// What can be packed.
#[derive(Debug, Clone, Copy)]
pub enum Packable<'a> {
    /// With its image.
    Snapshot(&'a Pinned),
    /// One that stays meanwhile: see [`Store::pin_image`].
    Image(&'a Image),
}

/// A file of a snapshot or an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PackedMember {
    pub digest: Digest,
    /// Not compressed.
    pub bytes: u64,
    /// What it is where it comes first: the same content may be something else, too.
    pub role: Role,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// `manifest.json` of the snapshot.
    Manifest,
    /// `image.json`
    Image,
    /// `bundle.json`
    Kernel,
    KernelFile,
    Initramfs,
    Module,
    Rootfs,
    DiskLayer,
    MemoryLayer,
    Devices,
    Commands,
    Output,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Manifest => "manifest",
            Self::Image => "image",
            Self::Kernel => "kernel",
            Self::KernelFile => "kernel_file",
            Self::Initramfs => "initramfs",
            Self::Module => "module",
            Self::Rootfs => "rootfs",
            Self::DiskLayer => "disk_layer",
            Self::MemoryLayer => "memory_layer",
            Self::Devices => "devices",
            Self::Commands => "commands",
            Self::Output => "output",
        })
    }
}

impl Store {
    /// What a snapshot or an image consists of.
    pub fn packing(&self, what: &Packable<'_>) -> Result<Vec<PackedMember>, Error> {
        let member = |part: Part| PackedMember {
            digest: part.blob.digest,
            bytes: part.blob.bytes,
            role: part.role,
        };
        Ok(self.packed_parts(what)?.into_iter().map(member).collect())
    }

    /// The bytes of a member from front to back, not compressed. The read that ends it fails with
    /// [`io::ErrorKind::InvalidData`] if they are not what it is named by.
    pub fn open_member(
        &self,
        what: &Packable<'_>,
        member: &PackedMember,
    ) -> Result<Box<dyn Read + Send>, Error> {
        let is_it =
            |part: &Part| part.blob.digest == member.digest && part.blob.bytes == member.bytes;
        let part = self.packed_parts(what)?.into_iter().find(is_it);
        let part = part.ok_or_else(|| Damage::Surplus {
            member: Member::Blob(member.digest.clone()),
        })?;
        let state = State::Reading {
            content: part.stream(self)?,
            hash: Sha256::new(),
            left: part.blob.bytes,
        };
        Ok(Box::new(Checked {
            store: self.handle(),
            part,
            state,
        }))
    }

    fn packed_parts(&self, what: &Packable<'_>) -> Result<Vec<Part>, Error> {
        match what {
            Packable::Snapshot(snapshot) => {
                let path = self.layout.snapshot(&snapshot.digest).join("manifest.json");
                let mut parts = vec![self.record_part(Role::Manifest, &snapshot.digest, path)?];
                parts.extend(self.parts(snapshot, Scope::WithImage)?);
                Ok(parts)
            }
            Packable::Image(image) => self.image_parts(&image.digest, &image.record.kernel),
        }
    }
}

/// What the files of a kernel bundle are, in their order.
pub(super) fn kernel_roles(record: &KernelRecord) -> impl Iterator<Item = Role> {
    let initramfs = record.initramfs.iter().map(|_| Role::Initramfs);
    let modules = record.modules.iter().map(|_| Role::Module);
    [Role::KernelFile]
        .into_iter()
        .chain(initramfs)
        .chain(modules)
}

/// The content of a part that is hashed on its way.
struct Checked {
    store: Store,
    part: Part,
    state: State,
}

enum State {
    Reading {
        content: Box<dyn Read + Send>,
        hash: Sha256,
        left: u64,
    },
    Whole,
    Damaged,
}

impl Read for Checked {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let State::Reading {
            content,
            hash,
            left,
        } = &mut self.state
        else {
            return self.end();
        };
        let wanted = buffer
            .len()
            .min(usize::try_from(*left).unwrap_or(usize::MAX));
        let read = match content.read(&mut buffer[..wanted]) {
            Err(error) if error.kind() == io::ErrorKind::InvalidData => return self.refuse(),
            read => read?,
        };
        hash.update(&buffer[..read]);
        *left -= read as u64;
        match (read, *left) {
            // The bytes that end it are not given out before all of them are known to be right.
            (_, 0) => self.finish().map(|()| read),
            (0, _) if wanted > 0 => self.refuse(),
            _ => Ok(read),
        }
    }
}

impl Checked {
    fn finish(&mut self) -> io::Result<()> {
        let State::Reading { hash, .. } = &self.state else {
            return Ok(());
        };
        if Digest::finish(hash.clone()) != self.part.blob.digest {
            return self.refuse().map(drop);
        }
        self.state = State::Whole;
        Ok(())
    }

    fn end(&self) -> io::Result<usize> {
        match self.state {
            State::Damaged => Err(io::ErrorKind::InvalidData.into()),
            State::Reading { .. } | State::Whole => Ok(0),
        }
    }

    fn refuse(&mut self) -> io::Result<usize> {
        self.state = State::Damaged;
        Err(io::Error::new(
            io::ErrorKind::InvalidData,
            self.part.damage(&self.store),
        ))
    }
}
